//! Shell: streams between activators, by which slots are passed, and the port at which they are served.
//!
//! Each activator dials every other one that the RouteTable lists. On that stream it holds slots of the Revisions which
//! the other one owns. Nothing is decided here: [`crate::slots`] computes the claims and grants. Agents report ready
//! pods at the same port.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    component::Component,
    link::{
        self, ComponentLink, LinkError, ReplicaResolver, SlotStreamEvent, TlsAdmission,
        grant_stream,
    },
    once_signal::OnceSignal,
    tls::{self, TlsCredentials, accept::AcceptLimits},
    wire::{
        ClientComponent, ComponentReplica, NamespacedName, SlotClaimItem, SlotGrantItem,
        raw::{
            self,
            pods_server::PodsServer,
            slots_server::{Slots, SlotsServer},
        },
    },
};
use futures::{Stream, future::try_join_all};
use prometheus_client::metrics::gauge::Gauge;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{
    agent_reports::AgentReportService,
    routes::index::RouteIndex,
    slots::{
        peer_view::{ActivatorName, PeerView},
        peers::{KnownPeers, Peers},
    },
};

/// Interval at which the view of the other activators is updated.
const VIEW_REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Most handshakes at once at the port for other activators and agents, of all addresses and of one. Any pod may
/// connect to the port. With the streams of 64 agents and 20 activators, the handshakes must fit into the files that no
/// client takes.
const MAX_HANDSHAKES: usize = 128;
const MAX_HANDSHAKES_PER_ADDRESS: usize = 8;
/// Time limit for announcing to owners that this activator ends.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// Streams by which this activator claims slots of other owners, and grants its own.
#[derive(Debug)]
pub struct PeerStreams {
    routes: Arc<RouteIndex>,
    peers: Arc<Peers>,
    /// Gauge of the other activators that have no stream to this one.
    disconnected_peers: Gauge,
    subscriber: ComponentReplica,
    credentials: Option<Arc<TlsCredentials>>,
    /// Signal by which all streams end at once.
    stop: CancellationToken,
    /// Set when this activator ends: each stream sends `Goodbye` to its owner.
    goodbye: OnceSignal,
    /// Number of streams to owners that are open or being opened.
    owner_streams: AtomicUsize,
}

/// Stream by which this activator holds slots of one owner.
#[derive(Debug)]
struct OwnerStream {
    address: SocketAddr,
    /// Set once the RouteTable does not list the owner at this address any more.
    unlisted: OnceSignal,
    task: JoinHandle<()>,
}

impl PeerStreams {
    /// Creates the streams of an activator, which run until `stop`; over mutual TLS if there are credentials.
    pub fn new(
        routes: Arc<RouteIndex>,
        disconnected_peers: Gauge,
        subscriber: ComponentReplica,
        credentials: Option<Arc<TlsCredentials>>,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let goodbye = OnceSignal::new();
        let owner_streams = AtomicUsize::new(0);
        let peers = Arc::clone(routes.peers());
        Arc::new(Self {
            routes,
            peers,
            disconnected_peers,
            subscriber,
            credentials,
            stop,
            goodbye,
            owner_streams,
        })
    }

    /// Serves holders and dials owners. Returns the error of the first listener that fails, and otherwise runs until the
    /// caller drops it.
    pub async fn run(self: &Arc<Self>) -> Result<(), LinkError> {
        let Some(port) = self.peers.peer_port else {
            return std::future::pending().await;
        };
        let addresses = self.peers.addresses.iter();
        let listeners = addresses.map(|ip| self.serve_holders(SocketAddr::new(*ip, port.get())));
        let serving = async {
            // One address that cannot be served is an error at once: other activators may know only that one.
            try_join_all(listeners).await?;
            // All listeners were stopped: the caller is about to end everything else.
            std::future::pending().await
        };
        tokio::select! {
            served = serving => served,
            () = self.dial_owners() => Ok(()),
            () = self.run_view_refresh() => Ok(()),
        }
    }

    async fn serve_holders(self: &Arc<Self>, address: SocketAddr) -> Result<(), LinkError> {
        let slots = SlotsServer::new(SlotOwnerService(Arc::clone(self)));
        let reports = AgentReportService::new(Arc::clone(&self.routes), self.stop.clone());
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let admission = self.credentials.as_ref().map(|credentials| TlsAdmission {
            credentials: Arc::clone(credentials),
            allows_anonymous: false,
            // Each other activator and each agent opens one connection.
            limits: AcceptLimits {
                // The pods of one IP family leave the places of the other one alone.
                max_anonymous: MAX_HANDSHAKES / self.peers.addresses.len().max(1),
                max_anonymous_per_address: MAX_HANDSHAKES_PER_ADDRESS,
                ..AcceptLimits::default()
            },
            // Without their streams no slot is granted, so pods that connect must not keep them out.
            known_addresses: Some(self.peers.known_addresses()),
        });
        let router =
            link::server_builder().add_service(slots).add_service(PodsServer::new(reports));
        let endpoint = format!("{scheme}://{address}");
        link::serve_with_tls(&endpoint, router, admission.as_ref(), self.stop.clone()).await
    }

