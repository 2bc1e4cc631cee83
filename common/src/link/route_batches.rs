//! Shell: batches from the items of RouteTable streams, across a change of the replica.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::RandomState,
    time::Duration,
};

use prost::{DecodeError, Message as _};
use tokio::time::Instant;

use super::{
    PodReportKey,
    known_items::{ItemDigest, KnownItems},
    serve,
};
use crate::{
    outbox::Outbox,
    replicas::ReplicaEndpoint,
    wire::{
        NamespacedName, PodReportItem, RouteChange, RouteItem, RouteKey, RoutingPhase,
        ServiceEntry, raw,
    },
};

/// Newest states of changed subjects, by key.
pub type RouteChanges = BTreeMap<RouteKey, RouteChange>;

/// Time by which a newly followed replica may lag behind the former one.
const REPLICA_LAG: Duration = Duration::from_secs(1);

/// Changes of one batch of a RouteTable stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteBatch {
    /// Version of the table that includes all changes of the batch.
    pub version: u64,
    /// True for the first table of a receiver: every subject that it does not name is removed.
    pub is_snapshot: bool,
    /// True for the first batch of a stream. The table of each later stream is a batch of what differs from the table in
    /// force, with the removals.
    pub begins_stream: bool,
    /// Newest state of each subject that changed.
    pub changes: RouteChanges,
}

impl RouteBatch {
    /// Merges the next batch into this one.
    pub fn merge(&mut self, next: Self) {
        if next.is_snapshot {
            *self = next;
            return;
        }
        self.version = next.version;
        self.begins_stream |= next.begins_stream;
        self.changes.extend(next.changes);
    }
}

/// Effect of one item.
#[derive(Debug)]
pub(super) enum ItemEffect {
    /// The item is known, and was not decoded.
    Known,
    /// The item was decoded. Its batch has not ended.
    Pending,
    /// The item ended this batch.
    Ended(RouteBatch),
}

/// State of the table in force, kept across broken streams.
///
/// Only items that differ from the newest one of their subject are decoded. So a table that comes again costs little, and
/// what is passed on are its differences.
///
/// A receiver that acknowledged the drain of a pod must still avoid it after a move to a replica that does not know of
/// the drain yet. Such a pod stays draining for a second, unless the new replica sends its state again after its first
/// table.
#[derive(Debug)]
pub(super) struct RouteStreamState {
    known_items: KnownItems,
    /// Replica whose table is in force; `None`: no table is.
    replica: Option<ReplicaEndpoint>,
    /// Replica whose open stream has not sent its first whole table.
    next_replica: Option<ReplicaEndpoint>,
    version: u64,
    /// Changes of the batch that `Synced` has not ended yet.
    pending_changes: RouteChanges,
    /// Uids of the pods that drain in the table in force.
    draining_pods: BTreeSet<String>,
    /// States of pods that the new replica does not know to be draining, to be passed on at `held_until`.
    held_changes: RouteChanges,
    held_until: Option<Instant>,
}

impl Default for RouteStreamState {
    fn default() -> Self {
        Self {
            known_items: KnownItems::new([RandomState::new(), RandomState::new()]),
            replica: None,
            next_replica: None,
            version: 0,
            pending_changes: RouteChanges::new(),
            draining_pods: BTreeSet::new(),
            held_changes: RouteChanges::new(),
            held_until: None,
        }
    }
}

impl RouteStreamState {
    /// Begins a stream from this replica.
    pub(super) fn begin_stream(&mut self, from: &ReplicaEndpoint) {
        self.next_replica = Some(from.clone());
        // They were not passed on, so their items are new again.
        for key in std::mem::take(&mut self.pending_changes).into_keys() {
            self.known_items.forget(&key);
        }
        self.known_items.begin_stream();
    }

    /// Returns true if the stream has not sent its first whole table.
    pub(super) fn next_is_snapshot(&self) -> bool {
        self.next_replica.is_some()
    }

