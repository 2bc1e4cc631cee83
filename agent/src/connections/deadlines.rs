//! Pure: overdue requests, and the time of the next scan for them.
//!
//! No component on the direct path could answer in the pod's place, so the connection of an overdue request is closed
//! from the pod's side. The eBPF programs store the start of each connection's request; reading it takes a dump of all
//! sockets. So a pod is scanned only when one of its requests can be overdue. That is one timeout after the pod was
//! last seen without requests, or after the start of the oldest request of the last scan. With short requests that is
//! one scan in each timeout, and none if the pod is idle now and then.

use std::{collections::BTreeMap, time::Duration};

pub(crate) mod scan;
pub(crate) mod task;

/// Pause between two scans of a pod: requests that become overdue shortly after each other are closed together.
const SCAN_PAUSE: Duration = Duration::from_millis(250);
/// Pause after a scan that failed.
const FAILED_SCAN_PAUSE: Duration = Duration::from_secs(1);
/// Bound on the cost of scans of a pod: one part in this number of a processor's time.
const CPU_BUDGET_DIVISOR: u32 = 10;

/// Deadlines of the requests of this node's pods. Times are CLOCK_MONOTONIC in ns, like the stamps of the eBPF
/// programs.
#[derive(Debug, Default)]
pub(crate) struct PodDeadlines {
    pods: BTreeMap<String, PodDeadline>,
}

#[derive(Debug)]
struct PodDeadline {
    /// Longest time that a request may take.
    timeout: Duration,
    /// Lower bound of the start of every request in flight.
    since_ns: u64,
    /// True if requests are in flight.
    is_busy: bool,
    /// End of the pause before the next scan.
    paused_until_ns: u64,
}

/// A pod that is to be scanned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeadlineScanTarget {
    /// Uid of the pod.
    pub(crate) uid: String,
    /// Longest time that its requests may take.
    pub(crate) timeout: Duration,
}

/// Outcome of a scan of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeadlineScanResult {
    /// Uid of the pod.
    pub(crate) uid: String,
    /// Number of connections that were closed, also if the scan failed later.
    pub(crate) closed: u64,
    /// Facts of the scan; `None` if it failed.
    pub(crate) scan: Option<DeadlineScan>,
}

/// Facts of a scan of a pod that did not fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeadlineScan {
    /// Time at which the scan began.
    pub(crate) at_ns: u64,
    /// Start of the oldest known request that is still in flight.
    pub(crate) oldest_ns: Option<u64>,
    /// Processor time of the scan.
    pub(crate) cpu_time: Duration,
}