    /// Keeps a stream to every other activator that the RouteTable lists.
    async fn dial_owners(self: &Arc<Self>) {
        let mut dials = self.peers.dial_targets.subscribe();
        let mut open_streams: HashMap<ActivatorName, OwnerStream> = HashMap::new();
        loop {
            let wanted = dials.borrow_and_update().clone();
            // A stream to an address that is not listed any more ends on its own.
            for (peer, stream) in &open_streams {
                if wanted.get(peer) != Some(&stream.address) {
                    stream.unlisted.set();
                }
            }
            for (peer, address) in wanted {
                let before = open_streams.remove(&peer);
                if let Some(running) = before.as_ref().filter(|it| !it.unlisted.is_set()) {
                    debug_assert_eq!(running.address, address, "one that moved is unlisted");
                    open_streams.extend(before.map(|it| (peer, it)));
                    continue;
                }
                let unlisted = OnceSignal::new();
                let streams = Arc::clone(self);
                let (owner, owner_unlisted) = (peer.clone(), unlisted.clone());
                let task = tokio::spawn(async move {
                    // The grants of the last stream are withdrawn before a new stream to the same owner begins.
                    if let Some(before) = before {
                        let _ended = before.task.await;
                    }
                    streams.hold_slots(&owner, address, owner_unlisted).await;
                });
                open_streams.insert(peer, OwnerStream { address, unlisted, task });
            }
            open_streams.retain(|_, it| !(it.unlisted.is_set() && it.task.is_finished()));
            if dials.changed().await.is_err() {
                return;
            }
        }
    }

    /// Holds slots of one other activator. `unlisted` is set when the owner is not listed any more: the stream that is
    /// open then is the last one.
    async fn hold_slots(&self, owner: &ActivatorName, address: SocketAddr, unlisted: OnceSignal) {
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let endpoint = format!("{scheme}://{address}");
        let resolver = ReplicaResolver::with_credentials(
            Component::Activator,
            &endpoint,
            self.credentials.as_ref(),
        );
        let link =
            ComponentLink::with_resolver(resolver, self.subscriber.clone(), self.stop.clone());
        let claims = self.peers.claims_outbox(owner);
        // Revisions that a newly opened stream has named; `None` after its first `Synced`.
        let named_revisions: Mutex<Option<BTreeSet<NamespacedName>>> = Mutex::default();
        let each = |event| {
            let mut named_revisions =
                named_revisions.lock().unwrap_or_else(PoisonError::into_inner);
            // Grants of a broken stream count until a new one has sent its snapshot: after `Synced`, what it has not
            // named is withdrawn. A refusal shows that the process is gone, and its grants with it.
            match event {
                SlotStreamEvent::Refused => {
                    self.withdraw_grants(owner, &BTreeSet::new());
                    self.update_known(|peers| peers.on_refused(owner));
                }
                SlotStreamEvent::Opened => {
                    *named_revisions = Some(BTreeSet::new());
                    self.update_known(|peers| peers.on_alive(owner));
                }
                SlotStreamEvent::Item(SlotGrantItem::Grant(revision, grant)) => {
                    named_revisions.iter_mut().for_each(|it| _ = it.insert(revision.clone()));
                    self.routes.get_or_create_revision(&revision).on_grant(owner, Some(grant));
                }
                SlotStreamEvent::Item(SlotGrantItem::Removed(revision)) => {
                    self.routes.get_or_create_revision(&revision).on_grant(owner, None);
                }
                SlotStreamEvent::Item(SlotGrantItem::Synced) => {
                    if let Some(named_revisions) = named_revisions.take() {
                        self.withdraw_grants(owner, &named_revisions);
                    }
                }
            }
        };
        // `announce_shutdown` waits for this count, so that each owner learns of the end.
        self.owner_streams.fetch_add(1, Ordering::Relaxed);
        link.claim_slots(&claims, &self.goodbye, &unlisted, each).await;
        self.owner_streams.fetch_sub(1, Ordering::Relaxed);
        self.withdraw_grants(owner, &BTreeSet::new());
    }

    /// Applies a change of the known activators, and updates the slots of all Revisions if the view changes.
    fn update_known(&self, change: impl FnOnce(&mut KnownPeers)) {
        if self.peers.update_view(change) {
            self.routes.reconcile_all_slots();
        }
    }

    /// Withdraws the owner's grants of all Revisions except those in `except`.
    fn withdraw_grants(&self, owner: &ActivatorName, except: &BTreeSet<NamespacedName>) {
        for revision in self.routes.revisions() {
            if !except.contains(&revision.name) {
                revision.on_grant(owner, None);
            }
        }
    }

