//! Pure: desired state of the objects of a scaled Service: its PodAutoscaler, its slices, and its workload's number.

use common::wire::NamespacedName;
use serde_json::{Value, json};

use super::autoscaling_status::{last_transition, render_condition, summarize_autoscaler};
use crate::{
    decide::{
        part_keys,
        plan::{
            self,
            scaled_service::{desired_replicas, has_slice, layout},
        },
        topology_hints::HintRules,
    },
    model::{
        cluster_state::{
            AppRevision, AppState, AutoscalerRecord, ClusterState, ConditionReason,
            ConditionStatus, ConditionType, ParsedTemplate, PodStage, RevisionPod,
            ScaledServiceState, UnixMillis, UserService, WorkloadBinding, WorkloadKey,
            WorkloadKind, WorkloadState,
        },
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
    },
    write::{
        children::{
            OwnerObject,
            scaling::{self, ScaledAutoscalerSpec},
            slices::{self, ScaledSlicesSpec, SliceEndpoint},
        },
        render,
    },
};

/// Returns the desired state of the PodAutoscaler of a scaled Service.
pub(super) fn autoscaler_part(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    app: &AppState,
    scaled: &ScaledServiceState,
) -> DesiredState {
    let name = &key.name;
    if !cluster.workloads.are_listed || is_owner_abandoned(cluster, name, scaled) {
        return DesiredState::Unmanaged;
    }
    let Some(service) = scaled.wanted_service() else {
        // It goes last: by it a controller that starts finds what is left.
        let is_kept = scaled.binding.is_some() || has_slice(name, cluster);
        return if is_kept { DesiredState::Unmanaged } else { DesiredState::Absent };
    };
    let is_reported = || {
        let condition = app.conditions.get(ConditionType::ScaledServiceReady);
        matches!(condition, ConditionStatus::False(_))
    };
    let uid = service.meta.uid.to_string();
    let owner = match (&scaled.binding, &scaled.refusal) {
        (Some(binding), None) => workload_owner(binding),
        (None, Some(_)) if is_reported() => service_owner(name, &uid),
        // Nothing is known yet, or a refusal may be over in a moment.
        (Some(_) | None, _) => return DesiredState::Unmanaged,
    };
    // The owner of an object cannot be changed: the object is made again.
    let is_own = |it: &AutoscalerRecord| it.owner_uid.as_deref() == Some(owner.uid);
    match (key.part, &scaled.autoscaler) {
        (ObjectPart::Object, Some(observed)) if !is_own(observed) => DesiredState::Absent,
        (ObjectPart::Object, _) => autoscaler_object(cluster, name, scaled, service, owner),
        (ObjectPart::Status, Some(_)) => {
            DesiredState::Body(autoscaler_status(cluster, name, app, service))
        }
        (ObjectPart::Status, None) | (ObjectPart::Scale | ObjectPart::Resize, _) => {
            DesiredState::Unmanaged
        }
    }
}

/// Returns the desired state of the PodAutoscaler of a Service whose name belongs to a Revision now.
pub(super) fn superfluous_autoscaler(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    scaled: &ScaledServiceState,
) -> DesiredState {
    match !cluster.workloads.are_listed || is_owner_abandoned(cluster, &key.name, scaled) {
        true => DesiredState::Unmanaged,
        false => DesiredState::Absent,
    }
}

/// Returns true if the workload that owns the PodAutoscaler is still to be given back. A controller that starts follows
/// workloads only while there is a PodAutoscaler.
fn is_owner_abandoned(
    cluster: &ClusterState,
    name: &NamespacedName,
    scaled: &ScaledServiceState,
) -> bool {
    let autoscaler = scaled.autoscaler.as_ref();
    let Some(owner) = autoscaler.and_then(|it| it.owner_uid.as_deref()) else { return false };
    // Nearly always the Service scales the owner.
    if scaled.scaled_workload().is_some_and(|it| *it.uid == *owner) {
        return false;
    }
    let mut abandoned = cluster.workloads.abandoned();
    abandoned.any(|key| {
        let workload = cluster.workloads.workload(key);
        key.name.namespace == name.namespace && workload.is_some_and(|it| *it.version.uid == *owner)
    })
}

