//! Messages of every form pass unchanged; invalid ones do no harm to other requests.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::wire::RevisionEntry;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::harness::{
    self, ActivatorFixture, GET, LONG, OK, PausedClock, read_head, read_rest, read_until,
    start_pod, wait_until,
};

const MIB: usize = 1 << 20;

/// Starts a pod for one connection, handled by `each` once a head was read.
pub(crate) async fn start_pod_once<F: Future<Output = ()> + Send>(
    each: impl FnOnce(TcpStream, String) -> F + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        each(stream, head).await;
    });
    address
}

/// GET after which the client keeps its connection.
pub(crate) const KEEP_ALIVE_GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// Starts a pod that responds to every request, and reads bodies of five bytes.
pub(crate) async fn start_reading_pod(response: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                loop {
                    let head = read_head(&mut stream).await;
                    if !head.ends_with("\r\n\r\n") {
                        return;
                    }
                    if head.contains("content-length: 5\r\n") {
                        stream.read_exact(&mut [0; 5]).await.ok();
                    }
                    stream.write_all(response.as_bytes()).await.ok();
                }
            });
        }
    });
    address
}

/// Returns the client's view of a pod's `response` to `request`.
async fn exchange_with_response(request: &str, response: &'static str) -> String {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(response, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.exchange(request).await
}

