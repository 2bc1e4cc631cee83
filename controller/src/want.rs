//! Pure: an app → the desired state of its objects in the API server, one part of one object at a time.
//!
//! Only Rouse's part is desired state. A Service belongs to its user, so only its status is. A Configuration, Route or
//! Revision is desired if a parent object requires it; its status always is.

use common::wire::NamespacedName;
use serde_json::Value;

use crate::{
    children::{
        self, ChildObject, ResourceKind, deployment, hpa, images, scaling, services, slices, tagged,
    },
    kube::{DesiredState, ObjectPart, ObjectPartKey},
    observe::ActivatorReadiness,
    plan::{self, TemplateFacts},
    policy::AutoscalerClass,
    render::{self, KnativeObjectKey, KnativeObjectKind},
    world::{
        AppRevision, AppState, ClusterState, ObjectOwner, PodStage, RevisionPod,
        RouteNameAllocation, RoutingState, Uid,
    },
};

mod domains;
mod owed;
mod pods;
mod status;

pub use owed::{RequiredChildren, owed};
pub use pods::noted;

/// Returns the desired state of the object part with this key.
pub fn want(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    // The API server refuses new objects in a namespace that ends, and deletes those in it.
    if world.going.contains(&key.name.namespace) {
        return DesiredState::Any;
    }
    match key.resource {
        ResourceKind::KnativeService => knative(world, key, KnativeObjectKind::Service),
        ResourceKind::Configuration => knative(world, key, KnativeObjectKind::Configuration),
        ResourceKind::Route => knative(world, key, KnativeObjectKind::Route),
        ResourceKind::Revision => revision(world, key),
        ResourceKind::Deployment
        | ResourceKind::PodAutoscaler
        | ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric
        | ResourceKind::Image => child(world, key),
        ResourceKind::Service => service(world, key),
        ResourceKind::EndpointSlice => slice(world, key),
        ResourceKind::Pod => pods::pod(world, key),
        ResourceKind::DomainMapping => domains::mapping(world, key),
        ResourceKind::ClusterDomainClaim => domains::claim(world, &key.name.name),
        ResourceKind::Node
        | ResourceKind::ConfigMap
        | ResourceKind::Namespace
        | ResourceKind::NetworkPolicy => DesiredState::Any,
    }
}

/// Returns an object in the form for tools on a node without an API server; `None` if there is none.
pub fn shown(world: &ClusterState, key: &KnativeObjectKey) -> Option<Value> {
    let resource = match key.kind {
        KnativeObjectKind::PodAutoscaler => ResourceKind::PodAutoscaler,
        KnativeObjectKind::ServerlessService => ResourceKind::ServerlessService,
        KnativeObjectKind::Service
        | KnativeObjectKind::Configuration
        | KnativeObjectKind::Revision
        | KnativeObjectKind::Route
        | KnativeObjectKind::Pod => return render::object(world, key),
    };
    let part = |part| match want(world, &ObjectPartKey::new(resource, part, key.name.clone())) {
        DesiredState::Body(body) => Some(body),
        DesiredState::Any | DesiredState::Gone | DesiredState::Scale { .. } => None,
    };
    let mut whole = part(ObjectPart::Object)?;
    whole["status"] = part(ObjectPart::Status).unwrap_or_default();
    // It exists as long as its Revision. Without an API server nothing else sets a creation time.
    let (_, revision) = maker(world, &key.name, |it| *it.name == *key.name.name)?;
    whole["metadata"]["creationTimestamp"] = revision.meta.created.rfc3339().into();
    Some(whole)
}

/// Returns true if the controller makes objects for the app: not while its manifest is refused.
fn stays(world: &ClusterState, name: &NamespacedName, app: &AppState) -> bool {
    goes_on(world, name, app) && app.service.as_ref().is_none_or(|it| it.refused.is_none())
}

/// Returns true if the app's objects stay in use: not once their owner is gone, since then they go, too.
fn goes_on(world: &ClusterState, name: &NamespacedName, app: &AppState) -> bool {
    let orphan =
        |owner: Option<ObjectOwner>| owner == Some(ObjectOwner::Service) && app.service.is_none();
    let owners =
        [app.configuration.as_ref().map(|it| it.owner), app.route.as_ref().map(|it| it.owner)];
    let going = app.leaving() || world.going.contains(&name.namespace);
    !going && !owners.into_iter().any(orphan)
}

