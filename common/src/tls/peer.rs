//! Pure: who a certificate speaks for, and what each may say.
//!
//! A certificate names one pod of Rouse's own: its role, its node, its name and its uid, as the API server told the
//! controller. Whatever a stream claims about its sender is held against that.

use std::{fmt, str::FromStr, sync::Arc};

use crate::wire::{PodItem, Role, Subscriber, UsageKey, is_subdomain};

/// What every identity begins with.
const SCHEME: &str = "spiffe://rouse/";

/// What a holder of a certificate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// Signs certificates; serves routes, takes reports and decisions.
    Controller,
    /// An agent.
    Agent,
    /// An activator.
    Activator,
    /// An autoscaler; it also takes usage.
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

/// Whom a certificate speaks for: `spiffe://rouse/<role>/<node>/<pod>/<uid>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// What it is.
    pub holder: Holder,
    /// The node its pod is bound to.
    pub node: String,
    /// Its pod's name.
    pub pod: String,
    /// Its pod's uid.
    pub uid: String,
}

/// A text that names nobody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no identity: must be spiffe://rouse/ROLE/NODE/POD/UID")]
pub struct NoIdentity {
    text: String,
}

impl Identity {
    /// An identity of parts that can stand in one; Kubernetes' own names and uids can.
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
        let none = || NoIdentity { text: text.chars().take(200).collect() };
        let parts: Vec<_> = text.strip_prefix(SCHEME).ok_or_else(none)?.split('/').collect();
        let [word, node, pod, uid] = parts[..] else { return Err(none()) };
        let holder = Holder::ALL.into_iter().find(|it| it.word() == word).ok_or_else(none)?;
        Self::new(holder, node, pod, uid)
    }
}

/// Who is on the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Not asked: a unix socket, which only those may open whom its folder lets in, or a plain address in tests.
    Unchecked,
    /// Over TLS, without a certificate: may ask for one and nothing else.
    Anonymous,
    /// Over TLS, with a certificate.
    Known(Arc<Identity>),
}

/// Somebody tried to be or to say what he may not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No certificate was shown.
    #[error("a certificate is needed: ask the controller for one with Identity.Issue")]
    Anonymous,
    /// The certificate speaks for somebody else.
    #[error("the certificate speaks for {real}, not for {claimed}")]
    Other {
        /// Whom it speaks for.
        real: String,
        /// Who was claimed.
        claimed: String,
    },
    /// The sender's role does not say this.
    #[error("{sender} may not {what}")]
    Role {
        /// What it is.
        sender: Holder,
        /// What it tried.
        what: &'static str,
    },
}

impl Peer {
    /// Refuses a claim to be somebody else. An agent is named after its node, everybody else after its pod.
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
        // Who does not say where he runs is believed to run where he does.
        let node = who.node == identity.node || (who.node.is_empty() && who.role != Role::Agent);
        if Holder::from(who.role) == identity.holder && who.name == *name && node {
            return Ok(());
        }
        let claimed = format!("{} {:?} on node {:?}", Holder::from(who.role), who.name, who.node);
        Err(Denied::Other { real: identity.to_string(), claimed })
    }

    /// Refuses a sender that claims to be somebody else, or that is none of those who `what`.
    pub fn may(&self, who: &Subscriber, what: &'static str, roles: &[Role]) -> Result<(), Denied> {
        self.may_be(who)?;
        if *self == Self::Unchecked || roles.contains(&who.role) {
            return Ok(());
        }
        Err(Denied::Role { sender: who.role.into(), what })
    }

    /// Refuses what a sender of PodReports may not say: only agents see pods.
    ///
    /// That the pod is on the agent's own node is for those to check who know where pods are.
    pub fn may_report(&self, who: &Subscriber, item: &PodItem) -> Result<(), Denied> {
        let sees = matches!(item, PodItem::Seen(_) | PodItem::Gone(_));
        if *self == Self::Unchecked || !sees || who.role == Role::Agent {
            return Ok(());
        }
        Err(Denied::Role { sender: who.role.into(), what: "report pods" })
    }

    /// Refuses usage of others: an agent counts pods, an activator its own waiting line.
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
        // No part may smuggle in another.
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
