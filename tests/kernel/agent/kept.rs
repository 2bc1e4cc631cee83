//! Shell: persistent connections to a draining pod: idle ones are closed at the client's side, used ones are not.

use std::io::Lines;
use std::process::ChildStdout;

use super::*;

/// Beginning of the metrics line that counts connections found to be in use.
const SPARED_METRIC: &str = "rouse_agent_connections_spared_total";

/// Process of a client, and its output.
struct ClientProcess {
    process: Child,
    lines: Lines<std::io::BufReader<ChildStdout>>,
}

impl ClientProcess {
    /// Next line of the client about its connection.
    fn next_event(&mut self) -> String {
        let ours = |line: &String| {
            ["connected", "read: ", "ended: "].iter().any(|it| line.starts_with(it))
        };
        self.lines.find_map(|line| line.ok().filter(ours)).expect("the client speaks")
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a pod that keeps accepted connections and sends nothing by itself, and a client that has sent `sends`.
fn idle_client_fixture(test: &str, sends: &str) -> (AgentFixture, ClientProcess) {
    let mut world = AgentFixture::new(test);
    fs::create_dir(world.cgroup.join("clients")).expect("a cgroup");
    world.set_pod(RoutingPhase::Ready, ProbeHandler::Listen);
    world.add_direct_service();
    world.start_agent();
    world.start_pod();
    // Sockets that listen from now on are seen by the eBPF programs, which follow their connections.
    world.wait_pod("looked into", |seen| !seen.not_ready_reason.is_empty());
    world.send_to_pod("keep");
    world.send_to_pod("listen");
    world.wait_pod("ready", |seen| seen.ready);
    let mut command = world.process_command("client", "clients");
    let mut process = command.env(SENDS_VARIABLE, sends).spawn().expect("sh");
    let said = std::io::BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut client = ClientProcess { process, lines: said };
    assert_eq!(client.next_event(), "connected");
    (world, client)
}

#[test]
fn an_idle_connection_to_a_draining_pod_is_ended_at_the_clients_side() {
    let (mut world, mut client) = idle_client_fixture("kept", "");
    world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    world.wait_pod("drained", |seen| seen.drained);
}

/// Scene with a request in flight and the first half of its response sent: the client's side alone looks idle.
fn paused_response_fixture(test: &str) -> (AgentFixture, ClientProcess) {
    let (mut world, mut client) =
        idle_client_fixture(test, "GET / HTTP/1.1\r\nhost: hello\r\n\r\n");
    world.wait_usage("it has begun", |usage| usage.totals.started == 1);
    world.send_to_pod("say HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\nok");
    assert!(client.next_event().ends_with("ok"), "the first half has come");
    (world, client)
}

/// Adds (`add`) a blackhole route from the pod to its node, or removes it (`del`).
fn change_blackhole_route(world: &AgentFixture, verb: &str) {
    let pod = format!("{}-p", world.name);
    let words = ["-n", &pod, "route", verb, "blackhole", "10.77.0.1/32"];
    assert!(Command::new("ip").args(words).status().expect("iproute2").success());
}

/// Blocks the agent's query, like a policy that blocks nodes at the port, or a node too busy to answer in time.
#[test]
fn a_response_that_pauses_is_not_cut_where_the_pod_cannot_be_asked() {
    let (mut world, mut client) = paused_response_fixture("mute");
    change_blackhole_route(&world, "add");
    world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    // Each query waits for half a second, so the client's side has looked idle for more than one second.
    world.wait_metric(SPARED_METRIC, 4);
    world.send_to_pod("say ay");
    assert_eq!(client.next_event(), "read: ay");
    change_blackhole_route(&world, "del");
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    world.wait_pod("drained", |seen| seen.drained);
}

#[test]
fn a_response_that_pauses_is_not_cut_and_its_connection_ended_after_it() {
    let (mut world, mut client) = paused_response_fixture("paused");
    world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    world.wait_metric(SPARED_METRIC, 2);
    world.send_to_pod("say ay");
    assert_eq!(client.next_event(), "read: ay");
    assert_eq!(client.next_event(), "ended: Err(ConnectionAborted)");
    world.wait_pod("drained", |seen| seen.drained);
}

#[test]
fn an_upgraded_connection_is_left_to_its_owners() {
    let upgrade = "GET / HTTP/1.1\r\nhost: hello\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n";
    let (mut world, mut client) = idle_client_fixture("upgraded", upgrade);
    world.wait_usage("it has begun", |usage| usage.totals.started == 1);
    world.send_to_pod("say HTTP/1.1 101 Switching Protocols\\r\\nconnection: upgrade\\r\\nupgrade: chat\\r\\n\\r\\n");
    assert!(client.next_event().starts_with("read: HTTP/1.1 101"));
    world.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    world.wait_metric(SPARED_METRIC, 2);
    world.send_to_pod("say hello");
    assert_eq!(client.next_event(), "read: hello");
    world.send_to_pod("drop");
    assert_eq!(
        client.next_event(),
        "ended: Err(ConnectionReset)",
        "by the pod, which has not read a thing"
    );
    world.wait_pod("drained", |seen| seen.drained);
}
