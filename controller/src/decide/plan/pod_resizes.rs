//! Pure: frozen pods of a Revision → the resource requests that each of its pods should have.
//!
//! In this file, requests without another word are those for CPU and memory.

use super::RevisionPlanContext;
use crate::model::{
    cluster_state::{AppRevision, ConditionReason, PodResize, PodStage, RevisionPod},
    object::PodRequests,
};

/// Sets the requests that the pods of a Revision should have.
///
/// The original requests are due once a client's request has thawed the pod, or once its order is withdrawn. The write
/// queue restores them later, so no client waits for a resize.
pub(super) fn update_resizes(revision: &mut AppRevision, context: &RevisionPlanContext<'_>) {
    for pod in &mut revision.pods {
        update_resize(pod, context);
    }
}

fn update_resize(pod: &mut RevisionPod, context: &RevisionPlanContext<'_>) {
    let (is_reducible, held_bytes) = (is_reducible(pod, context), held_bytes(pod, context));
    let is_known = is_state_known(pod, context);
    // The local node reserves no resources.
    let Some(status) = pod.kube_status.as_deref() else { return };
    // Most pods never stand by, and need no state. But an earlier leader may have reduced the requests of this one.
    let needs_state = is_reducible || pod.resize.is_some() || status.has_reduced_requests;
    if !is_known || !needs_state {
        return;
    }
    let resize: &mut PodResize = pod.resize.get_or_insert_default();
    // Before the requests are set: the report concerns those that the last plan has set.
    if let Some(pending) = &status.pending_resize {
        resize.record_node_report(pending, status.has_reduced_requests);
    }
    resize.requests = match is_reducible {
        true => resize.reduced_requests(held_bytes),
        false => PodRequests::Original,
    };
}

/// Returns true if the last report of a pod's agent changes the requests that a frozen pod should have. A freeze or a
/// thaw needs a plan anyway, and is not compared here.
pub(super) fn needs_plan(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let held_bytes = held_bytes(pod, context);
    let is_outdated = |it: &PodResize| it.requests != it.reduced_requests(held_bytes);
    context.cluster.is_leader
        && is_reducible(pod, context)
        && pod.resize.as_deref().is_some_and(is_outdated)
}

/// Returns the reason for which the standby of a Revision stops: a pod that serves did not get its requests back. Such
/// a pod is not frozen any more, so it has to end before another pod can stand by in its place.
pub(super) fn find_stop_reason(revision: &AppRevision) -> Option<ConditionReason> {
    let serving = revision.pods.iter().filter(|it| it.stage == PodStage::Serving);
    let mut refusals = serving.filter_map(|pod| {
        let refusal = pod.resize.as_ref()?.restoration_refusal.as_ref()?;
        let message =
            format!("Pod {} does not get its requests back: {}", pod.name, refusal.message);
        Some(ConditionReason::new(refusal.reason.clone(), message))
    });
    refusals.next()
}

/// Returns the explanation for users if a frozen pod keeps requests that it does not need; `None`: no pod does.
pub(super) fn find_kept_requests(revision: &AppRevision) -> Option<ConditionReason> {
    let frozen = revision.pods.iter().filter(|it| it.has_standby_order() && it.is_frozen);
    let mut refusals = frozen.filter_map(|pod| {
        let refusal = pod.resize.as_ref()?.reduction_refusal.as_ref()?;
        let message =
            format!("Pod {} keeps requests while it is frozen: {}", pod.name, refusal.message);
        Some(ConditionReason::new(refusal.reason.clone(), message))
    });
    refusals.next()
}

/// Returns true if a pod should give back the requests that it does not need: it counts as frozen, and operators have
/// not switched resizes off.
fn is_reducible(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let is_enabled = context.cluster.settings.scale_policy.standby.resizes_pods;
    is_enabled && pod.has_standby_order() && pod.is_frozen
}

