//! Shell: the part of the loop that freezes and thaws pods with a standby order.
//!
//! A thaw is a write to a file of the pod's cgroup, in the loop itself: a request waits for it. So is the write by
//! which a freeze begins, so that no thaw can be overtaken by it. All that may take time runs in tasks: the wait for
//! the end of a freeze, the facts about a pod, and the reclaim of its memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    link::{PodReportKey, error_chain},
    wire::{PodReportItem, StandbyOrder, StandbyReport},
};
use datapath::abi;
use tokio::{
    sync::mpsc::{self, Receiver, Sender},
    task::spawn_blocking,
    time::sleep,
};
use tracing::{debug, error, info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns,
    kernel::{
        features,
        freezer::{self, CgroupState},
        maps::KernelMaps,
    },
    metrics::AgentMetrics,
    pods::{
        registry::RegisteredPod,
        standby::{StandbyAction, StandbyEvent, StandbyMachine, StandbyUsage, ThawCause},
        standby_facts::{StandbyFacts, read_standby_facts},
    },
};

/// Capacity of the channel of results of the tasks.
const TASK_RESULTS_MAX: usize = 1_024;
/// Delay of a reading of a pod that runs. After a thaw, its request has the processors first.
const RUNNING_READ_DELAY: Duration = Duration::from_millis(10);

/// Pods of this node that have a standby order, or had one until a moment ago.
#[derive(Debug)]
pub(super) struct StandbyPods {
    pods: BTreeMap<String, StandbyPod>,
    /// Uids of the pods whose connections send events, by row.
    uids_by_slot: HashMap<u32, String>,
    /// Number of the newest task of any pod. Results of tasks that are not the newest of their kind are void.
    last_task: u64,
    /// Cgroups that could not be thawed. The thaw is tried again at each sweep.
    thaw_retries: Vec<PathBuf>,
    /// The kernel's count of events that did not fit in the ring, as of the last sweep.
    dropped_events: u64,
    /// True if connections send events also to listeners that are older than the eBPF programs.
    sees_old_listeners: bool,
    results_tx: Sender<StandbyTaskResult>,
    /// Results of the tasks that the loop has started.
    pub(super) results_rx: Receiver<StandbyTaskResult>,
}

/// Standby of one pod.
#[derive(Debug, Default)]
struct StandbyPod {
    machine: StandbyMachine,
    /// Order that the machine has.
    order: Option<StandbyOrder>,
    /// True if the machine knows that the pod ends.
    is_ending: bool,
    /// Directory of the pod's cgroup; `None`: not known yet.
    cgroup: Option<PathBuf>,
    /// Task that reads the facts, if one is under way and its result counts.
    reading: Option<u64>,
    /// Freeze of the pod; `None`: its cgroup is thawed.
    freeze: Option<PodFreeze>,
    /// Report as it was last logged, without the memory.
    last_report: Option<StandbyReport>,
}

impl StandbyPod {
    /// Returns true if a complete reading has followed the freeze. Without a change of its processes and without an
    /// event, the pod has neither sessions nor other connections from then on. A reading that is under way, or has
    /// failed, might have shown some that came before the freeze.
    fn is_checked(&self) -> bool {
        let is_reported = self.machine.report(None).is_some_and(|report| report.is_frozen);
        self.freeze.is_some() && self.reading.is_none() && is_reported
    }
}

/// Freeze of a pod that has begun, or ended well.
#[derive(Debug)]
struct PodFreeze {
    /// Task that waits for its end.
    task: u64,
    /// Number of threads that froze; `None`: the freeze is under way.
    threads: Option<u64>,
    /// Set when the pod is thawed, so that no more of its memory is reclaimed.
    is_over: Arc<AtomicBool>,
}

/// Result of a task that the loop has started for a pod.
#[derive(Debug)]
pub(super) struct StandbyTaskResult {
    uid: String,
    /// Number of the task.
    task: u64,
    content: StandbyTaskContent,
}

#[derive(Debug)]
enum StandbyTaskContent {
    /// The facts about the pod were read, or are not known for this reason.
    Facts(Result<StandbyFacts, String>),
    /// The freeze with this number has ended, with the number of frozen threads or the reason for its failure.
    FreezeEnded(u64, Result<u64, String>),
    /// The memory of the frozen pod was reclaimed.
    Reclaimed,
}

