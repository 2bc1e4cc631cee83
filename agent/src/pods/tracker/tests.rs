use std::{net::IpAddr, num::NonZeroU16};

use common::{
    fixtures,
    wire::{NamespacedName, ProbeHandler, ReadinessProbe},
};
use datapath::abi;

use super::{
    stopping::{
        DRAINED_AFTER, DRAINING_ROUTE_TIMEOUT, OPEN_CONNECTION_DRAIN_TIME, RESTART_ASSUMED_AFTER,
        RESTART_TIMEOUT,
    },
    *,
};
use crate::pods::types::NamespaceListener;

mod registration;
mod several_ports;

const SECOND: Duration = Duration::from_secs(1);

fn pod(uid: &str, handler: ProbeHandler) -> wire::PodEntry {
    let revision = NamespacedName::new("default", "hello-00001");
    wire::PodEntry {
        name: format!("hello-{uid}"),
        node: "n1".into(),
        probe: ReadinessProbe { handler, failure_threshold: 3, ..ReadinessProbe::listener_probe() },
        ..fixtures::pod(uid, &revision, RoutingPhase::Starting)
    }
}

fn facts() -> NamespaceFacts {
    NamespaceFacts {
        cookie: 7,
        addresses: vec![ip("10.244.0.5"), ip("fd00::5")],
        incompatibility: None,
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn listening_state(listeners: u32) -> PodKernelState {
    PodKernelState {
        listeners,
        listener_opened_ns: u64::from(listeners) * 900,
        ..PodKernelState::default()
    }
}

/// Builds listeners from their addresses; a `!` behind one means IPv6-only.
fn sockets(listeners: &[&str]) -> NamespaceSockets {
    let listener = |text: &&str| NamespaceListener {
        at: at(text.trim_end_matches('!')),
        v6_only: text.ends_with('!'),
    };
    let listeners = listeners.iter().map(listener).collect();
    NamespaceSockets { listeners, has_redirection: false }
}

/// Returns a pod that was named, found and registered; its namespace holds no listener yet.
fn registered(pod: wire::PodEntry, now: Instant) -> PodTracker {
    let uid = pod.uid.clone();
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    for event in [
        PodTrackerEvent::RouteUpdated(Box::new(pod)),
        PodTrackerEvent::NamespaceFound(uid.clone(), facts()),
        PodTrackerEvent::Registered(uid.clone()),
        PodTrackerEvent::Inspected(uid, NamespaceSockets::default(), 1),
    ] {
        pods.step(now, event);
    }
    pods
}

/// Time that a draining pod waits for upgraded connections in these tests.
const UPGRADED_DRAIN_TIME: Duration = Duration::from_secs(60);

fn read_kernel_state(
    pods: &mut PodTracker,
    now: Instant,
    read: PodKernelState,
) -> Vec<PodTrackerAction> {
    pods.step(now, PodTrackerEvent::KernelStateRead("a".into(), read))
}

fn reports(actions: Vec<PodTrackerAction>) -> Vec<PodObservation> {
    let report = |action| match action {
        PodTrackerAction::Report(observed) => Some(observed),
        _ => None,
    };
    actions.into_iter().filter_map(report).collect()
}

fn idle() -> PodObservation {
    PodObservation {
        uid: "a".into(),
        address: Some(at("10.244.0.5:8080")),
        other_family_address: None,
        listening: false,
        ready: false,
        drained: false,
        in_flight: 0,
        listening_since_ns: 0,
        not_ready_reason: "nothing listens on port 8080 yet".into(),
        counts_all_ports: true,
        standby: None,
        awaits_stop: false,
    }
}

fn ready() -> PodObservation {
    PodObservation {
        listening: true,
        ready: true,
        listening_since_ns: 900,
        not_ready_reason: String::new(),
        ..idle()
    }
}

#[test]
fn a_pod_is_searched_registered_inspected_and_reported() {
    let now = Instant::now();
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    let unknown = PodObservation { address: None, not_ready_reason: String::new(), ..idle() };
    assert_eq!(
        pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Listen)))),
        [PodTrackerAction::FindNamespace("a".into()), PodTrackerAction::Report(unknown.clone())]
    );
    let addressed = PodObservation { address: Some(at("10.244.0.5:8080")), ..unknown };
    assert_eq!(
        pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts())),
        [PodTrackerAction::Register("a".into(), facts()), PodTrackerAction::Report(addressed)]
    );
    assert_eq!(
        pods.step(now, PodTrackerEvent::Registered("a".into())),
        [PodTrackerAction::Inspect("a".into())]
    );
    assert_eq!(
        pods.step(now, PodTrackerEvent::Inspected("a".into(), NamespaceSockets::default(), 5)),
        [PodTrackerAction::Report(idle())]
    );
    assert_eq!(
        read_kernel_state(&mut pods, now, listening_state(1)),
        [PodTrackerAction::Report(ready())]
    );
}

