//! Shell: one Revision at this activator: the events of its requests, its pods and its slots.

use std::{
    net::IpAddr,
    num::NonZeroU16,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    link::PodReportKey,
    outbox::Outbox,
    standby_watch::StandbyWatchAction,
    wire::{AppProtocol, NamespacedName, PodReportItem, RequestTotals, SlotClaim, SlotGrant},
};
use datapath::abi;
use tokio::sync::oneshot;
use tracing::info;

use crate::{
    budget::{REQUEST_OVERHEAD_BYTES, WaitQueueBounds},
    clock::{now_ns, random_u64},
    pods::{
        endpoint::{PodConnectionSettings, PodEndpoint},
        endpoint_key::PodEndpointKey,
    },
    revisions::{
        revision_snapshot::{RevisionSnapshot, SnapshotPod},
        route_settings::{ActivatorTopology, PodTable, RevisionRouteSettings},
        usage_reporter::{QueueUsageReporter, QueueUsageSource},
        wait_queue::{CROWD_RELEASE_TIME, CrowdReleaseNumber, DispatchedRequest, PauseNumber},
    },
    slots::{peer_view::ActivatorName, peers::Peers, revision_slots::RevisionSlots},
};

mod queue_entry;
mod state;

pub use queue_entry::{QueueEntry, WaitCause};
use state::{ActiveRevisionState, LockedRevisionState, starting_pods};

/// Time for which requests avoid a pod that left a dial unanswered: the same as for connects that the eBPF programs
/// route.
const UNANSWERED_POD_PAUSE: Duration = Duration::from_nanos(abi::AVOID_UNANSWERED_NS);

/// Settings and services that all Revisions share.
#[derive(Debug)]
pub struct RevisionContext {
    /// View of the other activators, and the outboxes for claims and grants.
    pub peers: Arc<Peers>,
    /// Bounds of each Revision's wait queue.
    pub queue_bounds: WaitQueueBounds,
    /// Settings for the pods of all Revisions.
    pub pod_settings: PodConnectionSettings,
    /// Reporter of waiting requests to the autoscaler.
    pub usage_reporter: Arc<QueueUsageReporter>,
    /// Number of pods and ports of pods seen so far: the next [`PodEndpointKey::id`], so that no two share a key.
    pub next_pod_id: AtomicU64,
    /// Reports to the controllers, among them those of pods that are passed over.
    pub reports: Outbox<PodReportKey, PodReportItem>,
}

/// One Revision at this activator. While it is asleep and no request waits, it stores little more than its name.
#[derive(Debug)]
pub struct ActivatorRevision {
    /// Name and namespace of the Revision.
    pub name: NamespacedName,
    /// True if the Revision is in the list of Revisions whose usage is still to be reported.
    is_report_pending: AtomicBool,
    context: Arc<RevisionContext>,
    state: Mutex<LockedRevisionState>,
}

/// Figures of one Revision at this activator; all are zero while it is asleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RevisionQueueMetrics {
    /// True if the RouteTable lists a ready pod.
    pub has_ready_pod: bool,
    /// Number of requests that wait here.
    pub waiting: usize,
    /// Number of requests at pods.
    pub at_pods: u64,
}

/// Right to send one request to one pod. Dropping it registers the end of the request there.
#[derive(Debug)]
pub struct PodPermit {
    /// Pod that the request is sent to.
    pub pod: Arc<PodEndpoint>,
    revision: Arc<ActivatorRevision>,
}

impl PodPermit {
    /// Reports that the pod leaves a dial unanswered. Returns true if another pod takes requests, which is then
    /// preferred.
    pub fn report_unanswered_dial(&self) -> bool {
        self.revision.on_unanswered_dial(&self.pod)
    }
}

impl Drop for PodPermit {
    fn drop(&mut self) {
        self.revision.on_request_done(&self.pod);
    }
}

impl ActivatorRevision {
    /// Creates a Revision without pods, which the RouteTable has not described yet.
    pub fn new(name: NamespacedName, context: Arc<RevisionContext>) -> Self {
        Self { name, is_report_pending: AtomicBool::new(false), context, state: Mutex::default() }
    }

