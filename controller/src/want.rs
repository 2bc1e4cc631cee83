//! Pure: an app → the desired state of its objects in the API server, one part of one object at a time.
//!
//! Only Rouse's part is desired state. A Service belongs to its user, so only its status is. A Configuration, Route or
//! Revision is desired if a parent object requires it; its status always is.

use common::wire::Name;
use serde_json::Value;

use crate::{
    children::{
        self, Object, Resource, deployment, hpa, images, scaling, services, slices, tagged,
    },
    kube::{Key, Part, Want},
    observe::Standing,
    plan::{self, Facts},
    policy::Class,
    render::{self, ObjectKey, ObjectKind},
    world::{Allotment, App, Owner, Pod, Revision, Routing, Stage, Uid, World},
};

mod domains;
mod owed;
mod pods;
mod status;

pub use owed::{Owed, owed};
pub use pods::noted;

/// Returns the desired state of the object part with this key.
pub fn want(world: &World, key: &Key) -> Want {
    // The API server refuses new objects in a namespace that ends, and deletes those in it.
    if world.going.contains(&key.name.namespace) {
        return Want::Any;
    }
    match key.resource {
        Resource::KnativeService => knative(world, key, ObjectKind::Service),
        Resource::Configuration => knative(world, key, ObjectKind::Configuration),
        Resource::Route => knative(world, key, ObjectKind::Route),
        Resource::Revision => revision(world, key),
        Resource::Deployment
        | Resource::PodAutoscaler
        | Resource::ServerlessService
        | Resource::HorizontalPodAutoscaler
        | Resource::Metric
        | Resource::Image => child(world, key),
        Resource::Service => service(world, key),
        Resource::EndpointSlice => slice(world, key),
        Resource::Pod => pods::pod(world, key),
        Resource::DomainMapping => domains::mapping(world, key),
        Resource::ClusterDomainClaim => domains::claim(world, &key.name.name),
        Resource::Node | Resource::ConfigMap | Resource::Namespace | Resource::NetworkPolicy => {
            Want::Any
        }
    }
}

/// Returns an object in the form for tools on a node without an API server; `None` if there is none.
pub fn shown(world: &World, key: &ObjectKey) -> Option<Value> {
    let resource = match key.kind {
        ObjectKind::PodAutoscaler => Resource::PodAutoscaler,
        ObjectKind::ServerlessService => Resource::ServerlessService,
        ObjectKind::Service
        | ObjectKind::Configuration
        | ObjectKind::Revision
        | ObjectKind::Route
        | ObjectKind::Pod => return render::object(world, key),
    };
    let part = |part| match want(world, &Key::new(resource, part, key.name.clone())) {
        Want::Body(body) => Some(body),
        Want::Any | Want::Gone | Want::Scale { .. } => None,
    };
    let mut whole = part(Part::Object)?;
    whole["status"] = part(Part::Status).unwrap_or_default();
    // It exists as long as its Revision. Without an API server nothing else sets a creation time.
    let (_, revision) = maker(world, &key.name, |it| *it.name == *key.name.name)?;
    whole["metadata"]["creationTimestamp"] = revision.meta.created.rfc3339().into();
    Some(whole)
}

/// Returns true if the controller makes objects for the app: not while its manifest is refused.
fn stays(world: &World, name: &Name, app: &App) -> bool {
    goes_on(world, name, app) && app.service.as_ref().is_none_or(|it| it.refused.is_none())
}

/// Returns true if the app's objects stay in use: not once their owner is gone, since then they go, too.
fn goes_on(world: &World, name: &Name, app: &App) -> bool {
    let orphan = |owner: Option<Owner>| owner == Some(Owner::Service) && app.service.is_none();
    let owners =
        [app.configuration.as_ref().map(|it| it.owner), app.route.as_ref().map(|it| it.owner)];
    let going = app.leaving() || world.going.contains(&name.namespace);
    !going && !owners.into_iter().any(orphan)
}

/// Returns true if the Revision's Deployment is scaled: nothing above it is being deleted.
pub fn scales(world: &World, name: &Name, app: &App, revision: &Revision) -> bool {
    // A Configuration that is deleted with `--cascade=orphan` leaves its Revisions behind.
    let is_kept = app.configuration.as_ref().map_or(revision.is_orphan, |it| !it.leaving);
    goes_on(world, name, app) && is_kept
}

