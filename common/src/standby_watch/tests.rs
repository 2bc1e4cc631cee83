use super::{
    StandbyWatchAction::{PassOver, Query, UseAgain},
    StandbyWatchEvent::{Answered, Ordered, QueryEnded, Tick, Used},
    *,
};

const TIMEOUT: Duration = Duration::from_millis(200);
const NO_ACTION: [StandbyWatchAction; 0] = [];

/// Returns the watch of a pod with an order.
fn watch(now: Instant) -> StandbyWatch {
    let mut watch = StandbyWatch::default();
    assert_eq!(watch.step(now, Ordered(Some(TIMEOUT))), NO_ACTION);
    watch
}

/// Returns the watch of a pod that is passed over, and whose first query is under way.
fn passed_over(now: Instant) -> StandbyWatch {
    let mut watch = watch(now - TIMEOUT);
    watch.step(now - TIMEOUT, Used);
    assert_eq!(watch.step(now - TIMEOUT / 2, Tick), [Query(1)]);
    assert_eq!(watch.step(now, Tick), [PassOver]);
    watch
}

#[test]
fn a_pod_without_a_sign_is_passed_over_until_the_next_one() {
    let now = Instant::now();
    let signs = [Answered, QueryEnded(1, true), Ordered(None)];
    for sign in signs {
        let mut watch = watch(now);
        assert_eq!((watch.next_wake(), watch.is_active()), (None, false), "nothing is awaited");
        assert_eq!(watch.step(now, Used), NO_ACTION);
        assert_eq!(watch.next_wake(), Some(now + TIMEOUT / 2));
        assert_eq!(watch.step(now + TIMEOUT / 2, Tick), [Query(1)]);
        assert_eq!(watch.next_wake(), Some(now + TIMEOUT));
        assert_eq!(watch.step(now + TIMEOUT, Tick), [PassOver]);
        assert!(watch.is_passed_over() && watch.is_active());
        assert_eq!(watch.step(now + TIMEOUT, sign), [UseAgain], "{sign:?}");
        assert!(!watch.is_passed_over() && !watch.is_active(), "{sign:?}");
    }
}

#[test]
fn a_sign_in_time_needs_no_query() {
    let now = Instant::now();
    for sign in [Answered, Ordered(None)] {
        let mut watch = watch(now);
        watch.step(now, Used);
        assert_eq!(watch.step(now, sign), NO_ACTION);
        assert_eq!(watch.next_wake(), None);
        assert_eq!(watch.step(now + 9 * TIMEOUT, Tick), NO_ACTION, "{sign:?}");
    }
}

/// A refused query proves little: the agent may be starting.
#[test]
fn a_failed_query_waits_for_the_timeout_and_is_repeated_while_the_pod_is_passed_over() {
    let now = Instant::now();
    let mut watch = watch(now);
    watch.step(now, Used);
    let asked = now + TIMEOUT / 2;
    assert_eq!(watch.step(asked, Tick), [Query(1)]);
    assert_eq!(watch.step(asked, QueryEnded(1, false)), NO_ACTION);
    assert_eq!(watch.next_wake(), Some(now + TIMEOUT));
    assert_eq!(watch.step(now + TIMEOUT, Tick), [PassOver]);
    assert_eq!(watch.next_wake(), Some(asked + QUERY_PAUSE));
    assert_eq!(watch.step(asked + QUERY_PAUSE, Tick), [Query(2)]);
    assert_eq!(watch.step(asked + QUERY_PAUSE, QueryEnded(1, true)), NO_ACTION, "an old one");
    assert_eq!(watch.step(asked + QUERY_PAUSE, QueryEnded(2, true)), [UseAgain]);
}

#[test]
fn uses_while_the_pod_is_known_to_run_are_checked_afterwards() {
    let now = Instant::now();
    let mut watch = passed_over(now);
    assert_eq!(watch.step(now, Answered), [UseAgain]);
    assert!(watch.awaits_use());
    assert_eq!(watch.step(now, Used), NO_ACTION);
    assert!(!watch.awaits_use(), "further ones change nothing");
    assert_eq!(watch.next_wake(), Some(now + TIMEOUT));
    assert_eq!(watch.step(now + TIMEOUT, Tick), NO_ACTION);
    assert_eq!(watch.step(now + TIMEOUT * 3 / 2, Tick), [Query(2)]);
    assert_eq!(watch.step(now + 2 * TIMEOUT, Tick), [PassOver]);
}

