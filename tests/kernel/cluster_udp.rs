//! Shell: UDP to the ClusterIPs of Services of the cluster: connected and unconnected sockets, sources of answers.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    time::Duration,
};

use agent::{
    config::ClusterIpMode,
    kernel::{features::VerifierFeatures, maps::KernelMaps, programs::EbpfPrograms},
    map_sizes::MapSizes,
    paths::AgentPaths,
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
use datapath::abi::{self, UdpFlowKey, UdpReplySource, UdpSocket};

use crate::{
    cluster_ip::RANDOMIZED_FLAG,
    fixture::{
        KernelFixture, NetnsFixture, SERVING_PORT, SharedKernelFixture, command_in,
        tcp_refusal_errno, udp_refusal_errno,
    },
    program_replacement::load_next_abi,
    scripted_process::{ScriptedProcess, parse_counts},
    udp_process,
};

const EPERM: i32 = 1;
const EAGAIN: i32 = 11;
const ENOTCONN: i32 = 107;
/// Port of the Services, for both protocols.
const PORT: u16 = 53;
/// Address of the name `web.test` for programs that resolve it.
pub(crate) const RESOLVED_ADDRESS: &str = "203.0.113.7";

/// Pods that answer datagrams, and Services with some of them as endpoints.
struct ClusterUdpFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    _servers: Vec<ScriptedProcess>,
    kernel: SharedKernelFixture,
    client: NetnsFixture,
    pods: Vec<NetnsFixture>,
}

impl ClusterUdpFixture {
    fn new(pod_count: usize) -> Self {
        Self::with_kernel(SharedKernelFixture::new(), pod_count)
    }

    fn exclusive(pod_count: usize) -> Self {
        Self::with_kernel(SharedKernelFixture::exclusive(), pod_count)
    }

    fn with_kernel(mut kernel: SharedKernelFixture, pod_count: usize) -> Self {
        kernel.serve_cluster_services(ClusterIpMode::All);
        let client = kernel.add_client();
        let pods: Vec<_> = (0..pod_count).map(|_| kernel.add_pod()).collect();
        let serve = |(index, pod): (usize, &NetnsFixture)| {
            let mut server = udp_process::start_in(pod);
            for address in [pod.ipv4(), format!("[{}]", pod.ipv6())] {
                server.expect_step(&format!("serve {address}:{SERVING_PORT} pod{index}"));
            }
            server
        };
        let servers = pods.iter().enumerate().map(serve).collect();
        let mut fixture = Self { _servers: servers, kernel, client, pods };
        let begin = ClusterResource::ALL.map(ClusterChange::ListBegun);
        let end = ClusterResource::ALL.map(ClusterChange::ListCompleted);
        fixture.kernel.observe_cluster([begin, end].concat());
        fixture
    }

    /// Adds the Service at 10.96.0.`number` and fd96::`number`, with these pods as its endpoints.
    fn add_service(&mut self, number: u8, pods: &[usize]) {
        self.add_service_with(number, pods, None);
    }

    fn add_service_with(&mut self, number: u8, pods: &[usize], affinity: Option<Duration>) {
        let port = |name: &str, protocol| ClusterIpPort {
            name: name.into(),
            protocol,
            port: NonZeroU16::new(PORT).expect("not 0"),
        };
        let addresses = [format!("10.96.0.{number}"), format!("fd96::{number:x}")];
        let service = ClusterIpService {
            cluster_ips: addresses.map(|it| it.parse().expect("an address")).to_vec(),
            ports: vec![
                port("dns", TransportProtocol::Udp),
                port("dns-tcp", TransportProtocol::Tcp),
            ],
            affinity_timeout: affinity,
            ..ClusterIpService::default()
        };
        let service = ObservedService { service, label: None, is_dns: false };
        let change = ClusterChange::Service(service_name(number), Some(service));
        self.kernel.observe_cluster(vec![change]);
        self.set_endpoints(number, pods);
    }

    /// Makes the pods with these indexes the endpoints of a Service for datagrams, in both families.
    fn set_endpoints(&mut self, number: u8, pods: &[usize]) {
        self.set_port_endpoints(number, "dns", TransportProtocol::Udp, pods);
    }

