//! Shell: the kernel's maps: applies map operations, reads listeners and counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    mem::offset_of,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use common::wire::RequestTotals;
use datapath::{
    abi::{self, maps},
    load_balancing::{RoutingMode, SvcInfo, SvcState},
};

pub use self::event_ring::{KernelEventRing, decode_event};
use self::{
    connection_storage::ConnectionStorage, counter_rows::CounterRows, gauges::PodGauges,
    idle_events::IdleEventFlags,
};
use crate::kernel::{
    map_op::{BackendTarget, KernelRoutes, MapOp, WrittenBounds},
    pod_registration::PodRegistration,
    sys::{self, SharedWords},
};
use crate::map_sizes::MapSizes;

/// Error of a kernel map.
#[derive(Debug, thiserror::Error)]
pub enum KernelMapError {
    /// A pin is missing, or is a map of another type.
    #[error("cannot open map {name} in {}", pins.display())]
    Open {
        /// Name of the map.
        name: &'static str,
        /// Folder that should have its pin.
        pins: PathBuf,
        source: Box<MapError>,
    },
    /// A pin is missing, or the pinned map cannot be used.
    #[error("cannot {attempt} pinned map {}", path.display())]
    Pin {
        /// Verb of the failed operation.
        attempt: &'static str,
        /// Path of the pin.
        path: PathBuf,
        source: io::Error,
    },
    /// A pinned map has keys or values of another size.
    #[error("pinned map {} has keys and values of {found:?} bytes, not {wanted:?}", path.display())]
    Layout {
        /// Path of the pin.
        path: PathBuf,
        /// Bytes of a key and of a value in the map.
        found: [u32; 2],
        /// Bytes of a key and of a value that this version reads.
        wanted: [u32; 2],
    },
    /// A map's memory cannot be mapped into the agent.
    #[error("cannot map the memory of map {name}")]
    Mmap {
        /// Name of the map.
        name: &'static str,
        source: io::Error,
    },
    /// The kernel refused a write.
    #[error("cannot write {subject} to map {name}")]
    Write {
        /// Name of the map.
        name: &'static str,
        /// Key of the entry that was written.
        subject: String,
        source: Box<MapError>,
    },
    /// The kernel refused some of several writes.
    #[error("cannot write {count} entries to map {name}")]
    WriteMany {
        /// Name of the map.
        name: &'static str,
        /// Number of entries that were to be written.
        count: usize,
        source: io::Error,
    },
    /// A read of the map failed.
    #[error("cannot read map {name}")]
    Read {
        /// Name of the map.
        name: &'static str,
        source: Box<MapError>,
    },
}

/// Frontends written in one system call.
const FRONTENDS_PER_CALL: usize = 1_024;
const BACKEND_WORDS: usize = size_of::<abi::BackendValue>() / 8;
const STATE_WORDS: usize = size_of::<abi::PodState>() / 8;
const COUNTER_WORDS: usize = size_of::<abi::PodCounters>() / 8;
const RESPONSE_WORDS: usize = abi::RESPONSE_WORDS;

pub(crate) mod client_sockets;
pub mod connection_storage;
mod counter_rows;
mod event_ring;
pub mod gauges;
pub mod idle_events;
pub mod meshed_namespaces;
mod pod_ports;
mod previous_version;
pub(crate) mod stored_totals;
pub mod thaw_promise;

/// Maps of routes, pods, listeners and connections. Other maps are opened where they are used, such as `EVENTS`.
///
/// Only one process at a time may write.
#[derive(Debug)]
pub struct KernelMaps {
    frontends: HashMap<MapData, abi::FrontendKey, u32>,
    /// Descriptor of that map, for writes of many entries at once.
    frontends_fd: OwnedFd,
    pods: HashMap<MapData, u64, abi::PodValue>,
    pod_ports: pod_ports::PodPortEntries,
    listen: HashMap<MapData, abi::ListenKey, abi::ListenValue>,
    /// Number of entries in `LISTEN` by netns cookie.
    listeners: HashMap<MapData, u64, u32>,
    node_addresses: HashMap<MapData, [u8; 16], u32>,
    svc_state: SharedWords,
    svc_info: SharedWords,
    list_entries: SharedWords,
    backends: SharedWords,
    counter_rows: CounterRows,
    control: SharedWords,
    connections: ConnectionStorage,
    pins: PathBuf,
    /// Sizes with which the maps were created.
    sizes: MapSizes,
    /// Counters that the programs of the previous version still keep.
    previous: Option<previous_version::PreviousCounters>,
}

