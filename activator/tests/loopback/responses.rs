//! A pod's response reaches the client unchanged, whatever the request was and however much of it was read.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use common::wire::AppProtocol;
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

use crate::{
    h2c::{self, Http2TestCall, Http2TestClient},
    harness::{
        self, ActivatorFixture, DATED, GET, LONG, OK, PausedClock, read_head, read_rest,
        read_until, start_pod_with, wait_until,
    },
};

/// Starts a pod that responds to each head with `response`, reads no body and closes.
async fn start_closing_pod(response: &'static str) -> SocketAddr {
    start_pod_with(move |mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(response.as_bytes()).await.unwrap();
    })
    .await
}

const BIG: &str =
    "HTTP/1.1 413 Payload Too Large\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbig\n";

#[tokio::test]
async fn a_response_given_before_the_body_was_read_reaches_the_client() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_closing_pod(BIG).await);
    let length = 20 << 20;
    for _ in 0..40 {
        let mut client = fixture.connect().await;
        let head = format!("PUT / HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        let (mut from, mut to) = client.split();
        let (body, mut response) = (vec![b'x'; length], Vec::new());
        let read = from.read_to_end(&mut response);
        let (sent, read) = tokio::join!(to.write_all(&body), read);
        let response = String::from_utf8_lossy(&response);
        assert!(response.starts_with("HTTP/1.1 413 ") && response.ends_with("big\n"), "{response}");
        assert!(
            sent.is_ok() && read.is_ok(),
            "a client that sends first is listened to: {sent:?} {read:?}"
        );
    }
}

/// Starts such a pod for one connection, on a thread of its own, so that the runtime cannot delay it.
fn start_resetting_pod(response: &'static str) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            head.push(byte[0]);
        }
        stream.write_all(response.as_bytes()).unwrap();
    });
    address
}

#[tokio::test]
async fn a_response_given_while_the_first_bytes_were_sent_reaches_the_client() {
    let part = "x".repeat(16 << 10);
    for _ in 0..20 {
        let mut fixture = ActivatorFixture::new().await;
        let client = Http2TestClient::connect(fixture.port).await;
        // As much of the body has come before the pod, so that the pod can respond before all of it is written.
        let asked =
            tokio::spawn(client.send_request(Request::put("http://a/"), &[&part[..]; 1_000]));
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", start_resetting_pod(BIG));
        let response = asked.await.unwrap().unwrap();
        assert_eq!((response.head.status().as_u16(), response.body.as_str()), (413, "big\n"));
    }
}

/// Starts a pod that refuses an announced body, and reports how many bytes of it came.
async fn start_unwilling_pod() -> (SocketAddr, mpsc::Receiver<usize>) {
    let (seen, bytes) = mpsc::channel(1);
    let at = start_pod_with(move |mut stream, _| {
        let seen = seen.clone();
        async move {
            let head = read_head(&mut stream).await;
            assert!(head.contains("expect: 100-continue\r\n"), "{head}");
            let no = "HTTP/1.1 401 Unauthorized\r\ncontent-length: 3\r\n\r\nno\n";
            stream.write_all(no.as_bytes()).await.unwrap();
            let mut body = Vec::new();
            stream.read_to_end(&mut body).await.ok();
            seen.send(body.len()).await.unwrap();
        }
    })
    .await;
    (at, bytes)
}

#[tokio::test]
async fn a_body_that_the_pod_refuses_is_not_sent() {
    let mut fixture = ActivatorFixture::new().await;
    let (at, mut bytes) = start_unwilling_pod().await;
    fixture.add_ready_pod("p", at);
    let mut client = fixture.connect().await;
    let head = "PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    let response = read_rest(&mut client).await;
    assert!(response.starts_with("HTTP/1.1 401 ") && response.ends_with("no\n"), "{response}");
    assert_eq!(bytes.recv().await, Some(0));
}

#[tokio::test]
async fn a_pod_that_ignores_expect_gets_the_body() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        assert_eq!(read_until(&mut stream, "hello").await, "hello");
        stream.write_all(OK.as_bytes()).await.unwrap();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = fixture.connect().await;
    let head = "PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nconnection: close\r\n\
                content-length: 5\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_head(&mut client).await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"hello").await.unwrap();
    assert!(read_rest(&mut client).await.ends_with("hello"));
}