    /// Returns the time at which [`release_held`](Self::release_held) is due.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.held_until
    }

    /// Applies one encoded item. An item that is refused has no effect.
    pub(super) fn apply_encoded(&mut self, item: &[u8]) -> Result<ItemEffect, DecodeError> {
        let digest = self.known_items.digest(item);
        if self.known_items.recall(digest) {
            return Ok(ItemEffect::Known);
        }
        let item = raw::RouteItem::decode(item)?;
        let Some(RouteItem { version, change }) = serve::parse_item(item) else {
            return Ok(ItemEffect::Pending);
        };
        // Only `Synced`, which ends a batch, has no key.
        match change.key() {
            Some(key) => {
                self.add_change(key, digest, change);
                Ok(ItemEffect::Pending)
            }
            None => Ok(ItemEffect::Ended(self.end_batch(version))),
        }
    }

    fn add_change(&mut self, key: RouteKey, digest: ItemDigest, change: RouteChange) {
        if !matches!(change, RouteChange::Removed(_)) {
            self.known_items.record(&key, digest);
        } else if self.known_items.knows(&key) {
            // It stays known until the batch ends: if the stream breaks before, the next one has to remove it.
            self.known_items.forget(&key);
        } else {
            return;
        }
        self.pending_changes.insert(key, change);
    }

    fn end_batch(&mut self, version: u64) -> RouteBatch {
        self.version = version;
        let mut changes = std::mem::take(&mut self.pending_changes);
        let next = self.next_replica.take();
        let begins_stream = next.is_some();
        let is_snapshot = begins_stream && self.replica.is_none();
        if begins_stream {
            // A whole table has no items for what is gone.
            let unnamed = self.known_items.unnamed(|key| changes.contains_key(key));
            changes.extend(unnamed.into_iter().map(|key| (key.clone(), RouteChange::Removed(key))));
            // `replica` is the sender of the table in force: a stream that broke before its first `Synced` never set
            // it. That replica cannot lag behind itself, unless changes are still held for it.
            let may_lag =
                !self.held_changes.is_empty() || self.replica.is_some() && self.replica != next;
            (self.replica, self.held_changes, self.held_until) = (next, RouteChanges::new(), None);
            if may_lag {
                self.hold_draining(&mut changes);
            }
        } else {
            self.held_changes.retain(|key, _| !changes.contains_key(key));
        }
        for change in changes.values() {
            if let RouteChange::Removed(key) = change {
                self.known_items.remove(key);
            }
        }
        self.update_draining(&changes);
        RouteBatch { version, is_snapshot, begins_stream, changes }
    }

    /// Returns the held changes, after the new replica has had time to catch up.
    pub(super) fn release_held(&mut self) -> RouteBatch {
        self.held_until = None;
        let changes = std::mem::take(&mut self.held_changes);
        self.update_draining(&changes);
        RouteBatch { version: self.version, changes, ..RouteBatch::default() }
    }

    fn hold_draining(&mut self, changes: &mut RouteChanges) {
        for uid in &self.draining_pods {
            let key = RouteKey::Pod(uid.clone());
            let Some(RouteChange::Pod(pod)) = changes.get_mut(&key) else { continue };
            // Only what brings requests is held back; address and probe of the new table hold at once.
            if pod.phase != RoutingPhase::Draining {
                // The state that is passed on is another one, so that the same item is news if it comes again.
                self.known_items.forget(&key);
                self.held_changes.insert(key, RouteChange::Pod(pod.clone()));
                pod.phase = RoutingPhase::Draining;
                // It gets no request, whatever its agent reports.
                pod.awaits_report = false;
                // It ends its last requests, so it must not be frozen.
                pod.standby = None;
            }
        }
        self.held_until = (!self.held_changes.is_empty()).then(|| Instant::now() + REPLICA_LAG);
    }

    fn update_draining(&mut self, changes: &RouteChanges) {
        update_draining_pods(&mut self.draining_pods, changes);
    }
}

fn update_draining_pods(draining: &mut BTreeSet<String>, changes: &RouteChanges) {
    for (key, change) in changes {
        let RouteKey::Pod(uid) = key else { continue };
        match change {
            RouteChange::Pod(pod) if pod.phase == RoutingPhase::Draining => {
                draining.insert(uid.clone());
            }
            _ => drop(draining.remove(uid)),
        }
    }
}

/// Draining pods of a receiver's table, and the drain acknowledgements that it has sent.
///
/// An acknowledgement means the same to every replica, whereas table versions compare only within one stream.
#[derive(Debug, Default)]
pub struct DrainAckReporter {
    draining: BTreeSet<String>,
    acknowledged: BTreeSet<String>,
}

