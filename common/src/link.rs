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
        Arc,
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
    log::{self, LogComponent},
    outbox::Outbox,
    replicas::{KnownReplicas, NextReplica, ReplicaEndpoint, ReplicaSelector},
    wire::{
        AutoscalerHeartbeat, ComponentReplica, LogLevel, NamespacedName, PodReportItem,
        RouteChange, RouteItem, RouteKey, RouteView, ScaleDecision, ScaleItem, ServerComponent,
        UsageItem, UsageKey, UsageSample,
        raw::{
            self, pods_client::PodsClient, routes_client::RoutesClient, scale_client::ScaleClient,
            usage_client::UsageClient,
        },
    },
};

pub(crate) mod dial;
mod finder;
mod hold;
mod routes;
mod serve;

pub use finder::{DnsResolver, ReplicaResolver, SystemDnsResolver};
pub use hold::{SlotStreamEvent, grant_stream};
pub use routes::{DrainAckReporter, RouteBatch, RouteChanges, RoutedServiceReporter};
pub use serve::{TlsAdmission, receive, route_stream, serve, serve_to, server};

/// Longest silence of a sender of usage: a receiver treats load that is not reported in time as unknown.
const BEAT: Duration = Duration::from_secs(1);
/// Timeout of a route stream that has not named every subject, counted from its latest item.
const SILENT: Duration = Duration::from_secs(10);
/// Lifetime from which a stream counts as established: its server did not refuse it.
const LASTED: Duration = Duration::from_secs(1);