impl StandbyPods {
    /// Starts without pods.
    pub(super) fn new(maps: &KernelMaps, metrics: &AgentMetrics) -> Self {
        // Exported from the first moment, as all counters are.
        let causes = [ThawCause::Request, ThawCause::Probe, ThawCause::Kubelet, ThawCause::Other];
        causes.into_iter().for_each(|cause| metrics.add_thaws(cause.name(), 0));
        let (results_tx, results_rx) = mpsc::channel(TASK_RESULTS_MAX);
        Self {
            pods: BTreeMap::new(),
            uids_by_slot: HashMap::new(),
            last_task: 0,
            thaw_retries: Vec::new(),
            dropped_events: maps.control_word(abi::CONTROL_DROPPED),
            sees_old_listeners: features::accepts_sock_ops_netns_cookie(),
            results_tx,
            results_rx,
        }
    }

    /// Returns the time of the next [`Agent::tick_standby`].
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.pods.values().filter_map(|pod| pod.machine.next_wake()).min()
    }

    /// Returns true if the pod is frozen or freezes.
    pub(super) fn is_frozen(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.freeze.is_some())
    }

    /// Returns the number of frozen pods.
    pub(super) fn frozen_count(&self) -> usize {
        self.pods.values().filter(|pod| pod.freeze.is_some()).count()
    }

    /// Returns the report about a pod; `None` without an order.
    pub(super) fn report(&self, uid: &str) -> Option<StandbyReport> {
        let pod = self.pods.get(uid)?;
        let report = pod.machine.report(None)?;
        let memory_bytes = pod.cgroup.as_deref().and_then(freezer::memory_bytes);
        Some(StandbyReport { memory_bytes, ..report })
    }

    /// Returns the reports about all pods with an order, each with the pod's uid.
    pub(super) fn reports(&self) -> impl Iterator<Item = (&str, StandbyReport)> {
        self.pods.keys().filter_map(|uid| Some((uid.as_str(), self.report(uid)?)))
    }

    /// Returns the uids of the pods for which `filter` is true.
    fn uids_where(&self, filter: impl Fn(&StandbyPod) -> bool) -> Vec<String> {
        let pods = self.pods.iter().filter(|(_, pod)| filter(pod));
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// Thaws a cgroup, and remembers it if that fails.
    fn thaw_cgroup(&mut self, cgroup: PathBuf) {
        if let Err(error) = freezer::thaw(&cgroup) {
            let error = error_chain(&error);
            error!(cgroup = %cgroup.display(), error, "cannot thaw pod");
            self.thaw_retries.push(cgroup);
        }
    }

    /// Tries again to thaw the cgroups that could not be thawed.
    fn retry_thaws(&mut self) {
        for cgroup in std::mem::take(&mut self.thaw_retries) {
            self.thaw_cgroup(cgroup);
        }
    }

    /// Returns the number of a new task.
    fn number_task(&mut self) -> u64 {
        self.last_task += 1;
        self.last_task
    }
}

impl Agent {
    /// Passes a pod's order to its standby, and the fact that it ends. A pod that is gone is thawed and forgotten.
    pub(super) fn update_standby(&mut self, uid: &str) {
        let tracked = self.pods.get(uid).map(|pod| pod.standby);
        let is_known = self.standby.pods.contains_key(uid);
        let Some(order) = tracked else {
            if is_known {
                self.handle_standby(uid, StandbyEvent::StopRequested);
                self.standby.uids_by_slot.retain(|_, it| it != uid);
                self.standby.pods.remove(uid);
            }
            return;
        };
        if !is_known && order.is_none() {
            return;
        }
        let is_ending = self.pods.is_ending(uid);
        let pod = self.standby.pods.entry(uid.to_owned()).or_default();
        let has_order_changed = std::mem::replace(&mut pod.order, order) != order;
        let was_ending = std::mem::replace(&mut pod.is_ending, is_ending);
        // The stop first: no freeze may begin for a pod that ends.
        match (was_ending, is_ending) {
            (false, true) => self.handle_standby(uid, StandbyEvent::StopRequested),
            (true, false) => self.handle_standby(uid, StandbyEvent::StopWithdrawn),
            (false, false) | (true, true) => {}
        }
        if has_order_changed {
            self.handle_standby(uid, StandbyEvent::Ordered(order));
        }
    }

