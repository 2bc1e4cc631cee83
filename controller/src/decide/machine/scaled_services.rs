//! Pure: observations of scaled Services, of their workloads, pods and PodAutoscalers.
//!
//! A Service selects its workload by labels, so each observation may change what several Services scale. An observation
//! only names these; each is resolved again before its next plan.

use std::collections::BTreeSet;

use common::wire::NamespacedName;
use serde_json::Value;

use super::{ControllerStateMachine, ObjectEventRecord, ObjectsToStore};
use crate::{
    decide::{
        part_keys,
        plan::{
            is_inactive_reason,
            scaled_service::{REPLICAS_MANAGED, is_release_over, release_deadline_ms},
        },
    },
    model::{
        cluster_state::{
            AppState, ConditionStatus, ConditionType, ParsedTemplate, UnixMillis, WorkloadKey,
            WorkloadKind,
        },
        object::{ResourceKind, WorkloadVersion, names},
    },
    read::observe,
};

mod activator_ports;
mod binding;
mod workload_pods;

/// Consequences of a resolution that must wait until the app is planned.
#[derive(Debug, Default)]
pub(super) struct ResolutionEffects {
    /// UIDs of pods that the app has got. Agents may have reported them before.
    new_pods: Vec<Box<str>>,
    /// Scaled Services that may get or lose their workload.
    rivals: BTreeSet<NamespacedName>,
}

impl ControllerStateMachine {
    /// Returns true if the workloads and pods of users must be watched: a scaled Service exists, or something of one.
    /// Once true, it stays true.
    pub fn needs_workload_watch(&self) -> bool {
        self.needs_workload_watch
    }

    /// Handles the end of the first lists of workloads and pods of users.
    pub(super) fn handle_workload_list(&mut self, now: UnixMillis) {
        self.cluster.workloads.are_listed = true;
        // The end of the initial list is followed by a plan of all apps.
        if self.is_loading {
            return;
        }
        self.reconcile_all_scaled_services(now);
        self.check_abandoned_workloads();
    }

    /// Plans all scaled Services when the first activator becomes ready, or none is ready any more: workloads sleep only
    /// as long as one could wake them.
    pub(super) fn follow_ready_activators(&mut self, now: UnixMillis) {
        let is_any_ready = self.cluster.has_ready_activator();
        let before = std::mem::replace(&mut self.cluster.activators.is_any_ready, is_any_ready);
        // The end of the initial list is followed by a plan of all apps.
        if before != is_any_ready && !self.is_loading {
            self.reconcile_all_scaled_services(now);
        }
    }

