//! Pure: objects of the API server → the cluster state. Observations come in any order and more than once.

use common::wire::NamespacedName;
use serde_json::Value;
use smol_str::SmolStr;

use super::{
    BlockedPart, ControllerStateMachine, ObjectsToStore, allocate,
    leadership::keep_running_scale,
    pods::{adopt_annotations, drain_pod, store_pod},
};
use crate::{
    decide::{part_keys, plan},
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ConfigurationState, RevisionPod, RouteState,
            ServiceManifest, ServiceState, UnixMillis, WorkloadKind, conditions,
        },
        knative::key,
        object::{ObjectPart, ObjectPartKey, ResourceKind, json},
    },
    read::{fields, observe},
};

impl ControllerStateMachine {
    /// Handles an object; `None`: it was deleted.
    pub(super) fn observe_object(
        &mut self,
        resource: ResourceKind,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        match resource {
            ResourceKind::KnativeService => self.observe_service(name, object, now),
            ResourceKind::Configuration => self.observe_configuration(name, object, now),
            ResourceKind::Route => self.observe_route(name, object, now),
            ResourceKind::Revision => {
                self.observe_revision(&name, object, now);
                self.reconcile_namesake(&name, now);
            }
            ResourceKind::Deployment => {
                self.observe_deployment(&name, object.filter(|it| is_of_revision(it)), now);
                // One kind has objects of the controller and of users. Each function gets `None` for the other ones, as
                // if they were deleted.
                let of_user = object.filter(|it| !is_of_revision(it));
                self.observe_workload(WorkloadKind::Deployment, &name, of_user, now);
            }
            ResourceKind::StatefulSet => {
                self.observe_workload(WorkloadKind::StatefulSet, &name, object, now);
            }
            ResourceKind::HorizontalPodAutoscaler => {
                let of_user = object.filter(|it| !is_of_revision(it));
                self.observe_user_autoscaler(&name, of_user, now);
            }
            ResourceKind::Pod => self.observe_pod(&name, object, now),
            ResourceKind::Service => {
                self.observe_user_service(&name, object, now);
                self.observe_challenge_solver(&name, object, now);
                self.observe_placeholder(&name, object, now);
                self.observe_backend_service(&name, object, now);
            }
            ResourceKind::Node => self.observe_node(&name.name, object, now),
            ResourceKind::ConfigMap => self.observe_config_map(&name, object, now),
            ResourceKind::NetworkPolicy => {
                let changed_apps = self.cluster.network_policies.set_policy(name, object);
                self.reconcile_namespaces(&changed_apps, now);
            }
            ResourceKind::Namespace => self.observe_namespace(&name.name, object, now),
            ResourceKind::PodAutoscaler => {
                self.observe_scaled_autoscaler(&name, object, now);
                self.observe_pod_autoscaler(name, object);
            }
            ResourceKind::EndpointSlice => self.observe_slice(&name, object, now),
            ResourceKind::DomainMapping => self.observe_domain_mapping(&name, object, now),
            ResourceKind::ClusterDomainClaim => self.observe_domain_claim(&name, object, now),
            ResourceKind::RequestedCertificate => {
                self.observe_requested_certificate(&name, object, now);
            }
            ResourceKind::IssuedCertificate => self.observe_issued_certificate(&name, object),
            ResourceKind::AcmeChallenge => self.observe_challenge(&name, object, now),
            ResourceKind::ReferenceGrant => self.observe_reference_grant(name, object, now),
            ResourceKind::GatewayClass => self.observe_gateway_class(&name.name, object, now),
            ResourceKind::Gateway => self.observe_gateway(name, object, now),
            ResourceKind::HttpRoute | ResourceKind::GrpcRoute => {
                self.observe_gateway_route(resource, name, object, now);
            }
            ResourceKind::Ingress => self.observe_ingress(&name, object, now),
            // These kinds are only written.
            ResourceKind::ServerlessService | ResourceKind::Metric | ResourceKind::Image => {}
        }
    }

    fn observe_namespace(&mut self, name: &SmolStr, object: Option<&Value>, now: UnixMillis) {
        match object.is_some_and(json::is_terminating) {
            true => self.cluster.terminating_namespaces.insert(name.clone()),
            false => self.cluster.terminating_namespaces.remove(name),
        };
        let mut changed_apps = self.cluster.network_policies.set_namespace(name, object);
        if self.set_standby_default(name, object) {
            changed_apps.insert(name.clone());
        }
        self.reconcile_namespaces(&changed_apps, now);
        self.observe_certificate_namespace(name, object, now);
        self.follow_gateway_namespaces(now);
    }

