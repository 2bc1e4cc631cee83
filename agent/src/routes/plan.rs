//! Pure: from the RouteTable and the Services of the cluster to ordered writes of the kernel's maps.
//!
//! [`RoutePlanner`] remembers the lists that the kernel follows. A plan first fills backends and extents that nothing
//! refers to. It changes a few entries of a list in place, each by one store. Then it switches each frontend by one
//! store, adds frontends, and at last removes frontends. What a plan frees is in quarantine for
//! [`QUARANTINE_NS`](datapath::abi::QUARANTINE_NS) before a later plan fills it again. So a connect that has just read
//! the old word of a service id still finds backends of its service behind it.

mod backends;
mod bootstrap;
mod cluster_services;
mod draft;
mod earlier_lists;
mod facts;
mod list_edit;
mod map_plan;
mod named_slab;
mod outranked;
mod pool;
mod request_terms;
mod resume;
mod service_number;
mod switch;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use common::wire::{NamespacedName, RouteChange, RouteKey, ServiceEntry};
use datapath::{
    abi::FrontendKey,
    load_balancing::{RoutingMode, SvcInfo},
};
use smol_str::SmolStr;

use self::{
    backends::UsedBackends,
    pool::{ExtentPool, KernelIdPool},
    service_number::ServiceNumber,
    switch::BackendList,
};
pub use self::{
    bootstrap::bootstrap_ops,
    cluster_services::{
        ClusterChange, ClusterIpLabel, ClusterResource, ClusterServices, DepartureSource,
        FrontendEndpoints, ObservedService, ObservedSlice, served_protocol,
    },
    earlier_lists::copy_ops,
    facts::{MapUse, PlannerFigures, ServiceCursor},
    map_plan::MapPlan,
    outranked::OutrankedService,
    request_terms::RevisionRequestTerms,
    table::PlannerTable,
};

use crate::{
    config::ClusterIpMode,
    kernel::map_op::{BackendTarget, KernelPodIds},
    map_sizes::{self, MapSizes},
    service_facts::ServiceSource,
};

/// Error: a change does not fit into the kernel's maps. No part of the change is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "map {map} needs {wanted} more entries, and can give {free} at once ({quarantined} more within a second): \
     raise {} in --map-sizes (now {size}), or use fewer services, or fewer pods behind them",
    setting_name(.map)
)]
pub struct MapCapacityError {
    /// Name of the full map.
    pub map: &'static str,
    /// Number of entries that the map has room for.
    pub size: usize,
    /// Number of entries that are needed at once.
    pub wanted: usize,
    /// Number of entries that the service can have at once. Of `SLOTS`, it is the longest free extent, or all entries
    /// that the service's share of the map leaves.
    pub free: usize,
    /// Number of further entries that it can have once all quarantines are over; of `SLOTS`, in all extents together.
    pub quarantined: usize,
}

/// Returns the setting that a map's size follows, or the map itself if its size is fixed.
fn setting_name(map: &str) -> &str {
    map_sizes::setting_of(map).unwrap_or(map)
}

/// One list as it should be. Backends are sorted and without duplicates.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DesiredBackendList {
    mode: RoutingMode,
    info: SvcInfo,
    backends: Vec<BackendTarget>,
}

/// Change of one list to its next content.
struct BackendListUpdate {
    target: BackendListKey,
    next: DesiredBackendList,
}

/// A service that did not fit.
#[derive(Clone, Copy, Debug)]
struct UnfitService {
    /// Time of the first attempt.
    since_ns: u64,
    /// True if it was refused: waiting does not help.
    is_refused: bool,
    /// True if it waits, and a list that it is to replace is of the RouteTable. Pods in that list may be draining.
    keeps_routed_list: bool,
    /// Reason of the newest attempt.
    error: MapCapacityError,
}

/// Key of a list: a frontend, or one of the two lists of activators, which its service id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum BackendListKey {
    Activators(u32),
    Frontend(FrontendKey),
}

