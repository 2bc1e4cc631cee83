//! Shell: the kernel's maps: applies planned writes, reads listeners and counters, hands out events.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    mem::offset_of,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
        fence,
    },
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, RingBuf};
use common::{
    abi::{self, maps},
    flow::{Mode, SvcInfo, SvcState},
    wire::Totals,
};

use self::{conns::Conns, gauges::Gauges};
use crate::{
    plan::{Backend, KernelTable, MapOp, Written},
    sys::{self, Words},
};

/// Why a map cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pin is missing or not what it should be.
    #[error("cannot open map {name} in {}", pins.display())]
    Open {
        /// The map.
        name: &'static str,
        /// Where its pin should be.
        pins: PathBuf,
        /// Why.
        source: Box<MapError>,
    },
    /// A map's memory cannot be shared.
    #[error("cannot map the memory of {name}")]
    Share {
        /// The map.
        name: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A write was refused.
    #[error("cannot write {subject} to map {name}")]
    Write {
        /// The map.
        name: &'static str,
        /// What was written.
        subject: String,
        /// Why.
        source: Box<MapError>,
    },
    /// A read failed.
    #[error("cannot read map {name}")]
    Read {
        /// The map.
        name: &'static str,
        /// Why.
        source: Box<MapError>,
    },
}

const BACKEND_WORDS: usize = size_of::<abi::Backend>() / 8;
const STATE_WORDS: usize = size_of::<abi::PodState>() / 8;
const COUNTER_WORDS: usize = size_of::<abi::Counters>() / 8;
const RESPONSE_WORDS: usize = abi::RESPONSE_WORDS;

pub mod conns;
pub mod gauges;
pub(crate) mod ledger;
mod old;

/// Every map the agent reads or writes. Only one process at a time may write.
#[derive(Debug)]
pub struct Maps {
    frontends: HashMap<MapData, abi::FrontendKey, u32>,
    pods: HashMap<MapData, u64, abi::Pod>,
    listen: HashMap<MapData, abi::ListenKey, abi::Listen>,
    listeners: HashMap<MapData, u64, u32>,
    node: HashMap<MapData, [u8; 16], u32>,
    svc_state: Words,
    svc_info: Words,
    slots: Words,
    backends: Words,
    rows: Rows,
    control: Words,
    conns: Conns,
    pins: PathBuf,
    /// What the programs of the version before still count.
    old: Option<old::Old>,
}

/// What the kernel half counts of each pod, by slot.
#[derive(Debug)]
struct Rows {
    pod_state: Words,
    counters: Words,
    responses: Words,
    /// Rows of one pod: one for each possible CPU, and behind them user space's own.
    cpus: usize,
}

impl Maps {
    /// Opens the maps pinned in `pins` (`bpf/v<ABI>/`).
    pub fn open(pins: &Path) -> Result<Self, Error> {
        let rows = capacity(pins, maps::COUNTERS)?;
        Ok(Self {
            frontends: hash(pins, maps::FRONTENDS)?,
            pods: hash(pins, maps::PODS)?,
            listen: hash(pins, maps::LISTEN)?,
            listeners: hash(pins, maps::LISTENERS)?,
            node: hash(pins, maps::NODE)?,
            svc_state: words(pins, maps::SVC_STATE, abi::SERVICES_MAX as usize)?,
            svc_info: words(pins, maps::SVC_INFO, abi::SERVICES_MAX as usize)?,
            slots: words(pins, maps::SLOTS, abi::SLOTS_MAX as usize)?,
            backends: words(pins, maps::BACKENDS, abi::BACKENDS_MAX as usize * BACKEND_WORDS)?,
            rows: Rows {
                pod_state: words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
                counters: words(pins, maps::COUNTERS, rows * COUNTER_WORDS)?,
                responses: words(pins, maps::RESPONSES, rows * RESPONSE_WORDS)?,
                cpus: rows / abi::PODS_MAX as usize,
            },
            control: words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?,
            conns: Conns::open([pins])?,
            pins: pins.to_owned(),
            old: None,
        })
    }

    /// Adds what the programs of another version, pinned in `pins`, count until their connections have closed.
    #[must_use]
    pub fn beside(self, pins: Option<&Path>) -> Self {
        let both = pins.and_then(|old| Conns::open([&self.pins, old]).ok());
        Self { old: pins.and_then(old::Old::open), conns: both.unwrap_or(self.conns), ..self }
    }

