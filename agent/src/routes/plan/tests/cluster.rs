//! Pure: plans of the cluster's Services, beside those of the RouteTable.

mod bad_input;
mod bootstrap;
mod endpoints;

use common::service_routing::{
    AddressFamily, ClusterIpPort, ClusterIpService, InternalTrafficPolicy, ServiceEndpoint,
    ServiceSlice, ServiceSlicePort, TransportProtocol,
};

use super::*;

/// Returns a Service at the address of [`service`] with the same number.
pub(super) fn cluster_service(number: u8, label: ClusterIpLabel) -> ObservedService {
    let port = |name: &str, protocol, port| ClusterIpPort {
        name: name.into(),
        protocol,
        port: NonZeroU16::new(port).unwrap(),
    };
    let service = ClusterIpService {
        cluster_ips: vec![IpAddr::from([10, 96, 0, number])],
        ports: vec![
            port("http", TransportProtocol::Tcp, 80),
            port("dns", TransportProtocol::Udp, 53),
            port("signals", TransportProtocol::Sctp, 80),
        ],
        ..ClusterIpService::default()
    };
    ObservedService { service, label, is_dns: false }
}

/// Returns an EndpointSlice of a service with ready endpoints at the addresses of [`pod`]s with these numbers.
pub(super) fn slice(service: u8, pods: &[u8]) -> ObservedSlice {
    let endpoint = |number: &u8| ServiceEndpoint {
        address: IpAddr::from([10, 244, 0, *number]),
        is_ready: true,
        is_serving: true,
        is_terminating: false,
        node: "here".into(),
        zone_hints: Box::default(),
        zone: "a".into(),
        node_hints: Box::default(),
    };
    let port = ServiceSlicePort {
        name: "http".into(),
        protocol: TransportProtocol::Tcp,
        port: NonZeroU16::new(8080).unwrap(),
    };
    let slice = ServiceSlice {
        family: AddressFamily::V4,
        ports: [port].into(),
        endpoints: pods.iter().map(endpoint).collect(),
    };
    ObservedSlice { service: name(service), slice, triggered_ms: None }
}

/// Sets a service like [`set_service`], without its port for UDP.
pub(super) fn set_tcp_service(number: u8, label: ClusterIpLabel) -> ClusterChange {
    ClusterChange::Service(name(number), Some(without_udp(cluster_service(number, label))))
}

/// Returns a service without its ports for UDP.
pub(super) fn without_udp(mut observed: ObservedService) -> ObservedService {
    observed.service.ports.retain(|port| port.protocol != TransportProtocol::Udp);
    observed
}

pub(super) fn set_service(number: u8, label: ClusterIpLabel) -> ClusterChange {
    ClusterChange::Service(name(number), Some(cluster_service(number, label)))
}

/// Sets a service with or without affinity.
fn set_sim_service(number: u8, label: ClusterIpLabel, has_affinity: bool) -> ClusterChange {
    let mut observed = cluster_service(number, label);
    observed.service.affinity_timeout = has_affinity.then_some(Duration::from_secs(60));
    ClusterChange::Service(name(number), Some(observed))
}

/// Sets the only slice of a service.
pub(super) fn set_slice(service: u8, pods: &[u8]) -> ClusterChange {
    ClusterChange::Slice(name(service), Some(slice(service, pods)))
}

/// Returns the changes of a first list of each kind, with these objects.
pub(super) fn first_lists(objects: Vec<ClusterChange>) -> Vec<ClusterChange> {
    let begin = ClusterResource::ALL.map(ClusterChange::ListBegun);
    let end = ClusterResource::ALL.map(ClusterChange::ListCompleted);
    [begin.to_vec(), objects, end.to_vec()].concat()
}

impl PlannerFixture {
    /// Makes a fixture whose RouteTable is known.
    pub(super) fn with_mode(mode: ClusterIpMode) -> Self {
        let mut fixture = Self::new();
        fixture.planner.serve_cluster_services(mode, "here");
        fixture
    }

    /// Applies observations and writes the plan.
    pub(super) fn observe(&mut self, changes: Vec<ClusterChange>) -> MapPlan {
        self.planner.apply_cluster_changes(changes);
        self.plan_and_write(&BTreeMap::new())
    }

    /// Returns the backends that a connect to a service may pick; `None` if the service has no frontend.
    fn backends(&self, number: u8) -> Option<Vec<BackendTarget>> {
        self.kernel.find(&key([10, 96, 0, number])).map(|(_, backends, _)| backends)
    }
}

