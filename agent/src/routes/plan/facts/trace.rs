//! Pure: the choice for one connect from this node, and the reasons for it.

use std::{collections::BTreeMap, net::SocketAddr};

use common::{
    service_routing::{PortExplanation, PortTarget, SelectionRule},
    wire::NamespacedName,
};
use datapath::{abi::FrontendKey, load_balancing::RoutingMode};

use super::{ip_of, list_mode};
use crate::{
    kernel::map_op::to_v6_octets,
    routes::plan::{
        BackendList, BackendListKey, RoutePlanner,
        cluster_services::facts::{
            candidate, hints_text, kube_proxy_text, no_endpoint_text, rule_text,
        },
        service_number::ServiceNumber,
    },
    service_facts::{
        BackendUsage, CandidateFacts, CandidateState, FrontendMode, TraceFacts, TraceOutcome,
        TraceTarget,
    },
};

/// One connect, and what the planner has for it.
struct ConnectTrace<'a> {
    planner: &'a RoutePlanner,
    target: &'a TraceTarget,
    key: FrontendKey,
    /// List of the frontend in force.
    list: Option<&'a BackendList>,
    /// Service that owns the frontend, or else one that has the address.
    service: Option<ServiceNumber>,
    /// Selection of the endpoints, if the service is one of the cluster and has the port.
    explanation: Option<PortExplanation>,
}

impl RoutePlanner {
    /// Returns the choice for a connect from this node, without exceptions. `usage` reads the kernel's state of a
    /// backend by its number.
    pub fn trace(&self, target: &TraceTarget, usage: impl Fn(u32) -> BackendUsage) -> TraceFacts {
        let trace = ConnectTrace::new(self, target);
        let frontends = trace.service.map(|it| self.table.known_endpoints(it)).unwrap_or_default();
        let wanted = frontends.into_iter().find(|(key, _)| *key == trace.key);
        let frontend = trace.service.zip(wanted);
        let (outcome, reason) = trace.outcome();
        TraceFacts {
            node: self.node_facts(),
            to: target.to,
            protocol: target.protocol_name().to_owned(),
            outcome,
            reason,
            frontend: frontend
                .and_then(|(number, (key, known))| self.frontend_facts(number, &key, known)),
            hints: trace.explanation.as_ref().and_then(hints_text),
            candidates: trace.candidates(usage),
            // kube-proxy's rules see only connects that the programs leave unchanged.
            kube_proxy: (outcome == TraceOutcome::Unchanged).then(|| trace.kube_proxy()),
            // They follow from the kernel's maps, which the planner does not read: the caller adds them.
            exceptions: Vec::new(),
        }
    }
}

impl<'a> ConnectTrace<'a> {
    fn new(planner: &'a RoutePlanner, target: &'a TraceTarget) -> Self {
        let key = FrontendKey {
            address: to_v6_octets(target.to.ip()),
            port_be: target.to.port().to_be(),
            protocol: target.protocol,
            reserved: 0,
        };
        let list = planner.lists.get(&BackendListKey::Frontend(key));
        let owner = list.and_then(|list| list.owner);
        // The service whose list is in force comes before one that only wants the frontend.
        let service = owner.or_else(|| planner.table.find_frontend(&key));
        let explanation = match service {
            Some(ServiceNumber::Cluster(number)) => planner.table.cluster.explain(number, &key),
            Some(ServiceNumber::Routed(_)) | None => None,
        };
        Self { planner, target, key, list, service, explanation }
    }

