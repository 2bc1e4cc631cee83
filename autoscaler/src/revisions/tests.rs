use std::net::IpAddr;

use common::{
    fixtures,
    wire::{
        ClientComponent, ComponentReplica, PodEntry as RoutePod, RequestTotals, RevisionActivity,
        RevisionEntry as RouteRevision, RouteKey, RouteTable, ScalePolicy,
    },
};

use super::{senders::LOST_ACTIVATOR_RETENTION, *};
use crate::usage::tests::policy;

const MS: Duration = Duration::from_millis(1);
const TICK: Duration = Duration::from_secs(2);
/// Time at which a simulation begins; traces count from there.
const SIM_START: Duration = Duration::from_secs(10);
/// Time that a simulated pod takes to become ready.
const POD_START_TIME: Duration = Duration::from_millis(300);

/// One service on one node, in simulated time: an activator that holds requests, a kernel that counts them,
/// and a controller that does what is decided.
struct SimService {
    now: Duration,
    revisions: ScaledRevisions,
    table: RouteTable,
    name: NamespacedName,
    agent: UsageStream,
    activator: UsageStream,
    wait_queue: RequestTotals,
    /// Totals of each pod by UID, and the time at which it becomes ready.
    pods: BTreeMap<String, (RequestTotals, Duration)>,
    created_pods: u32,
    /// Pods that the controller keeps on standby without load.
    standby_pods: usize,
    /// Requested pods of the last decision that names a number.
    requested_pods: usize,
    /// Decisions so far, one line each.
    decision_trace: Vec<String>,
    /// Client that the wait queue names as its first one.
    client: Option<IpAddr>,
    /// Client of the request that woke the service, as each decision so far names it.
    wake_clients: Vec<Option<IpAddr>>,
}

fn replica(role: ClientComponent) -> ComponentReplica {
    ComponentReplica { role, name: format!("{role:?}"), node: "rouse".into() }
}

fn revision(name: &NamespacedName, policy: ScalePolicy) -> RouteRevision {
    RouteRevision {
        policy: Some(policy.into()),
        initial_scale_reached: false,
        ..fixtures::revision(name, "hello")
    }
}

fn pod(uid: &str, revision: &NamespacedName, phase: RoutingPhase) -> RoutePod {
    let address = ([10, 244, 1, 2], 8080).into();
    RoutePod { node: "rouse".into(), ..fixtures::pod_at(uid, revision, phase, address) }
}

impl SimService {
    /// A sleeping service (initial scale 0) with an agent and an activator that have nothing to report.
    fn new(policy: ScalePolicy) -> Self {
        let name = NamespacedName::new("default", "hello-00001");
        let now = SIM_START;
        let mut revisions = ScaledRevisions::new(TICK);
        let [agent, activator] = [ClientComponent::Agent, ClientComponent::Activator].map(|role| {
            let stream = revisions.open_stream(now, replica(role));
            revisions.complete_batch(now, stream)
        });
        let mut sim = Self {
            now,
            revisions,
            table: RouteTable::default(),
            name: name.clone(),
            agent,
            activator,
            wait_queue: RequestTotals::default(),
            pods: BTreeMap::new(),
            created_pods: 0,
            standby_pods: 0,
            requested_pods: 0,
            decision_trace: Vec::new(),
            client: None,
            wake_clients: Vec::new(),
        };
        sim.table.revisions.insert(name.clone(), revision(&name, policy));
        sim.apply_routes([RouteKey::Revision(name)]);
        sim
    }

