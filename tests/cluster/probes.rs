//! Probes of the kubelet are no requests of the service, regardless of protocol and User-Agent. They find their port.

use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::test_cluster::find_condition;

#[test]
fn a_service_falls_asleep_whatever_probes_it_has() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("probes");
    let namespace = &namespace.name;
    let port = "ports: [{name: h2c, containerPort: 8080}]";
    // On a busy machine an answer may take longer than the default of one second, and failures restart the container.
    let times = "periodSeconds: 1, timeoutSeconds: 10";
    let grpc = format!("{{{times}, grpc: {{port: 8080}}}}");
    let agent = "httpHeaders: [{name: User-Agent, value: uptime-check/1}]";
    let services = [
        ("plain", format!("livenessProbe: {{{times}, httpGet: {{path: /}}}}")),
        ("agent", format!("livenessProbe: {{{times}, httpGet: {{path: /, {agent}}}}}")),
        ("grpc", format!("{port}, readinessProbe: {grpc}, livenessProbe: {grpc}")),
    ];
    let yaml = services
        .each_ref()
        .map(|(name, probe)| service_manifest(name, "", &format!("{HELLO_CONTAINER}, {probe}")));
    rouse.apply_until_ready(namespace, &yaml.join("---\n"));
    for (name, _) in &services {
        rouse.wait_asleep(namespace, name);
        let url = rouse.service_url(namespace, name);
        let mut args = vec!["curl", "--silent", "--max-time", "180", &url];
        args.extend((*name == "grpc").then_some("--http2-prior-knowledge"));
        let output = rouse.client_on("node1").command(&args).output().expect("curl is there");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.starts_with("Hello from"), "{name}: {stdout}");
    }
    services.iter().for_each(|(name, _)| rouse.wait_asleep(namespace, name));
}

/// The kubelet looks for a name among the ports of the pod, where the serving port has another name than in the
/// template.
#[test]
fn a_pod_is_ready_although_its_probes_name_their_port() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("port-names");
    let namespace = &namespace.name;
    let http1 = "ports: [{name: http1, containerPort: 8080}]";
    let times = "periodSeconds: 1, timeoutSeconds: 10, failureThreshold: 30";
    let probe = |port: &str| format!("{{{times}, httpGet: {{path: /, port: {port}}}}}");
    let services = [
        ("startup", format!("{http1}, startupProbe: {}", probe("http1"))),
        ("readiness", format!("{http1}, readinessProbe: {}", probe("http1"))),
        // Knative takes this word for the serving port.
        ("unnamed", format!("readinessProbe: {}", probe("http"))),
    ];
    let awake = ", autoscaling.knative.dev/min-scale: \"1\"";
    let yaml = services
        .each_ref()
        .map(|(name, probe)| service_manifest(name, awake, &format!("{HELLO_CONTAINER}, {probe}")));
    rouse.apply_until_ready(namespace, &yaml.join("---\n"));
    for (name, _) in &services {
        rouse.cluster.wait(&format!("a pod of {name} that the kubelet calls ready"), || {
            let pods = rouse.pods(namespace, name);
            pods.iter().any(|pod| find_condition(pod, "Ready")["status"] == "True").then_some(())
        });
    }
}

/// Container whose liveness probe fails from about fourteen seconds after its start, indefinitely.
const HUNG: &str = "image: \"dev.local/hello:v1\",
        env: [{name: HELLO_READY_AFTER_MS, value: never}, {name: HELLO_EXIT_ON_TERM, value: \"1\"}],
        livenessProbe: {httpGet: {path: /ready}, initialDelaySeconds: 10, periodSeconds: 2, failureThreshold: 2}";

/// Requests in flight in a hung container would delay its restart up to their timeout, without the agent's exception.
#[test]
fn a_container_that_hangs_is_restarted_although_a_request_hangs_in_it() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("hung");
    let namespace = &namespace.name;
    let one_pod =
        ", autoscaling.knative.dev/min-scale: \"1\", autoscaling.knative.dev/max-scale: \"1\"";
    rouse.apply_until_ready(namespace, &service_manifest("hung", one_pod, HUNG));
    let url = rouse.service_url(namespace, "hung");
    let client = rouse.client_on("node1");
    let slow_url = format!("{url}/?sleep=110000");
    let args = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"];
    let args = [&args[..], &["--max-time", "200", &slow_url]].concat();
    let mut curl = client.command(&args);
    let curl = curl.stdout(std::process::Stdio::piped()).spawn().expect("curl is installed");
    rouse.cluster.wait("the container to be started again", || {
        let pods = rouse.pods(namespace, "hung");
        let restart_count = |pod: &serde_json::Value| {
            pod["status"]["containerStatuses"][0]["restartCount"].as_u64()
        };
        pods.iter().filter_map(restart_count).any(|it| it > 0).then_some(())
    });
    let output = curl.wait_with_output().expect("curl ends");
    let code = String::from_utf8_lossy(&output.stdout);
    assert_ne!(code, "200", "the restart did not wait for the request");
}
