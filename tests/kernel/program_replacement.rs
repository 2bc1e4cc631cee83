//! Shell: eBPF programs that are attached again, replaced by those of another ABI, or attached beside foreign ones.

mod under_load;

use agent::{
    kernel::{maps::KernelMaps, programs::EbpfPrograms},
    paths::AgentPaths,
};
use common::wire::ConnectionPath;

use crate::{
    fixture::{KernelFixture, SERVING_PORT},
    scripted_process::parse_counts,
};

/// Number of programs that an agent attaches to cgroups.
const CGROUP_PROGRAMS: usize = 14;

#[test]
fn the_programs_are_replaced_in_place_and_resume_from_the_pins() {
    let mut fixture = KernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.register_pod(&pod, 0);
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    drop(fixture.programs.take());
    assert_eq!(
        client.expect_step("connect 10.96.0.1:80"),
        "one 10.96.0.1:80",
        "pins hold without an agent"
    );
    client.send_step("hammer 10.96.0.1:80 500");
    for _ in 0..5 {
        let programs = EbpfPrograms::load(fixture.paths().clone()).unwrap();
        assert_eq!(programs.keep_attached().unwrap(), 0);
        fixture.programs = Some(programs);
    }
    assert_eq!(client.read_reply(), Ok("one=500".into()));
    assert_eq!(fixture.maps.read_routes().unwrap().frontends.len(), 2);
}

#[test]
fn the_self_test_fails_while_the_programs_are_not_attached() {
    let mut fixture = KernelFixture::new();
    let programs = fixture.programs.take().unwrap();
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
    // Without the links no program sees the connect of the self-test, which reports that.
    programs.detach().unwrap();
    let missing = programs.verify_by_self_test(&mut fixture.maps).unwrap_err().to_string();
    assert!(missing.contains("connect was not seen"), "{missing}");
    assert_eq!(programs.keep_attached().unwrap(), CGROUP_PROGRAMS);
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
}

#[test]
fn the_programs_follow_cgroups_that_were_recreated() {
    let mut fixture = KernelFixture::new();
    let programs = fixture.programs.as_ref().expect("the fixture loaded them");
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
    assert_eq!(programs.keep_attached().unwrap(), 0);
    fixture.recreate_cgroups();
    assert_eq!(programs.keep_attached().unwrap(), CGROUP_PROGRAMS);
    assert_eq!(programs.keep_attached().unwrap(), 0);
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
}

/// Upgrade like the one in `request_counts/upgrade.rs`, for connects.
#[test]
fn connects_follow_the_old_tables_until_those_of_another_abi_are_filled() {
    let mut fixture = KernelFixture::new();
    let (client, first_pod, second_pod) =
        (fixture.add_client(), fixture.add_pod(), fixture.add_pod());
    let mut servers = [first_pod.start_process(), second_pod.start_process()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&first_pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    client.send_step("hammer 10.96.0.1:80 2000");
    let (paths, mut programs) = load_next_abi(&mut fixture);
    assert_eq!(
        client.read_reply(),
        Ok("one=2000".into()),
        "nothing is known in the new tables yet"
    );
    let connection = client.expect_step("connect 10.96.0.1:80");
    assert_eq!(connection, "one 10.96.0.1:80");

    fixture.continue_with_maps(KernelMaps::open(&paths.pins()).unwrap());
    fixture.table.pods.clear();
    fixture.add_ready_pod(&second_pod, 1);
    fixture.apply_table();
    client.send_step("hammer 10.96.0.1:80 2000");
    programs.take_over().unwrap();
    let reply = client.read_reply().expect("no connect failed");
    assert_eq!(parse_counts(&reply).values().sum::<u32>(), 2_000, "{reply}");
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    fixture.programs = Some(programs);
}

/// A second set of the same programs, with tables of its own, acts as a foreign socket load balancer, which routes
/// the service's address elsewhere. It is attached to a cgroup above the fixture's, like Cilium's to the root.
#[test]
fn beside_another_socket_load_balancer_above_our_services_still_lead_to_our_pods() {
    let mut fixture = KernelFixture::new();
    let (client, ours) = (fixture.add_client(), fixture.add_pod());
    let (theirs, third) = (fixture.add_pod(), fixture.add_pod());
    let mut servers = [ours.start_process(), theirs.start_process(), third.start_process()];
    for (server, name) in servers.iter_mut().zip(["ours", "theirs", "third"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&ours, 1);
    fixture.apply_table();
    let mut client = client.start_process();

    // The foreign programs are in a cgroup above, so they run after the fixture's.
    let mut other = fixture.load_beside();
    other.add_service(1, ConnectionPath::Direct);
    other.add_ready_pod(&theirs, 1);
    // A service that only the foreign programs have.
    other.add_service(2, ConnectionPath::Direct);
    other.add_ready_pod(&third, 2);
    other.apply_table();
    let programs = fixture.programs.as_ref().expect("the fixture loaded them");
    assert_eq!(programs.foreign_programs().values().sum::<usize>(), 2, "both hooks are seen");
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.expect_step("hammer 10.96.0.2:80 20"), "third=20", "theirs stay theirs");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "ours [fd96::1]:80");

    // The order of attachment does not matter: the fixture's links are removed, and attached after the foreign ones.
    programs.detach().unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "theirs=20");
    assert_eq!(programs.keep_attached().unwrap(), CGROUP_PROGRAMS);
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.expect_step("hammer 10.96.0.2:80 20"), "third=20");
    programs.verify_by_self_test(&mut fixture.maps).unwrap();
}

