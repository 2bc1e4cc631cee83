//! Shell: the agent beside a kubelet: terminating pods, cgroups that come and go, pods of other nodes.

use nix::time::{ClockId, clock_gettime};

use super::*;

/// Time by the clock of the kernel's events and the agent's reports.
fn monotonic_now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has it").into()
}

#[test]
fn the_kubelet_waits_until_a_pod_has_answered_its_last_request() {
    let mut world = AgentFixture::new("stop");
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.start_agent();
    world.start_pod();
    let seen = world.wait_pod("looked into", |seen| !seen.not_ready_reason.is_empty());
    assert_eq!(
        seen.not_ready_reason, "nothing listens on port 8080 yet",
        "the agent's own port is no news"
    );
    world.send_to_pod("keep");
    world.send_to_pod("listen");
    world.wait_pod("ready", |seen| seen.ready);
    world.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", world.name)).expect("it exists");
    let request = node.run_inside("a request that lasts", || {
        let mut stream = TcpStream::connect(ADDRESS)?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")?;
        let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
        nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger)?;
        Ok(stream)
    });
    world.wait_usage("it has begun", |usage| usage.totals.started == 1);
    let refused = world.get_page("p", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH);
    assert!(refused.starts_with("HTTP/1.1 403"), "only the kubelet may ask: {refused}");
    let at_node = format!("{}-n", world.name);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| http_get(&at_node, POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH));
        world.wait_pod("the kubelet asks", |seen| !seen.ready);
        world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
        // By then an idle pod's kubelet would have its answer, even without a controller that drains the pod (3 s).
        let late = monotonic_now() + Duration::from_secs(5);
        world.wait_usage("the agent looks again by then", |it| {
            it.read_at_ns > late.as_nanos() as u64
        });
        assert!(!waiting.is_finished(), "a request is in flight");
        drop(request);
        let answer = waiting.join().expect("no panic");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    });
    assert!(
        world.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH).starts_with("HTTP/1.1 200"),
        "as for the next container"
    );
    let usage = world.wait_usage("ended", |usage| usage.totals.finished == 1);
    assert_eq!(usage.totals.started, 1, "questions are no requests");
}

#[test]
fn a_pod_that_leaves_is_stopped_with_its_tunnels_open() {
    let mut world = server::server_fixture("tunnels", Duration::from_secs(60));
    world.wait_pod("ready", |seen| seen.ready);
    let node = NetworkNamespace::open(format!("/run/netns/{}-n", world.name)).expect("it exists");
    let tunnel = node.run_inside("a tunnel", || {
        let mut stream = TcpStream::connect(ADDRESS)?;
        write!(stream, "GET /upgrade HTTP/1.1\r\nhost: hello\r\n{}\r\n", server::UPGRADE)?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"hello") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        Ok(stream)
    });
    let mut tunnel = tunnel.expect("a tunnel");
    world.wait_usage("it has begun", |usage| usage.totals.started == 1);
    world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    let seen = world.wait_pod("drained", |seen| seen.drained);
    assert_eq!(seen.in_flight, 1, "it still counts");
    assert!(
        world.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH).starts_with("HTTP/1.1 200"),
        "the kubelet may go on"
    );
    tunnel.write_all(b"more").expect("the application closes it, nothing else does");
    let usage = world.wait_usage("as before", |usage| usage.totals.started == 1);
    assert_eq!(usage.totals.finished, 0);
}

#[test]
fn without_an_agent_the_kubelet_is_refused_at_once_and_a_new_one_answers_again() {
    let mut world = AgentFixture::new("door");
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.start_agent();
    world.start_pod();
    world.send_to_pod("listen");
    world.wait_pod("ready", |seen| seen.ready);
    world.kill_agent();
    assert_eq!(world.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH), "");
    world.pods.clear();
    world.start_agent();
    world.wait_pod("ready again", |seen| seen.ready);
    // The RouteTable does not mark it as draining: the agent waits a little, then answers.
    assert!(
        world.get_page("n", POD_SERVER_ADDRESS, WAIT_FOR_DRAIN_PATH).starts_with("HTTP/1.1 200")
    );
}

#[test]
fn an_agent_that_runs_in_a_pod_finds_its_nodes_pods_by_itself() {
    let mut world = AgentFixture::with_pods_cgroup("find", "root/kubepods/burstable");
    // Cgroups of another node on the same machine.
    fs::create_dir_all(world.cgroup.join("other/kubepods")).expect("a cgroup");
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.start_agent_in_a_pod();
    world.start_pod();
    world.send_to_pod("listen");
    world.wait_pod("ready", |seen| seen.ready);
    let mut ready = world.get_page("n", "127.0.0.1:7104", "/readyz");
    while !ready.starts_with("HTTP/1.1 200") {
        thread::sleep(Duration::from_millis(50));
        ready = world.get_page("n", "127.0.0.1:7104", "/readyz");
    }
}

#[test]
fn the_pods_cgroup_is_waited_for_and_followed_when_it_is_recreated() {
    let mut world = AgentFixture::new("anew");
    remove_cgroup(&world.cgroup);
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.spawn_agent();
    let mut page = String::new();
    while !page.contains("does not exist yet") {
        page = world.get_page("n", "127.0.0.1:7104", "/readyz");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(page.starts_with("HTTP/1.1 503"), "{page}");
    for _ in 0..2 {
        fs::create_dir_all(world.cgroup.join("pods/poduid-1/main")).expect("a cgroup");
        world.start_pod();
        world.send_to_pod("listen");
        world.wait_pod("ready", |seen| seen.ready);
        let mut pod = world.pod.take().expect("started");
        pod.kill().expect("SIGKILL");
        pod.wait().expect("it ends");
        world.wait_pod("gone", |seen| !seen.ready);
        remove_cgroup(&world.cgroup);
    }
}

#[test]
fn a_pod_of_another_node_takes_connects_once_this_node_has_reached_it() {
    let mut world = AgentFixture::new("reach");
    world.add_direct_service();
    world.set_pod_on_node("n2", RoutingPhase::Ready, false);
    world.start_agent();
    world.start_pod();
    let pins = world.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let targets = || {
        let Ok(table) = KernelMaps::open(&pins).and_then(|maps| maps.read_routes()) else {
            return None;
        };
        Some(table.backends.len()).filter(|_| !table.frontends.is_empty())
    };
    while targets().is_none() {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(targets(), Some(0), "nobody listens there, as far as this node can tell");
    world.send_to_pod("listen");
    while targets() == Some(0) {
        thread::sleep(Duration::from_millis(10));
    }
    // A new agent continues with the known reachability, without an interruption.
    world.kill_agent();
    world.send_to_pod("close");
    world.start_agent();
    while !world.get_page("n", "127.0.0.1:7104", "/readyz").starts_with("HTTP/1.1 200") {
        assert_eq!(targets(), Some(1));
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(targets(), Some(1));
}
