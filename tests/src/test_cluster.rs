//! A real Kubernetes cluster: one of `cargo xtask cluster up`, or the one of `--kubeconfig FILE`.
//!
//! `cargo xtask test --tier cluster` chooses it by environment variables. An ambient `KUBECONFIG` is never read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::api_client;
use crate::kubectl_errors::{is_done_before, is_transport_error};
use crate::wait::{pause_after_check, sleep};

/// Name of the sample's image.
pub const HELLO_IMAGE: &str = "dev.local/hello:v1";

/// Timeout of every wait: after this time the expected state is not going to come.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(300);
/// Pause before a request is sent again after an error of transport.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A cluster to run tests on.
#[derive(Clone, Debug)]
pub struct TestCluster {
    kubectl: PathBuf,
    kubeconfig: PathBuf,
    /// Path of `xtask` and name of the cluster; `None` for a cluster that xtask did not make.
    xtask_cluster: Option<(PathBuf, String)>,
}

impl TestCluster {
    /// Returns the cluster of this test run.
    pub fn from_environment() -> Self {
        if let Some(kubeconfig) = std::env::var_os("ROUSE_KUBECONFIG") {
            return Self {
                kubectl: "kubectl".into(),
                kubeconfig: kubeconfig.into(),
                xtask_cluster: None,
            };
        }
        Self::by_name(&required_variable("ROUSE_CLUSTER"))
    }

    /// Returns the cluster `name`, which xtask made.
    pub fn by_name(name: &str) -> Self {
        let xtask = PathBuf::from(required_variable("ROUSE_XTASK"));
        let status = xtask_output(&xtask, name, &["status"]).expect("the cluster is up");
        let status: Value = serde_json::from_str(&status).expect("the status is JSON");
        let path = |key: &str| PathBuf::from(status[key].as_str().unwrap_or_default());
        Self {
            kubectl: path("kubectl"),
            kubeconfig: path("kubeconfig"),
            xtask_cluster: Some((xtask, name.to_owned())),
        }
    }

    /// Path of its kubeconfig file.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Output of `xtask cluster status`, as JSON.
    pub fn status(&self) -> Value {
        let text = self.xtask(&["status"]).expect("the cluster is up");
        serde_json::from_str(&text).expect("the status is JSON")
    }

