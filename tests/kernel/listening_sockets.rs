//! Shell: listening sockets as the eBPF programs see them.

use std::os::fd::AsFd as _;

use agent::kernel::{features::VerifierFeatures, maps::KernelEventRing};
use aya::maps::{HashMap, Map, MapData};
use common::wire::ConnectionPath;
use datapath::abi::{self, SocketBit};

use crate::fixture::{KernelFixture, NetnsFixture, SERVING_PORT, SharedKernelFixture};

fn listener_count(fixture: &KernelFixture, pod: &NetnsFixture) -> u32 {
    fixture.maps.listener(pod.cookie, SERVING_PORT).expect("readable").reachable
}

fn read_events(events: &mut KernelEventRing) -> Vec<(u32, u32, u64)> {
    std::iter::from_fn(|| events.next())
        .map(|event| (event.kind, event.port_or_slot, event.netns_cookie))
        .collect()
}

#[test]
fn a_listen_and_its_close_are_reported_at_once() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut ring = KernelEventRing::open(&fixture.paths().pins()).unwrap();
    let _of_earlier_tests = read_events(&mut ring);
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    let port = u32::from(SERVING_PORT);
    assert_eq!(read_events(&mut ring), [(abi::EVENT_LISTEN, port, pod.cookie)]);
    let listener = fixture.maps.listener(pod.cookie, SERVING_PORT).unwrap();
    assert_eq!((listener.reachable, listener.widened, listener.loopback), (1, 0, 0));
    assert_ne!(listener.listening_since_ns, 0);
    server.expect_step("close");
    assert_eq!(read_events(&mut ring), [(abi::EVENT_LISTENER_CLOSED, port, pod.cookie)]);
    assert_eq!(listener_count(&fixture, &pod), 0);
}

#[test]
fn a_pod_listens_until_its_last_listener_closes() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let (mut old, mut new) = (pod.start_process(), pod.start_process());
    old.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} old reuseport"));
    new.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} new reuseport"));
    assert_eq!(listener_count(&fixture, &pod), 2);
    drop(old);
    assert_eq!(listener_count(&fixture, &pod), 1, "a reload never leaves the pod without listener");
    new.expect_step("close");
    assert_eq!(listener_count(&fixture, &pod), 0);
}

#[test]
fn a_listener_whose_second_bind_is_refused_counts_until_it_closes() {
    const EINVAL: i32 = 22;
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    assert_eq!(server.run_step("rebind 127.0.0.1:9090"), Err(EINVAL));
    assert_eq!(listener_count(&fixture, &pod), 1);
    server.expect_step("close");
    assert_eq!(listener_count(&fixture, &pod), 0);
}

#[test]
fn a_preforked_listener_is_one_and_lives_as_long_as_any_child() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    server.expect_step(&format!("prefork 0.0.0.0:{SERVING_PORT} many 3"));
    assert_eq!(listener_count(&fixture, &pod), 1);
    drop(server);
    assert_eq!(listener_count(&fixture, &pod), 1, "the children hold it");
}

#[test]
fn a_pod_that_listens_on_thousands_of_ports_hides_no_other_and_not_itself() {
    let mut fixture = KernelFixture::new();
    let (noisy_pod, quiet) = (fixture.add_pod(), fixture.add_pod());
    fixture.register_pod(&noisy_pod, 0);
    let (mut noise, mut server) = (noisy_pod.start_process(), quiet.start_process());
    // More ports than the whole map has entries.
    noise.expect_step("ports 20000 17000");
    let of_noisy = |fixture: &KernelFixture| {
        let keys = fixture.maps.listen_entries().expect("readable").into_keys();
        keys.filter(|key| key.netns_cookie == noisy_pod.cookie).count()
    };
    assert_eq!(of_noisy(&fixture), abi::LISTEN_PER_NAMESPACE as usize);
    let over_quota = 17_000 - u64::from(abi::LISTEN_PER_NAMESPACE);
    assert_eq!(fixture.maps.control_word(abi::CONTROL_LISTEN_OVER_QUOTA), over_quota);
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    assert_eq!(listener_count(&fixture, &quiet), 1);
    noise.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} noisy"));
    assert_eq!(listener_count(&fixture, &noisy_pod), 1, "its own serving port is recorded");
    assert_eq!(fixture.maps.control_word(abi::CONTROL_LISTEN_FULL), 0);
    // Forgotten listeners free their entries.
    for port in 20_000..20_008 {
        fixture.maps.delete_listener(noisy_pod.cookie, port).expect("writable");
    }
    fixture.maps.write_listener_counts().expect("writable");
    noise.expect_step("ports 40000 100");
    assert_eq!(of_noisy(&fixture), abi::LISTEN_PER_NAMESPACE as usize);
    fixture.maps.unregister(noisy_pod.cookie).expect("writable");
    noise.expect_step("ports 40000 100");
    assert_eq!(of_noisy(&fixture), abi::LISTEN_PER_NAMESPACE as usize, "its count began at 0");
}

