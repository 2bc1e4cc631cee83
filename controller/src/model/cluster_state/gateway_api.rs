//! Pure: objects of the Gateway API as the API server holds them, and their plans.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
};

use common::wire::{
    AppProtocol, GatewayHostKey, HeaderChanges, HttpRule, NamespacedName, PathMatch,
    RequestRedirect, RuleTimeouts, UrlRewrite,
};
use kube::core::Selector;
use serde_json::Value;
use smol_str::SmolStr;

use super::{ObjectMetaSummary, UnixMillis};

mod host_claims;
mod route_kind;

pub use host_claims::{HostClaims, RouteClaims, RouteRejections};
pub use route_kind::{GatewayRouteId, GatewayRouteKind};

/// Name by which GatewayClasses choose Rouse (`spec.controllerName`), and by which statuses name it.
pub const GATEWAY_CONTROLLER: &str = "rouse.dev/gateway";
/// Service of the system namespace whose addresses Gateways have.
pub const GATEWAY_SERVICE: &str = "rouse-gateway";

/// Objects of the Gateway API, with the Services that routes may lead to.
#[derive(Clone, Debug, Default)]
pub struct ObservedGatewayApi {
    /// GatewayClasses that choose Rouse, by name.
    pub classes: BTreeMap<SmolStr, GatewayClassState>,
    /// Gateways of all classes: a class may be made after them.
    pub gateways: BTreeMap<NamespacedName, GatewayState>,
    /// HTTPRoutes and GRPCRoutes, of whatever Gateway.
    pub routes: BTreeMap<GatewayRouteId, GatewayRouteState>,
    /// ReferenceGrants of all namespaces.
    pub grants: BTreeMap<NamespacedName, ReferenceGrant>,
    /// Services of the cluster that are neither a Route's nor a Revision's.
    pub services: BTreeMap<NamespacedName, BackendService>,
    /// Addresses of the gateway, which each Gateway has.
    pub addresses: Vec<GatewayServiceAddress>,
    /// Hosts that listeners and routes have now, each with the routes that have rules for it.
    pub hosts: BTreeMap<GatewayHostKey, BTreeSet<GatewayRouteId>>,
    /// Hosts that routes claim at listeners, whether the route gets them or is rejected there.
    pub claims: HostClaims,
}

/// GatewayClass that chooses Rouse.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayClassState {
    /// Metadata of the object.
    pub meta: ObjectMetaSummary,
    /// True if it names parameters, of which Rouse has none.
    pub has_parameters: bool,
    /// Conditions that its status has.
    pub written: Vec<WrittenCondition>,
    /// Time of the last change of its plan.
    pub planned_since: UnixMillis,
}

/// Gateway of any class, with its listeners.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayState {
    /// Metadata of the object.
    pub meta: ObjectMetaSummary,
    /// Name of its class.
    pub class: SmolStr,
    /// True if it names parameters, of which Rouse has none.
    pub has_parameters: bool,
    /// True if it asks for addresses of its own.
    pub has_addresses: bool,
    /// Listeners, in the order of the spec.
    pub listeners: Vec<ListenerSpec>,
    /// Conditions that its status has, for the Gateway itself and for each listener.
    pub written: Vec<WrittenCondition>,
    /// Time of the last change of its plan.
    pub planned_since: UnixMillis,
}

/// Listener of a Gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenerSpec {
    /// Name within the Gateway.
    pub name: Box<str>,
    /// Host in lower case, perhaps a wildcard; `None`: all hosts.
    pub hostname: Option<SmolStr>,
    /// Port that clients connect to.
    pub port: u16,
    /// Protocol, such as `HTTP`.
    pub protocol: Box<str>,
    /// Settings of TLS; `None`: there are none.
    pub tls: Option<ListenerTls>,
    /// Namespaces whose routes may attach.
    pub namespaces: AllowedNamespaces,
    /// Group and kind of the routes that may attach; empty: those of the protocol.
    pub kinds: Vec<(Box<str>, Box<str>)>,
}

/// Settings of a listener for TLS.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListenerTls {
    /// True if the gateway ends TLS.
    pub is_terminated: bool,
    /// True if it asks for certificates of clients.
    pub validates_clients: bool,
    /// Kind, with its group if it has one, and name of each object with a certificate.
    pub certificates: Vec<(Box<str>, NamespacedName)>,
}

/// Namespaces whose routes may attach to a listener.
#[derive(Clone, Debug, PartialEq)]
pub enum AllowedNamespaces {
    /// The namespace of the Gateway.
    Same,
    /// All namespaces of the cluster.
    All,
    /// Namespaces with these labels; `None`: the selector cannot be read, and selects none.
    Selected(Option<Selector>),
}

