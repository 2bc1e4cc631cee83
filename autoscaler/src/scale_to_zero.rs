//! Pure: desired scale → requested scale: bounds, Knative's `Active` condition and scale to zero.
//!
//! Source: knative/serving `pkg/reconciler/autoscaling/kpa/{kpa,scaler}.go` at 98e5ef9.
//!
//! **No probe and no grace period.** Before the last pod may stop, Knative makes sure that new requests reach the
//! activator. It probes the service until the activator responds. Then it waits until traffic has passed the activator
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

/// State of the Revision that each step needs.
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
    /// Requested scale of the last decision; `None`: no decision yet, the present pods are kept.
    pub requested_pods: Option<u32>,
    /// True if only unknown load has kept the Revision from turning inactive.
    is_turn_held: bool,
}

/// Pods to run after bounds and scale to zero: the decision of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedScale {
    /// Pods to run; `None`: the present pods are kept.
    pub pods: Option<u32>,
    /// Path of new connections, as far as scale and burst capacity permit.
    pub path: ConnectionPath,
    /// Knative's `Active` condition after the step.
    pub activity: RevisionActivity,
    /// Bound that determined the pods; `None`: the requested scale is the desired scale.
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

/// Scale after the bounds and scale to zero.
#[derive(Clone, Copy, Debug, Default)]
struct BoundedScale {
    /// Requested scale; `None`: the present pods are kept.
    pods: Option<u32>,
    /// True if `pods` become the requested scale in this step.
    takes_effect: bool,
    bound: Option<ScaleBound>,
    next_step_at: Option<Duration>,
}

impl BoundedScale {
    /// Returns a scale that takes effect in this step.
    fn effective(pods: u32, bound: Option<ScaleBound>) -> Self {
        Self { pods: Some(pods), takes_effect: true, bound, next_step_at: None }
    }

    /// Returns a scale that does not take effect yet.
    fn deferred(pods: Option<u32>, bound: ScaleBound, next_step_at: Duration) -> Self {
        let next_step_at = Some(next_step_at);
        Self { pods, takes_effect: false, bound: Some(bound), next_step_at }
    }
}

impl ScaleToZero {
    /// State of a Revision first met at `now`. `pods` counts those that are ready or starting.
    pub fn new(now: Duration, policy: &ScalePolicy, input: ScaleToZeroInput, pods: u32) -> Self {
        let is_starting = !input.initial_scale_reached && policy.initial_scale > 0;
        let activity = if is_starting {
            RevisionActivity::Activating
        } else if pods == 0 {
            RevisionActivity::Inactive
        } else if input.ready >= active_threshold(policy, input) {
            RevisionActivity::Active
        } else {
            RevisionActivity::Activating
        };
        let first_pods = policy.initial_scale.max(scale_bounds(policy, input).0);
        // A Revision that has reached its initial scale before gets its number from its load.
        let requested_pods = if input.initial_scale_reached { None } else { Some(first_pods) };
        Self { activity, activity_since: now, requested_pods, is_turn_held: false }
    }

    /// Ends a start that no decision has requested. The pods that started are kept without load, so that the Revision
    /// is inactive, and no deadline waits for them.
    pub fn end_unrequested_start(&mut self, now: Duration) {
        let is_requested = self.requested_pods.is_some_and(|pods| pods > 0);
        if self.activity == RevisionActivity::Activating && !is_requested {
            (self.activity, self.activity_since) = (RevisionActivity::Inactive, now);
        }
    }

