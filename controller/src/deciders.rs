//! Pure: election of the active autoscaler.
//!
//! Every autoscaler receives all usage and decides for every Revision; every replica of the controller receives all
//! decisions and keeps the latest of each autoscaler. Of the live ones, the active one is the first by this order:
//!
//! | order | reason |
//! |---|---|
//! | full windows, and as many reporters as any other | it knows the whole load |
//! | full windows, though others have more reporters | it lacks present load; a new one lacks the whole window |
//! | usage received for clearly longer, where windows are not full | a new one has emptier windows |
//! | called active by any live autoscaler | two that know as much must not alternate |
//! | first by name | all replicas must choose the same one |
//!
//! All of it comes from the autoscalers' heartbeats, so all replicas reach the same choice, whichever stream came
//! first. Otherwise one replica could drain a pod that another calls ready, and the pod would never stop. A heartbeat
//! repeats the name of the active autoscaler in the sender's own RouteTable. Where replicas of the controller differ,
//! all of them soon receive both names, and choose the same.
//!
//! Nothing here compares clocks of different hosts. An autoscaler reports for how long it has received usage, and time
//! is counted in ticks. One that is silent for [`SILENT`] of them is passed over, even while its stream is open. A
//! controller that was suspended has counted no ticks meanwhile.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::{AutoscalerHeartbeat, NamespacedName, ScaleDecision};

/// Interval between two calls of [`AutoscalerElection::tick`].
pub const TICK: Duration = Duration::from_millis(100);
/// Ticks without a heartbeat after which an autoscaler is passed over. Two heartbeats come in four ticks.
pub const SILENT: u64 = 7;
/// Ticks for which an autoscaler may have fewer reporters than another. A reporter that restarts leaves all of them for
/// a moment, but not all at the same time.
const SHORT: u64 = 10;
/// Difference in ticks from which one autoscaler counts as having received usage for longer. It exceeds any delay of a
/// message.
const ALIKE: u64 = 5;
/// Ticks for which a new replica waits for the autoscaler that is called active, while others are connected.
const AWAITED: u64 = 10;

/// An event for the machine that results from the election.
#[derive(Clone, Debug, PartialEq)]
pub enum ElectionEvent {
    /// Start of a whole set of decisions.
    Begin,
    /// One decision, of the active autoscaler.
    Decide(ScaleDecision),
    /// The Revision has no decision any more.
    Undecide(NamespacedName),
    /// End of the set: Revisions that it did not name have no decision.
    Synced,
}

/// The autoscalers with open streams, and the active one of them.
#[derive(Clone, Debug, Default)]
pub struct AutoscalerElection {
    all: BTreeMap<u64, AutoscalerCandidate>,
    counts: Option<u64>,
    /// Number of ticks so far.
    now: u64,
    /// True once any autoscaler has been active.
    has_chosen: bool,
    /// Tick at which the first candidate appeared, while none had been active.
    awaits_since: Option<u64>,
}

/// One autoscaler's stream, with its latest decisions and heartbeat.
#[derive(Clone, Debug)]
struct AutoscalerCandidate {
    name: String,
    is_whole: bool,
    /// Latest heartbeat; none from an autoscaler of an earlier release, which is live while its stream is open.
    heard: Option<ReceivedHeartbeat>,
    decisions: BTreeMap<NamespacedName, ScaleDecision>,
}

/// Latest heartbeat of an autoscaler, in this replica's ticks.
#[derive(Clone, Debug)]
struct ReceivedHeartbeat {
    /// Tick at which the heartbeat arrived.
    at: u64,
    /// Tick since which the sender has received usage; below 0: before the first tick.
    since: i64,
    alive: AutoscalerHeartbeat,
    /// Tick since which it has had fewer reporters than another live autoscaler.
    short_since: Option<u64>,
}

impl AutoscalerElection {
    /// Name of the active autoscaler.
    pub fn chosen(&self) -> Option<&str> {
        self.counts.and_then(|stream| self.all.get(&stream)).map(|it| it.name.as_str())
    }

    /// Names of all autoscalers with open streams.
    pub fn names(&self) -> BTreeSet<&str> {
        self.all.values().map(|it| it.name.as_str()).collect()
    }

    /// Records that the autoscaler `name` has opened the stream with this number.
    pub fn begin(&mut self, stream: u64, name: &str) -> Vec<ElectionEvent> {
        let ended = self.end(stream);
        let decider = AutoscalerCandidate {
            name: name.to_owned(),
            is_whole: false,
            heard: None,
            decisions: BTreeMap::new(),
        };
        self.all.insert(stream, decider);
        ended
    }

    /// Records a heartbeat on a stream.
    pub fn alive(&mut self, stream: u64, alive: AutoscalerHeartbeat) -> Vec<ElectionEvent> {
        let now = self.now;
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        let tick_ms = u64::try_from(TICK.as_millis()).unwrap_or(u64::MAX);
        let signed = |ticks: u64| i64::try_from(ticks).unwrap_or(i64::MAX);
        let said = signed(now).saturating_sub(signed(alive.heard_ms / tick_ms));
        let before = it.heard.take();
        // Delays of messages vary, and must not change the choice.
        let since = match &before {
            Some(before) if before.since.abs_diff(said) <= ALIKE => before.since,
            Some(_) | None => said,
        };
        let short_since = before.and_then(|it| it.short_since);
        it.heard = Some(ReceivedHeartbeat { at: now, since, alive, short_since });
        self.choose()
    }

