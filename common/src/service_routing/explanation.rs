//! Pure: reasons of the endpoint selection: the part that decides about each endpoint, and its account of one port.

use std::net::{IpAddr, SocketAddr};

use smol_str::SmolStr;

use super::{
    AddressFamily, ClusterIpPort, ClusterIpService, EndpointsByAddress, NoEndpointReason,
    NodeTopology, PortTarget, SelectionRule, ServiceEndpoint, ServiceSlice, endpoints_of_port,
    select_endpoints,
};

/// Decision about one endpoint of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointVerdict {
    /// New connections may go to the endpoint.
    Selected,
    /// The endpoint is not ready, and it does not terminate and still serve.
    NotReady,
    /// The endpoint terminates, and ready ones are there.
    Terminating,
    /// The Service has `internalTrafficPolicy: Local`, and the endpoint is on another node.
    OnOtherNode,
    /// The endpoint's hints name other nodes, and those of other endpoints name this one.
    HintedForOtherNodes,
    /// The endpoint's hints name other zones, and those of other endpoints name this one.
    HintedForOtherZones,
}

impl EndpointVerdict {
    /// Returns true if new connections may go to the endpoint.
    pub fn is_selected(self) -> bool {
        self == Self::Selected
    }
}

/// State of one kind of hints (for nodes, or for zones) of the ready endpoints of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HintState {
    /// No ready endpoint has a hint.
    Absent,
    /// Some ready endpoints have a hint and others have none, so that hints do not count.
    Partial,
    /// Each ready endpoint has a hint, and none names this node or its zone, so that hints do not count.
    Elsewhere,
    /// Each ready endpoint has a hint, and at least one names this node or its zone.
    Here,
}

impl HintState {
    /// Returns the state of the hints for nodes.
    pub(super) fn of_nodes(endpoints: &EndpointsByAddress<'_>, node: &NodeTopology) -> Self {
        Self::new(endpoints, |it| &it.node_hints, &node.name)
    }

    /// Returns the state of the hints for zones.
    pub(super) fn of_zones(endpoints: &EndpointsByAddress<'_>, node: &NodeTopology) -> Self {
        Self::new(endpoints, |it| &it.zone_hints, &node.zone)
    }

    fn new(
        endpoints: &EndpointsByAddress<'_>,
        hints: fn(&ServiceEndpoint) -> &[SmolStr],
        name: &SmolStr,
    ) -> Self {
        let ready = endpoints.values().filter(|it| it.is_ready);
        Self::of_ready(ready.map(|it| hints(it)), name)
    }

    /// Returns the state of one kind of hints for clients on the node, or in the zone, of this name. `hints` are those
    /// of each ready endpoint.
    pub(super) fn of_ready<'a>(
        hints: impl Iterator<Item = &'a [SmolStr]> + Clone,
        name: &SmolStr,
    ) -> Self {
        if hints.clone().all(<[SmolStr]>::is_empty) {
            Self::Absent
        } else if hints.clone().any(<[SmolStr]>::is_empty) {
            Self::Partial
        } else if hints.clone().any(|it| it.contains(name)) {
            Self::Here
        } else {
            Self::Elsewhere
        }
    }
}

/// Account of the selection for one port of a ClusterIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortExplanation {
    /// Endpoints for new connections, as in [`route_service`](super::route_service).
    pub target: PortTarget,
    /// State of the hints for nodes.
    pub node_hints: HintState,
    /// State of the hints for zones.
    pub zone_hints: HintState,
    /// All known endpoints of the port, sorted by address.
    pub endpoints: Vec<ExplainedEndpoint>,
}

/// Endpoint of a port, and the decision about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainedEndpoint {
    /// Address and port of the endpoint.
    pub address: SocketAddr,
    /// State of the endpoint in the EndpointSlice that counts.
    pub endpoint: ServiceEndpoint,
    /// Decision of the selection.
    pub verdict: EndpointVerdict,
}

/// Explains the routing of one port of a Service at one of its ClusterIPs on `node`. `slices` are all EndpointSlices of
/// the Service.
pub fn explain_port<'a>(
    service: &ClusterIpService,
    port: &ClusterIpPort,
    address: IpAddr,
    slices: impl Iterator<Item = &'a ServiceSlice>,
    node: &NodeTopology,
) -> PortExplanation {
    let endpoints = endpoints_of_port(port, AddressFamily::of(address), slices);
    let target = select_endpoints(&endpoints, service.internal_traffic_policy, node);
    let rule = match &target {
        PortTarget::Endpoints { rule, .. } => Ok(*rule),
        PortTarget::None(reason) => Err(*reason),
    };
    let explained = endpoints.iter().map(|(&address, &endpoint)| ExplainedEndpoint {
        address,
        endpoint: endpoint.clone(),
        verdict: judge(rule, endpoint, node),
    });
    PortExplanation {
        node_hints: HintState::of_nodes(&endpoints, node),
        zone_hints: HintState::of_zones(&endpoints, node),
        endpoints: explained.collect(),
        target,
    }
}

/// Returns the number of endpoints that all slices together have for a port, usable or not.
pub fn count_endpoints<'a>(
    port: &ClusterIpPort,
    address: IpAddr,
    slices: impl Iterator<Item = &'a ServiceSlice>,
) -> usize {
    endpoints_of_port(port, AddressFamily::of(address), slices).len()
}

/// Decides about one endpoint by the rule of its port.
pub(super) fn judge(
    rule: Result<SelectionRule, NoEndpointReason>,
    endpoint: &ServiceEndpoint,
    node: &NodeTopology,
) -> EndpointVerdict {
    let is_ready = endpoint.is_ready;
    if !is_ready && !endpoint.is_draining() {
        return EndpointVerdict::NotReady;
    }
    // From here on the endpoint is usable somewhere; the rule decides if it is usable here.
    match rule {
        Err(NoEndpointReason::NoneInCluster) => EndpointVerdict::NotReady,
        Err(NoEndpointReason::NoneOnNode) => EndpointVerdict::OnOtherNode,
        Ok(SelectionRule::ReadyOnNode | SelectionRule::TerminatingOnNode)
            if !endpoint.is_on(node) =>
        {
            EndpointVerdict::OnOtherNode
        }
        Ok(SelectionRule::Terminating | SelectionRule::TerminatingOnNode) => {
            EndpointVerdict::Selected
        }
        Ok(_) if !is_ready => EndpointVerdict::Terminating,
        Ok(SelectionRule::SameNode) if !endpoint.node_hints.contains(&node.name) => {
            EndpointVerdict::HintedForOtherNodes
        }
        Ok(SelectionRule::SameZone) if !endpoint.zone_hints.contains(&node.zone) => {
            EndpointVerdict::HintedForOtherZones
        }
        Ok(
            SelectionRule::Ready
            | SelectionRule::SameNode
            | SelectionRule::SameZone
            | SelectionRule::ReadyOnNode,
        ) => EndpointVerdict::Selected,
    }
}
