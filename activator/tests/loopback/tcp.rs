//! Raw TCP connections, which wait for a pod unread and are then passed on both ways.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use activator::ActivatorConfig;
use common::wire::{AllowedSources, AppProtocol, RevisionEntry};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::mpsc,
};

use crate::{
    faults::assert_no_state_left,
    harness::{
        ActivatorFixture, GET, LONG, PausedClock, read_rest, read_until, revision, service,
        start_pod_with, wait_until,
    },
};

const GREETING: &str = "220 ready\n";

/// Starts an activator whose service takes raw TCP.
pub(crate) async fn tcp_fixture() -> ActivatorFixture {
    tcp_fixture_with(|_| {}, |_| {}).await
}

/// Starts an activator whose settings and Revision are changed, and whose service takes raw TCP.
pub(crate) async fn tcp_fixture_with(
    configure: impl FnOnce(&mut ActivatorConfig),
    change: impl FnOnce(&mut RevisionEntry),
) -> ActivatorFixture {
    let mut fixture = ActivatorFixture::with(configure).await;
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        entry.protocol = AppProtocol::Tcp;
        change(entry);
    });
    fixture
}

/// Serves a connection by a protocol in which the server speaks first, and then returns what it gets.
pub(crate) async fn greet_and_echo(mut stream: TcpStream) {
    if stream.write_all(GREETING.as_bytes()).await.is_ok() {
        let (mut read, mut write) = stream.split();
        tokio::io::copy(&mut read, &mut write).await.ok();
        write.shutdown().await.ok();
    }
}

/// Asserts that the pod greets, and returns what the client sends.
pub(crate) async fn assert_served(client: &mut TcpStream) {
    assert_eq!(read_until(client, "\n").await, GREETING);
    client.write_all(b"line\n").await.unwrap();
    assert_eq!(read_until(client, "\n").await, "line\n");
}

/// Asserts that a connection that was served before still is.
pub(crate) async fn assert_served_again(client: &mut TcpStream) {
    client.write_all(b"more\n").await.unwrap();
    assert_eq!(read_until(client, "\n").await, "more\n");
}

async fn assert_reset(client: &mut TcpStream) {
    let read = tokio::time::timeout(LONG, client.read(&mut [0])).await.expect("ends in time");
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

fn reset(client: TcpStream) {
    client.set_zero_linger().unwrap();
}

/// Number of connections with this end.
pub(crate) fn ended(fixture: &ActivatorFixture, end: &str) -> f64 {
    fixture.metric(&format!("rouse_activator_tcp_connections_total{{end=\"{end}\"}}"))
}

fn at_pods(fixture: &ActivatorFixture) -> u64 {
    let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    served.queue_metrics().at_pods
}

/// Starts a pod that hands each connection to the test.
async fn start_handing_pod() -> (SocketAddr, mpsc::Receiver<TcpStream>) {
    let (stream_tx, streams) = mpsc::channel(100);
    let address = start_pod_with(move |stream, _| {
        let stream_tx = stream_tx.clone();
        async move { drop(stream_tx.send(stream).await) }
    })
    .await;
    (address, streams)
}

#[tokio::test]
async fn a_server_that_speaks_first_is_heard_after_a_cold_start() {
    let mut fixture = tcp_fixture().await;
    let mut client = fixture.connect().await;
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    assert_served(&mut client).await;
    assert_eq!((fixture.waiting_totals(), at_pods(&fixture)), ((1, 1), 1));
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, "");
    wait_until(|| ended(&fixture, "complete") == 1.0).await;
    assert_eq!((fixture.abandoned_requests(), at_pods(&fixture)), (0, 0));
    // The next connection finds the pod, so it does not wait.
    assert_served(&mut fixture.connect().await).await;
    assert_eq!(fixture.waiting_totals(), (1, 1));
}

#[tokio::test]
async fn bytes_and_an_end_that_came_while_the_client_waited_reach_the_pod() {
    let mut fixture = tcp_fixture().await;
    let mut client = fixture.connect().await;
    client.write_all(b"early").await.unwrap();
    client.shutdown().await.unwrap();
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| report_received(stream)).await);
    assert_eq!(read_rest(&mut client).await, "got early");
    wait_until(|| ended(&fixture, "complete") == 1.0).await;
}

/// Responds at the client's end with all that has come before.
async fn report_received(mut stream: TcpStream) {
    let got = read_rest(&mut stream).await;
    stream.write_all(format!("got {got}").as_bytes()).await.unwrap();
}

