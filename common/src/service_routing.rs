//! Pure: the endpoints to which a node leads connections to the ClusterIP of a Kubernetes Service.
//!
//! The rules are those of kube-proxy 1.36, which are in `pkg/proxy/topology.go` and `pkg/proxy/endpointslicecache.go` of
//! Kubernetes. One rule differs: where kube-proxy drops the packets of a Service with `internalTrafficPolicy: Local`
//! because no endpoint is on the node, the result is [`NoEndpointReason::NoneOnNode`], and connects are refused.

mod explanation;
mod hints;
mod kubernetes;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use smol_str::SmolStr;

pub use self::{
    explanation::{
        EndpointVerdict, ExplainedEndpoint, HintState, PortExplanation, count_endpoints,
        explain_port,
    },
    hints::TopologyHints,
    kubernetes::ServiceDecodeError,
};

/// Transport protocol of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportProtocol {
    /// TCP, the default of Kubernetes.
    #[default]
    Tcp,
    /// UDP, connectionless.
    Udp,
    /// SCTP, which a service proxy may lack.
    Sctp,
}

/// Family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressFamily {
    /// Addresses of IPv4.
    V4,
    /// Addresses of IPv6.
    V6,
}

impl AddressFamily {
    /// Returns the family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// Set of nodes whose endpoints a Service may use (`internalTrafficPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InternalTrafficPolicy {
    /// Endpoints on all nodes.
    #[default]
    Cluster,
    /// Endpoints on the client's own node only.
    Local,
}

/// A Service, as far as its routing depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterIpService {
    /// ClusterIPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// Ports at each of the ClusterIPs.
    pub ports: Vec<ClusterIpPort>,
    /// Set of nodes whose endpoints the Service may use.
    pub internal_traffic_policy: InternalTrafficPolicy,
    /// Time for which a client keeps its endpoint after a connect, for `sessionAffinity: ClientIP`.
    pub affinity_timeout: Option<Duration>,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIpPort {
    /// Name, by which EndpointSlices refer to the port. It is empty for the only port of a Service.
    pub name: SmolStr,
    /// Transport protocol of the connections.
    pub protocol: TransportProtocol,
    /// Number at the ClusterIP.
    pub port: NonZeroU16,
}

/// An EndpointSlice, as far as routing depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSlice {
    /// Family of all addresses of the slice.
    pub family: AddressFamily,
    /// Ports of all endpoints of the slice. Ports without a name or number are left out, as in kube-proxy.
    pub ports: Box<[ServiceSlicePort]>,
    /// Endpoints with an address.
    pub endpoints: Box<[ServiceEndpoint]>,
}

/// One port of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSlicePort {
    /// Name of the Service's port.
    pub name: SmolStr,
    /// Transport protocol of the connections.
    pub protocol: TransportProtocol,
    /// Number at the endpoints.
    pub port: NonZeroU16,
}

/// One endpoint of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEndpoint {
    /// First address. Kubernetes ignores all others.
    pub address: IpAddr,
    /// True if the endpoint is ready, or its readiness is not stated.
    pub is_ready: bool,
    /// True if the endpoint answers, or this is not stated. It may be terminating.
    pub is_serving: bool,
    /// True if the pod of the endpoint is being deleted.
    pub is_terminating: bool,
    /// Node of the endpoint; empty if it is not stated.
    pub node: SmolStr,
    /// Zone of the endpoint; empty if it is not stated. Only hints count for the selection.
    pub zone: SmolStr,
    /// Zones whose clients should use the endpoint; empty without such a hint.
    pub zone_hints: Box<[SmolStr]>,
    /// Nodes whose clients should use the endpoint; empty without such a hint.
    pub node_hints: Box<[SmolStr]>,
}

/// Place of a node in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeTopology {
    /// Name of the node.
    pub name: SmolStr,
    /// Zone of the node (label `topology.kubernetes.io/zone`); empty without that label.
    pub zone: SmolStr,
}

