//! Shell: opening, keeping and serving of streams between two components.
//!
//! A component may have several replicas. Routes come from one of them, and from another as soon as that stream breaks;
//! the table in force stays meanwhile. Reports and decisions go to every replica, each on a stream of its own from the
//! same [`Outbox`], which repeats whatever a stream missed. A replica that failed is tried again after 10 ms at first,
//! later after at most 1 s, until the shutdown token ends all streams.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    StreamExt as _,
    stream::{self, FuturesUnordered},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tracing::{info, warn};

use crate::{
    outbox::Outbox,
    replicas::{KnownReplicas, ReplicaEndpoint, ReplicaSelector},
    wire::{
        AutoscalerHeartbeat, ComponentReplica, NamespacedName, PodReportItem, ScaleDecision,
        ScaleItem, ServerComponent, UsageItem, UsageKey, UsageSample,
        raw::{
            self, pods_client::PodsClient, scale_client::ScaleClient, usage_client::UsageClient,
        },
    },
};

mod batch_inbox;
pub(crate) mod dial;
mod known_items;
mod resolver;
mod route_batches;
mod route_codec;
mod route_watch;
mod serve;
mod slot_stream;

pub use batch_inbox::RouteBatchInbox;
pub use resolver::{DnsResolver, ReplicaResolver, SystemDnsResolver};
pub use route_batches::{DrainAckReporter, RouteBatch, RouteChanges, RoutedServiceReporter};
pub use serve::{TlsAdmission, receive_items, route_stream, serve, serve_with_tls, server_builder};
pub use slot_stream::{SlotStreamEvent, grant_stream};

/// Longest silence of a sender of usage: a receiver treats load that is not reported in time as unknown.
const MAX_USAGE_SILENCE: Duration = Duration::from_secs(1);
/// Duration of an open stream from which it counts as established: its server did not refuse it.
const ESTABLISHED_AFTER: Duration = Duration::from_secs(1);

/// Error of a stream that could not be opened or broke, or of a server.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The endpoint's text matches none of the accepted forms.
    #[error("endpoint {endpoint:?}: {}", crate::replicas::ENDPOINT_RULE)]
    Endpoint {
        /// Text of the endpoint, as configured.
        endpoint: String,
    },
    /// The endpoint needs TLS, and this process has no certificate.
    #[error(
        "{endpoint} requires TLS: configure a token and certificate authorities for this component"
    )]
    NoIdentity {
        /// Endpoint that needs TLS.
        endpoint: String,
    },
    /// No replica uses TLS, over which alone a certificate is requested.
    #[error("no replica at {setting} uses TLS, which a request for a certificate needs")]
    NoTlsReplica {
        /// Setting that locates the replicas.
        setting: String,
    },
    /// No connection could be made to the endpoint.
    #[error("cannot connect to {endpoint}")]
    Connect {
        /// Endpoint that was to be connected to.
        endpoint: String,
        /// Error of the transport, such as a refused connection.
        #[source]
        source: tonic::transport::Error,
    },
    /// The stream ended with an error, of the peer or of the connection.
    #[error("stream with {endpoint} broke")]
    StreamBroke {
        /// Endpoint of the peer.
        endpoint: String,
        /// Status that the peer sent, or that tonic made of the connection's error.
        #[source]
        source: Box<Status>,
    },
    /// The peer has not sent a whole table within the timeout.
    #[error("{endpoint} has not sent a whole table")]
    TableTimeout {
        /// Endpoint of the peer.
        endpoint: String,
    },
    /// The server could not listen on its endpoint.
    #[error("cannot listen on {endpoint}")]
    Listen {
        /// Endpoint that was to be listened on.
        endpoint: String,
        /// Error of bind or listen.
        #[source]
        source: std::io::Error,
    },
    /// The server ended with an error.
    #[error("server on {endpoint} failed")]
    Serve {
        /// Endpoint that the server listened on.
        endpoint: String,
        /// Error of the transport that ended the server.
        #[source]
        source: tonic::transport::Error,
    },
}

