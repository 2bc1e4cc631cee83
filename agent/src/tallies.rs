//! Pure: what the requests of each revision came to on this node.
//!
//! The kernel half counts by pod. A revision's totals are the sum over its pods and what pods that are gone have left
//! behind, so that they never go back while the revision lives: whoever reads them as counters (Prometheus) would take
//! every step back for a new beginning.
//!
//! A pod's row is read on for a while after the pod is gone: its last connections close late. What the gone have left is
//! handed out to be written where it outlives the agent, and taken in again when the next one begins.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use common::{abi, wire::Name};

/// How long the row of a gone pod is read on.
const LINGERS: Duration = Duration::from_secs(60);

/// Words of a [`Row`].
pub(crate) const WORDS: usize = abi::RESPONSE_WORDS + 3;

/// Running totals of one pod, or of a revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// How requests ended.
    pub(crate) responses: abi::Responses,
    /// Requests begun.
    pub(crate) started: u64,
    /// Connections whose message boundaries were lost.
    pub(crate) desync: u64,
    /// Responses without a request.
    pub(crate) stray: u64,
}

impl Row {
    /// As words, for who keeps them.
    pub(crate) fn words(self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let (responses, rest) = words.split_at_mut(abi::RESPONSE_WORDS);
        responses.copy_from_slice(&self.responses.words());
        rest.copy_from_slice(&[self.started, self.desync, self.stray]);
        words
    }

    /// From its words.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let mut responses = [0; abi::RESPONSE_WORDS];
        responses.copy_from_slice(&words[..abi::RESPONSE_WORDS]);
        let rest = |at| words[abi::RESPONSE_WORDS + at];
        Self {
            responses: abi::Responses::from_words(responses),
            started: rest(0),
            desync: rest(1),
            stray: rest(2),
        }
    }

    fn with(self, other: Self, each: impl Fn(u64, u64) -> u64) -> Self {
        let (mut words, other) = (self.words(), other.words());
        words.iter_mut().zip(other).for_each(|(word, other)| *word = each(*word, other));
        Self::from_words(words)
    }

    fn plus(self, other: Self) -> Self {
        self.with(other, u64::wrapping_add)
    }
}

/// What there is of a pod, or of all pods of a revision, at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Levels {
    /// Requests in flight.
    pub(crate) in_flight: u64,
    /// Open connections.
    pub(crate) connections: u64,
    /// Those of them whose requests are an estimate.
    pub(crate) estimated: u64,
}

/// What is known of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Running totals.
    pub(crate) row: Row,
    /// Now.
    pub(crate) levels: Levels,
}

/// All revisions that have, or had, pods on this node.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    slots: BTreeMap<u32, Counted>,
    /// What pods have left behind whose rows are not read any more.
    left: BTreeMap<Name, Row>,
    /// Owning Service and Configuration of revisions that are shown.
    owners: BTreeMap<Name, [Box<str>; 2]>,
    /// Revisions that are no more and have pods all the same.
    over: BTreeSet<Name>,
    /// Of which revisions what the gone have left is to be written anew.
    unsaved: BTreeSet<Name>,
}

#[derive(Debug)]
struct Counted {
    revision: Name,
    row: Row,
    levels: Levels,
    /// Since when its pod is gone.
    gone: Option<Instant>,
}

impl Tallies {
    /// Begins with what an agent before has written.
    pub(crate) fn resume(left: BTreeMap<Name, Row>) -> Self {
        Self { left, ..Self::default() }
    }

    /// From now on this slot counts for a pod of this revision, from nothing or, for one that was counted when another agent
    /// ran, as it stands.
    pub(crate) fn begin(&mut self, slot: u32, revision: &Name) {
        let is_same = |it: &Counted| it.gone.is_none() && it.revision == *revision;
        if !self.slots.get(&slot).is_some_and(is_same) {
            self.fold(slot);
            let (row, levels) = (Row::default(), Levels::default());
            let counted = Counted { revision: revision.clone(), row, levels, gone: None };
            self.slots.insert(slot, counted);
        }
    }

    /// The slots whose rows are to be read.
    pub(crate) fn slots(&self) -> Vec<u32> {
        self.slots.keys().copied().collect()
    }

    /// Takes in what stands in a slot's row. No word goes back.
    pub(crate) fn read(&mut self, slot: u32, row: Row, levels: Levels) {
        let Some(counted) = self.slots.get_mut(&slot) else { return };
        let row = counted.row.with(row, u64::max);
        if counted.gone.is_some() && row != counted.row {
            self.unsaved.insert(counted.revision.clone());
        }
        (counted.row, counted.levels) = (row, levels);
    }

