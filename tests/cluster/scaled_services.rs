//! Scaled Services: Deployments and StatefulSets of users sleep at zero pods, and requests and connections to their
//! Services wake them.

use std::thread;

use serde_json::Value;
use tests::installed_cluster::RouseCluster;
use tests::load_process::assert_none_lost;
use tests::streaming_exchange::StreamingExchange;
use tests::test_cluster::{HELLO_IMAGE, find_condition};

use super::deletion::metadata_values;

pub(crate) mod example_servers;
mod helm_chart;
mod numbers;
mod refusals;

const NODES: [&str; 2] = ["node1", "node2"];
/// Annotations of a Service that sleeps as soon as it may.
const SLEEPS: &str = "rouse.dev/scale-to-zero: \"true\", autoscaling.knative.dev/window: 6s";
/// Ports of a Service with HTTP.
const HTTP_PORTS: &str = "ports: [{name: http, port: 80, targetPort: 8080}]";
/// Port of the sample application whose server speaks first.
const ECHO_PORT: u16 = 5432;
/// Settings of a container of the sample application with that port, which has a name.
const ECHO_CONTAINER: &str = ", env: [{name: HELLO_ECHO_PORT, value: \"5432\"}], \
                              ports: [{name: echo, containerPort: 5432}]";

/// A workload, mostly of the sample application, and the Service of the same name by which it sleeps.
#[derive(Clone, Copy)]
struct ScaledApp<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
    /// Kind of the workload: `Deployment` or `StatefulSet`.
    kind: &'static str,
    name: &'static str,
}

impl<'a> ScaledApp<'a> {
    fn deployment(rouse: &'a RouseCluster, namespace: &'a str, name: &'static str) -> Self {
        Self { rouse, namespace, kind: "Deployment", name }
    }

