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
    bed::{KernelFixture, NetnsFixture, SERVING, uid},
};

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

#[test]
fn a_connect_to_a_service_reaches_its_pod_and_shows_the_service() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    assert_eq!(client.must("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(client.must("connect [::ffff:10.96.0.1]:80"), "one [::ffff:10.96.0.1]:80");
    assert_eq!(client.must("connect [fd96::1]:80"), "one [fd96::1]:80");
    let direct = format!("{}:{SERVING}", pod.four());
    assert_eq!(client.must(&format!("connect {direct}")), format!("one {direct}"));
}

#[test]
fn an_ipv6_pod_serves_ipv6_clients() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen [::]:{SERVING} six"));
    bed.service(1, Way::Direct);
    bed.set(&pod, 1, RoutingPhase::Ready, pod.six());
    bed.plan();
    assert_eq!(client.actor().must("connect [fd96::1]:80"), "six [fd96::1]:80");
}

#[test]
fn an_unknown_address_is_left_alone() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    assert_eq!(client.ask("connect 10.96.0.9:80"), Err(EHOSTUNREACH));
    assert_eq!(client.ask("connect 10.96.0.1:81"), Err(EHOSTUNREACH));
}

#[test]
fn a_service_of_mode_refuse_is_refused() {
    let mut bed = KernelFixture::new();
    let client = bed.client();
    bed.service(1, Way::Direct);
    bed.plan();
    let service = *bed.maps.read_routes().unwrap().frontends.values().next().unwrap();
    for service in [service, service + 1] {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        bed.maps.apply(&[MapOp::State { service, state }]).unwrap();
    }
    let mut client = client.actor();
    assert_eq!(client.ask("connect 10.96.0.1:80"), Err(ECONNREFUSED));
    assert_eq!(client.ask("connect [fd96::1]:80"), Err(ECONNREFUSED));
}

#[test]
fn a_sleeping_service_leads_to_its_own_port_at_the_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway) = (bed.client(), bed.client());
    let mut activator = gateway.actor();
    activator.must("listen 0.0.0.0:20001 first");
    activator.must("listen [fd99::3]:20001 first6");
    activator.must("listen 0.0.0.0:20002 second");
    bed.activator(&gateway);
    bed.service(1, Way::Direct);
    bed.service(2, Way::Activator);
    bed.plan();
    let mut client = client.actor();
    assert_eq!(client.must("connect 10.96.0.1:80"), "first 10.96.0.1:80");
    assert_eq!(client.must("connect 10.96.0.2:80"), "second 10.96.0.2:80");
    assert_eq!(client.must("connect [fd96::1]:80"), "first6 [fd96::1]:80");
}

#[test]
fn activators_share_open_connections_evenly() {
    let mut bed = KernelFixture::new();
    let client = bed.client();
    let gateways = [bed.client(), bed.client()];
    let mut activators = gateways.each_ref().map(|gateway| gateway.actor());
    for (gateway, activator) in gateways.iter().zip(&mut activators) {
        activator.must(&format!("listen 0.0.0.0:20001 a{}", gateway.number));
        bed.activator(gateway);
    }
    bed.service(1, Way::Direct);
    bed.plan();
    let mut client = client.actor();
    let mut names: Vec<String> = (0..20).map(|_| client.must("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
}

#[test]
fn without_an_activator_the_connect_is_left_to_others() {
    let mut bed = KernelFixture::new();
    let client = bed.client();
    bed.service(1, Way::Direct);
    bed.plan();
    assert_eq!(client.actor().ask("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

#[test]
fn a_local_pod_without_listener_gives_way_to_its_sibling_and_then_to_the_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway) = (bed.client(), bed.client());
    let (one, two) = (bed.pod(), bed.pod());
    let mut activator = gateway.actor();
    activator.must("listen 0.0.0.0:20001 activator");
    bed.activator(&gateway);
    for pod in [&one, &two] {
        bed.register(pod, 0);
        bed.ready(pod, 1);
    }
    bed.service(1, Way::Direct);
    bed.plan();
    let (mut first, mut second) = (one.actor(), two.actor());
    let mut client = client.actor();
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "activator=20");
    assert_eq!(bed.maps.control_word(abi::CONTROL_FALLBACK), 20);
    first.must(&format!("listen 0.0.0.0:{SERVING} one"));
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "one=20");
    second.must(&format!("listen 0.0.0.0:{SERVING} two"));
    first.must("close");
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "two=20");
    drop(second);
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "activator=20");
}

