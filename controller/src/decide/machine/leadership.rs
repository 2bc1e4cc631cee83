//! Pure: gain and loss of the leadership.

use common::wire::{NamespacedName, ServerComponent};
use tracing::info;

use super::{ControllerStateMachine, allocate, pods};
use crate::{
    decide::part_keys,
    model::cluster_state::{AppRevision, UnixMillis},
};

impl ControllerStateMachine {
    /// Lets all pods follow their annotations, after this replica lost the leadership.
    ///
    /// The last plan may never have been written, and the new leader may plan otherwise. So exactly the pods that are
    /// annotated as draining drain, and those that are annotated have orders, as on every other replica.
    fn adopt_pod_annotations(&mut self, now: UnixMillis) {
        for name in self.cluster.apps.keys().cloned().collect::<Vec<_>>() {
            self.change_app(name, now, |app, _| {
                let revisions = app.revisions.iter_mut().filter(|it| !it.is_deleted);
                let pods = revisions.flat_map(|it| &mut it.pods);
                pods.for_each(|pod| pods::adopt_annotations(pod, now));
            });
        }
    }

    /// Handles the gain or loss of the leadership.
    pub(super) fn handle_leadership(&mut self, is_leader: bool, now: UnixMillis) {
        self.cluster.is_leader = is_leader;
        // The RouteTable names the leader as the controller's active replica.
        let own_pod_name = self.cluster.settings.own_pod_name.clone();
        self.set_active_replica(
            ServerComponent::Controller,
            is_leader.then_some(own_pod_name).filter(|it| !it.is_empty()),
        );
        if !is_leader {
            return self.adopt_pod_annotations(now);
        }
        info!(apps = self.cluster.apps.len(), "became the leader");
        // Only the leader records Events on ConfigMaps. The former leader may have ended before it recorded these.
        self.effects
            .config_map_events
            .extend(std::mem::take(&mut self.unrecorded_events).into_values().flatten());
        let names: Vec<NamespacedName> = self.cluster.apps.keys().cloned().collect();
        for name in names {
            let app_name = name.clone();
            let planned = self.change_app(name.clone(), now, |app, cluster| {
                // Only the leader allocates, so some names may have waited for it.
                allocate::allocate(app, &app_name, cluster);
                app.revisions.iter_mut().for_each(keep_running_scale);
            });
            if !planned {
                self.reconcile_app(&name, now);
            }
            // Another leader may have left anything unwritten, so every object is checked.
            if let Some(app) = self.cluster.apps.get(&name) {
                let keys = part_keys::app_keys(&name, app, &self.cluster);
                self.effects.changed_keys.extend(keys);
                self.effects.apps_to_check.push(name);
            }
        }
        self.reconcile_all_mappings(now);
        self.check_requests();
        self.check_gateway_statuses();
        self.check_abandoned_workloads();
    }
}

/// Requests as many pods as serve and stand by now, until the autoscaler decides.
pub(super) fn keep_running_scale(revision: &mut AppRevision) {
    revision.scaling.requested_scale = revision.serving_pods();
    revision.scaling.standby_scale = revision.ordered_pods();
}
