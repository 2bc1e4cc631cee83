//! Shell: the controller's gRPC services: it streams routes to agents, activators and autoscalers, and receives
//! PodReports and ScaleDecisions.

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
    tls::{self, peer::PeerDeniedError},
    wire::{
        self, ComponentReplica, ComponentRole, PodReportItem, RevisionEntry, RouteChange,
        ScaleItem, ServerComponent,
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
    deciders::{self, AutoscalerElection},
    identity::CertificateIssuer,
    machine::ControllerEvent,
    shared::{ControllerRuntime, RouteTableSubscription, RouteTableUpdate},
};

pub mod stream;

use stream::{EncodedPieces, RouteStreamSource, encode};

/// Delay of route updates to agents and autoscalers, compared with activators.
///
/// Requests may wait for an update at an activator, and nothing waits elsewhere: until an agent routes connects to a
/// new pod, they go by the activator. On a small node the same processors bring the first request to its pod meanwhile.
const AFTER_ACTIVATORS: Duration = Duration::from_millis(1);

/// Serves the three services (Routes, Pods, Scale) at `endpoint` until `shutdown`.
pub async fn serve(
    shared: Arc<ControllerRuntime>,
    endpoint: &str,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    serve_to(shared, endpoint, None, shutdown).await
}

/// Serves the three services, and with `issuer` also its certificates; at `https://` only to peers that it admits.
pub async fn serve_to(
    shared: Arc<ControllerRuntime>,
    endpoint: &str,
    issuer: Option<&Arc<CertificateIssuer>>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let border = ControllerGrpc {
        shared,
        streams: Arc::new(AtomicU64::new(1)),
        deciders: Arc::default(),
        shutdown: shutdown.clone(),
    };
    let router = link::server()
        .add_service(stream::RouteStreamServer::new(border.clone()))
        .add_service(PodsServer::new(border.clone()))
        .add_service(ScaleServer::new(border.clone()));
    let door = issuer.map(|issuer| issuer.door());
    let router = match issuer {
        Some(issuer) => router.add_service(issuer.service()),
        None => router,
    };
    tokio::select! {
        served = link::serve_to(endpoint, router, door.as_ref(), shutdown) => served,
        // `watch_deciders` returns at shutdown. The streams end later, so this branch must not complete.
        () = async { border.watch_deciders().await; std::future::pending().await } => Ok(()),
    }
}

/// The state behind all three gRPC services, cloned into each of them.
#[derive(Clone, Debug)]
struct ControllerGrpc {
    shared: Arc<ControllerRuntime>,
    streams: Arc<AtomicU64>,
    deciders: Arc<Mutex<AutoscalerElection>>,
    shutdown: CancellationToken,
}

impl ControllerGrpc {
    /// Changes the election by `news`, and steps the machine with the events that result, in their order.
    fn decide_by(
        &self,
        news: impl FnOnce(&mut AutoscalerElection) -> Vec<deciders::ElectionEvent>,
    ) {
        // The lock is held while the machine steps: otherwise the steps of two streams could interleave.
        let mut all = self.deciders.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.chosen().map(str::to_owned);
        for step in news(&mut all) {
            self.shared.step(match step {
                deciders::ElectionEvent::Begin => ControllerEvent::DecisionsBegin,
                deciders::ElectionEvent::Decide(decision) => ControllerEvent::Decide(decision),
                deciders::ElectionEvent::Undecide(revision) => ControllerEvent::Undecide(revision),
                deciders::ElectionEvent::Synced => ControllerEvent::DecisionsSynced,
            });
        }
        // Autoscalers read the choice in the RouteTable and repeat it in heartbeats, so that all replicas agree.
        if all.chosen() != before.as_deref() {
            info!(before, now = all.chosen(), "another autoscaler's decisions count");
            self.shared.step(ControllerEvent::Choose(
                ServerComponent::Autoscaler,
                all.chosen().map(str::to_owned),
            ));
        }
    }

    /// Detects autoscalers whose heartbeats have stopped, until shutdown.
    async fn watch_deciders(&self) {
        let mut ticks = tokio::time::interval(deciders::TICK);
        // `Burst` would count the ticks of a suspended process as silence, before the waiting heartbeats are read.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            self.decide_by(AutoscalerElection::tick);
        }
    }
}

#[tonic::async_trait]
impl RouteStreamSource for ControllerGrpc {
    type Items = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