#[test]
fn open_connections_are_shared_out_evenly() {
    let mut bed = KernelFixture::new();
    let client = bed.client();
    let pods = [bed.pod(), bed.pod()];
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.actor()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.must(&format!("listen 0.0.0.0:{SERVING} pod{}", pod.number));
        bed.ready(pod, 1);
    }
    bed.service(1, Way::Direct);
    bed.plan();
    let mut client = client.actor();
    let mut names: Vec<String> = (0..20).map(|_| client.must("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
    // The gauge counts open sockets, and decreases with them.
    let ids: Vec<u32> = bed.maps.read_routes().unwrap().backends.keys().copied().collect();
    let open =
        |bed: &KernelFixture| ids.iter().map(|id| bed.maps.open_connections(*id)).sum::<u64>();
    assert_eq!(open(&bed), 20);
    client.must("drop");
    assert_eq!(open(&bed), 0);
    client.must("connect 10.96.0.1:80");
    drop(client);
    assert_eq!(open(&bed), 0, "a killed client leaves the gauge too");
}

#[test]
fn where_a_connect_was_left_unanswered_later_ones_go_elsewhere() {
    let mut bed = KernelFixture::new();
    let (client, pod, lost) = (bed.pod(), bed.pod(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.ready(&pod, 1);
    bed.service(1, Way::Direct);
    // No host has this address.
    bed.set(&lost, 1, RoutingPhase::Ready, "10.99.0.250".to_owned());
    bed.plan();
    let mut client = client.actor();
    // The freer of the two pods is chosen, so one of the first two connects is sent there and times out.
    let first = [0, 1].map(|_| client.ask("connect 10.96.0.1:80"));
    assert!(first.contains(&Err(EHOSTUNREACH)), "{first:?}");
    assert_ne!(bed.maps.control_word(abi::CONTROL_UNANSWERED), 0);
    assert_eq!(client.must("hammer 10.96.0.1:80 50"), "one=50");
    // If it is the only pod, it is tried again.
    bed.set(&pod, 1, RoutingPhase::Draining, pod.four());
    bed.plan();
    assert_eq!(client.ask("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

#[test]
fn every_connect_under_a_hammering_writer_reaches_a_pod() {
    let mut bed = KernelFixture::new();
    let client = bed.client();
    let pods = [bed.pod(), bed.pod(), bed.pod()];
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.actor()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.must(&format!("listen 0.0.0.0:{SERVING} pod{}", pod.number));
    }
    bed.service(1, Way::Direct);
    bed.ready(&pods[0], 1);
    bed.plan();
    let mut client = client.actor();
    client.send("hammer 10.96.0.1:80 3000");
    for turn in 0..3_000 {
        bed.table.pods.remove(&uid(&pods[turn % 3]));
        bed.ready(&pods[(turn + 1) % 3], 1);
        bed.plan();
    }
    let seen = client.answer().expect("no connect failed");
    let total: u32 =
        seen.split(' ').map(|one| one.split_once('=').unwrap().1.parse::<u32>().unwrap()).sum();
    assert_eq!(total, 3_000, "{seen}");
}

/// Two services whose lists change as no agent would change them: freed backends are used by the other service at
/// once, without a quarantine.
struct ContendedServicesFixture {
    bed: KernelFixture,
    client: NetnsFixture,
    one: NetnsFixture,
    two: NetnsFixture,
    _servers: [ScriptedProcess; 2],
}

impl ContendedServicesFixture {
    /// Backends and slots in dispute; after each comes one that always belongs to service 1.
    const BACKENDS: [u32; 2] = [30_000, 30_001];
    const OWN_BACKEND: u32 = 30_002;
    const SLOTS: u32 = 100_000;
    const OWN_SLOT: u32 = 100_002;

    fn new() -> Self {
        let mut bed = KernelFixture::new();
        let (client, one, two) = (bed.client(), bed.pod(), bed.pod());
        let mut servers = [one.actor(), two.actor()];
        for (server, name) in servers.iter_mut().zip(["one", "two"]) {
            server.must(&format!("listen 0.0.0.0:{SERVING} {name}"));
            server.must(&format!("listen 0.0.0.0:20001 {name}"));
        }
        bed.service(1, Way::Direct);
        bed.plan();
        Self { bed, client, one, two, _servers: servers }
    }

    fn backend(id: u32, pod: &NetnsFixture, port: u16) -> MapOp {
        let address: std::net::Ipv4Addr = pod.four().parse().expect("an address");
        let address = address.to_ipv6_mapped().octets();
        let backend = BackendTarget { address, cookie: 0, slot: 0, port_be: port.to_be() };
        MapOp::Backend { id, backend }
    }

    /// Counts the destinations of service 1's connects while the list of the service `number` changes as fast as
    /// possible.
    fn storm(&mut self, number: u32, port: u16) -> String {
        let state = |offset, count, generation, mode| MapOp::State {
            service: number,
            state: SvcState { offset, count, generation, mode },
        };
        let [first, second] = Self::BACKENDS;
        self.bed
            .maps
            .apply(&[
                Self::backend(Self::OWN_BACKEND, &self.one, port),
                MapOp::Slots { offset: Self::SLOTS, backends: vec![first, second] },
                MapOp::Slots { offset: Self::OWN_SLOT, backends: vec![Self::OWN_BACKEND] },
            ])
            .expect("writable");
        let turns = |pod: &NetnsFixture| Self::BACKENDS.map(|id| Self::backend(id, pod, port));
        let (ours, theirs) = (turns(&self.one), turns(&self.two));
        let mut maps = KernelMaps::open(&self.bed.places().pins()).expect("they are pinned");
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
            let mut client = self.client.actor();
            let seen = client.must("storm 10.96.0.1:80 5000");
            over.store(true, Ordering::Relaxed);
            seen
        })
    }
}

#[test]
fn a_connect_never_reaches_the_service_that_its_backend_was_given_to_meanwhile() {
    let mut scene = ContendedServicesFixture::new();
    let service = *scene.bed.maps.read_routes().unwrap().frontends.values().next().unwrap();
    let seen = scene.storm(service, SERVING);
    assert!(seen.contains("one=") && !seen.contains("two="), "{seen}");
}

#[test]
fn a_connect_never_reaches_the_service_that_its_activator_was_given_to_meanwhile() {
    let mut scene = ContendedServicesFixture::new();
    let seen = scene.storm(abi::ACTIVATORS_V4, 20_001);
    assert!(seen.contains("one=") && !seen.contains("two="), "{seen}");
}

#[test]
fn the_programs_are_replaced_in_place_and_resume_from_the_pins() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.register(&pod, 0);
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    drop(bed.programs.take());
    assert_eq!(
        client.must("connect 10.96.0.1:80"),
        "one 10.96.0.1:80",
        "pins hold without an agent"
    );
    client.send("hammer 10.96.0.1:80 500");
    for _ in 0..5 {
        let again = agent::kernel::programs::EbpfPrograms::load(bed.places().clone()).unwrap();
        assert_eq!(again.keep_attached().unwrap(), 0);
        bed.programs = Some(again);
    }
    assert_eq!(client.answer(), Ok("one=500".into()));
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
    let (client, one, two) = (bed.client(), bed.pod(), bed.pod());
    let mut servers = [one.actor(), two.actor()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.must(&format!("listen 0.0.0.0:{SERVING} {name}"));
    }
    bed.service(1, Way::Direct);
    bed.ready(&one, 1);
    bed.plan();
    let mut client = client.actor();
    client.send("hammer 10.96.0.1:80 2000");
    let version = bed.places().version + 1;
    let places = agent::paths::AgentPaths { version, ..bed.places().clone() };
    let mut programs = agent::kernel::programs::EbpfPrograms::load(places.clone()).unwrap();
    drop(bed.programs.take());
    assert_eq!(client.answer(), Ok("one=2000".into()), "nothing is known in the new tables yet");
    let kept = client.must("connect 10.96.0.1:80");
    assert_eq!(kept, "one 10.96.0.1:80");

    bed.continue_with_maps(agent::kernel::maps::KernelMaps::open(&places.pins()).unwrap());
    bed.table.pods.clear();
    bed.ready(&two, 1);
    bed.plan();
    client.send("hammer 10.96.0.1:80 2000");
    programs.take_over().unwrap();
    let seen = client.answer().expect("no connect failed");
    let total: u32 =
        seen.split(' ').map(|one| one.split_once('=').unwrap().1.parse::<u32>().unwrap()).sum();
    assert_eq!(total, 2_000, "{seen}");
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "two=20");
    programs.verify_by_canary(&mut bed.maps).unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "two=20");
    bed.programs = Some(programs);
}

