//! Pure: heartbeats of this autoscaler, by which controllers choose the active autoscaler.

use std::time::Duration;

use common::wire::AutoscalerHeartbeat;

/// Time between two heartbeats. Controllers ignore an autoscaler that misses about three of them.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);
/// Pause between two heartbeats from which the process, or its node, counts as stalled: reports may have been lost.
const STALL_THRESHOLD: Duration = Duration::from_secs(1);

/// State of the next heartbeat. Times are of this process's monotonic clock, which no other host shares.
#[derive(Clone, Debug)]
pub struct HeartbeatState {
    /// Start of the process, in milliseconds since 1970.
    since_ms: u64,
    usage_since: Duration,
    last_sent_at: Duration,
    /// True once a RouteTable has named the Revisions.
    has_table: bool,
    active_autoscaler: Option<String>,
}

impl HeartbeatState {
    /// A heartbeat state whose record of usage begins at `now`.
    pub fn new(now: Duration, since_ms: u64) -> Self {
        let (usage_since, last_sent_at) = (now, now);
        Self { since_ms, usage_since, last_sent_at, has_table: false, active_autoscaler: None }
    }

    /// Records that a whole RouteTable was applied: from now on `longest_lookback` is that of all Revisions.
    pub fn record_table(&mut self) {
        self.has_table = true;
    }

    /// Records the active autoscaler as the RouteTable names it.
    ///
    /// A controller that has just started names none. That changes nothing: the last one named stays active.
    pub fn set_active(&mut self, active_autoscaler: Option<&str>) {
        if let Some(active_autoscaler) = active_autoscaler {
            self.active_autoscaler = Some(active_autoscaler.to_owned());
        }
    }

    /// Heartbeat to send at `now`. `longest_lookback` is the longest time on which a decision may depend.
    pub fn next_heartbeat(
        &mut self,
        now: Duration,
        longest_lookback: Duration,
        reporters: usize,
    ) -> AutoscalerHeartbeat {
        if now.saturating_sub(self.last_sent_at) > STALL_THRESHOLD {
            // Usage of that time may be missing. The name stays, although controllers may have chosen another autoscaler:
            // that one has fuller windows, and comes first whatever is named. The table says the name again only when
            // it changes, so that a stall of all autoscalers would otherwise leave none that is named.
            self.usage_since = now;
        }
        self.last_sent_at = now;
        let observed = now.saturating_sub(self.usage_since);
        AutoscalerHeartbeat {
            since_ms: self.since_ms,
            observed_ms: u64::try_from(observed.as_millis()).unwrap_or(u64::MAX),
            covers_all_windows: self.has_table && observed >= longest_lookback,
            reporters: u32::try_from(reporters).unwrap_or(u32::MAX),
            active_autoscaler: self.active_autoscaler.clone(),
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
        let mut state = HeartbeatState::new(at(500), 7);
        state.record_table();
        let heartbeats: Vec<_> =
            (0..=300).map(|it| state.next_heartbeat(at(500 + it * 200), MINUTE, 3)).collect();
        assert_eq!(heartbeats.iter().position(|it| it.covers_all_windows), Some(300));
        let expected = AutoscalerHeartbeat {
            since_ms: 7,
            observed_ms: 400,
            covers_all_windows: false,
            reporters: 3,
            active_autoscaler: None,
        };
        assert_eq!(heartbeats[2], expected);
    }

    #[test]
    fn windows_are_not_full_before_a_table_names_them() {
        let mut state = HeartbeatState::new(at(0), 7);
        assert!(!state.next_heartbeat(at(200), Duration::ZERO, 0).covers_all_windows);
        state.record_table();
        assert!(state.next_heartbeat(at(400), Duration::ZERO, 0).covers_all_windows, "no Revision");
    }

    #[test]
    fn a_stalled_process_starts_its_record_again_and_keeps_the_name() {
        let mut state = HeartbeatState::new(at(0), 7);
        state.record_table();
        state.set_active(Some("a"));
        let heartbeats = [at(900), at(1900), at(3000), at(3200)].map(|now| {
            let heartbeat = state.next_heartbeat(now, at(100), 3);
            (heartbeat.observed_ms, heartbeat.covers_all_windows, heartbeat.active_autoscaler)
        });
        let active = || Some("a".to_owned());
        assert_eq!(
            heartbeats,
            [(900, true), (1900, true), (0, false), (200, true)].map(|(ms, full)| (
                ms,
                full,
                active()
            ))
        );
    }

    #[test]
    fn a_table_without_an_active_autoscaler_changes_nothing() {
        let mut state = HeartbeatState::new(at(0), 7);
        let mut active_after = |active: Option<&str>| {
            state.set_active(active);
            state.next_heartbeat(at(1), MINUTE, 0).active_autoscaler
        };
        assert_eq!(
            [active_after(Some("a")), active_after(None), active_after(Some("b"))]
                .map(Option::unwrap_or_default),
            ["a", "a", "b"]
        );
    }
}
