//! Pure: scaling parameters of a Revision, and the pool that stores equal ones once.

use std::{sync::Arc, time::Duration};

/// Scaling parameters of a Revision. Meaning, bounds and defaults: Knative `config-autoscaler` and
/// `autoscaling.knative.dev/*`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalePolicy {
    /// Metric that the autoscaler averages.
    pub metric: ScaleMetric,
    /// Highest load of one pod: concurrent requests, or requests per second. At least 0.01.
    pub target_total: f64,
    /// Share of `target_total` that the autoscaler aims at, 0 < u ≤ 1. Default 0.7.
    pub target_utilization: f64,
    /// Burst capacity to keep free; −1: always through the activator; 0 (shipped): never for lack of capacity.
    pub target_burst_capacity: f64,
    /// Concurrent requests that one activator is expected to handle. Default 100.
    pub activator_capacity: f64,
    /// Length of the stable window. Default 60 s, 6 s to 1 h.
    pub stable_window: Duration,
    /// Length of the panic window in percent of the stable one. Default 10.
    pub panic_window_percent: f64,
    /// Load that starts panic, in percent of the capacity of ready pods. Default 200.
    pub panic_threshold_percent: f64,
    /// Largest factor by which one decision may raise ready pods. Default 1000.
    pub max_scale_up_rate: f64,
    /// Largest divisor by which one decision may lower ready pods. Default 2.
    pub max_scale_down_rate: f64,
    /// Fewest pods while the Revision is reachable. Default 0.
    pub min_scale: u32,
    /// Most pods; 0: no limit.
    pub max_scale: u32,
    /// Pods that a new Revision starts with. Default 1.
    pub initial_scale: u32,
    /// Fewest pods while there is any load; 0 and 1: off.
    pub activation_scale: u32,
    /// Time for which a lower desired scale must hold before a decision follows. Default 0.
    pub scale_down_delay: Duration,
    /// True if zero pods are allowed. Default true.
    pub scale_to_zero: bool,
    /// Least time on the activator path before the last pod ends. Default 30 s.
    pub scale_to_zero_grace_period: Duration,
    /// Least time that the last pod stays after the load ended. Default 0.
    pub scale_to_zero_retention_period: Duration,
    /// Time after which a start that is not ready counts as failed. Default 600 s.
    pub progress_deadline: Duration,
    /// Weights of the seconds in a window's average.
    pub aggregation: WindowAggregation,
}

/// Pool of known policies, so that equal ones are stored once: ten thousand services use a handful.
#[derive(Clone, Debug, Default)]
pub struct ScalePolicyPool(Vec<Arc<ScalePolicy>>);

impl ScalePolicyPool {
    /// Number of policies to compare with; beyond them each policy is stored by itself.
    const CAPACITY: usize = 64;

    /// Returns the known policy equal to `policy`, or `policy` itself, which may become known.
    pub fn intern(&mut self, policy: Arc<ScalePolicy>) -> Arc<ScalePolicy> {
        if let Some(shared) = self.0.iter().find(|shared| **shared == policy) {
            return Arc::clone(shared);
        }
        // The pool itself holds one count of each: policies that no Revision uses are dropped first.
        if self.0.len() == Self::CAPACITY {
            self.0.retain(|shared| Arc::strong_count(shared) > 1);
        }
        if self.0.len() < Self::CAPACITY {
            self.0.push(Arc::clone(&policy));
        }
        policy
    }
}

impl Default for ScalePolicy {
    /// Returns Knative's `config-autoscaler` as shipped (`config/core/configmaps/autoscaler.yaml` at 98e5ef9), but for
    /// the burst capacity: 0 instead of 211, so that small services may use the direct path.
    fn default() -> Self {
        Self {
            metric: ScaleMetric::Concurrency,
            target_total: 100.0,
            target_utilization: 0.7,
            target_burst_capacity: 0.0,
            activator_capacity: 100.0,
            stable_window: Duration::from_secs(60),
            panic_window_percent: 10.0,
            panic_threshold_percent: 200.0,
            max_scale_up_rate: 1000.0,
            max_scale_down_rate: 2.0,
            min_scale: 0,
            max_scale: 0,
            initial_scale: 1,
            activation_scale: 0,
            scale_down_delay: Duration::ZERO,
            scale_to_zero: true,
            scale_to_zero_grace_period: Duration::from_secs(30),
            scale_to_zero_retention_period: Duration::ZERO,
            progress_deadline: Duration::from_secs(600),
            aggregation: WindowAggregation::Linear,
        }
    }
}

/// Metric that the autoscaler averages over its windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleMetric {
    /// Requests in flight at the same time.
    Concurrency,
    /// Requests that begin in each second.
    Rps,
}

/// Weights of the seconds in a window's average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAggregation {
    /// Equal weight for every second.
    Linear,
    /// Higher weight for newer seconds.
    WeightedExponential,
}
