//! Pure: what this autoscaler says of itself, so that controllers know whose decisions should count.

use std::time::Duration;

use common::wire::Alive;

/// Between two heartbeats. Controllers pass over who has been silent for some three of them.
pub const BEAT: Duration = Duration::from_millis(200);
/// A pause between two heartbeats that says that the process, or its node, stood still: what came meanwhile may be lost.
const PAUSE: Duration = Duration::from_secs(1);

/// What the next heartbeat says. Times are those of a clock of this process, which no other host knows.
#[derive(Clone, Debug)]
pub struct Heart {
    /// When the process began, in ms since 1970.
    since_ms: u64,
    heard_since: Duration,
    last: Duration,
    counts: Option<String>,
}

impl Heart {
    /// One that begins to hear usage now.
    pub fn new(now: Duration, since_ms: u64) -> Self {
        Self { since_ms, heard_since: now, last: now, counts: None }
    }

    /// The RouteTable calls this autoscaler the one that counts.
    ///
    /// A controller that has just started calls none so, which changes nothing: the one that counted still stands.
    pub fn told(&mut self, counts: Option<&str>) {
        if let Some(counts) = counts {
            self.counts = Some(counts.to_owned());
        }
    }

    /// The heartbeat of this moment. `longest`: over how long a time the load of any revision matters.
    pub fn beat(&mut self, now: Duration, longest: Duration, reporters: usize) -> Alive {
        if now.saturating_sub(self.last) > PAUSE {
            // Another one may count by now.
            (self.heard_since, self.counts) = (now, None);
        }
        self.last = now;
        let heard = now.saturating_sub(self.heard_since);
        Alive {
            since_ms: self.since_ms,
            heard_ms: u64::try_from(heard.as_millis()).unwrap_or(u64::MAX),
            is_full: heard >= longest,
            reporters: u32::try_from(reporters).unwrap_or(u32::MAX),
            counts: self.counts.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn windows_are_full_when_usage_was_heard_for_the_longest_of_them() {
        let mut heart = Heart::new(at(500), 7);
        let beats: Vec<_> = (0..=300).map(|it| heart.beat(at(500 + it * 200), MINUTE, 3)).collect();
        assert_eq!(beats.iter().position(|it| it.is_full), Some(300));
        let alive =
            Alive { since_ms: 7, heard_ms: 400, is_full: false, reporters: 3, counts: None };
        assert_eq!(beats[2], alive);
    }

    #[test]
    fn a_process_that_stood_still_begins_afresh() {
        let mut heart = Heart::new(at(0), 7);
        heart.told(Some("a"));
        let said = [at(900), at(1900), at(3000), at(3200)].map(|now| {
            let it = heart.beat(now, at(100), 3);
            (it.heard_ms, it.is_full, it.counts)
        });
        let counts = || Some("a".to_owned());
        assert_eq!(
            said,
            [(900, true, counts()), (1900, true, counts()), (0, false, None), (200, true, None)]
        );
    }

    #[test]
    fn a_table_that_calls_none_the_one_that_counts_changes_nothing() {
        let mut heart = Heart::new(at(0), 7);
        let mut after = |told: Option<&str>| {
            heart.told(told);
            heart.beat(at(1), MINUTE, 0).counts
        };
        assert_eq!(
            [after(Some("a")), after(None), after(Some("b"))].map(Option::unwrap_or_default),
            ["a", "a", "b"]
        );
    }
}
