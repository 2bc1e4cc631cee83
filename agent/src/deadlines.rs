//! Pure: which requests have taken longer than they may, and when to look for such.
//!
//! Nobody stands in the way of a direct request who could answer in its place, so its connection is ended from the pod's
//! side. The kernel half notes of each connection when its request began; to read that takes a dump of all sockets. So a
//! pod is looked into only when one of its requests can be over: as long after it was last seen without any, or after the
//! oldest that the look before has found, as a request may take. Where requests are short that is once in all that time,
//! and never where the pod rests now and then.

use std::{collections::BTreeMap, time::Duration};

pub(crate) mod end;

/// Rest between two looks into a pod: requests that are over one shortly after the other are ended together.
const REST: Duration = Duration::from_millis(250);
/// The same after a look that failed.
const REST_FAILED: Duration = Duration::from_secs(1);
/// Looks into a pod take at most one part in so many of a processor's time.
const PARTS: u32 = 10;

/// What is known of the requests of this node's pods. Times are CLOCK_MONOTONIC in ns, as the kernel half notes them.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    pods: BTreeMap<String, Watched>,
}

#[derive(Debug)]
struct Watched {
    /// How long a request may take.
    timeout: Duration,
    /// No request that is in flight began before.
    since_ns: u64,
    /// Whether any is in flight.
    is_busy: bool,
    /// No look before.
    rests_until_ns: u64,
}

/// A pod that is to be looked into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// The pod.
    pub(crate) uid: String,
    /// How long its requests may take.
    pub(crate) timeout: Duration,
}

/// What a look into a pod has found and done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    /// When it began.
    pub(crate) at_ns: u64,
    /// When the oldest request began that is still in flight, of those that are known.
    pub(crate) oldest_ns: Option<u64>,
    /// Connections that were ended.
    pub(crate) ended: u64,
    /// Processor time that it took.
    pub(crate) took: Duration,
}

impl Deadlines {
    /// Takes in whether a pod has requests in flight, read after `now_ns`, and how long they may take.
    pub(crate) fn seen(&mut self, now_ns: u64, uid: &str, in_flight: u64, timeout: Duration) {
        let is_busy = in_flight > 0;
        let Some(pod) = self.pods.get_mut(uid) else {
            // Whatever is in flight there is of any age.
            let since_ns = if is_busy { 0 } else { now_ns };
            let pod = Watched { timeout, since_ns, is_busy, rests_until_ns: 0 };
            self.pods.insert(uid.to_owned(), pod);
            return;
        };
        (pod.timeout, pod.is_busy) = (timeout, is_busy);
        if !is_busy {
            pod.since_ns = now_ns;
        }
    }

    /// The pod is no more.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// The pods to look into now. Say by [`looked`](Self::looked) what was found in each, before asking again.
    pub(crate) fn due(&self, now_ns: u64) -> Vec<Due> {
        let due = self.pods.iter().filter(|(_, pod)| pod.next_ns().is_some_and(|at| at <= now_ns));
        due.map(|(uid, pod)| Due { uid: uid.clone(), timeout: pod.timeout }).collect()
    }

    /// When the next pod is to be looked into, as far as is known.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.pods.values().filter_map(Watched::next_ns).min()
    }

    /// A look into a pod has ended, or could not be made.
    pub(crate) fn looked(&mut self, now_ns: u64, uid: &str, looked: Option<Looked>) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let rest = match looked {
            Some(looked) => {
                // What began while it went on may have been missed.
                pod.since_ns = looked.oldest_ns.map_or(looked.at_ns, |it| it.min(looked.at_ns));
                looked.took.saturating_mul(PARTS).max(REST)
            }
            None => REST_FAILED,
        };
        pod.rests_until_ns = now_ns.saturating_add(nanos(rest));
    }
}

impl Watched {
    fn next_ns(&self) -> Option<u64> {
        let over_ns = self.since_ns.saturating_add(nanos(self.timeout));
        self.is_busy.then_some(over_ns.max(self.rests_until_ns))
    }
}

