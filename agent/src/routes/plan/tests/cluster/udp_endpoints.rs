//! Pure: changes of endpoints for datagrams, by which the agent ends stale UDP sockets.

use super::*;

/// The agent ends connected sockets to those that are missing here.
#[test]
fn endpoints_for_datagrams_are_told_when_some_have_left() {
    let at = |pods: &[u8]| {
        let pods = pods.iter().map(|&pod| SocketAddr::from(([10, 244, 0, pod], 8080)));
        Some(UdpEndpoints::from([(dns_key(1), pods.collect())]))
    };
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let slice = |pods: &[u8]| vec![ClusterChange::Slice(name(1), Some(dns_slice(1, pods)))];
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.planner.take_changed_udp_endpoints()
    };
    assert_eq!(told(slice(&[5, 6])), None, "the lists are not complete");
    let objects = [vec![set_service(1, None)], slice(&[5, 6])].concat();
    assert_eq!(told(first_lists(objects)), at(&[5, 6]));
    assert_eq!(told(vec![]), None, "once");
    assert_eq!(told(slice(&[5, 6, 7])), None, "none has left");
    assert_eq!(told(slice(&[6, 7])), at(&[6, 7]));
    // One that terminates and still answers is no target of new sockets, and keeps those that it has.
    let mut terminating = dns_slice(1, &[6, 7]);
    (terminating.slice.endpoints[0].is_ready, terminating.slice.endpoints[0].is_terminating) =
        (false, true);
    let mut gone = terminating.clone();
    gone.slice.endpoints[0].is_serving = false;
    let set = |slice| vec![ClusterChange::Slice(name(1), Some(slice))];
    assert_eq!(told(set(terminating)), None);
    assert_eq!(told(set(gone)), at(&[7]));
    // Without endpoints, sockets are left alone until there are some.
    assert_eq!(told(slice(&[])), None);
    assert_eq!(told(slice(&[8])), at(&[8]));
    assert_eq!(told(vec![set_service(1, Some(false))]), None, "handed back to kube-proxy");
    assert_eq!(told(vec![set_service(1, None)]), at(&[8]));
}

/// Thousands of Services may have endpoints for datagrams, and each plan asks.
#[test]
fn endpoints_for_datagrams_are_told_of_changed_frontends_only() {
    let endpoints = |number: u8, pods: &[u8]| {
        let pods = pods.iter().map(|&pod| SocketAddr::from(([10, 244, 0, pod], 8080)));
        (dns_key(number), pods.collect())
    };
    let slice =
        |number: u8, pods: &[u8]| ClusterChange::Slice(name(number), Some(dns_slice(number, pods)));
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.planner.take_changed_udp_endpoints()
    };
    let objects = [set_service(1, None), set_service(2, None), slice(1, &[5, 6]), slice(2, &[9])];
    let both = UdpEndpoints::from([endpoints(1, &[5, 6]), endpoints(2, &[9])]);
    assert_eq!(told(first_lists(objects.into())), Some(both));
    assert_eq!(told(vec![slice(1, &[6])]), Some(UdpEndpoints::from([endpoints(1, &[6])])));
    assert_eq!(told(vec![slice(2, &[9, 8])]), None, "none has left");
    assert_eq!(told(vec![ClusterChange::Service(name(2), None)]), None, "the service is gone");
    let changes = UdpEndpoints::from([endpoints(1, &[7]), endpoints(2, &[])]);
    assert_eq!(told(vec![slice(1, &[7])]), Some(changes));
}

/// A ClusterIP is free for another Service once its own is deleted. The agent may learn of both in either order.
#[test]
fn endpoints_for_datagrams_are_those_of_the_service_that_has_the_address_now() {
    let endpoints = |number: u8, pods: &[u8]| {
        let pods = pods.iter().map(|&pod| SocketAddr::from(([10, 244, 0, pod], 8080)));
        (dns_key(number), pods.collect())
    };
    let slice =
        |number: u8, pods: &[u8]| ClusterChange::Slice(name(number), Some(dns_slice(number, pods)));
    let at_address = |number: u8, address: u8| {
        ClusterChange::Service(name(number), Some(cluster_service(address, None)))
    };
    let gone = |number: u8| ClusterChange::Service(name(number), None);
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.planner.take_changed_udp_endpoints()
    };
    let objects = vec![slice(2, &[6]), slice(1, &[5]), at_address(1, 1)];
    assert_eq!(told(first_lists(objects)), Some(UdpEndpoints::from([endpoints(1, &[5])])));
    let second = told(vec![gone(1), at_address(2, 1)]);
    assert_eq!(second, Some(UdpEndpoints::from([endpoints(1, &[6])])), "in one batch");
    // As in a list, which names what is there before it shows what is gone.
    assert_eq!(told(vec![at_address(1, 1)]), Some(UdpEndpoints::from([endpoints(1, &[5])])));
    assert_eq!(told(vec![gone(2)]), None);
    let both = UdpEndpoints::from([endpoints(1, &[5]), endpoints(3, &[9])]);
    assert_eq!(told(vec![at_address(3, 3), slice(3, &[9])]), Some(both), "one after the other");
}

/// Until a Service that waits for room has its next list, sockets may get an endpoint that has left.
#[test]
fn endpoints_for_datagrams_are_told_again_once_a_service_that_waited_has_its_list() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    // Six entries are for Services of the cluster: two lists of two, and one more.
    fixture.planner.list_entry_pool = ExtentPool::new(8);
    let slice = |pods: &[u8]| vec![ClusterChange::Slice(name(1), Some(dns_slice(1, pods)))];
    let in_list = |fixture: &PlannerFixture| {
        let (_, backends, _) = fixture.kernel.find(&dns_key(1)).unwrap();
        backends.into_iter().collect::<BTreeSet<_>>()
    };
    let mut told = Vec::new();
    fixture.observe(first_lists([vec![set_service(1, None)], slice(&[5, 6])].concat()));
    told.push(fixture.planner.take_changed_udp_endpoints().is_some());
    for pods in [[6, 7], [7, 8]] {
        fixture.observe(slice(&pods));
        told.push(fixture.planner.take_changed_udp_endpoints().is_some());
    }
    assert_eq!(in_list(&fixture), [6, 7].map(target).into(), "it waits");
    assert!(fixture.planner.has_due_work());
    fixture.now += abi::QUARANTINE_NS;
    fixture.planner.retry_unfit();
    fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(in_list(&fixture), [7, 8].map(target).into());
    told.extend([(); 2].map(|()| fixture.planner.take_changed_udp_endpoints().is_some()));
    assert_eq!(told, [true, true, true, true, false]);
}
