//! Shell: one request's stay in the wait queue of a revision.

use std::{sync::Arc, time::Instant};

use tokio::sync::oneshot;

use super::{ActivatorRevision, PodPermit, send_permits};
use crate::{
    clock::{now_ns, random_u64},
    request_error::ProxyRequestError,
    revisions::wait_queue::QueueTicket,
};

/// Stay of one request in a revision's queue, until a pod has received it. Dropping it leaves the queue.
#[derive(Debug)]
pub struct QueueEntry {
    revision: Arc<ActivatorRevision>,
    ticket: Option<QueueTicket>,
    bytes: usize,
    /// Start of the time for which it counts as waiting; `None`: it does not count as waiting.
    waiting_since: Option<Instant>,
}

impl QueueEntry {
    /// Creates the entry of a request that holds `bytes` bytes while it waits.
    pub(super) fn new(revision: Arc<ActivatorRevision>, bytes: usize) -> Self {
        Self { revision, ticket: None, bytes, waiting_since: None }
    }

    /// Waits for room at a pod and returns its permit. Returns at once if a pod has room.
    pub async fn acquire_permit(&mut self) -> Result<PodPermit, ProxyRequestError> {
        let answer = {
            let mut core = self.revision.lock_state();
            core.prepare_request(&self.revision);
            let live = core.ensure_active(self.revision.context.queue_bounds);
            // A request that was refused by a pod comes back here: it keeps its turn, and so its position in the queue.
            let turn = *self.ticket.get_or_insert_with(|| {
                live.queue_entries += 1;
                live.wait_queue.issue_ticket()
            });
            if let Some(key) = live.wait_queue.admit(random_u64()) {
                let place = self.revision.grant_permit(live, key);
                core.on_dispatched_to(&place.pod);
                return Ok(place);
            }
            let (whom, answer) = oneshot::channel();
            live.wait_queue
                .enqueue(turn, self.bytes, whom)
                .map_err(|_full| ProxyRequestError::QueueFull)?;
            let waiting = live.wait_queue.waiting_count();
            // One that waits for the second time is still counted from the first.
            let is_first = self.waiting_since.is_none();
            if is_first {
                self.waiting_since = Some(Instant::now());
                core.totals.record_start(now_ns());
            }
            // The further waiting request may make this activator claim or grant slots, by which others can be
            // dispatched.
            let dispatched = self.revision.reconcile_waiting(&mut core);
            let places = self.revision.grant_permits(&core, dispatched);
            drop(core);
            if is_first {
                // After the lock is released, since the reporter has a lock of its own.
                self.revision.on_waiting_started(waiting);
            }
            send_permits(places);
            answer
        };
        answer
            .await
            .map_err(|_dropped| ProxyRequestError::UnknownRevision(self.revision.name.to_string()))
    }

    /// Registers that the request is sent to its pod, where the eBPF programs count it from now on.
    pub fn finish_waiting(&mut self) {
        self.end_waiting(true);
    }

    /// Ends the time of waiting. An arrival counts once: at the pod if `has_pod`, otherwise as one that no pod
    /// received.
    fn end_waiting(&mut self, has_pod: bool) {
        let Some(since) = self.waiting_since.take() else { return };
        {
            let mut core = self.revision.lock_state();
            core.totals.record_finish(now_ns());
            core.totals.abandoned += u64::from(!has_pod);
        }
        let metrics = &self.revision.context.pod_settings.metrics;
        metrics.waiting_requests.dec();
        metrics.wait_seconds.observe(since.elapsed().as_secs_f64());
        self.revision.context.usage_reporter.mark_changed(&self.revision);
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let Some(turn) = self.ticket else { return };
        let (left, places) = {
            let mut core = self.revision.lock_state();
            let left = core.active.as_mut().and_then(|live| {
                live.queue_entries -= 1;
                live.wait_queue.remove_waiter(turn)
            });
            let dispatched =
                left.as_ref().map_or_else(Vec::new, |_| self.revision.reconcile_waiting(&mut core));
            let places = self.revision.grant_permits(&core, dispatched);
            core.drop_if_idle();
            (left, places)
        };
        send_permits(places);
        // Dropped after the lock is released: the channel may hold a permit, and dropping a permit takes the lock.
        drop(left);
        self.end_waiting(false);
    }
}
