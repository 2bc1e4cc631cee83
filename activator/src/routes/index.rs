//! Shell: the RouteTable, indexed for look-ups by requests.
//!
//! Ten thousand services may be asleep here. Each name is stored once, in the object that it names, and the indexes
//! hold only references to that object.

use std::{
    borrow::Borrow as _,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use common::{
    link::{RouteBatch, RouteChanges},
    service_routing::NodeTopology,
    wire::{self, ConnectionPath, NamespacedName, RouteChange, RouteKey, RoutingPhase},
};
use tokio::sync::watch;

use crate::{
    revisions::{
        revision::{ActivatorRevision, RevisionContext},
        route_settings::{PodTable, PodTableEntry, RevisionRouteSettings, mark_preferred},
    },
    routes::{
        index_entries::{HostIndexEntry, NameIndexEntry},
        service::{RoutedService, ServiceMatch, TrafficShare},
    },
    slots::peers::Peers,
};

/// Time for which requests wait for a Revision that is not in the RouteTable. Another controller may know of it a
/// little later, and a Revision that is made again has the same name.
const MISSING_REVISION_TIMEOUT: Duration = Duration::from_secs(2);

/// Indexes of the RouteTable by port, host and name. Shared by all connections; locks are held for single look-ups.
#[derive(Debug)]
pub struct RouteIndex {
    revision_context: Arc<RevisionContext>,
    state: RwLock<RouteIndexState>,
    listing: watch::Sender<ActivatorListing>,
}

/// Presence of this activator in the RouteTable: while it is listed, connections are routed here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivatorListing {
    /// It was never listed, so the table gives no information.
    #[default]
    NotListedYet,
    /// It is listed now.
    Listed,
    /// It was listed, and is not any more.
    Removed,
}

#[derive(Debug, Default)]
struct RouteIndexState {
    services: HashSet<NameIndexEntry<RoutedService>>,
    by_port: HashMap<u16, Arc<RoutedService>>,
    by_host: HashSet<HostIndexEntry>,
    /// Services whose host belongs to another service too, by host.
    shadowed_hosts: HashMap<Box<str>, Vec<HostIndexEntry>>,
    /// Revisions that are in the table or are referred to.
    revisions: HashSet<NameIndexEntry<ActivatorRevision>>,
    /// Subset of `revisions` that is not in the table, not yet or not any more, with the time of the change.
    missing_since: BTreeMap<NamespacedName, Instant>,
    /// Pods by Revision; Revisions without pods have no entry.
    pods_by_revision: BTreeMap<NamespacedName, PodTable>,
    /// Revision of each pod, by the pod's uid.
    revision_by_pod: HashMap<String, NamespacedName>,
    /// Addresses of the activators, by name.
    activator_addresses: BTreeMap<String, Vec<IpAddr>>,
    /// Node and zone of this activator, once the table has listed it.
    own_place: NodeTopology,
}

impl RouteIndex {
    /// Creates empty indexes, by which nothing is routed.
    pub fn new(revision_context: RevisionContext) -> Self {
        let listing = watch::Sender::new(ActivatorListing::NotListedYet);
        Self { revision_context: Arc::new(revision_context), state: RwLock::default(), listing }
    }

    /// View of the other activators, and the claims and grants for them.
    pub fn peers(&self) -> &Arc<Peers> {
        &self.revision_context.peers
    }

    /// Service behind a port of the activator.
    pub fn service_by_port(&self, port: u16) -> Option<Arc<RoutedService>> {
        self.read().by_port.get(&port).cloned()
    }

    /// Service behind a host, which is in lower case and without port.
    pub fn match_host(&self, host: &str) -> Option<ServiceMatch> {
        let index = self.read();
        let HostIndexEntry { service, host_index } = index.by_host.get(host)?;
        let domain_index = host_index.checked_sub(service.hosts.len());
        Some(ServiceMatch { service: Arc::clone(service), domain_index })
    }

    /// Service with this name.
    pub fn service_by_name(&self, name: &NamespacedName) -> Option<Arc<RoutedService>> {
        self.read().services.get(name).map(|it| Arc::clone(&it.0))
    }

