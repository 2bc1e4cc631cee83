//! Shell: client connections, the memory that each of them uses, and the choice of those to refuse at a bound.
//!
//! Bytes of requests count from the socket until a pod takes them or they are given up. Buffers that a library keeps
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
use tokio_util::sync::CancellationToken;

use crate::{
    admin::RefusalCounters,
    budget::{ClientBound, ClientBudget, ClientNetwork, ROOM, STREAM_OVERHEAD_BYTES},
    clock::now_ns,
};

/// Divisor of the number of connections: as many idle ones are closed at once to make room, so that not each new
/// connection searches all.
const SHED: usize = 128;

/// Divisor of a bound: as much is freed below it, so that not each further byte searches all connections.
const BOUND_MARGIN_DIVISOR: usize = 16;

/// Table of all client connections, with the totals of what they hold.
#[derive(Debug)]
pub struct ClientConnections {
    /// Bounds that the connections are held to.
    pub budget: ClientBudget,
    refused: RefusalCounters,
    /// Bytes of requests that no pod has taken, over all connections.
    bytes: AtomicUsize,
    /// Bytes of buffers that the library keeps for connections that stay.
    kept: AtomicUsize,
    /// Bytes of buffers that the library keeps for connections that were asked to close.
    leaving: AtomicUsize,
    /// Bytes of responses that wait for their clients.
    answers: AtomicUsize,
    table: Mutex<ClientConnectionTable>,
}

#[derive(Debug, Default)]
struct ClientConnectionTable {
    next: u64,
    seats: HashMap<u64, Weak<ClientConnection>>,
    clients: HashMap<ClientNetwork, Weak<ClientUsage>>,
    /// Number of connections that were cut off to make room and have not ended yet.
    going: usize,
}

/// Usage of one client, over its connections.
#[derive(Debug)]
struct ClientUsage {
    client: ClientNetwork,
    bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// One client connection. It counts for as long as any reference to it exists.
#[derive(Debug)]
pub struct ClientConnection {
    number: u64,
    seats: Arc<ClientConnections>,
    /// Usage of the client that it belongs to; unset for a trusted proxy's connection.
    tally: OnceLock<Arc<ClientUsage>>,
    takes: Mutex<ConnectionUsage>,
    /// Bytes of responses that were not sent to its client yet.
    answers: AtomicUsize,
    /// Number of requests whose responses have not ended.
    asked: AtomicUsize,
    /// Time at which the last request ended, in ns of [`now_ns`].
    idle_since_ns: AtomicU64,
    /// Number of requests that can be notified when they are refused.
    tellable: AtomicUsize,
    /// Cancelled once its requests are refused, if they wait or have a body.
    refuse: CancellationToken,
    /// Cancelled once the connection has to end at once.
    pub cut: CancellationToken,
}

/// Bytes of requests and buffers that a connection holds.
#[derive(Debug, Default)]
struct ConnectionUsage {
    /// Bytes of bodies that no pod has taken.
    ahead: usize,
    /// Bytes of heads that wait, or that are incomplete.
    heads: usize,
    /// Number of bodies that are being received.
    bodies: usize,
    /// Bytes of the library's buffer for received data.
    room: usize,
    /// Highest number of concurrent requests so far.
    streams: usize,
    /// True once its requests are refused.
    is_refused: bool,
    /// True once it was cut off to make room.
    is_going: bool,
}

impl ConnectionUsage {
    /// Bytes that the library keeps while the connection lasts, beyond the buffer that every connection has.
    fn kept(&self) -> usize {
        (self.room + self.streams.saturating_sub(1) * STREAM_OVERHEAD_BYTES).saturating_sub(ROOM)
    }

