//! Pods that requests are sent from, and the responses to these requests.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::load_process::LoadProcess;
use crate::test_cluster::{HELLO_IMAGE, TestCluster, find_condition, required_variable};

/// Timeout of one request, in seconds, after which it counts as lost.
const REQUEST_TIMEOUT_S: &str = "60";

/// An otherwise idle pod that requests are sent from.
#[derive(Clone, Debug)]
pub struct ClientPod {
    /// Name of the pod's node.
    pub node: String,
    /// Namespace of the pod.
    pub namespace: String,
    cluster: TestCluster,
    /// Path of its network namespace, `/proc/PID/ns/net`, found once, so that requests need no API server.
    netns: PathBuf,
}

impl ClientPod {
    /// Creates a client in a namespace of the test.
    pub fn new(cluster: &TestCluster, namespace: &str, node: &str) -> Self {
        Self::apply(cluster, namespace, node).expect("a pod may be made").wait_started()
    }

    pub(crate) fn apply(
        cluster: &TestCluster,
        namespace: &str,
        node: &str,
    ) -> Result<Self, String> {
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

    pub(crate) fn wait_started(mut self) -> Self {
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
    pub(crate) fn is_running(&self) -> bool {
        self.is_ready() && self.netns.exists()
    }

    /// Path of the pod's network namespace below `/proc`.
    pub fn netns(&self) -> &Path {
        &self.netns
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
    ///
    /// Its processor time is the cluster's where the hierarchy of that controller is another one.
    pub fn command(&self, args: &[&str]) -> Command {
        // `/proc/PID` of the pod's process.
        let process = self.netns.parent().and_then(Path::parent).expect("a process has a folder");
        let script = "echo $$ > \"$0/cgroup.procs\" && netns=$1 && cpu=$2 && shift 2 && \
                      { [ ! -d \"$cpu\" ] || echo $$ > \"$cpu/cgroup.procs\"; } && \
                      exec nsenter --net=\"$netns\" \"$@\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(cgroup_of(process)).arg(&self.netns);
        shell.arg(clients_cgroup(process)).args(args);
        shell
    }
}

/// Directory of the clients' cgroup of the process' cluster, in the v1 hierarchy of the processor. It does not exist
/// where v2 has this controller, or outside of xtask's clusters.
fn clients_cgroup(process: &Path) -> PathBuf {
    let text = std::fs::read_to_string(process.join("cgroup")).expect("a process has cgroups");
    let path = text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|it| it == "cpu").then_some(path)
    });
    let cluster = path.and_then(|it| it.split('/').nth(1)).unwrap_or_default();
    Path::new("/sys/fs/cgroup/cpu").join(cluster).join("clients")
}

/// Directory of the cgroup v2 of a process.
fn cgroup_of(process: &Path) -> PathBuf {
    let text = std::fs::read_to_string(process.join("cgroup")).expect("a process has cgroups");
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).expect("one is of v2");
    let unified = Path::new("/sys/fs/cgroup/unified");
    let root = if unified.is_dir() { unified } else { Path::new("/sys/fs/cgroup") };
    root.join(path.trim_start_matches('/'))
}

pub(crate) fn curl_words(url: &str, headers: &[&str]) -> Vec<String> {
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
    pub(crate) fn parse(output: Result<String, String>) -> Self {
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
