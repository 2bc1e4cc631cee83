use std::num::NonZeroU16;

use common::wire::{Name, ProbeHow};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn pod(uid: &str, how: ProbeHow) -> wire::Pod {
    wire::Pod {
        uid: uid.into(),
        name: format!("hello-{uid}"),
        revision: Name::new("default", "hello-00001"),
        node: "n1".into(),
        zone: String::new(),
        phase: PodPhase::Starting,
        address: None,
        also: None,
        confirmed: false,
        port: NonZeroU16::new(8080).expect("not zero"),
        probe: Probe {
            how,
            port: None,
            period: Duration::ZERO,
            timeout: Duration::ZERO,
            success_threshold: 1,
            failure_threshold: 3,
        },
    }
}

fn facts() -> Facts {
    Facts { cookie: 7, addresses: vec![ip("10.244.0.5"), ip("fd00::5")], oddity: None }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn listens(count: u32) -> Kernel {
    Kernel { listeners: count, since_ns: u64::from(count) * 900, ..Kernel::default() }
}

/// Builds listeners from their addresses; a `!` behind one means IPv6-only.
fn sockets(listeners: &[&str]) -> Sockets {
    let listener =
        |text: &&str| Listener { at: at(text.trim_end_matches('!')), v6_only: text.ends_with('!') };
    let listeners = listeners.iter().map(listener).collect();
    Sockets { listeners, redirects: false }
}

/// Returns a pod that was named, found and registered; its namespace holds no listener.
fn known(pod: wire::Pod, now: Instant) -> Pods {
    let uid = pod.uid.clone();
    let mut pods = Pods::new(TUNNEL_DRAIN);
    for event in [
        Event::Named(Box::new(pod)),
        Event::Found(uid.clone(), facts()),
        Event::Registered(uid.clone()),
        Event::Inspected(uid, Sockets::default(), 1),
    ] {
        pods.step(now, event);
    }
    pods
}

/// Time that a draining pod waits for upgraded connections in these tests.
const TUNNEL_DRAIN: Duration = Duration::from_secs(60);

fn kernel(pods: &mut Pods, now: Instant, read: Kernel) -> Vec<Action> {
    pods.step(now, Event::Kernel("a".into(), read))
}

fn reports(actions: Vec<Action>) -> Vec<PodSeen> {
    let report = |action| match action {
        Action::Report(seen) => Some(seen),
        _ => None,
    };
    actions.into_iter().filter_map(report).collect()
}

fn idle() -> PodSeen {
    PodSeen {
        uid: "a".into(),
        address: Some(at("10.244.0.5:8080")),
        also: None,
        listening: false,
        ready: false,
        drained: false,
        in_flight: 0,
        listening_since_ns: 0,
        trouble: "nothing listens on port 8080 yet".into(),
    }
}

fn ready() -> PodSeen {
    PodSeen {
        listening: true,
        ready: true,
        listening_since_ns: 900,
        trouble: String::new(),
        ..idle()
    }
}

#[test]
fn a_pod_is_looked_for_registered_inspected_and_reported() {
    let now = Instant::now();
    let mut pods = Pods::new(TUNNEL_DRAIN);
    let unknown = PodSeen { address: None, trouble: String::new(), ..idle() };
    assert_eq!(
        pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Listen)))),
        [Action::Find("a".into()), Action::Report(unknown.clone())]
    );
    let addressed = PodSeen { address: Some(at("10.244.0.5:8080")), ..unknown };
    assert_eq!(
        pods.step(now, Event::Found("a".into(), facts())),
        [Action::Register("a".into(), facts()), Action::Report(addressed)]
    );
    assert_eq!(pods.step(now, Event::Registered("a".into())), [Action::Inspect("a".into())]);
    assert_eq!(
        pods.step(now, Event::Inspected("a".into(), Sockets::default(), 5)),
        [Action::Report(idle())]
    );
    assert_eq!(kernel(&mut pods, now, listens(1)), [Action::Report(ready())]);
}

