//! Pure: DomainMappings, further host names of services, each claimed for one namespace (knative/serving
//! `pkg/reconciler/domainmapping` at 98e5ef9).

use std::collections::BTreeSet;

use common::wire::{
    DomainProtocol, MappedDomain, NamespacedName, PathPrefix, PathRule, wildcard_suffix,
};

use super::{client_cas, host_certificates, requested_certificates::mapping_certificate, routes};
use crate::model::cluster_state::{
    AppState, ClusterState, ConditionReason, ConditionStatus, ConditionType, DomainClaimState,
    DomainMappingState, DomainSpec, UnixMillis,
    name_registry::{NameClaim, NameClaimant},
};

/// Returns the status of `DomainClaimed`: if the mapping's namespace may use the domain, and no other object has its
/// paths.
fn claimed_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> ConditionStatus {
    let domain = &mapping.domain;
    if let Some(fault) = &domain.fault {
        return ConditionStatus::False(ConditionReason::new(
            "DomainClaimFailed",
            fault.to_string(),
        ));
    }
    match cluster.domains.claims.get(domain.claim_name()) {
        Some(DomainClaimState { namespace, .. }) if *namespace == name.namespace => {
            ownership_status(cluster, name, mapping)
        }
        Some(_) => ConditionStatus::False(ConditionReason::new(
            "DomainAlreadyClaimed",
            "The domain name is already in use by another DomainMapping",
        )),
        // The controller creates the claim itself, and a watch will report it.
        None if cluster.settings.config_maps.network.autocreate_claims => {
            ConditionStatus::Unknown(None)
        }
        None => ConditionStatus::False(ConditionReason::new(
            "DomainClaimFailed",
            format!("no ClusterDomainClaim found for domain {:?}", domain.claim_name()),
        )),
    }
}

/// Returns a false status if a Route had the host first, unless the mapping is for all of its paths and refers to that
/// very Route. The same holds if another mapping had the same prefix of the host first.
fn ownership_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> ConditionStatus {
    let used = |what: String, owner: &NameClaimant| {
        let message = format!("{what} is already in use by {owner}");
        ConditionStatus::False(ConditionReason::new("DomainAlreadyClaimed", message))
    };
    let domain = &mapping.domain;
    // The mappings of a host are of one namespace, and share it. The host of a Route is not shared: a mapping of a part
    // must not withdraw the rule for clients of the one that has all paths.
    if let Some(NameClaim { claimant, .. }) = route_with_host(cluster, &domain.host)
        && !is_free_of_routes(cluster, mapping)
    {
        return used("The domain name".to_owned(), claimant);
    }
    match host_owner(cluster, &domain.rule_name()) {
        Some(claim) if claim.claimant != NameClaimant::Mapping(name.clone()) => {
            let what = format!("The path prefix {} of {}", domain.prefix, domain.host);
            used(what, &claim.claimant)
        }
        Some(_) | None => ConditionStatus::True(None),
    }
}

/// Returns true if a mapping's namespace may use its host, from which no Route keeps it.
pub(super) fn has_host(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> bool {
    let domain = &mapping.domain;
    let claim = cluster.domains.claims.get(domain.claim_name());
    let is_claimed = claim.is_some_and(|it| it.namespace == *name.namespace);
    domain.fault.is_none() && is_claimed && is_free_of_routes(cluster, mapping)
}

fn host_owner<'a>(cluster: &'a ClusterState, host: &str) -> Option<&'a NameClaim> {
    cluster.names.registry.host_owner(host, &cluster.names.placeholders)
}

/// Returns the claim of the Route that has a host; `None`: no Route has it.
fn route_with_host<'a>(cluster: &'a ClusterState, host: &str) -> Option<&'a NameClaim> {
    host_owner(cluster, host).filter(|it| matches!(it.claimant, NameClaimant::Route(_)))
}

/// Returns true if no Route had the host of a mapping first, or if the mapping is for all paths of that very Route.
fn is_free_of_routes(cluster: &ClusterState, mapping: &DomainMappingState) -> bool {
    let domain = &mapping.domain;
    route_with_host(cluster, &domain.host)
        .is_none_or(|it| domain.prefix == PathPrefix::ALL && it.service == mapping.target)
}

