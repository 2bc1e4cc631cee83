//! Wakes of frozen pods from both nodes and from outside, by HTTP and by raw TCP, alone and many at once.

use std::collections::BTreeSet;

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster};
use tests::load_process::{LoadProcess, LoadRequest, assert_none_lost};
use tests::streaming_exchange::StreamingExchange;
use tests::test_cluster::find_condition;

use super::{FrozenPod, LongAgentTimeout, NODES, StandbyService, assert_direct, manifest};

#[test]
fn clients_of_both_nodes_and_from_outside_are_answered_by_the_frozen_pod() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "kept", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    check_views(&service, &pod);
    let url = service.url();
    for node in NODES {
        let client = rouse.client_on(node);
        assert_direct(&client.get(&url), client, &pod);
        service.wait_frozen_again(&pod);
    }
    let host = format!("kept.{namespace}.example.com");
    assert_eq!(rouse.get_through_gateway(&host, "/", &[]).pod(), pod.name);
    service.wait_frozen_again(&pod);
    check_views(&service, &pod);
}

/// Asserts that the PodAutoscaler reports the frozen pod, and that Kubernetes sees a running one.
fn check_views(service: &StandbyService<'_>, pod: &FrozenPod) {
    let revision = format!("{}-00001", service.name);
    service.rouse.cluster.wait("the status of the PodAutoscaler", || {
        let autoscaler = service.get("podautoscaler", &revision);
        (autoscaler["status"]["standbyScale"] == 1).then_some(())
    });
    assert_eq!(table_cell(&service.kubectl(&["get", "podautoscaler", &revision]), "STANDBY"), "1");
    let object = service.get("pod", &pod.name);
    assert_eq!(object["status"]["phase"], "Running", "{object}");
    assert_eq!(find_condition(&object, "Ready")["status"], "True", "{object}");
    let deployment = service.get("deployment", &format!("{revision}-deployment"));
    assert_eq!(deployment["status"]["availableReplicas"], 1, "{deployment}");
    assert_eq!(find_condition(&deployment, "Progressing")["status"], "True", "{deployment}");
}

/// Cell of the first row of a table that kubectl prints, by the name of its column.
fn table_cell<'a>(table: &'a str, column: &str) -> &'a str {
    let mut lines = table.lines();
    let (header, row) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    // Cells may be empty, so they are found by their position.
    let start = header.find(column).unwrap_or_else(|| panic!("no column {column} in {table}"));
    row.get(start..).and_then(|rest| rest.split_whitespace().next()).unwrap_or_default()
}

/// Sends one request to each service at the same moment, from clients of both nodes in turn.
fn wake_at_once(rouse: &RouseCluster, services: &[StandbyService<'_>]) -> Vec<LoadRequest> {
    let start = |(number, service): (usize, &StandbyService<'_>)| {
        service.start_request(rouse.client_on(NODES[number % 2]))
    };
    let loads: Vec<LoadProcess> = services.iter().enumerate().map(start).collect();
    loads.into_iter().flat_map(LoadProcess::finish).collect()
}

#[test]
fn twenty_services_are_woken_at_once_without_the_start_of_a_pod() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-many");
    let namespace = &namespace.name;
    let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
    let manifests = names.iter().map(|name| manifest(name, "", HELLO_CONTAINER, ""));
    rouse.apply_until_ready(namespace, &manifests.collect::<Vec<_>>().join("---\n"));
    let services: Vec<StandbyService<'_>> =
        names.iter().map(|name| StandbyService { rouse: &rouse, namespace, name }).collect();
    let pods: Vec<FrozenPod> = services.iter().map(StandbyService::wait_frozen).collect();
    let requests = wake_at_once(&rouse, &services);
    assert_none_lost(&requests, services.len());
    let used: BTreeSet<&str> = requests.iter().map(|request| request.pod.as_str()).collect();
    let frozen: BTreeSet<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(used, frozen, "{requests:#?}");
    assert!(requests.iter().all(|request| request.direct), "{requests:#?}");
    for (service, pod) in services.iter().zip(&pods) {
        service.wait_frozen_again(pod);
    }
}

#[test]
fn load_scales_a_service_out_from_its_frozen_pod_and_leaves_one_again() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-load");
    let namespace = &namespace.name;
    let scaling = ", autoscaling.knative.dev/target: \"5\", autoscaling.knative.dev/max-scale: \"5\", \
                   autoscaling.knative.dev/target-utilization-percentage: \"100\"";
    let service = StandbyService::create(&rouse, namespace, "grows", scaling, HELLO_CONTAINER);
    let pod = service.wait_frozen();
    let args = ["--stages", "20x15s", "--path", "/?sleep=50"];
    let load = rouse.client_on("node1").start_load(&service.address(), "grows", &args);
    rouse.cluster.wait("a third pod", || (rouse.pods(namespace, "grows").len() >= 3).then_some(()));
    let requests = load.finish();
    assert_none_lost(&requests, 100);
    assert!(requests.iter().any(|request| request.pod == pod.name), "the frozen pod took part");
    service.wait_frozen();
}

#[test]
fn a_connection_of_any_protocol_thaws_a_pod_of_either_node() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-bytes");
    let container = format!(
        "{HELLO_CONTAINER}, env: [{{name: HELLO_ECHO_PORT, value: \"8080\"}}], \
         ports: [{{containerPort: 8080}}]"
    );
    let protocol = ", rouse.dev/protocol: tcp";
    let service = StandbyService::create(&rouse, &namespace.name, "bytes", protocol, &container);
    let (pod, address) = (service.wait_frozen(), service.address());
    for node in NODES {
        let args = [env!("CARGO_BIN_EXE_tunnel"), address.as_str()];
        let mut exchange = StreamingExchange::start(rouse.client_on(node).command(&args));
        let greeting = format!("Hello from {} to ", pod.name);
        // The server speaks first, so nothing but the handshake can have thawed the pod.
        let received = rouse.cluster.wait("a greeting", || {
            let received = String::from_utf8_lossy(&exchange.received()).into_owned();
            received.ends_with('\n').then_some(received)
        });
        assert!(received.starts_with(&greeting), "{received:?} from {node}");
        exchange.send_part("echo");
        exchange.end_body();
        let status = rouse.cluster.wait("the end of the connection", || exchange.exit_status());
        let echo = String::from_utf8_lossy(&exchange.received()).into_owned();
        assert!(status.success() && echo == received + "echo", "{echo:?} from {node}");
        service.wait_frozen_again(&pod);
    }
}

#[test]
fn a_new_revision_never_uses_the_frozen_pod_of_an_old_one() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-new");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "rolled", "", HELLO_CONTAINER);
    let old = service.wait_frozen();
    let container = format!("{HELLO_CONTAINER}, env: [{{name: V, value: two}}]");
    rouse.apply_until_ready(namespace, &manifest("rolled", "", &container, ""));
    rouse.cluster.wait("the old revision's pod to be gone", || {
        let pods = rouse.pods(namespace, "rolled");
        let is_old = |pod: &Value| pod["metadata"]["uid"] == old.uid.as_str();
        (!pods.is_empty() && !pods.iter().any(is_old)).then_some(())
    });
    let new = service.wait_frozen();
    assert!(new.name.starts_with("rolled-00002-"), "{}", new.name);
    let client = rouse.client_on("node1");
    assert_direct(&client.get(&service.url()), client, &new);
}
