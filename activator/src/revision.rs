//! Shell: one revision at this activator: its wait queue, its pods and its slots.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    num::NonZeroU32,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use common::wire::{
    self, AllowedSources, AppProtocol, NamespacedName, RequestTotals, SlotClaim, SlotGrant,
    SlotsByPod,
};
use datapath::abi;
use smol_str::SmolStr;
use tokio::sync::oneshot;
use tracing::info;

use crate::{
    autoscaler::QueueUsageReporter,
    balance::PodEndpointKey,
    budget::WaitQueueBounds,
    clock::{chance, now_ns},
    peers::Peers,
    pods::{PodConnectionSettings, PodEndpoint, PodIdentity},
    queue::{DispatchedRequest, WaitQueue},
    slots::{ActivatorName, RevisionSlots},
};

mod visit;

/// Time for which requests avoid a pod that left a dial unanswered: the same as for connects that the eBPF programs
/// route.
const DOUBTED: Duration = Duration::from_nanos(abi::UNANSWERED_NS);

pub use visit::QueueEntry;

/// Settings and services that all revisions share.
#[derive(Debug)]
pub struct RevisionContext {
    /// View of the other activators, and the outboxes for claims and grants.
    pub peers: Arc<Peers>,
    /// Bounds of each revision's wait queue.
    pub bounds: WaitQueueBounds,
    /// Settings for the pods of all revisions.
    pub pods: PodConnectionSettings,
    /// Reporter of waiting requests to the autoscaler.
    pub usage: Arc<QueueUsageReporter>,
    /// Number of pods seen so far: the next pod's [`PodEndpointKey::id`], so that no two pods share a key.
    pub met: AtomicU64,
}

/// Settings of a revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionRouteSettings {
    /// Hard limit of each pod (containerConcurrency); 0: no limit.
    pub limit: u32,
    /// HTTP version that its pods speak.
    pub protocol: AppProtocol,
    /// Timeouts of its requests.
    pub timeouts: RequestTimeouts,
    /// Clients that may send requests, by the pods' NetworkPolicies; `None`: all clients.
    pub sources: Option<Arc<AllowedSources>>,
    /// Service and Configuration that own the revision.
    pub owners: RevisionOwnerNames,
}

/// Owners of a revision, for the request log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionOwnerNames {
    /// Name of the Service; empty: a Configuration without a Service.
    pub service: SmolStr,
    /// Name of the Configuration that made the revision.
    pub configuration: SmolStr,
}

impl RevisionRouteSettings {
    /// Extracts the settings from a revision of the RouteTable.
    pub fn new(told: &wire::RevisionEntry) -> Self {
        let timeouts = RequestTimeouts {
            whole: told.timeout,
            start: told.response_start_timeout,
            idle: told.idle_timeout,
        };
        let sources = told.sources.clone();
        let limit = told.container_concurrency;
        let owners = RevisionOwnerNames {
            service: told.service.clone(),
            configuration: told.configuration.clone(),
        };
        Self { limit, protocol: told.protocol, timeouts, sources, owners }
    }
}

/// One pod of a revision in the RouteTable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTableEntry {
    /// Address and port of its container, once they are known.
    pub address: Option<SocketAddr>,
    /// True if the pod takes new requests.
    pub is_ready: bool,
    /// Name of the pod, without its namespace.
    pub name: SmolStr,
}

/// Pods of one revision in the RouteTable, by uid.
pub type PodTable = BTreeMap<String, PodTableEntry>;

/// Timeouts of a revision's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimeouts {
    /// Time for a whole request, including the time it waits (`timeoutSeconds`).
    pub whole: Duration,
    /// Time until the response begins (`responseStartTimeoutSeconds`).
    pub start: Option<Duration>,
    /// Time between two pieces of the response (`idleTimeoutSeconds`).
    pub idle: Option<Duration>,
}

