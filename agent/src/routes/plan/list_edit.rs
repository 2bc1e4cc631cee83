//! Pure: changes of a list in its own extent of the map `SLOTS`, while connects read it.
//!
//! Each store of an edit puts a backend of the next list where one stood that leaves it, or behind the last entry. So
//! after each store a connect finds every backend that stays, and none that was never in the list. A backend may stand
//! twice until the word of the service id has the new length.

use crate::kernel::map_op::{BackendTarget, MapOp};

/// Difference between a list and its next content, as changes of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListEdit {
    /// Positions of the entries that leave the list, in ascending order.
    removed: Vec<usize>,
    /// Backends that join the list.
    added: Vec<BackendTarget>,
}

/// Result of an edit: what is to be written, and what the list no longer names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EditedEntries {
    /// Position and new backend number of each changed entry, in the order of the stores.
    writes: Vec<(u32, u32)>,
    /// Backend numbers of the entries that left the list.
    pub(super) removed: Vec<u32>,
}

impl ListEdit {
    /// Returns the difference between the backends of a list, in its order, and the sorted backends of the next one.
    /// `None` stands for an entry whose backend is not known: it leaves the list, as does a second entry of a backend.
    pub(super) fn between<'a>(
        current: impl Iterator<Item = Option<&'a BackendTarget>>,
        next: &[BackendTarget],
    ) -> Self {
        let mut is_kept = vec![false; next.len()];
        let mut removed = Vec::new();
        for (position, backend) in current.enumerate() {
            match backend.and_then(|backend| next.binary_search(backend).ok()) {
                Some(index) if !is_kept[index] => is_kept[index] = true,
                _ => removed.push(position),
            }
        }
        let is_new = next.iter().zip(is_kept).filter(|(_, is_kept)| !is_kept);
        Self { removed, added: is_new.map(|(backend, _)| *backend).collect() }
    }

    /// Returns the backends that join the list.
    pub(super) fn added(&self) -> &[BackendTarget] {
        &self.added
    }

    /// Returns the largest number of entries that the edit writes.
    pub(super) fn max_writes(&self) -> usize {
        self.removed.len().max(self.added.len())
    }

    /// Changes the backend numbers of a list. `added` are the numbers of the backends that join it.
    pub(super) fn apply(&self, numbers: &mut Vec<u32>, added: &[u32]) -> EditedEntries {
        let mut edited = EditedEntries {
            writes: Vec::with_capacity(self.max_writes()),
            removed: self.removed.iter().map(|&position| numbers[position]).collect(),
        };
        let replaced_count = self.removed.len().min(added.len());
        let (replaced, shrunk) = self.removed.split_at(replaced_count);
        let (replacing, appended) = added.split_at(replaced_count);
        for (&position, &number) in replaced.iter().zip(replacing) {
            numbers[position] = number;
            edited.writes.push((position as u32, number));
        }
        // From the end, so that the entry which takes the place is never one that leaves as well. That entry then
        // stands twice, as its own position is not written.
        for &position in shrunk.iter().rev() {
            numbers.swap_remove(position);
            if let Some(&moved) = numbers.get(position) {
                edited.writes.push((position as u32, moved));
            }
        }
        // Connects do not read behind the end until the word of the service id has the new length.
        for &number in appended {
            edited.writes.push((numbers.len() as u32, number));
            numbers.push(number);
        }
        edited
    }
}

