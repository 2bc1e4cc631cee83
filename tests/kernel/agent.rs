//! Shell: the agent as a process, between a fake controller and autoscaler that only receive, with a real pod.
//!
//! Every test has a pod of its own. Most have a node of their own too, with cgroup, bpf filesystem, and network
//! namespaces for node and pod. The others share one node, with its agent. Agent and pod are this program again, in a
//! role that the environment names.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "these threads are the tests' own, and a role speaks to its test through a pipe"
)]

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead as _, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    num::NonZeroU16,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use agent::{kernel::maps::KernelMaps, pods::namespace::NetworkNamespace};
use common::{
    fixtures,
    link::serve,
    outbox::Outbox,
    wire::{
        self, NamespacedName, PodEntry, PodObservation, PodReportItem, ProbeHandler,
        ReadinessProbe, RevisionEntry, RouteChange, RouteKey, RoutingPhase, ServiceEntry,
        StandbyOrder, UsageItem, UsageSample,
        raw::{pods_server, routes_server, usage_server},
    },
};
use datapath::abi;
use nix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use self::fake_control_plane::FakeControlPlane;

/// Beginning of the names of all objects of a node.
const PREFIX: &str = "rouse-agent-";
/// Variable with the role that this program has.
const ROLE: &str = "ROUSE_TEST_ROLE";
/// Timeout of every wait. Under load, loading the programs alone may take half a minute.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Variable with the input of a role: the bytes that a client sends, or the address that it connects to.
const ROLE_INPUT_VARIABLE: &str = "ROUSE_TEST_SENDS";
/// Timeout of the revision's requests, unless a test sets another one.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout of one attempt of the agent's probe. With Kubernetes' default of one second, a pod would not be ready at
/// times on a busy machine, which no test expects.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Address and port on which the pod serves.
const POD_ADDRESS: &str = "10.77.0.2:8080";
/// Address and port of the service on the direct path to the pod.
const SERVICE_ADDRESS: &str = "10.96.0.7:80";
/// Beginning of the metrics line that counts passed probes.
const PROBES_PASSED: &str = "rouse_agent_probes_total{result=\"passed\"}";
/// Mount points that cgroup v2 may have.
const CGROUP_ROOTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

/// Main function of this program in a role, which the tests start; not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    match env::var(ROLE).as_deref() {
        Ok("agent") => roles::run_agent(),
        Ok("pod") => roles::run_pod(),
        Ok("client") => roles::run_client(),
        Ok("led-client") => roles::run_led_client(),
        Ok("half-closed-client") => roles::run_half_closed_client(),
        Ok("pool-client") => roles::run_pool_client(),
        Ok("pausing-clients") => pausing_clients::run_clients(),
        Ok("server") => http_server::run(),
        Ok("connect") => cluster_services::run_connect(),
        Ok("datagram") => cluster_services::run_datagram(),
        Ok("datagrams") => cluster_services::run_held_datagrams(),
        Ok("connection") => cluster_services::run_held_connection(b""),
        Ok("request") => cluster_services::run_held_connection(b"GET / HTTP/1.1\r\n\r\n"),
        _ => {}
    }
}

/// Node of one test, with all its objects; removed on drop.
struct AgentFixture {
    name: String,
    folder: PathBuf,
    cgroup: PathBuf,
    /// Path of the pods' cgroups below the test's cgroup.
    pods_cgroup: &'static str,
    /// Number of the present pod, of which there is one at a time.
    pod_number: u32,
    /// Timeout of the revision's requests.
    request_timeout: Duration,
    /// Standby order of the pod in the RouteTable.
    standby: Option<StandbyOrder>,
    routes: Outbox<RouteKey, RouteChange>,
    reports: mpsc::Receiver<PodReportItem>,
    usages: mpsc::Receiver<UsageItem>,
    pods: BTreeMap<String, PodObservation>,
    totals: BTreeMap<String, UsageSample>,
    agent: Option<Child>,
    pod: Option<Child>,
    servers: tokio::runtime::Runtime,
}

impl AgentFixture {
    fn new(test: &str) -> Self {
        Self::with_pods_cgroup(test, "pods")
    }

