//! Shell: enforces `timeoutSeconds` on the direct path: deadlines of requests, and the task that scans for
//! overdue ones.

use std::{
    future::pending,
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::{sync::mpsc::Sender, task::JoinHandle};
use tracing::warn;

use super::{DeadlineScanResult, PodDeadlines, scan};
use crate::{
    clock::monotonic_ns,
    kernel::maps::connection_storage::ConnectionStorage,
    metrics::AgentMetrics,
    pods::{finder::FinderCommand, registry::RegisteredPod},
};

/// Results of one round of scans.
pub(crate) type DeadlineScanResults = Vec<DeadlineScanResult>;

/// Deadlines of the pods' requests, and the rounds of scans. Rounds run one at a time.
#[derive(Debug)]
pub(crate) struct OverdueRequestTask {
    /// Deadlines of requests; `None` on kernels that cannot close overdue connections.
    deadlines: Option<PodDeadlines>,
    /// Round of scans that is under way.
    round: Option<JoinHandle<DeadlineScanResults>>,
    finder_commands: Sender<FinderCommand>,
    conns: ConnectionStorage,
    metrics: AgentMetrics,
}

impl OverdueRequestTask {
    /// Starts without pods. Logs the reason if this kernel cannot close the connections of overdue requests.
    pub(crate) fn new(
        finder_commands: Sender<FinderCommand>,
        conns: ConnectionStorage,
        metrics: AgentMetrics,
    ) -> Self {
        let able = scan::check_support(&conns);
        metrics.deadlines_enforced.set(able.is_ok().into());
        let deadlines = match able {
            Ok(()) => Some(PodDeadlines::default()),
            Err(error) => {
                let error = error_chain(&error);
                warn!(
                    error,
                    "timeoutSeconds is not enforced on direct requests: the kernel lacks support"
                );
                None
            }
        };
        Self { deadlines, round: None, finder_commands, conns, metrics }
    }

    /// Returns true if this kernel can close the connections of overdue requests.
    pub(crate) fn is_enforced(&self) -> bool {
        self.deadlines.is_some()
    }

    /// Updates a pod's requests in flight and their timeout. `in_flight` reads the pod's counter.
    pub(crate) fn update_in_flight(
        &mut self,
        uid: &str,
        timeout: Duration,
        in_flight: impl FnOnce() -> u64,
    ) {
        let Some(deadlines) = &mut self.deadlines else { return };
        // The clock is read first: a request that the counter does not show yet then began after `now_ns`.
        let now_ns = monotonic_ns();
        deadlines.update_in_flight(now_ns, uid, in_flight(), timeout);
    }

    /// Forgets a pod that is gone.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.deadlines.iter_mut().for_each(|it| it.forget(uid));
    }

    /// Starts to scan the pods that may have overdue requests, unless a round is under way. `registered` returns a pod by
    /// its uid, if it is registered.
    pub(crate) fn start_due_round(&mut self, registered: impl Fn(&str) -> Option<RegisteredPod>) {
        let Some(deadlines) = &self.deadlines else { return };
        if self.round.is_some() {
            return;
        }
        let due = deadlines.due_scans(monotonic_ns()).into_iter();
        let due: Vec<_> = due.filter_map(|it| registered(&it.uid).map(|pod| (it, pod))).collect();
        if due.is_empty() {
            return;
        }
        let (finder, conns) = (self.finder_commands.clone(), self.conns.clone());
        self.round = Some(tokio::spawn(scan::scan_pods(due, finder, conns)));
    }

    /// Waits for the end of the current round; without one, waits forever. Nothing is lost when the future is dropped.
    pub(crate) async fn wait_for_round(&mut self) -> DeadlineScanResults {
        let Some(round) = &mut self.round else { return pending().await };
        let results = round.await;
        self.round = None;
        results.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Handles the results of a finished round.
    pub(crate) fn handle_results(&mut self, results: DeadlineScanResults) {
        let Some(deadlines) = &mut self.deadlines else { return };
        for DeadlineScanResult { uid, closed, scan } in results {
            deadlines.handle_scan(monotonic_ns(), &uid, scan);
            self.metrics.deadline_scans.inc();
            self.metrics.overdue_closed.inc_by(closed);
        }
    }

    /// Returns the time of the next scan of a pod; `None` while a round is under way.
    pub(crate) fn next_scan(&self) -> Option<Instant> {
        let deadlines = self.deadlines.as_ref().filter(|_| self.round.is_none())?;
        let wait_ns = deadlines.next_scan_ns()?.saturating_sub(monotonic_ns());
        Some(Instant::now() + Duration::from_nanos(wait_ns))
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    /// Returns a task without programs, whose deadlines are kept whatever the kernel, and the finder's commands.
    fn task() -> (OverdueRequestTask, mpsc::Receiver<FinderCommand>) {
        let (finder_commands, commands) = mpsc::channel(8);
        let task = OverdueRequestTask {
            deadlines: Some(PodDeadlines::default()),
            round: None,
            finder_commands,
            conns: ConnectionStorage::default(),
            metrics: AgentMetrics::new().0,
        };
        (task, commands)
    }

    #[tokio::test]
    async fn a_registered_pod_with_an_old_request_is_scanned_once_at_a_time() {
        let (mut task, mut commands) = task();
        assert_eq!(task.next_scan(), None, "no pod has a request");
        // Requests that were in flight before the first reading may be of any age.
        task.update_in_flight("a", Duration::ZERO, || 1);
        task.start_due_round(|_| None);
        assert!(task.next_scan().is_some(), "not registered, so not scanned");
        let registered = |_: &str| Some(RegisteredPod::for_test(7, 1));
        task.start_due_round(registered);
        assert_eq!(task.next_scan(), None, "a round is under way");
        task.start_due_round(registered);
        let command = commands.recv().await;
        assert!(
            matches!(&command, Some(FinderCommand::OpenNamespace(uid, 7, _)) if uid == "a"),
            "{command:?}"
        );
        // Without a namespace the scan fails.
        drop(command);
        let mut results = task.wait_for_round().await;
        assert_eq!(results, [DeadlineScanResult { uid: "a".into(), closed: 0, scan: None }]);
        results[0].closed = 3;
        task.handle_results(results);
        assert_eq!(task.metrics.deadline_scans.get(), 1);
        assert_eq!(task.metrics.overdue_closed.get(), 3, "a failed scan may have closed some");
        assert!(task.next_scan().is_some_and(|at| at > Instant::now()), "after a pause");
        assert!(commands.try_recv().is_err(), "no second round");
        task.forget("a");
        assert_eq!(task.next_scan(), None);
    }
}
