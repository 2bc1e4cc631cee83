//! Pure: GatewayClasses and Gateways → their conditions, and the rules of each host from the plans of the routes.

use std::{cmp::Reverse, collections::BTreeSet};

use common::wire::{GatewayHostEntry, GatewayHostKey, HttpRule, NamespacedName, PathMatch};

use crate::model::cluster_state::{
    ClusterState, GATEWAY_GROUP, GatewayClassState, GatewayRouteKind, GatewayState, ListenerSpec,
    ParentPlan, PlannedCondition, UnixMillis,
};

mod certificates;
mod hosts;
mod routes;

pub use certificates::listener_secrets;
use hosts::{UsableListener, usable_listeners};
pub use hosts::{listener_hosts, reserved_hosts};
pub use routes::{RouteDraft, draft_routes, finish_routes};

/// Port of listeners with the protocol HTTP: the gateway has no other.
const HTTP_PORT: u16 = 80;
/// Port of listeners with the protocol HTTPS.
const HTTPS_PORT: u16 = 443;
/// Protocol of listeners whose TLS the gateway ends.
pub(super) const HTTPS: &str = "HTTPS";

/// Plan of a Gateway: its conditions, and those of its listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayPlan {
    /// Conditions `Accepted` and `Programmed`.
    pub conditions: [PlannedCondition; 2],
    /// Plan of each listener, in the order of the spec.
    pub listeners: Vec<ListenerPlan>,
}

/// Plan of a listener: its use for routes, and its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerPlan {
    /// True if routes may attach, and are served.
    pub is_usable: bool,
    /// Kinds of routes that it takes.
    pub kinds: &'static [GatewayRouteKind],
    /// Conditions `Accepted`, `Conflicted`, `ResolvedRefs` and `Programmed`.
    pub conditions: [PlannedCondition; 4],
}

/// Plans the condition `Accepted` of a GatewayClass that chooses Rouse.
pub fn plan_class(class: &GatewayClassState) -> PlannedCondition {
    if class.has_parameters {
        let message = "Rouse has no parameters: remove spec.parametersRef";
        return PlannedCondition::failed("Accepted", "InvalidParameters", message);
    }
    PlannedCondition::met("Accepted", "Accepted")
}

/// Plans a Gateway of a class that chooses Rouse.
pub fn plan_gateway(
    cluster: &ClusterState,
    name: &NamespacedName,
    gateway: &GatewayState,
) -> GatewayPlan {
    let class = cluster.gateway_api.classes.get(&gateway.class);
    // One reason is stated: the class comes first, since all its Gateways have that fault.
    let refusal = if class.is_some_and(|it| it.has_parameters) {
        Some(("InvalidParameters", "its GatewayClass is not accepted".to_owned()))
    } else if gateway.has_parameters {
        let message = "Rouse has no parameters: remove spec.infrastructure.parametersRef";
        Some(("InvalidParameters", message.to_owned()))
    } else if gateway.has_addresses {
        let message = "all Gateways have the addresses of the gateway: remove spec.addresses";
        Some(("UnsupportedAddress", message.to_owned()))
    } else {
        None
    };
    let is_refused = refusal.is_some();
    let of_gateway = gateway.listeners.iter();
    let listeners = of_gateway.map(|it| plan_listener(cluster, (name, gateway), it, is_refused));
    let listeners: Vec<ListenerPlan> = listeners.collect();
    let unusable = listeners.iter().filter(|it| !it.is_usable).count();
    let accepted = match refusal {
        Some((reason, message)) => PlannedCondition::failed("Accepted", reason, message),
        None if unusable == listeners.len() => {
            let message = "no listener can be served";
            PlannedCondition::failed("Accepted", "ListenersNotValid", message)
        }
        // Still true, with this reason: the other listeners are served, as the specification wants it.
        None if unusable > 0 => PlannedCondition {
            message: "not all listeners can be served".to_owned(),
            ..PlannedCondition::met("Accepted", "ListenersNotValid")
        },
        None => PlannedCondition::met("Accepted", "Accepted"),
    };
    let programmed = if !accepted.is_true {
        PlannedCondition::failed("Programmed", "Invalid", "the Gateway is not accepted")
    } else if cluster.gateway_api.addresses.is_empty() {
        let message = "the gateway's Service has no address";
        PlannedCondition::failed("Programmed", "AddressNotAssigned", message)
    } else {
        PlannedCondition::met("Programmed", "Programmed")
    };
    GatewayPlan { conditions: [accepted, programmed], listeners }
}

