//! Shell: tasks that the loop starts for pods on standby: readings of facts, waits for freezes, reclaims of memory.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{task::spawn_blocking, time::sleep};
use tracing::warn;

use super::standby_pods::{PodFreeze, StandbyPod};
use crate::{
    agent::Agent,
    kernel::freezer,
    pods::{
        registry::RegisteredPod,
        standby_facts::{StandbyFacts, read_standby_facts},
    },
};

/// Delay of a reading of a pod that runs. The request that has thawed the pod gets the processors first.
const RUNNING_READ_DELAY: Duration = Duration::from_millis(10);

/// Result of a task that the loop has started for a pod.
#[derive(Debug)]
pub(in crate::agent) struct StandbyTaskResult {
    /// Uid of the pod.
    pub(super) uid: String,
    /// Number of the task.
    pub(super) task: u64,
    /// Outcome of the task.
    pub(super) content: StandbyTaskContent,
}

/// Content of a task's result.
#[derive(Debug)]
pub(super) enum StandbyTaskContent {
    /// The facts about the pod were read, or are not known for this reason.
    Facts(Result<StandbyFacts, String>),
    /// The freeze with this number of the state machine has ended, with the number of frozen threads or the reason for
    /// its failure.
    FreezeEnded(u64, Result<u64, String>),
    /// The memory of the frozen pod was reclaimed.
    Reclaimed,
}

impl Agent {
    /// Reads the facts about a pod in a task, unless a task whose result counts is under way.
    pub(super) fn start_standby_reading(&mut self, uid: &str) {
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.get(uid) else { return };
        // The result of a task counts only if the pod was not armed, frozen or thawed since the task began. So one that
        // is under way shows what a task that begins now would show.
        if self.standby.pods.get(uid).is_none_or(|pod| pod.reading.is_some()) {
            return;
        }
        let task = self.standby.take_task_number();
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

    /// Begins to freeze a pod. The end of the freeze arrives as a result of a task. Returns the reason for which the
    /// freeze cannot begin.
    pub(super) fn begin_freeze(&mut self, uid: &str, number: u64) -> Result<(), String> {
        let unseen_ports = self.pods.unseen_ports(uid);
        check_listeners(self.standby.sees_old_listeners, &unseen_ports)?;
        let task = self.standby.take_task_number();
        let pod = self.standby.pods.get_mut(uid);
        let Some((pod, cgroup)) = pod.and_then(|pod| pod.cgroup.clone().map(|it| (pod, it))) else {
            return Err("its cgroup is not found".to_owned());
        };
        // Readings from before the freeze prove nothing after it.
        pod.reading = None;
        // In the loop: a task could write this after the loop has written the next thaw.
        freezer::freeze(&cgroup).map_err(|error| {
            format!("its cgroup {} cannot be frozen: {error}", cgroup.display())
        })?;
        pod.freeze = Some(PodFreeze { task, threads: None, is_over: Arc::default() });
        // A thaw that has failed and is to be tried again would undo this freeze.
        self.standby.thaw_retries.retain(|it| *it != cgroup);
        let (uid, results) = (uid.to_owned(), self.standby.results_tx.clone());
        tokio::spawn(async move {
            let frozen = freezer::wait_until_frozen(&cgroup).await;
            // Frozen threads start no others, so another number later on means that a process has entered the pod.
            let result = frozen.and_then(|()| {
                let count = freezer::thread_count(&cgroup);
                count.map_err(|error| format!("its processes cannot be counted: {error}"))
            });
            let content = StandbyTaskContent::FreezeEnded(number, result);
            let _ = results.send(StandbyTaskResult { uid, task, content }).await;
        });
        Ok(())
    }

    /// Reclaims the memory of a frozen pod in a task, until the pod is thawed.
    pub(super) fn reclaim_memory(&self, uid: &str) {
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
            // Also after an error, as a part may have been reclaimed: the next report has the memory that is left.
            let content = StandbyTaskContent::Reclaimed;
            let _ = results.send(StandbyTaskResult { uid, task, content }).await;
        });
    }
}

/// Checks that connections to each of a pod's listeners send events: a connection without one would not thaw the pod.
/// Returns the reason for which the pod must not freeze.
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

    #[test]
    fn a_pod_that_no_connection_would_thaw_is_not_frozen() {
        let (none, one) = (BTreeSet::new(), BTreeSet::from([8080]));
        let reason = check_listeners(false, &one).expect_err("nothing reports its connections");
        assert!(reason.contains("port 8080"), "{reason}");
        assert_eq!(check_listeners(false, &none), Ok(()));
        assert_eq!(check_listeners(true, &one), Ok(()));
    }
}
