//! Pure: events → world → plan → what changes. One step per event, one app per step.
//!
//! The machine keeps the world in step with its plan: after each event the touched app is planned, the plan is
//! applied to the world, the RouteTable's box is told at once, and what the node and the disk must learn is
//! left in [`Effects`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::IpAddr,
};

use common::{
    node::{self, PodOrder, PodStatus},
    outbox::Outbox,
    wire::{Decision, Name, Part, PodSeen, RouteChange, RouteKey, Subscriber},
};
use serde_json::Value;
use smol_str::SmolStr;
use tracing::info;

use crate::{
    children::Resource,
    kube::{Key, Part as ObjectPart, Trouble},
    network_policies::Client,
    plan::{self, Facts, Plan},
    render::ObjectKey,
    world::{App, Decided, Kind, Manifest, Platform, Pod, Stage, Stamp, Truth, Why, World},
};

mod allot;
mod decisions;
mod digests;
mod domains;
mod keys;
mod manifest;
mod names;
mod observe;
mod parts;
mod reports;
mod said;
mod settings;

pub use digests::Resolved;
pub use said::{Routes, Said};
pub use settings::ConfigNews;

/// Something happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A manifest was applied.
    Apply(Name, Manifest),
    /// A manifest cannot be used.
    Refuse(Name, String),
    /// A manifest is gone.
    Delete(Name),
    /// An app was read back from disk.
    Restore(Name, Box<App>),
    /// The autoscaler decided.
    Decide(Decision),
    /// The autoscaler has forgotten a revision.
    Undecide(Name),
    /// An autoscaler's stream has begun.
    DecisionsBegin,
    /// It has named every revision.
    DecisionsSynced,
    /// An agent's or activator's report has begun, on the stream of this number.
    ReportBegin(Subscriber, u64),
    /// It sees a pod.
    Seen(Subscriber, PodSeen),
    /// It sees a pod no more.
    Unseen(Subscriber, String),
    /// It opens no connection to this draining pod.
    Avoided(Subscriber, u64, String),
    /// It may open connections to the pod again.
    AvoidedNoMore(Subscriber, u64, String),
    /// An activator names each service that it leads to some revision, on this stream.
    NamesRouted(Subscriber, u64),
    /// It leads requests for this service to some revision, or does no more.
    Routed(Subscriber, u64, Name, bool),
    /// It has named every pod.
    ReportSynced(Subscriber, u64),
    /// That stream has ended.
    ReportEnd(Subscriber, u64),
    /// A Revision's images are resolved to digests, or cannot be.
    Resolved(Name, Resolved),
    /// This replica of a part counts, or none.
    Choose(Part, Option<String>),
    /// The node says how a pod fares.
    Status(PodStatus),
    /// An object of the API server as it is; without one: it is gone.
    Observe(Resource, Name, Option<Box<Value>>),
    /// A pod that may be a client, as it is; without one: it is gone.
    Client(Name, Option<Client>),
    /// An object cannot be written, for this reason; or it can again.
    Trouble(Key, Option<Trouble>),
    /// Objects that are to be made for this one of an app are not there; or they are now.
    Unmade(Name, Resource, Name, Option<Trouble>),
    /// Everything that there was at the start has been observed.
    Known,
    /// Whether this replica writes.
    Lead(bool),
    /// Time has passed.
    Tick,
}

/// What the node and the disk must learn.
#[derive(Debug, Default)]
pub struct Effects {
    /// Pods to start.
    pub start: Vec<PodOrder>,
    /// Pods to stop, by UID.
    pub stop: Vec<String>,
    /// Names that now lead to these addresses; empty: the name is gone.
    pub names: Vec<(Name, Vec<IpAddr>)>,
    /// Objects that changed or went, on the local platform.
    pub objects: Vec<ObjectKey>,
    /// Parts of objects that may have to be written, on Kubernetes.
    pub keys: Vec<Key>,
    /// Apps whose objects should all be there in a while.
    pub planned: Vec<Name>,
    /// What people should read on ConfigMaps.
    pub news: Vec<ConfigNews>,
    /// Revisions whose digests are to be found out, or no longer.
    pub resolve: Vec<Name>,
    /// Reports of pods that run on another node than their reporter.
    pub refused: u64,
}

