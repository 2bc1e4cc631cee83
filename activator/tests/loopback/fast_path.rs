//! Plain requests of HTTP/1.1 take the fast path, where clients and pods get the same as on the general path.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::wire::RouteTarget;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

use crate::{
    harness::{
        ActivatorFixture, DATED, FakeHttp1Pod, LONG, OK, PausedClock, read_head, read_rest,
        read_until, revision, service, start_pod, start_pod_with, wait_until,
    },
    messages::{KEEP_ALIVE_GET, start_reading_pod},
};

const FAST: &str = "rouse_activator_fast_path_requests_total";
const SERVED: &str = "rouse_activator_requests_total{code=\"2xx\"}";
const CANCELLED: &str = "rouse_activator_requests_total{code=\"cancelled\"}";

/// Starts an activator in front of a pod.
async fn start_with(pod: SocketAddr) -> ActivatorFixture {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", pod);
    fixture
}

/// Sends a request, and reads the response up to these bytes.
async fn ask(client: &mut TcpStream, request: &str, end: &str) -> String {
    client.write_all(request.as_bytes()).await.unwrap();
    read_until(client, end).await
}

/// Number of requests at pods.
fn at_pods(fixture: &ActivatorFixture) -> u64 {
    fixture.activator.forwarder.routes.revision(&revision()).unwrap().queue_metrics().at_pods
}

#[tokio::test]
async fn plain_requests_take_the_fast_path_one_by_one_and_several_at_once() {
    let pod = start_pod(OK, Duration::ZERO).await;
    let fixture = start_with(pod.address).await;
    let mut client = fixture.connect().await;
    for _ in 0..5 {
        let response = ask(&mut client, KEEP_ALIVE_GET, "hello").await;
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }
    let first = ask(&mut client, &KEEP_ALIVE_GET.repeat(2), "hello").await;
    let second = read_until(&mut client, "hello").await;
    assert_eq!(first.len(), second.len());
    assert_eq!((pod.requests(), pod.connections()), (7, 1));
    assert_eq!([FAST, SERVED].map(|it| fixture.metric(it)), [7.0, 7.0]);
    assert_eq!((at_pods(&fixture), fixture.waiting_totals()), (0, (0, 0)));
}

#[tokio::test]
async fn each_other_request_is_handed_to_the_general_path_with_all_that_follows() {
    let fixture = start_with(start_reading_pod(OK).await).await;
    for (fields, body) in [
        ("te: trailers\r\n", ""),
        ("cookie: a=b\r\ncookie: c=d\r\n", ""),
        ("x_under: 1\r\n", ""),
        ("k-own: 1\r\n", ""),
        ("tracestate: a=b\r\n", ""),
        ("proxy-connection: keep-alive\r\n", ""),
        ("expect: 100-continue\r\ncontent-length: 5\r\n", "12345"),
    ] {
        let mut client = fixture.connect().await;
        let request = format!("GET /1 HTTP/1.1\r\nhost: a\r\n{fields}\r\n{body}{KEEP_ALIVE_GET}");
        let first = ask(&mut client, &request, "hello").await;
        let second = read_until(&mut client, "hello").await;
        assert!([first, second].iter().all(|it| it.contains("HTTP/1.1 200 OK\r\n")), "{fields}");
    }
    assert_eq!([FAST, SERVED].map(|it| fixture.metric(it)), [0.0, 14.0]);
    // Plain requests before one of another kind.
    let mut client = fixture.connect().await;
    let last = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    client.write_all(format!("{}{last}", KEEP_ALIVE_GET.repeat(2)).as_bytes()).await.unwrap();
    assert_eq!(read_rest(&mut client).await.matches("hello").count(), 3);
    assert_eq!([FAST, SERVED].map(|it| fixture.metric(it)), [2.0, 17.0]);
}

#[tokio::test]
async fn a_setting_leads_all_requests_over_the_general_path() {
    let mut fixture = ActivatorFixture::with(|config| config.no_fast_path = true).await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let mut client = fixture.connect().await;
    for _ in 0..2 {
        ask(&mut client, KEEP_ALIVE_GET, "hello").await;
    }
    assert_eq!([FAST, SERVED].map(|it| fixture.metric(it)), [0.0, 2.0]);
}

