//! Shell: the service proxies that the bench compares: Rouse's agent, and kube-proxy in two modes and with two sync
//! periods; each on a node of its own, beside an API server of its own.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{
    ClusterIpBenchContext,
    api_server::BenchApiServer,
    node::{BenchCgroup, BenchNetns, BenchNode, NODE_ADDRESS},
    objects::{self, ENDPOINT_PORT, NODE, POD_NETWORK, ServiceProtocol, ServiceSet, cluster_ip},
};
use crate::{
    load::unix_us,
    measure::{cpu_us, service_connects::ServiceAnswers},
    sh,
};

/// Address of the API server, in the namespace of the node.
const SERVER_ADDRESS: &str = "127.0.0.1:6443";
/// Timeout until a proxy serves its first Service, in seconds.
const START_TIMEOUT_S: &str = "600";
/// Time after a proxy continues, for work that is overdue by then. kube-proxy synchronizes at most once a second.
const SETTLE_TIME: Duration = Duration::from_millis(1_500);
/// Time for the client of a start to be waiting before the proxy starts.
const CLIENT_START_TIME: Duration = Duration::from_millis(200);
/// Time between two checks of a start.
const POLL_PERIOD: Duration = Duration::from_millis(100);
/// Timeout of an end after SIGTERM: the grace period of a pod. And the time between two checks.
const END_TIMEOUT: Duration = Duration::from_secs(30);
const END_POLL_PERIOD: Duration = Duration::from_millis(5);
/// Period over which the machine must be idle before a start, and the processor time that is idle enough, in µs.
const IDLE_PERIOD: Duration = Duration::from_millis(500);
const IDLE_CPU_US: f64 = 50_000.0;
/// Number of periods after which a start begins on a busy machine.
const IDLE_PERIODS_MAX: u32 = 40;
/// Shell script that hides `/run`, then executes a program. The lock of iptables is there, and a node has its own.
const HIDE_RUN_SCRIPT: &str = r#"mount -t tmpfs run /run && exec "$0" "$@""#;

/// Program and settings that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ProxySubject {
    /// The agent with `--clusterip all`.
    Rouse,
    /// kube-proxy in mode iptables, with its default of one sync a second.
    Iptables,
    /// The same without this bound.
    IptablesUnbounded,
    /// kube-proxy in mode nftables, with its default of one sync a second.
    Nftables,
    /// The same without this bound.
    NftablesUnbounded,
}

impl ProxySubject {
    pub(super) const ALL: [Self; 5] = [
        Self::Rouse,
        Self::Iptables,
        Self::IptablesUnbounded,
        Self::Nftables,
        Self::NftablesUnbounded,
    ];
    /// Subjects that differ in other ways than the time between two syncs.
    pub(super) const MODES: [Self; 3] = [Self::Rouse, Self::Iptables, Self::Nftables];

    /// Name in the report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rouse => "rouse",
            Self::Iptables => "iptables",
            Self::IptablesUnbounded => "iptables-min-sync-1ms",
            Self::Nftables => "nftables",
            Self::NftablesUnbounded => "nftables-min-sync-1ms",
        }
    }

    /// Configuration file of kube-proxy; `None` for Rouse.
    fn kube_proxy_config(self, kubeconfig: &Path) -> Option<Value> {
        let (mode, is_bounded) = match self {
            Self::Rouse => return None,
            Self::Iptables => ("iptables", true),
            Self::IptablesUnbounded => ("iptables", false),
            Self::Nftables => ("nftables", true),
            Self::NftablesUnbounded => ("nftables", false),
        };
        // kube-proxy replaces a period of 0 by its default.
        let rules = if is_bounded { json!({}) } else { json!({"minSyncPeriod": "1ms"}) };
        Some(json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": mode, mode: rules, "clusterCIDR": POD_NETWORK, "hostnameOverride": NODE,
            // As the agent gets them; protobuf, kube-proxy's default, would cost it less.
            "clientConnection": {
                "kubeconfig": kubeconfig,
                "contentType": "application/json", "acceptContentTypes": "application/json",
            },
            // Sizes of the connection table apply to the whole machine, so kube-proxy must not set them.
            "conntrack": {
                "maxPerCore": 0, "min": 0,
                "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            },
            "oomScoreAdj": 0,
        }))
    }
}