    /// Runs `kubectl ARGS` on the host and returns its output. Runs it again after an error of transport.
    pub fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        retry_transport_errors(args, || self.try_kubectl(args))
    }

    /// Runs `kubectl ARGS` once.
    fn try_kubectl(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.kubectl);
        command.env_remove("KUBECONFIG").arg("--kubeconfig").arg(&self.kubeconfig).args(args);
        run_for_output(&mut command)
    }

    /// An object or a list as JSON, chosen by the arguments of `kubectl get`; null if there is none, or no response.
    pub fn get(&self, args: &[&str]) -> Value {
        api_client::get(&self.kubeconfig, args).unwrap_or_else(|| self.get_by_kubectl(args))
    }

    fn get_by_kubectl(&self, args: &[&str]) -> Value {
        let mut get_args = vec!["get", "--output", "json"];
        get_args.extend(args);
        let text = self.try_kubectl(&get_args).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Applies a manifest with `kubectl apply`.
    pub fn apply(&self, yaml: &str) -> Result<(), String> {
        self.kubectl_with_manifest(&["apply"], yaml)
    }

    /// Runs `kubectl ARGS -f -` with a manifest; the first argument is apply, create or delete, for example. Runs it
    /// again after an error of transport, and never after a denial by admission.
    pub fn kubectl_with_manifest(&self, args: &[&str], yaml: &str) -> Result<(), String> {
        retry_transport_errors(args, || self.try_kubectl_with_manifest(args, yaml))
    }

    /// Waits until the API server serves these kinds, each named `PLURAL.GROUP`.
    pub fn wait_established(&self, kinds: &[&str]) {
        let wait = ["wait", "--for", "condition=Established", "--timeout", "300s", "crd"];
        self.kubectl(&[&wait[..], kinds].concat()).expect("the kinds are established");
    }

    /// Runs `kubectl ARGS -f -` once.
    fn try_kubectl_with_manifest(&self, args: &[&str], yaml: &str) -> Result<(), String> {
        let mut command = Command::new(&self.kubectl);
        command.env_remove("KUBECONFIG").arg("--kubeconfig").arg(&self.kubeconfig).args(args);
        command.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.stdout(Stdio::null()).spawn().map_err(|error| error.to_string())?;
        let mut stdin = child.stdin.take().expect("the child's input was piped");
        stdin.write_all(yaml.as_bytes()).map_err(|error| error.to_string())?;
        drop(stdin);
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// Runs a program in the control plane's network namespace, with `KUBECONFIG` set, and returns its output.
    pub fn run(&self, command: &[&str]) -> Result<String, String> {
        let mut args = vec!["run", "--"];
        args.extend(command);
        self.xtask(&args)
    }

    /// Command that runs a program in the control plane's network namespace.
    pub fn command(&self, args: &[&str]) -> Result<Command, String> {
        let (xtask, name) = self.require_xtask_cluster()?;
        let mut command = Command::new(xtask);
        command.args(["cluster", "--name", name, "run", "--"]).args(args);
        Ok(command)
    }

    /// Runs a program on a node, in all of its namespaces, and returns its output.
    pub fn on_node(&self, node: &str, command: &[&str]) -> Result<String, String> {
        let mut args = vec!["run", "--node", node.trim_start_matches("node"), "--"];
        args.extend(command);
        self.xtask(&args)
    }

    /// Injects a fault: `action` is stop, resume, slow, kill, start, boot, cut or join; `part` is etcd, kube-apiserver,
    /// node1, node1/kubelet, … Refused for a cluster that xtask did not make.
    pub fn fault(&self, action: &str, part: &str) -> Result<(), String> {
        self.xtask(&["fault", action, part]).map(drop)
    }

    /// Repairs all effects of faults by another `up`.
    pub fn repair(&self) -> Result<(), String> {
        let (xtask, name) = self.require_xtask_cluster()?;
        xtask_output(xtask, name, &["up", "--image", "hello"]).map(drop)
    }

    fn xtask(&self, args: &[&str]) -> Result<String, String> {
        let (xtask, name) = self.require_xtask_cluster()?;
        xtask_output(xtask, name, args)
    }

    fn require_xtask_cluster(&self) -> Result<&(PathBuf, String), String> {
        let config = self.kubeconfig.display();
        self.xtask_cluster
            .as_ref()
            .ok_or_else(|| format!("{config} leads to a cluster that xtask did not make"))
    }

    /// Calls `check` until it returns a value, at most for [`WAIT_TIMEOUT`].
    pub fn wait<T>(&self, description: &str, mut check: impl FnMut() -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            let checked_at = Instant::now();
            if let Some(value) = check() {
                return value;
            }
            if started.elapsed() > WAIT_TIMEOUT {
                panic!("waited in vain for {description}\n{}", self.pod_table());
            }
            pause_after_check(checked_at.elapsed());
        }
    }

    /// Table of all pods with their nodes and states.
    fn pod_table(&self) -> String {
        self.try_kubectl(&["get", "pods", "--all-namespaces", "--output", "wide"])
            .unwrap_or_else(|error| error)
    }

    /// Data to analyse a failed test: pods, events, tracked connects, and logs of Rouse's components.
    fn diagnostics(&self, namespace: &str) -> String {
        let events = ["get", "events", "--namespace", namespace, "--sort-by", ".lastTimestamp"];
        let logs = ["logs", "--namespace", "knative-serving", "--all-containers", "--timestamps"];
        let selector_args =
            ["--selector", "app.kubernetes.io/part-of", "--prefix", "--tail", "100"];
        let logs = [&logs[..], &selector_args, &["--max-log-requests", "20"]].concat();
        let texts = [&events[..], &logs].map(|args| self.try_kubectl(args).unwrap_or_else(|it| it));
        [&[self.pod_table(), self.tracked_connects(namespace)], &texts[..]].concat().join("\n")
    }

    /// Connections to the ClusterIPs of a namespace that each node's kernel tracks, one in each line.
    ///
    /// A line without a response (`[UNREPLIED]`), and with the ClusterIP as the source of the expected response, is of a
    /// connect that neither an agent nor kube-proxy has led. It stays so although both know the Service by now.
    fn tracked_connects(&self, namespace: &str) -> String {
        let services = self.get(&["services", "--namespace", namespace]);
        let services = services["items"].as_array().cloned().unwrap_or_default();
        let addresses = services.iter().filter_map(|it| it["spec"]["clusterIP"].as_str());
        let patterns: Vec<&str> = addresses.flat_map(|address| ["-e", address]).collect();
        if patterns.is_empty() {
            return "no Service".to_owned();
        }
        let nodes = self.get(&["nodes"]);
        let nodes = nodes["items"].as_array().cloned().unwrap_or_default();
        let nodes = nodes.iter().filter_map(|it| it["metadata"]["name"].as_str());
        let search = [&["grep", "-wF"][..], &patterns, &["/proc/net/nf_conntrack"]].concat();
        // Without any such line, grep fails.
        let found = |node| self.on_node(node, &search).unwrap_or_else(|error| error);
        let lines: Vec<String> = nodes.map(|node| format!("{node}:\n{}", found(node))).collect();
        format!("tracked connects to {}:\n{}", patterns.join(" "), lines.join("\n"))
    }

    /// Path below `/proc` of the network namespace of a running pod.
    pub fn netns_of(&self, namespace: &str, pod: &str) -> PathBuf {
        // The pod may serve before the kubelet has reported its container.
        let (id, node) = self.wait("the pod's container", || {
            let object = self.get(&["pod", "--namespace", namespace, pod]);
            let id = object["status"]["containerStatuses"][0]["containerID"].as_str()?;
            let id = id.strip_prefix("containerd://")?.to_owned();
            Some((id, object["spec"]["nodeName"].as_str()?.to_owned()))
        });
        let socket = "/run/containerd/containerd.sock";
        let tasks = self.on_node(&node, &["ctr", "-a", socket, "-n", "k8s.io", "tasks", "ls"]);
        let tasks = tasks.expect("containerd runs");
        let line = tasks.lines().find(|line| line.starts_with(&id));
        let pid = line.and_then(|line| line.split_whitespace().nth(1)).expect("the pod runs");
        PathBuf::from(format!("/proc/{pid}/ns/net"))
    }
}

