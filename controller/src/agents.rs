//! Shell: serves routes to agents, activators and autoscalers, and takes in what they report and decide.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use common::{
    link::{self, LinkError},
    tls::{self, peer::Denied},
    wire::{
        self, Part, PodItem, Revision, Role, RouteChange, ScaleItem, Subscriber,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            scale_server::{Scale, ScaleServer},
        },
    },
};
use futures::{Stream, StreamExt as _};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{
    deciders::{self, Deciders},
    identity::Issuer,
    machine::Event,
    shared::{Following, Shared, Told},
};

pub mod stream;

use stream::{Encoded, Watch, encode};

/// How much later than activators everybody else hears of a change.
///
/// Requests may wait for it there. Nothing waits elsewhere: until an agent has sent connects straight to a new pod, they go
/// by the activator. On a small node it is the same processors that bring the first request to its pod meanwhile.
const AFTER_ACTIVATORS: Duration = Duration::from_millis(1);

/// Serves all three at `endpoint` until `shutdown`.
pub async fn serve(
    shared: Arc<Shared>,
    endpoint: &str,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    serve_to(shared, endpoint, None, shutdown).await
}

/// Serves all three, and at `https://` also what `issuer` issues: to those whom it has let in.
pub async fn serve_to(
    shared: Arc<Shared>,
    endpoint: &str,
    issuer: Option<&Arc<Issuer>>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let border = Border {
        shared,
        streams: Arc::new(AtomicU64::new(1)),
        deciders: Arc::default(),
        shutdown: shutdown.clone(),
    };
    let router = link::server()
        .add_service(stream::Server::new(border.clone()))
        .add_service(PodsServer::new(border.clone()))
        .add_service(ScaleServer::new(border.clone()));
    let door = issuer.map(|issuer| issuer.door());
    let router = match issuer {
        Some(issuer) => router.add_service(issuer.service()),
        None => router,
    };
    tokio::select! {
        served = link::serve_to(endpoint, router, door.as_ref(), shutdown) => served,
        // It ends at shutdown, and the streams after it.
        () = async { border.watch_deciders().await; std::future::pending().await } => Ok(()),
    }
}

#[derive(Clone, Debug)]
struct Border {
    shared: Arc<Shared>,
    streams: Arc<AtomicU64>,
    deciders: Arc<Mutex<Deciders>>,
    shutdown: CancellationToken,
}

impl Border {
    /// Steps the machine with what counts, in the order it came to count.
    fn decide_by(&self, news: impl FnOnce(&mut Deciders) -> Vec<deciders::Step>) {
        let mut all = self.deciders.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.chosen().map(str::to_owned);
        for step in news(&mut all) {
            self.shared.step(match step {
                deciders::Step::Begin => Event::DecisionsBegin,
                deciders::Step::Decide(decision) => Event::Decide(decision),
                deciders::Step::Undecide(revision) => Event::Undecide(revision),
                deciders::Step::Synced => Event::DecisionsSynced,
            });
        }
        if all.chosen() != before.as_deref() {
            info!(before, now = all.chosen(), "another autoscaler's decisions count");
            self.shared.step(Event::Choose(Part::Autoscaler, all.chosen().map(str::to_owned)));
        }
    }

    /// Notices autoscalers that have fallen silent, until shutdown.
    async fn watch_deciders(&self) {
        let mut ticks = tokio::time::interval(deciders::TICK);
        // What came while this process stood still is read before anybody is called silent.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            self.decide_by(Deciders::tick);
        }
    }
}

#[tonic::async_trait]
impl Watch for Border {
    type Items = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

