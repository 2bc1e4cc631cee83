//! Pure: plan of a scaled Service: its pods and their number, the slices that lead to activators, its condition.
//!
//! One Revision with the Service's name stands for the workload, so pods are reported, drained and routed as those of
//! Knative. The state machine updates its template and pods from the workload's objects. This plan decides which pods
//! serve, and how many there should be.

use std::sync::Arc;

use common::wire::{NamespacedName, RouteChange};

use super::{
    AppPlan, MAX_PASSES, PlanTimer, RevisionPlanContext, drain, parsed_templates,
    revision_conditions, topology,
};
use crate::model::cluster_state::{
    AppRevision, AppState, ClusterState, ConditionReason, ConditionStatus, ConditionType,
    KubeletReadiness, ParsedTemplate, PodStage, ScaledServiceState, UnixMillis, WorkloadBinding,
};

pub(crate) mod foreign_writes;
pub(crate) mod layout;
mod replicas;
mod resolution;
mod routes;

pub(crate) use replicas::{desired_replicas, has_slice};
pub(crate) use resolution::resolve_workload;

/// Delay of the report of a refusal that is often over in a moment, in milliseconds.
pub(crate) const REPORT_DELAY_MS: u64 = 5000;
/// Time for which slices still lead to activators once the kubelet has reported a pod as ready, in milliseconds.
/// Kubernetes' own slice lists the pod a moment later than the controller observes it.
const SLICE_LINGER_MS: u64 = 5000;

/// Reason of the condition of a workload that does not sleep, because a tool keeps writing its number of pods.
pub(crate) const REPLICAS_MANAGED: &str = "ReplicasManaged";

/// Plans a scaled Service.
pub(super) fn plan_app(
    mut app: AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) -> AppPlan {
    let templates = parsed_templates(&app, cluster);
    let mut timer = PlanTimer::default();
    // Until nothing changes any more: a step may depend on decisions of a later one.
    for _ in 0..MAX_PASSES {
        let previous = app.clone();
        timer = PlanTimer::default();
        run_pass(&mut app, name, &templates, cluster, now, &mut timer);
        if app == previous {
            break;
        }
    }
    if app.scaled.as_ref().is_none_or(|it| it.is_over()) {
        return AppPlan { app: None, routes: Vec::new(), timer: None };
    }
    // By the readiness that the routes show.
    topology::update_hints(&mut app, name, &templates, cluster);
    let routes = routes::route_subjects(&app, name, &templates, cluster);
    AppPlan { app: Some(app), routes, timer: timer.0 }
}

/// Updates the condition of a scaled Service whose name belongs to objects of Knative, or forgets it once it is over.
pub(super) fn plan_refused(app: &mut AppState, now: UnixMillis, timer: &mut PlanTimer) {
    update_condition(app, now, timer);
    if app.scaled.as_ref().is_some_and(|it| it.is_over()) {
        app.scaled = None;
    }
}

