//! Pure: standby orders: connects go to frozen pods only while no running pod can take them.

use common::service_routing::TopologyHints;

use super::*;
use crate::service_facts::{BackendUsage, TraceFacts, TraceTarget};

/// Returns a ready pod of the first service with a standby order.
fn standby_pod(number: u8) -> PodEntry {
    PodEntry { standby: Some(fixtures::standby_order()), ..pod(number, 1, RoutingPhase::Ready) }
}

/// Returns the table of one service on the direct path with these pods and an activator.
fn table_with(pods: &[PodEntry]) -> RouteTable {
    table(&[service(1, ConnectionPath::Direct)], pods, &[activator(1)])
}

/// Plans a table. Returns the plan.
fn plan(fixture: &mut PlannerFixture, table: &RouteTable) -> MapPlan {
    fixture.set_table(table);
    let plan = fixture.plan_and_write(&BTreeMap::new());
    // What a plan frees is used again only after its quarantine.
    fixture.now += abi::QUARANTINE_NS;
    plan
}

/// Returns the mode and the pods that a connect to the frontend finds.
fn found_at(fixture: &PlannerFixture, key: &FrontendKey) -> (RoutingMode, Vec<BackendTarget>) {
    let (mode, mut list, _) = fixture.kernel.find(key).expect("a frontend");
    list.sort_unstable();
    (mode, list)
}

/// Plans these pods. Returns what a connect to the service's IPv4 address finds.
fn found(fixture: &mut PlannerFixture, pods: &[PodEntry]) -> (RoutingMode, Vec<BackendTarget>) {
    plan(fixture, &table_with(pods));
    found_at(fixture, &key([10, 96, 0, 1]))
}

fn trace(fixture: &PlannerFixture) -> TraceFacts {
    let target = TraceTarget { to: "10.96.0.1:80".parse().expect("an address"), protocol: 6 };
    fixture.planner.trace(&target, |_| BackendUsage::default())
}

#[test]
fn connects_go_to_standby_pods_only_while_no_running_pod_is_ready() {
    use RoutingMode::{Activator, PickBackend};
    let mut fixture = PlannerFixture::new();
    let both = [standby_pod(5), standby_pod(6)];
    assert_eq!(found(&mut fixture, &both), (PickBackend, vec![target(5), target(6)]));
    for (phase, expected) in [
        (RoutingPhase::Starting, vec![target(5), target(6)]),
        (RoutingPhase::Ready, vec![target(7)]),
        (RoutingPhase::Draining, vec![target(5), target(6)]),
    ] {
        let pods = [&both[..], &[pod(7, 1, phase)]].concat();
        assert_eq!(found(&mut fixture, &pods), (PickBackend, expected), "{phase:?}");
    }
    assert_eq!(found(&mut fixture, &[]), (Activator, vec![]), "asleep without a standby pod");
    assert!(!fixture.planner.has_due_work());
}

#[test]
fn the_activator_path_leads_to_no_standby_pod() {
    let mut fixture = PlannerFixture::new();
    let wanted =
        table(&[service(1, ConnectionPath::Activator)], &[standby_pod(5)], &[activator(1)]);
    plan(&mut fixture, &wanted);
    let found = found_at(&fixture, &key([10, 96, 0, 1]));
    assert_eq!(found, (RoutingMode::Activator, vec![]));
}

/// The wake of a service and its return to sleep change nothing in the maps: connects go on while they happen.
#[test]
fn the_order_of_the_only_pod_changes_no_map() {
    let mut fixture = PlannerFixture::new();
    found(&mut fixture, &[standby_pod(5)]);
    let running = table_with(&[pod(5, 1, RoutingPhase::Ready)]);
    assert_eq!(plan(&mut fixture, &running), MapPlan::default());
    assert_eq!(plan(&mut fixture, &table_with(&[standby_pod(5)])), MapPlan::default());
}

/// Of two standby pods one wakes. New connects no longer go to the other one, which is ready all the same.
#[test]
fn a_running_pod_takes_over_by_one_store_for_each_address() {
    let mut fixture = PlannerFixture::new();
    found(&mut fixture, &[standby_pod(5), standby_pod(6)]);
    let woken = table_with(&[pod(5, 1, RoutingPhase::Ready), standby_pod(6)]);
    let plan = plan(&mut fixture, &woken);
    let stores = plan.ops.iter().filter(|op| matches!(op, MapOp::State { .. })).count();
    assert_eq!(stores, 2, "{:?}", plan.ops);
    let passed_over = SocketAddr::from(([10, 244, 0, 6], 8080));
    assert_eq!((plan.added_pods, plan.removed_pods), (BTreeSet::new(), [passed_over].into()));
    let phases = fixture.planner.table().pod_phases(|at| *at == passed_over);
    assert_eq!(phases, [(passed_over, RoutingPhase::Ready)].into());
}

