//! Shell: opens an object with its maps, and loads its programs into the kernel.

use std::{
    collections::HashMap,
    os::fd::AsFd as _,
    panic::resume_unwind,
    path::{Path, PathBuf},
    thread::{self, ScopedJoinHandle},
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::ProgramArray,
    programs::{Program, ProgramError},
};
use datapath::abi::{self, SockFieldOffsets, maps};
use nix::{
    mount::MsFlags,
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use tracing::info;

use super::{
    CGROUP_PROGRAMS, EbpfProgramsError, KUBELET_PROGRAM, PORTS_PROGRAM, TAIL_CALLS, make_folder,
    path_error,
    storage_flags::clear_clone_flag,
    versions::{set_aside_outlived, version_in_force},
};
use crate::kernel::{
    features::VerifierFeatures,
    locked_close::{self, AlignedObject, LockedCloseSupport, LockedCloser},
    sys,
};
use crate::{map_sizes::MapSizes, paths::AgentPaths};

/// An object whose maps were created, or found where they are pinned.
pub(super) struct OpenedObject {
    pub(super) ebpf: Ebpf,
    /// Pins of the previous version, if it is in force.
    pub(super) previous_pins: Option<PathBuf>,
    /// Error if the kernel cannot load the program that closes connections under their locks.
    pub(super) locked_close: Result<(), locked_close::LockedCloseError>,
}

/// Loads the programs and their maps for the pins in force. Nothing is attached yet.
pub(super) fn open_object(
    object: &[u8],
    paths: &AgentPaths,
    features: VerifierFeatures,
    log: VerifierLogLevel,
) -> Result<OpenedObject, EbpfProgramsError> {
    check_object(object)?;
    mount_bpffs(&paths.bpffs)?;
    let pins = paths.pins();
    set_aside_outlived(&pins)?;
    make_folder(&pins.join("links"))?;
    // Before the load: the loader reuses pinned maps without comparing their shape.
    check_pins(&pins, paths.map_sizes)?;
    let previous_pins = version_in_force(paths);
    let mut object = AlignedObject::copy(object);
    // Where a connection shows its namespace itself, it needs nothing of its listener. The programs accept both.
    if features.sock_ops_netns_cookie && !clear_clone_flag(object.bytes_mut()) {
        info!("each accepted connection of a pod begins with a copy of its listener's storage");
    }
    // Decided before the load: the call is patched into the object itself.
    let patched = LockedCloseSupport::detect()
        .and_then(|support| Ok((support.patch_object(object.bytes())?, support.fields)));
    let (object, fields) = match &patched {
        Ok((patched, fields)) => (patched.bytes(), *fields),
        Err(_) => (object.bytes(), SockFieldOffsets::default()),
    };
    let ebpf = load_object(object, paths, previous_pins.as_deref(), (&fields, features), log)?;
    Ok(OpenedObject { ebpf, previous_pins, locked_close: patched.map(drop) })
}

fn check_object(object: &[u8]) -> Result<(), EbpfProgramsError> {
    if object.is_empty() {
        return Err(EbpfProgramsError::Stub);
    }
    let marked = object.windows(abi::ABI_MARK.len()).any(|bytes| bytes == abi::ABI_MARK);
    if marked { Ok(()) } else { Err(EbpfProgramsError::AbiMismatch) }
}

fn mount_bpffs(folder: &Path) -> Result<(), EbpfProgramsError> {
    make_folder(folder)?;
    let filesystem = statfs(folder).map_err(|e| path_error("look at", folder, e.into()))?;
    if filesystem.filesystem_type() == BPF_FS_MAGIC {
        return Ok(());
    }
    let none: Option<&str> = None;
    nix::mount::mount(Some("bpf"), folder, Some("bpf"), MsFlags::empty(), none)
        .map_err(|e| path_error("mount a bpf filesystem on", folder, e.into()))
}

/// Returns the rows of counters: for each pod one for each possible CPU, and one that only user space writes.
fn counter_row_count() -> Result<u32, EbpfProgramsError> {
    Ok(abi::PODS_MAX * (possible_cpus()? + 1))
}

/// Returns the number of possible CPUs.
fn possible_cpus() -> Result<u32, EbpfProgramsError> {
    let cpus = aya::util::nr_cpus();
    let cpus = cpus.map_err(|(path, source)| path_error("read", Path::new(path), source))?;
    Ok(u32::try_from(cpus).unwrap_or(u32::MAX / abi::PODS_MAX))
}

/// Free entries of an LRU map that a CPU takes at once and keeps for itself, before 6.16.
const LRU_FREE_PER_CPU: u32 = 128;

/// Returns the size of an LRU map that is to remember at least `minimum` entries.
///
/// A CPU that finds no free entry left uses one entry again and again, so that it forgets each entry with the next one.
const fn lru_size(minimum: u32, cpus: u32) -> u32 {
    let for_cpus = 2 * LRU_FREE_PER_CPU * cpus;
    if for_cpus > minimum { for_cpus } else { minimum }
}

/// Returns the size of the LRU map of buffered segments. Its entries are large, so the CPUs get no more than they keep.
const fn buffered_segments(cpus: u32) -> u32 {
    abi::KEPT_MAX + LRU_FREE_PER_CPU * cpus
}

/// The kernel's type of hash maps.
const HASH: u32 = 1;
/// The kernel's type of arrays.
const ARRAY: u32 = 2;
/// The kernel's type of hash maps that evict the entries that were used longest ago.
const LRU_HASH: u32 = 9;

/// Shape of a map: type, size of a key and of a value in bytes, entries.
type MapShape = [u32; 4];

/// Returns the size of a type in bytes, as the kernel has it.
const fn bytes_of<T>() -> u32 {
    size_of::<T>() as u32
}

/// Returns the shapes of the maps about client sockets.
fn client_socket_shapes(sizes: MapSizes, cpus: u32) -> [(&'static str, MapShape); 9] {
    let udp_flows = lru_size(abi::UDP_FLOWS_MAX, cpus);
    let bound_connects = lru_size(abi::BOUND_CONNECTS_MAX, cpus);
    let (record, udp_flow_key) = (bytes_of::<abi::ConnectRecord>(), bytes_of::<abi::UdpFlowKey>());
    let bound_key = bytes_of::<abi::BoundConnectKey>();
    let bound_connect = bytes_of::<abi::BoundConnect>();
    [
        (maps::CLAIMS, [ARRAY, 4, 8, sizes.connect_records]),
        (maps::CLIENTS, [ARRAY, 4, record, sizes.connect_records]),
        (maps::OVERFLOW_COPIES, [HASH, 8, record, abi::OVERFLOW_COPIES_MAX]),
        (maps::BOUND_CONNECTS, [LRU_HASH, bound_key, bound_connect, bound_connects]),
        (maps::BOUND_SOCKETS, [LRU_HASH, 8, bound_key, bound_connects]),
        (maps::UDP_FLOWS, [LRU_HASH, udp_flow_key, 4, udp_flows]),
        (maps::UDP_REPLIES, [LRU_HASH, udp_flow_key, bytes_of::<abi::UdpReplySource>(), udp_flows]),
        (maps::UDP_SOCKETS, [HASH, 8, bytes_of::<abi::UdpSocket>(), abi::UDP_SOCKETS_MAX]),
        (maps::MESHED_NETNS, [HASH, 8, 4, abi::MESHED_NETNS_MAX]),
    ]
}

/// Refuses pinned maps of another shape, which the loader would reuse unchecked.
fn check_pins(pins: &Path, sizes: MapSizes) -> Result<(), EbpfProgramsError> {
    let rows = counter_row_count()?;
    let affinity = [
        LRU_HASH,
        bytes_of::<abi::AffinityKey>(),
        bytes_of::<abi::AffinityValue>(),
        sizes.affinity_clients,
    ];
    let wanted = [
        (maps::FRONTENDS, [HASH, bytes_of::<abi::FrontendKey>(), 4, sizes.frontends]),
        (maps::SVC_STATE, [ARRAY, 4, 8, sizes.service_ids()]),
        (maps::SVC_INFO, [ARRAY, 4, 8, sizes.service_ids()]),
        (maps::AFFINITY, affinity),
        (maps::SLOTS, [ARRAY, 4, 8, sizes.list_entries]),
        (maps::BACKENDS, [ARRAY, 4, bytes_of::<abi::BackendValue>(), sizes.backends]),
        (maps::LISTEN, [HASH, 16, bytes_of::<abi::ListenValue>(), abi::LISTEN_MAX]),
        (maps::LISTENERS, [HASH, 8, 4, abi::LISTENERS_MAX]),
        (maps::PODS, [HASH, 8, bytes_of::<abi::PodValue>(), abi::PODS_MAX]),
        (maps::POD_PORTS, [HASH, 16, bytes_of::<abi::PodPortValue>(), abi::POD_PORTS_MAX]),
        (maps::POD_STATE, [ARRAY, 4, bytes_of::<abi::PodState>(), abi::PODS_MAX]),
        (maps::COUNTERS, [ARRAY, 4, bytes_of::<abi::PodCounters>(), rows]),
        (maps::RESPONSES, [ARRAY, 4, bytes_of::<abi::ResponseCounters>(), rows]),
        (maps::CONTROL, [ARRAY, 4, 8, abi::CONTROL_WORDS]),
        (maps::NODE, [HASH, 16, 4, abi::NODE_MAX]),
    ];
    let wanted = wanted.into_iter().chain(client_socket_shapes(sizes, possible_cpus()?));
    for (name, wanted) in wanted {
        let path = pins.join(name);
        // The loader creates and pins a missing map.
        let Ok(map) = sys::open_pin(&path) else { continue };
        let found =
            sys::map_shape(map.as_fd()).map_err(|e| path_error("ask about map", &path, e))?;
        if found != wanted {
            return Err(EbpfProgramsError::MapShape { name, found, wanted, pins: pins.to_owned() });
        }
    }
    Ok(())
}

/// Logs the reason if connections are not closed under their locks. No error: they are closed in two steps instead.
pub(super) fn log_unsupported(
    locked_closer: Result<LockedCloser, locked_close::LockedCloseError>,
) -> Option<LockedCloser> {
    let without = |error| {
        let reason = common::link::error_chain(&error);
        info!(reason, "stale connections are not closed under their locks");
    };
    locked_closer.map_err(without).ok()
}

/// Loads a prepared object, with the sizes of its maps and the features of this kernel. `old` has the maps of the
/// version in force.
fn load_object(
    object: &[u8],
    paths: &AgentPaths,
    old: Option<&Path>,
    (fields, features): (&SockFieldOffsets, VerifierFeatures),
    log: VerifierLogLevel,
) -> Result<Ebpf, EbpfProgramsError> {
    let (pins, sizes) = (&paths.pins(), paths.map_sizes);
    let rows = counter_row_count()?;
    let record_mask = sizes.connect_records - 1;
    let cpus = possible_cpus()?;
    let (probes, udp_flows) = (lru_size(abi::PROBES_MAX, cpus), lru_size(abi::UDP_FLOWS_MAX, cpus));
    let bound_connects = lru_size(abi::BOUND_CONNECTS_MAX, cpus);
    let VerifierFeatures { v6_only, kernel_thread, .. } = features;
    let [retval, cookie, packet_cookie, mptcp] = [
        features.set_retval,
        features.sock_ops_netns_cookie,
        features.packet_netns_cookie,
        features.mptcp_sock,
    ]
    .map(u8::from);
    // Without another version, a map of its own that stays empty.
    let old_conns = old.map_or_else(|| pins.join(maps::OLD_CONNS), |old| old.join(maps::CONNS));
    let have_old = u8::from(old.is_some());
    let loaded = EbpfLoader::new()
        .verifier_log_level(log)
        .default_map_pin_directory(pins)
        .map_pin_path(maps::OVERFLOW, pins.join(maps::OVERFLOW))
        .map_pin_path(maps::CONNS, pins.join(maps::CONNS))
        .map_pin_path(maps::STREAMS, pins.join(maps::STREAMS))
        .map_pin_path(maps::OLD_CONNS, &old_conns)
        .map_max_entries(maps::FRONTENDS, sizes.frontends)
        .map_max_entries(maps::SVC_STATE, sizes.service_ids())
        .map_max_entries(maps::SVC_INFO, sizes.service_ids())
        .map_max_entries(maps::BACKENDS, sizes.backends)
        .map_max_entries(maps::SLOTS, sizes.list_entries)
        .map_max_entries(maps::CLAIMS, sizes.connect_records)
        .map_max_entries(maps::CLIENTS, sizes.connect_records)
        .map_max_entries(maps::AFFINITY, sizes.affinity_clients)
        .map_max_entries(maps::COUNTERS, rows)
        .map_max_entries(maps::RESPONSES, rows)
        .map_max_entries(maps::PROBES, probes)
        .map_max_entries(maps::KEPT, buffered_segments(cpus))
        .map_max_entries(maps::UDP_FLOWS, udp_flows)
        .map_max_entries(maps::UDP_REPLIES, udp_flows)
        .map_max_entries(maps::BOUND_CONNECTS, bound_connects)
        .map_max_entries(maps::BOUND_SOCKETS, bound_connects)
        .override_global("CONNECT_RECORD_MASK", &record_mask, true)
        .override_global("HAVE_SET_RETVAL", &retval, true)
        .override_global("SOCKET_FIELDS", fields, true)
        .override_global("HAVE_OLD", &have_old, true)
        .override_global("HAVE_SOCK_OPS_COOKIE", &cookie, true)
        .override_global("HAVE_SKB_COOKIE", &packet_cookie, true)
        .override_global("HAVE_MPTCP_SOCK", &mptcp, true)
        .override_global("V6_ONLY", &v6_only, true)
        .override_global("KERNEL_THREAD", &kernel_thread, true)
        .load(object);
    loaded.map_err(|e| EbpfProgramsError::Load(Box::new(e)))
}

/// Returns the names of all programs that every kernel must accept.
fn required_programs() -> impl Iterator<Item = &'static str> {
    let attached = CGROUP_PROGRAMS.iter().map(|(name, ..)| *name);
    let others = TAIL_CALLS
        .iter()
        .map(|(name, ..)| *name)
        .filter(|it| CGROUP_PROGRAMS.iter().all(|(name, ..)| name != it));
    attached.chain(others).chain([PORTS_PROGRAM, KUBELET_PROGRAM])
}

/// Loads all programs in parallel: the verifier takes 50 to 130 ms for each of seven.
pub(super) fn load_programs(ebpf: &mut Ebpf) -> Result<(), EbpfProgramsError> {
    let mut all: HashMap<String, &mut Program> =
        ebpf.programs_mut().map(|(name, program)| (name.to_owned(), program)).collect();
    thread::scope(|scope| {
        let mut loading = Vec::new();
        for name in required_programs() {
            let program = all.remove(name).ok_or(EbpfProgramsError::AbiMismatch)?;
            loading.push(scope.spawn(move || load_program(name, program)));
        }
        let mut loaded = loading.into_iter().map(ScopedJoinHandle::join);
        loaded.try_for_each(|it| it.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn load_program(name: &'static str, program: &mut Program) -> Result<(), EbpfProgramsError> {
    let loaded = match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        Program::SkLookup(program) => program.load(),
        _ => return Err(EbpfProgramsError::AbiMismatch),
    };
    loaded.map_err(|e| EbpfProgramsError::Program { name, source: Box::new(e) })
}

/// Puts a program into an array of tail calls, so that it continues with a packet that needs more than one run.
pub(super) fn set_tail_call(
    ebpf: &mut Ebpf,
    name: &'static str,
    array: &'static str,
    index: u32,
) -> Result<(), EbpfProgramsError> {
    let refused = |e: ProgramError| EbpfProgramsError::Program { name, source: Box::new(e) };
    let program = match ebpf.program(name) {
        Some(Program::CgroupSkb(program)) => program.fd().map_err(refused)?,
        Some(Program::SockOps(program)) => program.fd().map_err(refused)?,
        _ => return Err(EbpfProgramsError::AbiMismatch),
    };
    // Cloned, to end the borrow of `ebpf` that the program holds.
    let program = program.try_clone().map_err(|e| refused(e.into()))?;
    let array = ebpf.map_mut(array).ok_or(EbpfProgramsError::AbiMismatch)?;
    let mut array = ProgramArray::try_from(array).map_err(|e| refused(e.into()))?;
    array.set(index, &program, 0).map_err(|e| refused(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_is_refused_with_the_command_to_run() {
        let text = check_object(&[]).unwrap_err().to_string();
        assert!(text.contains("cargo xtask build-ebpf"), "{text}");
    }

    #[test]
    fn an_lru_map_has_entries_for_each_cpu() {
        assert_eq!(lru_size(abi::UDP_FLOWS_MAX, 64), abi::UDP_FLOWS_MAX);
        assert_eq!(lru_size(abi::UDP_FLOWS_MAX, 192), 49_152);
        assert_eq!(lru_size(abi::PROBES_MAX, 2), abi::PROBES_MAX);
        for cpus in [1, 8, 64, 1024] {
            let kept_free = cpus * LRU_FREE_PER_CPU;
            assert_eq!(buffered_segments(cpus) - kept_free, abi::KEPT_MAX, "{cpus} CPUs");
        }
    }

    #[test]
    fn an_object_of_another_version_is_refused() {
        assert!(matches!(
            check_object(b"....rouse-abi-999999...."),
            Err(EbpfProgramsError::AbiMismatch)
        ));
        let mut object = b"....".to_vec();
        object.extend(abi::ABI_MARK);
        assert!(check_object(&object).is_ok());
    }
}
