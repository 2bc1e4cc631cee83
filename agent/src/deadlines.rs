//! Pure: overdue requests, and the time of the next scan for them.
//!
//! No component on the direct path could answer in the pod's place, so the connection of an overdue request is closed
//! from the pod's side. The eBPF programs store the start of each connection's request; reading it takes a dump of all
//! sockets. So a pod is scanned only when one of its requests can be overdue. That is one timeout after the pod was
//! last seen without requests, or after the start of the oldest request of the last scan. With short requests that is
//! one scan in each timeout, and none if the pod is idle now and then.

use std::{collections::BTreeMap, time::Duration};

pub(crate) mod end;

/// Pause between two scans of a pod: requests that become overdue shortly after each other are closed together.
const REST: Duration = Duration::from_millis(250);
/// Pause after a scan that failed.
const REST_FAILED: Duration = Duration::from_secs(1);
/// Bound on the cost of scans of a pod: one part in this number of a processor's time.
const PARTS: u32 = 10;

/// Deadlines of the requests of this node's pods. Times are CLOCK_MONOTONIC in ns, like the stamps of the eBPF
/// programs.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    pods: BTreeMap<String, Watched>,
}

#[derive(Debug)]
struct Watched {
    /// Longest time that a request may take.
    timeout: Duration,
    /// Lower bound of the start of every request in flight.
    since_ns: u64,
    /// True if requests are in flight.
    is_busy: bool,
    /// End of the pause before the next scan.
    rests_until_ns: u64,
}

/// A pod that is to be scanned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// Uid of the pod.
    pub(crate) uid: String,
    /// Longest time that its requests may take.
    pub(crate) timeout: Duration,
}

/// Result of a scan of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    /// Time at which the scan began.
    pub(crate) at_ns: u64,
    /// Start of the oldest known request that is still in flight.
    pub(crate) oldest_ns: Option<u64>,
    /// Number of connections that were closed.
    pub(crate) ended: u64,
    /// Processor time of the scan.
    pub(crate) took: Duration,
}

impl Deadlines {
    /// Updates a pod's requests in flight, read after `now_ns`, and their timeout.
    pub(crate) fn seen(&mut self, now_ns: u64, uid: &str, in_flight: u64, timeout: Duration) {
        let is_busy = in_flight > 0;
        let Some(pod) = self.pods.get_mut(uid) else {
            // Requests that were in flight before the first reading may be of any age.
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

    /// Forgets a pod that is gone.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Returns the pods to scan now. Pass each result to [`looked`](Self::looked) before the next call.
    pub(crate) fn due(&self, now_ns: u64) -> Vec<Due> {
        let due = self.pods.iter().filter(|(_, pod)| pod.next_ns().is_some_and(|at| at <= now_ns));
        due.map(|(uid, pod)| Due { uid: uid.clone(), timeout: pod.timeout }).collect()
    }

    /// Returns the time of the next scan of a pod, by what is known now.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.pods.values().filter_map(Watched::next_ns).min()
    }

    /// Updates a pod by the result of a scan, `None` if the scan failed.
    pub(crate) fn looked(&mut self, now_ns: u64, uid: &str, looked: Option<Looked>) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let rest = match looked {
            Some(looked) => {
                // A request that began during the scan may be missing in it.
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

/// Returns true if a request that began at `began_ns` has reached its timeout.
pub(crate) fn is_over(now_ns: u64, timeout: Duration, began_ns: u64) -> bool {
    // A stamp of another CPU may be ahead of this clock, so the difference has a floor.
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

    /// Generates requests of one pod: the start and duration of each, in hundredths of a second.
    fn requests() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..6_000_u64, 1..1_500_u64), 0..40)
    }

    proptest! {
        /// The loop as the agent runs it: reads the requests in flight once a second, and wakes when a scan is due.
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
