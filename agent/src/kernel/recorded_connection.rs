//! Pure: TCP connections of this node's clients that the eBPF programs led to a backend, as their connect records tell.

use std::net::{Ipv6Addr, SocketAddr};

use datapath::abi::ConnectRecord;

/// Connection of which a connect record tells: established, being established, or half closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordedConnection {
    /// Cookie of the client's socket.
    pub(crate) socket_cookie: u64,
    /// Backend that the socket was led to.
    pub(crate) backend: SocketAddr,
    /// Cookie of the socket's network namespace.
    pub(crate) netns_cookie: u64,
}

impl RecordedConnection {
    /// Returns the connection of a record; `None` if its socket is released, or no longer connected to the backend.
    pub(crate) fn of_record(record: &ConnectRecord) -> Option<Self> {
        let (socket_cookie, netns_cookie) = (record.socket_cookie, record.namespace()?);
        let address = Ipv6Addr::from(record.backend_address).to_canonical();
        let backend = SocketAddr::new(address, u16::from_be(record.backend_port_be));
        (socket_cookie != 0).then_some(Self { socket_cookie, backend, netns_cookie })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use datapath::abi;

    use super::*;

    #[test]
    fn a_record_tells_of_a_connection_while_its_socket_is_connected() {
        let record = ConnectRecord {
            backend_address: Ipv4Addr::new(10, 244, 0, 5).to_ipv6_mapped().octets(),
            backend_port_be: 8080_u16.to_be(),
            socket_cookie: 9,
            netns_cookie: 7 | abi::NETNS_OF_ROUTED,
            ..ConnectRecord::default()
        };
        let backend = SocketAddr::from(([10, 244, 0, 5], 8080));
        let connection = RecordedConnection { socket_cookie: 9, backend, netns_cookie: 7 };
        assert_eq!(RecordedConnection::of_record(&record), Some(connection));
        let of_endpoint = ConnectRecord { netns_cookie: 7, ..record };
        assert_eq!(RecordedConnection::of_record(&of_endpoint), Some(connection));
        let released = ConnectRecord { socket_cookie: 0, ..record };
        assert_eq!(RecordedConnection::of_record(&released), None);
        let disconnected = ConnectRecord { netns_cookie: 0, ..record };
        assert_eq!(RecordedConnection::of_record(&disconnected), None);
    }
}