/// Returns the subjects of the RouteTable for a scaled Service that is already as planned.
pub(super) fn route_subjects(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<RouteChange> {
    routes::route_subjects(app, name, &parsed_templates(app, cluster), cluster)
}

/// Takes every step once: conditions of the Revision, then pods, then slices and the condition of the Service.
fn run_pass(
    app: &mut AppState,
    name: &NamespacedName,
    templates: &[Arc<ParsedTemplate>],
    cluster: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    let AppState { scaled, revisions, .. } = app;
    let Some(scaled) = scaled.as_deref_mut() else { return };
    // There is one Revision, or none.
    for (revision, template) in revisions.iter_mut().zip(templates) {
        let context = RevisionPlanContext { cluster, namespace: &name.namespace, template, now };
        // No pod of a scaled Service stands by. An annotation on a pod that says so can only come from a user.
        revision.pods.iter_mut().for_each(|pod| pod.standby_since = None);
        revision_conditions::update_revision(revision, &context, timer);
        // Without a binding the Service is refused, and nothing of a workload changes.
        let Some(binding) = scaled.binding.clone() else { continue };
        forget_wakes_on_request(scaled, revision);
        // Only the leader decides about pods; other replicas keep the stages that it has noted on them.
        if cluster.is_leader {
            // Before the number is decided: the time for which it is kept begins with the readiness of its pods.
            if let Some(kept) = &mut scaled.foreign_writes.kept {
                replicas::record_kept_pods(kept, revision, &context);
            }
            let requested =
                replicas::requested_replicas(scaled, &binding, revision, &context, timer);
            revision.scaling.requested_scale = requested;
            replicas::scale_pods(revision, &binding, &context);
            drain::stop_drained_pods(revision, &context, timer);
        }
        schedule_release_end(scaled, template, now, timer);
        update_slices(scaled, &binding, revision, name, &context, timer);
    }
    update_condition(app, now, timer);
}

/// Forgets the moments at which other clients woke the workload, once a request has come.
///
/// Active pods are no sign of a request: pods that another client starts are active until their window is over.
fn forget_wakes_on_request(scaled: &mut ScaledServiceState, revision: &AppRevision) {
    if revision.scaling.decision.is_some_and(|it| it.has_load) {
        scaled.foreign_writes.wakes.clear();
    }
}

/// Returns true if the release of a workload, which gives it back to its user, is over. That is once a pod is ready,
/// none is expected, or too much time has passed. Until then activators hold the requests, as while the workload slept.
pub(crate) fn is_release_over(
    scaled: &ScaledServiceState,
    revision: Option<&AppRevision>,
    deadline_ms: u64,
    now: UnixMillis,
) -> bool {
    let (Some(binding), Some(revision)) = (&scaled.binding, revision) else { return true };
    let is_pod_expected = binding.replicas > 0 || binding.is_put_to_sleep();
    let is_overdue = scaled.released_at.is_some_and(|it| it.plus_ms(deadline_ms) <= now);
    revision.scaling.actual_scale > 0 || !is_pod_expected || is_overdue
}

/// Returns the time after which a release is over even without a ready pod, in milliseconds.
pub(crate) fn release_deadline_ms(template: &ParsedTemplate) -> u64 {
    template.policy.progress_deadline.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Schedules a plan for the time at which a release is over even without a ready pod.
fn schedule_release_end(
    scaled: &ScaledServiceState,
    template: &ParsedTemplate,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    if let Some(released_at) = scaled.released_at {
        timer.is_due_or_schedule(released_at.plus_ms(release_deadline_ms(template)), now);
    }
}

/// Decides if slices should lead connections to activators: while kube-proxy may have no pod.
///
/// The slices of Kubernetes follow the kubelet, whose readiness is later than that of the agent.
fn update_slices(
    scaled: &mut ScaledServiceState,
    binding: &WorkloadBinding,
    revision: &AppRevision,
    name: &NamespacedName,
    context: &RevisionPlanContext<'_>,
    timer: &mut PlanTimer,
) {
    let serving = revision.pods.iter().filter(|it| it.stage == PodStage::Serving);
    let mut statuses = serving.filter_map(|it| it.kube_status.as_ref());
    let is_pod_ready =
        statuses.any(|it| it.kubelet_readiness == KubeletReadiness::Ready && !it.is_terminating);
    let slices = &mut scaled.slices;
    // Kept through plans while a pod is ready, so that the linger time has one beginning.
    slices.pod_ready_since = is_pod_ready.then(|| slices.pod_ready_since.unwrap_or(context.now));
    slices.are_wanted = match slices.pod_ready_since {
        None => !binding.is_terminating,
        // Without slices there is nothing to keep: a replica that starts makes none for pods that are ready.
        Some(since) => {
            has_slice(name, context.cluster)
                && !timer.is_due_or_schedule(since.plus_ms(SLICE_LINGER_MS), context.now)
        }
    };
}

/// Sets the condition of the Service: false while it is refused, while its workload does not sleep, and while its pods
/// fail.
fn update_condition(app: &mut AppState, now: UnixMillis, timer: &mut PlanTimer) {
    let Some(scaled) = app.scaled.as_deref() else { return };
    // While it is not known what to say, the condition stays as it is.
    let status = if let Some(refused) = &scaled.refusal {
        let delay_ms = if refused.refusal.is_often_brief() { REPORT_DELAY_MS } else { 0 };
        if !timer.is_due_or_schedule(refused.since.plus_ms(delay_ms), now) {
            return;
        }
        ConditionStatus::False(refused.refusal.to_condition_reason())
    } else if scaled.scaled_workload().is_none() {
        return;
    } else if scaled.foreign_writes.is_managed {
        ConditionStatus::False(managed_reason())
    } else {
        let revision = app.revisions.iter().find(|it| it.is_scaled_service);
        let blocked = revision.and_then(|it| it.blocked_reason.as_deref());
        let failure = revision.and_then(|it| it.failure.as_deref());
        blocked.or(failure).cloned().map_or(ConditionStatus::True(None), ConditionStatus::False)
    };
    app.conditions.set(ConditionType::ScaledServiceReady, status, now);
}

fn managed_reason() -> ConditionReason {
    let message = "Another client keeps writing spec.replicas while no request asks for the workload, so it does not \
                   sleep: remove spec.replicas from its manifest, then take the annotation \
                   rouse.dev/scale-to-zero away and set it again";
    ConditionReason::new(REPLICAS_MANAGED, message)
}
