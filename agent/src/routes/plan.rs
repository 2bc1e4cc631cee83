//! Pure: from the route table to ordered writes of the kernel's maps.
//!
//! [`RoutePlanner`] keeps a picture of what the kernel follows. A plan first fills backends and extents that nothing
//! refers to. It changes a few entries of a list in place, each by one store. Then it switches each frontend by one
//! store, adds frontends, and at last removes frontends. What a plan frees is in quarantine for
//! [`abi::QUARANTINE_NS`] before a later plan fills it again. So a connect that has just read the old word still finds
//! backends of its service behind it.

mod backends;
mod bootstrap;
mod cluster_services;
mod facts;
mod list_edit;
mod map_plan;
mod named_slab;
mod outranked;
mod pool;
mod request_terms;
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
    abi::{self, FrontendKey},
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};
use smol_str::SmolStr;

use self::{
    backends::UsedBackends,
    map_plan::OrderedMapOps,
    pool::{ExtentPool, KernelIdPool, MapShare},
    service_number::ServiceNumber,
    switch::{BackendList, FreedParts, needs_order},
};
pub use self::{
    bootstrap::bootstrap_ops,
    cluster_services::{
        ClusterChange, ClusterIpLabel, ClusterResource, ClusterServices, DepartureSource,
        FrontendEndpoints, ObservedService, ObservedSlice, served_protocol,
    },
    facts::{MapUse, PlannerFigures, ServiceCursor},
    map_plan::MapPlan,
    outranked::OutrankedService,
    request_terms::RevisionRequestTerms,
    table::PlannerTable,
};

use crate::{
    config::ClusterIpMode,
    kernel::map_op::{BackendTarget, KernelPodIds, KernelRoutes, MapOp},
    map_sizes::{self, MapSizes},
    service_facts::ServiceSource,
};

/// Error: a change that does not fit the kernel's maps. No part of it is in force.
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

/// Time for which a service that waits for a quarantine keeps its old lists: the quarantine, and the same time again.
const QUARANTINE_WAIT_NS: u64 = 2 * abi::QUARANTINE_NS;

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

/// Changes that one service needs; a plan makes all of them or none.
struct ServiceListUpdate {
    service_number: ServiceNumber,
    updates: Vec<BackendListUpdate>,
}

impl ServiceListUpdate {
    fn backend_count(&self) -> usize {
        self.updates.iter().map(|update| update.next.backends.len()).sum()
    }
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

/// Changes of a plan, before it is known which of them fit.
#[derive(Default)]
struct MapPlanDraft {
    activators: Vec<BackendListUpdate>,
    service_updates: Vec<ServiceListUpdate>,
    /// Owner of each frontend that this plan looks at.
    frontend_owners: BTreeMap<FrontendKey, ServiceNumber>,
    /// Frontends that a service wants while another service owns them.
    frontend_claims: BTreeSet<(FrontendKey, ServiceNumber)>,
    /// Frontends that no service wants any more.
    unwanted_frontends: Vec<FrontendKey>,
}

/// Key of a list: a frontend, or one of the two lists of activators.
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
    /// Services that want a frontend which another service owns. A ClusterIP has one owner; these are next.
    frontend_claims: BTreeSet<(FrontendKey, ServiceNumber)>,
    /// True if the lists of the activators did not fit the last time. They are in no list of due work.
    are_activators_unfit: bool,
    /// False until the RouteTable is known: before that, nothing of Rouse's in the maps changes.
    is_route_table_known: bool,
}

impl RoutePlanner {
    /// Starts with the kernel's present state and an empty table. `now_ns` is CLOCK_MONOTONIC, as in every call.
    pub fn resume(kernel: KernelRoutes, now_ns: u64) -> Self {
        Self::from_table(PlannerTable::default(), kernel, now_ns)
    }

    /// Restarts with the same table from the kernel's present state.
    pub fn restart(&mut self, kernel: KernelRoutes, now_ns: u64) {
        let is_route_table_known = self.is_route_table_known;
        *self = Self::from_table(std::mem::take(&mut self.table), kernel, now_ns);
        self.is_route_table_known = is_route_table_known;
    }

