//! Pure: pods of our own parts: who carries requests, who is waited for, where streams are taken.

use common::wire::{Activator, Name, Part, Replicas, Role, RouteChange, RouteKey};
use serde_json::Value;
use tracing::info;

use super::{Machine, Said};
use crate::{
    followers,
    observe::{self, Own, Standing},
    world::Stamp,
};

impl Machine {
    /// A pod of the system namespace that is one of ours, or was. Returns whether it is: others are Revisions'.
    pub(super) fn observe_own(&mut self, name: &Name, object: Option<&Value>, now: Stamp) -> bool {
        if name.namespace != self.world.settings.namespace {
            // Whoever may label a pod elsewhere must not become a part.
            return false;
        }
        match object.and_then(observe::own) {
            Some(Own::Activator(activator, standing)) => {
                let who = followers::named(Role::Activator, &activator.name);
                self.world.followers.expect(&who, &name.name);
                self.observe_activator(activator, standing);
            }
            Some(Own::Agent { node }) => {
                self.world.followers.expect(&followers::named(Role::Agent, &node), &name.name);
            }
            Some(Own::Replica(part, replica)) => {
                self.change_replicas(part, |it| {
                    match it.members.iter_mut().find(|have| have.name == replica.name) {
                        Some(have) => *have = replica,
                        None => it.members.push(replica),
                    }
                });
            }
            None => return self.lose_own(&name.name, now),
        }
        true
    }

    fn lose_own(&mut self, name: &str, now: Stamp) -> bool {
        let mut was = false;
        for who in self.world.followers.lose(name) {
            was = true;
            self.report_lost(&who, now);
            self.settle_draining(now);
        }
        if self.world.activators.contains_key(name) {
            was = true;
            self.lose_activator(name);
        }
        for part in [Part::Controller, Part::Autoscaler] {
            let all = self.world.replicas.get(&part).map(|it| it.members.as_slice());
            if all.unwrap_or_default().iter().any(|it| it.name == name) {
                was = true;
                self.change_replicas(part, |it| it.members.retain(|have| have.name != name));
            }
        }
        was
    }

    /// Another replica of a part counts now.
    pub(super) fn choose(&mut self, part: Part, chosen: Option<String>) {
        self.change_replicas(part, |it| it.chosen = chosen);
    }

    /// Tells all links where the replicas of a part are. One that has none is found as the link was set up.
    fn change_replicas(&mut self, part: Part, change: impl FnOnce(&mut Replicas)) {
        let none = || Replicas { part, members: Vec::new(), chosen: None };
        let replicas = self.world.replicas.entry(part).or_insert_with(none);
        change(replicas);
        replicas.members.sort_by(|a, b| a.name.cmp(&b.name));
        let key = RouteKey::Replicas(part);
        if replicas.members.is_empty() {
            self.routes.remove(&key);
        } else {
            self.routes.set(key, Said::of(&RouteChange::Replicas(replicas.clone())));
        }
    }

    fn observe_activator(&mut self, mut activator: Activator, standing: Standing) {
        activator.zone = self.world.zones.get(&activator.node).cloned().unwrap_or_default();
        let seen = (activator.clone(), standing);
        let before = self.world.activators.insert(activator.name.clone(), seen.clone());
        if before.as_ref() == Some(&seen) {
            return;
        }
        info!(activator = activator.name, ?standing, "activator seen");
        self.say_activator(&seen.0.name);
        self.activators_changed();
    }

    /// One that leaves is named until the last slice that leads to it is rewritten: it serves for as long as it is named.
    fn say_activator(&self, name: &str) {
        let key = RouteKey::Activator(name.to_owned());
        match self.world.standing(name) {
            Some((it, Standing::Ready)) => {
                self.routes.set(key, Said::of(&RouteChange::Activator(it.clone())));
            }
            Some((it, Standing::Leaving)) if self.world.slices.lead_to(name) => {
                self.routes.set(key, Said::of(&RouteChange::Activator(it.clone())));
            }
            Some((_, Standing::Waits | Standing::Leaving)) | None => self.routes.remove(&key),
        }
    }

    /// Whether a node is away counts for its activators too.
    pub(super) fn settle_activators(&mut self, node: &str) {
        let all = self.world.activators.values().filter(|(it, _)| it.node == node);
        let names: Vec<String> = all.map(|(it, _)| it.name.clone()).collect();
        names.iter().for_each(|name| self.say_activator(name));
        if !names.is_empty() {
            self.activators_changed();
        }
    }

    /// A slice as it is now.
    pub(super) fn observe_slice(&mut self, name: &Name, object: Option<&Value>) {
        let targets = object.map(observe::targets).unwrap_or_default();
        for left in self.world.slices.put(name, &targets) {
            info!(activator = left, "no slice leads to the activator any more");
            self.say_activator(&left);
        }
    }

    fn lose_activator(&mut self, name: &str) {
        self.world.activators.remove(name);
        self.say_activator(name);
        self.activators_changed();
    }

    /// Every name's slices are looked at again; only those whose choice changed are written, at a set rate.
    fn activators_changed(&mut self) {
        let apps = || self.world.apps.iter();
        let names = apps().filter(|(_, app)| app.route.is_some());
        let keys = names.flat_map(|(name, app)| crate::want::slices(name, app));
        let revisions =
            apps().flat_map(|(name, app)| app.revisions.iter().map(move |it| (name, it)));
        let own = revisions.flat_map(|(name, it)| crate::want::ways(&name.namespace, it));
        self.effects.keys.extend(keys.chain(own).collect::<Vec<_>>());
    }
}