#[tokio::test]
async fn a_body_that_comes_with_its_head_takes_the_fast_path() {
    let fixture = start_with(start_reading_pod(OK).await).await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n";
    let mut client = fixture.connect().await;
    ask(&mut client, &format!("{head}12345"), "hello").await;
    ask(&mut client, KEEP_ALIVE_GET, "hello").await;
    assert_eq!(fixture.metric(FAST), 2.0);
    client.write_all(head.as_bytes()).await.unwrap();
    // The pod has the head before the body comes, so that it may respond early.
    wait_until(|| at_pods(&fixture) == 1).await;
    ask(&mut client, "12345", "hello").await;
    assert_eq!([FAST, SERVED].map(|it| fixture.metric(it)), [2.0, 3.0]);
}

/// Lines of a message in order of their text, without those that differ each time.
fn compared_lines(message: &str) -> Vec<String> {
    let differs = |line: &&str| !["date:", "traceparent:"].iter().any(|it| line.starts_with(it));
    let mut lines: Vec<_> = message.lines().filter(differs).map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

/// Sends these requests over one connection. Returns the lines that the pod and the client got for each.
async fn exchanges(
    has_fast_path: bool,
    requests: &[&str],
    (response, end): (&'static str, &str),
) -> Vec<[Vec<String>; 2]> {
    let mut fixture = ActivatorFixture::with(|config| config.no_fast_path = !has_fast_path).await;
    let pod: FakeHttp1Pod = start_pod(response, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let mut all = Vec::new();
    for outside in [false, true] {
        let port = (std::net::Ipv4Addr::LOCALHOST, fixture.port).into();
        let address: SocketAddr = if outside { fixture.outside } else { port };
        let mut client = TcpStream::connect(address).await.unwrap();
        for request in requests {
            let received = ask(&mut client, request, end).await;
            let sent = std::mem::take(&mut *pod.heads.lock().unwrap()).join("");
            all.push([compared_lines(&sent), compared_lines(&received)]);
        }
    }
    let fast = if has_fast_path { all.len() } else { 0 };
    assert_eq!(fixture.metric(FAST), f64::from(u32::try_from(fast).unwrap()));
    all
}

#[tokio::test]
async fn pods_and_clients_get_the_same_on_both_paths() {
    let requests = [
        "GET /a?b=c HTTP/1.1\r\nHost: hello.default.example.com\r\nAccept: */*\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: hello.default.example.com:80\r\nConnection: keep-alive\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: hello.default.example.com\r\nx-forwarded-for: 10.1.1.1\r\n\
         Forwarded: for=10.2.2.2\r\nX-Forwarded-Proto: https\r\nx-real-ip: 10.3.3.3\r\n\r\n",
        "DELETE /%20;x HTTP/1.1\r\nhost: hello.default.example.com\r\nKeep-Alive: timeout=5\r\n\
         cookie: a=b\r\n\r\n",
    ];
    for response in [
        (OK, "hello"),
        (DATED, "hello"),
        (
            "HTTP/1.1 404 Not Here\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\nKeep-Alive: 5\r\n\
             \r\nhello",
            "hello",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nt: u\r\n\r\n",
            "0\r\n\r\n",
        ),
        ("HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n", "\r\n\r\n"),
        ("HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 5\r\n\r\n", "\r\n\r\n"),
        (
            "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
            "hello",
        ),
        (
            "HTTP/1.1 200 OK\r\nconnection: x-own\r\nx-own: 1\r\ncontent-length: 5\r\n\r\nhello",
            "hello",
        ),
    ] {
        let [fast, general] = [
            exchanges(true, &requests, response).await,
            exchanges(false, &requests, response).await,
        ];
        for (at, pair) in fast.iter().zip(&general).enumerate() {
            assert_eq!(pair.0, pair.1, "request {at}, response {}", response.0);
        }
        assert_eq!(fast.len(), general.len());
    }
}

#[tokio::test]
async fn a_request_is_sent_again_when_an_idle_connection_closes() {
    let (closed_tx, mut closed) = mpsc::channel(1);
    let address = start_pod_with(move |mut stream, number| {
        let closed_tx = closed_tx.clone();
        async move {
            loop {
                let head = read_head(&mut stream).await;
                if !head.ends_with("\r\n\r\n") {
                    return;
                }
                if number == 0 && head.starts_with("GET /2") {
                    closed_tx.send(()).await.unwrap();
                    return;
                }
                stream.write_all(OK.as_bytes()).await.unwrap();
            }
        }
    })
    .await;
    let fixture = start_with(address).await;
    let mut client = fixture.connect().await;
    ask(&mut client, KEEP_ALIVE_GET, "hello").await;
    let again = "GET /2 HTTP/1.1\r\nhost: a\r\n\r\n";
    assert!(ask(&mut client, again, "hello").await.starts_with("HTTP/1.1 200"));
    closed.recv().await.unwrap();
    assert_eq!(fixture.metric("rouse_activator_retries_total"), 1.0);
    assert_eq!(fixture.metric(FAST), 2.0);
}

#[tokio::test]
async fn a_pod_that_closes_without_a_response_is_a_502_and_the_client_goes_on() {
    let address = start_pod_with(|mut stream, number| async move {
        let head = read_head(&mut stream).await;
        if number > 0 && head.ends_with("\r\n\r\n") {
            stream.write_all(OK.as_bytes()).await.unwrap();
        }
    })
    .await;
    let fixture = start_with(address).await;
    let mut client = fixture.connect().await;
    let end = "connection closed before message completed";
    let response = ask(&mut client, KEEP_ALIVE_GET, end).await;
    assert!(response.starts_with("HTTP/1.1 502 Bad Gateway\r\n"), "{response}");
    assert!(response.contains("\r\ndate: "), "{response}");
    assert!(ask(&mut client, KEEP_ALIVE_GET, "hello").await.starts_with("HTTP/1.1 200"));
    assert_eq!((fixture.metric(FAST), at_pods(&fixture)), (2.0, 0));
}

#[tokio::test]
async fn a_response_that_breaks_off_breaks_the_clients_connection() {
    let address = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe").await.unwrap();
    })
    .await;
    let fixture = start_with(address).await;
    let mut client = fixture.connect().await;
    client.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
    assert!(read_rest(&mut client).await.ends_with("\r\n\r\nhe"));
    wait_until(|| at_pods(&fixture) == 0).await;
    assert_eq!(fixture.metric(FAST), 1.0);
}

#[tokio::test]
async fn a_client_that_goes_frees_the_pod() {
    let pod = start_pod(OK, LONG).await;
    let fixture = start_with(pod.address).await;
    let mut client = fixture.connect().await;
    client.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
    wait_until(|| pod.requests() == 1 || !pod.heads().is_empty()).await;
    assert_eq!(at_pods(&fixture), 1);
    drop(client);
    wait_until(|| at_pods(&fixture) == 0).await;
    wait_until(|| fixture.metric(CANCELLED) == 1.0).await;
}

#[tokio::test]
async fn a_timeout_is_a_504_and_the_client_goes_on() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().timeout = Duration::from_millis(30);
    });
    let pod = start_pod(OK, LONG).await;
    fixture.add_ready_pod("p", pod.address);
    let mut client = fixture.connect().await;
    for _ in 0..2 {
        let response = ask(&mut client, KEEP_ALIVE_GET, "activator request timeout").await;
        assert!(response.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"), "{response}");
    }
    assert_eq!((fixture.metric(FAST), at_pods(&fixture)), (2.0, 0));
}

