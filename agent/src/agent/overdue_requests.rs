//! Shell: the part of the loop that enforces `timeoutSeconds` on the direct path.

use std::{
    future::pending,
    time::{Duration, Instant},
};

use common::link::chain;
use tokio::task::JoinHandle;
use tracing::warn;

use super::{Agent, AgentHandles, RegisteredPod};
use crate::{
    clock::monotonic_ns,
    deadlines::{DeadlineScan, PodDeadlines, scan},
};

/// Results of one round of scans, by the pod's uid; `None` where a scan failed.
pub(super) type DeadlineScanResults = Vec<(String, Option<DeadlineScan>)>;

/// Starts to watch for overdue requests. Returns `None`, and logs the reason, if this kernel cannot close their
/// connections.
pub(super) fn init_deadlines(ends: &AgentHandles) -> Option<PodDeadlines> {
    let able = scan::check_support(&ends.maps.conns());
    ends.metrics.deadlines_enforced.set(able.is_ok().into());
    match able {
        Ok(()) => Some(PodDeadlines::default()),
        Err(error) => {
            let error = chain(&error);
            warn!(
                error,
                "timeoutSeconds is not kept on direct requests: the kernel does not let us"
            );
            None
        }
    }
}

/// Waits for the end of the current round of scans; without one, waits forever.
pub(super) async fn wait_for_scans(
    looking: &mut Option<JoinHandle<DeadlineScanResults>>,
) -> DeadlineScanResults {
    let Some(round) = looking else { return pending().await };
    let found = round.await;
    *looking = None;
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

impl Agent {
    /// Reads the number of requests in flight in a pod, for its deadline.
    pub(super) fn update_deadline(&mut self, uid: &str) {
        let Some(deadlines) = &mut self.deadlines else { return };
        let Some(RegisteredPod { entry: pod, .. }) = self.registered_pods.get(uid) else { return };
        let Some(tracked) = self.pods.get(uid) else { return };
        let timeout = self.planner.table().request_terms(&tracked.revision).timeout;
        // The clock is read first: a request that the counter does not show yet then began after `now_ns`.
        let now_ns = monotonic_ns();
        deadlines.update_in_flight(
            now_ns,
            uid,
            self.handles.maps.pod_state(pod.slot).in_flight,
            timeout,
        );
    }

    /// Scans the pods that may have overdue requests, one round at a time.
    pub(super) fn start_deadline_scans(&mut self) {
        let Some(deadlines) = &self.deadlines else { return };
        if self.deadline_task.is_some() {
            return;
        }
        let due = deadlines.due_scans(monotonic_ns()).into_iter();
        let known = due.filter_map(|it| Some((self.registered_pods.get(&it.uid)?.cookie, it)));
        let due: Vec<_> = known.map(|(cookie, it)| (it, cookie)).collect();
        if due.is_empty() {
            return;
        }
        let (finder, conns) = (self.handles.finder_commands.clone(), self.handles.maps.conns());
        self.deadline_task = Some(tokio::spawn(scan::scan_pods(due, finder, conns)));
    }

    /// Handles the results of a finished round of scans.
    pub(super) fn handle_deadline_scans(&mut self, found: DeadlineScanResults) {
        let Some(deadlines) = &mut self.deadlines else { return };
        for (uid, looked) in found {
            deadlines.handle_scan(monotonic_ns(), &uid, looked);
            self.handles.metrics.deadline_scans.inc();
            self.handles.metrics.overdue_closed.inc_by(looked.map_or(0, |it| it.closed));
        }
        // The next scan of a pod may be due before the next sweep.
        self.next_sweep =
            self.next_deadline_scan().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// Returns the time of the next scan of a pod; `None` while a round is under way.
    pub(super) fn next_deadline_scan(&self) -> Option<Instant> {
        let deadlines = self.deadlines.as_ref().filter(|_| self.deadline_task.is_none())?;
        let left = deadlines.next_scan_ns()?.saturating_sub(monotonic_ns());
        Some(Instant::now() + Duration::from_nanos(left))
    }
}
