//! Pure: selection of a Revision's pods by their standby orders and their hints, for connects from this node.

use std::{collections::BTreeSet, net::SocketAddr};

use common::service_routing::{NodeTopology, SelectionRule, TopologyHints};
use smol_str::SmolStr;

use super::{PlannerPod, PlannerService, PlannerTable};

/// Ready pods that connects of one family can go to from this node, and the rule by which hints select among them.
pub(super) struct HintedPods<'a> {
    /// Pods by uid, each with its address for these connects.
    pods: Vec<(&'a String, &'a PlannerPod, SocketAddr)>,
    pub(super) rule: SelectionRule,
    /// True if pods with a standby order are left out, because pods without one can take the connects.
    prefers_running: bool,
    node: NodeTopology,
}

impl<'a> HintedPods<'a> {
    /// Iterates over the selected pods.
    pub(super) fn selected(&self) -> impl Iterator<Item = (&'a String, SocketAddr)> {
        let selected = self.pods.iter().filter(|(_, pod, _)| self.is_selected(pod));
        selected.map(|(uid, _, at)| (*uid, *at))
    }

    fn is_selected(&self, pod: &PlannerPod) -> bool {
        self.rule.selects(&pod.hints, &self.node)
    }

    /// Returns true if the selected pods have standby orders.
    pub(super) fn are_on_standby(&self) -> bool {
        !self.prefers_running && !self.pods.is_empty()
    }

    /// Returns the reason for which a ready pod is not selected; `None` if it is.
    pub(super) fn exclusion(&self, pod: &PlannerPod) -> Option<&'static str> {
        if self.prefers_running && pod.has_standby_order {
            return Some("is on standby, and other pods take connects");
        }
        let is_by_node = self.rule == SelectionRule::SameNode;
        let reason = if is_by_node {
            "its hints are for other nodes"
        } else {
            "its hints are for other zones"
        };
        (!self.is_selected(pod)).then_some(reason)
    }
}

impl PlannerTable {
    /// Returns the pods that connects to a service can go to; `None` without a direct path. Pods with a standby order
    /// are used only if there are no others, so that they stay frozen. Hints count as for Services of the cluster.
    pub(super) fn hinted_pods(
        &self,
        service: &PlannerService,
        is_ipv6: bool,
        mapped: bool,
    ) -> Option<HintedPods<'_>> {
        let ready = self.ready_pods(service.direct_revision?);
        let mut pods: Vec<_> = ready
            .filter_map(|(uid, pod)| Some((uid, pod, pod.address_for(service, is_ipv6, mapped)?)))
            .collect();
        let prefers_running = pods.iter().any(|(_, pod, _)| !pod.has_standby_order);
        if prefers_running {
            pods.retain(|(_, pod, _)| !pod.has_standby_order);
        }
        let node =
            NodeTopology { name: self.cluster.node_name().clone(), zone: self.node_zone.clone() };
        // By the hints of the pods that are left, or no pod might be selected.
        let rule = SelectionRule::of_hints(pods.iter().map(|(_, pod, _)| &pod.hints), &node);
        Some(HintedPods { pods, rule, prefers_running, node })
    }

    /// Sets the zone of a node; empty: it has none. Returns the numbers of the services whose lists depend on it.
    pub(in crate::routes::plan) fn set_node_zone(&mut self, node: &str, zone: SmolStr) -> Vec<u32> {
        if node != self.cluster.node_name().as_str() || zone == self.node_zone {
            return Vec::new();
        }
        self.node_zone = zone;
        let hinted = self.pods.values().filter(|pod| pod.hints != TopologyHints::default());
        let revisions: BTreeSet<u32> = hinted.map(|pod| pod.revision).collect();
        let services = revisions.into_iter().map(|it| self.revisions.get(it).services.clone());
        services.flatten().collect()
    }
}
