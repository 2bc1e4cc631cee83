//! Pure: desired pods → requested pods: bounds, Knative's `Active` condition and scale to zero.
//!
//! Source: knative/serving `pkg/reconciler/autoscaling/kpa/{kpa,scaler}.go` at 98e5ef9.
//!
//! **No probe and no grace period.** Before the last pod may stop, Knative makes sure that new requests reach the
//! activator. It probes the service until the activator answers. Then it waits until traffic has passed the activator
//! for `scale-to-zero-grace-period`, because Endpoints take an unknown time to reach every node. In Rouse the switch is
//! one store per node. The controller stops no pod before every agent and activator has acknowledged the RouteTable in
//! which the pod drains. So the probe and the grace period have no purpose here: zero is decided when a Revision turns
//! inactive, and the controller carries it out. Users of Knative see no difference in the usual case, where the
//! activator has been in the path for longer than the grace period; Knative documents that period as an upper bound.
//! All other times are Knative's: active for a stable window, retention, progress deadline and its buffer.

use std::time::Duration;

use common::wire::{ConnectionPath, RevisionActivity, ScalePolicy};

/// Time between the progress deadline of a failed start and the removal of its pods, as in Knative. In it the cause of
/// the failure can be reported.
const DEADLINE_BUFFER: Duration = Duration::from_secs(30);

/// Facts about the Revision that each step needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleToZeroInput {
    /// Pods that take requests.
    pub ready: u32,
    /// True if a Route sends requests to the Revision.
    pub is_reachable: bool,
    /// True once the Revision has reached its initial scale.
    pub initial_scale_reached: bool,
}

/// State of one Revision between asleep and active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleToZero {
    /// Knative's `Active` condition of the Revision.
    pub activity: RevisionActivity,
    /// Time of the last change of `activity`.
    activity_since: Duration,
    /// Requested pods of the last decision; `None`: no decision yet, the present pods are kept.
    pub applied_pods: Option<u32>,
    /// True if only unknown load has kept the Revision from turning inactive.
    is_turn_held: bool,
}

/// Decision of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedScale {
    /// Pods to run; `None`: the present pods are kept.
    pub pods: Option<u32>,
    /// Path of new connections, as far as scale and burst capacity permit.
    pub path: ConnectionPath,
    /// Knative's `Active` condition after the step.
    pub activity: RevisionActivity,
    /// Bound that determined the pods; `None`: the desired pods were taken unchanged.
    pub bound: Option<ScaleBound>,
    /// Time of the next step even if nothing changes.
    pub next_step_at: Option<Duration>,
}

/// Rule of this state machine that determined a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleBound {
    /// The lower bound of pods, `min-scale`.
    MinScale,
    /// The upper bound of pods, `max-scale`.
    MaxScale,
    /// The number of pods that a Revision starts with.
    InitialScale,
    /// Scale to zero is switched off.
    NoScaleToZero,
    /// The first pods are still starting.
    Starting,
    /// The start exceeded its progress deadline.
    TimedOut,
    /// The Revision has not been active for a stable window yet.
    StableWindow,
    /// No load; the `Active` condition changes first.
    TurningInactive,
    /// The last pod stays for the retention period.
    Retention,
    /// No load for the stable window.
    NoLoad,
    /// Load is not known for the whole window, so pods are not lowered.
    LoadUnknown,
    /// Pods are lowered only at a tick.
    BetweenTicks,
}

/// Result of [`ScaleToZero::scale_toward_zero`]: requested pods, true if they take effect, the bound, and the time of
/// the next step.
type BoundedScale = (Option<u32>, bool, Option<ScaleBound>, Option<Duration>);

impl ScaleToZero {
    /// State of a Revision first met at `now`. `pods` counts those that are ready or starting.
    pub fn new(now: Duration, policy: &ScalePolicy, facts: ScaleToZeroInput, pods: u32) -> Self {
        let starts = !facts.initial_scale_reached && policy.initial_scale > 0;
        let activity = if starts {
            RevisionActivity::Activating
        } else if pods == 0 {
            RevisionActivity::Inactive
        } else if facts.ready >= active_threshold(policy, facts) {
            RevisionActivity::Active
        } else {
            RevisionActivity::Activating
        };
        let first = policy.initial_scale.max(scale_bounds(policy, facts).0);
        let applied_pods = if facts.initial_scale_reached { None } else { Some(first) };
        Self { activity, activity_since: now, applied_pods, is_turn_held: false }
    }

