//! Pure: standby of a Revision → its condition `StandbyAvailable`.

use super::{
    super::{RevisionPlanContext, pod_resizes},
    find_obstacle, is_agent_reporting, is_broken, requested_standby,
};
use crate::model::cluster_state::{
    AppRevision, ConditionReason, ConditionStatus, ConditionType, PodStage, RevisionPod,
};

/// Sets the condition about standby. It is absent until pods of the Revision are to stand by for the first time.
pub(in crate::decide::plan) fn update_condition(
    revision: &mut AppRevision,
    context: &RevisionPlanContext<'_>,
) {
    // The number of its pods is its user's, so none stands by.
    if revision.is_scaled_service {
        return;
    }
    let requested = requested_standby(context);
    let status = if let Some(reason) = requested.refused_default {
        ConditionStatus::False(reason)
    } else if requested.pods == 0 {
        // A condition that was set once must not go on with an old state.
        if !revision.conditions.is_set(ConditionType::RevisionStandby) {
            return;
        }
        let reason = ConditionReason::new("NotRequested", "No pods are to stand by.");
        ConditionStatus::True(Some(reason))
    } else {
        standby_status(requested.pods, revision, context)
    };
    revision.conditions.set(ConditionType::RevisionStandby, status, context.now);
}

/// Returns the status of standby of a Revision for which `pods` pods are to stand by.
fn standby_status(
    pods: u32,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> ConditionStatus {
    // First what the user has to change, then what the next wake or a recovery ends.
    if let Some(obstacle) = find_obstacle(pods, context) {
        let message = format!("Without effect: {}", obstacle.message());
        return ConditionStatus::False(ConditionReason::new("WithoutEffect", message));
    }
    // Before a broken Revision: another leader reads the stop from this condition.
    if let Some(stop) = &revision.scaling.standby_stop {
        return ConditionStatus::False(stop.reason.clone());
    }
    if is_broken(revision, context) {
        let message = "No pod becomes ready, so none is kept without load.";
        return ConditionStatus::False(ConditionReason::new("PodsFail", message));
    }
    // Such a pod gets no order, so it runs although it should stand by. Pods that never were ready have other reasons.
    let lacks_agent = |pod: &&RevisionPod| {
        pod.stage == PodStage::Serving
            && pod.was_ready
            && !pod.has_standby_order()
            && !is_agent_reporting(pod, context)
    };
    let lacks_orders = revision.ordered_pods() < revision.scaling.standby_scale;
    if let Some(pod) = revision.pods.iter().find(lacks_agent).filter(|_| lacks_orders) {
        let message = format!("The agent of node {:?} does not report", context.node(pod));
        return ConditionStatus::Unknown(Some(ConditionReason::new("AgentMissing", message)));
    }
    // Standby is available from here on. A reason only explains what may surprise the user.
    let max_scale = context.template.policy.max_scale;
    let bound = (1..pods).contains(&max_scale).then(|| {
        let message = format!("max-scale bounds the number of pods to {max_scale}");
        ConditionReason::new("MaxScale", message)
    });
    ConditionStatus::True(bound.or_else(|| pod_resizes::find_kept_requests(revision)))
}
