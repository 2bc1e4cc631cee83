//! Pure: one Revision, from its load to the decision on its pods and path.
//!
//! Load is evaluated every tick (2 s, as in Knative) by the averages. Urgent load is evaluated between ticks: a request
//! for a Revision without pods, or more load at this moment than the requested scale carries at its target. Such an
//! evaluation requests as many pods as carry the load, within one step up, and does not move the tick.
//!
//! **Scale falls only on knowledge.** Fewer pods are decided only at a tick, and only if every report that matters
//! arrived in time. That holds for all the time on which a decision depends: both windows, the delays and a tick. Late
//! reports of unchanged totals show that nothing has happened meanwhile, so an idle Revision falls asleep although its
//! node is slow. Pods never fall below the number that the requests in flight at that moment need, and never to zero
//! while a request is in flight or waits. So a late, lost or repeated report, an absent sender or a new autoscaler can
//! keep pods for longer, but never removes one.

use std::{sync::Arc, time::Duration};

use common::wire::{
    ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision, ScaleMetric, ScalePolicy,
    UsageCoverage, UsageSample, WakeOrigin,
};

use self::decision::DecisionFingerprint;
use crate::{
    scale_to_zero::{RequestedScale, ScaleBound, ScaleToZero, ScaleToZeroInput},
    scaler::{DesiredScale, ScaleReason, Scaler, ScalerPods, pods_for_level, target_per_pod},
    usage::RevisionLoad,
    window::{LoadAverages, panic_window},
};

mod decision;

/// Number of pods of a Revision in each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodPhaseCounts {
    /// Pods that have no address yet.
    pub pending: u32,
    /// Pods with an address that are not ready.
    pub starting: u32,
    /// Pods that take new requests, without a standby order.
    pub ready: u32,
    /// Ready pods with a standby order: they are frozen while nothing uses them, and a request wakes them.
    pub standby: u32,
    /// Pods that take no new requests.
    pub draining: u32,
}

impl PodPhaseCounts {
    /// Number of pods that are ready or will be, without a standby order.
    pub fn non_draining(&self) -> u32 {
        self.pending + self.starting + self.ready
    }

    /// Returns true if each pod has a standby order, or if there is none. Such pods are kept without load.
    pub fn are_on_standby(&self) -> bool {
        Self { standby: 0, ..*self } == Self::default()
    }
}

/// Knowledge of the load of a Revision at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKnowledge {
    /// Every report that matters has arrived in time.
    Complete,
    /// All streams that matter are open, and reports of some are late.
    Late,
    /// Some pods or wait queues are not reported.
    Partial,
    /// No ready pod is reported.
    Missing,
}

impl LoadKnowledge {
    /// Returns the coverage that a decision states.
    fn coverage(self) -> UsageCoverage {
        match self {
            Self::Complete => UsageCoverage::Complete,
            Self::Late | Self::Partial => UsageCoverage::Partial,
            Self::Missing => UsageCoverage::Missing,
        }
    }
}

/// Scaling state of one Revision.
#[derive(Debug)]
pub struct ScaledRevision {
    /// Scaling policy of the Revision.
    pub policy: Arc<ScalePolicy>,
    owners: ScaledRevisionOwners,
    /// True if a Route sends requests to the Revision.
    pub is_reachable: bool,
    /// True once the Revision has reached its initial scale.
    pub initial_scale_reached: bool,
    /// Number of its pods in each phase.
    pub pods: PodPhaseCounts,
    /// Reported totals and recorded load of the Revision.
    pub load: RevisionLoad,
    scale_to_zero: Option<ScaleToZero>,
    /// State of evaluation; `None` while the Revision is asleep.
    awake: Option<Box<AwakeRevision>>,
    sent_fingerprint: Option<DecisionFingerprint>,
    /// Request that woke the Revision, until one of its pods is ready or it sleeps again.
    wake_origin: Option<Box<WakeOrigin>>,
}

/// Owning Service and Configuration, for metrics.
#[derive(Debug)]
enum ScaledRevisionOwners {
    /// Length in bytes of the name of both owners, which begins the Revision's name: the usual case.
    CommonPrefix(u8),
    /// Names of the Service and the Configuration.
    Separate(Box<[Box<str>; 2]>),
}

