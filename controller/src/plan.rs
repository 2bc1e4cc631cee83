//! Pure: the world → what should be: objects, pods, routes, and when to look again.
//!
//! One app is planned at a time from what is observed of it; planning it again changes nothing. [`whole`] plans
//! every app and is the reference that the incremental way is held to.

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

/// What one app should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The app with its objects, statuses and pods; `None` once nothing is left of it.
    pub app: Option<App>,
    /// Its subjects of the RouteTable: revisions, then pods, then services, so that a target is known before it
    /// is named.
    pub routes: Vec<RouteChange>,
    /// When time alone will change the plan.
    pub timer: Option<Stamp>,
}

/// A plan settles in two passes, rarely three; more would be a mistake that must not stop the controller.
const PASSES: usize = 6;

/// Plans one app.
pub fn app(world: &World, name: &Name, now: Stamp) -> Plan {
    let Some(have) = world.apps.get(name) else {
        return Plan { app: None, routes: Vec::new(), timer: None };
    };
    let (mut app, mut timer) = (App::clone(have), Timer::default());
    revision::ensure(&mut app, name, world, now);
    let facts: Vec<_> = app.revisions.iter().map(|it| Facts::of(it, world)).collect();
    // What a step decides an earlier one may depend on, so all are taken until nothing changes any more.
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
    // The API server says itself when a Service is gone; others may keep it for long.
    let leaves = app.ends(world.settings.platform);
    let ended = (ended || leaves) && app.revisions.iter().all(|it| it.pods.is_empty());
    Plan { app: (!ended).then_some(app), routes, timer: timer.0 }
}

/// What the RouteTable says of an app that is as planned.
pub fn subjects(world: &World, name: &Name) -> Vec<RouteChange> {
    let Some(app) = world.apps.get(name) else { return Vec::new() };
    let facts: Vec<_> = app.revisions.iter().map(|it| Facts::of(it, world)).collect();
    routes::subjects(app, name, &facts, world)
}

/// Where a pod serves that does so as far as is known. `None`: it does not, and more depends on what is seen of it.
///
/// While this stays as it is, what an agent says of the pod changes nothing that is planned.
pub(crate) fn serves(world: &World, name: &Name, uid: &str) -> Option<Served> {
    let (revision, pod) = world.apps.get(name)?.pods().find(|(_, pod)| *pod.uid == *uid)?;
    let facts = Facts::of(revision, world);
    let view = View { world, namespace: &name.namespace, facts: &facts, now: Stamp::default() };
    let serves = pod.stage == Stage::Serving && pod.was_ready && scale::is_ready(pod, &view);
    serves.then(|| routes::addresses(pod, &view))
}

/// A pod's address, and that of the other family.
pub(crate) type Served = (Option<SocketAddr>, Option<IpAddr>);

/// Takes every step once: what is seen of pods, traffic by it, pods by that, conditions by all.
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

/// Plans every app.
pub fn whole(world: &World, now: Stamp) -> BTreeMap<Name, Plan> {
    world.apps.keys().map(|name| (name.clone(), app(world, name, now))).collect()
}

/// What the steps for one revision look at.
struct View<'a> {
    world: &'a World,
    namespace: &'a str,
    facts: &'a Facts,
    now: Stamp,
}

impl View<'_> {
    /// The zone of a pod's node; empty when unknown.
    fn zone(&self, pod: &Pod) -> String {
        let zone = pod.placed.as_ref().and_then(|it| self.world.zones.get(&*it.node));
        zone.cloned().unwrap_or_default()
    }

    fn key(&self, revision: &Revision) -> Name {
        Name::new(self.namespace, &*revision.name)
    }
}

/// The earliest moment at which time alone changes the plan.
#[derive(Debug, Default)]
struct Timer(Option<Stamp>);

impl Timer {
    /// Looks again at `at`, unless that has passed. Returns whether it has.
    fn passed(&mut self, at: Stamp, now: Stamp) -> bool {
        if at > now {
            self.0 = Some(self.0.map_or(at, |have| have.min(at)));
        }
        at <= now
    }
}

#[cfg(test)]
mod tests;
