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
//! is counted in ticks. One that is silent for [`SILENT_TICKS`] of them is not chosen, even while its stream is open.
//! A controller that was suspended has counted no ticks meanwhile.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::{AutoscalerHeartbeat, NamespacedName, ScaleDecision};

/// Interval between two calls of [`AutoscalerElection::tick`].
pub const ELECTION_TICK: Duration = Duration::from_millis(100);
/// Ticks without a heartbeat after which an autoscaler is not chosen. Two heartbeats come in four ticks.
pub const SILENT_TICKS: u64 = 7;
/// Ticks for which an autoscaler may have fewer reporters than another. A reporter that restarts leaves all of them for
/// a moment, but not all at the same time.
const FEWER_REPORTERS_TICKS: u64 = 10;
/// Difference in ticks from which one autoscaler counts as having received usage for longer. It exceeds any delay of a
/// message.
const DELAY_TOLERANCE_TICKS: u64 = 5;
/// Ticks for which a new replica waits for the autoscaler that is called active, while others are connected.
const STARTUP_WAIT_TICKS: u64 = 10;

/// An event for the machine that results from the election.
#[derive(Clone, Debug, PartialEq)]
pub enum ElectionEvent {
    /// Start of a whole set of decisions.
    Begin,
    /// One decision, of the active autoscaler.
    Decide(ScaleDecision),
    /// The Revision has no decision any more.
    Withdraw(NamespacedName),
    /// End of the set: Revisions that it did not name have no decision.
    Synced,
}

/// The autoscalers with open streams, and the active one of them.
#[derive(Clone, Debug, Default)]
pub struct AutoscalerElection {
    candidates: BTreeMap<u64, AutoscalerCandidate>,
    active_stream: Option<u64>,
    /// Number of ticks so far.
    ticks: u64,
    /// True once any autoscaler has been active.
    has_elected: bool,
    /// Tick at which the first candidate appeared, while none had been active.
    waiting_since: Option<u64>,
}

/// One autoscaler's stream, with its latest decisions and heartbeat.
#[derive(Clone, Debug)]
struct AutoscalerCandidate {
    name: String,
    is_synced: bool,
    /// Latest heartbeat; none from an autoscaler of an earlier release, which is live while its stream is open.
    last_heartbeat: Option<ReceivedHeartbeat>,
    decisions: BTreeMap<NamespacedName, ScaleDecision>,
}

/// Latest heartbeat of an autoscaler, in this replica's ticks.
#[derive(Clone, Debug)]
struct ReceivedHeartbeat {
    /// Tick at which the heartbeat arrived.
    received_at: u64,
    /// Tick since which the sender has received usage; below 0: before the first tick.
    receives_usage_since: i64,
    heartbeat: AutoscalerHeartbeat,
    /// Tick since which it has had fewer reporters than another live autoscaler.
    fewer_reporters_since: Option<u64>,
}

impl AutoscalerElection {
    /// Returns the name of the active autoscaler.
    pub fn active_name(&self) -> Option<&str> {
        self.active_stream
            .and_then(|stream| self.candidates.get(&stream))
            .map(|it| it.name.as_str())
    }

    /// Records that the autoscaler `name` has opened the stream with this number.
    pub fn begin_stream(&mut self, stream: u64, name: &str) -> Vec<ElectionEvent> {
        let ended = self.end_stream(stream);
        let candidate = AutoscalerCandidate {
            name: name.to_owned(),
            is_synced: false,
            last_heartbeat: None,
            decisions: BTreeMap::new(),
        };
        self.candidates.insert(stream, candidate);
        ended
    }

