//! Pure: hints of pods: connects from this node go to the pods for its clients.

use common::service_routing::TopologyHints;

use super::*;
use crate::service_facts::{BackendUsage, TraceTarget};

/// Returns a ready pod of the first service, with hints.
fn hinted(number: u8, zone: &str, node: &str) -> PodEntry {
    let hints = TopologyHints { zone: zone.into(), node: node.into() };
    PodEntry { hints, ..pod(number, 1, RoutingPhase::Ready) }
}

/// Returns the table of one service, as it is sent to a node in this zone.
fn table_in(zone: &str, pods: &[PodEntry]) -> RouteTable {
    let mut table = table(&[service(1, ConnectionPath::Direct)], pods, &[activator(1)]);
    if !zone.is_empty() {
        let node = NodeEntry { name: "here".into(), zone: zone.into() };
        table.nodes.insert(node.name.clone(), node);
    }
    table
}

fn fixture() -> PlannerFixture {
    let mut fixture = PlannerFixture::new();
    fixture.planner.serve_cluster_services(ClusterIpMode::Off, "here");
    fixture
}

/// Plans a table, and returns the pods in the list that connects choose from.
fn list_of(fixture: &mut PlannerFixture, table: &RouteTable) -> Vec<BackendTarget> {
    fixture.plan(table);
    // What a plan frees is used again only after its quarantine.
    fixture.now += abi::QUARANTINE_NS;
    let mut list = fixture.kernel.find(&key([10, 96, 0, 1])).expect("a frontend").1;
    list.sort_unstable();
    list
}

#[test]
fn connects_go_to_the_pods_for_the_zone_of_the_node() {
    let pods = [hinted(5, "a", ""), hinted(6, "a", ""), hinted(7, "b", "")];
    let all = vec![target(5), target(6), target(7)];
    let mut fixture = fixture();
    for (zone, expected) in [
        ("a", vec![target(5), target(6)]),
        ("b", vec![target(7)]),
        ("c", all.clone()),
        ("a", vec![target(5), target(6)]),
        ("", all),
    ] {
        assert_eq!(list_of(&mut fixture, &table_in(zone, &pods)), expected, "zone {zone:?}");
    }
    assert!(!fixture.planner.has_due_work());
}

#[test]
fn connects_go_to_the_pods_for_the_node_before_those_for_its_zone() {
    let mut fixture = fixture();
    let pods = [hinted(5, "a", "here"), hinted(6, "a", "there")];
    assert_eq!(list_of(&mut fixture, &table_in("a", &pods)), [target(5)]);
    assert_eq!(list_of(&mut fixture, &table_in("", &pods)), [target(5)]);
    assert_eq!(list_of(&mut fixture, &table_in("a", &pods[1..])), [target(6)]);
}

#[test]
fn hints_count_only_if_each_ready_pod_has_one() {
    let mut fixture = fixture();
    let pods = [hinted(5, "a", ""), hinted(6, "b", ""), hinted(7, "", "")];
    assert_eq!(list_of(&mut fixture, &table_in("a", &pods)).len(), 3);
    let draining = PodEntry { phase: RoutingPhase::Draining, ..pods[2].clone() };
    let pods = [pods[0].clone(), pods[1].clone(), draining];
    assert_eq!(list_of(&mut fixture, &table_in("a", &pods)), [target(5)]);
}

#[test]
fn other_zones_serve_a_zone_whose_pods_are_all_excluded() {
    let mut fixture = fixture();
    let wanted = table_in("a", &[hinted(5, "a", ""), hinted(6, "b", "")]);
    fixture.planner.set_excluded("uid5", true);
    assert_eq!(list_of(&mut fixture, &wanted), [target(6)]);
    fixture.planner.set_excluded("uid5", false);
    assert_eq!(list_of(&mut fixture, &wanted), [target(5)]);
}

#[test]
fn a_snapshot_without_the_node_means_that_it_has_no_zone() {
    let mut fixture = fixture();
    fixture.plan(&table_in("a", &[]));
    let node = RouteKey::Node("here".into());
    let missing = |named: &RouteTable| {
        let states = named.all_states().filter_map(|it| Some((it.key()?, it)));
        fixture.planner.table().missing_from(&states.collect())
    };
    assert!(missing(&table_in("", &[])).contains(&node));
    assert!(!missing(&table_in("a", &[])).contains(&node));
}

#[test]
fn a_trace_shows_the_hints_and_the_pods_that_they_exclude() {
    let mut fixture = fixture();
    list_of(&mut fixture, &table_in("a", &[hinted(5, "a", ""), hinted(6, "b", "")]));
    let to = "10.96.0.1:80".parse().unwrap();
    let target = TraceTarget { to, protocol: 6 };
    let trace = fixture.planner.trace(&target, |_| BackendUsage::default());
    let excluded = trace.candidates.iter().find(|it| !it.is_selected).expect("one");
    assert_eq!(excluded.reason, "its hints are for other zones");
    assert_eq!(excluded.zone_hints, ["b"]);
    let rule = "of 1, that with fewer open connections: the ready pods of the Revision with a \
                hint for this node's zone";
    assert!(trace.reason.ends_with(rule), "{}", trace.reason);
    list_of(&mut fixture, &table_in("a", &[hinted(5, "a", "here"), hinted(6, "a", "there")]));
    let reason = fixture.planner.trace(&target, |_| BackendUsage::default()).reason;
    assert!(reason.ends_with("the ready pods of the Revision with a hint for this node"));
}
