//! Pure: an app → the desired state of its objects in the API server, one part of one object at a time.
//!
//! Only Rouse's part is desired state. A Service belongs to its user, so only its status is. A Configuration, Route or
//! Revision is desired if a parent object requires it; its status always is.

use common::wire::NamespacedName;
use serde_json::Value;

use crate::{
    api::{DesiredState, ObjectPart, ObjectPartKey},
    children::{
        self, ChildObject, ResourceKind, deployment, hpa, images, scaling, services, slices,
        tagged_name,
    },
    observe::ActivatorReadiness,
    plan::{self, TemplateFacts},
    render::{self, KnativeObjectKey, KnativeObjectKind},
    scale_policy::AutoscalerClass,
    world::{
        AppRevision, AppState, ClusterState, ObjectOwner, PodStage, RevisionPod,
        RouteNameAllocation, RoutingState, Uid,
    },
};

mod autoscaling_status;
mod domain_mappings;
mod drain_annotations;
mod required_children;

pub use drain_annotations::drain_annotation_keys;
pub use required_children::{RequiredChildren, required_children};

/// Returns the desired state of the object part with this key.
pub fn desired_state(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // The API server refuses new objects in a namespace that ends, and deletes those in it.
    if world.terminating_namespaces.contains(&key.name.namespace) {
        return DesiredState::Unmanaged;
    }
    match key.resource {
        ResourceKind::KnativeService => knative_part(world, key, KnativeObjectKind::Service),
        ResourceKind::Configuration => knative_part(world, key, KnativeObjectKind::Configuration),
        ResourceKind::Route => knative_part(world, key, KnativeObjectKind::Route),
        ResourceKind::Revision => revision_part(world, key),
        ResourceKind::Deployment
        | ResourceKind::PodAutoscaler
        | ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric
        | ResourceKind::Image => child_part(world, key),
        ResourceKind::Service => service_part(world, key),
        ResourceKind::EndpointSlice => slice_part(world, key),
        ResourceKind::Pod => drain_annotations::drain_annotation(world, key),
        ResourceKind::DomainMapping => domain_mappings::mapping_status(world, key),
        ResourceKind::ClusterDomainClaim => domain_mappings::desired_claim(world, &key.name.name),
        ResourceKind::Node
        | ResourceKind::ConfigMap
        | ResourceKind::Namespace
        | ResourceKind::NetworkPolicy => DesiredState::Unmanaged,
    }
}

/// Returns an object in the form for tools on a node without an API server; `None` if there is none.
pub fn local_object(world: &ClusterState, key: &KnativeObjectKey) -> Option<Value> {
    let resource = match key.kind {
        KnativeObjectKind::PodAutoscaler => ResourceKind::PodAutoscaler,
        KnativeObjectKind::ServerlessService => ResourceKind::ServerlessService,
        KnativeObjectKind::Service
        | KnativeObjectKind::Configuration
        | KnativeObjectKind::Revision
        | KnativeObjectKind::Route
        | KnativeObjectKind::Pod => return render::render_object(world, key),
    };
    let part =
        |part| match desired_state(world, &ObjectPartKey::new(resource, part, key.name.clone())) {
            DesiredState::Body(body) => Some(body),
            DesiredState::Unmanaged | DesiredState::Absent | DesiredState::Scale { .. } => None,
        };
    let mut whole = part(ObjectPart::Object)?;
    whole["status"] = part(ObjectPart::Status).unwrap_or_default();
    // It exists as long as its Revision. Without an API server nothing else sets a creation time.
    let (_, revision) = find_owner_revision(world, &key.name, |it| *it.name == *key.name.name)?;
    whole["metadata"]["creationTimestamp"] = revision.meta.created.rfc3339().into();
    Some(whole)
}

/// Returns true if the controller makes objects for the app: not while its manifest is refused.
fn is_maintained(world: &ClusterState, name: &NamespacedName, app: &AppState) -> bool {
    is_in_use(world, name, app) && app.service.as_ref().is_none_or(|it| it.manifest_error.is_none())
}