    /// What is remembered of each connection of a pod.
    pub fn conns(&self) -> Conns {
        self.conns.clone()
    }

    /// What of revisions' totals outlives the agent.
    pub(crate) fn ledger(&self) -> Result<ledger::Ledger, Error> {
        ledger::Ledger::open(&self.pins)
    }

    /// The gauges of pods, for another task.
    pub fn gauges(&self) -> Result<Gauges, Error> {
        Gauges::open(&self.pins)
    }

    /// Takes over for good what another version has counted to the end. Returns whether nothing of it is left; `all` also
    /// forgets its pods that nobody has registered here.
    pub fn settle_old(&mut self, all: bool) -> bool {
        let settled = self.old.as_mut().is_none_or(|old| old.settle(&self.rows, all));
        if settled {
            self.old = None;
        }
        settled
    }

    /// Carries out planned writes in their order. After an error, read the table back and plan anew.
    pub fn apply(&mut self, ops: &[MapOp]) -> Result<(), Error> {
        ops.iter().try_for_each(|op| self.write(op))
    }

    fn write(&mut self, op: &MapOp) -> Result<(), Error> {
        match op {
            MapOp::Backend { id, backend } => self.write_backend(*id, backend),
            MapOp::Slots { offset, backends } => {
                let extent = &self.slots.words()[*offset as usize..][..backends.len()];
                for (slot, &backend) in extent.iter().zip(backends) {
                    slot.store(backend.into(), Relaxed);
                }
            }
            MapOp::Info { service, info } => {
                self.svc_info.words()[*service as usize].store(info.pack(), Release);
            }
            MapOp::State { service, state } => {
                self.svc_state.words()[*service as usize].store(state.pack(), Release);
            }
            MapOp::Frontend { key, service } => {
                let done = self.frontends.insert(key, service, 0);
                return done.map_err(|source| refused(maps::FRONTENDS, key, source));
            }
            MapOp::RemoveFrontend { key } => {
                let done = unless_gone(self.frontends.remove(key));
                return done.map_err(|source| refused(maps::FRONTENDS, key, source));
            }
        }
        Ok(())
    }

    /// Writes a backend that no list names yet: its gauge starts at 0 in a new generation.
    fn write_backend(&self, id: u32, backend: &Backend) {
        let row = row(&self.backends, id as usize, BACKEND_WORDS);
        let (low, high) = backend.address.split_at(8);
        let tail = u64::from(backend.slot) | u64::from(backend.port_be) << 32;
        row[0].store(word(low), Relaxed);
        row[1].store(word(high), Relaxed);
        row[offset_of!(abi::Backend, cookie) / 8].store(backend.cookie, Relaxed);
        row[offset_of!(abi::Backend, slot) / 8].store(tail, Relaxed);
        row[offset_of!(abi::Backend, generation) / 8].fetch_add(1, Relaxed);
        row[offset_of!(abi::Backend, open) / 8].store(0, Relaxed);
        row[offset_of!(abi::Backend, unanswered_ns) / 8].store(0, Relaxed);
    }

    /// Reads back what connects follow now, to plan from after a restart.
    pub fn read(&self) -> Result<KernelTable, Error> {
        let mut table = KernelTable::default();
        for entry in self.frontends.iter() {
            let (key, service) = entry.map_err(|e| read(maps::FRONTENDS, e))?;
            if service < abi::FIRST_SERVICE {
                continue;
            }
            table.frontends.insert(key, service);
            self.read_service(service, &mut table);
        }
        self.read_service(abi::ACTIVATORS_V4, &mut table);
        self.read_service(abi::ACTIVATORS_V6, &mut table);
        table.written = Written {
            backends: end(self.backends.words()).div_ceil(BACKEND_WORDS as u32),
            slots: end(self.slots.words()),
            services: end(self.svc_state.words()),
        };
        Ok(table)
    }

