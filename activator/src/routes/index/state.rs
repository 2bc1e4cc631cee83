//! Shell: the indexes of the RouteTable behind their lock, and each change of them.

use std::{
    borrow::Borrow as _,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
    time::Instant,
};

use common::{
    link::{RouteBatch, RouteChanges},
    service_routing::NodeTopology,
    wire::{
        self, DomainProtocol, GatewayHostKey, HttpChallenge, NamespacedName, RouteChange, RouteKey,
        RoutingPhase,
    },
};
use prometheus_client::metrics::counter::Counter;
use smol_str::SmolStr;

use super::plain_services::PlainServices;
use crate::{
    revisions::{
        revision::{ActivatorRevision, RevisionContext},
        route_settings::{ActivatorTopology, PodTable, PodTableEntry, RevisionRouteSettings},
    },
    routes::{
        agent_reports::AgentReports,
        gateway_rules::GatewayHostRules,
        index_entries::{HostIndexEntry, NameIndexEntry},
        ruled_hosts::RuledHosts,
        service::{OpenPorts, RoutedService, TrafficShare},
        service_match::ServiceMatch,
    },
};

/// Indexes of the RouteTable, and the Revisions that it contains or refers to.
#[derive(Debug, Default)]
pub(super) struct RouteIndexState {
    pub(super) services: HashSet<NameIndexEntry<RoutedService>>,
    pub(super) by_port: HashMap<u16, Arc<RoutedService>>,
    /// Services by their gateway port; few have one.
    /// Should a table list one twice, the service that is first by name has it, as a host.
    pub(super) by_gateway_port: BTreeMap<(u16, NamespacedName), Arc<RoutedService>>,
    pub(super) by_host: HashSet<HostIndexEntry>,
    /// Number of hosts whose TLS is passed through.
    pub(super) passthrough_hosts: usize,
    /// Responses to challenges of authorities, by host, each with the service that has it.
    pub(super) challenges: HashMap<Box<str>, Vec<(HttpChallenge, NamespacedName)>>,
    /// Hosts with path rules or wildcards, which are not in `by_host`.
    pub(super) ruled_hosts: RuledHosts,
    /// Rules of the Gateway API, by host.
    pub(super) gateway_hosts: HashMap<GatewayHostKey, Arc<GatewayHostRules>>,
    /// Services of the cluster to which these rules lead.
    pub(super) plain_services: PlainServices,
    /// Services whose host belongs to another service too, by host.
    shadowed_hosts: HashMap<Box<str>, Vec<HostIndexEntry>>,
    /// Revisions that are in the table or are referred to.
    pub(super) revisions: HashSet<NameIndexEntry<ActivatorRevision>>,
    /// Subset of `revisions` that is not in the table, not yet or not any more, with the time of the change.
    pub(super) missing_since: BTreeMap<NamespacedName, Instant>,
    /// Pods by Revision; Revisions without pods have no entry.
    pub(super) pods_by_revision: BTreeMap<NamespacedName, PodTable>,
    /// Revision of each pod, by the pod's uid.
    pub(super) revision_by_pod: HashMap<String, NamespacedName>,
    /// Pods that agents report as ready.
    pub(super) agent_reports: AgentReports,
    /// Node of each pod that waits for the report of that node's agent, by the pod's uid.
    nodes_of_awaiting_pods: HashMap<String, SmolStr>,
    /// Pods that have become early-ready, by a report or by the table.
    early_ready_pods: Counter,
    /// Addresses of the activators, by name.
    pub(super) activator_addresses: BTreeMap<String, Vec<IpAddr>>,
    /// Zones of the activators, by name; empty for one whose zone is not known.
    activator_zones_by_name: BTreeMap<String, SmolStr>,
    /// Node and zone of this activator, once the table has listed it.
    pub(super) own_place: NodeTopology,
}

impl RouteIndexState {
    /// Creates empty indexes, which count pods that become early-ready.
    pub(super) fn new(early_ready_pods: Counter) -> Self {
        Self { early_ready_pods, ..Self::default() }
    }