    /// Counts another [`TICK`], and detects silent autoscalers.
    pub fn tick(&mut self) -> Vec<ElectionEvent> {
        self.now += 1;
        let now = self.now;
        let living = self.all.values().filter(|it| !it.is_silent(now));
        // Silent ones do not count: their number of reporters is outdated.
        let heard = living.filter_map(|it| it.heard.as_ref());
        let most = heard.map(|it| it.alive.reporters).max().unwrap_or(0);
        for it in self.all.values_mut().filter_map(|it| it.heard.as_mut()) {
            let is_short = it.alive.reporters < most;
            it.short_since = is_short.then(|| it.short_since.unwrap_or(now));
        }
        self.choose()
    }

    /// Records a decision on a stream.
    pub fn decide(&mut self, stream: u64, decision: ScaleDecision) -> Vec<ElectionEvent> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        // All decisions are kept, so that an autoscaler that becomes active has its whole set ready.
        it.decisions.insert(decision.revision.clone(), decision.clone());
        self.if_it_counts(stream, ElectionEvent::Decide(decision))
    }

    /// Records that a stream has no decision for the Revision any more.
    pub fn undecide(&mut self, stream: u64, revision: NamespacedName) -> Vec<ElectionEvent> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        it.decisions.remove(&revision);
        self.if_it_counts(stream, ElectionEvent::Undecide(revision))
    }

    /// Records that a stream has sent its whole set of decisions.
    pub fn synced(&mut self, stream: u64) -> Vec<ElectionEvent> {
        if let Some(it) = self.all.get_mut(&stream) {
            it.is_whole = true;
        }
        self.choose()
    }

    /// Records the end of a stream. The last decisions stay in force until another autoscaler becomes active.
    pub fn end(&mut self, stream: u64) -> Vec<ElectionEvent> {
        self.all.remove(&stream);
        if self.counts == Some(stream) {
            self.counts = None;
        }
        self.choose()
    }

    /// The step, if the stream is the active autoscaler's.
    fn if_it_counts(&self, stream: u64, step: ElectionEvent) -> Vec<ElectionEvent> {
        if self.counts == Some(stream) { vec![step] } else { Vec::new() }
    }

    /// Activates the first by rank. If that is a change, returns its whole set of decisions.
    fn choose(&mut self) -> Vec<ElectionEvent> {
        let first = self.first();
        let Some(first) = first.filter(|first| self.counts != Some(*first)) else {
            return Vec::new();
        };
        // If all are silent, the network is more likely at fault than each of them: the active one stays.
        let is_silent = self.all.get(&first).is_some_and(|it| it.is_silent(self.now));
        if self.counts.is_some() && is_silent || self.is_awaited(first) {
            return Vec::new();
        }
        (self.counts, self.has_chosen) = (Some(first), true);
        let decisions = self.all.get(&first).into_iter().flat_map(|it| it.decisions.values());
        let decisions = decisions.cloned().map(ElectionEvent::Decide);
        [ElectionEvent::Begin].into_iter().chain(decisions).chain([ElectionEvent::Synced]).collect()
    }

    /// Stream of the autoscaler that should be active.
    fn first(&self) -> Option<u64> {
        let named = self.named();
        let living = self.all.values().filter(|it| it.is_whole && !it.is_silent(self.now));
        let oldest = living.filter_map(AutoscalerCandidate::fills_since).min().unwrap_or(0);
        // Tuples compare field by field, in the order of the table above. `Reverse` prefers the newer of two streams of
        // one autoscaler.
        let rank = |(stream, it): &(&u64, &AutoscalerCandidate)| {
            let knows = it.is_full() && it.sees_all(self.now);
            let later = it.fills_since().map_or(0, |it| it.saturating_sub(oldest).max(0));
            // Differences of a few ticks come from delays of messages.
            let later = later.unsigned_abs().saturating_sub(ALIKE);
            let is_named = named.contains(it.name.as_str());
            let lacks = (it.is_silent(self.now), !knows, !it.is_full());
            (lacks, later, !is_named, it.name.clone(), Reverse(**stream))
        };
        // A set that is not complete would undecide the Revisions it lacks so far.
        let whole = self.all.iter().filter(|(_, it)| it.is_whole);
        whole.min_by_key(rank).map(|(stream, _)| *stream)
    }

    /// Names that live autoscalers call active.
    fn named(&self) -> BTreeSet<&str> {
        let living = self.all.values().filter(|it| !it.is_silent(self.now));
        let heard = living.filter_map(|it| it.heard.as_ref());
        heard.filter_map(|it| it.alive.counts.as_deref()).collect()
    }

    /// Returns true if `first` must still wait for another autoscaler that is called active: this replica has just
    /// started.
    fn is_awaited(&mut self, first: u64) -> bool {
        let Some(it) = self.all.get(&first).filter(|_| !self.has_chosen) else { return false };
        let named = self.named();
        let is_right = named.is_empty() || named.contains(it.name.as_str()) || it.is_full();
        let since = *self.awaits_since.get_or_insert(self.now);
        !is_right && self.now < since + AWAITED
    }
}

impl AutoscalerCandidate {
    fn is_silent(&self, now: u64) -> bool {
        self.heard.as_ref().is_some_and(|it| now - it.at >= SILENT)
    }

    fn is_full(&self) -> bool {
        self.heard.as_ref().is_none_or(|it| it.alive.is_full)
    }

    /// Tick since which it has been filling its windows; `None`: they are full.
    fn fills_since(&self) -> Option<i64> {
        self.heard.as_ref().filter(|it| !it.alive.is_full).map(|it| it.since)
    }

    fn sees_all(&self, now: u64) -> bool {
        let short = self.heard.as_ref().and_then(|it| it.short_since);
        // An agent that restarts is absent from each autoscaler for a moment.
        short.is_none_or(|since| now - since < SHORT)
    }
}

#[cfg(test)]
mod tests;
