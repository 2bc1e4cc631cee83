//! Pure: bounds on the resources that clients may use, and the memory that an activator needs for them.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

/// Concurrent requests of a client over one HTTP/2 connection: the number that proxies commonly allow.
pub const MAX_CLIENT_STREAMS: u32 = 100;
/// Bytes of one body that a client may send over HTTP/2 before a pod takes them. An upload with a round trip of 10 ms
/// still runs at 25 MB/s. The window of the connection bounds the memory.
pub const CLIENT_STREAM_WINDOW: u32 = 256 << 10;
/// Bytes of all bodies over one HTTP/2 connection before pods take them: Envoy's advice for edge proxies.
pub const CLIENT_CONNECTION_WINDOW: u32 = 1 << 20;
/// Bytes of one response that wait for an HTTP/2 client to read them.
pub const CLIENT_SEND_BUFFER: usize = 64 << 10;

/// Default of [`ClientBudget::request_bytes`]: bytes of requests that no pod has taken.
pub const DEFAULT_REQUEST_BYTES: usize = 128 << 20;
/// Default of [`ClientBudget::response_bytes`]: bytes of responses that wait for their clients.
pub const DEFAULT_RESPONSE_BYTES: usize = 256 << 20;
/// Default maximum of client connections, if the limit of open files allows more.
pub const DEFAULT_MAX_CONNECTIONS: usize = 16_384;
/// File descriptors for all that is neither a client connection nor one to a pod: listeners, streams, files, and up to
/// 128 for pipes.
const RESERVED_FILES: u64 = 256;
/// Minimum of client connections, however low the limit of open files is.
const MIN_CONNECTIONS: u64 = 64;

/// Bytes of a request besides its head, while it waits or is at a pod: its task, its stream and its timer. Measurements
/// show somewhat more, but not twice as much.
pub const REQUEST_OVERHEAD_BYTES: usize = 4 << 10;
/// Bytes of a client connection besides its requests: three buffers of 8 KiB and the state of the connection. One
/// buffer belongs to the socket. Two belong to hyper, for received and for sent bytes. A raw TCP connection has two.
const CONNECTION_OVERHEAD_BYTES: usize = 32 << 10;
/// Size of one of these buffers in bytes. Growth of hyper's buffers counts for as long as the connection lasts.
pub const HYPER_BUFFER_BYTES: usize = 8 << 10;
/// Bytes of a response that TLS holds encrypted for a client that does not read.
pub const TLS_BUFFER_BYTES: usize = 16 << 10;
/// Bytes that a client of TLS may send from which nothing is decrypted: a handshake, or the largest record, which has
/// less than 18.5 KB (RFC 5246 §6.2.3). Behind a ClientHello, 16 KiB of early data for another server may come, which are
/// dropped. Envoy's bound on a ClientHello is 16 KiB.
pub const MAX_UNDECRYPTED_BYTES: usize = 32 << 10;
/// Bytes of a client connection for TLS: [`TLS_BUFFER_BYTES`], the buffer for received bytes, and the keys.
pub const TLS_CONNECTION_BYTES: usize = 24 << 10;
/// Bytes that h2 keeps for each stream of the highest concurrency that an HTTP/2 connection has had. It is
/// half of the measured value, because bytes of requests count twice.
pub const STREAM_OVERHEAD_BYTES: usize = 1 << 10;
/// Divisor of [`ClientBudget::request_bytes`]: refused connections may keep this part of it, in addition to the others.
const REFUSED_SHARE_DIVISOR: usize = 8;
/// MiB of the program itself, with the routes of ten thousand services, logs, pipes, and connections to pods.
pub const BASE_MEMORY_MIB: usize = 192;

/// Maximum memory of an activator under these bounds in MiB, with no request at a pod. Bytes of requests count twice:
/// small ones lie in larger buffers, and a map of header fields doubles when it grows.
pub const fn memory_mib(request_bytes: usize, response_bytes: usize, connections: usize) -> usize {
    let requests = 2 * (request_bytes + request_bytes / REFUSED_SHARE_DIVISOR);
    // Each connection may be one of TLS.
    let connections = connections * (CONNECTION_OVERHEAD_BYTES + TLS_CONNECTION_BYTES);
    BASE_MEMORY_MIB + ((requests + response_bytes + connections) >> 20)
}

/// Bounds of the wait queue of one Revision. A scaled Service has them for each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitQueueBounds {
    /// Requests that may wait, before those that pods with a hard limit add. Default 10 000: Knative's QueueDepth
    /// (`pkg/activator/net/throttler.go`).
    pub max_requests: usize,
    /// Bytes of the requests that wait. Default 64 MiB.
    pub max_bytes: usize,
}

