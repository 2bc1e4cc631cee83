//! Pure: application of a plan: the cluster state, the RouteTable's outbox, and the effects of the difference.

use std::{collections::BTreeSet, net::IpAddr};

use common::wire::{NamespacedName, RouteChange, RouteKey};
use tracing::info;

use super::{
    ControllerStateMachine, ObjectEventRecord, ObjectsToStore, RouteFingerprint, name_claims,
    reports, write_keys,
};
use crate::{
    decide::plan::{self, AppPlan},
    model::{
        cluster_state::{
            AppRevision, AppState, ConditionReason, ConditionStatus, ConditionType, ParsedTemplate,
            PlatformKind, PodStage, RevisionPod, StandbyStop, UnixMillis,
        },
        object::{LocalObjectKey, ObjectPart, REQUESTS_NOT_RESTORED, ResourceKind},
    },
};

impl ControllerStateMachine {
    /// Plans one app and applies the plan to the cluster state. `previous` is the app before the event changed it.
    pub(super) fn plan_and_apply(
        &mut self,
        name: &NamespacedName,
        previous: Option<&AppState>,
        to_store: ObjectsToStore,
        now: UnixMillis,
    ) {
        if self.is_loading {
            return;
        }
        let Some(current) = self.cluster.apps.get(name).cloned() else { return };
        if current.scaled.is_none() {
            return self.apply_next_plan(name, &current, previous, to_store, now);
        }
        // Before the plan, which needs the workload. Other Services may be concerned, and are planned only after it.
        let resolved = self.resolve_scaled_service(name, now);
        self.apply_next_plan(name, &current, previous, to_store, now);
        self.finish_resolution(name, &current, resolved, now);
    }

    /// Plans one app and applies the plan. `current` is the app as it was before the workload of a scaled Service was
    /// resolved.
    fn apply_next_plan(
        &mut self,
        name: &NamespacedName,
        current: &AppState,
        previous: Option<&AppState>,
        to_store: ObjectsToStore,
        now: UnixMillis,
    ) {
        name_claims::update_route_claims(current, name, &mut self.cluster);
        // The plan reads which names the app owns, so its claims must be current.
        let plan = plan::plan_app(&self.cluster, name, now);
        let previous = previous.unwrap_or(current);
        self.update_routes(name, previous, &plan);
        match self.cluster.settings.platform {
            PlatformKind::Local => {
                self.update_local_pods(name, previous, plan.app.as_ref());
                self.update_local_objects(name, previous, plan.app.as_ref(), to_store);
            }
            PlatformKind::Kubernetes => {
                let keys =
                    write_keys::changed_keys(name, previous, plan.app.as_ref(), &self.cluster);
                // Children can be missing only if their owner's object is written, and only the leader writes.
                if self.cluster.is_leader && keys.iter().any(|it| it.part == ObjectPart::Object) {
                    self.effects.apps_to_check.push(name.clone());
                }
                self.effects.changed_keys.extend(keys);
                self.request_digests(name, previous, plan.app.as_ref());
            }
        }
        self.timers.set(name, plan.timer);
        reports::forget_revived_pods(&mut self.cluster, current, plan.app.as_ref());
        self.update_owner_exceptions(name, Some(current), plan.app.as_ref());
        self.keep_decisions_of_deleted(name, current, plan.app.as_ref());
        self.drop_stale_blocking_causes(name, plan.app.as_ref());
        self.drop_external_scales(name, previous, plan.app.as_ref());
        let Some(app) = plan.app else {
            self.remove_app(name);
            return;
        };
        let drains = |(_, pod): (_, &RevisionPod)| matches!(pod.stage, PodStage::Draining { .. });
        if app.pods().any(drains) {
            self.draining_apps.insert(name.clone());
        } else {
            self.draining_apps.remove(name);
        }
        if self.has_standby(&app) {
            self.standby_apps.insert(name.clone());
        } else {
            self.standby_apps.remove(name);
        }
        self.record_standby_failures(name, previous, &app);
        self.record_port_refusal(name, previous, &app);
        log_changes(name, previous, &app);
        self.cluster.apps.insert(name.clone(), Box::new(app));
        self.follow_stop_checks(name, now);
    }

