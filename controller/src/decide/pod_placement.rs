//! Pure: placement of a new pod of a Revision by the webhook: its node, or a preference for a zone.

use serde_json::Value;

use crate::{
    decide::{node_binding, wake_zone},
    model::cluster_state::{ClusterState, UnixMillis},
};

/// Placement of a new pod.
#[derive(Clone, Debug, PartialEq)]
pub enum PodPlacement {
    /// Name of the node that the pod is bound to, without the scheduler.
    Node(String),
    /// Affinity of the pod, with the preference for a zone that the scheduler may refuse.
    Affinity(Value),
}

/// Returns the placement of a pod as the API server is about to store it; `None`: the scheduler places it by its
/// template alone. The random `chance` selects among equal nodes.
pub fn place_pod(
    cluster: &ClusterState,
    pod: &Value,
    chance: u64,
    now: UnixMillis,
) -> Option<PodPlacement> {
    let binds = cluster.settings.config_maps.deployment.bind_pods;
    let node = if binds { node_binding::choose_node(cluster, pod, chance, now) } else { None };
    if let Some(node) = node {
        return Some(PodPlacement::Node(node.to_owned()));
    }
    let zone = wake_zone::preferred_zone(cluster, pod)?;
    Some(PodPlacement::Affinity(wake_zone::affinity_with_zone(pod, zone)))
}
