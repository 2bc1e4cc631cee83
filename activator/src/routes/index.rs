//! Shell: the RouteTable, indexed for look-ups by requests.
//!
//! Ten thousand services may be asleep here. Each name is stored once, in the object that it names, and the indexes
//! hold only references to that object.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    link::{RouteBatch, RouteChanges},
    service_routing::NodeTopology,
    wire::{ClientAuth, ConnectionPath, DomainProtocol, NamespacedName, RouteChange, RouteKey},
};
use tokio::sync::watch;

use crate::{
    revisions::{
        revision::{ActivatorRevision, RevisionContext},
        route_settings::PodTable,
    },
    routes::{
        agent_reports::AgentStreamNumber,
        gateway_rules::GatewayHostRules,
        match_rules::MatchRule,
        path_match::HostPathError,
        service::{RoutedService, TrafficShare},
        service_match::ServiceMatch,
    },
    slots::peers::Peers,
};

mod batch_slices;
mod plain_services;
mod state;

use batch_slices::{MAX_SLICE_CHANGES, divide_changes};
use plain_services::plain_context;
use state::RouteIndexState;

/// Time for which requests wait for a Revision that is not in the RouteTable. Another controller may know of it a
/// little later, and a Revision that is made again has the same name.
const MISSING_REVISION_TIMEOUT: Duration = Duration::from_secs(2);

/// Indexes of the RouteTable by port, host and name. Shared by all connections; locks are held for single look-ups.
#[derive(Debug)]
pub struct RouteIndex {
    revision_context: Arc<RevisionContext>,
    /// Context of Services of the cluster, which have no Revisions.
    plain_context: Arc<RevisionContext>,
    /// False while no host has rules of the Gateway API, so that requests need no look-up for them.
    has_gateway_hosts: AtomicBool,
    /// Number of changes by which a host may have got another route.
    generation: AtomicU64,
    state: RwLock<RouteIndexState>,
    /// Held while the pods of a Revision are copied from the state and put in force. Table and reports change them in
    /// several tasks, and an older copy must not replace a newer one.
    pods_update: Mutex<()>,
    listing: watch::Sender<ActivatorListing>,
}

/// Presence of this activator in the RouteTable: while it is listed, connections are routed here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivatorListing {
    /// The table has not listed this activator yet, so it gives no information.
    #[default]
    NotListedYet,
    /// The table lists this activator.
    Listed,
    /// The table listed this activator, and does not any more.
    Removed,
}

/// Rules of a host for handshakes of TLS.
#[derive(Clone, Debug, Default)]
pub struct HandshakeRules {
    /// Secrets whose certificates are for the host. Without any, the certificate is chosen by names.
    pub certificates: Vec<NamespacedName>,
    /// Rule for certificates of clients; `None`: clients are asked for none.
    pub client_auth: Option<ClientAuth>,
    /// Service that gets the bytes within TLS as raw TCP; `None`: they are HTTP.
    pub tcp_service: Option<Arc<RoutedService>>,
}

/// Effects of changes beyond the index.
#[derive(Debug, Default)]
struct SliceEffects {
    /// Revisions whose settings or pods have changed.
    touched: BTreeSet<NamespacedName>,
    /// True if other ports are to be open.
    ports_changed: bool,
    /// True if activators have come or gone, or have other addresses.
    activators_changed: bool,
}

impl RouteIndex {
    /// Creates empty indexes, by which nothing is routed.
    pub fn new(revision_context: RevisionContext) -> Self {
        let listing = watch::Sender::new(ActivatorListing::NotListedYet);
        let early_ready_pods = revision_context.pod_settings.metrics.early_ready_pods.clone();
        Self {
            plain_context: Arc::new(plain_context(&revision_context)),
            has_gateway_hosts: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            revision_context: Arc::new(revision_context),
            state: RwLock::new(RouteIndexState::new(early_ready_pods)),
            pods_update: Mutex::default(),
            listing,
        }
    }

