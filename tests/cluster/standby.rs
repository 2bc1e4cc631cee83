//! Services on standby on a real Kubernetes: frozen pods answer requests, and Kubernetes sees running pods.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};
use tests::client_pod::{ClientPod, CurlResponse};
use tests::frozen_pods::is_frozen;
use tests::installed_cluster::{RouseCluster, set_config_map};
use tests::load_process::LoadProcess;

mod actions;
mod applications;
mod faults;
mod probe_thaws;
mod wakes;

/// Label `app` of the agents' pods.
const AGENT: &str = "rouse-agent";
/// Names of the nodes.
const NODES: [&str; 2] = ["node1", "node2"];

/// Key of `config-autoscaler` with the time after which frozen pods are passed over.
const AGENT_TIMEOUT_KEY: &str = "standby-agent-timeout";
/// Value for tests in which frozen pods answer themselves. With the default of 250 ms they would be passed over at times:
/// while containers start, the agent of a busy machine may answer later.
const LONG_AGENT_TIMEOUT: &str = "30s";

/// Setting that frozen pods have [`LONG_AGENT_TIMEOUT`], in force until the last test drops it. Tests that pass pods over
/// go without it, and run at no time beside the others.
///
/// A test applies it before its pods freeze. That takes a window without requests, so the order of each frozen pod has
/// the value.
struct LongAgentTimeout<'a>(&'a RouseCluster);

/// Number of running tests that have applied the setting.
static LONG_TIMEOUT_USERS: Mutex<usize> = Mutex::new(0);

impl<'a> LongAgentTimeout<'a> {
    fn apply(rouse: &'a RouseCluster) -> Self {
        let mut users = LONG_TIMEOUT_USERS.lock().unwrap_or_else(PoisonError::into_inner);
        if *users == 0 {
            set_agent_timeout(rouse, &json!(LONG_AGENT_TIMEOUT)).expect("a good value is taken");
        }
        *users += 1;
        Self(rouse)
    }
}

impl Drop for LongAgentTimeout<'_> {
    fn drop(&mut self) {
        let mut users = LONG_TIMEOUT_USERS.lock().unwrap_or_else(PoisonError::into_inner);
        *users -= 1;
        if *users == 0 {
            let _restored = set_agent_timeout(self.0, &Value::Null);
        }
    }
}

fn set_agent_timeout(rouse: &RouseCluster, value: &Value) -> Result<String, String> {
    let keys = [AGENT_TIMEOUT_KEY];
    set_config_map(&rouse.cluster, "config-autoscaler", &keys, &value.to_string())
}

/// Manifest of a service with the shortest window that keeps one frozen pod. `annotations` continue those of its
/// template, `container` is the content of its container, and `spec` are further lines of its template's spec.
///
/// Its requests may take ten minutes, and so may the end of its pods. That is longer than any wait of a test, so a pod
/// that stays frozen on SIGTERM fails the test.
fn manifest(name: &str, annotations: &str, container: &str, spec: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}}}
spec:
  template:
    metadata:
      annotations: {{autoscaling.knative.dev/window: 6s, rouse.dev/standby: \"1\"{annotations}}}
    spec:
      timeoutSeconds: 600
      containers: [{{{container}}}]
{spec}"
    )
}

/// A service that keeps one frozen pod while it sleeps.
#[derive(Clone, Copy)]
struct StandbyService<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
    name: &'a str,
}

/// The only pod of a service on standby, as it was when it was found frozen.
struct FrozenPod {
    name: String,
    uid: String,
    node: String,
    cgroup: PathBuf,
    /// Number of restarts of its containers.
    restarts: u64,
}

impl FrozenPod {
    /// Reads a pod that exists; `None` unless it is frozen.
    fn read(rouse: &RouseCluster, pod: &Value) -> Option<Self> {
        let cgroup = rouse.pod_cgroup(pod).filter(|it| is_frozen(it) == Some(true))?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let statuses = pod["status"]["containerStatuses"].as_array()?;
        Some(Self {
            name: text(&pod["metadata"]["name"])?,
            uid: text(&pod["metadata"]["uid"])?,
            node: text(&pod["spec"]["nodeName"])?,
            cgroup,
            restarts: statuses.iter().filter_map(|it| it["restartCount"].as_u64()).sum(),
        })
    }

