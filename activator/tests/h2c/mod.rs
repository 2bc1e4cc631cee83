//! Pods and clients that speak HTTP/2 without TLS.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    convert::Infallible,
    future::Future,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use datapath::h2::{frame_flag, frame_kind};
use futures::{StreamExt as _, future::poll_fn};
use http::{HeaderMap, Request, Response, request};
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    client, server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use crate::harness::LONG;

pub type Http2TestBody = UnsyncBoxBody<Bytes, Infallible>;
pub type Http2RequestHead = request::Parts;
pub type Http2ResponseFuture = Pin<Box<dyn Future<Output = Response<Http2TestBody>> + Send>>;

/// Pod that records its connections and requests.
#[derive(Clone)]
pub struct FakeHttp2Pod {
    pub address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    ended_requests: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Http2RequestHead>>>,
    /// Number of requests after which a connection ends with GOAWAY; 0: never.
    pub goaway_every: Arc<AtomicUsize>,
}

/// Guard that adds one to a counter when it is dropped.
struct DropCounterGuard(Arc<AtomicUsize>);

impl Drop for DropCounterGuard {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl FakeHttp2Pod {
    async fn bind() -> (Self, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pod = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            requests: Arc::default(),
            ended_requests: Arc::default(),
            seen: Arc::default(),
            goaway_every: Arc::default(),
        };
        (pod, listener)
    }

    pub async fn start(respond: fn(Incoming) -> Http2ResponseFuture) -> Self {
        let (pod, listener) = Self::bind().await;
        let serving = pod.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serving.clone().serve(stream, respond));
            }
        });
        pod
    }

    async fn serve(self, stream: TcpStream, respond: fn(Incoming) -> Http2ResponseFuture) {
        let on_connection = Arc::new(AtomicUsize::new(0));
        let goaway_due = Arc::new(tokio::sync::Notify::new());
        let service = service_fn(|request: Request<Incoming>| {
            let (pod, on_connection, goaway_due) =
                (self.clone(), Arc::clone(&on_connection), Arc::clone(&goaway_due));
            async move {
                let (head, body) = request.into_parts();
                pod.seen.lock().unwrap().push(head);
                pod.requests.fetch_add(1, Ordering::SeqCst);
                let _ended = DropCounterGuard(Arc::clone(&pod.ended_requests));
                if on_connection.fetch_add(1, Ordering::SeqCst) + 1
                    == pod.goaway_every.load(Ordering::SeqCst)
                {
                    goaway_due.notify_one();
                }
                Ok::<_, Infallible>(respond(body).await)
            }
        });
        let connection = server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = goaway_due.notified() => connection.as_mut().graceful_shutdown(),
        }
        connection.await.ok();
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Number of requests that ended, with or without a response.
    pub fn ended_requests(&self) -> usize {
        self.ended_requests.load(Ordering::SeqCst)
    }

    pub fn request_heads(&self) -> Vec<Http2RequestHead> {
        self.seen.lock().unwrap().clone()
    }
}

/// Responds with the request's body as it comes, and with the trailers of a successful gRPC call.
pub fn echo(body: Incoming) -> Http2ResponseFuture {
    let frames = body.into_data_stream().map(|data| Ok(Frame::data(data.unwrap_or_default())));
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
    let end = futures::stream::once(async { Ok(Frame::trailers(trailers)) });
    let body = StreamBody::new(frames.chain(end)).boxed_unsync();
    Box::pin(async { Response::new(body) })
}

/// Responds as [`echo`] does, 100 ms later.
pub fn slow(body: Incoming) -> Http2ResponseFuture {
    Box::pin(async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        echo(body).await
    })
}

/// Never responds to a request.
pub fn never(_body: Incoming) -> Http2ResponseFuture {
    Box::pin(std::future::pending())
}

/// Begins a response and never ends it.
pub fn start_then_stall(_body: Incoming) -> Http2ResponseFuture {
    let begun = futures::stream::once(async { Ok(Frame::data(Bytes::from("begun"))) });
    let body = StreamBody::new(begun.chain(futures::stream::pending())).boxed_unsync();
    Box::pin(async { Response::new(body) })
}

