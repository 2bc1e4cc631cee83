//! Shell: one client connection: the bytes and requests that count for it, and the guards that end their counts.

use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use common::once_signal::OnceSignal;
use tokio_util::sync::CancellationToken;

use super::{ClientConnections, ClientUsage};
use crate::{
    budget::{ClientBound, ClientNetwork, HYPER_BUFFER_BYTES, STREAM_OVERHEAD_BYTES},
    clients::client_auth_result::ClientAuthResult,
    clock::now_ns,
};

/// One client connection. It counts for as long as any reference to it exists.
#[derive(Debug)]
pub struct ClientConnection {
    pub(super) id: u64,
    connections: Arc<ClientConnections>,
    /// Usage of the client that it belongs to; unset for a trusted proxy's connection.
    client_usage: OnceLock<Arc<ClientUsage>>,
    /// Protocol of the connection; unset until its first bytes have shown it.
    pub(super) protocol: OnceLock<ConnectionProtocol>,
    usage: Mutex<ConnectionUsage>,
    /// Result of a handshake that asked for the client's certificate.
    client_auth_result: OnceLock<Box<ClientAuthResult>>,
    /// Bytes of responses that were not sent to its client yet.
    pub(super) response_bytes: AtomicUsize,
    /// Number of requests whose responses have not ended.
    active_requests: AtomicUsize,
    /// Time at which the last request ended, in ns of [`now_ns`].
    idle_since_ns: AtomicU64,
    /// Number of requests that can be notified when they are refused.
    refusal_subscribers: AtomicUsize,
    /// Set once its requests are refused, if they wait or have a body.
    refusal: OnceSignal,
    /// Cancelled once the connection has to end at once.
    pub cut_off: CancellationToken,
}

/// Protocol of a client connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionProtocol {
    /// HTTP/1.1, and what becomes of the connection after an upgrade.
    Http1 {
        /// True if the connection has TLS.
        is_tls: bool,
    },
    /// HTTP/2, whose streams share the connection.
    Http2 {
        /// True if the connection has TLS.
        is_tls: bool,
    },
    /// Raw TCP.
    Tcp,
}

/// Bytes of requests and buffers that a connection holds.
#[derive(Debug, Default)]
struct ConnectionUsage {
    /// Bytes of bodies that no pod has taken.
    body_bytes: usize,
    /// Bytes of heads that wait, or that are incomplete, and of what is recorded of the requests that wait.
    head_bytes: usize,
    /// Number of bodies that are being received.
    open_bodies: usize,
    /// Size of hyper's buffer for received bytes.
    buffer_size: usize,
    /// Highest number of concurrent requests so far.
    max_streams: usize,
    /// True once its requests are refused and it is asked to close.
    is_refused: bool,
    /// True once it was cut off in favour of a new connection.
    is_replaced: bool,
}

impl ConnectionUsage {
    /// Bytes that hyper and h2 keep while the connection lasts, beyond the buffer that every connection has.
    fn buffer_bytes(&self) -> usize {
        (self.buffer_size + self.max_streams.saturating_sub(1) * STREAM_OVERHEAD_BYTES)
            .saturating_sub(HYPER_BUFFER_BYTES)
    }

    fn charged(&self) -> ChargedBytes {
        let (buffer_bytes, refused_buffer_bytes) =
            if self.is_refused { (0, self.buffer_bytes()) } else { (self.buffer_bytes(), 0) };
        ChargedBytes {
            request_bytes: self.body_bytes + self.head_bytes,
            buffer_bytes,
            refused_buffer_bytes,
        }
    }
}

/// Amounts by which a connection counts in the totals.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChargedBytes {
    /// Bytes of requests that no pod has taken.
    request_bytes: usize,
    /// Bytes of buffers that hyper and h2 keep.
    buffer_bytes: usize,
    /// Bytes of buffers that hyper and h2 keep for a refused connection.
    pub(super) refused_buffer_bytes: usize,
}

impl ChargedBytes {
    /// Bytes that count towards the bounds of bytes.
    fn total(self) -> usize {
        self.request_bytes + self.buffer_bytes
    }
}

