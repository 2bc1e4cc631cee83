//! Pure: certificates of listeners: their Secrets, the conditions about them, and the certificate of a host.

use std::{cmp::Reverse, collections::BTreeSet};

use common::wire::{GatewayHostKey, NamespacedName, is_secret_name};

use super::{
    HTTPS,
    hosts::{UsableListener, covers, listener_host, usable_listeners},
};
use crate::model::cluster_state::{ClusterState, ListenerSpec, SecretReadState};

/// Failure of a reference to a certificate: reason and message.
type CertificateFailure = (&'static str, String);

/// Returns the Secret of a listener whose TLS the gateway ends; `None`: the listener has no TLS. It fails if the listener
/// names no Secret, several of them, or one that it may not name.
pub(super) fn listener_certificate(
    cluster: &ClusterState,
    gateway: &NamespacedName,
    listener: &ListenerSpec,
) -> Result<Option<NamespacedName>, CertificateFailure> {
    if *listener.protocol != *HTTPS {
        return Ok(None);
    }
    let invalid = |message: String| Err(("InvalidCertificateRef", message));
    let named: &[(Box<str>, NamespacedName)] =
        listener.tls.as_ref().map_or(&[], |it| &it.certificates[..]);
    let [(kind, secret)] = named else {
        return invalid("the listener must name one certificate".to_owned());
    };
    if **kind != *"Secret" {
        return invalid(format!("certificates of kind {kind} are not supported"));
    }
    if !is_secret_name(&secret.name) {
        return invalid(format!("{:?} is no name of a Secret", secret.name));
    }
    let is_foreign = secret.namespace != gateway.namespace;
    let from = ("Gateway", gateway.namespace.as_str());
    if is_foreign && !cluster.gateway_api.is_granted(from, ("Secret", secret)) {
        let message = format!("no ReferenceGrant lets the Gateway name Secret {secret}");
        return Err(("RefNotPermitted", message));
    }
    Ok(Some(secret.clone()))
}

/// Checks that a certificate is in force. Without any there is nothing to check.
pub(super) fn check_certificate(
    cluster: &ClusterState,
    secret: Option<&NamespacedName>,
) -> Result<(), CertificateFailure> {
    let Some(secret) = secret else { return Ok(()) };
    let state = cluster.certificates.by_secret.get(secret);
    let fault = match state.map(|it| &it.last_read) {
        Some(SecretReadState::InForce) => return Ok(()),
        None | Some(SecretReadState::Pending) => "was not read yet".to_owned(),
        Some(SecretReadState::Absent) => "does not exist".to_owned(),
        Some(SecretReadState::Refused(fault)) => format!("cannot be used: {fault}"),
        Some(SecretReadState::Unreadable(error)) => format!("cannot be read: {error}"),
    };
    let is_kept = state.is_some_and(|it| it.in_force.is_some());
    let kept = if is_kept { "; its former certificate is kept" } else { "" };
    Err(("InvalidCertificateRef", format!("Secret {secret} {fault}{kept}")))
}

/// Returns the Secrets of all listeners of Rouse that end TLS.
pub fn listener_secrets(cluster: &ClusterState) -> BTreeSet<NamespacedName> {
    let listeners = usable_listeners(cluster);
    listeners.iter().filter_map(|it| secret_of(cluster, *it)).collect()
}

/// Returns the Secret whose certificate a host has: that of the most specific of these listeners with TLS, of the oldest
/// Gateway.
pub(super) fn host_certificate(
    cluster: &ClusterState,
    listeners: &[UsableListener<'_>],
    key: &GatewayHostKey,
) -> Option<NamespacedName> {
    if !key.is_tls {
        return None;
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
    first.and_then(|it| secret_of(cluster, *it))
}

fn secret_of(cluster: &ClusterState, listener: UsableListener<'_>) -> Option<NamespacedName> {
    listener_certificate(cluster, listener.gateway, listener.spec).ok().flatten()
}