/// More namespaces than a node can have, unless a pod creates them itself.
#[test]
fn a_namespace_beyond_those_that_are_counted_is_followed_without_a_bound_of_its_own() {
    const PORTS: u32 = 100;
    let mut fixture = KernelFixture::new();
    let pod = fixture.add_pod();
    let pin = fixture.paths().pins().join(abi::maps::LISTENERS);
    let map = Map::HashMap(MapData::from_pin(pin).expect("it is pinned"));
    let mut counts: HashMap<MapData, u64, u32> = map.try_into().expect("a hash of counts");
    let others = (1 << 60..).take_while(|cookie| counts.insert(cookie, 1, 0).is_ok()).count();
    assert_eq!(others, abi::LISTENERS_MAX as usize);
    let mut server = pod.start_process();
    let entries = |fixture: &KernelFixture| fixture.maps.listen_entries().expect("readable").len();
    server.expect_step(&format!("ports 20000 {PORTS}"));
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    assert_eq!((listener_count(&fixture, &pod), entries(&fixture)), (1, PORTS as usize + 1));
    let refusals = [abi::CONTROL_LISTEN_OVER_QUOTA, abi::CONTROL_LISTEN_FULL];
    assert_eq!(refusals.map(|word| fixture.maps.control_word(word)), [0, 0]);
    // Namespaces that no longer exist free their entries.
    fixture.maps.write_listener_counts().expect("writable");
    server.expect_step(&format!("ports 40000 {PORTS}"));
    assert_eq!(fixture.maps.control_word(abi::CONTROL_LISTEN_OVER_QUOTA), u64::from(PORTS));
}

#[test]
fn two_families_are_two_listeners() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    server.expect_step(&format!("listen {}:{SERVING_PORT} four", pod.ipv4()));
    server.expect_step(&format!("listen [{}]:{SERVING_PORT} six", pod.ipv6()));
    assert_eq!(listener_count(&fixture, &pod), 2);
    server.expect_step("close");
    assert_eq!(listener_count(&fixture, &pod), 1);
}

#[test]
fn a_wildcard_of_ipv6_takes_both_families_unless_its_program_asks_for_one() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    let mut families = |args: &str| {
        server.expect_step(&format!("listen {args}"));
        let families = fixture.maps.listener(pod.cookie, SERVING_PORT).unwrap().families;
        server.expect_step("close");
        families
    };
    let both = abi::SERVES_V4 | abi::SERVES_V6;
    // Without BTF of its sockets the program cannot read the option.
    let can_read_v6_only = VerifierFeatures::detect().v6_only != SocketBit::default();
    let v6_only = if can_read_v6_only { abi::SERVES_V6 } else { both };
    assert_eq!(families(&format!("[::]:{SERVING_PORT} six v6only")), v6_only);
    assert_eq!(families(&format!("[::]:{SERVING_PORT} both")), both);
    assert_eq!(families(&format!("0.0.0.0:{SERVING_PORT} four")), abi::SERVES_V4);
}

/// Method for kernels before 5.14.
#[test]
fn a_namespace_tells_its_cookie_by_a_listener_that_leaves_no_trace() {
    let mut fixture = SharedKernelFixture::new();
    let (server_pod, client) = (fixture.add_pod(), fixture.add_client());
    let cookies = agent::kernel::netns_cookies::NetnsCookies::new(fixture.paths());
    for pod in [&server_pod, &client] {
        let netns = std::fs::File::open(format!("/run/netns/{}", pod.netns)).unwrap();
        assert_eq!(cookies.find_by_listener(netns.as_fd()).unwrap(), pod.cookie);
    }
    let entries = fixture.maps.listen_entries().unwrap().into_keys();
    let own = [server_pod.cookie, client.cookie];
    assert_eq!(entries.filter(|key| own.contains(&key.netns_cookie)).count(), 0);
    let entries = std::fs::read_dir(&fixture.paths().pods).unwrap().flatten();
    let names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().contains("cookie")), "{names:?}");
}