/// Plans map operations, and remembers the state that they produce.
///
/// [`apply_change`](Self::apply_change) and [`mark_pod_changed`](Self::mark_pod_changed) pass changes in; the work of a
/// [`plan`](Self::plan) is proportional to them. After a write that fails midway, read the maps back and call
/// [`restart`](Self::restart): it continues from any prefix of a plan.
#[derive(Debug)]
pub struct RoutePlanner {
    table: PlannerTable,
    /// Sizes of the kernel's maps.
    sizes: MapSizes,
    lists: HashMap<BackendListKey, BackendList>,
    backends: UsedBackends,
    service_id_pool: KernelIdPool,
    list_entry_pool: ExtentPool,
    /// True if an activator has an IPv6 address; every service with an IPv6 address depends on it.
    has_ipv6_activator: bool,
    /// Services that the next plan looks at.
    due_services: BTreeSet<ServiceNumber>,
    /// Services that did not fit.
    unfit_services: BTreeMap<ServiceNumber, UnfitService>,
    /// Frontends in force without an owner, until a plan assigns or removes them.
    ownerless_frontends: BTreeSet<FrontendKey>,
    /// Services that want a frontend which another service owns. When the owner releases it, the next claimant is due.
    frontend_claims: BTreeSet<(FrontendKey, ServiceNumber)>,
    /// True if the lists of the activators did not fit the last time. They belong to no service that could be due.
    are_activators_unfit: bool,
    /// False until the RouteTable is known: before that, nothing of Rouse's in the maps changes.
    is_route_table_known: bool,
}

impl RoutePlanner {
    /// Serves the Services of the cluster that this mode selects on this node, besides those of the RouteTable.
    pub fn serve_cluster_services(&mut self, mode: ClusterIpMode, node: &str) {
        self.table.cluster = ClusterServices::new(mode, node);
    }

    /// Serves the API server's own Service like any other. `addresses` are those at which the agent reaches API servers
    /// without the Service.
    pub fn serve_api_server(&mut self, addresses: BTreeSet<IpAddr>) {
        self.table.cluster.serve_api_server(addresses);
    }

    /// Sets if the RouteTable is known. Until it is, plans change nothing that may be of the RouteTable.
    pub fn set_route_table_known(&mut self, is_known: bool) {
        self.is_route_table_known = is_known;
    }

    /// Returns true if both sources are known, so that all frontends of the node are.
    pub fn are_sources_known(&self) -> bool {
        self.is_route_table_known && self.table.cluster.is_known()
    }

    /// Applies observations of the cluster's Services. The next plan puts them in force.
    pub fn apply_cluster_changes(&mut self, changes: impl IntoIterator<Item = ClusterChange>) {
        changes.into_iter().for_each(|change| self.table.cluster.apply(change));
        self.collect_cluster_changes();
    }

