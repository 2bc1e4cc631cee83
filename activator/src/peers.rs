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
    slots::{ActivatorName, PeerView, SlotMessages, lasting},
};

/// Time after which an activator that is not listed and has no stream is taken to be gone. It is long enough to open a
/// broken stream again, and to notice a dead connection.
const GONE_AFTER: Duration = Duration::from_secs(5);
/// Time after which an activator that refuses connections has ended: by then no older table is in force anywhere.
const PEER_REFUSED_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after its first table for which an activator is new, by the same rule as [`PEER_REFUSED_TIMEOUT`].
const NEW_ACTIVATOR_PERIOD: Duration = PEER_REFUSED_TIMEOUT;
/// Interval at which activators that are gone are looked for.
const LOOK: Duration = Duration::from_millis(500);
/// Time limit for announcing to owners that this activator ends.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Other activators as this one sees them, and the outboxes for their claims and grants.
#[derive(Debug)]
pub struct Peers {
    view: RwLock<Arc<PeerView>>,
    known: Mutex<KnownPeers>,
    boxes: Mutex<PeerOutboxes>,
    /// Addresses of the other activators that the RouteTable lists.
    dials: watch::Sender<BTreeMap<ActivatorName, SocketAddr>>,
    /// Port of the streams between activators, the same at each; `None`: there are no such streams.
    port: Option<NonZeroU16>,
    /// Addresses of this activator.
    addresses: Vec<IpAddr>,
}

#[derive(Debug, Default)]
struct KnownPeers {
    /// Time at which the first table came; `None`: none has come.
    first: Option<Instant>,
    /// Activators that the RouteTable lists, with their addresses.
    listed: BTreeMap<ActivatorName, Vec<IpAddr>>,
    /// Holders with an open stream to this activator.
    streams: BTreeSet<ActivatorName>,
    /// Activators that are neither listed nor connected any more, with the time since when.
    left: BTreeMap<ActivatorName, Instant>,
    /// Activators that have announced their end, or have refused connections for a while.
    ended: BTreeSet<ActivatorName>,
    /// Activators that refuse connections, with the time since when.
    refused: BTreeMap<ActivatorName, Instant>,
}

impl KnownPeers {
    /// Registers that no process listens at the activator's address. If that lasts, the activator has ended: none of
    /// its requests goes on. An open stream of it disproves that.
    fn on_refused(&mut self, peer: &ActivatorName) {
        let since = *self.refused.entry(peer.clone()).or_insert_with(Instant::now);
        if since.elapsed() >= PEER_REFUSED_TIMEOUT && !self.streams.contains(peer) {
            self.ended.insert(peer.clone());
        }
    }

    /// Registers a sign of life of an activator.
    fn on_alive(&mut self, peer: &ActivatorName) {
        self.ended.remove(peer);
        self.refused.remove(peer);
    }
}

#[derive(Debug, Default)]
struct PeerOutboxes {
    /// Claims of this activator, by owner.
    claims: HashMap<ActivatorName, Outbox<NamespacedName, SlotClaim>>,
    /// Grants of this activator, by holder.
    grants: HashMap<ActivatorName, Outbox<NamespacedName, SlotGrant>>,
    /// Number of each holder's latest stream: only messages of that one count.
    turns: HashMap<ActivatorName, Arc<Mutex<u64>>>,
}

impl Peers {
    /// Creates the state of an activator that has met no other one. Without a port it never meets any.
    pub fn new(own: &str, port: Option<NonZeroU16>, addresses: Vec<IpAddr>) -> Self {
        let view =
            Arc::new(PeerView { own: own.into(), is_new: port.is_some(), ..PeerView::default() });
        Self {
            view: RwLock::new(view),
            known: Mutex::default(),
            boxes: Mutex::default(),
            dials: watch::Sender::default(),
            port,
            addresses,
        }
    }

