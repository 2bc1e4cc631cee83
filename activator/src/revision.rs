//! Shell: one revision at this activator: its line, its pods, and who waits.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use common::wire::{self, Name, PodPhase, Totals};
use tokio::sync::oneshot;
use tracing::info;

use crate::{
    autoscaler::Usage,
    balance::PodKey,
    clock::{chance, now_ns},
    failure::Failure,
    pods::{Pod, PodSettings},
    queue::{Bounds, Go, Line, Turn},
};

/// What all revisions share.
#[derive(Debug, Clone)]
pub struct RevisionSettings {
    /// Bounds of each line.
    pub bounds: Bounds,
    /// For their pods.
    pub pods: PodSettings,
    /// Who is told of waiting requests.
    pub usage: Arc<Usage>,
}

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

/// One revision.
#[derive(Debug)]
pub struct Revision {
    /// Its name.
    pub name: Name,
    /// Whether it stands in the list of revisions whose usage is to be reported.
    pub in_report: AtomicBool,
    settings: RevisionSettings,
    core: Mutex<Core>,
}

#[derive(Debug)]
struct Core {
    line: Line<oneshot::Sender<Place>>,
    pods: HashMap<PodKey, Arc<Pod>>,
    totals: Totals,
    timeouts: Timeouts,
    next_id: u64,
}

/// Room for one request at one pod. Dropping it says that the request has ended there.
#[derive(Debug)]
pub struct Place {
    /// The pod.
    pub pod: Arc<Pod>,
    revision: Arc<Revision>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.revision.done(self.pod.key);
    }
}

impl Revision {
    /// A revision without pods.
    pub fn new(name: Name, settings: RevisionSettings) -> Self {
        let core = Core {
            line: Line::new(settings.bounds),
            pods: HashMap::new(),
            totals: Totals::default(),
            // Knative's default until the table says otherwise (`config-defaults`, revision-timeout-seconds).
            timeouts: Timeouts { whole: Duration::from_secs(300), start: None, idle: None },
            next_id: 0,
        };
        Self { name, in_report: AtomicBool::new(false), settings, core: Mutex::new(core) }
    }

    /// Bounds in time of its requests.
    pub fn timeouts(&self) -> Timeouts {
        self.core().timeouts
    }

    /// Whether the table names a ready pod.
    pub fn has_ready_pod(&self) -> bool {
        self.core().line.has_ready_pod()
    }

    /// Totals of the requests that waited here, and the time they were read.
    pub fn totals(&self) -> (Totals, u64) {
        let core = self.core();
        (core.totals, now_ns())
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.core().line.waiting()
    }

    /// Ends connections to pods that lay idle too long.
    pub fn prune(&self) {
        let pods: Vec<Arc<Pod>> = self.core().pods.values().cloned().collect();
        pods.iter().for_each(|pod| pod.prune());
    }

    /// Takes over what the table says now. `None`: it does not name the revision any more.
    pub fn update(self: &Arc<Self>, told: Option<&wire::Revision>, pods: &[&wire::Pod]) {
        let mut core = self.core();
        let limit = told.map_or(0, |it| it.container_concurrency);
        if let Some(told) = told {
            core.timeouts = Timeouts {
                whole: told.timeout,
                start: told.response_start_timeout,
                idle: told.idle_timeout,
            };
        }
        let ready = core.meet(pods, &self.settings.pods);
        let (count, waiting) = (ready.len(), core.line.waiting());
        let gone = core.line.on_routes(ready, limit, chance);
        let places = self.places(&core, gone);
        drop(core);
        let released = places.len();
        tell(places);
        if waiting > 0 {
            info!(revision = %self.name, ready = count, limit, waiting, released, "pods changed");
        }
    }

    /// A request arrives. `bytes` is what it holds while it waits.
    pub fn visit(self: &Arc<Self>, bytes: usize) -> Visit {
        Visit { revision: Arc::clone(self), turn: None, bytes, counted: None }
    }

