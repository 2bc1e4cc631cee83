//! Pure: Services of the cluster that this node serves in kube-proxy's place, beside those of the RouteTable.
//!
//! Pass in each object as it is observed. Nothing is served before all kinds of objects are listed: a list must
//! not lack the endpoints of a slice that is not known yet.

pub(super) mod facts;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use common::{
    service_routing::{
        AddressFamily, ClusterIpService, NodeTopology, PortTarget, ServiceSlice, TransportProtocol,
        answering_endpoints, named_endpoints, route_service,
    },
    wire::NamespacedName,
};
use datapath::{
    abi::{self, FrontendKey},
    load_balancing::{RoutingMode, SvcInfo},
};
use smol_str::SmolStr;

use super::{DesiredBackendList, named_slab::NamedSlab, table::frontend_key};
use crate::{config::ClusterIpMode, kernel::map_op::BackendTarget};

/// The API server's own Service: namespace and name. If its endpoints in the maps were wrong, agents would not reach
/// the API server by it, and could never correct them. It is served only where agents know API servers by other
/// addresses, as kube-proxy does.
const API_SERVER_SERVICE: (&str, &str) = ("default", "kubernetes");
/// Name of the port of the API server's own Service.
const API_SERVER_PORT: &str = "https";

/// Kind of observed objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterResource {
    /// Services of all namespaces.
    Service,
    /// EndpointSlices of these Services.
    EndpointSlice,
    /// Namespaces, for their labels.
    Namespace,
    /// The node itself.
    Node,
}

impl ClusterResource {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Service, Self::EndpointSlice, Self::Namespace, Self::Node];

    /// Returns the name of the kind in Kubernetes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Namespace => "Namespace",
            Self::Node => "Node",
        }
    }
}

/// Value of the label `rouse.dev/clusterip`: true or false; `None` without the label, or with another value.
pub type ClusterIpLabel = Option<bool>;

/// A Service that a service proxy would serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedService {
    /// Part of the Service on which routing depends.
    pub service: ClusterIpService,
    /// Label of the Service.
    pub label: ClusterIpLabel,
    /// True if the Service is the DNS of the cluster, without which a node finds no name after a reboot.
    pub is_dns: bool,
}

/// An EndpointSlice that a service proxy would use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedSlice {
    /// Service of the slice, in the slice's namespace.
    pub service: NamespacedName,
    /// Part of the slice on which routing depends.
    pub slice: ServiceSlice,
    /// Time of the event that caused the slice's last change, in ms since the epoch by the control plane's clock.
    pub triggered_ms: Option<i64>,
}

/// Observation of the cluster. An object that is `None` does not exist, or concerns no service proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterChange {
    /// A list of all objects of a kind begins.
    ListBegun(ClusterResource),
    /// State of a Service.
    Service(NamespacedName, Option<ObservedService>),
    /// State of an EndpointSlice.
    Slice(NamespacedName, Option<ObservedSlice>),
    /// Label of a namespace.
    Namespace(SmolStr, ClusterIpLabel),
    /// Zone of this node; empty without one.
    Zone(SmolStr),
    /// The list of a kind is complete: objects that it does not name do not exist.
    ListCompleted(ClusterResource),
}

/// Endpoints whose sockets are not ended, by the frontend that leads to them and the number of the service. For UDP
/// they are those that answer, and for TCP all that EndpointSlices name. In a list of changes, a frontend without
/// endpoints may also be gone.
pub type FrontendEndpoints = BTreeMap<(FrontendKey, u32), Arc<BTreeSet<SocketAddr>>>;

/// Way in which the agent learned that endpoints have left. Of several ways, the last in order counts: it proves least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DepartureSource {
    /// The watch of EndpointSlices, in the order of the changes.
    Watch,
    /// A list, which an API server may answer from an older state than the agent has seen.
    List,
}

/// Endpoints of one service's frontends.
type ServiceEndpoints = BTreeMap<FrontendKey, Arc<BTreeSet<SocketAddr>>>;

