//! Shell: one revision at this activator: its line, its pods, and who waits.

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

use common::{
    abi,
    wire::{self, Claim, Grant, Held, Name, Protocol, Sources, Totals},
};
use smol_str::SmolStr;
use tokio::sync::oneshot;
use tracing::info;

use crate::{
    autoscaler::Usage,
    balance::PodKey,
    budget::LineBounds,
    clock::{chance, now_ns},
    peers::Peers,
    pods::{Named, Pod, PodSettings},
    queue::{Go, Line},
    slots::{Peer, Slots},
};

mod visit;

/// For how long requests go past a pod that left a dial unanswered: as long as connects that the kernel leads.
const DOUBTED: Duration = Duration::from_nanos(abi::UNANSWERED_NS);

pub use visit::Visit;

/// What all revisions share.
#[derive(Debug)]
pub struct RevisionSettings {
    /// The other activators.
    pub peers: Arc<Peers>,
    /// Bounds of each line.
    pub bounds: LineBounds,
    /// For their pods.
    pub pods: PodSettings,
    /// Who is told of waiting requests.
    pub usage: Arc<Usage>,
    /// Pods met so far: no two have the same key.
    pub met: AtomicU64,
}

/// What the table says of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// containerConcurrency; 0: no limit.
    pub limit: u32,
    /// What its pods speak.
    pub protocol: Protocol,
    /// Bounds in time of its requests.
    pub timeouts: Timeouts,
    /// Who may ask; `None`: everybody.
    pub sources: Option<Arc<Sources>>,
    /// Whose it is.
    pub owners: Owners,
}

/// Whose a revision is, for the log of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owners {
    /// The Service's name; empty: none.
    pub service: SmolStr,
    /// The Configuration's name.
    pub configuration: SmolStr,
}

impl Terms {
    /// The terms of a revision.
    pub fn new(told: &wire::Revision) -> Self {
        let timeouts = Timeouts {
            whole: told.timeout,
            start: told.response_start_timeout,
            idle: told.idle_timeout,
        };
        let sources = told.sources.clone();
        let limit = told.container_concurrency;
        let owners =
            Owners { service: told.service.clone(), configuration: told.configuration.clone() };
        Self { limit, protocol: told.protocol, timeouts, sources, owners }
    }
}

/// One pod, as the table has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTold {
    /// Where it serves, once that is known.
    pub address: Option<SocketAddr>,
    /// Whether it takes new requests.
    pub is_ready: bool,
    /// What it is called.
    pub name: SmolStr,
}

/// Pods by uid.
pub type PodsTold = BTreeMap<String, PodTold>;

/// Bounds in time of a revision's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Of a whole request, waiting included.
    pub whole: Duration,
    /// Until the answer begins.
    pub start: Option<Duration>,
    /// Between bytes of the answer.
    pub idle: Option<Duration>,
}

/// One revision. While it sleeps and nobody waits, little more than its name.
#[derive(Debug)]
pub struct Revision {
    /// Its name.
    pub name: Name,
    /// Whether it stands in the list of revisions whose usage is to be reported.
    pub in_report: AtomicBool,
    settings: Arc<RevisionSettings>,
    core: Mutex<Core>,
}

#[derive(Debug, Default)]
struct Core {
    /// `None`: the table does not name it.
    terms: Option<Terms>,
    totals: Totals,
    /// Made when there is a pod or a request, gone when there is neither.
    live: Option<Box<Live>>,
    /// Made when there is a hard limit and something to do with it, or another activator has a word about it.
    slots: Option<Box<Slots>>,
}

/// What a revision needs while it has pods or requests.
#[derive(Debug)]
struct Live {
    line: Line<oneshot::Sender<Place>>,
    pods: HashMap<PodKey, Arc<Pod>>,
    /// Since when the table names a ready pod.
    ready_since: Option<Instant>,
    /// Requests that have taken a turn and may take it up again.
    visits: usize,
}

/// Room for one request at one pod. Dropping it says that the request has ended there.
#[derive(Debug)]
pub struct Place {
    /// The pod.
    pub pod: Arc<Pod>,
    revision: Arc<Revision>,
}

impl Place {
    /// Nobody answers at the pod. Returns whether the request had better go elsewhere.
    pub fn doubt(&self) -> bool {
        self.revision.doubt(&self.pod)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.revision.done(&self.pod);
    }
}

impl Revision {
    /// A revision without pods, of which the table has not told yet.
    pub fn new(name: Name, settings: Arc<RevisionSettings>) -> Self {
        Self { name, in_report: AtomicBool::new(false), settings, core: Mutex::default() }
    }

