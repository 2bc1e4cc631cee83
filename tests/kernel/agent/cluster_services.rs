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
    fn start_agent_with_services(&mut self, mode: &str) {
        let kubeconfig = self.folder.join("kubeconfig");
        fs::write(&kubeconfig, FakeWatchServer::kubeconfig().to_string()).expect("a file");
        let mut command = self.role_command("agent", "n");
        command.envs(self.agent_environment());
        command.env("ROUSE_CLIENTS_CGROUP", &self.cgroup);
        command.env("ROUSE_PODS_CGROUP", self.cgroup.join(self.pods_cgroup));
        command.env("KUBECONFIG", &kubeconfig).env("ROUSE_CLUSTERIP", mode);
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
    fn wait_not_ready_reason(&self, reason: &str, is_expected: bool) {
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

    /// Gets a page of facts about services.
    fn facts(&self, path: &str) -> Value {
        let (status, body) = self.admin_page(path);
        assert!(status.contains(" 200 "), "{path}: {status}: {body}");
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

/// What the pages say must be what a connect meets.
#[test]
fn the_pages_about_services_show_what_connects_meet() {
    let (fixture, server) = start("pages", "all", true);
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
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name), true);
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
    let (fixture, mut server) = start("health", "all", true);
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
}
