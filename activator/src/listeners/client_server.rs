//! Shell: the server of client connections: their client, their transport and HTTP version, and their requests until
//! they end.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{once_signal::OnceSignal, wire::EdgeSettings};
use http::{Request, Response, header};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpStream,
    time::{Instant, error::Elapsed, sleep, timeout},
};
use tracing::warn;

use crate::{
    budget::{
        CLIENT_CONNECTION_WINDOW, CLIENT_SEND_BUFFER, CLIENT_STREAM_WINDOW, ClientBound,
        MAX_CLIENT_STREAMS,
    },
    clients::{
        client_info::ClientInfo,
        client_stream::AcceptedStream,
        connections::{
            ActiveRequestGuard, ClientConnection, ClientConnections, ConnectionProtocol,
        },
        head_charge::{self, RefusedHead},
        reconnect_jitter::ReconnectJitter,
        socket::{ClientGoneError, ClientSocket, read_proxy_header},
    },
    clock::random_u64,
    edge::{client_headers::ProxiedClient, proxy_protocol::ProxyHeader},
    entrypoint::{ClientTransport, Entrypoint, TrafficOrigin},
    listeners::{charged_body::ChargedResponseBody, stream_resets::StreamResetCounter},
    metrics::TcpConnectionEnd,
    request_error::ProxyRequestError,
    requests::{
        forwarder::{RequestForwarder, tcp::TcpRequest},
        response_body::ClientResponseBody,
        stream_tasks::StreamTaskExecutor,
        watched_body::ClientWatchedBody,
    },
    routes::service::{PortProtocol, RoutedService},
    tcp_socket,
};

mod accept;
mod fast_path;
mod local_tls;
mod passthrough;
mod port_protocol;
mod tls_accept;

use fast_path::{FastPathConnection, FastPathEnd};

/// Interval of pings while a stream is open. A client that leaves a ping unanswered for as long is gone.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// Time for the first bytes of a client that had connected just before the activator stopped.
const SHUTDOWN_PREFACE_TIMEOUT: Duration = Duration::from_millis(100);

/// Server of client connections, each in a task of its own.
#[derive(Debug)]
pub struct ClientConnectionServer {
    forwarder: Arc<RequestForwarder>,
    connections: Arc<ClientConnections>,
    http1: http1::Builder,
    http2: http2::Builder<StreamTaskExecutor>,
    /// Time of the last warning that connections cannot be accepted.
    last_warning: Mutex<Option<Instant>>,
}

/// Protocol of a connection at its accept.
#[derive(Debug)]
enum AcceptedProtocol {
    /// The connection brings requests of HTTP, over this transport.
    Http(ClientTransport),
    /// The connection is one request of raw TCP for this service, and the guard counts it as such.
    RawTcp(Arc<RoutedService>, ActiveRequestGuard),
    /// The RouteTable does not name the protocol yet.
    Unknown,
}