    /// Applies desired pods (`wish`; `None`: load is not known) and excess burst capacity at `now`. `hold` is the
    /// number below which pods must not be lowered now, and the bound that forbids it.
    pub fn step(
        &mut self,
        now: Duration,
        policy: &ScalePolicy,
        facts: ScaleToZeroInput,
        wish: Option<u32>,
        excess_burst_capacity: f64,
        hold: Option<(u32, ScaleBound)>,
    ) -> RequestedScale {
        let (mut want, mut act, mut bound, mut again_at) =
            self.apply_bounds(now, policy, facts, wish);
        let (is_wanted, turns) = (want > Some(0), bound == Some(ScaleBound::TurningInactive));
        if let (Some((held, why)), Some(wanted)) = (hold, want)
            && wanted < clamp_to_bounds(policy, facts, held)
        {
            // What was decided stays, not `held`: the hold must never raise the number.
            let kept = self.applied_pods.map(|pods| clamp_to_bounds(policy, facts, pods));
            (want, act, bound, again_at) = (kept, kept.is_some(), Some(why), None);
        }
        if act {
            self.applied_pods = want;
        }
        // An inactive Revision stays inactive while its last pods are held: nothing has shown any load.
        let is_held = matches!(bound, Some(ScaleBound::LoadUnknown | ScaleBound::BetweenTicks));
        if !(is_held && self.is_inactive()) {
            self.update_activity(now, want, policy, facts);
        }
        // Load after a turn that was held begins a new stable window, as it would after the turn. Otherwise what was
        // unknown would shorten the time for which the last pod stays.
        if self.is_turn_held && is_wanted && self.activity == RevisionActivity::Active {
            self.activity_since = now;
        }
        self.is_turn_held = !is_wanted && is_held && (self.is_turn_held || turns);
        // A Revision without pods needs the activator in its path, which makes clients wait instead of failing.
        let is_asleep = want == Some(0) || ((want.is_none() || is_held) && self.is_inactive());
        let is_direct = !is_asleep && excess_burst_capacity >= 0.0;
        RequestedScale {
            pods: self.applied_pods,
            path: if is_direct { ConnectionPath::Direct } else { ConnectionPath::Activator },
            activity: self.activity,
            bound,
            next_step_at: again_at,
        }
    }

    fn is_inactive(&self) -> bool {
        matches!(self.activity, RevisionActivity::Inactive | RevisionActivity::TimedOut)
    }

    /// Applies the bounds, then scale to zero.
    fn apply_bounds(
        &self,
        now: Duration,
        policy: &ScalePolicy,
        facts: ScaleToZeroInput,
        wish: Option<u32>,
    ) -> BoundedScale {
        let (fewest, most) = scale_bounds(policy, facts);
        let wish = match wish {
            Some(wish) => wish,
            // Unknown load during a start must still end at the progress deadline.
            None if self.activity == RevisionActivity::Activating => 0,
            // Bounds do not depend on load: they apply to what was decided before, as in Knative.
            None => {
                match self.applied_pods.filter(|&pods| clamp_to_bounds(policy, facts, pods) != pods)
                {
                    Some(pods) => pods,
                    None => return (None, false, None, None),
                }
            }
        };
        // Where the bounds contradict each other the lower one wins, as in Knative.
        let (want, bound) = if wish >= fewest && wish > most {
            (most.max(fewest), Some(ScaleBound::MaxScale))
        } else if wish >= fewest {
            (wish, None)
        } else if fewest > policy.min_scale {
            (fewest, Some(ScaleBound::InitialScale))
        } else {
            (fewest, Some(ScaleBound::MinScale))
        };
        if want > 0 {
            return (Some(want), true, bound, None);
        }
        self.scale_toward_zero(now, policy, facts)
    }

