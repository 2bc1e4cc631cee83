//! Faults in reports never remove a pod: one series of load, reported in time and reported with faults.

use std::ops::Range;

use common::wire::{ScaleMetric, WindowAggregation};
use proptest::{collection::vec, prelude::*};

use super::*;

/// Number of base pods; every second one is on the other node.
const READY: usize = 6;
const AGENTS: [&str; 2] = ["a", "b"];
/// Index of the sender of waiting requests, after the agents.
const ACTIVATOR: usize = 2;
/// Quiet seconds before any fault, in which a new autoscaler learns all that its decisions depend on.
const CALM: usize = 40;

/// Quiet seconds after all load, long enough that no decision depends on that load any more.
const END: usize = 60;

/// Requests in flight at each pod, and as last element the waiting ones.
type LoadLevels = [u64; READY + 1];

/// Seconds in which a draining base pod ends its last requests.
const DRAINS: usize = 3;

/// Number of a second that no test reaches.
const EVER: usize = usize::MAX - DRAINS;

/// One run without faults: a Revision's policy, its load and the lives of its pods.
#[derive(Clone, Debug)]
struct LoadCase {
    policy: ScalePolicy,
    /// Load of each second, in order.
    load: Vec<LoadLevels>,
    /// Seconds in which each pod is ready. Before them it starts, after them it drains.
    lives: [Range<usize>; READY],
}

/// Fault in a sender's reports.
#[derive(Clone, Copy, Debug)]
enum ReportFault {
    /// Reports arrive together when the fault is over.
    Late,
    /// Reports of that time are lost.
    Lost,
    /// Each report arrives twice, and then its predecessor again.
    Repeated,
    /// Every second report arrives after its successor.
    Reordered,
    /// The stream ends; another one follows when the fault is over. From the first second on: the sender is absent at
    /// first.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct TimedFault {
    sender: usize,
    harm: ReportFault,
    from: usize,
    long: usize,
}

/// All faults of one run.
#[derive(Clone, Debug, Default)]
struct FaultCase {
    all: Vec<TimedFault>,
    /// Second in which a new autoscaler without any state takes over.
    renewed: Option<usize>,
    /// Offsets by which the senders' clocks are ahead.
    clocks_ns: [u64; 3],
    /// True if the senders' reports of a second arrive in reverse order.
    is_mixed: bool,
}

/// Result of one run.
struct LoadCaseOutcome {
    /// Requested pods after each quarter of a second.
    pods: Vec<u32>,
    /// Pods that decisions leave after each quarter: an autoscaler that has named no number yet keeps those that exist.
    kept: Vec<u32>,
    /// First and last quarter in which the real load was higher than the reports could show.
    hidden: Option<(usize, usize)>,
}

struct SimReporters<'a> {
    now: Duration,
    fleet: ScaledRevisions,
    table: RouteTable,
    name: NamespacedName,
    story: &'a LoadCase,
    harms: &'a FaultCase,
    streams: [Option<UsageStream>; 3],
    totals: [RequestTotals; READY + 1],
    told: [Vec<UsageSample>; 3],
    queued: [Vec<UsageSample>; 3],
    /// Removed pods whose removal each sender has yet to report.
    ended: [Vec<usize>; 3],
    /// Second of each sender's last report.
    told_in: [Option<usize>; 3],
    /// Totals as last reported.
    known: [RequestTotals; READY + 1],
    /// True for each sender that has not reported a growth of load.
    hides: [bool; 3],
    made: usize,
    /// Pods that the controller runs: the last decision that names a number.
    pods: u32,
    /// True if the present autoscaler has named a number.
    has_named: bool,
}