/// Resources that clients may use at one activator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientBudget {
    /// Bytes of one request's head.
    pub max_head_bytes: usize,
    /// Time for a head to arrive, and for a persistent connection to be idle.
    pub head_timeout: Duration,
    /// Time for the handshake of a connection with TLS.
    pub handshake_timeout: Duration,
    /// Time in which a client has to send more of a body that a pod waits for.
    pub body_idle_timeout: Duration,
    /// Bytes of requests that no pod has taken yet, of all clients: heads that wait, and bodies as far as received.
    pub request_bytes: usize,
    /// Bytes of requests that no pod has taken yet, of one client.
    pub client_request_bytes: usize,
    /// Bytes of responses that wait for clients to read them, of all clients.
    pub response_bytes: usize,
    /// Number of connections of all clients.
    pub max_connections: usize,
    /// Number of connections of one client.
    pub max_client_connections: usize,
    /// Requests of one connection that a client may reset before their responses, while these are most of its requests.
    pub max_resets: u64,
    /// Bounds of each Revision's wait queue, or of each port of a scaled Service, for all clients together.
    pub wait_queue: WaitQueueBounds,
}

impl ClientBudget {
    /// Client connections for a limit of `files` open files: each may need another descriptor for a pod.
    pub fn max_connections_for_files(files: u64) -> usize {
        let allowed = (files.saturating_sub(RESERVED_FILES) / 2).max(MIN_CONNECTIONS);
        usize::try_from(allowed).unwrap_or(usize::MAX).min(DEFAULT_MAX_CONNECTIONS)
    }

    /// Bytes of bodies that one client connection can hold: the window of flow control over HTTP/2, hyper's buffer over
    /// HTTP/1.1, which is as large as the largest head. (`h2` bounds the number of small frames that hold these bytes.)
    pub fn max_buffered_body(&self, is_http2: bool) -> usize {
        if is_http2 { CLIENT_CONNECTION_WINDOW as usize } else { self.max_head_bytes }
    }

    /// Bytes of buffers that refused connections may keep until they are closed.
    pub fn max_refused_buffer_bytes(&self) -> usize {
        self.request_bytes / REFUSED_SHARE_DIVISOR
    }

    /// Returns true if `resets` among `requests` of one connection are an attack: many, and most of the requests.
    pub fn is_reset_flood(&self, resets: u64, requests: u64) -> bool {
        resets >= self.max_resets && resets * 2 > requests
    }
}

/// Network that counts as one client: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientNetwork(IpAddr);

impl ClientNetwork {
    /// Client that an address belongs to.
    pub fn from_address(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(it) => Ipv6Addr::from_bits(it.to_bits() >> 64 << 64).into(),
            v4 => v4,
        })
    }
}

/// Bound that a client has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientBound {
    /// Bytes of requests of all clients.
    RequestBytes,
    /// Bytes of requests of one client.
    ClientRequestBytes,
    /// Bytes of responses to all clients.
    ResponseBytes,
    /// Number of connections of all clients.
    Connections,
    /// Number of connections of one client.
    ClientConnections,
    /// Time for the client to send more of a body.
    BodyIdleTimeout,
    /// Time for which an HTTP/2 connection may be idle.
    IdleTimeout,
    /// Number of requests that the client reset before their responses.
    Resets,
}

impl ClientBound {
    /// All bounds, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::RequestBytes,
        Self::ClientRequestBytes,
        Self::ResponseBytes,
        Self::Connections,
        Self::ClientConnections,
        Self::BodyIdleTimeout,
        Self::IdleTimeout,
        Self::Resets,
    ];

    /// Value of the metrics' label `bound`.
    pub fn label(self) -> &'static str {
        match self {
            Self::RequestBytes => "bytes",
            Self::ClientRequestBytes => "client_bytes",
            Self::ResponseBytes => "answer_bytes",
            Self::Connections => "connections",
            Self::ClientConnections => "client_connections",
            Self::BodyIdleTimeout => "body_idle",
            Self::IdleTimeout => "idle",
            Self::Resets => "resets",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_network_is_an_address_or_a_prefix() {
        let of = |text: &str| ClientNetwork::from_address(text.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    /// The sum is documented in docs/operations.md, and is the memory limit of the activator's Deployment.
    #[test]
    fn the_default_bounds_need_as_much_memory_as_is_documented() {
        let bytes = [DEFAULT_REQUEST_BYTES, DEFAULT_RESPONSE_BYTES];
        assert_eq!(memory_mib(bytes[0], bytes[1], DEFAULT_MAX_CONNECTIONS), 1_632);
    }

    #[test]
    fn connections_leave_half_of_the_file_table_to_pods() {
        let rows = [(0, 64), (1_024, 384), (20_256, 10_000), (u64::MAX, DEFAULT_MAX_CONNECTIONS)];
        for (files, connections) in rows {
            assert_eq!(ClientBudget::max_connections_for_files(files), connections, "{files}");
        }
    }
}
