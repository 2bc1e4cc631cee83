use proptest::prelude::*;

use super::*;
use crate::kernel::totals_row::WORDS;

fn name(number: u32) -> NamespacedName {
    NamespacedName::new("default", format!("r{number}"))
}

/// Returns a row in which each word is `count` times its own factor.
fn row(count: u64) -> TotalsRow {
    let mut words = [0; WORDS];
    words.iter_mut().zip(1..).for_each(|(word, place)| *word = count * place);
    TotalsRow::from_words(words)
}

fn levels(in_flight: u64) -> RevisionLevels {
    RevisionLevels { in_flight, connections: 2 * in_flight, estimated: 3 * in_flight }
}

/// Returns the exported totals of each Revision.
fn exported(totals: &RevisionTotals) -> Vec<(NamespacedName, TotalsRow, RevisionLevels)> {
    totals.exported().into_iter().map(|(name, _, it)| (name, it.row, it.levels)).collect()
}

fn set_owners(totals: &mut RevisionTotals, number: u32) {
    totals.set_owners(&name(number), ["s".into(), "c".into()]);
}

#[test]
fn a_revision_is_the_sum_of_its_pods_and_of_those_that_are_gone() {
    let (mut totals, now) = (RevisionTotals::default(), Instant::now());
    set_owners(&mut totals, 1);
    totals.assign_slot(1, &name(1));
    totals.assign_slot(2, &name(1));
    totals.update_slot(1, row(10), levels(1));
    totals.update_slot(2, row(5), levels(2));
    assert_eq!(exported(&totals), [(name(1), row(15), levels(3))]);
    totals.mark_gone(now, 1);
    totals.update_slot(1, row(11), levels(0));
    assert_eq!(exported(&totals), [(name(1), row(16), levels(2))], "one connection closed late");
    totals.fold_expired(now + GONE_READ_TIME);
    assert_eq!(totals.slots(), [2]);
    totals.update_slot(1, row(99), levels(9));
    assert_eq!(exported(&totals), [(name(1), row(16), levels(2))], "no pod has the row");
}

#[test]
fn a_slot_that_is_given_to_another_pod_starts_from_zero() {
    let (mut totals, now) = (RevisionTotals::default(), Instant::now());
    (1..3).for_each(|number| set_owners(&mut totals, number));
    totals.assign_slot(1, &name(1));
    totals.update_slot(1, row(10), levels(0));
    totals.mark_gone(now, 1);
    totals.assign_slot(1, &name(2));
    totals.update_slot(1, row(3), levels(1));
    let both = [(name(1), row(10), levels(0)), (name(2), row(3), levels(1))];
    assert_eq!(exported(&totals), both);
    totals.assign_slot(1, &name(2));
    assert_eq!(exported(&totals), both, "the same pod, registered again");
}

#[test]
fn the_sum_of_gone_pods_is_stored_once_it_changes_and_deleted_with_its_revision() {
    let (mut totals, now) = (RevisionTotals::default(), Instant::now());
    totals.assign_slot(1, &name(1));
    totals.assign_slot(2, &name(1));
    totals.update_slot(1, row(10), levels(0));
    totals.update_slot(2, row(5), levels(0));
    assert_eq!(totals.take_unsaved(), [], "all are there");
    totals.mark_gone(now, 1);
    assert_eq!(totals.take_unsaved(), [(name(1), Some(row(10)))]);
    totals.update_slot(1, row(10), levels(0));
    assert_eq!(totals.take_unsaved(), []);
    totals.update_slot(1, row(11), levels(0));
    assert_eq!(totals.take_unsaved(), [(name(1), Some(row(11)))]);
    totals.fold_expired(now + GONE_READ_TIME);
    assert_eq!(totals.take_unsaved(), [(name(1), Some(row(11)))], "the row has moved into the sum");
    totals.forget_revision(&name(1));
    assert_eq!(totals.take_unsaved(), [], "a pod of it is still there");
    totals.mark_gone(now, 2);
    assert_eq!(totals.take_unsaved(), [(name(1), None)]);
    assert_eq!(totals.revisions().count(), 0);
}

#[test]
fn a_revision_whose_owners_are_not_known_yet_is_not_exported() {
    let mut totals = RevisionTotals::resume(BTreeMap::from([(name(1), row(7))]));
    assert_eq!(exported(&totals), []);
    set_owners(&mut totals, 1);
    assert_eq!(exported(&totals), [(name(1), row(7), levels(0))]);
}

/// Event on a simulated node with four rows and three Revisions.
#[derive(Clone, Debug)]
enum SimRowEvent {
    /// A row without a pod is allocated to a pod of this Revision.
    AddPod(u32, u32),
    /// A row counts this much more, while its pod exists or has just ended.
    Count(u32, u64),
    /// The agent reads every row.
    Read,
    /// The pod of a row ends.
    EndPod(u32),
    /// This much time passes, in seconds.
    AdvanceTime(u64),
    /// The agent ends at any moment, and another one starts.
    Restart,
}

