//! Pure: facts → Knative's conditions (knative/serving `pkg/apis/serving/v1/*_lifecycle.go`).
//!
//! One thing differs: the conditions name a crashing container or a missing image at once. Knative waits for the
//! progress deadline, ten minutes by default, which helps no user.

use common::{
    node::{ContainerState, PodPhase, PodStatus},
    wire::{Activity, Name},
};

use super::{Timer, View, host_name, routes::target_of, scale};
use crate::{
    children::tagged,
    kube::cache::hash,
    policy::Class,
    render::{self, ObjectKind},
    world::{
        Addresses, Allotment, App, Kind, Kubelet, Owner, Platform, Pod, Revision, Routing, Service,
        Stage, Stamp, Traffic, Truth, Why, World, names::Claimant,
    },
};

/// Time until activators that are waited for are checked again, in milliseconds.
const ROUTED_MS: u64 = 500;

/// Restarts after which requests no longer wait for a crashing container.
const HOPELESS_RESTARTS: u32 = 3;

/// Reason of a Revision with an image that cannot be found.
pub(crate) const CONTAINER_MISSING: &str = "ContainerMissing";

/// Reason of a Revision whose first pod takes longer than a start should.
const NOT_READY: &str = "ContainerNotReady";

/// Reason of a Revision that missed its initial scale within the progress deadline.
const LATE: &str = "ProgressDeadlineExceeded";

/// Returns true while image digests are not resolved yet: until then no pod of the Revision starts.
fn resolves(revision: &Revision, view: &View<'_>) -> bool {
    view.world.settings.platform == Platform::Kubernetes && revision.digests.is_empty()
}

/// Updates a Revision by the state of its pods and sets its conditions.
pub(super) fn revision(revision: &mut Revision, view: &View<'_>, timer: &mut Timer) {
    for pod in &mut revision.pods {
        if pod.met == Stamp::default() {
            pod.met = view.now;
        }
        pod.was_ready |= scale::is_ready(pod, view);
        scale::note_steady(pod, view);
    }
    if revision.met == Stamp::default() {
        revision.met = view.now;
    }
    let ready = scale::ready(revision, view);
    let proven = scale::proven(revision, view, timer);
    revision.actual = ready;
    let policy = &view.facts.policy;
    let least = if revision.routing.0 == Routing::Reserve { 0 } else { policy.min_scale };
    digests(revision, view);
    // The kernel reports readiness earlier than the kubelet: the minimum must also hold for readers of Kubernetes'
    // objects.
    let is_met = proven >= policy.initial_scale.max(least) && confirmed(revision, view) >= least;
    revision.reached |= !resolves(revision, view) && is_met;
    let failure = revision.pods.iter().find_map(|pod| failure(pod, view));
    // Only a proven pod clears the failure: a container that crashes again and again is ready in between.
    match failure {
        _ if proven > 0 => revision.failure = None,
        Some(why) => revision.failure = Some(Box::new(why)),
        None => {}
    }
    let slow = (ready == 0).then(|| slow_start(revision, view, timer)).flatten();
    let resources = resources(revision, slow.as_ref(), view, timer);
    let healthy = healthy(revision, slow, view);
    let conditions = &mut revision.conditions;
    conditions.set(Kind::RevisionResources, resources, view.now);
    conditions.set(Kind::RevisionHealthy, healthy, view.now);
    // The container's own failure explains more than the exceeded deadline, so its condition comes first.
    let whole = conditions.ready(&[Kind::RevisionHealthy, Kind::RevisionResources]);
    conditions.set(Kind::RevisionReady, whole, view.now);
    let active = match view.facts.class {
        Class::Kpa => active(revision, ready),
        // Such Revisions never scale to zero (knative/serving `pkg/reconciler/autoscaling/hpa/hpa.go`).
        Class::Hpa | Class::Foreign => Truth::True(None),
    };
    revision.conditions.set(Kind::RevisionActive, active, view.now);
    annotations(revision, view);
}

/// Sets the condition about annotations that are not in force. It is absent until some were refused once.
fn annotations(revision: &mut Revision, view: &View<'_>) {
    let truth = match &view.facts.dropped {
        Some(dropped) => {
            let message =
                format!("Not allowed by config-autoscaler, and without effect: {dropped}");
            Truth::False(Why::new("NotAllowed", message))
        }
        None if revision.conditions.has(Kind::RevisionAnnotations) => Truth::True(None),
        None => return,
    };
    revision.conditions.set(Kind::RevisionAnnotations, truth, view.now);
}

