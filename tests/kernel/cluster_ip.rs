//! Shell: connects to the ClusterIPs of Services of the cluster: random choice, affinity, refusal.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    num::NonZeroU16,
    thread,
    time::{Duration, Instant},
};

use agent::{
    config::ClusterIpMode,
    kernel::features::VerifierFeatures,
    routes::plan::{ClusterChange, ClusterResource, ObservedService, ObservedSlice},
};
use aya::maps::{Array, HashMap, Map, MapData};
use common::{
    service_routing::{
        AddressFamily, ClusterIpPort, ClusterIpService, ServiceEndpoint, ServiceSlice,
        ServiceSlicePort, TransportProtocol,
    },
    wire::NamespacedName,
};
use datapath::abi::{self, AffinityKey, AffinityValue, BoundConnect, BoundConnectKey};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

use crate::{
    fixture::{KernelFixture, NetnsFixture, SERVING_PORT, SharedKernelFixture, tcp_refusal_errno},
    scripted_process::{ScriptedProcess, parse_counts},
};

/// Result of a connect to a ClusterIP that goes on unchanged, by the fixture's route.
const EHOSTUNREACH: i32 = 113;
/// Result of a connect from a local port that another connection to the same address has.
const EADDRNOTAVAIL: i32 = 99;
/// Flag of nearly all processes, `PF_RANDOMIZE`: their addresses are randomized. It stands for that of kernel threads, as
/// none connects in these tests.
pub(crate) const RANDOMIZED_FLAG: u32 = 0x0040_0000;
/// ClusterIP of the Service.
const CLUSTER_IP: &str = "10.96.0.9";
/// ClusterIP of another Service, which some tests have.
const OTHER_CLUSTER_IP: &str = "10.96.0.8";
/// Affinity timeout, which no test reaches.
const AFFINITY: Duration = Duration::from_secs(3_600);

/// A Service with these pods as its endpoints.
struct ClusterIpFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    _servers: Vec<ScriptedProcess>,
    kernel: SharedKernelFixture,
    clients: [NetnsFixture; 2],
    pods: Vec<NetnsFixture>,
}

impl ClusterIpFixture {
    fn new(pod_count: usize, affinity_timeout: Option<Duration>) -> Self {
        Self::with_kernel(SharedKernelFixture::new(), pod_count, affinity_timeout)
    }

    fn with_kernel(
        mut kernel: SharedKernelFixture,
        pod_count: usize,
        affinity_timeout: Option<Duration>,
    ) -> Self {
        kernel.serve_cluster_services(ClusterIpMode::All);
        let clients = [kernel.add_client(), kernel.add_client()];
        let pods: Vec<_> = (0..pod_count).map(|_| kernel.add_pod()).collect();
        let serve = |pod: &NetnsFixture| {
            let mut server = pod.start_process();
            server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{}", pod.number));
            server
        };
        let servers = pods.iter().map(serve).collect();
        let service = observed_service(CLUSTER_IP, affinity_timeout);
        let mut fixture = Self { _servers: servers, kernel, clients, pods };
        let mut changes = ClusterResource::ALL.map(ClusterChange::ListBegun).to_vec();
        changes.push(ClusterChange::Service(service_name(), Some(service)));
        changes.extend(ClusterResource::ALL.map(ClusterChange::ListCompleted));
        fixture.kernel.observe_cluster(changes);
        fixture.set_endpoints(&(0..pod_count).collect::<Vec<_>>());
        fixture
    }

    /// Makes the pods with these indexes the endpoints.
    fn set_endpoints(&mut self, pods: &[usize]) {
        let address = |index: &usize| self.pods[*index].ipv4().parse().expect("an address");
        let slice = observed_slice(service_name(), pods.iter().map(address));
        let name = NamespacedName::new("default", "plain-1");
        self.kernel.observe_cluster(vec![ClusterChange::Slice(name, Some(slice))]);
    }

    /// Adds another Service, which leads to the first pod as well.
    fn add_other_service(&mut self) {
        let name = NamespacedName::new("default", "other");
        let service = observed_service(OTHER_CLUSTER_IP, None);
        let address = self.pods[0].ipv4().parse().expect("an address");
        let slice = observed_slice(name.clone(), [address]);
        self.kernel.observe_cluster(vec![
            ClusterChange::Service(name, Some(service)),
            ClusterChange::Slice(NamespacedName::new("default", "other-1"), Some(slice)),
        ]);
    }

