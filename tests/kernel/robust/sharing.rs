//! Shell: listeners and connections that several processes share or pass on.

use std::{io::Write as _, path::PathBuf, thread};

use super::{CaseRng, RobustnessFixture, WILD, ask, get, server};
use crate::{actor::ScriptedProcess, bed::NetnsFixture};

/// Sends requests on connections of random length from several threads. Returns the number of requests.
fn load(scene: &RobustnessFixture) -> u64 {
    const CLIENTS: u64 = 4;
    const EACH: usize = 40;
    let play = |seed| {
        let (mut dice, mut sent) = (CaseRng(seed), 0);
        for _ in 0..EACH {
            let mut stream = scene.connect();
            for _ in 0..1 + dice.below(5) {
                ask(&mut stream, &get("length/5"), "xxxxx");
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
fn meeting(scene: &RobustnessFixture, what: &str) -> String {
    scene.desk.with_extension(what).display().to_string()
}

/// Starts a process in another pod's cgroup, and in the network namespace `netns`.
fn elsewhere(scene: &RobustnessFixture, other: &NetnsFixture, netns: &str) -> ScriptedProcess {
    server::start(&scene.desk, &other.cgroup, netns)
}

/// Passes a descriptor from one process to another one, which waits for it.
fn hand_over(from: &mut ScriptedProcess, to: &mut ScriptedProcess, what: &str, path: &str) {
    to.send(&format!("take{what} {path}"));
    while !PathBuf::from(path).exists() {
        thread::yield_now();
    }
    from.must(&format!("hand{what} {path}"));
    to.answer().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn four_processes_with_listeners_of_their_own_are_one_pod() {
    let scene = RobustnessFixture::new();
    let mut servers: Vec<ScriptedProcess> = (0..4).map(|_| scene.server()).collect();
    for server in &mut servers {
        server.must(&format!("listen {WILD} reuseport"));
        server.must("serve");
    }
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
}

/// Connections in the queue of a closing listener move to another listener with net.ipv4.tcp_migrate_req.
#[test]
fn connections_that_move_to_another_listener_are_counted_once() {
    let scene = RobustnessFixture::new();
    let set = ["netns", "exec", &scene.pod.netns, "sysctl", "-qw", "net.ipv4.tcp_migrate_req=1"];
    crate::bed::ip(&set);
    let (mut lazy, mut server) = (scene.server(), scene.server());
    lazy.must(&format!("listen {WILD} reuseport"));
    server.must(&format!("listen {WILD} reuseport"));
    // No process accepts yet: about half of the connections wait at each listener.
    let mut streams: Vec<_> = (0..40).map(|_| scene.connect()).collect();
    streams.iter_mut().for_each(|stream| stream.write_all(get("length/5").as_bytes()).unwrap());
    scene.wait("begun", |it| it.totals() == (40, 0));
    lazy.must("close");
    server.must("serve");
    streams.iter_mut().for_each(|stream| super::until(stream, "xxxxx"));
    assert_eq!(scene.log(), 40);
    drop(streams);
    scene.wait_settled_in_sync();
}

#[test]
fn children_that_share_their_parents_listener_are_one_pod() {
    let scene = RobustnessFixture::new();
    let mut server = scene.server();
    server.must(&format!("listen {WILD}"));
    server.must("prefork 3");
    server.must("close");
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
}

#[test]
fn connections_given_to_another_pods_process_count_where_they_were_accepted() {
    let mut scene = RobustnessFixture::new();
    let other = scene.bed.pod();
    scene.bed.register(&other, 0);
    let (mut accepts, mut serves) = (scene.server(), elsewhere(&scene, &other, &other.netns));
    accepts.must(&format!("listen {WILD}"));
    let path = meeting(&scene, "connections");
    serves.must(&format!("take-accepted {path}"));
    accepts.must(&format!("hand-accepted {path}"));
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
    let others = scene.bed.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_listener_given_to_another_pods_process_counts_where_it_was_made() {
    let mut scene = RobustnessFixture::new();
    let other = scene.bed.pod();
    scene.bed.register(&other, 0);
    let (mut makes, mut serves) = (scene.server(), elsewhere(&scene, &other, &other.netns));
    makes.must(&format!("listen {WILD}"));
    let path = meeting(&scene, "listener");
    hand_over(&mut makes, &mut serves, "", &path);
    makes.must("close");
    serves.must("serve");
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
    let others = scene.bed.maps.totals(u32::from(other.number));
    assert_eq!((others.started, others.finished), (0, 0));
}

#[test]
fn a_thread_in_another_namespace_may_accept() {
    let mut scene = RobustnessFixture::new();
    let other = scene.bed.pod();
    let mut server = scene.server();
    server.must(&format!("listen {WILD}"));
    server.must(&format!("serve-in {}", other.netns));
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
}

/// A listener in this pod's namespace is this pod's, whichever process of any pod has made it.
#[test]
fn a_listener_made_for_the_pod_by_another_process_of_the_pods_is_the_pods() {
    let mut scene = RobustnessFixture::new();
    let other = scene.bed.pod();
    let (mut makes, mut serves) = (elsewhere(&scene, &other, &scene.pod.netns), scene.server());
    makes.must(&format!("listen {WILD}"));
    let path = meeting(&scene, "listener");
    hand_over(&mut makes, &mut serves, "", &path);
    drop(makes);
    serves.must("serve");
    assert_eq!(load(&scene), scene.log());
    scene.wait_settled_in_sync();
}

/// A listener made like systemd's or a container runtime's: no program runs for its sockets, even in a pod's process.
#[test]
fn a_listener_made_outside_the_pods_cgroups_is_not_counted_and_disturbs_nothing() {
    let scene = RobustnessFixture::new();
    let (mut makes, mut serves) =
        (elsewhere(&scene, &scene.client, &scene.pod.netns), scene.server());
    makes.must(&format!("listen {WILD}"));
    let path = meeting(&scene, "listener");
    hand_over(&mut makes, &mut serves, "", &path);
    drop(makes);
    serves.must("serve");
    assert_eq!(load(&scene), scene.log());
    let state = scene.state();
    assert_eq!((scene.totals(), state.connections, state.in_flight), ((0, 0), 0, 0));
    // A listener that the pod itself makes is counted.
    drop(serves);
    let before = scene.log();
    let _server = scene.serving();
    let sent = load(&scene);
    assert_eq!((before + sent, scene.totals().0), (scene.log(), sent));
}
