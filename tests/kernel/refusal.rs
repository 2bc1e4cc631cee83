//! Shell: refused TCP connects where programs cannot choose the errno, as on kernels before 5.18.

use agent::kernel::{features::VerifierFeatures, map_op::MapOp};
use aya::maps::{Array, HashMap, Map, MapData};
use common::wire::ConnectionPath;
use datapath::{
    abi::{self, BoundConnect, BoundConnectKey, TaskFlag, maps},
    load_balancing::{RoutingMode, SvcState},
};

use crate::{
    cluster_ip::RANDOMIZED_FLAG,
    fixture::{KernelFixture, NetnsFixture, SERVING_PORT, run_ip},
    scripted_process::ScriptedProcess,
};

const EPERM: i32 = 1;
const ENOTCONN: i32 = 107;
const ECONNREFUSED: i32 = 111;

/// A service 1 whose pod responds, and a service 2 whose connects are refused, at addresses of both families.
struct RefusalFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    _server: ScriptedProcess,
    kernel: KernelFixture,
    /// A client outside of the cgroup of pods, and one inside, where more programs see its sockets.
    clients: [NetnsFixture; 2],
}

impl RefusalFixture {
    /// Makes a fixture whose programs choose no errno; `None` on kernels without BTF, where all connects are denied.
    fn without_errno() -> Option<Self> {
        let features = VerifierFeatures { set_retval: false, ..VerifierFeatures::detect() };
        (features.kernel_thread.mask != 0).then(|| Self::with_features(features))
    }

    fn with_features(features: VerifierFeatures) -> Self {
        let mut kernel = KernelFixture::with_features(features);
        let (pod, clients) = (kernel.add_pod(), [kernel.add_client(), kernel.add_pod()]);
        let mut server = pod.start_process();
        server.expect_step(&format!("listen [::]:{SERVING_PORT} one"));
        for number in [1, 2] {
            kernel.add_service(number, ConnectionPath::Direct);
        }
        kernel.add_ready_pod(&pod, 1);
        kernel.apply_table();
        let frontends = kernel.maps.read_routes().expect("readable").frontends;
        for (key, service_id) in frontends {
            if key.address.ends_with(&[2]) {
                let mode = RoutingMode::Refuse;
                let state = SvcState { offset: 0, count: 0, generation: 9, mode };
                kernel.maps.apply(&[MapOp::State { service_id, state }]).expect("writable");
            }
        }
        Self { _server: server, kernel, clients }
    }

    fn pinned_map(&self, name: &str) -> MapData {
        MapData::from_pin(self.kernel.paths().pins().join(name)).expect("it is pinned")
    }

    /// Numbers of claimed rows, of sockets with storage, of connects from chosen ports, and of their sockets.
    fn records(&self) -> [usize; 4] {
        let claims: Array<MapData, u64> =
            Map::Array(self.pinned_map(maps::CLAIMS)).try_into().expect("an array of words");
        let claimed = claims.iter().filter(|it| *it.as_ref().expect("readable") != 0).count();
        let stored = usize::try_from(self.kernel.maps.control_word(abi::CONTROL_OVERFLOW));
        let connects: HashMap<MapData, BoundConnectKey, BoundConnect> =
            Map::LruHashMap(self.pinned_map(maps::BOUND_CONNECTS)).try_into().expect("a hash");
        let sockets: HashMap<MapData, u64, BoundConnectKey> =
            Map::LruHashMap(self.pinned_map(maps::BOUND_SOCKETS)).try_into().expect("a hash");
        [claimed, stored.expect("few"), connects.keys().count(), sockets.keys().count()]
    }

    /// Number of open connections to the backends of all services.
    fn open_connections(&self) -> u64 {
        let backends = self.kernel.maps.read_routes().expect("readable").backends;
        backends.keys().map(|id| self.kernel.maps.open_connections(*id)).sum()
    }
}

