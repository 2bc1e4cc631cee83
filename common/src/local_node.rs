//! Pure: pods that the controller wants on the local node, and the status that the node reports.
//!
//! On Kubernetes, pods and their status are objects of the API server.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;

use crate::wire::NamespacedName;

/// Pod that should exist on the local node.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalPodSpec {
    /// Unique identifier, never reused; names the pod's cgroup, network namespace and folder.
    pub uid: String,
    /// Name within the Revision's namespace, as `kubectl get pods` would show it.
    pub name: String,
    /// Revision that the pod serves.
    pub revision: NamespacedName,
    /// Containers and volumes to run. The controller has filled in defaults and checked every field.
    pub spec: PodSpec,
    /// Labels that `rouse get pods` shows.
    pub labels: BTreeMap<String, String>,
    /// True if the node runs the readiness probes: the agent can run none of type `exec`, and none of other containers
    /// than the serving one.
    pub kubelet_probes: bool,
}

/// Complete set of pods that should exist. The node stops all others within their termination grace period.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LocalNodeSpec {
    /// Pods to run, by uid.
    pub pods: BTreeMap<String, LocalPodSpec>,
    /// ClusterIPs of every service and tag service, resolved as `NAME.NAMESPACE.svc.cluster.local`.
    pub dns_names: BTreeMap<NamespacedName, Vec<std::net::IpAddr>>,
}

/// Status of one pod on the local node.
#[derive(Clone, Debug, PartialEq)]
pub struct PodRunStatus {
    /// Uid of the [`LocalPodSpec`] that this status is of.
    pub uid: String,
    /// Current phase of the pod.
    pub phase: PodRunPhase,
    /// Addresses of the pod, IPv4 first; empty until its network exists.
    pub addresses: Vec<std::net::IpAddr>,
    /// Status of the containers, in the order of the spec.
    pub containers: Vec<LocalContainerStatus>,
    /// True if all containers run and have passed the probes that the node runs.
    pub ready: bool,
}

/// Phase of a pod: Kubernetes' pod phases, with termination as a phase of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRunPhase {
    /// Accepted; its image, network or containers are still being set up.
    Pending,
    /// Every container has been started at least once.
    Running,
    /// SIGTERM was sent; the pod ends within its grace period.
    Terminating,
    /// Every process has ended and no resource of the pod is left on the node.
    Removed,
}

/// Status of one container of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalContainerStatus {
    /// Name of the container in the pod's spec.
    pub name: String,
    /// Current state: waiting, running or terminated.
    pub state: ContainerRunState,
    /// Number of restarts after an exit.
    pub restarts: u32,
    /// Digest of the image that runs (`sha256:…`), as soon as it is known.
    pub image_digest: Option<String>,
}

/// State of one container. Reasons use Kubernetes' names (`ImagePullBackOff`, `CrashLoopBackOff`, …).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerRunState {
    /// Not running yet, or between two attempts.
    Waiting {
        /// Reason in Kubernetes' vocabulary, such as `ImagePullBackOff`.
        reason: String,
        /// One line for the user: the error and its remedy.
        message: String,
        /// Exit code of the previous attempt, if there was one.
        last_exit: Option<i32>,
    },
    /// The container's process runs.
    Running,
    /// The container ended and is not started again.
    Terminated {
        /// Exit code; 128 + signal for a signal; −1 when it could not be read.
        code: i32,
        /// Reason in Kubernetes' vocabulary (`Completed`, `Error`, `OOMKilled`).
        reason: String,
        /// Termination message, or the last lines of the container's log.
        message: String,
    },
}
