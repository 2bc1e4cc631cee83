//! Pure: times of the rounds over the authorities of names inside the cluster, and the changes of their result.

use std::time::Duration;

/// Interval between two rounds while there is no authority: a replica that follows waits for the leader.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two rounds once there is an authority, and longest one while rounds fail.
const INTERVAL: Duration = Duration::from_secs(30);

/// Number of rounds that fail in succession before their error lasts. Without an authority that takes 3.5 s, in which a
/// conflict of two writers or the restart of an API server is over.
const LASTING_FAILURES: u32 = 4;

/// Results of the rounds so far.
#[derive(Clone, Debug, Default)]
pub struct RefreshRounds {
    /// Error of the last round.
    error: Option<String>,
    /// Number of rounds that have failed in succession.
    failures: u32,
}

/// Change of the result from one round to the next, which is logged once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefreshChange {
    /// The result is that of the round before.
    Same,
    /// The round has failed, with another error than the round before if that failed, too.
    Failed,
    /// The round before has failed, and this one has not.
    Recovered,
}

impl RefreshRounds {
    /// Records the result of a round: its error, or `None`.
    pub fn record(&mut self, error: Option<String>) -> RefreshChange {
        self.failures = if error.is_some() { self.failures.saturating_add(1) } else { 0 };
        if self.error == error {
            return RefreshChange::Same;
        }
        self.error = error;
        if self.error.is_some() { RefreshChange::Failed } else { RefreshChange::Recovered }
    }

    /// Returns the error of the last round, if so many rounds have failed in succession that it lasts.
    pub fn lasting_error(&self) -> Option<&str> {
        self.error.as_deref().filter(|_| self.failures >= LASTING_FAILURES)
    }

    /// Returns the time until the next round. Without an authority it doubles with each failure: a missing permission
    /// stays until an operator grants it.
    pub fn wait(&self, has_authority: bool) -> Duration {
        if has_authority {
            return INTERVAL;
        }
        // Six doublings reach the longest interval.
        let doublings = self.failures.saturating_sub(1).min(6);
        FIRST_INTERVAL.saturating_mul(1 << doublings).min(INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        RefreshChange::{Failed, Recovered, Same},
        *,
    };

    #[test]
    fn rounds_that_fail_without_an_authority_become_rare() {
        let mut rounds = RefreshRounds::default();
        let mut waits_ms = Vec::new();
        for _ in 0..9 {
            rounds.record(Some("forbidden".to_owned()));
            waits_ms.push(rounds.wait(false).as_millis());
        }
        assert_eq!(waits_ms, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]);
        assert_eq!(rounds.wait(true), INTERVAL);
        // The leader has not made the authority yet, which it does at once.
        rounds.record(None);
        assert_eq!(rounds.wait(false), FIRST_INTERVAL);
    }

    #[test]
    fn an_error_lasts_once_four_rounds_have_failed_in_succession() {
        let mut rounds = RefreshRounds::default();
        let (conflict, forbidden) = (Some("conflict"), Some("forbidden"));
        let results =
            [conflict, conflict, conflict, None, conflict, conflict, conflict, forbidden, None];
        let lasting = results.map(|error| {
            rounds.record(error.map(str::to_owned));
            rounds.lasting_error().map(str::to_owned)
        });
        // The last error counts, whatever those before it were.
        let mut expected = vec![None; 9];
        expected[7] = Some("forbidden".to_owned());
        assert_eq!(lasting.to_vec(), expected);
    }

    #[test]
    fn each_error_and_its_end_are_reported_once() {
        let mut rounds = RefreshRounds::default();
        let results = [None, Some("a"), Some("a"), Some("b"), None, None, Some("b")];
        let changes = results.map(|error| rounds.record(error.map(str::to_owned)));
        assert_eq!(changes, [Same, Failed, Same, Failed, Recovered, Same, Failed]);
    }
}
