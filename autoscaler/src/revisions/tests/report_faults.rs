//! Faults in reports never remove a pod: one series of load, reported in time and reported with faults.

use std::ops::Range;

use common::wire::{ScaleMetric, WindowAggregation};
use proptest::{collection::vec, prelude::*};

use super::*;

/// Number of base pods; every second one is on the other node.
const BASE_PODS: usize = 6;
const AGENTS: [&str; 2] = ["a", "b"];
/// Index of the sender of waiting requests, after the agents.
const ACTIVATOR: usize = 2;
/// Quiet seconds before any fault, in which a new autoscaler learns all that its decisions depend on.
const QUIET_START_S: usize = 40;

/// Quiet seconds after all load, long enough that no decision depends on that load any more.
const QUIET_END_S: usize = 60;

/// Requests in flight at each pod, and as last element the waiting ones.
type LoadLevels = [u64; BASE_PODS + 1];

/// Seconds in which a draining base pod ends its last requests.
const DRAIN_S: usize = 3;

/// Number of a second that no test reaches.
const NEVER_ENDS: usize = usize::MAX - DRAIN_S;

/// One run without faults: a Revision's policy, its load and the lives of its pods.
#[derive(Clone, Debug)]
struct LoadCase {
    policy: ScalePolicy,
    /// Load of each second, in order.
    load: Vec<LoadLevels>,
    /// Seconds in which each pod is ready. Before them it starts, after them it drains.
    ready_spans: [Range<usize>; BASE_PODS],
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
    StreamClosed,
}

#[derive(Clone, Copy, Debug)]
struct TimedFault {
    sender: usize,
    fault: ReportFault,
    from: usize,
    long: usize,
}

/// All faults of one run.
#[derive(Clone, Debug, Default)]
struct FaultCase {
    faults: Vec<TimedFault>,
    /// Second in which a new autoscaler without any state takes over.
    replaced_at: Option<usize>,
    /// Offsets by which the senders' clocks are ahead.
    clocks_ns: [u64; 3],
    /// True if the senders' reports of a second arrive in reverse order.
    is_reversed: bool,
}

/// Result of one run.
struct LoadCaseOutcome {
    /// Requested pods after each quarter of a second.
    pods: Vec<u32>,
    /// Pods that decisions leave after each quarter: an autoscaler that has named no number yet keeps those that exist.
    kept: Vec<u32>,
    /// First and last quarter in which the real load was higher than the reports could show.
    hidden_growth: Option<(usize, usize)>,
}