    fn set_port_endpoints(
        &mut self,
        number: u8,
        port: &str,
        protocol: TransportProtocol,
        pods: &[usize],
    ) {
        for family in [AddressFamily::V4, AddressFamily::V6] {
            let address = |pod: &NetnsFixture| match family {
                AddressFamily::V4 => pod.ipv4(),
                AddressFamily::V6 => pod.ipv6(),
            };
            let endpoint = |index: &usize| ServiceEndpoint {
                address: address(&self.pods[*index]).parse::<IpAddr>().expect("an address"),
                is_ready: true,
                is_serving: true,
                is_terminating: false,
                node: "".into(),
                zone_hints: Box::default(),
                zone: "a".into(),
                node_hints: Box::default(),
            };
            let slice_port = ServiceSlicePort {
                name: port.into(),
                protocol,
                port: NonZeroU16::new(SERVING_PORT).expect("not 0"),
            };
            let slice = ServiceSlice {
                family,
                ports: [slice_port].into(),
                endpoints: pods.iter().map(endpoint).collect(),
            };
            let name = NamespacedName::new("default", format!("s{number}-{port}-{family:?}"));
            let slice = ObservedSlice { service: service_name(number), slice, triggered_ms: None };
            self.kernel.observe_cluster(vec![ClusterChange::Slice(name, Some(slice))]);
        }
    }

    fn start_client(&self) -> ScriptedProcess {
        udp_process::start_in(&self.client)
    }

    /// Number of open sockets that have an entry.
    fn sockets(&self) -> u64 {
        self.kernel.maps.control_word(abi::CONTROL_UDP_SOCKETS)
    }

    /// Address of a pod's server, as clients see it that ask it directly.
    fn direct(&self, index: usize) -> String {
        format!("{}:{SERVING_PORT}", self.pods[index].ipv4())
    }

    fn pinned_map(&self, name: &str) -> MapData {
        MapData::from_pin(self.kernel.paths().pins().join(name)).expect("it is pinned")
    }
}

fn service_name(number: u8) -> NamespacedName {
    NamespacedName::new("default", format!("s{number}"))
}

/// Returns the only name in counts of answers.
fn only_name(reply: &str) -> &str {
    let counts = parse_counts(reply);
    assert_eq!(counts.len(), 1, "one endpoint: {reply}");
    counts.into_keys().next().expect("it is one")
}

#[test]
fn sockets_of_each_kind_get_answers_from_the_cluster_ip() {
    let mut fixture = ClusterUdpFixture::new(1);
    fixture.add_service(9, &[0]);
    let mut client = fixture.start_client();
    for (open, address) in
        [("open4", "10.96.0.9:53"), ("open6", "[fd96::9]:53"), ("open6", "[::ffff:10.96.0.9]:53")]
    {
        client.expect_step(open);
        assert_eq!(client.expect_step(&format!("ask {address}")), format!("pod0 {address}"));
        assert_eq!(client.expect_step(&format!("connect {address}")), address);
        assert_eq!(client.expect_step("ask"), format!("pod0 {address}"));
        assert_eq!(client.expect_step("peer"), address);
    }
}

#[test]
fn addresses_that_are_no_service_are_left_alone() {
    let mut fixture = ClusterUdpFixture::new(2);
    fixture.add_service(9, &[0]);
    let (direct, mut client) = (fixture.direct(1), fixture.start_client());
    client.expect_step("open4");
    assert_eq!(client.expect_step(&format!("ask {direct}")), format!("pod1 {direct}"));
    assert_eq!(client.expect_step(&format!("connect {direct}")), direct);
    assert_eq!(client.expect_step("ask"), format!("pod1 {direct}"));
    // Such a connect only asks which source address the kernel would choose.
    assert_eq!(client.run_step("connect 10.96.0.9:0"), Err(ENOTCONN), "it has no peer");
    assert_eq!(fixture.sockets(), 0);
    // A socket that has asked a service sees other sources as they are.
    client.expect_step("open4");
    let reply = client.expect_step(&format!("ask 10.96.0.9:53 {direct}"));
    assert_eq!(reply, format!("pod0 10.96.0.9:53 pod1 {direct}"));
}