impl<'a> SimReporters<'a> {
    fn new(story: &'a LoadCase, harms: &'a FaultCase) -> Self {
        let name = NamespacedName::new("default", "hello-00001");
        let mut table = RouteTable::default();
        let known =
            RouteRevision { initial_scale_reached: true, ..revision(&name, story.policy.clone()) };
        table.revisions.insert(name.clone(), known);
        for (at, life) in story.lives.iter().enumerate() {
            let node = AGENTS[at % 2].into();
            let phase = if life.start == 0 { RoutingPhase::Ready } else { RoutingPhase::Starting };
            table.pods.insert(uid(at), RoutePod { node, ..pod(&uid(at), &name, phase) });
        }
        let line = common::wire::ActivatorEntry {
            name: "line".into(),
            node: String::new(),
            zone: String::new(),
            addresses: Vec::new(),
        };
        table.activators.insert(line.name.clone(), line);
        let mut world = Self {
            now: Duration::from_secs(10),
            fleet: ScaledRevisions::new(TICK),
            table,
            name,
            story,
            harms,
            streams: [None; 3],
            totals: [RequestTotals::default(); READY + 1],
            told: Default::default(),
            queued: Default::default(),
            ended: Default::default(),
            told_in: [None; 3],
            known: [RequestTotals::default(); READY + 1],
            hides: [false; 3],
            made: 0,
            pods: u32::try_from(READY).unwrap(),
            has_named: false,
        };
        world.fleet.routes(world.now, &world.table, &world.table.keys());
        world
    }

    fn harm(&self, sender: usize, second: usize) -> Option<ReportFault> {
        let mut all = self.harms.all.iter().filter(|it| it.sender == sender);
        all.find(|it| (it.from..it.from + it.long).contains(&second)).map(|it| it.harm)
    }

