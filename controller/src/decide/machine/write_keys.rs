//! Pure: changes of an app → parts of objects that may have to be written.
//!
//! A key too many costs one rendering, since an equal object is not written; a missing key loses a change.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ConditionReason, RevisionScaling, RouteState,
            UnixMillis,
        },
        object::{ObjectPartKey, ResourceKind, WriteError},
    },
};

/// Name of an app, with the name of its Revision, or `None` for its Route.
pub(super) type BlockedObject = (NamespacedName, Option<Box<str>>);

/// Cause for which a Revision or Route cannot become as desired. Each cause is set and cleared on its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlockingCause {
    /// Write error of this object.
    WriteError(ObjectPartKey),
    /// Failure that the Deployment reports in its status.
    Deployment,
    /// Child objects of an object of this kind do not exist.
    ChildrenMissing(ResourceKind),
}

/// Returns the parts of objects that may differ between two states of an app.
pub(super) fn changed_keys(
    name: &NamespacedName,
    previous: &AppState,
    after: Option<&AppState>,
    cluster: &ClusterState,
) -> Vec<ObjectPartKey> {
    let Some(after) = after else { return Vec::new() };
    let mut keys = Vec::new();
    if previous.service != after.service
        || previous.configuration != after.configuration
        || previous.route != after.route
    {
        keys.extend(part_keys::object_keys(name));
        keys.extend(part_keys::route_name_keys(name, after));
        keys.extend(part_keys::route_name_keys(name, previous));
        // An annotation of the Route may set the path of its Revisions.
        let ways = after.revisions.iter().flat_map(|it| part_keys::path_keys(&name.namespace, it));
        keys.extend(ways);
    }
    if keys.is_empty()
        && previous.conditions == after.conditions
        && previous.revisions == after.revisions
    {
        return keys;
    }
    keys.extend(part_keys::status_keys(name));
    // A scale that was decided while the owner was being deleted was not written, and nothing else would name it again.
    let is_freed = |revision: &AppRevision| {
        part_keys::is_scaled(cluster, name, after, revision)
            && !part_keys::is_scaled(cluster, name, previous, revision)
    };
    for revision in &after.revisions {
        let old = previous.revision(&revision.name);
        if old.is_none_or(|old| child_inputs(old) != child_inputs(revision)) {
            let containers = part_keys::container_names(revision, cluster);
            keys.extend(part_keys::revision_keys(&name.namespace, revision, &containers));
            keys.extend(part_keys::hpa_key(&name.namespace, revision, cluster));
        }
        if old != Some(revision) || is_freed(revision) {
            keys.extend(part_keys::scale_keys(&name.namespace, revision));
            keys.extend(part_keys::drain_annotation_keys(&name.namespace, revision));
        }
    }
    // A Revision that the plan has dropped, such as an old one, is deleted on the API server as well.
    let removed = previous.revisions.iter().filter(|it| after.revision(&it.name).is_none());
    keys.extend(removed.map(|revision| {
        let name = NamespacedName::new(name.namespace.clone(), &*revision.name);
        ObjectPartKey::new(ResourceKind::Revision, crate::model::object::ObjectPart::Object, name)
    }));
    keys
}

/// Returns the fields of a Revision on which its child objects depend.
fn child_inputs(revision: &AppRevision) -> impl PartialEq + '_ {
    let AppRevision {
        meta,
        template,
        routing,
        digests,
        scaling: RevisionScaling { initial_scale_reached: reached, .. },
        ..
    } = revision;
    (meta, template, routing, digests, reached, revision.is_stuck())
}

impl ControllerStateMachine {
    /// Updates the index of names that belong to an app without showing it.
    pub(super) fn update_owner_exceptions(
        &mut self,
        name: &NamespacedName,
        previous: Option<&AppState>,
        after: Option<&AppState>,
    ) {
        fn named(app: &AppState) -> (bool, Vec<&str>, Vec<&str>) {
            let tags = app.route.iter().flat_map(RouteState::tags).collect();
            let revisions = app.revisions.iter().map(|it| &*it.name).collect();
            (app.route.is_some(), revisions, tags)
        }
        // Nearly always no name has come or gone.
        if previous.map(named) == after.map(named) {
            return;
        }
        let exceptions_of = |app: &AppState| part_keys::owner_exceptions(name, app, &self.cluster);
        let [old, new] = [previous, after].map(|app| app.map(exceptions_of).unwrap_or_default());
        for removed in old.into_iter().filter(|it| !new.contains(it)) {
            self.cluster.names.owner_exceptions.remove(&(removed, name.clone()));
        }
        self.cluster
            .names
            .owner_exceptions
            .extend(new.into_iter().map(|object_name| (object_name, name.clone())));
    }

