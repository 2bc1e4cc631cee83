//! Pure: hints of endpoints for zones and nodes: the clients that should use each endpoint.
//!
//! The rules are those of `k8s.io/endpointslice` of Kubernetes 1.36: `topologycache` for the annotation
//! `service.kubernetes.io/topology-mode`, and `trafficdist` for the traffic distribution. They differ where Kubernetes
//! depends on the order of a Go map, which is random: here the first zone by name counts. They also differ where
//! Kubernetes keeps hints that overload a zone, or that name a zone without nodes: here such hints are assigned again.

use std::collections::BTreeMap;

use common::service_routing::TopologyHints;
use smol_str::SmolStr;

use crate::model::{
    cluster_state::HintMode,
    zone_shares::{HintRefusal, ZoneShares},
};

/// Share of load beyond its own that an endpoint may get by hints.
const OVERLOAD_THRESHOLD: f64 = 0.2;

/// Rule for the hints of a service, and the shares that it may need.
#[derive(Clone, Copy, Debug)]
pub struct HintRules<'a> {
    /// Rule by which the endpoints get hints.
    pub mode: HintMode,
    /// Shares of the zones in the CPU of the nodes.
    pub shares: &'a ZoneShares,
}

/// Place of a ready endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointPlace {
    /// Zone of the endpoint's node; empty if it is not known.
    pub zone: SmolStr,
    /// Name of the node; empty if it is not known.
    pub node: SmolStr,
}

/// Returns the hints of each ready endpoint, in the order of `places`.
pub fn assign_hints(
    rules: HintRules<'_>,
    places: &[EndpointPlace],
) -> Result<Vec<TopologyHints>, HintRefusal> {
    let for_zone = |zone: SmolStr| TopologyHints { zone, node: SmolStr::default() };
    let for_node =
        |it: &EndpointPlace| TopologyHints { zone: it.zone.clone(), node: it.node.clone() };
    match rules.mode {
        HintMode::Off => Ok(vec![TopologyHints::default(); places.len()]),
        HintMode::SameZone => Ok(places.iter().map(|it| for_zone(it.zone.clone())).collect()),
        HintMode::SameNode => Ok(places.iter().map(for_node).collect()),
        HintMode::Proportional => {
            let zones: Vec<&str> = places.iter().map(|it| it.zone.as_str()).collect();
            let assigned = assign_zones(&zones, rules.shares)?;
            Ok(assigned.into_iter().map(|zone| for_zone(zone.into())).collect())
        }
    }
}

/// Returns true if hints that were assigned in proportion still are, by the present shares of the zones: no zone has
/// less than its minimum. Then a change of nodes moves no client.
pub fn still_fit<'a>(zone_hints: impl Iterator<Item = &'a SmolStr>, shares: &ZoneShares) -> bool {
    let Ok(shares) = shares.usable() else { return false };
    let counts = count_by_zone(zone_hints.map(SmolStr::as_str));
    let total: usize = counts.values().sum();
    let fits = |(zone, share): (&SmolStr, &f64)| {
        counts.get(zone.as_str()).copied().unwrap_or(0) >= minimum(share * as_number(total))
    };
    counts.keys().all(|zone| shares.contains_key(*zone)) && shares.iter().all(fits)
}

/// Assigns a zone to each endpoint, of which `zones` has the own zones. As many as possible keep their own.
fn assign_zones<'a>(
    zones: &[&'a str],
    shares: &'a ZoneShares,
) -> Result<Vec<&'a str>, HintRefusal> {
    let wanted = wanted_endpoints(zones.len(), shares.usable()?)?;
    if zones.iter().any(|it| it.is_empty()) {
        return Err(HintRefusal::EndpointWithoutZone);
    }
    let (mut giving, mut receiving) =
        zone_transfers(&wanted, &count_by_zone(zones.iter().copied()));
    let assign = |&own: &&'a str| {
        let Some(to_give) = giving.get_mut(own).filter(|left| **left > 0) else { return own };
        // An endpoint keeps its own zone as soon as no zone lacks any.
        let receiver = receiving.iter_mut().find(|(_, needed)| **needed > 0);
        let Some((zone, to_receive)) = receiver else { return own };
        *to_give -= 1;
        *to_receive -= 1;
        *zone
    };
    Ok(zones.iter().map(assign).collect())
}