    /// Records a heartbeat on a stream.
    pub fn handle_heartbeat(
        &mut self,
        stream: u64,
        heartbeat: AutoscalerHeartbeat,
    ) -> Vec<ElectionEvent> {
        let now = self.ticks;
        let Some(it) = self.candidates.get_mut(&stream) else { return Vec::new() };
        let tick_ms = u64::try_from(ELECTION_TICK.as_millis()).unwrap_or(u64::MAX);
        let signed = |ticks: u64| i64::try_from(ticks).unwrap_or(i64::MAX);
        // In ticks of this replica: clocks of different hosts are never compared.
        let reported_since = signed(now).saturating_sub(signed(heartbeat.observed_ms / tick_ms));
        let last_heartbeat = it.last_heartbeat.take();
        // Delays of messages vary, and must not change the choice.
        let since = match &last_heartbeat {
            Some(last_heartbeat)
                if last_heartbeat.receives_usage_since.abs_diff(reported_since)
                    <= DELAY_TOLERANCE_TICKS =>
            {
                last_heartbeat.receives_usage_since
            }
            Some(_) | None => reported_since,
        };
        let fewer_reporters_since = last_heartbeat.and_then(|it| it.fewer_reporters_since);
        it.last_heartbeat = Some(ReceivedHeartbeat {
            received_at: now,
            receives_usage_since: since,
            heartbeat,
            fewer_reporters_since,
        });
        self.elect()
    }

    /// Counts another [`ELECTION_TICK`], and detects silent autoscalers.
    pub fn tick(&mut self) -> Vec<ElectionEvent> {
        self.ticks += 1;
        let now = self.ticks;
        let live_candidates = self.candidates.values().filter(|it| !it.is_silent(now));
        // Silent ones do not count: their number of reporters is outdated.
        let heartbeats = live_candidates.filter_map(|it| it.last_heartbeat.as_ref());
        let most_reporters = heartbeats.map(|it| it.heartbeat.reporters).max().unwrap_or(0);
        for it in self.candidates.values_mut().filter_map(|it| it.last_heartbeat.as_mut()) {
            let has_fewer = it.heartbeat.reporters < most_reporters;
            it.fewer_reporters_since = has_fewer.then(|| it.fewer_reporters_since.unwrap_or(now));
        }
        self.elect()
    }

    /// Records a decision on a stream.
    pub fn handle_decision(&mut self, stream: u64, decision: ScaleDecision) -> Vec<ElectionEvent> {
        let Some(it) = self.candidates.get_mut(&stream) else { return Vec::new() };
        // All decisions are kept, so that an autoscaler that becomes active has its whole set ready.
        it.decisions.insert(decision.revision.clone(), decision.clone());
        self.if_active(stream, ElectionEvent::Decide(decision))
    }

    /// Records that a stream has no decision for the Revision any more.
    pub fn withdraw_decision(
        &mut self,
        stream: u64,
        revision: NamespacedName,
    ) -> Vec<ElectionEvent> {
        let Some(it) = self.candidates.get_mut(&stream) else { return Vec::new() };
        it.decisions.remove(&revision);
        self.if_active(stream, ElectionEvent::Withdraw(revision))
    }

    /// Records that a stream has sent its whole set of decisions.
    pub fn handle_synced(&mut self, stream: u64) -> Vec<ElectionEvent> {
        if let Some(it) = self.candidates.get_mut(&stream) {
            it.is_synced = true;
        }
        self.elect()
    }

    /// Records the end of a stream. The last decisions stay in force until another autoscaler becomes active.
    pub fn end_stream(&mut self, stream: u64) -> Vec<ElectionEvent> {
        self.candidates.remove(&stream);
        if self.active_stream == Some(stream) {
            self.active_stream = None;
        }
        self.elect()
    }

    /// Returns the event, if the stream is the active autoscaler's.
    fn if_active(&self, stream: u64, event: ElectionEvent) -> Vec<ElectionEvent> {
        if self.active_stream == Some(stream) { vec![event] } else { Vec::new() }
    }

    /// Activates the first by rank. If that is a change, returns its whole set of decisions.
    fn elect(&mut self) -> Vec<ElectionEvent> {
        let first = self.first_by_rank();
        let Some(first) = first.filter(|first| self.active_stream != Some(*first)) else {
            return Vec::new();
        };
        // If all are silent, the network is more likely at fault than each of them: the active one stays.
        let is_silent = self.candidates.get(&first).is_some_and(|it| it.is_silent(self.ticks));
        if self.active_stream.is_some() && is_silent || self.must_wait_for_active(first) {
            return Vec::new();
        }
        (self.active_stream, self.has_elected) = (Some(first), true);
        let decisions =
            self.candidates.get(&first).into_iter().flat_map(|it| it.decisions.values());
        let decisions = decisions.cloned().map(ElectionEvent::Decide);
        [ElectionEvent::Begin].into_iter().chain(decisions).chain([ElectionEvent::Synced]).collect()
    }