#[tokio::test]
async fn a_pod_may_close_its_half_first() {
    let mut fixture = tcp_fixture().await;
    let (address, mut streams) = start_handing_pod().await;
    fixture.add_ready_pod("p", address);
    let mut client = fixture.connect().await;
    let mut pod = streams.recv().await.unwrap();
    pod.write_all(b"all").await.unwrap();
    pod.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, "all");
    assert_eq!(at_pods(&fixture), 1, "the other half is open");
    client.write_all(b"late").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut pod).await, "late");
    wait_until(|| (ended(&fixture, "complete"), at_pods(&fixture)) == (1.0, 0)).await;
}

#[tokio::test]
async fn a_client_that_resets_its_connection_leaves_the_queue() {
    for closes_its_half_first in [false, true] {
        let fixture = tcp_fixture().await;
        let mut client = fixture.connect().await;
        client.write_all(b"unread").await.unwrap();
        fixture.wait_for_queued(1).await;
        if closes_its_half_first {
            client.shutdown().await.unwrap();
        }
        reset(client);
        fixture.wait_for_queued(0).await;
        wait_until(|| ended(&fixture, "cancelled") == 1.0).await;
        assert_eq!((fixture.waiting_totals(), fixture.abandoned_requests()), ((1, 1), 1));
        assert_no_state_left(&fixture).await;
    }
}

#[tokio::test]
async fn a_reset_of_either_side_reaches_the_other_one() {
    let mut fixture = tcp_fixture().await;
    let (address, mut streams) = start_handing_pod().await;
    fixture.add_ready_pod("p", address);
    let client = fixture.connect().await;
    let mut pod = streams.recv().await.unwrap();
    reset(client);
    assert_reset(&mut pod).await;
    let mut client = fixture.connect().await;
    reset(streams.recv().await.unwrap());
    assert_reset(&mut client).await;
    wait_until(|| (ended(&fixture, "reset"), at_pods(&fixture)) == (2.0, 0)).await;
}

/// An HTTP request gets an error after ten failed dials.
#[tokio::test]
async fn a_refused_dial_is_repeated_until_the_pod_listens() {
    let forever = 1_000_000 * LONG;
    let mut fixture = tcp_fixture_with(|_| {}, |revision| revision.timeout = forever).await;
    // Bound without listening: connects are refused, and no other program gets the port.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut client = fixture.connect().await;
    fixture.wait_for_queued(1).await;
    let clock = PausedClock::start_paused();
    fixture.add_ready_pod("p", socket.local_addr().unwrap());
    advance_until(&clock, || fixture.metric("rouse_activator_dial_failures_total") >= 15.0).await;
    assert_eq!(fixture.waiting_totals(), (1, 0), "it waits all the time");
    let listener = socket.listen(8).unwrap();
    tokio::spawn(async move { greet_and_echo(listener.accept().await.unwrap().0).await });
    advance_until(&clock, || fixture.waiting_totals() == (1, 1)).await;
    drop(clock);
    assert_served(&mut client).await;
    assert_eq!(fixture.abandoned_requests(), 0);
}

/// Advances the time in small steps until a condition holds.
async fn advance_until(clock: &PausedClock, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LONG, "the condition holds in time");
        clock.advance(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_connection_that_gets_no_pod_in_time_is_reset() {
    let timeout = Duration::from_millis(50);
    let fixture = tcp_fixture_with(|_| {}, |revision| revision.timeout = timeout).await;
    assert_reset(&mut fixture.connect().await).await;
    wait_until(|| ended(&fixture, "failed") == 1.0).await;
    assert_eq!((fixture.waiting_totals(), fixture.abandoned_requests()), ((1, 1), 1));
    assert_no_state_left(&fixture).await;
}

#[tokio::test]
async fn connections_beyond_the_bound_of_the_queue_are_reset() {
    let mut fixture = tcp_fixture_with(|config| config.max_waiting = 2, |_| {}).await;
    let mut waiting = [fixture.connect().await, fixture.connect().await];
    fixture.wait_for_queued(2).await;
    assert_reset(&mut fixture.connect().await).await;
    wait_until(|| ended(&fixture, "failed") == 1.0).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    for client in &mut waiting {
        assert_served(client).await;
    }
    assert_eq!((fixture.waiting_totals(), fixture.abandoned_requests()), ((2, 2), 0));
}

/// A waiting connection is charged as a request, and an open one is not idle, so that it is never closed for a new one.
#[tokio::test]
async fn connections_beyond_the_bound_of_all_connections_are_reset() {
    let mut fixture = tcp_fixture_with(|config| config.max_connections = Some(2), |_| {}).await;
    let mut waiting = fixture.connect().await;
    fixture.wait_for_queued(1).await;
    let charged = fixture.activator.server.connections().request_bytes();
    assert_eq!(charged, activator::budget::REQUEST_OVERHEAD_BYTES);
    let mut second = fixture.connect().await;
    fixture.wait_for_queued(2).await;
    assert_reset(&mut fixture.connect().await).await;
    assert_eq!(fixture.metric("rouse_activator_refused_total{bound=\"connections\"}"), 1.0);
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    assert_served(&mut waiting).await;
    assert_served(&mut second).await;
    assert_reset(&mut fixture.connect().await).await;
    assert_eq!(fixture.activator.server.connections().request_bytes(), 0);
    assert_served_again(&mut waiting).await;
}

/// Both are accepted before the task of either runs.
#[tokio::test]
async fn a_connection_is_not_closed_in_favour_of_one_that_comes_at_the_same_time() {
    let mut fixture = tcp_fixture_with(|config| config.max_connections = Some(2), |_| {}).await;
    let mut waiting = fixture.connect().await;
    fixture.wait_for_queued(1).await;
    let connect = || {
        let stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, fixture.port)).unwrap();
        stream.set_nonblocking(true).unwrap();
        TcpStream::from_std(stream).unwrap()
    };
    let (mut first, mut second) = (connect(), connect());
    assert_reset(&mut second).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    assert_served(&mut first).await;
    assert_served(&mut waiting).await;
    assert_eq!(ended(&fixture, "cut_off"), 0.0);
}

