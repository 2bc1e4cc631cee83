//! Shell: clients' connections, what each of them takes, and whose requests are refused when all of it is too much.
//!
//! Bytes count from the socket until a pod takes them or they are given up. Room that a library keeps for a connection counts
//! until the connection ends. Where both come to be too much, the connection that holds most is the one that suffers, not
//! the one whose byte was the last: its requests are refused and it is asked to go. Those that were asked may keep a part
//! of the bound until they have gone; beyond that part the largest of them are cut off.

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
    admin::Refused,
    budget::{Bound, Budget, PER_STREAM, ROOM, Subscriber},
    clock::now_ns,
};

/// Of the connections that lie idle so many at once make room for others, so that not each newcomer looks through all.
const SHED: usize = 128;

/// Bytes are given up until one part in so many of their bound is free.
const SPARE_PART: usize = 16;

/// All client connections.
#[derive(Debug)]
pub struct Seats {
    /// What holds.
    pub budget: Budget,
    refused: Refused,
    bytes: AtomicUsize,
    kept: AtomicUsize,
    leaving: AtomicUsize,
    answers: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    seats: HashMap<u64, Weak<Seat>>,
    clients: HashMap<Subscriber, Weak<Tally>>,
    /// Connections that were asked to make room and have not ended yet.
    going: usize,
}

/// What one client takes.
#[derive(Debug)]
struct Tally {
    client: Subscriber,
    bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// One connection. It counts for as long as anything holds it.
#[derive(Debug)]
pub struct Seat {
    number: u64,
    seats: Arc<Seats>,
    /// The client it belongs to; none of a trusted proxy.
    tally: OnceLock<Arc<Tally>>,
    takes: Mutex<Takes>,
    /// Bytes of answers that its client has not been sent.
    answers: AtomicUsize,
    /// Requests whose answers have not ended.
    asked: AtomicUsize,
    /// When the last of them ended.
    idle_since_ns: AtomicU64,
    /// Requests that could be told that they are refused.
    tellable: AtomicUsize,
    /// Its requests are refused from now on, as far as they wait or have a body.
    refuse: CancellationToken,
    /// The connection has to end at once.
    pub cut: CancellationToken,
}

/// Bytes a connection holds.
#[derive(Debug, Default)]
struct Takes {
    /// Of bodies that no pod has taken.
    ahead: usize,
    /// Of heads that wait, or have not come whole.
    heads: usize,
    /// Bodies under way.
    bodies: usize,
    /// Of room that the library keeps for what comes in.
    room: usize,
    /// The most requests that there ever were at once.
    streams: usize,
    /// Its requests are refused.
    is_refused: bool,
    is_going: bool,
}

impl Takes {
    /// What the library keeps while the connection lasts, beside the room that each connection has.
    fn kept(&self) -> usize {
        (self.room + self.streams.saturating_sub(1) * PER_STREAM).saturating_sub(ROOM)
    }

    fn counts(&self) -> Counts {
        let (kept, leaving) = if self.is_refused { (0, self.kept()) } else { (self.kept(), 0) };
        Counts { bytes: self.ahead + self.heads, kept, leaving }
    }
}

/// What a connection counts for among all.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Bytes of requests.
    bytes: usize,
    /// Bytes of room that the library keeps.
    kept: usize,
    /// Bytes of room that the library keeps for a connection that was asked to go.
    leaving: usize,
}

impl Counts {
    /// What the bounds of bytes are about.
    fn held(self) -> usize {
        self.bytes + self.kept
    }
}

