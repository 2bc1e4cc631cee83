//! Shell: the controller's gRPC services: it streams routes to agents, activators and autoscalers, and receives
//! PodReports and ScaleDecisions.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    link::{self, LinkError},
    tls::{self, peer::PeerDeniedError},
    wire::{
        ClientComponent, ComponentReplica, PodReportItem, ScaleItem, ServerComponent,
        raw::{
            self,
            pods_server::{Pods, PodsServer},
            scale_server::{Scale, ScaleServer},
        },
    },
};
use tokio::{task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use crate::{
    decide::{
        active_autoscaler::{self, AutoscalerElection},
        machine::ControllerEvent,
    },
    shell::{
        identity::CertificateIssuer,
        runtime::{ControllerRuntime, route_broadcast::RouteBroadcast},
    },
};

pub mod route_stream;
mod subscribers;

/// Longest delay of route updates to agents and autoscalers, compared with activators.
///
/// Requests may wait for an update at an activator. Nothing waits elsewhere: until an agent routes connects to a new
/// pod, they go by the activator. On a small node the same processors bring the first request to its pod meanwhile.
const ROUTE_UPDATE_DELAY: Duration = Duration::from_millis(1);

/// Serves the three services (Routes, Pods, Scale) at `endpoint` until `shutdown`.
pub async fn serve(
    shared: Arc<ControllerRuntime>,
    endpoint: &str,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    serve_with_issuer(shared, endpoint, None, shutdown).await
}

/// Serves the three services, and with `issuer` also its certificates; at `https://` only to peers that it admits.
pub async fn serve_with_issuer(
    shared: Arc<ControllerRuntime>,
    endpoint: &str,
    issuer: Option<&Arc<CertificateIssuer>>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let broadcast = |delay| Arc::new(RouteBroadcast::new(Arc::clone(&shared), delay));
    let grpc = ControllerGrpc {
        activator_routes: broadcast(Duration::ZERO),
        delayed_routes: broadcast(ROUTE_UPDATE_DELAY),
        shared,
        next_stream_id: Arc::new(AtomicU64::new(1)),
        election: Arc::default(),
        shutdown: shutdown.clone(),
    };
    let router = link::server_builder()
        .add_service(route_stream::RouteStreamServer::new(grpc.clone()))
        .add_service(PodsServer::new(grpc.clone()))
        .add_service(ScaleServer::new(grpc.clone()));
    let admission = issuer.map(|issuer| issuer.tls_admission());
    let router = match issuer {
        Some(issuer) => router.add_service(issuer.grpc_service()),
        None => router,
    };
    tokio::select! {
        served = link::serve_with_tls(endpoint, router, admission.as_ref(), shutdown) => served,
        // `detect_lost_autoscalers` returns at shutdown. The streams end later, so this branch must not complete.
        () = async { grpc.detect_lost_autoscalers().await; std::future::pending().await } => Ok(()),
        // Never completes: the streams need the batches until they have ended.
        () = grpc.run_broadcasts() => Ok(()),
    }
}

/// The state behind all three gRPC services, cloned into each of them.
#[derive(Clone, Debug)]
struct ControllerGrpc {
    shared: Arc<ControllerRuntime>,
    /// Changes of the RouteTable for activators.
    activator_routes: Arc<RouteBroadcast>,
    /// Changes of the RouteTable for agents and autoscalers, up to [`ROUTE_UPDATE_DELAY`] later.
    delayed_routes: Arc<RouteBroadcast>,
    next_stream_id: Arc<AtomicU64>,
    election: Arc<Mutex<AutoscalerElection>>,
    shutdown: CancellationToken,
}

impl ControllerGrpc {
    /// Changes the election by `change`, and steps the machine with the events that result, in their order.
    fn update_election(
        &self,
        change: impl FnOnce(&mut AutoscalerElection) -> Vec<active_autoscaler::ElectionEvent>,
    ) {
        // The lock is held while the machine steps: otherwise the steps of two streams could interleave.
        let mut election = self.election.lock().unwrap_or_else(PoisonError::into_inner);
        let old_active = election.active_name().map(str::to_owned);
        for step in change(&mut election) {
            self.shared.step(match step {
                active_autoscaler::ElectionEvent::Begin => ControllerEvent::DecisionStreamBegin,
                active_autoscaler::ElectionEvent::Decide(decision) => {
                    ControllerEvent::DecisionReceived(decision)
                }
                active_autoscaler::ElectionEvent::Withdraw(revision) => {
                    ControllerEvent::DecisionWithdrawn(revision)
                }
                active_autoscaler::ElectionEvent::Synced => ControllerEvent::DecisionStreamSynced,
            });
        }
        // Autoscalers read the choice in the RouteTable and repeat it in heartbeats, so that all replicas agree.
        if election.active_name() != old_active.as_deref() {
            info!(
                before = old_active,
                now = election.active_name(),
                "another autoscaler's decisions count"
            );
            self.shared.step(ControllerEvent::ActiveReplicaChanged {
                component: ServerComponent::Autoscaler,
                replica: election.active_name().map(str::to_owned),
            });
        }
    }

    /// Makes the batches of routes that the streams send, until this future is dropped.
    async fn run_broadcasts(&self) {
        // Tasks of their own: the activators' one must not wait while the other wakes a thousand streams.
        let mut tasks = JoinSet::new();
        for broadcast in [&self.activator_routes, &self.delayed_routes] {
            let broadcast = Arc::clone(broadcast);
            tasks.spawn(async move { broadcast.run().await });
        }
        // They end by a panic only. It must end the server too, whose streams would get no more changes.
        tasks.join_all().await;
    }

    /// Detects autoscalers whose heartbeats have stopped, until shutdown.
    async fn detect_lost_autoscalers(&self) {
        let mut ticks = tokio::time::interval(active_autoscaler::ELECTION_TICK);
        // `Burst` would count the ticks of a suspended process as silence, before the waiting heartbeats are read.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            self.update_election(AutoscalerElection::tick);
        }
    }
}

