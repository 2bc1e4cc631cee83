//! Pure: what the API server says of a token → whom a certificate may speak for.
//!
//! Nothing that the caller says of itself counts: role, node, pod and uid are the API server's own words on the pod that the
//! token is bound to. The API server has also checked that this pod still exists under this uid, so a token
//! that was carried off is worth nothing once its pod is gone.

use std::collections::BTreeMap;

use common::tls::peer::{Holder, Identity};

/// Whom a token must be meant for. One for the API server, or for anybody else, is not taken.
pub const AUDIENCE: &str = "rouse";

/// The service accounts of Rouse's own pods, and what runs under each.
const ACCOUNTS: [(&str, Holder); 3] = [
    ("rouse-agent", Holder::Agent),
    ("activator", Holder::Activator),
    ("autoscaler", Holder::Autoscaler),
];

/// Names of what the API server says of the pod (since Kubernetes 1.30 with its node).
const POD: &str = "authentication.kubernetes.io/pod-name";
const UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE: &str = "authentication.kubernetes.io/node-name";

/// The API server's answer to a TokenReview.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reviewed {
    /// Whether the token is somebody's, now.
    pub is_authentic: bool,
    /// For which of the audiences we asked.
    pub audiences: Vec<String>,
    /// Whose: `system:serviceaccount:<namespace>:<name>`.
    pub user: String,
    /// What else is known of him.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Why a token earns no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The API server does not know it, or not any more.
    #[error("the token is nobody's")]
    Unknown,
    /// It is meant for somebody else.
    #[error("the token is not for audience {AUDIENCE:?}")]
    Audience,
    /// It is not one of our parts'.
    #[error("{user:?} runs no part of Rouse")]
    Stranger {
        /// Whose it is.
        user: String,
    },
    /// It is bound to no pod, or the API server does not say to which.
    #[error(
        "the API server does not say {what} of the token: it must be projected into a pod, by Kubernetes 1.30 or newer"
    )]
    Unbound {
        /// What is missing.
        what: &'static str,
    },
}

/// Whom the token's bearer may speak for. `namespace`: where Rouse runs.
pub fn identity(reviewed: &Reviewed, namespace: &str) -> Result<Identity, Refusal> {
    if !reviewed.is_authentic {
        return Err(Refusal::Unknown);
    }
    // An API server that knows no audiences answers with none, and then vouches for its own only.
    if !reviewed.audiences.iter().any(|it| it == AUDIENCE) {
        return Err(Refusal::Audience);
    }
    let stranger = || Refusal::Stranger { user: reviewed.user.clone() };
    let account = reviewed.user.strip_prefix("system:serviceaccount:").ok_or_else(stranger)?;
    let (its, name) = account.split_once(':').ok_or_else(stranger)?;
    let holder = ACCOUNTS.iter().find(|(account, _)| its == namespace && name == *account);
    let (_, holder) = holder.ok_or_else(stranger)?;
    let said = |key: &str, what| match reviewed.extra.get(key).map(Vec::as_slice) {
        Some([one]) if !one.is_empty() => Ok(one.as_str()),
        _ => Err(Refusal::Unbound { what }),
    };
    let (node, pod, uid) = (said(NODE, "the node")?, said(POD, "the pod")?, said(UID, "the uid")?);
    Identity::new(*holder, node, pod, uid).map_err(|_nothing| stranger())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agents() -> Reviewed {
        let extra = [(POD, "rouse-agent-x"), (UID, "0c7f"), (NODE, "n1")];
        Reviewed {
            is_authentic: true,
            audiences: vec!["rouse".into()],
            user: "system:serviceaccount:knative-serving:rouse-agent".into(),
            extra: extra.map(|(key, value)| (key.into(), vec![value.into()])).into(),
        }
    }

    fn of(reviewed: &Reviewed) -> Result<String, Refusal> {
        identity(reviewed, "knative-serving").map(|it| it.to_string())
    }

    #[test]
    fn role_node_and_pod_are_the_api_servers_words() {
        assert_eq!(of(&agents()), Ok("spiffe://rouse/agent/n1/rouse-agent-x/0c7f".into()));
        let user = "system:serviceaccount:knative-serving:autoscaler".into();
        let autoscaler = Reviewed { user, ..agents() };
        assert_eq!(of(&autoscaler), Ok("spiffe://rouse/autoscaler/n1/rouse-agent-x/0c7f".into()));
    }

    #[test]
    fn a_token_that_is_nobodys_or_meant_for_others_is_refused() {
        assert_eq!(of(&Reviewed { is_authentic: false, ..agents() }), Err(Refusal::Unknown));
        for audiences in [vec![], vec!["https://kubernetes.default.svc".into()]] {
            assert_eq!(of(&Reviewed { audiences, ..agents() }), Err(Refusal::Audience));
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
            let refused = of(&Reviewed { user: user.into(), ..agents() });
            assert_eq!(refused, Err(Refusal::Stranger { user: user.into() }));
        }
    }

    #[test]
    fn a_token_without_a_pod_or_with_a_doubtful_one_is_refused() {
        for (key, what) in [(POD, "the pod"), (UID, "the uid"), (NODE, "the node")] {
            for values in [vec![], vec![String::new()], vec!["a".into(), "b".into()]] {
                let mut reviewed = agents();
                reviewed.extra.insert(key.into(), values);
                assert_eq!(of(&reviewed), Err(Refusal::Unbound { what }));
            }
        }
        let mut reviewed = agents();
        reviewed.extra.insert(NODE.into(), vec!["n1/pod/uid".into()]);
        assert!(matches!(of(&reviewed), Err(Refusal::Stranger { .. })));
    }
}
