//! Pure: throttle of growth reports: pods whose growth was reported a moment ago, and the end of each one's pause.
//!
//! A growth event means that more requests are in flight in a pod than were reported. The agent reports at once, and
//! arms the pod's next event only one round later. So a pod is reported once a round at most, however fast requests
//! come.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Pause between two growth reports of one pod. Ten rounds are shorter than an autoscaler's way to a new pod.
const ROUND: Duration = Duration::from_millis(5);

/// End of the pause of each paused pod, by row.
#[derive(Debug, Default)]
pub(crate) struct Growth(BTreeMap<u32, Instant>);

impl Growth {
    /// Starts the pause of a pod whose growth was reported. A pause that runs already is not extended.
    pub(crate) fn told(&mut self, now: Instant, slot: u32) {
        // Growth during the pause does not extend it.
        self.0.entry(slot).or_insert(now + ROUND);
    }

    /// Returns the end of the earliest pause.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    /// Removes and returns the rows whose pause is over.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<u32> {
        let rested = self.0.iter().filter(|(_, until)| **until <= now);
        let due: Vec<u32> = rested.map(|(slot, _)| *slot).collect();
        self.0.retain(|_, until| *until > now);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_rests_for_a_round_however_often_it_is_told_of() {
        let (mut growth, begun) = (Growth::default(), Instant::now());
        growth.told(begun, 1);
        growth.told(begun + ROUND / 2, 1);
        growth.told(begun + ROUND / 2, 2);
        assert_eq!(growth.next_wake(), Some(begun + ROUND));
        assert!(growth.due(begun + ROUND / 2).is_empty());
        assert_eq!(growth.due(begun + ROUND), [1]);
        assert_eq!(growth.due(begun + ROUND * 2), [2]);
        assert_eq!(growth.next_wake(), None);
    }
}