#[derive(Debug)]
struct AwakeRevision {
    scaler: Scaler,
    desired_scale: DesiredScale,
    averages: LoadAverages,
    /// Knowledge of the load at the last evaluation.
    load_knowledge: LoadKnowledge,
    /// Highest number of ready and starting pods since the Revision woke.
    max_non_draining: u32,
    /// Time at which load was last unknown or not current.
    last_unknown_at: Option<Duration>,
    /// Time of the next tick, at which load is evaluated.
    next_tick_at: Duration,
    /// Time of the last tick at which load was evaluated.
    last_tick_at: Option<Duration>,
    /// True if load of this moment must be evaluated before the next tick.
    is_urgent: bool,
}

/// Result of one [`ScaledRevision::step`].
#[derive(Debug, Default)]
pub struct EvaluationOutcome {
    /// New decision; `None` if it equals the last one sent.
    pub decision: Option<ScaleDecision>,
    /// True if the last decision must be withdrawn from the controller.
    pub is_withdrawn: bool,
    /// Time of the next step; `None`: the Revision is asleep until a report or update arrives.
    pub next_step_at: Option<Duration>,
}

/// Values that metrics show of a Revision that is awake.
#[derive(Clone, Copy, Debug)]
pub struct ScaleMetrics {
    /// Desired scale of the last evaluation.
    pub desired_scale: DesiredScale,
    /// Averages of load at the last evaluation.
    pub averages: LoadAverages,
    /// True while panic mode is on.
    pub is_panicking: bool,
    /// Requested scale; `None` before the first decision.
    pub requested_pods: Option<u32>,
    /// Decided path of new connections.
    pub path: ConnectionPath,
}

impl ScaledRevision {
    /// A Revision first met in the RouteTable, without any decision yet.
    pub fn new(entry: &common::wire::RevisionEntry, policy: Arc<ScalePolicy>) -> Self {
        Self {
            policy,
            owners: ScaledRevisionOwners::from_revision(entry),
            is_reachable: entry.reachable,
            initial_scale_reached: entry.initial_scale_reached,
            pods: PodPhaseCounts::default(),
            load: RevisionLoad::new(),
            scale_to_zero: None,
            awake: None,
            sent_fingerprint: None,
            wake_origin: None,
        }
    }