struct SimReporters<'a> {
    now: Duration,
    revisions: ScaledRevisions,
    table: RouteTable,
    name: NamespacedName,
    load_case: &'a LoadCase,
    faults: &'a FaultCase,
    streams: [Option<UsageStream>; 3],
    totals: [RequestTotals; BASE_PODS + 1],
    reported: [Vec<UsageSample>; 3],
    queued: [Vec<UsageSample>; 3],
    /// Removed pods whose removal each sender has yet to report.
    ended: [Vec<usize>; 3],
    /// Second of each sender's last report.
    reported_in: [Option<usize>; 3],
    /// Totals as last reported.
    last_reported: [RequestTotals; BASE_PODS + 1],
    /// True for each sender that has not reported a growth of load.
    hides_growth: [bool; 3],
    created_pods: usize,
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
        for (at, life) in story.ready_spans.iter().enumerate() {
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
            revisions: ScaledRevisions::new(TICK),
            table,
            name,
            load_case: story,
            faults: harms,
            streams: [None; 3],
            totals: [RequestTotals::default(); BASE_PODS + 1],
            reported: Default::default(),
            queued: Default::default(),
            ended: Default::default(),
            reported_in: [None; 3],
            last_reported: [RequestTotals::default(); BASE_PODS + 1],
            hides_growth: [false; 3],
            created_pods: 0,
            pods: u32::try_from(BASE_PODS).unwrap(),
            has_named: false,
        };
        world.revisions.apply_routes(world.now, &world.table, &world.table.keys());
        world
    }

    fn active_fault(&self, sender: usize, second: usize) -> Option<ReportFault> {
        let mut all = self.faults.faults.iter().filter(|it| it.sender == sender);
        all.find(|it| (it.from..it.from + it.long).contains(&second)).map(|it| it.fault)
    }

    fn ns(&self, sender: usize) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap() + self.faults.clocks_ns[sender]
    }

    /// Carries out the decisions: new pods start and never become ready, and only those are removed again.
    fn carry_out_decisions(&mut self) {
        for step in self.revisions.evaluate_due(self.now) {
            let DecisionUpdate::Decided(it) = step else { continue };
            self.has_named |= it.desired_scale.is_some();
            self.pods = it.desired_scale.unwrap_or(self.pods);
        }
        let wanted = usize::try_from(self.pods).unwrap();
        let coming = self.coming();
        let mut changed = BTreeSet::new();
        for _ in coming..wanted {
            self.created_pods += 1;
            let uid = format!("new-{:04}", self.created_pods);
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
            self.revisions.apply_routes(self.now, &self.table, &changed);
            self.carry_out_decisions();
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
    fn update_phases(&mut self, second: usize) {
        let mut changed = BTreeSet::new();
        for (at, life) in self.load_case.ready_spans.iter().enumerate() {
            if second == life.end + DRAIN_S {
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
            self.revisions.apply_routes(self.now, &self.table, &changed);
        }
    }

    /// Starts and ends requests until each pod has its level. With the RPS metric all of them are new requests.
    fn set_levels(&mut self, second: usize) {
        for at in 0..=BASE_PODS {
            let at_ns = self.ns(sender_of(at));
            let level = self.load_case.level(at, second);
            let totals = &mut self.totals[at];
            let kept = if self.load_case.policy.metric == ScaleMetric::Rps { 0 } else { level };
            while totals.in_flight() > kept {
                totals.record_finish(at_ns);
                // Waiting requests end without a pod in this test.
                totals.abandoned += u64::from(at == BASE_PODS);
            }
            while totals.in_flight() < level {
                totals.record_start(at_ns);
            }
        }
    }

    /// Usage samples that a sender has to report in a second.
    fn usage_items(&self, sender: usize, second: usize) -> Vec<UsageSample> {
        let is_there = |at: usize| {
            let life = self.load_case.ready_spans.get(at);
            life.is_none_or(|it| (it.start..it.end + DRAIN_S).contains(&second))
        };
        let own = (0..=BASE_PODS).filter(|&at| sender_of(at) == sender && is_there(at));
        own.map(|at| UsageSample {
            key: UsageKey { revision: self.name.clone(), pod: (at < BASE_PODS).then(|| uid(at)) },
            read_at_ns: self.ns(sender),
            totals: self.totals[at],
            status: Vec::new(),
            latency: Vec::new(),
        })
        .collect()
    }

    /// Records whether a sender has reported by now, and whether its report shows the second of the growth.
    fn record_report(&mut self, sender: usize, is_told: bool, is_dated: bool) {
        let is_rps = self.load_case.policy.metric == ScaleMetric::Rps;
        let mut grew = false;
        for at in (0..=BASE_PODS).filter(|&at| sender_of(at) == sender) {
            let (new, known) = (self.totals[at], &mut self.last_reported[at]);
            grew |= new.in_flight() > known.in_flight();
            grew |= is_rps && new.started > known.started;
            if is_told {
                *known = new;
            }
        }
        self.hides_growth[sender] = !is_dated && (grew || (self.hides_growth[sender] && !is_told));
    }

    fn send_usage(&mut self, sender: usize, items: &[UsageSample]) {
        let stream = self.streams[sender].expect("a stream that stands");
        for seen in items {
            self.revisions.apply_usage(self.now, stream, seen);
            self.carry_out_decisions();
        }
        self.streams[sender] = Some(self.revisions.complete_batch(self.now, stream));
        self.carry_out_decisions();
    }

    fn open_stream(&mut self, sender: usize) {
        let role =
            if sender == ACTIVATOR { ComponentRole::Activator } else { ComponentRole::Agent };
        let name = ["a", "b", "line"][sender].to_owned();
        let who = ComponentReplica { role, node: name.clone(), name };
        self.streams[sender] = Some(self.revisions.open_stream(self.now, who));
    }

    fn report(&mut self, sender: usize, second: usize) {
        let items = self.usage_items(sender, second);
        let same = |(old, new): (&UsageSample, &UsageSample)| old.totals == new.totals;
        let told = &self.reported[sender];
        let is_old = told.len() == items.len() && told.iter().zip(&items).all(same);
        // An activator without changes sends only an empty batch.
        let news = if sender == ACTIVATOR && is_old { Vec::new() } else { items.clone() };
        let harm = self.active_fault(sender, second).filter(|it| {
            // A stream that is not open yet cannot delay reports.
            self.streams[sender].is_some() || matches!(it, ReportFault::StreamClosed)
        });
        let mut all = std::mem::take(&mut self.queued[sender]);
        match harm {
            Some(ReportFault::StreamClosed) => {
                let stream = self.streams[sender].take();
                stream.into_iter().for_each(|it| self.revisions.close_stream(self.now, it));
                self.carry_out_decisions();
                return self.record_report(sender, false, false);
            }
            Some(ReportFault::Reordered) if !all.is_empty() => all.splice(..0, news).for_each(drop),
            Some(ReportFault::Late | ReportFault::Reordered) => {
                all.extend(news);
                (self.queued[sender], self.reported[sender]) = (all, items);
                return self.record_report(sender, false, false);
            }
            Some(ReportFault::Lost) => {
                self.ended[sender].clear();
                return self.record_report(sender, false, false);
            }
            Some(ReportFault::Repeated) => {
                self.send_usage(sender, &news);
                self.send_usage(sender, &news);
                all = std::mem::take(&mut self.reported[sender]);
            }
            None if self.streams[sender].is_none() => {
                self.open_stream(sender);
                all.clone_from(&items);
            }
            None => all.extend(news),
        }
        // A first report, or one after a gap, does not show in which second load grew.
        let follows = self.reported_in[sender].replace(second) == second.checked_sub(1);
        let is_dated = follows && self.streams[sender].is_some_and(|stream| stream.synced);
        self.reported[sender] = items;
        self.send_usage(sender, &all);
        let stream = self.streams[sender].expect("a stream that stands");
        for at in std::mem::take(&mut self.ended[sender]) {
            let key = UsageKey { revision: self.name.clone(), pod: Some(uid(at)) };
            self.revisions.remove_usage(self.now, stream, &key);
        }
        self.record_report(sender, true, is_dated);
    }

    fn replace_autoscaler(&mut self) {
        self.revisions = ScaledRevisions::new(TICK);
        self.streams = [None; 3];
        self.queued = Default::default();
        self.last_reported = [RequestTotals::default(); BASE_PODS + 1];
        self.hides_growth = [true; 3];
        self.revisions.apply_routes(self.now, &self.table, &self.table.keys());
    }
}

fn uid(at: usize) -> String {
    format!("pod-{at}")
}

fn sender_of(at: usize) -> usize {
    if at < BASE_PODS { at % 2 } else { ACTIVATOR }
}

fn run_load_case(story: &LoadCase, harms: &FaultCase) -> LoadCaseOutcome {
    let mut world = SimReporters::new(story, harms);
    let (mut pods, mut kept, mut hidden) = (Vec::new(), Vec::new(), None);
    for second in 0..story.load.len() {
        for quarter in 0..4u32 {
            world.now = Duration::from_secs(10 + second as u64) + 250 * quarter * MS;
            match quarter {
                0 => {
                    // A new autoscaler cannot know of pods that ended a moment before and are not replaced yet.
                    if harms.replaced_at == Some(second) {
                        world.replace_autoscaler();
                        world.carry_out_decisions();
                    }
                    world.update_phases(second);
                }
                1 => world.set_levels(second),
                2 if harms.is_reversed => {
                    [2, 1, 0].iter().for_each(|&sender| world.report(sender, second))
                }
                2 => [0, 1, 2].iter().for_each(|&sender| world.report(sender, second)),
                _ => {}
            }
            world.carry_out_decisions();
            if world.hides_growth.contains(&true) {
                hidden = Some((hidden.map_or(pods.len(), |(first, _)| first), pods.len()));
            }
            pods.push(world.pods);
            kept.push(world.kept());
        }
    }
    LoadCaseOutcome { pods, kept, hidden_growth: hidden }
}

/// Requested pods after each quarter of a second, with all base pods ready throughout.
fn requested_pods(policy: &ScalePolicy, load: &[LoadLevels], harms: &FaultCase) -> Vec<u32> {
    let lives = [const { 0..NEVER_ENDS }; BASE_PODS];
    run_load_case(
        &LoadCase { policy: policy.clone(), load: load.to_vec(), ready_spans: lives },
        harms,
    )
    .pods
}

fn small_policy() -> ScalePolicy {
    // Any number of pods may be removed in one step.
    ScalePolicy { target_total: 10.0, max_scale_down_rate: 1000.0, ..short_window_policy() }
}

/// A constant level at each pod for `long` seconds.
fn constant_load(long: usize, level: u64) -> Vec<LoadLevels> {
    vec![[level, level, level, level, level, level, 0]; long]
}

fn single_fault(sender: usize, harm: ReportFault, from: usize, long: usize) -> FaultCase {
    FaultCase {
        faults: vec![TimedFault { sender, fault: harm, from, long }],
        ..FaultCase::default()
    }
}

/// Lowest number of requested pods from second `from` on.
fn min_requested(pods: &[u32], from: usize) -> u32 {
    *pods[4 * from..].iter().min().expect("some seconds")
}

#[test]
fn quiet_that_is_known_lowers() {
    let series = [constant_load(20, 10), constant_load(40, 0)].concat();
    let pods = requested_pods(&small_policy(), &series, &FaultCase::default());
    assert_eq!((pods[4 * 20], pods.last()), (9, Some(&0)), "60 at 7 a pod");
}

/// Reports stall while most requests end: the remaining requests keep their pods, and the service is never at zero.
#[test]
fn a_late_report_is_spread_over_the_time_it_covers() {
    for harm in [ReportFault::Late, ReportFault::Lost] {
        let series = [constant_load(20, 100), constant_load(70, 10)].concat();
        let late = |sender| TimedFault { sender, fault: harm, from: 20, long: 9 };
        let harms = FaultCase { faults: vec![late(0), late(1)], ..FaultCase::default() };
        let pods = requested_pods(&small_policy(), &series, &harms);
        assert_eq!(
            (min_requested(&pods, 20), pods.last()),
            (9, Some(&9)),
            "{harm:?}: 60 at 7 a pod"
        );
    }
}

/// Growth hidden by a stall counts once.
#[test]
fn a_stall_does_not_multiply_what_began_in_it() {
    let series = [constant_load(30, 0), constant_load(30, 10)].concat();
    let late = |sender| TimedFault { sender, fault: ReportFault::Lost, from: 30, long: 9 };
    let harms = FaultCase { faults: vec![late(0), late(1)], ..FaultCase::default() };
    let pods = requested_pods(&small_policy(), &series, &harms);
    assert_eq!(pods.iter().skip(4 * 30).max(), Some(&9), "60 at 7 a pod");
}

#[test]
fn pods_of_an_agent_that_is_gone_are_kept() {
    // All load is on the absent agent's node, where it ends or continues.
    let one = [0, 100, 0, 100, 0, 100, 0];
    for after in [constant_load(60, 0), vec![one; 60]] {
        let series = [vec![one; 30], after].concat();
        let pods = requested_pods(
            &small_policy(),
            &series,
            &single_fault(1, ReportFault::StreamClosed, 30, 60),
        );
        assert_eq!(min_requested(&pods, 30), 43, "300 at 7 a pod");
    }
    let all = |sender| TimedFault { sender, fault: ReportFault::StreamClosed, from: 40, long: 80 };
    let harms = FaultCase { faults: vec![all(0), all(1)], ..FaultCase::default() };
    // The last report was quiet, but the averages were still falling.
    let series = [constant_load(39, 10), constant_load(81, 0)].concat();
    let pods = requested_pods(&small_policy(), &series, &harms);
    assert_eq!((pods[4 * 40], min_requested(&pods, 40)), (8, 8), "nothing is known of the load");
}

/// Load rises on another node: the last reported load of the absent agent's node still counts.
#[test]
fn the_last_report_of_an_absent_agent_still_counts() {
    let (one, both) = ([20, 0, 20, 0, 20, 0, 0], [20, 20, 20, 20, 20, 20, 0]);
    let series = [vec![one; 30], vec![both; 30]].concat();
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(0, ReportFault::StreamClosed, 30, 30),
    );
    assert_eq!((pods[4 * 30 + 1], pods[4 * 30 + 2]), (9, 18), "60 and 120 at 7 a pod");
}

/// All load moves to pods that became ready while their agent's stream stalls, and that no report has named yet.
#[test]
fn a_stalled_agent_is_late_though_all_its_reported_pods_are_gone() {
    let (before, after) = ([20, 0, 20, 0, 20, 0, 0], [0, 0, 0, 30, 0, 30, 0]);
    let load = [vec![before; 48], vec![after; 30]].concat();
    let lives =
        [0..NEVER_ENDS, 0..47, 0..NEVER_ENDS, 48..NEVER_ENDS, 0..NEVER_ENDS, 48..NEVER_ENDS];
    let story = LoadCase { policy: small_policy(), load, ready_spans: lives };
    let pods = run_load_case(&story, &single_fault(1, ReportFault::Late, 46, 40)).pods;
    assert_eq!(min_requested(&pods, 20), 9, "60 at 7 a pod");
}

/// The wait queue was not reported for one second, but was on time at each tick.
#[test]
fn a_second_without_an_activator_report_is_not_quiet() {
    let series = [constant_load(36, 10), constant_load(40, 0)].concat();
    let lowered =
        |harms| requested_pods(&small_policy(), &series, &harms).iter().rposition(|&it| it == 9);
    let [whole, lost] =
        [FaultCase::default(), single_fault(ACTIVATOR, ReportFault::Lost, 36, 1)].map(lowered);
    // At the next tick, or at the first one after a stable window, a panic window and a tick.
    assert_eq!((whole, lost), (Some(4 * 38 - 1), Some(4 * 48 - 1)), "60 at 7 a pod");
}

#[test]
fn an_agent_that_never_came_is_no_quiet_node() {
    let series = vec![[0, 100, 0, 100, 0, 100, 0]; 60];
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(1, ReportFault::StreamClosed, 0, 60),
    );
    assert_eq!(min_requested(&pods, 0), 6, "what there is stays");
    let pods = requested_pods(
        &small_policy(),
        &constant_load(60, 0),
        &single_fault(1, ReportFault::StreamClosed, 0, 30),
    );
    assert_eq!(
        (min_requested(&pods[..4 * 30], 0), pods.last()),
        (6, Some(&0)),
        "quiet, once it came"
    );
}

