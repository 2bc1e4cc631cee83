//! Pure: identities in certificates, and the messages that each role may send.
//!
//! A certificate names one pod of Rouse itself: its role, node, name and uid, as the API server states them.
//! Every claim of a stream about its sender is checked against that.

use std::{fmt, str::FromStr, sync::Arc};

use crate::wire::{PodItem, Role, Subscriber, UsageKey, is_subdomain};

/// Prefix of every identity.
const SCHEME: &str = "spiffe://rouse/";

/// Role of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// Signs certificates, serves routes, and receives pod reports and scale decisions.
    Controller,
    /// Writes the eBPF maps of its node and reports its pods.
    Agent,
    /// Forwards requests, and reports its wait queues.
    Activator,
    /// Decides scale, and receives usage reports.
    Autoscaler,
}

impl Holder {
    const ALL: [Self; 4] = [Self::Controller, Self::Agent, Self::Activator, Self::Autoscaler];

    fn word(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Agent => "agent",
            Self::Activator => "activator",
            Self::Autoscaler => "autoscaler",
        }
    }
}

impl From<Role> for Holder {
    fn from(role: Role) -> Self {
        match role {
            Role::Agent => Self::Agent,
            Role::Activator => Self::Activator,
            Role::Autoscaler => Self::Autoscaler,
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.word())
    }
}

/// Identity in a certificate: `spiffe://rouse/<role>/<node>/<pod>/<uid>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Role that the certificate proves.
    pub holder: Holder,
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
pub struct NoIdentity {
    text: String,
}

impl Identity {
    /// Builds an identity. Each part must be a DNS subdomain, as Kubernetes' names and uids are.
    pub fn new(holder: Holder, node: &str, pod: &str, uid: &str) -> Result<Self, NoIdentity> {
        let it = Self { holder, node: node.into(), pod: pod.into(), uid: uid.into() };
        if [node, pod, uid].into_iter().all(is_subdomain) {
            return Ok(it);
        }
        Err(NoIdentity { text: it.to_string() })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{SCHEME}{}/{}/{}/{}", self.holder, self.node, self.pod, self.uid)
    }
}

impl FromStr for Identity {
    type Err = NoIdentity;

    fn from_str(text: &str) -> Result<Self, NoIdentity> {
        // Cut, since the text comes from a stranger's certificate and goes into the log.
        let none = || NoIdentity { text: text.chars().take(200).collect() };
        let parts: Vec<_> = text.strip_prefix(SCHEME).ok_or_else(none)?.split('/').collect();
        let [word, node, pod, uid] = parts[..] else { return Err(none()) };
        let holder = Holder::ALL.into_iter().find(|it| it.word() == word).ok_or_else(none)?;
        Self::new(holder, node, pod, uid)
    }
}

/// Other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Not authenticated: a Unix socket, which the rights of its folder protect, or a plain address in tests.
    Unchecked,
    /// TLS without a client certificate: may request one and nothing else.
    Anonymous,
    /// TLS with a client certificate.
    Known(Arc<Identity>),
}

/// Error of a peer that claims or sends something that its certificate does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No certificate was presented.
    #[error("a certificate is needed: ask the controller for one with Identity.Issue")]
    Anonymous,
    /// The certificate names another identity than the claimed one.
    #[error("the certificate speaks for {real}, not for {claimed}")]
    Other {
        /// Identity in the certificate.
        real: String,
        /// Claimed role, name and node.
        claimed: String,
    },
    /// The sender's role may not send this message.
    #[error("{sender} may not {what}")]
    Role {
        /// Role of the sender.
        sender: Holder,
        /// Action that was refused, as a verb phrase.
        what: &'static str,
    },
}

impl Peer {
    /// Refuses a claim of another identity. An agent is named after its node, every other role after its pod.
    pub fn may_be(&self, who: &Subscriber) -> Result<(), Denied> {
        let identity = match self {
            Self::Unchecked => return Ok(()),
            Self::Anonymous => return Err(Denied::Anonymous),
            Self::Known(identity) => identity,
        };
        let name = match who.role {
            Role::Agent => &identity.node,
            Role::Activator | Role::Autoscaler => &identity.pod,
        };
        // A sender that omits its node is taken to run on the node in its certificate. Agents must name theirs.
        let node = who.node == identity.node || (who.node.is_empty() && who.role != Role::Agent);
        if Holder::from(who.role) == identity.holder && who.name == *name && node {
            return Ok(());
        }
        let claimed = format!("{} {:?} on node {:?}", Holder::from(who.role), who.name, who.node);
        Err(Denied::Other { real: identity.to_string(), claimed })
    }

    /// Refuses a sender that claims another identity, or whose role is not among `roles` for the action `what`.
    pub fn may(&self, who: &Subscriber, what: &'static str, roles: &[Role]) -> Result<(), Denied> {
        self.may_be(who)?;
        if *self == Self::Unchecked || roles.contains(&who.role) {
            return Ok(());
        }
        Err(Denied::Role { sender: who.role.into(), what })
    }

