//! Life of a sleeping service for its users: woken by a request, scaled by load, and scaled to zero without losses.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::{fs, thread};

use local::layout;
use serde_json::Value;
use tests::http_client::{PlainHttpClient, get};
use tests::node_load::{LoadPlan, RunningLoad, SentRequest, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::scenarios;
use tests::wait::wait_for;

use crate::gateway::curl_and_h2load_speak_http2_with_a_service_that_slept;

/// Manifest of the demo's service.
const HELLO: &str = include_str!("../../examples/hello.yaml");
/// Services of the test of cycles, which run at the same time, and cycles of each.
const CYCLED_SERVICES: usize = 7;
const CYCLES: usize = 3;

/// Manifest of the demo's service whose pods end after 30 s at the latest: one that is told to stop while its process
/// starts may have no handler of the signal yet.
fn hello_manifest() -> String {
    HELLO.replace("      containers:", "      timeoutSeconds: 30\n      containers:")
}

/// Manifest of a service with the shortest window and a target of two requests in a pod.
fn manifest(name: &str) -> String {
    let hello = hello_manifest().replace("name: hello", &format!("name: {name}"));
    hello.replace("target: \"10\"", "target: \"2\"").replace("max-scale: \"8\"", "max-scale: \"4\"")
}

/// Load on the service at `target`, whatever its name: inside the node a Host header has no effect.
fn load_plan(target: SocketAddr, clients: usize, keep_alive: bool) -> LoadPlan {
    let host = "hello.default.svc.cluster.local".to_owned();
    LoadPlan { target, host, path: "/?sleep=50".to_owned(), clients, keep_alive }
}

/// Number of pods of a service that are ready.
fn ready_pods(node: &RouseNode, service: &str) -> usize {
    let is_ready = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array();
        conditions.is_some_and(|list| {
            list.iter()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        })
    };
    node.stored_pods(service).iter().filter(is_ready).count()
}

/// Waits until `count` more requests have ended.
fn wait_progress(running: &RunningLoad<'_>, count: usize) {
    let before = running.count();
    wait_for("requests to end", || (running.count() >= before + count).then_some(()));
}

fn send_waking_request(
    node: &RouseNode,
    address: SocketAddr,
    host: &str,
) -> tests::http_client::ClientResponse {
    node.in_client_netns(|| get(address, host, "/")).expect("a response")
}

#[test]
fn services_of_one_node_wake_for_each_kind_of_client_scale_go_direct_and_sleep() {
    let node = RouseNode::start("services");
    // Before the scenarios: without their node all of them would fail.
    a_process_in_the_node_cannot_take_it_down(&node);
    scenarios::run_at_once(
        &node,
        &scenarios![
            a_service_wakes_scales_goes_direct_and_sleeps_without_losing_a_request,
            commands_that_run_inside_the_node_at_once_share_its_resolv_conf,
            a_service_wakes_and_goes_direct_over_ipv6,
            the_address_alone_wakes_whatever_the_host_header_says,
            the_gateway_routes_by_host_and_refuses_unknown_hosts,
            curl_and_h2load_speak_http2_with_a_service_that_slept,
            a_service_whose_pod_is_probed_all_the_time_sleeps_like_any_other,
        ],
    );
}

