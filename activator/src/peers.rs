//! Shell: the other activators: who they are, and the streams by which slots are handed between them.
//!
//! Each dials every other one that the table lists and holds, on that stream, slots of the revisions which that one owns.
//! Nothing is decided here: [`crate::slots`] says what each is told.

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
    link::{self, Door, Finder, Heard, Link, LinkError, grant_stream},
    outbox::Outbox,
    tls::{self, Credentials, accept::Bounds, peer::Holder},
    wire::{
        Claim, ClaimItem, Grant, GrantItem, Name, Role, Subscriber,
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
    gateway::Gateway,
    slots::{Peer, Said, View, lasting},
};

/// One that is not listed and has no stream is taken for gone after this time: long enough for a stream that broke to be
/// opened once more, and for a dead connection to be noticed.
const GONE_AFTER: Duration = Duration::from_secs(5);
/// One that refuses connections for so long has ended: by then every activator has the tables from before.
const REFUSED_FOR: Duration = Duration::from_secs(2);
/// For so long after its first table an activator is new, by the same rule.
const NEW_FOR: Duration = REFUSED_FOR;
/// Those that are gone are looked for this often.
const LOOK: Duration = Duration::from_millis(500);
/// How long it may take to say that this one ends.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Who the other activators are, and what each is to be told.
#[derive(Debug)]
pub struct Peers {
    view: RwLock<Arc<View>>,
    known: Mutex<Known>,
    boxes: Mutex<Boxes>,
    /// Where those are that the table lists.
    dials: watch::Sender<BTreeMap<Peer, SocketAddr>>,
    /// Their port, and this one's addresses; `None`: other activators are not spoken to.
    port: Option<NonZeroU16>,
    addresses: Vec<IpAddr>,
}

#[derive(Debug, Default)]
struct Known {
    /// When the first table came.
    first: Option<Instant>,
    listed: BTreeMap<Peer, Vec<IpAddr>>,
    /// Streams that stand, by their holder.
    streams: BTreeSet<Peer>,
    /// Those that are neither listed nor connected any more, and since when.
    left: BTreeMap<Peer, Instant>,
    /// Those that said that they end, or have refused connections for a while.
    ended: BTreeSet<Peer>,
    /// Those that refuse connections, and since when.
    refused: BTreeMap<Peer, Instant>,
}

impl Known {
    /// No process listens where it should be. If that lasts, none of its requests goes on; unless a stream says otherwise.
    fn on_refused(&mut self, peer: &Peer) {
        let since = *self.refused.entry(peer.clone()).or_insert_with(Instant::now);
        if since.elapsed() >= REFUSED_FOR && !self.streams.contains(peer) {
            self.ended.insert(peer.clone());
        }
    }

    fn on_met(&mut self, peer: &Peer) {
        self.ended.remove(peer);
        self.refused.remove(peer);
    }
}

#[derive(Debug, Default)]
struct Boxes {
    claims: HashMap<Peer, Outbox<Name, Claim>>,
    grants: HashMap<Peer, Outbox<Name, Grant>>,
    /// Which stream of a holder's counts.
    turns: HashMap<Peer, Arc<Mutex<u64>>>,
}

impl Peers {
    /// An activator that has met no other one. Without a port it never will.
    pub fn new(own: &str, port: Option<NonZeroU16>, addresses: Vec<IpAddr>) -> Self {
        let view = Arc::new(View { own: own.into(), is_new: port.is_some(), ..View::default() });
        Self {
            view: RwLock::new(view),
            known: Mutex::default(),
            boxes: Mutex::default(),
            dials: watch::Sender::default(),
            port,
            addresses,
        }
    }

