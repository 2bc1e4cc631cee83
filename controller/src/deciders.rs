//! Pure: whose decisions count.
//!
//! Every autoscaler hears all usage and decides everything; every replica of the controller hears all decisions and
//! keeps the latest of each autoscaler. The one that has heard usage longest counts. That is the same one at every
//! replica, whichever stream was there first: a pod that one replica drains while another calls it ready would never
//! be let go. It goes on counting for as long as its stream stands, so that two that differ by a hair do not pull a
//! revision to and fro; when it ends, the next one's decisions take their place in the same step, and no window is lost.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{Decision, Name};

/// What the machine is to take in.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A whole set of decisions begins.
    Begin,
    /// One decision.
    Decide(Decision),
    /// Nothing is decided of the revision any more.
    Undecide(Name),
    /// The set is whole: what it did not name is undecided.
    Synced,
}

/// The autoscalers whose streams stand.
#[derive(Clone, Debug, Default)]
pub struct Deciders {
    all: BTreeMap<u64, Decider>,
    counts: Option<u64>,
}

#[derive(Clone, Debug)]
struct Decider {
    name: String,
    /// Since when it has heard usage, in ms since 1970. One that does not say comes last.
    since_ms: u64,
    is_whole: bool,
    decisions: BTreeMap<Name, Decision>,
}

impl Deciders {
    /// Name of the one whose decisions count.
    pub fn chosen(&self) -> Option<&str> {
        self.counts.and_then(|stream| self.all.get(&stream)).map(|it| it.name.as_str())
    }

    /// Names of all that decide.
    pub fn names(&self) -> BTreeSet<&str> {
        self.all.values().map(|it| it.name.as_str()).collect()
    }

    /// An autoscaler's stream, of this number, has begun.
    pub fn begin(&mut self, stream: u64, name: &str) -> Vec<Step> {
        let ended = self.end(stream);
        let decider = Decider {
            name: name.to_owned(),
            since_ms: u64::MAX,
            is_whole: false,
            decisions: BTreeMap::new(),
        };
        self.all.insert(stream, decider);
        ended
    }

    /// Since when it has heard usage.
    pub fn since(&mut self, stream: u64, ms: u64) {
        if let Some(it) = self.all.get_mut(&stream) {
            it.since_ms = ms;
        }
    }

    /// It decided.
    pub fn decide(&mut self, stream: u64, decision: Decision) -> Vec<Step> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        it.decisions.insert(decision.revision.clone(), decision.clone());
        self.if_it_counts(stream, Step::Decide(decision))
    }

    /// It decides nothing of the revision any more.
    pub fn undecide(&mut self, stream: u64, revision: Name) -> Vec<Step> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        it.decisions.remove(&revision);
        self.if_it_counts(stream, Step::Undecide(revision))
    }

    /// It has named every revision.
    pub fn synced(&mut self, stream: u64) -> Vec<Step> {
        if let Some(it) = self.all.get_mut(&stream) {
            it.is_whole = true;
        }
        self.choose()
    }

    /// Its stream has ended. The last one's decisions stay in force until somebody else decides.
    pub fn end(&mut self, stream: u64) -> Vec<Step> {
        self.all.remove(&stream);
        if self.counts == Some(stream) {
            self.counts = None;
        }
        self.choose()
    }

    fn if_it_counts(&self, stream: u64, step: Step) -> Vec<Step> {
        if self.counts == Some(stream) { vec![step] } else { Vec::new() }
    }

    /// Lets the one count that knows most, and says all that it decided if another one counted before.
    fn choose(&mut self) -> Vec<Step> {
        let whole = self.all.iter().filter(|(_, it)| it.is_whole);
        let Some((stream, it)) = whole.min_by_key(|(stream, it)| (it.since_ms, &it.name, **stream))
        else {
            return Vec::new();
        };
        if self.counts == Some(*stream) {
            return Vec::new();
        }
        self.counts = Some(*stream);
        let decisions = it.decisions.values().cloned().map(Step::Decide);
        [Step::Begin].into_iter().chain(decisions).chain([Step::Synced]).collect()
    }
}

#[cfg(test)]
mod tests {
    use common::wire::{Activity, Path};
    use proptest::prelude::*;

    use super::*;

    fn name(of: u8) -> Name {
        Name::new("default", format!("r{of}"))
    }

    fn decision(of: u8, wanted: u32) -> Decision {
        Decision {
            revision: name(of),
            wanted: Some(wanted),
            path: Path::Direct,
            activators: 0,
            activity: Activity::Active,
            stable: 0.0,
            panic: 0.0,
            target: 1.0,
            ready_pods: 0,
            panicking: false,
            excess_burst_capacity: 0.0,
            reason: String::new(),
        }
    }

