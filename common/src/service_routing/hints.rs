//! Pure: hints of the pods of Rouse's services, and the rule by which clients follow them.

use std::slice;

use smol_str::SmolStr;

use super::{HintState, NodeTopology, SelectionRule};

/// Hints of one pod: the clients that should use it. A pod has one hint of each kind at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopologyHints {
    /// Zone whose clients should use the pod; empty without such a hint.
    pub zone: SmolStr,
    /// Node whose clients should use the pod; empty without such a hint.
    pub node: SmolStr,
}

impl SelectionRule {
    /// Returns the rule for clients on `node`, by the hints of each ready pod. It is the one for Services of the
    /// cluster with `internalTrafficPolicy: Cluster`.
    pub fn of_hints<'a>(
        hints: impl Iterator<Item = &'a TopologyHints> + Clone,
        node: &NodeTopology,
    ) -> Self {
        let nodes = hints.clone().map(|it| as_names(&it.node));
        let zones = || HintState::of_ready(hints.map(|it| as_names(&it.zone)), &node.zone);
        Self::of_hint_states(HintState::of_ready(nodes, &node.name), zones)
    }

    /// Returns the rule by the states of the two kinds of hints of the ready endpoints.
    ///
    /// Hints count only if each ready endpoint has one and one of them names this node or its zone. Otherwise some
    /// clients would have no endpoint, or some endpoints no client.
    pub(super) fn of_hint_states(nodes: HintState, zones: impl FnOnce() -> HintState) -> Self {
        if nodes == HintState::Here {
            Self::SameNode
        } else if zones() == HintState::Here {
            Self::SameZone
        } else {
            Self::Ready
        }
    }

    /// Returns true if the rule selects a ready pod with these hints for clients on `node`.
    pub fn selects(self, hints: &TopologyHints, node: &NodeTopology) -> bool {
        match self {
            Self::SameNode => hints.node == node.name,
            Self::SameZone => hints.zone == node.zone,
            Self::Ready | Self::ReadyOnNode | Self::Terminating | Self::TerminatingOnNode => true,
        }
    }
}

/// Returns a hint as a list, which is empty without it.
fn as_names(hint: &SmolStr) -> &[SmolStr] {
    if hint.is_empty() { &[] } else { slice::from_ref(hint) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hints(zone: &str, node: &str) -> TopologyHints {
        TopologyHints { zone: zone.into(), node: node.into() }
    }

    /// Returns the rule, and the places in the list of the pods that it selects.
    fn select(pods: &[TopologyHints], zone: &str) -> (SelectionRule, Vec<usize>) {
        let node = NodeTopology { name: "n1".into(), zone: zone.into() };
        let rule = SelectionRule::of_hints(pods.iter(), &node);
        let all = 0..pods.len();
        (rule, all.filter(|&at| rule.selects(&pods[at], &node)).collect())
    }

    #[test]
    fn clients_use_the_pods_for_their_node_then_for_their_zone() {
        let pods = [hints("a", "n2"), hints("a", "n1"), hints("b", "n3")];
        assert_eq!(select(&pods, "a"), (SelectionRule::SameNode, vec![1]));
        let pods = [hints("a", "n2"), hints("a", ""), hints("b", "n3")];
        assert_eq!(select(&pods, "a"), (SelectionRule::SameZone, vec![0, 1]));
    }

    #[test]
    fn clients_use_all_pods_unless_each_has_a_hint_and_one_is_for_them() {
        let partial = [hints("a", ""), hints("", "")];
        let hinted = [hints("a", ""), hints("b", "")];
        let without = [hints("", ""), hints("", "")];
        for (pods, zone) in [(&partial, "a"), (&hinted, "c"), (&hinted, ""), (&without, "")] {
            assert_eq!(select(pods, zone), (SelectionRule::Ready, vec![0, 1]), "{pods:?} {zone}");
        }
    }
}
