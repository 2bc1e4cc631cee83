//! Pure: number of pods of the workload of a scaled Service, and the pods that leave when it falls.
//!
//! The workload wakes to the number of its user. For load, Rouse writes a greater number if `max-scale` allows it.
//! Without a decision the number stays as it is.

use common::wire::NamespacedName;

use super::super::{PlanTimer, RevisionPlanContext, readiness, scale};
use crate::model::{
    cluster_state::{
        AppRevision, ClusterState, KeptNumber, PodStage, RevisionPod, ScaledServiceState,
        UnixMillis, WorkloadBinding, WorkloadKind,
    },
    object::names,
};

/// Returns the number of pods that the workload should have.
pub(super) fn requested_replicas(
    scaled: &ScaledServiceState,
    binding: &WorkloadBinding,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> u32 {
    // A workload that is given back has the number of its user, whatever was decided.
    if scaled.released_at.is_some() {
        return binding.replicas.max(binding.wake_replicas());
    }
    let decided = decided_replicas(scaled, binding, revision, context);
    let kept = scaled.foreign_writes.kept;
    let kept = kept.filter(|it| !timer.is_due_or_schedule(kept_until(it, context), context.now));
    decided.max(kept.map_or(0, |it| it.pods))
}

/// Returns the moment until which a number of another client is kept, which moves once its pods are ready. Pods that do
/// not become ready in time end it.
fn kept_until(kept: &KeptNumber, context: &RevisionPlanContext<'_>) -> UnixMillis {
    let policy = &context.template.policy;
    let (start, time) = match kept.ready_at {
        Some(ready_at) => (ready_at, policy.stable_window),
        None => (kept.observed_at, policy.stable_window.max(policy.progress_deadline)),
    };
    start.plus_ms(time.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Records the moment at which as many pods are ready as another client has written.
pub(super) fn record_kept_pods(
    kept: &mut KeptNumber,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) {
    if kept.ready_at.is_none() && readiness::count_ready_pods(revision, context) >= kept.pods {
        kept.ready_at = Some(context.now);
    }
}

/// Returns the number of pods that follows from the decision of the autoscaler. Load only adds pods to those of the
/// user, and sleep takes all of them: no decision asks for fewer.
fn decided_replicas(
    scaled: &ScaledServiceState,
    binding: &WorkloadBinding,
    revision: &AppRevision,
    context: &RevisionPlanContext<'_>,
) -> u32 {
    let Some(decided) = revision.scaling.decision.and_then(|it| it.requested_scale) else {
        return binding.replicas;
    };
    if decided == 0 && binding.replicas > 0 && has_uncounted_ports(revision, context) {
        // There may be requests that nothing counts.
        return binding.replicas;
    }
    if decided == 0 && (binding.replicas == 0 || may_sleep(scaled, context.cluster)) {
        return 0;
    }
    if binding.hpa_min_replicas.is_some() {
        // Above 0 the number belongs to the HorizontalPodAutoscaler.
        return if binding.replicas > 0 { binding.replicas } else { binding.wake_replicas() };
    }
    let policy = &context.template.policy;
    let wanted = decided.max(binding.user_replicas);
    if policy.max_scale > 0 { wanted.min(policy.max_scale.max(policy.min_scale)) } else { wanted }
}

/// Returns true if the agent of a pod reports without counting all ports of the pod, as one of an earlier release does.
/// A pod without a report is not one of these: its node may be gone.
fn has_uncounted_ports(revision: &AppRevision, context: &RevisionPlanContext<'_>) -> bool {
    let reports = &context.cluster.pods.reports;
    let mut pods = revision.pods.iter().filter(|pod| !pod.is_terminating());
    pods.any(|pod| reports.get(&*pod.uid).is_some_and(|report| !report.counts_all_ports))
}

/// Returns true if a workload that is awake may fall asleep. A request at any of its ports must wake it, and no tool
/// may keep writing its number.
fn may_sleep(scaled: &ScaledServiceState, cluster: &ClusterState) -> bool {
    let mut ports = scaled.service.iter().flat_map(|it| it.ports.iter());
    // At a port that no activator serves, nothing would wake the workload.
    let can_wake =
        cluster.activators.is_any_ready && ports.all(|it| scaled.activator_port(it.port).is_some());
    can_wake && !scaled.foreign_writes.is_managed
}

/// Lets pods drain or serve again, so that as many serve as are requested.
///
/// When Kubernetes replaces pods, it has more of them than requested for a while. Of these, only the pods that have to
/// leave for a lower number drain.
pub(super) fn scale_pods(
    revision: &mut AppRevision,
    binding: &WorkloadBinding,
    context: &RevisionPlanContext<'_>,
) {
    match binding.key.kind {
        WorkloadKind::Deployment => scale_deployment(revision, binding, context),
        WorkloadKind::StatefulSet => scale_stateful_set(revision, binding, context),
    }
}

fn scale_deployment(
    revision: &mut AppRevision,
    binding: &WorkloadBinding,
    context: &RevisionPlanContext<'_>,
) {
    let (requested, serving) = (revision.scaling.requested_scale, revision.serving_pods());
    if requested > serving {
        scale::revive_pods(revision, to_usize(requested - serving), context);
        return;
    }
    let alive = revision.pods.iter().filter(|pod| !pod.is_terminating()).count();
    let alive = u32::try_from(alive).unwrap_or(u32::MAX);
    let leaving = binding.replicas.saturating_sub(requested);
    let staying = match requested {
        0 => 0,
        // The number does not fall, so further pods are those of a replacement.
        _ if leaving == 0 => alive,
        // Some pods of the present number may not exist yet, and must not count as those that leave.
        _ => alive.saturating_sub(leaving).max(alive.min(requested)),
    };
    scale::remove_surplus_pods(revision, to_usize(serving.saturating_sub(staying)), context);
}

/// Scales the pods of a StatefulSet. Kubernetes always ends the pods with the highest ordinals, so these leave.
fn scale_stateful_set(
    revision: &mut AppRevision,
    binding: &WorkloadBinding,
    context: &RevisionPlanContext<'_>,
) {
    let requested = revision.scaling.requested_scale;
    let is_lowered = requested < binding.replicas || requested == 0;
    for pod in revision.pods.iter_mut().filter(|pod| !pod.is_terminating()) {
        let Some(index) = binding.pod_index(&pod.name) else { continue };
        if index < requested && pod.stage != PodStage::Serving {
            pod.stage = PodStage::Serving;
        } else if index >= requested && is_lowered && pod.stage == PodStage::Serving {
            scale::remove_pod(pod, context);
        }
    }
}

/// Returns the number of pods to write. It stays at the present one while pods drain, so that they end their requests.
pub(crate) fn desired_replicas(
    name: &NamespacedName,
    binding: &WorkloadBinding,
    revision: &AppRevision,
    cluster: &ClusterState,
) -> u32 {
    let requested = revision.scaling.requested_scale;
    let is_draining = |pod: &&RevisionPod| {
        matches!(pod.stage, PodStage::Draining { .. }) && !pod.is_terminating()
    };
    let draining = revision.pods.iter().filter(is_draining);
    let most = match binding.key.kind {
        WorkloadKind::Deployment => {
            requested.saturating_add(u32::try_from(draining.count()).unwrap_or(u32::MAX))
        }
        // A pod stays only with all pods before it.
        WorkloadKind::StatefulSet => {
            let last = draining.filter_map(|pod| binding.pod_index(&pod.name)).max();
            last.map_or(requested, |last| requested.max(last.saturating_add(1)))
        }
    };
    // Pods that drain never raise the number.
    let number = binding.replicas.min(most).max(requested);
    // A HorizontalPodAutoscaler would add pods again for those that leave before the last one.
    if binding.hpa_min_replicas.is_some() && number > requested {
        return binding.replicas;
    }
    // Without slices, connections that kube-proxy routes would be refused as soon as the pods are gone.
    if number == 0 && !has_slice(name, cluster) {
        return binding.replicas;
    }
    number
}

/// Returns true if a slice leads connections to the Service to an activator.
pub(crate) fn has_slice(name: &NamespacedName, cluster: &ClusterState) -> bool {
    let mut slices = names::scaled_slice_names(&name.name).into_iter();
    slices.any(|slice| {
        let slice = NamespacedName::new(name.namespace.clone(), slice);
        cluster.activators.slices.contains_slice(&slice)
    })
}

fn to_usize(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
