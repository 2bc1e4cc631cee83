//! Shell: Services of the cluster, which the agent watches itself, in the running kernel.

mod bootstrap;
mod ended_connections;
mod meshed_pods;

use std::{
    io,
    net::{IpAddr, UdpSocket},
};

use agent::map_sizes::MapSizes;
use aya::maps::{HashMap, Map, MapData};
use datapath::abi::maps;
use serde_json::{Value, json};

use super::{fake_watch_server::FakeWatchServer, *};

/// ClusterIP of the Service.
const CLUSTER_IP: &str = "10.96.0.9";
/// Time after which a datagram counts as not answered.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for which a process holds a socket, longer than any test. The test kills it.
const HOLD_TIME: Duration = Duration::from_secs(1_200);

fn service(label: Option<&str>) -> Value {
    let labels = label.map(|value| json!({"rouse.dev/clusterip": value}));
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "plain", "namespace": "default", "labels": labels},
        "spec": {
            "type": "ClusterIP", "clusterIP": CLUSTER_IP, "clusterIPs": [CLUSTER_IP],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        },
    })
}

/// Returns the EndpointSlice of the Service with these addresses.
fn endpoint_slice(addresses: &[&str]) -> Value {
    let endpoints = addresses.iter().map(|it| json!({"addresses": [it]}));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "plain-1", "namespace": "default",
            "labels": {"kubernetes.io/service-name": "plain"},
        },
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints.collect::<Vec<_>>(),
    })
}

/// Returns a Service as Kubernetes has it for its DNS: one port for both protocols.
fn dns_service() -> Value {
    let mut service = service(None);
    service["spec"]["ports"] = json!([
        {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 8080},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 8080},
        {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
    ]);
    service
}

/// Returns the EndpointSlice of [`dns_service`] with these addresses.
fn dns_slice(addresses: &[&str]) -> Value {
    let mut slice = endpoint_slice(addresses);
    slice["ports"] = json!([
        {"name": "dns", "port": 8080, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 8080, "protocol": "TCP"},
        {"name": "http", "port": 8080, "protocol": "TCP"},
    ]);
    slice
}

fn set_node(server: &FakeWatchServer) {
    let metadata = json!({"name": "n1", "labels": {"topology.kubernetes.io/zone": "a"}});
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
}

/// Result of a connect, as one word.
fn outcome(result: &io::Result<()>) -> &'static str {
    match result.as_ref().map_err(io::Error::kind) {
        Ok(()) => "connected",
        // The second one for UDP before Linux 5.18. Other tests tell which of them it is.
        Err(ErrorKind::ConnectionRefused | ErrorKind::PermissionDenied) => "refused",
        // No route leads to a ClusterIP here, as kube-proxy does not run.
        Err(ErrorKind::NetworkUnreachable) => "unchanged",
        // An endpoint without a host, before the agent knows that it has left; or a timeout of a receive.
        Err(ErrorKind::HostUnreachable | ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            "unanswered"
        }
        Err(kind) => panic!("{kind}"),
    }
}

impl AgentFixture {
    /// Starts an agent that serves Services of the cluster.
    pub(super) fn start_agent_with_services(&mut self, mode: &str) {
        self.start_agent_with_settings(&[("ROUSE_CLUSTERIP", mode)]);
    }

    /// Starts an agent beside an API server, with these settings.
    pub(super) fn start_agent_with_settings(&mut self, settings: &[(&str, &str)]) {
        self.agent = Some(self.cluster_agent_command(settings).spawn().expect("nsenter"));
    }

    /// Returns the command of an agent beside an API server, with these settings.
    fn cluster_agent_command(&self, settings: &[(&str, &str)]) -> Command {
        let kubeconfig = self.folder.join("kubeconfig");
        fs::write(&kubeconfig, FakeWatchServer::kubeconfig().to_string()).expect("a file");
        let mut command = self.role_command("agent", "n");
        command.envs(self.agent_environment());
        command.env("ROUSE_CLIENTS_CGROUP", &self.cgroup);
        command.env("ROUSE_PODS_CGROUP", self.cgroup.join(self.pods_cgroup));
        command.env("KUBECONFIG", &kubeconfig).envs(settings.iter().copied());
        command
    }

    /// Connects to the Service from the pod, and returns the result as one word.
    fn connect_outcome(&self) -> String {
        self.role_outcome("connect")
    }