/// A table that is sent again names the same order.
#[test]
fn a_repeated_order_changes_nothing_and_another_timeout_counts_at_once() {
    let now = Instant::now();
    let mut watch = passed_over(now);
    assert_eq!(watch.step(now, Ordered(Some(TIMEOUT))), NO_ACTION);
    assert!(watch.is_passed_over());
    watch.step(now, Answered);
    let later = now + TIMEOUT;
    watch.step(later, Used);
    assert_eq!(watch.step(later, Ordered(Some(2 * TIMEOUT))), NO_ACTION);
    assert_eq!(watch.step(later + TIMEOUT, Tick), [Query(2)]);
    assert_eq!(watch.next_wake(), Some(later + 2 * TIMEOUT));
    assert_eq!(watch.step(later + TIMEOUT, Ordered(Some(TIMEOUT))), [PassOver]);
}

#[test]
fn a_timeout_beyond_the_longest_one_counts_as_that() {
    let now = Instant::now();
    let mut watch = StandbyWatch::default();
    watch.step(now, Ordered(Some(Duration::MAX)));
    watch.step(now, Used);
    assert_eq!(watch.step(now + TIMEOUT_MAX, Tick), [PassOver, Query(1)]);
}

#[test]
fn a_pod_without_an_order_is_not_watched() {
    let now = Instant::now();
    let mut watch = StandbyWatch::default();
    for event in [Used, Answered, Tick, QueryEnded(0, false), Ordered(None), Used] {
        assert_eq!(watch.step(now, event), NO_ACTION, "{event:?}");
    }
    assert_eq!((watch.next_wake(), watch.awaits_use()), (None, false));
}

/// Reference: what a sender should do, by the times of uses and signs alone.
#[derive(Clone, Debug, Default)]
struct Reference {
    has_order: bool,
    /// Time from which the first use without a sign is waited for.
    waits_since: Option<Instant>,
    /// End of the time for which the last sign counts.
    runs_until: Option<Instant>,
}

impl Reference {
    fn use_pod(&mut self, now: Instant) {
        if self.has_order {
            let since = self.runs_until.map_or(now, |until| until.max(now));
            self.waits_since.get_or_insert(since);
        }
    }

    fn record_sign(&mut self, now: Instant) {
        if self.has_order {
            (self.waits_since, self.runs_until) = (None, Some(now + TIMEOUT));
        }
    }

    fn is_passed_over(&self, now: Instant) -> bool {
        self.waits_since.is_some_and(|since| since + TIMEOUT <= now)
    }
}

/// One sender, its pod and the reference.
#[derive(Clone, Debug)]
struct World {
    now: Instant,
    watch: StandbyWatch,
    reference: Reference,
    /// Query that has not ended, and true if its end counts.
    query: Option<(u64, bool)>,
    is_passed_over: bool,
    /// Time of the last query.
    asked_at: Option<Instant>,
}

/// One step of the world.
#[derive(Clone, Copy, Debug)]
enum WatchStep {
    /// A connection or request goes to the pod.
    Use,
    /// A byte comes from the pod.
    Answer,
    /// The agent responds that it has thawed the pod.
    ReportThaw,
    /// The query ends without a response.
    FailQuery,
    /// Half of the time until a query passes.
    PassTime,
    /// The table gives the pod an order, or withdraws it.
    ChangeTable,
    /// The sender is replaced by another one, which receives the same table.
    Restart,
}

const STEPS: [WatchStep; 7] = [
    WatchStep::Use,
    WatchStep::Answer,
    WatchStep::ReportThaw,
    WatchStep::FailQuery,
    WatchStep::PassTime,
    WatchStep::ChangeTable,
    WatchStep::Restart,
];

/// Time of one step. The times of the machine are multiples of it.
const STEP_TIME: Duration = Duration::from_millis(50);

