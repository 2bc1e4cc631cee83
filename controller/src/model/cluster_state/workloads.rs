//! Pure: workloads and pods of users, indexed by the scaled Services that select them.
//!
//! They are observed only while a scaled Service exists, and then all of them: a Service may be added or may change its
//! selector later. A namespace may have thousands of Services and pods, so no event may look at all of both.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use common::{local_node::PodRunStatus, wire::NamespacedName};
use smol_str::SmolStr;

use super::{CompactStringMap, RevisionPod};
use crate::model::object::{ReplicaRecord, ResourceKind, WorkloadVersion};

mod selectors;

use selectors::SelectorIndex;

/// Kind of a workload that a scaled Service may scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    /// Kind `Deployment`, whose pods belong to its ReplicaSets.
    Deployment,
    /// Kind `StatefulSet`, whose pods are numbered.
    StatefulSet,
}

impl WorkloadKind {
    /// Returns the kind of workload that objects of this kind are.
    pub fn from_resource(resource: ResourceKind) -> Option<Self> {
        match resource {
            ResourceKind::Deployment => Some(Self::Deployment),
            ResourceKind::StatefulSet => Some(Self::StatefulSet),
            _ => None,
        }
    }

    /// Returns the kind of the object.
    pub fn resource(self) -> ResourceKind {
        match self {
            Self::Deployment => ResourceKind::Deployment,
            Self::StatefulSet => ResourceKind::StatefulSet,
        }
    }
}

/// Kind and name of a workload.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadKey {
    /// Namespace and name of the workload.
    pub name: NamespacedName,
    /// Kind of the workload.
    pub kind: WorkloadKind,
}

impl std::fmt::Display for WorkloadKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} {:?}", self.kind.resource().kind(), self.name.name.as_str())
    }
}

/// A workload as the API server holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadState {
    /// UID and version of the object.
    pub version: WorkloadVersion,
    /// Number of pods that the workload requests.
    pub replicas: u32,
    /// Record of the controller's last write of this number; `None`: it has not written any.
    pub record: Option<ReplicaRecord>,
    /// Number of the first pod of a StatefulSet.
    pub first_ordinal: u32,
    /// Labels of the workload's new pods.
    pub template_labels: CompactStringMap,
    /// Containers of the workload's new pods.
    pub shape: Arc<str>,
    /// True if the pods share the network of their node.
    pub uses_host_network: bool,
    /// True if Kubernetes deletes the volumes of a pod when the number of pods falls below it.
    pub deletes_volumes: bool,
    /// True once the workload is being deleted.
    pub is_terminating: bool,
}

impl WorkloadState {
    /// Returns true if the controller has written the present number.
    pub fn is_own_number(&self) -> bool {
        self.record.is_some_and(|it| it.scaled_to == self.replicas)
    }

    /// Returns the number of pods that the user wants while the workload is awake, at least 1. It is the last number
    /// above 0 that another client has written.
    pub fn user_replicas(&self) -> u32 {
        match self.record {
            Some(record) if self.is_own_number() || self.replicas == 0 => record.user_replicas,
            _ => self.replicas.max(1),
        }
    }
}

/// A pod that may belong to the workload of a scaled Service.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadPod {
    /// The pod, as a Revision has it.
    pub pod: RevisionPod,
    /// Status of the pod's containers.
    pub status: PodRunStatus,
    /// Labels of the pod.
    pub labels: CompactStringMap,
    /// Controller of the pod, if it has one.
    pub owner: Option<PodOwner>,
    /// Containers of the pod.
    pub shape: Arc<str>,
}

/// Label of a pod by which its ReplicaSet is distinguished from the others of its Deployment.
const TEMPLATE_HASH_LABEL: &str = "pod-template-hash";

