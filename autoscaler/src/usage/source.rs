//! Pure: the latest totals of one subject from one sender, and the age of what a later report adds.

use std::time::Duration;

use common::wire::{RequestTotals, UsageSample};

use super::{MAX_REPORT_GAP, REPORT_OVERDUE_AFTER, count_to_f64, wrapping_difference};

/// Latest totals of one subject from one sender: of a pod, or of the requests that wait at the sender.
#[derive(Debug)]
pub(super) struct UsageSource {
    /// Number of the sender among all senders.
    pub(super) sender: u32,
    /// UID of the pod; `None`: requests waiting at the sender.
    pub(super) pod: Option<Box<str>>,
    /// Number of the sender's latest stream that reported this source.
    pub(super) stream_number: u32,
    /// True while that stream is open.
    pub(super) is_online: bool,
    /// True if the source adds to the load; requests of a draining pod need no other pod.
    pub(super) is_counted: bool,
    pub(super) totals: RequestTotals,
    /// Time of the totals by the sender's clock, in nanoseconds.
    pub(super) read_at_ns: u64,
    /// Time of the totals by the autoscaler's clock, estimated from the sender's; never later than their arrival.
    pub(super) totals_read_at: Duration,
    /// End of the time for which the level has been added to the window.
    pub(super) accrued_until: Duration,
    /// Request-seconds added since `totals_read_at`.
    pub(super) assumed_load: f64,
}

impl UsageSource {
    /// Returns true if `sample` continues these totals; a counter that went backwards was reset.
    pub(super) fn is_continued_by(&self, sample: &UsageSample) -> bool {
        sample.totals.started >= self.totals.started
            && sample.totals.finished >= self.totals.finished
            && sample.read_at_ns >= self.read_at_ns
    }

    /// Returns true if the next report on this pod is overdue. Wait queues are reported only when they change.
    pub(super) fn is_late(&self, now: Duration) -> bool {
        !self.is_wait_queue() && now.saturating_sub(self.totals_read_at) >= REPORT_OVERDUE_AFTER
    }

    /// Returns true if the source counts waiting requests, not those of a pod.
    pub(super) fn is_wait_queue(&self) -> bool {
        self.pod.is_none()
    }

    /// Time before `sample` over which its requests began and ended, at most `elapsed`: twice their mean age. That is
    /// right if all came at once and if they came evenly. It is at least `min_span_s` seconds, in which as much load
    /// was assumed as is taken back. After a gap in the reports on a pod it is all of `elapsed`.
    pub(super) fn event_span(
        &self,
        sample: &UsageSample,
        elapsed: Duration,
        min_span_s: f64,
    ) -> Duration {
        if !self.is_wait_queue() && elapsed > MAX_REPORT_GAP {
            return elapsed;
        }
        let (new, old) = (&sample.totals, &self.totals);
        let events = (new.started - old.started) + (new.finished - old.finished);
        // The sums of times wrap, but their differences are right as long as one report spans less than the range.
        let sum = |of: fn(&RequestTotals) -> u64| of(new).wrapping_sub(of(old));
        let began_and_ended =
            sum(|it| it.started_sum_ns).wrapping_add(sum(|it| it.finished_sum_ns));
        let ages_ns =
            wrapping_difference(events.wrapping_mul(sample.read_at_ns), began_and_ended).max(0.0);
        let mean_age_s = ages_ns / 1e9 / count_to_f64(events.max(1));
        let min_span_s = if min_span_s.is_finite() { min_span_s } else { 0.0 };
        Duration::from_secs_f64((2.0 * mean_age_s).max(min_span_s).min(elapsed.as_secs_f64()))
    }
}