#[test]
fn a_pod_leaves_when_its_last_listener_closes() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    assert_eq!(reports(kernel(&mut pods, now, listens(1))), [ready()]);
    assert_eq!(reports(kernel(&mut pods, now, listens(2))), [], "prefork or reload");
    assert_eq!(reports(kernel(&mut pods, now, listens(1))), []);
    let gone = reports(kernel(&mut pods, now, listens(0)));
    assert_eq!(gone, [PodSeen { trouble: String::new(), ..idle() }]);
}

#[test]
fn a_listener_the_kernel_did_not_see_counts_until_a_look_misses_it() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let found = Event::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77);
    assert_eq!(reports(pods.step(now, found)), [PodSeen { listening_since_ns: 77, ..ready() }]);
    let wake = pods.next_wake().expect("it is looked for again");
    assert_eq!(wake, now + SECOND);
    assert_eq!(pods.step(wake, Event::Tick), [Action::Inspect("a".into())]);
    let lost = Event::Inspected("a".into(), Sockets::default(), 99);
    assert_eq!(reports(pods.step(wake, lost)), [idle()]);
}

#[test]
fn a_listener_the_kernel_did_not_see_stays_over_readings_that_miss_it() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    pods.step(now, Event::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77));
    assert_eq!(kernel(&mut pods, now, Kernel::default()), []);
    assert!(pods.is_unseen("a"));
}

#[test]
fn a_closed_listener_is_not_kept_alive_by_an_older_look() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    kernel(&mut pods, now, listens(1));
    pods.step(now, Event::Inspected("a".into(), sockets(&["0.0.0.0:8080"]), 77));
    let actions = kernel(&mut pods, now, listens(0));
    assert!(actions.contains(&Action::Inspect("a".into())), "{actions:?}");
    assert!(!reports(actions)[0].ready);
}

#[test]
fn a_pod_the_kernel_sees_listening_is_not_looked_into() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    kernel(&mut pods, now, listens(1));
    assert_eq!(pods.next_wake(), None);
}

#[test]
fn the_probe_is_tried_at_the_pods_own_address() {
    let now = Instant::now();
    let mut shape = pod("a", ProbeHow::Tcp);
    shape.probe.port = NonZeroU16::new(9090);
    let mut pods = known(shape.clone(), now);
    let attempt = Attempt {
        uid: "a".into(),
        seq: 1,
        timeout: SECOND,
        at: at("10.244.0.5:9090"),
        probe: shape.probe,
    };
    let waiting = PodSeen { ready: false, ..ready() };
    assert_eq!(
        kernel(&mut pods, now, listens(1)),
        [Action::Try(attempt), Action::Report(waiting.clone())]
    );
    let failed = Event::Tried("a".into(), 1, Err("connection refused".into()));
    let trouble = "readiness probe failed: connection refused".into();
    assert_eq!(reports(pods.step(now, failed)), [PodSeen { trouble, ..waiting }]);
    let wake = pods.next_wake().expect("another try");
    assert!(matches!(pods.step(wake, Event::Tick)[..], [Action::Try(Attempt { seq: 2, .. })]));
    assert_eq!(reports(pods.step(wake, Event::Tried("a".into(), 2, Ok(())))), [ready()]);
}

#[test]
fn a_probe_waits_for_the_address() {
    let now = Instant::now();
    let mut pods = Pods::new(TUNNEL_DRAIN);
    pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Tcp))));
    let actions = kernel(&mut pods, now, listens(1));
    assert!(!actions.iter().any(|action| matches!(action, Action::Try(_))), "{actions:?}");
    let actions = pods.step(now, Event::Found("a".into(), facts()));
    assert!(actions.iter().any(|action| matches!(action, Action::Try(_))), "{actions:?}");
}

#[test]
fn changes_in_flight_alone_are_reported_once_a_second() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    kernel(&mut pods, now, listens(1));
    let busy = |in_flight| Kernel { in_flight, ..listens(1) };
    assert_eq!(reports(kernel(&mut pods, now, busy(3))), []);
    let later = now + SECOND;
    assert_eq!(reports(kernel(&mut pods, later, busy(4))), [PodSeen { in_flight: 4, ..ready() }]);
    assert_eq!(reports(kernel(&mut pods, later, busy(5))), []);
}