#[test]
fn a_pod_leaves_when_its_last_listener_closes() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    assert_eq!(reports(read_kernel_state(&mut pods, now, listening_state(1))), [ready()]);
    assert_eq!(
        reports(read_kernel_state(&mut pods, now, listening_state(2))),
        [],
        "prefork or reload"
    );
    assert_eq!(reports(read_kernel_state(&mut pods, now, listening_state(1))), []);
    let gone = reports(read_kernel_state(&mut pods, now, listening_state(0)));
    assert_eq!(gone, [PodObservation { not_ready_reason: String::new(), ..idle() }]);
}

#[test]
fn a_listener_the_kernel_did_not_see_counts_until_an_inspection_misses_it() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let found = PodTrackerEvent::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77);
    assert_eq!(
        reports(pods.step(now, found)),
        [PodObservation { listening_since_ns: 77, ..ready() }]
    );
    let wake = pods.next_wake().expect("it is inspected again");
    assert_eq!(wake, now + SECOND);
    assert_eq!(pods.step(wake, PodTrackerEvent::Tick), [PodTrackerAction::Inspect("a".into())]);
    let lost = PodTrackerEvent::Inspected("a".into(), NamespaceSockets::default(), 99);
    assert_eq!(reports(pods.step(wake, lost)), [idle()]);
}

#[test]
fn a_pod_that_listens_stays_ready_over_a_change_of_its_thresholds() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    let mut changed = pod("a", ProbeHandler::Listen);
    changed.probe.failure_threshold = 1;
    let update = |pod: &wire::PodEntry| PodTrackerEvent::RouteUpdated(Box::new(pod.clone()));
    assert_eq!(reports(pods.step(now, update(&changed))), [], "no report says that it is unready");
    // Nothing is known of another port.
    changed.port = 9000.try_into().expect("not zero");
    let moved = reports(pods.step(now, update(&changed)));
    assert!(moved.iter().any(|it| !it.ready), "{moved:?}");
}

#[test]
fn a_listener_the_kernel_did_not_see_stays_over_readings_that_miss_it() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    pods.step(now, PodTrackerEvent::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77));
    assert_eq!(read_kernel_state(&mut pods, now, PodKernelState::default()), []);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([8080]));
}

#[test]
fn a_closed_listener_does_not_survive_by_an_older_inspection() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    pods.step(now, PodTrackerEvent::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77));
    let actions = read_kernel_state(&mut pods, now, listening_state(0));
    assert!(actions.contains(&PodTrackerAction::Inspect("a".into())), "{actions:?}");
    assert!(!reports(actions)[0].ready);
}

#[test]
fn a_pod_the_kernel_sees_listening_is_not_inspected() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    assert_eq!(pods.next_wake(), None);
}

#[test]
fn the_probe_is_tried_at_the_pods_own_address() {
    let now = Instant::now();
    let mut shape = pod("a", ProbeHandler::Tcp);
    shape.probe.port = NonZeroU16::new(9090);
    let mut pods = registered(shape.clone(), now);
    let attempt = PodProbeAttempt {
        uid: "a".into(),
        seq: 1,
        timeout: SECOND,
        at: at("10.244.0.5:9090"),
        probe: shape.probe,
    };
    let waiting = PodObservation { ready: false, ..ready() };
    assert_eq!(
        read_kernel_state(&mut pods, now, listening_state(1)),
        [PodTrackerAction::StartProbe(attempt), PodTrackerAction::Report(waiting.clone())]
    );
    let failed = PodTrackerEvent::ProbeEnded("a".into(), 1, Err("connection refused".into()));
    let not_ready_reason = "readiness probe failed: connection refused".into();
    assert_eq!(reports(pods.step(now, failed)), [PodObservation { not_ready_reason, ..waiting }]);
    let wake = pods.next_wake().expect("another try");
    assert!(matches!(
        pods.step(wake, PodTrackerEvent::Tick)[..],
        [PodTrackerAction::StartProbe(PodProbeAttempt { seq: 2, .. })]
    ));
    assert_eq!(
        reports(pods.step(wake, PodTrackerEvent::ProbeEnded("a".into(), 2, Ok(())))),
        [ready()]
    );
}

#[test]
fn the_result_of_a_former_probe_says_nothing_of_the_next_one() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Tcp), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    let mut other_port = pod("a", ProbeHandler::Tcp);
    other_port.probe.port = NonZeroU16::new(9090);
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(other_port)));
    pods.step(now, PodTrackerEvent::Registered("a".into()));
    read_kernel_state(&mut pods, now, listening_state(1));
    let passed = |seq| PodTrackerEvent::ProbeEnded("a".into(), seq, Ok(()));
    assert_eq!(reports(pods.step(now, passed(1))), [], "the first attempt asked the former port");
    assert_eq!(reports(pods.step(now, passed(2))), [ready()]);
}

#[test]
fn a_probe_waits_for_the_address() {
    let now = Instant::now();
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Tcp))));
    let actions = read_kernel_state(&mut pods, now, listening_state(1));
    assert!(
        !actions.iter().any(|action| matches!(action, PodTrackerAction::StartProbe(_))),
        "{actions:?}"
    );
    let actions = pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts()));
    assert!(
        actions.iter().any(|action| matches!(action, PodTrackerAction::StartProbe(_))),
        "{actions:?}"
    );
}