    /// Returns the result of a connect to a ClusterIP that leads to the first pod.
    fn led_to_first_pod(&self, cluster_ip: &str) -> Result<String, i32> {
        Ok(format!("pod{} {cluster_ip}:80", self.pods[0].number))
    }

    /// Connects so many times from a client, and returns the number of connects by pod, as `pod3=7 pod4=13`.
    fn connect(&self, client: usize, count: u32) -> String {
        let mut process = self.clients[client].start_process();
        process.expect_step(&format!("hammer {CLUSTER_IP}:80 {count}"))
    }

    /// Backends that this test's clients keep.
    fn own_kept_backends(&self) -> Vec<(AffinityKey, AffinityValue)> {
        let cookies = self.clients.each_ref().map(|client| client.cookie);
        let kept = self.kept_backends();
        let entries = kept.iter().map(|entry| entry.expect("readable"));
        entries.filter(|(key, _)| cookies.contains(&key.netns_cookie)).collect()
    }

    /// Backends that clients keep, also those of other tests.
    fn kept_backends(&self) -> HashMap<MapData, AffinityKey, AffinityValue> {
        let map = Map::LruHashMap(self.pinned_map(abi::maps::AFFINITY));
        map.try_into().expect("a hash of clients")
    }

    fn pinned_map(&self, name: &str) -> MapData {
        MapData::from_pin(self.kernel.paths().pins().join(name)).expect("it is pinned")
    }
}

/// Returns a Service with this ClusterIP and port 80.
pub(crate) fn observed_service(
    cluster_ip: &str,
    affinity_timeout: Option<Duration>,
) -> ObservedService {
    let port = ClusterIpPort {
        name: "http".into(),
        protocol: TransportProtocol::Tcp,
        port: NonZeroU16::new(80).expect("not 0"),
    };
    let service = ClusterIpService {
        cluster_ips: vec![cluster_ip.parse().expect("an address")],
        ports: vec![port],
        affinity_timeout,
        ..ClusterIpService::default()
    };
    ObservedService { service, label: None, is_dns: false }
}

