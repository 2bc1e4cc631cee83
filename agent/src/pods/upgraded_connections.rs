//! Shell: counts the upgraded connections of draining pods.

use std::time::Instant;

use common::link::error_chain;
use tokio::{sync::mpsc::Sender, task::spawn_blocking};
use tracing::debug;

use crate::{
    kernel::maps::connection_storage::ConnectionStorage,
    net::sockdiag::SockDiag,
    pods::{
        finder::{FinderCommand, request_namespace},
        types::PodTrackerEvent,
    },
};

/// Counts the upgraded connections in a pod's namespace, in a task of its own. The result arrives in `events`, like the
/// result of a probe.
pub(crate) fn count_upgraded(
    uid: String,
    cookie: u64,
    finder: Sender<FinderCommand>,
    conns: ConnectionStorage,
    events: Sender<PodTrackerEvent>,
) {
    tokio::spawn(async move {
        let Some(namespace) = request_namespace(&finder, &uid, cookie).await else { return };
        // Taken before the scan: a request that ends during the scan makes the pod's idle time shorter than the count's
        // age, which voids the count.
        let counted_at = Instant::now();
        let job = move || {
            namespace.run_inside("list connections", || conns.count_upgraded(&SockDiag::open()?))
        };
        match spawn_blocking(job).await {
            // A failed send means that the loop has ended: its result has no receiver any more.
            Ok(Ok(count)) => {
                drop(events.send(PodTrackerEvent::UpgradedCounted(uid, count, counted_at)).await)
            }
            Ok(Err(error)) => {
                debug!(uid, error = %error_chain(&error), "cannot count connections of a pod that leaves");
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    });
}