    /// Returns the result that a process of the pod has in this role, as one word.
    fn role_outcome(&self, role: &str) -> String {
        let mut command = self.pod_command(role);
        let output = command.env(ROLE_INPUT_VARIABLE, CLUSTER_IP).stdin(Stdio::null()).output();
        let text = String::from_utf8_lossy(&output.expect("sh").stdout).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix("outcome: "));
        line.unwrap_or_else(|| panic!("no outcome: {text}")).to_owned()
    }

    /// Waits until `/readyz` names this reason.
    pub(super) fn wait_not_ready_reason(&self, reason: &str) {
        self.wait_readyz(reason, true);
    }

    /// Waits until the agent runs and `/readyz` does not name this reason.
    pub(super) fn wait_without_not_ready_reason(&self, reason: &str) {
        self.wait_readyz(reason, false);
    }

    fn wait_readyz(&self, reason: &str, is_expected: bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page("n", "127.0.0.1:7104", "/readyz");
            if !page.is_empty() && page.contains(reason) == is_expected {
                return;
            }
            assert!(Instant::now() < deadline, "{reason}: expected {is_expected}: {page}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts a process in this role that holds a connected socket, in a namespace of this node.
    fn hold(&self, role: &str, namespace: &str, address: &str) -> HeldSocket {
        let cgroup = self.cgroup.join("host");
        fs::create_dir_all(&cgroup).expect("a cgroup");
        let entering = self.role_command(role, namespace);
        let args: Vec<_> = entering.get_args().filter_map(|word| word.to_str()).collect();
        let procs = cgroup.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec nsenter {}", procs.display(), args.join(" "));
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env(ROLE, role).env(ROLE_INPUT_VARIABLE, address);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("sh");
        let lines = std::io::BufReader::new(child.stdout.take().expect("piped"));
        let mut held = HeldSocket { child, lines };
        held.wait_line("held");
        held
    }

    /// Connects until the agent in this mode has removed the pins of the earlier programs, and once more. Each connect
    /// succeeds.
    fn connect_until_gone(&self, earlier: &Path, mode: &str) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while earlier.exists() {
            assert_eq!(self.connect_outcome(), "connected", "mode {mode}");
            assert!(Instant::now() < deadline, "mode {mode} does not take over");
        }
        assert_eq!(self.connect_outcome(), "connected", "mode {mode}");
    }

    /// Connects until the outcome is as expected.
    fn wait_outcome(&self, expected: &str) {
        self.wait_role_outcome("connect", expected);
    }

    /// Starts processes in this role until the outcome is as expected.
    fn wait_role_outcome(&self, role: &str, expected: &str) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let outcome = self.role_outcome(role);
            if outcome == expected {
                return;
            }
            assert!(Instant::now() < deadline, "{outcome} instead of {expected}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Connects to port 80 of an address, and prints the outcome.
pub(super) fn run_connect() {
    let address: IpAddr = env::var(ROLE_INPUT_VARIABLE).expect("set").parse().expect("an address");
    let result = TcpStream::connect((address, 80)).map(drop);
    println!("outcome: {}", outcome(&result));
}

/// Sends datagrams to port 53 of an address, by a connected socket and by another one, and prints the outcome.
pub(super) fn run_datagram() {
    let address: IpAddr = env::var(ROLE_INPUT_VARIABLE).expect("set").parse().expect("an address");
    let ask = |is_connected: bool| -> io::Result<()> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        // The pod answers its own datagram within microseconds, unless the machine is busy.
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut answer = [0; 8];
        if is_connected {
            socket.connect((address, 53))?;
            socket.send(b"query")?;
            assert_eq!(socket.peer_addr()?.ip(), address);
        } else {
            socket.send_to(b"query", (address, 53))?;
        }
        let (length, source) = socket.recv_from(&mut answer)?;
        assert_eq!((&answer[..length], source), (&b"query"[..], (address, 53).into()));
        Ok(())
    };
    let results = [true, false].map(ask);
    let [connected, unconnected] = results.each_ref().map(outcome);
    println!("outcome: {}", if connected == unconnected { connected } else { "different" });
}

/// Connects a UDP socket to an address, asks once, and prints how the next receive ends.
pub(super) fn run_held_datagrams() {
    let address = env::var(ROLE_INPUT_VARIABLE).expect("set");
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    socket.connect(&address).expect("an endpoint");
    socket.set_read_timeout(Some(HOLD_TIME)).expect("a socket");
    socket.send(b"query").expect("a peer");
    socket.recv(&mut [0; 8]).expect("an answer");
    println!("held");
    let ended = socket.recv(&mut [0; 8]).map_err(|error| error.kind());
    println!("ended: {ended:?}");
}

/// Connects to an address, sends this request, and prints how the connection ends.
pub(super) fn run_held_connection(request: &[u8]) {
    let address = env::var(ROLE_INPUT_VARIABLE).expect("set");
    let mut stream = TcpStream::connect(&address).expect("an endpoint");
    stream.set_read_timeout(Some(HOLD_TIME)).expect("a socket");
    stream.write_all(request).expect("a peer");
    println!("held");
    let ended = stream.read(&mut [0; 8]).map_err(|error| error.kind());
    println!("ended: {ended:?}");
}

/// A process that holds a connected socket.
struct HeldSocket {
    child: Child,
    lines: std::io::BufReader<std::process::ChildStdout>,
}

impl HeldSocket {
    /// Waits for the next line of the process that begins with a word.
    fn wait_line(&mut self, word: &str) -> String {
        let mut lines = self.lines.by_ref().lines().map_while(Result::ok);
        let found = lines.find(|line| line.starts_with(word));
        found.unwrap_or_else(|| panic!("no line `{word}`"))
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for HeldSocket {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _waited_already = self.child.wait();
    }
}

/// Sends each datagram to port 8080 back, until the process ends.
pub(super) fn echo_datagrams() {
    let socket = UdpSocket::bind("0.0.0.0:8080").expect("a free port");
    let mut datagram = [0; 64];
    while let Ok((length, client)) = socket.recv_from(&mut datagram) {
        let _client_left = socket.send_to(&datagram[..length], client);
    }
}

/// Starts a pod that listens, and an agent in this mode beside an API server without objects.
fn start(test: &str, mode: &str) -> (AgentFixture, FakeWatchServer) {
    start_with_lists(test, mode, true)
}

/// Starts all as [`start`] does; `streams_lists` is true if the API server streams lists.
fn start_with_lists(
    test: &str,
    mode: &str,
    streams_lists: bool,
) -> (AgentFixture, FakeWatchServer) {
    let mut fixture = AgentFixture::new(test);
    let netns = format!("{}-n", fixture.name);
    let server = FakeWatchServer::start_with_lists(&netns, streams_lists);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_services(mode);
    (fixture, server)
}

#[test]
fn a_service_of_the_cluster_leads_to_its_endpoints_or_refuses() {
    for streams_lists in [true, false] {
        let test = if streams_lists { "streamed" } else { "listed" };
        let (fixture, server) = start_with_lists(test, "all", streams_lists);
        set_node(&server);
        server.set(service(None));
        server.set(endpoint_slice(&["10.77.0.2"]));
        fixture.wait_outcome("connected");
        server.set(endpoint_slice(&[]));
        fixture.wait_outcome("refused");
        server.set(endpoint_slice(&["10.77.0.2"]));
        fixture.wait_outcome("connected");
        server.delete("EndpointSlice", "plain-1");
        fixture.wait_outcome("refused");
        server.delete("Service", "plain");
        fixture.wait_outcome("unchanged");
    }
}

#[test]
fn a_dns_service_answers_by_both_protocols_of_its_port() {
    let (mut fixture, server) = start("dns", "all");
    fixture.send_to_pod("datagrams");
    set_node(&server);
    server.set(dns_service());
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    fixture.wait_outcome("connected");
    server.set(dns_slice(&[]));
    fixture.wait_role_outcome("datagram", "refused");
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    server.set(service(None));
    fixture.wait_role_outcome("datagram", "unchanged");
    assert_eq!(fixture.connect_outcome(), "connected", "its other port stays");
}

#[test]
fn a_connected_udp_socket_is_ended_once_its_endpoint_has_left() {
    const ENDED: &str = "ended: Err(ConnectionAborted)";
    const ENDED_METRIC: &str = "rouse_agent_udp_sockets_ended_total";
    let (mut fixture, server) = start("ended", "all");
    fixture.send_to_pod("datagrams");
    set_node(&server);
    server.set(dns_service());
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    let cluster_ip = format!("{CLUSTER_IP}:53");
    // A pod, and a process of the node itself, in whose namespace the agent is.
    let redirected = ["p", "n"].map(|it| fixture.hold("datagrams", it, &cluster_ip));
    let mut direct = fixture.hold("datagrams", "p", POD_ADDRESS);
    server.set(dns_slice(&["10.77.0.2", "10.77.0.9"]));
    server.set(dns_slice(&["10.77.0.9"]));
    for mut socket in redirected {
        assert_eq!(socket.wait_line("ended"), ENDED);
    }
    fixture.wait_metric(ENDED_METRIC, 2);
    // An endpoint that leaves while no agent runs.
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    let mut socket = fixture.hold("datagrams", "p", &cluster_ip);
    fixture.kill_agent();
    server.set(dns_slice(&["10.77.0.9"]));
    fixture.start_agent_with_services("all");
    assert_eq!(socket.wait_line("ended"), ENDED);
    assert!(direct.is_running(), "it asked for the endpoint itself");
}

#[test]
fn only_labelled_services_are_served_in_mode_labelled() {
    let (fixture, server) = start("labelled", "labelled");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_without_not_ready_reason("programs:");
    fixture.wait_without_not_ready_reason("clusterip:");
    assert_eq!(fixture.connect_outcome(), "unchanged");
    server.set(service(Some("true")));
    fixture.wait_outcome("connected");
    server.set(service(Some("false")));
    fixture.wait_outcome("unchanged");
    let metadata = json!({"name": "default", "labels": {"rouse.dev/clusterip": "true"}});
    server.set(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}));
    assert_eq!(fixture.connect_outcome(), "unchanged", "its own label counts more");
    server.set(service(None));
    fixture.wait_outcome("connected");
}

