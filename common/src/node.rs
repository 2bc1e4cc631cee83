//! Pure: what the controller asks of the local node, and what the node tells it.
//!
//! On Kubernetes the API server stands in this place; the local node is told pod by pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;

use crate::wire::Name;

/// One pod that should exist on the local node.
#[derive(Clone, Debug, PartialEq)]
pub struct PodOrder {
    /// Unique for ever; names the pod's cgroup, network namespace and folder.
    pub uid: String,
    /// Name within the revision's namespace, as `kubectl get pods` would show it.
    pub name: String,
    /// The revision it serves.
    pub revision: Name,
    /// What to run. Defaults are filled in and every field was checked by the controller.
    pub spec: PodSpec,
    /// Labels, for `rouse get pods`.
    pub labels: BTreeMap<String, String>,
    /// Whether the node runs the readiness probes, since the agent cannot run all that counts.
    pub kubelet_probes: bool,
}

/// Every pod that should exist. Pods not named are stopped, with their termination grace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Orders {
    /// The pods, by uid.
    pub pods: BTreeMap<String, PodOrder>,
    /// ClusterIPs of every service and tag service, for `NAME.NAMESPACE.svc.cluster.local`.
    pub names: BTreeMap<Name, Vec<std::net::IpAddr>>,
}

/// How one pod fares on the local node.
#[derive(Clone, Debug, PartialEq)]
pub struct PodStatus {
    /// The order this answers.
    pub uid: String,
    /// Where the pod stands.
    pub phase: PodPhase,
    /// Its addresses, IPv4 first; empty until its network exists.
    pub addresses: Vec<std::net::IpAddr>,
    /// Containers, in the order of the spec.
    pub containers: Vec<ContainerStatus>,
    /// Whether all containers run and have passed the probes that the node runs.
    pub ready: bool,
}

/// Where a pod stands. Kubernetes' pod phases, with stopping told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPhase {
    /// Accepted; image, network or containers are still being made.
    Pending,
    /// All containers were started once.
    Running,
    /// SIGTERM was sent; it leaves within its grace period.
    Terminating,
    /// Every process is gone and nothing of the pod is left on the node.
    Gone,
}

/// How one container fares.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerStatus {
    /// Name in the spec.
    pub name: String,
    /// What it is doing.
    pub state: ContainerState,
    /// How often it was started again after an exit.
    pub restarts: u32,
    /// Digest of the image that runs (`sha256:…`), once known.
    pub image_digest: Option<String>,
}

/// What one container is doing. Reasons are Kubernetes' own words (`ImagePullBackOff`, `CrashLoopBackOff`, …).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Not running yet, or between two attempts.
    Waiting {
        /// Kubernetes' reason.
        reason: String,
        /// One line for people: what is wrong and what to do.
        message: String,
        /// Exit code of the attempt before, when there was one.
        last_exit: Option<i32>,
    },
    /// Its process runs.
    Running,
    /// It ended and is not started again.
    Terminated {
        /// Exit code; 128 + signal for a signal; −1 when it could not be learnt.
        code: i32,
        /// Kubernetes' reason (`Completed`, `Error`, `OOMKilled`).
        reason: String,
        /// Last lines of its log or its termination message.
        message: String,
    },
}
