//! Shell: HTTP/2 connections to a pod, and the use of one by a request.

use std::{
    future::poll_fn,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{Request, Response};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http2},
    rt::Executor,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{net::TcpStream, sync::Notify};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::debug;

use crate::{
    clock::now_ns,
    h1::MAX_POD_HEAD,
    pods::{
        exchange_error::{ExchangeError, PodError, PodSendError},
        request_body::PodRequestBody,
    },
};

/// Concurrent requests over one HTTP/2 connection: the number that servers commonly allow (RFC 9113 §6.5.2 asks for at
/// least as many).
pub const MAX_POD_STREAMS: u32 = 100;
/// Bytes of a response that a pod may send before its client reads them. The window of the connection is large enough
/// for all of its responses, so that none that is read slowly can stop the others.
pub const POD_STREAM_WINDOW: u32 = 64 << 10;
const POD_CONNECTION_WINDOW: u32 = MAX_POD_STREAMS * POD_STREAM_WINDOW;
/// Interval of pings while a stream is open. A pod that leaves a ping unanswered for as long is gone with its node.
const PING_INTERVAL: Duration = Duration::from_secs(15);

/// HTTP/2 connection to a pod, shared by its requests.
#[derive(Clone, Debug)]
pub struct Http2PodConnection {
    sender: http2::SendRequest<PodRequestBody>,
    stream_uses: Arc<Http2StreamUses>,
    max_idle: Duration,
    /// Token that closes the connection at once; `None`: it is shared, and no request may close it.
    cut_off: Option<CancellationToken>,
}

/// Executor of the tasks that hyper spawns for the connection of one WebSocket.
///
/// hyper ends a stream in order whenever its owner drops it, and keeps it for as long as the pod takes no bytes. The end
/// of these tasks closes the connection instead.
#[derive(Clone, Debug, Default)]
struct WebSocketTaskExecutor {
    /// Cancelled to end the tasks, and with them the connection.
    cut_off: CancellationToken,
    /// Notified after each step of a task.
    progress: Arc<Notify>,
}

#[derive(Debug)]
struct Http2StreamUses {
    active_streams: AtomicU32,
    last_used_ns: AtomicU64,
}

/// One request's use of an HTTP/2 connection. Dropping it ends the use, but not the connection.
#[derive(Debug)]
pub struct Http2PodStream(Http2PodConnection);

impl Http2PodConnection {
    /// Opens an HTTP/2 connection, and drives it in a task of its own until it ends.
    pub async fn open(stream: TcpStream, max_idle: Duration) -> io::Result<Self> {
        let builder = http2_builder(TokioExecutor::new());
        let handshake = builder.handshake::<_, PodRequestBody>(TokioIo::new(stream));
        let (sender, driver) = handshake.await.map_err(io::Error::other)?;
        Ok(Self::start(sender, driver, max_idle, None))
    }

    /// Opens an HTTP/2 connection for one WebSocket. `None`: the pod does not take extended CONNECT (RFC 8441 §3), or
    /// speaks no HTTP/2.
    pub async fn open_for_websocket(stream: TcpStream) -> Option<Self> {
        let executor = WebSocketTaskExecutor::default();
        // Without a stream until the pod's settings come, the maximum tells that they have.
        let mut builder = http2_builder(executor.clone());
        builder.initial_max_send_streams(0_usize);
        let handshake = builder.handshake::<_, PodRequestBody>(TokioIo::new(stream));
        let (sender, mut driver) = handshake.await.ok()?;
        // hyper does not report settings. A step of its tasks reads them, so no timer has to look for them: a pod that
        // is still starting may take minutes.
        while driver.current_max_send_streams() == 0 {
            tokio::select! {
                _ended = &mut driver => return None,
                () = executor.progress.notified() => {}
            }
        }
        let is_allowed = driver.is_extended_connect_protocol_enabled();
        let cut_off = Some(executor.cut_off);
        is_allowed.then(|| Self::start(sender, driver, Duration::ZERO, cut_off))
    }

    fn start(
        sender: http2::SendRequest<PodRequestBody>,
        driver: impl Future<Output = hyper::Result<()>> + Send + 'static,
        max_idle: Duration,
        cut_off: Option<CancellationToken>,
    ) -> Self {
        // hyper reads and writes only while its driver runs, also while no request uses the connection.
        tokio::spawn(async move {
            if let Err(error) = driver.await {
                debug!(%error, "connection to pod ended");
            }
        });
        let uses = Http2StreamUses {
            active_streams: AtomicU32::new(0),
            last_used_ns: AtomicU64::new(now_ns()),
        };
        Self { sender, stream_uses: Arc::new(uses), max_idle, cut_off }
    }

