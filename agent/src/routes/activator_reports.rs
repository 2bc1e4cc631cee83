//! Shell: reports of ready pods to activators, which need not wait for the RouteTable then.
//!
//! The controller gets a report of every pod, and decides by it. Activators get those reports on which they can act
//! before: of ready pods.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    sync::Arc,
};

use common::{
    link::{PodReportKey, ReplicaResolver},
    outbox::Outbox,
    wire::{PodObservation, PodReportItem, RouteChange, RouteKey},
};

/// Ready pods of this node, and the activators that are told of them.
#[derive(Debug)]
pub(crate) struct ActivatorReports {
    node: String,
    /// Port of the activators for such reports; `None`: they get none.
    port: Option<NonZeroU16>,
    /// Address of each activator that gets reports of this agent, by its name.
    addresses: BTreeMap<String, IpAddr>,
    /// Resolver of the streams, which has the addresses.
    activators: Arc<ReplicaResolver>,
    ready_pods: Outbox<PodReportKey, PodReportItem>,
}

impl ActivatorReports {
    /// Makes the reports of the agent of `node`. Streams are opened to the activators that `activators` then has.
    pub(crate) fn new(
        node: &str,
        port: Option<NonZeroU16>,
        activators: Arc<ReplicaResolver>,
    ) -> Self {
        Self {
            node: node.to_owned(),
            port,
            addresses: BTreeMap::new(),
            activators,
            ready_pods: Outbox::new(),
        }
    }

    /// Returns the outbox that the streams send from.
    pub(crate) fn outbox(&self) -> Outbox<PodReportKey, PodReportItem> {
        self.ready_pods.clone()
    }

    /// Follows the activators: those of this node get reports, and others if the RouteTable states so.
    pub(crate) fn apply_change(&mut self, change: &RouteChange) {
        let Some(port) = self.port else { return };
        match change {
            RouteChange::Activator(entry) => {
                let gets_reports = entry.gets_all_reports || entry.node == self.node;
                match entry.addresses.first().filter(|_| gets_reports) {
                    Some(address) => self.addresses.insert(entry.name.clone(), *address),
                    None => self.addresses.remove(&entry.name),
                }
            }
            RouteChange::Removed(RouteKey::Activator(name)) => self.addresses.remove(name),
            _ => return,
        };
        let all = self.addresses.values().map(|address| SocketAddr::new(*address, port.get()));
        self.activators.set_listed(all);
    }

    /// Reports a pod if it is ready, and otherwise withdraws the report that it was.
    pub(crate) fn report_pod(&self, observation: &PodObservation) {
        let key = PodReportKey::Pod(observation.uid.clone());
        let last = match self.ready_pods.get(&key) {
            Some(PodReportItem::Observed(last)) => Some(last),
            _ => None,
        };
        match (observation.ready, last) {
            // Only the address counts beside: other values change all the time.
            (true, Some(last)) if last.address == observation.address => {}
            (true, _) => self.ready_pods.set(key, PodReportItem::Observed(observation.clone())),
            (false, Some(_)) => self.ready_pods.remove(&key),
            (false, None) => {}
        }
    }

