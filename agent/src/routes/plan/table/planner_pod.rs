//! Pure: pods of the RouteTable: their addresses, and their ports for services.

use std::{collections::BTreeSet, net::SocketAddr};

use common::{
    service_routing::TopologyHints,
    wire::{PodEntry, PodPort, RoutingPhase},
};

use super::PlannerService;

/// One pod of the RouteTable, as far as connects depend on it.
#[derive(Debug)]
pub(super) struct PlannerPod {
    /// Number of the pod's Revision.
    pub(super) revision: u32,
    pub(super) phase: RoutingPhase,
    pub(super) hints: TopologyHints,
    /// True if the agent of the pod's node is to freeze the pod while nothing uses it.
    pub(super) has_standby_order: bool,
    address: Option<SocketAddr>,
    other_family_address: Option<SocketAddr>,
    /// Ports to which a scaled Service leads.
    ports: Box<[PodPort]>,
    /// Ports that earlier tables named, and this one does not. Connections to them may still be open.
    former_ports: Box<[u16]>,
}

impl PlannerPod {
    /// Returns the state of a pod, whose earlier state is `before`.
    pub(super) fn new(revision: u32, entry: &PodEntry, before: Option<&Self>) -> Self {
        let other_family_address = entry.other_family_address.zip(entry.address);
        let mut pod = Self {
            revision,
            phase: entry.phase,
            hints: entry.hints.clone(),
            has_standby_order: entry.standby.is_some(),
            address: entry.address,
            other_family_address: other_family_address
                .map(|(ip, at)| SocketAddr::new(ip, at.port())),
            ports: entry.ports.as_slice().into(),
            former_ports: Box::default(),
        };
        if let Some(before) = before {
            // Connections to a port that the pod no longer names may still be open, and have to follow its phase.
            let former: BTreeSet<u16> =
                before.all_ports().filter(|it| !pod.ports_in_use().any(|own| own == *it)).collect();
            pod.former_ports = former.into_iter().collect();
        }
        pod
    }

    /// Returns the address at which a client of this family reaches the pod by a service; `None` also if the pod has no
    /// port for the service. It is an address of the client's own family; or else, if `mapped`, an IPv6 client gets the
    /// IPv4 address as a mapped one.
    ///
    /// An IPv6-only socket cannot connect to a mapped address, and the `connect` program cannot see that option.
    pub(super) fn address_for(
        &self,
        service: &PlannerService,
        is_ipv6: bool,
        mapped: bool,
    ) -> Option<SocketAddr> {
        let mut all = self.addresses();
        let own_family = all.clone().find(|at| at.is_ipv6() == is_ipv6);
        let at = own_family.or_else(|| all.find(|at| is_ipv6 && mapped && at.is_ipv4()))?;
        match service.uses_pod_ports {
            true => Some(SocketAddr::new(at.ip(), self.port_for(service)?)),
            false => Some(at),
        }
    }

    /// Returns an address of the pod, with the pod's port for the service if it has one. Clients of the frontend may be
    /// unable to use the address.
    pub(super) fn other_address(&self, service: &PlannerService) -> Option<SocketAddr> {
        let at = self.addresses().next()?;
        let own_port = self.port_for(service).filter(|_| service.uses_pod_ports);
        Some(own_port.map_or(at, |port| SocketAddr::new(at.ip(), port)))
    }

    /// Returns true if the pod can be a backend of a service, as far as its ports tell.
    pub(super) fn has_port_for(&self, service: &PlannerService) -> bool {
        !service.uses_pod_ports || self.port_for(service).is_some()
    }

    /// Returns the pod's addresses with each of its ports, former ones too. One may occur twice.
    pub(super) fn all_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let at_ports =
            move |at: SocketAddr| self.all_ports().map(move |port| SocketAddr::new(at.ip(), port));
        self.addresses().flat_map(at_ports)
    }

    /// Returns the pod's port for a port of a scaled Service; `None`: it has none.
    fn port_for(&self, service: &PlannerService) -> Option<u16> {
        let own = self.ports.iter().find(|it| it.service_port == service.port);
        own.map(|it| it.port.get())
    }

    /// Returns the addresses of the pod, of one family each, with its serving port.
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> + Clone + use<> {
        [self.address, self.other_family_address].into_iter().flatten()
    }

    /// Returns the ports that the table names, the serving port first. One may occur twice.
    fn ports_in_use(&self) -> impl Iterator<Item = u16> {
        let serving = self.address.map(|at| at.port());
        serving.into_iter().chain(self.ports.iter().map(|it| it.port.get()))
    }

    /// Returns the ports that the table names, or has named.
    fn all_ports(&self) -> impl Iterator<Item = u16> {
        self.ports_in_use().chain(self.former_ports.iter().copied())
    }
}
