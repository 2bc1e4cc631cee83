//! Pure: the RouteTable, the items of its stream, and a receiver's copy.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ActivatorEntry, CertificateEntry, ClientCaEntry, GatewayHostEntry, GatewayHostKey,
    GlobalSettings, NamespacedName, NodeEntry, PodEntry, RevisionEntry, ScalePolicyPool,
    ServerComponent, ServerReplicas, ServiceEntry,
};

/// Everything that the data plane follows, by subject. A receiver keeps it in a [`RouteView`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteTable {
    /// Addressable names: Routes, their tags, and ports of scaled Services.
    pub services: BTreeMap<NamespacedName, ServiceEntry>,
    /// Revisions that some service names, or that still have pods.
    pub revisions: BTreeMap<NamespacedName, RevisionEntry>,
    /// Pods of Revisions, by uid.
    pub pods: BTreeMap<String, PodEntry>,
    /// Activators, by the name of the replica.
    pub activators: BTreeMap<String, ActivatorEntry>,
    /// Nodes that have a zone, by name; at an agent, its own node only.
    pub nodes: BTreeMap<String, NodeEntry>,
    /// Replicas of components that are found by the table; empty where each component has one replica.
    pub replicas: BTreeMap<ServerComponent, ServerReplicas>,
    /// Settings that hold for all services.
    pub settings: GlobalSettings,
    /// Rules of the Gateway API, by host; only at activators.
    pub gateway_hosts: BTreeMap<GatewayHostKey, GatewayHostEntry>,
    /// Hosts and wildcards that DomainMappings have, in force or not; only at activators. No wildcard of another mapping
    /// covers them, and no listener of the Gateway API gets their requests.
    pub reserved_hosts: BTreeSet<String>,
    /// Certificates of hosts, by namespace and name of their Secrets; only at activators.
    pub certificates: BTreeMap<NamespacedName, CertificateEntry>,
    /// Authorities of client certificates, by namespace and name of their Secrets; only at activators.
    pub client_cas: BTreeMap<NamespacedName, ClientCaEntry>,
}

/// One item of a RouteTable stream.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteItem {
    /// Number that grows with each change within a stream; the receiver reports it back once it is in force.
    pub version: u64,
    /// Change that the item carries.
    pub change: RouteChange,
}

/// Change of one subject, or the end of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteChange {
    /// Whole state of a service.
    Service(ServiceEntry),
    /// Whole state of a Revision.
    Revision(RevisionEntry),
    /// Whole state of a pod. Boxed: services and Revisions are many and smaller.
    Pod(Box<PodEntry>),
    /// Whole state of an activator.
    Activator(ActivatorEntry),
    /// Whole state of a node that has a zone.
    Node(NodeEntry),
    /// All replicas of a component. Links apply them; the users of a link may ignore them.
    Replicas(ServerReplicas),
    /// Settings that hold for all services.
    Settings(GlobalSettings),
    /// Rules of the Gateway API for a host. Only sent to activators.
    GatewayHost(GatewayHostEntry),
    /// Host or wildcard of a DomainMapping, in force or not. Only sent to activators.
    ReservedHost(String),
    /// Certificate of hosts under the name of its Secret. Only sent to activators.
    Certificate(CertificateEntry),
    /// Authorities of client certificates under the name of their Secret. Only sent to activators.
    ClientCa(ClientCaEntry),
    /// Removal of the subject.
    Removed(RouteKey),
    /// End of a batch: the stream has sent everything up to this version.
    Synced,
}