    async fn watch(&self, request: Request<raw::Subscriber>) -> Result<Self::Items, Status> {
        let peer = tls::peer(&request);
        let who = Subscriber::try_from(request.into_inner());
        let who = who.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        peer.may_be(&who).map_err(|denied| refuse(&denied))?;
        let follower = Follower::new(self, who);
        let batches = batches(Following::new(Arc::clone(&self.shared)), follower.who.role);
        let pieces = batches.flat_map(move |batch| {
            // The stream owns the follower: when it is dropped, for whatever reason, nobody follows any more.
            let _ = &follower;
            let count = batch.pieces.len();
            let piece = move |at: usize| {
                // All of it moves in here: what is shared is kept until it is through.
                let batch = &batch;
                batch.pieces[at].clone()
            };
            futures::stream::iter((0..count).map(piece))
        });
        Ok(Box::pin(pieces.take_until(self.shutdown.clone().cancelled_owned())))
    }
}

/// A batch on its way, and what keeps it for others until it is through.
struct Sent {
    pieces: Encoded,
    _told: Told,
}

/// The RouteTable's batches for one follower.
fn batches(following: Following, role: Role) -> impl Stream<Item = Sent> + Send {
    futures::stream::unfold(following, move |mut following| async move {
        let told = following.next().await;
        let pieces = match &told {
            Told::Whole(whole) => whole.encoded(role, |routes| encode(routes, role, shape)),
            Told::News(routes) => encode(routes, role, shape),
        };
        if role != Role::Activator {
            tokio::time::sleep(AFTER_ACTIVATORS).await;
        }
        Some((Sent { pieces, _told: told }, following))
    })
}

/// Somebody who follows the routes, for as long as the value lives.
#[derive(Debug)]
struct Follower {
    shared: Arc<Shared>,
    who: Subscriber,
}

impl Follower {
    fn new(border: &Border, who: Subscriber) -> Self {
        info!(role = ?who.role, name = who.name, "routes followed");
        border.shared.metrics.follows(1);
        Self { shared: Arc::clone(&border.shared), who }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        info!(role = ?self.who.role, name = self.who.name, "routes no longer followed");
        self.shared.metrics.follows(-1);
    }
}

/// Somebody who reports pods, for as long as the value lives.
#[derive(Debug)]
struct Reporter {
    shared: Arc<Shared>,
    who: Subscriber,
    stream: u64,
}

impl Reporter {
    fn new(border: &Border, who: Subscriber) -> Self {
        let stream = border.streams.fetch_add(1, Ordering::Relaxed);
        border.shared.step(Event::ReportBegin(who.clone(), stream));
        Self { shared: Arc::clone(&border.shared), who, stream }
    }

    fn take(&self, item: PodItem) {
        let (who, stream) = (self.who.clone(), self.stream);
        self.shared.step(match item {
            PodItem::Seen(seen) => Event::Seen(who, seen),
            PodItem::Gone(uid) => Event::Unseen(who, uid),
            PodItem::Avoided(uid) => Event::Avoided(who, stream, uid),
            PodItem::AvoidedNoMore(uid) => Event::AvoidedNoMore(who, stream, uid),
            PodItem::NamesRouted => Event::NamesRouted(who, stream),
            PodItem::Routed(name) => Event::Routed(who, stream, name, true),
            PodItem::RoutedNoMore(name) => Event::Routed(who, stream, name, false),
            PodItem::Synced => Event::ReportSynced(who, stream),
            // A version means something only to the replica whose table it is of; what is avoided, to all.
            PodItem::Applied(_) | PodItem::Sender(_) => return,
        });
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.shared.step(Event::ReportEnd(self.who.clone(), self.stream));
    }
}

/// The change as a role sees it: scale policies are for autoscalers, names and addresses for everybody else, who may
/// ask and how requests are logged for activators.
fn shape(change: RouteChange, role: Role) -> Option<RouteChange> {
    match (role, change) {
        (Role::Agent, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(Revision { policy: None, sources: None, ..it }))
        }
        (Role::Activator, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(Revision { policy: None, ..it }))
        }
        (Role::Autoscaler, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(Revision { sources: None, ..it }))
        }
        (Role::Autoscaler, RouteChange::Service(_)) => None,
        (Role::Agent | Role::Autoscaler, RouteChange::Settings(it)) => {
            wire::Settings { request_log: None, edge: wire::Edge::default(), ..it }
                .said()
                .map(RouteChange::Settings)
        }
        (Role::Agent | Role::Activator | Role::Autoscaler, change) => Some(change),
    }
}

