//! Shell: the latest state of each subject, and the changes that each stream has yet to send.
//!
//! All streams between the components are fed from an [`Outbox`]. A slow or broken stream never blocks its sender. It
//! makes it remember one state of each subject: the current one, or the last one until the stream has received the
//! removal. A state that changed several times while the stream was away is sent once.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// Latest state of each subject. Cheap to clone; all clones share one state.
pub struct Outbox<K, V> {
    shared: Arc<OutboxShared<K, V>>,
}

struct OutboxShared<K, V> {
    inner: Mutex<OutboxState<K, V>>,
    version: watch::Sender<u64>,
}

struct OutboxState<K, V> {
    version: u64,
    /// Latest state by subject. `None` marks a removed subject, kept until every cursor has passed it.
    states: HashMap<Arc<K>, (u64, Option<Box<V>>)>,
    /// Subjects by the version of their latest change.
    order: BTreeMap<u64, Arc<K>>,
    /// Versions of the removals whose marks are still kept, each with the last state that precedes the removal.
    removals: BTreeMap<u64, Option<Box<V>>>,
    /// Number of streams by the version that they have reached. Thousands of streams have a few versions.
    positions: BTreeMap<u64, usize>,
}

/// Next message of a stream: all changes since its cursor's version.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxBatch<K, V> {
    /// Version that the stream has reached when it has sent the batch.
    pub version: u64,
    /// Latest states, oldest change first; `None` for a removed subject. The last state of a removed subject may stand
    /// right before its removal.
    pub changes: Vec<(K, Option<V>)>,
}

/// Position of one stream in an [`Outbox`].
pub struct OutboxCursor<K: Eq + Hash + Clone, V: Clone> {
    outbox: Outbox<K, V>,
    delivered_version: u64,
    has_started: bool,
    changed: watch::Receiver<u64>,
}

impl<K: Eq + Hash + Clone, V: Clone + PartialEq> Outbox<K, V> {
    /// Stores the subject's state. A state equal to the stored one changes nothing.
    pub fn set(&self, key: K, value: V) {
        let mut inner = self.lock();
        if matches!(inner.states.get(&key), Some((_, Some(old))) if **old == value) {
            return;
        }
        inner.put_state(key, Some(Box::new(value)));
        self.notify_cursors(inner);
    }

    /// Removes the subject, which streams send as a removal.
    pub fn remove(&self, key: &K) {
        let mut inner = self.lock();
        if matches!(inner.states.get(key), Some((_, Some(_)))) {
            inner.put_removal(key.clone(), None);
            inner.drop_delivered_removals();
            self.notify_cursors(inner);
        }
    }

