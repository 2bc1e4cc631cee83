//! Shell: environment of the benches on a local node: the node, services, and a server without any eBPF programs.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::{is_condition_true, service_manifest};
use crate::{load::LoadRecord, local_node::LocalNode, measure::MeasuredTimes, sh};

/// Name of the benches' node. The demo's node may run beside it.
const NODE: &str = "bench";
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 18_080);
/// Address of the bare server: on the node's bridge, far above the pods' addresses.
const BARE_SERVER_ADDRESS: &str = "10.244.250.2";
/// Port on which every server here listens.
const PORT: u16 = 8080;
/// Timeout for the controller to make all applied services ready.
const APPLIED_WITHIN: Duration = Duration::from_secs(300);
/// Shortest time between two queries of the services.
const POLL: Duration = Duration::from_millis(500);

/// Programs and directories of this run.
#[derive(Debug)]
pub(super) struct NodeBenchContext {
    pub(super) rouse: PathBuf,
    pub(super) images: PathBuf,
    /// Optimised build of xtask, which measures from inside the node.
    pub(super) client: PathBuf,
    /// Executable of the sample application, run without a container.
    pub(super) hello: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) rounds: u32,
}

impl NodeBenchContext {
    /// Starts a new node without services.
    pub(super) fn start_node(&self) -> Result<LocalNode> {
        let (log, outlives_xtask) = (self.folder.join("rouse.log"), false);
        LocalNode::start(NODE, &self.rouse, &self.images, GATEWAY, &log, outlives_xtask)
    }

    /// Applies services `PREFIX0` … `PREFIX(count-1)` and waits until all are ready.
    pub(super) fn apply(
        &self,
        node: &LocalNode,
        prefix: &str,
        count: usize,
        min_scale: u32,
    ) -> Result<()> {
        let min_scale = min_scale.to_string();
        let scaling = [("initial-scale", &*min_scale), ("min-scale", &min_scale), ("window", "6s")];
        self.apply_scaled(node, prefix, count, &scaling)
    }

    /// Applies services as [`Self::apply`] does, with annotations below `autoscaling.knative.dev`.
    pub(super) fn apply_scaled(
        &self,
        node: &LocalNode,
        prefix: &str,
        count: usize,
        scaling: &[(&str, &str)],
    ) -> Result<()> {
        let mut yaml = String::new();
        for index in 0..count {
            yaml += &service_manifest(&format!("{prefix}{index}"), scaling);
        }
        let file = self.folder.join(format!("{prefix}.yaml"));
        fs::write(&file, yaml).with_context(|| format!("cannot write {}", file.display()))?;
        sh::capture(node.rouse_command(&["apply", "-f"]).arg(&file))?;
        let started = Instant::now();
        while started.elapsed() < APPLIED_WITHIN {
            let queried = Instant::now();
            let named = |object: &&Value| {
                object["metadata"]["name"].as_str().is_some_and(|name| name.starts_with(prefix))
            };
            let services = get_objects(node, "ksvc")?;
            let ready = services.iter().filter(named).filter(|it| is_condition_true(it, "Ready"));
            if ready.count() == count {
                return Ok(());
            }
            // Reading thousands of objects takes processor time from the controller, so queries pause four times as
            // long.
            sh::sleep(POLL.max(queried.elapsed() * 4));
        }
        bail!("{count} services {prefix}… were not ready within {APPLIED_WITHIN:?}")
    }

    /// Starts the sample application on the node's bridge, in a cgroup without programs of Rouse.
    pub(super) fn start_bare_server(&self, node: &LocalNode) -> Result<BareServer> {
        BareServer::start(node, &self.hello)
    }

    /// Runs `xtask measure …` as a client in the node's cgroup and network namespace.
    pub(super) fn measure(&self, node: &LocalNode, args: &[String]) -> Result<MeasuredTimes> {
        let mut command = node.client_command(&self.client);
        run_measure(command.arg("measure").args(args))
    }

    /// Runs `xtask measure …` in the client's network namespace but in xtask's own cgroup, where no program of Rouse
    /// runs.
    pub(super) fn measure_bare(&self, node: &LocalNode, args: &[String]) -> Result<MeasuredTimes> {
        let mut command = netns_command(&node.netns_path("client"));
        command.arg(&self.client);
        run_measure(command.arg("measure").args(args))
    }
}