    /// The slot's pod is gone. Its row is read on until the slot counts for another, or for a while.
    pub(crate) fn end(&mut self, now: Instant, slot: u32) {
        let Some(counted) = self.slots.get_mut(&slot) else { return };
        counted.gone = Some(now);
        let revision = counted.revision.clone();
        if self.over.contains(&revision) {
            self.forget(&revision);
        }
        self.unsaved.insert(revision);
    }

    /// Reads the rows no longer whose pods have been gone for a while.
    pub(crate) fn settle(&mut self, now: Instant) {
        let is_over = |it: &Counted| it.gone.is_some_and(|at| now.duration_since(at) >= LINGERS);
        let over: Vec<u32> =
            self.slots.iter().filter(|(_, it)| is_over(it)).map(|(slot, _)| *slot).collect();
        over.into_iter().for_each(|slot| self.fold(slot));
    }

    /// A slot's row, whose pod is gone, is what that has left behind.
    fn fold(&mut self, slot: u32) {
        let Some(Counted { revision, row, .. }) = self.slots.remove(&slot) else { return };
        let left = self.left.entry(revision.clone()).or_default();
        *left = left.plus(row);
        self.unsaved.insert(revision);
    }

    /// Who owns a revision. It is shown from now on.
    pub(crate) fn own(&mut self, revision: &Name, owners: [Box<str>; 2]) {
        self.over.remove(revision);
        self.owners.insert(revision.clone(), owners);
    }

    /// The revision is no more: it is forgotten, at the latest with its last pod.
    pub(crate) fn forget(&mut self, revision: &Name) {
        let is_there = |it: &Counted| it.revision == *revision && it.gone.is_none();
        if self.slots.values().any(is_there) {
            self.over.insert(revision.clone());
            return;
        }
        self.slots.retain(|_, it| it.revision != *revision);
        self.left.remove(revision);
        self.owners.remove(revision);
        self.over.remove(revision);
        self.unsaved.insert(revision.clone());
    }

    /// Every revision of which anything is known.
    pub(crate) fn revisions(&self) -> impl Iterator<Item = &Name> {
        let all: BTreeSet<&Name> =
            self.left.keys().chain(self.slots.values().map(|it| &it.revision)).collect();
        all.into_iter()
    }

    /// The revisions to show, each with its owners.
    pub(crate) fn shown(&self) -> Vec<(Name, [Box<str>; 2], Tally)> {
        let mut all: BTreeMap<&Name, Tally> = BTreeMap::new();
        for (name, left) in &self.left {
            all.insert(name, Tally { row: *left, ..Tally::default() });
        }
        for counted in self.slots.values() {
            let Tally { row, levels } = all.entry(&counted.revision).or_default();
            *row = row.plus(counted.row);
            levels.in_flight += counted.levels.in_flight;
            levels.connections += counted.levels.connections;
            levels.estimated += counted.levels.estimated;
        }
        let owned = |name: &Name| Some((name.clone(), self.owners.get(name)?.clone()));
        let all = all.into_iter().filter_map(|(name, tally)| Some((owned(name)?, tally)));
        all.map(|((name, owners), tally)| (name, owners, tally)).collect()
    }

    /// What the gone have left of each revision where that is to be written anew; nothing of those that are no more.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(Name, Option<Row>)> {
        let unsaved = std::mem::take(&mut self.unsaved);
        unsaved.into_iter().map(|name| (name.clone(), self.left_by(&name))).collect()
    }

    fn left_by(&self, name: &Name) -> Option<Row> {
        let gone = self.slots.values().filter(|it| it.revision == *name && it.gone.is_some());
        let rows = gone.map(|it| it.row).chain(self.left.get(name).copied());
        rows.reduce(Row::plus)
    }
}

/// Durations in fewer buckets: by upper bound in seconds, how many are in each by itself. The bounds must be among those that
/// the kernel half counts by.
pub(crate) fn merged(latency: &[u64; abi::LATENCY_BUCKETS], bounds_us: &[u64]) -> Vec<(f64, u64)> {
    let finer = abi::LATENCY_BOUNDS_US.iter().copied().chain([u64::MAX]).zip(latency);
    let mut rest = finer.peekable();
    let bounds = bounds_us.iter().copied().chain([u64::MAX]);
    let bucket = bounds.map(|bound| {
        let within = std::iter::from_fn(|| rest.next_if(|(finer, _)| *finer <= bound));
        let count = within.map(|(_, count)| *count).sum();
        let seconds = if bound == u64::MAX { f64::INFINITY } else { bound as f64 / 1e6 };
        (seconds, count)
    });
    bucket.collect()
}

#[cfg(test)]
mod tests;
