//! Pure: Services and EndpointSlices at the limits of Kubernetes, and slices that contradict each other.

use std::ops::Range;

use super::*;

/// Returns the EndpointSlice of Service 1 with this number, and with an endpoint for each of these numbers.
fn large_slice(slice_number: u16, endpoints: Range<u16>) -> ClusterChange {
    let mut observed = slice(1, &[1]);
    let usual = observed.slice.endpoints[0].clone();
    let endpoint = |number: u16| {
        let [high, low] = number.to_be_bytes();
        ServiceEndpoint { address: IpAddr::from([10, 245, high, low]), ..usual.clone() }
    };
    observed.slice.endpoints = endpoints.map(endpoint).collect();
    let slice_name = NamespacedName::new("default", format!("s1-{slice_number}"));
    ClusterChange::Slice(slice_name, Some(observed))
}

/// Returns the frontend of an IPv6 address, port 80.
fn ipv6_key(address: IpAddr) -> FrontendKey {
    FrontendKey { address: to_v6_octets(address), ..key([0; 4]) }
}

#[test]
fn a_service_with_ten_thousand_endpoints_has_each_in_its_list() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let slices = (0..100u16).map(|number| large_slice(number, number * 100..(number + 1) * 100));
    let objects = [set_tcp_service(1, None)].into_iter().chain(slices).collect();
    fixture.observe(first_lists(objects));
    let found = |fixture: &PlannerFixture| -> BTreeSet<[u8; 16]> {
        let list = fixture.backends(1).expect("it is served");
        list.into_iter().map(|backend| backend.address).collect()
    };
    assert_eq!(found(&fixture).len(), 10_000);
    let before = found(&fixture);
    let plan = fixture.observe(vec![large_slice(50, 5_001..5_100)]);
    assert_eq!((plan.ops.len(), plan.newly_refused), (2, vec![]), "an entry and a word");
    let left: Vec<_> = before.difference(&found(&fixture)).copied().collect();
    assert_eq!(left, [to_v6_octets(IpAddr::from([10, 245, 0x13, 0x88]))]);
}

/// The secondary family of a Service may change, and a slice may be made again with another one.
#[test]
fn a_service_whose_families_change_has_the_endpoints_of_the_present_ones() {
    let (four, six) = (IpAddr::from([10, 96, 0, 1]), ipv6_address(1));
    let set = |cluster_ips: &[IpAddr]| {
        let mut observed = without_udp(cluster_service(1, None));
        observed.service.cluster_ips = cluster_ips.to_vec();
        ClusterChange::Service(name(1), Some(observed))
    };
    let mut slice_of_six = slice(1, &[5]);
    slice_of_six.slice.family = AddressFamily::V6;
    slice_of_six.slice.endpoints[0].address = ipv6_address(5);
    let endpoint_of_six = BackendTarget { address: to_v6_octets(ipv6_address(5)), ..target(5) };
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let found = |fixture: &PlannerFixture| {
        let keys = [key([10, 96, 0, 1]), ipv6_key(six)];
        keys.map(|key| fixture.kernel.find(&key).map(|(mode, backends, _)| (mode, backends)))
    };
    let leads_to = |backend| Some((RoutingMode::PickRandom, vec![backend]));
    let refuses = || Some((RoutingMode::Refuse, vec![]));

    fixture.observe(first_lists(vec![set(&[four]), set_slice(1, &[5])]));
    assert_eq!(found(&fixture), [leads_to(target(5)), None]);
    fixture.observe(vec![set(&[four, six])]);
    assert_eq!(found(&fixture), [leads_to(target(5)), refuses()], "no slice is of IPv6");
    fixture.observe(vec![ClusterChange::Slice(name(1), Some(slice_of_six))]);
    assert_eq!(found(&fixture), [refuses(), leads_to(endpoint_of_six)]);
    fixture.observe(vec![set(&[six])]);
    assert_eq!(found(&fixture), [None, leads_to(endpoint_of_six)]);
}

/// A name of a Service or port has up to 63 characters, one of an EndpointSlice up to 253.
#[test]
fn long_names_that_differ_at_their_end_are_told_apart() {
    let long = |length: usize, end: u8| format!("{}{end}", "n".repeat(length - 1));
    let namespaced = |length, end| NamespacedName::new(long(63, 0), long(length, end));
    let service = |number: u8| {
        let mut observed = without_udp(cluster_service(number, None));
        observed.service.ports[0].name = long(63, number).into();
        ClusterChange::Service(namespaced(63, number), Some(observed))
    };
    let slice_of = |number: u8, pods: &[u8]| {
        let mut observed = slice(number, pods);
        observed.service = namespaced(63, number);
        observed.slice.ports[0].name = long(63, number).into();
        ClusterChange::Slice(namespaced(253, number), Some(observed))
    };
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let objects = vec![service(1), service(2), slice_of(1, &[5]), slice_of(2, &[6])];
    fixture.observe(first_lists(objects));
    let backends = |fixture: &PlannerFixture| [1, 2].map(|number| fixture.backends(number));
    assert_eq!(backends(&fixture), [Some(vec![target(5)]), Some(vec![target(6)])]);
    fixture.observe(vec![ClusterChange::Slice(namespaced(253, 1), None)]);
    assert_eq!(backends(&fixture), [Some(vec![]), Some(vec![target(6)])]);
}

/// While a control plane moves an endpoint, one slice may name it as gone and the other one as new.
#[test]
fn slices_that_contradict_each_other_name_an_endpoint_once_until_none_has_it() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let in_state = |slice_number: u8, is_ready: bool| {
        let mut observed = slice(1, &[5]);
        let endpoint = &mut observed.slice.endpoints[0];
        (endpoint.is_ready, endpoint.is_serving) = (is_ready, is_ready);
        endpoint.is_terminating = !is_ready;
        ClusterChange::Slice(name(slice_number), Some(observed))
    };
    fixture.observe(first_lists(vec![set_tcp_service(1, None), in_state(1, true)]));
    let turns = [
        vec![in_state(2, true)],
        vec![in_state(1, false)],
        vec![in_state(1, true), in_state(2, false)],
        vec![ClusterChange::Slice(name(2), None)],
    ];
    for (turn, changes) in turns.into_iter().enumerate() {
        fixture.observe(changes);
        assert_eq!(fixture.backends(1), Some(vec![target(5)]), "turn {turn}");
    }
    fixture.observe(vec![in_state(1, false)]);
    assert_eq!(fixture.backends(1), Some(vec![]));
}