#[tokio::test]
async fn a_timeout_after_the_head_is_appended_to_the_chunks() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        entry.idle_timeout = Some(Duration::from_millis(30));
    });
    let address = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        let begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";
        stream.write_all(begun).await.unwrap();
        stream.read_u8().await.ok();
    })
    .await;
    fixture.add_ready_pod("p", address);
    // A busy machine may begin later.
    let clock = PausedClock::start_paused();
    let mut client = fixture.connect().await;
    let mut response = ask(&mut client, KEEP_ALIVE_GET, "hello").await;
    clock.advance(Duration::from_millis(31)).await;
    response += &read_until(&mut client, "0\r\n\r\n").await;
    let end = "\r\n\r\n5\r\nhello\r\n19\r\nactivator request timeout\r\n0\r\n\r\n";
    assert!(response.ends_with(end), "{response}");
    assert_eq!(fixture.metric(FAST), 1.0);
}

#[tokio::test]
async fn a_response_in_flight_ends_when_the_activator_stops() {
    let (go, mut wait) = mpsc::channel::<()>(1);
    let (asked_tx, mut asked) = mpsc::channel(1);
    let address = crate::messages::start_pod_once(move |mut stream, _| async move {
        asked_tx.send(()).await.unwrap();
        wait.recv().await;
        stream.write_all(OK.as_bytes()).await.unwrap();
    })
    .await;
    let fixture = start_with(address).await;
    let mut idle = fixture.connect().await;
    let mut client = fixture.connect().await;
    client.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
    asked.recv().await.unwrap();
    fixture.shutdown.cancel();
    assert_eq!(read_rest(&mut idle).await, "", "an idle connection ends at once");
    go.send(()).await.unwrap();
    let response = read_rest(&mut client).await;
    assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
    assert!(response.ends_with("hello"), "{response}");
    assert_eq!(fixture.metric(FAST), 1.0);
}