    fn ns(&self, sender: usize) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap() + self.harms.clocks_ns[sender]
    }

    /// Carries out the decisions: new pods start and never become ready, and only those are removed again.
    fn obey(&mut self) {
        for step in self.fleet.run(self.now) {
            let DecisionUpdate::Decided(it) = step else { continue };
            self.has_named |= it.wanted.is_some();
            self.pods = it.wanted.unwrap_or(self.pods);
        }
        let wanted = usize::try_from(self.pods).unwrap();
        let coming = self.coming();
        let mut changed = BTreeSet::new();
        for _ in coming..wanted {
            self.made += 1;
            let uid = format!("new-{:04}", self.made);
            let new = pod(&uid, &self.name, RoutingPhase::Starting);
            self.table.pods.insert(uid.clone(), RoutePod { node: "a".into(), ..new });
            changed.insert(RouteKey::Pod(uid));
        }
        let new: Vec<String> =
            self.table.pods.keys().filter(|uid| uid.starts_with("new")).cloned().collect();
        for uid in new.into_iter().take(coming.saturating_sub(wanted)) {
            self.table.pods.remove(&uid);
            changed.insert(RouteKey::Pod(uid));
        }
        if !changed.is_empty() {
            self.fleet.routes(self.now, &self.table, &changed);
            self.obey();
        }
    }

    fn coming(&self) -> usize {
        self.table.pods.values().filter(|it| it.phase != RoutingPhase::Draining).count()
    }

    fn kept(&self) -> u32 {
        let coming = if self.has_named { 0 } else { u32::try_from(self.coming()).unwrap() };
        self.pods.max(coming)
    }

    /// Moves pods to ready, draining and removed, as their lives say.
    fn turn(&mut self, second: usize) {
        let mut changed = BTreeSet::new();
        for (at, life) in self.story.lives.iter().enumerate() {
            if second == life.end + DRAINS {
                self.table.pods.remove(&uid(at));
                self.ended[sender_of(at)].push(at);
            } else if let Some(pod) = self.table.pods.get_mut(&uid(at)) {
                let phase = match second {
                    _ if second < life.start => RoutingPhase::Starting,
                    _ if second < life.end => RoutingPhase::Ready,
                    _ => RoutingPhase::Draining,
                };
                if std::mem::replace(&mut pod.phase, phase) == phase {
                    continue;
                }
            } else {
                continue;
            }
            changed.insert(RouteKey::Pod(uid(at)));
        }
        if !changed.is_empty() {
            self.fleet.routes(self.now, &self.table, &changed);
        }
    }

    /// Starts and ends requests until each pod has its level. With the RPS metric all of them are new requests.
    fn reach(&mut self, second: usize) {
        for at in 0..=READY {
            let at_ns = self.ns(sender_of(at));
            let level = self.story.level(at, second);
            let totals = &mut self.totals[at];
            let kept = if self.story.policy.metric == ScaleMetric::Rps { 0 } else { level };
            while totals.in_flight() > kept {
                totals.finish(at_ns);
                // Waiting requests end without a pod in this test.
                totals.left += u64::from(at == READY);
            }
            while totals.in_flight() < level {
                totals.start(at_ns);
            }
        }
    }

    /// Usage samples that a sender has to report in a second.
    fn items(&self, sender: usize, second: usize) -> Vec<UsageSample> {
        let is_there = |at: usize| {
            let life = self.story.lives.get(at);
            life.is_none_or(|it| (it.start..it.end + DRAINS).contains(&second))
        };
        let own = (0..=READY).filter(|&at| sender_of(at) == sender && is_there(at));
        own.map(|at| UsageSample {
            key: UsageKey { revision: self.name.clone(), pod: (at < READY).then(|| uid(at)) },
            at_ns: self.ns(sender),
            totals: self.totals[at],
            status: Vec::new(),
            latency: Vec::new(),
        })
        .collect()
    }

    /// Records whether a sender has reported by now, and whether its report shows the second of the growth.
    fn note(&mut self, sender: usize, is_told: bool, is_dated: bool) {
        let is_rps = self.story.policy.metric == ScaleMetric::Rps;
        let mut grew = false;
        for at in (0..=READY).filter(|&at| sender_of(at) == sender) {
            let (new, known) = (self.totals[at], &mut self.known[at]);
            grew |= new.in_flight() > known.in_flight();
            grew |= is_rps && new.started > known.started;
            if is_told {
                *known = new;
            }
        }
        self.hides[sender] = !is_dated && (grew || (self.hides[sender] && !is_told));
    }

    fn say(&mut self, sender: usize, items: &[UsageSample]) {
        let stream = self.streams[sender].expect("a stream that stands");
        for seen in items {
            self.fleet.seen(self.now, stream, seen);
            self.obey();
        }
        self.streams[sender] = Some(self.fleet.synced(self.now, stream));
        self.obey();
    }

    fn open(&mut self, sender: usize) {
        let role =
            if sender == ACTIVATOR { ComponentRole::Activator } else { ComponentRole::Agent };
        let name = ["a", "b", "line"][sender].to_owned();
        let who = ComponentReplica { role, node: name.clone(), name };
        self.streams[sender] = Some(self.fleet.open(self.now, who));
    }

    fn report(&mut self, sender: usize, second: usize) {
        let items = self.items(sender, second);
        let same = |(old, new): (&UsageSample, &UsageSample)| old.totals == new.totals;
        let told = &self.told[sender];
        let is_old = told.len() == items.len() && told.iter().zip(&items).all(same);
        // An activator without changes sends only an empty batch.
        let news = if sender == ACTIVATOR && is_old { Vec::new() } else { items.clone() };
        let harm = self.harm(sender, second).filter(|it| {
            // A stream that is not open yet cannot delay reports.
            self.streams[sender].is_some() || matches!(it, ReportFault::Gone)
        });
        let mut all = std::mem::take(&mut self.queued[sender]);
        match harm {
            Some(ReportFault::Gone) => {
                let stream = self.streams[sender].take();
                stream.into_iter().for_each(|it| self.fleet.close(self.now, it));
                self.obey();
                return self.note(sender, false, false);
            }
            Some(ReportFault::Reordered) if !all.is_empty() => all.splice(..0, news).for_each(drop),
            Some(ReportFault::Late | ReportFault::Reordered) => {
                all.extend(news);
                (self.queued[sender], self.told[sender]) = (all, items);
                return self.note(sender, false, false);
            }
            Some(ReportFault::Lost) => {
                self.ended[sender].clear();
                return self.note(sender, false, false);
            }
            Some(ReportFault::Repeated) => {
                self.say(sender, &news);
                self.say(sender, &news);
                all = std::mem::take(&mut self.told[sender]);
            }
            None if self.streams[sender].is_none() => {
                self.open(sender);
                all.clone_from(&items);
            }
            None => all.extend(news),
        }
        // A first report, or one after a gap, does not show in which second load grew.
        let follows = self.told_in[sender].replace(second) == second.checked_sub(1);
        let is_dated = follows && self.streams[sender].is_some_and(|stream| stream.synced);
        self.told[sender] = items;
        self.say(sender, &all);
        let stream = self.streams[sender].expect("a stream that stands");
        for at in std::mem::take(&mut self.ended[sender]) {
            let key = UsageKey { revision: self.name.clone(), pod: Some(uid(at)) };
            self.fleet.gone(self.now, stream, &key);
        }
        self.note(sender, true, is_dated);
    }

    fn renew(&mut self) {
        self.fleet = ScaledRevisions::new(TICK);
        self.streams = [None; 3];
        self.queued = Default::default();
        self.known = [RequestTotals::default(); READY + 1];
        self.hides = [true; 3];
        self.fleet.routes(self.now, &self.table, &self.table.keys());
    }
}