impl KernelMaps {
    /// Opens the maps that are pinned in the folder `pins`, the [folder](crate::paths::AgentPaths::pins) of a version.
    pub fn open(pins: &Path) -> Result<Self, KernelMapError> {
        // The pinned map's capacity counts: it follows from the CPUs at the map's creation.
        let rows = capacity(pins, maps::COUNTERS)?;
        let sizes = read_sizes(pins)?;
        let service_ids = capacity(pins, maps::SVC_STATE)?;
        Ok(Self {
            frontends: open_hash_map(pins, maps::FRONTENDS)?,
            frontends_fd: open_pinned(pins, maps::FRONTENDS)?,
            pods: open_hash_map(pins, maps::PODS)?,
            pod_ports: pod_ports::PodPortEntries::open(pins)?,
            listen: open_hash_map(pins, maps::LISTEN)?,
            listeners: open_hash_map(pins, maps::LISTENERS)?,
            node_addresses: open_hash_map(pins, maps::NODE)?,
            svc_state: map_words(pins, maps::SVC_STATE, service_ids)?,
            svc_info: map_words(pins, maps::SVC_INFO, service_ids)?,
            list_entries: map_words(pins, maps::SLOTS, sizes.list_entries as usize)?,
            backends: map_words(pins, maps::BACKENDS, sizes.backends as usize * BACKEND_WORDS)?,
            counter_rows: CounterRows {
                pod_state: map_words(pins, maps::POD_STATE, abi::PODS_MAX as usize * STATE_WORDS)?,
                counters: map_words(pins, maps::COUNTERS, rows * COUNTER_WORDS)?,
                responses: map_words(pins, maps::RESPONSES, rows * RESPONSE_WORDS)?,
                rows_per_pod: rows / abi::PODS_MAX as usize,
            },
            control: map_words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?,
            connections: ConnectionStorage::open([pins])?,
            pins: pins.to_owned(),
            sizes,
            previous: None,
        })
    }

    /// Adds the counters of another version's programs, pinned in `pins`, until their connections have closed.
    #[must_use]
    pub fn with_previous(self, pins: Option<&Path>) -> Self {
        let both = pins.and_then(|old| ConnectionStorage::open([&self.pins, old]).ok());
        Self {
            previous: pins.and_then(previous_version::PreviousCounters::open),
            connections: both.unwrap_or(self.connections),
            ..self
        }
    }

    /// Returns the kernel's storage of the pods' connections.
    pub fn conns(&self) -> ConnectionStorage {
        self.connections.clone()
    }

    /// Opens the maps that keep the totals of Revisions while no agent runs.
    pub(crate) fn stored_totals(&self) -> Result<stored_totals::StoredTotals, KernelMapError> {
        stored_totals::StoredTotals::open(&self.pins)
    }

    /// Opens the records of client sockets, for another task.
    pub(crate) fn client_sockets(
        &self,
    ) -> Result<client_sockets::ClientSocketRecords, KernelMapError> {
        client_sockets::ClientSocketRecords::open(&self.pins)
    }

    /// Opens the entries of meshed namespaces, for another task.
    pub fn meshed_namespaces(
        &self,
    ) -> Result<meshed_namespaces::MeshedNamespaceEntries, KernelMapError> {
        meshed_namespaces::MeshedNamespaceEntries::open(&self.pins)
    }

    /// Opens the promise to thaw frozen pods, for another task.
    pub fn thaw_promise(&self) -> Result<thaw_promise::ThawPromise, KernelMapError> {
        thaw_promise::ThawPromise::open(&self.pins)
    }

    /// Leaves connects and datagrams of kernel threads unchanged, as for mounts, or redirects them.
    pub fn leave_kernel_threads(&self, are_left: bool) {
        let word = &self.control.words()[abi::CONTROL_KERNEL_THREADS_LEFT as usize];
        word.store(are_left.into(), Release);
    }