fn a_service_wakes_scales_goes_direct_and_sleeps_without_losing_a_request(node: &RouseNode) {
    assert!(node.apply(&hello_manifest()).0);
    let address = node.wait_ready("hello");
    assert_eq!(node.pods("hello").len(), 0, "asleep before the first request");

    let first = send_waking_request(node, address, "hello.default.svc.cluster.local");
    assert_eq!((first.status, node.stored_pods("hello").len()), (200, 1), "{first:?}");
    assert!(first.body.starts_with("Hello from hello-00001-"), "{first:?}");

    wait_for("a ready pod", || (ready_pods(node, "hello") == 1).then_some(()));
    let fresh = LoadPlan { path: "/?sleep=100".to_owned(), ..load_plan(address, 20, false) };
    let keep_alive = LoadPlan { keep_alive: true, ..fresh.clone() };
    let (mut requests, (others, max_pods)) = with_load(node, &fresh, |_| {
        with_load(node, &keep_alive, |running| {
            let max_pods = wait_for("three ready pods", || {
                Some(ready_pods(node, "hello")).filter(|ready| *ready >= 3)
            });
            // Clients that connect while only the first pod is ready may all go through the activator.
            wait_progress(running, 2_000);
            max_pods
        })
    });
    requests.extend(others);
    assert!(
        lost_requests(&requests).is_empty(),
        "of {}: {:?}",
        requests.len(),
        lost_requests(&requests)
    );
    assert!(max_pods >= 3);
    let new: Vec<&SentRequest> =
        requests.iter().filter(|request| request.on_new_connection).collect();
    let direct = new.iter().filter(|request| request.direct).count();
    assert!(
        direct * 100 >= new.len() * 95,
        "{direct} of {} new connections went direct",
        new.len()
    );
    let pods: std::collections::BTreeSet<&str> =
        requests.iter().map(|request| request.pod.as_str()).collect();
    assert!(pods.len() >= 3, "responses came from {pods:?}");

    node.wait_asleep("hello");
    let second = send_waking_request(node, address, "hello.default.svc.cluster.local");
    assert_eq!((second.status, node.stored_pods("hello").len()), (200, 1), "{second:?}");
    assert_ne!(second.header("x-pod"), first.header("x-pod"), "a new pod");
}

/// On the direct path the client's node must answer neighbour discovery for the pod.
fn a_service_wakes_and_goes_direct_over_ipv6(node: &RouseNode) {
    assert!(node.apply(&manifest("six")).0);
    node.wait_ready("six");
    let address = node.cluster_ipv6("six");
    let first = send_waking_request(node, address, "six");
    assert_eq!(first.status, 200, "{first:?}");
    assert!(first.header("x-pod").starts_with("six-00001-"), "{first:?}");
    wait_for("a direct connection over IPv6", || {
        let is_direct = node.in_client_netns(|| {
            let mut client = PlainHttpClient::connect(address).expect("a connection over IPv6");
            let response = client.get("six", "/").expect("a response");
            response.header("x-peer") == client.local_ip()
        });
        is_direct.then_some(())
    });
}

/// Wakes one service, puts load on it and lets it sleep, `count` times. With `keep_alive`, each client of the load
/// keeps its connection; the client that wakes the service always does.
fn run_cycles(node: &RouseNode, service: &str, count: usize, keep_alive: bool) -> Vec<SentRequest> {
    let address = node.wait_ready(service);
    let plan = load_plan(address, 6, keep_alive);
    let mut requests = Vec::new();
    let mut pooled = None;
    for cycle in 0..count {
        let (response, client) = node.in_client_netns(|| plan.send_request(pooled.take()));
        pooled = client;
        assert_eq!(response.lost, None, "{service}, cycle {cycle}: the request that wakes");
        requests.push(response);
        let (during, ()) = with_load(node, &plan, |running| {
            wait_for("a second pod", || (ready_pods(node, service) >= 2).then_some(()));
            wait_progress(running, 50);
        });
        assert!(
            lost_requests(&during).is_empty(),
            "{service}, cycle {cycle}: {:?}",
            lost_requests(&during)
        );
        requests.extend(during);
        node.wait_asleep(service);
    }
    requests
}

#[test]
fn twenty_one_cycles_lose_no_request_on_new_or_persistent_connections() {
    // A window is at least 6 s, so cycles in sequence would take minutes.
    let node = RouseNode::start("cycles");
    let services: Vec<String> =
        (0..CYCLED_SERVICES).map(|number| format!("cycled-{number}")).collect();
    let manifests: Vec<String> = services.iter().map(|service| manifest(service)).collect();
    assert!(node.apply(&manifests.join("---\n")).0);
    thread::scope(|scope| {
        let node = &node;
        let mut running = Vec::new();
        for (number, service) in services.iter().enumerate() {
            let keep_alive = number % 2 == 0;
            let cycles = move || run_cycles(node, service, CYCLES, keep_alive);
            running.push((keep_alive, scope.spawn(cycles)));
        }
        for (keep_alive, cycles) in running {
            let requests = cycles.join().expect("no request lost");
            let persistent = requests.iter().filter(|request| !request.on_new_connection).count();
            // The request that wakes may find its connection to the activator still open.
            let (min, max) =
                if keep_alive { (requests.len() / 2, requests.len()) } else { (0, CYCLES) };
            assert!(
                (min..=max).contains(&persistent),
                "{persistent} of {} were kept",
                requests.len()
            );
        }
    });
}