#[test]
fn changes_in_flight_alone_are_reported_once_a_second() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    let busy = |in_flight| PodKernelState { in_flight, ..listening_state(1) };
    assert_eq!(reports(read_kernel_state(&mut pods, now, busy(3))), []);
    let later = now + SECOND;
    assert_eq!(
        reports(read_kernel_state(&mut pods, later, busy(4))),
        [PodObservation { in_flight: 4, ..ready() }]
    );
    assert_eq!(reports(read_kernel_state(&mut pods, later, busy(5))), []);
}

#[test]
fn a_draining_pod_is_drained_after_a_second_without_work() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let draining =
        wire::PodEntry { phase: RoutingPhase::Draining, ..pod("a", ProbeHandler::Listen) };
    let reading = |in_flight, unused_connections, idle_ms| PodKernelState {
        in_flight,
        unused_connections,
        idle: Duration::from_millis(idle_ms),
        ..listening_state(1)
    };
    read_kernel_state(&mut pods, now, reading(0, 0, 90_000));
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(draining)));
    assert_eq!(pods.draining_uids(), ["a"]);

    let mut drained_at = Vec::new();
    let readings = [
        (100, reading(0, 0, 90_000)), // quiet for long, but draining since just now
        (1100, reading(1, 0, 90_000)), // busy
        (1200, reading(0, 1, 50)),    // a connection without a request
        (1300, reading(0, 0, 0)),     // it has gone
        (2200, reading(0, 0, 900)),
        (2300, reading(0, 0, 1000)),
    ];
    for (ms, reading) in readings {
        let at = now + Duration::from_millis(ms);
        pods.step(at, PodTrackerEvent::Tick);
        let drained = reports(read_kernel_state(&mut pods, at, reading))
            .iter()
            .any(|observed| observed.drained);
        drained_at.extend(drained.then_some(ms));
    }
    assert_eq!(drained_at, [2300]);
}

#[test]
fn a_draining_pod_waits_for_upgraded_connections_a_set_time_and_for_requests_longer() {
    let now = Instant::now();
    let mut pods = registered(
        wire::PodEntry { phase: RoutingPhase::Draining, ..pod("a", ProbeHandler::Listen) },
        now,
    );
    let count = PodTrackerAction::CountUpgraded("a".into());
    let reading = |in_flight, idle| PodKernelState {
        in_flight,
        connections: in_flight,
        idle,
        ..listening_state(1)
    };
    let early =
        read_kernel_state(&mut pods, now + UPGRADED_DRAIN_TIME - SECOND, reading(2, 30 * SECOND));
    assert!(!early.contains(&count), "{early:?}");

    let due = now + UPGRADED_DRAIN_TIME;
    assert!(read_kernel_state(&mut pods, due, reading(2, 60 * SECOND)).contains(&count));
    let again = read_kernel_state(&mut pods, due + SECOND / 4, reading(2, 60 * SECOND));
    assert!(!again.contains(&count), "one count a second");

    let drained = |actions| reports(actions).iter().any(|observed| observed.drained);
    pods.step(due, PodTrackerEvent::UpgradedCounted("a".into(), 1, due));
    let later = due + 2 * SECOND;
    assert!(
        !drained(read_kernel_state(&mut pods, later, reading(2, 60 * SECOND))),
        "one is a request"
    );
    pods.step(later, PodTrackerEvent::UpgradedCounted("a".into(), 2, later));
    let later = later + SECOND;
    assert!(
        !drained(read_kernel_state(&mut pods, later, reading(3, 60 * SECOND))),
        "one more has come"
    );
    let ended = reading(2, SECOND / 2);
    assert!(
        !drained(read_kernel_state(&mut pods, later, ended)),
        "one has ended: perhaps an upgraded connection"
    );
    assert!(
        drained(read_kernel_state(&mut pods, later, reading(2, 60 * SECOND))),
        "two, and both are known"
    );
}

#[test]
fn a_drained_pod_with_idle_connections_stays_until_they_were_closed() {
    let now = Instant::now();
    let mut pods = registered(
        wire::PodEntry { phase: RoutingPhase::Draining, ..pod("a", ProbeHandler::Listen) },
        now,
    );
    let kept = |connections, idle| PodKernelState { connections, idle, ..listening_state(1) };
    let later = now + 9 * SECOND;
    let drained = |observed: &PodObservation| observed.drained;
    assert!(!reports(read_kernel_state(&mut pods, later, kept(1, SECOND))).iter().any(drained));
    assert!(reports(read_kernel_state(&mut pods, later, kept(0, SECOND))).iter().any(drained));
    assert!(!reports(read_kernel_state(&mut pods, later, kept(1, SECOND))).iter().any(drained));
    assert!(reports(read_kernel_state(&mut pods, later, kept(1, 2 * SECOND))).iter().any(drained));
}

