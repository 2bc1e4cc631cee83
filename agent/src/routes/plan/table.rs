//! Pure: content of the RouteTable, as far as this node's kernel follows it.
//!
//! Ten thousand services may sleep here, so little is stored of each: its name once, and a number wherever another
//! entry refers to it. Facts of a Revision or pod that no connect depends on are not stored.

mod facts;
mod hints;
mod planner_pod;
mod planner_service;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use common::{
    link::RouteChanges,
    wire::{
        self, AppProtocol, ConnectionPath, LOCAL_TLS_PORT, NamespacedName, RouteKey, RoutingPhase,
    },
};
use datapath::{
    abi::{self, FrontendKey},
    load_balancing::{RoutingMode, SvcInfo},
};
use smol_str::SmolStr;

use self::{planner_pod::PlannerPod, planner_service::PlannerService};
use super::{
    DesiredBackendList,
    cluster_services::{ClusterResource, ClusterServices, affinity_seconds},
    named_slab::NamedSlab,
    request_terms::RevisionRequestTerms,
    service_number::ServiceNumber,
};

use crate::kernel::map_op::{BackendTarget, KernelPodIds, to_v6_octets};

/// Input to a plan: the RouteTable, and the Services of the cluster. Changed by
/// [`RoutePlanner::apply_change`](super::RoutePlanner::apply_change).
#[derive(Debug, Default)]
pub struct PlannerTable {
    services: NamedSlab<PlannerService>,
    /// Revisions that a service sends connects directly to, that have pods, whose request terms are not the defaults,
    /// or whose pods do not speak HTTP/1.
    revisions: NamedSlab<PlannerRevision>,
    pods: BTreeMap<String, PlannerPod>,
    /// Pods that are excluded from connects, whatever the RouteTable states of them.
    excluded_pods: BTreeSet<String>,
    activators: BTreeMap<String, Vec<IpAddr>>,
    /// Zone of this node, as the RouteTable has it; empty without one.
    node_zone: SmolStr,
    /// Services of the cluster, the second source.
    pub(super) cluster: ClusterServices,
}

#[derive(Debug, Default)]
struct PlannerRevision {
    is_h2c: bool,
    is_tcp: bool,
    /// Request terms, if they are not the defaults.
    custom_terms: Option<Box<RevisionRequestTerms>>,
    /// Numbers of the services whose connects go directly to its pods.
    services: Vec<u32>,
    pods: BTreeSet<String>,
}

impl PlannerTable {
    /// Returns true if the Revision's pods speak HTTP/2 only.
    pub fn is_h2c(&self, revision: &NamespacedName) -> bool {
        self.revisions.find(revision).is_some_and(|number| self.revisions.get(number).is_h2c)
    }

    /// Returns true if the serving port of the Revision's pods takes bytes of any protocol.
    pub fn is_tcp(&self, revision: &NamespacedName) -> bool {
        self.revisions.find(revision).is_some_and(|number| self.revisions.get(number).is_tcp)
    }

    /// Returns the request terms of a Revision.
    pub fn request_terms(&self, revision: &NamespacedName) -> RevisionRequestTerms {
        let revision_entry = self.revisions.find(revision).map(|number| self.revisions.get(number));
        let custom_terms = revision_entry.and_then(|it| it.custom_terms.as_deref()).cloned();
        custom_terms.unwrap_or_else(|| RevisionRequestTerms::default_for(revision))
    }

    /// Returns the routing phases of the pods at these addresses, with any port of the pod, former ones too. A new pod
    /// may have the address of one that ends; then ready wins.
    pub fn pod_phases(
        &self,
        is_wanted: impl Fn(&SocketAddr) -> bool,
    ) -> HashMap<SocketAddr, RoutingPhase> {
        let mut phases = HashMap::new();
        for pod in self.pods.values() {
            for at in pod.all_addresses().filter(&is_wanted) {
                let phase = phases.entry(at).or_insert(pod.phase);
                if pod.phase == RoutingPhase::Ready {
                    *phase = pod.phase;
                }
            }
        }
        phases
    }

    /// Returns the subjects that a snapshot does not name any more.
    pub fn missing_from(&self, named: &RouteChanges) -> Vec<RouteKey> {
        let services = self.services.names().map(RouteKey::Service);
        let revisions = self.revisions.names().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.keys().cloned().map(RouteKey::Activator);
        let node = (!self.node_zone.is_empty())
            .then(|| RouteKey::Node(self.cluster.node_name().to_string()));
        let all = services.chain(revisions).chain(pods).chain(activators).chain(node);
        all.filter(|key| !named.contains_key(key)).collect()
    }

