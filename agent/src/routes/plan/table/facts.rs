//! Pure: facts about the services of the RouteTable: their pods, and the reason for the path of their connects.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU16,
};

use common::{
    service_routing::SelectionRule,
    wire::{LOCAL_TLS_PORT, NamespacedName, RoutingPhase},
};
use datapath::abi::FrontendKey;

use super::{PlannerPod, PlannerService, PlannerTable, ServiceNumber, hints::HintedPods};
use crate::service_facts::{CandidateFacts, CandidateState, ServiceSource, TraceTarget};

impl PlannerTable {
    /// Returns the numbers of the services of one source whose names follow `name`, `limit` at most.
    pub(in crate::routes::plan) fn numbers_after(
        &self,
        source: ServiceSource,
        name: &str,
        limit: usize,
    ) -> Vec<ServiceNumber> {
        match source {
            ServiceSource::Route => {
                let numbers = self.services.numbers_after(name, limit);
                numbers.into_iter().map(ServiceNumber::Routed).collect()
            }
            ServiceSource::Service => {
                let numbers = self.cluster.numbers_after(name, limit);
                numbers.into_iter().map(ServiceNumber::Cluster).collect()
            }
        }
    }

    /// Returns each frontend of a service, with the number of endpoints that are known, usable or not.
    pub(in crate::routes::plan) fn known_endpoints(
        &self,
        number: ServiceNumber,
    ) -> Vec<(FrontendKey, Option<usize>)> {
        match number {
            ServiceNumber::Routed(number) => {
                let service = self.services.get(number);
                // The pods of several Revisions are not endpoints of one list.
                let known = service.direct_revision.map(|it| self.pods_for(service, it).count());
                let own = service.own_frontends().map(|key| (key, known));
                own.chain(service.local_tls_frontends().map(|key| (key, None))).collect()
            }
            ServiceNumber::Cluster(number) => self.cluster.known_endpoints(number),
        }
    }

