//! Shell: counters of the previous version, whose programs keep counting the connections that they saw established.
//!
//! A pod's counts are the sum of both versions until the last of those connections has closed. Then the old counts are
//! added to the new rows for good.

use std::{
    collections::BTreeMap,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::maps::{HashMap, MapData, MapError};
use common::{link::error_chain, wire::RequestTotals};
use datapath::abi::{self, maps};
use tracing::{info, warn};

use super::{
    COUNTER_WORDS, CounterRows, KernelMapError, RESPONSE_WORDS, STATE_WORDS, capacity, map_words,
    open_hash_map, open_pinned, pin_error, write_error,
};
use crate::kernel::sys;

/// Maps of the previous version that this version reads, and whose `PODS` it edits.
#[derive(Debug)]
pub(super) struct PreviousCounters {
    pins: PathBuf,
    pods: HashMap<MapData, u64, abi::PodValue>,
    rows: PreviousRows,
}

/// Rows of the previous version, and the pods to which they belong.
#[derive(Debug)]
struct PreviousRows {
    rows: CounterRows,
    /// Cookie and previous row of each pod, by this version's row.
    previous_slots: BTreeMap<u32, (u64, u32)>,
}

impl PreviousRows {
    /// Returns the previous row of this version's row.
    fn previous_slot(&self, slot: u32) -> Option<u32> {
        self.previous_slots.get(&slot).map(|(_, old)| *old)
    }

    /// Forgets a pod. Its totals are added to this version's row, whose reader so loses none of them. What the old
    /// programs count afterwards is lost.
    fn fold(&mut self, cookie: u64, into: &CounterRows) {
        for (slot, (_, old)) in self.previous_slots.extract_if(.., |_, (it, _)| *it == cookie) {
            into.add_totals(slot, &self.rows, old);
        }
    }

    /// Returns the cookies of the pods whose previous rows are idle. Without connections and requests the old programs
    /// can count nothing more there: the port is closed for them.
    fn idle_cookies(&self) -> Vec<u64> {
        let is_idle = |old: u32| {
            let state = self.rows.pod_state(old);
            state.connections == 0 && state.in_flight == 0
        };
        let pods = self.previous_slots.values().filter(|(_, old)| is_idle(*old));
        pods.map(|(cookie, _)| *cookie).collect()
    }
}

impl PreviousCounters {
    /// Opens the maps. `None` if they cannot be read, for example because their layout differs. Then the requests in
    /// flight there are not known, and the new programs count new connections as usual.
    pub(super) fn open(pins: &Path) -> Option<Self> {
        let opened = Self::try_open(pins);
        let opened = opened.inspect_err(|error| {
            let error = error_chain(error);
            warn!(pins = %pins.display(), %error, "cannot read the counts of the previous version");
        });
        opened.ok()
    }

    /// Opens the maps of another version. An error if one is missing or has another shape.
    fn try_open(pins: &Path) -> Result<Self, KernelMapError> {
        let size = |bytes: usize| bytes as u32;
        // Another ABI version may lay out the same names differently; sizes are all that can be compared.
        let wanted = [
            (maps::PODS, 8, size(size_of::<abi::PodValue>())),
            (maps::POD_STATE, 4, size(size_of::<abi::PodState>())),
            (maps::COUNTERS, 4, size(size_of::<abi::PodCounters>())),
            (maps::RESPONSES, 4, size(size_of::<abi::ResponseCounters>())),
        ];
        for (name, key, value) in wanted {
            let map = open_pinned(pins, name)?;
            let path = pins.join(name);
            let [_, key_found, value_found, _] = sys::map_shape(map.as_fd())
                .map_err(|source| pin_error("read the shape of", &path, source))?;
            let (found, wanted) = ([key_found, value_found], [key, value]);
            if found != wanted {
                return Err(KernelMapError::Layout { path, found, wanted });
            }
        }
        let count = capacity(pins, maps::COUNTERS)?;
        let rows = CounterRows {
            pod_state: map_words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
            counters: map_words(pins, maps::COUNTERS, count * COUNTER_WORDS)?,
            responses: map_words(pins, maps::RESPONSES, count * RESPONSE_WORDS)?,
            rows_per_pod: count / abi::PODS_MAX as usize,
        };
        Ok(Self {
            pins: pins.to_owned(),
            pods: open_hash_map(pins, maps::PODS)?,
            rows: PreviousRows { rows, previous_slots: BTreeMap::new() },
        })
    }

    /// Closes the pod's ports for the old programs, which then count no new connection of it. The new programs know the
    /// pod already, and count them.
    ///
    /// A program of the new version ignores connections that an old program has begun to count (`OLD_CONNS`). So one of
    /// them counts each connection, whenever this is called.
    pub(super) fn hand_over(&mut self, cookie: u64, slot: u32) -> Result<(), KernelMapError> {
        let pod = match self.pods.get(&cookie, 0) {
            Ok(pod) => pod,
            Err(MapError::KeyNotFound) => return Ok(()),
            Err(source) => return Err(super::read_error(maps::PODS, source)),
        };
        // No connection comes to port 0, and without the flag the programs look for no further port.
        let closed = abi::PodValue { port: 0, flags: pod.flags & !abi::POD_HAS_PORTS, ..pod };
        let done = self.pods.insert(cookie, closed, 0);
        done.map_err(|source| write_error(maps::PODS, (cookie, pod.slot), source))?;
        self.rows.previous_slots.insert(slot, (cookie, pod.slot));
        Ok(())
    }

    /// Forgets a pod, and adds its totals to this version's row.
    pub(super) fn forget(&mut self, cookie: u64, into: &CounterRows) {
        // Fails if the entry is gone already, or never existed there.
        let _none = self.pods.remove(&cookie);
        self.rows.fold(cookie, into);
    }

    /// Returns the previous version's totals of this version's row.
    pub(super) fn totals(&self, slot: u32) -> RequestTotals {
        let old = self.rows.previous_slot(slot);
        old.map(|old| self.rows.rows.totals(old)).unwrap_or_default()
    }

    /// Returns the previous version's responses of this version's row.
    pub(super) fn responses(&self, slot: u32) -> abi::ResponseCounters {
        let old = self.rows.previous_slot(slot);
        old.map(|old| self.rows.rows.responses(old)).unwrap_or_default()
    }

    /// Returns the gauges that the previous version counts for this version's row.
    pub(super) fn state(&self, slot: u32) -> abi::PodState {
        let old = self.rows.previous_slot(slot);
        old.map(|old| self.rows.rows.pod_state(old)).unwrap_or_default()
    }

    /// Adds the final counts of idle old rows to this version's rows. Returns true if no old row is left. With
    /// `drop_unregistered`, pods that only the previous version knows are forgotten.
    pub(super) fn fold_idle(&mut self, into: &CounterRows, drop_unregistered: bool) -> bool {
        self.rows.idle_cookies().into_iter().for_each(|cookie| self.forget(cookie, into));
        if drop_unregistered {
            let registered: Vec<u64> =
                self.rows.previous_slots.values().map(|(cookie, _)| *cookie).collect();
            let cookies: Vec<u64> = self.pods.keys().filter_map(Result::ok).collect();
            let unregistered = cookies.into_iter().filter(|it| !registered.contains(it));
            unregistered.for_each(|cookie| self.forget(cookie, into));
        }
        // A key that cannot be read shows that there is one.
        let empty = self.rows.previous_slots.is_empty() && self.pods.keys().next().is_none();
        if empty {
            let pins = self.pins.display();
            info!(%pins, "every connection of the previous version has closed");
        }
        empty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_counts_of_a_forgotten_pod_stay_in_its_row() {
        let (new, rows) = (CounterRows::in_memory(), CounterRows::in_memory());
        // In row 9 one connection is open, and one request in flight; row 8 is idle.
        rows.write(9, [1, 0, 1, 0, 0, 2, 0, 3], 10);
        rows.write(8, [0; STATE_WORDS], 10);
        let previous_slots = BTreeMap::from([(5, (70, 9)), (6, (80, 8))]);
        let mut previous = PreviousRows { rows, previous_slots };
        assert_eq!(previous.idle_cookies(), [80]);
        previous.fold(70, &new);
        previous.fold(70, &new);
        assert_eq!((previous.previous_slot(5), previous.previous_slot(6)), (None, Some(8)));
        assert_eq!((new.totals(5).started, new.responses(5).aborted), (10, 10));
        assert_eq!(new.state_words(5), [0, 0, 0, 0, 0, 2, 0, 3]);
        assert_eq!(new.totals(6).started, 0, "the old programs still count it");
    }
}
