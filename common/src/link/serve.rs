//! Shell: sending, receiving and serving of streams.

use std::{hash::Hash, path::Path, sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Status, Streaming,
    transport::{Server, server::Router},
};
use tracing::warn;

use super::{LinkError, dial::KEEPALIVE};
use crate::{
    outbox::{OutboxBatch, OutboxCursor},
    tls::{
        TlsCredentials,
        accept::{self, AcceptLimits, KnownAddresses},
    },
    wire::{RouteChange, RouteItem, RouteKey, WireError, raw},
};

/// Returns a server that finds dead peers by keepalive pings, as its clients do.
pub fn server_builder() -> Server {
    let server = Server::builder().http2_keepalive_interval(Some(KEEPALIVE));
    server.http2_keepalive_timeout(Some(KEEPALIVE))
}

/// Value of `max_silence` for a stream that sends nothing while nothing changes.
pub(super) const UNLIMITED_SILENCE: Option<Duration> = None;

/// Returns the items of a stream: `first`, then batches from the outbox, each ended by `synced`. After each silence of
/// `max_silence` an empty batch follows, so that the receiver can tell a quiet sender from one that is stuck.
pub(super) fn item_stream<K, V, T, R>(
    first: Vec<T>,
    cursor: OutboxCursor<K, V>,
    state: impl Fn(K, V) -> T + Send + 'static,
    removed: impl Fn(K) -> T + Send + 'static,
    synced: T,
    max_silence: Option<Duration>,
) -> impl Stream<Item = R> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    T: Clone + Send + 'static,
    R: From<T> + Send + 'static,
{
    let batches = batch_stream(cursor, max_silence).flat_map(move |batch| {
        let item = |(key, value): (K, Option<V>)| match value {
            Some(value) => state(key, value),
            None => removed(key),
        };
        // All items of a batch are ready at once, so a sender never pauses in the middle of one.
        let items: Vec<T> = batch.changes.into_iter().map(item).chain([synced.clone()]).collect();
        stream::iter(items)
    });
    stream::iter(first).chain(batches).map(R::from)
}

/// Returns the batches of a cursor. After `max_silence` without a change, an empty one follows.
fn batch_stream<K, V>(
    cursor: OutboxCursor<K, V>,
    max_silence: Option<Duration>,
) -> impl Stream<Item = OutboxBatch<K, V>> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    stream::unfold(cursor, move |mut cursor| async move {
        let batch = match max_silence {
            Some(max_silence) => {
                let next_batch = tokio::time::timeout(max_silence, cursor.next()).await;
                // A timeout drops only the wait, so the cursor keeps its position.
                next_batch.unwrap_or_else(|_| OutboxBatch {
                    version: cursor.version(),
                    changes: Vec::new(),
                })
            }
            None => cursor.next().await,
        };
        Some((batch, cursor))
    })
}

/// Returns each further value of a channel, skipping values that arrive faster than they are sent.
pub(super) fn watch_stream<T>(values: watch::Receiver<T>) -> impl Stream<Item = T> + Send + 'static
where
    T: Clone + Send + Sync + 'static,
{
    stream::unfold(values, |mut values| async move {
        values.changed().await.ok()?;
        let value = values.borrow_and_update().clone();
        Some((value, values))
    })
}

/// Returns the RouteTable stream of one subscriber from a cursor. `shape` selects and reduces each change for it.
///
/// Where `shape` returns `None`, the subscriber receives a removal, which has no effect unless it knew the subject
/// before. `shutdown` ends the stream, so that a server can stop.
pub fn route_stream(
    cursor: OutboxCursor<RouteKey, RouteChange>,
    shutdown: CancellationToken,
    shape: impl Fn(RouteChange) -> Option<RouteChange> + Send + Sync + 'static,
) -> impl Stream<Item = Result<raw::RouteItem, Status>> + Send + 'static {
    let batches = batch_stream(cursor, UNLIMITED_SILENCE);
    let items = batches.flat_map(move |OutboxBatch { version, changes }| {
        let changes = changes
            .into_iter()
            .map(|(key, change)| change.and_then(&shape).unwrap_or(RouteChange::Removed(key)));
        let items = changes.chain([RouteChange::Synced]);
        let items = items.map(|change| Ok(RouteItem { version, change }.into()));
        stream::iter(items.collect::<Vec<_>>())
    });
    items.take_until(shutdown.cancelled_owned())
}

