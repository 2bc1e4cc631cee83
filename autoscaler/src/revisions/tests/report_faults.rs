//! Faults in reports never remove a pod: one series of load, reported in time and reported with faults.

use std::ops::Range;

use common::wire::{ScaleMetric, WindowAggregation};

use super::*;

mod named_cases;
mod properties;

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

/// One run without faults: a Revision's policy, its load, and when its pods are ready.
#[derive(Clone, Debug)]
struct LoadCase {
    policy: ScalePolicy,
    /// Load of each second, in order.
    load: Vec<LoadLevels>,
    /// Seconds in which each pod is ready. Before them it starts, after them it drains.
    ready_spans: [Range<usize>; BASE_PODS],
}

/// Fault in a sender's reports.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ReportFault {
    /// Reports arrive together when the fault is over.
    Late,
    /// Reports of that time are not sent; the next one includes their changes.
    Lost,
    /// As lost, but at the end an empty message goes ahead of the next report, as from a sender that was stopped.
    EmptyFirst,
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
    /// First second of the fault.
    from: usize,
    /// Number of its seconds.
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
    /// Requested scale after each quarter of a second.
    pods: Vec<u32>,
    /// Pods that decisions leave after each quarter: an autoscaler that has named no number yet keeps those that exist.
    kept: Vec<u32>,
    /// First and last quarter in which the real load was higher than the reports could show.
    hidden_growth: Option<(usize, usize)>,
}