/// One revision at this activator. While it is asleep and no request waits, it stores little more than its name.
#[derive(Debug)]
pub struct ActivatorRevision {
    /// Name and namespace of the revision.
    pub name: NamespacedName,
    /// True if the revision is in the list of revisions whose usage is still to be reported.
    pub in_report: AtomicBool,
    settings: Arc<RevisionContext>,
    core: Mutex<LockedRevisionState>,
}

#[derive(Debug, Default)]
struct LockedRevisionState {
    /// Settings from the RouteTable; `None`: the table does not contain the revision.
    terms: Option<RevisionRouteSettings>,
    totals: RequestTotals,
    /// Wait queue and pods. Created for the first pod or request, dropped when there is neither.
    live: Option<Box<ActiveRevisionState>>,
    /// State of the hard limit. Created when requests need slots, or when another activator sends a claim or grant.
    slots: Option<Box<RevisionSlots>>,
}

/// State of a revision while it has pods or requests.
#[derive(Debug)]
struct ActiveRevisionState {
    line: WaitQueue<oneshot::Sender<PodPermit>>,
    pods: HashMap<PodEndpointKey, Arc<PodEndpoint>>,
    /// Start of the time in which the RouteTable lists at least one ready pod.
    ready_since: Option<Instant>,
    /// Queue entries that have a turn and may wait with it again.
    visits: usize,
}

/// Room for one request at one pod. Dropping it registers the end of the request there.
#[derive(Debug)]
pub struct PodPermit {
    /// Pod at which the request has room.
    pub pod: Arc<PodEndpoint>,
    revision: Arc<ActivatorRevision>,
}

impl PodPermit {
    /// Reports that the pod leaves a dial unanswered. Returns true if another pod takes requests, which is then
    /// preferred.
    pub fn doubt(&self) -> bool {
        self.revision.doubt(&self.pod)
    }
}

impl Drop for PodPermit {
    fn drop(&mut self) {
        self.revision.done(&self.pod);
    }
}

impl ActivatorRevision {
    /// Creates a revision without pods, which the RouteTable has not described yet.
    pub fn new(name: NamespacedName, settings: Arc<RevisionContext>) -> Self {
        Self { name, in_report: AtomicBool::new(false), settings, core: Mutex::default() }
    }

    /// Sets the settings of the RouteTable. `None`: the table does not contain the revision any more.
    pub fn tell(&self, terms: Option<RevisionRouteSettings>) {
        self.core().terms = terms;
    }

    /// Settings of the revision in the RouteTable; `None`: the table does not contain it.
    pub fn terms(&self) -> Option<RevisionRouteSettings> {
        self.core().terms.clone()
    }

    /// Start of the time in which the RouteTable lists at least one ready pod; `None`: it lists none.
    pub fn ready_since(&self) -> Option<Instant> {
        self.core().live.as_ref().and_then(|live| live.ready_since)
    }

    /// Totals of the requests that waited here, and the time at which they were read, in ns of [`now_ns`].
    pub fn totals(&self) -> (RequestTotals, u64) {
        let core = self.core();
        (core.totals, now_ns())
    }

    /// Number of requests that wait here.
    pub fn waiting(&self) -> usize {
        self.core().live.as_ref().map_or(0, |live| live.line.waiting())
    }

    /// Figures for metrics: true if some pod is ready, the number of waiting requests, and that of requests at pods.
    pub fn figures(&self) -> (bool, usize, u64) {
        let core = self.core();
        let of = |live: &ActiveRevisionState| {
            (live.ready_since.is_some(), live.line.waiting(), live.line.in_flight())
        };
        core.live.as_deref().map_or((false, 0, 0), of)
    }

    /// Closes connections to pods that were idle for too long.
    pub fn prune(&self) {
        let pods: Vec<Arc<PodEndpoint>> =
            self.core().live.iter().flat_map(|live| live.pods.values().cloned()).collect();
        pods.iter().for_each(|pod| pod.prune());
    }