#[test]
fn sockets_are_spread_at_random_and_each_keeps_its_endpoint() {
    let mut fixture = ClusterUdpFixture::new(3);
    fixture.add_service(9, &[0, 1, 2]);
    let mut client = fixture.start_client();
    for kind in ["connected", "unconnected"] {
        let reply = client.expect_step(&format!("{kind} 10.96.0.9:53 300"));
        // Of 300 picks of three, fewer than 50 for one are less likely than one in a billion.
        let counts = parse_counts(&reply);
        assert!(counts.len() == 3 && counts.values().all(|&it| it >= 50), "{kind}: {reply}");
    }
    client.expect_step("open4");
    let answers: BTreeSet<String> =
        (0..40).map(|_| client.expect_step("ask 10.96.0.9:53")).collect();
    assert_eq!(answers.len(), 1, "{answers:?}");
}

#[test]
fn a_socket_goes_to_another_endpoint_once_its_own_has_left() {
    let mut fixture = ClusterUdpFixture::new(3);
    fixture.add_service(9, &[0, 1, 2]);
    let mut client = fixture.start_client();
    client.expect_step("open4");
    let first = client.expect_step("ask 10.96.0.9:53");
    let kept = (0..3).find(|it| first == format!("pod{it} 10.96.0.9:53")).expect("a pod");
    let others: Vec<usize> = (0..3).filter(|it| *it != kept).collect();
    // Other endpoints come and go, and the list moves.
    fixture.set_endpoints(9, &[kept, others[0]]);
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), first);
    fixture.set_endpoints(9, &others);
    let second = client.expect_step("ask 10.96.0.9:53");
    assert!(second != first && second.ends_with(" 10.96.0.9:53"), "{second}");
    fixture.set_endpoints(9, &[0, 1, 2]);
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), second, "it does not go back");
}

#[test]
fn one_socket_asks_several_cluster_ips() {
    let mut fixture = ClusterUdpFixture::new(3);
    for number in 0..3 {
        fixture.add_service(number + 7, &[usize::from(number)]);
    }
    let mut client = fixture.start_client();
    client.expect_step("open4");
    for _ in 0..5 {
        let reply = client.expect_step("ask 10.96.0.7:53 10.96.0.8:53 10.96.0.9:53");
        assert_eq!(reply, "pod0 10.96.0.7:53 pod1 10.96.0.8:53 pod2 10.96.0.9:53");
    }
    // An IPv6 socket asks addresses of both families.
    client.expect_step("open6");
    let reply = client.expect_step("ask [fd96::7]:53 [::ffff:10.96.0.8]:53");
    assert_eq!(reply, "pod0 [fd96::7]:53 pod1 [::ffff:10.96.0.8]:53");
    assert_eq!(fixture.sockets(), 2);
}

/// Two Services of the same pods: their answers come from one address.
#[test]
fn an_answer_of_an_endpoint_of_two_services_is_shown_as_of_the_one_asked_last() {
    let mut fixture = ClusterUdpFixture::new(1);
    fixture.add_service(7, &[0]);
    fixture.add_service(8, &[0]);
    let mut client = fixture.start_client();
    client.expect_step("open4");
    for address in ["10.96.0.7:53", "10.96.0.8:53", "10.96.0.7:53"] {
        assert_eq!(client.expect_step(&format!("ask {address}")), format!("pod0 {address}"));
    }
}

/// Programs find a peer by a Service, and then ask the peer itself.
#[test]
fn an_answer_of_an_endpoint_that_was_asked_itself_shows_its_own_address() {
    let mut fixture = ClusterUdpFixture::new(1);
    fixture.add_service(9, &[0]);
    let ipv6 = format!("[{}]:{SERVING_PORT}", fixture.pods[0].ipv6());
    let (ipv4, mut client) = (fixture.direct(0), fixture.start_client());
    let cases =
        [("open4", "10.96.0.9:53", ipv4.as_str()), ("open6", "[fd96::9]:53", ipv6.as_str())];
    for (open, cluster_ip, direct) in cases {
        client.expect_step(open);
        for address in [cluster_ip, direct, cluster_ip] {
            assert_eq!(client.expect_step(&format!("ask {address}")), format!("pod0 {address}"));
        }
    }
}

