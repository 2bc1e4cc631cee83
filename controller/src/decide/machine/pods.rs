//! Pure: pods of Revisions, and nodes, as the API server holds them.

use std::collections::BTreeMap;

use common::{local_node::PodRunPhase, wire::NamespacedName};
use serde_json::Value;

use super::ControllerStateMachine;
use crate::{
    decide::part_keys,
    model::cluster_state::{
        AppState, KubePodStatus, KubeletReadiness, NodeState, PodStage, RevisionPod, UnixMillis,
    },
    read::observe,
};

impl ControllerStateMachine {
    /// Handles a pod; `None`: it was deleted. It belongs to a component, to a Revision, or to a user's workload.
    pub(super) fn observe_pod(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        if self.observe_component_pod(name, object, now)
            || object.is_some_and(|it| !self.admit_pod_version(it))
        {
            return;
        }
        // A kubelet that rejected the pod would reject the next one too, so the node is avoided for a while. A pod of a
        // user's workload may have asked for more than those of Revisions do.
        let of_revision = object.filter(|it| observe::revision_name_of(it).is_some());
        if let Some(rejection) = of_revision.and_then(observe::read_rejection) {
            let at = rejection.at.map_or(now, |at| at.min(now));
            self.cluster.nodes.record_rejection(rejection.node, at, now);
        }
        match object.and_then(|pod_object| {
            let owner = observe::owning_app(pod_object)?;
            Some((
                owner,
                observe::revision_name_of(pod_object)?.to_owned(),
                observe::read_pod(pod_object)?,
            ))
        }) {
            Some((owner, revision, (pod, status))) => {
                self.observe_workload_pod(name, None, now);
                self.pod_index.apps.insert(pod.uid.to_string(), owner.clone());
                self.pod_index.uids.insert(name.clone(), pod.uid.clone());
                let is_same_status = self.cluster.pods.statuses.get(&*pod.uid) == Some(&status);
                self.cluster.pods.statuses.insert(pod.uid.to_string(), status);
                let revision_state =
                    self.cluster.apps.get(&owner).and_then(|app| app.revision(&revision));
                if revision_state.is_none() {
                    // Each kind has a watch of its own: the Revision will be observed soon.
                    let revision_name = NamespacedName::new(name.namespace.clone(), revision);
                    self.pod_index
                        .without_revision
                        .entry(revision_name)
                        .or_default()
                        .insert(name.clone(), pod);
                    return;
                }
                let uid = pod.uid.clone();
                let planned = self.change_app(owner.clone(), now, |app, cluster| {
                    store_pod(app, &revision, pod, cluster.is_leader, now);
                });
                if !planned && !is_same_status {
                    self.reconcile_app(&owner, now);
                }
                self.apply_unplaced_reports(&uid, now);
            }
            None => {
                self.remove_pod(name, now);
                self.observe_workload_pod(name, object, now);
            }
        }
    }

    fn remove_pod(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(uid) = self.pod_index.uids.remove(name) else { return };
        self.pod_index.without_revision.retain(|_, pods| {
            pods.remove(name);
            !pods.is_empty()
        });
        let Some(owner) = self.pod_index.apps.get(&*uid).cloned() else { return };
        // The plan must see the pod as ended before its status is dropped.
        if let Some(status) = self.cluster.pods.statuses.get_mut(&*uid) {
            status.phase = PodRunPhase::Removed;
        }
        self.change_app(owner, now, |app, _| {
            for revision in &mut app.revisions {
                revision.pods.retain(|pod| pod.uid != uid);
            }
        });
        self.forget_ended_pod(&uid);
        self.pod_index.apps.remove(&*uid);
        self.forget_deleted_nodes();
    }