/// Returns true if the app's objects stay in use: not once their owner is gone, since then they go, too.
fn is_in_use(world: &ClusterState, name: &NamespacedName, app: &AppState) -> bool {
    let orphan =
        |owner: Option<ObjectOwner>| owner == Some(ObjectOwner::Service) && app.service.is_none();
    let owners =
        [app.configuration.as_ref().map(|it| it.owner), app.route.as_ref().map(|it| it.owner)];
    let going = app.is_terminating() || world.terminating_namespaces.contains(&name.namespace);
    !going && !owners.into_iter().any(orphan)
}

/// Returns true if the Revision's Deployment is scaled: nothing above it is being deleted.
pub fn is_scaled(
    world: &ClusterState,
    name: &NamespacedName,
    app: &AppState,
    revision: &AppRevision,
) -> bool {
    // A Configuration that is deleted with `--cascade=orphan` leaves its Revisions behind.
    let is_kept = app.configuration.as_ref().map_or(revision.is_orphan, |it| !it.is_terminating);
    is_in_use(world, name, app) && is_kept
}

/// Returns the desired state of a Service, Configuration or Route.
fn knative_part(
    world: &ClusterState,
    key: &ObjectPartKey,
    kind: KnativeObjectKind,
) -> DesiredState {
    let Some(app) = world.apps.get(&key.name) else { return DesiredState::Unmanaged };
    let (there, owner) = match kind {
        KnativeObjectKind::Configuration => app
            .configuration
            .as_ref()
            .map_or((false, ObjectOwner::Service), |it| (it.meta.uid != Uid(0), it.owner)),
        KnativeObjectKind::Route => app
            .route
            .as_ref()
            .map_or((false, ObjectOwner::Service), |it| (it.meta.uid != Uid(0), it.owner)),
        KnativeObjectKind::Service
        | KnativeObjectKind::Revision
        | KnativeObjectKind::Pod
        | KnativeObjectKind::PodAutoscaler
        | KnativeObjectKind::ServerlessService => (app.service.is_some(), ObjectOwner::Unowned),
    };
    match key.part {
        ObjectPart::Scale => DesiredState::Unmanaged,
        ObjectPart::Status if there => {
            let whole =
                render::render_object(world, &KnativeObjectKey { kind, name: key.name.clone() });
            whole.map_or(DesiredState::Unmanaged, |mut it| {
                DesiredState::Body(without_nulls(it["status"].take()))
            })
        }
        ObjectPart::Status => DesiredState::Unmanaged,
        // An object of another owner stays as it is, even under the name that the Service's own would have.
        ObjectPart::Object => {
            let ours = owner == ObjectOwner::Service
                && app.service.is_some()
                && is_maintained(world, &key.name, app);
            match (ours, &app.service) {
                (true, Some(service)) => {
                    DesiredState::Body(render::render_service_child(kind, service, &key.name))
                }
                _ => DesiredState::Unmanaged,
            }
        }
    }
}

fn revision_part(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(owner) = world.app_of_revision(&key.name) else { return DesiredState::Absent };
    let Some(app) = world.apps.get(&owner) else { return DesiredState::Unmanaged };
    if !is_maintained(world, &owner, app)
        || app.configuration.as_ref().is_none_or(|it| it.is_terminating)
    {
        return DesiredState::Unmanaged;
    }
    // Absent from the world means collected: `Absent` deletes it in the API server, too.
    let revision = app.revision(&key.name.name).filter(|it| !it.is_deleted);
    let Some(revision) = revision else { return DesiredState::Absent };
    let Some(mut whole) = render::render_object(
        world,
        &KnativeObjectKey { kind: KnativeObjectKind::Revision, name: key.name.clone() },
    ) else {
        return DesiredState::Unmanaged;
    };
    match key.part {
        ObjectPart::Scale => DesiredState::Unmanaged,
        ObjectPart::Status if revision.meta.uid == Uid(0) => DesiredState::Unmanaged,
        ObjectPart::Status => DesiredState::Body(without_nulls(whole["status"].take())),
        ObjectPart::Object => DesiredState::Body(without_server_fields(whole)),
    }
}