    /// Manifest of the workload. `container` continues its container's settings.
    fn workload_manifest(&self, replicas: u32, container: &str) -> String {
        let Self { kind, name, .. } = self;
        let service = match *kind {
            "StatefulSet" => format!("  serviceName: {name}\n"),
            _ => String::new(),
        };
        format!(
            "apiVersion: apps/v1
kind: {kind}
metadata: {{name: {name}}}
spec:
  replicas: {replicas}
{service}  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 10
      containers: [{{name: hello, image: \"{HELLO_IMAGE}\", imagePullPolicy: Never{container}}}]
"
        )
    }

    /// Manifest of the Service; `spec` continues its spec.
    fn service_manifest(&self, spec: &str) -> String {
        let name = self.name;
        scaled_service(name, &format!("selector: {{app: {name}}}, {spec}"))
    }

    fn apply(&self, manifests: &[String]) {
        self.rouse.apply(self.namespace, &manifests.join("---\n")).expect("it is valid");
    }

    /// Runs kubectl in the namespace. Returns its output.
    fn kubectl(&self, args: &[&str]) -> String {
        let args = [args, &["--namespace", self.namespace]].concat();
        let result = self.rouse.cluster.kubectl(&args);
        result.unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// The object of a kind that has the name of the Service; null if there is none, or no response.
    fn get(&self, kind: &str) -> Value {
        self.rouse.cluster.get(&[kind, "--namespace", self.namespace, self.name])
    }

    fn workload(&self) -> Value {
        self.get(&self.kind.to_lowercase())
    }

    /// Number of pods that the workload should have; `None` without a response.
    fn replicas(&self) -> Option<u64> {
        self.workload()["spec"]["replicas"].as_u64()
    }

    /// Existing pods, with terminating ones; `None` without a response.
    fn pods(&self) -> Option<Vec<Value>> {
        let label = format!("app={}", self.name);
        let args = ["pods", "--namespace", self.namespace, "--selector", &label];
        self.rouse.cluster.get(&args)["items"].as_array().cloned()
    }

    /// Names of the pods if there are `count`, all of them ready and as the workload says.
    fn find_ready_pods(&self, count: usize) -> Option<Vec<String>> {
        let pods = self.pods()?;
        let is_ready = |pod: &Value| {
            let is_running = pod["metadata"]["deletionTimestamp"].is_null();
            is_running && find_condition(pod, "Ready")["status"] == "True"
        };
        let is_complete = self.workload()["spec"]["replicas"] == count && pods.len() == count;
        let mut names: Vec<String> = pods.iter().filter_map(name_of).collect();
        names.sort();
        (is_complete && pods.iter().all(is_ready)).then_some(names)
    }

    /// Waits for `count` ready pods, and returns their names.
    fn wait_pods(&self, count: usize) -> Vec<String> {
        let description = format!("{count} pods of {}", self.name);
        self.rouse.cluster.wait(&description, || self.find_ready_pods(count))
    }

    /// Waits for `count` ready pods, and returns their names. Meanwhile `send_request` keeps them awake: on a busy machine
    /// a pod may be ready only after the time without requests in which all of them stop.
    fn wait_pods_in_use(&self, count: usize, send_request: impl Fn()) -> Vec<String> {
        let description = format!("{count} pods of {} in use", self.name);
        self.rouse.cluster.wait(&description, || {
            send_request();
            self.find_ready_pods(count)
        })
    }

    /// Waits until the workload is scaled to zero. Its pods may still be there.
    fn wait_scaled_to_zero(&self) {
        let description = format!("{} to be scaled to zero", self.name);
        self.rouse.cluster.wait(&description, || (self.replicas()? == 0).then_some(()));
    }

    /// Waits until the workload is scaled to zero and all its pods are gone.
    fn wait_asleep(&self) {
        self.wait_scaled_to_zero();
        let description = format!("the pods of {} to be gone", self.name);
        self.rouse.cluster.wait(&description, || self.pods()?.is_empty().then_some(()));
    }

    /// Address of a port of the Service.
    fn address(&self, port: u16) -> String {
        let url = self.rouse.service_url(self.namespace, self.name);
        format!("{}:{port}", url.trim_start_matches("http://"))
    }

    /// Sends a request to port 80 of the Service. Returns the name of the pod that responded.
    fn request_from(&self, node: &str) -> String {
        let url = self.rouse.service_url(self.namespace, self.name);
        self.rouse.client_on(node).get(&url).pod().to_owned()
    }

    /// Names of the EndpointSlices that lead to activators; `None` without a response.
    fn activator_slices(&self) -> Option<Vec<String>> {
        let label = format!(
            "kubernetes.io/service-name={},endpointslice.kubernetes.io/managed-by=rouse.dev",
            self.name
        );
        let args = ["endpointslices", "--namespace", self.namespace, "--selector", &label];
        let list = self.rouse.cluster.get(&args);
        Some(list["items"].as_array()?.iter().filter_map(name_of).collect())
    }

    /// Waits until nothing of Rouse is left at the Service and its workload, which has `replicas` again.
    fn wait_given_back(&self, replicas: u64) {
        let description = format!("{} to be as it was", self.name);
        self.rouse.cluster.wait(&description, || {
            let autoscalers = metadata_values(self.rouse, self.namespace, "pa", "name")?;
            let workload = self.workload();
            let annotations = workload["metadata"]["annotations"].as_object();
            let mut keys = annotations.into_iter().flat_map(|all| all.keys());
            let is_free = !autoscalers.iter().any(|it| it == self.name)
                && self.activator_slices()?.is_empty()
                && !keys.any(|key| key.starts_with("rouse.dev/"));
            (is_free && workload["spec"]["replicas"] == replicas).then_some(())
        });
    }
}

/// Manifest of a Service that is to sleep.
fn scaled_service(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: {name}, annotations: {{{SLEEPS}}}}}
spec: {{{spec}}}
"
    )
}

fn name_of(object: &Value) -> Option<String> {
    object["metadata"]["name"].as_str().map(str::to_owned)
}

/// A connection of raw TCP, on which the server speaks first.
struct ByteConnection<'a> {
    app: ScaledApp<'a>,
    exchange: StreamingExchange,
}

