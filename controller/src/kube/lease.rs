//! Pure: leader election. The holder of one Lease renews it; others acquire it when it is released or not renewed.
//!
//! All times are of this process's monotonic clock: times in the Lease are of another machine's clock, and only a
//! change of the Lease counts. The holder counts from before its renewal request, the others from when they saw the
//! change. So the holder stops `renew` after its last success, and no other replica acquires the Lease before
//! `duration` after it. Replicas may run with different settings: each waits at least the duration that the holder
//! wrote into the Lease.

use std::time::Duration;

use crate::config_maps::LeaderElectionConfig;

/// Time since this process began.
pub type MonotonicTime = Duration;

/// Times of the leader election, from the ConfigMap `config-leader-election`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Time without renewal after which other replicas acquire the Lease.
    pub duration: Duration,
    /// Time after its last renewal at which the holder stops writing.
    pub renew: Duration,
    /// Time between two attempts of a replica.
    pub retry: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self::from(&LeaderElectionConfig::default())
    }
}

impl From<&LeaderElectionConfig> for LeaseTiming {
    fn from(it: &LeaderElectionConfig) -> Self {
        Self { duration: it.lease, renew: it.renew, retry: it.retry }
    }
}

impl LeaseTiming {
    /// Returns the duration for the Lease's field: whole seconds, rounded up, at least 1.
    pub fn written_seconds(&self) -> i32 {
        let begun = u64::from(self.duration.subsec_nanos() > 0);
        i32::try_from(self.duration.as_secs().saturating_add(begun)).unwrap_or(i32::MAX).max(1)
    }
}

/// The Lease as the API server holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Value of the Lease's `resourceVersion`.
    pub version: String,
    /// Identity of the holder; empty after a release.
    pub holder: String,
    /// Duration that the holder wrote into the Lease; zero: none.
    pub duration: Duration,
}

/// Next action of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// No action before the next attempt.
    Wait,
    /// Write this replica's identity into this version of the Lease; `None`: create the Lease.
    Take(Option<String>),
}

/// One replica's view of the Lease.
#[derive(Debug)]
pub struct LeaseState {
    me: String,
    times: LeaseTiming,
    /// The newest record, with the time at which it was first seen.
    seen: Option<(LeaseRecord, MonotonicTime)>,
    /// Time at which the last successful renewal began; `None`: not the holder.
    renewed: Option<MonotonicTime>,
}

impl LeaseState {
    /// Returns a view without any record.
    pub fn new(me: impl Into<String>, times: LeaseTiming) -> Self {
        Self { me: me.into(), times, seen: None, renewed: None }
    }

    /// Handles a Lease that was read; `None`: no Lease exists.
    pub fn saw(&mut self, record: Option<LeaseRecord>, now: MonotonicTime) -> LeaseAction {
        let Some(record) = record else {
            (self.seen, self.renewed) = (None, None);
            return LeaseAction::Take(None);
        };
        let mine = record.holder == self.me;
        if !mine {
            self.renewed = None;
        }
        // The same version means no renewal since, so the time of its first sight still counts.
        let same = self.seen.as_ref().filter(|(have, _)| have.version == record.version);
        let since = same.map_or(now, |(_, since)| *since);
        let patience = self.times.duration.max(record.duration);
        let free = record.holder.is_empty() || now.saturating_sub(since) >= patience;
        let version = record.version.clone();
        self.seen = Some((record, since));
        // A record with our identity that we never wrote is from before a restart, and may be replaced.
        if mine || free { LeaseAction::Take(Some(version)) } else { LeaseAction::Wait }
    }

    /// Handles a successful write of our identity; `began` is the time before the request.
    pub fn took(&mut self, version: String, began: MonotonicTime, now: MonotonicTime) {
        let (holder, duration) = (self.me.clone(), self.times.duration);
        self.seen = Some((LeaseRecord { version, holder, duration }, now));
        self.renewed = Some(began);
    }

    /// Handles a refused write: another replica wrote first and may be the holder now.
    pub fn lost(&mut self) {
        self.renewed = None;
    }

    /// Returns the version to renew without reading it first, if this replica is the holder.
    pub fn held(&self) -> Option<String> {
        self.renewed?;
        self.seen.as_ref().map(|(record, _)| record.version.clone())
    }

    /// Returns the end of the permission to write, if this replica is the holder.
    pub fn valid_until(&self) -> Option<MonotonicTime> {
        self.renewed.map(|at| at + self.times.renew)
    }

    /// Returns true if this replica may write.
    pub fn may_write(&self, now: MonotonicTime) -> bool {
        self.valid_until().is_some_and(|end| now < end)
    }