/// Key of one subject of a RouteTable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteKey {
    /// Service, by namespace and name.
    Service(NamespacedName),
    /// Revision, by namespace and name.
    Revision(NamespacedName),
    /// Pod, by its uid.
    Pod(String),
    /// Activator, by the replica's name.
    Activator(String),
    /// Node, by its name.
    Node(String),
    /// All replicas of a component.
    Replicas(ServerComponent),
    /// Settings that hold for all services.
    Settings,
    /// Rules of the Gateway API for a host.
    GatewayHost(GatewayHostKey),
    /// Host or wildcard of a DomainMapping.
    ReservedHost(String),
    /// Certificate of hosts, by namespace and name of its Secret.
    Certificate(NamespacedName),
    /// Authorities of client certificates, by namespace and name of their Secret.
    ClientCa(NamespacedName),
}

impl RouteChange {
    /// Returns the key of the subject that changes; `None` for `Synced`.
    pub fn key(&self) -> Option<RouteKey> {
        match self {
            Self::Service(it) => Some(RouteKey::Service(it.name.clone())),
            Self::Revision(it) => Some(RouteKey::Revision(it.name.clone())),
            Self::Pod(it) => Some(RouteKey::Pod(it.uid.clone())),
            Self::Activator(it) => Some(RouteKey::Activator(it.name.clone())),
            Self::Node(it) => Some(RouteKey::Node(it.name.clone())),
            Self::Replicas(it) => Some(RouteKey::Replicas(it.component)),
            Self::Settings(_) => Some(RouteKey::Settings),
            Self::GatewayHost(it) => Some(RouteKey::GatewayHost(it.key.clone())),
            Self::ReservedHost(host) => Some(RouteKey::ReservedHost(host.clone())),
            Self::Certificate(it) => Some(RouteKey::Certificate(it.name.clone())),
            Self::ClientCa(it) => Some(RouteKey::ClientCa(it.name.clone())),
            Self::Removed(key) => Some(key.clone()),
            Self::Synced => None,
        }
    }
}

impl RouteTable {
    /// Returns the whole states of all subjects.
    pub fn all_states(&self) -> impl Iterator<Item = RouteChange> {
        let services = self.services.values().cloned().map(RouteChange::Service);
        let revisions = self.revisions.values().cloned().map(RouteChange::Revision);
        let pods = self.pods.values().cloned().map(|it| RouteChange::Pod(it.into()));
        let activators = self.activators.values().cloned().map(RouteChange::Activator);
        let nodes = self.nodes.values().cloned().map(RouteChange::Node);
        let replicas = self.replicas.values().cloned().map(RouteChange::Replicas);
        let settings = self.settings.if_not_default().map(RouteChange::Settings);
        let gateway_hosts = self.gateway_hosts.values().cloned().map(RouteChange::GatewayHost);
        let certificates = self.certificates.values().cloned().map(RouteChange::Certificate);
        let client_cas = self.client_cas.values().cloned().map(RouteChange::ClientCa);
        let reserved_hosts = self.reserved_hosts.iter().cloned().map(RouteChange::ReservedHost);
        // Named subjects come before the services that name them, although a receiver acts only at `Synced`.
        let first = settings.into_iter().chain(replicas).chain(nodes).chain(activators);
        let first = first.chain(certificates).chain(client_cas).chain(reserved_hosts);
        first.chain(revisions).chain(pods).chain(services).chain(gateway_hosts)
    }

    /// Returns the changes that turn `self` into `next`: states first, then removals.
    pub fn changes_to(&self, next: &Self) -> Vec<RouteChange> {
        let mut out = Vec::new();
        if self.settings != next.settings {
            out.extend(next.settings.if_not_default().map(RouteChange::Settings));
        }
        for_each_changed(&self.replicas, &next.replicas, |v| out.push(RouteChange::Replicas(v)));
        for_each_changed(&self.nodes, &next.nodes, |v| out.push(RouteChange::Node(v)));
        for_each_changed(&self.activators, &next.activators, |v| {
            out.push(RouteChange::Activator(v))
        });
        for_each_changed(&self.certificates, &next.certificates, |v| {
            out.push(RouteChange::Certificate(v))
        });
        for_each_changed(&self.client_cas, &next.client_cas, |v| {
            out.push(RouteChange::ClientCa(v))
        });
        let reserved_hosts = next.reserved_hosts.difference(&self.reserved_hosts);
        out.extend(reserved_hosts.cloned().map(RouteChange::ReservedHost));
        for_each_changed(&self.revisions, &next.revisions, |v| out.push(RouteChange::Revision(v)));
        for_each_changed(&self.pods, &next.pods, |v| out.push(RouteChange::Pod(v.into())));
        for_each_changed(&self.services, &next.services, |v| out.push(RouteChange::Service(v)));
        for_each_changed(&self.gateway_hosts, &next.gateway_hosts, |v| {
            out.push(RouteChange::GatewayHost(v))
        });
        // Removals come last, so that no service names a subject that is already removed.
        let removed = self.keys().into_iter().filter(|key| !next.contains(key));
        out.extend(removed.map(RouteChange::Removed));
        out
    }

