//! Shell: environment of the benches on a local node: the node, services, and servers that are no pods of Rouse.

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
use crate::{load::LoadRecord, local_node::LocalNode, machine, measure::MeasuredTimes, sh};

/// Name of the benches' node. The demo's node may run beside it.
const NODE: &str = "bench";
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 18_080);
/// Address of the bare server: on the node's bridge, far above the pods' addresses.
const BARE_SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 250, 2);
/// Address of the server in a pod of others, next to it.
const UNCOUNTED_SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 250, 3);
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
        let services = (0..count).map(|index| format!("{prefix}{index}"));
        let yaml: String = services.map(|name| service_manifest(&name, scaling)).collect();
        self.apply_manifests(node, prefix, count, &yaml)
    }

    /// Applies manifests of services `PREFIX0` … `PREFIX(count-1)` and waits until all are ready.
    pub(super) fn apply_manifests(
        &self,
        node: &LocalNode,
        prefix: &str,
        count: usize,
        yaml: &str,
    ) -> Result<()> {
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
    pub(super) fn start_bare_server(&self, node: &LocalNode) -> Result<BridgeServer> {
        BridgeServer::start(node, &self.hello, "bare", BARE_SERVER_ADDRESS, None)
    }

    /// Starts the sample application on the node's bridge as a pod that is not Rouse's: in a cgroup of its own, to
    /// which the programs of the pods' cgroup apply.
    pub(super) fn start_uncounted_server(&self, node: &LocalNode) -> Result<BridgeServer> {
        let mount = machine::cgroup2().context("no cgroup2 file system is mounted")?;
        let pods = mount.join(format!("rouse-{NODE}")).join("pods");
        let cgroup = Some(pods.join("uncounted"));
        BridgeServer::start(node, &self.hello, "uncounted", UNCOUNTED_SERVER_ADDRESS, cgroup)
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
    // By the resolver of a client, so that the measured path includes what clients use.
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

/// Server on the node's bridge that is no pod of Rouse; killed on drop.
#[derive(Debug)]
pub(super) struct BridgeServer {
    server: Child,
    netns: String,
    address: Ipv4Addr,
    /// Cgroup that was made for it.
    cgroup: Option<PathBuf>,
}

impl BridgeServer {
    fn start(
        node: &LocalNode,
        hello: &Path,
        name: &str,
        address: Ipv4Addr,
        cgroup: Option<PathBuf>,
    ) -> Result<Self> {
        let netns = format!("rouse-bench-{name}-{}", std::process::id());
        ip(&format!("netns add {netns}"))?;
        // A network namespace outlives this process, so a failed start must delete it.
        let server = Self::spawn(node, hello, (name, &netns), address, cgroup.as_deref())
            .inspect_err(|_| {
                let _ = ip(&format!("netns delete {netns}"));
            })?;
        // The measuring client does not retry its first connect, so the server gets time to listen.
        sh::sleep(Duration::from_millis(200));
        Ok(Self { server, netns, address, cgroup })
    }

    /// Connects the server's network namespace to the node's bridge, and starts the server inside.
    fn spawn(
        node: &LocalNode,
        hello: &Path,
        (name, netns): (&str, &str),
        address: Ipv4Addr,
        cgroup: Option<&Path>,
    ) -> Result<Child> {
        let link = format!("{name}0");
        ip(&format!("-n {netns} link set lo up"))?;
        // Created inside, then one end moves to the node: the host's namespace never changes.
        ip(&format!("-n {netns} link add eth0 type veth peer name {link}"))?;
        sh::capture(
            sh::root_command("ip")
                .args(["-n", netns, "link", "set", &link, "netns"])
                .arg(node.netns_path("node")),
        )?;
        // `ip -n` needs a name below /run/netns, which the node's namespace does not have.
        let mut of_node = netns_command(&node.netns_path("node"));
        sh::capture(of_node.args(["ip", "link", "set", &link, "master", "rouse0", "up"]))?;
        ip(&format!("-n {netns} addr add {address}/16 dev eth0"))?;
        ip(&format!("-n {netns} link set eth0 up"))?;
        let inside = Path::new("/run/netns").join(netns);
        let mut server = match cgroup {
            None => netns_command(&inside),
            Some(cgroup) => {
                sh::capture(sh::root_command("mkdir").arg("-p").arg(cgroup))?;
                // Before it listens: a socket belongs to the cgroup of the process that creates it.
                let script = "echo $$ > \"$1\" && shift && exec nsenter \"$@\"";
                let mut server = sh::root_command("sh");
                server.args(["-c", script, "sh"]).arg(cgroup.join("cgroup.procs"));
                server.arg(format!("--net={}", inside.display()));
                server
            }
        };
        server.arg("env").arg(format!("PORT={PORT}")).arg(format!("HOSTNAME={name}")).arg(hello);
        server.stdin(Stdio::null()).stdout(Stdio::null());
        server.spawn().with_context(|| format!("cannot start the {name} server"))
    }

    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.address), PORT)
    }
}

impl Drop for BridgeServer {
    fn drop(&mut self) {
        let _ = sh::root_command("kill").arg(self.server.id().to_string()).status();
        let _ = self.server.wait();
        let _ = ip(&format!("netns delete {}", self.netns));
        if let Some(cgroup) = &self.cgroup {
            let _ = sh::root_command("rmdir").arg(cgroup).status();
        }
    }
}

/// Runs `ip` as root, with arguments separated by blanks.
fn ip(args: &str) -> Result<String> {
    sh::capture(sh::root_command("ip").args(args.split(' ')))
}
