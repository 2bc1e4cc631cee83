//! Pure: times at which each named Secret is read.
//!
//! A Secret that was usable is read again after [`READ_INTERVAL`]. After any other result the next reads come sooner at
//! first, since a user may be creating or correcting the Secret. All times count from the start of the reader.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::NamespacedName;

/// Time between two reads of a Secret that is usable, while there are at most 200 names. Issuers renew certificates
/// days before they expire, so a few seconds do not matter.
pub const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Time from a first read that gave nothing usable to the next one. It doubles each time, up to the interval.
pub const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Part of the interval for each name: the API server gets at most 20 repeated reads a second of usable Secrets.
const INTERVAL_FOR_EACH_NAME: Duration = Duration::from_millis(50);

/// Schedule of the reads of all named Secrets. At most one read of a Secret is in progress.
#[derive(Debug, Default)]
pub struct SecretSchedule {
    secrets: BTreeMap<NamespacedName, ScheduledSecret>,
    /// Reads that are not in progress, the earliest first.
    due: BTreeSet<(Duration, NamespacedName)>,
    /// Names whose read is in progress, also if they are no longer named.
    in_progress: BTreeSet<NamespacedName>,
    /// Number of names that no read has ended for.
    unread: usize,
}

/// Results of one Secret so far.
#[derive(Debug, Default)]
struct ScheduledSecret {
    has_been_read: bool,
    /// Time to the next read if the present one gives nothing usable; `None`: the last one was usable.
    retry: Option<Duration>,
}

impl SecretSchedule {
    /// Replaces the names. New ones are due at once, and those that are missing are no longer read.
    pub fn set_names(&mut self, names: &BTreeSet<NamespacedName>, now: Duration) {
        self.secrets.retain(|name, _| names.contains(name));
        self.due.retain(|(_, name)| names.contains(name));
        for name in names {
            if self.secrets.contains_key(name) {
                continue;
            }
            self.secrets.insert(name.clone(), ScheduledSecret::default());
            // A name may have left and come back during its read, whose result then counts.
            if !self.in_progress.contains(name) {
                self.due.insert((now, name.clone()));
            }
        }
        self.unread = self.secrets.values().filter(|it| !it.has_been_read).count();
    }

    /// Returns true if the Secret is named now.
    pub fn is_named(&self, name: &NamespacedName) -> bool {
        self.secrets.contains_key(name)
    }