/// A second set of the same programs, with tables of its own, acts as a foreign socket load balancer, which routes
/// the service's address elsewhere. It is attached to a cgroup above the bed's, like Cilium's to the root.
#[test]
fn beside_another_socket_load_balancer_above_our_services_still_lead_to_our_pods() {
    let mut bed = KernelFixture::new();
    let (client, ours) = (bed.client(), bed.pod());
    let (theirs, third) = (bed.pod(), bed.pod());
    let mut servers = [ours.actor(), theirs.actor(), third.actor()];
    for (server, name) in servers.iter_mut().zip(["ours", "theirs", "third"]) {
        server.must(&format!("listen 0.0.0.0:{SERVING} {name}"));
    }
    bed.service(1, Way::Direct);
    bed.ready(&ours, 1);
    bed.plan();
    let mut client = client.actor();

    // The foreign programs are attached last, so they run after the bed's.
    let mut other = bed.beside();
    other.service(1, Way::Direct);
    other.ready(&theirs, 1);
    // A service that only the foreign programs have.
    other.service(2, Way::Direct);
    other.ready(&third, 2);
    other.plan();
    let programs = bed.programs.as_ref().expect("loaded with the bed");
    assert_eq!(programs.foreign_programs().values().sum::<usize>(), 2, "both hooks are seen");
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.must("hammer 10.96.0.2:80 20"), "third=20", "theirs stay theirs");
    assert_eq!(client.must("connect [fd96::1]:80"), "ours [fd96::1]:80");

    // Now the other order: the bed's links are removed, and attached again after the foreign ones.
    std::fs::remove_dir_all(programs.pins().join("links")).unwrap();
    std::fs::create_dir(programs.pins().join("links")).unwrap();
    // A program leaves its cgroup a moment after its last pin is removed.
    while client.must("hammer 10.96.0.1:80 20") != "theirs=20" {}
    assert_eq!(programs.keep_attached().unwrap(), 10);
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "ours=20");
    assert_eq!(client.must("hammer 10.96.0.2:80 20"), "third=20");
    programs.verify_by_canary(&mut bed.maps).unwrap();
}

