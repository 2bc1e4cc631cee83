//! Shell: the two streams with the controller: routes in, pod reports out.

use std::sync::{Arc, Mutex, OnceLock};

use common::{
    link::{ComponentLink, PodReportKey, RouteBatch},
    once_signal::OnceSignal,
    outbox::Outbox,
    wire::PodReportItem,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::lock::lock;

/// Changes of the route stream that the agent has not taken yet.
///
/// The stream never waits for the agent: a subject that changes twice meanwhile is handled once.
#[derive(Debug, Default)]
pub(crate) struct RouteBatchInbox {
    pending: Mutex<Option<RouteBatch>>,
    arrived: Notify,
    /// Link that keeps the stream, set when [`RouteBatchInbox::receive_batches`] begins.
    link: OnceLock<Arc<ComponentLink>>,
}

impl RouteBatchInbox {
    /// Receives the controller's routes until the link's shutdown.
    pub(crate) async fn receive_batches(&self, link: Arc<ComponentLink>) {
        let link = self.link.get_or_init(|| link);
        link.watch_batches(|batch| self.merge_batch(batch)).await;
    }

    /// Returns true if a controller is connected, so that the table is up to date.
    pub(crate) fn is_live(&self) -> bool {
        self.link.get().is_some_and(|link| link.is_connected())
    }

    /// Waits for changes. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&self) -> RouteBatch {
        loop {
            if let Some(batch) = lock(&self.pending).take() {
                return batch;
            }
            // `notify_one` stores a permit, so a batch that arrives between the check and this wait still wakes it.
            self.arrived.notified().await;
        }
    }

    fn merge_batch(&self, batch: RouteBatch) {
        let mut pending = lock(&self.pending);
        match pending.as_mut() {
            // Merged with what the loop has not taken: it handles only the newest state of each subject.
            Some(pending_batch) => pending_batch.merge(batch),
            None => *pending = Some(batch),
        }
        drop(pending);
        self.arrived.notify_one();
    }
}

/// Reports pods from the time at which `reports_ready` is set.
pub(crate) async fn report_pods(
    link: Arc<ComponentLink>,
    outbox: Outbox<PodReportKey, PodReportItem>,
    reports_ready: OnceSignal,
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = reports_ready.wait() => link.report_pods(&outbox).await,
        () = shutdown.cancelled() => {}
    }
}

#[cfg(test)]
mod tests {
    use common::{
        fixtures,
        wire::{ActivatorEntry, RouteChange, RouteKey},
    };

    use super::*;

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
