//! Pure: running totals from many senders → load of one Revision by the second.
//!
//! A request in flight is load for exactly the time that the totals show. Between two reports the last reported level
//! is assumed to hold. The next report replaces that assumption with what the totals really gained, over the time that
//! has passed by the sender's clock. So the sum is exact and nothing counts twice. Only the load of a late report
//! counts for more, by the drift that the sender's clock may have had: a thousandth.
//!
//! A pod is reported every second. While a report is overdue the load is not current. A report after a longer pause
//! carries the sum but not the single seconds, unless no request has begun or ended in the pause.
//! [`RevisionLoad::take_gap`] reports such gaps, and nothing is lowered then.
//!
//! Two rules come from Knative's activator (`pkg/activator/handler/concurrency_reporter.go` at 98e5ef9). The first
//! request after a quiet second counts as one for its whole second, however short it is. A request counts once, where
//! it waits or where it runs.

use std::time::Duration;

use common::wire::{ScaleMetric, ScalePolicy, UsageSample};

use self::source::UsageSource;
use crate::window::{LoadAverages, LoadWindow};

mod source;

/// Age from which the last report on a pod is not current: the next one, due after a second, should have arrived.
pub const REPORT_OVERDUE_AFTER: Duration = Duration::from_millis(1500);

/// Longest time between two reports on a pod after which its seconds are still known. One lost report makes a longer
/// gap.
pub const MAX_REPORT_GAP: Duration = Duration::from_millis(1900);

/// Bound of the drift between two hosts' clocks, as a divisor: one part in so many.
const CLOCK_DRIFT_DIVISOR: u32 = 1000;

/// One stream of reports: its sender, and its number among that sender's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageStream {
    /// Number of the sender among all senders.
    pub sender: u32,
    /// Number of the stream among the sender's streams, from 0.
    pub number: u32,
    /// True once the stream has named every subject; from then on an unknown subject is really new.
    pub synced: bool,
}

/// Load of one Revision and the totals it is computed from.
#[derive(Debug)]
pub struct RevisionLoad {
    /// Sources sorted by sender and pod. Kept while the Revision is asleep, as the base of later differences.
    sources: Vec<UsageSource>,
    /// Window and its metric; `None` while the Revision is asleep.
    window: Option<Box<(ScaleMetric, LoadWindow)>>,
    /// Creation time of the window; earlier load does not belong to it.
    window_created_at: Duration,
    /// Time up to which all load was known at the last accrual; `None`: some was unknown.
    known_until: Option<Duration>,
    /// True if some seconds of load are known only as a sum.
    has_gap: bool,
    /// Requests that have begun at pods, according to reports.
    requests_started: u64,
}

impl RevisionLoad {
    /// An empty load: no window and no totals.
    pub fn new() -> Self {
        Self {
            sources: Vec::new(),
            window: None,
            window_created_at: Duration::ZERO,
            known_until: None,
            has_gap: false,
            requests_started: 0,
        }
    }

    /// Creates the window for `policy`, or resizes it. A change of the metric starts with an empty window.
    pub fn wake(&mut self, now: Duration, policy: &ScalePolicy) {
        let (stable, panic) = (policy.stable_window, policy.panic_window_percent);
        match metric_and_window(&mut self.window) {
            Some((metric, window)) if metric == policy.metric => window.resize(stable, panic),
            Some(_) | None => {
                // Seconds recorded by another metric have another unit, so their load is unknown in this one.
                self.has_gap |= self.window.is_some();
                self.window_created_at = now;
                self.window = Some(Box::new((policy.metric, LoadWindow::new(stable, panic))));
            }
        }
    }

    /// Frees the memory that a Revision needs only while awake.
    pub fn sleep(&mut self) {
        self.window = None;
        // Pods of a closed stream need no base any more; waiting requests stay until their activator is forgotten.
        self.sources.retain(|source| source.is_online || source.is_wait_queue());
        self.sources.shrink_to_fit();
    }

    /// Returns true if no sender's report is kept.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Returns true if these totals show load: requests in flight, or requests begun since the last report.
    pub fn has_new_load(&self, stream: UsageStream, sample: &UsageSample) -> bool {
        if self.is_stale_report(stream, sample) {
            return false;
        }
        let has_started = match self.find_source(stream.sender, sample.key.pod.as_deref()) {
            Ok(index) => sample.totals.started > self.sources[index].totals.started,
            // A stream that begins names subjects with all their past, which is no new load.
            Err(_) => stream.synced && sample.totals.started > 0,
        };
        has_started || sample.totals.in_flight() > 0
    }

