//! Shell: one connection to a pod, in HTTP/1.1 or HTTP/2, and what is sent over it.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use common::wire::Protocol;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tracing::debug;

use crate::{
    clock::now_ns,
    pool::{Lend, Offer},
};

/// Bytes a pod's head may have.
const MAX_POD_HEAD: usize = 1 << 20;
/// Requests at once over one HTTP/2 connection: what servers commonly allow (RFC 9113 §6.5.2 asks for no less).
const MAX_STREAMS: u32 = 100;
/// Bytes of an answer that a pod may send ahead of its client, and of all answers over one connection: none that is
/// read slowly can stop the others.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = MAX_STREAMS * STREAM_WINDOW;

/// What a request goes over: a connection of its own, or one use of a shared one.
#[derive(Debug)]
pub enum Connection {
    /// HTTP/1.1: one request at a time.
    Single {
        /// Where requests go in.
        sender: http1::SendRequest<Ask>,
        /// When it was last used.
        used: Instant,
        /// How long it may lie idle.
        max_idle: Duration,
    },
    /// HTTP/2, as it lies in the pool.
    Shared(Shared),
    /// HTTP/2, as a request has it.
    Stream(Stream),
}

/// An HTTP/2 connection.
#[derive(Clone, Debug)]
pub struct Shared {
    sender: http2::SendRequest<Ask>,
    uses: Arc<Uses>,
    max_idle: Duration,
}

#[derive(Debug)]
struct Uses {
    streams: AtomicU32,
    used_ns: AtomicU64,
}

/// One request's use of an HTTP/2 connection. Dropping it ends the use, not the connection.
#[derive(Debug)]
pub struct Stream(Shared);

/// Why a request brought no answer.
#[derive(Debug)]
pub struct SendError {
    /// The request, if the pod has seen nothing of it or said that it did nothing about it.
    pub unseen: Option<Request<Ask>>,
    /// What broke.
    pub error: hyper::Error,
}

/// A request's body.
#[derive(Debug)]
pub enum Ask {
    /// None.
    Empty,
    /// The client's, as it comes.
    Client(Incoming),
}

impl Connection {
    /// Makes a connection of a socket, and drives it until it ends.
    pub async fn open(
        stream: TcpStream,
        protocol: Protocol,
        max_idle: Duration,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        match protocol {
            Protocol::Http1 => Self::open_http1(stream, max_idle).await,
            Protocol::H2c => Self::open_http2(stream, max_idle).await,
        }
    }

    async fn open_http1(stream: TcpStream, max_idle: Duration) -> io::Result<Self> {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_POD_HEAD);
        let (sender, driver) =
            builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = driver.with_upgrades().await {
                debug!(%error, "connection to pod ended");
            }
        });
        Ok(Self::Single { sender, used: Instant::now(), max_idle })
    }

    async fn open_http2(stream: TcpStream, max_idle: Duration) -> io::Result<Self> {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(u32::try_from(MAX_POD_HEAD).unwrap_or(u32::MAX));
        let (sender, driver) =
            builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = driver.await {
                debug!(%error, "connection to pod ended");
            }
        });
        let uses = Uses { streams: AtomicU32::new(0), used_ns: AtomicU64::new(now_ns()) };
        Ok(Self::Shared(Shared { sender, uses: Arc::new(uses), max_idle }))
    }

    /// Sends a request and waits for the head of its answer. Dropping the future breaks the exchange off.
    pub async fn send(&mut self, request: Request<Ask>) -> Result<Response<Incoming>, SendError> {
        match self {
            Self::Single { sender, .. } => {
                sender.try_send_request(request).await.map_err(SendError::from)
            }
            Self::Shared(shared) | Self::Stream(Stream(shared)) => shared.send(request).await,
        }
    }

    /// Whether it can still carry requests and has not been idle for too long.
    pub fn is_good(&self) -> bool {
        match self {
            Self::Single { sender, used, max_idle } => {
                sender.is_ready() && used.elapsed() < *max_idle
            }
            Self::Shared(shared) => shared.is_good(),
            Self::Stream(_) => false,
        }
    }
}

impl Lend for Connection {
    fn offer(&self) -> Offer<Self> {
        match self {
            it if !it.is_good() => Offer::Stale,
            Self::Single { .. } => Offer::Whole,
            Self::Shared(it) if it.streams() >= MAX_STREAMS => Offer::Busy,
            // Streams begin under the pool's lock; only their ends may come between.
            Self::Shared(it) => Offer::Share(Self::Stream(Stream::begin(it.clone()))),
            Self::Stream(_) => Offer::Stale,
        }
    }
}

impl Shared {
    fn streams(&self) -> u32 {
        self.uses.streams.load(Ordering::Relaxed)
    }

    fn is_good(&self) -> bool {
        let idle_ns = now_ns().saturating_sub(self.uses.used_ns.load(Ordering::Relaxed));
        let is_used = self.streams() > 0 || Duration::from_nanos(idle_ns) < self.max_idle;
        is_used && !self.sender.is_closed()
    }

    async fn send(&mut self, request: Request<Ask>) -> Result<Response<Incoming>, SendError> {
        let spare = match request.body() {
            Ask::Empty => Some(copy_of(&request)),
            Ask::Client(_) => None,
        };
        self.sender.try_send_request(request).await.map_err(|error| {
            let mut error = SendError::from(error);
            error.unseen = error.unseen.or_else(|| spare.filter(|_| is_unprocessed(&error.error)));
            error
        })
    }
}

impl Stream {
    fn begin(shared: Shared) -> Self {
        shared.uses.streams.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.uses.used_ns.store(now_ns(), Ordering::Relaxed);
        self.0.uses.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl From<TrySendError<Request<Ask>>> for SendError {
    fn from(mut error: TrySendError<Request<Ask>>) -> Self {
        // The library gives the request back only when no byte of it was written.
        Self { unseen: error.take_message(), error: error.into_error() }
    }
}

fn copy_of(request: &Request<Ask>) -> Request<Ask> {
    let mut copy = Request::new(Ask::Empty);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}

/// Whether the pod says that it did nothing about the request (RFC 9113 §6.8, §8.7).
fn is_unprocessed(error: &hyper::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(it) = cause {
        if let Some(h2) = it.downcast_ref::<h2::Error>() {
            let is_refused = h2.reason() == Some(h2::Reason::REFUSED_STREAM);
            return h2.is_remote() && (is_refused || h2.is_go_away());
        }
        cause = it.source();
    }
    false
}

impl From<Incoming> for Ask {
    fn from(body: Incoming) -> Self {
        if body.is_end_stream() { Self::Empty } else { Self::Client(body) }
    }
}

impl Body for Ask {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Empty => Poll::Ready(None),
            Self::Client(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Client(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Client(body) => body.size_hint(),
        }
    }
}