#[test]
fn without_endpoints_connects_and_datagrams_are_refused() {
    let mut fixture = ClusterUdpFixture::new(1);
    fixture.add_service(9, &[]);
    let mut client = fixture.start_client();
    client.expect_step("open6");
    for address in ["[fd96::9]:53", "[::ffff:10.96.0.9]:53"] {
        assert_eq!(
            client.run_step(&format!("ask {address}")),
            Err(udp_refusal_errno()),
            "{address}"
        );
        assert_eq!(client.run_step(&format!("connect {address}")), Err(udp_refusal_errno()));
    }
    client.expect_step("open4");
    assert_eq!(client.run_step("ask 10.96.0.9:53"), Err(udp_refusal_errno()));
    assert_eq!(client.run_step("connect 10.96.0.9:53"), Err(udp_refusal_errno()));
    fixture.set_endpoints(9, &[0]);
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), "pod0 10.96.0.9:53");
}

#[test]
fn datagrams_of_kernel_threads_to_a_service_without_endpoints_go_on_unchanged() {
    let detected = VerifierFeatures::detect();
    if detected.kernel_thread.mask == 0 {
        // This kernel has no BTF.
        return;
    }
    let kernel_thread = abi::TaskFlag { mask: RANDOMIZED_FLAG, ..detected.kernel_thread };
    let kernel = KernelFixture::with_features(VerifierFeatures { kernel_thread, ..detected });
    let mut fixture = ClusterUdpFixture::with_kernel(SharedKernelFixture::of_one_test(kernel), 1);
    fixture.add_service(9, &[]);
    let mut client = fixture.start_client();
    client.expect_step("open4");
    assert_eq!(client.run_step("ask-briefly 10.96.0.9:53"), Err(udp_refusal_errno()));
    fixture.kernel.maps.leave_kernel_threads(true);
    assert_eq!(client.run_step("ask-briefly 10.96.0.9:53"), Err(EAGAIN), "nothing answers");
    fixture.kernel.maps.leave_kernel_threads(false);
    assert_eq!(client.run_step("ask-briefly 10.96.0.9:53"), Err(udp_refusal_errno()));
}

/// A connect that succeeded, to any address, would leave its local address with the socket: its next connect would fail.
#[test]
fn where_programs_choose_no_errno_calls_are_not_permitted_and_leave_the_socket_as_it_was() {
    let features = VerifierFeatures { set_retval: false, ..VerifierFeatures::detect() };
    let kernel = SharedKernelFixture::of_one_test(KernelFixture::with_features(features));
    let mut fixture = ClusterUdpFixture::with_kernel(kernel, 1);
    fixture.add_service(9, &[]);
    let mut client = fixture.start_client();
    for (open, address) in
        [("open4", "10.96.0.9:53"), ("open6", "[fd96::9]:53"), ("open6", "[::ffff:10.96.0.9]:53")]
    {
        fixture.set_endpoints(9, &[]);
        client.expect_step(open);
        for step in ["ask", "reconnect"] {
            assert_eq!(client.run_step(&format!("{step} {address}")), Err(EPERM), "{address}");
        }
        assert_eq!(client.run_step("peer"), Err(ENOTCONN), "{address}");
        fixture.set_endpoints(9, &[0]);
        assert_eq!(client.expect_step(&format!("reconnect {address}")), address);
        assert_eq!(client.expect_step("ask"), format!("pod0 {address}"));
    }
}

/// A connected socket receives from its peer only, so that a random endpoint would answer in vain.
#[test]
fn a_connected_socket_that_names_its_cluster_ip_asks_its_own_endpoint() {
    let mut fixture = ClusterUdpFixture::new(3);
    fixture.add_service(9, &[0, 1, 2]);
    let mut client = fixture.start_client();
    for address in ["10.96.0.9:53", "[fd96::9]:53", "[::ffff:10.96.0.9]:53"] {
        client.expect_step(&format!("connect {address}"));
        let own = client.expect_step("ask");
        for _ in 0..10 {
            assert_eq!(client.expect_step(&format!("ask {address}")), own);
        }
    }
}

