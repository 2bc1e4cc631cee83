//! Expectations of other tools: their manifests, long names, a Revision's own Service, `kubectl wait` and the class
//! `hpa`.

use std::collections::BTreeSet;

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest};
use tests::load_process::assert_none_lost;

/// Manifest that `func deploy` applies for a function of the Go runtime.
const FUNC_MANIFEST: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: greeter
  labels:
    boson.dev/function: "true"
    boson.dev/runtime: go
    function.knative.dev: "true"
    function.knative.dev/name: greeter
    function.knative.dev/runtime: go
  annotations:
    dapr.io/app-id: greeter
    dapr.io/app-port: "8080"
    dapr.io/enable-api-logging: "true"
    dapr.io/enabled: "true"
    dapr.io/metrics-port: "9092"
spec:
  template:
    metadata:
      labels:
        boson.dev/function: "true"
        boson.dev/runtime: go
        function.knative.dev: "true"
        function.knative.dev/name: greeter
        function.knative.dev/runtime: go
      annotations:
        autoscaling.knative.dev/max-scale: "10"
        autoscaling.knative.dev/metric: concurrency
        autoscaling.knative.dev/min-scale: "0"
        autoscaling.knative.dev/target: "100.000000"
        autoscaling.knative.dev/target-utilization-percentage: "70.000000"
        dapr.io/app-id: greeter
        dapr.io/app-port: "8080"
        dapr.io/enabled: "true"
    spec:
      containerConcurrency: 0
      enableServiceLinks: false
      timeoutSeconds: 300
      containers:
      - name: user-container
        image: dev.local/hello:v1
        env:
        - {name: BUILT, value: 20260102T030405}
        - {name: ADDRESS, value: 0.0.0.0}
        livenessProbe: {httpGet: {path: /health/liveness, port: 8080}}
        readinessProbe: {httpGet: {path: /health/readiness, port: 8080}}
        resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 128Mi}}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {drop: [ALL]}
          runAsNonRoot: true
          seccompProfile: {type: RuntimeDefault}
"#;

/// Manifest that KServe's controller creates for an InferenceService in its Knative mode.
const KSERVE_MANIFEST: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: iris-predictor
  labels:
    component: predictor
    networking.knative.dev/visibility: cluster-local
    serving.kserve.io/inferenceservice: iris
  annotations:
    serving.knative.dev/rollout-duration: 0s
    serving.kserve.io/enable-prometheus-scraping: "false"
spec:
  template:
    metadata:
      labels:
        component: predictor
        serving.kserve.io/inferenceservice: iris
      annotations:
        autoscaling.knative.dev/class: kpa.autoscaling.knative.dev
        autoscaling.knative.dev/min-scale: "1"
        internal.serving.kserve.io/storage-initializer-sourceuri: gs://models/iris
        prometheus.kserve.io/path: /metrics
        prometheus.kserve.io/port: "8080"
        serving.kserve.io/enable-metric-aggregation: "false"
        serving.kserve.io/enable-prometheus-scraping: "false"
    spec:
      containerConcurrency: 0
      timeoutSeconds: 300
      containers:
      - name: kserve-container
        image: dev.local/hello:v1
        args: [--model_name=iris, --model_dir=/mnt/models, --http_port=8080]
        # Written so, whatever the port.
        readinessProbe: {successThreshold: 1, tcpSocket: {port: 0}}
        resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {cpu: "1", memory: 128Mi}}
  traffic:
  - {latestRevision: true, percent: 100}
"#;

/// Canary of that service: KServe splits traffic by the name of the previous revision.
const CANARY_TRAFFIC: &str = "  traffic:
  - {latestRevision: true, percent: 20}
  - {revisionName: iris-predictor-00001, percent: 80, tag: prev}
";

#[test]
fn a_function_as_func_deploys_it_answers() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("func");
    rouse.apply_until_ready(&namespace.name, FUNC_MANIFEST);
    let response =
        rouse.client_on("node1").get(&(rouse.service_url(&namespace.name, "greeter") + "/env"));
    assert!(response.body.contains("\nADDRESS=0.0.0.0\n"), "{response}");
    // `func list` and `func describe` select it by this label, and read its URL.
    let args = ["ksvc", "--namespace", &namespace.name, "--selector=function.knative.dev=true"];
    let list = rouse.cluster.get(&args);
    let url = format!("http://greeter.{}.example.com", namespace.name);
    assert_eq!(list["items"][0]["status"]["url"], url);
}

