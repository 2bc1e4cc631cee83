//! Pure: whether the kernel half's gauges of a pod have drifted away from its sockets, and what puts them right.
//!
//! The gauges are kept by adding and subtracting, so what goes wrong once stays wrong. Each socket remembers what it counts
//! for, so all of them together say what the gauges should be. But to list them takes time, in which they change: a
//! difference proves nothing by itself. So a look lists the sockets twice and reads the gauges before, between and after.
//! Only where nothing moved does it say anything, and only what [`TIMES`] such looks in a row say is drift.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

pub(crate) mod look;

/// Rest between two looks into a pod.
const EVERY: Duration = Duration::from_secs(10);
/// The same while its gauges are all 0, which is where nearly all of their time most pods' are.
const EVERY_AT_REST: Duration = Duration::from_secs(60);
/// The same after a look that found a difference.
const AGAIN: Duration = Duration::from_secs(1);
/// How many looks in a row must find the same difference.
const TIMES: u32 = 3;
/// Looks into a pod take at most one part in so many of a processor's time.
const PARTS: u32 = 100;

/// How many gauges a pod has.
const GAUGES: usize = 4;

/// What is counted up and down of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gauge {
    /// Open connections.
    Connections,
    /// Requests in flight.
    InFlight,
    /// Connections without a request so far.
    Fresh,
    /// Connections whose requests are an estimate.
    Estimated,
}

impl Gauge {
    /// All of them, in the order of [`Levels`].
    pub const ALL: [Self; GAUGES] =
        [Self::Connections, Self::InFlight, Self::Fresh, Self::Estimated];

    /// As metrics name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::InFlight => "in_flight",
            Self::Fresh => "fresh",
            Self::Estimated => "estimated",
        }
    }
}

/// The gauges' values, in the order of [`Gauge::ALL`]. One that was subtracted from too often is below 0.
pub type Levels = [i64; GAUGES];

/// What the kernel half says of a pod at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The gauges.
    pub levels: Levels,
    /// Requests begun and ended so far.
    pub totals: [u64; 2],
}

/// What one socket counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Its requests in flight.
    pub(crate) in_flight: u32,
    /// Whether it has brought no request so far.
    pub(crate) is_fresh: bool,
    /// Whether nobody can follow what is spoken there.
    pub(crate) is_estimated: bool,
}

/// Sockets that count for a pod, by their cookies.
pub(crate) type Sockets = BTreeMap<u64, Counts>;

/// One look into a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// Before the first list, between the two, and after the second.
    pub(crate) readings: [Reading; 3],
    /// The lists.
    pub(crate) sockets: [Sockets; 2],
    /// Connections to the serving port that count nowhere, by their cookies.
    pub(crate) uncounted: BTreeSet<u64>,
    /// Processor time that it took.
    pub(crate) took: Duration,
}

impl Look {
    /// By how much the sockets differ from each gauge; `None` where one of both moved.
    fn differences(&self) -> [Option<i64>; GAUGES] {
        Gauge::ALL.map(|gauge| {
            let at = gauge as usize;
            let [before, between, after] = self.readings;
            let stood = before.levels[at] == between.levels[at]
                && between.levels[at] == after.levels[at]
                && (gauge != Gauge::InFlight
                    || before.totals == between.totals && between.totals == after.totals);
            let [first, second] = self.sockets.each_ref().map(|all| what_counts(all, gauge));
            let level: i64 = first.values().sum();
            (stood && first == second).then(|| level - before.levels[at])
        })
    }
}

/// The sockets that count in a gauge, and for how much.
fn what_counts(all: &Sockets, gauge: Gauge) -> BTreeMap<u64, i64> {
    let counts = |it: &Counts| match gauge {
        Gauge::Connections => 1,
        Gauge::InFlight => i64::from(it.in_flight),
        Gauge::Fresh => i64::from(it.is_fresh),
        Gauge::Estimated => i64::from(it.is_estimated),
    };
    all.iter().map(|(&cookie, it)| (cookie, counts(it))).filter(|(_, it)| *it > 0).collect()
}

