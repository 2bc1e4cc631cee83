//! Pure: which kept connections must be ended so that their owners connect anew.
//!
//! Routing happens at connect, so a client that keeps a connection keeps its pod. When an address leaves the set
//! that new connections are led to (rollout, split, limit, sleep, drain), connections to it that lie idle are
//! ended on the client's side, so that its pool notices before it uses them again. Busy ones are left alone. The client's
//! side alone cannot tell a response that pauses from one that has ended: the pod is asked (`kept/ask`).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::{abi::InUse, wire::PodPhase};

use crate::sockdiag::{Connection, Seen};

pub(crate) mod ask;
pub(crate) mod end;
pub mod locked;

/// Shortest time without a byte after which a connection counts as idle (design: kept connections).
const IDLE: Duration = Duration::from_secs(1);
/// The same when the pod is about to stop, or has been left for a while: also who rests only for moments between long
/// requests is to go elsewhere. Only where the pod says that no message is under way.
const IDLE_SHORT: Duration = Duration::from_millis(20);
/// How exactly the kernel knows these times: one tick where there are 100 a second.
const TICK: Duration = Duration::from_millis(10);
/// Over which time ends are spread while the pod lives on.
const SPREAD: Duration = Duration::from_secs(5);
/// The same when the pod is about to stop: it waits no longer for idle connections than [`STAYS`].
const SPREAD_STOPPING: Duration = Duration::from_millis(500);
/// How long a kept connection holds up a drained pod.
pub(crate) const STAYS: Duration = Duration::from_secs(2);
/// How long an address is watched after it left; while it has a pod, also longer.
const WATCHED: Duration = Duration::from_secs(15);
/// How often all clients are looked at.
const ROUND: Duration = Duration::from_millis(250);
/// The same when all that is left has long been so and lives on: only what was in use all the time is kept there.
const ROUND_LATE: Duration = Duration::from_secs(10);
/// How often the connections that were found there are looked at: the rest between two requests may be short, and who misses
/// that of a client whose requests take long waits for the whole next one.
pub(crate) const ROUND_KNOWN: Duration = Duration::from_millis(10);
/// Either look takes at most one part in so many of a processor's time.
const PARTS: u32 = 10;

/// Addresses that new connections were led to until lately.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    leaving: BTreeMap<SocketAddr, Leaving>,
    /// When to look at all clients again; `None`: now.
    next_all: Option<Instant>,
    /// When to look at the known connections.
    next_known: Option<Instant>,
}

/// What to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// All clients of the node.
    All,
    /// The connections to what is left that were found last.
    Known,
}

/// What the newest looks found and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    /// How many connections to what is left there were.
    pub(crate) known: usize,
    /// Processor time that a look at all clients took.
    pub(crate) took_all: Duration,
    /// The same of a look at the known connections.
    pub(crate) took_known: Duration,
}

/// An address that new connections are not led to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaving {
    since: Instant,
    /// Of the pod there; `None`: the table names none.
    phase: Option<PodPhase>,
}

impl Leaving {
    /// Whether the pod lives on. Otherwise it is about to stop, or is gone.
    fn stays(self) -> bool {
        self.phase == Some(PodPhase::Ready)
    }

    fn spread(self) -> Duration {
        if self.stays() { SPREAD } else { SPREAD_STOPPING }
    }

    /// Who is not idle for long while the others move may never be: requests would keep a pod that is not wanted any more.
    fn idle(self, now: Instant) -> Duration {
        let patient = self.stays() && now.duration_since(self.since) <= SPREAD;
        if patient { IDLE } else { IDLE_SHORT }
    }

    fn is_late(self, now: Instant) -> bool {
        now.duration_since(self.since) >= WATCHED
    }
}

impl Kept {
    /// New connections are not led to this address any more, whose pod stays if it is ready, or else is about to stop.
    pub(crate) fn leave(&mut self, now: Instant, at: SocketAddr, phase: Option<PodPhase>) {
        self.leaving.insert(at, Leaving { since: now, phase });
        self.next_all = None;
    }

    /// They are led there again.
    pub(crate) fn come_back(&mut self, at: SocketAddr) {
        self.leaving.remove(&at);
    }

    /// Takes in what has become of the pods there: one that stayed may be about to stop. Forgets those that are gone.
    pub(crate) fn follow(
        &mut self,
        now: Instant,
        phase_at: impl Fn(SocketAddr) -> Option<PodPhase>,
    ) {
        self.leaving.retain(|&at, leaving| {
            let phase = phase_at(at);
            if leaving.stays() && phase == Some(PodPhase::Draining) {
                leaving.since = now;
                self.next_all = None;
            }
            leaving.phase = phase;
            phase.is_some() || !leaving.is_late(now)
        });
    }

    /// Whether anything has just left, or waits to stop.
    pub(crate) fn is_urgent(&self, now: Instant) -> bool {
        self.leaving.values().any(|it| !it.stays() || !it.is_late(now))
    }

