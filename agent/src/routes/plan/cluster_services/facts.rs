//! Pure: facts about the cluster's Services: their endpoints, their place in the maps, and the reasons for it.

use std::net::IpAddr;

use common::service_routing::{
    ClusterIpPort, EndpointVerdict, ExplainedEndpoint, HintState, NoEndpointReason,
    PortExplanation, PortTarget, SelectionRule, TransportProtocol, count_endpoints, explain_port,
};
use datapath::abi::FrontendKey;

use super::{ClusterServices, may_serve_api_server, served_protocol};
use crate::{
    config::ClusterIpMode,
    kernel::map_op::to_v6_octets,
    service_facts::{CandidateFacts, CandidateState, NodeFacts, TraceTarget},
};

/// Most changes of one service whose trigger times wait until they are in force; later ones are not measured.
const TRIGGERS_MAX: usize = 128;

/// Decision about the trigger times of a service whose changes may be in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TriggerFate {
    /// The changes are in force.
    InForce,
    /// The changes wait for room in the maps.
    Waiting,
    /// The service does not fit, so that the changes never come into force.
    Refused,
}

impl ClusterServices {
    /// Records the time of an event that changed a service's slice. Those of first lists do not count: they tell
    /// nothing of this node's latency.
    pub(super) fn record_trigger(&mut self, number: u32, triggered_ms: Option<i64>) {
        if self.is_known() {
            let times = self.triggers.entry(number).or_default();
            // No time is taken while no plan can be written.
            if times.len() < TRIGGERS_MAX {
                times.extend(triggered_ms);
            }
        }
    }

    /// Takes the trigger times of the changes that are in force by now.
    pub(in crate::routes::plan) fn take_triggers(
        &mut self,
        fate: impl Fn(u32) -> TriggerFate,
    ) -> Vec<i64> {
        let mut in_force = Vec::new();
        self.triggers.retain(|&number, times| match fate(number) {
            TriggerFate::Waiting => true,
            TriggerFate::Refused => false,
            TriggerFate::InForce => {
                in_force.append(times);
                false
            }
        });
        in_force
    }

    /// Returns name, zone and mode of the node.
    pub(in crate::routes::plan) fn node_facts(&self) -> NodeFacts {
        let mode = match self.mode {
            ClusterIpMode::Off => "off",
            ClusterIpMode::Labelled => "labelled",
            ClusterIpMode::All => "all",
        };
        let missing = self.missing_kinds().into_iter().map(|kind| kind.name().to_owned());
        NodeFacts {
            name: self.node.name.to_string(),
            zone: self.node.zone.to_string(),
            clusterip: mode.to_owned(),
            unknown: missing.collect(),
        }
    }

    /// Returns the numbers of the services whose names follow `name`, `limit` at most. Not all of them are served.
    pub(in crate::routes::plan) fn numbers_after(&self, name: &str, limit: usize) -> Vec<u32> {
        self.services.numbers_after(name, limit)
    }

    /// Returns each frontend of a service, with the number of endpoints that its port has, usable or not.
    pub(in crate::routes::plan) fn known_endpoints(
        &self,
        number: u32,
    ) -> Vec<(FrontendKey, Option<usize>)> {
        let service = self.services.get(number);
        let count = |key: &FrontendKey| {
            let (address, port) = self.port_of(number, key)?;
            Some(count_endpoints(port, address, service.slices.values()))
        };
        service.frontends.iter().map(|key| (*key, count(key))).collect()
    }