impl<'a> ByteConnection<'a> {
    /// Starts to connect from a client on `node`.
    fn start(app: ScaledApp<'a>, node: &str, port: u16) -> Self {
        let address = app.address(port);
        let args = [env!("CARGO_BIN_EXE_tunnel"), address.as_str()];
        let exchange = StreamingExchange::start(app.rouse.client_on(node).command(&args));
        Self { app, exchange }
    }

    /// Waits for the greeting, before any byte is sent. Returns the name of the pod that greeted.
    fn wait_greeting(&mut self) -> String {
        let name = self.app.name;
        self.app.rouse.cluster.wait(&format!("a greeting of {name}"), || {
            let status = self.exchange.exit_status();
            let text = self.received();
            let is_greeted = text.ends_with('\n');
            assert!(is_greeted || status.is_none(), "{name}: lost after {text:?}: {status:?}");
            let pod = text.strip_prefix("Hello from ").and_then(|it| it.split(' ').next());
            pod.filter(|_| is_greeted).map(str::to_owned)
        })
    }

    /// Sends `text` and ends the client's half of the connection. Asserts that the echo comes back before the end.
    fn finish(mut self, text: &str) {
        let greeting = self.received();
        self.exchange.send_part(text);
        self.exchange.end_body();
        let name = self.app.name;
        let description = format!("the end of a connection to {name}");
        let status = self.app.rouse.cluster.wait(&description, || self.exchange.exit_status());
        assert_eq!(self.received(), greeting + text, "{name}: {status}");
        assert!(status.success(), "{name}: {status}");
    }

    fn received(&self) -> String {
        String::from_utf8_lossy(&self.exchange.received()).into_owned()
    }
}

#[test]
fn connections_of_every_port_and_protocol_wake_a_pod_and_keep_it() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-bytes");
    let namespace = &namespace.name;
    let bytes = ScaledApp::deployment(&rouse, namespace, "bytes");
    let ports = ScaledApp::deployment(&rouse, namespace, "ports");
    let db = ScaledApp { kind: "StatefulSet", ..ScaledApp::deployment(&rouse, namespace, "db") };
    let echo = "{name: echo, port: 5432, targetPort: echo}";
    let both = format!("ports: [{{name: http, port: 80, targetPort: 8080}}, {echo}]");
    for (app, replicas, spec) in [
        (bytes, 1, "ports: [{port: 5432}]"),
        (ports, 1, both.as_str()),
        (db, 2, format!("ports: [{echo}]").as_str()),
    ] {
        let workload = app.workload_manifest(replicas, ECHO_CONTAINER);
        app.apply(&[workload, app.service_manifest(spec)]);
    }
    [bytes, ports, db].iter().for_each(ScaledApp::wait_asleep);

    // Nothing is sent before the server has spoken.
    let connect = |app, node| {
        let mut connection = ByteConnection::start(app, node, ECHO_PORT);
        let pod = connection.wait_greeting();
        (connection, pod)
    };
    let (kept, kept_pod) = connect(bytes, "node1");
    let (to_ports, ports_pod) = connect(ports, "node2");
    let (to_db, first_pod) = connect(db, "node1");
    assert_eq!(first_pod, "db-0", "it starts its pods in order");
    assert_eq!(db.wait_pods(2), ["db-0", "db-1"]);
    assert_eq!(ports.request_from("node1"), ports_pod, "one pod has both ports");
    to_ports.finish("of a pod with two ports");
    to_db.finish("of a StatefulSet");
    ports.wait_asleep();
    db.wait_asleep();

    // The window of this connection has passed as well, and it has sent nothing.
    assert_eq!(bytes.wait_pods(1), [kept_pod], "an open connection keeps its pod");
    kept.finish("late");
    let pod = ports.request_from("node1");
    let (to_ports, same_pod) = connect(ports, "node2");
    assert_eq!(same_pod, pod, "the other port wakes it, too");
    to_ports.finish("");
    bytes.wait_asleep();
}