/// A running proxy with its API server and node. Dropping it ends and removes all of them, in this order.
#[derive(Debug)]
pub(super) struct RunningProxy {
    pub(super) subject: ProxySubject,
    process: ProxyProcess,
    /// Server of all endpoints of UDP, if the set has them.
    _datagram_server: Option<DatagramServer>,
    pub(super) server: BenchApiServer,
    pub(super) node: BenchNode,
    client: PathBuf,
    pub(super) set: ServiceSet,
}

/// Process of a proxy; killed on drop, with all processes that it has started.
#[derive(Debug)]
struct ProxyProcess {
    child: Child,
    cgroup: PathBuf,
    log: PathBuf,
}

/// Server that answers datagrams to all endpoints; killed on drop. An optimised program, as it is a part of the times.
#[derive(Debug)]
struct DatagramServer(Child);

/// Start of a proxy.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProxyStart {
    /// Time from the start of the process until the last Service answered, in seconds; NaN if none did.
    pub(super) seconds: f64,
    pub(super) answers: ServiceAnswers,
}

impl RunningProxy {
    /// Starts a proxy on a new node, and waits until all Services answer or no further one does.
    pub(super) fn start(
        context: &ClusterIpBenchContext,
        subject: ProxySubject,
        set: ServiceSet,
    ) -> Result<(Self, ProxyStart)> {
        let node = BenchNode::create(subject.name())?;
        // The server is in the node's namespace, so that no traffic of the API leaves it.
        let listener = node.listen(BenchNetns::Node, SERVER_ADDRESS)?;
        let first = objects::node_objects(NODE_ADDRESS).into_iter();
        let objects = first.chain(set.service_objects()).chain(set.endpoint_slices());
        let server = BenchApiServer::start(listener, objects)?;
        let log = context.folder.join(format!("clusterip-{}.log", subject.name()));
        let out = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = proxy_command(context, subject, &node)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        wait_until_idle();
        let client = context.client.clone();
        let datagram_server = match set.protocol {
            ServiceProtocol::Tcp => None,
            ServiceProtocol::Udp => Some(DatagramServer::start(&node, &client)?),
        };
        // Before the proxy: a client that starts later would miss the first answers.
        let waiting = start_waiting_client(&node, &client, set)?;
        let started_us = unix_us();
        let child = command.spawn().with_context(|| format!("cannot start {}", subject.name()))?;
        let process = ProxyProcess { child, cgroup: node.cgroup(BenchCgroup::Proxy), log };
        // Made before the wait, so that an error ends the process and removes the node.
        let mut proxy =
            Self { subject, process, _datagram_server: datagram_server, server, node, client, set };
        let answers = proxy.wait_for_answers(waiting)?;
        let seconds = match answers.answered {
            // No answer is no time of 0.
            0 => f64::NAN,
            _ => answers.last_us.saturating_sub(started_us) as f64 / 1e6,
        };
        println!(
            "{}: {} of {} Services answer after {seconds:.3} s",
            subject.name(),
            answers.answered,
            set.services
        );
        Ok((proxy, ProxyStart { seconds, answers }))
    }

    /// Waits for the result of the client, or for the end of the proxy, which is an error.
    fn wait_for_answers(&mut self, mut client: Child) -> Result<ServiceAnswers> {
        while client.try_wait()?.is_none() {
            if let Err(error) = self.process.check_running(self.subject) {
                let _ = client.kill();
                let _ = client.wait();
                return Err(error);
            }
            sh::sleep(POLL_PERIOD);
        }
        let output = client.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str(text.trim())
            .with_context(|| format!("cannot read `{}` of a client", text.trim()))
    }

    /// Command `xtask measure ARGS` in the client's pod, in a cgroup of the node.
    pub(super) fn client_command(&self, cgroup: BenchCgroup, args: &[&str]) -> Command {
        let mut command = self.node.command(BenchNetns::Client, cgroup, &self.client);
        command.arg("measure").args(args);
        command
    }

