//! Pure: the workload that a scaled Service scales, or the reason for which it scales none.

use std::collections::BTreeSet;

use common::wire::NamespacedName;

use crate::model::cluster_state::{
    AppState, ClusterState, ScaledRefusal, UserService, WorkloadKey, WorkloadPod, WorkloadState,
};

/// Number of owners of pods that a message names.
const MAX_NAMED_OWNERS: usize = 4;

/// Returns the workload of the Service with this name, which is that of the app.
pub(crate) fn resolve_workload(
    name: &NamespacedName,
    app: &AppState,
    service: &UserService,
    cluster: &ClusterState,
) -> Result<WorkloadKey, ScaledRefusal> {
    if let Some(owner) = knative_owner(name, app, cluster) {
        return Err(ScaledRefusal::NameTaken(owner.into()));
    }
    let workload = select_workload(name, service, cluster)?;
    // Two Services would scale one workload against each other.
    match older_service(name, service, &workload, cluster) {
        Some(service) => Err(ScaledRefusal::WorkloadTaken { workload, service }),
        None => Ok(workload),
    }
}

/// Returns the object of Knative that has the name; `None`: the name is free for a scaled Service.
fn knative_owner(name: &NamespacedName, app: &AppState, cluster: &ClusterState) -> Option<String> {
    let kinds = [
        ("Knative Service", app.service.is_some()),
        ("Configuration", app.configuration.is_some()),
        ("Route", app.route.is_some()),
    ];
    if let Some((kind, _)) = kinds.into_iter().find(|(_, exists)| *exists) {
        return Some(format!("the {kind} {:?}", name.name));
    }
    // The Revision of the Service has the Service's name, and the RouteTable has one Revision of each name.
    let has_revisions = app.revisions.iter().any(|it| !it.is_scaled_service);
    let other_app = cluster.app_of_revision(name).filter(|it| it != name);
    (has_revisions || other_app.is_some()).then(|| format!("the Revision {:?}", name.name))
}

/// Returns the only workload that the Service selects, if no other Service has it.
fn select_workload(
    name: &NamespacedName,
    service: &UserService,
    cluster: &ClusterState,
) -> Result<WorkloadKey, ScaledRefusal> {
    if let Some(refusal) = &service.refusal {
        return Err(refusal.clone());
    }
    let workloads: Vec<(&WorkloadKey, &WorkloadState)> =
        cluster.workloads.workloads_of(name).collect();
    let [(key, workload), others @ ..] = workloads.as_slice() else {
        return Err(ScaledRefusal::NoWorkload);
    };
    // The Service may also select pods of no workload, or of a kind that Rouse does not scale. They would go on serving
    // while the workload sleeps.
    let belongs = |pod: &WorkloadPod| workloads.iter().any(|(key, it)| pod.belongs_to(key, it));
    // Pods of a deleted workload end soon, and are no reason for a refusal.
    let foreign_pods = cluster.workloads.pods_of(name);
    let foreign_pods =
        foreign_pods.filter(|(_, it)| !it.pod.is_terminating() && !belongs(it)).map(pod_owner);
    let foreign: BTreeSet<String> = foreign_pods.collect();
    if !others.is_empty() || !foreign.is_empty() {
        let owners = workloads.iter().map(|(key, _)| key.to_string()).chain(foreign);
        let named: Vec<String> = owners.take(MAX_NAMED_OWNERS).collect();
        return Err(ScaledRefusal::SeveralWorkloads(named.join(", ").into()));
    }
    // Such pods have no network namespace of their own, in which their requests could be counted.
    if workload.uses_host_network {
        return Err(ScaledRefusal::HostNetwork((*key).clone()));
    }
    // A StatefulSet at zero pods would lose all its data.
    if workload.deletes_volumes {
        return Err(ScaledRefusal::VolumesDeleted((*key).clone()));
    }
    Ok((*key).clone())
}

/// Describes the owner of a pod, or the pod itself if it has none.
fn pod_owner((name, pod): (&NamespacedName, &WorkloadPod)) -> String {
    match &pod.owner {
        Some(owner) => format!("{} {:?}", owner.kind, owner.name),
        None => format!("Pod {:?}", name.name.as_str()),
    }
}

/// Returns an older scaled Service that has the workload. The age is read from objects, so each replica of the
/// controller finds the same one.
fn older_service(
    name: &NamespacedName,
    service: &UserService,
    workload: &WorkloadKey,
    cluster: &ClusterState,
) -> Option<NamespacedName> {
    let age = |service: &UserService, name: &NamespacedName| {
        (service.meta.created, service.meta.uid, name.clone())
    };
    let own_age = age(service, name);
    // A Service that is refused for another reason does not have the workload.
    cluster.workloads.services_of(workload).into_iter().filter(|it| it != name).find(|other| {
        let Some(app) = cluster.apps.get(other) else { return false };
        let Some(rival) = app.scaled.as_ref().and_then(|it| it.wanted_service()) else {
            return false;
        };
        age(rival, other) < own_age
            && knative_owner(other, app, cluster).is_none()
            && select_workload(other, rival, cluster).as_ref() == Ok(workload)
    })
}
