//! Pure: facts about frontends, traces of connects, and the times of changes that are in force.

use common::service_routing::ServiceEndpoint;

use super::{cluster::*, *};
use crate::service_facts::{
    BackendUsage, CandidateState, FrontendFacts, FrontendMode, ServiceSource, TraceFacts,
    TraceOutcome, TraceTarget,
};

impl PlannerFixture {
    /// Returns all facts, collected in parts of `limit` services.
    fn facts(&self, limit: usize) -> Vec<FrontendFacts> {
        let (mut all, mut cursor) = (Vec::new(), Some(ServiceCursor::START));
        while let Some(position) = cursor {
            let (facts, next) = self.planner.facts_after(&position, limit);
            all.extend(facts);
            cursor = next;
        }
        all
    }

    /// Traces a connect by TCP, or by UDP for port 53.
    fn trace(&self, to: &str) -> TraceFacts {
        let to: SocketAddr = to.parse().unwrap();
        let protocol = if to.port() == 53 { 17 } else { 6 };
        let usage = |id| BackendUsage { open_connections: u64::from(id), is_unanswered: id == 2 };
        self.planner.trace(&TraceTarget { to, protocol }, usage)
    }
}

/// Returns name, mode, and numbers of listed and known endpoints of each frontend of IPv4.
fn summary(facts: &[FrontendFacts]) -> Vec<(String, FrontendMode, Option<usize>, Option<usize>)> {
    let facts = facts.iter().filter(|it| it.address.is_ipv4());
    facts.map(|it| (it.name.clone(), it.mode, it.listed, it.known)).collect()
}

/// Returns the last numbers of the candidates' addresses, each with its reason.
fn reasons(trace: &TraceFacts) -> Vec<(u8, &str)> {
    let last = |address: SocketAddr| match address.ip() {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(_) => panic!("{address}"),
    };
    trace.candidates.iter().map(|it| (last(it.address), it.reason.as_str())).collect()
}

#[test]
fn each_frontend_has_its_mode_and_its_endpoints() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Activator)];
    let pods = [pod(7, 1, RoutingPhase::Ready), pod(8, 1, RoutingPhase::Starting)];
    fixture.set_table(&table(&services, &pods, &[activator(1)]));
    let unserved = set_tcp_service(6, Some(false));
    let cluster =
        [set_tcp_service(3, None), set_slice(3, &[5, 6]), set_tcp_service(4, None), unserved];
    // A Service at the address of a Route's.
    let shadowed = set_tcp_service(1, None);
    let slices = [set_slice(1, &[9])];
    fixture.observe(first_lists([cluster.to_vec(), vec![shadowed], slices.to_vec()].concat()));
    use FrontendMode::{Activators, Pods, Refuse, Shadowed};
    let expected = [
        ("s1".to_owned(), Pods, Some(1), Some(2)),
        ("s2".to_owned(), Activators, Some(0), None),
        ("s1".to_owned(), Shadowed, None, Some(1)),
        ("s3".to_owned(), Pods, Some(2), Some(2)),
        ("s4".to_owned(), Refuse, Some(0), Some(0)),
    ];
    for limit in [1, 2, 3, 100] {
        assert_eq!(summary(&fixture.facts(limit)), expected, "in parts of {limit}");
    }
    let facts = fixture.facts(100);
    let owned = facts.iter().find(|it| it.mode == Shadowed).unwrap();
    assert_eq!(owned.reason.as_deref(), Some("the frontend belongs to default/s1"));
    assert_eq!((owned.source, facts[0].source), (ServiceSource::Service, ServiceSource::Route));
}

#[test]
fn only_frontends_on_the_direct_path_lead_to_a_pod() {
    let mut fixture = PlannerFixture::new();
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Activator)];
    let pods = [pod(7, 1, RoutingPhase::Ready), pod(8, 2, RoutingPhase::Ready)];
    fixture.plan(&table(&services, &pods, &[activator(1), activator(2)]));
    let planner = &fixture.planner;
    let of_pod = |uid| planner.table().frontends_of_pod(uid);
    let of_both_families = of_pod("uid7");
    assert_eq!(of_both_families.len(), services[0].addresses.len());
    assert!(of_both_families.contains(&key([10, 96, 0, 1])));
    assert!(of_pod("uid8").is_empty() && of_pod("unknown").is_empty());
    let is_activator = |id: u32| fixture.kernel.backends[&id].pod_address().is_none();
    let activators: Vec<u32> = planner.activator_backends().collect();
    assert_eq!((activators.len(), activators.into_iter().all(is_activator)), (2, true));
}

