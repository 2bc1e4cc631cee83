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
    wire::{Name, PodItem, PodPhase, RouteChange, RouteItem, RouteKey},
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
    /// Who has said it.
    from: Option<Endpoint>,
    /// With whom a stream stands that has yet to say its first table.
    next: Option<Endpoint>,
    version: u64,
    changes: Changes,
    draining: BTreeSet<String>,
    held: Changes,
    until: Option<Instant>,
}

impl InForce {
    /// A stream with this replica has opened.
    pub(super) fn restart(&mut self, from: &Endpoint) {
        self.next = Some(from.clone());
        self.changes.clear();
    }

    /// Whether the stream has yet to say its first table.
    pub(super) fn is_whole_next(&self) -> bool {
        self.next.is_some()
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
        let mut changes = std::mem::take(&mut self.changes);
        let next = self.next.take();
        let is_whole = next.is_some();
        if is_whole {
            // Streams that broke before their first table, or while it was not believed yet, do not count.
            let may_lag = !self.held.is_empty() || self.from.is_some() && self.from != next;
            (self.from, self.held, self.until) = (next, Changes::new(), None);
            if may_lag {
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

/// The services that a receiver's table leads to some revision, and which of them it has told the controller of.
#[derive(Debug, Default)]
pub struct Routed {
    changed: BTreeMap<Name, bool>,
    is_whole: bool,
    said: BTreeSet<Name>,
}

impl Routed {
    /// Takes in a batch that is to be put in force.
    pub fn follow(&mut self, batch: &RouteBatch) {
        if batch.is_whole {
            (self.is_whole, self.changed) = (true, BTreeMap::new());
        }
        for (key, change) in &batch.changes {
            let RouteKey::Service(name) = key else { continue };
            let leads = matches!(change, RouteChange::Service(it) if !it.targets.is_empty());
            self.changed.insert(name.clone(), leads);
        }
    }

    /// Everything taken in is in force: says so of each service.
    pub fn in_force(&mut self, reports: &Outbox<PodKey, PodItem>) {
        reports.set(PodKey::NamesRouted, PodItem::NamesRouted);
        let mut changed = std::mem::take(&mut self.changed);
        if std::mem::take(&mut self.is_whole) {
            // What a whole table does not name is gone.
            self.said.iter().for_each(|name| _ = changed.entry(name.clone()).or_insert(false));
        }
        for (name, leads) in changed {
            if leads && self.said.insert(name.clone()) {
                reports.set(PodKey::Routed(name.clone()), PodItem::Routed(name));
            } else if !leads && self.said.remove(&name) {
                reports.remove(&PodKey::Routed(name));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::SocketAddr, num::NonZeroU16};

    use super::*;
    use crate::wire::{Name, Path, Pod, Probe, Service, Target};

    fn replica(last: u8) -> Endpoint {
        Endpoint::Tcp { address: SocketAddr::from(([10, 0, 0, last], 80)), tls: false }
    }

    fn pod(phase: PodPhase) -> RouteChange {
        let probe = Probe::listens();
        RouteChange::Pod(Box::new(Pod {
            uid: "p".into(),
            name: "p".into(),
            revision: Name::new("a", "b"),
            node: "n".into(),
            zone: String::new(),
            phase,
            address: None,
            port: NonZeroU16::MIN,
            also: None,
            confirmed: false,
            probe,
        }))
    }

    fn says(table: &mut InForce, change: RouteChange) -> Option<RouteBatch> {
        table.absorb(RouteItem { version: 1, change })
    }

    /// What the replica's whole table says of the pod, and what is passed on of that.
    fn whole(table: &mut InForce, from: &Endpoint, phase: PodPhase) -> PodPhase {
        table.restart(from);
        says(table, pod(phase));
        let batch = says(table, RouteChange::Synced).expect("a batch");
        match batch.changes.into_values().next() {
            Some(RouteChange::Pod(pod)) => pod.phase,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_stays_draining_although_the_move_takes_two_streams() {
        let (ahead, behind) = (replica(1), replica(2));
        let mut table = InForce::default();
        whole(&mut table, &ahead, PodPhase::Draining);
        table.restart(&behind);
        says(&mut table, pod(PodPhase::Ready));
        // That stream broke in the middle of its table.
        assert_eq!(whole(&mut table, &behind, PodPhase::Ready), PodPhase::Draining);
        // And this one before the replica had time to catch up.
        assert_eq!(whole(&mut table, &behind, PodPhase::Ready), PodPhase::Draining);
        assert!(table.held_until().is_some());
        table.release();
        assert_eq!(whole(&mut table, &behind, PodPhase::Ready), PodPhase::Ready);
    }

    #[test]
    fn a_replica_is_believed_at_once_where_it_was_followed_before() {
        let (one, other) = (replica(1), replica(2));
        let mut table = InForce::default();
        whole(&mut table, &one, PodPhase::Draining);
        table.restart(&other);
        assert_eq!(whole(&mut table, &one, PodPhase::Ready), PodPhase::Ready);
    }

    #[test]
    fn every_service_that_leads_somewhere_is_named_once_it_is_in_force() {
        let service = |name: &str, leads: bool| {
            let name = Name::new("default", name);
            let target = Target { revision: Name::new("default", "r"), percent: 100 };
            let targets = leads.then_some(target).into_iter().collect();
            let key = RouteKey::Service(name.clone());
            let service = Service {
                name,
                addresses: Vec::new(),
                port: NonZeroU16::MIN,
                activator_port: NonZeroU16::MIN,
                targets,
                path: Path::Direct,
                hosts: Vec::new(),
                ingress: None,
            };
            (key, RouteChange::Service(service))
        };
        let batch = |is_whole, changes: Vec<(RouteKey, RouteChange)>| RouteBatch {
            version: 1,
            is_whole,
            changes: changes.into_iter().collect(),
        };
        let (reports, mut routed) = (Outbox::new(), Routed::default());
        let said = |reports: &Outbox<PodKey, PodItem>, name: &str| {
            reports.get(&PodKey::Routed(Name::new("default", name))).is_some()
        };
        routed.follow(&batch(true, vec![service("a", true), service("b", false)]));
        assert!(!said(&reports, "a"), "it is not in force yet");
        routed.in_force(&reports);
        assert_eq!(reports.get(&PodKey::NamesRouted), Some(PodItem::NamesRouted));
        assert_eq!([said(&reports, "a"), said(&reports, "b")], [true, false]);
        routed.follow(&batch(false, vec![service("b", true)]));
        routed.in_force(&reports);
        assert_eq!([said(&reports, "a"), said(&reports, "b")], [true, true]);
        // Another replica's table, which lacks one.
        routed.follow(&batch(true, vec![service("b", true)]));
        routed.in_force(&reports);
        assert_eq!([said(&reports, "a"), said(&reports, "b")], [false, true]);
        let gone = RouteKey::Service(Name::new("default", "b"));
        routed.follow(&batch(false, vec![(gone.clone(), RouteChange::Gone(gone))]));
        routed.in_force(&reports);
        assert!(!said(&reports, "b"));
    }
}