    /// Service of a Revision's own name: all of its requests are for that Revision.
    pub fn service_for_revision(&self, name: &NamespacedName) -> Option<Arc<RoutedService>> {
        let index = self.read();
        let revision = Arc::clone(&index.revisions.get(name)?.0);
        // A Revision that is only referred to is not in the table, not yet or not any more.
        if index.missing_since.contains_key(name) {
            return None;
        }
        Some(Arc::new(RoutedService {
            name: name.clone(),
            targets: Box::new([TrafficShare { revision, percent: 100 }]),
            path: ConnectionPath::Activator,
            path_since: Instant::now(),
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

    /// Ports that should be open.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.read().by_port.keys().copied().collect()
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

    /// Applies a batch of the RouteTable. Requests that wait for a pod that is ready now are dispatched at once.
    /// Returns true if the set of ports to open has changed.
    pub fn apply(&self, batch: RouteBatch) -> bool {
        let (mut ports_changed, mut activators_changed) = (false, false);
        let mut index = self.write();
        let mut changes = batch.changes;
        let peers = self.revision_context.peers.view();
        let mut touched = index.update_own_place(&changes, &peers.own_name);
        // A snapshot has no entries for what is gone, so removals are derived from what is known here.
        if batch.is_snapshot {
            let removed = index.keys_missing_in(&changes);
            changes.extend(removed.into_iter().map(|key| (key.clone(), RouteChange::Removed(key))));
        }
        for change in changes.into_values() {
            match change {
                RouteChange::Service(service) => {
                    ports_changed |= index.set_service(service, &self.revision_context)
                }
                RouteChange::Revision(revision) => {
                    let settings = RevisionRouteSettings::new(&revision);
                    index.set_route_settings(
                        &revision.name,
                        Some(settings),
                        &self.revision_context,
                    );
                    touched.insert(revision.name);
                }
                RouteChange::Pod(it) => touched.extend(index.set_pod(*it)),
                RouteChange::Removed(RouteKey::Service(name)) => {
                    ports_changed |= index.remove_service(&name).is_some();
                }
                RouteChange::Removed(RouteKey::Revision(name)) => {
                    index.set_route_settings(&name, None, &self.revision_context);
                    touched.insert(name);
                }
                RouteChange::Removed(RouteKey::Pod(uid)) => touched.extend(index.remove_pod(&uid)),
                RouteChange::Activator(wire::ActivatorEntry { name, addresses, .. }) => {
                    let before = index.activator_addresses.insert(name, addresses.clone());
                    activators_changed |= before != Some(addresses);
                }
                RouteChange::Removed(RouteKey::Activator(name)) => {
                    activators_changed |= index.activator_addresses.remove(&name).is_some();
                }
                RouteChange::Node(_)
                | RouteChange::Replicas(_)
                | RouteChange::Settings(_)
                | RouteChange::Removed(RouteKey::Node(_))
                | RouteChange::Removed(RouteKey::Replicas(_) | RouteKey::Settings)
                | RouteChange::Synced => {}
            }
        }
        // The view is changed while the index is locked, so that two batches cannot be applied to it in the wrong
        // order.
        activators_changed = activators_changed && self.update_peers(&index);
        drop(index);
        if activators_changed {
            self.reconcile_all_slots();
        }
        // Revisions dispatch requests, so they are updated without the lock, which a request's look-up needs.
        touched.iter().for_each(|name| self.update_revision_pods(name));
        self.drop_unreferenced_revisions();
        ports_changed
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
        let index = self.read();
        let Some(revision) = index.revisions.get(name).map(|it| Arc::clone(&it.0)) else { return };
        // A Revision that is not in the table has no pods, whatever the table's pods state.
        let pods = index
            .pods_by_revision
            .get(name)
            .filter(|_| !index.missing_since.contains_key(name))
            .cloned();
        let own_place = index.own_place.clone();
        drop(index);
        let mut pods = pods.unwrap_or_default();
        mark_preferred(&mut pods, &own_place);
        revision.set_pods(&pods);
    }

    fn read(&self) -> RwLockReadGuard<'_, RouteIndexState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, RouteIndexState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn first_host_by_service_name(all: &[HostIndexEntry]) -> Option<usize> {
    (0..all.len()).min_by_key(|at| &all[*at].service.name)
}

impl RouteIndexState {
    /// Adds or replaces a service. Returns true if its port has changed.
    fn set_service(&mut self, entry: wire::ServiceEntry, context: &Arc<RevisionContext>) -> bool {
        // Clients are asked to reconnect one after the other from this time on, so only a change of the path begins it
        // again.
        let same_path = |it: &&NameIndexEntry<RoutedService>| it.0.path == entry.connection_path;
        let since = self.services.get(&entry.name).filter(same_path).map(|it| it.0.path_since);
        let port_before = self.remove_service(&entry.name);
        let targets = entry.targets.into_iter().map(|target| TrafficShare {
            revision: self.get_or_create_revision(&target.revision, context),
            percent: target.percent,
        });
        let service = Arc::new(RoutedService {
            targets: targets.collect(),
            name: entry.name,
            path: entry.connection_path,
            path_since: since.unwrap_or_else(Instant::now),
            port: entry.activator_port.get(),
            hosts: entry.hosts.into_iter().map(Into::into).collect(),
            gateway_rules: entry.gateway_rules,
        });
        // The entries of the service's former state are gone, so that only those of other services can be in the way.
        self.by_port.insert(service.port, Arc::clone(&service));
        for host_index in 0..service.hosts.len() + service.domains().len() {
            self.add_host(HostIndexEntry { service: Arc::clone(&service), host_index });
        }
        let port = service.port;
        self.services.insert(NameIndexEntry(service));
        port_before != Some(port)
    }

    /// Removes a service. Returns the port that it had.
    fn remove_service(&mut self, name: &NamespacedName) -> Option<u16> {
        let NameIndexEntry(old) = self.services.take(name)?;
        // Another service may have got the port or the host in the same batch.
        if self.by_port.get(&old.port).is_some_and(|it| Arc::ptr_eq(it, &old)) {
            self.by_port.remove(&old.port);
        }
        for host in (0..).map_while(|at| old.nth_host(at)) {
            self.remove_host(host, &old);
        }
        Some(old.port)
    }

    /// Adds a host. The controller lists each host once. Should a table list one twice, the service that is first by
    /// name has it. That is the same at every activator, in any order of the entries.
    fn add_host(&mut self, new: HostIndexEntry) {
        let host: &str = new.borrow();
        let shadowed = match self.by_host.get(host) {
            Some(present) if present.service.name < new.service.name => new,
            Some(_) | None => match self.by_host.replace(new) {
                Some(before) => before,
                None => return,
            },
        };
        let host: &str = shadowed.borrow();
        self.shadowed_hosts.entry(host.into()).or_default().push(shadowed);
    }

    fn remove_host(&mut self, host: &str, service: &Arc<RoutedService>) {
        let is_of_service = |it: &HostIndexEntry| Arc::ptr_eq(&it.service, service);
        if self.by_host.get(host).is_some_and(is_of_service) {
            self.by_host.remove(host);
        }
        let Some(mut shadowed) = self.shadowed_hosts.remove(host) else { return };
        shadowed.retain(|it| !is_of_service(it));
        if let (None, Some(first)) = (self.by_host.get(host), first_host_by_service_name(&shadowed))
        {
            self.by_host.insert(shadowed.swap_remove(first));
        }
        if !shadowed.is_empty() {
            self.shadowed_hosts.insert(host.into(), shadowed);
        }
    }

    /// Revision with this name, created if necessary, also if it is not in the table.
    fn get_or_create_revision(
        &mut self,
        name: &NamespacedName,
        context: &Arc<RevisionContext>,
    ) -> Arc<ActivatorRevision> {
        if let Some(existing) = self.revisions.get(name) {
            return Arc::clone(&existing.0);
        }
        let revision = Arc::new(ActivatorRevision::new(name.clone(), Arc::clone(context)));
        self.missing_since.insert(name.clone(), Instant::now());
        self.revisions.insert(NameIndexEntry(Arc::clone(&revision)));
        revision
    }

    /// Sets a Revision's settings. Requests that wait at a Revision that leaves the table stay for a while, in case it
    /// returns.
    fn set_route_settings(
        &mut self,
        name: &NamespacedName,
        settings: Option<RevisionRouteSettings>,
        context: &Arc<RevisionContext>,
    ) {
        if settings.is_some() {
            self.get_or_create_revision(name, context).set_route_settings(settings);
            self.missing_since.remove(name);
        } else if let Some(revision) = self.revisions.get(name) {
            revision.0.set_route_settings(None);
            self.missing_since.entry(name.clone()).or_insert_with(Instant::now);
        }
    }

    /// Drops Revisions that are not referred to. Returns their names.
    fn take_unreferenced_revisions(&mut self) -> Vec<NamespacedName> {
        // References are copied from this index or from another reference. If the index has the only one, no other can
        // arise while the index is locked.
        let is_unreferenced = |name: &&NamespacedName| {
            let revision = self.revisions.get(*name);
            revision.is_some_and(|it| Arc::strong_count(&it.0) == 1 && !it.0.has_slots())
        };
        let unreferenced: Vec<NamespacedName> =
            self.missing_since.keys().filter(is_unreferenced).cloned().collect();
        for name in &unreferenced {
            self.revisions.remove(name);
            self.missing_since.remove(name);
        }
        unreferenced
    }

    /// Updates node and zone of the activator with the name `own_name`. Returns the Revisions whose hints may prefer
    /// other pods now.
    fn update_own_place(
        &mut self,
        changes: &RouteChanges,
        own_name: &str,
    ) -> BTreeSet<NamespacedName> {
        let own = changes.get(&RouteKey::Activator(own_name.to_owned()));
        let Some(RouteChange::Activator(own)) = own else { return BTreeSet::new() };
        let place = NodeTopology { name: own.node.as_str().into(), zone: own.zone.as_str().into() };
        if self.own_place == place {
            return BTreeSet::new();
        }
        self.own_place = place;
        self.pods_by_revision.keys().cloned().collect()
    }

    /// Adds or replaces a pod. Returns the Revisions whose pods have changed.
    fn set_pod(&mut self, entry: wire::PodEntry) -> Vec<NamespacedName> {
        let mut touched: Vec<NamespacedName> = self.remove_pod(&entry.uid).into_iter().collect();
        let is_ready = entry.phase == RoutingPhase::Ready;
        let pod = PodTableEntry {
            address: entry.address,
            is_ready,
            name: entry.name.into(),
            hints: entry.hints,
            is_preferred: false,
        };
        self.pods_by_revision
            .entry(entry.revision.clone())
            .or_default()
            .insert(entry.uid.clone(), pod);
        self.revision_by_pod.insert(entry.uid, entry.revision.clone());
        touched.push(entry.revision);
        touched
    }

    /// Removes a pod. Returns the Revision that it had.
    fn remove_pod(&mut self, uid: &str) -> Option<NamespacedName> {
        let revision = self.revision_by_pod.remove(uid)?;
        if let Some(pods) = self.pods_by_revision.get_mut(&revision) {
            pods.remove(uid);
            if pods.is_empty() {
                self.pods_by_revision.remove(&revision);
            }
        }
        Some(revision)
    }

    /// Subjects that are missing in a snapshot.
    fn keys_missing_in(&self, changes: &RouteChanges) -> Vec<RouteKey> {
        let services = self.services.iter().map(|it| RouteKey::Service(it.0.name.clone()));
        let revisions = self.revisions.iter().map(|it| RouteKey::Revision(it.0.name.clone()));
        let pods = self.revision_by_pod.keys().cloned().map(RouteKey::Pod);
        let activators = self.activator_addresses.keys().cloned().map(RouteKey::Activator);
        let all = services.chain(revisions).chain(pods).chain(activators);
        all.filter(|key| !changes.contains_key(key)).collect()
    }
}
