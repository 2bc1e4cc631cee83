//! Pure: pools of ids and of extents, with a quarantine before reuse.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use datapath::abi;

use super::MapCapacityError;
use crate::service_facts::ServiceSource;

/// Share of a map that a service may fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapShare {
    /// The whole map, for services of the RouteTable.
    All,
    /// Three quarters, for Services of the cluster: however many they are, services of the RouteTable find room.
    ThreeQuarters,
}

impl MapShare {
    /// Returns the share of a service of this source.
    pub(super) fn of(source: ServiceSource) -> Self {
        match source {
            ServiceSource::Route => Self::All,
            ServiceSource::Service => Self::ThreeQuarters,
        }
    }

    /// Returns what the share leaves of `free` entries in a map of this size.
    pub(super) fn available(self, free: usize, size: usize) -> usize {
        match self {
            Self::All => free,
            Self::ThreeQuarters => free.saturating_sub(size / 4),
        }
    }
}

/// Pool of the ids of backends, or of services: extents of length one.
#[derive(Debug)]
pub(super) struct KernelIdPool(ExtentPool);

impl KernelIdPool {
    /// Starts with all ids from `first` to below `end` free.
    pub(super) fn new(first: u32, end: u32) -> Self {
        let mut ids = Self(ExtentPool::new(end));
        ids.0.reserve(0, first);
        ids
    }

    /// Marks an id as used already.
    pub(super) fn reserve(&mut self, id: u32) {
        self.0.reserve(id, 1);
    }

    /// Allocates an id from the shortest free run, so that a small table stays in few pages.
    pub(super) fn allocate(&mut self) -> Option<u32> {
        self.0.allocate(1)
    }

    /// Puts an id into quarantine from `now_ns` on: nothing refers to it any more.
    pub(super) fn quarantine(&mut self, id: u32, now_ns: u64) {
        self.0.quarantine(id, 1, now_ns);
    }

    /// Puts every free id below `below` into quarantine; ids above were never used.
    pub(super) fn quarantine_free(&mut self, below: u32, now_ns: u64) {
        self.0.quarantine_free(below, now_ns);
    }

    /// Frees the ids whose quarantine is over.
    pub(super) fn release_expired(&mut self, now_ns: u64) {
        self.0.release_expired(now_ns);
    }

    /// Returns two numbers: the ids that are not free, with those in quarantine and reserved ones, and all ids.
    pub(super) fn usage(&self) -> (usize, usize) {
        self.0.usage()
    }

    /// Refuses a demand for more ids than are free now for this share.
    pub(super) fn check_free(
        &self,
        map: &'static str,
        wanted: usize,
        share: MapShare,
    ) -> Result<(), MapCapacityError> {
        let free = self.0.available(share);
        if wanted <= free {
            return Ok(());
        }
        let quarantined = self.0.available_later(share) - free;
        Err(MapCapacityError { map, size: self.0.size, wanted, free, quarantined })
    }
}

/// Pool of runs of `SLOTS`: best fit, with adjacent free runs joined.
#[derive(Clone, Debug)]
pub(super) struct ExtentPool {
    /// Lengths of the free runs, by their offset.
    by_offset: BTreeMap<u32, u32>,
    /// Lengths and offsets of the free runs, the shortest first.
    by_length: BTreeSet<(u32, u32)>,
    /// Extents in quarantine, the oldest first: begin of the quarantine, offset, length.
    quarantined: VecDeque<(u64, u32, u32)>,
    free_count: usize,
    /// Number of all entries.
    size: usize,
}

impl ExtentPool {
    /// Starts with all entries below `end` free.
    pub(super) fn new(end: u32) -> Self {
        let mut extents = Self {
            by_offset: BTreeMap::new(),
            by_length: BTreeSet::new(),
            quarantined: VecDeque::new(),
            free_count: 0,
            size: end as usize,
        };
        extents.insert_free(0, end);
        extents
    }

    /// Marks an extent as used; parts of it may be marked twice.
    pub(super) fn reserve(&mut self, offset: u32, count: u32) {
        let end = offset.saturating_add(count);
        // Backwards from the extent's end: free runs do not overlap, so the first one that ends before `offset` ends
        // the search.
        let touched: Vec<_> = self
            .by_offset
            .range(..end)
            .rev()
            .take_while(|&(&start, &length)| start + length > offset)
            .map(|(&start, &length)| (start, length))
            .collect();
        for (start, length) in touched {
            self.remove_free(start, length);
            if start < offset {
                self.insert_free(start, offset - start);
            }
            if start + length > end {
                self.insert_free(end, start + length - end);
            }
        }
    }

    /// Returns the number of entries that are free for this share.
    pub(super) fn available(&self, share: MapShare) -> usize {
        share.available(self.free_count, self.size)
    }

    /// Returns the number of entries that are free for this share once every quarantine is over.
    fn available_later(&self, share: MapShare) -> usize {
        share.available(self.free_count + self.quarantined_count(), self.size)
    }

