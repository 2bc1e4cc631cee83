//! Pure: Services that a node must reach first after a reboot.

use super::*;
use crate::routes::bootstrap::{BootstrapFrontend, BootstrapServices};

fn dns_name() -> NamespacedName {
    NamespacedName::new("kube-system", "dns")
}

fn api_server_name() -> NamespacedName {
    NamespacedName::new("default", "kubernetes")
}

/// Sets a Service with the address of [`cluster_service`] with this number.
fn set_named(name: NamespacedName, number: u8, is_dns: bool) -> ClusterChange {
    let mut observed = without_udp(ObservedService { is_dns, ..cluster_service(number, None) });
    if name == api_server_name() {
        observed.service.ports[0].name = "https".into();
    }
    ClusterChange::Service(name, Some(observed))
}

/// Sets the only EndpointSlice of a Service, which has its name.
fn set_named_slice(service: NamespacedName, pods: &[u8]) -> ClusterChange {
    let mut slice = slice(0, pods);
    if service == api_server_name() {
        slice.slice.ports[0].name = "https".into();
    }
    ClusterChange::Slice(service.clone(), Some(ObservedSlice { service, ..slice }))
}

fn pod_address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 244, 0, number], 8080))
}

fn frontend(name: NamespacedName, number: u8, endpoints: &[u8]) -> BootstrapFrontend {
    BootstrapFrontend {
        namespace: name.namespace.to_string(),
        name: name.name.to_string(),
        protocol: 6,
        address: SocketAddr::from(([10, 96, 0, number], 80)),
        affinity_seconds: 0,
        endpoints: endpoints.iter().copied().map(pod_address).collect(),
    }
}

/// Returns the number of endpoints in the bootstrap facts by Service, if the facts may have changed.
fn taken(fixture: &mut PlannerFixture) -> Option<(usize, Vec<(String, usize)>)> {
    let facts = fixture.planner.take_bootstrap_services()?;
    let frontends = facts.frontends.into_iter().map(|it| (it.name, it.endpoints.len()));
    Some((facts.api_servers.len(), frontends.collect()))
}

impl PlannerFixture {
    /// Fills the kernel's maps from a file, and starts a planner.
    fn booted(
        frontends: &[BootstrapFrontend],
        own: Option<BTreeSet<IpAddr>>,
    ) -> (Self, Vec<MapOp>) {
        let mut fixture = Self::new();
        let ops =
            bootstrap_ops(fixture.kernel.table(), frontends, own.as_ref(), fixture.now).unwrap();
        ops.iter().for_each(|op| fixture.kernel.write(op));
        fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
        fixture.planner.set_route_table_known(false);
        fixture.planner.serve_cluster_services(ClusterIpMode::All, "here");
        own.into_iter().for_each(|own| fixture.planner.serve_api_server(own));
        (fixture, ops)
    }
}

#[test]
fn the_api_server_is_served_by_agents_that_reach_it_by_another_address() {
    let own = |last: &[u8]| -> Option<BTreeSet<IpAddr>> {
        Some(last.iter().map(|&it| IpAddr::from([10, 96, 0, it])).collect())
    };
    // Servers that are given by name have no address here.
    let cases = [(None, false), (own(&[]), true), (own(&[9]), true), (own(&[9, 1]), false)];
    for (own, is_served) in cases {
        let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
        own.clone().into_iter().for_each(|it| fixture.planner.serve_api_server(it));
        let objects =
            vec![set_named(api_server_name(), 1, false), set_named_slice(api_server_name(), &[7])];
        fixture.observe(first_lists(objects));
        assert_eq!(fixture.backends(1).is_some(), is_served, "{own:?}");
        let facts = fixture.planner.take_bootstrap_services().expect("known for the first time");
        assert_eq!(facts.api_servers, [pod_address(7)].into(), "learnt in either case");
    }
}

/// An API server may be behind another Service, as with hosted control planes.
#[test]
fn no_service_is_served_at_an_address_of_an_api_server() {
    let own: BTreeSet<IpAddr> = [IpAddr::from([10, 96, 0, 3])].into();
    let served = |fixture: &PlannerFixture| [3, 4].map(|it| fixture.backends(it).is_some());
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.serve_api_server(own.clone());
    let services = [set_tcp_service(3, None), set_tcp_service(4, None)];
    let slices = [set_slice(3, &[5]), set_slice(4, &[6])];
    fixture.observe(first_lists([services, slices].concat()));
    assert_eq!(served(&fixture), [false, true]);
    let file = [frontend(name(3), 3, &[5]), frontend(name(4), 4, &[6])];
    let (booted, _) = PlannerFixture::booted(&file, Some(own));
    assert_eq!(served(&booted), [false, true]);
}

#[test]
fn facts_are_told_once_all_services_are_known_and_when_they_change() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let objects = vec![
        set_named(dns_name(), 1, true),
        set_named_slice(dns_name(), &[5, 6]),
        set_named(api_server_name(), 2, false),
        set_named_slice(api_server_name(), &[7]),
        set_service(3, None),
    ];
    let mut changes = first_lists(objects);
    let last = changes.pop().unwrap();
    fixture.observe(changes);
    assert_eq!(taken(&mut fixture), None, "a list is not complete");
    fixture.observe(vec![last]);
    let dns = |endpoints| vec![("dns".to_owned(), endpoints)];
    assert_eq!(taken(&mut fixture), Some((1, dns(2))));
    assert_eq!(taken(&mut fixture), None, "told already");
    fixture.observe(vec![set_slice(3, &[8])]);
    assert_eq!(taken(&mut fixture), None, "another Service has changed");
    fixture.observe(vec![set_named_slice(dns_name(), &[])]);
    assert_eq!(taken(&mut fixture), Some((1, dns(0))));
    fixture.observe(vec![set_named_slice(api_server_name(), &[7, 8])]);
    assert_eq!(taken(&mut fixture), Some((2, dns(0))));
    fixture.observe(vec![set_named(dns_name(), 1, false)]);
    assert_eq!(taken(&mut fixture), Some((2, Vec::new())), "it has lost its label");
    fixture.observe(vec![ClusterChange::Service(dns_name(), None)]);
    assert_eq!(taken(&mut fixture), None);
}