/// Returns the number of endpoints that each zone should have: its share, or its minimum if that is more.
fn wanted_endpoints<'a>(
    total: usize,
    shares: &'a BTreeMap<SmolStr, f64>,
) -> Result<BTreeMap<&'a str, f64>, HintRefusal> {
    // Some zone would have no endpoint, and its clients would overload others.
    if shares.len() > total {
        return Err(HintRefusal::TooFewEndpoints);
    }
    let by_share = |share: &f64| share * as_number(total);
    if shares.values().map(|share| minimum(by_share(share))).sum::<usize>() > total {
        return Err(HintRefusal::Overload);
    }
    let wanted = |(zone, share): (&'a SmolStr, &f64)| {
        let by_share = by_share(share);
        (zone.as_str(), by_share.max(as_number(minimum(by_share))))
    };
    Ok(shares.iter().map(wanted).collect())
}

/// Returns the fewest endpoints of a zone whose share is `by_share` endpoints.
///
/// Example: with a share of 3 endpoints, clients load 2 endpoints by half more than the share, so the minimum is 3.
/// With a share of 6, they load 5 by a fifth more, which is just allowed.
fn minimum(by_share: f64) -> usize {
    (by_share * (1.0 / (1.0 + OVERLOAD_THRESHOLD))).ceil() as usize
}

/// Numbers of endpoints, by zone.
type CountByZone<'a> = BTreeMap<&'a str, usize>;

/// Returns the numbers of endpoints that zones give away, and that zones receive. Both have the same sum.
fn zone_transfers<'a>(
    wanted: &BTreeMap<&'a str, f64>,
    present: &CountByZone<'_>,
) -> (CountByZone<'a>, CountByZone<'a>) {
    let mut surplus: BTreeMap<&'a str, f64> = BTreeMap::new();
    let mut lack: BTreeMap<&'a str, f64> = BTreeMap::new();
    for (&zone, &wanted) in wanted {
        let has = as_number(present.get(zone).copied().unwrap_or(0));
        if has > wanted {
            surplus.insert(zone, has - wanted);
        } else {
            lack.insert(zone, wanted - has);
        }
    }
    let (mut giving, mut receiving) = (CountByZone::new(), CountByZone::new());
    while let (Some((giver, to_give)), Some((receiver, to_receive))) =
        (largest_zone(&surplus), largest_zone(&lack))
    {
        // A transfer must bring both zones nearer to what they should have, and one of them by a whole endpoint.
        if to_give.min(to_receive) < 0.5 || to_give.max(to_receive) < 1.0 {
            break;
        }
        *giving.entry(giver).or_default() += 1;
        *receiving.entry(receiver).or_default() += 1;
        surplus.insert(giver, to_give - 1.0);
        lack.insert(receiver, to_receive - 1.0);
    }
    (giving, receiving)
}

/// Returns the zone with the largest number, if that is above 0; of equal ones the first by name.
fn largest_zone<'a>(zones: &BTreeMap<&'a str, f64>) -> Option<(&'a str, f64)> {
    let mut largest = None;
    for (&zone, &number) in zones {
        if number > largest.map_or(0.0, |(_, most)| most) {
            largest = Some((zone, number));
        }
    }
    largest
}

fn count_by_zone<'a>(zones: impl Iterator<Item = &'a str>) -> CountByZone<'a> {
    let mut counts = CountByZone::new();
    for zone in zones {
        *counts.entry(zone).or_default() += 1;
    }
    counts
}

fn as_number(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