/// The controller's core.
#[derive(Debug)]
pub struct Machine {
    world: World,
    routes: Outbox<RouteKey, Said>,
    /// Which app a pod belongs to, by UID.
    owners: HashMap<String, Name>,
    /// Not everything there is has been observed: nothing is planned on half of it.
    loading: bool,
    /// UIDs of observed pods.
    uids: BTreeMap<Name, Box<str>>,
    /// Pods that were observed before their Revision, by that.
    early: BTreeMap<Name, BTreeMap<Name, Pod>>,
    /// Pods each reporter has named, by reporter.
    reports: BTreeMap<String, reports::Report>,
    /// What was decided of Revisions before they were observed.
    ahead: BTreeMap<Name, Decided>,
    /// Revisions the current decision stream has not named yet.
    undecided: Option<BTreeSet<Name>>,
    /// What keeps Revisions and Routes from being as wanted.
    hindrances: BTreeMap<keys::Hindered, BTreeMap<keys::Hindrance, Why>>,
    /// Apps with draining pods.
    draining: BTreeSet<Name>,
    /// Apps whose objects may not say yet what a ConfigMap does.
    stale: VecDeque<Name>,
    /// What people should read on ConfigMaps, from while another replica led.
    untold: BTreeMap<Name, Vec<ConfigNews>>,
    /// Apps made by this machine.
    born: u64,
    timers: BTreeSet<(Stamp, Name)>,
    timer_of: BTreeMap<Name, Stamp>,
    effects: Effects,
}

impl Machine {
    /// A machine for `world`, which tells `routes`.
    pub fn new(world: World, routes: Outbox<RouteKey, Said>) -> Self {
        for activator in &world.settings.activators {
            let key = RouteKey::Activator(activator.name.clone());
            routes.set(key, Said::of(&RouteChange::Activator(activator.clone())));
        }
        Self {
            world,
            routes,
            owners: HashMap::new(),
            loading: false,
            uids: BTreeMap::new(),
            early: BTreeMap::new(),
            reports: BTreeMap::new(),
            ahead: BTreeMap::new(),
            undecided: None,
            hindrances: BTreeMap::new(),
            draining: BTreeSet::new(),
            stale: VecDeque::new(),
            untold: BTreeMap::new(),
            born: 0,
            timers: BTreeSet::new(),
            timer_of: BTreeMap::new(),
            effects: Effects::default(),
        }
    }

    /// Plans nothing before [`Event::Known`].
    #[must_use]
    pub fn loading(self) -> Self {
        Self { loading: true, ..self }
    }

    fn known(&mut self, now: Stamp) {
        self.loading = false;
        self.settle_rivals(now);
        for name in self.world.apps.keys().cloned().collect::<Vec<_>>() {
            self.settle(&name, None, true, now);
        }
        self.settle_mappings(now);
    }

    /// The world as it is now.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The RouteTable's box.
    pub fn routes(&self) -> &Outbox<RouteKey, Said> {
        &self.routes
    }

