//! Pure: running totals from many senders → one revision's load by the second.
//!
//! A request in flight is load for exactly the time the totals say. Between two reports the level last
//! reported is taken to hold, since a sender that is silent has nothing new to say; the next report corrects
//! the last second by what the totals really gained, so the sum is exact and nothing counts twice.
//!
//! Two rules come from Knative's activator (`pkg/activator/handler/concurrency_reporter.go` at 98e5ef9): the
//! first request after a quiet second counts as one for its whole second, however short it is; and a request
//! counts once, where it waits or where it runs.

use std::time::Duration;

use common::wire::{Metric, ScalePolicy, Totals, UsageSeen};

use crate::window::{Averages, Window};

/// How often a sender reports at least, while something changes.
const REPORT_PERIOD: Duration = Duration::from_secs(1);

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
    /// When the totals arrived, by our clock.
    since: Duration,
    /// Until when the level was added.
    until: Duration,
    /// Request-seconds added since `since`.
    added: f64,
}

impl Load {
    /// No load and no totals.
    pub fn new() -> Self {
        Self { sources: Vec::new(), window: None, begun: 0 }
    }

    /// Makes the window as `policy` has it. Another metric starts from nothing.
    pub fn wake(&mut self, policy: &ScalePolicy) {
        let (stable, panic) = (policy.stable_window, policy.panic_window_percent);
        match kept(&mut self.window) {
            Some((metric, window)) if metric == policy.metric => window.resize(stable, panic),
            Some(_) | None => {
                self.window = Some(Box::new((policy.metric, Window::new(stable, panic))));
            }
        }
    }

    /// Gives back the memory a sleeping revision does not need.
    pub fn sleep(&mut self) {
        self.window = None;
        self.sources.retain(|source| source.is_online);
        self.sources.shrink_to_fit();
    }

    /// Whether no sender has told anything that is still kept.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Whether these totals mean load: requests in flight, or begun since the last news.
    pub fn is_news(&self, stream: Stream, seen: &UsageSeen) -> bool {
        let begun = match self.find(stream.sender, seen.key.pod.as_deref()) {
            Ok(at) => seen.totals.started > self.sources[at].totals.started,
            Err(_) => stream.synced && seen.totals.started > 0,
        };
        begun || seen.totals.in_flight() > 0
    }

    /// Takes in one subject's totals. `counts` is false for a draining pod.
    pub fn seen(&mut self, now: Duration, stream: Stream, counts: bool, seen: &UsageSeen) {
        let pod = seen.key.pod.as_deref();
        let was_quiet = self.was_quiet(now);
        let grew = match self.find(stream.sender, pod) {
            Ok(at) if self.sources[at].precedes(seen) => self.advance(at, now, stream, seen),
            Ok(at) => {
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

    /// The sender's stream ended: its waiting line counts 0, and of its pods nothing is known until it is back.
    pub fn lost(&mut self, now: Duration, sender: u32) {
        for at in (0..self.sources.len()).rev() {
            if self.sources[at].sender != sender {
                continue;
            }
            self.settle_source(at, now);
            self.sources[at].is_online = false;
            if self.sources[at].pod.is_none() {
                self.sources.remove(at);
            }
        }
    }

    /// The stream has named every subject: what it did not name is gone.
    pub fn synced(&mut self, stream: Stream) {
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
        if let (true, Some((_, window))) = (known, kept(&mut self.window)) {
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
        let counted = self.sources.iter().filter(|source| source.is_online && source.counts);
        counted.map(|source| source.totals.in_flight()).sum()
    }

    /// Requests waiting for a pod.
    pub fn waiting(&self) -> u64 {
        let waiting = |source: &&Source| source.is_online && source.pod.is_none();
        self.sources.iter().filter(waiting).map(|source| source.totals.in_flight()).sum()
    }

    /// Whether no load is in any second of the window.
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.window.as_deref().is_none_or(|(_, it)| it.is_quiet())
    }

    /// Whether some stream that stands speaks of the pod.
    pub fn hears_of(&self, pod: &str) -> bool {
        let of_pod = |source: &Source| source.is_online && source.pod.as_deref() == Some(pod);
        self.sources.iter().any(of_pod)
    }

    fn find(&self, sender: u32, pod: Option<&str>) -> Result<usize, usize> {
        self.sources.binary_search_by(|it| (it.sender, it.pod.as_deref()).cmp(&(sender, pod)))
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
        let gained = signed(seen.totals.integral(seen.at_ns), source.totals.integral(source.at_ns));
        let excess = gained / 1e9 - source.added;
        // What an absent stream missed lies anywhere in its absence.
        let absent = source.stream != stream.number;
        let from = if absent { source.until } else { now.saturating_sub(source.spread(seen)) };
        let from = from.max(source.since);
        let (counts, waits) = (source.counts, source.pod.is_none());
        self.begun += if waits { 0 } else { begun };
        (source.totals, source.at_ns) = (seen.totals, seen.at_ns);
        (source.since, source.until, source.added) = (now, now, 0.0);
        (source.stream, source.is_online) = (stream.number, true);
        match kept(&mut self.window) {
            Some((Metric::Concurrency, window)) if counts => spread(window, excess, from, now),
            Some((Metric::Rps, window)) if counts => {
                // A request that waited begins again at its pod; the end of its wait takes that back.
                let again = if waits { float(ended) } else { 0.0 };
                spread(window, float(begun) - again, from, now);
            }
            Some(_) | None => {}
        }
        begun > 0
    }

    /// Adds the level held since the last news.
    fn settle_source(&mut self, at: usize, now: Duration) {
        let source = &mut self.sources[at];
        let level = float(source.totals.in_flight());
        if source.is_online && level > 0.0 && now > source.until {
            source.added += level * (now - source.until).as_secs_f64();
            if let (true, Some((Metric::Concurrency, window))) =
                (source.counts, kept(&mut self.window))
            {
                window.add_level(level, source.until, now);
            }
        }
        if source.is_online {
            source.until = source.until.max(now);
        }
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

    /// How long before `seen` the requests began and ended that it reports anew: twice their mean age, which is
    /// right for all at once and for evenly spread; at most a report's period.
    fn spread(&self, seen: &UsageSeen) -> Duration {
        let (new, old) = (&seen.totals, &self.totals);
        let events = (new.started - old.started) + (new.finished - old.finished);
        let sum = |of: fn(&Totals) -> u64| of(new).wrapping_sub(of(old));
        let began_and_ended =
            sum(|it| it.started_sum_ns).wrapping_add(sum(|it| it.finished_sum_ns));
        let ages_ns = signed(events.wrapping_mul(seen.at_ns), began_and_ended).max(0.0);
        let mean = ages_ns / 1e9 / float(events.max(1));
        Duration::from_secs_f64((2.0 * mean).min(REPORT_PERIOD.as_secs_f64()))
    }
}

/// The window that is kept, with what it holds.
fn kept(window: &mut Option<Box<(Metric, Window)>>) -> Option<(Metric, &mut Window)> {
    window.as_deref_mut().map(|(metric, window)| (*metric, window))
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
