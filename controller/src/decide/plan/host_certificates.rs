//! Pure: the certificate of each host for which the platform requests one: its Secret, the scheme of URLs, and the
//! condition about it. Texts are Knative's where it has the case; Knative does not look into Secrets.
//!
//! A Route has the condition of its worst certificate, not of its last one as in Knative.

use common::{
    certificates::{CertificateValidity, ValidityState},
    wire::{NamespacedName, is_secret_name, wildcard_suffix},
};

use super::{
    local_tls,
    requested_certificates::{
        CertificateOwner, WantedCertificate, is_enabled, is_mapping_enabled, is_route_enabled,
        mapping_certificate, namespace_certificate_of_host, possible_route_certificates,
        route_tags,
    },
    routes::{route_host, serves_tcp},
};
use crate::model::{
    cluster_state::{
        AppState, CertManagerPresence, ClusterState, ConditionReason, ConditionStatus,
        DomainMappingState, ReadyStatus, RequestedCertificate, SecretReadState, Uid, UnixMillis,
        rfc3339_of_seconds,
    },
    config_maps::network::HttpProtocol,
};

/// Reason of a Route's `CertificateProvisioned` if it has private names only.
const PRIVATE_NAMES: &str = "TLS is not enabled for cluster-local";
/// Reason of a mapping's `CertificateProvisioned` if its host has a wildcard.
const WILDCARD_HOST: &str =
    "no certificate is requested for a host with a wildcard: name a Secret in spec.tls";
/// Reason of a mapping's `CertificateProvisioned` if TLS of its host is passed through.
const PASSED_TLS: &str =
    "no certificate is requested for a host whose TLS is passed through: its server has one";
/// End of messages while cert-manager is missing.
const NO_CERT_MANAGER: &str = " cert-manager is not installed.";

/// Certificate of one host, as it is observed.
#[derive(Clone, Copy, Debug)]
struct HostCertificate<'a> {
    /// Name of the certificate.
    name: &'a str,
    /// The object; `None`: it does not exist yet.
    observed: Option<&'a RequestedCertificate>,
    /// UID of the owner that it must have; `None`: the owner does not matter.
    owner_uid: Option<Uid>,
}

/// State of the certificate of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RequestState {
    /// The certificate is ready, and that of its Secret is in force at the gateway.
    Ready(CertificateValidity),
    /// Another owner has the name.
    NotOwned,
    /// The certificate is not ready, for this reason in one word.
    Waiting { reason: Box<str>, is_failed: bool },
    /// The certificate is ready, and its Secret was not read yet.
    Unread,
    /// The certificate is ready, and the API server returns this error for its Secret.
    Unreadable(String),
    /// The certificate is ready, and its Secret cannot be used, for this reason.
    Unusable(String),
}

/// Returns the certificate of a wanted one's host: that of the namespace, unless only the host's own is ready.
fn with_host_certificate<T>(
    wanted: &WantedCertificate,
    cluster: &ClusterState,
    read: impl Fn(HostCertificate<'_>) -> T,
) -> T {
    let observed = |name: &NamespacedName| cluster.requests.certificates.get(name);
    let own = HostCertificate {
        name: &wanted.name.name,
        observed: observed(&wanted.name),
        owner_uid: Some(wanted.owner_uid),
    };
    let shared = match wanted.owner {
        CertificateOwner::Route(_) => namespace_certificate_of_host(wanted, cluster),
        // A host of a mapping is outside of the namespace's domain.
        CertificateOwner::Mapping(_) | CertificateOwner::Namespace => None,
    };
    let Some(name) = shared else { return read(own) };
    let shared = HostCertificate { name: &name.name, observed: observed(&name), owner_uid: None };
    let is_usable = |it: &HostCertificate<'_>| it.issued().is_some();
    read(if !is_usable(&shared) && is_usable(&own) { own } else { shared })
}

impl<'a> HostCertificate<'a> {
    /// Returns the certificate if its Secret has had one, and its owner is the right one. Users may make certificates
    /// of namespaces, and activators would refuse the service whose Secret has no valid name.
    fn issued(&self) -> Option<&'a RequestedCertificate> {
        let issued = self.observed.filter(|it| it.is_issued && !it.is_terminating);
        issued.filter(|it| self.is_owned(it) && is_secret_name(&it.secret))
    }

    fn is_owned(&self, it: &RequestedCertificate) -> bool {
        self.owner_uid.is_none() || it.owner_uid == self.owner_uid
    }

    fn state(&self, namespace: &str, cluster: &ClusterState) -> RequestState {
        let waiting =
            |reason: &str, is_failed| RequestState::Waiting { reason: reason.into(), is_failed };
        let Some(observed) = self.observed else { return waiting("", false) };
        if !self.is_owned(observed) {
            return RequestState::NotOwned;
        }
        match observed.readiness.status {
            ReadyStatus::True => secret_state(namespace, &observed.secret, cluster),
            ReadyStatus::False => waiting(&observed.readiness.reason, true),
            ReadyStatus::Unknown => waiting(&observed.readiness.reason, false),
        }
    }
}