impl LinkError {
    /// Returns true if a machine answered that no process listens at the endpoint.
    fn is_connection_refused(&self) -> bool {
        let Self::Connect { source, .. } = self else { return false };
        let first: &dyn std::error::Error = source;
        let is_refused = |it: &io::Error| it.kind() == io::ErrorKind::ConnectionRefused;
        std::iter::successors(Some(first), |it| it.source())
            .any(|it| it.downcast_ref().is_some_and(is_refused))
    }
}

/// Connection of a component to the replicas of one other component.
#[derive(Debug)]
pub struct ComponentLink {
    resolver: Arc<ReplicaResolver>,
    /// Resolvers that receive the replicas listed in the RouteTable, by component.
    listed_resolvers: Vec<(ServerComponent, Arc<ReplicaResolver>)>,
    local_replica: ComponentReplica,
    shutdown: CancellationToken,
    open_streams: AtomicUsize,
}

/// Key of one subject of a PodReport stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PodReportKey {
    /// Pod of this node, by its uid.
    Pod(String),
    /// Version of the RouteTable that is in force.
    Applied,
    /// Draining pod that the sender opens no connection to, by its uid.
    DrainAck(String),
    /// Announcement that the sender names each service that it routes to some Revision.
    RoutedServicesAnnounced,
    /// Announcement that the sender names each service that awaits agents.
    AwaitedServicesAnnounced,
    /// Service that the sender routes to some Revision, or to which it leads connects.
    RoutedService(NamespacedName),
    /// Pod with a standby order that the sender passes over, by its uid.
    PassedOver(String),
}

impl ComponentLink {
    /// Returns a link from `local_replica` to the component at `endpoint`, until `shutdown`. See
    /// [`crate::replicas::EndpointSetting`].
    pub fn new(
        endpoint: impl AsRef<str>,
        local_replica: ComponentReplica,
        shutdown: CancellationToken,
    ) -> Self {
        Self::with_resolver(
            ReplicaResolver::from_setting(endpoint.as_ref()),
            local_replica,
            shutdown,
        )
    }

