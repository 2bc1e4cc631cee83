//! Shell: standby of each pod of this node, with the freeze of its cgroup and the tasks that are under way.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use common::{
    link::error_chain,
    wire::{StandbyOrder, StandbyReport},
};
use datapath::abi;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tracing::error;

use super::{tasks::StandbyTaskResult, thaw_promise::PromiseFacts};
use crate::{
    kernel::{features, freezer, maps::KernelMaps},
    metrics::AgentMetrics,
    pods::standby::{StandbyMachine, ThawCause},
};

/// Capacity of the channel of results of the tasks.
const TASK_RESULTS_MAX: usize = 1_024;

/// Pods of this node that have a standby order, or had one since the agent found them.
#[derive(Debug)]
pub(in crate::agent) struct StandbyPods {
    /// Standby of each pod, by uid, until the pod is gone.
    pub(super) pods: BTreeMap<String, StandbyPod>,
    /// Uids of the pods whose connections send events, by pod slot.
    pub(super) uids_by_slot: HashMap<u32, String>,
    /// Number of the newest task of any pod. Results of tasks that are not the newest of their kind are void.
    last_task: u64,
    /// Cgroups that could not be thawed. The thaw is tried again at each sweep.
    pub(super) thaw_retries: Vec<PathBuf>,
    /// The kernel's count of events that did not fit in the ring, as of the last sweep.
    pub(super) dropped_events: u64,
    /// True if connections to listeners that are older than the eBPF programs send events too.
    pub(super) sees_old_listeners: bool,
    /// Facts on which the promise to thaw the armed pods depends.
    pub(super) promise_facts: PromiseFacts,
    /// True if activators can take all connects that may go directly to an armed pod.
    has_activators: bool,
    /// Sender that each task gets a clone of.
    pub(super) results_tx: Sender<StandbyTaskResult>,
    /// Results of the tasks that the loop has started.
    pub(in crate::agent) results_rx: Receiver<StandbyTaskResult>,
}

/// Standby of one pod.
#[derive(Debug, Default)]
pub(super) struct StandbyPod {
    pub(super) machine: StandbyMachine,
    /// Order that the machine has.
    pub(super) order: Option<StandbyOrder>,
    /// True if the machine knows that the pod ends.
    pub(super) is_ending: bool,
    /// Directory of the pod's cgroup; `None`: not known yet.
    pub(super) cgroup: Option<PathBuf>,
    /// Task that reads the facts; `None`: none is under way, or its result is void.
    pub(super) reading: Option<u64>,
    /// Freeze of the pod; `None`: its cgroup is thawed.
    pub(super) freeze: Option<PodFreeze>,
    /// Report as it was last logged, without the memory.
    pub(super) last_report: Option<StandbyReport>,
}

/// Freeze of a pod that is under way, or has succeeded.
#[derive(Debug)]
pub(super) struct PodFreeze {
    /// Task that waits for its end.
    pub(super) task: u64,
    /// Number of threads that froze; `None`: the freeze is under way.
    pub(super) threads: Option<u64>,
    /// Set when the pod is thawed, so that no more of its memory is reclaimed.
    pub(super) is_over: Arc<AtomicBool>,
}

impl StandbyPod {
    /// Returns true if a complete reading has followed the freeze.
    ///
    /// From then on the pod has neither sessions nor other connections, until its processes change or an event comes.
    /// Nothing is known of them while a reading is under way or after it has failed: they may be older than the freeze.
    pub(super) fn is_checked(&self) -> bool {
        let is_reported = self.machine.report(None).is_some_and(|report| report.is_frozen);
        self.freeze.is_some() && self.reading.is_none() && is_reported
    }

    /// Returns true if the pod is frozen, its freeze is under way, or its last thaw has failed. `thaw_retries` are the
    /// cgroups of such thaws.
    fn may_be_frozen(&self, thaw_retries: &[PathBuf]) -> bool {
        let has_failed = |cgroup: &PathBuf| thaw_retries.contains(cgroup);
        self.freeze.is_some() || self.cgroup.as_ref().is_some_and(has_failed)
    }
}

