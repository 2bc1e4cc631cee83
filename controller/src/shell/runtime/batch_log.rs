//! Pure: the newest batches of a broadcast, from which each of its streams takes those that it lacks.

use std::{collections::VecDeque, sync::Arc};

/// Newest batches of changes, within a bound on their size.
///
/// Each batch has the changes since the one before it, in the states of its own version. So a stream that is between
/// two batches may take the second one as a whole: what it knows already changes nothing.
#[derive(Debug)]
pub(super) struct BatchLog<B> {
    /// Oldest first.
    batches: VecDeque<LoggedBatch<B>>,
    /// Version from which on the log has every change: that of the last batch which it has dropped or left out.
    complete_from: u64,
    /// Size of all batches.
    size: usize,
    max_size: usize,
}

#[derive(Debug)]
struct LoggedBatch<B> {
    /// Version that a stream has reached with this batch.
    version: u64,
    size: usize,
    batch: Arc<B>,
}

impl<B> BatchLog<B> {
    /// Returns an empty log of the changes after `version`, which keeps batches of about `max_size`.
    pub(super) fn new(version: u64, max_size: usize) -> Self {
        Self { batches: VecDeque::new(), complete_from: version, size: 0, max_size }
    }

    /// Appends the batch of the changes since the last one, up to `version`. The oldest batches beyond the bound are
    /// dropped. The newest one stays, whatever its size is: all streams are about to take it.
    pub(super) fn append(&mut self, version: u64, size: usize, batch: Arc<B>) {
        self.batches.push_back(LoggedBatch { version, size, batch });
        self.size += size;
        while self.size > self.max_size && self.batches.len() > 1 {
            self.drop_oldest();
        }
    }

    /// Drops the batches up to a version that every stream has reached.
    pub(super) fn drop_delivered(&mut self, delivered_version: u64) {
        while self.batches.front().is_some_and(|it| it.version <= delivered_version) {
            self.drop_oldest();
        }
    }

    /// Leaves out the changes up to `version`, for which no batch was made because no stream needed it.
    pub(super) fn skip_to(&mut self, version: u64) {
        self.batches.clear();
        (self.complete_from, self.size) = (version, 0);
    }