    /// Returns true if the pod is frozen now. The kernel tells it, so no API server is needed.
    fn is_frozen(&self) -> bool {
        is_frozen(&self.cgroup) == Some(true)
    }

    /// Causes of the pod's thaws until now, in order, as the agents have logged them.
    fn thaw_causes(&self, rouse: &RouseCluster) -> Vec<String> {
        let logs = rouse.agent_logs();
        let logs = logs.unwrap_or_else(|error| panic!("logs of the agents: {error}"));
        let thaws = logs.lines().filter(|it| it.contains("pod thawed") && it.contains(&self.uid));
        let cause = |line: &str| Some(line.split_once("cause=\"")?.1.split_once('"')?.0.to_owned());
        thaws.map(|line| cause(line).unwrap_or_else(|| panic!("no cause in {line:?}"))).collect()
    }

    /// Name of the other node.
    fn other_node(&self) -> &'static str {
        NODES.into_iter().find(|node| *node != self.node).expect("there are two nodes")
    }
}

impl<'a> StandbyService<'a> {
    /// Creates the service, and waits until it is ready.
    fn create(
        rouse: &'a RouseCluster,
        namespace: &'a str,
        name: &'a str,
        annotations: &str,
        container: &str,
    ) -> Self {
        rouse
            .apply(namespace, &manifest(name, annotations, container, ""))
            .expect("admission accepts it");
        rouse.wait_ready(namespace, "ksvc", name);
        Self { rouse, namespace, name }
    }

    /// The pod of the service, if it is frozen and the service has no other one.
    fn find_frozen(&self) -> Option<FrozenPod> {
        let pods = self.rouse.pods(self.namespace, self.name);
        let [pod] = &pods[..] else { return None };
        FrozenPod::read(self.rouse, pod)
    }

    /// Waits until the service has one pod, which is frozen, and no other one.
    fn wait_frozen(&self) -> FrozenPod {
        let description = format!("{} to have one pod, a frozen one", self.name);
        self.rouse.cluster.wait(&description, || self.find_frozen())
    }

    /// Waits until the service has one pod, which is frozen and has taken the place of `old`.
    fn wait_frozen_other(&self, old: &FrozenPod) -> FrozenPod {
        let description = format!("{} to have one pod, a new frozen one", self.name);
        self.rouse.cluster.wait(&description, || self.find_frozen().filter(|it| it.uid != old.uid))
    }

    /// Waits until the service has only `pod` and it is frozen, not restarted since.
    fn wait_frozen_again(&self, pod: &FrozenPod) {
        let again = self.wait_frozen();
        assert_eq!((&again.uid, again.restarts), (&pod.uid, pod.restarts), "{}", self.name);
    }

    fn url(&self) -> String {
        self.rouse.service_url(self.namespace, self.name)
    }

    fn address(&self) -> String {
        self.rouse.service_address(self.namespace, self.name)
    }

    /// Starts one request from a client, which gives up after a minute.
    fn start_request(&self, client: &ClientPod) -> LoadProcess {
        let args = ["--stages", "1x1s", "--requests", "1", "--fresh-pct", "100"];
        client.start_load(&self.address(), self.name, &args)
    }

    /// Runs kubectl in the namespace, and returns its output.
    fn kubectl(&self, args: &[&str]) -> String {
        // The namespace comes before `args`, which may end with the arguments of a command in a pod.
        let args = [&["--namespace", self.namespace][..], args].concat();
        let result = self.rouse.cluster.kubectl(&args);
        result.unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// An object of the service in its namespace; null if there is none, or no response.
    fn get(&self, kind: &str, name: &str) -> Value {
        self.rouse.cluster.get(&[kind, "--namespace", self.namespace, name])
    }
}

/// Asserts that this pod answered the client, and saw the client itself as its peer.
fn assert_direct(response: &CurlResponse, client: &ClientPod, pod: &FrozenPod) {
    assert_eq!(response.pod(), pod.name, "{response}");
    let peer = response.header("x-peer");
    assert!(client.addresses().iter().any(|it| it == peer), "{} got {response}", client.node);
}
