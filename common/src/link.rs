//! Shell: the one way a stream between two parts is opened, kept open and served.
//!
//! A stream that breaks is opened again, at first after 10 ms, later after at most 1 s, until the shutdown
//! token ends it. What was missed meanwhile is said again by the [`Outbox`] it is fed from.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint, server::Router},
};
use tracing::{info, warn};

use crate::{
    outbox::{Batch, Cursor, Outbox},
    wire::{
        Decision, Name, PodItem, Refused, RouteChange, RouteItem, RouteKey, RouteView, ScaleItem,
        Subscriber, UsageItem, UsageKey, UsageSeen,
        raw::{
            self, pods_client::PodsClient, routes_client::RoutesClient, scale_client::ScaleClient,
            usage_client::UsageClient,
        },
    },
};

const FIRST_RETRY: Duration = Duration::from_millis(10);
const LAST_RETRY: Duration = Duration::from_secs(1);
/// A dead TCP peer is noticed within interval + timeout; unix sockets notice at once.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// A stream could not be opened or broke.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The endpoint's text makes no sense.
    #[error("endpoint {endpoint:?} is not `unix:/path` or `http://host:port`")]
    Endpoint {
        /// As given.
        endpoint: String,
    },
    /// Nobody answers there.
    #[error("cannot connect to {endpoint}")]
    Connect {
        /// Where to.
        endpoint: String,
        /// Why not.
        #[source]
        source: tonic::transport::Error,
    },
    /// The peer ended the stream with an error.
    #[error("stream with {endpoint} broke")]
    Broke {
        /// With whom.
        endpoint: String,
        /// Its words.
        #[source]
        source: Box<Status>,
    },
    /// The endpoint could not be listened on.
    #[error("cannot listen on {endpoint}")]
    Listen {
        /// Where.
        endpoint: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The server ended.
    #[error("server on {endpoint} failed")]
    Serve {
        /// Where.
        endpoint: String,
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
}

/// A part's way to one other part.
#[derive(Debug)]
pub struct Link {
    endpoint: String,
    who: Subscriber,
    shutdown: CancellationToken,
    up: AtomicBool,
}

/// Names what a PodReport stream speaks of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PodKey {
    /// A pod, by uid.
    Pod(String),
    /// The RouteTable version in force.
    Applied,
}

/// Newest states of the subjects that changed.
pub type Changes = BTreeMap<RouteKey, RouteChange>;

/// What one batch of a RouteTable stream says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteBatch {
    /// In force once every change is.
    pub version: u64,
    /// Whether it is a stream's first: every subject that it does not name is gone.
    pub is_whole: bool,
    /// Newest state of each subject that changed.
    pub changes: Changes,
}

impl RouteBatch {
    /// Takes in the batch that came next.
    pub fn follow(&mut self, next: Self) {
        if next.is_whole {
            *self = next;
            return;
        }
        self.version = next.version;
        self.changes.extend(next.changes);
    }
}

impl Link {
    /// A link from `who` to the part at `endpoint` (`unix:/path` or `http://host:port`), until `shutdown`.
    pub fn new(endpoint: impl Into<String>, who: Subscriber, shutdown: CancellationToken) -> Self {
        Self { endpoint: endpoint.into(), who, shutdown, up: AtomicBool::new(false) }
    }

