//! Shell: acceptance of client connections, as many as the bounds allow.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, PoisonError},
    time::Duration,
};

use common::wire::EdgeSettings;
use futures::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{AcceptedProtocol, ClientConnectionServer};
use crate::{
    clients::connections::ClientConnection,
    entrypoint::{ClientTransport, Entrypoint, TrafficOrigin},
    listeners::port_listeners::ListenerHandle,
    routes::service::PortProtocol,
    tcp_socket::{self, ResettingStream},
};

/// Interval of warnings while connections cannot be accepted, and of attempts to accept one.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(1);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Properties of a listener that its connections have.
#[derive(Clone, Copy, Debug)]
struct AcceptingListener {
    /// Entrypoint; `None`: the port that each client connected to names the service.
    entrypoint: Option<Entrypoint>,
    transport: ClientTransport,
}

impl ClientConnectionServer {
    /// Accepts connections from `listener` until `closed`, for `entrypoint` or else for the port that each client
    /// connected to. They are served until `close_when_idle`, then closed gracefully.
    pub async fn run_listener(
        self: Arc<Self>,
        listener: TcpListener,
        entrypoint: Option<Entrypoint>,
        closed: CancellationToken,
    ) {
        let accepting = AcceptingListener { entrypoint, transport: ClientTransport::Plain };
        self.accept_until(listener, accepting, closed).await;
    }

    /// Accepts connections of TLS from `listener` until `closed`, for `entrypoint`. Handshakes that have begun go on.
    pub async fn run_tls_listener(
        self: Arc<Self>,
        listener: TcpListener,
        entrypoint: Entrypoint,
        closed: CancellationToken,
    ) {
        let (entrypoint, transport) = (Some(entrypoint), ClientTransport::Tls);
        self.accept_until(listener, AcceptingListener { entrypoint, transport }, closed).await;
    }