/// Returns true if the Revision's Deployment is scaled: nothing above it is being deleted.
pub fn scales(
    world: &ClusterState,
    name: &NamespacedName,
    app: &AppState,
    revision: &AppRevision,
) -> bool {
    // A Configuration that is deleted with `--cascade=orphan` leaves its Revisions behind.
    let is_kept = app.configuration.as_ref().map_or(revision.is_orphan, |it| !it.leaving);
    goes_on(world, name, app) && is_kept
}

/// Returns the desired state of a Service, Configuration or Route.
fn knative(world: &ClusterState, key: &ObjectPartKey, kind: KnativeObjectKind) -> DesiredState {
    let Some(app) = world.apps.get(&key.name) else { return DesiredState::Any };
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
        | KnativeObjectKind::ServerlessService => (app.service.is_some(), ObjectOwner::Nobody),
    };
    match key.part {
        ObjectPart::Scale => DesiredState::Any,
        ObjectPart::Status if there => {
            let whole = render::object(world, &KnativeObjectKey { kind, name: key.name.clone() });
            whole.map_or(DesiredState::Any, |mut it| {
                DesiredState::Body(without_nulls(it["status"].take()))
            })
        }
        ObjectPart::Status => DesiredState::Any,
        // An object of another owner stays as it is, even under the name that the Service's own would have.
        ObjectPart::Object => {
            let ours = owner == ObjectOwner::Service
                && app.service.is_some()
                && stays(world, &key.name, app);
            match (ours, &app.service) {
                (true, Some(service)) => {
                    DesiredState::Body(render::made_for_service(kind, service, &key.name))
                }
                _ => DesiredState::Any,
            }
        }
    }
}

fn revision(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(owner) = world.app_of(&key.name) else { return DesiredState::Gone };
    let Some(app) = world.apps.get(&owner) else { return DesiredState::Any };
    if !stays(world, &owner, app) || app.configuration.as_ref().is_none_or(|it| it.leaving) {
        return DesiredState::Any;
    }
    // Absent from the world means collected: `Gone` deletes it in the API server, too.
    let revision = app.revision(&key.name.name).filter(|it| !it.gone);
    let Some(revision) = revision else { return DesiredState::Gone };
    let Some(mut whole) = render::object(
        world,
        &KnativeObjectKey { kind: KnativeObjectKind::Revision, name: key.name.clone() },
    ) else {
        return DesiredState::Any;
    };
    match key.part {
        ObjectPart::Scale => DesiredState::Any,
        ObjectPart::Status if revision.meta.uid == Uid(0) => DesiredState::Any,
        ObjectPart::Status => DesiredState::Body(without_nulls(whole["status"].take())),
        ObjectPart::Object => DesiredState::Body(applicable(whole)),
    }
}

/// Returns an object as it is applied: without fields that the API server sets.
pub(crate) fn applicable(mut whole: Value) -> Value {
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
    fn of(
        world: &'a ClusterState,
        owner: &NamespacedName,
        revision: &'a AppRevision,
    ) -> Option<Self> {
        let app = world.apps.get(owner).filter(|app| stays(world, owner, app))?;
        app.configuration.as_ref().filter(|it| !it.leaving)?;
        let is_there = revision.meta.uid != Uid(0) && !revision.leaving && !revision.gone;
        is_there.then(|| Self { world, owner: owner.clone(), app, revision })
    }

    /// Returns the path of new connections to the Revision as a mode, and the number of activators in it.
    fn mode(&self) -> (scaling::ServerlessServiceMode, i32) {
        let may_serve = plan::goes_direct(self.app, &self.owner, self.revision, self.world);
        status::mode(self.revision, self.class(), may_serve)
    }

    /// Calls `make` with the view of the Revision that its child objects are made from.
    fn with<T>(&self, make: impl FnOnce(&children::RevisionView<'_>) -> T) -> T {
        let facts = TemplateFacts::of(self.revision, self.world);
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
        TemplateFacts::of(self.revision, self.world).class
    }

    /// Returns the HorizontalPodAutoscaler, if the Revision is of that class.
    fn horizontal(
        &self,
        name: &NamespacedName,
        revision: &children::RevisionView<'_>,
    ) -> Option<ChildObject> {
        let facts = TemplateFacts::of(self.revision, self.world);
        let owner =
            self.world.autoscalers.get(name).filter(|_| facts.class == AutoscalerClass::Hpa)?;
        let reachable =
            self.revision.routing.0 != RoutingState::Reserve && !self.revision.is_stuck();
        let min = if reachable { facts.policy.min_scale } else { 0 };
        Some(hpa::autoscaler(
            revision,
            hpa::HpaParameters { min, max: facts.policy.max_scale, owner },
        ))
    }
}

/// Returns the Revision that a child object of this name belongs to, with its app. Candidates are the apps whose names
/// begin the name.
fn maker<'a>(
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
    apps.find_map(in_app).or_else(|| world.odd_apps(name).cloned().find_map(in_app))
}