    /// Returns true if requests have begun or ended since the last report of the subject.
    pub fn is_changed_by(&self, stream: UsageStream, sample: &UsageSample) -> bool {
        match self.find_source(stream.sender, sample.key.pod.as_deref()) {
            Ok(index) => {
                let (old, new) = (&self.sources[index].totals, &sample.totals);
                (old.started, old.finished) != (new.started, new.finished)
            }
            Err(_) => sample.totals.started > 0,
        }
    }

    /// Returns true if these totals add to the load, although the RouteTable does not name their pod. Its next batch may
    /// name it as ready. A pod that has left it counts while requests are in flight there: its last totals have none,
    /// and ask for no other pod.
    pub fn counts_unnamed(&self, stream: UsageStream, sample: &UsageSample) -> bool {
        let source = self.find_source(stream.sender, sample.key.pod.as_deref());
        sample.totals.in_flight() > 0
            || source.ok().is_none_or(|index| self.sources[index].is_counted)
    }

    /// Adds the totals of one subject. `is_counted` is false for a draining pod.
    pub fn apply_report(
        &mut self,
        now: Duration,
        stream: UsageStream,
        is_counted: bool,
        sample: &UsageSample,
    ) {
        let pod = sample.key.pod.as_deref();
        if self.is_stale_report(stream, sample) {
            return;
        }
        let was_quiet = self.was_quiet(now);
        let has_started = match self.find_source(stream.sender, pod) {
            Ok(index) if self.sources[index].is_continued_by(sample) => {
                self.apply_later_report(index, now, stream, sample)
            }
            Ok(index) => {
                // A counter that went backwards was reset: what it counted between the two reports is lost.
                self.has_gap |= pod.is_some();
                self.sources.remove(index);
                self.insert_source(index, now, stream, sample);
                false
            }
            Err(index) => self.insert_source(index, now, stream, sample),
        };
        let source =
            self.find_source(stream.sender, pod).ok().map(|index| &mut self.sources[index]);
        source.into_iter().for_each(|source| source.is_counted = is_counted);
        // Knative's rule: the first request after a quiet second counts for its whole second.
        if let (true, true, true, Some((ScaleMetric::Concurrency, window))) =
            (has_started, is_counted, was_quiet, metric_and_window(&mut self.window))
        {
            window.prepay(now, 1.0);
        }
    }

    /// Removes a subject that its sender no longer reports.
    pub fn remove_source(&mut self, now: Duration, sender: u32, pod: Option<&str>) {
        if let Ok(index) = self.find_source(sender, pod) {
            self.accrue_source(index, now);
            self.has_gap |= self.sources[index].is_counted && self.sources[index].is_late(now);
            self.sources.remove(index);
        }
    }

    /// Marks a sender's stream as ended. Its pods and waiting requests keep their last reported level until the sender
    /// returns or is [forgotten](Self::forget_sender), or the pod is gone.
    pub fn mark_sender_offline(&mut self, now: Duration, sender: u32) {
        for index in 0..self.sources.len() {
            if self.sources[index].sender == sender {
                self.accrue_source(index, now);
                self.has_gap |= self.sources[index].is_counted && self.sources[index].is_late(now);
                self.sources[index].is_online = false;
            }
        }
    }

    /// Removes all totals of a sender that will not return.
    pub fn forget_sender(&mut self, now: Duration, sender: u32) {
        let indices = (0..self.sources.len()).filter(|&index| self.sources[index].sender == sender);
        indices.collect::<Vec<_>>().into_iter().for_each(|index| self.accrue_source(index, now));
        self.sources.retain(|source| source.sender != sender);
    }

    /// Returns true if every reported pod that counts has a current report.
    pub fn is_current(&self, now: Duration) -> bool {
        self.counted_pods().all(|source| source.is_online && !source.is_late(now))
    }

    /// Returns true if an open stream reports every reported pod that counts, however late.
    pub fn is_online(&self) -> bool {
        self.counted_pods().all(|source| source.is_online)
    }

    fn counted_pods(&self) -> impl Iterator<Item = &UsageSource> {
        self.sources.iter().filter(|source| source.is_counted && !source.is_wait_queue())
    }

