//! Pure: switches of lists, each in its own extent of the map `SLOTS` or to a new one.
//!
//! A list in the order of backend numbers is always written to a new extent. The kernel finds a backend in it by binary
//! search, and a change in place would leave the list out of order for a moment.

use std::collections::BTreeSet;

use datapath::{
    abi,
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};

use super::{
    BackendListKey, BackendListUpdate, DesiredBackendList, MapCapacityError, RoutePlanner,
    list_edit::ListEdit, map_plan::OrderedMapOps, pool::MapShare, service_number::ServiceNumber,
};
use crate::{
    kernel::map_op::{BackendTarget, MapOp},
    service_facts::ServiceSource,
};

/// Share of a list's length, as one in so many, that a new extent has as spare entries. So each further backend costs
/// only a few writes on average.
const SPARE_DIVISOR: u32 = 8;

/// One list in force: the backends of a frontend, or of the activators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BackendList {
    /// Service id of the list: its index in the maps `SVC_STATE` and `SVC_INFO`.
    pub(super) service_id: u32,
    /// Service that the frontend belongs to; `None` for the activators' lists, and while it is not known.
    pub(super) owner: Option<ServiceNumber>,
    /// Source of the service that the backends are of. Only those of the RouteTable are pods of Revisions. An owner
    /// that waits for room may be of the other source.
    pub(super) source: ServiceSource,
    pub(super) state: SvcState,
    pub(super) info: SvcInfo,
    /// Number of entries of the extent, of which the list has the first ones.
    pub(super) capacity: u32,
    /// Backend numbers in the order of the entries.
    pub(super) backends: Vec<u32>,
}

/// Parts of lists that a plan no longer uses. They go into quarantine with the plan.
#[derive(Debug)]
pub(super) struct FreedParts {
    offset: u32,
    /// Number of entries of the extent at `offset`; 0: the list keeps its extent.
    capacity: u32,
    source: ServiceSource,
    /// Backend numbers, one for each entry that named them.
    backends: Vec<u32>,
}

/// Place of a list's next content.
enum ListPlace {
    /// Extent that the list has already.
    Edited(ListEdit),
    /// New extent, with this offset and capacity.
    Moved(u32, u32),
}

impl BackendList {
    /// Returns all parts of the list.
    pub(super) fn into_freed(self) -> FreedParts {
        let Self { state: SvcState { offset, .. }, capacity, source, backends, .. } = self;
        FreedParts { offset, capacity, source, backends }
    }
}

/// Returns true if the kernel needs the list in the order of backend numbers, to find the backend that a client keeps.
/// Without a timeout a client keeps none with TCP. With other protocols, each socket does.
pub(super) fn needs_order(target: &BackendListKey, mode: RoutingMode, info: &SvcInfo) -> bool {
    let is_tcp = match target {
        BackendListKey::Activators(_) => true,
        BackendListKey::Frontend(key) => key.protocol == abi::IPPROTO_TCP,
    };
    match mode {
        RoutingMode::PickRandom => info.affinity_seconds != 0 || !is_tcp,
        RoutingMode::PickWithAffinity => true,
        RoutingMode::Pass
        | RoutingMode::PickBackend
        | RoutingMode::Activator
        | RoutingMode::Refuse
        | RoutingMode::SelfTest => false,
    }
}

impl BackendListUpdate {
    fn needs_order(&self) -> bool {
        needs_order(&self.target, self.next.mode, &self.next.info)
    }

    /// Returns the length of the next list.
    fn count(&self) -> u32 {
        self.next.backends.len() as u32
    }

    /// Returns the capacity that the next list should have in a new extent.
    fn roomy_capacity(&self) -> u32 {
        // A list in order never grows in place.
        let spare = if self.needs_order() { 0 } else { self.count() / SPARE_DIVISOR };
        self.count() + spare
    }
}

impl RoutePlanner {
    /// Allocates what the updates need and switches their lists, or changes nothing at all.
    pub(super) fn switch_lists(
        &mut self,
        updates: &[BackendListUpdate],
        source: ServiceSource,
        ops: &mut OrderedMapOps,
        freed: &mut Vec<FreedParts>,
    ) -> Result<(), MapCapacityError> {
        // Checks and allocations come first: no list is switched unless all of them can be.
        self.check_room(updates, MapShare::of(source))?;
        let edits = self.list_edits(updates, source);
        let preferred_edit = |(update, edit): (&BackendListUpdate, Option<ListEdit>)| {
            edit.filter(|edit| self.prefers_edit(update, edit))
        };
        let preferred: Vec<_> = updates.iter().zip(edits).map(preferred_edit).collect();
        let places = match self.place_lists(updates, preferred, source) {
            Ok(places) => places,
            // A full map must not stop a change that fits in place.
            Err(_) => {
                let edits = self.list_edits(updates, source);
                self.place_lists(updates, edits, source)?
            }
        };
        for (update, place) in updates.iter().zip(places) {
            freed.extend(match place {
                ListPlace::Edited(edit) => Some(self.edit_list(update, &edit, ops)),
                ListPlace::Moved(offset, capacity) => {
                    self.move_list(update, source, (offset, capacity), ops)
                }
            });
        }
        Ok(())
    }