fn workload_owner(binding: &WorkloadBinding) -> OwnerObject<'_> {
    let WorkloadBinding { key, uid, .. } = binding;
    OwnerObject { resource: key.kind.resource(), name: &key.name.name, uid }
}

fn service_owner<'a>(name: &'a NamespacedName, uid: &'a str) -> OwnerObject<'a> {
    OwnerObject { resource: ResourceKind::Service, name: &name.name, uid }
}

fn autoscaler_object(
    cluster: &ClusterState,
    name: &NamespacedName,
    scaled: &ScaledServiceState,
    service: &UserService,
    owner: OwnerObject<'_>,
) -> DesiredState {
    // Where 0, which means no limit, is refused, the smallest value is written. It limits nothing either.
    let allows_zero = cluster.settings.config_maps.defaults.allow_container_concurrency_zero;
    let object = scaling::scaled_pod_autoscaler(&ScaledAutoscalerSpec {
        namespace: &name.namespace,
        service: &name.name,
        owner,
        ports: &scaled.ports,
        is_tcp: layout::is_tcp_only(service),
        container_concurrency: i64::from(!allows_zero),
    });
    DesiredState::Body(object.body)
}

/// Returns the status of the PodAutoscaler of a scaled Service. It has no ServerlessService, so no condition about one.
fn autoscaler_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    app: &AppState,
    service: &UserService,
) -> Value {
    let scaled = app.conditions.iter().find(|it| it.0 == ConditionType::ScaledServiceReady);
    let (at, scaled) = scaled
        .map_or((service.meta.created, ConditionStatus::Unknown(None)), |(_, at, it)| (at, it));
    let Some((_, _, revision)) = app.scaled_revision() else {
        return json!({"conditions": [render_condition("Ready", &scaled, at)]});
    };
    let mut status = json!({
        "serviceName": name.name.as_str(),
        "metricsServiceName": name.name.as_str(),
        "desiredScale": revision.scaling.requested_scale,
        "actualScale": revision.scaling.actual_scale,
        "conditions": workload_conditions((at, &scaled), revision, service),
    });
    let decision = render::decision_annotation(cluster, name);
    if !decision.is_empty() {
        status["annotations"] = json!(decision);
    }
    status
}

/// Returns the conditions of a Service that scales a workload. `scaled` is the Service's own part of `Ready`.
fn workload_conditions(
    scaled: (UnixMillis, &ConditionStatus),
    revision: &AppRevision,
    service: &UserService,
) -> Vec<Value> {
    let (active_at, active) = last_transition(revision, ConditionType::RevisionActive);
    let (ready_at, ready) = summarize_autoscaler(&[scaled, (active_at, &active)]);
    let (initialized_at, _) = last_transition(revision, ConditionType::RevisionResources);
    let initialized = ConditionStatus::True(None);
    let mut all = vec![
        render_condition("Active", &active, active_at),
        render_condition("Ready", &ready, ready_at),
        render_condition("ScaleTargetInitialized", &initialized, initialized_at),
    ];
    // As Knative does with conditions that do not decide about `Ready`.
    let for_information = |name: &str, status: &ConditionStatus, at: UnixMillis| {
        let mut condition = render_condition(name, status, at);
        condition["severity"] = json!("Info");
        condition
    };
    if revision.conditions.is_set(ConditionType::RevisionAnnotations) {
        let (at, status) = last_transition(revision, ConditionType::RevisionAnnotations);
        all.push(for_information("AutoscalingAnnotationsValid", &status, at));
    }
    if !service.other_ports.is_empty() {
        let message =
            format!("No request wakes the workload at {}", service.other_ports.join(", "));
        let status = ConditionStatus::False(ConditionReason::new("NotTcp", message));
        all.push(for_information("AllPortsWake", &status, service.meta.created));
    }
    all
}

