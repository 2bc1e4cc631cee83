//! Pure: types of a pod's state machine: containers, events, actions.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Restart policy of a pod: the exits after which a container starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Restart after every exit.
    Always,
    /// Restart after an exit with a code other than 0.
    OnFailure,
    /// No restart after any exit.
    Never,
}

/// Role of a container in the sequence of starts and stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerRole {
    /// Init container: runs to its end before the next one starts.
    Init,
    /// Init container with `restartPolicy: Always`: the next one starts as soon as this one has started.
    Sidecar,
    /// Main container, from the spec's `containers`.
    Main,
}

/// One container as the state machine sees it.
#[derive(Clone, Debug)]
pub struct ContainerPlan {
    /// Container name in the pod spec.
    pub name: String,
    /// Role in the sequence of starts and stops.
    pub role: ContainerRole,
    /// True if the node's probes decide that it has started and is ready; otherwise its running process shows both.
    pub is_probed: bool,
}

/// Results of a container's probes in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeResults {
    /// True if the startup probe has passed, or there is none.
    pub started: bool,
    /// True if the readiness probe passes, or there is none.
    pub ready: bool,
}

/// Run of a container that was under way or over when the node's process started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdoptedRun {
    /// The container was not started, or waited for its next start.
    Waiting {
        /// Exit code of the run before, by which the next start counts as a restart; `None` without an earlier run.
        last_exit: Option<i32>,
    },
    /// The process still runs, or ended while no process of the node ran. The results are from before.
    Running(ProbeResults),
    /// The container has ended and does not start again.
    Ended(ContainerExit),
}

/// Exit of a container, as Kubernetes' `terminated` state shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerExit {
    /// Exit code; 128 + signal after a signal; −1 if the kernel did not report it.
    pub code: i32,
    /// Reason as in Kubernetes: `Completed`, `Error`, `OOMKilled`, or that of a failed start.
    pub reason: String,
    /// Termination message, or the last lines of the log.
    pub message: String,
}

/// Event for a pod's state machine. `index` is that of a container, init containers first.
#[derive(Clone, Debug, PartialEq)]
pub enum PodEvent {
    /// The node spec contains the pod, or it was found again after a restart of the node.
    Begin,
    /// The network is ready, with these addresses.
    NetworkReady(Vec<IpAddr>),
    /// The network could not be made, for this cause.
    NetworkFailed(String),
    /// An image is unpacked on this node.
    ImageReady {
        /// Index of the container that needs it.
        index: usize,
        /// Digest of the image, `sha256:…`.
        digest: String,
    },
    /// An image is not available for now; the pull is tried again.
    ImageFailed {
        /// Index of the container that needs it.
        index: usize,
        /// Reason as in Kubernetes: `ImagePullBackOff`, `ErrImageNeverPull`, ….
        reason: String,
        /// Cause as text for the container's status.
        message: String,
    },
    /// The process of a container runs.
    Started {
        /// Index of the container that runs.
        index: usize,
    },
    /// A container could not be started.
    StartFailed {
        /// Index of the container concerned.
        index: usize,
        /// Reason as in Kubernetes: `CreateContainerError`, `RunContainerError`, ….
        reason: String,
        /// Cause as text for the container's status.
        message: String,
    },
    /// The probe results of a container have changed.
    ProbesChanged {
        /// Index of the container that was probed.
        index: usize,
        /// Number of [`restarts`](super::PodStateMachine::restarts) when the probed run began. Results of an earlier
        /// run are ignored.
        restarts: u32,
        /// Probe results from now on.
        results: ProbeResults,
    },
    /// The process of a container ended.
    Exited {
        /// Index of the container that ended.
        index: usize,
        /// Exit code, reason and message.
        exit: ContainerExit,
    },
    /// The node spec no longer contains the pod.
    Stop,
    /// Everything of the pod is removed from the node.
    Removed,
    /// A time has come that [`next_tick_at`](super::PodStateMachine::next_tick_at) returned.
    Tick,
}

/// Action that the kubelet carries out for a pod; numbers are indexes of containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodAction {
    /// Make the pod's network and publish its namespace.
    CreateNetwork,
    /// Pull or find the image of a container.
    Pull(usize),
    /// Start the process of a container.
    Start(usize),
    /// Send a container its stop signal, SIGTERM by default.
    Terminate(usize),
    /// Kill every process of a container.
    Kill(usize),
    /// Remove network, cgroups and files of the pod.
    Remove,
}