    /// View of the other activators, and the claims and grants for them.
    pub fn peers(&self) -> &Arc<Peers> {
        &self.revision_context.peers
    }

    /// Service that a request for this path finds by this rule.
    pub(crate) fn find_service(
        &self,
        rule: &MatchRule,
        path: &str,
    ) -> Result<Option<ServiceMatch>, HostPathError> {
        let service = match rule {
            MatchRule::OwnPort(port) => self.service_by_port(*port),
            MatchRule::GatewayPort(port) => self.service_by_gateway_port(*port),
            MatchRule::ServiceName(name) => self.service_by_name(name),
            MatchRule::RevisionName(name) | MatchRule::ChosenRevision(name) => {
                self.service_for_revision(name)
            }
            MatchRule::Host(host) => return self.match_host_path(host, path),
        };
        Ok(service.map(ServiceMatch::from))
    }

    /// Service behind a port of the activator.
    pub fn service_by_port(&self, port: u16) -> Option<Arc<RoutedService>> {
        self.read().by_port.get(&port).cloned()
    }

    /// Service behind a gateway port.
    pub fn service_by_gateway_port(&self, port: u16) -> Option<Arc<RoutedService>> {
        let index = self.read();
        let mut claimants = index.by_gateway_port.range((port, NamespacedName::EMPTY)..);
        let ((found, _), service) = claimants.next()?;
        (*found == port).then(|| Arc::clone(service))
    }

    /// Service behind a host that has no path rules. The host is in lower case and without port.
    pub fn match_host(&self, host: &str) -> Option<ServiceMatch> {
        self.read().match_host(host)
    }

    /// Returns true if TLS of any host is passed through.
    pub fn has_passthrough_hosts(&self) -> bool {
        self.read().passthrough_hosts > 0
    }

    /// Service to which TLS of this host is passed through; the host is in lower case and without port.
    pub fn passthrough_service(&self, host: &str) -> Option<Arc<RoutedService>> {
        let index = self.read();
        // A listener with exactly this host goes before the wildcard of a DomainMapping, as it does for HTTP.
        if index.gateway_host(true, host).is_some() {
            return None;
        }
        index.tcp_service_of_host(host, DomainProtocol::TlsPassthrough)
    }

    /// Service behind a host for this path. The host is in lower case and without port.
    fn match_host_path(
        &self,
        host: &str,
        path: &str,
    ) -> Result<Option<ServiceMatch>, HostPathError> {
        let index = self.read();
        // Hosts without path rules cost this look-up only.
        match index.match_host(host) {
            Some(found) => Ok(Some(found)),
            None => index.ruled_hosts.find(host, path),
        }
    }

    /// Number of changes so far by which a host may have got another route. A route that was looked up since the last one
    /// is still right. Pods are no part of a route: its Revision has them.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns true if any host has rules of the Gateway API.
    pub(crate) fn has_gateway_hosts(&self) -> bool {
        self.has_gateway_hosts.load(Ordering::Relaxed)
    }

    /// Rules of the Gateway API for a host, which is in lower case and without port. `None`: there are none, or the host
    /// is one of a Route or DomainMapping.
    pub(crate) fn gateway_host(&self, is_tls: bool, host: &str) -> Option<Arc<GatewayHostRules>> {
        self.read().gateway_host(is_tls, host)
    }

    /// Revisions that stand for Services of the cluster, to which rules of the Gateway API lead.
    pub fn plain_revisions(&self) -> Vec<Arc<ActivatorRevision>> {
        self.read().plain_services.revisions().cloned().collect()
    }

    /// Drops Services of the cluster to which no rule of the Gateway API leads any more.
    pub fn drop_unused_plain_services(&self) {
        // Nearly always there are none, and requests need not wait for the lock.
        if !self.read().plain_services.is_empty() {
            self.write().plain_services.drop_unused(&self.plain_context);
        }
    }