#[test]
fn what_waits_at_an_activator_that_is_gone_keeps_its_pods() {
    let waits = [0, 0, 0, 0, 0, 0, 70];
    let series = [vec![waits; 30], constant_load(8, 0)].concat();
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(ACTIVATOR, ReportFault::StreamClosed, 30, 8),
    );
    assert_eq!(min_requested(&pods, 30), 10, "70 at 7 a pod");
}

/// An activator reports its waiting requests once, and then is silent for some seconds.
#[test]
fn an_activator_that_falls_silent_after_its_first_report_is_missed() {
    let one_waits = [0, 0, 0, 0, 0, 0, 1];
    let series =
        [constant_load(QUIET_START_S + 11, 0), vec![one_waits], constant_load(20, 0)].concat();
    let never = TimedFault {
        sender: ACTIVATOR,
        fault: ReportFault::StreamClosed,
        from: 0,
        long: QUIET_START_S - 1,
    };
    let silent =
        TimedFault { sender: ACTIVATOR, fault: ReportFault::Late, from: QUIET_START_S, long: 16 };
    let harms = FaultCase { faults: vec![never, silent], ..FaultCase::default() };
    let told = requested_pods(&small_policy(), &series, &FaultCase::default());
    let harmed = requested_pods(&small_policy(), &series, &harms);
    let ends = 4 * (QUIET_START_S + 16);
    assert_eq!((told[ends], harmed[ends]), (1, 6), "nothing is known of what waits");
}

