//! Pure: ports of scaled Services: the pods' ports for them, affinity, and the same Service as one of the cluster.

use super::{cluster::*, *};
use crate::service_facts::{
    BackendUsage, CandidateFacts, FrontendFacts, FrontendMode, TraceFacts, TraceOutcome,
    TraceTarget,
};

/// Returns the entry for a port of the scaled Service `s1` at 10.96.0.1.
fn scaled_port(port: u16, protocol: AppProtocol) -> ServiceEntry {
    ServiceEntry {
        addresses: vec![[10, 96, 0, 1].into()],
        activator_port: NonZeroU16::new(20_000 + port % 100).unwrap(),
        ..fixtures::scaled_port(&name(1), port, protocol)
    }
}

/// Returns the entries for its port 80 of HTTP and its port 5432 of raw TCP.
fn both_ports() -> [ServiceEntry; 2] {
    [scaled_port(80, AppProtocol::Http1), scaled_port(5432, AppProtocol::Tcp)]
}

/// Returns a ready pod of the Service with these ports, as pairs of the Service's port and its own.
fn pod_with(number: u8, ports: &[(u16, u16)]) -> PodEntry {
    let port = |&(service_port, port): &(u16, u16)| {
        let is_database = service_port == 5432;
        let protocol = if is_database { AppProtocol::Tcp } else { AppProtocol::Http1 };
        fixtures::pod_port(service_port, port, protocol)
    };
    let ports = ports.iter().map(port).collect();
    PodEntry { ports, keeps_binds: true, ..pod(number, 1, RoutingPhase::Ready) }
}

fn key_at(port: u16) -> FrontendKey {
    FrontendKey { port_be: port.to_be(), ..key([10, 96, 0, 1]) }
}

fn target_at(number: u8, port: u16) -> BackendTarget {
    BackendTarget { port_be: port.to_be(), ..target(number) }
}

fn address_at(number: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 244, 0, number], port))
}

/// Returns what a connect to a port of the Service finds.
fn found(fixture: &PlannerFixture, port: u16) -> (RoutingMode, Vec<BackendTarget>, u16) {
    let (mode, mut list, activator_port_be) = fixture.kernel.find(&key_at(port)).unwrap();
    list.sort_unstable();
    (mode, list, u16::from_be(activator_port_be))
}

fn trace(fixture: &PlannerFixture, to: &str, protocol: u8) -> TraceFacts {
    let target = TraceTarget { to: to.parse().unwrap(), protocol };
    fixture.planner.trace(&target, |_| BackendUsage::default())
}

fn all_facts(fixture: &PlannerFixture) -> Vec<FrontendFacts> {
    let (mut facts, next) = fixture.planner.facts_after(&ServiceCursor::START, 100);
    let next = next.expect("the source of the cluster");
    facts.extend(fixture.planner.facts_after(&next, 100).0);
    facts
}

#[test]
fn each_port_leads_to_the_ports_that_pods_have_for_it() {
    let mut fixture = PlannerFixture::new();
    let pods = [
        pod_with(5, &[(80, 8080), (5432, 5432)]),
        // Named ports of an older template have other numbers.
        pod_with(6, &[(80, 9090), (5432, 5432)]),
        pod_with(7, &[(80, 8080)]),
    ];
    fixture.plan(&table(&both_ports(), &pods, &[activator(1)]));
    let web = vec![target_at(5, 8080), target_at(6, 9090), target_at(7, 8080)];
    assert_eq!(found(&fixture, 80), (RoutingMode::PickBackend, web, 20_080));
    let database = vec![target_at(5, 5432), target_at(6, 5432)];
    assert_eq!(found(&fixture, 5432), (RoutingMode::PickBackend, database, 20_032));
}

#[test]
fn a_port_that_no_ready_pod_has_leads_to_its_own_port_at_the_activators() {
    let mut fixture = PlannerFixture::new();
    // As from a controller that knows no ports of pods yet.
    let without_ports = pod_with(5, &[]);
    fixture.plan(&table(&both_ports(), &[without_ports], &[activator(1)]));
    for (port, activator_port) in [(80, 20_080), (5432, 20_032)] {
        assert_eq!(found(&fixture, port), (RoutingMode::Activator, vec![], activator_port));
    }
    let draining =
        PodEntry { phase: RoutingPhase::Draining, ..pod_with(6, &[(80, 8080), (5432, 5432)]) };
    let pods = [pod_with(5, &[(80, 8080)]), draining];
    fixture.plan(&table(&both_ports(), &pods, &[activator(1)]));
    assert_eq!(found(&fixture, 80).1, [target_at(5, 8080)]);
    assert_eq!(found(&fixture, 5432), (RoutingMode::Activator, vec![], 20_032));
}