    /// Service behind a host in the form of the list of hosts. A host with path rules is followed by one of its
    /// prefixes, and a wildcard stands for itself.
    pub(crate) fn match_listed_host(&self, listed: &str) -> Option<ServiceMatch> {
        let index = self.read();
        let rule = || {
            let at = listed.find('/')?;
            index.ruled_hosts.find_rule(&listed[..at], &listed[at..])
        };
        index.match_host(listed).or_else(rule)
    }

    /// Rules of this host for handshakes, by its DomainMappings or by the Gateway API; the host is in lower case and
    /// without port. Other hosts have none.
    pub fn handshake_rules(&self, host: &str) -> HandshakeRules {
        let index = self.read();
        // A host of raw TCP over TLS has a handshake like others, after which its bytes are no HTTP.
        let tcp_service = index.tcp_service_of_host(host, DomainProtocol::TcpOverTls);
        let Some(found) = index.match_host(host) else {
            if let Some(rules) = index.gateway_host(true, host) {
                let certificates = rules.certificates().to_vec();
                return HandshakeRules { certificates, client_auth: None, tcp_service: None };
            }
            // All path rules of a host share one handshake, since the path is not known before its end.
            let (certificate, client_auth) = index.ruled_hosts.handshake_rules(host);
            let certificates = certificate.into_iter().collect();
            return HandshakeRules { certificates, client_auth, tcp_service };
        };
        let rules = found.domain().map(|it| HandshakeRules {
            certificates: it.certificate.iter().cloned().collect(),
            client_auth: it.client_auth.clone(),
            tcp_service,
        });
        rules.unwrap_or_default()
    }

    /// Response to the challenge of an authority for this host, which is in lower case and without port.
    pub fn challenge_response(&self, host: &str, token: &str) -> Option<String> {
        let index = self.read();
        let mut of_host = index.challenges.get(host)?.iter();
        of_host.find(|(it, _)| it.token == token).map(|(it, _)| it.response.clone())
    }

    /// Service with this name.
    pub fn service_by_name(&self, name: &NamespacedName) -> Option<Arc<RoutedService>> {
        self.read().services.get(name).map(|it| Arc::clone(&it.0))
    }

    /// Service of a Revision's own name: all of its requests are for that Revision. `None` for the name of a scaled
    /// Service, which states none of its ports: each of them is a service of its own.
    pub fn service_for_revision(&self, name: &NamespacedName) -> Option<Arc<RoutedService>> {
        let index = self.read();
        let revision = Arc::clone(&index.revisions.get(name)?.0);
        // A Revision that is only referred to is not in the table, not yet or not any more.
        if index.missing_since.contains_key(name) || revision.is_of_scaled_service() {
            return None;
        }
        Some(Arc::new(RoutedService {
            name: name.clone(),
            targets: Box::new([TrafficShare { revision, percent: 100 }]),
            path: ConnectionPath::Activator,
            path_since: Instant::now(),
            protocol: None,
            service_port: None,
            serves_local_tls: false,
            port: 0,
            hosts: Box::default(),
            gateway_rules: None,
        }))
    }

    /// Presence of this activator in the table, with every change of it.
    pub fn subscribe_listing(&self) -> watch::Receiver<ActivatorListing> {
        self.listing.subscribe()
    }

    /// Revision with this name.
    pub fn revision(&self, name: &NamespacedName) -> Option<Arc<ActivatorRevision>> {
        self.read().revisions.get(name).map(|it| Arc::clone(&it.0))
    }

    /// Revision with this name, in the table or not: another activator may know of it earlier or longer.
    pub fn get_or_create_revision(&self, name: &NamespacedName) -> Arc<ActivatorRevision> {
        let revision = self.revision(name);
        revision
            .unwrap_or_else(|| self.write().get_or_create_revision(name, &self.revision_context))
    }

    /// Updates the slots of all Revisions, because the known activators have changed.
    pub fn reconcile_all_slots(&self) {
        self.revisions().iter().for_each(|revision| revision.on_peer_view());
    }