    /// Returns the lengths of the lists among these that cannot be changed in place.
    pub(super) fn moved_lengths(
        &self,
        updates: &[BackendListUpdate],
        source: ServiceSource,
    ) -> Vec<u32> {
        let edits = self.list_edits(updates, source);
        let moved = updates.iter().zip(edits).filter(|(_, edit)| edit.is_none());
        moved.map(|(update, _)| update.count()).collect()
    }

    /// Returns the edit of each list that can be changed in place.
    fn list_edits(
        &self,
        updates: &[BackendListUpdate],
        source: ServiceSource,
    ) -> Vec<Option<ListEdit>> {
        let edit_of = |update: &BackendListUpdate| {
            let list = self.lists.get(&update.target)?;
            let next = &update.next;
            let is_editable = list.state.mode == next.mode
                && list.source == source
                && !update.needs_order()
                // Less is known of a list that could not be read as a whole.
                && list.backends.len() == list.state.count as usize
                && !list.backends.is_empty()
                && (1..=list.capacity as usize).contains(&next.backends.len());
            is_editable.then(|| {
                let current = list.backends.iter().map(|&id| self.backends.get(id));
                ListEdit::between(current, &next.backends)
            })
        };
        updates.iter().map(edit_of).collect()
    }

    /// Returns true if an edit writes at most half as many entries as the list has, and leaves no large part of its
    /// extent unused.
    fn prefers_edit(&self, update: &BackendListUpdate, edit: &ListEdit) -> bool {
        self.lists.get(&update.target).is_some_and(|list| {
            2 * edit.max_writes() <= list.backends.len()
                && list.capacity <= 2 * update.roomy_capacity()
        })
    }

    /// Allocates an extent for each list without an edit, or none.
    fn place_lists(
        &mut self,
        updates: &[BackendListUpdate],
        edits: Vec<Option<ListEdit>>,
        source: ServiceSource,
    ) -> Result<Vec<ListPlace>, MapCapacityError> {
        // Edited lists keep their extents, and need no entries.
        let moved = updates.iter().zip(&edits).filter(|(_, edit)| edit.is_none());
        let (mut entries, mut roomy) = (0, 0);
        for (update, _) in moved {
            entries += update.next.backends.len();
            roomy += update.roomy_capacity() as usize;
        }
        let share = MapShare::of(source);
        let available = self.list_entry_pool.available(share);
        // For services of the RouteTable, which may have the whole map, the allocation itself decides.
        if source == ServiceSource::Service && entries > available {
            return Err(self.list_entry_pool.share_error(entries, share));
        }
        // Best fit can fail by fragmentation even if the sum is free, so all extents are taken before any list is
        // switched.
        let mut places = Vec::with_capacity(updates.len());
        for (update, edit) in updates.iter().zip(edits) {
            let count = update.count();
            // Spare entries only if all lists can have theirs.
            let capacity = if roomy <= available { update.roomy_capacity() } else { count };
            places.push(match edit {
                Some(edit) => ListPlace::Edited(edit),
                None => match self.list_entry_pool.allocate_up_to(count, capacity) {
                    Some((offset, capacity)) => ListPlace::Moved(offset, capacity),
                    None => {
                        let refusal = self.list_entry_pool.capacity_error(count);
                        self.undo_places(&places);
                        return Err(refusal);
                    }
                },
            });
        }
        Ok(places)
    }

    /// Frees extents that are in no map yet.
    fn undo_places(&mut self, places: &[ListPlace]) {
        for place in places {
            if let ListPlace::Moved(offset, capacity) = place {
                self.list_entry_pool.undo_allocate(*offset, *capacity);
            }
        }
    }

