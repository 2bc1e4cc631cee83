//! Shell: the part of the loop that counts the upgraded connections of draining pods.

use std::time::Instant;

use common::link::chain;
use tokio::task::spawn_blocking;
use tracing::debug;

use super::{Agent, RegisteredPod};
use crate::{
    pods::{PodTrackerEvent, finder::request_namespace},
    sockdiag::SockDiag,
};

impl Agent {
    /// Counts the upgraded connections in a pod's namespace, in a task of its own. The result arrives as an event, like
    /// the result of a probe.
    pub(super) fn count_upgraded(&self, uid: String) {
        let Some(&RegisteredPod { cookie, .. }) = self.registered_pods.get(&uid) else { return };
        let (finder, conns) = (self.handles.finder_commands.clone(), self.handles.maps.conns());
        let found = self.pod_events_tx.clone();
        tokio::spawn(async move {
            let Some(namespace) = request_namespace(&finder, &uid, cookie).await else { return };
            // Taken before the scan: a request that ends during the scan makes the pod's idle time shorter than the
            // count's age, which voids the count.
            let at = Instant::now();
            let job = move || {
                namespace.run_inside("connections", || conns.count_upgraded(&SockDiag::open()?))
            };
            match spawn_blocking(job).await {
                // A failed send means that the loop has ended: its result has no receiver any more.
                Ok(Ok(count)) => {
                    drop(found.send(PodTrackerEvent::UpgradedCounted(uid, count, at)).await)
                }
                Ok(Err(error)) => {
                    debug!(uid, error = %chain(&error), "cannot count connections of a pod that leaves");
                }
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        });
    }
}