    /// Returns two numbers: the entries that are not free, with those in quarantine, and all entries.
    pub(super) fn usage(&self) -> (usize, usize) {
        (self.size - self.free_count, self.size)
    }

    /// Allocates from the shortest free run that holds `count`; a run of 0 entries may start anywhere.
    pub(super) fn allocate(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return Some(0);
        }
        let &(length, offset) = self.by_length.range((count, 0)..).next()?;
        self.remove_free(offset, length);
        if length > count {
            self.insert_free(offset + count, length - count);
        }
        Some(offset)
    }

    /// Allocates `capacity` entries, or only `count` if there is no free run of so many. Returns offset and capacity.
    pub(super) fn allocate_up_to(&mut self, count: u32, capacity: u32) -> Option<(u32, u32)> {
        let mut allocate = |entries| self.allocate(entries).map(|offset| (offset, entries));
        allocate(capacity).or_else(|| allocate(count))
    }

    /// Undoes an [`allocate`](Self::allocate) whose extent is in no map yet, so without quarantine.
    pub(super) fn undo_allocate(&mut self, offset: u32, count: u32) {
        if count > 0 {
            self.merge_free(offset, count);
        }
    }

    /// Puts an extent into quarantine from `now_ns` on: nothing refers to it any more.
    pub(super) fn quarantine(&mut self, offset: u32, count: u32, now_ns: u64) {
        if count > 0 {
            self.quarantined.push_back((now_ns, offset, count));
        }
    }

    /// Puts every free entry below `below` into quarantine; entries above were never used.
    pub(super) fn quarantine_free(&mut self, below: u32, now_ns: u64) {
        let runs: Vec<_> = self.by_offset.range(..below).map(|(&at, &count)| (at, count)).collect();
        for (offset, count) in runs {
            // A run may cross the bound: its upper part was never written, and stays free.
            let used = count.min(below - offset);
            self.remove_free(offset, count);
            if count > used {
                self.insert_free(below, count - used);
            }
            self.quarantined.push_back((now_ns, offset, used));
        }
    }

    /// Frees the extents whose quarantine is over.
    pub(super) fn release_expired(&mut self, now_ns: u64) {
        // The queue is in order of time, so the first entry that must wait ends the loop.
        while let Some(&(since, offset, count)) = self.quarantined.front()
            && is_quarantine_over(since, now_ns)
        {
            self.quarantined.pop_front();
            self.merge_free(offset, count);
        }
    }

    /// Returns true if extents of these lengths fit into this share once every quarantine is over.
    pub(super) fn fits_after_quarantine(&self, counts: &[u32], share: MapShare) -> bool {
        let wanted: usize = counts.iter().map(|&count| count as usize).sum();
        if wanted > self.available_later(share) {
            return false;
        }
        // The sum alone does not decide: the entries must also join to runs that hold each list.
        let mut later = self.clone();
        later.release_expired(u64::MAX);
        counts.iter().all(|&count| later.allocate(count).is_some())
    }

    /// Returns the error for a list of `count` entries that no free run holds.
    pub(super) fn capacity_error(&self, count: u32) -> MapCapacityError {
        let longest = self.by_length.last().map_or(0, |&(length, _)| length as usize);
        self.slots_error(count as usize, longest, self.quarantined_count())
    }

    /// Returns the error for entries of all lists together that this share does not leave.
    pub(super) fn share_error(&self, wanted: usize, share: MapShare) -> MapCapacityError {
        let free = self.available(share);
        self.slots_error(wanted, free, self.available_later(share) - free)
    }

    fn slots_error(&self, wanted: usize, free: usize, quarantined: usize) -> MapCapacityError {
        MapCapacityError { map: abi::maps::SLOTS, size: self.size, wanted, free, quarantined }
    }

    fn quarantined_count(&self) -> usize {
        self.quarantined.iter().map(|&(_, _, count)| count as usize).sum()
    }

    fn merge_free(&mut self, mut offset: u32, mut count: u32) {
        // Joined with its neighbours, so that long lists find a run: the free runs never touch.
        if let Some((&before, &length)) = self.by_offset.range(..offset).next_back()
            && before + length == offset
        {
            self.remove_free(before, length);
            offset = before;
            count += length;
        }
        if let Some(&length) = self.by_offset.get(&(offset + count)) {
            self.remove_free(offset + count, length);
            count += length;
        }
        self.insert_free(offset, count);
    }

    fn insert_free(&mut self, offset: u32, count: u32) {
        self.by_offset.insert(offset, count);
        self.by_length.insert((count, offset));
        self.free_count += count as usize;
    }

    fn remove_free(&mut self, offset: u32, count: u32) {
        self.by_offset.remove(&offset);
        self.by_length.remove(&(count, offset));
        self.free_count -= count as usize;
    }
}

fn is_quarantine_over(since_ns: u64, now_ns: u64) -> bool {
    now_ns.saturating_sub(since_ns) >= abi::QUARANTINE_NS
}
