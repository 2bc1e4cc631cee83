//! Pure: one revision, from its load to the decision on its pods and path.
//!
//! Load is evaluated every tick (2 s, as in Knative) by the averages. Out of turn comes what cannot wait: a request for
//! a revision without pods, or more load at this moment than decided pods carry at their target. Such an event asks for
//! as many as carry it, within one step up, and moves no tick.
//!
//! **Scale falls only on knowledge.** Fewer pods are decided only at a tick, and only if every report that matters was
//! there, in time, for the whole stable window; never fewer than what is in flight at that moment needs; and never none
//! while anything is in flight or waits. So a report that is late, lost or repeated, a sender that is gone or never came
//! and an autoscaler that has just begun can cost pods for a while, but never take one away.

use std::{sync::Arc, time::Duration};

use common::wire::{Activity, Decision, Inputs, Metric, Name, Path, ScalePolicy, Sight};

use crate::{
    decide::{Pods, Scaler, Why, Wish, carriers, target},
    usage::Load,
    window::{Averages, panic_window},
    zero::{Bound, Facts, Verdict, Zero},
};

/// Pods of a revision by where they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Without an address yet.
    pub pending: u32,
    /// With an address, not ready.
    pub starting: u32,
    /// Taking requests.
    pub ready: u32,
    /// Taking no new requests.
    pub draining: u32,
}

impl Counts {
    /// Pods that are, or will be, ready.
    pub fn coming(&self) -> u32 {
        self.pending + self.starting + self.ready
    }
}

/// One revision.
#[derive(Debug)]
pub struct Revision {
    /// How it scales.
    pub policy: Arc<ScalePolicy>,
    owners: Owners,
    /// Whether a route leads to it.
    pub is_reachable: bool,
    /// Whether its initial scale was reached once.
    pub initial_scale_reached: bool,
    /// Its pods.
    pub pods: Counts,
    /// Its load.
    pub load: Load,
    zero: Option<Zero>,
    /// Absent while it sleeps.
    awake: Option<Box<Awake>>,
    said: Option<Said>,
}

/// Owning service and configuration, for metrics.
#[derive(Debug)]
enum Owners {
    /// Both have the name that the revision's begins with, so many bytes long: nearly always.
    Prefix(u8),
    /// Their names.
    Named(Box<[Box<str>; 2]>),
}

#[derive(Debug)]
struct Awake {
    scaler: Scaler,
    wish: Wish,
    averages: Averages,
    /// How much of the load was known at the last evaluation.
    sight: Sight,
    /// Most pods that were ready, or would be, since it woke.
    most_coming: u32,
    /// When load was last not known, or not current.
    unknown_at: Option<Duration>,
    /// When load is evaluated next.
    tick_at: Duration,
    /// When load was evaluated last.
    ticked_at: Option<Duration>,
    /// Whether load at this moment is to be looked at before that.
    is_urgent: bool,
}

/// The part of a decision whose change is worth a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    pods: Option<u32>,
    path: Path,
    activators: u32,
    activity: Activity,
}

/// What one [`Revision::step`] leads to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The decision, if it differs from the last.
    pub decision: Option<Decision>,
    /// The last decision need not stand any more.
    pub is_withdrawn: bool,
    /// When to come again; `None`: it sleeps until something happens.
    pub again_at: Option<Duration>,
}

/// What metrics show of a revision that is awake.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Wish of the last evaluation.
    pub wish: Wish,
    /// Load of the last evaluation.
    pub averages: Averages,
    /// Whether panic holds.
    pub is_panicking: bool,
    /// Pods decided.
    pub requested: Option<u32>,
    /// Way of new connections decided.
    pub path: Path,
}

impl Revision {
    /// A revision as first met; nothing is decided yet.
    pub fn new(it: &common::wire::Revision, policy: Arc<ScalePolicy>) -> Self {
        Self {
            policy,
            owners: Owners::of(it),
            is_reachable: it.reachable,
            initial_scale_reached: it.initial_scale_reached,
            pods: Counts::default(),
            load: Load::new(),
            zero: None,
            awake: None,
            said: None,
        }
    }

