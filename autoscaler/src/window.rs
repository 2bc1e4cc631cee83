//! Pure: load by the second, and its averages over the stable and the panic window.
//!
//! Knative's rules (knative/serving `pkg/autoscaler/aggregation/bucketing.go` at 98e5ef9): a second without a record
//! between two recorded ones counts as 0; silence before the first and after the last record does not dilute the
//! average; silence longer than the window empties it.
//!
//! One difference in phase: Knative's senders record whole seconds, here load arrives in parts. A second therefore
//! counts once it is over. The running second counts too, with the load recorded so far, if that *raises* the average.
//! Its load can only grow, so this never overstates it.
//!
//! One difference in the meaning of silence: seconds without any report are not known to be quiet. They never lower a
//! weighted average. Quiet seconds that are reported are recorded.

use std::time::Duration;

use common::wire::WindowAggregation;

/// Inverse of the step to which a linear average is rounded, as in Knative, so that float noise never asks for a pod.
const PRECISION: f64 = 1e6;

/// Share of the load that the weights of a weighted-exponential average cover.
const WEIGHTED_COVERAGE: f64 = 0.9999;

/// Lower bound of the weight of the newest second in a weighted-exponential average.
const MIN_NEWEST_WEIGHT: f64 = 0.2;

/// Magnitude below which a sum is floating-point residue and counts as zero.
const FLOAT_RESIDUE: f64 = 1e-9;

/// Load of one Revision by the second, newest last, over the stable window and the running second.
#[derive(Clone, Debug)]
pub struct LoadWindow {
    /// Ring of sums indexed by second; holds the stable window and the running second.
    sums: Box<[f64]>,
    /// Length of the panic window in seconds.
    panic_len: u64,
    recorded: Option<RecordedRange>,
    prepaid: PrepaidLoad,
}

/// Load counted ahead of its time, and the second it was counted in.
#[derive(Clone, Copy, Debug, Default)]
struct PrepaidLoad {
    second: u64,
    remaining: f64,
    used: f64,
}

/// Range of recorded seconds, in whole seconds of the autoscaler's clock.
#[derive(Clone, Copy, Debug)]
struct RecordedRange {
    /// First second since the stable window was last empty.
    first: u64,
    /// First second since the panic window was last empty.
    first_in_panic: u64,
    last: u64,
}

/// Averages of load over both windows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadAverages {
    /// Average over the stable window, in the unit of the metric.
    pub stable: f64,
    /// Average over the panic window, in the unit of the metric.
    pub panic: f64,
}

impl LoadWindow {
    /// An empty window. `stable` is whole seconds, at least one. The panic window is `panic_percent` of it, rounded, at
    /// least one second.
    pub fn new(stable: Duration, panic_percent: f64) -> Self {
        let len = stable.as_secs().max(1);
        let sums = vec![0.0; usize::try_from(len).unwrap_or(usize::MAX) + 1].into_boxed_slice();
        let panic_len = panic_seconds(len, panic_percent);
        Self { sums, panic_len, recorded: None, prepaid: PrepaidLoad::default() }
    }

    /// Changes the lengths of the windows and keeps the newest seconds.
    pub fn resize(&mut self, stable: Duration, panic_percent: f64) {
        let len = stable.as_secs().max(1);
        self.panic_len = panic_seconds(len, panic_percent);
        // The length of the panic window alone changes only how many of these seconds are read.
        if len == self.len() {
            return;
        }
        let mut next = Self::new(stable, panic_percent);
        if let Some(recorded) = self.recorded {
            let oldest = recorded.last.saturating_sub(len.min(self.len()));
            next.recorded = Some(RecordedRange {
                first: recorded.first.max(oldest),
                first_in_panic: recorded.first_in_panic.max(oldest),
                last: recorded.last,
            });
            (oldest.max(recorded.first)..=recorded.last).for_each(|second| {
                next.sums[next.index(second)] = self.sums[self.index(second)];
            });
        }
        // An amount that was counted ahead of time stays to be used up, whatever the length.
        next.prepaid = self.prepaid;
        *self = next;
    }