/// Routing of one port of one ClusterIP on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRouting {
    /// One ClusterIP of the Service.
    pub address: IpAddr,
    /// Port of the Service.
    pub port: NonZeroU16,
    /// Transport protocol of the connections.
    pub protocol: TransportProtocol,
    /// Endpoints for new connections.
    pub target: PortTarget,
}

/// Endpoints to which new connections to a port go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortTarget {
    /// To one of these endpoints. The list is sorted, without duplicates, and not empty.
    Endpoints {
        /// Addresses of the endpoints.
        addresses: Vec<SocketAddr>,
        /// Rule that has chosen these endpoints.
        rule: SelectionRule,
    },
    /// To none: connects are refused.
    None(NoEndpointReason),
}

/// Rule that has chosen the endpoints of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectionRule {
    /// All ready endpoints.
    Ready,
    /// The ready endpoints with a hint for this node.
    SameNode,
    /// The ready endpoints with a hint for this node's zone.
    SameZone,
    /// The ready endpoints on this node (`internalTrafficPolicy: Local`).
    ReadyOnNode,
    /// The endpoints that terminate and still serve, because none is ready.
    Terminating,
    /// The endpoints on this node that terminate and still serve, because none there is ready.
    TerminatingOnNode,
}

/// Reason that a port has no usable endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoEndpointReason {
    /// No endpoint of the cluster is usable.
    NoneInCluster,
    /// The Service has `internalTrafficPolicy: Local`, and the only usable endpoints are on other nodes.
    NoneOnNode,
}

/// Returns the routing of each port of each ClusterIP on `node`. `slices` are all EndpointSlices of the Service.
///
/// If an endpoint is in two slices, one that does not terminate wins, then that of the later slice. So the result
/// depends on the order of `slices` only while slices contradict each other.
pub fn route_service<'a>(
    service: &ClusterIpService,
    slices: impl Iterator<Item = &'a ServiceSlice> + Clone,
    node: &NodeTopology,
) -> Vec<PortRouting> {
    let mut routings = Vec::with_capacity(service.cluster_ips.len() * service.ports.len());
    for &address in &service.cluster_ips {
        for port in &service.ports {
            // Each address leads to endpoints of its own family only.
            let endpoints = endpoints_of_port(port, AddressFamily::of(address), slices.clone());
            let target = select_endpoints(&endpoints, service.internal_traffic_policy, node);
            routings.push(PortRouting {
                address,
                port: port.port,
                protocol: port.protocol,
                target,
            });
        }
    }
    routings
}

/// Returns the endpoints of one family that answer at a port, also those that new connections do not go to. `slices`
/// are all EndpointSlices of the Service. kube-proxy keeps the UDP flows to these endpoints
/// (`pkg/proxy/conntrack/cleanup.go`).
pub fn answering_endpoints<'a>(
    port: &ClusterIpPort,
    family: AddressFamily,
    slices: impl Iterator<Item = &'a ServiceSlice>,
) -> BTreeSet<SocketAddr> {
    let endpoints = endpoints_of_port(port, family, slices);
    let answering = endpoints.into_iter().filter(|(_, it)| it.is_ready || it.is_serving);
    answering.map(|(address, _)| address).collect()
}

/// Returns the endpoints of one family that EndpointSlices name for a port, in whatever state. `slices` are all
/// EndpointSlices of the Service.
///
/// One that is missing here has left for good: its pod is gone, or belongs to the Service no more. An endpoint that is
/// not ready or terminates may still work on the requests of its connections.
pub fn named_endpoints<'a>(
    port: &ClusterIpPort,
    family: AddressFamily,
    slices: impl Iterator<Item = &'a ServiceSlice>,
) -> BTreeSet<SocketAddr> {
    endpoints_of_port(port, family, slices).into_keys().collect()
}

/// Endpoints of one port, by address.
type EndpointsByAddress<'a> = BTreeMap<SocketAddr, &'a ServiceEndpoint>;

