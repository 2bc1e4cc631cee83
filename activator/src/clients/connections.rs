//! Shell: client connections, the memory that each of them uses, and the choice of those to refuse at a bound.
//!
//! Bytes of requests count from the socket until a pod takes them or they are given up. Buffers that hyper and h2 keep
//! for a connection count until the connection ends. If both together exceed a bound, the connection that holds most is
//! refused, not the one that added the last byte. Its requests are refused and it is asked to close. Connections that
//! were asked to close may keep a part of the bound until they are closed. Beyond that part the largest of them are cut
//! off.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use common::once_signal::OnceSignal;
use tokio_util::sync::CancellationToken;

use crate::{
    budget::{ClientBound, ClientBudget, ClientNetwork, HYPER_BUFFER_BYTES, STREAM_OVERHEAD_BYTES},
    clock::now_ns,
    metrics::RefusalCounters,
};

/// Divisor of the number of connections: as many idle ones are closed at once, so that not each new
/// connection searches all.
const IDLE_CLOSE_DIVISOR: usize = 128;

/// Divisor of a bound: as much is freed below it, so that not each further byte searches all connections.
const BOUND_MARGIN_DIVISOR: usize = 16;

/// Table of all client connections, with the totals of what they hold.
#[derive(Debug)]
pub struct ClientConnections {
    /// Bounds that the connections are held to.
    pub budget: ClientBudget,
    refusals: RefusalCounters,
    /// Bytes of requests that no pod has taken, over all connections.
    request_bytes: AtomicUsize,
    /// Bytes of buffers that hyper and h2 keep for connections that stay.
    buffer_bytes: AtomicUsize,
    /// Bytes of buffers that hyper and h2 keep for connections that were asked to close.
    refused_buffer_bytes: AtomicUsize,
    /// Bytes of responses that wait for their clients.
    response_bytes: AtomicUsize,
    table: Mutex<ClientConnectionTable>,
}

#[derive(Debug, Default)]
struct ClientConnectionTable {
    last_id: u64,
    connections: HashMap<u64, Weak<ClientConnection>>,
    clients: HashMap<ClientNetwork, Weak<ClientUsage>>,
    /// Number of connections that were cut off in favour of new ones, and have not ended yet.
    closing: usize,
}

/// Usage of one client, over its connections.
#[derive(Debug)]
struct ClientUsage {
    network: ClientNetwork,
    held_bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// One client connection. It counts for as long as any reference to it exists.
#[derive(Debug)]
pub struct ClientConnection {
    id: u64,
    connections: Arc<ClientConnections>,
    /// Usage of the client that it belongs to; unset for a trusted proxy's connection.
    client_usage: OnceLock<Arc<ClientUsage>>,
    usage: Mutex<ConnectionUsage>,
    /// Bytes of responses that were not sent to its client yet.
    response_bytes: AtomicUsize,
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

/// Bytes of requests and buffers that a connection holds.
#[derive(Debug, Default)]
struct ConnectionUsage {
    /// Bytes of bodies that no pod has taken.
    body_bytes: usize,
    /// Bytes of heads that wait, or that are incomplete.
    head_bytes: usize,
    /// Number of bodies that are being received.
    open_bodies: usize,
    /// Size of hyper's buffer for received bytes.
    buffer_size: usize,
    /// Highest number of concurrent requests so far.
    max_streams: usize,
    /// True once its requests are refused.
    is_refused: bool,
    /// True once it was cut off in favour of a new connection.
    is_closing: bool,
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
struct ChargedBytes {
    /// Bytes of requests that no pod has taken.
    request_bytes: usize,
    /// Bytes of buffers that hyper and h2 keep.
    buffer_bytes: usize,
    /// Bytes of buffers that hyper and h2 keep for a connection that was asked to close.
    refused_buffer_bytes: usize,
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

impl ClientConnections {
    /// Creates a table without connections.
    pub fn new(budget: ClientBudget, refusals: RefusalCounters) -> Self {
        let [request_bytes, buffer_bytes, refused_buffer_bytes, response_bytes] =
            [0; 4].map(AtomicUsize::new);
        Self {
            budget,
            refusals,
            request_bytes,
            buffer_bytes,
            refused_buffer_bytes,
            response_bytes,
            table: Mutex::default(),
        }
    }

