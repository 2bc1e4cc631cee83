//! Pure: DomainMappings, further host names of services, each claimed for one namespace (knative/serving
//! `pkg/reconciler/domainmapping` at 98e5ef9).

use common::wire::{MappedDomain, NamespacedName};

use super::{client_cas, routes};
use crate::model::cluster_state::{
    AppState, ClusterState, ConditionReason, ConditionStatus, ConditionType, DomainClaimState,
    DomainMappingState, UnixMillis,
    name_registry::{NameClaim, NameClaimant},
};

/// Returns the status of `DomainClaimed`: if the mapping's namespace may use the domain.
fn claimed_status(cluster: &ClusterState, name: &NamespacedName) -> ConditionStatus {
    match cluster.domains.claims.get(name.name.as_str()) {
        Some(DomainClaimState { namespace, .. }) if *namespace == name.namespace => {
            ownership_status(cluster, name)
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
            format!("no ClusterDomainClaim found for domain {:?}", name.name),
        )),
    }
}

/// Returns a false status if a Route had the host first, unless the mapping refers to that very Route.
fn ownership_status(cluster: &ClusterState, name: &NamespacedName) -> ConditionStatus {
    let own_target = cluster.domains.mappings.get(name).map(|it| &it.target);
    match host_owner(cluster, name) {
        Some(claim)
            if claim.claimant != NameClaimant::Mapping(name.clone())
                && Some(&claim.service) != own_target =>
        {
            let message = format!("The domain name is already in use by {}", claim.claimant);
            ConditionStatus::False(ConditionReason::new("DomainAlreadyClaimed", message))
        }
        Some(_) | None => ConditionStatus::True(None),
    }
}

fn host_owner<'a>(cluster: &'a ClusterState, name: &NamespacedName) -> Option<&'a NameClaim> {
    cluster.names.registry.host_owner(&name.name.to_ascii_lowercase(), &cluster.names.placeholders)
}

/// Returns the app that the mapping refers to, or the reason why there is none.
fn resolve_target<'a>(
    cluster: &'a ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Result<&'a AppState, ConditionReason> {
    let refused = |message: String| Err(ConditionReason::new("ResolveFailed", message));
    let DomainMappingState { target_resource: kind, target, .. } = mapping;
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

/// Returns the status of `ReferenceResolved` as far as the protocol of the target decides it: only HTTP names a host,
/// except within TLS that is passed through.
fn protocol_status(cluster: &ClusterState, mapping: &DomainMappingState) -> ConditionStatus {
    let target = format!("{} {:?}", mapping.target_resource, mapping.target.name);
    let message = match (target_serves_tcp(cluster, mapping), mapping.passes_tls) {
        (true, false) => format!("{target} speaks raw TCP, and only HTTP names a domain"),
        (false, true) => {
            format!("{target} speaks HTTP, and TLS is passed through to raw TCP only")
        }
        (true, true) if mapping.client_auth.is_some() => {
            "The gateway cannot ask for client certificates in TLS that it passes through".into()
        }
        (true, true) | (false, false) => return ConditionStatus::True(None),
    };
    ConditionStatus::False(ConditionReason::new("ResolveFailed", message))
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
        Ok(_) => protocol_status(cluster, mapping),
    };
    let certificate = client_cas::tls_status(cluster, name, mapping, now);
    let conditions = &mut mapping.conditions;
    conditions.set(ConditionType::DomainClaimed, claimed_status(cluster, name), now);
    conditions.set(ConditionType::DomainReference, resolved, now);
    let configured =
        conditions.summarize(&[ConditionType::DomainClaimed, ConditionType::DomainReference]);
    let ingress = match configured {
        ConditionStatus::True(_) => ConditionStatus::True(None),
        ConditionStatus::False(_) | ConditionStatus::Unknown(_) => ConditionStatus::Unknown(Some(
            ConditionReason::new("IngressNotConfigured", "Ingress has not yet been reconciled."),
        )),
    };
    conditions.set(ConditionType::DomainIngress, ingress, now);
    conditions.set(ConditionType::DomainCertificate, certificate, now);
    let dependents = [
        ConditionType::DomainCertificate,
        ConditionType::DomainClaimed,
        ConditionType::DomainIngress,
        ConditionType::DomainReference,
    ];
    let ready = conditions.summarize(&dependents);
    conditions.set(ConditionType::DomainReady, ready, now);
}

/// Returns the domains mapped to the service of this name, in order: those whose TLS is passed through, or all others.
pub(super) fn mapped_domains(
    cluster: &ClusterState,
    service: &NamespacedName,
    passes_tls: bool,
) -> Vec<MappedDomain> {
    let all = cluster.domains.mappings_by_target.get(service).into_iter().flatten();
    let in_force = |(name, mapping): &(&NamespacedName, &DomainMappingState)| {
        // The target's own host may equal the domain: the Route has it already, and needs no second entry. But a rule
        // for clients counts on that host too, which the Route would serve to all.
        host_owner(cluster, name).is_some_and(|it| {
            it.claimant == NameClaimant::Mapping((*name).clone())
                || (it.service == mapping.target && mapping.client_auth.is_some())
        }) && matches!(claimed_status(cluster, name), ConditionStatus::True(_))
            && resolve_target(cluster, name, mapping).is_ok()
            && mapping.passes_tls == passes_tls
            // A demand that the gateway cannot make must open no host.
            && !(passes_tls && mapping.client_auth.is_some())
    };
    let mappings = all.filter_map(|name| Some((name, cluster.domains.mappings.get(name)?)));
    let certificate = |name: &NamespacedName, mapping: &DomainMappingState| {
        let secret = mapping.served_secret.as_deref()?;
        Some(NamespacedName::new(name.namespace.clone(), secret))
    };
    let domain = |(name, mapping): (&NamespacedName, &DomainMappingState)| MappedDomain {
        passes_tls,
        host: name.name.to_ascii_lowercase(),
        host_rewrite: None,
        redirects_to_https: routes::is_http_redirected(mapping.http_protocol.as_deref(), cluster),
        certificate: certificate(name, mapping),
        client_auth: client_cas::client_auth(&name.namespace, mapping),
        hsts: mapping.hsts.clone(),
    };
    mappings.filter(in_force).map(domain).collect()
}
