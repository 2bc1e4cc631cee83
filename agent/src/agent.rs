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
    link::{DrainAckReporter, PodReportKey, RouteBatch, chain},
    outbox::Outbox,
    probe::ask,
    wire::{self, PodObservation, PodReportItem, RouteChange, RouteKey},
};
use datapath::abi;
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
    admin::{AgentMetrics, NotReadyReasons},
    audit::scan as audit,
    clock::monotonic_ns,
    deadlines::PodDeadlines,
    growth_throttle::GrowthThrottle,
    idle_connections::{KNOWN_SCAN_PERIOD, StaleConnections, close::StaleConnectionCloser},
    listener_counts,
    maps::{self, KernelEventRing, KernelMaps},
    plan::{BackendTarget, KernelPodIds, MapCapacityError, MapPlan, RoutePlanner},
    pod_server::prestop::PreStopHooks,
    pod_slots::PodSlots,
    pods::{
        NamespaceFacts, PodKernelState, PodProbeAttempt, PodTracker, PodTrackerAction,
        PodTrackerEvent, finder::FinderCommand, probe_marks::ProbeMarks,
    },
    program_supervisor::ProgramTakeoverStage,
    reachability::{self, PodReachability},
    revision_totals_store::RevisionTotalsStore,
    route_stream::RouteBatchStream,
    usage_reporter::PodUsageReporter,
};

/// Period in which everything is read again: events are hints.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);
/// Period in which draining pods are read, so that the end of the draining is noticed soon.
const DRAINING_SWEEP_PERIOD: Duration = Duration::from_millis(100);
/// Time that a new agent searches for pods that should be ready, before it reports what it sees.
const REPORT_HOLD_MAX: Duration = Duration::from_secs(2);
/// Capacity of the channels of probe results.
const RESULT_CHANNEL_MAX: usize = 1_024;
/// Number of pods of other nodes that are probed at once.
const REACH_PROBES_MAX: usize = 64;
/// Timeout of one probe of a pod of another node.
const REACH_TIMEOUT: Duration = Duration::from_secs(1);
/// Events taken from the ring before the loop handles anything else.
const EVENTS_PER_WAKE: usize = 256;

mod housekeeping;
mod overdue_requests;
mod route_writes;
mod upgraded_connections;

/// Everything outside the loop that it reads, writes or sends to.
pub(crate) struct AgentHandles {
    /// Maps of the eBPF programs.
    pub(crate) maps: KernelMaps,
    /// Map of the marks by which the eBPF programs recognize probes.
    pub(crate) probe_marks: ProbeMarks,
    /// Commands to the finder.
    pub(crate) finder_commands: Sender<FinderCommand>,
    /// Outbox of pod reports.
    pub(crate) reports: Outbox<PodReportKey, PodReportItem>,
    /// Usage reports to the autoscaler.
    pub(crate) usage: PodUsageReporter,
    /// Request totals of the node's Revisions.
    pub(crate) revision_totals: RevisionTotalsStore,
    /// Cancelled once pod reports can be relied on.
    pub(crate) reports_ready: CancellationToken,
    /// Metrics that `/metrics` exports.
    pub(crate) metrics: AgentMetrics,
    /// Not-ready reasons that `/readyz` shows.
    pub(crate) not_ready: NotReadyReasons,
    /// Kubelets that wait in preStop until their pods are drained.
    pub(crate) prestop_hooks: PreStopHooks,
    /// Time that a draining pod waits for its upgraded connections.
    pub(crate) tunnel_drain: Duration,
    /// Stage up to which the eBPF programs may take over from another version's programs.
    pub(crate) takeover_stage: watch::Sender<ProgramTakeoverStage>,
}