    /// Writes if each connection from the kubelet's cgroup is marked as a probe. Otherwise a client of the node that
    /// sends nothing to an opaque port is not counted.
    pub fn set_kubelet_marked(&self, is_marked: bool) {
        let word = &self.control.words()[abi::CONTROL_KUBELET_MARKED as usize];
        word.store(is_marked.into(), Release);
    }

    /// Opens the gauges of pods, for another task.
    pub fn gauges(&self) -> Result<PodGauges, KernelMapError> {
        PodGauges::open(&self.pins)
    }

    /// Opens the flags of events of idle connections, for another task. None is set then.
    pub fn idle_event_flags(&self) -> Result<IdleEventFlags, KernelMapError> {
        IdleEventFlags::open(&self.pins)
    }

    /// Adds the final counts of the previous version's idle rows to this version's. Returns true if none of those rows
    /// is left. With `drop_unregistered`, pods that only the previous version knows are forgotten.
    pub fn fold_previous(&mut self, drop_unregistered: bool) -> bool {
        let is_folded = self
            .previous
            .as_mut()
            .is_none_or(|old| old.fold_idle(&self.counter_rows, drop_unregistered));
        if is_folded {
            self.previous = None;
        }
        is_folded
    }

    /// Applies map operations one after the other. After an error, call [`read_routes`](Self::read_routes) and plan
    /// again.
    pub fn apply(&mut self, ops: &[MapOp]) -> Result<(), KernelMapError> {
        let is_frontend = |op: &MapOp| matches!(op, MapOp::Frontend { .. });
        for run in ops.chunk_by(|one, next| is_frontend(one) && is_frontend(next)) {
            match run {
                [op] => self.write_op(op)?,
                frontends => self.write_frontends(frontends)?,
            }
        }
        Ok(())
    }

    /// Writes many frontends in few system calls: after a start there are thousands.
    fn write_frontends(&self, ops: &[MapOp]) -> Result<(), KernelMapError> {
        for ops in ops.chunks(FRONTENDS_PER_CALL) {
            let entry = |op: &MapOp| match op {
                MapOp::Frontend { key, service_id } => Some((*key, *service_id)),
                _ => None,
            };
            let entries: Vec<_> = ops.iter().filter_map(entry).collect();
            sys::update_batch(self.frontends_fd.as_fd(), &entries).map_err(|source| {
                let (name, count) = (maps::FRONTENDS, entries.len());
                KernelMapError::WriteMany { name, count, source }
            })?;
        }
        Ok(())
    }

    /// Writes one step of a plan. The order of the steps is that of the plan.
    fn write_op(&mut self, op: &MapOp) -> Result<(), KernelMapError> {
        match op {
            MapOp::Backend { id, backend } => self.write_backend(*id, backend),
            MapOp::ListEntries { offset, backends } => {
                let entries = &self.list_entries.words()[*offset as usize..][..backends.len()];
                // Release: a connect may read an entry of a list in force at once, and must see the backend behind it.
                for (entry, &backend) in entries.iter().zip(backends) {
                    entry.store(backend.into(), Release);
                }
            }
            MapOp::Info { service_id, info } => {
                self.svc_info.words()[*service_id as usize].store(info.pack(), Release);
            }
            MapOp::State { service_id, state } => {
                // Release: a connect that reads this word sees the list and the backends behind it.
                self.svc_state.words()[*service_id as usize].store(state.pack(), Release);
            }
            MapOp::Frontend { key, service_id } => {
                let done = self.frontends.insert(key, service_id, 0);
                return done.map_err(|source| write_error(maps::FRONTENDS, key, source));
            }
            MapOp::RemoveFrontend { key } => {
                let done = ignore_missing(self.frontends.remove(key));
                return done.map_err(|source| write_error(maps::FRONTENDS, key, source));
            }
        }
        Ok(())
    }