/// Plans a listener. `is_refused`: its Gateway is not accepted, so that no listener of it is usable.
fn plan_listener(
    cluster: &ClusterState,
    (name, gateway): (&NamespacedName, &GatewayState),
    listener: &ListenerSpec,
    is_refused: bool,
) -> ListenerPlan {
    let accepted = plan_acceptance(listener);
    let is_same =
        |it: &&ListenerSpec| (it.port, &it.hostname) == (listener.port, &listener.hostname);
    // Both are refused: to serve one of them would let the order of the list decide.
    let conflicted = if gateway.listeners.iter().filter(is_same).count() > 1 {
        let message = "another listener of the Gateway has this port and host".to_owned();
        PlannedCondition { message, ..PlannedCondition::met("Conflicted", "HostnameConflict") }
    } else {
        PlannedCondition::failed("Conflicted", "NoConflicts", "")
    };
    let kinds = taken_kinds(listener);
    let certificates = certificates::listener_certificates(cluster, name, listener);
    let is_certified = *listener.protocol != *HTTPS || !certificates.secrets.is_empty();
    let state = certificates::check_certificates(cluster, certificates);
    let is_route =
        |it: &RouteGroupKind| GatewayRouteKind::ALL.iter().any(|kind| names_kind(it, *kind));
    let resolved = match (listener.kinds.iter().find(|it| !is_route(it)), state) {
        (Some((_, kind)), _) => {
            let message = format!("routes of kind {kind} are not supported");
            PlannedCondition::failed("ResolvedRefs", "InvalidRouteKinds", message)
        }
        (None, Err((reason, message))) if accepted.is_true => {
            PlannedCondition::failed("ResolvedRefs", reason, message)
        }
        (None, Ok(()) | Err(_)) => PlannedCondition::met("ResolvedRefs", "ResolvedRefs"),
    };
    // Without `resolved`: a listener that also names an unsupported kind serves routes of the other kinds.
    let is_usable =
        accepted.is_true && !conflicted.is_true && !kinds.is_empty() && is_certified && !is_refused;
    let programmed = if is_usable && resolved.is_true {
        PlannedCondition::met("Programmed", "Programmed")
    } else {
        PlannedCondition::failed("Programmed", "Invalid", "the listener is not valid")
    };
    let conditions = [accepted, conflicted, resolved, programmed];
    ListenerPlan { is_usable, kinds, conditions }
}

/// Group and kind of routes, as a listener names them.
type RouteGroupKind = (Box<str>, Box<str>);

/// Returns true if a listener's group and kind are those of this kind of routes.
fn names_kind((group, name): &RouteGroupKind, kind: GatewayRouteKind) -> bool {
    **group == *GATEWAY_GROUP && **name == *kind.name()
}

/// Returns the kinds of routes that a listener takes: those that it names, or all that its protocol has.
fn taken_kinds(listener: &ListenerSpec) -> &'static [GatewayRouteKind] {
    if !["HTTP", HTTPS].contains(&&*listener.protocol) {
        return &[];
    }
    let named = &listener.kinds;
    let takes = |kind| named.is_empty() || named.iter().any(|it| names_kind(it, kind));
    match (takes(GatewayRouteKind::Http), takes(GatewayRouteKind::Grpc)) {
        (true, true) => &GatewayRouteKind::ALL,
        (true, false) => &[GatewayRouteKind::Http],
        (false, true) => &[GatewayRouteKind::Grpc],
        (false, false) => &[],
    }
}