#[test]
fn a_draining_pod_is_drained_after_a_second_without_work() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let draining = wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) };
    let reading = |in_flight, fresh, idle_ms| Kernel {
        in_flight,
        fresh,
        idle: Duration::from_millis(idle_ms),
        ..listens(1)
    };
    kernel(&mut pods, now, reading(0, 0, 90_000));
    pods.step(now, Event::Named(Box::new(draining)));
    assert_eq!(pods.draining(), ["a"]);

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
        pods.step(at, Event::Tick);
        let drained = reports(kernel(&mut pods, at, reading)).iter().any(|seen| seen.drained);
        drained_at.extend(drained.then_some(ms));
    }
    assert_eq!(drained_at, [2300]);
}

#[test]
fn a_draining_pod_waits_for_tunnels_as_long_as_it_may_and_for_requests_longer() {
    let now = Instant::now();
    let mut pods =
        known(wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) }, now);
    let count = Action::CountUpgraded("a".into());
    let reading =
        |in_flight, idle| Kernel { in_flight, connections: in_flight, idle, ..listens(1) };
    let early = kernel(&mut pods, now + TUNNEL_DRAIN - SECOND, reading(2, 30 * SECOND));
    assert!(!early.contains(&count), "{early:?}");

    let due = now + TUNNEL_DRAIN;
    assert!(kernel(&mut pods, due, reading(2, 60 * SECOND)).contains(&count));
    let again = kernel(&mut pods, due + SECOND / 4, reading(2, 60 * SECOND));
    assert!(!again.contains(&count), "one look a second");

    let drained = |actions| reports(actions).iter().any(|seen| seen.drained);
    pods.step(due, Event::Upgraded("a".into(), 1, due));
    let later = due + 2 * SECOND;
    assert!(!drained(kernel(&mut pods, later, reading(2, 60 * SECOND))), "one is a request");
    pods.step(later, Event::Upgraded("a".into(), 2, later));
    let later = later + SECOND;
    assert!(!drained(kernel(&mut pods, later, reading(3, 60 * SECOND))), "one more has come");
    let ended = reading(2, SECOND / 2);
    assert!(!drained(kernel(&mut pods, later, ended)), "one has ended: perhaps a tunnel");
    assert!(drained(kernel(&mut pods, later, reading(2, 60 * SECOND))), "two, and both are known");
}

#[test]
fn a_drained_pod_with_kept_connections_stays_until_they_were_ended() {
    let now = Instant::now();
    let mut pods =
        known(wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) }, now);
    let kept = |connections, idle| Kernel { connections, idle, ..listens(1) };
    let later = now + 9 * SECOND;
    let drained = |seen: &PodSeen| seen.drained;
    assert!(!reports(kernel(&mut pods, later, kept(1, SECOND))).iter().any(drained));
    assert!(reports(kernel(&mut pods, later, kept(0, SECOND))).iter().any(drained));
    assert!(!reports(kernel(&mut pods, later, kept(1, SECOND))).iter().any(drained));
    assert!(reports(kernel(&mut pods, later, kept(1, 2 * SECOND))).iter().any(drained));
}

#[test]
fn a_pod_that_is_not_draining_is_never_called_drained() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    for second in 0..5 {
        let read = Kernel { idle: second * SECOND, ..listens(1) };
        let seen = reports(kernel(&mut pods, now + second * SECOND, read));
        assert!(seen.iter().all(|seen| !seen.drained));
    }
}

#[test]
fn a_new_namespace_starts_the_pod_anew() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    kernel(&mut pods, now, listens(1));
    assert_eq!(pods.step(now, Event::Found("a".into(), facts())), [], "nothing new");
    let other = Facts { cookie: 8, addresses: vec![ip("10.244.0.6")], oddity: None };
    let actions = pods.step(now, Event::Found("a".into(), other.clone()));
    assert_eq!(actions[0], Action::Register("a".into(), other));
    assert!(!reports(actions)[0].ready);
}