/// Attaches the same programs under the next version number beside the bed's, which act as the earlier version.
fn upgrade(bed: &mut KernelFixture) -> (AgentPaths, EbpfPrograms) {
    let version = bed.places().version + 1;
    let places = AgentPaths { version, ..bed.places().clone() };
    let programs = EbpfPrograms::load(places.clone()).expect("the kernel takes them");
    drop(bed.programs.take());
    (places, programs)
}

#[test]
fn what_failed_while_taking_over_from_another_abi_is_done_by_the_next_try() {
    let mut bed = KernelFixture::new();
    let (client, one, two) = (bed.client(), bed.pod(), bed.pod());
    let mut servers = [one.actor(), two.actor()];
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        server.must(&format!("listen 0.0.0.0:{SERVING} {name}"));
    }
    bed.service(1, Way::Direct);
    bed.ready(&one, 1);
    bed.plan();
    let mut client = client.actor();
    let old = bed.programs.as_ref().unwrap().pins().join("links");
    let (places, mut programs) = upgrade(&mut bed);
    bed.continue_with_maps(KernelMaps::open(&places.pins()).unwrap());
    bed.table.pods.clear();
    bed.ready(&two, 1);
    bed.plan();

    // A directory cannot be unlinked like a file.
    std::fs::rename(old.join("connect4"), old.join("aside")).unwrap();
    std::fs::create_dir(old.join("connect4")).unwrap();
    programs.take_over().unwrap_err();
    std::fs::remove_dir(old.join("connect4")).unwrap();
    std::fs::rename(old.join("aside"), old.join("connect4")).unwrap();
    assert_eq!(client.must("hammer 10.96.0.1:80 5"), "one=5", "the old tables still");

    // The retry may also come from a new agent.
    drop(programs);
    let mut programs = EbpfPrograms::load(places).unwrap();
    programs.take_over().unwrap();
    assert_eq!(client.must("hammer 10.96.0.1:80 20"), "two=20");
    bed.programs = Some(programs);
}

