//! Pure: closes of connections that their pod has reported as idle: the moment of each one, and its further attempts.
//!
//! A report comes from the pod's node before the client has read the response. So the first attempt may be early. Each
//! attempt walks over the sockets of the client's namespace, and the cost of the last walk bounds their rate.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::pod_query::ClientPodAddresses;
use crate::kernel::locked_close::{IdlePosition, PositionOutcome};

/// Pause before the second attempt. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Most attempts of one close, over a quarter of a second. A scan finds a client that has not read its response by then.
const ATTEMPTS_MAX: u32 = 9;
/// Bound on the cost of all attempts: one part in this number of a processor's time.
const CPU_BUDGET_DIVISOR: u32 = 4;

/// Closes to attempt, by connection.
#[derive(Debug, Default)]
pub(super) struct IdleCloses {
    planned: BTreeMap<ClientPodAddresses, PlannedClose>,
    /// Time before which no attempt is made; `None`: no walk has been made.
    next_walk: Option<Instant>,
}

#[derive(Debug)]
struct PlannedClose {
    position: IdlePosition,
    /// Time of the next attempt.
    at: Instant,
    /// Attempts so far.
    attempts: u32,
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
        let first = self.planned.values().map(|close| close.at).min()?;
        Some(self.next_walk.map_or(first, |walk| walk.max(first)))
    }

    /// Returns the closes that are due.
    pub(super) fn due(&self, now: Instant) -> BTreeMap<ClientPodAddresses, IdlePosition> {
        let due = self.planned.iter().filter(|(_, close)| close.at <= now);
        due.map(|(connection, close)| (*connection, close.position)).collect()
    }

    /// Records the outcomes of the closes that were due. A connection without an outcome was not found. The walks took
    /// `took` and have ended `now`.
    pub(super) fn record(
        &mut self,
        now: Instant,
        took: Duration,
        tried: &BTreeMap<ClientPodAddresses, IdlePosition>,
        outcomes: &BTreeMap<ClientPodAddresses, PositionOutcome>,
    ) {
        self.next_walk = Some(now + took.saturating_mul(CPU_BUDGET_DIVISOR - 1));
        self.planned.retain(|connection, close| {
            if tried.get(connection) != Some(&close.position) {
                return true;
            }
            let pause = FIRST_PAUSE * 2_u32.pow(close.attempts);
            close.attempts += 1;
            close.at = now + pause;
            let may_succeed = match outcomes.get(connection) {
                Some(PositionOutcome::NotReached | PositionOutcome::Failed) => true,
                Some(PositionOutcome::Closed | PositionOutcome::Passed) | None => false,
            };
            may_succeed && close.attempts < ATTEMPTS_MAX
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(port: u16) -> ClientPodAddresses {
        (([10, 0, 0, 9], port).into(), ([10, 0, 0, 1], 80).into())
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
        let tried = closes.due(now);
        let outcomes = tried.keys().filter_map(|it| Some((*it, outcome?))).collect();
        closes.record(now, Duration::ZERO, &tried, &outcomes);
        tried.keys().map(|(client, _)| client.port()).collect()
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
        assert_eq!(closes.due(now), [(connection(1), position(2))].into());
        // The outcome of a walk that has begun before is one of the old position.
        let old = [(connection(1), position(1))].into();
        let passed = [(connection(1), PositionOutcome::Passed)].into();
        closes.record(now, Duration::ZERO, &old, &passed);
        assert_eq!(closes.due(now), [(connection(1), position(2))].into());
    }

    #[test]
    fn the_cost_of_a_walk_delays_the_next_one() {
        let (now, took) = (Instant::now(), Duration::from_millis(30));
        let mut closes = IdleCloses::default();
        closes.record(now, took, &BTreeMap::new(), &BTreeMap::new());
        closes.add(now, connection(1), position(1));
        assert_eq!(closes.next_wake(), Some(now + took * (CPU_BUDGET_DIVISOR - 1)));
    }
}
