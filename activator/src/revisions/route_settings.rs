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
    /// True if the pod takes new requests.
    pub is_ready: bool,
    /// Name of the pod, without its namespace.
    pub name: SmolStr,
    /// Clients that should use the pod.
    pub hints: TopologyHints,
    /// True if hints prefer the pod for requests of this activator, see [`mark_preferred`].
    pub is_preferred: bool,
}

/// Pods of one Revision in the RouteTable, by uid.
pub type PodTable = BTreeMap<String, PodTableEntry>;

/// Marks the ready pods that hints prefer for requests of the activator on `node`. It marks none if hints do not count.
///
/// `activator_zones` are the zones of all activators. Where hints for zones count, a pod for a zone without an
/// activator is marked too: otherwise no activator would prefer it, and it would get hardly any request.
pub fn mark_preferred(
    pods: &mut PodTable,
    node: &NodeTopology,
    activator_zones: &BTreeSet<SmolStr>,
) {
    let ready = pods.values().filter(|pod| pod.is_ready);
    let rule = SelectionRule::of_hints(ready.map(|pod| &pod.hints), node);
    let by_hints = rule != SelectionRule::Ready;
    let is_for_all = |hints: &TopologyHints| {
        rule == SelectionRule::SameZone && !activator_zones.contains(&hints.zone)
    };
    for pod in pods.values_mut() {
        let is_candidate = rule.selects(&pod.hints, node) || is_for_all(&pod.hints);
        pod.is_preferred = by_hints && pod.is_ready && is_candidate;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the uids of the preferred ones of these pods, which are pairs of uid and hint for a zone.
    fn preferred(pods: &[(&str, &str)], zone: &str, activator_zones: &[&str]) -> Vec<String> {
        let pod = |(uid, zone): &(&str, &str)| {
            let hints = TopologyHints { zone: (*zone).into(), ..TopologyHints::default() };
            let name = (*uid).into();
            let pod =
                PodTableEntry { address: None, is_ready: true, name, hints, is_preferred: false };
            ((*uid).to_owned(), pod)
        };
        let mut table: PodTable = pods.iter().map(pod).collect();
        let node = NodeTopology { name: "n1".into(), zone: zone.into() };
        let zones = activator_zones.iter().map(|it| SmolStr::from(*it)).collect();
        mark_preferred(&mut table, &node, &zones);
        table.into_iter().filter(|(_, pod)| pod.is_preferred).map(|(uid, _)| uid).collect()
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