#[test]
fn an_ipv4_frontend_needs_an_ipv4_activator() {
    let ipv4_key = key([10, 96, 0, 1]);
    let ipv6_key = FrontendKey { address: to_v6_octets("fd00::1".parse().unwrap()), ..ipv4_key };
    let ipv6 = ActivatorEntry { addresses: vec!["fd00::2".parse().unwrap()], ..activator(2) };
    for (activators, expected) in [
        (vec![], [false, false]),
        (vec![ipv6.clone()], [false, true]),
        (vec![activator(1)], [true, true]),
        (vec![activator(1), ipv6], [true, true]),
    ] {
        let mut fixture = PlannerFixture::new();
        fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[], &activators));
        let planned = fixture.planner.table();
        let found = [ipv4_key, ipv6_key].map(|it| planned.has_activator_for(&it));
        assert_eq!(found, expected, "{activators:?}");
    }
}

#[test]
fn a_service_without_room_has_the_reason() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_tcp_service(1, None), set_slice(1, &[5])]));
    fixture.planner.list_entry_pool = ExtentPool::new(4);
    let many: Vec<u8> = (1..=20).collect();
    fixture.observe(vec![set_tcp_service(2, None), set_slice(2, &many)]);
    let facts = fixture.facts(10);
    assert_eq!((facts[0].mode, facts[1].mode), (FrontendMode::Pods, FrontendMode::NoRoom));
    let reason = facts[1].reason.clone().unwrap();
    assert!(reason.contains("map SLOTS needs 20 more entries"), "{reason}");
    assert_eq!(facts[1].known, Some(20));
    let trace = fixture.trace("10.96.0.2:80");
    assert_eq!(trace.outcome, TraceOutcome::Unchanged);
    assert!(trace.reason.contains("does not fit: map SLOTS needs 20"), "{}", trace.reason);
    let expected = "kube-proxy leads it to a random one of 20 endpoints: all ready endpoints";
    assert_eq!(trace.kube_proxy.as_deref(), Some(expected));
}

#[test]
fn a_trace_of_another_port_of_a_service_without_room_names_its_ports() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.service_id_pool = KernelIdPool::new(1, 1);
    fixture.set_table(&table(&[service(1, ConnectionPath::Direct)], &[], &[]));
    fixture.observe(first_lists(vec![set_tcp_service(2, None)]));
    for to in ["10.96.0.1:80", "10.96.0.2:80"] {
        let reason = fixture.trace(to).reason;
        assert!(reason.contains("does not fit: map SVC_STATE"), "{to}: {reason}");
    }
    for (to, reason) in [
        ("10.96.0.1:81", "default/s1 has port 80/TCP there, not 81/TCP"),
        ("10.96.0.2:81", "Service default/s2 has no port 81 there, but 80/TCP, 80/SCTP"),
    ] {
        assert_eq!(fixture.trace(to).reason, reason);
    }
}