/// Attaches the same programs under the next version number beside the fixture's, which act as the earlier version.
pub(crate) fn load_next_abi(fixture: &mut KernelFixture) -> (AgentPaths, EbpfPrograms) {
    let version = fixture.paths().version + 1;
    let paths = AgentPaths { version, ..fixture.paths().clone() };
    let programs = EbpfPrograms::load(paths.clone()).expect("the kernel takes them");
    drop(fixture.programs.take());
    (paths, programs)
}

#[test]
fn what_failed_while_taking_over_from_another_abi_is_done_by_the_next_try() {
    let mut fixture = KernelFixture::new();
    let (client, first_pod, second_pod) =
        (fixture.add_client(), fixture.add_pod(), fixture.add_pod());
    let mut servers = [first_pod.start_process(), second_pod.start_process()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&first_pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    let old = fixture.programs.as_ref().unwrap().pins().join("links");
    let (paths, mut programs) = load_next_abi(&mut fixture);
    fixture.continue_with_maps(KernelMaps::open(&paths.pins()).unwrap());
    fixture.table.pods.clear();
    fixture.add_ready_pod(&second_pod, 1);
    fixture.apply_table();

    // A directory cannot be unlinked like a file.
    std::fs::rename(old.join("connect4"), old.join("aside")).unwrap();
    std::fs::create_dir(old.join("connect4")).unwrap();
    programs.take_over().unwrap_err();
    std::fs::remove_dir(old.join("connect4")).unwrap();
    std::fs::rename(old.join("aside"), old.join("connect4")).unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 5"), "one=5", "the old tables still");

    // The retry may also come from a new agent.
    drop(programs);
    let mut programs = EbpfPrograms::load(paths).unwrap();
    programs.take_over().unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    fixture.programs = Some(programs);
}

#[test]
fn a_socket_from_before_an_upgrade_shows_the_service_until_it_closes() {
    let mut fixture = KernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    client.expect_step("connect 10.96.0.1:80");
    let old = fixture.programs.as_ref().unwrap().pins();
    let id = *fixture.maps.read_routes().unwrap().backends.keys().next().unwrap();
    let (paths, mut programs) = load_next_abi(&mut fixture);
    programs.take_over().unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.expect_step("peer"), "10.96.0.1:80");
    assert!(!old.join("links/sockets").exists(), "it counts nothing any more");

    // A new agent continues with the outlived program.
    drop(programs);
    let mut programs = EbpfPrograms::load(paths).unwrap();
    assert_eq!(programs.remove_outlived_pins(), 1);
    assert_eq!(client.expect_step("peer"), "10.96.0.1:80");
    client.expect_step("drop");
    assert_eq!(fixture.maps.open_connections(id), 0, "the old gauge is left, too");
    assert_eq!(programs.remove_outlived_pins(), 0);
    assert!(!old.exists());
    fixture.programs = Some(programs);
}