    /// Returns the stream of the autoscaler that should be active.
    fn first_by_rank(&self) -> Option<u64> {
        let named = self.names_called_active();
        // An incomplete set would withdraw the decisions on the Revisions that it does not contain yet.
        let synced = self.candidates.iter().filter(|(_, it)| it.is_synced);
        let is_live = |candidate: &AutoscalerCandidate| !candidate.is_silent(self.ticks);
        // Silent ones are compared only if all are silent, and then by the same rules.
        let has_live = synced.clone().any(|(_, it)| is_live(it));
        let compared = synced.filter(|(_, it)| is_live(it) || !has_live);
        let filling_since = compared.clone().filter_map(|(_, it)| it.filling_windows_since());
        let oldest = filling_since.min().unwrap_or(0);
        // Tuples compare field by field, in the order of the table above. `Reverse` prefers the newer of two streams of
        // one autoscaler.
        let rank = |(stream, candidate): &(&u64, &AutoscalerCandidate)| {
            let knows_all = candidate.has_full_windows() && candidate.has_all_reporters(self.ticks);
            let ticks_later =
                candidate.filling_windows_since().map_or(0, |it| it.saturating_sub(oldest).max(0));
            // Differences of a few ticks come from delays of messages.
            let ticks_later = ticks_later.unsigned_abs().saturating_sub(DELAY_TOLERANCE_TICKS);
            let is_named = named.contains(candidate.name.as_str());
            let lacks = (!knows_all, !candidate.has_full_windows());
            (lacks, ticks_later, !is_named, candidate.name.clone(), Reverse(**stream))
        };
        compared.min_by_key(rank).map(|(stream, _)| *stream)
    }

    /// Returns the names that live autoscalers call active.
    fn names_called_active(&self) -> BTreeSet<&str> {
        let live_candidates = self.candidates.values().filter(|it| !it.is_silent(self.ticks));
        let heartbeats = live_candidates.filter_map(|it| it.last_heartbeat.as_ref());
        heartbeats.filter_map(|it| it.heartbeat.active_autoscaler.as_deref()).collect()
    }

    /// Returns true if `first` must still wait for another autoscaler that is called active: this replica has just
    /// started.
    fn must_wait_for_active(&mut self, first: u64) -> bool {
        let Some(it) = self.candidates.get(&first).filter(|_| !self.has_elected) else {
            return false;
        };
        let named = self.names_called_active();
        let may_be_active =
            named.is_empty() || named.contains(it.name.as_str()) || it.has_full_windows();
        let since = *self.waiting_since.get_or_insert(self.ticks);
        !may_be_active && self.ticks < since + STARTUP_WAIT_TICKS
    }
}

impl AutoscalerCandidate {
    fn is_silent(&self, now: u64) -> bool {
        self.last_heartbeat.as_ref().is_some_and(|it| now - it.received_at >= SILENT_TICKS)
    }

    fn has_full_windows(&self) -> bool {
        self.last_heartbeat.as_ref().is_none_or(|it| it.heartbeat.covers_all_windows)
    }

    /// Returns the tick since which it has been filling its windows; `None`: they are full.
    fn filling_windows_since(&self) -> Option<i64> {
        self.last_heartbeat
            .as_ref()
            .filter(|it| !it.heartbeat.covers_all_windows)
            .map(|it| it.receives_usage_since)
    }

    fn has_all_reporters(&self, now: u64) -> bool {
        let fewer_since = self.last_heartbeat.as_ref().and_then(|it| it.fewer_reporters_since);
        // An agent that restarts is absent from each autoscaler for a moment.
        fewer_since.is_none_or(|since| now - since < FEWER_REPORTERS_TICKS)
    }
}

#[cfg(test)]
mod tests;
