//! Shell: a pod with a standby order, which the agent freezes while nothing uses it, and thaws for any use.

use serde_json::{Value, json};

use super::{
    http_server::{send_and_measure, server_fixture},
    kubelet::{accepted_connections, used_pod_count},
    shared_agent::SharedAgentFixture,
    *,
};

/// Order by which a pod is frozen again as soon as nothing uses it.
const QUICK_ORDER: StandbyOrder = StandbyOrder {
    quiet_time: Duration::from_millis(1),
    probe_time: Duration::from_millis(1),
    reclaims_memory: false,
    agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
};
/// Order by which a pod that was thawed for a request or a probe runs until the end of the test.
const LASTING_ORDER: StandbyOrder = StandbyOrder {
    quiet_time: Duration::from_secs(600),
    probe_time: Duration::from_secs(600),
    reclaims_memory: false,
    agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
};
/// Longest pause between two requests of a client at first, in ms. A freeze and its checks take some 30 ms, so requests
/// come at each moment of them.
const PAUSE_MAX_MS: u64 = 200;
/// Beginning of the metrics line that counts the thaws by an event.
const THAWS_BY_EVENT: &str = "rouse_agent_thaw_seconds_count";

/// Beginning of the metrics line that counts the thaws with this cause.
fn thaws(cause: &str) -> String {
    format!("rouse_agent_thaws_total{{cause=\"{cause}\"}}")
}

/// Connects to the pod from the node's namespace of a fixture.
fn connect_from_node(node: &str) -> TcpStream {
    let namespace = NetworkNamespace::open(Path::new("/run/netns").join(node)).expect("it exists");
    let stream = namespace.run_inside("connect", || TcpStream::connect(POD_ADDRESS));
    let stream = stream.expect("a frozen pod accepts connections too");
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a socket");
    stream.set_nodelay(true).expect("a socket");
    stream
}

/// Sends a request over a new connection to a frozen pod, in whose kernel it waits.
fn send_waiting_request(node: &str) -> TcpStream {
    let mut stream = connect_from_node(node);
    stream.write_all(b"GET /quick HTTP/1.1\r\nHost: a\r\n\r\n").expect("an open connection");
    stream
}

/// Waits for the response to a waiting request, which shows that the pod was thawed. The pod may be frozen again by then.
fn assert_answered(stream: &mut TcpStream) {
    let mut status = [0; 15];
    stream.read_exact(&mut status).expect("a response");
    assert_eq!(&status, b"HTTP/1.1 200 OK");
}