impl StandbyPods {
    /// Creates the state of a node without pods on standby.
    pub(in crate::agent) fn new(maps: &KernelMaps, metrics: &AgentMetrics) -> Self {
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
            promise_facts: PromiseFacts::new(),
            has_activators: false,
            results_tx,
            results_rx,
        }
    }

    /// Records that the loop has begun another turn.
    pub(in crate::agent) fn record_turn(&self) {
        self.promise_facts.record_turn();
    }

    /// Adds a pod whose connections send events.
    pub(super) fn add_armed(&mut self, slot: u32, uid: &str) {
        self.uids_by_slot.insert(slot, uid.to_owned());
        self.update_promise_timeout();
    }

    /// Removes a pod whose connections send no events any more.
    pub(super) fn remove_armed(&mut self, uid: &str) {
        self.uids_by_slot.retain(|_, it| it != uid);
        self.update_promise_timeout();
    }

    /// Sets if activators can take all connects that may go directly to an armed pod.
    pub(super) fn set_has_activators(&mut self, has_activators: bool) {
        self.has_activators = has_activators;
        self.update_promise_timeout();
    }

    /// Updates the timeout of the promise, after a change of the armed pods, of their orders or of the activators.
    pub(super) fn update_promise_timeout(&self) {
        let orders = self.uids_by_slot.values().filter_map(|uid| self.pods.get(uid)?.order);
        let timeout = orders.map(|order| order.agent_timeout).max();
        self.promise_facts.set_timeout(timeout.filter(|_| self.has_activators));
    }

    /// Returns the time of the next [`tick_standby`](crate::agent::Agent::tick_standby).
    pub(in crate::agent) fn next_wake(&self) -> Option<Instant> {
        self.pods.values().filter_map(|pod| pod.machine.next_wake()).min()
    }

    /// Returns true if the pod is frozen, or its freeze is under way.
    pub(in crate::agent) fn is_frozen(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.freeze.is_some())
    }

    /// Returns true if the pod is frozen, its freeze is under way, or its last thaw has failed.
    pub(super) fn may_be_frozen(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.may_be_frozen(&self.thaw_retries))
    }

    /// Returns the number of pods that are frozen, or whose freeze is under way.
    pub(in crate::agent) fn frozen_count(&self) -> usize {
        self.pods.values().filter(|pod| pod.freeze.is_some()).count()
    }

    /// Returns the report about a pod; `None` without an order.
    pub(in crate::agent) fn report(&self, uid: &str) -> Option<StandbyReport> {
        let pod = self.pods.get(uid)?;
        let report = pod.machine.report(None)?;
        let memory_bytes = pod.cgroup.as_deref().and_then(freezer::memory_bytes);
        Some(StandbyReport { memory_bytes, ..report })
    }

    /// Returns the reports about all pods with an order, each with the pod's uid.
    pub(in crate::agent) fn reports(&self) -> impl Iterator<Item = (&str, StandbyReport)> {
        self.pods.keys().filter_map(|uid| Some((uid.as_str(), self.report(uid)?)))
    }

    /// Returns the uids of the pods for which `filter` is true.
    pub(super) fn uids_where(&self, filter: impl Fn(&StandbyPod) -> bool) -> Vec<String> {
        let pods = self.pods.iter().filter(|(_, pod)| filter(pod));
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// Thaws a cgroup. If that fails, the next sweep tries it again.
    pub(super) fn thaw_cgroup(&mut self, cgroup: PathBuf) {
        if let Err(error) = freezer::thaw(&cgroup) {
            let error = error_chain(&error);
            error!(cgroup = %cgroup.display(), error, "cannot thaw pod");
            self.thaw_retries.push(cgroup);
        }
    }

    /// Tries again to thaw the cgroups that could not be thawed.
    pub(super) fn retry_thaws(&mut self) {
        for cgroup in std::mem::take(&mut self.thaw_retries) {
            self.thaw_cgroup(cgroup);
        }
    }

    /// Returns the number of a new task.
    pub(super) fn take_task_number(&mut self) -> u64 {
        self.last_task += 1;
        self.last_task
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pods::standby::{StandbyEvent, StandbyUsage};

    const ORDER: StandbyOrder = StandbyOrder {
        quiet_time: Duration::from_secs(1),
        probe_time: Duration::from_secs(1),
        reclaims_memory: false,
        agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
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

    /// A failed thaw ends the freeze for the state machine, and the processes are frozen all the same.
    #[test]
    fn a_pod_whose_thaw_has_failed_may_be_frozen() {
        let cgroup = PathBuf::from("/sys/fs/cgroup/kubepods/pod1");
        let other = [cgroup.with_file_name("pod2")];
        let mut pod = StandbyPod { cgroup: Some(cgroup.clone()), ..StandbyPod::default() };
        assert!(!pod.may_be_frozen(&[]) && !pod.may_be_frozen(&other));
        assert!(pod.may_be_frozen(&[cgroup]));
        pod.freeze = Some(PodFreeze { task: 1, threads: None, is_over: Arc::default() });
        assert!(pod.may_be_frozen(&[]));
    }
}