/// Replaces a connection's amount `before` in a total by `now`. The addition may wrap, but the sum is always right.
fn update_total(total: &AtomicUsize, before: usize, now: usize) {
    if before != now {
        total.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl ClientConnection {
    /// Creates a connection that holds nothing and belongs to no client yet.
    pub(super) fn new(id: u64, connections: Arc<ClientConnections>) -> Self {
        Self {
            id,
            connections,
            client_usage: OnceLock::new(),
            protocol: OnceLock::new(),
            usage: Mutex::default(),
            client_auth_result: OnceLock::new(),
            response_bytes: AtomicUsize::new(0),
            active_requests: AtomicUsize::new(0),
            idle_since_ns: AtomicU64::new(now_ns()),
            refusal_subscribers: AtomicUsize::new(0),
            refusal: OnceSignal::new(),
            cut_off: CancellationToken::new(),
        }
    }

    /// Assigns the connection to a client. Returns false if the client has too many connections. Without effect if it
    /// has a client already.
    pub fn try_assign_client(&self, client: IpAddr) -> bool {
        // Only one count ends with the connection.
        if self.client_usage.get().is_some() {
            return true;
        }
        let (client_usage, connections_before) =
            self.connections.add_to_client(ClientNetwork::from_address(client));
        let has_room = connections_before < self.connections.budget.max_client_connections;
        if !has_room {
            self.connections.count_refusal(ClientBound::ClientConnections);
        }
        // Counted even if it is refused: the count ends when the connection is dropped.
        let _ = self.client_usage.set(client_usage);
        has_room
    }

    /// Registers the result of a handshake that asked for the client's certificate.
    pub fn set_client_auth_result(&self, result: ClientAuthResult) {
        // A connection has one handshake.
        let _ = self.client_auth_result.set(Box::new(result));
    }

    /// Result of a handshake that asked for the client's certificate; `None`: there was no such handshake.
    pub fn client_auth_result(&self) -> Option<&ClientAuthResult> {
        self.client_auth_result.get().map(|it| &**it)
    }

    /// Records the protocol. Without effect if it was recorded before.
    pub fn set_protocol(&self, protocol: ConnectionProtocol) {
        let _ = self.protocol.set(protocol);
    }

    /// Adds received bytes of a body; one connection can hold at most `most` of them.
    pub fn add_body_bytes(&self, count: usize, most: usize) {
        self.update_usage(|usage| {
            usage.body_bytes += count.min(most.saturating_sub(usage.body_bytes))
        });
    }

    /// Subtracts bytes of a body that a pod has taken.
    pub fn remove_body_bytes(&self, count: usize) {
        self.update_usage(|usage| usage.body_bytes -= count.min(usage.body_bytes));
    }

    /// Changes the bytes of one head from `before` to `now`, because more of it has come or it has left.
    pub fn change_head_bytes(&self, before: usize, now: usize) {
        self.update_usage(|usage| usage.head_bytes = usage.head_bytes - before + now);
    }

    /// Sets the size of hyper's buffer for received bytes, which lasts as long as the connection.
    pub fn set_buffer_size(&self, size: usize) {
        self.update_usage(|usage| usage.buffer_size = size);
    }

    /// Registers that bytes of a body may come, until the guard is dropped.
    pub fn start_body(self: &Arc<Self>) -> RequestBodyGuard {
        self.on_body_start();
        RequestBodyGuard(Arc::clone(self))
    }

    /// Registers that a body begins.
    pub fn on_body_start(&self) {
        self.update_usage(|usage| usage.open_bodies += 1);
    }

    /// Registers that a body has ended or was given up. Without any body no bytes of bodies are held.
    pub fn on_body_end(&self) {
        self.update_usage(|usage| {
            usage.open_bodies -= 1;
            if usage.open_bodies == 0 {
                usage.body_bytes = 0;
            }
        });
    }

    /// Counts bytes of a response until they were sent.
    pub fn charge_response_data(self: &Arc<Self>, data: Bytes) -> Bytes {
        if data.is_empty() {
            return data;
        }
        let guard = self.charge_response_bytes(data.len());
        Bytes::from_owner(UnsentResponseData { _guard: guard, data })
    }

    /// Counts bytes of responses that are or may be buffered here, until the guard is dropped.
    pub fn charge_response_bytes(self: &Arc<Self>, count: usize) -> ResponseBytesGuard {
        self.response_bytes.fetch_add(count, Ordering::Relaxed);
        let all = self.connections.response_bytes.fetch_add(count, Ordering::Relaxed) + count;
        // The bytes are added first, so that of several threads at least one sees the bound exceeded.
        if all > self.connections.budget.response_bytes {
            self.connections.cut_off_largest_response();
        }
        ResponseBytesGuard { connection: Arc::clone(self), count }
    }

    /// Registers a request, which lasts until the guard is dropped.
    pub fn start_request(self: &Arc<Self>) -> ActiveRequestGuard {
        let active = self.active_requests.fetch_add(1, Ordering::Relaxed) + 1;
        self.update_usage(|usage| usage.max_streams = usage.max_streams.max(active));
        ActiveRequestGuard(Arc::clone(self))
    }

    /// Time since the last request ended; `None`: a request is in progress.
    pub fn idle_time(&self) -> Option<Duration> {
        self.idle_since().map(|since| Duration::from_nanos(now_ns().saturating_sub(since)))
    }

    /// Counts `bytes` of a received head until it is sent to a pod or given up. `None`: the connection's requests are
    /// refused, or it holds more than its equal share while a bound is exceeded.
    pub fn try_charge_head(self: &Arc<Self>, bytes: usize) -> Option<HeadBytesGuard> {
        let guard = self.charge_head(bytes);
        if self.is_refused() {
            return None;
        }
        if let Some(bound) = self.exceeded_bound() {
            self.connections.count_refusal(bound);
            return None;
        }
        Some(guard)
    }

    /// Counts `bytes` of a head without checking a bound.
    pub fn charge_head(self: &Arc<Self>, bytes: usize) -> HeadBytesGuard {
        self.change_head_bytes(0, bytes);
        HeadBytesGuard { refusal: self.subscribe_refusal(), bytes }
    }

    /// Counts `bytes` that a waiting request holds beside its head, without checking a bound. The head's own guard is that
    /// by which the request is notified.
    pub fn charge_record(self: &Arc<Self>, bytes: usize) -> RecordBytesGuard {
        self.change_head_bytes(0, bytes);
        RecordBytesGuard { connection: Arc::clone(self), bytes }
    }

    /// Registers a request that is notified when the connection's requests are refused, until the guard is dropped.
    pub fn subscribe_refusal(self: &Arc<Self>) -> RefusalGuard {
        self.refusal_subscribers.fetch_add(1, Ordering::Relaxed);
        RefusalGuard(Arc::clone(self))
    }

    /// Waits until its requests are refused because of the bytes that the connection holds.
    pub async fn wait_refused(&self) {
        self.refusal.wait().await;
    }

    /// Returns true once its requests are refused, and it is asked to close.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusal.is_set()
    }

    /// Bound of bytes that is exceeded, if this connection holds more than its equal share of it.
    fn exceeded_bound(&self) -> Option<ClientBound> {
        let budget = &self.connections.budget;
        // A share is equal for all connections, so that one with few bytes is not refused for the bytes of others.
        let exceeds_share =
            |bound: usize, sharers: usize| self.held_bytes() > bound / sharers.max(1);
        if self.connections.held_bytes() > budget.request_bytes
            && exceeds_share(budget.request_bytes, self.connections.lock_table().connections.len())
        {
            return Some(ClientBound::RequestBytes);
        }
        let client_usage = self.client_usage.get()?;
        let held_bytes = client_usage.held_bytes.load(Ordering::Relaxed);
        let connections = client_usage.connections.load(Ordering::Relaxed);
        let is_exceeded = held_bytes > budget.client_request_bytes
            && exceeds_share(budget.client_request_bytes, connections);
        is_exceeded.then_some(ClientBound::ClientRequestBytes)
    }

    /// Table of all connections.
    pub fn connections(&self) -> &ClientConnections {
        &self.connections
    }

    pub(super) fn idle_since(&self) -> Option<u64> {
        // To cut off a connection a second time would free nothing.
        let is_idle =
            self.active_requests.load(Ordering::Relaxed) == 0 && !self.lock_usage().is_replaced;
        is_idle.then(|| self.idle_since_ns.load(Ordering::Relaxed))
    }

    pub(super) fn close_for_new_connection(&self) {
        if !std::mem::replace(&mut self.lock_usage().is_replaced, true) {
            self.connections.lock_table().replaced += 1;
            self.connections.count_refusal(ClientBound::Connections);
            self.cut_off.cancel();
        }
    }

    /// Drops the count of bytes for which there is no body and no request: hyper has discarded them.
    pub(super) fn reset_unclaimed_bytes(&self) {
        self.update_usage(|usage| {
            if usage.open_bodies == 0 && self.active_requests.load(Ordering::Relaxed) == 0 {
                usage.body_bytes = 0;
            }
        });
    }

    /// Refuses its requests and asks it to close. If some of its bytes belong to no request that can be notified, it is
    /// cut off.
    pub(super) fn refuse_requests(&self) {
        let subscribers = self.refusal_subscribers.load(Ordering::Relaxed);
        let has_unnotified_bytes = self.update_usage(|usage| {
            let bytes = usage.charged().request_bytes;
            // These bytes are about to be freed, so they must not cause further refusals.
            (usage.body_bytes, usage.is_refused) = (0, true);
            (bytes > 0 && subscribers == 0) || usage.open_bodies > subscribers
        });
        if has_unnotified_bytes {
            self.cut_off.cancel();
        }
        self.refusal.set();
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.charged_bytes().total()
    }

    pub(super) fn charged_bytes(&self) -> ChargedBytes {
        self.lock_usage().charged()
    }

    pub(super) fn is_of_client(&self, client_usage: &Arc<ClientUsage>) -> bool {
        self.client_usage.get().is_some_and(|it| Arc::ptr_eq(it, client_usage))
    }

    /// Changes the amounts of the connection and the totals together: other threads see each change complete in every
    /// total. Enforces the bounds if the connection holds more than before.
    fn update_usage<R>(&self, change: impl FnOnce(&mut ConnectionUsage) -> R) -> R {
        let (result, before, now) = {
            let mut usage = self.lock_usage();
            let before = usage.charged();
            let result = change(&mut usage);
            let now = usage.charged();
            self.update_totals(before, now);
            (result, before, now)
        };
        // Without the lock of this connection: the search locks the others one by one, and this one too.
        if now.total() > before.total() {
            self.enforce_bounds();
        }
        if now.refused_buffer_bytes > before.refused_buffer_bytes {
            self.connections.cut_off_refused();
        }
        result
    }

    fn update_totals(&self, before: ChargedBytes, now: ChargedBytes) {
        update_total(&self.connections.request_bytes, before.request_bytes, now.request_bytes);
        update_total(&self.connections.buffer_bytes, before.buffer_bytes, now.buffer_bytes);
        update_total(
            &self.connections.refused_buffer_bytes,
            before.refused_buffer_bytes,
            now.refused_buffer_bytes,
        );
        if let Some(client_usage) = self.client_usage.get() {
            update_total(&client_usage.held_bytes, before.total(), now.total());
        }
    }

    fn enforce_bounds(&self) {
        let budget = &self.connections.budget;
        if let Some(client_usage) = self.client_usage.get()
            && client_usage.held_bytes.load(Ordering::Relaxed) > budget.client_request_bytes
        {
            self.connections.refuse_largest(Some(client_usage), self.id);
        }
        if self.connections.held_bytes() > budget.request_bytes {
            self.connections.refuse_largest(None, self.id);
        }
    }

    fn lock_usage(&self) -> MutexGuard<'_, ConnectionUsage> {
        // A panic cannot leave the amounts inconsistent: each change of them completes.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        // Emptying the amounts subtracts them from the totals.
        let ConnectionUsage { is_replaced, .. } = self.update_usage(std::mem::take);
        let client_usage = self.client_usage.take();
        // Connections of a client are added under the same lock.
        let mut table = self.connections.lock_table();
        table.connections.remove(&self.id);
        table.replaced -= usize::from(is_replaced);
        if let Some(client_usage) = client_usage
            && client_usage.connections.fetch_sub(1, Ordering::Relaxed) == 1
        {
            table.clients.remove(&client_usage.network);
        }
    }
}

