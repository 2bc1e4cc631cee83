//! Shell: queries of the cluster's API server, by kubectl in the control plane's namespace.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{
    addresses::{DNS, node_addresses, pod_ranges},
    config, network,
    plan::ClusterProcess,
    start::ClusterStarter,
    state::write_file,
};
use crate::sh;

const COREDNS_MANIFEST: &str = include_str!("coredns.yaml");
/// Timeout until all nodes are Ready.
const READY_TIMEOUT: Duration = Duration::from_secs(180);

impl ClusterStarter<'_> {
    /// Command `kubectl ARGS` against this cluster.
    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<Command> {
        let netns = self.paths.netns(None);
        let mut command =
            network::netns_command(&netns, &self.programs.file("kubectl")?.to_string_lossy());
        command.env_remove("KUBECONFIG").arg("--kubeconfig").arg(self.paths.kubeconfig());
        command.args(args);
        Ok(command)
    }

    /// Output of `kubectl ARGS`; `None` if it fails.
    fn try_kubectl(&self, args: &[&str]) -> Result<Option<String>> {
        let mut kubectl = self.kubectl(args)?;
        // An API server without etcd would take a minute to report the error.
        let output = kubectl
            .arg("--request-timeout=5s")
            .stderr(Stdio::null())
            .output()
            .context("cannot start kubectl")?;
        let text = || String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(output.status.success().then(text))
    }

    /// Writes the user's kubeconfig with embedded certificates, so that the file can be copied.
    pub(crate) fn write_kubeconfig(&self) -> Result<()> {
        let file = self.paths.kubeconfig();
        let server = format!("https://127.0.0.1:{}", self.record.port);
        let kubeconfig = config::kubeconfig(&self.paths.pki(), "admin", &server).to_string();
        let temporary = file.with_extension("files");
        write_file(&temporary, &kubeconfig)?;
        let mut kubectl = Command::new(self.programs.file("kubectl")?);
        kubectl.env_remove("KUBECONFIG").arg("--kubeconfig").arg(&temporary);
        let flat = sh::capture(kubectl.args(["config", "view", "--flatten", "--raw"]))?;
        std::fs::remove_file(&temporary)?;
        write_file(&file, &flat)?;
        // On a node, a loopback address means the node itself, so nodes get a kubeconfig of their own.
        self.write_kubeconfig_for(&self.paths.kubeconfig_inside(), "admin")?;
        make_private_to_sudo_user(&file)
    }

    /// Waits until the API server reports that it is ready.
    pub(crate) fn wait_for_api_server(&self) -> Result<()> {
        let started = Instant::now();
        while self.try_kubectl(&["get", "--raw", "/readyz"])?.is_none() {
            self.check_running(ClusterProcess::ApiServer, started, Duration::from_secs(120))?;
            sh::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    pub(crate) fn has_addons(&self) -> bool {
        let args = ["get", "--namespace", "kube-system", "service/kube-dns", "deployment/coredns"];
        self.try_kubectl(&args).is_ok_and(|output| output.is_some())
    }

    pub(crate) fn apply_addons(&self) -> Result<()> {
        let mut kubectl = self.kubectl(&["apply", "-f", "-"])?;
        let mut child = kubectl.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        child
            .stdin
            .take()
            .context("the child's input was piped")?
            .write_all(COREDNS_MANIFEST.as_bytes())?;
        if !child.wait()?.success() {
            bail!("cannot apply CoreDNS");
        }
        Ok(())
    }

    /// Waits until every node is Ready and the cluster's DNS is available. Then it sets missing pod ranges.
    ///
    /// `stale_nodes` are the nodes whose kubelet was started again, with the heartbeats of the former kubelets. Such a
    /// node is Ready only with another heartbeat.
    pub(crate) fn wait_until_ready(&self, stale_nodes: &[RegisteredNode]) -> Result<()> {
        let started = Instant::now();
        let has_new_heartbeat = |node: &RegisteredNode| {
            stale_nodes.iter().all(|old| old.name != node.name || old.heartbeat != node.heartbeat)
        };
        loop {
            let nodes = self.nodes()?;
            let ready =
                nodes.iter().filter(|node| node.is_ready && has_new_heartbeat(node)).count();
            if ready == usize::from(self.record.nodes) && self.has_cluster_dns()? {
                break;
            }
            // A process that has ended never becomes ready: the error then has the end of its log.
            for node in 1..=self.record.nodes {
                for process in ClusterProcess::node_processes(node) {
                    self.check_running(process, started, READY_TIMEOUT)?;
                }
            }
            sh::sleep(Duration::from_millis(300));
        }
        for node in self.nodes()?.iter().filter(|node| !node.has_pod_range) {
            self.set_pod_range(&node.name)?;
        }
        Ok(())
    }

    /// Sets the pod range of a node. Kubernetes allocates none here, but tools read the field.
    fn set_pod_range(&self, name: &str) -> Result<()> {
        let number = name.trim_start_matches("node").parse().unwrap_or(0);
        let pods = pod_ranges(number);
        let patch = serde_json::json!({"spec": {"podCIDR": pods[0], "podCIDRs": pods}}).to_string();
        sh::capture(&mut self.kubectl(&["patch", "node", name, "--patch", &patch])?).map(drop)
    }

    fn has_cluster_dns(&self) -> Result<bool> {
        let jsonpath = "jsonpath={.status.readyReplicas}";
        let args =
            ["get", "--namespace", "kube-system", "deployment/coredns", "--output", jsonpath];
        Ok(self.try_kubectl(&args)?.is_some_and(|text| text.trim() == "1"))
    }

    /// Returns the nodes that the API server has registered. Without its response it returns none.
    pub(crate) fn nodes(&self) -> Result<Vec<RegisteredNode>> {
        let text = self.try_kubectl(&["get", "nodes", "--output", "json"])?.unwrap_or_default();
        let list: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let items = list["items"].as_array().cloned().unwrap_or_default();
        Ok(items.iter().map(RegisteredNode::from_json).collect())
    }
}

/// A node as the API server reports it.
#[derive(Debug)]
pub(crate) struct RegisteredNode {
    pub(crate) name: String,
    pub(crate) is_ready: bool,
    /// Time of the kubelet's last status update.
    heartbeat: String,
    has_pod_range: bool,
    pub(crate) version: String,
}

impl RegisteredNode {
    fn from_json(object: &serde_json::Value) -> Self {
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
        let ready = ready.cloned().unwrap_or_default();
        Self {
            name: text(&object["metadata"]["name"]),
            is_ready: ready["status"] == "True",
            heartbeat: text(&ready["lastHeartbeatTime"]),
            has_pod_range: object["spec"]["podCIDR"].is_string(),
            version: text(&object["status"]["nodeInfo"]["kubeletVersion"]),
        }
    }
}

/// Makes the file private, and gives it to the user who called sudo.
fn make_private_to_sudo_user(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))?;
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if let (Some(user), Some(group)) = (number("SUDO_UID"), number("SUDO_GID")) {
        std::os::unix::fs::chown(file, Some(user), Some(group))?;
    }
    Ok(())
}

