//! An activator that is being stopped still serves clients that are routed to it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::{
    fixtures,
    wire::{RouteChange, RouteKey, RoutingPhase},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    h2c::{self, Http2TestClient},
    harness::{
        FakeHttp1Pod, GET, LONG, OK, hello_revision, hello_service, pod, read_head, read_rest,
        revision, service, start_pod, unused_port, wait_until,
    },
    running_activator::{self, RunningActivatorFixture},
};

async fn ask(port: u16, request: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    read_rest(&mut stream).await
}

fn own_entry() -> (RouteKey, RouteChange) {
    let activator = fixtures::activator("activator", vec![]);
    (RouteKey::Activator(activator.name.clone()), RouteChange::Activator(activator))
}

/// Creates an activator with a service whose pod responds after `pause`. Returns the ports of the service and of the
/// activator's pages, and the pod.
async fn start_lingering(
    name: &str,
    linger_ms: u64,
    pause: Duration,
) -> (RunningActivatorFixture, [u16; 2], FakeHttp1Pod) {
    let admin = unused_port();
    let mut running = RunningActivatorFixture::start(name, |config| {
        config.admin = SocketAddr::from(([127, 0, 0, 1], admin));
        (config.linger_ms, config.drain_ms) = (Some(linger_ms), Some(20_000));
        config.settle_ms = 10;
    })
    .await;
    let (port, server) = (unused_port(), start_pod(OK, pause).await);
    let (key, change) = own_entry();
    running.routes.set(key, change);
    running.routes.set(RouteKey::Revision(revision()), RouteChange::Revision(hello_revision()));
    running.routes.set(RouteKey::Service(service()), RouteChange::Service(hello_service(port)));
    let ready = pod("p", server.address, RoutingPhase::Ready);
    running.routes.set(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    running.wait_in_force().await;
    (running, [port, admin], server)
}

#[tokio::test]
async fn it_serves_until_the_table_names_it_no_more() {
    let (mut running, [port, admin], _pod) =
        start_lingering("stopping", 600_000, Duration::ZERO).await;
    let ready = "GET /readyz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    // Waits until the stream to the autoscaler is open, too.
    while !ask(admin, ready).await.starts_with("HTTP/1.1 200 ") {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut kept = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let get = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    kept.write_all(get.as_bytes()).await.unwrap();
    assert!(!read_head(&mut kept).await.contains("connection: close"));
    kept.read_exact(&mut [0; 5]).await.unwrap();

    running.stop.cancel();
    while ask(admin, ready).await.starts_with("HTTP/1.1 200 ") {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(ask(admin, ready).await.ends_with("shutting down\n"));
    let probe =
        "GET / HTTP/1.1\r\nhost: a\r\nuser-agent: kube-probe/1\r\nconnection: close\r\n\r\n";
    let response = ask(port, probe).await;
    assert!(
        response.starts_with("HTTP/1.1 503 ") && response.ends_with("shutting down"),
        "{response}"
    );
    kept.write_all(get.as_bytes()).await.unwrap();
    let response = read_rest(&mut kept).await;
    assert!(
        response.contains("connection: close\r\n") && response.ends_with("hello"),
        "{response}"
    );
    for _ in 0..20 {
        assert!(ask(port, GET).await.ends_with("hello"), "new connections are served");
    }
    // HTTP/2 clients are asked to reconnect by GOAWAY.
    let client = Http2TestClient::connect(port).await;
    client.send_request(h2c::get("/"), &[]).await.unwrap();
    wait_until(|| client.is_closed()).await;
    assert!(!running.is_stopped());

    running.routes.remove(&own_entry().0);
    running.wait_in_force().await;
    running.wait_stopped().await;
    assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
}

#[tokio::test]
async fn it_stops_after_the_linger_time_and_drains_requests() {
    let (running, [port, _], pod) = start_lingering("late", 50, Duration::from_millis(500)).await;
    let mut asked = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    asked.write_all(GET.as_bytes()).await.unwrap();
    let call = Http2TestClient::connect(port).await;
    let second = tokio::spawn(call.send_request(h2c::get("/"), &[]));
    wait_until(|| pod.requests() == 2).await;
    running.stop.cancel();
    assert!(read_rest(&mut asked).await.ends_with("hello"));
    assert_eq!(second.await.unwrap().unwrap().body, "hello");
    running.wait_stopped().await;
}

#[tokio::test]
async fn a_request_that_waits_still_gets_its_pod() {
    let (mut running, [port, _], _pod) = start_lingering("waits", 10, Duration::ZERO).await;
    running.routes.remove(&RouteKey::Pod("p".to_owned()));
    running.wait_in_force().await;
    let mut asked = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    asked.write_all(GET.as_bytes()).await.unwrap();
    let waits = |item| matches!(item, common::wire::UsageItem::Sample(_)).then_some(());
    running_activator::next_item(&mut running.usages, waits).await;
    running.stop.cancel();
    // No connection is accepted any more.
    let closed = async {
        while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, closed).await.unwrap();
    let late = start_pod(OK, Duration::ZERO).await;
    let ready = pod("late", late.address, RoutingPhase::Ready);
    running.routes.set(RouteKey::Pod("late".to_owned()), RouteChange::Pod(ready.into()));
    assert!(read_rest(&mut asked).await.ends_with("hello"));
    running.wait_stopped().await;
}