/// Services of the cluster, and what this node needs to route them.
#[derive(Debug, Default)]
pub struct ClusterServices {
    mode: ClusterIpMode,
    node: NodeTopology,
    /// Addresses of the node itself. A ClusterIP among them belongs to a local server, such as NodeLocal DNSCache.
    node_addresses: BTreeSet<IpAddr>,
    /// Addresses at which the agent reaches API servers without their Service; `None`: it needs the Service.
    api_server_addresses: Option<BTreeSet<IpAddr>>,
    services: NamedSlab<ClusterService>,
    /// Service of each EndpointSlice.
    slice_services: HashMap<NamespacedName, NamespacedName>,
    /// Namespaces with the label.
    namespace_labels: BTreeMap<SmolStr, bool>,
    /// Objects that the list in progress has named, by kind.
    lists: BTreeMap<ClusterResource, BTreeSet<NamespacedName>>,
    /// Kinds of which at least one list is complete.
    listed: BTreeSet<ClusterResource>,
    /// Numbers of the services that have changed since the last [`take_changed`](Self::take_changed).
    changed: BTreeSet<u32>,
    /// Changes of endpoints since they were last taken.
    changed_endpoints: FrontendEndpoints,
    /// True if a list of EndpointSlices was completed since the last [`take_changed`](Self::take_changed).
    is_newly_listed: bool,
    /// Set if connected sockets may have endpoints that have left.
    departures: Option<DepartureSource>,
    /// Numbers of the served services that the node must reach first after a reboot.
    bootstrap: BTreeSet<u32>,
    /// True if such a service has changed since the last [`take_bootstrap_change`](Self::take_bootstrap_change).
    is_bootstrap_changed: bool,
    /// Times of the events behind changes of slices that may not be in force yet, in ms, by service number.
    triggers: BTreeMap<u32, Vec<i64>>,
}

/// A Service, or EndpointSlices whose Service is not known.
#[derive(Debug, Default)]
struct ClusterService {
    observed: Option<ObservedService>,
    /// EndpointSlices by name.
    slices: BTreeMap<SmolStr, ServiceSlice>,
    /// Frontends that the planner has for the service.
    frontends: Box<[FrontendKey]>,
    /// Endpoints of these frontends.
    endpoints: ServiceEndpoints,
}

/// A changed service.
pub(super) struct ChangedService {
    pub(super) number: u32,
    /// Frontends that the service no longer has.
    pub(super) released: Vec<FrontendKey>,
    /// False if the service has no frontend any more.
    pub(super) is_served: bool,
}

impl ClusterServices {
    /// Starts without objects, on the node of this name. The name is not taken from the node's object, which may be
    /// missing for a while.
    pub(super) fn new(mode: ClusterIpMode, node: &str) -> Self {
        let node = NodeTopology { name: node.into(), ..NodeTopology::default() };
        Self { mode, node, ..Self::default() }
    }

    /// Returns the name of this node.
    pub(super) fn node_name(&self) -> &SmolStr {
        &self.node.name
    }

    /// Serves the API server's own Service too. `addresses` are those at which the agent itself asks API servers: no
    /// Service is served there.
    pub(super) fn serve_api_server(&mut self, addresses: BTreeSet<IpAddr>) {
        self.api_server_addresses = Some(addresses);
    }

    /// Returns true if the mode selects any Service.
    pub(super) fn is_enabled(&self) -> bool {
        self.mode != ClusterIpMode::Off
    }

    /// Returns true if all kinds were listed, so that the frontends of all services are known.
    pub(super) fn is_known(&self) -> bool {
        !self.is_enabled() || self.listed.len() == ClusterResource::ALL.len()
    }

    /// Returns the kinds of which no list is complete.
    pub(super) fn missing_kinds(&self) -> Vec<ClusterResource> {
        let is_missing = |it: &ClusterResource| !self.listed.contains(it);
        let kinds = ClusterResource::ALL.into_iter().filter(|_| self.is_enabled());
        kinds.filter(is_missing).collect()
    }

