//! Pure: Revisions, pods and activators of the RouteTable, and their changes.

use std::{collections::BTreeSet, time::Duration};

use common::wire::{NamespacedName, RouteKey, RouteTable, RoutingPhase};

use super::{DecisionUpdate, ScaledRevisions};
use crate::{
    revision::{LoadKnowledge, PodPhaseCounts, ScaledRevision},
    usage::RevisionLoad,
};

/// Pod of the RouteTable.
#[derive(Debug)]
pub(super) struct AutoscalerPod {
    pub(super) revision: NamespacedName,
    pub(super) node: String,
    pub(super) phase: RoutingPhase,
    has_address: bool,
    /// True if activators may send it requests as soon as its agent reports it as ready.
    awaits_report: bool,
    /// True if the pod is frozen while nothing uses it.
    has_standby_order: bool,
}

impl ScaledRevisions {
    /// Applies the changes of one RouteTable batch. Returns a [`DecisionUpdate::Withdrawn`] for each removed Revision.
    pub fn apply_routes(
        &mut self,
        now: Duration,
        table: &RouteTable,
        changed: &BTreeSet<RouteKey>,
    ) -> Vec<DecisionUpdate> {
        let mut updates = Vec::new();
        self.mark_gaps_before_changes(now, table, changed);
        // Pods refer to Revisions, so Revisions come first, whatever the order of keys.
        for key in changed {
            if let RouteKey::Revision(name) = key {
                updates.extend(self.update_revision(now, table, name));
            }
        }
        for key in changed {
            match key {
                RouteKey::Pod(uid) => self.update_pod(now, table, uid),
                RouteKey::Activator(name) if table.activators.contains_key(name) => {
                    self.activators.insert(name.clone());
                }
                RouteKey::Activator(name) => drop(self.activators.remove(name)),
                RouteKey::Service(_)
                | RouteKey::Revision(_)
                | RouteKey::Node(_)
                | RouteKey::Replicas(_)
                | RouteKey::Settings
                | RouteKey::GatewayHost(_)
                | RouteKey::ReservedHost(_)
                | RouteKey::Certificate(_)
                | RouteKey::ClientCa(_) => {}
            }
        }
        updates
    }

    /// Marks load that is unknown at this moment and whose pods or activators change. Once they have gone, the next
    /// tick would take their load for known.
    fn mark_gaps_before_changes(
        &mut self,
        now: Duration,
        table: &RouteTable,
        changed: &BTreeSet<RouteKey>,
    ) {
        let queue_knowledge = self.wait_queue_knowledge(now);
        let (mut names, mut activator_leaves) = (BTreeSet::new(), false);
        for key in changed {
            match key {
                // The pods here are those before the change, so one that goes is among them.
                RouteKey::Pod(uid) => names.extend(self.pods.get(uid).map(|pod| &pod.revision)),
                RouteKey::Activator(name) => {
                    // Requests cannot have waited yet at an activator that comes.
                    activator_leaves |= !table.activators.contains_key(name);
                }
                _ => {}
            }
        }
        let unknown = |name: &&NamespacedName| {
            self.load_knowledge(now, name, queue_knowledge) != LoadKnowledge::Complete
        };
        let unknown: Vec<NamespacedName> = names.into_iter().filter(unknown).cloned().collect();
        self.mark_gaps(unknown);
        if activator_leaves && queue_knowledge != LoadKnowledge::Complete {
            self.for_each_load(RevisionLoad::mark_gap);
        }
    }

    /// Keys of all subjects of the RouteTable that are stored here.
    pub fn stored_keys(&self) -> BTreeSet<RouteKey> {
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.iter().cloned().map(RouteKey::Activator);
        revisions.chain(pods).chain(activators).collect()
    }

    /// Follows a Revision of the RouteTable. Returns the withdrawal of its decision if it is gone.
    fn update_revision(
        &mut self,
        now: Duration,
        table: &RouteTable,
        name: &NamespacedName,
    ) -> Option<DecisionUpdate> {
        let entry =
            table.revisions.get(name).and_then(|entry| Some((entry, entry.policy.clone()?)));
        let entry = entry.map(|(entry, policy)| (entry, self.policies.intern(policy)));
        let Some((entry, policy)) = entry else {
            self.unschedule(name);
            let removed = self.revisions.remove(name)?;
            // The Revision may return, and its senders will not repeat what they have already reported.
            self.store_unlisted_load(name, removed.load);
            return Some(DecisionUpdate::Withdrawn(name.clone()));
        };
        match self.revisions.get_mut(name) {
            Some(revision) => {
                let (reachable, reached) = (entry.reachable, entry.initial_scale_reached);
                if revision.policy != policy {
                    revision.set_policy(now, policy);
                } else if (revision.is_reachable, revision.initial_scale_reached)
                    == (reachable, reached)
                {
                    return None;
                }
                (revision.is_reachable, revision.initial_scale_reached) = (reachable, reached);
            }
            None => {
                let mut revision = ScaledRevision::new(entry, policy);
                revision.pods = self.count_pods(name);
                revision.load = self.unlisted_loads.remove(name).unwrap_or_default();
                self.revisions.insert(name.clone(), Box::new(revision));
            }
        }
        self.schedule(name, now);
        None
    }