#[test]
fn a_listen_while_the_agent_is_down_stands_in_the_map() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    drop(fixture.programs.take());
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    let programs = agent::kernel::programs::EbpfPrograms::load(fixture.paths().clone()).unwrap();
    let maps = agent::kernel::maps::KernelMaps::open(&programs.pins()).unwrap();
    assert_eq!(maps.listener(pod.cookie, SERVING_PORT).unwrap().reachable, 1);
    fixture.programs = Some(programs);
}

#[test]
fn a_full_ring_loses_events_and_nothing_else() {
    let mut fixture = KernelFixture::new();
    let pod = fixture.add_pod();
    let mut server = pod.start_process();
    // Each pair is two events of 32 bytes with their headers; the ring holds 2,048 of them.
    for _ in 0..1_100 {
        server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
        server.expect_step("close");
    }
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    assert!(fixture.maps.control_word(abi::CONTROL_DROPPED) > 0);
    assert_eq!(listener_count(&fixture, &pod), 1);
    let mut ring = KernelEventRing::open(&fixture.paths().pins()).unwrap();
    assert!(read_events(&mut ring).len() > 1_000);
}

#[test]
fn a_loopback_bind_of_the_serving_port_is_widened() {
    let mut fixture = SharedKernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    fixture.register_pod(&pod, abi::POD_WIDEN_BIND);
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut server = pod.start_process();
    assert_eq!(
        server.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} one")),
        format!("0.0.0.0:{SERVING_PORT}")
    );
    let listener = fixture.maps.listener(pod.cookie, SERVING_PORT).unwrap();
    assert_eq!((listener.reachable, listener.widened, listener.loopback), (1, 1, 0));
    assert_eq!(client.start_process().expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    server.expect_step("close");
    assert_eq!(
        server.expect_step(&format!("listen [::1]:{SERVING_PORT} six")),
        format!("[::]:{SERVING_PORT}")
    );
}

#[test]
fn workers_that_share_a_loopback_port_are_all_widened() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    fixture.register_pod(&pod, abi::POD_WIDEN_BIND);
    let (mut one, mut two) = (pod.start_process(), pod.start_process());
    let wide = format!("0.0.0.0:{SERVING_PORT}");
    assert_eq!(one.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} one reuseport")), wide);
    assert_eq!(two.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} two reuseport")), wide);
}

#[test]
fn both_loopbacks_one_after_the_other_do_not_collide() {
    let mut fixture = SharedKernelFixture::new();
    let pod = fixture.add_pod();
    fixture.register_pod(&pod, abi::POD_WIDEN_BIND);
    let mut server = pod.start_process();
    assert_eq!(
        server.expect_step(&format!("listen 127.0.0.1:{SERVING_PORT} four")),
        format!("0.0.0.0:{SERVING_PORT}")
    );
    // Not widened: `::` accepts IPv4 too, and would collide with the first listener.
    assert_eq!(
        server.expect_step(&format!("listen [::1]:{SERVING_PORT} six")),
        format!("[::1]:{SERVING_PORT}")
    );
    let listener = fixture.maps.listener(pod.cookie, SERVING_PORT).unwrap();
    assert_eq!((listener.reachable, listener.loopback), (1, 1));
}

#[test]
fn loopback_stays_loopback_where_widening_does_not_apply() {
    let mut fixture = SharedKernelFixture::new();
    let (unregistered_pod, unwidened_pod, widened_pod) =
        (fixture.add_pod(), fixture.add_pod(), fixture.add_pod());
    fixture.register_pod(&unwidened_pod, 0);
    fixture.register_pod(&widened_pod, abi::POD_WIDEN_BIND);
    let loopback = format!("127.0.0.1:{SERVING_PORT}");
    for pod in [&unregistered_pod, &unwidened_pod] {
        assert_eq!(pod.start_process().expect_step(&format!("listen {loopback} one")), loopback);
    }
    let mut server = widened_pod.start_process();
    // Another port, and a port that another listener holds on another address.
    assert_eq!(server.expect_step("listen 127.0.0.1:9090 admin"), "127.0.0.1:9090");
    server.expect_step(&format!("listen {}:{SERVING_PORT} other", widened_pod.ipv4()));
    assert_eq!(server.expect_step(&format!("listen {loopback} one")), loopback);
}
