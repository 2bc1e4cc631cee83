//! Pure: the wait queue of one Revision.
//!
//! A request waits only while no ready pod has capacity. Capacity arises when a pod becomes ready, when a request ends,
//! or when a slot is granted. The call that adds capacity also dispatches the first request of the queue. Therefore,
//! whenever a call returns, either no request waits or no pod has capacity.
//!
//! Without a hard limit, the first open pod has capacity for all that waits. If that is a crowd and more pods start, a
//! release bounds the capacity of each pod for a moment (`wait_queue/crowd_release.rs`).
//!
//! A pod of a scaled Service counts as one pod for each port of the Service, with requests and pauses of its own.
//! Requests for a port go to the pods that have it, and wait for no other port. Each port has the bounds for itself: one
//! that no pod serves may be full, and refuses no request for another one. Bounds over all Revisions limit the memory.
//!
//! | word | meaning |
//! |---|---|
//! | arrival number | place of a request in the order of arrival, which it keeps when it waits a second time |
//! | service port | port of the scaled Service that a request is for; `None` for requests of Knative Revisions |
//! | queue place | service port and arrival number of a request |
//! | admit | give a pod to a request at once |
//! | enqueue | let a request wait, in the order of the arrival numbers |
//! | dispatch | give a pod to the waiting request with the lowest arrival number for which one has capacity |
//! | waiter | `W`, the shell's handle of a waiting request; the queue only returns it |
//! | early-ready pod | pod that the agent of its node has reported as ready before the RouteTable lists it so |
//! | open pod | ready or early-ready pod that takes requests |
//! | paused pod | ready pod that gets no requests for a while, because a dial to it failed or got no SYN-ACK |
//! | passed-over pod | pod with a standby order that gets no requests, because nothing shows that it was thawed |
//! | closed pod | pod that takes no requests, but still has some in flight |
//! | withheld pod | paused or passed-over pod: it is not open, even if the RouteTable lists it as ready |
//! | rank | place of a pod in the choice: pods that hints prefer come first, pods that are to stay frozen last |
//! | crowd | requests that wait for a port when its first pod opens, if they are more than 64 |
//! | capacity | without a hard limit: any open pod, within the bounds of a release; with one: a free slot of [`RevisionSlots`] at an open pod |
//!
//! [`RevisionSlots`]: crate::slots::revision_slots::RevisionSlots

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
    ops::{Bound, Range},
};

use crate::{
    budget::WaitQueueBounds,
    pods::endpoint_key::PodEndpointKey,
    revisions::balance::{PodLoad, PodRank, pick_pod, pick_ranked_pod},
};

mod crowd_release;

use crowd_release::CrowdRelease;
pub use crowd_release::{CROWD_RELEASE_TIME, CrowdReleaseNumber};

/// Requests that may wait for each pod with a hard limit, in multiples of that limit. Knative's sidecar lets as many
/// wait (`cmd/queue`, `pkg/queue/breaker.go`); this queue replaces the sidecar's.
const QUEUED_PER_SLOT: usize = 10;

/// Place of a request in the order of arrival. A request keeps it when it waits a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArrivalNumber(u64);

/// Place of a request among those that wait: behind the earlier ones for the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePlace {
    /// Port of the scaled Service that the request is for; `None`: its Revision is one of Knative.
    pub service_port: Option<NonZeroU16>,
    /// Place in the order of arrival, over all ports.
    pub arrival: ArrivalNumber,
}

/// Number of one pause of a pod. It distinguishes the pause from later ones of the same pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseNumber(u64);

/// Error of [`WaitQueue::enqueue`]: the queue has reached one of its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitQueueFull;

/// State of a pod in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodQueueState {
    /// The pod takes requests.
    Open,
    /// The pod is withheld: a dial failed or got no SYN-ACK, or nothing shows that the pod was thawed.
    Paused,
    /// The pod takes no requests, and still has some in flight.
    Closed,
}

/// Pod of the queue with its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedPod {
    /// Load of the pod. One that takes no requests has no free slots.
    pub load: PodLoad,
    /// State of the pod.
    pub state: PodQueueState,
}