    async fn watch(&self, request: Request<raw::Subscriber>) -> Result<Self::Items, Status> {
        let peer = tls::peer(&request);
        let who = ComponentReplica::try_from(request.into_inner());
        let who = who.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        peer.may_be(&who).map_err(|denied| refuse(&denied))?;
        let follower = SubscriberGuard::new(self, who);
        let batches =
            batches(RouteTableSubscription::new(Arc::clone(&self.shared)), follower.who.role);
        let pieces = batches.flat_map(move |batch| {
            // The closure owns the follower: however the stream ends, dropping it counts one subscriber less.
            let _ = &follower;
            let count = batch.pieces.len();
            let piece = move |at: usize| {
                // The borrow moves in the whole batch, `_told` included: a shared snapshot lives until its last piece
                // is sent.
                let batch = &batch;
                batch.pieces[at].clone()
            };
            futures::stream::iter((0..count).map(piece))
        });
        Ok(Box::pin(pieces.take_until(self.shutdown.clone().cancelled_owned())))
    }
}

/// The encoded pieces of a batch, with the update that they come from, so that other streams can share it meanwhile.
struct EncodedBatch {
    pieces: EncodedPieces,
    _told: RouteTableUpdate,
}

/// Encoded batches of the RouteTable for one subscription.
fn batches(
    following: RouteTableSubscription,
    role: ComponentRole,
) -> impl Stream<Item = EncodedBatch> + Send {
    futures::stream::unfold(following, move |mut following| async move {
        let told = following.next().await;
        let pieces = match &told {
            RouteTableUpdate::Whole(whole) => {
                whole.encoded(role, |routes| encode(routes, role, shape))
            }
            RouteTableUpdate::News(routes) => encode(routes, role, shape),
        };
        if role != ComponentRole::Activator {
            tokio::time::sleep(AFTER_ACTIVATORS).await;
        }
        Some((EncodedBatch { pieces, _told: told }, following))
    })
}

/// Registration of a subscriber to the routes; dropping it ends the registration.
#[derive(Debug)]
struct SubscriberGuard {
    shared: Arc<ControllerRuntime>,
    who: ComponentReplica,
}

impl SubscriberGuard {
    fn new(border: &ControllerGrpc, who: ComponentReplica) -> Self {
        info!(role = ?who.role, name = who.name, "routes followed");
        border.shared.metrics.follows(1);
        Self { shared: Arc::clone(&border.shared), who }
    }
}

impl Drop for SubscriberGuard {
    fn drop(&mut self) {
        info!(role = ?self.who.role, name = self.who.name, "routes no longer followed");
        self.shared.metrics.follows(-1);
    }
}

/// Registration of an agent or activator that reports pods; dropping it reports the stream's end to the machine.
#[derive(Debug)]
struct PodReportStream {
    shared: Arc<ControllerRuntime>,
    who: ComponentReplica,
    stream: u64,
}

impl PodReportStream {
    fn new(border: &ControllerGrpc, who: ComponentReplica) -> Self {
        let stream = border.streams.fetch_add(1, Ordering::Relaxed);
        border.shared.step(ControllerEvent::ReportBegin(who.clone(), stream));
        Self { shared: Arc::clone(&border.shared), who, stream }
    }

    /// Turns one item of a PodReport into an event and steps the machine.
    fn take(&self, item: PodReportItem) {
        let (who, stream) = (self.who.clone(), self.stream);
        self.shared.step(match item {
            PodReportItem::Seen(seen) => ControllerEvent::Seen(who, seen),
            PodReportItem::Gone(uid) => ControllerEvent::Unseen(who, uid),
            PodReportItem::Avoided(uid) => ControllerEvent::Avoided(who, stream, uid),
            PodReportItem::AvoidedNoMore(uid) => ControllerEvent::AvoidedNoMore(who, stream, uid),
            PodReportItem::NamesRouted => ControllerEvent::NamesRouted(who, stream),
            PodReportItem::Routed(name) => ControllerEvent::Routed(who, stream, name, true),
            PodReportItem::RoutedNoMore(name) => ControllerEvent::Routed(who, stream, name, false),
            PodReportItem::Synced => ControllerEvent::ReportSynced(who, stream),
            // Versions compare within one stream only, so the world cannot use them. `Sender` has created this
            // reporter.
            PodReportItem::Applied(_) | PodReportItem::Sender(_) => return,
        });
    }
}

impl Drop for PodReportStream {
    fn drop(&mut self) {
        self.shared.step(ControllerEvent::ReportEnd(self.who.clone(), self.stream));
    }
}

