//! Pure: counted ports of a pod: those at which connections bring its requests.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{AppProtocol, PodEntry};

use crate::kernel::pod_registration::PodRegistration;

/// Ports of a pod at which connections count, and the port that tells its readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodPorts {
    /// Port whose listeners tell if the pod is ready. At a pod of a scaled Service it may count no connections.
    readiness: u16,
    /// Serving port of the pod's entry in the kernel's maps.
    serving: u16,
    /// All counted ports, each with true if each of its connections counts as one request.
    opaque_by_port: BTreeMap<u16, bool>,
}

impl PodPorts {
    /// Returns the ports of a pod. `is_tcp` is true if its Revision takes bytes of any protocol.
    ///
    /// Connections to a port that ports of the Service use with HTTP and as raw TCP count as requests: so no use of it
    /// is missed.
    pub(crate) fn of_pod(pod: &PodEntry, is_tcp: bool) -> Self {
        let readiness = pod.port.get();
        let Some(first) = pod.ports.first() else {
            let opaque_by_port = BTreeMap::from([(readiness, is_tcp)]);
            return Self { readiness, serving: readiness, opaque_by_port };
        };
        let mut opaque_by_port = BTreeMap::new();
        for it in &pod.ports {
            let is_opaque: &mut bool = opaque_by_port.entry(it.port.get()).or_default();
            *is_opaque |= it.protocol == AppProtocol::Tcp;
        }
        // The port of a probe alone brings no requests.
        let is_served = opaque_by_port.contains_key(&readiness);
        let serving = if is_served { readiness } else { first.port.get() };
        Self { readiness, serving, opaque_by_port }
    }

    /// Returns the registration of the pod with these ports, in this row.
    pub(crate) fn registration(&self, slot: u32, keeps_binds: bool) -> PodRegistration {
        let others = self.opaque_by_port.iter().filter(|(port, _)| **port != self.serving);
        PodRegistration {
            slot,
            port: self.serving,
            keeps_binds,
            is_opaque: self.is_opaque(self.serving),
            ports: others.map(|(port, is_opaque)| (*port, *is_opaque)).collect(),
        }
    }

    /// Returns the port whose listeners tell if the pod is ready.
    pub(crate) fn readiness(&self) -> u16 {
        self.readiness
    }

    /// Returns the counted ports besides the one that tells the readiness.
    pub(crate) fn others(&self) -> impl Iterator<Item = u16> {
        self.opaque_by_port.keys().copied().filter(|port| *port != self.readiness)
    }

    /// Returns true if connections to the port count.
    pub(crate) fn is_counted(&self, port: u16) -> bool {
        self.opaque_by_port.contains_key(&port)
    }

    /// Returns true if the agent needs to know the listeners of the port.
    pub(crate) fn is_watched(&self, port: u16) -> bool {
        port == self.readiness || self.is_counted(port)
    }

    /// Returns true if each connection to the port counts as one request.
    pub(crate) fn is_opaque(&self, port: u16) -> bool {
        self.opaque_by_port.get(&port).copied().unwrap_or_default()
    }

    /// Returns true if each connection to any counted port is one request.
    pub(crate) fn are_all_opaque(&self) -> bool {
        self.opaque_by_port.values().all(|is_opaque| *is_opaque)
    }
}

/// Returns the ports of a pod besides the one that tells its readiness, to which a scaled Service leads.
pub(crate) fn other_ports(pod: &PodEntry) -> BTreeSet<u16> {
    let ports = pod.ports.iter().filter(|it| it.port != pod.port);
    ports.map(|it| it.port.get()).collect()
}

#[cfg(test)]
mod tests {
    use common::{
        fixtures,
        wire::{NamespacedName, PodPort, RoutingPhase},
    };

    use super::*;

    /// Returns a pod with the port 8080 for its readiness, and these for ports of a Service.
    fn pod(ports: &[(u16, u16, AppProtocol)]) -> PodEntry {
        let port =
            |it: &(u16, u16, AppProtocol)| -> PodPort { fixtures::pod_port(it.0, it.1, it.2) };
        let revision = NamespacedName::new("default", "web");
        let ports = ports.iter().map(port).collect();
        PodEntry { ports, ..fixtures::pod("a", &revision, RoutingPhase::Ready) }
    }

    fn registration(ports: &PodPorts) -> (u16, bool, Vec<(u16, bool)>) {
        let PodRegistration { port, is_opaque, ports, .. } = ports.registration(7, true);
        (port, is_opaque, ports)
    }

    #[test]
    fn a_pod_of_a_revision_has_its_serving_port_alone() {
        for is_tcp in [false, true] {
            let ports = PodPorts::of_pod(&pod(&[]), is_tcp);
            assert_eq!(registration(&ports), (8080, is_tcp, vec![]));
            assert_eq!((ports.readiness(), ports.others().count()), (8080, 0));
            assert_eq!((ports.is_opaque(8080), ports.are_all_opaque()), (is_tcp, is_tcp));
            assert!(ports.is_counted(8080) && !ports.is_counted(9090) && !ports.is_watched(9090));
        }
        let registration = PodPorts::of_pod(&pod(&[]), false).registration(7, false);
        assert_eq!((registration.slot, registration.keeps_binds), (7, false));
    }

    #[test]
    fn each_port_of_a_scaled_service_counts_by_its_protocol() {
        use AppProtocol::{H2c, Http1, Tcp};
        let ports = [(80, 8080, Http1), (81, 9090, H2c), (5432, 5432, Tcp)];
        // The protocol of the Revision counts only for pods without such ports.
        let ports = PodPorts::of_pod(&pod(&ports), true);
        assert_eq!(registration(&ports), (8080, false, vec![(5432, true), (9090, false)]));
        assert_eq!(ports.others().collect::<Vec<_>>(), [5432, 9090]);
        assert_eq!([8080, 9090, 5432].map(|it| ports.is_opaque(it)), [false, false, true]);
        assert!(!ports.are_all_opaque());
        let database = PodPorts::of_pod(&pod(&[(5432, 5432, Tcp)]), false);
        assert!(database.are_all_opaque());
    }

    #[test]
    fn the_port_of_a_probe_alone_tells_the_readiness_and_counts_nothing() {
        let ports = PodPorts::of_pod(&pod(&[(80, 9090, AppProtocol::Http1)]), false);
        assert_eq!(registration(&ports), (9090, false, vec![]));
        assert_eq!((ports.readiness(), ports.others().collect::<Vec<_>>()), (8080, vec![9090]));
        assert!(!ports.is_counted(8080) && ports.is_watched(8080) && ports.is_watched(9090));
    }

    #[test]
    fn a_port_with_both_kinds_of_protocols_counts_its_connections() {
        use AppProtocol::{Http1, Tcp};
        for ports in [[(80, 8080, Http1), (81, 8080, Tcp)], [(80, 8080, Tcp), (81, 8080, Http1)]] {
            let ports = PodPorts::of_pod(&pod(&ports), false);
            assert_eq!(registration(&ports), (8080, true, vec![]));
        }
    }

    #[test]
    fn the_ports_besides_that_of_the_readiness_are_listed_once() {
        use AppProtocol::Http1;
        let ports = [(80, 8080, Http1), (81, 9090, Http1), (82, 9090, Http1)];
        assert_eq!(other_ports(&pod(&ports)), BTreeSet::from([9090]));
        assert_eq!(other_ports(&pod(&[])), BTreeSet::new());
    }
}