/// Dispatched request: its waiter, and its pod. The request already counts as in flight there.
pub type DispatchedRequest<W> = (W, PodEndpointKey);

/// Wait queue of one Revision: the pods that take requests, their requests in flight, and the waiting requests.
#[derive(Debug)]
pub struct WaitQueue<W> {
    bounds: WaitQueueBounds,
    /// Hard limit of each pod (containerConcurrency); 0: no limit.
    limit: u32,
    /// Pods that the RouteTable lists as ready, and early-ready ones, including paused pods.
    ready_pods: BTreeSet<PodEndpointKey>,
    /// Rank of each pod whose rank is not the usual one.
    ranks: BTreeMap<PodEndpointKey, PodRank>,
    /// Pods that take requests, sorted by key.
    open_pods: Vec<PodLoad>,
    /// Pods that take no requests now and still have some in flight: draining, gone or paused.
    closed_pods: BTreeMap<PodEndpointKey, u32>,
    /// Ready pods that get no requests for a while: a dial failed or got no SYN-ACK.
    paused_pods: BTreeMap<PodEndpointKey, PauseNumber>,
    /// Pods of which nothing shows that they were thawed, also while they are not ready. They get no requests until
    /// [`use_again`](Self::use_again).
    passed_over_pods: BTreeSet<PodEndpointKey>,
    last_pause: u64,
    /// Position of round robin among the open pods.
    round_robin_cursor: usize,
    waiting: BTreeMap<QueuePlace, QueuedWaiter<W>>,
    /// Amounts that wait for each port; without an entry none does.
    waiting_by_port: BTreeMap<Option<NonZeroU16>, WaitingAmount>,
    last_arrival: u64,
    /// Number of pods that start, for which a crowd waits a moment.
    starting_pods: usize,
    /// Release of the crowd that waits for each port. While there is one, a request waits for the port.
    releases: BTreeMap<Option<NonZeroU16>, CrowdRelease>,
    last_release: u64,
    /// Release that has begun, and whose end the shell has not scheduled yet.
    new_release: Option<CrowdReleaseNumber>,
}

#[derive(Debug)]
struct QueuedWaiter<W> {
    waiter: W,
    bytes: usize,
}

/// Number and bytes of the requests that wait for one port.
#[derive(Clone, Copy, Debug, Default)]
struct WaitingAmount {
    requests: usize,
    bytes: usize,
}

impl<W> WaitQueue<W> {
    /// Creates an empty queue, without any pods.
    pub fn new(bounds: WaitQueueBounds) -> Self {
        Self {
            bounds,
            limit: 0,
            ready_pods: BTreeSet::new(),
            ranks: BTreeMap::new(),
            open_pods: Vec::new(),
            closed_pods: BTreeMap::new(),
            paused_pods: BTreeMap::new(),
            passed_over_pods: BTreeSet::new(),
            last_pause: 0,
            round_robin_cursor: 0,
            waiting: BTreeMap::new(),
            waiting_by_port: BTreeMap::new(),
            last_arrival: 0,
            starting_pods: 0,
            releases: BTreeMap::new(),
            last_release: 0,
            new_release: None,
        }
    }

    /// Registers the arrival of a request for a port. Returns its place.
    pub fn assign_place(&mut self, service_port: Option<NonZeroU16>) -> QueuePlace {
        self.last_arrival += 1;
        QueuePlace { service_port, arrival: ArrivalNumber(self.last_arrival) }
    }

    /// Chooses a pod for one request for a port and occupies its capacity. `None`: no pod has capacity, or a crowd is
    /// released, so the request has to [`enqueue`](Self::enqueue).
    pub fn admit(
        &mut self,
        service_port: Option<NonZeroU16>,
        random: u64,
    ) -> Option<PodEndpointKey> {
        // The requests of the crowd have arrived before.
        if self.is_releasing(service_port) {
            return None;
        }
        self.occupy(service_port, random)
    }