    /// Applies the pods of the RouteTable. Requests that wait are dispatched to newly ready pods at once.
    pub fn set_pods(self: &Arc<Self>, pods: &PodTable) {
        let mut core = self.core();
        // Most revisions are asleep: one without pods and state must not allocate anything on each change of the table.
        if pods.is_empty() && core.live.is_none() && core.slots.is_none() {
            return;
        }
        let (limit, protocol) = core.rules();
        if limit > 0 {
            core.slots(&self.name, &self.settings);
        }
        let live = core.live(self.settings.bounds);
        let ready = live.meet(pods, protocol, &self.settings);
        let since = live.ready_since.unwrap_or_else(Instant::now);
        live.ready_since = (!ready.is_empty()).then_some(since);
        let (count, waiting) = (ready.len(), live.line.waiting());
        // The queue releases first, then the slots: with a hard limit `on_routes` leaves no room, and `settle` assigns
        // it.
        let mut gone = live.line.on_routes(ready, limit, chance);
        core.went(&gone);
        gone.extend(self.settle(&mut core));
        let places = self.places(&core, gone);
        core.tidy();
        // The waiters run as soon as they have their permits, so the lock is released before.
        drop(core);
        let released = places.len();
        tell(places);
        if waiting > 0 {
            info!(revision = %self.name, ready = count, limit, waiting, released, "pods changed");
        }
    }

    /// Fails all waiting requests, because the RouteTable has not contained the revision for some time.
    pub fn give_up(self: &Arc<Self>) {
        let mut core = self.core();
        let is_back = core.terms.is_some();
        let live = core.live.as_mut().filter(|_| !is_back);
        let left = live.map(|live| live.line.give_up()).unwrap_or_default();
        let gone = self.settle(&mut core);
        debug_assert!(gone.is_empty(), "none waits");
        drop(core);
        if !left.is_empty() {
            info!(revision = %self.name, waiting = left.len(), "waiting requests refused: their revision is gone");
        }
    }

    /// Creates the queue entry of an arriving request, which holds `bytes` bytes while it waits.
    pub fn visit(self: &Arc<Self>, bytes: usize) -> QueueEntry {
        QueueEntry::new(Arc::clone(self), bytes)
    }