    /// All Revisions that have pods.
    pub fn revisions_with_pods(&self) -> Vec<Arc<ActivatorRevision>> {
        let index = self.read();
        let revisions = index.pods_by_revision.keys().filter_map(|name| index.revisions.get(name));
        revisions.map(|it| Arc::clone(&it.0)).collect()
    }

    /// All Revisions that are known.
    pub fn revisions(&self) -> Vec<Arc<ActivatorRevision>> {
        self.read().revisions.iter().map(|it| Arc::clone(&it.0)).collect()
    }

    /// All services, in no order.
    pub fn services(&self) -> Vec<Arc<RoutedService>> {
        self.read().services.iter().map(|it| Arc::clone(&it.0)).collect()
    }

    /// Pods of a Revision in the table.
    pub fn pod_table(&self, name: &NamespacedName) -> PodTable {
        self.read().pod_table(name)
    }

    /// Node and zone of this activator; empty until the table has listed it.
    pub fn own_place(&self) -> NodeTopology {
        self.read().own_place.clone()
    }

    /// Ports that should be open.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.read().by_port.keys().copied().collect()
    }

    /// Gateway ports that should be open.
    pub fn gateway_ports(&self) -> BTreeSet<u16> {
        self.read().by_gateway_port.keys().map(|(port, _)| *port).collect()
    }

    /// Number of services and number of pods.
    pub fn service_and_pod_counts(&self) -> (usize, usize) {
        let index = self.read();
        (index.services.len(), index.revision_by_pod.len())
    }

    /// Drops Revisions that are not in the table and not referred to, by any service or request.
    pub fn drop_unreferenced_revisions(&self) {
        if self.read().missing_since.is_empty() {
            return;
        }
        for name in self.write().take_unreferenced_revisions() {
            self.revision_context.usage_reporter.remove_revision(&name);
        }
    }

    /// Fails requests that wait at a Revision which, at `now`, was missing in the table for `MISSING_REVISION_TIMEOUT`:
    /// it will have no pod.
    pub fn fail_missing_revisions(&self, now: Instant) {
        let index = self.read();
        let is_overdue =
            |since: Instant| now.saturating_duration_since(since) >= MISSING_REVISION_TIMEOUT;
        let overdue = index.missing_since.iter().filter(|(_, since)| is_overdue(**since));
        let revisions = overdue.filter_map(|(name, _)| index.revisions.get(name));
        let overdue: Vec<_> = revisions.map(|it| Arc::clone(&it.0)).collect();
        drop(index);
        overdue.iter().for_each(|revision| revision.fail_waiters());
    }

    /// Applies a batch of the RouteTable at once. Requests that wait for a pod that is ready now are dispatched at once.
    /// Returns true if the set of ports to open has changed.
    pub fn apply(&self, batch: RouteBatch) -> bool {
        let changes = self.read().changes_with_removals(batch);
        self.apply_slice(changes)
    }

    /// Divides a batch into slices for [`apply_slice`](Self::apply_slice). After each of them every subject is as before the
    /// batch or as after it, and what belongs together changes together.
    pub(crate) fn divide_batch(&self, batch: RouteBatch) -> Vec<RouteChanges> {
        let index = self.read();
        let changes = index.changes_with_removals(batch);
        // Where there are no services, a host leads nowhere until its own service is there. Wildcards, prefixes of paths
        // and tags lead to one of several services, which have to come together.
        let is_first = index.services.is_empty();
        divide_changes(changes, MAX_SLICE_CHANGES, |it| {
            is_first && it.gateway_rules.is_none() || index.keeps_names(it)
        })
    }

    /// Applies changes of the RouteTable, as [`apply`](Self::apply) does.
    pub(crate) fn apply_slice(&self, mut changes: RouteChanges) -> bool {
        if changes.is_empty() {
            return false;
        }
        let routes_changed = changes.keys().any(may_change_routes);
        let mut effects = SliceEffects::default();
        let mut index = self.write();
        self.apply_gateway_hosts(&mut index, &mut changes);
        // Compared afterwards: a zone that gained or lost its only activator changes ranks of pods elsewhere.
        let zones_before = index.activator_zones();
        for change in changes.into_values() {
            self.apply_change(&mut index, change, &mut effects);
        }
        let SliceEffects { mut touched, ports_changed, activators_changed } = effects;
        touched.extend(index.revisions_of_new_zones(&zones_before));
        // The view is changed while the index is locked, so that two batches cannot be applied to it in the wrong
        // order.
        let peers_changed = activators_changed && self.update_peers(&index);
        // While the index is locked: a request that reads the new number finds the new routes.
        self.generation.fetch_add(routes_changed.into(), Ordering::Release);
        drop(index);
        if peers_changed {
            self.reconcile_all_slots();
        }
        // Revisions dispatch requests, so they are updated without the lock, which a request's look-up needs.
        touched.iter().for_each(|name| self.update_revision_pods(name));
        self.drop_unreferenced_revisions();
        ports_changed
    }

    /// Applies one change, except for those of rules of the Gateway API.
    fn apply_change(
        &self,
        index: &mut RouteIndexState,
        change: RouteChange,
        effects: &mut SliceEffects,
    ) {
        let SliceEffects { touched, ports_changed, activators_changed } = effects;
        match change {
            RouteChange::Service(service) => {
                *ports_changed |= index.set_service(service, &self.revision_context);
            }
            RouteChange::Revision(it) => {
                touched.insert(index.set_revision(it, &self.revision_context));
            }
            RouteChange::Pod(it) => touched.extend(index.set_pod(*it)),
            RouteChange::Removed(RouteKey::Service(name)) => {
                *ports_changed |= index.remove_service(&name).is_some();
            }
            RouteChange::Removed(RouteKey::Revision(name)) => {
                index.set_route_settings(&name, None, &self.revision_context);
                touched.insert(name);
            }
            RouteChange::Removed(RouteKey::Pod(uid)) => touched.extend(index.remove_pod(&uid)),
            RouteChange::Activator(entry) => {
                let peers = self.revision_context.peers.view();
                touched.extend(index.update_own_place(&entry, &peers.own_name));
                *activators_changed |= index.set_activator(entry);
            }
            RouteChange::Removed(RouteKey::Activator(name)) => {
                *activators_changed |= index.remove_activator(&name);
            }
            RouteChange::ReservedHost(host) => index.ruled_hosts.reserve(&host),
            RouteChange::Removed(RouteKey::ReservedHost(it)) => index.ruled_hosts.release(&it),
            RouteChange::Node(_)
            | RouteChange::Replicas(_)
            | RouteChange::Settings(_)
            | RouteChange::GatewayHost(_)
            | RouteChange::Certificate(_)
            | RouteChange::ClientCa(_)
            | RouteChange::Removed(RouteKey::Node(_))
            | RouteChange::Removed(
                RouteKey::Replicas(_)
                | RouteKey::Settings
                | RouteKey::GatewayHost(_)
                | RouteKey::Certificate(_)
                | RouteKey::ClientCa(_),
            )
            | RouteChange::Synced => {}
        }
    }

    /// Applies the changes of rules of the Gateway API, and takes them out of `changes`.
    fn apply_gateway_hosts(&self, index: &mut RouteIndexState, changes: &mut RouteChanges) {
        let is_gateway_host = |key: &&RouteKey| matches!(key, RouteKey::GatewayHost(_));
        let keys: Vec<RouteKey> = changes.keys().filter(is_gateway_host).cloned().collect();
        if keys.is_empty() {
            return;
        }
        for key in keys {
            match (changes.remove(&key), key) {
                (Some(RouteChange::GatewayHost(entry)), _) => {
                    index.set_gateway_host(entry, &self.plain_context);
                }
                (_, RouteKey::GatewayHost(key)) => drop(index.gateway_hosts.remove(&key)),
                _ => {}
            }
        }
        // The request path reads this flag without a lock, and most clusters have no such hosts.
        self.has_gateway_hosts.store(!index.gateway_hosts.is_empty(), Ordering::Relaxed);
        index.plain_services.drop_unused(&self.plain_context);
    }

    /// Begins a stream of reports of the agent on this node, and withdraws what its earlier stream has reported.
    pub fn begin_agent_stream(&self, node: &str) -> AgentStreamNumber {
        let mut index = self.write();
        let (stream, withdrawn) = index.agent_reports.begin_stream(node);
        self.update_early_pods(index, &withdrawn);
        stream
    }

    /// Applies the report of an agent that the pod is ready at this address, or (`None`) is not ready. Requests that
    /// wait are dispatched at once if the RouteTable lists the pod as waiting for this report, at the same address.
    pub fn apply_agent_report(
        &self,
        node: &str,
        stream: AgentStreamNumber,
        uid: String,
        ready_at: Option<SocketAddr>,
    ) {
        let mut index = self.write();
        index.agent_reports.record(node, stream, &uid, ready_at);
        self.update_early_pods(index, &[uid]);
    }

    /// Ends a stream of reports of the agent on this node, and withdraws what it has reported. Pods that the RouteTable
    /// lists as ready by now stay ready.
    pub fn end_agent_stream(&self, node: &str, stream: AgentStreamNumber) {
        let mut index = self.write();
        let withdrawn = index.agent_reports.end_stream(node, stream);
        self.update_early_pods(index, &withdrawn);
    }

    /// Puts what agents report now of these pods in force, and unlocks the index before.
    fn update_early_pods(&self, mut index: RwLockWriteGuard<'_, RouteIndexState>, uids: &[String]) {
        let touched = index.update_early_pods(uids);
        drop(index);
        touched.iter().for_each(|name| self.update_revision_pods(name));
    }

    /// Updates the view of the other activators. Returns true if it has changed.
    fn update_peers(&self, index: &RouteIndexState) -> bool {
        let all = index.activator_addresses.iter();
        let all = all.map(|(name, addresses)| (name.as_str().into(), addresses.clone()));
        let peers = &self.revision_context.peers;
        let is_changed = peers.set_listed(all);
        self.update_listing(index.activator_addresses.contains_key(peers.view().own_name.as_str()));
        is_changed
    }

    fn update_listing(&self, is_listed: bool) {
        self.listing.send_if_modified(|listing| {
            let now = match (*listing, is_listed) {
                (_, true) => ActivatorListing::Listed,
                (ActivatorListing::NotListedYet, false) => ActivatorListing::NotListedYet,
                (ActivatorListing::Listed | ActivatorListing::Removed, false) => {
                    ActivatorListing::Removed
                }
            };
            std::mem::replace(listing, now) != now
        });
    }

    fn update_revision_pods(&self, name: &NamespacedName) {
        let _in_order = self.pods_update.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.read();
        let Some(revision) = index.revisions.get(name).map(|it| Arc::clone(&it.0)) else { return };
        let (pods, topology) = (index.pod_table(name), index.activator_topology());
        drop(index);
        revision.set_pods(&pods, &topology);
    }

    fn read(&self) -> RwLockReadGuard<'_, RouteIndexState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, RouteIndexState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if a change of the subject may change the route of a host.
fn may_change_routes(subject: &RouteKey) -> bool {
    match subject {
        RouteKey::Service(_)
        | RouteKey::Revision(_)
        | RouteKey::GatewayHost(_)
        | RouteKey::ReservedHost(_)
        // A route has what the settings tell of proxies.
        | RouteKey::Settings => true,
        RouteKey::Pod(_)
        | RouteKey::Activator(_)
        | RouteKey::Node(_)
        | RouteKey::Replicas(_)
        | RouteKey::Certificate(_)
        | RouteKey::ClientCa(_) => false,
    }
}

#[cfg(test)]
mod tests;