    /// Sets the number of pods that Revisions of a namespace keep on standby by default. Returns true if it changed.
    fn set_standby_default(&mut self, name: &SmolStr, object: Option<&Value>) -> bool {
        let text = object.and_then(|it| json::annotation(it, key::STANDBY));
        let defaults = &mut self.cluster.standby_defaults;
        let previous = match text {
            Some(text) => defaults.insert(name.clone(), text.into()),
            None => defaults.remove(name),
        };
        previous.as_deref() != text
    }

    /// Changes one app and plans it; an app without any object left is forgotten. Returns false if nothing changed, so
    /// that the caller may have to plan the app itself. Returns true during the initial list, after which all apps are
    /// planned.
    pub(super) fn change_app(
        &mut self,
        name: NamespacedName,
        now: UnixMillis,
        change: impl FnOnce(&mut AppState, &mut ClusterState),
    ) -> bool {
        if self.is_loading {
            // Nothing is planned yet, so no copy is needed to compare: a service may have thousands of pods.
            let mut app = self.cluster.apps.remove(&name).unwrap_or_default();
            let shape = |app: &AppState| {
                let tags = app.route.as_ref().map_or(0, |it| it.tags().count());
                (app.revisions.len(), app.route.is_some(), tags)
            };
            let old_shape = shape(&app);
            change(&mut app, &mut self.cluster);
            if shape(&app) != old_shape {
                self.update_owner_exceptions(&name, None, Some(&app));
            }
            self.cluster.apps.insert(name, app);
            return true;
        }
        let previous = self.cluster.apps.remove(&name).unwrap_or_default();
        let mut app = previous.clone();
        change(&mut app, &mut self.cluster);
        // An empty app is planned although it is unchanged: its plan removes it.
        if app == previous && app != Box::default() {
            self.cluster.apps.insert(name, app);
            return false;
        }
        self.update_owner_exceptions(&name, Some(&previous), Some(&app));
        self.cluster.apps.insert(name.clone(), app);
        self.reconcile_changed_app(&name, Some(&previous), ObjectsToStore::All, now);
        true
    }

    fn observe_service(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        self.change_app(name, now, |app, cluster| {
            let config = &cluster.settings.scale_policy;
            let observed = object.map(|it| observe::read_service(it, config, app.service.as_ref()));
            // After a restart, the conditions that an earlier leader wrote are the starting point.
            if let (None, Some(object)) = (&app.service, object) {
                fields::read_conditions(
                    &mut app.conditions,
                    object,
                    &conditions::SERVICE_CONDITIONS,
                );
            }
            // The writer reports a write error only once, so the present ones are kept.
            let write_errors = app.service.take().map(|it| it.write_errors).unwrap_or_default();
            app.service = observed.map(|service| ServiceState {
                manifest: with_interned_template(service.manifest, cluster),
                write_errors,
                ..service
            });
        });
    }

    /// Handles a Configuration; `None`: it was deleted.
    fn observe_configuration(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        self.change_app(name, now, |app, cluster| {
            if let (None, Some(object)) = (&app.configuration, object) {
                fields::read_conditions(
                    &mut app.conditions,
                    object,
                    &conditions::CONFIGURATION_CONDITIONS,
                );
            }
            let previous = app.configuration.take().filter(|it| it.meta.exists());
            app.is_configuration_deleted =
                object.is_none() && (app.is_configuration_deleted || previous.is_some());
            app.configuration =
                object.map(observe::read_configuration).map(|configuration| ConfigurationState {
                    template: cluster.template_cache.intern(&configuration.template),
                    // The cluster state's value is newer than the written one.
                    latest_ready: previous
                        .and_then(|it| it.latest_ready)
                        .or(configuration.latest_ready),
                    ..configuration
                });
        });
    }

