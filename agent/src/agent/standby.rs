//! Shell: the part of the loop that freezes and thaws pods with a standby order.
//!
//! The loop itself writes both the begin of a freeze and the thaw to the pod's cgroup. A request waits for the thaw,
//! and a freeze that a task wrote could overtake it. Steps that take time run in tasks. These are the wait for the end
//! of a freeze, the reading of the facts about a pod, and the reclaim of its memory.

mod standby_pods;
mod tasks;
mod thaw_promise;

use std::{
    collections::VecDeque,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use common::{
    link::{PodReportKey, error_chain},
    wire::PodReportItem,
};
use datapath::abi;
use tracing::{debug, info, warn};

pub(super) use self::standby_pods::StandbyPods;
use self::{
    standby_pods::StandbyPod,
    tasks::{StandbyTaskContent, StandbyTaskResult},
};
use super::Agent;
use crate::{
    clock::monotonic_ns,
    kernel::freezer::{self, CgroupState},
    pods::{
        pod_server::running::ThawQuery,
        registry::RegisteredPod,
        standby::{StandbyAction, StandbyEvent, StandbyUsage},
        standby_facts::StandbyFacts,
    },
};

impl Agent {
    /// Passes the order of a pod to its state machine, and the fact that the pod ends. A pod that is gone is thawed and
    /// forgotten.
    pub(super) fn update_standby(&mut self, uid: &str) {
        let tracked = self.pods.get(uid).map(|pod| pod.standby);
        let is_known = self.standby.pods.contains_key(uid);
        let Some(order) = tracked else {
            if is_known {
                self.handle_standby_event(uid, StandbyEvent::StopRequested);
                self.standby.remove_armed(uid);
                self.standby.pods.remove(uid);
            }
            return;
        };
        // Most pods never have an order, and need no state machine.
        if !is_known && order.is_none() {
            return;
        }
        let is_ending = self.pods.is_ending(uid);
        let pod = self.standby.pods.entry(uid.to_owned()).or_default();
        let has_order_changed = std::mem::replace(&mut pod.order, order) != order;
        let was_ending = std::mem::replace(&mut pod.is_ending, is_ending);
        // Before the order: a freeze must not begin for a pod that ends.
        match (was_ending, is_ending) {
            (false, true) => self.handle_standby_event(uid, StandbyEvent::StopRequested),
            (true, false) => self.handle_standby_event(uid, StandbyEvent::StopWithdrawn),
            (false, false) | (true, true) => {}
        }
        if has_order_changed {
            self.handle_standby_event(uid, StandbyEvent::Ordered(order));
            self.standby.update_promise_timeout();
        }
    }

    /// Handles a growth event of the pod with this slot: thaws the pod if its events are armed. `at_ns` is the time of
    /// the event.
    pub(super) fn handle_standby_packet(&mut self, slot: u32, at_ns: u64) {
        // Pods whose events are not armed send growth events, too.
        let Some(uid) = self.standby.uids_by_slot.get(&slot).cloned() else { return };
        let was_frozen = self.standby.is_frozen(&uid);
        self.handle_standby_event(&uid, StandbyEvent::PacketSeen);
        if was_frozen && !self.standby.is_frozen(&uid) {
            let waited = Duration::from_nanos(monotonic_ns().saturating_sub(at_ns));
            self.handles.metrics.thaw_time.observe(waited.as_secs_f64());
        }
    }

    /// Thaws a pod whose entry in the kernel's maps is about to be written again or deleted: from then on its
    /// connections send no events.
    pub(super) fn handle_standby_registration(&mut self, uid: &str) {
        self.handle_standby_event(uid, StandbyEvent::ProcessesChanged);
        self.standby.remove_armed(uid);
    }

    /// Handles the result of a task. One that is no longer the newest of its kind has no effect.
    pub(super) fn handle_standby_result(&mut self, result: StandbyTaskResult) {
        let StandbyTaskResult { uid, task, content } = result;
        let Some(pod) = self.standby.pods.get_mut(&uid) else { return };
        match content {
            // The pod was armed, frozen or thawed since the task began, so these facts may be outdated.
            StandbyTaskContent::Facts(_) if pod.reading != Some(task) => {}
            StandbyTaskContent::Facts(facts) => {
                pod.reading = None;
                self.handle_standby_facts(&uid, facts);
            }
            StandbyTaskContent::FreezeEnded(number, result) => {
                // The pod may have been thawed since, and frozen again.
                let freeze = pod.freeze.as_mut().filter(|freeze| freeze.task == task);
                let Some(freeze) = freeze else { return };
                freeze.threads = result.as_ref().ok().copied();
                let result = result.map(drop);
                self.handle_standby_event(&uid, StandbyEvent::FreezeEnded(number, result));
            }
            StandbyTaskContent::Reclaimed => self.report_standby(&uid),
        }
    }

    /// Handles the facts that a task has read about a pod. If they are not known, nothing is passed in: the state
    /// machine then requests them again, or thaws the pod.
    fn handle_standby_facts(&mut self, uid: &str, facts: Result<StandbyFacts, String>) {
        match facts {
            Ok(StandbyFacts { cgroup, has_sessions, other_connections }) => {
                if let Some(pod) = self.standby.pods.get_mut(uid) {
                    pod.cgroup = Some(cgroup);
                }
                // After the connections were listed: what has come since is in these counts.
                let usage = self.standby_usage(uid);
                let usage = StandbyUsage { has_sessions, other_connections, ..usage };
                self.handle_standby_event(uid, StandbyEvent::UsageRead(usage));
            }
            Err(reason) => debug!(uid, reason, "cannot read a pod with a standby order"),
        }
    }

    /// Returns the usage of a pod as the maps have it now, with no sessions and no other connections. A pod that the
    /// maps do not hold is not ready.
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

    /// Sends a tick to the pods whose wake time has come.
    pub(super) fn tick_standby(&mut self) {
        let now = Instant::now();
        let is_due = |pod: &StandbyPod| pod.machine.next_wake().is_some_and(|at| at <= now);
        for uid in self.standby.uids_where(is_due) {
            self.handle_standby_event(&uid, StandbyEvent::Tick);
        }
    }

    /// Checks all frozen pods, once a second: events may be lost, and a process that enters a frozen pod sends none.
    pub(super) fn sweep_standby(&mut self) {
        self.standby.retry_thaws();
        self.update_promise_activators();
        let dropped = self.handles.maps.control_word(abi::CONTROL_DROPPED);
        // Any of the lost events may be that of a probe, which no counter shows.
        if std::mem::replace(&mut self.standby.dropped_events, dropped) != dropped {
            self.check_armed_connects();
            let armed: Vec<String> = self.standby.uids_by_slot.values().cloned().collect();
            armed.iter().for_each(|uid| self.handle_standby_event(uid, StandbyEvent::PacketSeen));
        }
        for uid in self.standby.uids_where(|pod| pod.freeze.is_some()) {
            self.handle_cgroup_change(&uid);
            // The counts alone prove quiet only for a pod without sessions and other connections.
            if self.standby.pods.get(&uid).is_some_and(StandbyPod::is_checked) {
                let usage = self.standby_usage(&uid);
                self.handle_standby_event(&uid, StandbyEvent::UsageRead(usage));
            }
        }
    }

    /// Checks the cgroup of a pod, which may have changed. Thaws a frozen pod that another program has thawed, or whose
    /// processes have changed.
    pub(super) fn handle_cgroup_change(&mut self, uid: &str) {
        // Until a freeze has ended, its task reads the cgroup.
        let frozen = self.standby.pods.get(uid).and_then(|pod| {
            pod.freeze.as_ref()?.threads?;
            pod.cgroup.clone()
        });
        let Some(cgroup) = frozen else { return };
        match freezer::read_state(&cgroup) {
            Ok(Some(CgroupState { is_frozen: true, .. })) => self.check_frozen_processes(uid),
            Ok(Some(CgroupState { is_frozen: false, .. })) => {
                info!(uid, "frozen pod was thawed by another program, or a process entered it");
                self.handle_standby_event(uid, StandbyEvent::ProcessesChanged);
            }
            // The pod is gone. The finder reports the removal of its directory.
            Ok(None) => {}
            // In doubt, a pod runs.
            Err(error) => {
                debug!(uid, %error, "cannot read the cgroup of a frozen pod");
                self.handle_standby_event(uid, StandbyEvent::ProcessesChanged);
            }
        }
    }

    /// Thaws a frozen pod whose processes have changed: a process of `kubectl exec` enters its cgroup and freezes
    /// there.
    fn check_frozen_processes(&mut self, uid: &str) {
        let Some(pod) = self.standby.pods.get(uid) else { return };
        let frozen = pod.freeze.as_ref().and_then(|freeze| freeze.threads);
        let (Some(frozen), Some(cgroup)) = (frozen, &pod.cgroup) else { return };
        // A number that cannot be read may have changed.
        if freezer::thread_count(cgroup).ok() != Some(frozen) {
            debug!(uid, frozen, "the processes of a frozen pod have changed");
            self.handle_standby_event(uid, StandbyEvent::ProcessesChanged);
        }
    }

    /// Answers a thaw query. Its sender waits for the pod, so a pod that is still frozen is thawed: the event of the
    /// connection may have been lost. The answer is false for a pod that cannot be thawed.
    pub(super) fn answer_thaw_query(&mut self, query: ThawQuery) {
        let ThawQuery { uid, reply } = query;
        if self.standby.is_frozen(&uid) {
            self.handle_standby_event(&uid, StandbyEvent::PacketSeen);
        }
        // A failed send means that the sender no longer waits.
        let _ = reply.send(!self.standby.may_be_frozen(&uid));
    }

    /// Thaws all pods for good: the agent stops.
    pub(super) fn stop_standby(&mut self) {
        for uid in self.standby.uids_where(|_| true) {
            let Some(pod) = self.standby.pods.get_mut(&uid) else { continue };
            let actions = pod.machine.shut_down();
            // The machine has ended, so events that follow are of no use.
            let mut queue = VecDeque::new();
            actions.into_iter().for_each(|it| self.perform_standby_action(&uid, it, &mut queue));
            self.record_thaw_cause(&uid);
        }
        self.standby.retry_thaws();
    }

    /// Handles one event of a pod with a standby order, and performs all actions that follow from it.
    fn handle_standby_event(&mut self, uid: &str, event: StandbyEvent) {
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

    /// Performs one action of a pod's state machine. An event that follows at once is added to `queue`.
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

    /// Arms the events of a pod's connections and of its next request. Returns false if that fails, or the maps do not
    /// hold the pod.
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
        self.standby.add_armed(entry.slot, uid);
        self.update_promise_activators();
        // A reading that began before this may have missed a connection that sent no event.
        if let Some(pod) = self.standby.pods.get_mut(uid) {
            pod.reading = None;
        }
        true
    }

    /// Checks if activators can take the connects of all armed pods. Only then has the promise to thaw these pods an end.
    /// Without an activator, a connect that passes a pod over would reach nothing. The pod may be thawed a moment later.
    fn update_promise_activators(&mut self) {
        let table = self.routes.table();
        let mut armed = self.standby.uids_by_slot.values();
        let has_activators = armed.all(|uid| table.has_activators_for_pod(uid));
        self.standby.set_has_activators(has_activators);
    }

    /// Ends the events of a pod's connections. If that fails, each connection still sends one, which has no effect.
    fn disarm_standby(&mut self, uid: &str) {
        self.standby.remove_armed(uid);
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.get(uid) else { return };
        if let Err(error) = self.handles.maps.set_connection_events(cookie, entry, false) {
            warn!(uid, error = %error_chain(&error), "cannot end the events of a pod's connections");
        }
    }

    /// Thaws a pod that is frozen, or whose freeze is under way.
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

    /// Reports the standby of a pod again, with the other fields as they were last reported.
    fn report_standby(&mut self, uid: &str) {
        self.handle_report_change(uid);
        let key = PodReportKey::Pod(uid.to_owned());
        // If the pod has no report yet, its first one will contain its standby.
        if let Some(PodReportItem::Observed(mut observation)) = self.handles.reports.get(&key) {
            observation.standby = self.standby.report(uid);
            self.handles.reports.set(key, PodReportItem::Observed(observation));
        }
    }

    /// Logs a freeze or a failure that is reported for the first time. Reclaims the memory of a pod that has frozen, if
    /// its order says so.
    fn handle_report_change(&mut self, uid: &str) {
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
}
