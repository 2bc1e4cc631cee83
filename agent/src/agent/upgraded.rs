//! Shell: the part of the loop that counts the upgraded connections of draining pods.

use std::time::Instant;

use common::link::chain;
use tokio::task::spawn_blocking;
use tracing::debug;

use super::{Agent, Registered};
use crate::{
    pods::{Event, find::borrow},
    sockdiag::SockDiag,
};

impl Agent {
    /// Counts the upgraded connections in a pod's namespace, in a task of its own. The result arrives as an event, like
    /// the result of a probe.
    pub(super) fn count_upgraded(&self, uid: String) {
        let Some(&Registered { cookie, .. }) = self.locals.get(&uid) else { return };
        let (finder, conns) = (self.ends.finder.clone(), self.ends.maps.conns());
        let found = self.tries.clone();
        tokio::spawn(async move {
            let Some(namespace) = borrow(&finder, &uid, cookie).await else { return };
            // Taken before the scan: a request that ends during the scan makes the pod's idle time shorter than the
            // count's age, which voids the count.
            let at = Instant::now();
            let job =
                move || namespace.within("connections", || conns.upgraded(&SockDiag::open()?));
            match spawn_blocking(job).await {
                // A failed send means that the loop has ended: its result has no receiver any more.
                Ok(Ok(count)) => drop(found.send(Event::Upgraded(uid, count, at)).await),
                Ok(Err(error)) => {
                    debug!(uid, error = %chain(&error), "cannot count connections of a pod that leaves");
                }
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        });
    }
}
