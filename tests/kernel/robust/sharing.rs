//! Shell: listeners and connections that several processes share or pass on.

use std::{io::Write as _, path::PathBuf, thread};

use super::{ANY_ADDRESS, CaseRng, RobustnessFixture, get_request, send_and_read, server};
use crate::{actor::ScriptedProcess, bed::NetnsFixture};

/// Sends requests on connections of random length from several threads. Returns the number of requests.
fn send_requests(scene: &RobustnessFixture) -> u64 {
    const CLIENTS: u64 = 4;
    const EACH: usize = 40;
    let play = |seed| {
        let (mut dice, mut sent) = (CaseRng(seed), 0);
        for _ in 0..EACH {
            let mut stream = scene.connect();
            for _ in 0..1 + dice.next_below(5) {
                send_and_read(&mut stream, &get_request("length/5"), "xxxxx");
                sent += 1;
            }
        }
        sent
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|seed| scope.spawn(move || play(seed))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    })
}

/// Path of a Unix socket of this test.
fn socket_path(scene: &RobustnessFixture, what: &str) -> String {
    scene.files.with_extension(what).display().to_string()
}

/// Starts a process in another pod's cgroup, and in the network namespace `netns`.
fn start_in_other_pod(
    scene: &RobustnessFixture,
    other: &NetnsFixture,
    netns: &str,
) -> ScriptedProcess {
    server::start(&scene.files, &other.cgroup, netns)
}

/// Passes a descriptor from one process to another one, which waits for it.
fn pass_descriptor(from: &mut ScriptedProcess, to: &mut ScriptedProcess, what: &str, path: &str) {
    to.send_step(&format!("take{what} {path}"));
    while !PathBuf::from(path).exists() {
        thread::yield_now();
    }
    from.expect_step(&format!("hand{what} {path}"));
    to.read_answer().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn four_processes_with_listeners_of_their_own_are_one_pod() {
    let scene = RobustnessFixture::new();
    let mut servers: Vec<ScriptedProcess> = (0..4).map(|_| scene.start_server_process()).collect();
    for server in &mut servers {
        server.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
        server.expect_step("serve");
    }
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
}

/// Connections in the queue of a closing listener move to another listener with net.ipv4.tcp_migrate_req.
#[test]
fn connections_that_move_to_another_listener_are_counted_once() {
    let scene = RobustnessFixture::new();
    let set = ["netns", "exec", &scene.pod.netns, "sysctl", "-qw", "net.ipv4.tcp_migrate_req=1"];
    crate::bed::run_ip(&set);
    let (mut lazy, mut server) = (scene.start_server_process(), scene.start_server_process());
    lazy.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
    server.expect_step(&format!("listen {ANY_ADDRESS} reuseport"));
    // No process accepts yet: about half of the connections wait at each listener.
    let mut streams: Vec<_> = (0..40).map(|_| scene.connect()).collect();
    streams
        .iter_mut()
        .for_each(|stream| stream.write_all(get_request("length/5").as_bytes()).unwrap());
    scene.wait("begun", |it| it.totals() == (40, 0));
    lazy.expect_step("close");
    server.expect_step("serve");
    streams.iter_mut().for_each(|stream| super::read_until(stream, "xxxxx"));
    assert_eq!(scene.served_requests(), 40);
    drop(streams);
    scene.wait_settled_in_sync();
}

#[test]
fn children_that_share_their_parents_listener_are_one_pod() {
    let scene = RobustnessFixture::new();
    let mut server = scene.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS}"));
    server.expect_step("prefork 3");
    server.expect_step("close");
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
}

#[test]
fn connections_given_to_another_pods_process_count_where_they_were_accepted() {
    let mut scene = RobustnessFixture::new();
    let other = scene.fixture.add_pod();
    scene.fixture.register_pod(&other, 0);
    let (mut accepts, mut serves) =
        (scene.start_server_process(), start_in_other_pod(&scene, &other, &other.netns));
    accepts.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&scene, "connections");
    serves.expect_step(&format!("take-accepted {path}"));
    accepts.expect_step(&format!("hand-accepted {path}"));
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
    let others = scene.fixture.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_listener_given_to_another_pods_process_counts_where_it_was_made() {
    let mut scene = RobustnessFixture::new();
    let other = scene.fixture.add_pod();
    scene.fixture.register_pod(&other, 0);
    let (mut makes, mut serves) =
        (scene.start_server_process(), start_in_other_pod(&scene, &other, &other.netns));
    makes.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&scene, "listener");
    pass_descriptor(&mut makes, &mut serves, "", &path);
    makes.expect_step("close");
    serves.expect_step("serve");
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
    let others = scene.fixture.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
}

#[test]
fn a_thread_in_another_namespace_may_accept() {
    let mut scene = RobustnessFixture::new();
    let other = scene.fixture.add_pod();
    let mut server = scene.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS}"));
    server.expect_step(&format!("serve-in {}", other.netns));
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
}

/// A listener in this pod's namespace is this pod's, whichever process of any pod has made it.
#[test]
fn a_listener_made_for_the_pod_by_another_process_of_the_pods_is_the_pods() {
    let mut scene = RobustnessFixture::new();
    let other = scene.fixture.add_pod();
    let (mut makes, mut serves) =
        (start_in_other_pod(&scene, &other, &scene.pod.netns), scene.start_server_process());
    makes.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&scene, "listener");
    pass_descriptor(&mut makes, &mut serves, "", &path);
    drop(makes);
    serves.expect_step("serve");
    assert_eq!(send_requests(&scene), scene.served_requests());
    scene.wait_settled_in_sync();
}

/// A listener made like systemd's or a container runtime's: no program runs for its sockets, even in a pod's process.
#[test]
fn a_listener_made_outside_the_pods_cgroups_is_not_counted_and_disturbs_nothing() {
    let scene = RobustnessFixture::new();
    let (mut makes, mut serves) =
        (start_in_other_pod(&scene, &scene.client, &scene.pod.netns), scene.start_server_process());
    makes.expect_step(&format!("listen {ANY_ADDRESS}"));
    let path = socket_path(&scene, "listener");
    pass_descriptor(&mut makes, &mut serves, "", &path);
    drop(makes);
    serves.expect_step("serve");
    assert_eq!(send_requests(&scene), scene.served_requests());
    let state = scene.pod_state();
    assert_eq!((scene.totals(), state.connections, state.in_flight), ((0, 0), 0, 0));
    // A listener that the pod itself makes is counted.
    drop(serves);
    let before = scene.served_requests();
    let _server = scene.start_server();
    let sent = send_requests(&scene);
    assert_eq!((before + sent, scene.totals().0), (scene.served_requests(), sent));
}