    fn read_service(&self, service: u32, table: &mut KernelTable) {
        let Some(word) = self.svc_state.words().get(service as usize) else { return };
        let state = SvcState::unpack(word.load(Acquire));
        let info = SvcInfo::unpack(self.svc_info.words()[service as usize].load(Acquire));
        let extent =
            self.slots.words().iter().skip(state.offset as usize).take(state.count as usize);
        let list: Vec<u32> = extent.map(|slot| slot.load(Relaxed) as u32).collect();
        for &id in &list {
            table.backends.entry(id).or_insert_with(|| self.read_backend(id));
        }
        table.services.insert(service, (state, info, list));
    }

    fn read_backend(&self, id: u32) -> Backend {
        let row = row(&self.backends, id as usize % abi::BACKENDS_MAX as usize, BACKEND_WORDS);
        let mut address = [0; 16];
        address[..8].copy_from_slice(&row[0].load(Relaxed).to_ne_bytes());
        address[8..].copy_from_slice(&row[1].load(Relaxed).to_ne_bytes());
        let tail = row[offset_of!(abi::Backend, slot) / 8].load(Relaxed);
        Backend {
            address,
            cookie: row[offset_of!(abi::Backend, cookie) / 8].load(Relaxed),
            slot: tail as u32,
            port_be: (tail >> 32) as u16,
        }
    }

    /// This node's open connections to a backend, as `connect` sees them.
    pub fn open_connections(&self, backend: u32) -> u64 {
        let row = row(&self.backends, backend as usize, BACKEND_WORDS);
        common::flow::clamp(row[offset_of!(abi::Backend, open) / 8].load(Relaxed))
    }

    /// Registered pods by netns cookie.
    pub fn pods(&self) -> Result<BTreeMap<u64, abi::Pod>, Error> {
        self.pods.iter().map(|entry| entry.map_err(|e| read(maps::PODS, e))).collect()
    }

    /// Registers a pod's namespace, or changes its entry: from now on its serving port is counted, and its loopback
    /// bind widened where [`abi::POD_WIDEN_BIND`] says so. Clear a slot of an earlier pod first.
    pub fn register(&mut self, cookie: u64, pod: abi::Pod) -> Result<(), Error> {
        let done = self.pods.insert(cookie, pod, 0);
        done.map_err(|source| refused(maps::PODS, (cookie, pod.slot), source))?;
        self.old.as_mut().map_or(Ok(()), |old| old.hand_over(cookie, pod.slot))
    }

    /// Forgets a pod and every listener of its namespace. Its slot should rest as long as possible before reuse.
    pub fn unregister(&mut self, cookie: u64) -> Result<(), Error> {
        if let Some(old) = &mut self.old {
            old.forget(cookie);
        }
        let done = unless_gone(self.pods.remove(&cookie));
        done.map_err(|source| refused(maps::PODS, cookie, source))?;
        let keys: Vec<_> = self.listen.keys().filter_map(Result::ok).collect();
        for key in keys.iter().filter(|key| key.cookie == cookie) {
            let done = unless_gone(self.listen.remove(key));
            done.map_err(|source| refused(maps::LISTEN, key, source))?;
        }
        self.set_entries(cookie, None)
    }

    /// Counts the entries of each namespace in `LISTEN`, of which each may have so many. A listener that opens meanwhile
    /// may be missed until the next count.
    pub fn count_listeners(&mut self) -> Result<(), Error> {
        let mut counts = BTreeMap::<u64, u32>::new();
        for key in self.listen.keys() {
            *counts.entry(key.map_err(|e| read(maps::LISTEN, e))?.cookie).or_default() += 1;
        }
        let known: Vec<_> = self.listeners.iter().filter_map(Result::ok).collect();
        for (cookie, _) in known.iter().filter(|(cookie, _)| !counts.contains_key(cookie)) {
            self.set_entries(*cookie, None)?;
        }
        counts.into_iter().try_for_each(|(cookie, count)| self.set_entries(cookie, Some(count)))
    }

    fn set_entries(&mut self, cookie: u64, count: Option<u32>) -> Result<(), Error> {
        let done = match count {
            Some(count) => self.listeners.insert(cookie, count, 0),
            None => unless_gone(self.listeners.remove(&cookie)),
        };
        done.map_err(|source| refused(maps::LISTENERS, cookie, source))
    }

