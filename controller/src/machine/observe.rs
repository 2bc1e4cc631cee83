//! Pure: objects of the API server → the world. Observations come in any order and more than once.

use std::collections::BTreeSet;

use common::{
    node::LocalPodPhase,
    wire::{NamespacedName, ServerComponent},
};
use serde_json::Value;
use tracing::info;

use super::{ControllerStateMachine, allot, keys::BlockingCause};
use crate::{
    bind,
    children::ResourceKind,
    kube::{ObjectPart as Piece, ObjectPartKey},
    observe,
    plan::TemplateFacts,
    policy::AutoscalerClass,
    render, restore, want,
    world::{
        AppRevision, AppState, ClusterState, ConfigurationState, KubeletReadiness, PodStage,
        RevisionPod, RouteState, ServiceState, Uid, UnixMillis,
    },
};

impl ControllerStateMachine {
    /// Handles an object; `None`: it was deleted.
    pub(super) fn observe(
        &mut self,
        resource: ResourceKind,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        match resource {
            ResourceKind::KnativeService => self.observe_service(name, object, now),
            ResourceKind::Configuration => self.observe_configuration(name, object, now),
            ResourceKind::Route => self.observe_route(name, object, now),
            ResourceKind::Revision => self.observe_revision(&name, object, now),
            ResourceKind::Deployment => self.observe_deployment(&name, object, now),
            ResourceKind::Pod => self.observe_pod(&name, object, now),
            ResourceKind::Service => self.observe_placeholder(&name, object, now),
            ResourceKind::Node => self.observe_node(&name.name, object, now),
            ResourceKind::ConfigMap => self.observe_config(&name, object, now),
            ResourceKind::NetworkPolicy => {
                let touched = self.world.network_policies.policy(name, object);
                self.settle_all_of(&touched, now);
            }
            ResourceKind::Namespace => {
                let is_going = |it: &Value| it["metadata"]["deletionTimestamp"].is_string();
                match object.is_some_and(is_going) {
                    true => self.world.going.insert(name.name.clone()),
                    false => self.world.going.remove(&name.name),
                };
                let touched = self.world.network_policies.namespace(&name.name, object);
                self.settle_all_of(&touched, now);
            }
            // Kinds that have a file of their own, or are only written.
            ResourceKind::EndpointSlice => self.observe_slice(&name, object),
            ResourceKind::DomainMapping => self.observe_mapping(&name, object, now),
            ResourceKind::ClusterDomainClaim => self.observe_claim(&name, object, now),
            ResourceKind::PodAutoscaler => self.observe_autoscaler(name, object),
            ResourceKind::HorizontalPodAutoscaler
            | ResourceKind::ServerlessService
            | ResourceKind::Metric
            | ResourceKind::Image => {}
        }
    }

    /// Changes one app and plans it; an app without any object left is forgotten. Returns true if the app was planned.
    pub(super) fn change(
        &mut self,
        name: NamespacedName,
        now: UnixMillis,
        change: impl FnOnce(&mut AppState, &mut ClusterState),
    ) -> bool {
        if self.loading {
            // Nothing is planned yet, so no copy is needed to compare: a service may have thousands of pods.
            let mut app = self.world.apps.remove(&name).unwrap_or_default();
            let shape = |app: &AppState| {
                let tags = app.route.as_ref().map_or(0, |it| it.tags().count());
                (app.revisions.len(), app.route.is_some(), tags)
            };
            let before = shape(&app);
            change(&mut app, &mut self.world);
            if shape(&app) != before {
                self.index(&name, None, Some(&app));
            }
            self.world.apps.insert(name, app);
            return true;
        }
        let before = self.world.apps.remove(&name).unwrap_or_default();
        let mut app = before.clone();
        change(&mut app, &mut self.world);
        if app == before && app != Box::default() {
            self.world.apps.insert(name, app);
            return false;
        }
        self.index(&name, Some(&before), Some(&app));
        self.world.apps.insert(name.clone(), app);
        self.settle(&name, Some(&before), true, now);
        true
    }

    fn observe_service(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        self.change(name, now, |app, world| {
            let config = &world.settings.autoscaler;
            let seen = object.map(|it| observe::service(it, config, app.service.as_ref()));
            // After a restart, the conditions that an earlier leader wrote are the starting point.
            if let (None, Some(object)) = (&app.service, object) {
                restore::conditions(&mut app.conditions, object, &render::SERVICE);
            }
            app.service =
                seen.map(|it| ServiceState { manifest: shared(it.manifest, world), ..it });
        });
    }

