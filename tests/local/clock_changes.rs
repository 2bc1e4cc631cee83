//! System clock changes while services run: no timer waits for a time that never comes, and no request is lost.

use tests::fake_clock::log_shows_offset;
use tests::http_client::get;
use tests::multi_process_node::{self, MultiProcessNode};
use tests::node_load::{LoadPlan, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::wait::wait_for;

use crate::component_restarts::{
    in_client_netns, kill_and_start, start_with_services, under_load, wait_asleep,
};

/// Manifest of the demo's service.
const HELLO: &str = include_str!("../../examples/hello.yaml");
const HOUR_S: i64 = 3_600;
const DAY_S: i64 = 24 * HOUR_S;

/// Manifest of a service with this name. Its pods end after 20 s at the latest: one that is told to stop while its
/// process starts may have no handler of the signal yet.
fn named_manifest(name: &str) -> String {
    let timed = HELLO.replace("      containers:", "      timeoutSeconds: 20\n      containers:");
    timed.replace("name: hello", &format!("name: {name}"))
}

fn load_plan(node: &RouseNode, name: &str, clients: usize) -> LoadPlan {
    let host = format!("{name}.default.svc.cluster.local");
    let path = "/?sleep=20".to_owned();
    LoadPlan { target: node.wait_ready(name), host, path, clients, keep_alive: true }
}

/// Creates a service, wakes it, lets it scale out, and waits until it sleeps again.
fn new_service(node: &RouseNode, name: &str) {
    assert!(node.apply(&named_manifest(name)).0);
    let burst = load_plan(node, name, 25);
    let (requests, ()) = with_load(node, &burst, |_| {
        wait_for("a third pod", || (node.pods(name).len() > 2).then_some(()));
    });
    assert!(
        lost_requests(&requests).is_empty(),
        "{name}, of {}: {:?}",
        requests.len(),
        lost_requests(&requests)
    );
    node.wait_asleep(name);
}

#[test]
fn a_clock_that_is_set_stops_no_service_from_waking_scaling_and_sleeping() {
    let (node, clock) = RouseNode::start_with_clock("clock");
    let annotations = "max-scale: \"8\"\n        autoscaling.knative.dev/min-scale: \"1\"";
    let steady = named_manifest("steady").replace("max-scale: \"8\"", annotations);
    assert!(node.apply(&[HELLO, &steady].join("---\n")).0);
    let hello_address = node.wait_ready("hello");
    let (requests, ()) = with_load(&node, &load_plan(&node, "steady", 4), |_| {
        for (offset_s, name) in
            [(DAY_S, "ahead"), (-DAY_S, "behind"), (HOUR_S, "later"), (0, "right")]
        {
            node.wait_asleep("hello");
            clock.set_offset(offset_s);
            let response =
                node.in_client_netns(|| get(hello_address, "hello.default.svc.cluster.local", "/"));
            let woken = response.expect("a response");
            assert_eq!(woken.status, 200, "{name}: {woken:?}");
            wait_for("a log by this clock", || {
                log_shows_offset(&node.log(), offset_s).then_some(())
            });
            new_service(&node, name);
        }
        node.wait_asleep("hello");
    });
    assert!(requests.len() > 1000, "only {} were sent", requests.len());
    assert!(
        lost_requests(&requests).is_empty(),
        "of {}: {:?}",
        requests.len(),
        lost_requests(&requests)
    );
    for name in ["hello", "steady", "ahead", "behind", "later", "right"] {
        let ready = node.condition("ksvc", name, "Ready");
        assert_eq!((&*ready.status, &*ready.reason), ("True", ""), "{name}: {ready:?}");
    }
}

/// Their stored state was written by a clock that is ahead of theirs, or behind.
#[test]
fn components_that_restart_after_the_clock_was_set_lose_no_request() {
    let (node, steady, sleeper) = start_with_services(MultiProcessNode::with_clock("reclock"));
    let results = under_load(&node, steady, |results| {
        let starts = [
            (DAY_S, "controller"),
            (-DAY_S, "controller"),
            (-DAY_S, "autoscaler"),
            (HOUR_S, "agent"),
            (0, "activator"),
        ];
        for (offset_s, component) in starts {
            node.set_clock_offset(offset_s);
            let responses = kill_and_start(&node, component, results, (steady, sleeper));
            let message = format!("{component} at {offset_s}: {responses:?}");
            let is_success =
                responses.map(|response| response.is_ok_and(|response| response.status == 200));
            // Requests at the activator are lost when it is killed, at any time of day.
            assert_eq!(is_success, [component != "activator"; 2], "{message}");
            multi_process_node::wait_for("a log by this clock", || {
                log_shows_offset(&node.component_log(component), offset_s).then_some(())
            });
            // The next component finds the service asleep, so that its request wakes the service.
            wait_asleep(&node);
        }
        let response = in_client_netns(&node, || multi_process_node::get_once(sleeper, "/again"))
            .expect("a response");
        assert_eq!(response.status, 200, "{response:?}");
    });
    assert_eq!(results.failures(), [] as [String; 0]);
}
