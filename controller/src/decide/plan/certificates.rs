//! Pure: certificates of domains: Secrets that are named, the one that serves a domain, and the condition about it.

use std::{collections::BTreeSet, sync::Arc};

use common::{
    certificates::{CertificateFacts, CertificateValidity, ValidityState, may_replace},
    wire::{CertificateEntry, NamespacedName, is_secret_name},
};

use super::{gateway_api, host_certificates, requested_certificates};
use crate::model::cluster_state::{
    CertificateState, ClusterState, ConditionReason, ConditionStatus, ConditionType,
    DomainMappingState, SecretReadState, UnixMillis, rfc3339_of_seconds,
};

/// Returns the Secrets whose certificates are in use or asked for: those of mappings, those of `config-network`, those
/// of requested certificates that were issued, and those of listeners of Gateways. A mapping that is being deleted serves
/// its domain until its finalizers have ended, and so keeps the certificate of its Secret.
pub fn named_secrets(cluster: &ClusterState) -> BTreeSet<NamespacedName> {
    let mappings = cluster.domains.mappings.iter();
    let of_mappings = mappings.flat_map(|(name, it)| secrets_of_mapping(&name.namespace, it));
    let is_requested = requested_certificates::is_enabled(cluster);
    let requested = is_requested.then(|| cluster.requests.issued_secrets());
    let requested = requested.into_iter().flatten().filter(|it| is_secret_name(&it.name));
    let of_listeners = gateway_api::listener_secrets(cluster);
    let all = of_mappings.chain(cluster.settings.shared_certificates()).chain(requested);
    all.chain(of_listeners).collect()
}

/// Returns the Secret that a mapping names, and the one that serves its domain. They may be the same.
pub fn secrets_of_mapping(
    namespace: &str,
    mapping: &DomainMappingState,
) -> impl Iterator<Item = NamespacedName> {
    let all = mapping.tls_secret.as_deref().into_iter().chain(mapping.served_secret.as_deref());
    all.filter(|it| is_secret_name(it)).map(move |it| NamespacedName::new(namespace, it))
}

/// Returns the Secret whose certificate is to serve a mapping's domain from now on. It is the named one, unless the
/// former one has a certificate that the other may not replace. `None`: the mapping has no `spec.tls`, or names what
/// cannot be a Secret.
pub fn next_served_secret(
    cluster: &ClusterState,
    namespace: &str,
    mapping: &DomainMappingState,
    now: UnixMillis,
) -> Option<Box<str>> {
    let named = mapping.tls_secret.as_deref()?;
    let former = mapping.served_secret.as_deref().filter(|it| *it != named);
    let validity = |secret: &str| validity_in_force(cluster, namespace, secret);
    // A change of the name must not replace a valid certificate by none, or by one that is not valid yet.
    let keeps_former = former.and_then(validity).is_some_and(|held| {
        validity(named).is_none_or(|next| !may_replace(held, next, now.seconds()))
    });
    let served = if keeps_former { former } else { Some(named).filter(|it| is_secret_name(it)) };
    served.map(Into::into)
}