    fn ns(&self) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap()
    }

    fn apply_routes<const N: usize>(&mut self, changed: [RouteKey; N]) {
        self.revisions.apply_routes(self.now, &self.table, &changed.into());
        self.carry_out_decisions();
    }

    /// Runs due evaluations and carries out the decisions.
    fn carry_out_decisions(&mut self) {
        for update in self.revisions.evaluate_due(self.now) {
            let DecisionUpdate::Decided(decision) = update else {
                self.decision_trace.push("asleep".to_owned());
                continue;
            };
            let pods =
                decision.requested_scale.map_or_else(|| "-".to_owned(), |pods| pods.to_string());
            let (seconds, ready) = ((self.now - SIM_START).as_secs_f64(), decision.ready_pods);
            let (path, activity) = (decision.connection_path, decision.activity);
            self.decision_trace.push(format!(
                "{seconds:.1} {ready}→{pods} {path:?} {activity:?}: {}",
                decision.reason
            ));
            self.wake_clients.push(decision.wake_origin.as_ref().and_then(|it| it.client));
            let requested_pods = decision.requested_scale.unwrap_or_default() as usize;
            if decision.requested_scale.is_some() {
                self.requested_pods = requested_pods;
            }
            let kept_pods = requested_pods.max(self.standby_pods);
            while self.pods.len() < requested_pods {
                self.created_pods += 1;
                let uid = format!("pod-{:04}", self.created_pods);
                self.table.pods.insert(uid.clone(), pod(&uid, &self.name, RoutingPhase::Starting));
                self.pods
                    .insert(uid.clone(), (RequestTotals::default(), self.now + POD_START_TIME));
                self.apply_routes([RouteKey::Pod(uid)]);
            }
            while decision.requested_scale.is_some() && self.pods.len() > kept_pods {
                let (uid, _) = self.pods.pop_last().unwrap();
                self.table.pods.remove(&uid);
                self.apply_routes([RouteKey::Pod(uid.clone())]);
                let key = UsageKey { revision: self.name.clone(), pod: Some(uid) };
                self.revisions.remove_usage(self.now, self.agent, &key);
            }
            self.update_orders();
            if decision.activity == RevisionActivity::Active {
                self.table.revisions.get_mut(&self.name).unwrap().initial_scale_reached = true;
                self.apply_routes([RouteKey::Revision(self.name.clone())]);
            }
        }
    }

    /// Gives a standby order to each ready pod beyond the requested ones, and withdraws all others.
    fn update_orders(&mut self) {
        if self.standby_pods == 0 {
            return;
        }
        for (index, uid) in self.pods.keys().cloned().enumerate().collect::<Vec<_>>() {
            // A change may cause a decision, which removes pods.
            let Some(entry) = self.table.pods.get_mut(&uid) else { continue };
            let has_order = index >= self.requested_pods && entry.phase == RoutingPhase::Ready;
            let standby = has_order.then(fixtures::standby_order);
            if entry.standby != standby {
                entry.standby = standby;
                self.apply_routes([RouteKey::Pod(uid)]);
            }
        }
    }

    fn report(&mut self, pod: Option<&str>, totals: RequestTotals) {
        let pod = pod.map(str::to_owned);
        let key = UsageKey { revision: self.name.clone(), pod };
        let stream = if key.pod.is_some() { self.agent } else { self.activator };
        let (status, latency) = (vec![], vec![]);
        let client = self.client.filter(|_| key.pod.is_none());
        let sample = UsageSample { key, read_at_ns: self.ns(), totals, status, latency, client };
        self.revisions.apply_usage(self.now, stream, &sample);
        self.carry_out_decisions();
    }

    /// Lets `count` requests arrive: at ready pods in turn, or in the wait queue if there is none.
    fn add_requests(&mut self, count: usize) {
        let (now, at_ns) = (self.now, self.ns());
        let mut ready: Vec<_> =
            self.pods.values_mut().filter(|(_, ready_at)| *ready_at <= now).collect();
        if !ready.is_empty() {
            let pods = ready.len();
            (0..count).for_each(|index| ready[index % pods].0.record_start(at_ns));
            return;
        }
        (0..count).for_each(|_| self.wait_queue.record_start(at_ns));
        self.report(None, self.wait_queue);
    }

    /// Ends all requests that run in pods.
    fn finish_requests(&mut self) {
        let at_ns = self.ns();
        for (totals, _) in self.pods.values_mut() {
            (0..totals.in_flight()).for_each(|_| totals.record_finish(at_ns));
        }
    }

    /// Lets time pass: pods become ready and take waiting requests, reports arrive every second, timers fire.
    fn advance_time(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.now < end {
            self.now += 100 * MS;
            let ready: Vec<String> = self
                .pods
                .iter()
                .filter(|(_, (_, ready_at))| *ready_at == self.now)
                .map(|(uid, _)| uid.clone())
                .collect();
            for uid in ready {
                self.report(Some(&uid), RequestTotals::default());
                self.table.pods.get_mut(&uid).unwrap().phase = RoutingPhase::Ready;
                self.apply_routes([RouteKey::Pod(uid)]);
                let waiting = usize::try_from(self.wait_queue.in_flight()).unwrap();
                let at_ns = self.ns();
                (0..waiting).for_each(|_| self.wait_queue.record_finish(at_ns));
                self.report(None, self.wait_queue);
                self.add_requests(waiting);
            }
            if self.now.subsec_millis() == 0 {
                for stream in [self.agent, self.activator] {
                    self.revisions.complete_batch(self.now, stream);
                }
                for uid in self.pods.keys().cloned().collect::<Vec<_>>() {
                    // A report may have caused a decision that removed the pod.
                    if let Some(&(totals, _)) = self.pods.get(&uid) {
                        self.report(Some(&uid), totals);
                    }
                }
            }
            if self.revisions.next_due().is_some_and(|due| due <= self.now) {
                self.carry_out_decisions();
            }
        }
    }

    fn revision(&self) -> &ScaledRevision {
        &self.revisions.revisions[&self.name]
    }
}

