//! A whole activator with raw TCP connections: what it reports of them, and what becomes of them when it stops.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io;

use activator::ActivatorConfig;
use common::wire::{
    AppProtocol, RevisionEntry, RouteChange, RouteKey, RoutingPhase, UsageItem, UsageSample,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    harness::{
        LONG, hello_revision, hello_service, pod, read_rest, read_until, revision, service,
        start_pod_with, unused_port,
    },
    running_activator::{RunningActivatorFixture, next_item},
    tcp::{assert_served, greet_and_echo},
};

/// Starts an activator with a service of raw TCP that has no pod. Returns its port, too.
async fn start_tcp_service(
    name: &str,
    change: impl FnOnce(&mut ActivatorConfig),
) -> (RunningActivatorFixture, u16) {
    let mut running = RunningActivatorFixture::start(name, change).await;
    let (port, entry) = (unused_port(), hello_revision());
    let entry = RevisionEntry { protocol: AppProtocol::Tcp, ..entry };
    running.routes.set(RouteKey::Revision(revision()), RouteChange::Revision(entry));
    running.routes.set(RouteKey::Service(service()), RouteChange::Service(hello_service(port)));
    running.wait_in_force().await;
    (running, port)
}

async fn add_pod(running: &mut RunningActivatorFixture) {
    let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
    let ready = pod("p", address, RoutingPhase::Ready);
    running.routes.set(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    running.wait_in_force().await;
}

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

/// Waits until connections are accepted no more.
async fn wait_until_closed(port: u16) {
    let closed = async {
        while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, closed).await.unwrap();
}

async fn read_reset(client: &mut TcpStream) -> io::Error {
    let read = tokio::time::timeout(LONG, client.read(&mut [0])).await.expect("ends in time");
    read.expect_err("no orderly end")
}

fn usage(item: UsageItem) -> Option<UsageSample> {
    if let UsageItem::Sample(seen) = item { Some(seen) } else { None }
}

#[tokio::test]
async fn connections_are_reported_while_they_wait() {
    let (mut running, port) = start_tcp_service("tcp-usage", |_| {}).await;
    let mut clients = [connect(port).await, connect(port).await, connect(port).await];
    let in_flight = |count| {
        move |item| usage(item).filter(|seen: &UsageSample| seen.totals.in_flight() == count)
    };
    let seen = next_item(&mut running.usages, in_flight(3)).await;
    assert_eq!((&seen.key.revision, &seen.key.pod, seen.totals.started), (&revision(), &None, 3));
    add_pod(&mut running).await;
    for client in &mut clients {
        assert_served(client).await;
    }
    let seen = next_item(&mut running.usages, in_flight(0)).await;
    assert_eq!((seen.totals.started, seen.totals.finished, seen.totals.abandoned), (3, 3, 0));
    drop(clients);
    running.stop.cancel();
    running.wait_stopped().await;
}

fn drains_for_long(config: &mut ActivatorConfig) {
    config.linger_ms = Some(0);
    (config.drain_ms, config.upgraded_drain_ms) = (Some(20_000), Some(20_000));
}

/// Opens a connection that a pod serves, then one that waits for a pod, and begins the stop of the activator.
async fn connect_and_stop(running: &mut RunningActivatorFixture, port: u16) -> [TcpStream; 2] {
    add_pod(running).await;
    let mut open = connect(port).await;
    assert_served(&mut open).await;
    running.routes.remove(&RouteKey::Pod("p".to_owned()));
    running.wait_in_force().await;
    let waiting = connect(port).await;
    next_item(&mut running.usages, |item| usage(item).filter(|it| it.totals.in_flight() == 1))
        .await;
    running.stop.cancel();
    [open, waiting]
}

#[tokio::test]
async fn open_and_waiting_connections_have_their_time_when_it_stops() {
    let (mut running, port) = start_tcp_service("tcp-drain", drains_for_long).await;
    let [mut open, mut waiting] = connect_and_stop(&mut running, port).await;
    wait_until_closed(port).await;
    open.write_all(b"still\n").await.unwrap();
    assert_eq!(read_until(&mut open, "\n").await, "still\n");
    add_pod(&mut running).await;
    assert_served(&mut waiting).await;
    assert!(!running.is_stopped());
    for mut client in [open, waiting] {
        client.shutdown().await.unwrap();
        assert_eq!(read_rest(&mut client).await, "");
    }
    running.wait_stopped().await;
}

#[tokio::test]
async fn connections_beyond_that_time_are_reset() {
    let (mut running, port) = start_tcp_service("tcp-cut", |config| {
        config.linger_ms = Some(0);
        (config.drain_ms, config.upgraded_drain_ms) = (Some(20_000), Some(0));
    })
    .await;
    let [mut open, mut waiting] = connect_and_stop(&mut running, port).await;
    for client in [&mut open, &mut waiting] {
        assert_eq!(read_reset(client).await.kind(), io::ErrorKind::ConnectionReset);
    }
    running.wait_stopped().await;
}
