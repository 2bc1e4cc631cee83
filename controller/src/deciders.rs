//! Pure: whose decisions count.
//!
//! Every autoscaler hears all usage and decides everything; every replica of the controller hears all decisions and
//! keeps the latest of each autoscaler. Of those that live, one counts:
//!
//! | first | because |
//! |---|---|
//! | whose windows are full and who hears as many reporters as any other | it knows what load there is |
//! | whose windows are full, though others hear more reporters | what it lacks is of now; a new one lacks the whole window |
//! | who has heard usage clearly longer, where windows are not full | a new one has empty windows |
//! | who is said to count already, by any autoscaler that lives | two that know as much must not pull a revision to and fro |
//! | the first by name | all replicas have to choose the same one |
//!
//! All of it is what autoscalers say of themselves in heartbeats, so that every replica comes to the same choice, whichever
//! stream was there first: a pod that one replica drains while another calls it ready would never be let go. An
//! autoscaler repeats whom its own RouteTable calls the one that counts: where replicas of the controller differ, all of them
//! soon hear both names, and take the same.
//!
//! Nothing here compares clocks of different hosts. An autoscaler says for how long it has heard usage, and time is counted in
//! ticks: who has been silent for [`SILENT`] of them is passed over, whether or not its stream stands. A controller that
//! stood still itself has counted no ticks meanwhile.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::{Alive, Decision, Name};

/// Between two calls of [`Deciders::tick`].
pub const TICK: Duration = Duration::from_millis(100);
/// Ticks without a heartbeat, of which there are two in four, after which an autoscaler is passed over.
pub const SILENT: u64 = 7;
/// Ticks for which one may hear fewer reporters than another: one that restarts is gone from all for a moment, but not
/// from all at once.
const SHORT: u64 = 10;
/// Ticks by which two have to differ for one to have heard usage longer. More than a message takes.
const ALIKE: u64 = 5;
/// Ticks for which the one that is said to count is waited for, while others are here already.
const AWAITED: u64 = 10;

/// What the machine is to take in.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A whole set of decisions begins.
    Begin,
    /// One decision.
    Decide(Decision),
    /// Nothing is decided of the revision any more.
    Undecide(Name),
    /// The set is whole: what it did not name is undecided.
    Synced,
}

/// The autoscalers whose streams stand.
#[derive(Clone, Debug, Default)]
pub struct Deciders {
    all: BTreeMap<u64, Decider>,
    counts: Option<u64>,
    /// Ticks so far.
    now: u64,
    /// Whether any has counted yet.
    has_chosen: bool,
    /// Since when there was one to choose, while none had counted.
    awaits_since: Option<u64>,
}

#[derive(Clone, Debug)]
struct Decider {
    name: String,
    is_whole: bool,
    /// Absent: of an earlier release, which says nothing of itself. Such a one lives for as long as its stream stands.
    heard: Option<Heard>,
    decisions: BTreeMap<Name, Decision>,
}

/// The latest heartbeat.
#[derive(Clone, Debug)]
struct Heard {
    /// Tick at which it came.
    at: u64,
    /// Tick since which its sender has heard usage; below 0: before the first one.
    since: i64,
    alive: Alive,
    /// Since when it has heard fewer reporters than another.
    short_since: Option<u64>,
}

impl Deciders {
    /// Name of the one whose decisions count.
    pub fn chosen(&self) -> Option<&str> {
        self.counts.and_then(|stream| self.all.get(&stream)).map(|it| it.name.as_str())
    }

    /// Names of all that decide.
    pub fn names(&self) -> BTreeSet<&str> {
        self.all.values().map(|it| it.name.as_str()).collect()
    }

    /// An autoscaler's stream, of this number, has begun.
    pub fn begin(&mut self, stream: u64, name: &str) -> Vec<Step> {
        let ended = self.end(stream);
        let decider = Decider {
            name: name.to_owned(),
            is_whole: false,
            heard: None,
            decisions: BTreeMap::new(),
        };
        self.all.insert(stream, decider);
        ended
    }

    /// It lives, and says this of itself.
    pub fn alive(&mut self, stream: u64, alive: Alive) -> Vec<Step> {
        let now = self.now;
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        let tick_ms = u64::try_from(TICK.as_millis()).unwrap_or(u64::MAX);
        let signed = |ticks: u64| i64::try_from(ticks).unwrap_or(i64::MAX);
        let said = signed(now).saturating_sub(signed(alive.heard_ms / tick_ms));
        let before = it.heard.take();
        // Messages take now longer, now shorter: that changes no choice.
        let since = match &before {
            Some(before) if before.since.abs_diff(said) <= ALIKE => before.since,
            Some(_) | None => said,
        };
        let short_since = before.and_then(|it| it.short_since);
        it.heard = Some(Heard { at: now, since, alive, short_since });
        self.choose()
    }

