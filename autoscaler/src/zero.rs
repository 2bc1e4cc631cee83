//! Pure: wished pods → pods to run: bounds, Knative's `Active` condition and the way to zero.
//!
//! knative/serving `pkg/reconciler/autoscaling/kpa/{kpa,scaler}.go` at 98e5ef9.
//!
//! **Where the probe falls away.** Before the last pod may go, Knative makes sure that new requests reach the
//! activator: it probes the service until the activator answers, then waits until traffic has been proxied for
//! `scale-to-zero-grace-period`, because Endpoints take an unknown time to reach every node. Here the switch is
//! one store per node, and the controller stops no pod before every agent and activator has reported the table
//! that leads away from it. So probe and grace period have nothing left to do: zero is decided when a revision
//! turns inactive, and the way there is the controller's. Users of Knative see the same in the usual case, where
//! the activator has been in the path for longer than the grace period, and its documents call that period an
//! upper bound. Everything else keeps its time: active for a stable window, retention, progress deadline and
//! its buffer.

use std::time::Duration;

use common::wire::{Activity, Path, ScalePolicy};

/// Time left to name the cause of a failed start after its deadline, before its pods go. As in Knative.
const DEADLINE_BUFFER: Duration = Duration::from_secs(30);

/// What the machine is told of the revision at each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Pods that take requests.
    pub ready: u32,
    /// Whether a route leads to the revision.
    pub is_reachable: bool,
    /// Whether its initial scale was reached once.
    pub initial_scale_reached: bool,
}

/// Where a revision stands on its way up or down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zero {
    /// Knative's `Active` condition.
    pub activity: Activity,
    /// Since when.
    since: Duration,
    /// Pods last decided; `None`: none yet, what runs is kept.
    pub applied: Option<u32>,
}

/// What one step decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Pods to run; `None`: keep what there is.
    pub pods: Option<u32>,
    /// Way of new connections, as far as scale and burst capacity allow.
    pub path: Path,
    /// Knative's `Active` condition.
    pub activity: Activity,
    /// The bound that settled it; `None`: the wish was taken as it is.
    pub bound: Option<Bound>,
    /// When to look again though nothing changes.
    pub again_at: Option<Duration>,
}

/// A rule of this machine that settled a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Fewest pods.
    MinScale,
    /// Most pods.
    MaxScale,
    /// Pods a revision starts with.
    InitialScale,
    /// Zero pods are not allowed.
    NoScaleToZero,
    /// Waits until its pods are there.
    Starting,
    /// The start took too long.
    TimedOut,
    /// Not active for a stable window yet.
    StableWindow,
    /// No load; its `Active` condition turns first.
    TurningInactive,
    /// The last pod stays a while.
    Retention,
    /// No load for the stable window.
    Quiet,
    /// Load is not known for the whole window: what was decided is not lowered.
    Unknown,
    /// What is lowered is lowered at a tick.
    Tick,
}

/// What the way to zero yields: pods wanted, whether to act on it, why, and when to look again.
type Way = (Option<u32>, bool, Option<Bound>, Option<Duration>);

impl Zero {
    /// A revision as first met. `pods` counts those that are ready or starting.
    pub fn new(now: Duration, policy: &ScalePolicy, facts: Facts, pods: u32) -> Self {
        let starts = !facts.initial_scale_reached && policy.initial_scale > 0;
        let activity = if starts {
            Activity::Activating
        } else if pods == 0 {
            Activity::Inactive
        } else if facts.ready >= threshold(policy, facts) {
            Activity::Active
        } else {
            Activity::Activating
        };
        let first = policy.initial_scale.max(bounds(policy, facts).0);
        let applied = if facts.initial_scale_reached { None } else { Some(first) };
        Self { activity, since: now, applied }
    }

    /// Takes a wish (`None`: load is not known) and burst capacity at `now`. `hold`: fewer pods than these must not be
    /// decided now, and why.
    pub fn step(
        &mut self,
        now: Duration,
        policy: &ScalePolicy,
        facts: Facts,
        wish: Option<u32>,
        excess_burst_capacity: f64,
        hold: Option<(u32, Bound)>,
    ) -> Verdict {
        let (mut want, mut act, mut bound, mut again_at) = self.want(now, policy, facts, wish);
        if let (Some((held, why)), Some(wanted)) = (hold, want)
            && wanted < within(policy, facts, held)
        {
            let kept = self.applied.map(|pods| within(policy, facts, pods));
            (want, act, bound, again_at) = (kept, kept.is_some(), Some(why), None);
        }
        if act {
            self.applied = want;
        }
        // A revision that is inactive stays so while its last pods are held.
        let is_held = matches!(bound, Some(Bound::Unknown | Bound::Tick));
        if !(is_held && self.is_inactive()) {
            self.turn(now, want, policy, facts);
        }
        let is_asleep = want == Some(0) || ((want.is_none() || is_held) && self.is_inactive());
        let is_direct = !is_asleep && excess_burst_capacity >= 0.0;
        Verdict {
            pods: self.applied,
            path: if is_direct { Path::Direct } else { Path::Activator },
            activity: self.activity,
            bound,
            again_at,
        }
    }