/// Returns the mapping whose rule for certificates of clients all mappings of the host have: the oldest one that has a
/// rule. One that a Route keeps from the host decides nothing there.
fn client_auth_lead<'a>(
    cluster: &'a ClusterState,
    namespace: &str,
    host: &str,
) -> Option<(&'a NamespacedName, &'a DomainMappingState)> {
    let all = cluster.domains.mappings_of_host(namespace, host).into_iter();
    let mut with_rule = all.filter(|(_, it)| it.client_auth.is_some());
    with_rule.find(|(_, it)| is_free_of_routes(cluster, it))
}

/// Returns the path rule of a mapping. `None`: it has the host for itself, which has no wildcard.
fn path_rule(cluster: &ClusterState, namespace: &str, domain: &DomainSpec) -> Option<PathRule> {
    // No other mapping shares the host of a Route.
    let is_shared = route_with_host(cluster, &domain.host).is_none();
    is_shared.then(|| cluster.domains.path_rule(namespace, domain)).flatten()
}

/// Returns the status of a mapping's `CertificateProvisioned`, as [`client_cas::tls_status`] does. It is false if another
/// mapping of the host has decided otherwise.
pub fn tls_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    now: UnixMillis,
) -> ConditionStatus {
    let (namespace, host) = (&name.namespace, &mapping.domain.host);
    let differs = |what: &str, lead: &NamespacedName| {
        let message = format!(
            "{what} differs from that of DomainMapping \"{lead}\", which has the same host and is \
             older: all paths of a host have the same."
        );
        ConditionStatus::False(ConditionReason::new("HostTLSConflict", message))
    };
    // A handshake knows the host and not the path, so mappings of one host cannot differ in it.
    if let Some(lead) = client_auth_conflict(cluster, name, mapping) {
        return differs("The demand for certificates of clients", lead);
    }
    match cluster.domains.certificate_lead(namespace, host) {
        Some((lead, it)) if mapping.tls_secret.is_some() && it.tls_secret != mapping.tls_secret => {
            differs("spec.tls", lead)
        }
        Some(_) | None => client_cas::tls_status(cluster, name, mapping, now),
    }
}

/// Returns the mapping of the same host whose demand for certificates of clients is in force, and differs from the
/// demand of this mapping. This one serves nothing then.
fn client_auth_conflict<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Option<&'a NamespacedName> {
    let lead = client_auth_lead(cluster, &name.namespace, &mapping.domain.host);
    let (lead, it) = lead.filter(|_| mapping.client_auth.is_some())?;
    (it.client_auth != mapping.client_auth).then_some(lead)
}

/// Returns the app that the mapping refers to, or the reason why there is none.
fn resolve_target<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Result<&'a AppState, ConditionReason> {
    let refused = |message: String| Err(ConditionReason::new("ResolveFailed", message));
    let DomainMappingState { target_resource: kind, target, .. } = mapping;
    // A claim is for one namespace, so a mapping must not lead its host into another.
    if target.namespace != name.namespace {
        return refused(format!("{kind} {target} must be in namespace {:?}", name.namespace));
    }
    let owner = cluster.app_of_route_name(target).and_then(|it| cluster.apps.get(&it));
    // `apps` has no names of tags: a Service or Route of Knative is found by its own name only.
    let target_exists = match (&**kind, owner) {
        (_, None) => false,
        ("services.serving.knative.dev", Some(app)) => {
            app.service.is_some() && cluster.apps.contains_key(target)
        }
        ("routes.serving.knative.dev", Some(_)) => cluster.apps.contains_key(target),
        // A Kubernetes Service that is the placeholder of a Route or a tag.
        ("services", Some(_)) => true,
        (_, Some(_)) => false,
    };
    match owner {
        // With a deletion that goes on to the pods, the target counts as gone. On Kubernetes it still serves.
        Some(app) if target_exists && !app.cascades_deletion(cluster.settings.platform) => Ok(app),
        _ if matches!(
            &**kind,
            "services.serving.knative.dev" | "routes.serving.knative.dev" | "services"
        ) =>
        {
            refused(format!("{kind} {:?} not found", target.name))
        }
        _ => refused(format!(
            "{kind} {:?} cannot receive requests: refer to a Knative Service or Route",
            target.name
        )),
    }
}

