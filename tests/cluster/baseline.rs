//! Baseline of Kubernetes alone, on which all other tests rely. Its objects are not served by Rouse, which may be there.
#![allow(
    clippy::unwrap_used,
    reason = "a panic in a test names the line, which is what a test is for"
)]

use serde_json::Value;
use tests::test_cluster::{TestCluster, TestNamespace, find_condition};

/// Manifest of one pod of the sample on the node `node`, and a dual-stack Service of the same name.
fn sample_manifest(namespace: &str, name: &str, node: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{namespace: {namespace}, name: {name}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      nodeName: {node}
      automountServiceAccountToken: false
      containers:
      - name: hello
        image: dev.local/hello:v1
        imagePullPolicy: Never
        ports: [{{containerPort: 8080}}]
        readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1, timeoutSeconds: 10}}
---
apiVersion: v1
kind: Service
metadata: {{namespace: {namespace}, name: {name}}}
spec:
  ipFamilyPolicy: PreferDualStack
  selector: {{app: {name}}}
  ports: [{{port: 80, targetPort: 8080}}]
"
    )
}

/// Applies the sample, and waits until its pod is ready.
pub(crate) fn apply_sample(
    cluster: &TestCluster,
    namespace: &TestNamespace<'_>,
    name: &str,
    node: &str,
) {
    cluster.apply(&sample_manifest(&namespace.name, name, node)).unwrap();
    let args = ["rollout", "status", "--timeout", "300s", "--namespace", &namespace.name];
    cluster.kubectl(&[&args[..], &[&format!("deployment/{name}")]].concat()).unwrap();
}

pub(crate) fn pod_of(cluster: &TestCluster, namespace: &str, name: &str) -> String {
    let pods =
        cluster.get(&["pods", "--namespace", namespace, "--selector", &format!("app={name}")]);
    pods["items"][0]["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

pub(crate) fn nodes(cluster: &TestCluster) -> Vec<String> {
    let list = cluster.get(&["nodes"]);
    let name = |node: &Value| node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    list["items"].as_array().into_iter().flatten().map(name).collect()
}

#[test]
fn every_node_is_ready() {
    let cluster = TestCluster::from_environment();
    let nodes = nodes(&cluster);
    assert!(nodes.len() >= 2, "two nodes are the least that shows a path between nodes");
    for node in nodes {
        // A kubelet that waits for a processor is late with its heartbeat, and the node is not ready for a while.
        cluster.wait(&format!("{node} to be ready"), || {
            let object = cluster.get(&["node", &node]);
            (find_condition(&object, "Ready")["status"] == "True").then_some(())
        });
    }
}

#[test]
fn a_deployment_answers_through_the_api_server() {
    let cluster = TestCluster::from_environment();
    let namespace = TestNamespace::new(&cluster, "plain-proxy");
    apply_sample(&cluster, &namespace, "sample", &nodes(&cluster)[0]);
    let path = format!("/api/v1/namespaces/{}/services/sample:80/proxy/", namespace.name);
    let body = cluster.wait("a response", || cluster.kubectl(&["get", "--raw", &path]).ok());
    let pod = pod_of(&cluster, &namespace.name, "sample");
    assert!(body.contains(&pod), "{body} does not come from {pod}");
}
