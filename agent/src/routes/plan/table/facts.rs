//! Pure: facts about the services of the RouteTable: their pods, and the reason for the path of their connects.

use std::net::{IpAddr, Ipv6Addr};

use common::{
    service_routing::SelectionRule,
    wire::{NamespacedName, RoutingPhase},
};
use datapath::abi::FrontendKey;

use super::{PlannerPod, PlannerTable, ServiceNumber};
use crate::service_facts::{CandidateFacts, CandidateState, ServiceSource};

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
                let revision = self.services.get(number).direct_revision;
                // The pods of several Revisions are not endpoints of one list.
                let known = revision.map(|it| self.revisions.get(it).pods.len());
                self.frontend_keys(number).into_iter().map(|key| (key, known)).collect()
            }
            ServiceNumber::Cluster(number) => self.cluster.known_endpoints(number),
        }
    }

    /// Returns the number of a service that has this address.
    pub(in crate::routes::plan) fn find_address(&self, address: IpAddr) -> Option<ServiceNumber> {
        let has_address = |&number: &u32| self.services.get(number).addresses.contains(&address);
        let routed = self.routed_numbers().find(has_address).map(ServiceNumber::Routed);
        routed.or_else(|| self.cluster.find_address(address).map(ServiceNumber::Cluster))
    }

    /// Returns the frontends whose connects may go directly to a pod.
    pub(crate) fn frontends_of_pod(&self, uid: &str) -> Vec<FrontendKey> {
        let services = self.affected_services(uid).into_iter();
        services.flat_map(|number| self.frontend_keys(number)).collect()
    }

    /// Returns true if an activator can take the connects to a frontend. IPv4 clients reach IPv4 activators only.
    pub(crate) fn has_activator_for(&self, key: &FrontendKey) -> bool {
        let is_ipv6 = is_ipv6_frontend(key);
        self.activators.values().flatten().any(|address| is_ipv6 || address.is_ipv4())
    }

    /// Returns the port of a service of the RouteTable.
    pub(in crate::routes::plan) fn routed_port(&self, number: u32) -> u16 {
        self.services.get(number).port.get()
    }

    /// Returns the pods of the Revision that a service sends connects directly to, with the decision about each. The
    /// addresses are those for clients of the frontend.
    pub(in crate::routes::plan) fn pod_candidates(
        &self,
        number: u32,
        key: &FrontendKey,
    ) -> Vec<CandidateFacts> {
        let Some(revision) = self.services.get(number).direct_revision else { return Vec::new() };
        let (is_ipv6, mapped) = (is_ipv6_frontend(key), !self.has_ipv6_activator());
        let hinted = self.hinted_pods(revision, is_ipv6, mapped);
        let uids = self.revisions.get(revision).pods.iter();
        let candidates = uids.filter_map(|uid| {
            let pod = self.pods.get(uid)?;
            let fitting = pod.address_for(is_ipv6, mapped);
            // A pod without any address has no place in a list of addresses.
            let address = fitting.or(pod.address).or(pod.other_family_address)?;
            let exclusion = self.pod_exclusion(uid, pod, fitting.is_some());
            let exclusion = exclusion.or_else(|| hinted.exclusion(pod));
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
        let revision = self.services.get(number).direct_revision?;
        let mapped = !self.has_ipv6_activator();
        Some(self.hinted_pods(revision, is_ipv6_frontend(key), mapped).rule)
    }

    /// Returns the reason for which no list has a pod; `None` if it is selected.
    fn pod_exclusion(&self, uid: &str, pod: &PlannerPod, is_fitting: bool) -> Option<&'static str> {
        match pod.phase {
            RoutingPhase::Starting => Some("is not ready"),
            RoutingPhase::Draining => Some("is draining"),
            RoutingPhase::Ready if self.excluded_pods.contains(uid) => {
                Some("is excluded: no connect from this node reached it, or it is about to stop")
            }
            RoutingPhase::Ready if !is_fitting => Some("has no address of the client's family"),
            RoutingPhase::Ready => None,
        }
    }

    /// Returns the reason for which connects to a service of the RouteTable go to activators.
    pub(in crate::routes::plan) fn activator_reason(
        &self,
        number: u32,
        name: &NamespacedName,
    ) -> String {
        match self.services.get(number).direct_revision {
            None => format!(
                "{name} is on the activator path: it is asleep, or its requests are divided or \
                 counted there"
            ),
            Some(_) => format!("no pod of {name} can take connects of this node now"),
        }
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
