//! A cluster of two nodes with Rouse installed, which all tests of a run share.
//!
//! The first test that needs it installs Rouse; `cargo xtask test` removes the cluster at the end, also after
//! failures. If an earlier test broke it, the next test repairs it first.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::load_process::LoadProcess;
use crate::test_cluster::{TestCluster, TestNamespace, required_variable, xtask_output};

/// Namespace of Rouse's own components.
pub const SYSTEM_NAMESPACE: &str = "knative-serving";
/// Name of the sample's image.
pub const HELLO_IMAGE: &str = "dev.local/hello:v1";
/// Namespace of the client pods.
const CLIENTS_NAMESPACE: &str = "clients";
/// Names of the nodes.
const NODES: [&str; 2] = ["node1", "node2"];
/// Timeout of one request, in seconds, after which it counts as lost.
const REQUEST_TIMEOUT_S: &str = "60";

/// Arguments of `rouse install` on a cluster without a load balancer.
const INSTALL_ARGS: [&str; 5] = ["install", "--apply", "--wait", "--gateway", "nodeport"];

/// The cluster, and pods to send requests from.
#[derive(Clone, Debug)]
pub struct RouseCluster {
    /// Cluster on which Rouse is installed.
    pub cluster: TestCluster,
    /// Client pods, one on each node.
    pub clients: Vec<ClientPod>,
    /// Address of a node, for the gateway's node port.
    node_address: String,
}

/// The cluster of this run, or the error of its failed start.
static SHARED: Mutex<Option<Result<RouseCluster, String>>> = Mutex::new(None);

impl RouseCluster {
    /// Returns the cluster of this run, with every component ready.
    pub fn shared() -> Self {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = shared.get_or_insert_with(Self::start);
        // A failed start is final for this run, because each attempt takes minutes.
        if cluster.as_ref().is_ok_and(|it| !it.is_healthy()) {
            *cluster = Self::start();
        }
        cluster.clone().unwrap_or_else(|error| panic!("no cluster with Rouse on it: {error}"))
    }

    fn start() -> Result<Self, String> {
        let (xtask, name) =
            (PathBuf::from(required_variable("ROUSE_XTASK")), required_variable("ROUSE_CLUSTER"));
        // For developers of Rouse, who have started the cluster with images of their own.
        if std::env::var_os("ROUSE_INSTALLED_AS_IS").is_none() {
            let args = ["up", "--nodes", "2", "--image", "hello", "--image", "rouse"];
            xtask_output(&xtask, &name, &args)?;
        }
        let cluster = TestCluster::by_name(&name);
        // A killed test may have left a node cordoned.
        cluster.kubectl(&["uncordon", NODES[0], NODES[1]])?;
        run_rouse(&cluster, &INSTALL_ARGS)?;
        Self::with_clients(cluster)
    }

    /// Sets up the clients on a cluster with Rouse installed.
    fn with_clients(cluster: TestCluster) -> Result<Self, String> {
        let result = cluster.kubectl(&["create", "namespace", CLIENTS_NAMESPACE]);
        if let Err(error) = result.map(drop)
            && !error.contains("AlreadyExists")
        {
            return Err(error);
        }
        let pods = NODES.map(|node| ClientPod::apply(&cluster, CLIENTS_NAMESPACE, node));
        let pods = pods.into_iter().collect::<Result<Vec<_>, _>>()?;
        let clients = pods.into_iter().map(ClientPod::wait_started).collect();
        let status = cluster.status();
        let node_address =
            status["nodes"][0]["addresses"][0].as_str().unwrap_or_default().to_owned();
        Ok(Self { cluster, clients, node_address })
    }

    /// Address of the gateway from outside of the cluster: a node's address and port.
    pub fn gateway(&self) -> String {
        let service =
            self.cluster.get(&["service", "--namespace", SYSTEM_NAMESPACE, "rouse-gateway"]);
        let port = service["spec"]["ports"][0]["nodePort"].as_u64().expect("it has a node's port");
        format!("{}:{port}", self.node_address)
    }

    /// Returns true if every component, both nodes and the clients are ready.
    fn is_healthy(&self) -> bool {
        let list = self.cluster.get(&["deployments,daemonsets", "--namespace", SYSTEM_NAMESPACE]);
        let objects = list["items"].as_array().cloned().unwrap_or_default();
        let nodes = self.cluster.get(&["nodes"]);
        let nodes = nodes["items"].as_array().cloned().unwrap_or_default();
        let clients = self.clients.iter().all(ClientPod::is_running);
        objects.len() == 4
            && objects.iter().all(is_ready)
            && nodes.len() == 2
            && nodes.iter().all(|it| find_condition(it, "Ready")["status"] == "True")
            && nodes.iter().all(|it| it["spec"]["unschedulable"].is_null())
            && clients
    }