/// HTTPRoute or GRPCRoute, with its last plan.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayRouteState {
    /// Metadata of the object.
    pub meta: ObjectMetaSummary,
    /// Parents that it asks to attach to.
    pub parents: Vec<ParentReference>,
    /// Hosts in lower case, perhaps wildcards; empty: those of the listeners.
    pub hostnames: Vec<SmolStr>,
    /// Rules. The error names a value that Rouse does not support.
    pub rules: Result<Vec<RouteRuleSpec>, Box<str>>,
    /// Entries of other controllers in `status.parents`, which stay as they are.
    pub foreign_parents: Vec<Value>,
    /// True if `status.parents` has entries of Rouse.
    pub has_own_parents: bool,
    /// Conditions that its status has of Rouse, for each parent.
    pub written: Vec<WrittenCondition>,
    /// Last plan of the route.
    pub plan: RoutePlan,
}

/// Reference of a route to a parent.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentReference {
    /// The reference as the spec has it.
    pub reference: Value,
    /// Gateway that it names; `None`: it names an object of another kind.
    pub gateway: Option<NamespacedName>,
    /// Listener that it names.
    pub section: Option<Box<str>>,
    /// Port of the listeners that it names.
    pub port: Option<u16>,
}

/// Rule of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteRuleSpec {
    /// Matches, at least one.
    pub matches: Vec<RouteMatchSpec>,
    /// Changes of the headers of requests.
    pub request_headers: HeaderChanges,
    /// Changes of the headers of responses.
    pub response_headers: HeaderChanges,
    /// Redirect; `None`: a backend responds.
    pub redirect: Option<RequestRedirect>,
    /// Change of the URL of requests; `None`: it stays.
    pub rewrite: Option<UrlRewrite>,
    /// Timeouts that the rule states for its requests.
    pub timeouts: RuleTimeouts,
    /// Backends that share the requests by weight.
    pub backends: Vec<BackendSpec>,
}

/// Match of a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteMatchSpec {
    /// Path or prefix that a request must have.
    pub path: PathMatch,
    /// Method that fits; `None`: all methods.
    pub method: Option<String>,
    /// Headers that a request must have, as name in lower case and value.
    pub headers: Vec<(String, String)>,
    /// Parameters that a query must have, as name and value.
    pub query: Vec<(String, String)>,
}

/// Reference of a rule to a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSpec {
    /// Share relative to the sum of all weights.
    pub weight: u32,
    /// Kind of the backend, such as `Service`, with its group if it has one.
    pub kind: Box<str>,
    /// Namespace and name of the backend.
    pub name: NamespacedName,
    /// Port of the Service.
    pub port: Option<NonZeroU16>,
    /// Changes of the headers of its requests.
    pub request_headers: HeaderChanges,
    /// Changes of the headers of its responses.
    pub response_headers: HeaderChanges,
}

/// Group, kind and name of an object that a ReferenceGrant permits to name; without a name: all of the kind.
type GrantedTarget = (Box<str>, Box<str>, Option<Box<str>>);

/// A ReferenceGrant: permission for objects of other namespaces to name those of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReferenceGrant {
    /// Group, kind and namespace of the objects that may name others.
    pub from: Vec<(Box<str>, Box<str>, Box<str>)>,
    /// Group, kind and name of the objects that may be named; `None`: all of the kind.
    pub to: Vec<GrantedTarget>,
}

/// A Service of the cluster, as far as routes may lead to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendService {
    /// ClusterIP; `None`: it has none.
    pub address: Option<IpAddr>,
    /// TCP ports, each with its protocol.
    pub ports: Box<[(NonZeroU16, BackendProtocol)]>,
}

/// Protocol of a Service's port, by its `appProtocol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendProtocol {
    /// The port states none: it is the usual one of the route that leads to it.
    Unstated,
    /// Protocol that the port states.
    Stated(AppProtocol),
    /// Protocol that Rouse does not speak.
    Unknown,
}

/// Address at which clients reach the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayServiceAddress {
    /// True for a host name, false for an IP address.
    pub is_hostname: bool,
    /// Host name or IP address, as text.
    pub value: Box<str>,
}

/// Condition in the status of an object, which keeps its time while it stays the same.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenCondition {
    /// Part of the object: a listener or a parent reference; empty for the object itself.
    pub part: String,
    /// Type of the condition.
    pub kind: Box<str>,
    /// Value of the condition.
    pub is_true: bool,
    /// Time of its last change, as the object has it.
    pub since: Box<str>,
}

/// Condition that is planned for an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedCondition {
    /// Type of the condition.
    pub kind: &'static str,
    /// Value of the condition.
    pub is_true: bool,
    /// Reason in one word.
    pub reason: &'static str,
    /// Explanation for users; empty: the reason is enough.
    pub message: String,
}