    /// Removes the subject. Streams send its `last` state and then the removal, where a [`set`](Self::set) and a
    /// [`remove`](Self::remove) would send the removal alone. A stream that begins later sends neither.
    pub fn remove_with_last(&self, key: K, last: V) {
        let mut inner = self.lock();
        inner.put_removal(key, Some(Box::new(last)));
        inner.drop_delivered_removals();
        self.notify_cursors(inner);
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Outbox<K, V> {
    /// Returns an empty outbox whose versions begin at 1.
    pub fn new() -> Self {
        Self::starting_at(1)
    }

    /// Returns an empty outbox whose versions begin at `version`, at least 1.
    ///
    /// Versions are comparable within one stream only. A sender that begins each start at another version, such as
    /// microseconds since 1970, keeps its versions distinguishable from those of its predecessor.
    pub fn starting_at(version: u64) -> Self {
        let inner = OutboxState {
            version,
            states: HashMap::new(),
            order: BTreeMap::new(),
            removals: BTreeMap::new(),
            positions: BTreeMap::new(),
        };
        let (version, _) = watch::channel(version);
        Self { shared: Arc::new(OutboxShared { inner: Mutex::new(inner), version }) }
    }

    /// Returns the version of the latest change.
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// Returns the version that every stream has reached; without any stream that of the latest change.
    pub fn delivered_version(&self) -> u64 {
        let inner = self.lock();
        inner.first_position().unwrap_or(inner.version)
    }

    /// Returns the subject's latest state, if it has one.
    pub fn get(&self, key: &K) -> Option<V> {
        self.lock().states.get(key).and_then(|(_, value)| value.as_deref().cloned())
    }

    /// Returns a cursor for a new stream, which begins with every state.
    pub fn subscribe(&self) -> OutboxCursor<K, V> {
        let mut inner = self.lock();
        inner.add_position(0);
        let changed = self.shared.version.subscribe();
        drop(inner);
        OutboxCursor { outbox: self.clone(), delivered_version: 0, has_started: false, changed }
    }

    fn lock(&self) -> MutexGuard<'_, OutboxState<K, V>> {
        // No code that runs under the lock panics between two dependent changes, so a poisoned lock is still
        // consistent.
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify_cursors(&self, inner: MutexGuard<'_, OutboxState<K, V>>) {
        let version = inner.version;
        drop(inner);
        // Two setters may arrive here in either order: the watched version only grows, so no wake-up is lost.
        self.shared.version.send_if_modified(|seen| {
            let newer = version > *seen;
            *seen = version.max(*seen);
            newer
        });
    }
}

impl<K: Eq + Hash, V> OutboxState<K, V> {
    fn put_state(&mut self, key: K, value: Option<Box<V>>) {
        self.version += 1;
        let key = match self.states.get_mut(&key) {
            // A subject has one entry in `order`: the one of its former version goes, and with it the mark of a
            // removal.
            Some(state) => {
                let (at, _) = std::mem::replace(state, (self.version, value));
                self.removals.remove(&at);
                self.order.remove(&at).expect("each state stands in the order under its version")
            }
            None => {
                let key = Arc::new(key);
                self.states.insert(Arc::clone(&key), (self.version, value));
                key
            }
        };
        self.order.insert(self.version, key);
    }

    /// Marks a subject as removed. Its `last` state, if any, is sent before the removal.
    fn put_removal(&mut self, key: K, last: Option<Box<V>>) {
        self.put_state(key, None);
        self.removals.insert(self.version, last);
    }

    /// Adds a stream that has received everything up to this version.
    fn add_position(&mut self, at: u64) {
        *self.positions.entry(at).or_default() += 1;
    }

    /// Removes a stream that [`add_position`](Self::add_position) has added at this version.
    fn remove_position(&mut self, at: u64) {
        let count = self.positions.get_mut(&at).expect("each stream is counted at its version");
        *count -= 1;
        if *count == 0 {
            self.positions.remove(&at);
        }
    }

    fn move_position(&mut self, from: u64, to: u64) {
        self.remove_position(from);
        self.add_position(to);
    }

    /// Returns the version that every stream has reached; `None` without any stream.
    fn first_position(&self) -> Option<u64> {
        self.positions.keys().next().copied()
    }

    /// Drops the marks of removals that every stream has received.
    fn drop_delivered_removals(&mut self) {
        // Without any stream the marks are useless, since a new stream begins with the states.
        let delivered = self.first_position().unwrap_or(u64::MAX);
        while let Some(at) = self.removals.keys().next().copied().filter(|at| *at <= delivered) {
            self.removals.remove(&at);
            if let Some(key) = self.order.remove(&at) {
                self.states.remove(&key);
            }
        }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> OutboxCursor<K, V> {
    /// Waits for something to send. The first batch holds every state, even when there is none.
    ///
    /// Nothing is lost when the returned future is dropped before it is ready.
    pub async fn next(&mut self) -> OutboxBatch<K, V> {
        loop {
            if let Some(batch) = self.try_next() {
                return batch;
            }
            // The sender lives in the outbox that this cursor holds, so it cannot have been dropped.
            let _ = self.changed.changed().await;
        }
    }

    /// Returns the version up to which everything was sent.
    pub fn version(&self) -> u64 {
        self.delivered_version
    }

    /// Returns a cursor at this position for another stream, which has received all that this one has.
    #[must_use]
    pub fn fork(&self) -> Self {
        let mut inner = self.outbox.lock();
        // Registered at the same version, so that marks of removals stay until this cursor has passed them too.
        inner.add_position(self.delivered_version);
        drop(inner);
        let (outbox, changed) = (self.outbox.clone(), self.changed.clone());
        Self {
            outbox,
            delivered_version: self.delivered_version,
            has_started: self.has_started,
            changed,
        }
    }

    /// Counts all changes up to `version` as sent: the stream has received them from a batch of another cursor, or does
    /// not need them. A version before that of this cursor changes nothing.
    ///
    /// # Panics
    ///
    /// If the outbox has not reached `version`: the stream would miss changes.
    pub fn advance_to(&mut self, version: u64) {
        let mut inner = self.outbox.lock();
        assert!(version <= inner.version, "version {version} is after {}", inner.version);
        let version = version.max(self.delivered_version);
        inner.move_position(self.delivered_version, version);
        (self.delivered_version, self.has_started) = (version, true);
        inner.drop_delivered_removals();
    }

    /// Returns the changes to send now, without waiting.
    pub fn try_next(&mut self) -> Option<OutboxBatch<K, V>> {
        // Before the lock is taken: a change in between costs a needless wake-up. The other order could miss it.
        self.changed.mark_unchanged();
        let mut inner = self.outbox.lock();
        if self.has_started && inner.version == self.delivered_version {
            return None;
        }
        // The whole range is copied under the lock, so the batch is the state at exactly `inner.version`.
        let (mut changes, mut has_removals) = (Vec::new(), false);
        for (at, key) in inner.order.range(self.delivered_version + 1..) {
            let value = inner.states.get(key).and_then(|(_, value)| value.as_deref().cloned());
            if value.is_none() {
                has_removals = true;
                // A receiver that begins has no state to remove, so it gets no removals.
                if !self.has_started {
                    continue;
                }
                let last = inner.removals.get(at).and_then(|last| last.as_deref().cloned());
                changes.extend(last.map(|last| (K::clone(key), Some(last))));
            }
            changes.push((K::clone(key), value));
        }
        let version = inner.version;
        inner.move_position(self.delivered_version, version);
        (self.delivered_version, self.has_started) = (version, true);
        if has_removals {
            inner.drop_delivered_removals();
        }
        Some(OutboxBatch { version: self.delivered_version, changes })
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Drop for OutboxCursor<K, V> {
    fn drop(&mut self) {
        let mut inner = self.outbox.lock();
        inner.remove_position(self.delivered_version);
        inner.drop_delivered_removals();
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Default for Outbox<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> Clone for Outbox<K, V> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K, V> fmt::Debug for Outbox<K, V> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Outbox").field("version", &*self.shared.version.borrow()).finish()
    }
}

impl<K: Eq + Hash + Clone, V: Clone> fmt::Debug for OutboxCursor<K, V> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cursor").field("at", &self.delivered_version).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn all(cursor: &mut OutboxCursor<&'static str, u8>) -> Vec<(&'static str, Option<u8>)> {
        cursor.try_next().map(|batch| batch.changes).unwrap_or_default()
    }

    #[test]
    fn a_stream_begins_with_every_state_even_with_none() {
        let outbox = Outbox::new();
        let mut early = outbox.subscribe();
        assert_eq!(early.try_next(), Some(OutboxBatch { version: 1, changes: vec![] }));
        assert_eq!(early.try_next(), None);
        outbox.set("a", 1);
        outbox.set("b", 2);
        outbox.remove(&"a");
        let mut late = outbox.subscribe();
        assert_eq!(all(&mut late), [("b", Some(2))]);
        assert_eq!(all(&mut early), [("b", Some(2)), ("a", None)]);
    }

    #[test]
    fn a_stream_that_forks_from_another_receives_what_came_after_it() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let mut one = outbox.subscribe();
        assert_eq!(all(&mut one), [("a", Some(1))]);
        outbox.remove(&"a");
        outbox.set("b", 2);
        let mut two = one.fork();
        assert_eq!(all(&mut one), [("a", None), ("b", Some(2))]);
        drop(one);
        assert_eq!(all(&mut two), [("a", None), ("b", Some(2))]);
        assert_eq!(two.try_next(), None);
    }

    #[test]
    fn a_state_that_changed_often_is_sent_once() {
        let outbox = Outbox::new();
        let mut cursor = outbox.subscribe();
        all(&mut cursor);
        (0..9).for_each(|value| outbox.set("a", value));
        outbox.set("a", 8);
        assert_eq!(
            cursor.try_next(),
            Some(OutboxBatch { version: 10, changes: vec![("a", Some(8))] })
        );
        assert_eq!(cursor.try_next(), None);
    }

    #[test]
    fn marks_of_removed_subjects_are_dropped_once_delivered() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let (mut one, mut two) = (outbox.subscribe(), outbox.subscribe());
        all(&mut one);
        all(&mut two);
        outbox.remove(&"a");
        assert_eq!(all(&mut one), [("a", None)]);
        assert_eq!(outbox.lock().states.len(), 1, "the other stream has not heard yet");
        assert_eq!(all(&mut two), [("a", None)]);
        assert_eq!(outbox.lock().states.len(), 0);
        outbox.set("a", 2);
        outbox.remove(&"a");
        drop((one, two));
        assert_eq!(outbox.lock().states.len(), 0);
    }

    #[test]
    fn the_last_state_of_a_removed_subject_is_sent_before_its_removal() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let mut early = outbox.subscribe();
        assert_eq!(all(&mut early), [("a", Some(1))]);
        outbox.set("a", 2);
        outbox.remove_with_last("a", 3);
        let mut late = outbox.subscribe();
        assert_eq!(all(&mut early), [("a", Some(3)), ("a", None)]);
        assert!(all(&mut late).is_empty(), "a receiver that begins does not know the subject");
        assert_eq!(outbox.lock().states.len(), 0);
        outbox.remove_with_last("b", 4);
        assert_eq!(all(&mut early), [("b", Some(4)), ("b", None)], "it had no other state");
        outbox.remove_with_last("a", 5);
        outbox.set("a", 6);
        assert_eq!(all(&mut early), [("a", Some(6))], "the subject has returned");
    }

    #[test]
    fn a_stream_that_advances_by_another_ones_batch_receives_only_what_came_after_it() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let (mut one, mut two) = (outbox.subscribe(), outbox.subscribe());
        assert_eq!((all(&mut one), all(&mut two)), (vec![("a", Some(1))], vec![("a", Some(1))]));
        outbox.set("b", 2);
        outbox.remove(&"a");
        let batch = one.try_next().expect("two changes");
        outbox.set("c", 3);
        assert_eq!(outbox.delivered_version(), two.version());
        two.advance_to(batch.version);
        assert_eq!((two.version(), outbox.delivered_version()), (batch.version, batch.version));
        assert_eq!(outbox.lock().states.len(), 2, "the removal needs no mark any more");
        two.advance_to(1);
        assert_eq!(two.version(), batch.version, "a version that it has passed changes nothing");
        assert_eq!(all(&mut two), [("c", Some(3))]);
        assert_eq!(outbox.delivered_version(), batch.version, "the first stream is behind");
        drop((one, two));
        assert_eq!(outbox.delivered_version(), outbox.version());
    }

