//! Shell: the other activators as this one sees them, and the claims and grants to be sent to them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use common::{
    outbox::Outbox,
    tls::accept::KnownAddresses,
    wire::{NamespacedName, SlotClaim, SlotGrant},
};
use tokio::sync::watch;

use crate::slots::{
    peer_view::{ActivatorName, PeerView, without_ended},
    revision_slots::SlotMessages,
};

/// Time after which an activator that is not listed and has no stream is taken to be gone. It is long enough to open a
/// broken stream again, and to notice a dead connection.
const PEER_GONE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which an activator that refuses connections has ended: by then no older table is in force anywhere.
const PEER_REFUSED_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after its first table for which an activator is new, by the same rule as [`PEER_REFUSED_TIMEOUT`].
const NEW_ACTIVATOR_PERIOD: Duration = PEER_REFUSED_TIMEOUT;

/// Other activators as this one sees them, and the outboxes for their claims and grants.
#[derive(Debug)]
pub struct Peers {
    view: RwLock<Arc<PeerView>>,
    known_peers: Mutex<KnownPeers>,
    outboxes: Mutex<PeerOutboxes>,
    /// Addresses of the other activators that the RouteTable lists.
    pub(crate) dial_targets: watch::Sender<BTreeMap<ActivatorName, SocketAddr>>,
    /// All addresses of the activators that the RouteTable lists.
    known_addresses: watch::Sender<BTreeSet<IpAddr>>,
    /// Port of the streams between activators, the same at each; `None`: there are no such streams.
    pub(crate) peer_port: Option<NonZeroU16>,
    /// Addresses of this activator.
    pub(crate) addresses: Vec<IpAddr>,
}

#[derive(Debug, Default)]
pub(crate) struct KnownPeers {
    /// Time at which the first table came; `None`: none has come.
    first_table_at: Option<Instant>,
    /// Activators that the RouteTable lists, with their addresses.
    listed: BTreeMap<ActivatorName, Vec<IpAddr>>,
    /// Holders with an open stream to this activator.
    pub(crate) connected: BTreeSet<ActivatorName>,
    /// Activators that are neither listed nor connected any more, with the time of that change.
    pub(crate) left_since: BTreeMap<ActivatorName, Instant>,
    /// Activators that have announced their end, or have refused connections for a while.
    pub(crate) ended: BTreeSet<ActivatorName>,
    /// Activators that refuse connections, with the time of the first refusal.
    refused_since: BTreeMap<ActivatorName, Instant>,
}

impl KnownPeers {
    /// Registers that no process listens at the activator's address. If that lasts, the activator has ended: none of
    /// its requests goes on. An open stream of it disproves that.
    pub(crate) fn on_refused(&mut self, peer: &ActivatorName) {
        let since = *self.refused_since.entry(peer.clone()).or_insert_with(Instant::now);
        if since.elapsed() >= PEER_REFUSED_TIMEOUT && !self.connected.contains(peer) {
            self.ended.insert(peer.clone());
        }
    }

    /// Registers a sign of life of an activator.
    pub(crate) fn on_alive(&mut self, peer: &ActivatorName) {
        self.ended.remove(peer);
        self.refused_since.remove(peer);
    }
}

#[derive(Debug, Default)]
struct PeerOutboxes {
    /// Claims of this activator, by owner.
    claims: HashMap<ActivatorName, Outbox<NamespacedName, SlotClaim>>,
    /// Grants of this activator, by holder.
    grants: HashMap<ActivatorName, Outbox<NamespacedName, SlotGrant>>,
    /// Number of each holder's latest stream: only messages of that one count.
    latest_streams: HashMap<ActivatorName, Arc<Mutex<u64>>>,
}

impl Peers {
    /// Creates the state of an activator that has met no other one. Without a port it never meets any.
    pub fn new(own_name: &str, peer_port: Option<NonZeroU16>, addresses: Vec<IpAddr>) -> Self {
        let view = Arc::new(PeerView {
            own_name: own_name.into(),
            is_new_activator: peer_port.is_some(),
            ..PeerView::default()
        });
        Self {
            view: RwLock::new(view),
            known_peers: Mutex::default(),
            outboxes: Mutex::default(),
            dial_targets: watch::Sender::default(),
            known_addresses: watch::Sender::default(),
            peer_port,
            addresses,
        }
    }

