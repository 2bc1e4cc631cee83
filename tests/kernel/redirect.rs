//! Shell: connects to the addresses of services.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agent::kernel::{
    features::VerifierFeatures,
    map_op::{BackendTarget, MapOp},
    maps::KernelMaps,
    programs,
};
use aya::VerifierLogLevel;
use common::wire::{ConnectionPath, RoutingPhase};
use datapath::{
    abi::{self, SocketBit, TaskFlag},
    load_balancing::{RoutingMode, SvcState},
};

use crate::{
    fixture::{
        KernelFixture, NetnsFixture, SERVING_PORT, SharedKernelFixture, create_cgroups, pod_uid,
        tcp_refusal_errno,
    },
    scripted_process::{ScriptedProcess, parse_counts},
    verifier::load_program,
};

const EHOSTUNREACH: i32 = 113;

#[test]
fn a_connect_to_a_service_reaches_its_pod_and_shows_the_service() {
    let mut fixture = SharedKernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(client.expect_step("connect [::ffff:10.96.0.1]:80"), "one [::ffff:10.96.0.1]:80");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "one [fd96::1]:80");
    let direct = format!("{}:{SERVING_PORT}", pod.ipv4());
    assert_eq!(client.expect_step(&format!("connect {direct}")), format!("one {direct}"));
}

#[test]
fn an_ipv6_pod_serves_ipv6_clients() {
    let mut fixture = SharedKernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen [::]:{SERVING_PORT} six"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.set_pod(&pod, 1, RoutingPhase::Ready, pod.ipv6());
    fixture.apply_table();
    assert_eq!(client.start_process().expect_step("connect [fd96::1]:80"), "six [fd96::1]:80");
}

#[test]
fn an_unknown_address_is_left_alone() {
    let mut fixture = SharedKernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.run_step("connect 10.96.0.9:80"), Err(EHOSTUNREACH));
    assert_eq!(client.run_step("connect 10.96.0.1:81"), Err(EHOSTUNREACH));
}

#[test]
fn a_service_of_mode_refuse_is_refused() {
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.apply_table();
    let frontends = fixture.maps.read_routes().unwrap().frontends;
    assert_eq!(frontends.len(), 2, "one of each family");
    for service_id in frontends.into_values() {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        fixture.maps.apply(&[MapOp::State { service_id, state }]).unwrap();
    }
    let mut client = client.start_process();
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(tcp_refusal_errno()));
    assert_eq!(client.run_step("connect [fd96::1]:80"), Err(tcp_refusal_errno()));
}

#[test]
fn a_sleeping_service_leads_to_its_own_port_at_the_activator() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator_netns) = (fixture.add_client(), fixture.add_client());
    let mut activator = activator_netns.start_process();
    activator.expect_step("listen 0.0.0.0:20001 first");
    activator.expect_step(&format!("listen [{}]:20001 first6", activator_netns.ipv6()));
    activator.expect_step("listen 0.0.0.0:20002 second");
    fixture.add_activator(&activator_netns);
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_service(2, ConnectionPath::Activator);
    fixture.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "first 10.96.0.1:80");
    assert_eq!(client.expect_step("connect 10.96.0.2:80"), "second 10.96.0.2:80");
    assert_eq!(client.expect_step("connect [fd96::1]:80"), "first6 [fd96::1]:80");
}

