//! Pure: running totals from many senders → one revision's load by the second.
//!
//! A request in flight is load for exactly the time the totals say. Between two reports the level last
//! reported is taken to hold; the next report puts what the totals really gained in its place, over the time that
//! the sender says has passed, so the sum is exact and nothing counts twice.
//!
//! A pod is reported every second. A report that is overdue leaves the load not current, and one that comes after a
//! longer pause tells the sum but not the seconds: [`Load::take_gap`] says so, and nothing is lowered on it.
//!
//! Two rules come from Knative's activator (`pkg/activator/handler/concurrency_reporter.go` at 98e5ef9): the
//! first request after a quiet second counts as one for its whole second, however short it is; and a request
//! counts once, where it waits or where it runs.

use std::time::Duration;

use common::wire::{Metric, ScalePolicy, Totals, UsageSeen};

use crate::window::{Averages, Window};

/// Age from which the last report on a pod is not current: the next, due after a second, should have come.
pub const LATE: Duration = Duration::from_millis(1500);

/// Longest time between two reports on a pod that tells its seconds apart. One report that is lost leaves more.
pub const GAP: Duration = Duration::from_millis(1900);

/// One part in so many by which two hosts' clocks may drift apart.
const DRIFT: u32 = 1000;

/// One stream of reports: which sender's, and its how manyeth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Index of the sender.
    pub sender: u32,
    /// Counts the sender's streams.
    pub number: u32,
    /// Whether the stream has named every subject; from then on a new subject is really new.
    pub synced: bool,
}

/// One revision's load and the totals it is computed from.
#[derive(Debug)]
pub struct Load {
    /// Sorted by sender and pod. Kept while the revision sleeps, as the base of later differences.
    sources: Vec<Source>,
    /// Absent while the revision sleeps.
    window: Option<Box<(Metric, Window)>>,
    /// When the window was made; what came before is not its.
    woken: Duration,
    /// Whether a report told of seconds that it does not tell apart.
    has_gap: bool,
    /// Requests that have begun at pods, as far as reports told.
    begun: u64,
}

#[derive(Debug)]
struct Source {
    sender: u32,
    /// The pod; `None`: requests waiting at the sender.
    pod: Option<Box<str>>,
    /// The sender's latest stream that spoke of it.
    stream: u32,
    /// Whether that stream stands.
    is_online: bool,
    /// Whether it adds to the load; a draining pod's requests ask for no other pod.
    counts: bool,
    totals: Totals,
    at_ns: u64,
    /// When the totals were read, by our clock, as far as the sender's tells: never later than they arrived.
    since: Duration,
    /// Until when the level was added.
    until: Duration,
    /// Request-seconds added since `since`.
    added: f64,
}

impl Load {
    /// No load and no totals.
    pub fn new() -> Self {
        let (window, woken) = (None, Duration::ZERO);
        Self { sources: Vec::new(), window, woken, has_gap: false, begun: 0 }
    }

    /// Makes the window as `policy` has it. Another metric starts from nothing.
    pub fn wake(&mut self, now: Duration, policy: &ScalePolicy) {
        let (stable, panic) = (policy.stable_window, policy.panic_window_percent);
        match kept(&mut self.window) {
            Some((metric, window)) if metric == policy.metric => window.resize(stable, panic),
            Some(_) | None => {
                // Seconds of another metric say nothing of this one.
                self.has_gap |= self.window.is_some();
                self.woken = now;
                self.window = Some(Box::new((policy.metric, Window::new(stable, panic))));
            }
        }
    }

    /// Gives back the memory a sleeping revision does not need.
    pub fn sleep(&mut self) {
        self.window = None;
        self.sources.retain(|source| source.is_online || source.waits());
        self.sources.shrink_to_fit();
    }

    /// Whether no sender has told anything that is still kept.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Whether these totals mean load: requests in flight, or begun since the last news.
    pub fn is_news(&self, stream: Stream, seen: &UsageSeen) -> bool {
        if self.is_overtaken(stream, seen) {
            return false;
        }
        let begun = match self.find(stream.sender, seen.key.pod.as_deref()) {
            Ok(at) => seen.totals.started > self.sources[at].totals.started,
            Err(_) => stream.synced && seen.totals.started > 0,
        };
        begun || seen.totals.in_flight() > 0
    }