    /// Command `xtask measure services ARGS` as [`Self::client_command`], in the cgroup of redirected clients.
    pub(super) fn services_command(&self, args: &[&str]) -> Command {
        measure_command(&self.node, BenchCgroup::Client, &self.client, args)
    }

    /// Ends the proxy as an upgrade does, and starts it with further variables. Its maps stay in force if its pins are on
    /// a filesystem that outlives it.
    pub(super) fn restart(
        &mut self,
        context: &ClusterIpBenchContext,
        variables: &[(&str, &str)],
    ) -> Result<()> {
        self.process.end(self.subject)?;
        let mut command = proxy_command(context, self.subject, &self.node)?;
        let log = &self.process.log;
        // The log of the first process stays, in case the restart shows its fault.
        let out = File::options().append(true).open(log);
        let out = out.with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.envs(variables.iter().copied()).spawn();
        self.process.child =
            child.with_context(|| format!("cannot start {}", self.subject.name()))?;
        Ok(())
    }

    /// Suspends the proxy, so that it takes no time of the others. Its rules or maps stay in force.
    pub(super) fn suspend(&self) -> Result<()> {
        self.process.signal(Signal::SIGSTOP)
    }

    /// Runs `work` while the proxy is not suspended.
    pub(super) fn while_running<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.process.signal(Signal::SIGCONT)?;
        sh::sleep(SETTLE_TIME);
        let outcome = work(self);
        self.process.check_running(self.subject)?;
        self.suspend()?;
        outcome
    }

    /// Processor time of the proxy and of all programs that it has run so far, in µs.
    pub(super) fn cpu_us(&self) -> Result<f64> {
        let file = self.process.cgroup.join("cpu.stat");
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        usage.and_then(|it| it.trim().parse().ok()).context("cpu.stat without usage_usec")
    }

    /// Process id of the proxy.
    pub(super) fn pid(&self) -> u32 {
        self.process.child.id()
    }
}