    fn with_pods_cgroup(test: &str, pods_cgroup: &'static str) -> Self {
        // A test that was killed leaves its namespaces and cgroups, which would be taken for those of this one.
        remove_leftovers();
        let name = format!("{PREFIX}{test}-{}", std::process::id());
        let folder = env::temp_dir().join(&name);
        fs::create_dir_all(folder.join("bpf")).expect("a folder");
        let root = CGROUP_ROOTS.iter().find(|root| Path::new(root).join("cgroup.procs").is_file());
        let cgroup = Path::new(root.expect("cgroup v2")).join(&name);
        fs::create_dir_all(cgroup.join(pods_cgroup).join("poduid-1/main")).expect("a cgroup");
        for part in ["n", "p"] {
            crate::fixture::add_netns(&format!("{name}-{part}"));
        }
        for line in [
            format!("ip -n {name}-n link add v0 type veth peer name eth0 netns {name}-p"),
            format!("ip -n {name}-n address add 10.77.0.1/24 dev v0"),
            format!("ip -n {name}-p address add 10.77.0.2/24 dev eth0"),
            format!("ip -n {name}-n link set v0 up"),
            format!("ip -n {name}-n link set lo up"),
            format!("ip -n {name}-p link set lo up"),
            format!("ip -n {name}-p link set eth0 up"),
        ] {
            run_shell(&line);
        }
        let (report_tx, reports) = mpsc::channel();
        let (usage_tx, usages) = mpsc::channel();
        let routes = Outbox::new();
        // A runtime of its own, since the test's thread blocks while it waits for reports.
        let servers = tokio::runtime::Runtime::new().expect("a runtime");
        let fake =
            FakeControlPlane { routes: routes.clone(), reports: report_tx, usages: usage_tx };
        let controller = Server::builder()
            .add_service(routes_server::RoutesServer::new(fake.clone()))
            .add_service(pods_server::PodsServer::new(fake.clone()));
        let autoscaler = Server::builder().add_service(usage_server::UsageServer::new(fake));
        for (endpoint, router) in [("c", controller), ("a", autoscaler)] {
            let endpoint = format!("unix:{}", folder.join(endpoint).display());
            servers.spawn(async move { serve(&endpoint, router, CancellationToken::new()).await });
        }
        Self {
            name,
            folder,
            cgroup,
            pods_cgroup,
            pod_number: 1,
            request_timeout: REQUEST_TIMEOUT,
            standby: None,
            routes,
            reports,
            usages,
            pods: BTreeMap::new(),
            totals: BTreeMap::new(),
            agent: None,
            pod: None,
            servers,
        }
    }

    fn pod_uid(&self) -> String {
        format!("uid-{}", self.pod_number)
    }

    /// Path of the pod's cgroup, with one of its container below it.
    fn pod_cgroup(&self) -> PathBuf {
        self.cgroup.join(self.pods_cgroup).join(format!("pod{}", self.pod_uid()))
    }

    /// Puts the pod into the RouteTable.
    fn set_pod(&self, phase: RoutingPhase, probe: ProbeHandler) {
        self.set_probed_pod(phase, probe, Duration::ZERO);
    }

    /// Puts the pod into the RouteTable, with a probe every `period` that goes on while it is ready.
    fn set_probed_pod(&self, phase: RoutingPhase, probe: ProbeHandler, period: Duration) {
        self.set_pod_route(phase, probe, period, "n1");
    }

    /// Puts the pod into the RouteTable as a pod of `node`, which the kubelet has not reported as ready.
    fn set_pod_on_node(&self, node: &str, phase: RoutingPhase) {
        self.set_pod_route(phase, ProbeHandler::Listen, Duration::ZERO, node);
    }

    fn set_pod_route(
        &self,
        phase: RoutingPhase,
        handler: ProbeHandler,
        period: Duration,
        node: &str,
    ) {
        let name = NamespacedName::new("default", "hello-00001");
        let revision =
            RevisionEntry { timeout: self.request_timeout, ..fixtures::revision(&name, "hello") };
        let address =
            (phase != RoutingPhase::Starting).then(|| POD_ADDRESS.parse().expect("an address"));
        let pod = PodEntry {
            name: "hello-1".into(),
            node: node.into(),
            address,
            kubelet_ready: false,
            port: NonZeroU16::new(8080).expect("not zero"),
            probe: ReadinessProbe {
                handler,
                period,
                timeout: PROBE_TIMEOUT,
                ..ReadinessProbe::listener_probe()
            },
            standby: self.standby,
            ..fixtures::pod(&self.pod_uid(), &name, phase)
        };
        // As the controller sends them: a pod without its Revision would be unknown to the agent.
        self.routes.set(RouteKey::Revision(name), RouteChange::Revision(revision));
        self.routes.set(RouteKey::Pod(pod.uid.clone()), RouteChange::Pod(pod.into()));
    }