/// Returns the status of a mapping's `CertificateProvisioned`. Texts are Knative's where it has the case; Knative does
/// not look into Secrets.
pub fn certificate_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    now: UnixMillis,
) -> ConditionStatus {
    // Without a Secret of the user, the certificate may be requested.
    let Some(secret) = mapping.tls_secret.as_deref() else {
        let previous = mapping.conditions.get(ConditionType::DomainCertificate);
        return host_certificates::mapping_status(cluster, name, mapping, &previous, now);
    };
    let kept = kept_note(cluster, &name.namespace, mapping);
    if !is_secret_name(secret) {
        let fault = "its name is no DNS subdomain";
        return provision_failed(format!("Secret {secret:?} cannot be used: {fault}.{kept}"));
    }
    let pending = || not_ready(format!("Certificate {secret} is not ready."));
    let Some(state) = secret_state(cluster, &name.namespace, secret) else { return pending() };
    match (&state.last_read, &state.in_force) {
        (SecretReadState::Pending, _) | (SecretReadState::InForce, None) => pending(),
        (SecretReadState::Unreadable(error), _) => {
            not_ready(format!("Secret {secret:?} cannot be read: {error}.{kept}"))
        }
        (SecretReadState::Absent, _) => {
            provision_failed(format!("Secret {secret:?} does not exist.{kept}"))
        }
        (SecretReadState::Refused(fault), _) => {
            provision_failed(format!("Secret {secret:?} cannot be used: {fault}.{kept}"))
        }
        (SecretReadState::InForce, Some(certificate)) => {
            let host = &mapping.domain.host;
            let is_served = mapping.served_secret.as_deref() == Some(secret);
            let kept = if is_served { "" } else { kept };
            status_in_force(secret, host, (&certificate.facts, kept), now)
        }
    }
}

/// Returns the status for a host whose certificate is in force, by the hosts and the validity of the certificate. The
/// text `kept` ends the message if another certificate serves the domain.
fn status_in_force(
    secret: &str,
    host: &str,
    (facts, kept): (&CertificateFacts, &str),
    now: UnixMillis,
) -> ConditionStatus {
    let certificate = format!("The certificate of Secret {secret:?}");
    match facts.validity.state_at(now.seconds()) {
        ValidityState::Expired => {
            let end = rfc3339_of_seconds(facts.validity.not_after_s);
            provision_failed(format!("{certificate} has expired at {end}.{kept}"))
        }
        ValidityState::NotYetValid => {
            let begin = rfc3339_of_seconds(facts.validity.not_before_s);
            provision_failed(format!("{certificate} is not valid before {begin}.{kept}"))
        }
        // Served all the same, as the user has named it for this host.
        ValidityState::Valid if !facts.names.covers(host) => {
            let hosts = facts.names.summary();
            provision_failed(format!("{certificate} is for {hosts}, and not for {host}."))
        }
        ValidityState::Valid => ConditionStatus::True(Some(ConditionReason::new(
            "CertificateExternallyProvided",
            "TLS certificate was provided externally",
        ))),
    }
}

/// Returns the end of a message about a Secret that cannot be used: a sentence if an earlier certificate serves the
/// domain, else nothing.
fn kept_note(
    cluster: &ClusterState,
    namespace: &str,
    mapping: &DomainMappingState,
) -> &'static str {
    let served = mapping.served_secret.as_deref();
    match served.is_some_and(|it| validity_in_force(cluster, namespace, it).is_some()) {
        true => " The certificate from before stays in force.",
        false => "",
    }
}

/// Returns the entry of the RouteTable for a named Secret. Without a certificate in force it has no material, and
/// activators keep what they have.
pub fn certificate_entry(name: &NamespacedName, state: &CertificateState) -> CertificateEntry {
    let material = state.in_force.as_ref().map(|it| Arc::clone(&it.material));
    CertificateEntry { name: name.clone(), material }
}

/// Returns the validity of the certificate of a Secret that is in force, if there is one.
fn validity_in_force(
    cluster: &ClusterState,
    namespace: &str,
    secret: &str,
) -> Option<CertificateValidity> {
    let in_force = secret_state(cluster, namespace, secret)?.in_force.as_ref();
    in_force.map(|it| it.facts.validity)
}

fn secret_state<'a>(
    cluster: &'a ClusterState,
    namespace: &str,
    secret: &str,
) -> Option<&'a CertificateState> {
    cluster.certificates.by_secret.get(&NamespacedName::new(namespace, secret))
}

fn not_ready(message: String) -> ConditionStatus {
    ConditionStatus::Unknown(Some(ConditionReason::new("CertificateNotReady", message)))
}

fn provision_failed(message: String) -> ConditionStatus {
    ConditionStatus::False(ConditionReason::new("CertificateProvisionFailed", message))
}
