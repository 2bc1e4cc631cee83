//! Pure: what changed of an app → which parts of which objects may have to be written.
//!
//! Naming too many costs a rendering each, since what is as it was is not written; naming too few loses a change.

use common::wire::Name;

use super::Machine;
use crate::{
    children::Resource,
    kube::{Key, Trouble},
    want,
    world::{App, Revision, Route, Stamp, Uid, Why, World},
};

/// Parts of objects that may differ between two states of an app.
pub(super) fn changed(name: &Name, before: &App, after: Option<&App>, world: &World) -> Vec<Key> {
    let Some(after) = after else { return Vec::new() };
    let mut keys = Vec::new();
    if before.service != after.service
        || before.configuration != after.configuration
        || before.route != after.route
    {
        keys.extend(want::objects(name));
        keys.extend(want::names(name, after));
        keys.extend(want::names(name, before));
        let ways = after.revisions.iter().flat_map(|it| want::ways(&name.namespace, it));
        keys.extend(ways);
    }
    if keys.is_empty()
        && before.conditions == after.conditions
        && before.revisions == after.revisions
    {
        return keys;
    }
    keys.extend(want::statuses(name));
    for revision in &after.revisions {
        let old = before.revision(&revision.name);
        if old.is_none_or(|old| shape(old) != shape(revision)) {
            let containers = want::containers(revision, world);
            keys.extend(want::made(&name.namespace, revision, &containers));
            keys.extend(want::horizontal(&name.namespace, revision, world));
        }
        if old != Some(revision) {
            keys.extend(want::scaled(&name.namespace, revision));
            keys.extend(want::noted(&name.namespace, revision));
        }
    }
    let lost = before.revisions.iter().filter(|it| after.revision(&it.name).is_none());
    keys.extend(lost.map(|it| {
        let name = Name::new(name.namespace.clone(), &*it.name);
        Key::new(Resource::Revision, crate::kube::Part::Object, name)
    }));
    keys
}

/// What of a Revision its children's objects depend on.
fn shape(revision: &Revision) -> impl PartialEq + '_ {
    let Revision { meta, template, routing, digests, reached, .. } = revision;
    (meta, template, routing, digests, reached, revision.is_stuck())
}

impl Machine {
    /// Keeps in step with an app which names belong to it although they do not show it.
    pub(super) fn index(&mut self, name: &Name, before: Option<&App>, after: Option<&App>) {
        fn named(app: &App) -> (bool, Vec<&str>, Vec<&str>) {
            let tags = app.route.iter().flat_map(Route::tags).collect();
            let revisions = app.revisions.iter().map(|it| &*it.name).collect();
            (app.route.is_some(), revisions, tags)
        }
        // Nearly always nothing has come or gone.
        if before.map(named) == after.map(named) {
            return;
        }
        let odd = |app: &App| want::odd(name, app, &self.world);
        let [old, new] = [before, after].map(|app| app.map(odd).unwrap_or_default());
        for gone in old.into_iter().filter(|it| !new.contains(it)) {
            self.world.odd.remove(&(gone, name.clone()));
        }
        self.world.odd.extend(new.into_iter().map(|own| (own, name.clone())));
    }

    /// Objects that are to be made for one are not there: it says so, or the Configuration that should have made it.
    pub(super) fn unmade(
        &mut self,
        app: Name,
        of: Resource,
        name: &Name,
        trouble: Option<Trouble>,
        now: Stamp,
    ) {
        let why = trouble.map(|it| Box::new(Why::new(it.reason, it.message)));
        self.change(app, now, |app, _| match of {
            Resource::Route => {
                app.route.iter_mut().for_each(|it| it.blocked.clone_from(&why));
            }
            // What misses its newest Revision is as one whose newest Revision fails.
            Resource::Configuration => {
                let unmade = app.revisions.iter_mut().filter(|it| it.meta.uid == Uid(0));
                unmade.for_each(|it| it.blocked.clone_from(&why));
            }
            _ => {
                let own = app.revisions.iter_mut().filter(|it| *it.name == *name.name);
                own.for_each(|it| it.blocked.clone_from(&why));
            }
        });
    }

    /// An object cannot be written, or can again: its Revision or Route says so.
    pub(super) fn trouble(&mut self, key: &Key, trouble: Option<Trouble>, now: Stamp) {
        let why = trouble.map(|it| Why::new(it.reason, it.message));
        if let Some(owner) = want::route_of(&self.world, key) {
            self.change(owner, now, |app, _| {
                if let Some(route) = &mut app.route {
                    route.blocked = why.map(Box::new);
                }
            });
            return;
        }
        let Some((owner, revision)) = want::maker_of(&self.world, key) else { return };
        self.change(owner, now, |app, _| {
            let mut all = app.revisions.iter_mut();
            if let Some(revision) = all.find(|it| it.name == revision) {
                revision.blocked = why.map(Box::new);
            }
        });
    }
}