fn uid(at: usize) -> String {
    format!("pod-{at}")
}

fn sender_of(at: usize) -> usize {
    if at < READY { at % 2 } else { ACTIVATOR }
}

fn play(story: &LoadCase, harms: &FaultCase) -> LoadCaseOutcome {
    let mut world = SimReporters::new(story, harms);
    let (mut pods, mut kept, mut hidden) = (Vec::new(), Vec::new(), None);
    for second in 0..story.load.len() {
        for quarter in 0..4u32 {
            world.now = Duration::from_secs(10 + second as u64) + 250 * quarter * MS;
            match quarter {
                0 => {
                    // A new autoscaler cannot know of pods that ended a moment before and are not replaced yet.
                    if harms.renewed == Some(second) {
                        world.renew();
                        world.obey();
                    }
                    world.turn(second);
                }
                1 => world.reach(second),
                2 if harms.is_mixed => {
                    [2, 1, 0].iter().for_each(|&sender| world.report(sender, second))
                }
                2 => [0, 1, 2].iter().for_each(|&sender| world.report(sender, second)),
                _ => {}
            }
            world.obey();
            if world.hides.contains(&true) {
                hidden = Some((hidden.map_or(pods.len(), |(first, _)| first), pods.len()));
            }
            pods.push(world.pods);
            kept.push(world.kept());
        }
    }
    LoadCaseOutcome { pods, kept, hidden }
}

/// Requested pods after each quarter of a second, with all base pods ready throughout.
fn run(policy: &ScalePolicy, load: &[LoadLevels], harms: &FaultCase) -> Vec<u32> {
    let lives = [const { 0..EVER }; READY];
    play(&LoadCase { policy: policy.clone(), load: load.to_vec(), lives }, harms).pods
}

fn small() -> ScalePolicy {
    // Any number of pods may be removed in one step.
    ScalePolicy { total: 10.0, max_scale_down_rate: 1000.0, ..short() }
}

/// A constant level at each pod for `long` seconds.
fn held(long: usize, level: u64) -> Vec<LoadLevels> {
    vec![[level, level, level, level, level, level, 0]; long]
}

fn harmed(sender: usize, harm: ReportFault, from: usize, long: usize) -> FaultCase {
    FaultCase { all: vec![TimedFault { sender, harm, from, long }], ..FaultCase::default() }
}

/// Lowest number of requested pods from second `from` on.
fn least(pods: &[u32], from: usize) -> u32 {
    *pods[4 * from..].iter().min().expect("some seconds")
}