impl ProxyProcess {
    /// Fails if the proxy has ended, with the last lines of its log.
    fn check_running(&mut self, subject: ProxySubject) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n");
        bail!("{} ended with {status}; {} ends with:\n{last}", subject.name(), self.log.display())
    }

    /// Ends the process by SIGTERM, as the kubelet does.
    fn end(&mut self, subject: ProxySubject) -> Result<()> {
        self.check_running(subject)?;
        self.signal(Signal::SIGTERM)?;
        let started = Instant::now();
        while self.child.try_wait()?.is_none() {
            if started.elapsed() > END_TIMEOUT {
                bail!("{} has not ended after SIGTERM in {END_TIMEOUT:?}", subject.name());
            }
            sh::sleep(END_POLL_PERIOD);
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("a process id is small")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("cannot send {signal}"))
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        // Since Linux 5.14 this ends the programs as well that kube-proxy runs. Before, they end by themselves.
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl DatagramServer {
    fn start(node: &BenchNode, program: &Path) -> Result<Self> {
        let address = format!("0.0.0.0:{ENDPOINT_PORT}");
        let mut command = node.command(BenchNetns::Endpoints, BenchCgroup::Outside, program);
        command.args(["measure", "datagrams", "answer", "--addr", &address]).stdin(Stdio::null());
        Ok(Self(command.spawn().context("cannot start a server of datagrams")?))
    }
}

impl Drop for DatagramServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a client that waits for all Services. It runs before the proxy, so that its own start is no part of a time.
fn start_waiting_client(node: &BenchNode, client: &Path, set: ServiceSet) -> Result<Child> {
    let (first, count) = (cluster_ip(0).to_string(), set.services.to_string());
    let mut args =
        vec!["answers", "--first", &first, "--count", &count, "--timeout-s", START_TIMEOUT_S];
    if set.protocol == ServiceProtocol::Udp {
        args.push("--udp");
    }
    let mut command = measure_command(node, BenchCgroup::Client, client, &args);
    let waiting = command.stdout(Stdio::piped()).spawn().context("cannot start a client")?;
    sh::sleep(CLIENT_START_TIME);
    Ok(waiting)
}

/// Waits until the machine is idle: the kernel removes the rules of the node before in the background.
fn wait_until_idle() {
    for _ in 0..IDLE_PERIODS_MAX {
        let before = cpu_us();
        sh::sleep(IDLE_PERIOD);
        if cpu_us() - before < IDLE_CPU_US {
            return;
        }
    }
    eprintln!("the machine is busy: figures of this start are less precise");
}

fn measure_command(node: &BenchNode, cgroup: BenchCgroup, client: &Path, args: &[&str]) -> Command {
    let mut command = node.command(BenchNetns::Client, cgroup, client);
    command.args(["measure", "services"]).args(args);
    command
}

/// Folder of the agent's pins. The agent mounts a bpf filesystem there if there is none, which ends with its own mounts.
pub(super) fn pins_folder(context: &ClusterIpBenchContext, subject: ProxySubject) -> PathBuf {
    context.folder.join(format!("clusterip-{}.pins", subject.name()))
}

/// Command that starts the proxy on the node.
fn proxy_command(
    context: &ClusterIpBenchContext,
    subject: ProxySubject,
    node: &BenchNode,
) -> Result<Command> {
    let file = |name: &str| context.folder.join(format!("clusterip-{}.{name}", subject.name()));
    let kubeconfig = file("kubeconfig");
    write(&kubeconfig, &kubeconfig_content())?;
    if let Some(config) = subject.kube_proxy_config(&kubeconfig) {
        let file = file("config");
        write(&file, &config)?;
        let mut command = node.command(BenchNetns::Node, BenchCgroup::Proxy, Path::new("sh"));
        command.args(["-c", HIDE_RUN_SCRIPT]).arg(&context.kube_proxy);
        command.arg(format!("--config={}", file.display()));
        return Ok(command);
    }
    let mut command = node.command(BenchNetns::Node, BenchCgroup::Proxy, &context.rouse);
    let pins = pins_folder(context, subject);
    fs::create_dir_all(&pins).with_context(|| format!("cannot make {}", pins.display()))?;
    command.arg("agent").env("NO_COLOR", "1");
    command.env("ROUSE_NODE", NODE).env("ROUSE_CLUSTERIP", "all").env("KUBECONFIG", &kubeconfig);
    command.env("ROUSE_PINS", &pins);
    command.env("ROUSE_CLIENTS_CGROUP", node.cgroup(BenchCgroup::Clients));
    command.env("ROUSE_PODS_CGROUP", node.cgroup(BenchCgroup::Pods));
    // Services of the cluster need neither controller nor autoscaler.
    for name in ["ROUSE_CONTROLLER", "ROUSE_AUTOSCALER"] {
        command.env(name, format!("unix:{}", file("absent").display()));
    }
    Ok(command)
}

/// A kubeconfig without credentials, which the server does not ask for.
fn kubeconfig_content() -> Value {
    let named = |key: &str, value: Value| json!([{"name": "bench", key: value}]);
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": named("cluster", json!({"server": format!("http://{SERVER_ADDRESS}")})),
        "users": named("user", json!({})),
        "contexts": named("context", json!({"cluster": "bench", "user": "bench"})),
    })
}

fn write(file: &Path, content: &Value) -> Result<()> {
    fs::write(file, content.to_string()).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kube_proxy_keeps_its_default_sync_period_unless_the_subject_has_none() {
        let config = |subject: ProxySubject| subject.kube_proxy_config(Path::new("/k"));
        assert_eq!(config(ProxySubject::Rouse), None);
        let bounded = config(ProxySubject::Nftables).unwrap();
        assert_eq!((&bounded["mode"], &bounded["nftables"]), (&json!("nftables"), &json!({})));
        let unbounded = config(ProxySubject::IptablesUnbounded).unwrap();
        assert_eq!(unbounded["iptables"]["minSyncPeriod"], "1ms");
        assert_eq!(unbounded["conntrack"]["maxPerCore"], 0);
    }

    #[test]
    fn subjects_have_names_of_their_own_in_the_report() {
        let mut names = ProxySubject::ALL.map(ProxySubject::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ProxySubject::ALL.len());
    }
}
