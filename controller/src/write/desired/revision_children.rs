//! Pure: desired state of the child objects of a Revision.

use common::wire::NamespacedName;

use super::autoscaling_status;
use crate::{
    decide::{
        part_keys::{find_owner_revision, has_child_named, is_scaled},
        plan,
    },
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ParsedTemplate, PodStage, RevisionPod,
            RoutingState,
        },
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
        scale_policy::AutoscalerClass,
    },
    write::{
        children::{self, ChildObject, deployment, hpa, images, scaling},
        render,
    },
};

/// A Revision and its app, while both exist and the controller makes objects for them.
pub(super) struct LiveRevision<'a> {
    cluster: &'a ClusterState,
    owner: NamespacedName,
    pub(super) app: &'a AppState,
    revision: &'a AppRevision,
}

impl<'a> LiveRevision<'a> {
    pub(super) fn if_maintained(
        cluster: &'a ClusterState,
        owner: &NamespacedName,
        revision: &'a AppRevision,
    ) -> Option<Self> {
        let app = cluster.apps.get(owner).filter(|app| cluster.is_maintained(owner, app))?;
        app.configuration.as_ref().filter(|it| !it.is_terminating)?;
        let is_live = revision.meta.exists() && !revision.is_terminating && !revision.is_deleted;
        is_live.then(|| Self { cluster, owner: owner.clone(), app, revision })
    }

    /// Returns the path of new connections to the Revision as a mode, and the number of activators on it; 0: all.
    pub(super) fn mode_and_activators(&self) -> (scaling::ServerlessServiceMode, i32) {
        let may_serve = plan::is_direct_path(self.app, &self.owner, self.revision, self.cluster);
        autoscaling_status::serverless_service_mode(self.revision, self.class(), may_serve)
    }