#[test]
fn a_pod_that_is_not_draining_is_never_called_drained() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    for second in 0..5 {
        let read = PodKernelState { idle: second * SECOND, ..listening_state(1) };
        let observed = reports(read_kernel_state(&mut pods, now + second * SECOND, read));
        assert!(observed.iter().all(|observed| !observed.drained));
    }
}

#[test]
fn a_new_namespace_resets_the_pod() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(&mut pods, now, listening_state(1));
    assert_eq!(
        pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts())),
        [],
        "nothing new"
    );
    let other =
        NamespaceFacts { cookie: 8, addresses: vec![ip("10.244.0.6")], incompatibility: None };
    let actions = pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), other.clone()));
    assert_eq!(actions[0], PodTrackerAction::Register("a".into(), other));
    assert!(!reports(actions)[0].ready);
}

#[test]
fn a_pod_that_is_named_no_more_is_forgotten() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let gone = pods.step(now, PodTrackerEvent::RouteRemoved("a".into()));
    assert_eq!(
        gone,
        [PodTrackerAction::Unregister("a".into()), PodTrackerAction::ReportGone("a".into())]
    );
    assert_eq!(pods.step(now, PodTrackerEvent::RouteRemoved("a".into())), []);
    assert_eq!(read_kernel_state(&mut pods, now, listening_state(1)), [], "a late reading");
}

#[test]
fn not_ready_reasons_name_what_to_do() {
    let cases = [
        (
            &["127.0.0.1:8080"][..],
            "port 8080 is open on a loopback address only: listen on 0.0.0.0",
        ),
        (
            &["0.0.0.0:3000"],
            "nothing listens on port 8080, but on 0.0.0.0:3000: listen on the port in $PORT",
        ),
        (&[], "nothing listens on port 8080 yet"),
    ];
    for (listeners, reason) in cases {
        let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
        let now = Instant::now();
        pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Listen))));
        let observed =
            pods.step(now, PodTrackerEvent::Inspected("a".into(), sockets(listeners), 1));
        let observed =
            reports(observed).pop().map(|observed| observed.not_ready_reason).unwrap_or_default();
        assert_eq!(observed, reason);
    }
}

#[test]
fn a_listener_on_an_ipv6_address_is_reached_over_ipv6() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let both = PodTrackerEvent::Inspected("a".into(), sockets(&["[::]:8080"]), 1);
    assert_eq!(reports(pods.step(now, both))[0].address, Some(at("10.244.0.5:8080")));
    let v6 = PodTrackerEvent::Inspected("a".into(), sockets(&["[fd00::5]:8080"]), 1);
    assert_eq!(reports(pods.step(now, v6))[0].address, Some(at("[fd00::5]:8080")));
}

#[test]
fn it_has_caught_up_once_every_ready_pod_is_seen_to_be_ready() {
    let now = Instant::now();
    let mut pods = registered(pod("b", ProbeHandler::Listen), now);
    assert!(pods.has_caught_up(), "a starting pod is not waited for");
    let address = Some(at("10.244.0.5:8080"));
    let known_ready =
        wire::PodEntry { phase: RoutingPhase::Ready, address, ..pod("a", ProbeHandler::Listen) };
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(known_ready)));
    assert!(!pods.has_caught_up());
    pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts()));
    read_kernel_state(&mut pods, now, listening_state(1));
    assert!(pods.has_caught_up());
}

#[test]
fn a_pod_that_does_not_listen_for_a_minute_is_inspected_less_often() {
    let now = Instant::now();
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let mut inspections = 0;
    let mut at = now;
    while at < now + 120 * SECOND {
        at = pods.next_wake().expect("it is inspected");
        let actions = pods.step(at, PodTrackerEvent::Tick);
        inspections +=
            actions.iter().filter(|action| matches!(action, PodTrackerAction::Inspect(_))).count();
    }
    assert!((60..70).contains(&inspections), "{inspections}");
}

/// Returns a registered pod that listens, with a request in flight.
fn busy(now: Instant) -> PodTracker {
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    read_kernel_state(
        &mut pods,
        now,
        PodKernelState { in_flight: 1, connections: 1, ..listening_state(1) },
    );
    pods
}

fn request_prestop(pods: &mut PodTracker, now: Instant) -> Vec<PodTrackerAction> {
    pods.step(now, PodTrackerEvent::PreStopRequested("a".into()))
}

/// Lets the RouteTable name the pod with this phase, and without an answer to a preStop request.
fn route_phase(pods: &mut PodTracker, now: Instant, phase: RoutingPhase) -> Vec<PodTrackerAction> {
    let entry = wire::PodEntry { phase, ..pod("a", ProbeHandler::Listen) };
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(entry)))
}

/// Lets the RouteTable name the pod as not ready, with the answer that a container restarts.
fn route_restart(pods: &mut PodTracker, now: Instant) -> Vec<PodTrackerAction> {
    let entry = wire::PodEntry { container_restarts: true, ..pod("a", ProbeHandler::Listen) };
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(entry)))
}