/// Returns true if the name of a Route to which the mapping refers serves raw TCP.
fn target_serves_tcp(cluster: &ClusterState, mapping: &DomainMappingState) -> bool {
    let Some(route) = cluster.app_of_route_name(&mapping.target) else { return false };
    let Some(app) = cluster.apps.get(&route) else { return false };
    let mut names = app.allocations().iter();
    let target = names.find(|it| routes::placeholder_name(it, &route.name) == mapping.target.name);
    target.is_some_and(|it| routes::serves_tcp(app, &route, it.tag.as_deref(), cluster))
}

/// Returns the status of `ReferenceResolved` as far as the protocol of the target decides it.
fn protocol_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> ConditionStatus {
    let serves_tcp = target_serves_tcp(cluster, mapping);
    match protocol_fault(cluster, name, mapping, serves_tcp) {
        None => ConditionStatus::True(None),
        Some(message) => ConditionStatus::False(ConditionReason::new("ResolveFailed", message)),
    }
}

/// Returns the reason for which the host of a mapping cannot lead to a target that serves raw TCP, or HTTP. HTTP names a
/// host; with raw TCP only the handshake of TLS does, which shows no path.
fn protocol_fault(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    serves_tcp: bool,
) -> Option<String> {
    let target = format!("{} {:?}", mapping.target_resource, mapping.target.name);
    let (domains, host) = (&cluster.domains, &mapping.domain.host);
    match (serves_tcp, mapping.passes_tls) {
        (false, false) => return None,
        (false, true) => {
            let rule = "TLS is passed through to raw TCP only";
            return Some(format!("{target} speaks HTTP, and {rule}"));
        }
        // A demand that the gateway cannot make must open no host.
        (true, true) if client_auth_lead(cluster, &name.namespace, host).is_some() => {
            let text =
                "The gateway cannot ask for client certificates in TLS that it passes through";
            return Some(text.to_owned());
        }
        (true, false) if !has_certificate(cluster, name, mapping) => {
            let rule = "has a domain only within TLS: set spec.tls, or rouse.dev/tls: passthrough";
            return Some(format!("{target} speaks raw TCP, which {rule}"));
        }
        (true, _) => {}
    }
    // Raw TCP gets whole connections. A path prefix on the same host would need requests to choose by.
    let all = domains.mappings_of_host(&name.namespace, host);
    let (ruled, _) = all.into_iter().find(|(_, it)| it.domain.prefix != PathPrefix::ALL)?;
    Some(format!(
        "{target} speaks raw TCP, which has no paths, and DomainMapping \"{ruled}\" has a path \
         prefix of {host}"
    ))
}