    /// Handles a node. While a node is lost, all of its pods count as not ready, before each is reported as such.
    pub(super) fn observe_node(&mut self, name: &str, object: Option<&Value>, now: UnixMillis) {
        let is_zone_changed = self.set_node_zone(name, object.and_then(observe::node_zone));
        let was_lost = self.cluster.is_node_lost(name);
        let node = match object {
            Some(object) => Some(NodeState::from_object(object)),
            // The deletion of a lost node does not make its pods ready again, so the node stays known as lost.
            None if was_lost && self.has_pods_on_node(name) => Some(NodeState::default()),
            None => None,
        };
        if object.is_none() && node.is_some() {
            self.cluster.nodes.deleted.insert(name.to_owned());
        } else {
            self.cluster.nodes.deleted.remove(name);
        }
        if object.is_none() {
            self.cluster.pods.silent_agents.remove(name);
        }
        let share_inputs = |node: &NodeState| node.zone_node("");
        let inputs = node.as_ref().map(share_inputs);
        let previous = self.cluster.nodes.states.get(name).map(share_inputs);
        let are_inputs_changed = is_zone_changed || previous != inputs;
        match node {
            Some(node) => drop(self.cluster.nodes.states.insert(name.to_owned(), node)),
            None => drop(self.cluster.nodes.states.remove(name)),
        }
        self.update_activator_reports();
        // The plans below depend on the shares, and keep the hints that they once gave for as long as these fit.
        let are_shares_changed = are_inputs_changed && self.update_zone_shares();
        self.handle_node_change(name, was_lost, now);
        if is_zone_changed {
            self.handle_zone_change(name, now);
        }
        if are_shares_changed {
            self.plan_proportional_apps(now);
        }
    }

    /// Updates the routes and slices of pods and activators on a node whose zone has changed, or is known only now: a
    /// pod may be observed before its node, and a node without its zone.
    fn handle_zone_change(&mut self, node: &str, now: UnixMillis) {
        self.update_activator_zones(node);
        // After the initial list all apps are planned.
        let apps = if self.is_loading { Vec::new() } else { self.apps_on_node(node) };
        for name in apps {
            self.reconcile_app(&name, now);
            if let Some(app) = self.cluster.apps.get(&name) {
                self.effects.changed_keys.extend(part_keys::app_path_keys(&name, app));
            }
        }
    }

    /// Plans the apps on a node if it became or is no longer lost; `was_lost` is the former state.
    pub(super) fn handle_node_change(&mut self, name: &str, was_lost: bool, now: UnixMillis) {
        if self.cluster.is_node_lost(name) == was_lost {
            return;
        }
        for app in self.apps_on_node(name) {
            self.reconcile_app(&app, now);
        }
        self.update_node_activators(name);
        self.follow_ready_activators(now);
    }

    /// Returns the apps that have pods on a node.
    fn apps_on_node(&self, node: &str) -> Vec<NamespacedName> {
        let apps = self.cluster.apps.iter();
        let affected = apps.filter(|(_, app)| app.pods().any(|(_, pod)| is_on_node(pod, node)));
        affected.map(|(name, _)| name.clone()).collect()
    }

    /// Returns true if a pod of a Revision or an activator is on a node.
    fn has_pods_on_node(&self, node: &str) -> bool {
        let mut activators = self.cluster.activators.pods.values();
        let mut apps = self.cluster.apps.values();
        let mut early_pods = self.pod_index.without_revision.values().flat_map(BTreeMap::values);
        activators.any(|(activator, _)| activator.node == node)
            || apps.any(|app| app.pods().any(|(_, pod)| is_on_node(pod, node)))
            || early_pods.any(|pod| is_on_node(pod, node))
    }

    /// Forgets the deleted nodes of which no pod is left. No plan depends on them any more.
    pub(super) fn forget_deleted_nodes(&mut self) {
        // Nearly always there is none, and then no pod is searched.
        let deleted = self.cluster.nodes.deleted.iter();
        let empty: Vec<String> =
            deleted.filter(|node| !self.has_pods_on_node(node)).cloned().collect();
        for node in &empty {
            self.cluster.nodes.deleted.remove(node);
            self.cluster.nodes.states.remove(node);
        }
        if !empty.is_empty() {
            self.update_activator_reports();
        }
    }
}

