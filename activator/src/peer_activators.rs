//! Shell: the other activators and the streams by which slots are passed between them.
//!
//! Each activator dials every other one that the RouteTable lists. On that stream it holds slots of the revisions which
//! the other one owns. Nothing is decided here: [`crate::slots`] computes the claims and grants.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    link::{
        self, ComponentLink, LinkError, ReplicaResolver, SlotStreamEvent, TlsAdmission,
        grant_stream,
    },
    outbox::Outbox,
    tls::{self, TlsCredentials, accept::AcceptLimits, peer::CertificateRole},
    wire::{
        ComponentReplica, ComponentRole, NamespacedName, SlotClaim, SlotClaimItem, SlotGrant,
        SlotGrantItem,
        raw::{
            self,
            slots_server::{Slots, SlotsServer},
        },
    },
};
use futures::{Stream, future::join_all};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{
    gateway::ActivatorGateway,
    slots::{ActivatorName, PeerView, SlotMessages, without_ended},
};

/// Time after which an activator that is not listed and has no stream is taken to be gone. It is long enough to open a
/// broken stream again, and to notice a dead connection.
const PEER_GONE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which an activator that refuses connections has ended: by then no older table is in force anywhere.
const PEER_REFUSED_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after its first table for which an activator is new, by the same rule as [`PEER_REFUSED_TIMEOUT`].
const NEW_ACTIVATOR_PERIOD: Duration = PEER_REFUSED_TIMEOUT;
/// Interval at which activators that are gone are looked for.
const VIEW_REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for announcing to owners that this activator ends.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// Other activators as this one sees them, and the outboxes for their claims and grants.
#[derive(Debug)]
pub struct Peers {
    view: RwLock<Arc<PeerView>>,
    known_peers: Mutex<KnownPeers>,
    outboxes: Mutex<PeerOutboxes>,
    /// Addresses of the other activators that the RouteTable lists.
    dial_targets: watch::Sender<BTreeMap<ActivatorName, SocketAddr>>,
    /// Port of the streams between activators, the same at each; `None`: there are no such streams.
    peer_port: Option<NonZeroU16>,
    /// Addresses of this activator.
    addresses: Vec<IpAddr>,
}

#[derive(Debug, Default)]
struct KnownPeers {
    /// Time at which the first table came; `None`: none has come.
    first_table_at: Option<Instant>,
    /// Activators that the RouteTable lists, with their addresses.
    listed: BTreeMap<ActivatorName, Vec<IpAddr>>,
    /// Holders with an open stream to this activator.
    connected: BTreeSet<ActivatorName>,
    /// Activators that are neither listed nor connected any more, with the time since when.
    left_since: BTreeMap<ActivatorName, Instant>,
    /// Activators that have announced their end, or have refused connections for a while.
    ended: BTreeSet<ActivatorName>,
    /// Activators that refuse connections, with the time since when.
    refused_since: BTreeMap<ActivatorName, Instant>,
}

impl KnownPeers {
    /// Registers that no process listens at the activator's address. If that lasts, the activator has ended: none of
    /// its requests goes on. An open stream of it disproves that.
    fn on_refused(&mut self, peer: &ActivatorName) {
        let since = *self.refused_since.entry(peer.clone()).or_insert_with(Instant::now);
        if since.elapsed() >= PEER_REFUSED_TIMEOUT && !self.connected.contains(peer) {
            self.ended.insert(peer.clone());
        }
    }

    /// Registers a sign of life of an activator.
    fn on_alive(&mut self, peer: &ActivatorName) {
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
    stream_numbers: HashMap<ActivatorName, Arc<Mutex<u64>>>,
}

impl Peers {
    /// Creates the state of an activator that has met no other one. Without a port it never meets any.
    pub fn new(own: &str, peer_port: Option<NonZeroU16>, addresses: Vec<IpAddr>) -> Self {
        let view = Arc::new(PeerView {
            own_name: own.into(),
            is_new_activator: peer_port.is_some(),
            ..PeerView::default()
        });
        Self {
            view: RwLock::new(view),
            known_peers: Mutex::default(),
            outboxes: Mutex::default(),
            dial_targets: watch::Sender::default(),
            peer_port,
            addresses,
        }
    }