    /// Begins the reads that are due, the earliest first, and returns their names: at most `most`. Each of them must be
    /// [recorded](Self::record) when it ends.
    pub fn take_due(&mut self, now: Duration, most: usize) -> Vec<NamespacedName> {
        let mut taken = Vec::new();
        while taken.len() < most && self.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, name)) = self.due.pop_first() else { break };
            self.in_progress.insert(name.clone());
            taken.push(name);
        }
        taken
    }

    /// Ends a read, and sets the time of the next one. Without effect for a name that is no longer named.
    pub fn record(&mut self, name: &NamespacedName, is_usable: bool, now: Duration) {
        let was_in_progress = self.in_progress.remove(name);
        let interval = self.interval();
        let Some(secret) = self.secrets.get_mut(name).filter(|_| was_in_progress) else { return };
        // Counted, so that the end of the first round is known without a search.
        if !std::mem::replace(&mut secret.has_been_read, true) {
            self.unread = self.unread.saturating_sub(1);
        }
        let pause = if is_usable {
            secret.retry = None;
            interval
        } else {
            let pause = secret.retry.unwrap_or(FIRST_RETRY).min(interval);
            secret.retry = Some(pause.saturating_mul(2));
            pause
        };
        self.due.insert((now.saturating_add(pause), name.clone()));
    }

    /// Returns the time of the earliest read that is not in progress.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns true if a read of each name has ended, whatever its result.
    pub fn has_read_all(&self) -> bool {
        self.unread == 0
    }

    /// Returns the time between two reads of one usable Secret.
    fn interval(&self) -> Duration {
        let count = u32::try_from(self.secrets.len()).unwrap_or(u32::MAX);
        READ_INTERVAL.max(INTERVAL_FOR_EACH_NAME.saturating_mul(count))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::*;

    fn name(number: usize) -> NamespacedName {
        NamespacedName::new("default", format!("s{number}"))
    }

    fn names(numbers: impl IntoIterator<Item = usize>) -> BTreeSet<NamespacedName> {
        numbers.into_iter().map(name).collect()
    }

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// Schedule with reads that end at chosen times, and what must hold of them.
    #[derive(Default)]
    struct ScheduleFixture {
        schedule: SecretSchedule,
        named: BTreeSet<NamespacedName>,
        reading: Vec<NamespacedName>,
        /// Time up to which the next read of each idle name must be due.
        bounds: BTreeMap<NamespacedName, Duration>,
        now: Duration,
    }

    impl ScheduleFixture {
        fn set_names(&mut self, numbers: &BTreeSet<usize>) {
            let named = names(numbers.iter().copied());
            self.schedule.set_names(&named, self.now);
            self.bounds.retain(|name, _| named.contains(name));
            for name in named.difference(&self.named).filter(|it| !self.reading.contains(it)) {
                self.bounds.insert(name.clone(), self.now);
            }
            self.named = named;
        }

        fn take(&mut self, most: usize) {
            let overdue = self.bounds.values().filter(|it| **it <= self.now).count();
            let taken = self.schedule.take_due(self.now, most);
            assert!(taken.len() <= most, "{} instead of {most}", taken.len());
            assert!(taken.len() >= overdue.min(most), "{overdue} reads are overdue");
            for name in taken {
                assert!(self.named.contains(&name), "{name} is not named");
                assert!(!self.reading.contains(&name), "{name} is read twice at once");
                self.bounds.remove(&name);
                self.reading.push(name);
            }
        }

        fn end_read(&mut self, index: usize, is_usable: bool) {
            if self.reading.is_empty() {
                return;
            }
            let name = self.reading.remove(index % self.reading.len());
            self.schedule.record(&name, is_usable, self.now);
            if self.named.contains(&name) {
                self.bounds.insert(name, self.now + self.schedule.interval());
            }
        }
    }

    proptest! {
        /// Names come and go, also during their reads, and reads end in any order.
        #[test]
        fn every_name_is_read_again_within_its_interval_and_never_more_than_allowed(
            ops in collection::vec((0_u8..8, 0_usize..6, any::<bool>(), 0_u64..12_000), 0..200),
        ) {
            let (mut fixture, mut numbers) = (ScheduleFixture::default(), BTreeSet::new());
            for (kind, number, flag, passed_ms) in ops {
                match kind {
                    0 => {
                        if !numbers.remove(&number) {
                            numbers.insert(number);
                        }
                        fixture.set_names(&numbers);
                    }
                    // Of two changes only the last one may be seen.
                    1 => fixture.set_names(&numbers),
                    2 | 3 => fixture.take(number),
                    4 | 5 => fixture.end_read(number, flag),
                    _ => fixture.now += Duration::from_millis(passed_ms),
                }
                let idle = fixture.schedule.due.len();
                prop_assert_eq!(idle, fixture.bounds.len(), "each idle name has one time");
                let bound = fixture.bounds.values().max();
                let last = fixture.schedule.due.last().map(|(at, _)| at);
                prop_assert!(last <= bound, "{:?} is after {:?}", last, bound);
            }
            while !fixture.reading.is_empty() {
                fixture.end_read(0, true);
            }
            fixture.now += fixture.schedule.interval();
            fixture.take(usize::MAX);
            prop_assert_eq!(fixture.reading.len(), fixture.named.len());
        }
    }

    #[test]
    fn a_secret_that_is_not_usable_is_read_sooner_at_first() {
        let mut schedule = SecretSchedule::default();
        schedule.set_names(&names([0]), seconds(0));
        let mut now = seconds(0);
        let pause_after = |is_usable| {
            assert_eq!(schedule.take_due(now, 8), [name(0)]);
            schedule.record(&name(0), is_usable, now);
            let (next, previous) = (schedule.next_due().expect("a next read"), now);
            now = next;
            (next - previous).as_secs()
        };
        let pauses = [false, false, false, false, false, false, true, true, false, false];
        assert_eq!(pauses.map(pause_after), [1, 2, 4, 8, 10, 10, 10, 10, 1, 2]);
    }

    #[test]
    fn many_names_are_read_less_often() {
        let mut schedule = SecretSchedule::default();
        schedule.set_names(&names(0..1_000), seconds(0));
        assert_eq!(schedule.take_due(seconds(0), 1_000).len(), 1_000);
        (0..1_000).for_each(|number| schedule.record(&name(number), true, seconds(0)));
        assert_eq!(schedule.next_due(), Some(seconds(50)));
    }

    #[test]
    fn all_are_read_once_each_new_name_has_a_result() {
        let mut schedule = SecretSchedule::default();
        assert!(schedule.has_read_all(), "of no names");
        schedule.set_names(&names([0, 1]), seconds(0));
        assert_eq!(schedule.take_due(seconds(0), 1), [name(0)]);
        schedule.record(&name(0), false, seconds(0));
        assert!(!schedule.has_read_all());
        // The other name leaves without a read.
        schedule.set_names(&names([0]), seconds(1));
        assert!(schedule.has_read_all());
        schedule.set_names(&names([0, 1]), seconds(1));
        assert!(!schedule.has_read_all());
    }

    /// Otherwise the older of two reads could end last, and its result would stay.
    #[test]
    fn a_name_that_comes_back_during_its_read_is_not_read_twice_at_once() {
        let mut schedule = SecretSchedule::default();
        schedule.set_names(&names([0]), seconds(0));
        assert_eq!(schedule.take_due(seconds(0), 8), [name(0)]);
        schedule.set_names(&names([]), seconds(1));
        assert!(!schedule.is_named(&name(0)));
        schedule.set_names(&names([0]), seconds(2));
        assert!(schedule.take_due(seconds(60), 8).is_empty());
        schedule.record(&name(0), true, seconds(60));
        assert!(schedule.has_read_all());
        assert_eq!(schedule.next_due(), Some(seconds(70)));
    }
}