    /// Chooses a pod for one request for a port, and occupies its capacity.
    fn occupy(&mut self, service_port: Option<NonZeroU16>, random: u64) -> Option<PodEndpointKey> {
        let mut cursor = self.round_robin_cursor;
        let at = self.pick(service_port, &mut cursor, random)?;
        self.round_robin_cursor = cursor;
        let load = &mut self.open_pods[at];
        load.in_flight += 1;
        load.free_slots = load.free_slots.saturating_sub(1);
        let key = load.key;
        if let Some(release) = self.releases.get_mut(&service_port) {
            release.record(key);
        }
        Some(key)
    }

    /// Returns the pod that [`admit`](Self::admit) would choose now, and changes nothing.
    pub fn preview(&self, service_port: Option<NonZeroU16>, random: u64) -> Option<PodEndpointKey> {
        if self.is_releasing(service_port) {
            return None;
        }
        let mut cursor = self.round_robin_cursor;
        let at = self.pick(service_port, &mut cursor, random)?;
        Some(self.open_pods[at].key)
    }

    /// Chooses an open pod for a port, by its index.
    fn pick(
        &self,
        service_port: Option<NonZeroU16>,
        cursor: &mut usize,
        random: u64,
    ) -> Option<usize> {
        let range = self.open_range(service_port);
        let pods = &self.open_pods[range.clone()];
        let at = if let Some(release) = self.releases.get(&service_port) {
            release.pick(pods)?
        } else {
            // Nearly all Revisions have no other ranks than the usual one, so that their requests need no second list.
            let pick = if self.ranks.is_empty() { pick_pod } else { pick_ranked_pod };
            pick(pods, self.limit, cursor, random)?
        };
        Some(range.start + at)
    }

    /// Puts a request of `bytes` bytes into the queue, at its place. Fails if its port has reached a bound.
    pub fn enqueue(
        &mut self,
        place: QueuePlace,
        bytes: usize,
        waiter: W,
    ) -> Result<(), WaitQueueFull> {
        let amount = self.amount_with(place.service_port, bytes).ok_or(WaitQueueFull)?;
        self.waiting_by_port.insert(place.service_port, amount);
        self.waiting.insert(place, QueuedWaiter { waiter, bytes });
        Ok(())
    }

    /// Returns true if a further request of `bytes` bytes may wait for a port.
    pub fn has_room(&self, service_port: Option<NonZeroU16>, bytes: usize) -> bool {
        self.amount_with(service_port, bytes).is_some()
    }

    /// Returns the amount that waits for a port with a further request of `bytes` bytes; `None`: it exceeds a bound.
    fn amount_with(&self, service_port: Option<NonZeroU16>, bytes: usize) -> Option<WaitingAmount> {
        let before = self.waiting_by_port.get(&service_port).copied().unwrap_or_default();
        let total_bytes = before.bytes.saturating_add(bytes);
        let has_room = before.requests < self.max_waiting() && total_bytes <= self.bounds.max_bytes;
        has_room.then_some(WaitingAmount { requests: before.requests + 1, bytes: total_bytes })
    }

    /// Removes a request whose client is gone or whose deadline is over. `None`: it was not waiting any more.
    pub fn remove_waiter(&mut self, place: QueuePlace) -> Option<W> {
        let removed = self.waiting.remove(&place)?;
        if let Some(amount) = self.waiting_by_port.get_mut(&place.service_port) {
            amount.requests -= 1;
            amount.bytes -= removed.bytes;
            if amount.requests == 0 {
                self.waiting_by_port.remove(&place.service_port);
                self.releases.remove(&place.service_port);
            }
        }
        Some(removed.waiter)
    }

    /// Empties the queue, because no pod will ever have capacity. Returns all waiters.
    pub fn drain_waiters(&mut self) -> Vec<W> {
        self.waiting_by_port.clear();
        self.releases.clear();
        std::mem::take(&mut self.waiting).into_values().map(|it| it.waiter).collect()
    }