    /// Returns a link from `local_replica` to the replicas that `resolver` finds, until `shutdown`.
    pub fn with_resolver(
        resolver: Arc<ReplicaResolver>,
        local_replica: ComponentReplica,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            resolver,
            listed_resolvers: Vec::new(),
            local_replica,
            shutdown,
            open_streams: AtomicUsize::new(0),
        }
    }

    /// Passes the replicas of `component` that the RouteTable lists to `resolver`.
    pub fn with_listed_replicas(
        mut self,
        component: ServerComponent,
        resolver: Arc<ReplicaResolver>,
    ) -> Self {
        self.listed_resolvers.push((component, resolver));
        self
    }

    /// Returns true if any stream is open.
    pub fn is_connected(&self) -> bool {
        self.open_stream_count() > 0
    }

    /// Returns the number of open streams.
    pub fn open_stream_count(&self) -> usize {
        self.open_streams.load(Ordering::Relaxed)
    }

    /// Reports pods, and the state of the table in force, to every replica. Values are the [`PodReportItem`]s that
    /// state something: `Observed`, `Applied`, `DrainAck`, `RoutedServicesAnnounced`, `AwaitedServicesAnnounced`,
    /// `RoutedService`, `PassedOver`. The items of removal, `Sender` and `Synced` are added here.
    pub async fn report_pods(&self, outbox: &Outbox<PodReportKey, PodReportItem>) {
        self.keep_streams_to_all(|endpoint, attempt| async move {
            let removal = |key| match key {
                PodReportKey::Pod(uid) => PodReportItem::Removed(uid),
                PodReportKey::Applied => PodReportItem::Applied(0),
                PodReportKey::DrainAck(uid) => PodReportItem::DrainAckRemoved(uid),
                // Never removed from the outbox, so these values are never sent as removals.
                PodReportKey::RoutedServicesAnnounced => PodReportItem::RoutedServicesAnnounced,
                PodReportKey::AwaitedServicesAnnounced => PodReportItem::AwaitedServicesAnnounced,
                PodReportKey::RoutedService(name) => PodReportItem::RoutedServiceRemoved(name),
                PodReportKey::PassedOver(uid) => PodReportItem::PassedOverRemoved(uid),
            };
            let first = vec![PodReportItem::Sender(self.local_replica.clone())];
            let channel = self.resolver.dial(&endpoint).await?;
            let items = serve::item_stream(
                first,
                outbox.subscribe(),
                |_, it| it,
                removal,
                PodReportItem::Synced,
                serve::UNLIMITED_SILENCE,
            );
            // Dropped at the end of the stream, which counts it as closed.
            let _up = self.record_stream_opened(&endpoint, "pods");
            attempt.record_open();
            let ended = PodsClient::new(channel).report(items).await;
            ended.map(drop).map_err(|status| stream_error(&endpoint, status))
        })
        .await;
    }

    /// Sends usage samples to every replica.
    pub async fn report_usage(&self, outbox: &Outbox<UsageKey, UsageSample>) {
        self.keep_streams_to_all(|endpoint, attempt| async move {
            let first = vec![UsageItem::Sender(self.local_replica.clone())];
            let sample = |_, it| UsageItem::Sample(it);
            let (removed, synced) = (UsageItem::Removed, UsageItem::Synced);
            let channel = self.resolver.dial(&endpoint).await?;
            let max_silence = Some(MAX_USAGE_SILENCE);
            let items =
                serve::item_stream(first, outbox.subscribe(), sample, removed, synced, max_silence);
            let _up = self.record_stream_opened(&endpoint, "usage");
            attempt.record_open();
            let ended = UsageClient::new(channel).report(items).await;
            ended.map(drop).map_err(|status| stream_error(&endpoint, status))
        })
        .await;
    }

    /// Sends scale decisions to every replica, and each heartbeat that `heartbeats` receives.
    pub async fn send_decisions(
        &self,
        outbox: &Outbox<NamespacedName, ScaleDecision>,
        heartbeats: &tokio::sync::watch::Receiver<AutoscalerHeartbeat>,
    ) {
        self.keep_streams_to_all(|endpoint, attempt| async move {
            let channel = self.resolver.dial(&endpoint).await?;
            let mut heartbeats = heartbeats.clone();
            // The heartbeat precedes the decisions, since a controller elects the active autoscaler by it.
            let latest = ScaleItem::Heartbeat(heartbeats.borrow_and_update().clone());
            let first =
                [ScaleItem::Sender(self.local_replica.clone()), latest].map(raw::ScaleItem::from);
            let state = |_, it| ScaleItem::Decision(it);
            let (removed, synced) = (ScaleItem::Removed, ScaleItem::Synced);
            let decisions = serve::item_stream(
                Vec::new(),
                outbox.subscribe(),
                state,
                removed,
                synced,
                serve::UNLIMITED_SILENCE,
            );
            // Heartbeats bypass the outbox: only the latest one matters, and none must wait behind decisions.
            let next = serve::watch_stream(heartbeats).map(|it| ScaleItem::Heartbeat(it).into());
            let items = stream::iter(first).chain(stream::select(decisions, next));
            let _up = self.record_stream_opened(&endpoint, "decisions");
            attempt.record_open();
            let ended = ScaleClient::new(channel).decide(items).await;
            ended.map(drop).map_err(|status| stream_error(&endpoint, status))
        })
        .await;
    }

    /// Keeps a stream to every replica until shutdown.
    ///
    /// A stream that is open stays open when its replica is no longer known. A replica that ends closes the stream
    /// itself, and a failure of DNS must not.
    async fn keep_streams_to_all<F>(&self, once: impl Fn(ReplicaEndpoint, StreamAttempt) -> F)
    where
        F: Future<Output = Result<(), LinkError>>,
    {
        let all = async {
            // Endpoints with a running `keep_stream`, also while it waits to try again: a replica that is named again
            // has no second one.
            let mut kept_endpoints = BTreeSet::new();
            let mut known = self.resolver.subscribe_known();
            let mut streams = FuturesUnordered::new();
            loop {
                for endpoint in known.borrow_and_update().all() {
                    if kept_endpoints.insert(endpoint.clone()) {
                        streams.push(self.keep_stream(endpoint, &once));
                    }
                }
                tokio::select! {
                    Some(endpoint) = streams.next() => drop(kept_endpoints.remove(&endpoint)),
                    _ = known.changed() => {}
                }
            }
        };
        tokio::select! {
            () = all => {}
            () = self.resolver.run_lookups() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    /// Keeps a stream to one replica: opens it again after each end, as long as the replica is known. Then it returns
    /// the endpoint, but only once an open stream has ended.
    async fn keep_stream<F>(
        &self,
        endpoint: ReplicaEndpoint,
        once: &impl Fn(ReplicaEndpoint, StreamAttempt) -> F,
    ) -> ReplicaEndpoint
    where
        F: Future<Output = Result<(), LinkError>>,
    {
        let (mut selector, begin) = (ReplicaSelector::default(), Instant::now());
        let mut known = self.resolver.subscribe_known();
        while self.resolver.is_known(&endpoint) {
            let attempt = StreamAttempt::default();
            let ended = once(endpoint.clone(), attempt.clone()).await;
            let was_established = attempt.was_established();
            let wait =
                selector.record_failure(begin.elapsed(), &endpoint, was_established, random_u64());
            self.record_stream_ended(&endpoint, ended, wait);
            // A replica that is no longer known ends the wait, so that the loop notices it.
            let forgotten = known.wait_for(|known: &KnownReplicas| !known.contains(&endpoint));
            let _either = tokio::time::timeout(wait, forgotten).await;
        }
        endpoint
    }

    fn record_stream_opened(
        &self,
        endpoint: &ReplicaEndpoint,
        what: &'static str,
    ) -> OpenStreamGuard<'_> {
        self.open_streams.fetch_add(1, Ordering::Relaxed);
        info!(%endpoint, what, "stream opened");
        OpenStreamGuard(&self.open_streams)
    }

    fn record_stream_ended(
        &self,
        endpoint: &ReplicaEndpoint,
        ended: Result<(), LinkError>,
        retry: Duration,
    ) {
        match ended {
            Ok(()) => info!(%endpoint, "stream ended by peer"),
            Err(error) => {
                // A denial needs an operator; every other error may be a passing failure of the network.
                let is_denied = matches!(&error, LinkError::StreamBroke { source, .. }
                    if matches!(source.code(), Code::PermissionDenied | Code::Unauthenticated));
                warn!(error = %error_chain(&error), refused = is_denied, ?retry, "stream down");
            }
        }
        // The replica may have moved: a lookup now is sooner than the next regular one.
        self.resolver.request_lookup();
    }
}

