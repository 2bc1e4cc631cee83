//! Pure: choice of the stale connections to close, so that their clients connect again.
//!
//! Routing happens at connect, so a client that keeps a connection keeps its pod. When new connections no longer choose
//! an address (rollout, split, limit, sleep, drain), its idle connections are closed on the client's side. So the
//! client's pool notices before it uses them again. Busy connections are left alone. The client's side cannot tell a
//! response that pauses from one that has ended, so the pod is asked (`kept/ask`).

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
/// Idle time if the pod is about to stop, or the address has drained for a while. A client that pauses only for moments
/// between long requests must move too. It counts only if the pod reports no message under way.
const IDLE_SHORT: Duration = Duration::from_millis(20);
/// Precision of these times in the kernel: one tick at 100 ticks a second.
const TICK: Duration = Duration::from_millis(10);
/// Time over which closes are spread while the pod lives on.
const SPREAD: Duration = Duration::from_secs(5);
/// Time over which closes are spread if the pod is about to stop: the pod waits for idle connections no longer than
/// [`STAYS`].
const SPREAD_STOPPING: Duration = Duration::from_millis(500);
/// Time for which a persistent connection delays the end of a drained pod.
pub(crate) const STAYS: Duration = Duration::from_secs(2);
/// Time for which a draining address is watched; longer while it has a pod.
const WATCHED: Duration = Duration::from_secs(15);
/// Period of the scan of all clients.
const ROUND: Duration = Duration::from_millis(250);
/// Period of the scan of all clients if every draining address is late and its pod lives on. Only connections that were
/// always in use are left there.
const ROUND_LATE: Duration = Duration::from_secs(10);
/// Period of the scan of known connections. The pause between two requests may be short. A scan that misses the pause
/// of a client with long requests waits for the whole next one.
pub(crate) const ROUND_KNOWN: Duration = Duration::from_millis(10);
/// Bound on the cost of each kind of scan: one part in this number of a processor's time.
const PARTS: u32 = 10;

/// Stale connections, by the draining addresses that they go to.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    leaving: BTreeMap<SocketAddr, Leaving>,
    /// Time of the next scan of all clients; `None`: now.
    next_all: Option<Instant>,
    /// Time of the next scan of the known connections.
    next_known: Option<Instant>,
}

/// Scope of one round of scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// All clients of the node.
    All,
    /// The connections to draining addresses that the last round found.
    Known,
}

/// Result and cost of the newest scans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    /// Number of connections to draining addresses.
    pub(crate) known: usize,
    /// Processor time of a scan of all clients.
    pub(crate) took_all: Duration,
    /// Processor time of a scan of the known connections.
    pub(crate) took_known: Duration,
}

/// State of a draining address: new connections no longer choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaving {
    since: Instant,
    /// Routing phase of the pod there; `None`: the table names no pod.
    phase: Option<PodPhase>,
}

impl Leaving {
    /// Returns true if the pod lives on. Otherwise the pod is about to stop, or is gone.
    fn stays(self) -> bool {
        self.phase == Some(PodPhase::Ready)
    }

    fn spread(self) -> Duration {
        if self.stays() { SPREAD } else { SPREAD_STOPPING }
    }

    /// Returns the idle time that counts now. A connection that is not idle for long while the others move may never
    /// be: its requests would keep an unwanted pod.
    fn idle(self, now: Instant) -> Duration {
        let patient = self.stays() && now.duration_since(self.since) <= SPREAD;
        if patient { IDLE } else { IDLE_SHORT }
    }

    fn is_late(self, now: Instant) -> bool {
        now.duration_since(self.since) >= WATCHED
    }
}

impl Kept {
    /// Adds a draining address. Its pod lives on if it is ready, or else is about to stop.
    pub(crate) fn leave(&mut self, now: Instant, at: SocketAddr, phase: Option<PodPhase>) {
        self.leaving.insert(at, Leaving { since: now, phase });
        self.next_all = None;
    }

    /// Removes an address that new connections choose again.
    pub(crate) fn come_back(&mut self, at: SocketAddr) {
        self.leaving.remove(&at);
    }

    /// Updates the phases of the pods at the draining addresses: one that lived on may be about to stop. Forgets
    /// addresses without a pod.
    pub(crate) fn follow(
        &mut self,
        now: Instant,
        phase_at: impl Fn(SocketAddr) -> Option<PodPhase>,
    ) {
        self.leaving.retain(|&at, leaving| {
            let phase = phase_at(at);
            // The wait begins again: a pod that is about to stop has a shorter spread, counted from now.
            if leaving.stays() && phase == Some(PodPhase::Draining) {
                leaving.since = now;
                self.next_all = None;
            }
            leaving.phase = phase;
            phase.is_some() || !leaving.is_late(now)
        });
    }

    /// Returns true if an address has begun to drain lately, or its pod waits to stop.
    pub(crate) fn is_urgent(&self, now: Instant) -> bool {
        self.leaving.values().any(|it| !it.stays() || !it.is_late(now))
    }

    /// Returns the scope of the scan that is due, if any. The processor time of the last scans bounds their rate.
    pub(crate) fn round(&mut self, now: Instant, looked: Looked) -> Option<Round> {
        let due = |at: Option<Instant>| at.is_none_or(|at| at <= now);
        // At least ten times the scan's own cost lies between two scans, whatever the period.
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

    /// Returns the draining addresses; there are none most of the time.
    pub(crate) fn leaving(&self) -> &BTreeMap<SocketAddr, Leaving> {
        &self.leaving
    }
}

/// Returns true if a client's connection is due to be closed.
///
/// Each has its own moment within the spread, by its local port, so that a client does not reopen all of them at once.
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

/// Returns true if a connection that is due may be closed. `said` is the pod's report of its use, if the pod gave one.
///
/// A pod that is too busy to answer, or out of the agent's reach, may be in the middle of a response that pauses.
/// Without a report such a connection stays open while the pod exists.
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

/// Returns true if a client's connection has had its response and then been idle for `long`, or has never had a
/// request.
///
/// A request that is still in flight may be older than that. Then the client sent last. If the previous response came
/// within the same tick, the acknowledgement of the request shows it, as it came later than any response.
fn is_idle(seen: Seen, long: Duration) -> bool {
    // A new connection is about to carry its first request.
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

    /// Returns the times of a connection whose response came `ago`, right after its request.
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
