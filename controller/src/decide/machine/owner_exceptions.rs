//! Pure: index of the names that belong to an app although they do not begin with the app's name.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::cluster_state::{AppState, RouteState},
};

impl ControllerStateMachine {
    /// Updates the index after a change of one app.
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
}
