//! Pure: scale decision, initial scale and bounds → pods of a Revision.

use common::{
    local_node::{self, ContainerRunState},
    wire::ConnectionPath,
};

use super::{PlanTimer, RevisionPlanContext};
use crate::model::{
    cluster_state::{
        AppRevision, KubeletReadiness, ParsedTemplate, PlatformKind, PodStage, RevisionPod,
        RoutingState, SteadyReadiness, Uid, UnixMillis,
    },
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

/// Returns the requested scale of a Revision: the number of pods that it should have.
fn requested_scale(
    revision: &AppRevision,
    is_leaving: bool,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    let policy = &context.template.policy;
    let is_reserve = revision.routing.state == RoutingState::Reserve;
    let min_scale = if is_reserve { 0 } else { policy.min_scale };
    // Kubernetes replaces pods by itself, and has more or fewer than requested meanwhile.
    let current = match context.cluster.settings.platform {
        PlatformKind::Local => revision.serving_pods(),
        PlatformKind::Kubernetes => revision.scaling.requested_scale,
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
    let requested = match context.template.class {
        AutoscalerClass::Kpa => requested_scale(revision, is_leaving, context),
        // Another autoscaler sets the number, and Kubernetes picks the pods to stop: each finishes its last request.
        AutoscalerClass::Hpa | AutoscalerClass::Foreign => {
            revision.scaling.requested_scale = external_scale(revision, is_leaving, context);
            return;
        }
    };
    revision.scaling.requested_scale = requested;
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
        let in_flight = requests_in_flight(pod, context);
        (!is_pod_ready(pod, context), !drains(pod), std::cmp::Reverse(in_flight))
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

fn requests_in_flight(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> u64 {
    context.cluster.pods.reports.get(&*pod.uid).map_or(0, |report| report.in_flight)
}

/// Drains or stops `count` pods: first those that are not ready, then the least busy, then the newest.
pub(super) fn remove_surplus_pods(
    revision: &mut AppRevision,
    count: usize,
    context: &RevisionPlanContext<'_>,
) {
    let serving = |pod: &&mut RevisionPod| pod.stage == PodStage::Serving;
    let mut pods: Vec<&mut RevisionPod> = revision.pods.iter_mut().filter(serving).collect();
    pods.sort_by_key(|pod| {
        let ready = is_pod_ready(pod, context);
        (ready, requests_in_flight(pod, context), std::cmp::Reverse(pod.created), pod.uid.clone())
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

/// Returns true if requests may be sent to a pod: it is reported ready, and all its containers run.
///
/// The serving container's listener is known before the runtime reports the container. Of other containers the report
/// is required, since requests may need them. If only the kubelet can run a probe, its readiness is required, too: a
/// command that passes proves nothing about the port. The same holds for a pod with readiness gates. Without an agent's
/// report the kubelet's readiness alone counts. Pods of a lost node are not ready. Kubernetes withdraws readiness only
/// from pods that were ready, so `is_lost` covers the others.
pub(super) fn is_pod_ready(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    is_ready_with_report(pod, report.map(|it| it.ready), context)
}

/// Returns true if a pod is ready as soon as its agent reports it so, because nothing else is missing. Activators may
/// then act on that report before the next RouteTable.
///
/// The agent must have reported the pod's address already, so that the table names the same one. Its reports also show
/// later if the pod is drained. Pods of the local node never await one, since its activator gets no reports.
pub(super) fn awaits_report(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let report = context.cluster.pods.reports.get(&*pod.uid);
    let is_unready_at_address = report.is_some_and(|it| !it.ready && it.address.is_some());
    pod.stage == PodStage::Serving
        && pod.kube_status.is_some()
        && is_unready_at_address
        && is_ready_with_report(pod, Some(true), context)
}

/// Returns true if requests may be sent to a pod whose agent reports this readiness; `None`: it reports nothing.
fn is_ready_with_report(
    pod: &RevisionPod,
    reported: Option<bool>,
    context: &RevisionPlanContext<'_>,
) -> bool {
    let kubelet = pod.kube_status.as_ref().map(|it| it.kubelet_readiness);
    let is_lost = pod.kube_status.as_ref().is_some_and(|it| context.cluster.is_node_lost(&it.node));
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    let own_template = context.own_template(pod);
    let template = own_template.as_deref().unwrap_or(context.template);
    // The local node reports readiness in the pod's status.
    let node_reports_ready = match kubelet {
        Some(kubelet) => kubelet == KubeletReadiness::Ready,
        None => status.map_or_else(|| pod.restored_address.is_some(), |it| it.ready),
    };
    let ready = match reported {
        _ if kubelet == Some(KubeletReadiness::NoLongerReady) || is_lost => false,
        Some(is_reported_ready) => {
            let has_gates = pod.kube_status.as_ref().is_some_and(|it| it.has_readiness_gates);
            let needs_kubelet = has_gates || template.needs_kubelet_probes();
            is_reported_ready && (node_reports_ready || !needs_kubelet)
        }
        None => pod.restored_address.is_some() || kubelet == Some(KubeletReadiness::Ready),
    };
    // The kubelet's readiness covers all containers; a restored pod had passed this check before the restart.
    let are_all_running =
        kubelet == Some(KubeletReadiness::Ready) || pod.restored_address.is_some();
    ready
        && !status.is_some_and(has_crashed_container)
        && (are_all_running || are_other_containers_running(status, template))
}

/// Returns true if every main container beside the serving one runs.
fn are_other_containers_running(
    status: Option<&local_node::PodRunStatus>,
    template: &ParsedTemplate,
) -> bool {
    let containers = template.raw.spec.pod.containers.iter().enumerate();
    let mut others = containers.filter(|(index, _)| *index != template.serving_index);
    others.all(|(_, container)| {
        let containers_status = status.into_iter().flat_map(|status| &status.containers);
        let mut containers_status = containers_status.filter(|it| it.name == container.name);
        containers_status.any(|it| it.state == ContainerRunState::Running)
    })
}

/// Time that all containers of a pod must run before the pod proves that its Revision works, in milliseconds. Without
/// it a container that ends soon after each start would take the traffic from a Revision that works.
const PROVEN_AFTER_MS: u64 = 5000;

/// Length of a readiness after which the end of a container is no sign that it ends again and again, in milliseconds.
/// After as long the kubelet restarts a container without delay.
const UNSUSPICIOUS_MS: u64 = 600_000;

/// Updates a pod's uninterrupted readiness; the restart of a container interrupts it.
pub(super) fn update_steady_readiness(pod: &mut RevisionPod, context: &RevisionPlanContext<'_>) {
    // The readiness probe of a pod's only container is proof enough: `count_proven_pods` requires no more.
    if context.template.raw.spec.pod.containers.len() < 2 {
        return;
    }
    let status = context.cluster.pods.statuses.get(&*pod.uid);
    let restarts = status.map_or(0, |it| it.containers.iter().map(|it| it.restarts).sum());
    let (is_ready, steady) = (is_pod_ready(pod, context), pod.steady_readiness);
    if is_ready && steady.since.is_some() && steady.restarts == restarts {
        return;
    }
    pod.steady_readiness = SteadyReadiness {
        since: is_ready.then_some(context.now),
        restarts,
        previous_ms: match steady.since {
            Some(since) => context.now.0.saturating_sub(since.0),
            None => steady.previous_ms,
        },
    };
}

/// Returns the moment from which a pod's readiness proves that the Revision works. It must last longer than the one
/// before. Otherwise each start of a container that ends again and again would count as proof.
fn proven_at(steady: SteadyReadiness) -> Option<UnixMillis> {
    let previous_ms = if steady.previous_ms < UNSUSPICIOUS_MS { steady.previous_ms } else { 0 };
    Some(steady.since?.plus_ms(PROVEN_AFTER_MS.max(2 * previous_ms)))
}

/// Counts the pods that prove that the Revision works. A pod of one container does so as soon as it is ready.
pub(super) fn count_proven_pods(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> u32 {
    let is_single = context.template.raw.spec.pod.containers.len() < 2;
    let is_steady = |pod: &RevisionPod, timer: &mut PlanTimer| {
        proven_at(pod.steady_readiness).is_some_and(|at| timer.is_due_or_schedule(at, context.now))
    };
    let serving = revision.pods.iter().filter(|it| it.stage == PodStage::Serving);
    let ready = serving.filter(|it| is_pod_ready(it, context));
    let proven = ready.filter(|it| is_single || is_steady(it, timer)).count();
    u32::try_from(proven).unwrap_or(u32::MAX)
}

/// Returns true if one of a pod's containers has ended and does not run again yet.
fn has_crashed_container(status: &local_node::PodRunStatus) -> bool {
    let mut states = status.containers.iter().map(|container| &container.state);
    status.phase != local_node::PodRunPhase::Terminating
        && states.any(|state| match state {
            ContainerRunState::Running => false,
            ContainerRunState::Waiting { last_exit, .. } => last_exit.is_some(),
            ContainerRunState::Terminated { .. } => true,
        })
}

/// Counts the pods of a Revision that are ready and serve.
pub(super) fn count_ready_pods(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> u32 {
    let pods = revision.pods.iter();
    let ready =
        pods.filter(|pod| pod.stage == PodStage::Serving && is_pod_ready(pod, context)).count();
    u32::try_from(ready).unwrap_or(u32::MAX)
}

/// Returns the direct path if burst capacity allows it, else the activator path.
pub(super) fn burst_path(
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> ConnectionPath {
    match revision.scaling.decision {
        // As in Knative: with another autoscaler, requests go directly to the pods that exist.
        _ if context.template.class != AutoscalerClass::Kpa => ConnectionPath::Direct,
        Some(decided) => decided.path,
        None if context.template.policy.target_burst_capacity == 0.0 => ConnectionPath::Direct,
        None => ConnectionPath::Activator,
    }
}

/// Returns the moment from which a pod that is not ready gets a reason in the status.
pub(super) fn slow_start_at(pod: &RevisionPod) -> UnixMillis {
    const SLOW_MS: u64 = 5000;
    pod.first_seen_at.plus_ms(SLOW_MS)
}
