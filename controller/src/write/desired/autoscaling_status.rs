//! Pure: statuses of PodAutoscaler and ServerlessService, from which tools read a Revision's scale
//! (knative/serving `pkg/apis/autoscaling/v1alpha1/pa_lifecycle.go`, `pkg/reconciler/serverlessservice`).

use common::wire::NamespacedName;
use serde_json::{Value, json};

use crate::{
    model::{
        cluster_state::{
            AppRevision, ClusterState, ConditionReason, ConditionStatus, ConditionType, UnixMillis,
        },
        object::names,
        scale_policy::AutoscalerClass,
    },
    write::{children::scaling::ServerlessServiceMode, render},
};

/// Smallest number of activators that Knative assigns to a Revision.
const MIN_ACTIVATORS: i32 = 2;

/// Returns one condition in the form of a status.
pub(super) fn render_condition(
    name: &str,
    condition: &ConditionStatus,
    since: UnixMillis,
) -> Value {
    let (status, reason) = match condition {
        ConditionStatus::True(reason) => ("True", reason.clone()),
        ConditionStatus::Unknown(reason) => ("Unknown", reason.clone()),
        ConditionStatus::False(reason) => ("False", Some(reason.clone())),
    };
    let mut out = json!({"type": name, "status": status, "lastTransitionTime": since.rfc3339()});
    if let Some(ConditionReason { reason, message }) = reason {
        for (field, text) in [("reason", reason), ("message", message)] {
            if !text.is_empty() {
                out[field] = json!(text);
            }
        }
    }
    out
}

/// Returns a condition of a Revision, with the moment of its last change.
pub(super) fn last_transition(
    revision: &AppRevision,
    kind: ConditionType,
) -> (UnixMillis, ConditionStatus) {
    let condition = revision.conditions.iter().find(|(it, _, _)| *it == kind);
    condition.map_or((revision.meta.created, ConditionStatus::Unknown(None)), |(_, at, status)| {
        (at, status)
    })
}

/// Returns the status of a Revision's PodAutoscaler.
pub(super) fn pod_autoscaler_status(
    revision: &AppRevision,
    namespace: &str,
    cluster: &ClusterState,
) -> Value {
    let (at, active) = last_transition(revision, ConditionType::RevisionActive);
    let (initialized_at, initialized) = target_initialized(revision);
    let (populated_at, populated) = endpoints_populated(revision);
    let (ready_at, ready) = summarize_autoscaler(&[
        (at, &active),
        (initialized_at, &initialized),
        (populated_at, &populated),
    ]);
    let decision =
        render::decision_annotation(cluster, &NamespacedName::new(namespace, &*revision.name));
    let mut status = json!({
        "serviceName": &*revision.name,
        "metricsServiceName": names::private_service_name(&revision.name),
        "desiredScale": revision.scaling.requested_scale,
        "actualScale": revision.scaling.actual_scale,
        "conditions": [
            render_condition("Active", &active, at),
            render_condition("Ready", &ready, ready_at),
            render_condition("SKSReady", &populated, populated_at),
            render_condition("ScaleTargetInitialized", &initialized, initialized_at),
        ],
    });
    if !decision.is_empty() {
        status["annotations"] = json!(decision);
    }
    // Absent for Revisions whose pods were never to stand by.
    if revision.conditions.is_set(ConditionType::RevisionStandby) {
        status["standbyScale"] = json!(revision.frozen_pods());
    }
    status
}

/// Returns the condition `ScaleTargetInitialized`: true once the Revision has reached its initial scale. Its resources
/// are available from the same moment on.
fn target_initialized(revision: &AppRevision) -> (UnixMillis, ConditionStatus) {
    if revision.scaling.initial_scale_reached {
        let (at, _) = last_transition(revision, ConditionType::RevisionResources);
        return (at, ConditionStatus::True(None));
    }
    (revision.meta.created, ConditionStatus::Unknown(None))
}

/// Returns the condition `Ready` of a PodAutoscaler by Knative's rule: the first false condition, else the first unknown
/// one, else true. It is as it is since the last change of that condition and of those before it, or of all.
pub(super) fn summarize_autoscaler(
    dependents: &[(UnixMillis, &ConditionStatus)],
) -> (UnixMillis, ConditionStatus) {
    let position = |is_worst: fn(&ConditionStatus) -> bool| {
        dependents.iter().position(|(_, status)| is_worst(status))
    };
    let worst = position(|it| matches!(it, ConditionStatus::False(_)))
        .or_else(|| position(|it| matches!(it, ConditionStatus::Unknown(_))));
    let deciding = worst.map_or(dependents.len(), |worst| worst + 1);
    let since = dependents.iter().take(deciding).map(|(at, _)| *at).max().unwrap_or_default();
    (since, worst.map_or(ConditionStatus::True(None), |worst| dependents[worst].1.clone()))
}