/// Load falls at a tick and rises to a multiple before the next one: the burst is decided at once.
#[test]
fn a_burst_between_two_ticks_lowers_nothing() {
    let series =
        [constant_load(20, 10), constant_load(21, 3), constant_load(4, 60), constant_load(4, 3)]
            .concat();
    let pods = requested_pods(&small_policy(), &series, &FaultCase::default());
    let at = 4 * 41 + 2;
    assert_eq!((pods[at - 1], pods[at]), (3, 52), "as soon as it is told: 360 at 7 a pod");
    assert_eq!(scale_down_steps(&pods).find(|it| it % 8 != 0), None, "only at a tick");
}

/// Indices at which fewer pods were decided.
fn scale_down_steps(pods: &[u32]) -> impl Iterator<Item = usize> {
    (1..pods.len()).filter(|&at| pods[at] < pods[at - 1])
}

fn fault_cases() -> impl Strategy<Value = FaultCase> {
    let kinds = [
        ReportFault::Late,
        ReportFault::Lost,
        ReportFault::Repeated,
        ReportFault::Reordered,
        ReportFault::StreamClosed,
    ];
    let kind = proptest::sample::select(kinds.to_vec());
    let later = (0..=ACTIVATOR, kind, QUIET_START_S..QUIET_START_S + 48, 1usize..20)
        .prop_map(|(sender, harm, from, long)| TimedFault { sender, fault: harm, from, long });
    let never = (0..=ACTIVATOR, 1usize..60).prop_map(|(sender, long)| TimedFault {
        sender,
        fault: ReportFault::StreamClosed,
        from: 0,
        long,
    });
    let all = vec(prop_oneof![4 => later, 1 => never], 0..4);
    // The new autoscaler begins at a tick, so that both runs can be compared there.
    let renewed =
        proptest::option::of((QUIET_START_S / 2..QUIET_START_S / 2 + 24).prop_map(|half| 2 * half));
    (all, renewed, any::<[u32; 3]>(), any::<bool>()).prop_map(|(all, renewed, clocks, is_mixed)| {
        FaultCase {
            faults: all,
            replaced_at: renewed,
            clocks_ns: clocks.map(|it| u64::from(it) * 1_000_000),
            is_reversed: is_mixed,
        }
    })
}