/// State of the agent's loop. See [`Agent::run`].
pub(crate) struct Agent {
    node: String,
    /// Client processes of this node, whose stale connections are closed.
    stale_closer: StaleConnectionCloser,
    stale_connections: StaleConnections,
    /// Task of the newest round of closing stale connections.
    close_task: Option<JoinHandle<()>>,
    /// Deadlines of requests; `None` on kernels that cannot close overdue connections.
    deadlines: Option<PodDeadlines>,
    /// Pods whose gauges are audited against their sockets.
    audit_targets: audit::AuditTargets,
    /// Round of deadline scans that is under way.
    deadline_task: Option<JoinHandle<overdue_requests::DeadlineScanResults>>,
    handles: AgentHandles,
    pods: PodTracker,
    slots: PodSlots,
    /// Registered pods by uid.
    registered_pods: BTreeMap<String, RegisteredPod>,
    /// Uids of the registered pods, by namespace cookie.
    uids_by_cookie: HashMap<u64, String>,
    planner: RoutePlanner,
    /// Version of the RouteTable that the planner has.
    route_version: u64,
    /// Draining pods of that RouteTable, and the acknowledgements that the controller has of them.
    draining: DrainAckReporter,
    /// Pods whose growth was reported a moment ago.
    growth_throttle: GrowthThrottle,
    /// Services that do not fit the kernel's maps.
    refused_services: BTreeMap<wire::NamespacedName, MapCapacityError>,
    /// True if a write failed midway, so that the planner has to read the maps again.
    maps_inconsistent: bool,
    /// True if the maps may differ from the table and the local pods.
    plan_dirty: bool,
    first_table_at: Option<Instant>,
    finder_backlog: VecDeque<FinderCommand>,
    pod_events_tx: Sender<PodTrackerEvent>,
    pod_events_rx: Receiver<PodTrackerEvent>,
    /// Reachability of the pods of other nodes.
    reachability: PodReachability,
    reach_results_tx: Sender<(reachability::ReachabilityProbe, bool)>,
    reach_results_rx: Receiver<(reachability::ReachabilityProbe, bool)>,
    /// Bound on the probes of pods of other nodes that run at once.
    reach_semaphore: Arc<Semaphore>,
    next_addresses: Instant,
    next_listeners: Instant,
    /// The kernel's count of listeners without room, as it was when closed entries were last deleted.
    listen_full_seen: u64,
    /// Registered pods as the planner last got them.
    planned_pods: BTreeMap<String, KernelPodIds>,
    next_full_sweep: Instant,
    next_sweep: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegisteredPod {
    cookie: u64,
    entry: abi::PodValue,
}

impl Agent {
    /// Makes an agent that continues with what the maps hold.
    pub(crate) fn new(
        node: String,
        clients: StaleConnectionCloser,
        ends: AgentHandles,
    ) -> Result<Self, maps::KernelMapError> {
        let pods = ends.maps.pods()?;
        // Rows that the previous agent allocated stay with their namespaces: their counters continue.
        let taken = pods.iter().map(|(&cookie, pod)| (cookie, pod.slot)).collect();
        let kernel = ends.maps.read_routes()?;
        // The previous agent has reached these pods from here. Excluding them until a probe succeeds would interrupt
        // their traffic.
        let reach = PodReachability::new(
            kernel.backends.values().filter_map(BackendTarget::pod_address).collect(),
        );
        let planner = RoutePlanner::resume(kernel, monotonic_ns());
        let (tries, tried) = mpsc::channel(RESULT_CHANNEL_MAX);
        let (knocks, knocked) = mpsc::channel(RESULT_CHANNEL_MAX);
        info!(pods = pods.len(), "maps read back");
        ends.metrics.closes_locked.set(clients.can_close_locked().into());
        Ok(Self {
            node,
            stale_closer: clients,
            stale_connections: StaleConnections::default(),
            close_task: None,
            deadlines: overdue_requests::init_deadlines(&ends),
            audit_targets: audit::AuditTargets::default(),
            deadline_task: None,
            pods: PodTracker::new(ends.tunnel_drain),
            slots: PodSlots::new(taken),
            registered_pods: BTreeMap::new(),
            uids_by_cookie: HashMap::new(),
            planner,
            route_version: 0,
            draining: DrainAckReporter::default(),
            growth_throttle: GrowthThrottle::default(),
            refused_services: BTreeMap::new(),
            maps_inconsistent: false,
            plan_dirty: false,
            first_table_at: None,
            finder_backlog: VecDeque::new(),
            pod_events_tx: tries,
            pod_events_rx: tried,
            reachability: reach,
            reach_results_tx: knocks,
            reach_results_rx: knocked,
            reach_semaphore: Arc::new(Semaphore::new(REACH_PROBES_MAX)),
            next_addresses: Instant::now(),
            next_listeners: Instant::now(),
            listen_full_seen: ends.maps.control_word(abi::CONTROL_LISTEN_FULL),
            planned_pods: BTreeMap::new(),
            next_full_sweep: Instant::now(),
            next_sweep: Instant::now(),
            handles: ends,
        })
    }

