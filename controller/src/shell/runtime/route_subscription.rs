//! Shell: subscriptions of streams to the RouteTable, and the snapshot that streams share.

use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use super::{
    ControllerRuntime,
    route_broadcast::{RouteBroadcast, RouteCursor, SharedRouteBatch},
};

/// Next update that a stream sends.
#[derive(Debug)]
pub enum RouteTableUpdate {
    /// Snapshot that begins the stream. Streams share it, since it is large.
    Snapshot(Arc<RouteTableSnapshot>),
    /// Batches of changes since the last update, oldest first.
    Changes(Vec<Arc<SharedRouteBatch>>),
}

impl RouteTableUpdate {
    /// Returns the batches of the update, oldest first.
    pub fn batches(&self) -> &[Arc<SharedRouteBatch>] {
        match self {
            Self::Snapshot(snapshot) => std::slice::from_ref(&snapshot.batch),
            Self::Changes(batches) => batches,
        }
    }
}

/// Snapshot: the whole RouteTable at one moment.
#[derive(Debug)]
pub struct RouteTableSnapshot {
    batch: Arc<SharedRouteBatch>,
    /// Place in the outbox at which streams with this snapshot continue.
    cursor: RouteCursor,
}

impl RouteTableSnapshot {
    fn is_recent(&self, version: u64) -> bool {
        // Changes since the snapshot are sent again as a batch: up to an eighth of its size that is cheaper than a new
        // one.
        let since = version.saturating_sub(self.batch.version());
        let max_since = self.batch.routes().changes.len() / 8;
        usize::try_from(since).is_ok_and(|since| since <= max_since)
    }
}

/// Subscription of one stream to the RouteTable.
#[derive(Debug)]
pub struct RouteTableSubscription {
    broadcast: Arc<RouteBroadcast>,
    /// Version up to which the broadcast has batches.
    published_version: watch::Receiver<u64>,
    /// Place in the outbox; `None` before the snapshot.
    cursor: Option<RouteCursor>,
    /// Version of the snapshot with which the stream began; 0 before it.
    snapshot_version: u64,
}

impl RouteTableSubscription {
    /// Makes the subscription of a stream that begins, and that gets changes from `broadcast`.
    pub fn new(broadcast: Arc<RouteBroadcast>) -> Self {
        let published_version = broadcast.subscribe();
        Self { broadcast, published_version, cursor: None, snapshot_version: 0 }
    }

    /// Returns the runtime whose RouteTable this is.
    pub fn runtime(&self) -> &ControllerRuntime {
        self.broadcast.runtime()
    }

    /// Waits for the next update. Nothing is lost if the future is dropped before it is ready.
    pub async fn next(&mut self) -> RouteTableUpdate {
        let Some(cursor) = &mut self.cursor else {
            let snapshot = self.broadcast.runtime().snapshot();
            self.snapshot_version = snapshot.batch.version();
            self.cursor = Some(snapshot.cursor.fork());
            return RouteTableUpdate::Snapshot(snapshot);
        };
        let version = cursor.version();
        // The sender lives in the broadcast that this subscription holds, so it cannot have been dropped.
        let _ = self.published_version.wait_for(|published| *published > version).await;
        RouteTableUpdate::Changes(self.broadcast.take_batches(cursor, self.snapshot_version))
    }
}

impl ControllerRuntime {
    /// Returns the whole RouteTable, and the place in the outbox after it. Streams that begin while others still send
    /// it share one snapshot, unless much has changed since: after a restart all streams begin at once.
    fn snapshot(&self) -> Arc<RouteTableSnapshot> {
        // Held throughout: streams that begin together wait for one snapshot instead of each making its own.
        let mut last = self.last_snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = last.upgrade().filter(|it| it.is_recent(self.routes.version())) {
            return snapshot;
        }
        let (mut cursor, machine) = (self.routes.subscribe(), self.lock_machine());
        let batch = cursor.try_next().expect("a new stream has the whole table to send");
        let routes = machine.route_messages(batch, &mut cursor);
        drop(machine);
        let batch = Arc::new(SharedRouteBatch::new(0, routes));
        let snapshot = Arc::new(RouteTableSnapshot { batch, cursor });
        // Only a weak reference is kept, so that the memory is free once the last stream has sent the snapshot.
        *last = Arc::downgrade(&snapshot);
        snapshot
    }
}