    /// What to look at now, if anything, by what was found before and the processor time that it took.
    pub(crate) fn round(&mut self, now: Instant, looked: Looked) -> Option<Round> {
        let due = |at: Option<Instant>| at.is_none_or(|at| at <= now);
        let after = |least, took: Duration| Some(now + took.saturating_mul(PARTS).max(least));
        if self.leaving.is_empty() {
            return None;
        }
        if due(self.next_all) {
            let least = if self.is_urgent(now) { ROUND } else { ROUND_LATE };
            self.next_all = after(least, looked.took_all);
            return Some(Round::All);
        }
        if looked.known == 0 || !due(self.next_known) {
            return None;
        }
        self.next_known = after(ROUND_KNOWN, looked.took_known);
        Some(Round::Known)
    }

    /// What is being left; empty most of the time.
    pub(crate) fn leaving(&self) -> &BTreeMap<SocketAddr, Leaving> {
        &self.leaving
    }
}

/// Whether a client's connection is to be ended now.
///
/// Each has its own moment within the spread, by its local port, so that a client does not open all of them anew
/// at once.
pub(crate) fn is_due(
    now: Instant,
    leaving: &BTreeMap<SocketAddr, Leaving>,
    connection: &Connection,
) -> bool {
    let Some(leaving) = leaving.get(&connection.plain_peer()) else { return false };
    // Knuth's multiplicative constant scatters neighbouring ports.
    let scattered = u32::from(connection.local.port()).wrapping_mul(0x9E37_79B1) >> 16;
    let moment = leaving.spread() * scattered / (1 << 16);
    is_idle(connection.seen, leaving.idle(now)) && now.duration_since(leaving.since) >= moment
}

/// Whether a connection that is due may be ended, by what its pod says of it, if anything.
///
/// A pod that is too busy to answer in time, or out of the agent's reach, may be in the middle of an answer that pauses:
/// its silence says nothing while there is such a pod.
pub(crate) fn may_end(
    leaving: &BTreeMap<SocketAddr, Leaving>,
    connection: &Connection,
    said: Option<InUse>,
) -> bool {
    let is_gone = || leaving.get(&connection.plain_peer()).is_some_and(|it| it.phase.is_none());
    match said {
        Some(InUse::Yes) => false,
        Some(InUse::No) => true,
        Some(InUse::NoRequest) => is_idle(connection.seen, IDLE),
        None => is_gone() && is_idle(connection.seen, IDLE),
    }
}