    /// Takes in one subject's totals. `counts` is false for a draining pod.
    pub fn seen(&mut self, now: Duration, stream: Stream, counts: bool, seen: &UsageSeen) {
        let pod = seen.key.pod.as_deref();
        if self.is_overtaken(stream, seen) {
            return;
        }
        let was_quiet = self.was_quiet(now);
        let grew = match self.find(stream.sender, pod) {
            Ok(at) if self.sources[at].precedes(seen) => self.advance(at, now, stream, seen),
            Ok(at) => {
                self.has_gap |= pod.is_some();
                self.sources.remove(at);
                self.begin(at, now, stream, seen);
                false
            }
            Err(at) => self.begin(at, now, stream, seen),
        };
        let source = self.find(stream.sender, pod).ok().map(|at| &mut self.sources[at]);
        source.into_iter().for_each(|source| source.counts = counts);
        if let (true, true, true, Some((Metric::Concurrency, window))) =
            (grew, counts, was_quiet, kept(&mut self.window))
        {
            window.prepay(now, 1.0);
        }
    }

    /// The subject is gone from its sender.
    pub fn gone(&mut self, now: Duration, sender: u32, pod: Option<&str>) {
        if let Ok(at) = self.find(sender, pod) {
            self.settle_source(at, now);
            self.sources.remove(at);
        }
    }

    /// The sender's stream ended: nothing new is known of its pods and of what waits there, so both are taken to go on as
    /// they were last told, until the sender is back or [forgotten](Self::forget), or the pod is gone.
    pub fn lost(&mut self, now: Duration, sender: u32) {
        for at in 0..self.sources.len() {
            if self.sources[at].sender == sender {
                self.settle_source(at, now);
                self.sources[at].is_online = false;
            }
        }
    }

    /// The sender will not be back: what it told is let go.
    pub fn forget(&mut self, now: Duration, sender: u32) {
        let own = (0..self.sources.len()).filter(|&at| self.sources[at].sender == sender);
        own.collect::<Vec<_>>().into_iter().for_each(|at| self.settle_source(at, now));
        self.sources.retain(|source| source.sender != sender);
    }

    /// Whether every pod that was told of and takes part in the load has been reported of late.
    pub fn is_current(&self, now: Duration) -> bool {
        let mut pods = self.sources.iter().filter(|source| source.counts && !source.waits());
        pods.all(|source| source.is_online && now.saturating_sub(source.since) < LATE)
    }

    /// Some second may have held what was not told.
    pub fn miss(&mut self) {
        self.has_gap |= self.window.is_some();
    }

    /// Whether, since the last call, a report told of seconds that it does not tell apart.
    pub fn take_gap(&mut self) -> bool {
        std::mem::take(&mut self.has_gap)
    }

    /// Whether requests may be in flight or waiting, as far as was ever told.
    pub fn may_hold_requests(&self) -> bool {
        self.sources.iter().any(|source| source.counts && source.totals.in_flight() > 0)
    }

    /// The stream has named every subject: what it did not name is gone.
    pub fn synced(&mut self, now: Duration, stream: Stream) {
        let gone = |it: &Source| it.sender == stream.sender && it.stream != stream.number;
        let gone = (0..self.sources.len()).filter(|&at| gone(&self.sources[at]));
        gone.collect::<Vec<_>>().into_iter().for_each(|at| self.settle_source(at, now));
        self.sources
            .retain(|source| source.sender != stream.sender || source.stream == stream.number);
    }

    /// The pod takes part in the load, or does not any more.
    pub fn count_pod(&mut self, now: Duration, pod: &str, counts: bool) {
        for at in 0..self.sources.len() {
            if self.sources[at].pod.as_deref() == Some(pod) && self.sources[at].counts != counts {
                self.settle_source(at, now);
                self.sources[at].counts = counts;
            }
        }
    }

    /// Brings the window up to `now`. `known`: silence means no load; else nothing is known of it.
    pub fn settle(&mut self, now: Duration, known: bool) {
        (0..self.sources.len()).for_each(|at| self.settle_source(at, now));
        // The second before it woke is not known to have been quiet, and halves a burst's average.
        let is_known = known && now.as_secs() > self.woken.as_secs();
        if let (true, Some((_, window))) = (is_known, kept(&mut self.window)) {
            window.known_until(now);
        }
    }

    /// Averages at `now`; `None`: nothing is known.
    ///
    /// Requests that wait while no pod is `ready` cannot be served within this second, so they count as the
    /// whole second's load at once: a burst of them is seen when it comes, not averaged a second later.
    pub fn averages(&self, now: Duration, ready: u32, policy: &ScalePolicy) -> Option<Averages> {
        let (metric, window) = self.window.as_deref()?;
        let floor = match metric {
            Metric::Concurrency if ready == 0 => float(self.waiting()),
            Metric::Concurrency | Metric::Rps => 0.0,
        };
        window.averages(now, floor, policy.aggregation)
    }

