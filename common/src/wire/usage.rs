//! Pure: the two messages of scaling: what is in flight, and what is wanted of it.

use std::time::Duration;

use super::{Name, Path, Subscriber};

// --- UsageReport ----------------------------------------------------------------------------------------

/// One step of a UsageReport stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum UsageItem {
    /// Who reports.
    Sender(Subscriber),
    /// Totals of one subject.
    Seen(UsageSeen),
    /// The subject is no more; its last totals count up to now.
    Gone(UsageKey),
    /// Every subject has been named.
    Synced,
}

/// Whose requests are counted: a pod's, or (without pod) those that wait at the sender for the revision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageKey {
    /// The revision.
    pub revision: Name,
    /// The pod's uid; `None`: the sender's own waiting line.
    pub pod: Option<String>,
}

/// Running totals of one subject. Every total only grows; the receiver subtracts.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageSeen {
    /// Whose.
    pub key: UsageKey,
    /// When it was read, in ns of the sender's clock.
    pub at_ns: u64,
    /// The totals.
    pub totals: Totals,
    /// Responses by class: 1xx, 2xx, 3xx, 4xx, 5xx; empty for a waiting line.
    pub status: Vec<u64>,
    /// Responses by time taken, cumulative bounds as `abi::LATENCY_BOUNDS_US`; empty for a waiting line.
    pub latency: Vec<u64>,
}

/// Running totals from which the requests in flight and their average over any window follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests begun.
    pub started: u64,
    /// Requests ended.
    pub finished: u64,
    /// Sum of the times they began, in ns, wrapping.
    pub started_sum_ns: u64,
    /// Sum of the times they ended, in ns, wrapping.
    pub finished_sum_ns: u64,
    /// Of those ended, requests that waited and that no pod got: they gave up or took too long. 0 from older senders.
    pub left: u64,
}

impl Totals {
    /// One request begins at `now_ns`.
    pub fn start(&mut self, now_ns: u64) {
        self.started += 1;
        self.started_sum_ns = self.started_sum_ns.wrapping_add(now_ns);
    }

    /// One request ends at `now_ns`.
    pub fn finish(&mut self, now_ns: u64) {
        self.finished += 1;
        self.finished_sum_ns = self.finished_sum_ns.wrapping_add(now_ns);
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.started.saturating_sub(self.finished)
    }

    /// Request-nanoseconds spent up to `now_ns`, wrapping: `(started − finished)·now − Σstart + Σfinish`.
    ///
    /// The average in flight over a window is the difference of two such values over the window's length.
    /// Example: one request from 10 to 30, read at 50: `0·50 − 10 + 30 = 20`.
    pub fn integral(&self, now_ns: u64) -> u64 {
        let open = self.started.wrapping_sub(self.finished);
        open.wrapping_mul(now_ns)
            .wrapping_sub(self.started_sum_ns)
            .wrapping_add(self.finished_sum_ns)
    }
}

// --- ScaleDecision --------------------------------------------------------------------------------------

/// One step of a ScaleDecision stream. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum ScaleItem {
    /// Who decides.
    Sender(Subscriber),
    /// Since when the sender has heard usage, in ms since 1970. Of use to controllers of earlier releases alone, since
    /// clocks of different hosts differ.
    Since(u64),
    /// The sender lives: said several times a second.
    Alive(Alive),
    /// What is wanted of one revision.
    Decision(Decision),
    /// The revision is no more.
    Gone(Name),
    /// Every revision has been named.
    Synced,
}

/// A heartbeat of an autoscaler, and what tells whether its decisions should count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alive {
    /// What [`ScaleItem::Since`] says, for controllers of earlier releases.
    pub since_ms: u64,
    /// For how long it has heard usage without a pause of its own, in ms.
    pub heard_ms: u64,
    /// Whether that is longer than every window it evaluates.
    pub is_full: bool,
    /// Agents and activators whose usage it hears now.
    pub reporters: u32,
    /// The autoscaler that counts, as the RouteTable last said; `None`: it has not.
    pub counts: Option<String>,
}

/// What is wanted of one revision, and the inputs that led there.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The revision.
    pub revision: Name,
    /// Wanted pods; `None`: not known yet, keep what there is.
    pub wanted: Option<u32>,
    /// Whether burst capacity allows the direct path.
    pub path: Path,
    /// Activators that should stand before it; 0: all.
    pub activators: u32,
    /// Knative's `Active` condition.
    pub activity: Activity,
    /// Average load over the stable window.
    pub stable: f64,
    /// Average load over the panic window.
    pub panic: f64,
    /// Load aimed at for one pod.
    pub target: f64,
    /// Ready pods at the time.
    pub ready_pods: u32,
    /// Whether panic held.
    pub panicking: bool,
    /// Excess burst capacity; −1 where always through the activator.
    pub excess_burst_capacity: f64,
    /// The rule that decided, for the log.
    pub reason: String,
    /// What it was made from; `None`: the sender is older and does not say.
    pub inputs: Option<Inputs>,
}

/// What a decision was made from, to explain it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// Requests in flight and waiting.
    pub in_flight: u64,
    /// Of these, requests that wait for a pod.
    pub waiting: u64,
    /// Length of the stable window.
    pub stable_window: Duration,
    /// Length of the panic window.
    pub panic_window: Duration,
    /// Pods that load asks for within the rates, before minimum, maximum and initial scale; `None`: load is not known.
    pub by_load: Option<u32>,
    /// Fewest pods; 0 while no route leads to the revision.
    pub min_scale: u32,
    /// Most pods; 0: no bound.
    pub max_scale: u32,
    /// The bound that held; empty: load alone decided.
    pub bound: String,
    /// How much of the load was known.
    pub sight: Sight,
}

/// How much of a revision's load is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Every pod that may carry load and every activator reports.
    Whole,
    /// Some do not report: more pods may be wanted, fewer never.
    Partial,
    /// None reports: what there is stays.
    Blind,
}

/// Knative's `Active` condition of a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Pods serve (True).
    Active,
    /// Pods are on their way (Unknown, `Queued`).
    Activating,
    /// No traffic (False, `NoTraffic`).
    Inactive,
    /// The start took too long (False, `TimedOut`).
    TimedOut,
}