    /// Activators as this one sees them now.
    pub fn view(&self) -> Arc<PeerView> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies the activators of the RouteTable, with their addresses. Returns true if the view has changed.
    pub fn list(&self, all: impl IntoIterator<Item = (ActivatorName, Vec<IpAddr>)>) -> bool {
        // Without a port there are no streams: the activator stays alone in its view.
        let Some(port) = self.port else { return false };
        let listed: BTreeMap<_, _> = all.into_iter().collect();
        let others = listed.iter().filter(|(peer, _)| **peer != self.view().own);
        let dial = |(peer, addresses): (&ActivatorName, &Vec<IpAddr>)| {
            Some((peer.clone(), SocketAddr::new(self.reachable(addresses)?, port.get())))
        };
        let dials: BTreeMap<_, _> = others.filter_map(dial).collect();
        // An activator that is no longer listed may still have requests at pods, and so is known for a while.
        let is_other = self.look(|known| {
            known.first.get_or_insert_with(Instant::now);
            let before = std::mem::replace(&mut known.listed, listed);
            known.left.extend(before.into_keys().map(|peer| (peer, Instant::now())));
        });
        self.dials.send_if_modified(|now| {
            let differs = *now != dials;
            *now = dials;
            differs
        });
        is_other
    }

    /// Address of another activator in an IP family that this one has too; otherwise its first address.
    fn reachable(&self, all: &[IpAddr]) -> Option<IpAddr> {
        let ours = |it: &&IpAddr| self.addresses.iter().any(|own| own.is_ipv4() == it.is_ipv4());
        all.iter().find(ours).or_else(|| all.first()).copied()
    }

    /// Applies `change` and computes the view again. Returns true if the view has changed.
    fn look(&self, change: impl FnOnce(&mut KnownPeers)) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut known);
        let KnownPeers { first, listed, streams, left, ended, refused } = &mut *known;
        let is_new = first.is_none_or(|it| it.elapsed() < NEW_ACTIVATOR_PERIOD);
        left.retain(|peer, since| {
            let is_back = listed.contains_key(peer) || streams.contains(peer);
            !is_back && since.elapsed() < GONE_AFTER && !ended.contains(peer)
        });
        // Only listed activators are remembered as ended: others are not in the view anyway.
        ended.retain(|peer| listed.contains_key(peer));
        refused.retain(|peer, _| listed.contains_key(peer));
        // The view is replaced while `known` is locked, so that no older view overwrites a newer one.
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let listed = lasting(&listed.keys().cloned().collect(), ended);
        let others = listed.iter().chain(&*streams).chain(left.keys());
        let others = others.filter(|peer| **peer != view.own && !ended.contains(*peer));
        let known = others.cloned().collect();
        let (own, connected) = (view.own.clone(), streams.clone());
        let next = PeerView { own, listed, known, connected, is_new };
        let is_other = **view != next;
        if is_other {
            *view = Arc::new(next);
        }
        is_other
    }

    /// Puts the claims and grants of a revision into the outboxes of their receivers.
    pub fn say(&self, revision: &NamespacedName, said: SlotMessages) {
        if said == SlotMessages::default() {
            return;
        }
        // The outboxes keep the latest state of each revision, so that a slow stream costs no more memory than that.
        let mut boxes = self.boxes();
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

    fn boxes(&self) -> MutexGuard<'_, PeerOutboxes> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claims(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotClaim> {
        self.boxes().claims.entry(to.clone()).or_default().clone()
    }

    fn grants(&self, to: &ActivatorName) -> Outbox<NamespacedName, SlotGrant> {
        self.boxes().grants.entry(to.clone()).or_default().clone()
    }

    fn turn(&self, of: &ActivatorName) -> Arc<Mutex<u64>> {
        Arc::clone(self.boxes().turns.entry(of.clone()).or_default())
    }
}