/// Returns an object as it is applied: without fields that the API server sets.
pub(crate) fn without_server_fields(mut whole: Value) -> Value {
    if let Value::Object(fields) = &mut whole {
        fields.remove("status");
    }
    if let Some(Value::Object(meta)) = whole.get_mut("metadata") {
        for given in ["uid", "generation", "creationTimestamp", "resourceVersion"] {
            meta.remove(given);
        }
    }
    whole
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(_, value)| !value.is_null());
            kept.map(|(name, value)| (name, without_nulls(value))).collect()
        }
        Value::Array(all) => all.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// A Revision and its app, while both exist and the controller makes objects for them.
struct LiveRevision<'a> {
    world: &'a ClusterState,
    owner: NamespacedName,
    app: &'a AppState,
    revision: &'a AppRevision,
}

impl<'a> LiveRevision<'a> {
    fn if_maintained(
        world: &'a ClusterState,
        owner: &NamespacedName,
        revision: &'a AppRevision,
    ) -> Option<Self> {
        let app = world.apps.get(owner).filter(|app| is_maintained(world, owner, app))?;
        app.configuration.as_ref().filter(|it| !it.is_terminating)?;
        let is_there =
            revision.meta.uid != Uid(0) && !revision.is_terminating && !revision.is_deleted;
        is_there.then(|| Self { world, owner: owner.clone(), app, revision })
    }

    /// Returns the path of new connections to the Revision as a mode, and the number of activators in it.
    fn mode(&self) -> (scaling::ServerlessServiceMode, i32) {
        let may_serve = plan::is_direct_path(self.app, &self.owner, self.revision, self.world);
        autoscaling_status::serverless_service_mode(self.revision, self.class(), may_serve)
    }

    /// Calls `make` with the view of the Revision that its child objects are made from.
    fn with_view<T>(&self, make: impl FnOnce(&children::RevisionView<'_>) -> T) -> T {
        let facts = TemplateFacts::of_revision(self.revision, self.world);
        let meta = render::revision_meta(self.app, self.revision, &self.owner);
        let (labels, annotations) =
            (meta.labels.unwrap_or_default(), meta.annotations.unwrap_or_default());
        let uid = self.revision.meta.uid.to_string();
        let seen = children::RevisionView {
            namespace: &self.owner.namespace,
            name: &self.revision.name,
            uid: &uid,
            service: if self.app.service.is_some() { &self.owner.name } else { "" },
            configuration: &self.owner.name,
            labels: &labels,
            annotations: &annotations,
            spec: &facts.template.spec,
            digests: &self.revision.digests,
        };
        make(&seen)
    }

    fn class(&self) -> AutoscalerClass {
        TemplateFacts::of_revision(self.revision, self.world).class
    }

    /// Returns the HorizontalPodAutoscaler, if the Revision is of that class.
    fn hpa_object(
        &self,
        name: &NamespacedName,
        revision: &children::RevisionView<'_>,
    ) -> Option<ChildObject> {
        let facts = TemplateFacts::of_revision(self.revision, self.world);
        let owner =
            self.world.hpa_owner_uids.get(name).filter(|_| facts.class == AutoscalerClass::Hpa)?;
        let reachable =
            self.revision.routing_state.0 != RoutingState::Reserve && !self.revision.is_stuck();
        let min = if reachable { facts.policy.min_scale } else { 0 };
        Some(hpa::horizontal_pod_autoscaler(
            revision,
            hpa::HpaParameters { min, max: facts.policy.max_scale, owner },
        ))
    }
}

/// Returns the Revision that a child object of this name belongs to, with its app. Candidates are the apps whose names
/// begin the name.
fn find_owner_revision<'a>(
    world: &'a ClusterState,
    name: &NamespacedName,
    bears: impl Fn(&AppRevision) -> bool,
) -> Option<(NamespacedName, &'a AppRevision)> {
    let in_app = |app: NamespacedName| {
        let revisions = &world.apps.get(&app)?.revisions;
        revisions.iter().find(|it| bears(it)).map(|it| (app, it))
    };
    // Names are made of the app's name and suffixes, so every prefix up to a `-` may be the app's.
    let ends = name.name.match_indices('-').map(|(at, _)| at).chain([name.name.len()]);
    let mut apps = ends.map(|at| NamespacedName::new(name.namespace.clone(), &name.name[..at]));
    apps.find_map(in_app).or_else(|| world.exceptional_owners(name).cloned().find_map(in_app))
}

