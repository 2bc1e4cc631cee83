//! Pure: request totals of each Revision on this node.
//!
//! The eBPF programs count by pod. A Revision's totals are the sum over its pods and over its gone pods, so that they
//! never decrease while the Revision exists. A reader of counters (Prometheus) takes a decrease for a restart.
//!
//! A pod's row is read for a while after the pod is gone, as its last connections close late. The sums of gone pods are
//! stored outside the agent, and read again when the next agent starts.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use common::wire::NamespacedName;
use datapath::abi;

use crate::kernel::totals_row::TotalsRow;

/// Time for which the row of a gone pod is still read.
const GONE_READ_TIME: Duration = Duration::from_secs(60);

/// Present levels of a pod, or of all pods of a Revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RevisionLevels {
    /// Requests in flight at this moment.
    pub(crate) in_flight: u64,
    /// Connections open at this moment.
    pub(crate) connections: u64,
    /// Opaque connections among them, whose requests are an estimate.
    pub(crate) estimated: u64,
}

/// Totals and present levels of a Revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExportedTotals {
    /// Running totals since the Revision's first pod.
    pub(crate) row: TotalsRow,
    /// Present levels of its pods.
    pub(crate) levels: RevisionLevels,
}

/// Totals of all Revisions that have, or had, pods on this node.
#[derive(Debug, Default)]
pub(crate) struct RevisionTotals {
    slots: BTreeMap<u32, CountedSlot>,
    /// Sums of the gone pods of each Revision whose rows are not read any more.
    gone_totals: BTreeMap<NamespacedName, TotalsRow>,
    /// Owning Service and Configuration of the Revisions that are exported.
    owners: BTreeMap<NamespacedName, [Box<str>; 2]>,
    /// Revisions that are gone but still have pods.
    deleted_revisions: BTreeSet<NamespacedName>,
    /// Revisions whose sum of gone pods has to be stored again.
    unsaved: BTreeSet<NamespacedName>,
}

#[derive(Debug)]
struct CountedSlot {
    revision: NamespacedName,
    row: TotalsRow,
    levels: RevisionLevels,
    /// Time at which its pod was found gone.
    gone_since: Option<Instant>,
}

impl RevisionTotals {
    /// Starts with the sums that the previous agent stored.
    pub(crate) fn resume(gone_totals: BTreeMap<NamespacedName, TotalsRow>) -> Self {
        Self { gone_totals, ..Self::default() }
    }

    /// Assigns a row to a pod of this Revision. A pod that is new starts from zero; a pod that another agent counted
    /// keeps its counts.
    pub(crate) fn assign_slot(&mut self, slot: u32, revision: &NamespacedName) {
        let is_same = |it: &CountedSlot| it.gone_since.is_none() && it.revision == *revision;
        if !self.slots.get(&slot).is_some_and(is_same) {
            self.fold_slot(slot);
            let (row, levels) = (TotalsRow::default(), RevisionLevels::default());
            let counted = CountedSlot { revision: revision.clone(), row, levels, gone_since: None };
            self.slots.insert(slot, counted);
        }
    }

    /// Returns the rows that are to be read.
    pub(crate) fn slots(&self) -> Vec<u32> {
        self.slots.keys().copied().collect()
    }

    /// Updates the totals of a row. No word decreases.
    pub(crate) fn update_slot(&mut self, slot: u32, row: TotalsRow, levels: RevisionLevels) {
        let Some(counted) = self.slots.get_mut(&slot) else { return };
        // A program may write the row during the read; the maximum keeps each word from decreasing.
        let row = counted.row.zip_words(row, u64::max);
        if counted.gone_since.is_some() && row != counted.row {
            self.unsaved.insert(counted.revision.clone());
        }
        (counted.row, counted.levels) = (row, levels);
    }

    /// Marks a row's pod as gone. The row is read until another pod has it, or for a while.
    pub(crate) fn mark_gone(&mut self, now: Instant, slot: u32) {
        let Some(counted) = self.slots.get_mut(&slot) else { return };
        counted.gone_since = Some(now);
        let revision = counted.revision.clone();
        // The Revision was deleted before its last pod ended.
        if self.deleted_revisions.contains(&revision) {
            self.forget_revision(&revision);
        }
        self.unsaved.insert(revision);
    }

    /// Ends the reading of rows whose pods have been gone for a while.
    pub(crate) fn fold_expired(&mut self, now: Instant) {
        let is_over = |it: &CountedSlot| {
            it.gone_since.is_some_and(|at| now.duration_since(at) >= GONE_READ_TIME)
        };
        let over: Vec<u32> =
            self.slots.iter().filter(|(_, it)| is_over(it)).map(|(slot, _)| *slot).collect();
        over.into_iter().for_each(|slot| self.fold_slot(slot));
    }

