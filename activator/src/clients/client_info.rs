//! Pure: a client connection, as the requests that came over it know it.

use std::net::{IpAddr, SocketAddr};

use crate::{
    clients::reconnect_jitter::ReconnectJitter,
    edge::client_headers::{ForwardedRequestSender, ProxiedClient},
    entrypoint::Entrypoint,
};

/// Client of a connection: the one that a trusted proxy's PROXY header names, otherwise the peer.
#[derive(Clone, Copy, Debug)]
pub struct ClientInfo {
    /// IP address of that client. It is a proxy's if the peer is a proxy and no PROXY header names its client.
    pub address: IpAddr,
    /// TCP port beside the address, from the same source.
    pub port: u16,
    /// Information of the connection about the client behind it.
    pub proxied_client: ProxiedClient,
    /// True if the client's connection to the activator has TLS.
    pub is_tls: bool,
    /// Position of the connection among those that are asked to reconnect.
    pub reconnect_jitter: ReconnectJitter,
}

impl ClientInfo {
    /// Address and port of the client.
    pub fn socket_addr(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }

    /// Sender of the request, for the headers that the pod gets.
    pub(crate) fn request_sender(&self, entrypoint: Entrypoint) -> ForwardedRequestSender {
        ForwardedRequestSender {
            traffic_origin: entrypoint.traffic_origin(),
            address: self.address,
            proxied_client: self.proxied_client,
            is_tls: self.is_tls,
        }
    }
}