/// Starts a pod that refuses the first `count` requests before it processes them.
pub async fn start_refusing_pod(count: usize) -> FakeHttp2Pod {
    let (pod, listener) = FakeHttp2Pod::bind().await;
    let serving = pod.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let serving = serving.clone();
            tokio::spawn(async move {
                let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                while let Some(Ok((_request, mut respond))) = connection.accept().await {
                    if serving.requests.fetch_add(1, Ordering::SeqCst) < count {
                        respond.send_reset(h2::Reason::REFUSED_STREAM);
                    } else {
                        respond.send_response(Response::new(()), true).ok();
                    }
                }
            });
        }
    });
    pod
}

/// Builder of a GET at the service's public host.
pub fn get(path: &str) -> request::Builder {
    Request::get(format!("http://hello.default.example.com{path}"))
}

/// HTTP/2 connection of a client.
#[derive(Clone)]
pub struct Http2TestClient(client::conn::http2::SendRequest<Http2TestBody>);

/// Complete response to a client.
#[derive(Debug)]
pub struct Http2TestResponse {
    pub head: Response<()>,
    pub body: String,
    trailers: HeaderMap,
}

impl Http2TestResponse {
    pub fn trailer(&self, name: &str) -> Option<&str> {
        self.trailers.get(name).map(|it| it.to_str().unwrap())
    }
}

impl Http2TestClient {
    pub async fn connect(port: u16) -> Self {
        Self::connect_to((Ipv4Addr::LOCALHOST, port).into()).await
    }

    pub async fn connect_to(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap()).await
    }

    /// Speaks HTTP/2 over a stream that is open.
    pub async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let (sender, driver) =
            client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(driver);
        Self(sender)
    }

    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends a request with a body in these parts, and reads the whole response.
    pub fn send_request(
        &self,
        request: request::Builder,
        parts: &[&str],
    ) -> impl Future<Output = Result<Http2TestResponse, hyper::Error>> + Send + use<> {
        let mut sender = self.0.clone();
        let parts: Vec<_> =
            parts.iter().map(|it| Ok(Frame::data(Bytes::from((*it).to_owned())))).collect();
        let body = match parts.is_empty() {
            true => http_body_util::Empty::new().boxed_unsync(),
            false => StreamBody::new(futures::stream::iter(parts)).boxed_unsync(),
        };
        let request = request.body(body).unwrap();
        async move {
            let responding = async {
                let (head, body) = sender.send_request(request).await?.into_parts();
                let body = body.collect().await?;
                let trailers = body.trailers().cloned().unwrap_or_default();
                let body = String::from_utf8(body.to_bytes().into()).unwrap();
                Ok(Http2TestResponse { head: Response::from_parts(head, ()), body, trailers })
            };
            tokio::time::timeout(LONG, responding).await.expect("responses in time")
        }
    }

    /// Begins a request whose body is sent piece by piece. Dropping the call resets it.
    pub async fn start_call(&self, request: request::Builder) -> Http2TestCall {
        let mut sender = self.0.clone();
        let (piece_sender, parts) = mpsc::channel(1);
        let parts = futures::stream::unfold(parts, async |mut parts: mpsc::Receiver<Bytes>| {
            let part = parts.recv().await?;
            Some((Ok(Frame::data(part)), parts))
        });
        let body = StreamBody::new(parts).boxed_unsync();
        let request = request.body(body).unwrap();
        let mut response: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(async move { sender.send_request(request).await });
        // Sends the request, and nothing else.
        let now = futures::poll!(response.as_mut());
        assert!(now.is_pending());
        Http2TestCall { piece_sender: Some(piece_sender), response }
    }
}

/// Request in progress, whose body is sent piece by piece.
pub struct Http2TestCall {
    /// `None` once the body has ended.
    piece_sender: Option<mpsc::Sender<Bytes>>,
    response: Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>,
}

/// Response whose body is being read.
pub struct Http2ResponseReader(Incoming);

impl Http2TestCall {
    pub async fn send_piece(&mut self, text: &str) {
        // The receiver is gone once the request is over.
        self.piece_sender.as_ref().unwrap().send(Bytes::from(text.to_owned())).await.ok();
    }

    /// Waits for the head of the response.
    pub async fn response_head(&mut self) -> Http2ResponseReader {
        let response = tokio::time::timeout(LONG, self.response.as_mut()).await;
        Http2ResponseReader(response.expect("responses in time").unwrap().into_body())
    }

    /// Waits for the status code of the response.
    pub async fn status_code(&mut self) -> u16 {
        let response = tokio::time::timeout(LONG, self.response.as_mut()).await;
        response.expect("responses in time").unwrap().status().as_u16()
    }