    /// Load at this moment, in the metric's unit: requests in flight, or requests begun in the running second.
    pub fn level(&self, now: Duration) -> f64 {
        match self.window.as_deref() {
            Some((Metric::Rps, window)) => window.held(now),
            Some((Metric::Concurrency, _)) | None => float(self.in_flight()),
        }
    }

    /// Requests that have begun at pods since the revision was met, as far as reports told.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Requests in flight and waiting.
    pub fn in_flight(&self) -> u64 {
        let counted = self.sources.iter().filter(|source| source.counts);
        counted.map(|source| source.totals.in_flight()).sum()
    }

    /// Requests waiting for a pod.
    pub fn waiting(&self) -> u64 {
        let waiting = |source: &&Source| source.waits();
        self.sources.iter().filter(waiting).map(|source| source.totals.in_flight()).sum()
    }

    /// Whether nothing is in flight, and no load in any second of the window that ends `now`.
    pub fn is_quiet(&self, now: Duration) -> bool {
        !self.may_hold_requests() && self.window.as_deref().is_none_or(|(_, it)| it.is_quiet(now))
    }

    /// Whether the sender has told anything that is still kept.
    pub fn hears_from(&self, sender: u32) -> bool {
        self.sources.iter().any(|source| source.sender == sender)
    }

    /// Whether some stream that stands speaks of the pod.
    pub fn hears_of(&self, pod: &str) -> bool {
        let of_pod = |source: &Source| source.is_online && source.pod.as_deref() == Some(pod);
        self.sources.iter().any(of_pod)
    }

    fn find(&self, sender: u32, pod: Option<&str>) -> Result<usize, usize> {
        self.sources.binary_search_by(|it| (it.sender, it.pod.as_deref()).cmp(&(sender, pod)))
    }

    /// Whether something newer was told on the same stream: what is repeated or overtaken changes nothing.
    fn is_overtaken(&self, stream: Stream, seen: &UsageSeen) -> bool {
        let known = self.find(stream.sender, seen.key.pod.as_deref());
        let known = known.ok().map(|at| &self.sources[at]);
        known.is_some_and(|it| it.stream == stream.number && seen.at_ns < it.at_ns)
    }

    fn was_quiet(&self, now: Duration) -> bool {
        let Some((_, window)) = self.window.as_deref() else { return true };
        let before = now.saturating_sub(Duration::from_secs(1));
        self.in_flight() == 0 && window.held(now) <= 0.0 && window.held(before) <= 0.0
    }

    /// First news of a subject, or of one that began anew: its past is not ours to count. Says whether requests
    /// have begun since nobody looked.
    fn begin(&mut self, at: usize, now: Duration, stream: Stream, seen: &UsageSeen) -> bool {
        let source = Source {
            sender: stream.sender,
            pod: seen.key.pod.as_deref().map(Into::into),
            stream: stream.number,
            is_online: true,
            counts: true,
            totals: seen.totals,
            at_ns: seen.at_ns,
            since: now,
            until: now,
            added: 0.0,
        };
        self.sources.insert(at, source);
        let begun = seen.totals.in_flight().max(u64::from(seen.totals.started > 0));
        if let (true, Some((Metric::Rps, window))) = (stream.synced, kept(&mut self.window)) {
            window.add(now, float(begun));
        }
        seen.totals.in_flight() > 0 || (stream.synced && begun > 0)
    }