    /// Sets the addresses of the node itself.
    pub(super) fn set_node_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        let changed: BTreeSet<IpAddr> =
            self.node_addresses.symmetric_difference(&addresses).copied().collect();
        self.node_addresses = addresses;
        if !changed.is_empty() {
            self.mark_changed(|service| {
                let addresses = service.observed.iter().flat_map(|it| &it.service.cluster_ips);
                addresses.clone().any(|address| changed.contains(address))
            });
        }
    }

    /// Applies one observation.
    pub(super) fn apply(&mut self, change: ClusterChange) {
        match change {
            ClusterChange::ListBegun(resource) => {
                self.lists.insert(resource, BTreeSet::new());
            }
            ClusterChange::Service(name, service) => {
                self.record_listed(ClusterResource::Service, &name);
                self.set_service(&name, service);
            }
            ClusterChange::Slice(name, slice) => {
                self.record_listed(ClusterResource::EndpointSlice, &name);
                self.set_slice(&name, slice);
            }
            ClusterChange::Namespace(name, label) => {
                let key = NamespacedName::new("", name.as_str());
                self.record_listed(ClusterResource::Namespace, &key);
                self.set_namespace(&name, label);
            }
            ClusterChange::Zone(zone) => self.set_zone(zone),
            ClusterChange::ListCompleted(resource) => self.complete_list(resource),
        }
    }

    /// Takes the services that have changed, once all are known.
    pub(super) fn take_changed(&mut self) -> Vec<ChangedService> {
        if !self.is_known() {
            return Vec::new();
        }
        let changed = std::mem::take(&mut self.changed);
        let updated = changed.into_iter().map(|number| self.update_frontends(number));
        // Most of a cluster's changes may concern Services that the mode does not select.
        let updated = updated.filter(|it| it.is_served || !it.released.is_empty()).collect();
        self.is_newly_listed = false;
        updated
    }

    /// Returns a source if endpoints may have left since the last call, or were not known.
    pub(super) fn take_departures(&mut self) -> Option<DepartureSource> {
        self.departures.take()
    }

    /// Takes the changes of endpoints since the last call.
    pub(super) fn take_changed_endpoints(&mut self) -> FrontendEndpoints {
        std::mem::take(&mut self.changed_endpoints)
    }

    /// Marks that sockets may have endpoints that have left, whatever has changed.
    pub(super) fn mark_sockets_stale(&mut self) {
        self.departures = self.departures.max(Some(DepartureSource::Watch));
    }

    /// Returns the numbers of the served services that the node must reach first after a reboot, once all services are
    /// known. `None` if none of these has changed since the last call.
    pub(super) fn take_bootstrap_change(&mut self) -> Option<BTreeSet<u32>> {
        if !self.is_enabled() || !self.is_known() {
            return None;
        }
        std::mem::take(&mut self.is_bootstrap_changed).then(|| self.bootstrap.clone())
    }

    /// Returns the ready endpoints of the API server's own Service, also if it is not served.
    pub(super) fn api_servers(&self) -> BTreeSet<SocketAddr> {
        let (namespace, name) = API_SERVER_SERVICE;
        let number = self.services.find(&NamespacedName::new(namespace, name));
        let slices = number.into_iter().flat_map(|it| self.services.get(it).slices.values());
        let addresses = slices.flat_map(|slice| {
            let ports = slice.ports.iter().filter(|it| it.name == API_SERVER_PORT);
            let ready = slice.endpoints.iter().filter(|it| it.is_ready);
            ports.flat_map(move |port| {
                ready.clone().map(move |it| SocketAddr::new(it.address, port.port.get()))
            })
        });
        addresses.collect()
    }

    /// Returns the numbers of the services that have frontends.
    pub(super) fn served_numbers(&self) -> impl Iterator<Item = u32> {
        let numbers = self.services.numbers.values().copied();
        numbers.filter(|&number| !self.services.get(number).frontends.is_empty())
    }

    /// Returns the name of a service.
    pub(super) fn service_name(&self, number: u32) -> Option<NamespacedName> {
        self.services.name(number)
    }

    /// Returns the list that each frontend of a service should have.
    pub(super) fn desired_lists(&self, number: u32) -> Vec<(FrontendKey, DesiredBackendList)> {
        let service = self.services.get(number);
        let Some(observed) = &service.observed else { return Vec::new() };
        let affinity = observed.service.affinity_timeout.map_or(0, affinity_seconds);
        let routings = route_service(&observed.service, service.slices.values(), &self.node);
        // Two ports of one number and protocol cannot pass admission; the first one counts.
        let mut lists = BTreeMap::new();
        for routing in routings {
            let Some(protocol) = served_protocol(routing.protocol) else { continue };
            let key = frontend_key(routing.address, routing.port, protocol);
            if service.frontends.contains(&key) {
                lists.entry(key).or_insert_with(|| desired_list(&routing.target, affinity));
            }
        }
        lists.into_iter().collect()
    }

    /// Records that the list in progress names an object, so that its completion does not remove the object.
    fn record_listed(&mut self, resource: ClusterResource, name: &NamespacedName) {
        if let Some(names) = self.lists.get_mut(&resource) {
            names.insert(name.clone());
        }
    }

    fn set_service(&mut self, name: &NamespacedName, observed: Option<ObservedService>) {
        if observed.is_none() && self.services.find(name).is_none() {
            return;
        }
        let number = self.services.get_or_insert(name);
        let service = self.services.get_mut(number);
        // Watches repeat objects, for example after a new list.
        if service.observed != observed {
            service.observed = observed;
            self.changed.insert(number);
        }
    }

    /// Sets or, with `None`, removes an EndpointSlice. The Services of it, before and now, are due.
    fn set_slice(&mut self, name: &NamespacedName, observed: Option<ObservedSlice>) {
        let before = self.slice_services.get(name).cloned();
        let now = observed.as_ref().map(|it| it.service.clone());
        // Deleted, or now a slice of another Service.
        if let Some(before) = before.filter(|it| Some(it) != now.as_ref()) {
            self.slice_services.remove(name);
            let number = self.services.get_or_insert(&before);
            self.services.get_mut(number).slices.remove(&name.name);
            self.changed.insert(number);
            // A deleted slice has the time of its last change, and not that of its deletion. Like kube-proxy, drop the
            // times of the whole Service.
            self.triggers.remove(&number);
        }
        if let Some(ObservedSlice { service, slice, triggered_ms }) = observed {
            let number = self.services.get_or_insert(&service);
            let slices = &mut self.services.get_mut(number).slices;
            if slices.get(&name.name) != Some(&slice) {
                slices.insert(name.name.clone(), slice);
                self.changed.insert(number);
                self.record_trigger(number, triggered_ms);
            }
            self.slice_services.insert(name.clone(), service);
        }
    }

    fn set_namespace(&mut self, name: &str, label: ClusterIpLabel) {
        let before = match label {
            Some(label) => self.namespace_labels.insert(name.into(), label),
            None => self.namespace_labels.remove(name),
        };
        if before == label {
            return;
        }
        let numbers = self.services.names().filter(|it| it.namespace == name);
        let numbers: Vec<u32> = numbers.filter_map(|it| self.services.find(&it)).collect();
        self.changed.extend(numbers);
    }

    fn set_zone(&mut self, zone: SmolStr) {
        if self.node.zone != zone {
            self.node.zone = zone;
            self.mark_changed(|_| true);
        }
    }

    /// Removes all objects of a kind that its list has not named.
    fn complete_list(&mut self, resource: ClusterResource) {
        let Some(named) = self.lists.remove(&resource) else { return };
        match resource {
            ClusterResource::Service => {
                let gone: Vec<_> = self.services.names().filter(|it| !named.contains(it)).collect();
                gone.iter().for_each(|name| self.set_service(name, None));
            }
            ClusterResource::EndpointSlice => {
                let known = self.slice_services.keys();
                let gone: Vec<_> = known.filter(|it| !named.contains(it)).cloned().collect();
                gone.iter().for_each(|name| self.set_slice(name, None));
            }
            ClusterResource::Namespace => {
                let is_gone =
                    |it: &&SmolStr| !named.contains(&NamespacedName::new("", it.as_str()));
                let known = self.namespace_labels.keys();
                let gone: Vec<_> = known.filter(is_gone).cloned().collect();
                gone.iter().for_each(|name| self.set_namespace(name, None));
            }
            ClusterResource::Node => {}
        }
        // Once all kinds are listed, it is also known which Services of the bootstrap file do not exist.
        self.is_bootstrap_changed |= self.listed.insert(resource);
        self.is_newly_listed |= resource == ClusterResource::EndpointSlice;
    }

    /// Marks the services as changed for which `is_changed` is true.
    fn mark_changed(&mut self, is_changed: impl Fn(&ClusterService) -> bool) {
        let numbers = self.services.numbers.values().copied();
        let changed = numbers.filter(|&number| is_changed(self.services.get(number)));
        self.changed.extend(changed.collect::<Vec<u32>>());
    }

    /// Computes the frontends of a service again, and forgets the service if nothing is left of it.
    fn update_frontends(&mut self, number: u32) -> ChangedService {
        let frontends = self.wanted_frontends(number);
        let is_served = !frontends.is_empty();
        let endpoints = self.endpoints_of(number, &frontends);
        self.set_endpoints(number, endpoints);
        self.update_bootstrap(number, is_served);
        let service = self.services.get_mut(number);
        let before = std::mem::replace(&mut service.frontends, frontends.into_iter().collect());
        let is_released = |key: &&FrontendKey| !service.frontends.contains(*key);
        let released = before.iter().filter(is_released).copied().collect();
        // Slices may be observed before their Service, and after its deletion.
        if service.observed.is_none() && service.slices.is_empty() {
            self.services.remove(number);
        }
        if !is_served {
            self.triggers.remove(&number);
        }
        ChangedService { number, released, is_served }
    }

    /// Replaces the endpoints of a service's frontends, and records the changes.
    fn set_endpoints(&mut self, number: u32, endpoints: ServiceEndpoints) {
        let is_of_list =
            self.is_newly_listed || self.lists.contains_key(&ClusterResource::EndpointSlice);
        let source = if is_of_list { DepartureSource::List } else { DepartureSource::Watch };
        let service = self.services.get_mut(number);
        // Of all departures until they are taken, the one that proves least counts.
        if have_endpoints_left(&service.endpoints, &endpoints) {
            self.departures = self.departures.max(Some(source));
        }
        let changes = endpoint_changes(&service.endpoints, &endpoints);
        self.changed_endpoints.extend(changes.map(|(key, now)| ((key, number), now)));
        service.endpoints = endpoints;
    }

    /// Records a changed service if the node must reach it first after a reboot, or had to.
    fn update_bootstrap(&mut self, number: u32, is_served: bool) {
        let observed = self.services.get(number).observed.as_ref();
        let is_dns = is_served && observed.is_some_and(|it| it.is_dns);
        let is_api_server = self.is_api_server(number);
        let was_needed = self.bootstrap.remove(&number);
        if is_dns || (is_api_server && is_served) {
            self.bootstrap.insert(number);
        }
        self.is_bootstrap_changed |= was_needed || is_dns || is_api_server;
    }

    fn is_api_server(&self, number: u32) -> bool {
        self.services.name(number).is_some_and(|it| is_api_server_service(&it))
    }

    /// Returns the frontends that a service should have on this node.
    fn wanted_frontends(&self, number: u32) -> BTreeSet<FrontendKey> {
        let observed = self.services.get(number).observed.as_ref();
        let Some(service) = observed.filter(|it| self.is_selected(number, it.label)) else {
            return BTreeSet::new();
        };
        let ClusterIpService { cluster_ips, ports, .. } = &service.service;
        let own = self.api_server_addresses.as_ref();
        if self.is_api_server(number) && !may_serve_api_server(cluster_ips, own) {
            return BTreeSet::new();
        }
        // A local server may answer at an address of the node. At those of API servers the agent itself asks them.
        let is_left_alone = |it: &IpAddr| {
            self.node_addresses.contains(it) || own.is_some_and(|own| own.contains(it))
        };
        let addresses = cluster_ips.iter().filter(|it| !is_left_alone(it));
        let ports = ports.iter().filter_map(|it| Some((it.port, served_protocol(it.protocol)?)));
        let keys = addresses.flat_map(|&address| {
            ports.clone().map(move |(port, protocol)| frontend_key(address, port, protocol))
        });
        keys.collect()
    }

    /// Returns the endpoints of a service's frontends.
    fn endpoints_of(&self, number: u32, frontends: &BTreeSet<FrontendKey>) -> ServiceEndpoints {
        let mut endpoints = ServiceEndpoints::new();
        let service = self.services.get(number);
        let Some(observed) = &service.observed else { return endpoints };
        let ClusterIpService { cluster_ips, ports, .. } = &observed.service;
        for port in ports {
            let Some(protocol) = served_protocol(port.protocol) else { continue };
            for &address in cluster_ips {
                let key = frontend_key(address, port.port, protocol);
                if frontends.contains(&key) {
                    let (family, slices) = (AddressFamily::of(address), service.slices.values());
                    let found = if protocol == abi::IPPROTO_UDP {
                        answering_endpoints(port, family, slices)
                    } else {
                        named_endpoints(port, family, slices)
                    };
                    // Two ports of one number and protocol cannot pass admission; the first one counts.
                    endpoints.entry(key).or_insert_with(|| Arc::new(found));
                }
            }
        }
        endpoints
    }

    /// Returns true if the mode selects a Service with this label.
    fn is_selected(&self, number: u32, label: ClusterIpLabel) -> bool {
        // The Service's own label is more specific than its namespace's.
        let label = label.or_else(|| {
            let namespace = self.services.name(number)?.namespace;
            self.namespace_labels.get(namespace.as_str()).copied()
        });
        match self.mode {
            ClusterIpMode::Off => false,
            ClusterIpMode::Labelled => label == Some(true),
            ClusterIpMode::All => label != Some(false),
        }
    }
}