    /// Handles a refused connection to the permit's pod: the pod gets no requests for a short pause.
    pub fn refused(self: &Arc<Self>, place: PodPermit) {
        let pod = Arc::clone(&place.pod);
        let newly = self.close(pod.key);
        drop(place);
        // Of several requests that are refused at the same time, only the first pauses the pod and starts the timer.
        if !newly {
            return;
        }
        let pause = pod.on_refusal();
        info!(revision = %self.name, pod = %pod.uid, ?pause, "pod refused");
        let revision = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            revision.retry(pod.key);
        });
    }

    /// Handles an unanswered dial: requests avoid the pod for a while if another one is open. Returns true if one is.
    fn doubt(self: &Arc<Self>, pod: &PodEndpoint) -> bool {
        let has_other = self.has_other(pod.key);
        if has_other && self.close(pod.key) {
            info!(revision = %self.name, pod = %pod.uid, "pod leaves a dial unanswered");
            pod.send_away();
            tokio::spawn(Arc::clone(self).avoid_unanswered_pod(pod.key));
        }
        has_other
    }

    /// Waits until the pod may get requests again: after [`DOUBTED`], or as soon as no other pod takes requests.
    async fn avoid_unanswered_pod(self: Arc<Self>, pod: PodEndpointKey) {
        let until = Instant::now() + DOUBTED;
        while Instant::now() < until && self.has_other(pod) {
            tokio::time::sleep(DOUBTED / 100).await;
        }
        self.retry(pod);
    }

    fn has_other(&self, pod: PodEndpointKey) -> bool {
        self.core().live.as_ref().is_some_and(|live| live.line.has_other(pod))
    }

    /// Stops requests to the pod for now, and frees its slots for other activators. Returns true if it took requests.
    fn close(self: &Arc<Self>, pod: PodEndpointKey) -> bool {
        let mut newly = false;
        self.release(|core| {
            newly = core.live.as_mut().is_some_and(|live| live.line.on_refused(pod));
            Vec::new()
        });
        newly
    }

    fn retry(self: &Arc<Self>, pod: PodEndpointKey) {
        self.release(|core| {
            let Some(live) = core.live.as_mut() else { return Vec::new() };
            live.line.on_retry(pod, chance)
        });
    }

    fn done(self: &Arc<Self>, pod: &PodEndpoint) {
        let mut core = self.core();
        let Some(live) = core.live.as_mut() else { return };
        let mut gone = live.line.on_done(pod.key, chance);
        core.went(&gone);
        // A slot that is spare again at once needs no new distribution: the common case under load stays cheap.
        let is_open = core.live.as_ref().is_some_and(|live| live.line.is_open(pod.key));
        let again = core.slots.as_mut().is_some_and(|slots| slots.ended(&pod.uid)) && is_open;
        match &mut core.live {
            Some(live) if again => {
                let more = live.line.add_free_slot(pod.key, chance);
                core.went(&more);
                gone.extend(more);
            }
            Some(_) | None => gone.extend(self.settle(&mut core)),
        }
        let places = self.places(&core, gone);
        core.tidy();
        drop(core);
        tell(places);
    }

    /// Runs `step` on the state and resumes the requests that may be dispatched after it.
    fn release(
        self: &Arc<Self>,
        step: impl FnOnce(
            &mut LockedRevisionState,
        ) -> Vec<DispatchedRequest<oneshot::Sender<PodPermit>>>,
    ) {
        let mut core = self.core();
        let mut gone = step(&mut core);
        core.went(&gone);
        gone.extend(self.settle(&mut core));
        let places = self.places(&core, gone);
        core.tidy();
        drop(core);
        tell(places);
    }

    /// Updates the slots after a change, and publishes claims and grants. Returns the requests dispatched by it.
    fn settle(
        &self,
        core: &mut LockedRevisionState,
    ) -> Vec<DispatchedRequest<oneshot::Sender<PodPermit>>> {
        let (limit, _) = core.rules();
        let LockedRevisionState { live, slots: Some(slots), .. } = core else { return Vec::new() };
        slots.on_view(self.settings.peers.view());
        if let Some(live) = live {
            slots.on_table(limit, live.ready());
        }
        let mut all = Vec::new();
        // Slots and queue depend on each other: a dispatched request changes what is spare, until no request is
        // dispatched.
        loop {
            let (waiting, open) =
                live.as_deref().map(ActiveRevisionState::line).unwrap_or_default();
            slots.on_queue(waiting, open);
            slots.settle(chance);
            let Some(live) = live.as_mut().filter(|_| limit > 0) else { break };
            let ActiveRevisionState { line, pods, .. } = &mut **live;
            let gone = line
                .set_free_slots(|key| pods.get(&key).map_or(0, |it| slots.spare(&it.uid)), chance);
            if gone.is_empty() {
                break;
            }
            gone.iter().for_each(|(_, key)| slots.took(&pods[key].uid));
            all.extend(gone);
        }
        // Published even when nothing was dispatched: other activators may need to know of the new number of waiting
        // requests.
        self.settings.peers.say(&self.name, slots.said());
        if slots.is_void() {
            core.slots = None;
        }
        all
    }

    /// Updates the slots after only the number of waiting requests has changed. Without other activators there is
    /// nothing to do.
    fn wanting(
        &self,
        core: &mut LockedRevisionState,
    ) -> Vec<DispatchedRequest<oneshot::Sender<PodPermit>>> {
        match &core.slots {
            Some(slots) if !slots.is_alone() => self.settle(core),
            Some(_) | None => Vec::new(),
        }
    }

    // Messages of other activators.

    /// Applies the latest grant of an owner; `None`: the owner has withdrawn it.
    pub fn on_grant(self: &Arc<Self>, from: &ActivatorName, grant: Option<SlotGrant>) {
        self.hear(grant.is_some(), |slots| slots.on_grant(from, grant));
    }

    /// Applies the latest claim of a holder; `None`: the holder has withdrawn it.
    pub fn on_claim(self: &Arc<Self>, from: &ActivatorName, claim: Option<SlotClaim>) {
        self.hear(claim.is_some(), |slots| slots.on_claim(from, claim));
    }

    /// Registers that a holder's stream has begun or ended.
    pub fn on_stream(self: &Arc<Self>, from: &ActivatorName) {
        self.hear(false, |slots| slots.on_stream(from));
    }

    /// Registers a change of the known activators.
    pub fn on_view(self: &Arc<Self>) {
        self.hear(false, |_| {});
    }

    fn hear(self: &Arc<Self>, is_news: bool, step: impl FnOnce(&mut RevisionSlots)) {
        self.release(|core| {
            if is_news {
                core.slots(&self.name, &self.settings);
            }
            if let Some(slots) = &mut core.slots {
                step(slots);
            }
            Vec::new()
        });
    }

    /// Returns true if the revision keeps state of its slots.
    pub fn has_slots(&self) -> bool {
        self.core().slots.is_some()
    }

    /// Returns true if any request of the revision is at a pod.
    pub fn has_requests_at_pods(&self) -> bool {
        self.core().live.as_ref().is_some_and(|live| live.line.in_flight() > 0)
    }

    fn places(
        self: &Arc<Self>,
        core: &LockedRevisionState,
        gone: Vec<DispatchedRequest<oneshot::Sender<PodPermit>>>,
    ) -> GrantedPermits {
        let Some(live) = &core.live else { return Vec::new() };
        let place = |(whom, key)| (whom, self.place(live, key));
        gone.into_iter().map(place).collect()
    }

    fn place(self: &Arc<Self>, live: &ActiveRevisionState, key: PodEndpointKey) -> PodPermit {
        let pod = live.pods.get(&key).expect("the line knows only pods that `meet` named");
        PodPermit { pod: Arc::clone(pod), revision: Arc::clone(self) }
    }

    fn core(&self) -> MutexGuard<'_, LockedRevisionState> {
        // A panic elsewhere cannot leave queue and totals inconsistent: each of their own steps completes or does not
        // begin.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type GrantedPermits = Vec<(oneshot::Sender<PodPermit>, PodPermit)>;