/// Whether a client's connection has had its answer, and then lain still for `long`; or never had a request.
///
/// A request that is still in flight may be older than that. The client then spoke last; where the answer before came
/// within the same tick, the acknowledgement of the request tells, which came later than any answer.
fn is_idle(seen: Seen, long: Duration) -> bool {
    // One that has just come about is about to bring its first request.
    let Some(received) = seen.received else { return !seen.spoke && seen.sent >= IDLE };
    let asked_since = seen.sent < received || seen.acknowledged + TICK < received;
    received >= long && !asked_since
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn leaving(kept: &Kept) -> Vec<(SocketAddr, Duration)> {
        kept.leaving().iter().map(|(&at, leaving)| (at, leaving.spread())).collect()
    }

    #[test]
    fn an_address_is_watched_until_it_is_back_or_its_pod_long_gone() {
        let (now, ready) = (Instant::now(), Some(PodPhase::Ready));
        let mut kept = Kept::default();
        kept.leave(now, at("10.0.0.1:80"), ready);
        kept.leave(now, at("10.0.0.2:80"), Some(PodPhase::Draining));
        kept.leave(now, at("10.0.0.3:80"), None);
        let want = [
            (at("10.0.0.1:80"), SPREAD),
            (at("10.0.0.2:80"), SPREAD_STOPPING),
            (at("10.0.0.3:80"), SPREAD_STOPPING),
        ];
        assert_eq!(leaving(&kept), want);
        kept.come_back(at("10.0.0.1:80"));
        kept.follow(now + WATCHED / 2, |_| None);
        assert_eq!(leaving(&kept), want[1..]);
        let one_is_left = |it| (it == at("10.0.0.2:80")).then_some(PodPhase::Draining);
        kept.follow(now + WATCHED, one_is_left);
        assert_eq!(leaving(&kept), want[1..2], "its last response may take a while");
        kept.follow(now + WATCHED, |_| None);
        assert_eq!(leaving(&kept), []);
    }

    #[test]
    fn all_clients_are_looked_at_often_while_it_matters_and_known_connections_more_often() {
        let (now, one) = (Instant::now(), at("10.0.0.1:80"));
        let mut kept = Kept::default();
        let (none, some) = (Looked::default(), Looked { known: 1, ..Looked::default() });
        assert_eq!(kept.round(now, some), None, "nothing is left");
        kept.leave(now, one, Some(PodPhase::Ready));
        assert_eq!(kept.round(now, none), Some(Round::All));
        assert_eq!(kept.round(now, none), None, "none is known");
        assert_eq!(kept.round(now, some), Some(Round::Known), "however new that look is");
        assert_eq!(kept.round(now, some), None, "just now");
        assert_eq!(kept.round(now + ROUND_KNOWN, some), Some(Round::Known));
        assert_eq!(kept.round(now + ROUND, some), Some(Round::All));
        kept.follow(now + WATCHED, |_| Some(PodPhase::Draining));
        assert_eq!(leaving(&kept), [(one, SPREAD_STOPPING)]);
        assert_eq!(kept.round(now + ROUND, none), Some(Round::All), "it stops after all");
    }

    #[test]
    fn looks_that_take_long_are_rare_and_do_not_hold_up_the_others() {
        let now = Instant::now();
        let mut kept = Kept::default();
        kept.leave(now, at("10.0.0.1:80"), Some(PodPhase::Draining));
        let (took_all, took_known) = (ROUND, ROUND_KNOWN);
        let looked = Looked { known: 1, took_all, took_known };
        let mut rounds = |after| kept.round(now + after, looked);
        assert_eq!(rounds(Duration::ZERO), Some(Round::All));
        assert_eq!(rounds(Duration::ZERO), Some(Round::Known));
        assert_eq!(rounds(ROUND_KNOWN * (PARTS - 1)), None);
        assert_eq!(rounds(ROUND_KNOWN * PARTS), Some(Round::Known));
        assert_eq!(rounds(ROUND * (PARTS - 1)), Some(Round::Known));
        assert_eq!(rounds(ROUND * PARTS), Some(Round::All));
    }

    #[test]
    fn only_idle_connections_to_what_leaves_are_ended_each_at_its_moment() {
        let now = Instant::now();
        let left = Leaving { since: now, phase: Some(PodPhase::Ready) };
        let leaving = BTreeMap::from([(at("10.0.0.1:80"), left)]);
        let connection = |port: u16, peer: &str, idle| {
            let local = SocketAddr::new([10, 0, 0, 9].into(), port);
            Connection::listed(local, at(peer), answered(idle))
        };
        let due = |after: Duration, peer: &str, idle| {
            let ports = 1..=1_000u16;
            ports
                .filter(|&port| is_due(now + after, &leaving, &connection(port, peer, idle)))
                .count()
        };
        assert_eq!(due(SPREAD, "10.0.0.1:80", IDLE), 1_000);
        assert_eq!(due(SPREAD, "[::ffff:10.0.0.1]:80", IDLE), 1_000);
        assert!((400..600).contains(&due(SPREAD / 2, "10.0.0.1:80", IDLE)));
        assert_eq!(due(SPREAD, "10.0.0.1:80", IDLE / 2), 0, "busy");
        assert_eq!(due(SPREAD, "10.0.0.1:81", IDLE), 0, "another pod");
        assert_eq!(due(SPREAD * 2, "10.0.0.1:80", IDLE_SHORT), 1_000, "busy all the time");
    }

    /// A connection whose answer came so long ago, right after its request.
    fn answered(ago: Duration) -> Seen {
        Seen { sent: ago, spoke: true, received: Some(ago), acknowledged: ago, ..Seen::default() }
    }

    #[test]
    fn a_connection_is_ended_by_the_pods_word_and_without_it_only_where_no_pod_is() {
        let now = Instant::now();
        let (short, long) = (answered(IDLE_SHORT), answered(IDLE));
        let may = |phase, seen, said| {
            let leaving = BTreeMap::from([(at("10.0.0.1:80"), Leaving { since: now, phase })]);
            may_end(&leaving, &Connection::listed(at("10.0.0.9:1"), at("10.0.0.1:80"), seen), said)
        };
        for phase in [Some(PodPhase::Ready), Some(PodPhase::Draining), None] {
            for seen in [short, long] {
                assert!(may(phase, seen, Some(InUse::No)) && !may(phase, seen, Some(InUse::Yes)));
            }
            let frame = Some(InUse::NoRequest);
            assert!(may(phase, long, frame) && !may(phase, short, frame));
            assert!(!may(phase, short, None));
            assert_eq!(may(phase, long, None), phase.is_none(), "a pod that does not answer");
        }
    }

    #[test]
    fn a_connection_with_a_request_in_flight_is_not_idle_however_long_it_takes() {
        let ms = Duration::from_millis;
        assert!(is_idle(answered(IDLE), IDLE));
        let slow = Seen { sent: IDLE * 31, ..answered(IDLE) };
        assert!(is_idle(slow, IDLE), "answered after 30 s, a second ago");
        let first = Seen { received: None, ..answered(IDLE * 30) };
        assert!(!is_idle(first, IDLE), "its first request has no answer yet");
        let unused = |ago| Seen { spoke: false, received: None, ..answered(ago) };
        assert!(is_idle(unused(IDLE), IDLE_SHORT), "nobody needed it");
        assert!(!is_idle(unused(IDLE_SHORT), IDLE_SHORT), "it may have been opened for a request");
        let next = Seen { sent: IDLE * 2, acknowledged: IDLE * 2, ..answered(IDLE * 3) };
        assert!(!is_idle(next, IDLE), "the next one neither");
        let same_tick = Seen { acknowledged: IDLE * 3 - ms(40), ..answered(IDLE * 3) };
        assert!(!is_idle(same_tick, IDLE), "it was sent as soon as the answer before had come");
    }
}