    /// Returns the number of endpoints of all served services: ready, terminating and still serving, and neither.
    /// An endpoint in two slices counts twice.
    pub(in crate::routes::plan) fn endpoint_counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for number in self.served_numbers() {
            let slices = self.services.get(number).slices.values();
            for endpoint in slices.flat_map(|slice| &slice.endpoints) {
                let is_draining = endpoint.is_serving && endpoint.is_terminating;
                let state = match (endpoint.is_ready, is_draining) {
                    (true, _) => 0,
                    (false, true) => 1,
                    (false, false) => 2,
                };
                counts[state] += 1;
            }
        }
        counts
    }

    /// Returns the ClusterIP and the port of a service that this frontend stands for.
    fn port_of(&self, number: u32, key: &FrontendKey) -> Option<(IpAddr, &ClusterIpPort)> {
        let service = &self.services.get(number).observed.as_ref()?.service;
        let address = service.cluster_ips.iter().find(|it| to_v6_octets(**it) == key.address)?;
        let is_same = |it: &&ClusterIpPort| {
            it.port.get().to_be() == key.port_be
                && served_protocol(it.protocol) == Some(key.protocol)
        };
        Some((*address, service.ports.iter().find(is_same)?))
    }

    /// Explains the routing of a frontend of a service; `None` if the service does not have it.
    pub(in crate::routes::plan) fn explain(
        &self,
        number: u32,
        key: &FrontendKey,
    ) -> Option<PortExplanation> {
        let service = self.services.get(number);
        let (address, port) = self.port_of(number, key)?;
        let routed = &service.observed.as_ref()?.service;
        Some(explain_port(routed, port, address, service.slices.values(), &self.node))
    }

    /// Returns the number of a Service that has this ClusterIP.
    pub(in crate::routes::plan) fn find_address(&self, address: IpAddr) -> Option<u32> {
        let has_address = |&number: &u32| {
            let observed = self.services.get(number).observed.as_ref();
            observed.is_some_and(|it| it.service.cluster_ips.contains(&address))
        };
        self.services.numbers.values().copied().find(has_address)
    }

    /// Returns the Service that has an endpoint at this address, by number.
    pub(in crate::routes::plan) fn find_endpoint(&self, address: IpAddr) -> Option<u32> {
        let has_endpoint = |&number: &u32| {
            let slices = self.services.get(number).slices.values();
            slices.flat_map(|slice| &slice.endpoints).any(|it| it.address == address)
        };
        self.services.numbers.values().copied().find(has_endpoint)
    }

    /// Returns the reason for which this node does not serve a Service at one of its addresses.
    pub(in crate::routes::plan) fn unserved_reason(&self, number: u32, to: &TraceTarget) -> String {
        let Some(observed) = &self.services.get(number).observed else {
            return "the Service does not exist any more".to_owned();
        };
        let text = self.services.name(number).map(|it| it.to_string()).unwrap_or_default();
        let ports = observed.service.ports.iter();
        let at_port = |it: &&ClusterIpPort| it.port.get() == to.to.port();
        let protocols: Vec<TransportProtocol> =
            ports.clone().filter(at_port).map(|it| it.protocol).collect();
        if protocols.is_empty() {
            let all = ports.map(|it| format!("{}/{}", it.port, protocol_text(it.protocol)));
            let all = all.collect::<Vec<_>>().join(", ");
            return format!("Service {text} has no port {} there, but {all}", to.to.port());
        }
        if !protocols.iter().any(|it| served_protocol(*it) == Some(to.protocol)) {
            let others = protocols.iter().map(|it| protocol_text(*it)).collect::<Vec<_>>();
            let (port, protocol) = (to.to.port(), to.protocol_name());
            return format!(
                "port {port} of Service {text} is for {}, not for {protocol}",
                others.join(", ")
            );
        }
        let own = self.api_server_addresses.as_ref();
        if self.is_api_server(number) && !may_serve_api_server(&observed.service.cluster_ips, own) {
            let reason = match own {
                None => "without --apiserver it is left to kube-proxy",
                Some(_) => "--apiserver names its ClusterIP, so that it is left to kube-proxy",
            };
            return format!("{text} is the API server's own Service: {reason}");
        }
        if own.is_some_and(|own| own.contains(&to.to.ip())) {
            return format!("agents ask API servers at the address of Service {text}");
        }
        if self.node_addresses.contains(&to.to.ip()) {
            return format!(
                "the node itself has the address of Service {text}, for a server of its own"
            );
        }
        if !self.is_selected(number, observed.label) {
            return match self.mode {
                ClusterIpMode::Off => format!(
                    "this agent serves Rouse's own services only (--clusterip off), and {text} is \
                     none"
                ),
                ClusterIpMode::Labelled => format!(
                    "the label `rouse.dev/clusterip: \"true\"` is neither on Service {text} nor \
                     on its namespace, or the Service has the label with another value"
                ),
                ClusterIpMode::All => format!(
                    "the label `rouse.dev/clusterip: \"false\"` is on Service {text} or on its \
                     namespace"
                ),
            };
        }
        format!("{} of Service {text} is left to kube-proxy", to.protocol_name())
    }
}

