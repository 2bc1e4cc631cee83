//! Pure: an HTTPRoute → its parents with their conditions, its hosts, and its rules.

use std::{collections::BTreeSet, net::SocketAddr, num::NonZeroU32};

use common::wire::{
    AppProtocol, GatewayHostKey, HttpRule, NamespacedName, PlainBackend, RouteBackend,
    WeightedBackend,
};
use kube::core::SelectorExt as _;

use super::{
    ROUTE_KIND,
    hosts::{UsableListener, route_hosts, usable_listeners},
};
use crate::model::cluster_state::{
    AllowedNamespaces, BackendSpec, ClusterState, GATEWAY_SERVICE, HttpRouteState, ListenerSpec,
    ParentPlan, ParentReference, PlannedCondition, RoutePlan, RouteRuleSpec, UnixMillis,
};

/// Port of the Services of Routes.
const ROUTE_PORT: u16 = 80;

/// Failure of a reference to a backend: reason and message.
type BackendFailure = (&'static str, String);

/// Plans the routes of these names that exist. The time of the plans is `now`.
pub fn plan_routes(
    cluster: &ClusterState,
    names: &BTreeSet<NamespacedName>,
    now: UnixMillis,
) -> Vec<(NamespacedName, RoutePlan)> {
    // Once for all: it plans each Gateway.
    let listeners = usable_listeners(cluster);
    let routes = names.iter().filter_map(|name| {
        let route = cluster.gateway_api.routes.get(name)?;
        Some((name.clone(), plan_route(cluster, &listeners, (name, route), now)))
    });
    routes.collect()
}

fn plan_route(
    cluster: &ClusterState,
    listeners: &[UsableListener<'_>],
    (name, route): (&NamespacedName, &HttpRouteState),
    now: UnixMillis,
) -> RoutePlan {
    // Routes of other controllers cost no more than this.
    if route.parents.iter().all(|it| own_gateway(cluster, it).is_none()) {
        return RoutePlan { since: now, ..RoutePlan::default() };
    }
    let (rules, resolved) = plan_rules(cluster, name, route);
    let mut plan = RoutePlan { since: now, ..RoutePlan::default() };
    for parent in &route.parents {
        let Some(gateway) = own_gateway(cluster, parent) else { continue };
        let attachment = attach(cluster, name, route, parent, listeners);
        let (attached, accepted) = match attachment {
            Ok(attached) => (attached, PlannedCondition::met("Accepted", "Accepted")),
            Err((reason, message)) => {
                (Vec::new(), PlannedCondition::failed("Accepted", reason, message))
            }
        };
        plan.hosts.extend(attached.iter().flat_map(|(_, hosts)| hosts.iter().cloned()));
        plan.parents.push(ParentPlan {
            reference: parent.reference.clone(),
            gateway: gateway.clone(),
            listeners: attached.into_iter().map(|(listener, _)| listener.name.clone()).collect(),
            conditions: [accepted, resolved.clone()],
        });
    }
    // A route without hosts has no rules in the table.
    plan.rules = if plan.hosts.is_empty() { Vec::new() } else { rules };
    plan
}

/// Returns the Gateway of a parent reference, if it is of a class that chooses Rouse.
fn own_gateway<'a>(
    cluster: &ClusterState,
    parent: &'a ParentReference,
) -> Option<&'a NamespacedName> {
    let name = parent.gateway.as_ref()?;
    let gateway = cluster.gateway_api.gateways.get(name)?;
    cluster.gateway_api.is_own(gateway).then_some(name)
}

/// Listener that a route is attached to, with the route's hosts there.
type Attachment<'a> = (&'a ListenerSpec, BTreeSet<GatewayHostKey>);

/// Attaches a route to the listeners that a parent reference names. The error has reason and message.
fn attach<'a>(
    cluster: &ClusterState,
    name: &NamespacedName,
    route: &HttpRouteState,
    parent: &ParentReference,
    all: &[UsableListener<'a>],
) -> Result<Vec<Attachment<'a>>, BackendFailure> {
    if let Err(message) = &route.rules {
        return Err(("UnsupportedValue", message.to_string()));
    }
    let is_named = |it: &&UsableListener<'a>| {
        Some(it.gateway) == parent.gateway.as_ref()
            && parent.section.as_ref().is_none_or(|section| *section == it.spec.name)
            && parent.port.is_none_or(|port| port == it.spec.port)
    };
    let named: Vec<UsableListener<'a>> = all.iter().filter(is_named).copied().collect();
    if named.is_empty() {
        let message = "no usable listener of the Gateway has this name and port".to_owned();
        return Err(("NoMatchingParent", message));
    }
    let allowed = named.into_iter().filter(|it| admits(cluster, *it, &name.namespace));
    let allowed: Vec<UsableListener<'a>> = allowed.collect();
    if allowed.is_empty() {
        let message = format!("no listener takes routes of the namespace {}", name.namespace);
        return Err(("NotAllowedByListeners", message));
    }
    let attached = allowed.into_iter().filter_map(|listener| {
        Some((listener.spec, route_hosts(&route.hostnames, listener, all)?))
    });
    let attached: Vec<Attachment<'a>> = attached.collect();
    if attached.is_empty() {
        let message = "no hostname of the route is one of a listener".to_owned();
        return Err(("NoMatchingListenerHostname", message));
    }
    if attached.iter().all(|(_, hosts)| hosts.is_empty()) {
        let message = "more specific listeners have all hostnames of the route".to_owned();
        return Err(("NoMatchingListenerHostname", message));
    }
    Ok(attached)
}