/// Limits a change to what a role needs: scale policies are for autoscalers, names and addresses for agents and
/// activators. Allowed sources and the request log are for activators.
fn shape(change: RouteChange, role: ComponentRole) -> Option<RouteChange> {
    match (role, change) {
        (ComponentRole::Agent, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { policy: None, sources: None, ..it }))
        }
        (ComponentRole::Activator, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { policy: None, ..it }))
        }
        (ComponentRole::Autoscaler, RouteChange::Revision(it)) => {
            Some(RouteChange::Revision(RevisionEntry { sources: None, ..it }))
        }
        (ComponentRole::Autoscaler, RouteChange::Service(_)) => None,
        (ComponentRole::Agent | ComponentRole::Autoscaler, RouteChange::Settings(it)) => {
            // Without `request_log` and `edge` they may equal the defaults, which are not sent at all.
            wire::GlobalSettings { request_log: None, edge: wire::EdgeSettings::default(), ..it }
                .said()
                .map(RouteChange::Settings)
        }
        (ComponentRole::Agent | ComponentRole::Activator | ComponentRole::Autoscaler, change) => {
            Some(change)
        }
    }
}

#[tonic::async_trait]
impl Pods for ControllerGrpc {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::peer(&request);
        let mut gate = StreamAuthorization::new(&self.shutdown);
        let (stop, mut from) = (gate.stop.clone(), None::<PodReportStream>);
        let each = |item: PodReportItem| {
            let allowed = match (&item, &from) {
                (PodReportItem::Sender(who), _) => {
                    peer.may(who, "report", &[ComponentRole::Agent, ComponentRole::Activator])
                }
                (_, Some(from)) => peer.may_report(&from.who, &item),
                // Before `Sender` there is no identity to check the item against.
                (_, None) => return,
            };
            if !gate.passes(allowed) {
                return;
            }
            // A second `Sender` replaces the first: dropping the old reporter ends its registration.
            if let PodReportItem::Sender(who) = item {
                from = Some(PodReportStream::new(self, who));
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
impl Scale for ControllerGrpc {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::peer(&request);
        let mut gate = StreamAuthorization::new(&self.shutdown);
        let (stop, mut decider) = (gate.stop.clone(), DecisionStream::new(self));
        let each = |item: ScaleItem| {
            let allowed = match &item {
                ScaleItem::Sender(who) => {
                    peer.may(who, "decide scale", &[ComponentRole::Autoscaler])
                }
                // Without a sender the election does not know the stream, and ignores its items.
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

/// Check of a stream's items against its peer's identity: the first item that is not allowed ends the stream.
struct StreamAuthorization {
    stop: CancellationToken,
    denied: Option<PeerDeniedError>,
}

impl StreamAuthorization {
    fn new(shutdown: &CancellationToken) -> Self {
        Self { stop: shutdown.child_token(), denied: None }
    }

    /// Returns true if the item may be processed. After the first that is not allowed, none is.
    fn passes(&mut self, allowed: Result<(), PeerDeniedError>) -> bool {
        if let (Err(denied), None) = (allowed, &self.denied) {
            self.denied = Some(denied);
            self.stop.cancel();
        }
        self.denied.is_none()
    }

    /// Result of the whole stream: the denial, if there was one, hides the cancellation that it caused.
    fn end(self, ended: Result<(), Status>) -> Result<Response<raw::Empty>, Status> {
        match &self.denied {
            Some(denied) => Err(refuse(denied)),
            None => ended.map(|()| Response::new(raw::Empty {})),
        }
    }
}

fn refuse(denied: &PeerDeniedError) -> Status {
    warn!(%denied, "stream refused");
    tls::status(denied)
}

/// Registration of one autoscaler's stream; dropping it removes the stream from the election.
struct DecisionStream {
    border: ControllerGrpc,
    stream: u64,
}

impl DecisionStream {
    fn new(border: &ControllerGrpc) -> Self {
        let stream = border.streams.fetch_add(1, Ordering::Relaxed);
        Self { border: border.clone(), stream }
    }

    fn take(&mut self, item: ScaleItem) {
        let stream = self.stream;
        self.border.decide_by(|all| match item {
            ScaleItem::Sender(who) => all.begin(stream, &who.name),
            ScaleItem::Alive(alive) => all.alive(stream, alive),
            // A time of the sender's clock, for older releases: clocks of different hosts are never compared.
            ScaleItem::Since(_) => Vec::new(),
            ScaleItem::Decision(decision) => all.decide(stream, decision),
            ScaleItem::Gone(revision) => all.undecide(stream, revision),
            ScaleItem::Synced => all.synced(stream),
        });
    }
}

impl Drop for DecisionStream {
    fn drop(&mut self) {
        self.border.decide_by(|all| all.end(self.stream));
    }
}

#[cfg(test)]
mod tests;
