//! Pure: pods of Rouse's own components: activators to route to, agents to wait for, addresses of replicas.

use common::wire::{
    ActivatorEntry, ClientComponent, NamespacedName, RouteChange, RouteKey, ServerComponent,
    ServerReplicas,
};
use serde_json::Value;
use tracing::info;

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{ActivatorReadiness, UnixMillis},
        reporters,
    },
    read::observe::{self, ComponentPod},
};

/// Number of nodes up to which the agents of all nodes report ready pods to each activator. An activator has a stream
/// of each agent then. With more nodes it has only that of its own node.
const MAX_NODES_OF_ALL_REPORTS: usize = 64;

impl ControllerStateMachine {
    /// Handles a pod of the system namespace. Returns false if it is not, and was not, a pod of a component.
    pub(super) fn observe_component_pod(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) -> bool {
        if name.namespace != self.cluster.settings.system_namespace {
            // A user who may label pods in another namespace must not be able to pose as a component.
            return false;
        }
        match object.and_then(observe::read_component_pod) {
            Some(ComponentPod::Activator { entry, readiness }) => {
                let reporter = reporters::reporter_id(ClientComponent::Activator, &entry.name);
                self.cluster.pods.reporters.expect_reporter(&reporter, &name.name);
                self.observe_activator(entry, readiness);
                // The conditions of Routes wait for ready activators.
                self.follow_ready_activators(now);
            }
            Some(ComponentPod::Agent { node }) => {
                self.cluster.pods.reporters.expect_reporter(
                    &reporters::reporter_id(ClientComponent::Agent, &node),
                    &name.name,
                );
            }
            Some(ComponentPod::Replica { component, replica }) => {
                self.update_replicas(component, |replicas| {
                    match replicas.members.iter_mut().find(|member| member.name == replica.name) {
                        Some(member) => *member = replica,
                        None => replicas.members.push(replica),
                    }
                });
            }
            None => return self.remove_component_pod(&name.name, now),
        }
        true
    }

    /// Handles the deletion of a pod of the system namespace. Returns false if it was no component.
    fn remove_component_pod(&mut self, name: &str, now: UnixMillis) -> bool {
        let mut was_component = false;
        // The pod may have been any component, and its deletion does not state which.
        for reporter in self.cluster.pods.reporters.remove_reporter_pod(name) {
            was_component = true;
            self.handle_reporter_lost(&reporter, now);
            self.reconcile_draining_apps(now);
        }
        if self.cluster.activators.pods.contains_key(name) {
            was_component = true;
            self.remove_activator(name);
            self.follow_ready_activators(now);
        }
        for component in [ServerComponent::Controller, ServerComponent::Autoscaler] {
            let all = self.cluster.replicas.get(&component).map(|it| it.members.as_slice());
            if all.unwrap_or_default().iter().any(|it| it.name == name) {
                was_component = true;
                self.update_replicas(component, |it| {
                    it.members.retain(|member| member.name != name);
                });
            }
        }
        was_component
    }

    /// Sets the active replica of a component.
    pub(super) fn set_active_replica(
        &mut self,
        component: ServerComponent,
        active: Option<String>,
    ) {
        self.update_replicas(component, |it| it.active = active);
    }

    /// Changes the replicas of a component in the RouteTable. If it has none, clients use the address in their own
    /// configuration.
    fn update_replicas(
        &mut self,
        component: ServerComponent,
        change: impl FnOnce(&mut ServerReplicas),
    ) {
        let none = || ServerReplicas { component, members: Vec::new(), active: None };
        let replicas = self.cluster.replicas.entry(component).or_insert_with(none);
        change(replicas);
        // The order of observation must not show in the table, or replicas would send different tables.
        replicas.members.sort_by(|a, b| a.name.cmp(&b.name));
        let key = RouteKey::Replicas(component);
        if replicas.members.is_empty() {
            self.routes.remove(&key);
        } else {
            self.routes
                .set(key, RouteFingerprint::of_change(&RouteChange::Replicas(replicas.clone())));
        }
    }

    fn observe_activator(&mut self, mut activator: ActivatorEntry, readiness: ActivatorReadiness) {
        activator.zone = self.cluster.nodes.zones.get(&activator.node).cloned().unwrap_or_default();
        activator.gets_all_reports = self.activators_get_all_reports();
        let observed = (activator.clone(), readiness);
        let previous =
            self.cluster.activators.pods.insert(activator.name.clone(), observed.clone());
        if previous.as_ref() == Some(&observed) {
            return;
        }
        info!(activator = activator.name, standing = ?readiness, "activator seen");
        self.update_activator_route(&observed.0.name);
        self.request_slice_checks();
    }