    /// Returns the auditor, which compares gauges with sockets in a task of its own.
    pub(crate) fn auditor(&self) -> Result<audit::GaugeAuditor, maps::KernelMapError> {
        Ok(audit::GaugeAuditor {
            targets: self.audit_targets.clone(),
            finder_commands: self.handles.finder_commands.clone(),
            conns: self.handles.maps.conns(),
            gauges: self.handles.maps.gauges()?,
            metrics: self.handles.metrics.clone(),
        })
    }

    /// Runs until `shutdown`. The maps stay as they are: connects follow them without an agent.
    pub(crate) async fn run(
        mut self,
        mut events: AsyncFd<KernelEventRing>,
        routes: &RouteBatchStream,
        mut found: Receiver<PodTrackerEvent>,
        shutdown: &CancellationToken,
    ) -> std::io::Result<()> {
        loop {
            let sweep = self.next_sweep;
            let wakes = [
                self.pods.next_wake(),
                self.reachability.next_wake(),
                self.growth_throttle.next_wake(),
            ];
            let wake = wakes.into_iter().flatten().fold(sweep, Instant::min);
            tokio::select! {
                // Biased, in order of urgency: a listener event is the first step of a cold start, and must not wait
                // behind routes or sweeps.
                biased;
                () = shutdown.cancelled() => return Ok(()),
                ready = events.readable_mut() => {
                    let mut ready = ready?;
                    if self.handle_kernel_events(ready.get_inner_mut()) {
                        ready.clear_ready();
                    }
                }
                Some(event) = found.recv() => self.handle_finder_event(event),
                Some(event) = self.pod_events_rx.recv() => {
                    if let PodTrackerEvent::ProbeEnded(_, _, result) = &event {
                        self.handles.metrics.count_probe(result.is_ok());
                    }
                    self.handle_event(event);
                }
                Some((tried, reached)) = self.reach_results_rx.recv() => self.handle_reach_result(&tried, reached),
                found = overdue_requests::wait_for_scans(&mut self.deadline_task) => self.handle_deadline_scans(found),
                news = routes.next() => self.apply_batch(news),
                () = sleep_until(wake.into()) => {
                    self.handle_event(PodTrackerEvent::Tick);
                    self.rearm_growth_events();
                    self.reachability.take_due_probes(Instant::now()).into_iter().for_each(|it| self.probe_remote_pod(it));
                    if sweep <= Instant::now() {
                        self.sweep();
                    }
                }
            }
            // After each branch, as any of them may have queued commands or changed what the maps should hold.
            self.pods.set_controller_connected(routes.is_live());
            self.send_finder_commands();
            if self.plan_dirty {
                self.apply_routes();
            }
            self.release_reports();
        }
    }

