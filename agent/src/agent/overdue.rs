//! Shell: the part of the loop that keeps `timeoutSeconds` on the direct path.

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

/// What a round of looks into pods has found, by uid; nothing where no look could be made.
pub(super) type Found = Vec<(String, Option<Looked>)>;

/// Begins to watch requests; `None`, with a word of why, where the kernel does not let us end them.
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

/// Waits for the end of the round that is under way, if one is.
pub(super) async fn ended(looking: &mut Option<JoinHandle<Found>>) -> Found {
    let Some(round) = looking else { return pending().await };
    let found = round.await;
    *looking = None;
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

impl Agent {
    /// Takes in how many requests a pod has in flight.
    pub(super) fn watch_requests(&mut self, uid: &str) {
        let Some(deadlines) = &mut self.deadlines else { return };
        let Some(Registered { pod, .. }) = self.locals.get(uid) else { return };
        let Some(tracked) = self.pods.get(uid) else { return };
        let timeout = self.planner.table().terms(&tracked.revision).timeout;
        // Read first: what is not in flight at the next look at the counter began later.
        let now_ns = monotonic_ns();
        deadlines.seen(now_ns, uid, self.ends.maps.state(pod.slot).in_flight, timeout);
    }

    /// Looks into the pods whose requests can be over, one round at a time.
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

    /// Takes in what a round has found.
    pub(super) fn take_looks(&mut self, found: Found) {
        let Some(deadlines) = &mut self.deadlines else { return };
        for (uid, looked) in found {
            deadlines.looked(monotonic_ns(), &uid, looked);
            self.ends.metrics.deadlines_looks.inc();
            self.ends.metrics.deadlines_ended.inc_by(looked.map_or(0, |it| it.ended));
        }
        self.next_sweep = self.next_overdue().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// When a pod is to be looked into next; nothing while a round is under way.
    pub(super) fn next_overdue(&self) -> Option<Instant> {
        let deadlines = self.deadlines.as_ref().filter(|_| self.looking.is_none())?;
        let left = deadlines.next_ns()?.saturating_sub(monotonic_ns());
        Some(Instant::now() + Duration::from_nanos(left))
    }
}
