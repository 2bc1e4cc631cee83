//! Pure: zone from which a Revision without pods was asked for one, and the preference of its first pod for that zone.
//!
//! The preference is added to the pod itself as the API server stores it, and the Deployment's template stays as it is.
//! In the template it would also count for all later pods. Each wake from another zone would make another ReplicaSet,
//! and a change of the template at the wrong moment would replace running pods.

use std::net::IpAddr;

use common::wire::{NamespacedName, WakeOrigin};
use serde_json::{Map, Value, json};

use crate::{
    model::{
        cluster_state::{AppRevision, ClusterState, ParsedTemplate, PodStage, RevisionPod},
        object::json::array_items,
        scale_policy::AutoscalerClass,
    },
    read::observe::{self, ZONE_LABEL},
};

/// Weight of the preference, of the 1 to 100 that Kubernetes permits. The preference of a Revision's pods for different
/// nodes has 100.
const WEIGHT: i32 = 50;
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// Returns true if first pods may prefer a zone: the setting permits it, and the nodes have two zones at least.
pub fn is_preference_on(cluster: &ClusterState) -> bool {
    let mut zones = cluster.nodes.zones.values();
    let first = zones.next();
    cluster.settings.config_maps.deployment.prefers_wake_zone
        && first.is_some_and(|first| zones.any(|it| it != first))
}

/// Returns the zone that a wake came from: of the client's node, or else of the activator where the request waits.
/// `None`: neither is known.
pub fn origin_zone<'a>(cluster: &'a ClusterState, origin: &WakeOrigin) -> Option<&'a str> {
    let node = origin.client.and_then(|client| client_node(cluster, client));
    let of_client = node.and_then(|node| cluster.nodes.zones.get(node));
    let of_activator = || {
        let (activator, _) = cluster.activators.pods.get(&origin.activator)?;
        Some(activator.zone.as_str()).filter(|zone| !zone.is_empty())
    };
    of_client.map(String::as_str).or_else(of_activator)
}

/// Returns the node that a client runs on, by its address.
fn client_node(cluster: &ClusterState, client: IpAddr) -> Option<&str> {
    let nodes = || cluster.nodes.states.iter();
    // A client on the network of its node has the node's own address.
    let own = nodes().find(|(_, node)| node.has_address(client));
    let of_pods = || {
        let node = nodes().find(|(_, node)| node.has_pod_address(client));
        node.filter(|_| are_pod_networks_in_use(cluster))
    };
    own.or_else(of_pods).map(|(name, _)| name.as_str())
}

/// Returns true if pods have addresses from the pod networks of their own nodes, as all activators show.
///
/// Some network plugins take addresses from ranges of their own. A node's pod network would then name a wrong node.
fn are_pod_networks_in_use(cluster: &ClusterState) -> bool {
    let mut is_shown = false;
    for (activator, _) in cluster.activators.pods.values() {
        let node = cluster.nodes.states.get(&activator.node);
        for address in &activator.addresses {
            if node.is_none_or(|it| !it.has_pod_address(*address)) {
                return false;
            }
            is_shown = true;
        }
    }
    is_shown
}

/// Returns the zone that a pod should prefer, as the API server is about to store it: its Revision was asked for a pod
/// from there, and has no other one. `None` if the pod's own template chooses zones.
pub fn preferred_zone<'a>(cluster: &'a ClusterState, pod: &Value) -> Option<&'a str> {
    if !is_preference_on(cluster) || chooses_zone(&pod["spec"]) {
        return None;
    }
    let (owner, revision) = (observe::owning_app(pod)?, observe::revision_name_of(pod)?);
    let name = NamespacedName::new(owner.namespace.clone(), revision);
    let zone = cluster.scaling.wake_zones.get(&name)?;
    let state = cluster.apps.get(&owner)?.revision(revision)?;
    (!has_serving_pod(state)).then_some(zone.as_str())
}

fn has_serving_pod(revision: &AppRevision) -> bool {
    let serves = |it: &RevisionPod| it.stage == PodStage::Serving && !it.is_terminating();
    revision.pods.iter().any(serves)
}

/// Returns true unless this replica is behind the one that ordered the pod: for the pod's Revision it has no decision
/// yet, or one for no pods. True also for pods whose zone does not depend on that decision: the controller of
/// ReplicaSets waits for each of its pods, and has few threads for those of the whole cluster.
pub fn is_order_known(cluster: &ClusterState, pod: &Value) -> bool {
    if !is_preference_on(cluster) || chooses_zone(&pod["spec"]) {
        return true;
    }
    let order = || {
        let (owner, revision) = (observe::owning_app(pod)?, observe::revision_name_of(pod)?);
        let state = cluster.apps.get(&owner)?.revision(revision)?;
        let is_ordered = state.scaling.decision.is_some_and(|it| it.requested_scale != Some(0));
        // No decision orders the pods of another autoscaler.
        let is_ours = || ParsedTemplate::of_revision(state, cluster).class == AutoscalerClass::Kpa;
        Some(is_ordered || has_serving_pod(state) || !is_ours())
    };
    // Pods of Revisions that this replica does not know have no preference anyway.
    order().unwrap_or(true)
}

