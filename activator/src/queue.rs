//! Pure: the waiting line of one revision.
//!
//! A request waits only while no ready pod has room: whoever makes room (a pod that became ready, a request
//! that ended, a slot that is granted) lets the first in the line go in the same call. So whenever a call returns,
//! either no request waits or no pod has room. Room under a hard limit is what [`crate::slots`] says.
//!
//! `W` is what the shell needs to tell a waiting request that it may go; the line only hands it back.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    balance::{PodKey, Slot, pick},
    budget::LineBounds,
};

/// Requests that may wait for each pod with a hard limit, in multiples of that limit: what Knative's sidecar lets wait
/// (`cmd/queue`, `pkg/queue/breaker.go`), for which this line stands in.
const PER_POD: usize = 10;

/// A request's place in the order of arrival. It keeps it when it has to wait once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Turn(u64);

/// Nothing more may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A request that may go: whom to tell, and which pod has room for it. The room is taken already.
pub type Go<W> = (W, PodKey);

/// The pods of one revision as far as they take requests, and who waits for them.
#[derive(Debug)]
pub struct Line<W> {
    bounds: LineBounds,
    /// containerConcurrency; 0: no limit.
    limit: u32,
    /// Pods that the table calls ready, also those that refuse for a moment.
    ready: BTreeSet<PodKey>,
    /// Pods that take requests, by key.
    open: Vec<Slot>,
    /// Pods that take none for now and still have requests: draining, gone or refusing.
    closed: BTreeMap<PodKey, u32>,
    /// Pods the table calls ready but that refused a connection a moment ago.
    refusing: BTreeSet<PodKey>,
    cursor: usize,
    waiting: BTreeMap<Turn, Waiting<W>>,
    bytes: usize,
    next: u64,
}

#[derive(Debug)]
struct Waiting<W> {
    waiter: W,
    bytes: usize,
}

impl<W> Line<W> {
    /// An empty line without pods.
    pub fn new(bounds: LineBounds) -> Self {
        Self {
            bounds,
            limit: 0,
            ready: BTreeSet::new(),
            open: Vec::new(),
            closed: BTreeMap::new(),
            refusing: BTreeSet::new(),
            cursor: 0,
            waiting: BTreeMap::new(),
            bytes: 0,
            next: 0,
        }
    }

    /// A request arrives and takes its turn.
    pub fn on_request(&mut self) -> Turn {
        self.next += 1;
        Turn(self.next)
    }

    /// Takes room at a pod. `None`: there is none, so the request has to [`wait`](Self::wait).
    pub fn admit(&mut self, chance: u64) -> Option<PodKey> {
        let at = pick(&self.open, self.limit, &mut self.cursor, chance)?;
        let slot = &mut self.open[at];
        slot.in_flight += 1;
        slot.spare = slot.spare.saturating_sub(1);
        Some(slot.pod)
    }

    /// Puts a request in the line, at the place of its turn.
    pub fn wait(&mut self, turn: Turn, bytes: usize, waiter: W) -> Result<(), Full> {
        let held = self.bytes.saturating_add(bytes);
        if self.waiting.len() >= self.room() || held > self.bounds.bytes {
            return Err(Full);
        }
        self.bytes = held;
        self.waiting.insert(turn, Waiting { waiter, bytes });
        Ok(())
    }

    /// A waiting request's client is gone, or its time is up. `None`: it does not wait any more.
    pub fn on_leave(&mut self, turn: Turn) -> Option<W> {
        let left = self.waiting.remove(&turn)?;
        self.bytes -= left.bytes;
        Some(left.waiter)
    }

    /// Nothing will ever have room: all who wait leave.
    pub fn give_up(&mut self) -> Vec<W> {
        self.bytes = 0;
        std::mem::take(&mut self.waiting).into_values().map(|it| it.waiter).collect()
    }

    /// The table has changed: these pods are ready, with this limit. A limit leaves no room but what
    /// [`on_spare`](Self::on_spare) gives.
    pub fn on_routes(
        &mut self,
        ready: impl IntoIterator<Item = PodKey>,
        limit: u32,
        chance: impl FnMut() -> u64,
    ) -> Vec<Go<W>> {
        let ready: BTreeSet<PodKey> = ready.into_iter().collect();
        self.limit = limit;
        self.refusing.retain(|pod| ready.contains(pod));
        for slot in std::mem::take(&mut self.open) {
            self.closed.insert(slot.pod, slot.in_flight);
        }
        for pod in ready.difference(&self.refusing) {
            let in_flight = self.closed.remove(pod).unwrap_or(0);
            self.open.push(Slot { pod: *pod, in_flight, spare: 0 });
        }
        self.closed.retain(|_, in_flight| *in_flight > 0);
        self.ready = ready;
        self.release(chance)
    }