impl WorkloadPod {
    /// Returns true if the pod belongs to this workload.
    pub fn belongs_to(&self, key: &WorkloadKey, workload: &WorkloadState) -> bool {
        let Some(owner) = &self.owner else { return false };
        match key.kind {
            WorkloadKind::StatefulSet => {
                *owner.kind == *"StatefulSet" && owner.uid == workload.version.uid
            }
            // ReplicaSets are not watched: their names consist of the Deployment's name and the hash of the template.
            WorkloadKind::Deployment => {
                let hash = self.labels.get(TEMPLATE_HASH_LABEL);
                let name = hash.and_then(|it| owner.name.strip_suffix(it)?.strip_suffix('-'));
                *owner.kind == *"ReplicaSet" && name == Some(key.name.name.as_str())
            }
        }
    }
}

/// Controller of a pod, by its owner reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOwner {
    /// Kind of the object, such as `ReplicaSet`.
    pub kind: Box<str>,
    /// Name of the object, in the namespace of the pod.
    pub name: Box<str>,
    /// UID of the object.
    pub uid: Box<str>,
}

/// A HorizontalPodAutoscaler of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserAutoscaler {
    /// Workload that it scales.
    pub target: WorkloadKey,
    /// Lower bound of pods, at least 1.
    pub min_replicas: u32,
}

/// Workloads and pods that the selector of one scaled Service matches.
#[derive(Clone, Debug, Default)]
struct SelectedObjects {
    workloads: BTreeSet<WorkloadKey>,
    /// Names of pods, in the namespace of the Service.
    pods: BTreeSet<SmolStr>,
}

/// All workloads, pods and HorizontalPodAutoscalers of users, as last observed.
#[derive(Clone, Debug, Default)]
pub struct ObservedWorkloads {
    /// True once all that existed at the first lists have been observed. Before, an absence means nothing.
    pub are_listed: bool,
    workloads: BTreeMap<WorkloadKey, WorkloadState>,
    /// Pods by name. Boxed, since there may be many, and half of a tree's slots are empty.
    pods: BTreeMap<NamespacedName, Box<WorkloadPod>>,
    autoscalers: BTreeMap<NamespacedName, UserAutoscaler>,
    /// Containers in use. Nearly all pods of a workload have equal ones, and share the text.
    shapes: BTreeSet<Arc<str>>,
    selectors: SelectorIndex,
    selected: BTreeMap<NamespacedName, SelectedObjects>,
    /// Scaled Services that scale a workload now.
    holders: BTreeMap<WorkloadKey, NamespacedName>,
}

impl ObservedWorkloads {
    /// Sets the selector of a scaled Service; `None`: there is no such Service any more, or it has none.
    pub fn set_selector(&mut self, service: &NamespacedName, selector: Option<&CompactStringMap>) {
        let selector = selector.filter(|it| !it.is_empty());
        if self.selectors.get(service) == selector {
            return;
        }
        self.selectors.set(service, selector.cloned());
        let Some(selector) = selector else {
            self.selected.remove(service);
            return;
        };
        // A new selector is the only change that reads all objects of the namespace.
        let workloads = workloads_in(&self.workloads, &service.namespace)
            .filter(|(_, it)| selector.is_subset_of(&it.template_labels))
            .map(|(key, _)| key.clone());
        let pods = objects_in(&self.pods, &service.namespace)
            .filter(|(_, it)| selector.is_subset_of(&it.labels))
            .map(|(name, _)| name.name.clone());
        let selected = SelectedObjects { workloads: workloads.collect(), pods: pods.collect() };
        self.selected.insert(service.clone(), selected);
    }