/// Resumes dispatched requests. Call it without the lock: if a request is gone, its permit is dropped here, which
/// locks.
fn tell(places: GrantedPermits) {
    for (whom, place) in places {
        drop(whom.send(place));
    }
}

impl LockedRevisionState {
    /// Hard limit of each pod, and the HTTP version of the pods.
    fn rules(&self) -> (u32, AppProtocol) {
        self.terms.as_ref().map_or((0, AppProtocol::Http1), |it| (it.limit, it.protocol))
    }

    /// Slots of the revision, created if needed. Requests that are already at pods use some of them.
    fn slots(&mut self, name: &NamespacedName, settings: &RevisionContext) -> &mut RevisionSlots {
        let live = &self.live;
        self.slots.get_or_insert_with(|| {
            let mut slots = RevisionSlots::new(name.clone(), settings.peers.view());
            slots.set_in_use(live.as_ref().map(|live| live.busy()).unwrap_or_default());
            Box::new(slots)
        })
    }

    /// Prepares an arriving request: with a hard limit it needs slots.
    fn begin(&mut self, revision: &ActivatorRevision) {
        if self.rules().0 > 0 && self.slots.is_none() {
            self.slots(&revision.name, &revision.settings);
        }
    }

    /// Registers that one request is sent to `pod`.
    fn took(&mut self, pod: &PodEndpoint) {
        if let Some(slots) = &mut self.slots {
            slots.took(&pod.uid);
        }
    }

