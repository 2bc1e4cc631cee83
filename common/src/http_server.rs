//! Shell: HTTP server for the pages of a component. No client can hold a connection of it without an end.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    BoxError, Router,
    extract::ConnectInfo,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use hyper::{
    Request,
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Sleep, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;
use tracing::debug;

/// Pause after a failed accept. Most likely no file descriptor is free, and only a closed connection frees one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit for the last responses at shutdown.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Text of the response to a request whose body is late.
const LATE_BODY: &str = "the body of the request did not come in time\n";

/// Bounds on what all clients of one server can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpServerBounds {
    /// Limit of simultaneous connections. Beyond it clients wait in the kernel's backlog.
    pub max_connections: usize,
    /// Limit of simultaneous connections from one address, below `max_connections`. A further one is closed at once, so
    /// that one client cannot keep out all others, such as the kubelet with its probes.
    pub max_connections_per_client: usize,
    /// Time limit for the head of a request. It also counts while a connection is idle.
    pub head_timeout: Duration,
    /// Time limit for the whole body of a request, after its head. The response is then 408.
    pub body_timeout: Duration,
    /// Time limit for a client to take a response that is ready.
    pub write_timeout: Duration,
}

impl HttpServerBounds {
    /// Bounds for clients with a pool of connections. Go's HTTP client keeps an idle connection for 90 s: a shorter
    /// limit for the head could close a connection on which a request begins.
    pub const DEFAULT: Self = Self {
        max_connections: 1024,
        max_connections_per_client: 64,
        head_timeout: Duration::from_secs(120),
        body_timeout: Duration::from_secs(10),
        write_timeout: Duration::from_secs(30),
    };
}

/// Serves `router` until `shutdown`, then finishes the requests that were received before.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    bounds: HttpServerBounds,
    shutdown: CancellationToken,
) {
    serve_prepared(listener, router, bounds, shutdown, |it| std::future::ready(Some(it))).await;
}

