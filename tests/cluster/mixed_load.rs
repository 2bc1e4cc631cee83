//! A service under mixed load, from pods on both nodes and from outside, with a check of every request at the end.
#![allow(clippy::print_stdout, reason = "the output shows the progress of the load")]

use std::net::SocketAddr;

use serde_json::Value;
use tests::flood::{FloodOutcome, FloodProcess, not_served_once};
use tests::installed_cluster::RouseCluster;
use tests::knative_features::EnabledFeatures;
use tests::shared_folder::SharedFolder;
use tests::test_cluster::{HELLO_IMAGE, TestNamespace};

/// Clients on each node, by kind and number: new, idle and busy connections, short and long requests.
const NODE_CLIENTS: [&str; 8] = [
    "new-get=2",
    "new-post=2",
    "idle-get=12",
    "idle-post=12",
    "busy-get=20",
    "busy-post=20",
    "long-get=2",
    "long-post=2",
];
/// Clients outside of the cluster, through the gateway, by kind and number.
const GATEWAY_CLIENTS: [&str; 8] = [
    "new-get=1",
    "new-post=1",
    "idle-get=4",
    "idle-post=4",
    "busy-get=8",
    "busy-post=8",
    "long-get=1",
    "long-post=1",
];
/// Target of requests at once in a pod. The clients above are 172, so only additional load exceeds it, even if the
/// processors are short and all clients wait at once.
pub(crate) const TARGET_CONCURRENCY: u32 = 180;
/// Traffic block that sends all requests to the newest revision.
pub(crate) const LATEST_TRAFFIC: &str = "[{latestRevision: true, percent: 100}]";
/// Highest number of printed lines about lost requests.
const MAX_PRINTED_LOSSES: usize = 20;
/// Highest number of lost requests that the message of a failed test describes.
const MAX_LOSSES_IN_MESSAGE: usize = 2;
/// Number of log entries about stops in the message of a failed test. A report of a failed run has its first lines only.
const MAX_STOPS_IN_MESSAGE: usize = 8;

/// Features that allow writable volumes in pods.
const WRITABLE: [&str; 2] =
    ["kubernetes.podspec-persistent-volume-claim", "kubernetes.podspec-persistent-volume-write"];

/// Options of the service under test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloodAppOptions {
    /// True if the application ends at once on SIGTERM.
    pub(crate) exits_on_term: bool,
    /// Lowest number of pods.
    pub(crate) min_pods: u32,
}

/// A service, its clients and its settings.
pub(crate) struct FloodFixture<'a> {
    pub(crate) rouse: &'a RouseCluster,
    pub(crate) app: FloodAppOptions,
    pub(crate) version: u32,
    namespace: TestNamespace<'a>,
    /// Directory on every node where pods record the requests that they served.
    folder: SharedFolder,
    service_address: SocketAddr,
    features: EnabledFeatures<'a>,
}

impl<'a> FloodFixture<'a> {
    /// Creates the service and waits until it is ready.
    pub(crate) fn new(rouse: &'a RouseCluster, test: &str, app: FloodAppOptions) -> Self {
        let namespace = rouse.namespace(test);
        let folder = SharedFolder::new(&namespace.name);
        let service_address = SocketAddr::from(([0, 0, 0, 0], 0));
        let features = EnabledFeatures::enable(&rouse.cluster, &WRITABLE);
        let mut fixture =
            Self { rouse, app, version: 1, namespace, folder, service_address, features };
        let name = fixture.namespace_name().to_owned();
        rouse
            .apply(&name, &volume_manifest(&name, &fixture.folder.path()))
            .expect("a volume may be made");
        fixture.features.apply(rouse, &name, &fixture.service_manifest(LATEST_TRAFFIC));
        rouse.wait_ready(&name, "ksvc", "app");
        let address = rouse.service_address(&name, "app");
        fixture.service_address = address.parse().expect("an address");
        fixture
    }

    /// Name of the namespace of all objects.
    pub(crate) fn namespace_name(&self) -> &str {
        &self.namespace.name
    }

