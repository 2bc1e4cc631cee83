//! Pure: objects that are written again and again with the same content.
//!
//! Another client undoes such a write, and writing as fast as it is undone keeps both busy and helps neither. The first
//! few writes are immediate, since users delete objects to have them recreated. Each later write waits twice as long.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use crate::model::{cluster_state::UnixMillis, object::ObjectPartKey};

/// Number of equal writes without a delay.
const UNDELAYED_WRITES: u32 = 30;
/// Delay of the first write after those.
const FIRST_DELAY_MS: u64 = 1000;
/// Longest delay of a write.
const MAX_DELAY_MS: u64 = 60_000;
/// Time without a write after which the count begins again.
const RESET_AFTER_MS: u64 = 300_000;

/// Writes of one object since its content last changed.
#[derive(Clone, Copy, Debug)]
struct EqualWrites {
    body_hash: u64,
    count: u32,
    last_write: UnixMillis,
    is_reported: bool,
}

/// Counts of the recent writes of each object with its present content.
#[derive(Debug, Default)]
pub struct RepeatedWrites {
    /// Counts by a hash of the key; entries not written since `rotated_at` are in `previous`.
    current: HashMap<u64, EqualWrites>,
    previous: HashMap<u64, EqualWrites>,
    rotated_at: UnixMillis,
}

/// Delay of a write, with its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepeatDelay {
    /// Length of the delay in milliseconds.
    pub delay_ms: u64,
    /// Number of equal writes so far.
    pub writes: u32,
    /// True if these writes were not reported yet: the caller writes an Event.
    pub is_unreported: bool,
}

impl RepeatedWrites {
    /// Returns the delay of the next write of `key` if its content has this hash, or `None` for no delay. Marks the
    /// equal writes as reported: the caller reports them if the result `is_unreported`.
    pub fn delay(
        &mut self,
        key: &ObjectPartKey,
        body_hash: u64,
        now: UnixMillis,
    ) -> Option<RepeatDelay> {
        self.expire(now);
        let (at, mut writes) = self.find_recent(key, body_hash, now)?;
        // The more equal writes, the longer the delay: two controllers may be undoing each other's changes.
        let due = writes.last_write.plus_ms(delay_ms(writes.count));
        let wait = RepeatDelay {
            delay_ms: due.0.saturating_sub(now.0),
            writes: writes.count,
            is_unreported: !writes.is_reported,
        };
        if wait.delay_ms == 0 {
            return None;
        }
        writes.is_reported = true;
        self.current.insert(at, writes);
        Some(wait)
    }

    /// Counts a write of `key` with a content of this hash.
    pub fn record_write(&mut self, key: &ObjectPartKey, body_hash: u64, now: UnixMillis) {
        self.expire(now);
        let first = EqualWrites { body_hash, count: 0, last_write: now, is_reported: false };
        let (at, mut writes) =
            self.find_recent(key, body_hash, now).unwrap_or_else(|| (key_hash(key), first));
        (writes.count, writes.last_write) = (writes.count.saturating_add(1), now);
        self.current.insert(at, writes);
    }

    /// Returns the recent writes of `key` with the same content, and the hash of the key.
    fn find_recent(
        &self,
        key: &ObjectPartKey,
        body_hash: u64,
        now: UnixMillis,
    ) -> Option<(u64, EqualWrites)> {
        let at = key_hash(key);
        let writes = self.current.get(&at).or_else(|| self.previous.get(&at)).copied()?;
        (writes.body_hash == body_hash && now < writes.last_write.plus_ms(RESET_AFTER_MS))
            .then_some((at, writes))
    }

    /// Drops old entries, one generation at a time.
    pub fn expire(&mut self, now: UnixMillis) {
        if now >= self.rotated_at.plus_ms(RESET_AFTER_MS) {
            // Two generations instead of a timer per entry: each entry lives for one to two periods.
            self.previous = std::mem::take(&mut self.current);
            self.rotated_at = now;
        }
    }
}

