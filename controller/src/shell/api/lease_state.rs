//! Pure: leader election. The holder of one Lease renews it; others acquire it when it is released or not renewed.
//!
//! All times are of this process's monotonic clock: times in the Lease are of another machine's clock, and only a
//! change of the Lease counts. The holder counts from before its renewal request, the others from when they saw the
//! change. So the holder stops `renew_deadline` after its last success, and no other replica acquires the Lease before
//! `lease_duration` after it. Replicas may run with different settings: each waits at least the duration that the
//! holder wrote into the Lease.

use std::time::Duration;

use crate::model::config_maps::LeaderElectionConfig;

/// Time since this process began.
pub type MonotonicTime = Duration;

/// Times of the leader election, from the ConfigMap `config-leader-election`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Time without renewal after which other replicas acquire the Lease.
    pub lease_duration: Duration,
    /// Time after its last renewal at which the holder stops writing.
    pub renew_deadline: Duration,
    /// Time between two attempts of a replica.
    pub retry_period: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self::from(&LeaderElectionConfig::default())
    }
}

impl From<&LeaderElectionConfig> for LeaseTiming {
    fn from(config: &LeaderElectionConfig) -> Self {
        Self {
            lease_duration: config.lease_duration,
            renew_deadline: config.renew_deadline,
            retry_period: config.retry_period,
        }
    }
}

impl LeaseTiming {
    /// Returns the duration for the Lease's field: whole seconds, rounded up, at least 1.
    pub fn lease_duration_seconds(&self) -> i32 {
        let partial_second = u64::from(self.lease_duration.subsec_nanos() > 0);
        i32::try_from(self.lease_duration.as_secs().saturating_add(partial_second))
            .unwrap_or(i32::MAX)
            .max(1)
    }
}

/// The Lease as the API server holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Value of the Lease's `resourceVersion`.
    pub resource_version: String,
    /// Identity of the holder; empty after a release.
    pub holder: String,
    /// Duration that the holder wrote into the Lease; zero: none.
    pub lease_duration: Duration,
}

/// Next action of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// No action before the next attempt.
    Wait,
    /// Write this replica's identity into this version of the Lease; `None`: create the Lease.
    Acquire(Option<String>),
}

/// One replica's view of the Lease.
#[derive(Debug)]
pub struct LeaseState {
    identity: String,
    timing: LeaseTiming,
    /// The newest record, with the time at which it was first seen.
    latest_record: Option<(LeaseRecord, MonotonicTime)>,
    /// Time at which the last successful renewal began; `None`: not the holder.
    renewed_at: Option<MonotonicTime>,
}

impl LeaseState {
    /// Returns a view without any record.
    pub fn new(me: impl Into<String>, timing: LeaseTiming) -> Self {
        Self { identity: me.into(), timing, latest_record: None, renewed_at: None }
    }

    /// Handles a Lease that was read; `None`: no Lease exists.
    pub fn handle_read(&mut self, record: Option<LeaseRecord>, now: MonotonicTime) -> LeaseAction {
        let Some(record) = record else {
            (self.latest_record, self.renewed_at) = (None, None);
            return LeaseAction::Acquire(None);
        };
        let mine = record.holder == self.identity;
        if !mine {
            self.renewed_at = None;
        }
        // The same version means no renewal since, so the time of its first sight still counts.
        let unchanged_since = self
            .latest_record
            .as_ref()
            .filter(|(known_record, _)| known_record.resource_version == record.resource_version);
        let since = unchanged_since.map_or(now, |(_, since)| *since);
        let wait = self.timing.lease_duration.max(record.lease_duration);
        let free = record.holder.is_empty() || now.saturating_sub(since) >= wait;
        let version = record.resource_version.clone();
        self.latest_record = Some((record, since));
        // A record with our identity that we never wrote is from before a restart, and may be replaced.
        if mine || free { LeaseAction::Acquire(Some(version)) } else { LeaseAction::Wait }
    }

    /// Handles a successful write of our identity; `began` is the time before the request.
    pub fn handle_written(&mut self, version: String, began: MonotonicTime, now: MonotonicTime) {
        let (holder, duration) = (self.identity.clone(), self.timing.lease_duration);
        self.latest_record = Some((
            LeaseRecord { resource_version: version, holder, lease_duration: duration },
            now,
        ));
        self.renewed_at = Some(began);
    }

    /// Handles a refused write: another replica wrote first and may be the holder now.
    pub fn handle_conflict(&mut self) {
        self.renewed_at = None;
    }

    /// Returns the version to renew without reading it first, if this replica is the holder.
    pub fn held_version(&self) -> Option<String> {
        self.renewed_at?;
        self.latest_record.as_ref().map(|(record, _)| record.resource_version.clone())
    }

    /// Returns the end of the permission to write, if this replica is the holder.
    pub fn valid_until(&self) -> Option<MonotonicTime> {
        self.renewed_at.map(|at| at + self.timing.renew_deadline)
    }

    /// Returns true if this replica may write.
    pub fn may_write(&self, now: MonotonicTime) -> bool {
        self.valid_until().is_some_and(|end| now < end)
    }

    /// Ends the permission to write. Returns the version to release, if this replica is the holder.
    pub fn release(&mut self) -> Option<String> {
        let version = self.held_version();
        self.renewed_at = None;
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
        Some(LeaseRecord {
            resource_version: version.into(),
            holder: holder.into(),
            lease_duration: at(5000),
        })
    }