/// What a look leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// To be added to the gauges; all 0: nothing is wrong.
    pub(crate) add: Levels,
    /// Whether all gauges stood still, so that each could be judged.
    pub(crate) stood: bool,
}

/// What is known of this node's pods. Times are CLOCK_MONOTONIC in ns.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    pods: BTreeMap<String, Pod>,
}

#[derive(Debug, Default)]
struct Pod {
    /// Whether its gauges are all 0.
    rests: bool,
    looked_ns: u64,
    /// No look before.
    next_ns: u64,
    /// The difference that the last looks have found, and how many did.
    suspects: [(i64, u32); GAUGES],
    uncounted: BTreeSet<u64>,
    /// How many of those stood there at the look before as well.
    stay_uncounted: usize,
}

impl Audit {
    /// Takes in which pods there are, each with its gauges.
    pub(crate) fn follow(&mut self, now_ns: u64, pods: &BTreeMap<String, Levels>) {
        self.pods.retain(|uid, _| pods.contains_key(uid));
        for (uid, levels) in pods {
            let rests = *levels == Levels::default();
            let fresh =
                || Pod { looked_ns: now_ns, next_ns: now_ns + nanos(EVERY), ..Pod::default() };
            self.pods.entry(uid.clone()).or_insert_with(fresh).rests = rests;
        }
    }

    /// The pods to look into now. Say by [`looked`](Self::looked) what was found in each, before asking again.
    pub(crate) fn due(&self, now_ns: u64) -> Vec<String> {
        let due = self.pods.iter().filter(|(_, pod)| pod.is_due(now_ns));
        due.map(|(uid, _)| uid.clone()).collect()
    }

    /// Takes in a look, or that none could be made.
    pub(crate) fn looked(&mut self, now_ns: u64, uid: &str, look: Option<&Look>) -> Verdict {
        let Some(pod) = self.pods.get_mut(uid) else { return Verdict::default() };
        pod.looked_ns = now_ns;
        pod.next_ns = now_ns + nanos(EVERY);
        let Some(look) = look else {
            pod.suspects = Default::default();
            return Verdict::default();
        };
        pod.stay_uncounted = look.uncounted.intersection(&pod.uncounted).count();
        pod.uncounted.clone_from(&look.uncounted);
        let differences = look.differences();
        let mut verdict =
            Verdict { stood: differences.iter().all(Option::is_some), ..Verdict::default() };
        for (at, difference) in differences.into_iter().enumerate() {
            verdict.add[at] = judge(&mut pod.suspects[at], difference.unwrap_or_default());
        }
        let again = pod.suspects.iter().any(|(_, times)| *times > 0);
        let rest = if again { AGAIN } else { EVERY };
        pod.next_ns = now_ns + nanos(rest.max(look.took.saturating_mul(PARTS)));
        verdict
    }

    /// Connections to serving ports that counted nowhere at the newest look nor at the one before: those of a listener that
    /// was made outside the pods' cgroups, or before the pod was known. A probe is gone by then.
    pub(crate) fn uncounted(&self) -> usize {
        self.pods.values().map(|pod| pod.stay_uncounted).sum()
    }
}

impl Pod {
    fn is_due(&self, now_ns: u64) -> bool {
        let suspicious = self.suspects.iter().any(|(_, times)| *times > 0);
        let rest = if self.rests && !suspicious { EVERY_AT_REST } else { Duration::ZERO };
        self.next_ns.max(self.looked_ns + nanos(rest)) <= now_ns
    }
}

/// Notes a difference, 0 where there is none or where nothing can be said. Returns what is to be added.
fn judge((suspect, times): &mut (i64, u32), difference: i64) -> i64 {
    match difference {
        0 => *times = 0,
        same if same == *suspect => *times += 1,
        other => (*suspect, *times) = (other, 1),
    }
    if *times < TIMES {
        return 0;
    }
    *times = 0;
    difference
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
