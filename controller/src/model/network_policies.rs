//! Pure: NetworkPolicies → sources whose requests may wait for a Revision.
//!
//! The pod network enforces a policy between a client and a pod. A request that waits reaches the pod from an
//! activator, which the policy admits. Therefore the activator enforces the same policy on its client: waiting never
//! widens access. Meaning of policies: Kubernetes' `networking/v1` NetworkPolicy, ingress only.
//!
//! Pods that a policy may admit are known by their labels, wherever they run. Pods in the host network are not, since
//! their address is their node's.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use common::wire::{AllowedSources, IpBlock, NamespacedName};
use k8s_openapi::{
    api::networking::v1::{NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort},
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kube::core::{Selector, SelectorExt as _};
use serde::Deserialize as _;
use serde_json::Value;
use smol_str::SmolStr;

use crate::model::object::json::array_items;

type LabelMap = BTreeMap<String, String>;

/// NetworkPolicies, and the namespaces and pods whose labels they select.
#[derive(Clone, Debug, Default)]
pub struct NetworkPolicies {
    policies: BTreeMap<NamespacedName, IngressPolicy>,
    /// Policies that admit pods by their labels, while the client pods are not known: they would admit none. The
    /// earlier state of such a policy stays in force.
    waiting_policies: BTreeMap<NamespacedName, IngressPolicy>,
    /// True once all client pods have been set.
    are_clients_known: bool,
    /// Labels of each namespace, by its name.
    namespace_labels: BTreeMap<SmolStr, LabelMap>,
    /// Pods that have an address of their own, which policies may admit as clients.
    client_pods: BTreeMap<NamespacedName, PolicyClientPod>,
}

/// A pod that may be a client, with its labels and addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyClientPod {
    labels: LabelMap,
    addresses: Vec<IpAddr>,
}

/// Port of pods, as rules of policies name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyPort<'a> {
    /// Number of the port.
    pub number: u16,
    /// Name of the port in the pod; empty without one.
    pub name: &'a str,
}

/// A policy that restricts ingress traffic.
#[derive(Clone, Debug)]
struct IngressPolicy {
    /// Selector of the pods that the policy protects, by their labels.
    pod_selector: Selector,
    rules: Vec<IngressRule>,
}

#[derive(Clone, Debug)]
struct IngressRule {
    /// Ports that the rule admits; an empty list means all ports.
    ports: Vec<AdmittedPort>,
    /// Peers that the rule admits; an empty list means all clients.
    peers: Vec<AdmittedPeer>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum AdmittedPort {
    /// Port numbers, both ends included.
    Range { first: u16, last: u16 },
    /// Name of a container's port.
    Name(String),
}

#[derive(Clone, Debug)]
enum AdmittedPeer {
    IpBlock(IpBlock),
    Pods {
        /// Selector of the peers' namespaces; `None`: only the policy's own namespace.
        namespaces: Option<Selector>,
        pods: Selector,
    },
}

impl NetworkPolicies {
    /// Sets or, with `None`, removes a policy. Returns the namespaces in which this may change the admitted sources.
    pub fn set_policy(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
    ) -> BTreeSet<SmolStr> {
        let namespaces = [name.namespace.clone()].into();
        self.waiting_policies.remove(&name);
        match object.and_then(IngressPolicy::from_object) {
            // A policy about pods would refuse all clients until the pods are known.
            Some(policy) if !self.are_clients_known && policy.has_peer(AdmittedPeer::is_pods) => {
                self.waiting_policies.insert(name, policy);
                return BTreeSet::new();
            }
            Some(policy) => drop(self.policies.insert(name, policy)),
            None if self.policies.remove(&name).is_none() => return BTreeSet::new(),
            None => {}
        }
        namespaces
    }

    /// Sets or, with `None`, removes a namespace's labels. Returns the namespaces whose admitted sources may change.
    pub fn set_namespace(&mut self, name: &str, object: Option<&Value>) -> BTreeSet<SmolStr> {
        let after = object.map(labels_of);
        if self.namespace_labels.get(name) == after.as_ref() {
            return BTreeSet::new();
        }
        match after {
            Some(labels) => drop(self.namespace_labels.insert(name.into(), labels)),
            None => drop(self.namespace_labels.remove(name)),
        }
        // Only policies that select namespaces by label can see a difference.
        self.namespaces_with_peer(|peer| {
            matches!(peer, AdmittedPeer::Pods { namespaces: Some(_), .. })
        })
    }