#[test]
fn quiet_that_is_known_lowers() {
    let series = [held(20, 10), held(40, 0)].concat();
    let pods = run(&small(), &series, &FaultCase::default());
    assert_eq!((pods[4 * 20], pods.last()), (9, Some(&0)), "60 at 7 a pod");
}

/// Reports stall while most requests end: the remaining requests keep their pods, and the service is never at zero.
#[test]
fn a_report_that_comes_late_is_spread_over_the_time_that_it_tells_of() {
    for harm in [ReportFault::Late, ReportFault::Lost] {
        let series = [held(20, 100), held(70, 10)].concat();
        let late = |sender| TimedFault { sender, harm, from: 20, long: 9 };
        let harms = FaultCase { all: vec![late(0), late(1)], ..FaultCase::default() };
        let pods = run(&small(), &series, &harms);
        assert_eq!((least(&pods, 20), pods.last()), (9, Some(&9)), "{harm:?}: 60 at 7 a pod");
    }
}

/// Growth hidden by a stall counts once.
#[test]
fn a_stall_does_not_multiply_what_began_in_it() {
    let series = [held(30, 0), held(30, 10)].concat();
    let late = |sender| TimedFault { sender, harm: ReportFault::Lost, from: 30, long: 9 };
    let harms = FaultCase { all: vec![late(0), late(1)], ..FaultCase::default() };
    let pods = run(&small(), &series, &harms);
    assert_eq!(pods.iter().skip(4 * 30).max(), Some(&9), "60 at 7 a pod");
}

#[test]
fn pods_of_an_agent_that_is_gone_are_kept() {
    // All load is on the absent agent's node, where it ends or continues.
    let one = [0, 100, 0, 100, 0, 100, 0];
    for after in [held(60, 0), vec![one; 60]] {
        let series = [vec![one; 30], after].concat();
        let pods = run(&small(), &series, &harmed(1, ReportFault::Gone, 30, 60));
        assert_eq!(least(&pods, 30), 43, "300 at 7 a pod");
    }
    let all = |sender| TimedFault { sender, harm: ReportFault::Gone, from: 40, long: 80 };
    let harms = FaultCase { all: vec![all(0), all(1)], ..FaultCase::default() };
    // The last report was quiet, but the averages were still falling.
    let series = [held(39, 10), held(81, 0)].concat();
    let pods = run(&small(), &series, &harms);
    assert_eq!((pods[4 * 40], least(&pods, 40)), (8, 8), "nothing is known of the load");
}

/// Load rises on another node: the last reported load of the absent agent's node still counts.
#[test]
fn what_an_agent_that_is_gone_told_goes_on() {
    let (one, both) = ([20, 0, 20, 0, 20, 0, 0], [20, 20, 20, 20, 20, 20, 0]);
    let series = [vec![one; 30], vec![both; 30]].concat();
    let pods = run(&small(), &series, &harmed(0, ReportFault::Gone, 30, 30));
    assert_eq!((pods[4 * 30 + 1], pods[4 * 30 + 2]), (9, 18), "60 and 120 at 7 a pod");
}

/// All load moves to pods that became ready while their agent's stream stalls, and that no report has named yet.
#[test]
fn an_agent_that_stalls_is_late_though_all_pods_it_told_of_have_gone() {
    let (before, after) = ([20, 0, 20, 0, 20, 0, 0], [0, 0, 0, 30, 0, 30, 0]);
    let load = [vec![before; 48], vec![after; 30]].concat();
    let lives = [0..EVER, 0..47, 0..EVER, 48..EVER, 0..EVER, 48..EVER];
    let story = LoadCase { policy: small(), load, lives };
    let pods = play(&story, &harmed(1, ReportFault::Late, 46, 40)).pods;
    assert_eq!(least(&pods, 20), 9, "60 at 7 a pod");
}