    /// Manifest of the service's present version.
    ///
    /// An application that gets SIGTERM in its first milliseconds, as PID 1 and without a handler yet, ignores it. That
    /// happens if no agent responds to the preStop hook. `timeoutSeconds` then bounds the time until SIGKILL. Agents close
    /// a connection with long requests in a pause between two. On a busy machine they meet only one of several pauses,
    /// which took more than 60 s.
    pub(crate) fn service_manifest(&self, traffic: &str) -> String {
        let (version, FloodAppOptions { exits_on_term, min_pods }) = (self.version, self.app);
        let exits_on_term = u8::from(exits_on_term);
        format!(
            "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: app}}
spec:
  template:
    metadata:
      name: app-v{version}
      annotations:
        autoscaling.knative.dev/min-scale: \"{min_pods}\"
        autoscaling.knative.dev/window: 6s
        autoscaling.knative.dev/target: \"{TARGET_CONCURRENCY}\"
        autoscaling.knative.dev/target-utilization-percentage: \"100\"
    spec:
      timeoutSeconds: 180
      containers:
      - image: \"{HELLO_IMAGE}\"
        env:
        - {{name: HELLO_EXIT_ON_TERM, value: \"{exits_on_term}\"}}
        - {{name: HELLO_IDS, value: /ids}}
        volumeMounts: [{{name: ids, mountPath: /ids}}]
      volumes: [{{name: ids, persistentVolumeClaim: {{claimName: ids, readOnly: false}}}}]
  traffic: {traffic}
"
        )
    }

    /// All pods of the service, with terminating ones.
    pub(crate) fn pods(&self) -> Vec<Value> {
        self.rouse.pods(self.namespace_name(), "app")
    }

    /// Names of the pods that take requests, each with its node.
    pub(crate) fn serving_pods(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let is_serving = |pod: &&Value| {
            let meta = &pod["metadata"];
            let is_draining = !meta["annotations"]["rouse.dev/draining"].is_null();
            meta["deletionTimestamp"].is_null()
                && !is_draining
                && pod["status"]["phase"] == "Running"
        };
        let pods = self.pods();
        let serving = pods.iter().filter(is_serving);
        serving
            .map(|pod| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"])))
            .collect()
    }

    /// Starts load from both nodes and from outside.
    pub(crate) fn start_floods(&self) -> [FloodProcess; 3] {
        let floods = [
            self.flood_from_node("node1", 1, &NODE_CLIENTS),
            self.flood_from_node("node2", 2, &NODE_CLIENTS),
            self.flood_through_gateway(3, &GATEWAY_CLIENTS),
        ];
        self.wait_progress(&floods, 100);
        floods
    }

    /// Starts load from a pod of `node`. Each flood has a client number of its own.
    pub(crate) fn flood_from_node(
        &self,
        node: &str,
        client_number: u64,
        kinds: &[&str],
    ) -> FloodProcess {
        let program = env!("CARGO_BIN_EXE_flood");
        let command = self.rouse.client_on(node).command(&[program]);
        FloodProcess::start(command, self.service_address, &self.host(), client_number, kinds)
    }

    fn flood_through_gateway(&self, client_number: u64, kinds: &[&str]) -> FloodProcess {
        let program = env!("CARGO_BIN_EXE_flood");
        let address = self.rouse.gateway().parse().expect("an address and a port");
        let command = self.rouse.cluster.command(&[program]).expect("a cluster of xtask's");
        FloodProcess::start(command, address, &self.host(), client_number, kinds)
    }

    fn host(&self) -> String {
        format!("app.{}.example.com", self.namespace_name())
    }

    /// Waits until every flood has `count` further responses.
    pub(crate) fn wait_progress(&self, floods: &[FloodProcess], count: u64) {
        // All targets at first: the floods proceed at the same time.
        let targets: Vec<u64> = floods.iter().map(|flood| flood.answered() + count).collect();
        for (flood, target) in floods.iter().zip(targets) {
            self.rouse.cluster.wait("responses", || (flood.answered() >= target).then_some(()));
        }
    }

    /// Ends the load and checks all results.
    pub(crate) fn finish_and_check(&self, floods: [FloodProcess; 3]) {
        // All floods end before any is checked: a panic would leave the others running.
        let outcomes = floods.map(FloodProcess::stop);
        for (client, outcome) in ["node1", "node2", "gateway"].into_iter().zip(&outcomes) {
            self.check_outcome(client, outcome);
        }
    }

    /// Asserts that every request was answered, and served exactly once.
    pub(crate) fn check_outcome(&self, client: &str, outcome: &FloodOutcome) {
        let FloodOutcome { issued, answered, direct, stale_connections, lost, .. } = outcome;
        println!(
            "{client}: {issued} requests, {answered} answered, {direct} direct, \
             {stale_connections} stale connections"
        );
        let wrong_counts = not_served_once(outcome, &self.folder.read_all());
        for (id, count) in wrong_counts.iter().take(MAX_PRINTED_LOSSES) {
            println!("{client}: request {id} was served {count} times");
        }
        for lost in lost.iter().take(MAX_PRINTED_LOSSES) {
            println!("{client}: lost {lost}, served by {:?}", self.pods_that_served(lost));
        }
        if let Some(first) = lost.first() {
            let stops = self.stops_before(first["lost_at"].as_str().unwrap_or_default());
            let losses = lost.iter().take(MAX_LOSSES_IN_MESSAGE);
            let losses = losses.map(|lost| format!("{lost} by {:?}", self.pods_that_served(lost)));
            let losses = losses.collect::<Vec<_>>().join("\n");
            // In the message as well, since some reports of a failed run have only that.
            panic!("{client}: {} requests were lost: {losses}\n{stops}", lost.len());
        }
        assert_eq!(wrong_counts.len(), 0, "{client}: requests were not served once");
        assert_eq!(issued, answered);
    }

    /// Names of the pods to which a lost request came.
    fn pods_that_served(&self, lost: &Value) -> Vec<String> {
        self.folder.files_with_line(&lost["id"].to_string())
    }

    /// Returns the agents' log entries of the last stops of pods before a time of day (`HH:MM:SS.mmm`), one line for each
    /// preStop request and each response. A request without a response is of a pod that its kubelet stopped at the end
    /// of the grace period.
    fn stops_before(&self, time: &str) -> String {
        let logs = self.rouse.agent_logs().unwrap_or_else(|error| error);
        let steps = ["the kubelet waits to stop", "the kubelet may stop"];
        let is_step = |line: &&str| steps.iter().any(|step| line.contains(step));
        let time_of = |line: &str| line.split_once('T').map(|(_, rest)| rest.to_owned());
        let is_before = |line: &&str| time_of(line).is_some_and(|it| it.as_str() <= time);
        let mut lines: Vec<&str> = logs.lines().filter(is_step).filter(is_before).collect();
        // Each begins with its time.
        lines.sort_unstable();
        lines[lines.len().saturating_sub(MAX_STOPS_IN_MESSAGE)..].join("\n")
    }
}

/// Prints the number of requests lost so far.
pub(crate) fn print_losses(description: &str, floods: &[FloodProcess]) {
    let lost: u64 = floods.iter().map(FloodProcess::lost).sum();
    let answered: u64 = floods.iter().map(FloodProcess::answered).sum();
    println!("{description}: {lost} lost of {answered} until now");
    for lost in floods.iter().filter_map(FloodProcess::last_loss) {
        println!("  {lost}");
    }
}

/// Manifest of a volume on a directory of the nodes, for pods to write to.
fn volume_manifest(name: &str, folder: &str) -> String {
    format!(
        "apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: \"\"
  hostPath: {{path: {folder}, type: Directory}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: ids}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: \"\"
  volumeName: {name}
  resources: {{requests: {{storage: 1Gi}}}}
"
    )
}