    /// Sets or, with `None`, removes a client pod. Returns the namespaces whose admitted sources may change.
    pub fn set_client(
        &mut self,
        name: NamespacedName,
        client: Option<PolicyClientPod>,
    ) -> BTreeSet<SmolStr> {
        let previous = match client {
            Some(client) => self.client_pods.insert(name.clone(), client),
            None => self.client_pods.remove(&name),
        };
        let after = self.client_pods.get(&name);
        if previous.as_ref() == after {
            return BTreeSet::new();
        }
        // Both states count: a pod that changes its labels may leave one policy and enter another.
        let all: Vec<&PolicyClientPod> = previous.iter().chain(after).collect();
        let names = self.policies.iter().filter(|(policy, ingress)| {
            let peers = ingress.rules.iter().flat_map(|rule| &rule.peers);
            let admits = |peer: &AdmittedPeer| {
                all.iter().any(|it| self.admits_client(peer, policy, &name, it))
            };
            peers.into_iter().any(admits)
        });
        names.map(|(policy, _)| policy.namespace.clone()).collect()
    }

    /// Puts the policies in force that waited for the client pods, all of which have been set. Returns the namespaces
    /// in which this may change the admitted sources.
    pub fn set_clients_known(&mut self) -> BTreeSet<SmolStr> {
        self.are_clients_known = true;
        let waiting = std::mem::take(&mut self.waiting_policies);
        let namespaces = waiting.keys().map(|name| name.namespace.clone()).collect();
        self.policies.extend(waiting);
        namespaces
    }

    /// Returns true if the controller must watch all pods, since a policy admits some by their labels.
    pub fn needs_client_pods(&self) -> bool {
        let mut all = self.policies.values().chain(self.waiting_policies.values());
        all.any(|it| it.has_peer(AdmittedPeer::is_pods))
    }

    /// Returns true if the namespace has a policy that restricts ingress traffic.
    pub fn has_policy_in(&self, namespace: &SmolStr) -> bool {
        self.policies_in(namespace).next().is_some()
    }

    /// Returns the sources that may connect to pods of `namespace` with these labels at this port; `None`: all sources.
    pub fn admitted_sources(
        &self,
        namespace: &SmolStr,
        labels: impl FnOnce() -> LabelMap,
        port: PolicyPort<'_>,
    ) -> Option<Arc<AllowedSources>> {
        let mut policies = self.policies_in(namespace).peekable();
        // Nearly all namespaces have no policy: without one the labels are not even computed.
        policies.peek()?;
        let labels = labels();
        let mut selecting = policies.filter(|(_, it)| it.pod_selector.matches(&labels)).peekable();
        // Pods that no policy selects are open to all; pods that one selects only to what some rule admits.
        selecting.peek()?;
        let mut sources = AllowedSources::default();
        for (name, rule) in
            selecting.flat_map(|(name, it)| it.rules.iter().map(move |it| (name, it)))
        {
            if !rule.covers_port(port) {
                continue;
            }
            // Policies add up, so one rule that admits all clients decides.
            if rule.peers.is_empty() {
                return None;
            }
            rule.peers.iter().for_each(|peer| self.add_peer_sources(peer, name, &mut sources));
        }
        Some(Arc::new(sources))
    }

    fn policies_in(
        &self,
        namespace: &SmolStr,
    ) -> impl Iterator<Item = (&NamespacedName, &IngressPolicy)> {
        let from = NamespacedName::new(namespace.clone(), "");
        self.policies.range(from..).take_while(move |(name, _)| name.namespace == *namespace)
    }

    /// Returns the namespaces with a policy that has such a peer.
    fn namespaces_with_peer(&self, is_such: impl Fn(&AdmittedPeer) -> bool) -> BTreeSet<SmolStr> {
        let names = self.policies.iter().filter(|(_, it)| it.has_peer(&is_such));
        names.map(|(name, _)| name.namespace.clone()).collect()
    }

    fn add_peer_sources(
        &self,
        peer: &AdmittedPeer,
        policy: &NamespacedName,
        sources: &mut AllowedSources,
    ) {
        if let AdmittedPeer::IpBlock(block) = peer {
            sources.ip_blocks.push(block.clone());
            return;
        }
        let all = self.client_pods.iter();
        let such = all.filter(|(name, it)| self.admits_client(peer, policy, name, it));
        sources.addresses.extend(such.flat_map(|(_, it)| it.addresses.iter().copied()));
    }

    fn admits_client(
        &self,
        peer: &AdmittedPeer,
        policy: &NamespacedName,
        name: &NamespacedName,
        client: &PolicyClientPod,
    ) -> bool {
        let AdmittedPeer::Pods { namespaces, pods } = peer else { return false };
        let namespace_matches = match namespaces {
            None => name.namespace == policy.namespace,
            Some(selector) => {
                let labels = self.namespace_labels.get(&name.namespace);
                labels.is_some_and(|labels| selector.matches(labels))
            }
        };
        namespace_matches && pods.matches(&client.labels)
    }
}

impl PolicyClientPod {
    /// Reads a pod, if it has an address of its own and still runs: the network may give that of an ended pod to
    /// another.
    pub fn from_pod(object: &Value) -> Option<Self> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let is_over = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        if spec["hostNetwork"] == true || is_over {
            return None;
        }
        let all = status["podIPs"].as_array().into_iter().flatten();
        let address = |it: &Value| it["ip"].as_str()?.parse::<IpAddr>().ok();
        let addresses: Vec<IpAddr> = all.filter_map(address).collect();
        (!addresses.is_empty()).then(|| Self { labels: labels_of(object), addresses })
    }
}

