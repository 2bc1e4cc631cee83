//! Services on standby: while they sleep they keep frozen pods, and the next request thaws one of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::{fs, thread};

use tests::frozen_pods::frozen_pods;
use tests::http_client::get;
use tests::node_load::{LoadPlan, SentRequest, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::test_node::find_leftovers;
use tests::wait::wait_for;

mod components;
mod connections;
mod cycles;

/// Admin port of the agent.
const AGENT: u16 = 7104;

/// Manifest of a service with the shortest window that keeps `pods` frozen pods. `annotations` continue those of its
/// template, and `container` its container, both in YAML's flow style.
fn manifest(name: &str, pods: u32, annotations: &str, container: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}, namespace: default}}
spec:
  template:
    metadata:
      annotations:
        {{autoscaling.knative.dev/window: 6s, rouse.dev/standby: \"{pods}\"{annotations}}}
    spec:
      containers: [{{image: \"dev.local/hello:v1\"{container}}}]
"
    )
}

fn apply(node: &RouseNode, manifest: &str) {
    let (is_applied, output) = node.apply(manifest);
    assert!(is_applied, "{output}");
}

/// Sends one request on a new connection, as a client in the node does.
fn send_request(node: &RouseNode, address: SocketAddr, path: &str) -> SentRequest {
    let (host, path) = ("any".to_owned(), path.to_owned());
    let plan = LoadPlan { target: address, host, path, clients: 1, keep_alive: false };
    node.in_client_netns(|| plan.send_request(None).0)
}

/// Sends one request to each address at the same moment.
fn send_at_once(node: &RouseNode, addresses: &[SocketAddr], path: &str) -> Vec<SentRequest> {
    thread::scope(|scope| {
        let send_one = |address: &SocketAddr| {
            let address = *address;
            scope.spawn(move || send_request(node, address, path))
        };
        let threads: Vec<_> = addresses.iter().map(send_one).collect();
        threads.into_iter().map(|it| it.join().expect("no panic")).collect()
    })
}

/// Asserts that one of these pods answered the request, and that no activator was between.
fn assert_direct(request: &SentRequest, pods: &BTreeSet<String>) {
    assert_eq!(request.lost, None, "{request:?}");
    assert!(request.direct && pods.contains(&request.pod), "{request:?}, not by {pods:?}");
}

/// Number of frozen pods that the agent has thawed for this cause so far.
fn thaw_count(node: &RouseNode, cause: &str) -> u64 {
    let series = format!("rouse_agent_thaws_total{{cause=\"{cause}\"}} ");
    let page = node.metrics(AGENT);
    let count = page.lines().find_map(|line| line.strip_prefix(&series)?.trim().parse().ok());
    count.unwrap_or_else(|| panic!("no {series:?} in {page}"))
}

/// Number of restarts of all containers of a service.
fn restart_count(node: &RouseNode, service: &str) -> u64 {
    let pods = node.pods(service);
    let containers = pods.iter().flat_map(|pod| pod["status"]["containerStatuses"].as_array());
    containers.flatten().filter_map(|it| it["restartCount"].as_u64()).sum()
}

#[test]
fn a_sleeping_service_keeps_a_frozen_pod_that_answers_its_next_requests_directly() {
    const ROUNDS: usize = 2;
    let node = RouseNode::start("standby");
    // Each pod is frozen without a first request: one is the initial pod, the other one starts for the standby.
    apply(&node, &manifest("initial", 1, ", rouse.dev/standby-memory: reclaim", ""));
    apply(&node, &manifest("none", 1, ", autoscaling.knative.dev/initial-scale: \"0\"", ""));
    let services = ["initial", "none"];
    let addresses = services.map(|name| node.wait_ready(name));
    let frozen = services.map(|name| node.wait_frozen(name, 1));
    for _ in 0..ROUNDS {
        for (address, pods) in addresses.iter().zip(&frozen) {
            assert_direct(&send_request(&node, *address, "/"), pods);
        }
        assert_eq!(services.map(|name| node.wait_frozen(name, 1)), frozen, "the same pods");
    }
    wait_for("the table of pods to show both", || {
        let table = node.run_rouse(&["get", "pods", "--no-headers"]);
        (table.matches("Standby").count() == services.len()).then_some(())
    });
    for (name, address) in services.into_iter().zip(addresses) {
        wait_for("the status", || {
            let autoscaler = node.get_object("podautoscaler", &format!("{name}-00001"));
            (autoscaler["status"]["standbyScale"] == 1).then_some(())
        });
        let response = node.in_client_netns(|| get(address, name, "/counts")).expect("a response");
        let started = format!("\"started\":{},", ROUNDS + 1);
        assert!(response.body.contains(&started), "{name}: {started} in {response:?}");
    }
    // Nothing else has thawed a pod: each of these requests found it frozen.
    let requests = u64::try_from(services.len() * (ROUNDS + 1)).expect("a few");
    wait_for("every thaw to be counted", || {
        (thaw_count(&node, "request") >= requests).then_some(())
    });
    let causes = ["request", "probe", "kubelet", "other"].map(|cause| thaw_count(&node, cause));
    assert_eq!(causes, [requests, 0, 0, 0]);
}

#[test]
fn a_burst_thaws_two_frozen_pods_and_starts_no_other_one() {
    let node = RouseNode::start("standby-two");
    apply(&node, &manifest("pair", 2, "", ""));
    let address = node.wait_ready("pair");
    let frozen = node.wait_frozen("pair", 2);
    let requests = send_at_once(&node, &[address; 20], "/?sleep=200");
    requests.iter().for_each(|request| assert_direct(request, &frozen));
    let used: BTreeSet<String> = requests.into_iter().map(|request| request.pod).collect();
    assert_eq!(used, frozen, "both have answered");
    assert_eq!(node.wait_frozen("pair", 2), frozen);
}

#[test]
fn twenty_services_are_woken_at_once_without_the_start_of_a_pod() {
    let node = RouseNode::start("standby-many");
    let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
    let manifests: Vec<String> = names.iter().map(|name| manifest(name, 1, "", "")).collect();
    apply(&node, &manifests.join("---\n"));
    let addresses: Vec<SocketAddr> = names.iter().map(|name| node.wait_ready(name)).collect();
    wait_for("all pods to be frozen", || {
        (frozen_pods(&node.layout).len() == names.len()).then_some(())
    });
    let list_pods = || node.run_rouse(&["get", "pods", "-o", "name"]);
    let before = list_pods();
    let requests = send_at_once(&node, &addresses, "/");
    assert_eq!(list_pods(), before);
    for (name, request) in names.iter().zip(&requests) {
        assert_eq!(request.lost, None, "{name}");
        assert!(
            request.direct && request.pod.starts_with(&format!("{name}-00001-")),
            "{request:?}"
        );
    }
}

#[test]
fn load_scales_a_service_out_from_its_frozen_pod_and_leaves_one_again() {
    let node = RouseNode::start("standby-load");
    let scaling =
        ", autoscaling.knative.dev/target: \"2\", autoscaling.knative.dev/max-scale: \"4\"";
    apply(&node, &manifest("grows", 1, scaling, ""));
    let target = node.wait_ready("grows");
    let first = node.wait_frozen("grows", 1);
    let (host, path) = ("any".to_owned(), "/?sleep=50".to_owned());
    let plan = LoadPlan { target, host, path, clients: 8, keep_alive: false };
    let (requests, ()) = with_load(&node, &plan, |_| {
        wait_for("a third pod", || (node.pods("grows").len() >= 3).then_some(()));
    });
    assert!(lost_requests(&requests).is_empty(), "{:?}", lost_requests(&requests));
    assert!(requests.iter().any(|it| first.contains(&it.pod)), "the frozen pod took part");
    node.wait_frozen("grows", 1);
}

#[test]
fn a_new_revision_never_uses_the_frozen_pod_of_an_old_one() {
    let node = RouseNode::start("standby-new");
    let version =
        |text: &str| manifest("rolled", 1, "", &format!(", env: [{{name: V, value: {text}}}]"));
    apply(&node, &version("one"));
    let address = node.wait_ready("rolled");
    let old = node.wait_frozen("rolled", 1);
    apply(&node, &version("two"));
    let new = wait_for("the only frozen pod to be of the new revision", || {
        let frozen = node.frozen_pods("rolled");
        let is_new = frozen.iter().all(|pod| pod.starts_with("rolled-00002-"));
        (is_new && frozen.len() == 1 && node.pods("rolled").len() == 1).then_some(frozen)
    });
    assert!(new.is_disjoint(&old));
    assert_direct(&send_request(&node, address, "/"), &new);
}

#[test]
fn a_frozen_pod_ends_after_its_longest_time_and_the_next_request_starts_one() {
    let node = RouseNode::start("standby-ttl");
    apply(&node, &manifest("aged", 1, ", rouse.dev/standby-ttl: 4s", ""));
    let address = node.wait_ready("aged");
    let first = node.wait_frozen("aged", 1);
    node.wait_asleep("aged");
    let request = send_request(&node, address, "/");
    assert_eq!(request.lost, None, "{request:?}");
    assert!(!first.contains(&request.pod), "{request:?}");
    assert!(node.wait_frozen("aged", 1).contains(&request.pod), "the woken pod is on standby");
}

#[test]
fn the_frozen_pod_of_a_deleted_service_ends_in_order() {
    let node = RouseNode::start("standby-end");
    apply(&node, &manifest("ended", 1, "", ""));
    node.wait_ready("ended");
    let frozen = node.wait_frozen("ended", 1);
    node.run_rouse(&["delete", "ksvc", "ended"]);
    // A pod that stayed frozen could not end on SIGTERM, and a kill would come after five minutes.
    node.wait_asleep("ended");
    for pod in frozen {
        let logs = fs::read_dir(node.layout.pod_logs("default", &pod)).expect("a pod leaves logs");
        let files = logs.flatten().map(|file| file.path());
        let text: String = files.filter_map(|file| fs::read_to_string(file).ok()).collect();
        assert!(text.contains("\"in_flight\":0"), "its last line, on SIGTERM, in {text:?}");
    }
}

#[test]
fn a_node_that_goes_down_leaves_nothing_of_its_frozen_pods() {
    let node = RouseNode::start("standby-down");
    apply(&node, &manifest("kept", 2, "", ""));
    node.wait_ready("kept");
    node.wait_frozen("kept", 2);
    let layout = node.layout.clone();
    // Asserts that `rouse down` and `rouse up` end with success.
    drop(node);
    assert_eq!(find_leftovers(layout.name()), [] as [String; 0]);
}

#[test]
fn an_annotation_without_a_meaning_is_refused_and_one_without_effect_is_told() {
    let node = RouseNode::start("standby-bad");
    for (name, annotation, message) in [
        ("many", "standby: \"11\"", "expected 0 <= 11 <= 10"),
        ("few", "standby: \"-1\"", "expected 0 <= -1 <= 10"),
        ("word", "standby: one", "invalid value: one"),
        ("swap", "standby-memory: swap", "use keep or reclaim"),
        ("zero", "standby-ttl: 0s", "must be positive"),
    ] {
        let yaml = manifest(name, 1, "", "").replace("standby: \"1\"", annotation);
        let (_, printed) = node.apply(&yaml);
        assert!(printed.contains(message), "{name}: {message:?} in {printed:?}");
        assert!(printed.contains("rouse.dev/standby"), "{name}: its name in {printed:?}");
    }
    // A command cannot run in a frozen pod, so this service sleeps without one.
    let probe = ", livenessProbe: {exec: {command: [/no/such]}, periodSeconds: 3600}";
    apply(&node, &manifest("exec", 1, "", probe));
    node.wait_ready("exec");
    node.wait_asleep("exec");
    let reason = wait_for("the reason", || {
        let condition = node.condition("revision", "exec-00001", "StandbyAvailable");
        (condition.status == "False").then_some(condition.message)
    });
    assert!(reason.contains("a probe runs a command"), "{reason}");
}
