//! Pure: backends in use: their numbers in the map `BACKENDS`, and the lists that name them.

use std::collections::HashMap;

use datapath::abi;

use super::{
    MapCapacityError,
    map_plan::OrderedMapOps,
    pool::{KernelIdPool, MapShare},
};
use crate::{
    kernel::map_op::{BackendTarget, MapOp},
    service_facts::ServiceSource,
};

/// Lowest backend number in use. Number 0 stays unused, so that an entry of `SLOTS` that was ever written is not 0.
const FIRST_BACKEND: u32 = 1;

/// Backends of all lists. A backend keeps its number while any list names it.
#[derive(Debug)]
pub(super) struct UsedBackends {
    uses: HashMap<BackendTarget, BackendUse>,
    by_id: HashMap<u32, BackendTarget>,
    pub(super) pool: KernelIdPool,
}

/// Number of a backend, and of the lists that name it.
#[derive(Clone, Copy, Debug)]
struct BackendUse {
    id: u32,
    lists: u32,
    /// Number of lists among them that are of the RouteTable.
    routed_lists: u32,
}

impl UsedBackends {
    /// Starts without backends, for a map of this size.
    pub(super) fn new(size: u32) -> Self {
        Self {
            uses: HashMap::new(),
            by_id: HashMap::new(),
            pool: KernelIdPool::new(FIRST_BACKEND, size),
        }
    }

    /// Adopts a backend of a list in the maps, whose owner is not known yet. An entry that stands twice counts twice.
    pub(super) fn adopt(&mut self, id: u32, backend: BackendTarget, source: ServiceSource) {
        self.pool.reserve(id);
        self.by_id.insert(id, backend);
        self.uses.entry(backend).or_insert_with(|| BackendUse::new(id)).add_list(source);
    }

    /// Puts all unused numbers below `written` into quarantine: an earlier agent may have freed them a moment ago.
    pub(super) fn quarantine_free(&mut self, written: u32, now_ns: u64) {
        self.pool.quarantine_free(written, now_ns);
    }

    /// Ends quarantines that are over.
    pub(super) fn release_expired(&mut self, now_ns: u64) {
        self.pool.release_expired(now_ns);
    }

    /// Returns an error if there are not so many free numbers for this share.
    pub(super) fn check_free(&self, count: usize, share: MapShare) -> Result<(), MapCapacityError> {
        self.pool.check_free(abi::maps::BACKENDS, count, share)
    }

    /// Returns true if a list names the backend.
    pub(super) fn contains(&self, backend: &BackendTarget) -> bool {
        self.uses.contains_key(backend)
    }

    /// Returns the number of a backend; `None`: no list names it.
    pub(super) fn number(&self, backend: &BackendTarget) -> Option<u32> {
        self.uses.get(backend).map(|it| it.id)
    }

    /// Returns the backend with this number.
    pub(super) fn get(&self, id: u32) -> Option<&BackendTarget> {
        self.by_id.get(&id)
    }

    /// Adds a list to a backend's. Returns the backend's number.
    pub(super) fn acquire(
        &mut self,
        backend: BackendTarget,
        source: ServiceSource,
        ops: &mut OrderedMapOps,
    ) -> u32 {
        if !self.contains(&backend) {
            let id = self.pool.allocate().expect("counted in check_room");
            self.uses.insert(backend, BackendUse::new(id));
            self.by_id.insert(id, backend);
            ops.backends.push(MapOp::Backend { id, backend });
        }
        let uses = self.uses.get_mut(&backend).expect("inserted above");
        if uses.add_list(source) {
            ops.added_pods.extend(backend.pod_address());
        }
        uses.id
    }

    /// Removes a list from a backend's. The number of a backend without lists goes into quarantine.
    pub(super) fn release(
        &mut self,
        id: u32,
        source: ServiceSource,
        now_ns: u64,
        ops: &mut OrderedMapOps,
    ) {
        let Some(&backend) = self.by_id.get(&id) else { return };
        let Some(uses) = self.uses.get_mut(&backend) else { return };
        if uses.remove_list(source) {
            ops.removed_pods.extend(backend.pod_address());
        }
        if uses.lists == 0 {
            self.uses.remove(&backend);
            self.by_id.remove(&id);
            self.pool.quarantine(id, now_ns);
        }
    }
}

impl BackendUse {
    /// Creates the use of a backend that no list names yet.
    fn new(id: u32) -> Self {
        Self { id, lists: 0, routed_lists: 0 }
    }

    /// Adds a list. Returns true if it is the first one of the RouteTable.
    fn add_list(&mut self, source: ServiceSource) -> bool {
        let is_routed = source == ServiceSource::Route;
        self.lists += 1;
        self.routed_lists += u32::from(is_routed);
        is_routed && self.routed_lists == 1
    }

    /// Removes a list. Returns true if it was the last one of the RouteTable.
    fn remove_list(&mut self, source: ServiceSource) -> bool {
        let is_routed = source == ServiceSource::Route;
        self.lists -= 1;
        self.routed_lists -= u32::from(is_routed);
        is_routed && self.routed_lists == 0
    }
}