    /// Counts `amount` in the second of `at` ahead of time; later additions to that second use it up first.
    pub fn prepay(&mut self, at: Duration, amount: f64) {
        // Cleared first, so that `add` does not charge the new amount to an older prepayment.
        self.prepaid = PrepaidLoad::default();
        self.add(at, amount);
        self.prepaid = PrepaidLoad { second: at.as_secs(), remaining: amount, used: 0.0 };
    }

    /// Adds `amount` to the second of `at`. Amounts older than the window are dropped.
    pub fn add(&mut self, at: Duration, mut amount: f64) {
        let second = at.as_secs();
        self.mark_recorded(second);
        if self.prepaid.second == second {
            amount -= self.prepaid.deduct(amount);
        }
        if self.recorded.is_some_and(|recorded| second + self.len() >= recorded.last) {
            let index = self.index(second);
            let sum = self.sums[index] + amount;
            // An amount taken back exactly must leave zero: a weighted average would round the residue up to a pod.
            self.sums[index] = if sum.abs() < FLOAT_RESIDUE { 0.0 } else { sum };
        }
    }

    /// Adds a load of `level` held from `from` to `to`: each second gets its share of the area.
    pub fn add_level(&mut self, level: f64, from: Duration, to: Duration) {
        let oldest = Duration::from_secs(to.as_secs().saturating_sub(self.len()));
        let mut at = from.max(oldest);
        while at < to {
            let end = Duration::from_secs(at.as_secs() + 1).min(to);
            self.add(at, level * (end - at).as_secs_f64());
            at = end;
        }
    }

    /// Records that load is known up to `now`: seconds that are over and have no record held no load.
    pub fn mark_known_until(&mut self, now: Duration) {
        self.mark_recorded(now.as_secs().saturating_sub(1));
    }

    /// Records that all load between two times is known: the seconds that are over by `until` and have no record held none.
    pub fn mark_known_between(&mut self, from: Duration, until: Duration) {
        let end = until.as_secs();
        let begin = from.as_secs().max(end.saturating_sub(self.len()));
        (begin..end).for_each(|second| self.mark_recorded(second));
    }

    /// Load recorded in the second of `at`; 0 outside the window.
    pub fn load_in_second(&self, at: Duration) -> f64 {
        let second = at.as_secs();
        let is_inside = |recorded: RecordedRange| {
            (recorded.last.saturating_sub(self.len())..=recorded.last).contains(&second)
        };
        if self.recorded.is_some_and(is_inside) { self.sums[self.index(second)] } else { 0.0 }
    }

    /// Returns true if no second of the window that ends at `now` holds any load.
    pub fn is_quiet(&self, now: Duration) -> bool {
        let Some(recorded) = self.recorded else { return true };
        now.as_secs() > recorded.last + self.len() || self.sums.iter().all(|&sum| sum <= 0.0)
    }

    /// Averages at `now`, with a load of at least `min_running_load` in the running second; `None`: nothing is known.
    pub fn averages(
        &self,
        now: Duration,
        min_running_load: f64,
        aggregation: WindowAggregation,
    ) -> Option<LoadAverages> {
        let Some(recorded) = self.recorded else {
            return (min_running_load > 0.0)
                .then_some(LoadAverages { stable: min_running_load, panic: min_running_load });
        };
        let running = now.as_secs();
        if running > recorded.last.saturating_add(self.len() + 1) && min_running_load <= 0.0 {
            return None;
        }
        // The average without the running second, or with it if that is higher: a part of a second must not lower it.
        let average_over = |len, first| {
            let without_running =
                running.checked_sub(1).map(|end| self.average(end, len, first, None, aggregation));
            let running_load = self.load_in_second(now).max(min_running_load);
            let with_running = (recorded.last >= running || min_running_load > 0.0)
                .then(|| self.average(running, len, first, Some(running_load), aggregation));
            without_running.unwrap_or_default().max(with_running.unwrap_or_default())
        };
        Some(LoadAverages {
            stable: average_over(self.len(), recorded.first),
            panic: average_over(self.panic_len, recorded.first_in_panic),
        })
    }