/// Returns an EndpointSlice of a Service with ready endpoints at these addresses, which are of one family.
pub(crate) fn observed_slice(
    service: NamespacedName,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> ObservedSlice {
    let endpoint = |address| ServiceEndpoint {
        address,
        is_ready: true,
        is_serving: true,
        is_terminating: false,
        node: "".into(),
        zone_hints: Box::default(),
        zone: "a".into(),
        node_hints: Box::default(),
    };
    let port = ServiceSlicePort {
        name: "http".into(),
        protocol: TransportProtocol::Tcp,
        port: NonZeroU16::new(SERVING_PORT).expect("not 0"),
    };
    let endpoints: Box<[ServiceEndpoint]> = addresses.into_iter().map(endpoint).collect();
    let family = endpoints.first().map_or(AddressFamily::V4, |it| AddressFamily::of(it.address));
    let slice = ServiceSlice { family, ports: [port].into(), endpoints };
    ObservedSlice { service, slice, triggered_ms: None }
}

fn service_name() -> NamespacedName {
    NamespacedName::new("default", "plain")
}

/// Returns a time after which an endpoint is no longer avoided that was left unanswered by now. On a loaded machine a
/// SYN is sent twice, which counts as unanswered.
fn avoided_until() -> Instant {
    Instant::now() + 2 * Duration::from_nanos(abi::AVOID_UNANSWERED_NS)
}

#[test]
fn connects_are_spread_at_random_and_show_the_cluster_ip() {
    let fixture = ClusterIpFixture::new(3, None);
    // Of 300 picks of three, fewer than 50 for one are less likely than one in a billion.
    let is_spread = |reply: &str| {
        let counts = parse_counts(reply);
        counts.len() == 3 && counts.values().all(|&it| it >= 50)
    };
    let deadline = avoided_until();
    let mut reply = fixture.connect(0, 300);
    while !is_spread(&reply) && Instant::now() < deadline {
        reply = fixture.connect(0, 300);
    }
    assert!(is_spread(&reply), "{reply}");
    let mut client = fixture.clients[0].start_process();
    let reply = client.expect_step(&format!("connect {CLUSTER_IP}:80"));
    assert!(reply.ends_with(&format!(" {CLUSTER_IP}:80")), "{reply}");
    assert!(fixture.own_kept_backends().is_empty(), "none keeps a backend");
}

#[test]
fn without_endpoints_a_connect_is_refused() {
    let mut fixture = ClusterIpFixture::new(1, None);
    fixture.set_endpoints(&[]);
    let mut client = fixture.clients[0].start_process();
    assert_eq!(client.run_step(&format!("connect {CLUSTER_IP}:80")), Err(tcp_refusal_errno()));
    fixture.set_endpoints(&[0]);
    let name = format!("pod{}", fixture.pods[0].number);
    let reply = client.expect_step(&format!("connect {CLUSTER_IP}:80"));
    assert_eq!(reply, format!("{name} {CLUSTER_IP}:80"));
}

#[test]
fn a_client_keeps_its_endpoint_while_the_service_has_it() {
    let mut fixture = ClusterIpFixture::new(3, Some(AFFINITY));
    let first = fixture.connect(0, 40);
    assert!(!first.contains(' '), "one endpoint: {first}");
    let index = fixture.pods.iter().position(|it| first == format!("pod{}=40", it.number));
    let kept = index.expect("one of the pods");
    // Other endpoints come and go, and the list moves.
    let others: Vec<usize> = (0..3).filter(|it| *it != kept).collect();
    fixture.set_endpoints(&[kept, others[0]]);
    assert_eq!(fixture.connect(0, 40), first);
    fixture.set_endpoints(&[kept, others[0], others[1]]);
    assert_eq!(fixture.connect(0, 40), first);
    fixture.set_endpoints(&others);
    let second = fixture.connect(0, 40);
    assert!(!second.contains(' ') && second != first, "another one: {second}");
    fixture.set_endpoints(&[0, 1, 2]);
    assert_eq!(fixture.connect(0, 40), second, "it does not go back");
}

#[test]
fn each_network_namespace_is_a_client_of_its_own_until_its_timeout() {
    let fixture = ClusterIpFixture::new(2, Some(AFFINITY));
    let [first, other] = [0, 1].map(|client| fixture.connect(client, 10));
    assert!(!first.contains(' ') && !other.contains(' '), "{first}, {other}");
    let (mut kept, entries) = (fixture.kept_backends(), fixture.own_kept_backends());
    let mut cookies: Vec<u64> = entries.iter().map(|(key, _)| key.netns_cookie).collect();
    cookies.sort_unstable();
    let mut expected = fixture.clients.each_ref().map(|it| it.cookie).to_vec();
    expected.sort_unstable();
    assert_eq!(cookies, expected);
    // As if the timeout had passed since the last connect: each choice is random then.
    let passed = u64::try_from(AFFINITY.as_nanos()).expect("hours") + 1;
    let mut choices = std::collections::BTreeSet::from([first]);
    let deadline = avoided_until();
    while choices.len() < 2 && Instant::now() < deadline {
        for (key, mut value) in entries.clone() {
            value.connected_ns = value.connected_ns.wrapping_sub(passed);
            kept.insert(key, value, 0).expect("writable");
        }
        choices.insert(fixture.connect(0, 10));
    }
    assert_eq!(choices.len(), 2, "{choices:?}");
}

#[test]
fn more_clients_than_are_remembered_still_get_an_endpoint() {
    let kernel = SharedKernelFixture::exclusive();
    let fixture = ClusterIpFixture::with_kernel(kernel, 1, Some(AFFINITY));
    let name = format!("pod{}", fixture.pods[0].number);
    let mut kept = fixture.kept_backends();
    for netns_cookie in 1 << 60..(1 << 60) + u64::from(abi::AFFINITY_MAX) + 100 {
        let key = AffinityKey { netns_cookie, service_id: abi::FIRST_SERVICE, reserved: 0 };
        kept.insert(key, AffinityValue::default(), 0).expect("older ones give way");
    }
    assert_eq!(fixture.connect(0, 10), format!("{name}=10"));
}

#[test]
fn connects_of_a_meshed_namespace_go_on_unchanged() {
    let fixture = ClusterIpFixture::new(1, None);
    let meshed = Map::HashMap(fixture.pinned_map(abi::maps::MESHED_NETNS));
    let mut meshed: HashMap<MapData, u64, u32> = meshed.try_into().expect("a hash of cookies");
    let control = Map::Array(fixture.pinned_map(abi::maps::CONTROL));
    let mut control: Array<MapData, u64> = control.try_into().expect("words");
    let led = format!("pod{}=5", fixture.pods[0].number);
    meshed.insert(fixture.clients[0].cookie, 1, 0).expect("room");
    control.set(abi::CONTROL_MESHED_NETNS, 1, 0).expect("inside the array");
    let mut client = fixture.clients[0].start_process();
    let step = format!("connect {CLUSTER_IP}:80");
    assert_eq!(client.run_step(&step), Err(EHOSTUNREACH));
    assert_eq!(fixture.connect(1, 5), led, "another namespace");
    meshed.remove(&fixture.clients[0].cookie).expect("it is there");
    assert_eq!(fixture.connect(0, 5), led);
    control.set(abi::CONTROL_MESHED_NETNS, 0, 0).expect("inside the array");
}

/// The agent logs this error, and writes the entries again at each scan.
#[test]
fn more_meshed_namespaces_than_the_map_holds_are_an_error_that_names_it() {
    let kernel = SharedKernelFixture::exclusive();
    let fixture = ClusterIpFixture::with_kernel(kernel, 1, None);
    let mut entries = fixture.kernel.maps.meshed_namespaces().expect("it is pinned");
    let [fitting, further] = fixture.clients.each_ref().map(|it| it.cookie);
    // Cookies that no namespace has, one less than the map holds.
    let others = 1 << 60..(1 << 60) + u64::from(abi::MESHED_NETNS_MAX) - 1;
    let mut meshed: BTreeSet<u64> = others.clone().chain([fitting]).collect();
    entries.set(&meshed).expect("as many as it holds");
    let unchanged = |client: usize| {
        let mut process = fixture.clients[client].start_process();
        process.run_step(&format!("connect {CLUSTER_IP}:80")) == Err(EHOSTUNREACH)
    };
    assert!(unchanged(0));
    meshed.insert(further);
    let error = entries.set(&meshed).expect_err("one too many");
    assert_eq!(error.to_string(), format!("cannot write {further} to map MESHED_NETNS"));
    let led = format!("pod{}=5", fixture.pods[0].number);
    assert_eq!(fixture.connect(1, 5), led, "as connects of other namespaces");
    assert!(unchanged(0), "it was there before");
    meshed.remove(&others.start);
    entries.set(&meshed).expect("there is room again");
    assert!(unchanged(1) && unchanged(0));
    entries.set(&BTreeSet::new()).expect("writable");
    assert_eq!([fixture.connect(0, 5), fixture.connect(1, 5)], [led.clone(), led]);
}

/// Such a socket cannot connect to an IPv4 endpoint, not even by its mapped address.
#[test]
fn a_socket_that_takes_ipv6_only_reaches_endpoints_of_ipv6_and_is_refused_without() {
    let mut fixture = ClusterIpFixture::new(1, None);
    let (four, six) = (fixture.pods[0].ipv4(), fixture.pods[0].ipv6());
    let mut server = fixture.pods[0].start_process();
    server.expect_step(&format!("listen [{six}]:{SERVING_PORT} six"));
    let name = NamespacedName::new("default", "six");
    let service = ClusterChange::Service(name.clone(), Some(observed_service("fd96::9", None)));
    fixture.kernel.observe_cluster(vec![service]);
    let mut client = fixture.clients[0].start_process();
    let step = "only6 [fd96::9]:80";
    let reached = Ok("six [fd96::9]:80".to_owned());
    for (address, result) in [(four, Err(tcp_refusal_errno())), (six, reached)] {
        let slice = observed_slice(name.clone(), [address.parse().expect("an address")]);
        let slice_name = NamespacedName::new("default", "six-1");
        fixture.kernel.observe_cluster(vec![ClusterChange::Slice(slice_name, Some(slice))]);
        assert_eq!(client.run_step(step), result, "{address}");
    }
}

/// The kernel cannot tell apart two connections with the same addresses and ports.
#[test]
fn a_local_port_that_one_service_led_to_a_pod_passes_by_another_service_of_the_pod() {
    let mut fixture = ClusterIpFixture::new(1, None);
    fixture.add_other_service();
    let [mut client, mut another] = fixture.clients.each_ref().map(NetnsFixture::start_process);
    let led = |cluster_ip: &str| fixture.led_to_first_pod(cluster_ip);
    assert_eq!(client.run_step(&bound(4_000, CLUSTER_IP)), led(CLUSTER_IP));
    let same_port = bound(4_000, OTHER_CLUSTER_IP);
    assert_eq!(client.run_step(&same_port), Err(EHOSTUNREACH), "not refused by the kernel");
    assert_eq!(client.run_step(&bound(4_001, OTHER_CLUSTER_IP)), led(OTHER_CLUSTER_IP));
    assert_eq!(another.run_step(&same_port), led(OTHER_CLUSTER_IP), "another namespace");
    client.expect_step("drop");
    assert_eq!(client.run_step(&same_port), Err(EHOSTUNREACH), "it may be in TIME_WAIT");
}

/// Returns the step that connects from this local port to port 80 of a ClusterIP.
fn bound(port: u16, cluster_ip: &str) -> String {
    format!("bound {port} {cluster_ip}:80")
}

#[test]
fn of_more_chosen_ports_than_are_remembered_those_from_longest_ago_are_forgotten() {
    let kernel = SharedKernelFixture::exclusive();
    let mut fixture = ClusterIpFixture::with_kernel(kernel, 1, None);
    fixture.add_other_service();
    let connects = Map::LruHashMap(fixture.pinned_map(abi::maps::BOUND_CONNECTS));
    let mut connects: HashMap<MapData, BoundConnectKey, BoundConnect> =
        connects.try_into().expect("a hash of connections");
    let sockets = fixture.pinned_map(abi::maps::BOUND_SOCKETS);
    let capacity = u64::from(sockets.info().expect("it is open").max_entries());
    assert!(capacity >= u64::from(abi::BOUND_CONNECTS_MAX));
    let mut sockets: HashMap<MapData, u64, BoundConnectKey> =
        Map::LruHashMap(sockets).try_into().expect("a hash of sockets");
    let [mut client, mut another] = fixture.clients.each_ref().map(NetnsFixture::start_process);
    let led = |cluster_ip: &str| fixture.led_to_first_pod(cluster_ip);
    assert_eq!(client.run_step(&bound(4_000, CLUSTER_IP)), led(CLUSTER_IP));
    let cookie = fixture.clients[0].cookie;
    assert_eq!(remembered_ports(&connects, cookie), [4_000]);
    // Connections of namespaces and sockets that do not exist.
    let mut number = 1 << 60;
    on_each_cpu(|| {
        for _ in 0..2 * capacity {
            number += 1;
            let key = BoundConnectKey { netns_cookie: number, ..BoundConnectKey::default() };
            connects.insert(key, BoundConnect::default(), 0).expect("older ones give way");
            sockets.insert(number, key, 0).expect("older ones give way");
        }
    });
    assert_eq!(remembered_ports(&connects, cookie), [0; 0]);
    let same_port = bound(4_000, OTHER_CLUSTER_IP);
    assert_eq!(client.run_step(&same_port), Err(EADDRNOTAVAIL), "refused by the kernel");
    assert_eq!(client.expect_step("peer"), format!("{CLUSTER_IP}:80"), "it stays connected");
    assert_eq!(another.run_step(&same_port), led(OTHER_CLUSTER_IP), "another namespace");
    // A new connection takes the place of an older one, and is remembered.
    assert_eq!(client.run_step(&bound(4_001, CLUSTER_IP)), led(CLUSTER_IP));
    assert_eq!(client.run_step(&bound(4_001, OTHER_CLUSTER_IP)), Err(EHOSTUNREACH));
    client.expect_step("drop");
    assert_eq!(client.run_step(&bound(4_002, OTHER_CLUSTER_IP)), led(OTHER_CLUSTER_IP));
}

/// Returns the chosen local ports of a namespace's connections that are remembered.
fn remembered_ports(
    connects: &HashMap<MapData, BoundConnectKey, BoundConnect>,
    netns_cookie: u64,
) -> Vec<u16> {
    let keys = connects.keys().map(|key| key.expect("readable"));
    keys.filter(|key| key.netns_cookie == netns_cookie).map(|key| key.local_port).collect()
}

/// Runs a job on each CPU in turn. The kernel lists the newest entries of an LRU map by the CPU that has added them. A
/// job on other CPUs does not push those out.
fn on_each_cpu(mut job: impl FnMut() + Send) {
    const CALLING_THREAD: Pid = Pid::from_raw(0);
    let allowed = sched_getaffinity(CALLING_THREAD).expect("its own CPUs");
    for cpu in (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu) == Ok(true)) {
        let mut only = CpuSet::new();
        only.set(cpu).expect("within the set");
        thread::scope(|scope| {
            // A thread of its own, as the test's thread goes on wherever it is allowed to.
            scope.spawn(|| {
                sched_setaffinity(CALLING_THREAD, &only).expect("one of its CPUs");
                job();
            });
        });
    }
}