    /// Calls `make` with the view of the Revision that its child objects are made from.
    pub(super) fn with_view<T>(&self, make: impl FnOnce(&children::RevisionView<'_>) -> T) -> T {
        let template = ParsedTemplate::of_revision(self.revision, self.cluster);
        let meta = render::revision_meta(self.app, self.revision, &self.owner);
        let (labels, annotations) =
            (meta.labels.unwrap_or_default(), meta.annotations.unwrap_or_default());
        // The view borrows these values, so it is passed on and not returned.
        let uid = self.revision.meta.uid.to_string();
        let view = children::RevisionView {
            namespace: &self.owner.namespace,
            name: &self.revision.name,
            uid: &uid,
            service: if self.app.service.is_some() { &self.owner.name } else { "" },
            configuration: &self.owner.name,
            labels: &labels,
            annotations: &annotations,
            spec: &template.raw.spec,
            digests: &self.revision.digests,
        };
        make(&view)
    }

    pub(super) fn class(&self) -> AutoscalerClass {
        ParsedTemplate::of_revision(self.revision, self.cluster).class
    }

    /// Returns the HorizontalPodAutoscaler, if the Revision is of that class.
    fn hpa_object(
        &self,
        name: &NamespacedName,
        revision: &children::RevisionView<'_>,
    ) -> Option<ChildObject> {
        let template = ParsedTemplate::of_revision(self.revision, self.cluster);
        // An autoscaler needs the PodAutoscaler as its owner, so it follows once that exists.
        let owner_uid = self
            .cluster
            .scaling
            .hpa_owner_uids
            .get(name)
            .filter(|_| template.class == AutoscalerClass::Hpa)?;
        let reachable =
            self.revision.routing.state != RoutingState::Reserve && !self.revision.is_stuck();
        let min = if reachable { template.policy.min_scale } else { 0 };
        Some(hpa::horizontal_pod_autoscaler(
            revision,
            hpa::HpaParameters { min, max: template.policy.max_scale, owner_uid },
        ))
    }
}

/// Returns the desired state of a child object of a Revision, except its Kubernetes Services and their slices.
pub(super) fn child_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some((owner, revision)) =
        find_owner_revision(cluster, &key.name, |it| has_child_named(cluster, key, it))
    else {
        // Each kind has a watch of its own, so the Revision may exist all the same. Kubernetes deletes the child with
        // it.
        return DesiredState::Unmanaged;
    };
    let class = ParsedTemplate::of_revision(revision, cluster).class;
    if (key.resource, key.part) == (ResourceKind::Deployment, ObjectPart::Scale) {
        return if class == AutoscalerClass::Kpa {
            deployment_scale(cluster, &owner, revision)
        } else {
            DesiredState::Unmanaged
        };
    }
    let Some(live) = LiveRevision::if_maintained(cluster, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    // Pods must not run a tag that may move: they are made once it is resolved to a digest.
    let unresolved = revision.digests.is_empty();
    // The autoscaler decides about the direct path. A new leader receives its decision a little later, and must not
    // write each of these objects twice until then.
    let undecided = class == AutoscalerClass::Kpa
        && revision.scaling.actual_scale > 0
        && revision.scaling.decision.is_none();
    // The PodAutoscaler is the owner of the HorizontalPodAutoscaler, so it must exist first.
    let unowned =
        class == AutoscalerClass::Hpa && !cluster.scaling.hpa_owner_uids.contains_key(&key.name);
    match (key.resource, key.part) {
        (ResourceKind::Deployment | ResourceKind::Image, ObjectPart::Object) if unresolved => {
            DesiredState::Unmanaged
        }
        (ResourceKind::ServerlessService, _) if undecided => DesiredState::Unmanaged,
        (ResourceKind::HorizontalPodAutoscaler, _) if unowned => DesiredState::Unmanaged,
        // The foreign autoscaler owns this status.
        (ResourceKind::PodAutoscaler, ObjectPart::Status) if class == AutoscalerClass::Foreign => {
            DesiredState::Unmanaged
        }
        (_, ObjectPart::Scale | ObjectPart::Resize)
        | (
            ResourceKind::Deployment | ResourceKind::Metric | ResourceKind::Image,
            ObjectPart::Status,
        ) => DesiredState::Unmanaged,
        (ResourceKind::PodAutoscaler, ObjectPart::Status) => DesiredState::Body(
            autoscaling_status::pod_autoscaler_status(revision, &key.name.namespace, cluster),
        ),
        (ResourceKind::ServerlessService, ObjectPart::Status) => {
            let (mode, _) = live.mode_and_activators();
            DesiredState::Body(autoscaling_status::serverless_service_status(revision, mode))
        }
        (_, ObjectPart::Status) => DesiredState::Unmanaged,
        (resource, ObjectPart::Object) => {
            let object = live.with_view(|it| build_child(&live, resource, &key.name, it));
            object.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
        }
    }
}

/// Builds the child object of this kind and name; `None`: the Revision has no such child.
fn build_child(
    live: &LiveRevision<'_>,
    resource: ResourceKind,
    name: &NamespacedName,
    revision: &children::RevisionView<'_>,
) -> Option<ChildObject> {
    Some(match resource {
        ResourceKind::Deployment => {
            // Initial number for a Deployment that does not exist yet; later `ObjectPart::Scale` sets it.
            let replicas = i32::try_from(live.revision.scaling.requested_scale).unwrap_or(i32::MAX);
            deployment::deployment(revision, &live.cluster.settings.deployment, replicas)
        }
        ResourceKind::PodAutoscaler => {
            let reachability = match live.revision.routing.state {
                _ if live.revision.is_stuck() => scaling::RevisionReachability::Unreachable,
                RoutingState::Pending => scaling::RevisionReachability::Unknown,
                RoutingState::Active => scaling::RevisionReachability::Reachable,
                RoutingState::Reserve => scaling::RevisionReachability::Unreachable,
            };
            scaling::pod_autoscaler(revision, reachability)
        }
        ResourceKind::ServerlessService => {
            let (mode, activators) = live.mode_and_activators();
            scaling::serverless_service(revision, mode, activators)
        }
        ResourceKind::HorizontalPodAutoscaler => return live.hpa_object(name, revision),
        ResourceKind::Image => {
            return images::image_objects(revision).into_iter().find(|it| it.name == name.name);
        }
        _ => return None,
    })
}

fn to_i64(pods: usize) -> i64 {
    i64::try_from(pods).unwrap_or(i64::MAX)
}

/// Returns the scale of the Deployment: the requested scale, and up to as many more pods as still answer requests. If
/// there are more pods than that, those without requests stop. A draining pod may have been stopped by a former leader,
/// or be surplus for a while: none is made to replace it.
fn deployment_scale(
    cluster: &ClusterState,
    owner: &NamespacedName,
    revision: &AppRevision,
) -> DesiredState {
    let exists = revision.meta.exists() && !revision.is_deleted;
    let app = cluster.apps.get(owner).filter(|_| exists);
    if !app.is_some_and(|it| is_scaled(cluster, owner, it, revision)) {
        return DesiredState::Unmanaged;
    }
    let pods = || revision.pods.iter().filter(|pod| !pod.is_terminating());
    let draining = pods().filter(|pod| matches!(pod.stage, PodStage::Draining { .. })).count();
    let name = |pod: &RevisionPod| NamespacedName::new(owner.namespace.as_str(), &*pod.name);
    let pods_to_remove =
        pods().filter(|pod| matches!(pod.stage, PodStage::Stopping { .. })).map(name);
    let replicas = i64::from(revision.scaling.requested_scale);
    // A draining pod counts until its requests have ended, but no new pod is made in its place.
    let max_replicas = replicas.saturating_add(to_i64(draining));
    DesiredState::Scale {
        min_replicas: replicas,
        max_replicas,
        pods_to_remove: pods_to_remove.collect(),
    }
}
