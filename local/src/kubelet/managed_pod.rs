//! Shell: one pod of the local node: its state machine, its pidfds and its images.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::local_node::{LocalPodSpec, PodRunStatus};
use k8s_openapi::api::core::v1::Container;

use super::{EventResource, PreparedPod, SavedPod, saved_state};
use crate::addresses::PodAddress;
use crate::images::UnpackedImage;
use crate::pods::{
    ContainerPlan, ContainerRole, PodEvent, PodStateMachine, ProbeResults, RestartPolicy,
};

/// One pod: its state machine, and the resources that the machine does not know.
pub(super) struct ManagedPod {
    pub(super) pod: PodStateMachine,
    pub(super) prepared: Arc<PreparedPod>,
    /// Time at which the pod's spec was received, or the pod was adopted.
    pub(super) received_at: Instant,
    pub(super) address: Option<PodAddress>,
    /// Pidfd of each running container, by index in `prepared.containers`.
    pub(super) pidfds: Vec<Option<Arc<OwnedFd>>>,
    /// Unpacked image of each container, by the same index.
    pub(super) images: Vec<Option<UnpackedImage>>,
    pub(super) reported_status: Option<PodRunStatus>,
}

impl ManagedPod {
    /// Builds the state machine of a pod from its spec; no process is started.
    pub(super) fn new(pod_spec: LocalPodSpec) -> Self {
        let spec = &pod_spec.spec;
        let restart = match spec.restart_policy.as_deref() {
            Some("Never") => RestartPolicy::Never,
            Some("OnFailure") => RestartPolicy::OnFailure,
            _ => RestartPolicy::Always,
        };
        let grace = spec.termination_grace_period_seconds;
        let grace = grace.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
        // Kubernetes writes a sidecar as an init container that always restarts.
        let init = |container: &Container| match container.restart_policy.as_deref() {
            Some("Always") => ContainerRole::Sidecar,
            _ => ContainerRole::Init,
        };
        let inits =
            spec.init_containers.iter().flatten().map(|container| (container, init(container)));
        let containers =
            inits.chain(spec.containers.iter().map(|container| (container, ContainerRole::Main)));
        let runs_readiness_probes = pod_spec.kubelet_probes;
        let plans = containers.clone().map(|(container, role)| ContainerPlan {
            name: container.name.clone(),
            role,
            is_probed: container.startup_probe.is_some()
                || (runs_readiness_probes && container.readiness_probe.is_some()),
        });
        let pod = PodStateMachine::new(restart, grace, plans.collect());
        let containers: Vec<Container> =
            containers.map(|(container, _)| container.clone()).collect();
        let count = containers.len();
        let prepared = Arc::new(PreparedPod { pod_spec, containers });
        Self {
            pod,
            prepared,
            received_at: Instant::now(),
            address: None,
            pidfds: vec![None; count],
            images: vec![None; count],
            reported_status: None,
        }
    }

    /// Keeps the resource that came with an event.
    pub(super) fn store_resource(&mut self, event: &PodEvent, resource: EventResource) {
        match (event, resource) {
            (_, EventResource::Address(address)) => self.address = Some(address),
            (PodEvent::ImageReady { index, .. }, EventResource::Image(image)) => {
                self.images[*index] = Some(image)
            }
            (PodEvent::Started { index }, EventResource::Process(fd)) => {
                self.pidfds[*index] = Some(fd)
            }
            (PodEvent::Exited { index, .. }, _) => self.pidfds[*index] = None,
            _ => {}
        }
    }

    /// Returns the restarts of all containers, init containers first.
    pub(super) fn restart_counts(&self) -> Vec<u32> {
        (0..self.prepared.containers.len()).map(|index| self.pod.restarts(index)).collect()
    }

    /// Returns the state to be written to disk.
    pub(super) fn to_saved(&self) -> SavedPod {
        let save_container = |index| {
            let ProbeResults { started, ready } = self.pod.probe_results(index);
            saved_state::SavedContainer {
                restarts: self.pod.restarts(index),
                started,
                ready,
                last_exit: self.pod.waiting_exit(index),
                exit: self.pod.final_exit(index).cloned(),
            }
        };
        let containers = (0..self.prepared.containers.len()).map(save_container);
        SavedPod {
            pod_spec: self.prepared.pod_spec.clone(),
            address: self.address,
            containers: containers.collect(),
        }
    }

    /// Returns the status to be reported to the controller.
    pub(super) fn status(&self) -> PodRunStatus {
        PodRunStatus {
            uid: self.prepared.pod_spec.uid.clone(),
            phase: self.pod.phase(),
            addresses: self.pod.addresses().to_vec(),
            containers: self.pod.container_statuses(),
            ready: self.pod.is_ready(),
        }
    }
}