    /// Takes over what the table says now. `None`: it does not name the revision any more.
    pub fn tell(&self, terms: Option<Terms>) {
        self.core().terms = terms;
    }

    /// What the table says of it.
    pub fn terms(&self) -> Option<Terms> {
        self.core().terms.clone()
    }

    /// Since when the table names a ready pod.
    pub fn ready_since(&self) -> Option<Instant> {
        self.core().live.as_ref().and_then(|live| live.ready_since)
    }

    /// Totals of the requests that waited here, and the time they were read.
    pub fn totals(&self) -> (Totals, u64) {
        let core = self.core();
        (core.totals, now_ns())
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.core().live.as_ref().map_or(0, |live| live.line.waiting())
    }

    /// Whether some pod is ready, and requests by where they are: waiting, at pods.
    pub fn figures(&self) -> (bool, usize, u64) {
        let core = self.core();
        let of =
            |live: &Live| (live.ready_since.is_some(), live.line.waiting(), live.line.in_flight());
        core.live.as_deref().map_or((false, 0, 0), of)
    }

    /// Ends connections to pods that lay idle too long.
    pub fn prune(&self) {
        let pods: Vec<Arc<Pod>> =
            self.core().live.iter().flat_map(|live| live.pods.values().cloned()).collect();
        pods.iter().for_each(|pod| pod.prune());
    }

    /// Takes over its pods. Requests that wait for one that is ready now go at once.
    pub fn set_pods(self: &Arc<Self>, pods: &PodsTold) {
        let mut core = self.core();
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
        let mut gone = live.line.on_routes(ready, limit, chance);
        core.went(&gone);
        gone.extend(self.settle(&mut core));
        let places = self.places(&core, gone);
        core.tidy();
        drop(core);
        let released = places.len();
        tell(places);
        if waiting > 0 {
            info!(revision = %self.name, ready = count, limit, waiting, released, "pods changed");
        }
    }

    /// The table lacks it for good: nobody needs to wait any longer.
    pub fn give_up(self: &Arc<Self>) {
        let mut core = self.core();
        let is_back = core.terms.is_some();
        let live = core.live.as_mut().filter(|_| !is_back);
        let left = live.map(|live| live.line.give_up()).unwrap_or_default();
        let gone = self.settle(&mut core);
        debug_assert!(gone.is_empty(), "none waits");
        drop(core);
        if !left.is_empty() {
            info!(revision = %self.name, waiting = left.len(), "nobody waits for what is gone");
        }
    }

    /// A request arrives. `bytes` is what it holds while it waits.
    pub fn visit(self: &Arc<Self>, bytes: usize) -> Visit {
        Visit::new(Arc::clone(self), bytes)
    }

