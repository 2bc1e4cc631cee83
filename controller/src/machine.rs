//! Pure: events → world → plan → effects. One step per event, one app per step.
//!
//! The machine keeps the world in step with its plan. After each event the affected app is planned and the plan is
//! applied to the world. The RouteTable's outbox is updated at once; the effects on node, disk and API server are left
//! in [`ControllerEffects`].

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::IpAddr,
};

use common::{
    node::{self, LocalPodSpec, LocalPodStatus},
    outbox::Outbox,
    wire::{
        ComponentReplica, NamespacedName, PodObservation, RouteChange, RouteKey, ScaleDecision,
        ServerComponent,
    },
};
use serde_json::Value;
use smol_str::SmolStr;
use tracing::info;

use crate::{
    children::ResourceKind,
    kube::{ObjectPart, ObjectPartKey, WriteError},
    network_policies::PolicyClientPod,
    plan::{self, AppPlan, TemplateFacts},
    render::KnativeObjectKey,
    world::{
        AppState, ClusterState, ConditionReason, ConditionStatus, ConditionType, CurrentDecision,
        PlatformKind, PodStage, RevisionPod, ServiceManifest, UnixMillis,
    },
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

pub use digests::DigestResolution;
pub use said::{RouteFingerprint, RouteMessageBatch};
pub use settings::ConfigMapEventRecord;

/// Input of the machine: an observation, a decision, a report or a passed timer.
#[derive(Clone, Debug, PartialEq)]
pub enum ControllerEvent {
    /// A user applied a manifest on the local platform.
    Apply(NamespacedName, ServiceManifest),
    /// A manifest cannot be used, for this reason.
    Refuse(NamespacedName, String),
    /// A manifest was deleted.
    Delete(NamespacedName),
    /// An app was restored from disk.
    Restore(NamespacedName, Box<AppState>),
    /// The active autoscaler sent a scale decision.
    Decide(ScaleDecision),
    /// The active autoscaler has forgotten a Revision.
    Undecide(NamespacedName),
    /// An autoscaler's stream of decisions begins.
    DecisionsBegin,
    /// The autoscaler's stream has named every Revision.
    DecisionsSynced,
    /// The report of an agent or activator begins, on the stream of this number.
    ReportBegin(ComponentReplica, u64),
    /// An agent or activator reports the state of a pod.
    Seen(ComponentReplica, PodObservation),
    /// An agent or activator no longer sees a pod.
    Unseen(ComponentReplica, String),
    /// The subscriber opens no more connections to this draining pod: a drain acknowledgement.
    Avoided(ComponentReplica, u64, String),
    /// The subscriber withdraws its drain acknowledgement of the pod.
    AvoidedNoMore(ComponentReplica, u64, String),
    /// The activator's stream names each service that the activator routes to some Revision.
    NamesRouted(ComponentReplica, u64),
    /// The activator does, or no longer does, route requests for this service to some Revision.
    Routed(ComponentReplica, u64, NamespacedName, bool),
    /// The subscriber's report has named every pod.
    ReportSynced(ComponentReplica, u64),
    /// The subscriber's stream of this number has ended.
    ReportEnd(ComponentReplica, u64),
    /// The images of a Revision are resolved to digests, or cannot be resolved.
    Resolved(NamespacedName, DigestResolution),
    /// The chosen replica of a component: the leader, or the active autoscaler; `None`: none.
    Choose(ServerComponent, Option<String>),
    /// The local node reports the state of a pod.
    Status(LocalPodStatus),
    /// An object as the API server holds it; `None`: it was deleted.
    Observe(ResourceKind, NamespacedName, Option<Box<Value>>),
    /// A pod that NetworkPolicies may admit; `None`: it was deleted.
    Client(NamespacedName, Option<PolicyClientPod>),
    /// A write error of an object; `None`: its last write succeeded.
    Trouble(ObjectPartKey, Option<WriteError>),
    /// Child objects of this object of an app do not exist; `None`: all exist.
    Unmade(NamespacedName, ResourceKind, NamespacedName, Option<WriteError>),
    /// All objects that existed at the start have been observed.
    Known,
    /// True if this replica has become the leader, false if it is no longer.
    Lead(bool),
    /// Time has passed, and timers may be due.
    Tick,
}

/// Effects of a step on the local node, the disk, the writer and the event recorder.
#[derive(Debug, Default)]
pub struct ControllerEffects {
    /// Pods that the local node should start.
    pub start: Vec<LocalPodSpec>,
    /// UIDs of pods that the local node should stop.
    pub stop: Vec<String>,
    /// Names with their addresses, for the local node's DNS; no addresses: the name is deleted.
    pub names: Vec<(NamespacedName, Vec<IpAddr>)>,
    /// Objects to write to disk or delete from it, on the local platform.
    pub objects: Vec<KnativeObjectKey>,
    /// Parts of objects that may have to be written, on Kubernetes.
    pub keys: Vec<ObjectPartKey>,
    /// Apps whose planned objects should exist soon, so that a check is scheduled.
    pub planned: Vec<NamespacedName>,
    /// Events to record on ConfigMaps.
    pub news: Vec<ConfigMapEventRecord>,
    /// Revisions whose digests are to be resolved, or are no longer needed.
    pub resolve: Vec<NamespacedName>,
    /// Number of reports that were refused, since the pod runs on another node than the reporter.
    pub refused: u64,
}

/// State machine that is the controller's core.
#[derive(Debug)]
pub struct ControllerStateMachine {
    world: ClusterState,
    routes: Outbox<RouteKey, RouteFingerprint>,
    /// App of each pod, by the pod's UID.
    owners: HashMap<String, NamespacedName>,
    /// True before [`ControllerEvent::Known`]: nothing is planned while a part of the objects is unknown.
    loading: bool,
    /// UIDs of the observed pods, by name.
    uids: BTreeMap<NamespacedName, Box<str>>,
    /// Pods that were observed before their Revision, by the Revision's name and the pod's.
    early: BTreeMap<NamespacedName, BTreeMap<NamespacedName, RevisionPod>>,
    /// Pods that each reporter has named, by reporter.
    reports: BTreeMap<String, reports::ReporterPods>,
    /// Scale decisions on Revisions that are not observed yet.
    ahead: BTreeMap<NamespacedName, CurrentDecision>,
    /// Revisions that the current stream of decisions has not named yet.
    undecided: Option<BTreeSet<NamespacedName>>,
    /// Reasons for which Revisions and Routes cannot become as desired.
    hindrances: BTreeMap<keys::BlockedObject, BTreeMap<keys::BlockingCause, ConditionReason>>,
    /// Apps that have draining pods.
    draining: BTreeSet<NamespacedName>,
    /// Apps whose objects may not follow the present settings yet.
    stale: VecDeque<NamespacedName>,
    /// Events on ConfigMaps that this replica records only if it becomes the leader.
    untold: BTreeMap<NamespacedName, Vec<ConfigMapEventRecord>>,
    /// Number of apps created so far; part of each new UID.
    born: u64,
    timers: BTreeSet<(UnixMillis, NamespacedName)>,
    timer_of: BTreeMap<NamespacedName, UnixMillis>,
    effects: ControllerEffects,
}

impl ControllerStateMachine {
    /// Returns a machine for `world` that writes to the outbox `routes`.
    pub fn new(world: ClusterState, routes: Outbox<RouteKey, RouteFingerprint>) -> Self {
        // Fixed activators come from the configuration, so no event announces them.
        for activator in &world.settings.activators {
            let key = RouteKey::Activator(activator.name.clone());
            routes.set(key, RouteFingerprint::of(&RouteChange::Activator(activator.clone())));
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
            effects: ControllerEffects::default(),
        }
    }

    /// Delays all planning until [`ControllerEvent::Known`].
    #[must_use]
    pub fn loading(self) -> Self {
        Self { loading: true, ..self }
    }

    fn known(&mut self, now: UnixMillis) {
        self.loading = false;
        // Owners of names first: a plan depends on the names that the app owns.
        self.settle_rivals(now);
        for name in self.world.apps.keys().cloned().collect::<Vec<_>>() {
            self.settle(&name, None, true, now);
        }
        self.settle_mappings(now);
    }

    /// Returns the world as it is now.
    pub fn world(&self) -> &ClusterState {
        &self.world
    }

    /// Returns the RouteTable's outbox.
    pub fn routes(&self) -> &Outbox<RouteKey, RouteFingerprint> {
        &self.routes
    }

    /// Returns the time at which the next [`ControllerEvent::Tick`] is due.
    pub fn next_timer(&self) -> Option<UnixMillis> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Handles one event and returns its effects.
    pub fn step(&mut self, now: UnixMillis, event: ControllerEvent) -> ControllerEffects {
        match event {
            ControllerEvent::Apply(name, manifest) => self.apply(name, manifest, now),
            ControllerEvent::Refuse(name, why) => self.refuse(name, &why, now),
            ControllerEvent::Delete(name) => self.delete(&name, now),
            ControllerEvent::Restore(name, app) => self.restore(name, *app, now),
            ControllerEvent::Decide(decision) => self.decide(decision, now),
            ControllerEvent::Undecide(revision) => self.undecide(&revision, now),
            ControllerEvent::DecisionsBegin => {
                self.undecided = Some(self.decided().collect());
            }
            ControllerEvent::DecisionsSynced => {
                for revision in self.undecided.take().into_iter().flatten() {
                    self.undecide(&revision, now);
                }
            }
            ControllerEvent::ReportBegin(who, stream) => self.report_begin(&who, stream, now),
            ControllerEvent::Seen(who, seen) => self.see(&who, seen, now),
            ControllerEvent::Unseen(who, uid) => self.unsee(&who, &uid, now),
            ControllerEvent::Avoided(who, stream, uid) => self.avoid(&who, stream, &uid, true, now),
            ControllerEvent::AvoidedNoMore(who, stream, uid) => {
                self.avoid(&who, stream, &uid, false, now)
            }
            ControllerEvent::NamesRouted(who, stream) => self.names_routed(&who, stream),
            ControllerEvent::Routed(who, stream, name, leads) => {
                self.routed(&who, stream, &name, leads, now);
            }
            ControllerEvent::ReportSynced(who, stream) => self.report_synced(&who, stream, now),
            ControllerEvent::ReportEnd(who, stream) => self.report_end(&who, stream, now),
            ControllerEvent::Resolved(revision, digests) => self.resolved(&revision, digests, now),
            ControllerEvent::Choose(part, chosen) => self.choose(part, chosen),
            ControllerEvent::Status(status) => self.status(status, now),
            ControllerEvent::Observe(resource, name, object) => {
                self.observe(resource, name, object.as_deref(), now);
            }
            ControllerEvent::Client(name, client) => {
                let touched = self.world.network_policies.client(name, client);
                self.settle_all_of(&touched, now);
            }
            ControllerEvent::Trouble(key, trouble) => self.trouble(&key, trouble, now),
            ControllerEvent::Unmade(app, of, name, trouble) => {
                self.unmade(app, of, &name, trouble, now)
            }
            ControllerEvent::Known => self.known(now),
            ControllerEvent::Lead(leads) => self.lead(leads, now),
            ControllerEvent::Tick => self.tick(now),
        }
        // Any event may have moved a name to another owner, or made a Revision known that was already decided on.
        self.settle_rivals(now);
        self.catch_up(now);
        std::mem::take(&mut self.effects)
    }

    fn restore(&mut self, name: NamespacedName, mut app: AppState, now: UnixMillis) {
        // Templates from disk are equal but separate; shared, each is in memory only once.
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

    fn status(&mut self, status: LocalPodStatus, now: UnixMillis) {
        let Some(app) = self.owners.get(&status.uid).cloned() else { return };
        let (uid, gone) = (status.uid.clone(), status.phase == node::LocalPodPhase::Gone);
        let before = self.world.statuses.get(&uid);
        if before == Some(&status) {
            return;
        }
        info!(pod = uid, phase = ?status.phase, "pod status");
        self.world.statuses.insert(uid.clone(), status);
        self.effects.objects.extend(self.pod_object(&app, &uid));
        self.settle(&app, None, false, now);
        // The plan above still needed the last status, to see that the pod ended.
        if gone {
            self.world.statuses.remove(&uid);
            self.forget_reports(&uid);
        }
    }

    fn pod_object(&self, app: &NamespacedName, uid: &str) -> Option<KnativeObjectKey> {
        let mut pods = self.world.apps.get(app)?.pods();
        let (_, pod) = pods.find(|(_, pod)| *pod.uid == *uid)?;
        Some(KnativeObjectKey::pod(&app.namespace, &pod.name))
    }

    fn tick(&mut self, now: UnixMillis) {
        while let Some((at, name)) = self.timers.first().cloned() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            // The empty name is the timer of rewrites, which belongs to no app.
            if name == settings::REWRITE {
                self.rewrite(now);
                continue;
            }
            self.timer_of.remove(&name);
            self.settle(&name, None, false, now);
        }
    }

    /// Plans one app, and the apps whose Routes name its Revisions.
    fn settle(
        &mut self,
        name: &NamespacedName,
        before: Option<&AppState>,
        rewrite: bool,
        now: UnixMillis,
    ) {
        // Nearly always there is no mapping, and then no copy of the app is needed.
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
        // The routing labels of this app's Revisions depend on the targets of those Routes.
        self.settle_one(name, None, false, now);
    }

    /// Plans every app of these namespaces.
    fn settle_all_of(&mut self, namespaces: &BTreeSet<SmolStr>, now: UnixMillis) {
        for namespace in namespaces {
            let from = self.world.apps.range(NamespacedName::new(namespace.clone(), "")..);
            let here = from.map(|(name, _)| name).take_while(|it| it.namespace == *namespace);
            for name in here.cloned().collect::<Vec<_>>() {
                self.settle(&name, None, false, now);
            }
        }
    }

    /// Plans one app and applies the plan to the world. `before` is the app before the event changed it.
    fn settle_one(
        &mut self,
        name: &NamespacedName,
        before: Option<&AppState>,
        rewrite: bool,
        now: UnixMillis,
    ) {
        if self.loading {
            return;
        }
        let Some(current) = self.world.apps.get(name).cloned() else { return };
        names::ask(&current, name, &mut self.world);
        // The plan reads which names the app owns, so its claims must be current.
        let plan = plan::app(&self.world, name, now);
        let before = before.unwrap_or(&current);
        self.say_routes(name, before, &plan);
        match self.world.settings.platform {
            PlatformKind::Local => {
                self.orders(name, before, plan.app.as_ref());
                self.objects(name, before, plan.app.as_ref(), rewrite);
            }
            PlatformKind::Kubernetes => {
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
        let drains = |(_, pod): (_, &RevisionPod)| matches!(pod.stage, PodStage::Draining { .. });
        if app.pods().any(drains) {
            self.draining.insert(name.clone());
        } else {
            self.draining.remove(name);
        }
        log_changes(name, before, &app);
        self.world.apps.insert(name.clone(), Box::new(app));
    }

    /// Updates the RouteTable's outbox with the plan's subjects, and removes those that the plan no longer has.
    fn say_routes(&self, name: &NamespacedName, before: &AppState, plan: &AppPlan) {
        let mut said = BTreeSet::new();
        for change in &plan.routes {
            let Some(key) = change.key() else { continue };
            self.routes.set(key.clone(), RouteFingerprint::of(change));
            said.insert(key);
        }
        // Another app may have taken over the name, whose subject must stay.
        let is_others = |key: &RouteKey| match key {
            RouteKey::Service(it) => self.world.app_named(it).is_some_and(|app| app != *name),
            _ => false,
        };
        for key in keys(name, before).filter(|key| !said.contains(key) && !is_others(key)) {
            self.routes.remove(&key);
        }
    }

    fn orders(&mut self, name: &NamespacedName, before: &AppState, after: Option<&AppState>) {
        let ordered = |pod: &RevisionPod| !matches!(pod.stage, PodStage::Stopping { .. });
        let uids = |app: &AppState| -> BTreeSet<Box<str>> {
            app.pods().filter(|(_, pod)| ordered(pod)).map(|(_, pod)| pod.uid.clone()).collect()
        };
        let (had, has) = (uids(before), after.map(uids).unwrap_or_default());
        for (revision, pod) in after.iter().flat_map(|app| app.pods()) {
            // An order holds until it is withdrawn, so each pod is ordered once.
            let known = self.owners.contains_key(&*pod.uid);
            if ordered(pod) && !known {
                let facts = TemplateFacts::of(revision, &self.world);
                self.effects.start.push(facts.order(name, revision, pod));
                self.owners.insert(pod.uid.to_string(), name.clone());
            }
        }
        for uid in had.difference(&has) {
            self.effects.stop.push(uid.to_string());
        }
        // A stopped pod stays known until the plan drops it, which is once the node has reported its end.
        let kept: BTreeSet<&str> =
            after.iter().flat_map(|app| app.pods()).map(|(_, pod)| &*pod.uid).collect();
        for (_, pod) in before.pods().filter(|(_, pod)| !kept.contains(&*pod.uid)) {
            self.owners.remove(&*pod.uid);
            self.forget_reports(&pod.uid);
            self.effects.objects.push(KnativeObjectKey::pod(&name.namespace, &pod.name));
        }
    }

    fn objects(
        &mut self,
        name: &NamespacedName,
        before: &AppState,
        after: Option<&AppState>,
        rewrite: bool,
    ) {
        let out = &mut self.effects.objects;
        let gone = after.is_none_or(AppState::leaving);
        let own = |app: &AppState| {
            let names: Vec<Box<str>> = app.revisions.iter().map(|it| it.name.clone()).collect();
            (
                app.conditions.clone(),
                app.latest_ready().map(str::to_owned),
                app.traffic().to_vec(),
                names.last().cloned(),
            )
        };
        if rewrite || gone || after.is_some_and(|app| own(app) != own(before)) {
            out.extend(KnativeObjectKey::of_app(name));
            let names = |app: &AppState, none: bool| -> Vec<(NamespacedName, Vec<IpAddr>)> {
                let all = app.allotted().iter().map(|it| {
                    let host = plan::host_name(it, &name.name);
                    let addresses = self.world.settings.addresses(&it.addresses);
                    let addresses = if none { Vec::new() } else { addresses };
                    (NamespacedName::new(name.namespace.clone(), host), addresses)
                });
                all.collect()
            };
            // A name that has another owner by now is in that owner's effects.
            let is_others =
                |it: &NamespacedName| self.world.app_named(it).is_some_and(|app| app != *name);
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
                out.extend(KnativeObjectKey::of_revision(&name.namespace, &revision.name));
            }
            for pod in &revision.pods {
                let had = old.and_then(|it| it.pods.iter().find(|had| had.uid == pod.uid));
                if had != Some(pod) {
                    out.push(KnativeObjectKey::pod(&name.namespace, &pod.name));
                }
            }
        }
        let lost =
            before.revisions.iter().filter(|it| !after.iter().any(|has| has.name == it.name));
        out.extend(lost.flat_map(|it| KnativeObjectKey::of_revision(&name.namespace, &it.name)));
    }

    fn set_timer(&mut self, name: &NamespacedName, at: Option<UnixMillis>) {
        if let Some(old) = self.timer_of.remove(name) {
            self.timers.remove(&(old, name.clone()));
        }
        if let Some(at) = at {
            self.timers.insert((at, name.clone()));
            self.timer_of.insert(name.clone(), at);
        }
    }

    fn forget(&mut self, name: &NamespacedName) {
        self.draining.remove(name);
        self.forget_hindrances(name);
        self.world.apps.remove(name);
        info!(service = %name, "service gone");
    }
}

/// Returns every subject that the app may have in the RouteTable, in the order in which they are to be removed.
fn keys(name: &NamespacedName, app: &AppState) -> impl Iterator<Item = RouteKey> {
    let full = |own: &str| NamespacedName::new(name.namespace.clone(), own);
    // Services first, so that no stream ever has a service without its Revision.
    let services =
        app.allotted().iter().map(|it| RouteKey::Service(full(&plan::host_name(it, &name.name))));
    let pods = app.pods().map(|(_, pod)| RouteKey::Pod(pod.uid.to_string()));
    let revisions = app.revisions.iter().map(|it| RouteKey::Revision(full(&it.name)));
    services.chain(pods).chain(revisions).collect::<Vec<_>>().into_iter()
}

fn log_changes(name: &NamespacedName, before: &AppState, after: &AppState) {
    for revision in &after.revisions {
        let from = before.revision(&revision.name).map_or(0, |it| it.desired);
        if from != revision.desired {
            let key = format!("{}/{}", name.namespace, revision.name);
            info!(revision = key, from, to = revision.desired, ready = revision.actual, "scaled");
        }
    }
    let ready = |app: &AppState| app.conditions.get(ConditionType::ServiceReady);
    if ready(before) != ready(after) {
        let (ready, why) = match ready(after) {
            ConditionStatus::True(_) => ("True", None),
            ConditionStatus::Unknown(why) => ("Unknown", why),
            ConditionStatus::False(why) => ("False", Some(why)),
        };
        let reason = why.as_ref().map(|why| &*why.reason);
        let message = why.as_ref().map(|why| &*why.message);
        info!(service = %name, ready, reason, message, "service condition changed");
    }
}

#[cfg(test)]
pub(crate) mod tests;