/// Returns true if the spec of a pod names its node, or has a rule of its own about zones.
fn chooses_zone(spec: &Value) -> bool {
    let affinity = &spec["affinity"]["nodeAffinity"];
    let required = array_items(&affinity[REQUIRED]["nodeSelectorTerms"]);
    let preferred = array_items(&affinity[PREFERRED]).map(|it| &it["preference"]);
    let names_zone =
        |term: &Value| array_items(&term["matchExpressions"]).any(|it| it["key"] == ZONE_LABEL);
    let has_node = spec["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    has_node
        || spec["nodeSelector"][ZONE_LABEL].is_string()
        || required.chain(preferred).any(names_zone)
        || places_by_zones_of_pods(spec)
}

/// Returns true if the spec has a rule by which other pods decide about the zone. The scheduler weighs preferences for
/// pods and for nodes alike, so ours could undo such a preference.
fn places_by_zones_of_pods(spec: &Value) -> bool {
    let terms = ["podAffinity", "podAntiAffinity"].into_iter().flat_map(|kind| {
        let rules = &spec["affinity"][kind];
        let preferred = array_items(&rules[PREFERRED]).map(|it| &it["podAffinityTerm"]);
        array_items(&rules[REQUIRED]).chain(preferred)
    });
    let spreads = array_items(&spec["topologySpreadConstraints"]);
    terms.chain(spreads).any(|rule| rule["topologyKey"] == ZONE_LABEL)
}

/// Returns the affinity of a pod with a preference for this zone added to it.
pub fn affinity_with_zone(pod: &Value, zone: &str) -> Value {
    let fields = |value: Option<&Value>| -> Map<String, Value> {
        value.and_then(Value::as_object).cloned().unwrap_or_default()
    };
    let mut affinity = fields(pod.pointer("/spec/affinity"));
    let mut of_nodes = fields(affinity.get("nodeAffinity"));
    let preferences = of_nodes.get(PREFERRED).and_then(Value::as_array);
    let mut preferences = preferences.cloned().unwrap_or_default();
    let in_zone = json!({"key": ZONE_LABEL, "operator": "In", "values": [zone]});
    preferences.push(json!({"weight": WEIGHT, "preference": {"matchExpressions": [in_zone]}}));
    of_nodes.insert(PREFERRED.into(), preferences.into());
    affinity.insert("nodeAffinity".into(), of_nodes.into());
    affinity.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preference_is_added_to_the_affinity_that_a_pod_has() {
        let preferred = |weight: i32, key: &str, zone: &str| {
            let in_zone = json!({"key": key, "operator": "In", "values": [zone]});
            json!({"weight": weight, "preference": {"matchExpressions": [in_zone]}})
        };
        let ours = preferred(50, "topology.kubernetes.io/zone", "b");
        let alone = json!({"nodeAffinity": {PREFERRED: [ours]}});
        for affinity in [json!(null), json!({}), json!({"nodeAffinity": null})] {
            let pod = json!({"spec": {"affinity": affinity}});
            assert_eq!(affinity_with_zone(&pod, "b"), alone, "{pod}");
        }
        let theirs = preferred(1, "disk", "fast");
        let others = json!({"preferredDuringSchedulingIgnoredDuringExecution": []});
        let terms = json!({"nodeSelectorTerms": []});
        let pod = json!({"spec": {"affinity": {
            "nodeAffinity": {REQUIRED: terms, PREFERRED: [theirs]}, "podAntiAffinity": others,
        }}});
        let expected = json!({
            "nodeAffinity": {REQUIRED: terms, PREFERRED: [theirs, ours]}, "podAntiAffinity": others,
        });
        assert_eq!(affinity_with_zone(&pod, "b"), expected);
    }

    #[test]
    fn a_pod_with_a_rule_about_zones_or_a_node_chooses_them_itself() {
        let term = |key: &str| json!({"matchExpressions": [{"key": key, "operator": "Exists"}]});
        let required = |key: &str| json!({REQUIRED: {"nodeSelectorTerms": [term(key)]}});
        let preferred = |key: &str| json!({PREFERRED: [{"weight": 1, "preference": term(key)}]});
        for (key, expected) in [("topology.kubernetes.io/zone", true), ("disk", false)] {
            for affinity in [required(key), preferred(key)] {
                let spec = json!({"affinity": {"nodeAffinity": affinity}});
                assert_eq!(chooses_zone(&spec), expected, "{spec}");
            }
            assert_eq!(chooses_zone(&json!({"nodeSelector": {key: "a"}})), expected, "{key}");
        }
        for (key, expected) in
            [("topology.kubernetes.io/zone", true), ("kubernetes.io/hostname", false)]
        {
            let term = json!({"topologyKey": key});
            let preferred = json!([{"weight": 100, "podAffinityTerm": term}]);
            for spec in [
                json!({"affinity": {"podAffinity": {REQUIRED: [term]}}}),
                json!({"affinity": {"podAffinity": {PREFERRED: preferred}}}),
                json!({"affinity": {"podAntiAffinity": {PREFERRED: preferred}}}),
                json!({"topologySpreadConstraints": [term]}),
            ] {
                assert_eq!(chooses_zone(&spec), expected, "{spec}");
            }
        }
        assert!(chooses_zone(&json!({"nodeName": "n1"})));
        assert!(!chooses_zone(&json!({"nodeName": "", "affinity": {}})));
    }
}
