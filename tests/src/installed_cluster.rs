//! A cluster of two nodes with Rouse installed, which all tests of a run share.
//!
//! The first test that needs it installs Rouse; `cargo xtask test` removes the cluster at the end, also after
//! failures. If an earlier test broke it, the next test repairs it first.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client_pod::{ClientPod, CurlResponse, curl_words};
use crate::test_cluster::{
    TestCluster, TestNamespace, find_condition, required_variable, xtask_output,
};
use crate::tls_client::TlsClients;
use crate::wait::sleep;

/// Namespace of Rouse's own components.
pub const SYSTEM_NAMESPACE: &str = "knative-serving";
/// Namespace of the client pods.
const CLIENTS_NAMESPACE: &str = "clients";
/// Names of the nodes.
const NODES: [&str; 2] = ["node1", "node2"];
/// Directories of the kubelet below a node's cgroup, one for each QoS class of pods (kubernetes
/// `pkg/kubelet/cm/pod_container_manager_linux.go`).
const POD_CGROUPS: [&str; 3] = ["kubepods", "kubepods/burstable", "kubepods/besteffort"];

/// Arguments of `rouse install` on a cluster without a load balancer. On a busy machine rollouts take minutes.
const INSTALL_ARGS: [&str; 9] = [
    "install",
    "--apply",
    "--wait",
    "--timeout",
    "900",
    "--gateway-ports",
    "5432,6379",
    "--gateway",
    "nodeport",
];
/// Longest time for which an unready part of the cluster may become ready by itself.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(60);

/// The cluster, and pods to send requests from.
#[derive(Clone, Debug)]
pub struct RouseCluster {
    /// Cluster on which Rouse is installed.
    pub cluster: TestCluster,
    /// Client pods, one on each node.
    pub clients: Vec<ClientPod>,
    /// Address of a node, for the gateway's node port.
    node_address: String,
    /// Directory of each node's cgroup v2, by the node's name.
    node_cgroups: BTreeMap<String, PathBuf>,
}

/// The cluster of this run, or the error of its failed start.
static SHARED: Mutex<Option<Result<RouseCluster, String>>> = Mutex::new(None);

impl RouseCluster {
    /// Returns the cluster of this run, with every component ready.
    pub fn shared() -> Self {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = shared.get_or_insert_with(Self::start);
        // A failed start is final for this run, because each attempt takes minutes.
        if cluster.as_ref().is_ok_and(|it| !it.becomes_healthy()) {
            *cluster = Self::start();
        }
        cluster.clone().unwrap_or_else(|error| panic!("no cluster with Rouse on it: {error}"))
    }

    /// Installs Rouse on a cluster of one test, by `rouse ARGS`. It has no clients.
    pub fn on_own_cluster(cluster: TestCluster, args: &[&str]) -> Self {
        run_rouse(&cluster, args).unwrap_or_else(|error| panic!("{args:?}: {error}"));
        let (node_address, node_cgroups) = (String::new(), BTreeMap::new());
        Self { cluster, clients: Vec::new(), node_address, node_cgroups }
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
        let nodes = status["nodes"].as_array().into_iter().flatten();
        let cgroup = |node: &Value| {
            Some((node["name"].as_str()?.to_owned(), PathBuf::from(node["cgroup"].as_str()?)))
        };
        let node_cgroups = nodes.filter_map(cgroup).collect();
        Ok(Self { cluster, clients, node_address, node_cgroups })
    }

    /// Address of the gateway from outside of the cluster: a node's address and port.
    pub fn gateway(&self) -> String {
        let service =
            self.cluster.get(&["service", "--namespace", SYSTEM_NAMESPACE, "rouse-gateway"]);
        let port = service["spec"]["ports"][0]["nodePort"].as_u64().expect("it has a node's port");
        format!("{}:{port}", self.node_address)
    }

    /// Address of the gateway's port of TLS from outside of the cluster: a node's address and port.
    pub fn gateway_tls(&self) -> String {
        let service =
            self.cluster.get(&["service", "--namespace", SYSTEM_NAMESPACE, "rouse-gateway"]);
        let ports = service["spec"]["ports"].as_array();
        let https = ports.into_iter().flatten().find(|port| port["name"] == "https");
        let port = https.and_then(|port| port["nodePort"].as_u64()).expect("it has a node's port");
        format!("{}:{port}", self.node_address)
    }

    /// Clients of that port outside of the cluster, which trust the authority in this file.
    pub fn tls_clients(&self, authority: PathBuf) -> TlsClients {
        let gateway = self.gateway_tls().parse().expect("an address and a port");
        let command = self.cluster.command(&[]).expect("a cluster of xtask's");
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let runner = words.map(|word| word.to_string_lossy().into_owned()).collect();
        TlsClients { gateway, authority, runner }
    }

    /// Address of a node, for node ports of Services.
    pub fn node_address(&self) -> &str {
        &self.node_address
    }