#[test]
fn a_trace_shows_the_list_in_force_and_why_endpoints_are_not_in_it() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut observed = slice(1, &[5, 6]);
    let unready = ServiceEndpoint {
        is_ready: false,
        is_serving: false,
        ..observed.slice.endpoints[0].clone()
    };
    let unready = ServiceEndpoint { address: [10, 244, 0, 4].into(), ..unready };
    let endpoints = observed.slice.endpoints.iter().cloned().chain([unready]);
    observed.slice.endpoints = endpoints.collect();
    let slice = ClusterChange::Slice(name(1), Some(observed));
    fixture.observe(first_lists(vec![set_tcp_service(1, None), slice]));
    let trace = fixture.trace("10.96.0.1:80");
    assert_eq!(trace.outcome, TraceOutcome::Endpoint);
    assert_eq!(trace.reason, "a random one of 2: all ready endpoints");
    assert_eq!((trace.kube_proxy.clone(), trace.hints.clone()), (None, None));
    let unanswered = "selected; it left a connect unanswered, so that others are preferred";
    assert_eq!(reasons(&trace), [(5, "selected"), (6, unanswered), (4, "is not ready")]);
    let usages: Vec<_> = trace.candidates.iter().map(|it| it.usage.is_some()).collect();
    assert_eq!(usages, [true, true, false]);
    assert_eq!(trace.frontend.unwrap().listed, Some(2));
    // What is planned only when the next plan is written is not in force.
    fixture.planner.apply_cluster_changes(vec![set_slice(1, &[6, 7])]);
    let trace = fixture.trace("10.96.0.1:80");
    assert!(trace.reason.ends_with("a change of the endpoints is not in force yet"));
    let reasons = reasons(&trace);
    assert_eq!(reasons[0], (5, "is in the list in force, and not known any more"));
    assert_eq!(reasons[2], (7, "selected, and not in the list in force"));
    assert_eq!(trace.candidates[0].state, CandidateState::Unknown);
}

#[test]
fn a_trace_of_a_refused_connect_has_the_reason() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut local = cluster_service(2, None);
    local.service.internal_traffic_policy = common::service_routing::InternalTrafficPolicy::Local;
    let mut elsewhere = slice(2, &[5]);
    elsewhere.slice.endpoints[0].node = "there".into();
    fixture.observe(first_lists(vec![
        set_tcp_service(1, None),
        ClusterChange::Service(name(2), Some(local)),
        ClusterChange::Slice(name(2), Some(elsewhere)),
    ]));
    let none = fixture.trace("10.96.0.1:80");
    assert_eq!(none.outcome, TraceOutcome::Refused);
    assert_eq!(none.reason, "no endpoint is ready, and none terminates and still serves");
    let local = fixture.trace("10.96.0.2:80");
    assert_eq!(local.outcome, TraceOutcome::Refused);
    assert!(local.reason.contains("no usable endpoint is on this node"), "{}", local.reason);
    let reason = "is not on this node, as internalTrafficPolicy: Local requires";
    assert_eq!(reasons(&local), [(5, reason)]);
}

#[test]
fn a_trace_of_an_address_that_is_not_served_says_why() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut api_server = cluster_service(9, None);
    api_server.service.ports.truncate(1);
    let api_server_name = NamespacedName::new("default", "kubernetes");
    fixture.observe(first_lists(vec![
        set_tcp_service(1, None),
        set_slice(1, &[5]),
        set_tcp_service(2, Some(false)),
        ClusterChange::Service(api_server_name, Some(api_server)),
    ]));
    for (to, reason) in [
        ("10.96.0.1:81", "Service default/s1 has no port 81 there, but 80/TCP, 80/SCTP"),
        ("10.96.0.2:80", "the label `rouse.dev/clusterip: \"false\"` is on Service default/s2"),
        ("10.96.0.9:80", "default/kubernetes is the API server's own Service"),
        ("10.244.0.5:8080", "10.244.0.5 is the address of an endpoint of default/s1"),
        ("10.96.0.77:80", "no Service has the ClusterIP 10.96.0.77: headless Services have none"),
    ] {
        let trace = fixture.trace(to);
        assert_eq!(trace.outcome, TraceOutcome::Unchanged, "{to}");
        assert!(trace.reason.starts_with(reason), "{to}: {}", trace.reason);
        assert!(trace.kube_proxy.is_some(), "{to}");
    }
    let kube_proxy = fixture.trace("10.96.0.2:80").kube_proxy.unwrap();
    assert!(kube_proxy.starts_with("kube-proxy refuses it"), "{kube_proxy}");
    let off = PlannerFixture::new().trace("10.96.0.1:80");
    assert!(off.reason.contains("--clusterip off"), "{}", off.reason);
}