#[test]
fn a_predictor_as_kserve_makes_it_answers_and_takes_a_canary() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("kserve");
    rouse.apply_until_ready(&namespace.name, KSERVE_MANIFEST);
    let response = rouse
        .client_on("node2")
        .get(&(rouse.service_url(&namespace.name, "iris-predictor") + "/env"));
    assert!(response.body.contains("--model_name=iris"), "{response}");

    let (head, _) = KSERVE_MANIFEST.split_once("  traffic:\n").expect("it has targets");
    let canary = head.replace("gs://models/iris", "gs://models/iris-2") + CANARY_TRAFFIC;
    rouse.apply_until_ready(&namespace.name, &canary);
    let service = rouse.cluster.get(&["ksvc", "--namespace", &namespace.name, "iris-predictor"]);
    let status = &service["status"];
    assert_eq!(status["latestReadyRevisionName"], "iris-predictor-00002");
    assert_eq!(status["traffic"][0]["percent"], 20);
    assert_eq!(status["traffic"][1]["tag"], "prev");
    let host = format!("iris-predictor.{}.svc.cluster.local", namespace.name);
    assert_eq!(status["address"]["url"], format!("http://{host}"));
    assert_eq!(status["url"], format!("http://{host}"), "what is for inside has one URL");
}

/// Names of child objects are cut from certain lengths on: 30 bytes are never cut, 37 for the Image, 47 for the
/// Deployment; 63 is the maximum. A tag precedes the name in hosts, which limits the name further.
#[test]
fn services_with_long_names_answer_by_their_tags_and_leave_nothing() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("long");
    let namespace = &namespace.name;
    let names = [30, 37, 47, 59].map(|length| "b".repeat(length));
    let tagged = |name: &String| {
        service_manifest(name, "", HELLO_CONTAINER)
            + "  traffic:\n  - {latestRevision: true, percent: 100, tag: new}\n"
    };
    let yaml =
        names.iter().map(tagged).chain([service_manifest(&"c".repeat(63), "", HELLO_CONTAINER)]);
    let yaml = yaml.collect::<Vec<_>>().join("---\n");
    rouse.apply_until_ready(namespace, &yaml);
    let tags = names.iter().map(|name| format!("new-{name}"));
    for name in names.iter().cloned().chain(tags).chain(["c".repeat(63)]) {
        rouse.client_on("node2").get(&rouse.service_url(namespace, &name)).pod();
    }
    rouse.delete(namespace, &yaml).expect("they may be deleted");
    rouse.cluster.wait("all that was made for them to go", || {
        let kinds = "configurations,revisions,routes,pa,sks,deployments,services,endpointslices,images.caching.internal.knative.dev,pods";
        let list = rouse.cluster.get(&[kinds, "--namespace", namespace]);
        list["items"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
}

/// Addresses of the ready endpoints in the slices of a Kubernetes Service.
fn ready_endpoints(rouse: &RouseCluster, namespace: &str, service: &str) -> BTreeSet<String> {
    let label = format!("kubernetes.io/service-name={service}");
    let args = ["endpointslices", "--namespace", namespace, "--selector", &label];
    let list = rouse.cluster.get(&args);
    let slices = list["items"].as_array().cloned().unwrap_or_default();
    let ends = slices.iter().flat_map(|it| it["endpoints"].as_array().into_iter().flatten());
    let ready = ends.filter(|it| it["conditions"]["ready"] != Value::Bool(false));
    let addresses = ready.flat_map(|it| it["addresses"].as_array().into_iter().flatten());
    addresses.filter_map(|it| it.as_str().map(str::to_owned)).collect()
}

/// Addresses of the pods in `namespace` with this label, of both families.
fn pod_addresses(rouse: &RouseCluster, namespace: &str, label: &str) -> BTreeSet<String> {
    let list = rouse.cluster.get(&["pods", "--namespace", namespace, "--selector", label]);
    let pods = list["items"].as_array().cloned().unwrap_or_default();
    let all = pods.iter().flat_map(|it| it["status"]["podIPs"].as_array().into_iter().flatten());
    all.filter_map(|it| it["ip"].as_str().map(str::to_owned)).collect()
}

/// A ServerlessService names a Kubernetes Service, whose slices have the endpoints that respond.
#[test]
fn a_revision_answers_by_its_own_service_awake_and_asleep() {
    let rouse = RouseCluster::shared();
    let test_namespace = rouse.namespace("own-service");
    let (namespace, revision) = (&test_namespace.name, "named-00001");
    rouse.apply_until_ready(namespace, &service_manifest("named", "", HELLO_CONTAINER));
    let sks = rouse.cluster.get(&["sks", "--namespace", namespace, revision]);
    assert_eq!(sks["status"]["serviceName"], revision, "{sks}");
    let url = rouse.service_url(namespace, revision);
    let leads_to = |subject: &str, namespace: &str, label: &str| {
        rouse.cluster.wait(&format!("{subject} in the slices of {revision}"), || {
            let endpoints = ready_endpoints(&rouse, &test_namespace.name, revision);
            (!endpoints.is_empty() && endpoints == pod_addresses(&rouse, namespace, label))
                .then_some(())
        });
    };
    let of_revision = format!("serving.knative.dev/revision={revision}");
    // An activator identifies a revision by the host name of the request, as in Knative.
    let host = format!("Host: {revision}.{namespace}.svc.cluster.local");
    let send_request =
        || rouse.client_on("node2").get_with_headers(&url, &[&host]).pod().to_owned();
    send_request();
    for _ in 0..2 {
        rouse.wait_asleep(namespace, "named");
        leads_to("the activators", SYSTEM_NAMESPACE, "app=activator");
        let pod = send_request();
        assert!(pod.starts_with(revision), "{pod}");
        // On a busy machine, the pod would sleep again before its slices are read.
        let args = ["--stages", "1x300s", "--path", "/?sleep=20"];
        let address = rouse.service_address(namespace, "named");
        let _awake = rouse.client_on("node1").start_load(&address, "named", &args);
        leads_to("the pod", namespace, &of_revision);
    }
}

/// A service that `kubectl wait` reports as Ready responds to clients on every node, and through the gateway.
#[test]
fn services_answer_as_soon_as_they_are_ready() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("at-once");
    let namespace = &namespace.name;
    let names: Vec<String> = (0..12).map(|number| format!("new-{number}")).collect();
    let yaml: Vec<String> =
        names.iter().map(|name| service_manifest(name, "", HELLO_CONTAINER)).collect();
    rouse.apply(namespace, &yaml.join("---\n")).expect("admission accepts it");
    for (number, name) in names.iter().enumerate() {
        rouse.wait_ready(namespace, "ksvc", name);
        let host = format!("{name}.{namespace}.example.com");
        rouse.get_through_gateway(&host, "/", &[]).pod();
        let node = ["node1", "node2"][number % 2];
        rouse.client_on(node).get(&rouse.service_url(namespace, name)).pod();
    }
}

/// The HorizontalPodAutoscaler of Kubernetes scales the pods; their traffic is routed as for any service.
#[test]
fn a_service_of_class_hpa_is_scaled_by_its_deployment_and_loses_nothing() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("class-hpa");
    let namespace = &namespace.name;
    let annotations = ", autoscaling.knative.dev/class: hpa.autoscaling.knative.dev, \
                       autoscaling.knative.dev/metric: memory, autoscaling.knative.dev/target: \"50\", \
                       autoscaling.knative.dev/min-scale: \"1\", autoscaling.knative.dev/max-scale: \"4\"";
    rouse.apply_until_ready(namespace, &service_manifest("measured", annotations, HELLO_CONTAINER));
    let hpa = rouse.cluster.get(&["hpa", "--namespace", namespace, "measured-00001"]);
    let spec = &hpa["spec"];
    assert_eq!((&spec["minReplicas"], &spec["maxReplicas"]), (&1.into(), &4.into()), "{spec}");
    assert_eq!(spec["metrics"][0]["resource"]["name"], "memory", "{spec}");
    assert_eq!(spec["scaleTargetRef"]["name"], "measured-00001-deployment", "{spec}");

    // Without metrics, Kubernetes' autoscaler leaves the number of pods as it is, between its bounds.
    let scale_to = |count: usize| {
        let replicas = format!("--replicas={count}");
        let args = ["scale", "deployment", "measured-00001-deployment", &replicas];
        let args = [&args[..], &["--namespace", namespace]].concat();
        rouse.cluster.kubectl(&args).expect("it may be scaled");
        rouse.cluster.wait(&format!("{count} pods"), || {
            let pa = rouse.cluster.get(&["pa", "--namespace", namespace, "measured-00001"]);
            let pods = rouse.pods(namespace, "measured").len();
            (pods == count && pa["status"]["actualScale"] == count).then_some(())
        });
    };
    scale_to(3);
    let address = rouse.service_address(namespace, "measured");
    let args = ["--stages", "6x15s", "--path", "/?sleep=50", "--fresh-pct", "50"];
    let load = rouse.client_on("node1").start_load(&address, "measured", &args);
    scale_to(1);
    let requests = load.finish();
    assert_none_lost(&requests, 100);
    let pods: BTreeSet<&str> = requests.iter().map(|it| it.pod.as_str()).collect();
    assert!(pods.len() > 1, "all three took requests before two of them left: {pods:?}");
}