/// Returns the state of a ready certificate, by the last read of its Secret.
fn secret_state(namespace: &str, secret: &str, cluster: &ClusterState) -> RequestState {
    if !is_secret_name(secret) {
        return RequestState::Unusable(format!("{secret:?} cannot be the name of a Secret."));
    }
    let name = NamespacedName::new(namespace, secret);
    let Some(state) = cluster.certificates.by_secret.get(&name) else {
        return RequestState::Unread;
    };
    match (&state.last_read, &state.in_force) {
        // What is in force serves the host. The Secret may be replaced just now.
        (_, Some(certificate)) => RequestState::Ready(certificate.facts.validity),
        (SecretReadState::Pending | SecretReadState::InForce, None) => RequestState::Unread,
        (SecretReadState::Absent, None) => {
            RequestState::Unusable(format!("Secret {secret:?} does not exist."))
        }
        (SecretReadState::Refused(fault), None) => {
            RequestState::Unusable(format!("Secret {secret:?} cannot be used: {fault}."))
        }
        (SecretReadState::Unreadable(error), None) => {
            RequestState::Unreadable(format!("Secret {secret:?} cannot be read: {error}."))
        }
    }
}

fn state_of(wanted: &WantedCertificate, cluster: &ClusterState) -> RequestState {
    with_host_certificate(wanted, cluster, |it| it.state(&wanted.name.namespace, cluster))
}

/// Returns the Secret whose certificate serves the host of a wanted certificate.
fn issued_secret(wanted: &WantedCertificate, cluster: &ClusterState) -> Option<NamespacedName> {
    let namespace = wanted.name.namespace.as_str();
    with_host_certificate(wanted, cluster, |it| {
        it.issued().map(|it| NamespacedName::new(namespace, &*it.secret))
    })
}

/// Returns the Secret whose requested certificate serves a name of a Route.
pub fn secret_of_route(
    app: &AppState,
    name: &NamespacedName,
    host: &str,
    cluster: &ClusterState,
) -> Option<NamespacedName> {
    if !is_enabled(cluster) {
        return None;
    }
    let all = possible_route_certificates(app, name, cluster);
    issued_secret(all.iter().find(|it| it.host == host)?, cluster)
}

/// Returns the Secret whose requested certificate serves a mapping's domain.
pub fn secret_of_mapping(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Option<NamespacedName> {
    issued_secret(&mapping_certificate(cluster, name, mapping)?, cluster)
}

/// Returns the scheme of URLs with the host of a wanted certificate. Without the certificate, clients that are
/// redirected reach it by https alone, and others by http.
fn scheme(wanted: &WantedCertificate, cluster: &ClusterState) -> &'static str {
    let is_ready = matches!(
        state_of(wanted, cluster),
        RequestState::Ready(_)
            | RequestState::Unread
            | RequestState::Unreadable(_)
            | RequestState::Unusable(_)
    );
    if is_ready || !is_http_enabled(cluster) { "https" } else { "http" }
}

/// Returns true if plain HTTP is served while a certificate is missing. Annotations do not count here, as in Knative.
fn is_http_enabled(cluster: &ClusterState) -> bool {
    cluster.settings.config_maps.network.http_protocol == HttpProtocol::Enabled
}

/// Returns the scheme of the URL of a Route's name; `None`: no certificate is requested for it.
pub fn scheme_of_route(
    app: &AppState,
    name: &NamespacedName,
    host: &str,
    cluster: &ClusterState,
) -> Option<&'static str> {
    if !is_enabled(cluster) {
        return None;
    }
    let all = possible_route_certificates(app, name, cluster);
    all.iter().find(|it| it.host == host).map(|it| scheme(it, cluster))
}

/// Returns the scheme of the URL of a mapping's domain; `None`: no certificate is requested for it.
pub fn scheme_of_mapping(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> Option<&'static str> {
    mapping_certificate(cluster, name, mapping).map(|it| scheme(&it, cluster))
}