    /// Whether the latest stream stands.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Follows the RouteTable. `each` gets the whole table and the subjects touched by one batch.
    pub async fn watch_routes(&self, mut each: impl FnMut(&RouteView, &BTreeSet<RouteKey>)) {
        let mut view = RouteView::default();
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

    /// Follows the RouteTable without remembering anything of it: what a whole table leaves out is gone.
    pub async fn watch_batches(&self, mut each: impl FnMut(RouteBatch)) {
        let mut wait = FIRST_RETRY;
        while self.again(&mut wait, self.watch_batches_once(&mut each)).await {}
    }

    async fn watch_batches_once(&self, each: &mut impl FnMut(RouteBatch)) -> Result<(), LinkError> {
        let mut client = RoutesClient::new(self.connect().await?);
        let opened = client.watch(raw::Subscriber::from(self.who.clone())).await;
        let mut items = opened.map_err(|status| self.broke(status))?.into_inner();
        self.opened("routes");
        let (mut changes, mut is_whole) = (Changes::new(), true);
        while let Some(item) = items.message().await.map_err(|status| self.broke(status))? {
            let Some(RouteItem { version, change }) = accept(item) else { continue };
            match change.key() {
                Some(key) => drop(changes.insert(key, change)),
                None => {
                    let changes = std::mem::take(&mut changes);
                    each(RouteBatch { version, is_whole, changes });
                    is_whole = false;
                }
            }
        }
        Ok(())
    }

    /// Reports pods and the table version in force. Values are `PodItem::Seen` and `PodItem::Applied`.
    pub async fn report_pods(&self, outbox: &Outbox<PodKey, PodItem>) {
        let mut wait = FIRST_RETRY;
        while self.again(&mut wait, self.report_pods_once(outbox)).await {}
    }

    async fn report_pods_once(&self, outbox: &Outbox<PodKey, PodItem>) -> Result<(), LinkError> {
        let gone = |key| match key {
            PodKey::Pod(uid) => PodItem::Gone(uid),
            PodKey::Applied => PodItem::Applied(0),
        };
        let first = PodItem::Sender(self.who.clone());
        let items = outgoing(first, outbox.subscribe(), |_, it| it, gone, PodItem::Synced);
        let mut client = PodsClient::new(self.connect().await?);
        self.opened("pods");
        client.report(items).await.map(drop).map_err(|status| self.broke(status))
    }

    /// Reports usage.
    pub async fn report_usage(&self, outbox: &Outbox<UsageKey, UsageSeen>) {
        let mut wait = FIRST_RETRY;
        while self.again(&mut wait, self.report_usage_once(outbox)).await {}
    }

    async fn report_usage_once(
        &self,
        outbox: &Outbox<UsageKey, UsageSeen>,
    ) -> Result<(), LinkError> {
        let first = UsageItem::Sender(self.who.clone());
        let seen = |_, it| UsageItem::Seen(it);
        let items = outgoing(first, outbox.subscribe(), seen, UsageItem::Gone, UsageItem::Synced);
        let mut client = UsageClient::new(self.connect().await?);
        self.opened("usage");
        client.report(items).await.map(drop).map_err(|status| self.broke(status))
    }

    /// Sends scale decisions.
    pub async fn decide(&self, outbox: &Outbox<Name, Decision>) {
        let mut wait = FIRST_RETRY;
        while self.again(&mut wait, self.decide_once(outbox)).await {}
    }

    async fn decide_once(&self, outbox: &Outbox<Name, Decision>) -> Result<(), LinkError> {
        let first = ScaleItem::Sender(self.who.clone());
        let state = |_, it| ScaleItem::Decision(it);
        let items = outgoing(first, outbox.subscribe(), state, ScaleItem::Gone, ScaleItem::Synced);
        let mut client = ScaleClient::new(self.connect().await?);
        self.opened("decisions");
        client.decide(items).await.map(drop).map_err(|status| self.broke(status))
    }

    async fn connect(&self) -> Result<Channel, LinkError> {
        let bad = |_| LinkError::Endpoint { endpoint: self.endpoint.clone() };
        let endpoint = Endpoint::from_shared(self.endpoint.clone()).map_err(bad)?;
        let endpoint = endpoint.http2_keep_alive_interval(KEEPALIVE).keep_alive_timeout(KEEPALIVE);
        let failed = |source| LinkError::Connect { endpoint: self.endpoint.clone(), source };
        endpoint.connect().await.map_err(failed)
    }

    fn opened(&self, what: &'static str) {
        self.up.store(true, Ordering::Relaxed);
        info!(endpoint = %self.endpoint, what, "stream opened");
    }

    fn broke(&self, status: Status) -> LinkError {
        LinkError::Broke { endpoint: self.endpoint.clone(), source: Box::new(status) }
    }

    /// Runs one attempt and waits before the next. Returns false once the link is shut down.
    ///
    /// A stream that stood starts the waiting anew.
    async fn again(
        &self,
        wait: &mut Duration,
        attempt: impl Future<Output = Result<(), LinkError>>,
    ) -> bool {
        let ended = tokio::select! {
            ended = attempt => ended,
            () = self.shutdown.cancelled() => return false,
        };
        if self.up.swap(false, Ordering::Relaxed) {
            *wait = FIRST_RETRY;
        }
        match ended {
            Ok(()) => info!(endpoint = %self.endpoint, "stream ended by peer"),
            Err(error) => warn!(error = %chain(&error), retry = ?wait, "stream down"),
        }
        let waited = self.shutdown.run_until_cancelled(tokio::time::sleep(*wait)).await;
        *wait = (*wait * 2).min(LAST_RETRY);
        waited.is_some()
    }
}

/// The error with all its causes, on one line.
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

/// The items of a stream: who speaks, then batches from the box, each ended by `synced`.
fn outgoing<K, V, T, R>(
    first: T,
    cursor: Cursor<K, V>,
    state: impl Fn(K, V) -> T + Send + 'static,
    gone: impl Fn(K) -> T + Send + 'static,
    synced: T,
) -> impl Stream<Item = R> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    T: Clone + Send + 'static,
    R: From<T> + Send + 'static,
{
    let batches = batches(cursor).flat_map(move |batch| {
        let item = |(key, value): (K, Option<V>)| match value {
            Some(value) => state(key, value),
            None => gone(key),
        };
        let items: Vec<T> = batch.steps.into_iter().map(item).chain([synced.clone()]).collect();
        stream::iter(items)
    });
    stream::iter([first]).chain(batches).map(R::from)
}

fn batches<K, V>(cursor: Cursor<K, V>) -> impl Stream<Item = Batch<K, V>> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    stream::unfold(cursor, |mut cursor| async move { Some((cursor.next().await, cursor)) })
}