/// Returns the app and the Revision that an object is made for.
pub fn owner_revision_of(
    world: &ClusterState,
    key: &ObjectPartKey,
) -> Option<(NamespacedName, Box<str>)> {
    let found =
        find_owner_revision(world, &key.name, |revision| has_child_named(world, key, revision));
    found.map(|(owner, revision)| (owner, revision.name.clone()))
}

/// Returns true if one of the Revision's child objects has the name of this key.
fn has_child_named(world: &ClusterState, key: &ObjectPartKey, revision: &AppRevision) -> bool {
    let (own, name) = (&*revision.name, key.name.name.as_str());
    match key.resource {
        ResourceKind::Deployment => deployment::deployment_name(own) == name,
        ResourceKind::Image => {
            container_names(revision, world).iter().any(|it| images::image_name(own, it) == name)
        }
        ResourceKind::Service => own == name || services::private_service_name(own) == name,
        ResourceKind::EndpointSlice => {
            own == name || slices::slice_name(own, slices::V6_SUFFIX) == name
        }
        _ => own == name,
    }
}

fn child_part(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some((owner, revision)) =
        find_owner_revision(world, &key.name, |it| has_child_named(world, key, it))
    else {
        return DesiredState::Absent;
    };
    let class = TemplateFacts::of_revision(revision, world).class;
    if (key.resource, key.part) == (ResourceKind::Deployment, ObjectPart::Scale) {
        return if class == AutoscalerClass::Kpa {
            deployment_scale(world, &owner, revision)
        } else {
            DesiredState::Unmanaged
        };
    }
    let Some(made) = LiveRevision::if_maintained(world, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    // Pods must not run a tag that may move: they are made once it is resolved to a digest.
    let unresolved = revision.digests.is_empty();
    // The autoscaler decides about the direct path. A new leader receives its decision a little later, and must not
    // write each of these objects twice until then.
    let unheard =
        class == AutoscalerClass::Kpa && revision.actual_scale > 0 && revision.decision.is_none();
    // The PodAutoscaler is the owner of the HorizontalPodAutoscaler, so it must exist first.
    let unowned = class == AutoscalerClass::Hpa && !world.hpa_owner_uids.contains_key(&key.name);
    match (key.resource, key.part) {
        (ResourceKind::Deployment | ResourceKind::Image, ObjectPart::Object) if unresolved => {
            DesiredState::Unmanaged
        }
        (ResourceKind::ServerlessService, _) if unheard => DesiredState::Unmanaged,
        (ResourceKind::HorizontalPodAutoscaler, _) if unowned => DesiredState::Unmanaged,
        // The foreign autoscaler owns this status.
        (ResourceKind::PodAutoscaler, ObjectPart::Status) if class == AutoscalerClass::Foreign => {
            DesiredState::Unmanaged
        }
        (_, ObjectPart::Scale)
        | (
            ResourceKind::Deployment | ResourceKind::Metric | ResourceKind::Image,
            ObjectPart::Status,
        ) => DesiredState::Unmanaged,
        (ResourceKind::PodAutoscaler, ObjectPart::Status) => DesiredState::Body(
            autoscaling_status::pod_autoscaler_status(revision, &key.name.namespace, world),
        ),
        (ResourceKind::ServerlessService, ObjectPart::Status) => DesiredState::Body(
            autoscaling_status::serverless_service_status(revision, made.mode().0),
        ),
        (_, ObjectPart::Status) => DesiredState::Unmanaged,
        (resource, ObjectPart::Object) => {
            let object = made.with_view(|it| build_child(&made, resource, &key.name, it));
            object.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
        }
    }
}

fn build_child(
    made: &LiveRevision<'_>,
    resource: ResourceKind,
    name: &NamespacedName,
    revision: &children::RevisionView<'_>,
) -> Option<ChildObject> {
    Some(match resource {
        ResourceKind::Deployment => {
            // Initial number for a Deployment that does not exist yet; later `ObjectPart::Scale` sets it.
            let replicas = i32::try_from(made.revision.desired_scale).unwrap_or(i32::MAX);
            deployment::deployment(revision, &made.world.settings.deployment, replicas)
        }
        ResourceKind::PodAutoscaler => {
            let reachability = match made.revision.routing_state.0 {
                _ if made.revision.is_stuck() => scaling::RevisionReachability::Unreachable,
                RoutingState::Pending => scaling::RevisionReachability::Unknown,
                RoutingState::Active => scaling::RevisionReachability::Reachable,
                RoutingState::Reserve => scaling::RevisionReachability::Unreachable,
            };
            scaling::pod_autoscaler(revision, reachability)
        }
        ResourceKind::ServerlessService => {
            let (mode, activators) = made.mode();
            scaling::serverless_service(revision, mode, activators)
        }
        ResourceKind::HorizontalPodAutoscaler => return made.hpa_object(name, revision),
        ResourceKind::Image => {
            return images::image_objects(revision).into_iter().find(|it| it.name == name.name);
        }
        _ => return None,
    })
}

fn to_i64(pods: usize) -> i64 {
    i64::try_from(pods).unwrap_or(i64::MAX)
}

/// Returns the desired scale of the Deployment: the desired pods, and up to as many more as still answer requests. If
/// there are more pods than that, those without requests stop. A draining pod may have been stopped by a former leader,
/// or be surplus for a while: none is made to replace it.
fn deployment_scale(
    world: &ClusterState,
    owner: &NamespacedName,
    revision: &AppRevision,
) -> DesiredState {
    let is_there = revision.meta.uid != Uid(0) && !revision.is_deleted;
    if !is_there || !world.apps.get(owner).is_some_and(|it| is_scaled(world, owner, it, revision)) {
        return DesiredState::Unmanaged;
    }
    let pods = || revision.pods.iter().filter(|pod| !pod.is_terminating());
    let draining = pods().filter(|pod| matches!(pod.stage, PodStage::Draining { .. })).count();
    let name = |pod: &RevisionPod| NamespacedName::new(owner.namespace.as_str(), &*pod.name);
    let leaving = pods().filter(|pod| matches!(pod.stage, PodStage::Stopping { .. })).map(name);
    let replicas = i64::from(revision.desired_scale);
    let most = replicas.saturating_add(to_i64(draining));
    DesiredState::Scale {
        min_replicas: replicas,
        max_replicas: most,
        pods_to_remove: leaving.collect(),
    }
}

/// Returns the desired state of a Kubernetes Service: a Route's placeholder, or one of a Revision's two.
fn service_part(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    if key.part != ObjectPart::Object {
        return DesiredState::Unmanaged;
    }
    // A Route may hold a name that a Revision's Service would have, too: the Route comes first.
    if let Some((owner, allotment)) = find_route_name(world, &key.name) {
        let placeholder = with_placeholder(world, &owner, allotment, |it| {
            services::placeholder_service(&it).body
        });
        return placeholder.map_or(DesiredState::Unmanaged, DesiredState::Body);
    }
    let Some((owner, revision)) =
        find_owner_revision(world, &key.name, |it| has_child_named(world, key, it))
    else {
        return DesiredState::Absent;
    };
    let Some(made) = LiveRevision::if_maintained(world, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    DesiredState::Body(made.with_view(|it| match *revision.name == *key.name.name {
        true => services::public_service(it).body,
        false => services::private_service(it).body,
    }))
}

/// Returns the Route that holds a name, with the name's allocation.
fn find_route_name<'a>(
    world: &'a ClusterState,
    name: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let owner = world.app_of_route_name(name)?;
    let mut all = world.apps.get(&owner)?.allocations().iter();
    let held = all.find(|it| plan::placeholder_name(it, &owner.name) == name.name)?;
    Some((owner, held))
}

/// Calls `make` with the view of a Route's name that its objects are made from, if the Route exists.
fn with_placeholder<T>(
    world: &ClusterState,
    owner: &NamespacedName,
    held: &RouteNameAllocation,
    make: impl FnOnce(services::PlaceholderSpec<'_>) -> T,
) -> Option<T> {
    let app = world.apps.get(owner).filter(|app| is_maintained(world, owner, app))?;
    let route = app.route.as_ref().filter(|it| it.meta.uid != Uid(0) && !it.is_terminating)?;
    let uid = route.meta.uid.to_string();
    Some(make(services::PlaceholderSpec {
        namespace: &owner.namespace,
        route: &owner.name,
        uid: &uid,
        tag: held.tag.as_deref(),
        service: if app.service.is_some() { &owner.name } else { "" },
        labels: app.route_labels(),
        annotations: app.route_annotations(),
        activator_port: Some(held.activator_port),
    }))
}

/// Returns the Route to one of whose names a slice belongs, with the name's allocation.
fn find_slice_route<'a>(
    world: &'a ClusterState,
    slice: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let service = slice.name.strip_suffix(slices::V6_SUFFIX).unwrap_or(&slice.name);
    let of = |app: &NamespacedName| {
        let mut all = world.apps.get(app)?.allocations().iter();
        let name = |it: &RouteNameAllocation| {
            slices::slice_name(&plan::placeholder_name(it, &app.name), slices::V6_SUFFIX)
        };
        all.find(|it| name(it) == slice.name).map(|it| (app.clone(), it))
    };
    // A long name is cut before the suffix is added: then it does not show the Service's.
    find_route_name(world, &NamespacedName::new(slice.namespace.clone(), service))
        .or_else(|| world.exceptional_owners(slice).find_map(of))
}

/// Returns the Route that a placeholder or slice belongs to.
pub fn owner_route_of(world: &ClusterState, key: &ObjectPartKey) -> Option<NamespacedName> {
    match key.resource {
        ResourceKind::Service => world.app_of_route_name(&key.name),
        ResourceKind::EndpointSlice => find_slice_route(world, &key.name).map(|(route, _)| route),
        _ => None,
    }
}

fn slice_part(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let own = NamespacedName::new(
        key.name.namespace.as_str(),
        key.name.name.strip_suffix(slices::V6_SUFFIX).unwrap_or_default(),
    );
    let found = find_slice_route(world, &key.name);
    let activators = slice_activators(world);
    let Some((owner, held)) = found else { return revision_slice(world, key, &own, &activators) };
    let all = with_placeholder(world, &owner, held, |it| {
        slices::route_name_slices(&it, &activators, ACTIVATORS_PER_SLICE)
    });
    let Some(all) = all else { return DesiredState::Unmanaged };
    let found = all.into_iter().find(|it| it.name == key.name.name);
    found.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
}

/// Returns the activators that slices may list. One that is being deleted takes requests only if a slice already lists
/// it. An activator of a removed installation has the same labels, but follows no controller and wakes no Revision.
fn slice_activators(world: &ClusterState) -> Vec<slices::SliceEndpoint> {
    let activators = world.activators.keys().filter_map(|name| world.activator_readiness(name));
    let activators = activators.filter(|(it, standing)| {
        *standing != ActivatorReadiness::Terminating
            || world.activator_slices.lists_activator(&it.name)
    });
    let activators = activators.map(|(it, standing)| slices::SliceEndpoint {
        pod: it.name.clone(),
        namespace: world.settings.system_namespace.clone(),
        node: it.node.clone(),
        zone: it.zone.clone(),
        addresses: it.addresses.clone(),
        ready: standing == ActivatorReadiness::Ready,
        terminating: standing == ActivatorReadiness::Terminating,
    });
    activators.collect()
}

/// Returns the slice of a Revision's own Service. `own` is the Service's name if the key names an IPv6 slice.
fn revision_slice(
    world: &ClusterState,
    key: &ObjectPartKey,
    own: &NamespacedName,
    activators: &[slices::SliceEndpoint],
) -> DesiredState {
    let six = |it: &AppRevision| slices::slice_name(&it.name, slices::V6_SUFFIX) == key.name.name;
    let found = find_owner_revision(world, &key.name, |it| *it.name == *key.name.name || six(it));
    let found = found.or_else(|| find_owner_revision(world, own, |it| *it.name == *own.name));
    let Some((owner, revision)) = found else { return DesiredState::Absent };
    let Some(made) = LiveRevision::if_maintained(world, &owner, revision) else {
        return DesiredState::Unmanaged;
    };
    // As with the ServerlessService: the autoscaler decides, and a new leader does not know its decision yet.
    if made.class() == AutoscalerClass::Kpa
        && revision.actual_scale > 0
        && revision.decision.is_none()
    {
        return DesiredState::Unmanaged;
    }
    // Activators know nothing of a sleeping Revision that no Route names, so they could not serve it.
    if revision.routing_state.0 == RoutingState::Reserve && revision.pods.is_empty() {
        return DesiredState::Absent;
    }
    let serves = made.mode().0 == scaling::ServerlessServiceMode::Serve;
    let pods = revision.pods.iter().filter(|_| serves);
    let mut pods: Vec<_> = pods.filter_map(|pod| pod_endpoint(world, &owner, pod)).collect();
    // Each replica learns of pods in another order, and equal slices must be equal everywhere.
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    let port = TemplateFacts::of_revision(revision, world).port.get();
    let slice = made
        .with_view(|it| slices::revision_slice(it, &pods, port, activators, ACTIVATORS_PER_SLICE));
    let slice = slice.filter(|it| it.name == key.name.name);
    slice.map_or(DesiredState::Absent, |it| DesiredState::Body(it.body))
}

/// Returns a serving pod as an endpoint of a slice.
fn pod_endpoint(
    world: &ClusterState,
    owner: &NamespacedName,
    pod: &RevisionPod,
) -> Option<slices::SliceEndpoint> {
    let (address, also) = plan::serving_addresses(world, owner, &pod.uid)?;
    let node = pod.kube_status.as_ref().map(|it| it.node.to_string()).unwrap_or_default();
    Some(slices::SliceEndpoint {
        pod: pod.name.to_string(),
        namespace: owner.namespace.to_string(),
        zone: world.node_zones.get(&node).cloned().unwrap_or_default(),
        node,
        addresses: address.map(|it| it.ip()).into_iter().chain(also).collect(),
        ready: true,
        terminating: false,
    })
}

/// Number of activators in a name's slice (knative/serving `kpa.go`: never fewer than two).
const ACTIVATORS_PER_SLICE: usize = 2;

/// Returns the keys of the slices of a Route's names.
pub fn slice_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let of = |it: &RouteNameAllocation| {
        let own = plan::placeholder_name(it, &name.name);
        let key = |name: String, space: &str| {
            ObjectPartKey::new(
                ResourceKind::EndpointSlice,
                ObjectPart::Object,
                NamespacedName::new(space, name),
            )
        };
        [
            key(own.clone(), &name.namespace),
            key(slices::slice_name(&own, slices::V6_SUFFIX), &name.namespace),
        ]
    };
    app.allocations().iter().flat_map(of).collect()
}

