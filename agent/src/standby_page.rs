//! Pure: facts about the pods of this node that have a standby order, in the form of the page `/debug/standby`.
//!
//! The page is JSON with the names of these fields in camel case.

use common::wire::{PodEntry, StandbyReport};
use serde::{Deserialize, Serialize};

use crate::service_facts::NodeFacts;

/// Page `/debug/standby`: pods of this node with a standby order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStandby {
    /// Node and mode of the agent.
    pub node: NodeFacts,
    /// Pods by namespace and name.
    pub pods: Vec<StandbyPodFacts>,
}

impl NodeStandby {
    /// Makes the page from the pods with a standby order and their reports. The pods may come in any sequence.
    pub fn new<'a>(
        node: NodeFacts,
        pods: impl IntoIterator<Item = (&'a PodEntry, StandbyReport)>,
    ) -> Self {
        let mut pods: Vec<StandbyPodFacts> =
            pods.into_iter().map(|(pod, report)| StandbyPodFacts::new(pod, report)).collect();
        pods.sort_by(|one, two| {
            (&one.namespace, &one.name, &one.uid).cmp(&(&two.namespace, &two.name, &two.uid))
        });
        Self { node, pods }
    }
}

/// Pod with a standby order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StandbyPodFacts {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Unique identifier of the pod.
    pub uid: String,
    /// Name of the pod's Revision.
    pub revision: String,
    /// True while the pod is frozen; false while something uses it, or while its freeze is under way.
    pub is_frozen: bool,
    /// Memory that the pod holds, in bytes; `None`: the node does not count it.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Reason for which the pod cannot be frozen; empty: none.
    #[serde(default)]
    pub failure: String,
}

impl StandbyPodFacts {
    fn new(pod: &PodEntry, report: StandbyReport) -> Self {
        Self {
            namespace: pod.revision.namespace.to_string(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            revision: pod.revision.name.to_string(),
            is_frozen: report.is_frozen,
            memory_bytes: report.memory_bytes,
            failure: report.failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use common::{
        fixtures,
        wire::{NamespacedName, RoutingPhase},
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn the_page_has_each_pod_by_its_name_with_its_state() {
        let revision = NamespacedName::new("default", "hello-00001");
        let pod = |uid, name: &str| {
            let entry = fixtures::pod(uid, &revision, RoutingPhase::Ready);
            PodEntry { name: name.into(), ..entry }
        };
        let (first, second) = (pod("uid-2", "a"), pod("uid-1", "b"));
        let frozen =
            StandbyReport { is_frozen: true, memory_bytes: Some(4_096), failure: String::new() };
        let failed = StandbyReport { failure: "no cgroup".into(), ..StandbyReport::default() };
        let node = NodeFacts { name: "n1".into(), ..NodeFacts::default() };
        let page = NodeStandby::new(node, [(&second, failed), (&first, frozen)]);
        let text = serde_json::to_value(&page).expect("it is JSON");
        assert_eq!(text["node"]["name"], "n1");
        let pods = json!([
            {
                "namespace": "default", "name": "a", "uid": "uid-2", "revision": "hello-00001",
                "isFrozen": true, "memoryBytes": 4_096, "failure": "",
            },
            {
                "namespace": "default", "name": "b", "uid": "uid-1", "revision": "hello-00001",
                "isFrozen": false, "memoryBytes": null, "failure": "no cgroup",
            },
        ]);
        assert_eq!(text["pods"], pods);
        let read: NodeStandby = serde_json::from_value(text).expect("its own text");
        assert_eq!(read, page);
    }
}
