//! Pure: growth of what is in flight: of which pods it was told a moment ago, and until when they rest.
//!
//! An event says that more requests are in flight in a pod than were reported. The agent reports at once, and asks for the
//! next event of the pod only a round later: however fast requests come, a pod is reported so often and no more.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long a pod rests. Ten rounds are less than an autoscaler's way to a new pod takes.
const ROUND: Duration = Duration::from_millis(5);

/// The pods that rest, by slot.
#[derive(Debug, Default)]
pub(crate) struct Growth(BTreeMap<u32, Instant>);

impl Growth {
    /// The pod's growth was reported.
    pub(crate) fn told(&mut self, now: Instant, slot: u32) {
        self.0.entry(slot).or_insert(now + ROUND);
    }

    /// When the first of them has rested.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    /// Those that have rested. They rest no more.
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
