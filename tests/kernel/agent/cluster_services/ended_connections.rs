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

/// A record in socket storage is one that user space cannot list.
#[test]
fn a_connection_whose_row_is_taken_is_ended_too() {
    let (mut fixture, server) = start("tcprow", "labelled");
    fixture.send_to_pod("keep");
    set_node(&server);
    server.set(service(Some("true")));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.wait_outcome("connected");
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let pinned = |name| MapData::from_pin(pins.join(name)).expect("it is pinned");
    let claims = Map::Array(pinned(abi::maps::CLAIMS));
    let mut claims: Array<MapData, u64> = claims.try_into().expect("words");
    for row in 0..abi::CLIENTS_MAX {
        claims.set(row, 1, 0).expect("inside the array");
    }
    let copies = Map::HashMap(pinned(abi::maps::OVERFLOW_COPIES));
    let copies: HashMap<MapData, u64, abi::ConnectRecord> = copies.try_into().expect("records");
    let mut socket = fixture.hold("request", "p", &format!("{CLUSTER_IP}:80"));
    let records: Vec<_> = copies.iter().map(|entry| entry.expect("readable").1).collect();
    assert!(records.len() == 1 && records[0].netns_cookie != 0, "{records:?}");
    server.set(endpoint_slice(&["10.77.0.9"]));
    assert_eq!(socket.wait_line("ended"), ENDED);
    // The process has ended, and its sockets with it.
    drop(socket);
    assert_eq!(copies.iter().count(), 0);
}
