//! Shell: broadcasts of route changes, whose batches are made once for all streams.
//!
//! A change concerns thousands of agents. Each stream that planned and encoded it for itself would wait for the lock of
//! the state machine, and hold up the next steps. Here one task plans each batch, and the first stream of a role
//! encodes it. The other streams take the same bytes from a log, under a lock that is held for the copy of a few
//! pointers.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use bytes::Bytes;
use common::{
    outbox::{OutboxBatch, OutboxCursor},
    wire::{ClientComponent, RouteChange, RouteKey},
};
use tokio::sync::watch;

use super::{ControllerRuntime, batch_log::BatchLog};
use crate::decide::machine::{RouteFingerprint, RouteMessageBatch};

/// Size of the batches that a broadcast keeps for slow streams, in changes. A stream that lacks more of them gets a
/// batch with the latest state of each subject.
const MAX_LOG_SIZE: usize = 4_096;
/// Number of allowed sources of a Revision that count as one change in the log: they need as much memory. A policy that
/// selects a large namespace has thousands.
const SOURCES_PER_LOGGED_CHANGE: usize = 16;
/// Number of bytes of a certificate that count as one change in the log, for the same reason. A chain may have 64 KiB.
const CERTIFICATE_BYTES_PER_LOGGED_CHANGE: usize = 1_024;
/// Time without changes after which batches that every stream has are dropped.
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Place of a stream in the outbox of the RouteTable.
pub(super) type RouteCursor = OutboxCursor<RouteKey, RouteFingerprint>;

/// The encoded items of one batch, with its final `Synced`, in pieces of whole items.
pub type EncodedPieces = Arc<[Bytes]>;

/// Batch that several streams send.
pub struct SharedRouteBatch {
    /// Version after which the batch has every change; 0 if it has the whole table.
    from_version: u64,
    routes: RouteMessageBatch,
    /// Changes of nodes, by name: each agent gets that of its own node only.
    nodes: BTreeMap<String, RouteChange>,
    /// Encoded batch by the role of the receivers, made for the first of each role.
    encoded: [OnceLock<EncodedPieces>; 3],
    /// Encoded batch for activators of an earlier release, made for the first of them.
    encoded_with_lists: OnceLock<EncodedPieces>,
}

impl fmt::Debug for SharedRouteBatch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the encoded pieces, in which private keys are plain bytes.
        let mut out = out.debug_struct("SharedRouteBatch");
        out.field("from_version", &self.from_version).field("routes", &self.routes);
        out.finish_non_exhaustive()
    }
}

impl SharedRouteBatch {
    pub(super) fn new(from_version: u64, routes: RouteMessageBatch) -> Self {
        let nodes = routes.changes.iter().filter_map(|(key, change)| {
            let RouteKey::Node(name) = key else { return None };
            let change = change.clone().unwrap_or_else(|| RouteChange::Removed(key.clone()));
            Some((name.clone(), change))
        });
        Self {
            from_version,
            nodes: nodes.collect(),
            routes,
            encoded: Default::default(),
            encoded_with_lists: OnceLock::new(),
        }
    }

    /// Returns the version that a stream has reached with this batch.
    pub fn version(&self) -> u64 {
        self.routes.version
    }

    /// Returns true if the batch has the whole table, with which a stream begins.
    pub fn is_whole_table(&self) -> bool {
        self.from_version == 0
    }

    /// Returns the messages of the batch.
    pub fn routes(&self) -> &RouteMessageBatch {
        &self.routes
    }

    /// Returns the change of one node, if the batch has one.
    pub fn node_change(&self, node: &str) -> Option<&RouteChange> {
        self.nodes.get(node)
    }

    /// Returns the size of the batch in the log, in changes.
    fn log_size(&self) -> usize {
        let changes = self.routes.changes.iter();
        let extra = |it: &RouteChange| {
            source_count(it) / SOURCES_PER_LOGGED_CHANGE
                + certificate_bytes(it) / CERTIFICATE_BYTES_PER_LOGGED_CHANGE
        };
        changes.map(|(_, change)| 1 + change.as_ref().map_or(0, extra)).sum()
    }