/// A file that is being replaced cannot be mounted, so the commands must not replace it.
fn commands_that_run_inside_the_node_at_once_share_its_resolv_conf(node: &RouseNode) {
    let file = || fs::metadata(node.layout.resolv_conf()).expect("the node wrote it").ino();
    let before = file();
    let inside = || node.run_rouse(&["run", "--", "cat", "/etc/resolv.conf"]);
    thread::scope(|scope| {
        let running: Vec<_> = (0..8).map(|_| scope.spawn(inside)).collect();
        for thread in running {
            let output = thread.join().expect("it runs");
            assert!(output.contains(&layout::DNS_ADDRESS.to_string()), "{output}");
        }
    });
    assert_eq!(file(), before);
}

/// The removal of a node kills each process in its cgroups.
fn a_process_in_the_node_cannot_take_it_down(node: &RouseNode) {
    // This process is a client in the node, and so are its children.
    let output = node.try_run(&["down"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("leave `rouse run`"), "{message}");
    assert!(node.apply(&manifest("inside")).0);
    node.wait_ready("inside");
}

fn the_address_alone_wakes_whatever_the_host_header_says(node: &RouseNode) {
    for service in ["bare", "foreign", "other"] {
        assert!(node.apply(&manifest(service)).0);
    }
    let bare = node.wait_ready("bare");
    let foreign = node.wait_ready("foreign");
    let ip: IpAddr = bare.ip();
    let response = send_waking_request(node, bare, &ip.to_string());
    assert_eq!(response.status, 200, "{response:?}");
    assert!(response.header("x-pod").starts_with("bare-00001-"), "{response:?}");
    let response = send_waking_request(node, foreign, "other.default.svc.cluster.local");
    assert_eq!(response.status, 200, "{response:?}");
    assert!(response.header("x-pod").starts_with("foreign-00001-"), "{response:?}");
    assert_eq!(node.pods("other").len(), 0, "a Host header wakes no service inside the node");
}

fn the_gateway_routes_by_host_and_refuses_unknown_hosts(node: &RouseNode) {
    const HOST: &str = "outside.default.localhost";
    assert!(node.apply(&manifest("outside")).0);
    node.wait_ready("outside");
    let mut client = PlainHttpClient::connect(node.gateway).expect("a gateway");
    for host in [HOST.to_owned(), format!("{HOST}:{}", node.gateway.port())] {
        let response = client.get(&host, "/").expect("a response");
        assert_eq!(response.status, 200, "{response:?}");
        assert!(response.header("x-pod").starts_with("outside-00001-"), "{response:?}");
    }
    for host in ["nobody.default.localhost", "outside.default.example.org", "10.96.0.10"] {
        let response = client.get(host, "/").expect("a response");
        assert_eq!(response.status, 404, "{host}: {response:?}");
    }
    // The gateway keeps its client connections, also after a request to an unknown host.
    assert_eq!(client.get(HOST, "/").expect("a response").status, 200);
}

fn a_service_whose_pod_is_probed_all_the_time_sleeps_like_any_other(node: &RouseNode) {
    let image = "- image: dev.local/hello:v1";
    let times = "periodSeconds: 1, timeoutSeconds: 10";
    for (name, action) in [("http", "httpGet: { path: /ready }"), ("tcp", "tcpSocket: {}")] {
        let probed = format!("{image}\n          readinessProbe: {{ {action}, {times} }}");
        assert!(node.apply(&manifest(name).replace(image, &probed)).0);
    }
    for name in ["http", "tcp"] {
        let address = node.wait_ready(name);
        assert_eq!(send_waking_request(node, address, name).status, 200);
    }
    node.wait_asleep("http");
    node.wait_asleep("tcp");
}