/// The client's own namespace refuses them, so the address to which they are led depends on the socket.
#[test]
fn sockets_of_each_kind_are_refused_as_by_a_closed_port_and_leave_no_record() {
    let Some(fixture) = RefusalFixture::without_errno() else { return };
    for netns in &fixture.clients {
        let (ipv4, ipv6) = (netns.ipv4(), netns.ipv6());
        let from_own_address = [
            format!("from {ipv4} 10.96.0.2:80"),
            format!("from {ipv6} [fd96::2]:80"),
            format!("from ::ffff:{ipv4} [::ffff:10.96.0.2]:80"),
        ];
        let others = [
            "connect 10.96.0.2:80",
            "connect [fd96::2]:80",
            "connect [::ffff:10.96.0.2]:80",
            "pending 10.96.0.2:80",
            "pending [fd96::2]:80",
            "pending [::ffff:10.96.0.2]:80",
            "only6 [fd96::2]:80",
            "bound 4000 10.96.0.2:80",
            "device eth0 10.96.0.2:80",
            "device eth0 [::ffff:10.96.0.2]:80",
        ];
        let mut client = netns.start_process();
        for step in from_own_address.iter().map(String::as_str).chain(others) {
            assert_eq!(client.run_step(step), Err(ECONNREFUSED), "{step}");
        }
        // Over IPv6 the SYN would leave by the device, and wait for its timeout.
        assert_eq!(client.run_step("device eth0 [fd96::2]:80"), Err(EPERM));
        // On a node the kubelet drops such packets (chain KUBE-FIREWALL).
        for rule in [
            "add table ip firewall",
            "add chain ip firewall output { type filter hook output priority 0 ; }",
            "add rule ip firewall output ip saddr != 127.0.0.0/8 ip daddr 127.0.0.0/8 drop",
        ] {
            run_ip(&["netns", "exec", &netns.netns, "nft", rule]);
        }
        for step in [from_own_address[0].as_str(), others[0]] {
            assert_eq!(client.run_step(step), Err(ECONNREFUSED), "{step}, beside a firewall");
        }
    }
    assert_eq!((fixture.records(), fixture.open_connections()), ([0; 4], 0));
}

#[test]
fn a_refused_socket_is_as_one_that_never_connected() {
    let Some(fixture) = RefusalFixture::without_errno() else { return };
    for netns in &fixture.clients {
        let mut client = netns.start_process();
        for (refused, good) in [
            ("10.96.0.2:80", "10.96.0.1:80"),
            ("[fd96::2]:80", "[fd96::1]:80"),
            ("[::ffff:10.96.0.2]:80", "[::ffff:10.96.0.1]:80"),
        ] {
            client.expect_step(&format!("refused {refused}"));
            assert_eq!(client.run_step("peer"), Err(ENOTCONN), "{refused}");
            let reply = client.expect_step(&format!("reconnect {good}"));
            assert_eq!(reply, format!("one {good}"));
            assert_eq!(fixture.open_connections(), 1, "{good}");
            client.expect_step("drop");
        }
    }
    assert_eq!((&fixture.records()[..2], fixture.open_connections()), (&[0, 0][..], 0));
}

/// Outside of the cgroup of pods, no program sees the disconnect.
#[test]
fn a_disconnected_socket_counts_no_more_once_its_next_connect_is_refused() {
    let Some(fixture) = RefusalFixture::without_errno() else { return };
    let mut client = fixture.clients[0].start_process();
    for (good, refused) in [
        ("10.96.0.1:80", "10.96.0.2:80"),
        // The socket stays one of IPv4 for the kernel, so it cannot be led to loopback of IPv6.
        ("[::ffff:10.96.0.1]:80", "[::ffff:10.96.0.2]:80"),
    ] {
        client.expect_step(&format!("connect {good}"));
        client.expect_step("disconnect");
        assert_eq!(client.run_step(&format!("reconnect {refused}")), Err(ECONNREFUSED));
        assert_eq!(fixture.open_connections(), 0, "the socket is still open: {refused}");
        client.expect_step("drop");
    }
    assert_eq!(fixture.records()[..2], [0, 0]);
}

/// So it is where they are not left alone, as without kube-proxy.
#[test]
fn connects_of_kernel_threads_keep_their_address_and_are_denied() {
    let detected = VerifierFeatures::detect();
    let mask = if detected.kernel_thread.mask == 0 { 0 } else { RANDOMIZED_FLAG };
    let kernel_thread = TaskFlag { mask, ..detected.kernel_thread };
    let features = VerifierFeatures { set_retval: false, kernel_thread, ..detected };
    let fixture = RefusalFixture::with_features(features);
    let mut client = fixture.clients[0].start_process();
    for address in ["10.96.0.2:80", "[fd96::2]:80", "[::ffff:10.96.0.2]:80"] {
        assert_eq!(client.run_step(&format!("connect {address}")), Err(EPERM), "{address}");
    }
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
}
