//! Pure: annotations by which the leader passes the stage of pods to other replicas.

use serde_json::{Value, json};

use super::pod_requests::find_pod;
use crate::model::{
    cluster_state::{ClusterState, PodStage},
    knative::key::DRAINING,
    object::{DesiredState, ObjectPartKey},
};

/// Returns the annotation of a draining pod, which other replicas of the controller read.
pub(super) fn drain_annotation(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(pod) = find_pod(cluster, &key.name) else { return released_pod(cluster, key) };
    let Some(status) = pod.kube_status.as_ref().filter(|it| !it.is_terminating) else {
        return DesiredState::Unmanaged;
    };
    let annotations = match (pod.stage, status.draining_since) {
        (PodStage::Serving, None) => return DesiredState::Unmanaged,
        // The pod serves again: with server-side apply an annotation that is left out is removed.
        (PodStage::Serving, Some(_)) => json!({}),
        (PodStage::Draining { since } | PodStage::Stopping { since }, noted) => {
            // The first moment counts: another leader may have noted it, and the grace period runs from there.
            json!({DRAINING: noted.unwrap_or(since).rfc3339()})
        }
    };
    annotated_pod(key, &annotations)
}

/// Removes the annotation from a pod of a workload that no scaled Service scales any more.
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
