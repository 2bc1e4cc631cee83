//! Requests that a NetworkPolicy denies to a service's pods neither wait for a pod nor wake the service.

use tests::client_pod::ClientPod;
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};

const SERVICE: &str = "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: guarded}
spec:
  template:
    metadata: {annotations: {autoscaling.knative.dev/initial-scale: \"0\", autoscaling.knative.dev/window: 6s}}
    spec: {containers: [{image: \"dev.local/hello:v1\"}]}
";

/// Policy that admits the activators, as every service needs it, and clients with these two labels.
fn policy(app: &str, namespace: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: guarded}}
spec:
  podSelector: {{matchLabels: {{serving.knative.dev/service: guarded}}}}
  ingress:
  - from:
    - namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: knative-serving}}}}
      podSelector: {{matchLabels: {{app: activator}}}}
    - namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
      podSelector: {{matchLabels: {{app: {app}}}}}
"
    )
}

#[test]
fn a_client_that_a_policy_keeps_out_neither_waits_nor_wakes() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("policy");
    let apply = |yaml: &str| rouse.apply(&namespace.name, yaml).expect("it is well formed");
    let allowed_client = ClientPod::new(&rouse.cluster, &namespace.name, "node1");
    let denied_client = rouse.client_on("node2");
    apply(&policy("client", &namespace.name));
    rouse.apply_until_ready(&namespace.name, SERVICE);
    rouse.wait_asleep(&namespace.name, "guarded");
    let url = rouse.service_url(&namespace.name, "guarded");

    // The policy is in force before the service existed.
    let response = denied_client.get(&url);
    assert_eq!(response.status, 403, "{response}");
    assert!(response.body.contains("NetworkPolicy"), "{response}");
    let by_name = format!("Host: guarded.{}.svc.cluster.local", namespace.name);
    let activators = rouse.service_url(SYSTEM_NAMESPACE, "activator-service");
    let response = denied_client.get_with_headers(&activators, &[&by_name]);
    assert_eq!(response.status, 403, "nor by its name: {response}");
    assert_eq!(rouse.pods(&namespace.name, "guarded").len(), 0, "nothing was woken for it");
    assert_eq!(allowed_client.get(&url).status, 200, "an allowed client wakes it");

    // A changed policy takes effect, in both directions.
    apply(&policy("client", &denied_client.namespace));
    rouse.cluster.wait("the other client to be let in", || {
        (denied_client.get(&url).status == 200).then_some(())
    });
    rouse.cluster.wait("the first client to be kept out", || {
        // An activator that does not know the change yet would wake the service.
        rouse.wait_asleep(&namespace.name, "guarded");
        (allowed_client.get(&url).status == 403).then_some(())
    });
    assert_eq!(rouse.pods(&namespace.name, "guarded").len(), 0);
}