    /// Writes a backend that no list names yet. Its gauge starts at 0 in a new generation.
    fn write_backend(&self, id: u32, backend: &BackendTarget) {
        let row = row(&self.backends, id as usize, BACKEND_WORDS);
        let (low, high) = backend.address.split_at(8);
        let tail = u64::from(backend.slot) | u64::from(backend.port_be) << 32;
        row[0].store(word(low), Relaxed);
        row[1].store(word(high), Relaxed);
        row[offset_of!(abi::BackendValue, netns_cookie) / 8].store(backend.cookie, Relaxed);
        row[offset_of!(abi::BackendValue, pod_slot) / 8].store(tail, Relaxed);
        // Before the gauge: a close that belongs to the old generation then leaves the gauge alone.
        row[offset_of!(abi::BackendValue, generation) / 8].fetch_add(1, Relaxed);
        row[offset_of!(abi::BackendValue, open_connections) / 8].store(0, Relaxed);
        row[offset_of!(abi::BackendValue, unanswered_ns) / 8].store(0, Relaxed);
        row[offset_of!(abi::BackendValue, connect_event) / 8].store(0, Relaxed);
    }

    /// Reads the routing state of the maps, for the plan after a restart or a failed write.
    pub fn read_routes(&self) -> Result<KernelRoutes, KernelMapError> {
        let mut table = KernelRoutes { sizes: self.sizes, ..KernelRoutes::default() };
        for entry in self.frontends.iter() {
            let (key, service_id) = entry.map_err(|e| read_error(maps::FRONTENDS, e))?;
            // The self-test's frontends belong to no service, and no plan may remove them.
            if service_id < abi::FIRST_SERVICE {
                continue;
            }
            table.frontends.insert(key, service_id);
            self.read_service(service_id, &mut table);
        }
        self.read_service(abi::ACTIVATORS_V4, &mut table);
        self.read_service(abi::ACTIVATORS_V6, &mut table);
        table.written = WrittenBounds {
            backends: written_end(self.backends.words()).div_ceil(BACKEND_WORDS as u32),
            list_entries: written_end(self.list_entries.words()),
            services: written_end(self.svc_state.words()),
        };
        Ok(table)
    }

    fn read_service(&self, service_id: u32, table: &mut KernelRoutes) {
        let Some(word) = self.svc_state.words().get(service_id as usize) else { return };
        let state = SvcState::unpack(word.load(Acquire));
        let info = SvcInfo::unpack(self.svc_info.words()[service_id as usize].load(Acquire));
        let extent =
            self.list_entries.words().iter().skip(state.offset as usize).take(state.count as usize);
        let list: Vec<u32> = extent.map(|entry| entry.load(Relaxed) as u32).collect();
        for &id in &list {
            table.backends.entry(id).or_insert_with(|| self.read_backend(id));
        }
        table.services.insert(service_id, (state, info, list));
    }

    fn read_backend(&self, id: u32) -> BackendTarget {
        // Bounded: a number read from the map may be any, and must not index beyond the array.
        let row = row(&self.backends, (id % self.sizes.backends) as usize, BACKEND_WORDS);
        let mut address = [0; 16];
        address[..8].copy_from_slice(&row[0].load(Relaxed).to_ne_bytes());
        address[8..].copy_from_slice(&row[1].load(Relaxed).to_ne_bytes());
        let tail = row[offset_of!(abi::BackendValue, pod_slot) / 8].load(Relaxed);
        BackendTarget {
            address,
            cookie: row[offset_of!(abi::BackendValue, netns_cookie) / 8].load(Relaxed),
            slot: tail as u32,
            port_be: (tail >> 32) as u16,
        }
    }

    /// Returns this node's open connections to a backend, as `connect` sees them.
    pub fn open_connections(&self, backend: u32) -> u64 {
        let row = row(&self.backends, backend as usize, BACKEND_WORDS);
        datapath::load_balancing::clamp_gauge(
            row[offset_of!(abi::BackendValue, open_connections) / 8].load(Relaxed),
        )
    }

    /// Returns true if a connect to a backend was left unanswered a short time ago, so that connects avoid it now.
    /// `now_ns` is CLOCK_MONOTONIC.
    pub fn is_unanswered(&self, backend: u32, now_ns: u64) -> bool {
        let row = row(&self.backends, backend as usize, BACKEND_WORDS);
        let at_ns = row[offset_of!(abi::BackendValue, unanswered_ns) / 8].load(Relaxed);
        let elapsed_ns = datapath::load_balancing::elapsed_ns(now_ns, at_ns);
        at_ns != 0 && elapsed_ns < abi::AVOID_UNANSWERED_NS
    }