#[tokio::test]
async fn a_response_may_have_as_many_header_lines_as_its_bytes_allow() {
    for lines in [99, 101, 150, 2000] {
        let fields: String = (0..lines).map(|at| format!("x-line-{at}: v\r\n")).collect();
        let pod_response = format!("HTTP/1.1 200 OK\r\n{fields}content-length: 2\r\n\r\nok");
        let mut fixture = ActivatorFixture::new().await;
        fixture.add_ready_pod("p", start_closing_pod(pod_response.leak()).await);
        let response = fixture.exchange(GET).await;
        assert!(
            response.starts_with("HTTP/1.1 200 OK\r\n") && response.ends_with("ok"),
            "{lines} {response}"
        );
        assert_eq!(response.matches("x-line-").count(), lines);
    }
}

#[tokio::test]
async fn a_response_whose_head_takes_more_than_a_mebibyte_is_a_502() {
    for (bytes, status) in [(1_000_000, "200"), (1 << 20, "502")] {
        let field = "y".repeat(bytes);
        let pod_response = format!("HTTP/1.1 200 OK\r\nx: {field}\r\ncontent-length: 2\r\n\r\nok");
        let mut fixture = ActivatorFixture::new().await;
        fixture.add_ready_pod("p", start_closing_pod(pod_response.leak()).await);
        let response = fixture.exchange(GET).await;
        assert_eq!(response.get(9..12), Some(status), "{bytes} {response:.200}");
    }
}

/// Starts a pod that sends no interim response for a body of five bytes, and responds once it has read the body. It
/// reports when it has read a head, and then when it has read the body.
async fn start_pod_without_continue() -> (SocketAddr, mpsc::Receiver<&'static str>) {
    let (tell, received) = mpsc::channel(2);
    let at = start_pod_with(move |mut stream, _| {
        let tell = tell.clone();
        async move {
            read_head(&mut stream).await;
            tell.send("head").await.unwrap();
            assert_eq!(read_until(&mut stream, "hello").await, "hello");
            tell.send("body").await.unwrap();
            stream.write_all(OK.as_bytes()).await.unwrap();
        }
    })
    .await;
    (at, received)
}

/// Times just before and just after a body that is held back is sent.
const BEFORE: Duration = Duration::from_millis(999);
const AFTER: Duration = Duration::from_millis(2);

#[tokio::test]
async fn a_body_waits_one_second_for_100_continue() {
    let mut fixture = ActivatorFixture::new().await;
    let (at, mut pod) = start_pod_without_continue().await;
    fixture.add_ready_pod("p", at);
    let clock = PausedClock::start_paused();
    let mut client = fixture.connect().await;
    let head = "PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nconnection: close\r\n\
                content-length: 5\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(pod.recv().await, Some("head"));
    clock.advance(BEFORE).await;
    let nothing = client.try_read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    clock.advance(AFTER).await;
    assert_eq!(read_head(&mut client).await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"hello").await.unwrap();
    assert_eq!(pod.recv().await, Some("body"));
    assert!(read_rest(&mut client).await.ends_with("hello"));
}

/// Begins a request over HTTP/2 that waits for a pod. Its body has come although the client expects `100 Continue`.
async fn start_expecting_call(fixture: &ActivatorFixture) -> Http2TestCall {
    let client = Http2TestClient::connect(fixture.port).await;
    let request = Request::put("http://a/").header("expect", "100-continue");
    let mut call = client.start_call(request.header("content-length", "5")).await;
    call.send_piece("hello").await;
    // h2 has taken the body before, and sends it before the next request.
    call.send_piece("").await;
    let next = Request::get("http://a/").header("k-network-probe", "probe");
    client.send_request(next, &[]).await.unwrap();
    call.end_body();
    fixture.wait_for_queued(1).await;
    call
}

#[tokio::test]
async fn a_body_of_http2_is_held_back_as_well() {
    let mut fixture = ActivatorFixture::new().await;
    let (at, mut pod) = start_pod_without_continue().await;
    let mut call = start_expecting_call(&fixture).await;
    let clock = PausedClock::start_paused();
    fixture.add_ready_pod("p", at);
    assert_eq!(pod.recv().await, Some("head"));
    clock.advance(BEFORE).await;
    assert!(pod.try_recv().is_err(), "the pod has not said its word");
    clock.advance(AFTER).await;
    assert_eq!(pod.recv().await, Some("body"));
    assert_eq!(call.status_code().await, 200);
}