    fn reconcile_all_scaled_services(&mut self, now: UnixMillis) {
        let scaled = self.cluster.apps.iter().filter(|(_, app)| app.scaled.is_some());
        for name in scaled.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.reconcile_app(&name, now);
        }
    }

    /// Has the workloads checked that are to be given back to their users.
    pub(super) fn check_abandoned_workloads(&mut self) {
        let abandoned = self.cluster.workloads.abandoned();
        self.effects.changed_keys.extend(abandoned.map(part_keys::workload_key));
    }

    /// Handles a Kubernetes Service, which may be a scaled Service; `None`: it was deleted.
    pub(super) fn observe_user_service(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let observed = object.and_then(observe::read_user_service);
        let wants_sleep = observed.as_ref().is_some_and(|it| it.wants_sleep);
        // Most Services of a cluster are none, and must cost nothing.
        if !wants_sleep && !self.is_scaled_service(name) {
            return;
        }
        self.needs_workload_watch = true;
        let selector = observed.as_ref().map(|it| &it.selector);
        self.cluster.workloads.set_selector(name, selector);
        self.change_app(name.clone(), now, |app, _| {
            app.scaled.get_or_insert_default().service = observed;
        });
    }

    /// Handles a PodAutoscaler, which may be that of a scaled Service; `None`: it was deleted.
    pub(super) fn observe_scaled_autoscaler(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let object = object.filter(|it| observe::is_scaled_autoscaler(it));
        if object.is_none() && !self.is_scaled_service(name) {
            return;
        }
        self.needs_workload_watch = true;
        self.change_app(name.clone(), now, |app, cluster| {
            let is_first = app.scaled.as_ref().is_none_or(|it| it.autoscaler.is_none());
            // After a restart of the controller, the conditions go on as they were, with the times of their last
            // changes.
            if let Some(object) = object.filter(|_| is_first) {
                restore_conditions(app, object);
                if let Some(line) = observe::read_decision_explanation(object) {
                    cluster.scaling.explanations.entry(name.clone()).or_insert(line);
                }
            }
            let scaled = app.scaled.get_or_insert_default();
            scaled.autoscaler = object.map(observe::read_scaled_autoscaler);
        });
    }

    /// Handles a Deployment or StatefulSet of a user; `None`: it was deleted.
    pub(super) fn observe_workload(
        &mut self,
        kind: WorkloadKind,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let workload = WorkloadKey { name: name.clone(), kind };
        let before = self.cluster.workloads.workload(&workload);
        let recorded = before.filter(|it| it.record.is_some()).map(|it| it.version.clone());
        let state = object.map(observe::read_workload);
        let is_recorded = state.as_ref().is_some_and(|it| it.record.is_some());
        let services = self.cluster.workloads.set_workload(&workload, state);
        self.reconcile_scaled_services(services, now);
        match recorded {
            // A record that is gone shows that a client has replaced the whole object.
            Some(version) if !is_recorded => self.check_autoscaler_of(&workload, &version),
            _ if self.cluster.workloads.is_abandoned(&workload) => {
                self.effects.changed_keys.push(part_keys::workload_key(&workload));
            }
            _ => {}
        }
    }

    /// Handles a pod that may belong to a workload of a user; `None`: it does not, or was deleted.
    pub(super) fn observe_workload_pod(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        // Before any scaled Service, these are only the few of the system namespace, whose watch is not begun again.
        let pod = object.and_then(observe::read_workload_pod);
        let services = self.cluster.workloads.set_pod(name, pod);
        self.reconcile_scaled_services(services, now);
    }

    /// Handles a HorizontalPodAutoscaler of a user; `None`: it was deleted.
    pub(super) fn observe_user_autoscaler(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let autoscaler = object.and_then(observe::read_user_autoscaler);
        let services = self.cluster.workloads.set_autoscaler(name, autoscaler);
        self.reconcile_scaled_services(services, now);
    }

    /// Plans the scaled Service to which a slice belongs, if it is of one: its pods end only once there is a slice.
    pub(super) fn check_scaled_slice(&mut self, slice: &NamespacedName, now: UnixMillis) {
        let Some(service) = names::scaled_service_of_slice(&slice.name) else { return };
        let service = NamespacedName::new(slice.namespace.clone(), service);
        let Some(app) = self.cluster.apps.get(&service).filter(|it| it.scaled.is_some()) else {
            return;
        };
        // The app itself has no field for it.
        self.effects.changed_keys.extend(part_keys::scaled_keys(&service, app));
        self.reconcile_app(&service, now);
    }

    /// Plans the app of this name if it is a scaled Service, since a Revision of this name has come or gone.
    pub(super) fn reconcile_namesake(&mut self, revision: &NamespacedName, now: UnixMillis) {
        if self.is_scaled_service(revision) {
            self.reconcile_app(revision, now);
        }
    }

    fn is_scaled_service(&self, name: &NamespacedName) -> bool {
        self.cluster.apps.get(name).is_some_and(|it| it.scaled.is_some())
    }

    fn reconcile_scaled_services(&mut self, services: BTreeSet<NamespacedName>, now: UnixMillis) {
        for service in services {
            self.reconcile_app(&service, now);
        }
    }

    /// Has the PodAutoscalers checked that this workload owns. They are kept until the workload is given back.
    fn check_autoscaler_of(&mut self, workload: &WorkloadKey, version: &WorkloadVersion) {
        let namespace = &workload.name.namespace;
        let from = self.cluster.apps.range(NamespacedName::new(namespace.clone(), "")..);
        let apps = from.take_while(|(name, _)| name.namespace == *namespace);
        let owned = apps.filter(|(_, app)| {
            let autoscaler = app.scaled.as_ref().and_then(|it| it.autoscaler.as_ref());
            autoscaler.is_some_and(|it| it.owner_uid.as_ref() == Some(&version.uid))
        });
        let keys = owned.flat_map(|(name, app)| part_keys::scaled_keys(name, app));
        self.effects.changed_keys.extend(keys);
    }

    /// Finds the workload of a scaled Service as all objects are now, and lets its app follow. Before all workloads are
    /// listed, nothing is known about them.
    pub(super) fn resolve_scaled_service(
        &mut self,
        name: &NamespacedName,
        now: UnixMillis,
    ) -> ResolutionEffects {
        if !self.cluster.workloads.are_listed {
            return ResolutionEffects::default();
        }
        // Removed while it changes, because the functions below read the cluster state.
        let Some(mut app) = self.cluster.apps.remove(name) else {
            return ResolutionEffects::default();
        };
        let before = held_workload(&app);
        binding::update_binding(&mut app, name, &self.cluster, now);
        let after = held_workload(&app);
        let new_pods = self.update_scaled_revision(name, &mut app, now);
        self.cluster.apps.insert(name.clone(), app);
        let rivals = self.update_holder(name, before, after);
        ResolutionEffects { new_pods, rivals }
    }

    /// Records the workload that the Service scales. Returns the Services to which the change matters.
    fn update_holder(
        &mut self,
        name: &NamespacedName,
        before: Option<WorkloadKey>,
        after: Option<WorkloadKey>,
    ) -> BTreeSet<NamespacedName> {
        let workloads = &mut self.cluster.workloads;
        let holder = after.as_ref().and_then(|it| workloads.holder(it).cloned());
        if before == after && (after.is_none() || holder.as_ref() == Some(name)) {
            return BTreeSet::new();
        }
        let mut rivals: BTreeSet<NamespacedName> = holder.into_iter().collect();
        workloads.set_held(name, after.as_ref());
        for workload in before.iter().chain(&after) {
            rivals.extend(workloads.services_of(workload));
            if workloads.is_abandoned(workload) {
                self.effects.changed_keys.push(part_keys::workload_key(workload));
            }
        }
        // The caller plans this Service itself.
        rivals.remove(name);
        rivals
    }

    /// Does what has waited for the plan that followed a resolution. `before` is the app as it was before both.
    pub(super) fn finish_resolution(
        &mut self,
        name: &NamespacedName,
        before: &AppState,
        resolved: ResolutionEffects,
        now: UnixMillis,
    ) {
        self.record_refusal(name, before);
        if !self.is_scaled_service(name) {
            self.cluster.workloads.set_selector(name, None);
        }
        for uid in resolved.new_pods {
            self.apply_unplaced_reports(&uid, now);
        }
        self.reconcile_scaled_services(resolved.rivals, now);
        // A pod may have become ready by the plan itself.
        if self.is_release_due(name, now) {
            self.plan_and_apply(name, None, ObjectsToStore::Changed, now);
        }
    }

    fn is_release_due(&self, name: &NamespacedName, now: UnixMillis) -> bool {
        let Some(app) = self.cluster.apps.get(name) else { return false };
        let Some((scaled, _, revision)) = app.scaled_revision() else { return false };
        if scaled.released_at.is_none() {
            return false;
        }
        let template = ParsedTemplate::of_revision(revision, &self.cluster);
        is_release_over(scaled, Some(revision), release_deadline_ms(&template), now)
    }

    /// Records an Event on the Service if it is refused for a new reason, or if its workload sleeps no more.
    fn record_refusal(&mut self, name: &NamespacedName, before: &AppState) {
        let Some(app) = self.cluster.apps.get(name).filter(|_| self.cluster.is_leader) else {
            return;
        };
        let reason = |app: &AppState| match app.conditions.get(ConditionType::ScaledServiceReady) {
            ConditionStatus::False(reason) => Some(reason),
            ConditionStatus::True(_) | ConditionStatus::Unknown(_) => None,
        };
        // Kubernetes records Events on pods that fail.
        let scaled = app.scaled.as_ref();
        let scaled = scaled.filter(|it| it.refusal.is_some() || it.foreign_writes.is_managed);
        let service = scaled.and_then(|it| it.wanted_service());
        let (Some(present), Some(service)) = (reason(app), service) else { return };
        // The message may name other pods each time.
        if reason(before).is_some_and(|it| it.reason == present.reason) {
            return;
        }
        self.effects.object_events.push(ObjectEventRecord {
            resource: ResourceKind::Service,
            name: name.clone(),
            uid: service.meta.uid.to_string(),
            is_warning: true,
            reason: present.reason.into(),
            message: present.message.into(),
        });
    }
}

