//! Pure: pool of pod addresses on a node.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// First host number of pods (10.244.1.0); lower ones belong to the node and its clients.
const FIRST_HOST: u16 = 256;
/// Last host number of pods; 10.244.255.255 is the broadcast address.
const LAST_HOST: u16 = u16::MAX - 1;

/// Addresses of one pod: the same host number in both families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodAddress(u16);

impl PodAddress {
    /// Returns the host number: the last 16 bits of both addresses.
    pub fn host_number(self) -> u16 {
        self.0
    }

    /// Returns the IPv4 address, 10.244.x.y.
    pub fn v4(self) -> Ipv4Addr {
        let [high, low] = self.0.to_be_bytes();
        Ipv4Addr::new(10, 244, high, low)
    }

    /// Returns the IPv6 address, fd00:10:244::N.
    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, self.0)
    }

    /// Returns both addresses, IPv4 first.
    pub fn both(self) -> [IpAddr; 2] {
        [self.v4().into(), self.v6().into()]
    }

    /// Returns the pod address for an IPv4 address; `None` outside the pods' range.
    pub fn from_v4(address: Ipv4Addr) -> Option<Self> {
        let [10, 244, high, low] = address.octets() else { return None };
        let host = u16::from_be_bytes([high, low]);
        (FIRST_HOST..=LAST_HOST).contains(&host).then_some(Self(host))
    }
}

/// Allocates addresses in rising order, so that a released one stays unused as long as possible.
///
/// Connections and tables elsewhere may still name it.
#[derive(Debug)]
pub struct PodAddressPool {
    allocated: BTreeSet<u16>,
    next: u16,
}

impl Default for PodAddressPool {
    fn default() -> Self {
        Self { allocated: BTreeSet::new(), next: FIRST_HOST }
    }
}

impl PodAddressPool {
    /// Allocates the next free address; `None` if all 65,279 are in use.
    pub fn allocate(&mut self) -> Option<PodAddress> {
        let rising = (self.next..=LAST_HOST).chain(FIRST_HOST..self.next);
        let host = rising.into_iter().find(|host| !self.allocated.contains(host))?;
        self.allocated.insert(host);
        // Also lower than before, if all addresses up to the last are taken: else the lowest would be the next again.
        self.next = if host >= LAST_HOST { FIRST_HOST } else { host + 1 };
        Some(PodAddress(host))
    }

    /// Reserves an address for a pod that was found running. Later allocations begin above it.
    pub fn reserve(&mut self, address: PodAddress) {
        self.allocated.insert(address.0);
        self.next = if address.0 >= LAST_HOST { FIRST_HOST } else { self.next.max(address.0 + 1) };
    }

    /// Returns an address to the pool.
    pub fn release(&mut self, address: PodAddress) {
        self.allocated.remove(&address.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_address_is_reused_last() {
        let mut addresses = PodAddressPool::default();
        let first = addresses.allocate().unwrap();
        addresses.release(first);
        let others =
            (FIRST_HOST + 1..=LAST_HOST).map(|_| addresses.allocate().unwrap().host_number());
        assert!(!others.collect::<Vec<_>>().contains(&first.host_number()));
        assert_eq!(addresses.allocate(), Some(first));
        assert_eq!(addresses.allocate(), None);
    }

    #[test]
    fn a_released_address_is_reused_last_while_the_last_of_all_is_in_use() {
        let mut addresses = PodAddressPool::default();
        addresses.reserve(PodAddress(LAST_HOST));
        let taken: Vec<PodAddress> =
            (FIRST_HOST..LAST_HOST).map(|_| addresses.allocate().unwrap()).collect();
        taken.iter().for_each(|&address| addresses.release(address));
        let first = addresses.allocate().unwrap();
        assert_eq!(first, PodAddress(FIRST_HOST));
        addresses.release(first);
        assert_eq!(addresses.allocate(), Some(PodAddress(FIRST_HOST + 1)));
    }

    #[test]
    fn an_adopted_address_is_not_given_twice() {
        let mut addresses = PodAddressPool::default();
        addresses.reserve(PodAddress(FIRST_HOST));
        assert_eq!(addresses.allocate(), Some(PodAddress(FIRST_HOST + 1)));
    }

    #[test]
    fn both_families_share_the_host_number() {
        let pod = PodAddress::from_v4(Ipv4Addr::new(10, 244, 1, 7)).unwrap();
        assert_eq!(pod.both().map(|ip| ip.to_string()), ["10.244.1.7", "fd00:10:244::107"]);
        assert_eq!(PodAddress::from_v4(Ipv4Addr::new(10, 244, 0, 1)), None);
    }
}