    fn is_inactive(&self) -> bool {
        matches!(self.activity, Activity::Inactive | Activity::TimedOut)
    }

    /// Applies the bounds, then the way to zero.
    fn want(&self, now: Duration, policy: &ScalePolicy, facts: Facts, wish: Option<u32>) -> Way {
        let (fewest, most) = bounds(policy, facts);
        let wish = match wish {
            Some(wish) => wish,
            None if self.activity == Activity::Activating => 0,
            // Bounds are no load: they hold for what was decided before, as in Knative.
            None => match self.applied.filter(|&pods| within(policy, facts, pods) != pods) {
                Some(pods) => pods,
                None => return (None, false, None, None),
            },
        };
        let (want, bound) = if wish >= fewest && wish > most {
            (most.max(fewest), Some(Bound::MaxScale))
        } else if wish >= fewest {
            (wish, None)
        } else if fewest > policy.min_scale {
            (fewest, Some(Bound::InitialScale))
        } else {
            (fewest, Some(Bound::MinScale))
        };
        if want > 0 {
            return (Some(want), true, bound, None);
        }
        self.toward_zero(now, policy, facts)
    }

    fn toward_zero(&self, now: Duration, policy: &ScalePolicy, facts: Facts) -> Way {
        let been = now.saturating_sub(self.since);
        if !policy.scale_to_zero {
            return (Some(1), true, Some(Bound::NoScaleToZero), None);
        }
        match self.activity {
            Activity::Activating => {
                let deadline = policy.progress_deadline + DEADLINE_BUFFER;
                if been >= deadline {
                    (Some(0), true, Some(Bound::TimedOut), None)
                } else {
                    (None, false, Some(Bound::Starting), Some(self.since + deadline))
                }
            }
            Activity::Active if been < policy.stable_window => {
                let again_at = self.since + policy.stable_window;
                (Some(1), true, Some(Bound::StableWindow), Some(again_at))
            }
            Activity::Active => (Some(0), false, Some(Bound::TurningInactive), Some(now)),
            Activity::Inactive | Activity::TimedOut => self.last_pod(now, policy, facts),
        }
    }

    fn last_pod(&self, now: Duration, policy: &ScalePolicy, facts: Facts) -> Way {
        let been = now.saturating_sub(self.since);
        let retention = if facts.is_reachable { policy.retention } else { Duration::ZERO };
        if self.applied != Some(0) && been < retention {
            return (Some(0), false, Some(Bound::Retention), Some(self.since + retention));
        }
        (Some(0), true, Some(Bound::Quiet), None)
    }

    /// Moves the `Active` condition. It is `TimedOut` only on the way from activating to zero.
    fn turn(&mut self, now: Duration, want: Option<u32>, policy: &ScalePolicy, facts: Facts) {
        let threshold = threshold(policy, facts);
        let is_wanted = want.is_some_and(|pods| pods > 0);
        let rises = is_wanted || !self.is_inactive();
        let next = if want == Some(0) || (threshold == 0 && !is_wanted) {
            match self.activity {
                Activity::Activating if threshold > 0 => Activity::TimedOut,
                Activity::TimedOut => Activity::TimedOut,
                Activity::Active | Activity::Activating | Activity::Inactive => Activity::Inactive,
            }
        } else if !rises {
            self.activity
        } else if facts.ready >= threshold.max(1) {
            Activity::Active
        } else {
            Activity::Activating
        };
        if next != self.activity {
            (self.activity, self.since) = (next, now);
        }
    }
}

/// `pods` within the bounds; where they contradict each other the fewest win, as in Knative.
fn within(policy: &ScalePolicy, facts: Facts, pods: u32) -> u32 {
    let (fewest, most) = bounds(policy, facts);
    pods.min(most).max(fewest)
}

/// Fewest and most pods that may run. The fewest may be more: an initial scale above the maximum is reached first.
fn bounds(policy: &ScalePolicy, facts: Facts) -> (u32, u32) {
    let mut fewest = if facts.is_reachable { policy.min_scale } else { 0 };
    if facts.is_reachable && !facts.initial_scale_reached && policy.initial_scale > 1 {
        fewest = fewest.max(policy.initial_scale);
    }
    let most = if policy.max_scale == 0 { u32::MAX } else { policy.max_scale };
    (fewest, most)
}

/// Ready pods from which a revision is active.
fn threshold(policy: &ScalePolicy, facts: Facts) -> u32 {
    let fewest = if facts.is_reachable { policy.min_scale } else { 0 };
    let first = if facts.initial_scale_reached { 1 } else { policy.initial_scale };
    fewest.max(first)
}

#[cfg(test)]
mod tests;