/// Returns true if enough is known about a pod to set its requests. With a standby order it may be frozen, which only a
/// report of its agent shows.
///
/// A leader that starts has no report at first. If it restored the requests of all frozen pods, their nodes might have
/// no room for them.
fn is_state_known(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> bool {
    let is_enabled = context.cluster.settings.scale_policy.standby.resizes_pods;
    let report = context.cluster.pods.reports.get(&*pod.uid);
    !is_enabled || !pod.has_standby_order() || report.is_some_and(|it| it.standby.is_some())
}

/// Returns the memory that a pod holds, in bytes, as its agent reports it; `None`: its node does not count it.
fn held_bytes(pod: &RevisionPod, context: &RevisionPlanContext<'_>) -> Option<u64> {
    let report = context.cluster.pods.reports.get(&*pod.uid)?;
    report.standby.as_ref()?.memory_bytes
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use common::wire::{PodObservation, StandbyReport};

    use super::*;
    use crate::model::{
        cluster_state::{
            ClusterState, KubePodStatus, ParsedTemplate, PendingResize, ReducibleResources,
            UnixMillis,
        },
        object::{REQUESTS_NOT_REDUCED, REQUESTS_NOT_RESTORED, WriteError},
    };

    const MIB: u64 = 1 << 20;
    const NOW: UnixMillis = UnixMillis(1_000_000);

    /// Returns a cluster with the report of a frozen pod that holds this memory.
    fn cluster(memory_bytes: Option<u64>) -> ClusterState {
        let mut cluster = ClusterState::default();
        let standby = StandbyReport { is_frozen: true, memory_bytes, failure: String::new() };
        let report = PodObservation {
            uid: "u".into(),
            address: None,
            other_family_address: None,
            listening: true,
            ready: true,
            drained: true,
            in_flight: 0,
            listening_since_ns: 0,
            not_ready_reason: String::new(),
            counts_all_ports: true,
            standby: Some(standby),
            awaits_stop: false,
        };
        cluster.pods.reports.insert("u".into(), report);
        cluster
    }

    /// Returns a pod of Kubernetes that is frozen by its order.
    fn frozen() -> RevisionPod {
        RevisionPod {
            standby_since: Some(NOW),
            is_frozen: true,
            kube_status: Some(Box::default()),
            ..RevisionPod::new("u".into(), "a".into(), NOW)
        }
    }

    /// Returns a pod that runs, as the API server reports it.
    fn running(status: KubePodStatus) -> RevisionPod {
        let kube_status = Some(Box::new(status));
        RevisionPod { kube_status, ..RevisionPod::new("u".into(), "a".into(), NOW) }
    }

    fn updated(mut pod: RevisionPod, cluster: &ClusterState) -> RevisionPod {
        let template = ParsedTemplate::of_revision(&AppRevision::default(), cluster);
        let context = RevisionPlanContext::without_time(cluster, "default", &template);
        update_resize(&mut pod, &context);
        let after_first = pod.clone();
        update_resize(&mut pod, &context);
        assert_eq!(pod, after_first, "planning again changes nothing");
        pod
    }

    fn requests(pod: &RevisionPod) -> Option<PodRequests> {
        pod.resize.as_ref().map(|it| it.requests)
    }

    fn reduced(memory_mib: Option<u64>) -> Option<PodRequests> {
        Some(PodRequests::Reduced { memory_mib })
    }

    #[test]
    fn a_frozen_pod_gives_back_what_it_does_not_hold() {
        assert_eq!(requests(&updated(frozen(), &cluster(Some(7 * MIB)))), reduced(Some(7)));
        assert_eq!(requests(&updated(frozen(), &cluster(None))), reduced(None));
        let local = RevisionPod { kube_status: None, ..frozen() };
        assert_eq!(requests(&updated(local, &cluster(Some(MIB)))), None);
    }

    #[test]
    fn only_a_frozen_pod_with_an_order_gives_anything_back() {
        let cluster = cluster(Some(7 * MIB));
        let without_order = RevisionPod { standby_since: None, ..frozen() };
        let thawed = RevisionPod { is_frozen: false, ..frozen() };
        let draining = RevisionPod { stage: PodStage::Draining { since: NOW }, ..frozen() };
        for pod in [without_order, thawed, draining] {
            assert_eq!(requests(&updated(pod.clone(), &cluster)), None);
            let before = updated(frozen(), &cluster);
            let pod = RevisionPod { resize: before.resize, ..pod };
            assert_eq!(requests(&updated(pod, &cluster)), Some(PodRequests::Original));
        }
    }

    #[test]
    fn the_switch_of_operators_restores_all_requests() {
        let mut cluster = cluster(Some(7 * MIB));
        let pod = updated(frozen(), &cluster);
        assert_eq!(requests(&pod), reduced(Some(7)));
        Arc::make_mut(&mut cluster.settings).scale_policy.standby.resizes_pods = false;
        assert_eq!(requests(&updated(pod, &cluster)), Some(PodRequests::Original));
        assert_eq!(requests(&updated(frozen(), &cluster)), None);
    }

    /// A new leader knows of the pod only what the API server has.
    #[test]
    fn requests_that_an_earlier_leader_reduced_are_restored() {
        let noted = KubePodStatus { has_reduced_requests: true, ..KubePodStatus::default() };
        let pod = updated(running(noted), &cluster(None));
        assert_eq!(requests(&pod), Some(PodRequests::Original));
        let never_reduced = updated(running(KubePodStatus::default()), &cluster(None));
        assert_eq!(never_reduced.resize, None, "no memory for pods that never stood by");
    }

    #[test]
    fn a_pod_of_which_no_agent_reports_keeps_its_requests() {
        let noted = KubePodStatus { has_reduced_requests: true, ..KubePodStatus::default() };
        let ordered = RevisionPod { standby_since: Some(NOW), ..running(noted) };
        let mut cluster = cluster(Some(7 * MIB));
        cluster.pods.reports.clear();
        assert_eq!(requests(&updated(ordered, &cluster)), None, "a new leader");
        let reduced_before = updated(frozen(), &self::cluster(Some(7 * MIB)));
        let unknown = RevisionPod { is_frozen: false, ..reduced_before };
        assert_eq!(requests(&updated(unknown, &cluster)), reduced(Some(7)));
    }

    #[test]
    fn a_node_that_cannot_restore_the_requests_is_known_from_the_pods_status() {
        let reason = ConditionReason::new("Deferred", "Node is full");
        let pending = PendingResize { reason, generation: Some(3) };
        let status = |has_reduced_requests| KubePodStatus {
            has_reduced_requests,
            pending_resize: Some(Box::new(pending.clone())),
            ..KubePodStatus::default()
        };
        let pod = updated(running(status(true)), &cluster(None));
        assert!(pod.may_stand_by(), "its last patch is under way");
        let pod = RevisionPod { kube_status: Some(Box::new(status(false))), ..pod };
        let pod = updated(pod, &cluster(None));
        assert!(!pod.may_stand_by());
        let mut revision = AppRevision { pods: vec![pod.clone()], ..AppRevision::default() };
        let message = "Pod a does not get its requests back: Deferred: Node is full";
        let reason = ConditionReason::new(REQUESTS_NOT_RESTORED, message);
        assert_eq!(find_stop_reason(&revision), Some(reason));
        revision.pods[0].stage = PodStage::Draining { since: NOW };
        assert_eq!(find_stop_reason(&revision), None, "its successor may stand by");
        // The node may have room by now.
        let restored = RevisionPod { kube_status: Some(Box::default()), ..pod };
        assert!(!updated(restored, &cluster(None)).may_stand_by());
        // A pod of which another client asks too much does not concern its standby.
        let foreign = updated(running(status(false)), &cluster(None));
        assert_eq!(foreign.resize, None);
    }

    #[test]
    fn a_frozen_pod_that_keeps_requests_is_explained_and_stays_on_standby() {
        let mut pod = updated(frozen(), &cluster(Some(7 * MIB)));
        let error = WriteError { reason: REQUESTS_NOT_REDUCED, message: "minimum is 10m".into() };
        pod.resize.get_or_insert_default().record_write_error(&error);
        let pod = updated(pod, &cluster(Some(7 * MIB)));
        assert_eq!(requests(&pod), reduced(None), "CPU alone");
        assert!(pod.may_stand_by());
        assert_eq!(
            pod.resize.as_ref().map(|it| it.reducible),
            Some(ReducibleResources::Cpu),
            "the plan does not count the error again"
        );
        let mut revision = AppRevision { pods: vec![pod], ..AppRevision::default() };
        let message = "Pod a keeps requests while it is frozen: minimum is 10m";
        let reason = ConditionReason::new(REQUESTS_NOT_REDUCED, message);
        assert_eq!(
            (find_kept_requests(&revision), find_stop_reason(&revision)),
            (Some(reason), None)
        );
        revision.pods[0].is_frozen = false;
        assert_eq!(find_kept_requests(&revision), None);
    }

    #[test]
    fn memory_that_changed_much_needs_a_plan() {
        let pod = updated(frozen(), &cluster(Some(100 * MIB)));
        let needs = |pod: &RevisionPod, cluster: &ClusterState| {
            let template = ParsedTemplate::of_revision(&AppRevision::default(), cluster);
            needs_plan(pod, &RevisionPlanContext::without_time(cluster, "default", &template))
        };
        assert!(!needs(&pod, &cluster(Some(100 * MIB))));
        assert!(!needs(&pod, &cluster(Some(99 * MIB))), "a little less");
        assert!(!needs(&pod, &cluster(None)), "what is not known changes nothing");
        assert!(needs(&pod, &cluster(Some(20 * MIB))), "it was reclaimed");
        assert!(needs(&pod, &cluster(Some(101 * MIB))));
        let follower = ClusterState { is_leader: false, ..cluster(Some(20 * MIB)) };
        assert!(!needs(&pod, &follower));
    }
}