fn load_series() -> impl Strategy<Value = Vec<LoadLevels>> {
    let level = prop_oneof![3 => Just(0u64), 3 => 1u64..20, 1 => 20u64..60];
    let levels =
        vec(level, BASE_PODS + 1).prop_map(|it| <LoadLevels>::try_from(it).expect("so many"));
    let segments = vec((levels, 1usize..12), 6..14);
    segments.prop_map(|all| {
        let each = |(levels, long)| vec![levels; long];
        let load = all.into_iter().flat_map(each);
        let calm = [[0; BASE_PODS + 1]; QUIET_START_S].into_iter();
        calm.chain(load).chain([[0; BASE_PODS + 1]; QUIET_END_S]).collect()
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
            scale_to_zero_retention_period: Duration::from_secs(retention),
            ..small_policy()
        }
    })
}

/// Lives of the base pods; most are always ready.
fn ready_spans() -> impl Strategy<Value = [Range<usize>; BASE_PODS]> {
    let life = prop_oneof![
        2 => Just(0..NEVER_ENDS),
        1 => (QUIET_START_S..QUIET_START_S + 60).prop_map(|from| from..NEVER_ENDS),
        1 => (QUIET_START_S..QUIET_START_S + 60).prop_map(|to| 0..to),
        1 => (QUIET_START_S..QUIET_START_S + 40, 1usize..40).prop_map(|(from, long)| from..from + long),
    ];
    vec(life, BASE_PODS).prop_map(|it| it.try_into().expect("so many"))
}

