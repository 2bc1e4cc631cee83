//! Pure: https for the names of services inside the cluster (`cluster-local-domain-tls`): the services that have it,
//! the hosts of their certificates, and the condition about these.
//!
//! As in Knative, plain http is served as well, and never redirected.

use std::sync::Arc;

use common::wire::{CertificateEntry, LOCAL_TLS_PORT, NamespacedName};

use super::routes::{placeholder_name, serves_tcp};
use crate::model::cluster_state::{
    AppState, ClusterState, ConditionReason, ConditionStatus, LocalCertificateState,
    RouteNameAllocation,
};

/// Reason of `CertificateProvisioned` where the setting is on and no certificate can be signed.
const NO_SIGNER: &str = "cluster-local-domain-tls has no effect here: certificates are signed on Kubernetes only, and \
                         sent only to activators whose streams have TLS";

/// Reason of `CertificateProvisioned` where a public name is served over HTTP for want of a certificate.
pub(super) const HTTP_DOWNGRADE: &str = "HTTPDowngrade";

/// Returns true if names inside the cluster serve https.
pub fn is_enabled(cluster: &ClusterState) -> bool {
    let settings = &cluster.settings;
    settings.signs_local_certificates && settings.config_maps.network.cluster_local_domain_tls
}

/// Returns the scheme of URLs with names inside the cluster. It does not wait for a certificate, as this is signed
/// within moments: the condition says when.
pub fn scheme(cluster: &ClusterState) -> &'static str {
    if is_enabled(cluster) { "https" } else { "http" }
}

/// Returns true if a name of a Route serves https inside the cluster. Raw TCP is passed on as it is.
pub fn serves_local_tls(
    app: &AppState,
    name: &NamespacedName,
    tag: Option<&str>,
    cluster: &ClusterState,
) -> bool {
    is_enabled(cluster) && !serves_tcp(app, name, tag, cluster)
}

/// Returns the names of a service inside the cluster, the longest first (knative/networking `pkg/ingress`,
/// `ExpandedHosts`).
pub fn local_hosts(service: &NamespacedName, cluster_domain: &str) -> [String; 3] {
    let shortest = format!("{}.{}", service.name, service.namespace);
    [format!("{shortest}.svc.{cluster_domain}"), format!("{shortest}.svc"), shortest]
}

/// Returns the entry of the RouteTable for the certificate of a service. While there is none, activators keep what they
/// have: another replica may have signed it.
pub fn certificate_entry(
    service: &NamespacedName,
    state: &LocalCertificateState,
) -> CertificateEntry {
    let material = state.material.as_ref().map(Arc::clone);
    CertificateEntry { name: service.with_port(LOCAL_TLS_PORT), material }
}

/// Returns the status of a Route's `CertificateProvisioned` as to the names inside the cluster; `None`: they serve no
/// https. `previous` is the present status, and stays while a controller that starts signs the certificates of names
/// again that were there before, but not once that is known to fail.
pub(super) fn route_status(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    previous: &ConditionStatus,
) -> Option<ConditionStatus> {
    // `None` leaves the condition to the public names.
    if !cluster.settings.config_maps.network.cluster_local_domain_tls {
        return None;
    }
    // True, since nothing will change it: as unknown or false it would keep the Route unready.
    if !cluster.settings.signs_local_certificates {
        let reason = ConditionReason::new("TLSNotEnabled", NO_SIGNER);
        return Some(ConditionStatus::True(Some(reason)));
    }
    // Raw TCP is passed on as it is, and needs no certificate of ours.
    let service = |allocation: &RouteNameAllocation| {
        let tag = allocation.tag.as_deref();
        let service =
            NamespacedName::new(name.namespace.clone(), placeholder_name(allocation, &name.name));
        (!serves_tcp(app, name, tag, cluster)).then_some(service)
    };
    let mut services = app.allocations().iter().filter_map(service).peekable();
    // A Route of which every name is raw TCP serves no https.
    services.peek()?;
    let is_signed = |service: &NamespacedName| {
        let state = cluster.local_certificates.get(service);
        state.is_some_and(|it| it.material.is_some() && it.failure.is_none())
    };
    let missing: Vec<NamespacedName> = services.filter(|service| !is_signed(service)).collect();
    let Some(first) = missing.first() else { return Some(ConditionStatus::True(None)) };
    // What is known of the signer goes before what an earlier controller has written.
    if let Some(failed) = missing.iter().find_map(|service| failed_status(service, cluster)) {
        return Some(failed);
    }
    // The first plan after a start comes before the requests for certificates.
    let is_signed_again = |service: &NamespacedName| {
        let state = cluster.local_certificates.get(service);
        state.map_or(cluster.is_starting, |it| it.is_from_start)
    };
    // A new name, as that of a tag, never had a certificate.
    let never_signed = missing.iter().find(|service| !is_signed_again(service));
    // A controller that starts signs all certificates again, and Routes must stay ready meanwhile.
    if never_signed.is_none() && was_signed(previous) {
        return Some(ConditionStatus::True(None));
    }
    let message = format!("Certificate {}-local is not ready.", never_signed.unwrap_or(first).name);
    Some(ConditionStatus::Unknown(Some(ConditionReason::new("CertificateNotReady", message))))
}

/// Returns true for a status of the whole Route in which all names inside the cluster had certificates. Public names may
/// have been served over HTTP beside them.
fn was_signed(previous: &ConditionStatus) -> bool {
    match previous {
        ConditionStatus::True(reason) => {
            reason.as_ref().is_none_or(|it| it.reason == HTTP_DOWNGRADE)
        }
        ConditionStatus::Unknown(_) | ConditionStatus::False(_) => false,
    }
}

/// Returns the status of a service whose certificate cannot be signed; `None`: no failure is known.
fn failed_status(service: &NamespacedName, cluster: &ClusterState) -> Option<ConditionStatus> {
    let state = cluster.local_certificates.get(service)?;
    let failure = state.failure.as_deref()?;
    let certificate = format!("Certificate {}-local", service.name);
    // This controller has signed it, and so knows its end.
    if state.material.is_some() {
        let message = format!("{certificate} has expired, and cannot be signed again: {failure}.");
        let reason = ConditionReason::new("CertificateProvisionFailed", message);
        return Some(ConditionStatus::False(reason));
    }
    // Another controller may have signed one, whose end is not known here.
    let kept = match state.is_from_start {
        true => " Activators keep a certificate that was signed before.",
        false => "",
    };
    let message = format!("{certificate} cannot be signed: {failure}.{kept}");
    Some(ConditionStatus::Unknown(Some(ConditionReason::new("CertificateNotReady", message))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_all_names_that_dns_resolves_for_clients_of_any_namespace() {
        let tagged = NamespacedName::new("shop", "blue-web");
        assert_eq!(
            local_hosts(&tagged, "c1.local"),
            ["blue-web.shop.svc.c1.local", "blue-web.shop.svc", "blue-web.shop"]
        );
    }
}