#[tokio::test]
async fn a_body_of_http2_that_the_pod_refuses_is_not_sent() {
    let mut fixture = ActivatorFixture::new().await;
    let (at, mut bytes) = start_unwilling_pod().await;
    let mut call = start_expecting_call(&fixture).await;
    fixture.add_ready_pod("p", at);
    assert_eq!(call.status_code().await, 401);
    let sent = tokio::time::timeout(LONG, bytes.recv()).await;
    assert_eq!(sent.expect("the exchange ends in time"), Some(0));
}

#[tokio::test]
async fn a_response_with_a_length_beside_chunks_loses_the_length() {
    let mut fixture = ActivatorFixture::new().await;
    let both = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n\
                b\r\nhello world\r\n0\r\n\r\n";
    fixture.add_ready_pod("p", start_closing_pod(both).await);
    let response = fixture.exchange(GET).await;
    assert!(
        response.starts_with("HTTP/1.1 200 OK\r\n")
            && response.ends_with("\r\nhello world\r\n0\r\n\r\n"),
        "{response}"
    );
    assert!(!response.contains("content-length"), "{response}");
    // Over HTTP/2 the wrong length would make the response malformed (RFC 9113 §8.1.1).
    let client = Http2TestClient::connect(fixture.port).await;
    let response = client.send_request(Request::get("http://a/"), &[]).await.unwrap();
    assert_eq!((response.head.status().as_u16(), response.body.as_str()), (200, "hello world"));
    assert_eq!(response.head.headers().get("content-length"), None);
}

/// `Date` fields of a response, as a client of each HTTP version gets them.
async fn dates(at: SocketAddr, host: &str) -> [Vec<String>; 2] {
    let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    let response = String::from_utf8(raw(at, request.as_bytes()).await).unwrap();
    let fields = response.lines().filter_map(|line| line.split_once(": "));
    let http1 = fields.filter(|(name, _)| name.eq_ignore_ascii_case("date"));
    let http1 = http1.map(|(_, value)| value.to_owned()).collect();
    let asked = Http2TestClient::connect_to(at)
        .await
        .send_request(Request::get(format!("http://{host}/")), &[]);
    let response = asked.await.unwrap();
    let http2 = response.head.headers().get_all("date").iter();
    [http1, http2.map(|it| it.to_str().unwrap().to_owned()).collect()]
}

#[tokio::test]
async fn a_response_without_a_date_gets_one() {
    let (plain, http2) =
        (harness::start_pod(OK, Duration::ZERO).await, h2c::start_refusing_pod(0).await);
    for (protocol, pod) in [(AppProtocol::Http1, plain.address), (AppProtocol::H2c, http2.address)]
    {
        let mut fixture = ActivatorFixture::new().await;
        fixture.apply_change(|table| {
            table.revisions.get_mut(&harness::revision()).unwrap().protocol = protocol;
        });
        fixture.add_ready_pod("p", pod);
        let (port, unknown) = ((Ipv4Addr::LOCALHOST, fixture.port).into(), "unknown.example");
        for dates in [dates(port, "a").await, dates(fixture.outside, unknown).await].concat() {
            let [date] = &dates[..] else { panic!("{protocol:?} {dates:?}") };
            assert!(date.ends_with(" GMT"), "{date}");
        }
    }
}

#[tokio::test]
async fn a_response_with_a_date_keeps_it_alone() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", harness::start_pod(DATED, Duration::ZERO).await.address);
    let dates = dates((Ipv4Addr::LOCALHOST, fixture.port).into(), "a").await;
    assert_eq!(dates, [["Thu, 01 Jan 2026 00:00:00 GMT"]; 2]);
}

