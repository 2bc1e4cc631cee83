//! Shell: connects to a Service with thousands of endpoints, whose list changes all the time.

use std::{collections::BTreeSet, net::IpAddr};

use agent::{
    config::ClusterIpMode,
    routes::plan::{ClusterChange, ClusterResource},
};
use common::wire::NamespacedName;

use crate::{
    cluster_ip::{observed_service, observed_slice},
    fixture::{KernelFixture, NetnsFixture, SERVING_PORT, run_ip},
    scripted_process::ScriptedProcess,
};

/// Endpoints of the large Service, in slices of the usual size.
const ENDPOINTS: u16 = 5_000;
const SLICE_ENDPOINTS: u16 = 100;
/// Endpoints of the Service that uses backend numbers which the large one gave up.
const OTHER_ENDPOINTS: u16 = 100;
const CLUSTER_IP: &str = "10.96.0.9";
const OTHER_CLUSTER_IP: &str = "10.96.0.10";

/// Two Services with many addresses, behind one pod each.
struct LargeServiceFixture {
    kernel: KernelFixture,
    client: NetnsFixture,
    /// Endpoints by slice, as the last part of their addresses.
    slices: Vec<Vec<u16>>,
    other: Vec<u16>,
    /// Kept, as they serve.
    _servers: [ScriptedProcess; 2],
}

impl LargeServiceFixture {
    fn new() -> Self {
        let mut kernel = KernelFixture::new();
        kernel.serve_cluster_services(ClusterIpMode::All);
        let client = kernel.add_client();
        let pods = [kernel.add_pod(), kernel.add_pod()];
        let mut servers = pods.each_ref().map(NetnsFixture::start_process);
        for ((pod, server), number) in pods.iter().zip(&mut servers).zip(0u8..) {
            let network = format!("10.{}.0.0/16", 100 + number);
            run_ip(&["-n", &pod.netns, "route", "add", "local", &network, "dev", "lo"]);
            run_ip(&["-n", &client.netns, "route", "add", &network, "via", &pod.ipv4()]);
            server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} pod{number}"));
        }
        let endpoints: Vec<u16> = (0..ENDPOINTS).collect();
        let slices = endpoints.chunks(SLICE_ENDPOINTS.into()).map(<[u16]>::to_vec).collect();
        let other = (0..OTHER_ENDPOINTS).collect();
        let mut fixture = Self { kernel, client, slices, other, _servers: servers };
        let mut changes = ClusterResource::ALL.map(ClusterChange::ListBegun).to_vec();
        for (name, address) in [("large", CLUSTER_IP), ("other", OTHER_CLUSTER_IP)] {
            let service = observed_service(address, None);
            changes.push(ClusterChange::Service(service_name(name), Some(service)));
        }
        changes.extend((0..fixture.slices.len()).map(|index| fixture.slice(index)));
        changes.push(fixture.other_slice());
        changes.extend(ClusterResource::ALL.map(ClusterChange::ListCompleted));
        fixture.kernel.observe_cluster(changes);
        fixture
    }

    /// Returns the present content of a slice of the large Service.
    fn slice(&self, index: usize) -> ClusterChange {
        let addresses = self.slices[index].iter().map(|&endpoint| address(100, endpoint));
        let slice = observed_slice(service_name("large"), addresses);
        ClusterChange::Slice(service_name(&format!("large-{index}")), Some(slice))
    }

    /// Returns the present content of the other Service's slice.
    fn other_slice(&self) -> ClusterChange {
        let addresses = self.other.iter().map(|&endpoint| address(101, endpoint));
        let slice = observed_slice(service_name("other"), addresses);
        ClusterChange::Slice(service_name("other-0"), Some(slice))
    }

    /// Puts another endpoint in place of one of each Service. Returns the larger number of map operations.
    fn change(&mut self, turn: u16) -> usize {
        let index = usize::from(turn) % self.slices.len();
        let slice = &mut self.slices[index];
        slice.rotate_left(1);
        let last = slice.last_mut().expect("it has endpoints");
        *last = ENDPOINTS + turn;
        let slice = self.slice(index);
        let writes = self.kernel.observe_cluster(vec![slice]);
        self.other.rotate_left(1);
        *self.other.last_mut().expect("it has endpoints") = OTHER_ENDPOINTS + turn;
        let slice = self.other_slice();
        writes.max(self.kernel.observe_cluster(vec![slice]))
    }

    /// Returns the addresses that connects to the large Service find, and the length of their list.
    fn found(&self) -> (BTreeSet<[u8; 16]>, usize) {
        let routes = self.kernel.maps.read_routes().expect("readable");
        let mut lists = routes.services.values().map(|(_, _, list)| list);
        let is_large = |list: &&Vec<u32>| list.len() > usize::from(OTHER_ENDPOINTS);
        let list = lists.find(is_large).expect("a long list");
        (list.iter().map(|id| routes.backends[id].address).collect(), list.len())
    }
}

fn service_name(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

fn address(network: u8, endpoint: u16) -> IpAddr {
    let [high, low] = endpoint.to_be_bytes();
    IpAddr::from([10, network, high, low])
}

/// Each change frees a backend number, which the other Service uses at once: the fixture's time passes at each plan.
#[test]
fn every_connect_to_a_large_service_whose_list_changes_in_place_reaches_its_pod() {
    let mut fixture = LargeServiceFixture::new();
    let mut clients = [fixture.client.start_process(), fixture.client.start_process()];
    clients[0].send_step(&format!("hammer {CLUSTER_IP}:80 3000"));
    clients[1].send_step(&format!("hammer {OTHER_CLUSTER_IP}:80 3000"));
    for turn in 0..600 {
        let writes = fixture.change(turn);
        assert_eq!(writes, 3, "a backend, an entry and a word");
    }
    let replies = clients.each_mut().map(ScriptedProcess::read_reply);
    assert_eq!(replies, [Ok("pod0=3000".to_owned()), Ok("pod1=3000".to_owned())]);
    let wanted = fixture.slices.iter().flatten().map(|&endpoint| match address(100, endpoint) {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    });
    assert_eq!(fixture.found(), (wanted.collect(), ENDPOINTS.into()));
}