#[test]
fn activators_share_open_connections_evenly() {
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    let namespaces = [fixture.add_client(), fixture.add_client()];
    let mut activators = namespaces.each_ref().map(|netns| netns.start_process());
    for (netns, activator) in namespaces.iter().zip(&mut activators) {
        activator.expect_step(&format!("listen 0.0.0.0:20001 a{}", netns.number));
        fixture.add_activator(netns);
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.apply_table();
    let mut client = client.start_process();
    let mut names: Vec<String> =
        (0..20).map(|_| client.expect_step("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
}

#[test]
fn without_an_activator_the_connect_is_left_to_others() {
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.apply_table();
    assert_eq!(client.start_process().run_step("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

#[test]
fn a_local_pod_without_listener_gives_way_to_its_sibling_and_then_to_the_activator() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator_netns) = (fixture.add_client(), fixture.add_client());
    let (first_pod, second_pod) = (fixture.add_pod(), fixture.add_pod());
    let mut activator = activator_netns.start_process();
    activator.expect_step("listen 0.0.0.0:20001 activator");
    fixture.add_activator(&activator_netns);
    for pod in [&first_pod, &second_pod] {
        fixture.register_pod(pod, 0);
        fixture.add_ready_pod(pod, 1);
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.apply_table();
    let (mut first, mut second) = (first_pod.start_process(), second_pod.start_process());
    let mut client = client.start_process();
    let fallbacks = fixture.maps.control_word(abi::CONTROL_FALLBACK);
    assert_eq!(client.expect_step("hammer 10.96.0.1:80 20"), "activator=20");
    assert_eq!(fixture.maps.control_word(abi::CONTROL_FALLBACK) - fallbacks, 20);
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
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    let pods = [fixture.add_pod(), fixture.add_pod()];
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.start_process()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{}", pod.number));
        fixture.add_ready_pod(pod, 1);
    }
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.apply_table();
    let mut client = client.start_process();
    let mut names: Vec<String> =
        (0..20).map(|_| client.expect_step("connect 10.96.0.1:80")).collect();
    names.sort();
    assert_eq!(names.iter().filter(|name| **name == names[0]).count(), 10, "{names:?}");
    // The gauge counts open sockets, and decreases with them.
    let ids: Vec<u32> = fixture.maps.read_routes().unwrap().backends.keys().copied().collect();
    let open = |fixture: &KernelFixture| {
        ids.iter().map(|id| fixture.maps.open_connections(*id)).sum::<u64>()
    };
    assert_eq!(open(&fixture), 20);
    client.expect_step("drop");
    assert_eq!(open(&fixture), 0);
    client.expect_step("connect 10.96.0.1:80");
    drop(client);
    assert_eq!(open(&fixture), 0, "a killed client leaves the gauge too");
}

/// Waits until no backend is avoided that was left unanswered by now.
#[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
fn wait_until_none_is_avoided() {
    std::thread::sleep(Duration::from_nanos(abi::AVOID_UNANSWERED_NS));
}

#[test]
fn where_a_connect_was_left_unanswered_later_ones_go_elsewhere() {
    let mut fixture = SharedKernelFixture::new();
    let (client, pod, unreachable_pod) = (fixture.add_pod(), fixture.add_pod(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_ready_pod(&pod, 1);
    fixture.add_service(1, ConnectionPath::Direct);
    // No host has this address.
    fixture.set_pod(&unreachable_pod, 1, RoutingPhase::Ready, "10.99.0.250".to_owned());
    fixture.apply_table();
    let mut client = client.start_process();
    let (mut outcomes, is_avoided) = (Vec::new(), |it: &String| it == "one=50");
    // On a busy machine the connects may take longer than the pod is avoided, or the other pod may answer a SYN late.
    while outcomes.len() < 5 && !outcomes.iter().any(is_avoided) {
        if !outcomes.is_empty() {
            wait_until_none_is_avoided();
        }
        let unanswered = fixture.maps.control_word(abi::CONTROL_UNANSWERED);
        // The freer of the two pods is chosen, so one of the first two connects is sent there and times out.
        let first = [0, 1].map(|_| client.run_step("connect 10.96.0.1:80"));
        assert!(first.contains(&Err(EHOSTUNREACH)), "{first:?}");
        assert_ne!(fixture.maps.control_word(abi::CONTROL_UNANSWERED), unanswered);
        outcomes.push(client.expect_step("storm 10.96.0.1:80 50"));
    }
    assert!(outcomes.iter().any(is_avoided), "{outcomes:?}");
    // If it is the only pod, it is tried again.
    fixture.set_pod(&pod, 1, RoutingPhase::Draining, pod.ipv4());
    fixture.apply_table();
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(EHOSTUNREACH));
}

/// Replaces one of `ready_count` ready pods at each of 3,000 plans, while a client connects as often.
fn connect_while_pods_change(ready_count: usize) {
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    let pods: Vec<_> = (0..ready_count + 2).map(|_| fixture.add_pod()).collect();
    let mut servers: Vec<_> = pods.iter().map(|pod| pod.start_process()).collect();
    for (pod, server) in pods.iter().zip(&mut servers) {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{}", pod.number));
    }
    fixture.add_service(1, ConnectionPath::Direct);
    pods[..ready_count].iter().for_each(|pod| fixture.add_ready_pod(pod, 1));
    fixture.apply_table();
    let mut client = client.start_process();
    client.send_step("hammer 10.96.0.1:80 3000");
    for turn in 0..3_000 {
        fixture.table.pods.remove(&pod_uid(&pods[turn % pods.len()]));
        fixture.add_ready_pod(&pods[(turn + ready_count) % pods.len()], 1);
        fixture.apply_table();
    }
    let reply = client.read_reply().expect("no connect failed");
    assert_eq!(parse_counts(&reply).values().sum::<u32>(), 3_000, "{reply}");
}

#[test]
fn every_connect_under_a_hammering_writer_reaches_a_pod() {
    connect_while_pods_change(1);
}

/// Longer lists change in place.
#[test]
fn every_connect_under_a_writer_that_edits_lists_reaches_a_pod() {
    connect_while_pods_change(3);
}

/// Two services whose lists change as no agent would change them: freed backends are used by the other service at
/// once, without a quarantine.
struct ContendedServicesFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    _servers: [ScriptedProcess; 2],
    kernel: SharedKernelFixture,
    client: NetnsFixture,
    first_pod: NetnsFixture,
    second_pod: NetnsFixture,
}

impl ContendedServicesFixture {
    /// Backends and slots in dispute; after each comes one that always belongs to service 1.
    const BACKENDS: [u32; 2] = [30_000, 30_001];
    const OWN_BACKEND: u32 = 30_002;
    const SLOTS: u32 = 100_000;
    const OWN_SLOT: u32 = 100_002;

    fn new() -> Self {
        let mut kernel = SharedKernelFixture::new();
        let (client, first_pod, second_pod) =
            (kernel.add_client(), kernel.add_pod(), kernel.add_pod());
        let mut servers = [first_pod.start_process(), second_pod.start_process()];
        for (server, name) in servers.iter_mut().zip(["one", "two"]) {
            server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} {name}"));
            server.expect_step(&format!("listen 0.0.0.0:20001 {name}"));
        }
        kernel.add_service(1, ConnectionPath::Direct);
        kernel.apply_table();
        Self { _servers: servers, kernel, client, first_pod, second_pod }
    }

    fn backend(id: u32, pod: &NetnsFixture, port: u16) -> MapOp {
        let address: std::net::Ipv4Addr = pod.ipv4().parse().expect("an address");
        let address = address.to_ipv6_mapped().octets();
        let backend = BackendTarget { address, cookie: 0, slot: 0, port_be: port.to_be() };
        MapOp::Backend { id, backend }
    }

    /// Counts the destinations of service 1's connects while the list of the service `service` changes as fast as
    /// possible.
    fn count_destinations(&mut self, service: u32, port: u16) -> String {
        let state = |offset, count, generation, mode| MapOp::State {
            service_id: service,
            state: SvcState { offset, count, generation, mode },
        };
        let [first, second] = Self::BACKENDS;
        self.kernel
            .maps
            .apply(&[
                Self::backend(Self::OWN_BACKEND, &self.first_pod, port),
                MapOp::ListEntries { offset: Self::SLOTS, backends: vec![first, second] },
                MapOp::ListEntries { offset: Self::OWN_SLOT, backends: vec![Self::OWN_BACKEND] },
            ])
            .expect("writable");
        let backends = |pod: &NetnsFixture| Self::BACKENDS.map(|id| Self::backend(id, pod, port));
        let (first_backends, second_backends) =
            (backends(&self.first_pod), backends(&self.second_pod));
        let mut maps = KernelMaps::open(&self.kernel.paths().pins()).expect("they are pinned");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut generation = 0_u16;
                while !is_over.load(Ordering::Relaxed) {
                    let next = [generation.wrapping_add(1), generation.wrapping_add(2)];
                    generation = next[1];
                    let lists = [
                        state(Self::SLOTS, 2, next[0], RoutingMode::PickBackend),
                        state(Self::OWN_SLOT, 1, next[1], RoutingMode::PickBackend),
                    ];
                    for ops in [&first_backends[..], &lists[..], &second_backends[..]] {
                        maps.apply(ops).expect("writable");
                    }
                }
            });
            let mut client = self.client.start_process();
            let reply = client.expect_step("storm 10.96.0.1:80 5000");
            is_over.store(true, Ordering::Relaxed);
            reply
        })
    }
}