    /// Handles a Route; `None`: it was deleted. Plans the apps whose Revisions it names, or has named.
    fn observe_route(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let mut referred_apps = self.remove_route_references(&name);
        let spec = object.map(observe::read_route);
        let named_apps = spec.map(|it| self.add_route_references(&name, &it)).unwrap_or_default();
        referred_apps.extend(named_apps.iter().cloned());
        let route_name = name.clone();
        self.change_app(name, now, |app, cluster| {
            let previous = app.route.take();
            if let (None, Some(object)) = (&previous, object) {
                fields::read_conditions(&mut app.conditions, object, &conditions::ROUTE_CONDITIONS);
            }
            match (object.map(observe::read_route), previous) {
                (Some(observed), previous) => {
                    // After a restart, the traffic percentages that an earlier leader wrote are the starting point.
                    let previous = previous.unwrap_or_else(|| observed.clone());
                    // The writer reports a write error only once, so the present one is kept.
                    let RouteState { allocations, blocked_reason, .. } = previous.clone();
                    let route = RouteState { allocations, blocked_reason, ..observed };
                    // The leader's values are newer than what it wrote; other replicas follow the object.
                    app.route = Some(match cluster.is_leader {
                        true => RouteState {
                            traffic: previous.traffic,
                            rollout: previous.rollout,
                            ingress_class: previous.ingress_class,
                            ..route
                        },
                        false => route,
                    });
                    allocate::allocate(app, &route_name, cluster);
                }
                (None, Some(previous)) => {
                    allocate::release_allocations(&previous.allocations, cluster)
                }
                (None, None) => {}
            }
        });
        for other in referred_apps {
            self.reconcile_app(&other, now);
        }
        self.check_slices_of_apps(&named_apps);
    }

    /// Handles a Revision; `None`: it was deleted. Objects of it that were observed before are applied now.
    fn observe_revision(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let owner =
            object.and_then(observe::owning_app).or_else(|| self.cluster.app_of_revision(name));
        let Some(owner) = owner else { return };
        let Some(object) = object else {
            // Before the change below, which may drop the Revision with its decision.
            self.keep_decision(name);
            let part = BlockedPart::Revision(name.name.as_str().into());
            self.blocking_causes.remove(&(owner.clone(), part));
            self.change_app(owner, now, |app, _| mark_revision_deleted(app, &name.name, now));
            return;
        };
        let early_pods = self.pod_index.without_revision.remove(name).unwrap_or_default();
        let pod_uids: Vec<Box<str>> = early_pods.values().map(|pod| pod.uid.clone()).collect();
        self.change_app(owner, now, |app, cluster| {
            let mut observed = observe::read_revision(object);
            observed.template = cluster.template_cache.intern(&observed.template);
            observed.scaling.is_deadline_reported =
                plan::reported_deadline_reason(&observed).is_some();
            let uid = observed.meta.uid;
            let is_same = |it: &AppRevision| !it.meta.exists() || it.meta.uid == uid;
            let is_new = app.revision(&observed.name).is_none_or(|it| !is_same(it));
            if let Some(line) = observe::read_decision_explanation(object).filter(|_| is_new) {
                cluster.scaling.explanations.entry(name.clone()).or_insert(line);
            }
            match app.revisions.iter_mut().find(|it| it.name == observed.name) {
                // All other fields are the controller's own, and newer in the cluster state.
                Some(revision) if is_same(revision) => {
                    if !cluster.is_leader {
                        adopt_leader_fields(revision, &observed);
                        keep_undeleted(revision, now);
                    }
                    (revision.meta, revision.template) = (observed.meta, observed.template);
                    revision.scaling.is_deadline_reported = observed.scaling.is_deadline_reported;
                    revision.creator = observed.creator;
                    (revision.is_terminating, revision.is_orphan) =
                        (observed.is_terminating, observed.is_orphan);
                }
                // A new Revision of this name. Decisions are about names, and the old pods finish their requests.
                Some(revision) => {
                    replace_revision(revision, observed, now);
                    // That scale was of the old Revision's Deployment.
                    cluster.scaling.external_scales.remove(name);
                }
                None => app.revisions.push(observed),
            }
            app.revisions
                .sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
            for pod in early_pods.into_values() {
                store_pod(app, &name.name, pod, cluster.is_leader, now);
            }
            // A replica that becomes the leader must not scale down what runs before the autoscaler decides.
            let mut all = app.revisions.iter_mut();
            all.find(|it| is_new && *it.name == *name.name)
                .into_iter()
                .for_each(keep_running_scale);
        });
        self.link_waiting_routes(name, now);
        self.apply_early_deployment(name, object["metadata"]["uid"].as_str(), now);
        for uid in pod_uids {
            self.apply_unplaced_reports(&uid, now);
        }
    }