    /// Returns the kinds of objects that are missing before Services of the cluster are served.
    pub fn missing_cluster_kinds(&self) -> Vec<ClusterResource> {
        self.cluster.missing_kinds()
    }

    /// Returns the number of every service that has frontends.
    pub(super) fn service_numbers(&self) -> impl Iterator<Item = ServiceNumber> {
        let routed = self.routed_numbers().map(ServiceNumber::Routed);
        routed.chain(self.cluster.served_numbers().map(ServiceNumber::Cluster))
    }

    /// Returns the number of every service of the RouteTable.
    pub(super) fn routed_numbers(&self) -> impl Iterator<Item = u32> {
        self.services.numbers.values().copied()
    }

    /// Returns the number of a service of the RouteTable.
    pub(super) fn find_service(&self, service: &NamespacedName) -> Option<u32> {
        self.services.find(service)
    }

    /// Returns the frontends of a service of the RouteTable.
    pub(super) fn frontend_keys(&self, service_number: u32) -> Vec<FrontendKey> {
        let service = self.services.get(service_number);
        service.own_frontends().chain(service.local_tls_frontends()).collect()
    }

    /// Returns the name of a service.
    pub(super) fn service_name(&self, number: ServiceNumber) -> Option<NamespacedName> {
        match number {
            ServiceNumber::Routed(number) => self.services.name(number),
            ServiceNumber::Cluster(number) => self.cluster.service_name(number),
        }
    }

    /// Returns the name of a service as users know it: a port of a scaled Service has the Service's name.
    pub(super) fn shown_name(&self, number: ServiceNumber) -> Option<NamespacedName> {
        let name = self.service_name(number)?;
        Some(name.split_port().map_or(name, |(service, _port)| service))
    }

    /// Returns true if the first service is a port of the scaled Service that the second one is.
    pub(super) fn is_same_service(&self, scaled_port: ServiceNumber, other: ServiceNumber) -> bool {
        let split = self.service_name(scaled_port).and_then(|name| name.split_port());
        split.is_some_and(|(service, _port)| self.service_name(other) == Some(service))
    }

    /// Sets a service's whole state. Returns its number.
    pub(super) fn set_service(&mut self, entry: &wire::ServiceEntry) -> u32 {
        // The kernel cannot split by request, so only a single target can be direct.
        let direct_revision = match entry.targets.as_slice() {
            [only] if entry.connection_path == ConnectionPath::Direct => {
                Some(self.revisions.get_or_insert(&only.revision))
            }
            _ => None,
        };
        let service = PlannerService {
            addresses: entry.addresses.clone().into(),
            port: entry.port,
            activator_port: entry.activator_port,
            uses_pod_ports: entry.uses_pod_ports,
            // A port of the service's own is led as the entry says.
            serves_local_tls: entry.serves_local_tls && entry.port != LOCAL_TLS_PORT,
            affinity_seconds: entry.affinity.map_or(0, affinity_seconds),
            direct_revision,
        };
        let (number, before) = self.services.insert(&entry.name, service);
        // The new Revision is referred to before the old one is released: `remove_unused_revision` must not drop one
        // that is still needed.
        if let Some(revision) = direct_revision {
            self.revisions.get_mut(revision).services.push(number);
        }
        if let Some(before) = before {
            self.release_revision(number, &before);
        }
        number
    }

    pub(super) fn remove_service(&mut self, number: u32) {
        if let Some(service) = self.services.remove(number) {
            self.release_revision(number, &service);
        }
    }

    /// Ends the service's reference to the Revision that `before` sends connects directly to.
    fn release_revision(&mut self, number: u32, before: &PlannerService) {
        let Some(revision) = before.direct_revision else { return };
        let services = &mut self.revisions.get_mut(revision).services;
        if let Some(at) = services.iter().position(|&it| it == number) {
            services.swap_remove(at);
        }
        self.remove_unused_revision(revision);
    }