    /// Handles kernel events. Returns true if the ring was emptied.
    fn handle_kernel_events(&mut self, ring: &mut KernelEventRing) -> bool {
        for _ in 0..EVENTS_PER_WAKE {
            let Some(event) = ring.next() else { return true };
            self.handles.metrics.events.inc();
            match event.kind {
                abi::EVENT_LISTEN | abi::EVENT_CLOSED => self.handle_listener_event(event.cookie),
                abi::EVENT_BUSY => {
                    self.handles.usage.report_slot(event.subject, &self.handles.maps);
                    self.growth_throttle.start_pause(Instant::now(), event.subject);
                }
                _ => {}
            }
        }
        false
    }

    /// Arms the growth events of pods whose pause is over.
    fn rearm_growth_events(&mut self) {
        let now = Instant::now();
        for slot in self.growth_throttle.take_due(now) {
            if self.handles.usage.arm_growth_event(slot, &self.handles.maps) {
                self.growth_throttle.start_pause(now, slot);
            }
        }
    }

    /// Handles an opened or closed listener: reads the map for the present state.
    fn handle_listener_event(&mut self, cookie: u64) {
        match self.uids_by_cookie.get(&cookie).cloned() {
            Some(uid) => self.read_pod(&uid),
            // Most likely a pod that is not found yet. The maps are read once it is.
            None if self.registered_pods.len() < self.pods.counts().in_table => {
                self.finder_backlog.push_back(FinderCommand::RetryMissing);
            }
            None => {}
        }
    }

    /// Handles an event of the finder.
    fn handle_finder_event(&mut self, event: PodTrackerEvent) {
        let asked = match &event {
            PodTrackerEvent::PreStopRequested(uid) => Some(uid.clone()),
            _ => None,
        };
        self.handle_event(event);
        if let Some(uid) = asked {
            // A preStop request: no new connection goes to the pod, and the next sweep watches its last requests.
            self.update_exclusion(&uid);
            self.next_sweep = Instant::now();
        }
    }

    /// Excludes a pod from routing while it may not get new connects yet, or any more.
    fn update_exclusion(&mut self, uid: &str) {
        self.planner
            .set_excluded(uid, self.reachability.is_unreached(uid) || self.pods.is_stopping(uid));
        self.plan_dirty |= self.planner.has_due_work();
    }

    /// Probes a pod of another node by a connect, in a task of its own.
    fn probe_remote_pod(&self, tried: reachability::ReachabilityProbe) {
        let (knocks, knocking) = (self.reach_results_tx.clone(), Arc::clone(&self.reach_semaphore));
        tokio::spawn(async move {
            let permit = knocking.acquire().await;
            let stream = timeout(REACH_TIMEOUT, TcpStream::connect(tried.at)).await;
            // Zero linger resets the connection, so that it leaves no TIME_WAIT behind.
            let reached = matches!(&stream, Ok(Ok(stream)) if stream.set_zero_linger().is_ok());
            drop((stream, permit));
            // A failed send means that the loop has ended, and the agent with it.
            let _ = knocks.send((tried, reached)).await;
        });
    }

    fn handle_reach_result(&mut self, tried: &reachability::ReachabilityProbe, reached: bool) {
        self.reachability.record_result(Instant::now(), tried, reached);
        debug!(uid = tried.uid, at = %tried.at, reached, "pod of another node tried");
        self.update_exclusion(&tried.uid);
    }

    /// Reads the maps for one pod and handles the result.
    fn read_pod(&mut self, uid: &str) {
        if let Some(read) = self.read_kernel_state(uid) {
            self.handle_event(PodTrackerEvent::KernelStateRead(uid.to_owned(), read));
        }
    }