    /// Waits for the head of a response, or for the request's error.
    pub async fn try_head(&mut self) -> Result<(), hyper::Error> {
        self.response.as_mut().await.map(drop)
    }

    pub fn end_body(&mut self) {
        self.piece_sender = None;
    }
}

impl Http2ResponseReader {
    /// Reads the next piece of the response.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            let frame = tokio::time::timeout(LONG, self.0.frame()).await.expect("in time")?;
            if let Ok(data) = frame.unwrap().into_data() {
                return Some(data);
            }
        }
    }

    /// Reads the rest of the response. Returns its trailers.
    pub async fn trailers(&mut self) -> HeaderMap {
        loop {
            let frame = tokio::time::timeout(LONG, self.0.frame()).await.expect("in time");
            if let Ok(trailers) = frame.expect("trailers").unwrap().into_trailers() {
                return trailers;
            }
        }
    }
}

/// Starts a pod over HTTP/2 whose responses never end. Returns its address, and the counter of bytes that were taken.
pub async fn start_endless_pod() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, taken) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&taken);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let response = respond.send_response(http::Response::new(()), false);
                    let Ok(mut body) = response else { continue };
                    let counted = Arc::clone(&counted);
                    tokio::spawn(async move {
                        loop {
                            body.reserve_capacity(16 << 10);
                            let Some(Ok(count)) = poll_fn(|cx| body.poll_capacity(cx)).await else {
                                return;
                            };
                            counted.fetch_add(count, Ordering::SeqCst);
                            if body.send_data(vec![b'x'; count].into(), false).is_err() {
                                return;
                            }
                        }
                    });
                }
            });
        }
    });
    (address, taken)
}

/// Flags of a HEADERS frame that is a whole request.
pub const WHOLE_REQUEST: u8 = frame_flag::END_STREAM | frame_flag::END_HEADERS;

/// Encodes a frame of HTTP/2 (RFC 9113 §4.1).
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags];
    [&head[..], &stream.to_be_bytes(), payload].concat()
}

/// Largest window of flow control.
pub const MAX_WINDOW: u32 = u32::MAX >> 1;

/// Encodes GETs of an HTTP/2 client whose windows have the largest size.
pub fn encode_greedy_gets(requests: u32) -> Vec<u8> {
    encode_gets(requests, MAX_WINDOW)
}

/// Encodes GETs of an HTTP/2 client whose window for each response has this size.
pub fn encode_gets(requests: u32, window: u32) -> Vec<u8> {
    // SETTINGS_INITIAL_WINDOW_SIZE (RFC 9113 §6.5.2).
    let settings = [&[0, 4][..], &window.to_be_bytes()].concat();
    let mut all = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    all.extend(frame(frame_kind::SETTINGS, 0, 0, &settings));
    // The connection's window, which is 65,535 bytes at first (RFC 9113 §6.9.2).
    let growth = (MAX_WINDOW - 65_535).to_be_bytes();
    all.extend(frame(frame_kind::WINDOW_UPDATE, 0, 0, &growth));
    // :method GET, :scheme http, :path /, :authority a.
    let head = [0x82, 0x86, 0x84, 0x01, 1, b'a'];
    (0..requests).for_each(|it| {
        all.extend(frame(frame_kind::HEADERS, WHOLE_REQUEST, 2 * it + 1, &head));
    });
    all
}

/// Connection preface of an HTTP/2 client, and its acknowledgement of the server's settings.
pub fn client_preface() -> Vec<u8> {
    let mut all = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    all.extend(frame(frame_kind::SETTINGS, 0, 0, &[]));
    all.extend(frame(frame_kind::SETTINGS, frame_flag::ACK, 0, &[]));
    all
}

/// Encodes requests over HTTP/2 with a long head, each of which adds a short path to the table of the connection.
pub fn encode_indexed_requests(streams: std::ops::Range<u32>) -> Vec<u8> {
    // :method POST, :scheme http, :path / as a new entry, :authority a, and x with 16,000 bytes (RFC 7541 §6.2, §5.1).
    let short = [0x83, 0x86, 0x44, 1, b'/', 0x01, 1, b'a', 0, 1, b'x', 0x7f, 0x81, 0x7c];
    let head = [&short[..], &[b'y'; 16_000]].concat();
    streams.flat_map(|it| frame(frame_kind::HEADERS, WHOLE_REQUEST, 2 * it + 1, &head)).collect()
}
