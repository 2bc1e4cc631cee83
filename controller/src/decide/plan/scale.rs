//! Pure: scale decision, initial scale and bounds → pods of a Revision.

use common::{local_node, wire::ConnectionPath};

use super::{PlanTimer, RevisionPlanContext, readiness, standby};
use crate::model::{
    cluster_state::{AppRevision, PlatformKind, PodStage, RevisionPod, RoutingState, Uid},
    scale_policy::AutoscalerClass,
};

/// Delay of the next pod after a pod ended before it was ever ready, in milliseconds.
const RETRY_MS: u64 = 1000;
/// Time after a stopping pod's grace period at which it is forgotten if the node has not reported its end, in ms.
const STOP_TIMEOUT_MS: u64 = 30_000;

/// Forgets pods that no longer exist.
pub(super) fn remove_ended_pods(
    revision: &mut AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let mut has_early_end = false;
    // As in Knative, the pod's grace period is `timeoutSeconds`.
    let grace = context.template.timeout.as_millis().try_into().unwrap_or(u64::MAX);
    revision.pods.retain(|pod| {
        let status = context.cluster.pods.statuses.get(&*pod.uid);
        let is_removed = status.is_some_and(|it| it.phase == local_node::PodRunPhase::Removed);
        let stop_timed_out = match pod.stage {
            PodStage::Stopping { since } if !is_undeleted_stopping_pod(pod) => {
                timer.is_due_or_schedule(since.plus_ms(grace).plus_ms(STOP_TIMEOUT_MS), context.now)
            }
            PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. } => false,
        };
        has_early_end |= is_removed && pod.stage == PodStage::Serving && !pod.was_ready;
        !is_removed && !stop_timed_out
    });
    if has_early_end {
        revision.scaling.retry_at = context.now.plus_ms(RETRY_MS);
    }
}

/// Returns the number of pods that a Revision needs for its load and its bounds. Pods that stand by come on top.
fn running_scale(
    revision: &AppRevision,
    is_leaving: bool,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    let policy = &context.template.policy;
    let is_reserve = revision.routing.state == RoutingState::Reserve;
    let min_scale = if is_reserve { 0 } else { policy.min_scale };
    let standby_scale = revision.scaling.standby_scale;
    // Kubernetes replaces pods by itself, and has more or fewer than requested meanwhile.
    let current = match context.cluster.settings.platform {
        // After a restart, only the orders show which pods stand by.
        PlatformKind::Local => {
            revision.serving_pods().saturating_sub(standby_scale.max(revision.ordered_pods()))
        }
        PlatformKind::Kubernetes => revision.scaling.requested_scale.saturating_sub(standby_scale),
    };
    let decided_scale = revision.scaling.decision.and_then(|it| it.requested_scale);
    let requested = match decided_scale {
        _ if is_leaving => 0,
        Some(requested) => requested,
        // A Revision starts once even without a Route: its Configuration is not ready before the Revision was.
        None if !revision.scaling.initial_scale_reached => policy.initial_scale.max(min_scale),
        None if is_reserve => 0,
        None => current.max(min_scale),
    };
    // As in Knative, the minimum overrides the maximum; until it is reached the initial scale does so as well.
    let initial_scale =
        if revision.scaling.initial_scale_reached { 0 } else { policy.initial_scale };
    let max_scale = policy.max_scale.max(min_scale).max(initial_scale);
    if policy.max_scale > 0 { requested.min(max_scale) } else { requested }
}

/// Returns the replicas that another autoscaler has set in the Revision's Deployment, or the number it begins with.
/// That is at least one: a HorizontalPodAutoscaler never scales up from zero.
fn external_scale(
    revision: &AppRevision,
    is_leaving: bool,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    let policy = &context.template.policy;
    let first_scale = policy.initial_scale.max(policy.min_scale).max(1);
    let key = context.revision_key(revision);
    let replicas = context.cluster.scaling.external_scales.get(&key).copied();
    if is_leaving { 0 } else { replicas.unwrap_or(first_scale) }
}

/// Scales to the requested number of pods: revives or adds pods at once, or drains the least busy ones. `is_leaving`:
/// the app or the Revision is being deleted, so no pod is requested.
pub(super) fn scale_pods(
    revision: &mut AppRevision,
    is_leaving: bool,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let running = match context.template.class {
        AutoscalerClass::Kpa => running_scale(revision, is_leaving, context),
        // Another autoscaler sets the number, and Kubernetes picks the pods to stop: each finishes its last request.
        AutoscalerClass::Hpa | AutoscalerClass::Foreign => {
            revision.scaling.requested_scale = external_scale(revision, is_leaving, context);
            return;
        }
    };
    let standby = standby::update_standby_scale(revision, running, is_leaving, context, timer);
    let requested = running.saturating_add(standby);
    (revision.scaling.requested_scale, revision.scaling.standby_scale) = (requested, standby);
    let [serving, target] =
        [revision.serving_pods(), requested].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
    if target > serving {
        let missing = target - serving;
        let revived = revive_pods(revision, missing, context);
        // On Kubernetes the Deployment's controller adds pods, by the number that `requested_scale` sets.
        let is_local = context.cluster.settings.platform == PlatformKind::Local;
        if is_local
            && missing > revived
            && timer.is_due_or_schedule(revision.scaling.retry_at, context.now)
        {
            (revived..missing).for_each(|_| add_pod(revision, context));
        }
    } else {
        remove_surplus_pods(revision, serving - target, context);
    }
    standby::assign_orders(revision, context);
}

