#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream as Plain},
    sync::mpsc,
};

use super::*;

const LONG: Duration = Duration::from_secs(20);

struct FakeInterimSink;

impl InterimResponseSink for FakeInterimSink {
    fn on_interim_response(&mut self, _status: StatusCode, _headers: &HeaderMap) {}
}

fn read_head(stream: &mut Plain) {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
        head.push(byte[0]);
    }
}

/// Result of a second request on a connection that the pod closes, before the request came or after the pod has read
/// it.
async fn second_response(
    method: &Method,
    reads: bool,
) -> Result<Response<Http1ResponseBody>, PodSendError> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let (closed, is_closed) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        read_head(&mut stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").unwrap();
        wait.recv().unwrap();
        if reads {
            read_head(&mut stream);
        }
        drop(stream);
        closed.send(()).unwrap();
    });
    let request =
        || Request::builder().method(method).uri("/").body(PodRequestBody::Empty).unwrap();
    let connection = Http1PodConnection::new(TcpStream::connect(address).await.unwrap(), LONG);
    let mut body = connection.send(request(), &mut FakeInterimSink).await.unwrap().into_body();
    while poll_fn(|cx| body.poll_frame(cx)).await.is_some() {}
    let connection = body.into_reusable().unwrap();
    go.send(()).unwrap();
    if !reads {
        // The runtime is blocked meanwhile, so that it does not learn of the close.
        is_closed.recv().unwrap();
    }
    connection.send(request(), &mut FakeInterimSink).await
}

#[tokio::test]
async fn only_a_request_that_the_pod_may_see_twice_is_resendable() {
    for (method, reads, may_repeat) in [
        (Method::GET, false, true),
        (Method::GET, true, true),
        (Method::DELETE, true, false),
        (Method::POST, true, false),
    ] {
        let error = second_response(&method, reads).await.unwrap_err();
        assert_eq!(error.resendable.is_some(), may_repeat, "{method} {:?}", error.cause);
    }
}

#[tokio::test]
async fn the_same_rule_holds_for_a_request_as_bytes() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        loop {
            read_head(&mut stream);
            if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").is_err() {
                return;
            }
        }
    });
    let mut connection = Http1PodConnection::new(TcpStream::connect(address).await.unwrap(), LONG);
    let head = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    // A body of four bytes, which this pod takes for the beginning of the next head.
    for (body, is_safe, may_repeat) in
        [("", true, false), ("", true, true), ("", false, false), ("body", true, false)]
    {
        let body = body.as_bytes();
        let sent = connection.send_bytes(ByteRequest { head, body, is_safe }).await;
        assert_eq!(sent.unwrap(), may_repeat, "{body:?} {is_safe}");
        while connection.parse_received_head().unwrap().is_none() {
            connection.receive().await.unwrap();
        }
        assert!(connection.finish_exchange());
    }
}