/// Returns for each report if it asks the controller about a stop.
fn asked(actions: Vec<PodTrackerAction>) -> Vec<bool> {
    reports(actions).iter().map(|observed| observed.awaits_stop).collect()
}

fn idle_state() -> PodKernelState {
    PodKernelState { idle: 5 * SECOND, ..listening_state(1) }
}

fn released(actions: &[PodTrackerAction]) -> usize {
    actions.iter().filter(|action| **action == PodTrackerAction::AllowStop("a".into())).count()
}

#[test]
fn the_kubelet_waits_for_the_last_request_and_for_a_second_of_draining() {
    let now = Instant::now();
    let mut pods = busy(now);
    assert_eq!(released(&request_prestop(&mut pods, now)), 0);
    assert!(pods.is_stopping("a"));
    assert_eq!(pods.draining_uids(), ["a"], "it is read often");
    let draining =
        wire::PodEntry { phase: RoutingPhase::Draining, ..pod("a", ProbeHandler::Listen) };
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(draining)));
    let later = now + SECOND;
    let busy = PodKernelState { in_flight: 1, ..idle_state() };
    assert_eq!(released(&read_kernel_state(&mut pods, later, busy)), 0);
    let fresh = PodKernelState { unused_connections: 1, connections: 1, ..idle_state() };
    assert_eq!(
        released(&read_kernel_state(&mut pods, later, fresh)),
        0,
        "a first request is on its way"
    );
    let just = PodKernelState { idle: SECOND / 2, ..idle_state() };
    assert_eq!(released(&read_kernel_state(&mut pods, later, just)), 0, "it was busy a moment ago");
    assert_eq!(released(&read_kernel_state(&mut pods, later, idle_state())), 1);
    assert_eq!(released(&read_kernel_state(&mut pods, later, idle_state())), 0, "once");
    assert_eq!(
        released(&request_prestop(&mut pods, later)),
        1,
        "the next container gets the same answer"
    );
}

#[test]
fn a_pod_that_was_idle_before_waits_for_its_open_connections_while_clients_agents_close_them() {
    let now = Instant::now();
    let open = || PodKernelState { connections: 40, ..idle_state() };
    let draining_pods = || {
        let mut pods = busy(now);
        request_prestop(&mut pods, now);
        route_phase(&mut pods, now, RoutingPhase::Draining);
        assert_eq!(released(&read_kernel_state(&mut pods, now + DRAINED_AFTER, open())), 0);
        pods
    };
    let all_closed = read_kernel_state(&mut draining_pods(), now + DRAINED_AFTER, idle_state());
    assert_eq!(released(&all_closed), 1);
    let later = now + OPEN_CONNECTION_DRAIN_TIME;
    let some_left = read_kernel_state(&mut draining_pods(), later, open());
    assert_eq!(released(&some_left), 1, "they delay it no longer");
}

#[test]
fn without_the_controller_the_kubelet_waits_a_little_longer() {
    let now = Instant::now();
    let mut pods = busy(now);
    request_prestop(&mut pods, now);
    assert_eq!(
        released(&read_kernel_state(&mut pods, now + DRAINING_ROUTE_TIMEOUT, idle_state())),
        0
    );
    assert_eq!(
        released(&read_kernel_state(
            &mut pods,
            now + DRAINING_ROUTE_TIMEOUT + DRAINED_AFTER,
            idle_state()
        )),
        1
    );
}

#[test]
fn a_pod_that_leaves_the_table_early_stays_until_the_kubelet_has_its_answer() {
    let now = Instant::now();
    let gone = [PodTrackerAction::Unregister("a".into()), PodTrackerAction::ReportGone("a".into())];
    let mut pods = busy(now);
    request_prestop(&mut pods, now);
    assert_eq!(pods.step(now, PodTrackerEvent::RouteRemoved("a".into())), []);
    let busy = PodKernelState { in_flight: 1, ..idle_state() };
    assert_eq!(released(&read_kernel_state(&mut pods, now + SECOND, busy)), 0);
    let last = read_kernel_state(&mut pods, now + SECOND, idle_state());
    assert_eq!(released(&last), 1);
    assert!(last.ends_with(&gone), "{last:?}");
    let mut pods = self::busy(now);
    request_prestop(&mut pods, now);
    pods.step(now, PodTrackerEvent::RouteRemoved("a".into()));
    assert_eq!(
        pods.step(now, PodTrackerEvent::ProcessesEnded("a".into())),
        gone,
        "killed meanwhile"
    );
    let mut pods = self::busy(now);
    assert_eq!(
        pods.step(now, PodTrackerEvent::RouteRemoved("a".into())),
        gone,
        "no preStop request waits"
    );
}

