//! Pure: listeners by which connections come in, their transport, and the origin of their traffic.

/// Listener that a connection came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrypoint {
    /// A service's own port: requests are for that service, whatever their Host is.
    Service(u16),
    /// The gateway for workloads of the cluster, which routes to every service by Host.
    Internal,
    /// The gateway for requests from outside, which routes to public hosts only.
    External,
    /// A gateway port: each connection from outside is raw TCP for the service that has the port.
    GatewayPort(u16),
}

impl Entrypoint {
    /// Side of the entrypoint: the cluster, or outside.
    pub fn traffic_origin(self) -> TrafficOrigin {
        match self {
            Self::Service(_) | Self::Internal => TrafficOrigin::Internal,
            Self::External | Self::GatewayPort(_) => TrafficOrigin::External,
        }
    }
}

/// Transport of the connections that a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientTransport {
    /// Each connection is TCP alone.
    Plain,
    /// Each connection begins with a handshake of TLS, behind the PROXY header if there is one.
    Tls,
}

/// Origin of a request: the cluster, or outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficOrigin {
    /// The sender is a workload of the cluster.
    Internal,
    /// The sender is outside, so that its headers about the client are not trusted.
    External,
}