/// An IPv6 socket names its IPv4 peer to the programs in each datagram, so that a random endpoint would answer in vain.
#[test]
fn a_socket_that_connected_before_its_peer_was_served_keeps_its_peer() {
    let mut fixture = ClusterUdpFixture::new(2);
    let mut client = fixture.start_client();
    let (peer, address) = (fixture.direct(0), fixture.pods[0].ipv4());
    let mapped = format!("[::ffff:{address}]:{SERVING_PORT}");
    client.expect_step("open6");
    assert_eq!(client.expect_step(&format!("reconnect {mapped}")), mapped);
    assert_eq!(client.expect_step("ask"), format!("pod0 {mapped}"));
    // Another Service leads to another pod from this address on.
    let port = ClusterIpPort {
        name: "dns".into(),
        protocol: TransportProtocol::Udp,
        port: NonZeroU16::new(SERVING_PORT).expect("not 0"),
    };
    let service = ClusterIpService {
        cluster_ips: vec![address.parse().expect("an address")],
        ports: vec![port],
        ..ClusterIpService::default()
    };
    let service = ObservedService { service, label: None, is_dns: false };
    let change = ClusterChange::Service(service_name(9), Some(service));
    fixture.kernel.observe_cluster(vec![change]);
    fixture.set_endpoints(9, &[1]);
    for step in ["ask".to_owned(), format!("ask {mapped}")] {
        assert_eq!(client.expect_step(&step), format!("pod0 {mapped}"), "{step}");
    }
    assert_eq!(fixture.sockets(), 0);
    assert_eq!(client.expect_step(&format!("connect {peer}")), peer);
    assert_eq!(client.expect_step("ask"), format!("pod1 {peer}"), "a new connect");
}

#[test]
fn a_socket_that_connects_elsewhere_shows_its_new_peer() {
    let mut fixture = ClusterUdpFixture::new(2);
    fixture.add_service(8, &[0]);
    fixture.add_service(9, &[1]);
    let (direct, mut client) = (fixture.direct(0), fixture.start_client());
    client.expect_step("connect 10.96.0.8:53");
    assert_eq!(client.expect_step("reconnect 10.96.0.9:53"), "10.96.0.9:53");
    assert_eq!(client.expect_step("ask"), "pod1 10.96.0.9:53");
    assert_eq!(client.expect_step("reconnect 10.96.0.8:53"), "10.96.0.8:53");
    assert_eq!(client.expect_step(&format!("reconnect {direct}")), direct, "its backend before");
    assert_eq!(client.expect_step("ask"), format!("pod0 {direct}"));
    // Without a peer, it asks as any other socket does.
    client.expect_step("reconnect 10.96.0.8:53");
    client.expect_step("disconnect");
    assert_eq!(client.run_step("peer"), Err(ENOTCONN));
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), "pod1 10.96.0.9:53");
    assert_eq!(client.expect_step(&format!("ask {direct}")), format!("pod0 {direct}"));
}

#[test]
fn tcp_and_udp_of_one_port_have_endpoints_of_their_own() {
    let mut fixture = ClusterUdpFixture::new(2);
    fixture.add_service(9, &[0]);
    let mut server = fixture.pods[1].start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} tcp"));
    let mut stream_client = fixture.client.start_process();
    assert_eq!(stream_client.run_step("connect 10.96.0.9:53"), Err(tcp_refusal_errno()));
    fixture.set_port_endpoints(9, "dns-tcp", TransportProtocol::Tcp, &[1]);
    assert_eq!(stream_client.expect_step("connect 10.96.0.9:53"), "tcp 10.96.0.9:53");
    let mut client = fixture.start_client();
    assert_eq!(client.expect_step("connected 10.96.0.9:53 20"), "pod0=20");
    fixture.set_endpoints(9, &[]);
    assert_eq!(client.run_step("connect 10.96.0.9:53"), Err(udp_refusal_errno()));
    assert_eq!(stream_client.expect_step("connect 10.96.0.9:53"), "tcp 10.96.0.9:53");
}

