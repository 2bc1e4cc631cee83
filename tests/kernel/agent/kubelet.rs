//! Shell: the agent beside a kubelet: terminating pods, cgroups that come and go, pods of other nodes.

use super::*;

/// ClusterIP of another service than that of the tests' pod.
const OTHER_CLUSTER_IP: &str = "10.96.0.8";
/// Address of the only pod of that service, in the node's own namespace.
const OTHER_POD_ADDRESS: &str = "10.77.0.1:8081";

/// Number of pods that connects are led to; `None` before the agent has written frontends.
pub(super) fn used_pod_count(pins: &Path) -> Option<usize> {
    let table = KernelMaps::open(pins).and_then(|maps| maps.read_routes()).ok()?;
    let pods = table.backends.values().filter(|it| it.port_be != 0);
    (!table.frontends.is_empty()).then(|| pods.count())
}

/// Number of connections that the listeners in the pod's namespace have accepted.
pub(super) fn accepted_connections(fixture: &AgentFixture) -> u64 {
    let pod = NetworkNamespace::open(format!("/run/netns/{}-p", fixture.name)).expect("it exists");
    let read = || fs::read_to_string("/proc/thread-self/net/snmp");
    let counters = pod.run_inside("read counters", read).expect("readable");
    let rows = counters.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let mut rows = rows.map(|row| row.split(' '));
    let (names, values) = (rows.next().expect("names"), rows.next().expect("values"));
    let mut named_values = names.zip(values);
    let (_, value) = named_values.find(|(name, _)| *name == "PassiveOpens").expect("it is there");
    value.parse().expect("a number")
}

/// Returns true once the pod's process listens. A connect would tell as well, but count as an accepted one.
fn is_listening(fixture: &AgentFixture) -> bool {
    let pod = NetworkNamespace::open(format!("/run/netns/{}-p", fixture.name)).expect("it exists");
    let read = || fs::read_to_string("/proc/thread-self/net/tcp");
    let sockets = pod.run_inside("list sockets", read).expect("readable");
    // Own address and port 8080, no peer, state LISTEN.
    sockets.contains(" 00000000:1F90 00000000:0000 0A ")
}

impl AgentFixture {
    /// Adds another service on the direct path, with a ready pod of another node.
    fn add_other_service(&self) {
        let name = NamespacedName::new("default", "other");
        let revision = NamespacedName::new("default", "other-00001");
        let service = ServiceEntry {
            addresses: vec![OTHER_CLUSTER_IP.parse().expect("an address")],
            activator_port: NonZeroU16::new(20_001).expect("not zero"),
            ..fixtures::service(&name, &revision)
        };
        let address = OTHER_POD_ADDRESS.parse().expect("an address");
        let pod = PodEntry {
            node: "n2".into(),
            ..fixtures::pod_at("uid-other", &revision, RoutingPhase::Ready, address)
        };
        let entry = fixtures::revision(&revision, "other");
        self.routes.set(RouteKey::Service(name), RouteChange::Service(service));
        self.routes.set(RouteKey::Revision(revision), RouteChange::Revision(entry));
        self.routes.set(RouteKey::Pod(pod.uid.clone()), RouteChange::Pod(pod.into()));
    }

    /// Connects to a ClusterIP from the pod's namespace, with any result.
    fn try_connect(&self, cluster_ip: &str) {
        let mut client = self.pod_command("connect");
        let ended = client.env(ROLE_INPUT_VARIABLE, cluster_ip).stdin(Stdio::null()).output();
        ended.expect("a client");
    }
}

#[test]
fn the_kubelet_waits_until_a_pod_has_answered_its_last_request() {
    let mut fixture = AgentFixture::new("stop");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    let pod = fixture.wait_pod("known to the agent", |pod| !pod.not_ready_reason.is_empty());
    assert_eq!(
        pod.not_ready_reason, "nothing listens on port 8080 yet",
        "the agent's own port is no news"
    );
    fixture.send_to_pod("keep");
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let request = node.run_inside("send a request", || {
        let mut stream = TcpStream::connect(POD_ADDRESS)?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")?;
        let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
        nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger)?;
        Ok(stream)
    });
    fixture.wait_usage("it has begun", |usage| usage.totals.started == 1);
    let hook_response = fixture.pod_server_page("p");
    assert!(hook_response.starts_with("HTTP/1.1 403"), "not from the kubelet: {hook_response}");
    let node_netns = format!("{}-n", fixture.name);
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| http_get(&node_netns, POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH));
        fixture.wait_pod("the kubelet's request", |pod| !pod.ready);
        fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
        // By then an idle pod's kubelet would have its response, even without a controller that drains the pod (3 s).
        fixture.wait_read_after(Duration::from_secs(5));
        assert!(!waiting.is_finished(), "a request is in flight");
        drop(request);
        let response = waiting.join().expect("no panic");
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    });
    assert!(
        fixture.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH).starts_with("HTTP/1.1 200"),
        "the hook of the pod's next container"
    );
    let usage = fixture.wait_usage("ended", |usage| usage.totals.finished == 1);
    assert_eq!(usage.totals.started, 1, "the kubelet's requests do not count");
}

