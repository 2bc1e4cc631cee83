//! The five safeguards by name, and the decisions of Kubernetes' own code (1.36.3) for 400 random clusters.
//!
//! `controller/tests/data/topology_hints/main.go` made these with `main 400 36` (number of cases, seed). Its module
//! requires `k8s.io/endpointslice v0.36.3`, whose package `topologycache` decides.
//!
//! One JSON object per line: nodes, the zones of the endpoints (`!` before one that is not ready), and the decision. If
//! it is to hint, a change of the nodes follows. Kubernetes' decisions depend on the order of a Go map, so each lists
//! the outcomes of many runs.

use serde::Deserialize;

use super::*;
use crate::model::zone_shares::ZoneNode;

const CASES: &str = include_str!("../../../tests/data/topology_hints/cases.jsonl");

/// One line of the data.
#[derive(Deserialize)]
struct TopologyCase {
    nodes: Vec<CaseNode>,
    endpoints: Vec<String>,
    decision: CaseDecision,
    #[serde(default)]
    later: Vec<CaseNode>,
    /// True if the first outcome overloads a zone by the later nodes, so that Kubernetes decides again.
    #[serde(default)]
    overloaded: bool,
    /// True if it then keeps the hints all the same.
    #[serde(default)]
    kept_overloaded: bool,
    /// Decision for the later nodes without hints before.
    later_decision: Option<CaseDecision>,
}

#[derive(Deserialize)]
struct CaseNode {
    #[serde(default)]
    zone: String,
    #[serde(default)]
    cpu: String,
    #[serde(default)]
    not_ready: bool,
    #[serde(default)]
    control_plane: bool,
}

#[derive(Deserialize)]
struct CaseDecision {
    #[serde(default)]
    refusal: String,
    #[serde(default)]
    outcomes: Vec<String>,
}

fn shares_of(nodes: &[CaseNode]) -> ZoneShares {
    ZoneShares::of_nodes(nodes.iter().map(|it| ZoneNode {
        zone: &it.zone,
        cpu_milli: common::quantity::parse_milli(&it.cpu).unwrap_or(0),
        is_ready: !it.not_ready,
        is_control_plane: it.control_plane,
    }))
}

/// Returns the message of Kubernetes for a refusal.
fn kubernetes_message(refusal: HintRefusal) -> &'static str {
    match refusal {
        HintRefusal::IncompleteNode | HintRefusal::OneZone => {
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes"
        }
        HintRefusal::TooFewEndpoints => "Insufficient number of endpoints",
        HintRefusal::Overload => {
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold"
        }
        HintRefusal::EndpointWithoutZone => "One or more endpoints do not have a zone specified",
    }
}

/// Asserts that the zones are hinted as in one of the outcomes, or refused for the same reason.
fn assert_decision(expected: &CaseDecision, endpoints: &[String], shares: &ZoneShares, line: &str) {
    let ready: Vec<&str> =
        endpoints.iter().filter(|it| !it.starts_with('!')).map(String::as_str).collect();
    match assign_zones(&ready, shares) {
        Err(refusal) => assert_eq!(kubernetes_message(refusal), expected.refusal, "{line}"),
        Ok(assigned) => {
            let mut assigned = assigned.into_iter();
            let hint = |it: &String| if it.starts_with('!') { None } else { assigned.next() };
            let hints: Vec<&str> =
                endpoints.iter().map(hint).map(Option::unwrap_or_default).collect();
            let hints = hints.join(",");
            assert!(expected.outcomes.contains(&hints), "{hints} for {line}");
        }
    }
}

#[test]
fn hints_are_those_of_kubernetes() {
    let (mut lines, mut refused, mut kept, mut reassigned, mut stricter) = (0, 0, 0, 0, 0);
    for line in CASES.lines() {
        let case: TopologyCase = serde_json::from_str(line).expect("a case");
        lines += 1;
        assert_decision(&case.decision, &case.endpoints, &shares_of(&case.nodes), line);
        let Some(later_decision) = case.later_decision else {
            refused += 1;
            continue;
        };
        let shares = shares_of(&case.later);
        assert_decision(&later_decision, &case.endpoints, &shares, line);
        let in_force = case.decision.outcomes[0].split(',').filter(|it| !it.is_empty());
        let in_force: Vec<SmolStr> = in_force.map(SmolStr::from).collect();
        if still_fit(in_force.iter(), &shares) {
            kept += 1;
            assert!(!case.overloaded, "{line}");
        } else if case.overloaded {
            reassigned += 1;
            // Kubernetes keeps hints if no zone has more than its maximum, although another has too few.
            stricter += usize::from(case.kept_overloaded);
        } else {
            // Kubernetes would keep hints for zones in which no node is left.
            let by_zone = shares.usable().expect("an overload is reported without shares");
            assert!(in_force.iter().any(|it| !by_zone.contains_key(it)), "{line}");
            stricter += 1;
        }
    }
    assert_eq!((lines, refused, kept, reassigned, stricter), (400, 170, 89, 135, 9));
}