#[test]
fn sockets_leave_nothing_behind_and_count_as_no_connection() {
    let mut fixture = ClusterUdpFixture::new(1);
    let words = |fixture: &ClusterUdpFixture| {
        let words = [abi::CONTROL_OVERFLOW, abi::CONTROL_UNTRACKED];
        words.map(|word| fixture.kernel.maps.control_word(word))
    };
    let words_before = words(&fixture);
    fixture.add_service(9, &[0]);
    let mut client = fixture.start_client();
    for step in ["connect 10.96.0.9:53", "ask", "open4", "ask 10.96.0.9:53", "connect [fd96::9]:53"]
    {
        client.expect_step(step);
    }
    assert_eq!(fixture.sockets(), 3);
    let routes = fixture.kernel.maps.read_routes().expect("readable");
    let open: u64 =
        routes.backends.keys().map(|id| fixture.kernel.maps.open_connections(*id)).sum();
    let claims: Array<MapData, u64> =
        Map::Array(fixture.pinned_map(abi::maps::CLAIMS)).try_into().expect("words");
    let claimed = claims.iter().filter(|it| *it.as_ref().expect("readable") != 0).count();
    assert_eq!((open, claimed, words(&fixture)), (0, 0, words_before));
    client.expect_step("drop");
    assert_eq!(fixture.sockets(), 0);
    client.expect_step("connect 10.96.0.9:53");
    drop(client);
    assert_eq!(fixture.sockets(), 0, "also of a process that was killed");
}

#[test]
fn a_client_keeps_its_endpoint_for_the_affinity_timeout() {
    let mut fixture = ClusterUdpFixture::new(3);
    fixture.add_service_with(9, &[0, 1, 2], Some(Duration::from_secs(3_600)));
    let mut client = fixture.start_client();
    let first = client.expect_step("connected 10.96.0.9:53 30");
    let kept = only_name(&first).to_owned();
    let others = client.expect_step("unconnected 10.96.0.9:53 30");
    assert_eq!(only_name(&others), kept, "both kinds");
}

#[test]
fn more_sockets_than_are_remembered_still_get_an_answer() {
    let mut fixture = ClusterUdpFixture::exclusive(2);
    fixture.add_service(9, &[0, 1]);
    let mut client = fixture.start_client();
    client.expect_step("open4");
    client.expect_step("ask 10.96.0.9:53");
    let mut flows: HashMap<MapData, UdpFlowKey, u32> =
        Map::LruHashMap(fixture.pinned_map(abi::maps::UDP_FLOWS)).try_into().expect("a hash");
    let mut replies: HashMap<MapData, UdpFlowKey, UdpReplySource> =
        Map::LruHashMap(fixture.pinned_map(abi::maps::UDP_REPLIES)).try_into().expect("a hash");
    assert_eq!((flows.iter().count(), replies.iter().count()), (1, 1));
    for socket_cookie in 1 << 60..(1 << 60) + u64::from(abi::UDP_FLOWS_MAX) + 100 {
        let key = UdpFlowKey { socket_cookie, ..UdpFlowKey::default() };
        flows.insert(key, 0, 0).expect("older ones give way");
        replies.insert(key, UdpReplySource::default(), 0).expect("older ones give way");
    }
    for _ in 0..10 {
        let reply = client.expect_step("ask 10.96.0.9:53");
        assert!(reply.ends_with(" 10.96.0.9:53"), "{reply}");
    }
    assert!(client.expect_step("unconnected 10.96.0.9:53 10").contains('='));
}

