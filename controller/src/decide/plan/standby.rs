//! Pure: policy, load and reports of agents → number of pods of a Revision that stand by.
//!
//! A decision of zero pods means that there is no load. The Revision then keeps some pods, each with a standby order.
//! By this order, the pod's agent freezes the pod while nothing uses it. With load, only the pods beyond those that the
//! load needs have orders.

mod condition;
mod orders;

use std::time::Duration;

use common::wire::ClientComponent;

pub(super) use self::{
    condition::update_condition,
    orders::{assign_orders, pod_order},
};
use super::{PlanTimer, RevisionPlanContext, pod_resizes, readiness};
use crate::model::{
    cluster_state::{
        AppRevision, ConditionReason, PodStage, RevisionPod, RoutingState, StandbyStop,
    },
    knative::key,
    reporters,
    standby_obstacle::StandbyObstacle,
    standby_policy::{MAX_STANDBY_PODS, parse_pods},
};

/// Time after its first sight of a pod for which this replica waits for a stream of the pod's agent, in milliseconds.
/// A replica that starts has no stream at first, although the agents run.
const FIRST_STREAM_MS: u64 = 5000;
/// Number of restarts of a pod's containers up to which a pod that has been ready is kept without load.
const MAX_RESTARTS: u32 = 3;

/// Updates the standby of a pod by the last report of its agent: frozen or not, and reachable or not.
pub(super) fn update_pod(
    pod: &mut RevisionPod,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let was_frozen = pod.is_frozen;
    pod.is_frozen = counts_as_frozen(pod, context);
    // The longest time of standby counts from the last request, which has thawed the pod. The order may stay: without
    // an autoscaler no decision withdraws it.
    if was_frozen && !pod.is_frozen && pod.has_standby_order() {
        pod.standby_since = Some(context.now);
    }
    pod.is_unreachable = is_unreachable(pod, context, timer);
}

/// Returns true if a pod counts as frozen by the last report of its agent. A pod that was frozen and is thawed counts
/// until it has a request. Most pods are thawed only for a moment, by a probe of the kubelet.
///
/// The same holds for a restart of the agent, which thaws its pods before it knows their orders. Otherwise each upgrade
/// of the agents would restore and reduce the resource requests of all frozen pods.
fn counts_as_frozen(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    if !pod.has_standby_order() {
        return false;
    }
    // Without a report nothing has changed that is known.
    let Some(report) = context.cluster.pods.reports.get(&*pod.uid) else { return pod.is_frozen };
    let was_frozen = pod.is_frozen && report.in_flight == 0;
    match &report.standby {
        Some(standby) => standby.is_frozen || (was_frozen && standby.failure.is_empty()),
        // The agent does not know the order yet.
        None => was_frozen,
    }
}

/// Returns true if a pod may be frozen and no agent thaws it, so that no request may be sent there. Either its agent
/// has had no stream of reports for `standby-agent-timeout`, or an activator passes the pod over.
fn is_unreachable(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    // After its order is withdrawn, a pod is frozen until its agent has acted on that and reports no standby.
    let may_be_frozen =
        pod.has_standby_order() || report.is_some_and(|report| report.standby.is_some());
    if !may_be_frozen {
        return false;
    }
    // An agent that hangs keeps its streams open.
    if context.cluster.pods.reporters.is_passed_over(&pod.uid) {
        return true;
    }
    if is_agent_reporting(pod, context) {
        return false;
    }
    let silent_agents = &context.cluster.pods.silent_agents;
    let timeout = context.cluster.settings.scale_policy.standby.agent_timeout;
    // A replica that has had no stream of the agent at all cannot tell since when it is silent.
    let silent_at = match silent_agents.get(context.node(pod)) {
        Some(ended_at) => ended_at.plus_ms(to_ms(timeout)),
        None => pod.first_seen_at.plus_ms(FIRST_STREAM_MS),
    };
    timer.is_due_or_schedule(silent_at, context.now)
}

/// Returns true if the agent of a pod's node has a stream of reports to this replica.
fn is_agent_reporting(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let agent = reporters::reporter_id(ClientComponent::Agent, context.node(pod));
    context.cluster.pods.reporters.is_reporting(&agent)
}