fn short_window_policy() -> ScalePolicy {
    ScalePolicy { initial_scale: 0, stable_window: Duration::from_secs(6), ..policy() }
}

/// A service wakes, serves one request and falls asleep again: a golden trace with a 6 s window.
#[test]
fn one_request_wakes_a_service_and_it_sleeps_again() {
    let mut sim = SimService::new(short_window_policy());
    assert!(!sim.revision().is_awake());
    assert_eq!(sim.revisions.next_due(), None, "nothing runs for a sleeping service");
    sim.add_requests(1);
    sim.advance_time(400 * MS);
    sim.finish_requests();
    sim.advance_time(Duration::from_secs(20));
    assert_eq!(sim.decision_trace, GOLDEN_ONE);
    assert!(!sim.revision().is_awake());
    assert_eq!(sim.revisions.next_due(), None);
}

const GOLDEN_ONE: [&str; 6] = [
    "0.0 0→0 Activator Inactive: no load for the stable window",
    "0.0 0→1 Direct Activating: stable load",
    "0.3 1→1 Direct Active: stable load",
    "8.0 1→1 Activator Inactive: no load, turning inactive",
    "8.0 1→0 Activator Inactive: no load for the stable window",
    "asleep",
];

/// The zone of the first pod depends on it, and pods for more load may run anywhere.
#[test]
fn decisions_name_the_request_that_woke_the_service_until_a_pod_is_ready() {
    let client = |last: u8| Some(IpAddr::from([10, 244, 1, last]));
    let mut sim = SimService::new(short_window_policy());
    sim.client = client(1);
    sim.add_requests(1);
    // A second zone asks while the pod starts, for more pods.
    sim.client = client(2);
    sim.add_requests(200);
    assert_eq!(sim.wake_clients, [None, client(1), client(1)], "{:?}", sim.decision_trace);
    sim.advance_time(Duration::from_secs(1));
    sim.finish_requests();
    sim.advance_time(Duration::from_secs(30));
    assert!(!sim.revision().is_awake(), "{:?}", sim.decision_trace);
    sim.client = client(3);
    sim.add_requests(1);
    sim.wake_clients.dedup();
    assert_eq!(sim.wake_clients, [None, client(1), None, client(3)], "{:?}", sim.decision_trace);
}

/// A whole cycle: wake, burst, sustained load, decay to zero, and a second wake.
#[test]
fn a_burst_scales_out_and_decays_to_zero() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(300);
    sim.advance_time(Duration::from_secs(1));
    sim.finish_requests();
    for _ in 0..10 {
        sim.add_requests(200);
        sim.advance_time(Duration::from_secs(1));
        sim.finish_requests();
    }
    sim.advance_time(Duration::from_secs(30));
    sim.add_requests(1);
    assert_eq!(sim.decision_trace, GOLDEN_BURST);
}

const GOLDEN_BURST: [&str; 10] = [
    "0.0 0→0 Activator Inactive: no load for the stable window",
    // 300 requests wait at a target of 70: five pods at once, not one and then four more.
    "0.0 0→5 Direct Activating: panic",
    "0.3 1→5 Direct Active: panic",
    // 200 at once need three; panic mode has kept the five for a stable window.
    "8.0 5→3 Direct Active: stable load",
    "14.0 3→2 Direct Active: stable load",
    "16.0 2→1 Direct Active: stable load",
    "18.0 1→1 Activator Inactive: no load, turning inactive",
    "18.0 1→0 Activator Inactive: no load for the stable window",
    "asleep",
    "41.0 0→1 Direct Activating: stable load",
];