    /// Updates the RouteTable's outbox with the plan's subjects, and removes those that the plan no longer has.
    fn update_routes(&mut self, name: &NamespacedName, previous: &AppState, plan: &AppPlan) {
        let mut keys = BTreeSet::new();
        for change in &plan.routes {
            let Some(key) = change.key() else { continue };
            if let RouteChange::Service(service) = change {
                // Before the service, so that no stream has it without an entry of its certificate.
                self.follow_local_tls(&service.name, service.serves_local_tls);
            }
            self.routes.set(key.clone(), RouteFingerprint::of_change(change));
            keys.insert(key);
        }
        // Another app may have taken over the name or the pod, whose subject must stay.
        let is_others = |key: &RouteKey| match key {
            RouteKey::Service(it) => {
                self.cluster.app_of_service(it).is_some_and(|app| app != *name)
            }
            RouteKey::Revision(it) => {
                self.cluster.app_of_revision(it).is_some_and(|app| app != *name)
            }
            RouteKey::Pod(uid) => self.pod_index.apps.get(uid).is_some_and(|app| app != name),
            _ => false,
        };
        let is_dropped = |key: &RouteKey| !keys.contains(key) && !is_others(key);
        let dropped: Vec<RouteKey> = app_route_keys(name, previous).filter(is_dropped).collect();
        for key in dropped {
            self.routes.remove(&key);
            if let RouteKey::Service(service) = &key {
                self.follow_local_tls(service, false);
            }
        }
    }

    /// Adds to the effects the pods that the local node is to start and to stop.
    fn update_local_pods(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: Option<&AppState>,
    ) {
        let should_run = |pod: &RevisionPod| !matches!(pod.stage, PodStage::Stopping { .. });
        let uids = |app: &AppState| -> BTreeSet<Box<str>> {
            app.pods().filter(|(_, pod)| should_run(pod)).map(|(_, pod)| pod.uid.clone()).collect()
        };
        let (had, has) = (uids(previous), after.map(uids).unwrap_or_default());
        for (revision, pod) in after.iter().flat_map(|app| app.pods()) {
            // The node runs a pod until it is told to stop it, so each pod is passed to it once.
            let is_known = self.pod_index.apps.contains_key(&*pod.uid);
            if should_run(pod) && !is_known {
                let template = ParsedTemplate::of_revision(revision, &self.cluster);
                self.effects.pods_to_start.push(template.local_pod_spec(name, revision, pod));
                self.pod_index.apps.insert(pod.uid.to_string(), name.clone());
            }
        }
        for uid in had.difference(&has) {
            self.effects.pods_to_stop.push(uid.to_string());
        }
        // A stopped pod stays known until the plan drops it: once the node has reported its end, or after a long time
        // without such a report.
        let kept_uids: BTreeSet<&str> =
            after.iter().flat_map(|app| app.pods()).map(|(_, pod)| &*pod.uid).collect();
        for (_, pod) in previous.pods().filter(|(_, pod)| !kept_uids.contains(&*pod.uid)) {
            self.pod_index.apps.remove(&*pod.uid);
            self.forget_ended_pod(&pod.uid);
            self.effects.changed_objects.push(LocalObjectKey::pod(&name.namespace, &pod.name));
        }
    }

