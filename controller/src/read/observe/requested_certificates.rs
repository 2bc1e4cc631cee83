//! Pure: objects about requested certificates: Certificates of two groups, challenges, solvers, and namespaces.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::Value;

use crate::{
    model::{
        cluster_state::{
            CertificateNamespace, CertificateReadiness, ChallengeSolver, IssuedCertificate,
            ObservedChallenge, ReadyStatus, RequestedCertificate, Uid,
        },
        knative::key,
        object::json::{annotation, array_items, is_terminating, label, non_empty_text},
    },
    read::fields,
};

/// Label of the Services of solvers (cert-manager `pkg/apis/acme/v1`, `SolverIdentificationLabelKey`).
const SOLVER_LABEL: &str = "acme.cert-manager.io/http01-solver";

/// Reads a Certificate of the group `networking.internal.knative.dev`.
pub fn read_requested_certificate(object: &Value) -> RequestedCertificate {
    let readiness = read_readiness(object).unwrap_or_default();
    let not_after = non_empty_text(&object["status"]["notAfter"]);
    let hosts = array_items(&object["spec"]["dnsNames"]).filter_map(Value::as_str);
    RequestedCertificate {
        meta: fields::read_meta(object),
        owner_uid: controller_uid(object),
        hosts: hosts.map(Into::into).collect(),
        secret: object["spec"]["secretName"].as_str().unwrap_or_default().into(),
        wildcard_domain: label(object, key::WILDCARD_DOMAIN).map(Into::into),
        // Either proves it: a renewal may make the condition false while the certificate is still valid.
        is_issued: not_after.is_some() || readiness.status == ReadyStatus::True,
        not_after,
        readiness,
        is_terminating: is_terminating(object),
    }
}

/// Reads a Certificate of cert-manager.
pub fn read_issued_certificate(object: &Value) -> IssuedCertificate {
    IssuedCertificate {
        owner_uid: controller_uid(object),
        readiness: read_readiness(object),
        not_after: non_empty_text(&object["status"]["notAfter"]),
    }
}

/// Reads a challenge of cert-manager; `None` if it is not answered over HTTP.
pub fn read_http_challenge(object: &Value) -> Option<ObservedChallenge> {
    let spec = &object["spec"];
    let text = |field: &str| non_empty_text(&spec[field]);
    if spec["type"] != "HTTP-01" || is_terminating(object) {
        return None;
    }
    Some(ObservedChallenge {
        uid: fields::read_meta(object).uid,
        host: text("dnsName")?.to_ascii_lowercase(),
        token: text("token").filter(|it| is_token(it))?.into(),
        response: text("key")?.into(),
    })
}

/// Returns true for the characters of a token (RFC 8555, section 8.3): base64url, so that it is one segment of a path.
fn is_token(text: &str) -> bool {
    text.bytes().all(|it| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_'))
}

/// Reads the Service of a solver; `None` for any other Service, and for one without an address.
pub fn read_challenge_solver(object: &Value) -> Option<ChallengeSolver> {
    if label(object, SOLVER_LABEL) != Some("true") {
        return None;
    }
    let given = array_items(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = given.filter_map(|it| it.parse().ok()).collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    let port = object["spec"]["ports"][0]["port"].as_u64();
    let port = port.and_then(|it| u16::try_from(it).ok()).filter(|it| *it != 0)?;
    let challenge_uid = controller_uid(object)?;
    let solver = ChallengeSolver { challenge_uid, addresses: addresses.into(), port };
    (!solver.addresses.is_empty()).then_some(solver)
}

/// Reads a namespace, as far as its certificate depends on it.
pub fn read_certificate_namespace(object: &Value) -> CertificateNamespace {
    let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
    let labels: BTreeMap<String, String> =
        labels.filter_map(|(key, it)| Some((key.clone(), it.as_str()?.to_owned()))).collect();
    let class = key::CERTIFICATE_CLASS.iter().find_map(|it| annotation(object, it));
    CertificateNamespace {
        uid: fields::read_meta(object).uid,
        labels,
        class: class.filter(|it| !it.is_empty()).map(Into::into),
    }
}

/// Reads the condition `Ready` of an object, if it has one.
fn read_readiness(object: &Value) -> Option<CertificateReadiness> {
    let mut conditions = array_items(&object["status"]["conditions"]);
    let ready = conditions.find(|it| it["type"] == "Ready")?;
    let text = |field: &str| ready[field].as_str().unwrap_or_default().into();
    Some(CertificateReadiness {
        status: match ready["status"].as_str() {
            Some("True") => ReadyStatus::True,
            Some("False") => ReadyStatus::False,
            _ => ReadyStatus::Unknown,
        },
        reason: text("reason"),
        message: text("message"),
        since: text("lastTransitionTime"),
    })
}

/// Returns the UID of the owner with `controller: true`.
pub(super) fn controller_uid(object: &Value) -> Option<Uid> {
    let mut owners = array_items(&object["metadata"]["ownerReferences"]);
    Uid::parse(owners.find(|it| it["controller"] == true)?["uid"].as_str()?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_challenge_over_dns_and_a_token_with_a_slash_are_left_out() {
        let challenge = |kind: &str, token: &str| {
            read_http_challenge(&json!({
                "metadata": {"uid": "1"},
                "spec": {"type": kind, "dnsName": "Shop.test", "token": token, "key": "k"},
            }))
        };
        let expected = ObservedChallenge {
            uid: Uid(1),
            host: "shop.test".into(),
            token: "a-B_9".into(),
            response: "k".into(),
        };
        assert_eq!(challenge("HTTP-01", "a-B_9"), Some(expected));
        assert_eq!(challenge("DNS-01", "a"), None);
        assert_eq!(challenge("HTTP-01", "a/../b"), None);
        assert_eq!(challenge("HTTP-01", ""), None);
    }

    #[test]
    fn a_certificate_counts_as_issued_once_it_has_an_end() {
        let issued =
            |status: Value| read_requested_certificate(&json!({"status": status})).is_issued;
        assert!(!issued(json!({})));
        assert!(!issued(json!({"conditions": [{"type": "Ready", "status": "Unknown"}]})));
        assert!(issued(json!({"conditions": [{"type": "Ready", "status": "True"}]})));
        assert!(issued(json!({"notAfter": "2027-01-01T00:00:00Z"})));
    }

    #[test]
    fn a_solver_has_the_label_an_owner_and_an_address() {
        let service = |label: &str, addresses: Value| {
            read_challenge_solver(&json!({
                "metadata": {
                    "labels": {SOLVER_LABEL: label},
                    "ownerReferences": [{"controller": true, "uid": "7"}],
                },
                "spec": {"clusterIPs": addresses, "ports": [{"port": 8089}]},
            }))
        };
        let addresses = [IpAddr::from([10, 0, 0, 1])].into();
        let expected = ChallengeSolver { challenge_uid: Uid(7), addresses, port: 8089 };
        assert_eq!(service("true", json!(["10.0.0.1"])), Some(expected));
        assert_eq!(service("false", json!(["10.0.0.1"])), None);
        assert_eq!(service("true", json!(["None"])), None);
    }
}
