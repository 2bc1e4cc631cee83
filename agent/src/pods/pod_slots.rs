//! Pure: allocator of rows: the row of each pod in the kernel's counters.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use datapath::abi;

/// Rows by namespace cookie. They survive the agent: a new agent reads them back from the maps.
#[derive(Debug)]
pub(crate) struct PodSlots {
    slots_by_cookie: BTreeMap<u64, u32>,
    /// Free rows, longest free first: a connection of a row's previous pod may still count for a moment.
    free: VecDeque<u32>,
}

impl PodSlots {
    /// Starts with the rows that the maps hold.
    pub(crate) fn new(slots_by_cookie: BTreeMap<u64, u32>) -> Self {
        let used: BTreeSet<u32> = slots_by_cookie.values().copied().collect();
        // Row 0 means none.
        let free = (1..abi::PODS_MAX).filter(|slot| !used.contains(slot)).collect();
        Self { slots_by_cookie, free }
    }

    /// Returns the namespace's row, and true if it is newly allocated; `None` if all rows are taken.
    pub(crate) fn allocate(&mut self, cookie: u64) -> Option<(u32, bool)> {
        if let Some(&slot) = self.slots_by_cookie.get(&cookie) {
            return Some((slot, false));
        }
        let slot = self.free.pop_front()?;
        self.slots_by_cookie.insert(cookie, slot);
        Some((slot, true))
    }

    /// Releases the row of a namespace that is gone, and returns the row.
    pub(crate) fn release(&mut self, cookie: u64) -> Option<u32> {
        let slot = self.slots_by_cookie.remove(&cookie);
        self.free.extend(slot);
        slot
    }

    /// Returns the cookie of every namespace with a row.
    pub(crate) fn cookies(&self) -> impl Iterator<Item = u64> {
        self.slots_by_cookie.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_keeps_its_slot() {
        let mut slots = PodSlots::new(BTreeMap::from([(70, 2)]));
        assert_eq!(slots.allocate(70), Some((2, false)));
        assert_eq!(slots.allocate(80), Some((1, true)));
        assert_eq!(slots.allocate(80), Some((1, false)));
        assert_eq!(slots.allocate(90), Some((3, true)));
    }

    #[test]
    fn a_freed_slot_is_reused_last() {
        let mut slots = PodSlots::new(BTreeMap::new());
        assert_eq!(slots.allocate(7), Some((1, true)));
        assert_eq!(slots.release(7), Some(1));
        assert_eq!(slots.release(7), None);
        let others: Vec<_> = (0..1022).filter_map(|cookie| slots.allocate(100 + cookie)).collect();
        assert_eq!(others.first(), Some(&(2, true)));
        assert_eq!(others.last(), Some(&(1023, true)));
        assert_eq!(slots.allocate(8), Some((1, true)));
        assert_eq!(slots.allocate(9), None, "all are taken");
    }
}