/// Default windows, target 70: one decision covers all waiting requests, instead of half of them first and the rest
/// later.
#[test]
fn a_first_burst_is_one_decision() {
    for (waiting, pods) in [(140, 2), (300, 5)] {
        let mut sim = SimService::new(ScalePolicy { initial_scale: 0, ..policy() });
        sim.add_requests(waiting);
        assert_eq!(
            (sim.pods.len(), sim.decision_trace.len()),
            (pods, 2),
            "{:?}",
            sim.decision_trace
        );
        sim.advance_time(POD_START_TIME - 100 * MS);
        assert_eq!(
            (sim.pods.len(), sim.decision_trace.len()),
            (pods, 2),
            "{:?}",
            sim.decision_trace
        );
    }
}

/// Nothing is recorded while there is no pod, as in Knative: silence does not dilute the load of requests that left.
#[test]
fn a_burst_that_leaves_while_pods_start_keeps_them_for_a_window() {
    let patient = ScalePolicy { panic_threshold_percent: 1000.0, ..policy() };
    let mut sim = SimService::new(ScalePolicy { initial_scale: 0, ..patient });
    sim.add_requests(140);
    sim.pods.values_mut().for_each(|(_, ready_at)| *ready_at = Duration::MAX);
    sim.advance_time(Duration::from_secs(2));
    (0..140).for_each(|_| sim.wait_queue.record_finish(sim.ns()));
    sim.report(None, sim.wait_queue);
    for second in 2..60 {
        assert_eq!(sim.pods.len(), 2, "in second {second}: {:?}", sim.decision_trace);
        sim.advance_time(Duration::from_secs(1));
    }
}

/// In-flight requests grow from one to fifty between two ticks: the report requests all pods at once, within one step
/// up.
#[test]
fn in_flight_growth_is_decided_when_it_is_reported() {
    for (max_scale_up_rate, pods) in [(1000.0, 8), (3.0, 3)] {
        let mut sim = SimService::new(ScalePolicy {
            max_scale_up_rate,
            target_total: 10.0,
            ..short_window_policy()
        });
        sim.add_requests(1);
        sim.advance_time(Duration::from_secs(3));
        assert_eq!(sim.pods.len(), 1);
        sim.add_requests(49);
        let (uid, (totals, _)) = sim.pods.first_key_value().map(|(k, v)| (k.clone(), *v)).unwrap();
        sim.report(Some(&uid), totals);
        assert_eq!(sim.pods.len(), pods, "50 at 7 a pod");
    }
}

/// The same growth in several reports, as agents send them: each decision asks for more, and the last one for all.
/// Requests that end before the tick lower nothing.
#[test]
fn growth_reported_in_steps_only_raises() {
    let mut sim = SimService::new(ScalePolicy { target_total: 10.0, ..short_window_policy() });
    sim.add_requests(1);
    sim.advance_time(Duration::from_secs(3));
    let uid = sim.pods.first_key_value().map(|(uid, _)| uid.clone()).unwrap();
    let mut pods = Vec::new();
    for more in [4, 5, 15, 25] {
        sim.add_requests(more);
        let totals = sim.pods[&uid].0;
        sim.report(Some(&uid), totals);
        pods.push(sim.pods.len());
    }
    assert_eq!(pods, [1, 2, 4, 8], "5, 10, 25 and 50 at 7 a pod");
    sim.finish_requests();
    assert_eq!(sim.pods.len(), 8, "lowered at a tick only");
}

/// More load than the requested pods carry is evaluated when it is reported, whatever the tick.
#[test]
fn a_burst_while_pods_start_is_decided_at_once() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(1);
    assert_eq!(sim.pods.len(), 1);
    sim.advance_time(100 * MS);
    sim.add_requests(200);
    assert_eq!(sim.pods.len(), 3, "201 waiting, 70 a pod");
    let evaluations = sim.revisions.evaluations;
    sim.add_requests(5);
    assert_eq!(
        sim.revisions.evaluations, evaluations,
        "three pods carry 206, so this can wait for the tick"
    );
}

#[test]
fn pods_that_change_between_ticks_do_not_speed_up_scale_down() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(1000);
    sim.advance_time(Duration::from_secs(1));
    sim.finish_requests();
    sim.advance_time(Duration::from_secs(30));
    let is_scale_down =
        |line: &&String| line.contains("stable load") || line.contains("max-scale-down-rate");
    let scale_downs: Vec<&String> = sim.decision_trace.iter().filter(is_scale_down).collect();
    let requested_scales: Vec<&str> =
        scale_downs.iter().filter_map(|line| line.split(['→', ' ']).nth(2)).collect();
    assert_eq!(requested_scales, ["7", "3", "1"], "each step halves, one a tick: {scale_downs:#?}");
}