/// Registration of an agent or activator that reports pods; dropping it reports the stream's end to the machine.
#[derive(Debug)]
struct PodReportStream {
    shared: Arc<ControllerRuntime>,
    sender: ComponentReplica,
    stream_id: u64,
}

impl PodReportStream {
    fn new(grpc: &ControllerGrpc, sender: ComponentReplica) -> Self {
        let stream_id = grpc.next_stream_id.fetch_add(1, Ordering::Relaxed);
        grpc.shared.step(ControllerEvent::ReportStreamBegin {
            reporter: sender.clone(),
            stream: stream_id,
        });
        Self { shared: Arc::clone(&grpc.shared), sender, stream_id }
    }

    /// Turns one item of a PodReport into an event and steps the machine.
    fn handle_item(&self, item: PodReportItem) {
        let (reporter, stream) = (self.sender.clone(), self.stream_id);
        self.shared.step(match item {
            PodReportItem::Observed(observation) => {
                ControllerEvent::PodReported { reporter, stream, observation }
            }
            PodReportItem::Removed(pod_uid) => {
                ControllerEvent::PodReportWithdrawn { reporter, stream, pod_uid }
            }
            PodReportItem::DrainAck(pod_uid) => {
                ControllerEvent::DrainAcked { reporter, stream, pod_uid }
            }
            PodReportItem::DrainAckRemoved(pod_uid) => {
                ControllerEvent::DrainAckWithdrawn { reporter, stream, pod_uid }
            }
            PodReportItem::RoutedServicesAnnounced | PodReportItem::AwaitedServicesAnnounced => {
                ControllerEvent::RoutedServicesBegin { reporter, stream }
            }
            PodReportItem::RoutedService(service) => {
                ControllerEvent::ServiceRouted { reporter, stream, service }
            }
            PodReportItem::RoutedServiceRemoved(service) => {
                ControllerEvent::ServiceNoLongerRouted { reporter, stream, service }
            }
            PodReportItem::PassedOver(pod_uid) => {
                ControllerEvent::PodPassedOver { reporter, stream, pod_uid }
            }
            PodReportItem::PassedOverRemoved(pod_uid) => {
                ControllerEvent::PodUsedAgain { reporter, stream, pod_uid }
            }
            PodReportItem::Synced => ControllerEvent::ReportStreamSynced { reporter, stream },
            // Versions compare within one stream only, so the cluster state cannot use them. `Sender` has created this
            // registration.
            PodReportItem::Applied(_) | PodReportItem::Sender(_) => return,
        });
    }
}

impl Drop for PodReportStream {
    fn drop(&mut self) {
        self.shared.step(ControllerEvent::ReportStreamEnd {
            reporter: self.sender.clone(),
            stream: self.stream_id,
        });
    }
}