#[test]
fn ports_of_pods_count_for_scaled_services_only() {
    let mut fixture = PlannerFixture::new();
    let route = service(1, ConnectionPath::Direct);
    fixture.plan(&table(&[route], &[pod_with(5, &[(80, 9090)])], &[activator(1)]));
    assert_eq!(found(&fixture, 80).1, [target_at(5, 8080)]);
}

#[test]
fn an_ipv6_client_reaches_the_pods_port_at_its_ipv6_address() {
    let mut fixture = PlannerFixture::new();
    let six: std::net::Ipv6Addr = "fd00:244::5".parse().unwrap();
    let both = PodEntry { other_family_address: Some(six.into()), ..pod_with(5, &[(80, 9090)]) };
    let mut web = scaled_port(80, AppProtocol::Http1);
    web.addresses.push(ipv6_address(1));
    fixture.plan(&table(&[web], &[both], &[activator(1)]));
    let ipv6_key = FrontendKey { address: to_v6_octets(ipv6_address(1)), ..key_at(80) };
    let own = BackendTarget { address: six.octets(), ..target_at(5, 9090) };
    assert_eq!(fixture.kernel.find(&ipv6_key).unwrap().1, [own]);
    let phases = fixture.planner.table().pod_phases(|at| at.port() == 9090);
    let both = [address_at(5, 9090), SocketAddr::from((six, 9090))];
    assert_eq!(phases, both.map(|at| (at, RoutingPhase::Ready)).into());
}

#[test]
fn connects_check_the_listener_of_each_port_that_the_programs_saw_open() {
    let mut fixture = PlannerFixture::new();
    fixture.set_table(&table(&both_ports(), &[pod_with(7, &[(80, 8080), (5432, 5432)])], &[]));
    let plan = |fixture: &mut PlannerFixture, unseen_ports: &[u16]| {
        let unseen_ports = unseen_ports.iter().copied().collect();
        let ids = KernelPodIds { cookie: 99, slot: 3, unseen_ports };
        fixture.planner.mark_pod_changed("uid7");
        fixture.plan_and_write(&BTreeMap::from([("uid7".to_owned(), ids)]));
        [80, 5432].map(|port| found(fixture, port).1[0].cookie)
    };
    assert_eq!(plan(&mut fixture, &[]), [99, 99]);
    assert_eq!(plan(&mut fixture, &[5432]), [99, 0]);
    assert_eq!(plan(&mut fixture, &[5432, 8080]), [0, 0]);
    assert_eq!(found(&fixture, 80).1[0].slot, 3, "its gauge counts all the same");
}

#[test]
fn each_port_of_a_pod_is_an_address_that_drains() {
    let mut fixture = PlannerFixture::new();
    let serving = pod_with(5, &[(80, 9090), (5432, 5432)]);
    let plan = |fixture: &mut PlannerFixture, pod: &PodEntry| {
        fixture.set_table(&table(&both_ports(), std::slice::from_ref(pod), &[activator(1)]));
        let plan = fixture.plan_and_write(&BTreeMap::new());
        let both = BTreeSet::from([address_at(5, 9090), address_at(5, 5432)]);
        (plan.added_pods == both, plan.removed_pods == both)
    };
    assert_eq!(plan(&mut fixture, &serving), (true, false));
    let draining = PodEntry { phase: RoutingPhase::Draining, ..serving };
    assert_eq!(plan(&mut fixture, &draining), (false, true));
    let phases = fixture.planner.table().pod_phases(|_| true);
    // The serving port may be that of a probe alone.
    let all = [8080, 9090, 5432].map(|port| (address_at(5, port), RoutingPhase::Draining));
    assert_eq!(phases, all.into());
}

