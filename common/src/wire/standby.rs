//! Pure: orders that keep pods frozen while nothing uses them, and the reports of agents about such pods.

use std::time::Duration;

/// Order to the agent of a pod's node: freeze the pod while nothing uses it.
///
/// Times are sent in whole milliseconds, and at least one. A time of zero would freeze a pod that has to answer, or
/// would pass over every pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyOrder {
    /// Time without requests after which a pod that a request has thawed is frozen again. The order may stay the same.
    pub quiet_time: Duration,
    /// Longest time that a probe of the kubelet may take. A pod that a probe has thawed is frozen again after it, or as
    /// soon as the probe's connection has closed.
    pub probe_time: Duration,
    /// True if the pod's memory is reclaimed once it is frozen.
    pub reclaims_memory: bool,
    /// Time after a use of the pod in which agents of other nodes and activators wait for a sign of a thaw. Then they
    /// pass the pod over. Where a sender of an earlier release states none,
    /// [`DEFAULT_AGENT_TIMEOUT`](Self::DEFAULT_AGENT_TIMEOUT) counts.
    pub agent_timeout: Duration,
}

impl StandbyOrder {
    /// Value of [`agent_timeout`](Self::agent_timeout) unless an operator sets another.
    pub const DEFAULT_AGENT_TIMEOUT: Duration = Duration::from_millis(250);
}

/// State of a pod with a standby order, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandbyReport {
    /// True while the pod is frozen.
    pub is_frozen: bool,
    /// Memory that the pod holds, in bytes; `None`: the node does not count it.
    pub memory_bytes: Option<u64>,
    /// Reason for which the pod cannot be frozen, for the user; empty: none.
    pub failure: String,
}