    /// The activators, as this one sees them.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The table lists these. Returns whether the view has changed.
    pub fn list(&self, all: impl IntoIterator<Item = (Peer, Vec<IpAddr>)>) -> bool {
        let Some(port) = self.port else { return false };
        let listed: BTreeMap<_, _> = all.into_iter().collect();
        let others = listed.iter().filter(|(peer, _)| **peer != self.view().own);
        let dial = |(peer, addresses): (&Peer, &Vec<IpAddr>)| {
            Some((peer.clone(), SocketAddr::new(self.reachable(addresses)?, port.get())))
        };
        let dials: BTreeMap<_, _> = others.filter_map(dial).collect();
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

    /// Of another one's addresses, one of a family that this one has too.
    fn reachable(&self, all: &[IpAddr]) -> Option<IpAddr> {
        let ours = |it: &&IpAddr| self.addresses.iter().any(|own| own.is_ipv4() == it.is_ipv4());
        all.iter().find(ours).or_else(|| all.first()).copied()
    }

    /// Takes in what has changed. Returns whether the view has.
    fn look(&self, change: impl FnOnce(&mut Known)) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut known);
        let Known { first, listed, streams, left, ended, refused } = &mut *known;
        let is_new = first.is_none_or(|it| it.elapsed() < NEW_FOR);
        left.retain(|peer, since| {
            let is_back = listed.contains_key(peer) || streams.contains(peer);
            !is_back && since.elapsed() < GONE_AFTER && !ended.contains(peer)
        });
        ended.retain(|peer| listed.contains_key(peer));
        refused.retain(|peer, _| listed.contains_key(peer));
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let listed = lasting(&listed.keys().cloned().collect(), ended);
        let others = listed.iter().chain(&*streams).chain(left.keys());
        let others = others.filter(|peer| **peer != view.own && !ended.contains(*peer));
        let known = others.cloned().collect();
        let (own, connected) = (view.own.clone(), streams.clone());
        let next = View { own, listed, known, connected, is_new };
        let is_other = **view != next;
        if is_other {
            *view = Arc::new(next);
        }
        is_other
    }

    /// Says what a revision has to say.
    pub fn say(&self, revision: &Name, said: Said) {
        if said == Said::default() {
            return;
        }
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

    fn boxes(&self) -> MutexGuard<'_, Boxes> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claims(&self, to: &Peer) -> Outbox<Name, Claim> {
        self.boxes().claims.entry(to.clone()).or_default().clone()
    }

    fn grants(&self, to: &Peer) -> Outbox<Name, Grant> {
        self.boxes().grants.entry(to.clone()).or_default().clone()
    }

    fn turn(&self, of: &Peer) -> Arc<Mutex<u64>> {
        Arc::clone(self.boxes().turns.entry(of.clone()).or_default())
    }
}

/// Everything that the streams between activators need.
#[derive(Debug)]
pub struct Streams {
    gateway: Arc<Gateway>,
    who: Subscriber,
    credentials: Option<Arc<Credentials>>,
    /// Ends the streams at once.
    stop: CancellationToken,
    /// Says to owners that this one ends.
    bye: CancellationToken,
    /// Streams to owners.
    holding: AtomicUsize,
}

impl Streams {
    /// The streams of an activator until `stop`; over mutual TLS where there are credentials.
    pub fn new(
        gateway: Arc<Gateway>,
        who: Subscriber,
        credentials: Option<Arc<Credentials>>,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let bye = CancellationToken::new();
        let holding = AtomicUsize::new(0);
        Arc::new(Self { gateway, who, credentials, stop, bye, holding })
    }

    fn peers(&self) -> &Arc<Peers> {
        &self.gateway.peers
    }

