//! Pods with standby orders: they count as pods that are kept without load, and requests wake them.

use common::wire::ScaleMetric;

use super::*;

/// Returns a service whose only pod has served one request and is on standby since then.
fn sleeping_service(policy: ScalePolicy) -> SimService {
    let mut sim = SimService::new(policy);
    sim.standby_pods = 1;
    sim.add_requests(1);
    sim.advance_time(400 * MS);
    sim.finish_requests();
    sim.advance_time(Duration::from_millis(29_600));
    assert!(!sim.revision().is_awake(), "{:?}", sim.decision_trace);
    assert_eq!(sim.revisions.next_due(), None);
    sim
}

impl SimService {
    /// Lets `count` requests begin at the first pod, and reports its totals at once.
    fn begin_at_first_pod(&mut self, count: usize) {
        self.change_first_pod(|totals, at_ns| {
            (0..count).for_each(|_| totals.record_start(at_ns));
        });
    }

    /// Changes the totals of the first pod at this moment, and reports them at once.
    fn change_first_pod(&mut self, change: impl FnOnce(&mut RequestTotals, u64)) {
        let at_ns = self.ns();
        let (uid, (totals, _)) = self.pods.iter_mut().next().expect("a pod");
        change(totals, at_ns);
        let (uid, totals) = (uid.clone(), *totals);
        self.report(Some(&uid), totals);
    }
}

/// Returns a RouteTable with one Revision of a short window, and these pods of it.
fn table_with(pods: impl IntoIterator<Item = RoutePod>) -> (NamespacedName, RouteTable) {
    let name = NamespacedName::new("default", "hello-00001");
    let mut table = RouteTable::default();
    let entry =
        RouteRevision { initial_scale_reached: true, ..revision(&name, short_window_policy()) };
    table.revisions.insert(name.clone(), entry);
    table.pods = pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
    (name, table)
}

/// Returns a ready pod with a standby order.
fn standby_pod(uid: &str, node: &str) -> RoutePod {
    let name = NamespacedName::new("default", "hello-00001");
    let standby = Some(fixtures::standby_order());
    RoutePod { node: node.into(), standby, ..pod(uid, &name, RoutingPhase::Ready) }
}

/// The decision of zero stays in force, because the controller keeps the pod by it. Nothing runs for the service.
#[test]
fn a_service_with_a_standby_pod_sleeps_and_keeps_its_decision() {
    let mut sim = sleeping_service(short_window_policy());
    assert_eq!(sim.decision_trace, GOLDEN_ONE[..5]);
    let counts = sim.revision().pods;
    assert_eq!((counts.ready, counts.standby, counts.non_draining()), (0, 1, 0));
    let evaluations = sim.revisions.evaluations;
    sim.advance_time(Duration::from_secs(30));
    assert_eq!(sim.revisions.evaluations, evaluations, "unchanged totals wake nothing");
    assert_eq!(sim.decision_trace.len(), 5);
}

#[test]
fn a_request_at_a_standby_pod_wakes_it_and_it_sleeps_again() {
    let mut sim = sleeping_service(short_window_policy());
    sim.decision_trace.clear();
    sim.begin_at_first_pod(1);
    sim.advance_time(400 * MS);
    sim.finish_requests();
    sim.advance_time(Duration::from_secs(20));
    assert_eq!(
        sim.decision_trace,
        [
            "30.0 0→1 Direct Activating: stable load",
            "30.0 1→1 Direct Active: stable load",
            // Load is not taken as known for a pod that has just been woken, so that it stays for a tick longer.
            "40.0 1→1 Activator Inactive: no load, turning inactive",
            "40.0 1→0 Activator Inactive: no load for the stable window",
        ]
    );
    assert!(!sim.revision().is_awake());
    assert_eq!((sim.created_pods, sim.revision().pods.standby), (1, 1), "the same pod");
}

/// A pod is thawed and answers within milliseconds, so that most first requests are over when they are reported.
#[test]
fn a_request_that_is_over_by_its_report_wakes_the_service_at_once() {
    for metric in [ScaleMetric::Concurrency, ScaleMetric::Rps] {
        let mut sim = sleeping_service(ScalePolicy { metric, ..short_window_policy() });
        sim.decision_trace.clear();
        sim.change_first_pod(|totals, at_ns| {
            totals.record_start(at_ns);
            totals.record_finish(at_ns);
        });
        let expected =
            ["30.0 0→1 Direct Activating: stable load", "30.0 1→1 Direct Active: stable load"];
        assert_eq!(sim.decision_trace, expected, "{metric:?}");
    }
}

#[test]
fn a_burst_at_a_standby_pod_requests_all_pods_at_once() {
    let mut sim = sleeping_service(short_window_policy());
    sim.begin_at_first_pod(300);
    assert_eq!(sim.requested_pods, 5, "300 at 70 a pod: {:?}", sim.decision_trace);
    assert_eq!((sim.pods.len(), sim.revision().pods.standby), (5, 0));
}

