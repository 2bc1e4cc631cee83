//! A request that wakes a service gets its response once the whole pod is ready, and not only its serving container.

use tests::installed_cluster::RouseCluster;
use tests::knative_features::EnabledFeatures;

/// Feature that allows probes of sidecars and of other ports; off by default.
const PROBES: [&str; 1] = ["multi-container-probing"];
/// Delay of the sidecar's readiness, in ms: far longer than a cold start that does not wait for it.
const READINESS_DELAY_MS: u32 = 8_000;

/// Service without initial pods; `probe` is the serving container's, and `sidecar` adds to the container at port
/// 8081.
fn two_container_service(probe: &str, sidecar: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: pair}}
spec:
  template:
    metadata:
      annotations:
        autoscaling.knative.dev/initial-scale: \"0\"
        autoscaling.knative.dev/window: 6s
    spec:
      containers:
      - {{name: serves, image: \"dev.local/hello:v1\", ports: [{{containerPort: 8080}}]{probe}}}
      - name: helps
        image: dev.local/hello:v1
        {sidecar}
"
    )
}

/// Wakes the service by a request, and queries the sidecar right after the response. Returns the sidecar's status.
fn sidecar_status_after_wake(test: &str, yaml: &str) -> u16 {
    let rouse = RouseCluster::shared();
    let features = EnabledFeatures::enable(&rouse.cluster, &PROBES);
    let namespace = rouse.namespace(test);
    let namespace = &namespace.name;
    features.apply(&rouse, namespace, yaml);
    rouse.wait_ready(namespace, "ksvc", "pair");
    assert!(rouse.pods(namespace, "pair").is_empty(), "the request is to wake it");
    let url = rouse.service_url(namespace, "pair");
    let response = rouse.client_on("node1").get(&url);
    let pod = rouse.cluster.get(&["pod", "--namespace", namespace, response.pod()]);
    let ip = pod["status"]["podIP"].as_str().expect("the pod has responded");
    rouse.client_on("node1").get(&format!("http://{ip}:8081/ready")).status
}

#[test]
fn a_request_that_wakes_waits_for_the_readiness_probe_of_a_sidecar() {
    let sidecar = format!(
        "env: [{{name: PORT, value: \"8081\"}}, {{name: HELLO_READY_AFTER_MS, value: \"{READINESS_DELAY_MS}\"}}]
        readinessProbe: {{periodSeconds: 1, httpGet: {{path: /ready, port: 8081}}}}"
    );
    let status = sidecar_status_after_wake("sideready", &two_container_service("", &sidecar));
    assert_eq!(status, 200, "answered before the sidecar was ready (503), or served (0)");
}

#[test]
fn a_request_that_wakes_waits_for_the_port_that_the_probe_names() {
    let probe = ", readinessProbe: {periodSeconds: 1, tcpSocket: {port: 8081}}";
    let sidecar = format!(
        "env: [{{name: PORT, value: \"8081\"}}, {{name: HELLO_LISTEN_DELAY_MS, value: \"{READINESS_DELAY_MS}\"}}]"
    );
    let status = sidecar_status_after_wake("otherport", &two_container_service(probe, &sidecar));
    assert_eq!(status, 200, "answered before the port was open (0)");
}