    fn read_kernel_state(&self, uid: &str) -> Option<PodKernelState> {
        let RegisteredPod { cookie, entry: pod } = *self.registered_pods.get(uid)?;
        let listen = self.handles.maps.listener(cookie, pod.port);
        let listen =
            listen.inspect_err(|error| warn!(uid, error = %chain(error), "cannot read map"));
        let listen = listen.ok()?;
        let state = self.handles.maps.pod_state(pod.slot);
        Some(PodKernelState {
            listeners: listener_counts::count(listen.open),
            loopback_listeners: listener_counts::count(listen.loopback),
            served_families: listen.families & (abi::SERVES_V4 | abi::SERVES_V6),
            listener_opened_ns: listen.since_ns,
            in_flight: state.in_flight,
            connections: state.connections,
            unused_connections: state.fresh,
            idle: Duration::from_nanos(monotonic_ns().saturating_sub(state.changed_ns)),
        })
    }

    /// Handles one event and performs all actions that follow from it.
    fn handle_event(&mut self, event: PodTrackerEvent) {
        let mut queue = VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            for action in self.pods.step(Instant::now(), event) {
                self.perform_action(action, &mut queue);
            }
        }
    }

    fn perform_action(&mut self, action: PodTrackerAction, queue: &mut VecDeque<PodTrackerEvent>) {
        match action {
            PodTrackerAction::FindNamespace(uid) => {
                self.finder_backlog.push_back(FinderCommand::Find(uid))
            }
            PodTrackerAction::Register(uid, facts) => self.register_pod(uid, &facts, queue),
            PodTrackerAction::Unregister(uid) => {
                self.finder_backlog.push_back(FinderCommand::Forget(uid.clone()));
                self.forget_pod(&uid);
            }
            PodTrackerAction::Inspect(uid) => {
                if let Some(local) = self.registered_pods.get(&uid) {
                    self.finder_backlog.push_back(FinderCommand::Inspect(uid, local.cookie));
                }
            }
            PodTrackerAction::CountUpgraded(uid) => self.count_upgraded(uid),
            PodTrackerAction::StartProbe(attempt) => self.start_probe(attempt),
            PodTrackerAction::AnswerPreStop(uid) => {
                info!(uid, "the kubelet may stop the pod");
                self.handles.prestop_hooks.release(&uid);
            }
            PodTrackerAction::EndExclusion(uid) => {
                info!(uid, "the pod's container was started again: it does not stop");
                self.handles.prestop_hooks.forget(&uid);
                self.update_exclusion(&uid);
            }
            PodTrackerAction::Report(seen) => self.report_pod(seen),
            // Ends the pod's exclusion as well, whose entry would otherwise stay.
            PodTrackerAction::ReportGone(uid) => {
                self.update_exclusion(&uid);
                self.handles.reports.remove(&PodReportKey::Pod(uid));
            }
        }
    }

    fn register_pod(
        &mut self,
        uid: String,
        facts: &NamespaceFacts,
        queue: &mut VecDeque<PodTrackerEvent>,
    ) {
        let Some(pod) = self.pods.get(&uid) else { return };
        let revision = pod.revision.clone();
        let port = pod.port.get();
        // A pod that was restarted in a new sandbox has a new namespace, and needs a new row.
        if self.registered_pods.get(&uid).is_some_and(|local| local.cookie != facts.cookie) {
            self.forget_pod(&uid);
        }
        let Some((slot, fresh)) = self.slots.allocate(facts.cookie) else {
            queue.push_back(PodTrackerEvent::Crowded(uid));
            return;
        };
        // The row's previous pod is counted first, or its last requests would be lost with the row's content.
        if fresh {
            self.handles.revision_totals.read_slots(&self.handles.maps);
            self.handles.maps.clear_slot(slot);
        }
        let pod = abi::PodValue { slot, port, flags: abi::POD_WIDEN_BIND };
        if let Err(error) = self.handles.maps.register(facts.cookie, pod) {
            error!(uid, error = %chain(&error), "cannot register pod");
            return;
        }
        debug!(uid, slot, cookie = facts.cookie, port, "pod registered");
        self.handles.usage.assign_slot(slot, &revision, &uid);
        let terms = self.planner.table().request_terms(&revision);
        self.handles.revision_totals.assign_slot(slot, facts.cookie, &revision, terms);
        // Level 0: the first request raises an event, and is reported at once.
        self.handles.maps.arm_growth_event(slot, 0);
        self.uids_by_cookie.insert(facts.cookie, uid.clone());
        self.registered_pods
            .insert(uid.clone(), RegisteredPod { cookie: facts.cookie, entry: pod });
        self.audit_targets.add(&uid, audit::AuditTarget { cookie: facts.cookie, entry: pod });
        self.update_deadline(&uid);
        self.update_planned_pod(&uid);
        queue.push_back(PodTrackerEvent::Registered(uid.clone()));
        // A listener may have opened before the registration; its event found no pod then.
        queue.extend(
            self.read_kernel_state(&uid).map(|read| PodTrackerEvent::KernelStateRead(uid, read)),
        );
    }