#[test]
fn the_mode_and_the_labels_select_services() {
    let all = |namespace| {
        let labels = [None, Some(true), Some(false)];
        let services = (1..)
            .zip(labels)
            .flat_map(|(number, label)| [set_service(number, label), set_slice(number, &[number])]);
        let namespace = ClusterChange::Namespace("default".into(), namespace);
        first_lists(services.chain([namespace]).collect())
    };
    let served = |mode, namespace| {
        let mut fixture = PlannerFixture::with_mode(mode);
        fixture.observe(all(namespace));
        (1..=3).filter(|&number| fixture.backends(number).is_some()).collect::<Vec<u8>>()
    };
    use ClusterIpMode::{All, Labelled, Off};
    for namespace in [None, Some(true), Some(false)] {
        assert_eq!(served(Off, namespace), [0; 0], "{namespace:?}");
    }
    assert_eq!(served(Labelled, None), [2]);
    assert_eq!(served(Labelled, Some(true)), [1, 2], "the Service's own label counts more");
    assert_eq!(served(All, None), [1, 2]);
    assert_eq!(served(All, Some(false)), [2]);
}

#[test]
fn a_label_that_changes_gives_a_service_to_the_node_or_back() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::Labelled);
    fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5])]));
    assert_eq!(fixture.backends(1), None);
    let label = |label| vec![ClusterChange::Namespace("default".into(), label)];
    fixture.observe(label(Some(true)));
    assert_eq!(fixture.backends(1), Some(vec![target(5)]));
    fixture.observe(vec![set_service(1, Some(false))]);
    assert_eq!(fixture.backends(1), None);
    fixture.observe(vec![set_service(1, None)]);
    assert_eq!(fixture.backends(1), Some(vec![target(5)]));
    fixture.observe(label(None));
    assert_eq!(fixture.backends(1), None);
}

/// Returns the slice of [`slice`] with a port for datagrams besides.
fn dns_slice(service: u8, pods: &[u8]) -> ObservedSlice {
    let mut observed = slice(service, pods);
    let port = ServiceSlicePort {
        name: "dns".into(),
        protocol: TransportProtocol::Udp,
        port: NonZeroU16::new(8080).unwrap(),
    };
    observed.slice.ports = [observed.slice.ports[0].clone(), port].into();
    observed
}

/// Returns the frontend for datagrams of a service.
fn dns_key(number: u8) -> FrontendKey {
    let port_be = 53u16.to_be();
    FrontendKey { port_be, protocol: abi::IPPROTO_UDP, ..key([10, 96, 0, number]) }
}

#[test]
fn udp_ports_have_frontends_of_their_own() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut both = cluster_service(1, None);
    // As with a DNS server: one number for both protocols.
    both.service.ports[0].port = both.service.ports[1].port;
    let slice = |pods: &[u8]| vec![ClusterChange::Slice(name(1), Some(dns_slice(1, pods)))];
    fixture.observe(first_lists(vec![ClusterChange::Service(name(1), Some(both.clone()))]));
    fixture.observe(slice(&[5, 6]));
    let tcp_key = FrontendKey { protocol: abi::IPPROTO_TCP, ..dns_key(1) };
    let expected = (RoutingMode::PickRandom, vec![target(5), target(6)], 0);
    assert_eq!(
        fixture.kernel.all(),
        BTreeMap::from([(tcp_key, expected.clone()), (dns_key(1), expected)])
    );
    // The lists are of the same backends, and change by one store each.
    let ops = fixture.observe(slice(&[6])).ops;
    let stores = ops.iter().filter(|op| matches!(op, MapOp::State { .. })).count();
    assert_eq!((stores, ops.len()), (2, 4), "{ops:?}");
    both.service.ports.remove(0);
    fixture.observe(vec![ClusterChange::Service(name(1), Some(both))]);
    assert_eq!(fixture.kernel.find(&tcp_key), None);
    assert_eq!(fixture.kernel.find(&dns_key(1)).unwrap().1, vec![target(6)]);
}

#[test]
fn endpoints_become_the_list_of_the_port_that_names_them() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5, 6])]));
    let found = fixture.kernel.find(&key([10, 96, 0, 1]));
    assert_eq!(found, Some((RoutingMode::PickRandom, vec![target(5), target(6)], 0)));
    let dns = fixture.kernel.find(&dns_key(1));
    assert_eq!(dns, Some((RoutingMode::Refuse, vec![], 0)), "the slice has no such port");
    assert_eq!(fixture.kernel.frontends.len(), 2, "SCTP is kube-proxy's");
    let ops = fixture.observe(vec![set_slice(1, &[6])]).ops;
    assert_eq!(fixture.backends(1), Some(vec![target(6)]));
    assert_eq!(ops.len(), 2, "one extent and one store: {ops:?}");
    let ops = fixture.observe(vec![set_slice(1, &[6])]).ops;
    assert_eq!(ops, [], "nothing has changed");
}