    /// Sets the settings of the RouteTable. `None`: the table does not contain the Revision any more.
    pub fn set_route_settings(&self, settings: Option<RevisionRouteSettings>) {
        self.lock_state().route_settings = settings;
    }

    /// Settings of the Revision in the RouteTable; `None`: the table does not contain it.
    pub fn route_settings(&self) -> Option<RevisionRouteSettings> {
        self.lock_state().route_settings.clone()
    }

    /// Protocol of the pods' serving port; `None`: the RouteTable does not contain the Revision.
    pub fn protocol(&self) -> Option<AppProtocol> {
        self.lock_state().route_settings.as_ref().map(|settings| settings.protocol)
    }

    /// Returns true if it stands for a scaled Service: it has the Service's name. Names of Knative Revisions begin with
    /// that of their Configuration, and go on.
    pub fn is_of_scaled_service(&self) -> bool {
        let state = self.lock_state();
        let owners = state.route_settings.as_ref().map(|settings| &settings.owner_names);
        owners.is_some_and(|owners| owners.configuration == self.name.name)
    }

    /// Start of the time in which the RouteTable lists at least one ready pod; `None`: it lists none.
    pub fn ready_since(&self) -> Option<Instant> {
        self.lock_state().active.as_ref().and_then(|active| active.ready_since)
    }

    /// Totals of the requests that waited here, and the time at which they were read, in ns of [`now_ns`].
    pub fn totals(&self) -> (RequestTotals, u64) {
        let state = self.lock_state();
        (state.totals, now_ns())
    }

    /// Number of requests that wait here.
    pub fn waiting_count(&self) -> usize {
        self.lock_state().active.as_ref().map_or(0, |active| active.wait_queue.waiting_count())
    }

    /// Figures of the Revision's requests and pods, for its metrics.
    pub fn queue_metrics(&self) -> RevisionQueueMetrics {
        let state = self.lock_state();
        let Some(active) = &state.active else { return RevisionQueueMetrics::default() };
        RevisionQueueMetrics {
            has_ready_pod: active.ready_since.is_some(),
            waiting: active.wait_queue.waiting_count(),
            at_pods: active.wait_queue.in_flight(),
        }
    }

    /// The Revision as it is now, with the pod that would get a request for a port of the scaled Service. `None`: the
    /// Revision is one of Knative. `random` is uniform over u64. Nothing changes by it.
    pub fn snapshot(&self, service_port: Option<NonZeroU16>, random: u64) -> RevisionSnapshot {
        let state = self.lock_state();
        let mut snapshot = RevisionSnapshot {
            settings: state.route_settings.clone(),
            waiting: 0,
            max_waiting: self.context.queue_bounds.max_requests,
            in_flight: 0,
            pods: Vec::new(),
            next: None,
            has_room: true,
        };
        // A Revision without active state has no queue, so nothing waits and there is room.
        let Some(active) = &state.active else { return snapshot };
        let queue = &active.wait_queue;
        snapshot.waiting = queue.waiting_count();
        snapshot.max_waiting = queue.max_waiting();
        snapshot.in_flight = queue.in_flight();
        let pods = queue.queued_pods().filter_map(|queued| {
            let uid = active.pods.get(&queued.load.key)?.uid.clone();
            Some(SnapshotPod { uid, queued })
        });
        snapshot.pods = pods.collect();
        snapshot.next = queue.preview(service_port, random);
        snapshot.has_room = queue.is_releasing(service_port)
            || queue.has_room(service_port, REQUEST_OVERHEAD_BYTES);
        snapshot
    }

    /// Closes connections to pods that were idle for too long.
    pub fn prune_connections(&self) {
        let pods: Vec<Arc<PodEndpoint>> = self
            .lock_state()
            .active
            .iter()
            .flat_map(|active| active.pods.values().cloned())
            .collect();
        pods.iter().for_each(|pod| pod.prune_idle());
    }

