use proptest::prelude::*;

use super::*;

fn name(number: u32) -> Name {
    Name::new("default", format!("r{number}"))
}

/// Returns a row in which each word is `count` times its own factor.
fn row(count: u64) -> Row {
    let mut words = [0; WORDS];
    words.iter_mut().zip(1..).for_each(|(word, place)| *word = count * place);
    Row::from_words(words)
}

fn levels(in_flight: u64) -> Levels {
    Levels { in_flight, connections: 2 * in_flight, estimated: 3 * in_flight }
}

/// Returns the exported totals of each Revision.
fn shown(tallies: &Tallies) -> Vec<(Name, Row, Levels)> {
    tallies.shown().into_iter().map(|(name, _, it)| (name, it.row, it.levels)).collect()
}

fn own(tallies: &mut Tallies, number: u32) {
    tallies.own(&name(number), ["s".into(), "c".into()]);
}

#[test]
fn a_revision_is_the_sum_of_its_pods_and_of_those_that_are_gone() {
    let (mut tallies, now) = (Tallies::default(), Instant::now());
    own(&mut tallies, 1);
    tallies.begin(1, &name(1));
    tallies.begin(2, &name(1));
    tallies.read(1, row(10), levels(1));
    tallies.read(2, row(5), levels(2));
    assert_eq!(shown(&tallies), [(name(1), row(15), levels(3))]);
    tallies.end(now, 1);
    tallies.read(1, row(11), levels(0));
    assert_eq!(shown(&tallies), [(name(1), row(16), levels(2))], "one closed late");
    tallies.settle(now + LINGERS);
    assert_eq!(tallies.slots(), [2]);
    tallies.read(1, row(99), levels(9));
    assert_eq!(shown(&tallies), [(name(1), row(16), levels(2))], "nobody's");
}

#[test]
fn a_slot_that_is_given_to_another_pod_begins_anew() {
    let (mut tallies, now) = (Tallies::default(), Instant::now());
    (1..3).for_each(|number| own(&mut tallies, number));
    tallies.begin(1, &name(1));
    tallies.read(1, row(10), levels(0));
    tallies.end(now, 1);
    tallies.begin(1, &name(2));
    tallies.read(1, row(3), levels(1));
    let both = [(name(1), row(10), levels(0)), (name(2), row(3), levels(1))];
    assert_eq!(shown(&tallies), both);
    tallies.begin(1, &name(2));
    assert_eq!(shown(&tallies), both, "the same pod, registered again");
}

#[test]
fn what_the_gone_have_left_is_written_once_it_changes_and_goes_with_its_revision() {
    let (mut tallies, now) = (Tallies::default(), Instant::now());
    tallies.begin(1, &name(1));
    tallies.begin(2, &name(1));
    tallies.read(1, row(10), levels(0));
    tallies.read(2, row(5), levels(0));
    assert_eq!(tallies.take_unsaved(), [], "all are there");
    tallies.end(now, 1);
    assert_eq!(tallies.take_unsaved(), [(name(1), Some(row(10)))]);
    tallies.read(1, row(10), levels(0));
    assert_eq!(tallies.take_unsaved(), []);
    tallies.read(1, row(11), levels(0));
    assert_eq!(tallies.take_unsaved(), [(name(1), Some(row(11)))]);
    tallies.settle(now + LINGERS);
    assert_eq!(tallies.take_unsaved(), [(name(1), Some(row(11)))], "no more, no less");
    tallies.forget(&name(1));
    assert_eq!(tallies.take_unsaved(), [], "a pod of it is still there");
    tallies.end(now, 2);
    assert_eq!(tallies.take_unsaved(), [(name(1), None)]);
    assert_eq!(tallies.revisions().count(), 0);
}

#[test]
fn a_revision_whose_owners_are_not_known_yet_is_not_shown() {
    let mut tallies = Tallies::resume(BTreeMap::from([(name(1), row(7))]));
    assert_eq!(shown(&tallies), []);
    own(&mut tallies, 1);
    assert_eq!(shown(&tallies), [(name(1), row(7), levels(0))]);
}