#[test]
fn a_pod_whose_container_was_started_again_is_not_about_to_stop() {
    let now = Instant::now();
    let later = now + DRAINING_ROUTE_TIMEOUT + DRAINED_AFTER;
    let busy = PodKernelState { in_flight: 1, ..idle_state() };
    // The kubelet sends a preStop request before it ends a container whose liveness probe failed, and gets a response
    // or loses patience.
    for last in [idle_state(), busy] {
        let mut pods = self::busy(now);
        request_prestop(&mut pods, now);
        let is_quiet = last == idle_state();
        assert_eq!(released(&read_kernel_state(&mut pods, later, last)), usize::from(is_quiet));
        read_kernel_state(&mut pods, later, PodKernelState::default());
        read_kernel_state(&mut pods, later + SECOND, listening_state(1));
        assert!(!pods.is_stopping("a"), "new connections may go there again");
        read_kernel_state(&mut pods, later + SECOND, busy);
        assert_eq!(
            released(&request_prestop(&mut pods, later + SECOND)),
            0,
            "its requests are waited for"
        );
        assert!(pods.is_stopping("a"));
    }
}

#[test]
fn a_container_that_hangs_is_restarted_although_its_requests_never_end() {
    let now = Instant::now();
    let hangs = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    route_phase(&mut pods, now, RoutingPhase::Ready);
    let observed = reports(request_prestop(&mut pods, now));
    let [observed] = observed.as_slice() else { panic!("{observed:?}") };
    assert!(!observed.ready && observed.awaits_stop, "it gets no more requests");
    // The controller answers late, and may need a moment more to name the pod as draining.
    route_phase(&mut pods, now + SECOND, RoutingPhase::Starting);
    let answered = now + 20 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, answered, hangs)), 0);
    route_restart(&mut pods, answered);
    let early = answered + RESTART_ASSUMED_AFTER - SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, early, hangs)), 0);
    route_restart(&mut pods, early);
    let over = answered + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, hangs)), 1);
    let closed = read_kernel_state(&mut pods, over + 2 * SECOND, PodKernelState::default());
    assert_eq!(asked(closed), [true], "the container is not back yet");
    let observed = reports(read_kernel_state(&mut pods, over + 3 * SECOND, listening_state(1)));
    let last = observed.last().map(|it| (it.ready, it.awaits_stop));
    assert_eq!(last, Some((true, false)), "the new container serves");
}

#[test]
fn a_pod_that_stops_keeps_its_requests_whatever_the_controller_says_or_does_not() {
    let now = Instant::now();
    let long = now + 60 * SECOND;
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    // No controller is connected: the pod may have been deleted.
    let mut pods = busy(now);
    request_prestop(&mut pods, now);
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    // A controller is connected, and gives no answer: its watch of pods may be silent.
    for phase in [RoutingPhase::Ready, RoutingPhase::Starting] {
        let mut pods = busy(now);
        pods.set_controller_connected(true);
        route_phase(&mut pods, now, RoutingPhase::Ready);
        request_prestop(&mut pods, now);
        route_phase(&mut pods, now + SECOND, phase);
        assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0, "{phase:?}");
    }
    // A controller names the pod as draining, at once or after another statement.
    let routes: [fn(&mut PodTracker, Instant) -> Vec<PodTrackerAction>; 3] = [
        |pods, at| route_phase(pods, at, RoutingPhase::Ready),
        |pods, at| route_phase(pods, at, RoutingPhase::Starting),
        route_restart,
    ];
    for route in routes {
        let mut pods = busy(now);
        pods.set_controller_connected(true);
        route_phase(&mut pods, now, RoutingPhase::Ready);
        request_prestop(&mut pods, now);
        route(&mut pods, now + SECOND);
        route_phase(&mut pods, now + 2 * SECOND, RoutingPhase::Draining);
        assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    }
}

#[test]
fn a_restart_that_the_controller_takes_back_is_not_assumed() {
    let now = Instant::now();
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    route_restart(&mut pods, now);
    route_phase(&mut pods, now + SECOND, RoutingPhase::Starting);
    let long = now + 60 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    // Its next answer begins the time again.
    route_restart(&mut pods, long);
    let early = long + RESTART_ASSUMED_AFTER - SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, early, busy_still)), 0);
    let over = long + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
}

/// The second request may be for the end of the pod, and reports of both may reach the controller as one.
#[test]
fn the_answer_to_an_earlier_prestop_request_does_not_count() {
    let now = Instant::now();
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    route_restart(&mut pods, now);
    read_kernel_state(&mut pods, now + RESTART_ASSUMED_AFTER, busy_still);
    let reopened = now + RESTART_ASSUMED_AFTER + SECOND;
    read_kernel_state(&mut pods, reopened, PodKernelState::default());
    assert_eq!(asked(read_kernel_state(&mut pods, reopened, listening_state(1))), [false]);

    read_kernel_state(&mut pods, reopened + SECOND, busy_still);
    assert_eq!(asked(request_prestop(&mut pods, reopened + SECOND)), [false], "the old one stands");
    let long = reopened + 60 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    let withdrawn = route_phase(&mut pods, long, RoutingPhase::Starting);
    assert_eq!(asked(withdrawn), [true]);
    route_restart(&mut pods, long);
    let over = long + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
}