/// Plan of a route: its parents, hosts and rules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutePlan {
    /// Parents that are Gateways of Rouse.
    pub parents: Vec<ParentPlan>,
    /// Hosts for which the route has rules.
    pub hosts: BTreeSet<GatewayHostKey>,
    /// Rules for each of the hosts: one for each match, in the order of the spec.
    pub rules: Vec<HttpRule>,
    /// Time at which the plan changed last.
    pub since: UnixMillis,
}

/// Plan of a route for one of its parents.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentPlan {
    /// The reference as the spec has it.
    pub reference: Value,
    /// Gateway that it names.
    pub gateway: NamespacedName,
    /// Listeners that the route is attached to.
    pub listeners: Vec<Box<str>>,
    /// Conditions `Accepted` and `ResolvedRefs`.
    pub conditions: [PlannedCondition; 2],
}

impl ObservedGatewayApi {
    /// Returns true if a class chooses Rouse, or plans are left of one that did.
    pub fn is_in_use(&self) -> bool {
        let mut routes = self.routes.values();
        !self.classes.is_empty()
            || !self.hosts.is_empty()
            || routes.any(|it| !it.plan.parents.is_empty())
    }

    /// Returns true if a Gateway is of a class that chooses Rouse.
    pub fn is_own(&self, gateway: &GatewayState) -> bool {
        self.classes.contains_key(&gateway.class)
    }

    /// Returns the Gateways of classes that choose Rouse.
    pub fn own_gateways(&self) -> impl Iterator<Item = (&NamespacedName, &GatewayState)> {
        self.gateways.iter().filter(|(_, it)| self.is_own(it))
    }

    /// Returns the routes of Rouse's Gateways with a rule that names a Service.
    pub fn routes_to(&self, service: &NamespacedName) -> BTreeSet<GatewayRouteId> {
        let names_it = |route: &GatewayRouteState| {
            let mut backends = route.rules.iter().flatten().flat_map(|it| &it.backends);
            !route.plan.parents.is_empty() && backends.any(|it| it.name == *service)
        };
        self.routes.iter().filter(|(_, it)| names_it(it)).map(|(id, _)| id.clone()).collect()
    }

    /// Returns true if a ReferenceGrant lets objects of the Gateway API, of this kind and namespace, name the object
    /// `to`. The grant is in the namespace of `to`, whose kind is one of the core group.
    pub fn is_granted(
        &self,
        (from_kind, from): (&str, &str),
        (to_kind, to): (&str, &NamespacedName),
    ) -> bool {
        // The map is in the order of namespaces, so only grants of this one are read.
        let start = NamespacedName::new(to.namespace.clone(), "");
        let grants = self.grants.range(start..).take_while(|(it, _)| it.namespace == to.namespace);
        grants.map(|(_, it)| it).any(|grant| {
            let from = grant.from.iter().any(|(group, kind, namespace)| {
                **group == *GATEWAY_GROUP && **kind == *from_kind && **namespace == *from
            });
            let to = grant.to.iter().any(|(group, kind, name)| {
                // A grant without a name is for all objects of the kind.
                let is_named = name.as_deref().is_none_or(|it| *it == *to.name);
                group.is_empty() && **kind == *to_kind && is_named
            });
            from && to
        })
    }
}

/// Group of the Gateway API.
pub const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

impl PlannedCondition {
    /// Returns a condition that is true, with its usual reason.
    pub fn met(kind: &'static str, reason: &'static str) -> Self {
        Self { kind, is_true: true, reason, message: String::new() }
    }

    /// Returns a condition that is false.
    pub fn failed(kind: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, is_true: false, reason, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_for_one_kind_and_namespace_each_way() {
        let text = |text: &str| -> Box<str> { text.into() };
        let grant = |from_kind: &str, to_name: Option<&str>| ReferenceGrant {
            from: vec![(text(GATEWAY_GROUP), text(from_kind), text("web"))],
            to: vec![(text(""), text("Service"), to_name.map(text))],
        };
        let mut all = ObservedGatewayApi::default();
        let name = NamespacedName::new("data", "grant");
        let service = NamespacedName::new("data", "db");
        for (from_kind, to_name, expected) in [
            ("HTTPRoute", None, true),
            ("HTTPRoute", Some("db"), true),
            ("HTTPRoute", Some("other"), false),
            ("Gateway", None, false),
        ] {
            all.grants.insert(name.clone(), grant(from_kind, to_name));
            assert_eq!(
                all.is_granted(("HTTPRoute", "web"), ("Service", &service)),
                expected,
                "{from_kind} {to_name:?}"
            );
            assert!(!all.is_granted(("HTTPRoute", "other"), ("Service", &service)));
            assert!(!all.is_granted(("HTTPRoute", "web"), ("Secret", &service)));
        }
        all.grants.clear();
        // A grant of another namespace says nothing about this one.
        all.grants.insert(NamespacedName::new("web", "grant"), grant("HTTPRoute", None));
        assert!(!all.is_granted(("HTTPRoute", "web"), ("Service", &service)));
    }
}
