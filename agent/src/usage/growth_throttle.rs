//! Pure: throttle of growth reports: pods whose growth was reported a moment ago, and the end of each one's pause.
//!
//! A growth event means that more requests are in flight in a pod than were reported. The agent reports at once, and
//! arms the pod's next event only after a pause. So a pod is reported once in each pause at most, however fast
//! requests come.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Pause between two growth reports of one pod. Ten pauses are shorter than the time from a report to a new pod.
const REPORT_PAUSE: Duration = Duration::from_millis(5);

/// End of the pause of each paused pod, by row.
#[derive(Debug, Default)]
pub(crate) struct GrowthThrottle(BTreeMap<u32, Instant>);

impl GrowthThrottle {
    /// Starts the pause of a pod whose growth was reported. A pause that runs already is not extended.
    pub(crate) fn start_pause(&mut self, now: Instant, slot: u32) {
        self.0.entry(slot).or_insert(now + REPORT_PAUSE);
    }

    /// Ends the pause of a pod, if there is one.
    pub(crate) fn end_pause(&mut self, slot: u32) {
        self.0.remove(&slot);
    }

    /// Returns the end of the earliest pause.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    /// Removes and returns the rows whose pause is over.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<u32> {
        let over = self.0.iter().filter(|(_, until)| **until <= now);
        let due: Vec<u32> = over.map(|(slot, _)| *slot).collect();
        self.0.retain(|_, until| *until > now);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_pauses_once_however_often_it_is_reported() {
        let (mut growth, begun) = (GrowthThrottle::default(), Instant::now());
        growth.start_pause(begun, 1);
        growth.start_pause(begun + REPORT_PAUSE / 2, 1);
        growth.start_pause(begun + REPORT_PAUSE / 2, 2);
        assert_eq!(growth.next_wake(), Some(begun + REPORT_PAUSE));
        assert!(growth.take_due(begun + REPORT_PAUSE / 2).is_empty());
        assert_eq!(growth.take_due(begun + REPORT_PAUSE), [1]);
        assert_eq!(growth.take_due(begun + REPORT_PAUSE * 2), [2]);
        assert_eq!(growth.next_wake(), None);
    }

    #[test]
    fn a_pause_that_was_ended_has_no_later_effect() {
        let (mut growth, begun) = (GrowthThrottle::default(), Instant::now());
        growth.start_pause(begun, 1);
        growth.end_pause(1);
        growth.end_pause(2);
        assert_eq!(growth.next_wake(), None);
        growth.start_pause(begun + REPORT_PAUSE / 2, 1);
        assert!(growth.take_due(begun + REPORT_PAUSE).is_empty(), "the new pause has its own end");
    }
}
