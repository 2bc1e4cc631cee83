//! Shell: connects to the addresses of services.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use agent::{
    kernel::{
        features::VerifierFeatures,
        map_op::{BackendTarget, MapOp},
        maps::KernelMaps,
        programs::{self, EbpfPrograms},
    },
    paths::AgentPaths,
};
use aya::util::KernelVersion;
use common::wire::{ConnectionPath as Way, RoutingPhase};
use datapath::{
    abi::{self, SocketBit},
    load_balancing::{RoutingMode, SvcState},
};

use crate::{
    actor::ScriptedProcess,
    bed::{KernelFixture, NetnsFixture, SERVING_PORT, pod_uid},
};

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

#[test]
fn a_connect_to_a_service_reaches_its_pod_and_shows_the_service() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(client.expect_step("connect [::ffff:10.96.0.1]:80"), "one [::ffff:10.96.0.1]:80");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "one [fd96::1]:80");
    let direct = format!("{}:{SERVING_PORT}", pod.ipv4());
    assert_eq!(client.expect_step(&format!("connect {direct}")), format!("one {direct}"));
}

#[test]
fn an_ipv6_pod_serves_ipv6_clients() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen [::]:{SERVING_PORT} six"));
    bed.add_service(1, Way::Direct);
    bed.set_pod(&pod, 1, RoutingPhase::Ready, pod.ipv6());
    bed.apply_table();
    assert_eq!(client.start_process().expect_step("connect [fd96::1]:80"), "six [fd96::1]:80");
}

#[test]
fn an_unknown_address_is_left_alone() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.run_step("connect 10.96.0.9:80"), Err(EHOSTUNREACH));
    assert_eq!(client.run_step("connect 10.96.0.1:81"), Err(EHOSTUNREACH));
}

#[test]
fn a_service_of_mode_refuse_is_refused() {
    let mut bed = KernelFixture::new();
    let client = bed.add_client();
    bed.add_service(1, Way::Direct);
    bed.apply_table();
    let service = *bed.maps.read_routes().unwrap().frontends.values().next().unwrap();
    for service in [service, service + 1] {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        bed.maps.apply(&[MapOp::State { service_id: service, state }]).unwrap();
    }
    let mut client = client.start_process();
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(ECONNREFUSED));
    assert_eq!(client.run_step("connect [fd96::1]:80"), Err(ECONNREFUSED));
}

#[test]
fn a_sleeping_service_leads_to_its_own_port_at_the_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway) = (bed.add_client(), bed.add_client());
    let mut activator = gateway.start_process();
    activator.expect_step("listen 0.0.0.0:20001 first");
    activator.expect_step("listen [fd99::3]:20001 first6");
    activator.expect_step("listen 0.0.0.0:20002 second");
    bed.add_activator(&gateway);
    bed.add_service(1, Way::Direct);
    bed.add_service(2, Way::Activator);
    bed.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "first 10.96.0.1:80");
    assert_eq!(client.expect_step("connect 10.96.0.2:80"), "second 10.96.0.2:80");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "first6 [fd96::1]:80");
}

#[test]
fn activators_share_open_connections_evenly() {
    let mut bed = KernelFixture::new();
    let client = bed.add_client();
    let gateways = [bed.add_client(), bed.add_client()];
    let mut activators = gateways.each_ref().map(|gateway| gateway.start_process());
    for (gateway, activator) in gateways.iter().zip(&mut activators) {
        activator.expect_step(&format!("listen 0.0.0.0:20001 a{}", gateway.number));
        bed.add_activator(gateway);
    }
    bed.add_service(1, Way::Direct);
    bed.apply_table();
    let mut client = client.start_process();
    let mut names: Vec<String> =
        (0..20).map(|_| client.expect_step("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
}

#[test]
fn without_an_activator_the_connect_is_left_to_others() {
    let mut bed = KernelFixture::new();
    let client = bed.add_client();
    bed.add_service(1, Way::Direct);
    bed.apply_table();
    assert_eq!(client.start_process().run_step("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

#[test]
fn a_local_pod_without_listener_gives_way_to_its_sibling_and_then_to_the_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway) = (bed.add_client(), bed.add_client());
    let (one, two) = (bed.add_pod(), bed.add_pod());
    let mut activator = gateway.start_process();
    activator.expect_step("listen 0.0.0.0:20001 activator");
    bed.add_activator(&gateway);
    for pod in [&one, &two] {
        bed.register_pod(pod, 0);
        bed.add_ready_pod(pod, 1);
    }
    bed.add_service(1, Way::Direct);
    bed.apply_table();
    let (mut first, mut second) = (one.start_process(), two.start_process());
    let mut client = client.start_process();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "activator=20");
    assert_eq!(bed.maps.control_word(abi::CONTROL_FALLBACK), 20);
    first.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "one=20");
    second.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} two"));
    first.expect_step("close");
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    drop(second);
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "activator=20");
}

