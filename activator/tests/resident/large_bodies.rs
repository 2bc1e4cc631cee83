//! Shell: large bodies in both directions. Each byte arrives in its place, and the activator holds only a small part of
//! them.

use std::{convert::Infallible, iter, sync::LazyLock};

use bytes::Bytes;
use http::{
    Method, Request, Response, StatusCode,
    header::{CONTENT_LENGTH, HOST as HOST_HEADER},
};
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    client,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use crate::{
    ATTACKER, ActivatorProcessFixture, MIB, connect_from,
    harness::start_pod_with,
    is_long,
    tls_client::{HOST, client_config, handshake},
};

/// Size of each body, and that with `--long`.
const BODY_BYTES: usize = 64 * MIB;
const LONG_BODY_BYTES: usize = 10_240 * MIB;
/// Permitted growth of the process in MiB, whatever the size of the bodies: half of one at most.
const MAX_GROWTH_MIB: usize = 32;
/// Header of a response: number of bytes that the pod has received.
const RECEIVED: &str = "x-received";

/// Period of the bytes. It is a prime, so that pieces of usual sizes differ from each other.
const PERIOD: usize = 65_521;
/// Size of the pieces that are sent; less than the period.
const PIECE: usize = 32 << 10;

/// Pseudo-random bytes of one period, and one piece of the next.
static PATTERN: LazyLock<Bytes> = LazyLock::new(|| {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    let mut bytes: Vec<u8> = iter::repeat_with(next).take(PERIOD).collect();
    bytes.extend_from_within(..PIECE);
    bytes.into()
});

type PatternBody = UnsyncBoxBody<Bytes, Infallible>;

/// Body of this many bytes of the pattern. Its pieces share the memory of the pattern.
fn pattern_body(length: usize) -> PatternBody {
    let pieces = (0..length).step_by(PIECE).map(move |offset| {
        let begin = offset % PERIOD;
        let piece = PATTERN.slice(begin..begin + PIECE.min(length - offset));
        Ok::<_, Infallible>(Frame::data(piece))
    });
    StreamBody::new(futures::stream::iter(pieces)).boxed_unsync()
}

/// Reads a body to its end, and returns the number of its bytes. Panics at the first byte that is not in its place.
async fn read_pattern(mut body: Incoming) -> usize {
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.expect("the body is whole").into_data() else { continue };
        for piece in data.chunks(PIECE) {
            let begin = received % PERIOD;
            assert!(*piece == PATTERN[begin..begin + piece.len()], "after {received} bytes");
            received += piece.len();
        }
    }
    received
}

/// Reads the body of each request, and responds with one of `length` bytes. It states its length if the request does.
async fn swap_bodies(stream: TcpStream, length: usize) {
    let service = service_fn(move |request: Request<Incoming>| async move {
        let states_length = request.headers().contains_key(CONTENT_LENGTH);
        let received = read_pattern(request.into_body()).await;
        let mut response = Response::builder().header(RECEIVED, received);
        if states_length {
            response = response.header(CONTENT_LENGTH, length);
        }
        response.body(pattern_body(length))
    });
    http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
}

/// Sends a body over HTTP/1.1, with its length or in chunks, and reads that of the response.
async fn swap_over_http1(stream: TcpStream, length: usize, states_length: bool) {
    let (mut sender, connection) =
        client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = Request::builder().method(Method::POST).uri("/").header(HOST_HEADER, HOST);
    if states_length {
        request = request.header(CONTENT_LENGTH, length);
    }
    let request = request.body(pattern_body(length)).unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.headers().contains_key(CONTENT_LENGTH), states_length);
    check_response(response, length).await;
}

/// Sends a body over HTTP/2, and reads that of the response.
async fn swap_over_http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    length: usize,
) {
    let handshake = client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().method(Method::POST).uri(format!("https://{HOST}/"));
    let request = request.body(pattern_body(length)).unwrap();
    check_response(sender.send_request(request).await.unwrap(), length).await;
}

async fn check_response(response: Response<Incoming>, length: usize) {
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()[RECEIVED], length.to_string());
    assert_eq!(read_pattern(response.into_body()).await, length);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_pass_both_ways_and_are_not_held() {
    let length = if is_long() { LONG_BODY_BYTES } else { BODY_BYTES };
    let mut process = ActivatorProcessFixture::start();
    let pod = start_pod_with(move |stream, _| swap_bodies(stream, length)).await;
    process.set_pod("http1", pod);
    for states_length in [true, false] {
        swap_over_http1(process.connect(ATTACKER).await, length, states_length).await;
    }
    let stream = connect_from(ATTACKER, process.tls_port).await;
    let stream = handshake(stream, client_config(&["h2"]), HOST).await.unwrap();
    swap_over_http2(stream, length).await;
    let grown = process.peak_growth_mib();
    println!("six bodies of {} MiB: it grew by {grown} MiB", length / MIB);
    assert!(grown <= MAX_GROWTH_MIB, "it grew by {grown} MiB");
}
