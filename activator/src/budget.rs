//! Pure: what clients may take of an activator, and what it takes in memory at most by that.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

/// Requests a client may have at once over one HTTP/2 connection: what proxies commonly allow.
pub const MAX_STREAMS: u32 = 100;
/// Bytes of one body that a client may send over HTTP/2 before a pod takes them: an upload over 10 ms still runs at
/// 25 MB/s. What bounds memory is the window of the connection.
pub const STREAM_WINDOW: u32 = 256 << 10;
/// Bytes of all bodies over one HTTP/2 connection before pods take them: what Envoy advises for an edge.
pub const CONNECTION_WINDOW: u32 = 1 << 20;
/// Bytes of one answer that wait for an HTTP/2 client to read them.
pub const SEND_BUFFER: usize = 64 << 10;

/// Bytes of requests that no pod has taken, where nothing else is said.
pub const BYTES: usize = 128 << 20;
/// Bytes of answers that wait for their clients, where nothing else is said.
pub const ANSWER_BYTES: usize = 256 << 20;
/// Client connections at most, where nothing else is said and the file table has room for more.
pub const CONNECTIONS: usize = 16_384;
/// Descriptors for all that is no connection of a client's or to a pod: listeners, streams, files.
const OTHER_FILES: u64 = 256;
/// Connections of clients at least, however small the file table.
const FEWEST: u64 = 64;

/// Bytes that a request takes besides its head, while it waits or is at a pod: its task, its stream, its timer. It is
/// somewhat more, as measured, but not twice as much.
pub const PER_REQUEST: usize = 4 << 10;
/// Bytes that a connection takes besides: buffers of 8 KiB for what comes in and what goes out, one before the library and
/// two in it, and what is known of it.
const PER_CONNECTION: usize = 32 << 10;
/// Bytes of one of these buffers. What a library's grows by counts for as long as the connection lasts.
pub const ROOM: usize = 8 << 10;
/// Bytes that the library keeps for each request that a client ever had at once over an HTTP/2 connection: half of what was
/// measured, since bytes of requests count twice.
pub const PER_STREAM: usize = 1 << 10;
/// Connections that were asked to go may keep one part in so many of the bytes of requests, beside the others.
const LEAVING_PART: usize = 8;
/// MiB of the program, with the routes of ten thousand services, its logs and its connections to pods.
pub const BASE_MIB: usize = 192;

/// MiB that an activator takes at most by these bounds, with no request at a pod. Bytes of requests count twice: small ones
/// lie in larger buffers, and a map of fields doubles when it grows.
pub const fn memory_mib(bytes: usize, answer_bytes: usize, connections: usize) -> usize {
    let requests = 2 * (bytes + bytes / LEAVING_PART);
    BASE_MIB + ((requests + answer_bytes + connections * PER_CONNECTION) >> 20)
}

/// How much may wait in the line of one revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineBounds {
    /// Requests, before what pods with a hard limit add. Default 10 000: Knative's QueueDepth
    /// (`pkg/activator/net/throttler.go`).
    pub requests: usize,
    /// Bytes held for them. Default 64 MiB.
    pub bytes: usize,
}

/// What clients may take of one activator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of a head.
    pub head_bytes: usize,
    /// Time for a head, and for a kept connection to lie idle.
    pub head_timeout: Duration,
    /// Time in which a client whose body is waited for has to send some of it.
    pub body_idle: Duration,
    /// Bytes of requests that no pod has taken yet, of all clients: heads that wait, and bodies as far as they have come.
    pub bytes: usize,
    /// Bytes of requests that no pod has taken yet, of one client.
    pub client_bytes: usize,
    /// Bytes of answers that wait for clients to read them, of all clients.
    pub answer_bytes: usize,
    /// Connections of all clients.
    pub connections: usize,
    /// Connections of one client.
    pub client_connections: usize,
    /// Requests that a client may reset before their answers, over one connection, as long as most of it are such.
    pub resets: u64,
    /// What waits in the line of each revision, of all clients.
    pub line: LineBounds,
}

impl Budget {
    /// Connections that a file table of so many descriptors has room for: each may need another one to a pod.
    pub fn connections_for(files: u64) -> usize {
        let room = (files.saturating_sub(OTHER_FILES) / 2).max(FEWEST);
        usize::try_from(room).unwrap_or(usize::MAX).min(CONNECTIONS)
    }

    /// Bytes of bodies that one connection can hold: what flow control allows, over HTTP/1.1 what the library's buffer
    /// has room for. (How many small frames may hold these bytes is for `h2` to bound.)
    pub fn ahead(&self, is_http2: bool) -> usize {
        if is_http2 { CONNECTION_WINDOW as usize } else { self.head_bytes }
    }

    /// Bytes of room that connections which were asked to go may keep until they have gone.
    pub fn leaving_bytes(&self) -> usize {
        self.bytes / LEAVING_PART
    }

    /// Whether so many resets among so many requests of one connection are an attack: most of them, and many.
    pub fn is_flood(&self, resets: u64, requests: u64) -> bool {
        resets >= self.resets && resets * 2 > requests
    }
}

/// Who counts as one client: an address, of IPv6 the network of a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subscriber(IpAddr);

impl Subscriber {
    /// Whose address it is.
    pub fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(it) => Ipv6Addr::from_bits(it.to_bits() >> 64 << 64).into(),
            v4 => v4,
        })
    }
}

/// Which bound a client came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bound {
    /// Bytes of all clients.
    Bytes,
    /// Bytes of one client.
    ClientBytes,
    /// Bytes of answers to all clients.
    AnswerBytes,
    /// Connections of all clients.
    Connections,
    /// Connections of one client.
    ClientConnections,
    /// The time for more of a body.
    BodyIdle,
    /// The time that an HTTP/2 connection may lie idle.
    Idle,
    /// Resets.
    Resets,
}

impl Bound {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::Bytes,
        Self::ClientBytes,
        Self::AnswerBytes,
        Self::Connections,
        Self::ClientConnections,
        Self::BodyIdle,
        Self::Idle,
        Self::Resets,
    ];

    /// Its name among metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::ClientBytes => "client_bytes",
            Self::AnswerBytes => "answer_bytes",
            Self::Connections => "connections",
            Self::ClientConnections => "client_connections",
            Self::BodyIdle => "body_idle",
            Self::Idle => "idle",
            Self::Resets => "resets",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_is_an_address_or_a_network() {
        let of = |text: &str| Subscriber::of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    #[test]
    fn connections_leave_half_of_the_file_table_to_pods() {
        let rows = [(0, 64), (1_024, 384), (20_256, 10_000), (u64::MAX, CONNECTIONS)];
        for (files, connections) in rows {
            assert_eq!(Budget::connections_for(files), connections, "{files}");
        }
    }
}
