//! Manifests as other tools write them are accepted, become Ready and answer.

use tests::installed::{CONTAINER, Installed, service};

/// What `func deploy` applies for a function of the Go runtime.
const FUNC: &str = r#"
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

/// What KServe's controller makes of an InferenceService in its mode on Knative.
const KSERVE: &str = r#"
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

/// A canary of that: KServe splits by the name of the revision that was there.
const CANARY: &str = "  traffic:
  - {latestRevision: true, percent: 20}
  - {revisionName: iris-predictor-00001, percent: 80, tag: prev}
";

#[test]
fn a_function_as_func_deploys_it_answers() {
    let rouse = Installed::at_hand();
    let namespace = rouse.namespace("func");
    rouse.ready(&namespace.name, FUNC);
    let answer = rouse.from("node1").ask(&(rouse.url(&namespace.name, "greeter") + "/env"));
    assert!(answer.body.contains("\nADDRESS=0.0.0.0\n"), "{answer}");
    // `func list` and `func describe` find it by this label, and read its URL.
    let words = ["ksvc", "--namespace", &namespace.name, "--selector=function.knative.dev=true"];
    let list = rouse.cluster.get(&words);
    let url = format!("http://greeter.{}.example.com", namespace.name);
    assert_eq!(list["items"][0]["status"]["url"], url);
}

#[test]
fn a_predictor_as_kserve_makes_it_answers_and_takes_a_canary() {
    let rouse = Installed::at_hand();
    let namespace = rouse.namespace("kserve");
    rouse.ready(&namespace.name, KSERVE);
    let answer = rouse.from("node2").ask(&(rouse.url(&namespace.name, "iris-predictor") + "/env"));
    assert!(answer.body.contains("--model_name=iris"), "{answer}");

    let (head, _) = KSERVE.split_once("  traffic:\n").expect("it has targets");
    let canary = head.replace("gs://models/iris", "gs://models/iris-2") + CANARY;
    rouse.ready(&namespace.name, &canary);
    let service = rouse.cluster.get(&["ksvc", "--namespace", &namespace.name, "iris-predictor"]);
    let status = &service["status"];
    assert_eq!(status["latestReadyRevisionName"], "iris-predictor-00002");
    assert_eq!(status["traffic"][0]["percent"], 20);
    assert_eq!(status["traffic"][1]["tag"], "prev");
    let host = format!("iris-predictor.{}.svc.cluster.local", namespace.name);
    assert_eq!(status["address"]["url"], format!("http://{host}"));
    assert_eq!(status["url"], format!("http://{host}"), "what is for inside has one URL");
}

/// Names of what is made for it have to be cut from this length on.
#[test]
fn a_service_with_a_long_name_answers() {
    let rouse = Installed::at_hand();
    let namespace = rouse.namespace("long");
    for name in ["a-service-whose-name-has-exactly-forty-7-bytes0".to_owned(), "b".repeat(63)] {
        rouse.ready(&namespace.name, &service(&name, "", CONTAINER));
        rouse.from("node2").ask(&rouse.url(&namespace.name, &name)).pod();
    }
}
