//! Pure: what the API server holds → the world. Observations come in any order and more than once.

use std::collections::BTreeSet;

use common::{
    node::PodPhase,
    wire::{Name, Part},
};
use serde_json::Value;
use tracing::info;

use super::{Machine, allot, keys::Hindrance};
use crate::{
    bind,
    children::Resource,
    kube::{Key, Part as Piece},
    observe,
    plan::Facts,
    policy::Class,
    render, restore, want,
    world::{App, Configuration, Kubelet, Pod, Revision, Route, Service, Stage, Stamp, Uid, World},
};

impl Machine {
    /// An object as it is now; `None`: it is gone.
    pub(super) fn observe(
        &mut self,
        resource: Resource,
        name: Name,
        object: Option<&Value>,
        now: Stamp,
    ) {
        match resource {
            Resource::KnativeService => self.observe_service(name, object, now),
            Resource::Configuration => self.observe_configuration(name, object, now),
            Resource::Route => self.observe_route(name, object, now),
            Resource::Revision => self.observe_revision(&name, object, now),
            Resource::Deployment => self.observe_deployment(&name, object, now),
            Resource::Pod => self.observe_pod(&name, object, now),
            Resource::Service => self.observe_placeholder(&name, object, now),
            Resource::Node => self.observe_node(&name.name, object, now),
            Resource::ConfigMap => self.observe_config(&name, object, now),
            Resource::NetworkPolicy => {
                let touched = self.world.network_policies.policy(name, object);
                self.settle_all_of(&touched, now);
            }
            Resource::Namespace => {
                let is_going = |it: &Value| it["metadata"]["deletionTimestamp"].is_string();
                match object.is_some_and(is_going) {
                    true => self.world.going.insert(name.name.clone()),
                    false => self.world.going.remove(&name.name),
                };
                let touched = self.world.network_policies.namespace(&name.name, object);
                self.settle_all_of(&touched, now);
            }
            // Followed elsewhere, or only written.
            Resource::EndpointSlice => self.observe_slice(&name, object),
            Resource::DomainMapping => self.observe_mapping(&name, object, now),
            Resource::ClusterDomainClaim => self.observe_claim(&name, object, now),
            Resource::PodAutoscaler => self.observe_autoscaler(name, object),
            Resource::HorizontalPodAutoscaler
            | Resource::ServerlessService
            | Resource::Metric
            | Resource::Image => {}
        }
    }