    /// Registers a new connection. `None`: there are too many, and none is idle.
    pub fn register(self: &Arc<Self>) -> Option<Arc<ClientConnection>> {
        // Connections that were cut off end only when their tasks run. They do not count, so that a burst of new
        // connections does not close more idle ones than needed.
        let is_full = {
            let table = self.lock_table();
            table.connections.len() - table.closing >= self.budget.max_connections
        };
        if is_full && !self.close_idle() {
            self.refusals.count_refusal(ClientBound::Connections);
            return None;
        }
        let mut table = self.lock_table();
        table.last_id += 1;
        let client_connection = Arc::new(ClientConnection {
            id: table.last_id,
            connections: Arc::clone(self),
            client_usage: OnceLock::new(),
            usage: Mutex::default(),
            response_bytes: AtomicUsize::new(0),
            active_requests: AtomicUsize::new(0),
            idle_since_ns: AtomicU64::new(now_ns()),
            refusal_subscribers: AtomicUsize::new(0),
            refusal: OnceSignal::new(),
            cut_off: CancellationToken::new(),
        });
        table.connections.insert(client_connection.id, Arc::downgrade(&client_connection));
        Some(client_connection)
    }

    /// Bytes of requests that clients hold now.
    pub fn request_bytes(&self) -> usize {
        self.request_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that hyper and h2 keep for connections that stay.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that hyper and h2 keep for connections that were asked to close.
    pub fn refused_buffer_bytes(&self) -> usize {
        self.refused_buffer_bytes.load(Ordering::Relaxed)
    }

    fn held_bytes(&self) -> usize {
        self.request_bytes() + self.buffer_bytes()
    }

    /// Returns true if more is held than a bound allows, until what is refused or cut off has ended.
    pub fn is_over_budget(&self) -> bool {
        self.held_bytes() > self.budget.request_bytes
            || self.response_bytes() > self.budget.response_bytes
    }

    /// Bytes of responses that wait for clients to read them.
    pub fn response_bytes(&self) -> usize {
        self.response_bytes.load(Ordering::Relaxed)
    }

    /// Counts a client that was refused, or whose connection was closed, because of `bound`.
    pub fn count_refusal(&self, bound: ClientBound) {
        self.refusals.count_refusal(bound);
    }

    /// Closes the connections that have been idle for longest. Returns false if none is idle.
    pub fn close_idle(&self) -> bool {
        let all = self.snapshot();
        let mut idle: Vec<_> = all.iter().filter_map(|it| Some((it.idle_since()?, it))).collect();
        // A part of all is closed at once: searching all connections for each new one would take quadratic time.
        let some = (all.len() / IDLE_CLOSE_DIVISOR).max(1).min(idle.len());
        if some == 0 {
            return false;
        }
        idle.select_nth_unstable_by_key(some - 1, |(since, _)| *since);
        for (_, client_connection) in &idle[..some] {
            client_connection.close_for_new_connection();
        }
        true
    }

    /// Refuses the requests of the connections that hold most, because all connections or one client's hold too many
    /// bytes.
    fn refuse_largest(&self, of: Option<&Arc<ClientUsage>>, cause: u64) {
        let all = self.snapshot();
        let of_it = |client_connection: &&Arc<ClientConnection>| {
            of.is_none_or(|it| client_connection.is_of_client(it))
        };
        let candidates: Vec<_> = all.iter().filter(of_it).collect();
        // The counts may include bytes that hyper has discarded. They are corrected before anything is refused,
        // except on the connection that has grown: its bytes may have come before their request.
        candidates.iter().filter(|it| it.id != cause).for_each(|it| it.reset_unclaimed_bytes());
        let (bound, held, limit) = match of {
            Some(it) => (
                ClientBound::ClientRequestBytes,
                it.held_bytes.load(Ordering::Relaxed),
                self.budget.client_request_bytes,
            ),
            None => (ClientBound::Bytes, self.held_bytes(), self.budget.request_bytes),
        };
        // Connections that are refused already will free their bytes. Others are refused only if that is not enough.
        let (refused, staying): (Vec<&Arc<ClientConnection>>, Vec<_>) =
            candidates.into_iter().partition(|it| it.is_refused());
        let refused_bytes: usize = refused.iter().map(|it| it.held_bytes()).sum();
        if held > limit + refused_bytes {
            let staying = staying.into_iter().map(|it| (it.held_bytes(), it)).collect();
            for client_connection in largest(staying, held - refused_bytes, limit) {
                self.count_refusal(bound);
                client_connection.refuse_requests();
            }
        }
    }

    /// Cuts off the connections that were asked to close and keep most, as far as together they keep more than their
    /// part.
    fn cut_off_closing(&self) {
        let limit = self.budget.closing_bytes();
        if self.refused_buffer_bytes() <= limit {
            return;
        }
        let all = self.snapshot();
        let closing = all.iter().filter(|it| !it.cut_off.is_cancelled());
        let closing: Vec<_> =
            closing.map(|it| (it.charged_bytes().refused_buffer_bytes, it)).collect();
        let held = closing.iter().map(|(bytes, _)| bytes).sum();
        for client_connection in largest(closing, held, limit) {
            client_connection.cut_off.cancel();
        }
    }

    /// Ends the connection that holds most bytes of responses, because too many of them wait.
    fn cut_off_largest_response(&self) {
        let all = self.snapshot();
        let held = |client_connection: &&Arc<ClientConnection>| {
            client_connection.response_bytes.load(Ordering::Relaxed)
        };
        let (going, staying): (Vec<_>, Vec<_>) =
            all.iter().partition(|it| it.cut_off.is_cancelled());
        let leaves = going.iter().map(held).sum::<usize>();
        if self.response_bytes().saturating_sub(leaves) <= self.budget.response_bytes {
            return;
        }
        // A response cannot be refused once it has begun, so the connection ends.
        if let Some(most) = staying.into_iter().max_by_key(held) {
            self.count_refusal(ClientBound::ResponseBytes);
            most.cut_off.cancel();
        }
    }

    /// References to all connections, so that an action on one needs no lock of the table.
    fn snapshot(&self) -> Vec<Arc<ClientConnection>> {
        self.lock_table().connections.values().filter_map(Weak::upgrade).collect()
    }

    /// Adds a connection to a client's usage. Returns the usage and the number of connections before.
    fn add_to_client(&self, network: ClientNetwork) -> (Arc<ClientUsage>, usize) {
        let mut table = self.lock_table();
        if let Some(known_usage) = table.clients.get(&network).and_then(Weak::upgrade) {
            let before = known_usage.connections.fetch_add(1, Ordering::Relaxed);
            return (known_usage, before);
        }
        let (held_bytes, connections) = (AtomicUsize::new(0), AtomicUsize::new(1));
        let usage = Arc::new(ClientUsage { network, held_bytes, connections });
        table.clients.insert(network, Arc::downgrade(&usage));
        (usage, 0)
    }

    fn lock_table(&self) -> MutexGuard<'_, ClientConnectionTable> {
        // A panic cannot leave the table inconsistent: each change of it completes.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections that hold most of the `held` bytes, until the rest hold somewhat less than `most`. The margin keeps
/// later bytes from searching all connections again.
fn largest(
    mut client_connections: Vec<(usize, &Arc<ClientConnection>)>,
    mut held: usize,
    most: usize,
) -> impl Iterator<Item = &Arc<ClientConnection>> {
    let enough = if held > most { most - most / BOUND_MARGIN_DIVISOR } else { held };
    client_connections.sort_unstable_by_key(|(its, _)| *its);
    std::iter::from_fn(move || {
        let (its, client_connection) =
            client_connections.pop().filter(|(its, _)| held > enough && *its > 0)?;
        held = held.saturating_sub(its);
        Some(client_connection)
    })
}

impl ClientConnection {
    /// Assigns the connection to a client. Returns false if the client has too many connections.
    pub fn try_assign_client(&self, client: IpAddr) -> bool {
        let (usage, before) = self.connections.add_to_client(ClientNetwork::from_address(client));
        let has_room = before < self.connections.budget.max_client_connections;
        if !has_room {
            self.connections.count_refusal(ClientBound::ClientConnections);
        }
        // Counted even if it is refused: the count ends when the connection is dropped.
        let _ = self.client_usage.set(usage);
        has_room
    }

    /// Adds received bytes of a body; one connection can hold at most `most` of them.
    pub fn add_body_bytes(&self, count: usize, most: usize) {
        self.update_usage(|takes| {
            takes.body_bytes += count.min(most.saturating_sub(takes.body_bytes))
        });
    }

    /// Subtracts bytes of a body that a pod has taken.
    pub fn remove_body_bytes(&self, count: usize) {
        self.update_usage(|takes| takes.body_bytes -= count.min(takes.body_bytes));
    }

    /// Changes the bytes of one head from `before` to `now`, because more of it has come or it has left.
    pub fn change_head_bytes(&self, before: usize, now: usize) {
        self.update_usage(|takes| takes.head_bytes = takes.head_bytes - before + now);
    }

    /// Sets the size of hyper's buffer for received bytes, which lasts as long as the connection.
    pub fn set_buffer_size(&self, size: usize) {
        self.update_usage(|takes| takes.buffer_size = size);
    }

    /// Registers that a body begins.
    pub fn on_body_start(&self) {
        self.update_usage(|takes| takes.open_bodies += 1);
    }

    /// Registers that a body has ended or was given up. Without any body no bytes of bodies are held.
    pub fn on_body_end(&self) {
        self.update_usage(|takes| {
            takes.open_bodies -= 1;
            if takes.open_bodies == 0 {
                takes.body_bytes = 0;
            }
        });
    }

    /// Counts bytes of a response until they were sent.
    pub fn charge_response_data(self: &Arc<Self>, data: Bytes) -> Bytes {
        if data.is_empty() {
            return data;
        }
        let waits = self.charge_response_bytes(data.len());
        Bytes::from_owner(UnsentResponseData { _waits: waits, data })
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
        self.update_usage(|takes| takes.max_streams = takes.max_streams.max(active));
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

    /// Registers a request that is notified when the connection's requests are refused, until the guard is dropped.
    pub fn subscribe_refusal(self: &Arc<Self>) -> RefusalGuard {
        self.refusal_subscribers.fetch_add(1, Ordering::Relaxed);
        RefusalGuard(Arc::clone(self))
    }

    /// Waits until its requests are refused because of the bytes that the connection holds.
    pub async fn wait_refused(&self) {
        self.refusal.wait().await;
    }

    fn is_refused(&self) -> bool {
        self.refusal.is_set()
    }

    /// Bound of bytes that is exceeded, if this connection holds more than its equal share of it.
    fn exceeded_bound(&self) -> Option<ClientBound> {
        let budget = &self.connections.budget;
        // A share is equal for all connections, so that one with few bytes is not refused for the bytes of others.
        let is_most = |bytes: usize, sharers: usize| self.held_bytes() > bytes / sharers.max(1);
        if self.connections.held_bytes() > budget.request_bytes
            && is_most(budget.request_bytes, self.connections.lock_table().connections.len())
        {
            return Some(ClientBound::Bytes);
        }
        let usage = self.client_usage.get()?;
        let its = usage.held_bytes.load(Ordering::Relaxed);
        let connections = usage.connections.load(Ordering::Relaxed);
        (its > budget.client_request_bytes && is_most(budget.client_request_bytes, connections))
            .then_some(ClientBound::ClientRequestBytes)
    }

    /// Table of all connections.
    pub fn connections(&self) -> &ClientConnections {
        &self.connections
    }

    fn idle_since(&self) -> Option<u64> {
        // To cut off a connection a second time would free nothing.
        let is_idle =
            self.active_requests.load(Ordering::Relaxed) == 0 && !self.lock_usage().is_closing;
        is_idle.then(|| self.idle_since_ns.load(Ordering::Relaxed))
    }

    fn close_for_new_connection(&self) {
        if !std::mem::replace(&mut self.lock_usage().is_closing, true) {
            self.connections.lock_table().closing += 1;
            self.connections.count_refusal(ClientBound::Connections);
            self.cut_off.cancel();
        }
    }

    /// Drops the count of bytes for which there is no body and no request: hyper has discarded them.
    fn reset_unclaimed_bytes(&self) {
        self.update_usage(|takes| {
            if takes.open_bodies == 0 && self.active_requests.load(Ordering::Relaxed) == 0 {
                takes.body_bytes = 0;
            }
        });
    }

    /// Refuses its requests and asks it to close. If some of its bytes belong to no request that can be notified, it is
    /// cut off.
    fn refuse_requests(&self) {
        let tellable = self.refusal_subscribers.load(Ordering::Relaxed);
        let is_untold = self.update_usage(|takes| {
            let bytes = takes.charged().request_bytes;
            // These bytes are about to be freed, so they must not cause further refusals.
            (takes.body_bytes, takes.is_refused) = (0, true);
            (bytes > 0 && tellable == 0) || takes.open_bodies > tellable
        });
        if is_untold {
            self.cut_off.cancel();
        }
        self.refusal.set();
    }

    fn held_bytes(&self) -> usize {
        self.charged_bytes().total()
    }

    fn charged_bytes(&self) -> ChargedBytes {
        self.lock_usage().charged()
    }

    fn is_of_client(&self, usage: &Arc<ClientUsage>) -> bool {
        self.client_usage.get().is_some_and(|it| Arc::ptr_eq(it, usage))
    }

    /// Changes the amounts of the connection and the totals together: other threads see each change complete in every
    /// total. Enforces the bounds if the connection holds more than before.
    fn update_usage<R>(&self, change: impl FnOnce(&mut ConnectionUsage) -> R) -> R {
        let (result, before, now) = {
            let mut takes = self.lock_usage();
            let before = takes.charged();
            let result = change(&mut takes);
            let now = takes.charged();
            self.update_totals(before, now);
            (result, before, now)
        };
        // Without the lock of this connection: the search locks the others one by one, and this one too.
        if now.total() > before.total() {
            self.enforce_bounds();
        }
        if now.refused_buffer_bytes > before.refused_buffer_bytes {
            self.connections.cut_off_closing();
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
        if let Some(usage) = self.client_usage.get() {
            update_total(&usage.held_bytes, before.total(), now.total());
        }
    }

    fn enforce_bounds(&self) {
        let budget = &self.connections.budget;
        let usage = self.client_usage.get();
        if let Some(it) =
            usage.filter(|it| it.held_bytes.load(Ordering::Relaxed) > budget.client_request_bytes)
        {
            self.connections.refuse_largest(Some(it), self.id);
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
        let ConnectionUsage { is_closing, .. } = self.update_usage(std::mem::take);
        let usage = self.client_usage.take();
        // Connections of a client are added under the same lock.
        let mut table = self.connections.lock_table();
        table.connections.remove(&self.id);
        table.closing -= usize::from(is_closing);
        if let Some(usage) = usage.filter(|it| it.connections.fetch_sub(1, Ordering::Relaxed) == 1)
        {
            table.clients.remove(&usage.network);
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

/// Bytes of a response that were not sent yet.
struct UnsentResponseData {
    _waits: ResponseBytesGuard,
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

/// Guard of a request that is notified when it is refused.
#[derive(Debug)]
pub struct RefusalGuard(Arc<ClientConnection>);

impl Drop for RefusalGuard {
    fn drop(&mut self) {
        self.0.refusal_subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}