/// Returns the mode of new connections, and the number of activators that serve the Revision, 0 meaning all of them.
///
/// The mode is `Serve` (direct) once a pod is ready and nothing requires activators. `may_serve` is false if something
/// does: the decision of the autoscaler, a hard limit, a split of traffic, the user's choice.
pub(super) fn serverless_service_mode(
    revision: &AppRevision,
    class: AutoscalerClass,
    may_serve: bool,
) -> (ServerlessServiceMode, i32) {
    if class != AutoscalerClass::Kpa {
        // Direct to the pods; without pods through all activators.
        return (ServerlessServiceMode::Serve, 0);
    }
    // Before the first decision, no path is known.
    let is_decided = revision.scaling.decision.is_some();
    let serves = is_decided && may_serve && revision.scaling.actual_scale > 0;
    (
        if serves { ServerlessServiceMode::Serve } else { ServerlessServiceMode::Proxy },
        MIN_ACTIVATORS,
    )
}

/// Returns the condition `EndpointsPopulated` of a Revision's ServerlessService: true while a pod is ready. No time is
/// stored for it, so it has the time of the Revision's `Active`.
fn endpoints_populated(revision: &AppRevision) -> (UnixMillis, ConditionStatus) {
    let (at, _) = last_transition(revision, ConditionType::RevisionActive);
    let none = || ConditionReason::new("NoHealthyBackends", "SKS has no healthy backends");
    (
        at,
        if revision.scaling.actual_scale > 0 {
            ConditionStatus::True(None)
        } else {
            ConditionStatus::Unknown(Some(none()))
        },
    )
}

/// Returns the status of a Revision's ServerlessService.
pub(super) fn serverless_service_status(
    revision: &AppRevision,
    mode: ServerlessServiceMode,
) -> Value {
    let (at, populated) = endpoints_populated(revision);
    let activators = match mode {
        ServerlessServiceMode::Proxy => ConditionStatus::True(None),
        ServerlessServiceMode::Serve => ConditionStatus::False(ConditionReason::new("", "")),
    };
    let mut activators = render_condition("ActivatorEndpointsPopulated", &activators, at);
    // With this severity the condition does not count for `Ready`.
    activators["severity"] = json!("Info");
    json!({
        "serviceName": &*revision.name,
        "privateServiceName": names::private_service_name(&revision.name),
        "conditions": [
            activators,
            render_condition("EndpointsPopulated", &populated, at),
            render_condition("Ready", &populated, at),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_condition_of_a_pod_autoscaler_has_the_time_of_its_own_change() {
        let at = |seconds: u64| UnixMillis(seconds * 1000);
        let times = |revision: &AppRevision| {
            let status = pod_autoscaler_status(revision, "default", &ClusterState::default());
            let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            let time = |it: &Value| it["lastTransitionTime"].as_str().map(str::to_owned);
            conditions.iter().map(time).collect::<Vec<_>>()
        };
        let expected = |all: [u64; 4]| all.map(|it| Some(at(it).rfc3339())).to_vec();
        let mut revision = AppRevision { name: "hello-00001".into(), ..AppRevision::default() };
        revision.meta.created = at(1);
        let (active, resources) = (ConditionType::RevisionActive, ConditionType::RevisionResources);
        revision.conditions.set(active, ConditionStatus::Unknown(None), at(2));
        // In the order of the status: Active, Ready, SKSReady, ScaleTargetInitialized.
        assert_eq!(times(&revision), expected([2, 2, 2, 1]));
        revision.conditions.set(active, ConditionStatus::True(None), at(4));
        revision.conditions.set(resources, ConditionStatus::True(None), at(5));
        revision.scaling.initial_scale_reached = true;
        revision.scaling.actual_scale = 1;
        assert_eq!(times(&revision), expected([4, 5, 4, 5]));
        let idle = ConditionStatus::False(ConditionReason::NO_TRAFFIC);
        revision.conditions.set(active, idle, at(9));
        revision.scaling.actual_scale = 0;
        assert_eq!(times(&revision), expected([9, 9, 9, 5]));
    }
}