/// Mode `all` has larger maps, so each of the two agents takes over from the other's programs.
#[test]
fn a_mode_with_maps_of_other_sizes_takes_over_without_a_failed_connect() {
    let (mut fixture, server) = start("sizes", "labelled");
    set_node(&server);
    server.set(service(Some("true")));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let folder = |sizes: MapSizes| {
        fixture.folder.join(format!("bpf/v{}{}", abi::ABI_VERSION, sizes.pins_suffix()))
    };
    let [default, whole] = [MapSizes::default(), MapSizes::WHOLE_CLUSTER].map(folder);
    for (mode, next, earlier) in [("all", &whole, &default), ("labelled", &default, &whole)] {
        assert!(earlier.exists() && !next.exists(), "before mode {mode}");
        fixture.kill_agent();
        fixture.start_agent_with_services(mode);
        fixture.connect_until_gone(earlier, mode);
    }
}

/// The lists in force are copied, so the next tables have the Services that the next agent cannot read.
#[test]
fn a_change_of_sizes_takes_over_while_the_api_server_is_away() {
    let (mut fixture, mut server) = start("resized", "labelled");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    set_node(&server);
    server.set(service(Some("true")));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    server.stop();
    fixture.kill_agent();
    fixture.start_agent_with_services("all");
    fixture.connect_until_gone(&fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION)), "all");
    fixture.wait_not_ready_reason("clusterip:");
    assert_eq!(fixture.connect_outcome(), "connected");
    // What the API server has now counts as soon as it is read.
    server.set(endpoint_slice(&[]));
    server.resume(&format!("{}-n", fixture.name));
    fixture.wait_outcome("refused");
}

