//! Pure: the world → plans: objects, pods, routes, and the time of the next look.
//!
//! Each app is planned alone, from the facts observed about it; planning is idempotent. [`whole`] plans every app. It
//! is the reference to which incremental planning must be equal.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::wire::{Name, RouteChange};

use crate::world::{App, Pod, Revision, Stage, Stamp, World};

pub mod domains;
mod drain;
pub mod revision;
mod roll;
mod routes;
mod scale;
mod status;
mod traffic;

pub use revision::{Facts, Templates};
pub(crate) use routes::{goes_direct, host_name, target_of};
pub(crate) use status::CONTAINER_MISSING;

/// Plan of one app: its desired state, its routes, and the time of the next plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The app with its objects, statuses and pods; `None` once nothing is left of it.
    pub app: Option<App>,
    /// Subjects of the app in the RouteTable: Revisions, then pods, then services, so that targets come before the
    /// services that name them.
    pub routes: Vec<RouteChange>,
    /// Earliest moment at which time alone changes the plan.
    pub timer: Option<Stamp>,
}

/// Upper limit of passes. A plan settles in two, rarely three; a mistake here must not stop the controller.
const PASSES: usize = 6;

/// Plans one app, as of `now`.
pub fn app(world: &World, name: &Name, now: Stamp) -> Plan {
    let Some(have) = world.apps.get(name) else {
        return Plan { app: None, routes: Vec::new(), timer: None };
    };
    let (mut app, mut timer) = (App::clone(have), Timer::default());
    revision::ensure(&mut app, name, world, now);
    let facts: Vec<_> = app.revisions.iter().map(|it| Facts::of(it, world)).collect();
    // A step may depend on decisions of a later one, so all are repeated until nothing changes any more.
    for _ in 0..PASSES {
        let before = app.clone();
        timer = Timer::default();
        pass(&mut app, name, &facts, world, now, &mut timer);
        if app == before {
            break;
        }
    }
    let routes = routes::subjects(&app, name, &facts, world);
    revision::collect(&mut app, &world.settings.configs.gc, now, &mut timer);
    app.revisions.retain(|it| !it.gone || !it.pods.is_empty());
    let ended = app.service.is_none() && app.configuration.is_none() && app.route.is_none();
    // On Kubernetes the API server reports the end of a Service; finalizers may keep it for long.
    let leaves = app.ends(world.settings.platform);
    let ended = (ended || leaves) && app.revisions.iter().all(|it| it.pods.is_empty());
    Plan { app: (!ended).then_some(app), routes, timer: timer.0 }
}

/// Returns the subjects of the RouteTable for an app that is already as planned.
pub fn subjects(world: &World, name: &Name) -> Vec<RouteChange> {
    let Some(app) = world.apps.get(name) else { return Vec::new() };
    let facts: Vec<_> = app.revisions.iter().map(|it| Facts::of(it, world)).collect();
    routes::subjects(app, name, &facts, world)
}

/// Returns the address of a pod that serves and is ready. `None`: it does not serve, and further facts about it matter.
///
/// While this result stays the same, reports of an agent about the pod change nothing in the plan.
pub(crate) fn serves(world: &World, name: &Name, uid: &str) -> Option<Served> {
    let (revision, pod) = world.apps.get(name)?.pods().find(|(_, pod)| *pod.uid == *uid)?;
    let facts = Facts::of(revision, world);
    let view = View { world, namespace: &name.namespace, facts: &facts, now: Stamp::default() };
    let serves = pod.stage == Stage::Serving && pod.was_ready && scale::is_ready(pod, &view);
    serves.then(|| routes::addresses(pod, &view))
}

/// Address of a pod, and its address of the other IP family.
pub(crate) type Served = (Option<SocketAddr>, Option<IpAddr>);

/// Takes every step once: states of pods, then traffic, then numbers of pods, then conditions.
fn pass(
    app: &mut App,
    name: &Name,
    facts: &[Arc<Facts>],
    world: &World,
    now: Stamp,
    timer: &mut Timer,
) {
    for (revision, facts) in app.revisions.iter_mut().zip(facts) {
        let view = View { world, namespace: &name.namespace, facts, now };
        scale::forget_gone(revision, &view, timer);
        status::revision(revision, &view, timer);
    }
    traffic::latest_ready(app);
    status::configuration(app, now);
    traffic::assign(app, name, world, now, timer);
    traffic::label(app, name, world, now);
    // Only the leader decides about pods; other replicas keep the stages that it has noted on them.
    let app_leaves = app.ends(world.settings.platform);
    for (revision, facts) in app.revisions.iter_mut().zip(facts).filter(|_| world.leads) {
        let view = View { world, namespace: &name.namespace, facts, now };
        let leaving = app_leaves || revision.leaving || revision.gone;
        scale::pods(revision, leaving, &view, timer);
        drain::advance(revision, &view, timer);
    }
    status::route(app, name, world, now, timer);
    status::service(app, name, now);
}

/// Plans every app, each independently of the others.
pub fn whole(world: &World, now: Stamp) -> BTreeMap<Name, Plan> {
    world.apps.keys().map(|name| (name.clone(), app(world, name, now))).collect()
}

/// Inputs of the steps for one Revision.
struct View<'a> {
    world: &'a World,
    namespace: &'a str,
    facts: &'a Facts,
    now: Stamp,
}

impl View<'_> {
    /// Returns the zone of a pod's node; empty when unknown.
    fn zone(&self, pod: &Pod) -> String {
        let zone = pod.placed.as_ref().and_then(|it| self.world.zones.get(&*it.node));
        zone.cloned().unwrap_or_default()
    }

    fn key(&self, revision: &Revision) -> Name {
        Name::new(self.namespace, &*revision.name)
    }
}

/// Earliest moment at which time alone changes the plan.
#[derive(Debug, Default)]
struct Timer(Option<Stamp>);

impl Timer {
    /// Requests another plan at `at`, unless that has passed. Returns true if it has.
    fn passed(&mut self, at: Stamp, now: Stamp) -> bool {
        if at > now {
            self.0 = Some(self.0.map_or(at, |have| have.min(at)));
        }
        at <= now
    }
}

#[cfg(test)]
mod tests;