    /// Applies the pods of the RouteTable, for an activator at its place in `topology`. Requests that wait are
    /// dispatched to newly ready pods at once.
    pub fn set_pods(self: &Arc<Self>, pods: &PodTable, topology: &ActivatorTopology) {
        let mut state = self.lock_state();
        // Most Revisions are asleep: one without pods and state must not allocate anything on each change of the table.
        if pods.is_empty() && state.active.is_none() && state.slots.is_none() {
            return;
        }
        let (limit, protocol) = state.limit_and_protocol();
        if limit > 0 {
            state.ensure_slots(&self.name, &self.context);
        }
        let active = state.ensure_active(self.context.queue_bounds);
        let ready = active.update_pods(pods, topology, (limit, protocol), &self.context);
        let since = active.ready_since.unwrap_or_else(Instant::now);
        // Clients are sent to pods directly by the table alone: the agents follow it, too.
        let is_listed_ready = pods.values().any(|pod| pod.is_ready && pod.address.is_some());
        active.ready_since = is_listed_ready.then_some(since);
        let (count, waiting) = (ready.len(), active.wait_queue.waiting_count());
        // The queue dispatches first, then the slots: with a hard limit `on_routes` leaves no free slots, and
        // `reconcile_slots` assigns them.
        let mut dispatched = active.wait_queue.on_routes(ready, limit, random_u64);
        let release = active.wait_queue.take_new_release();
        state.on_dispatched(&dispatched);
        dispatched.extend(self.reconcile_slots(&mut state));
        let permits = self.grant_permits(&state, dispatched);
        state.drop_if_idle();
        // The waiters run as soon as they have their permits, so the lock is released before.
        drop(state);
        let dispatched_count = permits.len();
        send_permits(permits);
        if let Some(number) = release {
            tokio::spawn(Arc::clone(self).end_release_later(number));
        }
        if waiting > 0 {
            let starting = starting_pods(pods, limit);
            info!(revision = %self.name, ready = count, starting, limit, waiting, released = dispatched_count, "pods changed");
        }
    }

    /// Waits for pods that start, then gives the rest of a crowd to the pods that are open.
    async fn end_release_later(self: Arc<Self>, number: CrowdReleaseNumber) {
        tokio::time::sleep(CROWD_RELEASE_TIME).await;
        self.update_and_dispatch(|state| {
            let Some(active) = state.active.as_mut() else { return Vec::new() };
            active.wait_queue.end_release(number, random_u64)
        });
    }

    /// Fails all waiting requests, because the RouteTable has not contained the Revision for some time.
    pub fn fail_waiters(self: &Arc<Self>) {
        // If the Revision is back meanwhile, its requests wait on, and the update of its slots may dispatch some.
        let mut waiters = Vec::new();
        self.update_and_dispatch(|state| {
            let is_back = state.route_settings.is_some();
            let active = state.active.as_mut().filter(|_| !is_back);
            waiters = active.map(|it| it.wait_queue.drain_waiters()).unwrap_or_default();
            Vec::new()
        });
        if !waiters.is_empty() {
            info!(revision = %self.name, waiting = waiters.len(), "waiting requests refused: their Revision is gone");
        }
    }

    /// Creates the queue entry of an arriving request, which holds `bytes` bytes while it waits. It gets a pod that has
    /// the port of the scaled Service; `None`: the Revision is one of Knative, and each of its pods takes the request.
    pub fn queue_entry(
        self: &Arc<Self>,
        service_port: Option<NonZeroU16>,
        bytes: usize,
    ) -> QueueEntry {
        QueueEntry::new(Arc::clone(self), service_port, bytes)
    }

    /// Returns the permit of a request for a port of the scaled Service that does not wait; `None`: no pod has capacity
    /// now, so the request needs a [`queue_entry`](Self::queue_entry).
    pub fn try_permit(self: &Arc<Self>, service_port: Option<NonZeroU16>) -> Option<PodPermit> {
        let mut state = self.lock_state();
        state.ensure_slots_if_limited(self);
        let active = state.active.as_mut()?;
        let key = active.wait_queue.admit(service_port, random_u64())?;
        let permit = self.grant_permit(active, key);
        state.on_dispatched_to(&permit.pod);
        Some(permit)
    }

