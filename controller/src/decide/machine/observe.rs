//! Pure: objects of the API server → the cluster state. Observations come in any order and more than once.

use std::collections::BTreeSet;

use common::{
    local_node::PodRunPhase,
    wire::{NamespacedName, ServerComponent},
};
use serde_json::Value;
use tracing::info;

use super::{ControllerStateMachine, ObjectsToStore, allocate, write_keys::BlockingCause};
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterState, ConfigurationState, KubeletReadiness, NodeState,
            ParsedTemplate, PodStage, RevisionPod, RouteState, ServiceManifest, ServiceState,
            UnixMillis, conditions,
        },
        object::{ObjectPart, ObjectPartKey, ResourceKind},
        scale_policy::AutoscalerClass,
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
            ResourceKind::Revision => self.observe_revision(&name, object, now),
            ResourceKind::Deployment => self.observe_deployment(&name, object, now),
            ResourceKind::Pod => self.observe_pod(&name, object, now),
            ResourceKind::Service => self.observe_placeholder(&name, object, now),
            ResourceKind::Node => self.observe_node(&name.name, object, now),
            ResourceKind::ConfigMap => self.observe_config_map(&name, object, now),
            ResourceKind::NetworkPolicy => {
                let changed_apps = self.cluster.network_policies.set_policy(name, object);
                self.reconcile_namespaces(&changed_apps, now);
            }
            ResourceKind::Namespace => {
                let is_terminating = |it: &Value| it["metadata"]["deletionTimestamp"].is_string();
                match object.is_some_and(is_terminating) {
                    true => self.cluster.terminating_namespaces.insert(name.name.clone()),
                    false => self.cluster.terminating_namespaces.remove(&name.name),
                };
                let changed_apps = self.cluster.network_policies.set_namespace(&name.name, object);
                self.reconcile_namespaces(&changed_apps, now);
            }
            ResourceKind::PodAutoscaler => self.observe_autoscaler(name, object),
            // Kinds that have a file of their own, or are only written.
            ResourceKind::EndpointSlice => self.observe_slice(&name, object),
            ResourceKind::DomainMapping => self.observe_mapping(&name, object, now),
            ResourceKind::ClusterDomainClaim => self.observe_claim(&name, object, now),
            ResourceKind::HorizontalPodAutoscaler
            | ResourceKind::ServerlessService
            | ResourceKind::Metric
            | ResourceKind::Image => {}
        }
    }

    /// Changes one app and plans it; an app without any object left is forgotten. Returns false if nothing changed, so
    /// that the caller may have to plan the app itself.
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
            app.service = observed.map(|service| ServiceState {
                manifest: with_interned_template(service.manifest, cluster),
                ..service
            });
        });
    }

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

    fn observe_route(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let mut referred_apps = self.remove_route_references(&name);
        if let Some(object) = object {
            referred_apps.extend(self.add_route_references(&name, &observe::read_route(object)));
        }
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
    }

    /// Records the other apps whose Revisions a Route names, and returns them.
    fn add_route_references(
        &mut self,
        name: &NamespacedName,
        route: &RouteState,
    ) -> BTreeSet<NamespacedName> {
        let mut referred_apps = BTreeSet::new();
        for target in route.traffic_spec.iter() {
            let configuration = target.configuration_name.as_deref();
            let by_revision = target.revision_name.as_deref().and_then(|revision| {
                self.cluster.app_of_revision(&NamespacedName::new(name.namespace.clone(), revision))
            });
            let by_name = configuration.map(|it| NamespacedName::new(name.namespace.clone(), it));
            for other in by_revision.into_iter().chain(by_name).filter(|it| it != name) {
                self.cluster
                    .names
                    .referring_apps
                    .entry(other.clone())
                    .or_default()
                    .insert(name.clone());
                referred_apps.insert(other);
            }
        }
        referred_apps
    }

    /// Forgets the references of a Route, and returns the apps that it named.
    fn remove_route_references(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        let mut referred_apps = BTreeSet::new();
        self.cluster.names.referring_apps.retain(|other, from| {
            if from.remove(name) {
                referred_apps.insert(other.clone());
            }
            !from.is_empty()
        });
        referred_apps
    }

    fn observe_revision(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let owner =
            object.and_then(observe::owning_app).or_else(|| self.cluster.app_of_revision(name));
        let Some(owner) = owner else { return };
        let Some(object) = object else {
            self.keep_decision(name);
            self.blocking_causes.remove(&(owner.clone(), Some(name.name.as_str().into())));
            self.change_app(owner, now, |app, _| mark_revision_deleted(app, &name.name, now));
            return;
        };
        let early_pods = self.pod_index.without_revision.remove(name).unwrap_or_default();
        let pod_uids: Vec<Box<str>> = early_pods.values().map(|pod| pod.uid.clone()).collect();
        self.change_app(owner, now, |app, cluster| {
            let mut observed = observe::read_revision(object);
            observed.template = cluster.template_cache.intern(&observed.template);
            let is_new = app.revision(&observed.name).is_none();
            if let Some(line) = observe::read_decision_explanation(object).filter(|_| is_new) {
                cluster.scaling.explanations.entry(name.clone()).or_insert(line);
            }
            match app.revisions.iter_mut().find(|it| it.name == observed.name) {
                // All other fields are the controller's own, and newer in the cluster state.
                Some(revision)
                    if !revision.meta.exists() || revision.meta.uid == observed.meta.uid =>
                {
                    if !cluster.is_leader {
                        adopt_leader_fields(revision, &observed);
                    }
                    (revision.meta, revision.template) = (observed.meta, observed.template);
                    revision.creator = observed.creator;
                    (revision.is_terminating, revision.is_orphan) =
                        (observed.is_terminating, observed.is_orphan);
                }
                // A new Revision of this name. Decisions are about names, and the old pods finish their requests.
                Some(revision) => {
                    revision.pods.iter_mut().for_each(|pod| drain_pod(pod, now));
                    let (decision, pods) =
                        (revision.scaling.decision, std::mem::take(&mut revision.pods));
                    *revision = AppRevision { pods, ..observed };
                    revision.scaling.decision = decision;
                }
                None => app.revisions.push(observed),
            }
            app.revisions
                .sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
            for pod in early_pods.into_values() {
                store_pod(app, &name.name, pod, cluster.is_leader, now);
            }
            // A new leader must not scale down what runs before the autoscaler decides.
            let mut all = app.revisions.iter_mut();
            all.find(|it| is_new && *it.name == *name.name)
                .into_iter()
                .for_each(keep_running_scale);
        });
        for uid in pod_uids {
            self.apply_unplaced_reports(&uid, now);
        }
    }

    fn observe_deployment(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let key = ObjectPartKey::new(ResourceKind::Deployment, ObjectPart::Object, name.clone());
        let Some((owner, revision_name)) = part_keys::owner_revision_of(&self.cluster, &key) else {
            return;
        };
        let blocked = object.and_then(observe::replica_failure);
        // If Kubernetes scales the Revision, the Deployment's replicas are the requested scale.
        let replicas = object.and_then(|it| it["spec"]["replicas"].as_u64());
        let blocked_object = (owner.clone(), Some(revision_name.clone()));
        let blocked = self.set_blocking_cause(&blocked_object, BlockingCause::Deployment, blocked);
        self.change_app(owner, now, |app, cluster| {
            let key = NamespacedName::new(name.namespace.clone(), &*revision_name);
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| it.name == revision_name) else { return };
            revision.blocked_reason = blocked;
            match replicas.and_then(|it| u32::try_from(it).ok()) {
                Some(replicas)
                    if ParsedTemplate::of_revision(revision, cluster).class
                        != AutoscalerClass::Kpa =>
                {
                    cluster.scaling.external_scales.insert(key, replicas);
                }
                Some(_) | None => drop(cluster.scaling.external_scales.remove(&key)),
            }
        });
    }

    /// Handles a PodAutoscaler, which owns its HorizontalPodAutoscaler.
    fn observe_autoscaler(&mut self, name: NamespacedName, object: Option<&Value>) {
        let uid = object.filter(|it| observe::is_hpa_class(it));
        let Some(uid) = uid.and_then(|it| it["metadata"]["uid"].as_str()) else {
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

    fn observe_pod(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        if self.observe_component_pod(name, object, now) {
            return;
        }
        // A kubelet that rejected the pod would reject the next one too, so the node is avoided for a while.
        if let Some(rejection) = object.and_then(observe::read_rejection)
            && let Some(node) = self.cluster.nodes.states.get_mut(rejection.node)
        {
            node.record_rejection(rejection.at.map_or(now, |at| at.min(now)));
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
            None => self.remove_pod(name, now),
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
        self.cluster.pods.statuses.remove(&*uid);
        self.forget_reports(&uid);
        self.pod_index.apps.remove(&*uid);
    }

    /// Handles a node. While a node is lost, all of its pods count as not ready, before each is reported as such.
    fn observe_node(&mut self, name: &str, object: Option<&Value>, now: UnixMillis) {
        match object.and_then(observe::node_zone) {
            Some(zone) => drop(self.cluster.nodes.zones.insert(name.to_owned(), zone)),
            None => drop(self.cluster.nodes.zones.remove(name)),
        }
        let was_lost = self.cluster.is_node_lost(name);
        let previous = self.cluster.nodes.states.remove(name);
        let node = match object {
            Some(object) => Some(NodeState::from_object(object, previous.as_ref())),
            // The deletion of a lost node does not make its pods ready again, so the node stays known as lost.
            None if was_lost && !self.apps_on_node(name).is_empty() => Some(NodeState::default()),
            None => None,
        };
        self.cluster.nodes.states.extend(node.map(|node| (name.to_owned(), node)));
        self.handle_node_change(name, was_lost, now);
    }

    /// Plans the apps on a node if it became or is no longer [lost](ClusterState::is_node_lost); `was_lost` is the
    /// former state.
    pub(super) fn handle_node_change(&mut self, name: &str, was_lost: bool, now: UnixMillis) {
        if self.cluster.is_node_lost(name) == was_lost {
            return;
        }
        for app in self.apps_on_node(name) {
            self.reconcile_app(&app, now);
        }
        self.update_node_activators(name);
    }

    /// Returns the apps that have pods on a node.
    fn apps_on_node(&self, node: &str) -> Vec<NamespacedName> {
        let is_on =
            |pod: &RevisionPod| pod.kube_status.as_ref().is_some_and(|it| *it.node == *node);
        let apps = self.cluster.apps.iter();
        let affected = apps.filter(|(_, app)| app.pods().any(|(_, pod)| is_on(pod)));
        affected.map(|(name, _)| name.clone()).collect()
    }

    /// Handles the Service that reserves a name of a Route (Knative: placeholder Service).
    fn observe_placeholder(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let is_cluster_local = |cluster: &ClusterState| {
            cluster.names.placeholders.get(name).is_some_and(|it| it.is_cluster_local)
        };
        let was_cluster_local = is_cluster_local(&self.cluster);
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
        if was_cluster_local != is_cluster_local(&self.cluster) {
            // The app has no field for it, but its routes and URLs depend on it.
            self.effects.changed_keys.extend(part_keys::status_keys(&owner_app));
            if !planned {
                self.reconcile_app(&owner_app, now);
            }
        }
    }

    /// Lets all pods follow their annotations, after this replica lost the leadership.
    ///
    /// The last plan may never have been written, and the new leader may plan otherwise. So exactly the pods that are
    /// annotated as draining drain, as on every other replica.
    fn adopt_drain_annotations(&mut self, now: UnixMillis) {
        for name in self.cluster.apps.keys().cloned().collect::<Vec<_>>() {
            self.change_app(name, now, |app, _| {
                let revisions = app.revisions.iter_mut().filter(|it| !it.is_deleted);
                let pods = revisions.flat_map(|it| &mut it.pods);
                pods.for_each(|pod| adopt_drain_annotation(pod, now));
            });
        }
    }

    /// Handles the gain or loss of the leadership.
    pub(super) fn handle_leadership(&mut self, is_leader: bool, now: UnixMillis) {
        self.cluster.is_leader = is_leader;
        // The RouteTable names the leader as the controller's active replica.
        let own_pod_name = self.cluster.settings.own_pod_name.clone();
        self.set_chosen_replica(
            ServerComponent::Controller,
            is_leader.then_some(own_pod_name).filter(|it| !it.is_empty()),
        );
        if !is_leader {
            return self.adopt_drain_annotations(now);
        }
        info!(apps = self.cluster.apps.len(), "became the leader");
        self.effects
            .config_map_events
            .extend(std::mem::take(&mut self.unrecorded_events).into_values().flatten());
        let names: Vec<NamespacedName> = self.cluster.apps.keys().cloned().collect();
        for name in names {
            let app_name = name.clone();
            let planned = self.change_app(name.clone(), now, |app, cluster| {
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
    }
}

fn with_interned_template(
    mut manifest: ServiceManifest,
    cluster: &ClusterState,
) -> ServiceManifest {
    manifest.template = cluster.template_cache.intern(&manifest.template);
    manifest
}

/// Requests as many pods as serve now, until the autoscaler decides.
fn keep_running_scale(revision: &mut AppRevision) {
    revision.scaling.requested_scale = revision.serving_pods();
}

/// Marks a Revision as deleted. It stays until its pods have ended, since they finish their requests.
fn mark_revision_deleted(app: &mut AppState, name: &str, now: UnixMillis) {
    for revision in app.revisions.iter_mut().filter(|it| *it.name == *name) {
        revision.is_deleted = true;
        revision.pods.iter_mut().for_each(|pod| drain_pod(pod, now));
    }
    app.revisions.retain(|it| !it.is_deleted || !it.pods.is_empty());
}

/// Lets a pod finish its requests. Kubernetes ends it now or soon, so it never serves again.
fn drain_pod(pod: &mut RevisionPod, now: UnixMillis) {
    if let Some(status) = &mut pod.kube_status {
        status.is_terminating = true;
    }
    if pod.stage == PodStage::Serving {
        pod.stage = PodStage::Draining { since: now };
    }
}

/// Copies the fields of a Revision that only the leader sets, or that the leader may observe before this replica.
fn adopt_leader_fields(revision: &mut AppRevision, observed: &AppRevision) {
    revision.scaling.initial_scale_reached |= observed.scaling.initial_scale_reached;
    if revision.digests.is_empty() {
        revision.digests = observed.digests.clone();
    }
}

/// Stores a pod in its Revision. For a known pod, only the fields that Kubernetes sets are replaced.
///
/// The leader decides which pods drain and annotates them; other replicas follow the annotation.
fn store_pod(
    app: &mut AppState,
    revision: &str,
    mut pod: RevisionPod,
    is_leader: bool,
    now: UnixMillis,
) {
    let Some(revision) = app.revisions.iter_mut().find(|it| *it.name == *revision) else { return };
    let is_revision_deleted = revision.is_deleted;
    let must_drain = pod.is_terminating() || is_revision_deleted;
    match revision.pods.iter_mut().find(|it| it.uid == pod.uid) {
        Some(known_pod) => {
            let was = known_pod.kube_status.as_ref().map(|it| it.kubelet_readiness);
            // A pod that was ready once and is not ready now has lost its readiness; it is not a new pod.
            if let (Some(status), Some(KubeletReadiness::Ready | KubeletReadiness::NoLongerReady)) =
                (&mut pod.kube_status, was)
                && status.kubelet_readiness == KubeletReadiness::NotYetReady
            {
                status.kubelet_readiness = KubeletReadiness::NoLongerReady;
            }
            known_pod.kube_status = pod.kube_status;
            if must_drain && known_pod.stage == PodStage::Serving {
                known_pod.stage = PodStage::Draining { since: now };
            } else if !is_leader && !is_revision_deleted {
                adopt_drain_annotation(known_pod, now);
            }
        }
        None => {
            adopt_drain_annotation(&mut pod, now);
            if must_drain && pod.stage == PodStage::Serving {
                pod.stage = PodStage::Draining { since: now };
            }
            revision.pods.push(pod);
        }
    }
}

/// Lets a pod drain if it is annotated as draining, and serve otherwise.
///
/// Draining begins now, not at the annotated time. The annotating clock may be ahead, which would prolong the draining,
/// or behind, which would leave no time for the last requests.
fn adopt_drain_annotation(pod: &mut RevisionPod, now: UnixMillis) {
    let Some(status) = &pod.kube_status else { return };
    match (pod.stage, status.draining_since) {
        (PodStage::Serving, Some(_)) => pod.stage = PodStage::Draining { since: now },
        (PodStage::Draining { .. } | PodStage::Stopping { .. }, None) if !status.is_terminating => {
            pod.stage = PodStage::Serving;
        }
        (PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. }, _) => {}
    }
}

#[cfg(test)]
mod tests;
