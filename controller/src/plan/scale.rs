//! Pure: scale decision, initial scale and bounds → pods of a Revision.

use common::{
    node::{self, LocalContainerState},
    wire::ConnectionPath,
};

use super::{PlanTimer, RevisionPlanContext};
use crate::{
    policy::AutoscalerClass,
    world::{
        AppRevision, KubeletReadiness, PlatformKind, PodStage, RevisionPod, RoutingState, Uid,
        UnixMillis,
    },
};

/// Wait before another pod when the last one vanished before it was ever ready, in milliseconds.
const RETRY_MS: u64 = 1000;
/// Time after a stopping pod's grace period until it is forgotten, should the node never answer, in milliseconds.
const LOST_MS: u64 = 30_000;

/// Forgets pods that no longer exist.
pub(super) fn forget_gone(
    revision: &mut AppRevision,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let mut early = false;
    let grace = view.facts.timeout.as_millis().try_into().unwrap_or(u64::MAX);
    revision.pods.retain(|pod| {
        let status = view.world.statuses.get(&*pod.uid);
        let gone = status.is_some_and(|it| it.phase == node::LocalPodPhase::Gone);
        let stopping = match pod.stage {
            PodStage::Stopping { since } if !is_left(pod) => {
                timer.passed(since.plus_ms(grace).plus_ms(LOST_MS), view.now)
            }
            PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. } => false,
        };
        early |= gone && pod.stage == PodStage::Serving && !pod.was_ready;
        !gone && !stopping
    });
    if early {
        revision.retry_at = view.now.plus_ms(RETRY_MS);
    }
}

/// Returns the number of pods that a Revision should have.
fn wanted(revision: &AppRevision, leaving: bool, view: &RevisionPlanContext<'_>) -> u32 {
    let policy = &view.facts.policy;
    let reserve = revision.routing.0 == RoutingState::Reserve;
    let least = if reserve { 0 } else { policy.min_scale };
    // Kubernetes replaces pods by itself, and has more or fewer than desired meanwhile.
    let kept = match view.world.settings.platform {
        PlatformKind::Local => revision.serving(),
        PlatformKind::Kubernetes => revision.desired,
    };
    let decided = revision.decided.and_then(|it| it.wanted);
    let wanted = match decided {
        _ if leaving => 0,
        Some(wanted) => wanted,
        // Also without a Route a Revision starts once: until it was ready its Configuration is not.
        None if !revision.reached => policy.initial_scale.max(least),
        None if reserve => 0,
        None => kept.max(least),
    };
    // As in Knative, the minimum overrides the maximum; until it is reached the initial scale does so as well.
    let first = if revision.reached { 0 } else { policy.initial_scale };
    let most = policy.max_scale.max(least).max(first);
    if policy.max_scale > 0 { wanted.min(most) } else { wanted }
}

/// Returns the replicas that another autoscaler has set in the Revision's Deployment, or the number it begins with.
/// That is at least one: a HorizontalPodAutoscaler never scales up from zero.
fn told(revision: &AppRevision, leaving: bool, view: &RevisionPlanContext<'_>) -> u32 {
    let policy = &view.facts.policy;
    let first = policy.initial_scale.max(policy.min_scale).max(1);
    let told = view.world.told.get(&view.key(revision)).copied();
    if leaving { 0 } else { told.unwrap_or(first) }
}

/// Scales to the wanted number of pods: revives or adds pods at once, or drains the least busy ones.
pub(super) fn pods(
    revision: &mut AppRevision,
    leaving: bool,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let wanted = match view.facts.class {
        AutoscalerClass::Kpa => wanted(revision, leaving, view),
        // Another autoscaler sets the number, and Kubernetes picks the pods to stop: each finishes its last request.
        AutoscalerClass::Hpa | AutoscalerClass::Foreign => {
            revision.desired = told(revision, leaving, view);
            return;
        }
    };
    revision.desired = wanted;
    let [serving, target] =
        [revision.serving(), wanted].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
    if target > serving {
        let missing = target - serving;
        let revived = revive(revision, missing, view);
        // On Kubernetes the Deployment's controller adds pods, by the number that `want` sets.
        let ours = view.world.settings.platform == PlatformKind::Local;
        if ours && missing > revived && timer.passed(revision.retry_at, view.now) {
            (revived..missing).for_each(|_| add(revision, view));
        }
    } else {
        release(revision, serving - target, view);
    }
}