#[test]
fn a_further_prestop_request_asks_again() {
    let now = Instant::now();
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    route_restart(&mut pods, now);
    let further = now + RESTART_ASSUMED_AFTER - SECOND;
    assert_eq!(asked(request_prestop(&mut pods, further)), [false], "the old answer stands");
    let long = now + 50 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    assert_eq!(asked(route_phase(&mut pods, long, RoutingPhase::Starting)), [true]);
    route_restart(&mut pods, long);
    let over = long + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
}

/// A replica may not have received that an earlier question was over.
#[test]
fn an_answer_in_the_first_table_of_a_stream_counts_once_it_was_given_again() {
    let now = Instant::now();
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    assert!(pods.begin_table(|uid| uid == "a").is_empty());
    assert_eq!(asked(route_restart(&mut pods, now)), [false]);
    let long = now + 60 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    assert_eq!(asked(route_phase(&mut pods, long, RoutingPhase::Starting)), [true]);
    route_restart(&mut pods, long);
    let over = long + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
    // A table without an answer needs nothing of the kind.
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    assert!(pods.begin_table(|uid| uid == "a").is_empty());
    assert_eq!(asked(route_phase(&mut pods, now, RoutingPhase::Starting)), [false; 0]);
    route_restart(&mut pods, now);
    let over = now + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
}

/// The stream passes on only what differs from the table in force.
#[test]
fn an_answer_that_a_new_stream_repeats_counts_once_it_was_given_again() {
    let now = Instant::now();
    let busy_still = PodKernelState { in_flight: 1, connections: 1, ..idle_state() };
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    route_restart(&mut pods, now);
    let events = pods.begin_table(|_| false);
    assert_eq!(events.len(), 1);
    let repeated = events.into_iter().flat_map(|event| pods.step(now, event)).collect();
    assert_eq!(asked(repeated), [false]);
    let long = now + 60 * SECOND;
    assert_eq!(released(&read_kernel_state(&mut pods, long, busy_still)), 0);
    assert_eq!(asked(route_phase(&mut pods, long, RoutingPhase::Starting)), [true]);
    // Without an answer, the agent goes on asking.
    let events = pods.begin_table(|_| false);
    let repeated = events.into_iter().flat_map(|event| pods.step(long, event)).collect();
    assert_eq!(asked(repeated), [false; 0]);
    route_restart(&mut pods, long);
    let over = long + RESTART_ASSUMED_AFTER;
    assert_eq!(released(&read_kernel_state(&mut pods, over, busy_still)), 1);
}

#[test]
fn a_new_stream_does_not_bring_back_a_pod_that_the_table_has_dropped() {
    let now = Instant::now();
    let mut pods = busy(now);
    request_prestop(&mut pods, now);
    pods.step(now, PodTrackerEvent::RouteRemoved("a".into()));
    assert!(pods.begin_table(|_| false).is_empty());
}

#[test]
fn a_pod_whose_other_container_restarts_serves_again_after_a_while() {
    let now = Instant::now();
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    // The pod is idle, so the kubelet need not wait for the controller's answer.
    let quiet = now + DRAINING_ROUTE_TIMEOUT + DRAINED_AFTER;
    let read = read_kernel_state(&mut pods, quiet, idle_state());
    assert_eq!((released(&read), asked(read)), (1, vec![true]), "it asks on");
    let observed = |pods: &mut PodTracker, at| reports(read_kernel_state(pods, at, idle_state()));
    let answered = now + 120 * SECOND;
    assert_eq!(observed(&mut pods, answered), [], "without an answer it may be a pod that stops");
    route_restart(&mut pods, answered);
    let over = RESTART_ASSUMED_AFTER + RESTART_TIMEOUT;
    assert_eq!(observed(&mut pods, answered + over - SECOND), []);
    let observed = observed(&mut pods, answered + over);
    assert_eq!(observed.last().map(|it| (it.ready, it.awaits_stop)), Some((true, false)));
    assert!(!pods.is_stopping("a"));
}

#[test]
fn a_container_that_is_back_at_once_serves_again_once_the_pod_is_known_to_go_on() {
    let now = Instant::now();
    let mut pods = busy(now);
    pods.set_controller_connected(true);
    request_prestop(&mut pods, now);
    route_restart(&mut pods, now);
    read_kernel_state(&mut pods, now, PodKernelState::default());
    read_kernel_state(&mut pods, now, listening_state(1));
    assert!(pods.is_stopping("a"), "the pod may be named as draining in a moment");
    let observed =
        reports(read_kernel_state(&mut pods, now + DRAINING_ROUTE_TIMEOUT, listening_state(1)));
    assert_eq!(observed.last().map(|it| it.ready), Some(true));
}

#[test]
fn a_listener_that_opens_late_does_not_keep_a_pod_from_stopping() {
    let now = Instant::now();
    let reopens = |pods: &mut PodTracker, at: Instant| {
        read_kernel_state(pods, at, PodKernelState::default());
        read_kernel_state(pods, at, listening_state(1));
        pods.is_stopping("a")
    };
    let mut pods = busy(now);
    request_prestop(&mut pods, now);
    assert!(reopens(&mut pods, now), "the controller may not have heard yet");
    let draining =
        wire::PodEntry { phase: RoutingPhase::Draining, ..pod("a", ProbeHandler::Listen) };
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(draining)));
    assert!(reopens(&mut pods, now + 9 * SECOND));
    assert_eq!(released(&read_kernel_state(&mut pods, now + 9 * SECOND, idle_state())), 1);
}