    /// `place`'s pod has refused a connection; it is left alone for a moment.
    pub fn refused(self: &Arc<Self>, place: Place) {
        let pod = Arc::clone(&place.pod);
        let newly = self.core().line.on_refused(pod.key);
        drop(place);
        if !newly {
            return;
        }
        let (revision, pause) = (Arc::clone(self), pod.note_refusal());
        info!(revision = %self.name, pod = %pod.uid, ?pause, "pod refused");
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            revision.retry(pod.key);
        });
    }

    fn retry(self: &Arc<Self>, pod: PodKey) {
        let mut core = self.core();
        let gone = core.line.on_retry(pod, chance);
        let places = self.places(&core, gone);
        drop(core);
        tell(places);
    }

    fn done(self: &Arc<Self>, pod: PodKey) {
        let mut core = self.core();
        let gone = core.line.on_done(pod, chance);
        if gone.is_empty() {
            return;
        }
        let places = self.places(&core, gone);
        drop(core);
        tell(places);
    }

    fn places(self: &Arc<Self>, core: &Core, gone: Vec<Go<oneshot::Sender<Place>>>) -> Told {
        let place = |(whom, key)| {
            let pod = core.pods.get(&key).expect("the line knows only pods that `meet` named");
            (whom, Place { pod: Arc::clone(pod), revision: Arc::clone(self) })
        };
        gone.into_iter().map(place).collect()
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
    /// Keeps a [`Pod`] for each pod of the table that has an address. Returns the ready ones.
    fn meet(&mut self, told: &[&wire::Pod], settings: &PodSettings) -> Vec<PodKey> {
        let mut before: HashMap<(String, SocketAddr), Arc<Pod>> =
            self.pods.drain().map(|(key, pod)| ((pod.uid.clone(), key.address), pod)).collect();
        let mut ready = Vec::new();
        for it in told {
            let Some(address) = it.address else { continue };
            let known = before.remove(&(it.uid.clone(), address));
            let pod = known.unwrap_or_else(|| {
                self.next_id += 1;
                let key = PodKey { address, id: self.next_id };
                Arc::new(Pod::new(key, it.uid.clone(), settings.clone()))
            });
            let open = it.phase == PodPhase::Ready;
            pod.set_open(open);
            if open {
                ready.push(pod.key);
            }
            self.pods.insert(pod.key, pod);
        }
        before.values().for_each(|pod| pod.set_open(false));
        ready
    }
}

/// One request's stay at a revision until a pod has it. Dropping it leaves the line.
#[derive(Debug)]
pub struct Visit {
    revision: Arc<Revision>,
    turn: Option<Turn>,
    bytes: usize,
    /// Since when it counts as waiting.
    counted: Option<Instant>,
}

impl Visit {
    /// Waits for room at a pod; not at all where there is some.
    pub async fn place(&mut self) -> Result<Place, Failure> {
        let answer = {
            let mut core = self.revision.core();
            let turn = *self.turn.get_or_insert_with(|| core.line.on_request());
            if let Some(key) = core.line.admit(chance()) {
                let pod = core.pods.get(&key).expect("the line knows only pods that `meet` named");
                let (pod, revision) = (Arc::clone(pod), Arc::clone(&self.revision));
                return Ok(Place { pod, revision });
            }
            let (whom, answer) = oneshot::channel();
            core.line.wait(turn, self.bytes, whom).map_err(|_full| Failure::QueueFull)?;
            if self.counted.is_none() {
                self.counted = Some(Instant::now());
                core.totals.start(now_ns());
                let waiting = core.line.waiting();
                drop(core);
                self.revision.began_waiting(waiting);
            }
            answer
        };
        answer.await.map_err(|_dropped| Failure::ShuttingDown)
    }

    /// The request leaves for its pod, where the kernel counts it.
    pub fn leave(&mut self) {
        let Some(since) = self.counted.take() else { return };
        self.revision.core().totals.finish(now_ns());
        let metrics = &self.revision.settings.pods.metrics;
        metrics.waiting.dec();
        metrics.wait_seconds.observe(since.elapsed().as_secs_f64());
        self.revision.settings.usage.changed(&self.revision);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if self.counted.is_none() {
            return;
        }
        if let Some(turn) = self.turn {
            // Dropped after the lock is released, in case its answer holds a place.
            let left = self.revision.core().line.on_leave(turn);
            drop(left);
        }
        self.leave();
    }
}

impl Revision {
    fn began_waiting(self: &Arc<Self>, waiting: usize) {
        self.settings.pods.metrics.waiting.inc();
        self.settings.usage.waiting(self);
        if waiting == 1 {
            info!(revision = %self.name, ready = self.has_ready_pod(), "request waits");
        }
    }

    /// Marks the revision as standing in the report list. Returns whether it did not before.
    pub fn enter_report(&self) -> bool {
        !self.in_report.swap(true, Ordering::AcqRel)
    }
}