    /// Handles a failed dial to the permit's pod: the pod gets no requests for the port for a short pause.
    pub fn on_dial_failed(self: &Arc<Self>, permit: PodPermit) {
        let pod = Arc::clone(&permit.pod);
        let paused = self.pause_pod(pod.key);
        drop(permit);
        // Of several requests whose dials fail at the same time, only the first pauses the pod and starts the timer.
        let Some(number) = paused else { return };
        let pause = pod.record_failed_dial();
        info!(revision = %self.name, pod = %pod.uid, ?pause, "pod paused: dial failed");
        let revision = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            revision.resume_pod(pod.key, number);
        });
    }

    /// Handles an unanswered dial: requests avoid the pod for a while if another one is open. Returns true if one is.
    fn on_unanswered_dial(self: &Arc<Self>, pod: &PodEndpoint) -> bool {
        let has_other = self.has_other_open_pod(pod.key);
        if has_other && let Some(pause) = self.pause_pod(pod.key) {
            info!(revision = %self.name, pod = %pod.uid, "pod leaves a dial unanswered");
            pod.redirect_waiters();
            tokio::spawn(Arc::clone(self).avoid_unanswered_pod(pod.key, pause));
        }
        has_other
    }

    /// Waits until the pod may get requests again: after [`UNANSWERED_POD_PAUSE`], or as soon as no other pod takes
    /// requests.
    async fn avoid_unanswered_pod(self: Arc<Self>, pod: PodEndpointKey, pause: PauseNumber) {
        let until = Instant::now() + UNANSWERED_POD_PAUSE;
        while Instant::now() < until && self.has_other_open_pod(pod) {
            tokio::time::sleep(UNANSWERED_POD_PAUSE / 100).await;
        }
        self.resume_pod(pod, pause);
    }

    fn has_other_open_pod(&self, pod: PodEndpointKey) -> bool {
        self.lock_state()
            .active
            .as_ref()
            .is_some_and(|active| active.wait_queue.has_other_open(pod))
    }

    /// Pauses the pod, and frees its slots for other activators. Returns the number of the pause; `None`: the pod was
    /// not open.
    fn pause_pod(self: &Arc<Self>, pod: PodEndpointKey) -> Option<PauseNumber> {
        let mut pause = None;
        self.update_and_dispatch(|state| {
            pause = state.active.as_mut().and_then(|active| active.wait_queue.pause_pod(pod));
            Vec::new()
        });
        pause
    }

    /// Ends this pause of the pod, which then gets requests again.
    fn resume_pod(self: &Arc<Self>, pod: PodEndpointKey, pause: PauseNumber) {
        self.update_and_dispatch(|state| {
            let Some(active) = state.active.as_mut() else { return Vec::new() };
            active.wait_queue.resume_pod(pod, pause, random_u64)
        });
    }

    /// Performs the actions of a pod's standby watch until the watch awaits nothing any more.
    async fn perform_watch_actions(self: Arc<Self>, pod: Arc<PodEndpoint>) {
        while let Some(action) = pod.standby_watch.next_action().await {
            match action {
                StandbyWatchAction::Query(number) => {
                    pod.standby_watch.start_query(pod.key.address.ip(), number);
                }
                StandbyWatchAction::PassOver => self.pass_over_pod(&pod),
                StandbyWatchAction::UseAgain => self.use_pod_again(&pod),
            }
        }
    }

    /// Passes over a frozen pod: nothing shows that it was thawed. Requests that it may have received stay with it.
    /// Requests whose connection is not open yet go elsewhere, and a report asks the controller for another pod.
    fn pass_over_pod(self: &Arc<Self>, pod: &PodEndpoint) {
        info!(revision = %self.name, pod = %pod.uid, "frozen pod passed over: no sign that it was thawed");
        self.update_and_dispatch(|state| {
            if let Some(active) = state.active.as_mut() {
                active.wait_queue.pass_over(pod.key);
            }
            Vec::new()
        });
        // After the queue has passed the pod over, or it would give it to them again.
        pod.redirect_waiters();
        let uid = pod.uid.to_string();
        self.context
            .reports
            .set(PodReportKey::PassedOver(uid.clone()), PodReportItem::PassedOver(uid));
        self.context.pod_settings.metrics.pods_passed_over.inc();
    }

    /// Uses a passed-over pod again: it runs, has no standby order any more, or is gone.
    fn use_pod_again(self: &Arc<Self>, pod: &PodEndpoint) {
        info!(revision = %self.name, pod = %pod.uid, "frozen pod is used again");
        self.update_and_dispatch(|state| {
            let Some(active) = state.active.as_mut() else { return Vec::new() };
            active.wait_queue.use_again(pod.key, random_u64)
        });
        self.context.reports.remove(&PodReportKey::PassedOver(pod.uid.to_string()));
        self.context.pod_settings.metrics.pods_passed_over.dec();
    }

    /// Handles the end of a request at a pod. The requests that can go to a pod because of it get their permits.
    fn on_request_done(self: &Arc<Self>, pod: &PodEndpoint) {
        let mut state = self.lock_state();
        let Some(active) = state.active.as_mut() else { return };
        let mut dispatched = active.wait_queue.on_request_done(pod.key, random_u64);
        state.on_dispatched(&dispatched);
        // A slot that is free again at once needs no new distribution: the common case under load stays cheap.
        let is_open =
            state.active.as_ref().is_some_and(|active| active.wait_queue.is_open(pod.key));
        let is_slot_free =
            state.slots.as_mut().is_some_and(|slots| slots.on_request_done(&pod.uid)) && is_open;
        match &mut state.active {
            Some(active) if is_slot_free => {
                let more = active.wait_queue.add_free_slot(pod.key, random_u64);
                state.on_dispatched(&more);
                dispatched.extend(more);
            }
            Some(_) | None => dispatched.extend(self.reconcile_slots(&mut state)),
        }
        let permits = self.grant_permits(&state, dispatched);
        state.drop_if_idle();
        drop(state);
        send_permits(permits);
    }

    /// Runs `step` on the state and resumes the requests that may be dispatched after it.
    fn update_and_dispatch(
        self: &Arc<Self>,
        step: impl FnOnce(&mut LockedRevisionState) -> DispatchedRequests,
    ) {
        let mut state = self.lock_state();
        let mut dispatched = step(&mut state);
        state.on_dispatched(&dispatched);
        dispatched.extend(self.reconcile_slots(&mut state));
        let permits = self.grant_permits(&state, dispatched);
        state.drop_if_idle();
        drop(state);
        send_permits(permits);
    }

    /// Updates the slots after a change, and publishes claims and grants. Returns the requests dispatched by it.
    fn reconcile_slots(&self, state: &mut LockedRevisionState) -> DispatchedRequests {
        let (limit, _) = state.limit_and_protocol();
        let LockedRevisionState { active, slots: Some(slots), .. } = state else {
            return Vec::new();
        };
        slots.on_peer_view(self.context.peers.view());
        if let Some(active) = active {
            slots.on_routes(limit, active.ready_pod_uids());
            slots.on_standby(active.standby_pod_uids());
        }
        let mut all = Vec::new();
        // Slots and queue depend on each other: a dispatched request changes the free slots, until no request is
        // dispatched.
        loop {
            let (waiting, open) =
                active.as_deref().map(ActiveRevisionState::queue_state).unwrap_or_default();
            slots.on_queue(waiting, open);
            slots.reconcile(random_u64);
            let Some(active) = active.as_mut().filter(|_| limit > 0) else { break };
            let ActiveRevisionState { wait_queue, pods, .. } = &mut **active;
            let dispatched = wait_queue.set_free_slots(
                |key| pods.get(&key).map_or(0, |it| slots.free_slots(&it.uid)),
                random_u64,
            );
            if dispatched.is_empty() {
                break;
            }
            dispatched.iter().for_each(|(_, key)| slots.on_dispatched(&pods[key].uid));
            all.extend(dispatched);
        }
        // Published even when nothing was dispatched: other activators may need to know of the new number of waiting
        // requests.
        self.context.peers.publish(&self.name, slots.take_messages());
        if slots.is_unused() {
            state.slots = None;
        }
        all
    }

    /// Updates the slots after only the number of waiting requests has changed. Without other activators there is
    /// nothing to do.
    fn reconcile_waiting(&self, state: &mut LockedRevisionState) -> DispatchedRequests {
        match &state.slots {
            Some(slots) if !slots.is_sole_activator() => self.reconcile_slots(state),
            Some(_) | None => Vec::new(),
        }
    }

    // Messages of other activators.

    /// Applies the latest grant of an owner; `None`: the owner has withdrawn it.
    pub fn on_grant(self: &Arc<Self>, from: &ActivatorName, grant: Option<SlotGrant>) {
        self.handle_slot_event(grant.is_some(), |slots| slots.on_grant(from, grant));
    }

    /// Applies the latest claim of a holder; `None`: the holder has withdrawn it.
    pub fn on_claim(self: &Arc<Self>, from: &ActivatorName, claim: Option<SlotClaim>) {
        self.handle_slot_event(claim.is_some(), |slots| slots.on_claim(from, claim));
    }

    /// Registers that a holder's stream has begun or ended.
    pub fn on_holder_stream(self: &Arc<Self>, from: &ActivatorName) {
        self.handle_slot_event(false, |slots| slots.on_holder_stream(from));
    }

    /// Registers a change of the known activators.
    pub fn on_peer_view(self: &Arc<Self>) {
        self.handle_slot_event(false, |_| {});
    }

    /// Runs `step` on the slots, if the Revision keeps state of them. If it keeps none and `creates_slots` is true, the
    /// state is created first. A claim or grant that arrives is a reason for that, a withdrawal is none.
    fn handle_slot_event(
        self: &Arc<Self>,
        creates_slots: bool,
        step: impl FnOnce(&mut RevisionSlots),
    ) {
        self.update_and_dispatch(|state| {
            if creates_slots {
                state.ensure_slots(&self.name, &self.context);
            }
            if let Some(slots) = &mut state.slots {
                step(slots);
            }
            Vec::new()
        });
    }

    /// Returns true if the Revision keeps state of its slots.
    pub fn has_slots(&self) -> bool {
        self.lock_state().slots.is_some()
    }

    /// Returns true if any request of the Revision is at a pod.
    pub fn has_requests_at_pods(&self) -> bool {
        self.lock_state().active.as_ref().is_some_and(|active| active.wait_queue.in_flight() > 0)
    }

    fn grant_permits(
        self: &Arc<Self>,
        state: &LockedRevisionState,
        dispatched: DispatchedRequests,
    ) -> GrantedPermits {
        let Some(active) = &state.active else { return Vec::new() };
        let permit = |(waiter, key)| (waiter, self.grant_permit(active, key));
        dispatched.into_iter().map(permit).collect()
    }

    fn grant_permit(
        self: &Arc<Self>,
        active: &ActiveRevisionState,
        key: PodEndpointKey,
    ) -> PodPermit {
        let pod =
            active.pods.get(&key).expect("the wait queue knows only pods that `update_pods` named");
        if pod.standby_watch.start_use() {
            tokio::spawn(Arc::clone(self).perform_watch_actions(Arc::clone(pod)));
        }
        PodPermit { pod: Arc::clone(pod), revision: Arc::clone(self) }
    }

    fn lock_state(&self) -> MutexGuard<'_, LockedRevisionState> {
        // A panic elsewhere cannot leave queue and totals inconsistent: each of their own steps completes or does not
        // begin.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests that the wait queue has dispatched, before they get their permits.