/// Autoscaler and the three senders that report a load case to it with faults.
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
    fn new(load_case: &'a LoadCase, faults: &'a FaultCase) -> Self {
        let name = NamespacedName::new("default", "hello-00001");
        let mut table = RouteTable::default();
        let entry = RouteRevision {
            initial_scale_reached: true,
            ..revision(&name, load_case.policy.clone())
        };
        table.revisions.insert(name.clone(), entry);
        for (index, ready_span) in load_case.ready_spans.iter().enumerate() {
            let node = AGENTS[index % 2].into();
            let phase =
                if ready_span.start == 0 { RoutingPhase::Ready } else { RoutingPhase::Starting };
            table.pods.insert(uid(index), RoutePod { node, ..pod(&uid(index), &name, phase) });
        }
        let activator = fixtures::activator("activator", Vec::new());
        table.activators.insert(activator.name.clone(), activator);
        let mut reporters = Self {
            now: Duration::from_secs(10),
            revisions: ScaledRevisions::new(TICK),
            table,
            name,
            load_case,
            faults,
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
        reporters.revisions.apply_routes(reporters.now, &reporters.table, &reporters.table.keys());
        reporters
    }

    fn active_fault(&self, sender: usize, second: usize) -> Option<ReportFault> {
        let mut faults = self.faults.faults.iter().filter(|fault| fault.sender == sender);
        faults
            .find(|fault| (fault.from..fault.from + fault.long).contains(&second))
            .map(|fault| fault.fault)
    }

    fn ns(&self, sender: usize) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap() + self.faults.clocks_ns[sender]
    }

    /// Carries out the decisions: new pods start and never become ready, and only those are removed again.
    fn carry_out_decisions(&mut self) {
        for update in self.revisions.evaluate_due(self.now) {
            let DecisionUpdate::Decided(decision) = update else { continue };
            self.has_named |= decision.requested_scale.is_some();
            self.pods = decision.requested_scale.unwrap_or(self.pods);
        }
        let requested_pods = usize::try_from(self.pods).unwrap();
        let non_draining = self.non_draining_pods();
        let mut changed = BTreeSet::new();
        for _ in non_draining..requested_pods {
            self.created_pods += 1;
            let uid = format!("new-{:04}", self.created_pods);
            let entry = pod(&uid, &self.name, RoutingPhase::Starting);
            self.table.pods.insert(uid.clone(), RoutePod { node: "a".into(), ..entry });
            changed.insert(RouteKey::Pod(uid));
        }
        let new_pods: Vec<String> =
            self.table.pods.keys().filter(|uid| uid.starts_with("new")).cloned().collect();
        for uid in new_pods.into_iter().take(non_draining.saturating_sub(requested_pods)) {
            self.table.pods.remove(&uid);
            changed.insert(RouteKey::Pod(uid));
        }
        if !changed.is_empty() {
            self.revisions.apply_routes(self.now, &self.table, &changed);
            self.carry_out_decisions();
        }
    }

    fn non_draining_pods(&self) -> usize {
        self.table.pods.values().filter(|pod| pod.phase != RoutingPhase::Draining).count()
    }

    fn kept(&self) -> u32 {
        let non_draining =
            if self.has_named { 0 } else { u32::try_from(self.non_draining_pods()).unwrap() };
        self.pods.max(non_draining)
    }

    /// Moves pods to ready, draining and removed, as their ready spans say.
    fn update_phases(&mut self, second: usize) {
        let mut changed = BTreeSet::new();
        for (index, ready_span) in self.load_case.ready_spans.iter().enumerate() {
            if second == ready_span.end + DRAIN_S {
                self.table.pods.remove(&uid(index));
                self.ended[sender_of(index)].push(index);
            } else if let Some(pod) = self.table.pods.get_mut(&uid(index)) {
                let phase = match second {
                    _ if second < ready_span.start => RoutingPhase::Starting,
                    _ if second < ready_span.end => RoutingPhase::Ready,
                    _ => RoutingPhase::Draining,
                };
                if std::mem::replace(&mut pod.phase, phase) == phase {
                    continue;
                }
            } else {
                continue;
            }
            changed.insert(RouteKey::Pod(uid(index)));
        }
        if !changed.is_empty() {
            self.revisions.apply_routes(self.now, &self.table, &changed);
        }
    }

    /// Starts and ends requests until each pod has its level. With the RPS metric all of them are new requests.
    fn set_levels(&mut self, second: usize) {
        for index in 0..=BASE_PODS {
            let at_ns = self.ns(sender_of(index));
            let level = self.load_case.level(index, second);
            let totals = &mut self.totals[index];
            let kept = if self.load_case.policy.metric == ScaleMetric::Rps { 0 } else { level };
            while totals.in_flight() > kept {
                totals.record_finish(at_ns);
                // Waiting requests end without a pod in this test.
                totals.abandoned += u64::from(index == BASE_PODS);
            }
            while totals.in_flight() < level {
                totals.record_start(at_ns);
            }
        }
    }

    /// Usage samples that a sender has to report in a second.
    fn usage_items(&self, sender: usize, second: usize) -> Vec<UsageSample> {
        let is_reported = |index: usize| {
            let ready_span = self.load_case.ready_spans.get(index);
            ready_span.is_none_or(|ready_span| {
                (ready_span.start..ready_span.end + DRAIN_S).contains(&second)
            })
        };
        let indices =
            (0..=BASE_PODS).filter(|&index| sender_of(index) == sender && is_reported(index));
        indices
            .map(|index| UsageSample {
                key: UsageKey {
                    revision: self.name.clone(),
                    pod: (index < BASE_PODS).then(|| uid(index)),
                },
                read_at_ns: self.ns(sender),
                totals: self.totals[index],
                status: Vec::new(),
                latency: Vec::new(),
                client: None,
            })
            .collect()
    }

    /// Records whether a sender has reported by now, and whether its report shows the second of the growth.
    fn record_report(&mut self, sender: usize, is_reported: bool, is_dated: bool) {
        let is_rps = self.load_case.policy.metric == ScaleMetric::Rps;
        let mut has_grown = false;
        for index in (0..=BASE_PODS).filter(|&index| sender_of(index) == sender) {
            let (new, last_reported) = (self.totals[index], &mut self.last_reported[index]);
            has_grown |= new.in_flight() > last_reported.in_flight();
            has_grown |= is_rps && new.started > last_reported.started;
            if is_reported {
                *last_reported = new;
            }
        }
        self.hides_growth[sender] =
            !is_dated && (has_grown || (self.hides_growth[sender] && !is_reported));
    }

    /// Records that a sender has not reported.
    fn record_missing_report(&mut self, sender: usize) {
        let (is_reported, is_dated) = (false, false);
        self.record_report(sender, is_reported, is_dated);
    }

    fn send_usage(&mut self, sender: usize, items: &[UsageSample]) {
        let stream = self.streams[sender].expect("a stream that stands");
        for sample in items {
            self.revisions.apply_usage(self.now, stream, sample);
            self.carry_out_decisions();
        }
        self.streams[sender] = Some(self.revisions.complete_batch(self.now, stream));
        self.carry_out_decisions();
    }

    fn open_stream(&mut self, sender: usize) {
        let role =
            if sender == ACTIVATOR { ClientComponent::Activator } else { ClientComponent::Agent };
        let name = ["a", "b", "activator"][sender].to_owned();
        let replica = ComponentReplica { role, node: name.clone(), name };
        self.streams[sender] = Some(self.revisions.open_stream(self.now, replica));
    }

    fn report(&mut self, sender: usize, second: usize) {
        let items = self.usage_items(sender, second);
        let is_equal = |(old, new): (&UsageSample, &UsageSample)| old.totals == new.totals;
        let last_items = &self.reported[sender];
        let is_old = last_items.len() == items.len() && last_items.iter().zip(&items).all(is_equal);
        // An activator without changes sends only an empty batch.
        let new_items = if sender == ACTIVATOR && is_old { Vec::new() } else { items.clone() };
        let fault = self.active_fault(sender, second).filter(|fault| {
            // A stream that is not open yet cannot delay reports.
            self.streams[sender].is_some() || matches!(fault, ReportFault::StreamClosed)
        });
        let mut batch = std::mem::take(&mut self.queued[sender]);
        match fault {
            Some(ReportFault::StreamClosed) => {
                let stream = self.streams[sender].take();
                stream.into_iter().for_each(|stream| self.revisions.close_stream(self.now, stream));
                self.carry_out_decisions();
                return self.record_missing_report(sender);
            }
            Some(ReportFault::Reordered) if !batch.is_empty() => {
                batch.splice(..0, new_items).for_each(drop)
            }
            Some(ReportFault::Late | ReportFault::Reordered) => {
                batch.extend(new_items);
                (self.queued[sender], self.reported[sender]) = (batch, items);
                return self.record_missing_report(sender);
            }
            Some(fault @ (ReportFault::Lost | ReportFault::EmptyFirst)) => {
                // Late reports of before are on their way: the sender does not repeat them.
                self.queued[sender] = batch;
                self.ended[sender].clear();
                let is_at = |second| self.active_fault(sender, second) == Some(fault);
                let is_end = is_at(second.saturating_sub(1)) && !is_at(second + 1);
                if fault == ReportFault::EmptyFirst && is_end && self.streams[sender].is_some() {
                    self.send_usage(sender, &[]);
                }
                return self.record_missing_report(sender);
            }
            Some(ReportFault::Repeated) => {
                self.send_usage(sender, &new_items);
                self.send_usage(sender, &new_items);
                batch = std::mem::take(&mut self.reported[sender]);
            }
            None if self.streams[sender].is_none() => {
                self.open_stream(sender);
                batch.clone_from(&items);
            }
            None => batch.extend(new_items),
        }
        // A first report, or one after a gap, does not show in which second load grew.
        let is_consecutive = self.reported_in[sender].replace(second) == second.checked_sub(1);
        let is_dated = is_consecutive && self.streams[sender].is_some_and(|stream| stream.synced);
        self.reported[sender] = items;
        self.send_usage(sender, &batch);
        let stream = self.streams[sender].expect("a stream that stands");
        for index in std::mem::take(&mut self.ended[sender]) {
            let key = UsageKey { revision: self.name.clone(), pod: Some(uid(index)) };
            self.revisions.remove_usage(self.now, stream, &key);
        }
        let is_reported = true;
        self.record_report(sender, is_reported, is_dated);
    }

    fn replace_autoscaler(&mut self) {
        self.revisions = ScaledRevisions::new(TICK);
        self.streams = [None; 3];
        self.queued = Default::default();
        self.last_reported = [RequestTotals::default(); BASE_PODS + 1];
        self.hides_growth = [true; 3];
        self.has_named = false;
        self.revisions.apply_routes(self.now, &self.table, &self.table.keys());
    }
}