#[test]
fn a_trace_of_the_api_server_tells_its_own_reason_from_that_of_the_label() {
    for (own, reason) in [
        (None, "default/kubernetes is the API server's own Service: without --apiserver"),
        (Some(9), "default/kubernetes is the API server's own Service: --apiserver names"),
        (Some(77), "the label `rouse.dev/clusterip: \"true\"` is neither on Service default/kube"),
    ] {
        let mut fixture = PlannerFixture::with_mode(ClusterIpMode::Labelled);
        own.into_iter().for_each(|it: u8| {
            fixture.planner.serve_api_server([IpAddr::from([10, 96, 0, it])].into());
        });
        let name = NamespacedName::new("default", "kubernetes");
        let service = ClusterChange::Service(name, Some(cluster_service(9, None)));
        fixture.observe(first_lists(vec![service]));
        let trace = fixture.trace("10.96.0.9:80");
        assert!(trace.reason.starts_with(reason), "{}", trace.reason);
    }
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.serve_api_server([IpAddr::from([10, 96, 0, 3])].into());
    fixture.observe(first_lists(vec![set_tcp_service(3, None)]));
    let reason = fixture.trace("10.96.0.3:80").reason;
    assert_eq!(reason, "agents ask API servers at the address of Service default/s3");
}

#[test]
fn a_trace_says_that_services_are_not_known_yet() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.planner.set_route_table_known(false);
    let trace = fixture.trace("10.96.0.1:80");
    let unknown = ["RouteTable", "Service", "EndpointSlice", "Namespace", "Node"];
    assert_eq!(trace.node.unknown, unknown);
    assert!(trace.reason.contains("does not know all services yet"), "{}", trace.reason);
}

#[test]
fn a_trace_of_a_route_shows_its_pods_or_the_activators() {
    let mut fixture = PlannerFixture::new();
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Activator)];
    let pods = [pod(7, 1, RoutingPhase::Ready), pod(8, 1, RoutingPhase::Draining)];
    fixture.set_table(&table(&services, &pods, &[activator(1)]));
    fixture.plan_and_write(&BTreeMap::new());
    let direct = fixture.trace("10.96.0.1:80");
    assert_eq!(direct.outcome, TraceOutcome::Endpoint);
    assert!(direct.reason.starts_with("of two random ones of 1"), "{}", direct.reason);
    assert_eq!(direct.candidates[0].reason.split(';').next(), Some("selected"));
    assert_eq!(direct.candidates[1].reason, "is draining");
    let asleep = fixture.trace("10.96.0.2:80");
    assert_eq!(asleep.outcome, TraceOutcome::Activator);
    assert_eq!(asleep.candidates[0].state, CandidateState::Activator);
    assert_eq!(asleep.candidates[0].address.port(), 20_002);
    let port = fixture.trace("10.96.0.2:8080");
    assert_eq!(port.reason, "default/s2 has port 80/TCP there, not 8080/TCP");
}

#[test]
fn figures_count_frontends_endpoints_and_entries() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [service(1, ConnectionPath::Direct)];
    fixture.set_table(&table(&services, &[pod(7, 1, RoutingPhase::Ready)], &[activator(1)]));
    fixture.observe(first_lists(vec![
        set_tcp_service(2, None),
        set_slice(2, &[5, 6]),
        set_tcp_service(3, None),
        set_tcp_service(4, Some(false)),
        set_slice(4, &[8]),
    ]));
    let figures = fixture.planner.figures();
    let count = |source, mode| figures.frontends[&(source, mode)];
    use ServiceSource::{Route, Service};
    let of_service = [FrontendMode::Pods, FrontendMode::Refuse, FrontendMode::Pass];
    assert_eq!(of_service.map(|mode| count(Service, mode)), [1, 1, 0]);
    let of_route = count(Route, FrontendMode::Pods) + count(Route, FrontendMode::Activators);
    assert_eq!(of_route, 2, "one for each family");
    let counts = Some([2, 0, 0]);
    assert_eq!(figures.endpoints, counts, "those of a Service that is not served do not count");
    let unknown = PlannerFixture::with_mode(ClusterIpMode::All).planner.figures();
    assert_eq!(unknown.endpoints, None, "no list is complete");
    let frontends = figures.maps.iter().find(|it| it.map == abi::maps::FRONTENDS).unwrap();
    assert_eq!(frontends.entries, 6, "four, and those of the self-test");
    for it in &figures.maps {
        assert!(it.entries > 0 && it.cluster_limit < Some(it.limit), "{it:?}");
    }
    let off = PlannerFixture::new().planner.figures();
    assert!(off.maps.iter().all(|it| it.cluster_limit.is_none()), "the node serves none");
}