#[test]
fn open_connections_are_shared_out_evenly() {
    let mut bed = KernelFixture::new();
    let client = bed.add_client();
    let pods = [bed.add_pod(), bed.add_pod()];
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.start_process()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{}", pod.number));
        bed.add_ready_pod(pod, 1);
    }
    bed.add_service(1, Way::Direct);
    bed.apply_table();
    let mut client = client.start_process();
    let mut names: Vec<String> =
        (0..20).map(|_| client.expect_step("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
    // The gauge counts open sockets, and decreases with them.
    let ids: Vec<u32> = bed.maps.read_routes().unwrap().backends.keys().copied().collect();
    let open =
        |bed: &KernelFixture| ids.iter().map(|id| bed.maps.open_connections(*id)).sum::<u64>();
    assert_eq!(open(&bed), 20);
    client.expect_step("drop");
    assert_eq!(open(&bed), 0);
    client.expect_step("connect 10.96.0.1:80");
    drop(client);
    assert_eq!(open(&bed), 0, "a killed client leaves the gauge too");
}

#[test]
fn where_a_connect_was_left_unanswered_later_ones_go_elsewhere() {
    let mut bed = KernelFixture::new();
    let (client, pod, lost) = (bed.add_pod(), bed.add_pod(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.add_ready_pod(&pod, 1);
    bed.add_service(1, Way::Direct);
    // No host has this address.
    bed.set_pod(&lost, 1, RoutingPhase::Ready, "10.99.0.250".to_owned());
    bed.apply_table();
    let mut client = client.start_process();
    // The freer of the two pods is chosen, so one of the first two connects is sent there and times out.
    let first = [0, 1].map(|_| client.run_step("connect 10.96.0.1:80"));
    assert!(first.contains(&Err(EHOSTUNREACH)), "{first:?}");
    assert_ne!(bed.maps.control_word(abi::CONTROL_UNANSWERED), 0);
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 50"), "one=50");
    // If it is the only pod, it is tried again.
    bed.set_pod(&pod, 1, RoutingPhase::Draining, pod.ipv4());
    bed.apply_table();
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

#[test]
fn every_connect_under_a_hammering_writer_reaches_a_pod() {
    let mut bed = KernelFixture::new();
    let client = bed.add_client();
    let pods = [bed.add_pod(), bed.add_pod(), bed.add_pod()];
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.start_process()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{}", pod.number));
    }
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pods[0], 1);
    bed.apply_table();
    let mut client = client.start_process();
    client.send_step("hammer 10.96.0.1:80 3000");
    for turn in 0..3_000 {
        bed.table.pods.remove(&pod_uid(&pods[turn % 3]));
        bed.add_ready_pod(&pods[(turn + 1) % 3], 1);
        bed.apply_table();
    }
    let seen = client.read_answer().expect("no connect failed");
    let total: u32 =
        seen.split(' ').map(|one| one.split_once('=').unwrap().1.parse::<u32>().unwrap()).sum();
    assert_eq!(total, 3_000, "{seen}");
}

/// Two services whose lists change as no agent would change them: freed backends are used by the other service at
/// once, without a quarantine.
struct ContendedServicesFixture {
    fixture: KernelFixture,
    client: NetnsFixture,
    first_pod: NetnsFixture,
    second_pod: NetnsFixture,
    _servers: [ScriptedProcess; 2],
}

impl ContendedServicesFixture {
    /// Backends and slots in dispute; after each comes one that always belongs to service 1.
    const BACKENDS: [u32; 2] = [30_000, 30_001];
    const OWN_BACKEND: u32 = 30_002;
    const SLOTS: u32 = 100_000;
    const OWN_SLOT: u32 = 100_002;

    fn new() -> Self {
        let mut fixture = KernelFixture::new();
        let (client, first_pod, second_pod) =
            (fixture.add_client(), fixture.add_pod(), fixture.add_pod());
        let mut servers = [first_pod.start_process(), second_pod.start_process()];
        for (server, name) in servers.iter_mut().zip(["one", "two"]) {
            server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
            server.expect_step(&format!("listen 0.0.0.0:20001 {name}"));
        }
        fixture.add_service(1, Way::Direct);
        fixture.apply_table();
        Self { fixture, client, first_pod, second_pod, _servers: servers }
    }

    fn backend(id: u32, pod: &NetnsFixture, port: u16) -> MapOp {
        let address: std::net::Ipv4Addr = pod.ipv4().parse().expect("an address");
        let address = address.to_ipv6_mapped().octets();
        let backend = BackendTarget { address, cookie: 0, slot: 0, port_be: port.to_be() };
        MapOp::Backend { id, backend }
    }

    /// Counts the destinations of service 1's connects while the list of the service `number` changes as fast as
    /// possible.
    fn count_destinations(&mut self, number: u32, port: u16) -> String {
        let state = |offset, count, generation, mode| MapOp::State {
            service_id: number,
            state: SvcState { offset, count, generation, mode },
        };
        let [first, second] = Self::BACKENDS;
        self.fixture
            .maps
            .apply(&[
                Self::backend(Self::OWN_BACKEND, &self.first_pod, port),
                MapOp::ListEntries { offset: Self::SLOTS, backends: vec![first, second] },
                MapOp::ListEntries { offset: Self::OWN_SLOT, backends: vec![Self::OWN_BACKEND] },
            ])
            .expect("writable");
        let turns = |pod: &NetnsFixture| Self::BACKENDS.map(|id| Self::backend(id, pod, port));
        let (ours, theirs) = (turns(&self.first_pod), turns(&self.second_pod));
        let mut maps = KernelMaps::open(&self.fixture.paths().pins()).expect("they are pinned");
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut generation = 0_u16;
                while !over.load(Ordering::Relaxed) {
                    let next = [generation.wrapping_add(1), generation.wrapping_add(2)];
                    generation = next[1];
                    let lists = [
                        state(Self::SLOTS, 2, next[0], RoutingMode::PickPod),
                        state(Self::OWN_SLOT, 1, next[1], RoutingMode::PickPod),
                    ];
                    for ops in [&ours[..], &lists[..], &theirs[..]] {
                        maps.apply(ops).expect("writable");
                    }
                }
            });
            let mut client = self.client.start_process();
            let seen = client.expect_step("storm 10.96.0.1:80 5000");
            over.store(true, Ordering::Relaxed);
            seen
        })
    }
}