#[tonic::async_trait]
impl Pods for ControllerGrpc {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::request_peer(&request);
        let mut gate = StreamAuthorization::new(&self.shutdown);
        let (stop, mut reports) = (gate.stop_token.clone(), None::<PodReportStream>);
        let each = |item: PodReportItem| {
            let allowed = match (&item, &reports) {
                (PodReportItem::Sender(subscriber), _) => peer.check_role(
                    subscriber,
                    "report",
                    &[ClientComponent::Agent, ClientComponent::Activator],
                ),
                (_, Some(reports)) => peer.check_pod_item(&reports.sender, &item),
                // Before `Sender` there is no identity to check the item against.
                (_, None) => return,
            };
            if !gate.admit(allowed) {
                return;
            }
            // A second `Sender` replaces the first: dropping the old registration reports its end.
            if let PodReportItem::Sender(subscriber) = item {
                reports = Some(PodReportStream::new(self, subscriber));
                return;
            }
            if let Some(reports) = &reports {
                reports.handle_item(item);
            }
        };
        let ended = link::receive_items(request.into_inner(), &stop, each).await;
        gate.finish(ended)
    }
}

#[tonic::async_trait]
impl Scale for ControllerGrpc {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = tls::request_peer(&request);
        let mut gate = StreamAuthorization::new(&self.shutdown);
        let (stop, mut decisions) = (gate.stop_token.clone(), DecisionStream::new(self));
        let each = |item: ScaleItem| {
            let allowed = match &item {
                ScaleItem::Sender(subscriber) => {
                    peer.check_role(subscriber, "decide scale", &[ClientComponent::Autoscaler])
                }
                // Without a sender the election does not know the stream, and ignores its items.
                _ => Ok(()),
            };
            if gate.admit(allowed) {
                decisions.handle_item(item);
            }
        };
        let ended = link::receive_items(request.into_inner(), &stop, each).await;
        gate.finish(ended)
    }
}

/// Check of a stream's items against its peer's identity: the first item that is not allowed ends the stream.
struct StreamAuthorization {
    stop_token: CancellationToken,
    denial: Option<PeerDeniedError>,
}

impl StreamAuthorization {
    fn new(shutdown: &CancellationToken) -> Self {
        Self { stop_token: shutdown.child_token(), denial: None }
    }

    /// Returns true if the item may be processed. After the first that is not allowed, none is.
    fn admit(&mut self, allowed: Result<(), PeerDeniedError>) -> bool {
        if let (Err(denied), None) = (allowed, &self.denial) {
            self.denial = Some(denied);
            self.stop_token.cancel();
        }
        self.denial.is_none()
    }

    /// Result of the whole stream: the denial, if there was one, hides the cancellation that it caused.
    fn finish(self, ended: Result<(), Status>) -> Result<Response<raw::Empty>, Status> {
        match &self.denial {
            Some(denied) => Err(denied_status(denied)),
            None => ended.map(|()| Response::new(raw::Empty {})),
        }
    }
}

fn denied_status(denied: &PeerDeniedError) -> Status {
    warn!(%denied, "stream refused");
    tls::denied_status(denied)
}

/// Registration of one autoscaler's stream; dropping it removes the stream from the election.
struct DecisionStream {
    grpc: ControllerGrpc,
    stream_id: u64,
}

impl DecisionStream {
    fn new(grpc: &ControllerGrpc) -> Self {
        let stream_id = grpc.next_stream_id.fetch_add(1, Ordering::Relaxed);
        Self { grpc: grpc.clone(), stream_id }
    }

    fn handle_item(&mut self, item: ScaleItem) {
        let stream = self.stream_id;
        self.grpc.update_election(|election| match item {
            ScaleItem::Sender(subscriber) => election.begin_stream(stream, &subscriber.name),
            ScaleItem::Heartbeat(heartbeat) => election.handle_heartbeat(stream, heartbeat),
            // A time of the sender's clock, for older releases: clocks of different hosts are never compared.
            ScaleItem::Since(_) => Vec::new(),
            ScaleItem::Decision(decision) => election.handle_decision(stream, decision),
            ScaleItem::Removed(revision) => election.withdraw_decision(stream, revision),
            ScaleItem::Synced => election.handle_synced(stream),
        });
    }
}

impl Drop for DecisionStream {
    fn drop(&mut self) {
        self.grpc.update_election(|election| election.end_stream(self.stream_id));
    }
}

#[cfg(test)]
mod tests;