    /// Activators as this one sees them now.
    pub fn view(&self) -> Arc<PeerView> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the view of the other activators.
    #[cfg(test)]
    pub(crate) fn replace_view(&self, view: PeerView) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
    }

    /// Applies the activators of the RouteTable, with their addresses. Returns true if the view has changed.
    pub fn set_listed(&self, all: impl IntoIterator<Item = (ActivatorName, Vec<IpAddr>)>) -> bool {
        // Without a port there are no streams: the activator stays alone in its view.
        let Some(port) = self.peer_port else { return false };
        let listed: BTreeMap<_, _> = all.into_iter().collect();
        let others = listed.iter().filter(|(peer, _)| **peer != self.view().own_name);
        let dial = |(peer, addresses): (&ActivatorName, &Vec<IpAddr>)| {
            Some((peer.clone(), SocketAddr::new(self.reachable_address(addresses)?, port.get())))
        };
        let dials: BTreeMap<_, _> = others.filter_map(dial).collect();
        let addresses = listed.values().flatten().copied().collect();
        // The accept loop reads the present value: nothing waits for a change.
        self.known_addresses.send_replace(addresses);
        // An activator that is no longer listed may still have requests at pods, and so is known for a while.
        let has_changed = self.update_view(|peers| {
            peers.first_table_at.get_or_insert_with(Instant::now);
            let before = std::mem::replace(&mut peers.listed, listed);
            peers.left_since.extend(before.into_keys().map(|peer| (peer, Instant::now())));
        });
        self.dial_targets.send_if_modified(|targets| {
            let differs = *targets != dials;
            *targets = dials;
            differs
        });
        has_changed
    }

    /// Returns the addresses of the activators that the RouteTable lists, from which they dial.
    pub(crate) fn known_addresses(&self) -> KnownAddresses {
        self.known_addresses.subscribe()
    }

    /// Address of another activator in an IP family that this one has too; otherwise its first address.
    fn reachable_address(&self, all: &[IpAddr]) -> Option<IpAddr> {
        let has_own_family =
            |it: &&IpAddr| self.addresses.iter().any(|own| own.is_ipv4() == it.is_ipv4());
        all.iter().find(has_own_family).or_else(|| all.first()).copied()
    }

    /// Applies `change` and computes the view again. Returns true if the view has changed.
    pub(crate) fn update_view(&self, change: impl FnOnce(&mut KnownPeers)) -> bool {
        let mut known_peers = self.known_peers.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut known_peers);
        let KnownPeers { first_table_at, listed, connected, left_since, ended, refused_since } =
            &mut *known_peers;
        let is_new_activator = first_table_at.is_none_or(|it| it.elapsed() < NEW_ACTIVATOR_PERIOD);
        left_since.retain(|peer, since| {
            let is_back = listed.contains_key(peer) || connected.contains(peer);
            !is_back && since.elapsed() < PEER_GONE_TIMEOUT && !ended.contains(peer)
        });
        // Only listed activators are remembered as ended: others are not in the view anyway.
        ended.retain(|peer| listed.contains_key(peer));
        refused_since.retain(|peer, _| listed.contains_key(peer));
        // The view is replaced while `known_peers` is locked, so that no older view overwrites a newer one.
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let listed = without_ended(&listed.keys().cloned().collect(), ended);
        let others = listed.iter().chain(&*connected).chain(left_since.keys());
        let others = others.filter(|peer| **peer != view.own_name && !ended.contains(*peer));
        let alive = others.cloned().collect();
        let (own_name, connected) = (view.own_name.clone(), connected.clone());
        let next = PeerView { own_name, listed, alive, connected, is_new_activator };
        let has_changed = **view != next;
        if has_changed {
            *view = Arc::new(next);
        }
        has_changed
    }

    /// Puts the claims and grants of a Revision into the outboxes of their receivers.
    pub fn publish(&self, revision: &NamespacedName, messages: SlotMessages) {
        if messages == SlotMessages::default() {
            return;
        }
        // The outboxes keep the latest state of each Revision, so the memory of a slow stream is bounded.
        let mut outboxes = self.lock_outboxes();
        for (peer, claim) in messages.claims {
            let outbox = outboxes.claims.entry(peer).or_default();
            match claim {
                Some(claim) => outbox.set(revision.clone(), claim),
                None => outbox.remove(revision),
            }
        }
        for (peer, grant) in messages.grants {
            let outbox = outboxes.grants.entry(peer).or_default();
            match grant {
                Some(grant) => outbox.set(revision.clone(), grant),
                None => outbox.remove(revision),
            }
        }
    }

    fn lock_outboxes(&self) -> MutexGuard<'_, PeerOutboxes> {
        self.outboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn claims_outbox(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotClaim> {
        self.lock_outboxes().claims.entry(to.clone()).or_default().clone()
    }

    pub(crate) fn grants_outbox(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotGrant> {
        self.lock_outboxes().grants.entry(to.clone()).or_default().clone()
    }

    /// Number of the holder's latest stream, shared by all of its streams.
    pub(crate) fn latest_stream(&self, of: &ActivatorName) -> Arc<Mutex<u64>> {
        Arc::clone(self.lock_outboxes().latest_streams.entry(of.clone()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_of_listed_activators_are_known() {
        let peers = Peers::new("a", NonZeroU16::new(7120), Vec::new());
        let known = peers.known_addresses();
        let addresses: [IpAddr; 2] = [[10, 0, 0, 2].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 2].into()];
        peers.set_listed([("b".into(), addresses.to_vec())]);
        assert_eq!(*known.borrow(), BTreeSet::from(addresses));
        peers.set_listed([]);
        assert_eq!(*known.borrow(), BTreeSet::new());
    }
}