fn uid(index: usize) -> String {
    format!("pod-{index}")
}

fn sender_of(index: usize) -> usize {
    if index < BASE_PODS { index % 2 } else { ACTIVATOR }
}

fn run_load_case(load_case: &LoadCase, faults: &FaultCase) -> LoadCaseOutcome {
    let mut reporters = SimReporters::new(load_case, faults);
    let (mut pods, mut kept, mut hidden_growth) = (Vec::new(), Vec::new(), None);
    for second in 0..load_case.load.len() {
        for quarter in 0..4u32 {
            reporters.now = Duration::from_secs(10 + second as u64) + 250 * quarter * MS;
            match quarter {
                0 => {
                    // A new autoscaler cannot know of pods that ended a moment before and are not replaced yet.
                    if faults.replaced_at == Some(second) {
                        reporters.replace_autoscaler();
                        reporters.carry_out_decisions();
                    }
                    reporters.update_phases(second);
                }
                1 => reporters.set_levels(second),
                2 if faults.is_reversed => {
                    [2, 1, 0].iter().for_each(|&sender| reporters.report(sender, second))
                }
                2 => [0, 1, 2].iter().for_each(|&sender| reporters.report(sender, second)),
                _ => {}
            }
            reporters.carry_out_decisions();
            if reporters.hides_growth.contains(&true) {
                hidden_growth =
                    Some((hidden_growth.map_or(pods.len(), |(first, _)| first), pods.len()));
            }
            pods.push(reporters.pods);
            kept.push(reporters.kept());
        }
    }
    LoadCaseOutcome { pods, kept, hidden_growth }
}