/// Streams of slots to and from the other activators, with all that they need.
#[derive(Debug)]
pub struct PeerStreams {
    gateway: Arc<ActivatorGateway>,
    who: ComponentReplica,
    credentials: Option<Arc<TlsCredentials>>,
    /// Ends all streams at once.
    stop: CancellationToken,
    /// Announces to owners that this activator ends.
    bye: CancellationToken,
    /// Number of streams to owners that are open or being opened.
    holding: AtomicUsize,
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
        Arc::new(Self { gateway, who, credentials, stop, bye, holding })
    }

    fn peers(&self) -> &Arc<Peers> {
        &self.gateway.peers
    }

    /// Serves holders and dials owners until the streams end.
    pub async fn run(self: &Arc<Self>) -> Result<(), LinkError> {
        let Some(port) = self.peers().port else {
            return std::future::pending().await;
        };
        let addresses = self.peers().addresses.iter();
        let serving = addresses.map(|ip| self.serve(SocketAddr::new(*ip, port.get())));
        let serving = async {
            let ended: Result<Vec<()>, _> = join_all(serving).await.into_iter().collect();
            // The listeners themselves end only with an error; a regular end comes from `dial`.
            ended?;
            std::future::pending().await
        };
        tokio::select! {
            served = serving => served,
            () = self.dial() => Ok(()),
            () = self.look_after() => Ok(()),
        }
    }

    async fn serve(self: &Arc<Self>, address: SocketAddr) -> Result<(), LinkError> {
        let service = SlotsServer::new(SlotOwnerService(Arc::clone(self)));
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let door = self.credentials.as_ref().map(|credentials| TlsAdmission {
            credentials: Arc::clone(credentials),
            open: false,
            bounds: AcceptLimits::default(),
        });
        let router = link::server().add_service(service);
        let endpoint = format!("{scheme}://{address}");
        link::serve_to(&endpoint, router, door.as_ref(), self.stop.clone()).await
    }

    /// Keeps a stream to every other activator that the RouteTable lists.
    async fn dial(self: &Arc<Self>) {
        let mut dials = self.peers().dials.subscribe();
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
                    streams.hold(&to, address, end).await;
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
    async fn hold(&self, owner: &ActivatorName, address: SocketAddr, last: CancellationToken) {
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let endpoint = format!("{scheme}://{address}");
        let finder = ReplicaResolver::known_as(
            CertificateRole::Activator,
            &endpoint,
            self.credentials.as_ref(),
        );
        let link = ComponentLink::to(finder, self.who.clone(), self.stop.clone());
        let claims = self.peers().claims(owner);
        // Revisions that a newly opened stream has named; `None` after its first `Synced`.
        let named: Mutex<Option<BTreeSet<NamespacedName>>> = Mutex::default();
        let each = |heard| {
            let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
            // Grants of a broken stream count until a new one has sent its snapshot: after `Synced`, what it has not
            // named is withdrawn. A refusal shows that the process is gone, and its grants with it.
            match heard {
                SlotStreamEvent::Refused => {
                    self.forget(owner, &BTreeSet::new());
                    self.change(|known| known.on_refused(owner));
                }
                SlotStreamEvent::Opened => {
                    *named = Some(BTreeSet::new());
                    self.change(|known| known.on_alive(owner));
                }
                SlotStreamEvent::Item(SlotGrantItem::Grant(revision, grant)) => {
                    named.iter_mut().for_each(|it| _ = it.insert(revision.clone()));
                    self.gateway.routes.meet(&revision).on_grant(owner, Some(grant));
                }
                SlotStreamEvent::Item(SlotGrantItem::Gone(revision)) => {
                    self.gateway.routes.meet(&revision).on_grant(owner, None);
                }
                SlotStreamEvent::Item(SlotGrantItem::Synced) => {
                    if let Some(named) = named.take() {
                        self.forget(owner, &named);
                    }
                }
            }
        };
        self.holding.fetch_add(1, Ordering::Relaxed);
        link.hold(&claims, &self.bye, &last, each).await;
        self.holding.fetch_sub(1, Ordering::Relaxed);
        self.forget(owner, &BTreeSet::new());
    }

    /// Applies a change of what is known of the others, and updates the slots of all revisions if the view changes.
    fn change(&self, change: impl FnOnce(&mut KnownPeers)) {
        if self.peers().look(change) {
            self.gateway.routes.settle();
        }
    }

    /// Withdraws the owner's grants of all revisions except those in `but`.
    fn forget(&self, owner: &ActivatorName, but: &BTreeSet<NamespacedName>) {
        for revision in self.gateway.routes.revisions() {
            if !but.contains(&revision.name) {
                revision.on_grant(owner, None);
            }
        }
    }

    /// Finds activators that are gone, and the end of this one's time as a new one, by a periodic update of the view.
    async fn look_after(&self) {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tick.tick().await;
            self.change(|_| {});
            let PeerView { known, connected, .. } = &*self.peers().view();
            let away = i64::try_from(known.difference(connected).count()).unwrap_or(i64::MAX);
            self.gateway.metrics.disconnected_peers.set(away);
        }
    }

    /// Registers that a holder's stream has begun or ended.
    fn again(&self, holder: &ActivatorName, change: impl FnOnce(&mut KnownPeers)) {
        self.peers().look(change);
        for revision in self.gateway.routes.revisions() {
            revision.on_stream(holder);
        }
    }

    /// Announces to owners that this activator ends, unless a request of its own is still at a pod.
    pub async fn leave(&self) {
        if self.gateway.routes.revisions().iter().any(|it| it.has_requests_at_pods()) {
            return;
        }
        // Each stream to an owner ends once it has sent its last message, and `holding` counts those left.
        self.bye.cancel();
        let said = async {
            while self.holding.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(LAST_WORDS / 100).await;
            }
        };
        let _late = tokio::time::timeout(LAST_WORDS, said).await;
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
        let peer = tls::peer(&request);
        let mut items = request.into_inner();
        let first = items.message().await?.map(SlotClaimItem::try_from);
        let Some(Ok(SlotClaimItem::Sender(who))) = first else {
            return Err(Status::invalid_argument("the stream has not named its sender"));
        };
        if let Err(denied) = peer.may(&who, "hold slots", &[ComponentRole::Activator]) {
            warn!(%denied, "holder refused");
            return Err(tls::status(&denied));
        }
        let ended = self.0.stop.child_token();
        let mut holder = HolderStream::begin(Arc::clone(&self.0), who.name.into());
        let grants = self.0.peers().grants(&holder.peer).subscribe();
        let answer = grant_stream(grants, ended.clone());
        tokio::spawn(async move {
            let _ends = ended.clone().drop_guard();
            let received = link::receive(items, &ended, |item| holder.take(item)).await;
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
    latest: Arc<Mutex<u64>>,
    number: u64,
    /// True if the holder has announced its end.
    has_left: bool,
}

impl HolderStream {
    fn begin(streams: Arc<PeerStreams>, peer: ActivatorName) -> Self {
        info!(%peer, "holder's stream opened");
        let latest = streams.peers().turn(&peer);
        let number = {
            let mut latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
            *latest += 1;
            streams.again(&peer, |known| {
                known.on_alive(&peer);
                known.streams.insert(peer.clone());
            });
            *latest
        };
        Self { streams, peer, latest, number, has_left: false }
    }

    fn take(&mut self, item: SlotClaimItem) {
        let latest = Arc::clone(&self.latest);
        let latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
        // A message of a stream that a newer one has replaced is stale.
        if *latest != self.number {
            return;
        }
        let routes = &self.streams.gateway.routes;
        match item {
            SlotClaimItem::Claim(revision, claim) => {
                routes.meet(&revision).on_claim(&self.peer, Some(claim));
            }
            SlotClaimItem::Gone(revision) => routes.meet(&revision).on_claim(&self.peer, None),
            SlotClaimItem::Bye => {
                self.has_left = true;
                self.streams.again(&self.peer, |known| {
                    known.streams.remove(&self.peer);
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
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        // After an announced end, or with a newer stream, the end of this stream reveals nothing.
        if *latest == self.number && !self.has_left {
            self.streams.again(&self.peer, |known| {
                known.streams.remove(&self.peer);
                known.left.insert(self.peer.clone(), Instant::now());
            });
        }
    }
}