    /// Thaws the pod with this row, if its connections send events and one of these has come. `at_ns` is the time of
    /// the event.
    pub(super) fn handle_standby_packet(&mut self, slot: u32, at_ns: u64) {
        let Some(uid) = self.standby.uids_by_slot.get(&slot).cloned() else { return };
        let was_frozen = self.standby.is_frozen(&uid);
        self.handle_standby(&uid, StandbyEvent::PacketSeen);
        if was_frozen && !self.standby.is_frozen(&uid) {
            let waited = Duration::from_nanos(monotonic_ns().saturating_sub(at_ns));
            self.handles.metrics.thaw_time.observe(waited.as_secs_f64());
        }
    }

    /// Thaws a pod whose entry in the kernel's maps is written again or deleted, as its connections send no events then.
    pub(super) fn handle_standby_registration(&mut self, uid: &str) {
        self.handle_standby(uid, StandbyEvent::ProcessesChanged);
        self.standby.uids_by_slot.retain(|_, it| it != uid);
    }

    /// Handles the result of a task. One that is no longer the newest of its pod has no effect.
    pub(super) fn handle_standby_result(&mut self, result: StandbyTaskResult) {
        let StandbyTaskResult { uid, task, content } = result;
        let Some(pod) = self.standby.pods.get_mut(&uid) else { return };
        match content {
            StandbyTaskContent::Facts(facts) if pod.reading == Some(task) => {
                pod.reading = None;
                self.handle_standby_facts(&uid, facts);
            }
            StandbyTaskContent::FreezeEnded(number, result) => {
                let freeze = pod.freeze.as_mut().filter(|freeze| freeze.task == task);
                let Some(freeze) = freeze else { return };
                freeze.threads = result.as_ref().ok().copied();
                let result = result.map(drop);
                self.handle_standby(&uid, StandbyEvent::FreezeEnded(number, result));
            }
            StandbyTaskContent::Reclaimed => self.report_standby(&uid),
            StandbyTaskContent::Facts(_) => {}
        }
    }

    /// Handles what a task has read of a pod. If it is not known, the machine requests it again, or thaws the pod.
    fn handle_standby_facts(&mut self, uid: &str, facts: Result<StandbyFacts, String>) {
        match facts {
            Ok(StandbyFacts { cgroup, has_sessions, other_connections }) => {
                if let Some(pod) = self.standby.pods.get_mut(uid) {
                    pod.cgroup = Some(cgroup);
                }
                let usage = self.standby_usage(uid);
                let usage = StandbyUsage { has_sessions, other_connections, ..usage };
                self.handle_standby(uid, StandbyEvent::UsageRead(usage));
            }
            Err(reason) => debug!(uid, reason, "cannot read a pod with a standby order"),
        }
    }

    /// Returns the usage of a pod as the maps have it now, without sessions and without connections that do not count.
    fn standby_usage(&self, uid: &str) -> StandbyUsage {
        let Some(local) = self.registry.get(uid) else { return StandbyUsage::default() };
        let state = self.handles.maps.pod_state(local.entry.slot);
        StandbyUsage {
            is_ready: self.pods.is_serving(uid),
            in_flight: state.in_flight,
            unused_connections: state.awaiting_first_request,
            idle: Duration::from_nanos(monotonic_ns().saturating_sub(state.last_activity_ns)),
            has_sessions: false,
            other_connections: 0,
        }
    }

    /// Passes the time on to the pods for which it is due.
    pub(super) fn tick_standby(&mut self) {
        let now = Instant::now();
        let is_due = |pod: &StandbyPod| pod.machine.next_wake().is_some_and(|at| at <= now);
        for uid in self.standby.uids_where(is_due) {
            self.handle_standby(&uid, StandbyEvent::Tick);
        }
    }

    /// Looks at all frozen pods, once a second: events may be lost, and a process that enters a frozen pod sends none.
    pub(super) fn sweep_standby(&mut self) {
        self.standby.retry_thaws();
        let dropped = self.handles.maps.control_word(abi::CONTROL_DROPPED);
        // Any of the lost events may be that of a probe, which no counter shows.
        if std::mem::replace(&mut self.standby.dropped_events, dropped) != dropped {
            let armed: Vec<String> = self.standby.uids_by_slot.values().cloned().collect();
            armed.iter().for_each(|uid| self.handle_standby(uid, StandbyEvent::PacketSeen));
        }
        for uid in self.standby.uids_where(|pod| pod.freeze.is_some()) {
            self.handle_cgroup_change(&uid);
            if self.standby.pods.get(&uid).is_some_and(StandbyPod::is_checked) {
                let usage = self.standby_usage(&uid);
                self.handle_standby(&uid, StandbyEvent::UsageRead(usage));
            }
        }
    }

