//! Shell: the part of the loop that counts the connections of leaving pods which have switched protocols.

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
    /// Looks into a pod's namespace, in a task of its own; what it finds comes in like the result of a probe.
    pub(super) fn count_upgraded(&self, uid: String) {
        let Some(&Registered { cookie, .. }) = self.locals.get(&uid) else { return };
        let (finder, conns) = (self.ends.finder.clone(), self.ends.maps.conns());
        let found = self.tries.clone();
        tokio::spawn(async move {
            let Some(namespace) = borrow(&finder, &uid, cookie).await else { return };
            // From before the look: what ends during it makes the pod less idle than the look is old.
            let at = Instant::now();
            let job =
                move || namespace.within("connections", || conns.upgraded(&SockDiag::open()?));
            match spawn_blocking(job).await {
                // The loop has ended where nothing takes it.
                Ok(Ok(count)) => drop(found.send(Event::Upgraded(uid, count, at)).await),
                Ok(Err(error)) => {
                    debug!(uid, error = %chain(&error), "cannot count connections of a pod that leaves");
                }
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        });
    }
}