/// Returns the app and the Revision that an object is made for.
pub fn maker_of(world: &ClusterState, key: &ObjectPartKey) -> Option<(NamespacedName, Box<str>)> {
    let found = maker(world, &key.name, |revision| bears(world, key, revision));
    found.map(|(owner, revision)| (owner, revision.name.clone()))
}

/// Returns true if one of the Revision's child objects has the name of this key.
fn bears(world: &ClusterState, key: &ObjectPartKey, revision: &AppRevision) -> bool {
    let (own, name) = (&*revision.name, key.name.name.as_str());
    match key.resource {
        ResourceKind::Deployment => deployment::name(own) == name,
        ResourceKind::Image => {
            containers(revision, world).iter().any(|it| images::name(own, it) == name)
        }
        ResourceKind::Service => own == name || services::private_name(own) == name,
        ResourceKind::EndpointSlice => own == name || slices::name(own, slices::V6) == name,
        _ => own == name,
    }
}

fn child(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some((owner, revision)) = maker(world, &key.name, |it| bears(world, key, it)) else {
        return DesiredState::Gone;
    };
    let class = TemplateFacts::of(revision, world).class;
    if (key.resource, key.part) == (ResourceKind::Deployment, ObjectPart::Scale) {
        return if class == AutoscalerClass::Kpa {
            scale(world, &owner, revision)
        } else {
            DesiredState::Any
        };
    }
    let Some(made) = LiveRevision::of(world, &owner, revision) else { return DesiredState::Any };
    // Pods must not run a tag that may move: they are made once it is resolved to a digest.
    let unresolved = revision.digests.is_empty();
    // The autoscaler decides about the direct path. A new leader receives its decision a little later, and must not
    // write each of these objects twice until then.
    let unheard =
        class == AutoscalerClass::Kpa && revision.actual > 0 && revision.decided.is_none();
    // The PodAutoscaler is the owner of the HorizontalPodAutoscaler, so it must exist first.
    let unowned = class == AutoscalerClass::Hpa && !world.autoscalers.contains_key(&key.name);
    match (key.resource, key.part) {
        (ResourceKind::Deployment | ResourceKind::Image, ObjectPart::Object) if unresolved => {
            DesiredState::Any
        }
        (ResourceKind::ServerlessService, _) if unheard => DesiredState::Any,
        (ResourceKind::HorizontalPodAutoscaler, _) if unowned => DesiredState::Any,
        // The foreign autoscaler owns this status.
        (ResourceKind::PodAutoscaler, ObjectPart::Status) if class == AutoscalerClass::Foreign => {
            DesiredState::Any
        }
        (_, ObjectPart::Scale)
        | (
            ResourceKind::Deployment | ResourceKind::Metric | ResourceKind::Image,
            ObjectPart::Status,
        ) => DesiredState::Any,
        (ResourceKind::PodAutoscaler, ObjectPart::Status) => {
            DesiredState::Body(status::autoscaler(revision, &key.name.namespace, world))
        }
        (ResourceKind::ServerlessService, ObjectPart::Status) => {
            DesiredState::Body(status::serverless(revision, made.mode().0))
        }
        (_, ObjectPart::Status) => DesiredState::Any,
        (resource, ObjectPart::Object) => {
            let object = made.with(|it| object(&made, resource, &key.name, it));
            object.map_or(DesiredState::Gone, |it| DesiredState::Body(it.body))
        }
    }
}