    /// Number of requests that use it.
    pub fn active_streams(&self) -> u32 {
        self.stream_uses.active_streams.load(Ordering::Relaxed)
    }

    /// Returns true if it can carry another request and has not been idle for too long.
    pub fn is_reusable(&self) -> bool {
        let idle_ns =
            now_ns().saturating_sub(self.stream_uses.last_used_ns.load(Ordering::Relaxed));
        let is_used = self.active_streams() > 0 || Duration::from_nanos(idle_ns) < self.max_idle;
        is_used && !self.sender.is_closed()
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for WebSocketTaskExecutor {
    fn execute(&self, task: F) {
        let Self { cut_off, progress } = self.clone();
        tokio::spawn(async move {
            let mut task = pin!(task);
            let notifying = poll_fn(|cx| {
                let next = task.as_mut().poll(cx);
                progress.notify_one();
                next
            });
            cut_off.run_until_cancelled(notifying).await;
        });
    }
}

impl Http2PodStream {
    /// Begins the use of a connection.
    pub fn start(shared: Http2PodConnection) -> Self {
        shared.stream_uses.active_streams.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }

    /// Returns a guard that closes the connection at once when it is dropped. `None`: other requests share the
    /// connection.
    pub fn cut_off_guard(&self) -> Option<DropGuard> {
        self.0.cut_off.clone().map(CancellationToken::drop_guard)
    }

    /// Sends a request and waits for the head of its response.
    pub async fn send(
        mut self,
        request: Request<PodRequestBody>,
    ) -> Result<Response<(Incoming, Self)>, PodSendError> {
        // hyper gives a request back only if it was not written at all. A copy without a body is cheap, and
        // allows a second attempt after GOAWAY and REFUSED_STREAM too.
        let copy = match request.body() {
            PodRequestBody::Empty => Some(clone_head(&request)),
            PodRequestBody::Client(_) => None,
        };
        match self.0.sender.try_send_request(request).await {
            Ok(response) => Ok(response.map(|body| (body, self))),
            Err(error) => {
                let mut error = PodSendError::from(error);
                let may_repeat = matches!(&error.cause, ExchangeError::Pod(PodError::Http2(it)) if is_unprocessed(it));
                error.resendable = error.resendable.or_else(|| copy.filter(|_| may_repeat));
                Err(error)
            }
        }
    }
}

impl Drop for Http2PodStream {
    fn drop(&mut self) {
        self.0.stream_uses.last_used_ns.store(now_ns(), Ordering::Relaxed);
        self.0.stream_uses.active_streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl From<TrySendError<Request<PodRequestBody>>> for PodSendError {
    fn from(mut error: TrySendError<Request<PodRequestBody>>) -> Self {
        // hyper returns the request only if no byte of it was written.
        let (resendable, error) = (error.take_message(), error.into_error());
        let cause = if error.is_user() {
            ExchangeError::Client(error)
        } else {
            ExchangeError::Pod(PodError::Http2(error))
        };
        Self { resendable, cause }
    }
}

/// Builder of HTTP/2 connections to pods, whose tasks run on `executor`.
fn http2_builder<E: Clone>(executor: E) -> http2::Builder<E> {
    // The windows of all streams fit into that of the connection. Head sizes are bounded as over HTTP/1.1, so that a
    // pod's responses do not depend on its protocol.
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(POD_STREAM_WINDOW)
        .initial_connection_window_size(POD_CONNECTION_WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL)
        .max_header_list_size(u32::try_from(MAX_POD_HEAD).unwrap_or(u32::MAX));
    builder
}

fn clone_head(request: &Request<PodRequestBody>) -> Request<PodRequestBody> {
    let mut copy = Request::new(PodRequestBody::Empty);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}

/// Returns true if the pod reports that it did not process the request (RFC 9113 §6.8, §8.7).
fn is_unprocessed(error: &hyper::Error) -> bool {
    // The frame's reason lies below the errors of hyper and h2.
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        if let Some(h2) = source.downcast_ref::<h2::Error>() {
            let is_refused = h2.reason() == Some(h2::Reason::REFUSED_STREAM);
            return h2.is_remote() && (is_refused || h2.is_go_away());
        }
        cause = source.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn settings_are_awaited_without_a_timer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let _silent = listener.accept().await.unwrap();
        // From here on the time advances whenever nothing else happens.
        tokio::time::pause();
        let mut steps = 0_u32;
        let mut open = pin!(Http2PodConnection::open_for_websocket(stream));
        let counting = poll_fn(|cx| {
            steps += 1;
            open.as_mut().poll(cx)
        });
        let opened = tokio::time::timeout(Duration::from_secs(60), counting).await;
        assert!(opened.is_err(), "the pod sends no settings");
        assert!(steps < 100, "{steps} steps in a minute");
    }
}