#[test]
fn a_connect_never_reaches_the_service_that_its_backend_was_given_to_meanwhile() {
    let mut scene = ContendedServicesFixture::new();
    let service = *scene.fixture.maps.read_routes().unwrap().frontends.values().next().unwrap();
    let seen = scene.count_destinations(service, SERVING_PORT);
    assert!(seen.contains("one=") && !seen.contains("two="), "{seen}");
}

#[test]
fn a_connect_never_reaches_the_service_that_its_activator_was_given_to_meanwhile() {
    let mut scene = ContendedServicesFixture::new();
    let seen = scene.count_destinations(abi::ACTIVATORS_V4, 20_001);
    assert!(seen.contains("one=") && !seen.contains("two="), "{seen}");
}

#[test]
fn the_programs_are_replaced_in_place_and_resume_from_the_pins() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.register_pod(&pod, 0);
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    drop(bed.programs.take());
    assert_eq!(
        client.expect_step("connect 10.96.0.1:80"),
        "one 10.96.0.1:80",
        "pins hold without an agent"
    );
    client.send_step("hammer 10.96.0.1:80 500");
    for _ in 0..5 {
        let again = agent::kernel::programs::EbpfPrograms::load(bed.paths().clone()).unwrap();
        assert_eq!(again.keep_attached().unwrap(), 0);
        bed.programs = Some(again);
    }
    assert_eq!(client.read_answer(), Ok("one=500".into()));
    assert_eq!(bed.maps.read_routes().unwrap().frontends.len(), 2);
}

#[test]
fn the_canary_is_seen() {
    let mut bed = KernelFixture::new();
    let programs = bed.programs.take().unwrap();
    programs.verify_by_canary(&mut bed.maps).unwrap();
    // Without the links no program sees the canary's connect, and the canary reports that.
    std::fs::remove_dir_all(programs.pins().join("links")).unwrap();
    let missing = programs.verify_by_canary(&mut bed.maps).unwrap_err().to_string();
    assert!(missing.contains("connect went by"), "{missing}");
    std::fs::create_dir(programs.pins().join("links")).unwrap();
    assert_eq!(programs.keep_attached().unwrap(), 10);
    programs.verify_by_canary(&mut bed.maps).unwrap();
}

