//! Pure: objects of the Gateway API → plans of routes, hosts of the RouteTable, and statuses to write.

use std::collections::BTreeSet;

use common::wire::{GatewayHostKey, NamespacedName, RouteChange, RouteKey};
use serde_json::Value;
use smol_str::SmolStr;
use tracing::info;

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::plan::gateway_api::{
        draft_routes, finish_routes, host_entries, listener_hosts, listener_secrets,
    },
    model::{
        cluster_state::{
            AllowedNamespaces, GATEWAY_SERVICE, GatewayRouteId, GatewayRouteKind,
            GatewayRouteState, GatewayState, RouteClaims, RoutePlan, UnixMillis,
        },
        object::{ObjectPart, ObjectPartKey, ResourceKind},
    },
    read::observe,
};

impl ControllerStateMachine {
    /// Handles a GatewayClass; `None`: it was deleted.
    pub(super) fn observe_gateway_class(
        &mut self,
        name: &SmolStr,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let classes = &mut self.cluster.gateway_api.classes;
        let previous = classes.remove(name);
        let next = object.and_then(observe::read_gateway_class);
        let is_changed = previous.as_ref().map(|it| it.has_parameters)
            != next.as_ref().map(|it| it.has_parameters);
        if let Some(mut class) = next {
            // An unchanged class keeps its time, or each update of its status would bring the next one.
            let same = previous.filter(|_| !is_changed);
            class.planned_since = same.map_or(now, |it| it.planned_since);
            classes.insert(name.clone(), class);
        }
        self.effects.changed_keys.push(class_key(name));
        if is_changed {
            self.restart_gateway_times(now);
            self.follow_gateways(now);
        }
    }

    /// Handles a Gateway; `None`: it was deleted.
    pub(super) fn observe_gateway(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let gateways = &mut self.cluster.gateway_api.gateways;
        let previous = gateways.remove(&name);
        let spec = |it: &GatewayState| {
            (it.class.clone(), it.has_addresses, it.listeners.clone(), it.meta.clone())
        };
        // A new status alone changes no plan, or the controller's own writes would make it plan without an end.
        let mut is_changed = object.is_none();
        if let Some(object) = object {
            let mut gateway = observe::read_gateway(object);
            let same = previous.as_ref().filter(|it| spec(it) == spec(&gateway));
            is_changed = same.is_none();
            gateway.planned_since = same.map_or(now, |it| it.planned_since);
            gateways.insert(name.clone(), gateway);
        }
        self.effects.changed_keys.push(status_key(ResourceKind::Gateway, name));
        if is_changed {
            self.follow_gateways(now);
        }
    }

    /// Handles an HTTPRoute or GRPCRoute; `None`: it was deleted.
    pub(super) fn observe_gateway_route(
        &mut self,
        resource: ResourceKind,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let Some(kind) = GatewayRouteKind::of_resource(resource) else { return };
        let id = GatewayRouteId { kind, name };
        let routes = &mut self.cluster.gateway_api.routes;
        // The plan of before is kept, to find the hosts that the route no longer has.
        let previous = routes.remove(&id).map(|it| it.plan).unwrap_or_default();
        match object {
            Some(object) => {
                let route = observe::read_gateway_route(kind, object);
                routes.insert(id.clone(), GatewayRouteState { plan: previous, ..route });
                self.replan_routes(&BTreeSet::from([id]), now);
            }
            None => {
                self.move_route_hosts(&id, &previous.hosts, &BTreeSet::new());
                self.check_parents(&previous);
                self.update_gateway_hosts(previous.hosts);
                // Routes of the other kind may have its hosts now.
                let gone = [(id, UnixMillis::default(), RouteClaims::new())];
                let mut freed = self.cluster.gateway_api.claims.update(gone);
                freed.retain(|it| self.cluster.gateway_api.routes.contains_key(it));
                if !freed.is_empty() {
                    self.replan_routes(&freed, now);
                }
            }
        }
    }

    /// Handles a ReferenceGrant; `None`: it was deleted.
    pub(super) fn observe_reference_grant(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let grants = &mut self.cluster.gateway_api.grants;
        let next = object.map(observe::read_reference_grant);
        let previous = match next.clone() {
            Some(next) => grants.insert(name, next),
            None => grants.remove(&name),
        };
        if previous != next {
            // A listener may name its certificate from now on, or not any more.
            self.restart_gateway_times(now);
            self.follow_gateways(now);
        }
    }