    /// Runs `rouse ARGS --kubeconfig FILE` and returns its output.
    pub fn run_rouse(&self, args: &[&str]) -> String {
        run_rouse(&self.cluster, args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Installs Rouse, also if it is installed already, with the settings of this run.
    pub fn install(&self) -> String {
        self.run_rouse(&INSTALL_ARGS)
    }

    /// Excludes the node `node` from scheduling until the returned value is dropped, also by a failed test.
    pub fn cordon(&self, node: &str) -> CordonedNode<'_> {
        self.cluster.kubectl(&["cordon", node]).expect("an operator may");
        CordonedNode { cluster: &self.cluster, node: node.to_owned() }
    }

    /// Waits until the replicas of each component run on more than one node. A rollout may have left them on the same
    /// one, as may a node that was away: Kubernetes moves no pod that runs, so one of them is deleted.
    pub fn spread_components(&self) {
        for component in ["activator", "autoscaler", "controller"] {
            self.cluster.wait(&format!("{component} on both nodes"), || {
                let pods = self.component_pods(component);
                let nodes: BTreeSet<&str> =
                    pods.iter().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
                let are_ready =
                    pods.iter().all(|pod| find_condition(pod, "Ready")["status"] == "True");
                if pods.len() != 2 || !are_ready {
                    return None;
                }
                if nodes.len() == 2 {
                    return Some(());
                }
                let name = pods[0]["metadata"]["name"].as_str()?;
                let delete = ["delete", "pod", "--namespace", SYSTEM_NAMESPACE, name];
                self.cluster.kubectl(&delete).expect("an operator may");
                None
            });
        }
    }

    /// Existing pods of one of Rouse's components.
    fn component_pods(&self, component: &str) -> Vec<Value> {
        let label = format!("app={component}");
        let list =
            self.cluster.get(&["pods", "--namespace", SYSTEM_NAMESPACE, "--selector", &label]);
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// Returns the client on the node `node`.
    pub fn client_on(&self, node: &str) -> &ClientPod {
        self.clients
            .iter()
            .find(|client| client.node == node)
            .expect("there is a client on each node")
    }

    /// Creates a namespace for one test.
    pub fn namespace(&self, test: &str) -> TestNamespace<'_> {
        TestNamespace::new(&self.cluster, test)
    }

    /// Sends a request for `host` to the gateway, from outside of the cluster.
    pub fn get_through_gateway(&self, host: &str, path: &str, headers: &[&str]) -> CurlResponse {
        let (url, host) = (format!("http://{}{path}", self.gateway()), format!("Host: {host}"));
        let args = curl_words(&url, &[&[host.as_str()][..], headers].concat());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        CurlResponse::parse(self.cluster.run(&args))
    }

    /// Applies one or more services in `namespace` and waits until each of them is Ready.
    pub fn apply_until_ready(&self, namespace: &str, yaml: &str) {
        self.apply(namespace, yaml).expect("admission accepts it");
        let list = self.cluster.get(&["ksvc", "--namespace", namespace]);
        for service in list["items"].as_array().into_iter().flatten() {
            let name = service["metadata"]["name"].as_str().unwrap_or_default();
            self.wait_ready(namespace, "ksvc", name);
        }
    }

    /// Runs `kubectl apply --namespace NAMESPACE` with a manifest.
    pub fn apply(&self, namespace: &str, yaml: &str) -> Result<(), String> {
        self.cluster.kubectl_with_manifest(&["apply", "--namespace", namespace], yaml)
    }

    /// Runs `kubectl delete --namespace NAMESPACE` with a manifest, and waits until its objects are gone.
    pub fn delete(&self, namespace: &str, yaml: &str) -> Result<(), String> {
        self.cluster
            .kubectl_with_manifest(&["delete", "--namespace", namespace, "--timeout=90s"], yaml)
    }

    /// Waits until the object's newest generation is Ready.
    pub fn wait_ready(&self, namespace: &str, kind: &str, name: &str) -> Value {
        self.wait_condition(namespace, kind, name, "Ready", "True")
    }

    /// Waits until a condition of the object's newest generation has this status, and returns the object.
    pub fn wait_condition(
        &self,
        namespace: &str,
        kind: &str,
        name: &str,
        condition_type: &str,
        status: &str,
    ) -> Value {
        self.cluster.wait(&format!("{kind}/{name} to be {condition_type}={status}"), || {
            let object = self.cluster.get(&[kind, "--namespace", namespace, name]);
            let is_new = object["status"]["observedGeneration"] == object["metadata"]["generation"];
            (is_new && find_condition(&object, condition_type)["status"] == status)
                .then_some(object)
        })
    }

    /// Existing pods of a service, with terminating ones.
    pub fn pods(&self, namespace: &str, service: &str) -> Vec<Value> {
        let label = format!("serving.knative.dev/service={service}");
        let list = self.cluster.get(&["pods", "--namespace", namespace, "--selector", &label]);
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until a service has no pod.
    pub fn wait_asleep(&self, namespace: &str, service: &str) {
        self.cluster.wait(&format!("{service} to have no pod"), || {
            self.pods(namespace, service).is_empty().then_some(())
        });
    }

    /// URL `http://CLUSTERIP` of a Kubernetes Service.
    pub fn service_url(&self, namespace: &str, service: &str) -> String {
        self.cluster.wait(&format!("service/{service} to have an address"), || {
            let object = self.cluster.get(&["service", "--namespace", namespace, service]);
            let address = object["spec"]["clusterIP"].as_str()?;
            Some(format!("http://{address}"))
        })
    }

    /// Address `CLUSTERIP:80` of a Kubernetes Service.
    pub fn service_address(&self, namespace: &str, service: &str) -> String {
        self.service_url(namespace, service).trim_start_matches("http://").to_owned() + ":80"
    }
}

/// Sets these keys of one of Knative's ConfigMaps to a value in JSON; `null` removes them.
pub fn set_config_map(
    cluster: &TestCluster,
    config_map: &str,
    keys: &[&str],
    value: &str,
) -> Result<String, String> {
    let data: Vec<String> = keys.iter().map(|key| format!("\"{key}\":{value}")).collect();
    let patch = format!("{{\"data\":{{{}}}}}", data.join(","));
    let args = ["patch", "configmap", "--namespace", SYSTEM_NAMESPACE, config_map];
    cluster.kubectl(&[&args[..], &["--patch", &patch]].concat())
}

/// A cordoned node, uncordoned on drop.
#[derive(Debug)]
pub struct CordonedNode<'a> {
    cluster: &'a TestCluster,
    node: String,
}

impl Drop for CordonedNode<'_> {
    fn drop(&mut self) {
        let _open = self.cluster.kubectl(&["uncordon", &self.node]);
    }
}