    /// Adds to the effects the objects of the local node that are to be written or deleted.
    fn update_local_objects(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: Option<&AppState>,
        to_store: ObjectsToStore,
    ) {
        let store_all = to_store == ObjectsToStore::All;
        let out = &mut self.effects.changed_objects;
        let is_removed = after.is_none_or(AppState::is_terminating);
        // Of the stored Service, Configuration and Route, a plan changes only these fields.
        let service_fields = |app: &AppState| {
            let names: Vec<Box<str>> = app.revisions.iter().map(|it| it.name.clone()).collect();
            (
                app.conditions.clone(),
                app.latest_ready().map(str::to_owned),
                app.traffic().to_vec(),
                names.last().cloned(),
            )
        };
        let is_changed = |app: &AppState| service_fields(app) != service_fields(previous);
        if store_all || is_removed || after.is_some_and(is_changed) {
            out.extend(LocalObjectKey::of_app(name));
            self.update_dns_names(name, previous, after.filter(|_| !is_removed));
        }
        let out = &mut self.effects.changed_objects;
        let after = after.map(|app| app.revisions.as_slice()).unwrap_or_default();
        for revision in after {
            let old = previous.revision(&revision.name);
            if store_all || old != Some(revision) {
                out.extend(LocalObjectKey::of_revision(&name.namespace, &revision.name));
            }
            for pod in &revision.pods {
                let had = old.and_then(|it| it.pods.iter().find(|had| had.uid == pod.uid));
                // Pods change far more often than their Revision.
                if had != Some(pod) {
                    out.push(LocalObjectKey::pod(&name.namespace, &pod.name));
                }
            }
        }
        let removed =
            previous.revisions.iter().filter(|it| !after.iter().any(|has| has.name == it.name));
        out.extend(removed.flat_map(|it| LocalObjectKey::of_revision(&name.namespace, &it.name)));
    }

    /// Adds to the effects the names that the local node's DNS is to have, and those that it is to lose.
    fn update_dns_names(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: Option<&AppState>,
    ) {
        let names = |app: &AppState| -> Vec<(NamespacedName, Vec<IpAddr>)> {
            let all = app.allocations().iter().map(|allocation| {
                let host = plan::placeholder_name(allocation, &name.name);
                let addresses = self.cluster.settings.cluster_ips(&allocation.cluster_ips);
                (NamespacedName::new(name.namespace.clone(), host), addresses)
            });
            all.collect()
        };
        let current = after.map(names).unwrap_or_default();
        // A name that has another owner by now is in that owner's effects.
        let is_others = |route_name: &NamespacedName| {
            self.cluster.app_of_route_name(route_name).is_some_and(|app| app != *name)
        };
        let old = names(previous).into_iter().map(|(old, _)| old);
        let deleted =
            old.filter(|old| !is_others(old) && !current.iter().any(|(name, _)| name == old));
        self.effects.dns_names.extend(deleted.map(|deleted| (deleted, Vec::new())));
        self.effects.dns_names.extend(current);
    }

    /// Returns true if pods of an app stand by, are to do so, or may still be frozen.
    fn has_standby(&self, app: &AppState) -> bool {
        let reports = &self.cluster.pods.reports;
        let may_be_frozen = |pod: &RevisionPod| {
            let report = reports.get(&*pod.uid);
            pod.standby_since.is_some() || report.is_some_and(|report| report.standby.is_some())
        };
        app.revisions.iter().any(|it| it.scaling.standby_scale > 0)
            || app.pods().any(|(_, pod)| may_be_frozen(pod))
    }

    /// Records an Event on each Revision whose standby has failed now. Each wake and sleep would be too many Events.
    fn record_standby_failures(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: &AppState,
    ) {
        // Each replica plans, but an Event is to be recorded once.
        if !self.cluster.is_leader {
            return;
        }
        for revision in &after.revisions {
            let old = previous.revision(&revision.name);
            let had_failed = old.is_some_and(|it| standby_failure(it).is_some());
            let Some(failure) = standby_failure(revision).filter(|_| !had_failed) else { continue };
            self.effects.object_events.push(ObjectEventRecord {
                resource: ResourceKind::Revision,
                name: NamespacedName::new(name.namespace.clone(), &*revision.name),
                uid: revision.meta.uid.to_string(),
                is_warning: true,
                reason: failure.reason.to_string(),
                message: failure.message.to_string(),
            });
        }
    }

    /// Records an Event on the Service, or on a Route without one, when the Route does not get its gateway port.
    fn record_port_refusal(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: &AppState,
    ) {
        let Some(refusal) = port_refusal(after).filter(|_| self.cluster.is_leader) else { return };
        // A replica that becomes the leader has the condition already, and so has its predecessor's Event.
        if port_refusal(previous).as_ref() == Some(&refusal) {
            return;
        }
        let of_service = after.service.as_ref().map(|it| (ResourceKind::KnativeService, &it.meta));
        let of_route = || after.route.as_ref().map(|it| (ResourceKind::Route, &it.meta));
        let Some((resource, meta)) = of_service.or_else(of_route) else { return };
        self.effects.object_events.push(ObjectEventRecord {
            resource,
            name: name.clone(),
            uid: meta.uid.to_string(),
            is_warning: true,
            reason: refusal.reason.to_string(),
            message: refusal.message.to_string(),
        });
    }