    fn forget_pod(&mut self, uid: &str) {
        let Some(RegisteredPod { cookie, entry: pod }) = self.registered_pods.remove(uid) else {
            return;
        };
        self.uids_by_cookie.remove(&cookie);
        self.audit_targets.remove(uid);
        self.deadlines.iter_mut().for_each(|it| it.forget(uid));
        // The last totals are reported before the row is released.
        self.handles.usage.release_slot(pod.slot, &self.handles.maps);
        self.release_slot(cookie);
        self.update_planned_pod(uid);
    }

    fn release_slot(&mut self, cookie: u64) {
        match self.handles.maps.unregister(cookie) {
            Ok(()) => {
                // Only when the kernel no longer knows the namespace may another pod have the row.
                if let Some(slot) = self.slots.release(cookie) {
                    self.handles.revision_totals.release_slot(slot, cookie, &self.handles.maps);
                }
            }
            Err(error) => warn!(cookie, error = %chain(&error), "cannot forget namespace"),
        }
    }

    fn start_probe(&self, attempt: PodProbeAttempt) {
        let (tries, marks) = (self.pod_events_tx.clone(), self.handles.probe_marks.clone());
        tokio::spawn(async move {
            let result = ask(&attempt.probe.how, attempt.at, attempt.timeout, &marks).await;
            // A failed send means that the loop has ended, and the agent with it.
            let _ = tries.send(PodTrackerEvent::ProbeEnded(attempt.uid, attempt.seq, result)).await;
        });
    }

    fn report_pod(&mut self, seen: PodObservation) {
        self.update_planned_pod(&seen.uid);
        let key = PodReportKey::Pod(seen.uid.clone());
        let before = match self.handles.reports.get(&key) {
            Some(PodReportItem::Seen(before)) => Some(before),
            _ => None,
        };
        let (uid, since_ns) = (seen.uid.clone(), seen.listening_since_ns);
        let (ready, drained, trouble) = (seen.ready, seen.drained, seen.trouble.clone());
        self.handles.reports.set(key, PodReportItem::Seen(seen));
        // Measured once, at the change to ready; without a listener there is no start to measure from.
        if ready && since_ns > 0 && !before.as_ref().is_some_and(|before| before.ready) {
            let took = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            self.handles.metrics.listen_to_report.observe(took.as_secs_f64());
        }
        let same = |before: &PodObservation| {
            (before.ready, before.drained, &before.trouble) == (ready, drained, &trouble)
        };
        if !before.as_ref().is_some_and(same) {
            info!(uid, ready, drained, trouble, "pod seen");
        }
    }

