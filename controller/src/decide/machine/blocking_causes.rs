//! Pure: causes for which a part of an app cannot become as desired, and the one that its condition reports.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{AppRevision, AppState, ConditionReason, UnixMillis},
        object::{ObjectPart, ObjectPartKey, ResourceKind, WriteError},
    },
};

/// Name of an app, with the blocked part of it.
pub(super) type BlockedObject = (NamespacedName, BlockedPart);

/// Part of an app that a cause can block. A condition of the app reports the cause.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlockedPart {
    /// The Service's Configuration, as an object.
    ConfigurationObject,
    /// The Service's Route, as an object.
    RouteObject,
    /// Child objects of the Route.
    RouteChildren,
    /// The Revision of this name, or child objects of it.
    Revision(Box<str>),
}

/// Cause for which a part of an app cannot become as desired. Each cause is set and cleared on its own.
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
        let blocked: Vec<BlockedPart> = match (resource, self.cluster.apps.get(&app)) {
            (_, None) => Vec::new(),
            (ResourceKind::Route, _) => vec![BlockedPart::RouteChildren],
            // A Configuration without its newest Revision is like one whose newest Revision fails. The end of the
            // error is for all Revisions, since those that were missing exist by now.
            (ResourceKind::Configuration, Some(app_state)) => {
                let is_affected = |it: &&AppRevision| reason.is_none() || !it.meta.exists();
                let revisions = app_state.revisions.iter().filter(is_affected);
                revisions.map(|it| BlockedPart::Revision(it.name.clone())).collect()
            }
            _ => vec![BlockedPart::Revision(name.name.as_str().into())],
        };
        for part in blocked {
            self.update_blocked_reason(
                (app.clone(), part),
                BlockingCause::ChildrenMissing(resource),
                reason.clone(),
                now,
            );
        }
    }

    /// Sets or clears a cause for which a part of an app cannot become as desired. Returns the first cause that is
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
                // Objects come and go, so none leaves an empty entry behind.
                if all.is_empty() {
                    self.blocking_causes.remove(blocked_object);
                }
            }
        }
        self.blocking_causes.get(blocked_object)?.values().next().cloned().map(Box::new)
    }

    /// Sets or clears a cause, and plans the owner of the object with the first cause that is left.
    fn update_blocked_reason(
        &mut self,
        blocked_object: BlockedObject,
        cause: BlockingCause,
        reason: Option<ConditionReason>,
        now: UnixMillis,
    ) {
        // The causes are kept apart from the app, since the end of one shows the next one.
        let first = self.set_blocking_cause(&blocked_object, cause, reason);
        let (owner, part) = blocked_object;
        self.change_app(owner, now, |app, _| match part {
            BlockedPart::ConfigurationObject => {
                let services = app.service.iter_mut();
                services.for_each(|it| it.write_errors.configuration.clone_from(&first));
            }
            BlockedPart::RouteObject => {
                app.service.iter_mut().for_each(|it| it.write_errors.route.clone_from(&first));
            }
            BlockedPart::RouteChildren => {
                app.route.iter_mut().for_each(|it| it.blocked_reason.clone_from(&first));
            }
            BlockedPart::Revision(name) => {
                let revisions = app.revisions.iter_mut().filter(|it| it.name == name);
                revisions.for_each(|it| it.blocked_reason.clone_from(&first));
            }
        });
    }

    /// Drops the causes of an app's Revisions and Service that no longer exist, and of the Route, too, once the app
    /// does not exist (`None`).
    ///
    /// No later event would clear them, and a new Revision of the same name would get them.
    pub(super) fn drop_stale_blocking_causes(
        &mut self,
        name: &NamespacedName,
        app: Option<&AppState>,
    ) {
        let exists = |part: &BlockedPart| match part {
            BlockedPart::ConfigurationObject | BlockedPart::RouteObject => {
                app.is_some_and(|app| app.service.is_some())
            }
            BlockedPart::RouteChildren => app.is_some(),
            BlockedPart::Revision(name) => app.is_some_and(|app| app.revision(name).is_some()),
        };
        // The first of all parts, by their order.
        let first: BlockedObject = (name.clone(), BlockedPart::ConfigurationObject);
        let of_app = self.blocking_causes.range(first..).map(|(blocked_object, _)| blocked_object);
        let stale: Vec<BlockedObject> = of_app
            .take_while(|(owner, _)| owner == name)
            .filter(|(_, part)| !exists(part))
            .cloned()
            .collect();
        for blocked_object in stale {
            self.blocking_causes.remove(&blocked_object);
        }
    }

    /// Handles a write error, or its end: the Service, Revision or Route that the object belongs to gets the condition.
    pub(super) fn handle_write_error(
        &mut self,
        key: &ObjectPartKey,
        error: Option<WriteError>,
        now: UnixMillis,
    ) {
        // Without it the pods work as they are, so it blocks nothing.
        if key.part == ObjectPart::Resize {
            if let Some(error) = &error {
                self.handle_resize_error(&key.name, error, now);
            }
            return;
        }
        let reason = error.map(|it| ConditionReason::new(it.reason, it.message));
        let Some(blocked_object) = self.blocked_object_of(key) else { return };
        let cause = BlockingCause::WriteError(key.clone());
        self.update_blocked_reason(blocked_object, cause, reason, now);
    }

    /// Returns the part of an app that a write error of this object blocks; `None`: no condition reports the error.
    fn blocked_object_of(&self, key: &ObjectPartKey) -> Option<BlockedObject> {
        let own_part = match key.resource {
            ResourceKind::Configuration => Some(BlockedPart::ConfigurationObject),
            ResourceKind::Route => Some(BlockedPart::RouteObject),
            _ => None,
        };
        if let Some(part) = own_part {
            // An object that a user made is the user's own; only its status is written.
            let app = self.cluster.apps.get(&key.name).filter(|app| app.service.is_some());
            return app.map(|_| (key.name.clone(), part));
        }
        if let Some(owner) = part_keys::owner_route_of(&self.cluster, key) {
            return Some((owner, BlockedPart::RouteChildren));
        }
        if let Some((owner, revision)) = part_keys::owner_revision_of(&self.cluster, key) {
            return Some((owner, BlockedPart::Revision(revision)));
        }
        // The Revision of a scaled Service has the name of that Service.
        let service = part_keys::scaled_service_of(&self.cluster, key)?;
        let revision = service.name.as_str().into();
        Some((service, BlockedPart::Revision(revision)))
    }
}