    /// Serves holders and dials owners until the end.
    pub async fn run(self: &Arc<Self>) -> Result<(), LinkError> {
        let Some(port) = self.peers().port else {
            return std::future::pending().await;
        };
        let addresses = self.peers().addresses.iter();
        let serving = addresses.map(|ip| self.serve(SocketAddr::new(*ip, port.get())));
        let serving = async {
            let ended: Result<Vec<()>, _> = join_all(serving).await.into_iter().collect();
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
        let service = SlotsServer::new(Owner(Arc::clone(self)));
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let door = self.credentials.as_ref().map(|credentials| Door {
            credentials: Arc::clone(credentials),
            open: false,
            bounds: Bounds::default(),
        });
        let router = link::server().add_service(service);
        let endpoint = format!("{scheme}://{address}");
        link::serve_to(&endpoint, router, door.as_ref(), self.stop.clone()).await
    }

    /// Keeps a stream to every other activator that the table lists.
    async fn dial(self: &Arc<Self>) {
        let mut dials = self.peers().dials.subscribe();
        let mut kept: HashMap<Peer, (SocketAddr, CancellationToken, JoinHandle<()>)> =
            HashMap::new();
        loop {
            let wanted = dials.borrow_and_update().clone();
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
                    // What the last stream said is forgotten first.
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

    /// Holds slots of one other activator. Once `last`, when it is listed no more, the stream that stands is the last one.
    async fn hold(&self, owner: &Peer, address: SocketAddr, last: CancellationToken) {
        let scheme = if self.credentials.is_some() { "https" } else { "http" };
        let endpoint = format!("{scheme}://{address}");
        let finder = Finder::known_as(Holder::Activator, &endpoint, self.credentials.as_ref());
        let link = Link::to(finder, self.who.clone(), self.stop.clone());
        let claims = self.peers().claims(owner);
        // Of a stream that has just been opened: what it has named.
        let named: Mutex<Option<BTreeSet<Name>>> = Mutex::default();
        let each = |heard| {
            let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
            match heard {
                Heard::Refused => {
                    self.forget(owner, &BTreeSet::new());
                    self.change(|known| known.on_refused(owner));
                }
                Heard::Opened => {
                    *named = Some(BTreeSet::new());
                    self.change(|known| known.on_met(owner));
                }
                Heard::Item(GrantItem::Grant(revision, grant)) => {
                    named.iter_mut().for_each(|it| _ = it.insert(revision.clone()));
                    self.gateway.routes.meet(&revision).on_grant(owner, Some(grant));
                }
                Heard::Item(GrantItem::Gone(revision)) => {
                    self.gateway.routes.meet(&revision).on_grant(owner, None);
                }
                Heard::Item(GrantItem::Synced) => {
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

    /// Takes in what is known of the others.
    fn change(&self, change: impl FnOnce(&mut Known)) {
        if self.peers().look(change) {
            self.gateway.routes.settle();
        }
    }

    /// The owner says nothing of any revision but these.
    fn forget(&self, owner: &Peer, but: &BTreeSet<Name>) {
        for revision in self.gateway.routes.revisions() {
            if !but.contains(&revision.name) {
                revision.on_grant(owner, None);
            }
        }
    }

    /// Notices those that are gone, and when this one is new no more.
    async fn look_after(&self) {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tick.tick().await;
            self.change(|_| {});
            let View { known, connected, .. } = &*self.peers().view();
            let away = i64::try_from(known.difference(connected).count()).unwrap_or(i64::MAX);
            self.gateway.metrics.peers_away.set(away);
        }
    }

    /// A holder's stream has begun or ended.
    fn again(&self, holder: &Peer, change: impl FnOnce(&mut Known)) {
        self.peers().look(change);
        for revision in self.gateway.routes.revisions() {
            revision.on_stream(holder);
        }
    }

    /// Says to owners that this one ends, unless some request of its own is still at a pod.
    pub async fn leave(&self) {
        if self.gateway.routes.revisions().iter().any(|it| it.is_at_pods()) {
            return;
        }
        self.bye.cancel();
        let said = async {
            while self.holding.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(LAST_WORDS / 100).await;
            }
        };
        let _late = tokio::time::timeout(LAST_WORDS, said).await;
    }
}

/// Serves holders.
#[derive(Debug)]
struct Owner(Arc<Streams>);

#[tonic::async_trait]
impl Slots for Owner {
    type HoldStream = Pin<Box<dyn Stream<Item = Result<raw::GrantItem, Status>> + Send>>;

    async fn hold(
        &self,
        request: Request<Streaming<raw::ClaimItem>>,
    ) -> Result<Response<Self::HoldStream>, Status> {
        let peer = tls::peer(&request);
        let mut items = request.into_inner();
        let first = items.message().await?.map(ClaimItem::try_from);
        let Some(Ok(ClaimItem::Sender(who))) = first else {
            return Err(Status::invalid_argument("the stream has not named its sender"));
        };
        if let Err(denied) = peer.may(&who, "hold slots", &[Role::Activator]) {
            warn!(%denied, "holder refused");
            return Err(tls::status(&denied));
        }
        let ended = self.0.stop.child_token();
        let mut holder = Held::begin(Arc::clone(&self.0), who.name.into());
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

/// A holder's stream. Dropping it ends it.
struct Held {
    streams: Arc<Streams>,
    peer: Peer,
    /// The number of the holder's latest stream: what an earlier one still says does not count.
    latest: Arc<Mutex<u64>>,
    number: u64,
    has_left: bool,
}

impl Held {
    fn begin(streams: Arc<Streams>, peer: Peer) -> Self {
        info!(%peer, "holder's stream opened");
        let latest = streams.peers().turn(&peer);
        let number = {
            let mut latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
            *latest += 1;
            streams.again(&peer, |known| {
                known.on_met(&peer);
                known.streams.insert(peer.clone());
            });
            *latest
        };
        Self { streams, peer, latest, number, has_left: false }
    }

    fn take(&mut self, item: ClaimItem) {
        let latest = Arc::clone(&self.latest);
        let latest = latest.lock().unwrap_or_else(PoisonError::into_inner);
        if *latest != self.number {
            return;
        }
        let routes = &self.streams.gateway.routes;
        match item {
            ClaimItem::Claim(revision, claim) => {
                routes.meet(&revision).on_claim(&self.peer, Some(claim));
            }
            ClaimItem::Gone(revision) => routes.meet(&revision).on_claim(&self.peer, None),
            ClaimItem::Bye => {
                self.has_left = true;
                self.streams.again(&self.peer, |known| {
                    known.streams.remove(&self.peer);
                    known.ended.insert(self.peer.clone());
                });
            }
            ClaimItem::Synced => {}
            ClaimItem::Sender(_) => warn!(peer = %self.peer, "holder names itself twice"),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if *latest == self.number && !self.has_left {
            self.streams.again(&self.peer, |known| {
                known.streams.remove(&self.peer);
                known.left.insert(self.peer.clone(), Instant::now());
            });
        }
    }
}