/// Earlier programs that count nothing are no reason to follow tables without the cluster's Services. Here the earlier
/// lists cannot be copied.
#[test]
fn earlier_programs_lead_connects_until_the_services_of_the_cluster_are_known() {
    let (mut fixture, mut server) = start("unlisted", "labelled");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    set_node(&server);
    server.set(service(Some("true")));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    fixture.wait_usage("the pod at rest", |usage| usage.totals.in_flight() == 0);
    server.stop();
    fixture.kill_agent();
    let earlier = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    fs::remove_file(earlier.join(maps::SVC_INFO)).expect("it is pinned");
    fixture.start_agent_with_services("all");
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let pods = MapData::from_pin(earlier.join(maps::PODS)).expect("it stays");
    let pods: HashMap<MapData, u64, abi::PodValue> =
        Map::HashMap(pods).try_into().expect("a hash of pods");
    // Once the next agent has taken the last pod from the earlier programs, these count nothing any more.
    while pods.keys().next().is_some() {
        assert!(Instant::now() < deadline, "the earlier programs go on counting");
        thread::sleep(Duration::from_millis(10));
    }
    // The agent has read all pods again since, and so it knew the RouteTable.
    fixture.wait_read_after(Duration::from_secs(1));
    fixture.wait_not_ready_reason("clusterip:");
    assert!(earlier.join("links/connect4").exists(), "no other tables have the Service");
    assert_eq!(fixture.connect_outcome(), "connected");
    server.resume(&format!("{}-n", fixture.name));
    fixture.connect_until_gone(&earlier, "all");
}