    /// Returns true once everything is ready; false after [`HEALTH_TIMEOUT`]. On a busy machine a probe may fail, and a
    /// rollout may outlast the test that caused it; neither needs a repair.
    fn becomes_healthy(&self) -> bool {
        let started = Instant::now();
        while !self.is_healthy() {
            if started.elapsed() > HEALTH_TIMEOUT {
                return false;
            }
            sleep(Duration::from_secs(1));
        }
        true
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

    /// Installs Rouse with these arguments, besides the settings of this run.
    pub fn install_with(&self, args: &[&str]) -> String {
        self.run_rouse(&[&INSTALL_ARGS[..], args].concat())
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

    /// Existing pods of one of Rouse's components, by its label `app`.
    pub fn component_pods(&self, component: &str) -> Vec<Value> {
        let label = format!("app={component}");
        let args = ["pods", "--namespace", SYSTEM_NAMESPACE, "--selector", &label];
        let description = format!("a list of the pods of {component}");
        self.cluster.wait(&description, || self.cluster.get(&args)["items"].as_array().cloned())
    }

    /// Returns the logs of all agents until now, or kubectl's error.
    pub fn agent_logs(&self) -> Result<String, String> {
        let args = ["logs", "--tail=-1", "--selector", "app=rouse-agent"];
        self.cluster.kubectl(&[&args[..], &["--namespace", SYSTEM_NAMESPACE]].concat())
    }

    /// Returns the client on the node `node`.
    pub fn client_on(&self, node: &str) -> &ClientPod {
        self.clients
            .iter()
            .find(|client| client.node == node)
            .expect("there is a client on each node")
    }

    /// Grants a domain to a namespace, as an administrator does.
    pub fn claim_domain(&self, domain: &str, namespace: &str) {
        let claim = format!(
            "apiVersion: networking.internal.knative.dev/v1alpha1
kind: ClusterDomainClaim
metadata: {{name: {domain}}}
spec: {{namespace: {namespace}}}
"
        );
        self.cluster.apply(&claim).expect("a claim is taken");
    }

    /// Creates a namespace for one test.
    pub fn namespace(&self, test: &str) -> TestNamespace<'_> {
        TestNamespace::new(&self.cluster, test)
    }

    /// Sends a request for `host` to the gateway, from outside of the cluster.
    pub fn get_through_gateway(&self, host: &str, path: &str, headers: &[&str]) -> CurlResponse {
        let (url, host) = (format!("http://{}{path}", self.gateway()), format!("Host: {host}"));
        self.get_from_outside(&url, &[&[host.as_str()][..], headers].concat())
    }

    /// Sends a request from outside of the cluster.
    pub fn get_from_outside(&self, url: &str, headers: &[&str]) -> CurlResponse {
        let args = curl_words(url, headers);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        CurlResponse::parse(self.cluster.run(&args))
    }

    /// Applies one or more services in `namespace` and waits until each of them is Ready.
    pub fn apply_until_ready(&self, namespace: &str, yaml: &str) {
        self.apply(namespace, yaml).expect("admission accepts it");
        let list = self.cluster.wait("a list of the services", || {
            self.cluster.get(&["ksvc", "--namespace", namespace])["items"].as_array().cloned()
        });
        for service in &list {
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
            .kubectl_with_manifest(&["delete", "--namespace", namespace, "--timeout=300s"], yaml)
    }

    /// Replaces fields of the status of an object, as the controller does that a test plays.
    pub fn patch_status(&self, namespace: &str, kind: &str, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let object = ["patch", kind, name, "--namespace", namespace];
        let change = ["--subresource=status", "--type=merge", "--patch", &patch];
        self.cluster.kubectl(&[&object[..], &change].concat()).expect("the kind has a status");
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
        let description = format!("a list of the pods of {service}");
        self.cluster.wait(&description, || self.find_pods(namespace, service))
    }

    /// Existing pods of a service; `None` without a response.
    fn find_pods(&self, namespace: &str, service: &str) -> Option<Vec<Value>> {
        let label = format!("serving.knative.dev/service={service}");
        let list = self.cluster.get(&["pods", "--namespace", namespace, "--selector", &label]);
        list["items"].as_array().cloned()
    }

    /// Directory of a pod's cgroup v2, which has those of its containers below it; `None` if no node has it.
    pub fn pod_cgroup(&self, pod: &Value) -> Option<PathBuf> {
        let node_cgroup = self.node_cgroups.get(pod["spec"]["nodeName"].as_str()?)?;
        let name = format!("pod{}", pod["metadata"]["uid"].as_str()?);
        let mut folders = POD_CGROUPS.iter().map(|folder| node_cgroup.join(folder).join(&name));
        folders.find(|folder| folder.is_dir())
    }

    /// Waits until a service has no pod.
    pub fn wait_asleep(&self, namespace: &str, service: &str) {
        self.cluster.wait(&format!("{service} to have no pod"), || {
            self.find_pods(namespace, service)?.is_empty().then_some(())
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