/// The wait queue was not reported for one second, but was on time at each tick.
#[test]
fn a_second_that_an_activator_does_not_tell_is_not_quiet() {
    let series = [held(36, 10), held(40, 0)].concat();
    let lowered = |harms| run(&small(), &series, &harms).iter().rposition(|&it| it == 9);
    let [whole, lost] =
        [FaultCase::default(), harmed(ACTIVATOR, ReportFault::Lost, 36, 1)].map(lowered);
    // At the next tick, or at the first one after a stable window, a panic window and a tick.
    assert_eq!((whole, lost), (Some(4 * 38 - 1), Some(4 * 48 - 1)), "60 at 7 a pod");
}

#[test]
fn an_agent_that_never_came_is_no_quiet_node() {
    let series = vec![[0, 100, 0, 100, 0, 100, 0]; 60];
    let pods = run(&small(), &series, &harmed(1, ReportFault::Gone, 0, 60));
    assert_eq!(least(&pods, 0), 6, "what there is stays");
    let pods = run(&small(), &held(60, 0), &harmed(1, ReportFault::Gone, 0, 30));
    assert_eq!((least(&pods[..4 * 30], 0), pods.last()), (6, Some(&0)), "quiet, once it came");
}

#[test]
fn what_waits_at_an_activator_that_is_gone_keeps_its_pods() {
    let waits = [0, 0, 0, 0, 0, 0, 70];
    let series = [vec![waits; 30], held(8, 0)].concat();
    let pods = run(&small(), &series, &harmed(ACTIVATOR, ReportFault::Gone, 30, 8));
    assert_eq!(least(&pods, 30), 10, "70 at 7 a pod");
}

/// An activator reports its waiting requests once, and then is silent for some seconds.
#[test]
fn an_activator_that_falls_silent_after_its_first_words_is_missed() {
    let one_waits = [0, 0, 0, 0, 0, 0, 1];
    let series = [held(CALM + 11, 0), vec![one_waits], held(20, 0)].concat();
    let never = TimedFault { sender: ACTIVATOR, harm: ReportFault::Gone, from: 0, long: CALM - 1 };
    let silent = TimedFault { sender: ACTIVATOR, harm: ReportFault::Late, from: CALM, long: 16 };
    let harms = FaultCase { all: vec![never, silent], ..FaultCase::default() };
    let told = run(&small(), &series, &FaultCase::default());
    let harmed = run(&small(), &series, &harms);
    let ends = 4 * (CALM + 16);
    assert_eq!((told[ends], harmed[ends]), (1, 6), "nothing is known of what waits");
}

/// Load falls at a tick and rises to a multiple before the next one: the burst is decided at once.
#[test]
fn a_burst_between_two_ticks_lowers_nothing() {
    let series = [held(20, 10), held(21, 3), held(4, 60), held(4, 3)].concat();
    let pods = run(&small(), &series, &FaultCase::default());
    let at = 4 * 41 + 2;
    assert_eq!((pods[at - 1], pods[at]), (3, 52), "as soon as it is told: 360 at 7 a pod");
    assert_eq!(falls(&pods).find(|it| it % 8 != 0), None, "only at a tick");
}

/// Indices at which fewer pods were decided.
fn falls(pods: &[u32]) -> impl Iterator<Item = usize> {
    (1..pods.len()).filter(|&at| pods[at] < pods[at - 1])
}

