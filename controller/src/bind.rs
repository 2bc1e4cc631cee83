//! Pure: a pod that is about to be made → the node that it may be bound to at once.
//!
//! Only what asks for nothing is bound: whoever has a wish about its place, or needs room to be counted, gets it from
//! the scheduler. A node is taken only where the kubelet says that the image is there, and one that has turned a pod
//! away is left to the scheduler for a while.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    kube::cache::hash,
    observe,
    restore::array,
    world::{Stamp, World},
};

/// A node that has turned a pod away is not bound to for so long.
const SHUNNED_MS: u64 = 60_000;
/// Fields of a pod's spec that only the scheduler can judge.
const WISHES: [&str; 6] = [
    "nodeSelector",
    "topologySpreadConstraints",
    "schedulingGates",
    "resourceClaims",
    "runtimeClassName",
    "hostNetwork",
];
/// Volumes that can be used anywhere.
const ANYWHERE: [&str; 5] = ["configMap", "secret", "projected", "emptyDir", "downwardAPI"];

/// What must be known of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Whether its kubelet says that it is ready, and has said so lately.
    ready: bool,
    /// Whether it takes pods that tolerate nothing.
    open: bool,
    /// Hashes of the names of the images on it, in order.
    images: Box<[u64]>,
    /// When it last turned a pod away.
    refused: Option<Stamp>,
}

impl Node {
    /// What is kept of a node; `before` is what was.
    pub fn of(object: &Value, before: Option<&Self>) -> Self {
        let status = &object["status"];
        let is = |kind: &str, wanted: &str| {
            array(&status["conditions"]).any(|it| it["type"] == kind && it["status"] == wanted)
        };
        let pressed = ["MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"];
        let closed = object["spec"]["unschedulable"] == true
            || array(&object["spec"]["taints"]).any(|it| it["effect"] != "PreferNoSchedule");
        let names = array(&status["images"]).flat_map(|it| array(&it["names"]));
        let mut images: Vec<u64> = names.map(hash).collect();
        images.sort_unstable();
        let ready = is("Ready", "True");
        Self {
            ready,
            open: ready && !closed && !pressed.iter().any(|it| is(it, "True")),
            images: images.into(),
            refused: before.and_then(|it| it.refused),
        }
    }

    /// Whether it is ready, as Kubernetes sees it.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// It has turned a pod away.
    pub fn shun(&mut self, now: Stamp) {
        self.refused = Some(now);
    }

    fn takes(&self, images: &[u64], now: Stamp) -> bool {
        let shunned = self.refused.is_some_and(|at| now < at.plus_ms(SHUNNED_MS));
        self.open && !shunned && images.iter().all(|it| self.images.binary_search(it).is_ok())
    }
}

/// The node on which a kubelet has refused a pod, if this is such a pod.
pub fn refuser(pod: &Value) -> Option<&str> {
    let status = &pod["status"];
    let refused = status["phase"] == "Failed" && status["reason"].is_string();
    pod["spec"]["nodeName"].as_str().filter(|_| refused)
}

/// The node for a pod as the API server is about to store it: of those that have its images the one with the fewest
/// pods of the same Revision; `chance` chooses among equals.
pub fn place<'a>(world: &'a World, pod: &Value, chance: u64, now: Stamp) -> Option<&'a str> {
    let spec = &pod["spec"];
    if !is_free(spec) {
        return None;
    }
    let containers = || array(&spec["initContainers"]).chain(array(&spec["containers"]));
    let images: Vec<u64> = containers().map(|it| hash(&it["image"])).collect();
    let fitting = world.nodes.iter().filter(|(_, node)| node.takes(&images, now));
    let load = siblings(world, pod);
    let of = |node: &str| load.get(node).copied().unwrap_or(0);
    let fewest = fitting.clone().map(|(name, _)| of(name)).min()?;
    let equal: Vec<&str> =
        fitting.map(|(name, _)| name.as_str()).filter(|name| of(name) == fewest).collect();
    let count = u64::try_from(equal.len()).ok()?;
    equal.get(usize::try_from(chance % count).ok()?).copied()
}

/// Pods of the same Revision, by node.
fn siblings<'a>(world: &'a World, pod: &Value) -> BTreeMap<&'a str, usize> {
    let mut load = BTreeMap::new();
    let owner = observe::app(pod);
    let app = owner.and_then(|owner| world.apps.get(&owner));
    let revision = app.and_then(|app| app.revision(observe::made_for(pod)?));
    for sibling in revision.into_iter().flat_map(|it| &it.pods) {
        if let Some(placed) = &sibling.placed {
            *load.entry(&*placed.node).or_default() += 1;
        }
    }
    load
}

/// Whether any node will do that has the images.
fn is_free(spec: &Value) -> bool {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Bool(it) => !it,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::String(it) => it.is_empty(),
        Value::Number(_) => false,
    };
    let containers = || array(&spec["initContainers"]).chain(array(&spec["containers"]));
    let asks = |it: &Value| {
        let resources = &it["resources"];
        ["requests", "limits", "claims"].iter().any(|field| !is_empty(&resources[*field]))
            || array(&it["ports"]).any(|port| port["hostPort"].is_u64())
    };
    let bound = |it: &Value| {
        let kinds = it.as_object().into_iter().flat_map(serde_json::Map::keys);
        kinds.filter(|kind| *kind != "name").any(|kind| !ANYWHERE.contains(&kind.as_str()))
    };
    let scheduler = spec["schedulerName"].as_str().unwrap_or("default-scheduler");
    is_empty(&spec["nodeName"])
        && scheduler == "default-scheduler"
        && WISHES.iter().all(|field| is_empty(&spec[*field]))
        && is_empty(&spec["resources"])
        && is_ours(&spec["affinity"])
        && !containers().any(asks)
        && !array(&spec["volumes"]).any(bound)
}

/// Whether an affinity wishes nothing, or only what every Revision's pods do: to stand apart from one another.
fn is_ours(affinity: &Value) -> bool {
    let Some(all) = affinity.as_object() else { return true };
    all.iter().all(|(kind, wish)| {
        let fields = wish.as_object().into_iter().flat_map(serde_json::Map::keys);
        let mut fields = fields.map(String::as_str);
        kind == "podAntiAffinity"
            && fields.all(|it| it == "preferredDuringSchedulingIgnoredDuringExecution")
            && array(&wish["preferredDuringSchedulingIgnoredDuringExecution"]).count() <= 1
    })
}

#[cfg(test)]
#[path = "bind/tests.rs"]
mod tests;