#[tonic::async_trait]
impl Pods for Border {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::peer(&request);
        let mut gate = Gate::new(&self.shutdown);
        let (stop, mut from) = (gate.stop.clone(), None::<Reporter>);
        let each = |item: PodItem| {
            let allowed = match (&item, &from) {
                (PodItem::Sender(who), _) => {
                    peer.may(who, "report", &[Role::Agent, Role::Activator])
                }
                (_, Some(from)) => peer.may_report(&from.who, &item),
                (_, None) => return,
            };
            if !gate.passes(allowed) {
                return;
            }
            if let PodItem::Sender(who) = item {
                from = Some(Reporter::new(self, who));
                return;
            }
            if let Some(from) = &from {
                from.take(item);
            }
        };
        let ended = link::receive(request.into_inner(), &stop, each).await;
        gate.end(ended)
    }
}

#[tonic::async_trait]
impl Scale for Border {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::peer(&request);
        let mut gate = Gate::new(&self.shutdown);
        let (stop, mut decider) = (gate.stop.clone(), Decider::new(self));
        let each = |item: ScaleItem| {
            let allowed = match &item {
                ScaleItem::Sender(who) => peer.may(who, "decide scale", &[Role::Autoscaler]),
                // Without a sender nothing of it counts.
                _ => Ok(()),
            };
            if gate.passes(allowed) {
                decider.take(item);
            }
        };
        let ended = link::receive(request.into_inner(), &stop, each).await;
        gate.end(ended)
    }
}

/// Ends a stream as soon as it says what its sender may not.
struct Gate {
    stop: CancellationToken,
    denied: Option<Denied>,
}

impl Gate {
    fn new(shutdown: &CancellationToken) -> Self {
        Self { stop: shutdown.child_token(), denied: None }
    }

    /// Whether the item may be taken in. After the first that may not, none may.
    fn passes(&mut self, allowed: Result<(), Denied>) -> bool {
        if let (Err(denied), None) = (allowed, &self.denied) {
            self.denied = Some(denied);
            self.stop.cancel();
        }
        self.denied.is_none()
    }

    fn end(self, ended: Result<(), Status>) -> Result<Response<raw::Empty>, Status> {
        match &self.denied {
            Some(denied) => Err(refuse(denied)),
            None => ended.map(|()| Response::new(raw::Empty {})),
        }
    }
}

fn refuse(denied: &Denied) -> Status {
    warn!(%denied, "stream refused");
    tls::status(denied)
}

/// One autoscaler's stream, for as long as the value lives.
struct Decider {
    border: Border,
    stream: u64,
}

impl Decider {
    fn new(border: &Border) -> Self {
        let stream = border.streams.fetch_add(1, Ordering::Relaxed);
        Self { border: border.clone(), stream }
    }

    fn take(&mut self, item: ScaleItem) {
        let stream = self.stream;
        self.border.decide_by(|all| match item {
            ScaleItem::Sender(who) => all.begin(stream, &who.name),
            ScaleItem::Alive(alive) => all.alive(stream, alive),
            // The sender's own clock: it says nothing here.
            ScaleItem::Since(_) => Vec::new(),
            ScaleItem::Decision(decision) => all.decide(stream, decision),
            ScaleItem::Gone(revision) => all.undecide(stream, revision),
            ScaleItem::Synced => all.synced(stream),
        });
    }
}

impl Drop for Decider {
    fn drop(&mut self) {
        self.border.decide_by(|all| all.end(self.stream));
    }
}

#[cfg(test)]
mod tests;