    /// Computes the exceptions of all apps: names that changed during the initial list have left old ones.
    pub(super) fn rebuild_owner_exceptions(&mut self) {
        let exceptions_of = |name: &NamespacedName| {
            let Some(app) = self.cluster.apps.get(name) else { return Vec::new() };
            let exceptions = part_keys::owner_exceptions(name, app, &self.cluster);
            exceptions.into_iter().map(|it| (it, name.clone())).collect::<Vec<_>>()
        };
        self.cluster.names.owner_exceptions =
            self.cluster.apps.keys().flat_map(exceptions_of).collect();
    }

    /// Handles missing child objects: the condition goes to their owner, or to the Configuration that should have made
    /// them.
    pub(super) fn handle_missing_children(
        &mut self,
        app: NamespacedName,
        resource: ResourceKind,
        name: &NamespacedName,
        error: Option<WriteError>,
        now: UnixMillis,
    ) {
        let reason = error.map(|it| ConditionReason::new(it.reason, it.message));
        let blocked: Vec<Option<Box<str>>> = match (resource, self.cluster.apps.get(&app)) {
            (_, None) => Vec::new(),
            (ResourceKind::Route, _) => vec![None],
            // A Configuration without its newest Revision is like one whose newest Revision fails.
            (ResourceKind::Configuration, Some(app_state)) => {
                let is_meant = |it: &&AppRevision| reason.is_none() || !it.meta.exists();
                let revisions = app_state.revisions.iter().filter(is_meant);
                revisions.map(|it| Some(it.name.clone())).collect()
            }
            _ => vec![Some(name.name.as_str().into())],
        };
        for revision in blocked {
            self.update_blocked_reason(
                (app.clone(), revision),
                BlockingCause::ChildrenMissing(resource),
                reason.clone(),
                now,
            );
        }
    }

    /// Sets or clears a cause for which a Revision or Route cannot become as desired. Returns the first cause that is
    /// left.
    ///
    /// The first in a fixed order: otherwise several causes would replace each other in the condition forever.
    pub(super) fn set_blocking_cause(
        &mut self,
        blocked_object: &BlockedObject,
        cause: BlockingCause,
        reason: Option<ConditionReason>,
    ) -> Option<Box<ConditionReason>> {
        match reason {
            Some(reason) => {
                self.blocking_causes
                    .entry(blocked_object.clone())
                    .or_default()
                    .insert(cause, reason);
            }
            None => {
                let all = self.blocking_causes.get_mut(blocked_object)?;
                all.remove(&cause);
                if all.is_empty() {
                    self.blocking_causes.remove(blocked_object);
                }
            }
        }
        self.blocking_causes.get(blocked_object)?.values().next().cloned().map(Box::new)
    }

    fn update_blocked_reason(
        &mut self,
        blocked_object: BlockedObject,
        cause: BlockingCause,
        reason: Option<ConditionReason>,
        now: UnixMillis,
    ) {
        let first = self.set_blocking_cause(&blocked_object, cause, reason);
        let (owner, revision) = blocked_object;
        self.change_app(owner, now, |app, _| match revision {
            None => app.route.iter_mut().for_each(|it| it.blocked_reason.clone_from(&first)),
            Some(name) => {
                let revisions = app.revisions.iter_mut().filter(|it| it.name == name);
                revisions.for_each(|it| it.blocked_reason.clone_from(&first));
            }
        });
    }

    /// Drops the causes of a deleted app.
    pub(super) fn remove_blocking_causes(&mut self, name: &NamespacedName) {
        // Nearly always there is none.
        self.blocking_causes.retain(|(owner, _), _| owner != name);
    }

    /// Handles a write error, or its end: the Revision or Route that the object belongs to gets the condition.
    pub(super) fn handle_write_error(
        &mut self,
        key: &ObjectPartKey,
        error: Option<WriteError>,
        now: UnixMillis,
    ) {
        let reason = error.map(|it| ConditionReason::new(it.reason, it.message));
        let blocked_object = match part_keys::owner_route_of(&self.cluster, key) {
            Some(owner) => (owner, None),
            None => {
                let Some((owner, it)) = part_keys::owner_revision_of(&self.cluster, key) else {
                    return;
                };
                (owner, Some(it))
            }
        };
        let cause = BlockingCause::WriteError(key.clone());
        self.update_blocked_reason(blocked_object, cause, reason, now);
    }
}