    /// Returns the names of the Service and the Configuration that own the Revision `name`.
    pub fn owner_names<'a>(&'a self, name: &'a str) -> [&'a str; 2] {
        match &self.owners {
            ScaledRevisionOwners::CommonPrefix(length) => {
                [name.get(..usize::from(*length)).unwrap_or_default(); 2]
            }
            ScaledRevisionOwners::Separate(names) => [&names[0], &names[1]],
        }
    }

    /// Returns true if the Revision is evaluated at each tick.
    pub fn is_awake(&self) -> bool {
        self.awake.is_some()
    }

    /// Wakes the Revision: from now on its load is recorded by the second.
    pub fn wake(&mut self, now: Duration) {
        if self.awake.is_none() {
            self.load.wake(now, &self.policy);
            let desired_scale = DesiredScale {
                pods: None,
                reason: ScaleReason::NoData,
                excess_burst_capacity: 0.0,
                activators: 0,
                target: target_per_pod(&self.policy),
            };
            let averages = LoadAverages { stable: 0.0, panic: 0.0 };
            let scaler = Scaler::new(now, self.pods.ready);
            self.awake = Some(Box::new(AwakeRevision {
                scaler,
                desired_scale,
                averages,
                load_knowledge: LoadKnowledge::Missing,
                max_non_draining: 0,
                // A Revision that was asleep had no load. Load of pods that ran before they were first met is not
                // known.
                last_unknown_at: (self.pods != PodPhaseCounts::default()).then_some(now),
                next_tick_at: now,
                last_tick_at: None,
                is_urgent: self.load.may_hold_requests(),
            }));
        }
    }

    /// Replaces the policy and evaluates load in the next step.
    pub fn set_policy(&mut self, now: Duration, policy: Arc<ScalePolicy>) {
        self.policy = policy;
        if self.is_awake() {
            self.load.wake(now, &self.policy);
        }
        self.mark_urgent(now);
    }

    /// Makes the next [`step`](Self::step) evaluate load of this moment before its tick.
    pub fn mark_urgent(&mut self, now: Duration) {
        self.wake(now);
        if let Some(awake) = &mut self.awake {
            awake.is_urgent = true;
        }
    }

    /// Records the first request that waits while there is no pod, once the Revision is awake: a late or repeated report
    /// wakes none. `activator` is the sender of the report.
    pub fn record_wake_origin(&mut self, activator: &str, sample: &UsageSample) {
        let is_waiting = sample.key.pod.is_none() && sample.totals.in_flight() > 0;
        let has_pod = self.pods.non_draining() + self.pods.standby > 0;
        if self.is_awake() && is_waiting && !has_pod && self.wake_origin.is_none() {
            let origin = WakeOrigin { activator: activator.to_owned(), client: sample.client };
            self.wake_origin = Some(Box::new(origin));
        }
    }

    /// Returns true if load cannot wait for the next tick.
    pub fn is_urgent(&self, now: Duration) -> bool {
        let level = self.load.current_level(now);
        let is_asleep = self.scale_to_zero.is_none_or(|state| {
            state.requested_pods == Some(0) || state.activity == RevisionActivity::Inactive
        });
        if is_asleep {
            return self.load.in_flight() > 0 || level > 0.0;
        }
        // Only pods of the requested scale carry load: those beyond it are about to be removed. Before the first
        // decision the desired scale counts, so that no load is forgotten if pods drain before the next tick.
        let desired_pods = self.awake.as_ref().and_then(|awake| awake.desired_scale.pods);
        let requested_pods = self
            .scale_to_zero
            .and_then(|state| state.requested_pods)
            .or(desired_pods)
            .unwrap_or_default();
        let can_grow = self.policy.max_scale == 0 || requested_pods < self.policy.max_scale;
        let capacity = f64::from(requested_pods) * target_per_pod(&self.policy);
        can_grow && level > capacity
    }

    /// Evaluates the Revision at `now` and returns a changed decision.
    ///
    /// A Revision that falls asleep withdraws its decision, and one that never woke sends none. Without pods and
    /// without load zero is the default, so thousands of decisions that repeat it need not be stored. With pods on
    /// standby the decision stays: without one, the controller would keep them as running pods.
    pub fn step(
        &mut self,
        now: Duration,
        tick: Duration,
        knowledge: LoadKnowledge,
        name: &NamespacedName,
    ) -> EvaluationOutcome {
        self.wake(now);
        // Once a pod is ready, further ones are for load and not for that request.
        if self.pods.ready + self.pods.standby > 0 {
            self.wake_origin = None;
        }
        self.evaluate(now, tick, knowledge);
        let input = self.scale_to_zero_input();
        let (non_draining, policy) = (self.pods.non_draining(), &self.policy);
        let Some(awake) = &self.awake else { return EvaluationOutcome::default() };
        // By requests per second, a long request is no load in later seconds; it must keep its pod.
        let min_pods = u32::from(self.load.may_hold_requests());
        let desired_pods = awake.desired_scale.pods.map(|desired_pods| desired_pods.max(min_pods));
        let capacity = awake.desired_scale.excess_burst_capacity;
        let scale_to_zero = self
            .scale_to_zero
            .get_or_insert_with(|| ScaleToZero::new(now, policy, input, non_draining));
        // First met while they started, pods on standby look as if load had requested them.
        if input.initial_scale_reached && self.pods.standby > 0 && self.pods.are_on_standby() {
            scale_to_zero.end_unrequested_start(now);
        }
        let previous_activity = scale_to_zero.activity;
        // Before the first decision the highest number seen is kept: a pod that is being replaced must not lower it.
        let minimum = scale_to_zero.requested_pods.unwrap_or(awake.max_non_draining);
        // Load may need more pods than there are, because some of those seen have gone. Without a decision no pod takes
        // their place. A number below the highest one seen could lower an earlier decision, so the highest one is
        // requested.
        let is_short = scale_to_zero.requested_pods.is_none() && desired_pods > Some(non_draining);
        let desired_pods = if is_short { desired_pods.max(Some(minimum)) } else { desired_pods };
        let scale_down_minimum = awake
            .scale_down_block(now, decision_lookback(policy, tick))
            .map(|bound| (minimum, bound));
        let requested =
            scale_to_zero.step(now, policy, input, desired_pods, capacity, scale_down_minimum);
        let is_activity_changed = previous_activity != scale_to_zero.activity;
        let tick_at = awake.next_tick_at;
        // A step that changes nothing must not ask to be repeated at once.
        let next_step_at = requested.next_step_at.filter(|&at| at > now || is_activity_changed);
        if self.can_sleep(now, requested)
            && requested.activity == RevisionActivity::Inactive
            && input.initial_scale_reached
            && self.pods.standby == 0
        {
            self.sleep();
            let is_withdrawn = self.sent_fingerprint.take().is_some();
            return EvaluationOutcome { is_withdrawn, ..EvaluationOutcome::default() };
        }
        let decision = self.changed_decision(name, requested);
        if self.can_sleep(now, requested) {
            self.sleep();
            return EvaluationOutcome { decision, ..EvaluationOutcome::default() };
        }
        let next_step_at = Some(next_step_at.map_or(tick_at, |at| at.min(tick_at)));
        EvaluationOutcome { decision, next_step_at, is_withdrawn: false }
    }

    fn sleep(&mut self) {
        self.load.sleep();
        self.awake = None;
        self.wake_origin = None;
    }

    fn scale_to_zero_input(&self) -> ScaleToZeroInput {
        ScaleToZeroInput {
            ready: self.pods.ready,
            is_reachable: self.is_reachable,
            initial_scale_reached: self.initial_scale_reached,
        }
    }

    /// Computes the desired scale, at a tick or for an urgent report. A Revision that is asleep has none.
    fn evaluate(&mut self, now: Duration, tick: Duration, knowledge: LoadKnowledge) {
        // As in Knative nothing is recorded while no pod is ready: silence then must not dilute the load of waiting
        // requests. No request waits for a pod on standby.
        let has_ready_pod = self.pods.ready + self.pods.standby > 0;
        let is_silence_zero = knowledge != LoadKnowledge::Missing && has_ready_pod;
        self.load.accrue_until(now, is_silence_zero);
        let has_gap = self.load.take_gap();
        let pods_for_current_load =
            pods_for_level(&self.policy, self.pods.ready, self.load.current_level(now));
        let Some(awake) = &mut self.awake else { return };
        awake.max_non_draining = awake.max_non_draining.max(self.pods.non_draining());
        let requested_pods = self
            .scale_to_zero
            .and_then(|state| state.requested_pods)
            .unwrap_or(awake.max_non_draining);
        // From unknown load on, nothing is lowered until everything has been known for a whole lookback again. Late
        // reports only need to come: either they mark a gap, or they show that no totals have changed.
        let is_unknown = matches!(knowledge, LoadKnowledge::Partial | LoadKnowledge::Missing);
        if has_gap || is_unknown {
            awake.last_unknown_at = Some(now);
        }
        awake.load_knowledge = knowledge;
        // An ordinary tick keeps pods for what is in flight; only an urgent evaluation raises the number by it.
        let mut min_pods = requested_pods.min(pods_for_current_load);
        if std::mem::take(&mut awake.is_urgent) {
            min_pods = pods_for_current_load;
        } else if now < awake.next_tick_at {
            return;
        }
        if now >= awake.next_tick_at {
            awake.last_tick_at = Some(now);
            awake.next_tick_at = next_tick_after(awake.next_tick_at, now, tick);
            // Without pods and without waiting requests there is no load, whatever was recorded.
            let is_empty = self.pods == PodPhaseCounts::default() && !self.load.may_hold_requests();
            let no_load = is_empty.then_some(LoadAverages { stable: 0.0, panic: 0.0 });
            let averages = self.load.averages(now, self.pods.ready, &self.policy).or(no_load);
            let pods = ScalerPods { ready: self.pods.ready, is_reachable: self.is_reachable };
            awake.desired_scale = awake.scaler.step(now, &self.policy, pods, averages);
            awake.averages = averages.unwrap_or(LoadAverages { stable: 0.0, panic: 0.0 });
            // Panic mode keeps its highest number while it lasts, and a higher one may have been missed. It lasts for a
            // stable window, and longer while there is no average.
            let is_prolonged =
                averages.is_none() || awake.scaler.last_over_threshold() == Some(now);
            if is_prolonged
                && awake.scaler.is_panicking()
                && awake.was_load_unknown(now, decision_lookback(&self.policy, tick))
            {
                awake.last_unknown_at = Some(now);
            }
        }
        if min_pods > awake.desired_scale.pods.unwrap_or_default() {
            (awake.desired_scale.pods, awake.desired_scale.reason) =
                (Some(min_pods), ScaleReason::InFlight);
        }
    }

    fn can_sleep(&self, now: Duration, requested: RequestedScale) -> bool {
        let is_inactive =
            matches!(requested.activity, RevisionActivity::Inactive | RevisionActivity::TimedOut);
        requested.pods == Some(0)
            && is_inactive
            && self.pods.are_on_standby()
            && self.load.is_quiet(now)
    }

    /// Returns the values for metrics; `None` while the Revision is asleep or before its first decision.
    pub fn scale_metrics(&self) -> Option<ScaleMetrics> {
        let awake = self.awake.as_ref()?;
        Some(ScaleMetrics {
            desired_scale: awake.desired_scale,
            averages: awake.averages,
            is_panicking: awake.scaler.is_panicking(),
            requested_pods: self.scale_to_zero.and_then(|state| state.requested_pods),
            path: self.sent_fingerprint?.path,
        })
    }

    /// Returns the time on which a decision may depend. `tick` is the time between two evaluations.
    pub fn lookback(&self, tick: Duration) -> Duration {
        decision_lookback(&self.policy, tick)
    }

    /// Metric whose averages the policy uses.
    pub fn metric(&self) -> ScaleMetric {
        self.policy.metric
    }
}