#[test]
fn connections_to_a_former_port_belong_to_a_living_pod() {
    let mut fixture = PlannerFixture::new();
    let phase_at = |fixture: &PlannerFixture, port| {
        let at = address_at(5, port);
        fixture.planner.table().pod_phases(|it| *it == at).get(&at).copied()
    };
    fixture.plan(&table(&both_ports(), &[pod_with(5, &[(80, 9090)])], &[]));
    fixture.set_table(&table(&both_ports(), &[pod_with(5, &[(80, 9091)])], &[]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(plan.removed_pods, [address_at(5, 9090)].into());
    fixture.plan(&table(&both_ports(), &[pod_with(5, &[])], &[]));
    let ready = Some(RoutingPhase::Ready);
    assert_eq!([9090, 9091, 9092].map(|it| phase_at(&fixture, it)), [ready, ready, None]);
    fixture.plan(&table(&both_ports(), &[], &[]));
    assert_eq!([9090, 9091].map(|it| phase_at(&fixture, it)), [None, None]);
}

#[test]
fn a_service_with_affinity_has_a_list_in_order_and_others_have_none() {
    let mut fixture = PlannerFixture::new();
    let sticky = |seconds: Option<u64>| {
        let affinity = seconds.map(Duration::from_secs);
        ServiceEntry { affinity, ..scaled_port(80, AppProtocol::Http1) }
    };
    let mut in_force = |seconds, pods: &[u8]| {
        let pods: Vec<_> = pods.iter().map(|it| pod_with(*it, &[(80, 8080)])).collect();
        fixture.plan(&table(&[sticky(seconds)], &pods, &[activator(1)]));
        fixture.now += abi::QUARANTINE_NS;
        let id = fixture.kernel.frontends[&key_at(80)];
        let (state, info) = (fixture.kernel.states[&id], fixture.kernel.infos[&id]);
        (state.mode, info.affinity_seconds, fixture.kernel.ids(&state).is_sorted())
    };
    let kept = RoutingMode::PickWithAffinity;
    assert_eq!(in_force(None, &[1, 2, 3]), (RoutingMode::PickBackend, 0, true));
    assert_eq!(in_force(Some(60), &[1, 2, 3]), (kept, 60, true));
    assert_eq!(in_force(Some(60), &[2, 3, 9]), (kept, 60, true));
    // The number of the pod that left is used again, for one with a higher address.
    assert_eq!(in_force(Some(60), &[2, 3, 9, 20]), (kept, 60, true));
    assert_eq!(in_force(Some(0), &[1, 3]), (kept, 1, true), "less than a second is one");
    assert_eq!(in_force(Some(1 << 40), &[1, 3]), (kept, 86_400, true), "a day at most");
    assert_eq!(in_force(Some(60), &[]).0, RoutingMode::Activator);
    assert_eq!(in_force(Some(60), &[4]), (kept, 60, true));
    assert_eq!(in_force(None, &[4]).0, RoutingMode::PickBackend);
}

#[test]
fn a_new_agent_finds_lists_with_affinity_in_force() {
    let mut fixture = PlannerFixture::new();
    let affinity = Some(Duration::from_secs(60));
    let sticky = ServiceEntry { affinity, ..scaled_port(80, AppProtocol::Http1) };
    let pods = [pod_with(5, &[(80, 8080)]), pod_with(6, &[(80, 9090)])];
    let wanted = table(&[sticky], &pods, &[activator(1)]);
    fixture.plan(&wanted);
    let mut other = resumed(&fixture.kernel, &wanted, fixture.now);
    assert_eq!(other.plan(fixture.now, &BTreeMap::new()), Ok(MapPlan::default()));
}

#[test]
fn affinity_shows_only_where_it_is_in_force() {
    let mut fixture = PlannerFixture::new();
    let affinity = Some(Duration::from_secs(60));
    let sticky = ServiceEntry { affinity, ..scaled_port(80, AppProtocol::Http1) };
    let pods = [pod_with(5, &[(80, 8080)])];
    fixture.plan(&table(std::slice::from_ref(&sticky), &pods, &[activator(1)]));
    let shown = |fixture: &PlannerFixture| {
        let facts = all_facts(fixture);
        (facts[0].mode, facts[0].affinity_seconds, trace(fixture, "10.96.0.1:80", 6).reason)
    };
    let (mode, seconds, reason) = shown(&fixture);
    assert_eq!((mode, seconds), (FrontendMode::Pods, 60));
    let expected = "of two random ones of 1, that with fewer open connections: the ready pods of the \
                    Service; a client keeps its endpoint for 60 s after its last connect \
                    (sessionAffinity: ClientIP)";
    assert_eq!(reason, expected);
    fixture.plan(&table(&[sticky], &[], &[activator(1)]));
    let (mode, seconds, reason) = shown(&fixture);
    assert_eq!((mode, seconds), (FrontendMode::Activators, 0));
    let expected = "no pod of default/s1 can take connects of this node now; activators choose pods \
                    without regard to sessionAffinity";
    assert_eq!(reason, expected);
}

#[test]
fn facts_name_the_service_and_the_pods_that_have_the_port() {
    let mut fixture = PlannerFixture::new();
    let pods = [pod_with(5, &[(80, 9090), (5432, 5432)]), pod_with(6, &[(80, 9090)])];
    fixture.plan(&table(&both_ports(), &pods, &[activator(1)]));
    let facts = all_facts(&fixture);
    let rows: Vec<_> = facts.iter().map(|it| (&*it.name, it.address.port(), it.listed)).collect();
    assert_eq!(rows, [("s1", 5432, Some(1)), ("s1", 80, Some(2))]);
    let known: Vec<_> = facts.iter().map(|it| it.known).collect();
    assert_eq!(known, [Some(1), Some(2)], "a pod without the port is no endpoint");
    let database = trace(&fixture, "10.96.0.1:5432", 6);
    assert_eq!(database.outcome, TraceOutcome::Endpoint);
    let shown = |it: &CandidateFacts| (it.address, it.is_selected, it.reason.clone());
    let candidates: Vec<_> = database.candidates.iter().map(shown).collect();
    let without_port = "has no port for this port of the Service".to_owned();
    let expected = [
        (address_at(5, 5432), true, "selected".to_owned()),
        (address_at(6, 8080), false, without_port),
    ];
    assert_eq!(candidates, expected);
    let other = trace(&fixture, "10.96.0.1:81", 6).reason;
    assert_eq!(other, "default/s1 has ports 80/TCP, 5432/TCP there, not 81/TCP");
}

#[test]
fn a_trace_of_a_port_that_is_not_in_force_yet_finds_the_port() {
    let mut fixture = PlannerFixture::new();
    fixture.set_table(&table(&both_ports(), &[], &[activator(1)]));
    for to in ["10.96.0.1:80", "10.96.0.1:5432"] {
        let trace = trace(&fixture, to, 6);
        assert_eq!(trace.reason, "the frontend is not in force yet", "{to}");
        let kube_proxy = trace.kube_proxy.expect("the connect goes on unchanged");
        assert!(kube_proxy.starts_with("kube-proxy leads it to a ready pod"), "{kube_proxy}");
    }
}

#[test]
fn the_cluster_keeps_the_ports_of_a_scaled_service_that_rouse_does_not_lead() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let pods = [pod_with(5, &[(80, 8080)])];
    let web = scaled_port(80, AppProtocol::Http1);
    fixture.set_table(&table(std::slice::from_ref(&web), &pods, &[activator(1)]));
    let plan = fixture.observe(first_lists(vec![set_service(1, None), set_slice(1, &[5])]));
    assert_eq!(plan.newly_outranked, [], "its own address by the RouteTable is no conflict");
    assert_eq!(found(&fixture, 80).0, RoutingMode::PickBackend);
    let facts = all_facts(&fixture);
    let modes: Vec<_> = facts.iter().map(|it| (it.address.port(), it.mode)).collect();
    let expected =
        [(80, FrontendMode::Pods), (53, FrontendMode::Refuse), (80, FrontendMode::Shadowed)];
    assert!(expected.iter().all(|it| modes.contains(it)) && modes.len() == 3, "{modes:?}");
    let shadowed = facts.iter().find(|it| it.mode == FrontendMode::Shadowed).unwrap();
    let reason = "the Service scales to zero, so Rouse leads its connects by the RouteTable";
    assert_eq!(shadowed.reason.as_deref(), Some(reason));
    assert_eq!(trace(&fixture, "10.96.0.1:53", 17).outcome, TraceOutcome::Refused, "no such port");
    // Without the annotation the Service is one of the cluster again, and never without a frontend.
    fixture.set_table(&table(&[], &[], &[activator(1)]));
    let ops = fixture.plan_and_write(&BTreeMap::new()).ops;
    assert!(!ops.iter().any(|op| matches!(op, MapOp::RemoveFrontend { .. })), "{ops:?}");
    assert_eq!(found(&fixture, 80).0, RoutingMode::PickRandom);
}

#[test]
fn another_service_at_the_address_of_a_scaled_one_is_still_reported() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut web = scaled_port(80, AppProtocol::Http1);
    web.addresses = vec![[10, 96, 0, 2].into()];
    fixture.set_table(&table(&[web], &[], &[activator(1)]));
    let plan = fixture.observe(first_lists(vec![set_tcp_service(2, None)]));
    let outranked = plan.newly_outranked.iter().map(|it| (&it.service, &it.owner));
    assert_eq!(outranked.collect::<Vec<_>>(), [(&name(2), &name(1))]);
}

#[test]
fn a_revision_of_raw_tcp_is_known_until_it_is_removed() {
    let mut fixture = PlannerFixture::new();
    let tcp = RevisionEntry { protocol: AppProtocol::Tcp, ..hello_revision(&name(1)) };
    let mut full = RouteTable::default();
    full.revisions.insert(name(1), tcp);
    fixture.plan(&full);
    let table = fixture.planner.table();
    assert_eq!([table.is_tcp(&name(1)), table.is_h2c(&name(1))], [true, false]);
    fixture.plan(&RouteTable::default());
    let table = fixture.planner.table();
    assert!(!table.is_tcp(&name(1)));
    assert_eq!(table.missing_from(&Default::default()), []);
}
