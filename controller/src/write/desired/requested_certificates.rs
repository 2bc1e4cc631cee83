//! Pure: desired state of requested certificates, and of the certificates that cert-manager issues for them
//! (knative/serving `pkg/reconciler/certificate` at 98e5ef9, formerly net-certmanager).

use common::wire::NamespacedName;
use serde_json::{Map, Value, json};

use super::without_nulls;
use crate::{
    decide::plan::requested_certificates::{
        CHALLENGE_PATH, CertificateOwner, WantedCertificate, find_wanted, inherited_annotations,
        is_superfluous,
    },
    model::{
        cluster_state::{
            CertManagerPresence, CertificateReadiness, ClusterState, ReadyStatus,
            RequestedCertificate, SolvedChallenge,
        },
        config_maps::{certmanager::CertManagerIssuer, network::CERT_MANAGER_CLASS},
        knative::{API_VERSION, key, networking},
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind, names::label_value},
    },
};

/// Greatest length of a common name (RFC 5280, appendix A.1: `ub-common-name` is 64, and Knative leaves one free).
const MAX_COMMON_NAME: usize = 63;
/// Label that stands before the domain in the common name of a longer host.
const SHORT_PREFIX: &str = "k.";
/// Reasons with which cert-manager still works on a certificate; any other one is a failure.
const WORKING_REASONS: [&str; 3] = ["InProgress", "Pending", "TemporaryCertificate"];

/// Returns the desired state of a part of a requested certificate, or of cert-manager's certificate for it.
pub(super) fn certificate_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    let Some(wanted) = find_wanted(cluster, &key.name) else {
        let is_request = key.resource == ResourceKind::RequestedCertificate;
        // Kubernetes deletes cert-manager's certificate with the request.
        let goes =
            is_request && key.part == ObjectPart::Object && is_superfluous(cluster, &key.name);
        return if goes { DesiredState::Absent } else { DesiredState::Unmanaged };
    };
    match (key.resource, key.part) {
        // Once it is gone, the certificate is made again for its present owner.
        (ResourceKind::RequestedCertificate, ObjectPart::Object)
            if has_former_owner(cluster, &wanted) =>
        {
            DesiredState::Absent
        }
        (ResourceKind::RequestedCertificate, ObjectPart::Object) => {
            DesiredState::Body(request_body(cluster, &wanted))
        }
        // A controller of another class issues the others.
        _ if wanted.class != CERT_MANAGER_CLASS => DesiredState::Unmanaged,
        (ResourceKind::RequestedCertificate, ObjectPart::Status) => {
            request_status(cluster, &wanted)
        }
        (ResourceKind::IssuedCertificate, ObjectPart::Object) => issued_body(cluster, &wanted),
        _ => DesiredState::Unmanaged,
    }
}

/// Returns true if a certificate belongs to another DomainMapping than the one that wants it. Its owner has left the
/// host or requests nothing for it any more.
fn has_former_owner(cluster: &ClusterState, wanted: &WantedCertificate) -> bool {
    if !matches!(wanted.owner, CertificateOwner::Mapping(_)) {
        return false;
    }
    let observed = cluster.requests.certificates.get(&wanted.name).and_then(|it| it.owner_uid);
    let Some(owner) = observed.filter(|it| *it != wanted.owner_uid) else { return false };
    let namespace = &wanted.name.namespace;
    let from = cluster.domains.mappings.range(NamespacedName::new(namespace.clone(), "")..);
    let mut own = from.take_while(|(it, _)| it.namespace == *namespace);
    own.any(|(_, it)| it.meta.uid == owner)
}

/// Returns the request, as Knative makes it (`MakeCertificate`, `MakeWildcardCertificate`).
fn request_body(cluster: &ClusterState, wanted: &WantedCertificate) -> Value {
    json!({
        "apiVersion": networking::API_VERSION,
        "kind": ResourceKind::RequestedCertificate.kind(),
        "metadata": {
            "name": wanted.name.name.as_str(),
            "namespace": wanted.name.namespace.as_str(),
            "labels": labels(wanted),
            "annotations": annotations(cluster, wanted),
            "ownerReferences": [owner_reference(wanted)],
        },
        "spec": {
            "dnsNames": [wanted.host],
            "domain": wanted.domain,
            "secretName": wanted.name.name.as_str(),
        },
    })
}

fn labels(wanted: &WantedCertificate) -> Value {
    let external = "external-domain";
    match &wanted.owner {
        CertificateOwner::Route(route) => {
            json!({key::ROUTE: route.name.as_str(), key::CERTIFICATE_TYPE: external})
        }
        CertificateOwner::Mapping(mapping) => {
            let mapping = label_value(&mapping.name);
            json!({key::DOMAIN_MAPPING: mapping, key::CERTIFICATE_TYPE: external})
        }
        CertificateOwner::Namespace => json!({key::WILDCARD_DOMAIN: label_value(&wanted.domain)}),
    }
}