    #[test]
    fn a_stream_that_begins_by_an_advance_receives_removals() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let mut cursor = outbox.subscribe();
        cursor.advance_to(outbox.version());
        assert_eq!(cursor.try_next(), None);
        outbox.remove(&"a");
        assert_eq!(all(&mut cursor), [("a", None)]);
    }

    #[test]
    fn marks_of_removals_stay_while_one_of_several_streams_at_a_version_needs_them() {
        let outbox = Outbox::new();
        outbox.set("a", 1);
        let mut one = outbox.subscribe();
        all(&mut one);
        let (two, mut three) = (one.fork(), one.fork());
        outbox.remove(&"a");
        drop((one, two));
        assert_eq!(outbox.lock().states.len(), 1);
        assert_eq!(all(&mut three), [("a", None)]);
        assert_eq!(outbox.lock().states.len(), 0);
    }

    #[test]
    #[should_panic(expected = "version 9 is after 1")]
    fn a_stream_never_advances_beyond_the_outbox() {
        Outbox::<&str, u8>::new().subscribe().advance_to(9);
    }

    thread_local! {
        static LOOKED_AT: Cell<u32> = const { Cell::new(0) };
    }

    /// Subject that counts the number of its lookups.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct CountedKeyFixture(u32);

    impl Hash for CountedKeyFixture {
        fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
            LOOKED_AT.set(LOOKED_AT.get() + 1);
            self.0.hash(state);
        }
    }

    #[test]
    fn a_removal_looks_up_no_other_subject() {
        let looked_at = |states: u32, streams: usize| {
            let outbox = Outbox::new();
            (0..states).for_each(|at| outbox.set(CountedKeyFixture(at), 1));
            let mut cursors: Vec<_> = (0..streams).map(|_| outbox.subscribe()).collect();
            let next_change = |cursor: &mut OutboxCursor<CountedKeyFixture, u8>| {
                cursor.try_next().map_or(0, |batch| batch.changes.len())
            };
            cursors.iter_mut().for_each(|cursor| drop(cursor.try_next()));
            LOOKED_AT.set(0);
            (0..10).for_each(|at| outbox.remove(&CountedKeyFixture(at)));
            let removed = LOOKED_AT.replace(0);
            assert!(cursors.iter_mut().all(|cursor| next_change(cursor) == 10));
            (removed, LOOKED_AT.get())
        };
        for streams in [0, 1, 3] {
            assert_eq!(looked_at(1_000, streams), looked_at(100, streams));
        }
    }

    #[tokio::test]
    async fn next_wakes_on_a_change() {
        let outbox = Outbox::new();
        let mut cursor = outbox.subscribe();
        cursor.next().await;
        let setter = outbox.clone();
        let waiting = tokio::spawn(async move { cursor.next().await });
        setter.set("a", 1);
        assert_eq!(waiting.await.expect("no panic").changes, [("a", Some(1))]);
    }

    proptest::proptest! {
        /// A stream that reads at arbitrary moments ends with the states that the outbox has.
        #[test]
        fn a_reader_always_catches_up(ops in proptest::collection::vec((0u8..6, 0u8..4, 0u8..4), 0..80)) {
            let outbox = Outbox::new();
            let (mut cursor, mut received, mut expected) = (outbox.subscribe(), BTreeMap::new(), BTreeMap::new());
            for (key, value, kind) in ops {
                match kind {
                    0 => { outbox.remove(&key); expected.remove(&key); }
                    1 => { outbox.remove_with_last(key, value); expected.remove(&key); }
                    2 => { outbox.set(key, value); expected.insert(key, value); }
                    _ => apply_batch(&mut cursor, &mut received),
                }
            }
            apply_batch(&mut cursor, &mut received);
            proptest::prop_assert_eq!(&received, &expected);
            proptest::prop_assert!(outbox.lock().removals.is_empty());
            proptest::prop_assert_eq!(outbox.lock().states.len(), expected.len());
        }
    }

    fn apply_batch(cursor: &mut OutboxCursor<u8, u8>, received: &mut BTreeMap<u8, u8>) {
        for (key, value) in cursor.try_next().map(|batch| batch.changes).unwrap_or_default() {
            match value {
                Some(value) => drop(received.insert(key, value)),
                None => drop(received.remove(&key)),
            }
        }
    }
}