    /// Records that some second may have held load that was never reported.
    pub fn mark_gap(&mut self) {
        self.has_gap |= self.window.is_some();
    }

    /// Returns true if, since the last call, some seconds of load became known only as a sum.
    pub fn take_gap(&mut self) -> bool {
        std::mem::take(&mut self.has_gap)
    }

    /// Returns true if requests may be in flight or waiting, according to the last reports.
    pub fn may_hold_requests(&self) -> bool {
        self.sources.iter().any(|source| source.is_counted && source.totals.in_flight() > 0)
    }

    /// Completes the snapshot of a stream: subjects of its sender that it did not name are removed.
    pub fn complete_snapshot(&mut self, now: Duration, stream: UsageStream) {
        let is_unnamed = |source: &UsageSource| {
            source.sender == stream.sender && source.stream_number != stream.number
        };
        let unnamed = (0..self.sources.len()).filter(|&index| is_unnamed(&self.sources[index]));
        unnamed.collect::<Vec<_>>().into_iter().for_each(|index| self.accrue_source(index, now));
        self.sources.retain(|source| {
            source.sender != stream.sender || source.stream_number == stream.number
        });
    }

    /// Sets whether the pod counts as load.
    pub fn set_pod_counted(&mut self, now: Duration, pod: &str, is_counted: bool) {
        for index in 0..self.sources.len() {
            if self.sources[index].pod.as_deref() == Some(pod)
                && self.sources[index].is_counted != is_counted
            {
                self.accrue_source(index, now);
                self.sources[index].is_counted = is_counted;
            }
        }
    }

    /// Brings the window up to `now`. With `is_silence_zero`, silence means no load; otherwise silence means unknown
    /// load.
    pub fn accrue_until(&mut self, now: Duration, is_silence_zero: bool) {
        (0..self.sources.len()).for_each(|index| self.accrue_source(index, now));
        // The second before the window was made may not have been quiet; as a zero it would halve a burst's average.
        let is_known = is_silence_zero && now.as_secs() > self.window_created_at.as_secs();
        // Between two ticks a quiet second is over of which no report has to come. As silence, it would empty a panic
        // window of two seconds, and the whole load of a burst after it would count as the average.
        let known_from = self.known_until.filter(|_| is_silence_zero && !self.has_gap);
        self.known_until = (is_silence_zero && !self.has_gap).then_some(now);
        if let (true, Some((_, window))) = (is_known, metric_and_window(&mut self.window)) {
            window.mark_known_until(now);
            if let Some(from) = known_from {
                window.mark_known_between(from.max(self.window_created_at), now);
            }
        }
    }

    /// Averages of load at `now`; `None`: nothing is known.
    ///
    /// Requests that wait while no pod is `ready` cannot be served within this second. So they count at once as the
    /// load of the whole second. A burst is thus visible when it arrives, and not averaged a second later.
    pub fn averages(
        &self,
        now: Duration,
        ready: u32,
        policy: &ScalePolicy,
    ) -> Option<LoadAverages> {
        let (metric, window) = self.window.as_deref()?;
        let min_running_load = match metric {
            ScaleMetric::Concurrency if ready == 0 => count_to_f64(self.waiting()),
            ScaleMetric::Concurrency | ScaleMetric::Rps => 0.0,
        };
        window.averages(now, min_running_load, policy.aggregation)
    }

    /// Load at this moment in the metric's unit: requests in flight, or requests begun in the running second.
    pub fn current_level(&self, now: Duration) -> f64 {
        match self.window.as_deref() {
            Some((ScaleMetric::Rps, window)) => window.load_in_second(now),
            Some((ScaleMetric::Concurrency, _)) | None => count_to_f64(self.in_flight()),
        }
    }

    /// Requests that have begun at pods since the Revision was first met, according to reports.
    pub fn requests_started(&self) -> u64 {
        self.requests_started
    }

    /// Requests in flight at pods and waiting at activators.
    pub fn in_flight(&self) -> u64 {
        let counted = self.sources.iter().filter(|source| source.is_counted);
        counted.map(|source| source.totals.in_flight()).sum()
    }

    /// Requests waiting at activators for a pod.
    pub fn waiting(&self) -> u64 {
        let waiting = |source: &&UsageSource| source.is_wait_queue();
        self.sources.iter().filter(waiting).map(|source| source.totals.in_flight()).sum()
    }