    /// Refuses PodReport items that the sender's role may not send: only agents report pods.
    ///
    /// The receiver checks that the pod is on the agent's own node, since it knows the nodes of pods.
    pub fn may_report(&self, who: &Subscriber, item: &PodItem) -> Result<(), Denied> {
        let sees = matches!(item, PodItem::Seen(_) | PodItem::Gone(_));
        if *self == Self::Unchecked || !sees || who.role == Role::Agent {
            return Ok(());
        }
        Err(Denied::Role { sender: who.role.into(), what: "report pods" })
    }

    /// Refuses usage samples of other roles: an agent counts pods, an activator its own wait queues.
    pub fn may_count(&self, who: &Subscriber, key: &UsageKey) -> Result<(), Denied> {
        if *self == Self::Unchecked {
            return Ok(());
        }
        match (who.role, &key.pod) {
            (Role::Agent, Some(_)) | (Role::Activator, None) => Ok(()),
            (Role::Agent, None) => {
                Err(Denied::Role { sender: who.role.into(), what: "report waiting requests" })
            }
            (Role::Activator | Role::Autoscaler, _) => {
                Err(Denied::Role { sender: who.role.into(), what: "report a pod's usage" })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Name;

    fn known(holder: Holder) -> Peer {
        let identity = Identity::new(holder, "n1", "pod-1", "0c7f").expect("sound");
        Peer::Known(identity.into())
    }

    fn who(role: Role, name: &str, node: &str) -> Subscriber {
        Subscriber { role, name: name.into(), node: node.into() }
    }

    #[test]
    fn identities_are_read_as_written() {
        let identity = Identity::new(Holder::Agent, "n1.example", "rouse-agent-x", "0c7f-1");
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
            assert!(bad.parse::<Identity>().is_err(), "{bad}");
        }
        // No part may contain another one.
        assert!(Identity::new(Holder::Agent, "n1/p/u", "p", "u").is_err());
    }

    #[test]
    fn an_agent_speaks_for_its_own_node_only() {
        let agent = known(Holder::Agent);
        assert_eq!(agent.may_be(&who(Role::Agent, "n1", "n1")), Ok(()));
        for other in [
            who(Role::Agent, "n2", "n2"),
            who(Role::Agent, "n1", "n2"),
            who(Role::Agent, "n2", "n1"),
            who(Role::Agent, "n1", ""),
            who(Role::Activator, "pod-1", "n1"),
            who(Role::Autoscaler, "pod-1", "n1"),
        ] {
            assert!(agent.may_be(&other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn everybody_else_is_named_after_its_pod() {
        assert_eq!(known(Holder::Activator).may_be(&who(Role::Activator, "pod-1", "n1")), Ok(()));
        assert_eq!(known(Holder::Autoscaler).may_be(&who(Role::Autoscaler, "pod-1", "")), Ok(()));
        assert!(known(Holder::Activator).may_be(&who(Role::Activator, "pod-2", "n1")).is_err());
        assert!(known(Holder::Activator).may_be(&who(Role::Activator, "pod-1", "n2")).is_err());
        assert!(known(Holder::Controller).may_be(&who(Role::Agent, "n1", "n1")).is_err());
        assert_eq!(Peer::Anonymous.may_be(&who(Role::Agent, "n1", "n1")), Err(Denied::Anonymous));
        assert_eq!(Peer::Unchecked.may_be(&who(Role::Agent, "n9", "n9")), Ok(()));
    }

    #[test]
    fn an_activator_reports_no_pods_and_an_agent_no_waiting() {
        let (activator, agent) =
            (who(Role::Activator, "pod-1", "n1"), who(Role::Agent, "n1", "n1"));
        let gone = PodItem::Gone("a".into());
        assert!(known(Holder::Activator).may_report(&activator, &gone).is_err());
        let avoided = PodItem::Avoided("a".into());
        assert_eq!(known(Holder::Activator).may_report(&activator, &avoided), Ok(()));
        assert_eq!(known(Holder::Agent).may_report(&agent, &gone), Ok(()));
        let waiting = UsageKey { revision: Name::new("a", "b"), pod: None };
        let counted = UsageKey { pod: Some("p".into()), ..waiting.clone() };
        assert_eq!(known(Holder::Activator).may_count(&activator, &waiting), Ok(()));
        assert!(known(Holder::Activator).may_count(&activator, &counted).is_err());
        assert_eq!(known(Holder::Agent).may_count(&agent, &counted), Ok(()));
        assert!(known(Holder::Agent).may_count(&agent, &waiting).is_err());
        let denied = known(Holder::Agent).may(&agent, "decide scale", &[Role::Autoscaler]);
        assert_eq!(denied.map_err(|it| it.to_string()), Err("agent may not decide scale".into()));
    }
}
