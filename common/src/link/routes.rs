//! Shell: batches from the items of RouteTable streams, over a move from one replica to another.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::PodKey;
use crate::{
    outbox::Outbox,
    replicas::Endpoint,
    wire::{PodItem, PodPhase, RouteChange, RouteItem, RouteKey},
};

/// Newest states of the subjects that changed.
pub type Changes = BTreeMap<RouteKey, RouteChange>;

/// How long a replica that was moved to may lag behind the one before it.
const LAG: Duration = Duration::from_secs(1);

/// What one batch of a RouteTable stream says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteBatch {
    /// In force once every change is.
    pub version: u64,
    /// Whether it is a stream's first: every subject that it does not name is gone.
    pub is_whole: bool,
    /// Newest state of each subject that changed.
    pub changes: Changes,
}

impl RouteBatch {
    /// Takes in the batch that came next.
    pub fn follow(&mut self, next: Self) {
        if next.is_whole {
            *self = next;
            return;
        }
        self.version = next.version;
        self.changes.extend(next.changes);
    }
}

/// What is remembered of the table in force, over broken streams.
///
/// Whoever said that no new connection of his goes to a draining pod must keep his word although he moves to a
/// replica that has not heard of the draining yet. Such a pod stays draining for a second, unless the new replica
/// comes to say otherwise after its first table.
#[derive(Debug, Default)]
pub(super) struct InForce {
    from: Option<Endpoint>,
    moved: bool,
    whole: bool,
    version: u64,
    changes: Changes,
    draining: BTreeSet<String>,
    held: Changes,
    until: Option<Instant>,
}

impl InForce {
    /// A stream with this replica has opened.
    pub(super) fn restart(&mut self, from: &Endpoint) {
        self.moved = self.from.replace(from.clone()).is_some_and(|before| before != *from);
        self.whole = true;
        self.changes.clear();
    }

    /// Whether the stream has yet to say its first table.
    pub(super) fn is_whole_next(&self) -> bool {
        self.whole
    }

    /// When [`release`](Self::release) is due.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.until
    }

    /// Takes in one item; a batch, when that ends one.
    pub(super) fn absorb(&mut self, item: RouteItem) -> Option<RouteBatch> {
        if let Some(key) = item.change.key() {
            self.changes.insert(key, item.change);
            return None;
        }
        self.version = item.version;
        let is_whole = std::mem::take(&mut self.whole);
        let mut changes = std::mem::take(&mut self.changes);
        if is_whole {
            (self.held, self.until) = (Changes::new(), None);
            if self.moved {
                self.hold(&mut changes);
            }
            self.draining.clear();
        } else {
            self.held.retain(|key, _| !changes.contains_key(key));
        }
        self.note(&changes);
        Some(RouteBatch { version: item.version, is_whole, changes })
    }

    /// The new replica has had time to catch up: what it said holds.
    pub(super) fn release(&mut self) -> RouteBatch {
        self.until = None;
        let changes = std::mem::take(&mut self.held);
        self.note(&changes);
        RouteBatch { version: self.version, is_whole: false, changes }
    }

    fn hold(&mut self, changes: &mut Changes) {
        for uid in &self.draining {
            let Some(RouteChange::Pod(pod)) = changes.get_mut(&RouteKey::Pod(uid.clone())) else {
                continue;
            };
            if pod.phase != PodPhase::Draining {
                self.held.insert(RouteKey::Pod(uid.clone()), RouteChange::Pod(pod.clone()));
                pod.phase = PodPhase::Draining;
            }
        }
        self.until = (!self.held.is_empty()).then(|| Instant::now() + LAG);
    }

    fn note(&mut self, changes: &Changes) {
        note(&mut self.draining, changes);
    }
}

fn note(draining: &mut BTreeSet<String>, changes: &Changes) {
    for (key, change) in changes {
        let RouteKey::Pod(uid) = key else { continue };
        match change {
            RouteChange::Pod(pod) if pod.phase == PodPhase::Draining => {
                draining.insert(uid.clone());
            }
            _ => drop(draining.remove(uid)),
        }
    }
}

/// The draining pods of a receiver's table, and which of them it has told the controller it avoids.
///
/// Table versions compare within one stream; that a pod is avoided means the same to every replica.
#[derive(Debug, Default)]
pub struct Draining {
    wanted: BTreeSet<String>,
    said: BTreeSet<String>,
}

impl Draining {
    /// Takes in a batch that is to be put in force.
    pub fn follow(&mut self, batch: &RouteBatch) {
        if batch.is_whole {
            self.wanted.clear();
        }
        note(&mut self.wanted, &batch.changes);
    }

    /// Everything taken in is in force: says so of each draining pod.
    pub fn in_force(&mut self, reports: &Outbox<PodKey, PodItem>) {
        for uid in self.said.difference(&self.wanted) {
            reports.remove(&PodKey::Avoided(uid.clone()));
        }
        for uid in self.wanted.difference(&self.said) {
            reports.set(PodKey::Avoided(uid.clone()), PodItem::Avoided(uid.clone()));
        }
        self.said.clone_from(&self.wanted);
    }
}
