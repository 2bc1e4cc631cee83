//! Pure: certificates of clients: Secrets that are named, the rule of a domain, and the condition about it.

use std::{collections::BTreeSet, sync::Arc};

use common::wire::{ClientAuth, ClientCaEntry, NamespacedName};

use super::certificates::certificate_status;
use crate::model::{
    cluster_state::{
        ClientCaState, ClusterState, ConditionReason, ConditionStatus, DomainMappingState,
        SecretReadState, UnixMillis,
    },
    knative::key,
};

/// End of a message about a Secret while the domain has no authorities.
const CLOSED: &str = " The gateway accepts no client of the domain over TLS.";
/// End of a message about a Secret while the domain has other authorities, or earlier ones of this Secret.
const KEPT: &str = " The client CA from before stays in force.";

/// Returns the Secrets whose authorities are in use or asked for.
pub fn named_client_cas(cluster: &ClusterState) -> BTreeSet<NamespacedName> {
    let mappings = cluster.domains.mappings.iter();
    mappings.flat_map(|(name, it)| client_cas_of_mapping(&name.namespace, it)).collect()
}

/// Returns the Secret that a mapping names for certificates of clients, and the one whose authorities its domain has.
/// They may be the same.
pub fn client_cas_of_mapping(
    namespace: &str,
    mapping: &DomainMappingState,
) -> impl Iterator<Item = NamespacedName> {
    let named = mapping.client_auth.as_ref().and_then(|it| it.ca_secret.as_deref());
    let all = named.into_iter().chain(mapping.served_client_ca.as_deref());
    all.map(move |it| NamespacedName::new(namespace, it))
}

/// Returns the Secret whose authorities a mapping's domain is to have from now on. It is the named one, unless only the
/// former one has authorities. `None`: clients need no certificate, or no valid name was ever in force.
pub fn next_served_client_ca(
    cluster: &ClusterState,
    namespace: &str,
    mapping: &DomainMappingState,
) -> Option<Box<str>> {
    let named = mapping.client_auth.as_ref()?.ca_secret.as_deref();
    let former = mapping.served_client_ca.as_deref();
    let has_any = |secret: &str| is_in_force(cluster, namespace, secret);
    let keeps_former = former.is_some_and(has_any) && !named.is_some_and(has_any);
    let served = if keeps_former { former } else { named };
    served.map(Into::into)
}

/// Returns the rule of a mapping's domain for the RouteTable.
pub fn client_auth(namespace: &str, mapping: &DomainMappingState) -> Option<ClientAuth> {
    let spec = mapping.client_auth.as_ref()?;
    let served = mapping.served_client_ca.as_deref();
    let ca = served.map(|it| NamespacedName::new(namespace, it));
    Some(ClientAuth { ca, is_optional: spec.is_optional })
}

/// Returns the entry of the RouteTable for a named Secret. Without authorities in force it has none, and activators keep
/// what they have.
pub fn client_ca_entry(name: &NamespacedName, state: &ClientCaState) -> ClientCaEntry {
    ClientCaEntry { name: name.clone(), material: state.in_force.as_ref().map(Arc::clone) }
}

/// Returns the status of a mapping's `CertificateProvisioned`: that of its own certificate, and that of the authorities
/// of its clients. Knative has no such authorities, and so no condition for them.
pub fn tls_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    now: UnixMillis,
) -> ConditionStatus {
    let certificate = certificate_status(cluster, name, mapping, now);
    let client_ca = client_ca_status(cluster, name, mapping);
    join_statuses(certificate, client_ca)
}

/// Returns the status of the authorities of a mapping's clients: true if clients need no certificate.
fn client_ca_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> ConditionStatus {
    let Some(spec) = &mapping.client_auth else { return ConditionStatus::True(None) };
    let served = mapping.served_client_ca.as_deref();
    let is_kept = served.is_some_and(|it| is_in_force(cluster, &name.namespace, it));
    // Each message ends with what clients meet meanwhile: the former authorities, or refusal.
    let end = if is_kept { KEPT } else { CLOSED };
    let failed = |text: String| {
        ConditionStatus::False(ConditionReason::new("ClientCAFailed", format!("{text}.{end}")))
    };
    let not_ready = |text: String| {
        let message = format!("{text}.{end}");
        ConditionStatus::Unknown(Some(ConditionReason::new("ClientCANotReady", message)))
    };
    if let Some(fault) = spec.fault.as_deref() {
        return failed(fault.to_owned());
    }
    let Some(secret) = spec.ca_secret.as_deref() else { return ConditionStatus::True(None) };
    let subject = format!("Secret {secret:?} of {}", key::CLIENT_CA);
    let state = client_ca_state(cluster, &name.namespace, secret);
    match state.map_or(&SecretReadState::Pending, |it| &it.last_read) {
        SecretReadState::Pending => not_ready(format!("{subject} was not read yet")),
        SecretReadState::Unreadable(error) => {
            not_ready(format!("{subject} cannot be read: {error}"))
        }
        SecretReadState::Absent => failed(format!("{subject} does not exist")),
        SecretReadState::Refused(fault) => failed(format!("{subject} cannot be used: {fault}")),
        SecretReadState::InForce => ConditionStatus::True(None),
    }
}

/// Joins two statuses into one, which is true if both are. If both are not, the first one has the status and the reason,
/// and both messages are shown.
fn join_statuses(first: ConditionStatus, second: ConditionStatus) -> ConditionStatus {
    let reason_of = |status: ConditionStatus| match status {
        ConditionStatus::True(_) => None,
        ConditionStatus::Unknown(reason) => reason,
        ConditionStatus::False(reason) => Some(reason),
    };
    let joined = |reason: ConditionReason, other: ConditionReason| {
        ConditionReason::new(reason.reason, format!("{} {}", reason.message, other.message))
    };
    match (first, second) {
        (first, ConditionStatus::True(_)) => first,
        (ConditionStatus::True(_), second) => second,
        (ConditionStatus::False(reason), second) => {
            ConditionStatus::False(match reason_of(second) {
                Some(other) => joined(reason, other),
                None => reason,
            })
        }
        // What is false goes before what is not known.
        (ConditionStatus::Unknown(reason), ConditionStatus::False(second)) => {
            ConditionStatus::False(match reason {
                Some(other) => joined(second, other),
                None => second,
            })
        }
        (ConditionStatus::Unknown(reason), second) => {
            ConditionStatus::Unknown(match (reason, reason_of(second)) {
                (Some(reason), Some(other)) => Some(joined(reason, other)),
                (reason, other) => reason.or(other),
            })
        }
    }
}

fn is_in_force(cluster: &ClusterState, namespace: &str, secret: &str) -> bool {
    client_ca_state(cluster, namespace, secret).is_some_and(|it| it.in_force.is_some())
}

fn client_ca_state<'a>(
    cluster: &'a ClusterState,
    namespace: &str,
    secret: &str,
) -> Option<&'a ClientCaState> {
    cluster.client_cas.by_secret.get(&NamespacedName::new(namespace, secret))
}