/// Serves like [`serve`], with a step between the accept and the first request, such as a TLS handshake. The step
/// bounds its own time; `None` ends the connection.
pub async fn serve_prepared<S, F>(
    listener: TcpListener,
    router: Router,
    bounds: HttpServerBounds,
    shutdown: CancellationToken,
    prepare: impl Fn(TcpStream) -> F,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    F: Future<Output = Option<S>> + Send + 'static,
{
    let (tasks, limit) = (TaskTracker::new(), Arc::new(Semaphore::new(bounds.max_connections)));
    let (clients, per_client) = (ConnectionsByClient::default(), bounds.max_connections_per_client);
    loop {
        // The permit comes before the accept, so that clients beyond the limit cost nothing here.
        let permit = tokio::select! {
            permit = Arc::clone(&limit).acquire_owned() => permit,
            () = shutdown.cancelled() => break,
        };
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    debug!(%error, "connection not accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            () = shutdown.cancelled() => break,
        };
        let Some(client_permit) = clients.admit(peer.ip(), per_client) else {
            debug!(%peer, "connection refused: its client has too many");
            continue;
        };
        let (prepared, router, stop) = (prepare(stream), router.clone(), shutdown.clone());
        tasks.spawn(async move {
            if let Some(stream) = prepared.await {
                serve_connection(stream, peer, router, bounds, stop).await;
            }
            // In this order, a connection that the second permit admits is not one too many of its client.
            drop(client_permit);
            drop(permit);
        });
    }
    // New clients are refused while the last requests end.
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// Numbers of open connections, by the address of their client. Cheap to clone.
#[derive(Clone, Debug, Default)]
struct ConnectionsByClient(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl ConnectionsByClient {
    /// Counts one more connection of a client, until the returned value is dropped; `None`: it has `limit` already.
    fn admit(&self, client: IpAddr, limit: usize) -> Option<ClientConnectionPermit> {
        // A listener of both families sees an IPv4 client by its mapped address.
        let client = client.to_canonical();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.get(&client).copied().unwrap_or(0);
        (count < limit).then(|| {
            counts.insert(client, count + 1);
            ClientConnectionPermit { connections: self.clone(), client }
        })
    }
}

/// Right of a client to one connection.
#[derive(Debug)]
struct ClientConnectionPermit {
    connections: ConnectionsByClient,
    client: IpAddr,
}

impl Drop for ClientConnectionPermit {
    fn drop(&mut self) {
        let mut counts = self.connections.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A client without a connection must leave nothing behind.
        let left = counts.get(&self.client).map_or(0, |count| count.saturating_sub(1));
        if left == 0 {
            counts.remove(&self.client);
        } else {
            counts.insert(self.client, left);
        }
    }
}

/// Serves one connection within the bounds, until its end or until `stop`.
async fn serve_connection<S>(
    stream: S,
    peer: SocketAddr,
    router: Router,
    bounds: HttpServerBounds,
    stop: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let HttpServerBounds { head_timeout, body_timeout, write_timeout, .. } = bounds;
    let service = service_fn(move |it| respond(router.clone(), peer, it, body_timeout));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    let stream = TokioIo::new(TimedStream { stream, write_timeout, stall: None });
    let serving = builder.serve_connection(stream, service);
    tokio::pin!(serving);
    tokio::select! {
        ended = serving.as_mut() => {
            if let Err(error) = ended {
                debug!(%peer, %error, "connection ended");
            }
        }
        () = stop.cancelled() => {
            // A response that has begun may still be sent.
            serving.as_mut().graceful_shutdown();
            // An error here only ends the connection, which its client sees as well.
            let _ = timeout(STOP_TIMEOUT, serving).await;
        }
    }
}

/// Passes a request to the router, with the address of the client.
async fn respond(
    router: Router,
    peer: SocketAddr,
    request: Request<Incoming>,
    body_timeout: Duration,
) -> Result<Response, Infallible> {
    let is_late = Arc::new(AtomicBool::new(false));
    let mut request = request.map(|body| TimedBody {
        body,
        deadline: Box::pin(sleep(body_timeout)),
        is_late: Arc::clone(&is_late),
    });
    request.extensions_mut().insert(ConnectInfo(peer));
    let response = router.oneshot(request).await?;
    if is_late.load(Ordering::Relaxed) {
        // The rest of the body may never come, so the connection cannot serve another request.
        let close = [(header::CONNECTION, "close")];
        return Ok((StatusCode::REQUEST_TIMEOUT, close, LATE_BODY).into_response());
    }
    Ok(response)
}

/// Body of a request that must arrive before a deadline.
struct TimedBody {
    body: Incoming,
    deadline: Pin<Box<Sleep>>,
    /// True once a reader of the body waited at the deadline.
    is_late: Arc<AtomicBool>,
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|it| it.map_err(Into::into)));
        }
        if self.deadline.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        self.is_late.store(true, Ordering::Relaxed);
        Poll::Ready(Some(Err(LATE_BODY.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Stream to a client that must take what is sent within a time limit.
struct TimedStream<S> {
    stream: S,
    write_timeout: Duration,
    /// Time at which the client is too late, since a write could not go on; `None`: everything was taken.
    stall: Option<Pin<Box<Sleep>>>,
}

impl<S> TimedStream<S> {
    /// Returns the result of a write, or an error if writes could not end for too long.
    fn check_stall<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        let write_timeout = self.write_timeout;
        let stall = self.stall.get_or_insert_with(|| Box::pin(sleep(write_timeout)));
        stall.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.check_stall(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        if result.is_ready() {
            // hyper flushes only after its last write, so a client that takes single bytes does not get more time.
            self.stall = None;
        }
        self.check_stall(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_stall(context, result)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Time limit that a test waits for.
    const SHORT: Duration = Duration::from_millis(50);
    /// Bounds that no test reaches, with a single connection: the next client waits for the end of the one before.
    const ONE_CONNECTION: HttpServerBounds = HttpServerBounds {
        max_connections: 1,
        max_connections_per_client: 1,
        head_timeout: Duration::from_secs(3600),
        body_timeout: Duration::from_secs(3600),
        write_timeout: Duration::from_secs(3600),
    };

    /// Starts a server. Returns its address, and a guard that stops it.
    async fn start(bounds: HttpServerBounds) -> (SocketAddr, tokio_util::sync::DropGuard) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new()
            .route("/peer", get(respond_with_peer))
            .route("/echo", post(|body: String| async move { body }))
            .route("/large", get(|| async { "x".repeat(64 << 20) }));
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, router, bounds, stop.clone()));
        (address, stop.drop_guard())
    }

    async fn respond_with_peer(ConnectInfo(peer): ConnectInfo<SocketAddr>) -> String {
        peer.to_string()
    }

    async fn send(address: SocketAddr, request: &str) -> TcpStream {
        let mut client = TcpStream::connect(address).await.expect("a connection");
        client.write_all(request.as_bytes()).await.expect("sent");
        client
    }

    async fn response(mut client: TcpStream) -> String {
        let mut bytes = Vec::new();
        // A reset is an end as well.
        let _ = client.read_to_end(&mut bytes).await;
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Proves that the only connection of the server is free again.
    async fn assert_serves(address: SocketAddr) {
        let request = "POST /echo HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";
        let text = response(send(address, request).await).await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("hi"), "{text}");
    }

    #[tokio::test]
    async fn a_late_body_gets_408_and_frees_its_connection() {
        let (address, _stop) =
            start(HttpServerBounds { body_timeout: SHORT, ..ONE_CONNECTION }).await;
        let request = "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab";
        let text = response(send(address, request).await).await;
        assert!(text.starts_with("HTTP/1.1 408") && text.ends_with(LATE_BODY), "{text}");
        assert_serves(address).await;
    }

    #[tokio::test]
    async fn a_late_head_ends_its_connection() {
        let (address, _stop) =
            start(HttpServerBounds { head_timeout: SHORT, ..ONE_CONNECTION }).await;
        for request in ["", "GET /peer HTTP/1.1\r\nHost:"] {
            let _late = send(address, request).await;
            assert_serves(address).await;
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_its_response_is_closed() {
        let (address, _stop) =
            start(HttpServerBounds { write_timeout: SHORT, ..ONE_CONNECTION }).await;
        let _deaf = send(address, "GET /large HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_serves(address).await;
    }

    #[tokio::test]
    async fn a_client_with_too_many_connections_keeps_no_other_client_out() {
        let bounds = HttpServerBounds {
            max_connections: 3,
            max_connections_per_client: 2,
            ..ONE_CONNECTION
        };
        let (address, _stop) = start(bounds).await;
        let held = [send(address, "").await, send(address, "").await];
        for _ in 0..3 {
            let refused = TcpStream::connect(address).await.expect("accepted by the kernel");
            assert_eq!(response(refused).await, "", "closed without a request");
        }
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind("127.0.0.2:0".parse().expect("an address")).expect("a loopback address");
        let mut other = socket.connect(address).await.expect("a connection");
        let request = "GET /peer HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        other.write_all(request.as_bytes()).await.expect("sent");
        let text = response(other).await;
        assert!(text.contains("127.0.0.2"), "{text}");
        drop(held);
    }

    #[test]
    fn a_client_gets_its_connections_back_and_leaves_nothing_behind() {
        let clients = ConnectionsByClient::default();
        let plain = IpAddr::from([10, 0, 0, 7]);
        let mapped: IpAddr = "::ffff:10.0.0.7".parse().expect("an address");
        let first = clients.admit(plain, 2).expect("none yet");
        let second = clients.admit(mapped, 2).expect("one");
        assert!(clients.admit(plain, 2).is_none(), "both are of one client");
        drop(first);
        assert!(clients.admit(plain, 2).is_some());
        drop(second);
        assert!(clients.0.lock().expect("no panic").is_empty());
    }

    #[tokio::test]
    async fn a_page_learns_the_address_of_its_client() {
        let (address, _stop) = start(ONE_CONNECTION).await;
        let request = "GET /peer HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let client = send(address, request).await;
        let own = client.local_addr().expect("connected").to_string();
        let text = response(client).await;
        assert!(text.ends_with(&own), "{text}");
    }
}
