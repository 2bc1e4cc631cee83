//! Pure: one Revision, from its load to the decision on its pods and path.
//!
//! Load is evaluated every tick (2 s, as in Knative) by the averages. Urgent load is evaluated between ticks: a request
//! for a Revision without pods, or more load at this moment than the requested pods carry at their target. Such an
//! evaluation requests as many pods as carry the load, within one step up, and does not move the tick.
//!
//! **Scale falls only on knowledge.** Fewer pods are decided only at a tick, and only if every report that matters
//! arrived in time. That holds for all the time on which a decision depends: both windows, the delays and a tick.
//! Pods never fall below what is in flight at that moment needs, and never to zero while anything is in flight or
//! waits. So a late, lost or repeated report, an absent sender or a new autoscaler can keep pods for longer, but
//! never removes one.

use std::{sync::Arc, time::Duration};

use common::wire::{
    ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision, ScaleDecisionInputs,
    ScaleMetric, ScalePolicy, UsageCoverage,
};

use crate::{
    decide::{DesiredScale, ScaleReason, Scaler, ScalerPods, carriers, target},
    usage::RevisionLoad,
    window::{LoadAverages, panic_window},
    zero::{RequestedScale, ScaleBound, ScaleToZero, ScaleToZeroInput},
};

/// Number of pods of a Revision in each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodPhaseCounts {
    /// Pods that have no address yet.
    pub pending: u32,
    /// Pods with an address that are not ready.
    pub starting: u32,
    /// Pods that take new requests.
    pub ready: u32,
    /// Pods that take no new requests.
    pub draining: u32,
}

impl PodPhaseCounts {
    /// Number of pods that are ready or will be.
    pub fn coming(&self) -> u32 {
        self.pending + self.starting + self.ready
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
    zero: Option<ScaleToZero>,
    /// State of evaluation; `None` while the Revision is asleep.
    awake: Option<Box<AwakeRevision>>,
    said: Option<DecisionFingerprint>,
}

/// Owning Service and Configuration, for metrics.
#[derive(Debug)]
enum ScaledRevisionOwners {
    /// Length in bytes of the name of both owners, which begins the Revision's name: the usual case.
    Prefix(u8),
    /// Names of the Service and the Configuration.
    Named(Box<[Box<str>; 2]>),
}

#[derive(Debug)]
struct AwakeRevision {
    scaler: Scaler,
    wish: DesiredScale,
    averages: LoadAverages,
    /// Load coverage at the last evaluation.
    sight: UsageCoverage,
    /// Highest number of ready and starting pods since the Revision woke.
    most_coming: u32,
    /// Time at which load was last unknown or not current.
    unknown_at: Option<Duration>,
    /// Time of the next tick, at which load is evaluated.
    tick_at: Duration,
    /// Time of the last tick at which load was evaluated.
    ticked_at: Option<Duration>,
    /// True if load of this moment must be evaluated before the next tick.
    is_urgent: bool,
}

/// Part of a decision whose change is worth a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DecisionFingerprint {
    pods: Option<u32>,
    path: ConnectionPath,
    activators: u32,
    activity: RevisionActivity,
}

/// Result of one [`ScaledRevision::step`].
#[derive(Debug, Default)]
pub struct EvaluationOutcome {
    /// New decision; `None` if it equals the last one sent.
    pub decision: Option<ScaleDecision>,
    /// True if the last decision must be withdrawn from the controller.
    pub is_withdrawn: bool,
    /// Time of the next step; `None`: the Revision is asleep until a report or update arrives.
    pub again_at: Option<Duration>,
}

/// Values that metrics show of a Revision that is awake.
#[derive(Clone, Copy, Debug)]
pub struct ScaleMetrics {
    /// Desired scale of the last evaluation.
    pub wish: DesiredScale,
    /// Averages of load at the last evaluation.
    pub averages: LoadAverages,
    /// True while panic mode is on.
    pub is_panicking: bool,
    /// Requested pods; `None` before the first decision.
    pub requested: Option<u32>,
    /// Decided path of new connections.
    pub path: ConnectionPath,
}

impl ScaledRevision {
    /// A Revision first met in the RouteTable, without any decision yet.
    pub fn new(it: &common::wire::RevisionEntry, policy: Arc<ScalePolicy>) -> Self {
        Self {
            policy,
            owners: ScaledRevisionOwners::of(it),
            is_reachable: it.reachable,
            initial_scale_reached: it.initial_scale_reached,
            pods: PodPhaseCounts::default(),
            load: RevisionLoad::new(),
            zero: None,
            awake: None,
            said: None,
        }
    }