#[test]
fn a_service_without_endpoints_refuses_connects() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_service(1, None)]));
    let found = |fixture: &PlannerFixture| fixture.kernel.find(&key([10, 96, 0, 1])).unwrap();
    assert_eq!(found(&fixture), (RoutingMode::Refuse, vec![], 0));
    fixture.observe(vec![set_slice(1, &[5])]);
    assert_eq!(found(&fixture).0, RoutingMode::PickRandom);
    fixture.observe(vec![ClusterChange::Slice(name(1), None)]);
    assert_eq!(found(&fixture).0, RoutingMode::Refuse);
    fixture.observe(vec![ClusterChange::Service(name(1), None)]);
    assert_eq!(fixture.kernel.all(), BTreeMap::new());
}

#[test]
fn a_service_with_affinity_has_its_timeout_in_the_kernel() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut seconds = |timeout: Option<u64>| {
        let mut sticky = cluster_service(1, None);
        sticky.service.affinity_timeout = timeout.map(Duration::from_secs);
        fixture.observe(first_lists(vec![
            ClusterChange::Service(name(1), Some(sticky)),
            set_slice(1, &[5]),
        ]));
        let service_id = fixture.kernel.frontends[&key([10, 96, 0, 1])];
        fixture.kernel.infos[&service_id].affinity_seconds
    };
    assert_eq!(seconds(Some(10)), 10);
    assert_eq!(seconds(Some(1_000_000)), 86_400, "the longest time that Kubernetes allows");
    assert_eq!(seconds(None), 0);
}

/// The kernel finds the backend of a client by halving.
#[test]
fn lists_with_affinity_are_in_the_order_of_backend_numbers() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [set_sim_service(1, None, true), set_service(2, None)];
    fixture.observe(first_lists([services.to_vec(), vec![set_slice(2, &[6])]].concat()));
    fixture.observe(vec![set_slice(1, &[3, 4, 5, 6])]);
    let service_id = fixture.kernel.frontends[&key([10, 96, 0, 1])];
    let state = fixture.kernel.states[&service_id];
    let ids = fixture.kernel.ids(&state);
    assert!(ids.len() == 4 && ids.is_sorted(), "{ids:?}");
    assert_eq!(fixture.backends(1).unwrap()[0], target(6), "it has the lowest number");
    // Without affinity the order is free, and with it again it is restored.
    fixture.observe(vec![set_service(1, None)]);
    fixture.observe(vec![set_slice(1, &[4, 5, 6])]);
    let state = fixture.kernel.states[&service_id];
    assert!(!fixture.kernel.ids(&state).is_sorted());
    fixture.observe(vec![set_sim_service(1, None, true)]);
    let state = fixture.kernel.states[&service_id];
    assert!(state.count == 3 && fixture.kernel.ids(&state).is_sorted());
}

#[test]
fn an_address_of_the_node_itself_is_left_to_its_server() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.set_node_addresses([IpAddr::from([10, 96, 0, 1])].into());
    let services = [1, 2].map(|number| set_service(number, None));
    fixture.observe(first_lists(services.into()));
    assert_eq!((fixture.backends(1), fixture.backends(2)), (None, Some(vec![])));
    fixture.planner.set_node_addresses(BTreeSet::new());
    fixture.observe(vec![]);
    assert_eq!(fixture.backends(1), Some(vec![]));
}

/// A new agent must not take endpoints for missing that it has not read yet.
#[test]
fn until_all_kinds_are_listed_the_maps_stay_as_they_are() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let objects = || vec![set_service(1, None), set_slice(1, &[5])];
    fixture.observe(first_lists(objects()));
    let before = fixture.kernel.all();
    for missing in ClusterResource::ALL {
        fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
        fixture.planner.serve_cluster_services(ClusterIpMode::All, "here");
        let others = |it: &ClusterChange| *it != ClusterChange::ListCompleted(missing);
        let plan = fixture.observe(first_lists(vec![]).into_iter().filter(others).collect());
        assert_eq!((plan.ops, fixture.kernel.all()), (vec![], before.clone()), "{missing:?}");
        assert_eq!(fixture.planner.table().missing_cluster_kinds(), [missing]);
        assert!(!fixture.planner.has_due_work(), "{missing:?}");
    }
    fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
    fixture.planner.serve_cluster_services(ClusterIpMode::All, "here");
    assert_eq!(fixture.observe(first_lists(objects())).ops, [], "all is in force already");
}

