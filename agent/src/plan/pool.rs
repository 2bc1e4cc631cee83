//! Pure: numbers and extents that rest before they are used again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::abi;

use super::TooBig;

/// Numbers from a range: extents of one.
#[derive(Debug)]
pub(super) struct Numbers(Extents);

impl Numbers {
    /// All numbers from `first` to below `end` are free.
    pub(super) fn new(first: u32, end: u32) -> Self {
        let mut numbers = Self(Extents::new(end));
        numbers.0.take_this(0, first);
        numbers
    }

    /// Marks a number as used already.
    pub(super) fn take_this(&mut self, number: u32) {
        self.0.take_this(number, 1);
    }

    /// A free number, from the shortest free run, so that a small table stays in few pages.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.0.take(1)
    }

    /// A number is not referred to any more, from `now_ns` on.
    pub(super) fn free(&mut self, number: u32, now_ns: u64) {
        self.0.free(number, 1, now_ns);
    }

    /// Sends every free number below `below` to rest; those above were never used.
    pub(super) fn rest_free(&mut self, below: u32, now_ns: u64) {
        self.0.rest_free(below, now_ns);
    }

    /// Numbers that have rested long enough are free again.
    pub(super) fn wake(&mut self, now_ns: u64) {
        self.0.wake(now_ns);
    }

    /// Refuses a need that is not met now.
    pub(super) fn check(&self, map: &'static str, wanted: usize) -> Result<(), TooBig> {
        let free = self.0.free;
        if wanted <= free {
            return Ok(());
        }
        Err(TooBig { map, wanted, free, resting: self.0.resting() })
    }
}

/// Runs of slots. Best fit, neighbours joined.
#[derive(Debug)]
pub(super) struct Extents {
    by_offset: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    resting: VecDeque<(u64, u32, u32)>,
    free: usize,
}

impl Extents {
    /// All slots below `end` are free.
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

    /// Marks an extent as used already; parts of it may be marked twice.
    pub(super) fn take_this(&mut self, offset: u32, count: u32) {
        let end = offset.saturating_add(count);
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

    /// The shortest free run that holds `count`; 0 slots are anywhere.
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

    /// Undoes a [`take`](Self::take) that nobody has seen.
    pub(super) fn give_back(&mut self, offset: u32, count: u32) {
        if count > 0 {
            self.join(offset, count);
        }
    }

    /// An extent is not referred to any more, from `now_ns` on.
    pub(super) fn free(&mut self, offset: u32, count: u32, now_ns: u64) {
        if count > 0 {
            self.resting.push_back((now_ns, offset, count));
        }
    }

    /// Sends every free slot below `below` to rest; those above were never used.
    pub(super) fn rest_free(&mut self, below: u32, now_ns: u64) {
        let runs: Vec<_> = self.by_offset.range(..below).map(|(&at, &count)| (at, count)).collect();
        for (offset, count) in runs {
            let used = count.min(below - offset);
            self.remove(offset, count);
            if count > used {
                self.put(below, count - used);
            }
            self.resting.push_back((now_ns, offset, used));
        }
    }

    /// Extents that have rested long enough are free again.
    pub(super) fn wake(&mut self, now_ns: u64) {
        while let Some(&(since, offset, count)) = self.resting.front()
            && has_rested(since, now_ns)
        {
            self.resting.pop_front();
            self.join(offset, count);
        }
    }

    /// Why `count` slots are not to be had.
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