/// Runs `xtask load` and returns the records that it printed.
pub(super) fn run_load(load: &mut Command) -> Result<Vec<LoadRecord>> {
    let text = sh::capture(load)?;
    let read = |line| {
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}` of a load"))
    };
    text.lines().map(read).collect()
}

fn run_measure(command: &mut Command) -> Result<MeasuredTimes> {
    let text = sh::capture(command)?;
    serde_json::from_str(text.trim()).context("cannot read what `xtask measure` printed")
}

/// Objects of one kind in the default namespace.
pub(super) fn get_objects(node: &LocalNode, kind: &str) -> Result<Vec<Value>> {
    let text = sh::capture(&mut node.rouse_command(&["get", kind, "-o", "json"]))?;
    let list: Value =
        serde_json::from_str(&text).context("cannot read what `rouse get -o json` printed")?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// Returns the address of a service's only pod, and of the service, as a client of the node resolves it.
pub(super) fn service_addresses(
    node: &LocalNode,
    service: &str,
) -> Result<(SocketAddr, SocketAddr)> {
    let pods = get_objects(node, "pods")?;
    let of_service = |pod: &&Value| {
        pod["metadata"]["labels"]["serving.knative.dev/service"].as_str() == Some(service)
    };
    let pod = pods.iter().find(of_service).with_context(|| format!("{service} has no pod"))?;
    let pod: IpAddr = pod["status"]["podIP"].as_str().context("a pod without podIP")?.parse()?;
    let name = format!("{service}.default.svc.cluster.local");
    let mut getent = node.client_command(Path::new("getent"));
    let text = sh::capture(getent.args(["ahostsv4", &name]))?;
    let service = text.split_whitespace().next().context("the service's name has no address")?;
    Ok((SocketAddr::new(pod, PORT), SocketAddr::new(service.parse()?, 80)))
}

/// Command in a network namespace, as root, in xtask's own cgroup.
fn netns_command(netns: &Path) -> Command {
    let mut command = sh::root_command("nsenter");
    command.arg(format!("--net={}", netns.display()));
    command
}

/// Server without any programs of Rouse on its path; killed on drop.
#[derive(Debug)]
pub(super) struct BareServer {
    server: Child,
    netns: String,
}

impl BareServer {
    fn start(node: &LocalNode, hello: &Path) -> Result<Self> {
        let netns = format!("rouse-bench-{}", std::process::id());
        let inside = format!("/run/netns/{netns}");
        let ip = |args: &str| sh::capture(sh::root_command("ip").args(args.split(' ')));
        ip(&format!("netns add {netns}"))?;
        let spawn = || -> Result<Child> {
            ip(&format!("-n {netns} link set lo up"))?;
            // Created inside, then one end moves to the node: the host's namespace never changes.
            ip(&format!("-n {netns} link add eth0 type veth peer name bare0"))?;
            sh::capture(
                sh::root_command("ip")
                    .args(["-n", &netns, "link", "set", "bare0", "netns"])
                    .arg(node.netns_path("node")),
            )?;
            // `ip -n` needs a name below /run/netns, which the node's namespace does not have.
            let of_node = |args: &str| {
                sh::capture(netns_command(&node.netns_path("node")).arg("ip").args(args.split(' ')))
            };
            of_node("link set bare0 master rouse0 up")?;
            ip(&format!("-n {netns} addr add {BARE_SERVER_ADDRESS}/16 dev eth0"))?;
            ip(&format!("-n {netns} link set eth0 up"))?;
            let mut server = netns_command(Path::new(&inside));
            server.arg("env").arg(format!("PORT={PORT}")).arg("HOSTNAME=bare").arg(hello);
            server.stdin(Stdio::null()).stdout(Stdio::null());
            server.spawn().context("cannot start the bare server")
        };
        // A network namespace outlives this process, so a failed start must delete it.
        let server = spawn().inspect_err(|_| {
            let _ = ip(&format!("netns delete {netns}"));
        })?;
        // The measuring client does not retry its first connect, so the server gets time to listen.
        sh::sleep(Duration::from_millis(200));
        Ok(Self { server, netns })
    }

    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 244, 250, 2)), PORT)
    }
}

impl Drop for BareServer {
    fn drop(&mut self) {
        let _ = sh::root_command("kill").arg(self.server.id().to_string()).status();
        let _ = self.server.wait();
        let _ = sh::root_command("ip").args(["netns", "delete", &self.netns]).status();
    }
}
