//! Shell: batches of routes that a receiver has not taken yet, merged into one.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

use super::RouteBatch;

/// Changes of a route stream that the receiver has not taken yet.
///
/// The stream never waits for the receiver: a subject that changes twice meanwhile is handled once.
#[derive(Debug, Default)]
pub struct RouteBatchInbox {
    pending: Mutex<Option<RouteBatch>>,
    arrived: Notify,
}

impl RouteBatchInbox {
    /// Adds the next batch of the stream.
    pub fn merge_batch(&self, batch: RouteBatch) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        match pending.as_mut() {
            // Merged with what was not taken: the receiver handles only the newest state of each subject.
            Some(pending_batch) => pending_batch.merge(batch),
            None => *pending = Some(batch),
        }
        drop(pending);
        self.arrived.notify_one();
    }

    /// Waits for changes. Nothing is lost when the future is dropped.
    pub async fn next(&self) -> RouteBatch {
        loop {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(batch) = pending {
                return batch;
            }
            // `notify_one` stores a permit, so a batch that arrives between the check and this wait still wakes it.
            self.arrived.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        fixtures,
        wire::{ActivatorEntry, RouteChange, RouteKey},
    };

    fn activator(name: &str, node: &str) -> (RouteKey, RouteChange) {
        let entry = ActivatorEntry { node: node.into(), ..fixtures::activator(name, Vec::new()) };
        (RouteKey::Activator(name.into()), RouteChange::Activator(entry))
    }

    fn batch(version: u64, changes: &[(RouteKey, RouteChange)]) -> RouteBatch {
        let changes = changes.iter().cloned().collect();
        RouteBatch { version, changes, ..RouteBatch::default() }
    }

    #[tokio::test]
    async fn a_subject_that_changes_twice_is_delivered_once() {
        let routes = RouteBatchInbox::default();
        routes.merge_batch(batch(1, &[activator("a", "n1"), activator("b", "n1")]));
        routes.merge_batch(batch(2, &[activator("a", "n2")]));
        let want = batch(2, &[activator("a", "n2"), activator("b", "n1")]);
        assert_eq!(routes.next().await, want);
    }

    #[tokio::test]
    async fn a_snapshot_replaces_the_pending_batch() {
        let routes = RouteBatchInbox::default();
        routes.merge_batch(batch(1, &[activator("a", "n1")]));
        let whole = RouteBatch { is_snapshot: true, ..batch(2, &[activator("b", "n1")]) };
        routes.merge_batch(whole.clone());
        assert_eq!(routes.next().await, whole);
        routes.merge_batch(whole);
        routes.merge_batch(batch(3, &[activator("c", "n1")]));
        let both = batch(3, &[activator("b", "n1"), activator("c", "n1")]);
        assert_eq!(routes.next().await, RouteBatch { is_snapshot: true, ..both });
    }

    /// An agent asks again about pods that are to stop, whatever else has come meanwhile.
    #[tokio::test]
    async fn the_begin_of_a_stream_stays_known() {
        let routes = RouteBatchInbox::default();
        routes.merge_batch(batch(1, &[activator("a", "n1")]));
        let begin = RouteBatch { begins_stream: true, ..batch(2, &[activator("b", "n1")]) };
        routes.merge_batch(begin);
        routes.merge_batch(batch(3, &[activator("c", "n1")]));
        let all = [activator("a", "n1"), activator("b", "n1"), activator("c", "n1")];
        let want = RouteBatch { begins_stream: true, ..batch(3, &all) };
        assert_eq!(routes.next().await, want);
    }

    #[tokio::test]
    async fn a_version_without_changes_is_delivered() {
        let routes = Arc::new(RouteBatchInbox::default());
        let waiting = tokio::spawn({
            let routes = Arc::clone(&routes);
            async move { routes.next().await }
        });
        tokio::task::yield_now().await;
        routes.merge_batch(batch(7, &[]));
        assert_eq!(waiting.await.expect("no panic").version, 7);
    }
}