/// The agent ends sockets by their records, and this one was not led to its peer.
#[test]
fn a_socket_that_asks_a_pod_itself_after_a_refused_connect_is_not_of_a_service_any_more() {
    let mut fixture = ClusterIpFixture::new(1, None);
    // Nothing listens in a client's namespace.
    let silent = fixture.clients[1].ipv4().parse().expect("an address");
    let slice = observed_slice(service_name(), [silent]);
    let name = NamespacedName::new("default", "plain-1");
    fixture.kernel.observe_cluster(vec![ClusterChange::Slice(name, Some(slice))]);
    let pin = fixture.kernel.paths().pins().join(abi::maps::CLIENTS);
    let records = Map::Array(MapData::from_pin(pin).expect("it is pinned"));
    let records: Array<MapData, abi::ConnectRecord> = records.try_into().expect("records");
    let mut client = fixture.clients[0].start_process();
    let pod = fixture.pods[0].ipv4();
    client.expect_step(&format!("retry {CLUSTER_IP}:80 {pod}:{SERVING_PORT}"));
    let open = records.iter().map(|it| it.expect("readable")).filter(|it| it.socket_cookie != 0);
    let namespaces: Vec<u64> = open.map(|it| it.netns_cookie).collect();
    assert_eq!(namespaces, [0], "the socket has its record");
}