    /// Adds or replaces a service. Returns true if one of its ports has changed.
    pub(super) fn set_service(
        &mut self,
        entry: wire::ServiceEntry,
        context: &Arc<RevisionContext>,
    ) -> bool {
        // Clients are asked to reconnect one after the other from this time on, so only a change of the path begins it
        // again.
        let same_path = |it: &&NameIndexEntry<RoutedService>| it.0.path == entry.connection_path;
        let since = self.services.get(&entry.name).filter(same_path).map(|it| it.0.path_since);
        let ports_before = self.remove_service(&entry.name);
        let targets = entry.targets.into_iter().map(|target| TrafficShare {
            revision: self.get_or_create_revision(&target.revision, context),
            percent: target.percent,
        });
        let service = Arc::new(RoutedService {
            targets: targets.collect(),
            name: entry.name,
            path: entry.connection_path,
            path_since: since.unwrap_or_else(Instant::now),
            protocol: entry.protocol,
            service_port: entry.uses_pod_ports.then_some(entry.port),
            serves_local_tls: entry.serves_local_tls,
            port: entry.activator_port.get(),
            hosts: entry.hosts.into_iter().map(Into::into).collect(),
            gateway_rules: entry.gateway_rules,
        });
        // The entries of the service's former state are gone, so that only those of other services can be in the way.
        self.by_port.insert(service.port, Arc::clone(&service));
        if let Some(port) = service.gateway_port() {
            self.by_gateway_port.insert((port, service.name.clone()), Arc::clone(&service));
        }
        for host_index in 0..service.hosts.len() + service.domains().len() {
            if service.nth_path_rule(host_index).is_none() {
                self.add_host(HostIndexEntry { service: Arc::clone(&service), host_index });
            }
        }
        self.passthrough_hosts += service.passthrough_hosts();
        for challenge in service.challenges() {
            let of_host = self.challenges.entry(challenge.host.as_str().into()).or_default();
            of_host.push((challenge.clone(), service.name.clone()));
        }
        self.ruled_hosts.add_service(&service);
        let ports = service.open_ports();
        self.services.insert(NameIndexEntry(service));
        ports_before != Some(ports)
    }

    /// Returns true if the entry only replaces a service that is found by the same names: ports, hosts and tags.
    pub(super) fn keeps_names(&self, entry: &wire::ServiceEntry) -> bool {
        self.services.get(&entry.name).is_some_and(|NameIndexEntry(now)| {
            now.port == entry.activator_port.get()
                && now.hosts.iter().map(|it| &**it).eq(entry.hosts.iter().map(String::as_str))
                && now.gateway_rules == entry.gateway_rules
        })
    }

    /// Adds or replaces the rules of the Gateway API for a host.
    pub(super) fn set_gateway_host(
        &mut self,
        entry: wire::GatewayHostEntry,
        plain_context: &Arc<RevisionContext>,
    ) {
        let key = entry.key.clone();
        let rules = self.plain_services.resolve(entry, plain_context);
        self.gateway_hosts.insert(key, Arc::new(rules));
    }