    /// Handles a PodAutoscaler, which owns its HorizontalPodAutoscaler.
    fn observe_pod_autoscaler(&mut self, name: NamespacedName, object: Option<&Value>) {
        let of_hpa_class = object.filter(|it| observe::is_hpa_class(it));
        let Some(uid) = of_hpa_class.and_then(|it| it["metadata"]["uid"].as_str()) else {
            self.cluster.scaling.hpa_owner_uids.remove(&name);
            return;
        };
        if self.cluster.scaling.hpa_owner_uids.get(&name).is_none_or(|it| **it != *uid) {
            self.cluster.scaling.hpa_owner_uids.insert(name.clone(), uid.into());
            let key =
                ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, ObjectPart::Object, name);
            self.effects.changed_keys.push(key);
        }
    }

    /// Handles the Service that reserves a name of a Route (Knative: placeholder Service).
    fn observe_placeholder(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        // The app has no field for these, but its routes and URLs depend on them.
        let unstored = |cluster: &ClusterState| {
            let placeholder = cluster.names.placeholders.get(name);
            let fields = placeholder.map(|it| (it.is_cluster_local, it.affinity, it.gateway_port));
            fields.unwrap_or_default()
        };
        let before = unstored(&self.cluster);
        match object.and_then(observe::read_placeholder) {
            Some(observed) => drop(self.cluster.names.placeholders.insert(name.clone(), observed)),
            None => {
                if self.cluster.names.placeholders.remove(name).is_none() {
                    return;
                }
            }
        }
        self.cluster.names.registry.mark_service_changed(name);
        let Some(owner) = self.cluster.app_of_route_name(name) else { return };
        let owner_app = owner.clone();
        let planned = self
            .change_app(owner, now, |app, cluster| allocate::allocate(app, &owner_app, cluster));
        if before != unstored(&self.cluster) {
            self.effects.changed_keys.extend(part_keys::status_keys(&owner_app));
            // A name that is private now needs no certificate, and a public one needs one.
            if let Some(app) = self.cluster.apps.get(&owner_app) {
                let keys = part_keys::certificate_keys(&owner_app, app, &self.cluster);
                self.effects.changed_keys.extend(keys);
            }
            self.check_ingress(&owner_app);
            if !planned {
                self.reconcile_app(&owner_app, now);
            }
        }
    }
}

/// Returns true if the controller has made an object of this kind for a Revision.
fn is_of_revision(object: &Value) -> bool {
    json::label(object, key::REVISION_UID).is_some()
}

fn with_interned_template(
    mut manifest: ServiceManifest,
    cluster: &ClusterState,
) -> ServiceManifest {
    manifest.template = cluster.template_cache.intern(&manifest.template);
    manifest
}

/// Replaces a deleted Revision with a new one of its name.
fn replace_revision(revision: &mut AppRevision, observed: AppRevision, now: UnixMillis) {
    // Pods have a watch of their own: those that are no older than the Revision are its own.
    let is_old = |it: &&mut RevisionPod| it.created < observed.meta.created;
    revision.pods.iter_mut().filter(is_old).for_each(|pod| drain_pod(pod, now));
    let (decision, pods) = (revision.scaling.decision, std::mem::take(&mut revision.pods));
    *revision = AppRevision { pods, ..observed };
    revision.scaling.decision = decision;
}

/// Marks a Revision as deleted. It stays until its pods have ended, since they finish their requests.
fn mark_revision_deleted(app: &mut AppState, name: &str, now: UnixMillis) {
    for revision in app.revisions.iter_mut().filter(|it| *it.name == *name) {
        revision.is_deleted = true;
        revision.pods.iter_mut().for_each(|pod| drain_pod(pod, now));
    }
    app.revisions.retain(|it| !it.is_deleted || !it.pods.is_empty());
}

/// Keeps a Revision that this replica collected as the leader, and that still exists: another leader decides now.
fn keep_undeleted(revision: &mut AppRevision, now: UnixMillis) {
    if std::mem::take(&mut revision.is_deleted) {
        revision.pods.iter_mut().for_each(|pod| adopt_annotations(pod, now));
    }
}

/// Copies the fields of a Revision that only the leader sets, or that the leader may observe before this replica.
fn adopt_leader_fields(revision: &mut AppRevision, observed: &AppRevision) {
    revision.scaling.initial_scale_reached |= observed.scaling.initial_scale_reached;
    revision.scaling.standby_stop.clone_from(&observed.scaling.standby_stop);
    if revision.digests.is_empty() {
        revision.digests = observed.digests.clone();
    }
}

#[cfg(test)]
mod tests;