#[test]
fn a_standby_pod_stands_in_for_running_pods_that_are_excluded() {
    let mut fixture = PlannerFixture::new();
    let pods = [standby_pod(5), pod(6, 1, RoutingPhase::Ready)];
    fixture.planner.set_excluded("uid6", true);
    assert_eq!(found(&mut fixture, &pods).1, [target(5)]);
    fixture.planner.set_excluded("uid6", false);
    assert_eq!(found(&mut fixture, &pods).1, [target(6)]);
}

/// A running pod of an older template may lack a port of its Service.
#[test]
fn a_running_pod_is_preferred_at_the_ports_that_it_has() {
    let ports = |all: &[u16]| {
        all.iter().map(|&it| fixtures::pod_port(it, it, AppProtocol::Tcp)).collect::<Vec<_>>()
    };
    let services = [80, 5432].map(|port| ServiceEntry {
        addresses: vec![[10, 96, 0, 1].into()],
        ..fixtures::scaled_port(&name(1), port, AppProtocol::Tcp)
    });
    let pods = [
        PodEntry { ports: ports(&[80, 5432]), ..standby_pod(5) },
        PodEntry { ports: ports(&[80]), ..pod(6, 1, RoutingPhase::Ready) },
    ];
    let mut fixture = PlannerFixture::new();
    plan(&mut fixture, &table(&services, &pods, &[activator(1)]));
    let pod_at = |port: u16| {
        let key = FrontendKey { port_be: port.to_be(), ..key([10, 96, 0, 1]) };
        found_at(&fixture, &key).1.iter().map(|it| it.address[15]).collect::<Vec<_>>()
    };
    assert_eq!([pod_at(80), pod_at(5432)], [[6], [5]]);
}

/// The running pod has no IPv6 address, and mapped addresses are of no use beside activators that have one.
#[test]
fn clients_of_a_family_that_no_running_pod_serves_use_a_standby_pod() {
    let six = IpAddr::from([0xfd00, 0x244, 0, 0, 0, 0, 0, 5]);
    let pods = [
        PodEntry { other_family_address: Some(six), ..standby_pod(5) },
        pod(6, 1, RoutingPhase::Ready),
    ];
    let activator = ActivatorEntry {
        addresses: vec![IpAddr::from([10, 244, 1, 1]), ipv6_address(9)],
        ..activator(1)
    };
    let mut fixture = PlannerFixture::new();
    plan(&mut fixture, &table(&[service(1, ConnectionPath::Direct)], &pods, &[activator]));
    assert_eq!(found_at(&fixture, &key([10, 96, 0, 1])).1, [target(6)]);
    let ipv6_key = FrontendKey { address: to_v6_octets(ipv6_address(1)), ..key([0; 4]) };
    let own = BackendTarget { address: to_v6_octets(six), ..target(5) };
    assert_eq!(found_at(&fixture, &ipv6_key), (RoutingMode::PickBackend, vec![own]));
}

#[test]
fn hints_select_among_the_pods_that_are_not_passed_over() {
    let hinted = |pod: PodEntry, zone: &str| {
        let hints = TopologyHints { zone: zone.into(), node: "".into() };
        PodEntry { hints, ..pod }
    };
    let mut fixture = PlannerFixture::new();
    fixture.planner.serve_cluster_services(ClusterIpMode::Off, "here");
    let mut list = |pods: &[PodEntry]| {
        let mut table = table_with(pods);
        let node = NodeEntry { name: "here".into(), zone: "a".into() };
        table.nodes.insert(node.name.clone(), node);
        plan(&mut fixture, &table);
        found_at(&fixture, &key([10, 96, 0, 1])).1
    };
    let [near, far] = [(5, "a"), (6, "b")].map(|(it, zone)| hinted(standby_pod(it), zone));
    assert_eq!(list(&[near.clone(), far.clone()]), [target(5)]);
    // A standby pod in this zone is passed over, and the hints that count are those of the running pods.
    let running =
        [(7, "a"), (8, "b")].map(|(it, zone)| hinted(pod(it, 1, RoutingPhase::Ready), zone));
    assert_eq!(list(&[&running[..], &[standby_pod(5), far]].concat()), [target(7)]);
    assert_eq!(list(&[near, running[1].clone()]), [target(8)]);
}

#[test]
fn a_trace_tells_why_a_standby_pod_is_used_or_passed_over() {
    let mut fixture = PlannerFixture::new();
    found(&mut fixture, &[standby_pod(5)]);
    let asleep = trace(&fixture);
    assert!(asleep.reason.ends_with(": the standby pods of the Revision"), "{}", asleep.reason);
    assert!(asleep.candidates[0].is_selected);
    found(&mut fixture, &[standby_pod(5), pod(6, 1, RoutingPhase::Ready)]);
    let awake = trace(&fixture);
    assert!(awake.reason.ends_with(": the ready pods of the Revision"), "{}", awake.reason);
    let passed_over = awake.candidates.iter().find(|it| !it.is_selected).expect("one");
    assert_eq!(passed_over.reason, "is on standby, and other pods take connects");
}