    /// Removes a service. Returns the ports that it had.
    pub(super) fn remove_service(&mut self, name: &NamespacedName) -> Option<OpenPorts> {
        let NameIndexEntry(old) = self.services.take(name)?;
        // Another service may have got a port or the host in the same batch.
        if self.by_port.get(&old.port).is_some_and(|it| Arc::ptr_eq(it, &old)) {
            self.by_port.remove(&old.port);
        }
        if let Some(port) = old.gateway_port() {
            self.by_gateway_port.remove(&(port, old.name.clone()));
        }
        for host in (0..).map_while(|at| old.nth_host(at)) {
            self.remove_host(host, &old);
        }
        self.passthrough_hosts -= old.passthrough_hosts();
        for challenge in old.challenges() {
            if let Some(of_host) = self.challenges.get_mut(challenge.host.as_str()) {
                of_host.retain(|(_, service)| *service != old.name);
            }
        }
        self.challenges.retain(|_, of_host| !of_host.is_empty());
        self.ruled_hosts.remove_service(&old);
        Some(old.open_ports())
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

    /// Service behind a host that has no path rules.
    pub(super) fn match_host(&self, host: &str) -> Option<ServiceMatch> {
        let HostIndexEntry { service, host_index } = self.by_host.get(host)?;
        let domain_index = host_index.checked_sub(service.hosts.len());
        let service = Arc::clone(service);
        Some(ServiceMatch { service, domain_index, picked_backend: None })
    }

    /// Rules of the Gateway API for a host. A host of a Route or DomainMapping has none, also while the DomainMapping is not
    /// in force. A wildcard of the Gateway API takes no host from one of a DomainMapping.
    pub(super) fn gateway_host(&self, is_tls: bool, host: &str) -> Option<Arc<GatewayHostRules>> {
        // Without the Gateway API, a handshake costs this check only.
        if self.gateway_hosts.is_empty()
            || self.by_host.contains(host)
            || self.ruled_hosts.has_host(host)
        {
            return None;
        }
        let mut keys = GatewayHostKey::candidates(is_tls, host);
        let found = keys.find_map(|key| self.gateway_hosts.get(&key))?;
        let hosts = &self.ruled_hosts;
        let is_free = match found.key().is_exact() {
            true => !hosts.is_reserved(host),
            false => !hosts.covers(host) && !hosts.is_below_reserved(host),
        };
        (is_free && !found.reserves(host)).then(|| Arc::clone(found))
    }

    /// Service of raw TCP behind a host whose clients speak `protocol`. A handshake shows no path, so a rule of the host
    /// must be the only one.
    pub(super) fn tcp_service_of_host(
        &self,
        host: &str,
        protocol: DomainProtocol,
    ) -> Option<Arc<RoutedService>> {
        let found = self.match_host(host).or_else(|| self.ruled_hosts.find_only_rule(host))?;
        found.domain().is_some_and(|it| it.protocol == protocol).then_some(found.service)
    }

    fn remove_host(&mut self, host: &str, service: &Arc<RoutedService>) {
        let is_of_service = |it: &HostIndexEntry| Arc::ptr_eq(&it.service, service);
        if self.by_host.get(host).is_some_and(is_of_service) {
            self.by_host.remove(host);
        }
        let Some(mut shadowed) = self.shadowed_hosts.remove(host) else { return };
        shadowed.retain(|it| !is_of_service(it));
        // The host goes to the next service that wants it, in an order that all replicas share.
        if let (None, Some(first)) = (self.by_host.get(host), first_host_by_service_name(&shadowed))
        {
            self.by_host.insert(shadowed.swap_remove(first));
        }
        if !shadowed.is_empty() {
            self.shadowed_hosts.insert(host.into(), shadowed);
        }
    }

    /// Revision with this name, created if necessary, also if it is not in the table.
    pub(super) fn get_or_create_revision(
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

    /// Adds or replaces a Revision of the table. Returns its name.
    pub(super) fn set_revision(
        &mut self,
        entry: wire::RevisionEntry,
        context: &Arc<RevisionContext>,
    ) -> NamespacedName {
        let settings = Some(RevisionRouteSettings::new(&entry));
        self.set_route_settings(&entry.name, settings, context);
        entry.name
    }

    /// Sets a Revision's settings. Requests that wait at a Revision that leaves the table stay for a while, in case it
    /// returns.
    pub(super) fn set_route_settings(
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
    pub(super) fn take_unreferenced_revisions(&mut self) -> Vec<NamespacedName> {
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

    /// Updates node and zone of this activator if the entry has its name. Returns the Revisions whose hints may prefer
    /// other pods now.
    pub(super) fn update_own_place(
        &mut self,
        entry: &wire::ActivatorEntry,
        own_name: &str,
    ) -> Vec<NamespacedName> {
        let (name, zone) = (entry.node.as_str().into(), entry.zone.as_str().into());
        let place = NodeTopology { name, zone };
        if entry.name != own_name || self.own_place == place {
            return Vec::new();
        }
        self.own_place = place;
        self.pods_by_revision.keys().cloned().collect()
    }

    /// Adds or replaces an activator. Returns true if its addresses have changed.
    pub(super) fn set_activator(&mut self, entry: wire::ActivatorEntry) -> bool {
        let wire::ActivatorEntry { name, zone, addresses, .. } = entry;
        self.activator_zones_by_name.insert(name.clone(), zone.into());
        let before = self.activator_addresses.insert(name, addresses.clone());
        before != Some(addresses)
    }

    /// Removes an activator. Returns true if it was known.
    pub(super) fn remove_activator(&mut self, name: &str) -> bool {
        self.activator_zones_by_name.remove(name);
        self.activator_addresses.remove(name).is_some()
    }

    /// Zones in which activators are.
    pub(super) fn activator_zones(&self) -> BTreeSet<SmolStr> {
        self.activator_zones_by_name.values().cloned().collect()
    }

    /// Pods of a Revision. One that is not in the table has none, whatever the table's pods state.
    pub(super) fn pod_table(&self, name: &NamespacedName) -> PodTable {
        let pods = self.pods_by_revision.get(name);
        pods.filter(|_| !self.missing_since.contains_key(name)).cloned().unwrap_or_default()
    }

    /// Places of this activator and of the others.
    pub(super) fn activator_topology(&self) -> ActivatorTopology {
        ActivatorTopology { own_place: self.own_place.clone(), zones: self.activator_zones() }
    }

    /// Returns the Revisions whose hints may prefer other pods, if activators were in the zones `before`.
    pub(super) fn revisions_of_new_zones(
        &self,
        before: &BTreeSet<SmolStr>,
    ) -> BTreeSet<NamespacedName> {
        if self.activator_zones() == *before {
            return BTreeSet::new();
        }
        self.pods_by_revision.keys().cloned().collect()
    }

    /// Adds or replaces a pod. Returns the Revisions whose pods have changed.
    pub(super) fn set_pod(&mut self, entry: wire::PodEntry) -> Vec<NamespacedName> {
        let was_early_ready = self.is_early_ready(&entry.uid);
        let mut touched: Vec<NamespacedName> = self.remove_pod(&entry.uid).into_iter().collect();
        // A draining pod gets no request, whatever its agent reports.
        let awaits_report = entry.awaits_report && entry.phase == RoutingPhase::Starting;
        let reports = &self.agent_reports;
        let is_reported = |address| reports.is_ready_at(&entry.node, &entry.uid, address);
        let is_early_ready = awaits_report && entry.address.is_some_and(is_reported);
        // The report may come before the table that states that the pod awaits it.
        self.early_ready_pods.inc_by((is_early_ready && !was_early_ready).into());
        let place = NodeTopology { name: entry.node.into(), zone: entry.zone.into() };
        if awaits_report {
            self.nodes_of_awaiting_pods.insert(entry.uid.clone(), place.name.clone());
        }
        let pod = PodTableEntry {
            address: entry.address,
            is_ready: entry.phase == RoutingPhase::Ready,
            is_starting: entry.phase == RoutingPhase::Starting,
            is_early_ready,
            standby: entry.standby,
            name: entry.name.into(),
            place,
            hints: entry.hints,
            ports: entry.ports.into(),
        };
        self.pods_by_revision
            .entry(entry.revision.clone())
            .or_default()
            .insert(entry.uid.clone(), pod);
        self.revision_by_pod.insert(entry.uid, entry.revision.clone());
        touched.push(entry.revision);
        touched
    }

    fn is_early_ready(&self, uid: &str) -> bool {
        let pods =
            self.revision_by_pod.get(uid).and_then(|revision| self.pods_by_revision.get(revision));
        pods.and_then(|pods| pods.get(uid)).is_some_and(|pod| pod.is_early_ready)
    }

    /// Removes a pod. Returns the Revision that it had.
    pub(super) fn remove_pod(&mut self, uid: &str) -> Option<NamespacedName> {
        self.nodes_of_awaiting_pods.remove(uid);
        let revision = self.revision_by_pod.remove(uid)?;
        if let Some(pods) = self.pods_by_revision.get_mut(&revision) {
            pods.remove(uid);
            if pods.is_empty() {
                self.pods_by_revision.remove(&revision);
            }
        }
        Some(revision)
    }

    /// Applies what agents report now of these pods. Returns the Revisions whose pods have changed by it.
    pub(super) fn update_early_pods(&mut self, uids: &[String]) -> BTreeSet<NamespacedName> {
        let mut touched = BTreeSet::new();
        for uid in uids {
            let Some(node) = self.nodes_of_awaiting_pods.get(uid) else { continue };
            let Some(revision) = self.revision_by_pod.get(uid) else { continue };
            let pods = self.pods_by_revision.get_mut(revision);
            let Some(pod) = pods.and_then(|pods| pods.get_mut(uid)) else { continue };
            let reports = &self.agent_reports;
            // The address must be that of the table: a report about an earlier container's address says nothing about
            // this one.
            let is_early_ready =
                pod.address.is_some_and(|address| reports.is_ready_at(node, uid, address));
            if std::mem::replace(&mut pod.is_early_ready, is_early_ready) != is_early_ready {
                touched.insert(revision.clone());
                self.early_ready_pods.inc_by(is_early_ready.into());
            }
        }
        touched
    }

    /// Returns the changes of a batch. A snapshot has no entries for what is gone, so removals are derived from what is
    /// known here.
    pub(super) fn changes_with_removals(&self, batch: RouteBatch) -> RouteChanges {
        let mut changes = batch.changes;
        if batch.is_snapshot {
            let removed = self.keys_missing_in(&changes);
            changes.extend(removed.into_iter().map(|key| (key.clone(), RouteChange::Removed(key))));
            // Settings are not stored here. Without them, those of others that keep them are the defaults.
            let removed = || RouteChange::Removed(RouteKey::Settings);
            changes.entry(RouteKey::Settings).or_insert_with(removed);
        }
        changes
    }

    /// Subjects that are missing in a snapshot.
    fn keys_missing_in(&self, changes: &RouteChanges) -> Vec<RouteKey> {
        let services = self.services.iter().map(|it| RouteKey::Service(it.0.name.clone()));
        let revisions = self.revisions.iter().map(|it| RouteKey::Revision(it.0.name.clone()));
        let pods = self.revision_by_pod.keys().cloned().map(RouteKey::Pod);
        let activators = self.activator_addresses.keys().cloned().map(RouteKey::Activator);
        let gateway_hosts = self.gateway_hosts.keys().cloned().map(RouteKey::GatewayHost);
        let reserved_hosts = self.ruled_hosts.reserved_hosts().map(RouteKey::ReservedHost);
        let all = services.chain(revisions).chain(pods).chain(activators).chain(gateway_hosts);
        let all = all.chain(reserved_hosts);
        all.filter(|key| !changes.contains_key(key)).collect()
    }
}

fn first_host_by_service_name(all: &[HostIndexEntry]) -> Option<usize> {
    (0..all.len()).min_by_key(|at| &all[*at].service.name)
}
