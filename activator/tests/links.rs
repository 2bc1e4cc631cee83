//! The activator as a whole, between a controller and an autoscaler.
#![allow(clippy::unwrap_used, reason = "tests")]

mod harness;

use std::{net::Ipv4Addr, pin::Pin, time::Duration};

use activator::Config;
use common::{
    link,
    outbox::Outbox,
    wire::{
        Path, PodItem, PodPhase, RouteChange, RouteKey, UsageItem, UsageSeen,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            routes_server::{Routes, RoutesServer},
            usage_server::{Usage, UsageServer},
        },
    },
};
use futures::Stream;
use harness::{GET, LONG, OK, hello, hello_1, pod, rest, revision, server, service};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, sync::mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Server};

struct Controller {
    routes: Outbox<RouteKey, RouteChange>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl Routes for Controller {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _who: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(link::route_stream(
            self.routes.subscribe(),
            self.stop.clone(),
            Some,
        ))))
    }
}

struct Reports(mpsc::Sender<PodItem>, CancellationToken);

#[tonic::async_trait]
impl Pods for Reports {
    async fn report(
        &self,
        items: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let each = |item| drop(self.0.try_send(item));
        link::receive(items.into_inner(), &self.1, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

struct Autoscaler(mpsc::Sender<UsageItem>, CancellationToken);

#[tonic::async_trait]
impl Usage for Autoscaler {
    async fn report(
        &self,
        items: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let each = |item| drop(self.0.try_send(item));
        link::receive(items.into_inner(), &self.1, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

/// The next item for which `wanted` has an answer.
async fn next<T, R>(items: &mut mpsc::Receiver<T>, wanted: impl Fn(T) -> Option<R>) -> R {
    let find = async {
        loop {
            let item = items.recv().await.expect("the stream stands");
            if let Some(found) = wanted(item) {
                return found;
            }
        }
    };
    tokio::time::timeout(LONG, find).await.expect("is told in time")
}

fn applied(item: PodItem) -> Option<u64> {
    if let PodItem::Applied(version) = item { Some(version) } else { None }
}

fn usage(item: UsageItem) -> Option<UsageSeen> {
    if let UsageItem::Seen(seen) = item { Some(seen) } else { None }
}

#[tokio::test]
async fn a_request_wakes_its_revision_and_the_table_lets_it_go() {
    let folder = std::env::temp_dir().join(format!("activator-links-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let endpoint = |name: &str| format!("unix:{}/{name}.sock", folder.display());
    let stop = CancellationToken::new();
    let routes = Outbox::new();
    let (seen, mut pods) = mpsc::channel(1000);
    let (told, mut usages) = mpsc::channel(1000);
    let control = Server::builder()
        .add_service(RoutesServer::new(Controller { routes: routes.clone(), stop: stop.clone() }))
        .add_service(PodsServer::new(Reports(seen, stop.clone())));
    let scale = Server::builder().add_service(UsageServer::new(Autoscaler(told, stop.clone())));
    let (at_controller, at_autoscaler) = (endpoint("controller"), endpoint("autoscaler"));
    let mut config = Config::defaults();
    config.listen = vec![Ipv4Addr::LOCALHOST.into()];
    config.admin = "127.0.0.1:0".parse().unwrap();
    (config.controller, config.autoscaler) = (at_controller.clone(), at_autoscaler.clone());
    config.drain_ms = 100;
    let (control_stop, scale_stop) = (stop.clone(), stop.clone());
    tokio::spawn(async move { link::serve(&at_controller, control, control_stop).await });
    tokio::spawn(async move { link::serve(&at_autoscaler, scale, scale_stop).await });
    let running = tokio::spawn(activator::run(config, stop.clone()));

    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut direct = hello(port);
    direct.path = Path::Direct;
    routes.set(RouteKey::Revision(revision()), RouteChange::Revision(hello_1()));
    routes.set(RouteKey::Service(service()), RouteChange::Service(direct));
    let version = routes.version();
    next(&mut pods, |item| applied(item).filter(|it| *it == version)).await;

    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    client.write_all(GET.as_bytes()).await.unwrap();
    let seen = next(&mut usages, usage).await;
    assert_eq!((&seen.key.revision, &seen.key.pod), (&revision(), &None));
    assert_eq!((seen.totals.started, seen.totals.in_flight()), (1, 1));

    let server = server(OK, Duration::ZERO).await;
    let ready = pod("p", server.address, PodPhase::Ready);
    routes.set(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    assert!(rest(&mut client).await.ends_with("hello"));
    let version = routes.version();
    next(&mut pods, |item| applied(item).filter(|it| *it == version)).await;
    next(&mut usages, |item| usage(item).filter(|it| it.totals.in_flight() == 0)).await;

    stop.cancel();
    tokio::time::timeout(LONG, running).await.unwrap().unwrap().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}
