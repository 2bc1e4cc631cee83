//! Shell: clients and their connections.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{Request, header};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{error::Elapsed, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::{
    balance::Lot,
    clock::chance,
    forwarded::Origin,
    gateway::{Client, Door, Gateway},
    proxy_protocol::Header,
    socket::{Gone, Socket, Watched, proxy_header},
    tcp,
};

/// Requests a client may have at once over one HTTP/2 connection: Go's default.
const MAX_STREAMS: u32 = 250;
/// Bytes of a body that a client may send before a pod takes them, and of all bodies over one connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 16 * STREAM_WINDOW;
/// A client that does not answer a ping for this long is gone; it is asked as often while something is open.
const PING_EVERY: Duration = Duration::from_secs(30);

/// Time for the first words of a client that had connected just before the activator stopped.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Bounds of what a client may send.
#[derive(Clone, Copy, Debug)]
pub struct ClientBounds {
    /// Bytes of a head.
    pub head_bytes: usize,
    /// Time for a head, and for a kept connection to lie idle.
    pub head_timeout: Duration,
}

/// Serves connections as they come in, all of them apart from each other.
#[derive(Debug)]
pub struct Server {
    gateway: Arc<Gateway>,
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
    head_timeout: Duration,
    head_bytes: usize,
}

impl Server {
    /// A server in front of `gateway`.
    pub fn new(gateway: Arc<Gateway>, bounds: ClientBounds) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(bounds.head_timeout)
            .max_buf_size(bounds.head_bytes)
            .max_header_size(bounds.head_bytes)
            // Bytes are the bound. The library makes room for so many fields at every head.
            .max_headers(bounds.head_bytes / 16)
            // Whether a client that has closed its sending half is gone is for the socket to say.
            .half_close(true)
            .auto_date_header(true);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(bounds.head_bytes).unwrap_or(u32::MAX))
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_EVERY)
            .auto_date_header(true);
        let ClientBounds { head_bytes, head_timeout } = bounds;
        Self { gateway, http1, http2, head_timeout, head_bytes }
    }

    /// Accepts from `listener` until `closed`, by `door` or else by the port each client asked for; connections are served on until `stop`, then end politely.
    pub async fn accept(
        self: Arc<Self>,
        listener: TcpListener,
        door: Option<Door>,
        closed: CancellationToken,
    ) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = closed.cancelled() => return self.welcome_rest(listener, door),
            };
            match accepted {
                Ok((stream, client)) => self.welcome(stream, door, client),
                Err(error) => give_way(&error).await,
            }
        }
    }

    /// Takes in who has connected before the listener closes; the kernel would reset them.
    fn welcome_rest(self: &Arc<Self>, listener: TcpListener, door: Option<Door>) {
        let Ok(listener) = listener.into_std() else { return };
        while let Ok((stream, client)) = listener.accept() {
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            if let Ok(stream) = stream {
                self.welcome(stream, door, client);
            }
        }
    }

    fn welcome(self: &Arc<Self>, stream: TcpStream, door: Option<Door>, client: SocketAddr) {
        let own = || stream.local_addr().map(|address| Door::Port(address.port()));
        let door = match stream
            .set_nodelay(true)
            .and_then(|()| tcp::keep_alive(&stream))
            .and_then(|()| door.map_or_else(own, Ok))
        {
            Ok(door) => door,
            Err(error) => return debug!(%client, %error, "client gone at once"),
        };
        let server = Arc::clone(self);
        self.gateway.tasks.spawn(async move {
            server.gateway.metrics.connections.inc();
            if let Err(error) = server.serve(stream, door, client).await {
                debug!(?door, %client, %error, "connection ended");
            }
            server.gateway.metrics.connections.dec();
        });
    }

    async fn serve(
        &self,
        mut stream: TcpStream,
        door: Door,
        peer: SocketAddr,
    ) -> Result<(), hyper::Error> {
        let Some((client, origin)) = self.introduced(&mut stream, door, peer).await else {
            return Ok(());
        };
        let (address, port) = (client.ip().to_canonical(), client.port());
        let client = Client { address, port, origin, lot: Lot::draw(chance()) };
        let socket = Socket::new(stream);
        match self.first_words(&socket).await {
            Ok(Ok(true)) => self.serve_http2(socket, door, client).await,
            Ok(Ok(false)) => {
                let ended = self.serve_http1(socket.clone(), door, client).await;
                if ended.is_ok() {
                    socket.linger().await;
                }
                ended
            }
            // It is gone, or has nothing to say.
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }

    /// Whom the connection is for: its peer, or whom a trusted proxy names. `None`: the proxy names no client.
    async fn introduced(
        &self,
        stream: &mut TcpStream,
        door: Door,
        peer: SocketAddr,
    ) -> Option<(SocketAddr, Origin)> {
        let edge = self.gateway.edge.now();
        if door != Door::Outside || !edge.proxy_protocol || !edge.trusts(peer.ip()) {
            return Some((peer, Origin::Direct));
        }
        let header = timeout(self.head_timeout, proxy_header(stream)).await;
        match header.unwrap_or_else(|_late| Err(io::ErrorKind::TimedOut.into())) {
            Ok(Header::Client { source, is_secure }) => Some((source, Origin::Named { is_secure })),
            Ok(Header::Unknown) => Some((peer, Origin::Unnamed)),
            Err(error) => {
                warn!(%peer, %error, "PROXY header cannot be read, connection closed");
                None
            }
        }
    }

    /// Whether the client speaks HTTP/2.
    async fn first_words(&self, socket: &Socket) -> Result<io::Result<bool>, Elapsed> {
        let words = socket.speaks_http2();
        tokio::pin!(words);
        tokio::select! {
            biased;
            first = timeout(self.head_timeout, words.as_mut()) => first,
            () = self.gateway.stop.cancelled() => timeout(LAST_WORDS, words).await,
        }
    }

    async fn serve_http1(
        &self,
        socket: Socket,
        door: Door,
        client: Client,
    ) -> Result<(), hyper::Error> {
        socket.follow_targets(self.head_bytes);
        let service = service_fn(|mut request: Request<Incoming>| {
            let socket = socket.clone();
            request.extensions_mut().insert(socket.clone());
            if let Some(target) = socket.raw_target(request.uri()) {
                request.extensions_mut().insert(target);
            }
            async move {
                tokio::select! {
                    biased;
                    answer = self.gateway.handle(request, door, client) => {
                        Ok(answer.map(|body| Watched::new(body, socket)))
                    }
                    () = socket.gone() => Err(Gone),
                }
            }
        });
        let io = TokioIo::new(socket.clone());
        let connection = self.http1.serve_connection(io, service).with_upgrades();
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return ended,
            () = self.gateway.stop.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }

    /// Requests are apart from each other, on tasks of their own; one that its client resets is dropped.
    async fn serve_http2(
        &self,
        socket: Socket,
        door: Door,
        client: Client,
    ) -> Result<(), hyper::Error> {
        let leave = CancellationToken::new();
        let service = service_fn(|request| {
            let (gateway, leave) = (Arc::clone(&self.gateway), leave.clone());
            async move {
                let mut answer = gateway.handle(request, door, client).await;
                // HTTP/2 says so with GOAWAY, once for the connection.
                if answer.headers_mut().remove(header::CONNECTION).is_some() {
                    leave.cancel();
                }
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = self.http2.serve_connection(TokioIo::new(socket), service);
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return ended,
            () = leave.cancelled() => {}
            () = self.gateway.stop.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }
}

/// A connection that broke before it was accepted costs nothing; a full file table needs a moment.
async fn give_way(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    warn!(%error, "cannot accept connections");
    tokio::time::sleep(Duration::from_millis(10)).await;
}