    /// Returns the pods of a Revision that a service leads to by one of their ports, ready or not.
    fn pods_for<'a>(
        &'a self,
        service: &'a PlannerService,
        revision: u32,
    ) -> impl Iterator<Item = &'a PlannerPod> {
        let uids = self.revisions.get(revision).pods.iter();
        let pods = uids.filter_map(move |uid| self.pods.get(uid));
        pods.filter(move |pod| pod.has_port_for(service))
    }

    /// Returns the number of a service that has this frontend, or else of one that has its address. A scaled Service
    /// has a number for each port, and its ports for UDP are those of a Service of the cluster.
    pub(in crate::routes::plan) fn find_frontend(
        &self,
        key: &FrontendKey,
    ) -> Option<ServiceNumber> {
        let address = Ipv6Addr::from(key.address).to_canonical();
        let routed = self.numbers_at(address).into_iter().map(ServiceNumber::Routed);
        let cluster = self.cluster.find_address(address).map(ServiceNumber::Cluster);
        let all: Vec<ServiceNumber> = routed.chain(cluster).collect();
        let has_frontend = |number: &ServiceNumber| {
            self.known_endpoints(*number).iter().any(|(frontend, _)| frontend == key)
        };
        all.iter().copied().find(has_frontend).or_else(|| all.first().copied())
    }

    /// Returns the numbers of the services of the RouteTable that have an address.
    fn numbers_at(&self, address: IpAddr) -> Vec<u32> {
        let has_address = |&number: &u32| self.services.get(number).addresses.contains(&address);
        self.routed_numbers().filter(has_address).collect()
    }

    /// Returns the frontends whose connects may go directly to a pod.
    pub(crate) fn frontends_of_pod(&self, uid: &str) -> Vec<FrontendKey> {
        let services = self.affected_services(uid).into_iter();
        services.flat_map(|number| self.services.get(number).own_frontends()).collect()
    }

    /// Returns true if activators can take all connects that may go directly to a pod.
    pub(crate) fn has_activators_for_pod(&self, uid: &str) -> bool {
        self.frontends_of_pod(uid).iter().all(|key| self.has_activator_for(key))
    }

    /// Returns true if an activator can take the connects to a frontend. IPv4 clients reach IPv4 activators only.
    pub(crate) fn has_activator_for(&self, key: &FrontendKey) -> bool {
        let is_ipv6 = is_ipv6_frontend(key);
        self.activators.values().flatten().any(|address| is_ipv6 || address.is_ipv4())
    }

    /// Returns true for a port of a scaled Service.
    pub(in crate::routes::plan) fn is_scaled_port(&self, number: u32) -> bool {
        self.services.get(number).uses_pod_ports
    }

    /// Returns the reason for which a connect to the address of a service of the RouteTable finds no frontend: its
    /// port.
    pub(in crate::routes::plan) fn missing_port_reason(
        &self,
        number: u32,
        target: &TraceTarget,
    ) -> String {
        let name = self.shown_name(ServiceNumber::Routed(number));
        let numbers = self.numbers_at(target.to.ip()).into_iter();
        let own = numbers.filter(|it| self.shown_name(ServiceNumber::Routed(*it)) == name);
        let ports_of = |number: u32| {
            let service = self.services.get(number);
            let local_tls = service.serves_local_tls.then_some(LOCAL_TLS_PORT);
            [Some(service.port), local_tls].into_iter().flatten().map(NonZeroU16::get)
        };
        let mut ports: Vec<u16> = own.flat_map(ports_of).collect();
        ports.sort_unstable();
        let noun = if ports.len() == 1 { "port" } else { "ports" };
        let ports: Vec<String> = ports.into_iter().map(|it| format!("{it}/TCP")).collect();
        format!(
            "{} has {noun} {} there, not {}/{}",
            name.unwrap_or(NamespacedName::EMPTY),
            ports.join(", "),
            target.to.port(),
            target.protocol_name()
        )
    }

    /// Returns the pods of the Revision that a service sends connects directly to, with the decision about each. The
    /// addresses are those for clients of the frontend.
    pub(in crate::routes::plan) fn pod_candidates(
        &self,
        number: u32,
        key: &FrontendKey,
    ) -> Vec<CandidateFacts> {
        let service = self.services.get(number);
        let direct = service.direct_revision.filter(|_| !service.is_local_tls(key));
        let Some(revision) = direct else { return Vec::new() };
        let (is_ipv6, mapped) = (is_ipv6_frontend(key), !self.has_ipv6_activator());
        let hinted = self.hinted_pods(service, is_ipv6, mapped);
        let uids = self.revisions.get(revision).pods.iter();
        let candidates = uids.filter_map(|uid| {
            let pod = self.pods.get(uid)?;
            let fitting = pod.address_for(service, is_ipv6, mapped);
            // A pod without any address has no place in a list of addresses.
            let address = fitting.or_else(|| pod.other_address(service))?;
            let exclusion = self.pod_exclusion(uid, pod, service, fitting.is_some());
            let exclusion = exclusion.or_else(|| hinted.as_ref()?.exclusion(pod));
            Some(CandidateFacts {
                address,
                state: pod_state(pod.phase),
                node: String::new(),
                zone: String::new(),
                zone_hints: hint_list(&pod.hints.zone),
                node_hints: hint_list(&pod.hints.node),
                is_selected: exclusion.is_none(),
                is_listed: false,
                reason: exclusion.unwrap_or("selected").to_owned(),
                usage: None,
            })
        });
        candidates.collect()
    }

    /// Returns the rule by which the pods in the list of a frontend are selected; `None` without a direct path.
    pub(in crate::routes::plan) fn pod_rule(
        &self,
        number: u32,
        key: &FrontendKey,
    ) -> Option<SelectionRule> {
        let (service, mapped) = (self.services.get(number), !self.has_ipv6_activator());
        let hinted = self.hinted_pods(service, is_ipv6_frontend(key), mapped);
        hinted.map(|HintedPods { rule, .. }| rule)
    }

    /// Returns true if connects to a frontend go to pods with standby orders, because no other pod can take them.
    pub(in crate::routes::plan) fn uses_standby(&self, number: u32, key: &FrontendKey) -> bool {
        let (service, mapped) = (self.services.get(number), !self.has_ipv6_activator());
        let hinted = self.hinted_pods(service, is_ipv6_frontend(key), mapped);
        hinted.is_some_and(|pods| pods.are_on_standby())
    }

    /// Returns the reason for which the list of a service does not have a pod; `None` if it is selected.
    fn pod_exclusion(
        &self,
        uid: &str,
        pod: &PlannerPod,
        service: &PlannerService,
        is_fitting: bool,
    ) -> Option<&'static str> {
        if !pod.has_port_for(service) {
            return Some("has no port for this port of the Service");
        }
        match pod.phase {
            RoutingPhase::Starting => Some("is not ready"),
            RoutingPhase::Draining => Some("is draining"),
            RoutingPhase::Ready if self.excluded_pods.contains(uid) => Some(
                "is excluded: no connect from this node reached it, it was not thawed for one, or it is \
                     about to stop",
            ),
            RoutingPhase::Ready if !is_fitting => Some("has no address of the client's family"),
            RoutingPhase::Ready => None,
        }
    }

    /// Returns the reason for which connects to a frontend of a service of the RouteTable go to activators.
    pub(in crate::routes::plan) fn activator_reason(
        &self,
        number: u32,
        name: &NamespacedName,
        key: &FrontendKey,
    ) -> String {
        let service = self.services.get(number);
        let affinity = match service.affinity_seconds {
            0 => "",
            _ => "; activators choose pods without regard to sessionAffinity",
        };
        let reason = match service.direct_revision {
            _ if service.is_local_tls(key) => {
                format!("activators end the TLS of {name} inside the cluster")
            }
            None => format!(
                "{name} is on the activator path: it is asleep, or its requests are divided or \
                 counted there"
            ),
            Some(_) => format!("no pod of {name} can take connects of this node now"),
        };
        format!("{reason}{affinity}")
    }
}

fn is_ipv6_frontend(key: &FrontendKey) -> bool {
    Ipv6Addr::from(key.address).to_canonical().is_ipv6()
}

/// Returns a hint as a list, which is empty without it.
fn hint_list(hint: &str) -> Vec<String> {
    if hint.is_empty() { Vec::new() } else { vec![hint.to_owned()] }
}

fn pod_state(phase: RoutingPhase) -> CandidateState {
    match phase {
        RoutingPhase::Starting => CandidateState::NotReady,
        RoutingPhase::Ready => CandidateState::Ready,
        RoutingPhase::Draining => CandidateState::Terminating,
    }
}