/// The entry of such a socket is in the maps of the earlier sizes, which stay until it has closed.
#[test]
fn a_connected_udp_socket_from_before_a_change_of_sizes_is_ended_too() {
    let (mut fixture, server) = start("outlived", "labelled");
    fixture.send_to_pod("datagrams");
    set_node(&server);
    let mut labelled = dns_service();
    labelled["metadata"]["labels"] = json!({"rouse.dev/clusterip": "true"});
    server.set(labelled);
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    let mut socket = fixture.hold("datagrams", "p", &format!("{CLUSTER_IP}:53"));
    fixture.kill_agent();
    fixture.start_agent_with_services("all");
    // The earlier tables are gone once the programs with the larger maps have taken over.
    let earlier = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while earlier.join("FRONTENDS").exists() {
        assert!(Instant::now() < deadline, "the agent does not take over");
        thread::sleep(Duration::from_millis(10));
    }
    assert!(socket.is_running() && earlier.join("UDP_SOCKETS").exists());
    server.set(dns_slice(&["10.77.0.9"]));
    assert_eq!(socket.wait_line("ended"), "ended: Err(ConnectionAborted)");
}

/// kube-proxy in mode IPVS gives the node the ClusterIPs of all Services.
#[test]
fn an_address_that_kube_proxy_gave_the_node_is_no_reason_to_leave_its_service_alone() {
    let mut fixture = AgentFixture::new("ipvs");
    let netns = format!("{}-n", fixture.name);
    run_shell(&format!("ip -n {netns} link add kube-ipvs0 type bridge"));
    run_shell(&format!("ip -n {netns} address add {CLUSTER_IP}/32 dev kube-ipvs0"));
    let server = FakeWatchServer::start(&netns);
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_services("all");
    fixture.wait_outcome("connected");
}

/// The API server may be away for long. Its absence is no absence of Services.
#[test]
fn services_stay_while_the_api_server_is_away_and_while_agents_restart() {
    let (mut fixture, mut server) = start("away", "all");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let netns = format!("{}-n", fixture.name);
    server.stop();
    fixture.kill_agent();
    fixture.start_agent_with_services("all");
    fixture.wait_not_ready_reason("clusterip:");
    assert_eq!(fixture.connect_outcome(), "connected");
    server.delete_silently("Service", "plain");
    server.resume(&netns);
    fixture.wait_outcome("unchanged");
}

/// Value of the first line of a metrics page that begins with `name`.
fn metric(page: &str, name: &str) -> Option<u64> {
    let value = page.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().parse().ok()
}

