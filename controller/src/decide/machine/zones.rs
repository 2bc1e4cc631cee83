//! Pure: zones of nodes in the RouteTable, and the services whose hints depend on the CPU of the zones.

use std::collections::BTreeMap;

use common::wire::{NamespacedName, NodeEntry, RouteChange, RouteKey};

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::{part_keys, topology_hints},
    model::{
        cluster_state::{AppState, HintMode, HintedPod, RevisionTopology, UnixMillis},
        object::{ObjectPart, ObjectPartKey, ResourceKind},
        zone_shares::ZoneShares,
    },
};

impl ControllerStateMachine {
    /// Sets the zone of a node, in the RouteTable too. Returns true if it has changed.
    pub(super) fn set_node_zone(&mut self, node: &str, zone: Option<String>) -> bool {
        let zones = &mut self.cluster.nodes.zones;
        let before = match &zone {
            Some(zone) => zones.insert(node.to_owned(), zone.clone()),
            None => zones.remove(node),
        };
        if before == zone {
            return false;
        }
        let key = RouteKey::Node(node.to_owned());
        match self.node_entry(node) {
            Some(entry) => {
                self.routes.set(key, RouteFingerprint::of_change(&RouteChange::Node(entry)));
            }
            None => self.routes.remove(&key),
        }
        true
    }

    /// Returns a node as the RouteTable has it; `None` without a zone.
    pub(super) fn node_entry(&self, node: &str) -> Option<NodeEntry> {
        let zone = self.cluster.nodes.zones.get(node)?;
        Some(NodeEntry { name: node.to_owned(), zone: zone.as_str().into() })
    }

    /// Restores the hints of a Revision's pods from a slice of its own Service: there is one for each IP family, and a
    /// pod may be in one of them only. The first plan keeps them if they are in proportion and still fit. So a replica
    /// that starts gives the hints that the leader gives.
    pub(super) fn restore_hints(&mut self, slice: &NamespacedName, pods: Vec<HintedPod>) {
        if pods.is_empty() {
            return;
        }
        let (kind, name) = (ResourceKind::EndpointSlice, slice.clone());
        let key = ObjectPartKey::new(kind, ObjectPart::Object, name);
        let owner = part_keys::owner_revision_of(&self.cluster, &key);
        let Some((app, revision)) = owner else { return };
        let app = self.cluster.apps.get_mut(&app);
        let mut revisions = app.into_iter().flat_map(|it| &mut it.revisions);
        if let Some(revision) = revisions.find(|it| it.name == revision) {
            // Plans keep hints of this mode only: those of the others follow from the pods alone.
            let mode = HintMode::Proportional;
            let before = revision.topology.take().into_iter().flat_map(|it| it.pods);
            let all = before.chain(pods).map(|pod| (pod.name.clone(), pod));
            let pods = all.collect::<BTreeMap<_, _>>().into_values().collect();
            revision.topology = Some(Box::new(RevisionTopology { mode, pods, refusal: None }));
        }
    }

    /// Updates the shares of the zones. Returns true if they have changed.
    pub(super) fn update_zone_shares(&mut self) -> bool {
        // The initial lists have thousands of nodes, and are followed by a plan of each app.
        if self.is_loading {
            return false;
        }
        let shares = self.cluster.nodes.current_zone_shares();
        let before = std::mem::replace(&mut self.cluster.nodes.zone_shares, shares);
        before != self.cluster.nodes.zone_shares
    }

    /// Plans each app whose hints do not fit the shares of the zones any more. Has the slices of all apps checked whose
    /// hints are in proportion.
    pub(super) fn plan_proportional_apps(&mut self, now: UnixMillis) {
        let shares = &self.cluster.nodes.zone_shares;
        let proportional = self.cluster.apps.iter().filter(|(_, app)| is_proportional(app));
        // A cluster that grows has hundreds of such changes, and nearly all of them change no hint of a pod.
        let proportional: Vec<(NamespacedName, bool)> =
            proportional.map(|(name, app)| (name.clone(), needs_new_hints(app, shares))).collect();
        for (name, needs_plan) in proportional {
            if needs_plan {
                self.reconcile_app(&name, now);
            }
            // The slices of the names of Routes and of scaled Services list activators, which have hints too.
            if let Some(app) = self.cluster.apps.get(&name) {
                self.effects.changed_keys.extend(part_keys::slice_keys(&name, app));
                self.effects.changed_keys.extend(part_keys::scaled_keys(&name, app));
            }
        }
    }
}

/// Returns true if the shares of the zones may change the hints of the app's pods: there are none, or they do not fit.
fn needs_new_hints(app: &AppState, shares: &ZoneShares) -> bool {
    let topologies = app.revisions.iter().filter_map(|it| it.topology.as_deref());
    topologies.filter(|it| it.mode == HintMode::Proportional).any(|it| {
        let zones = it.pods.iter().map(|pod| &pod.hints.zone);
        it.refusal.is_some() || !topology_hints::still_fit(zones, shares)
    })
}

/// Returns true if hints of the app's pods or activators are in proportion to the CPU of the zones.
fn is_proportional(app: &AppState) -> bool {
    let of_pods = |mode: HintMode| {
        app.revisions.iter().any(|it| it.topology.as_ref().is_some_and(|it| it.mode == mode))
    };
    let mode = HintMode::Proportional;
    app.route_hint_mode() == mode || of_pods(mode)
}