    /// Applies a change of the RouteTable: the ready pods and their hard limit. With a limit the pods have no capacity
    /// until [`set_free_slots`](Self::set_free_slots) assigns some. Returns the requests that are dispatched by the
    /// change.
    pub fn on_routes(
        &mut self,
        ready: impl IntoIterator<Item = PodEndpointKey>,
        limit: u32,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        let ready: BTreeSet<PodEndpointKey> = ready.into_iter().collect();
        self.limit = limit;
        // A pod that was not ready in between begins without a pause. Passed-over pods stay so until `use_again`.
        self.paused_pods.retain(|pod, _| ready.contains(pod));
        // Requests in flight survive the change: a pod that is ready again continues with the number it had.
        for load in std::mem::take(&mut self.open_pods) {
            self.closed_pods.insert(load.key, load.in_flight);
        }
        // In the order of the keys, in which `find_open` and `open_range` search.
        let open = ready.iter().copied().filter(|pod| !self.is_withheld(pod));
        for pod in open.collect::<Vec<_>>() {
            let in_flight = self.closed_pods.remove(&pod).unwrap_or(0);
            let rank = self.rank(pod);
            self.open_pods.push(PodLoad { key: pod, in_flight, free_slots: 0, rank });
        }
        self.closed_pods.retain(|_, in_flight| *in_flight > 0);
        self.ready_pods = ready;
        self.update_releases();
        self.dispatch_waiting(random)
    }

    /// Sets the ranks of pods for requests of this activator. A pod that is not named has the usual rank.
    pub fn set_ranks(&mut self, ranks: impl IntoIterator<Item = (PodEndpointKey, PodRank)>) {
        self.ranks = ranks.into_iter().filter(|(_, rank)| *rank != PodRank::Usual).collect();
        for load in &mut self.open_pods {
            load.rank = self.ranks.get(&load.key).copied().unwrap_or_default();
        }
    }

    /// Rank of a pod for requests of this activator.
    pub fn rank(&self, pod: PodEndpointKey) -> PodRank {
        self.ranks.get(&pod).copied().unwrap_or_default()
    }

    /// With a hard limit: sets the number of further requests for each open pod. Returns the requests dispatched by it.
    pub fn set_free_slots(
        &mut self,
        mut free_slots_at: impl FnMut(PodEndpointKey) -> u32,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        for load in &mut self.open_pods {
            load.free_slots = free_slots_at(load.key);
        }
        self.dispatch_waiting(random)
    }

    /// With a hard limit: adds one free slot at `pod`. Returns the request dispatched by it, if any.
    pub fn add_free_slot(
        &mut self,
        pod: PodEndpointKey,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        // A pod that is not open gets its slots by `set_free_slots` when it opens.
        let Ok(at) = self.find_open(pod) else { return Vec::new() };
        self.open_pods[at].free_slots += 1;
        self.dispatch_waiting(random)
    }

    /// Returns true if `pod` is open.
    pub fn is_open(&self, pod: PodEndpointKey) -> bool {
        self.find_open(pod).is_ok()
    }

    /// Pods that take requests while they are not paused, in the order of their keys.
    pub fn ready_pods(&self) -> impl Iterator<Item = PodEndpointKey> {
        self.ready_pods.iter().copied()
    }

    /// Requests in flight at one pod, open or closed.
    pub fn in_flight_at(&self, pod: PodEndpointKey) -> u32 {
        let open = self.find_open(pod).ok().map(|at| self.open_pods[at].in_flight);
        open.or_else(|| self.closed_pods.get(&pod).copied()).unwrap_or(0)
    }

    /// Keys of the open pods.
    pub fn open_pods(&self) -> impl Iterator<Item = PodEndpointKey> {
        self.open_pods.iter().map(|load| load.key)
    }