    /// Another [`TICK`] has passed.
    pub fn tick(&mut self) -> Vec<Step> {
        self.now += 1;
        let now = self.now;
        let living = self.all.values().filter(|it| !it.is_silent(now));
        let heard = living.filter_map(|it| it.heard.as_ref());
        let most = heard.map(|it| it.alive.reporters).max().unwrap_or(0);
        for it in self.all.values_mut().filter_map(|it| it.heard.as_mut()) {
            let is_short = it.alive.reporters < most;
            it.short_since = is_short.then(|| it.short_since.unwrap_or(now));
        }
        self.choose()
    }

    /// It decided.
    pub fn decide(&mut self, stream: u64, decision: Decision) -> Vec<Step> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        it.decisions.insert(decision.revision.clone(), decision.clone());
        self.if_it_counts(stream, Step::Decide(decision))
    }

    /// It decides nothing of the revision any more.
    pub fn undecide(&mut self, stream: u64, revision: Name) -> Vec<Step> {
        let Some(it) = self.all.get_mut(&stream) else { return Vec::new() };
        it.decisions.remove(&revision);
        self.if_it_counts(stream, Step::Undecide(revision))
    }

    /// It has named every revision.
    pub fn synced(&mut self, stream: u64) -> Vec<Step> {
        if let Some(it) = self.all.get_mut(&stream) {
            it.is_whole = true;
        }
        self.choose()
    }

    /// Its stream has ended. The last one's decisions stay in force until another one decides.
    pub fn end(&mut self, stream: u64) -> Vec<Step> {
        self.all.remove(&stream);
        if self.counts == Some(stream) {
            self.counts = None;
        }
        self.choose()
    }

    fn if_it_counts(&self, stream: u64, step: Step) -> Vec<Step> {
        if self.counts == Some(stream) { vec![step] } else { Vec::new() }
    }

    /// Lets the first by rank count, and says all that it decided if another one counted before.
    fn choose(&mut self) -> Vec<Step> {
        let first = self.first();
        let Some(first) = first.filter(|first| self.counts != Some(*first)) else {
            return Vec::new();
        };
        // That none is heard says more of the way to them than of each.
        let is_silent = self.all.get(&first).is_some_and(|it| it.is_silent(self.now));
        if self.counts.is_some() && is_silent || self.is_awaited(first) {
            return Vec::new();
        }
        (self.counts, self.has_chosen) = (Some(first), true);
        let decisions = self.all.get(&first).into_iter().flat_map(|it| it.decisions.values());
        let decisions = decisions.cloned().map(Step::Decide);
        [Step::Begin].into_iter().chain(decisions).chain([Step::Synced]).collect()
    }

    /// The stream of the one that should count.
    fn first(&self) -> Option<u64> {
        let named = self.named();
        let living = self.all.values().filter(|it| it.is_whole && !it.is_silent(self.now));
        let oldest = living.filter_map(Decider::fills_since).min().unwrap_or(0);
        let rank = |(stream, it): &(&u64, &Decider)| {
            let knows = it.is_full() && it.sees_all(self.now);
            let later = it.fills_since().map_or(0, |it| it.saturating_sub(oldest).max(0));
            let later = later.unsigned_abs().saturating_sub(ALIKE);
            let is_named = named.contains(it.name.as_str());
            let lacks = (it.is_silent(self.now), !knows, !it.is_full());
            (lacks, later, !is_named, it.name.clone(), Reverse(**stream))
        };
        let whole = self.all.iter().filter(|(_, it)| it.is_whole);
        whole.min_by_key(rank).map(|(stream, _)| *stream)
    }

    /// Whom those that live call the one that counts.
    fn named(&self) -> BTreeSet<&str> {
        let living = self.all.values().filter(|it| !it.is_silent(self.now));
        let heard = living.filter_map(|it| it.heard.as_ref());
        heard.filter_map(|it| it.alive.counts.as_deref()).collect()
    }

    /// Whether another one, which is said to count, is given time to be here first: this replica has just started.
    fn is_awaited(&mut self, first: u64) -> bool {
        let Some(it) = self.all.get(&first).filter(|_| !self.has_chosen) else { return false };
        let named = self.named();
        let is_right = named.is_empty() || named.contains(it.name.as_str()) || it.is_full();
        let since = *self.awaits_since.get_or_insert(self.now);
        !is_right && self.now < since + AWAITED
    }
}

impl Decider {
    fn is_silent(&self, now: u64) -> bool {
        self.heard.as_ref().is_some_and(|it| now - it.at >= SILENT)
    }

    fn is_full(&self) -> bool {
        self.heard.as_ref().is_none_or(|it| it.alive.is_full)
    }

    /// Since when it has filled its windows; `None`: they are full.
    fn fills_since(&self) -> Option<i64> {
        self.heard.as_ref().filter(|it| !it.alive.is_full).map(|it| it.since)
    }

    fn sees_all(&self, now: u64) -> bool {
        let short = self.heard.as_ref().and_then(|it| it.short_since);
        short.is_none_or(|since| now - since < SHORT)
    }
}

#[cfg(test)]
mod tests;