/// The controller may be away for long, and Services of the cluster must not depend on it.
#[test]
fn without_a_route_table_services_of_the_cluster_change_and_no_other() {
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(
        &[service(1, ConnectionPath::Direct)],
        &[pod(7, 1, RoutingPhase::Ready)],
        &[activator(1)],
    ));
    let routed = fixture.kernel.find(&key([10, 96, 0, 1]));
    fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
    fixture.planner.serve_cluster_services(ClusterIpMode::All, "here");
    fixture.planner.set_route_table_known(false);
    fixture.observe(first_lists(vec![set_service(2, None), set_slice(2, &[5])]));
    assert_eq!(fixture.backends(2), Some(vec![target(5)]));
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])), routed);
    let activators = fixture.kernel.list(&fixture.kernel.states[&abi::ACTIVATORS_V4]);
    assert_eq!(activators.len(), 1);
    assert!(!fixture.planner.are_sources_known() && !fixture.planner.has_due_work());
    fixture.planner.set_route_table_known(true);
    fixture.observe(vec![]);
    assert_eq!(fixture.backends(1), None, "the table has no such service");
}

#[test]
fn on_one_address_the_route_table_wins() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5])]));
    let routed =
        table(&[service(1, ConnectionPath::Direct)], &[pod(7, 1, RoutingPhase::Ready)], &[]);
    fixture.plan(&routed);
    assert_eq!(fixture.backends(1), Some(vec![target(7)]));
    fixture.observe(vec![set_slice(1, &[6])]);
    assert_eq!(fixture.backends(1), Some(vec![target(7)]));
    let ops = fixture.plan(&table(&[], &[], &[]));
    let removes_frontend =
        |op: &&MapOp| matches!(op, MapOp::RemoveFrontend { key: it } if *it == key([10, 96, 0, 1]));
    assert_eq!(ops.iter().find(removes_frontend), None, "it is never without one");
    assert_eq!(fixture.backends(1), Some(vec![target(6)]));
}

/// An operator learns once of a Service that is not served, whichever of the two came first.
#[test]
fn a_service_that_loses_its_address_to_the_route_table_is_reported_once() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut routed = service(1, ConnectionPath::Direct);
    routed.name = NamespacedName::new("default", "routed");
    let routed = table(&[routed], &[pod(7, 1, RoutingPhase::Ready)], &[]);
    let outranked = OutrankedService {
        service: name(1),
        address: SocketAddr::from(([10, 96, 0, 1], 80)),
        owner: NamespacedName::new("default", "routed"),
    };
    let plan = fixture.observe(first_lists(vec![set_service(1, None), set_service(2, None)]));
    assert_eq!(plan.newly_outranked, []);
    fixture.set_table(&routed);
    assert_eq!(fixture.observe(vec![]).newly_outranked, std::slice::from_ref(&outranked));
    assert_eq!(fixture.observe(vec![set_slice(1, &[6])]).newly_outranked, [], "known already");
    fixture.set_table(&table(&[], &[], &[]));
    assert_eq!(fixture.observe(vec![]).newly_outranked, []);
    assert_eq!(fixture.backends(1), Some(vec![target(6)]));

    fixture.observe(vec![ClusterChange::Service(name(1), None)]);
    fixture.set_table(&routed);
    assert_eq!(fixture.observe(vec![]).newly_outranked, []);
    let plan = fixture.observe(vec![set_service(1, None)]);
    assert_eq!(plan.newly_outranked, std::slice::from_ref(&outranked), "the second to come");
    let message = outranked.to_string();
    assert!(
        message.starts_with("10.96.0.1:80 leads to Rouse's service default/routed"),
        "{message}"
    );
}

/// Connections to pods of Revisions are closed when their pods leave, but nothing is known of the requests of others.
#[test]
fn only_pods_of_revisions_leave() {
    let at = |number: u8| BTreeSet::from([SocketAddr::from(([10, 244, 0, number], 8080))]);
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let plan = fixture.observe(first_lists(vec![set_service(2, None), set_slice(2, &[7, 8])]));
    assert_eq!((plan.added_pods, plan.removed_pods), (BTreeSet::new(), BTreeSet::new()));
    let routed =
        table(&[service(1, ConnectionPath::Direct)], &[pod(7, 1, RoutingPhase::Ready)], &[]);
    fixture.set_table(&routed);
    assert_eq!(fixture.observe(vec![]).added_pods, at(7), "it has been a backend before");
    let plan = fixture.observe(vec![set_slice(2, &[])]);
    assert_eq!(plan.removed_pods, BTreeSet::new());
    fixture.observe(vec![set_slice(2, &[7, 8])]);
    fixture.set_table(&table(&[], &[], &[]));
    assert_eq!(fixture.observe(vec![]).removed_pods, at(7), "though it is a backend still");

    // Another agent recognizes of which source a list is, before a service owns it.
    fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
    fixture.planner.serve_cluster_services(ClusterIpMode::All, "here");
    let plan = fixture.observe(first_lists(vec![set_service(2, None), set_slice(2, &[7])]));
    assert_eq!((plan.added_pods, plan.removed_pods), (BTreeSet::new(), BTreeSet::new()));
}