fn object(
    made: &LiveRevision<'_>,
    resource: ResourceKind,
    name: &NamespacedName,
    revision: &children::RevisionView<'_>,
) -> Option<ChildObject> {
    Some(match resource {
        ResourceKind::Deployment => {
            // Initial number for a Deployment that does not exist yet; later `ObjectPart::Scale` sets it.
            let replicas = i32::try_from(made.revision.desired).unwrap_or(i32::MAX);
            deployment::deployment(revision, &made.world.settings.children, replicas)
        }
        ResourceKind::PodAutoscaler => {
            let reachability = match made.revision.routing.0 {
                _ if made.revision.is_stuck() => scaling::RevisionReachability::Unreachable,
                RoutingState::Pending => scaling::RevisionReachability::Unknown,
                RoutingState::Active => scaling::RevisionReachability::Reachable,
                RoutingState::Reserve => scaling::RevisionReachability::Unreachable,
            };
            scaling::autoscaler(revision, reachability)
        }
        ResourceKind::ServerlessService => {
            let (mode, activators) = made.mode();
            scaling::serverless_service(revision, mode, activators)
        }
        ResourceKind::HorizontalPodAutoscaler => return made.horizontal(name, revision),
        ResourceKind::Image => {
            return images::images(revision).into_iter().find(|it| it.name == name.name);
        }
        _ => return None,
    })
}

fn count(pods: usize) -> i64 {
    i64::try_from(pods).unwrap_or(i64::MAX)
}

/// Returns the desired scale of the Deployment: the desired pods, and up to as many more as still answer requests. If
/// there are more pods than that, those without requests stop. A draining pod may have been stopped by a former leader,
/// or be surplus for a while: none is made to replace it.
fn scale(world: &ClusterState, owner: &NamespacedName, revision: &AppRevision) -> DesiredState {
    let is_there = revision.meta.uid != Uid(0) && !revision.gone;
    if !is_there || !world.apps.get(owner).is_some_and(|it| scales(world, owner, it, revision)) {
        return DesiredState::Any;
    }
    let pods = || revision.pods.iter().filter(|pod| !pod.is_deleted());
    let draining = pods().filter(|pod| matches!(pod.stage, PodStage::Draining { .. })).count();
    let name = |pod: &RevisionPod| NamespacedName::new(owner.namespace.as_str(), &*pod.name);
    let leaving = pods().filter(|pod| matches!(pod.stage, PodStage::Stopping { .. })).map(name);
    let replicas = i64::from(revision.desired);
    let most = replicas.saturating_add(count(draining));
    DesiredState::Scale { replicas, most, leaving: leaving.collect() }
}

/// Returns the desired state of a Kubernetes Service: a Route's placeholder, or one of a Revision's two.
fn service(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    if key.part != ObjectPart::Object {
        return DesiredState::Any;
    }
    // A Route may hold a name that a Revision's Service would have, too: the Route comes first.
    if let Some((owner, allotment)) = named(world, &key.name) {
        let placeholder =
            placeholder(world, &owner, allotment, |it| services::placeholder(&it).body);
        return placeholder.map_or(DesiredState::Any, DesiredState::Body);
    }
    let Some((owner, revision)) = maker(world, &key.name, |it| bears(world, key, it)) else {
        return DesiredState::Gone;
    };
    let Some(made) = LiveRevision::of(world, &owner, revision) else { return DesiredState::Any };
    DesiredState::Body(made.with(|it| match *revision.name == *key.name.name {
        true => services::public(it).body,
        false => services::private(it).body,
    }))
}

/// Returns the Route that holds a name, with the name's allocation.
fn named<'a>(
    world: &'a ClusterState,
    name: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let owner = world.app_named(name)?;
    let mut all = world.apps.get(&owner)?.allotted().iter();
    let held = all.find(|it| plan::host_name(it, &owner.name) == name.name)?;
    Some((owner, held))
}