fn key_hash(key: &ObjectPartKey) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

/// Returns the delay of the next write after this many equal writes.
fn delay_ms(writes: u32) -> u64 {
    match writes.checked_sub(UNDELAYED_WRITES) {
        None => 0,
        Some(more) => FIRST_DELAY_MS.saturating_mul(1 << more.min(20)).min(MAX_DELAY_MS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::object::{ObjectPart, ResourceKind};
    use common::wire::NamespacedName;

    fn key(name: &str) -> ObjectPartKey {
        ObjectPartKey::new(
            ResourceKind::Deployment,
            ObjectPart::Object,
            NamespacedName::new("default", name),
        )
    }

    /// Writes unless the write must wait; returns the delay.
    fn write(
        repeats: &mut RepeatedWrites,
        key: &ObjectPartKey,
        body_hash: u64,
        now: UnixMillis,
    ) -> Option<RepeatDelay> {
        let wait = repeats.delay(key, body_hash, now);
        if wait.is_none() {
            repeats.record_write(key, body_hash, now);
        }
        wait
    }

    /// Returns the times at which `key` is written within an hour, if every 100 ms an attempt is made.
    fn written(body_hash: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut repeats = RepeatedWrites::default();
        let moments = (0..36_000).map(|it| it * 100);
        moments
            .filter(|at| {
                write(&mut repeats, &key("a"), body_hash(*at), UnixMillis(1 + at)).is_none()
            })
            .collect()
    }

    #[test]
    fn a_write_that_is_undone_each_time_is_delayed_more_and_more() {
        let all = written(|_| 7);
        let at_once: Vec<u64> = (0..30).map(|it| it * 100).collect();
        assert_eq!(all[..30], at_once, "users may delete things");
        let waits: Vec<u64> = all[29..].windows(2).map(|it| it[1] - it[0]).collect();
        assert!(waits.windows(2).all(|it| it[0] <= it[1]), "{waits:?}");
        assert_eq!(waits.last(), Some(&MAX_DELAY_MS));
        assert!(all.len() < 104, "{} writes in an hour", all.len());
    }

    #[test]
    fn another_content_is_written_at_once() {
        assert_eq!(written(|at| at).len(), 36_000);
    }

    #[test]
    fn a_repeated_write_is_reported_once_and_expires() {
        let mut repeats = RepeatedWrites::default();
        let mut ask = |at| write(&mut repeats, &key("a"), 7, UnixMillis(at));
        (0..30).for_each(|_| assert_eq!(ask(10), None));
        assert_eq!(ask(10), Some(RepeatDelay { delay_ms: 1000, writes: 30, is_unreported: true }));
        assert_eq!(ask(20), Some(RepeatDelay { delay_ms: 990, writes: 30, is_unreported: false }));
        assert_eq!(ask(10 + RESET_AFTER_MS), None);
        (0..29).for_each(|_| assert_eq!(ask(10 + RESET_AFTER_MS), None, "it begins again"));
        assert_eq!(ask(10 + RESET_AFTER_MS).map(|it| it.is_unreported), Some(true));
        repeats.expire(UnixMillis(20 + 2 * RESET_AFTER_MS));
        repeats.expire(UnixMillis(30 + 3 * RESET_AFTER_MS));
        assert_eq!((repeats.current.len(), repeats.previous.len()), (0, 0));
    }

    #[test]
    fn a_failed_write_is_no_repetition() {
        let mut repeats = RepeatedWrites::default();
        (0..100).for_each(|at| assert_eq!(repeats.delay(&key("a"), 7, UnixMillis(at)), None));
    }

    #[test]
    fn objects_do_not_wait_for_each_other() {
        let mut repeats = RepeatedWrites::default();
        for number in 0..1000 {
            assert_eq!(write(&mut repeats, &key(&number.to_string()), 7, UnixMillis(1)), None);
        }
    }
}