    /// Activators as this one sees them now.
    pub fn view(&self) -> Arc<PeerView> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
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
        // An activator that is no longer listed may still have requests at pods, and so is known for a while.
        let is_other = self.update_view(|known| {
            known.first_table_at.get_or_insert_with(Instant::now);
            let before = std::mem::replace(&mut known.listed, listed);
            known.left_since.extend(before.into_keys().map(|peer| (peer, Instant::now())));
        });
        self.dial_targets.send_if_modified(|now| {
            let differs = *now != dials;
            *now = dials;
            differs
        });
        is_other
    }

    /// Address of another activator in an IP family that this one has too; otherwise its first address.
    fn reachable_address(&self, all: &[IpAddr]) -> Option<IpAddr> {
        let ours = |it: &&IpAddr| self.addresses.iter().any(|own| own.is_ipv4() == it.is_ipv4());
        all.iter().find(ours).or_else(|| all.first()).copied()
    }

    /// Applies `change` and computes the view again. Returns true if the view has changed.
    fn update_view(&self, change: impl FnOnce(&mut KnownPeers)) -> bool {
        let mut known = self.known_peers.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut known);
        let KnownPeers {
            first_table_at: first,
            listed,
            connected: streams,
            left_since: left,
            ended,
            refused_since: refused,
        } = &mut *known;
        let is_new = first.is_none_or(|it| it.elapsed() < NEW_ACTIVATOR_PERIOD);
        left.retain(|peer, since| {
            let is_back = listed.contains_key(peer) || streams.contains(peer);
            !is_back && since.elapsed() < PEER_GONE_TIMEOUT && !ended.contains(peer)
        });
        // Only listed activators are remembered as ended: others are not in the view anyway.
        ended.retain(|peer| listed.contains_key(peer));
        refused.retain(|peer, _| listed.contains_key(peer));
        // The view is replaced while `known` is locked, so that no older view overwrites a newer one.
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let listed = without_ended(&listed.keys().cloned().collect(), ended);
        let others = listed.iter().chain(&*streams).chain(left.keys());
        let others = others.filter(|peer| **peer != view.own_name && !ended.contains(*peer));
        let known = others.cloned().collect();
        let (own, connected) = (view.own_name.clone(), streams.clone());
        let next =
            PeerView { own_name: own, listed, alive: known, connected, is_new_activator: is_new };
        let is_other = **view != next;
        if is_other {
            *view = Arc::new(next);
        }
        is_other
    }

    /// Puts the claims and grants of a revision into the outboxes of their receivers.
    pub fn publish(&self, revision: &NamespacedName, said: SlotMessages) {
        if said == SlotMessages::default() {
            return;
        }
        // The outboxes keep the latest state of each revision, so that a slow stream costs no more memory than that.
        let mut boxes = self.lock_outboxes();
        for (peer, claim) in said.claims {
            let outbox = boxes.claims.entry(peer).or_default();
            match claim {
                Some(claim) => outbox.set(revision.clone(), claim),
                None => outbox.remove(revision),
            }
        }
        for (peer, grant) in said.grants {
            let outbox = boxes.grants.entry(peer).or_default();
            match grant {
                Some(grant) => outbox.set(revision.clone(), grant),
                None => outbox.remove(revision),
            }
        }
    }

    fn lock_outboxes(&self) -> MutexGuard<'_, PeerOutboxes> {
        self.outboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claims_outbox(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotClaim> {
        self.lock_outboxes().claims.entry(to.clone()).or_default().clone()
    }

    fn grants_outbox(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotGrant> {
        self.lock_outboxes().grants.entry(to.clone()).or_default().clone()
    }

    fn stream_number(&self, of: &ActivatorName) -> Arc<Mutex<u64>> {
        Arc::clone(self.lock_outboxes().stream_numbers.entry(of.clone()).or_default())
    }
}

/// Streams of slots to and from the other activators, with all that they need.
#[derive(Debug)]
pub struct PeerStreams {
    gateway: Arc<ActivatorGateway>,
    subscriber: ComponentReplica,
    credentials: Option<Arc<TlsCredentials>>,
    /// Ends all streams at once.
    stop: CancellationToken,
    /// Announces to owners that this activator ends.
    goodbye: CancellationToken,
    /// Number of streams to owners that are open or being opened.
    owner_streams: AtomicUsize,
}

impl PeerStreams {
    /// Creates the streams of an activator, which run until `stop`; over mutual TLS if there are credentials.
    pub fn new(
        gateway: Arc<ActivatorGateway>,
        who: ComponentReplica,
        credentials: Option<Arc<TlsCredentials>>,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let bye = CancellationToken::new();
        let holding = AtomicUsize::new(0);
        Arc::new(Self {
            gateway,
            subscriber: who,
            credentials,
            stop,
            goodbye: bye,
            owner_streams: holding,
        })
    }

    fn peers(&self) -> &Arc<Peers> {
        &self.gateway.peers
    }

    /// Serves holders and dials owners until the streams end.
    pub async fn run(self: &Arc<Self>) -> Result<(), LinkError> {
        let Some(port) = self.peers().peer_port else {
            return std::future::pending().await;
        };
        let addresses = self.peers().addresses.iter();
        let serving = addresses.map(|ip| self.serve_holders(SocketAddr::new(*ip, port.get())));
        let serving = async {
            let ended: Result<Vec<()>, _> = join_all(serving).await.into_iter().collect();
            // The listeners themselves end only with an error; a regular end comes from `dial`.
            ended?;
            std::future::pending().await
        };
        tokio::select! {
            served = serving => served,
            () = self.dial_owners() => Ok(()),
            () = self.run_view_refresh() => Ok(()),
        }
    }

    async fn serve_holders(self: &Arc<Self>, address: SocketAddr) -> Result<(), LinkError> {
        let service = SlotsServer::new(SlotOwnerService(Arc::clone(self)));
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let door = self.credentials.as_ref().map(|credentials| TlsAdmission {
            credentials: Arc::clone(credentials),
            allows_anonymous: false,
            limits: AcceptLimits::default(),
        });
        let router = link::server_builder().add_service(service);
        let endpoint = format!("{scheme}://{address}");
        link::serve_with_tls(&endpoint, router, door.as_ref(), self.stop.clone()).await
    }

    /// Keeps a stream to every other activator that the RouteTable lists.
    async fn dial_owners(self: &Arc<Self>) {
        let mut dials = self.peers().dial_targets.subscribe();
        let mut kept: HashMap<ActivatorName, (SocketAddr, CancellationToken, JoinHandle<()>)> =
            HashMap::new();
        loop {
            let wanted = dials.borrow_and_update().clone();
            // A stream to an address that is not listed any more, or to one that has moved, ends on its own.
            for (peer, (address, last, _)) in &kept {
                if wanted.get(peer) != Some(address) {
                    last.cancel();
                }
            }
            for (peer, address) in wanted {
                let before = kept.remove(&peer);
                if let Some(same) = before.as_ref().filter(|it| !it.1.is_cancelled()) {
                    debug_assert_eq!(same.0, address, "one that moved was cancelled");
                    kept.extend(before.map(|it| (peer, it)));
                    continue;
                }
                let last = CancellationToken::new();
                let streams = Arc::clone(self);
                let (to, end) = (peer.clone(), last.clone());
                let task = tokio::spawn(async move {
                    // The grants of the last stream are withdrawn before a new stream to the same owner begins.
                    if let Some((.., before)) = before {
                        let _ended = before.await;
                    }
                    streams.hold_slots(&to, address, end).await;
                });
                kept.insert(peer, (address, last, task));
            }
            kept.retain(|_, (_, last, task)| !(last.is_cancelled() && task.is_finished()));
            if dials.changed().await.is_err() {
                return;
            }
        }
    }

    /// Holds slots of one other activator. `last` is cancelled when the owner is not listed any more: the stream that
    /// is open then is the last one.
    async fn hold_slots(
        &self,
        owner: &ActivatorName,
        address: SocketAddr,
        last: CancellationToken,
    ) {
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let endpoint = format!("{scheme}://{address}");
        let finder = ReplicaResolver::with_credentials(
            CertificateRole::Activator,
            &endpoint,
            self.credentials.as_ref(),
        );
        let link = ComponentLink::with_resolver(finder, self.subscriber.clone(), self.stop.clone());
        let claims = self.peers().claims_outbox(owner);
        // Revisions that a newly opened stream has named; `None` after its first `Synced`.
        let named: Mutex<Option<BTreeSet<NamespacedName>>> = Mutex::default();
        let each = |heard| {
            let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
            // Grants of a broken stream count until a new one has sent its snapshot: after `Synced`, what it has not
            // named is withdrawn. A refusal shows that the process is gone, and its grants with it.
            match heard {
                SlotStreamEvent::Refused => {
                    self.withdraw_grants(owner, &BTreeSet::new());
                    self.update_known(|known| known.on_refused(owner));
                }
                SlotStreamEvent::Opened => {
                    *named = Some(BTreeSet::new());
                    self.update_known(|known| known.on_alive(owner));
                }
                SlotStreamEvent::Item(SlotGrantItem::Grant(revision, grant)) => {
                    named.iter_mut().for_each(|it| _ = it.insert(revision.clone()));
                    self.gateway
                        .routes
                        .get_or_create_revision(&revision)
                        .on_grant(owner, Some(grant));
                }
                SlotStreamEvent::Item(SlotGrantItem::Removed(revision)) => {
                    self.gateway.routes.get_or_create_revision(&revision).on_grant(owner, None);
                }
                SlotStreamEvent::Item(SlotGrantItem::Synced) => {
                    if let Some(named) = named.take() {
                        self.withdraw_grants(owner, &named);
                    }
                }
            }
        };
        self.owner_streams.fetch_add(1, Ordering::Relaxed);
        link.claim_slots(&claims, &self.goodbye, &last, each).await;
        self.owner_streams.fetch_sub(1, Ordering::Relaxed);
        self.withdraw_grants(owner, &BTreeSet::new());
    }

    /// Applies a change of what is known of the others, and updates the slots of all revisions if the view changes.
    fn update_known(&self, change: impl FnOnce(&mut KnownPeers)) {
        if self.peers().update_view(change) {
            self.gateway.routes.reconcile_all_slots();
        }
    }

    /// Withdraws the owner's grants of all revisions except those in `but`.
    fn withdraw_grants(&self, owner: &ActivatorName, but: &BTreeSet<NamespacedName>) {
        for revision in self.gateway.routes.revisions() {
            if !but.contains(&revision.name) {
                revision.on_grant(owner, None);
            }
        }
    }

    /// Finds activators that are gone, and the end of this one's time as a new one, by a periodic update of the view.
    async fn run_view_refresh(&self) {
        let mut tick = tokio::time::interval(VIEW_REFRESH_INTERVAL);
        loop {
            tick.tick().await;
            self.update_known(|_| {});
            let PeerView { alive: known, connected, .. } = &*self.peers().view();
            let away = i64::try_from(known.difference(connected).count()).unwrap_or(i64::MAX);
            self.gateway.metrics.disconnected_peers.set(away);
        }
    }

    /// Registers that a holder's stream has begun or ended.
    fn on_holder_stream(&self, holder: &ActivatorName, change: impl FnOnce(&mut KnownPeers)) {
        self.peers().update_view(change);
        for revision in self.gateway.routes.revisions() {
            revision.on_holder_stream(holder);
        }
    }

    /// Announces to owners that this activator ends, unless a request of its own is still at a pod.
    pub async fn announce_shutdown(&self) {
        if self.gateway.routes.revisions().iter().any(|it| it.has_requests_at_pods()) {
            return;
        }
        // Each stream to an owner ends once it has sent its last message, and `holding` counts those left.
        self.goodbye.cancel();
        let said = async {
            while self.owner_streams.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(GOODBYE_TIMEOUT / 100).await;
            }
        };
        let _late = tokio::time::timeout(GOODBYE_TIMEOUT, said).await;
    }
}