/// Calls `make` with the view of a Route's name that its objects are made from, if the Route exists.
fn placeholder<T>(
    world: &ClusterState,
    owner: &NamespacedName,
    held: &RouteNameAllocation,
    make: impl FnOnce(services::PlaceholderSpec<'_>) -> T,
) -> Option<T> {
    let app = world.apps.get(owner).filter(|app| stays(world, owner, app))?;
    let route = app.route.as_ref().filter(|it| it.meta.uid != Uid(0) && !it.leaving)?;
    let uid = route.meta.uid.to_string();
    Some(make(services::PlaceholderSpec {
        namespace: &owner.namespace,
        route: &owner.name,
        uid: &uid,
        tag: held.tag.as_deref(),
        service: if app.service.is_some() { &owner.name } else { "" },
        labels: app.route_labels(),
        annotations: app.route_annotations(),
        activator_port: Some(held.port),
    }))
}

/// Returns the Route to one of whose names a slice belongs, with the name's allocation.
fn sliced<'a>(
    world: &'a ClusterState,
    slice: &NamespacedName,
) -> Option<(NamespacedName, &'a RouteNameAllocation)> {
    let service = slice.name.strip_suffix(slices::V6).unwrap_or(&slice.name);
    let of = |app: &NamespacedName| {
        let mut all = world.apps.get(app)?.allotted().iter();
        let name =
            |it: &RouteNameAllocation| slices::name(&plan::host_name(it, &app.name), slices::V6);
        all.find(|it| name(it) == slice.name).map(|it| (app.clone(), it))
    };
    // A long name is cut before the suffix is added: then it does not show the Service's.
    named(world, &NamespacedName::new(slice.namespace.clone(), service))
        .or_else(|| world.odd_apps(slice).find_map(of))
}

/// Returns the Route that a placeholder or slice belongs to.
pub fn route_of(world: &ClusterState, key: &ObjectPartKey) -> Option<NamespacedName> {
    match key.resource {
        ResourceKind::Service => world.app_named(&key.name),
        ResourceKind::EndpointSlice => sliced(world, &key.name).map(|(route, _)| route),
        _ => None,
    }
}

fn slice(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let own = NamespacedName::new(
        key.name.namespace.as_str(),
        key.name.name.strip_suffix(slices::V6).unwrap_or_default(),
    );
    let found = sliced(world, &key.name);
    let activators = activators(world);
    let Some((owner, held)) = found else { return reached(world, key, &own, &activators) };
    let all = placeholder(world, &owner, held, |it| slices::slices(&it, &activators, SUBSET));
    let Some(all) = all else { return DesiredState::Any };
    let found = all.into_iter().find(|it| it.name == key.name.name);
    found.map_or(DesiredState::Gone, |it| DesiredState::Body(it.body))
}

/// Returns the activators that slices may list. One that is being deleted takes requests only if a slice already lists
/// it. An activator of a removed installation has the same labels, but follows no controller and wakes no Revision.
fn activators(world: &ClusterState) -> Vec<slices::SliceEndpoint> {
    let activators = world.activators.keys().filter_map(|name| world.standing(name));
    let activators = activators.filter(|(it, standing)| {
        *standing != ActivatorReadiness::Leaving || world.slices.lead_to(&it.name)
    });
    let activators = activators.map(|(it, standing)| slices::SliceEndpoint {
        pod: it.name.clone(),
        namespace: world.settings.namespace.clone(),
        node: it.node.clone(),
        zone: it.zone.clone(),
        addresses: it.addresses.clone(),
        ready: standing == ActivatorReadiness::Ready,
        leaving: standing == ActivatorReadiness::Leaving,
    });
    activators.collect()
}