    /// Updates the view periodically: activators disappear, and this one counts as new only for some time.
    async fn run_view_refresh(&self) {
        let mut tick = tokio::time::interval(VIEW_REFRESH_INTERVAL);
        loop {
            tick.tick().await;
            self.update_known(|_| {});
            let PeerView { alive, connected, .. } = &*self.peers.view();
            let count = alive.difference(connected).count();
            self.disconnected_peers.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Registers that a holder's stream has begun or ended.
    fn on_holder_stream(&self, holder: &ActivatorName, change: impl FnOnce(&mut KnownPeers)) {
        self.peers.update_view(change);
        for revision in self.routes.revisions() {
            revision.on_holder_stream(holder);
        }
    }

    /// Announces to owners that this activator ends, unless a request of its own is still at a pod.
    pub async fn announce_shutdown(&self) {
        if self.routes.revisions().iter().any(|it| it.has_requests_at_pods()) {
            return;
        }
        // Each stream to an owner ends once it has sent its last message. `owner_streams` counts those left.
        self.goodbye.set();
        let all_announced = async {
            while self.owner_streams.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(GOODBYE_TIMEOUT / 100).await;
            }
        };
        let _late = tokio::time::timeout(GOODBYE_TIMEOUT, all_announced).await;
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
        // The certificate must prove the sender's name: no activator may claim slots in the name of another.
        let peer = tls::request_peer(&request);
        let mut items = request.into_inner();
        let first = items.message().await?.map(SlotClaimItem::try_from);
        let Some(Ok(SlotClaimItem::Sender(sender))) = first else {
            return Err(Status::invalid_argument("the stream has not named its sender"));
        };
        if let Err(denied) = peer.check_role(&sender, "hold slots", &[ClientComponent::Activator]) {
            warn!(%denied, "holder refused");
            return Err(tls::denied_status(&denied));
        }
        let ended = self.0.stop.child_token();
        let mut holder = HolderStream::open(Arc::clone(&self.0), sender.name.into());
        let grants = self.0.peers.grants_outbox(&holder.peer).subscribe();
        let grant_items = grant_stream(grants, ended.clone());
        tokio::spawn(async move {
            let _ends = ended.clone().drop_guard();
            let received =
                link::receive_items(items, &ended, |item| holder.handle_item(item)).await;
            info!(peer = %holder.peer, broken = received.is_err(), "holder's stream ended");
        });
        Ok(Response::new(Box::pin(grant_items)))
    }
}

/// Stream of one holder at its owner. Dropping it registers the end of the stream.
struct HolderStream {
    streams: Arc<PeerStreams>,
    peer: ActivatorName,
    /// Number of the holder's latest stream: messages of an earlier one do not count.
    latest_stream: Arc<Mutex<u64>>,
    stream_number: u64,
    /// True if the holder has sent `Goodbye`.
    has_sent_goodbye: bool,
}

impl HolderStream {
    fn open(streams: Arc<PeerStreams>, peer: ActivatorName) -> Self {
        info!(%peer, "holder's stream opened");
        let latest_stream = streams.peers.latest_stream(&peer);
        let stream_number = {
            let mut latest = latest_stream.lock().unwrap_or_else(PoisonError::into_inner);
            *latest += 1;
            // Under the lock, so that the end of an earlier stream does not undo it.
            streams.on_holder_stream(&peer, |peers| {
                peers.on_alive(&peer);
                peers.connected.insert(peer.clone());
            });
            *latest
        };
        Self { streams, peer, latest_stream, stream_number, has_sent_goodbye: false }
    }

    /// Handles one message of a slot holder. Messages of a stream that was replaced have no effect.
    fn handle_item(&mut self, item: SlotClaimItem) {
        let latest = Arc::clone(&self.latest_stream);
        let latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
        // A message of a stream that a newer one has replaced is stale.
        if *latest != self.stream_number {
            return;
        }
        let routes = &self.streams.routes;
        match item {
            SlotClaimItem::Claim(revision, claim) => {
                routes.get_or_create_revision(&revision).on_claim(&self.peer, Some(claim));
            }
            SlotClaimItem::Removed(revision) => {
                routes.get_or_create_revision(&revision).on_claim(&self.peer, None)
            }
            SlotClaimItem::Goodbye => {
                self.has_sent_goodbye = true;
                self.streams.on_holder_stream(&self.peer, |peers| {
                    peers.connected.remove(&self.peer);
                    peers.ended.insert(self.peer.clone());
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
        // The end of this stream counts only without `Goodbye` and without a newer stream of the holder.
        if *latest == self.stream_number && !self.has_sent_goodbye {
            self.streams.on_holder_stream(&self.peer, |peers| {
                peers.connected.remove(&self.peer);
                peers.left_since.insert(self.peer.clone(), Instant::now());
            });
        }
    }
}
