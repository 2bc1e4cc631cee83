//! Pure: choice of the namespaces that a scan of recorded clients enters, and the time for which records may lack
//! connections.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// Time after a connect without a readable record for which the records count as incomplete. By then the connection is
/// established or has failed. So if it is open, the scans of all clients that follow find it without a record.
const UNLISTED_TIME: Duration = Duration::from_secs(15);

/// Gaps of the connect records, as one reading finds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordGaps {
    /// Number of connects of which no record can be read, for want of memory.
    pub(super) unlisted_connects: u64,
    /// True if programs of another version may have led connections, whose records cannot be read.
    pub(super) has_other_versions: bool,
}

/// Time for which the connect records may lack connections that the eBPF programs have led.
#[derive(Debug, Default)]
pub(super) struct RecordCompleteness {
    /// Number of connects without a readable record, when it was last read.
    unlisted_connects: u64,
    /// Time at which a change of this number was last seen.
    unlisted_at: Option<Instant>,
}

impl RecordCompleteness {
    /// Records the gaps that a reading has found. Returns true if records name each connection that was led lately.
    pub(super) fn update(&mut self, now: Instant, gaps: RecordGaps) -> bool {
        let RecordGaps { unlisted_connects, has_other_versions } = gaps;
        // Connects from before the first reading may be recent, so a first number above 0 counts as a change.
        if unlisted_connects != self.unlisted_connects {
            self.unlisted_connects = unlisted_connects;
            self.unlisted_at = Some(now);
        }
        let is_past = |at: Instant| now.duration_since(at) >= UNLISTED_TIME;
        !has_other_versions && self.unlisted_at.is_none_or(is_past)
    }
}

/// Network namespaces of clients that scans of all clients have found, by their cookies.
#[derive(Debug, Default)]
pub(super) struct KnownNamespaces {
    /// Processes in each namespace, when a scan of all clients last found it.
    processes: BTreeMap<u64, Vec<u32>>,
    /// Namespaces that records name, and that a scan of all clients has not found.
    missing: BTreeSet<u64>,
}

impl KnownNamespaces {
    /// Returns those of the sought namespaces that a scan can enter, with their processes. `None` if all clients are to
    /// be scanned: one of the namespaces is not known, and was not looked for yet.
    pub(super) fn select(&self, sought: &BTreeSet<u64>) -> Option<BTreeMap<u64, Vec<u32>>> {
        let mut selected = BTreeMap::new();
        for cookie in sought {
            match self.processes.get(cookie) {
                Some(pids) => {
                    selected.insert(*cookie, pids.clone());
                }
                None if self.missing.contains(cookie) => {}
                None => return None,
            }
        }
        Some(selected)
    }

    /// Records the namespaces that a scan of all clients has found. Of clients whose scan has failed nothing new is
    /// known; `failed` are the processes in their namespaces. `sought` are the namespaces that the scan was for, if it
    /// was for some.
    pub(super) fn record_full_scan(
        &mut self,
        found: BTreeMap<u64, Vec<u32>>,
        failed: &BTreeSet<u32>,
        sought: &BTreeSet<u64>,
    ) {
        self.processes.retain(|_, pids| pids.iter().any(|pid| failed.contains(pid)));
        self.processes.extend(found);
        // A scan for others says nothing of those that were missing, except for those that it has found.
        let may_be_missing = if sought.is_empty() { &self.missing } else { sought };
        let is_missing = |it: &u64| !self.processes.contains_key(it);
        let missing = may_be_missing.iter().copied().filter(is_missing).collect();
        // Otherwise they may be those of the clients whose scan has failed, and are looked for again.
        self.missing = if failed.is_empty() { missing } else { BTreeSet::new() };
    }