    /// Arms one event for the next connect that is led to a backend.
    pub fn arm_connect_event(&self, backend: u32) {
        let row = row(&self.backends, backend as usize, BACKEND_WORDS);
        row[offset_of!(abi::BackendValue, connect_event) / 8].store(1, Release);
    }

    /// Returns true while no connect was led to a backend since its event was armed.
    pub fn is_connect_event_armed(&self, backend: u32) -> bool {
        let row = row(&self.backends, backend as usize, BACKEND_WORDS);
        row[offset_of!(abi::BackendValue, connect_event) / 8].load(Acquire) != 0
    }

    /// Returns the registered pods by netns cookie.
    pub fn pods(&self) -> Result<BTreeMap<u64, abi::PodValue>, KernelMapError> {
        self.pods.iter().map(|entry| entry.map_err(|e| read_error(maps::PODS, e))).collect()
    }

    /// Registers a pod's namespace, or changes its entries. From now on its ports are counted, and its loopback bind is
    /// widened unless it keeps its binds. Clear the row of an earlier pod first. After an error call it again, or
    /// [`unregister`](Self::unregister).
    ///
    /// A connection counts as its port did when it was established, also if the port is removed later.
    pub fn register_pod(
        &mut self,
        cookie: u64,
        pod: &PodRegistration,
    ) -> Result<(), KernelMapError> {
        let (entry, ports) = (pod.entry(), pod.port_entries());
        // Before the pod's entry, whose flag lets the programs look for these.
        self.pod_ports.write(cookie, &ports)?;
        let done = self.pods.insert(cookie, entry, 0);
        done.map_err(|source| write_error(maps::PODS, (cookie, entry.slot), source))?;
        self.pod_ports.remove_others(cookie, &ports)?;
        // After the insertion, so that no connection is missed: in between, the new programs ignore connections that an
        // old one counts.
        self.previous.as_mut().map_or(Ok(()), |old| old.hand_over(cookie, entry.slot))
    }

    /// Lets each connection that a registered pod accepts send an event, or ends that. `entry` is the pod's entry in the
    /// map. Connections that were accepted just before may have sent none: read the pod's usage afterwards.
    pub fn set_connection_events(
        &mut self,
        cookie: u64,
        entry: abi::PodValue,
        are_sent: bool,
    ) -> Result<(), KernelMapError> {
        let others = entry.flags & !abi::POD_STANDBY;
        let flags = if are_sent { others | abi::POD_STANDBY } else { others };
        let done = self.pods.insert(cookie, abi::PodValue { flags, ..entry }, 0);
        done.map_err(|source| write_error(maps::PODS, (cookie, entry.slot), source))
    }

    /// Forgets a pod and every listener of its namespace. Its row should stay unused as long as possible; it keeps the
    /// totals of both versions, to be read once more.
    pub fn unregister(&mut self, cookie: u64) -> Result<(), KernelMapError> {
        if let Some(old) = &mut self.previous {
            old.forget(cookie, &self.counter_rows);
        }
        // Before the pod's entry, by which the next agent finds what this one leaves behind.
        self.pod_ports.remove_others(cookie, &BTreeMap::new())?;
        let done = ignore_missing(self.pods.remove(&cookie));
        done.map_err(|source| write_error(maps::PODS, cookie, source))?;
        // Collected first: removing keys while iterating over a hash map can restart the iteration.
        let keys: Vec<_> = self.listen.keys().filter_map(Result::ok).collect();
        for key in keys.iter().filter(|key| key.netns_cookie == cookie) {
            let done = ignore_missing(self.listen.remove(key));
            done.map_err(|source| write_error(maps::LISTEN, key, source))?;
        }
        self.set_listener_count(cookie, None)
    }

    /// Writes the number of entries that each namespace has in `LISTEN`, which is bounded. A listener that opens
    /// meanwhile may be missed until the next count.
    pub fn write_listener_counts(&mut self) -> Result<(), KernelMapError> {
        let mut counts = BTreeMap::<u64, u32>::new();
        for key in self.listen.keys() {
            *counts
                .entry(key.map_err(|e| read_error(maps::LISTEN, e))?.netns_cookie)
                .or_default() += 1;
        }
        // Collected first: the kernel begins a walk again whose current key has been deleted.
        let keys: Vec<_> = self.listeners.iter().filter_map(Result::ok).collect();
        for (cookie, _) in keys.iter().filter(|(cookie, _)| !counts.contains_key(cookie)) {
            self.set_listener_count(*cookie, None)?;
        }
        counts
            .into_iter()
            .try_for_each(|(cookie, count)| self.set_listener_count(cookie, Some(count)))
    }