#[test]
fn a_connect_never_reaches_the_service_that_its_backend_was_given_to_meanwhile() {
    let mut fixture = ContendedServicesFixture::new();
    let service = *fixture.kernel.maps.read_routes().unwrap().frontends.values().next().unwrap();
    let destinations = fixture.count_destinations(service, SERVING_PORT);
    assert!(destinations.contains("one=") && !destinations.contains("two="), "{destinations}");
}

#[test]
fn a_connect_never_reaches_the_service_that_its_activator_was_given_to_meanwhile() {
    let mut fixture = ContendedServicesFixture::new();
    let destinations = fixture.count_destinations(abi::ACTIVATORS_V4, 20_001);
    assert!(destinations.contains("one=") && !destinations.contains("two="), "{destinations}");
}

#[test]
fn a_socket_that_takes_ipv6_only_reaches_ipv4_pods_by_an_activator() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator_netns, pod) =
        (fixture.add_client(), fixture.add_client(), fixture.add_pod());
    let mut servers = [activator_netns.start_process(), pod.start_process()];
    servers[0].expect_step("listen [::]:20001 activator");
    servers[1].expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_activator(&activator_netns);
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("only6 [fd96::1]:80"), "activator [fd96::1]:80");
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
}

/// Programs without any of the newer helpers are those of the oldest kernel.
#[test]
fn without_newer_helpers_connects_are_led_and_refusals_are_not_permitted() {
    const EPERM: i32 = 1;
    let mut fixture = KernelFixture::with_features(VerifierFeatures::NONE);
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    fixture.register_pod(&pod, abi::POD_WIDEN_BIND);
    server.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} one"));
    assert_eq!(
        fixture.maps.listener(pod.cookie, SERVING_PORT).unwrap().reachable,
        1,
        "its bind was seen"
    );
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut client = client.start_process();
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    let services: Vec<u32> =
        fixture.maps.read_routes().unwrap().frontends.values().copied().collect();
    for service in services {
        let state = SvcState { offset: 0, count: 0, generation: 9, mode: RoutingMode::Refuse };
        fixture.maps.apply(&[MapOp::State { service_id: service, state }]).unwrap();
    }
    assert_eq!(client.run_step("connect 10.96.0.1:80"), Err(EPERM));
    fixture.programs.as_ref().unwrap().verify_by_self_test(&mut fixture.maps).unwrap();
}