    /// Sets the addresses of the node itself, which no frontend may have.
    pub fn set_node_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.table.cluster.set_node_addresses(addresses);
        self.collect_cluster_changes();
    }

    /// Takes the changes of the endpoints of the cluster's Services that are served, since the last call.
    pub fn take_changed_endpoints(&mut self) -> FrontendEndpoints {
        self.table.cluster.take_changed_endpoints()
    }

    /// Returns a source if endpoints may have left since the last call, or were not known. Call it after the writes of
    /// a plan: before them, a socket may still get an endpoint that has left.
    pub fn take_departures(&mut self) -> Option<DepartureSource> {
        let source = self.table.cluster.take_departures()?;
        // A Service that waits for room keeps its old list, so until its next plan sockets may get endpoints that have
        // left.
        let is_waiting = |(number, unfit): (&ServiceNumber, &UnfitService)| {
            !number.is_routed() && !unfit.is_refused
        };
        if self.unfit_services.iter().any(is_waiting) {
            self.table.cluster.mark_sockets_stale();
        }
        Some(source)
    }

    /// Makes the Services of the cluster due again that did not fit. Call it from time to time: each attempt costs as
    /// much as a change. Services of the RouteTable are tried with each plan.
    pub fn retry_unfit(&mut self) {
        self.due_services.extend(self.unfit_services.keys());
    }

    /// Returns the number of Services of the cluster that were refused.
    pub fn refused_cluster_services(&self) -> usize {
        let is_refused = |(number, unfit): &(&ServiceNumber, &UnfitService)| {
            !number.is_routed() && unfit.is_refused
        };
        self.unfit_services.iter().filter(is_refused).count()
    }

    /// Returns true if a frontend without an owner is to be removed: the source that it came from is known.
    fn is_removable(&self, key: &FrontendKey) -> bool {
        let list = self.lists.get(&BackendListKey::Frontend(*key));
        match list.map_or(ServiceSource::Route, |list| list.source) {
            ServiceSource::Route => self.is_route_table_known,
            ServiceSource::Service => self.table.cluster.is_known(),
        }
    }

    /// Returns the table as it was set.
    pub fn table(&self) -> &PlannerTable {
        &self.table
    }

    /// Applies one change of the RouteTable to the table. The next plan puts it in force.
    pub fn apply_change(&mut self, change: RouteChange) {
        match change {
            RouteChange::Service(it) => self.set_service(&it.name, Some(&it)),
            // No list depends on a Revision's own entry, so no service is due.
            RouteChange::Revision(it) => self.table.set_revision(&it.name, Some(&it)),
            RouteChange::Pod(it) => {
                let changed = self.table.set_pod(&it.uid, Some(&it));
                self.mark_routed_due(changed);
            }
            RouteChange::Activator(it) => self.set_activator(&it.name, Some(it.addresses)),
            RouteChange::Removed(RouteKey::Service(name)) => self.set_service(&name, None),
            RouteChange::Removed(RouteKey::Revision(name)) => self.table.set_revision(&name, None),
            RouteChange::Removed(RouteKey::Pod(uid)) => {
                let changed = self.table.set_pod(&uid, None);
                self.mark_routed_due(changed);
            }
            RouteChange::Removed(RouteKey::Activator(name)) => self.set_activator(&name, None),
            RouteChange::Node(it) => {
                let changed = self.table.set_node_zone(&it.name, it.zone);
                self.mark_routed_due(changed);
            }
            RouteChange::Removed(RouteKey::Node(name)) => {
                let changed = self.table.set_node_zone(&name, SmolStr::default());
                self.mark_routed_due(changed);
            }
            // Connects do not depend on these.
            RouteChange::Replicas(_)
            | RouteChange::Settings(_)
            | RouteChange::GatewayHost(_)
            | RouteChange::ReservedHost(_)
            | RouteChange::Certificate(_)
            | RouteChange::ClientCa(_)
            | RouteChange::Removed(
                RouteKey::Replicas(_)
                | RouteKey::Settings
                | RouteKey::GatewayHost(_)
                | RouteKey::ReservedHost(_)
                | RouteKey::Certificate(_)
                | RouteKey::ClientCa(_),
            )
            | RouteChange::Synced => {}
        }
    }

    /// Marks a pod of this node that was registered or forgotten: the next plan looks at it again.
    pub fn mark_pod_changed(&mut self, uid: &str) {
        self.mark_routed_due(self.table.affected_services(uid));
    }

    /// Excludes a pod from connects, or ends that, whatever the RouteTable states of it.
    pub fn set_excluded(&mut self, uid: &str, is_excluded: bool) {
        let changed = self.table.set_excluded(uid, is_excluded);
        self.mark_routed_due(changed);
    }

    /// Makes services of the RouteTable due, by number.
    fn mark_routed_due(&mut self, numbers: impl IntoIterator<Item = u32>) {
        self.due_services.extend(numbers.into_iter().map(ServiceNumber::Routed));
    }

    /// Sets the addresses of an activator; `None`: it is gone. Each plan compares the activators' lists.
    fn set_activator(&mut self, name: &str, addresses: Option<Vec<IpAddr>>) {
        self.table.set_activator(name, addresses);
        // IPv6 clients use mapped addresses of pods only while no activator has an IPv6 address.
        let has_ipv6 = self.table.has_ipv6_activator();
        if std::mem::replace(&mut self.has_ipv6_activator, has_ipv6) != has_ipv6 {
            self.due_services.extend(self.table.routed_numbers().map(ServiceNumber::Routed));
        }
    }

    /// Sets a service of the RouteTable, or removes it if `entry` is `None`. Frontends that it no longer has are
    /// released.
    fn set_service(&mut self, name: &NamespacedName, entry: Option<&ServiceEntry>) {
        let before = self
            .table
            .find_service(name)
            .map(|service_number| (service_number, self.table.frontend_keys(service_number)));
        let mut keys = Vec::new();
        match (entry, &before) {
            (Some(entry), _) => {
                let service_number = self.table.set_service(entry);
                keys = self.table.frontend_keys(service_number);
                self.due_services.insert(ServiceNumber::Routed(service_number));
            }
            (None, Some((service_number, _))) => {
                self.table.remove_service(*service_number);
                self.forget_service(ServiceNumber::Routed(*service_number));
            }
            (None, None) => {}
        }
        // After the change, so that another service that wants such a frontend may become due.
        let Some((service_number, before)) = before else { return };
        before
            .iter()
            .filter(|key| !keys.contains(key))
            .for_each(|&key| self.release_frontend(ServiceNumber::Routed(service_number), key));
    }

    /// Forgets the due work of a service that is gone.
    fn forget_service(&mut self, service_number: ServiceNumber) {
        self.due_services.remove(&service_number);
        self.unfit_services.remove(&service_number);
    }

    /// Makes the changed Services of the cluster due, and releases frontends that they no longer have.
    fn collect_cluster_changes(&mut self) {
        for changed in self.table.cluster.take_changed() {
            let service_number = ServiceNumber::Cluster(changed.number);
            if changed.is_served {
                self.due_services.insert(service_number);
            } else {
                self.forget_service(service_number);
            }
            changed.released.iter().for_each(|&key| self.release_frontend(service_number, key));
        }
    }

    /// Releases a frontend that a service no longer wants: another service that wants it may own it.
    fn release_frontend(&mut self, service_number: ServiceNumber, key: FrontendKey) {
        self.frontend_claims.remove(&(key, service_number));
        // A frontend without a list did not fit for its owner, which may have been this service.
        if let Some(list) = self.lists.get_mut(&BackendListKey::Frontend(key)) {
            if list.owner != Some(service_number) {
                return;
            }
            list.owner = None;
            self.ownerless_frontends.insert(key);
        }
        let claims = (key, ServiceNumber::MIN)..=(key, ServiceNumber::MAX);
        let next = self.frontend_claims.range(claims).next();
        self.due_services.extend(next.map(|&(_, service_number)| service_number));
    }

    /// Returns the plan that puts the table in force on this node, given its registered pods by uid.
    ///
    /// A second plan without a change is empty. A service that does not fit stays due, and delays no other service. Its
    /// old lists stay while waiting helps; after that its connects go to the activators. A new address that finds no
    /// free service id or frontend has no list, and its connects pass unchanged. Only the activators' lists cause an
    /// error, after which everything stays due.
    pub fn plan(
        &mut self,
        now_ns: u64,
        locals: &BTreeMap<String, KernelPodIds>,
    ) -> Result<MapPlan, MapCapacityError> {
        self.backends.release_expired(now_ns);
        self.service_id_pool.release_expired(now_ns);
        self.list_entry_pool.release_expired(now_ns);
        let draft = self.draft_plan(locals);
        let plan = self.build_plan(now_ns, draft);
        self.are_activators_unfit = plan.is_err();
        plan
    }

    /// Returns true if a change is not planned yet, or if something did not fit.
    pub fn has_due_work(&self) -> bool {
        self.has_due_changes() || !self.unfit_services.is_empty() || self.are_activators_unfit
    }

    /// Returns true if a change is not planned yet.
    pub fn has_due_changes(&self) -> bool {
        !self.due_services.is_empty()
            || self.ownerless_frontends.iter().any(|key| self.is_removable(key))
    }
}
