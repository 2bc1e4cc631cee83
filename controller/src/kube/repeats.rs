//! Pure: objects that are written with the same content again and again.
//!
//! Something undoes such a write, and writing as fast as it is undone keeps both busy and helps neither. The first few
//! are done at once, since users delete things to have them made again; each later one waits twice as long.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use super::Key;
use crate::world::Stamp;

/// So many writes of the same are done at once.
const AT_ONCE: u32 = 30;
/// First wait after those.
const FIRST_MS: u64 = 1000;
/// Longest wait.
const LONGEST_MS: u64 = 60_000;
/// What was not written for so long is not written again and again.
const CALM_MS: u64 = 300_000;

/// Writes of one object since its content changed.
#[derive(Clone, Copy, Debug)]
struct Writes {
    body: u64,
    count: u32,
    last: Stamp,
    is_told: bool,
}

/// How often each object was written lately.
#[derive(Debug, Default)]
pub struct Repeats {
    /// By a hash of the key; what was not written since `turned` is in `old`.
    young: HashMap<u64, Writes>,
    old: HashMap<u64, Writes>,
    turned: Stamp,
}

/// A write that must wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// So long.
    pub ms: u64,
    /// After so many.
    pub writes: u32,
    /// No event told of it before.
    pub is_new: bool,
}

impl Repeats {
    /// Whether the object of `key` must wait before it is written with a content of this hash.
    pub fn wait(&mut self, key: &Key, body: u64, now: Stamp) -> Option<Wait> {
        self.forget(now);
        let (at, mut writes) = self.known(key, body, now)?;
        let due = writes.last.plus_ms(patience(writes.count));
        let wait =
            Wait { ms: due.0.saturating_sub(now.0), writes: writes.count, is_new: !writes.is_told };
        if wait.ms == 0 {
            return None;
        }
        writes.is_told = true;
        self.young.insert(at, writes);
        Some(wait)
    }

    /// It was written so.
    pub fn wrote(&mut self, key: &Key, body: u64, now: Stamp) {
        self.forget(now);
        let first = Writes { body, count: 0, last: now, is_told: false };
        let (at, mut writes) = self.known(key, body, now).unwrap_or_else(|| (hash(key), first));
        (writes.count, writes.last) = (writes.count.saturating_add(1), now);
        self.young.insert(at, writes);
    }

    /// Writes of the same content that are not long ago.
    fn known(&self, key: &Key, body: u64, now: Stamp) -> Option<(u64, Writes)> {
        let at = hash(key);
        let known = self.young.get(&at).or_else(|| self.old.get(&at)).copied()?;
        (known.body == body && now < known.last.plus_ms(CALM_MS)).then_some((at, known))
    }

    /// Drops what is old, a generation at a time.
    pub fn forget(&mut self, now: Stamp) {
        if now >= self.turned.plus_ms(CALM_MS) {
            self.old = std::mem::take(&mut self.young);
            self.turned = now;
        }
    }
}

fn hash(key: &Key) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

/// How long the next write waits after so many.
fn patience(writes: u32) -> u64 {
    match writes.checked_sub(AT_ONCE) {
        None => 0,
        Some(more) => FIRST_MS.saturating_mul(1 << more.min(20)).min(LONGEST_MS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{children::Resource, kube::Part};
    use common::wire::Name;

    fn key(own: &str) -> Key {
        Key::new(Resource::Deployment, Part::Object, Name::new("default", own))
    }

    /// Writes, unless it must wait.
    fn write(repeats: &mut Repeats, key: &Key, body: u64, now: Stamp) -> Option<Wait> {
        let wait = repeats.wait(key, body, now);
        if wait.is_none() {
            repeats.wrote(key, body, now);
        }
        wait
    }

    /// Moments at which `key` is written in an hour, if asked for every 100 ms.
    fn written(body: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut repeats = Repeats::default();
        let moments = (0..36_000).map(|it| it * 100);
        moments
            .filter(|at| write(&mut repeats, &key("a"), body(*at), Stamp(1 + at)).is_none())
            .collect()
    }

    #[test]
    fn what_is_undone_each_time_is_written_ever_more_slowly() {
        let all = written(|_| 7);
        let at_once: Vec<u64> = (0..30).map(|it| it * 100).collect();
        assert_eq!(all[..30], at_once, "users may delete things");
        let waits: Vec<u64> = all[29..].windows(2).map(|it| it[1] - it[0]).collect();
        assert!(waits.windows(2).all(|it| it[0] <= it[1]), "{waits:?}");
        assert_eq!(waits.last(), Some(&LONGEST_MS));
        assert!(all.len() < 104, "{} writes in an hour", all.len());
    }

    #[test]
    fn another_content_is_written_at_once() {
        assert_eq!(written(|at| at).len(), 36_000);
    }

    #[test]
    fn it_is_told_once_and_forgotten_after_a_while() {
        let mut repeats = Repeats::default();
        let mut ask = |at| write(&mut repeats, &key("a"), 7, Stamp(at));
        (0..30).for_each(|_| assert_eq!(ask(10), None));
        assert_eq!(ask(10), Some(Wait { ms: 1000, writes: 30, is_new: true }));
        assert_eq!(ask(20), Some(Wait { ms: 990, writes: 30, is_new: false }));
        assert_eq!(ask(10 + CALM_MS), None);
        (0..29).for_each(|_| assert_eq!(ask(10 + CALM_MS), None, "it begins again"));
        assert_eq!(ask(10 + CALM_MS).map(|it| it.is_new), Some(true));
        repeats.forget(Stamp(20 + 2 * CALM_MS));
        repeats.forget(Stamp(30 + 3 * CALM_MS));
        assert_eq!((repeats.young.len(), repeats.old.len()), (0, 0));
    }

    #[test]
    fn what_could_not_be_written_is_no_repetition() {
        let mut repeats = Repeats::default();
        (0..100).for_each(|at| assert_eq!(repeats.wait(&key("a"), 7, Stamp(at)), None));
    }

    #[test]
    fn objects_do_not_wait_for_each_other() {
        let mut repeats = Repeats::default();
        for own in 0..1000 {
            assert_eq!(write(&mut repeats, &key(&own.to_string()), 7, Stamp(1)), None);
        }
    }
}