#[test]
fn a_list_again_removes_what_it_does_not_name() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let both = [1, 2].map(|number| [set_service(number, None), set_slice(number, &[number])]);
    fixture.observe(first_lists(both.concat()));
    let list = |resource, objects: Vec<ClusterChange>| {
        let begin = vec![ClusterChange::ListBegun(resource)];
        [begin, objects, vec![ClusterChange::ListCompleted(resource)]].concat()
    };
    fixture.observe(list(ClusterResource::EndpointSlice, vec![set_slice(2, &[2])]));
    assert_eq!((fixture.backends(1), fixture.backends(2)), (Some(vec![]), Some(vec![target(2)])));
    // During the list, what it has not named yet is still there.
    fixture.observe(vec![ClusterChange::ListBegun(ClusterResource::Service)]);
    assert_eq!(fixture.backends(1), Some(vec![]));
    fixture.observe(vec![
        set_service(2, None),
        ClusterChange::ListCompleted(ClusterResource::Service),
    ]);
    assert_eq!((fixture.backends(1), fixture.backends(2)), (None, Some(vec![target(2)])));
}

#[test]
fn a_slice_that_moves_to_another_service_takes_its_endpoints_along() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [1, 2].map(|number| set_service(number, None));
    let moving = |service| ClusterChange::Slice(name(9), Some(slice(service, &[5])));
    fixture.observe(first_lists([services.to_vec(), vec![moving(1)]].concat()));
    assert_eq!((fixture.backends(1), fixture.backends(2)), (Some(vec![target(5)]), Some(vec![])));
    fixture.observe(vec![moving(2)]);
    assert_eq!((fixture.backends(1), fixture.backends(2)), (Some(vec![]), Some(vec![target(5)])));
}

/// The Node's object may be missing while the node is registered again.
#[test]
fn local_endpoints_are_known_by_the_nodes_name_without_its_object() {
    let backends = |node: &str| {
        let mut fixture = PlannerFixture::new();
        fixture.planner.serve_cluster_services(ClusterIpMode::All, node);
        let mut local = cluster_service(1, None);
        local.service.internal_traffic_policy = InternalTrafficPolicy::Local;
        let local = ClusterChange::Service(name(1), Some(local));
        fixture.observe(first_lists(vec![local, set_slice(1, &[5])]));
        fixture.backends(1)
    };
    assert_eq!(backends("here"), Some(vec![target(5)]));
    assert_eq!(backends("elsewhere"), Some(vec![]));
}

#[test]
fn a_changed_zone_of_the_node_changes_lists_with_hints() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut hinted = slice(1, &[5, 6]);
    for (endpoint, zone) in hinted.slice.endpoints.iter_mut().zip(["a", "b"]) {
        endpoint.zone_hints = [zone.into()].into();
    }
    let hinted = ClusterChange::Slice(name(1), Some(hinted));
    fixture.observe(first_lists(vec![set_service(1, None), hinted]));
    assert_eq!(fixture.backends(1), Some(vec![target(5), target(6)]), "no zone is known");
    fixture.observe(vec![ClusterChange::Zone("b".into())]);
    assert_eq!(fixture.backends(1), Some(vec![target(6)]));
}

/// If the node's maps were wrong about it, the agent could not reach the API server to correct them.
#[test]
fn the_api_servers_own_service_is_left_to_kube_proxy() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let service = NamespacedName::new("default", "kubernetes");
    let observed = ObservedSlice { service: service.clone(), ..slice(1, &[5]) };
    fixture.observe(first_lists(vec![
        ClusterChange::Service(service.clone(), Some(cluster_service(1, Some(true)))),
        ClusterChange::Slice(service, Some(observed)),
    ]));
    assert_eq!(fixture.kernel.all(), BTreeMap::new());
}