/// Joins the endpoints that all slices of one family have for a port.
fn endpoints_of_port<'a>(
    port: &ClusterIpPort,
    family: AddressFamily,
    slices: impl Iterator<Item = &'a ServiceSlice>,
) -> EndpointsByAddress<'a> {
    let mut endpoints = EndpointsByAddress::new();
    for slice in slices.filter(|slice| slice.family == family) {
        // A slice may have several numbers for one name: its endpoints then listen at each of them.
        let is_same = |it: &&ServiceSlicePort| it.name == port.name && it.protocol == port.protocol;
        for slice_port in slice.ports.iter().filter(is_same) {
            for endpoint in &slice.endpoints {
                let address = SocketAddr::new(endpoint.address, slice_port.port.get());
                // Two pods can have one address: a new pod gets that of a pod whose object still exists.
                if !endpoint.is_terminating || !endpoints.contains_key(&address) {
                    endpoints.insert(address, endpoint);
                }
            }
        }
    }
    endpoints
}

impl ServiceEndpoint {
    /// Returns true if the endpoint is on this node.
    fn is_on(&self, node: &NodeTopology) -> bool {
        !node.name.is_empty() && self.node == node.name
    }

    /// Returns true if the endpoint terminates and still serves.
    fn is_draining(&self) -> bool {
        self.is_serving && self.is_terminating
    }
}

/// Selects the endpoints of one port that clients on `node` use.
fn select_endpoints(
    endpoints: &EndpointsByAddress<'_>,
    policy: InternalTrafficPolicy,
    node: &NodeTopology,
) -> PortTarget {
    let rule = choose_rule(endpoints, policy, node);
    // The judgement that explains a choice also makes it, so the two cannot differ.
    let is_selected =
        |endpoint: &ServiceEndpoint| explanation::judge(rule, endpoint, node).is_selected();
    match rule {
        Ok(rule) => {
            let selected = endpoints.iter().filter(|(_, endpoint)| is_selected(endpoint));
            let addresses = selected.map(|(&address, _)| address).collect();
            PortTarget::Endpoints { addresses, rule }
        }
        Err(reason) => PortTarget::None(reason),
    }
}

/// Chooses the rule for a port, by which at least one endpoint is usable.
fn choose_rule(
    endpoints: &EndpointsByAddress<'_>,
    policy: InternalTrafficPolicy,
    node: &NodeTopology,
) -> Result<SelectionRule, NoEndpointReason> {
    let has = |is_usable: fn(&ServiceEndpoint) -> bool, is_local: bool| {
        endpoints.values().any(|it| is_usable(it) && (!is_local || it.is_on(node)))
    };
    let ready: fn(&ServiceEndpoint) -> bool = |it| it.is_ready;
    let draining: fn(&ServiceEndpoint) -> bool = ServiceEndpoint::is_draining;
    match policy {
        InternalTrafficPolicy::Local if has(ready, true) => Ok(SelectionRule::ReadyOnNode),
        InternalTrafficPolicy::Local if has(draining, true) => Ok(SelectionRule::TerminatingOnNode),
        InternalTrafficPolicy::Local if has(ready, false) || has(draining, false) => {
            Err(NoEndpointReason::NoneOnNode)
        }
        InternalTrafficPolicy::Cluster if has(ready, false) => Ok(topology_rule(endpoints, node)),
        // Hints are ignored here, as in kube-proxy: they are for ready endpoints.
        InternalTrafficPolicy::Cluster if has(draining, false) => Ok(SelectionRule::Terminating),
        InternalTrafficPolicy::Local | InternalTrafficPolicy::Cluster => {
            Err(NoEndpointReason::NoneInCluster)
        }
    }
}

/// Chooses the rule for the ready endpoints of a port with `internalTrafficPolicy: Cluster`.
fn topology_rule(endpoints: &EndpointsByAddress<'_>, node: &NodeTopology) -> SelectionRule {
    let zones = || HintState::of_zones(endpoints, node);
    SelectionRule::of_hint_states(HintState::of_nodes(endpoints, node), zones)
}
