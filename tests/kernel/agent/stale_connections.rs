//! Shell: persistent connections to a draining pod: idle ones are closed at the client's side, used ones are not.

use std::io::Lines;
use std::os::unix::fs::MetadataExt as _;
use std::process::ChildStdout;

use super::{roles::POOL_CONNECTIONS, shared_agent::SharedAgentFixture, *};

/// Beginning of the metrics line that counts connections found to be in use.
const SPARED_METRIC: &str = "rouse_agent_connections_spared_total";

/// Scope of scans of all clients, as metrics name it.
const ALL: &str = "all";
/// Scope of scans of the clients that connect records name.
const RECORDED: &str = "recorded";

/// Beginning of the metrics line that counts scans with this scope.
fn scans_metric(scope: &str) -> String {
    format!("rouse_agent_client_scans_total{{scope=\"{scope}\"}}")
}

/// Beginning of the metrics line that counts the namespaces whose connections these scans have listed.
fn walks_metric(scope: &str) -> String {
    format!("rouse_agent_client_walks_total{{scope=\"{scope}\"}}")
}

/// Returns true if the kernel tells the cookie of a namespace (5.14). Without it there are no scans of recorded clients.
fn has_recorded_scans() -> bool {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    agent::kernel::sys::netns_cookie(&socket).is_ok()
}

/// Process of a client, and its output.
struct ClientProcess {
    process: Child,
    lines: Lines<std::io::BufReader<ChildStdout>>,
}

impl ClientProcess {
    /// Next line of the client about its connection.
    fn next_event(&mut self) -> String {
        let is_event = |line: &String| {
            ["connected", "read: ", "ended: "].iter().any(|it| line.starts_with(it))
        };
        self.lines.find_map(|line| line.ok().filter(is_event)).expect("a line of the client")
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a pod that listens and handles accepted connections in this mode. Returns the cgroup of its clients as well.
pub(super) fn listening_pod_fixture(mode: &str) -> (SharedAgentFixture, PathBuf) {
    let mut fixture = SharedAgentFixture::new();
    let clients = fixture.cgroup.join("clients");
    fs::create_dir_all(&clients).expect("a cgroup");
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.add_direct_service();
    fixture.start_pod();
    // Sockets that listen from now on are seen by the eBPF programs, which follow their connections.
    fixture.wait_pod("known to the agent", |pod| !pod.not_ready_reason.is_empty());
    fixture.send_to_pod(mode);
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    (fixture, clients)
}

/// Starts a pod that keeps accepted connections and sends nothing by itself, and a client that has sent `sends`.
fn idle_client_fixture(sends: &str) -> (SharedAgentFixture, ClientProcess) {
    let (fixture, clients) = listening_pod_fixture("keep");
    let client = ClientProcess::start(&fixture, "client", &clients, sends);
    (fixture, client)
}

impl ClientProcess {
    /// Starts a client in this role, which has connected and has sent `sends`.
    fn start(fixture: &AgentFixture, role: &str, clients: &Path, sends: &str) -> Self {
        let mut command = fixture.process_command(role, clients);
        let command = command.env(ROLE_INPUT_VARIABLE, sends).stdout(Stdio::piped());
        let mut process = command.spawn().expect("sh");
        let lines = std::io::BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let mut client = Self { process, lines };
        assert_eq!(client.next_event(), "connected");
        client
    }
}

/// Client without connections, in a namespace of its own.
struct BystanderProcess {
    netns: String,
    process: Child,
}

impl BystanderProcess {
    fn start(fixture: &AgentFixture, clients: &Path) -> Self {
        let netns = format!("{}-q", fixture.name);
        run_shell(&format!("ip netns add {netns}"));
        let (procs, path) = (clients.join("cgroup.procs"), format!("/run/netns/{netns}"));
        let script =
            format!("echo $$ > {} && exec nsenter --net={path} sleep 1000", procs.display());
        let process = Command::new("sh").args(["-c", &script]).spawn().expect("sh");
        let bystander = Self { netns, process };
        let inode = |path: &str| fs::metadata(path).expect("it exists").ino();
        let own_path = format!("/proc/{}/ns/net", bystander.process.id());
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while inode(&own_path) != inode(&path) {
            assert!(Instant::now() < deadline, "it never enters its namespace");
            thread::sleep(Duration::from_millis(1));
        }
        bystander
    }
}

impl Drop for BystanderProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = Command::new("ip").args(["netns", "delete", &self.netns]).status();
    }
}

#[test]
fn an_idle_connection_to_a_draining_pod_is_ended_at_the_clients_side() {
    let (mut fixture, mut client) = idle_client_fixture("");
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    fixture.wait_pod("drained", |pod| pod.drained);
}

/// The first connection looks idle at each scan, and is spared at each attempt, because its client does not read.
#[test]
fn all_idle_connections_of_a_pool_are_ended_beside_one_that_is_always_spared() {
    let (fixture, clients) = listening_pod_fixture("serve");
    let request = "GET / HTTP/1.1\r\nhost: hello\r\n\r\n";
    let mut client = ClientProcess::start(&fixture, "pool-client", &clients, request);
    let others = 1..POOL_CONNECTIONS;
    let responses: Vec<String> = others.clone().map(|_| client.next_event()).collect();
    assert!(responses.iter().all(|it| it.starts_with("read: HTTP/1.1 200")), "{responses:?}");
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    let ends: Vec<String> = others.map(|_| client.next_event()).collect();
    assert!(ends.iter().all(|it| it == "ended: Err(ConnectionAborted)"), "{ends:?}");
}