#[test]
fn the_programs_follow_cgroups_that_were_recreated() {
    let mut bed = KernelFixture::new();
    let programs = bed.programs.as_ref().expect("loaded with the bed");
    programs.verify_by_canary(&mut bed.maps).unwrap();
    assert_eq!(programs.keep_attached().unwrap(), 0);
    bed.recreate_cgroups();
    assert_eq!(programs.keep_attached().unwrap(), 10);
    assert_eq!(programs.keep_attached().unwrap(), 0);
    programs.verify_by_canary(&mut bed.maps).unwrap();
}

/// Upgrade like the one in [`crate::count`], for connects.
#[test]
fn connects_follow_the_old_tables_until_those_of_another_abi_are_filled() {
    let mut bed = KernelFixture::new();
    let (client, one, two) = (bed.add_client(), bed.add_pod(), bed.add_pod());
    let mut servers = [one.start_process(), two.start_process()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&one, 1);
    bed.apply_table();
    let mut client = client.start_process();
    client.send_step("hammer 10.96.0.1:80 2000");
    let version = bed.paths().version + 1;
    let places = agent::paths::AgentPaths { version, ..bed.paths().clone() };
    let mut programs = agent::kernel::programs::EbpfPrograms::load(places.clone()).unwrap();
    drop(bed.programs.take());
    assert_eq!(
        client.read_answer(),
        Ok("one=2000".into()),
        "nothing is known in the new tables yet"
    );
    let kept = client.expect_step("connect 10.96.0.1:80");
    assert_eq!(kept, "one 10.96.0.1:80");

    bed.continue_with_maps(agent::kernel::maps::KernelMaps::open(&places.pins()).unwrap());
    bed.table.pods.clear();
    bed.add_ready_pod(&two, 1);
    bed.apply_table();
    client.send_step("hammer 10.96.0.1:80 2000");
    programs.take_over().unwrap();
    let seen = client.read_answer().expect("no connect failed");
    let total: u32 =
        seen.split(' ').map(|one| one.split_once('=').unwrap().1.parse::<u32>().unwrap()).sum();
    assert_eq!(total, 2_000, "{seen}");
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    programs.verify_by_canary(&mut bed.maps).unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    bed.programs = Some(programs);
}

/// A second set of the same programs, with tables of its own, acts as a foreign socket load balancer, which routes
/// the service's address elsewhere. It is attached to a cgroup above the bed's, like Cilium's to the root.
#[test]
fn beside_another_socket_load_balancer_above_our_services_still_lead_to_our_pods() {
    let mut bed = KernelFixture::new();
    let (client, ours) = (bed.add_client(), bed.add_pod());
    let (theirs, third) = (bed.add_pod(), bed.add_pod());
    let mut servers = [ours.start_process(), theirs.start_process(), third.start_process()];
    for (server, name) in servers.iter_mut().zip(["ours", "theirs", "third"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&ours, 1);
    bed.apply_table();
    let mut client = client.start_process();

    // The foreign programs are attached last, so they run after the bed's.
    let mut other = bed.load_beside();
    other.add_service(1, Way::Direct);
    other.add_ready_pod(&theirs, 1);
    // A service that only the foreign programs have.
    other.add_service(2, Way::Direct);
    other.add_ready_pod(&third, 2);
    other.apply_table();
    let programs = bed.programs.as_ref().expect("loaded with the bed");
    assert_eq!(programs.foreign_programs().values().sum::<usize>(), 2, "both hooks are seen");
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.expect_step("hammer 10.96.0.2:80 20"), "third=20", "theirs stay theirs");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "ours [fd96::1]:80");

    // Now the other order: the bed's links are removed, and attached again after the foreign ones.
    std::fs::remove_dir_all(programs.pins().join("links")).unwrap();
    std::fs::create_dir(programs.pins().join("links")).unwrap();
    // A program leaves its cgroup a moment after its last pin is removed.
    while client.expect_step("hammer 10.96.0.1:80 20") != "theirs=20" {}
    assert_eq!(programs.keep_attached().unwrap(), 10);
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.expect_step("hammer 10.96.0.2:80 20"), "third=20");
    programs.verify_by_canary(&mut bed.maps).unwrap();
}

/// Attaches the same programs under the next version number beside the bed's, which act as the earlier version.
fn load_next_abi(bed: &mut KernelFixture) -> (AgentPaths, EbpfPrograms) {
    let version = bed.paths().version + 1;
    let places = AgentPaths { version, ..bed.paths().clone() };
    let programs = EbpfPrograms::load(places.clone()).expect("the kernel takes them");
    drop(bed.programs.take());
    (places, programs)
}

