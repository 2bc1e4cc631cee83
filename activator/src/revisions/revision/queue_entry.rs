//! Shell: the entry of one request in the wait queue of a Revision.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc, time::Instant};

use tokio::sync::oneshot;
use tracing::info;

use super::{ActivatorRevision, PodPermit, send_permits, state::LockedRevisionState};
use crate::{
    clock::{now_ns, random_u64},
    request_error::ProxyRequestError,
    revisions::wait_queue::QueuePlace,
};

/// Cause for which a request waits for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCause {
    /// The RouteTable lists no ready pod: the Revision is asleep or starts.
    NoReadyPod,
    /// No ready pod has capacity for the request.
    NoCapacity,
    /// The request has a pod, whose connection takes long to open.
    LateDial,
}

impl WaitCause {
    /// Value of the attribute `rouse.wait.cause`.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoReadyPod => "no_ready_pod",
            Self::NoCapacity => "no_capacity",
            Self::LateDial => "late_dial",
        }
    }
}

/// Entry of one request, from its first wait until the head of its response. It keeps the request's place if no pod has
/// processed it. Dropping it removes a waiting request from the queue.
#[derive(Debug)]
pub struct QueueEntry {
    revision: Arc<ActivatorRevision>,
    /// Port of the scaled Service that the request is for; `None`: the Revision is one of Knative.
    service_port: Option<NonZeroU16>,
    /// Place in the order of arrival, from the first time that it asks for a pod.
    place: Option<QueuePlace>,
    /// Number of bytes that the request holds while it waits.
    bytes: usize,
    /// Address of the client; `None`: it is not known.
    client: Option<IpAddr>,
    /// Start of the time for which it counts as waiting; `None`: it does not count as waiting. A request that gets a
    /// permit at once counts only once its dial is late, so that one with a fast pod costs no more than its permit.
    waiting_since: Option<Instant>,
    /// First cause of its present wait; `None`: it has not waited.
    wait_cause: Option<WaitCause>,
}

impl QueueEntry {
    /// Creates the entry of a request for this port that holds `bytes` bytes while it waits.
    pub(super) fn new(
        revision: Arc<ActivatorRevision>,
        service_port: Option<NonZeroU16>,
        bytes: usize,
    ) -> Self {
        Self {
            revision,
            service_port,
            place: None,
            bytes,
            client: None,
            waiting_since: None,
            wait_cause: None,
        }
    }

    /// Sets the client of the request, near which a first pod is woken.
    pub fn with_client(mut self, client: IpAddr) -> Self {
        // A socket of both families reports an IPv4 client as an IPv4-mapped address.
        self.client = Some(client.to_canonical());
        self
    }

    /// Waits for capacity at a pod and returns the permit. Returns at once if a pod has capacity.
    pub async fn acquire_permit(&mut self) -> Result<PodPermit, ProxyRequestError> {
        let permit_rx = {
            let mut state = self.revision.lock_state();
            state.ensure_slots_if_limited(&self.revision);
            let active = state.ensure_active(self.revision.context.queue_bounds);
            // After a failed dial, and before a resend, the request comes back here. It keeps its place in the order.
            let service_port = self.service_port;
            let place = *self.place.get_or_insert_with(|| {
                active.queue_entries += 1;
                active.wait_queue.assign_place(service_port)
            });
            let mut dispatched = active.wait_queue.make_room(service_port, self.bytes, random_u64);
            if let Some(key) = active.wait_queue.admit(service_port, random_u64()) {
                let permit = self.revision.grant_permit(active, key);
                state.on_dispatched_to(&permit.pod);
                state.on_dispatched(&dispatched);
                let permits = self.revision.grant_permits(&state, dispatched);
                drop(state);
                send_permits(permits);
                return Ok(permit);
            }
            let (waiter, permit_rx) = oneshot::channel();
            active
                .wait_queue
                .enqueue(place, self.bytes, waiter)
                .map_err(|_full| ProxyRequestError::QueueFull)?;
            let waiting = active.wait_queue.waiting_count();
            let has_ready_pod = active.ready_since.is_some();
            let cause = if has_ready_pod { WaitCause::NoCapacity } else { WaitCause::NoReadyPod };
            self.wait_cause = self.wait_cause.or(Some(cause));
            // After a failed dial the request still waits, and is counted from its first wait. After a resend it counts
            // as a new wait.
            let starts_waiting = count_wait(&mut self.waiting_since, &mut state, self.client);
            // The further waiting request may make this activator claim or grant slots, by which others can be
            // dispatched.
            dispatched.extend(self.revision.reconcile_waiting(&mut state));
            let permits = self.revision.grant_permits(&state, dispatched);
            drop(state);
            if starts_waiting {
                // After the lock is released, since the reporter has a lock of its own.
                self.revision.on_waiting_started();
                if waiting == 1 {
                    let ready = self.revision.ready_since().is_some();
                    info!(revision = %self.revision.name, ready, "request waits");
                }
            }
            send_permits(permits);
            permit_rx
        };
        // Only `fail_waiters` drops the sender of a waiting request, after the Revision has left the RouteTable.
        permit_rx
            .await
            .map_err(|_dropped| ProxyRequestError::UnknownRevision(self.revision.name.to_string()))
    }

    /// Counts the request as waiting, although it has a permit, because the dial to its pod takes long. Without effect
    /// if it counts already.
    pub fn start_waiting(&mut self) {
        self.wait_cause = self.wait_cause.or(Some(WaitCause::LateDial));
        let starts_waiting = {
            let mut state = self.revision.lock_state();
            count_wait(&mut self.waiting_since, &mut state, self.client)
        };
        if starts_waiting {
            self.revision.on_waiting_started();
        }
    }

    /// Returns the first cause of the wait that has ended; `None`: there was no wait. A later wait has its own.
    pub fn take_wait_cause(&mut self) -> Option<WaitCause> {
        self.wait_cause.take()
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
            let mut state = self.revision.lock_state();
            state.totals.record_finish(now_ns());
            state.totals.abandoned += u64::from(!has_pod);
        }
        let metrics = &self.revision.context.pod_settings.metrics;
        metrics.waiting_requests.dec();
        metrics.wait_seconds.observe(since.elapsed().as_secs_f64());
        self.revision.context.usage_reporter.mark_changed(&self.revision);
    }
}

/// Begins the time of waiting of a client's request, and counts it. Returns false if the time had begun before.
fn count_wait(
    waiting_since: &mut Option<Instant>,
    state: &mut LockedRevisionState,
    client: Option<IpAddr>,
) -> bool {
    let starts_waiting = waiting_since.is_none();
    if starts_waiting {
        *waiting_since = Some(Instant::now());
        // Only the client of the first waiting request counts: its zone is that of the pod which the request wakes.
        if state.totals.in_flight() == 0
            && let Some(active) = &mut state.active
        {
            active.first_client = client;
        }
        state.totals.record_start(now_ns());
    }
    starts_waiting
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let (waiter, permits) = {
            let mut state = self.revision.lock_state();
            let waiter = state.active.as_mut().and_then(|active| {
                active.queue_entries -= 1;
                active.wait_queue.remove_waiter(place)
            });
            let dispatched = waiter
                .as_ref()
                .map_or_else(Vec::new, |_| self.revision.reconcile_waiting(&mut state));
            let permits = self.revision.grant_permits(&state, dispatched);
            state.drop_if_idle();
            (waiter, permits)
        };
        // Outside of the lock: a permit wakes its task, which may take the lock at once.
        send_permits(permits);
        drop(waiter);
        self.end_waiting(false);
    }
}