#[test]
fn a_socket_from_before_an_upgrade_shows_the_service_until_it_closes() {
    let mut bed = KernelFixture::new();
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    server.must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    client.must("connect 10.96.0.1:80");
    let old = bed.programs.as_ref().unwrap().pins();
    let id = *bed.maps.read_routes().unwrap().backends.keys().next().unwrap();
    let (places, mut programs) = upgrade(&mut bed);
    programs.take_over().unwrap();
    programs.retire_previous().unwrap();
    assert_eq!(client.must("peer"), "10.96.0.1:80");
    assert!(!old.join("links/sockets").exists(), "it counts nothing any more");

    // A new agent continues with the outlived program.
    drop(programs);
    let mut programs = EbpfPrograms::load(places).unwrap();
    assert_eq!(programs.remove_outlived_pins(), 1);
    assert_eq!(client.must("peer"), "10.96.0.1:80");
    client.must("drop");
    assert_eq!(bed.maps.open_connections(id), 0, "the old gauge is left, too");
    assert_eq!(programs.remove_outlived_pins(), 0);
    assert!(!old.exists());
    bed.programs = Some(programs);
}

#[test]
fn a_socket_that_takes_ipv6_only_reaches_ipv4_pods_by_an_activator() {
    let mut bed = KernelFixture::new();
    let (client, gateway, pod) = (bed.client(), bed.client(), bed.pod());
    let mut servers = [gateway.actor(), pod.actor()];
    servers[0].must("listen [::]:20001 activator");
    servers[1].must(&format!("listen 0.0.0.0:{SERVING} one"));
    bed.activator(&gateway);
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    assert_eq!(client.must("only6 [fd96::1]:80"), "activator [fd96::1]:80");
    assert_eq!(client.must("connect 10.96.0.1:80"), "one 10.96.0.1:80");
}

/// Programs without any of the newer helpers are those of the oldest kernel.
#[test]
fn without_newer_helpers_connects_are_led_and_refusals_are_not_permitted() {
    const EPERM: i32 = 1;
    let load = |places| {
        EbpfPrograms::load_with(programs::embedded_object(), places, VerifierFeatures::NONE)
    };
    let mut bed = KernelFixture::with(load);
    let (client, pod) = (bed.client(), bed.pod());
    let mut server = pod.actor();
    bed.register(&pod, abi::POD_WIDEN_BIND);
    server.must(&format!("listen 127.0.0.1:{SERVING} one"));
    assert_eq!(bed.maps.listener(pod.cookie, SERVING).unwrap().reachable, 1, "its bind was seen");
    bed.service(1, Way::Direct);
    bed.ready(&pod, 1);
    bed.plan();
    let mut client = client.actor();
    assert_eq!(client.must("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    let services: Vec<u32> = bed.maps.read_routes().unwrap().frontends.values().copied().collect();
    for service in services {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        bed.maps.apply(&[MapOp::State { service, state }]).unwrap();
    }
    assert_eq!(client.ask("connect 10.96.0.1:80"), Err(EPERM));
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