    /// Sets all counters of a slot to zero, before it is given to a new pod.
    pub fn clear_slot(&self, slot: u32) {
        let zero = |words: &[AtomicU64]| words.iter().for_each(|word| word.store(0, Relaxed));
        zero(row(&self.rows.pod_state, slot as usize, STATE_WORDS));
        for cpu in 0..self.rows.cpus {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            zero(row(&self.rows.counters, index, COUNTER_WORDS));
            zero(row(&self.rows.responses, index, RESPONSE_WORDS));
        }
    }

    /// Open listeners of a namespace and port that the kernel half saw begin; all zero without any.
    pub fn listen(&self, cookie: u64, port: u16) -> Result<abi::Listen, Error> {
        match self.listen.get(&abi::ListenKey { cookie, port: port.into(), reserved: 0 }, 0) {
            Ok(found) => Ok(found),
            Err(MapError::KeyNotFound) => Ok(abi::Listen::default()),
            Err(source) => Err(read(maps::LISTEN, source)),
        }
    }

    /// Makes the canary's address answer as [`crate::programs`] expects.
    pub fn set_canary(&mut self) -> Result<(), Error> {
        let state = SvcState { offset: 0, count: 0, generation: 0, mode: Mode::Canary };
        self.write(&MapOp::State { service: abi::CANARY_SERVICE, state })?;
        self.write(&MapOp::Frontend { key: abi::CANARY, service: abi::CANARY_SERVICE })
    }

    /// Removes one entry of listeners that are known to be closed.
    pub fn forget_listener(&mut self, cookie: u64, port: u16) -> Result<(), Error> {
        let key = abi::ListenKey { cookie, port: port.into(), reserved: 0 };
        let done = unless_gone(self.listen.remove(&key));
        done.map_err(|source| refused(maps::LISTEN, key, source))
    }

    /// Says which addresses are the node's own: connections from there may be the kubelet's.
    pub fn set_node(&mut self, addresses: &BTreeSet<[u8; 16]>) -> Result<(), Error> {
        let known: Vec<[u8; 16]> = self.node.keys().filter_map(Result::ok).collect();
        for stale in known.iter().filter(|address| !addresses.contains(*address)) {
            let done = unless_gone(self.node.remove(stale));
            done.map_err(|source| refused(maps::NODE, stale, source))?;
        }
        for fresh in addresses.iter().filter(|address| !known.contains(address)) {
            let done = self.node.insert(fresh, 1, 0);
            done.map_err(|source| refused(maps::NODE, fresh, source))?;
        }
        Ok(())
    }

    /// Every namespace and port with a listener, now or before.
    pub fn listeners(&self) -> Result<BTreeMap<abi::ListenKey, abi::Listen>, Error> {
        self.listen.iter().map(|entry| entry.map_err(|e| read(maps::LISTEN, e))).collect()
    }

    /// One pod's running totals over all CPUs.
    pub fn totals(&self, slot: u32) -> Totals {
        let (new, old) = (self.rows.totals(slot), self.old.as_ref().map(|old| old.totals(slot)));
        let old = old.unwrap_or_default();
        Totals {
            started: new.started.wrapping_add(old.started),
            finished: new.finished.wrapping_add(old.finished),
            started_sum_ns: new.started_sum_ns.wrapping_add(old.started_sum_ns),
            finished_sum_ns: new.finished_sum_ns.wrapping_add(old.finished_sum_ns),
            left: 0,
        }
    }

    /// One pod's responses over all CPUs.
    pub fn responses(&self, slot: u32) -> abi::Responses {
        let mut sum = self.rows.responses(slot).words();
        if let Some(old) = self.old.as_ref().map(|old| old.responses(slot).words()) {
            sum.iter_mut().zip(old).for_each(|(total, old)| *total = total.wrapping_add(old));
        }
        abi::Responses::from_words(sum)
    }

    /// One pod's levels, gauges clamped at 0.
    pub fn state(&self, slot: u32) -> abi::PodState {
        let new = self.rows.state(slot);
        let Some(old) = self.old.as_ref().map(|old| old.state(slot)) else { return new };
        abi::PodState {
            in_flight: new.in_flight + old.in_flight,
            armed: new.armed,
            connections: new.connections + old.connections,
            fresh: new.fresh + old.fresh,
            changed_ns: new.changed_ns.max(old.changed_ns),
            desync: new.desync + old.desync,
            opaque: new.opaque + old.opaque,
            stray: new.stray + old.stray,
        }
    }