    /// Sets or, with `None`, removes a workload. Returns the scaled Services that this may concern.
    pub fn set_workload(
        &mut self,
        key: &WorkloadKey,
        state: Option<WorkloadState>,
    ) -> BTreeSet<NamespacedName> {
        let state = state.map(|it| WorkloadState { shape: self.share_shape(it.shape), ..it });
        let labels = state.as_ref().map(|it| it.template_labels.clone());
        let previous = match state {
            Some(state) => self.workloads.insert(key.clone(), state),
            None => self.workloads.remove(key),
        };
        let before = previous.map(|it| it.template_labels);
        let select = |it: &mut SelectedObjects, is_selected: bool| match is_selected {
            true => it.workloads.insert(key.clone()),
            false => it.workloads.remove(key),
        };
        let mut concerned =
            self.update_selected(&key.name.namespace, before.as_ref(), labels.as_ref(), select);
        // Its present Service too, whose selector may not match the new labels.
        concerned.extend(self.holders.get(key).cloned());
        concerned
    }

    /// Sets or, with `None`, removes a pod. Returns the scaled Services that select it, or did before.
    pub fn set_pod(
        &mut self,
        name: &NamespacedName,
        pod: Option<WorkloadPod>,
    ) -> BTreeSet<NamespacedName> {
        let pod = pod.map(|it| WorkloadPod { shape: self.share_shape(it.shape), ..it });
        let labels = pod.as_ref().map(|it| it.labels.clone());
        let previous = match pod {
            Some(pod) => self.pods.insert(name.clone(), Box::new(pod)),
            None => self.pods.remove(name),
        };
        let before = previous.map(|it| it.labels);
        self.update_selected(
            &name.namespace,
            before.as_ref(),
            labels.as_ref(),
            |it, is_selected| match is_selected {
                true => it.pods.insert(name.name.clone()),
                false => it.pods.remove(&name.name),
            },
        )
    }

    /// Updates what the scaled Services of a namespace select, for an object with the labels `before` and `after`.
    /// `select` adds it to what a Service selects, or removes it. Returns the Services that select it, or did before.
    fn update_selected(
        &mut self,
        namespace: &SmolStr,
        before: Option<&CompactStringMap>,
        after: Option<&CompactStringMap>,
        select: impl Fn(&mut SelectedObjects, bool) -> bool,
    ) -> BTreeSet<NamespacedName> {
        let matching = |labels: Option<&CompactStringMap>| {
            labels.map(|it| self.selectors.matching(namespace, it)).unwrap_or_default()
        };
        let selecting = matching(after);
        let concerned: BTreeSet<NamespacedName> = &matching(before) | &selecting;
        for service in &concerned {
            // Called for Services that select the object no longer, too, so that they lose it.
            let selected = self.selected.entry(service.clone()).or_default();
            let _changed = select(selected, selecting.contains(service));
        }
        concerned
    }

    /// Sets or, with `None`, removes a HorizontalPodAutoscaler. Returns the scaled Services that this concerns.
    pub fn set_autoscaler(
        &mut self,
        name: &NamespacedName,
        autoscaler: Option<UserAutoscaler>,
    ) -> BTreeSet<NamespacedName> {
        let previous = match autoscaler {
            Some(autoscaler) => self.autoscalers.insert(name.clone(), autoscaler),
            None => self.autoscalers.remove(name),
        };
        let after = self.autoscalers.get(name);
        let targets = previous.iter().chain(after).map(|it| &it.target);
        targets.filter_map(|it| self.holders.get(it).cloned()).collect()
    }

    /// Returns a workload, if it exists.
    pub fn workload(&self, key: &WorkloadKey) -> Option<&WorkloadState> {
        self.workloads.get(key)
    }

    /// Returns a pod, if it exists.
    pub fn pod(&self, name: &NamespacedName) -> Option<&WorkloadPod> {
        self.pods.get(name).map(|it| &**it)
    }

    /// Returns the HorizontalPodAutoscaler of a workload; of several the first by name.
    pub fn autoscaler_of(&self, key: &WorkloadKey) -> Option<&UserAutoscaler> {
        let mut all = objects_in(&self.autoscalers, &key.name.namespace);
        all.find(|(_, it)| it.target == *key).map(|(_, it)| it)
    }