    /// Pods with their loads: those that take requests, then paused ones, then the others.
    pub fn queued_pods(&self) -> impl Iterator<Item = QueuedPod> {
        let not_open = move |key: PodEndpointKey, state: PodQueueState| {
            let in_flight = self.closed_pods.get(&key).copied().unwrap_or(0);
            let load = PodLoad { key, in_flight, free_slots: 0, rank: self.rank(key) };
            QueuedPod { load, state }
        };
        let state = PodQueueState::Open;
        let open = self.open_pods.iter().map(move |load| QueuedPod { load: *load, state });
        let paused = self.ready_pods.iter().filter(move |key| self.is_withheld(key));
        let paused = paused.map(move |key| not_open(*key, PodQueueState::Paused));
        let closed = self.closed_pods.keys().copied();
        let closed = closed.filter(move |key| !self.ready_pods.contains(key));
        open.chain(paused).chain(closed.map(move |key| not_open(key, PodQueueState::Closed)))
    }

    /// Registers the end of a request at `pod`. Returns the requests dispatched by it.
    ///
    /// With a hard limit this adds no capacity: [`RevisionSlots`] may give the slot to another activator. If it does
    /// not, the caller returns the slot by [`add_free_slot`](Self::add_free_slot) or
    /// [`set_free_slots`](Self::set_free_slots).
    ///
    /// [`RevisionSlots`]: crate::slots::revision_slots::RevisionSlots
    pub fn on_request_done(
        &mut self,
        pod: PodEndpointKey,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        if let Ok(at) = self.find_open(pod) {
            self.open_pods[at].in_flight -= 1;
            return self.dispatch_waiting(random);
        }
        // A closed pod is kept only to count the requests that it still has.
        if let Some(in_flight) = self.closed_pods.get_mut(&pod) {
            *in_flight -= 1;
            if *in_flight == 0 {
                self.closed_pods.remove(&pod);
            }
        }
        Vec::new()
    }

    /// Pauses `pod`: it gets no request until [`resume_pod`](Self::resume_pod), or until the RouteTable lists it
    /// again after it was not ready. Returns the number of the pause; `None`: the pod was not open.
    pub fn pause_pod(&mut self, pod: PodEndpointKey) -> Option<PauseNumber> {
        if !self.close_pod(pod) {
            return None;
        }
        // The number distinguishes the end of this pause from that of a later one of the same pod.
        self.last_pause += 1;
        let pause = PauseNumber(self.last_pause);
        self.paused_pods.insert(pod, pause);
        Some(pause)
    }

    /// Returns true if a pod other than `pod` is open for the same port.
    pub fn has_other_open(&self, pod: PodEndpointKey) -> bool {
        let range = self.open_range(pod.service_port);
        self.open_pods[range].iter().any(|load| load.key != pod)
    }

    /// Ends this pause of a pod, which is then open again. It has no effect if the pause has ended already, even if the
    /// pod has been paused again since. Returns the requests dispatched by it.
    pub fn resume_pod(
        &mut self,
        pod: PodEndpointKey,
        pause: PauseNumber,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        if self.paused_pods.get(&pod) != Some(&pause) {
            return Vec::new();
        }
        self.paused_pods.remove(&pod);
        self.reopen_pod(pod, random)
    }

    /// Passes over `pod`: it gets no request until [`use_again`](Self::use_again), even if the RouteTable lists it as
    /// ready.
    pub fn pass_over(&mut self, pod: PodEndpointKey) {
        self.passed_over_pods.insert(pod);
        self.close_pod(pod);
    }

    /// Uses a passed-over pod again. Returns the requests dispatched by it.
    pub fn use_again(
        &mut self,
        pod: PodEndpointKey,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        // A pause of the same pod goes on, so that `reopen_pod` may leave it closed.
        if self.passed_over_pods.remove(&pod) {
            return self.reopen_pod(pod, random);
        }
        Vec::new()
    }

    /// Closes a pod for further requests. Returns false if it was not open.
    fn close_pod(&mut self, pod: PodEndpointKey) -> bool {
        let Ok(at) = self.find_open(pod) else { return false };
        let load = self.open_pods.remove(at);
        // Its requests go on, and are counted again if the pod opens before they end.
        if load.in_flight > 0 {
            self.closed_pods.insert(pod, load.in_flight);
        }
        true
    }

