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
    /// Its cookie, if it is meshed.
    meshed_cookie: Option<u64>,
}

/// Namespaces that the latest scan has found.
#[derive(Debug, Default)]
struct SeenNamespaces(BTreeMap<NamespaceIdentity, SeenNamespace>);

impl SeenNamespaces {
    /// Returns those of the present namespaces that are to be looked at, and forgets all that are not present.
    fn due(
        &mut self,
        now: Instant,
        present: &BTreeSet<NamespaceIdentity>,
    ) -> Vec<NamespaceIdentity> {
        self.0.retain(|identity, _| present.contains(identity));
        let is_due =
            |it: &&NamespaceIdentity| self.0.get(*it).is_none_or(|seen| now >= seen.next_look);
        present.iter().filter(is_due).copied().collect()
    }

    /// Records a look at a namespace: its cookie, if it is meshed.
    fn record(&mut self, now: Instant, identity: NamespaceIdentity, meshed_cookie: Option<u64>) {
        let first_look = self.0.get(&identity).map_or(now, |it| it.first_look);
        let is_new = meshed_cookie.is_none() && now < first_look + NEW_FOR;
        let next_look = if is_new { now } else { now + LOOK_PERIOD };
        self.0.insert(identity, SeenNamespace { first_look, next_look, meshed_cookie });
    }

    /// Records a look that has failed. What the look before has found stays: a kernel without netfilter refuses each
    /// look.
    fn record_failure(&mut self, now: Instant, identity: NamespaceIdentity) {
        let known = self.0.get(&identity).and_then(|it| it.meshed_cookie);
        self.record(now, identity, known);
    }

    /// Returns the cookies of the meshed namespaces.
    fn meshed_cookies(&self) -> BTreeSet<u64> {
        self.0.values().filter_map(|it| it.meshed_cookie).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            for identity in seen.due(now, &present) {
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
        assert_eq!(seen.due(start, &present), [pod]);
        seen.record(start, pod, Some(7));
        assert_eq!(seen.due(start + Duration::from_secs(1), &present), []);
        assert_eq!(seen.meshed_cookies(), [7].into());
        let later = start + LOOK_PERIOD;
        assert_eq!(seen.due(later, &present), [pod]);
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
        for identity in seen.due(later, &present) {
            seen.record_failure(later, identity);
        }
        assert_eq!(seen.meshed_cookies(), [7].into());
        assert_eq!(seen.due(later + Duration::from_secs(1), &present), []);
    }

    #[test]
    fn a_namespace_with_the_inode_of_an_earlier_one_is_looked_at_at_once() {
        let (now, earlier, next) = (Instant::now(), identity(1, 10), identity(1, 11));
        let mut seen = SeenNamespaces::default();
        seen.record(now, earlier, Some(7));
        assert_eq!(seen.due(now, &[next].into()), [next]);
        assert_eq!(seen.meshed_cookies(), BTreeSet::new(), "the earlier one is gone");
    }
}