/// Load is unknown while the agent is gone, so nothing changes; after its return scaling continues.
#[test]
fn without_its_agent_a_service_keeps_its_pods() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(100);
    sim.advance_time(Duration::from_secs(1));
    sim.revisions.close_stream(sim.now, sim.agent);
    let previous_trace = sim.decision_trace.clone();
    sim.now += Duration::from_secs(60);
    sim.carry_out_decisions();
    assert_eq!(sim.decision_trace, previous_trace);
    sim.agent = sim.revisions.open_stream(sim.now, replica(ClientComponent::Agent));
    sim.finish_requests();
    sim.advance_time(Duration::from_secs(1));
    sim.agent = sim.revisions.complete_batch(sim.now, sim.agent);
    sim.advance_time(Duration::from_secs(20));
    assert_eq!(sim.pods.len(), 0);
}

#[test]
fn requests_at_a_lost_activator_count_as_waiting_for_its_retention() {
    let mut sim = SimService::new(ScalePolicy { max_scale: 1, ..short_window_policy() });
    sim.add_requests(50);
    assert_eq!(sim.revision().load.waiting(), 50);
    sim.revisions.close_stream(sim.now, sim.activator);
    assert_eq!(sim.revision().load.waiting(), 50, "not known, so not zero");
    let mut totals = sim.wait_queue;
    totals.record_start(sim.ns());
    sim.report(None, totals);
    assert_eq!(sim.revision().load.waiting(), 50, "an ended stream says nothing any more");
    sim.advance_time(LOST_ACTIVATOR_RETENTION + TICK);
    assert_eq!(
        (sim.revision().load.waiting(), sim.revisions.online_senders(ClientComponent::Activator)),
        (0, 0)
    );
    assert_eq!(sim.revisions.senders.len(), 1, "it is forgotten");
}

/// A new autoscaler finds running pods before any report: it keeps them until it knows a stable window.
#[test]
fn a_restart_loses_no_pod() {
    let name = NamespacedName::new("default", "hello-00001");
    let mut table = RouteTable::default();
    let entry =
        RouteRevision { initial_scale_reached: true, ..revision(&name, short_window_policy()) };
    table.revisions.insert(name.clone(), entry);
    for index in 0..4 {
        let uid = format!("pod-{index}");
        table.pods.insert(uid.clone(), pod(&uid, &name, RoutingPhase::Ready));
    }
    let mut revisions = ScaledRevisions::new(TICK);
    let mut requested = Vec::new();
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let mut agent = None;
    for second in 0..20 {
        let now = Duration::from_secs(second);
        if second >= 3 {
            let stream = *agent
                .get_or_insert_with(|| revisions.open_stream(now, replica(ClientComponent::Agent)));
            agent = Some(revisions.complete_batch(now, stream));
        }
        for update in revisions.evaluate_due(now) {
            let DecisionUpdate::Decided(decision) = update else { continue };
            requested.push((second, decision.requested_scale));
        }
    }
    // Unknown at first; four by panic mode once the agent reports. Load was last unknown at 2 s; after a stable window,
    // a panic window and a tick it may shrink.
    assert_eq!(requested, [(0, None), (4, Some(4)), (12, Some(2))]);
}

/// Controllers prefer an autoscaler whose windows are full. So it must not claim that before its decisions know the load.
#[test]
fn windows_are_not_full_before_the_scale_may_fall() {
    let (name, mut table) = (NamespacedName::new("default", "hello-00001"), RouteTable::default());
    let policy = ScalePolicy {
        scale_down_delay: Duration::from_secs(4),
        scale_to_zero_retention_period: Duration::from_secs(30),
        ..short_window_policy()
    };
    let entry = RouteRevision { initial_scale_reached: true, ..revision(&name, policy) };
    table.revisions.insert(name.clone(), entry);
    for uid in ["pod-0", "pod-1", "pod-2", "pod-3"] {
        table.pods.insert(uid.into(), pod(uid, &name, RoutingPhase::Ready));
    }
    let mut revisions = ScaledRevisions::new(TICK);
    let mut agent = revisions.open_stream(Duration::ZERO, replica(ClientComponent::Agent));
    agent = revisions.complete_batch(Duration::ZERO, agent);
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let first_fall = (0..99).map(Duration::from_secs).find(|&now| {
        agent = revisions.complete_batch(now, agent);
        revisions.evaluate_due(now).iter().any(|update| match update {
            DecisionUpdate::Decided(it) => it.requested_scale.is_some_and(|pods| pods < 4),
            DecisionUpdate::Withdrawn(_) => false,
        })
    });
    // The scale falls at ticks only.
    let earliest_fall = first_fall.map(|at| at.saturating_sub(TICK));
    assert!(earliest_fall.is_some_and(|at| revisions.longest_lookback() >= at), "{first_fall:?}");
}

