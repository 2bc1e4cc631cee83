//! Pure: choice of the node that a new pod may be bound to without the scheduler.
//!
//! Only pods without constraints are bound: a pod with a placement rule or resource requests is left to the scheduler.
//! A node is eligible only where its kubelet lists the pod's images. A node that has rejected a pod is left to the
//! scheduler for a while.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    decide::wake_zone,
    model::{
        cluster_state::{ClusterState, UnixMillis, nodes::image_name_hash},
        knative::key,
        object::json::array_items,
    },
    read::observe,
};

/// Fields of a pod's spec that only the scheduler can evaluate.
const SCHEDULER_ONLY_FIELDS: [&str; 6] = [
    "nodeSelector",
    "topologySpreadConstraints",
    "schedulingGates",
    "resourceClaims",
    "runtimeClassName",
    "hostNetwork",
];
/// Volume types that exist on every node.
const NODE_INDEPENDENT_VOLUMES: [&str; 5] =
    ["configMap", "secret", "projected", "emptyDir", "downwardAPI"];

/// Chooses the node for a pod as the API server is about to store it. Of the nodes that have its images, those in the
/// zone that the pod prefers come first. Of these, it takes the one with the fewest pods of the same Revision. The
/// random `chance` breaks ties.
pub fn choose_node<'a>(
    cluster: &'a ClusterState,
    pod: &Value,
    chance: u64,
    now: UnixMillis,
) -> Option<&'a str> {
    if !is_unconstrained(pod) {
        return None;
    }
    let spec = &pod["spec"];
    let containers =
        || array_items(&spec["initContainers"]).chain(array_items(&spec["containers"]));
    let images: Vec<u64> = containers().map(|it| image_name_hash(&it["image"])).collect();
    let nodes = &cluster.nodes;
    let accepting =
        nodes.states.iter().filter(|(name, state)| nodes.accepts_pod(name, state, &images, now));
    let mut fitting: Vec<&str> = accepting.map(|(name, _)| name.as_str()).collect();
    if let Some(zone) = wake_zone::preferred_zone(cluster, pod) {
        let is_in_zone = |node: &str| nodes.zones.get(node).is_some_and(|it| it == zone);
        // The zone is a preference: without a fitting node there, any node is better than the scheduler's queue.
        if fitting.iter().any(|node| is_in_zone(node)) {
            fitting.retain(|node| is_in_zone(node));
        }
    }
    let counts = sibling_counts(cluster, pod);
    let siblings_on = |node: &str| counts.get(node).copied().unwrap_or(0);
    // As the scheduler does by default, pods of a Revision are spread over nodes.
    let fewest = fitting.iter().map(|node| siblings_on(node)).min()?;
    fitting.retain(|node| siblings_on(node) == fewest);
    let count = u64::try_from(fitting.len()).ok()?;
    fitting.get(usize::try_from(chance % count).ok()?).copied()
}

/// Returns the number of pods of the same Revision, by node.
fn sibling_counts<'a>(cluster: &'a ClusterState, pod: &Value) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    let owner = observe::owning_app(pod);
    let app = owner.and_then(|owner| cluster.apps.get(&owner));
    let revision = app.and_then(|app| app.revision(observe::revision_name_of(pod)?));
    for sibling in revision.into_iter().flat_map(|it| &it.pods) {
        if let Some(status) = &sibling.kube_status {
            *counts.entry(&*status.node).or_default() += 1;
        }
    }
    counts
}

/// Returns true if any node that has the images will do.
fn is_unconstrained(pod: &Value) -> bool {
    let spec = &pod["spec"];
    // The API server fills in defaults such as `[]`, `{}` and `false`, which ask for nothing.
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Bool(it) => !it,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::String(it) => it.is_empty(),
        Value::Number(_) => false,
    };
    let containers =
        || array_items(&spec["initContainers"]).chain(array_items(&spec["containers"]));
    // Only the scheduler knows what is free on each node.
    let has_resources_or_host_port = |container: &Value| {
        let resources = &container["resources"];
        ["requests", "limits", "claims"].iter().any(|field| !is_empty(&resources[*field]))
            || array_items(&container["ports"]).any(|port| port["hostPort"].is_u64())
    };
    let is_node_dependent = |volume: &Value| {
        let kinds = volume.as_object().into_iter().flat_map(serde_json::Map::keys);
        kinds
            .filter(|kind| *kind != "name")
            .any(|kind| !NODE_INDEPENDENT_VOLUMES.contains(&kind.as_str()))
    };
    let scheduler = spec["schedulerName"].as_str().unwrap_or("default-scheduler");
    is_empty(&spec["nodeName"])
        && scheduler == "default-scheduler"
        && SCHEDULER_ONLY_FIELDS.iter().all(|field| is_empty(&spec[*field]))
        && is_empty(&spec["resources"])
        && is_default_affinity(&spec["affinity"], observe::revision_name_of(pod))
        && !containers().any(has_resources_or_host_port)
        && !array_items(&spec["volumes"]).any(is_node_dependent)
}

/// Returns true if an affinity is empty, or holds only the default preference of the Revision's pods for different
/// nodes, which the choice of the node follows. A user's own preference is left to the scheduler.
fn is_default_affinity(affinity: &Value, revision: Option<&str>) -> bool {
    let Some(all) = affinity.as_object() else { return true };
    let selector = json!({"matchLabels": {key::REVISION: revision}});
    let is_default_term = |preference: &Value| {
        let term = &preference["podAffinityTerm"];
        term["topologyKey"] == "kubernetes.io/hostname" && term["labelSelector"] == selector
    };
    all.iter().all(|(kind, term)| {
        let fields = term.as_object().into_iter().flat_map(serde_json::Map::keys);
        let mut fields = fields.map(String::as_str);
        kind == "podAntiAffinity"
            && fields.all(|it| it == "preferredDuringSchedulingIgnoredDuringExecution")
            && array_items(&term["preferredDuringSchedulingIgnoredDuringExecution"])
                .all(is_default_term)
    })
}

#[cfg(test)]
mod tests;