/// Passes each item of an incoming stream to `each` until the stream ends or `shutdown`.
///
/// Refused items are logged and skipped: one bad subject must not stop the others.
pub async fn receive_items<R, T>(
    mut items: Streaming<R>,
    shutdown: &CancellationToken,
    mut each: impl FnMut(T),
) -> Result<(), Status>
where
    T: TryFrom<R, Error = WireError>,
{
    while let Some(item) = shutdown.run_until_cancelled(items.message()).await {
        match item?.map(parse_item) {
            Some(item) => item.into_iter().for_each(&mut each),
            None => return Ok(()),
        }
    }
    Err(Status::unavailable("shutting down"))
}

pub(super) fn parse_item<R, T: TryFrom<R, Error = WireError>>(item: R) -> Option<T> {
    T::try_from(item).inspect_err(|refused| warn!(%refused, "message refused")).ok()
}

/// Admission rules of a server with TLS.
#[derive(Clone, Debug)]
pub struct TlsAdmission {
    /// Certificate presented to clients, and the authorities that must have signed theirs.
    pub credentials: Arc<TlsCredentials>,
    /// True if clients without a certificate may connect, to request one.
    pub allows_anonymous: bool,
    /// Limits on handshakes and on connections without a certificate.
    pub limits: AcceptLimits,
    /// Addresses for which the limit on all addresses does not count; `None`: it counts for each.
    pub known_addresses: Option<KnownAddresses>,
}

/// Serves `router` at `endpoint` until `shutdown`, as [`serve`] does; at `https://` to clients that `admission` admits.
pub async fn serve_with_tls(
    endpoint: &str,
    router: Router,
    admission: Option<&TlsAdmission>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let Some(address) = endpoint.strip_prefix("https://") else {
        return serve(endpoint, router, shutdown).await;
    };
    let admission =
        admission.ok_or_else(|| LinkError::NoIdentity { endpoint: endpoint.to_owned() })?;
    let listen = |source| LinkError::Listen { endpoint: endpoint.to_owned(), source };
    let failed = |source| LinkError::Serve { endpoint: endpoint.to_owned(), source };
    let listener = TcpListener::bind(address).await.map_err(listen)?;
    let TlsAdmission { credentials, allows_anonymous, limits, known_addresses } = admission;
    // Shutdown ends only the accepting here; open streams end by their own handlers.
    let incoming = accept::accept_connections(
        listener,
        credentials,
        *allows_anonymous,
        *limits,
        known_addresses.clone(),
        shutdown.child_token(),
    );
    let stop = shutdown.cancelled_owned();
    router.serve_with_incoming_shutdown(incoming, stop).await.map_err(failed)
}

/// Serves `router` at `endpoint` until `shutdown`. A stale Unix socket is replaced.
///
/// Returns once every stream has ended. So handlers must stop on `shutdown` too, as [`route_stream`] and
/// [`receive_items`] do.
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
    // `https://` is served by `serve_with_tls`.
    let Some(address) = endpoint.strip_prefix("http://") else {
        return Err(LinkError::Endpoint { endpoint: endpoint.to_owned() });
    };
    let incoming = TcpListenerStream::new(TcpListener::bind(address).await.map_err(listen)?);
    router.serve_with_incoming_shutdown(incoming, stop).await.map_err(failed)
}

fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    // A process that was killed leaves its socket file, and bind(2) fails on an existing one.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}