    /// Forgets a namespace, since its processes have ended. If a record still names it, the next scan looks for others.
    pub(super) fn forget(&mut self, cookie: u64) {
        self.processes.remove(&cookie);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(unlisted_connects: u64, has_other_versions: bool) -> RecordGaps {
        RecordGaps { unlisted_connects, has_other_versions }
    }

    #[test]
    fn records_are_incomplete_for_a_time_after_each_connect_without_one() {
        let start = Instant::now();
        let mut completeness = RecordCompleteness::default();
        let mut at = |seconds, unlisted| {
            completeness.update(start + Duration::from_secs(seconds), gaps(unlisted, false))
        };
        assert!(at(0, 0), "none was ever without");
        assert!(!at(1, 3) && !at(15, 3), "it may not be established yet");
        assert!(at(16, 3), "scans of all clients have found it");
        assert!(!at(17, 4) && !at(31, 4));
        assert!(at(32, 4));
        assert!(!at(33, 0), "new maps count from the start");
    }

    #[test]
    fn a_first_number_of_connects_without_a_record_may_be_recent() {
        let (start, mut completeness) = (Instant::now(), RecordCompleteness::default());
        assert!(!completeness.update(start, gaps(3, false)));
        assert!(completeness.update(start + UNLISTED_TIME, gaps(3, false)));
    }

    #[test]
    fn records_are_incomplete_beside_programs_of_another_version() {
        let (now, mut completeness) = (Instant::now(), RecordCompleteness::default());
        assert!(!completeness.update(now, gaps(0, true)));
        assert!(completeness.update(now, gaps(0, false)), "their last connections have closed");
    }

    /// Returns namespaces as a scan of all clients has found them.
    fn namespaces(found: &[(u64, &[u32])]) -> BTreeMap<u64, Vec<u32>> {
        found.iter().map(|(cookie, pids)| (*cookie, pids.to_vec())).collect()
    }

    /// No process failed, no namespace was sought.
    const NO_PID: BTreeSet<u32> = BTreeSet::new();
    const NO_COOKIE: BTreeSet<u64> = BTreeSet::new();

    #[test]
    fn a_scan_enters_the_namespaces_that_records_name_and_no_others() {
        let mut known = KnownNamespaces::default();
        assert_eq!(known.select(&NO_COOKIE), Some(BTreeMap::new()), "no record, no namespace");
        known.record_full_scan(namespaces(&[(1, &[10]), (2, &[20, 21])]), &NO_PID, &NO_COOKIE);
        assert_eq!(known.select(&NO_COOKIE), Some(BTreeMap::new()));
        assert_eq!(known.select(&[2].into()), Some(namespaces(&[(2, &[20, 21])])));
        assert_eq!(known.select(&[2, 3].into()), None, "all are to be searched for the other one");
    }

    #[test]
    fn a_namespace_that_no_client_has_is_looked_for_once() {
        let (mut known, sought) = (KnownNamespaces::default(), BTreeSet::from([1, 3]));
        known.record_full_scan(namespaces(&[(1, &[10])]), &NO_PID, &sought);
        assert_eq!(known.select(&sought), Some(namespaces(&[(1, &[10])])));
        // A scan of all clients for another reason.
        known.record_full_scan(namespaces(&[(1, &[10])]), &NO_PID, &NO_COOKIE);
        assert_eq!(known.select(&sought), Some(namespaces(&[(1, &[10])])), "it stays missing");
        known.record_full_scan(namespaces(&[(1, &[10]), (3, &[30])]), &NO_PID, &NO_COOKIE);
        assert_eq!(known.select(&sought), Some(namespaces(&[(1, &[10]), (3, &[30])])));
        known.record_full_scan(namespaces(&[(1, &[10])]), &NO_PID, &NO_COOKIE);
        assert_eq!(known.select(&sought), None, "it was there meanwhile");
    }

    #[test]
    fn a_namespace_may_be_that_of_a_client_whose_scan_has_failed() {
        let (mut known, failed) = (KnownNamespaces::default(), BTreeSet::from([10, 30]));
        known.record_full_scan(namespaces(&[(1, &[10]), (2, &[20])]), &NO_PID, &NO_COOKIE);
        known.record_full_scan(BTreeMap::new(), &failed, &[1, 3].into());
        assert_eq!(known.select(&[1].into()), Some(namespaces(&[(1, &[10])])), "it stays known");
        assert_eq!(known.select(&[2].into()), None, "it has gone");
        assert_eq!(known.select(&[3].into()), None, "it is looked for again");
    }

    #[test]
    fn a_namespace_whose_processes_have_ended_is_looked_for() {
        let mut known = KnownNamespaces::default();
        known.record_full_scan(namespaces(&[(1, &[10])]), &NO_PID, &NO_COOKIE);
        known.forget(1);
        assert_eq!(known.select(&[1].into()), None);
        known.record_full_scan(namespaces(&[(1, &[11])]), &NO_PID, &[1].into());
        assert_eq!(known.select(&[1].into()), Some(namespaces(&[(1, &[11])])));
    }
}