#[test]
fn the_times_of_changes_are_taken_once_they_are_in_force() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let triggered = |service, pods: &[u8], at| {
        let observed = ObservedSlice { triggered_ms: Some(at), ..slice(service, pods) };
        ClusterChange::Slice(name(service), Some(observed))
    };
    fixture.observe(first_lists(vec![
        set_tcp_service(1, None),
        triggered(1, &[5], 1),
        set_tcp_service(2, Some(false)),
    ]));
    assert_eq!(fixture.planner.take_programmed(), [0; 0], "a first list tells no latency");
    fixture.observe(vec![triggered(1, &[5, 6], 2), triggered(1, &[6], 3), triggered(2, &[7], 4)]);
    assert_eq!(fixture.planner.take_programmed(), [2, 3], "not of a Service that is not served");
    assert_eq!(fixture.planner.take_programmed(), [0; 0]);
    fixture.observe(vec![triggered(1, &[6], 5)]);
    assert_eq!(fixture.planner.take_programmed(), [0; 0], "nothing has changed");
    let gone = ClusterChange::Slice(name(1), None);
    fixture.observe(vec![triggered(1, &[7], 6), gone]);
    assert_eq!(fixture.planner.take_programmed(), [0; 0], "a slice that is gone has an old time");
}

#[test]
fn the_time_of_a_change_that_does_not_fit_waits_or_is_dropped() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_tcp_service(1, None), set_slice(1, &[5])]));
    let triggered = |pods: &[u8]| {
        let observed = ObservedSlice { triggered_ms: Some(7), ..slice(1, pods) };
        vec![ClusterChange::Slice(name(1), Some(observed))]
    };
    // The pool holds 3 entries for Services of the cluster, of which the old list and its successor take some.
    fixture.planner.list_entry_pool = ExtentPool::new(4);
    fixture.planner.list_entry_pool.reserve(0, 2);
    fixture.planner.list_entry_pool.quarantine(1, 1, fixture.now);
    fixture.observe(triggered(&[5, 6]));
    assert_eq!(fixture.planner.take_programmed(), [0; 0], "it waits for the quarantine");
    fixture.now += abi::QUARANTINE_NS;
    fixture.planner.retry_unfit();
    fixture.observe(vec![]);
    assert_eq!(fixture.planner.take_programmed(), [7]);
    fixture.observe(triggered(&(1..=20).collect::<Vec<u8>>()));
    assert_eq!(fixture.planner.take_programmed(), [0; 0], "it is refused");
    assert_eq!(fixture.planner.refused_cluster_services(), 1);
    fixture.observe(vec![]);
    assert_eq!(fixture.planner.take_programmed(), [0; 0]);
}

#[test]
fn times_of_changes_that_no_plan_writes_do_not_pile_up() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_tcp_service(1, None)]));
    for at in 0..10_000_i64 {
        let pods = [5 + u8::from(at % 2 == 0)];
        let observed = ObservedSlice { triggered_ms: Some(at), ..slice(1, &pods) };
        fixture.planner.apply_cluster_changes(vec![ClusterChange::Slice(name(1), Some(observed))]);
    }
    fixture.observe(vec![]);
    let taken = fixture.planner.take_programmed().len();
    assert!((1..1_000).contains(&taken), "{taken}");
}

#[test]
fn a_service_with_ports_of_both_protocols_has_frontends_for_those_it_serves() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5])]));
    let protocols: BTreeSet<_> = fixture.facts(10).into_iter().map(|it| it.protocol).collect();
    assert_eq!(protocols, ["TCP", "UDP"].map(str::to_owned).into());
    let outcome = |to| fixture.trace(to).outcome;
    assert_eq!(outcome("10.96.0.1:80"), TraceOutcome::Endpoint);
    assert_eq!(outcome("10.96.0.1:53"), TraceOutcome::Refused, "the slice has no port for it");
}