/// Runs `rouse ARGS --kubeconfig FILE` with the program that the image holds, too.
fn run_rouse(cluster: &TestCluster, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(required_variable("ROUSE_BIN"));
    command.args(args).arg("--kubeconfig").arg(cluster.kubeconfig()).stdin(Stdio::null());
    let output = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stdout) + &text(&output.stderr)),
    }
}

fn is_ready(object: &Value) -> bool {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let status = &object["status"];
    let (desired, ready) = match object["kind"] == "DaemonSet" {
        true => (number(&status["desiredNumberScheduled"]), number(&status["numberReady"])),
        false => (number(&object["spec"]["replicas"]), number(&status["readyReplicas"])),
    };
    desired > 0 && ready >= desired
}

/// Container of the sample application, in YAML's flow style.
pub const HELLO_CONTAINER: &str = "image: \"dev.local/hello:v1\"";

/// Manifest of a service with the shortest window. `annotations` follow the window's, and `container` is the content
/// of its container, like [`HELLO_CONTAINER`].
pub fn service_manifest(name: &str, annotations: &str, container: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}}}
spec:
  template:
    metadata:
      annotations: {{autoscaling.knative.dev/window: 6s{annotations}}}
    spec:
      containers: [{{{container}}}]
"
    )
}

/// Condition of this type; null if there is none.
pub fn find_condition(object: &Value, kind: &str) -> Value {
    let conditions = object["status"]["conditions"].as_array();
    let condition = conditions.into_iter().flatten().find(|it| it["type"] == kind);
    condition.cloned().unwrap_or_default()
}

/// An otherwise idle pod that requests are sent from.
#[derive(Clone, Debug)]
pub struct ClientPod {
    /// Name of the pod's node.
    pub node: String,
    /// Namespace of the pod.
    pub namespace: String,
    cluster: TestCluster,
    /// Path of its network namespace, found once, so that requests need no API server.
    netns: PathBuf,
}

impl ClientPod {
    /// Creates a client in a namespace of the test.
    pub fn new(cluster: &TestCluster, namespace: &str, node: &str) -> Self {
        Self::apply(cluster, namespace, node).expect("a pod may be made").wait_started()
    }

    fn apply(cluster: &TestCluster, namespace: &str, node: &str) -> Result<Self, String> {
        let yaml = format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: client-{node}, namespace: {namespace}, labels: {{app: client}}}}
