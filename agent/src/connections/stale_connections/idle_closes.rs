//! Pure: closes of connections that their pod has reported as idle: the moment of each one, and its further attempts.
//!
//! A report comes from the pod's node before the client has read the response. So the first attempt may be early. Each
//! attempt walks over the sockets of the client's namespace, and the cost of the last walk bounds their rate. Of several
//! closes that are due, those that have waited longest have their turn first (`stale_connections/close_pacing`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use super::{
    close_pacing::{ClosePacing, busy_pause},
    pod_query::ClientPodAddresses,
};
use crate::kernel::locked_close::{IdlePosition, PositionOutcome};

/// Pause before the second attempt. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Most attempts of one close, over a quarter of a second. A scan finds a client that has not read its response by then.
const ATTEMPTS_MAX: u32 = 9;
/// Bound on the cost of all attempts: one part in this number of a processor's time.
const CPU_BUDGET_DIVISOR: u32 = 4;
/// Shortest pause between two walks. Closes that were due but not attempted may have their turn at once.
const WALK_PAUSE: Duration = Duration::from_millis(1);

/// Closes to attempt, by connection.
#[derive(Debug, Default)]
pub(super) struct IdleCloses {
    planned: BTreeMap<ClientPodAddresses, PlannedClose>,
    /// Time before which no attempt is made; `None`: no walk has been made.
    next_walk: Option<Instant>,
    /// Times before which no connection of a client is closed.
    next_moments: BTreeMap<IpAddr, Instant>,
}

#[derive(Debug)]
struct PlannedClose {
    position: IdlePosition,
    /// Time of the next attempt.
    at: Instant,
    /// Attempts so far.
    attempts: u32,
}

/// Attempts at closes that were due, as many of each client as its pace allows.
#[derive(Debug, Default)]
pub(super) struct CloseAttempts {
    /// Connections of which a close was attempted, with their positions.
    pub(super) tried: BTreeMap<ClientPodAddresses, IdlePosition>,
    /// Outcome of each of them that was found.
    pub(super) outcomes: BTreeMap<ClientPodAddresses, PositionOutcome>,
    /// Clients of all closes that were due.
    clients: BTreeSet<IpAddr>,
    /// Times before which no further connection of these clients is closed. The closes that were not attempted wait for
    /// them.
    next_moments: BTreeMap<IpAddr, Instant>,
}

impl CloseAttempts {
    /// Selects the closes to attempt, of each client the first ones. There are no outcomes yet.
    ///
    /// If the connections `are_busy`, all closes of a client have their turn at its moment. Most of these attempts fail,
    /// and a pause that is missed may be the last one before the pod ends with a request in flight.
    pub(super) fn select(
        pacing: &ClosePacing,
        now: Instant,
        due: Vec<(ClientPodAddresses, IdlePosition)>,
        are_busy: bool,
    ) -> Self {
        let client_of = |((client, _), _): &(ClientPodAddresses, IdlePosition)| client.ip();
        let clients = due.iter().map(client_of).collect();
        let selected = match are_busy {
            true => pacing.select_all(now, due, client_of),
            false => pacing.select(now, due, client_of),
        };
        let tried = selected.into_iter().collect();
        Self { tried, clients, ..Self::default() }
    }

    /// Records the closes that have succeeded, and takes over the next moments of the clients. `busy` has the numbers of
    /// known connections of clients that are never idle for long; others have the usual pause.
    pub(super) fn record_closed(
        &mut self,
        pacing: &mut ClosePacing,
        now: Instant,
        busy: &BTreeMap<IpAddr, usize>,
    ) {
        let mut closed = BTreeMap::<IpAddr, usize>::new();
        for ((client, _), outcome) in &self.outcomes {
            if *outcome == PositionOutcome::Closed {
                *closed.entry(client.ip()).or_default() += 1;
            }
        }
        let known = |client: &IpAddr| busy.get(client).copied().unwrap_or_default();
        let pauses = closed.iter().map(|(client, &it)| (*client, busy_pause(it, known(client))));
        pacing.record_pauses(now, pauses);
        let moments = self.clients.iter().map(|client| (*client, pacing.next_moment(*client)));
        self.next_moments =
            moments.filter_map(|(client, moment)| Some((client, moment?))).collect();
    }
}