    /// Where there is a limit: so many further requests may be given to each pod.
    pub fn on_spare(
        &mut self,
        mut spare: impl FnMut(PodKey) -> u32,
        chance: impl FnMut() -> u64,
    ) -> Vec<Go<W>> {
        for slot in &mut self.open {
            slot.spare = spare(slot.pod);
        }
        self.release(chance)
    }

    /// Where there is a limit: `pod` may be given one more.
    pub fn on_spare_one(&mut self, pod: PodKey, chance: impl FnMut() -> u64) -> Vec<Go<W>> {
        let Ok(at) = self.find(pod) else { return Vec::new() };
        self.open[at].spare += 1;
        self.release(chance)
    }

    /// Whether a pod takes requests.
    pub fn is_open(&self, pod: PodKey) -> bool {
        self.find(pod).is_ok()
    }

    /// Pods that the table calls ready.
    pub fn ready(&self) -> impl Iterator<Item = PodKey> {
        self.ready.iter().copied()
    }

    /// Requests in flight at a pod.
    pub fn at(&self, pod: PodKey) -> u32 {
        let open = self.find(pod).ok().map(|at| self.open[at].in_flight);
        open.or_else(|| self.closed.get(&pod).copied()).unwrap_or(0)
    }

    /// Pods that take requests.
    pub fn open(&self) -> impl Iterator<Item = PodKey> {
        self.open.iter().map(|slot| slot.pod)
    }

    /// A request has ended at `pod`.
    pub fn on_done(&mut self, pod: PodKey, chance: impl FnMut() -> u64) -> Vec<Go<W>> {
        if let Ok(at) = self.find(pod) {
            self.open[at].in_flight -= 1;
            return self.release(chance);
        }
        if let Some(in_flight) = self.closed.get_mut(&pod) {
            *in_flight -= 1;
            if *in_flight == 0 {
                self.closed.remove(&pod);
            }
        }
        Vec::new()
    }

    /// `pod` refused a connection. It gets no request until [`on_retry`](Self::on_retry) or until the table
    /// names it anew. Returns whether it was open until now.
    pub fn on_refused(&mut self, pod: PodKey) -> bool {
        let Ok(at) = self.find(pod) else { return false };
        let slot = self.open.remove(at);
        if slot.in_flight > 0 {
            self.closed.insert(pod, slot.in_flight);
        }
        self.refusing.insert(pod)
    }

    /// Whether a pod besides `pod` takes requests.
    pub fn has_other(&self, pod: PodKey) -> bool {
        self.open.iter().any(|slot| slot.pod != pod)
    }

    /// `pod` may be tried again.
    pub fn on_retry(&mut self, pod: PodKey, chance: impl FnMut() -> u64) -> Vec<Go<W>> {
        if !self.refusing.remove(&pod) {
            return Vec::new();
        }
        let in_flight = self.closed.remove(&pod).unwrap_or(0);
        let at = self.find(pod).unwrap_or_else(|at| at);
        self.open.insert(at, Slot { pod, in_flight, spare: 0 });
        self.release(chance)
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests in flight, over all pods.
    pub fn in_flight(&self) -> u64 {
        let open = self.open.iter().map(|slot| slot.in_flight);
        open.chain(self.closed.values().copied()).map(u64::from).sum()
    }

    /// Requests that may wait now. Example: depth 10 000, two pods, containerConcurrency 4: 10 080.
    fn room(&self) -> usize {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let of_pods = self.ready.len().saturating_mul(limit).saturating_mul(PER_POD);
        self.bounds.requests.saturating_add(of_pods)
    }

    fn find(&self, pod: PodKey) -> Result<usize, usize> {
        self.open.binary_search_by(|slot| slot.pod.cmp(&pod))
    }

    fn release(&mut self, mut chance: impl FnMut() -> u64) -> Vec<Go<W>> {
        let mut out = Vec::new();
        while !self.waiting.is_empty() {
            let Some(pod) = self.admit(chance()) else { break };
            let (_, first) = self.waiting.pop_first().expect("not empty: checked by the loop");
            self.bytes -= first.bytes;
            out.push((first.waiter, pod));
        }
        out
    }
}

#[cfg(test)]
mod tests;
