//! Pure: averages → desired scale and burst capacity, by Knative's formula.
//!
//! Source: knative/serving `pkg/autoscaler/scaling/autoscaler.go` at 98e5ef9. Minimum, maximum and scale to zero are
//! applied later, in [`crate::scale_to_zero`].

use std::{collections::VecDeque, time::Duration};

use common::wire::ScalePolicy;

use crate::window::LoadAverages;

/// Granularity of the scale-down delay: Knative's evaluation tick.
const DELAY_BUCKET: Duration = Duration::from_secs(2);

/// Fewest activators of a Revision, as in Knative.
const MIN_ACTIVATORS: u32 = 2;

/// Lower bound of the target load of one pod, as in Knative.
const MIN_TARGET: f64 = 0.01;

/// Scaler of one Revision: state kept between two evaluations.
#[derive(Clone, Debug)]
pub struct Scaler {
    panic: Option<PanicMode>,
    /// Excess burst capacity last computed, kept while load is not known.
    last_burst_capacity: Option<f64>,
    /// Highest desired scale of each 2 s bucket within the scale-down delay, oldest first.
    delay_maxima: VecDeque<(u64, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct PanicMode {
    /// Time at which load was last over the panic threshold.
    last_over_threshold: Duration,
    /// Highest desired scale since panic mode began.
    max_pods: u32,
}

/// Pods of the Revision as an evaluation needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalerPods {
    /// Pods that take requests.
    pub ready: u32,
    /// True if a Route sends requests to the Revision.
    pub is_reachable: bool,
}

/// Scale that load asks for, before minimum, maximum and scale to zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DesiredScale {
    /// Desired pods; `None`: load is not known, and the present pods are kept.
    pub pods: Option<u32>,
    /// Rule that determined the number of pods.
    pub reason: ScaleReason,
    /// Spare capacity for a burst, in requests; if negative, the activator stays in the path.
    pub excess_burst_capacity: f64,
    /// Activators that should serve the Revision.
    pub activators: u32,
    /// Load aimed at for one pod, in the unit of the metric.
    pub target: f64,
}

/// Rule that determined the desired scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleReason {
    /// Load is not known.
    NoData,
    /// Requests in flight now need more pods than the average asks for.
    InFlight,
    /// Average load over the stable window.
    Stable,
    /// Panic mode: pods are added, never removed.
    Panic,
    /// The lower bound of pods while there is any load.
    ActivationScale,
    /// The bound of one step up.
    MaxScaleUpRate,
    /// The bound of one step down.
    MaxScaleDownRate,
    /// A higher number, still within the scale-down delay.
    ScaleDownDelay,
}

impl Scaler {
    /// A scaler for a Revision that has `ready` pods. With more than one it starts in panic mode. That keeps the pods
    /// until a stable window of load is known.
    pub fn new(now: Duration, ready: u32) -> Self {
        let panic = (ready > 1).then_some(PanicMode { last_over_threshold: now, max_pods: ready });
        Self { panic, last_burst_capacity: None, delay_maxima: VecDeque::new() }
    }

    /// Returns true while panic mode is on.
    pub fn is_panicking(&self) -> bool {
        self.panic.is_some()
    }

    /// Time at which load was last over the panic threshold; `None` outside panic mode.
    pub fn last_over_threshold(&self) -> Option<Duration> {
        self.panic.map(|panic| panic.last_over_threshold)
    }

    /// Computes the desired scale from `load` at `now`.
    ///
    /// Example (defaults, target 70, 1 ready pod): stable 75 asks for `ceil(75 / 70) = 2`; panic 150 asks for
    /// `ceil(150 / 70) = 3`. That is ≥ 200 % of the one ready pod, so panic mode begins with 3 desired pods.
    pub fn step(
        &mut self,
        now: Duration,
        policy: &ScalePolicy,
        pods: ScalerPods,
        load: Option<LoadAverages>,
    ) -> DesiredScale {
        let target = target_per_pod(policy);
        let desired_scale = |pods, reason, excess_burst_capacity, ready| DesiredScale {
            pods,
            reason,
            excess_burst_capacity,
            activators: activator_count(policy, ready),
            target,
        };
        let Some(load) = load else {
            // The last capacity is kept, so that the path does not change because load became unknown.
            let capacity =
                self.last_burst_capacity.unwrap_or_else(|| initial_burst_capacity(policy));
            return desired_scale(None, ScaleReason::NoData, capacity, pods.ready);
        };
        let (mut desired_pods, mut reason) = self.pods_for_load(now, policy, pods, load);
        // As in Knative, an unreachable Revision needs no delay: no request can ask for its pods again.
        if !policy.scale_down_delay.is_zero() && pods.is_reachable {
            let max_pods = self.max_within_delay(now, policy.scale_down_delay, desired_pods);
            if max_pods > desired_pods {
                (desired_pods, reason) = (max_pods, ScaleReason::ScaleDownDelay);
            }
        }
        let capacity = excess_burst_capacity(policy, pods.ready, load.panic);
        self.last_burst_capacity = Some(capacity);
        desired_scale(Some(desired_pods), reason, capacity, pods.ready)
    }