impl IdleCloses {
    /// Plans the close of a connection at a position, from the time `at` on. It replaces that at an earlier position,
    /// which the connection has left.
    pub(super) fn add(
        &mut self,
        at: Instant,
        connection: ClientPodAddresses,
        position: IdlePosition,
    ) {
        self.planned.insert(connection, PlannedClose { position, at, attempts: 0 });
    }

    /// Returns the time of the next attempt; `None`: none is planned.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        let first = self.planned.iter().map(|(it, close)| self.next_attempt(it, close)).min()?;
        Some(self.next_walk.map_or(first, |walk| walk.max(first)))
    }

    /// Returns the time of the next attempt at a close, if no walk delays it.
    fn next_attempt(&self, (client, _): &ClientPodAddresses, close: &PlannedClose) -> Instant {
        self.next_moments.get(&client.ip()).map_or(close.at, |&moment| moment.max(close.at))
    }

    /// Returns the closes that are due, those first that have waited longest. A further attempt waits from its own time on,
    /// so it comes after the others that are due.
    pub(super) fn due(&self, now: Instant) -> Vec<(ClientPodAddresses, IdlePosition)> {
        let planned = self.planned.iter();
        let mut due: Vec<_> =
            planned.filter(|(it, close)| self.next_attempt(it, close) <= now).collect();
        due.sort_by_key(|(_, close)| close.at);
        due.into_iter().map(|(connection, close)| (*connection, close.position)).collect()
    }

    /// Records the attempts at closes that were due. A tried connection without an outcome was not found. The walks took
    /// `took` and have ended `now`.
    pub(super) fn record(&mut self, now: Instant, took: Duration, attempts: &CloseAttempts) {
        let pause = took.saturating_mul(CPU_BUDGET_DIVISOR - 1).max(WALK_PAUSE);
        self.next_walk = Some(now + pause);
        self.next_moments.retain(|_, moment| *moment > now);
        self.next_moments.extend(&attempts.next_moments);
        self.planned.retain(|connection, close| {
            if attempts.tried.get(connection) != Some(&close.position) {
                return true;
            }
            let pause = FIRST_PAUSE * 2_u32.pow(close.attempts);
            close.attempts += 1;
            close.at = now + pause;
            let may_succeed = match attempts.outcomes.get(connection) {
                Some(PositionOutcome::NotReached | PositionOutcome::Failed) => true,
                Some(PositionOutcome::Closed | PositionOutcome::Passed) | None => false,
            };
            may_succeed && close.attempts < ATTEMPTS_MAX
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::close_pacing::CLOSE_PAUSE, *};

    fn connection(port: u16) -> ClientPodAddresses {
        (([10, 0, 0, 9], port).into(), ([10, 0, 0, 1], 80).into())
    }

    fn client_ip() -> IpAddr {
        connection(1).0.ip()
    }

    fn position(client_seq: u32) -> IdlePosition {
        IdlePosition { client_seq, pod_seq: 0 }
    }

    /// Attempts the closes that are due, with one outcome for all. Returns their ports.
    fn attempt(
        closes: &mut IdleCloses,
        now: Instant,
        outcome: Option<PositionOutcome>,
    ) -> Vec<u16> {
        let due = closes.due(now);
        let outcomes = due.iter().filter_map(|(it, _)| Some((*it, outcome?))).collect();
        let tried = due.iter().copied().collect();
        let attempts = CloseAttempts { tried, outcomes, ..CloseAttempts::default() };
        closes.record(now, Duration::ZERO, &attempts);
        ports(&due)
    }

    /// Returns the clients' ports of these closes.
    fn ports(due: &[(ClientPodAddresses, IdlePosition)]) -> Vec<u16> {
        due.iter().map(|((client, _), _)| client.port()).collect()
    }

    #[test]
    fn each_close_is_attempted_at_its_moment_and_ends_with_its_outcome() {
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        for outcome in [Some(PositionOutcome::Closed), Some(PositionOutcome::Passed), None] {
            let mut closes = IdleCloses::default();
            assert_eq!(closes.next_wake(), None);
            closes.add(later, connection(1), position(1));
            closes.add(now, connection(2), position(1));
            assert_eq!(closes.next_wake(), Some(now));
            assert_eq!(attempt(&mut closes, now, outcome), [2]);
            assert_eq!(closes.next_wake(), Some(later));
            assert_eq!(attempt(&mut closes, later, outcome), [1]);
            assert_eq!(closes.next_wake(), None);
        }
    }

    #[test]
    fn an_early_or_failed_attempt_is_repeated_after_growing_pauses_but_not_for_ever() {
        for outcome in [PositionOutcome::NotReached, PositionOutcome::Failed] {
            let begun = Instant::now();
            let mut closes = IdleCloses::default();
            closes.add(begun, connection(1), position(1));
            let (mut now, mut pauses) = (begun, Vec::new());
            while let Some(at) = closes.next_wake() {
                pauses.push(at - now);
                now = at;
                assert_eq!(attempt(&mut closes, now, Some(outcome)), [1]);
            }
            assert_eq!(pauses.len(), ATTEMPTS_MAX as usize);
            assert_eq!(pauses[..3], [Duration::ZERO, FIRST_PAUSE, FIRST_PAUSE * 2]);
            assert!(pauses[1..].windows(2).all(|pair| pair[1] == pair[0] * 2), "{pauses:?}");
        }
    }

    #[test]
    fn a_new_position_replaces_the_one_before() {
        let now = Instant::now();
        let mut closes = IdleCloses::default();
        closes.add(now, connection(1), position(1));
        assert_eq!(attempt(&mut closes, now, Some(PositionOutcome::NotReached)), [1]);
        closes.add(now, connection(1), position(2));
        assert_eq!(closes.due(now), [(connection(1), position(2))]);
        // The outcome of a walk that has begun before is one of the old position.
        let old = CloseAttempts {
            tried: [(connection(1), position(1))].into(),
            outcomes: [(connection(1), PositionOutcome::Passed)].into(),
            ..CloseAttempts::default()
        };
        closes.record(now, Duration::ZERO, &old);
        assert_eq!(closes.due(now), [(connection(1), position(2))]);
    }

    #[test]
    fn the_cost_of_a_walk_delays_the_next_one() {
        let (now, took) = (Instant::now(), Duration::from_millis(30));
        let mut closes = IdleCloses::default();
        closes.record(now, took, &CloseAttempts::default());
        closes.add(now, connection(1), position(1));
        assert_eq!(closes.next_wake(), Some(now + took * (CPU_BUDGET_DIVISOR - 1)));
    }

    /// Attempts the closes that are due, at the pace of their client. Returns the ports of the attempts.
    fn attempt_paced(
        closes: &mut IdleCloses,
        pacing: &mut ClosePacing,
        now: Instant,
        outcome: impl Fn(u16) -> PositionOutcome,
    ) -> Vec<u16> {
        let mut attempts = CloseAttempts::select(pacing, now, closes.due(now), false);
        let tried: Vec<ClientPodAddresses> = attempts.tried.keys().copied().collect();
        attempts.outcomes = tried.iter().map(|it| (*it, outcome(it.0.port()))).collect();
        attempts.record_closed(pacing, now, &BTreeMap::new());
        closes.record(now, Duration::ZERO, &attempts);
        tried.iter().map(|(client, _)| client.port()).collect()
    }

    #[test]
    fn closes_of_a_client_that_are_due_together_are_attempted_one_after_another() {
        let begun = Instant::now();
        let (mut closes, mut pacing) = (IdleCloses::default(), ClosePacing::default());
        // The last one has waited longest.
        for port in 1..=8_u16 {
            closes.add(begun - Duration::from_millis(port.into()), connection(port), position(1));
        }
        let (mut ports, mut now) = (Vec::new(), begun);
        while let Some(wake) = closes.next_wake() {
            assert!(ports.is_empty() || wake > now, "no attempt at the same moment");
            now = now.max(wake);
            let closed = |_| PositionOutcome::Closed;
            let tried = attempt_paced(&mut closes, &mut pacing, now, closed);
            assert_eq!(tried.len(), 1, "after {ports:?}");
            assert_eq!(Some(now), pacing.next_moment(client_ip()).map(|it| it - CLOSE_PAUSE));
            ports.extend(tried);
        }
        assert_eq!(ports, [8, 7, 6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn closes_that_do_not_succeed_keep_no_other_from_its_turn_and_no_processor_busy() {
        for (failing, outcome) in [
            (3_u16, PositionOutcome::NotReached),
            (9, PositionOutcome::Failed),
            (10, PositionOutcome::Passed),
        ] {
            let mut now = Instant::now();
            let (mut closes, mut pacing) = (IdleCloses::default(), ClosePacing::default());
            (1..=20).for_each(|port| closes.add(now, connection(port), position(1)));
            let outcome_of =
                |port: u16| if port <= failing { outcome } else { PositionOutcome::Closed };
            let (mut closed, mut failed) = (BTreeSet::new(), 0);
            while let Some(wake) = closes.next_wake() {
                assert!(failed + closed.len() == 0 || wake > now, "a walk without a pause");
                now = wake;
                let tried = attempt_paced(&mut closes, &mut pacing, now, outcome_of);
                assert!(!tried.is_empty(), "a wake without an attempt");
                failed += tried.iter().filter(|port| **port <= failing).count();
                closed.extend(tried.into_iter().filter(|port| *port > failing));
            }
            assert_eq!(closed, (failing + 1..=20).collect::<BTreeSet<_>>());
            let attempts = if outcome == PositionOutcome::Passed { 1 } else { ATTEMPTS_MAX };
            assert_eq!(failed, usize::from(failing) * attempts as usize);
        }
    }

    #[test]
    fn the_next_close_of_a_large_busy_pool_comes_sooner() {
        let now = Instant::now();
        let pause_with = |busy: &BTreeMap<IpAddr, usize>| {
            let mut pacing = ClosePacing::default();
            let due = vec![(connection(1), position(1))];
            let mut attempts = CloseAttempts::select(&pacing, now, due, false);
            attempts.outcomes = [(connection(1), PositionOutcome::Closed)].into();
            attempts.record_closed(&mut pacing, now, busy);
            assert_eq!(
                attempts.next_moments.get(&client_ip()),
                pacing.next_moment(client_ip()).as_ref()
            );
            pacing.next_moment(client_ip()).expect("a close just now") - now
        };
        assert_eq!(pause_with(&BTreeMap::new()), CLOSE_PAUSE);
        assert_eq!(pause_with(&[(client_ip(), 8)].into()), CLOSE_PAUSE);
        assert_eq!(pause_with(&[(client_ip(), 400)].into()), CLOSE_PAUSE / 10);
        let other = IpAddr::from([10, 0, 0, 8]);
        assert_eq!(pause_with(&[(other, 400)].into()), CLOSE_PAUSE);
    }

    #[test]
    fn closes_wait_for_the_moment_that_another_task_has_set() {
        let now = Instant::now();
        let (mut closes, mut pacing) = (IdleCloses::default(), ClosePacing::default());
        closes.add(now, connection(1), position(1));
        pacing.record_closed(now, [client_ip()]);
        let closed = |_| PositionOutcome::Closed;
        assert!(attempt_paced(&mut closes, &mut pacing, now, closed).is_empty());
        assert_eq!(closes.next_wake(), Some(now + CLOSE_PAUSE), "it stays planned");
        assert!(closes.due(now).is_empty());
        assert_eq!(attempt_paced(&mut closes, &mut pacing, now + CLOSE_PAUSE, closed), [1]);
        assert_eq!(closes.next_wake(), None);
    }
}