impl ClientConnectionServer {
    /// Creates a server in front of `forwarder` that accepts as much as `connections` allow.
    pub fn new(forwarder: Arc<RequestForwarder>, connections: Arc<ClientConnections>) -> Self {
        let bounds = connections.budget;
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(bounds.head_timeout)
            .max_buf_size(bounds.max_head_bytes)
            .max_header_size(bounds.max_head_bytes)
            // Bytes are the bound. hyper allocates an array of this many fields for every head.
            .max_headers(bounds.max_head_bytes / 16)
            // The socket detects whether a client that has closed its sending half is gone.
            .half_close(true)
            .auto_date_header(true);
        let mut http2 = http2::Builder::new(StreamTaskExecutor);
        http2
            .timer(TokioTimer::new())
            // Browsers open no WebSocket over HTTP/2 without it, and not all of them try HTTP/1.1 then.
            .enable_connect_protocol()
            .max_header_list_size(u32::try_from(bounds.max_head_bytes).unwrap_or(u32::MAX))
            // For an entry of its table h2 would keep the whole buffer that the entry came in.
            .header_table_size(0)
            .max_concurrent_streams(MAX_CLIENT_STREAMS)
            .initial_stream_window_size(CLIENT_STREAM_WINDOW)
            .initial_connection_window_size(CLIENT_CONNECTION_WINDOW)
            .max_send_buf_size(CLIENT_SEND_BUFFER)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL)
            .auto_date_header(true);
        Self { forwarder, connections, http1, http2, last_warning: Mutex::new(None) }
    }

    /// Table of the client connections.
    pub fn connections(&self) -> &ClientConnections {
        &self.connections
    }

    /// Serves a connection; `edge` is the policy at its accept.
    async fn serve_connection(
        &self,
        stream: TcpStream,
        entrypoint: Entrypoint,
        peer: SocketAddr,
        client_connection: Arc<ClientConnection>,
        protocol: AcceptedProtocol,
        edge: &EdgeSettings,
    ) -> Result<(), hyper::Error> {
        let mut transport = ClientTransport::Plain;
        let tcp_request = match protocol {
            AcceptedProtocol::Http(accepted) => {
                transport = accepted;
                None
            }
            AcceptedProtocol::RawTcp(service, request_guard) => Some((service, request_guard)),
            // Boxed, so that a connection whose protocol is known holds no memory for it.
            AcceptedProtocol::Unknown => {
                match Box::pin(self.wait_for_protocol(&stream, entrypoint)).await {
                    PortProtocol::Http => None,
                    PortProtocol::RawTcp(service) => {
                        // A request from now on, so that the connection is not closed as an idle one.
                        Some((service, client_connection.start_request()))
                    }
                    PortProtocol::Unknown => return Ok(()),
                }
            }
        };
        // The guard lives until the connection ends, since all of it is one request.
        if let Some((service, _request_guard)) = tcp_request {
            client_connection.set_protocol(ConnectionProtocol::Tcp);
            let served =
                self.serve_tcp(stream, &service, entrypoint, peer, &client_connection, edge);
            // Boxed, so that a connection of HTTP holds no memory for it.
            Box::pin(served).await;
            return Ok(());
        }
        self.serve_http(stream, transport, entrypoint, peer, client_connection, edge).await
    }

    /// Serves a connection of raw TCP: the PROXY header if it comes from outside, and the bytes.
    async fn serve_tcp(
        &self,
        mut stream: TcpStream,
        service: &RoutedService,
        entrypoint: Entrypoint,
        peer: SocketAddr,
        client_connection: &Arc<ClientConnection>,
        edge: &EdgeSettings,
    ) {
        // A PROXY header comes from outside only. Inside, its bytes would belong to the client's own protocol.
        let is_outside = entrypoint.traffic_origin() == TrafficOrigin::External;
        let client = match is_outside {
            true => {
                self.identify_tcp_client(&mut stream, entrypoint, peer, client_connection, edge)
                    .await
            }
            false => Some(peer),
        };
        // The connection is reset by its drop, and still needs an end in the metrics.
        let Some(client) = client else {
            let ends = &self.forwarder.metrics.tcp_connections;
            return ends.count_end(TcpConnectionEnd::Failed);
        };
        let request = TcpRequest {
            service,
            entrypoint,
            client: client.ip().to_canonical(),
            // The bound is a setting of the gateway: connections inside the cluster may be idle for any time.
            idle_timeout: edge.tcp_idle_timeout.filter(|_| is_outside),
        };
        self.forwarder.serve_tcp(stream.into(), request, client_connection).await;
    }

    /// Client of a raw TCP connection from outside. `None`: the connection is refused, and is reset when it is dropped.
    async fn identify_tcp_client(
        &self,
        stream: &mut TcpStream,
        entrypoint: Entrypoint,
        peer: SocketAddr,
        client_connection: &ClientConnection,
        edge: &EdgeSettings,
    ) -> Option<SocketAddr> {
        // Set before the wait, because the connection may be cut off meanwhile: an orderly end would look like the end
        // of the server's bytes.
        tcp_socket::set_reset_on_close(stream, true).ok()?;
        let (client, proxied_client) = self.identify_client(stream, entrypoint, peer, edge).await?;
        if !may_assign_client(client_connection, client, proxied_client) {
            return None;
        }
        tcp_socket::set_reset_on_close(stream, false).ok()?;
        Some(client)
    }

    /// Serves a connection that brings requests of HTTP: the PROXY header, the handshake of TLS, and the requests.
    async fn serve_http(
        &self,
        mut stream: TcpStream,
        transport: ClientTransport,
        entrypoint: Entrypoint,
        peer: SocketAddr,
        client_connection: Arc<ClientConnection>,
        edge: &EdgeSettings,
    ) -> Result<(), hyper::Error> {
        let Some((client, proxied_client)) =
            self.identify_client(&mut stream, entrypoint, peer, edge).await
        else {
            return Ok(());
        };
        // Checked again behind a proxy, whose own address was not counted at the accept.
        if !may_assign_client(&client_connection, client, proxied_client) {
            return Ok(());
        }
        let connection = &client_connection;
        // Boxed, so that nothing of the handshakes is left afterwards.
        let accepted = match (self.local_certificate(entrypoint), transport) {
            (Some(certificate), ClientTransport::Plain | ClientTransport::Tls) => {
                Box::pin(self.accept_local(stream, client, connection, certificate)).await
            }
            (None, ClientTransport::Plain) => Some(AcceptedStream::from(stream)),
            (None, ClientTransport::Tls) => {
                Box::pin(self.serve_tls(stream, entrypoint, client, connection, edge)).await
            }
        };
        let Some(stream) = accepted else { return Ok(()) };
        // Canonical, since policies and headers name a client of IPv4 by its own address.
        let (address, port) = (client.ip().to_canonical(), client.port());
        let client = ClientInfo {
            address,
            port,
            proxied_client,
            is_tls: stream.is_tls(),
            reconnect_jitter: ReconnectJitter::from_random(random_u64()),
        };
        let is_tls = client.is_tls;
        let socket = ClientSocket::new(stream, Arc::clone(&client_connection));
        match self.detect_http2(&socket).await {
            Ok(Ok(true)) => {
                client_connection.set_protocol(ConnectionProtocol::Http2 { is_tls });
                self.serve_http2(socket, entrypoint, client, client_connection).await
            }
            Ok(Ok(false)) => {
                client_connection.set_protocol(ConnectionProtocol::Http1 { is_tls });
                let ended =
                    self.serve_http1(socket.clone(), entrypoint, client, &client_connection).await;
                // After an error the client has no response that a reset could destroy.
                if ended.is_ok() {
                    socket.drain_unread().await;
                }
                ended
            }
            // The client is gone, or has sent nothing in time.
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }

    /// Client of the connection: the peer, or the client that a trusted proxy names. `None`: the PROXY header is
    /// invalid.
    async fn identify_client(
        &self,
        stream: &mut TcpStream,
        entrypoint: Entrypoint,
        peer: SocketAddr,
        edge: &EdgeSettings,
    ) -> Option<(SocketAddr, ProxiedClient)> {
        // A header of an untrusted peer is not read at all: it could name any client.
        if entrypoint.traffic_origin() != TrafficOrigin::External
            || !edge.requires_proxy_protocol
            || !edge.is_trusted_proxy(peer.ip())
        {
            return Some((peer, ProxiedClient::Direct));
        }
        let header = timeout(self.connections.budget.head_timeout, read_proxy_header(stream)).await;
        // Without a valid header no sender is known, so no request can be attributed: the connection is closed.
        match header.unwrap_or_else(|_late| Err(io::ErrorKind::TimedOut.into())) {
            Ok(ProxyHeader::Client { source, is_secure }) => {
                Some((source, ProxiedClient::Named { is_secure }))
            }
            // `LOCAL` and `UNKNOWN` are valid: a health check of the proxy, or a client that it does not name.
            Ok(ProxyHeader::Unknown) => Some((peer, ProxiedClient::Unnamed)),
            Err(error) => {
                warn!(%peer, %error, "PROXY header cannot be read, connection closed");
                None
            }
        }
    }

    /// Returns true if the client speaks HTTP/2.
    async fn detect_http2(&self, socket: &ClientSocket) -> Result<io::Result<bool>, Elapsed> {
        let first_bytes = socket.detect_http2();
        tokio::pin!(first_bytes);
        tokio::select! {
            biased;
            first = timeout(self.connections.budget.head_timeout, first_bytes.as_mut()) => first,
            () = self.forwarder.close_when_idle.cancelled() => {
                timeout(SHUTDOWN_PREFACE_TIMEOUT, first_bytes).await
            }
        }
    }

    /// Serves requests over HTTP/1.1: plain ones on the fast path, until one is not plain, and all from there on by hyper.
    async fn serve_http1(
        &self,
        socket: ClientSocket,
        entrypoint: Entrypoint,
        client: ClientInfo,
        client_connection: &Arc<ClientConnection>,
    ) -> Result<(), hyper::Error> {
        let fast_path =
            FastPathConnection::new(self, socket.clone(), entrypoint, client, client_connection);
        // Boxed, so that nothing of it is left where hyper serves the connection.
        let unread = match Box::pin(fast_path.run()).await {
            FastPathEnd::Closed => return Ok(()),
            FastPathEnd::Handover(unread) => unread,
        };
        socket.enable_target_inspection(self.connections.budget.max_head_bytes, unread);
        let service = service_fn(|mut request: Request<Incoming>| {
            let socket = socket.clone();
            // The request carries its socket: interim responses and unread bodies need it.
            request.extensions_mut().insert(socket.clone());
            // hyper cannot hold some targets; the socket keeps those as received.
            if let Some(target) = socket.raw_target(request.uri()) {
                request.extensions_mut().insert(target);
            }
            let request_guard = client_connection.start_request();
            // Charged here, before the task waits for anything.
            let request = head_charge::charge_head(request, client_connection);
            // Boxed, so that a connection without a request holds no memory for one.
            let handling = Box::pin(async move {
                match request {
                    Ok(request) => {
                        self.forwarder.handle(request, entrypoint, client, client_connection).await
                    }
                    Err(refused) => refuse_head(&refused),
                }
            });
            async move {
                tokio::select! {
                    // Biased to the response: a client that closes its half just as the response begins still gets it.
                    biased;
                    response = handling => {
                        Ok(response.map(|body| {
                            let max_buffered = body.max_buffered();
                            ChargedResponseBody::new(ClientWatchedBody::new(body, socket), request_guard, max_buffered)
                        }))
                    }
                    () = socket.wait_client_gone() => Err(ClientGoneError),
                }
            }
        });
        let io = TokioIo::new(socket.clone());
        let connection = self.http1.serve_connection(io, service).with_upgrades();
        tokio::pin!(connection);
        // A refused or stopping connection finishes its present exchange and takes no other one.
        tokio::select! {
            // Biased to the connection: its first request has come, and hyper would close it unread.
            biased;
            ended = connection.as_mut() => return ended,
            () = client_connection.wait_refused() => {}
            () = self.forwarder.close_when_idle.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }

    /// Serves requests over HTTP/2, each on a task of its own. A request that its client resets is dropped.
    async fn serve_http2(
        &self,
        socket: ClientSocket,
        entrypoint: Entrypoint,
        client: ClientInfo,
        client_connection: Arc<ClientConnection>,
    ) -> Result<(), hyper::Error> {
        socket.enable_frame_inspection();
        let must_reconnect = OnceSignal::new();
        let resets = StreamResetCounter::new(Arc::clone(&self.connections));
        let service = service_fn(|request| {
            let must_reconnect = must_reconnect.clone();
            let (client_connection, request_guard, reset) = (
                Arc::clone(&client_connection),
                client_connection.start_request(),
                resets.start_request(),
            );
            let request = head_charge::charge_head(request, &client_connection);
            // Boxed, so that little of it is left once the response has begun, or for a refusal: clients may leave
            // thousands of either unread.
            let handling = request.map(|request| {
                let forwarder = Arc::clone(&self.forwarder);
                Box::pin(async move {
                    forwarder.handle(request, entrypoint, client, &client_connection).await
                })
            });
            async move {
                let mut response = match handling {
                    Ok(handling) => handling.await,
                    Err(refused) => refuse_head(&refused),
                };
                // A client that resets a request after its response has begun does not count as an attacker.
                reset.mark_responded();
                // In HTTP/2 this becomes GOAWAY, once for the connection.
                if response.headers_mut().remove(header::CONNECTION).is_some() {
                    must_reconnect.set();
                }
                Ok::<_, Infallible>(response.map(|body| {
                    let max_buffered = body.max_buffered();
                    ChargedResponseBody::new(body, request_guard, max_buffered)
                }))
            }
        });
        let io = TokioIo::new(socket.clone());
        let graceful = async {
            let connection = self.http2.serve_connection(io, service);
            tokio::pin!(connection);
            tokio::select! {
                ended = connection.as_mut() => return ended,
                () = must_reconnect.wait() => {}
                () = client_connection.wait_refused() => {}
                () = self.forwarder.close_when_idle.cancelled() => {}
                () = wait_idle(&client_connection, self.connections.budget.head_timeout) => self.connections.count_refusal(ClientBound::IdleTimeout),
            }
            connection.as_mut().graceful_shutdown();
            connection.await
        };
        // Too many resets end the connection at once, with all its requests.
        tokio::select! {
            ended = graceful => return ended,
            () = resets.flood.wait() => self.connections.count_refusal(ClientBound::Resets),
        }
        // The connection of hyper is dropped already, and would have sent GOAWAY without an error.
        socket.send_goaway(h2::Reason::ENHANCE_YOUR_CALM);
        // The peer goes on sending. With unread bytes the close would be a reset, and the GOAWAY might be lost.
        socket.mark_unread_body();
        socket.drain_unread().await;
        Ok(())
    }
}

/// Response to a request whose head was not charged.
fn refuse_head(refused: &RefusedHead) -> Response<ClientResponseBody> {
    let failure = ProxyRequestError::TooManyRequestBytes;
    failure.response(refused.grpc_protocol, ClientResponseBody::from_text)
}

/// Returns true if the client may have the connection. Behind a trusted proxy the client that it names is the one whose
/// connections are bounded.
fn may_assign_client(
    client_connection: &ClientConnection,
    client: SocketAddr,
    proxied_client: ProxiedClient,
) -> bool {
    let is_named = matches!(proxied_client, ProxiedClient::Named { .. });
    !is_named || client_connection.try_assign_client(client.ip())
}

/// Waits until a connection has been idle for the time `most`.
async fn wait_idle(client_connection: &ClientConnection, most: Duration) {
    loop {
        let idle = client_connection.idle_time().unwrap_or_default();
        if idle >= most {
            return;
        }
        sleep(most - idle).await;
    }
}