    /// Sets the request terms and the protocol of a Revision; `None` resets both to the defaults.
    pub(super) fn set_revision(
        &mut self,
        name: &NamespacedName,
        entry: Option<&wire::RevisionEntry>,
    ) {
        let is_protocol = |protocol: AppProtocol| entry.is_some_and(|it| it.protocol == protocol);
        let (is_h2c, is_tcp) = (is_protocol(AppProtocol::H2c), is_protocol(AppProtocol::Tcp));
        let terms = entry
            .map(RevisionRequestTerms::from_route)
            .filter(|it| *it != RevisionRequestTerms::default_for(name))
            .map(Box::new);
        let number = match self.revisions.find(name) {
            Some(number) => number,
            // Nearly every Revision is like this, and needs no entry.
            None if !is_h2c && !is_tcp && terms.is_none() => return,
            None => self.revisions.get_or_insert(name),
        };
        let revision = self.revisions.get_mut(number);
        (revision.is_h2c, revision.is_tcp, revision.custom_terms) = (is_h2c, is_tcp, terms);
        self.remove_unused_revision(number);
    }

    /// Sets a pod's whole state, or removes it. Returns the numbers of the services that it concerns.
    pub(super) fn set_pod(&mut self, uid: &str, entry: Option<&wire::PodEntry>) -> Vec<u32> {
        let mut concerned = self.affected_services(uid);
        let before = self.pods.remove(uid);
        if let Some(entry) = entry {
            let revision = self.revisions.get_or_insert(&entry.revision);
            self.revisions.get_mut(revision).pods.insert(uid.to_owned());
            let pod = PlannerPod::new(revision, entry, before.as_ref());
            self.pods.insert(uid.to_owned(), pod);
            // The pod may have another Revision now: the services of both are concerned.
            concerned.extend(self.affected_services(uid));
        }
        let now = self.pods.get(uid).map(|pod| pod.revision);
        if let Some(before) = before.map(|pod| pod.revision).filter(|&it| Some(it) != now) {
            self.revisions.get_mut(before).pods.remove(uid);
            self.remove_unused_revision(before);
        }
        concerned
    }

    /// Excludes a pod from connects, or ends that. Returns the numbers of the services that it concerns.
    pub(super) fn set_excluded(&mut self, uid: &str, is_excluded: bool) -> Vec<u32> {
        let changed = if is_excluded {
            self.excluded_pods.insert(uid.to_owned())
        } else {
            self.excluded_pods.remove(uid)
        };
        if changed { self.affected_services(uid) } else { Vec::new() }
    }

    /// Returns the numbers of the services whose connects go directly to a pod.
    pub(super) fn affected_services(&self, uid: &str) -> Vec<u32> {
        let revision = self.pods.get(uid).map(|pod| self.revisions.get(pod.revision));
        revision.map(|it| it.services.clone()).unwrap_or_default()
    }

    /// Sets an activator's addresses; `None` removes it.
    pub(super) fn set_activator(&mut self, name: &str, addresses: Option<Vec<IpAddr>>) {
        match addresses {
            Some(addresses) => drop(self.activators.insert(name.to_owned(), addresses)),
            None => drop(self.activators.remove(name)),
        }
    }

    /// Returns true if any activator has an IPv6 address.
    pub(super) fn has_ipv6_activator(&self) -> bool {
        self.activators.values().flatten().any(IpAddr::is_ipv6)
    }

    /// Returns the list that each frontend of a service should have.
    pub(super) fn desired_lists(
        &self,
        number: ServiceNumber,
        locals: &BTreeMap<String, KernelPodIds>,
    ) -> Vec<(FrontendKey, DesiredBackendList)> {
        match number {
            ServiceNumber::Routed(number) => self.desired_routed_lists(number, locals),
            ServiceNumber::Cluster(number) => self.cluster.desired_lists(number),
        }
    }