/// A Kubernetes namespace with a unique name; deleted on drop, with all its objects.
#[derive(Debug)]
pub struct TestNamespace<'a> {
    /// Name of the namespace.
    pub name: String,
    cluster: &'a TestCluster,
}

impl<'a> TestNamespace<'a> {
    /// Creates the namespace for a test.
    pub fn new(cluster: &'a TestCluster, test: &str) -> Self {
        let mut name = format!("{test}-{}", std::process::id());
        // An earlier namespace of this test, as of another round, may still be terminating.
        let earlier = count_earlier_uses(&name);
        if earlier > 0 {
            name = format!("{name}-{earlier}");
        }
        cluster.kubectl(&["create", "namespace", &name]).expect("a new namespace");
        Self { name, cluster }
    }
}

/// Returns the number of earlier calls with this name in this process.
fn count_earlier_uses(name: &str) -> u32 {
    static USES: Mutex<BTreeMap<String, u32>> = Mutex::new(BTreeMap::new());
    let mut uses = USES.lock().unwrap_or_else(PoisonError::into_inner);
    let count = uses.entry(name.to_owned()).or_default();
    *count += 1;
    *count - 1
}

impl Drop for TestNamespace<'_> {
    #[allow(clippy::print_stderr, reason = "a test's own output is where its reader looks")]
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.cluster.diagnostics(&self.name));
        }
        let args = ["delete", "namespace", &self.name, "--wait=false"];
        if let Err(error) = self.cluster.kubectl(&args) {
            eprintln!("namespace {}: {error}", self.name);
        }
    }
}