#[tokio::test]
async fn a_large_body_is_carried_up_without_being_held() {
    let mut fixture = ActivatorFixture::new().await;
    let (go, wait) = tokio::sync::oneshot::channel::<()>();
    let at = start_pod_once(move |mut stream, _| async move {
        wait.await.unwrap();
        let (mut got, mut buffer) = (0, vec![0; MIB]);
        while got < 64 * MIB {
            got += stream.read(&mut buffer).await.unwrap();
        }
        let text = format!("HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{got}");
        stream.write_all(text.as_bytes()).await.unwrap();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = fixture.connect().await;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        64 * MIB
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let (chunk, mut sent) = (vec![b'x'; MIB], 0);
    // The pod reads nothing yet, so only the sockets' buffers fill.
    while let Ok(count) =
        tokio::time::timeout(Duration::from_millis(300), client.write(&chunk)).await
    {
        sent += count.unwrap();
    }
    assert!(sent < 32 * MIB, "{sent} bytes were taken in");
    go.send(()).unwrap();
    while sent < 64 * MIB {
        sent += client.write(&chunk[..MIB.min(64 * MIB - sent)]).await.unwrap();
    }
    assert!(read_rest(&mut client).await.ends_with("67108864"));
}

#[tokio::test]
async fn a_large_body_is_carried_down_without_being_held() {
    let mut fixture = ActivatorFixture::new().await;
    let (blocked, is_blocked) = tokio::sync::oneshot::channel();
    let at = start_pod_once(move |mut stream, _| async move {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", 64 * MIB);
        stream.write_all(head.as_bytes()).await.unwrap();
        let (chunk, mut sent) = (vec![b'x'; MIB], 0);
        let write = async |stream: &mut TcpStream, sent: usize| {
            stream.write(&chunk[..MIB.min(64 * MIB - sent)]).await.unwrap()
        };
        while let Ok(count) =
            tokio::time::timeout(Duration::from_millis(300), write(&mut stream, sent)).await
        {
            sent += count;
        }
        blocked.send(sent).unwrap();
        while sent < 64 * MIB {
            sent += write(&mut stream, sent).await;
        }
        stream.read_u8().await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = fixture.connect().await;
    client.write_all(GET.as_bytes()).await.unwrap();
    let held = is_blocked.await.unwrap();
    assert!(held < 32 * MIB, "{held} bytes were taken in");
    read_head(&mut client).await;
    let mut body = Vec::new();
    client.read_to_end(&mut body).await.unwrap();
    assert_eq!(body.len(), 64 * MIB);
}

#[tokio::test]
async fn responses_without_a_body_end_at_their_head() {
    let head = "HEAD / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let response =
        exchange_with_response(head, "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n").await;
    assert!(
        response.contains("content-length: 5\r\n") && response.ends_with("\r\n\r\n"),
        "{response}"
    );
    for pod_response in [
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    ] {
        let response = exchange_with_response(GET, pod_response).await;
        assert!(response.starts_with("HTTP/1.1 ") && response.ends_with("\r\n\r\n"), "{response}");
    }
}

#[tokio::test]
async fn a_body_is_requested_once_a_pod_takes_it() {
    let mut fixture = ActivatorFixture::new().await;
    let mut client = fixture.connect().await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: 100-continue\r\n\
                content-length: 5\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    let nothing = tokio::time::timeout(Duration::from_millis(20), client.peek(&mut [0])).await;
    assert!(nothing.is_err(), "a body sent while the request waits would only be held");
    fixture.add_ready_pod(
        "p",
        start_reading_pod("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n").await,
    );
    assert_eq!(read_head(&mut client).await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"hello").await.unwrap();
    assert!(read_rest(&mut client).await.starts_with("HTTP/1.1 204 "));
}

#[tokio::test]
async fn of_several_responses_to_a_request_all_are_passed_on() {
    let hints = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
                 HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
    let response = exchange_with_response(GET, hints).await;
    let (early, last) = response.split_at(response.find("HTTP/1.1 200 OK\r\n").unwrap());
    assert_eq!(early, hints.split_at(hints.find("HTTP/1.1 200").unwrap()).0);
    assert!(last.ends_with("\r\n\r\nhello"), "{response}");
}

#[tokio::test]
async fn after_a_response_without_a_body_the_connection_serves_the_next() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod("HTTP/1.1 204 No Content\r\n\r\n", Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let mut client = fixture.connect().await;
    for _ in 0..10 {
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        assert!(read_head(&mut client).await.starts_with("HTTP/1.1 204"));
    }
    assert_eq!((pod.requests(), pod.connections()), (10, 1));
}

#[tokio::test]
async fn chunks_and_trailers_pass_in_both_directions() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_once(|mut stream, head| async move {
        assert!(head.contains("transfer-encoding: chunked\r\n"), "{head}");
        let body = read_until(&mut stream, "x-sum: 1\r\n\r\n").await;
        assert!(body.contains("hello"), "{body}");
        let response = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n\r\n\
                      5\r\nworld\r\n0\r\nx-end: 2\r\n\r\n";
        stream.write_all(response.as_bytes()).await.unwrap();
        stream.read_u8().await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let request = "POST / HTTP/1.1\r\nhost: a\r\nte: trailers\r\nconnection: close, te\r\n\
                   transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 1\r\n\r\n";
    let response = fixture.exchange(request).await;
    assert!(response.contains("world") && response.ends_with("x-end: 2\r\n\r\n"), "{response}");
}

/// hyper's server sends trailers only to a client that asks for them, and only those that the pod has named.
#[tokio::test]
async fn trailers_that_were_not_announced_are_left_out_of_a_whole_response() {
    for (request_fields, response_fields) in
        [("connection: close", "\r\ntrailer: x-end"), ("te: trailers\r\nconnection: close, te", "")]
    {
        let mut fixture = ActivatorFixture::new().await;
        let at = start_pod_once(move |mut stream, _| async move {
            let response = format!(
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked{response_fields}\r\n\r\n\
                 5\r\nworld\r\n0\r\nx-end: 2\r\n\r\n"
            );
            stream.write_all(response.as_bytes()).await.unwrap();
            stream.read_u8().await.ok();
        })
        .await;
        fixture.add_ready_pod("p", at);
        let request = format!("GET / HTTP/1.1\r\nhost: a\r\n{request_fields}\r\n\r\n");
        let response = fixture.exchange(&request).await;
        assert!(response.ends_with("5\r\nworld\r\n0\r\n\r\n"), "{request_fields}: {response}");
    }
}

#[tokio::test]
async fn a_response_that_ends_at_close_reaches_the_client_whole() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_once(|mut stream, _| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nall of it").await.unwrap();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let old = "GET / HTTP/1.0\r\nhost: a\r\n\r\n";
    assert!(fixture.exchange(old).await.ends_with("\r\n\r\nall of it"));
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_both_ways() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_once(|mut stream, head| async move {
        assert!(head.contains("upgrade: websocket\r\n"), "{head}");
        let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nhi";
        stream.write_all(head.as_bytes()).await.unwrap();
        let (mut from, mut to) = stream.split();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
    })
    .await;
    let mut client = fixture.connect().await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", at);
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101 "));
    client.write_all(b"echo").await.unwrap();
    assert_eq!(read_until(&mut client, "echo").await, "hiecho");
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, "");
}

/// Timeout of a test, and steps that are within it or exceed it.
const BOUND: Duration = Duration::from_secs(10);
const WITHIN: Duration = Duration::from_millis(9_900);
const BEYOND: Duration = Duration::from_millis(200);

/// Creates a fixture whose Revision has timeouts, and a client of it with an upgraded connection to an echoing pod. The
/// pod sends `greeting` at once.
async fn start_upgraded(
    greeting: &'static str,
    bounds: impl FnOnce(&mut RevisionEntry),
) -> (ActivatorFixture, TcpStream, PausedClock) {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let revision = table.revisions.get_mut(&harness::revision()).unwrap();
        revision.timeout = 100 * BOUND;
        bounds(revision);
    });
    let at = start_pod_once(move |mut stream, _| async move {
        let head =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(format!("{head}{greeting}").as_bytes()).await.unwrap();
        let (mut from, mut to) = stream.split();
        tokio::io::copy(&mut from, &mut to).await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let clock = PausedClock::start_paused();
    let mut client = fixture.connect().await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101 "));
    read_until(&mut client, greeting).await;
    (fixture, client, clock)
}

async fn echo(client: &mut TcpStream) {
    client.write_all(b"echo").await.unwrap();
    assert_eq!(read_until(client, "echo").await, "echo");
}

#[tokio::test]
async fn an_upgraded_connection_ends_once_it_was_silent_for_the_idle_bound() {
    let bounds = |it: &mut RevisionEntry| it.idle_timeout = Some(BOUND);
    let (fixture, mut client, clock) = start_upgraded("", bounds).await;
    for _ in 0..3 {
        clock.advance(WITHIN).await;
        echo(&mut client).await;
    }
    clock.advance(WITHIN).await;
    clock.advance(BEYOND).await;
    assert_eq!(read_rest(&mut client).await, "");
    drop(clock);
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 0.0).await;
}

#[tokio::test]
async fn an_upgraded_connection_ends_when_no_first_byte_comes_in_time() {
    let bounds = |it: &mut RevisionEntry| it.response_start_timeout = Some(BOUND);
    let (_fixture, mut client, clock) = start_upgraded("", bounds).await;
    clock.advance(WITHIN).await;
    let nothing = client.try_read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    clock.advance(BEYOND).await;
    assert_eq!(read_rest(&mut client).await, "");
}

#[tokio::test]
async fn an_upgraded_connection_that_has_begun_may_be_silent() {
    let bounds = |it: &mut RevisionEntry| it.response_start_timeout = Some(BOUND);
    let (_fixture, mut client, clock) = start_upgraded("hi", bounds).await;
    clock.advance(WITHIN).await;
    clock.advance(BEYOND).await;
    echo(&mut client).await;
    drop((client, clock));
    // Bytes of the client count as well.
    let (_fixture, mut client, clock) = start_upgraded("", bounds).await;
    clock.advance(WITHIN).await;
    echo(&mut client).await;
    clock.advance(BEYOND).await;
    echo(&mut client).await;
}

#[tokio::test]
async fn the_first_of_two_requests_sent_at_once_gets_the_first_response() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let two =
        "GET /1 HTTP/1.1\r\nhost: a\r\n\r\nGET /2 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    assert_eq!(fixture.exchange(two).await.matches("hello").count(), 2);
    assert!(pod.heads().find("/1").unwrap() < pod.heads().find("/2").unwrap());
}

#[tokio::test]
async fn bad_and_slow_clients_are_refused_and_harm_no_others() {
    // The clients below whose heads are whole get their responses within this time on a busy machine, too.
    let mut fixture = ActivatorFixture::with(|config| config.head_timeout_ms = 3_000).await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let mut kept = fixture.connect().await;
    kept.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
    read_until(&mut kept, "hello").await;
    let mut cut = fixture.connect().await;
    cut.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n").await.unwrap();
    let slow = tokio::spawn(trickle(fixture.connect().await));
    let long = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(70_000));
    let endless = format!("GET / HTTP/1.1\r\nhost: a\r\n{}", "x: y\r\n".repeat(20_000));
    let path = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "y".repeat(70_000));
    let lengths = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n";
    let framings =
        "POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n";
    for (request, codes) in [
        ("nonsense\r\n\r\n", "400"),
        ("\u{16}\u{3}\u{1}\u{2}\u{0}", "400"),
        ("GET / HTTP/9.9\r\nhost: a\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nhost : a\r\n\r\n", "400"),
        (long.as_str(), "431"),
        (&endless, "431"),
        (&path, "414 431"),
        (lengths, "400"),
        (framings, "400"),
    ] {
        let mut client = fixture.connect().await;
        client.write_all(request.as_bytes()).await.ok();
        let response = read_head(&mut client).await;
        let code = response.get(9..12).unwrap_or_default();
        assert!(code.len() == 3 && codes.contains(code), "{request:.40} {response}");
        kept.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
        assert!(read_until(&mut kept, "hello").await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(read_rest(&mut cut).await, "", "a head that does not come to its end is given up");
    slow.await.unwrap();
    assert!(fixture.exchange(GET).await.ends_with("hello"));
    assert_eq!((pod.requests(), fixture.waiting_totals()), (11, (0, 0)));
}

/// Sends a head byte by byte, each in time, but never to its end, until the connection is closed.
async fn trickle(mut client: TcpStream) {
    let sent = async {
        while client.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, sent).await.expect("is given up");
}

/// Returns the response of the gateway for requests from outside.
async fn outside(fixture: &ActivatorFixture, request: &str) -> String {
    let mut client = TcpStream::connect(fixture.outside).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    read_rest(&mut client).await
}

#[tokio::test]
async fn a_request_with_no_host_or_two_is_refused_at_every_entrypoint() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let known = "host: hello.default.example.com\r\n";
    let two = format!("{known}{known}");
    let other = format!("{known}Host: other.example\r\n");
    for (version, hosts, text) in [
        ("1.1", "", "missing required Host header"),
        ("1.1", two.as_str(), "too many Host headers"),
        ("1.1", &other, "too many Host headers"),
        ("1.0", &two, "too many Host headers"),
        ("1.1", "host: a b\r\n", "malformed Host header"),
        ("1.1", "host: user@hello.default.example.com\r\n", "malformed Host header"),
        ("1.1", "host: hello.default.example.com:http\r\n", "malformed Host header"),
        ("1.1", "host: caf\u{e9}\r\n", "malformed Host header"),
    ] {
        let request = format!("GET / HTTP/{version}\r\n{hosts}connection: close\r\n\r\n");
        for response in [fixture.exchange(&request).await, outside(&fixture, &request).await] {
            assert_eq!(response.get(9..12), Some("400"), "{request} {response}");
            assert!(response.ends_with(&format!("\r\n\r\n{text}")), "{request} {response}");
        }
    }
    assert_eq!((pod.requests(), fixture.waiting_totals()), (0, (0, 0)));
}

#[tokio::test]
async fn a_bare_address_or_foreign_host_wakes_a_service_port() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    let hosts = ["10.96.0.7", "10.96.0.7:80", "[fd00:10:96::7]:80", "foreign.example", ""];
    let mut asked = Vec::new();
    for host in hosts {
        let mut client = fixture.connect().await;
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        asked.push(client);
    }
    fixture.wait_for_queued(hosts.len()).await;
    fixture.add_ready_pod("p", pod.address);
    for mut client in asked {
        assert!(read_rest(&mut client).await.ends_with("hello"));
    }
    let heads = pod.heads();
    assert!(hosts.iter().all(|host| heads.contains(&format!("host: {host}\r\n"))), "{heads}");
}