#[test]
fn a_change_of_a_sleeping_standby_pod_decides_nothing() {
    let mut sim = sleeping_service(short_window_policy());
    let (uid, decisions) = ("pod-0001".to_owned(), sim.decision_trace.len());
    sim.table.pods.get_mut(&uid).unwrap().kubelet_ready = true;
    sim.apply_routes([RouteKey::Pod(uid)]);
    assert_eq!((sim.decision_trace.len(), sim.revisions.next_due()), (decisions, None));
    assert!(!sim.revision().is_awake());
}

/// The controller ends it, as after a failure to freeze it.
#[test]
fn the_decision_is_withdrawn_once_the_last_standby_pod_has_gone() {
    let mut sim = sleeping_service(short_window_policy());
    sim.decision_trace.clear();
    let (uid, _) = sim.pods.pop_first().unwrap();
    sim.table.pods.remove(&uid);
    sim.apply_routes([RouteKey::Pod(uid)]);
    assert_eq!(sim.decision_trace, ["asleep"]);
    assert_eq!(sim.revisions.next_due(), None);
}

/// The agent connects after three seconds. Until then nothing is known, so that nothing is decided.
#[test]
fn a_restarted_autoscaler_takes_a_service_with_only_standby_pods_for_inactive() {
    let (_, table) = table_with([standby_pod("a", "rouse"), standby_pod("b", "rouse")]);
    let mut revisions = ScaledRevisions::new(TICK);
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let (mut decided, mut agent) = (Vec::new(), None);
    for second in 0..20 {
        let now = Duration::from_secs(second);
        if second >= 3 {
            let stream = *agent
                .get_or_insert_with(|| revisions.open_stream(now, replica(ClientComponent::Agent)));
            agent = Some(revisions.complete_batch(now, stream));
        }
        for update in revisions.evaluate_due(now) {
            match update {
                DecisionUpdate::Decided(it) => {
                    decided.push((second, it.requested_scale, it.activity));
                }
                DecisionUpdate::Withdrawn(name) => panic!("the decision on {name} is to stay"),
            }
        }
    }
    let inactive = RevisionActivity::Inactive;
    assert_eq!(decided, [(0, None, inactive), (4, Some(0), inactive)]);
    assert_eq!(revisions.next_due(), None);
}

/// The controller starts the pod of a new Revision at once, and the autoscaler may begin between start and freeze.
#[test]
fn a_pod_that_is_first_met_before_it_stands_by_is_no_start_that_times_out() {
    let starting = RoutePod { phase: RoutingPhase::Starting, ..standby_pod("a", "rouse") };
    let (_, mut table) = table_with([starting]);
    let mut revisions = ScaledRevisions::new(TICK);
    let mut agent = revisions.open_stream(Duration::ZERO, replica(ClientComponent::Agent));
    revisions.apply_routes(Duration::ZERO, &table, &table.keys());
    let mut decided = Vec::new();
    for second in 0..60 {
        let now = Duration::from_secs(second);
        agent = revisions.complete_batch(now, agent);
        if second == 3 {
            table.pods.get_mut("a").expect("the pod").phase = RoutingPhase::Ready;
            revisions.apply_routes(now, &table, &[RouteKey::Pod("a".into())].into());
        }
        for update in revisions.evaluate_due(now) {
            let DecisionUpdate::Decided(it) = update else { panic!("the decision is to stay") };
            decided.push((it.requested_scale, it.activity));
        }
    }
    assert_eq!(decided.last(), Some(&(Some(0), RevisionActivity::Inactive)), "{decided:?}");
    assert_eq!(revisions.next_due(), None, "nothing waits for a start");
}

#[test]
fn load_is_known_only_if_the_agents_of_standby_pods_report() {
    let running = RoutePod { standby: None, ..standby_pod("a", "rouse") };
    for (pods, expected) in [
        (vec![standby_pod("a", "rouse")], LoadKnowledge::Complete),
        (vec![standby_pod("a", "silent")], LoadKnowledge::Missing),
        (vec![running.clone(), standby_pod("b", "silent")], LoadKnowledge::Partial),
        (vec![running, standby_pod("b", "rouse")], LoadKnowledge::Complete),
    ] {
        let (name, table) = table_with(pods);
        let mut revisions = ScaledRevisions::new(TICK);
        let agent = revisions.open_stream(TICK, replica(ClientComponent::Agent));
        revisions.complete_batch(TICK, agent);
        revisions.apply_routes(TICK, &table, &table.keys());
        let knowledge = revisions.load_knowledge(TICK, &name, LoadKnowledge::Complete);
        assert_eq!(knowledge, expected, "{:?}", table.pods.keys());
    }
}
