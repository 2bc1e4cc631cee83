//! Pure: facts, events and actions of the pods' state machine.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use common::wire::{self, PodObservation, ReadinessProbe};

use crate::incompatible::Incompatibility;

/// Facts of a pod's network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Cookie of the namespace: the kernel's number for it, unique until reboot.
    pub cookie: u64,
    /// Global addresses of the namespace, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Incompatibility of the pod, if it has one.
    pub incompatibility: Option<Incompatibility>,
}

/// One pod's state in the kernel's maps at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodKernelState {
    /// Listeners on the serving port that other hosts can reach, if the eBPF programs saw them open.
    pub listeners: u32,
    /// Listeners on the serving port that only the pod itself can reach.
    pub loopback_listeners: u32,
    /// Address families of clients that the listeners serve, as `SERVES_*` bits; 0: not known.
    pub served_families: u32,
    /// Time at which the newest listener opened, CLOCK_MONOTONIC in ns.
    pub listener_opened_ns: u64,
    /// Requests in flight in the pod.
    pub in_flight: u64,
    /// Open connections of the pod.
    pub connections: u64,
    /// Open connections that have not carried a request yet.
    pub unused_connections: u64,
    /// Time since a request ended or a connection was established.
    pub idle: Duration,
}

/// A listener that an inspection found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceListener {
    /// Address and port of the listener.
    pub at: SocketAddr,
    /// True if the listener is IPv6-only, as its program asked for the wildcard `::`.
    pub v6_only: bool,
}

/// Result of one inspection of a pod's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSockets {
    /// Listeners of the namespace's processes.
    pub listeners: Vec<NamespaceListener>,
    /// True if rules in the namespace redirect connections.
    pub has_redirection: bool,
}

/// Event that concerns the pods of this node.
#[derive(Clone, Debug)]
pub enum PodTrackerEvent {
    /// The RouteTable names this pod, new or changed.
    RouteUpdated(Box<wire::PodEntry>),
    /// The RouteTable no longer names this pod.
    RouteRemoved(String),
    /// The pod's namespace was found, or changed.
    NamespaceFound(String, NamespaceFacts),
    /// The pod has no namespace of its own, for this reason. If it gets one later, that is found.
    NamespaceMissing(String, Incompatibility),
    /// The kernel's maps hold the pod: its listeners are seen from now on.
    Registered(String),
    /// No pod slot is free for the pod: the maps count as many pods as they can.
    NoFreePodSlot(String),
    /// The pod could not be written to the kernel's maps, with this error.
    RegistrationFailed(String, String),
    /// Ports of the pod that its maps' entries have are not those that it should have now.
    RegistrationOutdated(String),
    /// The maps were read for this pod.
    KernelStateRead(String, PodKernelState),
    /// The maps were read for the ports of this pod besides the one that tells its readiness. The set has those with
    /// a reachable listener that the eBPF programs saw open.
    OpenPortsRead(String, BTreeSet<u16>),
    /// The pod's namespace was inspected at this time (CLOCK_MONOTONIC in ns).
    Inspected(String, NamespaceSockets, u64),
    /// Number of the pod's upgraded connections, counted by a scan that began at this time.
    UpgradedCounted(String, u64, Instant),
    /// The kubelet sent a preStop request for the pod, and waits for the response.
    PreStopRequested(String),
    /// The pod's last process has ended.
    ProcessesEnded(String),
    /// The pod's cgroup has frozen or thawed, or a process has entered it while it was frozen.
    CgroupChanged(String),
    /// The probe attempt with this number ended.
    ProbeEnded(String, u64, Result<(), String>),
    /// Time has passed; carries no other fact.
    Tick,
}

/// Action that the shell is to perform now.
#[derive(Clone, Debug, PartialEq)]
pub enum PodTrackerAction {
    /// Search for the pod's namespace until it is found, and again whenever its processes change.
    FindNamespace(String),
    /// Write the pod into the kernel's maps.
    Register(String, NamespaceFacts),
    /// Delete the pod from the kernel's maps and stop the search for it.
    Unregister(String),
    /// Inspect the pod's namespace for listeners.
    Inspect(String),
    /// Open the pod server, as the pod's own processes listen by now.
    OpenPodServer(String),
    /// Plan the pod's backends again: connects must check other listeners.
    ReplanBackends(String),
    /// Count the pod's upgraded connections.
    CountUpgraded(String),
    /// Make one attempt of the pod's readiness probe.
    StartProbe(PodProbeAttempt),
    /// Respond to the preStop request: the kubelet may stop the pod.
    AllowStop(String),
    /// End the pod's exclusion: a container was restarted, and the pod continues.
    EndExclusion(String),
    /// Report this state of the pod.
    Report(PodObservation),
    /// Report that the pod is gone.
    ReportGone(String),
}

/// One attempt of a pod's readiness probe.
#[derive(Clone, Debug, PartialEq)]
pub struct PodProbeAttempt {
    /// Uid of the pod.
    pub uid: String,
    /// Number of the attempt, repeated in its result.
    pub seq: u64,
    /// Timeout of the attempt.
    pub timeout: Duration,
    /// Address and port to connect to.
    pub at: SocketAddr,
    /// Probe with its handler.
    pub probe: ReadinessProbe,
}