impl DrainAckReporter {
    /// Records a batch that is about to be put in force.
    pub fn record_batch(&mut self, batch: &RouteBatch) {
        if batch.is_snapshot {
            self.draining.clear();
        }
        update_draining_pods(&mut self.draining, &batch.changes);
    }

    /// Acknowledges every draining pod, once all recorded batches are in force.
    pub fn acknowledge(&mut self, reports: &Outbox<PodReportKey, PodReportItem>) {
        for uid in self.acknowledged.difference(&self.draining) {
            reports.remove(&PodReportKey::DrainAck(uid.clone()));
        }
        for uid in self.draining.difference(&self.acknowledged) {
            reports.set(PodReportKey::DrainAck(uid.clone()), PodReportItem::DrainAck(uid.clone()));
        }
        self.acknowledged.clone_from(&self.draining);
    }
}

/// Services of a receiver's table that it reports as routed, and those among them that it has reported.
#[derive(Debug, Default)]
pub struct RoutedServiceReporter {
    choice: ReportedServices,
    /// Services of the recorded batches; true for those that are to be reported.
    changed: BTreeMap<NamespacedName, bool>,
    /// True if the recorded batches began with a whole table.
    is_snapshot: bool,
    reported: BTreeSet<NamespacedName>,
}

/// Services that a receiver reports as routed.
#[derive(Clone, Copy, Debug, Default)]
enum ReportedServices {
    /// Services that are routed to some Revision, by an activator.
    #[default]
    Routed,
    /// Services that await agents, by an agent. All others would be too many: each agent knows all services.
    Awaited,
}

impl ReportedServices {
    fn includes(self, service: &ServiceEntry) -> bool {
        match self {
            Self::Routed => !service.targets.is_empty(),
            Self::Awaited => service.awaits_agents,
        }
    }

    /// Returns the item that announces the reports, with its key.
    fn announcement(self) -> (PodReportKey, PodReportItem) {
        match self {
            Self::Routed => {
                (PodReportKey::RoutedServicesAnnounced, PodReportItem::RoutedServicesAnnounced)
            }
            Self::Awaited => {
                (PodReportKey::AwaitedServicesAnnounced, PodReportItem::AwaitedServicesAnnounced)
            }
        }
    }
}

impl RoutedServiceReporter {
    /// Creates the reporter of an agent, which reports the services that await agents. The default one is an
    /// activator's, and reports those that are routed to some Revision.
    pub fn of_awaited_services() -> Self {
        Self { choice: ReportedServices::Awaited, ..Self::default() }
    }

    /// Records a batch that is about to be put in force.
    pub fn record_batch(&mut self, batch: &RouteBatch) {
        if batch.is_snapshot {
            (self.is_snapshot, self.changed) = (true, BTreeMap::new());
        }
        for (key, change) in &batch.changes {
            let RouteKey::Service(name) = key else { continue };
            let is_reported =
                matches!(change, RouteChange::Service(it) if self.choice.includes(it));
            self.changed.insert(name.clone(), is_reported);
        }
    }

