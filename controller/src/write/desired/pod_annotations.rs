//! Pure: annotations by which the leader passes the stage and the standby order of pods to other replicas.

use serde_json::{Value, json};

use super::pod_requests::find_pod;
use crate::model::{
    cluster_state::{ClusterState, PodStage},
    knative::key::{DRAINING, STANDBY_SINCE},
    object::{DesiredState, ObjectPartKey},
};

/// Returns the annotations of a pod that drains or has a standby order. Other replicas of the controller read them.
pub(super) fn pod_annotations(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(pod) = find_pod(cluster, &key.name) else { return released_pod(cluster, key) };
    let Some(status) = pod.kube_status.as_ref().filter(|it| !it.is_terminating) else {
        return DesiredState::Unmanaged;
    };
    let (draining, standby) = (status.draining_since, status.standby_since);
    // Without a change, a pod that never had an annotation gets no field manager of ours.
    let is_annotated = draining.is_some() || standby.is_some();
    if pod.stage == PodStage::Serving && pod.standby_since.is_none() && !is_annotated {
        return DesiredState::Unmanaged;
    }
    // With server-side apply an annotation that is left out is removed. Of each the first moment counts: another leader
    // may have noted it, and the time that a pod has runs from there.
    let annotations = match (pod.stage, pod.standby_since) {
        (PodStage::Serving, None) => json!({}),
        (PodStage::Serving, Some(since)) => {
            json!({STANDBY_SINCE: standby.unwrap_or(since).rfc3339()})
        }
        (PodStage::Draining { since } | PodStage::Stopping { since }, _) => {
            json!({DRAINING: draining.unwrap_or(since).rfc3339()})
        }
    };
    annotated_pod(key, &annotations)
}

/// Removes the annotations from a pod of a workload that no scaled Service scales any more.
fn released_pod(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // Before, the Service may not be known yet.
    let pod = cluster.workloads.pod(&key.name).filter(|_| cluster.workloads.are_listed);
    let status = pod.and_then(|it| it.pod.kube_status.as_ref());
    match status.is_some_and(|it| it.draining_since.is_some() && !it.is_terminating) {
        true => annotated_pod(key, &json!({})),
        false => DesiredState::Unmanaged,
    }
}

fn annotated_pod(key: &ObjectPartKey, annotations: &Value) -> DesiredState {
    let meta = json!({
        "name": key.name.name.as_str(),
        "namespace": key.name.namespace.as_str(),
        "annotations": annotations,
    });
    DesiredState::Body(json!({"apiVersion": "v1", "kind": "Pod", "metadata": meta}))
}
