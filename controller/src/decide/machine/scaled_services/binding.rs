//! Pure: the workload that a Service selects now → what the Service scales, refuses or releases.

use std::sync::Arc;

use common::wire::NamespacedName;

use crate::{
    decide::plan::scaled_service::{
        REPORT_DELAY_MS, foreign_writes, is_release_over, release_deadline_ms, resolve_workload,
    },
    model::cluster_state::{
        ActivatorSliceState, AppRevision, AppState, ClusterState, ForeignWrites, ParsedTemplate,
        RefusalState, ScaledRefusal, ScaledServiceState, UnixMillis, WorkloadBinding, WorkloadKey,
        WorkloadState,
    },
};

/// Updates the workload that the Service of an app scales, or the reason for which it scales none. The app itself is
/// not in `cluster`.
pub(super) fn update_binding(
    app: &mut AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let present: &AppState = app;
    let service = present.scaled.as_ref().and_then(|it| it.wanted_service());
    let resolution = service.map(|service| resolve_workload(name, present, service, cluster));
    let is_replaced = present.has_knative_object();
    let AppState { scaled, revisions, .. } = app;
    let Some(scaled) = scaled.as_deref_mut() else { return };
    match resolution {
        Some(Ok(workload)) => bind(scaled, &workload, cluster, now),
        Some(Err(refusal)) => refuse(scaled, refusal, name, cluster, now),
        // Objects of Knative have the name now.
        None if is_replaced => {
            scaled.refusal = None;
            unbind(scaled);
        }
        None => {
            let revision = revisions.iter().find(|it| it.is_scaled_service);
            release(scaled, revision, cluster, now);
        }
    }
}

/// Records that the Service scales this workload, as the workload is now.
fn bind(
    scaled: &mut ScaledServiceState,
    key: &WorkloadKey,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let Some(workload) = cluster.workloads.workload(key) else { return };
    let mut binding = to_binding(key, workload, cluster);
    let previous = scaled.binding.take();
    match &previous {
        Some(previous) if previous.uid != binding.uid => {
            scaled.foreign_writes = ForeignWrites::default();
        }
        // The user has stopped the workload. The number before may be later than the record.
        Some(previous) if binding.replicas == 0 && is_same_record(previous, &binding) => {
            binding.user_replicas = previous.user_replicas;
        }
        Some(_) | None => {}
    }
    foreign_writes::record_number(&mut scaled.foreign_writes, previous.as_ref(), &binding, now);
    scaled.binding = Some(binding);
    (scaled.refusal, scaled.released_at) = (None, None);
}

/// Returns true if the controller has written no number between two observations of a workload.
fn is_same_record(previous: &WorkloadBinding, present: &WorkloadBinding) -> bool {
    present.record.is_none() || present.record == previous.record
}

/// Refuses to scale a workload. A workload that is deleted and made again, or a pod that has its labels for a moment,
/// ends nothing that serves: requests wait meanwhile.
fn refuse(
    scaled: &mut ScaledServiceState,
    refusal: ScaledRefusal,
    name: &NamespacedName,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    let since = scaled.refusal.as_ref().map_or(now, |it| it.since);
    let may_be_brief =
        matches!(refusal, ScaledRefusal::NoWorkload | ScaledRefusal::SeveralWorkloads(_));
    // Another Service may have the workload by now.
    let is_held =
        scaled.scaled_workload().is_some_and(|it| cluster.workloads.holder(&it.key) == Some(name));
    if may_be_brief && is_held && now < since.plus_ms(REPORT_DELAY_MS) {
        refresh_binding(scaled, cluster);
    } else {
        unbind(scaled);
    }
    scaled.refusal = Some(RefusalState { refusal, since });
}

/// Releases the workload of a Service whose user does not want it to sleep any more. Requests that wait for a pod keep
/// their route to it until it is ready.
fn release(
    scaled: &mut ScaledServiceState,
    revision: Option<&AppRevision>,
    cluster: &ClusterState,
    now: UnixMillis,
) {
    scaled.refusal = None;
    let is_workload_gone = !refresh_binding(scaled, cluster);
    if scaled.released_at.is_none() {
        scaled.foreign_writes = ForeignWrites::default();
        scaled.released_at = scaled.binding.as_ref().map(|_| now);
    }
    let deadline_ms = revision
        .map_or(0, |revision| release_deadline_ms(&ParsedTemplate::of_revision(revision, cluster)));
    // A Service that is gone has no address any more at which requests could wait.
    let is_service_gone = scaled.service.as_ref().is_none_or(|it| it.is_terminating);
    if is_service_gone || is_workload_gone || is_release_over(scaled, revision, deadline_ms, now) {
        unbind(scaled);
    }
}

/// Forgets the workload, and all that was decided about it.
fn unbind(scaled: &mut ScaledServiceState) {
    if scaled.binding.take().is_some() {
        scaled.foreign_writes = ForeignWrites::default();
    }
    scaled.released_at = None;
    scaled.slices = ActivatorSliceState::default();
}

/// Updates a workload that is kept. Returns false if it does not exist any more.
fn refresh_binding(scaled: &mut ScaledServiceState, cluster: &ClusterState) -> bool {
    let Some(binding) = &mut scaled.binding else { return false };
    let workload = cluster.workloads.workload(&binding.key);
    let Some(workload) = workload.filter(|it| it.version.uid == binding.uid) else { return false };
    *binding = to_binding(&binding.key, workload, cluster);
    true
}

/// Returns what the plan needs to know of a workload.
fn to_binding(
    key: &WorkloadKey,
    workload: &WorkloadState,
    cluster: &ClusterState,
) -> WorkloadBinding {
    let autoscaler = cluster.workloads.autoscaler_of(key);
    WorkloadBinding {
        key: key.clone(),
        uid: workload.version.uid.clone(),
        replicas: workload.replicas,
        record: workload.record,
        user_replicas: match (autoscaler, workload.record) {
            // The present number may be the autoscaler's, which is no wish of the user.
            (Some(_), Some(record)) => record.user_replicas,
            (Some(_) | None, _) => workload.user_replicas(),
        },
        first_ordinal: workload.first_ordinal,
        hpa_min_replicas: autoscaler.map(|it| it.min_replicas),
        template_labels: workload.template_labels.clone(),
        shape: Arc::clone(&workload.shape),
        is_terminating: workload.is_terminating,
    }
}
