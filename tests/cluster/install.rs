//! Installation from an empty cluster to a response, as in the README: install, apply, request; asleep and awake
//! again; uninstall.

use std::net::{Ipv4Addr, SocketAddr};

use tests::http_client;
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};
use tests::test_cluster::{TestCluster, TestNamespace, in_netns};

const HELLO: &str = include_str!("../../examples/hello.yaml");

/// Manifest of the example, without its namespace.
fn hello() -> String {
    HELLO.replace("  namespace: default\n", "")
}

/// Cells of the first row of `kubectl get KIND`, without empty cells.
fn table_row(cluster: &TestCluster, namespace: &str, kind: &str) -> Vec<String> {
    let args = ["get", kind, "--no-headers", "--namespace", namespace];
    let text = cluster.kubectl(&args).expect("the kind is known");
    let line = text.lines().next().unwrap_or_default();
    line.split_whitespace().map(str::to_owned).collect()
}

fn check_columns(cluster: &TestCluster, namespace: &str) {
    let row = |kind: &str| table_row(cluster, namespace, kind);
    let url = format!("http://hello.{namespace}.example.com");
    let ready = ["hello-00001", "hello-00001", "True"];
    assert_eq!(row("ksvc"), [&["hello", &url][..], &ready].concat());
    assert_eq!(row("configuration"), [&["hello"][..], &ready].concat());
    assert_eq!(row("route"), ["hello", &url, "True"]);
    // The pod is gone before the statuses say so.
    let wait_row = |kind: &str, expected: &[&str]| {
        cluster.wait(&format!("{expected:?} as the row of a {kind} asleep"), || {
            let mut cells = row(kind);
            if kind == "sks" {
                // Reason and message of its condition follow.
                cells.truncate(expected.len());
            }
            (cells == expected).then_some(())
        });
    };
    wait_row("revision", &["hello-00001", "hello", "1", "True", "0", "0"]);
    wait_row("podautoscaler", &["hello-00001", "0", "0", "False", "NoTraffic"]);
    wait_row("sks", &["hello-00001", "Proxy", "2", "hello-00001", "hello-00001-private"]);
}

/// Wakes the service from a pod on `node`. Returns the node of the pod that responded.
fn wake_from(rouse: &RouseCluster, namespace: &TestNamespace<'_>, node: &str) -> String {
    let response = rouse.client_on(node).get(&rouse.service_url(&namespace.name, "hello"));
    let pod = response.pod().to_owned();
    assert!(response.body.starts_with(&format!("Hello from {pod} to ")), "{response}");
    let object = rouse.cluster.get(&["pod", "--namespace", &namespace.name, &pod]);
    object["spec"]["nodeName"].as_str().expect("the pod that responded exists").to_owned()
}

/// Returns true if each activator has learnt of a ready pod from its agent before the RouteTable listed it. `None` while
/// an activator starts or ends.
fn have_all_learnt_early(cluster: &TestCluster) -> Option<bool> {
    let metrics = SocketAddr::from((Ipv4Addr::LOCALHOST, 7103));
    let counter = "rouse_activator_early_ready_pods_total ";
    let selector = "app=activator";
    let list = cluster.get(&["pods", "--namespace", SYSTEM_NAMESPACE, "--selector", selector]);
    let mut have_all = true;
    for pod in list["items"].as_array()? {
        let netns = cluster.netns_of(SYSTEM_NAMESPACE, pod["metadata"]["name"].as_str()?);
        let page = in_netns(&netns, || http_client::get(metrics, "activator", "/metrics"));
        let page = page.ok()?.body;
        let count = page.lines().find_map(|line| line.strip_prefix(counter))?;
        have_all &= count.trim() != "0";
    }
    Some(have_all)
}

/// Wakes the sleeping service until each activator has learnt of a pod early. The table may come first at times.
fn check_early_pods(rouse: &RouseCluster, namespace: &TestNamespace<'_>) {
    rouse.cluster.wait("each activator to learn of a pod from its agent", || {
        if have_all_learnt_early(&rouse.cluster)? {
            return Some(());
        }
        wake_from(rouse, namespace, "node1");
        rouse.wait_asleep(&namespace.name, "hello");
        None
    });
}

#[test]
fn a_service_wakes_from_pods_on_both_nodes_and_from_outside() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("wakes");
    rouse.apply_until_ready(&namespace.name, &hello());
    rouse.wait_asleep(&namespace.name, "hello");
    check_columns(&rouse.cluster, &namespace.name);

    // One request from a pod on each node, so that one of them crosses nodes.
    let url = rouse.service_url(&namespace.name, "hello");
    for node in ["node1", "node2"] {
        let pod_node = wake_from(&rouse, &namespace, node);
        println!("woken from {node}, response from a pod on {pod_node}");
        let other = if pod_node == "node1" { "node2" } else { "node1" };
        assert_eq!(rouse.client_on(other).get(&url).status, 200, "warm, from the other node");
        rouse.wait_asleep(&namespace.name, "hello");
    }
    check_early_pods(&rouse, &namespace);

    let host = format!("hello.{}.example.com", namespace.name);
    let response = rouse.get_through_gateway(&host, "/", &[]);
    assert!(response.pod().starts_with("hello-00001-deployment-"), "{response}");
    let inside = format!("hello.{}.svc.cluster.local", namespace.name);
    let response = rouse.get_through_gateway(&inside, "/", &[]);
    assert_eq!(response.status, 404, "a name for inside only: {response}");
}

/// Applies a Service with the labels of Rouse's own objects, as the field manager `user`.
fn apply_labelled_service(rouse: &RouseCluster, user: &str, name: &str) {
    let yaml = format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: {SYSTEM_NAMESPACE}, \
         labels: {{app.kubernetes.io/part-of: rouse}}}}, spec: {{ports: [{{port: 1}}]}}}}"
    );
    let args = ["apply", "--server-side", "--field-manager", user];
    rouse.cluster.kubectl_with_manifest(&args, &yaml).expect("a Service may be made");
}

#[test]
fn another_installation_keeps_an_operators_settings_and_removes_objects_of_earlier_versions() {
    let rouse = RouseCluster::shared();
    apply_labelled_service(&rouse, "rouse-install", "of-an-earlier-version");
    apply_labelled_service(&rouse, "another-manager", "of-another-manager");
    let config = ["configmap", "--namespace", SYSTEM_NAMESPACE, "config-autoscaler"];
    let set = |patch: &str| {
        let args = [&["patch"][..], &config, &["--patch", patch]].concat();
        rouse.cluster.kubectl(&args).expect("a valid value is accepted");
    };
    set(r#"{"data":{"stable-window":"30s"}}"#);
    rouse.install();
    assert_eq!(rouse.cluster.get(&config)["data"]["stable-window"], "30s");
    set(r#"{"data":{"stable-window":null}}"#);
    let services = ["get", "services", "--namespace", SYSTEM_NAMESPACE, "--output", "name"];
    let services = rouse.cluster.kubectl(&services).expect("services are listed");
    assert!(!services.contains("of-an-earlier-version"), "{services}");
    assert!(services.contains("of-another-manager"), "{services}");
    let delete = ["delete", "service", "--namespace", SYSTEM_NAMESPACE, "of-another-manager"];
    rouse.cluster.kubectl(&delete).expect("it may be deleted");
}