fn harms() -> impl Strategy<Value = FaultCase> {
    let kinds = [
        ReportFault::Late,
        ReportFault::Lost,
        ReportFault::Repeated,
        ReportFault::Reordered,
        ReportFault::Gone,
    ];
    let kind = proptest::sample::select(kinds.to_vec());
    let later = (0..=ACTIVATOR, kind, CALM..CALM + 48, 1usize..20)
        .prop_map(|(sender, harm, from, long)| TimedFault { sender, harm, from, long });
    let never = (0..=ACTIVATOR, 1usize..60).prop_map(|(sender, long)| TimedFault {
        sender,
        harm: ReportFault::Gone,
        from: 0,
        long,
    });
    let all = vec(prop_oneof![4 => later, 1 => never], 0..4);
    // The new autoscaler begins at a tick, so that both runs can be compared there.
    let renewed = proptest::option::of((CALM / 2..CALM / 2 + 24).prop_map(|half| 2 * half));
    (all, renewed, any::<[u32; 3]>(), any::<bool>()).prop_map(|(all, renewed, clocks, is_mixed)| {
        FaultCase { all, renewed, clocks_ns: clocks.map(|it| u64::from(it) * 1_000_000), is_mixed }
    })
}

fn series() -> impl Strategy<Value = Vec<LoadLevels>> {
    let level = prop_oneof![3 => Just(0u64), 3 => 1u64..20, 1 => 20u64..60];
    let levels = vec(level, READY + 1).prop_map(|it| <LoadLevels>::try_from(it).expect("so many"));
    let segments = vec((levels, 1usize..12), 6..14);
    segments.prop_map(|all| {
        let each = |(levels, long)| vec![levels; long];
        let load = all.into_iter().flat_map(each);
        let calm = [[0; READY + 1]; CALM].into_iter();
        calm.chain(load).chain([[0; READY + 1]; END]).collect()
    })
}

fn policies() -> impl Strategy<Value = ScalePolicy> {
    let aggregation =
        prop_oneof![Just(WindowAggregation::Linear), Just(WindowAggregation::WeightedExponential)];
    let metric = prop_oneof![3 => Just(ScaleMetric::Concurrency), 1 => Just(ScaleMetric::Rps)];
    let bounds = (prop_oneof![Just(0u32), 0u32..8], prop_oneof![2 => Just(0u32), 1 => 6u32..20]);
    let windows = (6u64..12, 10.0f64..60.0, 0u64..6, 0u64..6);
    (aggregation, metric, bounds, windows).prop_map(|(aggregation, metric, bounds, windows)| {
        let (stable, panic_window_percent, delay, retention) = windows;
        ScalePolicy {
            aggregation,
            metric,
            min_scale: bounds.0,
            max_scale: bounds.1,
            stable_window: Duration::from_secs(stable),
            panic_window_percent,
            scale_down_delay: Duration::from_secs(delay),
            retention: Duration::from_secs(retention),
            ..small()
        }
    })
}

/// Lives of the base pods; most are always ready.
fn lives() -> impl Strategy<Value = [Range<usize>; READY]> {
    let life = prop_oneof![
        2 => Just(0..EVER),
        1 => (CALM..CALM + 60).prop_map(|from| from..EVER),
        1 => (CALM..CALM + 60).prop_map(|to| 0..to),
        1 => (CALM..CALM + 40, 1usize..40).prop_map(|(from, long)| from..from + long),
    ];
    vec(life, READY).prop_map(|it| it.try_into().expect("so many"))
}

fn stories() -> impl Strategy<Value = LoadCase> {
    (policies(), series(), lives()).prop_map(|(policy, load, lives)| LoadCase {
        policy,
        load,
        lives,
    })
}

/// Number of quarters of a second that a decision may depend on.
fn memory(policy: &ScalePolicy) -> usize {
    let all = 2 * policy.stable_window + policy.scale_down_delay + policy.retention + 2 * TICK;
    4 * usize::try_from(all.as_secs()).unwrap()
}

/// Index at which the Revision next falls asleep. In reality it has no pods then. Here they stay: it wakes with enough
/// of them and asks for none.
fn asleep(pods: &[u32], from: usize) -> usize {
    (from..pods.len()).find(|&at| pods[at] == 0).unwrap_or(pods.len())
}

impl LoadCase {
    /// Requests at a pod in a second, or waiting ones: only ready pods get any.
    fn level(&self, at: usize, second: usize) -> u64 {
        let is_ready = self.lives.get(at).is_none_or(|it| it.contains(&second));
        if is_ready { self.load[second][at] } else { 0 }
    }