    fn observe_configuration(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        self.change(name, now, |app, world| {
            if let (None, Some(object)) = (&app.configuration, object) {
                restore::conditions(&mut app.conditions, object, &render::CONFIGURATION);
            }
            let before = app.configuration.take().filter(|it| it.meta.uid != Uid(0));
            app.configuration = object.map(observe::configuration).map(|it| ConfigurationState {
                template: world.templates.share(&it.template),
                // The world's value is newer than the written one.
                latest_ready: before.and_then(|it| it.latest_ready).or(it.latest_ready),
                ..it
            });
        });
    }

    fn observe_route(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let mut named = self.forget_references(&name);
        if let Some(object) = object {
            named.extend(self.note_references(&name, &observe::route(object)));
        }
        let own = name.clone();
        self.change(name, now, |app, world| {
            let before = app.route.take();
            if let (None, Some(object)) = (&before, object) {
                restore::conditions(&mut app.conditions, object, &render::ROUTE);
            }
            match (object.map(observe::route), before) {
                (Some(seen), before) => {
                    // After a restart, the shares that an earlier leader wrote are the starting point.
                    let before = before.unwrap_or_else(|| seen.clone());
                    // The writer reports a write error only once, so the present one is kept.
                    let RouteState { allotted, blocked, .. } = before.clone();
                    let route = RouteState { allotted, blocked, ..seen };
                    // The leader's values are newer than what it wrote; other replicas follow the object.
                    app.route = Some(match world.leads {
                        true => {
                            RouteState { traffic: before.traffic, rollout: before.rollout, ..route }
                        }
                        false => route,
                    });
                    allot::allot(app, &own, world);
                }
                (None, Some(before)) => allot::give_back(&before.allotted, world),
                (None, None) => {}
            }
        });
        for other in named {
            self.settle(&other, None, false, now);
        }
    }

    /// Records the other apps whose Revisions a Route names, and returns them.
    fn note_references(
        &mut self,
        name: &NamespacedName,
        route: &RouteState,
    ) -> BTreeSet<NamespacedName> {
        let mut named = BTreeSet::new();
        for target in route.wanted.iter() {
            let configuration = target.configuration.as_deref();
            let by_revision = target.revision.as_deref().and_then(|revision| {
                self.world.app_of(&NamespacedName::new(name.namespace.clone(), revision))
            });
            let by_name = configuration.map(|it| NamespacedName::new(name.namespace.clone(), it));
            for other in by_revision.into_iter().chain(by_name).filter(|it| it != name) {
                self.world.referrers.entry(other.clone()).or_default().insert(name.clone());
                named.insert(other);
            }
        }
        named
    }

    /// Forgets the references of a Route, and returns the apps that it named.
    fn forget_references(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        let mut named = BTreeSet::new();
        self.world.referrers.retain(|other, from| {
            if from.remove(name) {
                named.insert(other.clone());
            }
            !from.is_empty()
        });
        named
    }

    fn observe_revision(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let owner = object.and_then(observe::app).or_else(|| self.world.app_of(name));
        let Some(owner) = owner else { return };
        let Some(object) = object else {
            self.keep_decided(name);
            self.hindrances.remove(&(owner.clone(), Some(name.name.as_str().into())));
            self.change(owner, now, |app, _| lose_revision(app, &name.name, now));
            return;
        };
        let early = self.early.remove(name).unwrap_or_default();
        let pods: Vec<Box<str>> = early.values().map(|pod| pod.uid.clone()).collect();
        self.change(owner, now, |app, world| {
            let mut seen = observe::revision(object);
            seen.template = world.templates.share(&seen.template);
            let is_new = app.revision(&seen.name).is_none();
            if let Some(line) = observe::decision(object).filter(|_| is_new) {
                world.decisions.entry(name.clone()).or_insert(line);
            }
            match app.revisions.iter_mut().find(|it| it.name == seen.name) {
                // All other fields are the controller's own, and newer in the world.
                Some(known) if [Uid(0), seen.meta.uid].contains(&known.meta.uid) => {
                    if !world.leads {
                        follow(known, &seen);
                    }
                    (known.meta, known.template) = (seen.meta, seen.template);
                    known.creator = seen.creator;
                    (known.leaving, known.is_orphan) = (seen.leaving, seen.is_orphan);
                }
                // A new Revision of the name. Decisions go by the name, and pods of the old one finish their requests.
                Some(known) => {
                    known.pods.iter_mut().for_each(|pod| drain(pod, now));
                    let (decided, pods) = (known.decided, std::mem::take(&mut known.pods));
                    *known = AppRevision { decided, pods, ..seen };
                }
                None => app.revisions.push(seen),
            }
            app.revisions
                .sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
            for pod in early.into_values() {
                put_pod(app, &name.name, pod, world.leads, now);
            }
            // A new leader must not scale down what runs before the autoscaler decides.
            let mut all = app.revisions.iter_mut();
            all.find(|it| is_new && *it.name == *name.name).into_iter().for_each(keep_what_runs);
        });
        for uid in pods {
            self.take_early(&uid, now);
        }
    }