/// Lets draining pods serve again, busiest first since they are warm; then pods that Kubernetes should have stopped and
/// did not. Pods that are not ready come after all others: they may never be.
fn revive(revision: &mut AppRevision, missing: usize, view: &RevisionPlanContext<'_>) -> usize {
    let drains =
        |pod: &RevisionPod| matches!(pod.stage, PodStage::Draining { .. }) && !pod.is_deleted();
    let all = revision.pods.iter_mut();
    let mut pods: Vec<&mut RevisionPod> = all.filter(|pod| drains(pod) || is_left(pod)).collect();
    pods.sort_by_key(|pod| {
        (!is_ready(pod, view), !drains(pod), std::cmp::Reverse(load(pod, view)))
    });
    let revived = pods.into_iter().take(missing).map(|pod| pod.stage = PodStage::Serving);
    revived.count()
}

/// Returns true if a pod was ordered to stop and Kubernetes has not deleted it. Kubernetes makes the final choice: a
/// Deployment that replaces its pods keeps the new ones, although they were surplus when they came.
fn is_left(pod: &RevisionPod) -> bool {
    let stopping = matches!(pod.stage, PodStage::Stopping { .. });
    stopping && pod.placed.as_ref().is_some_and(|it| !it.deleted)
}

fn add(revision: &mut AppRevision, view: &RevisionPlanContext<'_>) {
    revision.made += 1;
    let parts = [revision.meta.uid.to_string(), revision.made.to_string()];
    let uid = Uid::derive(view.world.seed, &[&parts[0], &parts[1]]);
    revision.pods.push(RevisionPod {
        name: format!("{}-deployment-{}", revision.name, suffix(uid)).into(),
        uid: uid.to_string().into(),
        created: view.now,
        met: UnixMillis::default(),
        was_ready: false,
        steady: None,
        stage: PodStage::Serving,
        remembered: None,
        placed: None,
    });
}

/// Returns five characters as Kubernetes generates them: without vowels, so that no words result.
fn suffix(uid: Uid) -> String {
    const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let digit = |place: u32| {
        let digit = usize::try_from(uid.0 / 27u128.pow(place) % 27).unwrap_or_default();
        char::from(LETTERS[digit])
    };
    (0..5).map(digit).collect()
}

fn load(pod: &RevisionPod, view: &RevisionPlanContext<'_>) -> u64 {
    view.world.seen.get(&*pod.uid).map_or(0, |seen| seen.in_flight)
}

/// Drains or stops `count` pods: those that never became ready first, then the least busy, then the newest.
fn release(revision: &mut AppRevision, count: usize, view: &RevisionPlanContext<'_>) {
    let serving = |pod: &&mut RevisionPod| pod.stage == PodStage::Serving;
    let mut pods: Vec<&mut RevisionPod> = revision.pods.iter_mut().filter(serving).collect();
    pods.sort_by_key(|pod| {
        let ready = is_ready(pod, view);
        (ready, load(pod, view), std::cmp::Reverse(pod.created), pod.uid.clone())
    });
    for pod in pods.into_iter().take(count) {
        pod.stage = if pod.was_ready || is_ready(pod, view) {
            PodStage::Draining { since: view.now }
        } else {
            // No request was ever routed to it, so there is nothing to drain.
            PodStage::Stopping { since: view.now }
        };
    }
}

/// Returns true if requests may be sent to a pod: it is reported ready, and all its containers run.
///
/// The serving container's listener is known before the runtime reports the container. Of other containers the report
/// is required, since requests may need them. If only the kubelet can run a probe, its readiness is required, too: a
/// command that passes proves nothing about the port. Without an agent's report the kubelet's readiness alone counts.
/// Pods of a node that is gone are not ready: Kubernetes reports only those lost that were ready before.
pub(super) fn is_ready(pod: &RevisionPod, view: &RevisionPlanContext<'_>) -> bool {
    let kubelet = pod.placed.as_ref().map(|it| it.kubelet);
    let is_away = pod.placed.as_ref().is_some_and(|it| view.world.is_away(&it.node));
    let status = view.world.statuses.get(&*pod.uid);
    // The local node reports readiness in the pod's status.
    let told = match kubelet {
        Some(kubelet) => kubelet == KubeletReadiness::Ready,
        None => status.map_or_else(|| pod.remembered.is_some(), |it| it.ready),
    };
    let ready = match view.world.seen.get(&*pod.uid) {
        _ if kubelet == Some(KubeletReadiness::Lost) || is_away => false,
        Some(seen) => seen.ready && (told || !view.facts.kubelet_probes()),
        None => pod.remembered.is_some() || kubelet == Some(KubeletReadiness::Ready),
    };
    // The kubelet's readiness covers all containers; a remembered pod had passed this check before the restart.
    let is_whole = kubelet == Some(KubeletReadiness::Ready) || pod.remembered.is_some();
    ready && !status.is_some_and(has_crashed) && (is_whole || others_run(status, view))
}

