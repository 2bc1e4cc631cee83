//! Pure: certificates of listeners: their Secrets, the conditions about them, and the certificates of a host.

use std::{cmp::Reverse, collections::BTreeSet};

use common::wire::{GatewayHostKey, NamespacedName, is_secret_name};

use super::{
    HTTPS,
    hosts::{UsableListener, covers, listener_host, usable_listeners},
};
use crate::model::cluster_state::{ClusterState, ListenerSpec, SecretReadState};

/// Failure of a reference to a certificate: reason and message.
type CertificateFailure = (&'static str, String);

/// Certificates that a listener names.
#[derive(Debug, Default)]
pub(super) struct ListenerCertificates {
    /// Secrets that the listener may name, in its order. None if it has no TLS.
    pub(super) secrets: Vec<NamespacedName>,
    /// First reference that is not valid; `None`: all of them are.
    failure: Option<CertificateFailure>,
}

/// Returns the certificates of a listener. One with TLS that names none has a failure.
pub(super) fn listener_certificates(
    cluster: &ClusterState,
    gateway: &NamespacedName,
    listener: &ListenerSpec,
) -> ListenerCertificates {
    let mut found = ListenerCertificates::default();
    if *listener.protocol != *HTTPS {
        return found;
    }
    let named: &[(Box<str>, NamespacedName)] =
        listener.tls.as_ref().map_or(&[], |it| &it.certificates[..]);
    if named.is_empty() {
        found.failure = Some(invalid_reference("the listener must name a certificate".to_owned()));
    }
    for (kind, secret) in named {
        match check_reference(cluster, gateway, kind, secret) {
            Ok(()) if found.secrets.contains(secret) => {}
            Ok(()) => found.secrets.push(secret.clone()),
            // The others of the listener are served: a client of another kind of key needs only one of them.
            Err(failure) => found.failure = found.failure.take().or(Some(failure)),
        }
    }
    found
}

/// Checks that a Gateway may name a certificate.
fn check_reference(
    cluster: &ClusterState,
    gateway: &NamespacedName,
    kind: &str,
    secret: &NamespacedName,
) -> Result<(), CertificateFailure> {
    if kind != "Secret" {
        return Err(invalid_reference(format!("certificates of kind {kind} are not supported")));
    }
    if !is_secret_name(&secret.name) {
        return Err(invalid_reference(format!("{:?} is no name of a Secret", secret.name)));
    }
    let is_foreign = secret.namespace != gateway.namespace;
    let from = ("Gateway", gateway.namespace.as_str());
    if is_foreign && !cluster.gateway_api.is_granted(from, ("Secret", secret)) {
        let message = format!("no ReferenceGrant lets the Gateway name Secret {secret}");
        return Err(("RefNotPermitted", message));
    }
    Ok(())
}

fn invalid_reference(message: String) -> CertificateFailure {
    ("InvalidCertificateRef", message)
}

/// Checks that all certificates of a listener may be named, and are in force. Without any there is nothing to check.
pub(super) fn check_certificates(
    cluster: &ClusterState,
    certificates: ListenerCertificates,
) -> Result<(), CertificateFailure> {
    let ListenerCertificates { secrets, failure } = certificates;
    failure.map_or(Ok(()), Err)?;
    secrets.iter().try_for_each(|secret| check_certificate(cluster, secret))
}

/// Checks that a certificate is in force.
fn check_certificate(
    cluster: &ClusterState,
    secret: &NamespacedName,
) -> Result<(), CertificateFailure> {
    let state = cluster.certificates.by_secret.get(secret);
    let fault = match state.map(|it| &it.last_read) {
        Some(SecretReadState::InForce) => return Ok(()),
        None | Some(SecretReadState::Pending) => "was not read yet".to_owned(),
        Some(SecretReadState::Absent) => "does not exist".to_owned(),
        Some(SecretReadState::Refused(fault)) => format!("cannot be used: {fault}"),
        Some(SecretReadState::Unreadable(error)) => format!("cannot be read: {error}"),
    };
    // Handshakes go on with the certificate that was read before.
    let is_kept = state.is_some_and(|it| it.in_force.is_some());
    let kept = if is_kept { "; its former certificate is kept" } else { "" };
    Err(invalid_reference(format!("Secret {secret} {fault}{kept}")))
}

/// Returns the Secrets of all listeners of Rouse that end TLS.
pub fn listener_secrets(cluster: &ClusterState) -> BTreeSet<NamespacedName> {
    let listeners = usable_listeners(cluster);
    listeners.iter().flat_map(|it| secrets_of(cluster, *it)).collect()
}

/// Returns the Secrets whose certificates a host has: those of the most specific of these listeners with TLS, of the
/// oldest Gateway.
pub(super) fn host_certificates(
    cluster: &ClusterState,
    listeners: &[UsableListener<'_>],
    key: &GatewayHostKey,
) -> Vec<NamespacedName> {
    if !key.is_tls {
        return Vec::new();
    }
    let covering = listeners.iter().filter(|it| covers(listener_host(it.spec), &key.host));
    let created = |it: &UsableListener<'_>| {
        cluster.gateway_api.gateways.get(it.gateway).map(|it| it.meta.created)
    };
    // Of hosts that cover the same one, the longer one is more specific, and an exact one is the host itself.
    let first = covering.min_by_key(|&it| {
        let host = listener_host(it.spec);
        let is_exact = host == key.host.as_str();
        (Reverse((is_exact, host.len())), created(it), it.gateway)
    });
    first.map(|it| secrets_of(cluster, *it)).unwrap_or_default()
}

fn secrets_of(cluster: &ClusterState, listener: UsableListener<'_>) -> Vec<NamespacedName> {
    listener_certificates(cluster, listener.gateway, listener.spec).secrets
}