    /// Handles a change that the cgroup of a pod may have had. Thaws a frozen pod whose cgroup is as the agent has not
    /// left it.
    pub(super) fn handle_cgroup_change(&mut self, uid: &str) {
        let frozen = self.standby.pods.get(uid).and_then(|pod| {
            pod.freeze.as_ref()?.threads?;
            pod.cgroup.clone()
        });
        let Some(cgroup) = frozen else { return };
        match freezer::read_state(&cgroup) {
            Ok(Some(CgroupState { is_frozen: true, .. })) => self.check_frozen_processes(uid),
            Ok(Some(CgroupState { is_frozen: false, .. })) => {
                info!(uid, "frozen pod was thawed by another program, or a process entered it");
                self.handle_standby(uid, StandbyEvent::ProcessesChanged);
            }
            // Its directory is removed with it, which the finder reports.
            Ok(None) => {}
            Err(error) => {
                debug!(uid, %error, "cannot read the cgroup of a frozen pod");
                self.handle_standby(uid, StandbyEvent::ProcessesChanged);
            }
        }
    }

    /// Thaws a frozen pod whose processes have changed: those of `kubectl exec` enter its cgroup and freeze there.
    fn check_frozen_processes(&mut self, uid: &str) {
        let Some(pod) = self.standby.pods.get(uid) else { return };
        let frozen = pod.freeze.as_ref().and_then(|freeze| freeze.threads);
        let (Some(frozen), Some(cgroup)) = (frozen, &pod.cgroup) else { return };
        // A number that cannot be read may have changed.
        if freezer::thread_count(cgroup).ok() != Some(frozen) {
            debug!(uid, frozen, "the processes of a frozen pod have changed");
            self.handle_standby(uid, StandbyEvent::ProcessesChanged);
        }
    }

    /// Thaws all pods for good: the agent stops.
    pub(super) fn stop_standby(&mut self) {
        for uid in self.standby.uids_where(|_| true) {
            let Some(pod) = self.standby.pods.get_mut(&uid) else { continue };
            let actions = pod.machine.shut_down();
            let mut queue = VecDeque::new();
            actions.into_iter().for_each(|it| self.perform_standby_action(&uid, it, &mut queue));
            self.record_thaw_cause(&uid);
        }
        self.standby.retry_thaws();
    }