#[test]
fn connects_of_kernel_threads_go_on_unchanged_where_they_are_left_alone() {
    let detected = VerifierFeatures::detect();
    if detected.kernel_thread.mask == 0 {
        // This kernel has no BTF.
        return;
    }
    assert_eq!(detected.kernel_thread.mask, abi::KERNEL_THREAD_FLAG);
    let step = format!("connect {CLUSTER_IP}:80");
    for (mask, result) in [(RANDOMIZED_FLAG, Err(EHOSTUNREACH)), (abi::KERNEL_THREAD_FLAG, Ok(()))]
    {
        let kernel_thread = abi::TaskFlag { mask, ..detected.kernel_thread };
        let features = VerifierFeatures { kernel_thread, ..detected };
        let kernel = KernelFixture::with_features(features);
        let kernel = SharedKernelFixture::of_one_test(kernel);
        let fixture = ClusterIpFixture::with_kernel(kernel, 1, None);
        let mut client = fixture.clients[0].start_process();
        client.expect_step(&step);
        fixture.kernel.maps.leave_kernel_threads(true);
        assert_eq!(client.run_step(&step).map(drop), result, "mask {mask:#x}");
        fixture.kernel.maps.leave_kernel_threads(false);
        client.expect_step(&step);
    }
}

/// kube-proxy's rules, which a connect that goes on unchanged meets, reject it in the same way.
#[test]
fn connects_of_kernel_threads_to_a_service_without_endpoints_go_on_unchanged_too() {
    const EPERM: i32 = 1;
    const ECONNREFUSED: i32 = 111;
    let detected = VerifierFeatures::detect();
    if detected.kernel_thread.mask == 0 {
        // This kernel has no BTF.
        return;
    }
    let step = format!("connect {CLUSTER_IP}:80");
    for set_retval in [detected.set_retval, false] {
        let kernel_thread = abi::TaskFlag { mask: RANDOMIZED_FLAG, ..detected.kernel_thread };
        let features = VerifierFeatures { set_retval, kernel_thread, ..detected };
        let kernel = KernelFixture::with_features(features);
        let kernel = SharedKernelFixture::of_one_test(kernel);
        let mut fixture = ClusterIpFixture::with_kernel(kernel, 1, None);
        fixture.set_endpoints(&[]);
        let mut client = fixture.clients[0].start_process();
        let refused = Err(if set_retval { ECONNREFUSED } else { EPERM });
        assert_eq!(client.run_step(&step), refused, "they are not left alone");
        fixture.kernel.maps.leave_kernel_threads(true);
        assert_eq!(client.run_step(&step), Err(EHOSTUNREACH), "set_retval: {set_retval}");
        fixture.kernel.maps.leave_kernel_threads(false);
        assert_eq!(client.run_step(&step), refused);
    }
}
