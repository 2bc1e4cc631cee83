//! Shell: TLS on services' own ports, for the names of services inside the cluster.
//!
//! Agents lead connects to port 443 of a service to the service's own port, as those to port 80. So the first byte of a
//! connection shows its transport. No request of HTTP begins with the first byte of TLS.

use std::net::SocketAddr;

use common::wire::NamespacedName;
use tokio::{
    net::TcpStream,
    time::{Instant, timeout},
};

use super::ClientConnectionServer;
use crate::{
    clients::{client_stream::AcceptedStream, connections::ClientConnection},
    entrypoint::{ClientTransport, Entrypoint},
};

/// First byte of a record with a handshake message (RFC 8446 §5.1).
const HANDSHAKE_RECORD: u8 = 0x16;

impl ClientConnectionServer {
    /// Returns the name of the certificate for connections to a service's own port; `None`: they bring no TLS.
    pub(super) fn local_certificate(&self, entrypoint: Entrypoint) -> Option<NamespacedName> {
        match entrypoint {
            Entrypoint::Service(port) => {
                self.forwarder.routes.service_by_port(port)?.local_certificate()
            }
            Entrypoint::Internal | Entrypoint::External | Entrypoint::GatewayPort(_) => None,
        }
    }

    /// Accepts a connection to a service's own port, with the certificate of this name if the client begins with TLS.
    /// `None`: the client is gone, has sent nothing in time, or the handshake has failed.
    pub(super) async fn accept_local(
        &self,
        stream: TcpStream,
        client: SocketAddr,
        connection: &ClientConnection,
        certificate: NamespacedName,
    ) -> Option<AcceptedStream> {
        match self.detect_transport(&stream).await? {
            ClientTransport::Plain => Some(AcceptedStream::from(stream)),
            ClientTransport::Tls => {
                let deadline = Instant::now() + self.connections.budget.handshake_timeout;
                let certificate = Some(&certificate);
                let accepted = self.accept_tls(stream, client, connection, deadline, certificate);
                accepted.await.map(|it| it.stream)
            }
        }
    }

    /// Returns the transport of a connection by the client's first byte, which stays unread. `None`: the client is
    /// gone, or has sent nothing in time.
    async fn detect_transport(&self, stream: &TcpStream) -> Option<ClientTransport> {
        let head_timeout = self.connections.budget.head_timeout;
        let first = timeout(head_timeout, self.peek_first_byte(stream)).await.ok()?.ok()?;
        Some(match first {
            HANDSHAKE_RECORD => ClientTransport::Tls,
            _ => ClientTransport::Plain,
        })
    }
}