/// Counts the pods that are ready for readers of Kubernetes' objects, such as the Endpoints of `<revision>-private`:
/// the kernel reports readiness earlier than the kubelet.
fn confirmed(revision: &Revision, view: &View<'_>) -> u32 {
    if view.world.settings.platform == Platform::Local {
        return u32::MAX;
    }
    let serving = revision.pods.iter().filter(|pod| pod.stage == Stage::Serving);
    let placed = serving.filter_map(|pod| pod.placed.as_ref());
    let ready = placed.filter(|it| it.kubelet == Kubelet::Ready && !it.deleted).count();
    u32::try_from(ready).unwrap_or(u32::MAX)
}

fn deploying() -> Truth {
    Truth::Unknown(Some(Why::new("Deploying", "")))
}

fn resources(revision: &Revision, slow: Option<&Why>, view: &View<'_>, timer: &mut Timer) -> Truth {
    if revision.reached {
        return Truth::True(None);
    }
    if let Some(why) = &revision.blocked {
        return Truth::False((**why).clone());
    }
    if let Some(why) = unschedulable(revision, view) {
        return Truth::False(why);
    }
    let deadline = view.facts.policy.progress_deadline.as_millis().try_into().unwrap_or(u64::MAX);
    let late = timer.passed(revision.met.plus_ms(deadline), view.now);
    // A restarted controller does not begin the wait again.
    let was_late = said_late(revision).is_some();
    if late || was_late || revision.decided.is_some_and(|it| it.activity == Activity::TimedOut) {
        return Truth::False(given_up(revision, slow));
    }
    deploying()
}

/// Returns the scheduler's reason for a pod without a node. `always_schedulable` promises that the cluster grows for
/// such pods; then there is no reason to report.
fn unschedulable(revision: &Revision, view: &View<'_>) -> Option<Why> {
    let waits = view.world.settings.configs.deployment.always_schedulable;
    let placed = revision.pods.iter().filter_map(|pod| pod.placed.as_ref());
    placed.filter(|_| !waits).find_map(|it| it.unschedulable.clone())
}

/// Returns the reason of the present condition, if it is an exceeded deadline.
fn said_late(revision: &Revision) -> Option<Why> {
    match revision.conditions.get(Kind::RevisionResources) {
        Truth::False(why) if why.reason == LATE => Some(why),
        Truth::False(_) | Truth::Unknown(_) | Truth::True(_) => None,
    }
}

/// Returns the reason for a missed initial scale: Knative's message, and the cause of the delay where it is known.
fn given_up(revision: &Revision, slow: Option<&Why>) -> Why {
    const NEVER: &str = "Initial scale was never achieved";
    match revision.failure.as_deref().or(slow) {
        Some(why) => Why::new(LATE, format!("{NEVER}: {}", why.message)),
        // The pods may be gone by now, and with them the cause; the present condition may still hold it.
        None => said_late(revision).unwrap_or_else(|| Why::new(LATE, NEVER)),
    }
}

fn healthy(revision: &Revision, slow: Option<Why>, view: &View<'_>) -> Truth {
    if let Some(why) = &revision.failure {
        return Truth::False((**why).clone());
    }
    if resolves(revision, view) {
        return Truth::Unknown(Some(Why::new("ResolvingDigests", "")));
    }
    match slow {
        Some(why) => Truth::Unknown(Some(why)),
        None if revision.reached => Truth::True(None),
        None => deploying(),
    }
}

/// Returns the reason why none of a Revision's pods is ready, taken from the first pod that takes too long.
fn slow_start(revision: &Revision, view: &View<'_>, timer: &mut Timer) -> Option<Why> {
    let said = revision.conditions.get(Kind::RevisionHealthy);
    // A restarted controller keeps a reason that its predecessor has reported.
    let is_said = matches!(said, Truth::Unknown(Some(why)) if why.reason == NOT_READY);
    let serving = revision.pods.iter().filter(|pod| pod.stage == Stage::Serving);
    let mut slow = serving.filter(|it| is_said || timer.passed(scale::slow_at(it), view.now));
    slow.find_map(|pod| unready(pod, view))
}

