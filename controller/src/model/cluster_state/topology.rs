//! Pure: hints of a Revision's pods: the zones and nodes whose clients should use each pod.

use common::service_routing::TopologyHints;
use smol_str::SmolStr;

use crate::model::{knative::key, zone_shares::HintRefusal};

/// Rule by which the endpoints of a service get hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HintMode {
    /// No endpoint has a hint.
    #[default]
    Off,
    /// Zones get endpoints in proportion to the CPU of their nodes (`topology-mode: Auto`).
    Proportional,
    /// Each endpoint is for the clients in its zone (`PreferSameZone`, or `PreferClose`).
    SameZone,
    /// Each endpoint is for the clients on its node, and after them for those in its zone (`PreferSameNode`).
    SameNode,
}

impl HintMode {
    /// Reads the mode from annotations. As in Kubernetes, the topology mode comes before the traffic distribution.
    pub fn from_annotations<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Self {
        // The retired annotation counts first, as in Kubernetes (`hintsEnabled` in `utils.go`).
        let mode = get(key::TOPOLOGY_AWARE_HINTS).or_else(|| get(key::TOPOLOGY_MODE));
        if matches!(mode, Some("Auto" | "auto")) {
            return Self::Proportional;
        }
        get(key::TRAFFIC_DISTRIBUTION).and_then(Self::from_traffic_distribution).unwrap_or_default()
    }

    /// Reads the mode from a traffic distribution; `None`: the value is not known.
    pub fn from_traffic_distribution(value: &str) -> Option<Self> {
        match value {
            "PreferClose" | "PreferSameZone" => Some(Self::SameZone),
            "PreferSameNode" => Some(Self::SameNode),
            _ => None,
        }
    }
}

/// Hints of a Revision's ready pods, while its service asks for hints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionTopology {
    /// Rule by which the pods have their hints.
    pub mode: HintMode,
    /// Ready pods, sorted by name; empty if hints are refused.
    pub pods: Vec<HintedPod>,
    /// Reason for which no pod has a hint.
    pub refusal: Option<HintRefusal>,
}

/// Ready pod with its hints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintedPod {
    /// Name of the pod, within its namespace.
    pub name: Box<str>,
    /// Zone of the pod's own node at the time of the assignment; empty if it was not known.
    pub zone: SmolStr,
    /// Clients that should use the pod.
    pub hints: TopologyHints,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topology_mode_comes_before_the_traffic_distribution() {
        let mode = |annotations: &[(&str, &'static str)]| {
            HintMode::from_annotations(|key| {
                annotations.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
            })
        };
        let near = (key::TRAFFIC_DISTRIBUTION, "PreferClose");
        assert_eq!(mode(&[]), HintMode::Off);
        assert_eq!(mode(&[near]), HintMode::SameZone);
        assert_eq!(mode(&[(key::TRAFFIC_DISTRIBUTION, "PreferSameZone")]), HintMode::SameZone);
        assert_eq!(mode(&[(key::TRAFFIC_DISTRIBUTION, "PreferSameNode")]), HintMode::SameNode);
        assert_eq!(mode(&[near, (key::TOPOLOGY_MODE, "Auto")]), HintMode::Proportional);
        assert_eq!(mode(&[near, (key::TOPOLOGY_MODE, "Disabled")]), HintMode::SameZone);
        assert_eq!(mode(&[(key::TOPOLOGY_AWARE_HINTS, "auto")]), HintMode::Proportional);
        let both = [(key::TOPOLOGY_AWARE_HINTS, "Disabled"), (key::TOPOLOGY_MODE, "Auto")];
        assert_eq!(mode(&both), HintMode::Off, "the retired annotation counts first");
    }
}