/// Event on a simulated node with four rows and three Revisions.
#[derive(Clone, Debug)]
enum Step {
    /// A row without a pod is allocated to a pod of this Revision.
    Come(u32, u32),
    /// A row counts this much more, while its pod exists or has just ended.
    Count(u32, u64),
    /// The agent reads every row.
    Read,
    /// The pod of a row ends.
    Leave(u32),
    /// This much time passes, in seconds.
    Pass(u64),
    /// The agent ends at any moment, and another one starts.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..5_u32, 0..3_u32).prop_map(|(slot, revision)| Step::Come(slot, revision)),
        (1..5_u32, 1..9_u64).prop_map(|(slot, by)| Step::Count(slot, by)),
        Just(Step::Read),
        (1..5_u32).prop_map(Step::Leave),
        (1..90_u64).prop_map(Step::Pass),
        Just(Step::Restart),
    ]
}

/// Simulated node: the kernel's rows, which outlive agents, the stored sums, and the agent.
struct Node {
    now: Instant,
    /// Revision of each row, and true if its pod exists.
    pods: BTreeMap<u32, (u32, bool)>,
    rows: BTreeMap<u32, u64>,
    saved: BTreeMap<Name, Row>,
    tallies: Tallies,
    /// True total of each Revision, as far as an agent was there to read it.
    truth: BTreeMap<u32, u64>,
}

impl Node {
    fn new() -> Self {
        let mut node = Self {
            now: Instant::now(),
            pods: BTreeMap::new(),
            rows: BTreeMap::new(),
            saved: BTreeMap::new(),
            tallies: Tallies::default(),
            truth: BTreeMap::new(),
        };
        (0..3).for_each(|number| own(&mut node.tallies, number));
        node
    }

    fn read(&mut self) {
        for slot in self.tallies.slots() {
            let count = self.rows.get(&slot).copied().unwrap_or_default();
            self.tallies.read(slot, row(count), levels(0));
        }
        for (name, row) in self.tallies.take_unsaved() {
            match row {
                Some(row) => drop(self.saved.insert(name, row)),
                None => drop(self.saved.remove(&name)),
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Come(slot, revision) if self.pods.get(&slot).is_none_or(|(_, is)| !is) => {
                self.read();
                self.rows.insert(slot, 0);
                self.pods.insert(slot, (revision, true));
                self.tallies.begin(slot, &name(revision));
            }
            Step::Count(slot, by) if self.tallies.slots().contains(&slot) => {
                *self.rows.entry(slot).or_default() += by;
                let (revision, _) = self.pods[&slot];
                *self.truth.entry(revision).or_default() += by;
            }
            Step::Leave(slot) if self.pods.get(&slot).is_some_and(|(_, is)| *is) => {
                self.read();
                self.pods.entry(slot).and_modify(|(_, is)| *is = false);
                self.tallies.end(self.now, slot);
                self.read();
            }
            Step::Read => self.read(),
            Step::Pass(seconds) => {
                self.read();
                self.now += Duration::from_secs(seconds);
                self.tallies.settle(self.now);
                self.read();
            }
            Step::Restart => {
                // Rows of gone pods are read until the last moment here; rows of existing pods need not be.
                self.read();
                self.tallies = Tallies::resume(self.saved.clone());
                (0..3).for_each(|number| own(&mut self.tallies, number));
                for (slot, (revision, is)) in self.pods.clone() {
                    if is {
                        self.tallies.begin(slot, &name(revision));
                    }
                }
            }
            Step::Come(..) | Step::Count(..) | Step::Leave(_) => {}
        }
    }
}

proptest! {
    #[test]
    fn no_total_goes_back_and_none_is_counted_twice_or_lost(
        steps in prop::collection::vec(step(), 0..120)
    ) {
        let mut node = Node::new();
        let mut before: BTreeMap<Name, u64> = BTreeMap::new();
        for step in steps {
            node.step(step.clone());
            if matches!(step, Step::Restart) {
                // Totals before the first read would be less; the agent reads once before it exports them.
                node.read();
            }
            for (name, row, _) in shown(&node.tallies) {
                let is = before.entry(name.clone()).or_default();
                prop_assert!(row.started >= *is, "{name} went back after {step:?}");
                *is = row.started;
            }
            node.read();
            let started = |count: u64| row(count).started;
            let want: Vec<_> = node.truth.iter().map(|(it, count)| (name(*it), started(*count))).collect();
            let found = shown(&node.tallies).into_iter().map(|(name, row, _)| (name, row.started));
            let found: Vec<_> = found.filter(|(_, started)| *started > 0).collect();
            prop_assert_eq!(found, want);
        }
    }
}