    /// Registers that these requests are sent to pods.
    fn went<W>(&mut self, gone: &[DispatchedRequest<W>]) {
        let (Some(live), Some(slots)) = (&self.live, &mut self.slots) else { return };
        gone.iter().filter_map(|(_, key)| live.pods.get(key)).for_each(|pod| slots.took(&pod.uid));
    }

    fn live(&mut self, bounds: WaitQueueBounds) -> &mut ActiveRevisionState {
        self.live.get_or_insert_with(|| {
            let line = WaitQueue::new(bounds);
            Box::new(ActiveRevisionState {
                line,
                pods: HashMap::new(),
                ready_since: None,
                visits: 0,
            })
        })
    }

    /// Drops the queue and the pods if there are no pods and no requests.
    fn tidy(&mut self) {
        let is_idle = |live: &mut Box<ActiveRevisionState>| {
            live.pods.is_empty() && live.visits == 0 && live.line.in_flight() == 0
        };
        drop(self.live.take_if(is_idle));
    }
}

impl ActiveRevisionState {
    /// Uids of the pods that the RouteTable lists as ready.
    fn ready(&self) -> BTreeSet<SmolStr> {
        let ready = self.line.ready().filter_map(|key| self.pods.get(&key));
        ready.map(|pod| pod.uid.clone()).collect()
    }

    /// Number of waiting requests, and uids of the pods that take requests.
    fn line(&self) -> (u32, BTreeSet<SmolStr>) {
        let open = self.line.open().filter_map(|key| self.pods.get(&key));
        let waiting = u32::try_from(self.line.waiting()).unwrap_or(u32::MAX);
        (waiting, open.map(|pod| pod.uid.clone()).collect())
    }

    /// Number of requests at pods, by uid.
    fn busy(&self) -> SlotsByPod {
        let mut busy = SlotsByPod::new();
        for (key, pod) in &self.pods {
            if let Some(slots) = NonZeroU32::new(self.line.at(*key)) {
                *busy.entry(pod.uid.clone()).or_default() += slots.get();
            }
        }
        busy
    }

    /// Keeps a [`PodEndpoint`] for each pod of the RouteTable that has an address. Returns the keys of the ready ones,
    /// sorted.
    fn meet(
        &mut self,
        told: &PodTable,
        protocol: AppProtocol,
        settings: &RevisionContext,
    ) -> Vec<PodEndpointKey> {
        // A pod keeps its connections over changes of the table. With another address it is a new endpoint, with a new
        // key.
        let mut before: HashMap<(SmolStr, SocketAddr), Arc<PodEndpoint>> =
            self.pods.drain().map(|(key, pod)| ((pod.uid.clone(), key.address), pod)).collect();
        let mut ready = Vec::new();
        for (uid, it) in told {
            let Some(address) = it.address else { continue };
            let known = before.remove(&(uid.as_str().into(), address));
            let pod = known.unwrap_or_else(|| {
                let key =
                    PodEndpointKey { address, id: settings.met.fetch_add(1, Ordering::Relaxed) };
                let named = PodIdentity { uid: uid.as_str().into(), name: it.name.clone() };
                Arc::new(PodEndpoint::new(key, named, protocol, settings.pods.clone()))
            });
            pod.set_accepting(it.is_ready);
            if it.is_ready {
                ready.push(pod.key);
            }
            self.pods.insert(pod.key, pod);
        }
        // Those left over are gone from the table: their last requests end, and no connection of theirs is reused.
        before.values().for_each(|pod| pod.set_accepting(false));
        ready.sort_unstable();
        ready
    }
}

impl ActivatorRevision {
    fn on_waiting_started(self: &Arc<Self>, waiting: usize) {
        self.settings.pods.metrics.waiting_requests.inc();
        self.settings.usage.waiting(self);
        if waiting == 1 {
            info!(revision = %self.name, ready = self.ready_since().is_some(), "request waits");
        }
    }

    /// Puts the revision into the report list. Returns true if it was not in it before.
    pub fn mark_report_pending(&self) -> bool {
        !self.in_report.swap(true, Ordering::AcqRel)
    }
}
