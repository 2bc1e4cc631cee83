//! Pure: objects of the API server → the world. Observations come in any order and more than once.

use std::collections::BTreeSet;

use common::{
    local_node::LocalPodPhase,
    wire::{NamespacedName, ServerComponent},
};
use serde_json::Value;
use tracing::info;

use super::{ControllerStateMachine, allocate, write_keys::BlockingCause};
use crate::{
    decide::part_keys,
    model::{
        object::{ObjectPart as Piece, ObjectPartKey, ResourceKind},
        scale_policy::AutoscalerClass,
        world::{
            AppRevision, AppState, ClusterState, ConfigurationState, KubeletReadiness, NodeState,
            PodStage, RevisionPod, RouteState, ServiceState, TemplateFacts, Uid, UnixMillis,
            conditions,
        },
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
                let touched = self.world.network_policies.set_policy(name, object);
                self.reconcile_namespaces(&touched, now);
            }
            ResourceKind::Namespace => {
                let is_going = |it: &Value| it["metadata"]["deletionTimestamp"].is_string();
                match object.is_some_and(is_going) {
                    true => self.world.terminating_namespaces.insert(name.name.clone()),
                    false => self.world.terminating_namespaces.remove(&name.name),
                };
                let touched = self.world.network_policies.set_namespace(&name.name, object);
                self.reconcile_namespaces(&touched, now);
            }
            // Kinds that have a file of their own, or are only written.
            ResourceKind::EndpointSlice => self.observe_slice(&name, object),
            ResourceKind::DomainMapping => self.observe_mapping(&name, object, now),
            ResourceKind::ClusterDomainClaim => self.observe_claim(&name, object, now),
            ResourceKind::PodAutoscaler => self.observe_autoscaler(name, object),
            ResourceKind::HorizontalPodAutoscaler
            | ResourceKind::ServerlessService
            | ResourceKind::Metric
            | ResourceKind::Image => {}
        }
    }

    /// Changes one app and plans it; an app without any object left is forgotten. Returns true if the app was planned.
    pub(super) fn change_app(
        &mut self,
        name: NamespacedName,
        now: UnixMillis,
        change: impl FnOnce(&mut AppState, &mut ClusterState),
    ) -> bool {
        if self.is_loading {
            // Nothing is planned yet, so no copy is needed to compare: a service may have thousands of pods.
            let mut app = self.world.apps.remove(&name).unwrap_or_default();
            let shape = |app: &AppState| {
                let tags = app.route.as_ref().map_or(0, |it| it.tags().count());
                (app.revisions.len(), app.route.is_some(), tags)
            };
            let before = shape(&app);
            change(&mut app, &mut self.world);
            if shape(&app) != before {
                self.update_owner_exceptions(&name, None, Some(&app));
            }
            self.world.apps.insert(name, app);
            return true;
        }
        let before = self.world.apps.remove(&name).unwrap_or_default();
        let mut app = before.clone();
        change(&mut app, &mut self.world);
        if app == before && app != Box::default() {
            self.world.apps.insert(name, app);
            return false;
        }
        self.update_owner_exceptions(&name, Some(&before), Some(&app));
        self.world.apps.insert(name.clone(), app);
        self.reconcile_app(&name, Some(&before), true, now);
        true
    }

    fn observe_service(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        self.change_app(name, now, |app, world| {
            let config = &world.settings.scale_policy;
            let seen = object.map(|it| observe::read_service(it, config, app.service.as_ref()));
            // After a restart, the conditions that an earlier leader wrote are the starting point.
            if let (None, Some(object)) = (&app.service, object) {
                fields::read_conditions(
                    &mut app.conditions,
                    object,
                    &conditions::SERVICE_CONDITIONS,
                );
            }
            app.service = seen.map(|it| ServiceState {
                manifest: with_interned_template(it.manifest, world),
                ..it
            });
        });
    }

    fn observe_configuration(
        &mut self,
        name: NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        self.change_app(name, now, |app, world| {
            if let (None, Some(object)) = (&app.configuration, object) {
                fields::read_conditions(
                    &mut app.conditions,
                    object,
                    &conditions::CONFIGURATION_CONDITIONS,
                );
            }
            let before = app.configuration.take().filter(|it| it.meta.uid != Uid(0));
            app.configuration =
                object.map(observe::read_configuration).map(|it| ConfigurationState {
                    template: world.template_cache.intern(&it.template),
                    // The world's value is newer than the written one.
                    latest_ready: before.and_then(|it| it.latest_ready).or(it.latest_ready),
                    ..it
                });
        });
    }

    fn observe_route(&mut self, name: NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let mut named = self.remove_route_references(&name);
        if let Some(object) = object {
            named.extend(self.add_route_references(&name, &observe::read_route(object)));
        }
        let own = name.clone();
        self.change_app(name, now, |app, world| {
            let before = app.route.take();
            if let (None, Some(object)) = (&before, object) {
                fields::read_conditions(&mut app.conditions, object, &conditions::ROUTE_CONDITIONS);
            }
            match (object.map(observe::read_route), before) {
                (Some(seen), before) => {
                    // After a restart, the shares that an earlier leader wrote are the starting point.
                    let before = before.unwrap_or_else(|| seen.clone());
                    // The writer reports a write error only once, so the present one is kept.
                    let RouteState { allocations: allotted, blocked_reason: blocked, .. } =
                        before.clone();
                    let route =
                        RouteState { allocations: allotted, blocked_reason: blocked, ..seen };
                    // The leader's values are newer than what it wrote; other replicas follow the object.
                    app.route = Some(match world.is_leader {
                        true => {
                            RouteState { traffic: before.traffic, rollout: before.rollout, ..route }
                        }
                        false => route,
                    });
                    allocate::allocate(app, &own, world);
                }
                (None, Some(before)) => allocate::release_allocations(&before.allocations, world),
                (None, None) => {}
            }
        });
        for other in named {
            self.reconcile_app(&other, None, false, now);
        }
    }

    /// Records the other apps whose Revisions a Route names, and returns them.
    fn add_route_references(
        &mut self,
        name: &NamespacedName,
        route: &RouteState,
    ) -> BTreeSet<NamespacedName> {
        let mut named = BTreeSet::new();
        for target in route.traffic_spec.iter() {
            let configuration = target.configuration_name.as_deref();
            let by_revision = target.revision_name.as_deref().and_then(|revision| {
                self.world.app_of_revision(&NamespacedName::new(name.namespace.clone(), revision))
            });
            let by_name = configuration.map(|it| NamespacedName::new(name.namespace.clone(), it));
            for other in by_revision.into_iter().chain(by_name).filter(|it| it != name) {
                self.world
                    .names
                    .referring_apps
                    .entry(other.clone())
                    .or_default()
                    .insert(name.clone());
                named.insert(other);
            }
        }
        named
    }

    /// Forgets the references of a Route, and returns the apps that it named.
    fn remove_route_references(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        let mut named = BTreeSet::new();
        self.world.names.referring_apps.retain(|other, from| {
            if from.remove(name) {
                named.insert(other.clone());
            }
            !from.is_empty()
        });
        named
    }

    fn observe_revision(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        let owner =
            object.and_then(observe::owning_app).or_else(|| self.world.app_of_revision(name));
        let Some(owner) = owner else { return };
        let Some(object) = object else {
            self.keep_decision(name);
            self.blocking_causes.remove(&(owner.clone(), Some(name.name.as_str().into())));
            self.change_app(owner, now, |app, _| mark_revision_deleted(app, &name.name, now));
            return;
        };
        let early = self.pod_index.without_revision.remove(name).unwrap_or_default();
        let pods: Vec<Box<str>> = early.values().map(|pod| pod.uid.clone()).collect();
        self.change_app(owner, now, |app, world| {
            let mut seen = observe::read_revision(object);
            seen.template = world.template_cache.intern(&seen.template);
            let is_new = app.revision(&seen.name).is_none();
            if let Some(line) = observe::read_decision(object).filter(|_| is_new) {
                world.scaling.explanations.entry(name.clone()).or_insert(line);
            }
            match app.revisions.iter_mut().find(|it| it.name == seen.name) {
                // All other fields are the controller's own, and newer in the world.
                Some(known) if [Uid(0), seen.meta.uid].contains(&known.meta.uid) => {
                    if !world.is_leader {
                        adopt_leader_facts(known, &seen);
                    }
                    (known.meta, known.template) = (seen.meta, seen.template);
                    known.creator = seen.creator;
                    (known.is_terminating, known.is_orphan) = (seen.is_terminating, seen.is_orphan);
                }
                // A new Revision of the name. Decisions go by the name, and pods of the old one finish their requests.
                Some(known) => {
                    known.pods.iter_mut().for_each(|pod| drain_pod(pod, now));
                    let (decided, pods) = (known.decision, std::mem::take(&mut known.pods));
                    *known = AppRevision { decision: decided, pods, ..seen };
                }
                None => app.revisions.push(seen),
            }
            app.revisions
                .sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
            for pod in early.into_values() {
                store_pod(app, &name.name, pod, world.is_leader, now);
            }
            // A new leader must not scale down what runs before the autoscaler decides.
            let mut all = app.revisions.iter_mut();
            all.find(|it| is_new && *it.name == *name.name)
                .into_iter()
                .for_each(keep_running_scale);
        });
        for uid in pods {
            self.apply_unplaced_reports(&uid, now);
        }
    }

    fn observe_deployment(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let key = ObjectPartKey::new(ResourceKind::Deployment, Piece::Object, name.clone());
        let Some((owner, made_for)) = part_keys::owner_revision_of(&self.world, &key) else {
            return;
        };
        let blocked = object.and_then(observe::replica_failure);
        // If Kubernetes scales the Revision, the Deployment's replicas are the desired number of pods.
        let told = object.and_then(|it| it["spec"]["replicas"].as_u64());
        let of = (owner.clone(), Some(made_for.clone()));
        let blocked = self.set_blocking_cause(&of, BlockingCause::Deployment, blocked);
        self.change_app(owner, now, |app, world| {
            let key = NamespacedName::new(name.namespace.clone(), &*made_for);
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| it.name == made_for) else { return };
            revision.blocked_reason = blocked;
            match told.and_then(|it| u32::try_from(it).ok()) {
                Some(told)
                    if TemplateFacts::of_revision(revision, world).class
                        != AutoscalerClass::Kpa =>
                {
                    world.scaling.external_scales.insert(key, told);
                }
                Some(_) | None => drop(world.scaling.external_scales.remove(&key)),
            }
        });
    }

    /// Handles a PodAutoscaler, which owns its HorizontalPodAutoscaler.
    fn observe_autoscaler(&mut self, name: NamespacedName, object: Option<&Value>) {
        let uid = object.filter(|it| observe::is_hpa_class(it));
        let Some(uid) = uid.and_then(|it| it["metadata"]["uid"].as_str()) else {
            self.world.scaling.hpa_owner_uids.remove(&name);
            return;
        };
        if self.world.scaling.hpa_owner_uids.get(&name).is_none_or(|it| **it != *uid) {
            self.world.scaling.hpa_owner_uids.insert(name.clone(), uid.into());
            let key =
                ObjectPartKey::new(ResourceKind::HorizontalPodAutoscaler, Piece::Object, name);
            self.effects.changed_keys.push(key);
        }
    }

    fn observe_pod(&mut self, name: &NamespacedName, object: Option<&Value>, now: UnixMillis) {
        if self.observe_component_pod(name, object, now) {
            return;
        }
        // A kubelet that refused the pod would refuse the next one too, so the node is avoided for a while.
        let refuser = object.and_then(observe::rejecting_node);
        if let Some(node) = refuser.and_then(|it| self.world.nodes.states.get_mut(it)) {
            node.record_rejection(now);
        }
        match object.filter(|it| observe::revision_name_of(it).is_some()).and_then(|it| {
            let owner = observe::owning_app(it)?;
            Some((owner, observe::revision_name_of(it)?.to_owned(), observe::read_pod(it)?))
        }) {
            Some((owner, revision, (pod, status))) => {
                self.pod_index.apps.insert(pod.uid.to_string(), owner.clone());
                self.pod_index.uids.insert(name.clone(), pod.uid.clone());
                let same = self.world.pods.statuses.get(&*pod.uid) == Some(&status);
                self.world.pods.statuses.insert(pod.uid.to_string(), status);
                let known = self.world.apps.get(&owner).and_then(|app| app.revision(&revision));
                if known.is_none() {
                    // Each kind has a watch of its own: the Revision will be observed soon.
                    let made_for = NamespacedName::new(name.namespace.clone(), revision);
                    self.pod_index
                        .without_revision
                        .entry(made_for)
                        .or_default()
                        .insert(name.clone(), pod);
                    return;
                }
                let uid = pod.uid.clone();
                let planned = self.change_app(owner.clone(), now, |app, world| {
                    store_pod(app, &revision, pod, world.is_leader, now);
                });
                if !planned && !same {
                    self.reconcile_app(&owner, None, false, now);
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
        if let Some(status) = self.world.pods.statuses.get_mut(&*uid) {
            status.phase = LocalPodPhase::Removed;
        }
        self.change_app(owner, now, |app, _| {
            for revision in &mut app.revisions {
                revision.pods.retain(|pod| pod.uid != uid);
            }
        });
        self.world.pods.statuses.remove(&*uid);
        self.forget_reports(&uid);
        self.pod_index.apps.remove(&*uid);
    }

    /// Handles a node. A lost node takes its pods away before each is reported, and gives them back when it returns.
    fn observe_node(&mut self, name: &str, object: Option<&Value>, now: UnixMillis) {
        match object.and_then(observe::node_zone) {
            Some(zone) => drop(self.world.nodes.zones.insert(name.to_owned(), zone)),
            None => drop(self.world.nodes.zones.remove(name)),
        }
        let was_away = self.world.is_node_lost(name);
        let before = self.world.nodes.states.remove(name);
        let node = match object {
            Some(object) => Some(NodeState::from_object(object, before.as_ref())),
            // Deleting a lost node does not bring back its pods, so it stays known as lost.
            None if was_away && !self.apps_on_node(name).is_empty() => Some(NodeState::default()),
            None => None,
        };
        self.world.nodes.states.extend(node.map(|node| (name.to_owned(), node)));
        self.handle_node_change(name, was_away, now);
    }

    /// Plans the apps on a node if it became or is no longer [away](ClusterState::is_node_lost); `was_away` is the
    /// former state.
    pub(super) fn handle_node_change(&mut self, name: &str, was_away: bool, now: UnixMillis) {
        if self.world.is_node_lost(name) == was_away {
            return;
        }
        for app in self.apps_on_node(name) {
            self.reconcile_app(&app, None, false, now);
        }
        self.update_node_activators(name);
    }

    /// Returns the apps that have pods on a node.
    fn apps_on_node(&self, node: &str) -> Vec<NamespacedName> {
        let is_on =
            |pod: &RevisionPod| pod.kube_status.as_ref().is_some_and(|it| *it.node == *node);
        let apps = self.world.apps.iter();
        let found = apps.filter(|(_, app)| app.pods().any(|(_, pod)| is_on(pod)));
        found.map(|(name, _)| name.clone()).collect()
    }

    fn observe_placeholder(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let hidden = |world: &ClusterState| {
            world.names.placeholders.get(name).is_some_and(|it| it.is_cluster_local)
        };
        let was_hidden = hidden(&self.world);
        match object.and_then(observe::read_placeholder) {
            Some(seen) => drop(self.world.names.placeholders.insert(name.clone(), seen)),
            None => {
                if self.world.names.placeholders.remove(name).is_none() {
                    return;
                }
            }
        }
        self.world.names.registry.mark_service_changed(name);
        let Some(owner) = self.world.app_of_route_name(name) else { return };
        let own = owner.clone();
        let planned =
            self.change_app(owner, now, |app, world| allocate::allocate(app, &own, world));
        if was_hidden != hidden(&self.world) {
            // The app has no field for it, but its routes and URLs depend on it.
            self.effects.changed_keys.extend(part_keys::status_keys(&own));
            if !planned {
                self.reconcile_app(&own, None, false, now);
            }
        }
    }

    /// Lets all pods follow their annotations, after this replica lost the leadership.
    ///
    /// The last plan may never have been written, and the new leader may plan otherwise. So exactly the pods that are
    /// annotated as draining drain, as on every other replica.
    fn adopt_drain_annotations(&mut self, now: UnixMillis) {
        for name in self.world.apps.keys().cloned().collect::<Vec<_>>() {
            self.change_app(name, now, |app, _| {
                let revisions = app.revisions.iter_mut().filter(|it| !it.is_deleted);
                let pods = revisions.flat_map(|it| &mut it.pods);
                pods.for_each(|pod| adopt_drain_annotation(pod, now));
            });
        }
    }

    /// Handles the gain or loss of the leadership.
    pub(super) fn handle_leadership(&mut self, leads: bool, now: UnixMillis) {
        self.world.is_leader = leads;
        let own = self.world.settings.own_pod_name.clone();
        self.set_chosen_replica(
            ServerComponent::Controller,
            leads.then_some(own).filter(|it| !it.is_empty()),
        );
        if !leads {
            return self.adopt_drain_annotations(now);
        }
        info!(apps = self.world.apps.len(), "leads");
        self.effects
            .config_map_events
            .extend(std::mem::take(&mut self.unrecorded_events).into_values().flatten());
        let names: Vec<NamespacedName> = self.world.apps.keys().cloned().collect();
        for name in names {
            let own = name.clone();
            let planned = self.change_app(name.clone(), now, |app, world| {
                allocate::allocate(app, &own, world);
                app.revisions.iter_mut().for_each(keep_running_scale);
            });
            if !planned {
                self.reconcile_app(&name, None, false, now);
            }
            // Another leader may have left anything unwritten, so every object is checked.
            if let Some(app) = self.world.apps.get(&name) {
                let keys = part_keys::app_keys(&name, app, &self.world);
                self.effects.changed_keys.extend(keys);
                self.effects.apps_to_check.push(name);
            }
        }
        self.reconcile_all_mappings(now);
    }
}

fn with_interned_template(
    mut manifest: crate::model::world::ServiceManifest,
    world: &ClusterState,
) -> crate::model::world::ServiceManifest {
    manifest.template = world.template_cache.intern(&manifest.template);
    manifest
}

/// Keeps the running pods as the desired ones until the autoscaler decides.
fn keep_running_scale(revision: &mut AppRevision) {
    revision.desired_scale = revision.serving_pods();
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
    if let Some(placed) = &mut pod.kube_status {
        placed.is_terminating = true;
    }
    if pod.stage == PodStage::Serving {
        pod.stage = PodStage::Draining { since: now };
    }
}

/// Copies the facts of a Revision that only a leader finds out, or that it may have observed earlier.
fn adopt_leader_facts(known: &mut AppRevision, seen: &AppRevision) {
    known.initial_scale_reached |= seen.initial_scale_reached;
    if known.digests.is_empty() {
        known.digests = seen.digests.clone();
    }
}

/// Stores a pod in its Revision. For a known pod, only the fields that Kubernetes sets are replaced.
///
/// The leader decides which pods drain and annotates them; other replicas follow the annotation.
fn store_pod(
    app: &mut AppState,
    revision: &str,
    mut pod: RevisionPod,
    leads: bool,
    now: UnixMillis,
) {
    let Some(revision) = app.revisions.iter_mut().find(|it| *it.name == *revision) else { return };
    let gone = revision.is_deleted;
    let deleted = pod.is_terminating() || gone;
    match revision.pods.iter_mut().find(|it| it.uid == pod.uid) {
        Some(known) => {
            let was = known.kube_status.as_ref().map(|it| it.kubelet_readiness);
            // A readiness that was once reported and is gone is a lost one, not a first one that is awaited.
            if let (Some(placed), Some(KubeletReadiness::Ready | KubeletReadiness::NoLongerReady)) =
                (&mut pod.kube_status, was)
                && placed.kubelet_readiness == KubeletReadiness::NotYetReady
            {
                placed.kubelet_readiness = KubeletReadiness::NoLongerReady;
            }
            known.kube_status = pod.kube_status;
            if deleted && known.stage == PodStage::Serving {
                known.stage = PodStage::Draining { since: now };
            } else if !leads && !gone {
                adopt_drain_annotation(known, now);
            }
        }
        None => {
            adopt_drain_annotation(&mut pod, now);
            if deleted && pod.stage == PodStage::Serving {
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
    let Some(placed) = &pod.kube_status else { return };
    match (pod.stage, placed.draining_since) {
        (PodStage::Serving, Some(_)) => pod.stage = PodStage::Draining { since: now },
        (PodStage::Draining { .. } | PodStage::Stopping { .. }, None) if !placed.is_terminating => {
            pod.stage = PodStage::Serving;
        }
        (PodStage::Serving | PodStage::Draining { .. } | PodStage::Stopping { .. }, _) => {}
    }
}

#[cfg(test)]
mod tests;