/// Returns the keys of the statuses of Service, Configuration and Route.
pub fn status_keys(name: &NamespacedName) -> [ObjectPartKey; 3] {
    [ResourceKind::KnativeService, ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Status, name.clone()))
}

/// Returns the keys of all parts that change as a Revision scales.
pub fn scale_keys(namespace: &str, revision: &AppRevision) -> impl Iterator<Item = ObjectPartKey> {
    let name = |name: String| NamespacedName::new(namespace, name);
    let own = || name(revision.name.to_string());
    [
        ObjectPartKey::new(
            ResourceKind::Deployment,
            ObjectPart::Scale,
            name(deployment::deployment_name(&revision.name)),
        ),
        ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Status, own()),
        ObjectPartKey::new(ResourceKind::PodAutoscaler, ObjectPart::Status, own()),
    ]
    .into_iter()
    .chain(path_keys(namespace, revision))
}

/// Returns the keys that depend on the path of connections to a Revision: the ServerlessService, and the slices of the
/// Revision's own Service.
pub fn path_keys(namespace: &str, revision: &AppRevision) -> [ObjectPartKey; 4] {
    let name = |name: String| NamespacedName::new(namespace, name);
    let own = || name(revision.name.to_string());
    let six = || name(slices::slice_name(&revision.name, slices::V6_SUFFIX));
    [
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Status, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, six()),
    ]
}