    /// Returns the list that each address of a service of the RouteTable should have.
    ///
    /// A list has pods only if one Revision has all traffic, as the kernel cannot split by request, and the path is
    /// direct. The pods are ready, have a port for the service, and have an address that the client can use. Standby
    /// orders and hints select among them.
    ///
    /// An IPv6 client reaches pods without an IPv6 address through activators, because each of its sockets can reach
    /// those. It uses mapped addresses of pods only if no activator has an IPv6 address.
    ///
    /// Connects to the port of https always go to activators, at the same port there: pods speak no TLS.
    fn desired_routed_lists(
        &self,
        service_number: u32,
        locals: &BTreeMap<String, KernelPodIds>,
    ) -> Vec<(FrontendKey, DesiredBackendList)> {
        let service = self.services.get(service_number);
        let mapped = !self.has_ipv6_activator();
        let each = service.addresses.iter().map(|&address| {
            let pods = self.hinted_pods(service, address.is_ipv6(), mapped);
            let backends = pods
                .iter()
                .flat_map(|pods| pods.selected())
                .map(|(uid, at)| BackendTarget::of_pod(at, locals.get(uid)))
                .collect();
            let backends = sort_and_dedup(backends);
            // Without pods the list falls back on the activators, also for a client that kept a pod.
            let mode = match service.affinity_seconds {
                _ if backends.is_empty() => RoutingMode::Activator,
                0 => RoutingMode::PickBackend,
                _ => RoutingMode::PickWithAffinity,
            };
            let list =
                DesiredBackendList { mode, info: self.activator_info(service, address), backends };
            (tcp_frontend(address, service.port), list)
        });
        let local_tls = service.local_tls_addresses().map(|address| {
            let list = DesiredBackendList {
                mode: RoutingMode::Activator,
                info: self.activator_info(service, address),
                backends: Vec::new(),
            };
            (tcp_frontend(address, LOCAL_TLS_PORT), list)
        });
        each.chain(local_tls).collect()
    }

    /// Returns the way to the activators from an address of a service.
    fn activator_info(&self, service: &PlannerService, address: IpAddr) -> SvcInfo {
        // IPv4 clients reach IPv4 activators only; IPv6 clients use those if there are no others.
        let uses_ipv6 = address.is_ipv6() && self.has_ipv6_activator();
        SvcInfo {
            activators: if uses_ipv6 { abi::ACTIVATORS_V6 } else { abi::ACTIVATORS_V4 },
            affinity_seconds: service.affinity_seconds,
            port_be: service.activator_port.get().to_be(),
        }
    }

    /// Iterates over the pods of a Revision that connects from this node may go to, by uid.
    fn ready_pods(&self, revision: u32) -> impl Iterator<Item = (&String, &PlannerPod)> {
        let pods = self.revisions.get(revision).pods.iter();
        pods.filter(|uid| !self.excluded_pods.contains(*uid)).filter_map(|uid| {
            let pod = self.pods.get(uid).filter(|pod| pod.phase == RoutingPhase::Ready)?;
            Some((uid, pod))
        })
    }

    /// Returns the two lists of activators, IPv4 and IPv6, each with its service id.
    pub(super) fn activator_lists(&self) -> [(u32, DesiredBackendList); 2] {
        let list = |is_ipv6: bool| {
            let family = self.activators.values().flatten().filter(|it| it.is_ipv6() == is_ipv6);
            let backends = sort_and_dedup(
                family.map(|&address| BackendTarget::of_activator(address)).collect(),
            );
            let info = SvcInfo { activators: 0, affinity_seconds: 0, port_be: 0 };
            let mode =
                if backends.is_empty() { RoutingMode::Pass } else { RoutingMode::PickBackend };
            DesiredBackendList { mode, info, backends }
        };
        [(abi::ACTIVATORS_V4, list(false)), (abi::ACTIVATORS_V6, list(true))]
    }

    /// Forgets a Revision that nothing depends on.
    fn remove_unused_revision(&mut self, revision: u32) {
        let it = self.revisions.get(revision);
        let has_defaults = !it.is_h2c && !it.is_tcp && it.custom_terms.is_none();
        if has_defaults && it.services.is_empty() && it.pods.is_empty() {
            drop(self.revisions.remove(revision));
        }
    }
}

/// Returns the key of a frontend of the RouteTable, whose services speak TCP only.
fn tcp_frontend(address: IpAddr, port: NonZeroU16) -> FrontendKey {
    frontend_key(address, port, abi::IPPROTO_TCP)
}

/// Returns the key of a frontend; `protocol` is an IP protocol number.
pub(super) fn frontend_key(address: IpAddr, port: NonZeroU16, protocol: u8) -> FrontendKey {
    let port_be = port.get().to_be();
    FrontendKey { address: to_v6_octets(address), port_be, protocol, reserved: 0 }
}

fn sort_and_dedup(mut backends: Vec<BackendTarget>) -> Vec<BackendTarget> {
    backends.sort_unstable();
    backends.dedup();
    backends
}
