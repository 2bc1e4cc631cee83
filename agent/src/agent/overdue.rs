//! Shell: the part of the loop that enforces `timeoutSeconds` on the direct path.

use std::{
    future::pending,
    time::{Duration, Instant},
};

use common::link::chain;
use tokio::task::JoinHandle;
use tracing::warn;

use super::{Agent, Ends, Registered};
use crate::{
    clock::monotonic_ns,
    deadlines::{Deadlines, Looked, end},
};

/// Results of one round of scans, by the pod's uid; `None` where a scan failed.
pub(super) type Found = Vec<(String, Option<Looked>)>;

/// Starts to watch for overdue requests. Returns `None`, and logs the reason, if this kernel cannot close their
/// connections.
pub(super) fn begin(ends: &Ends) -> Option<Deadlines> {
    let able = end::able(&ends.maps.conns());
    ends.metrics.deadlines_kept.set(able.is_ok().into());
    match able {
        Ok(()) => Some(Deadlines::default()),
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
pub(super) async fn ended(looking: &mut Option<JoinHandle<Found>>) -> Found {
    let Some(round) = looking else { return pending().await };
    let found = round.await;
    *looking = None;
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

impl Agent {
    /// Reads the number of requests in flight in a pod, for its deadline.
    pub(super) fn watch_requests(&mut self, uid: &str) {
        let Some(deadlines) = &mut self.deadlines else { return };
        let Some(Registered { pod, .. }) = self.locals.get(uid) else { return };
        let Some(tracked) = self.pods.get(uid) else { return };
        let timeout = self.planner.table().terms(&tracked.revision).timeout;
        // The clock is read first: a request that the counter does not show yet then began after `now_ns`.
        let now_ns = monotonic_ns();
        deadlines.seen(now_ns, uid, self.ends.maps.state(pod.slot).in_flight, timeout);
    }

    /// Scans the pods that may have overdue requests, one round at a time.
    pub(super) fn end_overdue(&mut self) {
        let Some(deadlines) = &self.deadlines else { return };
        if self.looking.is_some() {
            return;
        }
        let due = deadlines.due(monotonic_ns()).into_iter();
        let known = due.filter_map(|it| Some((self.locals.get(&it.uid)?.cookie, it)));
        let due: Vec<_> = known.map(|(cookie, it)| (it, cookie)).collect();
        if due.is_empty() {
            return;
        }
        let (finder, conns) = (self.ends.finder.clone(), self.ends.maps.conns());
        self.looking = Some(tokio::spawn(end::round(due, finder, conns)));
    }

    /// Handles the results of a finished round of scans.
    pub(super) fn take_looks(&mut self, found: Found) {
        let Some(deadlines) = &mut self.deadlines else { return };
        for (uid, looked) in found {
            deadlines.looked(monotonic_ns(), &uid, looked);
            self.ends.metrics.deadlines_looks.inc();
            self.ends.metrics.deadlines_ended.inc_by(looked.map_or(0, |it| it.ended));
        }
        // The next scan of a pod may be due before the next sweep.
        self.next_sweep = self.next_overdue().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// Returns the time of the next scan of a pod; `None` while a round is under way.
    pub(super) fn next_overdue(&self) -> Option<Instant> {
        let deadlines = self.deadlines.as_ref().filter(|_| self.looking.is_none())?;
        let left = deadlines.next_ns()?.saturating_sub(monotonic_ns());
        Some(Instant::now() + Duration::from_nanos(left))
    }
}
