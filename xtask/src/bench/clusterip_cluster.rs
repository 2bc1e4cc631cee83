//! Shell: plain Deployments behind Services of a real cluster: requests lost while pods come and go, and wakes from zero.

mod lost_requests;
mod wakes;

use anyhow::Result;

use super::{case_results::CaseResults, cluster_context::ClusterBenchContext, report::BenchRow};

/// Names of the cases in the order in which they are measured.
pub(super) const CASES: [&str; 2] = ["lost_deployment", "wake_deployment"];

/// Measures all cases. With `labelled`, one cluster has Services of Rouse and of kube-proxy side by side.
pub(super) fn run(cluster_context: &ClusterBenchContext) -> Result<Vec<BenchRow>> {
    let cluster = cluster_context.create_cluster(2, "iptables")?;
    cluster.install_with("standard", &["--clusterip", "labelled"])?;
    let clients = cluster.create_client_pods()?;
    let mut results = CaseResults::new("clusterip-cluster");
    if cluster_context.cases.contains("lost_deployment") {
        let lost = lost_requests::measure(cluster_context, &cluster, &clients);
        results.add("lost_deployment", lost);
    }
    if cluster_context.cases.contains("wake_deployment") {
        let wakes = wakes::measure(&cluster, &clients, cluster_context.rounds);
        results.add("wake_deployment", wakes);
    }
    results.finish()
}

/// A Deployment of the sample application without a preStop hook, and its Service. Each of the texts continues a part.
#[derive(Clone, Copy, Debug, Default)]
struct DeploymentManifest<'a> {
    name: &'a str,
    /// Name and value of labels or annotations of the Service, in braces.
    labels: &'a str,
    annotations: &'a str,
    /// Name of the Service's port, from which its protocol follows.
    port_name: &'a str,
    /// Field of the pods, such as `nodeSelector: { … }`; empty for none.
    pod_field: &'a str,
    /// Field of the container, such as `readinessProbe: { … }`; empty for none.
    container_field: &'a str,
}

impl DeploymentManifest<'_> {
    /// Returns the manifest, with zero replicas.
    fn text(self) -> String {
        let Self { name, labels, annotations, port_name, pod_field, container_field } = self;
        // YAML's flow style needs a value, also where there are no pairs.
        let (labels, annotations) = (or_none(labels), or_none(annotations));
        format!(
            "---
apiVersion: apps/v1
kind: Deployment
metadata: {{ name: {name}, namespace: default }}
spec:
  replicas: 0
  selector: {{ matchLabels: {{ app: {name} }} }}
  template:
    metadata: {{ labels: {{ app: {name} }} }}
    spec:
      terminationGracePeriodSeconds: 1
      {pod_field}
      containers:
      - name: hello
        image: \"dev.local/hello:v1\"
        imagePullPolicy: IfNotPresent
        env: [{{ name: PORT, value: \"8080\" }}]
        ports: [{{ containerPort: 8080 }}]
        {container_field}
---
apiVersion: v1
kind: Service
metadata: {{ name: {name}, namespace: default, labels: {labels}, annotations: {annotations} }}
spec:
  selector: {{ app: {name} }}
  ports: [{{ name: {port_name}, port: 80, targetPort: 8080 }}]
"
        )
    }
}

/// Returns a map in the syntax of YAML: `text`, or an empty one.
fn or_none(text: &str) -> &str {
    if text.is_empty() { "{}" } else { text }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn each_part_of_a_manifest_is_in_its_place() {
        let manifest = DeploymentManifest {
            name: "web",
            labels: "{ a: b }",
            port_name: "http",
            pod_field: "nodeSelector: { c: d }",
            container_field: "readinessProbe: { tcpSocket: { port: 8080 } }",
            ..DeploymentManifest::default()
        };
        let text = manifest.text();
        let documents = text.split("---\n").skip(1);
        let documents: Vec<Value> =
            documents.map(|it| serde_norway::from_str(it).unwrap()).collect();
        let [deployment, service] = &documents[..] else { panic!("{text}") };
        let pod = &deployment["spec"]["template"]["spec"];
        assert_eq!(pod["nodeSelector"]["c"], "d");
        assert_eq!(pod["containers"][0]["readinessProbe"]["tcpSocket"]["port"], 8080);
        assert_eq!(service["metadata"]["labels"]["a"], "b");
        assert_eq!(service["metadata"]["annotations"], serde_json::json!({}));
        assert_eq!(service["spec"]["ports"][0]["name"], "http");
    }
}
