//! Shell: the two streams with the controller: routes in, pod reports out.

use std::sync::{Arc, OnceLock};

use common::{
    link::{ComponentLink, PodReportKey, RouteBatch, RouteBatchInbox},
    once_signal::OnceSignal,
    outbox::Outbox,
    wire::PodReportItem,
};
use tokio_util::sync::CancellationToken;

/// Receiver of the route stream.
#[derive(Debug, Default)]
pub(crate) struct RouteReceiver {
    /// Changes that the loop of the agent has not taken yet.
    inbox: RouteBatchInbox,
    /// Link that keeps the stream, set when [`RouteReceiver::receive_batches`] begins.
    link: OnceLock<Arc<ComponentLink>>,
}

impl RouteReceiver {
    /// Receives the controller's routes until the link's shutdown.
    pub(crate) async fn receive_batches(&self, link: Arc<ComponentLink>) {
        let link = self.link.get_or_init(|| link);
        link.watch_batches(|batch| self.inbox.merge_batch(batch)).await;
    }

    /// Returns true if a controller is connected, so that the table is up to date.
    pub(crate) fn is_live(&self) -> bool {
        self.link.get().is_some_and(|link| link.is_connected())
    }

    /// Waits for changes. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&self) -> RouteBatch {
        self.inbox.next().await
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