/// Returns true if Kubernetes has bound the pod to this node.
pub(super) fn is_on_node(pod: &RevisionPod, node: &str) -> bool {
    pod.kube_status.as_ref().is_some_and(|it| *it.node == *node)
}

/// Lets a pod finish its requests. Kubernetes ends it now or soon, so it never serves again.
pub(super) fn drain_pod(pod: &mut RevisionPod, now: UnixMillis) {
    if let Some(status) = &mut pod.kube_status {
        status.is_terminating = true;
    }
    if pod.stage == PodStage::Serving {
        pod.stage = PodStage::Draining { since: now };
    }
}

/// Stores a pod in its Revision. For a known pod, only the fields that Kubernetes sets are replaced.
///
/// The leader decides which pods drain and annotates them; other replicas follow the annotation.
pub(super) fn store_pod(
    app: &mut AppState,
    revision: &str,
    mut pod: RevisionPod,
    is_leader: bool,
    now: UnixMillis,
) {
    let Some(revision) = app.revisions.iter_mut().find(|it| *it.name == *revision) else { return };
    let is_revision_deleted = revision.is_deleted;
    // Kubernetes ends these pods whatever the annotation says.
    let must_drain = pod.is_terminating() || is_revision_deleted;
    match revision.pods.iter_mut().find(|it| it.uid == pod.uid) {
        Some(known_pod) => {
            let follows_annotation = !is_leader && !is_revision_deleted;
            update_pod(known_pod, pod.kube_status, must_drain, follows_annotation, now);
        }
        None => {
            prepare_pod(&mut pod, must_drain, now);
            revision.pods.push(pod);
        }
    }
}

/// Replaces the fields of a known pod that Kubernetes sets. `follows_annotation`: another replica decides if it drains.
pub(super) fn update_pod(
    known_pod: &mut RevisionPod,
    mut observed: Option<Box<KubePodStatus>>,
    must_drain: bool,
    follows_annotation: bool,
    now: UnixMillis,
) {
    let was = known_pod.kube_status.as_ref().map(|it| it.kubelet_readiness);
    // A pod that was ready once and is not ready now has lost its readiness; it is not a new pod.
    if let (Some(status), Some(KubeletReadiness::Ready | KubeletReadiness::NoLongerReady)) =
        (&mut observed, was)
        && status.kubelet_readiness == KubeletReadiness::NotYetReady
    {
        status.kubelet_readiness = KubeletReadiness::NoLongerReady;
    }
    known_pod.kube_status = observed;
    if must_drain && known_pod.stage == PodStage::Serving {
        known_pod.stage = PodStage::Draining { since: now };
    } else if follows_annotation {
        adopt_annotations(known_pod, now);
    }
}

/// Sets the stage of a pod that is new to the controller: another leader may have let it drain.
pub(super) fn prepare_pod(pod: &mut RevisionPod, must_drain: bool, now: UnixMillis) {
    adopt_annotations(pod, now);
    if must_drain && pod.stage == PodStage::Serving {
        pod.stage = PodStage::Draining { since: now };
    }
}

/// Lets a pod drain if it is annotated as draining, and serve otherwise; and gives it the annotated standby order.
///
/// Draining begins now, not at the annotated time. The annotating clock may be ahead, which would prolong the draining,
/// or behind, which would leave no time for the last requests. The longest time on standby is far longer than clocks
/// differ, so there the annotated time counts, unless it is ahead.
pub(super) fn adopt_annotations(pod: &mut RevisionPod, now: UnixMillis) {
    let Some(status) = &pod.kube_status else { return };
    match (pod.stage, status.draining_since) {
        (PodStage::Serving, Some(_)) => pod.stage = PodStage::Draining { since: now },
        (PodStage::Draining { .. } | PodStage::Stopping { .. }, None) if !status.is_terminating => {
            pod.stage = PodStage::Serving;
        }
        (PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. }, _) => {}
    }
    let earlier = pod.standby_since;
    pod.standby_since = status.standby_since.map(|noted| match noted <= now {
        true => noted,
        false => earlier.unwrap_or(now),
    });
}
