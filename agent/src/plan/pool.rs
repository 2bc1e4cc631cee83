//! Pure: pools of numbers and of extents, with a quarantine before reuse.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::abi;

use super::TooBig;

/// Pool of numbers from a range: extents of length one.
#[derive(Debug)]
pub(super) struct Numbers(Extents);

impl Numbers {
    /// Starts with all numbers from `first` to below `end` free.
    pub(super) fn new(first: u32, end: u32) -> Self {
        let mut numbers = Self(Extents::new(end));
        numbers.0.take_this(0, first);
        numbers
    }

    /// Marks a number as used already.
    pub(super) fn take_this(&mut self, number: u32) {
        self.0.take_this(number, 1);
    }

    /// Allocates a number from the shortest free run, so that a small table stays in few pages.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.0.take(1)
    }

    /// Puts a number into quarantine from `now_ns` on: nothing refers to it any more.
    pub(super) fn free(&mut self, number: u32, now_ns: u64) {
        self.0.free(number, 1, now_ns);
    }

    /// Puts every free number below `below` into quarantine; numbers above were never used.
    pub(super) fn rest_free(&mut self, below: u32, now_ns: u64) {
        self.0.rest_free(below, now_ns);
    }

    /// Frees the numbers whose quarantine is over.
    pub(super) fn wake(&mut self, now_ns: u64) {
        self.0.wake(now_ns);
    }

    /// Refuses a demand for more numbers than are free now.
    pub(super) fn check(&self, map: &'static str, wanted: usize) -> Result<(), TooBig> {
        let free = self.0.free;
        if wanted <= free {
            return Ok(());
        }
        Err(TooBig { map, wanted, free, resting: self.0.resting() })
    }
}

/// Pool of runs of `SLOTS`: best fit, with adjacent free runs joined.
#[derive(Debug)]
pub(super) struct Extents {
    by_offset: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    resting: VecDeque<(u64, u32, u32)>,
    free: usize,
}

impl Extents {
    /// Starts with all entries below `end` free.
    pub(super) fn new(end: u32) -> Self {
        let mut extents = Self {
            by_offset: BTreeMap::new(),
            by_length: BTreeSet::new(),
            resting: VecDeque::new(),
            free: 0,
        };
        extents.put(0, end);
        extents
    }

    /// Marks an extent as used; parts of it may be marked twice.
    pub(super) fn take_this(&mut self, offset: u32, count: u32) {
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
            self.remove(start, length);
            if start < offset {
                self.put(start, offset - start);
            }
            if start + length > end {
                self.put(end, start + length - end);
            }
        }
    }

    /// Allocates from the shortest free run that holds `count`; a run of 0 entries may start anywhere.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return Some(0);
        }
        let &(length, offset) = self.by_length.range((count, 0)..).next()?;
        self.remove(offset, length);
        if length > count {
            self.put(offset + count, length - count);
        }
        Some(offset)
    }

    /// Undoes a [`take`](Self::take) whose extent is in no map yet, so without quarantine.
    pub(super) fn give_back(&mut self, offset: u32, count: u32) {
        if count > 0 {
            self.join(offset, count);
        }
    }

    /// Puts an extent into quarantine from `now_ns` on: nothing refers to it any more.
    pub(super) fn free(&mut self, offset: u32, count: u32, now_ns: u64) {
        if count > 0 {
            self.resting.push_back((now_ns, offset, count));
        }
    }

    /// Puts every free entry below `below` into quarantine; entries above were never used.
    pub(super) fn rest_free(&mut self, below: u32, now_ns: u64) {
        let runs: Vec<_> = self.by_offset.range(..below).map(|(&at, &count)| (at, count)).collect();
        for (offset, count) in runs {
            // A run may cross the bound: its upper part was never written, and stays free.
            let used = count.min(below - offset);
            self.remove(offset, count);
            if count > used {
                self.put(below, count - used);
            }
            self.resting.push_back((now_ns, offset, used));
        }
    }

    /// Frees the extents whose quarantine is over.
    pub(super) fn wake(&mut self, now_ns: u64) {
        // The queue is in order of time, so the first entry that must wait ends the loop.
        while let Some(&(since, offset, count)) = self.resting.front()
            && has_rested(since, now_ns)
        {
            self.resting.pop_front();
            self.join(offset, count);
        }
    }

    /// Returns the error for `count` entries that do not fit.
    pub(super) fn refusal(&self, count: u32) -> TooBig {
        TooBig {
            map: abi::maps::SLOTS,
            wanted: count as usize,
            free: self.by_length.last().map_or(0, |&(length, _)| length as usize),
            resting: self.resting(),
        }
    }

    fn resting(&self) -> usize {
        self.resting.iter().map(|&(_, _, count)| count as usize).sum()
    }

    fn join(&mut self, mut offset: u32, mut count: u32) {
        if let Some((&before, &length)) = self.by_offset.range(..offset).next_back()
            && before + length == offset
        {
            self.remove(before, length);
            offset = before;
            count += length;
        }
        if let Some(&length) = self.by_offset.get(&(offset + count)) {
            self.remove(offset + count, length);
            count += length;
        }
        self.put(offset, count);
    }

    fn put(&mut self, offset: u32, count: u32) {
        self.by_offset.insert(offset, count);
        self.by_length.insert((count, offset));
        self.free += count as usize;
    }

    fn remove(&mut self, offset: u32, count: u32) {
        self.by_offset.remove(&offset);
        self.by_length.remove(&(count, offset));
        self.free -= count as usize;
    }
}

fn has_rested(since_ns: u64, now_ns: u64) -> bool {
    now_ns.saturating_sub(since_ns) >= abi::REST_NS
}
