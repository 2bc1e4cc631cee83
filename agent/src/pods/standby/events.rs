//! Pure: events that the standby of one pod handles, and the actions that follow from them.

use std::time::Duration;

use common::wire::StandbyOrder;

/// Event that concerns one pod's standby.
#[derive(Clone, Debug, PartialEq)]
pub enum StandbyEvent {
    /// The RouteTable has this order for the pod; `None`: the pod runs. A repeated order changes nothing.
    Ordered(Option<StandbyOrder>),
    /// The maps and the pod's processes were read. Each [`StandbyAction::ReadUsage`] is followed by a reading that
    /// began after it. Others may come at any time.
    UsageRead(StandbyUsage),
    /// The kernel saw a new connection or a request while its events were armed.
    PacketSeen,
    /// The pod's processes changed, or its cgroup was frozen or thawed by another program. Without effect while the pod
    /// runs: its own processes may start others, and a program that has frozen it may have a reason.
    ProcessesChanged,
    /// The pod is to stop: a preStop request, a drain, or its removal from the RouteTable.
    StopRequested,
    /// The container was restarted: an earlier [`StandbyEvent::StopRequested`] no longer holds.
    StopWithdrawn,
    /// The freeze with this number ended; a failure as text, for the pod's report. Without effect if the pod was thawed
    /// meanwhile.
    FreezeEnded(u64, Result<(), String>),
    /// Time has passed; carries no other fact.
    Tick,
}

/// Usage of one pod at one moment. Each reading is complete, because a field that was left out would look like no use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StandbyUsage {
    /// True if the pod's readiness has passed, and the kernel's maps hold the pod.
    pub is_ready: bool,
    /// Requests in flight in the pod.
    pub in_flight: u64,
    /// Counted connections that have not carried a request yet. One from an address of the node may turn out to be a
    /// probe's.
    pub unused_connections: u64,
    /// Time since the last activity: the end of a request, or a new counted connection that is not suspected to be a
    /// probe's.
    pub idle: Duration,
    /// True if the pod has processes besides the containers' own, as of `kubectl exec`.
    pub has_sessions: bool,
    /// Open connections of the pod's namespace that do not count, as of probes and `kubectl port-forward`.
    pub other_connections: u64,
}

/// Action that the shell is to perform now, in the order of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyAction {
    /// Let the kernel send an event for each new connection and the next request. The events may be armed already.
    Arm,
    /// Let the kernel send events as for a running pod.
    Disarm,
    /// Read the pod's usage, and pass it in.
    ReadUsage,
    /// Begin to freeze the pod's cgroup, and pass in the end of the freeze with this number. The freeze is requested of
    /// the kernel before the next action is performed, so that it cannot overtake a later thaw.
    Freeze(u64),
    /// Thaw the pod's cgroup. This undoes a freeze under way. The cause is as known now; see
    /// [`StandbyMachine::take_thaw_cause`](super::StandbyMachine::take_thaw_cause).
    Thaw(ThawCause),
    /// Report [`StandbyMachine::report`](super::StandbyMachine::report), which has changed.
    Report,
}

/// Cause of a thaw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThawCause {
    /// A request, or a counted connection that may bring one.
    Request,
    /// A connection that does not count, as of a probe.
    Probe,
    /// A stop of the pod, as the kubelet's preStop request.
    Kubelet,
    /// A withdrawn order, a change of the pod's processes, a failed freeze, unknown usage, or the stop of the agent.
    Other,
}

impl ThawCause {
    /// Returns the cause's name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Probe => "probe",
            Self::Kubelet => "kubelet",
            Self::Other => "other",
        }
    }
}