    /// Serves the Services of the cluster that this mode selects on this node, besides those of the RouteTable.
    pub fn serve_cluster_services(&mut self, mode: ClusterIpMode, node: &str) {
        self.table.cluster = ClusterServices::new(mode, node);
    }

    /// Serves the API server's own Service like any other. `addresses` are those at which the agent reaches API servers
    /// without the Service.
    pub fn serve_api_server(&mut self, addresses: BTreeSet<IpAddr>) {
        self.table.cluster.serve_api_server(addresses);
    }

    /// Sets whether the RouteTable is known. Until it is, plans leave alone what may be of the RouteTable.
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
        // A Service that waits for room keeps its old list, so that sockets may get what has left until its next plan.
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

    fn from_table(table: PlannerTable, kernel: KernelRoutes, now_ns: u64) -> Self {
        let sizes = kernel.sizes;
        let mut planner = Self {
            lists: HashMap::with_capacity(kernel.frontends.len() + 2),
            backends: UsedBackends::new(sizes.backends),
            service_id_pool: KernelIdPool::new(abi::FIRST_SERVICE, sizes.service_ids()),
            list_entry_pool: ExtentPool::new(sizes.list_entries),
            has_ipv6_activator: table.has_ipv6_activator(),
            due_services: table.service_numbers().collect(),
            unfit_services: BTreeMap::new(),
            ownerless_frontends: kernel.frontends.keys().copied().collect(),
            frontend_claims: BTreeSet::new(),
            are_activators_unfit: false,
            is_route_table_known: true,
            sizes,
            table,
        };
        for list in [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6] {
            planner.adopt_list(BackendListKey::Activators(list), list, &kernel);
        }
        for (&key, &service_id) in &kernel.frontends {
            planner.adopt_list(BackendListKey::Frontend(key), service_id, &kernel);
        }
        // An earlier agent may have freed the rest a moment ago, and its quarantine is not known.
        planner.backends.quarantine_free(kernel.written.backends, now_ns);
        planner.service_id_pool.quarantine_free(kernel.written.services, now_ns);
        planner.list_entry_pool.quarantine_free(kernel.written.list_entries, now_ns);
        planner
    }

    fn adopt_list(&mut self, key: BackendListKey, service_id: u32, kernel: &KernelRoutes) {
        // A service without a readable state still owns its id: it counts as an empty list.
        let none = (
            SvcState { offset: 0, count: 0, generation: 0, mode: RoutingMode::Pass },
            SvcInfo { activators: 0, affinity_seconds: 0, port_be: 0 },
            Vec::new(),
        );
        let (state, info, backends) = kernel.services.get(&service_id).unwrap_or(&none);
        // Only services of the RouteTable have a port at the activators.
        let source = if info.port_be != 0 { ServiceSource::Route } else { ServiceSource::Service };
        self.service_id_pool.reserve(service_id);
        self.list_entry_pool.reserve(state.offset, state.count);
        for &id in backends {
            let Some(&backend) = kernel.backends.get(&id) else { continue };
            self.backends.adopt(id, backend, source);
        }
        let list = BackendList {
            service_id,
            owner: None,
            source,
            state: *state,
            info: *info,
            // Spare entries of an earlier agent's extent are free now.
            capacity: state.count,
            backends: backends.clone(),
        };
        self.lists.insert(key, list);
    }

    /// Returns the table as it was set.
    pub fn table(&self) -> &PlannerTable {
        &self.table
    }

