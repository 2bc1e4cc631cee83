//! Pure: pods that are frozen or have been → the requests that they should have.

use common::wire::NamespacedName;

use crate::model::{
    cluster_state::{ClusterState, PodStage, RevisionPod},
    object::{DesiredState, ObjectPartKey, PodRequests},
};

/// Returns the desired requests of a pod. A pod that is to end keeps those that it has: restored ones could keep its
/// successor from the node. So does a pod of which the leader does not know yet if it is frozen.
pub(super) fn desired_requests(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let pod = find_pod(cluster, &key.name).filter(|it| it.stage == PodStage::Serving);
    let Some(pod) = pod else { return DesiredState::Unmanaged };
    let Some(status) = pod.kube_status.as_ref().filter(|it| !it.is_terminating) else {
        return DesiredState::Unmanaged;
    };
    match pod.resize.as_ref().map(|it| it.requests) {
        None => DesiredState::Unmanaged,
        Some(PodRequests::Original) if !status.has_reduced_requests => DesiredState::Unmanaged,
        Some(requests) => DesiredState::Requests { uid: pod.uid.clone(), requests },
    }
}

/// Returns the pod of a Revision with this name.
pub(super) fn find_pod<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
) -> Option<&'a RevisionPod> {
    let likely = name.name.rsplit_once("-deployment-");
    let likely = likely.and_then(|(revision, _)| cluster.revision(&name.namespace, revision));
    // Kubernetes cuts the pod's name if the Deployment's is long: then all Revisions of the namespace are searched.
    let from = cluster.apps.range(NamespacedName::new(name.namespace.clone(), "")..);
    let apps = from.take_while(|(app, _)| app.namespace == name.namespace);
    let all = apps.flat_map(|(_, app)| &app.revisions);
    let is_named = |it: &&RevisionPod| *it.name == *name.name;
    likely.into_iter().chain(all).find_map(|it| it.pods.iter().find(is_named))
}
