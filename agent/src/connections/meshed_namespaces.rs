//! Pure: network namespaces of this node's clients, and which of them are meshed: their rules redirect connections, as
//! those of a mesh's proxy do.
//!
//! The proxy chooses route and identity by the address that its program asked for, so it must see the ClusterIP. The
//! eBPF programs leave connects of such namespaces unchanged.
//!
//! Rules appear after the namespace, and before the pod's application starts. So a namespace is looked at often while
//! it is new, and later from time to time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

pub(crate) mod task;

/// Age up to which a namespace is new: it is looked at in each scan.
const NEW_FOR: Duration = Duration::from_secs(120);
/// Time between two looks at a namespace that is not new.
const LOOK_PERIOD: Duration = Duration::from_secs(30);

/// Identity of a namespace in scans. Inodes are used again soon, but not with the same first process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NamespaceIdentity {
    inode: u64,
    /// Lowest process id in the namespace.
    pid: u32,
}

/// Namespace that was looked at.
#[derive(Clone, Copy, Debug)]
struct SeenNamespace {
    first_look: Instant,
    next_look: Instant,
    /// Cookie of the namespace, if it is meshed.
    meshed_cookie: Option<u64>,
}

/// Namespaces that the latest scan has found.
#[derive(Debug, Default)]
struct SeenNamespaces {
    seen: BTreeMap<NamespaceIdentity, SeenNamespace>,
    /// Cookies of meshed namespaces that an earlier agent has found, until a scan has read all namespaces.
    earlier: BTreeSet<u64>,
}

impl SeenNamespaces {
    /// Starts with the cookies of the meshed namespaces that an earlier agent has found.
    fn new(earlier: BTreeSet<u64>) -> Self {
        Self { seen: BTreeMap::new(), earlier }
    }

    /// Returns those of the present namespaces that are to be looked at, and forgets all that are not present. The
    /// processes `unknown` may be in any namespace, so those that they were first in stay.
    fn due(
        &mut self,
        now: Instant,
        present: &BTreeSet<NamespaceIdentity>,
        unknown: &BTreeSet<u32>,
    ) -> Vec<NamespaceIdentity> {
        let may_be_present =
            |it: &NamespaceIdentity| present.contains(it) || unknown.contains(&it.pid);
        self.seen.retain(|identity, _| may_be_present(identity));
        let is_due =
            |it: &&NamespaceIdentity| self.seen.get(*it).is_none_or(|seen| now >= seen.next_look);
        present.iter().filter(is_due).copied().collect()
    }

    /// Records a look at a namespace: its cookie, if it is meshed.
    fn record(&mut self, now: Instant, identity: NamespaceIdentity, meshed_cookie: Option<u64>) {
        let first_look = self.seen.get(&identity).map_or(now, |it| it.first_look);
        let is_new = meshed_cookie.is_none() && now < first_look + NEW_FOR;
        let next_look = if is_new { now } else { now + LOOK_PERIOD };
        self.seen.insert(identity, SeenNamespace { first_look, next_look, meshed_cookie });
    }

    /// Records a look that has failed. What the look before has found stays: a kernel without netfilter refuses each
    /// look.
    fn record_failure(&mut self, now: Instant, identity: NamespaceIdentity) {
        let known = self.seen.get(&identity).and_then(|it| it.meshed_cookie);
        self.record(now, identity, known);
    }

    /// Records the end of a scan; `is_complete` is true if no look and no read has failed. Then what an earlier agent has
    /// found was found again, or is gone.
    fn finish_scan(&mut self, is_complete: bool) {
        if is_complete {
            self.earlier.clear();
        }
    }