/// Returns true if the last report of a pod's agent changes the planned standby of the pod or of its Revision.
pub(super) fn needs_plan(
    pod: &RevisionPod,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> bool {
    // A failure stops the standby of the whole Revision, and only the leader decides that.
    let is_new_failure = context.cluster.is_leader
        && revision.scaling.standby_stop.is_none()
        && find_failure(pod, context).is_some();
    is_new_failure || counts_as_frozen(pod, context) != pod.is_frozen
}

/// Returns the failure of a pod's standby order, as its agent reports it.
fn find_failure<'a>(pod: &RevisionPod, context: &RevisionPlanContext<'a>) -> Option<&'a str> {
    let standby = context.cluster.pods.reports.get(&*pod.uid)?.standby.as_ref()?;
    Some(standby.failure.as_str()).filter(|it| pod.has_standby_order() && !it.is_empty())
}

/// Number of pods that are to stand by while a Revision sleeps, by the settings alone.
#[derive(Debug)]
struct RequestedStandby {
    pods: u32,
    /// Explanation for users if the default of the namespace is no number of pods, and so has no effect.
    refused_default: Option<ConditionReason>,
}

/// Returns the number of pods that are to stand by. The template counts before its namespace, and the namespace before
/// `config-autoscaler`.
fn requested_standby(context: &RevisionPlanContext<'_>) -> RequestedStandby {
    let template = context.template;
    // The template's policy has the number of `config-autoscaler` where its annotations name none.
    let by_policy = RequestedStandby { pods: template.standby.pods, refused_default: None };
    let own = template.annotation(key::STANDBY).and_then(|text| parse_pods(text.trim()).ok());
    let default = context.cluster.standby_defaults.get(context.namespace);
    let Some(default) = default.filter(|_| own.is_none()) else { return by_policy };
    match parse_pods(default.trim()) {
        Ok(pods) => RequestedStandby { pods, ..by_policy },
        Err(_) => {
            let message = format!(
                "The annotation {} of the namespace has no effect: {default:?} is no number from 0 to {MAX_STANDBY_PODS}",
                key::STANDBY
            );
            let reason = ConditionReason::new("InvalidDefault", message);
            RequestedStandby { refused_default: Some(reason), ..by_policy }
        }
    }
}

/// Returns the setting because of which none of the `pods` requested pods stands by; `None`: there is none.
fn find_obstacle(pods: u32, context: &RevisionPlanContext<'_>) -> Option<StandbyObstacle> {
    let template = context.template;
    let pod = &template.raw.spec.pod;
    let find = || StandbyObstacle::find(pods, pod, template.class, &template.policy);
    (pods > 0).then(find).flatten()
}

/// Returns the number of pods that a Revision keeps while it sleeps. `is_leaving`: the app or the Revision is being
/// deleted.
fn kept_pods(revision: &AppRevision, is_leaving: bool, context: &RevisionPlanContext<'_>) -> u32 {
    let requested = requested_standby(context).pods;
    // No request comes to a Revision that no Route names, so none of its pods would wake.
    let is_excluded = is_leaving
        || revision.routing.state == RoutingState::Reserve
        || revision.scaling.standby_stop.is_some()
        || is_broken(revision, context);
    if is_excluded || find_obstacle(requested, context).is_some() {
        return 0;
    }
    match context.template.policy.max_scale {
        0 => requested,
        max_scale => requested.min(max_scale),
    }
}