#[test]
fn a_node_port_wakes_a_service_and_without_its_annotation_everything_is_given_back() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-front");
    let namespace = &namespace.name;
    let apps @ [front, kept, deleted] =
        ["front", "kept", "deleted"].map(|name| ScaledApp::deployment(&rouse, namespace, name));
    for (app, replicas, spec) in [(front, 1, "type: NodePort, "), (kept, 2, ""), (deleted, 1, "")] {
        let service = app.service_manifest(&format!("{spec}{HTTP_PORTS}"));
        app.apply(&[app.workload_manifest(replicas, ""), service]);
    }
    apps.iter().for_each(ScaledApp::wait_asleep);

    // kube-proxy leads such clients, so its rules must lead to an activator.
    let port = &front.get("service")["spec"]["ports"][0]["nodePort"];
    let url = format!("http://{}:{port}/", rouse.node_address());
    assert_ne!(front.activator_slices(), Some(Vec::new()), "a slice leads to activators");
    let pod = rouse.cluster.wait("a response by the node port", || {
        let response = rouse.get_from_outside(&url, &[]);
        (response.status == 200).then(|| response.pod().to_owned())
    });
    rouse.cluster.wait("kube-proxy to lead to the pod again", || {
        assert_eq!(rouse.get_from_outside(&url, &[]).pod(), pod, "it stays awake");
        front.activator_slices()?.is_empty().then_some(())
    });

    let annotation = "rouse.dev/scale-to-zero-";
    front.kubectl(&["annotate", "service", "front", annotation]);
    kept.kubectl(&["annotate", "service", "kept", annotation]);
    deleted.kubectl(&["delete", "service", "deleted"]);
    front.wait_given_back(1);
    assert_eq!(front.wait_pods(1), [pod], "the pod of an awake one stays");
    kept.wait_given_back(2);
    kept.wait_pods(2);
    deleted.wait_given_back(1);
    deleted.wait_pods(1);
    for app in [front, kept] {
        let url = rouse.service_url(namespace, app.name);
        rouse.cluster.wait("a response without Rouse", || {
            (rouse.client_on("node1").get(&url).status == 200).then_some(())
        });
    }
}

/// Sends 40 requests of HTTP from each node at once, which a sleeping Service holds.
fn send_requests(app: ScaledApp<'_>) {
    let address = app.address(80);
    let args = ["--stages", "4x60s", "--requests", "40"];
    let loads = NODES.map(|node| app.rouse.client_on(node).start_load(&address, app.name, &args));
    loads.into_iter().for_each(|load| assert_none_lost(&load.finish(), 40));
}

/// Opens eight connections of raw TCP from each node at once, each of which gets its echo.
fn open_connections(app: ScaledApp<'_>) {
    let open = |number: usize| ByteConnection::start(app, NODES[number % 2], ECHO_PORT);
    let mut connections: Vec<ByteConnection<'_>> = (0..16).map(open).collect();
    for connection in &mut connections {
        connection.wait_greeting();
    }
    for (number, connection) in connections.into_iter().enumerate() {
        connection.finish(&format!("connection {number}"));
    }
}

/// Lets the workload sleep three times, and sends to it: when all its pods are gone, and in the second round as soon as
/// it is scaled to zero, while they end.
fn run_rounds(app: ScaledApp<'_>, send: impl Fn(ScaledApp<'_>)) {
    for round in 0..3 {
        match round {
            1 => app.wait_scaled_to_zero(),
            _ => app.wait_asleep(),
        }
        send(app);
    }
}

#[test]
fn no_request_and_no_connection_is_lost_over_three_rounds_of_sleep_and_wake() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-rounds");
    let web = ScaledApp::deployment(&rouse, &namespace.name, "web");
    let bytes = ScaledApp::deployment(&rouse, &namespace.name, "bytes");
    web.apply(&[web.workload_manifest(2, ""), web.service_manifest(HTTP_PORTS)]);
    let service = bytes.service_manifest("ports: [{name: echo, port: 5432}]");
    bytes.apply(&[bytes.workload_manifest(2, ECHO_CONTAINER), service]);
    thread::scope(|scope| {
        scope.spawn(|| run_rounds(web, send_requests));
        run_rounds(bytes, open_connections);
    });
}