/// Creates a fixture with a request in flight and the first half of its response sent. The client's side alone looks
/// idle.
fn paused_response_fixture() -> (SharedAgentFixture, ClientProcess) {
    let (mut fixture, mut client) = idle_client_fixture("GET / HTTP/1.1\r\nhost: hello\r\n\r\n");
    fixture.wait_usage("it has begun", |usage| usage.totals.started == 1);
    fixture.send_to_pod("say HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\nok");
    assert!(client.next_event().ends_with("ok"), "the first half has come");
    (fixture, client)
}

/// Adds (`add`) a blackhole route from the pod to its node, or removes it (`del`).
fn change_blackhole_route(fixture: &AgentFixture, verb: &str) {
    let pod = format!("{}-p", fixture.name);
    let args = ["-n", &pod, "route", verb, "blackhole", "10.77.0.1/32"];
    assert!(Command::new("ip").args(args).status().expect("iproute2").success());
}

/// Blocks the agent's query, like a policy that blocks nodes at the port, or a node too busy to respond in time.
#[test]
fn a_response_that_pauses_is_not_cut_where_the_pod_cannot_be_asked() {
    let (mut fixture, mut client) = paused_response_fixture();
    let spared = fixture.metric_count(SPARED_METRIC);
    change_blackhole_route(&fixture, "add");
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    // Each query waits for half a second, so the client's side has looked idle for more than one second.
    fixture.wait_metric(SPARED_METRIC, spared + 4);
    fixture.send_to_pod("say ay");
    assert_eq!(client.next_event(), "read: ay");
    change_blackhole_route(&fixture, "del");
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    fixture.wait_pod("drained", |pod| pod.drained);
}

#[test]
fn a_response_that_pauses_is_not_cut_and_its_connection_ended_after_it() {
    let (mut fixture, mut client) = paused_response_fixture();
    let spared = fixture.metric_count(SPARED_METRIC);
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    fixture.wait_metric(SPARED_METRIC, spared + 2);
    fixture.send_to_pod("say ay");
    assert_eq!(client.next_event(), "read: ay");
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    fixture.wait_pod("drained", |pod| pod.drained);
}

#[test]
fn an_upgraded_connection_is_closed_by_its_pod_and_not_by_the_agent() {
    let upgrade = "GET / HTTP/1.1\r\nhost: hello\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n";
    let (mut fixture, mut client) = idle_client_fixture(upgrade);
    let spared = fixture.metric_count(SPARED_METRIC);
    fixture.wait_usage("it has begun", |usage| usage.totals.started == 1);
    fixture.send_to_pod("say HTTP/1.1 101 Switching Protocols\\r\\nconnection: upgrade\\r\\nupgrade: chat\\r\\n\\r\\n");
    assert!(client.next_event().starts_with("read: HTTP/1.1 101"));
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    fixture.wait_metric(SPARED_METRIC, spared + 2);
    fixture.send_to_pod("say hello");
    assert_eq!(client.next_event(), "read: hello");
    fixture.send_to_pod("drop");
    assert_eq!(
        client.next_event(),
        "ended: Err(ConnectionReset)",
        "by the pod, which has not read a thing"
    );
    fixture.wait_pod("drained", |pod| pod.drained);
}

/// No list of established connections shows a half-closed one, so each scan of recorded clients looks for it.
#[test]
fn scans_of_recorded_clients_enter_only_namespaces_that_records_name() {
    if !has_recorded_scans() {
        return;
    }
    let (fixture, clients) = listening_pod_fixture("keep");
    let bystander = BystanderProcess::start(&fixture, &clients);
    let client = ClientProcess::start(&fixture, "half-closed-client", &clients, "");
    let count = |metric: String| fixture.metric_count(&metric);
    let scans_before = [ALL, RECORDED].map(|scope| count(scans_metric(scope)));
    let walks_before = [ALL, RECORDED].map(|scope| count(walks_metric(scope)));
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    fixture.wait_metric(&walks_metric(RECORDED), walks_before[1] + 4);
    // A scan is counted before its walks. So read in this order, there are at least as many scans.
    let walks = count(walks_metric(RECORDED)) - walks_before[1];
    let scans = count(scans_metric(RECORDED)) - scans_before[1];
    assert!(walks <= scans, "{walks} walks of {scans} scans: one in the client's namespace each");
    // With the bystander's namespace, which such a scan leaves alone.
    let scans = count(scans_metric(ALL)) - scans_before[0];
    let walks = count(walks_metric(ALL)) - walks_before[0];
    assert!(scans >= 1 && walks >= 2 * scans, "{walks} walks of {scans} scans of all clients");
    drop((client, bystander));
}

#[test]
fn scans_of_recorded_clients_enter_no_namespace_for_known_connections_and_those_without_a_record() {
    if !has_recorded_scans() {
        return;
    }
    for role in ["client", "led-client"] {
        let (mut fixture, clients) = listening_pod_fixture("keep");
        let mut client = ClientProcess::start(&fixture, role, &clients, "");
        let [scans, walks] = [scans_metric(RECORDED), walks_metric(RECORDED)];
        let [scans_before, walks_before] = [&scans, &walks].map(|it| fixture.metric_count(it));
        fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
        fixture.wait_metric(&scans, scans_before + 4);
        assert_eq!(fixture.metric_count(&walks), walks_before, "{role}");
        assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)", "{role}");
        fixture.wait_pod("drained", |pod| pod.drained);
    }
}

#[test]
fn a_connection_to_the_pods_own_address_that_is_opened_while_it_drains_is_closed() {
    let (mut fixture, clients) = listening_pod_fixture("keep");
    let scans = fixture.metric_count(&scans_metric(ALL));
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    fixture.wait_metric(&scans_metric(ALL), scans + 1);
    let mut client = ClientProcess::start(&fixture, "client", &clients, "");
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    fixture.wait_pod("drained", |pod| pod.drained);
}