/// Returns the status of a Route's `CertificateProvisioned`; `previous` is the present one. Names inside the cluster
/// have certificates of their own, and the worst status counts.
pub fn route_status(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    previous: &ConditionStatus,
    now: UnixMillis,
) -> ConditionStatus {
    let local = local_tls::route_status(app, name, cluster, previous);
    let public = public_status(app, name, cluster, (previous, now));
    match local {
        // As in Knative, names that have no certificate are no reason beside others that have one.
        Some(local) if is_not_enabled(&public) => local,
        Some(local) => {
            worst_status([public, local].into_iter()).unwrap_or(ConditionStatus::Unknown(None))
        }
        None => public,
    }
}

/// Returns true for the status of names for which no certificate is requested.
fn is_not_enabled(status: &ConditionStatus) -> bool {
    matches!(status, ConditionStatus::True(Some(reason)) if reason.reason == "TLSNotEnabled")
}

/// Returns the status of a Route's `CertificateProvisioned` as to its public names. `at` has the present status, and the
/// time.
fn public_status(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
    at: (&ConditionStatus, UnixMillis),
) -> ConditionStatus {
    // Reported as true, because the Route wants no certificate, and has to become ready without one.
    if !is_route_enabled(app, cluster) {
        return ConditionStatus::True(Some(ConditionReason::NO_TLS));
    }
    let tags = route_tags(app);
    // As in Knative, nothing is requested before traffic is assigned.
    if tags.is_empty() {
        return ConditionStatus::Unknown(None);
    }
    let is_public = |tag: Option<&str>| {
        !serves_tcp(app, name, tag, cluster)
            && route_host(app, name, tag, cluster).is_some_and(|it| !it.is_private)
    };
    // An authority cannot check names that exist inside the cluster only.
    if !tags.into_iter().any(is_public) {
        return ConditionStatus::True(Some(ConditionReason::new("TLSNotEnabled", PRIVATE_NAMES)));
    }
    let wanted = possible_route_certificates(app, name, cluster);
    let statuses = wanted.iter().map(|it| certificate_status(it, cluster, at));
    // All names belong to others: `IngressReady` says so.
    worst_status(statuses).unwrap_or(ConditionStatus::Unknown(None))
}

/// Returns the status of `CertificateProvisioned` of a mapping without `spec.tls`; `previous` is the present one.
pub fn mapping_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
    previous: &ConditionStatus,
    now: UnixMillis,
) -> ConditionStatus {
    match mapping_certificate(cluster, name, mapping) {
        Some(wanted) => certificate_status(&wanted, cluster, (previous, now)),
        None => unrequested_status(cluster, name, mapping),
    }
}

/// Returns the status of `CertificateProvisioned` of a mapping for whose host no certificate is requested.
fn unrequested_status(
    cluster: &ClusterState,
    name: &NamespacedName,
    mapping: &DomainMappingState,
) -> ConditionStatus {
    let host = &mapping.domain.host;
    let has_secret = cluster.domains.certificate_lead(&name.namespace, host).is_some();
    if has_secret || mapping.is_terminating || !is_mapping_enabled(cluster, mapping) {
        ConditionStatus::True(Some(ConditionReason::NO_TLS))
    } else if mapping.passes_tls {
        ConditionStatus::True(Some(ConditionReason::new("TLSNotEnabled", PASSED_TLS)))
    } else if wildcard_suffix(host).is_some() {
        ConditionStatus::True(Some(ConditionReason::new("TLSNotEnabled", WILDCARD_HOST)))
    } else {
        // The namespace may not use the host, and `DomainClaimed` says why.
        ConditionStatus::Unknown(None)
    }
}

/// Returns the first status that is false, else the first that is unknown, else the first with a reason.
fn worst_status(statuses: impl Iterator<Item = ConditionStatus>) -> Option<ConditionStatus> {
    let rank = |status: &ConditionStatus| match status {
        ConditionStatus::False(_) => 0,
        ConditionStatus::Unknown(_) => 1,
        ConditionStatus::True(Some(_)) => 2,
        ConditionStatus::True(None) => 3,
    };
    statuses.min_by_key(rank)
}