impl World {
    fn new() -> Self {
        let mut world = Self {
            now: Instant::now(),
            watch: StandbyWatch::default(),
            reference: Reference::default(),
            query: None,
            is_passed_over: false,
            asked_at: None,
        };
        world.take(WatchStep::ChangeTable);
        world
    }

    fn take(&mut self, step: WatchStep) {
        match step {
            WatchStep::Use => {
                self.reference.use_pod(self.now);
                self.pass(Used);
            }
            WatchStep::Answer => {
                self.record_sign();
                self.pass(Answered);
            }
            WatchStep::ReportThaw => self.end_query(true),
            WatchStep::FailQuery => self.end_query(false),
            WatchStep::PassTime => {
                self.now += STEP_TIME;
                self.pass(Tick);
            }
            WatchStep::ChangeTable => {
                let has_order = !self.reference.has_order;
                self.reference = Reference { has_order, ..Reference::default() };
                self.void_query();
                self.pass(Ordered(has_order.then_some(TIMEOUT)));
            }
            WatchStep::Restart => {
                let has_order = self.reference.has_order;
                self.reference = Reference { has_order, ..Reference::default() };
                // The results of the earlier sender's queries are lost.
                (self.watch, self.query) = (StandbyWatch::default(), None);
                self.is_passed_over = false;
                self.pass(Ordered(has_order.then_some(TIMEOUT)));
            }
        }
    }

    fn end_query(&mut self, is_running: bool) {
        let Some((number, counts)) = self.query.take() else { return };
        if counts && is_running {
            self.reference.record_sign(self.now);
        }
        self.pass(QueryEnded(number, is_running));
    }

    fn record_sign(&mut self) {
        self.reference.record_sign(self.now);
        self.void_query();
    }

    fn void_query(&mut self) {
        self.query = self.query.map(|(number, _)| (number, false));
    }

    fn pass(&mut self, event: StandbyWatchEvent) {
        for action in self.watch.step(self.now, event) {
            match action {
                Query(number) => {
                    assert!(self.query.is_none_or(|(_, counts)| !counts), "one at a time");
                    self.query = Some((number, true));
                    self.asked_at = Some(self.now);
                }
                PassOver => assert!(!std::mem::replace(&mut self.is_passed_over, true)),
                UseAgain => assert!(std::mem::replace(&mut self.is_passed_over, false)),
            }
        }
    }

    /// Checks the state after a step.
    fn check(&self) {
        let expected = self.reference.is_passed_over(self.now);
        assert_eq!(self.is_passed_over, expected, "the sender acts on the reference");
        assert_eq!(self.watch.is_passed_over(), expected, "and says so");
        let waits_since = self.reference.waits_since;
        let asks = waits_since.is_some_and(|since| since + TIMEOUT / 2 <= self.now);
        if asks {
            assert!(self.asked_at >= waits_since, "the agent was asked since the use");
        }
        let is_over = self.watch.next_wake().is_some_and(|at| at <= self.now);
        assert!(!is_over, "each step does what is due");
        assert_eq!(self.watch.is_active(), waits_since.is_some());
    }
}

/// Takes each sequence of `depth` further steps. Returns the number of those that end with a pod that is passed over.
fn search(world: &World, depth: usize, path: &mut Vec<WatchStep>) -> usize {
    if depth == 0 {
        return usize::from(world.is_passed_over);
    }
    let mut passed_over = 0;
    for step in STEPS {
        let mut next = world.clone();
        path.push(step);
        next.take(step);
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| next.check()));
        assert!(checked.is_ok(), "after {path:?}: {next:?}");
        passed_over += search(&next, depth - 1, path);
        path.pop();
    }
    passed_over
}

/// The shortest way to a pod that is passed over has five steps: a use, and four times the time of a step.
#[test]
fn in_every_interleaving_a_pod_is_passed_over_exactly_while_a_sign_is_missing() {
    const DEPTH: usize = 7;
    let passed_over = search(&World::new(), DEPTH, &mut Vec::new());
    assert!(passed_over > 100, "{passed_over} ends with a pod that is passed over");
}
