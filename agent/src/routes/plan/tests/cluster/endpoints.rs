//! Pure: changes of endpoints, by which the agent ends stale sockets.

use super::*;

/// Returns the endpoints at these pods.
fn at_pods(pods: &[u8]) -> BTreeSet<SocketAddr> {
    pods.iter().map(|&pod| SocketAddr::from(([10, 244, 0, pod], 8080))).collect()
}

impl PlannerFixture {
    /// Returns the changed endpoints of the frontends of a protocol if endpoints may have left since the last call.
    fn changes_after_departure(
        &mut self,
        protocol: u8,
    ) -> Option<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>> {
        self.planner.take_departures()?;
        let changes = self.planner.take_changed_endpoints().into_iter();
        let of_protocol = changes.filter(|((key, _), _)| key.protocol == protocol);
        Some(of_protocol.map(|((key, _), endpoints)| (key, (*endpoints).clone())).collect())
    }
}

/// The agent ends connected sockets to those that are missing here.
#[test]
fn endpoints_for_datagrams_are_told_when_some_have_left() {
    let at = |pods: &[u8]| Some(BTreeMap::from([(dns_key(1), at_pods(pods))]));
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let slice = |pods: &[u8]| vec![ClusterChange::Slice(name(1), Some(dns_slice(1, pods)))];
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.changes_after_departure(abi::IPPROTO_UDP)
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

/// Connections may be in use as long as a slice names their endpoint.
#[test]
fn endpoints_for_connections_leave_when_no_slice_names_them() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let at = |pods: &[u8]| BTreeMap::from([(key([10, 96, 0, 1]), at_pods(pods))]);
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.changes_after_departure(abi::IPPROTO_TCP)
    };
    let objects = vec![set_tcp_service(1, None), set_slice(1, &[5, 6, 7])];
    assert_eq!(told(first_lists(objects)), Some(at(&[5, 6, 7])));
    let mut changed = slice(1, &[5, 6, 7]);
    let [unready, terminating, _] = &mut changed.slice.endpoints[..] else { panic!("three") };
    (unready.is_ready, unready.is_serving) = (false, false);
    (terminating.is_ready, terminating.is_serving) = (false, false);
    terminating.is_terminating = true;
    assert_eq!(told(vec![ClusterChange::Slice(name(1), Some(changed))]), None);
    assert_eq!(told(vec![set_slice(1, &[6, 7])]), Some(at(&[6, 7])));
    assert_eq!(told(vec![set_slice(1, &[])]), None, "without others, connections stay");
    assert_eq!(told(vec![set_slice(1, &[7])]), Some(at(&[7])));
    assert_eq!(told(vec![set_tcp_service(1, Some(false))]), None, "handed back to kube-proxy");
    let changes = fixture.planner.take_changed_endpoints();
    assert_eq!(changes.into_values().map(|it| it.len()).collect::<Vec<_>>(), [0]);
}

/// An API server may answer a list from a cache that is behind.
#[test]
fn departures_tell_if_a_list_or_the_watch_shows_them() {
    use DepartureSource::{List, Watch};
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.planner.take_departures()
    };
    let objects = vec![set_tcp_service(1, None), set_slice(1, &[5, 6, 7, 8])];
    assert_eq!(told(first_lists(objects.clone())), Some(List));
    assert_eq!(told(first_lists(objects)), None, "none has left");
    assert_eq!(told(vec![set_slice(1, &[6, 7, 8])]), Some(Watch));
    let begun = ClusterChange::ListBegun(ClusterResource::EndpointSlice);
    assert_eq!(told(vec![begun, set_slice(1, &[7, 8])]), Some(List), "of a part of a list");
    let rest = ClusterChange::ListCompleted(ClusterResource::EndpointSlice);
    assert_eq!(told(vec![set_slice(1, &[8]), rest]), Some(List));
    assert_eq!(told(vec![set_slice(1, &[9])]), Some(Watch));
}

/// Thousands of Services may have endpoints, and each plan asks.
#[test]
fn endpoints_are_told_of_changed_frontends_only() {
    let at = |number: u8, pods: &[u8]| (dns_key(number), at_pods(pods));
    let slice =
        |number: u8, pods: &[u8]| ClusterChange::Slice(name(number), Some(dns_slice(number, pods)));
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut told = |changes| {
        fixture.observe(changes);
        fixture.changes_after_departure(abi::IPPROTO_UDP)
    };
    let objects = [set_service(1, None), set_service(2, None), slice(1, &[5, 6]), slice(2, &[9])];
    assert_eq!(told(first_lists(objects.into())), Some([at(1, &[5, 6]), at(2, &[9])].into()));
    assert_eq!(told(vec![slice(1, &[6])]), Some([at(1, &[6])].into()));
    assert_eq!(told(vec![slice(2, &[9, 8])]), None, "none has left");
    assert_eq!(told(vec![ClusterChange::Service(name(2), None)]), None, "the service is gone");
    assert_eq!(told(vec![slice(1, &[7])]), Some([at(1, &[7]), at(2, &[])].into()));
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
    told.push(fixture.planner.take_departures().is_some());
    for pods in [[6, 7], [7, 8]] {
        fixture.observe(slice(&pods));
        told.push(fixture.planner.take_departures().is_some());
    }
    assert_eq!(in_list(&fixture), [6, 7].map(target).into(), "it waits");
    assert!(fixture.planner.has_due_work());
    fixture.now += abi::QUARANTINE_NS;
    fixture.planner.retry_unfit();
    fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(in_list(&fixture), [7, 8].map(target).into());
    told.extend([(); 2].map(|()| fixture.planner.take_departures().is_some()));
    assert_eq!(told, [true, true, true, true, false]);
}

/// A ClusterIP is free for another Service once its own is deleted. The agent may learn of both in either order.
#[test]
fn endpoints_of_an_address_are_those_of_the_services_that_have_it_now() {
    let slice =
        |number: u8, pods: &[u8]| ClusterChange::Slice(name(number), Some(dns_slice(number, pods)));
    let at_address = |number: u8, address: u8| {
        ClusterChange::Service(name(number), Some(cluster_service(address, None)))
    };
    let gone = |number: u8| ClusterChange::Service(name(number), None);
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut known = FrontendEndpoints::new();
    let mut endpoints_after = |changes| -> BTreeSet<SocketAddr> {
        fixture.observe(changes);
        known.extend(fixture.planner.take_changed_endpoints());
        let of_address = known.iter().filter(|((key, _), _)| *key == dns_key(1));
        of_address.flat_map(|(_, endpoints)| endpoints.iter().copied()).collect()
    };
    let objects = vec![slice(2, &[6]), slice(1, &[5]), at_address(1, 1)];
    assert_eq!(endpoints_after(first_lists(objects)), at_pods(&[5]));
    assert_eq!(endpoints_after(vec![gone(1), at_address(2, 1)]), at_pods(&[6]), "in one batch");
    // As in a list, which names what is there before it shows what is gone.
    assert_eq!(endpoints_after(vec![at_address(1, 1)]), at_pods(&[5, 6]));
    assert_eq!(endpoints_after(vec![gone(2)]), at_pods(&[5]), "one after the other");
}
