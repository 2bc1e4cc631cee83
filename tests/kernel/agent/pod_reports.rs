//! Shell: reports of a pod from its start to its end: listening, probed, ready, drained; also across agents.

use super::{shared_agent::SharedAgentFixture, *};

fn http_probe() -> ProbeHandler {
    ProbeHandler::Http {
        path: "/ready".into(),
        headers: Vec::new(),
        host: String::new(),
        https: false,
    }
}

#[test]
fn a_pod_is_ready_while_it_listens() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_pod();
    let found = fixture.wait_pod("found", |pod| pod.address.is_some());
    assert!(!found.ready);
    fixture.send_to_pod("listen");
    let ready = fixture.wait_pod("ready", |pod| pod.ready);
    assert_eq!(ready.address, Some(POD_ADDRESS.parse().expect("an address")));
    assert!(ready.listening_since_ns > 0);
    fixture.send_to_pod("close");
    fixture.wait_pod("unready", |pod| !pod.ready && !pod.listening);
}

#[test]
fn a_listener_from_before_the_agent_is_found_and_followed() {
    let mut fixture = AgentFixture::new("before");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    while fixture.request_fails() {}
    fixture.start_agent();
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.send_to_pod("close");
    fixture.wait_pod("unready", |pod| !pod.ready);
}

#[test]
fn slots_and_counts_outlive_the_agent_and_a_listener_opened_meanwhile_is_found() {
    let mut fixture = AgentFixture::new("restart");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    for _ in 0..3 {
        assert_eq!(fixture.get_status_line(), "HTTP/1.1 200 OK");
    }
    fixture.wait_usage("three requests", |usage| usage.totals.finished == 3);
    let slots = fixture.slots();
    fixture.send_to_pod("close");
    fixture.wait_pod("unready", |pod| !pod.ready);

    fixture.kill_agent();
    fixture.send_to_pod("listen");
    while fixture.request_fails() {}
    fixture.pods.clear();
    fixture.totals.clear();
    fixture.start_agent();
    fixture.wait_pod("ready again", |pod| pod.ready);
    assert_eq!(fixture.slots(), slots);
    // One of them is the request that showed that the pod listens again.
    let usage = fixture.wait_usage("all requests", |usage| usage.totals.finished >= 4);
    assert_eq!((usage.totals.started, usage.totals.finished), (4, 4));
}

#[test]
fn an_http_probe_decides_readiness_once_the_pod_listens() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, http_probe());
    fixture.start_pod();
    fixture.send_to_pod("bad");
    fixture.send_to_pod("listen");
    let failing =
        fixture.wait_pod("failing", |pod| !pod.not_ready_reason.is_empty() && pod.listening);
    assert_eq!(failing.not_ready_reason, "readiness probe failed: GET /ready answered 503");
    assert!(!failing.ready);
    fixture.send_to_pod("good");
    fixture.wait_pod("ready", |pod| pod.ready);
}

#[test]
fn a_tcp_probe_connects_to_the_pod() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Tcp);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
}

#[test]
fn periodic_probes_are_not_counted_as_requests() {
    for probe in [http_probe(), ProbeHandler::Tcp] {
        let mut fixture = SharedAgentFixture::new();
        let passed = fixture.metric_count(PROBES_PASSED);
        fixture.set_probed_pod(RoutingPhase::Starting, probe, Duration::from_millis(1));
        fixture.start_pod();
        fixture.send_to_pod("listen");
        fixture.wait_pod("ready", |pod| pod.ready);
        fixture.wait_metric(PROBES_PASSED, passed + 50);
        for _ in 0..3 {
            assert_eq!(fixture.get_status_line(), "HTTP/1.1 200 OK");
        }
        fixture.wait_metric(PROBES_PASSED, passed + 100);
        let usage = fixture.wait_usage("three requests", |usage| usage.totals.finished >= 3);
        assert_eq!((usage.totals.started, usage.totals.finished), (3, 3));
        let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
        let (maps, slot) = (KernelMaps::open(&pins).expect("pinned maps"), fixture.slot());
        // The last connection may close a moment after its response.
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let mut state = maps.pod_state(slot);
        while (state.connections, state.awaiting_first_request) != (0, 0) {
            assert!(Instant::now() < deadline, "{state:?}");
            thread::sleep(Duration::from_millis(10));
            state = maps.pod_state(slot);
        }
    }
}

#[test]
fn a_draining_pod_is_called_drained_once_it_is_quiet() {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    let drained = fixture.wait_pod("drained", |pod| pod.drained);
    assert_eq!(drained.in_flight, 0);
}