    /// Average over the `len` seconds that end with `end`, recorded since `first`; `newest` replaces the sum of `end`.
    fn average(
        &self,
        end: u64,
        len: u64,
        first: u64,
        newest: Option<f64>,
        aggregation: WindowAggregation,
    ) -> f64 {
        let Some(recorded) = self.recorded else { return 0.0 };
        // Silence as long as the window has emptied it; only `newest` is left.
        let first = if end >= recorded.last + len { end } else { first };
        let last = if newest.is_some() { end } else { recorded.last.min(end) };
        let oldest = (end + 1).saturating_sub(len).max(first);
        if oldest > last || (newest.is_none() && end >= recorded.last + len) {
            return 0.0;
        }
        let sum = |second| match newest {
            Some(newest) if second == end => newest,
            // Nothing was recorded in these seconds, and their places hold sums of older ones.
            _ if second > recorded.last => 0.0,
            _ => self.sums[self.index(second)],
        };
        let sums = (oldest..=last).rev().map(sum);
        let average = match aggregation {
            WindowAggregation::Linear => {
                round(sums.sum::<f64>() / seconds_to_f64(last - oldest + 1))
            }
            WindowAggregation::WeightedExponential => weighted_sum(sums, newest_weight(len)),
        };
        average.max(0.0)
    }

    /// Marks `second` as recorded; seconds skipped since the last record held no load.
    fn mark_recorded(&mut self, second: u64) {
        let Some(mut recorded) = self.recorded else {
            self.sums.fill(0.0);
            let only = RecordedRange { first: second, first_in_panic: second, last: second };
            self.recorded = Some(only);
            return;
        };
        if second <= recorded.last {
            // A late report may reach back before the first record, within the window.
            if second + self.len() > recorded.last {
                recorded.first = recorded.first.min(second);
            }
            if second + self.panic_len > recorded.last {
                recorded.first_in_panic = recorded.first_in_panic.min(second);
            }
            self.recorded = Some(recorded);
            return;
        }
        let silence = second - recorded.last;
        // The ring still holds sums of an earlier turn in the skipped seconds, so they are cleared.
        if silence >= self.len() {
            self.sums.fill(0.0);
            recorded.first = second;
        } else {
            (recorded.last + 1..=second).for_each(|skipped| {
                let index = self.index(skipped);
                self.sums[index] = 0.0;
            });
        }
        if silence >= self.panic_len {
            recorded.first_in_panic = second;
        }
        recorded.last = second;
        self.recorded = Some(recorded);
    }

    fn len(&self) -> u64 {
        self.sums.len() as u64 - 1
    }

    fn index(&self, second: u64) -> usize {
        usize::try_from(second % self.sums.len() as u64)
            .expect("an index below a slice's length: taken modulo it")
    }
}

impl PrepaidLoad {
    /// Deducts the prepaid part of `amount` and returns it; a negative amount gives back what was used.
    fn deduct(&mut self, amount: f64) -> f64 {
        let part = amount.clamp(-self.used, self.remaining);
        self.remaining -= part;
        self.used += part;
        part
    }
}

/// Length of the panic window as a share of the stable window, in whole seconds.
pub fn panic_window(stable: Duration, percent: f64) -> Duration {
    Duration::from_secs(panic_seconds(stable.as_secs().max(1), percent))
}

fn panic_seconds(stable: u64, percent: f64) -> u64 {
    // The product is small, since the policy is checked on arrival; the cast saturates otherwise.
    ((seconds_to_f64(stable) * percent / 100.0).round() as u64).clamp(1, stable)
}

/// Weight of the newest of `len` seconds: `max(1 − (1 − 0.9999)^(1/len), 0.2)`.
fn newest_weight(len: u64) -> f64 {
    (1.0 - (1.0 - WEIGHTED_COVERAGE).powf(1.0 / seconds_to_f64(len))).max(MIN_NEWEST_WEIGHT)
}

fn weighted_sum(newest_first: impl Iterator<Item = f64>, coefficient: f64) -> f64 {
    let mut weight = coefficient;
    let mut total = 0.0;
    for sum in newest_first {
        total += sum * weight;
        weight *= 1.0 - coefficient;
    }
    total
}

fn round(value: f64) -> f64 {
    (value * PRECISION).round() / PRECISION
}

/// Converts a small count to a float; exact below 2⁵³.
fn seconds_to_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests;