    /// Returns the result of the connect, and the reason.
    fn outcome(&self) -> (TraceOutcome, String) {
        let Some(list) = self.list else {
            return (TraceOutcome::Unchanged, self.absence_reason());
        };
        match list.state.mode {
            RoutingMode::PickBackend | RoutingMode::PickWithAffinity | RoutingMode::PickRandom => {
                (TraceOutcome::Endpoint, self.pick_reason(list))
            }
            RoutingMode::Activator if self.activators(list).is_empty() => {
                // Without a backend, the programs let the connect go on.
                let reason = "the frontend leads to activators, and none is known".to_owned();
                (TraceOutcome::Unchanged, reason)
            }
            RoutingMode::Activator => (TraceOutcome::Activator, self.activator_reason()),
            RoutingMode::Refuse | RoutingMode::SelfTest => {
                (TraceOutcome::Refused, self.refusal_reason())
            }
            RoutingMode::Pass => (TraceOutcome::Unchanged, self.pass_reason()),
        }
    }

    /// Returns the reason of a choice among the backends of a list.
    fn pick_reason(&self, list: &BackendList) -> String {
        let count = list.backends.len();
        // The rule that has made the list, and if the observed endpoints are others than those of the list.
        let (rule, is_changing) = match self.explanation.as_ref().map(|it| &it.target) {
            Some(PortTarget::Endpoints { addresses, rule }) => {
                (rule_text(*rule).to_owned(), *addresses != self.listed_addresses(list))
            }
            Some(PortTarget::None(reason)) => (no_endpoint_text(*reason).to_owned(), true),
            None if list.owner.is_none() => {
                let unknown =
                    "an earlier agent has written the list, and its service is not known yet";
                (unknown.to_owned(), false)
            }
            None => (self.pods_text(), false),
        };
        let how = match list.state.mode {
            RoutingMode::PickRandom => format!("a random one of {count}: {rule}"),
            _ => format!("of two random ones of {count}, that with fewer open connections: {rule}"),
        };
        let affinity = match list.info.affinity_seconds {
            0 => String::new(),
            seconds => format!(
                "; a client keeps its endpoint for {seconds} s after its last connect \
                 (sessionAffinity: ClientIP)"
            ),
        };
        let change = match is_changing {
            true => "; a change of the endpoints is not in force yet",
            false => "",
        };
        format!("{how}{affinity}{change}")
    }

    /// Returns the rule by which the pods of a Revision or scaled Service are selected, as a phrase.
    fn pods_text(&self) -> String {
        let (table, key) = (&self.planner.table, &self.key);
        let (rule, uses_standby) = match self.service {
            Some(ServiceNumber::Routed(number)) => {
                (table.pod_rule(number, key), table.uses_standby(number, key))
            }
            Some(ServiceNumber::Cluster(_)) | None => (None, false),
        };
        let kind = if uses_standby { "standby" } else { "ready" };
        let owner = if self.is_scaled_port() { "Service" } else { "Revision" };
        let hint = match rule {
            Some(SelectionRule::SameNode) => " with a hint for this node",
            Some(SelectionRule::SameZone) => " with a hint for this node's zone",
            Some(_) | None => "",
        };
        format!("the {kind} pods of the {owner}{hint}")
    }

    /// Returns true if the service is a port of a scaled Service.
    fn is_scaled_port(&self) -> bool {
        match self.service {
            Some(ServiceNumber::Routed(number)) => self.planner.table.is_scaled_port(number),
            Some(ServiceNumber::Cluster(_)) | None => false,
        }
    }

    fn activator_reason(&self) -> String {
        let Some(ServiceNumber::Routed(number)) = self.service else {
            return "an earlier agent has written the frontend, and its service is not known yet"
                .to_owned();
        };
        let unfit = self.unfit_text();
        let name = self.planner.table.shown_name(ServiceNumber::Routed(number));
        let name = name.unwrap_or(NamespacedName::EMPTY);
        let table = &self.planner.table;
        unfit.unwrap_or_else(|| table.activator_reason(number, &name, &self.key))
    }

    fn refusal_reason(&self) -> String {
        match self.explanation.as_ref().map(|it| &it.target) {
            Some(PortTarget::None(reason)) => no_endpoint_text(*reason).to_owned(),
            Some(PortTarget::Endpoints { .. }) => {
                "the endpoints have changed, which is not in force yet".to_owned()
            }
            None => "an earlier agent has written the frontend, and its service is not known yet"
                .to_owned(),
        }
    }