/// Adds what a connection counts for now, instead of `before`, to a total. The sum wraps on its way, never in the end.
fn replace(total: &AtomicUsize, before: usize, now: usize) {
    if before != now {
        total.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Seats {
    /// No connections yet.
    pub fn new(budget: Budget, refused: Refused) -> Self {
        let [bytes, kept, leaving, answers] = [0; 4].map(AtomicUsize::new);
        Self { budget, refused, bytes, kept, leaving, answers, table: Mutex::default() }
    }

    /// A connection comes. `None`: there is no room for it.
    pub fn take(self: &Arc<Self>) -> Option<Arc<Seat>> {
        let is_full = {
            let table = self.table();
            table.seats.len() - table.going >= self.budget.connections
        };
        if is_full && !self.make_room() {
            self.refused.note(Bound::Connections);
            return None;
        }
        let mut table = self.table();
        table.next += 1;
        let seat = Arc::new(Seat {
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

    /// Bytes of room that the library keeps for connections that stay.
    pub fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// Bytes of room that it keeps for connections that were asked to go.
    pub fn leaving(&self) -> usize {
        self.leaving.load(Ordering::Relaxed)
    }

    fn held(&self) -> usize {
        self.bytes() + self.kept()
    }

    /// Whether more is held than may be, until what is refused or cut off has gone.
    pub fn is_full(&self) -> bool {
        self.held() > self.budget.bytes || self.answers() > self.budget.answer_bytes
    }

    /// Bytes of answers that wait for clients to read them.
    pub fn answers(&self) -> usize {
        self.answers.load(Ordering::Relaxed)
    }

    /// Counts a client that was refused, or whose connection was ended.
    pub fn note(&self, bound: Bound) {
        self.refused.note(bound);
    }

    /// Ends connections that have been idle for longest. `false`: none is.
    pub fn make_room(&self) -> bool {
        let all = self.all();
        let mut idle: Vec<_> = all.iter().filter_map(|it| Some((it.idle_since()?, it))).collect();
        let some = (all.len() / SHED).max(1).min(idle.len());
        if some == 0 {
            return false;
        }
        idle.select_nth_unstable_by_key(some - 1, |(since, _)| *since);
        for (_, seat) in &idle[..some] {
            seat.makes_room();
        }
        true
    }

    /// Too many bytes are held, by all or by one client: the connections that hold most of them lose their requests.
    fn relieve(&self, of: Option<&Arc<Tally>>, cause: u64) {
        let all = self.all();
        let of_it = |seat: &&Arc<Seat>| of.is_none_or(|it| seat.is_of(it));
        let candidates: Vec<_> = all.iter().filter(of_it).collect();
        candidates.iter().filter(|it| it.number != cause).for_each(|it| it.settle());
        let (bound, held, most) = match of {
            Some(it) => {
                (Bound::ClientBytes, it.bytes.load(Ordering::Relaxed), self.budget.client_bytes)
            }
            None => (Bound::Bytes, self.held(), self.budget.bytes),
        };
        // What is refused already is on its way out, and another one's turn if that is not enough.
        let (going, staying): (Vec<&Arc<Seat>>, Vec<_>) =
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

    /// Those that were asked to go and keep most are cut off, as far as they keep more than their part.
    fn hurry(&self) {
        let most = self.budget.leaving_bytes();
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

    /// Too many bytes of answers wait: the connection that holds most of them ends.
    fn relieve_answers(&self) {
        let all = self.all();
        let held = |seat: &&Arc<Seat>| seat.answers.load(Ordering::Relaxed);
        let (going, staying): (Vec<_>, Vec<_>) = all.iter().partition(|it| it.cut.is_cancelled());
        let leaves = going.iter().map(held).sum::<usize>();
        if self.answers().saturating_sub(leaves) <= self.budget.answer_bytes {
            return;
        }
        if let Some(most) = staying.into_iter().max_by_key(held) {
            self.note(Bound::AnswerBytes);
            most.cut.cancel();
        }
    }

    /// All of them, so that what happens to one needs no lock over all.
    fn all(&self) -> Vec<Arc<Seat>> {
        self.table().seats.values().filter_map(Weak::upgrade).collect()
    }

    /// One connection more of a client's. Returns how many it had.
    fn join(&self, client: Subscriber) -> (Arc<Tally>, usize) {
        let mut table = self.table();
        if let Some(known) = table.clients.get(&client).and_then(Weak::upgrade) {
            let before = known.connections.fetch_add(1, Ordering::Relaxed);
            return (known, before);
        }
        let (bytes, connections) = (AtomicUsize::new(0), AtomicUsize::new(1));
        let tally = Arc::new(Tally { client, bytes, connections });
        table.clients.insert(client, Arc::downgrade(&tally));
        (tally, 0)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change of the table is whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connections that hold most of the `held` bytes, until the rest hold somewhat less than `most`: enough that not each
/// byte that comes later looks through all of them again.
fn largest(
    mut seats: Vec<(usize, &Arc<Seat>)>,
    mut held: usize,
    most: usize,
) -> impl Iterator<Item = &Arc<Seat>> {
    let enough = if held > most { most - most / SPARE_PART } else { held };
    seats.sort_unstable_by_key(|(its, _)| *its);
    std::iter::from_fn(move || {
        let (its, seat) = seats.pop().filter(|(its, _)| held > enough && *its > 0)?;
        held = held.saturating_sub(its);
        Some(seat)
    })
}

impl Seat {
    /// It is this client's. `false`: that one has enough of them.
    pub fn belongs_to(&self, client: IpAddr) -> bool {
        let (tally, before) = self.seats.join(Subscriber::of(client));
        let has_room = before < self.seats.budget.client_connections;
        if !has_room {
            self.seats.note(Bound::ClientConnections);
        }
        // The count ends with the seat, also of one that is refused.
        let _ = self.tally.set(tally);
        has_room
    }

    /// Bytes of a body have come; a connection holds `most` of them.
    pub fn came(&self, count: usize, most: usize) {
        self.change(|takes| takes.ahead += count.min(most.saturating_sub(takes.ahead)));
    }

    /// A pod has taken bytes of a body.
    pub fn passed(&self, count: usize) {
        self.change(|takes| takes.ahead -= count.min(takes.ahead));
    }

    /// A head has come further, or whole: it takes so much now.
    pub fn holds_head(&self, before: usize, now: usize) {
        self.change(|takes| takes.heads = takes.heads - before + now);
    }

    /// The library has room of so many bytes for what comes in, and keeps it while the connection lasts.
    pub fn keeps(&self, room: usize) {
        self.change(|takes| takes.room = room);
    }

    /// A body begins.
    pub fn body_begins(&self) {
        self.change(|takes| takes.bodies += 1);
    }

    /// A body is over, or given up: without any, nothing is held.
    pub fn body_ends(&self) {
        self.change(|takes| {
            takes.bodies -= 1;
            if takes.bodies == 0 {
                takes.ahead = 0;
            }
        });
    }

    /// Counts bytes of an answer until they have been sent.
    pub fn sends(self: &Arc<Self>, data: Bytes) -> Bytes {
        if data.is_empty() {
            return data;
        }
        let waits = self.waits(data.len());
        Bytes::from_owner(Unsent { _waits: waits, data })
    }

    /// Counts bytes of answers that lie here, or may, until the guard is dropped.
    pub fn waits(self: &Arc<Self>, count: usize) -> Waiting {
        self.answers.fetch_add(count, Ordering::Relaxed);
        let all = self.seats.answers.fetch_add(count, Ordering::Relaxed) + count;
        if all > self.seats.budget.answer_bytes {
            self.seats.relieve_answers();
        }
        Waiting { seat: Arc::clone(self), count }
    }

    /// A request begins; it lasts until the guard is dropped.
    pub fn asks(self: &Arc<Self>) -> Asked {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        self.change(|takes| takes.streams = takes.streams.max(asked));
        Asked(Arc::clone(self))
    }

    /// For how long nothing has been asked; `None`: something is.
    pub fn idle(&self) -> Option<Duration> {
        self.idle_since().map(|since| Duration::from_nanos(now_ns().saturating_sub(since)))
    }

    /// Counts `bytes` of a head that has come, until it goes to a pod or is given up. `None`: the connection's requests are
    /// refused, or it holds more than its equal part while those that are refused have not gone yet.
    pub fn takes_head(self: &Arc<Self>, bytes: usize) -> Option<Held> {
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

    /// Counts `bytes` of a head in any case.
    pub fn holds(self: &Arc<Self>, bytes: usize) -> Held {
        self.holds_head(0, bytes);
        Held { tells: self.tells(), bytes }
    }

    /// A request begins that is told when its connection's are refused; until the guard is dropped.
    pub fn tells(self: &Arc<Self>) -> Tells {
        self.tellable.fetch_add(1, Ordering::Relaxed);
        Tells(Arc::clone(self))
    }

    /// Waits until its requests are refused for what the connection holds.
    pub async fn refused(&self) {
        self.refuse.cancelled().await;
    }

    fn is_refused(&self) -> bool {
        self.refuse.is_cancelled()
    }

    /// The bound of bytes that is passed, where this connection holds more than its equal part of them.
    fn excess(&self) -> Option<Bound> {
        let budget = &self.seats.budget;
        let is_most = |bytes: usize, sharers: usize| self.held() > bytes / sharers.max(1);
        if self.seats.held() > budget.bytes && is_most(budget.bytes, self.seats.table().seats.len())
        {
            return Some(Bound::Bytes);
        }
        let tally = self.tally.get()?;
        let its = tally.bytes.load(Ordering::Relaxed);
        let connections = tally.connections.load(Ordering::Relaxed);
        (its > budget.client_bytes && is_most(budget.client_bytes, connections))
            .then_some(Bound::ClientBytes)
    }

    /// All that is bound to this client.
    pub fn seats(&self) -> &Seats {
        &self.seats
    }

    fn idle_since(&self) -> Option<u64> {
        let is_idle = self.asked.load(Ordering::Relaxed) == 0 && !self.takes().is_going;
        is_idle.then(|| self.idle_since_ns.load(Ordering::Relaxed))
    }

    fn makes_room(&self) {
        if !std::mem::replace(&mut self.takes().is_going, true) {
            self.seats.table().going += 1;
            self.seats.note(Bound::Connections);
            self.cut.cancel();
        }
    }

    /// What no body and no request stands for was thrown away by the library.
    fn settle(&self) {
        self.change(|takes| {
            if takes.bodies == 0 && self.asked.load(Ordering::Relaxed) == 0 {
                takes.ahead = 0;
            }
        });
    }

    /// Its requests are refused, and it is asked to go; where some of what it holds belongs to none that can be told, it ends.
    fn refuse(&self) {
        let tellable = self.tellable.load(Ordering::Relaxed);
        let is_untold = self.change(|takes| {
            let bytes = takes.counts().bytes;
            // It is on its way out, and another one's turn if that is not enough.
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

    fn counts(&self) -> Counts {
        self.takes().counts()
    }

    fn is_of(&self, tally: &Arc<Tally>) -> bool {
        self.tally.get().is_some_and(|it| Arc::ptr_eq(it, tally))
    }

    /// Changes what it takes, and the totals with it: a total that another thread sees has each change whole. Makes room
    /// where it takes more than before.
    fn change<R>(&self, change: impl FnOnce(&mut Takes) -> R) -> R {
        let (result, before, now) = {
            let mut takes = self.takes();
            let before = takes.counts();
            let result = change(&mut takes);
            let now = takes.counts();
            self.count(before, now);
            (result, before, now)
        };
        if now.held() > before.held() {
            self.keep_bounds();
        }
        if now.leaving > before.leaving {
            self.seats.hurry();
        }
        result
    }

    fn count(&self, before: Counts, now: Counts) {
        replace(&self.seats.bytes, before.bytes, now.bytes);
        replace(&self.seats.kept, before.kept, now.kept);
        replace(&self.seats.leaving, before.leaving, now.leaving);
        if let Some(tally) = self.tally.get() {
            replace(&tally.bytes, before.held(), now.held());
        }
    }

    fn keep_bounds(&self) {
        let budget = &self.seats.budget;
        let tally = self.tally.get();
        if let Some(it) = tally.filter(|it| it.bytes.load(Ordering::Relaxed) > budget.client_bytes)
        {
            self.seats.relieve(Some(it), self.number);
        }
        if self.seats.held() > budget.bytes {
            self.seats.relieve(None, self.number);
        }
    }

    fn takes(&self) -> MutexGuard<'_, Takes> {
        // Each change of the figures is whole.
        self.takes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Takes { is_going, .. } = self.change(std::mem::take);
        let tally = self.tally.take();
        // A client's connections are counted up under the same lock.
        let mut table = self.seats.table();
        table.seats.remove(&self.number);
        table.going -= usize::from(is_going);
        if let Some(tally) = tally.filter(|it| it.connections.fetch_sub(1, Ordering::Relaxed) == 1)
        {
            table.clients.remove(&tally.client);
        }
    }
}

/// A request under way.
#[derive(Debug)]
pub struct Asked(Arc<Seat>);

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.idle_since_ns.store(now_ns(), Ordering::Relaxed);
        self.0.asked.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Asked {
    /// The connection that it came over.
    pub fn seat(&self) -> &Arc<Seat> {
        &self.0
    }
}

/// Bytes of an answer that have not been sent.
struct Unsent {
    _waits: Waiting,
    data: Bytes,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Bytes of an answer that are counted.
#[derive(Debug)]
pub struct Waiting {
    seat: Arc<Seat>,
    count: usize,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.seat.answers.fetch_sub(self.count, Ordering::Relaxed);
        self.seat.seats.answers.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Bytes of a head that no pod has taken.
#[derive(Debug)]
pub struct Held {
    tells: Tells,
    bytes: usize,
}

impl Held {
    /// How many.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.tells.0.holds_head(self.bytes, 0);
    }
}

/// A request that can be told that it is refused.
#[derive(Debug)]
pub struct Tells(Arc<Seat>);

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.tellable.fetch_sub(1, Ordering::Relaxed);
    }
}