    /// Stores the load of a Revision that is not in the RouteTable, unless it is empty.
    fn store_unlisted_load(&mut self, name: &NamespacedName, mut load: RevisionLoad) {
        load.sleep();
        if !load.is_empty() {
            self.unlisted_loads.insert(name.clone(), load);
        }
    }

    fn count_pods(&self, revision: &NamespacedName) -> PodPhaseCounts {
        let mut counts = PodPhaseCounts::default();
        self.pods_of_revision(revision).for_each(|(_, pod)| *pod.phase_count(&mut counts) += 1);
        counts
    }

    pub(super) fn pods_of_revision(
        &self,
        revision: &NamespacedName,
    ) -> impl Iterator<Item = (&String, &AutoscalerPod)> {
        let uids = self.pods_by_revision.get(revision).into_iter().flatten();
        uids.filter_map(|uid| self.pods.get_key_value(uid))
    }

    fn insert_pod(&mut self, uid: &str, pod: AutoscalerPod) {
        self.pods_by_revision.entry(pod.revision.clone()).or_default().insert(uid.to_owned());
        self.pods.insert(uid.to_owned(), pod);
    }

    fn remove_pod(&mut self, uid: &str) -> Option<AutoscalerPod> {
        let pod = self.pods.remove(uid)?;
        if let Some(uids) = self.pods_by_revision.get_mut(&pod.revision) {
            uids.remove(uid);
            if uids.is_empty() {
                self.pods_by_revision.remove(&pod.revision);
            }
        }
        Some(pod)
    }

    /// Follows a pod of the RouteTable, and schedules the Revisions that it has left and joined.
    fn update_pod(&mut self, now: Duration, table: &RouteTable, uid: &str) {
        let new = table.pods.get(uid).map(|entry| AutoscalerPod {
            revision: entry.revision.clone(),
            node: entry.node.clone(),
            phase: entry.phase,
            has_address: entry.address.is_some(),
            awaits_report: entry.awaits_report,
            has_standby_order: entry.standby.is_some(),
        });
        if let Some(old) = self.remove_pod(uid) {
            if let Some(revision) = self.revisions.get_mut(&old.revision) {
                *old.phase_count(&mut revision.pods) -= 1;
                self.schedule(&old.revision, now);
            }
            if let Some(load) = self.load_mut(&old.revision) {
                // Counted out even if it returns below: its phase or its Revision may differ.
                load.set_pod_counted(now, uid, false);
            }
        }
        if let Some(new) = new {
            // Usage of the pod may have been reported before the pod itself.
            if let Some(load) = self.load_mut(&new.revision) {
                load.set_pod_counted(now, uid, new.is_counted());
            }
            if let Some(revision) = self.revisions.get_mut(&new.revision) {
                *new.phase_count(&mut revision.pods) += 1;
                self.schedule(&new.revision, now);
            }
            self.insert_pod(uid, new);
        }
    }
}

impl AutoscalerPod {
    /// Returns true if requests at the pod are load that needs pods.
    pub(super) fn is_counted(&self) -> bool {
        self.phase != RoutingPhase::Draining
    }

    /// Returns true if the pod may get requests, by this RouteTable or by a report that precedes the next one.
    pub(super) fn may_get_requests(&self) -> bool {
        self.phase == RoutingPhase::Ready || self.awaits_report
    }

    fn phase_count<'a>(&self, counts: &'a mut PodPhaseCounts) -> &'a mut u32 {
        match self.phase {
            RoutingPhase::Starting if self.has_address => &mut counts.starting,
            RoutingPhase::Starting => &mut counts.pending,
            RoutingPhase::Ready if self.has_standby_order => &mut counts.standby,
            RoutingPhase::Ready => &mut counts.ready,
            RoutingPhase::Draining => &mut counts.draining,
        }
    }
}