/// Two services with four pods each, on nodes of their own. One node's agent reports only every third second, so the
/// load of the service there is not known.
#[test]
fn a_node_that_stalls_holds_up_no_service_of_another_node() {
    let mut table = RouteTable::default();
    for node in ["calm", "stalls"] {
        let name = NamespacedName::new("default", node);
        let entry =
            RouteRevision { initial_scale_reached: true, ..revision(&name, short_window_policy()) };
        table.revisions.insert(name.clone(), entry);
        for index in 0..4 {
            let uid = format!("{node}-{index}");
            let pod_entry = RoutePod { node: node.into(), ..pod(&uid, &name, RoutingPhase::Ready) };
            table.pods.insert(uid, pod_entry);
        }
    }
    let mut revisions = ScaledRevisions::new(TICK);
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let mut agents = ["calm", "stalls"].map(|node| {
        let replica =
            ComponentReplica { role: ClientComponent::Agent, name: node.into(), node: node.into() };
        revisions.open_stream(Duration::ZERO, replica)
    });
    let mut min_scales = BTreeMap::new();
    for second in 0..40 {
        let now = Duration::from_secs(second);
        agents[0] = revisions.complete_batch(now, agents[0]);
        if second % 3 == 0 {
            agents[1] = revisions.complete_batch(now, agents[1]);
        }
        for update in revisions.evaluate_due(now) {
            let DecisionUpdate::Decided(decision) = update else { continue };
            let min_scale = min_scales.entry(decision.revision.name).or_insert(4);
            *min_scale = decision.requested_scale.unwrap_or(*min_scale).min(*min_scale);
        }
    }
    // Pods stay ready in this test, so that each step down asks for half of them.
    assert_eq!(min_scales, BTreeMap::from([("calm".into(), 2), ("stalls".into(), 4)]));
}

/// One of three pods ends before the first decision: the number before it ended is kept.
#[test]
fn a_restart_keeps_the_place_of_a_pod_that_ends() {
    let name = NamespacedName::new("default", "hello-00001");
    let mut table = RouteTable::default();
    let entry =
        RouteRevision { initial_scale_reached: true, ..revision(&name, short_window_policy()) };
    table.revisions.insert(name.clone(), entry);
    for (uid, phase) in
        [("a", RoutingPhase::Ready), ("b", RoutingPhase::Ready), ("c", RoutingPhase::Starting)]
    {
        table.pods.insert(uid.into(), pod(uid, &name, phase));
    }
    let mut revisions = ScaledRevisions::new(TICK);
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let agent = revisions.open_stream(Duration::ZERO, replica(ClientComponent::Agent));
    for second in 0..8 {
        let now = Duration::from_secs(second);
        revisions.complete_batch(now, agent);
        if second == 5 {
            table.pods.remove("c");
            revisions.apply_routes(now, &table, &[RouteKey::Pod("c".into())].into());
        }
        for update in revisions.evaluate_due(now) {
            let DecisionUpdate::Decided(decision) = update else { continue };
            assert_eq!(decision.requested_scale, None, "in second {second}: {}", decision.reason);
        }
    }
}