    /// Returns the encoded batch for a role; the first stream of that role makes it by `encode`.
    pub fn encoded_for(
        &self,
        role: ClientComponent,
        encode: impl FnOnce(&RouteMessageBatch) -> EncodedPieces,
    ) -> EncodedPieces {
        let index = match role {
            ClientComponent::Agent => 0,
            ClientComponent::Activator => 1,
            ClientComponent::Autoscaler => 2,
        };
        Arc::clone(self.encoded[index].get_or_init(|| encode(&self.routes)))
    }

    /// Returns the encoded batch for activators that read lists of reserved hosts; the first of their streams makes it by
    /// `encode`.
    pub fn encoded_with_lists(
        &self,
        encode: impl FnOnce(&RouteMessageBatch) -> EncodedPieces,
    ) -> EncodedPieces {
        Arc::clone(self.encoded_with_lists.get_or_init(|| encode(&self.routes)))
    }
}

/// Returns the number of addresses and networks that a change lists as allowed sources.
fn source_count(change: &RouteChange) -> usize {
    let RouteChange::Revision(revision) = change else { return 0 };
    let Some(sources) = &revision.allowed_sources else { return 0 };
    let exceptions = sources.ip_blocks.iter().map(|it| it.exceptions.len());
    sources.addresses.len() + sources.ip_blocks.len() + exceptions.sum::<usize>()
}

/// Returns the size of the certificates in a change, in bytes.
fn certificate_bytes(change: &RouteChange) -> usize {
    let certificates = match change {
        RouteChange::Certificate(entry) => entry.material.as_ref().map(|it| &it.chain),
        RouteChange::ClientCa(entry) => entry.material.as_ref().map(|it| &it.0),
        _ => None,
    };
    certificates.into_iter().flatten().map(Vec::len).sum()
}

/// Broadcast of the changes of the RouteTable to streams that get them at the same time.
#[derive(Debug)]
pub struct RouteBroadcast {
    runtime: Arc<ControllerRuntime>,
    /// Time from the first change of a batch until the streams get the batch.
    delay: Duration,
    log: Mutex<BatchLog<SharedRouteBatch>>,
    /// Version of the last batch in the log.
    version: watch::Sender<u64>,
    /// Last batch that did not come from the log, for as long as a stream is still sending it.
    last_catch_up: Mutex<Weak<SharedRouteBatch>>,
}

impl RouteBroadcast {
    /// Returns a broadcast whose streams get changes after `delay` at most, while [`run`](Self::run) runs.
    pub fn new(runtime: Arc<ControllerRuntime>, delay: Duration) -> Self {
        Self::with_log_size(runtime, delay, MAX_LOG_SIZE)
    }

    fn with_log_size(
        runtime: Arc<ControllerRuntime>,
        delay: Duration,
        max_log_size: usize,
    ) -> Self {
        let version = runtime.routes.version();
        let log = Mutex::new(BatchLog::new(version, max_log_size));
        let (version, _) = watch::channel(version);
        Self { runtime, delay, log, version, last_catch_up: Mutex::default() }
    }

    /// Makes the batches, until this future is dropped.
    pub async fn run(&self) {
        let mut cursor = self.runtime.routes.subscribe();
        // Streams begin with a snapshot, so no batch has what the table had before.
        cursor.advance_to(*self.version.borrow());
        loop {
            let from_version = cursor.version();
            let changed = self.next_changes(&mut cursor).await;
            if self.version.receiver_count() == 0 {
                // A stream that begins now has a snapshot that is as new, or is behind the log.
                self.lock_log().skip_to(changed.version);
                self.version.send_replace(changed.version);
                continue;
            }
            if !self.delay.is_zero() {
                tokio::time::sleep(self.delay).await;
            }
            // With the changes of the meantime: each batch has to be sent a thousand times.
            self.publish(self.runtime.route_batch(from_version, changed, &mut cursor));
        }
    }

