//! Shell: one request's stay in the wait queue of a revision.

use std::{sync::Arc, time::Instant};

use tokio::sync::oneshot;

use super::{ActivatorRevision, PodPermit, tell};
use crate::{
    clock::{chance, now_ns},
    failure::ProxyRequestError,
    queue::QueueTicket,
};

/// Stay of one request in a revision's queue, until a pod has received it. Dropping it leaves the queue.
#[derive(Debug)]
pub struct QueueEntry {
    revision: Arc<ActivatorRevision>,
    turn: Option<QueueTicket>,
    bytes: usize,
    /// Start of the time for which it counts as waiting; `None`: it does not count as waiting.
    counted: Option<Instant>,
}

impl QueueEntry {
    /// Creates the entry of a request that holds `bytes` bytes while it waits.
    pub(super) fn new(revision: Arc<ActivatorRevision>, bytes: usize) -> Self {
        Self { revision, turn: None, bytes, counted: None }
    }

    /// Waits for room at a pod and returns its permit. Returns at once if a pod has room.
    pub async fn place(&mut self) -> Result<PodPermit, ProxyRequestError> {
        let answer = {
            let mut core = self.revision.core();
            core.begin(&self.revision);
            let live = core.live(self.revision.settings.bounds);
            // A request that was refused by a pod comes back here: it keeps its turn, and so its position in the queue.
            let turn = *self.turn.get_or_insert_with(|| {
                live.visits += 1;
                live.line.on_request()
            });
            if let Some(key) = live.line.admit(chance()) {
                let place = self.revision.place(live, key);
                core.took(&place.pod);
                return Ok(place);
            }
            let (whom, answer) = oneshot::channel();
            live.line.wait(turn, self.bytes, whom).map_err(|_full| ProxyRequestError::QueueFull)?;
            let waiting = live.line.waiting();
            // One that waits for the second time is still counted from the first.
            let is_first = self.counted.is_none();
            if is_first {
                self.counted = Some(Instant::now());
                core.totals.start(now_ns());
            }
            // The further waiting request may make this activator claim or grant slots, by which others can be
            // dispatched.
            let gone = self.revision.wanting(&mut core);
            let places = self.revision.places(&core, gone);
            drop(core);
            if is_first {
                // After the lock is released, since the reporter has a lock of its own.
                self.revision.on_waiting_started(waiting);
            }
            tell(places);
            answer
        };
        answer
            .await
            .map_err(|_dropped| ProxyRequestError::UnknownRevision(self.revision.name.to_string()))
    }

    /// Registers that the request is sent to its pod, where the eBPF programs count it from now on.
    pub fn leave(&mut self) {
        self.end(true);
    }

    /// Ends the time of waiting. An arrival counts once: at the pod if `has_pod`, otherwise as one that no pod
    /// received.
    fn end(&mut self, has_pod: bool) {
        let Some(since) = self.counted.take() else { return };
        {
            let mut core = self.revision.core();
            core.totals.finish(now_ns());
            core.totals.left += u64::from(!has_pod);
        }
        let metrics = &self.revision.settings.pods.metrics;
        metrics.waiting_requests.dec();
        metrics.wait_seconds.observe(since.elapsed().as_secs_f64());
        self.revision.settings.usage.changed(&self.revision);
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let Some(turn) = self.turn else { return };
        let (left, places) = {
            let mut core = self.revision.core();
            let left = core.live.as_mut().and_then(|live| {
                live.visits -= 1;
                live.line.on_leave(turn)
            });
            let gone = left.as_ref().map_or_else(Vec::new, |_| self.revision.wanting(&mut core));
            let places = self.revision.places(&core, gone);
            core.tidy();
            (left, places)
        };
        tell(places);
        // Dropped after the lock is released: the channel may hold a permit, and dropping a permit takes the lock.
        drop(left);
        self.end(false);
    }
}