spec:
  nodeName: {node}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  tolerations: [{{operator: Exists}}]
  containers:
  - {{name: client, image: \"{HELLO_IMAGE}\", imagePullPolicy: Never, env: [{{name: PORT, value: \"8080\"}}]}}
"
        );
        cluster.apply(&yaml)?;
        let (node, namespace) = (node.to_owned(), namespace.to_owned());
        Ok(Self { node, namespace, cluster: cluster.clone(), netns: PathBuf::new() })
    }

    fn wait_started(mut self) -> Self {
        self.cluster.wait("a client", || self.is_ready().then_some(()));
        self.netns = self.cluster.netns_of(&self.namespace, &self.name());
        self
    }

    fn name(&self) -> String {
        format!("client-{}", self.node)
    }

    fn is_ready(&self) -> bool {
        let pod = self.cluster.get(&["pod", "--namespace", &self.namespace, &self.name()]);
        find_condition(&pod, "Ready")["status"] == "True"
    }

    /// Returns true if the pod is ready and its process is still the same.
    fn is_running(&self) -> bool {
        self.is_ready() && self.netns.exists()
    }

    /// Addresses by which others see the pod.
    pub fn addresses(&self) -> Vec<String> {
        let pod = self.cluster.get(&["pod", "--namespace", &self.namespace, &self.name()]);
        let addresses = pod["status"]["podIPs"].as_array().into_iter().flatten();
        addresses.filter_map(|it| it["ip"].as_str().map(str::to_owned)).collect()
    }

    /// Sends one request and returns the response.
    pub fn get(&self, url: &str) -> CurlResponse {
        self.get_with_headers(url, &[])
    }

    /// Returns true if a connection can be established. It sends no request, so it wakes no service.
    pub fn can_connect(&self, url: &str) -> bool {
        let script = format!("exec 3<>/dev/tcp/{}/80", url.trim_start_matches("http://"));
        let mut command = self.command(&["timeout", "5", "bash", "-c", &script]);
        // A refusal is an expected result here, so its message is dropped.
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|it| it.success())
    }

    /// Sends one request with these headers.
    pub fn get_with_headers(&self, url: &str, headers: &[&str]) -> CurlResponse {
        let args = curl_words(url, headers);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = self.command(&args).stdin(Stdio::null()).output().expect("sh is there");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CurlResponse::parse(match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        })
    }

    /// Starts load, like `cargo xtask load ARGS --addr --host`.
    pub fn start_load(&self, address: &str, host: &str, args: &[&str]) -> LoadProcess {
        let xtask = required_variable("ROUSE_XTASK");
        let args = [&[xtask.as_str(), "load", "--addr", address, "--host", host], args].concat();
        let mut command = self.command(&args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        LoadProcess::from_child(command.spawn().expect("sh is there"))
    }

    /// Command in the pod's network and cgroup, where programs see its connects, with the host's files.
    pub fn command(&self, args: &[&str]) -> Command {
        let process = self.netns.parent().and_then(Path::parent).expect("a process has a folder");
        let script = "echo $$ > \"$0/cgroup.procs\" && netns=$1 && shift && \
                      exec nsenter --net=\"$netns\" \"$@\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(cgroup_of(process)).arg(&self.netns).args(args);
        shell
    }
}

/// Directory of the cgroup v2 of a process.
fn cgroup_of(process: &Path) -> PathBuf {
    let text = std::fs::read_to_string(process.join("cgroup")).expect("a process has cgroups");
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).expect("one is of v2");
    let unified = Path::new("/sys/fs/cgroup/unified");
    let root = if unified.is_dir() { unified } else { Path::new("/sys/fs/cgroup") };
    root.join(path.trim_start_matches('/'))
}

fn curl_words(url: &str, headers: &[&str]) -> Vec<String> {
    let args = "curl --silent --show-error --include --noproxy * --max-time";
    let mut args: Vec<String> = args.split(' ').map(str::to_owned).collect();
    args.push(REQUEST_TIMEOUT_S.to_owned());
    for header in headers {
        args.extend(["--header".to_owned(), (*header).to_owned()]);
    }
    args.push(url.to_owned());
    args
}

/// Response to one request.
#[derive(Clone, Debug, Default)]
pub struct CurlResponse {
    /// Status code; 0 without a response.
    pub status: u16,
    /// Lines of the response's head.
    pub head: String,
    /// Body of the response, or the reason that there is none.
    pub body: String,
}

impl CurlResponse {
    fn parse(output: Result<String, String>) -> Self {
        let text = match output {
            Ok(text) => text,
            Err(body) => return Self { body, ..Self::default() },
        };
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_owned(), body: body.to_owned() }
    }

    /// Value of a header; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let header_line = lines.find(|(key, _)| key.eq_ignore_ascii_case(name));
        header_line.map(|(_, value)| value.trim()).unwrap_or_default()
    }

    /// Name of the pod that responded; panics if none did.
    pub fn pod(&self) -> &str {
        assert_eq!(self.status, 200, "{self}");
        let pod = self.header("x-pod");
        assert!(!pod.is_empty(), "no pod name in the response: {self}");
        pod
    }
}

impl fmt::Display for CurlResponse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}\n{}", self.head, self.body)
    }
}