/// Returns true if every container beside the serving one runs.
fn others_run(status: Option<&node::LocalPodStatus>, view: &RevisionPlanContext<'_>) -> bool {
    let containers = view.facts.template.spec.pod.containers.iter().enumerate();
    let mut others = containers.filter(|(index, _)| *index != view.facts.serving);
    others.all(|(_, container)| {
        let known = status.into_iter().flat_map(|status| &status.containers);
        let mut known = known.filter(|it| it.name == container.name);
        known.any(|it| it.state == LocalContainerState::Running)
    })
}

/// Time that all containers of a pod must run before the pod proves that its Revision works, in milliseconds. Without
/// it a container that ends soon after each start would take the traffic from a Revision that works.
const PROOF_MS: u64 = 5000;

/// Updates the start of a pod's uninterrupted readiness; the restart of a container interrupts it.
pub(super) fn note_steady(pod: &mut RevisionPod, view: &RevisionPlanContext<'_>) {
    if view.facts.template.spec.pod.containers.len() < 2 {
        return;
    }
    let status = view.world.statuses.get(&*pod.uid);
    let restarts = status.map_or(0, |it| it.containers.iter().map(|it| it.restarts).sum());
    pod.steady = match pod.steady {
        _ if !is_ready(pod, view) => None,
        Some((since, had)) if had == restarts => Some((since, had)),
        Some(_) | None => Some((view.now, restarts)),
    };
}

/// Counts the pods that prove that the Revision works. A pod of one container does so as soon as it is ready.
pub(super) fn proven(
    revision: &AppRevision,
    view: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> u32 {
    let is_single = view.facts.template.spec.pod.containers.len() < 2;
    let is_old = |pod: &RevisionPod, timer: &mut PlanTimer| {
        pod.steady.is_some_and(|(since, _)| timer.passed(since.plus_ms(PROOF_MS), view.now))
    };
    let pods =
        revision.pods.iter().filter(|it| it.stage == PodStage::Serving && is_ready(it, view));
    let proven = pods.filter(|it| is_single || is_old(it, timer)).count();
    u32::try_from(proven).unwrap_or(u32::MAX)
}

/// Returns true if one of a pod's containers has ended and does not run again yet.
fn has_crashed(status: &node::LocalPodStatus) -> bool {
    let mut states = status.containers.iter().map(|container| &container.state);
    status.phase != node::LocalPodPhase::Terminating
        && states.any(|state| match state {
            LocalContainerState::Running => false,
            LocalContainerState::Waiting { last_exit, .. } => last_exit.is_some(),
            LocalContainerState::Terminated { .. } => true,
        })
}

/// Counts the pods of a Revision that are ready and serve.
pub(super) fn ready(revision: &AppRevision, view: &RevisionPlanContext<'_>) -> u32 {
    let pods = revision.pods.iter();
    let ready = pods.filter(|pod| pod.stage == PodStage::Serving && is_ready(pod, view)).count();
    u32::try_from(ready).unwrap_or(u32::MAX)
}

/// Returns the direct path if burst capacity allows it, else the activator path.
pub(super) fn burst_path(revision: &AppRevision, view: &RevisionPlanContext<'_>) -> ConnectionPath {
    match revision.decided {
        // As in Knative: with another autoscaler, requests go directly to the pods that exist.
        _ if view.facts.class != AutoscalerClass::Kpa => ConnectionPath::Direct,
        Some(decided) => decided.path,
        None if view.facts.policy.target_burst_capacity == 0.0 => ConnectionPath::Direct,
        None => ConnectionPath::Activator,
    }
}

/// Returns the moment from which a pod that is not ready gets a reason in the status.
pub(super) fn slow_at(pod: &RevisionPod) -> UnixMillis {
    const SLOW_MS: u64 = 5000;
    pod.met.plus_ms(SLOW_MS)
}
