//! Shell: growth of requests in flight is reported at once, not with the next periodic report, and the last totals of a
//! pod before its removal.

use super::*;

/// Metric of the growth events that an agent has read from the kernel. Its self-test listens in a cgroup of the pods, so
/// events of listeners come at any time.
const GROWTH_EVENTS: &str = "rouse_agent_events_total{kind=\"growth\"}";

impl AgentFixture {
    fn growth_event_count(&self) -> u64 {
        self.metric_count(GROWTH_EVENTS)
    }

    /// Sends a request that gets no response.
    fn send_unanswered_request(&self) -> TcpStream {
        let node =
            NetworkNamespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let mut stream =
            node.run_inside("connect", || TcpStream::connect(POD_ADDRESS)).expect("it listens");
        stream.write_all(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n").expect("an open connection");
        stream
    }
}

/// Waits until the agent has armed the pod's next growth event. Returns false after a timeout.
fn wait_armed(fixture: &AgentFixture) -> bool {
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let (maps, slot) = (KernelMaps::open(&pins).expect("pinned maps"), fixture.slot());
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while maps.pod_state(slot).event_threshold == 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    maps.pod_state(slot).event_threshold != 0
}

#[test]
fn growth_beyond_the_last_report_is_reported_by_events() {
    const REQUESTS: u64 = 50;
    // An agent of its own: its number of growth events is the number of this pod's.
    let mut fixture = AgentFixture::new("growth");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    fixture.send_to_pod("keep");
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.wait_usage("the pod at rest", |usage| usage.totals.in_flight() == 0);
    let (before, mut open) = (fixture.growth_event_count(), Vec::new());
    for count in 1..=REQUESTS {
        assert!(wait_armed(&fixture), "no event is armed beyond {} in flight", count - 1);
        open.push(fixture.send_unanswered_request());
        fixture.wait_usage("all of them", |usage| usage.totals.in_flight() == count);
    }
    // The periodic report may come first for some of them.
    let events = fixture.growth_event_count() - before;
    assert!((REQUESTS * 9 / 10..=REQUESTS).contains(&events), "{events} events");
    // As many at once: there are no more events than requests, and the reports have all of them.
    assert!(wait_armed(&fixture), "no event is armed beyond {REQUESTS} in flight");
    let before_all = fixture.growth_event_count();
    open.extend((0..REQUESTS).map(|_| fixture.send_unanswered_request()));
    fixture.wait_usage("all of them", |usage| usage.totals.in_flight() == 2 * REQUESTS);
    // The agent may count the last event of the first part late.
    let now = fixture.growth_event_count();
    assert!(now > before_all && now - before <= 2 * REQUESTS, "{before}, {before_all}, {now}");
    drop(open);
}

/// The autoscaler would otherwise miss the requests since the last periodic report.
#[test]
fn the_last_totals_of_a_pod_are_reported_before_its_removal() {
    let mut fixture = AgentFixture::new("last");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    fixture.send_to_pod("keep");
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    let open = fixture.send_unanswered_request();
    fixture.wait_usage("it has begun", |usage| usage.totals.in_flight() == 1);
    fixture.routes.remove(&RouteKey::Pod("uid-1".into()));
    let usage = fixture.wait_usage("it ends with the pod", |usage| usage.totals.finished == 1);
    assert_eq!(usage.totals.started, 1);
    let next = fixture.usages.recv_timeout(WAIT_TIMEOUT);
    assert!(matches!(&next, Ok(UsageItem::Removed(key)) if *key == usage.key), "{next:?}");
    drop(open);
}