    fn pass_reason(&self) -> String {
        let unfit = self.unfit_text();
        unfit.unwrap_or_else(|| "the frontend leaves connects as they are".to_owned())
    }

    /// Returns the reason for which a service does not fit, or waits for room; `None` if it fits.
    fn unfit_text(&self) -> Option<String> {
        let unfit = self.planner.unfit_services.get(&self.service?)?;
        let state = if unfit.is_refused { "does not fit" } else { "waits for room" };
        Some(format!("the service {state}: {}", unfit.error))
    }

    /// Returns the reason for which the maps have no frontend for the connect.
    fn absence_reason(&self) -> String {
        let unknown = self.planner.node_facts().unknown;
        if !unknown.is_empty() && self.service.is_none() {
            return format!(
                "no frontend has the address and port, but the agent does not know all services \
                 yet: it waits for {}",
                unknown.join(", ")
            );
        }
        match self.service {
            // Only then the room matters: another port of a service that does not fit is no frontend either way.
            Some(number) if self.is_wanted(number) => {
                self.unfit_text().unwrap_or_else(|| "the frontend is not in force yet".to_owned())
            }
            Some(ServiceNumber::Routed(number)) => {
                self.planner.table.missing_port_reason(number, self.target)
            }
            Some(ServiceNumber::Cluster(number)) => {
                self.planner.table.cluster.unserved_reason(number, self.target)
            }
            None => self.unknown_address_reason(),
        }
    }

    /// Returns the reason for an address that no known service has.
    fn unknown_address_reason(&self) -> String {
        let cluster = &self.planner.table.cluster;
        let ip = self.target.to.ip();
        if !cluster.is_enabled() {
            return format!(
                "no service of Rouse has the address {ip}, and this agent serves no others \
                 (`rouse install --clusterip off`)"
            );
        }
        let owner = cluster.find_endpoint(ip).and_then(|number| cluster.service_name(number));
        match owner {
            Some(name) => {
                format!("{ip} is the address of an endpoint of {name}, and no ClusterIP")
            }
            None => format!(
                "no Service has the ClusterIP {ip}: headless Services have none, and those with \
                 the label service.kubernetes.io/service-proxy-name are left to their proxy"
            ),
        }
    }

    fn is_wanted(&self, number: ServiceNumber) -> bool {
        let frontends = self.planner.table.known_endpoints(number);
        frontends.iter().any(|(key, _)| *key == self.key)
    }

    /// Returns the effect of kube-proxy's rules on the unchanged connect.
    fn kube_proxy(&self) -> String {
        match (&self.explanation, self.service) {
            (Some(explained), _) => kube_proxy_text(&explained.target),
            (None, Some(ServiceNumber::Routed(_))) if self.is_scaled_port() => {
                "kube-proxy leads it to a ready pod of the Service, or to an activator while none is \
                 ready, if the Service has the port"
                    .to_owned()
            }
            (None, Some(ServiceNumber::Routed(_))) => {
                "kube-proxy leads it to an activator, if the service has the port".to_owned()
            }
            (None, Some(ServiceNumber::Cluster(_))) => {
                "kube-proxy has no rule for this port".to_owned()
            }
            (None, None) if self.are_services_known() => {
                "kube-proxy has no rule for this address as a ClusterIP".to_owned()
            }
            (None, None) => "kube-proxy's rules apply, which this agent does not know".to_owned(),
        }
    }

    /// Returns true if the agent knows all Services that kube-proxy would serve.
    fn are_services_known(&self) -> bool {
        let cluster = &self.planner.table.cluster;
        cluster.is_enabled() && cluster.is_known()
    }