/// Returns the keys of a Revision and of its child objects.
pub fn revision_keys(
    namespace: &str,
    revision: &AppRevision,
    containers: &[String],
) -> Vec<ObjectPartKey> {
    let key = |resource, name: String| {
        ObjectPartKey::new(resource, ObjectPart::Object, NamespacedName::new(namespace, name))
    };
    let own = || revision.name.to_string();
    let mut all = vec![
        key(ResourceKind::Revision, own()),
        key(ResourceKind::Deployment, deployment::deployment_name(&revision.name)),
        key(ResourceKind::PodAutoscaler, own()),
        key(ResourceKind::ServerlessService, own()),
        key(ResourceKind::Service, own()),
        key(ResourceKind::Service, services::private_service_name(&revision.name)),
    ];
    let image = |it: &String| key(ResourceKind::Image, images::image_name(&revision.name, it));
    all.extend(containers.iter().map(image));
    all
}

/// Returns the key of a Revision's HorizontalPodAutoscaler, if it is of that class.
pub fn hpa_key(
    namespace: &str,
    revision: &AppRevision,
    world: &ClusterState,
) -> Option<ObjectPartKey> {
    let own = NamespacedName::new(namespace, &*revision.name);
    let key = || ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, ObjectPart::Object, own);
    (TemplateFacts::of_revision(revision, world).class == AutoscalerClass::Hpa).then(key)
}