    fn set_listener_count(
        &mut self,
        cookie: u64,
        count: Option<u32>,
    ) -> Result<(), KernelMapError> {
        let done = match count {
            Some(count) => self.listeners.insert(cookie, count, 0),
            None => ignore_missing(self.listeners.remove(&cookie)),
        };
        done.map_err(|source| write_error(maps::LISTENERS, cookie, source))
    }

    /// Sets all counters of a row to zero, before the row is allocated to a new pod.
    pub fn clear_slot(&self, slot: u32) {
        let zero = |words: &[AtomicU64]| words.iter().for_each(|word| word.store(0, Relaxed));
        zero(row(&self.counter_rows.pod_state, slot as usize, STATE_WORDS));
        for cpu in 0..self.counter_rows.rows_per_pod {
            let index = cpu * abi::PODS_MAX as usize + slot as usize;
            zero(row(&self.counter_rows.counters, index, COUNTER_WORDS));
            zero(row(&self.counter_rows.responses, index, RESPONSE_WORDS));
        }
    }

    /// Returns the open listeners of a namespace and port that the eBPF programs saw open; all zero without any.
    pub fn listener(&self, cookie: u64, port: u16) -> Result<abi::ListenValue, KernelMapError> {
        match self
            .listen
            .get(&abi::ListenKey { netns_cookie: cookie, port: port.into(), reserved: 0 }, 0)
        {
            Ok(value) => Ok(value),
            Err(MapError::KeyNotFound) => Ok(abi::ListenValue::default()),
            Err(source) => Err(read_error(maps::LISTEN, source)),
        }
    }

    /// Writes the frontends of the self-test, whose connects and datagrams the programs count and refuse.
    pub fn write_self_test_frontends(&mut self) -> Result<(), KernelMapError> {
        let service_id = abi::SELF_TEST_SERVICE;
        let state = SvcState { offset: 0, count: 0, generation: 0, mode: RoutingMode::SelfTest };
        // The state before the frontends: a connect must never find an address without a state.
        self.write_op(&MapOp::State { service_id, state })?;
        let keys: [_; abi::SELF_TEST_FRONTENDS as usize] =
            [abi::SELF_TEST_FRONTEND, abi::SELF_TEST_DATAGRAM_FRONTEND];
        keys.into_iter().try_for_each(|key| self.write_op(&MapOp::Frontend { key, service_id }))
    }

    /// Removes the entry of a port whose listeners are known to be closed.
    pub fn delete_listener(&mut self, cookie: u64, port: u16) -> Result<(), KernelMapError> {
        let key = abi::ListenKey { netns_cookie: cookie, port: port.into(), reserved: 0 };
        let done = ignore_missing(self.listen.remove(&key));
        done.map_err(|source| write_error(maps::LISTEN, key, source))
    }

    /// Sets the node's own addresses: connections from them may be the kubelet's.
    pub fn set_node_addresses(
        &mut self,
        addresses: &BTreeSet<[u8; 16]>,
    ) -> Result<(), KernelMapError> {
        let known: Vec<[u8; 16]> = self.node_addresses.keys().filter_map(Result::ok).collect();
        // Only the difference is written, so that an address that stays is never missing.
        for stale in known.iter().filter(|address| !addresses.contains(*address)) {
            let done = ignore_missing(self.node_addresses.remove(stale));
            done.map_err(|source| write_error(maps::NODE, stale, source))?;
        }
        for added in addresses.iter().filter(|address| !known.contains(address)) {
            let done = self.node_addresses.insert(added, 1, 0);
            done.map_err(|source| write_error(maps::NODE, added, source))?;
        }
        Ok(())
    }

    /// Returns every entry of `LISTEN`: each namespace and port that has or had a listener.
    pub fn listen_entries(
        &self,
    ) -> Result<BTreeMap<abi::ListenKey, abi::ListenValue>, KernelMapError> {
        self.listen.iter().map(|entry| entry.map_err(|e| read_error(maps::LISTEN, e))).collect()
    }