/// Returns true if a listener takes routes of a namespace.
fn admits(cluster: &ClusterState, listener: UsableListener<'_>, namespace: &str) -> bool {
    match &listener.spec.namespaces {
        AllowedNamespaces::Same => listener.gateway.namespace == namespace,
        AllowedNamespaces::All => true,
        AllowedNamespaces::Selected(selector) => {
            let labels = cluster.requests.namespaces.get(namespace).map(|it| &it.labels);
            let (Some(selector), Some(labels)) = (selector, labels) else { return false };
            selector.matches(labels)
        }
    }
}

/// Returns the rules of a route, one for each match, and the condition `ResolvedRefs`.
fn plan_rules(
    cluster: &ClusterState,
    name: &NamespacedName,
    route: &HttpRouteState,
) -> (Vec<HttpRule>, PlannedCondition) {
    let mut resolved = PlannedCondition::met("ResolvedRefs", "ResolvedRefs");
    let mut rules = Vec::new();
    for rule in route.rules.iter().flatten() {
        let backends = plan_backends(cluster, name, rule, &mut resolved);
        rules.extend(rule.matches.iter().map(|it| HttpRule {
            route: name.clone(),
            is_grpc: false,
            path: it.path.clone(),
            method: it.method.clone(),
            headers: it.headers.clone(),
            query: it.query.clone(),
            request_headers: rule.request_headers.clone(),
            response_headers: rule.response_headers.clone(),
            redirect: rule.redirect.clone(),
            rewrite: rule.rewrite.clone(),
            timeouts: rule.timeouts,
            backends: backends.clone(),
        }));
    }
    (rules, resolved)
}

/// Returns the backends of a rule with a share. One that cannot be resolved keeps its share, whose requests fail.
fn plan_backends(
    cluster: &ClusterState,
    route: &NamespacedName,
    rule: &RouteRuleSpec,
    resolved: &mut PlannedCondition,
) -> Vec<WeightedBackend> {
    let mut backends = Vec::new();
    for spec in &rule.backends {
        let target = resolve_backend(cluster, route, spec).unwrap_or_else(|(reason, message)| {
            // The first failure is shown.
            if resolved.is_true {
                *resolved = PlannedCondition::failed("ResolvedRefs", reason, message);
            }
            RouteBackend::Unresolved
        });
        let weight = NonZeroU32::new(spec.weight);
        backends.extend(weight.map(|weight| WeightedBackend {
            weight,
            target,
            request_headers: spec.request_headers.clone(),
            response_headers: spec.response_headers.clone(),
        }));
    }
    backends
}

fn resolve_backend(
    cluster: &ClusterState,
    route: &NamespacedName,
    spec: &BackendSpec,
) -> Result<RouteBackend, BackendFailure> {
    let name = &spec.name;
    if *spec.kind != *"Service" {
        return Err(("InvalidKind", format!("backends of kind {} are not supported", spec.kind)));
    }
    let is_foreign = name.namespace != route.namespace;
    let from = (ROUTE_KIND, route.namespace.as_str());
    if is_foreign && !cluster.gateway_api.is_granted(from, ("Service", name)) {
        let message = format!("no ReferenceGrant lets the route name Service {name}");
        return Err(("RefNotPermitted", message));
    }
    if name.name == GATEWAY_SERVICE && *name.namespace == *cluster.settings.system_namespace {
        let message = format!("Service {name} is the gateway, and requests would come back to it");
        return Err(("RefNotPermitted", message));
    }
    let missing = |what: &str| Err(("BackendNotFound", format!("Service {name} {what}")));
    let Some(port) = spec.port else { return missing("is named without a port") };
    if cluster.names.placeholders.contains_key(name) {
        return match port.get() {
            ROUTE_PORT => Ok(RouteBackend::Service(name.clone())),
            _ => missing("of a Route leads to it at port 80 only"),
        };
    }
    let Some(service) = cluster.gateway_api.services.get(name) else {
        return missing("does not exist");
    };
    let found = service.ports.iter().find(|(it, _)| *it == port);
    let Some((_, protocol)) = found else { return missing(&format!("has no TCP port {port}")) };
    let Some(protocol) = protocol.filter(|it| *it != AppProtocol::Tcp) else {
        let message = format!("the application protocol of Service {name} is not supported");
        return Err(("UnsupportedProtocol", message));
    };
    // A scaled Service has its ClusterIP too, and wakes by connections there.
    match service.address {
        Some(address) => Ok(RouteBackend::Plain(PlainBackend {
            name: name.with_port(port),
            address: SocketAddr::new(address, port.get()),
            protocol,
        })),
        None => missing("has no ClusterIP"),
    }
}