    fn remove_app(&mut self, name: &NamespacedName) {
        self.draining_apps.remove(name);
        self.standby_apps.remove(name);
        self.stop_checks.forget_app(name);
        self.cluster.apps.remove(name);
        info!(service = %name, "service gone");
    }
}

/// Returns every subject that the app may have in the RouteTable, in the order in which they are to be removed.
fn app_route_keys(name: &NamespacedName, app: &AppState) -> impl Iterator<Item = RouteKey> {
    let full = |object_name: &str| NamespacedName::new(name.namespace.clone(), object_name);
    // Services first, so that no stream ever has a service without its Revision.
    let services = app
        .allocations()
        .iter()
        .map(|it| RouteKey::Service(full(&plan::placeholder_name(it, &name.name))));
    let ports = app.scaled.iter().flat_map(|it| &it.ports);
    let services =
        services.chain(ports.map(|it| RouteKey::Service(name.with_port(it.service_port))));
    let pods = app.pods().map(|(_, pod)| RouteKey::Pod(pod.uid.to_string()));
    let revisions = app.revisions.iter().map(|it| RouteKey::Revision(full(&it.name)));
    services.chain(pods).chain(revisions).collect::<Vec<_>>().into_iter()
}

/// Returns the reason if a Route does not get the gateway port that it asks for.
fn port_refusal(app: &AppState) -> Option<ConditionReason> {
    match app.conditions.get(ConditionType::RouteGatewayPort) {
        ConditionStatus::False(reason) => Some(reason),
        ConditionStatus::True(_) | ConditionStatus::Unknown(_) => None,
    }
}

/// Returns the reason if an agent could not freeze a pod of the Revision, or a pod did not get its requests back.
fn standby_failure(revision: &AppRevision) -> Option<&ConditionReason> {
    let stop = revision.scaling.standby_stop.as_deref()?;
    let failures = [StandbyStop::FREEZE_FAILED, REQUESTS_NOT_RESTORED];
    Some(&stop.reason).filter(|it| failures.contains(&&*it.reason))
}

/// Logs what has changed of an app: scale, standby, hints, and the condition of the Service.
fn log_changes(name: &NamespacedName, previous: &AppState, after: &AppState) {
    let refusal = |revision: &AppRevision| revision.topology.as_ref()?.refusal;
    for revision in &after.revisions {
        let key = || format!("{}/{}", name.namespace, revision.name);
        let old = previous.revision(&revision.name);
        if let Some(why) = refusal(revision)
            && old.and_then(refusal) != Some(why)
        {
            info!(revision = key(), %why, "no topology hints");
        }
        let from = old.map_or(0, |it| it.scaling.requested_scale);
        if from != revision.scaling.requested_scale {
            let key = key();
            info!(
                revision = key,
                from,
                to = revision.scaling.requested_scale,
                ready = revision.scaling.actual_scale,
                "scaled"
            );
        }
        // Waking and falling asleep are changes of scale for the user, although no pod starts or ends.
        let from = old.map_or(0, AppRevision::ordered_pods);
        if from != revision.ordered_pods() {
            let key = key();
            info!(revision = key, from, to = revision.ordered_pods(), "pods on standby");
        }
    }
    let ready = |app: &AppState| app.conditions.get(ConditionType::ServiceReady);
    if ready(previous) != ready(after) {
        let (ready, cause) = match ready(after) {
            ConditionStatus::True(_) => ("True", None),
            ConditionStatus::Unknown(cause) => ("Unknown", cause),
            ConditionStatus::False(cause) => ("False", Some(cause)),
        };
        let reason = cause.as_ref().map(|cause| &*cause.reason);
        let message = cause.as_ref().map(|cause| &*cause.message);
        info!(service = %name, ready, reason, message, "service condition changed");
    }
}
