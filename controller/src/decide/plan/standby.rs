//! Pure: policy, load and reports of agents → pods of a Revision that stand by, and their orders.
//!
//! A decision of zero pods means that there is no load. The Revision then keeps some pods, each with a standby order.
//! By it, the pod's agent freezes the pod while nothing uses it. With load, only the pods beyond those that it needs
//! have orders.

use std::{cmp::Reverse, time::Duration};

use common::wire::{ClientComponent, StandbyOrder};

use super::{PlanTimer, RevisionPlanContext, pod_resizes, readiness};
use crate::model::{
    cluster_state::{
        AppRevision, ConditionReason, ConditionStatus, ConditionType, PodStage, RevisionPod,
        RoutingState, StandbyStop,
    },
    knative::key,
    reporters,
    standby_obstacle::StandbyObstacle,
    standby_policy::{MAX_STANDBY_PODS, longest_probe_timeout, parse_pods},
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
    // Without an autoscaler the order stays. The time that a pod may be frozen is one without a request.
    if was_frozen && !pod.is_frozen && pod.has_standby_order() {
        pod.standby_since = Some(context.now);
    }
    pod.is_unreachable = is_unreachable(pod, context, timer);
}

/// Returns true if a pod counts as frozen by the last report of its agent. One that was frozen and is thawed counts
/// until it has a request: most pods are thawed only for a moment, by a probe of the kubelet.
///
/// The same holds for a restart of the agent, which thaws its pods before it knows their orders. Otherwise each upgrade
/// of the agents would restore and reduce the requests of all frozen pods.
fn counts_as_frozen(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    if !pod.has_standby_order() {
        return false;
    }
    let Some(report) = context.cluster.pods.reports.get(&*pod.uid) else { return pod.is_frozen };
    let was_frozen = pod.is_frozen && report.in_flight == 0;
    match &report.standby {
        Some(standby) => standby.is_frozen || (was_frozen && standby.failure.is_empty()),
        None => was_frozen,
    }
}

/// Returns true if a pod may be frozen and its agent has had no stream of reports for too long. No other component
/// would thaw the pod, so no request may be sent there.
fn is_unreachable(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    // A pod whose order is withdrawn is frozen until its agent has acted on that.
    let may_be_frozen =
        pod.has_standby_order() || report.is_some_and(|report| report.standby.is_some());
    if !may_be_frozen || is_agent_reporting(pod, context) {
        return false;
    }
    let silent_agents = &context.cluster.pods.silent_agents;
    let timeout = context.cluster.settings.scale_policy.standby.agent_timeout;
    let silent_at = match silent_agents.get(context.node(pod)) {
        Some(ended_at) => ended_at.plus_ms(to_ms(timeout)),
        None => pod.first_seen_at.plus_ms(FIRST_STREAM_MS),
    };
    timer.is_due_or_schedule(silent_at, context.now)
}

fn is_agent_reporting(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let agent = reporters::reporter_id(ClientComponent::Agent, context.node(pod));
    context.cluster.pods.reporters.is_reporting(&agent)
}

