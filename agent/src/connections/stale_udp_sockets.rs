//! Pure: choice of the connected UDP sockets to end, so that their programs connect again.
//!
//! A connected socket keeps its endpoint, also when the endpoint is gone, and nothing on the network reports that: a
//! resolver would ask a dead server forever. kube-proxy removes the conntrack entries of such flows. A socket is ended
//! only if the eBPF programs led it to its present peer. Sockets that are not connected get another endpoint with their
//! next datagram.

use std::net::{Ipv6Addr, SocketAddr};

use datapath::abi::{self, FrontendKey, UdpSocket};

use crate::routes::plan::UdpEndpoints;

mod scan;
pub(crate) mod task;

/// Returns true if a connected socket with this peer has an endpoint that its frontend does not have any more.
///
/// A frontend without endpoints ends no socket: it could only be refused another one. Neither does a frontend that this
/// node does not serve any more.
fn is_stale(endpoints: &UdpEndpoints, socket: &UdpSocket, peer: SocketAddr) -> bool {
    let frontend = FrontendKey {
        address: socket.original_address,
        port_be: socket.original_port_be,
        protocol: abi::IPPROTO_UDP,
        reserved: 0,
    };
    let address = Ipv6Addr::from(socket.backend_address).to_canonical();
    let backend = SocketAddr::new(address, u16::from_be(socket.backend_port_be));
    let others = endpoints.get(&frontend).filter(|others| !others.is_empty());
    peer == backend && others.is_some_and(|others| !others.contains(&backend))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 9);

    fn pod(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 244, 0, number], 5353))
    }

    /// Returns the entry of a socket that asked the ClusterIP and was given a pod.
    fn socket(number: u8) -> UdpSocket {
        UdpSocket {
            original_address: CLUSTER_IP.to_ipv6_mapped().octets(),
            backend_address: Ipv4Addr::new(10, 244, 0, number).to_ipv6_mapped().octets(),
            original_port_be: 53_u16.to_be(),
            backend_port_be: 5353_u16.to_be(),
            reserved: 0,
        }
    }

    fn endpoints(pods: &[u8]) -> UdpEndpoints {
        let key = FrontendKey {
            address: CLUSTER_IP.to_ipv6_mapped().octets(),
            port_be: 53_u16.to_be(),
            protocol: abi::IPPROTO_UDP,
            reserved: 0,
        };
        UdpEndpoints::from([(key, pods.iter().map(|it| pod(*it)).collect())])
    }

    #[test]
    fn a_socket_is_stale_once_its_endpoint_has_left_and_others_are_there() {
        assert!(!is_stale(&endpoints(&[1, 2]), &socket(1), pod(1)));
        assert!(is_stale(&endpoints(&[2]), &socket(1), pod(1)));
        assert!(!is_stale(&endpoints(&[]), &socket(1), pod(1)), "no other would be given");
        assert!(!is_stale(&UdpEndpoints::new(), &socket(1), pod(1)), "the service is gone");
    }

    #[test]
    fn a_socket_with_another_peer_than_its_entry_names_is_not_stale() {
        assert!(!is_stale(&endpoints(&[2]), &socket(1), pod(3)));
        let unconnected = UdpSocket::default();
        assert!(!is_stale(&endpoints(&[2]), &unconnected, pod(1)));
        let other_port = SocketAddr::new(pod(1).ip(), 53);
        assert!(!is_stale(&endpoints(&[2]), &socket(1), other_port));
    }
}
