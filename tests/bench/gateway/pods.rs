//! Shell: pods that the bench itself plays, on its own core: one that speaks gRPC, and pods that count their requests.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    HeaderMap, Request, Response,
    body::{Body, Bytes, Frame, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};

use crate::http1::head_length;

/// Length of the accept queue: longer than any number of connections of the bench.
const BACKLOG: u32 = 65_535;
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(5);
/// Message of gRPC: a prefix of five bytes (not compressed, length 5) and the content.
pub(crate) const GRPC_MESSAGE: &[u8] = b"\0\0\0\0\x05hello";

/// Pod that answers each request with the same body, and counts the requests.
#[derive(Clone, Debug)]
pub(crate) struct CountingPod {
    pub(crate) address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

impl CountingPod {
    /// Starts the pod on an unused port. It must be called in a runtime, with which the pod ends.
    pub(crate) fn start(body: &'static str) -> Result<Self> {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let address = listener.local_addr().context("a listener has an address")?;
        let pod = Self { address, requests: Arc::default() };
        let requests = Arc::clone(&pod.requests);
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(serve_http1(stream, body, Arc::clone(&requests)));
                    }
                    // Too many files are open. The next response to a client closes one.
                    Err(_no_file) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
        });
        Ok(pod)
    }

    /// Number of requests so far.
    pub(crate) fn request_count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// Starts the pod that answers calls of gRPC at `address`. It must be called in a runtime, with which the pod ends.
pub(crate) fn start_grpc_pod(address: SocketAddr) -> Result<()> {
    let listener = listen(address)?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // Without it, a small response may wait for an acknowledgement.
            if stream.set_nodelay(true).is_err() {
                continue;
            }
            let server = http2::Builder::new(TokioExecutor::new());
            let connection = server.serve_connection(TokioIo::new(stream), service_fn(answer_call));
            tokio::spawn(connection);
        }
    });
    Ok(())
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let socket = TcpSocket::new_v4().context("cannot make a socket")?;
    socket.set_reuseaddr(true)?;
    socket.bind(address).with_context(|| format!("cannot bind to {address}"))?;
    socket.listen(BACKLOG).with_context(|| format!("cannot listen on {address}"))
}

/// Answers one call of gRPC with a message and a status in the trailers.
async fn answer_call(
    request: Request<Incoming>,
) -> Result<Response<impl Body<Data = Bytes, Error = Infallible>>, hyper::Error> {
    request.into_body().collect().await?;
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let frames = [Frame::data(Bytes::from_static(GRPC_MESSAGE)), Frame::trailers(trailers)];
    let mut response =
        Response::new(StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>))));
    let content_type = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    Ok(response)
}

/// Answers the requests of one connection, which have no bodies.
async fn serve_http1(mut stream: TcpStream, body: &'static str, requests: Arc<AtomicUsize>) {
    let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut received = Vec::with_capacity(1024);
    while let Ok(1..) = stream.read_buf(&mut received).await {
        while let Some(length) = head_length(&received) {
            received.drain(..length);
            requests.fetch_add(1, Ordering::SeqCst);
            if stream.write_all(response.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}
