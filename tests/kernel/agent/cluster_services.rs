//! Shell: Services of the cluster, which the agent watches itself, in the running kernel.

use std::{io, net::IpAddr};

use serde_json::{Value, json};

use super::{fake_watch_server::FakeWatchServer, *};

/// ClusterIP of the Service.
const CLUSTER_IP: &str = "10.96.0.9";

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

fn set_node(server: &FakeWatchServer) {
    let metadata = json!({"name": "n1", "labels": {"topology.kubernetes.io/zone": "a"}});
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
}

/// Result of a connect, as one word.
fn outcome(result: &io::Result<()>) -> &'static str {
    match result.as_ref().map_err(io::Error::kind) {
        Ok(()) => "connected",
        Err(ErrorKind::ConnectionRefused) => "refused",
        // No route leads to a ClusterIP here, as kube-proxy does not run.
        Err(ErrorKind::NetworkUnreachable) => "unchanged",
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
        let kubeconfig = self.folder.join("kubeconfig");
        fs::write(&kubeconfig, FakeWatchServer::kubeconfig().to_string()).expect("a file");
        let mut command = self.role_command("agent", "n");
        command.envs(self.agent_environment());
        command.env("ROUSE_CLIENTS_CGROUP", &self.cgroup);
        command.env("ROUSE_PODS_CGROUP", self.cgroup.join(self.pods_cgroup));
        command.env("KUBECONFIG", &kubeconfig).envs(settings.iter().copied());
        self.agent = Some(command.spawn().expect("nsenter"));
    }

    /// Connects to the Service from the pod, and returns the result as one word.
    fn connect_outcome(&self) -> String {
        let mut command =
            self.process_command("connect", &format!("{}/poduid-1/main", self.pods_cgroup));
        let output = command.env(SENDS_VARIABLE, CLUSTER_IP).stdin(Stdio::null()).output();
        let text = String::from_utf8_lossy(&output.expect("sh").stdout).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix("outcome: "));
        line.unwrap_or_else(|| panic!("no outcome: {text}")).to_owned()
    }

    /// Waits until `/readyz` names this reason, or the agent runs and does not name it.
    pub(super) fn wait_not_ready_reason(&self, reason: &str, is_expected: bool) {
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

    /// Connects until the outcome is as expected.
    fn wait_outcome(&self, expected: &str) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let outcome = self.connect_outcome();
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
    let address: IpAddr = env::var(SENDS_VARIABLE).expect("set").parse().expect("an address");
    let result = TcpStream::connect((address, 80)).map(drop);
    println!("outcome: {}", outcome(&result));
}

/// Starts a pod that listens, and an agent beside an API server with these objects.
fn start(test: &str, mode: &str, streams_lists: bool) -> (AgentFixture, FakeWatchServer) {
    let mut fixture = AgentFixture::new(test);
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name), streams_lists);
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_services(mode);
    (fixture, server)
}

#[test]
fn a_service_of_the_cluster_leads_to_its_endpoints_or_refuses() {
    for streams_lists in [true, false] {
        let test = if streams_lists { "streamed" } else { "listed" };
        let (fixture, server) = start(test, "all", streams_lists);
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
fn only_labelled_services_are_served_where_the_mode_says_so() {
    let (fixture, server) = start("labelled", "labelled", true);
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_not_ready_reason("programs:", false);
    fixture.wait_not_ready_reason("clusterip:", false);
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

/// kube-proxy in mode IPVS gives the node the ClusterIPs of all Services.
#[test]
fn an_address_that_kube_proxy_gave_the_node_is_no_reason_to_leave_its_service_alone() {
    let mut fixture = AgentFixture::new("ipvs");
    let netns = format!("{}-n", fixture.name);
    run_shell(&format!("ip -n {netns} link add kube-ipvs0 type bridge"));
    run_shell(&format!("ip -n {netns} address add {CLUSTER_IP}/32 dev kube-ipvs0"));
    let server = FakeWatchServer::start(&netns, true);
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
    let (mut fixture, mut server) = start("away", "all", true);
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let netns = format!("{}-n", fixture.name);
    server.stop();
    fixture.kill_agent();
    fixture.start_agent_with_services("all");
    fixture.wait_not_ready_reason("clusterip:", true);
    assert_eq!(fixture.connect_outcome(), "connected");
    server.delete_silently("Service", "plain");
    server.resume(&netns);
    fixture.wait_outcome("unchanged");
}
