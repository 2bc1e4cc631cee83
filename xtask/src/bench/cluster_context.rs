//! Shell: environment of the cluster benches: a Kubernetes cluster, Rouse on it, and pods to send requests from.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{CaseSelection, is_condition_true, process_memory::map_bytes, service_manifest};
use crate::{frozen_pods::frozen_pods, image, sh, workspace::CargoWorkspace};

/// Timeout of every wait: after this time the expected state is not going to come.
const WAIT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time between two checks of a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Namespace of the components, as shipped.
pub(super) const SYSTEM_NAMESPACE: &str = "knative-serving";

/// Settings and programs with which clusters are created.
#[derive(Clone, Debug)]
pub(super) struct ClusterBenchContext {
    /// Name that all clusters of a run use, one after the other.
    pub(super) name: String,
    /// Optimised build of xtask, which sends requests from inside pods.
    pub(super) client: PathBuf,
    /// The `rouse` program and the image archives for `cluster up`; `None` to build them.
    pub(super) prepared: Option<(PathBuf, PathBuf)>,
    /// Directory for results that may be inspected later.
    pub(super) folder: PathBuf,
    pub(super) cases: CaseSelection,
    pub(super) rounds: u32,
}

impl ClusterBenchContext {
    /// Creates a cluster without Rouse, after removing what a killed run left under the same name.
    pub(super) fn create_cluster(&self, nodes: u8, proxy: &str) -> Result<BenchCluster> {
        BenchCluster::up(self, nodes, proxy)
    }