    /// Applies the desired scale (`None`: load is not known) and excess burst capacity at `now`. `scale_down_minimum`
    /// is the number below which pods must not be lowered now, and the bound that forbids it.
    pub fn step(
        &mut self,
        now: Duration,
        policy: &ScalePolicy,
        input: ScaleToZeroInput,
        desired_pods: Option<u32>,
        excess_burst_capacity: f64,
        scale_down_minimum: Option<(u32, ScaleBound)>,
    ) -> RequestedScale {
        let BoundedScale {
            pods: mut requested_pods,
            mut takes_effect,
            mut bound,
            mut next_step_at,
        } = self.apply_bounds(now, policy, input, desired_pods);
        let (is_wanted, is_turning) =
            (requested_pods > Some(0), bound == Some(ScaleBound::TurningInactive));
        if let (Some((minimum, minimum_bound)), Some(pods)) = (scale_down_minimum, requested_pods)
            && pods < clamp_to_bounds(policy, input, minimum)
        {
            // The requested scale stays, not `minimum`: a minimum must never raise the number.
            let previous_pods =
                self.requested_pods.map(|pods| clamp_to_bounds(policy, input, pods));
            (requested_pods, takes_effect, bound, next_step_at) =
                (previous_pods, previous_pods.is_some(), Some(minimum_bound), None);
        }
        if takes_effect {
            self.requested_pods = requested_pods;
        }
        // An inactive Revision stays inactive while its last pods are held: nothing has shown any load.
        let is_held = matches!(bound, Some(ScaleBound::LoadUnknown | ScaleBound::BetweenTicks));
        if !(is_held && self.is_inactive()) {
            self.update_activity(now, requested_pods, policy, input);
        }
        // Load after a turn that was held begins a new stable window, as it would after the turn. Otherwise what was
        // unknown would shorten the time for which the last pod stays.
        if self.is_turn_held && is_wanted && self.activity == RevisionActivity::Active {
            self.activity_since = now;
        }
        self.is_turn_held = !is_wanted && is_held && (self.is_turn_held || is_turning);
        // A Revision without pods needs the activator in its path, which makes clients wait instead of failing.
        let is_asleep = requested_pods == Some(0)
            || ((requested_pods.is_none() || is_held) && self.is_inactive());
        let is_direct = !is_asleep && excess_burst_capacity >= 0.0;
        RequestedScale {
            pods: self.requested_pods,
            path: if is_direct { ConnectionPath::Direct } else { ConnectionPath::Activator },
            activity: self.activity,
            bound,
            next_step_at,
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
        input: ScaleToZeroInput,
        desired_pods: Option<u32>,
    ) -> BoundedScale {
        let (min_pods, max_pods) = scale_bounds(policy, input);
        let desired_pods = match desired_pods {
            Some(desired_pods) => desired_pods,
            // Unknown load during a start must still end at the progress deadline.
            None if self.activity == RevisionActivity::Activating => 0,
            // Bounds do not depend on load: they apply to the last requested scale, as in Knative.
            None => {
                match self
                    .requested_pods
                    .filter(|&pods| clamp_to_bounds(policy, input, pods) != pods)
                {
                    Some(pods) => pods,
                    None => return BoundedScale::default(),
                }
            }
        };
        // Where the bounds contradict each other the lower one wins; see `clamp_to_bounds`.
        let (requested_pods, bound) = if desired_pods >= min_pods && desired_pods > max_pods {
            (max_pods.max(min_pods), Some(ScaleBound::MaxScale))
        } else if desired_pods >= min_pods {
            (desired_pods, None)
        } else if min_pods > policy.min_scale {
            (min_pods, Some(ScaleBound::InitialScale))
        } else {
            (min_pods, Some(ScaleBound::MinScale))
        };
        if requested_pods > 0 {
            return BoundedScale::effective(requested_pods, bound);
        }
        self.scale_toward_zero(now, policy, input)
    }

    /// Returns the next step of a Revision without load: first the activity turns, then the pods go.
    fn scale_toward_zero(
        &self,
        now: Duration,
        policy: &ScalePolicy,
        input: ScaleToZeroInput,
    ) -> BoundedScale {
        let elapsed = now.saturating_sub(self.activity_since);
        if !policy.scale_to_zero {
            return BoundedScale::effective(1, Some(ScaleBound::NoScaleToZero));
        }
        match self.activity {
            RevisionActivity::Activating => {
                let deadline = policy.progress_deadline + DEADLINE_BUFFER;
                if elapsed >= deadline {
                    BoundedScale::effective(0, Some(ScaleBound::TimedOut))
                } else {
                    let deadline_at = self.activity_since + deadline;
                    BoundedScale::deferred(None, ScaleBound::Starting, deadline_at)
                }
            }
            RevisionActivity::Active if elapsed < policy.stable_window => {
                let window_end = self.activity_since + policy.stable_window;
                BoundedScale {
                    next_step_at: Some(window_end),
                    ..BoundedScale::effective(1, Some(ScaleBound::StableWindow))
                }
            }
            // The condition turns first and moves the path to the activator; the next step, at once, requests zero
            // pods.
            RevisionActivity::Active => {
                BoundedScale::deferred(Some(0), ScaleBound::TurningInactive, now)
            }
            RevisionActivity::Inactive | RevisionActivity::TimedOut => {
                self.retain_last_pod(now, policy, input)
            }
        }
    }

    fn retain_last_pod(
        &self,
        now: Duration,
        policy: &ScalePolicy,
        input: ScaleToZeroInput,
    ) -> BoundedScale {
        let elapsed = now.saturating_sub(self.activity_since);
        let retention =
            if input.is_reachable { policy.scale_to_zero_retention_period } else { Duration::ZERO };
        // A Revision that was at zero already has no last pod to retain.
        if self.requested_pods != Some(0) && elapsed < retention {
            let retention_end = self.activity_since + retention;
            return BoundedScale::deferred(Some(0), ScaleBound::Retention, retention_end);
        }
        BoundedScale::effective(0, Some(ScaleBound::NoLoad))
    }

    /// Moves the `Active` condition. `TimedOut` follows only a start that ends at zero pods.
    fn update_activity(
        &mut self,
        now: Duration,
        requested_pods: Option<u32>,
        policy: &ScalePolicy,
        input: ScaleToZeroInput,
    ) {
        let threshold = active_threshold(policy, input);
        // An inactive Revision becomes active again only by a requested scale above zero, not by pods that still run.
        let is_wanted = requested_pods.is_some_and(|pods| pods > 0);
        let may_rise = is_wanted || !self.is_inactive();
        let activity = if requested_pods == Some(0) || (threshold == 0 && !is_wanted) {
            // A start that ends without an active Revision has failed, and stays so until pods are requested again.
            match self.activity {
                RevisionActivity::Activating if threshold > 0 => RevisionActivity::TimedOut,
                RevisionActivity::TimedOut => RevisionActivity::TimedOut,
                RevisionActivity::Active
                | RevisionActivity::Activating
                | RevisionActivity::Inactive => RevisionActivity::Inactive,
            }
        } else if !may_rise {
            self.activity
        } else if input.ready >= threshold.max(1) {
            RevisionActivity::Active
        } else {
            RevisionActivity::Activating
        };
        if activity != self.activity {
            (self.activity, self.activity_since) = (activity, now);
        }
    }
}

/// Limits `pods` to the bounds. Where these contradict each other the lower bound wins: in Knative only for `pods` below
/// it, while more `pods` get the upper bound (knative/serving `pkg/reconciler/autoscaling/kpa/scaler.go`, `applyBounds`).
fn clamp_to_bounds(policy: &ScalePolicy, input: ScaleToZeroInput, pods: u32) -> u32 {
    let (min_pods, max_pods) = scale_bounds(policy, input);
    pods.min(max_pods).max(min_pods)
}

/// Lower and upper bound of pods. The lower one may be higher: an initial scale above the maximum is reached first.
fn scale_bounds(policy: &ScalePolicy, input: ScaleToZeroInput) -> (u32, u32) {
    let mut min_pods = if input.is_reachable { policy.min_scale } else { 0 };
    if input.is_reachable && !input.initial_scale_reached && policy.initial_scale > 1 {
        min_pods = min_pods.max(policy.initial_scale);
    }
    let max_pods = if policy.max_scale == 0 { u32::MAX } else { policy.max_scale };
    (min_pods, max_pods)
}

/// Number of ready pods from which a Revision is active.
fn active_threshold(policy: &ScalePolicy, input: ScaleToZeroInput) -> u32 {
    let min_pods = if input.is_reachable { policy.min_scale } else { 0 };
    let first_pods = if input.initial_scale_reached { 1 } else { policy.initial_scale };
    min_pods.max(first_pods)
}

#[cfg(test)]
mod tests;