    /// Handles one event of a pod with a standby order, and performs all actions that follow from it.
    fn handle_standby(&mut self, uid: &str, event: StandbyEvent) {
        let mut queue = VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            let Some(pod) = self.standby.pods.get_mut(uid) else { return };
            for action in pod.machine.step(Instant::now(), event) {
                self.perform_standby_action(uid, action, &mut queue);
            }
            self.record_thaw_cause(uid);
        }
    }

    /// Counts and logs a thaw once its cause is known.
    fn record_thaw_cause(&mut self, uid: &str) {
        let Some(pod) = self.standby.pods.get_mut(uid) else { return };
        if let Some(cause) = pod.machine.take_thaw_cause() {
            self.handles.metrics.add_thaws(cause.name(), 1);
            info!(uid, cause = cause.name(), "pod thawed");
        }
    }

    fn perform_standby_action(
        &mut self,
        uid: &str,
        action: StandbyAction,
        queue: &mut VecDeque<StandbyEvent>,
    ) {
        match action {
            StandbyAction::Arm => {
                if !self.arm_standby(uid) {
                    // Without events a frozen pod would miss its requests.
                    queue.push_back(StandbyEvent::ProcessesChanged);
                }
            }
            StandbyAction::Disarm => self.disarm_standby(uid),
            StandbyAction::ReadUsage => self.start_standby_reading(uid),
            StandbyAction::Freeze(number) => {
                if let Err(reason) = self.begin_freeze(uid, number) {
                    queue.push_back(StandbyEvent::FreezeEnded(number, Err(reason)));
                }
            }
            StandbyAction::Thaw(_) => self.thaw_pod(uid),
            StandbyAction::Report => self.report_standby(uid),
        }
    }

    /// Lets the pod's connections and its next request send events. Returns false if the maps do not hold the pod.
    fn arm_standby(&mut self, uid: &str) -> bool {
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.get(uid) else {
            return false;
        };
        let maps = &mut self.handles.maps;
        if let Err(error) = maps.set_connection_events(cookie, entry, true) {
            warn!(uid, error = %error_chain(&error), "cannot arm the events of a pod's connections");
            return false;
        }
        self.handles.usage.arm_next_request(entry.slot, &self.handles.maps);
        self.standby.uids_by_slot.insert(entry.slot, uid.to_owned());
        // A reading that has begun before proves nothing any more.
        if let Some(pod) = self.standby.pods.get_mut(uid) {
            pod.reading = None;
        }
        true
    }

    /// Ends the events of the pod's connections. One that cannot be ended costs an event for each connection.
    fn disarm_standby(&mut self, uid: &str) {
        self.standby.uids_by_slot.retain(|_, it| it != uid);
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.get(uid) else { return };
        if let Err(error) = self.handles.maps.set_connection_events(cookie, entry, false) {
            warn!(uid, error = %error_chain(&error), "cannot end the events of a pod's connections");
        }
    }

    /// Reads the facts about a pod in a task, unless a task that counts is under way.
    fn start_standby_reading(&mut self, uid: &str) {
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.get(uid) else { return };
        if self.standby.pods.get(uid).is_none_or(|pod| pod.reading.is_some()) {
            return;
        }
        let task = self.standby.number_task();
        let Some(pod) = self.standby.pods.get_mut(uid) else { return };
        pod.reading = Some(task);
        let delay = if pod.freeze.is_some() { Duration::ZERO } else { RUNNING_READ_DELAY };
        let (finder, conns) = (self.handles.finder.channel(), self.handles.maps.conns());
        let has_desynced = self.handles.maps.pod_state(entry.slot).desynced_connections > 0;
        let (uid, results) = (uid.to_owned(), self.standby.results_tx.clone());
        tokio::spawn(async move {
            sleep(delay).await;
            let facts = read_standby_facts(&finder, &uid, cookie, conns, has_desynced).await;
            let content = StandbyTaskContent::Facts(facts);
            // A failed send means that the loop has ended, and the agent with it.
            let _ = results.send(StandbyTaskResult { uid, task, content }).await;
        });
    }

    /// Begins to freeze a pod. Its end arrives as a result of a task. Returns the reason for which it cannot begin.
    fn begin_freeze(&mut self, uid: &str, number: u64) -> Result<(), String> {
        let unseen_ports = self.pods.unseen_ports(uid);
        check_listeners(self.standby.sees_old_listeners, &unseen_ports)?;
        let task = self.standby.number_task();
        let pod = self.standby.pods.get_mut(uid);
        let Some((pod, cgroup)) = pod.and_then(|pod| pod.cgroup.clone().map(|it| (pod, it))) else {
            return Err("its cgroup is not found".to_owned());
        };
        // Readings from before the freeze prove nothing after it.
        pod.reading = None;
        freezer::freeze(&cgroup).map_err(|error| {
            format!("its cgroup {} cannot be frozen: {error}", cgroup.display())
        })?;
        pod.freeze = Some(PodFreeze { task, threads: None, is_over: Arc::default() });
        self.standby.thaw_retries.retain(|it| *it != cgroup);
        let (uid, results) = (uid.to_owned(), self.standby.results_tx.clone());
        tokio::spawn(async move {
            let frozen = freezer::wait_until_frozen(&cgroup).await;
            let result = frozen.and_then(|()| {
                let count = freezer::thread_count(&cgroup);
                count.map_err(|error| format!("its processes cannot be counted: {error}"))
            });
            let content = StandbyTaskContent::FreezeEnded(number, result);
            let _ = results.send(StandbyTaskResult { uid, task, content }).await;
        });
        Ok(())
    }

    /// Thaws a pod, whether its freeze has ended or not.
    fn thaw_pod(&mut self, uid: &str) {
        let Some(pod) = self.standby.pods.get_mut(uid) else { return };
        let Some(freeze) = pod.freeze.take() else { return };
        freeze.is_over.store(true, Ordering::Release);
        // Readings of the frozen pod prove nothing of the running one.
        pod.reading = None;
        if let Some(cgroup) = pod.cgroup.clone() {
            self.standby.thaw_cgroup(cgroup);
        }
    }

    /// Reports the standby of a pod, with all else as it was last reported.
    fn report_standby(&mut self, uid: &str) {
        self.follow_standby_report(uid);
        let key = PodReportKey::Pod(uid.to_owned());
        // A pod without a report yet gets one that has its standby.
        if let Some(PodReportItem::Observed(mut observation)) = self.handles.reports.get(&key) {
            observation.standby = self.standby.report(uid);
            self.handles.reports.set(key, PodReportItem::Observed(observation));
        }
    }

    /// Logs a freeze or a failure that is reported for the first time. Reclaims the memory of a pod that has frozen, if
    /// its order says so.
    fn follow_standby_report(&mut self, uid: &str) {
        let Some(pod) = self.standby.pods.get_mut(uid) else { return };
        let report = pod.machine.report(None);
        let before = std::mem::replace(&mut pod.last_report, report.clone()).unwrap_or_default();
        let Some(report) = report else { return };
        if !report.failure.is_empty() && report.failure != before.failure {
            warn!(uid, reason = report.failure, "pod cannot be frozen");
        }
        if report.is_frozen && !before.is_frozen {
            info!(uid, cgroup = ?pod.cgroup, "pod frozen");
            if pod.order.is_some_and(|order| order.reclaims_memory) {
                self.reclaim_memory(uid);
            }
        }
    }

    /// Reclaims the memory of a frozen pod in a task, until the pod is thawed.
    fn reclaim_memory(&self, uid: &str) {
        let Some(StandbyPod { cgroup: Some(cgroup), freeze: Some(freeze), .. }) =
            self.standby.pods.get(uid)
        else {
            return;
        };
        let (cgroup, is_over, task) = (cgroup.clone(), Arc::clone(&freeze.is_over), freeze.task);
        let (uid, results) = (uid.to_owned(), self.standby.results_tx.clone());
        tokio::spawn(async move {
            let reclaim = spawn_blocking(move || freezer::reclaim_memory(&cgroup, &is_over));
            match reclaim.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    warn!(uid, %error, "the memory of a frozen pod stays: the node cannot reclaim it");
                }
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
            let content = StandbyTaskContent::Reclaimed;
            let _ = results.send(StandbyTaskResult { uid, task, content }).await;
        });
    }
}

