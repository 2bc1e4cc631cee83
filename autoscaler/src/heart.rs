//! Pure: heartbeats of this autoscaler, by which controllers choose the active autoscaler.

use std::time::Duration;

use common::wire::AutoscalerHeartbeat;

/// Time between two heartbeats. Controllers ignore an autoscaler that misses about three of them.
pub const BEAT: Duration = Duration::from_millis(200);
/// Pause between two heartbeats from which the process, or its node, counts as stalled: reports may have been lost.
const PAUSE: Duration = Duration::from_secs(1);

/// State of the next heartbeat. Times are of this process's monotonic clock, which no other host shares.
#[derive(Clone, Debug)]
pub struct HeartbeatState {
    /// Start of the process, in milliseconds since 1970.
    since_ms: u64,
    heard_since: Duration,
    last: Duration,
    counts: Option<String>,
}

impl HeartbeatState {
    /// A heartbeat state whose record of usage begins at `now`.
    pub fn new(now: Duration, since_ms: u64) -> Self {
        Self { since_ms, heard_since: now, last: now, counts: None }
    }

    /// Records the active autoscaler as the RouteTable names it.
    ///
    /// A controller that has just started names none. That changes nothing: the last one named stays active.
    pub fn told(&mut self, counts: Option<&str>) {
        if let Some(counts) = counts {
            self.counts = Some(counts.to_owned());
        }
    }

    /// Heartbeat to send at `now`. `longest` is the longest time over which load of any Revision matters.
    pub fn beat(
        &mut self,
        now: Duration,
        longest: Duration,
        reporters: usize,
    ) -> AutoscalerHeartbeat {
        if now.saturating_sub(self.last) > PAUSE {
            // Controllers may have chosen another autoscaler during the stall, and usage of that time may be missing.
            (self.heard_since, self.counts) = (now, None);
        }
        self.last = now;
        let heard = now.saturating_sub(self.heard_since);
        AutoscalerHeartbeat {
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
        let mut heart = HeartbeatState::new(at(500), 7);
        let beats: Vec<_> = (0..=300).map(|it| heart.beat(at(500 + it * 200), MINUTE, 3)).collect();
        assert_eq!(beats.iter().position(|it| it.is_full), Some(300));
        let alive = AutoscalerHeartbeat {
            since_ms: 7,
            heard_ms: 400,
            is_full: false,
            reporters: 3,
            counts: None,
        };
        assert_eq!(beats[2], alive);
    }

    #[test]
    fn a_process_that_stood_still_begins_afresh() {
        let mut heart = HeartbeatState::new(at(0), 7);
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
        let mut heart = HeartbeatState::new(at(0), 7);
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