    /// When to send the next [`Event::Tick`].
    pub fn next_timer(&self) -> Option<Stamp> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Takes in one event.
    pub fn step(&mut self, now: Stamp, event: Event) -> Effects {
        match event {
            Event::Apply(name, manifest) => self.apply(name, manifest, now),
            Event::Refuse(name, why) => self.refuse(name, &why, now),
            Event::Delete(name) => self.delete(&name, now),
            Event::Restore(name, app) => self.restore(name, *app, now),
            Event::Decide(decision) => self.decide(decision, now),
            Event::Undecide(revision) => self.undecide(&revision, now),
            Event::DecisionsBegin => {
                self.undecided = Some(self.decided().collect());
            }
            Event::DecisionsSynced => {
                for revision in self.undecided.take().into_iter().flatten() {
                    self.undecide(&revision, now);
                }
            }
            Event::ReportBegin(who, stream) => self.report_begin(&who, stream, now),
            Event::Seen(who, seen) => self.see(&who, seen, now),
            Event::Unseen(who, uid) => self.unsee(&who, &uid, now),
            Event::Avoided(who, stream, uid) => self.avoid(&who, stream, &uid, true, now),
            Event::AvoidedNoMore(who, stream, uid) => self.avoid(&who, stream, &uid, false, now),
            Event::NamesRouted(who, stream) => self.names_routed(&who, stream),
            Event::Routed(who, stream, name, leads) => {
                self.routed(&who, stream, &name, leads, now);
            }
            Event::ReportSynced(who, stream) => self.report_synced(&who, stream, now),
            Event::ReportEnd(who, stream) => self.report_end(&who, stream, now),
            Event::Resolved(revision, digests) => self.resolved(&revision, digests, now),
            Event::Choose(part, chosen) => self.choose(part, chosen),
            Event::Status(status) => self.status(status, now),
            Event::Observe(resource, name, object) => {
                self.observe(resource, name, object.as_deref(), now);
            }
            Event::Client(name, client) => {
                let touched = self.world.network_policies.client(name, client);
                self.settle_all_of(&touched, now);
            }
            Event::Trouble(key, trouble) => self.trouble(&key, trouble, now),
            Event::Unmade(app, of, name, trouble) => self.unmade(app, of, &name, trouble, now),
            Event::Known => self.known(now),
            Event::Lead(leads) => self.lead(leads, now),
            Event::Tick => self.tick(now),
        }
        self.settle_rivals(now);
        self.catch_up(now);
        std::mem::take(&mut self.effects)
    }

    fn restore(&mut self, name: Name, mut app: App, now: Stamp) {
        let texts = app.revisions.iter_mut().map(|it| &mut it.template);
        let texts = texts.chain(app.service.as_mut().map(|it| &mut it.manifest.template));
        for template in texts.chain(app.configuration.as_mut().map(|it| &mut it.template)) {
            *template = self.world.templates.share(template);
        }
        allot::claim(&app, &mut self.world);
        self.index(&name, None, Some(&app));
        self.world.apps.insert(name.clone(), Box::new(app));
        self.settle(&name, None, true, now);
    }

    fn status(&mut self, status: PodStatus, now: Stamp) {
        let Some(app) = self.owners.get(&status.uid).cloned() else { return };
        let (uid, gone) = (status.uid.clone(), status.phase == node::PodPhase::Gone);
        let before = self.world.statuses.get(&uid);
        if before == Some(&status) {
            return;
        }
        info!(pod = uid, phase = ?status.phase, "pod status");
        self.world.statuses.insert(uid.clone(), status);
        self.effects.objects.extend(self.pod_object(&app, &uid));
        self.settle(&app, None, false, now);
        if gone {
            self.world.statuses.remove(&uid);
            self.forget_reports(&uid);
        }
    }

    fn pod_object(&self, app: &Name, uid: &str) -> Option<ObjectKey> {
        let mut pods = self.world.apps.get(app)?.pods();
        let (_, pod) = pods.find(|(_, pod)| *pod.uid == *uid)?;
        Some(ObjectKey::pod(&app.namespace, &pod.name))
    }

