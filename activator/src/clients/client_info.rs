//! Pure: a client connection, as the requests that came over it know it.

use std::net::{IpAddr, SocketAddr};

use crate::{
    clients::reconnect_jitter::ReconnectJitter,
    edge::client_headers::{ForwardedRequestSender, ProxiedClient},
    entrypoint::Entrypoint,
};

/// Addresses of the client that a request came from, and of its proxy.
#[derive(Clone, Copy, Debug)]
pub struct ClientInfo {
    /// IP address of the client, or of the proxy in front.
    pub address: IpAddr,
    /// TCP port of the client's end.
    pub port: u16,
    /// Information of the connection about the client behind it.
    pub proxied_client: ProxiedClient,
    /// Position of the connection among those that are asked to reconnect.
    pub reconnect_jitter: ReconnectJitter,
}

impl ClientInfo {
    /// Address and port of the client's end of the connection.
    pub fn socket_addr(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }

    /// Sender of the request, for the headers that the pod gets.
    pub(crate) fn request_sender(&self, entrypoint: Entrypoint) -> ForwardedRequestSender {
        ForwardedRequestSender {
            traffic_origin: entrypoint.traffic_origin(),
            address: self.address,
            proxied_client: self.proxied_client,
        }
    }
}
