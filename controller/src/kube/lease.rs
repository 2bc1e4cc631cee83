//! Pure: who writes. One Lease; its holder renews it, the others take it over when it is free or has stood still.
//!
//! Times are this process's own and monotonic: what a Lease says of time is another machine's clock, and only that
//! it changed is of use. The holder counts from before it asked to renew, the others from when they saw the change,
//! so the holder stops `renew` after its last success while nobody takes over before `duration` after it. Replicas may
//! have been started with different times: nobody takes over before the duration that the holder wrote into the Lease.

use std::time::Duration;

use crate::config_maps::LeaderElection;

/// A moment since this process began.
pub type Moment = Duration;

/// How long a lease holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// The others take over a lease that stood still for so long.
    pub duration: Duration,
    /// The holder stops writing so long after it last renewed.
    pub renew: Duration,
    /// Between two attempts of anybody.
    pub retry: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self::from(&LeaderElection::default())
    }
}

impl From<&LeaderElection> for Times {
    fn from(it: &LeaderElection) -> Self {
        Self { duration: it.lease, renew: it.renew, retry: it.retry }
    }
}

impl Times {
    /// What the Lease says of them: whole seconds, of which it wants at least one.
    pub fn written_seconds(&self) -> i32 {
        let begun = u64::from(self.duration.subsec_nanos() > 0);
        i32::try_from(self.duration.as_secs().saturating_add(begun)).unwrap_or(i32::MAX).max(1)
    }
}

/// What the API server holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which version of the Lease this is.
    pub version: String,
    /// Who holds it; empty when it was released.
    pub holder: String,
    /// For how long it holds, by its holder's word; zero: it says nothing.
    pub duration: Duration,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing before the next attempt.
    Wait,
    /// Write ourselves in: into this version, or where there is no Lease, a new one.
    Take(Option<String>),
}

/// One replica's view of the lease.
#[derive(Debug)]
pub struct Lease {
    me: String,
    times: Times,
    /// The newest record, and when it was first seen.
    seen: Option<(Record, Moment)>,
    /// When the last successful renewal was begun.
    renewed: Option<Moment>,
}

impl Lease {
    /// Nothing is known yet.
    pub fn new(me: impl Into<String>, times: Times) -> Self {
        Self { me: me.into(), times, seen: None, renewed: None }
    }

    /// The Lease was read.
    pub fn saw(&mut self, record: Option<Record>, now: Moment) -> Step {
        let Some(record) = record else {
            (self.seen, self.renewed) = (None, None);
            return Step::Take(None);
        };
        let mine = record.holder == self.me;
        if !mine {
            self.renewed = None;
        }
        let same = self.seen.as_ref().filter(|(have, _)| have.version == record.version);
        let since = same.map_or(now, |(_, since)| *since);
        let patience = self.times.duration.max(record.duration);
        let free = record.holder.is_empty() || now.saturating_sub(since) >= patience;
        let version = record.version.clone();
        self.seen = Some((record, since));
        // One that bears our name although we never took it is from before a restart: it is ours to take.
        if mine || free { Step::Take(Some(version)) } else { Step::Wait }
    }

    /// We have written ourselves in; `began` is from before we asked.
    pub fn took(&mut self, version: String, began: Moment, now: Moment) {
        let (holder, duration) = (self.me.clone(), self.times.duration);
        self.seen = Some((Record { version, holder, duration }, now));
        self.renewed = Some(began);
    }

    /// We were refused: somebody else wrote first. What we held may be theirs now.
    pub fn lost(&mut self) {
        self.renewed = None;
    }

    /// The version to renew, without reading it first.
    pub fn held(&self) -> Option<String> {
        self.renewed?;
        self.seen.as_ref().map(|(record, _)| record.version.clone())
    }

    /// Until when we may write, if we may.
    pub fn valid_until(&self) -> Option<Moment> {
        self.renewed.map(|at| at + self.times.renew)
    }

    /// Whether we may write.
    pub fn may_write(&self, now: Moment) -> bool {
        self.valid_until().is_some_and(|end| now < end)
    }

    /// We stop: the version to release, if it is ours.
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

    fn at(ms: u64) -> Moment {
        Duration::from_millis(ms)
    }

    fn record(version: &str, holder: &str) -> Option<Record> {
        Some(Record { version: version.into(), holder: holder.into(), duration: at(5000) })
    }

    fn take(version: &str) -> Step {
        Step::Take(Some(version.into()))
    }

    #[test]
    fn takes_a_lease_that_is_missing_or_released() {
        let mut lease = Lease::new("a", Times::default());
        assert_eq!(lease.saw(None, at(0)), Step::Take(None));
        assert!(!lease.may_write(at(0)), "not before it is written");
        assert_eq!(lease.saw(record("3", ""), at(1)), take("3"));
    }