/// Returns the IP protocol number of a protocol whose ports nodes serve; `None` for those left to kube-proxy.
pub fn served_protocol(protocol: TransportProtocol) -> Option<u8> {
    match protocol {
        TransportProtocol::Tcp => Some(abi::IPPROTO_TCP),
        TransportProtocol::Udp => Some(abi::IPPROTO_UDP),
        TransportProtocol::Sctp => None,
    }
}

/// Returns true if sockets may have endpoints that left a frontend between these states. Without other endpoints their
/// programs could only be refused, so such a frontend counts once it has endpoints again.
fn have_endpoints_left(before: &ServiceEndpoints, now: &ServiceEndpoints) -> bool {
    now.iter().any(|(key, now)| {
        let known = before.get(key).filter(|before| !before.is_empty());
        !now.is_empty() && known.is_none_or(|before| !before.is_subset(now))
    })
}

/// Returns the frontends of which the endpoints differ between these states, each with its present endpoints.
fn endpoint_changes(
    before: &ServiceEndpoints,
    now: &ServiceEndpoints,
) -> impl Iterator<Item = (FrontendKey, Arc<BTreeSet<SocketAddr>>)> {
    let gone = before.keys().filter(move |key| !now.contains_key(*key));
    let gone = gone.map(|key| (*key, Arc::default()));
    let changed = now.iter().filter(move |(key, endpoints)| before.get(*key) != Some(*endpoints));
    gone.chain(changed.map(|(key, endpoints)| (*key, Arc::clone(endpoints))))
}