    /// Names of the owning service and configuration of the revision of this name.
    pub fn owners<'a>(&'a self, name: &'a str) -> [&'a str; 2] {
        match &self.owners {
            Owners::Prefix(length) => [name.get(..usize::from(*length)).unwrap_or_default(); 2],
            Owners::Named(names) => [&names[0], &names[1]],
        }
    }

    /// Whether it costs anything while nothing happens.
    pub fn is_awake(&self) -> bool {
        self.awake.is_some()
    }

    /// Starts to keep load by the second.
    pub fn wake(&mut self, now: Duration) {
        if self.awake.is_none() {
            self.load.wake(now, &self.policy);
            let wish = Wish {
                pods: None,
                why: Why::NoData,
                excess_burst_capacity: 0.0,
                activators: 0,
                target: target(&self.policy),
            };
            let averages = Averages { stable: 0.0, panic: 0.0 };
            let scaler = Scaler::new(now, self.pods.ready);
            self.awake = Some(Box::new(Awake {
                scaler,
                wish,
                averages,
                sight: Sight::Blind,
                most_coming: 0,
                // A revision that slept had no load. What pods did before they were met is not known.
                unknown_at: (self.pods != Counts::default()).then_some(now),
                tick_at: now,
                ticked_at: None,
                is_urgent: self.load.may_hold_requests(),
            }));
        }
    }

    /// Takes another policy; load is evaluated anew.
    pub fn set_policy(&mut self, now: Duration, policy: Arc<ScalePolicy>) {
        self.policy = policy;
        if self.is_awake() {
            self.load.wake(now, &self.policy);
        }
        self.hurry(now);
    }

    /// Lets load of this moment be looked at in the next [`step`](Self::step), before its tick.
    pub fn hurry(&mut self, now: Duration) {
        self.wake(now);
        if let Some(awake) = &mut self.awake {
            awake.is_urgent = true;
        }
    }

    /// Whether load cannot wait for the tick.
    pub fn is_urgent(&self, now: Duration) -> bool {
        let level = self.load.level(now);
        let asleep = self
            .zero
            .is_none_or(|zero| zero.applied == Some(0) || zero.activity == Activity::Inactive);
        if asleep {
            return self.load.in_flight() > 0 || level > 0.0;
        }
        let decided = self.zero.and_then(|zero| zero.applied).unwrap_or_default();
        let can_grow = self.policy.max_scale == 0 || decided < self.policy.max_scale;
        let carried = f64::from(self.pods.coming().max(decided)) * target(&self.policy);
        can_grow && level > carried
    }

    /// Evaluates what is due at `now`.
    ///
    /// A revision that falls asleep withdraws its decision, and one that never woke makes none: without pods and
    /// without load, zero is what holds anyway, and ten thousand decisions that say so need not be kept.
    pub fn step(&mut self, now: Duration, tick: Duration, sight: Sight, name: &Name) -> Outcome {
        self.wake(now);
        self.evaluate(now, tick, sight);
        let facts = self.facts();
        let (coming, policy) = (self.pods.coming(), &self.policy);
        let Some(awake) = &self.awake else { return Outcome::default() };
        let least = u32::from(self.load.may_hold_requests());
        let pods = awake.wish.pods.map(|pods| pods.max(least));
        let capacity = awake.wish.excess_burst_capacity;
        let zero = self.zero.get_or_insert_with(|| Zero::new(now, policy, facts, coming));
        let before = zero.activity;
        // Before anything is decided, what there was is kept, not what is left while one that ended is replaced.
        let held = zero.applied.unwrap_or(awake.most_coming);
        let hold = awake.held(now, memory(policy, tick)).map(|why| (held, why));
        let verdict = zero.step(now, policy, facts, pods, capacity, hold);
        let turned = before != zero.activity;
        let tick_at = awake.tick_at;
        // A step that changes nothing must not ask to be repeated at once.
        let again_at = verdict.again_at.filter(|&at| at > now || turned);
        if self.may_sleep(now, verdict)
            && verdict.activity == Activity::Inactive
            && facts.initial_scale_reached
        {
            self.sleep();
            let is_withdrawn = self.said.take().is_some();
            return Outcome { is_withdrawn, ..Outcome::default() };
        }
        let decision = self.say(name, verdict);
        if self.may_sleep(now, verdict) {
            self.sleep();
            return Outcome { decision, ..Outcome::default() };
        }
        let again_at = Some(again_at.map_or(tick_at, |at| at.min(tick_at)));
        Outcome { decision, again_at, is_withdrawn: false }
    }

    fn sleep(&mut self) {
        self.load.sleep();
        self.awake = None;
    }

    fn facts(&self) -> Facts {
        Facts {
            ready: self.pods.ready,
            is_reachable: self.is_reachable,
            initial_scale_reached: self.initial_scale_reached,
        }
    }

    fn evaluate(&mut self, now: Duration, tick: Duration, sight: Sight) {
        // As in Knative nothing is recorded where no pod is: silence then does not thin what has waited.
        self.load.settle(now, sight != Sight::Blind && self.pods.ready > 0);
        let has_gap = self.load.take_gap();
        let carriers = carriers(&self.policy, self.pods.ready, self.load.level(now));
        let Some(awake) = &mut self.awake else { return };
        awake.most_coming = awake.most_coming.max(self.pods.coming());
        let decided = self.zero.and_then(|zero| zero.applied).unwrap_or(awake.most_coming);
        awake.sight = sight;
        if has_gap || sight != Sight::Whole {
            awake.unknown_at = Some(now);
        }
        let mut least = decided.min(carriers);
        if std::mem::take(&mut awake.is_urgent) {
            least = carriers;
        } else if now < awake.tick_at {
            return;
        }
        if now >= awake.tick_at {
            awake.ticked_at = Some(now);
            awake.tick_at = after(awake.tick_at, now, tick);
            // Where no pod is and nothing waits there is no load, whatever was or was not recorded.
            let is_empty = self.pods == Counts::default() && !self.load.may_hold_requests();
            let none = is_empty.then_some(Averages { stable: 0.0, panic: 0.0 });
            let seen = self.load.averages(now, self.pods.ready, &self.policy).or(none);
            let pods = Pods { ready: self.pods.ready, is_reachable: self.is_reachable };
            awake.wish = awake.scaler.step(now, &self.policy, pods, seen);
            awake.averages = seen.unwrap_or(Averages { stable: 0.0, panic: 0.0 });
            // Panic remembers its highest wish for as long as it lasts, and that may have been missed.
            if awake.scaler.panicked_at() == Some(now)
                && awake.is_unknown(now, memory(&self.policy, tick))
            {
                awake.unknown_at = Some(now);
            }
        }
        if least > awake.wish.pods.unwrap_or_default() {
            (awake.wish.pods, awake.wish.why) = (Some(least), Why::InFlight);
        }
    }

    fn may_sleep(&self, now: Duration, verdict: Verdict) -> bool {
        let is_inactive = matches!(verdict.activity, Activity::Inactive | Activity::TimedOut);
        verdict.pods == Some(0)
            && is_inactive
            && self.pods == Counts::default()
            && self.load.is_quiet(now)
    }

    fn say(&mut self, name: &Name, verdict: Verdict) -> Option<Decision> {
        let awake = self.awake.as_ref()?;
        let said = Said {
            pods: verdict.pods,
            path: verdict.path,
            activators: awake.wish.activators,
            activity: verdict.activity,
        };
        if self.said.replace(said) == Some(said) {
            return None;
        }
        Some(Decision {
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

    /// What the decision is made from.
    fn inputs(&self, awake: &Awake, verdict: Verdict) -> Inputs {
        let policy = &self.policy;
        let loads = verdict.bound.is_none()
            && matches!(awake.wish.why, Why::Stable | Why::InFlight | Why::NoData);
        let bound = if loads { "" } else { reason(verdict.bound, awake.wish.why) };
        Inputs {
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

    /// What metrics show, while it is awake.
    pub fn figures(&self) -> Option<Figures> {
        let awake = self.awake.as_ref()?;
        Some(Figures {
            wish: awake.wish,
            averages: awake.averages,
            is_panicking: awake.scaler.is_panicking(),
            requested: self.zero.and_then(|zero| zero.applied),
            path: self.said?.path,
        })
    }

    /// What is averaged.
    pub fn metric(&self) -> Metric {
        self.policy.metric
    }
}

impl Awake {
    /// Why nothing may be lowered at `now`, if so.
    fn held(&self, now: Duration, memory: Duration) -> Option<Bound> {
        if self.is_unknown(now, memory) {
            return Some(Bound::Unknown);
        }
        (self.ticked_at != Some(now)).then_some(Bound::Tick)
    }

    /// Whether something in the last `memory` is not known.
    fn is_unknown(&self, now: Duration, memory: Duration) -> bool {
        self.unknown_at.is_some_and(|at| now < at + memory)
    }
}

/// How far back lies what a decision may depend on: the averages, panic that they began, and waits before going down.
fn memory(policy: &ScalePolicy, tick: Duration) -> Duration {
    let panic = panic_window(policy.stable_window, policy.panic_window_percent);
    policy.stable_window + panic + policy.scale_down_delay + policy.retention + tick
}

/// The first of the ticks that follow `tick_at` that is after `now`.
fn after(tick_at: Duration, now: Duration, tick: Duration) -> Duration {
    let missed = now.saturating_sub(tick_at).as_nanos() / tick.as_nanos().max(1);
    tick_at + tick * u32::try_from(missed + 1).unwrap_or(u32::MAX)
}

impl Owners {
    fn of(it: &common::wire::Revision) -> Self {
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

fn reason(bound: Option<Bound>, why: Why) -> &'static str {
    match (bound, why) {
        (Some(Bound::MinScale), _) => "min-scale",
        (Some(Bound::MaxScale), _) => "max-scale",
        (Some(Bound::InitialScale), _) => "initial-scale",
        (Some(Bound::NoScaleToZero), _) => "scale to zero is off",
        (Some(Bound::Starting), _) => "waiting for pods to start",
        (Some(Bound::TimedOut), _) => "progress deadline passed",
        (Some(Bound::StableWindow), _) => "not active for a stable window yet",
        (Some(Bound::TurningInactive), _) => "no load, turning inactive",
        (Some(Bound::Retention), _) => "last pod retention",
        (Some(Bound::Quiet), _) => "no load for the stable window",
        (Some(Bound::Unknown), _) => "load not known for the whole window, pods are kept",
        (Some(Bound::Tick), _) => "pods are kept until the next tick",
        (None, Why::NoData) => "load not known",
        (None, Why::Stable) => "stable load",
        (None, Why::InFlight) => "requests in flight",
        (None, Why::Panic) => "panic",
        (None, Why::ActivationScale) => "activation-scale",
        (None, Why::UpRate) => "max-scale-up-rate",
        (None, Why::DownRate) => "max-scale-down-rate",
        (None, Why::DownDelay) => "scale-down-delay",
    }
}
