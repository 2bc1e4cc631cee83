//! Shell: the loop that joins kernel, pods, controller and autoscaler.
//!
//! Everything that must be quick runs on this one task without waiting: reading and writing maps, deciding, putting
//! reports into the outboxes. Everything that may wait (cgroup files, namespaces, probes, streams) runs elsewhere and
//! returns as an event.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use common::{
    abi,
    link::{Draining, PodKey, RouteBatch, chain},
    outbox::Outbox,
    probe::ask,
    wire::{self, PodItem, PodSeen, RouteChange, RouteKey},
};
use tokio::{
    io::unix::AsyncFd,
    net::TcpStream,
    sync::{
        Semaphore,
        mpsc::{self, Receiver, Sender},
        watch,
    },
    task::JoinHandle,
    time::{sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::{
    admin::{Metrics, Troubles},
    audit::look as audit,
    autoscaler::Usage,
    clock::monotonic_ns,
    controller::Routes,
    deadlines::Deadlines,
    door::drain::Drains,
    growth::Growth,
    kept::{Kept, ROUND_KNOWN, end::Clients},
    kernel::Stage,
    listeners,
    maps::{self, Events, Maps},
    plan::{Backend, Local, Plan, Planner, TooBig},
    pods::{Action, Attempt, Event, Facts, Kernel, Pods, find::Command, mark::Marks},
    reach::{self, Reach},
    revisions::Revisions,
    slots::Slots,
};

/// Period in which everything is read again: events are hints.
const SWEEP: Duration = Duration::from_secs(1);
/// Period in which draining pods are read, so that the end of the draining is noticed soon.
const SWEEP_DRAINING: Duration = Duration::from_millis(100);
/// Time that a new agent searches for pods that should be ready, before it reports what it sees.
const SETTLE: Duration = Duration::from_secs(2);
/// Capacity of the channels of probe results.
const TRIES: usize = 1_024;
/// Number of pods of other nodes that are probed at once.
const REACH_AT_ONCE: usize = 64;
/// Timeout of one probe of a pod of another node.
const REACH_PATIENCE: Duration = Duration::from_secs(1);
/// Events taken from the ring before the loop handles anything else.
const EVENTS_AT_ONCE: usize = 256;

mod housekeeping;
mod overdue;
mod upgraded;
mod write;

/// Everything outside the loop that it reads, writes or sends to.
pub(crate) struct Ends {
    /// Maps of the eBPF programs.
    pub(crate) maps: Maps,
    /// Map of the marks by which the eBPF programs recognize probes.
    pub(crate) marks: Marks,
    /// Commands to the finder.
    pub(crate) finder: Sender<Command>,
    /// Outbox of pod reports.
    pub(crate) reports: Outbox<PodKey, PodItem>,
    /// Usage reports to the autoscaler.
    pub(crate) usage: Usage,
    /// Request totals of the node's Revisions.
    pub(crate) revisions: Revisions,
    /// Cancelled once pod reports can be relied on.
    pub(crate) settled: CancellationToken,
    /// Metrics that `/metrics` exports.
    pub(crate) metrics: Metrics,
    /// Not-ready reasons that `/readyz` shows.
    pub(crate) troubles: Troubles,
    /// Kubelets that wait in preStop until their pods are drained.
    pub(crate) drains: Drains,
    /// Time that a draining pod waits for its upgraded connections.
    pub(crate) tunnel_drain: Duration,
    /// Stage up to which the eBPF programs may take over from another version's programs.
    pub(crate) stage: watch::Sender<Stage>,
}

/// State of the agent's loop. See [`Agent::run`].
pub(crate) struct Agent {
    node: String,
    /// Client processes of this node, whose stale connections are closed.
    clients: Clients,
    kept: Kept,
    /// Task of the newest round of closing stale connections.
    ending: Option<JoinHandle<()>>,
    /// Deadlines of requests; `None` on kernels that cannot close overdue connections.
    deadlines: Option<Deadlines>,
    /// Pods whose gauges are audited against their sockets.
    audited: audit::Registered,
    /// Round of deadline scans that is under way.
    looking: Option<JoinHandle<overdue::Found>>,
    ends: Ends,
    pods: Pods,
    slots: Slots,
    /// Registered pods by uid.
    locals: BTreeMap<String, Registered>,
    /// Uids of the registered pods, by namespace cookie.
    uids: HashMap<u64, String>,
    planner: Planner,
    /// Version of the RouteTable that the planner has.
    version: u64,
    /// Draining pods of that RouteTable, and the acknowledgements that the controller has of them.
    draining: Draining,
    /// Pods whose growth was reported a moment ago.
    growth: Growth,
    /// Services that do not fit the kernel's maps.
    refused: BTreeMap<wire::Name, TooBig>,
    /// True if a write failed midway, so that the planner has to read the maps again.
    torn: bool,
    /// True if the maps may differ from the table and the local pods.
    stale: bool,
    first_table: Option<Instant>,
    backlog: VecDeque<Command>,
    tries: Sender<Event>,
    tried: Receiver<Event>,
    /// Reachability of the pods of other nodes.
    reach: Reach,
    knocks: Sender<(reach::Try, bool)>,
    knocked: Receiver<(reach::Try, bool)>,
    /// Bound on the probes of pods of other nodes that run at once.
    knocking: Arc<Semaphore>,
    next_addresses: Instant,
    next_listeners: Instant,
    /// The kernel's count of listeners without room, as it was when closed entries were last deleted.
    listeners_unseen: u64,
    /// Registered pods as the planner last got them.
    planned: BTreeMap<String, Local>,
    next_full: Instant,
    next_sweep: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Registered {
    cookie: u64,
    pod: abi::Pod,
}

impl Agent {
    /// Makes an agent that continues with what the maps hold.
    pub(crate) fn new(node: String, clients: Clients, ends: Ends) -> Result<Self, maps::Error> {
        let pods = ends.maps.pods()?;
        // Rows that the previous agent allocated stay with their namespaces: their counters continue.
        let taken = pods.iter().map(|(&cookie, pod)| (cookie, pod.slot)).collect();
        let kernel = ends.maps.read()?;
        // The previous agent has reached these pods from here. Excluding them until a probe succeeds would interrupt
        // their traffic.
        let reach = Reach::new(kernel.backends.values().filter_map(Backend::pod).collect());
        let planner = Planner::resume(kernel, monotonic_ns());
        let (tries, tried) = mpsc::channel(TRIES);
        let (knocks, knocked) = mpsc::channel(TRIES);
        info!(pods = pods.len(), "maps read back");
        ends.metrics.ends_locked.set(clients.locks().into());
        Ok(Self {
            node,
            clients,
            kept: Kept::default(),
            ending: None,
            deadlines: overdue::begin(&ends),
            audited: audit::Registered::default(),
            looking: None,
            pods: Pods::new(ends.tunnel_drain),
            slots: Slots::new(taken),
            locals: BTreeMap::new(),
            uids: HashMap::new(),
            planner,
            version: 0,
            draining: Draining::default(),
            growth: Growth::default(),
            refused: BTreeMap::new(),
            torn: false,
            stale: false,
            first_table: None,
            backlog: VecDeque::new(),
            tries,
            tried,
            reach,
            knocks,
            knocked,
            knocking: Arc::new(Semaphore::new(REACH_AT_ONCE)),
            next_addresses: Instant::now(),
            next_listeners: Instant::now(),
            listeners_unseen: ends.maps.control(abi::CONTROL_LISTEN_FULL),
            planned: BTreeMap::new(),
            next_full: Instant::now(),
            next_sweep: Instant::now(),
            ends,
        })
    }

    /// Returns the auditor, which compares gauges with sockets in a task of its own.
    pub(crate) fn auditor(&self) -> Result<audit::Auditor, maps::Error> {
        Ok(audit::Auditor {
            registered: self.audited.clone(),
            finder: self.ends.finder.clone(),
            conns: self.ends.maps.conns(),
            gauges: self.ends.maps.gauges()?,
            metrics: self.ends.metrics.clone(),
        })
    }

    /// Runs until `shutdown`. The maps stay as they are: connects follow them without an agent.
    pub(crate) async fn run(
        mut self,
        mut events: AsyncFd<Events>,
        routes: &Routes,
        mut found: Receiver<Event>,
        shutdown: &CancellationToken,
    ) -> std::io::Result<()> {
        loop {
            let sweep = self.next_sweep;
            let wakes = [self.pods.next_wake(), self.reach.next_wake(), self.growth.next_wake()];
            let wake = wakes.into_iter().flatten().fold(sweep, Instant::min);
            tokio::select! {
                // Biased, in order of urgency: a listener event is the first step of a cold start, and must not wait
                // behind routes or sweeps.
                biased;
                () = shutdown.cancelled() => return Ok(()),
                ready = events.readable_mut() => {
                    let mut ready = ready?;
                    if self.drain(ready.get_inner_mut()) {
                        ready.clear_ready();
                    }
                }
                Some(event) = found.recv() => self.found(event),
                Some(event) = self.tried.recv() => {
                    if let Event::Tried(_, _, result) = &event {
                        self.ends.metrics.probed(result.is_ok());
                    }
                    self.feed(event);
                }
                Some((tried, reached)) = self.knocked.recv() => self.knocked(&tried, reached),
                found = overdue::ended(&mut self.looking) => self.take_looks(found),
                news = routes.next() => self.absorb(news),
                () = sleep_until(wake.into()) => {
                    self.feed(Event::Tick);
                    self.follow_growth();
                    self.reach.due(Instant::now()).into_iter().for_each(|it| self.knock(it));
                    if sweep <= Instant::now() {
                        self.sweep();
                    }
                }
            }
            // After each branch, as any of them may have queued commands or changed what the maps should hold.
            self.pods.set_informed(routes.is_live());
            self.flush();
            if self.stale {
                self.apply();
            }
            self.settle();
        }
    }

    /// Handles kernel events. Returns true if the ring was emptied.
    fn drain(&mut self, ring: &mut Events) -> bool {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(event) = ring.next() else { return true };
            self.ends.metrics.events.inc();
            match event.kind {
                abi::EVENT_LISTEN | abi::EVENT_CLOSED => self.listener(event.cookie),
                abi::EVENT_BUSY => {
                    self.ends.usage.report(event.subject, &self.ends.maps);
                    self.growth.told(Instant::now(), event.subject);
                }
                _ => {}
            }
        }
        false
    }

    /// Arms the growth events of pods whose pause is over.
    fn follow_growth(&mut self) {
        let now = Instant::now();
        for slot in self.growth.due(now) {
            if self.ends.usage.follow(slot, &self.ends.maps) {
                self.growth.told(now, slot);
            }
        }
    }

    /// Handles an opened or closed listener: reads the map for the present state.
    fn listener(&mut self, cookie: u64) {
        match self.uids.get(&cookie).cloned() {
            Some(uid) => self.read(&uid),
            // Most likely a pod that is not found yet. The maps are read once it is.
            None if self.locals.len() < self.pods.counts().named => {
                self.backlog.push_back(Command::Hurry);
            }
            None => {}
        }
    }

    /// Handles an event of the finder.
    fn found(&mut self, event: Event) {
        let asked = match &event {
            Event::Asked(uid) => Some(uid.clone()),
            _ => None,
        };
        self.feed(event);
        if let Some(uid) = asked {
            // A preStop request: no new connection goes to the pod, and the next sweep watches its last requests.
            self.hold(&uid);
            self.next_sweep = Instant::now();
        }
    }

    /// Excludes a pod from routing while it may not get new connects yet, or any more.
    fn hold(&mut self, uid: &str) {
        self.planner.hold(uid, self.reach.is_open(uid) || self.pods.is_stopping(uid));
        self.stale |= self.planner.is_due();
    }

    /// Probes a pod of another node by a connect, in a task of its own.
    fn knock(&self, tried: reach::Try) {
        let (knocks, knocking) = (self.knocks.clone(), Arc::clone(&self.knocking));
        tokio::spawn(async move {
            let permit = knocking.acquire().await;
            let stream = timeout(REACH_PATIENCE, TcpStream::connect(tried.at)).await;
            // Zero linger resets the connection, so that it leaves no TIME_WAIT behind.
            let reached = matches!(&stream, Ok(Ok(stream)) if stream.set_zero_linger().is_ok());
            drop((stream, permit));
            // A failed send means that the loop has ended, and the agent with it.
            let _ = knocks.send((tried, reached)).await;
        });
    }

    fn knocked(&mut self, tried: &reach::Try, reached: bool) {
        self.reach.tried(Instant::now(), tried, reached);
        debug!(uid = tried.uid, at = %tried.at, reached, "pod of another node tried");
        self.hold(&tried.uid);
    }

    /// Reads the maps for one pod and handles the result.
    fn read(&mut self, uid: &str) {
        if let Some(read) = self.kernel(uid) {
            self.feed(Event::Kernel(uid.to_owned(), read));
        }
    }

    fn kernel(&self, uid: &str) -> Option<Kernel> {
        let Registered { cookie, pod } = *self.locals.get(uid)?;
        let listen = self.ends.maps.listen(cookie, pod.port);
        let listen =
            listen.inspect_err(|error| warn!(uid, error = %chain(error), "cannot read map"));
        let listen = listen.ok()?;
        let state = self.ends.maps.state(pod.slot);
        Some(Kernel {
            listeners: listeners::count(listen.open),
            loopback: listeners::count(listen.loopback),
            serves: listen.families & (abi::SERVES_V4 | abi::SERVES_V6),
            since_ns: listen.since_ns,
            in_flight: state.in_flight,
            connections: state.connections,
            fresh: state.fresh,
            idle: Duration::from_nanos(monotonic_ns().saturating_sub(state.changed_ns)),
        })
    }

    /// Handles one event and performs all actions that follow from it.
    fn feed(&mut self, event: Event) {
        let mut queue = VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            for action in self.pods.step(Instant::now(), event) {
                self.perform(action, &mut queue);
            }
        }
    }

    fn perform(&mut self, action: Action, queue: &mut VecDeque<Event>) {
        match action {
            Action::Find(uid) => self.backlog.push_back(Command::Watch(uid)),
            Action::Register(uid, facts) => self.register(uid, &facts, queue),
            Action::Forget(uid) => {
                self.backlog.push_back(Command::Forget(uid.clone()));
                self.forget(&uid);
            }
            Action::Inspect(uid) => {
                if let Some(local) = self.locals.get(&uid) {
                    self.backlog.push_back(Command::Inspect(uid, local.cookie));
                }
            }
            Action::CountUpgraded(uid) => self.count_upgraded(uid),
            Action::Try(attempt) => self.attempt(attempt),
            Action::Release(uid) => {
                info!(uid, "the kubelet may stop the pod");
                self.ends.drains.release(&uid);
            }
            Action::GoOn(uid) => {
                info!(uid, "the pod's container was started again: it does not stop");
                self.ends.drains.forget(&uid);
                self.hold(&uid);
            }
            Action::Report(seen) => self.report(seen),
            // Ends the pod's exclusion as well, whose entry would otherwise stay.
            Action::Gone(uid) => {
                self.hold(&uid);
                self.ends.reports.remove(&PodKey::Pod(uid));
            }
        }
    }

    fn register(&mut self, uid: String, facts: &Facts, queue: &mut VecDeque<Event>) {
        let Some(pod) = self.pods.get(&uid) else { return };
        let revision = pod.revision.clone();
        let port = pod.port.get();
        // A pod that was restarted in a new sandbox has a new namespace, and needs a new row.
        if self.locals.get(&uid).is_some_and(|local| local.cookie != facts.cookie) {
            self.forget(&uid);
        }
        let Some((slot, fresh)) = self.slots.take(facts.cookie) else {
            queue.push_back(Event::Crowded(uid));
            return;
        };
        // The row's previous pod is counted first, or its last requests would be lost with the row's content.
        if fresh {
            self.ends.revisions.read(&self.ends.maps);
            self.ends.maps.clear_slot(slot);
        }
        let pod = abi::Pod { slot, port, flags: abi::POD_WIDEN_BIND };
        if let Err(error) = self.ends.maps.register(facts.cookie, pod) {
            error!(uid, error = %chain(&error), "cannot register pod");
            return;
        }
        debug!(uid, slot, cookie = facts.cookie, port, "pod registered");
        self.ends.usage.add(slot, &revision, &uid);
        let terms = self.planner.table().terms(&revision);
        self.ends.revisions.add(slot, facts.cookie, &revision, terms);
        // Level 0: the first request raises an event, and is reported at once.
        self.ends.maps.arm(slot, 0);
        self.uids.insert(facts.cookie, uid.clone());
        self.locals.insert(uid.clone(), Registered { cookie: facts.cookie, pod });
        self.audited.add(&uid, audit::Pod { cookie: facts.cookie, pod });
        self.watch_requests(&uid);
        self.touch(&uid);
        queue.push_back(Event::Registered(uid.clone()));
        // A listener may have opened before the registration; its event found no pod then.
        queue.extend(self.kernel(&uid).map(|read| Event::Kernel(uid, read)));
    }

    fn forget(&mut self, uid: &str) {
        let Some(Registered { cookie, pod }) = self.locals.remove(uid) else { return };
        self.uids.remove(&cookie);
        self.audited.remove(uid);
        self.deadlines.iter_mut().for_each(|it| it.forget(uid));
        // The last totals are reported before the row is released.
        self.ends.usage.remove(pod.slot, &self.ends.maps);
        self.release(cookie);
        self.touch(uid);
    }

    fn release(&mut self, cookie: u64) {
        match self.ends.maps.unregister(cookie) {
            Ok(()) => {
                // Only when the kernel no longer knows the namespace may another pod have the row.
                if let Some(slot) = self.slots.release(cookie) {
                    self.ends.revisions.remove(slot, cookie, &self.ends.maps);
                }
            }
            Err(error) => warn!(cookie, error = %chain(&error), "cannot forget namespace"),
        }
    }

    fn attempt(&self, attempt: Attempt) {
        let (tries, marks) = (self.tries.clone(), self.ends.marks.clone());
        tokio::spawn(async move {
            let result = ask(&attempt.probe.how, attempt.at, attempt.timeout, &marks).await;
            // A failed send means that the loop has ended, and the agent with it.
            let _ = tries.send(Event::Tried(attempt.uid, attempt.seq, result)).await;
        });
    }

    fn report(&mut self, seen: PodSeen) {
        self.touch(&seen.uid);
        let key = PodKey::Pod(seen.uid.clone());
        let before = match self.ends.reports.get(&key) {
            Some(PodItem::Seen(before)) => Some(before),
            _ => None,
        };
        let (uid, since_ns) = (seen.uid.clone(), seen.listening_since_ns);
        let (ready, drained, trouble) = (seen.ready, seen.drained, seen.trouble.clone());
        self.ends.reports.set(key, PodItem::Seen(seen));
        // Measured once, at the change to ready; without a listener there is no start to measure from.
        if ready && since_ns > 0 && !before.as_ref().is_some_and(|before| before.ready) {
            let took = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            self.ends.metrics.listen_to_report.observe(took.as_secs_f64());
        }
        let same = |before: &PodSeen| {
            (before.ready, before.drained, &before.trouble) == (ready, drained, &trouble)
        };
        if !before.as_ref().is_some_and(same) {
            info!(uid, ready, drained, trouble, "pod seen");
        }
    }

    /// Handles a batch of the RouteTable.
    fn absorb(&mut self, mut news: RouteBatch) {
        self.draining.follow(&news);
        let revisions = self.ends.revisions.told_of(&news);
        // A snapshot names what exists; subjects that it leaves out are gone.
        if news.is_whole {
            let gone = self.planner.table().missing(&news.changes);
            news.changes.extend(gone.into_iter().map(|key| (key.clone(), RouteChange::Gone(key))));
        }
        let mut events = Vec::new();
        for (key, change) in news.changes {
            match (key, &change) {
                (RouteKey::Pod(_), RouteChange::Pod(pod)) if pod.node == self.node => {
                    events.push(Event::Named(pod.clone()));
                }
                (RouteKey::Pod(uid), RouteChange::Pod(pod)) => {
                    self.elsewhere(pod);
                    // Dropped as a pod of this node too: an earlier table may have placed it here.
                    events.push(Event::Dropped(uid));
                }
                (RouteKey::Pod(uid), _) => {
                    self.reach.dropped(&uid);
                    self.hold(&uid);
                    events.push(Event::Dropped(uid));
                }
                _ => {}
            }
            self.planner.set(change);
        }
        let table = self.planner.table();
        self.ends.revisions.follow(revisions, |name| table.terms(name));
        self.reach.forget_known();
        self.version = news.version;
        // The planner has the whole batch before any event is handled: events read the table.
        events.into_iter().for_each(|event| self.feed(event));
        self.first_table.get_or_insert_with(Instant::now);
        self.stale = true;
    }

    /// Handles a pod of another node.
    fn elsewhere(&mut self, pod: &wire::Pod) {
        let attempt = self.reach.named(Instant::now(), pod);
        self.hold(&pod.uid);
        attempt.into_iter().for_each(|it| self.knock(it));
    }

    /// Writes the difference between maps and table, and reports the version in force.
    fn apply(&mut self) {
        // Without a table nothing is known: the content of the maps stays in force.
        if self.first_table.is_none() {
            return;
        }
        // Cleared before the write: a failure leaves the planner due, and `housekeep` sets it again.
        self.stale = false;
        let begun = Instant::now();
        match self.write() {
            // Lists of the previous table are still in force, so this version is not reported yet.
            Ok(write::Wrote { waits: true, .. }) => {}
            Ok(write::Wrote { writes, .. }) => {
                // Draining pods and stale connections are scanned now, not a second later.
                self.next_sweep = begun;
                let version = self.version;
                debug!(version, writes, took = ?begun.elapsed(), "routes applied");
                self.ends.metrics.apply.observe(begun.elapsed().as_secs_f64());
                self.ends.metrics.version.set(version);
                self.ends.reports.set(PodKey::Applied, PodItem::Applied(version));
                self.draining.in_force(&self.ends.reports);
                self.ends.troubles.set("maps", None);
                self.reach_stage(Stage::Routed);
            }
            Err(refused) => {
                error!(error = refused, version = self.version, "cannot apply routes");
                self.ends.metrics.apply_failures.inc();
                self.ends.troubles.set("maps", Some(refused));
            }
        }
    }

    /// Marks connections stale whose pod new connects no longer choose, and unmarks those of pods that they choose
    /// again.
    fn move_kept(&mut self, plan: &Plan) {
        plan.joined.iter().for_each(|&at| self.kept.come_back(at));
        if plan.left.is_empty() {
            return;
        }
        let now = Instant::now();
        let phases = self.planner.table().phases(|at| plan.left.contains(at));
        plan.left.iter().for_each(|&at| self.kept.leave(now, at, phases.get(&at).copied()));
    }

    /// Updates the planner's entry of a pod of this node.
    ///
    /// Connects check the listener of a local pod, unless the kernel did not see it open.
    fn touch(&mut self, uid: &str) {
        let unseen = self.pods.is_unseen(uid);
        let local = self.locals.get(uid).map(|&Registered { cookie, pod }| Local {
            cookie: if unseen { 0 } else { cookie },
            slot: pod.slot,
        });
        if self.planned.get(uid) == local.as_ref() {
            return;
        }
        match local {
            Some(local) => drop(self.planned.insert(uid.to_owned(), local)),
            None => drop(self.planned.remove(uid)),
        }
        self.planner.touch(uid);
        self.stale = true;
    }

    /// Reads what is due: everything once a second, draining pods more often.
    fn sweep(&mut self) {
        let now = Instant::now();
        let draining = self.pods.draining();
        self.end_kept(now);
        let some_left = !self.kept.leaving().is_empty() && self.clients.looked().known > 0;
        let moving = some_left || self.kept.is_urgent(now);
        let often = moving || !draining.is_empty();
        if now >= self.next_full {
            self.next_full = now + SWEEP;
            self.follow_kept(now);
            let uids: Vec<String> = self.locals.keys().cloned().collect();
            uids.iter().for_each(|uid| self.read(uid));
            uids.iter().for_each(|uid| self.watch_requests(uid));
            self.ends.usage.report_all(&self.ends.maps);
            self.ends.revisions.read(&self.ends.maps);
            self.housekeep(now);
        } else {
            draining.iter().for_each(|uid| self.read(uid));
        }
        self.end_overdue();
        let soon = now + if some_left { ROUND_KNOWN } else { SWEEP_DRAINING };
        self.next_sweep = if often { self.next_full.min(soon) } else { self.next_full };
        self.next_sweep = self.next_overdue().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// Updates the phases of the pods that new connects no longer choose.
    fn follow_kept(&mut self, now: Instant) {
        if self.kept.leaving().is_empty() {
            self.ends.metrics.left.set(0);
            return;
        }
        let leaving = self.kept.leaving();
        let phases = self.planner.table().phases(|at| leaving.contains_key(at));
        self.kept.follow(now, |at| phases.get(&at).copied());
    }

    /// Closes stale connections, one round at a time.
    fn end_kept(&mut self, now: Instant) {
        let busy = self.ending.as_ref().is_some_and(|round| !round.is_finished());
        if busy {
            return;
        }
        let Some(round) = self.kept.round(now, self.clients.looked()) else { return };
        let (clients, leaving) = (self.clients.clone(), self.kept.leaving().clone());
        let metrics = self.ends.metrics.clone();
        self.ending = Some(tokio::spawn(async move {
            let (done, left) = clients.round(round, leaving).await;
            metrics.ended.inc_by(done.ended);
            metrics.spared.inc_by(done.spared);
            metrics.left.set(i64::try_from(left).unwrap_or(i64::MAX));
        }));
    }

    /// Releases pod reports once they can be relied on.
    fn settle(&mut self) {
        let Some(since) = self.first_table else { return };
        if self.ends.settled.is_cancelled() {
            return;
        }
        let waited = since.elapsed();
        let settled = self.pods.is_settled();
        // A pod that never gets ready must not hold up the reports of the others.
        if settled || waited >= SETTLE {
            info!(settled, ?waited, "reporting pods");
            self.ends.settled.cancel();
        }
    }

    /// Sends the finder as many commands as its channel has room for.
    fn flush(&mut self) {
        while let Some(command) = self.backlog.pop_front() {
            if let Err(full) = self.ends.finder.try_send(command) {
                self.backlog.push_front(full.into_inner());
                return;
            }
        }
    }
}