/// Returns the slice of a Revision's own Service. `own` is the Service's name if the key names an IPv6 slice.
fn reached(
    world: &ClusterState,
    key: &ObjectPartKey,
    own: &NamespacedName,
    activators: &[slices::SliceEndpoint],
) -> DesiredState {
    let six = |it: &AppRevision| slices::name(&it.name, slices::V6) == key.name.name;
    let found = maker(world, &key.name, |it| *it.name == *key.name.name || six(it));
    let found = found.or_else(|| maker(world, own, |it| *it.name == *own.name));
    let Some((owner, revision)) = found else { return DesiredState::Gone };
    let Some(made) = LiveRevision::of(world, &owner, revision) else { return DesiredState::Any };
    // As with the ServerlessService: the autoscaler decides, and a new leader does not know its decision yet.
    if made.class() == AutoscalerClass::Kpa && revision.actual > 0 && revision.decided.is_none() {
        return DesiredState::Any;
    }
    // Activators know nothing of a sleeping Revision that no Route names, so they could not serve it.
    if revision.routing.0 == RoutingState::Reserve && revision.pods.is_empty() {
        return DesiredState::Gone;
    }
    let serves = made.mode().0 == scaling::ServerlessServiceMode::Serve;
    let pods = revision.pods.iter().filter(|_| serves);
    let mut pods: Vec<_> = pods.filter_map(|pod| backend(world, &owner, pod)).collect();
    // Each replica learns of pods in another order, and equal slices must be equal everywhere.
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    let port = TemplateFacts::of(revision, world).port.get();
    let slice = made.with(|it| slices::of_revision(it, &pods, port, activators, SUBSET));
    let slice = slice.filter(|it| it.name == key.name.name);
    slice.map_or(DesiredState::Gone, |it| DesiredState::Body(it.body))
}

/// Returns a serving pod as an endpoint of a slice.
fn backend(
    world: &ClusterState,
    owner: &NamespacedName,
    pod: &RevisionPod,
) -> Option<slices::SliceEndpoint> {
    let (address, also) = plan::serves(world, owner, &pod.uid)?;
    let node = pod.placed.as_ref().map(|it| it.node.to_string()).unwrap_or_default();
    Some(slices::SliceEndpoint {
        pod: pod.name.to_string(),
        namespace: owner.namespace.to_string(),
        zone: world.zones.get(&node).cloned().unwrap_or_default(),
        node,
        addresses: address.map(|it| it.ip()).into_iter().chain(also).collect(),
        ready: true,
        leaving: false,
    })
}

/// Number of activators in a name's slice (knative/serving `kpa.go`: never fewer than two).
const SUBSET: usize = 2;

/// Returns the keys of the slices of a Route's names.
pub fn slices(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let of = |it: &RouteNameAllocation| {
        let own = plan::host_name(it, &name.name);
        let key = |name: String, space: &str| {
            ObjectPartKey::new(
                ResourceKind::EndpointSlice,
                ObjectPart::Object,
                NamespacedName::new(space, name),
            )
        };
        [key(own.clone(), &name.namespace), key(slices::name(&own, slices::V6), &name.namespace)]
    };
    app.allotted().iter().flat_map(of).collect()
}

/// Returns the keys of the statuses of Service, Configuration and Route.
pub fn statuses(name: &NamespacedName) -> [ObjectPartKey; 3] {
    [ResourceKind::KnativeService, ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Status, name.clone()))
}

/// Returns the keys of all parts that change as a Revision scales.
pub fn scaled(namespace: &str, revision: &AppRevision) -> impl Iterator<Item = ObjectPartKey> {
    let name = |name: String| NamespacedName::new(namespace, name);
    let own = || name(revision.name.to_string());
    [
        ObjectPartKey::new(
            ResourceKind::Deployment,
            ObjectPart::Scale,
            name(deployment::name(&revision.name)),
        ),
        ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Status, own()),
        ObjectPartKey::new(ResourceKind::PodAutoscaler, ObjectPart::Status, own()),
    ]
    .into_iter()
    .chain(ways(namespace, revision))
}

/// Returns the keys that depend on the path of connections to a Revision: the ServerlessService, and the slices of the
/// Revision's own Service.
pub fn ways(namespace: &str, revision: &AppRevision) -> [ObjectPartKey; 4] {
    let name = |name: String| NamespacedName::new(namespace, name);
    let own = || name(revision.name.to_string());
    let six = || name(slices::name(&revision.name, slices::V6));
    [
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::ServerlessService, ObjectPart::Status, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, own()),
        ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, six()),
    ]
}