    /// Returns the names of the Service and the Configuration that own the Revision `name`.
    pub fn owners<'a>(&'a self, name: &'a str) -> [&'a str; 2] {
        match &self.owners {
            ScaledRevisionOwners::Prefix(length) => {
                [name.get(..usize::from(*length)).unwrap_or_default(); 2]
            }
            ScaledRevisionOwners::Named(names) => [&names[0], &names[1]],
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
            let wish = DesiredScale {
                pods: None,
                why: ScaleReason::NoData,
                excess_burst_capacity: 0.0,
                activators: 0,
                target: target(&self.policy),
            };
            let averages = LoadAverages { stable: 0.0, panic: 0.0 };
            let scaler = Scaler::new(now, self.pods.ready);
            self.awake = Some(Box::new(AwakeRevision {
                scaler,
                wish,
                averages,
                sight: UsageCoverage::Blind,
                most_coming: 0,
                // A Revision that was asleep had no load. Load of pods that ran before they were first met is not
                // known.
                unknown_at: (self.pods != PodPhaseCounts::default()).then_some(now),
                tick_at: now,
                ticked_at: None,
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
        self.hurry(now);
    }

    /// Makes the next [`step`](Self::step) evaluate load of this moment before its tick.
    pub fn hurry(&mut self, now: Duration) {
        self.wake(now);
        if let Some(awake) = &mut self.awake {
            awake.is_urgent = true;
        }
    }

    /// Returns true if load cannot wait for the next tick.
    pub fn is_urgent(&self, now: Duration) -> bool {
        let level = self.load.level(now);
        let asleep = self.zero.is_none_or(|zero| {
            zero.applied == Some(0) || zero.activity == RevisionActivity::Inactive
        });
        if asleep {
            return self.load.in_flight() > 0 || level > 0.0;
        }
        let decided = self.zero.and_then(|zero| zero.applied).unwrap_or_default();
        let can_grow = self.policy.max_scale == 0 || decided < self.policy.max_scale;
        // Starting pods count as carrying, or each report during a cold start would ask for more.
        let carried = f64::from(self.pods.coming().max(decided)) * target(&self.policy);
        can_grow && level > carried
    }

    /// Evaluates the Revision at `now` and returns a changed decision.
    ///
    /// A Revision that falls asleep withdraws its decision, and one that never woke sends none. Without pods and
    /// without load zero is the default, so thousands of decisions that repeat it need not be stored.
    pub fn step(
        &mut self,
        now: Duration,
        tick: Duration,
        sight: UsageCoverage,
        name: &NamespacedName,
    ) -> EvaluationOutcome {
        self.wake(now);
        self.evaluate(now, tick, sight);
        let facts = self.facts();
        let (coming, policy) = (self.pods.coming(), &self.policy);
        let Some(awake) = &self.awake else { return EvaluationOutcome::default() };
        // By requests per second, a long request is no load in later seconds; it must keep its pod.
        let least = u32::from(self.load.may_hold_requests());
        let pods = awake.wish.pods.map(|pods| pods.max(least));
        let capacity = awake.wish.excess_burst_capacity;
        let zero = self.zero.get_or_insert_with(|| ScaleToZero::new(now, policy, facts, coming));
        let before = zero.activity;
        // Before the first decision the highest number seen is kept: a pod that is being replaced must not lower it.
        let held = zero.applied.unwrap_or(awake.most_coming);
        // Load may need more pods than there are, because some of those seen have gone. Without a decision no pod takes
        // their place. A number below the highest one seen could lower an earlier decision, so that one is requested.
        let is_short = zero.applied.is_none() && pods > Some(coming);
        let pods = if is_short { pods.max(Some(held)) } else { pods };
        let hold = awake.held(now, memory(policy, tick)).map(|why| (held, why));
        let verdict = zero.step(now, policy, facts, pods, capacity, hold);
        let turned = before != zero.activity;
        let tick_at = awake.tick_at;
        // A step that changes nothing must not ask to be repeated at once.
        let again_at = verdict.again_at.filter(|&at| at > now || turned);
        if self.may_sleep(now, verdict)
            && verdict.activity == RevisionActivity::Inactive
            && facts.initial_scale_reached
        {
            self.sleep();
            let is_withdrawn = self.said.take().is_some();
            return EvaluationOutcome { is_withdrawn, ..EvaluationOutcome::default() };
        }
        let decision = self.say(name, verdict);
        if self.may_sleep(now, verdict) {
            self.sleep();
            return EvaluationOutcome { decision, ..EvaluationOutcome::default() };
        }
        let again_at = Some(again_at.map_or(tick_at, |at| at.min(tick_at)));
        EvaluationOutcome { decision, again_at, is_withdrawn: false }
    }

    fn sleep(&mut self) {
        self.load.sleep();
        self.awake = None;
    }

    fn facts(&self) -> ScaleToZeroInput {
        ScaleToZeroInput {
            ready: self.pods.ready,
            is_reachable: self.is_reachable,
            initial_scale_reached: self.initial_scale_reached,
        }
    }

    fn evaluate(&mut self, now: Duration, tick: Duration, sight: UsageCoverage) {
        // As in Knative nothing is recorded while no pod is ready: silence then must not dilute the load of waiting
        // requests.
        self.load.settle(now, sight != UsageCoverage::Blind && self.pods.ready > 0);
        let has_gap = self.load.take_gap();
        let carriers = carriers(&self.policy, self.pods.ready, self.load.level(now));
        let Some(awake) = &mut self.awake else { return };
        awake.most_coming = awake.most_coming.max(self.pods.coming());
        let decided = self.zero.and_then(|zero| zero.applied).unwrap_or(awake.most_coming);
        awake.sight = sight;
        // From here on nothing is lowered until everything has been known for a whole memory again.
        if has_gap || sight != UsageCoverage::Whole {
            awake.unknown_at = Some(now);
        }
        // An ordinary tick keeps pods for what is in flight; only an urgent evaluation raises the number by it.
        let mut least = decided.min(carriers);
        if std::mem::take(&mut awake.is_urgent) {
            least = carriers;
        } else if now < awake.tick_at {
            return;
        }
        if now >= awake.tick_at {
            awake.ticked_at = Some(now);
            awake.tick_at = after(awake.tick_at, now, tick);
            // Without pods and without waiting requests there is no load, whatever was recorded.
            let is_empty = self.pods == PodPhaseCounts::default() && !self.load.may_hold_requests();
            let none = is_empty.then_some(LoadAverages { stable: 0.0, panic: 0.0 });
            let seen = self.load.averages(now, self.pods.ready, &self.policy).or(none);
            let pods = ScalerPods { ready: self.pods.ready, is_reachable: self.is_reachable };
            awake.wish = awake.scaler.step(now, &self.policy, pods, seen);
            awake.averages = seen.unwrap_or(LoadAverages { stable: 0.0, panic: 0.0 });
            // Panic mode keeps its highest number while it lasts, and a higher one may have been missed.
            if awake.scaler.panicked_at() == Some(now)
                && awake.is_unknown(now, memory(&self.policy, tick))
            {
                awake.unknown_at = Some(now);
            }
        }
        if least > awake.wish.pods.unwrap_or_default() {
            (awake.wish.pods, awake.wish.why) = (Some(least), ScaleReason::InFlight);
        }
    }

    fn may_sleep(&self, now: Duration, verdict: RequestedScale) -> bool {
        let is_inactive =
            matches!(verdict.activity, RevisionActivity::Inactive | RevisionActivity::TimedOut);
        verdict.pods == Some(0)
            && is_inactive
            && self.pods == PodPhaseCounts::default()
            && self.load.is_quiet(now)
    }

    fn say(&mut self, name: &NamespacedName, verdict: RequestedScale) -> Option<ScaleDecision> {
        let awake = self.awake.as_ref()?;
        let said = DecisionFingerprint {
            pods: verdict.pods,
            path: verdict.path,
            activators: awake.wish.activators,
            activity: verdict.activity,
        };
        // Averages change at each tick; only a change of these fields is worth a message.
        if self.said.replace(said) == Some(said) {
            return None;
        }
        Some(ScaleDecision {
            revision: name.clone(),
            wanted: said.pods,
            path: said.path,
            activators: said.activators,
            activity: said.activity,
            stable: awake.averages.stable,
            panic: awake.averages.panic,
            target: awake.wish.target,
            ready_pods: self.pods.ready,
            panicking: awake.scaler.is_panicking(),
            excess_burst_capacity: awake.wish.excess_burst_capacity,
            reason: reason(verdict.bound, awake.wish.why).to_owned(),
            inputs: Some(self.inputs(awake, verdict)),
        })
    }

    /// Returns the inputs that the decision was made from, for the decision's record.
    fn inputs(&self, awake: &AwakeRevision, verdict: RequestedScale) -> ScaleDecisionInputs {
        let policy = &self.policy;
        let loads = verdict.bound.is_none()
            && matches!(
                awake.wish.why,
                ScaleReason::Stable | ScaleReason::InFlight | ScaleReason::NoData
            );
        let bound = if loads { "" } else { reason(verdict.bound, awake.wish.why) };
        ScaleDecisionInputs {
            in_flight: self.load.in_flight(),
            waiting: self.load.waiting(),
            stable_window: policy.stable_window,
            panic_window: panic_window(policy.stable_window, policy.panic_window_percent),
            by_load: awake.wish.pods,
            min_scale: if self.is_reachable { policy.min_scale } else { 0 },
            max_scale: policy.max_scale,
            bound: bound.to_owned(),
            sight: awake.sight,
        }
    }

    /// Returns the values for metrics; `None` while the Revision is asleep.
    pub fn figures(&self) -> Option<ScaleMetrics> {
        let awake = self.awake.as_ref()?;
        Some(ScaleMetrics {
            wish: awake.wish,
            averages: awake.averages,
            is_panicking: awake.scaler.is_panicking(),
            requested: self.zero.and_then(|zero| zero.applied),
            path: self.said?.path,
        })
    }

    /// Metric whose averages the policy uses.
    pub fn metric(&self) -> ScaleMetric {
        self.policy.metric
    }
}

impl AwakeRevision {
    /// Returns the bound that forbids lower pods at `now`, if any.
    fn held(&self, now: Duration, memory: Duration) -> Option<ScaleBound> {
        if self.is_unknown(now, memory) {
            return Some(ScaleBound::Unknown);
        }
        (self.ticked_at != Some(now)).then_some(ScaleBound::Tick)
    }

    /// Returns true if load was unknown at any time in the last `memory`.
    fn is_unknown(&self, now: Duration, memory: Duration) -> bool {
        self.unknown_at.is_some_and(|at| now < at + memory)
    }
}

/// Time span that a decision may depend on: both windows, the delay and retention before pods are lowered, and a tick.
fn memory(policy: &ScalePolicy, tick: Duration) -> Duration {
    let panic = panic_window(policy.stable_window, policy.panic_window_percent);
    policy.stable_window + panic + policy.scale_down_delay + policy.retention + tick
}

/// Returns the first tick in the series of `tick_at` that is after `now`.
fn after(tick_at: Duration, now: Duration, tick: Duration) -> Duration {
    let missed = now.saturating_sub(tick_at).as_nanos() / tick.as_nanos().max(1);
    tick_at + tick * u32::try_from(missed + 1).unwrap_or(u32::MAX)
}

impl ScaledRevisionOwners {
    fn of(it: &common::wire::RevisionEntry) -> Self {
        let begins =
            it.service == it.configuration && it.name.name.starts_with(it.service.as_str());
        match u8::try_from(it.service.len()) {
            Ok(length) if begins => Self::Prefix(length),
            Ok(_) | Err(_) => {
                let names = [&it.service, &it.configuration];
                Self::Named(Box::new(names.map(|name| name.as_str().into())))
            }
        }
    }
}

fn reason(bound: Option<ScaleBound>, why: ScaleReason) -> &'static str {
    match (bound, why) {
        (Some(ScaleBound::MinScale), _) => "min-scale",
        (Some(ScaleBound::MaxScale), _) => "max-scale",
        (Some(ScaleBound::InitialScale), _) => "initial-scale",
        (Some(ScaleBound::NoScaleToZero), _) => "scale to zero is off",
        (Some(ScaleBound::Starting), _) => "waiting for pods to start",
        (Some(ScaleBound::TimedOut), _) => "progress deadline passed",
        (Some(ScaleBound::StableWindow), _) => "not active for a stable window yet",
        (Some(ScaleBound::TurningInactive), _) => "no load, turning inactive",
        (Some(ScaleBound::Retention), _) => "last pod retention",
        (Some(ScaleBound::Quiet), _) => "no load for the stable window",
        (Some(ScaleBound::Unknown), _) => "load not known for the whole window, pods are kept",
        (Some(ScaleBound::Tick), _) => "pods are kept until the next tick",
        (None, ScaleReason::NoData) => "load not known",
        (None, ScaleReason::Stable) => "stable load",
        (None, ScaleReason::InFlight) => "requests in flight",
        (None, ScaleReason::Panic) => "panic",
        (None, ScaleReason::ActivationScale) => "activation-scale",
        (None, ScaleReason::UpRate) => "max-scale-up-rate",
        (None, ScaleReason::DownRate) => "max-scale-down-rate",
        (None, ScaleReason::DownDelay) => "scale-down-delay",
    }
}
