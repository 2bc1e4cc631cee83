//! A hard limit of requests in each pod, enforced by two activators together.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE};
use tests::load_process::{LoadProcess, LoadRequest, assert_none_lost};

/// Path of a request that takes 100 ms.
const PATH: &str = "/?sleep=100";

fn limited_service(name: &str, pods: u32) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}}}
spec:
  template:
    metadata:
      annotations:
        autoscaling.knative.dev/min-scale: \"{pods}\"
        autoscaling.knative.dev/max-scale: \"{pods}\"
    spec:
      containerConcurrency: 1
      containers: [{{{HELLO_CONTAINER}}}]
"
    )
}

/// Starts load on the ClusterIP from each node, and through the gateway.
fn load_everywhere(
    rouse: &RouseCluster,
    namespace: &str,
    name: &str,
    args: &[&str],
) -> Vec<LoadProcess> {
    let (address, gateway) = (rouse.service_address(namespace, name), rouse.gateway());
    let host = format!("{name}.{namespace}.example.com");
    let args = [args, &["--path", PATH]].concat();
    let targets = [("node1", address.as_str(), name), ("node2", &address, name)];
    let through_gateway = [("node1", gateway.as_str(), host.as_str())];
    let targets = targets.into_iter().chain(through_gateway);
    targets
        .map(|(node, address, host)| rouse.client_on(node).start_load(address, host, &args))
        .collect()
}

/// Highest number of requests at once in each pod. It queries the pods, so no other request may be in flight.
fn max_concurrency(rouse: &RouseCluster, namespace: &str, name: &str) -> Vec<u64> {
    let max_of_pod = |pod: Value| {
        let ip = pod["status"]["podIP"].as_str().expect("it runs").to_owned();
        let counts = rouse.client_on("node1").get(&format!("http://{ip}:8080/counts"));
        let counts: Value = serde_json::from_str(&counts.body).expect("JSON");
        counts["max_in_flight"].as_u64().expect("a number")
    };
    rouse.pods(namespace, name).into_iter().map(max_of_pod).collect()
}

fn finish_loads(loads: Vec<LoadProcess>, min_sent: usize) -> Vec<LoadRequest> {
    let results = loads.into_iter().map(LoadProcess::finish);
    let results = results.inspect(|requests| assert_none_lost(requests, min_sent));
    results.flatten().collect()
}

#[test]
fn a_pod_with_a_hard_limit_of_one_gets_one_request_at_a_time_from_two_activators() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("limited");
    let namespace = &namespace.name;
    let deployment = ["deployment", "activator", "--namespace", SYSTEM_NAMESPACE];
    assert_eq!(rouse.cluster.get(&deployment)["status"]["readyReplicas"], 2, "there are two");
    rouse.apply_until_ready(namespace, &limited_service("hard", 1));
    let loads =
        load_everywhere(&rouse, namespace, "hard", &["--stages", "4x60s", "--requests", "60"]);
    finish_loads(loads, 60);
    assert_eq!(max_concurrency(&rouse, namespace, "hard"), [1]);
}

#[test]
fn a_hard_limit_holds_while_both_activators_are_exchanged() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("exchanged");
    let namespace = &namespace.name;
    rouse.apply_until_ready(namespace, &limited_service("hard", 2));
    let loads = load_everywhere(&rouse, namespace, "hard", &["--stages", "4x40s"]);
    for action in ["restart", "status"] {
        let args = ["rollout", action, "deployment/activator", "--namespace", SYSTEM_NAMESPACE];
        rouse.cluster.kubectl(&args).expect("activators may be exchanged");
    }
    let requests = finish_loads(loads, 100);
    assert_eq!(max_concurrency(&rouse, namespace, "hard"), [1, 1]);
    let mut pods: Vec<_> = requests.iter().map(|request| &request.pod).collect();
    pods.sort_unstable();
    pods.dedup();
    assert_eq!(pods.len(), 2, "both pods served requests");
}