/// Starts a pod that closes each connection at its second head, after it has responded to the first.
async fn start_pod_closing_idle(seen: std::sync::Arc<std::sync::Mutex<Vec<String>>>) -> SocketAddr {
    start_pod_with(move |mut stream, number| {
        let seen = std::sync::Arc::clone(&seen);
        async move {
            let is_first = number == 0;
            for _ in 0..2 {
                let head = read_head(&mut stream).await;
                if !head.ends_with("\r\n\r\n") {
                    return;
                }
                seen.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
                if is_first && seen.lock().unwrap().len() > 1 {
                    return;
                }
                stream.write_all(OK.as_bytes()).await.unwrap();
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_safe_request_is_sent_again_when_an_idle_connection_closes_without_a_response() {
    for (method, code, heads) in [("GET", "200", 3), ("HEAD", "200", 3), ("DELETE", "502", 2)] {
        let mut fixture = ActivatorFixture::new().await;
        let seen = std::sync::Arc::default();
        fixture.add_ready_pod("p", start_pod_closing_idle(std::sync::Arc::clone(&seen)).await);
        assert!(fixture.exchange(GET).await.ends_with("hello"));
        let request = format!("{method} /2 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        let response = fixture.exchange(&request).await;
        assert_eq!(response.get(9..12), Some(code), "{method} {response}");
        assert_eq!(seen.lock().unwrap().len(), heads, "{method}");
    }
}

#[tokio::test]
async fn an_upload_goes_on_while_its_response_is_read_and_ends_with_it() {
    let mut fixture = ActivatorFixture::new().await;
    let at = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        for _ in 0..3 {
            read_until(&mut stream, "part\r\n").await;
            stream.write_all(b"4\r\npart\r\n").await.unwrap();
        }
        stream.write_all(b"0\r\n\r\n").await.unwrap();
        stream.read_to_end(&mut Vec::new()).await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = fixture.connect().await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..3 {
        client.write_all(b"4\r\npart\r\n").await.unwrap();
        read_until(&mut client, "4\r\npart\r\n").await;
    }
    assert_eq!(read_rest(&mut client).await, "0\r\n\r\n");
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 0.0).await;
}

/// Starts a pod that reads a body in chunks, and reports in a header how often `bytes.` is in it.
async fn start_body_counting_pod() -> SocketAddr {
    start_pod_with(|mut stream, _| async move {
        let head = read_head(&mut stream).await;
        assert!(head.contains("transfer-encoding: chunked\r\n"), "{head}");
        let body = read_until(&mut stream, "0\r\n\r\n").await;
        let size = "HTTP/1.1 200 OK\r\nx-body: ";
        let count = body.matches("bytes.").count();
        let response = format!("{size}{count}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(response.as_bytes()).await.unwrap();
        stream.read_u8().await.ok();
    })
    .await
}

#[tokio::test]
async fn a_body_of_unknown_length_reaches_a_pod_whatever_the_method() {
    for method in ["GET", "HEAD", "POST", "DELETE"] {
        let mut fixture = ActivatorFixture::new().await;
        fixture.add_ready_pod("p", start_body_counting_pod().await);
        let client = Http2TestClient::connect(fixture.port).await;
        let request = Request::builder().method(method).uri("http://a/echo");
        let response = client.send_request(request, &["ten ", "bytes."]).await.unwrap();
        assert_eq!(response.head.headers()["x-body"], "1", "{method} over HTTP/2");
    }
}

#[tokio::test]
async fn a_body_in_chunks_reaches_a_pod_whatever_the_method() {
    for method in ["GET", "HEAD", "POST", "DELETE"] {
        let mut fixture = ActivatorFixture::new().await;
        fixture.add_ready_pod("p", start_body_counting_pod().await);
        let request = format!(
            "{method} /echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
             transfer-encoding: chunked\r\n\r\n4\r\nten \r\n6\r\nbytes.\r\n0\r\n\r\n"
        );
        let response = fixture.exchange(&request).await;
        assert!(response.contains("\r\nx-body: 1\r\n"), "{method} over HTTP/1.1: {response}");
    }
}

/// Starts a pod that responds with the request line as it came.
async fn start_mirroring_pod() -> SocketAddr {
    start_pod_with(|mut stream, _| async move {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => return,
                }
            }
            let line = head.split(|byte| *byte == b'\r').next().unwrap().to_vec();
            let length = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", line.len());
            stream.write_all(&[length.as_bytes(), &line].concat()).await.unwrap();
        }
    })
    .await
}

/// Returns the response to raw bytes.
async fn raw(at: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut client = TcpStream::connect(at).await.unwrap();
    client.write_all(request).await.unwrap();
    let mut response = Vec::new();
    client.read_to_end(&mut response).await.ok();
    response
}

#[tokio::test]
async fn a_target_reaches_the_pod_as_it_was_written() {
    let targets: [&[u8]; 9] = [
        b"/?q=\"x\"",
        b"/?f={\"a\":1}",
        b"/?q=<b>",
        b"/a<b>",
        b"/?q=a|b^c",
        b"/caf\xc3\xa9",
        b"/caf\xe9?\xff",
        b"/a%20b?c=%zz",
        b"/a\\b`",
    ];
    let mut fixture = ActivatorFixture::new().await;
    let addresses = [(Ipv4Addr::LOCALHOST, fixture.port).into(), fixture.outside];
    let asked = |target: &[u8]| {
        let rest = b" HTTP/1.1\r\nhost: hello.default.example.com\r\nconnection: close\r\n\r\n";
        [b"GET ", target, &rest[..]].concat()
    };
    // While the service is asleep, the first request wakes it.
    let first = tokio::spawn({
        let (address, request) = (addresses[0], asked(targets[0]));
        async move { raw(address, &request).await }
    });
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", start_mirroring_pod().await);
    let mut responses = vec![(targets[0], first.await.unwrap())];
    for address in addresses {
        for target in targets {
            responses.push((target, raw(address, &asked(target)).await));
        }
    }
    for (target, response) in responses {
        let line = [b"GET ", target, b" HTTP/1.1"].concat();
        assert!(response.ends_with(&line), "{} {}", target.escape_ascii(), response.escape_ascii());
    }
    for target in [&b"/a b"[..], b"/\x01", b"/\x7f", b"/\0", b"/a\tb", b"/a\rb", b""] {
        for address in addresses {
            let response = raw(address, &asked(target)).await;
            assert_eq!(response.get(9..12), Some(&b"400"[..]), "{}", target.escape_ascii());
        }
    }
}

#[tokio::test]
async fn a_persistent_connection_may_send_such_targets_one_after_another() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_mirroring_pod().await);
    let mut client = fixture.connect().await;
    for target in ["/\"1\"", "/2", "/<3>", "/%223%22", "/\"4\""] {
        let request = format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let line = format!("GET {target} HTTP/1.1");
        assert!(read_until(&mut client, &line).await.ends_with(&line));
    }
}

#[tokio::test]
async fn a_request_may_have_as_many_header_lines_as_its_bytes_allow() {
    for lines in [99, 101, 120, 2000] {
        let fields: String = (0..lines).map(|at| format!("x-line-{at}: v\r\n")).collect();
        let mut fixture = ActivatorFixture::new().await;
        let server = harness::start_pod(OK, Duration::ZERO).await;
        fixture.add_ready_pod("p", server.address);
        let request = format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{fields}\r\n");
        let response = fixture.exchange(&request).await;
        assert!(response.ends_with("hello"), "{lines} {response}");
        assert_eq!(server.heads().matches("x-line-").count(), lines);
    }
}

#[tokio::test]
async fn responses_before_the_final_one_are_passed_on_where_the_version_knows_them() {
    let hints = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\nconnection: x\r\nx: y\r\n\r\n\
                 HTTP/1.1 102 Processing\r\n\r\n";
    let both: &str = format!("{hints}{OK}").leak();
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", harness::start_pod(both, Duration::ZERO).await.address);
    let response = fixture.exchange(GET).await;
    let early = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n";
    assert!(response.starts_with(early) && response.ends_with("hello"), "{response}");
    let old = fixture.exchange("GET / HTTP/1.0\r\nhost: a\r\n\r\n").await;
    assert!(old.starts_with("HTTP/1.0 200 ") || old.starts_with("HTTP/1.1 200 "), "{old}");
    let client = Http2TestClient::connect(fixture.port).await;
    let response = client.send_request(Request::get("http://a/"), &[]).await.unwrap();
    assert_eq!((response.head.status().as_u16(), response.body.as_str()), (200, "hello"));
}