/// Checks that connections to all of a pod's listeners send events: nothing would thaw the pod for others. Returns the
/// reason for which it must not freeze.
fn check_listeners(sees_old_listeners: bool, unseen_ports: &BTreeSet<u16>) -> Result<(), String> {
    match unseen_ports.first() {
        Some(port) if !sees_old_listeners => Err(format!(
            "its listener on port {port} is older than the eBPF programs, whose kernel (before Linux 5.15) reports no \
             connections to it"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: StandbyOrder = StandbyOrder {
        quiet_time: Duration::from_secs(1),
        probe_time: Duration::from_secs(1),
        reclaims_memory: false,
    };

    #[test]
    fn a_sweep_takes_nothing_for_unused_that_no_reading_has_shown_since_the_freeze() {
        let quiet = StandbyUsage { is_ready: true, idle: ORDER.quiet_time, ..Default::default() };
        let (mut pod, now) = (StandbyPod::default(), Instant::now());
        let before_the_freeze = [
            StandbyEvent::Ordered(Some(ORDER)),
            StandbyEvent::UsageRead(quiet),
            StandbyEvent::UsageRead(quiet),
        ];
        before_the_freeze.into_iter().for_each(|event| drop(pod.machine.step(now, event)));
        pod.freeze = Some(PodFreeze { task: 1, threads: None, is_over: Arc::default() });
        assert!(pod.machine.is_frozen() && !pod.is_checked(), "the freeze is under way");
        pod.machine.step(now, StandbyEvent::FreezeEnded(1, Ok(())));
        assert!(!pod.is_checked(), "no reading has come, as one that fails sends none");
        pod.machine.step(now, StandbyEvent::UsageRead(quiet));
        assert!(pod.is_checked());
        pod.reading = Some(2);
        assert!(!pod.is_checked(), "another one is under way");
    }

    #[test]
    fn a_pod_that_no_connection_would_thaw_is_not_frozen() {
        let (none, one) = (BTreeSet::new(), BTreeSet::from([8080]));
        let reason = check_listeners(false, &one).expect_err("nothing reports its connections");
        assert!(reason.contains("port 8080"), "{reason}");
        assert_eq!(check_listeners(false, &none), Ok(()));
        assert_eq!(check_listeners(true, &one), Ok(()));
    }
}