    /// Opens a ready pod again, unless it is withheld for another reason. Returns the requests dispatched by it.
    fn reopen_pod(
        &mut self,
        pod: PodEndpointKey,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        if self.is_withheld(&pod) || !self.ready_pods.contains(&pod) {
            return Vec::new();
        }
        // An open pod stays as it is.
        if let Err(at) = self.find_open(pod) {
            let in_flight = self.closed_pods.remove(&pod).unwrap_or(0);
            let rank = self.rank(pod);
            self.open_pods.insert(at, PodLoad { key: pod, in_flight, free_slots: 0, rank });
        }
        self.dispatch_waiting(random)
    }

    /// Returns true if a pod gets no requests although it may be ready.
    fn is_withheld(&self, pod: &PodEndpointKey) -> bool {
        self.paused_pods.contains_key(pod) || self.passed_over_pods.contains(pod)
    }

    /// Number of requests that wait.
    pub fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// Number of requests in flight, over all pods.
    pub fn in_flight(&self) -> u64 {
        let open = self.open_pods.iter().map(|load| load.in_flight);
        open.chain(self.closed_pods.values().copied()).map(u64::from).sum()
    }

    /// Number of requests that may wait now for one port. Example: with the bound 10,000 and two pods with
    /// containerConcurrency 4, 10,080 requests may wait. Pods of a scaled Service have no hard limit.
    pub fn max_waiting(&self) -> usize {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        // Paused pods count too, so that a short pause does not lower the bound.
        let of_pods = self.ready_pods.len().saturating_mul(limit).saturating_mul(QUEUED_PER_SLOT);
        self.bounds.max_requests.saturating_add(of_pods)
    }

    fn find_open(&self, pod: PodEndpointKey) -> Result<usize, usize> {
        self.open_pods.binary_search_by(|load| load.key.cmp(&pod))
    }

    fn dispatch_waiting(&mut self, mut random: impl FnMut() -> u64) -> Vec<DispatchedRequest<W>> {
        // One random value for each pick: with one value for all, every request of the batch would compare the same two
        // pods.
        let mut out = Vec::new();
        while let Some(place) = self.next_place() {
            let pod = self.occupy(place.service_port, random());
            let pod = pod.expect("a pod for that port has capacity: `next_place` found one");
            let first = self.remove_waiter(place).expect("`next_place` returns one that waits");
            out.push((first, pod));
        }
        // Without an open pod something still waits.
        self.releases.retain(|_, release| !release.has_ended());
        out
    }

    /// Place of the waiting request that arrived first, among those for whose port a pod has capacity.
    fn next_place(&self) -> Option<QueuePlace> {
        let places = self.first_places().filter(|place| self.has_capacity(place.service_port));
        places.min_by_key(|place| place.arrival)
    }

    /// Place of the first waiting request for each port.
    fn first_places(&self) -> impl Iterator<Item = QueuePlace> {
        let behind = move |place: &QueuePlace| {
            let last = QueuePlace { arrival: ArrivalNumber(u64::MAX), ..*place };
            let later = self.waiting.range((Bound::Excluded(last), Bound::Unbounded));
            later.map(|(place, _)| *place).next()
        };
        std::iter::successors(self.waiting.keys().next().copied(), behind)
    }

    /// Returns true if a waiting request for the port can be dispatched.
    fn has_capacity(&self, service_port: Option<NonZeroU16>) -> bool {
        let pods = &self.open_pods[self.open_range(service_port)];
        if let Some(release) = self.releases.get(&service_port) {
            return release.pick(pods).is_some();
        }
        pods.iter().any(|load| self.limit == 0 || load.free_slots > 0)
    }

    /// Range of the open pods that take requests for the port.
    fn open_range(&self, service_port: Option<NonZeroU16>) -> Range<usize> {
        let begin = self.open_pods.partition_point(|load| load.key.service_port < service_port);
        let end = self.open_pods.partition_point(|load| load.key.service_port <= service_port);
        begin..end
    }
}

#[cfg(test)]
mod tests;