    /// Returns the keys of all subjects.
    pub fn keys(&self) -> BTreeSet<RouteKey> {
        let services = self.services.keys().cloned().map(RouteKey::Service);
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.keys().cloned().map(RouteKey::Activator);
        let nodes = self.nodes.keys().cloned().map(RouteKey::Node);
        let replicas = self.replicas.keys().copied().map(RouteKey::Replicas);
        let settings = self.settings.if_not_default().map(|_| RouteKey::Settings);
        let gateway_hosts = self.gateway_hosts.keys().cloned().map(RouteKey::GatewayHost);
        let certificates = self.certificates.keys().cloned().map(RouteKey::Certificate);
        let client_cas = self.client_cas.keys().cloned().map(RouteKey::ClientCa);
        let reserved_hosts = self.reserved_hosts.iter().cloned().map(RouteKey::ReservedHost);
        let all = services.chain(revisions).chain(pods).chain(activators).chain(nodes);
        let all = all.chain(replicas).chain(settings).chain(gateway_hosts);
        all.chain(certificates).chain(client_cas).chain(reserved_hosts).collect()
    }

    fn contains(&self, key: &RouteKey) -> bool {
        match key {
            RouteKey::Service(name) => self.services.contains_key(name),
            RouteKey::Revision(name) => self.revisions.contains_key(name),
            RouteKey::Pod(uid) => self.pods.contains_key(uid),
            RouteKey::Activator(name) => self.activators.contains_key(name),
            RouteKey::Node(name) => self.nodes.contains_key(name),
            RouteKey::Replicas(component) => self.replicas.contains_key(component),
            RouteKey::Settings => self.settings.if_not_default().is_some(),
            RouteKey::GatewayHost(key) => self.gateway_hosts.contains_key(key),
            RouteKey::ReservedHost(host) => self.reserved_hosts.contains(host),
            RouteKey::Certificate(name) => self.certificates.contains_key(name),
            RouteKey::ClientCa(name) => self.client_cas.contains_key(name),
        }
    }

    /// Applies one change and returns the key of its subject. `Synced` changes nothing.
    pub fn apply_change(&mut self, change: RouteChange) -> Option<RouteKey> {
        let key = change.key()?;
        match change {
            RouteChange::Service(it) => drop(self.services.insert(it.name.clone(), it)),
            RouteChange::Revision(it) => drop(self.revisions.insert(it.name.clone(), it)),
            RouteChange::Pod(it) => drop(self.pods.insert(it.uid.clone(), *it)),
            RouteChange::Activator(it) => drop(self.activators.insert(it.name.clone(), it)),
            RouteChange::Node(it) => drop(self.nodes.insert(it.name.clone(), it)),
            RouteChange::Replicas(it) => drop(self.replicas.insert(it.component, it)),
            RouteChange::Settings(it) => self.settings = it,
            RouteChange::GatewayHost(it) => drop(self.gateway_hosts.insert(it.key.clone(), it)),
            RouteChange::ReservedHost(host) => _ = self.reserved_hosts.insert(host),
            RouteChange::Certificate(it) => drop(self.certificates.insert(it.name.clone(), it)),
            RouteChange::ClientCa(it) => drop(self.client_cas.insert(it.name.clone(), it)),
            RouteChange::Removed(_) => self.remove(&key),
            RouteChange::Synced => {}
        }
        Some(key)
    }