/// Returns true if a mapping's host has a certificate of its own: one that a mapping of the host names, or one that is
/// requested.
fn has_certificate(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> bool {
    let named = cluster.domains.certificate_lead(&name.namespace, &mapping.domain.host);
    named.is_some() || mapping_certificate(cluster, name, mapping).is_some()
}

/// Sets all conditions of a mapping.
pub fn update_conditions(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &mut DomainMappingState,
    now: UnixMillis,
) {
    let target = resolve_target(cluster, name, mapping);
    let resolved = match &target {
        Err(reason) => ConditionStatus::False(reason.clone()),
        Ok(app) if app.traffic().is_empty() => ConditionStatus::False(ConditionReason::new(
            "ResolveFailed",
            format!("address not set for {} {:?}", mapping.target_resource, mapping.target.name),
        )),
        Ok(_) => protocol_status(cluster, name, mapping),
    };
    let certificate = tls_status(cluster, name, mapping, now);
    let claimed = claimed_status(cluster, name, mapping);
    let conditions = &mut mapping.conditions;
    conditions.set(ConditionType::DomainClaimed, claimed, now);
    conditions.set(ConditionType::DomainReference, resolved, now);
    let configured =
        conditions.summarize(&[ConditionType::DomainClaimed, ConditionType::DomainReference]);
    // As in Knative, whose ingress is reconciled only once the domain is claimed and its target is known.
    let ingress = match configured {
        ConditionStatus::True(_) => ConditionStatus::True(None),
        ConditionStatus::False(_) | ConditionStatus::Unknown(_) => ConditionStatus::Unknown(Some(
            ConditionReason::new("IngressNotConfigured", "Ingress has not yet been reconciled."),
        )),
    };
    conditions.set(ConditionType::DomainIngress, ingress, now);
    conditions.set(ConditionType::DomainCertificate, certificate, now);
    // A requested certificate that is missing is no obstacle where HTTP is served: its status is true then.
    let dependents = [
        ConditionType::DomainCertificate,
        ConditionType::DomainClaimed,
        ConditionType::DomainIngress,
        ConditionType::DomainReference,
    ];
    let ready = conditions.summarize(&dependents);
    conditions.set(ConditionType::DomainReady, ready, now);
}

/// Returns the domains mapped to the service of this name, in order. `serves_tcp`: the service is one of raw TCP.
pub(super) fn mapped_domains(
    cluster: &ClusterState,
    service: &NamespacedName,
    serves_tcp: bool,
) -> Vec<MappedDomain> {
    let all = cluster.domains.mappings_by_target.get(service).into_iter().flatten();
    let in_force = |(name, mapping): &(&NamespacedName, &DomainMappingState)| {
        // The target's own host may equal the domain: the Route has it already, and needs no second entry. But a rule
        // for clients counts on that host too, which the Route would serve to all. With raw TCP, the Route has none.
        host_owner(cluster, &mapping.domain.host).is_some_and(|it| match it.claimant {
            NameClaimant::Mapping(_) => true,
            NameClaimant::Route(_) => {
                it.service == mapping.target && (mapping.client_auth.is_some() || serves_tcp)
            }
        }) && matches!(claimed_status(cluster, name, mapping), ConditionStatus::True(_))
            && resolve_target(cluster, name, mapping).is_ok()
            && client_auth_conflict(cluster, name, mapping).is_none()
            && protocol_fault(cluster, name, mapping, serves_tcp).is_none()
    };
    let mappings = all.filter_map(|name| Some((name, cluster.domains.mappings.get(name)?)));
    let mapped = |(name, it)| mapped_domain(cluster, name, it, serves_tcp);
    mappings.filter(in_force).map(mapped).collect()
}

/// Returns the reserved hosts below the wildcards of these domains, in order.
pub fn reserved_hosts(cluster: &ClusterState, domains: &[MappedDomain]) -> Vec<String> {
    let wildcards: BTreeSet<&str> =
        domains.iter().filter_map(|it| wildcard_suffix(&it.host)).collect();
    // Most Routes have no wildcard, and need no walk over all mappings.
    if wildcards.is_empty() {
        return Vec::new();
    }
    let is_covered = |host: &str| {
        let below = host.find('.').is_some_and(|at| wildcards.contains(&host[at..]));
        below && wildcard_suffix(host).is_none()
    };
    let domains = &cluster.domains;
    let all = domains.mappings_by_host.keys();
    let reserved = all.filter(|host| is_covered(host) && domains.is_reserved_host(host));
    reserved.map(ToString::to_string).collect()
}

/// Returns a mapping in force for the RouteTable. All mappings of a host have the same certificate and the same rule for
/// certificates of clients.
fn mapped_domain(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    serves_tcp: bool,
) -> MappedDomain {
    let (domains, domain, namespace) = (&cluster.domains, &mapping.domain, &name.namespace);
    let certificate = match domains.certificate_lead(namespace, &domain.host) {
        Some((_, lead)) => {
            let secret = lead.served_secret.as_deref();
            secret.map(|it| NamespacedName::new(namespace.clone(), it))
        }
        None => host_certificates::secret_of_mapping(cluster, name, mapping),
    };
    // Also for a mapping without a demand of its own: the handshake cannot know which path follows.
    let client_auth = client_auth_lead(cluster, namespace, &domain.host)
        .and_then(|(_, lead)| client_cas::client_auth(namespace, lead));
    // A mapping of HTTP that passes TLS through has a fault.
    let protocol = match (serves_tcp, mapping.passes_tls) {
        (false, _) => DomainProtocol::Http,
        (true, false) => DomainProtocol::TcpOverTls,
        (true, true) => DomainProtocol::TlsPassthrough,
    };
    let is_redirected = routes::is_http_redirected(mapping.http_protocol.as_deref(), cluster);
    MappedDomain {
        host: domain.host.to_string(),
        host_rewrite: None,
        redirects_to_https: is_redirected && !serves_tcp,
        certificate,
        client_auth,
        hsts: mapping.hsts.clone(),
        path_rule: path_rule(cluster, namespace, domain),
        protocol,
    }
}