#[tokio::test]
async fn a_hard_limit_counts_connections_until_both_halves_are_closed() {
    let one = |revision: &mut RevisionEntry| revision.container_concurrency = 1;
    let mut fixture = tcp_fixture_with(|_| {}, one).await;
    let (address, mut streams) = start_handing_pod().await;
    fixture.add_ready_pod("p", address);
    let mut clients = [fixture.connect().await, fixture.connect().await];
    let mut pod = streams.recv().await.unwrap();
    fixture.wait_for_queued(1).await;
    for client in &mut clients {
        client.shutdown().await.unwrap();
    }
    assert_eq!(read_rest(&mut pod).await, "");
    assert!(streams.try_recv().is_err(), "the pod may still respond to the first");
    fixture.wait_for_queued(1).await;
    pod.shutdown().await.unwrap();
    let mut pod = streams.recv().await.unwrap();
    assert_eq!(read_rest(&mut pod).await, "");
    pod.shutdown().await.unwrap();
    wait_until(|| (ended(&fixture, "complete"), at_pods(&fixture)) == (2.0, 0)).await;
    assert_eq!(fixture.waiting_totals(), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_pod_with_a_hard_limit_of_one_has_two_connections() {
    let one = |revision: &mut RevisionEntry| revision.container_concurrency = 1;
    let mut fixture = tcp_fixture_with(|_| {}, one).await;
    let [now, most] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let highest = Arc::clone(&most);
    let each = move |stream, _| {
        let (now, most) = (Arc::clone(&now), Arc::clone(&highest));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            greet_until_end(stream, &now).await;
        }
    };
    fixture.add_ready_pod("p", start_pod_with(each).await);
    let port = fixture.port;
    let clients = (0..40).map(|_| {
        tokio::spawn(async move {
            let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
            assert_served(&mut client).await;
            client.shutdown().await.unwrap();
            assert_eq!(read_rest(&mut client).await, "");
        })
    });
    for client in futures::future::join_all(clients).await {
        client.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
    wait_until(|| ended(&fixture, "complete") == 40.0).await;
}

/// Serves a connection. It counts in `now` until its last byte is sent.
async fn greet_until_end(mut stream: TcpStream, now: &AtomicUsize) {
    stream.write_all(GREETING.as_bytes()).await.unwrap();
    let line = read_until(&mut stream, "\n").await;
    stream.write_all(line.as_bytes()).await.unwrap();
    assert_eq!(read_rest(&mut stream).await, "");
    now.fetch_sub(1, Ordering::SeqCst);
}

#[tokio::test]
async fn a_client_that_the_policies_deny_is_reset_and_wakes_nothing() {
    let denied = AllowedSources { addresses: [[10, 0, 0, 1].into()].into(), ip_blocks: vec![] };
    let deny = |revision: &mut RevisionEntry| revision.allowed_sources = Some(Arc::new(denied));
    let fixture = tcp_fixture_with(|_| {}, deny).await;
    assert_reset(&mut fixture.connect().await).await;
    wait_until(|| ended(&fixture, "failed") == 1.0).await;
    assert_eq!(fixture.waiting_totals(), (0, 0));
}

#[tokio::test]
async fn no_host_routes_http_to_a_service_of_raw_tcp() {
    let mut fixture = tcp_fixture().await;
    let (address, mut streams) = start_handing_pod().await;
    fixture.add_ready_pod("p", address);
    let hosts = ["hello.default.example.com", "hello.default.svc", "hello-1.default.svc"];
    for (entrypoint, host) in
        [(fixture.outside, hosts[0])].into_iter().chain(hosts.map(|host| (fixture.inside, host)))
    {
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let response = fixture.exchange_at(entrypoint, &request).await;
        assert!(response.starts_with("HTTP/1.1 502 "), "{host}: {response}");
        assert!(response.ends_with("takes raw TCP connections, not HTTP requests"), "{response}");
    }
    assert!(streams.try_recv().is_err(), "the pod got none of them");
    assert_eq!(fixture.waiting_totals(), (0, 0));
}

/// Starts a listener as the one of all ports. No service has its port.
async fn start_listener_of_all_ports(fixture: &ActivatorFixture) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Arc::clone(&fixture.activator.server);
    let stop = fixture.shutdown.clone();
    tokio::spawn(server.run_listener(listener, None, stop));
    address
}

fn move_service_to(fixture: &mut ActivatorFixture, address: SocketAddr) {
    fixture.apply_change(|table| {
        let port = address.port().try_into().unwrap();
        table.services.get_mut(&service()).unwrap().activator_port = port;
    });
}

/// The listener of all ports has no entrypoint: the port that the client has connected to names the service.
#[tokio::test]
async fn the_listener_of_all_ports_takes_raw_tcp_too() {
    let mut fixture = tcp_fixture().await;
    let address = start_listener_of_all_ports(&fixture).await;
    move_service_to(&mut fixture, address);
    let mut client = TcpStream::connect(address).await.unwrap();
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    assert_served(&mut client).await;
}

/// The service of a port takes either: HTTP clients of a port that carries raw TCP from now on get an error.
#[tokio::test]
async fn a_persistent_connection_of_http_gets_an_error_once_its_service_takes_raw_tcp() {
    let mut fixture = ActivatorFixture::new().await;
    let mut client = fixture.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 1.0).await;
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().protocol = Some(AppProtocol::Tcp);
    });
    client.write_all(b"host: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let response = read_rest(&mut client).await;
    assert!(response.starts_with("HTTP/1.1 502 "), "{response}");
    // The same bytes on a new connection are those of an unknown protocol.
    let (address, mut streams) = start_handing_pod().await;
    fixture.add_ready_pod("p", address);
    let mut client = fixture.connect().await;
    client.write_all(GET.as_bytes()).await.unwrap();
    let mut pod = streams.recv().await.unwrap();
    assert_eq!(read_until(&mut pod, "\r\n\r\n").await, GET);
}