    fn acquire(version: &str) -> LeaseAction {
        LeaseAction::Acquire(Some(version.into()))
    }

    #[test]
    fn takes_a_lease_that_is_missing_or_released() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.handle_read(None, at(0)), LeaseAction::Acquire(None));
        assert!(!lease.may_write(at(0)), "not before it is written");
        assert_eq!(lease.handle_read(record("3", ""), at(1)), acquire("3"));
    }

    #[test]
    fn waits_for_a_holder_that_renews_and_replaces_one_that_does_not() {
        let mut lease = LeaseState::new("b", LeaseTiming::default());
        for second in 0..20_u64 {
            let renewed = record(&second.to_string(), "a");
            assert_eq!(lease.handle_read(renewed, at(second * 1000)), LeaseAction::Wait);
        }
        assert_eq!(lease.handle_read(record("19", "a"), at(23_999)), LeaseAction::Wait);
        assert_eq!(lease.handle_read(record("19", "a"), at(24_000)), acquire("19"));
    }

    #[test]
    fn waits_for_as_long_as_the_holder_wrote_where_that_is_longer() {
        let mut lease = LeaseState::new("b", LeaseTiming::default());
        let renewed = LeaseRecord { lease_duration: at(60_000), ..record("1", "a").unwrap() };
        assert_eq!(lease.handle_read(Some(renewed.clone()), at(0)), LeaseAction::Wait);
        assert_eq!(lease.handle_read(Some(renewed.clone()), at(59_999)), LeaseAction::Wait);
        assert_eq!(lease.handle_read(Some(renewed), at(60_000)), acquire("1"));
        let brief = LeaseRecord { lease_duration: at(1000), ..record("2", "a").unwrap() };
        assert_eq!(lease.handle_read(Some(brief.clone()), at(60_000)), LeaseAction::Wait);
        assert_eq!(
            lease.handle_read(Some(brief), at(64_999)),
            LeaseAction::Wait,
            "our own holds at least"
        );
    }

    #[test]
    fn the_lease_duration_is_rounded_up_to_seconds() {
        for (ms, seconds) in [(1, 1), (1000, 1), (1001, 2), (5000, 5), (60_000, 60)] {
            let times = LeaseTiming { lease_duration: at(ms), ..LeaseTiming::default() };
            assert_eq!(times.lease_duration_seconds(), seconds);
        }
    }

    #[test]
    fn writes_until_three_seconds_after_the_last_renewal_was_begun() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        lease.handle_written("1".into(), at(1000), at(2500));
        assert!(lease.may_write(at(3999)));
        assert!(!lease.may_write(at(4000)));
        assert_eq!(lease.held_version(), Some("1".into()));
        lease.handle_written("2".into(), at(3500), at(3600));
        assert!(lease.may_write(at(6499)));
    }

    #[test]
    fn stops_at_once_when_another_holds_it_or_it_is_gone() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        for record_now in [record("2", "b"), None] {
            lease.handle_written("1".into(), at(0), at(0));
            lease.handle_read(record_now, at(10));
            assert!(!lease.may_write(at(10)));
        }
        lease.handle_written("1".into(), at(0), at(0));
        lease.handle_conflict();
        assert!(!lease.may_write(at(10)));
    }

    #[test]
    fn a_lease_held_under_our_name_before_a_restart_is_acquired_again() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.handle_read(record("9", "a"), at(0)), acquire("9"));
        assert!(!lease.may_write(at(0)), "the last process of this name may have promised nothing");
    }

    #[test]
    fn releases_only_what_it_holds() {
        let mut lease = LeaseState::new("a", LeaseTiming::default());
        assert_eq!(lease.release(), None);
        lease.handle_written("4".into(), at(0), at(0));
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
            let timing = LeaseTiming::default();
            let long = LeaseTiming {
                lease_duration: timing.lease_duration * longer,
                renew_deadline: timing.renew_deadline * longer,
                ..timing
            };
            let times = [timing, long];
            let mut replicas = [LeaseState::new("a", timing), LeaseState::new("b", long)];
            let (mut now, mut server, mut next) = (0, None::<LeaseRecord>, 1_u64);
            for (candidate, pause, took, luck) in events {
                now += pause;
                let writing = replicas.iter().filter(|it| it.may_write(at(now))).count();
                prop_assert!(writing <= 1, "both write at {now} ms");
                let began = at(now);
                let replica = &mut replicas[candidate];
                let step = match replica.held_version() {
                    Some(version) => LeaseAction::Acquire(Some(version)),
                    // The read failed.
                    None if luck == 0 => continue,
                    None => replica.handle_read(server.clone(), at(now)),
                };
                let LeaseAction::Acquire(version) = step else { continue };
                // The request never arrived.
                if luck == 1 {
                    continue;
                }
                if server.as_ref().map(|it| it.resource_version.clone()) != version {
                    replica.handle_conflict();
                    continue;
                }
                let holder = ["a", "b"][candidate].to_owned();
                let duration = times[candidate].lease_duration;
                server = Some(LeaseRecord { resource_version: next.to_string(), holder, lease_duration: duration });
                next += 1;
                // The response was late; with other values of `luck` it never arrived.
                if luck == 3 {
                    replica.handle_written((next - 1).to_string(), began, at(now + took));
                }
            }
        }
    }
}
