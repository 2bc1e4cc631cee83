//! Pure: reports of agents, the kubelet and the local node → readiness of a Revision's pods.

use common::local_node::{self, ContainerRunState};

use super::{PlanTimer, RevisionPlanContext};
use crate::model::cluster_state::{
    AppRevision, KubeletReadiness, ParsedTemplate, PodStage, RevisionPod, SteadyReadiness,
    UnixMillis,
};

/// Returns true if requests may be sent to a pod: it is reported ready, and all its containers run.
///
/// The serving container's listener is known before the runtime reports the container. Of other containers the report
/// is required, since requests may need them. If only the kubelet can run a probe, its readiness is required, too: a
/// command that passes proves nothing about the port. The same holds for a pod with readiness gates. Without an agent's
/// report the kubelet's readiness alone counts. Pods of a lost node are not ready. Kubernetes withdraws readiness only
/// from pods that were ready, so `is_lost` covers the others. A pod that may be frozen is not ready without its agent.
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
        _ if pod.is_unreachable => false,
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

/// Returns the moment from which a pod that is not ready gets a reason in the status.
pub(super) fn slow_start_at(pod: &RevisionPod) -> UnixMillis {
    const SLOW_MS: u64 = 5000;
    pod.first_seen_at.plus_ms(SLOW_MS)
}