#[test]
fn changes_of_services_that_are_not_selected_are_no_work() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::Labelled);
    fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5])]));
    fixture.planner.apply_cluster_changes([set_slice(1, &[6]), set_service(2, Some(false))]);
    assert!(!fixture.planner.has_due_changes());
}

/// The controller may be away when an operator takes the label away or changes the mode.
#[test]
fn frontends_of_services_of_the_cluster_are_removed_without_a_route_table() {
    for mode in [ClusterIpMode::All, ClusterIpMode::Off] {
        let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
        fixture.observe(first_lists(vec![set_service(2, None), set_slice(2, &[5, 6])]));
        fixture.plan(&table(
            &[service(1, ConnectionPath::Direct)],
            &[pod(7, 1, RoutingPhase::Ready)],
            &[],
        ));
        fixture.planner = RoutePlanner::resume(fixture.kernel.table(), fixture.now);
        fixture.planner.set_route_table_known(false);
        fixture.planner.serve_cluster_services(mode, "here");
        let plan = match mode {
            ClusterIpMode::Off => fixture.plan_and_write(&BTreeMap::new()),
            _ => fixture.observe(first_lists(vec![])),
        };
        assert_eq!((fixture.backends(2), fixture.backends(1)), (None, Some(vec![target(7)])));
        assert_eq!(plan.removed_pods, BTreeSet::new(), "open connections stay as they are");
        assert!(!fixture.planner.has_due_work());
    }
}

#[test]
fn services_of_the_cluster_leave_room_for_those_of_the_route_table() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.list_entry_pool = ExtentPool::new(8);
    let services = [1, 2].map(|number| set_service(number, None));
    fixture.observe(first_lists([services.to_vec(), vec![set_slice(1, &[1, 2, 3, 4])]].concat()));
    assert_eq!(fixture.backends(1).map(|it| it.len()), Some(4));
    let plan = fixture.observe(vec![set_slice(2, &[5, 6, 7])]);
    assert_eq!(plan.newly_refused.len(), 1, "of the last quarter");
    let mut routed = service(3, ConnectionPath::Direct);
    routed.addresses.truncate(1);
    let pods = [1, 2, 3].map(|number| pod(number, 3, RoutingPhase::Ready));
    fixture.plan(&table(&[routed], &pods, &[]));
    assert_eq!(fixture.backends(3).map(|it| it.len()), Some(3));
    // A refused service is tried again only when it is asked for, and is new to the log once.
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!((plan.ops, plan.newly_refused), (vec![], vec![]));
    fixture.planner.retry_unfit();
    assert_eq!(fixture.plan_and_write(&BTreeMap::new()).newly_refused, []);
    assert_eq!(fixture.planner.refused_cluster_services(), 1);
}

#[test]
fn a_service_of_the_cluster_that_does_not_fit_is_left_to_kube_proxy() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [1, 2].map(|number| set_service(number, None));
    fixture.observe(first_lists(services.to_vec()));
    fixture.planner.list_entry_pool = ExtentPool::new(2);
    let plan = fixture.observe(vec![set_slice(1, &[5, 6, 7]), set_slice(2, &[8])]);
    let refused: Vec<_> = plan.newly_refused.iter().map(|(name, _)| name).collect();
    assert_eq!((refused, plan.refused.len(), plan.is_partial), (vec![&name(1)], 0, false));
    assert_eq!(fixture.planner.refused_cluster_services(), 1);
    let found = |number| fixture.kernel.find(&key([10, 96, 0, number])).unwrap();
    assert_eq!(found(1), (RoutingMode::Pass, vec![], 0));
    assert_eq!(found(2), (RoutingMode::PickRandom, vec![target(8)], 0));
}

/// One change of the simulation of both sources.
#[derive(Clone, Debug)]
enum SimTurn {
    /// A change of the RouteTable, of time, or of the agent.
    Routes(SimRouteChange),
    /// A Service of the cluster is set, with this label, and with or without affinity; or it is removed.
    Service(u8, Option<(ClusterIpLabel, bool)>),
    /// An EndpointSlice is set to the service with this number and the pods whose bits are set; or removed.
    Slice(u8, Option<(u8, u8)>),
    /// Label of the namespace.
    Namespace(ClusterIpLabel),
    /// The node has the addresses of the services whose bits are set.
    NodeAddresses(u8),
}