#[test]
fn a_pod_that_is_named_no_more_is_forgotten() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let gone = pods.step(now, Event::Dropped("a".into()));
    assert_eq!(gone, [Action::Forget("a".into()), Action::Gone("a".into())]);
    assert_eq!(pods.step(now, Event::Dropped("a".into())), []);
    assert_eq!(kernel(&mut pods, now, listens(1)), [], "a late reading");
}

#[test]
fn troubles_name_what_to_do() {
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
    for (listeners, trouble) in cases {
        let mut pods = Pods::new(TUNNEL_DRAIN);
        let now = Instant::now();
        pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Listen))));
        let seen = pods.step(now, Event::Inspected("a".into(), sockets(listeners), 1));
        let seen = reports(seen).pop().map(|seen| seen.trouble).unwrap_or_default();
        assert_eq!(seen, trouble);
    }
}

#[test]
fn a_listener_on_an_ipv6_address_is_reached_over_ipv6() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let both = Event::Inspected("a".into(), sockets(&["[::]:8080"]), 1);
    assert_eq!(reports(pods.step(now, both))[0].address, Some(at("10.244.0.5:8080")));
    let v6 = Event::Inspected("a".into(), sockets(&["[fd00::5]:8080"]), 1);
    assert_eq!(reports(pods.step(now, v6))[0].address, Some(at("[fd00::5]:8080")));
}

#[test]
fn it_is_settled_once_every_ready_pod_is_seen_to_be_ready() {
    let now = Instant::now();
    let mut pods = known(pod("b", ProbeHow::Listen), now);
    assert!(pods.is_settled(), "a starting pod is not waited for");
    let address = Some(at("10.244.0.5:8080"));
    let known_ready = wire::Pod { phase: PodPhase::Ready, address, ..pod("a", ProbeHow::Listen) };
    pods.step(now, Event::Named(Box::new(known_ready)));
    assert!(!pods.is_settled());
    pods.step(now, Event::Found("a".into(), facts()));
    kernel(&mut pods, now, listens(1));
    assert!(pods.is_settled());
}

#[test]
fn a_pod_that_does_not_listen_for_a_minute_is_looked_into_less_often() {
    let now = Instant::now();
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let mut looks = 0;
    let mut at = now;
    while at < now + 120 * SECOND {
        at = pods.next_wake().expect("it is looked into");
        let actions = pods.step(at, Event::Tick);
        looks += actions.iter().filter(|action| matches!(action, Action::Inspect(_))).count();
    }
    assert!((60..70).contains(&looks), "{looks}");
}

/// Returns a registered pod that listens, with a request in flight.
fn busy(now: Instant) -> Pods {
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    kernel(&mut pods, now, Kernel { in_flight: 1, connections: 1, ..listens(1) });
    pods
}

fn asks(pods: &mut Pods, now: Instant) -> Vec<Action> {
    pods.step(now, Event::Asked("a".into()))
}

fn quiet() -> Kernel {
    Kernel { idle: 5 * SECOND, ..listens(1) }
}

fn released(actions: &[Action]) -> usize {
    actions.iter().filter(|action| **action == Action::Release("a".into())).count()
}

#[test]
fn the_kubelet_waits_for_the_last_request_and_for_a_second_of_draining() {
    let now = Instant::now();
    let mut pods = busy(now);
    assert_eq!(released(&asks(&mut pods, now)), 0);
    assert!(pods.is_stopping("a"));
    assert_eq!(pods.draining(), ["a"], "it is looked at often");
    let draining = wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) };
    pods.step(now, Event::Named(Box::new(draining)));
    let later = now + SECOND;
    let busy = Kernel { in_flight: 1, ..quiet() };
    assert_eq!(released(&kernel(&mut pods, later, busy)), 0);
    let fresh = Kernel { fresh: 1, connections: 1, ..quiet() };
    assert_eq!(released(&kernel(&mut pods, later, fresh)), 0, "a first request is on its way");
    let just = Kernel { idle: SECOND / 2, ..quiet() };
    assert_eq!(released(&kernel(&mut pods, later, just)), 0, "it was busy a moment ago");
    assert_eq!(released(&kernel(&mut pods, later, quiet())), 1);
    assert_eq!(released(&kernel(&mut pods, later, quiet())), 0, "once");
    assert_eq!(released(&asks(&mut pods, later)), 1, "the next container gets the same answer");
}