    /// Returns true if nothing is in flight and no second of the window that ends at `now` holds load.
    pub fn is_quiet(&self, now: Duration) -> bool {
        !self.may_hold_requests() && self.window.as_deref().is_none_or(|(_, it)| it.is_quiet(now))
    }

    /// Returns true if a report of the sender is kept.
    pub fn has_reports_from(&self, sender: u32) -> bool {
        self.sources.iter().any(|source| source.sender == sender)
    }

    /// Returns true if an open stream reports the pod.
    pub fn is_pod_reported(&self, pod: &str) -> bool {
        let of_pod = |source: &UsageSource| source.is_online && source.pod.as_deref() == Some(pod);
        self.sources.iter().any(of_pod)
    }

    fn find_source(&self, sender: u32, pod: Option<&str>) -> Result<usize, usize> {
        self.sources.binary_search_by(|it| (it.sender, it.pod.as_deref()).cmp(&(sender, pod)))
    }

    /// Returns true if the same stream has already reported newer totals: a repeated or late report changes nothing.
    fn is_stale_report(&self, stream: UsageStream, sample: &UsageSample) -> bool {
        let source = self.find_source(stream.sender, sample.key.pod.as_deref());
        let source = source.ok().map(|index| &self.sources[index]);
        source.is_some_and(|source| {
            source.stream_number == stream.number && sample.read_at_ns < source.read_at_ns
        })
    }

    fn was_quiet(&self, now: Duration) -> bool {
        let Some((_, window)) = self.window.as_deref() else { return true };
        let previous_second = now.saturating_sub(Duration::from_secs(1));
        self.in_flight() == 0
            && window.load_in_second(now) <= 0.0
            && window.load_in_second(previous_second) <= 0.0
    }

    /// Adds a subject first reported, or one whose counters were reset; requests of its past do not count. Returns true
    /// if requests have begun since the last report.
    fn insert_source(
        &mut self,
        index: usize,
        now: Duration,
        stream: UsageStream,
        sample: &UsageSample,
    ) -> bool {
        let source = UsageSource {
            sender: stream.sender,
            pod: sample.key.pod.as_deref().map(Into::into),
            stream_number: stream.number,
            is_online: true,
            is_counted: true,
            totals: sample.totals,
            read_at_ns: sample.read_at_ns,
            totals_read_at: now,
            accrued_until: now,
            assumed_load: 0.0,
        };
        self.sources.insert(index, source);
        // Totals since the subject's start may span hours, so at most one finished request counts as new.
        let new_requests = sample.totals.in_flight().max(u64::from(sample.totals.started > 0));
        if let (true, Some((ScaleMetric::Rps, window))) =
            (stream.synced, metric_and_window(&mut self.window))
        {
            window.add(now, count_to_f64(new_requests));
        }
        sample.totals.in_flight() > 0 || (stream.synced && new_requests > 0)
    }