/// Returns the desired state of a Service, Configuration or Route.
fn knative(world: &World, key: &Key, kind: ObjectKind) -> Want {
    let Some(app) = world.apps.get(&key.name) else { return Want::Any };
    let (there, owner) = match kind {
        ObjectKind::Configuration => app
            .configuration
            .as_ref()
            .map_or((false, Owner::Service), |it| (it.meta.uid != Uid(0), it.owner)),
        ObjectKind::Route => app
            .route
            .as_ref()
            .map_or((false, Owner::Service), |it| (it.meta.uid != Uid(0), it.owner)),
        ObjectKind::Service
        | ObjectKind::Revision
        | ObjectKind::Pod
        | ObjectKind::PodAutoscaler
        | ObjectKind::ServerlessService => (app.service.is_some(), Owner::Nobody),
    };
    match key.part {
        Part::Scale => Want::Any,
        Part::Status if there => {
            let whole = render::object(world, &ObjectKey { kind, name: key.name.clone() });
            whole.map_or(Want::Any, |mut it| Want::Body(without_nulls(it["status"].take())))
        }
        Part::Status => Want::Any,
        // An object of another owner stays as it is, even under the name that the Service's own would have.
        Part::Object => {
            let ours =
                owner == Owner::Service && app.service.is_some() && stays(world, &key.name, app);
            match (ours, &app.service) {
                (true, Some(service)) => {
                    Want::Body(render::made_for_service(kind, service, &key.name))
                }
                _ => Want::Any,
            }
        }
    }
}