/// Returns the keys of a Revision and of its child objects.
pub fn made(namespace: &str, revision: &AppRevision, containers: &[String]) -> Vec<ObjectPartKey> {
    let key = |resource, name: String| {
        ObjectPartKey::new(resource, ObjectPart::Object, NamespacedName::new(namespace, name))
    };
    let own = || revision.name.to_string();
    let mut all = vec![
        key(ResourceKind::Revision, own()),
        key(ResourceKind::Deployment, deployment::name(&revision.name)),
        key(ResourceKind::PodAutoscaler, own()),
        key(ResourceKind::ServerlessService, own()),
        key(ResourceKind::Service, own()),
        key(ResourceKind::Service, services::private_name(&revision.name)),
    ];
    let image = |it: &String| key(ResourceKind::Image, images::name(&revision.name, it));
    all.extend(containers.iter().map(image));
    all
}

/// Returns the key of a Revision's HorizontalPodAutoscaler, if it is of that class.
pub fn horizontal(
    namespace: &str,
    revision: &AppRevision,
    world: &ClusterState,
) -> Option<ObjectPartKey> {
    let own = NamespacedName::new(namespace, &*revision.name);
    let key = || ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, ObjectPart::Object, own);
    (TemplateFacts::of(revision, world).class == AutoscalerClass::Hpa).then(key)
}

/// Returns the keys of all objects and statuses of an app.
pub fn keys(name: &NamespacedName, app: &AppState, world: &ClusterState) -> Vec<ObjectPartKey> {
    let mut all: Vec<ObjectPartKey> = statuses(name).into();
    all.extend(objects(name));
    all.extend(names(name, app));
    for revision in &app.revisions {
        // Earlier versions made a Metric, which must be removed.
        let own = NamespacedName::new(name.namespace.clone(), &*revision.name);
        all.push(ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, own));
        all.extend(made(&name.namespace, revision, &containers(revision, world)));
        all.extend(horizontal(&name.namespace, revision, world));
        all.extend(scaled(&name.namespace, revision));
        all.extend(noted(&name.namespace, revision));
    }
    all
}

/// Returns the names of a Revision's containers, init containers first.
pub fn containers(revision: &AppRevision, world: &ClusterState) -> Vec<String> {
    let facts = TemplateFacts::of(revision, world);
    let pod = &facts.template.spec.pod;
    let all = pod.init_containers.iter().flatten().chain(&pod.containers);
    all.map(|it| it.name.clone()).collect()
}

/// Returns the keys of an app's Configuration and Route.
pub fn objects(name: &NamespacedName) -> [ObjectPartKey; 2] {
    [ResourceKind::Configuration, ResourceKind::Route]
        .map(|resource| ObjectPartKey::new(resource, ObjectPart::Object, name.clone()))
}

/// Returns the keys of the placeholders and slices of a Route's names.
pub fn names(name: &NamespacedName, app: &AppState) -> Vec<ObjectPartKey> {
    let service = |it: &RouteNameAllocation| {
        let own = NamespacedName::new(name.namespace.clone(), plan::host_name(it, &name.name));
        ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, own)
    };
    app.allotted().iter().map(service).chain(slices(name, app)).collect()
}

/// Returns names of an app's objects that do not begin with the app's name: they were cut to fit, or chosen by the
/// user.
pub fn odd(name: &NamespacedName, app: &AppState, world: &ClusterState) -> Vec<NamespacedName> {
    let shows = |it: &str| it.strip_prefix(&*name.name).is_some_and(|rest| rest.starts_with('-'));
    let made = app.revisions.iter().flat_map(|revision| {
        let all = made(&name.namespace, revision, &containers(revision, world));
        let ways = ways(&name.namespace, revision);
        all.into_iter().chain(ways).map(|key| key.name).filter(|it| !shows(&it.name))
    });
    let mut odd: Vec<NamespacedName> = made.collect();
    let tags = app.route.iter().flat_map(|it| it.tags().map(Some).chain([None]));
    for tag in tags {
        let service = tagged(tag, &name.name);
        let slice = slices::name(&service, slices::V6);
        let full = |own: String| NamespacedName::new(name.namespace.as_str(), own);
        // A cut name does not show the names it was made of.
        if slice.strip_suffix(slices::V6) != Some(service.as_str()) {
            odd.push(full(slice));
        }
        if tag.is_some_and(|tag| service.len() != tag.len() + 1 + name.name.len()) {
            odd.push(full(service));
        }
    }
    odd
}