    /// Applies one change of the RouteTable to the table. The next plan puts it in force.
    pub fn apply_change(&mut self, change: RouteChange) {
        match change {
            RouteChange::Service(it) => self.set_service(&it.name, Some(&it)),
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
            RouteChange::Replicas(_)
            | RouteChange::Settings(_)
            | RouteChange::Certificate(_)
            | RouteChange::Removed(
                RouteKey::Replicas(_) | RouteKey::Settings | RouteKey::Certificate(_),
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

    fn set_activator(&mut self, name: &str, addresses: Option<Vec<IpAddr>>) {
        self.table.set_activator(name, addresses);
        let has_ipv6 = self.table.has_ipv6_activator();
        if std::mem::replace(&mut self.has_ipv6_activator, has_ipv6) != has_ipv6 {
            self.due_services.extend(self.table.routed_numbers().map(ServiceNumber::Routed));
        }
    }

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
        // Without a list the frontend did not fit, and this service may be the one that it did not fit for.
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

    /// Compares table and lists: returns the lists to switch, and the frontends to remove.
    fn draft_plan(&self, locals: &BTreeMap<String, KernelPodIds>) -> MapPlanDraft {
        let mut draft = MapPlanDraft::default();
        // An unknown RouteTable is not one without activators.
        if self.is_route_table_known {
            for (list, next) in self.table.activator_lists() {
                self.push_update(BackendListKey::Activators(list), next, &mut draft.activators);
            }
        }
        for &service_number in &self.due_services {
            let mut updates = Vec::new();
            // A frontend has one owner at a time. Another service that wants it becomes a claimant, and is due when the
            // owner releases it. Services of the RouteTable are first in the order, and take frontends of others.
            for (key, next) in self.table.desired_lists(service_number, locals) {
                let present = draft.frontend_owners.get(&key).copied().or_else(|| {
                    self.lists.get(&BackendListKey::Frontend(key)).and_then(|list| list.owner)
                });
                let owner = present.filter(|&it| it != service_number);
                if owner.is_none_or(|owner| service_number.outranks(owner)) {
                    draft.frontend_claims.extend(owner.map(|owner| (key, owner)));
                    draft.frontend_owners.insert(key, service_number);
                    self.push_update(BackendListKey::Frontend(key), next, &mut updates);
                } else {
                    draft.frontend_claims.insert((key, service_number));
                }
            }
            draft.service_updates.push(ServiceListUpdate { service_number, updates });
        }
        // Rouse's own services first, which kube-proxy cannot serve as well. Then the smallest: if not all fit, as many as
        // possible do.
        draft.service_updates.sort_by_key(|it| (it.service_number.source(), it.backend_count()));
        let is_unwanted = |key: &&FrontendKey| {
            !draft.frontend_owners.contains_key(*key) && self.is_removable(key)
        };
        draft.unwanted_frontends =
            self.ownerless_frontends.iter().filter(is_unwanted).copied().collect();
        draft
    }

    fn push_update(
        &self,
        target: BackendListKey,
        next: DesiredBackendList,
        updates: &mut Vec<BackendListUpdate>,
    ) {
        // Order is without meaning in most lists, and `next` is sorted already; numbers are compared by what they stand
        // for. The eBPF programs read no info of the activators' lists.
        let is_in_force = self.lists.get(&target).is_some_and(|list| {
            let mut current: Vec<&BackendTarget> =
                list.backends.iter().filter_map(|&id| self.backends.get(id)).collect();
            current.sort_unstable();
            list.state.mode == next.mode
                && (matches!(target, BackendListKey::Activators(_)) || list.info == next.info)
                && current.iter().copied().eq(&next.backends)
                && (list.backends.is_sorted() || !needs_order(&target, next.mode, &next.info))
        });
        if !is_in_force {
            updates.push(BackendListUpdate { target, next });
        }
    }

    fn build_plan(
        &mut self,
        now_ns: u64,
        mut draft: MapPlanDraft,
    ) -> Result<MapPlan, MapCapacityError> {
        let (mut ops, mut freed) = (OrderedMapOps::default(), Vec::<FreedParts>::new());
        let mut plan = MapPlan::default();
        // Activators first: every other list falls back on theirs, so nothing is planned if they do not fit.
        let activators = std::mem::take(&mut draft.activators);
        self.switch_lists(&activators, ServiceSource::Route, &mut ops, &mut freed)?;
        // Those that are not due now stay unfit.
        let mut unfit = std::mem::take(&mut self.unfit_services);
        for ServiceListUpdate { service_number, updates } in
            std::mem::take(&mut draft.service_updates)
        {
            let source = service_number.source();
            let switched = self.switch_lists(&updates, source, &mut ops, &mut freed);
            let Err(error) = switched else {
                unfit.remove(&service_number);
                continue;
            };
            let service = unfit.entry(service_number).or_insert(UnfitService {
                since_ns: now_ns,
                is_refused: false,
                keeps_routed_list: false,
                error,
            });
            service.error = error;
            let is_recent = now_ns.saturating_sub(service.since_ns) < QUARANTINE_WAIT_NS;
            let is_waiting = is_recent && self.fits_after_quarantine(&error, &updates, source);
            service.keeps_routed_list = is_waiting && self.are_any_routed(&updates);
            if is_waiting {
                // A Service of the cluster that waits holds up reports about the RouteTable only while it keeps such a
                // list.
                plan.is_partial |= source == ServiceSource::Route || service.keeps_routed_list;
                continue;
            }
            let was_refused = std::mem::replace(&mut service.is_refused, true);
            let refusal = self.table.service_name(service_number).map(|name| (name, error));
            let mode = match source {
                ServiceSource::Route => {
                    plan.refused.extend(refusal);
                    RoutingMode::Activator
                }
                // Connects go on to kube-proxy's rules.
                ServiceSource::Service => {
                    plan.newly_refused.extend(refusal.filter(|_| !was_refused));
                    RoutingMode::Pass
                }
            };
            for BackendListUpdate { target, next } in updates {
                let fallback = DesiredBackendList { mode, info: next.info, backends: Vec::new() };
                let mut updates = Vec::new();
                self.push_update(target, fallback, &mut updates);
                // List by list: one in force always fits, and must not keep its old pods because a new one does not.
                // A new address that does not fit gets no frontend: its connects pass unchanged.
                let _no_frontend = self.switch_lists(&updates, source, &mut ops, &mut freed);
            }
        }
        for &key in &draft.unwanted_frontends {
            let removed = self.lists.remove(&BackendListKey::Frontend(key)).inspect(|list| {
                ops.removals.push(MapOp::RemoveFrontend { key });
                self.service_id_pool.quarantine(list.service_id, now_ns);
            });
            freed.extend(removed.map(BackendList::into_freed));
        }
        // After all switches: a backend that moves from one list to another keeps its number.
        freed.iter().for_each(|parts| self.release_parts(parts, now_ns, &mut ops));
        plan.newly_outranked = self.newly_outranked(&draft);
        self.commit_draft(draft, unfit);
        ops.finish(&mut plan);
        Ok(plan)
    }

    /// Returns true if any list that these updates are to replace is of the RouteTable.
    fn are_any_routed(&self, updates: &[BackendListUpdate]) -> bool {
        let lists = updates.iter().filter_map(|update| self.lists.get(&update.target));
        lists.map(|list| list.source).any(|source| source == ServiceSource::Route)
    }

    /// Returns true if these updates, which fail with `error`, fit once every quarantine is over.
    fn fits_after_quarantine(
        &self,
        error: &MapCapacityError,
        updates: &[BackendListUpdate],
        source: ServiceSource,
    ) -> bool {
        if error.map == abi::maps::SLOTS {
            let lengths = self.moved_lengths(updates, source);
            return self.list_entry_pool.fits_after_quarantine(&lengths, MapShare::of(source));
        }
        error.wanted <= error.free + error.quarantined
    }

    /// Records the planned state: the owner of each frontend, the claimants, and the services that did not fit.
    fn commit_draft(&mut self, draft: MapPlanDraft, unfit: BTreeMap<ServiceNumber, UnfitService>) {
        for (key, service_number) in draft.frontend_owners {
            self.ownerless_frontends.remove(&key);
            // A frontend without a list did not fit.
            if let Some(list) = self.lists.get_mut(&BackendListKey::Frontend(key)) {
                list.owner = Some(service_number);
                self.frontend_claims.remove(&(key, service_number));
            }
        }
        self.frontend_claims.extend(draft.frontend_claims);
        // These are tried with each plan, so that no plan is whole while such a service waits.
        let is_due = |(number, service): &(&ServiceNumber, &UnfitService)| {
            number.is_routed() || service.keeps_routed_list
        };
        self.due_services = unfit.iter().filter(is_due).map(|(number, _)| *number).collect();
        self.unfit_services = unfit;
        for key in &draft.unwanted_frontends {
            self.ownerless_frontends.remove(key);
        }
    }
}