    fn observe_deployment(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let key = ObjectPartKey::new(ResourceKind::Deployment, Piece::Object, name.clone());
        let Some((owner, made_for)) = want::maker_of(&self.world, &key) else { return };
        let blocked = object.and_then(observe::deployment);
        // If Kubernetes scales the Revision, the Deployment's replicas are the desired number of pods.
        let told = object.and_then(|it| it["spec"]["replicas"].as_u64());
        let of = (owner.clone(), Some(made_for.clone()));
        let blocked = self.note_hindrance(&of, BlockingCause::Deployment, blocked);
        self.change(owner, now, |app, world| {
            let key = NamespacedName::new(name.namespace.clone(), &*made_for);
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| it.name == made_for) else { return };
            revision.blocked = blocked;
            match told.and_then(|it| u32::try_from(it).ok()) {
                Some(told) if TemplateFacts::of(revision, world).class != AutoscalerClass::Kpa => {
                    world.told.insert(key, told);
                }
                Some(_) | None => drop(world.told.remove(&key)),
            }
        });
    }

    /// Handles a PodAutoscaler, which owns its HorizontalPodAutoscaler.
    fn observe_autoscaler(&mut self, name: NamespacedName, object: Option<&Value>) {
        let uid = object.filter(|it| observe::is_horizontal(it));
        let Some(uid) = uid.and_then(|it| it["metadata"]["uid"].as_str()) else {
            self.world.autoscalers.remove(&name);
            return;
        };
        if self.world.autoscalers.get(&name).is_none_or(|it| **it != *uid) {
            self.world.autoscalers.insert(name.clone(), uid.into());
            let key =
                ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, Piece::Object, name);
            self.effects.keys.push(key);
        }
    }

    fn observe_pod(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        if self.observe_own(name, object, now) {
            return;
        }
        // A kubelet that refused the pod would refuse the next one too, so the node is avoided for a while.
        let refuser = object.and_then(bind::refuser);
        if let Some(node) = refuser.and_then(|it| self.world.nodes.get_mut(it)) {
            node.shun(now);
        }
        match object.filter(|it| observe::made_for(it).is_some()).and_then(|it| {
            let owner = observe::app(it)?;
            Some((owner, observe::made_for(it)?.to_owned(), observe::pod(it)?))
        }) {
            Some((owner, revision, (pod, status))) => {
                self.owners.insert(pod.uid.to_string(), owner.clone());
                self.uids.insert(name.clone(), pod.uid.clone());
                let same = self.world.statuses.get(&*pod.uid) == Some(&status);
                self.world.statuses.insert(pod.uid.to_string(), status);
                let known = self.world.apps.get(&owner).and_then(|app| app.revision(&revision));
                if known.is_none() {
                    // Each kind has a watch of its own: the Revision will be observed soon.
                    let made_for = NamespacedName::new(name.namespace.clone(), revision);
                    self.early.entry(made_for).or_default().insert(name.clone(), pod);
                    return;
                }
                let uid = pod.uid.clone();
                let planned = self.change(owner.clone(), now, |app, world| {
                    put_pod(app, &revision, pod, world.leads, now);
                });
                if !planned && !same {
                    self.settle(&owner, None, false, now);
                }
                self.take_early(&uid, now);
            }
            None => self.lose_pod(name, now),
        }
    }

    fn lose_pod(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(uid) = self.uids.remove(name) else { return };
        self.early.retain(|_, pods| {
            pods.remove(name);
            !pods.is_empty()
        });
        let Some(owner) = self.owners.get(&*uid).cloned() else { return };
        // The plan must see the pod as ended before its status is dropped.
        if let Some(status) = self.world.statuses.get_mut(&*uid) {
            status.phase = LocalPodPhase::Gone;
        }
        self.change(owner, now, |app, _| {
            for revision in &mut app.revisions {
                revision.pods.retain(|pod| pod.uid != uid);
            }
        });
        self.world.statuses.remove(&*uid);
        self.forget_reports(&uid);
        self.owners.remove(&*uid);
    }

    /// Handles a node. A lost node takes its pods away before each is reported, and gives them back when it returns.
    fn observe_node(&mut self, name: &str, object: Option<&Value>, now: UnixMillis) {
        match object.and_then(observe::zone) {
            Some(zone) => drop(self.world.zones.insert(name.to_owned(), zone)),
            None => drop(self.world.zones.remove(name)),
        }
        let was_away = self.world.is_away(name);
        let before = self.world.nodes.remove(name);
        let node = match object {
            Some(object) => Some(bind::NodeState::of(object, before.as_ref())),
            // Deleting a lost node does not bring back its pods, so it stays known as lost.
            None if was_away && !self.apps_on(name).is_empty() => Some(bind::NodeState::default()),
            None => None,
        };
        self.world.nodes.extend(node.map(|node| (name.to_owned(), node)));
        self.node_changed(name, was_away, now);
    }

    /// Plans the apps on a node if it became or is no longer [away](ClusterState::is_away); `was_away` is the former
    /// state.
    pub(super) fn node_changed(&mut self, name: &str, was_away: bool, now: UnixMillis) {
        if self.world.is_away(name) == was_away {
            return;
        }
        for app in self.apps_on(name) {
            self.settle(&app, None, false, now);
        }
        self.settle_activators(name);
    }

    /// Returns the apps that have pods on a node.
    fn apps_on(&self, node: &str) -> Vec<NamespacedName> {
        let is_on = |pod: &RevisionPod| pod.placed.as_ref().is_some_and(|it| *it.node == *node);
        let apps = self.world.apps.iter();
        let found = apps.filter(|(_, app)| app.pods().any(|(_, pod)| is_on(pod)));
        found.map(|(name, _)| name.clone()).collect()
    }

    fn observe_placeholder(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let hidden =
            |world: &ClusterState| world.placeholders.get(name).is_some_and(|it| it.hidden);
        let was_hidden = hidden(&self.world);
        match object.and_then(observe::placeholder) {
            Some(seen) => drop(self.world.placeholders.insert(name.clone(), seen)),
            None => {
                if self.world.placeholders.remove(name).is_none() {
                    return;
                }
            }
        }
        self.world.names.touch_service(name);
        let Some(owner) = self.world.app_named(name) else { return };
        let own = owner.clone();
        let planned = self.change(owner, now, |app, world| allot::allot(app, &own, world));
        if was_hidden != hidden(&self.world) {
            // The app has no field for it, but its routes and URLs depend on it.
            self.effects.keys.extend(want::statuses(&own));
            if !planned {
                self.settle(&own, None, false, now);
            }
        }
    }

    /// Lets all pods follow their annotations, after this replica lost the leadership.
    ///
    /// The last plan may never have been written, and the new leader may plan otherwise. So exactly the pods that are
    /// annotated as draining drain, as on every other replica.
    fn follow_notes(&mut self, now: UnixMillis) {
        for name in self.world.apps.keys().cloned().collect::<Vec<_>>() {
            self.change(name, now, |app, _| {
                let revisions = app.revisions.iter_mut().filter(|it| !it.gone);
                let pods = revisions.flat_map(|it| &mut it.pods);
                pods.for_each(|pod| follow_note(pod, now));
            });
        }
    }

    /// Handles the gain or loss of the leadership.
    pub(super) fn lead(&mut self, leads: bool, now: UnixMillis) {
        self.world.leads = leads;
        let own = self.world.settings.pod.clone();
        self.choose(ServerComponent::Controller, leads.then_some(own).filter(|it| !it.is_empty()));
        if !leads {
            return self.follow_notes(now);
        }
        info!(apps = self.world.apps.len(), "leads");
        self.effects.news.extend(std::mem::take(&mut self.untold).into_values().flatten());
        let names: Vec<NamespacedName> = self.world.apps.keys().cloned().collect();
        for name in names {
            let own = name.clone();
            let planned = self.change(name.clone(), now, |app, world| {
                allot::allot(app, &own, world);
                app.revisions.iter_mut().for_each(keep_what_runs);
            });
            if !planned {
                self.settle(&name, None, false, now);
            }
            // Another leader may have left anything unwritten, so every object is checked.
            if let Some(app) = self.world.apps.get(&name) {
                let keys = want::keys(&name, app, &self.world);
                self.effects.keys.extend(keys);
                self.effects.planned.push(name);
            }
        }
        self.settle_mappings(now);
    }
}

