//! A whole running activator, between a controller and an autoscaler that the tests play.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::Ipv4Addr, path::PathBuf, pin::Pin};

use activator::ActivatorConfig;
use common::{
    link,
    outbox::Outbox,
    wire::{
        PodReportItem, RouteChange, RouteKey, UsageItem,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            routes_server::{Routes, RoutesServer},
            usage_server::{Usage, UsageServer},
        },
    },
};
use futures::Stream;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Server};

use crate::harness::LONG;

pub struct FakeRoutesServer {
    pub routes: Outbox<RouteKey, RouteChange>,
    pub stop: CancellationToken,
}

#[tonic::async_trait]
impl Routes for FakeRoutesServer {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _subscriber: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(link::route_stream(
            self.routes.subscribe(),
            self.stop.clone(),
            Some,
        ))))
    }
}

pub struct FakePodReportsServer(pub mpsc::Sender<PodReportItem>, pub CancellationToken);

#[tonic::async_trait]
impl Pods for FakePodReportsServer {
    async fn report(
        &self,
        items: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        // Tests may leave reports unread, so items beyond the channel's capacity are dropped.
        let each = |item| drop(self.0.try_send(item));
        link::receive_items(items.into_inner(), &self.1, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

pub struct FakeUsageServer(pub mpsc::Sender<UsageItem>, pub CancellationToken);

#[tonic::async_trait]
impl Usage for FakeUsageServer {
    async fn report(
        &self,
        items: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        // Tests may leave reports unread, so items beyond the channel's capacity are dropped.
        let each = |item| drop(self.0.try_send(item));
        link::receive_items(items.into_inner(), &self.1, each).await?;
        Ok(Response::new(raw::Empty {}))
    }
}

/// Running activator, with the streams to and from it.
pub struct RunningActivatorFixture {
    pub routes: Outbox<RouteKey, RouteChange>,
    pub pods: mpsc::Receiver<PodReportItem>,
    pub usages: mpsc::Receiver<UsageItem>,
    /// Cancelled to stop the activator.
    pub stop: CancellationToken,
    activator: JoinHandle<Result<(), activator::ActivatorError>>,
    /// Cancelled to stop the servers of the controller and the autoscaler.
    end: CancellationToken,
    folder: PathBuf,
}

impl RunningActivatorFixture {
    /// Starts an activator with the default configuration after `change`. `name` is unique among a program's tests.
    pub async fn start(name: &str, change: impl FnOnce(&mut ActivatorConfig)) -> Self {
        let folder = std::env::temp_dir().join(format!("activator-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let endpoint = |name: &str| format!("unix:{}/{name}.sock", folder.display());
        let (stop, end) = (CancellationToken::new(), CancellationToken::new());
        let routes = Outbox::new();
        let (report_tx, pods) = mpsc::channel(1000);
        let (usage_tx, usages) = mpsc::channel(1000);
        let control = Server::builder()
            .add_service(RoutesServer::new(FakeRoutesServer {
                routes: routes.clone(),
                stop: end.clone(),
            }))
            .add_service(PodsServer::new(FakePodReportsServer(report_tx, end.clone())));
        let scale =
            Server::builder().add_service(UsageServer::new(FakeUsageServer(usage_tx, end.clone())));
        let (controller, autoscaler) = (endpoint("controller"), endpoint("autoscaler"));
        let mut config = ActivatorConfig::defaults();
        config.listen = vec![Ipv4Addr::LOCALHOST.into()];
        config.admin = "127.0.0.1:0".parse().unwrap();
        (config.controller, config.autoscaler) = (controller.clone(), autoscaler.clone());
        config.drain_ms = Some(100);
        change(&mut config);
        let (control_end, scale_end) = (end.clone(), end.clone());
        tokio::spawn(async move { link::serve(&controller, control, control_end).await });
        tokio::spawn(async move { link::serve(&autoscaler, scale, scale_end).await });
        let activator = tokio::spawn(activator::run(config, stop.clone()));
        Self { routes, pods, usages, stop, activator, end, folder }
    }

    /// Waits until the activator reports that all changes of the table are in force.
    pub async fn wait_in_force(&mut self) {
        let version = self.routes.version();
        next_item(&mut self.pods, |item| applied_version(item).filter(|it| *it == version)).await;
    }

    /// Returns true if the activator has ended.
    pub fn is_stopped(&self) -> bool {
        self.activator.is_finished()
    }

    /// Waits until the activator has ended.
    pub async fn wait_stopped(mut self) {
        tokio::time::timeout(LONG, &mut self.activator).await.unwrap().unwrap().unwrap();
        self.end.cancel();
        std::fs::remove_dir_all(&self.folder).unwrap();
    }

    /// Waits until the activator has failed. Returns its error.
    pub async fn wait_failed(mut self) -> activator::ActivatorError {
        let ended = tokio::time::timeout(LONG, &mut self.activator).await.unwrap().unwrap();
        self.end.cancel();
        std::fs::remove_dir_all(&self.folder).unwrap();
        ended.unwrap_err()
    }
}

/// Next item for which `wanted` returns a value.
pub async fn next_item<T, R>(items: &mut mpsc::Receiver<T>, wanted: impl Fn(T) -> Option<R>) -> R {
    let find = async {
        loop {
            let item = items.recv().await.expect("the stream is open");
            if let Some(found) = wanted(item) {
                return found;
            }
        }
    };
    tokio::time::timeout(LONG, find).await.expect("the item comes in time")
}

pub fn applied_version(item: PodReportItem) -> Option<u64> {
    if let PodReportItem::Applied(version) = item { Some(version) } else { None }
}
