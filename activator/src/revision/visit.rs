//! Shell: one request's stay at a revision.

use std::{sync::Arc, time::Instant};

use tokio::sync::oneshot;

use super::{Place, Revision, tell};
use crate::{
    clock::{chance, now_ns},
    failure::Failure,
    queue::Turn,
};

/// One request's stay at a revision until a pod has it. Dropping it leaves the line.
#[derive(Debug)]
pub struct Visit {
    revision: Arc<Revision>,
    turn: Option<Turn>,
    bytes: usize,
    /// Since when it counts as waiting.
    counted: Option<Instant>,
}

impl Visit {
    /// A request that holds `bytes` while it waits.
    pub(super) fn new(revision: Arc<Revision>, bytes: usize) -> Self {
        Self { revision, turn: None, bytes, counted: None }
    }

    /// Waits for room at a pod; not at all where there is some.
    pub async fn place(&mut self) -> Result<Place, Failure> {
        let answer = {
            let mut core = self.revision.core();
            core.begin(&self.revision);
            let live = core.live(self.revision.settings.bounds);
            let turn = *self.turn.get_or_insert_with(|| {
                live.visits += 1;
                live.line.on_request()
            });
            if let Some(key) = live.line.admit(chance()) {
                let place = self.revision.place(live, key);
                core.took(&place.pod);
                return Ok(place);
            }
            let (whom, answer) = oneshot::channel();
            live.line.wait(turn, self.bytes, whom).map_err(|_full| Failure::QueueFull)?;
            let waiting = live.line.waiting();
            let is_first = self.counted.is_none();
            if is_first {
                self.counted = Some(Instant::now());
                core.totals.start(now_ns());
            }
            let gone = self.revision.wanting(&mut core);
            let places = self.revision.places(&core, gone);
            drop(core);
            if is_first {
                self.revision.began_waiting(waiting);
            }
            tell(places);
            answer
        };
        answer.await.map_err(|_dropped| Failure::UnknownRevision(self.revision.name.to_string()))
    }

    /// The request leaves for its pod, where it is counted from now on.
    pub fn leave(&mut self) {
        self.end(true);
    }

    /// It waits no longer. An arrival counts once: at the pod that `has_pod`, or as one that none got.
    fn end(&mut self, has_pod: bool) {
        let Some(since) = self.counted.take() else { return };
        {
            let mut core = self.revision.core();
            core.totals.finish(now_ns());
            core.totals.left += u64::from(!has_pod);
        }
        let metrics = &self.revision.settings.pods.metrics;
        metrics.waiting.dec();
        metrics.wait_seconds.observe(since.elapsed().as_secs_f64());
        self.revision.settings.usage.changed(&self.revision);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let Some(turn) = self.turn else { return };
        let (left, places) = {
            let mut core = self.revision.core();
            let left = core.live.as_mut().and_then(|live| {
                live.visits -= 1;
                live.line.on_leave(turn)
            });
            let gone = left.as_ref().map_or_else(Vec::new, |_| self.revision.wanting(&mut core));
            let places = self.revision.places(&core, gone);
            core.tidy();
            (left, places)
        };
        tell(places);
        // Dropped after the lock is released, in case its answer holds a place.
        drop(left);
        self.end(false);
    }
}