#[test]
fn without_a_word_of_the_controller_the_kubelet_waits_a_little_longer() {
    let now = Instant::now();
    let mut pods = busy(now);
    asks(&mut pods, now);
    assert_eq!(released(&kernel(&mut pods, now + UNTOLD, quiet())), 0);
    assert_eq!(released(&kernel(&mut pods, now + UNTOLD + DRAINED_AFTER, quiet())), 1);
}

#[test]
fn a_pod_that_leaves_the_table_early_is_kept_until_the_kubelet_may_go_on() {
    let now = Instant::now();
    let gone = [Action::Forget("a".into()), Action::Gone("a".into())];
    let mut pods = busy(now);
    asks(&mut pods, now);
    assert_eq!(pods.step(now, Event::Dropped("a".into())), []);
    let busy = Kernel { in_flight: 1, ..quiet() };
    assert_eq!(released(&kernel(&mut pods, now + SECOND, busy)), 0);
    let last = kernel(&mut pods, now + SECOND, quiet());
    assert_eq!(released(&last), 1);
    assert!(last.ends_with(&gone), "{last:?}");
    let mut pods = self::busy(now);
    asks(&mut pods, now);
    pods.step(now, Event::Dropped("a".into()));
    assert_eq!(pods.step(now, Event::Emptied("a".into())), gone, "killed meanwhile");
    let mut pods = self::busy(now);
    assert_eq!(pods.step(now, Event::Dropped("a".into())), gone, "nobody waits");
}

#[test]
fn a_pod_whose_container_was_started_again_is_not_about_to_stop() {
    let now = Instant::now();
    let later = now + UNTOLD + DRAINED_AFTER;
    let busy = Kernel { in_flight: 1, ..quiet() };
    // The kubelet sends a preStop request before it ends a container whose liveness probe failed, and gets a response
    // or loses patience.
    for last in [quiet(), busy] {
        let mut pods = self::busy(now);
        asks(&mut pods, now);
        let is_quiet = last == quiet();
        assert_eq!(released(&kernel(&mut pods, later, last)), usize::from(is_quiet));
        kernel(&mut pods, later, Kernel::default());
        kernel(&mut pods, later + SECOND, listens(1));
        assert!(!pods.is_stopping("a"), "new connections may go there again");
        kernel(&mut pods, later + SECOND, busy);
        assert_eq!(released(&asks(&mut pods, later + SECOND)), 0, "its requests are waited for");
        assert!(pods.is_stopping("a"));
    }
}

#[test]
fn a_container_that_hangs_is_restarted_although_its_requests_never_end() {
    let now = Instant::now();
    let hangs = Kernel { in_flight: 1, connections: 1, ..quiet() };
    let mut pods = busy(now);
    pods.set_informed(true);
    let seen = reports(asks(&mut pods, now));
    assert_eq!(seen.iter().map(|it| it.ready).collect::<Vec<_>>(), [false], "it gets no more");
    // The controller may need a moment to name the pod as draining.
    assert_eq!(released(&kernel(&mut pods, now + RESTARTS_AFTER - SECOND, hangs)), 0);
    assert_eq!(released(&kernel(&mut pods, now + RESTARTS_AFTER, hangs)), 1);
    kernel(&mut pods, now + 7 * SECOND, Kernel::default());
    let seen = reports(kernel(&mut pods, now + 8 * SECOND, listens(1)));
    assert_eq!(seen.last().map(|it| it.ready), Some(true), "the new container serves");
}

