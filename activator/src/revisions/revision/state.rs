//! Shell: the state of one Revision: its settings, its wait queue, its pods and its slots.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use common::wire::{AppProtocol, NamespacedName, RequestTotals, SlotsByPod};
use smol_str::SmolStr;
use tokio::sync::oneshot;

use super::{ActivatorRevision, PodPermit, RevisionContext};
use crate::{
    budget::WaitQueueBounds,
    pods::{
        endpoint::{PodEndpoint, PodIdentity},
        endpoint_key::PodEndpointKey,
    },
    revisions::{
        balance::PodRank,
        route_settings::{
            ActivatorTopology, PodRanking, PodServingAddress, PodTable, PodTableEntry,
            RevisionRouteSettings,
        },
        wait_queue::{DispatchedRequest, WaitQueue},
    },
    slots::revision_slots::RevisionSlots,
};

/// State of a Revision behind its lock.
#[derive(Debug, Default)]
pub(super) struct LockedRevisionState {
    /// Settings from the RouteTable; `None`: the table does not contain the Revision.
    pub(super) route_settings: Option<RevisionRouteSettings>,
    pub(super) totals: RequestTotals,
    /// Wait queue and pods. Created for the first pod or request, dropped when there is neither.
    pub(super) active: Option<Box<ActiveRevisionState>>,
    /// State of the hard limit. Created when requests need slots, or when another activator sends a claim or grant.
    pub(super) slots: Option<Box<RevisionSlots>>,
}

/// State of a Revision while it has pods or requests.
#[derive(Debug)]
pub(super) struct ActiveRevisionState {
    pub(super) wait_queue: WaitQueue<oneshot::Sender<PodPermit>>,
    pub(super) pods: HashMap<PodEndpointKey, Arc<PodEndpoint>>,
    /// Start of the time in which the RouteTable lists at least one ready pod.
    pub(super) ready_since: Option<Instant>,
    /// Number of queue entries that have an arrival number, and may wait again.
    pub(super) queue_entries: usize,
    /// Client of the request that began to wait while no other one did; `None`: it is not known.
    pub(super) first_client: Option<IpAddr>,
}

impl LockedRevisionState {
    /// Hard limit of each pod, and the protocol of the pods' serving port.
    pub(super) fn limit_and_protocol(&self) -> (u32, AppProtocol) {
        self.route_settings
            .as_ref()
            .map_or((0, AppProtocol::Http1), |it| (it.concurrency_limit, it.protocol))
    }

    /// Slots of the Revision, created if needed. Requests that are already at pods use some of them.
    pub(super) fn ensure_slots(
        &mut self,
        name: &NamespacedName,
        context: &RevisionContext,
    ) -> &mut RevisionSlots {
        let active = &self.active;
        self.slots.get_or_insert_with(|| {
            let mut slots = RevisionSlots::new(name.clone(), context.peers.view());
            slots.set_in_use(
                active.as_ref().map(|active| active.requests_by_pod()).unwrap_or_default(),
            );
            Box::new(slots)
        })
    }

    /// Creates the slots if the Revision has a hard limit: an arriving request then needs a slot.
    pub(super) fn ensure_slots_if_limited(&mut self, revision: &ActivatorRevision) {
        if self.limit_and_protocol().0 > 0 && self.slots.is_none() {
            self.ensure_slots(&revision.name, &revision.context);
        }
    }

    /// Registers that one request is sent to `pod`.
    pub(super) fn on_dispatched_to(&mut self, pod: &PodEndpoint) {
        if let Some(slots) = &mut self.slots {
            slots.on_dispatched(&pod.uid);
        }
    }

    /// Registers that these requests are sent to pods.
    pub(super) fn on_dispatched<W>(&mut self, dispatched: &[DispatchedRequest<W>]) {
        let (Some(active), Some(slots)) = (&self.active, &mut self.slots) else { return };
        dispatched
            .iter()
            .filter_map(|(_, key)| active.pods.get(key))
            .for_each(|pod| slots.on_dispatched(&pod.uid));
    }

    /// Wait queue and pods, created if needed.
    pub(super) fn ensure_active(&mut self, bounds: WaitQueueBounds) -> &mut ActiveRevisionState {
        self.active.get_or_insert_with(|| {
            let wait_queue = WaitQueue::new(bounds);
            Box::new(ActiveRevisionState {
                wait_queue,
                pods: HashMap::new(),
                ready_since: None,
                queue_entries: 0,
                first_client: None,
            })
        })
    }

    /// Drops the queue and the pods if there are no pods and no requests.
    pub(super) fn drop_if_idle(&mut self) {
        let is_idle = |active: &mut Box<ActiveRevisionState>| {
            active.pods.is_empty()
                && active.queue_entries == 0
                && active.wait_queue.in_flight() == 0
        };
        drop(self.active.take_if(is_idle));
    }
}