    /// Iterates over the workloads that a scaled Service selects.
    pub fn workloads_of(
        &self,
        service: &NamespacedName,
    ) -> impl Iterator<Item = (&WorkloadKey, &WorkloadState)> {
        let keys = self.selected.get(service).into_iter().flat_map(|it| &it.workloads);
        keys.filter_map(move |key| self.workloads.get_key_value(key))
    }

    /// Iterates over the pods that a scaled Service selects.
    pub fn pods_of(
        &self,
        service: &NamespacedName,
    ) -> impl Iterator<Item = (&NamespacedName, &WorkloadPod)> {
        let namespace = service.namespace.clone();
        let names = self.selected.get(service).into_iter().flat_map(|it| &it.pods);
        names.filter_map(move |name| {
            let name = NamespacedName::new(namespace.clone(), name.clone());
            self.pods.get_key_value(&name).map(|(name, pod)| (name, &**pod))
        })
    }

    /// Returns the scaled Services that select a workload.
    pub fn services_of(&self, key: &WorkloadKey) -> BTreeSet<NamespacedName> {
        let Some(workload) = self.workloads.get(key) else { return BTreeSet::new() };
        self.selectors.matching(&key.name.namespace, &workload.template_labels)
    }

    /// Returns the scaled Service that scales a workload now.
    pub fn holder(&self, key: &WorkloadKey) -> Option<&NamespacedName> {
        self.holders.get(key)
    }

    /// Records the workload that a scaled Service scales from now on; `None`: it scales none.
    pub fn set_held(&mut self, service: &NamespacedName, workload: Option<&WorkloadKey>) {
        self.holders.retain(|key, holder| *holder != *service || Some(key) == workload);
        if let Some(workload) = workload {
            self.holders.insert(workload.clone(), service.clone());
        }
    }

    /// Returns true if the controller has scaled the workload, and no scaled Service scales it now: it is to be given
    /// back to its user.
    pub fn is_abandoned(&self, key: &WorkloadKey) -> bool {
        let is_recorded = self.workloads.get(key).is_some_and(|it| it.record.is_some());
        self.are_listed && is_recorded && !self.holders.contains_key(key)
    }

    /// Iterates over the workloads that are to be given back to their users.
    pub fn abandoned(&self) -> impl Iterator<Item = &WorkloadKey> {
        self.workloads.keys().filter(move |it| self.is_abandoned(it))
    }

    /// Returns the stored text of equal containers, which all that have them share.
    fn share_shape(&mut self, shape: Arc<str>) -> Arc<str> {
        if let Some(stored) = self.shapes.get(&shape) {
            return Arc::clone(stored);
        }
        // Seldom, since each search looks at all texts: those out of use are at most as many as the objects.
        if self.shapes.len() > 2 * (self.workloads.len() + self.pods.len()) {
            self.shapes.retain(|it| Arc::strong_count(it) > 1);
        }
        self.shapes.insert(Arc::clone(&shape));
        shape
    }
}

/// Iterates over the objects of a namespace.
fn objects_in<'a, T>(
    all: &'a BTreeMap<NamespacedName, T>,
    namespace: &SmolStr,
) -> impl Iterator<Item = (&'a NamespacedName, &'a T)> + use<'a, T> {
    let namespace = namespace.clone();
    let from = NamespacedName::new(namespace.clone(), "");
    all.range(from..).take_while(move |(name, _)| name.namespace == namespace)
}

/// Iterates over the workloads of a namespace.
fn workloads_in<'a>(
    all: &'a BTreeMap<WorkloadKey, WorkloadState>,
    namespace: &SmolStr,
) -> impl Iterator<Item = (&'a WorkloadKey, &'a WorkloadState)> + use<'a> {
    let namespace = namespace.clone();
    let name = NamespacedName::new(namespace.clone(), "");
    let from = WorkloadKey { name, kind: WorkloadKind::Deployment };
    all.range(from..).take_while(move |(key, _)| key.name.namespace == namespace)
}

#[cfg(test)]
mod tests;
