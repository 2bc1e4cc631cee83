//! Pure: map operations of a plan, in the order in which they are safe.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use common::wire::NamespacedName;

use super::{MapCapacityError, OutrankedService};
use crate::kernel::map_op::MapOp;

/// Result of planning: the map operations that put the table in force, and their effects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapPlan {
    /// Map operations, in the order in which they are safe.
    pub ops: Vec<MapOp>,
    /// Pods that new connections go directly to from now on.
    pub added_pods: BTreeSet<SocketAddr>,
    /// Pods that new connections no longer go to.
    pub removed_pods: BTreeSet<SocketAddr>,
    /// Services of the RouteTable that do not fit, each with the reason. Until they fit, their connects go to the
    /// activators, or pass unchanged at new addresses that have no frontend.
    pub refused: BTreeMap<NamespacedName, MapCapacityError>,
    /// Services of the cluster that do not fit, and were not refused before. Until they fit, their connects pass
    /// unchanged.
    pub newly_refused: Vec<(NamespacedName, MapCapacityError)>,
    /// Services of the cluster that do not get an address, or lose it, to a service of the RouteTable since this plan.
    pub newly_outranked: Vec<OutrankedService>,
    /// True if lists of the previous table are still in force, which this plan leaves to a later one.
    pub is_partial: bool,
}

/// Map operations of a plan by kind, in the order in which they are safe.
#[derive(Debug, Default)]
pub(super) struct OrderedMapOps {
    pub(super) backends: Vec<MapOp>,
    pub(super) list_entries: Vec<MapOp>,
    pub(super) infos: Vec<MapOp>,
    pub(super) states: Vec<MapOp>,
    pub(super) frontends: Vec<MapOp>,
    pub(super) removals: Vec<MapOp>,
    pub(super) added_pods: BTreeSet<SocketAddr>,
    pub(super) removed_pods: BTreeSet<SocketAddr>,
}

impl OrderedMapOps {
    /// Puts the operations into a plan.
    pub(super) fn finish(self, plan: &mut MapPlan) {
        let groups = [
            self.backends,
            self.list_entries,
            self.infos,
            self.states,
            self.frontends,
            self.removals,
        ];
        // A pod in both sets has not left: its backend changed, as when it was registered on this node.
        plan.removed_pods = self.removed_pods.difference(&self.added_pods).copied().collect();
        plan.ops = groups.into_iter().flatten().collect();
        plan.added_pods = self.added_pods;
    }
}
