//! Pure: which row of the kernel's counters belongs to which pod.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::abi;

/// Slots by namespace cookie. Survives the agent: it is read back from the maps.
#[derive(Debug)]
pub(crate) struct Slots {
    taken: BTreeMap<u64, u32>,
    /// Longest free first: a connection of the pod before may still count for a moment.
    free: VecDeque<u32>,
}

impl Slots {
    /// Slots as the maps have them.
    pub(crate) fn new(taken: BTreeMap<u64, u32>) -> Self {
        let used: BTreeSet<u32> = taken.values().copied().collect();
        // Slot 0 means none.
        let free = (1..abi::PODS_MAX).filter(|slot| !used.contains(slot)).collect();
        Self { taken, free }
    }

    /// The namespace's slot, with whether it is newly given; `None` when all are taken.
    pub(crate) fn take(&mut self, cookie: u64) -> Option<(u32, bool)> {
        if let Some(&slot) = self.taken.get(&cookie) {
            return Some((slot, false));
        }
        let slot = self.free.pop_front()?;
        self.taken.insert(cookie, slot);
        Some((slot, true))
    }

    /// The namespace has gone. Returns the slot that it had.
    pub(crate) fn release(&mut self, cookie: u64) -> Option<u32> {
        let slot = self.taken.remove(&cookie);
        self.free.extend(slot);
        slot
    }

    /// Every namespace with a slot.
    pub(crate) fn cookies(&self) -> impl Iterator<Item = u64> {
        self.taken.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_keeps_its_slot() {
        let mut slots = Slots::new(BTreeMap::from([(70, 2)]));
        assert_eq!(slots.take(70), Some((2, false)));
        assert_eq!(slots.take(80), Some((1, true)));
        assert_eq!(slots.take(80), Some((1, false)));
        assert_eq!(slots.take(90), Some((3, true)));
    }

    #[test]
    fn a_freed_slot_rests_behind_all_others() {
        let mut slots = Slots::new(BTreeMap::new());
        assert_eq!(slots.take(7), Some((1, true)));
        assert_eq!(slots.release(7), Some(1));
        assert_eq!(slots.release(7), None);
        let others: Vec<_> = (0..1022).filter_map(|cookie| slots.take(100 + cookie)).collect();
        assert_eq!(others.first(), Some(&(2, true)));
        assert_eq!(others.last(), Some(&(1023, true)));
        assert_eq!(slots.take(8), Some((1, true)));
        assert_eq!(slots.take(9), None, "all are taken");
    }
}