    /// Adds the row of a gone pod to the sum of its Revision's gone pods.
    fn fold_slot(&mut self, slot: u32) {
        let Some(CountedSlot { revision, row, .. }) = self.slots.remove(&slot) else { return };
        let gone_total = self.gone_totals.entry(revision.clone()).or_default();
        *gone_total = gone_total.plus(row);
        self.unsaved.insert(revision);
    }

    /// Sets the owners of a Revision, which is exported from now on.
    pub(crate) fn set_owners(&mut self, revision: &NamespacedName, owners: [Box<str>; 2]) {
        self.deleted_revisions.remove(revision);
        self.owners.insert(revision.clone(), owners);
    }

    /// Forgets a Revision that is gone: now, or with its last pod.
    pub(crate) fn forget_revision(&mut self, revision: &NamespacedName) {
        let is_there = |it: &CountedSlot| it.revision == *revision && it.gone_since.is_none();
        if self.slots.values().any(is_there) {
            self.deleted_revisions.insert(revision.clone());
            return;
        }
        self.slots.retain(|_, it| it.revision != *revision);
        self.gone_totals.remove(revision);
        self.owners.remove(revision);
        self.deleted_revisions.remove(revision);
        // Unsaved without a sum: its stored entry is to be deleted.
        self.unsaved.insert(revision.clone());
    }

    /// Returns every Revision of which totals are known.
    pub(crate) fn revisions(&self) -> impl Iterator<Item = &NamespacedName> {
        let all: BTreeSet<&NamespacedName> =
            self.gone_totals.keys().chain(self.slots.values().map(|it| &it.revision)).collect();
        all.into_iter()
    }

    /// Returns the Revisions to export, each with its owners.
    pub(crate) fn exported(&self) -> Vec<(NamespacedName, [Box<str>; 2], ExportedTotals)> {
        let mut all: BTreeMap<&NamespacedName, ExportedTotals> = BTreeMap::new();
        // Pods that are gone stay in the sums, because counters must not decrease.
        for (name, gone_total) in &self.gone_totals {
            all.insert(name, ExportedTotals { row: *gone_total, ..ExportedTotals::default() });
        }
        for counted in self.slots.values() {
            let ExportedTotals { row, levels } = all.entry(&counted.revision).or_default();
            *row = row.plus(counted.row);
            levels.in_flight += counted.levels.in_flight;
            levels.connections += counted.levels.connections;
            levels.estimated += counted.levels.estimated;
        }
        let with_owners =
            |name: &NamespacedName| Some((name.clone(), self.owners.get(name)?.clone()));
        let all = all.into_iter().filter_map(|(name, totals)| Some((with_owners(name)?, totals)));
        all.map(|((name, owners), totals)| (name, owners, totals)).collect()
    }

    /// Returns the changed sums of gone pods, to be stored; `None` for a Revision that is gone.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(NamespacedName, Option<TotalsRow>)> {
        let unsaved = std::mem::take(&mut self.unsaved);
        unsaved.into_iter().map(|name| (name.clone(), self.gone_total(&name))).collect()
    }

    fn gone_total(&self, name: &NamespacedName) -> Option<TotalsRow> {
        let gone_slots =
            self.slots.values().filter(|it| it.revision == *name && it.gone_since.is_some());
        let rows = gone_slots.map(|it| it.row).chain(self.gone_totals.get(name).copied());
        rows.reduce(TotalsRow::plus)
    }
}

/// Merges durations into fewer buckets. Returns each bucket's upper bound in seconds and its own count. The bounds must
/// be among the bounds that the eBPF programs count by.
pub(crate) fn merge_buckets(
    latency: &[u64; abi::LATENCY_BUCKETS],
    bounds_us: &[u64],
) -> Vec<(f64, u64)> {
    let finer = abi::LATENCY_BOUNDS_US.iter().copied().chain([u64::MAX]).zip(latency);
    let mut finer_buckets = finer.peekable();
    let bounds = bounds_us.iter().copied().chain([u64::MAX]);
    let bucket = bounds.map(|bound| {
        // The finer buckets are in order, so each bound takes the next of them.
        let within = std::iter::from_fn(|| finer_buckets.next_if(|(finer, _)| *finer <= bound));
        let count = within.map(|(_, count)| *count).sum();
        let seconds = if bound == u64::MAX { f64::INFINITY } else { bound as f64 / 1e6 };
        (seconds, count)
    });
    bucket.collect()
}

#[cfg(test)]
mod tests;