    /// Returns the cookies of the meshed namespaces.
    fn meshed_cookies(&self) -> BTreeSet<u64> {
        let seen = self.seen.values().filter_map(|it| it.meshed_cookie);
        seen.chain(self.earlier.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes whose namespaces are not known, in most tests.
    const NONE: BTreeSet<u32> = BTreeSet::new();

    fn identity(inode: u64, pid: u32) -> NamespaceIdentity {
        NamespaceIdentity { inode, pid }
    }

    #[test]
    fn a_new_namespace_is_looked_at_in_each_scan_and_later_from_time_to_time() {
        let (start, pod) = (Instant::now(), identity(1, 10));
        let (mut seen, present) = (SeenNamespaces::default(), BTreeSet::from([pod]));
        let mut looks = Vec::new();
        for second in 0..=180 {
            let now = start + Duration::from_secs(second);
            for identity in seen.due(now, &present, &NONE) {
                seen.record(now, identity, None);
                looks.push(second);
            }
        }
        assert_eq!(looks, (0..=120).chain([150, 180]).collect::<Vec<u64>>());
    }

    #[test]
    fn a_meshed_namespace_stays_so_until_a_look_finds_no_rules() {
        let (start, pod) = (Instant::now(), identity(1, 10));
        let (mut seen, present) = (SeenNamespaces::default(), BTreeSet::from([pod]));
        assert_eq!(seen.due(start, &present, &NONE), [pod]);
        seen.record(start, pod, Some(7));
        assert_eq!(seen.due(start + Duration::from_secs(1), &present, &NONE), []);
        assert_eq!(seen.meshed_cookies(), [7].into());
        let later = start + LOOK_PERIOD;
        assert_eq!(seen.due(later, &present, &NONE), [pod]);
        seen.record(later, pod, None);
        assert_eq!(seen.meshed_cookies(), BTreeSet::new());
    }

    #[test]
    fn a_look_that_fails_changes_nothing_and_is_not_repeated_without_end() {
        let (start, meshed, other) = (Instant::now(), identity(1, 10), identity(2, 20));
        let (mut seen, present) = (SeenNamespaces::default(), BTreeSet::from([meshed, other]));
        seen.record(start, meshed, Some(7));
        seen.record_failure(start, other);
        let later = start + NEW_FOR;
        for identity in seen.due(later, &present, &NONE) {
            seen.record_failure(later, identity);
        }
        assert_eq!(seen.meshed_cookies(), [7].into());
        assert_eq!(seen.due(later + Duration::from_secs(1), &present, &NONE), []);
    }

    #[test]
    fn what_an_earlier_agent_has_found_stays_until_a_scan_has_read_all_namespaces() {
        let (now, pod) = (Instant::now(), identity(1, 10));
        let mut seen = SeenNamespaces::new([7, 8].into());
        seen.finish_scan(false);
        assert_eq!(seen.meshed_cookies(), [7, 8].into(), "no look at them has succeeded");
        seen.record(now, pod, Some(7));
        seen.finish_scan(true);
        assert_eq!(seen.meshed_cookies(), [7].into());
    }

    #[test]
    fn a_namespace_whose_process_cannot_be_read_stays_as_it_was() {
        let (start, pod, other) = (Instant::now(), identity(1, 10), identity(2, 20));
        let mut seen = SeenNamespaces::default();
        seen.record(start, pod, Some(7));
        seen.record(start, other, Some(8));
        // The next scan reads neither of them, and knows that the second one has ended.
        assert_eq!(seen.due(start, &BTreeSet::new(), &[10].into()), []);
        assert_eq!(seen.meshed_cookies(), [7].into());
        assert_eq!(seen.due(start, &[pod].into(), &NONE), [], "its next look is not due");
        assert_eq!(seen.meshed_cookies(), [7].into());
    }

    #[test]
    fn a_namespace_with_the_inode_of_an_earlier_one_is_looked_at_at_once() {
        let (now, earlier, next) = (Instant::now(), identity(1, 10), identity(1, 11));
        let mut seen = SeenNamespaces::default();
        seen.record(now, earlier, Some(7));
        assert_eq!(seen.due(now, &[next].into(), &NONE), [next]);
        assert_eq!(seen.meshed_cookies(), BTreeSet::new(), "the earlier one is gone");
    }
}