/// Requested scale after each quarter of a second, with all base pods ready throughout.
fn requested_pods(policy: &ScalePolicy, load: &[LoadLevels], faults: &FaultCase) -> Vec<u32> {
    let ready_spans = [const { 0..NEVER_ENDS }; BASE_PODS];
    run_load_case(&LoadCase { policy: policy.clone(), load: load.to_vec(), ready_spans }, faults)
        .pods
}

fn small_policy() -> ScalePolicy {
    // Any number of pods may be removed in one step.
    ScalePolicy { target_total: 10.0, max_scale_down_rate: 1000.0, ..short_window_policy() }
}

/// A constant level at each pod for `seconds` seconds.
fn constant_load(seconds: usize, level: u64) -> Vec<LoadLevels> {
    vec![[level, level, level, level, level, level, 0]; seconds]
}

fn single_fault(sender: usize, fault: ReportFault, from: usize, long: usize) -> FaultCase {
    FaultCase { faults: vec![TimedFault { sender, fault, from, long }], ..FaultCase::default() }
}

/// Lowest requested scale from second `from` on.
fn min_requested(pods: &[u32], from: usize) -> u32 {
    *pods[4 * from..].iter().min().expect("some seconds")
}

/// Indices at which fewer pods were decided.
fn scale_down_steps(pods: &[u32]) -> impl Iterator<Item = usize> {
    (1..pods.len()).filter(|&at| pods[at] < pods[at - 1])
}

impl LoadCase {
    /// Requests at a pod in a second, or waiting ones: only ready pods get any.
    fn level(&self, index: usize, second: usize) -> u64 {
        let is_ready = self.ready_spans.get(index).is_none_or(|it| it.contains(&second));
        if is_ready { self.load[second][index] } else { 0 }
    }

    /// Returns true if `pods` carry what is in flight at this moment. An autoscaler that asked for more than another
    /// before need not take a step up between two ticks that the other one takes.
    fn is_carried(&self, quarter: usize, pods: u32) -> bool {
        let level =
            |second: usize| (0..=BASE_PODS).map(|index| self.level(index, second)).sum::<u64>();
        let max_level = level(quarter / 4).max(level((quarter / 4).saturating_sub(1)));
        let is_between = self.policy.metric == ScaleMetric::Rps && !quarter.is_multiple_of(8);
        is_between || max_level as f64 <= f64::from(pods) * self.policy.target_total
    }
}