/// Returns the reason why a slow pod is not ready.
fn unready(pod: &Pod, view: &View<'_>) -> Option<Why> {
    let status = view.world.statuses.get(&*pod.uid);
    let seen = view.world.seen.get(&*pod.uid);
    // The agent's own reason is the most exact: it runs the probe.
    if let Some(trouble) = seen.map(|seen| &seen.trouble).filter(|trouble| !trouble.is_empty()) {
        return Some(Why::new(NOT_READY, trouble.clone()));
    }
    let runs = status.is_some_and(|it| it.phase == PodPhase::Running);
    let listens = seen.is_some_and(|seen| seen.listening);
    let message = match (runs, listens) {
        (true, false) => format!(
            "The container runs but nothing listens on port {port}: let it listen on $PORT ({port}) or set containerPort to the port it uses",
            port = view.facts.port
        ),
        (true, true) => "The container listens but its readiness probe does not pass: check the probe's path and port, and the container's log".into(),
        (false, _) => waiting(status)?,
    };
    Some(Why::new(NOT_READY, message))
}

fn waiting(status: Option<&PodStatus>) -> Option<String> {
    let waits = |state: &ContainerState| match state {
        ContainerState::Waiting { message, .. } if !message.is_empty() => Some(message.clone()),
        ContainerState::Waiting { .. }
        | ContainerState::Running
        | ContainerState::Terminated { .. } => None,
    };
    status?.containers.iter().find_map(|container| waits(&container.state))
}

/// Returns the reason that keeps a container of the pod from running, if there is one.
fn failure(pod: &Pod, view: &View<'_>) -> Option<Why> {
    let status = view.world.statuses.get(&*pod.uid).filter(|_| pod.stage == Stage::Serving)?;
    status.containers.iter().find_map(|container| match &container.state {
        ContainerState::Running => None,
        ContainerState::Terminated { code, message, .. } => Some(exited(*code, message)),
        ContainerState::Waiting { last_exit: Some(code), message, .. } => {
            Some(exited(*code, message))
        }
        ContainerState::Waiting { reason, message, last_exit: None } => {
            // Every container waits with these reasons while it starts.
            let harmless = matches!(reason.as_str(), "" | "ContainerCreating" | "PodInitializing");
            let say = || match message.as_str() {
                "" => format!("Container {} waits: {reason}", container.name),
                message => message.to_owned(),
            };
            (!harmless).then(|| Why::new(reason.clone(), say()))
        }
    })
}

fn exited(code: i32, message: &str) -> Why {
    let message = match message.trim() {
        "" => "Container failed with: no message; see its log, and check command and args".into(),
        text => format!("Container failed with: {text}"),
    };
    Why::new(format!("ExitCode{code}"), message)
}

