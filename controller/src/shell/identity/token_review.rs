//! Pure: result of a TokenReview → identity that a certificate may state.
//!
//! Statements of the caller do not count: role, node, pod and UID come from the API server, for the pod that the token
//! is bound to. The API server has also checked that this pod still exists under this UID, so a stolen token is
//! worthless once its pod is gone.

use std::collections::BTreeMap;

use common::{component::Component, tls::peer::CertificateIdentity};

/// Audience that a token must have. One for the API server, or for any other audience, is refused.
pub const AUDIENCE: &str = "rouse";

/// Service accounts of Rouse's own pods, with the component of each.
const SERVICE_ACCOUNTS: [(&str, Component); 3] = [
    ("rouse-agent", Component::Agent),
    ("activator", Component::Activator),
    ("autoscaler", Component::Autoscaler),
];

/// Keys of the pod's attributes in a TokenReview (with its node since Kubernetes 1.30).
const POD_NAME_KEY: &str = "authentication.kubernetes.io/pod-name";
const POD_UID_KEY: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME_KEY: &str = "authentication.kubernetes.io/node-name";

/// Result of a TokenReview by the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenReviewResult {
    /// True if the token is valid now.
    pub is_authentic: bool,
    /// Audiences of the token, among the requested ones.
    pub audiences: Vec<String>,
    /// User of the token, such as `system:serviceaccount:<namespace>:<name>`.
    pub user: String,
    /// Further attributes of the user, by key.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Reason for which a token gets no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateRefusal {
    /// The API server does not know the token, or no longer.
    #[error("the API server does not know the token")]
    NotAuthentic,
    /// The token is meant for another audience.
    #[error("the token is not for audience {AUDIENCE:?}")]
    WrongAudience,
    /// The token's user is none of Rouse's service accounts.
    #[error("{user:?} is no service account of Rouse")]
    UnknownAccount {
        /// Name of the user.
        user: String,
    },
    /// The token is bound to no pod, or the API server does not name the pod.
    #[error(
        "the API server does not say {what} of the token: it must be projected into a pod, by Kubernetes 1.30 or newer"
    )]
    PodNotNamed {
        /// Name of the missing attribute.
        what: &'static str,
    },
}

/// Returns the identity of the pod that presents the token. `namespace` is the one in which Rouse runs.
pub fn identity_of_token(
    reviewed: &TokenReviewResult,
    namespace: &str,
) -> Result<CertificateIdentity, CertificateRefusal> {
    // All other fields are empty or meaningless for a token that the API server does not know.
    if !reviewed.is_authentic {
        return Err(CertificateRefusal::NotAuthentic);
    }
    // An API server without support for audiences returns none; it has then checked only its own.
    if !reviewed.audiences.iter().any(|it| it == AUDIENCE) {
        return Err(CertificateRefusal::WrongAudience);
    }
    let unknown_account = || CertificateRefusal::UnknownAccount { user: reviewed.user.clone() };
    // Kubernetes reserves this prefix for service accounts.
    let account =
        reviewed.user.strip_prefix("system:serviceaccount:").ok_or_else(unknown_account)?;
    let (account_namespace, name) = account.split_once(':').ok_or_else(unknown_account)?;
    // An account of the same name in another namespace belongs to that namespace's users.
    let mut accounts = SERVICE_ACCOUNTS.iter().filter(|_| account_namespace == namespace);
    let (_, role) = accounts.find(|(account, _)| name == *account).ok_or_else(unknown_account)?;
    // The node and the pod come from the token's binding and never from the client, so one agent cannot act as another.
    let extra_value = |key: &str, what| match reviewed.extra.get(key).map(Vec::as_slice) {
        // Only one of several values could be right, and it is unknown which.
        Some([one]) if !one.is_empty() => Ok(one.as_str()),
        _ => Err(CertificateRefusal::PodNotNamed { what }),
    };
    let (node, pod, uid) = (
        extra_value(NODE_NAME_KEY, "the node")?,
        extra_value(POD_NAME_KEY, "the pod")?,
        extra_value(POD_UID_KEY, "the uid")?,
    );
    // A `/` in one of the names would change the parts of the identity's URI.
    CertificateIdentity::new(*role, node, pod, uid).map_err(|_nothing| unknown_account())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent_review() -> TokenReviewResult {
        let extra = [(POD_NAME_KEY, "rouse-agent-x"), (POD_UID_KEY, "0c7f"), (NODE_NAME_KEY, "n1")];
        TokenReviewResult {
            is_authentic: true,
            audiences: vec!["rouse".into()],
            user: "system:serviceaccount:knative-serving:rouse-agent".into(),
            extra: extra.map(|(key, value)| (key.into(), vec![value.into()])).into(),
        }
    }

    fn of(reviewed: &TokenReviewResult) -> Result<String, CertificateRefusal> {
        identity_of_token(reviewed, "knative-serving").map(|it| it.to_string())
    }

    #[test]
    fn role_node_and_pod_come_from_the_api_server() {
        assert_eq!(of(&agent_review()), Ok("spiffe://rouse/agent/n1/rouse-agent-x/0c7f".into()));
        let user = "system:serviceaccount:knative-serving:autoscaler".into();
        let autoscaler = TokenReviewResult { user, ..agent_review() };
        assert_eq!(of(&autoscaler), Ok("spiffe://rouse/autoscaler/n1/rouse-agent-x/0c7f".into()));
    }

    #[test]
    fn an_unknown_token_or_another_audience_is_refused() {
        assert_eq!(
            of(&TokenReviewResult { is_authentic: false, ..agent_review() }),
            Err(CertificateRefusal::NotAuthentic)
        );
        for audiences in [vec![], vec!["https://kubernetes.default.svc".into()]] {
            assert_eq!(
                of(&TokenReviewResult { audiences, ..agent_review() }),
                Err(CertificateRefusal::WrongAudience)
            );
        }
    }

    #[test]
    fn only_our_own_pods_get_a_certificate() {
        for user in [
            "system:serviceaccount:default:rouse-agent",
            "system:serviceaccount:knative-serving:default",
            "system:serviceaccount:knative-serving:controller",
            "system:serviceaccount:knative-serving",
            "system:node:n1",
            "rouse-agent",
        ] {
            let refused = of(&TokenReviewResult { user: user.into(), ..agent_review() });
            assert_eq!(refused, Err(CertificateRefusal::UnknownAccount { user: user.into() }));
        }
    }

    #[test]
    fn a_token_without_a_pod_or_with_a_doubtful_one_is_refused() {
        for (key, what) in
            [(POD_NAME_KEY, "the pod"), (POD_UID_KEY, "the uid"), (NODE_NAME_KEY, "the node")]
        {
            for values in [vec![], vec![String::new()], vec!["a".into(), "b".into()]] {
                let mut reviewed = agent_review();
                reviewed.extra.insert(key.into(), values);
                assert_eq!(of(&reviewed), Err(CertificateRefusal::PodNotNamed { what }));
            }
        }
        let mut reviewed = agent_review();
        reviewed.extra.insert(NODE_NAME_KEY.into(), vec!["n1/pod/uid".into()]);
        assert!(matches!(of(&reviewed), Err(CertificateRefusal::UnknownAccount { .. })));
    }
}