    fn scale_toward_zero(
        &self,
        now: Duration,
        policy: &ScalePolicy,
        facts: ScaleToZeroInput,
    ) -> BoundedScale {
        let been = now.saturating_sub(self.activity_since);
        if !policy.scale_to_zero {
            return (Some(1), true, Some(ScaleBound::NoScaleToZero), None);
        }
        match self.activity {
            RevisionActivity::Activating => {
                let deadline = policy.progress_deadline + DEADLINE_BUFFER;
                if been >= deadline {
                    (Some(0), true, Some(ScaleBound::TimedOut), None)
                } else {
                    (None, false, Some(ScaleBound::Starting), Some(self.activity_since + deadline))
                }
            }
            RevisionActivity::Active if been < policy.stable_window => {
                let again_at = self.activity_since + policy.stable_window;
                (Some(1), true, Some(ScaleBound::StableWindow), Some(again_at))
            }
            // The condition turns first and moves the path to the activator; the next step, at once, requests zero
            // pods.
            RevisionActivity::Active => {
                (Some(0), false, Some(ScaleBound::TurningInactive), Some(now))
            }
            RevisionActivity::Inactive | RevisionActivity::TimedOut => {
                self.retain_last_pod(now, policy, facts)
            }
        }
    }

    fn retain_last_pod(
        &self,
        now: Duration,
        policy: &ScalePolicy,
        facts: ScaleToZeroInput,
    ) -> BoundedScale {
        let been = now.saturating_sub(self.activity_since);
        let retention =
            if facts.is_reachable { policy.scale_to_zero_retention_period } else { Duration::ZERO };
        if self.applied_pods != Some(0) && been < retention {
            return (
                Some(0),
                false,
                Some(ScaleBound::Retention),
                Some(self.activity_since + retention),
            );
        }
        (Some(0), true, Some(ScaleBound::NoLoad), None)
    }

    /// Moves the `Active` condition. `TimedOut` follows only a start that ends at zero pods.
    fn update_activity(
        &mut self,
        now: Duration,
        want: Option<u32>,
        policy: &ScalePolicy,
        facts: ScaleToZeroInput,
    ) {
        let threshold = active_threshold(policy, facts);
        // An inactive Revision becomes active again only by requested pods, not by pods that are still there.
        let is_wanted = want.is_some_and(|pods| pods > 0);
        let rises = is_wanted || !self.is_inactive();
        let next = if want == Some(0) || (threshold == 0 && !is_wanted) {
            match self.activity {
                RevisionActivity::Activating if threshold > 0 => RevisionActivity::TimedOut,
                RevisionActivity::TimedOut => RevisionActivity::TimedOut,
                RevisionActivity::Active
                | RevisionActivity::Activating
                | RevisionActivity::Inactive => RevisionActivity::Inactive,
            }
        } else if !rises {
            self.activity
        } else if facts.ready >= threshold.max(1) {
            RevisionActivity::Active
        } else {
            RevisionActivity::Activating
        };
        if next != self.activity {
            (self.activity, self.activity_since) = (next, now);
        }
    }
}

/// Limits `pods` to the bounds; where these contradict each other the lower bound wins, as in Knative.
fn clamp_to_bounds(policy: &ScalePolicy, facts: ScaleToZeroInput, pods: u32) -> u32 {
    let (fewest, most) = scale_bounds(policy, facts);
    pods.min(most).max(fewest)
}

/// Lower and upper bound of pods. The lower one may be higher: an initial scale above the maximum is reached first.
fn scale_bounds(policy: &ScalePolicy, facts: ScaleToZeroInput) -> (u32, u32) {
    let mut fewest = if facts.is_reachable { policy.min_scale } else { 0 };
    if facts.is_reachable && !facts.initial_scale_reached && policy.initial_scale > 1 {
        fewest = fewest.max(policy.initial_scale);
    }
    let most = if policy.max_scale == 0 { u32::MAX } else { policy.max_scale };
    (fewest, most)
}

/// Number of ready pods from which a Revision is active.
fn active_threshold(policy: &ScalePolicy, facts: ScaleToZeroInput) -> u32 {
    let fewest = if facts.is_reachable { policy.min_scale } else { 0 };
    let first = if facts.initial_scale_reached { 1 } else { policy.initial_scale };
    fewest.max(first)
}

#[cfg(test)]
mod tests;