impl PodDeadlines {
    /// Updates a pod's requests in flight, read after `now_ns`, and their timeout.
    pub(crate) fn update_in_flight(
        &mut self,
        now_ns: u64,
        uid: &str,
        in_flight: u64,
        timeout: Duration,
    ) {
        let is_busy = in_flight > 0;
        let Some(pod) = self.pods.get_mut(uid) else {
            // Requests that were in flight before the first reading may be of any age.
            let since_ns = if is_busy { 0 } else { now_ns };
            let pod = PodDeadline { timeout, since_ns, is_busy, paused_until_ns: 0 };
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

    /// Returns the pods to scan now. Pass each result to [`handle_scan`](Self::handle_scan) before the next call.
    pub(crate) fn due_scans(&self, now_ns: u64) -> Vec<DeadlineScanTarget> {
        let due =
            self.pods.iter().filter(|(_, pod)| pod.next_scan_ns().is_some_and(|at| at <= now_ns));
        due.map(|(uid, pod)| DeadlineScanTarget { uid: uid.clone(), timeout: pod.timeout })
            .collect()
    }

    /// Returns the time of the next scan of a pod, by what is known now.
    pub(crate) fn next_scan_ns(&self) -> Option<u64> {
        self.pods.values().filter_map(PodDeadline::next_scan_ns).min()
    }

    /// Updates a pod by the result of a scan, `None` if the scan failed.
    pub(crate) fn handle_scan(&mut self, now_ns: u64, uid: &str, scan: Option<DeadlineScan>) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let pause = match scan {
            Some(scan) => {
                // A request that began during the scan may be missing in it.
                pod.since_ns = scan.oldest_ns.map_or(scan.at_ns, |it| it.min(scan.at_ns));
                scan.cpu_time.saturating_mul(CPU_BUDGET_DIVISOR).max(SCAN_PAUSE)
            }
            None => FAILED_SCAN_PAUSE,
        };
        pod.paused_until_ns = now_ns.saturating_add(nanos(pause));
    }
}

impl PodDeadline {
    fn next_scan_ns(&self) -> Option<u64> {
        let overdue_ns = self.since_ns.saturating_add(nanos(self.timeout));
        self.is_busy.then_some(overdue_ns.max(self.paused_until_ns))
    }
}

/// Returns true if a request that began at `began_ns` has reached its timeout.
pub(crate) fn is_overdue(now_ns: u64, timeout: Duration, began_ns: u64) -> bool {
    // A stamp of another CPU may be ahead of this clock, so the difference stops at 0.
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

    fn uids(due: &[DeadlineScanTarget]) -> Vec<&str> {
        due.iter().map(|it| it.uid.as_str()).collect()
    }

    fn scan_result(at_ns: u64, oldest_ns: Option<u64>) -> Option<DeadlineScan> {
        Some(DeadlineScan { at_ns, oldest_ns, ..DeadlineScan::default() })
    }

    #[test]
    fn a_pod_that_is_idle_now_and_then_is_never_scanned() {
        let mut deadlines = PodDeadlines::default();
        for second in 0..100 {
            let now = second * SECOND;
            deadlines.update_in_flight(now, "a", second % 9, TIMEOUT);
            assert_eq!(deadlines.due_scans(now), [], "second {second}");
        }
    }

    #[test]
    fn a_pod_that_is_always_busy_is_scanned_when_its_oldest_request_can_be_overdue() {
        let mut deadlines = PodDeadlines::default();
        deadlines.update_in_flight(0, "a", 0, TIMEOUT);
        deadlines.update_in_flight(SECOND, "a", 7, TIMEOUT);
        assert_eq!(deadlines.next_scan_ns(), Some(10 * SECOND), "it was without one at 0");
        assert_eq!(deadlines.due_scans(10 * SECOND - 1), []);
        let due = deadlines.due_scans(10 * SECOND);
        assert_eq!(due, [DeadlineScanTarget { uid: "a".into(), timeout: TIMEOUT }]);
        deadlines.handle_scan(10 * SECOND, "a", scan_result(10 * SECOND, Some(4 * SECOND)));
        assert_eq!(deadlines.next_scan_ns(), Some(14 * SECOND));
        deadlines.handle_scan(14 * SECOND, "a", scan_result(14 * SECOND, None));
        assert_eq!(deadlines.next_scan_ns(), Some(24 * SECOND), "what began since");
        deadlines.update_in_flight(20 * SECOND, "a", 0, TIMEOUT);
        assert_eq!(deadlines.next_scan_ns(), None);
    }

    #[test]
    fn a_new_agent_scans_at_once_where_requests_are_in_flight() {
        let mut deadlines = PodDeadlines::default();
        let now = 1_000 * SECOND;
        deadlines.update_in_flight(now, "busy", 1, TIMEOUT);
        deadlines.update_in_flight(now, "idle", 0, TIMEOUT);
        assert_eq!(uids(&deadlines.due_scans(now)), ["busy"]);
        deadlines.forget("busy");
        deadlines.handle_scan(now, "busy", scan_result(now, None));
        assert_eq!(deadlines.due_scans(u64::MAX), [], "the pod is gone");
    }

    #[test]
    fn scans_pause_and_pause_longer_where_they_take_long_or_fail() {
        let (mut deadlines, pause_ns) = (PodDeadlines::default(), nanos(SCAN_PAUSE));
        deadlines.update_in_flight(0, "a", 1, TIMEOUT);
        let now = 100 * SECOND;
        let overdue = DeadlineScan { at_ns: now, oldest_ns: Some(0), cpu_time: Duration::ZERO };
        deadlines.handle_scan(now, "a", Some(overdue));
        assert_eq!(deadlines.next_scan_ns(), Some(now + pause_ns), "another is overdue");
        deadlines.handle_scan(now, "a", Some(DeadlineScan { cpu_time: SCAN_PAUSE, ..overdue }));
        assert_eq!(deadlines.next_scan_ns(), Some(now + pause_ns * u64::from(CPU_BUDGET_DIVISOR)));
        deadlines.handle_scan(now, "a", None);
        assert_eq!(deadlines.next_scan_ns(), Some(now + nanos(FAILED_SCAN_PAUSE)));
    }

    #[test]
    fn a_request_is_overdue_once_it_has_taken_its_timeout() {
        assert!(!is_overdue(20 * SECOND - 1, TIMEOUT, 10 * SECOND));
        assert!(is_overdue(20 * SECOND, TIMEOUT, 10 * SECOND));
        assert!(!is_overdue(20 * SECOND, TIMEOUT, 21 * SECOND), "another CPU's clock");
    }

    /// Generates requests of one pod: the start and duration of each, in hundredths of a second.
    fn requests() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..6_000_u64, 1..1_500_u64), 0..40)
    }

    proptest! {
        /// The loop as the agent runs it: reads the requests in flight once a second, and wakes when a scan is due.
        #[test]
        fn every_request_is_closed_within_a_second_of_its_timeout_and_none_before(requests in requests()) {
            let tick = SECOND / 100;
            let mut open: Vec<_> = requests.iter().map(|(began, takes)| (*began, began + takes)).collect();
            let (mut deadlines, mut scans, mut closed) = (PodDeadlines::default(), 0, 0);
            for now in 0..9_000 {
                let in_flight = |(began, ends): &&(u64, u64)| *began <= now && now < *ends;
                let is_late = |(began, _): &(u64, u64)| now - began > 1_100;
                prop_assert!(!open.iter().filter(in_flight).any(is_late), "{:?} at {}", open, now);
                if now % 100 == 0 {
                    let count = open.iter().filter(in_flight).count() as u64;
                    deadlines.update_in_flight(now * tick, "a", count, TIMEOUT);
                }
                if deadlines.due_scans(now * tick).is_empty() {
                    continue;
                }
                scans += 1;
                let all = open.len();
                open.retain(|it| !(in_flight(&it) && is_overdue(now * tick, TIMEOUT, it.0 * tick)));
                closed += all - open.len();
                let oldest = open.iter().filter(in_flight).map(|(began, _)| began * tick).min();
                deadlines.handle_scan(now * tick, "a", scan_result(now * tick, oldest));
            }
            let too_long = requests.iter().filter(|(_, takes)| *takes > 1_000 + 25).count();
            prop_assert!(closed >= too_long, "{} of {}", closed, too_long);
            let all = requests.iter().filter(|(_, takes)| *takes > 1_000).count();
            prop_assert!(closed <= all, "{} of {}", closed, all);
            prop_assert!(scans <= 9 + 2 * requests.len(), "{} scans", scans);
        }
    }
}
