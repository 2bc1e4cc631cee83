//! Pure: sockets of this node that the eBPF programs led to endpoints of the cluster's Services.

use std::net::{Ipv6Addr, SocketAddr};

use datapath::abi::{self, ConnectRecord, FrontendKey, UdpSocket};

/// Socket whose connect was led to an endpoint, as its record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LedSocket {
    /// Frontend that the socket asked for.
    pub(crate) frontend: FrontendKey,
    /// Endpoint that it was led to.
    pub(crate) endpoint: SocketAddr,
    /// Cookie of its network namespace.
    pub(crate) netns_cookie: u64,
}

impl LedSocket {
    /// Returns the socket of a record of TCP; `None` if it was led to a pod or activator of Rouse, or is no longer
    /// connected.
    pub(crate) fn of_record(record: &ConnectRecord) -> Option<Self> {
        let frontend = frontend(record.original_address, record.original_port_be, abi::IPPROTO_TCP);
        let endpoint = endpoint(record.backend_address, record.backend_port_be);
        let netns_cookie = record.namespace().filter(|_| !record.is_routed())?;
        Some(Self { frontend, endpoint, netns_cookie })
    }

    /// Returns the socket of an entry of UDP; `None` if no connect of it was redirected.
    pub(crate) fn of_udp_socket(socket: &UdpSocket) -> Option<Self> {
        let frontend = frontend(socket.original_address, socket.original_port_be, abi::IPPROTO_UDP);
        let endpoint = endpoint(socket.backend_address, socket.backend_port_be);
        let netns_cookie = socket.netns_cookie;
        (netns_cookie != 0).then_some(Self { frontend, endpoint, netns_cookie })
    }
}

fn frontend(address: [u8; 16], port_be: u16, protocol: u8) -> FrontendKey {
    FrontendKey { address, port_be, protocol, reserved: 0 }
}

fn endpoint(address: [u8; 16], port_be: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(address).to_canonical(), u16::from_be(port_be))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_a_namespace_is_of_no_endpoint() {
        assert_eq!(LedSocket::of_record(&ConnectRecord::default()), None);
        assert_eq!(LedSocket::of_udp_socket(&UdpSocket::default()), None);
    }

    #[test]
    fn a_record_of_a_pod_or_activator_of_rouse_is_of_no_endpoint() {
        let record =
            ConnectRecord { netns_cookie: 7 | abi::NETNS_OF_ROUTED, ..ConnectRecord::default() };
        assert_eq!(LedSocket::of_record(&record), None);
        let record = ConnectRecord { netns_cookie: 7, ..record };
        assert_eq!(LedSocket::of_record(&record).map(|it| it.netns_cookie), Some(7));
    }

    #[test]
    fn a_record_names_its_frontend_and_its_endpoint() {
        let address = |text: &str| {
            let mapped: Ipv6Addr = text.parse().expect("an address");
            mapped.octets()
        };
        let record = ConnectRecord {
            original_address: address("::ffff:10.96.0.9"),
            backend_address: address("::ffff:10.244.0.5"),
            original_port_be: 80_u16.to_be(),
            backend_port_be: 8080_u16.to_be(),
            netns_cookie: 7,
            ..ConnectRecord::default()
        };
        let led = LedSocket::of_record(&record).expect("it has a namespace");
        assert_eq!(led.endpoint, "10.244.0.5:8080".parse().expect("an address"));
        assert_eq!((led.frontend.protocol, led.netns_cookie), (abi::IPPROTO_TCP, 7));
        assert_eq!(led.frontend.port_be, 80_u16.to_be());
        let socket = UdpSocket {
            original_address: record.original_address,
            backend_address: address("fd00::5"),
            original_port_be: 53_u16.to_be(),
            backend_port_be: 5353_u16.to_be(),
            reserved: 0,
            netns_cookie: 8,
        };
        let led = LedSocket::of_udp_socket(&socket).expect("it has a namespace");
        assert_eq!(led.endpoint, "[fd00::5]:5353".parse().expect("an address"));
        assert_eq!((led.frontend.protocol, led.netns_cookie), (abi::IPPROTO_UDP, 8));
    }
}
