//! Shell: listeners and connections that several processes share or pass on.

use std::{io::Write as _, path::PathBuf, thread};

use super::{ANY_ADDRESS, CaseRng, RobustnessFixture, get_request, send_and_read, server_process};
use crate::{fixture::NetnsFixture, scripted_process::ScriptedProcess};

/// Sends requests on connections of random length from several threads. Returns the number of requests.
fn send_requests(fixture: &RobustnessFixture) -> u64 {
    const CLIENTS: u64 = 4;
    const EACH: usize = 40;
    let send_seeded = |seed| {
        let (mut rng, mut sent) = (CaseRng(seed), 0);
        for _ in 0..EACH {
            let mut stream = fixture.connect();
            for _ in 0..1 + rng.next_below(5) {
                send_and_read(&mut stream, &get_request("length/5"), "xxxxx");
                sent += 1;
            }
        }
        sent
    };
    thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|seed| scope.spawn(move || send_seeded(seed))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    })
}

/// Path of a Unix socket of this test.
fn socket_path(fixture: &RobustnessFixture, name: &str) -> String {
    fixture.log_path.with_extension(name).display().to_string()
}

/// Starts a process in another pod's cgroup, and in the network namespace `netns`.
fn start_in_other_pod(
    fixture: &RobustnessFixture,
    other: &NetnsFixture,
    netns: &str,
) -> ScriptedProcess {
    server_process::start(&fixture.log_path, &other.cgroup, netns)
}

/// Passes a listener from one process to another one, which waits for it.
fn pass_listener(from: &mut ScriptedProcess, to: &mut ScriptedProcess, path: &str) {
    to.send_step(&format!("take {path}"));
    while !PathBuf::from(path).exists() {
        thread::yield_now();
    }
    from.expect_step(&format!("hand {path}"));
    to.read_reply().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn four_processes_with_listeners_of_their_own_are_one_pod() {
    let fixture = RobustnessFixture::new();
    let mut servers: Vec<ScriptedProcess> =
        (0..4).map(|_| fixture.start_server_process()).collect();
    for server in &mut servers {
        server.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
        server.expect_step("serve");
    }
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
}

/// Connections in the queue of a closing listener move to another listener with net.ipv4.tcp_migrate_req.
#[test]
fn connections_that_move_to_another_listener_are_counted_once() {
    let fixture = RobustnessFixture::new();
    let set = ["netns", "exec", &fixture.pod.netns, "sysctl", "-qw", "net.ipv4.tcp_migrate_req=1"];
    crate::fixture::run_ip(&set);
    let (mut lazy_server, mut server) =
        (fixture.start_server_process(), fixture.start_server_process());
    lazy_server.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
    server.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
    // No process accepts yet: about half of the connections wait at each listener.
    let mut streams: Vec<_> = (0..40).map(|_| fixture.connect()).collect();
    streams
        .iter_mut()
        .for_each(|stream| stream.write_all(get_request("length/5").as_bytes()).unwrap());
    fixture.wait("begun", |it| it.totals() == (40, 0));
    lazy_server.expect_step("close");
    server.expect_step("serve");
    streams.iter_mut().for_each(|stream| super::read_until(stream, "xxxxx"));
    assert_eq!(fixture.served_requests(), 40);
    drop(streams);
    fixture.wait_settled_in_sync();
}

#[test]
fn children_that_share_their_parents_listener_are_one_pod() {
    let fixture = RobustnessFixture::new();
    let mut server = fixture.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS}"));
    server.expect_step("prefork 3");
    server.expect_step("close");
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
}

#[test]
fn connections_given_to_another_pods_process_count_where_they_were_accepted() {
    let mut fixture = RobustnessFixture::new();
    let other = fixture.kernel.add_pod();
    fixture.kernel.register_pod(&other, 0);
    let (mut acceptor, mut server) =
        (fixture.start_server_process(), start_in_other_pod(&fixture, &other, &other.netns));
    acceptor.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&fixture, "connections");
    server.expect_step(&format!("take-accepted {path}"));
    acceptor.expect_step(&format!("hand-accepted {path}"));
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
    let others = fixture.kernel.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_listener_given_to_another_pods_process_counts_where_it_was_made() {
    let mut fixture = RobustnessFixture::new();
    let other = fixture.kernel.add_pod();
    fixture.kernel.register_pod(&other, 0);
    let (mut maker, mut server) =
        (fixture.start_server_process(), start_in_other_pod(&fixture, &other, &other.netns));
    maker.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&fixture, "listener");
    pass_listener(&mut maker, &mut server, &path);
    maker.expect_step("close");
    server.expect_step("serve");
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
    let others = fixture.kernel.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
}

#[test]
fn a_thread_in_another_namespace_may_accept() {
    let mut fixture = RobustnessFixture::new();
    let other = fixture.kernel.add_pod();
    let mut server = fixture.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS}"));
    server.expect_step(&format!("serve-in {}", other.netns));
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
}

/// A listener in this pod's namespace is this pod's, whichever process of any pod has made it.
#[test]
fn a_listener_made_for_the_pod_by_another_process_of_the_pods_is_the_pods() {
    let mut fixture = RobustnessFixture::new();
    let other = fixture.kernel.add_pod();
    let (mut maker, mut server) =
        (start_in_other_pod(&fixture, &other, &fixture.pod.netns), fixture.start_server_process());
    maker.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&fixture, "listener");
    pass_listener(&mut maker, &mut server, &path);
    drop(maker);
    server.expect_step("serve");
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    fixture.wait_settled_in_sync();
}

/// A listener made like systemd's or a container runtime's: no program runs for its sockets, even in a pod's process.
#[test]
fn a_listener_made_outside_the_pods_cgroups_is_not_counted_and_disturbs_nothing() {
    let fixture = RobustnessFixture::new();
    let (mut maker, mut server) = (
        start_in_other_pod(&fixture, &fixture.client, &fixture.pod.netns),
        fixture.start_server_process(),
    );
    maker.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&fixture, "listener");
    pass_listener(&mut maker, &mut server, &path);
    drop(maker);
    server.expect_step("serve");
    assert_eq!(send_requests(&fixture), fixture.served_requests());
    let state = fixture.pod_state();
    assert_eq!((fixture.totals(), state.connections, state.in_flight), ((0, 0), 0, 0));
    // A listener that the pod itself makes is counted.
    drop(server);
    let before = fixture.served_requests();
    let _server = fixture.start_server();
    let sent = send_requests(&fixture);
    assert_eq!((before + sent, fixture.totals().0), (fixture.served_requests(), sent));
}