    /// Writes a text file to the results directory.
    pub(super) fn write_result(&self, name: &str, text: &str) -> Result<()> {
        let file = self.folder.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

/// A running cluster, removed on drop.
#[derive(Debug)]
pub(super) struct BenchCluster {
    name: String,
    /// Output of `cargo xtask cluster status`, as JSON.
    status: Value,
    /// The `rouse` program that the image holds.
    rouse: PathBuf,
    /// Optimised build of xtask, which sends requests from inside pods.
    client: PathBuf,
}

/// An otherwise idle pod that requests are sent from.
#[derive(Debug)]
pub(super) struct BenchClientPod {
    pub(super) node: String,
    /// Id of one of its processes, as the host sees it.
    pid: u32,
    /// Directory of its cgroup v2.
    cgroup: PathBuf,
}

impl BenchCluster {
    /// Starts a cluster for a bench, with the images of Rouse and of the sample application.
    fn up(context: &ClusterBenchContext, nodes: u8, proxy: &str) -> Result<Self> {
        let (name, xtask) = (context.name.as_str(), std::env::current_exe()?);
        let cluster = |args: &[&str]| {
            let mut command = Command::new(&xtask);
            command.args(["cluster", "--name", name]).args(args).stdout(Stdio::null());
            command
        };
        // A cluster of a killed run may have other properties, so it is not used again.
        sh::run(&mut cluster(&["down"]))?;
        let nodes = nodes.to_string();
        let mut up_command = cluster(&["up", "--nodes", &nodes, "--proxy", proxy]);
        let rouse = match &context.prepared {
            Some((rouse, images)) => {
                up_command.arg("--prepared").arg(images);
                rouse.clone()
            }
            // Only these two images are needed, and building all of them takes longer.
            None => {
                up_command.args(["--image", "hello", "--image", "rouse"]);
                image::program_path(&CargoWorkspace::load()?, "rouse")
            }
        };
        sh::run(&mut up_command)?;
        let status = sh::capture(Command::new(&xtask).args(["cluster", "--name", name, "status"]))?;
        Ok(Self {
            name: name.to_owned(),
            status: serde_json::from_str(&status).context("cannot read the cluster's status")?,
            rouse,
            client: context.client.clone(),
        })
    }

    /// Installs Rouse, or installs it again with another profile.
    pub(super) fn install(&self, profile: &str) -> Result<()> {
        self.install_with(profile, &[])
    }

    /// Installs Rouse with further arguments of `rouse install`.
    pub(super) fn install_with(&self, profile: &str, args: &[&str]) -> Result<()> {
        let mut rouse = Command::new(&self.rouse);
        rouse.args(["install", "--apply", "--wait", "--profile", profile]).args(args);
        rouse.arg("--kubeconfig").arg(self.status_text("kubeconfig"));
        sh::run(rouse.stdout(Stdio::null()))
    }

    /// Applies the objects of an installation on a cluster without nodes, where no pod starts.
    pub(super) fn apply_install(&self) -> Result<()> {
        let mut rouse = Command::new(&self.rouse);
        rouse.args(["install", "--apply", "--kubeconfig", self.kubeconfig()]);
        sh::run(rouse.stdout(Stdio::null()))
    }

    pub(super) fn kubeconfig(&self) -> &str {
        self.status_text("kubeconfig")
    }

    /// Command `rouse WORDS` in the control plane's network namespace.
    pub(super) fn rouse_command(&self, args: &[&str]) -> Command {
        let mut command = self.netns_command();
        command.arg(&self.rouse).args(args);
        command
    }

    /// Starts `xtask WORDS` in the control plane's network namespace.
    pub(super) fn start_client(&self, args: &[&str]) -> Result<Child> {
        let mut command = self.netns_command();
        command.arg(&self.client).args(args).stdout(Stdio::null());
        command.spawn().context("cannot start a client")
    }

    fn netns_command(&self) -> Command {
        let mut nsenter = Command::new("nsenter");
        nsenter.arg(format!("--net={}", self.status_text("netns")));
        nsenter
    }

    fn status_text(&self, key: &str) -> &str {
        self.status[key].as_str().unwrap_or_default()
    }

    /// Names of the nodes, without the control plane.
    pub(super) fn nodes(&self) -> Vec<&str> {
        let nodes = self.status["nodes"].as_array();
        nodes.into_iter().flatten().filter_map(|node| node["name"].as_str()).collect()
    }

    /// Log of one process of the cluster, for example `node1-containerd` or `kube-scheduler`.
    pub(super) fn process_log(&self, process: &str) -> Result<String> {
        let file = Path::new(self.status_text("logs")).join(format!("{process}.log"));
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Logs of all replicas of a component, one after the other.
    pub(super) fn component_log(&self, app: &str) -> Result<String> {
        let selector = format!("app={app}");
        self.kubectl(&[
            "logs",
            "-n",
            SYSTEM_NAMESPACE,
            "-l",
            &selector,
            "--tail=-1",
            "--prefix=false",
        ])
    }

    /// Runs `kubectl ARGS` and returns its output.
    pub(super) fn kubectl(&self, args: &[&str]) -> Result<String> {
        sh::capture(self.kubectl_command().args(args))
    }

    fn kubectl_command(&self) -> Command {
        let mut command = Command::new(self.status_text("kubectl"));
        command.env_remove("KUBECONFIG").arg("--kubeconfig").arg(self.status_text("kubeconfig"));
        command
    }

    /// Items of the list that `kubectl get ARGS` prints.
    pub(super) fn list(&self, args: &[&str]) -> Result<Vec<Value>> {
        let text = self.kubectl(&[&["get", "--output", "json"][..], args].concat())?;
        let list: Value = serde_json::from_str(&text).context("kubectl printed no JSON")?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Creates new objects from a manifest: `kubectl create` sends half the requests of `kubectl apply`.
    pub(super) fn create(&self, yaml: &str) -> Result<()> {
        let mut command = self.kubectl_command();
        command.args(["create", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().context("cannot start kubectl")?;
        child.stdin.take().context("its input was piped")?.write_all(yaml.as_bytes())?;
        if !child.wait()?.success() {
            bail!("kubectl create failed");
        }
        Ok(())
    }

    /// Command `curl` with the administrator's certificate, for a path of the API server.
    pub(super) fn api_command(&self, path: &str) -> Command {
        let pki = Path::new(self.status_text("kubeconfig")).with_file_name("pki");
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--no-buffer", "--noproxy", "*"]);
        curl.arg("--cacert").arg(pki.join("ca.crt"));
        curl.arg("--cert").arg(pki.join("admin.crt")).arg("--key").arg(pki.join("admin.key"));
        curl.arg(self.url(path));
        curl
    }

    /// URL of a path of the API server.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.status_text("server"))
    }

    /// Runs a program in the control plane's network namespace and returns its output.
    pub(super) fn run_inside(&self, command: &[&str]) -> Result<String> {
        sh::capture(self.netns_command().args(command))
    }

    /// Processes of Rouse: component and process id.
    pub(super) fn component_processes(&self) -> Result<Vec<(String, u32)>> {
        let mut processes = Vec::new();
        for pod in self.list(&["pods", "--namespace", SYSTEM_NAMESPACE])? {
            let component = pod["metadata"]["labels"]["app"].as_str().unwrap_or_default();
            let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
            let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
            let Some((_, id)) = id.and_then(|id| id.split_once("://")) else { continue };
            processes.push((
                component.trim_start_matches("rouse-").to_owned(),
                self.find_container(node, id)?.pid,
            ));
        }
        Ok(processes)
    }

    /// Memory of all maps that agents hold open, each counted once, in MiB.
    pub(super) fn maps_mib(&self) -> Result<f64> {
        let mut maps = BTreeMap::new();
        for (_, id) in
            self.component_processes()?.iter().filter(|(component, _)| component == "agent")
        {
            maps.extend(map_bytes(*id)?);
        }
        Ok(maps.values().sum::<f64>() / 1024.0 / 1024.0)
    }

    /// Calls `check` until it returns a value, at most for [`WAIT_TIMEOUT`].
    pub(super) fn wait<T>(
        &self,
        description: &str,
        mut check: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let started = Instant::now();
        loop {
            if let Some(value) = check()? {
                return Ok(value);
            }
            if started.elapsed() > WAIT_TIMEOUT {
                bail!("waited in vain for {description} on the cluster {}", self.name);
            }
            sh::sleep(POLL_INTERVAL);
        }
    }

    /// Creates services without a first pod and with the shortest window, and waits until each is ready.
    pub(super) fn create_sleeping_services(&self, names: &[String]) -> Result<()> {
        let scaling = [("initial-scale", "0"), ("window", "6s")];
        self.create_services(
            &names.iter().map(|name| service_manifest(name, &scaling)).collect::<String>(),
            names,
        )
    }

    /// Creates the services of the manifest, and waits until each of `names` is ready.
    pub(super) fn create_services(&self, yaml: &str, names: &[String]) -> Result<()> {
        self.create(yaml)?;
        self.wait("the services to be ready", || {
            let services = self.list(&["ksvc"])?;
            let ready = |name: &String| {
                let mut named =
                    services.iter().filter(|it| it["metadata"]["name"] == name.as_str());
                named.any(|it| is_condition_true(it, "Ready"))
            };
            Ok(names.iter().all(ready).then_some(()))
        })
    }

    /// Directories of the cgroups of all frozen pods.
    pub(super) fn frozen_pods(&self) -> Vec<PathBuf> {
        let nodes = self.status["nodes"].as_array().into_iter().flatten();
        let cgroups = nodes.filter_map(|node| node["cgroup"].as_str());
        cgroups.flat_map(|cgroup| frozen_pods(&Path::new(cgroup).join("kubepods"))).collect()
    }

    /// Returns the ClusterIP of a Service.
    pub(super) fn cluster_ip(&self, service: &str) -> Result<String> {
        self.kubectl(&["get", "service", service, "--output", "jsonpath={.spec.clusterIP}"])
    }

    /// Creates one pod to send requests from on each node, and waits until all run.
    pub(super) fn create_client_pods(&self) -> Result<Vec<BenchClientPod>> {
        let nodes = self.nodes();
        self.create(&nodes.iter().map(|node| client_pod_manifest(node)).collect::<String>())?;
        let create_pod = |node: &&str| {
            let id = self.wait("a client pod", || {
                let pods = self.list(&["pods", "--selector", &format!("ask-from={node}")])?;
                let id = pods.first().map(|it| &it["status"]["containerStatuses"][0]);
                let id = id.filter(|it| it["started"] == true);
                Ok(id.and_then(|it| it["containerID"].as_str()).map(str::to_owned))
            })?;
            self.find_container(node, id.trim_start_matches("containerd://"))
        };
        nodes.iter().map(create_pod).collect()
    }

    /// Finds cgroup and a process of the container with this id on a node.
    fn find_container(&self, node: &str, container: &str) -> Result<BenchClientPod> {
        let nodes = self.status["nodes"].as_array();
        let client_node = nodes.into_iter().flatten().find(|it| it["name"] == node);
        let root =
            client_node.and_then(|it| it["cgroup"].as_str()).context("a node without a cgroup")?;
        let cgroup = find_directory_below(Path::new(root), container)
            .context("a container without a cgroup")?;
        // Any process of the container will do: all share its network namespace.
        let ids = fs::read_to_string(cgroup.join("cgroup.procs"))?;
        let id = ids.lines().next().and_then(|id| id.parse().ok());
        Ok(BenchClientPod {
            node: node.to_owned(),
            pid: id.context("a container without a process")?,
            cgroup,
        })
    }

    /// Runs `xtask ARGS` as a process of the pod: in its network namespace, and in its cgroup, where programs see
    /// connects.
    pub(super) fn run_in_pod(&self, client: &BenchClientPod, args: &[&str]) -> Result<String> {
        sh::capture(&mut self.pod_command(client, args))
    }

    /// Command `xtask ARGS` as a process of the pod, not yet started.
    pub(super) fn pod_command(&self, client: &BenchClientPod, args: &[&str]) -> Command {
        // The shell enters the cgroup itself before `exec`: a process keeps the cgroup in which it starts.
        const ENTER: &str =
            r#"echo $$ > "$0/cgroup.procs" && net=$1 && shift && exec nsenter --net="$net" "$@""#;
        let mut command = Command::new("sh");
        command.args(["-c", ENTER]).arg(&client.cgroup).arg(format!("/proc/{}/ns/net", client.pid));
        command.arg(&self.client).args(args);
        command
    }
}

impl Drop for BenchCluster {
    fn drop(&mut self) {
        let Ok(xtask) = std::env::current_exe() else { return };
        let mut down_command = Command::new(xtask);
        down_command.args(["cluster", "--name", &self.name, "down"]).stdout(Stdio::null());
        if let Err(error) = sh::run(&mut down_command) {
            eprintln!("the cluster {} stays: {error:#}", self.name);
        }
    }
}

/// Finds the directory below `root` whose name ends with `name`.
fn find_directory_below(root: &Path, name: &str) -> Option<PathBuf> {
    let folders = fs::read_dir(root).ok()?.flatten().map(|entry| entry.path());
    let folders: Vec<PathBuf> = folders.filter(|path| path.is_dir()).collect();
    let path = folders.iter().find(|path| path.to_string_lossy().ends_with(name)).cloned();
    path.or_else(|| folders.iter().find_map(|path| find_directory_below(path, name)))
}

fn client_pod_manifest(node: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Pod
metadata: {{ name: ask-from-{node}, namespace: default, labels: {{ ask-from: {node} }} }}
spec:
  nodeName: {node}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
  - {{ name: place, image: \"dev.local/hello:v1\", imagePullPolicy: Never, env: [{{ name: PORT, value: \"8080\" }}] }}
"
    )
}