    fn remove(&mut self, key: &RouteKey) {
        match key {
            RouteKey::Service(name) => drop(self.services.remove(name)),
            RouteKey::Revision(name) => drop(self.revisions.remove(name)),
            RouteKey::Pod(uid) => drop(self.pods.remove(uid)),
            RouteKey::Activator(name) => drop(self.activators.remove(name)),
            RouteKey::Node(name) => drop(self.nodes.remove(name)),
            RouteKey::Replicas(component) => drop(self.replicas.remove(component)),
            RouteKey::Settings => self.settings = GlobalSettings::default(),
            RouteKey::GatewayHost(key) => drop(self.gateway_hosts.remove(key)),
            RouteKey::ReservedHost(host) => _ = self.reserved_hosts.remove(host),
            RouteKey::Certificate(name) => drop(self.certificates.remove(name)),
            RouteKey::ClientCa(name) => drop(self.client_cas.remove(name)),
        }
    }
}

/// Calls `each` for every value of `next` that is new or differs in `now`.
fn for_each_changed<K: Ord, V: Clone + PartialEq>(
    now: &BTreeMap<K, V>,
    next: &BTreeMap<K, V>,
    each: impl FnMut(V),
) {
    let new = next.iter().filter(|(key, value)| now.get(key) != Some(value));
    new.map(|(_, value)| value.clone()).for_each(each);
}

/// Receiver's copy of the RouteTable, kept when a stream breaks.
///
/// Call [`begin_stream`](Self::begin_stream) when a stream opens and [`apply_item`](Self::apply_item) for each item.
/// The table is consistent, and may be acted on, only when `apply_item` has returned a set.
#[derive(Clone, Debug, Default)]
pub struct RouteView {
    /// Table as received so far; consistent after each `Synced`.
    pub table: RouteTable,
    /// Version in force; 0 before the first `Synced` of a stream.
    pub version: u64,
    /// Subjects that the stream has not named yet; `None` after its first `Synced`.
    not_yet_named: Option<BTreeSet<RouteKey>>,
    /// Keys changed since the last `Synced`.
    changed: BTreeSet<RouteKey>,
    policy_pool: ScalePolicyPool,
}

impl RouteView {
    /// Begins a new stream: every subject not named before its first `Synced` will be removed.
    pub fn begin_stream(&mut self) {
        self.not_yet_named = Some(self.table.keys());
        self.version = 0;
    }

    /// Returns true if the current stream has named every subject.
    pub fn is_synced(&self) -> bool {
        self.version > 0
    }

    /// Applies one item. At `Synced`, which ends each batch, returns the keys changed since the last one.
    pub fn apply_item(&mut self, mut item: RouteItem) -> Option<BTreeSet<RouteKey>> {
        // Policies arrive as separate copies: ten thousand Revisions then share a handful.
        if let RouteChange::Revision(entry) = &mut item.change {
            entry.policy = entry.policy.take().map(|policy| self.policy_pool.intern(policy));
        }
        let synced = matches!(item.change, RouteChange::Synced);
        if synced {
            // The first `Synced` of a stream: what the new stream did not name was removed while this end was away.
            for key in self.not_yet_named.take().into_iter().flatten() {
                self.table.remove(&key);
                self.changed.insert(key);
            }
            self.version = item.version;
        } else {
            let key = self.table.apply_change(item.change);
            if let (Some(unnamed), Some(key)) = (&mut self.not_yet_named, &key) {
                unnamed.remove(key);
            }
            self.changed.extend(key);
        }
        synced.then(|| std::mem::take(&mut self.changed))
    }
}