    fn counts(&self) -> ChargedBytes {
        let (kept, leaving) = if self.is_refused { (0, self.kept()) } else { (self.kept(), 0) };
        ChargedBytes { bytes: self.ahead + self.heads, kept, leaving }
    }
}

/// Amounts by which a connection counts in the totals.
#[derive(Clone, Copy, Debug, Default)]
struct ChargedBytes {
    /// Bytes of requests that no pod has taken.
    bytes: usize,
    /// Bytes of buffers that the library keeps.
    kept: usize,
    /// Bytes of buffers that the library keeps for a connection that was asked to close.
    leaving: usize,
}

impl ChargedBytes {
    /// Bytes that count towards the bounds of bytes.
    fn held(self) -> usize {
        self.bytes + self.kept
    }
}

/// Replaces a connection's amount `before` in a total by `now`. The addition may wrap, but the sum is always right.
fn replace(total: &AtomicUsize, before: usize, now: usize) {
    if before != now {
        total.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl ClientConnections {
    /// Creates a table without connections.
    pub fn new(budget: ClientBudget, refused: RefusalCounters) -> Self {
        let [bytes, kept, leaving, answers] = [0; 4].map(AtomicUsize::new);
        Self { budget, refused, bytes, kept, leaving, answers, table: Mutex::default() }
    }

    /// Registers a new connection. `None`: there is no room for it.
    pub fn take(self: &Arc<Self>) -> Option<Arc<ClientConnection>> {
        // Connections that were cut off end only when their tasks run. They do not count, so that a burst of new
        // connections does not close more idle ones than needed.
        let is_full = {
            let table = self.table();
            table.seats.len() - table.going >= self.budget.max_connections
        };
        if is_full && !self.make_room() {
            self.refused.note(ClientBound::Connections);
            return None;
        }
        let mut table = self.table();
        table.next += 1;
        let seat = Arc::new(ClientConnection {
            number: table.next,
            seats: Arc::clone(self),
            tally: OnceLock::new(),
            takes: Mutex::default(),
            answers: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            idle_since_ns: AtomicU64::new(now_ns()),
            tellable: AtomicUsize::new(0),
            refuse: CancellationToken::new(),
            cut: CancellationToken::new(),
        });
        table.seats.insert(seat.number, Arc::downgrade(&seat));
        Some(seat)
    }

    /// Bytes of requests that clients hold now.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that the library keeps for connections that stay.
    pub fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// Bytes of buffers that the library keeps for connections that were asked to close.
    pub fn leaving(&self) -> usize {
        self.leaving.load(Ordering::Relaxed)
    }

    fn held(&self) -> usize {
        self.bytes() + self.kept()
    }

    /// Returns true if more is held than a bound allows, until what is refused or cut off has ended.
    pub fn is_full(&self) -> bool {
        self.held() > self.budget.request_bytes || self.answers() > self.budget.response_bytes
    }

    /// Bytes of responses that wait for clients to read them.
    pub fn answers(&self) -> usize {
        self.answers.load(Ordering::Relaxed)
    }

    /// Counts a client that was refused, or whose connection was closed, because of `bound`.
    pub fn note(&self, bound: ClientBound) {
        self.refused.note(bound);
    }

    /// Closes the connections that have been idle for longest. Returns false if none is idle.
    pub fn make_room(&self) -> bool {
        let all = self.all();
        let mut idle: Vec<_> = all.iter().filter_map(|it| Some((it.idle_since()?, it))).collect();
        // A part of all is closed at once: searching all connections for each new one would take quadratic time.
        let some = (all.len() / SHED).max(1).min(idle.len());
        if some == 0 {
            return false;
        }
        idle.select_nth_unstable_by_key(some - 1, |(since, _)| *since);
        for (_, seat) in &idle[..some] {
            seat.close_to_make_room();
        }
        true
    }

    /// Refuses the requests of the connections that hold most, because all connections or one client's hold too many
    /// bytes.
    fn relieve(&self, of: Option<&Arc<ClientUsage>>, cause: u64) {
        let all = self.all();
        let of_it = |seat: &&Arc<ClientConnection>| of.is_none_or(|it| seat.is_of_client(it));
        let candidates: Vec<_> = all.iter().filter(of_it).collect();
        // The counts may include bytes that the library has discarded. They are corrected before anything is refused,
        // except on the connection that has grown: its bytes may have come before their request.
        candidates.iter().filter(|it| it.number != cause).for_each(|it| it.settle());
        let (bound, held, most) = match of {
            Some(it) => (
                ClientBound::ClientBytes,
                it.bytes.load(Ordering::Relaxed),
                self.budget.client_request_bytes,
            ),
            None => (ClientBound::Bytes, self.held(), self.budget.request_bytes),
        };
        // Connections that are refused already will free their bytes. Others are refused only if that is not enough.
        let (going, staying): (Vec<&Arc<ClientConnection>>, Vec<_>) =
            candidates.into_iter().partition(|it| it.is_refused());
        let leaves: usize = going.iter().map(|it| it.held()).sum();
        if held > most + leaves {
            let staying = staying.into_iter().map(|it| (it.held(), it)).collect();
            for seat in largest(staying, held - leaves, most) {
                self.note(bound);
                seat.refuse();
            }
        }
    }

    /// Cuts off the connections that were asked to close and keep most, as far as together they keep more than their
    /// part.
    fn hurry(&self) {
        let most = self.budget.closing_bytes();
        if self.leaving() <= most {
            return;
        }
        let all = self.all();
        let going = all.iter().filter(|it| !it.cut.is_cancelled());
        let going: Vec<_> = going.map(|it| (it.counts().leaving, it)).collect();
        let held = going.iter().map(|(kept, _)| kept).sum();
        for seat in largest(going, held, most) {
            seat.cut.cancel();
        }
    }

    /// Ends the connection that holds most bytes of responses, because too many of them wait.
    fn cut_off_largest_response(&self) {
        let all = self.all();
        let held = |seat: &&Arc<ClientConnection>| seat.answers.load(Ordering::Relaxed);
        let (going, staying): (Vec<_>, Vec<_>) = all.iter().partition(|it| it.cut.is_cancelled());
        let leaves = going.iter().map(held).sum::<usize>();
        if self.answers().saturating_sub(leaves) <= self.budget.response_bytes {
            return;
        }
        // A response cannot be refused once it has begun, so the connection ends.
        if let Some(most) = staying.into_iter().max_by_key(held) {
            self.note(ClientBound::AnswerBytes);
            most.cut.cancel();
        }
    }

    /// References to all connections, so that an action on one needs no lock of the table.
    fn all(&self) -> Vec<Arc<ClientConnection>> {
        self.table().seats.values().filter_map(Weak::upgrade).collect()
    }

    /// Adds a connection to a client's usage. Returns the usage and the number of connections before.
    fn join(&self, client: ClientNetwork) -> (Arc<ClientUsage>, usize) {
        let mut table = self.table();
        if let Some(known) = table.clients.get(&client).and_then(Weak::upgrade) {
            let before = known.connections.fetch_add(1, Ordering::Relaxed);
            return (known, before);
        }
        let (bytes, connections) = (AtomicUsize::new(0), AtomicUsize::new(1));
        let tally = Arc::new(ClientUsage { client, bytes, connections });
        table.clients.insert(client, Arc::downgrade(&tally));
        (tally, 0)
    }

    fn table(&self) -> MutexGuard<'_, ClientConnectionTable> {
        // A panic cannot leave the table inconsistent: each change of it completes.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections that hold most of the `held` bytes, until the rest hold somewhat less than `most`. The margin keeps
/// later bytes from searching all connections again.
fn largest(
    mut seats: Vec<(usize, &Arc<ClientConnection>)>,
    mut held: usize,
    most: usize,
) -> impl Iterator<Item = &Arc<ClientConnection>> {
    let enough = if held > most { most - most / BOUND_MARGIN_DIVISOR } else { held };
    seats.sort_unstable_by_key(|(its, _)| *its);
    std::iter::from_fn(move || {
        let (its, seat) = seats.pop().filter(|(its, _)| held > enough && *its > 0)?;
        held = held.saturating_sub(its);
        Some(seat)
    })
}

impl ClientConnection {
    /// Assigns the connection to a client. Returns false if the client has too many connections.
    pub fn try_assign_client(&self, client: IpAddr) -> bool {
        let (tally, before) = self.seats.join(ClientNetwork::of(client));
        let has_room = before < self.seats.budget.max_client_connections;
        if !has_room {
            self.seats.note(ClientBound::ClientConnections);
        }
        // Counted even if it is refused: the count ends when the connection is dropped.
        let _ = self.tally.set(tally);
        has_room
    }

    /// Adds received bytes of a body; one connection can hold at most `most` of them.
    pub fn came(&self, count: usize, most: usize) {
        self.change(|takes| takes.ahead += count.min(most.saturating_sub(takes.ahead)));
    }

    /// Subtracts bytes of a body that a pod has taken.
    pub fn passed(&self, count: usize) {
        self.change(|takes| takes.ahead -= count.min(takes.ahead));
    }

    /// Changes the bytes of one head from `before` to `now`, because more of it has come or it has left.
    pub fn change_head_bytes(&self, before: usize, now: usize) {
        self.change(|takes| takes.heads = takes.heads - before + now);
    }

    /// Sets the size of the library's buffer for received data, which lasts as long as the connection.
    pub fn keeps(&self, room: usize) {
        self.change(|takes| takes.room = room);
    }

    /// Registers that a body begins.
    pub fn on_body_start(&self) {
        self.change(|takes| takes.bodies += 1);
    }

    /// Registers that a body has ended or was given up. Without any body no bytes of bodies are held.
    pub fn on_body_end(&self) {
        self.change(|takes| {
            takes.bodies -= 1;
            if takes.bodies == 0 {
                takes.ahead = 0;
            }
        });
    }

    /// Counts bytes of a response until they were sent.
    pub fn sends(self: &Arc<Self>, data: Bytes) -> Bytes {
        if data.is_empty() {
            return data;
        }
        let waits = self.waits(data.len());
        Bytes::from_owner(UnsentResponseData { _waits: waits, data })
    }

    /// Counts bytes of responses that are or may be buffered here, until the guard is dropped.
    pub fn waits(self: &Arc<Self>, count: usize) -> ResponseBytesGuard {
        self.answers.fetch_add(count, Ordering::Relaxed);
        let all = self.seats.answers.fetch_add(count, Ordering::Relaxed) + count;
        // The bytes are added first, so that of several threads at least one sees the bound exceeded.
        if all > self.seats.budget.response_bytes {
            self.seats.cut_off_largest_response();
        }
        ResponseBytesGuard { seat: Arc::clone(self), count }
    }

    /// Registers a request, which lasts until the guard is dropped.
    pub fn asks(self: &Arc<Self>) -> ActiveRequestGuard {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        self.change(|takes| takes.streams = takes.streams.max(asked));
        ActiveRequestGuard(Arc::clone(self))
    }

    /// Time since the last request ended; `None`: a request is in progress.
    pub fn idle(&self) -> Option<Duration> {
        self.idle_since().map(|since| Duration::from_nanos(now_ns().saturating_sub(since)))
    }

    /// Counts `bytes` of a received head until it is sent to a pod or given up. `None`: the connection's requests are
    /// refused, or it holds more than its equal share while a bound is exceeded.
    pub fn try_charge_head(self: &Arc<Self>, bytes: usize) -> Option<HeadBytesGuard> {
        let held = self.holds(bytes);
        if self.is_refused() {
            return None;
        }
        if let Some(bound) = self.excess() {
            self.seats.note(bound);
            return None;
        }
        Some(held)
    }

    /// Counts `bytes` of a head without checking a bound.
    pub fn holds(self: &Arc<Self>, bytes: usize) -> HeadBytesGuard {
        self.change_head_bytes(0, bytes);
        HeadBytesGuard { tells: self.tells(), bytes }
    }

    /// Registers a request that is notified when the connection's requests are refused, until the guard is dropped.
    pub fn tells(self: &Arc<Self>) -> RefusalGuard {
        self.tellable.fetch_add(1, Ordering::Relaxed);
        RefusalGuard(Arc::clone(self))
    }

    /// Waits until its requests are refused because of the bytes that the connection holds.
    pub async fn refused(&self) {
        self.refuse.cancelled().await;
    }

    fn is_refused(&self) -> bool {
        self.refuse.is_cancelled()
    }

    /// Bound of bytes that is exceeded, if this connection holds more than its equal share of it.
    fn excess(&self) -> Option<ClientBound> {
        let budget = &self.seats.budget;
        // A share is equal for all connections, so that one with few bytes is not refused for the bytes of others.
        let is_most = |bytes: usize, sharers: usize| self.held() > bytes / sharers.max(1);
        if self.seats.held() > budget.request_bytes
            && is_most(budget.request_bytes, self.seats.table().seats.len())
        {
            return Some(ClientBound::Bytes);
        }
        let tally = self.tally.get()?;
        let its = tally.bytes.load(Ordering::Relaxed);
        let connections = tally.connections.load(Ordering::Relaxed);
        (its > budget.client_request_bytes && is_most(budget.client_request_bytes, connections))
            .then_some(ClientBound::ClientBytes)
    }

    /// Table of all connections.
    pub fn seats(&self) -> &ClientConnections {
        &self.seats
    }

    fn idle_since(&self) -> Option<u64> {
        // A connection that is cut off already makes no more room.
        let is_idle = self.asked.load(Ordering::Relaxed) == 0 && !self.takes().is_going;
        is_idle.then(|| self.idle_since_ns.load(Ordering::Relaxed))
    }

    fn close_to_make_room(&self) {
        if !std::mem::replace(&mut self.takes().is_going, true) {
            self.seats.table().going += 1;
            self.seats.note(ClientBound::Connections);
            self.cut.cancel();
        }
    }

    /// Drops the count of bytes for which there is no body and no request: the library has discarded them.
    fn settle(&self) {
        self.change(|takes| {
            if takes.bodies == 0 && self.asked.load(Ordering::Relaxed) == 0 {
                takes.ahead = 0;
            }
        });
    }

    /// Refuses its requests and asks it to close. If some of its bytes belong to no request that can be notified, it is
    /// cut off.
    fn refuse(&self) {
        let tellable = self.tellable.load(Ordering::Relaxed);
        let is_untold = self.change(|takes| {
            let bytes = takes.counts().bytes;
            // These bytes are about to be freed, so they must not cause further refusals.
            (takes.ahead, takes.is_refused) = (0, true);
            (bytes > 0 && tellable == 0) || takes.bodies > tellable
        });
        if is_untold {
            self.cut.cancel();
        }
        self.refuse.cancel();
    }

    fn held(&self) -> usize {
        self.counts().held()
    }

    fn counts(&self) -> ChargedBytes {
        self.takes().counts()
    }

    fn is_of_client(&self, tally: &Arc<ClientUsage>) -> bool {
        self.tally.get().is_some_and(|it| Arc::ptr_eq(it, tally))
    }

    /// Changes the amounts of the connection and the totals together: other threads see each change complete in every
    /// total. Enforces the bounds if the connection holds more than before.
    fn change<R>(&self, change: impl FnOnce(&mut ConnectionUsage) -> R) -> R {
        let (result, before, now) = {
            let mut takes = self.takes();
            let before = takes.counts();
            let result = change(&mut takes);
            let now = takes.counts();
            self.count(before, now);
            (result, before, now)
        };
        // Without the lock of this connection: the search locks the others one by one, and this one too.
        if now.held() > before.held() {
            self.enforce_bounds();
        }
        if now.leaving > before.leaving {
            self.seats.hurry();
        }
        result
    }

    fn count(&self, before: ChargedBytes, now: ChargedBytes) {
        replace(&self.seats.bytes, before.bytes, now.bytes);
        replace(&self.seats.kept, before.kept, now.kept);
        replace(&self.seats.leaving, before.leaving, now.leaving);
        if let Some(tally) = self.tally.get() {
            replace(&tally.bytes, before.held(), now.held());
        }
    }

    fn enforce_bounds(&self) {
        let budget = &self.seats.budget;
        let tally = self.tally.get();
        if let Some(it) =
            tally.filter(|it| it.bytes.load(Ordering::Relaxed) > budget.client_request_bytes)
        {
            self.seats.relieve(Some(it), self.number);
        }
        if self.seats.held() > budget.request_bytes {
            self.seats.relieve(None, self.number);
        }
    }

    fn takes(&self) -> MutexGuard<'_, ConnectionUsage> {
        // A panic cannot leave the amounts inconsistent: each change of them completes.
        self.takes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        // Emptying the amounts subtracts them from the totals.
        let ConnectionUsage { is_going, .. } = self.change(std::mem::take);
        let tally = self.tally.take();
        // Connections of a client are added under the same lock.
        let mut table = self.seats.table();
        table.seats.remove(&self.number);
        table.going -= usize::from(is_going);
        if let Some(tally) = tally.filter(|it| it.connections.fetch_sub(1, Ordering::Relaxed) == 1)
        {
            table.clients.remove(&tally.client);
        }
    }
}

/// Guard of a request in progress.
#[derive(Debug)]
pub struct ActiveRequestGuard(Arc<ClientConnection>);

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        self.0.idle_since_ns.store(now_ns(), Ordering::Relaxed);
        self.0.asked.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ActiveRequestGuard {
    /// Connection that the request came over.
    pub fn seat(&self) -> &Arc<ClientConnection> {
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
    seat: Arc<ClientConnection>,
    count: usize,
}

impl Drop for ResponseBytesGuard {
    fn drop(&mut self) {
        self.seat.answers.fetch_sub(self.count, Ordering::Relaxed);
        self.seat.seats.answers.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Guard of counted bytes of a head that no pod has taken.
#[derive(Debug)]
pub struct HeadBytesGuard {
    tells: RefusalGuard,
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
        self.tells.0.change_head_bytes(self.bytes, 0);
    }
}

/// Guard of a request that is notified when it is refused.
#[derive(Debug)]
pub struct RefusalGuard(Arc<ClientConnection>);

impl Drop for RefusalGuard {
    fn drop(&mut self) {
        self.0.tellable.fetch_sub(1, Ordering::Relaxed);
    }
}