    /// Compares the needs of one service's updates with what is free, but for the entries of lists.
    fn check_room(
        &self,
        updates: &[BackendListUpdate],
        share: MapShare,
    ) -> Result<(), MapCapacityError> {
        let new_backends: BTreeSet<&BackendTarget> = updates
            .iter()
            .flat_map(|update| &update.next.backends)
            .filter(|backend| !self.backends.contains(backend))
            .collect();
        self.backends.check_free(new_backends.len(), share)?;
        let is_new_list = |update: &&BackendListUpdate| !self.lists.contains_key(&update.target);
        let new_services = updates.iter().filter(is_new_list).count();
        self.service_id_pool.check_free(abi::maps::SVC_STATE, new_services, share)?;
        // The two lists of activators need no frontend, so `lists` may have two entries more than the map. The map also
        // contains the frontends of the self-test, so `lists` may have as many entries less.
        let size = self.sizes.frontends as usize;
        let lists_max = size + 2 - abi::SELF_TEST_FRONTENDS as usize;
        let free = lists_max.saturating_sub(self.lists.len());
        let free = share.available(free, lists_max);
        if new_services > free {
            return Err(MapCapacityError {
                map: abi::maps::FRONTENDS,
                size,
                wanted: new_services,
                free,
                quarantined: 0,
            });
        }
        Ok(())
    }

    /// Changes one list in its own extent. Returns what it no longer names.
    fn edit_list(
        &mut self,
        update: &BackendListUpdate,
        edit: &ListEdit,
        ops: &mut OrderedMapOps,
    ) -> FreedParts {
        let list = self.lists.get_mut(&update.target).expect("an edit is of a list in force");
        let backends = &mut self.backends;
        // Numbers first: the writes of the entries name them.
        let added = edit.added().iter().map(|&it| backends.acquire(it, list.source, ops));
        let added: Vec<u32> = added.collect();
        let edited = edit.apply(&mut list.backends, &added);
        ops.list_entries.extend(edited.map_ops(list.state.offset));
        let SvcState { offset, generation, mode, .. } = list.state;
        // One store for all changes of the list. Connects that read an earlier word choose again.
        list.state = SvcState {
            offset,
            count: list.backends.len() as u32,
            generation: generation.wrapping_add(1),
            mode,
        };
        if list.info != update.next.info {
            list.info = update.next.info;
            ops.infos.push(MapOp::Info { service_id: list.service_id, info: list.info });
        }
        ops.states.push(MapOp::State { service_id: list.service_id, state: list.state });
        // The list keeps its extent.
        FreedParts { offset: 0, capacity: 0, source: list.source, backends: edited.removed }
    }

    /// Writes one list to a new extent. Returns the parts of the list that it replaces.
    fn move_list(
        &mut self,
        update: &BackendListUpdate,
        source: ServiceSource,
        (offset, capacity): (u32, u32),
        ops: &mut OrderedMapOps,
    ) -> Option<FreedParts> {
        let DesiredBackendList { mode, info, ref backends } = update.next;
        // The new backends before the old ones are released: one in both lists keeps its number.
        let acquired = backends.iter().map(|&it| self.backends.acquire(it, source, ops));
        let mut backends: Vec<u32> = acquired.collect();
        if update.needs_order() {
            backends.sort_unstable();
        }
        let count = backends.len() as u32;
        if count > 0 {
            ops.list_entries.push(MapOp::ListEntries { offset, backends: backends.clone() });
        }
        // A frontend keeps its service id, so that one store of its word switches it.
        let old = self.lists.remove(&update.target);
        let service_id = match (&update.target, &old) {
            (_, Some(list)) => list.service_id,
            (BackendListKey::Activators(list), None) => *list,
            (BackendListKey::Frontend(_), None) => {
                self.service_id_pool.allocate().expect("counted in check_room")
            }
        };
        let owner = old.as_ref().and_then(|list| list.owner);
        // The generation changes with each list: a connect that reads the word twice notices the switch.
        let generation = old.as_ref().map_or(1, |list| list.state.generation.wrapping_add(1));
        let state = SvcState { offset, count, generation, mode };
        if old.as_ref().is_none_or(|list| list.info != info) {
            ops.infos.push(MapOp::Info { service_id, info });
        }
        ops.states.push(MapOp::State { service_id, state });
        if let (BackendListKey::Frontend(key), None) = (update.target, &old) {
            ops.frontends.push(MapOp::Frontend { key, service_id });
        }
        let list = BackendList { service_id, owner, source, state, info, capacity, backends };
        self.lists.insert(update.target, list);
        old.map(BackendList::into_freed)
    }

    /// Puts parts of lists into quarantine.
    pub(super) fn release_parts(
        &mut self,
        parts: &FreedParts,
        now_ns: u64,
        ops: &mut OrderedMapOps,
    ) {
        self.list_entry_pool.quarantine(parts.offset, parts.capacity, now_ns);
        for &id in &parts.backends {
            self.backends.release(id, parts.source, now_ns, ops);
        }
    }
}
