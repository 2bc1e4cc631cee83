//! Pure: one revision, from its load to the decision on its pods and path.
//!
//! Load is evaluated every tick (2 s, as in Knative) and, out of turn, when it cannot wait: a request for a
//! revision without pods, or more load at this moment than decided pods carry at their target. An evaluation
//! out of turn uses the same formula on the same windows; only the moment differs, so it never decides what
//! the next tick would not, given the same load. Between evaluations the last wish stands, and a change of pods
//! or routes only moves the way to zero: Knative's one step down per tick is kept.

use std::{sync::Arc, time::Duration};

use common::wire::{Activity, Decision, Metric, Name, Path, ScalePolicy};

use crate::{
    decide::{Pods, Scaler, Why, Wish, target},
    usage::Load,
    window::Averages,
    zero::{Bound, Facts, Verdict, Zero},
};

/// How much of a revision's load can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// All its ready pods are reported, or it has none.
    Whole,
    /// Some ready pods are on nodes that do not report: more pods may be wanted, fewer never.
    Partial,
    /// Nothing reports: what there is stays.
    Blind,
}

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
    /// When load is evaluated next.
    tick_at: Duration,
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
            self.load.wake(&self.policy);
            let wish = Wish {
                pods: None,
                why: Why::NoData,
                excess_burst_capacity: 0.0,
                activators: 0,
                target: target(&self.policy),
            };
            let averages = Averages { stable: 0.0, panic: 0.0 };
            let scaler = Scaler::new(now, self.pods.ready);
            self.awake = Some(Box::new(Awake { scaler, wish, averages, tick_at: now }));
        }
    }

    /// Takes another policy; load is evaluated anew.
    pub fn set_policy(&mut self, now: Duration, policy: Arc<ScalePolicy>) {
        self.policy = policy;
        if self.is_awake() {
            self.load.wake(&self.policy);
        }
        self.hurry(now);
    }

    /// Lets load be evaluated at the next [`step`](Self::step), not at its tick.
    pub fn hurry(&mut self, now: Duration) {
        self.wake(now);
        if let Some(awake) = &mut self.awake {
            awake.tick_at = now;
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
        let wish = awake.wish;
        let zero = self.zero.get_or_insert_with(|| Zero::new(now, policy, facts, coming));
        let before = zero.activity;
        let verdict = zero.step(now, policy, facts, wish.pods, wish.excess_burst_capacity);
        let turned = before != zero.activity;
        let tick_at = awake.tick_at;
        // A step that changes nothing must not ask to be repeated at once.
        let again_at = verdict.again_at.filter(|&at| at > now || turned);
        if self.may_sleep(verdict)
            && verdict.activity == Activity::Inactive
            && facts.initial_scale_reached
        {
            self.sleep();
            let is_withdrawn = self.said.take().is_some();
            return Outcome { is_withdrawn, ..Outcome::default() };
        }
        let decision = self.say(name, verdict);
        if self.may_sleep(verdict) {
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
        self.load.settle(now, sight != Sight::Blind);
        let Some(awake) = &mut self.awake else { return };
        if now < awake.tick_at {
            return;
        }
        awake.tick_at = now + tick;
        let seen = self.load.averages(now, self.pods.ready, &self.policy);
        let pods = Pods { ready: self.pods.ready, is_reachable: self.is_reachable };
        awake.wish = awake.scaler.step(now, &self.policy, pods, seen);
        awake.averages = seen.unwrap_or(Averages { stable: 0.0, panic: 0.0 });
        if sight == Sight::Partial {
            let kept = self.pods.ready;
            awake.wish.pods = awake.wish.pods.map(|pods| pods.max(kept));
        }
    }

    fn may_sleep(&self, verdict: Verdict) -> bool {
        let is_inactive = matches!(verdict.activity, Activity::Inactive | Activity::TimedOut);
        verdict.pods == Some(0)
            && is_inactive
            && self.pods == Counts::default()
            && self.load.is_quiet()
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
        })
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
        (None, Why::NoData) => "load not known",
        (None, Why::Stable) => "stable load",
        (None, Why::Panic) => "panic",
        (None, Why::ActivationScale) => "activation-scale",
        (None, Why::UpRate) => "max-scale-up-rate",
        (None, Why::DownRate) => "max-scale-down-rate",
        (None, Why::DownDelay) => "scale-down-delay",
    }
}
