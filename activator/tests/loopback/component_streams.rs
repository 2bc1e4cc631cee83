//! The whole activator, between a controller and an autoscaler.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use common::wire::{ConnectionPath, RouteChange, RouteKey, RoutingPhase, UsageItem, UsageSample};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

use crate::{
    harness::{
        GET, OK, hello_revision, hello_service, pod, read_rest, revision, service, start_pod,
        unused_port,
    },
    running_activator::{RunningActivatorFixture, next_item},
};

fn usage(item: UsageItem) -> Option<UsageSample> {
    if let UsageItem::Sample(seen) = item { Some(seen) } else { None }
}

#[tokio::test]
async fn a_waiting_request_is_reported_and_dispatched_to_the_pod_of_the_table() {
    let mut running = RunningActivatorFixture::start("links", |_| {}).await;
    let port = unused_port();
    let mut direct = hello_service(port);
    direct.connection_path = ConnectionPath::Direct;
    running.routes.set(RouteKey::Revision(revision()), RouteChange::Revision(hello_revision()));
    running.routes.set(RouteKey::Service(service()), RouteChange::Service(direct));
    running.wait_in_force().await;

    let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    client.write_all(GET.as_bytes()).await.unwrap();
    let seen = next_item(&mut running.usages, usage).await;
    assert_eq!((&seen.key.revision, &seen.key.pod), (&revision(), &None));
    assert_eq!((seen.totals.started, seen.totals.in_flight()), (1, 1));
    assert_eq!(seen.client, Some([127, 0, 0, 1].into()));

    let server = start_pod(OK, Duration::ZERO).await;
    let ready = pod("p", server.address, RoutingPhase::Ready);
    running.routes.set(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    assert!(read_rest(&mut client).await.ends_with("hello"));
    running.wait_in_force().await;
    next_item(&mut running.usages, |item| usage(item).filter(|it| it.totals.in_flight() == 0))
        .await;

    running.stop.cancel();
    running.wait_stopped().await;
}