    /// Returns the batches after `version`, oldest first; `None` if the log does not have all of these changes.
    pub(super) fn since(&self, version: u64) -> Option<Vec<Arc<B>>> {
        if version < self.complete_from {
            return None;
        }
        let first = self.batches.partition_point(|it| it.version <= version);
        Some(self.batches.range(first..).map(|it| Arc::clone(&it.batch)).collect())
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.batches.pop_front() {
            self.complete_from = oldest.version;
            self.size -= oldest.size;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use common::outbox::{Outbox, OutboxBatch, OutboxCursor};
    use proptest::{collection, prelude::*};

    use super::*;

    /// Log with batches of two changes each, up to versions 12, 14 and 16.
    fn log_of_three(max_size: usize) -> BatchLog<u64> {
        let mut log = BatchLog::new(10, max_size);
        [12, 14, 16].into_iter().for_each(|version| log.append(version, 2, Arc::new(version)));
        log
    }

    fn versions_since(log: &BatchLog<u64>, version: u64) -> Option<Vec<u64>> {
        log.since(version).map(|batches| batches.iter().map(|it| **it).collect())
    }

    #[test]
    fn a_stream_takes_each_batch_that_ends_after_its_version() {
        let log = log_of_three(100);
        assert_eq!(versions_since(&log, 9), None, "changes before the log");
        assert_eq!(versions_since(&log, 10), Some(vec![12, 14, 16]));
        assert_eq!(versions_since(&log, 12), Some(vec![14, 16]));
        assert_eq!(versions_since(&log, 13), Some(vec![14, 16]), "it began between two batches");
        assert_eq!(versions_since(&log, 16), Some(vec![]));
        assert_eq!(versions_since(&log, 99), Some(vec![]), "it began after the last batch");
    }

    #[test]
    fn the_oldest_batches_beyond_the_bound_are_dropped_but_never_the_newest() {
        let mut log = log_of_three(4);
        assert_eq!(versions_since(&log, 11), None);
        assert_eq!(versions_since(&log, 12), Some(vec![14, 16]));
        log.append(99, 1_000, Arc::new(99));
        assert_eq!(versions_since(&log, 15), None);
        assert_eq!(versions_since(&log, 16), Some(vec![99]));
        log.append(100, 1, Arc::new(100));
        assert_eq!(versions_since(&log, 98), None);
        assert_eq!(versions_since(&log, 99), Some(vec![100]));
        assert_eq!(log.size, 1);
    }

    #[test]
    fn batches_that_every_stream_has_are_dropped() {
        let mut log = log_of_three(100);
        log.drop_delivered(14);
        assert_eq!((log.batches.len(), log.size), (1, 2));
        assert_eq!(versions_since(&log, 14), Some(vec![16]));
        log.skip_to(20);
        assert_eq!((log.batches.len(), log.size), (0, 0));
        assert_eq!([versions_since(&log, 19), versions_since(&log, 20)], [None, Some(vec![])]);
    }

    type Table = BTreeMap<u8, u8>;

    fn apply_batch(batch: &OutboxBatch<u8, u8>, table: &mut Table) {
        for (key, value) in &batch.changes {
            match value {
                Some(value) => drop(table.insert(*key, *value)),
                None => drop(table.remove(key)),
            }
        }
    }

    /// Stream that takes batches of the log, and batches of its own where it is behind the log.
    struct StreamFixture {
        cursor: OutboxCursor<u8, u8>,
        table: Table,
        /// Number of batches of its own after the first.
        own_batches: usize,
    }

    /// Outbox with a log whose batches are made from its changes, and the tables of all versions.
    struct BroadcastFixture {
        outbox: Outbox<u8, u8>,
        publisher: OutboxCursor<u8, u8>,
        log: BatchLog<OutboxBatch<u8, u8>>,
        present: Table,
        tables: BTreeMap<u64, Table>,
        streams: Vec<StreamFixture>,
    }

    impl BroadcastFixture {
        fn new(max_size: usize) -> Self {
            let outbox = Outbox::new();
            let mut publisher = outbox.subscribe();
            publisher.advance_to(outbox.version());
            Self {
                log: BatchLog::new(outbox.version(), max_size),
                tables: BTreeMap::from([(outbox.version(), Table::new())]),
                present: Table::new(),
                streams: Vec::new(),
                publisher,
                outbox,
            }
        }

        fn change(&mut self, key: u8, value: Option<u8>) {
            match value {
                Some(value) => {
                    self.outbox.set(key, value);
                    self.present.insert(key, value);
                }
                None => {
                    self.outbox.remove(&key);
                    self.present.remove(&key);
                }
            }
            self.tables.insert(self.outbox.version(), self.present.clone());
        }

        fn publish(&mut self) {
            let Some(batch) = self.publisher.try_next() else { return };
            if self.streams.is_empty() {
                return self.log.skip_to(batch.version);
            }
            self.log.drop_delivered(self.outbox.delivered_version());
            self.log.append(batch.version, batch.changes.len(), Arc::new(batch));
        }

        fn begin_stream(&mut self) {
            let mut cursor = self.outbox.subscribe();
            let mut table = Table::new();
            apply_batch(&cursor.try_next().expect("a stream begins with a batch"), &mut table);
            assert_eq!(Some(&table), self.tables.get(&cursor.version()));
            self.streams.push(StreamFixture { cursor, table, own_batches: 0 });
        }

        /// Has a stream take all that it lacks, and compares its table after each batch with that of the version.
        fn read(&mut self, stream: usize) {
            let Some(StreamFixture { cursor, table, own_batches }) = self.streams.get_mut(stream)
            else {
                return;
            };
            let batches = self.log.since(cursor.version()).unwrap_or_else(|| {
                *own_batches += 1;
                cursor.try_next().map(Arc::new).into_iter().collect()
            });
            let mut last = 0;
            for batch in batches {
                assert!(last < batch.version, "versions only grow");
                last = batch.version;
                apply_batch(&batch, table);
                assert_eq!(Some(&*table), self.tables.get(&last));
                cursor.advance_to(last);
            }
        }
    }

    proptest! {
        /// A stream may be fast or slow, begin late, or end and begin again. After each batch it has exactly the table
        /// of the batch's version, and at the end the present table.
        #[test]
        fn every_stream_follows_the_table(
            max_size in 1_usize..12,
            ops in collection::vec((0_u8..12, 0_u8..5, 0_u8..4), 0..120),
        ) {
            let mut fixture = BroadcastFixture::new(max_size);
            for (kind, key, value) in ops {
                let stream = usize::from(key);
                match kind {
                    0..=3 => fixture.change(key, Some(value)),
                    4 | 5 => fixture.change(key, None),
                    6 | 7 => fixture.publish(),
                    8 if fixture.streams.len() < 4 => fixture.begin_stream(),
                    9 if stream < fixture.streams.len() => drop(fixture.streams.remove(stream)),
                    _ => fixture.read(stream),
                }
                let bound = max_size.max(fixture.log.batches.back().map_or(0, |it| it.size));
                prop_assert!(fixture.log.size <= bound);
            }
            fixture.publish();
            for stream in 0..fixture.streams.len() {
                fixture.read(stream);
                prop_assert_eq!(&fixture.streams[stream].table, &fixture.present);
            }
            // With all streams at the end, the outbox keeps no marks and the log no batches for them.
            let delivered = fixture.outbox.delivered_version();
            prop_assert_eq!(delivered, fixture.outbox.version());
            fixture.log.drop_delivered(delivered);
            prop_assert_eq!(fixture.log.size, 0);
        }
    }

    #[test]
    fn only_a_stream_behind_the_log_gets_a_batch_of_its_own() {
        let mut fixture = BroadcastFixture::new(3);
        (0..2).for_each(|_| fixture.begin_stream());
        for key in 0..9 {
            fixture.change(key % 4, Some(key));
            fixture.publish();
            fixture.read(0);
        }
        fixture.read(1);
        let own_batches: Vec<usize> = fixture.streams.iter().map(|it| it.own_batches).collect();
        assert_eq!(own_batches, [0, 1]);
        assert_eq!(fixture.streams[1].table, fixture.present);
    }
}