    fn agent_command(&self) -> Command {
        let mut command = self.role_command("agent", "n");
        command.envs(self.agent_environment());
        command.env("ROUSE_CLIENTS_CGROUP", &self.cgroup);
        command.env("ROUSE_PODS_CGROUP", self.cgroup.join(self.pods_cgroup));
        command
    }

    /// Starts the agent without waiting for its programs.
    fn spawn_agent(&mut self) {
        self.agent = Some(self.agent_command().spawn().expect("nsenter"));
    }

    fn start_agent(&mut self) {
        self.spawn_agent();
        self.wait_attached();
    }

    /// Waits until the agent has attached its programs, or has ended.
    fn wait_attached(&mut self) {
        let agent = self.agent.as_mut().expect("launched");
        // On kernels without cookies in sock_ops (before 5.15), sockets that listen before the programs are not
        // counted.
        let pin = self.folder.join(format!("bpf/v{}/links/connect6", abi::ABI_VERSION));
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !pin.exists() && matches!(agent.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts the agent as a DaemonSet does: in a pod's cgroup, and without settings of cgroups.
    fn start_agent_in_a_pod(&mut self) {
        let agent_cgroup = self.cgroup.join(self.pods_cgroup).join("podagent/main");
        fs::create_dir_all(&agent_cgroup).expect("a cgroup");
        let entering = self.role_command("agent", "n");
        let args: Vec<_> = entering.get_args().filter_map(|word| word.to_str()).collect();
        let procs = agent_cgroup.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec nsenter {}", procs.display(), args.join(" "));
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env(ROLE, "agent").envs(self.agent_environment());
        self.agent = Some(command.spawn().expect("sh"));
    }

    fn agent_environment(&self) -> [(&'static str, String); 6] {
        let path = |name: &str| self.folder.join(name).display().to_string();
        [
            ("ROUSE_NODE", "n1".into()),
            ("ROUSE_ADMIN", "127.0.0.1:7104".into()),
            ("ROUSE_CONTROLLER", format!("unix:{}", path("c"))),
            ("ROUSE_AUTOSCALER", format!("unix:{}", path("a"))),
            ("ROUSE_PINS", path("bpf")),
            ("ROUSE_TUNNEL_DRAIN_MS", "1000".into()),
        ]
    }

    fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            agent.kill().expect("SIGKILL");
            agent.wait().expect("it ends");
        }
    }

    /// Starts the pod's process as a runtime does: on the node, first in its cgroup, then in its namespace.
    fn start_pod(&mut self) {
        self.pod = Some(self.spawn_in_pod("pod"));
    }

    /// Starts a process of the pod's container.
    fn spawn_in_pod(&self, role: &str) -> Child {
        self.pod_command(role).spawn().expect("sh")
    }

    fn pod_command(&self, role: &str) -> Command {
        self.process_command(role, &self.pod_cgroup().join("main"))
    }

    /// Returns the command of a process in this cgroup and the pod's network namespace.
    fn process_command(&self, role: &str, cgroup: &Path) -> Command {
        let entering = self.role_command(role, "p");
        let args = entering
            .get_args()
            .map(|word| word.to_str().expect("text"))
            .collect::<Vec<_>>()
            .join(" ");
        let procs = cgroup.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec nsenter {args}", procs.display());
        // The starting namespace matters. A process in a pod's cgroup, but in a foreign namespace, would be taken for
        // the pod, with the listeners of that namespace.
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}-n", self.name));
        command.args(["sh", "-c", &script]).env(ROLE, role).stdin(Stdio::piped());
        if role == "client" {
            command.stdout(Stdio::piped());
        }
        command
    }