/// Returns the keys of all objects and statuses of an app.
pub fn app_keys(name: &NamespacedName, app: &AppState, world: &ClusterState) -> Vec<ObjectPartKey> {
    let mut all: Vec<ObjectPartKey> = status_keys(name).into();
    all.extend(object_keys(name));
    all.extend(route_name_keys(name, app));
    for revision in &app.revisions {
        // Earlier versions made a Metric, which must be removed.
        let own = NamespacedName::new(name.namespace.clone(), &*revision.name);
        all.push(ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, own));
        all.extend(revision_keys(&name.namespace, revision, &container_names(revision, world)));
        all.extend(hpa_key(&name.namespace, revision, world));
        all.extend(scale_keys(&name.namespace, revision));
        all.extend(drain_annotation_keys(&name.namespace, revision));
    }
    all
}

/// Returns the names of a Revision's containers, init containers first.
pub fn container_names(revision: &AppRevision, world: &ClusterState) -> Vec<String> {
    let facts = TemplateFacts::of_revision(revision, world);
    let pod = &facts.template.spec.pod;
    let all = pod.init_containers.iter().flatten().chain(&pod.containers);
    all.map(|it| it.name.clone()).collect()
}

/// Returns the keys of an app's Configuration and Route.
pub fn object_keys(name: &NamespacedName) -> [ObjectPartKey; 2] {
    [ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Object, name.clone()))
}