/// Returns the status of a wanted certificate. `previous` is the present status.
fn certificate_status(
    wanted: &WantedCertificate,
    cluster: &ClusterState,
    (previous, now): (&ConditionStatus, UnixMillis),
) -> ConditionStatus {
    with_host_certificate(wanted, cluster, |it| {
        let is_mapping = matches!(wanted.owner, CertificateOwner::Mapping(_));
        let name = it.name;
        match it.state(&wanted.name.namespace, cluster) {
            RequestState::Ready(validity) => in_force_status(name, validity, now),
            // As in Knative, never taken over: two owners would overwrite each other.
            RequestState::NotOwned => ConditionStatus::False(ConditionReason::new(
                "CertificateNotOwned",
                format!("There is an existing certificate {name} that we don't own."),
            )),
            // A controller that starts has read no Secret yet.
            RequestState::Unread if *previous == ConditionStatus::True(None) => previous.clone(),
            RequestState::Unread => waiting_status(name, "", cluster, is_mapping),
            // Activators keep what they have, which this controller does not know.
            RequestState::Unreadable(error) => {
                not_ready(format!("The certificate {name} is ready, but {error}"))
            }
            // Told apart from waiting: cert-manager regards it as done, so that no time will repair it.
            RequestState::Unusable(fault) => {
                provision_failed(format!("The certificate {name} is ready, but {fault}"))
            }
            // With HTTP enabled a failure is only a downgrade, because clients are still served.
            RequestState::Waiting { reason, is_failed: true }
                if !is_mapping && !is_http_enabled(cluster) =>
            {
                provision_failed(format!("Certificate {name} fails to be provisioned: {reason}"))
            }
            RequestState::Waiting { reason, .. } => {
                waiting_status(name, &reason, cluster, is_mapping)
            }
        }
    })
}

/// Returns the status for a certificate in force. Its request may be ready although nothing renews it any more.
fn in_force_status(name: &str, validity: CertificateValidity, now: UnixMillis) -> ConditionStatus {
    match validity.state_at(now.seconds()) {
        ValidityState::Valid => ConditionStatus::True(None),
        ValidityState::Expired => {
            let end = rfc3339_of_seconds(validity.not_after_s);
            provision_failed(format!("The certificate {name} is ready, but has expired at {end}."))
        }
        // An issuer whose clock is ahead is no failure.
        ValidityState::NotYetValid => {
            let begin = rfc3339_of_seconds(validity.not_before_s);
            not_ready(format!("The certificate {name} is ready, but is not valid before {begin}."))
        }
    }
}

fn not_ready(message: String) -> ConditionStatus {
    ConditionStatus::Unknown(Some(ConditionReason::new("CertificateNotReady", message)))
}

fn provision_failed(message: String) -> ConditionStatus {
    ConditionStatus::False(ConditionReason::new("CertificateProvisionFailed", message))
}

/// Returns the status for a certificate that is not ready, with Knative's texts: those of a Route end in the reason.
fn waiting_status(
    name: &str,
    reason: &str,
    cluster: &ClusterState,
    is_mapping: bool,
) -> ConditionStatus {
    let is_missing = cluster.requests.cert_manager == CertManagerPresence::Missing;
    let end = if is_missing { NO_CERT_MANAGER } else { "" };
    // Requests are served by http meanwhile, so the condition is met.
    if is_http_enabled(cluster) {
        let message = format!("Certificate {name} is not ready downgrade HTTP.{end}");
        return ConditionStatus::True(Some(ConditionReason::new(
            local_tls::HTTP_DOWNGRADE,
            message,
        )));
    }
    let message = match is_mapping {
        true => format!("Certificate {name} is not ready.{end}"),
        false => format!("Certificate {name} is not ready: {reason}{end}"),
    };
    not_ready(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_status_counts() {
        let reason = |text: &'static str| ConditionReason::new(text, "");
        let good = || ConditionStatus::True(None);
        let downgraded = || ConditionStatus::True(Some(reason("HTTPDowngrade")));
        let waiting = || ConditionStatus::Unknown(Some(reason("CertificateNotReady")));
        let failed = || ConditionStatus::False(reason("CertificateNotOwned"));
        let of = |all: &[ConditionStatus]| worst_status(all.iter().cloned());
        assert_eq!(of(&[good(), waiting(), failed(), downgraded()]), Some(failed()));
        assert_eq!(of(&[good(), waiting(), downgraded()]), Some(waiting()));
        assert_eq!(of(&[good(), downgraded()]), Some(downgraded()));
        assert_eq!(of(&[good(), good()]), Some(good()));
        assert_eq!(of(&[]), None);
    }
}