    /// Returns one pod's running totals over all CPUs.
    pub fn totals(&self, slot: u32) -> RequestTotals {
        let (new, old) =
            (self.counter_rows.totals(slot), self.previous.as_ref().map(|old| old.totals(slot)));
        let old = old.unwrap_or_default();
        RequestTotals {
            started: new.started.wrapping_add(old.started),
            finished: new.finished.wrapping_add(old.finished),
            started_sum_ns: new.started_sum_ns.wrapping_add(old.started_sum_ns),
            finished_sum_ns: new.finished_sum_ns.wrapping_add(old.finished_sum_ns),
            abandoned: 0,
        }
    }

    /// Returns one pod's responses over all CPUs.
    pub fn responses(&self, slot: u32) -> abi::ResponseCounters {
        let mut sum = self.counter_rows.responses(slot).words();
        if let Some(old) = self.previous.as_ref().map(|old| old.responses(slot).words()) {
            sum.iter_mut().zip(old).for_each(|(total, old)| *total = total.wrapping_add(old));
        }
        abi::ResponseCounters::from_words(sum)
    }

    /// Returns one pod's state, with gauges clamped at 0.
    pub fn pod_state(&self, slot: u32) -> abi::PodState {
        let new = self.counter_rows.pod_state(slot);
        let Some(old) = self.previous.as_ref().map(|old| old.state(slot)) else { return new };
        abi::PodState {
            in_flight: new.in_flight + old.in_flight,
            event_threshold: new.event_threshold,
            connections: new.connections + old.connections,
            awaiting_first_request: new.awaiting_first_request + old.awaiting_first_request,
            last_activity_ns: new.last_activity_ns.max(old.last_activity_ns),
            desynced_connections: new.desynced_connections + old.desynced_connections,
            opaque_connections: new.opaque_connections + old.opaque_connections,
            stray_responses: new.stray_responses + old.stray_responses,
        }
    }

    /// Arms one event for when more than `level` requests are in flight in the pod; with `level` 0, for the next
    /// request. Read [`pod_state`](Self::pod_state) afterwards: more may be in flight already.
    pub fn arm_growth_event(&self, slot: u32, level: u64) {
        // Requests that the previous version's programs count are in none of this version's gauges.
        let counted_by_previous = self.previous.as_ref().map_or(0, |old| old.state(slot).in_flight);
        let row = row(&self.counter_rows.pod_state, slot as usize, STATE_WORDS);
        let armed = level.saturating_sub(counted_by_previous) + 1;
        row[offset_of!(abi::PodState, event_threshold) / 8].store(armed, Release);
    }

    /// Returns true if a client may wait for a pod without a row of `CLIENTS`, which would name its frontend.
    /// `activators` are the numbers of the backends that are activators.
    pub fn may_have_unlisted_clients(&self, activators: impl IntoIterator<Item = u32>) -> bool {
        // Such sockets have no record, and no gauge counts them. How many of them are open is not known.
        if self.control_word(abi::CONTROL_UNTRACKED) != 0 {
            return true;
        }
        // Their records are in socket storage. One that waits for a pod has a connection to an activator.
        let has_overflow = self.control_word(abi::CONTROL_OVERFLOW) != 0;
        has_overflow && activators.into_iter().any(|backend| self.open_connections(backend) > 0)
    }

    /// Returns a word of `CONTROL`, by its `abi::CONTROL_*` number.
    pub fn control_word(&self, word: u32) -> u64 {
        self.control.words()[word as usize].load(Acquire)
    }
}

/// Returns one more than the index of the last word that is not 0.
fn written_end(words: &[AtomicU64]) -> u32 {
    let last = words.iter().rposition(|word| word.load(Relaxed) != 0);
    last.map_or(0, |last| last as u32 + 1)
}

fn row(words: &SharedWords, index: usize, width: usize) -> &[AtomicU64] {
    &words.words()[index * width..][..width]
}

/// Returns eight bytes as the word that they are in memory.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