#[test]
fn a_pod_that_stops_keeps_its_requests_whatever_the_controller_says_or_does_not() {
    let now = Instant::now();
    let long = now + 60 * SECOND;
    let busy_still = Kernel { in_flight: 1, connections: 1, ..quiet() };
    // No controller is connected: the pod may have been deleted.
    let mut pods = busy(now);
    asks(&mut pods, now);
    assert_eq!(released(&kernel(&mut pods, long, busy_still)), 0);
    // A controller is connected, and names the pod as draining.
    let mut pods = busy(now);
    pods.set_informed(true);
    asks(&mut pods, now);
    let draining = wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) };
    pods.step(now + SECOND, Event::Named(Box::new(draining)));
    assert_eq!(released(&kernel(&mut pods, long, busy_still)), 0);
}

#[test]
fn a_pod_whose_other_container_restarts_serves_again_after_a_while() {
    let now = Instant::now();
    let mut pods = busy(now);
    pods.set_informed(true);
    asks(&mut pods, now);
    kernel(&mut pods, now + RESTARTS_AFTER, quiet());
    let over = RESTARTS_AFTER + RESTARTS_WITHIN;
    let seen = |pods: &mut Pods, at| reports(kernel(pods, at, quiet()));
    assert_eq!(seen(&mut pods, now + over - SECOND), []);
    let seen = seen(&mut pods, now + over);
    assert_eq!(seen.last().map(|it| it.ready), Some(true));
    assert!(!pods.is_stopping("a"));
}

#[test]
fn a_container_that_is_back_at_once_serves_again_once_the_pod_is_known_to_go_on() {
    let now = Instant::now();
    let mut pods = busy(now);
    pods.set_informed(true);
    asks(&mut pods, now);
    kernel(&mut pods, now, Kernel::default());
    kernel(&mut pods, now, listens(1));
    assert!(pods.is_stopping("a"), "the controller may not have heard yet");
    let seen = reports(kernel(&mut pods, now + UNTOLD, listens(1)));
    assert_eq!(seen.last().map(|it| it.ready), Some(true));
}

#[test]
fn a_listener_that_opens_late_does_not_keep_a_pod_from_stopping() {
    let now = Instant::now();
    let reopens = |pods: &mut Pods, at: Instant| {
        kernel(pods, at, Kernel::default());
        kernel(pods, at, listens(1));
        pods.is_stopping("a")
    };
    let mut pods = busy(now);
    asks(&mut pods, now);
    assert!(reopens(&mut pods, now), "the controller may not have heard yet");
    let draining = wire::Pod { phase: PodPhase::Draining, ..pod("a", ProbeHow::Listen) };
    pods.step(now, Event::Named(Box::new(draining)));
    assert!(reopens(&mut pods, now + 9 * SECOND));
    assert_eq!(released(&kernel(&mut pods, now + 9 * SECOND, quiet())), 1);
}

#[test]
fn a_pod_of_both_families_is_reported_at_both_addresses_it_serves_at() {
    let now = Instant::now();
    let six = Some(ip("fd00::5"));
    let cases = [
        (abi::SERVES_V4, "10.244.0.5:8080", None),
        (abi::SERVES_V4 | abi::SERVES_V6, "10.244.0.5:8080", six),
    ];
    for (serves, address, also) in cases {
        let mut pods = known(pod("a", ProbeHow::Listen), now);
        let seen = reports(kernel(&mut pods, now, Kernel { serves, ..listens(1) }));
        assert_eq!(seen, [PodSeen { address: Some(at(address)), also, ..ready() }]);
    }
    for (listener, also) in [("0.0.0.0:8080", None), ("[::]:8080", six)] {
        let mut pods = known(pod("a", ProbeHow::Listen), now);
        let found = Event::Inspected("a".into(), sockets(&[listener]), 900);
        assert_eq!(reports(pods.step(now, found)), [PodSeen { also, ..ready() }]);
    }
}