    /// Applies a later report of a known subject. Returns true if requests have begun.
    fn apply_later_report(
        &mut self,
        index: usize,
        now: Duration,
        stream: UsageStream,
        sample: &UsageSample,
    ) -> bool {
        self.accrue_source(index, now);
        let source = &mut self.sources[index];
        let started = sample.totals.started - source.totals.started;
        let finished = sample.totals.finished - source.totals.finished;
        let abandoned = sample.totals.abandoned.saturating_sub(source.totals.abandoned);
        let gained_integral = wrapping_difference(
            sample.totals.in_flight_integral(sample.read_at_ns),
            source.totals.in_flight_integral(source.read_at_ns),
        );
        // The assumed load is split at `read_at`, the moment when the totals were read.
        let elapsed = Duration::from_nanos(sample.read_at_ns - source.read_at_ns);
        // A sender's clock may run slow: without the drift `read_at` would fall behind a little more with each report.
        let read_at = (source.totals_read_at + elapsed + elapsed / CLOCK_DRIFT_DIVISOR).min(now);
        let old_level = count_to_f64(source.totals.in_flight());
        let assumed_after_read =
            old_level * source.accrued_until.saturating_sub(read_at).as_secs_f64();
        // The gain is in the sender's seconds. In as many of this clock, with the drift, a constant level must leave no
        // difference to what was assumed: it would lower the load of a second.
        let read_span = read_at.saturating_sub(source.totals_read_at).max(elapsed);
        let stretch = if elapsed.is_zero() { 1.0 } else { read_span.div_duration_f64(elapsed) };
        // Real gain minus what was assumed for the same time; negative if requests ended early.
        let excess = gained_integral / 1e9 * stretch - (source.assumed_load - assumed_after_read);
        // Totals without a change show a constant level; another stream may have lost changes with its counters.
        let may_have_changed = started + finished > 0 || source.stream_number != stream.number;
        self.has_gap |= source.pod.is_some() && elapsed > MAX_REPORT_GAP && may_have_changed;
        let from = if source.stream_number == stream.number || source.is_wait_queue() {
            read_at.saturating_sub(source.event_span(sample, elapsed, -excess / old_level))
        } else {
            // Load that an absent stream could not report lies anywhere in its absence.
            source.totals_read_at
        };
        let from = from.max(source.totals_read_at);
        let (is_counted, is_wait_queue) = (source.is_counted, source.is_wait_queue());
        self.requests_started += if is_wait_queue { 0 } else { started };
        (source.totals, source.read_at_ns) = (sample.totals, sample.read_at_ns);
        let new_level = count_to_f64(source.totals.in_flight());
        // From `read_at` to `until` the old level was assumed; the difference to the new one corrects it.
        let (level_change, until) = (new_level - old_level, source.accrued_until.max(read_at));
        source.assumed_load = new_level * until.saturating_sub(read_at).as_secs_f64();
        (source.totals_read_at, source.accrued_until) = (read_at, until);
        (source.stream_number, source.is_online) = (stream.number, true);
        let (from, share) = clip_to_window(self.window_created_at, from, read_at);
        match metric_and_window(&mut self.window) {
            Some((ScaleMetric::Concurrency, window)) if is_counted => {
                spread_load(window, excess * share, from, read_at);
                if level_change != 0.0 {
                    window.add_level(level_change, read_at, until);
                }
            }
            Some((ScaleMetric::Rps, window)) if is_counted => {
                // A request that waited begins again at its pod, so the end of its wait takes its arrival back. A
                // request that left without a pod stays an arrival.
                let recounted = if is_wait_queue {
                    count_to_f64(finished.saturating_sub(abandoned))
                } else {
                    0.0
                };
                spread_load(window, (count_to_f64(started) - recounted) * share, from, read_at);
            }
            Some(_) | None => {}
        }
        started > 0
    }

    /// Adds the level held since the last report, up to `now`.
    fn accrue_source(&mut self, index: usize, now: Duration) {
        let source = &mut self.sources[index];
        let level = count_to_f64(source.totals.in_flight());
        if level > 0.0 && now > source.accrued_until {
            source.assumed_load += level * (now - source.accrued_until).as_secs_f64();
            if let (true, Some((ScaleMetric::Concurrency, window))) =
                (source.is_counted, metric_and_window(&mut self.window))
            {
                window.add_level(level, source.accrued_until, now);
            }
        }
        source.accrued_until = source.accrued_until.max(now);
    }
}

impl Default for RevisionLoad {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the metric and the window, if the Revision is awake.
fn metric_and_window(
    window: &mut Option<Box<(ScaleMetric, LoadWindow)>>,
) -> Option<(ScaleMetric, &mut LoadWindow)> {
    window.as_deref_mut().map(|(metric, window)| (*metric, window))
}

/// Returns the start of the part of `from` to `to` that is not before the window's first second, and its share of the
/// whole.
fn clip_to_window(window_created_at: Duration, from: Duration, to: Duration) -> (Duration, f64) {
    let clipped = from.max(Duration::from_secs(window_created_at.as_secs()));
    if clipped == from || to <= from {
        return (from, 1.0);
    }
    let share = to.saturating_sub(clipped).as_secs_f64() / (to - from).as_secs_f64();
    (clipped.min(to), share)
}

fn spread_load(window: &mut LoadWindow, amount: f64, from: Duration, to: Duration) {
    if amount == 0.0 {
        return;
    }
    let seconds = to.saturating_sub(from).as_secs_f64();
    if seconds > 0.0 {
        window.add_level(amount / seconds, from, to);
    } else {
        window.add(to, amount);
    }
}

/// Difference of two wrapping integrals. It is small against their range, so the top bit is its sign.
fn wrapping_difference(new: u64, old: u64) -> f64 {
    new.wrapping_sub(old).cast_signed() as f64
}

/// Converts a count to a float; exact below 2⁵³.
fn count_to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
pub(crate) mod tests;