    /// Ends the permission to write. Returns the version to release, if this replica is the holder.
    pub fn release(&mut self) -> Option<String> {
        let version = self.held();
        self.renewed = None;
        version
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> MonotonicTime {
        Duration::from_millis(ms)
    }

    fn record(version: &str, holder: &str) -> Option<LeaseRecord> {
        Some(LeaseRecord { version: version.into(), holder: holder.into(), duration: at(5000) })
    }

    fn take(version: &str) -> LeaseAction {
        LeaseAction::Take(Some(version.into()))
    }

    #[test]
    fn takes_a_lease_that_is_missing_or_released() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.saw(None, at(0)), LeaseAction::Take(None));
        assert!(!lease.may_write(at(0)), "not before it is written");
        assert_eq!(lease.saw(record("3", ""), at(1)), take("3"));
    }

    #[test]
    fn waits_for_a_holder_that_renews_and_replaces_one_that_stands_still() {
        let mut lease = LeaseState::new("b", LeaseTiming::default());
        for second in 0..20_u64 {
            let seen = record(&second.to_string(), "a");
            assert_eq!(lease.saw(seen, at(second * 1000)), LeaseAction::Wait);
        }
        assert_eq!(lease.saw(record("19", "a"), at(23_999)), LeaseAction::Wait);
        assert_eq!(lease.saw(record("19", "a"), at(24_000)), take("19"));
    }

    #[test]
    fn waits_for_as_long_as_the_holder_wrote_where_that_is_longer() {
        let mut lease = LeaseState::new("b", LeaseTiming::default());
        let seen = LeaseRecord { duration: at(60_000), ..record("1", "a").unwrap() };
        assert_eq!(lease.saw(Some(seen.clone()), at(0)), LeaseAction::Wait);
        assert_eq!(lease.saw(Some(seen.clone()), at(59_999)), LeaseAction::Wait);
        assert_eq!(lease.saw(Some(seen), at(60_000)), take("1"));
        let brief = LeaseRecord { duration: at(1000), ..record("2", "a").unwrap() };
        assert_eq!(lease.saw(Some(brief.clone()), at(60_000)), LeaseAction::Wait);
        assert_eq!(lease.saw(Some(brief), at(64_999)), LeaseAction::Wait, "our own holds at least");
    }

    #[test]
    fn the_lease_says_its_duration_in_seconds_begun() {
        for (ms, seconds) in [(1, 1), (1000, 1), (1001, 2), (5000, 5), (60_000, 60)] {
            let times = LeaseTiming { duration: at(ms), ..LeaseTiming::default() };
            assert_eq!(times.written_seconds(), seconds);
        }
    }

    #[test]
    fn writes_until_three_seconds_after_the_last_renewal_was_begun() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        lease.took("1".into(), at(1000), at(2500));
        assert!(lease.may_write(at(3999)));
        assert!(!lease.may_write(at(4000)));
        assert_eq!(lease.held(), Some("1".into()));
        lease.took("2".into(), at(3500), at(3600));
        assert!(lease.may_write(at(6499)));
    }

    #[test]
    fn stops_at_once_when_another_holds_it_or_it_is_gone() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        for news in [record("2", "b"), None] {
            lease.took("1".into(), at(0), at(0));
            lease.saw(news, at(10));
            assert!(!lease.may_write(at(10)));
        }
        lease.took("1".into(), at(0), at(0));
        lease.lost();
        assert!(!lease.may_write(at(10)));
    }

    #[test]
    fn a_lease_of_our_own_name_from_before_a_restart_is_taken_anew() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.saw(record("9", "a"), at(0)), take("9"));
        assert!(!lease.may_write(at(0)), "the last process of this name may have promised nothing");
    }

    #[test]
    fn releases_only_what_it_holds() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.release(), None);
        lease.took("4".into(), at(0), at(0));
        assert_eq!(lease.release(), Some("4".into()));
        assert!(!lease.may_write(at(1)));
    }

    proptest! {
        /// Two replicas, one perhaps with longer times, and a server that loses requests and responses: never may both
        /// write.
        #[test]
        fn two_never_write_at_once(
            events in prop::collection::vec((0_usize..2, 0_u64..2500, 0_u64..1500, 0_u8..4), 1..60),
            longer in 1_u32..12,
        ) {
            let usual = LeaseTiming::default();
            let long = LeaseTiming { duration: usual.duration * longer, renew: usual.renew * longer, ..usual };
            let times = [usual, long];
            let mut replicas = [LeaseState::new("a", usual), LeaseState::new("b", long)];
            let (mut now, mut server, mut next) = (0, None::<LeaseRecord>, 1_u64);
            for (who, pause, took, luck) in events {
                now += pause;
                let writing = replicas.iter().filter(|it| it.may_write(at(now))).count();
                prop_assert!(writing <= 1, "both write at {now} ms");
                let began = at(now);
                let replica = &mut replicas[who];
                let step = match replica.held() {
                    Some(version) => LeaseAction::Take(Some(version)),
                    // The read failed.
                    None if luck == 0 => continue,
                    None => replica.saw(server.clone(), at(now)),
                };
                let LeaseAction::Take(version) = step else { continue };
                // The request never arrived.
                if luck == 1 {
                    continue;
                }
                if server.as_ref().map(|it| it.version.clone()) != version {
                    replica.lost();
                    continue;
                }
                let holder = ["a", "b"][who].to_owned();
                let duration = times[who].duration;
                server = Some(LeaseRecord { version: next.to_string(), holder, duration });
                next += 1;
                // The response was late; with other values of `luck` it never arrived.
                if luck == 3 {
                    replica.took((next - 1).to_string(), began, at(now + took));
                }
            }
        }
    }
}