    /// Asks for one event when more than `level` requests are in flight in the pod, or when the next one begins where
    /// `level` is 0. Look at [`state`](Self::state) afterwards: they may be already.
    pub fn arm(&self, slot: u32, level: u64) {
        // Those that another version's programs count are in none of our gauges.
        let others = self.old.as_ref().map_or(0, |old| old.state(slot).in_flight);
        let row = row(&self.rows.pod_state, slot as usize, STATE_WORDS);
        let armed = level.saturating_sub(others) + 1;
        row[offset_of!(abi::PodState, armed) / 8].store(armed, Release);
    }

    /// A word of `CONTROL`, by its `abi::CONTROL_*` number.
    pub fn control(&self, word: u32) -> u64 {
        self.control.words()[word as usize].load(Acquire)
    }
}

impl Rows {
    /// One pod's running totals over all CPUs.
    fn totals(&self, slot: u32) -> Totals {
        let mut sum = Totals::default();
        for cpu in 0..self.cpus {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            let one = settled(row(&self.counters, index, COUNTER_WORDS));
            sum.started = sum.started.wrapping_add(one.started);
            sum.finished = sum.finished.wrapping_add(one.finished);
            sum.started_sum_ns = sum.started_sum_ns.wrapping_add(one.started_sum_ns);
            sum.finished_sum_ns = sum.finished_sum_ns.wrapping_add(one.finished_sum_ns);
        }
        sum
    }

    /// One pod's responses over all CPUs.
    fn responses(&self, slot: u32) -> abi::Responses {
        let mut sum = [0_u64; RESPONSE_WORDS];
        for cpu in 0..self.cpus {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            let words = row(&self.responses, index, RESPONSE_WORDS);
            sum.iter_mut().zip(words).for_each(|(total, word)| {
                *total = total.wrapping_add(word.load(Relaxed));
            });
        }
        abi::Responses::from_words(sum)
    }

    /// One pod's levels, gauges clamped at 0.
    fn state(&self, slot: u32) -> abi::PodState {
        let row = row(&self.pod_state, slot as usize, STATE_WORDS);
        let load = |at: usize| row[at / 8].load(Acquire);
        let gauge = |at: usize| common::flow::clamp(load(at));
        abi::PodState {
            in_flight: gauge(offset_of!(abi::PodState, in_flight)),
            armed: load(offset_of!(abi::PodState, armed)),
            connections: gauge(offset_of!(abi::PodState, connections)),
            fresh: gauge(offset_of!(abi::PodState, fresh)),
            changed_ns: load(offset_of!(abi::PodState, changed_ns)),
            desync: load(offset_of!(abi::PodState, desync)),
            opaque: gauge(offset_of!(abi::PodState, opaque)),
            stray: load(offset_of!(abi::PodState, stray)),
        }
    }
}

/// The event ring. Wrap it in `AsyncFd` and call [`next`](Self::next) until `None` when readable.
pub struct Events(RingBuf<MapData>);

impl std::fmt::Debug for Events {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Events")
    }
}

impl Events {
    /// Opens the ring pinned in `pins`. Only one reader may exist.
    pub fn open(pins: &Path) -> Result<Self, Error> {
        let map = Map::RingBuf(open(pins, maps::EVENTS)?);
        let ring = RingBuf::try_from(map);
        ring.map(Self).map_err(|source| not_opened(pins, maps::EVENTS, source))
    }