fn shared(
    mut manifest: crate::world::ServiceManifest,
    world: &ClusterState,
) -> crate::world::ServiceManifest {
    manifest.template = world.templates.share(&manifest.template);
    manifest
}

/// Keeps the running pods as the desired ones until the autoscaler decides.
fn keep_what_runs(revision: &mut AppRevision) {
    revision.desired = revision.serving();
}

/// Marks a Revision as deleted. It stays until its pods have ended, since they finish their requests.
fn lose_revision(app: &mut AppState, name: &str, now: UnixMillis) {
    for revision in app.revisions.iter_mut().filter(|it| *it.name == *name) {
        revision.gone = true;
        revision.pods.iter_mut().for_each(|pod| drain(pod, now));
    }
    app.revisions.retain(|it| !it.gone || !it.pods.is_empty());
}

/// Lets a pod finish its requests. Kubernetes ends it now or soon, so it never serves again.
fn drain(pod: &mut RevisionPod, now: UnixMillis) {
    if let Some(placed) = &mut pod.placed {
        placed.deleted = true;
    }
    if pod.stage == PodStage::Serving {
        pod.stage = PodStage::Draining { since: now };
    }
}

/// Copies the facts of a Revision that only a leader finds out, or that it may have observed earlier.
fn follow(known: &mut AppRevision, seen: &AppRevision) {
    known.reached |= seen.reached;
    if known.digests.is_empty() {
        known.digests = seen.digests.clone();
    }
}