/// Runs `work` on a thread inside the network namespace `file`.
pub fn in_netns<T: Send>(file: &Path, work: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(file).expect("the namespace exists");
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter it");
            work()
        });
        thread.join().expect("the work does not panic")
    })
}

/// Queries `server` for the IPv4 (type 1) or IPv6 (type 28) addresses of `name`, and returns them as text.
pub fn resolve(server: SocketAddr, name: &str, kind: u8) -> std::io::Result<Vec<String>> {
    let mut question = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(u8::try_from(label.len()).expect("labels are short"));
        question.extend(label.as_bytes());
    }
    question.extend([0, 0, kind, 0, 1]);
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.send_to(&question, server)?;
    let mut response = [0; 1500];
    let length = socket.recv(&mut response)?;
    let size = if kind == 1 { 4 } else { 16 };
    // The response repeats the question; each record after it ends with the address, preceded by its length.
    let mut rest = response.get(question.len()..length).unwrap_or_default();
    let mut addresses = Vec::new();
    while let Some(offset) = rest.windows(2).position(|pair| pair == [0, size]) {
        let Some(bytes) = rest.get(offset + 2..offset + 2 + usize::from(size)) else { break };
        addresses.push(match <[u8; 4]>::try_from(bytes) {
            Ok(v4) => std::net::Ipv4Addr::from(v4).to_string(),
            Err(_) => <[u8; 16]>::try_from(bytes)
                .map(|v6| std::net::Ipv6Addr::from(v6).to_string())
                .unwrap_or_default(),
        });
        rest = &rest[offset + 2 + usize::from(size)..];
    }
    Ok(addresses)
}

/// Calls `send`, which runs a client of the API server with `args`, again after each error of transport, at most for
/// [`WAIT_TIMEOUT`]. Other errors are returned at once.
#[allow(clippy::print_stderr, reason = "a test's own output is where its reader looks")]
pub fn retry_transport_errors<T: Default>(
    args: &[&str],
    mut send: impl FnMut() -> Result<T, String>,
) -> Result<T, String> {
    let started = Instant::now();
    let mut has_failed = false;
    loop {
        match send() {
            Err(error) if is_transport_error(&error) && started.elapsed() < WAIT_TIMEOUT => {
                eprintln!("{args:?}: sent again after: {error}");
                has_failed = true;
                sleep(RETRY_PAUSE);
            }
            Err(error) if has_failed && is_done_before(args, &error) => return Ok(T::default()),
            result => return result,
        }
    }
}

/// Runs `xtask cluster --name NAME ARGS`, for a cluster of any name.
pub fn xtask_output(xtask: &Path, name: &str, args: &[&str]) -> Result<String, String> {
    run_for_output(Command::new(xtask).args(["cluster", "--name", name]).args(args))
}

/// Runs a command without an input. Returns its output, or what it has written to its standard error.
pub fn run_for_output(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Condition of this type; null if there is none.
pub fn find_condition(object: &Value, kind: &str) -> Value {
    let conditions = object["status"]["conditions"].as_array();
    let condition = conditions.into_iter().flatten().find(|it| it["type"] == kind);
    condition.cloned().unwrap_or_default()
}

/// Value of an environment variable that `cargo xtask test` sets.
pub fn required_variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run `cargo xtask test`"))
}
