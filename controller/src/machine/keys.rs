//! Pure: changes of an app → parts of objects that may have to be written.
//!
//! A key too many costs one rendering, since an equal object is not written; a missing key loses a change.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    children::ResourceKind,
    kube::{ObjectPartKey, WriteError},
    want,
    world::{AppRevision, AppState, ClusterState, ConditionReason, RouteState, Uid, UnixMillis},
};

/// Name of an app, with the name of its Revision, or `None` for its Route.
pub(super) type BlockedObject = (NamespacedName, Option<Box<str>>);

/// Cause for which a Revision or Route cannot become as desired. Each cause is set and cleared on its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlockingCause {
    /// Write error of this object.
    Unwritten(ObjectPartKey),
    /// Failure that the Deployment reports in its status.
    Deployment,
    /// Child objects of an object of this kind do not exist.
    Unmade(ResourceKind),
}

/// Returns the parts of objects that may differ between two states of an app.
pub(super) fn changed(
    name: &NamespacedName,
    before: &AppState,
    after: Option<&AppState>,
    world: &ClusterState,
) -> Vec<ObjectPartKey> {
    let Some(after) = after else { return Vec::new() };
    let mut keys = Vec::new();
    if before.service != after.service
        || before.configuration != after.configuration
        || before.route != after.route
    {
        keys.extend(want::objects(name));
        keys.extend(want::names(name, after));
        keys.extend(want::names(name, before));
        // An annotation of the Route may set the path of its Revisions.
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
    // A scale that was decided while the owner was being deleted was not written, and nothing else would name it again.
    let is_freed = |it: &AppRevision| {
        want::scales(world, name, after, it) && !want::scales(world, name, before, it)
    };
    for revision in &after.revisions {
        let old = before.revision(&revision.name);
        if old.is_none_or(|old| shape(old) != shape(revision)) {
            let containers = want::containers(revision, world);
            keys.extend(want::made(&name.namespace, revision, &containers));
            keys.extend(want::horizontal(&name.namespace, revision, world));
        }
        if old != Some(revision) || is_freed(revision) {
            keys.extend(want::scaled(&name.namespace, revision));
            keys.extend(want::noted(&name.namespace, revision));
        }
    }
    // A Revision that the plan has dropped, such as an old one, is deleted on the API server as well.
    let lost = before.revisions.iter().filter(|it| after.revision(&it.name).is_none());
    keys.extend(lost.map(|it| {
        let name = NamespacedName::new(name.namespace.clone(), &*it.name);
        ObjectPartKey::new(ResourceKind::Revision, crate::kube::ObjectPart::Object, name)
    }));
    keys
}

/// Returns the fields of a Revision on which its child objects depend.
fn shape(revision: &AppRevision) -> impl PartialEq + '_ {
    let AppRevision { meta, template, routing, digests, reached, .. } = revision;
    (meta, template, routing, digests, reached, revision.is_stuck())
}

impl ControllerStateMachine {
    /// Updates the index of names that belong to an app without showing it.
    pub(super) fn index(
        &mut self,
        name: &NamespacedName,
        before: Option<&AppState>,
        after: Option<&AppState>,
    ) {
        fn named(app: &AppState) -> (bool, Vec<&str>, Vec<&str>) {
            let tags = app.route.iter().flat_map(RouteState::tags).collect();
            let revisions = app.revisions.iter().map(|it| &*it.name).collect();
            (app.route.is_some(), revisions, tags)
        }
        // Nearly always no name has come or gone.
        if before.map(named) == after.map(named) {
            return;
        }
        let odd = |app: &AppState| want::odd(name, app, &self.world);
        let [old, new] = [before, after].map(|app| app.map(odd).unwrap_or_default());
        for gone in old.into_iter().filter(|it| !new.contains(it)) {
            self.world.odd.remove(&(gone, name.clone()));
        }
        self.world.odd.extend(new.into_iter().map(|own| (own, name.clone())));
    }

    /// Handles missing child objects: the condition goes to their owner, or to the Configuration that should have made
    /// them.
    pub(super) fn unmade(
        &mut self,
        app: NamespacedName,
        of: ResourceKind,
        name: &NamespacedName,
        trouble: Option<WriteError>,
        now: UnixMillis,
    ) {
        let why = trouble.map(|it| ConditionReason::new(it.reason, it.message));
        let hindered: Vec<Option<Box<str>>> = match (of, self.world.apps.get(&app)) {
            (_, None) => Vec::new(),
            (ResourceKind::Route, _) => vec![None],
            // A Configuration without its newest Revision is like one whose newest Revision fails.
            (ResourceKind::Configuration, Some(known)) => {
                let is_meant = |it: &&AppRevision| why.is_none() || it.meta.uid == Uid(0);
                let revisions = known.revisions.iter().filter(is_meant);
                revisions.map(|it| Some(it.name.clone())).collect()
            }
            _ => vec![Some(name.name.as_str().into())],
        };
        for it in hindered {
            self.hinder((app.clone(), it), BlockingCause::Unmade(of), why.clone(), now);
        }
    }

    /// Sets or clears a cause for which a Revision or Route cannot become as desired. Returns the first cause that is
    /// left.
    ///
    /// The first in a fixed order: otherwise several causes would replace each other in the condition forever.
    pub(super) fn note_hindrance(
        &mut self,
        of: &BlockedObject,
        by: BlockingCause,
        why: Option<ConditionReason>,
    ) -> Option<Box<ConditionReason>> {
        match why {
            Some(why) => {
                self.hindrances.entry(of.clone()).or_default().insert(by, why);
            }
            None => {
                let all = self.hindrances.get_mut(of)?;
                all.remove(&by);
                if all.is_empty() {
                    self.hindrances.remove(of);
                }
            }
        }
        self.hindrances.get(of)?.values().next().cloned().map(Box::new)
    }

    fn hinder(
        &mut self,
        of: BlockedObject,
        by: BlockingCause,
        why: Option<ConditionReason>,
        now: UnixMillis,
    ) {
        let first = self.note_hindrance(&of, by, why);
        let (owner, revision) = of;
        self.change(owner, now, |app, _| match revision {
            None => app.route.iter_mut().for_each(|it| it.blocked.clone_from(&first)),
            Some(name) => {
                let own = app.revisions.iter_mut().filter(|it| it.name == name);
                own.for_each(|it| it.blocked.clone_from(&first));
            }
        });
    }

    /// Drops the causes of a deleted app.
    pub(super) fn forget_hindrances(&mut self, name: &NamespacedName) {
        // Nearly always there is none.
        self.hindrances.retain(|(owner, _), _| owner != name);
    }

    /// Handles a write error, or its end: the Revision or Route that the object belongs to gets the condition.
    pub(super) fn trouble(
        &mut self,
        key: &ObjectPartKey,
        trouble: Option<WriteError>,
        now: UnixMillis,
    ) {
        let why = trouble.map(|it| ConditionReason::new(it.reason, it.message));
        let of = match want::route_of(&self.world, key) {
            Some(owner) => (owner, None),
            None => {
                let Some((owner, it)) = want::maker_of(&self.world, key) else { return };
                (owner, Some(it))
            }
        };
        self.hinder(of, BlockingCause::Unwritten(key.clone()), why, now);
    }
}
