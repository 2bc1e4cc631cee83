//! Pure: the two messages of scaling: UsageReport and ScaleDecision.

use std::{net::IpAddr, time::Duration};

use super::{ComponentReplica, ConnectionPath, NamespacedName};

// --- UsageReport ----------------------------------------------------------------------------------------

/// One item of a UsageReport stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum UsageItem {
    /// Replica that sends the report.
    Sender(ComponentReplica),
    /// Totals of one subject at one moment.
    Sample(UsageSample),
    /// The subject no longer exists; its last totals count up to now.
    Removed(UsageKey),
    /// The sender has named every subject.
    Synced,
}

/// Subject of a usage sample: a pod, or (without pod) the sender's wait queue of a Revision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageKey {
    /// Revision that the requests belong to.
    pub revision: NamespacedName,
    /// Uid of the pod; `None`: the sender's own wait queue.
    pub pod: Option<String>,
}

/// Running totals of one subject at one moment. Every total only grows; the receiver subtracts.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageSample {
    /// Subject that the totals belong to.
    pub key: UsageKey,
    /// Time of the reading, in ns of the sender's clock.
    pub read_at_ns: u64,
    /// Totals of requests since the subject began.
    pub totals: RequestTotals,
    /// Responses by class: 1xx, 2xx, 3xx, 4xx, 5xx; empty for a wait queue.
    pub status: Vec<u64>,
    /// Responses by latency bucket, with the bounds of `abi::LATENCY_BOUNDS_US`; empty for a wait queue.
    pub latency: Vec<u64>,
    /// Address of the client whose request began to wait first, of a wait queue with requests; `None`: not known.
    pub client: Option<IpAddr>,
}

/// Running totals from which the requests in flight and their average over any window follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTotals {
    /// Requests that have begun.
    pub started: u64,
    /// Requests that have ended.
    pub finished: u64,
    /// Sum of the times at which requests began, in ns, wrapping.
    pub started_sum_ns: u64,
    /// Sum of the times at which requests ended, in ns, wrapping.
    pub finished_sum_ns: u64,
    /// Ended requests that waited and got no pod, because the client left or the wait took too long. 0 from older
    /// senders.
    pub abandoned: u64,
}

impl RequestTotals {
    /// Records the begin of one request at `now_ns`.
    pub fn record_start(&mut self, now_ns: u64) {
        self.started += 1;
        self.started_sum_ns = self.started_sum_ns.wrapping_add(now_ns);
    }

    /// Records the end of one request at `now_ns`.
    pub fn record_finish(&mut self, now_ns: u64) {
        self.finished += 1;
        self.finished_sum_ns = self.finished_sum_ns.wrapping_add(now_ns);
    }

    /// Records the end of all requests in flight at `now_ns`.
    pub fn finish_all(&mut self, now_ns: u64) {
        let ended = self.in_flight();
        self.finished += ended;
        self.finished_sum_ns = self.finished_sum_ns.wrapping_add(ended.wrapping_mul(now_ns));
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.started.saturating_sub(self.finished)
    }

    /// Returns the request-nanoseconds spent up to `now_ns`, wrapping: `(started − finished)·now − Σstart + Σfinish`.
    ///
    /// The average in flight over a window is the difference of two such values over the window's length. Example: one
    /// request from 10 to 30, read at 50: `0·50 − 10 + 30 = 20`.
    pub fn in_flight_integral(&self, now_ns: u64) -> u64 {
        // Each term may wrap: only differences of two results are used, and those are small again.
        let in_flight = self.started.wrapping_sub(self.finished);
        in_flight
            .wrapping_mul(now_ns)
            .wrapping_sub(self.started_sum_ns)
            .wrapping_add(self.finished_sum_ns)
    }
}

// --- ScaleDecision --------------------------------------------------------------------------------------

/// One item of a ScaleDecision stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum ScaleItem {
    /// Autoscaler that sends the decisions.
    Sender(ComponentReplica),
    /// Time since which the sender has received usage, in ms since 1970. Only controllers of earlier releases use it,
    /// since clocks of different hosts differ.
    Since(u64),
    /// Heartbeat, sent several times a second.
    Heartbeat(AutoscalerHeartbeat),
    /// Decision for one Revision.
    Decision(ScaleDecision),
    /// The decision on the Revision is withdrawn: the Revision sleeps without pods, or no longer exists.
    Removed(NamespacedName),
    /// The sender has sent every decision that is in force.
    Synced,
}