    /// Handles a batch of the RouteTable.
    fn apply_batch(&mut self, mut news: RouteBatch) {
        self.draining.follow(&news);
        let revisions = self.handles.revision_totals.changed_revisions(&news);
        // A snapshot names what exists; subjects that it leaves out are gone.
        if news.is_whole {
            let gone = self.planner.table().missing_from(&news.changes);
            news.changes.extend(gone.into_iter().map(|key| (key.clone(), RouteChange::Gone(key))));
        }
        let mut events = Vec::new();
        for (key, change) in news.changes {
            match (key, &change) {
                (RouteKey::Pod(_), RouteChange::Pod(pod)) if pod.node == self.node => {
                    events.push(PodTrackerEvent::RouteUpdated(pod.clone()));
                }
                (RouteKey::Pod(uid), RouteChange::Pod(pod)) => {
                    self.handle_remote_pod(pod);
                    // Dropped as a pod of this node too: an earlier table may have placed it here.
                    events.push(PodTrackerEvent::RouteRemoved(uid));
                }
                (RouteKey::Pod(uid), _) => {
                    self.reachability.remove_pod(&uid);
                    self.update_exclusion(&uid);
                    events.push(PodTrackerEvent::RouteRemoved(uid));
                }
                _ => {}
            }
            self.planner.apply_change(change);
        }
        let table = self.planner.table();
        self.handles.revision_totals.apply_changes(revisions, |name| table.request_terms(name));
        self.reachability.forget_known_addresses();
        self.route_version = news.version;
        // The planner has the whole batch before any event is handled: events read the table.
        events.into_iter().for_each(|event| self.handle_event(event));
        self.first_table_at.get_or_insert_with(Instant::now);
        self.plan_dirty = true;
    }

    /// Handles a pod of another node.
    fn handle_remote_pod(&mut self, pod: &wire::PodEntry) {
        let attempt = self.reachability.update_pod(Instant::now(), pod);
        self.update_exclusion(&pod.uid);
        attempt.into_iter().for_each(|it| self.probe_remote_pod(it));
    }

    /// Writes the difference between maps and table, and reports the version in force.
    fn apply_routes(&mut self) {
        // Without a table nothing is known: the content of the maps stays in force.
        if self.first_table_at.is_none() {
            return;
        }
        // Cleared before the write: a failure leaves the planner due, and `housekeep` sets it again.
        self.plan_dirty = false;
        let begun = Instant::now();
        match self.write_plan() {
            // Lists of the previous table are still in force, so this version is not reported yet.
            Ok(route_writes::MapPlanProgress { is_partial: true, .. }) => {}
            Ok(route_writes::MapPlanProgress { writes, .. }) => {
                // Draining pods and stale connections are scanned now, not a second later.
                self.next_sweep = begun;
                let version = self.route_version;
                debug!(version, writes, took = ?begun.elapsed(), "routes applied");
                self.handles.metrics.apply.observe(begun.elapsed().as_secs_f64());
                self.handles.metrics.version.set(version);
                self.handles.reports.set(PodReportKey::Applied, PodReportItem::Applied(version));
                self.draining.in_force(&self.handles.reports);
                self.handles.not_ready.set("maps", None);
                self.advance_stage(ProgramTakeoverStage::TablesFilled);
            }
            Err(refused) => {
                error!(error = refused, version = self.route_version, "cannot apply routes");
                self.handles.metrics.apply_failures.inc();
                self.handles.not_ready.set("maps", Some(refused));
            }
        }
    }

    /// Marks connections stale whose pod new connects no longer choose, and unmarks those of pods that they choose
    /// again.
    fn update_stale_addresses(&mut self, plan: &MapPlan) {
        plan.added_pods.iter().for_each(|&at| self.stale_connections.stop_draining(at));
        if plan.removed_pods.is_empty() {
            return;
        }
        let now = Instant::now();
        let phases = self.planner.table().pod_phases(|at| plan.removed_pods.contains(at));
        plan.removed_pods.iter().for_each(|&at| {
            self.stale_connections.start_draining(now, at, phases.get(&at).copied())
        });
    }