fn load_cases() -> impl Strategy<Value = LoadCase> {
    (policies(), load_series(), ready_spans()).prop_map(|(policy, load, lives)| LoadCase {
        policy,
        load,
        ready_spans: lives,
    })
}

/// Number of quarters of a second that a decision may depend on.
fn lookback_quarters(policy: &ScalePolicy) -> usize {
    let all = 2 * policy.stable_window
        + policy.scale_down_delay
        + policy.scale_to_zero_retention_period
        + 2 * TICK;
    4 * usize::try_from(all.as_secs()).unwrap()
}

/// Index at which the Revision next falls asleep. In reality it has no pods then. Here they stay: it wakes with enough
/// of them and asks for none.
fn next_zero(pods: &[u32], from: usize) -> usize {
    (from..pods.len()).find(|&at| pods[at] == 0).unwrap_or(pods.len())
}

impl LoadCase {
    /// Requests at a pod in a second, or waiting ones: only ready pods get any.
    fn level(&self, at: usize, second: usize) -> u64 {
        let is_ready = self.ready_spans.get(at).is_none_or(|it| it.contains(&second));
        if is_ready { self.load[second][at] } else { 0 }
    }

    /// Returns true if `pods` carry what is in flight at this moment. An autoscaler that asked for more than another
    /// before need not take a step up between two ticks that the other one takes.
    fn is_carried(&self, at: usize, pods: u32) -> bool {
        let level = |second: usize| (0..=BASE_PODS).map(|at| self.level(at, second)).sum::<u64>();
        let most = level(at / 4).max(level((at / 4).saturating_sub(1)));
        let is_between = self.policy.metric == ScaleMetric::Rps && !at.is_multiple_of(8);
        is_between || most as f64 <= f64::from(pods) * self.policy.target_total
    }
}

#[test]
fn a_new_autoscaler_asks_for_pods_in_place_of_those_that_have_gone() {
    // One pod is decided, and five more start until a moment after the takeover.
    let mut lives = [const { QUIET_START_S + 6..QUIET_START_S + 6 }; BASE_PODS];
    lives[0] = 0..NEVER_ENDS;
    let waiting = |level| [0, 0, 0, 0, 0, 0, level];
    let load =
        [vec![waiting(0); QUIET_START_S], vec![waiting(1); 10], vec![waiting(20); 20]].concat();
    let story = LoadCase { policy: small_policy(), load, ready_spans: lives };
    let pods = run_load_case(
        &story,
        &FaultCase { replaced_at: Some(QUIET_START_S + 4), ..FaultCase::default() },
    )
    .pods;
    assert_eq!(pods[4 * (QUIET_START_S + 9)], 1, "{pods:?}");
    // For its windows the new one knows too little to lower anything, but what is missing it asks for.
    assert!(min_requested(&pods, QUIET_START_S + 14) >= 3, "{pods:?}");
}