/// Returns the workload that the Service of an app scales.
fn held_workload(app: &AppState) -> Option<WorkloadKey> {
    Some(app.scaled.as_ref()?.scaled_workload()?.key.clone())
}

/// Restores the conditions that an earlier leader wrote into the status of the PodAutoscaler.
fn restore_conditions(app: &mut AppState, autoscaler: &Value) {
    let (of_app, of_revision) = observe::read_autoscaler_conditions(autoscaler);
    let scaled = app.scaled.get_or_insert_default();
    if scaled.binding.is_none() {
        scaled.restored_conditions = of_revision;
    }
    for (kind, at, status) in of_app.iter() {
        // That of a running replica is newer.
        if app.conditions.is_set(kind) {
            continue;
        }
        let is_managed =
            matches!(&status, ConditionStatus::False(it) if it.reason == REPLICAS_MANAGED);
        scaled.foreign_writes.is_managed |= is_managed;
        app.conditions.set(kind, of_service(status), at);
    }
}

/// Returns the part of the status `Ready` that the Service decides. A workload without load is not ready for Knative.
fn of_service(ready: ConditionStatus) -> ConditionStatus {
    match ready {
        ConditionStatus::False(reason) if !is_inactive_reason(&reason) => {
            ConditionStatus::False(reason)
        }
        ConditionStatus::False(_) | ConditionStatus::Unknown(_) | ConditionStatus::True(_) => {
            ConditionStatus::True(None)
        }
    }
}