fn sim_turns() -> impl Strategy<Value = Vec<SimTurn>> {
    let label = || prop_oneof![Just(None), any::<bool>().prop_map(Some)];
    let slice = prop::option::weighted(0.8, (1u8..6, any::<u8>()));
    let turn = prop_oneof![
        5 => route_changes().prop_map(|all| SimTurn::Routes(all[0].clone())),
        3 => (1u8..6, prop::option::weighted(0.8, (label(), any::<bool>())))
            .prop_map(|(service, label)| SimTurn::Service(service, label)),
        4 => (1u8..6, slice).prop_map(|(name, slice)| SimTurn::Slice(name, slice)),
        1 => label().prop_map(SimTurn::Namespace),
        1 => any::<u8>().prop_map(SimTurn::NodeAddresses),
    ];
    prop::collection::vec(turn, 1..40)
}

/// Objects of the cluster in the simulation.
#[derive(Default)]
struct SimCluster {
    services: BTreeMap<u8, (ClusterIpLabel, bool)>,
    slices: BTreeMap<u8, (u8, Vec<u8>)>,
    namespace: ClusterIpLabel,
    node_addresses: BTreeSet<IpAddr>,
}

impl SimCluster {
    /// Makes a change. Returns its observation.
    fn apply(&mut self, turn: &SimTurn) -> Option<ClusterChange> {
        let bits = |bits: u8| (1u8..7).filter(move |it| bits & (1 << it) != 0);
        match turn {
            SimTurn::Routes(_) => None,
            SimTurn::Service(number, None) => {
                self.services.remove(number);
                Some(ClusterChange::Service(name(*number), None))
            }
            SimTurn::Service(number, Some((label, has_affinity))) => {
                self.services.insert(*number, (*label, *has_affinity));
                Some(set_sim_service(*number, *label, *has_affinity))
            }
            SimTurn::Slice(slice_name, None) => {
                self.slices.remove(slice_name);
                Some(ClusterChange::Slice(name(*slice_name), None))
            }
            SimTurn::Slice(slice_name, Some((service, pods))) => {
                let pods: Vec<u8> = bits(*pods).collect();
                self.slices.insert(*slice_name, (*service, pods.clone()));
                Some(ClusterChange::Slice(name(*slice_name), Some(dns_slice(*service, &pods))))
            }
            SimTurn::Namespace(label) => {
                self.namespace = *label;
                Some(ClusterChange::Namespace("default".into(), *label))
            }
            SimTurn::NodeAddresses(services) => {
                let addresses = bits(*services).map(|number| IpAddr::from([10, 96, 0, number]));
                self.node_addresses = addresses.collect();
                None
            }
        }
    }

    /// Returns all objects.
    fn objects(&self) -> Vec<ClusterChange> {
        let services = self
            .services
            .iter()
            .map(|(number, (label, has_affinity))| set_sim_service(*number, *label, *has_affinity));
        let slices = self.slices.iter().map(|(slice_name, (service, pods))| {
            ClusterChange::Slice(name(*slice_name), Some(dns_slice(*service, pods)))
        });
        let namespace = ClusterChange::Namespace("default".into(), self.namespace);
        services.chain(slices).chain([namespace]).collect()
    }

    /// Returns what a datagram to a service finds in mode `all`, and a connect if the RouteTable does not have it.
    fn expected(&self, number: u8) -> Option<(RoutingMode, BTreeSet<BackendTarget>)> {
        let label = self.services.get(&number)?.0.or(self.namespace);
        let is_own = self.node_addresses.contains(&IpAddr::from([10, 96, 0, number]));
        if label == Some(false) || is_own {
            return None;
        }
        let slices = self.slices.values().filter(|(service, _)| *service == number);
        let pods: BTreeSet<BackendTarget> =
            slices.flat_map(|(_, pods)| pods).map(|pod| target(*pod)).collect();
        let mode = if pods.is_empty() { RoutingMode::Refuse } else { RoutingMode::PickRandom };
        Some((mode, pods))
    }
}

/// Returns a planner that has both sources and continues from the kernel's maps.
fn resumed_with(kernel: &FakeKernelMaps, sim: &RouteSim, cluster: &SimCluster) -> RoutePlanner {
    let mut planner = RoutePlanner::resume(kernel.table(), sim.now);
    planner.serve_cluster_services(ClusterIpMode::All, "here");
    planner.set_node_addresses(cluster.node_addresses.clone());
    sim.table.all_states().for_each(|state| planner.apply_change(state));
    planner.apply_cluster_changes(first_lists(cluster.objects()));
    planner
}

/// Returns the address of a pod with each of its ports.
fn addresses_of(pod: &PodEntry) -> Vec<SocketAddr> {
    let Some(at) = pod.address else { return Vec::new() };
    let ports = pod.ports.iter().map(|it| it.port.get());
    ports.chain([at.port()]).map(|port| SocketAddr::new(at.ip(), port)).collect()
}