/// Heartbeat of an autoscaler, with the facts by which controllers elect the active one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AutoscalerHeartbeat {
    /// Value of [`ScaleItem::Since`], for controllers of earlier releases.
    pub since_ms: u64,
    /// Time for which the autoscaler has received usage without a pause of its own, in ms.
    pub observed_ms: u64,
    /// True if `observed_ms` covers the time on which any decision of the autoscaler may depend.
    pub covers_all_windows: bool,
    /// Number of agents and activators whose usage it receives now.
    pub reporters: u32,
    /// Name of the active autoscaler in the sender's RouteTable; `None`: the table has not named one.
    pub active_autoscaler: Option<String>,
}

/// Pods and path decided for one Revision, with the inputs of the decision.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleDecision {
    /// Revision that the decision applies to.
    pub revision: NamespacedName,
    /// Requested scale: pods to run, after all bounds; `None`: not known yet, keep the present number.
    pub requested_scale: Option<u32>,
    /// Path of new connections: direct only if the burst capacity allows it.
    pub connection_path: ConnectionPath,
    /// Number of activators to place in front of the Revision; 0: all.
    pub activator_count: u32,
    /// Activity, reported in Knative's `Active` condition.
    pub activity: RevisionActivity,
    /// Average load over the stable window.
    pub stable_load: f64,
    /// Average load over the panic window.
    pub panic_load: f64,
    /// Target load of one pod.
    pub target_load: f64,
    /// Ready pods at the time of the decision, without those that have a standby order.
    pub ready_pods: u32,
    /// True if the autoscaler was in panic mode.
    pub is_panicking: bool,
    /// Excess burst capacity; −1 for the activator path at all times.
    pub excess_burst_capacity: f64,
    /// Name of the deciding rule, for the log.
    pub reason: String,
    /// Inputs of the decision; `None`: an older sender omits them.
    pub inputs: Option<ScaleDecisionInputs>,
    /// Request that woke the Revision, until one of its pods is ready; `None`: no wake, or an older sender.
    pub wake_origin: Option<Box<WakeOrigin>>,
}

/// Request that woke a Revision without pods, as far as the choice of the first pod's zone depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WakeOrigin {
    /// Name of the activator where the request waits, not empty.
    pub activator: String,
    /// Address of the request's client; `None`: not known.
    pub client: Option<IpAddr>,
}

/// Inputs of a decision, which explain it to operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScaleDecisionInputs {
    /// Requests in flight at pods, plus waiting ones.
    pub in_flight: u64,
    /// Requests among `in_flight` that wait for a pod.
    pub waiting: u64,
    /// Length of the stable window.
    pub stable_window: Duration,
    /// Length of the panic window.
    pub panic_window: Duration,
    /// Desired scale: pods that the load asks for, before minimum, maximum and initial scale; `None`: load is not
    /// known.
    pub desired_by_load: Option<u32>,
    /// Fewest pods; 0 while no Route sends traffic to the Revision.
    pub min_scale: u32,
    /// Most pods; 0: no limit.
    pub max_scale: u32,
    /// Name of the bound that applied; empty: load alone decided.
    pub applied_bound: String,
    /// Coverage of the load by the usage reports.
    pub coverage: UsageCoverage,
}

/// Share of a Revision's load that usage reports cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageCoverage {
    /// Every pod that may carry load, and every activator, reports.
    Complete,
    /// Some do not report: a decision may raise the pods, but never lower them.
    Partial,
    /// None reports: a decision keeps the present pods.
    Missing,
}

/// Activity of a Revision, as Knative's `Active` condition reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevisionActivity {
    /// Pods serve requests (True).
    Active,
    /// Pods are starting (Unknown, `Queued`).
    Activating,
    /// The Revision has no traffic (False, `NoTraffic`).
    Inactive,
    /// The start took too long (False, `TimedOut`).
    TimedOut,
}
