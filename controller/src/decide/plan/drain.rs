//! Pure: stopping a pod without losing a request.
//!
//! A pod stops in three steps. It is marked draining in the RouteTable. Once every agent and activator has acknowledged
//! that, no new request reaches it. Once no request is in flight, the pod is stopped. The plan waits for an
//! acknowledgement for at most 1 s, and for the whole drain for at most the Revision's grace period.

use super::{PlanTimer, RevisionPlanContext};
use crate::model::cluster_state::{AppRevision, PodStage, RevisionPod};

/// Time to wait for acknowledgements of silent agents and activators, in milliseconds.
const ACK_TIMEOUT_MS: u64 = 1000;

/// Stops every draining pod that may stop now.
pub(super) fn stop_drained_pods(
    revision: &mut AppRevision,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let has_several_ports = revision.is_scaled_service;
    // A pod that another client deleted drains too, but Kubernetes stops it.
    for pod in revision.pods.iter_mut().filter(|pod| !pod.is_terminating()) {
        if can_stop(pod, has_several_ports, context, timer) {
            pod.stage = PodStage::Stopping { since: context.now };
        }
    }
}

fn can_stop(
    pod: &RevisionPod,
    has_several_ports: bool,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) -> bool {
    let PodStage::Draining { since } = pod.stage else { return false };
    let grace = context.template.timeout.as_millis().try_into().unwrap_or(u64::MAX);
    // The grace period bounds the drain even if agents keep on reporting requests.
    if timer.is_due_or_schedule(since.plus_ms(grace), context.now) {
        return true;
    }
    let is_acknowledged = context.cluster.pods.reporters.is_acknowledged_by_all(&pod.uid)
        || timer.is_due_or_schedule(since.plus_ms(ACK_TIMEOUT_MS), context.now);
    // A pod whose listener has closed gets no new request, whatever its clients do.
    // An agent of an earlier release does not know whether the other ports of the pod are idle.
    let is_idle = |report: &common::wire::PodObservation| {
        (report.counts_all_ports || !has_several_ports)
            && (report.drained || (!report.listening && report.in_flight == 0))
    };
    is_acknowledged && context.cluster.pods.reports.get(&*pod.uid).is_some_and(is_idle)
}