/// An activator may send it requests before the table lists it as ready.
#[test]
fn load_is_partly_known_while_the_agent_of_a_pod_that_awaits_its_report_is_silent() {
    let name = NamespacedName::new("default", "hello-00001");
    let mut table = RouteTable::default();
    table.revisions.insert(name.clone(), revision(&name, short_window_policy()));
    let mut revisions = ScaledRevisions::new(TICK);
    let agent = revisions.open_stream(Duration::ZERO, replica(ClientComponent::Agent));
    let mut now = Duration::ZERO;
    while now < Duration::from_secs(5) {
        now += 500 * MS;
        revisions.complete_batch(now, agent);
    }
    let mut knowledge = |node: &str, awaits_report| {
        let starting = pod("a", &name, RoutingPhase::Starting);
        let entry = RoutePod { node: node.into(), awaits_report, ..starting };
        table.pods.insert("a".into(), entry);
        revisions.apply_routes(now, &table, &table.keys());
        revisions.load_knowledge(now, &name, LoadKnowledge::Complete)
    };
    assert_eq!(knowledge("elsewhere", false), LoadKnowledge::Complete, "it gets no requests");
    assert_eq!(knowledge("elsewhere", true), LoadKnowledge::Partial);
    assert_eq!(knowledge("rouse", true), LoadKnowledge::Complete);
}

#[test]
fn a_revision_that_leaves_the_table_is_forgotten() {
    let mut sim = SimService::new(short_window_policy());
    sim.table.revisions.clear();
    let updates = sim.revisions.apply_routes(
        sim.now,
        &sim.table,
        &[RouteKey::Revision(sim.name.clone())].into(),
    );
    assert_eq!(updates, [DecisionUpdate::Withdrawn(sim.name.clone())]);
    assert_eq!(sim.revisions.next_due(), None);
}

#[test]
fn a_pod_may_be_routed_before_its_revision() {
    let mut sim = SimService::new(short_window_policy());
    let other = NamespacedName::new("default", "later-00001");
    sim.table.pods.insert("early".into(), pod("early", &other, RoutingPhase::Ready));
    sim.revisions.apply_routes(sim.now, &sim.table, &[RouteKey::Pod("early".into())].into());
    sim.table.revisions.insert(other.clone(), revision(&other, short_window_policy()));
    sim.revisions.apply_routes(sim.now, &sim.table, &[RouteKey::Revision(other.clone())].into());
    assert_eq!(sim.revisions.revisions[&other].pods.ready, 1);
}

#[test]
fn a_sleeping_revision_needs_no_decision_and_no_evaluation() {
    let mut revisions = ScaledRevisions::new(TICK);
    let mut table = RouteTable::default();
    for index in 0..50 {
        let name = NamespacedName::new("default", format!("s-{index}-00001"));
        let entry =
            RouteRevision { initial_scale_reached: true, ..revision(&name, short_window_policy()) };
        table.revisions.insert(name, entry);
    }
    revisions.apply_routes(TICK, &table, &table.keys());
    assert_eq!(
        (revisions.evaluate_due(TICK), revisions.next_due(), revisions.evaluations),
        (vec![], None, 50)
    );
    assert!(revisions.revisions().all(|(_, revision)| !revision.is_awake()));
}

#[test]
fn a_new_table_removes_what_it_does_not_name() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(1);
    let keys = sim.revisions.stored_keys();
    assert_eq!(
        keys,
        [RouteKey::Revision(sim.name.clone()), RouteKey::Pod("pod-0001".into())].into()
    );
    let updates = sim.revisions.apply_routes(sim.now, &RouteTable::default(), &keys);
    assert_eq!(
        (updates, sim.revisions.stored_keys()),
        (vec![DecisionUpdate::Withdrawn(sim.name.clone())], BTreeSet::new())
    );
}

/// A simulation whose Revision the controller has not sent yet, and that Revision.
fn sim_without_revision() -> (SimService, RouteRevision) {
    let mut sim = SimService::new(short_window_policy());
    let entry = sim.table.revisions.remove(&sim.name).unwrap();
    sim.apply_routes([RouteKey::Revision(sim.name.clone())]);
    assert!(sim.revisions.revisions.is_empty());
    sim.decision_trace.clear();
    (sim, RouteRevision { initial_scale_reached: true, ..entry })
}

impl SimService {
    fn add_revision(&mut self, revision: RouteRevision) {
        self.table.revisions.insert(self.name.clone(), revision);
        self.apply_routes([RouteKey::Revision(self.name.clone())]);
    }
}

#[test]
fn a_request_reported_before_its_revision_wakes_it() {
    let (mut sim, revision) = sim_without_revision();
    sim.add_requests(1);
    sim.advance_time(Duration::from_secs(5));
    assert_eq!((sim.decision_trace.len(), sim.revisions.next_due()), (0, None));
    sim.add_revision(revision);
    assert_eq!(sim.decision_trace, ["5.0 0→1 Direct Activating: stable load"]);
    assert_eq!(sim.revision().load.waiting(), 1);
    assert!(sim.revisions.unlisted_loads.is_empty());
}