    fn opened(
        deciders: &mut Deciders,
        stream: u64,
        who: &str,
        since: u64,
        wanted: u32,
    ) -> Vec<Step> {
        let mut steps = deciders.begin(stream, who);
        deciders.since(stream, since);
        steps.extend(deciders.decide(stream, decision(1, wanted)));
        steps.extend(deciders.synced(stream));
        steps
    }

    #[test]
    fn every_replica_chooses_the_same_one_whoever_came_first() {
        let (mut one, mut two) = (Deciders::default(), Deciders::default());
        opened(&mut one, 1, "a", 50, 3);
        opened(&mut one, 2, "b", 10, 7);
        opened(&mut two, 1, "b", 10, 7);
        opened(&mut two, 2, "a", 50, 3);
        assert_eq!((one.chosen(), two.chosen()), (Some("b"), Some("b")));
    }

    #[test]
    fn one_counts_for_as_long_as_it_is_there() {
        let mut all = Deciders::default();
        let all_of = |wanted| vec![Step::Begin, Step::Decide(decision(1, wanted)), Step::Synced];
        assert_eq!(opened(&mut all, 1, "a", 10, 3), all_of(3));
        assert_eq!(opened(&mut all, 2, "b", 50, 7), [], "another counts");
        assert_eq!(all.chosen(), Some("a"));
        assert_eq!(all.decide(2, decision(1, 9)), []);
        assert_eq!(all.decide(1, decision(1, 4)), [Step::Decide(decision(1, 4))]);
        // At once, with what it has decided meanwhile.
        assert_eq!(all.end(1), all_of(9));
        assert_eq!(all.chosen(), Some("b"));
    }

    #[test]
    fn who_has_heard_usage_longest_takes_over() {
        let mut all = Deciders::default();
        opened(&mut all, 1, "a", 50, 1);
        opened(&mut all, 2, "young", 90, 2);
        opened(&mut all, 3, "old", 70, 3);
        all.begin(4, "not whole");
        all.since(4, 0);
        all.end(1);
        assert_eq!(all.chosen(), Some("old"));
        all.end(3);
        assert_eq!(all.chosen(), Some("young"));
        assert_eq!(all.end(2), [], "the last decisions stay in force");
        assert_eq!(all.chosen(), None);
        assert_eq!(all.synced(4), [Step::Begin, Step::Synced]);
    }

    #[test]
    fn an_autoscaler_that_comes_back_is_not_ended_by_its_first_stream() {
        let mut all = Deciders::default();
        opened(&mut all, 1, "a", 50, 1);
        opened(&mut all, 2, "a", 50, 2);
        let steps = all.end(1);
        assert_eq!(steps, [Step::Begin, Step::Decide(decision(1, 2)), Step::Synced]);
        assert_eq!(all.chosen(), Some("a"));
    }

    proptest! {
        /// Whoever comes and goes: a receiver of the steps always holds exactly what the one that counts decided, or,
        /// while none does, what the last one that counted did.
        #[test]
        fn what_counts_is_one_autoscalers_whole_word(
            ops in proptest::collection::vec((0u8..5, 0u64..3, 0u8..3, 0u32..4), 0..60),
        ) {
            let (mut all, mut held, mut unnamed) =
                (Deciders::default(), BTreeMap::new(), None::<BTreeSet<Name>>);
            for (kind, stream, of, wanted) in ops {
                let steps = match kind {
                    0 => all.begin(stream, &format!("a{stream}")),
                    1 => all.synced(stream),
                    2 => all.end(stream),
                    3 => all.undecide(stream, name(of)),
                    _ => all.decide(stream, decision(of, wanted)),
                };
                for step in steps {
                    match step {
                        Step::Begin => unnamed = Some(held.keys().cloned().collect()),
                        Step::Decide(it) => {
                            unnamed.iter_mut().for_each(|all| _ = all.remove(&it.revision));
                            held.insert(it.revision.clone(), it.wanted);
                        }
                        Step::Undecide(name) => drop(held.remove(&name)),
                        Step::Synced => for name in unnamed.take().into_iter().flatten() {
                            held.remove(&name);
                        },
                    }
                }
                let counts = all.counts.and_then(|stream| all.all.get(&stream));
                let Some(counts) = counts.filter(|it| it.is_whole) else { continue };
                let decided = counts.decisions.iter().map(|(name, it)| (name.clone(), it.wanted));
                prop_assert_eq!(&held, &decided.collect::<BTreeMap<_, _>>());
            }
        }
    }
}