/// Stores a pod in its Revision. For a known pod, only the fields that Kubernetes sets are replaced.
///
/// The leader decides which pods drain and annotates them; other replicas follow the annotation.
fn put_pod(app: &mut AppState, revision: &str, mut pod: RevisionPod, leads: bool, now: UnixMillis) {
    let Some(revision) = app.revisions.iter_mut().find(|it| *it.name == *revision) else { return };
    let gone = revision.gone;
    let deleted = pod.is_deleted() || gone;
    match revision.pods.iter_mut().find(|it| it.uid == pod.uid) {
        Some(known) => {
            let was = known.placed.as_ref().map(|it| it.kubelet);
            // A readiness that was once reported and is gone is a lost one, not a first one that is awaited.
            if let (Some(placed), Some(KubeletReadiness::Ready | KubeletReadiness::Lost)) =
                (&mut pod.placed, was)
                && placed.kubelet == KubeletReadiness::Waits
            {
                placed.kubelet = KubeletReadiness::Lost;
            }
            known.placed = pod.placed;
            if deleted && known.stage == PodStage::Serving {
                known.stage = PodStage::Draining { since: now };
            } else if !leads && !gone {
                follow_note(known, now);
            }
        }
        None => {
            follow_note(&mut pod, now);
            if deleted && pod.stage == PodStage::Serving {
                pod.stage = PodStage::Draining { since: now };
            }
            revision.pods.push(pod);
        }
    }
}

/// Lets a pod drain if it is annotated as draining, and serve otherwise.
///
/// Draining begins now, not at the annotated time. The annotating clock may be ahead, which would prolong the draining,
/// or behind, which would leave no time for the last requests.
fn follow_note(pod: &mut RevisionPod, now: UnixMillis) {
    let Some(placed) = &pod.placed else { return };
    match (pod.stage, placed.draining) {
        (PodStage::Serving, Some(_)) => pod.stage = PodStage::Draining { since: now },
        (PodStage::Draining { .. } | PodStage::Stopping { .. }, None) if !placed.deleted => {
            pod.stage = PodStage::Serving;
        }
        (PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. }, _) => {}
    }
}

#[cfg(test)]
mod tests;