    fn tick(&mut self, now: Stamp) {
        while let Some((at, name)) = self.timers.first().cloned() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            if name == settings::REWRITE {
                self.rewrite(now);
                continue;
            }
            self.timer_of.remove(&name);
            self.settle(&name, None, false, now);
        }
    }

    /// Plans one app, and those whose routes name its Revisions.
    fn settle(&mut self, name: &Name, before: Option<&App>, rewrite: bool, now: Stamp) {
        // Nearly always there is none, and no app is copied for nothing.
        let is_mapped = !self.world.mapped.is_empty();
        let own = before.or_else(|| self.world.apps.get(name).map(|it| &**it));
        let own = own.filter(|_| is_mapped).cloned();
        self.settle_one(name, before, rewrite, now);
        if let Some(own) = own {
            self.settle_mappings_of(name, &own, now);
        }
        let Some(others) = self.world.referrers.get(name).cloned() else { return };
        for other in others {
            self.settle_one(&other, None, false, now);
        }
        // Where those now lead is what this one's Revisions are labelled by.
        self.settle_one(name, None, false, now);
    }

    /// Plans every app of these namespaces.
    fn settle_all_of(&mut self, namespaces: &BTreeSet<SmolStr>, now: Stamp) {
        for namespace in namespaces {
            let from = self.world.apps.range(Name::new(namespace.clone(), "")..);
            let here = from.map(|(name, _)| name).take_while(|it| it.namespace == *namespace);
            for name in here.cloned().collect::<Vec<_>>() {
                self.settle(&name, None, false, now);
            }
        }
    }

    /// Plans one app and makes the world as planned. `before` is the app before the event touched it.
    fn settle_one(&mut self, name: &Name, before: Option<&App>, rewrite: bool, now: Stamp) {
        if self.loading {
            return;
        }
        let Some(current) = self.world.apps.get(name).cloned() else { return };
        names::ask(&current, name, &mut self.world);
        let plan = plan::app(&self.world, name, now);
        let before = before.unwrap_or(&current);
        self.say_routes(name, before, &plan);
        match self.world.settings.platform {
            Platform::Local => {
                self.orders(name, before, plan.app.as_ref());
                self.objects(name, before, plan.app.as_ref(), rewrite);
            }
            Platform::Kubernetes => {
                let keys = keys::changed(name, before, plan.app.as_ref(), &self.world);
                if self.world.leads && keys.iter().any(|it| it.part == ObjectPart::Object) {
                    self.effects.planned.push(name.clone());
                }
                self.effects.keys.extend(keys);
                self.ask_digests(name, before, plan.app.as_ref());
            }
        }
        self.set_timer(name, plan.timer);
        reports::forget_revived(&mut self.world, &current, plan.app.as_ref());
        self.index(name, Some(&current), plan.app.as_ref());
        self.keep_decided_of_lost(name, &current, plan.app.as_ref());
        let Some(app) = plan.app else {
            self.forget(name);
            return;
        };
        let drains = |(_, pod): (_, &Pod)| matches!(pod.stage, Stage::Draining { .. });
        if app.pods().any(drains) {
            self.draining.insert(name.clone());
        } else {
            self.draining.remove(name);
        }
        log_changes(name, before, &app);
        self.world.apps.insert(name.clone(), Box::new(app));
    }

    /// Tells the RouteTable's box what changed.
    fn say_routes(&self, name: &Name, before: &App, plan: &Plan) {
        let mut said = BTreeSet::new();
        for change in &plan.routes {
            let Some(key) = change.key() else { continue };
            self.routes.set(key.clone(), Said::of(change));
            said.insert(key);
        }
        let is_others = |key: &RouteKey| match key {
            RouteKey::Service(it) => self.world.app_named(it).is_some_and(|app| app != *name),
            _ => false,
        };
        for key in keys(name, before).filter(|key| !said.contains(key) && !is_others(key)) {
            self.routes.remove(&key);
        }
    }

    fn orders(&mut self, name: &Name, before: &App, after: Option<&App>) {
        let ordered = |pod: &Pod| !matches!(pod.stage, Stage::Stopping { .. });
        let uids = |app: &App| -> BTreeSet<Box<str>> {
            app.pods().filter(|(_, pod)| ordered(pod)).map(|(_, pod)| pod.uid.clone()).collect()
        };
        let (had, has) = (uids(before), after.map(uids).unwrap_or_default());
        for (revision, pod) in after.iter().flat_map(|app| app.pods()) {
            let known = self.owners.contains_key(&*pod.uid);
            if ordered(pod) && !known {
                let facts = Facts::of(revision, &self.world);
                self.effects.start.push(facts.order(name, revision, pod));
                self.owners.insert(pod.uid.to_string(), name.clone());
            }
        }
        for uid in had.difference(&has) {
            self.effects.stop.push(uid.to_string());
        }
        let kept: BTreeSet<&str> =
            after.iter().flat_map(|app| app.pods()).map(|(_, pod)| &*pod.uid).collect();
        for (_, pod) in before.pods().filter(|(_, pod)| !kept.contains(&*pod.uid)) {
            self.owners.remove(&*pod.uid);
            self.forget_reports(&pod.uid);
            self.effects.objects.push(ObjectKey::pod(&name.namespace, &pod.name));
        }
    }

    fn objects(&mut self, name: &Name, before: &App, after: Option<&App>, rewrite: bool) {
        let out = &mut self.effects.objects;
        let gone = after.is_none_or(App::leaving);
        let own = |app: &App| {
            let names: Vec<Box<str>> = app.revisions.iter().map(|it| it.name.clone()).collect();
            (
                app.conditions.clone(),
                app.latest_ready().map(str::to_owned),
                app.traffic().to_vec(),
                names.last().cloned(),
            )
        };
        if rewrite || gone || after.is_some_and(|app| own(app) != own(before)) {
            out.extend(ObjectKey::of_app(name));
            let names = |app: &App, none: bool| -> Vec<(Name, Vec<IpAddr>)> {
                let all = app.allotted().iter().map(|it| {
                    let host = plan::host_name(it, &name.name);
                    let addresses = self.world.settings.addresses(&it.addresses);
                    let addresses = if none { Vec::new() } else { addresses };
                    (Name::new(name.namespace.clone(), host), addresses)
                });
                all.collect()
            };
            // A name that another owner has by now is that one's to tell.
            let is_others = |it: &Name| self.world.app_named(it).is_some_and(|app| app != *name);
            let now = after.filter(|_| !gone).map(|app| names(app, false)).unwrap_or_default();
            let old = names(before, true).into_iter();
            self.effects.names.extend(
                old.filter(|(old, _)| !is_others(old) && !now.iter().any(|(name, _)| name == old)),
            );
            self.effects.names.extend(now);
        }
        let out = &mut self.effects.objects;
        let after = after.map(|app| app.revisions.as_slice()).unwrap_or_default();
        for revision in after {
            let old = before.revision(&revision.name);
            if rewrite || old != Some(revision) {
                out.extend(ObjectKey::of_revision(&name.namespace, &revision.name));
            }
            for pod in &revision.pods {
                let had = old.and_then(|it| it.pods.iter().find(|had| had.uid == pod.uid));
                if had != Some(pod) {
                    out.push(ObjectKey::pod(&name.namespace, &pod.name));
                }
            }
        }
        let lost =
            before.revisions.iter().filter(|it| !after.iter().any(|has| has.name == it.name));
        out.extend(lost.flat_map(|it| ObjectKey::of_revision(&name.namespace, &it.name)));
    }

    fn set_timer(&mut self, name: &Name, at: Option<Stamp>) {
        if let Some(old) = self.timer_of.remove(name) {
            self.timers.remove(&(old, name.clone()));
        }
        if let Some(at) = at {
            self.timers.insert((at, name.clone()));
            self.timer_of.insert(name.clone(), at);
        }
    }

    fn forget(&mut self, name: &Name) {
        self.draining.remove(name);
        self.forget_hindrances(name);
        self.world.apps.remove(name);
        info!(service = %name, "service gone");
    }
}