fn annotations(cluster: &ClusterState, wanted: &WantedCertificate) -> Value {
    let mut all = inherited_annotations(cluster, &wanted.owner);
    all.insert(key::CERTIFICATE_CLASS_OF_REQUEST.into(), wanted.class.clone());
    json!(all)
}

fn owner_reference(wanted: &WantedCertificate) -> Value {
    let (api_version, kind, name) = match &wanted.owner {
        CertificateOwner::Route(name) => (API_VERSION, "Route", name.name.as_str()),
        CertificateOwner::Mapping(name) => {
            ("serving.knative.dev/v1beta1", "DomainMapping", name.name.as_str())
        }
        CertificateOwner::Namespace => ("v1", "Namespace", wanted.name.namespace.as_str()),
    };
    json!({
        "apiVersion": api_version, "kind": kind, "name": name, "uid": wanted.owner_uid.to_string(),
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// Returns the request if it exists and belongs to the owner that wants it.
fn own_request<'a>(
    cluster: &'a ClusterState,
    wanted: &WantedCertificate,
) -> Option<&'a RequestedCertificate> {
    let request = cluster.requests.certificates.get(&wanted.name)?;
    let is_own = request.owner_uid == Some(wanted.owner_uid) && request.meta.exists();
    (is_own && !request.is_terminating).then_some(request)
}

/// Returns cert-manager's certificate for a request (`MakeCertManagerCertificate`).
fn issued_body(cluster: &ClusterState, wanted: &WantedCertificate) -> DesiredState {
    if cluster.requests.cert_manager != CertManagerPresence::Present {
        return DesiredState::Unmanaged;
    }
    // The request is the owner, so it has to exist first. Its status states why there are no terms.
    let Some(request) = own_request(cluster, wanted) else { return DesiredState::Unmanaged };
    let Ok((common_name, hosts, issuer)) = issue_terms(cluster, wanted) else {
        return DesiredState::Unmanaged;
    };
    let uid = request.meta.uid.to_string();
    DesiredState::Body(json!({
        "apiVersion": ResourceKind::IssuedCertificate.api_version(),
        "kind": ResourceKind::IssuedCertificate.kind(),
        "metadata": {
            "name": wanted.name.name.as_str(),
            "namespace": wanted.name.namespace.as_str(),
            "labels": labels(wanted),
            "annotations": annotations(cluster, wanted),
            "ownerReferences": [{
                "apiVersion": networking::API_VERSION,
                "kind": ResourceKind::RequestedCertificate.kind(),
                "name": wanted.name.name.as_str(), "uid": uid,
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "commonName": common_name,
            "dnsNames": hosts,
            "issuerRef": issuer_reference(issuer),
            "secretName": wanted.name.name.as_str(),
            "secretTemplate": {"labels": {key::CERTIFICATE_UID: uid}},
        },
    }))
}

fn issuer_reference(issuer: &CertManagerIssuer) -> Value {
    let fields = [("name", &issuer.name), ("kind", &issuer.kind), ("group", &issuer.group)];
    let given = fields.into_iter().filter(|(_, text)| !text.is_empty());
    given
        .map(|(field, text)| (field.to_owned(), json!(text)))
        .collect::<Map<String, Value>>()
        .into()
}

/// Returns the common name, the hosts and the issuer of a certificate, or the reason and the message of a failure.
fn issue_terms<'a>(
    cluster: &'a ClusterState,
    wanted: &WantedCertificate,
) -> Result<(String, Vec<String>, &'a CertManagerIssuer), (&'static str, String)> {
    let (host, domain) = (&wanted.host, &wanted.domain);
    // The texts are those of net-certmanager, by which users search.
    let too_long = |what: String| {
        Err(("CommonName Too Long", format!("error creating cert-manager certificate: {what}")))
    };
    let (common_name, hosts) = if host.len() <= MAX_COMMON_NAME {
        (host.clone(), vec![host.clone()])
    } else if host == domain {
        return too_long(format!("CommonName ({host}) longer than {MAX_COMMON_NAME} characters"));
    } else if domain.len() > MAX_COMMON_NAME - SHORT_PREFIX.len() {
        return too_long(format!(
            "CommonName ({domain})(length: {}) too long, prepending short prefix of ({SHORT_PREFIX})(length: {}) will \
             be longer than 64 bytes",
            domain.len(),
            SHORT_PREFIX.len()
        ));
    } else {
        let short = format!("{SHORT_PREFIX}{domain}");
        (short.clone(), vec![short, host.clone()])
    };
    let Some(issuer) = &cluster.settings.config_maps.certmanager.issuer else {
        let message = "issuerRef was not set in config-certmanager";
        return Err((
            "issuerRef not set",
            format!("error creating cert-manager certificate: {message}"),
        ));
    };
    Ok((common_name, hosts, issuer))
}

/// Returns the status of a request, from that of cert-manager's certificate.
fn request_status(cluster: &ClusterState, wanted: &WantedCertificate) -> DesiredState {
    let Some(request) = own_request(cluster, wanted) else { return DesiredState::Unmanaged };
    let issued = cluster.requests.issued.get(&wanted.name);
    let own = issued.filter(|it| it.owner_uid == Some(request.meta.uid));
    let Some(readiness) = next_readiness(cluster, wanted, request) else {
        return DesiredState::Unmanaged;
    };
    let status = match readiness.status {
        ReadyStatus::True => "True",
        ReadyStatus::False => "False",
        ReadyStatus::Unknown => "Unknown",
    };
    // What was issued stays in its Secret, also if the certificate of cert-manager is gone.
    let not_after = own.and_then(|it| it.not_after.as_deref()).or(request.not_after.as_deref());
    let text = |text: &str| Some(text.to_owned()).filter(|it| !it.is_empty());
    let created = request.meta.created.rfc3339();
    let since = text(&readiness.since).unwrap_or(created);
    let mut hosts = vec![wanted.host.as_str()];
    let short = format!("{SHORT_PREFIX}{}", wanted.domain);
    // The authority checks the short host as well, if the certificate has it.
    hosts.push(&short);
    let challenges = cluster.requests.solved_challenges(&wanted.name.namespace, &hosts);
    let challenges: Vec<Value> = challenges.iter().map(challenge_status).collect();
    DesiredState::Body(without_nulls(json!({
        "observedGeneration": request.meta.generation,
        "conditions": [{
            "type": "Ready", "status": status, "lastTransitionTime": since,
            "reason": text(&readiness.reason), "message": text(&readiness.message),
        }],
        "notAfter": not_after,
        "http01Challenges": Some(challenges).filter(|it| !it.is_empty()),
    })))
}

/// Returns the readiness of a request; `None`: it stays as it is.
fn next_readiness(
    cluster: &ClusterState,
    wanted: &WantedCertificate,
    request: &RequestedCertificate,
) -> Option<CertificateReadiness> {
    let readiness = |status, reason: &str, message: &str| CertificateReadiness {
        status,
        reason: reason.into(),
        message: message.into(),
        since: "".into(),
    };
    if let Err((reason, message)) = issue_terms(cluster, wanted) {
        return Some(readiness(ReadyStatus::False, reason, &message));
    }
    match cluster.requests.cert_manager {
        CertManagerPresence::Unknown => return None,
        // What was issued stays in its Secret.
        CertManagerPresence::Missing if request.is_issued => return None,
        CertManagerPresence::Missing => {
            let message =
                "The API server has no Certificate of cert-manager.io/v1: install cert-manager.";
            return Some(readiness(ReadyStatus::Unknown, "CertManagerMissing", message));
        }
        CertManagerPresence::Present => {}
    }
    let no_condition = || {
        let message = "The ready condition of Cert Manager Certificate does not exist.";
        readiness(ReadyStatus::Unknown, "NoCertManagerCertCondition", message)
    };
    let Some(issued) = cluster.requests.issued.get(&wanted.name) else {
        return Some(no_condition());
    };
    // A certificate of the same name that a user or an earlier request has made.
    if issued.owner_uid != Some(request.meta.uid) {
        let name = wanted.name.name.as_str();
        let message =
            format!("There is an existing CertManagerCertificate {name:?} that we do not own.");
        return Some(readiness(ReadyStatus::False, "NotOwned", &message));
    }
    let Some(own) = &issued.readiness else { return Some(no_condition()) };
    Some(match own.status {
        // A condition that is true needs no reason in Knative.
        ReadyStatus::True => CertificateReadiness {
            since: own.since.clone(),
            ..readiness(ReadyStatus::True, "", "")
        },
        ReadyStatus::False if WORKING_REASONS.contains(&&*own.reason) => {
            CertificateReadiness { status: ReadyStatus::Unknown, ..own.clone() }
        }
        ReadyStatus::False | ReadyStatus::Unknown => own.clone(),
    })
}

fn challenge_status(it: &SolvedChallenge<'_>) -> Value {
    let NamespacedName { namespace, name } = it.service;
    let (host, token) = (&it.challenge.host, &it.challenge.token);
    json!({
        "url": format!("http://{host}{CHALLENGE_PATH}/{token}"),
        "serviceName": name.as_str(),
        "serviceNamespace": namespace.as_str(),
        "servicePort": it.solver.port,
    })
}