/// Accepts a connection that was led to an activator. Its connect may have returned a moment before it can be accepted.
fn accept_led(activator: &TcpListener) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while let Err(error) = activator.accept() {
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(Instant::now() < deadline, "no connect was led to the activator");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sends requests with pauses of up to `pause_max_ms`, in which the pod may freeze. All go over one connection if
/// `is_kept`, and otherwise each over its own.
fn send_with_pauses(node: &str, requests: u64, is_kept: bool, pause_max_ms: u64, mut seed: u64) {
    let mut kept = is_kept.then(|| connect_from_node(node));
    for _ in 0..requests {
        // Numbers without a pattern (xorshift), which are the same in each run.
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        thread::sleep(Duration::from_millis(seed % pause_max_ms));
        match &mut kept {
            Some(stream) => send_and_measure(stream, "/quick"),
            None => send_and_measure(&mut connect_from_node(node), "/quick"),
        };
    }
}

/// Starts a pod with the server and this order on the shared node, and waits until it is frozen.
fn frozen_fixture(order: StandbyOrder) -> SharedAgentFixture {
    let mut fixture = SharedAgentFixture::new();
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.start_server();
    fixture.order_standby(Some(order));
    fixture.wait_standby(true);
    fixture
}

impl AgentFixture {
    fn node_namespace(&self) -> String {
        format!("{}-n", self.name)
    }

    /// Orders the pod, which is ready, to be frozen while nothing uses it, or withdraws the order.
    fn order_standby(&mut self, order: Option<StandbyOrder>) {
        self.standby = order;
        self.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    }

    /// Waits until the agent reports the pod with an order, as frozen or as running. Fails if it reports a failure.
    fn wait_standby(&mut self, is_frozen: bool) {
        let is_reported = |pod: &PodObservation| {
            pod.standby.as_ref().is_some_and(|standby| standby.is_frozen == is_frozen)
        };
        let pod = self.wait_pod(if is_frozen { "frozen" } else { "thawed" }, is_reported);
        let standby = pod.standby.expect("it has an order");
        assert_eq!(standby.failure, "");
    }

    fn is_cgroup_frozen(&self) -> bool {
        let events = fs::read_to_string(self.pod_cgroup().join("cgroup.events"));
        events.expect("it exists").contains("frozen 1")
    }

    fn wait_cgroup(&self, is_frozen: bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self.is_cgroup_frozen() != is_frozen {
            assert!(Instant::now() < deadline, "its cgroup is never frozen = {is_frozen}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Number of thaws for a packet. A new connection of the node counts as a probe if the agent reads the pod's usage
    /// before the request has come.
    fn packet_thaws(&self) -> u64 {
        self.metric_count(&thaws("request")) + self.metric_count(&thaws("probe"))
    }

    /// Waits until `read` returns at least this number of thaws.
    fn wait_thaws(&self, count: u64, read: impl Fn(&Self) -> u64) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while read(self) < count {
            assert!(Instant::now() < deadline, "{} of {count} thaws", read(self));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the metric that begins with `line`, once it has not changed for a second of the agent.
    fn steady_metric(&mut self, line: &str) -> u64 {
        let (mut last, deadline) = (self.metric_count(line), Instant::now() + WAIT_TIMEOUT);
        loop {
            self.wait_read_after(Duration::from_secs(1));
            let now = self.metric_count(line);
            if now == last {
                return now;
            }
            assert!(Instant::now() < deadline, "{line} always grows: {now}");
            last = now;
        }
    }

    /// Returns the pod's entry on the agent's page about standby; null if it has none.
    fn standby_page_entry(&self, uid: &str) -> Value {
        let get_page = || self.get_page("n", "127.0.0.1:7104", "/debug/standby");
        let (mut page, deadline) = (get_page(), Instant::now() + WAIT_TIMEOUT);
        // An agent on a busy machine may not answer in time at first.
        while page.starts_with("HTTP/1.1 503") && Instant::now() < deadline {
            page = get_page();
        }
        let body = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let facts: Value =
            serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {page}"));
        let mut pods = facts["pods"].as_array().into_iter().flatten();
        pods.find(|it| it["uid"] == uid).cloned().unwrap_or_default()
    }

    /// Puts an activator into the RouteTable. Returns its listener for the port of the service.
    fn add_activator(&self) -> TcpListener {
        let namespace = Path::new("/run/netns").join(self.node_namespace());
        let namespace = NetworkNamespace::open(namespace).expect("it exists");
        let listen = || TcpListener::bind("10.77.0.1:20000");
        let listener = namespace.run_inside("listen", listen).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let activator = fixtures::activator("activator", vec![[10, 77, 0, 1].into()]);
        let key = RouteKey::Activator(activator.name.clone());
        self.routes.set(key, RouteChange::Activator(activator));
        listener
    }

    /// Connects to the service from a process that is in no pod, and closes the connection.
    fn connect_to_service(&self) {
        let cgroup = self.cgroup.join("host");
        fs::create_dir_all(&cgroup).expect("a cgroup");
        let mut client = self.process_command("connect", &cgroup);
        let client = client.env(ROLE_INPUT_VARIABLE, "10.96.0.7").stdin(Stdio::null()).output();
        let output = String::from_utf8(client.expect("a client").stdout).expect("text");
        assert!(output.contains("outcome: connected"), "{output}");
    }

    /// Waits until connects are led to this number of pods.
    fn wait_used_pods(&self, count: usize) {
        let pins = self.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while used_pod_count(&pins) != Some(count) {
            assert!(Instant::now() < deadline, "never {count} but {:?}", used_pod_count(&pins));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the pod's listeners have accepted this number of connections, and no more. A connect may return a
    /// moment before: the kernel handles the client's last packet of the handshake later on a busy machine.
    fn wait_accepted(&self, count: u64) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while accepted_connections(self) < count && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(accepted_connections(self), count);
    }

    fn standby_request(&self) {
        send_and_measure(&mut connect_from_node(&self.node_namespace()), "/quick");
    }
}

#[test]
fn a_pod_with_an_order_freezes_and_each_request_thaws_it() {
    const ROUNDS: u64 = 50;
    let mut fixture = frozen_fixture(QUICK_ORDER);
    let by_other = thaws("other");
    let all = |it: &AgentFixture| it.packet_thaws() + it.metric_count(&by_other);
    let (all_before, others_before) = (all(&fixture), fixture.metric_count(&by_other));
    let requests_before = fixture.metric_count(&thaws("request"));
    let events_before = fixture.metric_count(THAWS_BY_EVENT);
    // A connection from before each freeze and new ones thaw the pod in turn.
    let mut kept = connect_from_node(&fixture.node_namespace());
    for round in 0..ROUNDS {
        fixture.wait_cgroup(true);
        if round % 2 == 0 {
            send_and_measure(&mut kept, "/quick");
        } else {
            fixture.standby_request();
        }
    }
    fixture.wait_thaws(all_before + ROUNDS, all);
    // An agent that was held up thaws a pod whose usage it has not read for two seconds.
    let others = fixture.metric_count(&by_other) - others_before;
    assert!(others < ROUNDS / 4, "{others} thaws without a packet");
    // Those on the connection from before, at least.
    let requests = fixture.metric_count(&thaws("request")) - requests_before;
    assert!(requests + others >= ROUNDS / 2, "{requests} thaws for a request");
    let usage = fixture.wait_usage("all of them", |usage| usage.totals.finished == ROUNDS);
    assert_eq!(usage.totals.started, ROUNDS);
    // An agent that was held up may read the pod's usage before the event.
    let observed = fixture.metric_count(THAWS_BY_EVENT) - events_before;
    assert!(observed + others >= ROUNDS / 2, "{observed} thaws by an event");
}

/// Requests come at any moment of a freeze: none is lost, and each is counted once.
#[test]
fn no_request_is_lost_however_it_meets_a_freeze() {
    /// Requests of each client in a batch, and number of batches.
    const REQUESTS: u64 = 50;
    const LEAST_BATCHES: u64 = 4;
    const MOST_BATCHES: u64 = 10;
    const LEAST_THAWS: u64 = 20;
    let mut fixture = frozen_fixture(QUICK_ORDER);
    let before = fixture.packet_thaws();
    let node = fixture.node_namespace();
    let (mut batches, mut pause_max_ms) = (0, PAUSE_MAX_MS);
    while batches < LEAST_BATCHES
        || (batches < MOST_BATCHES && fixture.packet_thaws() < before + LEAST_THAWS)
    {
        // On a busy machine a freeze takes longer than the pauses.
        if batches >= LEAST_BATCHES {
            pause_max_ms *= 2;
        }
        thread::scope(|scope| {
            scope.spawn(|| send_with_pauses(&node, REQUESTS, true, pause_max_ms, 7 + batches));
            scope.spawn(|| send_with_pauses(&node, REQUESTS, false, pause_max_ms, 71 + batches));
        });
        batches += 1;
    }
    let sent = 2 * REQUESTS * batches;
    let usage = fixture.wait_usage("all of them", |it| it.totals.finished == sent);
    assert_eq!(usage.totals.started, sent);
    fixture.wait_standby(true);
    let thawed = fixture.packet_thaws() - before;
    assert!(thawed >= LEAST_THAWS, "{thawed} thaws: the requests met too few freezes");
}

#[test]
fn a_withdrawn_order_and_a_drain_thaw_the_pod() {
    let mut fixture = frozen_fixture(LASTING_ORDER);
    fixture.wait_cgroup(true);
    fixture.order_standby(None);
    fixture.wait_pod("without an order", |pod| pod.standby.is_none());
    fixture.wait_cgroup(false);
    // A new order is a new decision, so the pod freezes without the pause that follows a thaw.
    fixture.order_standby(Some(LASTING_ORDER));
    fixture.wait_standby(true);
    fixture.wait_cgroup(true);
    let by_kubelet = thaws("kubelet");
    let before = fixture.metric_count(&by_kubelet);
    fixture.standby = None;
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    fixture.wait_cgroup(false);
    fixture.wait_metric(&by_kubelet, before + 1);
    fixture.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    fixture.wait_pod("ready again", |pod| pod.ready && !pod.drained);
}

#[test]
fn the_page_about_standby_shows_a_pod_while_it_has_an_order() {
    let mut fixture = frozen_fixture(LASTING_ORDER);
    let uid = fixture.pod_uid();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let mut entry = fixture.standby_page_entry(&uid);
    while entry["isFrozen"] != true && Instant::now() < deadline {
        entry = fixture.standby_page_entry(&uid);
    }
    assert_eq!((&entry["isFrozen"], &entry["failure"]), (&json!(true), &json!("")), "{entry}");
    fixture.standby_request();
    fixture.wait_standby(false);
    let entry = fixture.standby_page_entry(&uid);
    assert_eq!(entry["isFrozen"], false, "{entry}");
    fixture.order_standby(None);
    fixture.wait_pod("without an order", |pod| pod.standby.is_none());
    assert_eq!(fixture.standby_page_entry(&uid), Value::Null);
}

#[test]
fn a_prestop_request_thaws_the_pod_for_its_end() {
    let mut fixture = server_fixture("standby-stop", REQUEST_TIMEOUT);
    fixture.order_standby(Some(LASTING_ORDER));
    fixture.wait_standby(true);
    let node = fixture.node_namespace();
    thread::scope(|scope| {
        let hook = scope.spawn(|| http_get(&node, POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH));
        fixture.wait_pod("the kubelet's request", |pod| !pod.ready);
        fixture.wait_cgroup(false);
        fixture.standby = None;
        fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
        assert!(hook.join().expect("it ends").starts_with("HTTP/1.1 200"));
    });
    assert!(!fixture.is_cgroup_frozen(), "a pod that ends is not frozen again");
}

/// Like a connection of `kubectl port-forward`, one between programs of the pod's namespace counts at no port.
#[test]
fn a_connection_that_does_not_count_thaws_the_pod_while_it_is_open() {
    let mut fixture = frozen_fixture(QUICK_ORDER);
    let by_probe = thaws("probe");
    let before = fixture.metric_count(&by_probe);
    fixture.wait_cgroup(true);
    let pod = NetworkNamespace::open(format!("/run/netns/{}-p", fixture.name)).expect("it exists");
    let stream = pod.run_inside("connect", || TcpStream::connect("127.0.0.1:8080"));
    let mut stream = stream.expect("a frozen pod accepts connections too");
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a socket");
    send_and_measure(&mut stream, "/quick");
    fixture.wait_metric(&by_probe, before + 1);
    fixture.wait_standby(false);
    // Meanwhile the agent reads what uses the pod once a second: the connection is still open.
    fixture.wait_read_after(Duration::from_secs(3));
    assert!(!fixture.is_cgroup_frozen());
    send_and_measure(&mut stream, "/quick");
    assert_eq!(fixture.metric_count(&by_probe), before + 1);
    drop(stream);
    fixture.wait_standby(true);
    let usage = fixture.wait_usage("none of it", |usage| usage.totals.in_flight() == 0);
    assert_eq!(usage.totals.started, 0);
}

#[test]
fn a_process_that_enters_a_frozen_pod_thaws_it() {
    let mut fixture = frozen_fixture(LASTING_ORDER);
    let by_other = thaws("other");
    let before = fixture.metric_count(&by_other);
    let procs = fixture.pod_cgroup().join("main/cgroup.procs");
    let script = format!("echo $$ > {} && echo entered && exec sleep 600", procs.display());
    let mut session = Command::new("nsenter");
    // As the runtime does for `kubectl exec`: the process enters the namespace and the container's cgroup.
    session.arg(format!("--net=/run/netns/{}-p", fixture.name)).args(["sh", "-c", &script]);
    let mut session = session.stdout(Stdio::piped()).spawn().expect("nsenter");
    let mut entered = String::new();
    let stdout = session.stdout.take().expect("a pipe");
    std::io::BufReader::new(stdout).read_line(&mut entered).expect("it runs after the thaw");
    assert_eq!(entered, "entered\n");
    fixture.wait_metric(&by_other, before + 1);
    fixture.wait_standby(false);
    session.kill().expect("it runs");
    session.wait().expect("it ends");
}

#[test]
fn a_pod_that_another_program_thaws_is_reported_as_running() {
    let mut fixture = frozen_fixture(LASTING_ORDER);
    fs::write(fixture.pod_cgroup().join("cgroup.freeze"), "0").expect("writable");
    fixture.wait_standby(false);
    fixture.standby_request();
}

/// Connections and requests wait in the kernel until the next agent has started.
#[test]
fn the_next_agent_thaws_the_pods_of_one_that_was_killed() {
    let mut fixture = server_fixture("standby-kill", REQUEST_TIMEOUT);
    fixture.order_standby(Some(LASTING_ORDER));
    fixture.wait_standby(true);
    fixture.kill_agent();
    let mut waiting = send_waiting_request(&fixture.node_namespace());
    assert!(fixture.is_cgroup_frozen(), "nothing has thawed it");
    fixture.pods.clear();
    fixture.start_agent();
    assert_answered(&mut waiting);
    // The order is still in the RouteTable, and nothing uses the pod any more.
    drop(waiting);
    fixture.wait_standby(true);
    fixture.standby_request();
}

#[test]
fn the_agents_own_probes_leave_a_frozen_pod_alone() {
    let mut fixture = SharedAgentFixture::new();
    let period = Duration::from_millis(50);
    fixture.set_probed_pod(RoutingPhase::Ready, ProbeHandler::Tcp, period);
    fixture.start_server();
    fixture.standby = Some(QUICK_ORDER);
    fixture.set_probed_pod(RoutingPhase::Ready, ProbeHandler::Tcp, period);
    fixture.wait_standby(true);
    let before = fixture.metric_count(&thaws("probe"));
    // An agent that was held up thaws the pod, which is probed then: tried again, at most five times.
    let is_left_alone = (0..5).any(|_| {
        fixture.wait_cgroup(true);
        let by_other = fixture.metric_count(&thaws("other"));
        // The result of a probe from before the freeze may come late.
        let passed = fixture.steady_metric(PROBES_PASSED);
        // By then the agent would have made many probes, as the period is short.
        fixture.wait_read_after(Duration::from_secs(2));
        let passed_now = fixture.metric_count(PROBES_PASSED);
        let is_frozen = fixture.metric_count(&thaws("other")) == by_other;
        assert!(!is_frozen || passed_now == passed, "{passed}, then {passed_now}");
        is_frozen
    });
    assert!(is_left_alone, "the pod was thawed each time");
    assert_eq!(fixture.metric_count(&thaws("probe")), before);
    fixture.wait_pod("frozen and ready as before", |pod| {
        pod.ready && pod.standby.as_ref().is_some_and(|standby| standby.is_frozen)
    });
}

/// A sender asks if it sees no sign of the pod. The event of its request may have been lost.
#[test]
fn a_query_if_a_frozen_pod_runs_thaws_it() {
    let mut fixture = frozen_fixture(LASTING_ORDER);
    fixture.wait_cgroup(true);
    let page = fixture.get_page("n", POD_SERVER_ADDRESS, "/running");
    assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("running\n"), "{page}");
    assert!(!fixture.is_cgroup_frozen());
    fixture.wait_standby(false);
}

/// No agent runs on the pod's node, and the controller states nothing.
#[test]
fn a_frozen_pod_of_another_node_that_left_a_connect_unanswered_is_passed_over() {
    let mut fixture = AgentFixture::new("standby-away");
    let activator = fixture.add_activator();
    fixture.add_direct_service();
    fixture.standby = Some(LASTING_ORDER);
    fixture.set_pod_on_node("n2", RoutingPhase::Ready);
    // So that no probe of this node is needed first.
    let key = RouteKey::Pod(fixture.pod_uid());
    let Some(RouteChange::Pod(mut pod)) = fixture.routes.get(&key) else { panic!("set above") };
    pod.kubelet_ready = true;
    fixture.routes.set(key, RouteChange::Pod(pod));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    while fixture.request_fails() {}
    fixture.start_agent();
    // By then it has thawed what it found below its cgroup.
    fixture.wait_used_pods(1);
    agent::kernel::freezer::freeze(&fixture.pod_cgroup()).expect("writable");
    fixture.wait_cgroup(true);
    let before = accepted_connections(&fixture);
    fixture.connect_to_service();
    fixture.wait_accepted(before + 1);
    fixture.wait_used_pods(0);
    fixture.wait_metric("rouse_agent_pods_passed_over", 1);
    let refused = activator.accept().expect_err("no connect was led there").kind();
    assert_eq!(refused, ErrorKind::WouldBlock);
    fixture.connect_to_service();
    accept_led(&activator);
    assert_eq!(accepted_connections(&fixture), before + 1);
    // The controller states that the pod runs.
    fixture.standby = None;
    fixture.set_pod_on_node("n2", RoutingPhase::Ready);
    fixture.wait_used_pods(1);
    agent::kernel::freezer::thaw(&fixture.pod_cgroup()).expect("writable");
}

/// An agent that is only late thaws the pod in a moment, and nothing else could take the connect.
#[test]
fn connects_go_to_the_frozen_pod_of_a_killed_agent_while_there_is_no_activator() {
    let mut fixture = server_fixture("standby-alone", REQUEST_TIMEOUT);
    fixture.add_direct_service();
    fixture.order_standby(Some(LASTING_ORDER));
    fixture.wait_standby(true);
    fixture.wait_used_pods(1);
    fixture.kill_agent();
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let maps = KernelMaps::open(&pins).expect("pinned");
    assert_eq!(maps.control_word(abi::CONTROL_THAWS_UNTIL), 0, "the promise has no end");
    let before = accepted_connections(&fixture);
    fixture.connect_to_service();
    fixture.wait_accepted(before + 1);
    let mut waiting = send_waiting_request(&fixture.node_namespace());
    assert!(fixture.is_cgroup_frozen(), "nothing has thawed it");
    fixture.pods.clear();
    fixture.start_agent();
    assert_answered(&mut waiting);
}

#[test]
fn connects_pass_over_the_frozen_pod_of_a_killed_agent_until_the_next_one_runs() {
    let mut fixture = server_fixture("standby-gone", REQUEST_TIMEOUT);
    let activator = fixture.add_activator();
    fixture.add_direct_service();
    fixture.order_standby(Some(LASTING_ORDER));
    fixture.wait_standby(true);
    fixture.wait_used_pods(1);
    fixture.kill_agent();
    // Until the promise is over, connects still go to the frozen pod, where they wait.
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while activator.accept().is_err() {
        assert!(Instant::now() < deadline, "no connect is led to the activator");
        fixture.connect_to_service();
    }
    let mut waiting = send_waiting_request(&fixture.node_namespace());
    assert!(fixture.is_cgroup_frozen(), "nothing has thawed it");
    fixture.pods.clear();
    fixture.start_agent();
    assert_answered(&mut waiting);
    // The pod is thawed before the new agent has renewed the promise, so connects may go to the activator for a while.
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let pod_takes_connect = || {
        let before = accepted_connections(&fixture);
        fixture.connect_to_service();
        accepted_connections(&fixture) > before
    };
    while !pod_takes_connect() {
        assert!(Instant::now() < deadline, "no connect is led to the pod");
        // With a full queue, the next connect to the activator would wait for a place.
        while activator.accept().is_ok() {}
    }
}
