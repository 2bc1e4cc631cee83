//! Services on standby: while they sleep they keep frozen pods, and the next request thaws one of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::{fs, thread};

use serde_json::Value;
use tests::http_client::get;
use tests::node_load::{LoadPlan, SentRequest, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::scenarios;
use tests::test_node::find_leftovers;
use tests::wait::wait_for;

mod components;
mod connections;
mod cycles;

/// Admin port of the agent.
const AGENT: u16 = 7104;
/// Options of `rouse up` for these tests, in which frozen pods answer themselves. While containers start and programs
/// are built, the agent of a busy machine may answer later than the default of 250 ms. Its pods would be passed over
/// then, and requests would take the activator's path. Other tiers check with the default that pods are passed over.
const UP_OPTIONS: [&str; 2] = ["--standby-agent-timeout", "30s"];
/// Causes of thaws, as logs and metrics name them.
const CAUSES: [&str; 4] = ["request", "probe", "kubelet", "other"];

/// Manifest of a service with the shortest window that keeps `pods` frozen pods. They start for the standby, so they are
/// frozen once they are ready. `annotations` continue those of its template, and `container` its container, both in
/// YAML's flow style.
fn manifest(name: &str, pods: u32, annotations: &str, container: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}, namespace: default}}
spec:
  template:
    metadata:
      annotations:
        {{autoscaling.knative.dev/window: 6s, autoscaling.knative.dev/initial-scale: \"0\",
          rouse.dev/standby: \"{pods}\"{annotations}}}
    spec:
      containers: [{{image: \"dev.local/hello:v1\"{container}}}]
"
    )
}

/// The same manifest with an initial pod, which is frozen only after a window without requests.
fn with_initial_pod(manifest: &str) -> String {
    manifest.replace("initial-scale: \"0\"", "initial-scale: \"1\"")
}

fn apply(node: &RouseNode, manifest: &str) {
    let (is_applied, output) = node.apply(manifest);
    assert!(is_applied, "{output}");
}

/// Plan of one client that opens a connection for each request. Its Host header names no service.
fn client(target: SocketAddr, path: &str) -> LoadPlan {
    let (host, path) = ("any".to_owned(), path.to_owned());
    LoadPlan { target, host, path, clients: 1, keep_alive: false }
}

/// Sends one request on a new connection, as a client in the node does.
fn send_request(node: &RouseNode, address: SocketAddr, path: &str) -> SentRequest {
    let plan = client(address, path);
    node.in_client_netns(|| plan.send_request(None).0)
}

/// Sends one request on each of `count` new connections, all at the same moment.
fn send_at_once(
    node: &RouseNode,
    address: SocketAddr,
    path: &str,
    count: usize,
) -> Vec<SentRequest> {
    let (plan, barrier) = (client(address, path), Barrier::new(count));
    let (plan, barrier) = (&plan, &barrier);
    thread::scope(|scope| {
        let send_one = |_| {
            scope.spawn(move || {
                node.enter_client_netns();
                // Requests that began one after the other would all go to the pod that the first one has woken.
                barrier.wait();
                plan.send_request(None).0
            })
        };
        let threads: Vec<_> = (0..count).map(send_one).collect();
        threads.into_iter().map(|it| it.join().expect("no panic")).collect()
    })
}

/// Asserts that one of these pods answered the request, and that no activator was between.
fn assert_direct(request: &SentRequest, pods: &BTreeSet<String>) {
    assert_eq!(request.lost, None, "{request:?}");
    assert!(request.direct && pods.contains(&request.pod), "{request:?}, not by {pods:?}");
}

/// Number of thaws for each of [`CAUSES`] in those lines of the agent's log that `is_meant` accepts.
fn count_thaws(log: &str, is_meant: impl Fn(&str) -> bool) -> [usize; 4] {
    let is_thaw = |line: &&str| line.contains("pod thawed") && is_meant(line);
    let thaws: Vec<&str> = log.lines().filter(is_thaw).collect();
    CAUSES.map(|cause| {
        let field = format!("cause=\"{cause}\"");
        thaws.iter().filter(|line| line.contains(&field)).count()
    })
}

/// Number of thaws of a service's pods for each of [`CAUSES`] so far, by the agent's log: its metric counts the pods of
/// all services.
fn thaws_of(node: &RouseNode, service: &str) -> [usize; 4] {
    let pods = node.stored_pods(service);
    let uids: Vec<&str> = pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str()).collect();
    count_thaws(&node.log(), |line| uids.iter().any(|uid| line.contains(*uid)))
}

/// Number of thaws of all pods for each of [`CAUSES`] so far, by the agent's metric.
fn exported_thaws(node: &RouseNode) -> [usize; 4] {
    let page = node.metrics(AGENT);
    CAUSES.map(|cause| {
        let series = format!("rouse_agent_thaws_total{{cause=\"{cause}\"}} ");
        let count = page.lines().find_map(|line| line.strip_prefix(&series)?.trim().parse().ok());
        count.unwrap_or_else(|| panic!("no {series:?} in {page}"))
    })
}

/// Number of restarts of all containers of a service.
fn restart_count(node: &RouseNode, service: &str) -> u64 {
    let pods = node.pods(service);
    let containers = pods.iter().flat_map(|pod| pod["status"]["containerStatuses"].as_array());
    containers.flatten().filter_map(|it| it["restartCount"].as_u64()).sum()
}

#[test]
fn pods_on_standby_are_frozen_thawed_and_ended_and_a_node_that_goes_down_leaves_nothing_of_them() {
    let node = RouseNode::start_with_options("standby", &UP_OPTIONS);
    scenarios::run_at_once(
        &node,
        &scenarios![
            a_sleeping_service_keeps_a_frozen_pod_that_answers_its_next_requests_directly,
            a_burst_thaws_two_frozen_pods_and_starts_no_other_one,
            load_scales_a_service_out_from_its_frozen_pod_and_leaves_one_again,
            a_new_revision_never_uses_the_frozen_pod_of_an_old_one,
            a_frozen_pod_ends_after_its_longest_time_and_the_next_request_starts_one,
            the_frozen_pod_of_a_deleted_service_ends_in_order,
            an_annotation_without_a_meaning_is_refused_and_one_without_effect_is_told,
            connections::a_request_on_a_connection_from_before_the_freeze_thaws_the_pod,
            connections::a_pod_whose_server_speaks_first_is_thawed_and_runs_until_its_close,
            cycles::probes_thaw_a_frozen_pod_for_their_answers_alone_and_restart_nothing,
        ],
    );
    node.wait_frozen("pair", 2);
    let layout = node.layout.clone();
    // Asserts that `rouse down` and `rouse up` end with success.
    drop(node);
    assert_eq!(find_leftovers(layout.name()), [] as [String; 0]);
}

fn a_sleeping_service_keeps_a_frozen_pod_that_answers_its_next_requests_directly(node: &RouseNode) {
    const ROUNDS: usize = 2;
    // Each pod is frozen without a first request: one is the initial pod, the other one starts for the standby.
    let initial = manifest("initial", 1, ", rouse.dev/standby-memory: reclaim", "");
    apply(node, &with_initial_pod(&initial));
    apply(node, &manifest("none", 1, "", ""));
    let services = ["initial", "none"];
    let addresses = services.map(|name| node.wait_ready(name));
    let frozen = services.map(|name| node.wait_frozen(name, 1));
    for _ in 0..ROUNDS {
        for (address, pods) in addresses.iter().zip(&frozen) {
            assert_direct(&send_request(node, *address, "/"), pods);
        }
        assert_eq!(services.map(|name| node.wait_frozen(name, 1)), frozen, "the same pods");
    }
    for (name, address) in services.into_iter().zip(addresses) {
        assert_shown_on_standby(node, name);
        let response = node.in_client_netns(|| get(address, name, "/counts")).expect("a response");
        let started = format!("\"started\":{},", ROUNDS + 1);
        assert!(response.body.contains(&started), "{name}: {started} in {response:?}");
        assert_thawed_by_requests(node, name, ROUNDS + 1);
    }
    // Pods of other services are thawed meanwhile.
    wait_for("the metric to count each thaw of the log", || {
        (exported_thaws(node) == count_thaws(&node.log(), |_| true)).then_some(())
    });
}

/// Asserts that each of this number of requests has thawed the frozen pod of a service, and nothing else has.
///
/// An agent that gets no processor for seconds thaws the pod for a check or an order that comes late. A request right
/// after that finds the pod running. So such a thaw may stand for that of a request, but there are fewer of them.
fn assert_thawed_by_requests(node: &RouseNode, service: &str, requests: usize) {
    wait_for("every thaw to be logged", || {
        let [by_request, _, _, by_other] = thaws_of(node, service);
        (by_request + by_other >= requests).then_some(())
    });
    let thaws = thaws_of(node, service);
    let [by_request, by_probe, by_kubelet, by_other] = thaws;
    assert_eq!((by_probe, by_kubelet), (0, 0), "{service}: {thaws:?} for {CAUSES:?}");
    assert!(
        by_request <= requests && by_other < by_request,
        "{service}: {thaws:?} for {CAUSES:?}, after {requests} requests"
    );
}

/// Asserts that the table of pods and the status of the PodAutoscaler show users one frozen pod of a service.
fn assert_shown_on_standby(node: &RouseNode, service: &str) {
    let selector = format!("serving.knative.dev/service={service}");
    wait_for("the table of pods to show it", || {
        let table = node.run_rouse(&["get", "pods", "-l", &selector, "--no-headers"]);
        (table.matches("Standby").count() == 1).then_some(())
    });
    wait_for("the status", || {
        let autoscaler = node.get_object("podautoscaler", &format!("{service}-00001"));
        (autoscaler["status"]["standbyScale"] == 1).then_some(())
    });
}

fn a_burst_thaws_two_frozen_pods_and_starts_no_other_one(node: &RouseNode) {
    const BURSTS: usize = 3;
    apply(node, &manifest("pair", 2, "", ""));
    let address = node.wait_ready("pair");
    let frozen = node.wait_frozen("pair", 2);
    // A pod that the agent has thawed a moment before, for a late check, takes the whole burst alone.
    let are_both_used = (0..BURSTS).any(|_| {
        let requests = send_at_once(node, address, "/?sleep=200", 20);
        requests.iter().for_each(|request| assert_direct(request, &frozen));
        assert_eq!(node.wait_frozen("pair", 2), frozen, "no other pod has started");
        let used: BTreeSet<String> = requests.into_iter().map(|request| request.pod).collect();
        used == frozen
    });
    assert!(are_both_used, "one pod alone has answered each of {BURSTS} bursts");
}

fn load_scales_a_service_out_from_its_frozen_pod_and_leaves_one_again(node: &RouseNode) {
    let scaling =
        ", autoscaling.knative.dev/target: \"2\", autoscaling.knative.dev/max-scale: \"4\"";
    // A pod that is told to stop while its process starts may have no handler of the signal yet. It is killed then.
    let timeout = "    spec:\n      timeoutSeconds: 30\n";
    apply(node, &manifest("grows", 1, scaling, "").replace("    spec:\n", timeout));
    let target = node.wait_ready("grows");
    let first = node.wait_frozen("grows", 1);
    // Requests that take long are in flight most of the time, however long the clients wait for a processor.
    let plan = LoadPlan { clients: 8, ..client(target, "/?sleep=200") };
    let (requests, ()) = with_load(node, &plan, |_| {
        wait_for("a third pod", || (node.stored_pods("grows").len() >= 3).then_some(()));
    });
    assert!(lost_requests(&requests).is_empty(), "{:?}", lost_requests(&requests));
    assert!(requests.iter().any(|it| first.contains(&it.pod)), "the frozen pod took part");
    node.wait_frozen("grows", 1);
}

fn a_new_revision_never_uses_the_frozen_pod_of_an_old_one(node: &RouseNode) {
    let version = |text: &str| {
        let env = format!(", env: [{{name: V, value: {text}}}]");
        with_initial_pod(&manifest("rolled", 1, "", &env))
    };
    apply(node, &version("one"));
    let address = node.wait_ready("rolled");
    let old = node.wait_frozen("rolled", 1);
    apply(node, &version("two"));
    wait_for("the pods of the old revision to end", || {
        let pods = node.stored_pods("rolled");
        let is_new = |pod: &Value| {
            let name = pod["metadata"]["name"].as_str();
            name.is_some_and(|name| name.starts_with("rolled-00002-"))
        };
        (!pods.is_empty() && pods.iter().all(is_new)).then_some(())
    });
    let new = node.wait_frozen("rolled", 1);
    assert!(new.iter().all(|pod| pod.starts_with("rolled-00002-")), "{new:?}");
    assert!(new.is_disjoint(&old));
    assert_direct(&send_request(node, address, "/"), &new);
}

fn a_frozen_pod_ends_after_its_longest_time_and_the_next_request_starts_one(node: &RouseNode) {
    // The time of a pod that starts for the standby would begin before the pod is frozen.
    // A busy machine takes seconds of it to freeze the pod.
    apply(node, &with_initial_pod(&manifest("aged", 1, ", rouse.dev/standby-ttl: 12s", "")));
    // Before any command of users, which may take as long as the pod lives.
    let pods = wait_for("the initial pod", || {
        Some(stored_names_and_uids(node, "aged")).filter(|pods| !pods.is_empty())
    });
    let [(first, uid)] = &pods[..] else { panic!("one initial pod, not {pods:?}") };
    let address = node.wait_ready("aged");
    wait_logged_freeze(node, uid);
    node.wait_asleep("aged");
    let request = send_request(node, address, "/");
    assert_eq!(request.lost, None, "{request:?}");
    assert_ne!(request.pod, *first, "{request:?}");
    let woken = wait_for("the woken pod", || {
        stored_names_and_uids(node, "aged").into_iter().find(|(name, _)| *name == request.pod)
    });
    wait_logged_freeze(node, &woken.1);
}

/// Name and uid of each pod of a service, as the controller has stored them.
fn stored_names_and_uids(node: &RouseNode, service: &str) -> Vec<(String, String)> {
    let text = |pod: &Value, key: &str| pod["metadata"][key].as_str().map(str::to_owned);
    let pods = node.stored_pods(service);
    pods.iter().filter_map(|pod| Some((text(pod, "name")?, text(pod, "uid")?))).collect()
}

/// Waits until the agent has logged that this pod is frozen. A pod that is frozen for seconds only may have ended by
/// the time at which a wait for a frozen pod looks at it.
fn wait_logged_freeze(node: &RouseNode, uid: &str) {
    let is_freeze = |line: &str| line.contains("pod frozen") && line.contains(uid);
    wait_for("the pod to be frozen", || node.log().lines().any(is_freeze).then_some(()));
}

fn the_frozen_pod_of_a_deleted_service_ends_in_order(node: &RouseNode) {
    apply(node, &manifest("ended", 1, "", ""));
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

fn an_annotation_without_a_meaning_is_refused_and_one_without_effect_is_told(node: &RouseNode) {
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
    apply(node, &with_initial_pod(&manifest("exec", 1, "", probe)));
    node.wait_ready("exec");
    node.wait_asleep("exec");
    let reason = wait_for("the reason", || {
        let condition = node.condition("revision", "exec-00001", "StandbyAvailable");
        (condition.status == "False").then_some(condition.message)
    });
    assert!(reason.contains("a probe runs a command"), "{reason}");
}