#[test]
fn a_socket_that_finds_no_room_is_left_to_kube_proxy() {
    let mut fixture = ClusterUdpFixture::exclusive(1);
    fixture.add_service(9, &[0]);
    let mut sockets: HashMap<MapData, u64, UdpSocket> =
        Map::HashMap(fixture.pinned_map(abi::maps::UDP_SOCKETS)).try_into().expect("a hash");
    let cookies = 1 << 60..(1 << 60) + u64::from(abi::UDP_SOCKETS_MAX);
    for cookie in cookies.clone() {
        sockets.insert(cookie, UdpSocket::default(), 0).expect("room");
    }
    let mut client = fixture.start_client();
    client.expect_step("open4");
    assert_eq!(
        client.run_step("ask-briefly 10.96.0.9:53"),
        Err(EAGAIN),
        "no rule leads it on here"
    );
    assert_eq!(client.expect_step("connect 10.96.0.9:53"), "10.96.0.9:53");
    assert!(client.run_step("ask-briefly").is_err());
    assert_eq!(fixture.sockets(), 0);
    sockets.remove(&cookies.start).expect("it is there");
    client.expect_step("open4");
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), "pod0 10.96.0.9:53");
    assert_eq!(fixture.sockets(), 1);
}

/// Runs a program in the client's cgroup and network. Its only name server is a ClusterIP, which knows `web.test`.
/// Returns what the program prints.
pub(crate) fn resolve_by(program: &[&str]) -> String {
    let mut fixture = ClusterUdpFixture::new(2);
    fixture.add_service(9, &[]);
    let mut server = udp_process::start_in(&fixture.pods[0]);
    let listener = format!("{}:5353", fixture.pods[0].ipv4());
    server.expect_step(&format!("resolve {listener} {RESOLVED_ADDRESS}"));
    // The server's own port: the pods' other one answers with names of pods.
    let slice_port = ServiceSlicePort {
        name: "dns".into(),
        protocol: TransportProtocol::Udp,
        port: NonZeroU16::new(5353).expect("not 0"),
    };
    let address: SocketAddr = listener.parse().expect("an address");
    let endpoint = ServiceEndpoint {
        address: address.ip(),
        is_ready: true,
        is_serving: true,
        is_terminating: false,
        node: "".into(),
        zone_hints: Box::default(),
        zone: "a".into(),
        node_hints: Box::default(),
    };
    let slice = ServiceSlice {
        family: AddressFamily::V4,
        ports: [slice_port].into(),
        endpoints: [endpoint].into(),
    };
    let slice = ObservedSlice { service: service_name(9), slice, triggered_ms: None };
    let name = NamespacedName::new("default", "resolver");
    fixture.kernel.observe_cluster(vec![ClusterChange::Slice(name, Some(slice))]);
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("writable");
        path
    };
    let resolver = file("resolv.conf", "nameserver 10.96.0.9\noptions attempts:3 timeout:20\n");
    let sources = file("nsswitch.conf", "hosts: dns\n");
    // A mount namespace of its own shows this process other files under the names that resolvers know.
    let script = "mount --bind \"$1\" /etc/resolv.conf || exit 1
                  [ ! -e /etc/nsswitch.conf ] || mount --bind \"$2\" /etc/nsswitch.conf
                  shift 2 && exec \"$@\"";
    let mut command = command_in(&fixture.client.cgroup, &fixture.client.netns);
    command.args(["unshare", "--mount", "sh", "-c", script, "sh"]).arg(resolver).arg(sources);
    let output = command.args(program).output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// glibc's resolver connects its socket, and drops answers whose source is not the server that it asked.
#[test]
fn the_c_librarys_resolver_gets_answers_from_a_cluster_ip() {
    let output = resolve_by(&["getent", "ahostsv4", "web.test"]);
    assert!(output.starts_with(RESOLVED_ADDRESS), "{output}");
}

/// Node resolves names by c-ares, whose way of asking depends on its version.
#[test]
fn c_ares_gets_answers_from_a_cluster_ip() {
    let script = "require('node:dns').promises.resolve4('web.test').then(it => console.log(it[0]))";
    let output = resolve_by(&["node", "-e", script]);
    assert!(output.starts_with(RESOLVED_ADDRESS), "{output}");
}

