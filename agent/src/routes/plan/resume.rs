//! Pure: start of a planner from the lists that the kernel follows, as an earlier agent or a failed write has left them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
};

use datapath::{
    abi,
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};

use super::{
    BackendListKey, PlannerTable, RoutePlanner,
    backends::UsedBackends,
    pool::{ExtentPool, KernelIdPool},
    switch::BackendList,
};
use crate::{kernel::map_op::KernelRoutes, service_facts::ServiceSource};

impl RoutePlanner {
    /// Starts with the kernel's present state and an empty table. `now_ns` is CLOCK_MONOTONIC, as in every call.
    pub fn resume(kernel: KernelRoutes, now_ns: u64) -> Self {
        Self::from_table(PlannerTable::default(), kernel, now_ns)
    }

    /// Restarts with the same table from the kernel's present state.
    pub fn restart(&mut self, kernel: KernelRoutes, now_ns: u64) {
        // A planner that starts takes its table for known, and this one may not know it yet.
        let is_route_table_known = self.is_route_table_known;
        *self = Self::from_table(mem::take(&mut self.table), kernel, now_ns);
        self.is_route_table_known = is_route_table_known;
    }

    /// Makes a planner of `table`, with the lists that the kernel has as lists in force.
    fn from_table(table: PlannerTable, kernel: KernelRoutes, now_ns: u64) -> Self {
        let sizes = kernel.sizes;
        let mut planner = Self {
            lists: HashMap::with_capacity(kernel.frontends.len() + 2),
            backends: UsedBackends::new(sizes.backends),
            service_id_pool: KernelIdPool::new(abi::FIRST_SERVICE, sizes.service_ids()),
            list_entry_pool: ExtentPool::new(sizes.list_entries),
            has_ipv6_activator: table.has_ipv6_activator(),
            // Every service is compared once with the lists in force.
            due_services: table.service_numbers().collect(),
            unfit_services: BTreeMap::new(),
            // The maps do not name the service of a frontend. The first plan assigns or removes each of them.
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
        // An earlier agent may have freed the other entries a moment ago, and their quarantine is not known.
        planner.backends.quarantine_free(kernel.written.backends, now_ns);
        planner.service_id_pool.quarantine_free(kernel.written.services, now_ns);
        planner.list_entry_pool.quarantine_free(kernel.written.list_entries, now_ns);
        planner
    }

    /// Takes over a list that the kernel has, with its service id, its extent and its backends.
    fn adopt_list(&mut self, key: BackendListKey, service_id: u32, kernel: &KernelRoutes) {
        // A service without a readable state still owns its id: it counts as an empty list.
        let empty = (
            SvcState { offset: 0, count: 0, generation: 0, mode: RoutingMode::Pass },
            SvcInfo { activators: 0, affinity_seconds: 0, port_be: 0 },
            Vec::new(),
        );
        let (state, info, backends) = kernel.services.get(&service_id).unwrap_or(&empty);
        // Only services of the RouteTable have a port at the activators.
        let source = if info.port_be != 0 { ServiceSource::Route } else { ServiceSource::Service };
        self.service_id_pool.reserve(service_id);
        self.list_entry_pool.reserve(state.offset, state.count);
        for &id in backends {
            // A list may name a backend that could not be read. It is no longer in the list after the next change.
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
}
