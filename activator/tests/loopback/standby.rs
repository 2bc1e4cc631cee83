//! Pods with a standby order.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{
    fixtures::standby_order,
    link::PodReportKey,
    thaw_query,
    wire::{PodEntry, RoutingPhase, StandbyOrder},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::harness::{ActivatorFixture, GET, OK, pod, read_rest, start_pod, wait_until};

/// Timeout of the orders of frozen pods. A request that is not written yet leaves a pod that is passed over, so that the
/// pod would never get it. Also on a busy machine, a request is written to its new connection within this time.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// A frozen process closes no connection whose time is over. It may do so at its thaw, together with the next request.
#[tokio::test]
async fn no_connection_to_a_pod_with_a_standby_order_is_used_twice() {
    let mut fixture = ActivatorFixture::new().await;
    let server = start_pod(OK, Duration::ZERO).await;
    for (standby, connections) in [(None, 1), (Some(standby_order()), 3), (None, 4)] {
        let entry = PodEntry { standby, ..pod("p", server.address, RoutingPhase::Ready) };
        fixture.apply_change(|table| drop(table.pods.insert("p".to_owned(), entry)));
        for _ in 0..2 {
            assert!(fixture.exchange(GET).await.ends_with("hello"));
        }
        assert_eq!(server.connections(), connections, "{standby:?}");
    }
    assert_eq!(server.requests(), 6);
}

/// Adds a pod with an order that is frozen: the kernel accepts connections at this address, and no process does.
async fn add_frozen_pod(fixture: &mut ActivatorFixture, address: [u8; 4]) -> TcpListener {
    let listener = TcpListener::bind((std::net::Ipv4Addr::from(address), 0)).await.unwrap();
    let order = StandbyOrder { agent_timeout: AGENT_TIMEOUT, ..standby_order() };
    let at = listener.local_addr().unwrap();
    let entry = PodEntry { standby: Some(order), ..pod("p", at, RoutingPhase::Ready) };
    fixture.apply_change(|table| drop(table.pods.insert("p".to_owned(), entry)));
    listener
}

/// Sends a request over a new connection.
async fn send_request(fixture: &ActivatorFixture) -> TcpStream {
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    stream
}

/// Accepts connections at a pod until one has a request, and responds to it. On a busy machine the pod may be passed over
/// before the request is written to a new connection, which is then closed.
async fn respond(pod: &TcpListener) {
    loop {
        let (mut stream, _) = pod.accept().await.unwrap();
        if stream.read(&mut [0; 1024]).await.unwrap() > 0 {
            return stream.write_all(OK.as_bytes()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn requests_pass_over_a_frozen_pod_that_no_agent_thaws_and_none_is_sent_twice() {
    let mut fixture = ActivatorFixture::new().await;
    let frozen = add_frozen_pod(&mut fixture, [127, 90, 1, 1]).await;
    let (reports, key) = (fixture.activator.reports.clone(), PodReportKey::PassedOver("p".into()));
    let mut first = send_request(&fixture).await;
    wait_until(|| reports.get(&key).is_some()).await;
    let mut second = send_request(&fixture).await;
    fixture.wait_for_queued(1).await;
    // What the table states of the pod meanwhile changes nothing.
    let address = frozen.local_addr().unwrap();
    for phase in [RoutingPhase::Starting, RoutingPhase::Ready] {
        let entry = PodEntry { standby: Some(standby_order()), ..pod("p", address, phase) };
        fixture.apply_change(|table| drop(table.pods.insert("p".to_owned(), entry)));
        fixture.wait_for_queued(1).await;
    }
    let running = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("q", running.address);
    assert!(read_rest(&mut second).await.ends_with("hello"));
    assert!(reports.get(&key).is_some(), "nothing shows that it was thawed");
    respond(&frozen).await;
    assert!(read_rest(&mut first).await.ends_with("hello"));
    assert_eq!(running.requests(), 1, "the first one may have been read");
    wait_until(|| reports.get(&key).is_none()).await;
}

#[tokio::test]
async fn a_pod_that_leaves_while_it_is_passed_over_is_reported_no_more() {
    let mut fixture = ActivatorFixture::new().await;
    let _frozen = add_frozen_pod(&mut fixture, [127, 90, 1, 2]).await;
    let (reports, key) = (fixture.activator.reports.clone(), PodReportKey::PassedOver("p".into()));
    let _request = send_request(&fixture).await;
    wait_until(|| reports.get(&key).is_some()).await;
    fixture.apply_change(|table| drop(table.pods.remove("p")));
    wait_until(|| reports.get(&key).is_none()).await;
}

/// The application may need longer than the timeout for its first byte.
#[tokio::test]
async fn a_pod_takes_requests_while_its_agent_answers_that_it_runs() {
    let mut fixture = ActivatorFixture::new().await;
    let slow = add_frozen_pod(&mut fixture, [127, 90, 1, 3]).await;
    let at = (std::net::Ipv4Addr::new(127, 90, 1, 3), thaw_query::POD_SERVER_PORT);
    let (agent, answers) = (TcpListener::bind(at).await.unwrap(), Arc::new(AtomicUsize::new(0)));
    let answered = Arc::clone(&answers);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = agent.accept().await {
            let _read = stream.read(&mut [0; 1024]).await;
            let body = thaw_query::RUNNING;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            let _written = stream.write_all((head + body).as_bytes()).await;
            answered.fetch_add(1, Ordering::SeqCst);
        }
    });
    let (reports, key) = (fixture.activator.reports.clone(), PodReportKey::PassedOver("p".into()));
    let mut first = send_request(&fixture).await;
    // On a busy machine the pod may be passed over for a moment.
    let is_confirmed = || answers.load(Ordering::SeqCst) > 0 && reports.get(&key).is_none();
    wait_until(is_confirmed).await;
    let mut second = send_request(&fixture).await;
    respond(&slow).await;
    respond(&slow).await;
    for stream in [&mut first, &mut second] {
        assert!(read_rest(stream).await.ends_with("hello"));
    }
}