/// Returns the candidate for an explained endpoint.
pub(in crate::routes::plan) fn candidate(explained: &ExplainedEndpoint) -> CandidateFacts {
    let ExplainedEndpoint { address, endpoint, verdict } = explained;
    let state = match (endpoint.is_ready, endpoint.is_serving && endpoint.is_terminating) {
        (true, _) => CandidateState::Ready,
        (false, true) => CandidateState::Terminating,
        (false, false) => CandidateState::NotReady,
    };
    let reason = match verdict {
        EndpointVerdict::Selected => "selected",
        EndpointVerdict::NotReady => "is not ready",
        EndpointVerdict::Terminating => "terminates, and ready endpoints are there",
        EndpointVerdict::OnOtherNode => {
            "is not on this node, as internalTrafficPolicy: Local requires"
        }
        EndpointVerdict::HintedForOtherNodes => "its hints are for other nodes",
        EndpointVerdict::HintedForOtherZones => "its hints are for other zones",
    };
    let texts = |names: &[smol_str::SmolStr]| names.iter().map(ToString::to_string).collect();
    CandidateFacts {
        address: *address,
        state,
        node: endpoint.node.to_string(),
        zone: endpoint.zone.to_string(),
        zone_hints: texts(&endpoint.zone_hints),
        node_hints: texts(&endpoint.node_hints),
        is_selected: verdict.is_selected(),
        is_listed: false,
        reason: reason.to_owned(),
        usage: None,
    }
}

/// Returns the rule by which endpoints were selected, as a phrase.
pub(in crate::routes::plan) fn rule_text(rule: SelectionRule) -> &'static str {
    match rule {
        SelectionRule::Ready => "all ready endpoints",
        SelectionRule::SameNode => "the ready endpoints with a hint for this node",
        SelectionRule::SameZone => "the ready endpoints with a hint for this node's zone",
        SelectionRule::ReadyOnNode => {
            "the ready endpoints on this node (internalTrafficPolicy: Local)"
        }
        SelectionRule::Terminating => {
            "the endpoints that terminate and still serve, because none is ready"
        }
        SelectionRule::TerminatingOnNode => {
            "the endpoints on this node that terminate and still serve, because none there is ready"
        }
    }
}

/// Returns the reason that a port has no usable endpoint, as a clause.
pub(in crate::routes::plan) fn no_endpoint_text(reason: NoEndpointReason) -> &'static str {
    match reason {
        NoEndpointReason::NoneInCluster => {
            "no endpoint is ready, and none terminates and still serves"
        }
        NoEndpointReason::NoneOnNode => {
            "the Service has internalTrafficPolicy: Local, and no usable endpoint is on this node"
        }
    }
}

/// Returns the effect of the hints on the selection; `None` where no ready endpoint has one.
pub(in crate::routes::plan) fn hints_text(explained: &PortExplanation) -> Option<String> {
    let hints = [("nodes", explained.node_hints), ("zones", explained.zone_hints)];
    if hints.iter().all(|(_, state)| *state == HintState::Absent) {
        return None;
    }
    let rule = match &explained.target {
        PortTarget::Endpoints { rule, .. } => Some(*rule),
        PortTarget::None(_) => None,
    };
    let text = match rule {
        Some(SelectionRule::SameNode) => "those for nodes count".to_owned(),
        Some(SelectionRule::SameZone) => "those for zones count".to_owned(),
        Some(SelectionRule::Ready) => {
            let states = hints.iter().filter_map(|(kind, state)| match state {
                HintState::Partial => Some(format!("some ready endpoints have none for {kind}")),
                HintState::Elsewhere => Some(format!("those for {kind} name only others")),
                HintState::Absent | HintState::Here => None,
            });
            format!("none count: {}", states.collect::<Vec<_>>().join("; "))
        }
        Some(_) | None => "none count: internalTrafficPolicy is Local".to_owned(),
    };
    Some(text)
}

/// Returns the effect of kube-proxy's rules on a connect that goes on unchanged.
pub(in crate::routes::plan) fn kube_proxy_text(target: &PortTarget) -> String {
    match target {
        PortTarget::Endpoints { addresses, rule } => format!(
            "kube-proxy leads it to a random one of {} endpoints: {}",
            addresses.len(),
            rule_text(*rule)
        ),
        PortTarget::None(NoEndpointReason::NoneInCluster) => {
            format!("kube-proxy refuses it: {}", no_endpoint_text(NoEndpointReason::NoneInCluster))
        }
        PortTarget::None(NoEndpointReason::NoneOnNode) => format!(
            "kube-proxy drops its packets: {}",
            no_endpoint_text(NoEndpointReason::NoneOnNode)
        ),
    }
}

fn protocol_text(protocol: TransportProtocol) -> &'static str {
    match protocol {
        TransportProtocol::Tcp => "TCP",
        TransportProtocol::Udp => "UDP",
        TransportProtocol::Sctp => "SCTP",
    }
}
