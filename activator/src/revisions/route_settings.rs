//! Pure: a Revision in the RouteTable: its settings and its pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use common::{
    service_routing::{NodeTopology, SelectionRule, TopologyHints},
    wire::{self, AllowedSources, AppProtocol},
};
use smol_str::SmolStr;

/// Settings of a Revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionRouteSettings {
    /// Hard limit of each pod (containerConcurrency); 0: no limit.
    pub concurrency_limit: u32,
    /// HTTP version that its pods speak.
    pub protocol: AppProtocol,
    /// Timeouts of its requests.
    pub timeouts: RequestTimeouts,
    /// Clients that may send requests, by the pods' NetworkPolicies; `None`: all clients.
    pub allowed_sources: Option<Arc<AllowedSources>>,
    /// Service and Configuration that own the Revision.
    pub owner_names: RevisionOwnerNames,
}

/// Owners of a Revision, for the request log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionOwnerNames {
    /// Name of the Service; empty: a Configuration without a Service.
    pub service: SmolStr,
    /// Name of the Configuration that made the Revision.
    pub configuration: SmolStr,
}

impl RevisionRouteSettings {
    /// Extracts the settings from a Revision of the RouteTable.
    pub fn new(entry: &wire::RevisionEntry) -> Self {
        let timeouts = RequestTimeouts {
            total: entry.timeout,
            response_start: entry.response_start_timeout,
            between_frames: entry.idle_timeout,
        };
        let allowed_sources = entry.allowed_sources.clone();
        let concurrency_limit = entry.container_concurrency;
        let owner_names = RevisionOwnerNames {
            service: entry.service.clone(),
            configuration: entry.configuration.clone(),
        };
        Self { concurrency_limit, protocol: entry.protocol, timeouts, allowed_sources, owner_names }
    }
}

/// Timeouts of a Revision's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimeouts {
    /// Time for a whole request, including the time it waits (`timeoutSeconds`).
    pub total: Duration,
    /// Time until the response begins (`responseStartTimeoutSeconds`).
    pub response_start: Option<Duration>,
    /// Time between two pieces of the response (`idleTimeoutSeconds`).
    pub between_frames: Option<Duration>,
}

/// One pod of a Revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTableEntry {
    /// Address and port of its container, once they are known.
    pub address: Option<SocketAddr>,
    /// True if the RouteTable lists the pod as ready.
    pub is_ready: bool,
    /// True if the RouteTable lists the pod as starting, and the report for which it waits has come: the agent of its
    /// node reports the pod as ready.
    pub is_early_ready: bool,
    /// Name of the pod, without its namespace.
    pub name: SmolStr,
    /// Clients that should use the pod.
    pub hints: TopologyHints,
}

/// Pods of one Revision in the RouteTable, by uid.
pub type PodTable = BTreeMap<String, PodTableEntry>;

/// Places of the activators in the cluster, by which hints of pods count.
#[derive(Clone, Debug, Default)]
pub struct ActivatorTopology {
    /// Node and zone of this activator.
    pub own_place: NodeTopology,
    /// Zones of all activators.
    pub zones: BTreeSet<SmolStr>,
}

/// Preference of an activator for some ready pods of a Revision, by their hints.
#[derive(Debug)]
pub struct PodPreference<'a> {
    rule: SelectionRule,
    topology: &'a ActivatorTopology,
}

impl<'a> PodPreference<'a> {
    /// Derives the preference from the hints of all ready pods; `None` if hints do not count.
    pub fn new(pods: &PodTable, topology: &'a ActivatorTopology) -> Option<Self> {
        let ready = pods.values().filter(|pod| pod.is_ready);
        let rule = SelectionRule::of_hints(ready.map(|pod| &pod.hints), &topology.own_place);
        (rule != SelectionRule::Ready).then_some(Self { rule, topology })
    }

    /// Returns true if the activator prefers a ready pod with these hints.
    ///
    /// Where hints for zones count, each activator prefers a pod for a zone without an activator too: otherwise none
    /// would, and the pod would get hardly any request.
    pub fn selects(&self, hints: &TopologyHints) -> bool {
        let is_for_all =
            self.rule == SelectionRule::SameZone && !self.topology.zones.contains(&hints.zone);
        is_for_all || self.rule.selects(hints, &self.topology.own_place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the uids of the preferred ones of these pods, which are pairs of uid and hint for a zone.
    fn preferred(pods: &[(&str, &str)], zone: &str, activator_zones: &[&str]) -> Vec<String> {
        let pod = |(uid, zone): &(&str, &str)| {
            let hints = TopologyHints { zone: (*zone).into(), ..TopologyHints::default() };
            let pod = PodTableEntry {
                address: None,
                is_ready: true,
                is_early_ready: false,
                name: (*uid).into(),
                hints,
            };
            ((*uid).to_owned(), pod)
        };
        let table: PodTable = pods.iter().map(pod).collect();
        let topology = ActivatorTopology {
            own_place: NodeTopology { name: "n1".into(), zone: zone.into() },
            zones: activator_zones.iter().map(|it| SmolStr::from(*it)).collect(),
        };
        let preference = PodPreference::new(&table, &topology);
        let is_preferred =
            |pod: &PodTableEntry| preference.as_ref().is_some_and(|it| it.selects(&pod.hints));
        table.iter().filter(|(_, pod)| is_preferred(pod)).map(|(uid, _)| uid.clone()).collect()
    }

    #[test]
    fn every_pod_is_preferred_by_some_activator() {
        let pods = [("one", "a"), ("two", "b"), ("three", "c")];
        assert_eq!(preferred(&pods, "a", &["a", "b", "c"]), ["one"]);
        assert_eq!(preferred(&pods, "a", &["a", "b"]), ["one", "three"]);
        assert_eq!(preferred(&pods, "b", &["a", "b"]), ["three", "two"]);
        assert_eq!(preferred(&pods, "a", &["a"]), ["one", "three", "two"]);
    }

    #[test]
    fn without_hints_that_count_no_pod_is_preferred() {
        let partial = [("one", "a"), ("two", "")];
        assert_eq!(preferred(&partial, "a", &["a"]), [""; 0]);
        let elsewhere = [("one", "b"), ("two", "c")];
        assert_eq!(preferred(&elsewhere, "a", &["a", "b"]), [""; 0]);
    }
}
