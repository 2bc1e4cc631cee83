//! Pure: pods of the local node, in the form of `kubectl get -o yaml`.

use std::collections::BTreeMap;

use common::{
    local_node::{self, ContainerRunState},
    wire::NamespacedName,
};
use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod as PodObject, PodCondition, PodIP, PodStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Value, json};

use super::api_time;
use crate::{
    decide::service_children::{owner_references, to_json_value},
    model::{
        cluster_state::{
            AppRevision, ClusterState, ObjectMetaSummary, ParsedTemplate, PodStage, RevisionPod,
        },
        knative::key::{ADDRESS_ANNOTATION, BOOT_ANNOTATION, FROZEN_CONDITION, STANDBY_SINCE},
    },
};

/// Returns a pod of the local node.
pub(super) fn render_pod(
    pod: &RevisionPod,
    revision: &AppRevision,
    owner: &NamespacedName,
    cluster: &ClusterState,
) -> Value {
    let template = ParsedTemplate::of_revision(revision, cluster);
    let pod_spec = template.local_pod_spec(owner, revision, pod);
    let owner_meta = ObjectMetaSummary { uid: revision.meta.uid, ..ObjectMetaSummary::default() };
    let status = cluster.pods.statuses.get(&*pod.uid);
    let report = cluster.pods.reports.get(&*pod.uid);
    // Until its agent reports, a pod that served before the restart counts as ready.
    let ready = report.map_or_else(|| pod.restored_address.is_some(), |report| report.ready);
    let mut annotations = BTreeMap::new();
    // Read by `restore` after a restart of the controller.
    annotations.insert(BOOT_ANNOTATION.to_owned(), cluster.settings.boot_id.clone());
    let address =
        report.and_then(|report| report.address).or(pod.restored_address).filter(|_| ready);
    if let Some(address) = address {
        annotations.insert(ADDRESS_ANNOTATION.to_owned(), address.to_string());
    }
    if let Some(since) = pod.standby_since.filter(|_| pod.has_standby_order()) {
        annotations.insert(STANDBY_SINCE.to_owned(), since.rfc3339());
    }
    // A draining pod is no deleted one yet: it still answers requests.
    let stopping = match pod.stage {
        PodStage::Stopping { since } => api_time(since),
        PodStage::Serving | PodStage::Draining { .. } => None,
    };
    let metadata = ObjectMeta {
        name: Some(pod_spec.name),
        namespace: Some(owner.namespace.to_string()),
        uid: Some(pod_spec.uid),
        creation_timestamp: api_time(pod.created),
        deletion_timestamp: stopping,
        labels: Some(pod_spec.labels),
        annotations: Some(annotations),
        owner_references: owner_references("Revision", &revision.name, &owner_meta),
        ..ObjectMeta::default()
    };
    let ips = status.map(|it| it.addresses.as_slice()).unwrap_or_default();
    let phase = match status.map(|it| it.phase) {
        // As in Kubernetes: a pod that is being deleted stays `Running` until its containers have ended.
        Some(local_node::PodRunPhase::Running | local_node::PodRunPhase::Terminating) => "Running",
        Some(local_node::PodRunPhase::Removed) => "Succeeded",
        Some(local_node::PodRunPhase::Pending) | None => "Pending",
    };
    let containers = status.map(|it| it.containers.as_slice()).unwrap_or_default();
    let status = PodStatus {
        phase: Some(phase.into()),
        pod_ip: ips.first().map(ToString::to_string),
        pod_ips: Some(ips.iter().map(|ip| PodIP { ip: ip.to_string() }).collect()),
        start_time: api_time(pod.created),
        conditions: Some(render_conditions(pod, ready)),
        container_statuses: Some(
            containers.iter().map(|it| render_container_status(it, ready)).collect(),
        ),
        ..PodStatus::default()
    };
    let spec = Some(pod_spec.spec);
    let mut out = to_json_value(PodObject { metadata, spec, status: Some(status) });
    // Only in the object: the node does not need its own name.
    out["spec"]["nodeName"] = json!(cluster.settings.node_name);
    out
}

/// Returns the conditions of a pod. One of them tells if the pod is frozen, while it has a standby order.
fn render_conditions(pod: &RevisionPod, ready: bool) -> Vec<PodCondition> {
    let condition = |r#type: &str, holds: bool| PodCondition {
        type_: r#type.into(),
        status: if holds { "True" } else { "False" }.into(),
        ..PodCondition::default()
    };
    let mut conditions = vec![condition("Ready", ready)];
    if pod.has_standby_order() {
        conditions.push(condition(FROZEN_CONDITION, pod.is_frozen));
    }
    conditions
}

/// Renders the status of a container as a kubelet would report it.
fn render_container_status(
    status: &local_node::LocalContainerStatus,
    ready: bool,
) -> ContainerStatus {
    let state = match &status.state {
        ContainerRunState::Waiting { reason, message, .. } => {
            json!({"waiting": {"reason": reason, "message": message}})
        }
        ContainerRunState::Running => json!({"running": {}}),
        ContainerRunState::Terminated { code, reason, message } => {
            json!({"terminated": {"exitCode": code, "reason": reason, "message": message}})
        }
    };
    // A crashed container waits for its restart, and shows the exit code of its last run.
    let last = match &status.state {
        ContainerRunState::Waiting { last_exit: Some(code), .. } => {
            serde_json::from_value(json!({"terminated": {"exitCode": code}})).ok()
        }
        ContainerRunState::Waiting { .. }
        | ContainerRunState::Running
        | ContainerRunState::Terminated { .. } => None,
    };
    ContainerStatus {
        name: status.name.clone(),
        ready: ready && status.state == ContainerRunState::Running,
        restart_count: i32::try_from(status.restarts).unwrap_or(i32::MAX),
        image_id: status.image_digest.clone().unwrap_or_default(),
        state: serde_json::from_value(state).ok(),
        last_state: last,
        ..ContainerStatus::default()
    }
}
