//! Pure: number of pods of a Revision that stand by → the pods that have standby orders.

use std::cmp::Reverse;

use common::wire::StandbyOrder;

use super::{
    super::{RevisionPlanContext, readiness},
    count_pods, is_agent_reporting, is_unreachable_server,
};
use crate::model::{
    cluster_state::{AppRevision, PodStage, RevisionPod},
    standby_policy::longest_probe_timeout,
};

/// Gives orders to pods, or withdraws them, so that as many pods have one as stand by.
///
/// Pods that are not ready get one first, then the least busy ones, so that the pods that serve go on. Of the pods with
/// an order, those that requests have thawed lose it first. Unreachable pods keep theirs, because no agent would act on
/// a change. A pod that a user debugs has none.
pub(in crate::decide::plan) fn assign_orders(
    revision: &mut AppRevision,
    context: &RevisionPlanContext<'_>,
) {
    let must_run = |pod: &&mut RevisionPod| pod.stage != PodStage::Serving || pod.is_debugged();
    for pod in revision.pods.iter_mut().filter(must_run) {
        withdraw_order(pod);
    }
    let scaling = &revision.scaling;
    let (requested_scale, standby_scale) = (scaling.requested_scale, scaling.standby_scale);
    let needed = requested_scale.saturating_sub(standby_scale);
    let unreachable = count_pods(revision, is_unreachable_server);
    let reachable = revision.serving_pods().saturating_sub(unreachable);
    // While pods are missing, those that exist carry the load. An unreachable pod counts as one that stands by.
    let spare = reachable.saturating_sub(needed);
    let wanted = to_usize(standby_scale.saturating_sub(unreachable).min(spare));
    let is_reachable =
        |pod: &&mut RevisionPod| pod.stage == PodStage::Serving && !is_unreachable_server(pod);
    let (ordered, mut running): (Vec<_>, Vec<_>) =
        revision.pods.iter_mut().filter(is_reachable).partition(|pod| pod.has_standby_order());
    if ordered.len() > wanted {
        let surplus = ordered.len() - wanted;
        return withdraw_orders(ordered, surplus, context);
    }
    let missing = wanted - ordered.len();
    // Without its agent a pod would stay as it is, and be unreachable as soon as it has an order.
    running.retain(|pod| pod.may_stand_by() && is_agent_reporting(pod, context));
    // The newest of equal pods: it is the first to leave as well when pods are removed. The uid makes the choice
    // repeatable.
    running.sort_by_key(|pod| {
        let is_ready = readiness::is_pod_ready(pod, context);
        let in_flight = context.requests_in_flight(pod);
        (is_ready, in_flight, Reverse(pod.created), pod.uid.clone())
    });
    for pod in running.into_iter().take(missing) {
        pod.standby_since = Some(context.now);
    }
}

/// Withdraws the orders of `surplus` pods.
fn withdraw_orders(
    mut ordered: Vec<&mut RevisionPod>,
    surplus: usize,
    context: &RevisionPlanContext<'_>,
) {
    // A pod that is not ready would serve nothing, so ready ones come first. Of these, the thawed ones are in use
    // already.
    ordered.sort_by_key(|pod| {
        let is_ready = readiness::is_pod_ready(pod, context);
        let in_flight = context.requests_in_flight(pod);
        (!is_ready, is_reported_frozen(pod, context), Reverse(in_flight), pod.uid.clone())
    });
    ordered.into_iter().take(surplus).for_each(withdraw_order);
}

fn withdraw_order(pod: &mut RevisionPod) {
    (pod.standby_since, pod.is_frozen) = (None, false);
}

/// Returns true if a pod is frozen by the last report of its agent. Unlike [`RevisionPod::is_frozen`], it is false
/// while a probe has thawed the pod.
fn is_reported_frozen(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    report.and_then(|it| it.standby.as_ref()).is_some_and(|it| it.is_frozen)
}

/// Returns the order to the agent of a pod's node; `None`: the pod runs.
pub(in crate::decide::plan) fn pod_order(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> Option<StandbyOrder> {
    let (template, policy) = (context.template, &context.template.policy);
    pod.has_standby_order().then(|| StandbyOrder {
        // As long as the autoscaler waits before it decides that there is no load.
        quiet_time: policy.stable_window + policy.scale_to_zero_retention_period,
        probe_time: longest_probe_timeout(&template.raw.spec.pod),
        reclaims_memory: template.standby.reclaims_memory,
        agent_timeout: context.cluster.settings.scale_policy.standby.agent_timeout,
    })
}

fn to_usize(pods: u32) -> usize {
    usize::try_from(pods).unwrap_or(usize::MAX)
}