/// gRPC service of the owner, for the streams of holders.
#[derive(Debug)]
struct SlotOwnerService(Arc<PeerStreams>);

#[tonic::async_trait]
impl Slots for SlotOwnerService {
    type HoldStream = Pin<Box<dyn Stream<Item = Result<raw::GrantItem, Status>> + Send>>;

    async fn hold(
        &self,
        request: Request<Streaming<raw::ClaimItem>>,
    ) -> Result<Response<Self::HoldStream>, Status> {
        // A holder is trusted only as far as its certificate: one activator cannot claim slots as another one.
        let peer = tls::request_peer(&request);
        let mut items = request.into_inner();
        let first = items.message().await?.map(SlotClaimItem::try_from);
        let Some(Ok(SlotClaimItem::Sender(who))) = first else {
            return Err(Status::invalid_argument("the stream has not named its sender"));
        };
        if let Err(denied) = peer.check_role(&who, "hold slots", &[ComponentRole::Activator]) {
            warn!(%denied, "holder refused");
            return Err(tls::denied_status(&denied));
        }
        let ended = self.0.stop.child_token();
        let mut holder = HolderStream::open(Arc::clone(&self.0), who.name.into());
        let grants = self.0.peers().grants_outbox(&holder.peer).subscribe();
        let answer = grant_stream(grants, ended.clone());
        tokio::spawn(async move {
            let _ends = ended.clone().drop_guard();
            let received =
                link::receive_items(items, &ended, |item| holder.handle_item(item)).await;
            info!(peer = %holder.peer, broken = received.is_err(), "holder's stream ended");
        });
        Ok(Response::new(Box::pin(answer)))
    }
}