impl ActiveRevisionState {
    /// Uids of the pods that may take requests, including paused ones.
    pub(super) fn ready_pod_uids(&self) -> BTreeSet<SmolStr> {
        let ready = self.wait_queue.ready_pods().filter_map(|key| self.pods.get(&key));
        ready.map(|pod| pod.uid.clone()).collect()
    }

    /// Uids of the ready pods that come last because of their standby orders.
    pub(super) fn standby_pod_uids(&self) -> BTreeSet<SmolStr> {
        let is_standby = |key: &PodEndpointKey| self.wait_queue.rank(*key) == PodRank::Standby;
        let standby = self.wait_queue.ready_pods().filter(is_standby);
        standby.filter_map(|key| self.pods.get(&key)).map(|pod| pod.uid.clone()).collect()
    }

    /// Number of waiting requests, and uids of the pods that take requests.
    pub(super) fn queue_state(&self) -> (u32, BTreeSet<SmolStr>) {
        let open = self.wait_queue.open_pods().filter_map(|key| self.pods.get(&key));
        let waiting = u32::try_from(self.wait_queue.waiting_count()).unwrap_or(u32::MAX);
        (waiting, open.map(|pod| pod.uid.clone()).collect())
    }

    /// Number of requests at pods, by uid.
    fn requests_by_pod(&self) -> SlotsByPod {
        let mut counts = SlotsByPod::new();
        for (key, pod) in &self.pods {
            if let Some(slots) = NonZeroU32::new(self.wait_queue.in_flight_at(*key)) {
                *counts.entry(pod.uid.clone()).or_default() += slots.get();
            }
        }
        counts
    }

    /// Keeps a [`PodEndpoint`] for each address at which a pod of the RouteTable takes requests, and ranks the pods for
    /// an activator at its place. Returns the keys of the pods that take requests, sorted.
    pub(super) fn update_pods(
        &mut self,
        table: &PodTable,
        topology: &ActivatorTopology,
        (limit, protocol): (u32, AppProtocol),
        context: &RevisionContext,
    ) -> Vec<PodEndpointKey> {
        let mut before = FormerEndpoints::new(self.pods.drain());
        let ranking = PodRanking::new(table, limit, topology);
        let (mut ready, mut ranks) = (Vec::new(), Vec::new());
        for (uid, it) in table {
            let (takes_requests, rank) = (it.takes_requests(limit), ranking.rank(it));
            // Several ports of one pod do not share the slots of a hard limit. Only scaled Services have several, and
            // these have no hard limit.
            for address in it.serving_addresses(protocol) {
                let pod = before.take_or_create(uid, it, address, context);
                pod.set_ready(takes_requests);
                pod.set_standby(it.standby);
                if takes_requests {
                    ready.push(pod.key);
                    ranks.push((pod.key, rank));
                }
                self.pods.insert(pod.key, pod);
            }
        }
        before.close_connections();
        self.wait_queue.set_ranks(ranks);
        self.wait_queue.set_starting_pods(starting_pods(table, limit));
        ready.sort_unstable();
        ready
    }
}

/// Number of pods that the table lists as starting, and that take no requests yet.
pub(super) fn starting_pods(table: &PodTable, limit: u32) -> usize {
    table.values().filter(|pod| pod.is_starting && !pod.takes_requests(limit)).count()
}

/// Endpoints before a change of the table, by uid, service port and address. Each keeps its connections if the table
/// still has it; with another address it is a new endpoint, with a new key.
struct FormerEndpoints(HashMap<(SmolStr, Option<NonZeroU16>, SocketAddr), Arc<PodEndpoint>>);

impl FormerEndpoints {
    fn new(pods: impl Iterator<Item = (PodEndpointKey, Arc<PodEndpoint>)>) -> Self {
        Self(
            pods.map(|(key, pod)| ((pod.uid.clone(), key.service_port, key.address), pod))
                .collect(),
        )
    }

    /// Takes out the endpoint of a pod at this address, or creates it.
    fn take_or_create(
        &mut self,
        uid: &str,
        entry: &PodTableEntry,
        serving: PodServingAddress,
        context: &RevisionContext,
    ) -> Arc<PodEndpoint> {
        let PodServingAddress { service_port, address, protocol } = serving;
        let identity = PodIdentity { uid: uid.into(), name: entry.name.clone() };
        let former = (identity.uid.clone(), service_port, address);
        // Its connections are of no use for another protocol.
        if self.0.get(&former).is_some_and(|pod| pod.protocol() == protocol)
            && let Some(pod) = self.0.remove(&former)
        {
            return pod;
        }
        let id = context.next_pod_id.fetch_add(1, Ordering::Relaxed);
        let key = PodEndpointKey { service_port, address, id };
        Arc::new(PodEndpoint::new(key, identity, protocol, context.pod_settings.clone()))
    }

    /// Closes the idle connections of endpoints that the table does not have any more. Their last requests end, and no
    /// connection of theirs is used again.
    fn close_connections(self) {
        for pod in self.0.values() {
            pod.set_ready(false);
            pod.set_standby(None);
        }
    }
}