    /// Withdraws the report of a pod that is gone.
    pub(crate) fn remove_pod(&self, uid: &str) {
        let key = PodReportKey::Pod(uid.to_owned());
        if self.ready_pods.get(&key).is_some() {
            self.ready_pods.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use common::{component::Component, fixtures, wire::ActivatorEntry};

    use super::*;

    fn new_reports(port: Option<NonZeroU16>) -> ActivatorReports {
        let activators = ReplicaResolver::of_listed(Component::Activator, None);
        ActivatorReports::new("n1", port, activators)
    }

    /// Endpoints to which the agent opens streams.
    fn targets(reports: &ActivatorReports) -> Vec<String> {
        let known = reports.activators.subscribe_known();
        let all = known.borrow().all();
        all.iter().map(ToString::to_string).collect()
    }

    fn activator(name: &str, node: &str, addresses: &[&str]) -> RouteChange {
        let addresses = addresses.iter().map(|it| it.parse().expect("an address")).collect();
        let entry = fixtures::activator(name, addresses);
        RouteChange::Activator(ActivatorEntry { node: node.into(), ..entry })
    }

    #[test]
    fn ready_pods_are_reported_to_the_activators_of_the_node() {
        let mut reports = new_reports(NonZeroU16::new(7120));
        reports.apply_change(&activator("here", "n1", &["10.0.0.1", "fd00::1"]));
        reports.apply_change(&activator("there", "n2", &["10.0.0.2"]));
        reports.apply_change(&activator("unknown", "", &["10.0.0.3"]));
        assert_eq!(targets(&reports), ["http://10.0.0.1:7120"]);
        reports.apply_change(&activator("here", "n1", &["fd00::1"]));
        reports.apply_change(&activator("also", "n1", &["10.0.0.4"]));
        assert_eq!(targets(&reports), ["http://10.0.0.4:7120", "http://[fd00::1]:7120"]);
        reports.apply_change(&RouteChange::Removed(RouteKey::Activator("also".into())));
        reports.apply_change(&activator("here", "n2", &["fd00::1"]));
        assert_eq!(targets(&reports), [""; 0]);
    }

    #[test]
    fn activators_of_other_nodes_get_reports_if_the_table_states_so() {
        let mut reports = new_reports(NonZeroU16::new(7120));
        let there = |gets_all_reports| {
            let address = [10, 0, 0, 2].into();
            let entry = fixtures::activator("there", vec![address]);
            let node = "n2".into();
            RouteChange::Activator(ActivatorEntry { node, gets_all_reports, ..entry })
        };
        reports.apply_change(&there(true));
        assert_eq!(targets(&reports), ["http://10.0.0.2:7120"]);
        reports.apply_change(&there(false));
        assert_eq!(targets(&reports), [""; 0]);
    }

    #[test]
    fn without_a_port_no_activator_gets_reports() {
        let mut reports = new_reports(None);
        reports.apply_change(&activator("here", "n1", &["10.0.0.1"]));
        assert_eq!(targets(&reports), [""; 0]);
    }

    fn observation(ready: bool, number: u8, in_flight: u64) -> PodObservation {
        PodObservation {
            uid: "p".into(),
            address: Some(([10, 244, 0, number], 8080).into()),
            other_family_address: None,
            listening: true,
            ready,
            drained: false,
            in_flight,
            listening_since_ns: 1,
            not_ready_reason: String::new(),
            counts_all_ports: true,
            standby: None,
            awaits_stop: false,
        }
    }

    #[test]
    fn only_changes_of_readiness_and_address_are_reported() {
        let reports = new_reports(NonZeroU16::new(7120));
        let mut sent = reports.outbox().subscribe();
        let mut next = || sent.try_next().map(|batch| batch.changes).unwrap_or_default();
        let key = PodReportKey::Pod("p".into());
        let ready = |it: PodObservation| vec![(key.clone(), Some(PodReportItem::Observed(it)))];
        assert!(next().is_empty());
        reports.report_pod(&observation(false, 1, 0));
        reports.remove_pod("p");
        assert!(next().is_empty(), "it was never ready");
        reports.report_pod(&observation(true, 1, 0));
        assert_eq!(next(), ready(observation(true, 1, 0)));
        reports.report_pod(&observation(true, 1, 7));
        assert!(next().is_empty(), "requests in flight are for others");
        reports.report_pod(&observation(true, 2, 7));
        assert_eq!(next(), ready(observation(true, 2, 7)));
        reports.report_pod(&observation(false, 2, 7));
        assert_eq!(next(), [(key.clone(), None)]);
        reports.report_pod(&observation(true, 2, 0));
        assert_eq!(next(), ready(observation(true, 2, 0)));
        reports.remove_pod("p");
        assert_eq!(next(), [(key.clone(), None)]);
    }
}
