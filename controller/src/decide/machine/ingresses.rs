//! Pure: Ingresses of Routes → plans of the Routes, and parts to write.

use std::collections::BTreeSet;

use common::wire::NamespacedName;
use serde_json::Value;
use tracing::info;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::cluster_state::{ConditionStatus, IngressState, UnixMillis},
    read::observe,
};

impl ControllerStateMachine {
    /// Handles an Ingress, which has the name of its Route; `None`: it was deleted.
    pub(super) fn observe_ingress(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let next = object.and_then(observe::read_ingress);
        let all = &mut self.cluster.ingresses.by_name;
        let previous = match next.clone() {
            Some(next) => all.insert(name.clone(), next),
            None => all.remove(name),
        };
        if self.is_loading || previous == next {
            return;
        }
        log_readiness(name, previous.as_ref(), next.as_ref());
        self.reconcile_app(name, now);
        self.check_ingress(name);
        // The slices depend on the presence of the Ingress alone: its controller may send requests before it is ready.
        if previous.is_some() != next.is_some() {
            self.reconcile_fronted_apps(name, now);
        }
    }

    /// Plans the apps whose Revisions a Route names, and checks the slices of these Revisions. Another ingress may send
    /// requests to all of them from now on, or no longer.
    fn reconcile_fronted_apps(&mut self, route: &NamespacedName, now: UnixMillis) {
        let referred = self.cluster.names.referring_apps.iter();
        let referred = referred.filter(|(_, routes)| routes.contains(route));
        let mut apps: BTreeSet<NamespacedName> = referred.map(|(app, _)| app.clone()).collect();
        apps.insert(route.clone());
        for name in apps {
            self.reconcile_app(&name, now);
            self.check_path_keys(&name);
        }
    }

    /// Checks the slices of other apps whose Revisions a Route names: an ingress that fronts the Route may send requests
    /// to them from now on. It may do so for a while after the Route has left them, so these are not checked at once.
    pub(super) fn check_slices_of_apps(&mut self, apps: &BTreeSet<NamespacedName>) {
        // Before the end of the initial lists nothing is planned, and then all objects are checked.
        if self.is_loading || !self.cluster.settings.config_maps.network.trusts_ingresses() {
            return;
        }
        for name in apps {
            self.check_path_keys(name);
        }
    }

    /// Passes the keys on the path of connections to an app to the writer, which checks them.
    fn check_path_keys(&mut self, name: &NamespacedName) {
        if let Some(app) = self.cluster.apps.get(name) {
            self.effects.changed_keys.extend(part_keys::app_path_keys(name, app));
        }
    }

    /// Handles the end of the first list of Ingresses: from now on, one that is not known does not exist.
    pub(super) fn handle_ingress_list(&mut self, now: UnixMillis) {
        // Until now an Ingress that was not known might have been ready, so no condition was given up.
        self.cluster.ingresses.is_listed = true;
        if self.is_loading {
            return;
        }
        for name in self.cluster.apps.keys().cloned().collect::<Vec<_>>() {
            let app = self.cluster.apps.get(&name);
            if app.is_some_and(|app| part_keys::ingress_key(&name, app, &self.cluster).is_some()) {
                self.reconcile_app(&name, now);
                self.check_ingress(&name);
            }
        }
    }

    /// Passes the key of a Route's Ingress to the writer, which checks it, if there is one or should be.
    pub(super) fn check_ingress(&mut self, name: &NamespacedName) {
        let app = self.cluster.apps.get(name);
        let key = app.and_then(|app| part_keys::ingress_key(name, app, &self.cluster));
        self.effects.changed_keys.extend(key);
    }
}

/// Logs that another ingress has begun to serve a Route, or has ended.
fn log_readiness(
    name: &NamespacedName,
    previous: Option<&IngressState>,
    next: Option<&IngressState>,
) {
    let is_ready = |it: &IngressState| matches!(it.readiness, Some(ConditionStatus::True(_)));
    let (before, after) = (previous.is_some_and(is_ready), next.is_some_and(is_ready));
    if before != after {
        let class = next.or(previous).map(|it| &*it.class).unwrap_or_default();
        info!(route = %name, class, ready = after, "ingress of another controller changed");
    }
}