/// Returns true if client sockets are open whose connects or datagrams the programs with these pins redirected. Such a
/// socket has a claimed row, storage of its own, or an entry of UDP sockets. If that cannot be read, there may be some.
pub(crate) fn has_client_sockets(pins: &Path) -> Result<bool, KernelMapError> {
    let control = map_words(pins, maps::CONTROL, abi::CONTROL_WORDS as usize)?;
    // Counts of sockets that found their row claimed and have storage instead, and of UDP sockets. Versions before 6
    // have no word for UDP; it reads as 0, as the rest of the page.
    let counts = [abi::CONTROL_OVERFLOW, abi::CONTROL_UDP_SOCKETS];
    if counts.iter().any(|&word| control.words()[word as usize].load(Relaxed) != 0) {
        return Ok(true);
    }
    let claims: Array<MapData, u64> = Array::try_from(Map::Array(open_map(pins, maps::CLAIMS)?))
        .map_err(|source| open_error(pins, maps::CLAIMS, source))?;
    for claim in claims.iter() {
        if claim.map_err(|source| read_error(maps::CLAIMS, source))? != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn open_hash_map<K: aya::Pod, V: aya::Pod>(
    pins: &Path,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, KernelMapError> {
    let map = Map::HashMap(open_map(pins, name)?);
    HashMap::try_from(map).map_err(|source| open_error(pins, name, source))
}

/// Opens the map of marks of probes under way.
pub(crate) fn open_probe_marks(
    pins: &Path,
) -> Result<HashMap<MapData, abi::ProbeKey, u64>, KernelMapError> {
    let map = Map::LruHashMap(open_map(pins, maps::PROBES)?);
    HashMap::try_from(map).map_err(|source| open_error(pins, maps::PROBES, source))
}

fn open_map(pins: &Path, name: &'static str) -> Result<MapData, KernelMapError> {
    MapData::from_pin(pins.join(name)).map_err(|source| open_error(pins, name, source))
}

fn open_pinned(pins: &Path, name: &'static str) -> Result<OwnedFd, KernelMapError> {
    let path = pins.join(name);
    sys::open_pin(&path).map_err(|source| pin_error("open", &path, source))
}

fn capacity(pins: &Path, name: &'static str) -> Result<usize, KernelMapError> {
    let map = open_pinned(pins, name)?;
    let shape = sys::map_shape(map.as_fd())
        .map_err(|source| pin_error("read the shape of", &pins.join(name), source))?;
    Ok(shape[3] as usize)
}

/// Returns the sizes of the maps that are pinned there.
fn read_sizes(pins: &Path) -> Result<MapSizes, KernelMapError> {
    // The kernel stores a map's size as a `u32`.
    let size = |name| capacity(pins, name).map(|size| size as u32);
    Ok(MapSizes {
        frontends: size(maps::FRONTENDS)?,
        backends: size(maps::BACKENDS)?,
        list_entries: size(maps::SLOTS)?,
        connect_records: size(maps::CLIENTS)?,
        affinity_clients: size(maps::AFFINITY)?,
    })
}

fn map_words(pins: &Path, name: &'static str, count: usize) -> Result<SharedWords, KernelMapError> {
    let map = open_pinned(pins, name)?;
    SharedWords::map(map.as_fd(), count).map_err(|source| KernelMapError::Mmap { name, source })
}

fn pin_error(attempt: &'static str, path: &Path, source: io::Error) -> KernelMapError {
    KernelMapError::Pin { attempt, path: path.to_owned(), source }
}

fn open_error(pins: &Path, name: &'static str, source: MapError) -> KernelMapError {
    KernelMapError::Open { name, pins: pins.to_owned(), source: Box::new(source) }
}

/// Treats the removal of a missing key as success. aya passes the kernel's ENOENT on, and keeps `KeyNotFound` for
/// lookups.
fn ignore_missing(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::SyscallError(it)) if it.io_error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn write_error(
    name: &'static str,
    subject: impl std::fmt::Debug,
    source: MapError,
) -> KernelMapError {
    KernelMapError::Write { name, subject: format!("{subject:?}"), source: Box::new(source) }
}

fn read_error(name: &'static str, source: MapError) -> KernelMapError {
    KernelMapError::Read { name, source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_missing_pin_names_its_path() {
        let error = KernelMaps::open(Path::new("/no/such/folder")).unwrap_err();
        assert_eq!(error.to_string(), "cannot open pinned map /no/such/folder/COUNTERS");
    }
}