/// Clients of such a service would take bytes of HTTP for those of their server.
#[tokio::test]
async fn a_connection_of_no_known_protocol_is_reset_unless_it_brings_http() {
    let mut fixture = tcp_fixture().await;
    let unknown_port = start_listener_of_all_ports(&fixture).await;
    fixture.apply_change(|table| table.revisions.clear());
    let mut clients = Vec::new();
    // No service has the first port, and the Revision of the service at the second one is missing.
    for address in [unknown_port, SocketAddr::from((Ipv4Addr::LOCALHOST, fixture.port))] {
        for sent in ["", "\0\u{4}bytes\r\n\r\n", "GET / HTTP/1.1"] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(sent.as_bytes()).await.unwrap();
            clients.push(client);
        }
        let response = fixture.exchange_at(address, GET).await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
    }
    for client in &mut clients {
        assert_reset(client).await;
    }
    wait_until(|| ended(&fixture, "failed") == 6.0).await;
}

#[tokio::test]
async fn a_connection_waits_for_the_table_to_name_its_service() {
    let mut fixture = tcp_fixture().await;
    let address = start_listener_of_all_ports(&fixture).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 1.0).await;
    move_service_to(&mut fixture, address);
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_pod_with(|stream, _| greet_and_echo(stream)).await);
    assert_served(&mut client).await;
    // Its end is no reset, although one would have ended the wait.
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, "");
    wait_until(|| ended(&fixture, "complete") == 1.0).await;
}

#[tokio::test]
async fn a_pod_that_resets_a_connection_before_any_byte_is_not_replaced_by_another() {
    let mut fixture = tcp_fixture().await;
    let ((one, mut at_one), (two, mut at_two)) =
        (start_handing_pod().await, start_handing_pod().await);
    fixture.add_ready_pod("one", one);
    fixture.add_ready_pod("two", two);
    let mut client = fixture.connect().await;
    let stream = tokio::select! {
        stream = at_one.recv() => stream,
        stream = at_two.recv() => stream,
    };
    reset(stream.unwrap());
    assert_reset(&mut client).await;
    wait_until(|| (ended(&fixture, "reset"), at_pods(&fixture)) == (1.0, 0)).await;
    assert!(at_one.try_recv().is_err() && at_two.try_recv().is_err(), "there is no other try");
}