/// Returns true if no pod of a Revision becomes ready. Without load they would be started again and again.
///
/// A pod that has been ready is not broken by a few restarts of its containers. Lack of memory may end the processes of
/// a frozen pod, and its kubelet starts them again.
fn is_broken(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> bool {
    let may_recover = |pod: &RevisionPod| {
        pod.stage == PodStage::Serving
            && pod.was_ready
            && count_restarts(pod, context) <= MAX_RESTARTS
    };
    revision.scaling.is_failing
        && revision.scaling.actual_scale == 0
        && !revision.pods.iter().any(may_recover)
}

/// Returns the number of restarts of all containers of a pod; 0 if nothing is known of them.
fn count_restarts(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> u32 {
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    status.into_iter().flat_map(|it| &it.containers).map(|it| it.restarts).sum()
}

/// Returns the number of pods that stand by beside the `running` ones, which load needs. Also ends and begins standby
/// stops.
///
/// While there is load, a pod that its agent cannot thaw takes no part of it, so another pod is needed in its place.
pub(super) fn update_standby_scale(
    revision: &mut AppRevision,
    running: u32,
    is_leaving: bool,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> u32 {
    update_stop(revision, running, context, timer);
    let beyond_load = kept_pods(revision, is_leaving, context).saturating_sub(running);
    // Without load an unreachable pod is one of those that stand by, and needs no replacement.
    let unreachable = if running == 0 { 0 } else { count_pods(revision, is_unreachable_server) };
    beyond_load.max(unreachable)
}

/// Ends the standby stop of a Revision that wakes. Begins one after a failure, or once a pod was frozen for the longest
/// time.
fn update_stop(
    revision: &mut AppRevision,
    running: u32,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let is_over = match &mut revision.scaling.standby_stop {
        Some(stop) if running == 0 => {
            // A stop at the end of the longest time that began under load has ended spare pods. The pods that ran until
            // now have not stood by yet, so it does not concern them.
            let is_of_spare_pods = !stop.has_slept && stop.reason.reason == StandbyStop::TIME_OVER;
            stop.has_slept = true;
            is_of_spare_pods
        }
        // A need for pods after the sleep is a wake.
        Some(stop) => stop.has_slept,
        None => true,
    };
    // A new stop may begin in the same plan, as the reason of the last one may still hold.
    if is_over {
        let reason = find_stop_reason(revision, context, timer);
        revision.scaling.standby_stop =
            reason.map(|reason| Box::new(StandbyStop { reason, has_slept: running == 0 }));
    }
}

/// Returns the reason for which the standby of a Revision has to stop. A pod cannot be frozen, did not get its resource
/// requests back, or was frozen for the longest time.
fn find_stop_reason(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> Option<ConditionReason> {
    let failure = revision.pods.iter().find_map(|it| Some((it, find_failure(it, context)?)));
    if let Some((pod, failure)) = failure {
        let message = format!("Pod {} cannot be frozen: {failure}", pod.name);
        return Some(ConditionReason::new(StandbyStop::FREEZE_FAILED, message));
    }
    if let Some(reason) = pod_resizes::find_stop_reason(revision) {
        return Some(reason);
    }
    // One frozen pod whose time is over ends the standby of all.
    let ttl_ms = to_ms(context.template.standby.ttl?);
    let frozen = revision.pods.iter().filter(|pod| pod.is_frozen);
    let mut ends = frozen.filter_map(|pod| Some(pod.standby_since?.plus_ms(ttl_ms)));
    let message = "A pod was frozen for as long as rouse.dev/standby-ttl allows";
    ends.any(|at| timer.is_due_or_schedule(at, context.now))
        .then(|| ConditionReason::new(StandbyStop::TIME_OVER, message))
}

/// Returns true if a pod serves by its stage, and its agent does not report.
fn is_unreachable_server(pod: &RevisionPod) -> bool {
    pod.stage == PodStage::Serving && pod.is_unreachable
}

/// Returns true if a Revision without load has ready pods, and all of these have standby orders. Requests thaw them
/// without an activator.
pub(super) fn is_served_by_standby(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> bool {
    let decided = revision.scaling.decision.and_then(|it| it.requested_scale);
    let is_server = |pod: &&RevisionPod| {
        pod.stage == PodStage::Serving && readiness::is_pod_ready(pod, context)
    };
    let mut servers = revision.pods.iter().filter(is_server).peekable();
    // The autoscaler withdraws its decision on a Revision that is asleep.
    decided.unwrap_or(0) == 0
        && servers.peek().is_some()
        && servers.all(RevisionPod::has_standby_order)
}

/// Counts the pods of a Revision that are ready, serve, and have no standby order.
pub(super) fn count_running_ready_pods(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    count_pods(revision, |pod| {
        pod.stage == PodStage::Serving
            && !pod.has_standby_order()
            && readiness::is_pod_ready(pod, context)
    })
}

/// Counts the pods of a Revision for which `is_counted` is true.
fn count_pods(revision: &AppRevision, is_counted: impl Fn(&RevisionPod) -> bool) -> u32 {
    let counted = revision.pods.iter().filter(|pod| is_counted(pod)).count();
    u32::try_from(counted).unwrap_or(u32::MAX)
}

fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