/// Describes a running cluster, as JSON for `status` and for the table of `up`.
pub(crate) fn describe_cluster(starter: &ClusterStarter<'_>) -> Result<serde_json::Value> {
    let (paths, record) = (starter.paths, starter.record);
    let nodes: Vec<serde_json::Value> = starter
        .nodes()?
        .iter()
        .map(|node| {
            let number = node.name.trim_start_matches("node").parse().unwrap_or(0);
            // Benches run processes in pods' cgroups, so they need the node's directory.
            let group = format!("{}/{}", paths.cgroup(), node.name);
            let cgroup =
                super::cgroups::v2_directory(&group).map(|path| path.display().to_string());
            serde_json::json!({
                "name": node.name, "ready": node.is_ready, "version": node.version,
                "addresses": node_addresses(number), "pods": pod_ranges(number),
                "netns": paths.netns(Some(number)), "cgroup": cgroup.unwrap_or_default(),
            })
        })
        .collect();
    Ok(serde_json::json!({
        "name": paths.name, "kubernetes": record.kubernetes, "proxy": record.proxy, "dns": DNS,
        "kubeconfig": paths.kubeconfig(), "netns": paths.netns(None),
        "server": format!("https://127.0.0.1:{}", record.port),
        "kubectl": starter.programs.file("kubectl")?, "logs": paths.folder().join("log"),
        "kn": starter.programs.file("kn").ok(), "nodes": nodes,
    }))
}