    /// Accepts connections from `listener` for `entrypoint`, until `handle` orders the close or until `stop`.
    pub async fn run_port_listener(
        self: Arc<Self>,
        listener: TcpListener,
        entrypoint: Entrypoint,
        handle: Arc<ListenerHandle>,
        stop: CancellationToken,
    ) {
        let (entrypoint, transport) = (Some(entrypoint), ClientTransport::Plain);
        let accepting = AcceptingListener { entrypoint, transport };
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => return self.accept_backlog(listener, accepting),
                () = handle.wait_close_ordered() => match handle.begin_close() {
                    Some(closing) => {
                        self.accept_backlog(listener, accepting);
                        return drop(closing);
                    }
                    // The port is wanted again.
                    None => continue,
                },
            };
            self.handle_accepted(accepted, accepting).await;
        }
    }

    async fn accept_until(
        self: Arc<Self>,
        listener: TcpListener,
        accepting: AcceptingListener,
        closed: CancellationToken,
    ) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = closed.cancelled() => return self.accept_backlog(listener, accepting),
            };
            self.handle_accepted(accepted, accepting).await;
        }
    }

    async fn handle_accepted(
        self: &Arc<Self>,
        accepted: io::Result<(TcpStream, SocketAddr)>,
        accepting: AcceptingListener,
    ) {
        match accepted {
            Ok((stream, peer)) => self.accept_connection(stream, accepting, peer),
            Err(error) => self.on_accept_error(&error).await,
        }
    }

    /// Accepts connections that were complete before the listener closes; the kernel would reset them.
    fn accept_backlog(self: &Arc<Self>, listener: TcpListener, accepting: AcceptingListener) {
        let Ok(listener) = listener.into_std() else { return };
        // Only what is complete now: the listener is non-blocking and closed afterwards.
        while let Ok((stream, peer)) = listener.accept() {
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            if let Ok(stream) = stream {
                self.accept_connection(stream, accepting, peer);
            }
        }
    }

    fn accept_connection(
        self: &Arc<Self>,
        stream: TcpStream,
        AcceptingListener { entrypoint, transport }: AcceptingListener,
        peer: SocketAddr,
    ) {
        // With one listener for all ports, the local port names the service.
        let service_entrypoint =
            || stream.local_addr().map(|address| Entrypoint::Service(address.port()));
        let entrypoint = match stream
            .set_nodelay(true)
            // A client whose node has died sends no FIN; without probes its connection would count forever.
            .and_then(|()| tcp_socket::keep_alive(&stream))
            .and_then(|()| entrypoint.map_or_else(service_entrypoint, Ok))
        {
            Ok(entrypoint) => entrypoint,
            Err(error) => return debug!(client = %peer, %error, "client gone at once"),
        };
        // Read once for the whole connection: a change of the policy would count it with two clients, or with none.
        let edge = self.forwarder.edge_policy.current();
        let is_allowed = |it: &Arc<ClientConnection>| may_accept(it, entrypoint, peer, &edge);
        let protocol = self.entrypoint_protocol(entrypoint);
        // The peer's bound comes second. A connection that it refuses is dropped, and holds no place among all.
        let Some(client_connection) = self.connections.register().filter(is_allowed) else {
            if !matches!(protocol, PortProtocol::Http) {
                // To a client of raw TCP an orderly end would look like an empty stream.
                drop(ResettingStream::new(stream));
            }
            return debug!(?entrypoint, client = %peer, "connection refused: there are enough");
        };
        let protocol = match protocol {
            PortProtocol::Http => AcceptedProtocol::Http(transport),
            // It is a request from now on. Idle until its task runs, it would be closed in favour of the next
            // connection.
            PortProtocol::RawTcp(service) => {
                AcceptedProtocol::RawTcp(service, client_connection.start_request())
            }
            PortProtocol::Unknown => AcceptedProtocol::Unknown,
        };
        let server = Arc::clone(self);
        self.forwarder.tasks.spawn(async move {
            server.forwarder.metrics.client_connections.inc();
            // The cut-off is awaited here, around the whole connection, since it must end whatever the connection waits
            // for.
            let cut_off = client_connection.cut_off.clone();
            // The set is polled with the connection, and polls its member only once that is woken: to poll a token takes
            // two locks.
            let mut cut_offs = FuturesUnordered::new();
            cut_offs.push(cut_off.cancelled());
            let served = server.serve_connection(
                stream,
                entrypoint,
                peer,
                client_connection,
                protocol,
                &edge,
            );
            // Dropping the future closes the socket and releases all guards, whatever it has waited for.
            tokio::select! {
                ended = served => if let Err(error) = ended {
                    debug!(?entrypoint, client = %peer, %error, "connection ended");
                },
                Some(()) = cut_offs.next() => debug!(?entrypoint, client = %peer, "connection cut off"),
            }
            server.forwarder.metrics.client_connections.dec();
        });
    }

    /// Handles an error of accept: a connection that broke before needs nothing; a full file table needs a pause.
    async fn on_accept_error(&self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
            return;
        }
        {
            let mut last = self.last_warning.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_none_or(|it| it.elapsed() >= ACCEPT_WARNING_INTERVAL) {
                *last = Some(Instant::now());
                warn!(%error, "cannot accept connections");
            }
        }
        // The file table may be full of idle clients.
        self.connections.close_idle();
        sleep(ACCEPT_RETRY_DELAY).await;
    }
}

/// Returns true if the peer may have one connection more. A trusted proxy may have any number.
fn may_accept(
    client_connection: &ClientConnection,
    entrypoint: Entrypoint,
    peer: SocketAddr,
    edge: &EdgeSettings,
) -> bool {
    let is_outside = entrypoint.traffic_origin() == TrafficOrigin::External;
    let is_trusted = is_outside && edge.is_trusted_proxy(peer.ip());
    is_trusted || client_connection.try_assign_client(peer.ip())
}
