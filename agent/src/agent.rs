//! Shell: the loop that joins kernel, pods, controller and autoscaler.
//!
//! Everything that must be quick runs on this one task without waiting: reading and writing maps, deciding, putting
//! reports into the outboxes. Everything that may wait (cgroup files, namespaces, probes, streams) runs elsewhere and
//! returns as an event.

use std::{
    collections::{BTreeSet, VecDeque},
    net::IpAddr,
    time::{Duration, Instant},
};

use common::{link::PodReportKey, once_signal::OnceSignal, outbox::Outbox, wire::PodReportItem};
use datapath::abi;
use tokio::{
    io::unix::AsyncFd,
    sync::{
        mpsc::{self, Receiver, Sender},
        watch,
    },
    time::sleep_until,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use self::{housekeeping::HousekeepingTimes, standby::StandbyPods};
use crate::{
    admin::FactsQuery,
    clock::{monotonic_ns, unix_ms},
    config::ClusterIpMode,
    connections::{
        audit::scan::GaugeAuditor,
        deadlines::task::OverdueRequestTask,
        stale_connections::{close::StaleConnectionCloser, task::StaleConnectionTask},
        stale_sockets::task::StaleSocketTask,
    },
    health::ProxyHealth,
    kernel::{
        map_op::{BackendTarget, KernelRoutes},
        maps::{KernelEventRing, KernelMapError, KernelMaps, client_sockets::ClientSocketRecords},
        takeover_stage::ProgramTakeoverStage,
    },
    metrics::{AgentMetrics, NotReadyReasons},
    net::{remote_prober::RemotePodProber, standby_watcher::StandbyWatcher},
    pods::{
        finder::FinderCommand,
        finder_queue::FinderQueue,
        idle_connections::IdleConnections,
        pod_server::{prestop::PreStopHooks, running::ThawQuery},
        probe_marks::ProbeMarks,
        registry::PodRegistry,
        tracker::PodTracker,
        types::PodTrackerEvent,
        upgraded_connections::UpgradedCounts,
    },
    routes::{
        activator_reports::ActivatorReports, bootstrap::BootstrapFrontend,
        bootstrap_file::BootstrapPublisher, cluster_watch::ClusterInbox,
        event_writer::ServiceEvents, node_routes::NodeRoutes, route_stream::RouteReceiver,
    },
    usage::{revision_totals_store::RevisionTotalsStore, usage_reporter::PodUsageReporter},
};

mod facts;
mod housekeeping;
mod pod_actions;
mod remote_pods;
mod route_updates;
mod standby;
mod standby_watches;
mod sweeps;

/// Time that a new agent searches for pods that should be ready, before it reports what it sees.
const REPORT_HOLD_MAX: Duration = Duration::from_secs(2);
/// Capacity of the channel of events that tasks of the loop send.
const POD_EVENTS_MAX: usize = 1_024;
/// Events taken from the ring before the loop handles anything else.
const EVENTS_PER_WAKE: usize = 256;

/// Everything outside the loop that it reads, writes or sends to.
pub(crate) struct AgentHandles {
    /// Maps of the eBPF programs.
    pub(crate) maps: KernelMaps,
    /// Map of the marks by which the eBPF programs recognize probes.
    pub(crate) probe_marks: ProbeMarks,
    /// Commands to the finder.
    pub(crate) finder: FinderQueue,
    /// Outbox of pod reports.
    pub(crate) reports: Outbox<PodReportKey, PodReportItem>,
    /// Reports of ready pods to activators.
    pub(crate) activator_reports: ActivatorReports,
    /// Usage reports to the autoscaler.
    pub(crate) usage: PodUsageReporter,
    /// Request totals of the node's Revisions.
    pub(crate) revision_totals: RevisionTotalsStore,
    /// Set once pod reports can be relied on.
    pub(crate) reports_ready: OnceSignal,
    /// Receivers of the facts about the start of a node.
    pub(crate) bootstrap: BootstrapPublisher,
    /// Events on Services of the cluster.
    pub(crate) service_events: ServiceEvents,
    /// Metrics that `/metrics` exports.
    pub(crate) metrics: AgentMetrics,
    /// Not-ready reasons that `/readyz` shows.
    pub(crate) not_ready: NotReadyReasons,
    /// Health that `/healthz` and `/livez` show.
    pub(crate) health: ProxyHealth,
    /// Questions of the pages about services.
    pub(crate) facts_queries: Receiver<FactsQuery>,
    /// Kubelets that wait in preStop until their pods are drained.
    pub(crate) prestop_hooks: PreStopHooks,
    /// Connections of this node's pods that the eBPF programs report as idle.
    pub(crate) idle: IdleConnections,
    /// Thaw queries for pods of this node.
    pub(crate) thaw_queries: Receiver<ThawQuery>,
    /// True if agents answer thaw queries. All agents of a cluster have the same setting.
    pub(crate) agents_answer_queries: bool,
    /// Time that a draining pod waits for its upgraded connections.
    pub(crate) upgraded_drain_time: Duration,
    /// Stage up to which the eBPF programs may take over from another version's programs.
    pub(crate) takeover_stage: watch::Sender<ProgramTakeoverStage>,
}

/// Facts about the Services of the cluster with which an agent starts.
pub(crate) struct ClusterStart {
    /// Services that the node serves.
    pub(crate) mode: ClusterIpMode,
    /// Addresses at which the agent reaches API servers without their Service; `None`: it needs the Service.
    pub(crate) api_server_addresses: Option<BTreeSet<IpAddr>>,
    /// Lists of the bootstrap file.
    pub(crate) frontends: Vec<BootstrapFrontend>,
}

/// State of the agent's loop, by owner. See [`Agent::run`].
pub(crate) struct Agent {
    node: String,
    handles: AgentHandles,
    /// State of each pod of this node.
    pods: PodTracker,
    /// Pods of this node that the kernel's maps hold.
    registry: PodRegistry,
    /// Pods of this node that are frozen while nothing uses them.
    standby: StandbyPods,
    /// RouteTable, and its way into the maps.
    routes: NodeRoutes,
    /// True if the maps had all lists of earlier maps of other sizes when the agent started.
    has_earlier_lists: bool,
    /// Reachability of the pods of other nodes.
    remote_pods: RemotePodProber,
    /// Pods of other nodes with standby orders, and the checks that they are thawed for connects of this node.
    standby_watcher: StandbyWatcher,
    /// Records of this node's client sockets, which tell the services that have clients here.
    client_sockets: ClientSocketRecords,
    /// Stale connections of this node's clients.
    stale_connections: StaleConnectionTask,
    /// Sockets of this node whose endpoints have left.
    stale_sockets: StaleSocketTask,
    /// Deadlines of the requests of this node's pods.
    overdue_requests: OverdueRequestTask,
    /// Counts of the upgraded connections of this node's draining pods.
    upgraded_counts: UpgradedCounts,
    housekeeping: HousekeepingTimes,
    /// Events of tasks that the loop has started: probes, and counts of connections.
    pod_events_tx: Sender<PodTrackerEvent>,
    pod_events_rx: Receiver<PodTrackerEvent>,
    /// Time from which a sweep reads all pods.
    next_full_sweep: Instant,
    /// Time of the next sweep. Before the time above, it reads draining pods only.
    next_sweep: Instant,
    /// Time of the agent's start, in ms since the epoch.
    started_ms: i64,
}

impl Agent {
    /// Makes an agent that continues with what the maps hold. `earlier` are the routes that connects follow, if these are
    /// in maps of other sizes.
    pub(crate) fn new(
        node: String,
        cluster: ClusterStart,
        earlier: Option<&KernelRoutes>,
        closer: StaleConnectionCloser,
        mut handles: AgentHandles,
    ) -> Result<Self, KernelMapError> {
        let pods = handles.maps.pods()?;
        let slots_by_cookie = pods.iter().map(|(&cookie, pod)| (cookie, pod.slot)).collect();
        let (kernel, has_earlier_lists) =
            route_updates::start_routes(&mut handles.maps, &cluster, earlier)?;
        // The previous agent has reached these pods from here. Excluding them until a probe succeeds would interrupt
        // their traffic.
        let known_addresses =
            kernel.backends.values().filter_map(BackendTarget::pod_address).collect();
        let mut routes = NodeRoutes::resume(kernel, cluster.mode, &node, monotonic_ns());
        if let Some(addresses) = cluster.api_server_addresses {
            routes.serve_api_server(addresses);
        }
        let (pod_events_tx, pod_events_rx) = mpsc::channel(POD_EVENTS_MAX);
        info!(pods = pods.len(), "maps read back");
        let metrics = &handles.metrics;
        let client_sockets = handles.maps.client_sockets()?;
        let now = Instant::now();
        Ok(Self {
            node,
            stale_sockets: StaleSocketTask::new(
                closer.cgroup().to_owned(),
                client_sockets.clone(),
                metrics.clone(),
            ),
            stale_connections: StaleConnectionTask::new(
                closer.with_records(client_sockets.clone()),
                metrics.clone(),
            ),
            overdue_requests: OverdueRequestTask::new(
                handles.finder.channel(),
                handles.maps.conns(),
                metrics.clone(),
            ),
            upgraded_counts: UpgradedCounts::new(
                handles.finder.channel(),
                handles.maps.conns(),
                pod_events_tx.clone(),
            ),
            pods: PodTracker::new(handles.upgraded_drain_time),
            registry: PodRegistry::resume(slots_by_cookie),
            standby: StandbyPods::new(&handles.maps, metrics),
            routes,
            has_earlier_lists,
            remote_pods: RemotePodProber::new(known_addresses),
            standby_watcher: StandbyWatcher::new(handles.agents_answer_queries),
            client_sockets,
            housekeeping: HousekeepingTimes::new(now, &handles.maps),
            pod_events_tx,
            pod_events_rx,
            next_full_sweep: now,
            next_sweep: now,
            started_ms: unix_ms(),
            handles,
        })
    }

    /// Returns the auditor, which compares gauges with sockets in a task of its own.
    pub(crate) fn auditor(&self) -> Result<GaugeAuditor, KernelMapError> {
        Ok(GaugeAuditor {
            targets: self.registry.counted_pods(),
            finder_commands: self.handles.finder.channel(),
            conns: self.handles.maps.conns(),
            gauges: self.handles.maps.gauges()?,
            metrics: self.handles.metrics.clone(),
        })
    }

    /// Runs until `shutdown`. The maps stay as they are: connects follow them without an agent. Frozen pods are thawed, as
    /// nothing would do so later.
    pub(crate) async fn run(
        mut self,
        mut events: AsyncFd<KernelEventRing>,
        routes: &RouteReceiver,
        mut cluster: ClusterInbox,
        mut finder_events: Receiver<PodTrackerEvent>,
        shutdown: &CancellationToken,
    ) -> std::io::Result<()> {
        loop {
            self.standby.record_turn();
            let sweep = self.next_sweep;
            let wakes = [
                self.pods.next_wake(),
                self.remote_pods.next_wake(),
                self.handles.usage.next_wake(),
                self.standby.next_wake(),
                self.standby_watcher.next_wake(),
            ];
            let wake = wakes.into_iter().flatten().fold(sweep, Instant::min);
            tokio::select! {
                // Biased, in order of urgency: a listener event is the first step of a cold start, and must not wait
                // behind routes or sweeps.
                biased;
                () = shutdown.cancelled() => break,
                ready = events.readable_mut() => {
                    let mut ready = ready?;
                    if self.handle_kernel_events(ready.get_inner_mut()) {
                        ready.clear_ready();
                    }
                }
                Some(event) = finder_events.recv() => self.handle_finder_event(event),
                Some(event) = self.pod_events_rx.recv() => {
                    if let PodTrackerEvent::ProbeEnded(_, _, result) = &event {
                        self.handles.metrics.count_probe(result.is_ok());
                    }
                    self.handle_event(event);
                }
                Some(result) = self.standby.results_rx.recv() => self.handle_standby_result(result),
                Some(result) = self.standby_watcher.next_result() => self.handle_thaw_query_result(result),
                Some(result) = self.remote_pods.next_result() => self.handle_remote_probe_result(&result),
                results = self.overdue_requests.wait_for_round() => self.handle_deadline_scans(results),
                batch = routes.next() => self.apply_batch(batch),
                () = sleep_until(wake.into()) => {
                    self.handle_timers();
                    if sweep <= Instant::now() {
                        self.sweep();
                        self.record_progress(cluster.has_waiting(), false);
                    }
                }
                // After the timers: any client that reaches a pod may send such queries without end.
                Some(query) = self.handles.thaw_queries.recv() => self.answer_thaw_query(query),
                Some(query) = self.handles.facts_queries.recv() => self.answer_query(query),
                // Last: a rollout changes Services of the cluster faster than they can be planned, and timers must go on.
                changes = cluster.next() => {
                    self.routes.apply_cluster_changes(changes);
                    // Also if nothing is to be written: the mode may select none of the Services that change.
                    let is_in_force = !self.routes.has_unwritten_changes();
                    self.record_progress(cluster.has_waiting(), is_in_force);
                }
            }
            self.finish_turn(routes.is_live(), &cluster);
        }
        self.stop_standby();
        Ok(())
    }

    /// Ends a turn of the loop: any of its branches may have queued commands or changed what the maps should hold.
    fn finish_turn(&mut self, is_controller_connected: bool, cluster: &ClusterInbox) {
        self.pods.set_controller_connected(is_controller_connected);
        self.handles.finder.flush();
        self.apply_standby_watches();
        if self.routes.is_dirty() {
            self.apply_routes();
            let has_failed = self.routes.has_unwritten_changes();
            self.record_progress(cluster.has_waiting(), !has_failed);
        }
        self.arm_standby_connects();
        if let Some(services) = self.routes.take_bootstrap_services() {
            self.handles.bootstrap.publish(services);
        }
        // Last, because the reports are held until the pods of a table are in force.
        self.release_reports();
    }

    /// Handles the timers of all parts but the sweep.
    fn handle_timers(&mut self) {
        self.handle_event(PodTrackerEvent::Tick);
        self.tick_standby();
        self.tick_standby_watches();
        self.handles.usage.rearm_growth_events(&self.handles.maps);
        self.probe_remote_pods();
    }

    /// Handles kernel events. Returns true if the ring was emptied.
    fn handle_kernel_events(&mut self, ring: &mut KernelEventRing) -> bool {
        let is_empty = self.handle_map_events(ring);
        self.handles.idle.record(&ring.take_idle());
        is_empty
    }

    /// Handles events by which maps should be read again. Returns true if the ring was emptied.
    fn handle_map_events(&mut self, ring: &mut KernelEventRing) -> bool {
        for _ in 0..EVENTS_PER_WAKE {
            let Some(event) = ring.next() else { return true };
            self.handles.metrics.count_event(event.kind);
            match event.kind {
                abi::EVENT_LISTEN | abi::EVENT_LISTENER_CLOSED => {
                    self.handle_listener_event(event.netns_cookie)
                }
                abi::EVENT_GROWTH => {
                    // The thaw first: its request waits, and the report only counts it.
                    self.handle_standby_packet(event.port_or_slot, event.at_ns);
                    self.handles.usage.handle_growth(event.port_or_slot, &self.handles.maps);
                }
                abi::EVENT_STANDBY_CONNECT => self.handle_standby_connect(event.port_or_slot),
                _ => {}
            }
        }
        false
    }

    /// Handles an opened or closed listener: reads the map for the present state.
    fn handle_listener_event(&mut self, cookie: u64) {
        match self.registry.uid_by_cookie(cookie).map(str::to_owned) {
            Some(uid) => self.read_pod(&uid),
            // Most likely a pod that is not found yet. The maps are read once it is.
            None if self.registry.len() < self.pods.counts().in_table => {
                self.handles.finder.push(FinderCommand::RetryMissing);
            }
            None => {}
        }
    }

    /// Handles an event of the finder.
    fn handle_finder_event(&mut self, event: PodTrackerEvent) {
        let prestop_uid = match &event {
            PodTrackerEvent::PreStopRequested(uid) => Some(uid.clone()),
            PodTrackerEvent::CgroupChanged(uid) => return self.handle_cgroup_change(uid),
            _ => None,
        };
        self.handle_event(event);
        if let Some(uid) = prestop_uid {
            // A preStop request: no new connection goes to the pod, and the next sweep watches its last requests.
            self.update_exclusion(&uid);
            self.next_sweep = Instant::now();
        }
    }

    /// Excludes a pod from routing while it may not get new connects yet, or any more.
    fn update_exclusion(&mut self, uid: &str) {
        let is_excluded = self.remote_pods.is_unreached(uid)
            || self.pods.is_stopping(uid)
            || self.passes_over(uid);
        self.routes.set_excluded(uid, is_excluded);
    }

    /// Handles one event and performs all actions that follow from it.
    fn handle_event(&mut self, event: PodTrackerEvent) {
        let standby_uid = match &event {
            PodTrackerEvent::RouteUpdated(pod) => Some(pod.uid.clone()),
            PodTrackerEvent::RouteRemoved(uid) | PodTrackerEvent::PreStopRequested(uid) => {
                Some(uid.clone())
            }
            _ => None,
        };
        let mut queue = VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            for action in self.pods.step(Instant::now(), event) {
                self.perform_action(action, &mut queue);
            }
        }
        // Only now, because the order of the pod is read from the tracker, whose state the actions may have changed.
        if let Some(uid) = standby_uid {
            self.update_standby(&uid);
        }
    }

    /// Releases pod reports once they can be relied on.
    fn release_reports(&mut self) {
        let Some(since) = self.routes.first_table_at() else { return };
        if self.handles.reports_ready.is_set() {
            return;
        }
        let waited = since.elapsed();
        let settled = self.pods.has_caught_up();
        // A pod that never gets ready must not hold up the reports of the others.
        if settled || waited >= REPORT_HOLD_MAX {
            info!(settled, ?waited, "reporting pods");
            self.handles.reports_ready.set();
        }
    }
}