/// One waiting request keeps one pod, because a late report blocks the step down to zero. Then load comes that the pods
/// being removed could carry: it needs pods of its own at once, as after a sleep.
#[test]
fn pods_beyond_the_decided_number_carry_no_load() {
    let waiting = |level| [0, 0, 0, 0, 0, 0, level];
    let busy = [0, 20, 0, 0, 0, 0, 0];
    let load = [
        vec![waiting(0); QUIET_START_S],
        vec![waiting(1); 7],
        vec![waiting(0); 10],
        vec![busy; 11],
        vec![waiting(0); QUIET_END_S],
    ]
    .concat();
    let spans = [const { 0..NEVER_ENDS }; BASE_PODS];
    let load_case = LoadCase { policy: small_policy(), load, ready_spans: spans };
    let late = single_fault(0, ReportFault::Late, QUIET_START_S, 6);
    let told = run_load_case(&load_case, &FaultCase::default()).pods;
    let harmed = run_load_case(&load_case, &late).pods;
    let reported = 4 * (QUIET_START_S + 17) + 2;
    assert_eq!((told[reported - 1], harmed[reported - 1]), (0, 1), "zero, and held up");
    assert_eq!((told[reported], harmed[reported]), (3, 3), "20 at 7 a pod");
}

/// A new autoscaler has named no number, because its pods carry the load that began between two ticks. Then most of
/// those pods drain before the next tick.
#[test]
fn a_new_autoscaler_remembers_load_between_two_ticks() {
    let quiet = [0; BASE_PODS + 1];
    let [few, many] = [1, 20].map(|level| [level, level, 0, 0, 0, 0, 0]);
    let load = [
        vec![quiet; QUIET_START_S],
        vec![few; 6],
        vec![many; 1],
        vec![few; 1],
        vec![quiet; QUIET_END_S],
    ]
    .concat();
    let mut spans = [const { 0..QUIET_START_S + 7 }; BASE_PODS];
    spans[0] = 0..NEVER_ENDS;
    let load_case = LoadCase { policy: small_policy(), load, ready_spans: spans };
    let replaced = FaultCase { replaced_at: Some(QUIET_START_S), ..FaultCase::default() };
    let told = run_load_case(&load_case, &FaultCase::default()).pods;
    let kept = run_load_case(&load_case, &replaced).kept;
    let drained = 4 * (QUIET_START_S + 7);
    assert_eq!((told[drained], kept[drained - 1]), (6, 6), "40 at 7 a pod");
    assert_eq!(kept[drained], 6);
}

/// The only pod of a node drains while its agent is absent, and no tick falls between the two moments. Its last
/// requests are never reported, so nothing is lowered until a decision no longer depends on them.
#[test]
fn load_of_a_pod_that_leaves_unreported_stays_unknown() {
    let load = [
        constant_load(QUIET_START_S, 0),
        vec![[0, 0, 0, 0, 0, 20, 0]; 8],
        vec![[3, 0, 0, 0, 0, 0, 0]; QUIET_END_S],
    ]
    .concat();
    let mut spans = [const { 0..NEVER_ENDS }; BASE_PODS];
    (spans[1], spans[3], spans[5]) = (0..5, 0..5, 0..QUIET_START_S + 8);
    let policy = ScalePolicy { metric: ScaleMetric::Rps, ..small_policy() };
    let load_case = LoadCase { policy, load, ready_spans: spans };
    let closed_at = QUIET_START_S + 6;
    let absent = single_fault(1, ReportFault::StreamClosed, closed_at, 5);
    let pods = run_load_case(&load_case, &absent).pods;
    let lowered = scale_down_steps(&pods).find(|&at| at > 4 * closed_at);
    // At the first tick after a stable window, a panic window and a tick.
    assert_eq!(lowered, Some(4 * (closed_at + 2 + 10)), "{pods:?}");
}