impl EditedEntries {
    /// Returns the map operations that write the entries of a list at this offset, one for each run of positions.
    pub(super) fn map_ops(&self, offset: u32) -> Vec<MapOp> {
        let mut runs: Vec<(u32, Vec<u32>)> = Vec::new();
        for &(position, number) in &self.writes {
            match runs.last_mut() {
                Some((start, run)) if *start + run.len() as u32 == position => run.push(number),
                _ => runs.push((position, vec![number])),
            }
        }
        let op = |(start, backends)| MapOp::ListEntries { offset: offset + start, backends };
        runs.into_iter().map(op).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Returns the backend with this number.
    fn backend(number: u32) -> BackendTarget {
        BackendTarget { address: [0; 16], cookie: 0, slot: number, port_be: 1 }
    }

    /// Edits a list of numbers, some of them twice, to the next content. Returns the list after each store, as far as
    /// connects with the old word read it, and the list after the edit.
    fn edit(current: &[u32], next: &BTreeSet<u32>) -> (Vec<Vec<u32>>, Vec<u32>, EditedEntries) {
        let targets: Vec<BackendTarget> = current.iter().map(|&it| backend(it)).collect();
        let wanted: Vec<BackendTarget> = next.iter().map(|&it| backend(it)).collect();
        let edit = ListEdit::between(targets.iter().map(Some), &wanted);
        let added: Vec<u32> = edit.added().iter().map(|it| it.slot).collect();
        let mut numbers = current.to_vec();
        let edited = edit.apply(&mut numbers, &added);
        let mut memory = current.to_vec();
        memory.resize(current.len().max(numbers.len()), u32::MAX);
        let mut prefixes = Vec::new();
        for op in edited.map_ops(0) {
            let MapOp::ListEntries { offset, backends } = op else { panic!("{op:?}") };
            for (position, number) in (offset as usize..).zip(backends) {
                memory[position] = number;
                prefixes.push(memory[..current.len()].to_vec());
            }
        }
        assert_eq!(memory[..numbers.len()], numbers, "what is written is what is remembered");
        (prefixes, numbers, edited)
    }

    #[test]
    fn one_change_is_one_store() {
        let all: Vec<u32> = (0..5_000).collect();
        let without: BTreeSet<u32> = (0..5_000).filter(|it| *it != 70).collect();
        let (_, after, edited) = edit(&all, &without);
        assert_eq!((edited.writes, edited.removed), (vec![(70, 4_999)], vec![70]));
        assert_eq!(after.len(), 4_999);
        let (_, _, edited) = edit(&all, &(0..4_999).collect());
        assert_eq!((edited.writes, edited.removed), (vec![], vec![4_999]), "the length alone");
        let (_, _, edited) = edit(&all, &(0..5_001).collect());
        assert_eq!((edited.writes, edited.removed), (vec![(5_000, 5_000)], vec![]));
        let other: BTreeSet<u32> = without.into_iter().chain([9_999]).collect();
        let (_, _, edited) = edit(&all, &other);
        assert_eq!((edited.writes, edited.removed), (vec![(70, 9_999)], vec![70]));
    }

    #[test]
    fn an_entry_that_stands_twice_leaves_once() {
        let (_, after, edited) = edit(&[4, 5, 4], &[4, 5].into());
        assert_eq!((after, edited.removed), (vec![4, 5], vec![4]));
    }

    #[test]
    fn an_unknown_backend_leaves() {
        let edit = ListEdit::between([Some(&backend(1)), None].into_iter(), &[backend(1)]);
        assert_eq!((edit.removed, edit.added), (vec![1], vec![]));
    }

    proptest! {
        #[test]
        fn after_each_store_what_stays_is_there_and_nothing_foreign(
            current in prop::collection::vec(0u32..24, 0..24),
            next in prop::collection::btree_set(0u32..24, 0..24),
        ) {
            let (prefixes, after, edited) = edit(&current, &next);
            let before: BTreeSet<u32> = current.iter().copied().collect();
            let stays: BTreeSet<u32> = before.intersection(&next).copied().collect();
            let known: BTreeSet<u32> = before.union(&next).copied().collect();
            for seen in prefixes {
                let seen: BTreeSet<u32> = seen.into_iter().collect();
                prop_assert!(seen.is_superset(&stays) && seen.is_subset(&known), "{:?}", seen);
            }
            prop_assert_eq!(after.len(), next.len());
            prop_assert_eq!(after.iter().copied().collect::<BTreeSet<u32>>(), next.clone());
            // Each entry that left is released once: the rest of the entries are the next list's.
            let mut rest = current.clone();
            for number in &edited.removed {
                let position = rest.iter().position(|it| it == number).expect("it was there");
                rest.remove(position);
            }
            prop_assert_eq!(rest.iter().copied().collect::<BTreeSet<u32>>(), stays.clone());
            prop_assert_eq!(rest.len(), stays.len());
        }
    }
}