/// The programs of the next version follow tables of their own, which are empty here.
#[test]
fn a_socket_from_before_an_upgrade_sees_the_cluster_ip_until_it_closes() {
    let mut fixture = ClusterUdpFixture::exclusive(1);
    fixture.add_service(9, &[0]);
    let mut client = fixture.start_client();
    client.expect_step("connect 10.96.0.9:53");
    let old = fixture.kernel.programs.as_ref().expect("loaded").pins();
    let (paths, mut programs) = load_next_abi(&mut fixture.kernel);
    assert_eq!(client.expect_step("connected 10.96.0.9:53 5"), "pod0=5", "by the old tables");
    programs.take_over().expect("writable");
    programs.retire_previous().expect("writable");
    assert_eq!(client.expect_step("ask"), "pod0 10.96.0.9:53");
    assert_eq!(client.expect_step("peer"), "10.96.0.9:53");
    client.expect_step("open4");
    assert_eq!(
        client.run_step("ask-briefly 10.96.0.9:53"),
        Err(EAGAIN),
        "the new tables are empty"
    );
    drop(programs);
    let mut programs = EbpfPrograms::load(paths).expect("the kernel takes them");
    assert_eq!(programs.remove_outlived_pins(), 1);
    client.expect_step("drop");
    assert_eq!(programs.remove_outlived_pins(), 0);
    assert!(!old.exists());
    fixture.kernel.programs = Some(programs);
}

/// The new tables are empty here, so that only the copied entry leads the datagram.
#[test]
fn a_socket_from_before_a_change_of_map_sizes_may_name_its_cluster_ip() {
    let mut fixture = ClusterUdpFixture::exclusive(1);
    fixture.add_service(9, &[0]);
    let mut client = fixture.start_client();
    for step in ["open4", "ask 10.96.0.9:53", "connect 10.96.0.9:53"] {
        client.expect_step(step);
    }
    let map_sizes = MapSizes { backends: 512, ..MapSizes::default() };
    let paths = AgentPaths { map_sizes, ..fixture.kernel.paths().clone() };
    drop(fixture.kernel.programs.take());
    let mut programs = EbpfPrograms::load(paths).expect("the kernel takes them");
    programs.take_over().expect("writable");
    programs.retire_previous().expect("writable");
    for step in ["ask", "ask 10.96.0.9:53"] {
        assert_eq!(client.expect_step(step), "pod0 10.96.0.9:53");
    }
    assert_eq!(client.expect_step("peer"), "10.96.0.9:53");
    let maps = KernelMaps::open(&programs.pins()).expect("they are pinned");
    assert_eq!(maps.control_word(abi::CONTROL_UDP_SOCKETS), 1, "the connected one");
    client.expect_step("drop");
    assert_eq!(maps.control_word(abi::CONTROL_UDP_SOCKETS), 0);
    assert_eq!(programs.remove_outlived_pins(), 0);
    fixture.kernel.programs = Some(programs);
}

/// As with an agent whose mode selects no Services of the cluster any more: its clients are the pods only.
#[test]
fn a_socket_outside_of_a_narrower_cgroup_of_clients_sees_the_cluster_ip_until_it_closes() {
    let mut fixture = ClusterUdpFixture::exclusive(1);
    fixture.add_service(9, &[0]);
    let mut client = fixture.start_client();
    client.expect_step("connect 10.96.0.9:53");
    let wide = fixture.kernel.paths().clone();
    let narrow = AgentPaths { clients: wide.pods.clone(), ..wide.clone() };
    drop(fixture.kernel.programs.take());
    let programs = EbpfPrograms::load(narrow).expect("the kernel takes them");
    assert_eq!(programs.keep_attached().expect("attached"), 0, "they stay where they are");
    assert_eq!(client.expect_step("ask"), "pod0 10.96.0.9:53");
    assert_eq!(client.expect_step("peer"), "10.96.0.9:53");
    client.expect_step("open4");
    assert_eq!(
        client.run_step("ask-briefly 10.96.0.9:53"),
        Err(EAGAIN),
        "it is no client any more"
    );
    client.expect_step("drop");
    assert_eq!(fixture.sockets(), 0);
    drop(programs);
    let programs = EbpfPrograms::load(wide).expect("the kernel takes them");
    client.expect_step("open4");
    assert_eq!(client.expect_step("ask 10.96.0.9:53"), "pod0 10.96.0.9:53", "as before");
    fixture.kernel.programs = Some(programs);
}
