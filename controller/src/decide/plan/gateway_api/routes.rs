//! Pure: a route → its parents with their conditions, its hosts, and its rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    num::NonZeroU32,
};

use common::wire::{
    AppProtocol, GatewayHostKey, HttpRule, NamespacedName, PlainBackend, RouteBackend,
    WeightedBackend,
};
use kube::core::SelectorExt as _;
use serde_json::Value;

use super::hosts::{UsableListener, listener_key, route_hosts, usable_listeners};
use crate::model::cluster_state::{
    AllowedNamespaces, BackendProtocol, BackendSpec, ClusterState, GATEWAY_SERVICE, GatewayRouteId,
    GatewayRouteKind, GatewayRouteState, ParentPlan, ParentReference, PlannedCondition,
    RouteClaims, RoutePlan, RouteRejections, RouteRuleSpec, UnixMillis,
};

/// Port of the Services of Routes.
const ROUTE_PORT: u16 = 80;

/// Failure of a route at a parent, or of a reference to a backend: reason and message.
type RouteFailure = (&'static str, String);

/// Draft of a route: its listeners and hosts at the Gateways of Rouse, before routes of the other kind are considered.
#[derive(Clone, Debug)]
pub struct RouteDraft {
    created: UnixMillis,
    parents: Vec<ParentDraft>,
}

/// Draft of a route for one of its parents.
#[derive(Clone, Debug)]
struct ParentDraft {
    /// The reference as the spec has it.
    reference: Value,
    gateway: NamespacedName,
    /// Listeners of the Gateway, or the reason for which the route is attached to none of them.
    attachments: Result<Vec<RouteAttachment>, RouteFailure>,
}

/// Listener that a route is attached to.
#[derive(Clone, Debug)]
struct RouteAttachment {
    /// Name of the listener.
    name: Box<str>,
    /// Transport and host of the listener.
    key: GatewayHostKey,
    /// Hosts of the route there.
    hosts: BTreeSet<GatewayHostKey>,
}

impl RouteDraft {
    /// Creation time of the route.
    pub fn created(&self) -> UnixMillis {
        self.created
    }

    /// Hosts of the route at each listener.
    pub fn claims(&self) -> RouteClaims {
        let mut claims = RouteClaims::new();
        let attachments = self.parents.iter().flat_map(|it| it.attachments.iter().flatten());
        for it in attachments.filter(|it| !it.hosts.is_empty()) {
            claims.entry(it.key.clone()).or_default().extend(it.hosts.iter().cloned());
        }
        claims
    }
}

/// Drafts those of these routes that exist.
pub fn draft_routes(
    cluster: &ClusterState,
    ids: &BTreeSet<GatewayRouteId>,
) -> BTreeMap<GatewayRouteId, RouteDraft> {
    // Once for all: it plans each Gateway.
    let listeners = usable_listeners(cluster);
    let drafts = ids.iter().filter_map(|id| {
        let route = cluster.gateway_api.routes.get(id)?;
        let parents = route.parents.iter().filter_map(|parent| {
            let gateway = own_gateway(cluster, parent)?;
            let attachments = attach_to_listeners(cluster, (id, route), parent, &listeners);
            let (reference, gateway) = (parent.reference.clone(), gateway.clone());
            Some(ParentDraft { reference, gateway, attachments })
        });
        let (created, parents) = (route.meta.created, parents.collect());
        Some((id.clone(), RouteDraft { created, parents }))
    });
    drafts.collect()
}

/// Plans routes from their drafts, once the claims of the drafts are in the cluster state. The time of the plans is
/// `now`.
pub fn finish_routes(
    cluster: &ClusterState,
    drafts: BTreeMap<GatewayRouteId, RouteDraft>,
    now: UnixMillis,
) -> Vec<(GatewayRouteId, RoutePlan)> {
    let finished = drafts.into_iter().filter_map(|(id, draft)| {
        let route = cluster.gateway_api.routes.get(&id)?;
        let rejections = cluster.gateway_api.claims.rejections(&id);
        let plan = finish_route(cluster, (&id, route), draft, rejections, now);
        Some((id, plan))
    });
    finished.collect()
}

/// Makes the plan of a route from its draft, without the listeners at which an older route has its hosts.
fn finish_route(
    cluster: &ClusterState,
    (id, route): (&GatewayRouteId, &GatewayRouteState),
    draft: RouteDraft,
    rejections: Option<&RouteRejections>,
    now: UnixMillis,
) -> RoutePlan {
    let mut plan = RoutePlan { since: now, ..RoutePlan::default() };
    // Routes of other controllers cost no more than this.
    if draft.parents.is_empty() {
        return plan;
    }
    let (rules, resolved) = plan_rules(cluster, id, route);
    for ParentDraft { reference, gateway, attachments } in draft.parents {
        let accepted = attachments.and_then(|all| drop_rejected(all, rejections));
        let (attached, accepted) = match accepted {
            Ok(attached) => (attached, PlannedCondition::met("Accepted", "Accepted")),
            Err((reason, message)) => {
                (Vec::new(), PlannedCondition::failed("Accepted", reason, message))
            }
        };
        plan.hosts.extend(attached.iter().flat_map(|it| it.hosts.iter().cloned()));
        plan.parents.push(ParentPlan {
            reference,
            gateway,
            listeners: attached.into_iter().map(|it| it.name).collect(),
            conditions: [accepted, resolved.clone()],
        });
    }
    // A route without hosts has no rules in the table.
    plan.rules = if plan.hosts.is_empty() { Vec::new() } else { rules };
    plan
}

/// Drops the listeners at which a route is rejected. Fails if the route has no host at the others.
fn drop_rejected(
    mut attachments: Vec<RouteAttachment>,
    rejections: Option<&RouteRejections>,
) -> Result<Vec<RouteAttachment>, RouteFailure> {
    let rejections = rejections.into_iter().flatten();
    let rejections: BTreeMap<_, _> = rejections
        .filter(|(key, _)| attachments.iter().any(|attachment| attachment.key == **key))
        .collect();
    // One rival is named, that of the first listener: the status has room for one reason.
    let Some(rival) = rejections.values().next() else { return Ok(attachments) };
    attachments.retain(|it| !rejections.contains_key(&it.key));
    if attachments.iter().all(|it| it.hosts.is_empty()) {
        let message = format!("{rival} is older and has a hostname of the route at its listener");
        return Err(("HostnameConflict", message));
    }
    Ok(attachments)
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

/// Attaches a route to the listeners that a parent reference names.
fn attach_to_listeners(
    cluster: &ClusterState,
    (id, route): (&GatewayRouteId, &GatewayRouteState),
    parent: &ParentReference,
    all: &[UsableListener<'_>],
) -> Result<Vec<RouteAttachment>, RouteFailure> {
    if let Err(message) = &route.rules {
        return Err(("UnsupportedValue", message.to_string()));
    }
    let is_named = |it: &UsableListener<'_>| {
        Some(it.gateway) == parent.gateway.as_ref()
            && parent.section.as_ref().is_none_or(|section| *section == it.spec.name)
            && parent.port.is_none_or(|port| port == it.spec.port)
    };
    // In the order of the specification's reasons: the first condition that leaves no listener is stated.
    let mut listeners: Vec<UsableListener<'_>> = all.to_vec();
    listeners.retain(is_named);
    if listeners.is_empty() {
        let message = "no usable listener of the Gateway has this name and port".to_owned();
        return Err(("NoMatchingParent", message));
    }
    let (kind, namespace) = (id.kind, &id.name.namespace);
    listeners.retain(|it| it.kinds.contains(&kind) && admits_namespace(cluster, *it, namespace));
    if listeners.is_empty() {
        let kind = kind.name();
        let message =
            format!("no listener takes routes of kind {kind} of the namespace {namespace}");
        return Err(("NotAllowedByListeners", message));
    }
    let attached = listeners.into_iter().filter_map(|listener| {
        Some(RouteAttachment {
            name: listener.spec.name.clone(),
            key: listener_key(listener.spec),
            // Against all listeners, not only those that the route names: requests know no route.
            hosts: route_hosts(&route.hostnames, listener, all)?,
        })
    });
    let attached: Vec<RouteAttachment> = attached.collect();
    if attached.is_empty() {
        let message = "no hostname of the route is one of a listener".to_owned();
        return Err(("NoMatchingListenerHostname", message));
    }
    if attached.iter().all(|it| it.hosts.is_empty()) {
        let message = "more specific listeners have all hostnames of the route".to_owned();
        return Err(("NoMatchingListenerHostname", message));
    }
    Ok(attached)
}

/// Returns true if a listener takes routes of a namespace.
fn admits_namespace(cluster: &ClusterState, listener: UsableListener<'_>, namespace: &str) -> bool {
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
    id: &GatewayRouteId,
    route: &GatewayRouteState,
) -> (Vec<HttpRule>, PlannedCondition) {
    let mut resolved = PlannedCondition::met("ResolvedRefs", "ResolvedRefs");
    let mut rules = Vec::new();
    for rule in route.rules.iter().flatten() {
        let backends = plan_backends(cluster, id, rule, &mut resolved);
        // Each match has a precedence of its own, so that rules with several matches are divided.
        rules.extend(rule.matches.iter().map(|it| HttpRule {
            route: id.name.clone(),
            is_grpc: id.kind == GatewayRouteKind::Grpc,
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
    route: &GatewayRouteId,
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

/// Returns the backend that a reference names. Fails with the reason of the condition `ResolvedRefs`.
fn resolve_backend(
    cluster: &ClusterState,
    route: &GatewayRouteId,
    spec: &BackendSpec,
) -> Result<RouteBackend, RouteFailure> {
    let name = &spec.name;
    if *spec.kind != *"Service" {
        return Err(("InvalidKind", format!("backends of kind {} are not supported", spec.kind)));
    }
    let is_foreign = name.namespace != route.name.namespace;
    let from = (route.kind.name(), route.name.namespace.as_str());
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
    // A Service of a Route has no endpoints of its own: its requests are led by the rules of the Route.
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
    let Some(protocol) = backend_protocol(route.kind, *protocol) else {
        let kind = route.kind.name();
        let message = format!("the appProtocol of Service {name} is not supported for {kind}s");
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

/// Returns the protocol in which requests of a route go to a backend; `None`: they cannot go there.
fn backend_protocol(kind: GatewayRouteKind, protocol: BackendProtocol) -> Option<AppProtocol> {
    match (kind, protocol) {
        (_, BackendProtocol::Unstated) => Some(kind.usual_protocol()),
        (_, BackendProtocol::Stated(AppProtocol::H2c)) => Some(AppProtocol::H2c),
        (GatewayRouteKind::Http, BackendProtocol::Stated(AppProtocol::Http1)) => {
            Some(AppProtocol::Http1)
        }
        // gRPC needs HTTP/2.
        (GatewayRouteKind::Grpc, BackendProtocol::Stated(AppProtocol::Http1))
        | (_, BackendProtocol::Stated(AppProtocol::Tcp) | BackendProtocol::Unknown) => None,
    }
}