#[test]
fn a_pod_that_leaves_is_stopped_with_its_tunnels_open() {
    let mut fixture = http_server::shared_server_fixture(REQUEST_TIMEOUT);
    fixture.wait_pod("ready", |pod| pod.ready);
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let tunnel = node.run_inside("open a tunnel", || {
        let mut stream = TcpStream::connect(POD_ADDRESS)?;
        write!(stream, "GET /upgrade HTTP/1.1\r\nhost: hello\r\n{}\r\n", http_server::UPGRADE)?;
        // Byte by byte, so that nothing of the tunnel is read beyond the application's greeting.
        let mut response = Vec::new();
        while !response.ends_with(b"hello") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            response.extend(byte);
        }
        Ok(stream)
    });
    let mut tunnel = tunnel.expect("a tunnel");
    fixture.wait_usage("it has begun", |usage| usage.totals.started == 1);
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    let pod = fixture.wait_pod("drained", |pod| pod.drained);
    assert_eq!(pod.in_flight, 1, "it still counts");
    assert!(
        fixture.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH).starts_with("HTTP/1.1 200"),
        "the kubelet may go on"
    );
    tunnel.write_all(b"more").expect("the application closes it, nothing else does");
    let usage = fixture.wait_usage("as before", |usage| usage.totals.started == 1);
    assert_eq!(usage.totals.finished, 0);
}

#[test]
fn without_an_agent_the_prestop_hook_is_refused_at_once_and_a_new_agent_answers_it() {
    let mut fixture = AgentFixture::new("door");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    fixture.kill_agent();
    assert_eq!(fixture.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH), "");
    fixture.pods.clear();
    fixture.start_agent();
    fixture.wait_pod("ready again", |pod| pod.ready);
    // The RouteTable does not mark it as draining: the agent waits a little, then responds.
    assert!(fixture.pod_server_page("n").starts_with("HTTP/1.1 200"));
}

#[test]
fn an_agent_that_runs_in_a_pod_finds_its_nodes_pods_by_itself() {
    let mut fixture = AgentFixture::with_pods_cgroup("find", "root/kubepods/burstable");
    // Cgroups of another node on the same machine.
    fs::create_dir_all(fixture.cgroup.join("other/kubepods")).expect("a cgroup");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent_in_a_pod();
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.wait_pod("ready", |pod| pod.ready);
    let mut ready = fixture.get_page("n", "127.0.0.1:7104", "/readyz");
    while !ready.starts_with("HTTP/1.1 200") {
        thread::sleep(Duration::from_millis(50));
        ready = fixture.get_page("n", "127.0.0.1:7104", "/readyz");
    }
}

#[test]
fn the_pods_cgroup_is_waited_for_and_followed_when_it_is_recreated() {
    let mut fixture = AgentFixture::new("anew");
    remove_cgroup(&fixture.cgroup);
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.spawn_agent();
    let mut page = String::new();
    while !page.contains("does not exist yet") {
        page = fixture.get_page("n", "127.0.0.1:7104", "/readyz");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(page.starts_with("HTTP/1.1 503"), "{page}");
    for _ in 0..2 {
        fs::create_dir_all(fixture.cgroup.join("pods/poduid-1/main")).expect("a cgroup");
        fixture.start_pod();
        fixture.send_to_pod("listen");
        fixture.wait_pod("ready", |pod| pod.ready);
        let mut pod = fixture.pod.take().expect("started");
        pod.kill().expect("SIGKILL");
        pod.wait().expect("it ends");
        fixture.wait_pod("gone", |pod| !pod.ready);
        remove_cgroup(&fixture.cgroup);
    }
}

#[test]
fn a_pod_of_another_node_takes_connects_once_this_node_has_reached_it() {
    let mut fixture = AgentFixture::new("reach");
    fixture.add_direct_service();
    fixture.add_other_service();
    // No process listens there, but connects to the services are led to it.
    let activator = fixtures::activator("activator", vec![[10, 77, 0, 2].into()]);
    let key = RouteKey::Activator(activator.name.clone());
    fixture.routes.set(key, RouteChange::Activator(activator));
    fixture.set_pod_on_node("n2", RoutingPhase::Ready);
    fixture.start_agent();
    fixture.start_pod();
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", fixture.name)).expect("it exists");
    let other_pod = node.run_inside("listen", || TcpListener::bind(OTHER_POD_ADDRESS));
    let _other_pod = other_pod.expect("a free port");
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let backend_count = || used_pod_count(&pins);
    while backend_count().is_none() {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(backend_count(), Some(0), "this node knows no listener there");
    let known_since = Instant::now();
    fixture.send_to_pod("listen");
    while !is_listening(&fixture) {
        thread::sleep(Duration::from_millis(1));
    }
    // One look at the clients answers for both pods: it probes the one that has a client, and not this one.
    fixture.try_connect(OTHER_CLUSTER_IP);
    while backend_count() == Some(0) {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(accepted_connections(&fixture), 0, "no client of this node needs the pod");
    fixture.try_connect("10.96.0.7");
    let is_early = known_since.elapsed() < Duration::from_secs(5);
    while backend_count() != Some(2) {
        thread::sleep(Duration::from_millis(10));
    }
    // From 10 s on the pod may be used without a probe.
    assert!(!is_early || accepted_connections(&fixture) > 0, "used without a probe");
    // A new agent continues with the known reachability, without an interruption.
    fixture.kill_agent();
    fixture.send_to_pod("close");
    fixture.start_agent();
    while !fixture.get_page("n", "127.0.0.1:7104", "/readyz").starts_with("HTTP/1.1 200") {
        assert_eq!(backend_count(), Some(2));
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(backend_count(), Some(2));
}

/// Without an activator, no connect to a service without a usable pod is recorded.
#[test]
fn without_activators_a_pod_of_another_node_is_probed_before_a_client_connects() {
    let mut fixture = AgentFixture::new("alone");
    fixture.add_direct_service();
    fixture.set_pod_on_node("n2", RoutingPhase::Ready);
    // Before the agent knows the pod, whose probes end after ten seconds.
    fixture.start_pod();
    fixture.send_to_pod("listen");
    while fixture.request_fails() {}
    let accepted = accepted_connections(&fixture);
    fixture.start_agent();
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    while used_pod_count(&pins) != Some(1) {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(accepted_connections(&fixture) > accepted, "used without a probe");
}