    /// Handles a Service as a backend of routes, and as the gateway's own. `None`: it was deleted.
    pub(super) fn observe_backend_service(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let gateway_api = &mut self.cluster.gateway_api;
        match object.and_then(observe::read_backend_service) {
            Some(service) => drop(gateway_api.services.insert(name.clone(), service)),
            None => drop(gateway_api.services.remove(name)),
        }
        if name.name == GATEWAY_SERVICE
            && *name.namespace == *self.cluster.settings.system_namespace
        {
            let addresses = object.map(observe::read_gateway_addresses).unwrap_or_default();
            if addresses != gateway_api.addresses {
                gateway_api.addresses = addresses;
                self.restart_gateway_times(now);
                self.check_gateway_statuses();
            }
        }
        // Where no class chooses Rouse, a change of a Service costs no more than this.
        if self.cluster.gateway_api.classes.is_empty() || self.is_loading {
            return;
        }
        // The Service may also be one of a Route, which has come or gone.
        let routes = self.cluster.gateway_api.routes_to(name);
        if !routes.is_empty() {
            self.replan_routes(&routes, now);
        }
    }

    /// Plans the routes again after a change of a namespace, if a listener selects namespaces by labels.
    pub(super) fn follow_gateway_namespaces(&mut self, now: UnixMillis) {
        let gateways = self.cluster.gateway_api.gateways.values();
        let mut listeners = gateways.flat_map(|it| &it.listeners);
        if listeners.any(|it| matches!(it.namespaces, AllowedNamespaces::Selected(_))) {
            self.follow_gateways(now);
        }
    }

    /// Plans all routes again, after a change of what all of them depend on.
    pub(super) fn follow_gateways(&mut self, now: UnixMillis) {
        // Gateways and routes of other controllers alone cost no more than this.
        if self.is_loading || !self.cluster.gateway_api.is_in_use() {
            return;
        }
        let routes = self.cluster.gateway_api.routes.keys().cloned().collect();
        self.replan_routes(&routes, now);
        // Listeners have come or gone.
        let all = self.cluster.gateway_api.hosts.keys().cloned().collect();
        self.update_gateway_hosts(all);
        let moved = self.update_named_secrets(now);
        self.reconcile_mappings_and_targets(&moved, now);
        self.check_gateway_statuses();
    }

    /// Passes the statuses of Gateways to the writer if a listener names one of these Secrets, whose states have changed.
    pub(super) fn follow_gateway_secrets(
        &mut self,
        secrets: &BTreeSet<NamespacedName>,
        now: UnixMillis,
    ) {
        if self.cluster.gateway_api.gateways.is_empty()
            || listener_secrets(&self.cluster).is_disjoint(secrets)
        {
            return;
        }
        // The conditions follow from the Secrets, so they may change now.
        self.restart_gateway_times(now);
        let gateways = self.cluster.gateway_api.gateways.keys().cloned();
        let keys = gateways.map(|it| status_key(ResourceKind::Gateway, it));
        self.effects.changed_keys.extend(keys);
    }

    /// Passes the keys of all statuses of the Gateway API to the writer, which checks them.
    pub(super) fn check_gateway_statuses(&mut self) {
        if self.is_loading {
            return;
        }
        let gateway_api = &self.cluster.gateway_api;
        let gateways = gateway_api.gateways.keys().cloned();
        let routes = gateway_api.routes.keys().cloned();
        let keys = &mut self.effects.changed_keys;
        keys.extend(gateway_api.classes.keys().map(class_key));
        keys.extend(gateways.map(|it| status_key(ResourceKind::Gateway, it)));
        keys.extend(routes.map(route_key));
    }

