//! Pure: index of the Routes that name Revisions of other apps, since each app is planned on its own.

use std::collections::BTreeSet;

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::model::cluster_state::{RouteState, UnixMillis};

impl ControllerStateMachine {
    /// Records the other apps whose Revisions a Route names, and returns them.
    pub(super) fn add_route_references(
        &mut self,
        name: &NamespacedName,
        route: &RouteState,
    ) -> BTreeSet<NamespacedName> {
        let mut referred_apps = BTreeSet::new();
        for target in route.traffic_spec.iter() {
            let full = |it: &str| NamespacedName::new(name.namespace.clone(), it);
            let by_revision =
                target.revision_name.as_deref().and_then(|it| self.owner_to_refer(name, full(it)));
            let by_configuration = target.configuration_name.as_deref().map(full);
            for other in by_revision.into_iter().chain(by_configuration).filter(|it| it != name) {
                self.refer(name, &other);
                referred_apps.insert(other);
            }
        }
        referred_apps
    }

    /// Returns the app of a Revision that a Route names. `None`: the Revision is not observed yet, since each kind has
    /// a watch of its own; the Route waits for it.
    fn owner_to_refer(
        &mut self,
        route: &NamespacedName,
        revision: NamespacedName,
    ) -> Option<NamespacedName> {
        let owner = self.cluster.app_of_revision(&revision);
        if owner.is_none() {
            let waiting = &mut self.cluster.names.routes_of_unknown_revisions;
            waiting.entry(revision).or_default().insert(route.clone());
        }
        owner
    }

    fn refer(&mut self, route: &NamespacedName, app: &NamespacedName) {
        let referring_apps = &mut self.cluster.names.referring_apps;
        referring_apps.entry(app.clone()).or_default().insert(route.clone());
    }

    /// Forgets the references of a Route, and returns the apps that it named.
    pub(super) fn remove_route_references(
        &mut self,
        name: &NamespacedName,
    ) -> BTreeSet<NamespacedName> {
        let mut referred_apps = BTreeSet::new();
        self.cluster.names.referring_apps.retain(|other, from| {
            if from.remove(name) {
                referred_apps.insert(other.clone());
            }
            !from.is_empty()
        });
        self.cluster.names.routes_of_unknown_revisions.retain(|_, from| {
            from.remove(name);
            !from.is_empty()
        });
        referred_apps
    }

    /// Records the references of the Routes that name a Revision and were observed before it. Plans them, and the
    /// Revision's app.
    pub(super) fn link_waiting_routes(&mut self, revision: &NamespacedName, now: UnixMillis) {
        // Nearly always there is none.
        if !self.cluster.names.routes_of_unknown_revisions.contains_key(revision) {
            return;
        }
        let Some(owner) = self.cluster.app_of_revision(revision) else { return };
        let routes = self.cluster.names.routes_of_unknown_revisions.remove(revision);
        for route in routes.into_iter().flatten().filter(|it| *it != owner) {
            self.refer(&route, &owner);
        }
        self.reconcile_app(&owner, now);
    }
}
