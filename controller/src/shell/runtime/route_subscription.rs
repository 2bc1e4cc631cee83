//! Shell: subscriptions of streams to the RouteTable, and the snapshot that streams share.

use std::{
    ops::Deref,
    sync::{Arc, OnceLock, PoisonError},
};

use bytes::Bytes;
use common::{
    outbox::OutboxCursor,
    wire::{ClientComponent, RouteKey},
};

use super::ControllerRuntime;
use crate::decide::machine::{RouteFingerprint, RouteMessageBatch};

/// The encoded items of one batch, with its final `Synced`, in pieces of whole items.
pub type EncodedPieces = Arc<[Bytes]>;

/// Next update that a stream sends.
#[derive(Debug)]
pub enum RouteTableUpdate {
    /// Snapshot that begins the stream. Streams share it, since it is large.
    Snapshot(Arc<RouteTableSnapshot>),
    /// Batch of changes since the last update.
    Changes(RouteMessageBatch),
}

impl Deref for RouteTableUpdate {
    type Target = RouteMessageBatch;

    fn deref(&self) -> &RouteMessageBatch {
        match self {
            Self::Snapshot(snapshot) => &snapshot.routes,
            Self::Changes(routes) => routes,
        }
    }
}

/// Snapshot: the whole RouteTable at one moment.
#[derive(Debug)]
pub struct RouteTableSnapshot {
    routes: RouteMessageBatch,
    /// Encoded snapshot by the role of the receivers, made for the first of each role.
    encoded: [OnceLock<EncodedPieces>; 3],
    /// Place in the outbox at which streams with this snapshot continue.
    cursor: OutboxCursor<RouteKey, RouteFingerprint>,
}

impl RouteTableSnapshot {
    /// Returns the encoded snapshot for a role; the first stream of that role makes it by `encode`.
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

    fn is_recent(&self, version: u64) -> bool {
        // Changes since the snapshot are sent again as a batch: up to an eighth of its size that is cheaper than a new
        // one.
        let since = version.saturating_sub(self.routes.version);
        usize::try_from(since).is_ok_and(|since| since <= self.routes.changes.len() / 8)
    }
}

/// Subscription of one stream to the RouteTable.
#[derive(Debug)]
pub struct RouteTableSubscription {
    runtime: Arc<ControllerRuntime>,
    /// Place in the outbox; `None` before the snapshot.
    cursor: Option<OutboxCursor<RouteKey, RouteFingerprint>>,
}

impl RouteTableSubscription {
    /// Makes the subscription of a stream that begins.
    pub fn new(runtime: Arc<ControllerRuntime>) -> Self {
        Self { runtime, cursor: None }
    }

    /// Waits for the next update. Nothing is lost if the future is dropped before it is ready.
    pub async fn next(&mut self) -> RouteTableUpdate {
        let Some(cursor) = &mut self.cursor else {
            let snapshot = self.runtime.snapshot();
            self.cursor = Some(snapshot.cursor.fork());
            return RouteTableUpdate::Snapshot(snapshot);
        };
        let batch = cursor.next().await;
        RouteTableUpdate::Changes(self.runtime.lock_machine().route_messages(batch, cursor))
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
        let snapshot = Arc::new(RouteTableSnapshot { routes, encoded: Default::default(), cursor });
        // Only a weak reference is kept, so that the memory is free once the last stream has sent the snapshot.
        *last = Arc::downgrade(&snapshot);
        snapshot
    }
}
