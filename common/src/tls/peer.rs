//! Pure: identities in certificates, and the messages that each role may send.
//!
//! A certificate names one pod of Rouse itself: its component, node, name and uid, as the API server states them.
//! Every claim of a stream about its sender is checked against that.

use std::{fmt, str::FromStr, sync::Arc};

use crate::{
    component::Component,
    wire::{ClientComponent, ComponentReplica, PodReportItem, UsageKey, is_dns_subdomain},
};

/// Prefix of every identity.
const SPIFFE_PREFIX: &str = "spiffe://rouse/";

/// Identity in a certificate: `spiffe://rouse/<role>/<node>/<pod>/<uid>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CertificateIdentity {
    /// Component that the certificate proves.
    pub role: Component,
    /// Node that the pod is bound to.
    pub node: String,
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod.
    pub uid: String,
}

/// Error of a text that is no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no identity: must be spiffe://rouse/ROLE/NODE/POD/UID")]
pub struct CertificateIdentityError {
    text: String,
}

impl CertificateIdentity {
    /// Builds an identity. Each part must be a DNS subdomain, as Kubernetes' names and uids are.
    pub fn new(
        role: Component,
        node: &str,
        pod: &str,
        uid: &str,
    ) -> Result<Self, CertificateIdentityError> {
        let identity = Self { role, node: node.into(), pod: pod.into(), uid: uid.into() };
        if [node, pod, uid].into_iter().all(is_dns_subdomain) {
            return Ok(identity);
        }
        Err(CertificateIdentityError { text: identity.to_string() })
    }
}

impl fmt::Display for CertificateIdentity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{SPIFFE_PREFIX}{}/{}/{}/{}", self.role, self.node, self.pod, self.uid)
    }
}

impl FromStr for CertificateIdentity {
    type Err = CertificateIdentityError;

    fn from_str(text: &str) -> Result<Self, CertificateIdentityError> {
        // Cut, since the text comes from a stranger's certificate and goes into the log.
        let error = || CertificateIdentityError { text: text.chars().take(200).collect() };
        let parts = text.strip_prefix(SPIFFE_PREFIX).ok_or_else(error)?;
        let parts: Vec<_> = parts.split('/').collect();
        let [role, node, pod, uid] = parts[..] else { return Err(error()) };
        let role = Component::from_name(role).ok_or_else(error)?;
        Self::new(role, node, pod, uid)
    }
}

/// Other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsPeer {
    /// Not authenticated: a Unix socket, which the rights of its folder protect, or a plain address in tests.
    Unauthenticated,
    /// TLS without a client certificate: may request one and nothing else.
    Anonymous,
    /// TLS with a client certificate.
    Authenticated(Arc<CertificateIdentity>),
}

/// Error of a peer that claims or sends something that its certificate does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerDeniedError {
    /// No certificate was presented.
    #[error("a certificate is needed: ask the controller for one with Identity.Issue")]
    Anonymous,
    /// The certificate names another identity than the claimed one.
    #[error("the certificate speaks for {real}, not for {claimed}")]
    IdentityMismatch {
        /// Identity in the certificate.
        real: String,
        /// Claimed role, name and node.
        claimed: String,
    },
    /// The sender's role may not send this message.
    #[error("{sender} may not {what}")]
    RoleNotAllowed {
        /// Role of the sender.
        sender: Component,
        /// Action that was refused, as a verb phrase.
        what: &'static str,
    },
}

impl TlsPeer {
    /// Refuses a claim of another identity. An agent is named after its node, every other role after its pod.
    pub fn check_identity(&self, sender: &ComponentReplica) -> Result<(), PeerDeniedError> {
        let identity = match self {
            Self::Unauthenticated => return Ok(()),
            Self::Anonymous => return Err(PeerDeniedError::Anonymous),
            Self::Authenticated(identity) => identity,
        };
        let name = match sender.role {
            ClientComponent::Agent => &identity.node,
            ClientComponent::Activator | ClientComponent::Autoscaler => &identity.pod,
        };
        // A sender that omits its node is taken to run on the node in its certificate. Agents must name theirs.
        let is_own_node = sender.node == identity.node
            || (sender.node.is_empty() && sender.role != ClientComponent::Agent);
        if Component::from(sender.role) == identity.role && sender.name == *name && is_own_node {
            return Ok(());
        }
        let claimed =
            format!("{} {:?} on node {:?}", Component::from(sender.role), sender.name, sender.node);
        Err(PeerDeniedError::IdentityMismatch { real: identity.to_string(), claimed })
    }

    /// Refuses a sender that claims another identity, or whose role is not among `roles` for `action`.
    pub fn check_role(
        &self,
        sender: &ComponentReplica,
        action: &'static str,
        roles: &[ClientComponent],
    ) -> Result<(), PeerDeniedError> {
        self.check_identity(sender)?;
        if *self == Self::Unauthenticated || roles.contains(&sender.role) {
            return Ok(());
        }
        Err(PeerDeniedError::RoleNotAllowed { sender: sender.role.into(), what: action })
    }

    /// Refuses PodReport items that the sender's role may not send: only agents report pods. The sender's identity has
    /// passed [`check_role`](Self::check_role).
    ///
    /// The receiver checks that the pod is on the agent's own node, since it knows the nodes of pods.
    pub fn check_pod_item(
        &self,
        sender: &ComponentReplica,
        item: &PodReportItem,
    ) -> Result<(), PeerDeniedError> {
        let reports_pod = matches!(item, PodReportItem::Observed(_) | PodReportItem::Removed(_));
        if *self == Self::Unauthenticated || !reports_pod || sender.role == ClientComponent::Agent {
            return Ok(());
        }
        Err(PeerDeniedError::RoleNotAllowed { sender: sender.role.into(), what: "report pods" })
    }