/// Error of a stream that could not be opened or broke, or of a server.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The endpoint's text matches none of the accepted forms.
    #[error("endpoint {endpoint:?}: {}", crate::replicas::RULE)]
    Endpoint {
        /// Text of the endpoint, as configured.
        endpoint: String,
    },
    /// The endpoint needs TLS, and this process has no certificate.
    #[error("{endpoint} is spoken to over TLS: give this part a token and authorities")]
    NoIdentity {
        /// Endpoint that needs TLS.
        endpoint: String,
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
    /// The peer ended the stream with an error.
    #[error("stream with {endpoint} broke")]
    Broke {
        /// Endpoint of the peer.
        endpoint: String,
        /// gRPC status that the peer sent.
        #[source]
        source: Box<Status>,
    },
    /// The peer has not sent a whole table within the timeout.
    #[error("{endpoint} has not sent a whole table")]
    Silent {
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
    fn is_refused(&self) -> bool {
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
    to: Arc<ReplicaResolver>,
    /// Resolvers that receive the replicas listed in the RouteTable, by component.
    told: Vec<(ServerComponent, Arc<ReplicaResolver>)>,
    who: ComponentReplica,
    shutdown: CancellationToken,
    up: AtomicUsize,
}

/// Key of one subject of a PodReport stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PodReportKey {
    /// Pod of this node, by its uid.
    Pod(String),
    /// Version of the RouteTable that is in force.
    Applied,
    /// Draining pod that the sender opens no connection to, by its uid.
    Avoided(String),
    /// Announcement that the sender names each service that it routes to some Revision.
    NamesRouted,
    /// Service that the sender routes to some Revision.
    Routed(NamespacedName),
}

impl ComponentLink {
    /// Returns a link from `who` to the component at `endpoint`, until `shutdown`. See
    /// [`crate::replicas::EndpointSetting`].
    pub fn new(
        endpoint: impl AsRef<str>,
        who: ComponentReplica,
        shutdown: CancellationToken,
    ) -> Self {
        Self::to(ReplicaResolver::of(endpoint.as_ref()), who, shutdown)
    }

    /// Returns a link from `who` to the replicas that `to` finds, until `shutdown`.
    pub fn to(
        to: Arc<ReplicaResolver>,
        who: ComponentReplica,
        shutdown: CancellationToken,
    ) -> Self {
        Self { to, told: Vec::new(), who, shutdown, up: AtomicUsize::new(0) }
    }

    /// Passes the replicas of `part` that the RouteTable lists to `finder`.
    pub fn tells(mut self, part: ServerComponent, finder: Arc<ReplicaResolver>) -> Self {
        self.told.push((part, finder));
        self
    }

    /// Returns true if any stream is open.
    pub fn is_up(&self) -> bool {
        self.standing() > 0
    }

    /// Returns the number of open streams.
    pub fn standing(&self) -> usize {
        self.up.load(Ordering::Relaxed)
    }

    /// Follows the RouteTable. `each` gets the whole table and the keys that one batch changed.
    pub async fn watch_routes(&self, mut each: impl FnMut(&RouteView, &BTreeSet<RouteKey>)) {
        let mut view = RouteView::default();
        // A batch names each subject once, so `Synced` is added behind it, and `absorb` acts only there.
        self.watch_batches(|RouteBatch { version, is_whole, changes }| {
            if is_whole {
                view.restart();
            }
            for change in changes.into_values().chain([RouteChange::Synced]) {
                if let Some(changed) = view.absorb(RouteItem { version, change }) {
                    each(&view, &changed);
                }
            }
        })
        .await;
    }

    /// Follows the RouteTable without storing it. Subjects that a batch with `is_whole` omits are removed.
    pub async fn watch_batches(&self, each: impl FnMut(RouteBatch)) {
        tokio::select! {
            () = self.follow(each) => {}
            () = self.to.keep_looking() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    async fn follow(&self, mut each: impl FnMut(RouteBatch)) {
        let mut chooser = ReplicaSelector::default();
        let mut table = routes::RouteStreamState::default();
        let begin = Instant::now();
        loop {
            let endpoint = self.choose(&mut chooser, begin).await;
            let opened = Instant::now();
            let ended = self.follow_one(&endpoint, &mut table, &mut each).await;
            let wait =
                chooser.failed(begin.elapsed(), &endpoint, opened.elapsed() >= LASTED, chance());
            self.ended(&endpoint, ended, wait);
        }
    }

    /// Waits until some replica may be tried.
    async fn choose(&self, chooser: &mut ReplicaSelector, begin: Instant) -> ReplicaEndpoint {
        let mut known = self.to.known();
        // A new replica ends the wait: it has no failures and may be tried at once.
        loop {
            let all = known.borrow_and_update().all();
            chooser.retain(&all);
            let wait = match chooser.next(begin.elapsed(), &all, chance()) {
                NextReplica::Try(endpoint) => return endpoint,
                NextReplica::Wait(until) => Some(begin + until),
                NextReplica::Nobody => None,
            };
            let timer = async {
                match wait {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = timer => {}
                _ = known.changed() => {}
            }
        }
    }

    async fn follow_one(
        &self,
        endpoint: &ReplicaEndpoint,
        table: &mut routes::RouteStreamState,
        each: &mut impl FnMut(RouteBatch),
    ) -> Result<(), LinkError> {
        let broke = |status| broke(endpoint, status);
        let mut client = RoutesClient::new(self.to.dial(endpoint).await?);
        let opening = client.watch(raw::Subscriber::from(self.who.clone()));
        let opened = tokio::time::timeout(SILENT, opening).await;
        let silent = |_elapsed| LinkError::Silent { endpoint: endpoint.to_string() };
        let mut items = opened.map_err(silent)?.map_err(broke)?.into_inner();
        let _up = self.opened(endpoint, "routes");
        // Until the first `Synced`, the table of the former stream stays in force.
        table.restart(endpoint);
        loop {
            // Only the first table has a timeout: later silence means no change, and keepalive pings find dead peers.
            let patience = if table.is_whole_next() { Some(Instant::now() + SILENT) } else { None };
            let item = tokio::select! {
                item = items.message() => item.map_err(broke)?,
                () = sleep_until(patience) => {
                    return Err(LinkError::Silent { endpoint: endpoint.to_string() });
                }
                () = sleep_until(table.held_until()) => {
                    each(table.release());
                    continue;
                }
            };
            let Some(item) = item else { return Ok(()) };
            let Some(item) = serve::accept::<_, RouteItem>(item) else { continue };
            if let Some(batch) = table.absorb(item) {
                // Before `each`, so that streams to a new replica open while the receiver still works on the batch.
                self.tell(&batch);
                each(batch);
            }
        }
    }

    /// Applies what a batch says of replicas and of this component's log level.
    fn tell(&self, batch: &RouteBatch) {
        let speaker = LogComponent::from(self.who.role);
        match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => log::set(speaker, speaker.level(&it.levels)),
            // Settings that a batch omits are unchanged, but those that a whole table omits have their defaults.
            None if !batch.is_whole => {}
            Some(_) | None => log::set(speaker, LogLevel::default()),
        }
        for (part, finder) in &self.told {
            match batch.changes.get(&RouteKey::Replicas(*part)) {
                Some(RouteChange::Replicas(it)) => {
                    finder.tell(it.members.iter().map(|it| it.address));
                }
                Some(_) => finder.tell([]),
                None if batch.is_whole => finder.tell([]),
                None => {}
            }
        }
    }

    /// Reports pods, and the state of the table in force, to every replica. Values are those [`PodReportItem`]s without
    /// a key of their own: `Seen`, `Applied`, `Avoided`, `NamesRouted`, `Routed`.
    pub async fn report_pods(&self, outbox: &Outbox<PodReportKey, PodReportItem>) {
        self.to_all(|endpoint| async move {
            let gone = |key| match key {
                PodReportKey::Pod(uid) => PodReportItem::Gone(uid),
                PodReportKey::Applied => PodReportItem::Applied(0),
                PodReportKey::Avoided(uid) => PodReportItem::AvoidedNoMore(uid),
                // Never removed from the outbox, so this value is never sent as a removal.
                PodReportKey::NamesRouted => PodReportItem::NamesRouted,
                PodReportKey::Routed(name) => PodReportItem::RoutedNoMore(name),
            };
            let first = vec![PodReportItem::Sender(self.who.clone())];
            let channel = self.to.dial(&endpoint).await?;
            let items = serve::outgoing(
                first,
                outbox.subscribe(),
                |_, it| it,
                gone,
                PodReportItem::Synced,
                None,
            );
            let _up = self.opened(&endpoint, "pods");
            let ended = PodsClient::new(channel).report(items).await;
            ended.map(drop).map_err(|status| broke(&endpoint, status))
        })
        .await;
    }

    /// Sends usage samples to every replica.
    pub async fn report_usage(&self, outbox: &Outbox<UsageKey, UsageSample>) {
        self.to_all(|endpoint| async move {
            let first = vec![UsageItem::Sender(self.who.clone())];
            let seen = |_, it| UsageItem::Seen(it);
            let (gone, synced) = (UsageItem::Gone, UsageItem::Synced);
            let channel = self.to.dial(&endpoint).await?;
            let beat = Some(BEAT);
            let items = serve::outgoing(first, outbox.subscribe(), seen, gone, synced, beat);
            let _up = self.opened(&endpoint, "usage");
            let ended = UsageClient::new(channel).report(items).await;
            ended.map(drop).map_err(|status| broke(&endpoint, status))
        })
        .await;
    }

    /// Sends scale decisions to every replica, and each heartbeat that `alive` receives.
    pub async fn decide(
        &self,
        outbox: &Outbox<NamespacedName, ScaleDecision>,
        alive: &tokio::sync::watch::Receiver<AutoscalerHeartbeat>,
    ) {
        self.to_all(|endpoint| async move {
            let channel = self.to.dial(&endpoint).await?;
            let mut alive = alive.clone();
            // The heartbeat precedes the decisions, since a controller elects the active autoscaler by it.
            let now = ScaleItem::Alive(alive.borrow_and_update().clone());
            let first = [ScaleItem::Sender(self.who.clone()), now].map(raw::ScaleItem::from);
            let state = |_, it| ScaleItem::Decision(it);
            let (gone, synced) = (ScaleItem::Gone, ScaleItem::Synced);
            let decisions =
                serve::outgoing(Vec::new(), outbox.subscribe(), state, gone, synced, None);
            // Heartbeats bypass the outbox: only the latest one matters, and none must wait behind decisions.
            let beats = serve::changes(alive).map(|it| ScaleItem::Alive(it).into());
            let items = stream::iter(first).chain(stream::select(decisions, beats));
            let _up = self.opened(&endpoint, "decisions");
            let ended = ScaleClient::new(channel).decide(items).await;
            ended.map(drop).map_err(|status| broke(&endpoint, status))
        })
        .await;
    }

    /// Keeps a stream to every replica until shutdown.
    ///
    /// A stream that is open stays open when its replica is no longer known. A replica that ends closes the stream
    /// itself, and a failure of DNS must not.
    async fn to_all<F>(&self, once: impl Fn(ReplicaEndpoint) -> F)
    where
        F: Future<Output = Result<(), LinkError>>,
    {
        let all = async {
            // An endpoint stays in `kept` until its stream has ended: a replica that is named again has no second
            // stream.
            let (mut known, mut kept) = (self.to.known(), BTreeSet::new());
            let mut streams = FuturesUnordered::new();
            loop {
                for endpoint in known.borrow_and_update().all() {
                    if kept.insert(endpoint.clone()) {
                        streams.push(self.keep(endpoint, &once));
                    }
                }
                tokio::select! {
                    Some(endpoint) = streams.next() => drop(kept.remove(&endpoint)),
                    _ = known.changed() => {}
                }
            }
        };
        tokio::select! {
            () = all => {}
            () = self.to.keep_looking() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    /// Keeps one stream open as long as its replica is known.
    async fn keep<F>(
        &self,
        endpoint: ReplicaEndpoint,
        once: &impl Fn(ReplicaEndpoint) -> F,
    ) -> ReplicaEndpoint
    where
        F: Future<Output = Result<(), LinkError>>,
    {
        let (mut chooser, begin) = (ReplicaSelector::default(), Instant::now());
        let mut known = self.to.known();
        while self.to.knows(&endpoint) {
            let opened = Instant::now();
            let ended = once(endpoint.clone()).await;
            let stood = opened.elapsed() >= LASTED;
            let wait = chooser.failed(begin.elapsed(), &endpoint, stood, chance());
            self.ended(&endpoint, ended, wait);
            // A replica that is no longer known ends the wait, so that the loop notices it.
            let forgotten = known.wait_for(|known: &KnownReplicas| !known.contains(&endpoint));
            let _either = tokio::time::timeout(wait, forgotten).await;
        }
        endpoint
    }

    fn opened(&self, endpoint: &ReplicaEndpoint, what: &'static str) -> OpenStreamGuard<'_> {
        self.up.fetch_add(1, Ordering::Relaxed);
        info!(%endpoint, what, "stream opened");
        OpenStreamGuard(&self.up)
    }

    fn ended(&self, endpoint: &ReplicaEndpoint, ended: Result<(), LinkError>, retry: Duration) {
        match ended {
            Ok(()) => info!(%endpoint, "stream ended by peer"),
            Err(error) => {
                // A refusal needs an operator; every other error may be a passing failure of the network.
                let refused = matches!(&error, LinkError::Broke { source, .. }
                    if matches!(source.code(), Code::PermissionDenied | Code::Unauthenticated));
                warn!(error = %chain(&error), refused, ?retry, "stream down");
            }
        }
        // The replica may have moved: a lookup now is sooner than the next regular one.
        self.to.look_again();
    }
}

/// Guard of an open stream, which counts as open as long as the value lives.
struct OpenStreamGuard<'a>(&'a AtomicUsize);

impl Drop for OpenStreamGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn broke(endpoint: &ReplicaEndpoint, status: Status) -> LinkError {
    LinkError::Broke { endpoint: endpoint.to_string(), source: Box::new(status) }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns a random number that no peer can predict.
pub(crate) fn chance() -> u64 {
    // Each `RandomState` has new random keys, so the hash of nothing is random too.
    RandomState::new().build_hasher().finish()
}

/// Formats the error with all its causes on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
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