/// Returns true if this is the API server's own Service.
pub(super) fn is_api_server_service(name: &NamespacedName) -> bool {
    (name.namespace.as_str(), name.name.as_str()) == API_SERVER_SERVICE
}

/// Returns true if the API server's own Service can be served at these ClusterIPs. `own` are the addresses at which the
/// agent reaches API servers without the Service, if there are any.
pub(super) fn may_serve_api_server(cluster_ips: &[IpAddr], own: Option<&BTreeSet<IpAddr>>) -> bool {
    own.is_some_and(|own| !cluster_ips.iter().any(|it| own.contains(it)))
}

/// Returns an affinity timeout for the kernel. Kubernetes allows a day at most.
pub(super) fn affinity_seconds(timeout: Duration) -> u32 {
    const DAY_SECONDS: u64 = 86_400;
    timeout.as_secs().clamp(1, DAY_SECONDS) as u32
}

/// Returns the list of a port's target.
fn desired_list(target: &PortTarget, affinity_seconds: u32) -> DesiredBackendList {
    match target {
        PortTarget::Endpoints { addresses, .. } => endpoint_list(addresses, affinity_seconds),
        PortTarget::None(_) => endpoint_list(&[], affinity_seconds),
    }
}

/// Returns the list of these endpoints: a connect takes any of them, and is refused without one.
pub(super) fn endpoint_list(addresses: &[SocketAddr], affinity_seconds: u32) -> DesiredBackendList {
    let mut backends: Vec<_> =
        addresses.iter().map(|&at| BackendTarget::of_pod(at, None)).collect();
    backends.sort_unstable();
    let mode = if backends.is_empty() { RoutingMode::Refuse } else { RoutingMode::PickRandom };
    let info = SvcInfo { activators: abi::ACTIVATORS_V4, affinity_seconds, port_be: 0 };
    DesiredBackendList { mode, info, backends }
}