    /// Returns true if `pods` carry what is in flight at this moment. An autoscaler that asked for more than another
    /// before need not take a step up between two ticks that the other one takes.
    fn is_carried(&self, at: usize, pods: u32) -> bool {
        let level = |second: usize| (0..=READY).map(|at| self.level(at, second)).sum::<u64>();
        let most = level(at / 4).max(level((at / 4).saturating_sub(1)));
        let is_between = self.policy.metric == ScaleMetric::Rps && !at.is_multiple_of(8);
        is_between || most as f64 <= f64::from(pods) * self.policy.total
    }
}

#[test]
fn a_new_autoscaler_asks_for_pods_in_place_of_those_that_have_gone() {
    // One pod is decided, and five more start until a moment after the takeover.
    let mut lives = [const { CALM + 6..CALM + 6 }; READY];
    lives[0] = 0..EVER;
    let waiting = |level| [0, 0, 0, 0, 0, 0, level];
    let load = [vec![waiting(0); CALM], vec![waiting(1); 10], vec![waiting(20); 20]].concat();
    let story = LoadCase { policy: small(), load, lives };
    let pods = play(&story, &FaultCase { renewed: Some(CALM + 4), ..FaultCase::default() }).pods;
    assert_eq!(pods[4 * (CALM + 9)], 1, "{pods:?}");
    // For its windows the new one knows too little to lower anything, but what is missing it asks for.
    assert!(least(&pods, CALM + 14) >= 3, "{pods:?}");
}

proptest! {
    /// Faults in reports never lower pods below what the same load asks for when all of it is reported in time. Pods
    /// are lowered only at a tick.
    ///
    /// Nor are fewer pods requested at any moment, until load has grown and no report shows it in the same second. From
    /// then on the autoscaler cannot know. It recovers once the growth is reported, nothing hidden is remembered, and
    /// it asks for as many pods again.
    #[test]
    fn scale_falls_only_on_knowledge(story in stories(), harms in harms()) {
        let told = play(&story, &FaultCase::default()).pods;
        let LoadCaseOutcome { pods: harmed, kept, hidden } = play(&story, &harms);
        for at in falls(&harmed) {
            prop_assert!(harmed[at] >= told[at], "{} of {} at {}", harmed[at], told[at], at);
            prop_assert_eq!(at % 8, 0, "lowered between two ticks");
        }
        prop_assert!(falls(&told).all(|at| at % 8 == 0));
        // Load that moves between senders counts twice until both have reported it, so their order is the same here.
        let told = play(&story, &FaultCase { is_mixed: harms.is_mixed, ..FaultCase::default() }).pods;
        let is_less = |at: &usize| kept[*at] < told[*at] && !story.is_carried(*at, kept[*at]);
        let (first, last) = hidden.unwrap_or((told.len(), told.len()));
        prop_assert_eq!((0..first).find(is_less), None, "all was known");
        let after = last + memory(&story.policy);
        // Panic mode remembers its highest number for as long as it lasts.
        let back = (after..told.len()).find(|&at| kept[at] >= told[at]).unwrap_or(told.len());
        prop_assert_eq!((back..asleep(&harmed, back)).find(is_less), None, "all is known again");
        // Without a pod, the first number is kept until the start has failed.
        let has_pods = story.lives.iter().any(|it| it.end == EVER);
        prop_assert!(!has_pods || after >= told.len() || back < told.len(), "never back");
    }

    /// Zero is never decided while any reported request is in flight or waits.
    #[test]
    fn what_is_in_flight_is_never_decided_to_zero(series in series(), harms in harms()) {
        let pods = run(&small(), &series, &harms);
        for at in falls(&pods).filter(|&at| pods[at] == 0) {
            // At a tick the last report is half a second old.
            prop_assert_eq!(series[at / 4 - 1], [0; READY + 1], "at {}", at);
        }
    }
}