    /// Waits for changes, and meanwhile drops batches that every stream has. The next change may be hours away, and a
    /// batch may be as large as the table.
    async fn next_changes(
        &self,
        cursor: &mut RouteCursor,
    ) -> OutboxBatch<RouteKey, RouteFingerprint> {
        loop {
            // No change is lost if the time is over.
            if let Ok(changed) = tokio::time::timeout(LOG_CHECK_INTERVAL, cursor.next()).await {
                return changed;
            }
            let delivered_version = self.runtime.routes.delivered_version();
            self.lock_log().drop_delivered(delivered_version);
        }
    }

    fn publish(&self, batch: SharedRouteBatch) {
        let (version, size) = (batch.version(), batch.log_size());
        let delivered_version = self.runtime.routes.delivered_version();
        let mut log = self.lock_log();
        log.drop_delivered(delivered_version);
        log.append(version, size, Arc::new(batch));
        drop(log);
        self.version.send_replace(version);
    }

    /// Returns the runtime whose RouteTable this is.
    pub(super) fn runtime(&self) -> &ControllerRuntime {
        &self.runtime
    }

    /// Returns a receiver of the version up to which there are batches.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns the batches after the place of `cursor`, and moves it behind them. None of them has a change from before
    /// `snapshot_version`, with which the stream began.
    ///
    /// A receiver holds back what a replica that is behind says of draining pods. What it gets of a pod after the
    /// snapshot counts as news.
    pub(super) fn take_batches(
        &self,
        cursor: &mut RouteCursor,
        snapshot_version: u64,
    ) -> Vec<Arc<SharedRouteBatch>> {
        let is_later = |it: &Arc<SharedRouteBatch>| it.from_version >= snapshot_version;
        let logged = self.lock_log().since(cursor.version());
        let logged = logged.filter(|batches| batches.first().is_none_or(is_later));
        let batches = logged.unwrap_or_else(|| vec![self.catch_up(cursor, snapshot_version)]);
        if let Some(last) = batches.last() {
            cursor.advance_to(last.version());
        }
        batches
    }

    /// Returns one batch for a stream that is behind the log, or that began within a batch. Such streams share it if
    /// they need it at the same time.
    fn catch_up(&self, cursor: &mut RouteCursor, snapshot_version: u64) -> Arc<SharedRouteBatch> {
        // Held throughout: streams that are behind together wait for one batch instead of each making its own.
        let mut last = self.last_catch_up.lock().unwrap_or_else(PoisonError::into_inner);
        let version = cursor.version();
        let is_fitting = |it: &Arc<SharedRouteBatch>| {
            (snapshot_version..=version).contains(&it.from_version) && version < it.version()
        };
        if let Some(batch) = last.upgrade().filter(is_fitting) {
            return batch;
        }
        let nothing = || OutboxBatch { version, changes: Vec::new() };
        let changed = cursor.try_next().unwrap_or_else(nothing);
        let batch = Arc::new(self.runtime.route_batch(version, changed, cursor));
        // Only a weak reference is kept, so that the memory is free once the last stream has sent the batch.
        *last = Arc::downgrade(&batch);
        batch
    }

    fn lock_log(&self) -> MutexGuard<'_, BatchLog<SharedRouteBatch>> {
        // No code that runs under the lock panics between two dependent changes.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ControllerRuntime {
    /// Makes the batch of the subjects of `changed`, and of all that `cursor` has beyond it.
    fn route_batch(
        &self,
        from_version: u64,
        changed: OutboxBatch<RouteKey, RouteFingerprint>,
        cursor: &mut RouteCursor,
    ) -> SharedRouteBatch {
        let routes = self.lock_machine().route_messages(changed, cursor);
        SharedRouteBatch::new(from_version, routes)
    }
}

#[cfg(test)]
mod tests;