/// Returns true if the last report of a pod's agent changes what a plan makes of the pod's standby.
pub(super) fn needs_plan(
    pod: &RevisionPod,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> bool {
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

/// Number of pods that are to stand by while a Revision sleeps.
#[derive(Debug)]
struct StandbyRequest {
    pods: u32,
    /// Explanation of the default of the namespace, if it cannot be read.
    refused_default: Option<ConditionReason>,
}

/// Returns the number of pods that are to stand by: of the template, else of the namespace or `config-autoscaler`.
fn requested_standby(context: &RevisionPlanContext<'_>) -> StandbyRequest {
    let template = context.template;
    let given = StandbyRequest { pods: template.standby.pods, refused_default: None };
    let own = template.annotation(key::STANDBY).and_then(|text| parse_pods(text.trim()).ok());
    let default = context.cluster.standby_defaults.get(context.namespace);
    let Some(default) = default.filter(|_| own.is_none()) else { return given };
    match parse_pods(default.trim()) {
        Ok(pods) => StandbyRequest { pods, ..given },
        Err(_) => {
            let message = format!(
                "The annotation {} of the namespace has no effect: {default:?} is no number from 0 to {MAX_STANDBY_PODS}",
                key::STANDBY
            );
            let reason = ConditionReason::new("InvalidDefault", message);
            StandbyRequest { refused_default: Some(reason), ..given }
        }
    }
}

/// Returns the setting because of which none of `pods` pods stands by.
fn find_obstacle(pods: u32, context: &RevisionPlanContext<'_>) -> Option<StandbyObstacle> {
    let template = context.template;
    let pod = &template.raw.spec.pod;
    let find = || StandbyObstacle::find(pods, pod, template.class, &template.policy);
    (pods > 0).then(find).flatten()
}

/// Returns the number of pods that a Revision keeps while it sleeps.
fn kept_pods(revision: &AppRevision, is_leaving: bool, context: &RevisionPlanContext<'_>) -> u32 {
    let requested = requested_standby(context).pods;
    // No request comes to a Revision that no Route names.
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
/// A pod that has been ready, and whose containers have ended a few times only, is not broken: lack of memory may end
/// the processes of a frozen pod, and its kubelet starts them again.
fn is_broken(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> bool {
    let may_recover = |pod: &RevisionPod| {
        pod.stage == PodStage::Serving && pod.was_ready && restarts(pod, context) <= MAX_RESTARTS
    };
    revision.scaling.is_failing
        && revision.scaling.actual_scale == 0
        && !revision.pods.iter().any(may_recover)
}

/// Returns how often containers of a pod were started again.
fn restarts(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> u32 {
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    status.into_iter().flat_map(|it| &it.containers).map(|it| it.restarts).sum()
}

/// Returns the number of pods that stand by beside the `running` ones, which load needs. Ends and begins stops.
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
    let unreachable = if running == 0 { 0 } else { count(revision, is_unreachable_server) };
    beyond_load.max(unreachable)
}

/// Ends the stop of standby of a Revision that wakes, or begins one after a failure or at the end of a pod's time.
fn update_stop(
    revision: &mut AppRevision,
    running: u32,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let is_over = match &mut revision.scaling.standby_stop {
        Some(stop) if running == 0 => {
            // It ended spare pods beside running ones. Those that stand by from now on have their whole time.
            let is_of_spare_pods = !stop.has_slept && stop.reason.reason == StandbyStop::TIME_OVER;
            stop.has_slept = true;
            is_of_spare_pods
        }
        Some(stop) => stop.has_slept,
        None => true,
    };
    if is_over {
        let reason = find_stop_reason(revision, context, timer);
        revision.scaling.standby_stop =
            reason.map(|reason| Box::new(StandbyStop { reason, has_slept: running == 0 }));
    }
}

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
    let ttl_ms = to_ms(context.template.standby.ttl?);
    let frozen = revision.pods.iter().filter(|pod| pod.is_frozen);
    let mut ends = frozen.filter_map(|pod| Some(pod.standby_since?.plus_ms(ttl_ms)));
    let message = "A pod was frozen for as long as rouse.dev/standby-ttl allows";
    ends.any(|at| timer.is_due_or_schedule(at, context.now))
        .then(|| ConditionReason::new(StandbyStop::TIME_OVER, message))
}

/// Gives orders to pods, or withdraws them, so that as many pods have one as stand by.
///
/// Pods that are not ready get one first, then the least busy ones: those that serve go on. Of the pods with an order,
/// those that requests have thawed lose it first. Unreachable pods keep theirs, because no agent would act on a change.
/// A pod that a user debugs has none.
pub(super) fn assign_orders(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    let must_run = |pod: &&mut RevisionPod| pod.stage != PodStage::Serving || pod.is_debugged();
    for pod in revision.pods.iter_mut().filter(must_run) {
        withdraw_order(pod);
    }
    let scaling = &revision.scaling;
    let (requested_scale, standby_scale) = (scaling.requested_scale, scaling.standby_scale);
    let needed = requested_scale.saturating_sub(standby_scale);
    let unreachable = count(revision, is_unreachable_server);
    let reachable = revision.serving_pods().saturating_sub(unreachable);
    // While pods are missing, those that exist carry the load.
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

fn is_reported_frozen(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    report.and_then(|it| it.standby.as_ref()).is_some_and(|it| it.is_frozen)
}

fn is_unreachable_server(pod: &RevisionPod) -> bool {
    pod.stage == PodStage::Serving && pod.is_unreachable
}

/// Returns the order to the agent of a pod's node; `None`: the pod runs.
pub(super) fn pod_order(
    pod: &RevisionPod,
    context: &RevisionPlanContext<'_>,
) -> Option<StandbyOrder> {
    let (template, policy) = (context.template, &context.template.policy);
    pod.has_standby_order().then(|| StandbyOrder {
        // As long as the autoscaler waits before it decides that there is no load.
        quiet_time: policy.stable_window + policy.scale_to_zero_retention_period,
        probe_time: longest_probe_timeout(&template.raw.spec.pod),
        reclaims_memory: template.standby.reclaims_memory,
    })
}

/// Returns true if a sleeping Revision is served by pods that stand by: requests thaw them without an activator.
pub(super) fn is_served_by_standby(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> bool {
    let decided = revision.scaling.decision.and_then(|it| it.requested_scale);
    let is_server = |pod: &&RevisionPod| {
        pod.stage == PodStage::Serving && readiness::is_pod_ready(pod, context)
    };
    let mut servers = revision.pods.iter().filter(is_server).peekable();
    // A Revision that fell asleep has no decision any more.
    decided.unwrap_or(0) == 0
        && servers.peek().is_some()
        && servers.all(RevisionPod::has_standby_order)
}

/// Sets the condition about standby. It is absent until pods are to stand by once.
pub(super) fn update_condition(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    if revision.is_scaled_service {
        return;
    }
    let request = requested_standby(context);
    let status = if let Some(reason) = request.refused_default {
        ConditionStatus::False(reason)
    } else if request.pods == 0 {
        if !revision.conditions.is_set(ConditionType::RevisionStandby) {
            return;
        }
        let reason = ConditionReason::new("NotRequested", "No pods are to stand by.");
        ConditionStatus::True(Some(reason))
    } else {
        standby_status(request.pods, revision, context)
    };
    revision.conditions.set(ConditionType::RevisionStandby, status, context.now);
}

/// Returns the status of standby of a Revision for which `pods` pods are to stand by.
fn standby_status(
    pods: u32,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> ConditionStatus {
    if let Some(obstacle) = find_obstacle(pods, context) {
        let message = format!("Without effect: {}", obstacle.message());
        return ConditionStatus::False(ConditionReason::new("WithoutEffect", message));
    }
    if let Some(stop) = &revision.scaling.standby_stop {
        return ConditionStatus::False(stop.reason.clone());
    }
    if is_broken(revision, context) {
        let message = "No pod becomes ready, so none is kept without load.";
        return ConditionStatus::False(ConditionReason::new("PodsFail", message));
    }
    let without_agent = |pod: &&RevisionPod| {
        pod.stage == PodStage::Serving
            && pod.was_ready
            && !pod.has_standby_order()
            && !is_agent_reporting(pod, context)
    };
    let lacks_orders = revision.ordered_pods() < revision.scaling.standby_scale;
    if let Some(pod) = revision.pods.iter().find(without_agent).filter(|_| lacks_orders) {
        let message = format!("The agent of node {:?} does not report", context.node(pod));
        return ConditionStatus::Unknown(Some(ConditionReason::new("AgentMissing", message)));
    }
    let max_scale = context.template.policy.max_scale;
    let bound = (1..pods).contains(&max_scale).then(|| {
        let message = format!("max-scale bounds the number of pods to {max_scale}");
        ConditionReason::new("MaxScale", message)
    });
    ConditionStatus::True(bound.or_else(|| pod_resizes::find_kept_requests(revision)))
}

/// Counts the pods of a Revision that are ready, serve, and have no standby order.
pub(super) fn count_running_ready_pods(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    count(revision, |pod| {
        pod.stage == PodStage::Serving
            && !pod.has_standby_order()
            && readiness::is_pod_ready(pod, context)
    })
}

fn count(revision: &AppRevision, is_counted: impl Fn(&RevisionPod) -> bool) -> u32 {
    let counted = revision.pods.iter().filter(|pod| is_counted(pod)).count();
    u32::try_from(counted).unwrap_or(u32::MAX)
}

fn to_usize(pods: u32) -> usize {
    usize::try_from(pods).unwrap_or(usize::MAX)
}

fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