/// Plans the condition `Accepted` of a listener.
fn plan_acceptance(listener: &ListenerSpec) -> PlannedCondition {
    let failed = |reason, message: String| PlannedCondition::failed("Accepted", reason, message);
    let port = match &*listener.protocol {
        "HTTP" => HTTP_PORT,
        HTTPS => HTTPS_PORT,
        other => {
            let message = format!("listeners of protocol {other} are not supported");
            return failed("UnsupportedProtocol", message);
        }
    };
    if listener.port != port {
        let message = format!("the gateway has port {port} for {}", listener.protocol);
        return failed("PortUnavailable", message);
    }
    match &listener.tls {
        Some(tls) if !tls.is_terminated => {
            failed("UnsupportedProtocol", "TLS is not passed through".to_owned())
        }
        Some(tls) if tls.validates_clients => {
            let message = "listeners cannot ask for certificates of clients".to_owned();
            failed("UnsupportedProtocol", message)
        }
        Some(_) | None => PlannedCondition::met("Accepted", "Accepted"),
    }
}

/// Returns the number of routes that are attached to a listener.
pub fn attached_routes(cluster: &ClusterState, gateway: &NamespacedName, listener: &str) -> usize {
    let routes = cluster.gateway_api.routes.values();
    let is_attached =
        |it: &ParentPlan| it.gateway == *gateway && it.listeners.iter().any(|it| **it == *listener);
    routes.filter(|route| route.plan.parents.iter().any(is_attached)).count()
}

/// Returns the rules of a host in the order of their precedence; `None`: neither a listener nor a route has the host.
pub fn host_entry(cluster: &ClusterState, key: &GatewayHostKey) -> Option<GatewayHostEntry> {
    host_entry_at(cluster, &tls_listeners(cluster, key.is_tls), key)
}

/// Returns the rules of each of these hosts, as [`host_entry`] does.
pub fn host_entries<'a>(
    cluster: &'a ClusterState,
    keys: &'a BTreeSet<GatewayHostKey>,
) -> impl Iterator<Item = (&'a GatewayHostKey, Option<GatewayHostEntry>)> {
    // Once for all: it plans each Gateway.
    let listeners = tls_listeners(cluster, keys.iter().any(|it| it.is_tls));
    keys.iter().map(move |key| (key, host_entry_at(cluster, &listeners, key)))
}

/// Returns the listeners with TLS that may have the certificate of a host; none if no host has TLS.
fn tls_listeners(cluster: &ClusterState, has_tls: bool) -> Vec<UsableListener<'_>> {
    let mut all = if has_tls { usable_listeners(cluster) } else { Vec::new() };
    all.retain(|it| *it.spec.protocol == *HTTPS);
    all
}

fn host_entry_at(
    cluster: &ClusterState,
    listeners: &[UsableListener<'_>],
    key: &GatewayHostKey,
) -> Option<GatewayHostEntry> {
    let routes = cluster.gateway_api.hosts.get(key)?;
    let routes = routes.iter().filter_map(|id| cluster.gateway_api.routes.get(id));
    let mut rules: Vec<(UnixMillis, usize, &HttpRule)> = Vec::new();
    for route in routes {
        let own = route.plan.rules.iter().enumerate();
        rules.extend(own.map(|(at, rule)| (route.meta.created, at, rule)));
    }
    // Sorted here once, so that activators take the first rule that matches.
    rules.sort_by_cached_key(precedence);
    let rules = rules.into_iter().map(|(_, _, rule)| rule.clone()).collect();
    let certificates = certificates::host_certificates(cluster, listeners, key);
    Some(GatewayHostEntry { key: key.clone(), rules, certificates, reserved_hosts: Vec::new() })
}

/// Returns the precedence of a rule, the highest first, as the specification of HTTPRoute orders matches. Exact paths
/// come first, then long prefixes, a method, more headers, more parameters, older routes, `namespace/name`, and the
/// order in the route. It is also that of GRPCRoutes: a rule for a method is an exact path, and one for a service a
/// prefix.
fn precedence((created, at, rule): &(UnixMillis, usize, &HttpRule)) -> impl Ord + use<> {
    let is_exact = matches!(rule.path, PathMatch::Exact(_));
    let length = match &rule.path {
        PathMatch::Exact(path) => path.len(),
        PathMatch::Prefix(prefix) => prefix.as_str().len(),
    };
    let conditions = (rule.method.is_some(), rule.headers.len(), rule.query.len());
    (Reverse((is_exact, length, conditions)), *created, rule.route.to_string(), *at)
}
