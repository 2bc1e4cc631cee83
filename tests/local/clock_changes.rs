//! System clock changes while services run: no timer waits for a time that never comes, and no request is lost.

use std::net::SocketAddr;

use tests::fake_clock::log_shows_offset;
use tests::http_client::get;
use tests::multi_process_node::{self, MultiProcessNode};
use tests::node_load::{LoadPlan, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::wait::wait_for;

use crate::component_restarts::{
    assert_woken_again, kill_and_start, start_with_services, under_load, wait_asleep,
};

/// Manifest of the demo's service.
const HELLO: &str = include_str!("../../examples/hello.yaml");
const HOUR_S: i64 = 3_600;
const DAY_S: i64 = 24 * HOUR_S;
/// Changes of the clock: its distance from the machine's in seconds, and the name of a service that is created by it.
const CHANGES: [(i64, &str); 4] =
    [(DAY_S, "ahead"), (-DAY_S, "behind"), (HOUR_S, "later"), (0, "right")];

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

/// Sends a request that wakes a service.
fn wake(node: &RouseNode, address: SocketAddr, name: &str) {
    let host = format!("{name}.default.svc.cluster.local");
    let response = node.in_client_netns(|| get(address, &host, "/")).expect("a response");
    assert_eq!(response.status, 200, "{name}: {response:?}");
}

/// Creates a service, and wakes it by load until it has scaled out.
fn scale_out_new_service(node: &RouseNode, name: &str) {
    assert!(node.apply(&named_manifest(name)).0);
    // Requests that take long are in flight most of the time, however long the clients wait for a processor.
    let burst = LoadPlan { path: "/?sleep=200".to_owned(), ..load_plan(node, name, 25) };
    let (requests, ()) = with_load(node, &burst, |_| {
        wait_for("a third pod", || (node.stored_pods(name).len() > 2).then_some(()));
    });
    assert!(
        lost_requests(&requests).is_empty(),
        "{name}, of {}: {:?}",
        requests.len(),
        lost_requests(&requests)
    );
}

#[test]
fn a_clock_that_is_set_stops_no_service_from_waking_scaling_and_sleeping() {
    let (node, clock) = RouseNode::start_with_clock("clock");
    let annotations = "max-scale: \"8\"\n        autoscaling.knative.dev/min-scale: \"1\"";
    let steady = named_manifest("steady").replace("max-scale: \"8\"", annotations);
    // One for each change: those of earlier changes still wait for the end of their windows.
    let sleepers = CHANGES.map(|(_, name)| format!("sleeper-{name}"));
    let manifests = sleepers.iter().map(|name| named_manifest(name)).chain([steady]);
    assert!(node.apply(&manifests.collect::<Vec<_>>().join("---\n")).0);
    let addresses = sleepers.each_ref().map(|name| node.wait_ready(name));
    let created = CHANGES.map(|(_, name)| name.to_owned());
    let all_sleepers: Vec<&String> = sleepers.iter().chain(&created).collect();
    let (requests, ()) = with_load(&node, &load_plan(&node, "steady", 4), |running| {
        let sleepers = sleepers.iter().zip(addresses);
        for ((offset_s, name), (sleeper, address)) in CHANGES.into_iter().zip(sleepers.clone()) {
            clock.set_offset(offset_s);
            wake(&node, address, sleeper);
            wait_for("a log by this clock", || {
                log_shows_offset(&node.log(), offset_s).then_some(())
            });
            scale_out_new_service(&node, name);
        }
        // Windows and stops that began by one clock end by another one.
        all_sleepers.iter().for_each(|name| node.wait_asleep(name));
        sleepers.for_each(|(sleeper, address)| wake(&node, address, sleeper));
        wait_for("a thousand requests", || (running.count() > 1000).then_some(()));
    });
    assert!(
        lost_requests(&requests).is_empty(),
        "of {}: {:?}",
        requests.len(),
        lost_requests(&requests)
    );
    for name in all_sleepers.into_iter().map(String::as_str).chain(["steady"]) {
        let ready = node.condition("ksvc", name, "Ready");
        assert_eq!((&*ready.status, &*ready.reason), ("True", ""), "{name}: {ready:?}");
    }
}

/// The stored state was written by a clock that is ahead of that of the components, or behind.
#[test]
fn components_that_restart_after_the_clock_was_set_lose_no_request() {
    let starts = [
        (DAY_S, "controller"),
        (-DAY_S, "controller"),
        (-DAY_S, "autoscaler"),
        (HOUR_S, "agent"),
        (0, "activator"),
    ];
    let node = MultiProcessNode::with_clock("reclock");
    let (node, steady, sleepers) = start_with_services(node, starts.len());
    let results = under_load(&node, steady, |results| {
        for ((offset_s, component), sleeper) in starts.into_iter().zip(&sleepers) {
            node.set_clock_offset(offset_s);
            let responses = kill_and_start(&node, component, results, (steady, *sleeper));
            let message = format!("{component} at {offset_s}: {responses:?}");
            let is_success =
                responses.map(|response| response.is_ok_and(|response| response.status == 200));
            // Requests at the activator are lost when it is killed, at any time of day.
            assert_eq!(is_success, [component != "activator"; 2], "{message}");
            multi_process_node::wait_for("a log by this clock", || {
                log_shows_offset(&node.component_log(component), offset_s).then_some(())
            });
        }
        // Also those whose windows began by another clock, or before a component was killed.
        wait_asleep(&node, &sleepers);
        assert_woken_again(&node, &sleepers);
    });
    assert_eq!(results.failures(), [] as [String; 0]);
}
