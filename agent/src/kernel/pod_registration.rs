//! Pure: registration of a pod in the kernel's maps.

use std::collections::BTreeMap;

use datapath::abi::{self, PodPortValue, PodValue};

/// Pod of this node as the eBPF programs should know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRegistration {
    /// Row of the pod in the maps of counters, from 1.
    pub slot: u32,
    /// Serving port of the pod's entry in `PODS`.
    pub port: u16,
    /// True if a bind of the serving port to loopback stays as it is; otherwise it becomes one to any address.
    pub keeps_binds: bool,
    /// True if each connection to the serving port counts as one request. Entries of `ports` for the serving port
    /// decide instead.
    pub is_opaque: bool,
    /// Further ports that count, each with true if each of its connections counts as one request. A port that occurs
    /// with both counts connections, so that no use of it is missed.
    pub ports: Vec<(u16, bool)>,
}

impl PodRegistration {
    /// Returns the pod's entry in `PODS`.
    pub fn entry(&self) -> PodValue {
        let all_ports = self.opaque_by_port();
        let is_opaque = all_ports.get(&self.port).copied().unwrap_or(self.is_opaque);
        let has_ports = all_ports.keys().any(|port| *port != self.port);
        let flags = [
            (!self.keeps_binds, abi::POD_WIDEN_BIND),
            (has_ports, abi::POD_HAS_PORTS),
            (is_opaque, abi::POD_OPAQUE),
        ];
        let flags = flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, it| all | it.1);
        PodValue { slot: self.slot, port: self.port, flags }
    }

    /// Returns the pod's entries in `POD_PORTS`, by port.
    pub(crate) fn port_entries(&self) -> BTreeMap<u16, PodPortValue> {
        let others = self.opaque_by_port().into_iter().filter(|(port, _)| *port != self.port);
        let value =
            |is_opaque| PodPortValue { flags: if is_opaque { abi::POD_PORT_OPAQUE } else { 0 } };
        others.map(|(port, is_opaque)| (port, value(is_opaque))).collect()
    }

    /// Returns the ports of `ports`, each with true if its connections count as requests.
    fn opaque_by_port(&self) -> BTreeMap<u16, bool> {
        let mut all_ports = BTreeMap::new();
        for (port, is_opaque) in &self.ports {
            *all_ports.entry(*port).or_default() |= is_opaque;
        }
        all_ports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP: PodPortValue = PodPortValue { flags: 0 };
    const OPAQUE: PodPortValue = PodPortValue { flags: abi::POD_PORT_OPAQUE };

    fn pod(ports: &[(u16, bool)]) -> PodRegistration {
        let ports = ports.to_vec();
        PodRegistration { slot: 7, port: 8080, keeps_binds: true, is_opaque: false, ports }
    }

    #[test]
    fn a_pod_of_a_revision_has_one_port_whose_loopback_binds_are_widened() {
        let revision_pod = PodRegistration { keeps_binds: false, ..pod(&[]) };
        let entry = PodValue { slot: 7, port: 8080, flags: abi::POD_WIDEN_BIND };
        assert_eq!((revision_pod.entry(), revision_pod.port_entries()), (entry, BTreeMap::new()));
        let opaque = PodRegistration { is_opaque: true, ..revision_pod };
        assert_eq!(opaque.entry().flags, abi::POD_WIDEN_BIND | abi::POD_OPAQUE);
    }

    #[test]
    fn further_ports_are_entries_of_their_own_and_the_serving_port_is_a_flag() {
        let several = pod(&[(5432, true), (8080, false), (9090, false)]);
        assert_eq!(several.entry().flags, abi::POD_HAS_PORTS);
        assert_eq!(several.port_entries(), BTreeMap::from([(5432, OPAQUE), (9090, HTTP)]));
        let one = pod(&[(8080, true)]);
        assert_eq!((one.entry().flags, one.port_entries()), (abi::POD_OPAQUE, BTreeMap::new()));
    }

    #[test]
    fn entries_of_the_serving_port_decide_about_its_connections() {
        let http = PodRegistration { is_opaque: true, ..pod(&[(8080, false)]) };
        assert_eq!(http.entry().flags, 0);
        let others_only = PodRegistration { is_opaque: true, ..pod(&[(9090, false)]) };
        assert_eq!(others_only.entry().flags, abi::POD_HAS_PORTS | abi::POD_OPAQUE);
    }

    #[test]
    fn a_port_that_occurs_with_both_kinds_counts_its_connections() {
        let both = pod(&[(9090, true), (9090, false), (8080, false), (8080, true)]);
        assert_eq!(both.entry().flags, abi::POD_HAS_PORTS | abi::POD_OPAQUE);
        assert_eq!(both.port_entries(), BTreeMap::from([(9090, OPAQUE)]));
    }
}