/// Whether a request that began then has taken as long as it may.
pub(crate) fn is_over(now_ns: u64, timeout: Duration, began_ns: u64) -> bool {
    // One that began on another CPU may have a stamp that is ahead of this clock.
    now_ns.saturating_sub(began_ns) >= nanos(timeout)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const TIMEOUT: Duration = Duration::from_secs(10);

    fn names(due: &[Due]) -> Vec<&str> {
        due.iter().map(|it| it.uid.as_str()).collect()
    }

    fn found(at_ns: u64, oldest_ns: Option<u64>) -> Option<Looked> {
        Some(Looked { at_ns, oldest_ns, ..Looked::default() })
    }

    #[test]
    fn a_pod_that_rests_now_and_then_is_never_looked_into() {
        let mut deadlines = Deadlines::default();
        for second in 0..100 {
            let now = second * SECOND;
            deadlines.seen(now, "a", second % 9, TIMEOUT);
            assert_eq!(deadlines.due(now), [], "second {second}");
        }
    }

    #[test]
    fn a_pod_that_is_always_busy_is_looked_into_when_its_oldest_request_can_be_over() {
        let mut deadlines = Deadlines::default();
        deadlines.seen(0, "a", 0, TIMEOUT);
        deadlines.seen(SECOND, "a", 7, TIMEOUT);
        assert_eq!(deadlines.next_ns(), Some(10 * SECOND), "it was without one at 0");
        assert_eq!(deadlines.due(10 * SECOND - 1), []);
        let due = deadlines.due(10 * SECOND);
        assert_eq!(due, [Due { uid: "a".into(), timeout: TIMEOUT }]);
        deadlines.looked(10 * SECOND, "a", found(10 * SECOND, Some(4 * SECOND)));
        assert_eq!(deadlines.next_ns(), Some(14 * SECOND));
        deadlines.looked(14 * SECOND, "a", found(14 * SECOND, None));
        assert_eq!(deadlines.next_ns(), Some(24 * SECOND), "what began since");
        deadlines.seen(20 * SECOND, "a", 0, TIMEOUT);
        assert_eq!(deadlines.next_ns(), None);
    }

    #[test]
    fn an_agent_that_starts_looks_at_once_where_requests_are_in_flight() {
        let mut deadlines = Deadlines::default();
        let now = 1_000 * SECOND;
        deadlines.seen(now, "busy", 1, TIMEOUT);
        deadlines.seen(now, "idle", 0, TIMEOUT);
        assert_eq!(names(&deadlines.due(now)), ["busy"]);
        deadlines.forget("busy");
        deadlines.looked(now, "busy", found(now, None));
        assert_eq!(deadlines.due(u64::MAX), [], "it is no more");
    }

    #[test]
    fn looks_rest_and_rest_longer_where_they_take_long_or_fail() {
        let (mut deadlines, rest) = (Deadlines::default(), nanos(REST));
        deadlines.seen(0, "a", 1, TIMEOUT);
        let now = 100 * SECOND;
        let over = Looked { at_ns: now, oldest_ns: Some(0), ended: 0, took: Duration::ZERO };
        deadlines.looked(now, "a", Some(over));
        assert_eq!(deadlines.next_ns(), Some(now + rest), "the next one is over already");
        deadlines.looked(now, "a", Some(Looked { took: REST, ..over }));
        assert_eq!(deadlines.next_ns(), Some(now + rest * u64::from(PARTS)));
        deadlines.looked(now, "a", None);
        assert_eq!(deadlines.next_ns(), Some(now + nanos(REST_FAILED)));
    }

    #[test]
    fn a_request_is_over_once_it_has_taken_as_long_as_it_may() {
        assert!(!is_over(20 * SECOND - 1, TIMEOUT, 10 * SECOND));
        assert!(is_over(20 * SECOND, TIMEOUT, 10 * SECOND));
        assert!(!is_over(20 * SECOND, TIMEOUT, 21 * SECOND), "another CPU's clock");
    }

    /// Requests of one pod: when each begins, and how long it takes by itself, in hundredths of a second.
    fn requests() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..6_000_u64, 1..1_500_u64), 0..40)
    }

    proptest! {
        /// The loop as the agent runs it: looks once a second at what is in flight, and wakes when a look is due.
        #[test]
        fn every_request_is_ended_within_a_second_of_its_time_and_none_before(requests in requests()) {
            let tick = SECOND / 100;
            let mut open: Vec<_> = requests.iter().map(|(began, takes)| (*began, began + takes)).collect();
            let (mut deadlines, mut looks, mut ended) = (Deadlines::default(), 0, 0);
            for now in 0..9_000 {
                let in_flight = |(began, ends): &&(u64, u64)| *began <= now && now < *ends;
                let is_late = |(began, _): &(u64, u64)| now - began > 1_100;
                prop_assert!(!open.iter().filter(in_flight).any(is_late), "{:?} at {}", open, now);
                if now % 100 == 0 {
                    let count = open.iter().filter(in_flight).count() as u64;
                    deadlines.seen(now * tick, "a", count, TIMEOUT);
                }
                if deadlines.due(now * tick).is_empty() {
                    continue;
                }
                looks += 1;
                let all = open.len();
                open.retain(|it| !(in_flight(&it) && is_over(now * tick, TIMEOUT, it.0 * tick)));
                ended += all - open.len();
                let oldest = open.iter().filter(in_flight).map(|(began, _)| began * tick).min();
                deadlines.looked(now * tick, "a", found(now * tick, oldest));
            }
            let too_long = requests.iter().filter(|(_, takes)| *takes > 1_000 + 25).count();
            prop_assert!(ended >= too_long, "{} of {}", ended, too_long);
            let all = requests.iter().filter(|(_, takes)| *takes > 1_000).count();
            prop_assert!(ended <= all, "{} of {}", ended, all);
            prop_assert!(looks <= 9 + 2 * requests.len(), "{} looks", looks);
        }
    }
}