    fn role_command(&self, role: &str, namespace: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}-{namespace}", self.name));
        if role == "agent" {
            let capabilities =
                env::var("ROUSE_TEST_CAPS").unwrap_or_else(|_unset| required_capabilities());
            // The agent is killed together with its test.
            command.args(["setpriv", "--pdeathsig", "KILL"]);
            command.args(["--no-new-privs", "--bounding-set", &capabilities]);
        }
        command.arg(env::current_exe().expect("this program"));
        command.args(["agent::role", "--exact", "--ignored", "--nocapture"]).env(ROLE, role);
        command
    }

    fn send_to_pod(&mut self, line: &str) {
        let stdin = self.pod.as_mut().and_then(|pod| pod.stdin.as_mut()).expect("a pod");
        writeln!(stdin, "{line}").expect("it reads");
    }

    /// Receives pod reports until `is_done` returns true.
    fn wait_pod(
        &mut self,
        description: &str,
        is_done: impl Fn(&PodObservation) -> bool,
    ) -> PodObservation {
        let (uid, deadline) = (self.pod_uid(), Instant::now() + WAIT_TIMEOUT);
        loop {
            if let Some(pod) = self.pods.get(&uid).filter(|pod| is_done(pod)) {
                return pod.clone();
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            match self.reports.recv_timeout(remaining) {
                Ok(PodReportItem::Observed(pod)) => drop(self.pods.insert(pod.uid.clone(), pod)),
                Ok(_) => {}
                Err(_) => panic!("{description}: never, but {:?}", self.pods),
            }
        }
    }

    /// Receives usage reports until `is_done` returns true for the pod's totals.
    fn wait_usage(
        &mut self,
        description: &str,
        is_done: impl Fn(&UsageSample) -> bool,
    ) -> UsageSample {
        let (uid, deadline) = (self.pod_uid(), Instant::now() + WAIT_TIMEOUT);
        loop {
            if let Some(sample) = self.totals.get(&uid).filter(|sample| is_done(sample)) {
                return sample.clone();
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            match self.usages.recv_timeout(remaining) {
                Ok(UsageItem::Sample(sample)) => {
                    self.totals.insert(sample.key.pod.clone().unwrap_or_default(), sample);
                }
                Ok(_) => {}
                Err(_) => panic!("{description}: never, but {:?}", self.totals),
            }
        }
    }

    /// Waits until the agent has read the pod's usage this time from now. Until then its loop has run, and made the
    /// checks of a fixed period. On a busy machine a pause of the test would not prove that.
    fn wait_read_after(&mut self, time: Duration) {
        let after_ns = (monotonic_now() + time).as_nanos() as u64;
        self.wait_usage("a later reading", |sample| sample.read_at_ns > after_ns);
    }

    /// Sends one request from the node's namespace and returns the status line of the response.
    fn get_status_line(&self) -> String {
        let node =
            NetworkNamespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let exchange = || {
            let mut stream =
                TcpStream::connect(POD_ADDRESS.parse::<SocketAddr>().expect("an address"))?;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text.lines().next().unwrap_or_default().to_owned())
        };
        node.run_inside("get a response", exchange).expect("a response")
    }

    /// Gets a page in a namespace of this node, as [`http_get`] does.
    fn get_page(&self, namespace: &str, address: &str, path: &str) -> String {
        http_get(&format!("{}-{namespace}", self.name), address, path)
    }

    /// Gets a page of the pod server in a namespace of this node, once the server is open: a pod is reported a moment
    /// before.
    fn pod_server_page(&self, namespace: &str) -> String {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page(namespace, POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH);
            if !page.is_empty() {
                return page;
            }
            assert!(Instant::now() < deadline, "the pod server never opens");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the agent shows its metrics. Returns the value of the one that begins with `line`, or 0 if it has
    /// none yet.
    fn metric_count(&self, line: &str) -> u64 {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page("n", "127.0.0.1:7104", "/metrics");
            if page.starts_with("HTTP/1.1 200") {
                let counted = page.lines().find_map(|it| it.strip_prefix(line));
                return counted.map_or(0, |text| text.trim().parse().expect("a number"));
            }
            assert!(Instant::now() < deadline, "no metrics: {page}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the metric that begins with `line` is at least `count`.
    fn wait_metric(&self, line: &str, count: u64) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page("n", "127.0.0.1:7104", "/metrics");
            let counted = page.lines().find_map(|it| it.strip_prefix(line));
            if counted.and_then(|text| text.trim().parse().ok()).is_some_and(|it: u64| it >= count)
            {
                return;
            }
            assert!(Instant::now() < deadline, "{line} never came to {count}: {page}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Row of the only pod in the maps.
    fn slot(&self) -> u32 {
        self.slots().values().next().expect("a registered pod").slot
    }

    fn slots(&self) -> BTreeMap<u64, abi::PodValue> {
        let pins = self.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
        KernelMaps::open(&pins).and_then(|maps| maps.pods()).expect("pinned maps")
    }
}

/// Returns the time by the clock of the kernel's events and the agent's reports.
fn monotonic_now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has it").into()
}

impl Drop for AgentFixture {
    fn drop(&mut self) {
        for child in [&mut self.agent, &mut self.pod].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        remove_node(&self.name);
    }
}

/// Removes the nodes of tests that were killed.
fn remove_leftovers() {
    let names = tests::leftovers::entry_names(&[env::temp_dir()]);
    let nodes = names.into_iter().filter(|name| name.starts_with(PREFIX));
    tests::leftovers::of_ended_processes(nodes).iter().for_each(|name| remove_node(name));
}

/// Removes all objects of a test's node except for its processes.
fn remove_node(name: &str) {
    let folder = env::temp_dir().join(name);
    let _ = Command::new("umount").arg(folder.join("bpf")).status();
    for namespace in ["n", "p", "q"] {
        // Few tests have the last one.
        let mut command = Command::new("ip");
        command.args(["netns", "delete", &format!("{name}-{namespace}")]);
        let _ = command.stderr(Stdio::null()).status();
    }
    let _ = fs::remove_dir_all(&folder);
    CGROUP_ROOTS.iter().for_each(|root| remove_cgroup(&Path::new(root).join(name)));
}

/// Gets a page of a port over a new connection, in a network namespace; empty if no socket listens.
fn http_get(namespace: &str, address: &str, path: &str) -> String {
    let namespace = NetworkNamespace::open(Path::new("/run/netns").join(namespace));
    let exchange = || {
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map(|_| text)
    };
    namespace.expect("it exists").run_inside("read a page", exchange).unwrap_or_default()
}

/// Removes a cgroup and its descendants, as soon as their last processes have ended.
fn remove_cgroup(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let mut tries = 0;
    while fs::remove_dir(dir).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy)
        && tries < 3_000
    {
        tries += 1;
        thread::sleep(Duration::from_millis(10));
    }
}

/// Capabilities of the manifests, with which every agent of these tests runs, so that each test shows that they
/// suffice.
fn required_capabilities() -> String {
    let named = agent::CAPABILITIES.iter().map(|(name, _)| format!(",+{}", name.to_lowercase()));
    format!("-all{}", named.collect::<String>())
}

fn run_shell(line: &str) {
    let mut words = line.split(' ');
    let status =
        Command::new(words.next().expect("a command")).args(words).status().expect("it starts");
    assert!(status.success(), "{line}: {status}");
}

impl AgentFixture {
    /// Adds a service on the direct path to the pod.
    fn add_direct_service(&self) {
        let name = NamespacedName::new("default", "hello");
        let revision = NamespacedName::new("default", "hello-00001");
        let service = ServiceEntry {
            addresses: vec!["10.96.0.7".parse().expect("an address")],
            connection_path: wire::ConnectionPath::Direct,
            ..fixtures::service(&name, &revision)
        };
        self.routes.set(RouteKey::Service(name), RouteChange::Service(service));
    }

    /// Returns true while the pod does not respond. A successful response counts as a request.
    fn request_fails(&self) -> bool {
        let node =
            NetworkNamespace::open(format!("/run/netns/{}-n", self.name)).expect("it exists");
        let connect = || TcpStream::connect(POD_ADDRESS).map(drop);
        let refused = node.run_inside("connect", connect).is_err();
        if refused {
            thread::sleep(Duration::from_millis(1));
        } else {
            self.get_status_line();
        }
        refused
    }
}

/// Address of the agent's pod server, which the kubelet's preStop hook calls.
const POD_SERVER_ADDRESS: &str = "10.77.0.2:8022";
const WAIT_FOR_DRAIN_PATH: &str = "/wait-for-drain";

mod activator_reports;
mod cluster_services;
mod fake_control_plane;
mod fake_watch_server;
mod full_maps;
mod gauge_audit;
mod growth_reports;
mod http_server;
mod kubelet;
mod node_check;
mod overdue_requests;
mod pausing_clients;
mod pod_reports;
mod revision_metrics;
mod roles;
mod scaled_services;
mod service_events;
pub(crate) mod shared_agent;
mod stale_connections;
mod standby;
mod unreachable_routes;