    /// Returns the pods for the load, with the reason. Enters, prolongs and leaves panic mode.
    fn pods_for_load(
        &mut self,
        now: Duration,
        policy: &ScalePolicy,
        pods: ScalerPods,
        load: LoadAverages,
    ) -> (u32, ScaleReason) {
        let (by_stable, by_panic) =
            (desired_pods(policy, pods, load.stable), desired_pods(policy, pods, load.panic));
        let raw_panic = (load.panic / target_per_pod(policy)).ceil();
        let is_over =
            raw_panic / f64::from(pods.ready.max(1)) >= policy.panic_threshold_percent / 100.0;
        // Each evaluation over the threshold extends panic mode; it ends a stable window after the last one.
        self.panic = match self.panic {
            Some(panic) if is_over => Some(PanicMode { last_over_threshold: now, ..panic }),
            Some(panic) if now > panic.last_over_threshold + policy.stable_window => None,
            Some(panic) => Some(panic),
            None => is_over.then_some(PanicMode { last_over_threshold: now, max_pods: 0 }),
        };
        let Some(panic) = &mut self.panic else { return by_stable };
        // Panic mode never lowers the number, so a dip within the stable window removes no pod.
        panic.max_pods = panic.max_pods.max(by_stable.0).max(by_panic.0);
        (panic.max_pods, ScaleReason::Panic)
    }

    /// Records `desired_pods` at `now`. Returns the highest number of desired pods within `delay`.
    fn max_within_delay(&mut self, now: Duration, delay: Duration, desired_pods: u32) -> u32 {
        let bucket = now.as_secs() / DELAY_BUCKET.as_secs();
        let bucket_count = delay.as_secs().div_ceil(DELAY_BUCKET.as_secs()).max(1);
        match self.delay_maxima.back_mut() {
            Some((last, highest)) if *last == bucket => *highest = desired_pods.max(*highest),
            _ => self.delay_maxima.push_back((bucket, desired_pods)),
        }
        while self.delay_maxima.front().is_some_and(|&(old, _)| old + bucket_count <= bucket) {
            self.delay_maxima.pop_front();
        }
        self.delay_maxima.iter().map(|&(_, highest)| highest).max().unwrap_or(desired_pods)
    }
}

/// Load aimed at for one pod: `max(0.01, target_total × target_utilization)`.
pub fn target_per_pod(policy: &ScalePolicy) -> f64 {
    (policy.target_total * policy.target_utilization).max(MIN_TARGET)
}

/// Pods that carry `level`, the load at this moment, at their target, within the bound of one step up.
pub fn pods_for_level(policy: &ScalePolicy, ready: u32, level: f64) -> u32 {
    let max_pods = (policy.max_scale_up_rate * f64::from(ready.max(1))).ceil();
    let needed =
        (level / target_per_pod(policy)).ceil().min(max_pods).clamp(0.0, f64::from(i32::MAX));
    needed as u32
}

/// Desired scale for `load`, within the rates, and the rule that determined it.
fn desired_pods(policy: &ScalePolicy, pods: ScalerPods, load: f64) -> (u32, ScaleReason) {
    let ready = f64::from(pods.ready.max(1));
    let max_pods = (policy.max_scale_up_rate * ready).ceil();
    // As in Knative, the rate down protects only Revisions that can receive requests.
    let min_pods =
        if pods.is_reachable { (ready / policy.max_scale_down_rate).floor() } else { 0.0 };
    let raw = (load / target_per_pod(policy)).ceil();
    let (desired, reason) = if raw > max_pods {
        (max_pods, ScaleReason::MaxScaleUpRate)
    } else if raw < min_pods {
        (min_pods, ScaleReason::MaxScaleDownRate)
    } else {
        (raw, ScaleReason::Stable)
    };
    // A cast from float saturates, so even an absurd load gives a valid number.
    let desired = desired.min(f64::from(i32::MAX)) as u32;
    if policy.activation_scale > 1 && raw > 0.0 && policy.activation_scale > desired {
        return (policy.activation_scale, ScaleReason::ActivationScale);
    }
    (desired, reason)
}

/// Requests that ready pods can carry beyond the panic window's load and the burst capacity.
///
/// Example (total 100, burst 211): 3 idle pods leave 89. At 70 per pod it is `30·N − 211`, positive from 8 pods on.
fn excess_burst_capacity(policy: &ScalePolicy, pods: u32, panic: f64) -> f64 {
    let burst = policy.target_burst_capacity;
    if burst == 0.0 {
        0.0
    } else if burst > 0.0 {
        (f64::from(pods) * policy.target_total - burst - panic).floor()
    } else {
        -1.0
    }
}

/// Excess burst capacity before any load is known. As in Knative, the fraction is cut off
/// (`pkg/autoscaler/scaling/multiscaler.go`).
fn initial_burst_capacity(policy: &ScalePolicy) -> f64 {
    let burst = policy.target_burst_capacity;
    if burst > 0.0 {
        (f64::from(policy.initial_scale) * policy.target_total - burst).trunc()
    } else {
        excess_burst_capacity(policy, 0, 0.0)
    }
}

/// Number of activators that carries all ready pods and the burst, at least two.
fn activator_count(policy: &ScalePolicy, ready: u32) -> u32 {
    let burst = policy.target_burst_capacity;
    if burst == 0.0 {
        return MIN_ACTIVATORS;
    }
    let capacity_needed = f64::from(ready) * policy.target_total + burst.max(0.0);
    let count = (capacity_needed / policy.activator_capacity).ceil();
    (count.min(f64::from(i32::MAX)) as u32).max(MIN_ACTIVATORS)
}

#[cfg(test)]
mod tests;
