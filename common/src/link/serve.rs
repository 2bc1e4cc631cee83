//! Shell: streams as their receivers and servers see them.

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
    outbox::{Batch, Cursor},
    tls::{
        Credentials,
        accept::{self, Bounds},
    },
    wire::{Refused, RouteChange, RouteItem, RouteKey, raw},
};

/// A server that notices dead peers as its clients do.
pub fn server() -> Server {
    let server = Server::builder().http2_keepalive_interval(Some(KEEPALIVE));
    server.http2_keepalive_timeout(Some(KEEPALIVE))
}

/// The items of a stream: who speaks, then batches from the box, each ended by `synced`. With `beat`, a batch of nothing
/// says so often that there is no news: its receiver tells a sender that is silent from one that is stuck.
pub(super) fn outgoing<K, V, T, R>(
    first: Vec<T>,
    cursor: Cursor<K, V>,
    state: impl Fn(K, V) -> T + Send + 'static,
    gone: impl Fn(K) -> T + Send + 'static,
    synced: T,
    beat: Option<Duration>,
) -> impl Stream<Item = R> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
    T: Clone + Send + 'static,
    R: From<T> + Send + 'static,
{
    let batches = batches(cursor, beat).flat_map(move |batch| {
        let item = |(key, value): (K, Option<V>)| match value {
            Some(value) => state(key, value),
            None => gone(key),
        };
        let items: Vec<T> = batch.steps.into_iter().map(item).chain([synced.clone()]).collect();
        stream::iter(items)
    });
    stream::iter(first).chain(batches).map(R::from)
}

fn batches<K, V>(
    cursor: Cursor<K, V>,
    beat: Option<Duration>,
) -> impl Stream<Item = Batch<K, V>> + Send + 'static
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    stream::unfold(cursor, move |mut cursor| async move {
        let batch = match beat {
            Some(beat) => {
                let news = tokio::time::timeout(beat, cursor.next()).await;
                news.unwrap_or_else(|_| Batch { version: cursor.version(), steps: Vec::new() })
            }
            None => cursor.next().await,
        };
        Some((batch, cursor))
    })
}

/// Each further value that a channel gets; those that come faster than they are sent are passed over.
pub(super) fn changes<T>(values: watch::Receiver<T>) -> impl Stream<Item = T> + Send + 'static
where
    T: Clone + Send + Sync + 'static,
{
    stream::unfold(values, |mut values| async move {
        values.changed().await.ok()?;
        let value = values.borrow_and_update().clone();
        Some((value, values))
    })
}

/// The RouteTable stream for one subscriber, from the box that keeps its states: each change as `shape` lets it see it.
///
/// Where `shape` returns `None` the subscriber is told that the subject is gone, which means nothing to it
/// unless it knew the subject before. `shutdown` ends the stream, so that a server can stop.
pub fn route_stream(
    cursor: Cursor<RouteKey, RouteChange>,
    shutdown: CancellationToken,
    shape: impl Fn(RouteChange) -> Option<RouteChange> + Send + Sync + 'static,
) -> impl Stream<Item = Result<raw::RouteItem, Status>> + Send + 'static {
    let items = batches(cursor, None).flat_map(move |Batch { version, steps }| {
        let changes = steps
            .into_iter()
            .map(|(key, change)| change.and_then(&shape).unwrap_or(RouteChange::Gone(key)));
        let items = changes.chain([RouteChange::Synced]);
        let items = items.map(|change| Ok(RouteItem { version, change }.into()));
        stream::iter(items.collect::<Vec<_>>())
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

pub(super) fn accept<R, T: TryFrom<R, Error = Refused>>(item: R) -> Option<T> {
    T::try_from(item).inspect_err(|refused| warn!(%refused, "message refused")).ok()
}

/// Who is let in where TLS is spoken.
#[derive(Clone, Debug)]
pub struct Door {
    /// What is shown to clients, and who vouches for theirs.
    pub credentials: Arc<Credentials>,
    /// Whether those without a certificate get in, to ask for one.
    pub open: bool,
    /// What strangers may take.
    pub bounds: Bounds,
}

/// Serves `router` at `endpoint` until `shutdown`, as [`serve`] does; at `https://` to those whom `door` lets in.
pub async fn serve_to(
    endpoint: &str,
    router: Router,
    door: Option<&Door>,
    shutdown: CancellationToken,
) -> Result<(), LinkError> {
    let Some(address) = endpoint.strip_prefix("https://") else {
        return serve(endpoint, router, shutdown).await;
    };
    let door = door.ok_or_else(|| LinkError::NoIdentity { endpoint: endpoint.to_owned() })?;
    let listen = |source| LinkError::Listen { endpoint: endpoint.to_owned(), source };
    let failed = |source| LinkError::Serve { endpoint: endpoint.to_owned(), source };
    let listener = TcpListener::bind(address).await.map_err(listen)?;
    let Door { credentials, open, bounds } = door;
    let incoming = accept::incoming(listener, credentials, *open, *bounds, shutdown.child_token());
    let stop = shutdown.cancelled_owned();
    router.serve_with_incoming_shutdown(incoming, stop).await.map_err(failed)
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
