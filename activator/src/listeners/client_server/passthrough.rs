//! Shell: connections of TLS that are raw TCP for the service of their host: TLS is passed through, or ends here.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use common::wire::EdgeSettings;
use futures::FutureExt as _;
use tokio::{
    io::Interest,
    net::TcpStream,
    time::{Instant, sleep, timeout_at},
};

use super::ClientConnectionServer;
use crate::{
    clients::{
        client_stream::AcceptedStream,
        connections::{ClientConnection, ConnectionProtocol},
    },
    entrypoint::Entrypoint,
    requests::forwarder::tcp::{TcpClientStream, TcpRequest},
    routes::service::RoutedService,
    tls::client_hello::{ClientHelloStep, MAX_CLIENT_HELLO_BYTES, read_client_hello},
};

/// Time between the first looks at a ClientHello that comes in parts. Each further time is twice as long.
const FIRST_LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Longest time between two looks.
const MAX_LOOK_INTERVAL: Duration = Duration::from_millis(250);

impl ClientConnectionServer {
    /// Serves a connection of TLS until its end if it is raw TCP for its host. For a host of HTTP, only completes the
    /// handshake. `None`: the connection has ended.
    pub(super) async fn serve_tls(
        &self,
        stream: TcpStream,
        entrypoint: Entrypoint,
        client: SocketAddr,
        client_connection: &Arc<ClientConnection>,
        edge: &EdgeSettings,
    ) -> Option<AcceptedStream> {
        // One deadline bounds the look at the ClientHello and the handshake.
        let deadline = Instant::now() + self.connections.budget.handshake_timeout;
        let passthrough_service = self.find_passthrough_service(&stream, deadline).await;
        let (service, stream) = match passthrough_service {
            Some(service) => (service, TcpClientStream::from(stream)),
            None => {
                let accepted = self.accept_tls(stream, client, client_connection, deadline, None);
                let accepted = accepted.await?;
                match accepted.tcp_service {
                    Some(service) => (service, TcpClientStream::over_tls(accepted.stream)?),
                    None => return Some(accepted.stream),
                }
            }
        };
        // From here on it is one request until its end, and is not closed as idle.
        let _request_guard = client_connection.start_request();
        client_connection.set_protocol(ConnectionProtocol::Tcp);
        let request = TcpRequest {
            service: &service,
            entrypoint,
            client: client.ip().to_canonical(),
            idle_timeout: edge.tcp_idle_timeout,
        };
        self.forwarder.serve_tcp(stream, request, client_connection).await;
        None
    }

    /// Service to which TLS of the client's host is passed through. The bytes of the client stay in the kernel, so that the
    /// pod gets them. `None` also if no ClientHello comes in time: the handshake then ends the connection.
    async fn find_passthrough_service(
        &self,
        stream: &TcpStream,
        deadline: Instant,
    ) -> Option<Arc<RoutedService>> {
        // Most installations have no such host, and pay nothing for it.
        if !self.forwarder.routes.has_passthrough_hosts() {
            return None;
        }
        // Also while the activator stops, a client that has begun is served. A silent one must not delay the stop.
        let look = async {
            self.peek_first_byte(stream).await.ok()?;
            peek_host(stream).await
        };
        let host = timeout_at(deadline, look).await.ok()??;
        self.forwarder.routes.passthrough_service(&host)
    }
}

/// Host of a ClientHello. `None`: it names none, is invalid, or the connection has ended, also behind a part of one.
async fn peek_host(stream: &TcpStream) -> Option<String> {
    let mut bytes = vec![0; MAX_CLIENT_HELLO_BYTES];
    let mut interval = FIRST_LOOK_INTERVAL;
    loop {
        // Before the peek: if the client has closed its half already, no further byte comes after the peeked ones.
        let is_half_closed = is_half_closed(stream);
        let count = stream.peek(&mut bytes).await.ok().filter(|count| *count > 0)?;
        match read_client_hello(&bytes[..count]) {
            ClientHelloStep::Complete(host) => return host,
            ClientHelloStep::Invalid => return None,
            ClientHelloStep::Incomplete if is_half_closed => return None,
            ClientHelloStep::Incomplete => {}
        }
        // The socket stays readable, so that only time tells when to look again.
        sleep(interval).await;
        interval = (interval * 2).min(MAX_LOOK_INTERVAL);
    }
}

/// Returns true if the client has closed its sending half, or the whole connection, also behind unread bytes.
fn is_half_closed(stream: &TcpStream) -> bool {
    // The kernel reports a close together with urgent data, so the close is asked for by itself.
    let ready = stream.ready(Interest::PRIORITY).now_or_never();
    ready.is_some_and(|ready| ready.is_ok_and(|it| it.is_read_closed()))
}