    /// Reports each such service, once all recorded batches are in force.
    pub fn report_services(&mut self, reports: &Outbox<PodReportKey, PodReportItem>) {
        let (key, announcement) = self.choice.announcement();
        reports.set(key, announcement);
        let mut changed = std::mem::take(&mut self.changed);
        if std::mem::take(&mut self.is_snapshot) {
            // A subject that a whole table omits is removed.
            self.reported.iter().for_each(|name| _ = changed.entry(name.clone()).or_insert(false));
        }
        for (name, is_reported) in changed {
            if is_reported && self.reported.insert(name.clone()) {
                reports.set(
                    PodReportKey::RoutedService(name.clone()),
                    PodReportItem::RoutedService(name),
                );
            } else if !is_reported && self.reported.remove(&name) {
                reports.remove(&PodReportKey::RoutedService(name));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::{
        fixtures,
        wire::{NamespacedName, PodEntry},
    };

    fn replica(last: u8) -> ReplicaEndpoint {
        ReplicaEndpoint::Tcp { address: SocketAddr::from(([10, 0, 0, last], 80)), tls: false }
    }

    /// Returns a pod with an address, without which a ready one is refused.
    fn pod_entry(phase: RoutingPhase) -> PodEntry {
        let pod = fixtures::pod("p", &NamespacedName::new("a", "b"), phase);
        PodEntry { address: Some(SocketAddr::from(([10, 1, 0, 1], pod.port.get()))), ..pod }
    }

    fn pod(phase: RoutingPhase) -> RouteChange {
        RouteChange::Pod(pod_entry(phase).into())
    }

    fn encoded(version: u64, change: RouteChange) -> Vec<u8> {
        raw::RouteItem::from(RouteItem { version, change }).encode_to_vec()
    }

    fn apply_change(
        stream_state: &mut RouteStreamState,
        change: RouteChange,
    ) -> Option<RouteBatch> {
        match stream_state.apply_encoded(&encoded(1, change)).expect("a whole item") {
            ItemEffect::Known | ItemEffect::Pending => None,
            ItemEffect::Ended(batch) => Some(batch),
        }
    }

    /// Sends the replica's whole table with the pod, and returns the phase that is passed on.
    fn apply_whole_table(
        stream_state: &mut RouteStreamState,
        from: &ReplicaEndpoint,
        phase: RoutingPhase,
    ) -> RoutingPhase {
        stream_state.begin_stream(from);
        apply_change(stream_state, pod(phase));
        let batch = apply_change(stream_state, RouteChange::Synced).expect("a batch");
        match batch.changes.into_values().next() {
            Some(RouteChange::Pod(pod)) => pod.phase,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_stays_draining_although_the_move_takes_two_streams() {
        let (ahead, behind) = (replica(1), replica(2));
        let mut stream_state = RouteStreamState::default();
        apply_whole_table(&mut stream_state, &ahead, RoutingPhase::Draining);
        stream_state.begin_stream(&behind);
        apply_change(&mut stream_state, pod(RoutingPhase::Ready));
        // The stream broke in the middle of its table.
        assert_eq!(
            apply_whole_table(&mut stream_state, &behind, RoutingPhase::Ready),
            RoutingPhase::Draining
        );
        // This one breaks before the replica had time to catch up.
        assert_eq!(
            apply_whole_table(&mut stream_state, &behind, RoutingPhase::Ready),
            RoutingPhase::Draining
        );
        assert!(stream_state.held_until().is_some());
        stream_state.release_held();
        assert_eq!(
            apply_whole_table(&mut stream_state, &behind, RoutingPhase::Ready),
            RoutingPhase::Ready
        );
    }

    /// The item of the second replica is known, and the pod drains on all the same.
    #[test]
    fn a_pod_that_drains_at_two_replicas_stays_draining_at_a_third_one() {
        let [first, second, third] = [1, 2, 3].map(replica);
        let mut stream_state = RouteStreamState::default();
        apply_whole_table(&mut stream_state, &first, RoutingPhase::Draining);
        stream_state.begin_stream(&second);
        apply_change(&mut stream_state, pod(RoutingPhase::Draining));
        let batch = apply_change(&mut stream_state, RouteChange::Synced).expect("a batch");
        assert_eq!(batch.changes, RouteChanges::new());
        assert_eq!(
            apply_whole_table(&mut stream_state, &third, RoutingPhase::Ready),
            RoutingPhase::Draining
        );
        // Sent again after the first table, the same item is news.
        apply_change(&mut stream_state, pod(RoutingPhase::Ready));
        let batch = apply_change(&mut stream_state, RouteChange::Synced).expect("a batch");
        assert_eq!(batch.changes.into_values().collect::<Vec<_>>(), [pod(RoutingPhase::Ready)]);
        assert!(stream_state.release_held().changes.is_empty());
    }

    #[test]
    fn a_pod_that_stays_draining_awaits_no_report_and_has_no_standby_order() {
        let (ahead, behind) = (replica(1), replica(2));
        let mut stream_state = RouteStreamState::default();
        apply_whole_table(&mut stream_state, &ahead, RoutingPhase::Draining);
        stream_state.begin_stream(&behind);
        let standby = Some(fixtures::standby_order());
        let starting =
            PodEntry { awaits_report: true, standby, ..pod_entry(RoutingPhase::Starting) };
        apply_change(&mut stream_state, RouteChange::Pod(starting.into()));
        let batch = apply_change(&mut stream_state, RouteChange::Synced).expect("a batch");
        let passed_on = |batch: RouteBatch| match batch.changes.into_values().next() {
            Some(RouteChange::Pod(pod)) => (pod.phase, pod.awaits_report, pod.standby),
            other => panic!("{other:?}"),
        };
        assert_eq!(passed_on(batch), (RoutingPhase::Draining, false, None));
        let released = passed_on(stream_state.release_held());
        assert_eq!(released, (RoutingPhase::Starting, true, standby));
    }

    #[test]
    fn a_replica_is_trusted_at_once_if_it_was_followed_before() {
        let (one, other) = (replica(1), replica(2));
        let mut stream_state = RouteStreamState::default();
        apply_whole_table(&mut stream_state, &one, RoutingPhase::Draining);
        stream_state.begin_stream(&other);
        assert_eq!(
            apply_whole_table(&mut stream_state, &one, RoutingPhase::Ready),
            RoutingPhase::Ready
        );
    }

    #[test]
    fn every_routed_service_is_reported_once_it_is_in_force() {
        let service = |name: &str, has_target: bool| {
            let name = NamespacedName::new("default", name);
            let mut service = fixtures::service(&name, &NamespacedName::new("default", "r"));
            if !has_target {
                service.targets.clear();
            }
            (RouteKey::Service(name), RouteChange::Service(service))
        };
        let batch = |is_snapshot, changes: Vec<(RouteKey, RouteChange)>| RouteBatch {
            version: 1,
            is_snapshot,
            changes: changes.into_iter().collect(),
            ..RouteBatch::default()
        };
        let (reports, mut routed) = (Outbox::new(), RoutedServiceReporter::default());
        let is_reported = |reports: &Outbox<PodReportKey, PodReportItem>, name: &str| {
            reports
                .get(&PodReportKey::RoutedService(NamespacedName::new("default", name)))
                .is_some()
        };
        routed.record_batch(&batch(true, vec![service("a", true), service("b", false)]));
        assert!(!is_reported(&reports, "a"), "it is not in force yet");
        routed.report_services(&reports);
        assert_eq!(
            reports.get(&PodReportKey::RoutedServicesAnnounced),
            Some(PodReportItem::RoutedServicesAnnounced)
        );
        assert_eq!([is_reported(&reports, "a"), is_reported(&reports, "b")], [true, false]);
        routed.record_batch(&batch(false, vec![service("b", true)]));
        routed.report_services(&reports);
        assert_eq!([is_reported(&reports, "a"), is_reported(&reports, "b")], [true, true]);
        // The table of another replica, which lacks one service.
        routed.record_batch(&batch(true, vec![service("b", true)]));
        routed.report_services(&reports);
        assert_eq!([is_reported(&reports, "a"), is_reported(&reports, "b")], [false, true]);
        let removed = RouteKey::Service(NamespacedName::new("default", "b"));
        routed.record_batch(&batch(false, vec![(removed.clone(), RouteChange::Removed(removed))]));
        routed.report_services(&reports);
        assert!(!is_reported(&reports, "b"));
    }

    #[test]
    fn an_agent_reports_a_service_for_as_long_as_it_awaits_agents() {
        let name = NamespacedName::new("default", "a");
        let batch = |is_snapshot, awaits_agents| {
            let service = ServiceEntry { awaits_agents, ..fixtures::service(&name, &name) };
            let change = (RouteKey::Service(name.clone()), RouteChange::Service(service));
            RouteBatch {
                version: 1,
                is_snapshot,
                changes: [change].into(),
                ..RouteBatch::default()
            }
        };
        let (reports, mut awaited) = (Outbox::new(), RoutedServiceReporter::of_awaited_services());
        let key = PodReportKey::RoutedService(name.clone());
        awaited.record_batch(&batch(true, false));
        awaited.report_services(&reports);
        assert_eq!(
            [PodReportKey::AwaitedServicesAnnounced, PodReportKey::RoutedServicesAnnounced]
                .map(|key| reports.get(&key)),
            [Some(PodReportItem::AwaitedServicesAnnounced), None]
        );
        assert_eq!(reports.get(&key), None, "its Route was ready before");
        awaited.record_batch(&batch(false, true));
        assert_eq!(reports.get(&key), None, "it is not in force yet");
        awaited.report_services(&reports);
        assert_eq!(reports.get(&key), Some(PodReportItem::RoutedService(name.clone())));
        // Another replica, which knows already that the Route is ready.
        awaited.record_batch(&batch(true, false));
        awaited.report_services(&reports);
        assert_eq!(reports.get(&key), None);
    }
}