    /// Refuses usage samples of other roles: an agent counts pods, an activator its own wait queues. The sender's
    /// identity has passed [`check_role`](Self::check_role).
    pub fn check_usage_key(
        &self,
        sender: &ComponentReplica,
        key: &UsageKey,
    ) -> Result<(), PeerDeniedError> {
        // The rights of a Unix socket's folder protect it instead.
        if *self == Self::Unauthenticated {
            return Ok(());
        }
        match (sender.role, &key.pod) {
            (ClientComponent::Agent, Some(_)) | (ClientComponent::Activator, None) => Ok(()),
            (ClientComponent::Agent, None) => Err(PeerDeniedError::RoleNotAllowed {
                sender: sender.role.into(),
                what: "report waiting requests",
            }),
            (ClientComponent::Activator | ClientComponent::Autoscaler, _) => {
                Err(PeerDeniedError::RoleNotAllowed {
                    sender: sender.role.into(),
                    what: "report a pod's usage",
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::NamespacedName;

    fn known(holder: Component) -> TlsPeer {
        let identity = CertificateIdentity::new(holder, "n1", "pod-1", "0c7f").expect("sound");
        TlsPeer::Authenticated(identity.into())
    }

    fn who(role: ClientComponent, name: &str, node: &str) -> ComponentReplica {
        ComponentReplica { role, name: name.into(), node: node.into() }
    }

    #[test]
    fn identities_are_read_as_written() {
        let identity =
            CertificateIdentity::new(Component::Agent, "n1.example", "rouse-agent-x", "0c7f-1");
        let identity = identity.expect("sound");
        assert_eq!(identity.to_string(), "spiffe://rouse/agent/n1.example/rouse-agent-x/0c7f-1");
        assert_eq!(identity.to_string().parse(), Ok(identity));
        for bad in [
            "",
            "spiffe://rouse/agent/n1/p",
            "spiffe://rouse/agent/n1/p/u/x",
            "spiffe://rouse/root/n1/p/u",
            "spiffe://rouse/agent//p/u",
            "spiffe://other/agent/n1/p/u",
            "spiffe://rouse/agent/n1/p/../u",
        ] {
            assert!(bad.parse::<CertificateIdentity>().is_err(), "{bad}");
        }
        // No part may contain another one.
        assert!(CertificateIdentity::new(Component::Agent, "n1/p/u", "p", "u").is_err());
    }

    #[test]
    fn an_agent_may_only_claim_its_own_node() {
        let agent = known(Component::Agent);
        assert_eq!(agent.check_identity(&who(ClientComponent::Agent, "n1", "n1")), Ok(()));
        for other in [
            who(ClientComponent::Agent, "n2", "n2"),
            who(ClientComponent::Agent, "n1", "n2"),
            who(ClientComponent::Agent, "n2", "n1"),
            who(ClientComponent::Agent, "n1", ""),
            who(ClientComponent::Activator, "pod-1", "n1"),
            who(ClientComponent::Autoscaler, "pod-1", "n1"),
        ] {
            assert!(agent.check_identity(&other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn every_other_role_is_named_after_its_pod() {
        assert_eq!(
            known(Component::Activator).check_identity(&who(
                ClientComponent::Activator,
                "pod-1",
                "n1"
            )),
            Ok(())
        );
        assert_eq!(
            known(Component::Autoscaler).check_identity(&who(
                ClientComponent::Autoscaler,
                "pod-1",
                ""
            )),
            Ok(())
        );
        assert!(
            known(Component::Activator)
                .check_identity(&who(ClientComponent::Activator, "pod-2", "n1"))
                .is_err()
        );
        assert!(
            known(Component::Activator)
                .check_identity(&who(ClientComponent::Activator, "pod-1", "n2"))
                .is_err()
        );
        assert!(
            known(Component::Controller)
                .check_identity(&who(ClientComponent::Agent, "n1", "n1"))
                .is_err()
        );
        assert_eq!(
            TlsPeer::Anonymous.check_identity(&who(ClientComponent::Agent, "n1", "n1")),
            Err(PeerDeniedError::Anonymous)
        );
        assert_eq!(
            TlsPeer::Unauthenticated.check_identity(&who(ClientComponent::Agent, "n9", "n9")),
            Ok(())
        );
    }

    #[test]
    fn an_activator_reports_no_pods_and_an_agent_no_waiting() {
        let activator = who(ClientComponent::Activator, "pod-1", "n1");
        let agent = who(ClientComponent::Agent, "n1", "n1");
        let removed = PodReportItem::Removed("a".into());
        assert!(known(Component::Activator).check_pod_item(&activator, &removed).is_err());
        let drained = PodReportItem::DrainAck("a".into());
        assert_eq!(known(Component::Activator).check_pod_item(&activator, &drained), Ok(()));
        assert_eq!(known(Component::Agent).check_pod_item(&agent, &removed), Ok(()));
        let waiting = UsageKey { revision: NamespacedName::new("a", "b"), pod: None };
        let counted = UsageKey { pod: Some("p".into()), ..waiting.clone() };
        assert_eq!(known(Component::Activator).check_usage_key(&activator, &waiting), Ok(()));
        assert!(known(Component::Activator).check_usage_key(&activator, &counted).is_err());
        assert_eq!(known(Component::Agent).check_usage_key(&agent, &counted), Ok(()));
        assert!(known(Component::Agent).check_usage_key(&agent, &waiting).is_err());
        let denied = known(Component::Agent).check_role(
            &agent,
            "decide scale",
            &[ClientComponent::Autoscaler],
        );
        assert_eq!(denied.map_err(|it| it.to_string()), Err("agent may not decide scale".into()));
    }
}
