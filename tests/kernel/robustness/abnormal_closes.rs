//! Shell: connections that end otherwise than by a close at both ends.

use std::{io::Write as _, process::Command};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{RobustnessFixture, get_request, read_until, send_and_read};
use crate::{fixture::run_ip, scripted_process::ScriptedProcess};

/// Kills a process like the kernel's out-of-memory killer.
fn oom_kill(process: ScriptedProcess) {
    let pid = Pid::from_raw(process.pid() as i32);
    kill(pid, Signal::SIGKILL).unwrap();
    drop(process);
}

/// Opens `count` connections with a request in flight, and one without.
fn open_held_connections(fixture: &RobustnessFixture, count: u64) -> Vec<std::net::TcpStream> {
    let mut streams: Vec<_> = (0..=count).map(|_| fixture.connect()).collect();
    for stream in streams.iter_mut().skip(1) {
        stream.write_all(get_request("hold").as_bytes()).unwrap();
    }
    send_and_read(&mut streams[0], &get_request("length/5"), "xxxxx");
    fixture.wait_served(count + 1);
    let state = fixture.pod_state();
    assert_eq!((state.in_flight, state.connections), (count, count + 1));
    streams
}

#[test]
fn a_server_that_closes_with_data_unread_has_ended_the_request() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    for length in [10, 100_000] {
        let mut stream = fixture.connect();
        let head = format!("POST /quit HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
        // The second request's server has closed before all bytes are sent.
        let _reset = stream.write_all(&[head.as_bytes(), &vec![b'x'; length]].concat());
    }
    fixture.wait_served(2);
    fixture.wait_settled_in_sync();
}

#[test]
fn a_server_that_is_killed_leaves_nothing_in_flight() {
    let fixture = RobustnessFixture::new();
    let server = fixture.start_server();
    let streams = open_held_connections(&fixture, 20);
    oom_kill(server);
    fixture.wait("ended", |it| it.pod_state().in_flight == 0);
    drop(streams);
    fixture.wait_settled_in_sync();
}

#[test]
fn a_client_that_is_killed_is_served_to_the_end() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    let url = format!("http://{}:8080/hold", fixture.pod.ipv4());
    let mut client = Command::new("ip");
    let args = ["netns", "exec", &fixture.client.netns, "curl", "-s", &url];
    let mut client = client.args(args).spawn().unwrap();
    fixture.wait_served(1);
    client.kill().unwrap();
    client.wait().unwrap();
    // The server still works on the request.
    assert_eq!(fixture.pod_state().in_flight, 1);
    fixture.open_gate();
    fixture.wait_settled_in_sync();
}

#[test]
fn a_connection_that_an_administrator_ends_leaves_nothing_in_flight() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    let streams = open_held_connections(&fixture, 3);
    let end = ["netns", "exec", &fixture.pod.netns, "ss", "-K", "sport", "=", ":8080"];
    run_ip(&end);
    fixture.wait_settled_in_sync();
    drop(streams);
}

/// The other end neither replies nor reports that it has gone. After `watch/10000` the server gives up on such a client:
/// after 10 s if data is unacknowledged, and otherwise by keepalive. It also gives up on a window that stays closed for
/// this time, so all requests must have come before.
#[test]
fn a_client_that_vanishes_is_given_up_when_the_server_gives_it_up() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    let mut idle = fixture.connect();
    send_and_read(&mut idle, &get_request("watch/10000"), "xxxxx");
    let mut busy = fixture.connect();
    send_and_read(&mut busy, &get_request("watch/10000"), "xxxxx");
    busy.write_all(get_request("length/8000000").as_bytes()).unwrap();
    let mut held = fixture.connect();
    send_and_read(&mut held, &get_request("watch/10000"), "xxxxx");
    held.write_all(get_request("hold").as_bytes()).unwrap();
    fixture.wait_served(5);
    run_ip(&["-n", &fixture.client.netns, "link", "set", "eth0", "down"]);
    assert_eq!((fixture.totals(), fixture.pod_state().connections), ((5, 3), 3));
    fixture.wait_settled_in_sync();
    drop((idle, busy, held));
}

#[test]
fn a_clients_namespace_that_goes_with_requests_in_flight_leaves_nothing() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    let mut streams = open_held_connections(&fixture, 5);
    // The namespace lives until the last of its sockets is closed.
    run_ip(&["netns", "del", &fixture.client.netns]);
    streams.truncate(3);
    fixture.open_gate();
    streams.iter_mut().skip(1).for_each(|stream| read_until(stream, "xxxxx"));
    drop(streams);
    fixture.wait_settled_in_sync();
}

#[test]
fn a_pods_namespace_that_goes_with_requests_in_flight_leaves_nothing() {
    let fixture = RobustnessFixture::new();
    let server = fixture.start_server();
    let streams = open_held_connections(&fixture, 5);
    run_ip(&["netns", "del", &fixture.pod.netns]);
    oom_kill(server);
    fixture.wait("ended", |it| it.pod_state().in_flight == 0);
    drop(streams);
    fixture.wait_settled_in_sync();
}

/// The pod's link is removed before its processes, so no peer acknowledges their last packets.
#[test]
fn a_pod_whose_link_goes_first_leaves_nothing() {
    let fixture = RobustnessFixture::new();
    for set in ["net.ipv4.tcp_orphan_retries=1", "net.ipv4.tcp_fin_timeout=1"] {
        run_ip(&["netns", "exec", &fixture.pod.netns, "sysctl", "-qw", set]);
    }
    let server = fixture.start_server();
    let streams = open_held_connections(&fixture, 5);
    run_ip(&["-n", &fixture.pod.netns, "link", "del", "eth0"]);
    oom_kill(server);
    run_ip(&["netns", "del", &fixture.pod.netns]);
    fixture.wait("ended", |it| it.pod_state().in_flight == 0);
    fixture.wait_settled_in_sync();
    drop(streams);
}

/// The server never accepted a connection that waits in the queue of a closing listener.
#[test]
fn unaccepted_connections_end_with_their_listener() {
    let fixture = RobustnessFixture::new();
    let mut server = fixture.start_server_process();
    server.expect_step(&format!("listen {}", super::ANY_ADDRESS));
    let mut stream = fixture.connect();
    stream.write_all(get_request("length/5").as_bytes()).unwrap();
    fixture.wait("in flight", |it| it.pod_state().in_flight == 1);
    server.expect_step("close");
    fixture.wait("ended", |it| it.pod_state().connections == 0);
    assert_eq!(
        (fixture.totals(), fixture.pod_state().in_flight, fixture.served_requests()),
        ((1, 1), 0, 0)
    );
}