fn row_event() -> impl Strategy<Value = SimRowEvent> {
    prop_oneof![
        (1..5_u32, 0..3_u32).prop_map(|(slot, revision)| SimRowEvent::AddPod(slot, revision)),
        (1..5_u32, 1..9_u64).prop_map(|(slot, by)| SimRowEvent::Count(slot, by)),
        Just(SimRowEvent::Read),
        (1..5_u32).prop_map(SimRowEvent::EndPod),
        (1..90_u64).prop_map(SimRowEvent::AdvanceTime),
        Just(SimRowEvent::Restart),
    ]
}

/// Simulated node: the kernel's rows, which outlive agents, the stored sums, and the agent.
struct SimTotalsNode {
    now: Instant,
    /// Revision of each row, and true if its pod exists.
    pods: BTreeMap<u32, (u32, bool)>,
    rows: BTreeMap<u32, u64>,
    saved: BTreeMap<NamespacedName, TotalsRow>,
    totals: RevisionTotals,
    /// True total of each Revision, as far as an agent was there to read it.
    true_totals: BTreeMap<u32, u64>,
}

impl SimTotalsNode {
    fn new() -> Self {
        let mut node = Self {
            now: Instant::now(),
            pods: BTreeMap::new(),
            rows: BTreeMap::new(),
            saved: BTreeMap::new(),
            totals: RevisionTotals::default(),
            true_totals: BTreeMap::new(),
        };
        (0..3).for_each(|number| set_owners(&mut node.totals, number));
        node
    }

    fn read(&mut self) {
        for slot in self.totals.slots() {
            let count = self.rows.get(&slot).copied().unwrap_or_default();
            self.totals.update_slot(slot, row(count), levels(0));
        }
        for (name, row) in self.totals.take_unsaved() {
            match row {
                Some(row) => drop(self.saved.insert(name, row)),
                None => drop(self.saved.remove(&name)),
            }
        }
    }

    fn step(&mut self, step: SimRowEvent) {
        match step {
            SimRowEvent::AddPod(slot, revision)
                if self.pods.get(&slot).is_none_or(|(_, exists)| !exists) =>
            {
                self.read();
                self.rows.insert(slot, 0);
                self.pods.insert(slot, (revision, true));
                self.totals.assign_slot(slot, &name(revision));
            }
            SimRowEvent::Count(slot, by) if self.totals.slots().contains(&slot) => {
                *self.rows.entry(slot).or_default() += by;
                let (revision, _) = self.pods[&slot];
                *self.true_totals.entry(revision).or_default() += by;
            }
            SimRowEvent::EndPod(slot)
                if self.pods.get(&slot).is_some_and(|(_, exists)| *exists) =>
            {
                self.read();
                self.pods.entry(slot).and_modify(|(_, exists)| *exists = false);
                self.totals.mark_gone(self.now, slot);
                self.read();
            }
            SimRowEvent::Read => self.read(),
            SimRowEvent::AdvanceTime(seconds) => {
                self.read();
                self.now += Duration::from_secs(seconds);
                self.totals.fold_expired(self.now);
                self.read();
            }
            SimRowEvent::Restart => {
                // Rows of gone pods are read until the last moment here; rows of existing pods need not be.
                self.read();
                self.totals = RevisionTotals::resume(self.saved.clone());
                (0..3).for_each(|number| set_owners(&mut self.totals, number));
                for (slot, (revision, exists)) in self.pods.clone() {
                    if exists {
                        self.totals.assign_slot(slot, &name(revision));
                    }
                }
            }
            SimRowEvent::AddPod(..) | SimRowEvent::Count(..) | SimRowEvent::EndPod(_) => {}
        }
    }
}

proptest! {
    #[test]
    fn no_total_decreases_and_none_is_counted_twice_or_lost(
        steps in prop::collection::vec(row_event(), 0..120)
    ) {
        let mut node = SimTotalsNode::new();
        let mut before: BTreeMap<NamespacedName, u64> = BTreeMap::new();
        for step in steps {
            node.step(step.clone());
            if matches!(step, SimRowEvent::Restart) {
                // Totals before the first read would be less; the agent reads once before it exports them.
                node.read();
            }
            for (name, row, _) in exported(&node.totals) {
                let last = before.entry(name.clone()).or_default();
                prop_assert!(row.started >= *last, "{name} decreased after {step:?}");
                *last = row.started;
            }
            node.read();
            let started = |count: u64| row(count).started;
            let want: Vec<_> = node.true_totals.iter().map(|(it, count)| (name(*it), started(*count))).collect();
            let found = exported(&node.totals).into_iter().map(|(name, row, _)| (name, row.started));
            let found: Vec<_> = found.filter(|(_, started)| *started > 0).collect();
            prop_assert_eq!(found, want);
        }
    }
}