#[tokio::test]
async fn a_large_response_reaches_a_slow_client_whole() {
    const BYTES: usize = 8 << 20;
    let address = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {BYTES}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        for at in 0..BYTES / 4096 {
            let piece = [u8::try_from(at % 251).unwrap(); 4096];
            stream.write_all(&piece).await.unwrap();
        }
    })
    .await;
    let fixture = start_with(address).await;
    let mut client = fixture.connect().await;
    client.write_all(KEEP_ALIVE_GET.as_bytes()).await.unwrap();
    let connections = fixture.activator.server.connections();
    // Nothing is read until the bytes that wait for the client are counted.
    wait_until(|| connections.response_bytes() > 0).await;
    read_head(&mut client).await;
    let mut body = vec![0; BYTES];
    client.read_exact(&mut body).await.unwrap();
    let is_right =
        |(at, piece): (usize, &[u8])| piece.iter().all(|it| usize::from(*it) == at % 251);
    assert!(body.chunks(4096).enumerate().all(is_right));
    wait_until(|| connections.response_bytes() == 0 && at_pods(&fixture) == 0).await;
    assert_eq!(fixture.metric(FAST), 1.0);
}

#[tokio::test]
async fn a_head_that_comes_in_parts_is_charged_until_it_is_whole() {
    let fixture_pod = start_pod(OK, Duration::ZERO).await;
    let fixture = start_with(fixture_pod.address).await;
    let (first, rest) = KEEP_ALIVE_GET.split_at(20);
    let mut client = fixture.connect().await;
    client.write_all(first.as_bytes()).await.unwrap();
    let connections = fixture.activator.server.connections();
    wait_until(|| connections.request_bytes() == first.len()).await;
    ask(&mut client, rest, "hello").await;
    assert_eq!((connections.request_bytes(), fixture.metric(FAST)), (0, 1.0));
}

#[tokio::test]
async fn a_kept_connection_follows_the_table() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let mut client = fixture.connect().await;
    ask(&mut client, KEEP_ALIVE_GET, "hello").await;
    fixture.apply_change(|table| drop(table.services.remove(&service())));
    assert!(ask(&mut client, KEEP_ALIVE_GET, "\r\n\r\n").await.starts_with("HTTP/1.1 404"));
    assert_eq!(fixture.metric(FAST), 1.0);
}

#[tokio::test]
async fn requests_that_several_revisions_share_take_the_general_path() {
    let mut fixture = start_with(start_pod(OK, Duration::ZERO).await.address).await;
    for (percents, fast) in [([50, 50], 0.0), ([100, 0], 1.0)] {
        fixture.apply_change(|table| {
            let to = |percent| RouteTarget { revision: revision(), percent };
            table.services.get_mut(&service()).unwrap().targets = percents.map(to).to_vec();
        });
        let mut client = fixture.connect().await;
        ask(&mut client, KEEP_ALIVE_GET, "hello").await;
        assert_eq!(fixture.metric(FAST), fast, "{percents:?}");
    }
}

#[tokio::test]
async fn a_response_without_a_length_ends_with_the_pods_connection() {
    let address = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhello").await.unwrap();
    })
    .await;
    let fixture = start_with(address).await;
    let mut client = fixture.connect().await;
    for _ in 0..2 {
        let response = ask(&mut client, KEEP_ALIVE_GET, "0\r\n\r\n").await;
        assert!(response.contains("\r\ntransfer-encoding: chunked\r\n"), "{response}");
        assert!(response.ends_with("\r\n\r\n5\r\nhello\r\n0\r\n\r\n"), "{response}");
    }
    assert_eq!((fixture.metric(FAST), at_pods(&fixture)), (2.0, 0));
}

#[tokio::test]
async fn bytes_behind_a_response_belong_to_no_other_request() {
    const MORE: &str =
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhelloHTTP/1.1 404 Smuggled\r\n\r\n";
    let pod = start_pod(MORE, Duration::ZERO).await;
    let fixture = start_with(pod.address).await;
    let mut client = fixture.connect().await;
    for _ in 0..2 {
        let response = ask(&mut client, KEEP_ALIVE_GET, "hello").await;
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }
    assert_eq!((pod.connections(), fixture.metric(FAST)), (2, 2.0));
}