/// The RouteTable stream for one subscriber, from the box that keeps its states. See [`route_items`].
pub fn route_stream(
    cursor: Cursor<RouteKey, RouteChange>,
    shutdown: CancellationToken,
    shape: impl Fn(RouteChange) -> Option<RouteChange> + Send + 'static,
) -> impl Stream<Item = Result<raw::RouteItem, Status>> + Send + 'static {
    route_items(batches(cursor), shutdown, shape)
}

/// Batches of the RouteTable as they travel, each ended by `Synced`: each change as `shape` lets a subscriber see it.
///
/// Where `shape` returns `None` the subscriber is told that the subject is gone, which means nothing to it
/// unless it knew the subject before. `shutdown` ends the stream, so that a server can stop.
pub fn route_items(
    batches: impl Stream<Item = Batch<RouteKey, RouteChange>> + Send + 'static,
    shutdown: CancellationToken,
    shape: impl Fn(RouteChange) -> Option<RouteChange> + Send + 'static,
) -> impl Stream<Item = Result<raw::RouteItem, Status>> + Send + 'static {
    let items = batches.flat_map(move |Batch { version, steps }| {
        let item = |(key, change): (RouteKey, Option<RouteChange>)| {
            change.and_then(&shape).unwrap_or(RouteChange::Gone(key))
        };
        let changes = steps.into_iter().map(item).chain([RouteChange::Synced]);
        let raw = |change| Ok(RouteItem { version, change }.into());
        stream::iter(changes.map(raw).collect::<Vec<_>>())
    });
    items.take_until(shutdown.cancelled_owned())
}

/// Hands each item of an incoming stream to `each` until the stream ends or `shutdown`.
///
/// Refused items are logged and skipped: one bad subject must not stop the others.
pub async fn receive<R, T>(
    mut items: Streaming<R>,
    shutdown: &CancellationToken,
    mut each: impl FnMut(T),
) -> Result<(), Status>
where
    T: TryFrom<R, Error = Refused>,
{
    while let Some(item) = shutdown.run_until_cancelled(items.message()).await {
        match item?.map(accept) {
            Some(item) => item.into_iter().for_each(&mut each),
            None => return Ok(()),
        }
    }
    Err(Status::unavailable("shutting down"))
}

fn accept<R, T: TryFrom<R, Error = Refused>>(item: R) -> Option<T> {
    T::try_from(item).inspect_err(|refused| warn!(%refused, "message refused")).ok()
}

/// Serves `router` at `endpoint` until `shutdown`. A stale unix socket is replaced.
///
/// Returns once every stream has ended: handlers must heed `shutdown` too, as [`route_stream`] and
/// [`receive`] do.
pub async fn serve(
    endpoint: &str,
    router: Router,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let listen = |source| LinkError::Listen { endpoint: endpoint.to_owned(), source };
    let failed = |source| LinkError::Serve { endpoint: endpoint.to_owned(), source };
    let stop = shutdown.cancelled_owned();
    if let Some(path) = endpoint.strip_prefix("unix:") {
        let listener = bind_unix(Path::new(path)).map_err(listen)?;
        let incoming = UnixListenerStream::new(listener);
        return router.serve_with_incoming_shutdown(incoming, stop).await.map_err(failed);
    }
    let Some(address) = endpoint.strip_prefix("http://") else {
        return Err(LinkError::Endpoint { endpoint: endpoint.to_owned() });
    };
    let incoming = TcpListenerStream::new(TcpListener::bind(address).await.map_err(listen)?);
    router.serve_with_incoming_shutdown(incoming, stop).await.map_err(failed)
}

fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

#[cfg(test)]
mod tests;