type DispatchedRequests = Vec<DispatchedRequest<oneshot::Sender<PodPermit>>>;

type GrantedPermits = Vec<(oneshot::Sender<PodPermit>, PodPermit)>;

/// Resumes dispatched requests. Call it without the lock: if a request is gone, its permit is dropped here, which
/// locks.
fn send_permits(permits: GrantedPermits) {
    for (waiter, permit) in permits {
        drop(waiter.send(permit));
    }
}

impl ActivatorRevision {
    fn on_waiting_started(self: &Arc<Self>) {
        self.context.pod_settings.metrics.waiting_requests.inc();
        self.context.usage_reporter.report_waiting(self);
    }
}

impl QueueUsageSource for ActivatorRevision {
    fn name(&self) -> &NamespacedName {
        &self.name
    }

    fn mark_report_pending(&self) -> bool {
        !self.is_report_pending.swap(true, Ordering::AcqRel)
    }

    fn take_report(&self) -> (RequestTotals, u64) {
        // Cleared before the totals are read: a change after that puts the Revision into the list again.
        self.is_report_pending.store(false, Ordering::Release);
        self.totals()
    }

    fn first_client(&self) -> Option<IpAddr> {
        let state = self.lock_state();
        let first = state.active.as_ref().and_then(|active| active.first_client);
        first.filter(|_| state.totals.in_flight() > 0)
    }
}

#[cfg(test)]
pub(crate) mod tests;