/// Returns the keys of the placeholders and slices of a Route's names.
pub fn route_name_keys(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let service = |it: &RouteNameAllocation| {
        let own =
            NamespacedName::new(name.namespace.clone(), plan::placeholder_name(it, &name.name));
        ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, own)
    };
    app.allocations().iter().map(service).chain(slice_keys(name, app)).collect()
}

/// Returns names of an app's objects that do not begin with the app's name: they were cut to fit, or chosen by the
/// user.
pub fn owner_exceptions(
    name: &NamespacedName,
    app: &AppState,
    world: &ClusterState,
) -> Vec<NamespacedName> {
    let shows = |it: &str| it.strip_prefix(&*name.name).is_some_and(|rest| rest.starts_with('-'));
    let made = app.revisions.iter().flat_map(|revision| {
        let all = revision_keys(&name.namespace, revision, &container_names(revision, world));
        let ways = path_keys(&name.namespace, revision);
        all.into_iter().chain(ways).map(|key| key.name).filter(|it| !shows(&it.name))
    });
    let mut odd: Vec<NamespacedName> = made.collect();
    let tags = app.route.iter().flat_map(|it| it.tags().map(Some).chain([None]));
    for tag in tags {
        let service = tagged_name(tag, &name.name);
        let slice = slices::slice_name(&service, slices::V6_SUFFIX);
        let full = |own: String| NamespacedName::new(name.namespace.as_str(), own);
        // A cut name does not show the names it was made of.
        if slice.strip_suffix(slices::V6_SUFFIX) != Some(service.as_str()) {
            odd.push(full(slice));
        }
        if tag.is_some_and(|tag| service.len() != tag.len() + 1 + name.name.len()) {
            odd.push(full(service));
        }
    }
    odd
}
