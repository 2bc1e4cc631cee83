//! Shell: the table of client connections, and the choice of those to refuse at a bound.
//!
//! Bytes of requests count from the socket until a pod takes them or they are given up. Buffers that hyper and h2 keep
//! for a connection count until the connection ends. If both together exceed a bound, the connection that holds most is
//! refused, not the one that added the last byte. Its requests are refused and it is asked to close. Connections that
//! were asked to close may keep a part of the bound until they are closed. Beyond that part the largest of them are cut
//! off.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    budget::{ClientBound, ClientBudget, ClientNetwork},
    metrics::RefusalCounters,
    route_facts::ConnectionCounts,
};

mod connection;

pub use connection::{
    ActiveRequestGuard, ClientConnection, ConnectionProtocol, HeadBytesGuard, RecordBytesGuard,
    RefusalGuard, RequestBodyGuard, ResponseBytesGuard,
};

/// Divisor of the number of connections. The quotient is the number of idle ones that are closed at once, so that not
/// each new connection searches all.
const IDLE_CLOSE_DIVISOR: usize = 128;

/// Divisor of a bound. The quotient is freed below the bound, so that not each further byte searches all connections.
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
    /// Bytes of buffers that hyper and h2 keep for refused connections, which were asked to close.
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
    replaced: usize,
}

impl ClientConnectionTable {
    /// Connections that were cut off end only when their tasks run. They do not count, so that a burst of new
    /// connections does not close more idle ones than needed.
    fn is_full(&self, max_connections: usize) -> bool {
        self.connections.len() - self.replaced >= max_connections
    }
}

/// Usage of one client, over its connections.
#[derive(Debug)]
struct ClientUsage {
    network: ClientNetwork,
    held_bytes: AtomicUsize,
    connections: AtomicUsize,
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
        let mut table = self.lock_table();
        // Checked under the lock under which the connection is added, so that concurrent accepts keep the bound.
        while table.is_full(self.budget.max_connections) {
            // The search for idle connections locks the table itself.
            drop(table);
            if !self.close_idle() {
                self.refusals.count_refusal(ClientBound::Connections);
                return None;
            }
            table = self.lock_table();
        }
        table.last_id += 1;
        let client_connection = Arc::new(ClientConnection::new(table.last_id, Arc::clone(self)));
        table.connections.insert(client_connection.id, Arc::downgrade(&client_connection));
        Some(client_connection)
    }

    /// Numbers of open connections by kind.
    pub fn count_by_kind(&self) -> ConnectionCounts {
        let mut counts = ConnectionCounts::default();
        for client_connection in self.snapshot() {
            let (kind, is_tls) = match client_connection.protocol.get() {
                None => (&mut counts.opening, false),
                Some(ConnectionProtocol::Http1 { is_tls }) => (&mut counts.http1, *is_tls),
                Some(ConnectionProtocol::Http2 { is_tls }) => (&mut counts.http2, *is_tls),
                Some(ConnectionProtocol::Tcp) => (&mut counts.tcp, false),
            };
            *kind += 1;
            counts.tls += usize::from(is_tls);
        }
        counts
    }

    /// Bytes of requests that clients hold now.
    pub fn request_bytes(&self) -> usize {
        self.request_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that hyper and h2 keep for connections that stay.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that hyper and h2 keep for refused connections.
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
        let count = (all.len() / IDLE_CLOSE_DIVISOR).max(1).min(idle.len());
        if count == 0 {
            return false;
        }
        idle.select_nth_unstable_by_key(count - 1, |(since, _)| *since);
        for (_, client_connection) in &idle[..count] {
            client_connection.close_for_new_connection();
        }
        true
    }

    /// Refuses the requests of the connections that hold most, because those of `client` hold too many bytes, or all
    /// connections (`None`). `grown_id` is the connection that has just grown.
    fn refuse_largest(&self, client: Option<&Arc<ClientUsage>>, grown_id: u64) {
        let all = self.snapshot();
        let is_candidate = |client_connection: &&Arc<ClientConnection>| {
            client.is_none_or(|it| client_connection.is_of_client(it))
        };
        let candidates: Vec<_> = all.iter().filter(is_candidate).collect();
        // The counts may include bytes that hyper has discarded. They are corrected before anything is refused,
        // except on the connection that has grown: its bytes may have come before their request.
        candidates.iter().filter(|it| it.id != grown_id).for_each(|it| it.reset_unclaimed_bytes());
        let (bound, held, limit) = match client {
            Some(it) => (
                ClientBound::ClientRequestBytes,
                it.held_bytes.load(Ordering::Relaxed),
                self.budget.client_request_bytes,
            ),
            None => (ClientBound::RequestBytes, self.held_bytes(), self.budget.request_bytes),
        };
        // Connections that are refused already will free their bytes. Others are refused only if that is not enough.
        let (refused, staying): (Vec<&Arc<ClientConnection>>, Vec<_>) =
            candidates.into_iter().partition(|it| it.is_refused());
        let refused_bytes: usize = refused.iter().map(|it| it.held_bytes()).sum();
        if held > limit + refused_bytes {
            let staying = staying.into_iter().map(|it| (it.held_bytes(), it)).collect();
            for client_connection in select_largest(staying, held - refused_bytes, limit) {
                self.count_refusal(bound);
                client_connection.refuse_requests();
            }
        }
    }

    /// Cuts off the refused connections that keep most, as far as together they keep more than their part.
    fn cut_off_refused(&self) {
        let limit = self.budget.max_refused_buffer_bytes();
        if self.refused_buffer_bytes() <= limit {
            return;
        }
        let all = self.snapshot();
        let staying = all.iter().filter(|it| !it.cut_off.is_cancelled());
        let staying: Vec<_> =
            staying.map(|it| (it.charged_bytes().refused_buffer_bytes, it)).collect();
        let held = staying.iter().map(|(bytes, _)| bytes).sum();
        for client_connection in select_largest(staying, held, limit) {
            client_connection.cut_off.cancel();
        }
    }

    /// Ends the connection that holds most bytes of responses, because too many of them wait.
    fn cut_off_largest_response(&self) {
        let all = self.snapshot();
        let held = |client_connection: &&Arc<ClientConnection>| {
            client_connection.response_bytes.load(Ordering::Relaxed)
        };
        let (cut_off, staying): (Vec<_>, Vec<_>) =
            all.iter().partition(|it| it.cut_off.is_cancelled());
        let cut_off_bytes = cut_off.iter().map(held).sum::<usize>();
        if self.response_bytes().saturating_sub(cut_off_bytes) <= self.budget.response_bytes {
            return;
        }
        // A response cannot be refused once it has begun, so the connection ends.
        if let Some(largest) = staying.into_iter().max_by_key(held) {
            self.count_refusal(ClientBound::ResponseBytes);
            largest.cut_off.cancel();
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

/// Connections that hold most of the `held` bytes, until the rest hold somewhat less than `limit`. The margin keeps
/// later bytes from searching all connections again.
fn select_largest(
    mut client_connections: Vec<(usize, &Arc<ClientConnection>)>,
    mut held: usize,
    limit: usize,
) -> impl Iterator<Item = &Arc<ClientConnection>> {
    let target = if held > limit { limit - limit / BOUND_MARGIN_DIVISOR } else { held };
    client_connections.sort_unstable_by_key(|(bytes, _)| *bytes);
    std::iter::from_fn(move || {
        let (bytes, client_connection) =
            client_connections.pop().filter(|(bytes, _)| held > target && *bytes > 0)?;
        held = held.saturating_sub(bytes);
        Some(client_connection)
    })
}

#[cfg(test)]
mod tests;