impl IngressPolicy {
    /// Reads a policy, if it restricts ingress traffic. Parts that cannot be read admit no source. With
    /// an unreadable selector the policy may protect any pod of its namespace, so none gets a request by it.
    fn from_object(object: &Value) -> Option<Self> {
        let spec = &object["spec"];
        // Without `policyTypes` a policy is about ingress (API reference of NetworkPolicySpec).
        let types = spec["policyTypes"].as_array().map_or(&[][..], Vec::as_slice);
        if !types.is_empty() && !types.iter().any(|it| it == "Ingress") {
            return None;
        }
        // Each part is read alone, so that the rules for egress do not matter.
        let selector = Option::<LabelSelector>::deserialize(&spec["podSelector"]).ok();
        Some(match selector.and_then(|it| parse_selector(it.unwrap_or_default())) {
            Some(pod_selector) => {
                let rules = array_items(&spec["ingress"]);
                let rules = rules.filter_map(|it| NetworkPolicyIngressRule::deserialize(it).ok());
                Self { pod_selector, rules: rules.map(IngressRule::from).collect() }
            }
            None => Self { pod_selector: Selector::default(), rules: Vec::new() },
        })
    }

    /// Returns true if a rule admits such a peer.
    fn has_peer(&self, is_such: impl Fn(&AdmittedPeer) -> bool) -> bool {
        self.rules.iter().flat_map(|rule| &rule.peers).any(is_such)
    }
}

impl AdmittedPeer {
    fn is_pods(&self) -> bool {
        matches!(self, Self::Pods { .. })
    }
}

impl From<NetworkPolicyIngressRule> for IngressRule {
    fn from(rule: NetworkPolicyIngressRule) -> Self {
        let (ports, from) = (rule.ports.unwrap_or_default(), rule.from.unwrap_or_default());
        // A rule or peer that cannot be read must admit no source; an empty list would admit all.
        let no_port = || AdmittedPort::Range { first: 1, last: 0 };
        let no_peer = || AdmittedPeer::Pods { namespaces: None, pods: match_nothing() };
        Self {
            ports: ports.into_iter().map(|port| parse_port(port).unwrap_or_else(no_port)).collect(),
            peers: from.into_iter().map(|peer| parse_peer(peer).unwrap_or_else(no_peer)).collect(),
        }
    }
}

impl IngressRule {
    fn covers_port(&self, port: PolicyPort<'_>) -> bool {
        self.ports.is_empty()
            || self.ports.iter().any(|admitted| match admitted {
                AdmittedPort::Range { first, last } => (*first..=*last).contains(&port.number),
                AdmittedPort::Name(name) => !name.is_empty() && name == port.name,
            })
    }
}

/// Returns a selector that matches no labels.
fn match_nothing() -> Selector {
    kube::core::Expression::In(String::new(), BTreeSet::new()).into()
}

fn parse_selector(selector: LabelSelector) -> Option<Selector> {
    selector.try_into().ok()
}

fn parse_port(port: NetworkPolicyPort) -> Option<AdmittedPort> {
    if port.protocol.is_some_and(|protocol| protocol != "TCP") {
        return None;
    }
    let number = |number: i32| u16::try_from(number).ok();
    match port.port {
        None => Some(AdmittedPort::Range { first: 0, last: u16::MAX }),
        Some(IntOrString::String(name)) => Some(AdmittedPort::Name(name)),
        Some(IntOrString::Int(first)) => Some(AdmittedPort::Range {
            first: number(first)?,
            last: port.end_port.map_or_else(|| number(first), number)?,
        }),
    }
}

fn parse_peer(peer: NetworkPolicyPeer) -> Option<AdmittedPeer> {
    if let Some(block) = peer.ip_block {
        let networks = block.except.unwrap_or_default();
        let exceptions = networks.iter().map(|it| it.parse().ok()).collect::<Option<_>>()?;
        return Some(AdmittedPeer::IpBlock(IpBlock {
            network: block.cidr.parse().ok()?,
            exceptions,
        }));
    }
    // A peer without a known field is of a kind that this release does not know.
    if peer.namespace_selector.is_none() && peer.pod_selector.is_none() {
        return None;
    }
    let namespaces = match peer.namespace_selector {
        None => None,
        Some(selector) => Some(parse_selector(selector)?),
    };
    Some(AdmittedPeer::Pods {
        namespaces,
        pods: parse_selector(peer.pod_selector.unwrap_or_default())?,
    })
}

fn labels_of(object: &Value) -> LabelMap {
    let all = object["metadata"]["labels"].as_object().into_iter().flatten();
    all.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

#[cfg(test)]
mod tests;