/// Returns true if the running kernel takes this program as it is for a kernel with these features. Then it calls
/// helpers that older kernels lack.
fn is_accepted(name: &str, features: VerifierFeatures) -> bool {
    let (paths, _guard) = create_cgroups();
    let (object, log) = (programs::embedded_object(), VerifierLogLevel::default());
    let opened = programs::open_unloaded(object, &paths, features, log);
    let mut opened = opened.expect("the maps can be made");
    load_program(opened.program_mut(name).expect("it is part of the object")).is_ok()
}

/// A feature is there where the programs load that use it, whatever the kernel's version is: distributions backport
/// helpers and leave some out.
#[test]
fn kernel_features_are_detected_by_trial() {
    const NONE: VerifierFeatures = VerifierFeatures::NONE;
    for name in ["connect4", "sockets", "ingress"] {
        assert!(is_accepted(name, NONE), "{name} needs none");
    }
    let detected = VerifierFeatures::detect();
    let retval = VerifierFeatures { set_retval: true, ..NONE };
    assert_eq!(detected.set_retval, is_accepted("connect4", retval));
    let cookie = VerifierFeatures { sock_ops_netns_cookie: true, ..NONE };
    assert_eq!(detected.sock_ops_netns_cookie, is_accepted("sockets", cookie));
    // Only on kernels with cookies in sock_ops does the program look at packets of a connection that opens.
    let packet_cookie = VerifierFeatures { packet_netns_cookie: true, ..cookie };
    assert_eq!(detected.packet_netns_cookie, is_accepted("ingress", packet_cookie));
    let mptcp = VerifierFeatures { mptcp_sock: true, ..NONE };
    assert_eq!(detected.mptcp_sock, is_accepted("connect4", mptcp));
    // Kernels for small machines may be built without BTF, which names bit and flag.
    let is_described = Path::new("/sys/kernel/btf/vmlinux").exists();
    let v6_only = VerifierFeatures { v6_only: SocketBit { byte_index: 0, mask: 1 }, ..NONE };
    let reads_sockets = is_described && is_accepted("sockets", v6_only);
    assert_eq!(detected.v6_only != SocketBit::default(), reads_sockets);
    let flag = TaskFlag { mask: abi::KERNEL_THREAD_FLAG, ..TaskFlag::default() };
    let kernel_thread = VerifierFeatures { kernel_thread: flag, ..NONE };
    let reads_tasks = is_described && is_accepted("connect4", kernel_thread);
    assert_eq!(detected.kernel_thread != TaskFlag::default(), reads_tasks);
}
