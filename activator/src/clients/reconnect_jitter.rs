//! Pure: order in which client connections are asked to reconnect.

use std::time::Duration;

/// Average time between two connections that are asked to reconnect: a pod's accept queue holds about a hundred.
const RECONNECT_SPACING: Duration = Duration::from_micros(200);
/// Time within which all connections are asked to reconnect, however many there are.
const RECONNECT_MAX_SPREAD: Duration = Duration::from_secs(2);

/// Position of a connection among those that are asked to reconnect, drawn at random when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconnectJitter(u16);

impl ReconnectJitter {
    /// Draws a position. `random` is uniform over u64.
    pub fn from_random(random: u64) -> Self {
        Self((random >> 48) as u16)
    }

    /// Returns true if the connection is asked to reconnect now. `elapsed` is the time for which all of
    /// `connections` have had the direct path to use.
    ///
    /// A single connection is asked at once. Many are asked one after the other, so that pods do not get all of them at
    /// the same time. Example: of 1,001 connections, half are asked within 100 ms and all within 200 ms.
    pub fn should_close(self, elapsed: Duration, connections: u32) -> bool {
        let spread = (RECONNECT_SPACING * connections.saturating_sub(1)).min(RECONNECT_MAX_SPREAD);
        elapsed >= spread * u32::from(self.0) / (1 << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_may_use_the_direct_path_close_one_after_the_other() {
        let jitters: Vec<ReconnectJitter> =
            (0..1_000).map(|at: u64| ReconnectJitter::from_random(at << 54)).collect();
        let gone = |ms, connections| {
            let elapsed = Duration::from_millis(ms);
            jitters.iter().filter(|jitter| jitter.should_close(elapsed, connections)).count()
        };
        assert_eq!(gone(0, 1), 1_000, "a single one need not wait");
        assert!((400..600).contains(&gone(100, 1_001)));
        assert_eq!((gone(200, 1_001), gone(2_000, u32::MAX)), (1_000, 1_000));
        assert!(gone(1_000, u32::MAX) < 600);
    }
}