    /// Updates the planner's entry of a pod of this node.
    ///
    /// Connects check the listener of a local pod, unless the kernel did not see it open.
    fn update_planned_pod(&mut self, uid: &str) {
        let unseen = self.pods.is_listener_unseen(uid);
        let local = self.registered_pods.get(uid).map(|&RegisteredPod { cookie, entry: pod }| {
            KernelPodIds { cookie: if unseen { 0 } else { cookie }, slot: pod.slot }
        });
        if self.planned_pods.get(uid) == local.as_ref() {
            return;
        }
        match local {
            Some(local) => drop(self.planned_pods.insert(uid.to_owned(), local)),
            None => drop(self.planned_pods.remove(uid)),
        }
        self.planner.mark_pod_changed(uid);
        self.plan_dirty = true;
    }

    /// Reads what is due: everything once a second, draining pods more often.
    fn sweep(&mut self) {
        let now = Instant::now();
        let draining = self.pods.draining_uids();
        self.close_stale_connections(now);
        let some_left = !self.stale_connections.draining().is_empty()
            && self.stale_closer.scan_stats().known_connections > 0;
        let moving = some_left || self.stale_connections.is_urgent(now);
        let often = moving || !draining.is_empty();
        if now >= self.next_full_sweep {
            self.next_full_sweep = now + SWEEP_PERIOD;
            self.update_stale_phases(now);
            let uids: Vec<String> = self.registered_pods.keys().cloned().collect();
            uids.iter().for_each(|uid| self.read_pod(uid));
            uids.iter().for_each(|uid| self.update_deadline(uid));
            self.handles.usage.report_all(&self.handles.maps);
            self.handles.revision_totals.read_slots(&self.handles.maps);
            self.housekeep(now);
        } else {
            draining.iter().for_each(|uid| self.read_pod(uid));
        }
        self.start_deadline_scans();
        let soon = now + if some_left { KNOWN_SCAN_PERIOD } else { DRAINING_SWEEP_PERIOD };
        self.next_sweep = if often { self.next_full_sweep.min(soon) } else { self.next_full_sweep };
        self.next_sweep =
            self.next_deadline_scan().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// Updates the phases of the pods that new connects no longer choose.
    fn update_stale_phases(&mut self, now: Instant) {
        if self.stale_connections.draining().is_empty() {
            self.handles.metrics.connections_stale.set(0);
            return;
        }
        let leaving = self.stale_connections.draining();
        let phases = self.planner.table().pod_phases(|at| leaving.contains_key(at));
        self.stale_connections.update_phases(now, |at| phases.get(&at).copied());
    }

    /// Closes stale connections, one round at a time.
    fn close_stale_connections(&mut self, now: Instant) {
        let busy = self.close_task.as_ref().is_some_and(|round| !round.is_finished());
        if busy {
            return;
        }
        let Some(round) = self.stale_connections.next_scan(now, self.stale_closer.scan_stats())
        else {
            return;
        };
        let (clients, leaving) =
            (self.stale_closer.clone(), self.stale_connections.draining().clone());
        let metrics = self.handles.metrics.clone();
        self.close_task = Some(tokio::spawn(async move {
            let (done, left) = clients.scan_and_close(round, leaving).await;
            metrics.connections_closed.inc_by(done.closed);
            metrics.connections_spared.inc_by(done.spared);
            metrics.connections_stale.set(i64::try_from(left).unwrap_or(i64::MAX));
        }));
    }

    /// Releases pod reports once they can be relied on.
    fn release_reports(&mut self) {
        let Some(since) = self.first_table_at else { return };
        if self.handles.reports_ready.is_cancelled() {
            return;
        }
        let waited = since.elapsed();
        let settled = self.pods.has_caught_up();
        // A pod that never gets ready must not hold up the reports of the others.
        if settled || waited >= REPORT_HOLD_MAX {
            info!(settled, ?waited, "reporting pods");
            self.handles.reports_ready.cancel();
        }
    }

    /// Sends the finder as many commands as its channel has room for.
    fn send_finder_commands(&mut self) {
        while let Some(command) = self.finder_backlog.pop_front() {
            if let Err(full) = self.handles.finder_commands.try_send(command) {
                self.finder_backlog.push_front(full.into_inner());
                return;
            }
        }
    }
}