/// Constant waiting requests, of which each report arrives a second late. The estimate of its time allows for a drift of
/// the clock, which must not take load from a second: 21 asks for 4 pods only while the average is not below it.
#[test]
fn the_drift_of_a_clock_lowers_no_load() {
    let [before, after] = [[0, 0, 8, 0, 10, 7, 0], [0, 0, 0, 0, 0, 11, 10]];
    let load = [
        constant_load(QUIET_START_S + 9, 0),
        vec![before; 5],
        vec![after; 6],
        constant_load(QUIET_END_S, 0),
    ]
    .concat();
    let policy = ScalePolicy {
        stable_window: Duration::from_secs(7),
        aggregation: WindowAggregation::WeightedExponential,
        ..small_policy()
    };
    let repeated = single_fault(ACTIVATOR, ReportFault::Repeated, QUIET_START_S + 4, 13);
    let [told, harmed] =
        [FaultCase::default(), repeated].map(|faults| requested_pods(&policy, &load, &faults));
    let at = 4 * (QUIET_START_S + 20);
    assert_eq!((told[at], harmed[at]), (4, 4), "the average is just above 21, at 7 a pod");
}

/// A new autoscaler keeps the pods for its windows, and meanwhile the load ends and returns. The last pod stays for a
/// stable window after that, as with the old autoscaler, which saw the Revision turn inactive in between.
#[test]
fn a_takeover_does_not_shorten_the_stable_window() {
    let load = [
        constant_load(QUIET_START_S + 1, 0),
        vec![[0, 6, 0, 4, 0, 17, 16]; 10],
        constant_load(9, 0),
        vec![[0, 0, 0, 0, 0, 0, 1]; 1],
        constant_load(QUIET_END_S, 0),
    ]
    .concat();
    let policy = ScalePolicy {
        metric: ScaleMetric::Rps,
        stable_window: Duration::from_secs(7),
        scale_to_zero_retention_period: Duration::from_secs(3),
        ..small_policy()
    };
    let replaced = FaultCase { replaced_at: Some(QUIET_START_S + 8), ..FaultCase::default() };
    let [told, kept] = [FaultCase::default(), replaced]
        .map(|faults| requested_pods(&policy, &load, &faults))
        .map(|pods| pods.iter().rposition(|&it| it > 0));
    assert_eq!((told, kept), (Some(4 * 74 - 1), Some(4 * 74 - 1)), "last moment with a pod");
}

proptest! {
    /// Faults in reports never lower pods below what the same load asks for when all of it is reported in time. Pods
    /// are lowered only at a tick.
    ///
    /// Nor are fewer pods requested at any moment, until load has grown and no report shows it in the same second. From
    /// then on the autoscaler cannot know. It recovers once the growth is reported, nothing hidden is remembered, and
    /// it asks for as many pods again.
    #[test]
    fn scale_falls_only_on_knowledge(story in load_cases(), harms in fault_cases()) {
        let told = run_load_case(&story, &FaultCase::default()).pods;
        let LoadCaseOutcome { pods: harmed, kept, hidden_growth } = run_load_case(&story, &harms);
        for at in scale_down_steps(&harmed) {
            prop_assert!(harmed[at] >= told[at], "{} of {} at {}", harmed[at], told[at], at);
            prop_assert_eq!(at % 8, 0, "lowered between two ticks");
        }
        prop_assert!(scale_down_steps(&told).all(|at| at % 8 == 0));
        // Load that moves between senders counts twice until both have reported it, so their order is the same here.
        let told = run_load_case(&story, &FaultCase { is_reversed: harms.is_reversed, ..FaultCase::default() }).pods;
        let is_less = |at: &usize| kept[*at] < told[*at] && !story.is_carried(*at, kept[*at]);
        let (first, last) = hidden_growth.unwrap_or((told.len(), told.len()));
        prop_assert_eq!((0..first).find(is_less), None, "all was known");
        let after = last + lookback_quarters(&story.policy);
        // Panic mode remembers its highest number for as long as it lasts.
        let back = (after..told.len()).find(|&at| kept[at] >= told[at]).unwrap_or(told.len());
        prop_assert_eq!((back..next_zero(&harmed, back)).find(is_less), None, "all is known again");
        // Without a pod, the first number is kept until the start has failed.
        let has_pods = story.ready_spans.iter().any(|it| it.end == NEVER_ENDS);
        prop_assert!(!has_pods || after >= told.len() || back < told.len(), "never back");
    }

    /// Zero is never decided while any reported request is in flight or waits.
    #[test]
    fn what_is_in_flight_is_never_decided_to_zero(series in load_series(), harms in fault_cases()) {
        let pods = requested_pods(&small_policy(), &series, &harms);
        for at in scale_down_steps(&pods).filter(|&at| pods[at] == 0) {
            // At a tick the last report is half a second old.
            prop_assert_eq!(series[at / 4 - 1], [0; BASE_PODS + 1], "at {}", at);
        }
    }
}
