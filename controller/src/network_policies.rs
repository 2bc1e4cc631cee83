//! Pure: NetworkPolicies → which clients' requests may wait for a Revision.
//!
//! The pod network keeps a policy's word between a client and a pod. A request that waits comes to the pod from an
//! activator, which the policy lets in, so the activator keeps the same word for its client: waiting never widens
//! access. Meaning of policies: Kubernetes' `networking/v1` NetworkPolicy, ingress only.
//!
//! Pods that a policy may let in are known by their labels, wherever they run; those in the host's network are not,
//! since their address is their node's.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use common::wire::{Block, Name, Sources};
use k8s_openapi::{
    api::networking::v1::{
        NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
    },
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kube::core::{Selector, SelectorExt as _};
use serde_json::Value;
use smol_str::SmolStr;

use crate::children::pod::PORT_NAME;

type Labels = BTreeMap<String, String>;

/// All that decides whom a policy lets in.
#[derive(Clone, Debug, Default)]
pub struct NetworkPolicies {
    policies: BTreeMap<Name, Policy>,
    /// Labels of namespaces.
    namespaces: BTreeMap<SmolStr, Labels>,
    /// Pods that have an address of their own.
    clients: BTreeMap<Name, Client>,
}

/// A pod that may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    labels: Labels,
    addresses: Vec<IpAddr>,
}

/// A policy that restricts who comes in.
#[derive(Clone, Debug)]
struct Policy {
    /// Whose pods.
    pods: Selector,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// None: all.
    ports: Vec<Port>,
    /// None: everybody.
    from: Vec<Peer>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Port {
    Range(u16, u16),
    Name(String),
}

#[derive(Clone, Debug)]
enum Peer {
    Block(Block),
    Pods {
        /// None: those of the policy's own namespace.
        namespaces: Option<Selector>,
        pods: Selector,
    },
}

impl NetworkPolicies {
    /// A policy as it is now; `None`: it is gone. Returns the namespaces in which it may change something.
    pub fn policy(&mut self, name: Name, object: Option<&Value>) -> BTreeSet<SmolStr> {
        let touched = [name.namespace.clone()].into();
        match object.and_then(Policy::read) {
            Some(policy) => drop(self.policies.insert(name, policy)),
            None if self.policies.remove(&name).is_none() => return BTreeSet::new(),
            None => {}
        }
        touched
    }

    /// Labels of a namespace; `None`: it is gone.
    pub fn namespace(&mut self, name: &str, object: Option<&Value>) -> BTreeSet<SmolStr> {
        let after = object.map(labels);
        if self.namespaces.get(name) == after.as_ref() {
            return BTreeSet::new();
        }
        match after {
            Some(labels) => drop(self.namespaces.insert(name.into(), labels)),
            None => drop(self.namespaces.remove(name)),
        }
        self.holding(|peer| matches!(peer, Peer::Pods { namespaces: Some(_), .. }))
    }

    /// A pod that may ask; `None`: it is gone.
    pub fn client(&mut self, name: Name, client: Option<Client>) -> BTreeSet<SmolStr> {
        let before = match client {
            Some(client) => self.clients.insert(name.clone(), client),
            None => self.clients.remove(&name),
        };
        let after = self.clients.get(&name);
        if before.as_ref() == after {
            return BTreeSet::new();
        }
        let all: Vec<&Client> = before.iter().chain(after).collect();
        let names = self.policies.iter().filter(|(policy, it)| {
            let peers = it.rules.iter().flat_map(|rule| &rule.from);
            let lets_in = |peer: &Peer| all.iter().any(|it| self.lets_in(peer, policy, &name, it));
            peers.into_iter().any(lets_in)
        });
        names.map(|(policy, _)| policy.namespace.clone()).collect()
    }

    /// Whether pods have to be known: a policy lets some in by their labels.
    pub fn needs_clients(&self) -> bool {
        !self.holding(|peer| matches!(peer, Peer::Pods { .. })).is_empty()
    }

    /// Who may ask pods of `namespace` with these labels at this port; `None`: everybody.
    pub fn sources(
        &self,
        namespace: &SmolStr,
        labels: impl FnOnce() -> Labels,
        port: u16,
    ) -> Option<Arc<Sources>> {
        let mut here = self.of(namespace).peekable();
        here.peek()?;
        let labels = labels();
        let mut selecting = here.filter(|(_, it)| it.pods.matches(&labels)).peekable();
        selecting.peek()?;
        let mut sources = Sources::default();
        for (name, rule) in
            selecting.flat_map(|(name, it)| it.rules.iter().map(move |it| (name, it)))
        {
            if !rule.covers(port) {
                continue;
            }
            if rule.from.is_empty() {
                return None;
            }
            rule.from.iter().for_each(|peer| self.add(peer, name, &mut sources));
        }
        Some(Arc::new(sources))
    }

    fn of(&self, namespace: &SmolStr) -> impl Iterator<Item = (&Name, &Policy)> {
        let from = Name::new(namespace.clone(), "");
        self.policies.range(from..).take_while(move |(name, _)| name.namespace == *namespace)
    }