/// Lets draining pods serve again, busiest first since they are warm; then pods that Kubernetes should have stopped and
/// did not. Pods that are not ready come after all others: they may never be. Returns the number of revived pods.
pub(super) fn revive_pods(
    revision: &mut AppRevision,
    missing: usize,
    context: &RevisionPlanContext<'_>,
) -> usize {
    let drains =
        |pod: &RevisionPod| matches!(pod.stage, PodStage::Draining { .. }) && !pod.is_terminating();
    let all = revision.pods.iter_mut();
    let mut pods: Vec<&mut RevisionPod> =
        all.filter(|pod| drains(pod) || is_undeleted_stopping_pod(pod)).collect();
    pods.sort_by_key(|pod| {
        let in_flight = context.requests_in_flight(pod);
        (!readiness::is_pod_ready(pod, context), !drains(pod), std::cmp::Reverse(in_flight))
    });
    pods.truncate(missing);
    let revived = pods.len();
    for pod in pods {
        pod.stage = PodStage::Serving;
    }
    revived
}

/// Returns true if a pod was ordered to stop and Kubernetes has not deleted it. Kubernetes makes the final choice: a
/// Deployment that replaces its pods keeps the new ones, although they were surplus when they came.
pub(super) fn is_undeleted_stopping_pod(pod: &RevisionPod) -> bool {
    let stopping = matches!(pod.stage, PodStage::Stopping { .. });
    stopping && pod.kube_status.as_ref().is_some_and(|it| !it.is_terminating)
}

fn add_pod(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    revision.scaling.pods_created += 1;
    let parts = [revision.meta.uid.to_string(), revision.scaling.pods_created.to_string()];
    let uid = Uid::derive(context.cluster.uid_seed, &[&parts[0], &parts[1]]);
    let name = format!("{}-deployment-{}", revision.name, pod_name_suffix(uid));
    revision.pods.push(RevisionPod::new(uid.to_string().into(), name.into(), context.now));
}

/// Returns five characters as Kubernetes generates them: without vowels, so that no words result.
fn pod_name_suffix(uid: Uid) -> String {
    const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let digit = |place: u32| {
        let digit = usize::try_from(uid.0 / 27u128.pow(place) % 27).unwrap_or_default();
        char::from(LETTERS[digit])
    };
    (0..5).map(digit).collect()
}

/// Drains or stops `count` pods: first those that are not ready, then those on standby, then the least busy, then the
/// newest.
pub(super) fn remove_surplus_pods(
    revision: &mut AppRevision,
    count: usize,
    context: &RevisionPlanContext<'_>,
) {
    let serving = |pod: &&mut RevisionPod| pod.stage == PodStage::Serving;
    let mut pods: Vec<&mut RevisionPod> = revision.pods.iter_mut().filter(serving).collect();
    pods.sort_by_key(|pod| {
        let ready = readiness::is_pod_ready(pod, context);
        let (runs, in_flight) = (!pod.has_standby_order(), context.requests_in_flight(pod));
        (ready, runs, in_flight, std::cmp::Reverse(pod.created), pod.uid.clone())
    });
    pods.into_iter().take(count).for_each(|pod| remove_pod(pod, context));
}

/// Lets a serving pod drain, or stop.
pub(super) fn remove_pod(pod: &mut RevisionPod, context: &RevisionPlanContext<'_>) {
    pod.stage = if pod.may_have_requests {
        PodStage::Draining { since: context.now }
    } else {
        // No request was ever routed to it, so there is nothing to drain.
        PodStage::Stopping { since: context.now }
    };
}

/// Returns the direct path if burst capacity allows it, else the activator path.
pub(super) fn burst_path(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> ConnectionPath {
    let burst_capacity = context.template.policy.target_burst_capacity;
    match revision.scaling.decision {
        // As in Knative: with another autoscaler, requests go directly to the pods that exist.
        _ if context.template.class != AutoscalerClass::Kpa => ConnectionPath::Direct,
        // No activator needs to hold the requests that thaw a pod.
        _ if burst_capacity >= 0.0 && standby::is_served_by_standby(revision, context) => {
            ConnectionPath::Direct
        }
        Some(decided) => decided.path,
        None if burst_capacity == 0.0 => ConnectionPath::Direct,
        None => ConnectionPath::Activator,
    }
}