#[test]
fn a_pod_that_serves_the_other_family_only_is_not_ready_and_says_so() {
    let now = Instant::now();
    let why = "port 8080 is open for IPv6 only, and clients come by IPv4: listen on 0.0.0.0, or on :: without IPV6_V6ONLY";
    let unready = PodSeen {
        address: Some(at("[fd00::5]:8080")),
        ready: false,
        trouble: why.into(),
        ..ready()
    };
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let six = Kernel { serves: abi::SERVES_V6, ..listens(1) };
    assert_eq!(reports(kernel(&mut pods, now, six)), std::slice::from_ref(&unready));
    // A listener from before the programs is known by an inspection.
    let mut pods_before = known(pod("a", ProbeHow::Listen), now);
    let found = Event::Inspected("a".into(), sockets(&["[::]:8080!"]), 900);
    assert_eq!(reports(pods_before.step(now, found)), std::slice::from_ref(&unready));
    // A second listener for the other family completes it.
    let both = Kernel { serves: abi::SERVES_V4 | abi::SERVES_V6, ..listens(2) };
    let seen = reports(kernel(&mut pods, now, both));
    assert_eq!(seen.last().map(|it| (it.ready, it.trouble.as_str())), Some((true, "")));
    // In an IPv6-only cluster it is the other way round.
    let mut pods = Pods::new(TUNNEL_DRAIN);
    pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Listen))));
    let alone = Facts { addresses: vec![ip("fd00::5")], ..facts() };
    pods.step(now, Event::Found("a".into(), alone));
    pods.step(now, Event::Registered("a".into()));
    let four = Kernel { serves: abi::SERVES_V4, ..listens(1) };
    let seen = reports(kernel(&mut pods, now, four));
    let why = "port 8080 is open for IPv4 only, and clients come by IPv6: listen on ::";
    assert_eq!(seen.last().map(|it| (it.ready, it.trouble.as_str())), Some((false, why)));
}

#[test]
fn what_cannot_be_served_as_usual_is_said_instead_of_anything_else() {
    let now = Instant::now();
    let sandbox = Oddity::Sandbox("gVisor");
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let odd = Facts { oddity: Some(sandbox), ..facts() };
    let seen = reports(pods.step(now, Event::Found("a".into(), odd)));
    assert_eq!(seen[0].trouble, sandbox.to_string());
    let mut pods = Pods::new(TUNNEL_DRAIN);
    pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Listen))));
    let seen = reports(pods.step(now, Event::Unfindable("a".into(), Oddity::HostNetwork)));
    assert_eq!((seen[0].ready, &*seen[0].trouble), (false, &*Oddity::HostNetwork.to_string()));
    let seen = reports(pods.step(now, Event::Found("a".into(), facts())));
    assert_eq!(seen[0].trouble, "", "it was only late");
    let mut pods = known(pod("a", ProbeHow::Listen), now);
    let redirects = Sockets { redirects: true, ..sockets(&["0.0.0.0:8080"]) };
    let seen = reports(pods.step(now, Event::Inspected("a".into(), redirects, 1)));
    assert_eq!((seen[0].ready, &*seen[0].trouble), (true, &*Oddity::Redirected.to_string()));
}

#[test]
fn a_pod_without_room_in_the_maps_says_so_and_tries_again() {
    let now = Instant::now();
    let mut pods = Pods::new(TUNNEL_DRAIN);
    pods.step(now, Event::Named(Box::new(pod("a", ProbeHow::Listen))));
    let register = Action::Register("a".into(), facts());
    assert!(pods.step(now, Event::Found("a".into(), facts())).contains(&register));
    let seen = reports(pods.step(now, Event::Crowded("a".into())));
    assert_eq!((seen[0].ready, &*seen[0].trouble), (false, &*Oddity::Crowded.to_string()));
    assert_eq!(pods.counts().crowded, 1);
    let next = pods.next_wake().expect("it tries again");
    assert!(next > now && pods.step(next, Event::Tick).contains(&register));
    assert!(!pods.step(next, Event::Tick).contains(&register), "once for each pause");
    pods.step(next, Event::Registered("a".into()));
    let seen = reports(kernel(&mut pods, next, listens(1)));
    assert_eq!((seen[0].ready, &*seen[0].trouble, pods.counts().crowded), (true, "", 0));
}
