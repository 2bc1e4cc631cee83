//! Shell: start of each process of the cluster, with its configuration, in its namespaces and cgroup.

use std::{
    ffi::OsString,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{
    addresses::CONTROL_PLANE,
    cgroups,
    config::{self, KubeProxyMode},
    network,
    plan::ClusterProcess,
    process::{self, ProcessLaunch},
    programs::ClusterPrograms,
    state::{ClusterPaths, ClusterRecord, write_file},
};
use crate::sh;

const NODE_SCRIPT: &str = include_str!("node.sh");

/// State of a cluster, and the programs to start.
#[derive(Debug)]
pub(crate) struct ClusterStarter<'a> {
    pub(crate) paths: &'a ClusterPaths,
    pub(crate) record: &'a ClusterRecord,
    pub(crate) programs: &'a ClusterPrograms,
}

impl ClusterStarter<'_> {
    /// Starts `process`, regardless of leftovers of an earlier one.
    pub(crate) fn start(&self, process: ClusterProcess) -> Result<()> {
        match process {
            ClusterProcess::Etcd => {
                let data = self.paths.folder().join("etcd");
                self.start_in_control_plane(process, "etcd", config::etcd(&data))
            }
            ClusterProcess::ApiServer => {
                let args = config::api_server(&self.paths.pki(), self.record.port);
                self.start_in_control_plane(process, "kube-apiserver", args)
            }
            ClusterProcess::ControllerManager => {
                let program = "kube-controller-manager";
                let args = config::controller_manager(
                    &self.paths.pki(),
                    &self.control_plane_kubeconfig(program)?,
                );
                self.start_in_control_plane(process, program, args)
            }
            ClusterProcess::Scheduler => {
                let program = "kube-scheduler";
                self.start_in_control_plane(
                    process,
                    program,
                    config::scheduler(&self.control_plane_kubeconfig(program)?),
                )
            }
            ClusterProcess::Forward => self.start_forwarder(),
            ClusterProcess::Node(node) => self.start_node(node),
            ClusterProcess::Containerd(node) => self.start_containerd(node),
            ClusterProcess::Kubelet(node) => self.start_kubelet(node),
            ClusterProcess::Proxy(node) => self.start_kube_proxy(node),
        }
    }

    /// Writes a kubeconfig for a process of the control plane, and returns its path.
    fn control_plane_kubeconfig(&self, user: &str) -> Result<PathBuf> {
        let file = self.paths.folder().join(format!("{user}.kubeconfig"));
        self.write_kubeconfig_for(&file, user)?;
        Ok(file)
    }

    pub(crate) fn write_kubeconfig_for(&self, file: &Path, user: &str) -> Result<()> {
        let server = format!("https://{}:{}", CONTROL_PLANE[0], self.record.port);
        write_file(file, &config::kubeconfig(&self.paths.pki(), user, &server).to_string())
    }

    fn start_in_control_plane(
        &self,
        process: ClusterProcess,
        program: &str,
        args: Vec<String>,
    ) -> Result<()> {
        let netns = format!("--net={}", self.paths.netns(None).display());
        let mut argv: Vec<OsString> = vec!["nsenter".into(), netns.into()];
        argv.push(self.programs.file(program)?.into());
        argv.extend(args.into_iter().map(OsString::from));
        self.launch(process, argv, None)
    }

    fn launch(
        &self,
        process: ClusterProcess,
        argv: Vec<OsString>,
        stdin: Option<std::os::fd::OwnedFd>,
    ) -> Result<()> {
        // Daemons are in a leaf below the node's cgroup, beside the pods' cgroups.
        let cgroup =
            process.node().map_or_else(|| "hub".to_owned(), |node| format!("node{node}/daemons"));
        let path = format!("{}/{cgroup}", self.paths.cgroup());
        cgroups::create(&path)?;
        let cgroups = cgroups::procs_files(&path)?;
        let launch = ProcessLaunch { cgroups, argv, stdin, path: self.programs.folders() };
        process::start(self.paths, process, launch)
    }

    /// Starts the forwarder. A listener created here belongs to the host; the forwarder dials inside the namespace.
    fn start_forwarder(&self) -> Result<()> {
        let address = format!("127.0.0.1:{}", self.record.port);
        let listener = TcpListener::bind(&address).with_context(|| {
            format!("{address} is taken, which leads to the cluster `{}`", self.paths.name)
        })?;
        // A copy, because the next build replaces the running executable.
        let program = self.paths.folder().join("xtask");
        let _absent = fs::remove_file(&program);
        fs::copy(std::env::current_exe()?, &program).context("cannot copy xtask")?;
        let netns = format!("--net={}", self.paths.netns(None).display());
        let to = format!("{}:{}", CONTROL_PLANE[0], self.record.port);
        let argv: [OsString; 6] = [
            "nsenter".into(),
            netns.into(),
            program.into(),
            "cluster".into(),
            "carry".into(),
            to.into(),
        ];
        self.launch(ClusterProcess::Forward, argv.to_vec(), Some(listener.into()))
    }

    /// Creates the namespaces of a node. Kills the processes that are left in its old ones.
    fn start_node(&self, node: u8) -> Result<()> {
        let name = format!("node{node}");
        let group = format!("{}/{name}", self.paths.cgroup());
        cgroups::kill_processes(&group)?;
        // Created again: with cgroup v2 alone, a cgroup that delegates controllers to children refuses processes.
        cgroups::remove(&group)?;
        cgroups::create(&group)?;
        network::create_namespace(self.paths, Some(node))?;
        let folder = self.paths.node(node);
        let script = folder.join("node.sh");
        let ready = folder.join("ready");
        write_file(&script, NODE_SCRIPT)?;
        let _absent = fs::remove_file(&ready);
        let netns = format!("--net={}", self.paths.netns(Some(node)).display());
        let mut argv: Vec<OsString> =
            ["nsenter", &netns, "unshare", "--mount", "--uts", "--cgroup"]
                .map(OsString::from)
                .to_vec();
        // Private mounts: the node's file systems must not appear on the host.
        argv.extend(["--propagation".into(), "private".into(), "sh".into(), script.into()]);
        argv.extend([folder.clone().into(), name.into(), "/var/lib/rouse-cluster".into()]);
        argv.push(ready.clone().into());
        argv.extend(node_mounts()?.into_iter().map(OsString::from));
        // In the node's cgroup itself: this cgroup becomes the root of the node's cgroup namespace.
        let cgroups = cgroups::procs_files(&group)?;
        let launch = ProcessLaunch { cgroups, argv, stdin: None, path: Vec::new() };
        process::start(self.paths, ClusterProcess::Node(node), launch)?;
        self.wait_until(ClusterProcess::Node(node), || ready.exists())?;
        self.move_keeper_to_leaf(node)
    }

    /// Moves the keeper below the node's cgroup, because a cgroup that delegates controllers may hold no process.
    fn move_keeper_to_leaf(&self, node: u8) -> Result<()> {
        let id = process::pid_of(self.paths, ClusterProcess::Node(node))
            .context("the node's keeper ended")?;
        let group = format!("{}/node{node}", self.paths.cgroup());
        cgroups::create_leaf(&group, "daemons")?;
        for file in cgroups::procs_files(&format!("{group}/daemons"))? {
            fs::write(&file, id.to_string())
                .with_context(|| format!("cannot move the keeper to {}", file.display()))?;
        }
        cgroups::create(&format!("{group}/daemons"))
    }

    /// Command line `nsenter …` into the namespaces of a node.
    pub(crate) fn nsenter_words(&self, node: u8) -> Result<Vec<OsString>> {
        let Some(id) = process::pid_of(self.paths, ClusterProcess::Node(node)) else {
            bail!("node{node} does not run: `cargo xtask cluster up` starts it");
        };
        // The keeper's namespaces, because mount, UTS and cgroup namespaces have no files of their own.
        let target = format!("--target={id}");
        Ok(["nsenter", &target, "--mount", "--uts", "--net", "--cgroup"]
            .map(OsString::from)
            .to_vec())
    }

    fn start_on_node(
        &self,
        process: ClusterProcess,
        node: u8,
        program: &str,
        args: Vec<String>,
    ) -> Result<()> {
        let mut argv = self.nsenter_words(node)?;
        argv.push(self.programs.file(program)?.into());
        argv.extend(args.into_iter().map(OsString::from));
        self.launch(process, argv, None)
    }

    fn start_containerd(&self, node: u8) -> Result<()> {
        let folder = self.paths.node(node);
        let cni = folder.join("cni");
        write_file(&cni.join("10-pods.conflist"), &config::cni(node).to_string())?;
        let file = folder.join("containerd.toml");
        write_file(&file, &config::containerd(&cni))?;
        let args = vec!["--config".to_owned(), file.display().to_string()];
        self.start_on_node(ClusterProcess::Containerd(node), node, "containerd", args)?;
        // The kubelet would start without containerd as well, but then retries at long intervals.
        let started = Instant::now();
        while !self.ctr(node, &["version"])?.output().is_ok_and(|output| output.status.success()) {
            self.check_running(ClusterProcess::Containerd(node), started, Duration::from_secs(60))?;
            sh::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Command `ctr ARGS` against the containerd of `node`.
    pub(crate) fn ctr(&self, node: u8, args: &[&str]) -> Result<Command> {
        let argv = self.nsenter_words(node)?;
        let mut command = Command::new("nsenter");
        command.args(&argv[1..]).arg(self.programs.file("ctr")?);
        command.args(["-a", "/run/containerd/containerd.sock", "-n", "k8s.io"]).args(args);
        Ok(command)
    }

    fn start_kubelet(&self, node: u8) -> Result<()> {
        let folder = self.paths.node(node);
        let config = config::kubelet(&self.paths.pki(), node);
        write_file(&folder.join("kubelet.json"), &config.to_string())?;
        self.write_kubeconfig_for(&folder.join("kubeconfig"), &format!("node{node}"))?;
        self.start_on_node(
            ClusterProcess::Kubelet(node),
            node,
            "kubelet",
            config::kubelet_args(&folder, node),
        )
    }

    fn start_kube_proxy(&self, node: u8) -> Result<()> {
        let folder = self.paths.node(node);
        let mode = match self.record.proxy.as_str() {
            "nftables" => KubeProxyMode::Nftables,
            _ => KubeProxyMode::Iptables,
        };
        let file = folder.join("kube-proxy.json");
        write_file(&file, &config::kube_proxy(&folder, node, mode).to_string())?;
        self.write_kubeconfig_for(&folder.join("kube-proxy.kubeconfig"), "kube-proxy")?;
        let args = vec![format!("--config={}", file.display())];
        self.start_on_node(ClusterProcess::Proxy(node), node, "kube-proxy", args)
    }

    fn wait_until(&self, process: ClusterProcess, is_done: impl Fn() -> bool) -> Result<()> {
        let started = Instant::now();
        while !is_done() {
            self.check_running(process, started, Duration::from_secs(30))?;
            sh::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Fails if `process` has ended or `timeout` is over, with the last lines of its log.
    pub(crate) fn check_running(
        &self,
        process: ClusterProcess,
        since: Instant,
        timeout: Duration,
    ) -> Result<()> {
        let log = self.paths.log(process);
        let state = match process::pid_of(self.paths, process) {
            None => "ended",
            Some(_) if since.elapsed() > timeout => "is not ready",
            Some(_) => return Ok(()),
        };
        bail!("{process} {state}; {} ends with:\n{}", log.display(), process::last_lines(&log))
    }
}

/// Cgroup mounts of a node as pairs for `node.sh`, with a mount point before the mounts below it.
fn node_mounts() -> Result<Vec<String>> {
    let hierarchies = cgroups::hierarchies()?;
    let mut pairs = Vec::new();
    if hierarchies.iter().any(|hierarchy| hierarchy.mount != Path::new("/sys/fs/cgroup")) {
        pairs.extend(["tmpfs".to_owned(), String::new()]);
    }
    for hierarchy in hierarchies {
        pairs.push(hierarchy.mount.display().to_string());
        pairs.push(hierarchy.v1.unwrap_or_else(|| "v2".to_owned()));
    }
    Ok(pairs)
}