/// One attempt to open and keep a stream, with the time since which the stream is open. Clones are the same attempt.
#[derive(Clone, Debug, Default)]
struct StreamAttempt(Arc<OnceLock<Instant>>);

impl StreamAttempt {
    /// Records that the stream is open now; later calls change nothing.
    fn record_open(&self) {
        self.0.get_or_init(Instant::now);
    }

    /// Returns true if the stream has been open for long enough. A dial that takes long does not count: a machine that
    /// is down ends it by a timeout.
    fn was_established(&self) -> bool {
        self.0.get().is_some_and(|open_since| open_since.elapsed() >= ESTABLISHED_AFTER)
    }
}

/// Guard of an open stream, which counts as open as long as the value lives.
struct OpenStreamGuard<'a>(&'a AtomicUsize);

impl Drop for OpenStreamGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn stream_error(endpoint: &ReplicaEndpoint, status: Status) -> LinkError {
    LinkError::StreamBroke { endpoint: endpoint.to_string(), source: Box::new(status) }
}

/// Returns a random number that no peer can predict.
pub(crate) fn random_u64() -> u64 {
    // The keys of a `RandomState` come from a random number of the thread, and no two of a thread are the same. So the
    // hash of nothing is random too.
    RandomState::new().build_hasher().finish()
}

/// Formats the error with all its causes on one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
