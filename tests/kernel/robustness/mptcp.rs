//! Shell: Multipath TCP: connections of one subflow and of several.

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use datapath::abi;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    ANY_ADDRESS, RobustnessFixture, get_request, netstat_text, netstat_value, send_and_read,
};
use crate::{
    fixture::{SERVING_PORT, in_netns, run_ip},
    scripted_process::ScriptedProcess,
};

impl RobustnessFixture {
    /// Opens a connection that requests more than one subflow.
    fn connect_mptcp(&self) -> TcpStream {
        let address: SocketAddr = format!("{}:{SERVING_PORT}", self.pod.ipv4()).parse().unwrap();
        let socket = in_netns(&self.client.netns, || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)).unwrap();
            socket.connect(&address.into()).unwrap();
            socket
        });
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.into()
    }
}

/// Starts a server that listens with MPTCP, as Go programs do since 1.24.
fn start_mptcp_server(fixture: &RobustnessFixture) -> ScriptedProcess {
    let mut server = fixture.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS} mptcp"));
    server.expect_step("serve");
    server
}

fn send_requests(stream: &mut TcpStream) {
    for _ in 0..3 {
        send_and_read(stream, &get_request("length/5"), "xxxxx");
        send_and_read(stream, &get_request("sendfile/300000"), "x\n");
        let body = "GET /no HTTP/1.1\r\n\r\n".repeat(20_000);
        let head = format!("POST /length/5 HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
        send_and_read(stream, &(head + &body), "xxxxx");
    }
}

#[test]
fn a_multipath_listener_is_the_pods_and_serves_plain_clients() {
    let fixture = RobustnessFixture::new();
    let _server = start_mptcp_server(&fixture);
    assert_eq!(
        fixture.kernel.maps.listener(fixture.pod.cookie, SERVING_PORT).unwrap().reachable,
        1
    );
    send_requests(&mut fixture.connect());
    fixture.wait_settled_in_order();
}

#[test]
fn a_multipath_listener_on_loopback_is_widened_like_any_other() {
    count_without_retransmission(|fixture| {
        fixture.kernel.register_pod(&fixture.pod, abi::POD_WIDEN_BIND);
        let mut server = fixture.start_server_process();
        server.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} mptcp"));
        server.expect_step("serve");
        server
    });
}

#[test]
fn a_multipath_connection_of_one_subflow_is_counted_like_any_other() {
    count_without_retransmission(|fixture| start_mptcp_server(fixture));
}

/// Counts a connection of one subflow without retransmissions, in several attempts.
#[track_caller]
fn count_without_retransmission(listen: impl Fn(&mut RobustnessFixture) -> ScriptedProcess) {
    let result = (0..10).any(|_| {
        let mut fixture = RobustnessFixture::new();
        let _server = listen(&mut fixture);
        let mut stream = fixture.connect_mptcp();
        send_requests(&mut stream);
        let (state, log) = (fixture.pod_state(), fixture.served_requests());
        drop(stream);
        if has_retransmitted(&fixture) {
            return false;
        }
        assert_eq!((state.connections, state.in_flight, log), (1, 0, 9));
        fixture.wait_settled_in_order();
        true
    });
    assert!(result, "each time something was sent again");
}

/// Returns true if either side has retransmitted data. A subflow carries it as new bytes between others, which only a
/// reader of the MPTCP connection could tell apart: boundaries are lost.
fn has_retransmitted(fixture: &RobustnessFixture) -> bool {
    let figures = [&fixture.pod.netns, &fixture.client.netns].map(|it| netstat_text(it, "netstat"));
    figures.iter().any(|it| netstat_value(it, "MPTcpExt:", "MPTCPRetrans") > 0)
}

#[test]
fn a_multipath_client_of_a_plain_listener_falls_back() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    send_requests(&mut fixture.connect_mptcp());
    fixture.wait_settled_in_order();
}

/// Messages of such a connection are spread over its subflows, in each of which boundaries are lost. It counts as one
/// connection, and never with more requests than there are.
#[test]
fn a_multipath_connection_of_several_subflows_is_one_and_estimated() {
    let fixture = RobustnessFixture::new();
    let (pod, client) = (&fixture.pod.netns, &fixture.client.netns);
    let second = format!("10.99.1.{}", fixture.client.number);
    run_ip(&["-n", client, "addr", "add", &format!("{second}/16"), "dev", "eth0"]);
    for netns in [pod, client] {
        run_ip(&["-n", netns, "mptcp", "limits", "set", "subflows", "2", "add_addr_accepted", "2"]);
    }
    run_ip(&["-n", client, "mptcp", "endpoint", "add", &second, "dev", "eth0", "subflow"]);
    let _server = start_mptcp_server(&fixture);
    let mut stream = fixture.connect_mptcp();
    // On a busy machine the kernel's worker opens the second subflow late.
    let (mut rounds, until) = (0, Instant::now() + Duration::from_secs(60));
    let is_unsplit = || fixture.pod_state().desynced_connections == 0;
    while rounds < 5 || (is_unsplit() && Instant::now() < until) {
        rounds += 1;
        send_requests(&mut stream);
        let state = fixture.pod_state();
        assert!(state.connections == 1 && state.in_flight <= 1, "{state:?}");
    }
    assert!(fixture.pod_state().desynced_connections >= 1, "{rounds} rounds");
    drop(stream);
    fixture.wait("closed", |it| it.pod_state().connections == 0);
    let ((started, finished), state) = (fixture.totals(), fixture.pod_state());
    assert_eq!((finished, state.in_flight, state.awaiting_first_request), (started, 0, 0));
    assert!(started <= fixture.served_requests(), "{started} of {}", fixture.served_requests());
}