/// Guard of a request in progress.
#[derive(Debug)]
pub struct ActiveRequestGuard(Arc<ClientConnection>);

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        self.0.idle_since_ns.store(now_ns(), Ordering::Relaxed);
        self.0.active_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ActiveRequestGuard {
    /// Connection that the request came over.
    pub fn connection(&self) -> &Arc<ClientConnection> {
        &self.0
    }
}

/// Guard of a body that is being received.
#[derive(Debug)]
pub struct RequestBodyGuard(Arc<ClientConnection>);

impl Drop for RequestBodyGuard {
    fn drop(&mut self) {
        self.0.on_body_end();
    }
}

/// Bytes of a response that were not sent yet.
struct UnsentResponseData {
    _guard: ResponseBytesGuard,
    data: Bytes,
}

impl AsRef<[u8]> for UnsentResponseData {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Guard of counted bytes of responses.
#[derive(Debug)]
pub struct ResponseBytesGuard {
    connection: Arc<ClientConnection>,
    count: usize,
}

impl Drop for ResponseBytesGuard {
    fn drop(&mut self) {
        self.connection.response_bytes.fetch_sub(self.count, Ordering::Relaxed);
        self.connection.connections.response_bytes.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Guard of counted bytes of a head that no pod has taken.
#[derive(Debug)]
pub struct HeadBytesGuard {
    refusal: RefusalGuard,
    bytes: usize,
}

impl HeadBytesGuard {
    /// Number of bytes that are counted.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HeadBytesGuard {
    fn drop(&mut self) {
        self.refusal.0.change_head_bytes(self.bytes, 0);
    }
}

/// Guard of counted bytes that are recorded of a waiting request.
#[derive(Debug)]
pub struct RecordBytesGuard {
    connection: Arc<ClientConnection>,
    bytes: usize,
}

impl RecordBytesGuard {
    /// Changes the number of bytes that are counted.
    pub fn set_bytes(&mut self, bytes: usize) {
        self.connection.change_head_bytes(self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for RecordBytesGuard {
    fn drop(&mut self) {
        self.connection.change_head_bytes(self.bytes, 0);
    }
}

/// Guard of a request that is notified when it is refused.
#[derive(Debug)]
pub struct RefusalGuard(Arc<ClientConnection>);

impl Drop for RefusalGuard {
    fn drop(&mut self) {
        self.0.refusal_subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}