    /// `place`'s pod has refused a connection; it is left alone for a moment.
    pub fn refused(self: &Arc<Self>, place: Place) {
        let pod = Arc::clone(&place.pod);
        let newly = self.close(pod.key);
        drop(place);
        if !newly {
            return;
        }
        let pause = pod.note_refusal();
        info!(revision = %self.name, pod = %pod.uid, ?pause, "pod refused");
        let revision = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            revision.retry(pod.key);
        });
    }

    /// Nobody answers at the pod: where there is another one, requests go past it for a while. Returns whether there is.
    fn doubt(self: &Arc<Self>, pod: &Pod) -> bool {
        let has_other = self.has_other(pod.key);
        if has_other && self.close(pod.key) {
            info!(revision = %self.name, pod = %pod.uid, "pod leaves a dial unanswered");
            pod.send_away();
            tokio::spawn(Arc::clone(self).pass_over(pod.key));
        }
        has_other
    }

    /// Leaves a pod alone for a while, but no longer than another one is there.
    async fn pass_over(self: Arc<Self>, pod: PodKey) {
        let until = Instant::now() + DOUBTED;
        while Instant::now() < until && self.has_other(pod) {
            tokio::time::sleep(DOUBTED / 100).await;
        }
        self.retry(pod);
    }

    fn has_other(&self, pod: PodKey) -> bool {
        self.core().live.as_ref().is_some_and(|live| live.line.has_other(pod))
    }

    /// The pod gets no request for now: its slots are of use elsewhere. Returns whether it was open.
    fn close(self: &Arc<Self>, pod: PodKey) -> bool {
        let mut newly = false;
        self.release(|core| {
            newly = core.live.as_mut().is_some_and(|live| live.line.on_refused(pod));
            Vec::new()
        });
        newly
    }

    fn retry(self: &Arc<Self>, pod: PodKey) {
        self.release(|core| {
            let Some(live) = core.live.as_mut() else { return Vec::new() };
            live.line.on_retry(pod, chance)
        });
    }

    fn done(self: &Arc<Self>, pod: &Pod) {
        let mut core = self.core();
        let Some(live) = core.live.as_mut() else { return };
        let mut gone = live.line.on_done(pod.key, chance);
        core.went(&gone);
        let is_open = core.live.as_ref().is_some_and(|live| live.line.is_open(pod.key));
        let again = core.slots.as_mut().is_some_and(|slots| slots.ended(&pod.uid)) && is_open;
        match &mut core.live {
            Some(live) if again => {
                let more = live.line.on_spare_one(pod.key, chance);
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

    /// Lets go whoever may go after `step`.
    fn release(self: &Arc<Self>, step: impl FnOnce(&mut Core) -> Vec<Go<oneshot::Sender<Place>>>) {
        let mut core = self.core();
        let mut gone = step(&mut core);
        core.went(&gone);
        gone.extend(self.settle(&mut core));
        let places = self.places(&core, gone);
        core.tidy();
        drop(core);
        tell(places);
    }

    /// Draws the consequences for the slots, and says what other activators have to know. Returns those that may go.
    fn settle(&self, core: &mut Core) -> Vec<Go<oneshot::Sender<Place>>> {
        let (limit, _) = core.rules();
        let Core { live, slots: Some(slots), .. } = core else { return Vec::new() };
        slots.on_view(self.settings.peers.view());
        if let Some(live) = live {
            slots.on_table(limit, live.ready());
        }
        let mut all = Vec::new();
        loop {
            let (waiting, open) = live.as_deref().map(Live::line).unwrap_or_default();
            slots.on_line(waiting, open);
            slots.settle(chance);
            let Some(live) = live.as_mut().filter(|_| limit > 0) else { break };
            let Live { line, pods, .. } = &mut **live;
            let gone =
                line.on_spare(|key| pods.get(&key).map_or(0, |it| slots.spare(&it.uid)), chance);
            if gone.is_empty() {
                break;
            }
            gone.iter().for_each(|(_, key)| slots.took(&pods[key].uid));
            all.extend(gone);
        }
        self.settings.peers.say(&self.name, slots.said());
        if slots.is_void() {
            core.slots = None;
        }
        all
    }

    /// As [`settle`](Self::settle), where all that has changed is how many wait: who is alone need not do anything.
    fn wanting(&self, core: &mut Core) -> Vec<Go<oneshot::Sender<Place>>> {
        match &core.slots {
            Some(slots) if !slots.is_alone() => self.settle(core),
            Some(_) | None => Vec::new(),
        }
    }

    // What other activators say.

    /// An owner has said this of the revision.
    pub fn on_grant(self: &Arc<Self>, from: &Peer, grant: Option<Grant>) {
        self.hear(grant.is_some(), |slots| slots.on_grant(from, grant));
    }

    /// A holder has said this of the revision.
    pub fn on_claim(self: &Arc<Self>, from: &Peer, claim: Option<Claim>) {
        self.hear(claim.is_some(), |slots| slots.on_claim(from, claim));
    }

    /// A holder's stream has begun or ended.
    pub fn on_stream(self: &Arc<Self>, from: &Peer) {
        self.hear(false, |slots| slots.on_stream(from));
    }

    /// Other activators are known now.
    pub fn on_view(self: &Arc<Self>) {
        self.hear(false, |_| {});
    }

    fn hear(self: &Arc<Self>, is_news: bool, step: impl FnOnce(&mut Slots)) {
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

    /// Whether there is anything to remember of its slots.
    pub fn has_slots(&self) -> bool {
        self.core().slots.is_some()
    }

    /// Whether any request of it is at a pod.
    pub fn is_at_pods(&self) -> bool {
        self.core().live.as_ref().is_some_and(|live| live.line.in_flight() > 0)
    }

    fn places(self: &Arc<Self>, core: &Core, gone: Vec<Go<oneshot::Sender<Place>>>) -> Told {
        let Some(live) = &core.live else { return Vec::new() };
        let place = |(whom, key)| (whom, self.place(live, key));
        gone.into_iter().map(place).collect()
    }

    fn place(self: &Arc<Self>, live: &Live, key: PodKey) -> Place {
        let pod = live.pods.get(&key).expect("the line knows only pods that `meet` named");
        Place { pod: Arc::clone(pod), revision: Arc::clone(self) }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // Line and totals are whole between any two of their own steps.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Told = Vec<(oneshot::Sender<Place>, Place)>;

/// Lets requests go. Call it without the lock: a place whose request is gone is given up at once.
fn tell(places: Told) {
    for (whom, place) in places {
        drop(whom.send(place));
    }
}

impl Core {
    /// Limit of a pod, and what it speaks.
    fn rules(&self) -> (u32, Protocol) {
        self.terms.as_ref().map_or((0, Protocol::Http1), |it| (it.limit, it.protocol))
    }

    /// Its slots; requests that are at pods already use some.
    fn slots(&mut self, name: &Name, settings: &RevisionSettings) -> &mut Slots {
        let live = &self.live;
        self.slots.get_or_insert_with(|| {
            let mut slots = Slots::new(name.clone(), settings.peers.view());
            slots.on_busy(live.as_ref().map(|live| live.busy()).unwrap_or_default());
            Box::new(slots)
        })
    }

    /// A request arrives: where there is a limit, it needs a slot.
    fn begin(&mut self, revision: &Revision) {
        if self.rules().0 > 0 && self.slots.is_none() {
            self.slots(&revision.name, &revision.settings);
        }
    }

    /// A request goes to a pod.
    fn took(&mut self, pod: &Pod) {
        if let Some(slots) = &mut self.slots {
            slots.took(&pod.uid);
        }
    }

    /// These requests go to pods.
    fn went<W>(&mut self, gone: &[Go<W>]) {
        let (Some(live), Some(slots)) = (&self.live, &mut self.slots) else { return };
        gone.iter().filter_map(|(_, key)| live.pods.get(key)).for_each(|pod| slots.took(&pod.uid));
    }

    fn live(&mut self, bounds: LineBounds) -> &mut Live {
        self.live.get_or_insert_with(|| {
            let line = Line::new(bounds);
            Box::new(Live { line, pods: HashMap::new(), ready_since: None, visits: 0 })
        })
    }

    /// Keeps nothing for pods and requests where there are none.
    fn tidy(&mut self) {
        let is_idle = |live: &mut Box<Live>| {
            live.pods.is_empty() && live.visits == 0 && live.line.in_flight() == 0
        };
        drop(self.live.take_if(is_idle));
    }
}

impl Live {
    /// Uids of the pods that the table calls ready.
    fn ready(&self) -> BTreeSet<SmolStr> {
        let ready = self.line.ready().filter_map(|key| self.pods.get(&key));
        ready.map(|pod| pod.uid.clone()).collect()
    }

    /// Requests that wait, and uids of the pods that take some.
    fn line(&self) -> (u32, BTreeSet<SmolStr>) {
        let open = self.line.open().filter_map(|key| self.pods.get(&key));
        let waiting = u32::try_from(self.line.waiting()).unwrap_or(u32::MAX);
        (waiting, open.map(|pod| pod.uid.clone()).collect())
    }

    /// Requests at pods, by uid.
    fn busy(&self) -> Held {
        let mut busy = Held::new();
        for (key, pod) in &self.pods {
            if let Some(slots) = NonZeroU32::new(self.line.at(*key)) {
                *busy.entry(pod.uid.clone()).or_default() += slots.get();
            }
        }
        busy
    }

    /// Keeps a [`Pod`] for each pod of the table that has an address. Returns the ready ones by address.
    fn meet(
        &mut self,
        told: &PodsTold,
        protocol: Protocol,
        settings: &RevisionSettings,
    ) -> Vec<PodKey> {
        let mut before: HashMap<(SmolStr, SocketAddr), Arc<Pod>> =
            self.pods.drain().map(|(key, pod)| ((pod.uid.clone(), key.address), pod)).collect();
        let mut ready = Vec::new();
        for (uid, it) in told {
            let Some(address) = it.address else { continue };
            let known = before.remove(&(uid.as_str().into(), address));
            let pod = known.unwrap_or_else(|| {
                let key = PodKey { address, id: settings.met.fetch_add(1, Ordering::Relaxed) };
                let named = Named { uid: uid.as_str().into(), name: it.name.clone() };
                Arc::new(Pod::new(key, named, protocol, settings.pods.clone()))
            });
            pod.set_open(it.is_ready);
            if it.is_ready {
                ready.push(pod.key);
            }
            self.pods.insert(pod.key, pod);
        }
        before.values().for_each(|pod| pod.set_open(false));
        ready.sort_unstable();
        ready
    }
}

impl Revision {
    fn began_waiting(self: &Arc<Self>, waiting: usize) {
        self.settings.pods.metrics.waiting.inc();
        self.settings.usage.waiting(self);
        if waiting == 1 {
            info!(revision = %self.name, ready = self.ready_since().is_some(), "request waits");
        }
    }

    /// Marks the revision as standing in the report list. Returns whether it did not before.
    pub fn enter_report(&self) -> bool {
        !self.in_report.swap(true, Ordering::AcqRel)
    }
}