    /// Returns the addresses of a list's backends, sorted.
    fn listed_addresses(&self, list: &BackendList) -> Vec<SocketAddr> {
        let backends = list.backends.iter().filter_map(|&id| self.planner.backends.get(id));
        let mut addresses: Vec<_> = backends.filter_map(|it| it.pod_address()).collect();
        addresses.sort_unstable();
        addresses
    }

    /// Returns number and address of each activator that a list falls back on. Without a port there is none.
    fn activators(&self, list: &BackendList) -> Vec<(u32, SocketAddr)> {
        let key = BackendListKey::Activators(list.info.activators);
        let port = u16::from_be(list.info.port_be);
        let Some(activators) = self.planner.lists.get(&key).filter(|_| port != 0) else {
            return Vec::new();
        };
        let backends = activators.backends.iter();
        let address = |id: &u32| Some((*id, self.planner.backends.get(*id)?.address));
        let addresses = backends.filter_map(address);
        addresses.map(|(id, octets)| (id, SocketAddr::new(ip_of(octets), port))).collect()
    }

    /// Returns all endpoints with the decision about each: first those that a connect may go to.
    fn candidates(&self, usage: impl Fn(u32) -> BackendUsage) -> Vec<CandidateFacts> {
        let mut candidates = match (&self.explanation, self.service) {
            (Some(explained), _) => explained.endpoints.iter().map(candidate).collect(),
            (None, Some(ServiceNumber::Routed(number))) => {
                self.planner.table.pod_candidates(number, &self.key)
            }
            (None, _) => Vec::new(),
        };
        // The loop waits for the answer: a search for each of thousands of backends would hold it up.
        let known = candidates.iter().enumerate().map(|(index, it)| (it.address, index));
        let mut indices: BTreeMap<SocketAddr, usize> = known.collect();
        for (id, address) in self.backends_in_force() {
            let index = *indices.entry(address).or_insert_with(|| {
                candidates.push(self.unexplained(address));
                candidates.len() - 1
            });
            candidates[index].is_listed = true;
            candidates[index].usage = Some(usage(id));
        }
        for candidate in &mut candidates {
            complete_reason(candidate, self.list.is_some());
        }
        candidates.sort_by_key(|it| (!it.is_listed, it.address));
        candidates
    }

    /// Returns number and address of each backend that the connect may go to now.
    fn backends_in_force(&self) -> Vec<(u32, SocketAddr)> {
        let Some(list) = self.list else { return Vec::new() };
        match list_mode(list.state.mode) {
            FrontendMode::Activators => self.activators(list),
            FrontendMode::Pods => {
                let address = |&id: &u32| Some((id, self.planner.backends.get(id)?.pod_address()?));
                list.backends.iter().filter_map(address).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the candidate for a backend that no known object explains.
    fn unexplained(&self, address: SocketAddr) -> CandidateFacts {
        let leads_to_activators =
            self.list.is_some_and(|it| it.state.mode == RoutingMode::Activator);
        let (state, reason) = match leads_to_activators {
            true => (CandidateState::Activator, "selected"),
            false => (CandidateState::Unknown, "is in the list in force, and not known any more"),
        };
        CandidateFacts {
            address,
            state,
            node: String::new(),
            zone: String::new(),
            zone_hints: Vec::new(),
            node_hints: Vec::new(),
            is_selected: leads_to_activators,
            is_listed: false,
            reason: reason.to_owned(),
            usage: None,
        }
    }
}

/// Adds to the decision about a candidate how the kernel treats it now.
fn complete_reason(candidate: &mut CandidateFacts, has_list: bool) {
    match (candidate.is_selected, candidate.is_listed) {
        (true, false) if has_list => candidate.reason += ", and not in the list in force",
        (false, true) if candidate.state != CandidateState::Unknown => {
            candidate.reason += "; the list in force still has it";
        }
        _ => {}
    }
    if candidate.usage.is_some_and(|it| it.is_unanswered) {
        candidate.reason += "; it left a connect unanswered, so that others are preferred";
    }
}
