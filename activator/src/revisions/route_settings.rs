//! Pure: a Revision in the RouteTable: its settings and its pods.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

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
}

/// Pods of one Revision in the RouteTable, by uid.
pub type PodTable = BTreeMap<String, PodTableEntry>;

/// Returns the rule by which hints prefer some ready pods for clients on `node`; `None` if hints do not count.
pub fn preference_rule(pods: &PodTable, node: &NodeTopology) -> Option<SelectionRule> {
    let ready = pods.values().filter(|pod| pod.is_ready);
    let rule = SelectionRule::of_hints(ready.map(|pod| &pod.hints), node);
    (rule != SelectionRule::Ready).then_some(rule)
}
