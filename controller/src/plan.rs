//! Pure: the world → plans: objects, pods, routes, and the time of the next look.
//!
//! Each app is planned alone, from the facts observed about it; planning is idempotent. [`whole`] plans every app. It
//! is the reference to which incremental planning must be equal.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::wire::{NamespacedName, RouteChange};

use crate::world::{AppRevision, AppState, ClusterState, PodStage, RevisionPod, UnixMillis};

pub mod domains;
mod drain;
pub mod revision;
mod roll;
mod routes;
mod scale;
mod status;
mod traffic;

pub use revision::{TemplateCache, TemplateFacts};
pub(crate) use routes::{goes_direct, host_name, target_of};
pub(crate) use status::CONTAINER_MISSING;

/// Plan of one app: its desired state, its routes, and the time of the next plan.
#[derive(Clone, Debug, PartialEq)]
pub struct AppPlan {
    /// The app with its objects, statuses and pods; `None` once nothing is left of it.
    pub app: Option<AppState>,
    /// Subjects of the app in the RouteTable: Revisions, then pods, then services, so that targets come before the
    /// services that name them.
    pub routes: Vec<RouteChange>,
    /// Earliest moment at which time alone changes the plan.
    pub timer: Option<UnixMillis>,
}

/// Upper limit of passes. A plan settles in two, rarely three; a mistake here must not stop the controller.
const PASSES: usize = 6;

/// Plans one app, as of `now`.
pub fn app(world: &ClusterState, name: &NamespacedName, now: UnixMillis) -> AppPlan {
    let Some(have) = world.apps.get(name) else {
        return AppPlan { app: None, routes: Vec::new(), timer: None };
    };
    let (mut app, mut timer) = (AppState::clone(have), PlanTimer::default());
    revision::ensure(&mut app, name, world, now);
    let facts: Vec<_> = app.revisions.iter().map(|it| TemplateFacts::of(it, world)).collect();
    // A step may depend on decisions of a later one, so all are repeated until nothing changes any more.
    for _ in 0..PASSES {
        let before = app.clone();
        timer = PlanTimer::default();
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
    AppPlan { app: (!ended).then_some(app), routes, timer: timer.0 }
}

/// Returns the subjects of the RouteTable for an app that is already as planned.
pub fn subjects(world: &ClusterState, name: &NamespacedName) -> Vec<RouteChange> {
    let Some(app) = world.apps.get(name) else { return Vec::new() };
    let facts: Vec<_> = app.revisions.iter().map(|it| TemplateFacts::of(it, world)).collect();
    routes::subjects(app, name, &facts, world)
}

/// Returns the address of a pod that serves and is ready. `None`: it does not serve, and further facts about it matter.
///
/// While this result stays the same, reports of an agent about the pod change nothing in the plan.
pub(crate) fn serves(
    world: &ClusterState,
    name: &NamespacedName,
    uid: &str,
) -> Option<ServingAddresses> {
    let (revision, pod) = world.apps.get(name)?.pods().find(|(_, pod)| *pod.uid == *uid)?;
    let facts = TemplateFacts::of(revision, world);
    let view = RevisionPlanContext {
        world,
        namespace: &name.namespace,
        facts: &facts,
        now: UnixMillis::default(),
    };
    let serves = pod.stage == PodStage::Serving && pod.was_ready && scale::is_ready(pod, &view);
    serves.then(|| routes::addresses(pod, &view))
}

/// Address of a pod, and its address of the other IP family.
pub(crate) type ServingAddresses = (Option<SocketAddr>, Option<IpAddr>);

/// Takes every step once: states of pods, then traffic, then numbers of pods, then conditions.
fn pass(
    app: &mut AppState,
    name: &NamespacedName,
    facts: &[Arc<TemplateFacts>],
    world: &ClusterState,
    now: UnixMillis,
    timer: &mut PlanTimer,
) {
    for (revision, facts) in app.revisions.iter_mut().zip(facts) {
        let view = RevisionPlanContext { world, namespace: &name.namespace, facts, now };
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
        let view = RevisionPlanContext { world, namespace: &name.namespace, facts, now };
        let leaving = app_leaves || revision.leaving || revision.gone;
        scale::pods(revision, leaving, &view, timer);
        drain::advance(revision, &view, timer);
    }
    status::route(app, name, world, now, timer);
    status::service(app, name, now);
}

/// Plans every app, each independently of the others.
pub fn whole(world: &ClusterState, now: UnixMillis) -> BTreeMap<NamespacedName, AppPlan> {
    world.apps.keys().map(|name| (name.clone(), app(world, name, now))).collect()
}

/// Inputs of the steps for one Revision.
struct RevisionPlanContext<'a> {
    world: &'a ClusterState,
    namespace: &'a str,
    facts: &'a TemplateFacts,
    now: UnixMillis,
}

impl RevisionPlanContext<'_> {
    /// Returns the zone of a pod's node; empty when unknown.
    fn zone(&self, pod: &RevisionPod) -> String {
        let zone = pod.placed.as_ref().and_then(|it| self.world.zones.get(&*it.node));
        zone.cloned().unwrap_or_default()
    }

    fn key(&self, revision: &AppRevision) -> NamespacedName {
        NamespacedName::new(self.namespace, &*revision.name)
    }
}

/// Earliest moment at which time alone changes the plan.
#[derive(Debug, Default)]
struct PlanTimer(Option<UnixMillis>);

impl PlanTimer {
    /// Requests another plan at `at`, unless that has passed. Returns true if it has.
    fn passed(&mut self, at: UnixMillis, now: UnixMillis) -> bool {
        if at > now {
            self.0 = Some(self.0.map_or(at, |have| have.min(at)));
        }
        at <= now
    }
}

#[cfg(test)]
mod tests;
