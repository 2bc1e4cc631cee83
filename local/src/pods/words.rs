//! Pure: what a pod's machine is made of, told and answers.

use std::net::IpAddr;

/// When an ended container is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// After every exit.
    Always,
    /// After an exit with another code than 0.
    OnFailure,
    /// Never.
    Never,
}

/// What a container is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container with `restartPolicy: Always`: the next one starts as soon as it runs.
    Sidecar,
    /// One of the pod's own.
    Main,
}

/// One container as the machine sees it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name in the spec.
    pub name: String,
    /// Image as written.
    pub image: String,
    /// What it is for.
    pub role: Role,
    /// Whether probes of the node tell that it has started and is ready; without any, both come with its process.
    pub is_probed: bool,
}

/// What a container's probes have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// The startup probe has passed, or there is none.
    pub started: bool,
    /// The readiness probe passes, or there is none.
    pub ready: bool,
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code; 128 + signal; −1 when it could not be learnt.
    pub code: i32,
    /// Kubernetes' reason.
    pub reason: String,
    /// Termination message or last lines of the log.
    pub message: String,
}

/// What happened. `at` counts containers, init containers first.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The pod was ordered, or found after a restart of the node.
    Begin,
    /// The network is there.
    Network(Vec<IpAddr>),
    /// It could not be made.
    NoNetwork(String),
    /// An image is unpacked.
    Image {
        /// Which container's.
        at: usize,
        /// Its digest.
        digest: String,
    },
    /// An image cannot be had for now.
    NoImage {
        /// Which container's.
        at: usize,
        /// Kubernetes' reason.
        reason: String,
        /// For people.
        message: String,
    },
    /// A container runs.
    Started {
        /// Which.
        at: usize,
    },
    /// A container could not be started.
    NotStarted {
        /// Which.
        at: usize,
        /// Kubernetes' reason.
        reason: String,
        /// For people.
        message: String,
    },
    /// The probes of a container show something else than before.
    Probed {
        /// Which.
        at: usize,
        /// Its [`restarts`](super::Pod::restarts) then: what an earlier run has shown counts for nothing.
        attempt: u32,
        /// What they show.
        shown: Probed,
    },
    /// A container ended.
    Exited {
        /// Which.
        at: usize,
        /// How.
        exit: Exit,
    },
    /// The pod is no longer ordered.
    Stop,
    /// Nothing of it is left on the node.
    Removed,
    /// Time has passed.
    Tick,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make the network.
    Connect,
    /// Get the image of a container.
    Pull(usize),
    /// Start a container.
    Start(usize),
    /// Ask a container to end.
    Terminate(usize),
    /// End a container.
    Kill(usize),
    /// Take everything away.
    Remove,
}
