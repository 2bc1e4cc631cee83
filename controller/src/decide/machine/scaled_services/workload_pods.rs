//! Pure: pods of a workload as last observed → pods of the Revision that stands for it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use common::wire::NamespacedName;

use super::activator_ports;
use crate::{
    decide::{
        machine::{
            ControllerStateMachine,
            pods::{prepare_pod, update_pod},
        },
        plan::scaled_service::layout,
    },
    model::{
        cluster_state::{
            AppRevision, AppState, ObjectMetaSummary, PodLayout, RevisionPod, RevisionRouting,
            RevisionScaling, RoutingState, ScaledServiceState, UnixMillis, UserService,
            WorkloadBinding,
        },
        object::{ObjectPart, ObjectPartKey, ResourceKind},
    },
};

impl ControllerStateMachine {
    /// Lets the Revision of a scaled Service follow its workload; without one there is no Revision. Returns the UIDs of
    /// pods that the app has got.
    pub(super) fn update_scaled_revision(
        &mut self,
        name: &NamespacedName,
        app: &mut AppState,
        now: UnixMillis,
    ) -> Vec<Box<str>> {
        let AppState { scaled, revisions, .. } = app;
        let Some(scaled) = scaled.as_deref_mut() else { return Vec::new() };
        let at = revisions.iter().position(|it| it.is_scaled_service);
        let (Some(binding), Some(service)) = (&scaled.binding, &scaled.service) else {
            if let Some(at) = at {
                // The Service no longer scales a workload. Its pods belong to the user and go on running.
                self.drop_scaled_revision(name, revisions.remove(at), scaled);
            }
            return Vec::new();
        };
        let timeout_s = self.cluster.settings.config_maps.defaults.timeout_seconds;
        let template = layout::revision_template(binding, service, timeout_s);
        let mut revision = match at {
            Some(at) => revisions.remove(at),
            None => new_revision(name, scaled, binding, service, now),
        };
        revision.template = self.cluster.template_cache.intern(&template);
        let new_pods = self.follow_workload_pods(name, binding, service, &mut revision, now);
        revisions.push(revision);
        activator_ports::update_ports(name, scaled, &mut self.cluster);
        new_pods
    }

    /// Drops the Revision of a Service that scales no workload any more. The pods go on, and new ones may come.
    fn drop_scaled_revision(
        &mut self,
        name: &NamespacedName,
        revision: AppRevision,
        scaled: &mut ScaledServiceState,
    ) {
        activator_ports::release_ports(name, scaled, &mut self.cluster);
        // It is in force until it is withdrawn: the Service may scale a workload again before that.
        let decision = revision.scaling.decision.map(|it| (name.clone(), it));
        self.pending_decisions.extend(decision);
        scaled.restored_conditions = revision.conditions;
        for pod in &revision.pods {
            self.forget_workload_pod(name, pod);
        }
    }

    /// Replaces the pods of the Revision by those of its workload. The stage of each stays, since it is the plan's.
    fn follow_workload_pods(
        &mut self,
        name: &NamespacedName,
        binding: &WorkloadBinding,
        service: &UserService,
        revision: &mut AppRevision,
        now: UnixMillis,
    ) -> Vec<Box<str>> {
        let previous = std::mem::take(&mut revision.pods);
        let mut known: HashMap<Box<str>, RevisionPod> =
            previous.into_iter().map(|it| (it.uid.clone(), it)).collect();
        let is_leader = self.cluster.is_leader;
        let workload = self.cluster.workloads.workload(&binding.key);
        let workload = workload.filter(|it| it.version.uid == binding.uid);
        let mut layouts: BTreeMap<&str, Arc<PodLayout>> = BTreeMap::new();
        let mut new_pods = Vec::new();
        // In the order of their names, which is the same on each replica.
        for (_, observed) in self.cluster.workloads.pods_of(name) {
            let must_drain = observed.pod.is_terminating();
            let mut pod = match known.remove(&observed.pod.uid) {
                Some(mut pod) => {
                    let status = observed.pod.kube_status.clone();
                    update_pod(&mut pod, status, must_drain, !is_leader, now);
                    pod
                }
                None if workload.is_some_and(|it| observed.belongs_to(&binding.key, it)) => {
                    let mut pod = observed.pod.clone();
                    prepare_pod(&mut pod, must_drain, now);
                    self.pod_index.apps.insert(pod.uid.to_string(), name.clone());
                    new_pods.push(pod.uid.clone());
                    pod
                }
                // The selector also matches pods of other owners, which get no requests through Rouse.
                None => continue,
            };
            let new_layout = |shape: &&str| Arc::new(layout::pod_layout(shape, service));
            let layout = layouts.entry(&observed.shape).or_insert_with_key(new_layout);
            pod.layout = Some(Arc::clone(layout));
            let statuses = &mut self.cluster.pods.statuses;
            if statuses.get(&*pod.uid) != Some(&observed.status) {
                statuses.insert(pod.uid.to_string(), observed.status.clone());
            }
            revision.pods.push(pod);
        }
        for gone in known.values() {
            self.forget_workload_pod(name, gone);
        }
        new_pods
    }

    /// Forgets a pod that the app no longer has, unless another scaled Service has it by now.
    fn forget_workload_pod(&mut self, name: &NamespacedName, pod: &RevisionPod) {
        if self.pod_index.apps.get(&*pod.uid) != Some(name) {
            return;
        }
        self.pod_index.apps.remove(&*pod.uid);
        self.forget_ended_pod(&pod.uid);
        self.forget_deleted_nodes();
        // The mark that it drains would stay on a pod that goes on without the Service.
        if pod.kube_status.as_ref().is_some_and(|it| it.draining_since.is_some()) {
            let pod_name = NamespacedName::new(name.namespace.clone(), &*pod.name);
            let key = ObjectPartKey::new(ResourceKind::Pod, ObjectPart::Object, pod_name);
            self.effects.changed_keys.push(key);
        }
    }
}

/// Makes the Revision that stands for a workload. It serves at once: its pods may have run for long.
fn new_revision(
    name: &NamespacedName,
    scaled: &ScaledServiceState,
    binding: &WorkloadBinding,
    service: &UserService,
    now: UnixMillis,
) -> AppRevision {
    let meta = &service.meta;
    AppRevision {
        name: name.name.as_str().into(),
        meta: ObjectMetaSummary { uid: meta.uid, generation: 1, created: meta.created },
        routing: RevisionRouting { state: RoutingState::Active, changed_at: now },
        scaling: RevisionScaling {
            initial_scale_reached: true,
            requested_scale: binding.replicas,
            ..RevisionScaling::default()
        },
        // The workload names its images, which nothing resolves.
        digests: [(Box::default(), Box::default())].into(),
        conditions: scaled.restored_conditions.clone(),
        is_scaled_service: true,
        ..AppRevision::default()
    }
}