/// Returns true if requests should not wait for a Revision at present: no pod is ready, and each has crashed repeatedly
/// or cannot get its image. Requests then get 503 at once instead of 504 at their deadline. When the pods have been
/// scaled away, the next request tries again.
pub(super) fn is_hopeless(revision: &Revision, view: &View<'_>) -> bool {
    let mut serving = revision.pods.iter().filter(|it| it.stage == Stage::Serving).peekable();
    if serving.peek().is_none() || scale::ready(revision, view) > 0 {
        return false;
    }
    serving.all(|pod| {
        let status = view.world.statuses.get(&*pod.uid);
        let containers = status.into_iter().flat_map(|status| &status.containers);
        containers.into_iter().any(|container| match &container.state {
            ContainerState::Waiting { reason, .. } => {
                let image = ["ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];
                image.contains(&reason.as_str()) || container.restarts >= HOPELESS_RESTARTS
            }
            ContainerState::Running | ContainerState::Terminated { .. } => false,
        })
    })
}

fn active(revision: &Revision, ready: u32) -> Truth {
    let idle = || Truth::False(Why::NO_TRAFFIC);
    let queued = "Requests to the target are being buffered as resources are provisioned.";
    let queued = || Truth::Unknown(Some(Why::new("Queued", queued)));
    match revision.decided.map(|it| it.activity) {
        Some(Activity::Active) => Truth::True(None),
        Some(Activity::Activating) => queued(),
        Some(Activity::Inactive) => idle(),
        Some(Activity::TimedOut) => {
            Truth::False(Why::new("TimedOut", "The target could not be activated."))
        }
        None if ready > 0 => Truth::True(None),
        None if revision.reached => idle(),
        None => deploying(),
    }
}

fn digests(revision: &mut Revision, view: &View<'_>) {
    if !revision.digests.is_empty() {
        return;
    }
    let statuses = revision.pods.iter().filter_map(|pod| view.world.statuses.get(&*pod.uid));
    // An image may be resolved for some containers only: digests count when all of a pod's are known.
    let known = |status: &PodStatus| {
        let all = status.containers.iter();
        let digests = all.map(|it| {
            it.image_digest.as_ref().map(|digest| (it.name.as_str().into(), digest.as_str().into()))
        });
        digests.collect::<Option<Box<[_]>>>()
    };
    if let Some(found) = statuses.filter_map(known).find(|found| !found.is_empty()) {
        revision.digests = found;
    }
}

/// Sets the Configuration's condition: it is ready if its newest Revision is.
pub(super) fn configuration(app: &mut App, now: Stamp) {
    if app.configuration.is_none() {
        return;
    }
    let ready =
        app.latest_created().map(|it| (it.name.clone(), it.conditions.get(Kind::RevisionReady)));
    let refused = app.service.as_ref().and_then(|it| it.refused.as_deref());
    let truth = match (ready, refused) {
        (_, Some(refused)) => Truth::False(Why::new("InvalidManifest", refused.to_owned())),
        (None, None) => Truth::Unknown(None),
        (Some((_, Truth::True(_))), None) => Truth::True(None),
        (Some((_, Truth::Unknown(why))), None) => Truth::Unknown(why),
        (Some((name, Truth::False(why))), None) => {
            let message = format!("Revision {name:?} failed with message: {}.", why.message);
            Truth::False(Why::new("RevisionFailed", message))
        }
    };
    app.conditions.set(Kind::ConfigurationReady, truth, now);
}

/// Sets the Route's conditions, except `AllTrafficAssigned`, which was set with its traffic. Only the leader allocates
/// numbers: on other replicas a name without them waits for it.
pub(super) fn route(app: &mut App, name: &Name, world: &World, now: Stamp, timer: &mut Timer) {
    let not_owned = not_owned(app, name, world);
    let Some(route) = &app.route else { return };
    let allots = world.leads;
    let names = 1 + route.traffic.iter().filter(|it| it.tag.is_some()).count();
    let unaddressed =
        |it: &Allotment| matches!(&it.addresses, Addresses::Given(none) if none.is_empty());
    let ingress = if let Some(why) = &route.blocked {
        Truth::False((**why).clone())
    } else if let Some(why) = not_owned {
        Truth::False(why)
    } else if route.traffic.is_empty()
        || route.allotted.iter().any(unaddressed)
        || (route.allotted.len() < names && !allots)
    {
        not_configured()
    } else if route.allotted.len() < names {
        let message = "No ClusterIP or activator port is left: delete a service or a tag";
        Truth::False(Why::new("NoAddressLeft", message))
    } else if route.rollout.is_some() {
        Truth::Unknown(Some(Why::new(
            "RolloutInProgress",
            "A gradual rollout of the latest revision(s) is in progress.",
        )))
    } else if !app.conditions.is_true(Kind::RouteIngress) && !is_routed(app, name, world) {
        // An activator's report triggers the next plan; the timer covers an activator that ends without one.
        let _ = timer.passed(now.plus_ms(ROUTED_MS), now);
        not_configured()
    } else {
        Truth::True(None)
    };
    app.conditions.set(Kind::RouteIngress, ingress, now);
    app.conditions.set(Kind::RouteCertificate, Truth::True(Some(Why::NO_TLS)), now);
    let on = [Kind::RouteTraffic, Kind::RouteIngress, Kind::RouteCertificate];
    let ready = app.conditions.ready(&on);
    app.conditions.set(Kind::RouteReady, ready, now);
}

fn not_configured() -> Truth {
    let message = "Ingress has not yet been reconciled.";
    Truth::Unknown(Some(Why::new("IngressNotConfigured", message)))
}

/// Returns true if every activator routes requests for each of the Route's names to some Revision. A client may connect
/// to any activator as soon as the Route is ready, and activators may follow another replica than the leader.
fn is_routed(app: &App, name: &Name, world: &World) -> bool {
    let own = |it: &Allotment| Name::new(name.namespace.clone(), host_name(it, &name.name));
    app.allotted().iter().all(|it| world.followers.all_route(&own(it)))
}

/// Returns the reason if one of the Route's names belongs to another owner.
fn not_owned(app: &App, name: &Name, world: &World) -> Option<Why> {
    let route = app.route.as_ref().filter(|_| !app.ends(world.settings.platform))?;
    let tags = route.wanted.iter().filter_map(|it| it.tag.as_deref()).map(Some);
    [None].into_iter().chain(tags).find_map(|tag| {
        let own = Name::new(name.namespace.clone(), tagged(tag, &name.name));
        let owner = world.names.owner(&own, &world.placeholders)?;
        if owner.by != Claimant::Route(name.clone()) {
            let what = format!("There is an existing placeholder Service {:?}", own.name);
            return Some(Why::new("NotOwned", format!("{what} that we do not own.")));
        }
        let host = target_of(app, name, tag, world).filter(|it| !it.is_local)?.host;
        // A host has no owner yet while the placeholder of its tag does not exist.
        let owner = world.names.host_owner(&host, &world.placeholders)?;
        let message = || format!("The host {host:?} is already in use by {}.", owner.by);
        (owner.to != own).then(|| Why::new("NotOwned", message()))
    })
}

/// Sets the Service's conditions from its Configuration and its Route.
pub(super) fn service(app: &mut App, name: &Name, now: Stamp) {
    let Some(service) = &app.service else { return };
    let foreign = |kind: &str, owner: Option<Owner>| {
        let message = format!("There is an existing {kind} {:?} that we do not own.", name.name);
        let foreign = matches!(owner, Some(Owner::Nobody | Owner::Other));
        foreign.then(|| Truth::False(Why::new("NotOwned", message)))
    };
    let refused = service.refused.as_deref();
    let refused = refused.map(|why| Truth::False(Why::new("InvalidManifest", why.to_owned())));
    // Child objects may be of an older Service: their conditions must not count as those of the new one.
    let configuration = foreign("Configuration", app.configuration.as_ref().map(|it| it.owner))
        .or(refused)
        .or_else(|| configuration_is_behind(app, service, name).then(|| behind("Configuration")))
        .unwrap_or_else(|| app.conditions.get(Kind::ConfigurationReady));
    let route = foreign("Route", app.route.as_ref().map(|it| it.owner))
        .or_else(|| route_is_behind(app, service, name).then(|| behind("Route")))
        .unwrap_or_else(|| app.conditions.get(Kind::RouteReady));
    let route = match route {
        Truth::True(_) if !is_migrated(app) => Truth::Unknown(Some(Why::new(
            "TrafficNotMigrated",
            "Traffic is not yet migrated to the latest revision.",
        ))),
        route => route,
    };
    app.conditions.set(Kind::ServiceConfigurations, configuration, now);
    app.conditions.set(Kind::ServiceRoutes, route, now);
    let ready = app.conditions.ready(&[Kind::ServiceConfigurations, Kind::ServiceRoutes]);
    app.conditions.set(Kind::ServiceReady, ready, now);
}

/// Returns the status of a Service while a child object still reflects an older manifest.
fn behind(kind: &str) -> Truth {
    let why = format!("The {kind} is still working to reflect the latest desired specification.");
    Truth::Unknown(Some(Why::new("OutOfDate", why)))
}

/// Returns true if the observed Configuration was made of an older manifest of the Service.
///
/// The hash of the applied object decides. Another webhook may add to the template, and that causes no write.
fn configuration_is_behind(app: &App, service: &Service, name: &Name) -> bool {
    let Some(seen) = app.configuration.as_ref() else { return false };
    seen.template != service.manifest.template
        && seen.applied.is_some_and(|it| it != made(ObjectKind::Configuration, service, name))
}

/// Returns true if the observed Route was made of an older manifest of the Service.
fn route_is_behind(app: &App, service: &Service, name: &Name) -> bool {
    let Some(seen) = app.route.as_ref() else { return false };
    let own = |it: &Traffic| it.configuration.as_deref().is_none_or(|it| name.name == *it);
    let same = |(seen, asked): (&Traffic, &Traffic)| {
        (&seen.tag, &seen.revision, seen.percent) == (&asked.tag, &asked.revision, asked.percent)
            && own(seen)
    };
    let asked = &service.manifest.traffic;
    let is_same = seen.wanted.len() == asked.len() && seen.wanted.iter().zip(&**asked).all(same);
    !is_same && seen.applied.is_some_and(|it| it != made(ObjectKind::Route, service, name))
}

/// Returns the hash of the object that is applied for a Service.
fn made(kind: ObjectKind, service: &Service, name: &Name) -> u64 {
    hash(&render::made_for_service(kind, service, name))
}

/// Returns true if all targets that follow the latest ready Revision have moved to it.
fn is_migrated(app: &App) -> bool {
    let latest = app.latest_ready();
    app.traffic().iter().filter(|it| it.latest).all(|it| Some(&*it.revision) == latest)
}