    /// Plans routes with those that they may keep from a host or leave one, and puts their hosts into the RouteTable.
    fn replan_routes(&mut self, ids: &BTreeSet<GatewayRouteId>, now: UnixMillis) {
        if self.is_loading {
            return;
        }
        let mut drafts = draft_routes(&self.cluster, ids);
        let claims = drafts.iter().map(|(id, draft)| (id.clone(), draft.created(), draft.claims()));
        // All claims are made before a route is finished: a route must not get a host that an older one claims.
        let mut others = self.cluster.gateway_api.claims.update(claims);
        others.retain(|id| !drafts.contains_key(id));
        if !others.is_empty() {
            drafts.extend(draft_routes(&self.cluster, &others));
        }
        let mut changed_hosts = BTreeSet::new();
        for (id, next) in finish_routes(&self.cluster, drafts, now) {
            self.effects.changed_keys.push(route_key(id.clone()));
            let Some(route) = self.cluster.gateway_api.routes.get(&id) else { continue };
            // The time of an unchanged plan stays.
            if (RoutePlan { since: route.plan.since, ..next.clone() }) == route.plan {
                continue;
            }
            let previous = route.plan.clone();
            self.check_parents(&previous);
            self.check_parents(&next);
            self.move_route_hosts(&id, &previous.hosts, &next.hosts);
            changed_hosts.extend(previous.hosts.into_iter().chain(next.hosts.iter().cloned()));
            info!(route = %id, hosts = next.hosts.len(), rules = next.rules.len(), "route planned");
            if let Some(route) = self.cluster.gateway_api.routes.get_mut(&id) {
                route.plan = next;
            }
        }
        self.update_gateway_hosts(changed_hosts);
    }

    /// Passes the statuses of the Gateways of a route to the writer: they count their routes.
    fn check_parents(&mut self, plan: &RoutePlan) {
        let gateways = plan.parents.iter().map(|it| it.gateway.clone());
        let keys = gateways.map(|it| status_key(ResourceKind::Gateway, it));
        self.effects.changed_keys.extend(keys);
    }

    /// Records the hosts for which a route has rules.
    fn move_route_hosts(
        &mut self,
        route: &GatewayRouteId,
        before: &BTreeSet<GatewayHostKey>,
        after: &BTreeSet<GatewayHostKey>,
    ) {
        let hosts = &mut self.cluster.gateway_api.hosts;
        for key in before.difference(after) {
            if let Some(routes) = hosts.get_mut(key) {
                routes.remove(route);
            }
        }
        for key in after {
            hosts.entry(key.clone()).or_default().insert(route.clone());
        }
    }

    /// Puts hosts into the RouteTable as they are now, and those of new listeners. One that neither a listener nor a
    /// route has any more leaves it.
    fn update_gateway_hosts(&mut self, mut changed: BTreeSet<GatewayHostKey>) {
        if self.is_loading {
            return;
        }
        // A listener without routes has an entry too, or its requests would get to a less specific listener.
        let of_listeners = listener_hosts(&self.cluster);
        let hosts = &mut self.cluster.gateway_api.hosts;
        for key in &of_listeners {
            if !hosts.contains_key(key) {
                hosts.insert(key.clone(), BTreeSet::new());
                changed.insert(key.clone());
            }
        }
        let is_over = |key: &&GatewayHostKey, routes: Option<&BTreeSet<GatewayRouteId>>| {
            routes.is_some_and(BTreeSet::is_empty) && !of_listeners.contains(*key)
        };
        let over: Vec<GatewayHostKey> =
            changed.iter().filter(|key| is_over(key, hosts.get(*key))).cloned().collect();
        for key in &over {
            hosts.remove(key);
        }
        // Only now, because the entry of a host that is over is `None`, which removes it from the RouteTable.
        for (key, entry) in host_entries(&self.cluster, &changed) {
            let route_key = RouteKey::GatewayHost(key.clone());
            match entry {
                Some(entry) => {
                    let change = RouteChange::GatewayHost(entry);
                    self.routes.set(route_key, RouteFingerprint::of_change(&change));
                }
                None => self.routes.remove(&route_key),
            }
        }
    }

    /// Restarts the times of the plans of Gateways. Conditions that stay the same keep theirs.
    fn restart_gateway_times(&mut self, now: UnixMillis) {
        for gateway in self.cluster.gateway_api.gateways.values_mut() {
            gateway.planned_since = now;
        }
    }
}

fn class_key(name: &SmolStr) -> ObjectPartKey {
    status_key(ResourceKind::GatewayClass, NamespacedName::new("", name.clone()))
}

fn route_key(id: GatewayRouteId) -> ObjectPartKey {
    status_key(id.kind.resource(), id.name)
}

fn status_key(resource: ResourceKind, name: NamespacedName) -> ObjectPartKey {
    ObjectPartKey::new(resource, ObjectPart::Status, name)
}
