//! Shell: TCP connections whose endpoint has left its Service of the cluster, in the running kernel.

use aya::maps::{Array, HashMap, Map, MapData};

use super::*;

/// Last line of a process whose connection was ended.
const ENDED: &str = "ended: Err(ConnectionAborted)";
/// Beginning of the metrics line that counts such connections.
const ENDED_METRIC: &str = "rouse_agent_tcp_sockets_ended_total";

/// Returns an EndpointSlice of the Service for one of its ports.
fn port_slice(port: &str, addresses: &[&str]) -> Value {
    let mut slice = endpoint_slice(addresses);
    slice["metadata"]["name"] = format!("plain-{port}").into();
    slice["ports"] = json!([{"name": port, "port": 8080, "protocol": "TCP"}]);
    slice
}

#[test]
fn connections_in_use_and_idle_ones_are_ended_once_their_endpoint_has_left() {
    let (mut fixture, server) = start("tcp", "all");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let cluster_ip = format!("{CLUSTER_IP}:80");
    // A pod, and a process of the node itself, in whose namespace the agent is.
    let clients = [("connection", "p"), ("request", "p"), ("connection", "n"), ("request", "n")];
    let led = clients.map(|(role, namespace)| fixture.hold(role, namespace, &cluster_ip));
    let mut direct = fixture.hold("request", "p", POD_ADDRESS);
    server.set(endpoint_slice(&["10.77.0.9"]));
    for mut socket in led {
        assert_eq!(socket.wait_line("ended"), ENDED);
    }
    fixture.wait_metric(ENDED_METRIC, 4);
    assert!(direct.is_running(), "it asked for the endpoint itself");
}

#[test]
fn a_connection_whose_endpoint_has_left_while_no_agent_ran_is_ended_by_the_next_one() {
    let (mut fixture, server) = start("tcpagain", "all");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let mut socket = fixture.hold("request", "p", &format!("{CLUSTER_IP}:80"));
    fixture.kill_agent();
    server.set(endpoint_slice(&["10.77.0.9"]));
    fixture.start_agent_with_services("all");
    assert_eq!(socket.wait_line("ended"), ENDED);
}

#[test]
fn a_connection_to_an_endpoint_that_terminates_is_left_until_no_slice_names_it() {
    let (mut fixture, server) = start("tcpdrain", "all");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(dns_service());
    server.set(port_slice("dns-tcp", &["10.77.0.2"]));
    server.set(port_slice("http", &["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let mut left = fixture.hold("request", "p", &format!("{CLUSTER_IP}:80"));
    let mut other = fixture.hold("request", "p", &format!("{CLUSTER_IP}:53"));
    let mut terminating = port_slice("http", &["10.77.0.2", "10.77.0.9"]);
    let conditions = json!({"ready": false, "serving": false, "terminating": true});
    terminating["endpoints"][0]["conditions"] = conditions;
    server.set(terminating);
    // The rounds that end this one have seen the first one too.
    server.set(port_slice("dns-tcp", &["10.77.0.9"]));
    assert_eq!(other.wait_line("ended"), ENDED);
    assert!(left.is_running(), "its endpoint terminates");
    server.set(port_slice("http", &["10.77.0.9"]));
    assert_eq!(left.wait_line("ended"), ENDED);
}

#[test]
fn a_connection_without_another_endpoint_is_ended_once_there_is_one() {
    let (mut fixture, server) = start("tcpalone", "all");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let mut socket = fixture.hold("request", "p", &format!("{CLUSTER_IP}:80"));
    server.set(endpoint_slice(&[]));
    fixture.wait_outcome("refused");
    assert!(socket.is_running(), "its program could only be refused");
    server.set(endpoint_slice(&["10.77.0.9"]));
    assert_eq!(socket.wait_line("ended"), ENDED);
}

/// Marks each row as taken, so that sockets have their records in socket storage.
fn fill_rows(fixture: &AgentFixture) {
    let claims = Map::Array(pinned_map(fixture, abi::maps::CLAIMS));
    let mut claims: Array<MapData, u64> = claims.try_into().expect("words");
    for row in 0..abi::CLIENTS_MAX {
        claims.set(row, 1, 0).expect("inside the array");
    }
}

/// Opens the copies of records that are in socket storage.
fn open_copies(fixture: &AgentFixture) -> HashMap<MapData, u64, abi::ConnectRecord> {
    let copies = Map::HashMap(pinned_map(fixture, abi::maps::OVERFLOW_COPIES));
    copies.try_into().expect("records")
}

fn pinned_map(fixture: &AgentFixture, name: &str) -> MapData {
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    MapData::from_pin(pins.join(name)).expect("it is pinned")
}

/// Returns the copies that are of a connect to an endpoint.
fn led_copies(copies: &HashMap<MapData, u64, abi::ConnectRecord>) -> Vec<abi::ConnectRecord> {
    let records = copies.iter().map(|entry| entry.expect("readable").1);
    records.filter(|record| record.namespace().is_some() && !record.is_routed()).collect()
}

/// Starts an agent that leads to one endpoint, and fills all rows of client sockets, so that records need copies.
fn start_with_full_rows(test: &str) -> (AgentFixture, FakeWatchServer) {
    let (mut fixture, server) = start(test, "labelled");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(service(Some("true")));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    fill_rows(&fixture);
    (fixture, server)
}

/// A record in socket storage is one that user space cannot list.
#[test]
fn a_connection_whose_row_is_taken_is_ended_too() {
    let (fixture, server) = start_with_full_rows("tcprow");
    let copies = open_copies(&fixture);
    let mut socket = fixture.hold("request", "p", &format!("{CLUSTER_IP}:80"));
    let records = led_copies(&copies);
    assert_eq!((records.len(), copies.iter().count()), (1, 1), "{records:?}");
    server.set(endpoint_slice(&["10.77.0.9"]));
    assert_eq!(socket.wait_line("ended"), ENDED);
    // The process has ended, and its sockets with it.
    drop(socket);
    assert_eq!(copies.iter().count(), 0);
}

#[test]
fn a_connection_beyond_the_copies_stays_open_and_the_next_one_takes_room_that_is_free_again() {
    let (fixture, server) = start_with_full_rows("tcpcopies");
    let mut copies = open_copies(&fixture);
    // Cookies that no socket has.
    let others = 1 << 60..(1 << 60) + u64::from(abi::OVERFLOW_COPIES_MAX);
    for cookie in others.clone() {
        let written = copies.insert(cookie, abi::ConnectRecord::default(), 0);
        written.expect("it holds as many");
    }
    let cluster_ip = format!("{CLUSTER_IP}:80");
    let mut beyond = fixture.hold("request", "p", &cluster_ip);
    assert_eq!(led_copies(&copies), [], "it is connected all the same");
    copies.remove(&others.start).expect("it is there");
    let mut copied = fixture.hold("request", "p", &cluster_ip);
    assert_eq!(led_copies(&copies).len(), 1);
    server.set(endpoint_slice(&["10.77.0.9"]));
    assert_eq!(copied.wait_line("ended"), ENDED);
    drop(copied);
    // The round that has ended the one connection has listed the other one, in the same namespace.
    fixture.wait_metric(ENDED_METRIC, 1);
    assert_eq!(fixture.metric_count(ENDED_METRIC), 1);
    assert!(beyond.is_running(), "no copy tells its endpoint");
    assert_eq!(led_copies(&copies), [], "the room is free again");
}