fn shares(nodes: &[(&str, u64)]) -> ZoneShares {
    let node =
        |&(zone, cpu_milli)| ZoneNode { zone, cpu_milli, is_ready: true, is_control_plane: false };
    ZoneShares::of_nodes(nodes.iter().map(node))
}

fn place(zone: &str, node: &str) -> EndpointPlace {
    EndpointPlace { zone: zone.into(), node: node.into() }
}

/// Returns the zone hints, or the refusal, for endpoints in these zones.
fn proportional(zones: &[&str], shares: &ZoneShares) -> Result<Vec<String>, HintRefusal> {
    let places: Vec<_> = zones.iter().map(|zone| place(zone, "n")).collect();
    let hints = assign_hints(HintRules { mode: HintMode::Proportional, shares }, &places)?;
    assert!(hints.iter().all(|it| it.node.is_empty()));
    Ok(hints.into_iter().map(|it| it.zone.to_string()).collect())
}

#[test]
fn zones_get_endpoints_in_proportion_to_their_cpu() {
    let shares = shares(&[("a", 4000), ("b", 8000)]);
    let hints = proportional(&["a", "a", "a", "a", "a", "b"], &shares);
    assert_eq!(hints.unwrap(), ["b", "b", "b", "a", "a", "b"]);
}

#[test]
fn fewer_endpoints_than_zones_get_no_hints() {
    let shares = shares(&[("a", 1000), ("b", 1000), ("c", 1000)]);
    assert_eq!(proportional(&["a", "b"], &shares), Err(HintRefusal::TooFewEndpoints));
    assert!(proportional(&["a", "b", "c"], &shares).is_ok());
}

#[test]
fn no_endpoint_gets_over_a_fifth_more_than_its_share() {
    let shares = shares(&[("a", 1000), ("b", 1000)]);
    // One of two zones would have one of three endpoints for half of the load.
    assert_eq!(proportional(&["a", "a", "b"], &shares), Err(HintRefusal::Overload));
    // With 11 it has five, for the load of 5.5.
    assert!(proportional(&["a"; 11], &shares).is_ok());
}

#[test]
fn a_ready_node_without_zone_or_cpu_takes_all_hints_away() {
    for incomplete in [("", 1000), ("a", 0)] {
        let shares = shares(&[("a", 1000), ("b", 1000), incomplete]);
        assert_eq!(proportional(&["a", "b"], &shares), Err(HintRefusal::IncompleteNode));
    }
}

#[test]
fn an_endpoint_without_a_zone_takes_all_hints_away() {
    let shares = shares(&[("a", 1000), ("b", 1000)]);
    assert_eq!(proportional(&["a", "b", ""], &shares), Err(HintRefusal::Overload));
    assert_eq!(proportional(&["a", "b", "", "a"], &shares), Err(HintRefusal::EndpointWithoutZone));
}

#[test]
fn hints_stay_until_a_change_of_nodes_overloads_a_zone() {
    let hints = ["a", "a", "a", "b", "b", "b"].map(SmolStr::from);
    for (nodes, fits) in [
        ([("a", 1000), ("b", 1000)], true),
        ([("a", 1000), ("b", 1400)], true),
        ([("a", 1000), ("b", 1600)], false),
        ([("a", 1000), ("c", 1000)], false),
        ([("a", 1000), ("a", 1000)], false),
    ] {
        assert_eq!(still_fit(hints.iter(), &shares(&nodes)), fits, "{nodes:?}");
    }
}

#[test]
fn a_traffic_distribution_hints_at_the_own_zone_and_node() {
    let places = [place("a", "n1"), place("", "n2")];
    let shares = &ZoneShares::default();
    let hints = |mode| assign_hints(HintRules { mode, shares }, &places).unwrap();
    let hint = |zone: &str, node: &str| TopologyHints { zone: zone.into(), node: node.into() };
    assert_eq!(hints(HintMode::SameZone), [hint("a", ""), hint("", "")]);
    assert_eq!(hints(HintMode::SameNode), [hint("a", "n1"), hint("", "n2")]);
    assert_eq!(hints(HintMode::Off), [hint("", ""), hint("", "")]);
}