fn revision(world: &World, key: &Key) -> Want {
    let Some(owner) = world.app_of(&key.name) else { return Want::Gone };
    let Some(app) = world.apps.get(&owner) else { return Want::Any };
    if !stays(world, &owner, app) || app.configuration.as_ref().is_none_or(|it| it.leaving) {
        return Want::Any;
    }
    // Absent from the world means collected: `Gone` deletes it in the API server, too.
    let revision = app.revision(&key.name.name).filter(|it| !it.gone);
    let Some(revision) = revision else { return Want::Gone };
    let Some(mut whole) =
        render::object(world, &ObjectKey { kind: ObjectKind::Revision, name: key.name.clone() })
    else {
        return Want::Any;
    };
    match key.part {
        Part::Scale => Want::Any,
        Part::Status if revision.meta.uid == Uid(0) => Want::Any,
        Part::Status => Want::Body(without_nulls(whole["status"].take())),
        Part::Object => Want::Body(applicable(whole)),
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
struct Made<'a> {
    world: &'a World,
    owner: Name,
    app: &'a App,
    revision: &'a Revision,
}

impl<'a> Made<'a> {
    fn of(world: &'a World, owner: &Name, revision: &'a Revision) -> Option<Self> {
        let app = world.apps.get(owner).filter(|app| stays(world, owner, app))?;
        app.configuration.as_ref().filter(|it| !it.leaving)?;
        let is_there = revision.meta.uid != Uid(0) && !revision.leaving && !revision.gone;
        is_there.then(|| Self { world, owner: owner.clone(), app, revision })
    }

    /// Returns the path of new connections to the Revision as a mode, and the number of activators in it.
    fn mode(&self) -> (scaling::Mode, i32) {
        let may_serve = plan::goes_direct(self.app, &self.owner, self.revision, self.world);
        status::mode(self.revision, self.class(), may_serve)
    }

    /// Calls `make` with the view of the Revision that its child objects are made from.
    fn with<T>(&self, make: impl FnOnce(&children::Revision<'_>) -> T) -> T {
        let facts = Facts::of(self.revision, self.world);
        let meta = render::revision_meta(self.app, self.revision, &self.owner);
        let (labels, annotations) =
            (meta.labels.unwrap_or_default(), meta.annotations.unwrap_or_default());
        let uid = self.revision.meta.uid.to_string();
        let seen = children::Revision {
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

    fn class(&self) -> Class {
        Facts::of(self.revision, self.world).class
    }

    /// Returns the HorizontalPodAutoscaler, if the Revision is of that class.
    fn horizontal(&self, name: &Name, revision: &children::Revision<'_>) -> Option<Object> {
        let facts = Facts::of(self.revision, self.world);
        let owner = self.world.autoscalers.get(name).filter(|_| facts.class == Class::Hpa)?;
        let reachable = self.revision.routing.0 != Routing::Reserve && !self.revision.is_stuck();
        let min = if reachable { facts.policy.min_scale } else { 0 };
        Some(hpa::autoscaler(revision, hpa::Parts { min, max: facts.policy.max_scale, owner }))
    }
}

/// Returns the Revision that a child object of this name belongs to, with its app. Candidates are the apps whose names
/// begin the name.
fn maker<'a>(
    world: &'a World,
    name: &Name,
    bears: impl Fn(&Revision) -> bool,
) -> Option<(Name, &'a Revision)> {
    let in_app = |app: Name| {
        let revisions = &world.apps.get(&app)?.revisions;
        revisions.iter().find(|it| bears(it)).map(|it| (app, it))
    };
    // Names are made of the app's name and suffixes, so every prefix up to a `-` may be the app's.
    let ends = name.name.match_indices('-').map(|(at, _)| at).chain([name.name.len()]);
    let mut apps = ends.map(|at| Name::new(name.namespace.clone(), &name.name[..at]));
    apps.find_map(in_app).or_else(|| world.odd_apps(name).cloned().find_map(in_app))
}

/// Returns the app and the Revision that an object is made for.
pub fn maker_of(world: &World, key: &Key) -> Option<(Name, Box<str>)> {
    let found = maker(world, &key.name, |revision| bears(world, key, revision));
    found.map(|(owner, revision)| (owner, revision.name.clone()))
}

/// Returns true if one of the Revision's child objects has the name of this key.
fn bears(world: &World, key: &Key, revision: &Revision) -> bool {
    let (own, name) = (&*revision.name, key.name.name.as_str());
    match key.resource {
        Resource::Deployment => deployment::name(own) == name,
        Resource::Image => {
            containers(revision, world).iter().any(|it| images::name(own, it) == name)
        }
        Resource::Service => own == name || services::private_name(own) == name,
        Resource::EndpointSlice => own == name || slices::name(own, slices::V6) == name,
        _ => own == name,
    }
}

fn child(world: &World, key: &Key) -> Want {
    let Some((owner, revision)) = maker(world, &key.name, |it| bears(world, key, it)) else {
        return Want::Gone;
    };
    let class = Facts::of(revision, world).class;
    if (key.resource, key.part) == (Resource::Deployment, Part::Scale) {
        return if class == Class::Kpa { scale(world, &owner, revision) } else { Want::Any };
    }
    let Some(made) = Made::of(world, &owner, revision) else { return Want::Any };
    // Pods must not run a tag that may move: they are made once it is resolved to a digest.
    let unresolved = revision.digests.is_empty();
    // The autoscaler decides about the direct path. A new leader receives its decision a little later, and must not
    // write each of these objects twice until then.
    let unheard = class == Class::Kpa && revision.actual > 0 && revision.decided.is_none();
    // The PodAutoscaler is the owner of the HorizontalPodAutoscaler, so it must exist first.
    let unowned = class == Class::Hpa && !world.autoscalers.contains_key(&key.name);
    match (key.resource, key.part) {
        (Resource::Deployment | Resource::Image, Part::Object) if unresolved => Want::Any,
        (Resource::ServerlessService, _) if unheard => Want::Any,
        (Resource::HorizontalPodAutoscaler, _) if unowned => Want::Any,
        // The foreign autoscaler owns this status.
        (Resource::PodAutoscaler, Part::Status) if class == Class::Foreign => Want::Any,
        (_, Part::Scale)
        | (Resource::Deployment | Resource::Metric | Resource::Image, Part::Status) => Want::Any,
        (Resource::PodAutoscaler, Part::Status) => {
            Want::Body(status::autoscaler(revision, &key.name.namespace, world))
        }
        (Resource::ServerlessService, Part::Status) => {
            Want::Body(status::serverless(revision, made.mode().0))
        }
        (_, Part::Status) => Want::Any,
        (resource, Part::Object) => {
            let object = made.with(|it| object(&made, resource, &key.name, it));
            object.map_or(Want::Gone, |it| Want::Body(it.body))
        }
    }
}

fn object(
    made: &Made<'_>,
    resource: Resource,
    name: &Name,
    revision: &children::Revision<'_>,
) -> Option<Object> {
    Some(match resource {
        Resource::Deployment => {
            // Initial number for a Deployment that does not exist yet; later `Part::Scale` sets it.
            let replicas = i32::try_from(made.revision.desired).unwrap_or(i32::MAX);
            deployment::deployment(revision, &made.world.settings.children, replicas)
        }
        Resource::PodAutoscaler => {
            let reachability = match made.revision.routing.0 {
                _ if made.revision.is_stuck() => scaling::Reachability::Unreachable,
                Routing::Pending => scaling::Reachability::Unknown,
                Routing::Active => scaling::Reachability::Reachable,
                Routing::Reserve => scaling::Reachability::Unreachable,
            };
            scaling::autoscaler(revision, reachability)
        }
        Resource::ServerlessService => {
            let (mode, activators) = made.mode();
            scaling::serverless_service(revision, mode, activators)
        }
        Resource::HorizontalPodAutoscaler => return made.horizontal(name, revision),
        Resource::Image => {
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
fn scale(world: &World, owner: &Name, revision: &Revision) -> Want {
    let is_there = revision.meta.uid != Uid(0) && !revision.gone;
    if !is_there || !world.apps.get(owner).is_some_and(|it| scales(world, owner, it, revision)) {
        return Want::Any;
    }
    let pods = || revision.pods.iter().filter(|pod| !pod.is_deleted());
    let draining = pods().filter(|pod| matches!(pod.stage, Stage::Draining { .. })).count();
    let name = |pod: &Pod| Name::new(owner.namespace.as_str(), &*pod.name);
    let leaving = pods().filter(|pod| matches!(pod.stage, Stage::Stopping { .. })).map(name);
    let replicas = i64::from(revision.desired);
    let most = replicas.saturating_add(count(draining));
    Want::Scale { replicas, most, leaving: leaving.collect() }
}

/// Returns the desired state of a Kubernetes Service: a Route's placeholder, or one of a Revision's two.
fn service(world: &World, key: &Key) -> Want {
    if key.part != Part::Object {
        return Want::Any;
    }
    // A Route may hold a name that a Revision's Service would have, too: the Route comes first.
    if let Some((owner, allotment)) = named(world, &key.name) {
        let placeholder =
            placeholder(world, &owner, allotment, |it| services::placeholder(&it).body);
        return placeholder.map_or(Want::Any, Want::Body);
    }
    let Some((owner, revision)) = maker(world, &key.name, |it| bears(world, key, it)) else {
        return Want::Gone;
    };
    let Some(made) = Made::of(world, &owner, revision) else { return Want::Any };
    Want::Body(made.with(|it| match *revision.name == *key.name.name {
        true => services::public(it).body,
        false => services::private(it).body,
    }))
}

/// Returns the Route that holds a name, with the name's allocation.
fn named<'a>(world: &'a World, name: &Name) -> Option<(Name, &'a Allotment)> {
    let owner = world.app_named(name)?;
    let mut all = world.apps.get(&owner)?.allotted().iter();
    let held = all.find(|it| plan::host_name(it, &owner.name) == name.name)?;
    Some((owner, held))
}

/// Calls `make` with the view of a Route's name that its objects are made from, if the Route exists.
fn placeholder<T>(
    world: &World,
    owner: &Name,
    held: &Allotment,
    make: impl FnOnce(services::Placeholder<'_>) -> T,
) -> Option<T> {
    let app = world.apps.get(owner).filter(|app| stays(world, owner, app))?;
    let route = app.route.as_ref().filter(|it| it.meta.uid != Uid(0) && !it.leaving)?;
    let uid = route.meta.uid.to_string();
    Some(make(services::Placeholder {
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
fn sliced<'a>(world: &'a World, slice: &Name) -> Option<(Name, &'a Allotment)> {
    let service = slice.name.strip_suffix(slices::V6).unwrap_or(&slice.name);
    let of = |app: &Name| {
        let mut all = world.apps.get(app)?.allotted().iter();
        let name = |it: &Allotment| slices::name(&plan::host_name(it, &app.name), slices::V6);
        all.find(|it| name(it) == slice.name).map(|it| (app.clone(), it))
    };
    // A long name is cut before the suffix is added: then it does not show the Service's.
    named(world, &Name::new(slice.namespace.clone(), service))
        .or_else(|| world.odd_apps(slice).find_map(of))
}

/// Returns the Route that a placeholder or slice belongs to.
pub fn route_of(world: &World, key: &Key) -> Option<Name> {
    match key.resource {
        Resource::Service => world.app_named(&key.name),
        Resource::EndpointSlice => sliced(world, &key.name).map(|(route, _)| route),
        _ => None,
    }
}

fn slice(world: &World, key: &Key) -> Want {
    let own = Name::new(
        key.name.namespace.as_str(),
        key.name.name.strip_suffix(slices::V6).unwrap_or_default(),
    );
    let found = sliced(world, &key.name);
    let activators = activators(world);
    let Some((owner, held)) = found else { return reached(world, key, &own, &activators) };
    let all = placeholder(world, &owner, held, |it| slices::slices(&it, &activators, SUBSET));
    let Some(all) = all else { return Want::Any };
    let found = all.into_iter().find(|it| it.name == key.name.name);
    found.map_or(Want::Gone, |it| Want::Body(it.body))
}

/// Returns the activators that slices may list. One that is being deleted takes requests only if a slice already lists
/// it. An activator of a removed installation has the same labels, but follows no controller and wakes no Revision.
fn activators(world: &World) -> Vec<slices::Activator> {
    let activators = world.activators.keys().filter_map(|name| world.standing(name));
    let activators = activators
        .filter(|(it, standing)| *standing != Standing::Leaving || world.slices.lead_to(&it.name));
    let activators = activators.map(|(it, standing)| slices::Activator {
        pod: it.name.clone(),
        namespace: world.settings.namespace.clone(),
        node: it.node.clone(),
        zone: it.zone.clone(),
        addresses: it.addresses.clone(),
        ready: standing == Standing::Ready,
        leaving: standing == Standing::Leaving,
    });
    activators.collect()
}

/// Returns the slice of a Revision's own Service. `own` is the Service's name if the key names an IPv6 slice.
fn reached(world: &World, key: &Key, own: &Name, activators: &[slices::Activator]) -> Want {
    let six = |it: &Revision| slices::name(&it.name, slices::V6) == key.name.name;
    let found = maker(world, &key.name, |it| *it.name == *key.name.name || six(it));
    let found = found.or_else(|| maker(world, own, |it| *it.name == *own.name));
    let Some((owner, revision)) = found else { return Want::Gone };
    let Some(made) = Made::of(world, &owner, revision) else { return Want::Any };
    // As with the ServerlessService: the autoscaler decides, and a new leader does not know its decision yet.
    if made.class() == Class::Kpa && revision.actual > 0 && revision.decided.is_none() {
        return Want::Any;
    }
    // Activators know nothing of a sleeping Revision that no Route names, so they could not serve it.
    if revision.routing.0 == Routing::Reserve && revision.pods.is_empty() {
        return Want::Gone;
    }
    let serves = made.mode().0 == scaling::Mode::Serve;
    let pods = revision.pods.iter().filter(|_| serves);
    let mut pods: Vec<_> = pods.filter_map(|pod| backend(world, &owner, pod)).collect();
    // Each replica learns of pods in another order, and equal slices must be equal everywhere.
    pods.sort_by(|a, b| a.pod.cmp(&b.pod));
    let port = Facts::of(revision, world).port.get();
    let slice = made.with(|it| slices::of_revision(it, &pods, port, activators, SUBSET));
    let slice = slice.filter(|it| it.name == key.name.name);
    slice.map_or(Want::Gone, |it| Want::Body(it.body))
}

/// Returns a serving pod as an endpoint of a slice.
fn backend(world: &World, owner: &Name, pod: &Pod) -> Option<slices::Activator> {
    let (address, also) = plan::serves(world, owner, &pod.uid)?;
    let node = pod.placed.as_ref().map(|it| it.node.to_string()).unwrap_or_default();
    Some(slices::Activator {
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
pub fn slices(name: &Name, app: &App) -> Vec<Key> {
    let of = |it: &Allotment| {
        let own = plan::host_name(it, &name.name);
        let key = |name: String, space: &str| {
            Key::new(Resource::EndpointSlice, Part::Object, Name::new(space, name))
        };
        [key(own.clone(), &name.namespace), key(slices::name(&own, slices::V6), &name.namespace)]
    };
    app.allotted().iter().flat_map(of).collect()
}

/// Returns the keys of the statuses of Service, Configuration and Route.
pub fn statuses(name: &Name) -> [Key; 3] {
    [Resource::KnativeService, Resource::Configuration, Resource::Route]
        .map(|resource| Key::new(resource, Part::Status, name.clone()))
}

/// Returns the keys of all parts that change as a Revision scales.
pub fn scaled(namespace: &str, revision: &Revision) -> impl Iterator<Item = Key> {
    let name = |name: String| Name::new(namespace, name);
    let own = || name(revision.name.to_string());
    [
        Key::new(Resource::Deployment, Part::Scale, name(deployment::name(&revision.name))),
        Key::new(Resource::Revision, Part::Status, own()),
        Key::new(Resource::PodAutoscaler, Part::Status, own()),
    ]
    .into_iter()
    .chain(ways(namespace, revision))
}

/// Returns the keys that depend on the path of connections to a Revision: the ServerlessService, and the slices of the
/// Revision's own Service.
pub fn ways(namespace: &str, revision: &Revision) -> [Key; 4] {
    let name = |name: String| Name::new(namespace, name);
    let own = || name(revision.name.to_string());
    let six = || name(slices::name(&revision.name, slices::V6));
    [
        Key::new(Resource::ServerlessService, Part::Object, own()),
        Key::new(Resource::ServerlessService, Part::Status, own()),
        Key::new(Resource::EndpointSlice, Part::Object, own()),
        Key::new(Resource::EndpointSlice, Part::Object, six()),
    ]
}

/// Returns the keys of a Revision and of its child objects.
pub fn made(namespace: &str, revision: &Revision, containers: &[String]) -> Vec<Key> {
    let key = |resource, name: String| Key::new(resource, Part::Object, Name::new(namespace, name));
    let own = || revision.name.to_string();
    let mut all = vec![
        key(Resource::Revision, own()),
        key(Resource::Deployment, deployment::name(&revision.name)),
        key(Resource::PodAutoscaler, own()),
        key(Resource::ServerlessService, own()),
        key(Resource::Service, own()),
        key(Resource::Service, services::private_name(&revision.name)),
    ];
    let image = |it: &String| key(Resource::Image, images::name(&revision.name, it));
    all.extend(containers.iter().map(image));
    all
}

/// Returns the key of a Revision's HorizontalPodAutoscaler, if it is of that class.
pub fn horizontal(namespace: &str, revision: &Revision, world: &World) -> Option<Key> {
    let own = Name::new(namespace, &*revision.name);
    let key = || Key::new(Resource::HorizontalPodAutoscaler, Part::Object, own);
    (Facts::of(revision, world).class == Class::Hpa).then(key)
}

/// Returns the keys of all objects and statuses of an app.
pub fn keys(name: &Name, app: &App, world: &World) -> Vec<Key> {
    let mut all: Vec<Key> = statuses(name).into();
    all.extend(objects(name));
    all.extend(names(name, app));
    for revision in &app.revisions {
        // Earlier versions made a Metric, which must be removed.
        let own = Name::new(name.namespace.clone(), &*revision.name);
        all.push(Key::new(Resource::Metric, Part::Object, own));
        all.extend(made(&name.namespace, revision, &containers(revision, world)));
        all.extend(horizontal(&name.namespace, revision, world));
        all.extend(scaled(&name.namespace, revision));
        all.extend(noted(&name.namespace, revision));
    }
    all
}

/// Returns the names of a Revision's containers, init containers first.
pub fn containers(revision: &Revision, world: &World) -> Vec<String> {
    let facts = Facts::of(revision, world);
    let pod = &facts.template.spec.pod;
    let all = pod.init_containers.iter().flatten().chain(&pod.containers);
    all.map(|it| it.name.clone()).collect()
}

/// Returns the keys of an app's Configuration and Route.
pub fn objects(name: &Name) -> [Key; 2] {
    [Resource::Configuration, Resource::Route]
        .map(|resource| Key::new(resource, Part::Object, name.clone()))
}

/// Returns the keys of the placeholders and slices of a Route's names.
pub fn names(name: &Name, app: &App) -> Vec<Key> {
    let service = |it: &Allotment| {
        let own = Name::new(name.namespace.clone(), plan::host_name(it, &name.name));
        Key::new(Resource::Service, Part::Object, own)
    };
    app.allotted().iter().map(service).chain(slices(name, app)).collect()
}

/// Returns names of an app's objects that do not begin with the app's name: they were cut to fit, or chosen by the
/// user.
pub fn odd(name: &Name, app: &App, world: &World) -> Vec<Name> {
    let shows = |it: &str| it.strip_prefix(&*name.name).is_some_and(|rest| rest.starts_with('-'));
    let made = app.revisions.iter().flat_map(|revision| {
        let all = made(&name.namespace, revision, &containers(revision, world));
        let ways = ways(&name.namespace, revision);
        all.into_iter().chain(ways).map(|key| key.name).filter(|it| !shows(&it.name))
    });
    let mut odd: Vec<Name> = made.collect();
    let tags = app.route.iter().flat_map(|it| it.tags().map(Some).chain([None]));
    for tag in tags {
        let service = tagged(tag, &name.name);
        let slice = slices::name(&service, slices::V6);
        let full = |own: String| Name::new(name.namespace.as_str(), own);
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