/// Returns a slice that leads connections to a scaled Service to `count` of the activators; `None`: the slice is of no
/// such Service.
pub(super) fn slice_part(
    cluster: &ClusterState,
    key: &ObjectPartKey,
    activators: &[SliceEndpoint],
    count: usize,
) -> Option<DesiredState> {
    let name = part_keys::scaled_service_of(cluster, key)?;
    let app = cluster.apps.get(&name)?;
    // Without the list, a missing workload may be one that was not observed yet.
    if !cluster.workloads.are_listed {
        return Some(DesiredState::Unmanaged);
    }
    let Some((scaled, _, revision)) = app.scaled_revision().filter(|it| it.0.slices.are_wanted)
    else {
        return Some(DesiredState::Absent);
    };
    let service = scaled.service.as_ref()?;
    let template = ParsedTemplate::of_revision(revision, cluster);
    let mode = plan::hint_mode(app, &template);
    let rules = HintRules { mode, shares: &cluster.nodes.zone_shares };
    let uid = service.meta.uid.to_string();
    let ports = service.ports.iter();
    let ports =
        ports.filter_map(|it| Some((&*it.name, scaled.activator_port(it.port)?, it.protocol)));
    let all = slices::scaled_service_slices(
        &ScaledSlicesSpec {
            namespace: &name.namespace,
            service: &name.name,
            owner: service_owner(&name, &uid),
            ports: ports.collect(),
        },
        activators,
        // Each node answers by itself, so each activator is listed.
        if service.is_external_traffic_local { 0 } else { count },
        rules,
    );
    let slice = all.into_iter().find(|it| it.name == key.name.name);
    Some(slice.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body)))
}

/// Returns the desired number of pods of a workload of a user; `None`: there is no such workload.
pub(super) fn workload_scale(cluster: &ClusterState, key: &ObjectPartKey) -> Option<DesiredState> {
    let kind = WorkloadKind::from_resource(key.resource)?;
    let workload_key = WorkloadKey { name: key.name.clone(), kind };
    let workload = cluster.workloads.workload(&workload_key)?;
    if workload.is_terminating {
        return Some(DesiredState::Unmanaged);
    }
    let desired = match cluster.workloads.holder(&workload_key) {
        Some(service) => held_number(cluster, service, workload),
        // No Service scales it any more, so it gets back the number of its user.
        None if cluster.workloads.is_abandoned(&workload_key) => Some(DesiredState::GivenBack {
            version: workload.version.clone(),
            replicas: number_to_give_back(cluster, &workload_key, workload),
        }),
        None => None,
    };
    Some(desired.unwrap_or(DesiredState::Unmanaged))
}

/// Returns the number of pods with which a workload is given back; `None`: the present one. Any number of the
/// controller below that of the user is replaced: while pods drain, some may have left before the others.
fn number_to_give_back(
    cluster: &ClusterState,
    key: &WorkloadKey,
    workload: &WorkloadState,
) -> Option<u32> {
    // Above 0 the number belongs to the HorizontalPodAutoscaler.
    let is_autoscaled = workload.replicas > 0 && cluster.workloads.autoscaler_of(key).is_some();
    let number = workload.user_replicas();
    let is_lowered = workload.is_own_number() && workload.replicas < number;
    (is_lowered && !is_autoscaled).then_some(number)
}

/// Returns the number of pods that a scaled Service gives its workload; `None`: the present one, or it is not known.
fn held_number(
    cluster: &ClusterState,
    service: &NamespacedName,
    workload: &WorkloadState,
) -> Option<DesiredState> {
    let (_, binding, revision) = cluster.apps.get(service)?.scaled_revision()?;
    if binding.uid != workload.version.uid {
        return None;
    }
    let replicas = desired_replicas(service, binding, revision, cluster);
    // A number of another client is recorded at once: a 0 that its user writes later must not look like a sleep, and
    // the next request wakes the workload to that number.
    if replicas == workload.replicas && !binding.lacks_record() {
        return None;
    }
    let is_leaving = |pod: &&RevisionPod| {
        matches!(pod.stage, PodStage::Stopping { .. }) && !pod.is_terminating()
    };
    // A StatefulSet removes the pods with the highest ordinals, whatever their marks.
    let chooses = binding.key.kind == WorkloadKind::Deployment;
    let leaving = revision.pods.iter().filter(|_| chooses).filter(is_leaving);
    let pod_name = |pod: &RevisionPod| NamespacedName::new(service.namespace.clone(), &*pod.name);
    Some(DesiredState::Replicas {
        version: workload.version.clone(),
        replicas,
        recorded: binding.user_replicas,
        pods_to_remove: leaving.map(pod_name).collect(),
    })
}