    /// Later news of a subject. Says whether requests have begun.
    fn advance(&mut self, at: usize, now: Duration, stream: Stream, seen: &UsageSeen) -> bool {
        self.settle_source(at, now);
        let source = &mut self.sources[at];
        let begun = seen.totals.started - source.totals.started;
        let ended = seen.totals.finished - source.totals.finished;
        let left = seen.totals.left.saturating_sub(source.totals.left);
        let gained = signed(seen.totals.integral(seen.at_ns), source.totals.integral(source.at_ns));
        // What was taken to hold by now, and how much of it before the totals were read.
        let passed = Duration::from_nanos(seen.at_ns - source.at_ns);
        let read = (source.since + passed + passed / DRIFT).min(now);
        let level = float(source.totals.in_flight());
        let ahead = level * source.until.saturating_sub(read).as_secs_f64();
        let excess = gained / 1e9 - (source.added - ahead);
        self.has_gap |= source.pod.is_some() && passed > GAP;
        let from = if source.stream == stream.number || source.waits() {
            read.saturating_sub(source.spread(seen, passed, -excess / level))
        } else {
            // What an absent stream missed lies anywhere in its absence.
            source.since
        };
        let from = from.max(source.since);
        let (counts, waits) = (source.counts, source.waits());
        self.begun += if waits { 0 } else { begun };
        (source.totals, source.at_ns) = (seen.totals, seen.at_ns);
        let after = float(source.totals.in_flight());
        let (tail, until) = (after - level, source.until.max(read));
        source.added = after * until.saturating_sub(read).as_secs_f64();
        (source.since, source.until) = (read, until);
        (source.stream, source.is_online) = (stream.number, true);
        let (from, share) = since_woken(self.woken, from, read);
        match kept(&mut self.window) {
            Some((Metric::Concurrency, window)) if counts => {
                spread(window, excess * share, from, read);
                if tail != 0.0 {
                    window.add_level(tail, read, until);
                }
            }
            Some((Metric::Rps, window)) if counts => {
                // A request that waited begins again at its pod; the end of its wait takes that back. One that no pod got
                // has arrived as well.
                let again = if waits { float(ended.saturating_sub(left)) } else { 0.0 };
                spread(window, (float(begun) - again) * share, from, read);
            }
            Some(_) | None => {}
        }
        begun > 0
    }

    /// Adds the level held since the last news.
    fn settle_source(&mut self, at: usize, now: Duration) {
        let source = &mut self.sources[at];
        let level = float(source.totals.in_flight());
        if level > 0.0 && now > source.until {
            source.added += level * (now - source.until).as_secs_f64();
            if let (true, Some((Metric::Concurrency, window))) =
                (source.counts, kept(&mut self.window))
            {
                window.add_level(level, source.until, now);
            }
        }
        source.until = source.until.max(now);
    }
}

impl Default for Load {
    fn default() -> Self {
        Self::new()
    }
}

impl Source {
    /// Whether `seen` continues these totals; a counter that went backwards began anew.
    fn precedes(&self, seen: &UsageSeen) -> bool {
        seen.totals.started >= self.totals.started
            && seen.totals.finished >= self.totals.finished
            && seen.at_ns >= self.at_ns
    }

    /// Whether it counts requests that wait, not a pod's.
    fn waits(&self) -> bool {
        self.pod.is_none()
    }

    /// How long before `seen` the requests began and ended that it reports anew, of the time that `passed`: twice their
    /// mean age, which is right for all at once and for evenly spread, and no less than `least` seconds, in which as much
    /// was held as is taken back. After a gap in the reports on a pod: all of it.
    fn spread(&self, seen: &UsageSeen, passed: Duration, least: f64) -> Duration {
        if !self.waits() && passed > GAP {
            return passed;
        }
        let (new, old) = (&seen.totals, &self.totals);
        let events = (new.started - old.started) + (new.finished - old.finished);
        let sum = |of: fn(&Totals) -> u64| of(new).wrapping_sub(of(old));
        let began_and_ended =
            sum(|it| it.started_sum_ns).wrapping_add(sum(|it| it.finished_sum_ns));
        let ages_ns = signed(events.wrapping_mul(seen.at_ns), began_and_ended).max(0.0);
        let mean = ages_ns / 1e9 / float(events.max(1));
        let least = if least.is_finite() { least } else { 0.0 };
        Duration::from_secs_f64((2.0 * mean).max(least).min(passed.as_secs_f64()))
    }
}

/// The window that is kept, with what it holds.
fn kept(window: &mut Option<Box<(Metric, Window)>>) -> Option<(Metric, &mut Window)> {
    window.as_deref_mut().map(|(metric, window)| (*metric, window))
}

/// The part of `from` to `to` that is not before the second the window was made in, and its share of the whole.
fn since_woken(woken: Duration, from: Duration, to: Duration) -> (Duration, f64) {
    let part = from.max(Duration::from_secs(woken.as_secs()));
    if part == from || to <= from {
        return (from, 1.0);
    }
    let share = to.saturating_sub(part).as_secs_f64() / (to - from).as_secs_f64();
    (part.min(to), share)
}

fn spread(window: &mut Window, amount: f64, from: Duration, to: Duration) {
    if amount == 0.0 {
        return;
    }
    let over = to.saturating_sub(from).as_secs_f64();
    if over > 0.0 {
        window.add_level(amount / over, from, to);
    } else {
        window.add(to, amount);
    }
}

/// Difference of two wrapping integrals; small against their range, so its sign is the top bit.
fn signed(new: u64, old: u64) -> f64 {
    new.wrapping_sub(old).cast_signed() as f64
}

/// Counts as floats; exact below 2⁵³.
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
pub(crate) mod tests;