proptest! {
    /// A service of the RouteTable has its frontends; all others are as the cluster's Services say, those of UDP too.
    /// After every store of every plan a connect finds backends of the old list or the new one.
    #[test]
    fn both_sources_are_in_force(turns in sim_turns()) {
        let (mut sim, mut cluster) = (RouteSim::new(), SimCluster::default());
        let mut writer = PlanWriter::default();
        let mut planner = resumed_with(&writer.kernel, &sim, &cluster);
        let mut crash = None;
        for turn in &turns {
            if let SimTurn::Routes(turn) = turn {
                sim.apply(turn, &mut planner);
            }
            let change = cluster.apply(turn);
            planner.apply_cluster_changes(change);
            planner.set_node_addresses(cluster.node_addresses.clone());
            match turn {
                SimTurn::Routes(SimRouteChange::Restart) => {
                    planner = resumed_with(&writer.kernel, &sim, &cluster);
                }
                SimTurn::Routes(SimRouteChange::Crash(share)) => {
                    crash = Some(*share);
                    continue;
                }
                _ => {}
            }
            if let Some(share) = crash.take() {
                writer.write_part(&mut planner, &sim, share)?;
                planner = resumed_with(&writer.kernel, &sim, &cluster);
            }
            writer.write_plan(&mut planner, &sim)?;
            let kernel = &writer.kernel;
            for number in (1u8..6).filter(|it| !sim.table.services.contains_key(&name(*it))) {
                let found = kernel.find(&key([10, 96, 0, number]));
                let found = found.map(|(mode, list, _)| (mode, list.into_iter().collect()));
                prop_assert_eq!(found, cluster.expected(number));
            }
            for number in 1u8..6 {
                let found = kernel.find(&dns_key(number));
                let found = found.map(|(mode, list, _)| (mode, list.into_iter().collect()));
                prop_assert_eq!(found, cluster.expected(number));
            }
            for service in sim.table.services.values() {
                for address in &service.addresses {
                    let key = FrontendKey { address: to_v6_octets(*address), ..key([0; 4]) };
                    let port = kernel.find(&key).map(|(_, _, port)| port);
                    prop_assert_eq!(port, Some(service.activator_port.get().to_be()));
                }
            }
            let mut fresh = resumed_with(kernel, &sim, &cluster);
            let rest = fresh.plan(sim.now + abi::QUARANTINE_NS, &sim.locals).unwrap();
            // A new agent does not know what an earlier one has reported.
            let rest = MapPlan { newly_outranked: Vec::new(), ..rest };
            prop_assert_eq!(rest, MapPlan::default());
        }
    }

    /// Services of the cluster take over addresses of the RouteTable, and wait for room or are refused. The agent
    /// acknowledges draining pods once a plan is not partial.
    #[test]
    fn in_full_maps_only_a_partial_plan_leaves_a_direct_path_to_a_pod_that_is_not_ready(
        turns in sim_turns(),
    ) {
        let (mut sim, mut cluster) = (RouteSim::new(), SimCluster::default());
        let mut kernel = FakeKernelMaps::default();
        let mut planner = resumed_with(&kernel, &sim, &cluster);
        planner.service_id_pool = KernelIdPool::new(abi::FIRST_SERVICE, abi::FIRST_SERVICE + 8);
        planner.list_entry_pool = ExtentPool::new(16);
        for turn in &turns {
            if let SimTurn::Routes(turn) = turn {
                sim.apply(turn, &mut planner);
            }
            let change = cluster.apply(turn);
            planner.apply_cluster_changes(change);
            planner.set_node_addresses(cluster.node_addresses.clone());
            // Without room for the activators no version is acknowledged.
            let Ok(plan) = planner.plan(sim.now, &sim.locals) else { continue };
            plan.ops.iter().for_each(|op| kernel.write(op));
            if plan.is_partial {
                continue;
            }
            let ready = sim.table.pods.values().filter(|pod| pod.phase == RoutingPhase::Ready);
            let ready: BTreeSet<SocketAddr> = ready.flat_map(addresses_of).collect();
            // Lists of Services of the cluster have another mode.
            let routed = [RoutingMode::PickBackend, RoutingMode::PickWithAffinity];
            let all = kernel.all().into_iter();
            for (key, (_, list, _)) in all.filter(|(_, it)| routed.contains(&it.0)) {
                for at in list.iter().filter_map(BackendTarget::pod_address) {
                    prop_assert!(ready.contains(&at), "{:?} leads to {}", key, at);
                }
            }
        }
    }
}