#[tokio::test]
async fn a_body_with_invalid_chunks_is_attributed_to_the_client() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_once(|mut stream, _| async move {
        stream.read_to_end(&mut Vec::new()).await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let request = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
    assert_eq!(fixture.exchange(request).await.get(9..12), Some("400"));
}

#[tokio::test]
async fn a_stop_lets_requests_in_flight_end() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::from_millis(50)).await;
    fixture.add_ready_pod("p", pod.address);
    let mut client = fixture.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    wait_until(|| pod.requests() == 1).await;
    fixture.shutdown.cancel();
    let response = read_rest(&mut client).await;
    assert!(response.ends_with("hello") && response.contains("connection: close"), "{response}");
    let tasks = &fixture.activator.forwarder.tasks;
    tasks.close();
    tokio::time::timeout(LONG, tasks.wait()).await.unwrap();
}

#[tokio::test]
async fn a_burst_dials_at_most_half_the_backlog_before_the_first_response() {
    let mut fixture = ActivatorFixture::with(|config| config.pod_backlog = 8).await;
    let pod = start_pod(OK, Duration::from_millis(1)).await;
    let mut clients = Vec::new();
    for _ in 0..100 {
        let mut client = fixture.connect().await;
        client.write_all(GET.as_bytes()).await.unwrap();
        clients.push(client);
    }
    fixture.wait_for_queued(100).await;
    fixture.add_ready_pod("p", pod.address);
    assert!(fixture.metric("rouse_activator_dials_total") <= 4.0);
    for mut client in clients {
        assert!(read_rest(&mut client).await.ends_with("hello"));
    }
    assert_eq!(pod.requests(), 100);
    assert_eq!(fixture.metric("rouse_activator_dial_repeats_total"), 0.0);
}
