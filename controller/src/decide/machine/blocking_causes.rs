//! Pure: causes for which a Revision or Route cannot become as desired, and the one that its condition reports.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{AppRevision, AppState, ConditionReason, UnixMillis},
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

impl ControllerStateMachine {
    /// Handles missing child objects of the object `name`; `error` is `None` once all of them exist.
    ///
    /// The condition goes to the Route or Revision that lacks them. For a Configuration it goes to its Revisions that
    /// the API server does not have.
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
            // A Configuration without its newest Revision is like one whose newest Revision fails. The end of the
            // error is for all Revisions, since those that were missing exist by now.
            (ResourceKind::Configuration, Some(app_state)) => {
                let is_affected = |it: &&AppRevision| reason.is_none() || !it.meta.exists();
                let revisions = app_state.revisions.iter().filter(is_affected);
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

    /// Drops the causes of an app's Revisions that no longer exist, and of the Route, too, once the app does not exist
    /// (`None`).
    ///
    /// No later event would clear them, and a new Revision of the same name would get them.
    pub(super) fn drop_stale_blocking_causes(
        &mut self,
        name: &NamespacedName,
        app: Option<&AppState>,
    ) {
        let exists = |revision: &str| app.is_some_and(|app| app.revision(revision).is_some());
        let first: BlockedObject = (name.clone(), None);
        let of_app = self.blocking_causes.range(first..).map(|(blocked_object, _)| blocked_object);
        let stale: Vec<BlockedObject> = of_app
            .take_while(|(owner, _)| owner == name)
            .filter(|(_, revision)| {
                revision.as_deref().map_or_else(|| app.is_none(), |it| !exists(it))
            })
            .cloned()
            .collect();
        for blocked_object in stale {
            self.blocking_causes.remove(&blocked_object);
        }
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