#[test]
fn a_cluster_without_such_services_says_so_once() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::Labelled);
    let objects = vec![set_named(dns_name(), 1, true), set_named_slice(dns_name(), &[5])];
    fixture.observe(first_lists(objects));
    let none = BootstrapServices::default();
    assert_eq!(fixture.planner.take_bootstrap_services(), Some(none), "the mode selects none");
    fixture.observe(first_lists(vec![set_named(dns_name(), 1, true)]));
    assert_eq!(taken(&mut fixture), None, "the same again");
    let mut off = PlannerFixture::with_mode(ClusterIpMode::Off);
    assert_eq!(taken(&mut off), None, "nothing is ever known");
}

#[test]
fn empty_maps_follow_the_file_until_the_services_are_known() {
    let dns = frontend(dns_name(), 1, &[5, 6]);
    let gone = frontend(NamespacedName::new("kube-system", "gone"), 2, &[7]);
    let (mut fixture, _) = PlannerFixture::booted(&[dns, gone], None);
    assert_eq!(fixture.backends(1), Some(vec![target(5), target(6)]));
    assert_eq!(fixture.backends(2), Some(vec![target(7)]));
    assert_eq!(fixture.plan_and_write(&BTreeMap::new()), MapPlan::default(), "nothing is known");
    let mut changes =
        first_lists(vec![set_named(dns_name(), 1, true), set_named_slice(dns_name(), &[5, 6])]);
    let last = changes.pop().unwrap();
    assert_eq!(fixture.observe(changes), MapPlan::default(), "a list is not complete");
    let plan = fixture.observe(vec![last]);
    assert_eq!(plan.ops, [MapOp::RemoveFrontend { key: key([10, 96, 0, 2]) }]);
    fixture.observe(vec![set_named_slice(dns_name(), &[8])]);
    assert_eq!(fixture.backends(1), Some(vec![target(8)]));
}

#[test]
fn the_facts_of_a_planner_fill_the_maps_of_the_next_one() {
    let own: BTreeSet<IpAddr> = [IpAddr::from([10, 0, 0, 1])].into();
    let mut before = PlannerFixture::with_mode(ClusterIpMode::All);
    before.planner.serve_api_server(own.clone());
    let mut dns = ObservedService { is_dns: true, ..cluster_service(1, None) };
    dns.service.affinity_timeout = Some(Duration::from_secs(60));
    dns.service.cluster_ips.push(ipv6_address(1));
    before.observe(first_lists(vec![
        ClusterChange::Service(dns_name(), Some(dns)),
        set_named_slice(dns_name(), &[5, 6]),
        set_named(api_server_name(), 2, false),
        set_named_slice(api_server_name(), &[7]),
        set_service(3, None),
        set_slice(3, &[8]),
    ]));
    let mut facts = before.planner.take_bootstrap_services().unwrap();
    facts.frontends.retain(|it| !it.endpoints.is_empty());
    let (after, _) = PlannerFixture::booted(&facts.frontends, Some(own));
    let mut expected = before.kernel.all();
    // No other Service is needed first, and an address without endpoints is not filled.
    expected
        .retain(|key, (_, backends, _)| *key != super::key([10, 96, 0, 3]) && !backends.is_empty());
    assert_eq!(expected.len(), 2);
    assert_eq!(after.kernel.all(), expected);
    let affinity = |fixture: &PlannerFixture| {
        let service_id = fixture.kernel.frontends[&key([10, 96, 0, 1])];
        fixture.kernel.infos[&service_id].affinity_seconds
    };
    assert_eq!((affinity(&after), affinity(&before)), (60, 60));
}

#[test]
fn the_api_servers_own_service_is_not_filled_for_an_agent_that_needs_it() {
    let own = |last| -> Option<BTreeSet<IpAddr>> { Some([IpAddr::from([10, 96, 0, last])].into()) };
    for (own, is_filled) in [(None, false), (own(1), false), (own(9), true)] {
        let file = [frontend(api_server_name(), 1, &[7])];
        let (fixture, ops) = PlannerFixture::booted(&file, own.clone());
        assert_eq!(fixture.backends(1).is_some(), is_filled, "{own:?}");
        assert_eq!(ops.is_empty(), !is_filled, "{own:?}");
    }
}

#[test]
fn a_file_that_names_a_frontend_twice_fills_it_once() {
    let twice = [frontend(dns_name(), 1, &[5]), frontend(dns_name(), 1, &[6])];
    let (fixture, _) = PlannerFixture::booted(&twice, None);
    assert_eq!(fixture.backends(1), Some(vec![target(5)]));
}

#[test]
fn lists_that_do_not_fit_fill_nothing() {
    let endpoints = |number: u32| {
        let [a, b, c, _] = number.to_be_bytes();
        (0..=255).map(move |last| SocketAddr::from(([10, a | b, c, last], 53)))
    };
    let too_many = (0..=abi::BACKENDS_MAX / 256).flat_map(|it| endpoints(it << 8)).collect();
    let file = [BootstrapFrontend { endpoints: too_many, ..frontend(dns_name(), 1, &[]) }];
    let refused = bootstrap_ops(KernelRoutes::default(), &file, None, 0).expect_err("too many");
    assert_eq!(refused.map, abi::maps::BACKENDS);
}
