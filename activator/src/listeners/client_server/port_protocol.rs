//! Shell: the protocol of a client connection: HTTP, raw TCP, or not known yet.
//!
//! The RouteTable may lack the service of a port, or its Revisions: it has not received them yet, or they were just
//! removed. A client of raw TCP would take bytes of HTTP, or an orderly end, for those of its server. So nothing is
//! written to such a connection before its client has sent the request line of HTTP.

use std::{os::fd::AsRawFd as _, time::Duration};

use nix::sys::socket::{self, MsgFlags};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};
use tracing::debug;

use super::ClientConnectionServer;
use crate::{
    clients::request_line::{MAX_REQUEST_LINE_BYTES, has_request_line},
    entrypoint::Entrypoint,
    metrics::TcpConnectionEnd,
    routes::service::PortProtocol,
    tcp_socket,
};

/// Time for the RouteTable to name the protocol of a port to which a connection was led. Agents may have the table a
/// little earlier than this activator.
const UNKNOWN_PROTOCOL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between the first looks at the table and at the client's bytes. Each further time is twice as long.
const FIRST_LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Longest time between two looks.
const MAX_LOOK_INTERVAL: Duration = Duration::from_millis(250);

impl ClientConnectionServer {
    /// Protocol of new connections of an entrypoint.
    pub(super) fn entrypoint_protocol(&self, entrypoint: Entrypoint) -> PortProtocol {
        match entrypoint {
            Entrypoint::Service(port) => self.forwarder.port_protocol(port),
            Entrypoint::GatewayPort(port) => self.forwarder.gateway_port_protocol(port),
            Entrypoint::Internal | Entrypoint::External => PortProtocol::Http,
        }
    }

    /// Waits until the RouteTable names the protocol of a connection, or its client sends the request line of HTTP.
    /// Nothing is read. `Unknown`: neither happened in time, and the connection is reset when it is dropped.
    pub(super) async fn wait_for_protocol(
        &self,
        stream: &TcpStream,
        entrypoint: Entrypoint,
    ) -> PortProtocol {
        // Set before the wait, because the connection may be cut off meanwhile.
        if tcp_socket::set_reset_on_close(stream, true).is_err() {
            return PortProtocol::Unknown;
        }
        let protocol = self.look_for_protocol(stream, entrypoint).await;
        if matches!(protocol, PortProtocol::Unknown) {
            debug!(?entrypoint, "connection reset: no service with a known protocol has its port");
            self.forwarder.metrics.tcp_connections.count_end(TcpConnectionEnd::Failed);
        } else if tcp_socket::set_reset_on_close(stream, false).is_err() {
            return PortProtocol::Unknown;
        }
        protocol
    }

    async fn look_for_protocol(&self, stream: &TcpStream, entrypoint: Entrypoint) -> PortProtocol {
        let (begun, mut interval) = (Instant::now(), FIRST_LOOK_INTERVAL);
        loop {
            let protocol = self.entrypoint_protocol(entrypoint);
            if !matches!(protocol, PortProtocol::Unknown) {
                return protocol;
            }
            let may_be_http = matches!(entrypoint, Entrypoint::Service(_));
            if may_be_http && has_sent_request_line(stream) {
                return PortProtocol::Http;
            }
            if begun.elapsed() >= UNKNOWN_PROTOCOL_TIMEOUT {
                return PortProtocol::Unknown;
            }
            tokio::select! {
                () = sleep(interval) => interval = (interval * 2).min(MAX_LOOK_INTERVAL),
                _ = tcp_socket::wait_broken(stream) => return PortProtocol::Unknown,
            }
        }
    }
}

/// Returns true if the client has sent the request line of HTTP. The bytes stay in the kernel.
fn has_sent_request_line(stream: &TcpStream) -> bool {
    let mut bytes = [0; MAX_REQUEST_LINE_BYTES];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let peeked = socket::recv(stream.as_raw_fd(), &mut bytes, flags);
    peeked.is_ok_and(|length| has_request_line(&bytes[..length]))
}