    /// The next event, if there is one. Bytes of another size are skipped: hints may be lost.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator would seem to end; this one goes on when the ring fills again"
    )]
    pub fn next(&mut self) -> Option<abi::Event> {
        while let Some(item) = self.0.next() {
            if let Some(event) = decode(&item) {
                return Some(event);
            }
        }
        None
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// An event from its bytes.
pub fn decode(bytes: &[u8]) -> Option<abi::Event> {
    let bytes: &[u8; 24] = bytes.try_into().ok()?;
    let half =
        |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some(abi::Event {
        kind: half(0),
        subject: half(4),
        cookie: word(&bytes[8..16]),
        at_ns: word(&bytes[16..24]),
    })
}

/// Reads a row only when nothing was being written: `begin` and `end` equal before and unchanged after.
///
/// A writer holds a row for nanoseconds on a CPU that is running, so a few tries are plenty; after 1,000 the
/// words are taken as they are.
fn settled(row: &[AtomicU64]) -> abi::Counters {
    let load = |at: usize| row[at / 8].load(Relaxed);
    let mut tries = 0;
    loop {
        let end = row[offset_of!(abi::Counters, end) / 8].load(Acquire);
        let found = abi::Counters {
            begin: load(offset_of!(abi::Counters, begin)),
            started: load(offset_of!(abi::Counters, started)),
            finished: load(offset_of!(abi::Counters, finished)),
            started_sum_ns: load(offset_of!(abi::Counters, started_sum_ns)),
            finished_sum_ns: load(offset_of!(abi::Counters, finished_sum_ns)),
            reserved: [0; 2],
            end,
        };
        fence(Acquire);
        let begin = row[offset_of!(abi::Counters, begin) / 8].load(Relaxed);
        tries += 1;
        if begin == end || tries == 1_000 {
            return found;
        }
        std::hint::spin_loop();
    }
}

/// One more than the index of the last word that is not 0.
fn end(words: &[AtomicU64]) -> u32 {
    let last = words.iter().rposition(|word| word.load(Relaxed) != 0);
    last.map_or(0, |last| last as u32 + 1)
}

fn row(words: &Words, index: usize, width: usize) -> &[AtomicU64] {
    &words.words()[index * width..][..width]
}

/// Eight bytes as the word they are in memory.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

/// Whether client sockets are open that the connect programs with these pins led somewhere: one has a row, or storage of its
/// own. Where that cannot be read there may be some.
pub(crate) fn has_clients(pins: &Path) -> Result<bool, Error> {
    let control = words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?;
    if control.words()[abi::CONTROL_OVERFLOW as usize].load(Relaxed) != 0 {
        return Ok(true);
    }
    let claims: Array<MapData, u64> = Array::try_from(Map::Array(open(pins, maps::CLAIMS)?))
        .map_err(|source| not_opened(pins, maps::CLAIMS, source))?;
    for claim in claims.iter() {
        if claim.map_err(|source| read(maps::CLAIMS, source))? != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn hash<K: aya::Pod, V: aya::Pod>(
    pins: &Path,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, Error> {
    let map = Map::HashMap(open(pins, name)?);
    HashMap::try_from(map).map_err(|source| not_opened(pins, name, source))
}

/// The map of probes under way. The loop does not need it; those who probe do.
pub(crate) fn probes(pins: &Path) -> Result<HashMap<MapData, abi::ProbeKey, u64>, Error> {
    let map = Map::LruHashMap(open(pins, maps::PROBES)?);
    HashMap::try_from(map).map_err(|source| not_opened(pins, maps::PROBES, source))
}

fn open(pins: &Path, name: &'static str) -> Result<MapData, Error> {
    MapData::from_pin(pins.join(name)).map_err(|source| not_opened(pins, name, source))
}

fn pinned(pins: &Path, name: &'static str) -> Result<OwnedFd, Error> {
    sys::open_pin(&pins.join(name)).map_err(|source| Error::Share { name, source })
}

fn capacity(pins: &Path, name: &'static str) -> Result<usize, Error> {
    let map = pinned(pins, name)?;
    let shape = sys::map_shape(map.as_fd()).map_err(|source| Error::Share { name, source })?;
    Ok(shape[3] as usize)
}

fn words(pins: &Path, name: &'static str, count: usize) -> Result<Words, Error> {
    let map = pinned(pins, name)?;
    Words::map(map.as_fd(), count).map_err(|source| Error::Share { name, source })
}

fn not_opened(pins: &Path, name: &'static str, source: MapError) -> Error {
    Error::Open { name, pins: pins.to_owned(), source: Box::new(source) }
}

/// What is to be gone may be so already: aya passes on the kernel's word for it, and keeps `KeyNotFound` for lookups.
fn unless_gone(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::SyscallError(it)) if it.io_error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn refused(name: &'static str, subject: impl std::fmt::Debug, source: MapError) -> Error {
    Error::Write { name, subject: format!("{subject:?}"), source: Box::new(source) }
}

fn read(name: &'static str, source: MapError) -> Error {
    Error::Read { name, source: Box::new(source) }
}