/// Stream of one holder at its owner. Dropping it registers the end of the stream.
struct HolderStream {
    streams: Arc<PeerStreams>,
    peer: ActivatorName,
    /// Number of the holder's latest stream: messages of an earlier one do not count.
    latest_stream: Arc<Mutex<u64>>,
    stream_number: u64,
    /// True if the holder has announced its end.
    has_ended: bool,
}

impl HolderStream {
    fn open(streams: Arc<PeerStreams>, peer: ActivatorName) -> Self {
        info!(%peer, "holder's stream opened");
        let latest_stream = streams.peers().stream_number(&peer);
        let stream_number = {
            let mut latest = latest_stream.lock().unwrap_or_else(PoisonError::into_inner);
            *latest += 1;
            streams.on_holder_stream(&peer, |known| {
                known.on_alive(&peer);
                known.connected.insert(peer.clone());
            });
            *latest
        };
        Self { streams, peer, latest_stream, stream_number, has_ended: false }
    }

    fn handle_item(&mut self, item: SlotClaimItem) {
        let latest = Arc::clone(&self.latest_stream);
        let latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
        // A message of a stream that a newer one has replaced is stale.
        if *latest != self.stream_number {
            return;
        }
        let routes = &self.streams.gateway.routes;
        match item {
            SlotClaimItem::Claim(revision, claim) => {
                routes.get_or_create_revision(&revision).on_claim(&self.peer, Some(claim));
            }
            SlotClaimItem::Removed(revision) => {
                routes.get_or_create_revision(&revision).on_claim(&self.peer, None)
            }
            SlotClaimItem::Goodbye => {
                self.has_ended = true;
                self.streams.on_holder_stream(&self.peer, |known| {
                    known.connected.remove(&self.peer);
                    known.ended.insert(self.peer.clone());
                });
            }
            SlotClaimItem::Synced => {}
            SlotClaimItem::Sender(_) => warn!(peer = %self.peer, "holder names itself twice"),
        }
    }
}

impl Drop for HolderStream {
    fn drop(&mut self) {
        let latest = self.latest_stream.lock().unwrap_or_else(PoisonError::into_inner);
        // After an announced end, or with a newer stream, the end of this stream reveals nothing.
        if *latest == self.stream_number && !self.has_ended {
            self.streams.on_holder_stream(&self.peer, |known| {
                known.connected.remove(&self.peer);
                known.left_since.insert(self.peer.clone(), Instant::now());
            });
        }
    }
}