impl AwakeRevision {
    /// Returns the bound that forbids lower pods at `now`, if any.
    fn scale_down_block(&self, now: Duration, lookback: Duration) -> Option<ScaleBound> {
        if self.was_load_unknown(now, lookback) {
            return Some(ScaleBound::LoadUnknown);
        }
        (self.last_tick_at != Some(now)).then_some(ScaleBound::BetweenTicks)
    }

    /// Returns true if load was unknown at any time in the last `lookback`, or if reports are late.
    fn was_load_unknown(&self, now: Duration, lookback: Duration) -> bool {
        self.last_unknown_at.is_some_and(|at| now < at + lookback)
            || self.load_knowledge == LoadKnowledge::Late
    }
}

/// Time span that a decision may depend on: both windows, the delay and retention before pods are lowered, and a tick.
fn decision_lookback(policy: &ScalePolicy, tick: Duration) -> Duration {
    let panic = panic_window(policy.stable_window, policy.panic_window_percent);
    policy.stable_window
        + panic
        + policy.scale_down_delay
        + policy.scale_to_zero_retention_period
        + tick
}

/// Returns the first tick in the series of `tick_at` that is after `now`.
fn next_tick_after(tick_at: Duration, now: Duration, tick: Duration) -> Duration {
    let missed = now.saturating_sub(tick_at).as_nanos() / tick.as_nanos().max(1);
    tick_at + tick * u32::try_from(missed + 1).unwrap_or(u32::MAX)
}

impl ScaledRevisionOwners {
    fn from_revision(entry: &common::wire::RevisionEntry) -> Self {
        let has_common_prefix = entry.service == entry.configuration
            && entry.name.name.starts_with(entry.service.as_str());
        match u8::try_from(entry.service.len()) {
            Ok(length) if has_common_prefix => Self::CommonPrefix(length),
            Ok(_) | Err(_) => {
                let names = [&entry.service, &entry.configuration];
                Self::Separate(Box::new(names.map(|name| name.as_str().into())))
            }
        }
    }
}