#[test]
fn a_request_over_before_its_revision_is_routed_wakes_nothing() {
    let finish: [fn(&mut SimService); 3] = [
        |sim| {
            sim.wait_queue.record_finish(sim.ns());
            sim.report(None, sim.wait_queue);
        },
        |sim| {
            sim.revisions.close_stream(sim.now, sim.activator);
            sim.now += LOST_ACTIVATOR_RETENTION;
            sim.revisions.forget_lost_activators(sim.now);
            assert!(sim.revisions.unlisted_loads.is_empty(), "kept no longer than its sender");
        },
        |sim| {
            let key = UsageKey { revision: sim.name.clone(), pod: None };
            sim.revisions.remove_usage(sim.now, sim.activator, &key);
            assert!(sim.revisions.unlisted_loads.is_empty(), "kept no longer than its subject");
        },
    ];
    for finish in finish {
        let (mut sim, revision) = sim_without_revision();
        sim.add_requests(1);
        finish(&mut sim);
        sim.add_revision(revision);
        assert_eq!(
            (sim.decision_trace.len(), sim.pods.len(), sim.revisions.next_due()),
            (0, 0, None)
        );
        assert!(sim.revisions.unlisted_loads.is_empty());
    }
}

#[test]
fn only_the_latest_report_on_an_unknown_revision_is_kept() {
    let (mut sim, revision) = sim_without_revision();
    (0..100).for_each(|_| sim.add_requests(1));
    assert_eq!(sim.revisions.unlisted_loads.len(), 1);
    sim.activator = sim.revisions.open_stream(sim.now, replica(ClientComponent::Activator));
    sim.add_requests(1);
    sim.activator = sim.revisions.complete_batch(sim.now, sim.activator);
    sim.add_revision(revision);
    assert_eq!(sim.revision().load.waiting(), 101);
}

#[test]
fn a_request_outlasts_its_revisions_absence_from_the_table() {
    let mut sim = SimService::new(short_window_policy());
    sim.add_requests(1);
    sim.decision_trace.clear();
    let revision = sim.table.revisions.remove(&sim.name).unwrap();
    sim.table.pods.clear();
    let keys = [RouteKey::Revision(sim.name.clone()), RouteKey::Pod("pod-0001".into())];
    sim.apply_routes(keys);
    sim.pods.clear();
    sim.add_revision(RouteRevision { initial_scale_reached: true, ..revision });
    assert_eq!(sim.decision_trace, ["0.0 0→1 Direct Activating: stable load"]);
}

#[test]
fn usage_of_a_draining_pod_is_no_load_even_if_reported_before_its_route() {
    let mut sim = SimService::new(short_window_policy());
    let mut totals = RequestTotals::default();
    totals.record_start(sim.ns());
    sim.report(Some("leaving"), totals);
    assert_eq!(sim.revision().load.in_flight(), 1);
    sim.table.pods.insert("leaving".into(), pod("leaving", &sim.name, RoutingPhase::Draining));
    sim.apply_routes([RouteKey::Pod("leaving".into())]);
    assert_eq!(sim.revision().load.in_flight(), 0);
}

/// An agent forgets a pod when the table does. The last totals come after both, and then their removal.
#[test]
fn last_totals_of_a_pod_that_has_left_the_table_are_no_load() {
    let mut sim = SimService::new(short_window_policy());
    let (key, mut totals) = (RouteKey::Pod("leaving".into()), RequestTotals::default());
    sim.table.pods.insert("leaving".into(), pod("leaving", &sim.name, RoutingPhase::Draining));
    sim.apply_routes([key.clone()]);
    sim.report(Some("leaving"), totals);
    sim.table.pods.remove("leaving");
    sim.apply_routes([key]);
    sim.now += 100 * MS;
    totals.record_start(sim.ns());
    totals.record_finish(sim.ns());
    sim.report(Some("leaving"), totals);
    assert!(sim.revision().load.is_quiet(sim.now), "it asks for no other pod");
    sim.now += 100 * MS;
    totals.record_start(sim.ns());
    sim.report(Some("leaving"), totals);
    assert_eq!(sim.revision().load.in_flight(), 1, "it is not gone yet");
}

mod report_faults;
mod standby;