#[test]
fn a_pod_of_both_families_is_reported_at_both_addresses_it_serves_at() {
    let now = Instant::now();
    let ipv6 = Some(ip("fd00::5"));
    let cases = [
        (abi::SERVES_V4, "10.244.0.5:8080", None),
        (abi::SERVES_V4 | abi::SERVES_V6, "10.244.0.5:8080", ipv6),
    ];
    for (served_families, address, other_family_address) in cases {
        let mut pods = registered(pod("a", ProbeHandler::Listen), now);
        let observed = reports(read_kernel_state(
            &mut pods,
            now,
            PodKernelState { served_families, ..listening_state(1) },
        ));
        assert_eq!(
            observed,
            [PodObservation { address: Some(at(address)), other_family_address, ..ready() }]
        );
    }
    for (listener, other_family_address) in [("0.0.0.0:8080", None), ("[::]:8080", ipv6)] {
        let mut pods = registered(pod("a", ProbeHandler::Listen), now);
        let found = PodTrackerEvent::Inspected("a".into(), sockets(&[listener]), 900);
        assert_eq!(
            reports(pods.step(now, found)),
            [PodObservation { other_family_address, ..ready() }]
        );
    }
}

#[test]
fn a_pod_that_serves_the_other_family_only_is_not_ready_and_says_so() {
    let now = Instant::now();
    let why = "port 8080 is open for IPv6 only, and clients come by IPv4: listen on 0.0.0.0, or on :: without IPV6_V6ONLY";
    let unready = PodObservation {
        address: Some(at("[fd00::5]:8080")),
        ready: false,
        not_ready_reason: why.into(),
        ..ready()
    };
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let six = PodKernelState { served_families: abi::SERVES_V6, ..listening_state(1) };
    assert_eq!(reports(read_kernel_state(&mut pods, now, six)), std::slice::from_ref(&unready));
    // A listener from before the programs is known by an inspection.
    let mut pods_before = registered(pod("a", ProbeHandler::Listen), now);
    let found = PodTrackerEvent::Inspected("a".into(), sockets(&["[::]:8080!"]), 900);
    assert_eq!(reports(pods_before.step(now, found)), std::slice::from_ref(&unready));
    // A second listener for the other family completes it.
    let both =
        PodKernelState { served_families: abi::SERVES_V4 | abi::SERVES_V6, ..listening_state(2) };
    let observed = reports(read_kernel_state(&mut pods, now, both));
    assert_eq!(
        observed.last().map(|it| (it.ready, it.not_ready_reason.as_str())),
        Some((true, ""))
    );
    // In an IPv6-only cluster it is the other way round.
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Listen))));
    let alone = NamespaceFacts { addresses: vec![ip("fd00::5")], ..facts() };
    pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), alone));
    pods.step(now, PodTrackerEvent::Registered("a".into()));
    let four = PodKernelState { served_families: abi::SERVES_V4, ..listening_state(1) };
    let observed = reports(read_kernel_state(&mut pods, now, four));
    let why = "port 8080 is open for IPv4 only, and clients come by IPv6: listen on ::";
    assert_eq!(
        observed.last().map(|it| (it.ready, it.not_ready_reason.as_str())),
        Some((false, why))
    );
}

#[test]
fn an_incompatibility_is_reported_instead_of_any_other_reason() {
    let now = Instant::now();
    let sandbox = Incompatibility::Sandbox("gVisor");
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let odd = NamespaceFacts { incompatibility: Some(sandbox), ..facts() };
    let observed = reports(pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), odd)));
    assert_eq!(observed[0].not_ready_reason, sandbox.to_string());
    let mut pods = PodTracker::new(UPGRADED_DRAIN_TIME);
    pods.step(now, PodTrackerEvent::RouteUpdated(Box::new(pod("a", ProbeHandler::Listen))));
    let observed = reports(
        pods.step(now, PodTrackerEvent::NamespaceMissing("a".into(), Incompatibility::HostNetwork)),
    );
    assert_eq!(
        (observed[0].ready, &*observed[0].not_ready_reason),
        (false, &*Incompatibility::HostNetwork.to_string())
    );
    let observed = reports(pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), facts())));
    assert_eq!(observed[0].not_ready_reason, "", "it was only late");
    let mut pods = registered(pod("a", ProbeHandler::Listen), now);
    let redirects = NamespaceSockets { has_redirection: true, ..sockets(&["0.0.0.0:8080"]) };
    let observed = reports(pods.step(now, PodTrackerEvent::Inspected("a".into(), redirects, 1)));
    assert_eq!(
        (observed[0].ready, &*observed[0].not_ready_reason),
        (true, &*Incompatibility::Redirected.to_string())
    );
}