impl AgentFixture {
    /// Gets a page of the agent. Returns the status line and the text.
    fn admin_page(&self, path: &str) -> (String, String) {
        let page = self.get_page("n", "127.0.0.1:7104", path);
        let (head, body) = page.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {page}"));
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    /// Gets a page of facts about services. An agent on a busy machine may not answer in time at first.
    fn facts(&self, path: &str) -> Value {
        let body = self.wait_status(path, " 200 ");
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    /// Waits until the page has a status with this code.
    fn wait_status(&self, path: &str, code: &str) -> String {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let (status, body) = self.admin_page(path);
            if status.contains(code) {
                return body;
            }
            assert!(Instant::now() < deadline, "{path}: {status} instead of {code}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the list of the Service in force has so many endpoints.
    fn wait_listed(&self, count: u64) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page("n", "127.0.0.1:7104", "/debug/services");
            let body = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
            let facts: Value = serde_json::from_str(body).unwrap_or_default();
            if facts["services"][0]["listed"] == count {
                return;
            }
            assert!(Instant::now() < deadline, "not {count}: {page}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn the_pages_about_services_agree_with_the_results_of_connects() {
    let (fixture, server) = start("pages", "all");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2", "10.77.0.9"]));
    // The second endpoint answers no connect: only the list is asked for.
    fixture.wait_listed(2);
    let services = fixture.facts("/debug/services");
    assert_eq!(services["node"]["zone"], "a");
    let plain = &services["services"][0];
    for (field, expected) in [
        ("namespace", json!("default")),
        ("name", json!("plain")),
        ("source", json!("service")),
        ("address", json!("10.96.0.9:80")),
        ("mode", json!("pods")),
        ("listed", json!(2)),
        ("known", json!(2)),
    ] {
        assert_eq!(plain[field], expected, "{field} of {plain}");
    }
    let trace = fixture.facts("/debug/trace?to=10.96.0.9:80");
    assert_eq!(trace["outcome"], "endpoint", "{trace}");
    assert_eq!(trace["candidates"][0]["address"], "10.77.0.2:8080", "{trace}");
    assert_eq!(trace["candidates"][0]["usage"]["isUnanswered"], false, "{trace}");

    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_listed(1);
    assert_eq!(fixture.connect_outcome(), "connected");
    server.set(endpoint_slice(&[]));
    fixture.wait_outcome("refused");
    let trace = fixture.facts("/debug/trace?to=10.96.0.9:80");
    assert_eq!(trace["outcome"], "refused", "{trace}");
    server.delete("Service", "plain");
    fixture.wait_outcome("unchanged");
    let trace = fixture.facts("/debug/trace?to=10.96.0.9:80");
    assert_eq!(trace["outcome"], "unchanged", "{trace}");
    assert_eq!(fixture.facts("/debug/services")["services"], json!([]));
    let (status, text) = fixture.admin_page("/debug/trace?to=plain:80");
    assert!(status.contains(" 400 ") && text.contains("IP address and port"), "{status}: {text}");
}

#[test]
fn metrics_show_frontends_endpoints_maps_and_the_latency_of_changes() {
    let mut fixture = AgentFixture::new("figures");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    let with_time = |addresses: &[&str]| {
        let mut slice = endpoint_slice(addresses);
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        slice["metadata"]["annotations"] =
            json!({"endpoints.kubernetes.io/last-change-trigger-time": now});
        slice
    };
    set_node(&server);
    server.set(service(None));
    server.set(with_time(&["10.77.0.2"]));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_services("all");
    fixture.wait_outcome("connected");
    let latencies = "rouse_agent_network_programming_seconds_count ";
    let (_, page) = fixture.admin_page("/metrics");
    assert_eq!(metric(&page, latencies), Some(0), "a first list tells no latency");
    for endpoints in [&["10.77.0.2", "10.77.0.3"][..], &["10.77.0.2"]] {
        server.set(with_time(endpoints));
        fixture.wait_listed(endpoints.len() as u64);
    }
    fixture.wait_metric(latencies.trim(), 2);
    let (_, page) = fixture.admin_page("/metrics");
    assert_eq!(metric(&page, latencies), Some(2));
    fixture.wait_metric("rouse_agent_frontends{source=\"service\",mode=\"pods\"}", 1);
    fixture.wait_metric("rouse_agent_endpoints{state=\"ready\"}", 1);
    // That of the Service, and that of the self-test.
    fixture.wait_metric("rouse_agent_map_entries{map=\"FRONTENDS\"}", 2);
    let (_, page) = fixture.admin_page("/metrics");
    let limit = |source: &str| {
        metric(&page, &format!("rouse_agent_map_limit{{map=\"SLOTS\",source=\"{source}\"}}"))
    };
    assert!(limit("service") < limit("route") && limit("service") > Some(0), "{page}");
}

/// kube-proxy's meaning: load balancers leave a node that is about to be deleted, and its agent stays alive.
#[test]
fn health_follows_the_node_and_not_the_api_server() {
    let (mut fixture, mut server) = start("health", "all");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    fixture.wait_status("/healthz", " 200 ");
    let mut node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "a"}},
        "spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]},
    });
    server.set(node.clone());
    let reason = fixture.wait_status("/healthz", " 503 ");
    assert!(reason.contains("ToBeDeletedByClusterAutoscaler"), "{reason}");
    assert!(fixture.admin_page("/livez").0.contains(" 200 "));
    node["spec"]["taints"] = json!([]);
    server.set(node.clone());
    fixture.wait_status("/healthz", " 200 ");
    node["metadata"]["deletionTimestamp"] = json!("2026-11-29T07:00:00Z");
    server.set(node.clone());
    fixture.wait_status("/healthz", " 503 ");
    set_node(&server);
    fixture.wait_status("/healthz", " 200 ");
    server.stop();
    // The watches notice a closed connection at once.
    assert_eq!(fixture.connect_outcome(), "connected");
    for path in ["/healthz", "/livez"] {
        assert!(fixture.admin_page(path).0.contains(" 200 "), "{path}");
    }
    // No event tells that the object went meanwhile: the next list lacks it.
    server.delete_silently("Node", "n1");
    server.resume(&format!("{}-n", fixture.name));
    fixture.kill_agent();
    fixture.start_agent_with_services("all");
    fixture.wait_without_not_ready_reason("clusterip:");
    let reason = fixture.wait_status("/healthz", " 503 ");
    assert!(reason.contains("its object is gone"), "{reason}");
}