#[test]
fn what_failed_while_taking_over_from_another_abi_is_done_by_the_next_try() {
    let mut bed = KernelFixture::new();
    let (client, one, two) = (bed.add_client(), bed.add_pod(), bed.add_pod());
    let mut servers = [one.start_process(), two.start_process()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
    }
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&one, 1);
    bed.apply_table();
    let mut client = client.start_process();
    let old = bed.programs.as_ref().unwrap().pins().join("links");
    let (places, mut programs) = load_next_abi(&mut bed);
    bed.continue_with_maps(KernelMaps::open(&places.pins()).unwrap());
    bed.table.pods.clear();
    bed.add_ready_pod(&two, 1);
    bed.apply_table();

    // A directory cannot be unlinked like a file.
    std::fs::rename(old.join("connect4"), old.join("aside")).unwrap();
    std::fs::create_dir(old.join("connect4")).unwrap();
    programs.take_over().unwrap_err();
    std::fs::remove_dir(old.join("connect4")).unwrap();
    std::fs::rename(old.join("aside"), old.join("connect4")).unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 5"), "one=5", "the old tables still");

    // The retry may also come from a new agent.
    drop(programs);
    let mut programs = EbpfPrograms::load(places).unwrap();
    programs.take_over().unwrap();
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "two=20");
    bed.programs = Some(programs);
}

#[test]
fn a_socket_from_before_an_upgrade_shows_the_service_until_it_closes() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    client.expect_step("connect 10.96.0.1:80");
    let old = bed.programs.as_ref().unwrap().pins();
    let id = *bed.maps.read_routes().unwrap().backends.keys().next().unwrap();
    let (places, mut programs) = load_next_abi(&mut bed);
    programs.take_over().unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.expect_step("peer"), "10.96.0.1:80");
    assert!(!old.join("links/sockets").exists(), "it counts nothing any more");

    // A new agent continues with the outlived program.
    drop(programs);
    let mut programs = EbpfPrograms::load(places).unwrap();
    assert_eq!(programs.remove_outlived_pins(), 1);
    assert_eq!(client.expect_step("peer"), "10.96.0.1:80");
    client.expect_step("drop");
    assert_eq!(bed.maps.open_connections(id), 0, "the old gauge is left, too");
    assert_eq!(programs.remove_outlived_pins(), 0);
    assert!(!old.exists());
    bed.programs = Some(programs);
}

#[test]
fn a_socket_that_takes_ipv6_only_reaches_ipv4_pods_by_an_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway, pod) = (bed.add_client(), bed.add_client(), bed.add_pod());
    let mut servers = [gateway.start_process(), pod.start_process()];
    servers[0].expect_step("listen [::]:20001 activator");
    servers[1].expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    bed.add_activator(&gateway);
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("only6 [fd96::1]:80"), "activator [fd96::1]:80");
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
}

/// Programs without any of the newer helpers are those of the oldest kernel.
#[test]
fn without_newer_helpers_connects_are_led_and_refusals_are_not_permitted() {
    const EPERM: i32 = 1;
    let load = |places| {
        EbpfPrograms::load_with(programs::embedded_object(), places, VerifierFeatures::NONE)
    };
    let mut bed = KernelFixture::with_programs(load);
    let (client, pod) = (bed.add_client(), bed.add_pod());
    let mut server = pod.start_process();
    bed.register_pod(&pod, abi::POD_WIDEN_BIND);
    server.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} one"));
    assert_eq!(
        bed.maps.listener(pod.cookie, SERVING_PORT).unwrap().reachable,
        1,
        "its bind was seen"
    );
    bed.add_service(1, Way::Direct);
    bed.add_ready_pod(&pod, 1);
    bed.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    let services: Vec<u32> = bed.maps.read_routes().unwrap().frontends.values().copied().collect();
    for service in services {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        bed.maps.apply(&[MapOp::State { service_id: service, state }]).unwrap();
    }
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(EPERM));
    bed.programs.as_ref().unwrap().verify_by_canary(&mut bed.maps).unwrap();
}

#[test]
fn kernel_features_are_detected_by_trial() {
    let kernel = KernelVersion::current().expect("it has a version");
    let have = |major, minor| kernel >= KernelVersion::new(major, minor, 0);
    let found = VerifierFeatures::detect();
    // Debian's kernels have the features of their version, without backports.
    assert_eq!((found.set_retval, found.sock_ops_cookie), (have(5, 18), have(5, 15)));
    assert!(have(5, 19) || !found.mptcp_sock);
    // Kernels for small machines may be built without BTF.
    let is_described = Path::new("/sys/kernel/btf/vmlinux").exists();
    assert!(!have(6, 1) || !is_described || found.v6_only != SocketBit::default());
}