    #[test]
    fn waits_for_a_holder_that_renews_and_replaces_one_that_stands_still() {
        let mut lease = Lease::new("b", Times::default());
        for second in 0..20_u64 {
            let seen = record(&second.to_string(), "a");
            assert_eq!(lease.saw(seen, at(second * 1000)), Step::Wait);
        }
        assert_eq!(lease.saw(record("19", "a"), at(23_999)), Step::Wait);
        assert_eq!(lease.saw(record("19", "a"), at(24_000)), take("19"));
    }

    #[test]
    fn waits_for_as_long_as_the_holder_wrote_where_that_is_longer() {
        let mut lease = Lease::new("b", Times::default());
        let seen = Record { duration: at(60_000), ..record("1", "a").unwrap() };
        assert_eq!(lease.saw(Some(seen.clone()), at(0)), Step::Wait);
        assert_eq!(lease.saw(Some(seen.clone()), at(59_999)), Step::Wait);
        assert_eq!(lease.saw(Some(seen), at(60_000)), take("1"));
        let brief = Record { duration: at(1000), ..record("2", "a").unwrap() };
        assert_eq!(lease.saw(Some(brief.clone()), at(60_000)), Step::Wait);
        assert_eq!(lease.saw(Some(brief), at(64_999)), Step::Wait, "our own holds at least");
    }

    #[test]
    fn the_lease_says_its_duration_in_seconds_begun() {
        for (ms, seconds) in [(1, 1), (1000, 1), (1001, 2), (5000, 5), (60_000, 60)] {
            let times = Times { duration: at(ms), ..Times::default() };
            assert_eq!(times.written_seconds(), seconds);
        }
    }

    #[test]
    fn writes_until_three_seconds_after_the_last_renewal_was_begun() {
        let mut lease = Lease::new("a", Times::default());
        lease.took("1".into(), at(1000), at(2500));
        assert!(lease.may_write(at(3999)));
        assert!(!lease.may_write(at(4000)));
        assert_eq!(lease.held(), Some("1".into()));
        lease.took("2".into(), at(3500), at(3600));
        assert!(lease.may_write(at(6499)));
    }

    #[test]
    fn stops_at_once_when_another_holds_it_or_it_is_gone() {
        let mut lease = Lease::new("a", Times::default());
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
        let mut lease = Lease::new("a", Times::default());
        assert_eq!(lease.saw(record("9", "a"), at(0)), take("9"));
        assert!(!lease.may_write(at(0)), "the last process of this name may have promised nothing");
    }

    #[test]
    fn releases_only_what_it_holds() {
        let mut lease = Lease::new("a", Times::default());
        assert_eq!(lease.release(), None);
        lease.took("4".into(), at(0), at(0));
        assert_eq!(lease.release(), Some("4".into()));
        assert!(!lease.may_write(at(1)));
    }

    proptest! {
        /// Two replicas, one of which may have been started with longer times, and a server that loses requests and
        /// answers: never do both believe that they may write.
        #[test]
        fn two_never_write_at_once(
            events in prop::collection::vec((0_usize..2, 0_u64..2500, 0_u64..1500, 0_u8..4), 1..60),
            longer in 1_u32..12,
        ) {
            let usual = Times::default();
            let long = Times { duration: usual.duration * longer, renew: usual.renew * longer, ..usual };
            let times = [usual, long];
            let mut replicas = [Lease::new("a", usual), Lease::new("b", long)];
            let (mut now, mut server, mut next) = (0, None::<Record>, 1_u64);
            for (who, pause, took, luck) in events {
                now += pause;
                let writing = replicas.iter().filter(|it| it.may_write(at(now))).count();
                prop_assert!(writing <= 1, "both write at {now} ms");
                let began = at(now);
                let replica = &mut replicas[who];
                let step = match replica.held() {
                    Some(version) => Step::Take(Some(version)),
                    // Nothing was read.
                    None if luck == 0 => continue,
                    None => replica.saw(server.clone(), at(now)),
                };
                let Step::Take(version) = step else { continue };
                // The request never came.
                if luck == 1 {
                    continue;
                }
                if server.as_ref().map(|it| it.version.clone()) != version {
                    replica.lost();
                    continue;
                }
                let holder = ["a", "b"][who].to_owned();
                let duration = times[who].duration;
                server = Some(Record { version: next.to_string(), holder, duration });
                next += 1;
                // The answer took its time, or never came.
                if luck == 3 {
                    replica.took((next - 1).to_string(), began, at(now + took));
                }
            }
        }
    }
}