/// Every subject the app may have in the RouteTable; those that go first are named first.
fn keys(name: &Name, app: &App) -> impl Iterator<Item = RouteKey> {
    let full = |own: &str| Name::new(name.namespace.clone(), own);
    let services =
        app.allotted().iter().map(|it| RouteKey::Service(full(&plan::host_name(it, &name.name))));
    let pods = app.pods().map(|(_, pod)| RouteKey::Pod(pod.uid.to_string()));
    let revisions = app.revisions.iter().map(|it| RouteKey::Revision(full(&it.name)));
    services.chain(pods).chain(revisions).collect::<Vec<_>>().into_iter()
}

fn log_changes(name: &Name, before: &App, after: &App) {
    for revision in &after.revisions {
        let from = before.revision(&revision.name).map_or(0, |it| it.desired);
        if from != revision.desired {
            let key = format!("{}/{}", name.namespace, revision.name);
            info!(revision = key, from, to = revision.desired, ready = revision.actual, "scaled");
        }
    }
    let ready = |app: &App| app.conditions.get(Kind::ServiceReady);
    if ready(before) != ready(after) {
        let (ready, why) = match ready(after) {
            Truth::True(_) => ("True", None),
            Truth::Unknown(why) => ("Unknown", why),
            Truth::False(why) => ("False", Some(why)),
        };
        let reason = why.as_ref().map(|why| &*why.reason);
        let message = why.as_ref().map(|why| &*why.message);
        info!(service = %name, ready, reason, message, "service condition changed");
    }
}

#[cfg(test)]
pub(crate) mod tests;
