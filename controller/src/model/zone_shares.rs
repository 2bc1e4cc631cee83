//! Pure: shares of the zones in the CPU of the cluster, by which endpoints get hints for zones.
//!
//! The rules are those of `SetNodes` in `k8s.io/endpointslice/topologycache` of Kubernetes 1.36.

use std::collections::BTreeMap;

use smol_str::SmolStr;

/// Node, as far as the share of its zone depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneNode<'a> {
    /// Zone of the node; empty without one.
    pub zone: &'a str,
    /// Allocatable CPU in thousandths of a processor; 0: the node states none.
    pub cpu_milli: u64,
    /// True if Kubernetes reports the node ready.
    pub is_ready: bool,
    /// True if the node is for the control plane: it runs few clients, so its CPU does not count.
    pub is_control_plane: bool,
}

/// Shares of the zones in the allocatable CPU of the ready nodes outside of the control plane.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ZoneShares {
    /// Share of each zone, above 0. All shares add up to 1.
    by_zone: BTreeMap<SmolStr, f64>,
    /// True if a node that counts has no zone or no CPU.
    has_incomplete_node: bool,
}

/// Reason for which the endpoints of a service get no hints for zones, although it asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HintRefusal {
    /// A ready node has no zone or no CPU, so the shares of the zones are not known.
    #[error("a ready node has no label topology.kubernetes.io/zone or no allocatable CPU")]
    IncompleteNode,
    /// Fewer than two zones have ready nodes, so that hints would change nothing.
    #[error("fewer than two zones have ready nodes")]
    OneZone,
    /// The service has fewer ready endpoints than zones have ready nodes.
    #[error("fewer endpoints are ready than there are zones")]
    TooFewEndpoints,
    /// Hints would load the endpoints of some zone too much, however they are assigned.
    #[error("the endpoints of a zone would get over 20 % more than their share")]
    Overload,
    /// The zone of a ready endpoint is not known.
    #[error("the node of a ready endpoint has no label topology.kubernetes.io/zone")]
    EndpointWithoutZone,
}

impl ZoneShares {
    /// Returns the shares by these nodes.
    pub fn of_nodes<'a>(nodes: impl IntoIterator<Item = ZoneNode<'a>>) -> Self {
        let mut cpu_by_zone: BTreeMap<&str, u64> = BTreeMap::new();
        for node in nodes.into_iter().filter(|it| it.is_ready && !it.is_control_plane) {
            if node.zone.is_empty() || node.cpu_milli == 0 {
                return Self { by_zone: BTreeMap::new(), has_incomplete_node: true };
            }
            let cpu = cpu_by_zone.entry(node.zone).or_default();
            *cpu = cpu.saturating_add(node.cpu_milli);
        }
        let total = cpu_by_zone.values().fold(0, |sum: u64, cpu| sum.saturating_add(*cpu));
        let share = |(zone, cpu): (&str, u64)| (SmolStr::from(zone), cpu as f64 / total as f64);
        Self { by_zone: cpu_by_zone.into_iter().map(share).collect(), has_incomplete_node: false }
    }

    /// Returns the share of each zone if hints are possible with these nodes.
    pub fn usable(&self) -> Result<&BTreeMap<SmolStr, f64>, HintRefusal> {
        if self.has_incomplete_node {
            return Err(HintRefusal::IncompleteNode);
        }
        if self.by_zone.len() < 2 {
            return Err(HintRefusal::OneZone);
        }
        Ok(&self.by_zone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(zone: &str, cpu_milli: u64) -> ZoneNode<'_> {
        ZoneNode { zone, cpu_milli, is_ready: true, is_control_plane: false }
    }

    fn shares(nodes: &[ZoneNode<'_>]) -> Result<Vec<(String, f64)>, HintRefusal> {
        let shares = ZoneShares::of_nodes(nodes.iter().copied());
        let all = shares.usable()?.iter().map(|(zone, share)| (zone.to_string(), *share));
        Ok(all.collect())
    }

    #[test]
    fn shares_follow_the_cpu_of_the_nodes() {
        let nodes = [node("a", 1000), node("b", 4000), node("a", 3000)];
        assert_eq!(shares(&nodes), Ok(vec![("a".into(), 0.5), ("b".into(), 0.5)]));
    }

    #[test]
    fn nodes_of_the_control_plane_and_nodes_that_are_not_ready_do_not_count() {
        let control_plane = ZoneNode { is_control_plane: true, ..node("c", 8000) };
        let lost = ZoneNode { is_ready: false, ..node("", 0) };
        let nodes = [node("a", 1000), node("b", 3000), control_plane, lost];
        assert_eq!(shares(&nodes), Ok(vec![("a".into(), 0.25), ("b".into(), 0.75)]));
    }

    #[test]
    fn a_ready_node_without_zone_or_cpu_refuses_all_hints() {
        for incomplete in [node("", 4000), node("a", 0)] {
            let nodes = [node("a", 1000), incomplete, node("b", 1000)];
            assert_eq!(shares(&nodes), Err(HintRefusal::IncompleteNode));
        }
    }

    #[test]
    fn fewer_than_two_zones_have_no_hints() {
        assert_eq!(shares(&[]), Err(HintRefusal::OneZone));
        assert_eq!(shares(&[node("a", 1000), node("a", 2000)]), Err(HintRefusal::OneZone));
    }
}