    /// Updates an activator in the RouteTable. A leaving one stays until the last slice with it is rewritten: it serves
    /// for as long as the table names it.
    fn update_activator_route(&self, name: &str) {
        let key = RouteKey::Activator(name.to_owned());
        match self.cluster.activator_readiness(name) {
            Some((it, ActivatorReadiness::Ready)) => {
                self.routes
                    .set(key, RouteFingerprint::of_change(&RouteChange::Activator(it.clone())));
            }
            Some((it, ActivatorReadiness::Terminating))
                if self.cluster.activators.slices.lists_activator(name) =>
            {
                self.routes
                    .set(key, RouteFingerprint::of_change(&RouteChange::Activator(it.clone())));
            }
            Some((_, ActivatorReadiness::NotReady | ActivatorReadiness::Terminating)) | None => {
                self.routes.remove(&key)
            }
        }
    }

    /// Updates the activators of a node that became or is no longer lost, or whose zone has changed.
    pub(super) fn update_node_activators(&mut self, node: &str) {
        let all = self.cluster.activators.pods.values().filter(|(it, _)| it.node == node);
        let names: Vec<String> = all.map(|(it, _)| it.name.clone()).collect();
        names.iter().for_each(|name| self.update_activator_route(name));
        if !names.is_empty() {
            self.request_slice_checks();
        }
    }

    /// Updates the zone of the activators of a node.
    pub(super) fn update_activator_zones(&mut self, node: &str) {
        let zone = self.cluster.nodes.zones.get(node).cloned().unwrap_or_default();
        let activators = self.cluster.activators.pods.values_mut().map(|(it, _)| it);
        let mut is_changed = false;
        for activator in activators.filter(|it| it.node == node && it.zone != zone) {
            activator.zone.clone_from(&zone);
            is_changed = true;
        }
        if is_changed {
            self.update_node_activators(node);
        }
    }

    /// Returns true if the agents of all nodes are to report ready pods to each activator. As long as nodes may not be
    /// known, they may be many.
    fn activators_get_all_reports(&self) -> bool {
        let nodes = self.cluster.nodes.states.len();
        !self.is_loading && (1..=MAX_NODES_OF_ALL_REPORTS).contains(&nodes)
    }

    /// Updates the agents that report to activators, since the number of nodes may have changed.
    pub(super) fn update_activator_reports(&mut self) {
        let gets_all_reports = self.activators_get_all_reports();
        let activators = self.cluster.activators.pods.values_mut().map(|(it, _)| it);
        let mut changed = Vec::new();
        for activator in activators.filter(|it| it.gets_all_reports != gets_all_reports) {
            activator.gets_all_reports = gets_all_reports;
            changed.push(activator.name.clone());
        }
        changed.iter().for_each(|name| self.update_activator_route(name));
    }

    /// Handles an EndpointSlice; `None`: it was deleted.
    pub(super) fn observe_slice(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let targets = object.map(observe::slice_target_names).unwrap_or_default();
        for left in self.cluster.activators.slices.set_slice(name, &targets) {
            info!(activator = left, "no slice leads to the activator any more");
            self.update_activator_route(&left);
        }
        if self.is_loading {
            // Only at the start: later the plan knows the hints itself, and the slices follow it.
            self.restore_hints(name, object.and_then(observe::slice_hints).unwrap_or_default());
        }
        self.check_scaled_slice(name, now);
    }

    fn remove_activator(&mut self, name: &str) {
        self.cluster.activators.pods.remove(name);
        self.update_activator_route(name);
        self.request_slice_checks();
        self.forget_deleted_nodes();
    }

    /// Has the slices of every name checked. The writer writes only those whose choice changed, at a limited rate.
    fn request_slice_checks(&mut self) {
        let apps = || self.cluster.apps.iter();
        let names = apps().filter(|(_, app)| app.route.is_some());
        let keys = names.flat_map(|(name, app)| part_keys::slice_keys(name, app));
        let other_slices = apps().flat_map(|(name, app)| part_keys::app_path_keys(name, app));
        self.effects.changed_keys.extend(keys.chain(other_slices).collect::<Vec<_>>());
    }
}