    /// Namespaces with a policy that has such a peer.
    fn holding(&self, is_such: impl Fn(&Peer) -> bool) -> BTreeSet<SmolStr> {
        let such = |it: &Policy| it.rules.iter().flat_map(|rule| &rule.from).any(&is_such);
        let names = self.policies.iter().filter(|(_, it)| such(it));
        names.map(|(name, _)| name.namespace.clone()).collect()
    }

    fn add(&self, peer: &Peer, policy: &Name, sources: &mut Sources) {
        if let Peer::Block(block) = peer {
            sources.blocks.push(block.clone());
            return;
        }
        let all = self.clients.iter();
        let such = all.filter(|(name, it)| self.lets_in(peer, policy, name, it));
        sources.addresses.extend(such.flat_map(|(_, it)| it.addresses.iter().copied()));
    }

    fn lets_in(&self, peer: &Peer, policy: &Name, name: &Name, client: &Client) -> bool {
        let Peer::Pods { namespaces, pods } = peer else { return false };
        let is_there = match namespaces {
            None => name.namespace == policy.namespace,
            Some(selector) => {
                let labels = self.namespaces.get(&name.namespace);
                labels.is_some_and(|labels| selector.matches(labels))
            }
        };
        is_there && pods.matches(&client.labels)
    }
}

impl Client {
    /// A pod, if it has an address of its own and may still use it.
    pub fn read(object: &Value) -> Option<Self> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let is_over = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        if spec["hostNetwork"] == true || is_over {
            return None;
        }
        let all = status["podIPs"].as_array().into_iter().flatten();
        let address = |it: &Value| it["ip"].as_str()?.parse::<IpAddr>().ok();
        let addresses: Vec<IpAddr> = all.filter_map(address).collect();
        (!addresses.is_empty()).then(|| Self { labels: labels(object), addresses })
    }
}

impl Policy {
    /// A policy, if it says anything about who comes in.
    fn read(object: &Value) -> Option<Self> {
        let spec: NetworkPolicySpec = serde_json::from_value(object["spec"].clone()).ok()?;
        let types = spec.policy_types.unwrap_or_default();
        if !types.is_empty() && !types.iter().any(|it| it == "Ingress") {
            return None;
        }
        let rules = spec.ingress.unwrap_or_default().into_iter().map(Rule::from).collect();
        Some(Self { pods: selector(spec.pod_selector.unwrap_or_default())?, rules })
    }
}

impl From<NetworkPolicyIngressRule> for Rule {
    fn from(it: NetworkPolicyIngressRule) -> Self {
        let (ports, from) = (it.ports.unwrap_or_default(), it.from.unwrap_or_default());
        // One that cannot be read lets nobody in; an empty list would let everybody in.
        let none = || Port::Range(1, 0);
        let nobody = || Peer::Pods { namespaces: None, pods: nothing() };
        Self {
            ports: ports.into_iter().map(|it| port(it).unwrap_or_else(none)).collect(),
            from: from.into_iter().map(|it| peer(it).unwrap_or_else(nobody)).collect(),
        }
    }
}

impl Rule {
    fn covers(&self, port: u16) -> bool {
        self.ports.is_empty()
            || self.ports.iter().any(|it| match it {
                Port::Range(first, last) => (*first..=*last).contains(&port),
                Port::Name(name) => name == PORT_NAME,
            })
    }
}

/// Matches no label.
fn nothing() -> Selector {
    kube::core::Expression::In(String::new(), BTreeSet::new()).into()
}

fn selector(it: LabelSelector) -> Option<Selector> {
    it.try_into().ok()
}

fn port(it: NetworkPolicyPort) -> Option<Port> {
    if it.protocol.is_some_and(|it| it != "TCP") {
        return None;
    }
    let number = |it: i32| u16::try_from(it).ok();
    match it.port {
        None => Some(Port::Range(0, u16::MAX)),
        Some(IntOrString::String(name)) => Some(Port::Name(name)),
        Some(IntOrString::Int(first)) => {
            Some(Port::Range(number(first)?, it.end_port.map_or_else(|| number(first), number)?))
        }
    }
}

fn peer(it: NetworkPolicyPeer) -> Option<Peer> {
    if let Some(block) = it.ip_block {
        let except = block.except.unwrap_or_default();
        let except = except.iter().map(|it| it.parse().ok()).collect::<Option<_>>()?;
        return Some(Peer::Block(Block { net: block.cidr.parse().ok()?, except }));
    }
    let namespaces = match it.namespace_selector {
        None => None,
        Some(it) => Some(selector(it)?),
    };
    Some(Peer::Pods { namespaces, pods: selector(it.pod_selector.unwrap_or_default())? })
}

fn labels(object: &Value) -> Labels {
    let all = object["metadata"]["labels"].as_object().into_iter().flatten();
    all.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

#[cfg(test)]
mod tests;