    /// Changes one app and plans it. One of which nothing is left is forgotten. Returns whether it was planned.
    pub(super) fn change(
        &mut self,
        name: Name,
        now: Stamp,
        change: impl FnOnce(&mut App, &mut World),
    ) -> bool {
        if self.loading {
            // Nothing is planned yet, so nothing has to be compared: a service may have thousands of pods.
            let mut app = self.world.apps.remove(&name).unwrap_or_default();
            let shape = |app: &App| {
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

    fn observe_service(&mut self, name: Name, object: Option<&Value>, now: Stamp) {
        self.change(name, now, |app, world| {
            let config = &world.settings.autoscaler;
            let seen = object.map(|it| observe::service(it, config, app.service.as_ref()));
            if let (None, Some(object)) = (&app.service, object) {
                restore::conditions(&mut app.conditions, object, &render::SERVICE);
            }
            app.service = seen.map(|it| Service { manifest: shared(it.manifest, world), ..it });
        });
    }

    fn observe_configuration(&mut self, name: Name, object: Option<&Value>, now: Stamp) {
        self.change(name, now, |app, world| {
            if let (None, Some(object)) = (&app.configuration, object) {
                restore::conditions(&mut app.conditions, object, &render::CONFIGURATION);
            }
            let before = app.configuration.take().filter(|it| it.meta.uid != Uid(0));
            app.configuration = object.map(observe::configuration).map(|it| Configuration {
                template: world.templates.share(&it.template),
                // What we know is newer than what we wrote.
                latest_ready: before.and_then(|it| it.latest_ready).or(it.latest_ready),
                ..it
            });
        });
    }

    fn observe_route(&mut self, name: Name, object: Option<&Value>, now: Stamp) {
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
                    let before = before.unwrap_or_else(|| seen.clone());
                    // What could not be written the writer says, and only once.
                    let Route { allotted, blocked, .. } = before.clone();
                    let route = Route { allotted, blocked, ..seen };
                    // Who leads knows better than what it wrote; who does not follows that.
                    app.route = Some(match world.leads {
                        true => Route { traffic: before.traffic, rollout: before.rollout, ..route },
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

    /// Other apps whose Revisions a route names.
    fn note_references(&mut self, name: &Name, route: &Route) -> BTreeSet<Name> {
        let mut named = BTreeSet::new();
        for target in route.wanted.iter() {
            let configuration = target.configuration.as_deref();
            let by_revision = target.revision.as_deref().and_then(|revision| {
                self.world.app_of(&Name::new(name.namespace.clone(), revision))
            });
            let by_name = configuration.map(|it| Name::new(name.namespace.clone(), it));
            for other in by_revision.into_iter().chain(by_name).filter(|it| it != name) {
                self.world.referrers.entry(other.clone()).or_default().insert(name.clone());
                named.insert(other);
            }
        }
        named
    }

    /// The apps that it named.
    fn forget_references(&mut self, name: &Name) -> BTreeSet<Name> {
        let mut named = BTreeSet::new();
        self.world.referrers.retain(|other, from| {
            if from.remove(name) {
                named.insert(other.clone());
            }
            !from.is_empty()
        });
        named
    }

    fn observe_revision(&mut self, name: &Name, object: Option<&Value>, now: Stamp) {
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
                // All else is what we say of it, and newer.
                Some(known) if [Uid(0), seen.meta.uid].contains(&known.meta.uid) => {
                    if !world.leads {
                        follow(known, &seen);
                    }
                    (known.meta, known.template) = (seen.meta, seen.template);
                    known.creator = seen.creator;
                    (known.leaving, known.is_orphan) = (seen.leaving, seen.is_orphan);
                }
                // Another one of that name; what is decided goes by the name, and pods of the first answer their
                // last requests.
                Some(known) => {
                    known.pods.iter_mut().for_each(|pod| drain(pod, now));
                    let (decided, pods) = (known.decided, std::mem::take(&mut known.pods));
                    *known = Revision { decided, pods, ..seen };
                }
                None => app.revisions.push(seen),
            }
            app.revisions
                .sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
            for pod in early.into_values() {
                put_pod(app, &name.name, pod, world.leads, now);
            }
            let mut all = app.revisions.iter_mut();
            all.find(|it| is_new && *it.name == *name.name).into_iter().for_each(keep_what_runs);
        });
        for uid in pods {
            self.take_early(&uid, now);
        }
    }

    fn observe_deployment(&mut self, name: &Name, object: Option<&Value>, now: Stamp) {
        let key = Key::new(Resource::Deployment, Piece::Object, name.clone());
        let Some((owner, made_for)) = want::maker_of(&self.world, &key) else { return };
        let blocked = object.and_then(observe::deployment);
        let told = object.and_then(|it| it["spec"]["replicas"].as_u64());
        let of = (owner.clone(), Some(made_for.clone()));
        let blocked = self.note_hindrance(&of, Hindrance::Deployment, blocked);
        self.change(owner, now, |app, world| {
            let key = Name::new(name.namespace.clone(), &*made_for);
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| it.name == made_for) else { return };
            revision.blocked = blocked;
            match told.and_then(|it| u32::try_from(it).ok()) {
                Some(told) if Facts::of(revision, world).class != Class::Kpa => {
                    world.told.insert(key, told);
                }
                Some(_) | None => drop(world.told.remove(&key)),
            }
        });
    }

    /// A PodAutoscaler owns the HorizontalPodAutoscaler that is made for it.
    fn observe_autoscaler(&mut self, name: Name, object: Option<&Value>) {
        let uid = object.filter(|it| observe::is_horizontal(it));
        let Some(uid) = uid.and_then(|it| it["metadata"]["uid"].as_str()) else {
            self.world.autoscalers.remove(&name);
            return;
        };
        if self.world.autoscalers.get(&name).is_none_or(|it| **it != *uid) {
            self.world.autoscalers.insert(name.clone(), uid.into());
            let key = Key::new(Resource::HorizontalPodAutoscaler, Piece::Object, name);
            self.effects.keys.push(key);
        }
    }

    fn observe_pod(&mut self, name: &Name, object: Option<&Value>, now: Stamp) {
        if self.observe_own(name, object, now) {
            return;
        }
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
                    // Each kind is watched by itself: the Revision is on its way.
                    let made_for = Name::new(name.namespace.clone(), revision);
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

    fn lose_pod(&mut self, name: &Name, now: Stamp) {
        let Some(uid) = self.uids.remove(name) else { return };
        self.early.retain(|_, pods| {
            pods.remove(name);
            !pods.is_empty()
        });
        let Some(owner) = self.owners.get(&*uid).cloned() else { return };
        if let Some(status) = self.world.statuses.get_mut(&*uid) {
            status.phase = PodPhase::Gone;
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

    /// A node that goes takes its pods with it before anybody says so of each, and gives them back when it comes back.
    fn observe_node(&mut self, name: &str, object: Option<&Value>, now: Stamp) {
        match object.and_then(observe::zone) {
            Some(zone) => drop(self.world.zones.insert(name.to_owned(), zone)),
            None => drop(self.world.zones.remove(name)),
        }
        let was_away = self.world.is_away(name);
        let before = self.world.nodes.remove(name);
        let node = match object {
            Some(object) => Some(bind::Node::of(object, before.as_ref())),
            // Whoever removes a node that is lost brings none of its pods back.
            None if was_away && !self.apps_on(name).is_empty() => Some(bind::Node::default()),
            None => None,
        };
        self.world.nodes.extend(node.map(|node| (name.to_owned(), node)));
        self.node_changed(name, was_away, now);
    }

    /// What is known of a node has changed; `was_away` says whether it was [away](World::is_away) before.
    pub(super) fn node_changed(&mut self, name: &str, was_away: bool, now: Stamp) {
        if self.world.is_away(name) == was_away {
            return;
        }
        for app in self.apps_on(name) {
            self.settle(&app, None, false, now);
        }
        self.settle_activators(name);
    }

    /// Apps with pods on a node.
    fn apps_on(&self, node: &str) -> Vec<Name> {
        let is_on = |pod: &Pod| pod.placed.as_ref().is_some_and(|it| *it.node == *node);
        let apps = self.world.apps.iter();
        let found = apps.filter(|(_, app)| app.pods().any(|(_, pod)| is_on(pod)));
        found.map(|(name, _)| name.clone()).collect()
    }

    fn observe_placeholder(&mut self, name: &Name, object: Option<&Value>, now: Stamp) {
        let hidden = |world: &World| world.placeholders.get(name).is_some_and(|it| it.hidden);
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
            // No fact of the app says so, but its routes and URLs do.
            self.effects.keys.extend(want::statuses(&own));
            if !planned {
                self.settle(&own, None, false, now);
            }
        }
    }

    /// What was planned last may never have been written, and who leads now may plan something else: pods drain that
    /// are noted as draining, as for everybody who does not lead.
    fn follow_notes(&mut self, now: Stamp) {
        for name in self.world.apps.keys().cloned().collect::<Vec<_>>() {
            self.change(name, now, |app, _| {
                let revisions = app.revisions.iter_mut().filter(|it| !it.gone);
                let pods = revisions.flat_map(|it| &mut it.pods);
                pods.for_each(|pod| follow_note(pod, now));
            });
        }
    }

    /// We lead now, or do not any more.
    pub(super) fn lead(&mut self, leads: bool, now: Stamp) {
        self.world.leads = leads;
        let own = self.world.settings.pod.clone();
        self.choose(Part::Controller, leads.then_some(own).filter(|it| !it.is_empty()));
        if !leads {
            return self.follow_notes(now);
        }
        info!(apps = self.world.apps.len(), "leads");
        self.effects.news.extend(std::mem::take(&mut self.untold).into_values().flatten());
        let names: Vec<Name> = self.world.apps.keys().cloned().collect();
        for name in names {
            let own = name.clone();
            let planned = self.change(name.clone(), now, |app, world| {
                allot::allot(app, &own, world);
                app.revisions.iter_mut().for_each(keep_what_runs);
            });
            if !planned {
                self.settle(&name, None, false, now);
            }
            if let Some(app) = self.world.apps.get(&name) {
                let keys = want::keys(&name, app, &self.world);
                self.effects.keys.extend(keys);
                self.effects.planned.push(name);
            }
        }
        self.settle_mappings(now);
    }
}

fn shared(mut manifest: crate::world::Manifest, world: &World) -> crate::world::Manifest {
    manifest.template = world.templates.share(&manifest.template);
    manifest
}

/// Whoever has not planned it yet keeps what runs, unless somebody decides.
fn keep_what_runs(revision: &mut Revision) {
    revision.desired = revision.serving();
}

/// A Revision is gone. Where it has pods it stays until those have ended: they answer their last requests.
fn lose_revision(app: &mut App, name: &str, now: Stamp) {
    for revision in app.revisions.iter_mut().filter(|it| *it.name == *name) {
        revision.gone = true;
        revision.pods.iter_mut().for_each(|pod| drain(pod, now));
    }
    app.revisions.retain(|it| !it.gone || !it.pods.is_empty());
}

/// Lets a pod answer its last requests. Kubernetes ends it, now or in a moment: it never serves again.
fn drain(pod: &mut Pod, now: Stamp) {
    if let Some(placed) = &mut pod.placed {
        placed.deleted = true;
    }
    if pod.stage == Stage::Serving {
        pod.stage = Stage::Draining { since: now };
    }
}

/// What only who leads finds out of a Revision, or may have seen in time: the others read it there.
fn follow(known: &mut Revision, seen: &Revision) {
    known.reached |= seen.reached;
    if known.digests.is_empty() {
        known.digests = seen.digests.clone();
    }
}

/// Puts a pod where it belongs. What was decided of one that is known stays, but for what only Kubernetes knows.
///
/// Who leads decides which pods drain and notes it on them; the others read it there.
fn put_pod(app: &mut App, revision: &str, mut pod: Pod, leads: bool, now: Stamp) {
    let Some(revision) = app.revisions.iter_mut().find(|it| *it.name == *revision) else { return };
    let gone = revision.gone;
    let deleted = pod.is_deleted() || gone;
    match revision.pods.iter_mut().find(|it| it.uid == pod.uid) {
        Some(known) => {
            let was = known.placed.as_ref().map(|it| it.kubelet);
            if let (Some(placed), Some(Kubelet::Ready | Kubelet::Lost)) = (&mut pod.placed, was)
                && placed.kubelet == Kubelet::Waits
            {
                placed.kubelet = Kubelet::Lost;
            }
            known.placed = pod.placed;
            if deleted && known.stage == Stage::Serving {
                known.stage = Stage::Draining { since: now };
            } else if !leads && !gone {
                follow_note(known, now);
            }
        }
        None => {
            follow_note(&mut pod, now);
            if deleted && pod.stage == Stage::Serving {
                pod.stage = Stage::Draining { since: now };
            }
            revision.pods.push(pod);
        }
    }
}

/// Lets a pod drain that is noted as draining, and no other one.
///
/// From now on: the clock that it was noted by may be ahead, and it would drain for so much longer, or behind, and its
/// last requests would get no time at all.
fn follow_note(pod: &mut Pod, now: Stamp) {
    let Some(placed) = &pod.placed else { return };
    match (pod.stage, placed.draining) {
        (Stage::Serving, Some(_)) => pod.stage = Stage::Draining { since: now },
        (Stage::Draining { .. } | Stage::Stopping { .. }, None) if !placed.deleted => {
            pod.stage = Stage::Serving;
        }
        (Stage::Serving | Stage::Draining { .. } | Stage::Stopping { .. }, _) => {}
    }
}

#[cfg(test)]
mod tests;
