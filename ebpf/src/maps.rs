//! Maps of the eBPF programs. Names, keys, values and capacities are defined in `datapath/src/abi.rs`.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{
        BPF_F_CLONE, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_map_type,
    },
    helpers::generated::{bpf_ktime_get_ns, bpf_sk_storage_get},
    macros::{btf_map, map},
    maps::{Array, HashMap, LruHashMap, PerCpuArray, ProgramArray, RingBuf, SockHash},
};
use datapath::{abi, h1};

#[map]
pub static FRONTENDS: HashMap<abi::FrontendKey, u32> =
    HashMap::pinned(abi::FRONTENDS_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static SVC_STATE: Array<u64> = Array::pinned(abi::SERVICES_MAX, BPF_F_MMAPABLE);
#[map]
pub static SVC_INFO: Array<u64> = Array::pinned(abi::SERVICES_MAX, BPF_F_MMAPABLE);
#[map]
pub static AFFINITY: LruHashMap<abi::AffinityKey, abi::AffinityValue> =
    LruHashMap::pinned(abi::AFFINITY_MAX, 0);
#[map]
pub static SLOTS: Array<u64> = Array::pinned(abi::SLOTS_MAX, BPF_F_MMAPABLE);
#[map]
pub static BACKENDS: Array<abi::BackendValue> = Array::pinned(abi::BACKENDS_MAX, BPF_F_MMAPABLE);
#[map]
pub static LISTEN: HashMap<abi::ListenKey, abi::ListenValue> =
    HashMap::pinned(abi::LISTEN_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static LISTENERS: HashMap<u64, u32> = HashMap::pinned(abi::LISTENERS_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static PODS: HashMap<u64, abi::PodValue> = HashMap::pinned(abi::PODS_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static POD_PORTS: HashMap<abi::ListenKey, abi::PodPortValue> =
    HashMap::pinned(abi::POD_PORTS_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static POD_STATE: Array<abi::PodState> = Array::pinned(abi::PODS_MAX, BPF_F_MMAPABLE);
/// Totals of each pod; the agent sets the capacity to `PODS_MAX` rows for each possible CPU.
#[map]
pub static COUNTERS: Array<abi::PodCounters> = Array::pinned(abi::PODS_MAX, BPF_F_MMAPABLE);
/// Responses of each pod; the agent sets the capacity to `PODS_MAX` rows for each possible CPU.
#[map]
pub static RESPONSES: Array<abi::ResponseCounters> = Array::pinned(abi::PODS_MAX, BPF_F_MMAPABLE);
#[map]
pub static CONTROL: Array<u64> = Array::pinned(abi::CONTROL_WORDS, BPF_F_MMAPABLE);
#[map]
pub static EVENTS: RingBuf = RingBuf::pinned(abi::EVENTS_BYTES, 0);
#[map]
pub static KEPT: LruHashMap<abi::BufferedSegmentKey, abi::BufferedSegment> =
    LruHashMap::pinned(abi::KEPT_MAX, 0);
#[map]
pub static PROBES: LruHashMap<abi::ProbeKey, u64> = LruHashMap::pinned(abi::PROBES_MAX, 0);
/// An all-zero value, from which a new entry of `KEPT` is made: it is too large for the stack.
#[map]
pub static BLANK: Array<abi::BufferedSegment> = Array::with_max_entries(1, 0);
/// Space for the begin of a request's head, one per CPU: it is too large for the stack.
#[map]
pub static HEAD: PerCpuArray<[u64; h1::kubelet_probe::SEARCHED_BYTES as usize / 8 + 3]> =
    PerCpuArray::with_max_entries(1, 0);
/// Space for the unlocked read of requests, one per CPU.
#[map]
pub static DRAFT: PerCpuArray<h1::UnlockedRequestRead> = PerCpuArray::with_max_entries(1, 0);
/// Programs to which those at `ingress` jump. The agent fills it.
///
/// It is pinned, because the kernel empties a program array that no descriptor or pin in user space holds. There is one
/// array for each hook: since 6.18 an array accepts programs of one attach type only.
#[map]
pub static INGRESS: ProgramArray = ProgramArray::pinned(9, 0);
/// Programs to which those at `egress` jump; filled and pinned like `INGRESS`.
#[map]
pub static EGRESS: ProgramArray = ProgramArray::pinned(8, 0);
/// Programs to which those at sock_ops jump; filled and pinned like `INGRESS`.
#[map]
pub static SOCKETS: ProgramArray = ProgramArray::pinned(6, 0);
/// Listeners of activators by address; the activator fills it, and a socket that closes leaves it by itself.
#[map]
pub static PORTS: SockHash<[u32; 4]> = SockHash::pinned(abi::PORTS_MAX, 0);
/// Addresses of the node itself, written by the agent.
#[map]
pub static NODE: HashMap<[u32; 4], u32> = HashMap::pinned(abi::NODE_MAX, BPF_F_NO_PREALLOC);
/// Connections to be closed in one walk; the agent fills it before and empties it after.
#[map]
pub static ENDING: HashMap<u64, abi::CloseRequest> =
    HashMap::with_max_entries(abi::ENDING_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static CLAIMS: Array<u64> = Array::pinned(abi::CLIENTS_MAX, 0);
#[map]
pub static CLIENTS: Array<abi::ConnectRecord> = Array::pinned(abi::CLIENTS_MAX, BPF_F_MMAPABLE);
/// Storage of clients whose row is taken. Not cloned: what a client asked for concerns its own socket only.
#[btf_map]
pub static OVERFLOW: SocketStorage<abi::ConnectRecord, { BPF_F_NO_PREALLOC as usize }> =
    SocketStorage::new();
#[map]
pub static OVERFLOW_COPIES: HashMap<u64, abi::ConnectRecord> =
    HashMap::pinned(abi::OVERFLOW_COPIES_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static BOUND_CONNECTS: LruHashMap<abi::BoundConnectKey, abi::BoundConnect> =
    LruHashMap::pinned(abi::BOUND_CONNECTS_MAX, 0);
#[map]
pub static BOUND_SOCKETS: LruHashMap<u64, abi::BoundConnectKey> =
    LruHashMap::pinned(abi::BOUND_CONNECTS_MAX, 0);
#[map]
pub static UDP_FLOWS: LruHashMap<abi::UdpFlowKey, u32> = LruHashMap::pinned(abi::UDP_FLOWS_MAX, 0);
#[map]
pub static UDP_REPLIES: LruHashMap<abi::UdpFlowKey, abi::UdpReplySource> =
    LruHashMap::pinned(abi::UDP_FLOWS_MAX, 0);
#[map]
pub static UDP_SOCKETS: HashMap<u64, abi::UdpSocket> =
    HashMap::pinned(abi::UDP_SOCKETS_MAX, BPF_F_NO_PREALLOC);
#[map]
pub static MESHED_NETNS: HashMap<u64, u32> =
    HashMap::pinned(abi::MESHED_NETNS_MAX, BPF_F_NO_PREALLOC);
/// Storage of listeners and their connections.
///
/// Cloned on kernels without [`has_netns_cookie`], since only the listener's values tell the pod of an accepted socket
/// there. On others the agent clears `BPF_F_CLONE`: a clone costs each accepted connection of each pod 1 µs.
#[btf_map]
pub static CONNS: SocketStorage<abi::ServerSocket, { (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize }> =
    SocketStorage::new();

/// Storage of HTTP/2 connections. Not cloned: a listener has none.
#[btf_map]
pub static STREAMS: SocketStorage<datapath::h2::Http2Connection, { BPF_F_NO_PREALLOC as usize }> =
    SocketStorage::new();

/// `CONNS` of the previous ABI version; the agent binds it to that map.
#[btf_map]
pub static OLD_CONNS: SocketStorage<
    abi::ServerSocket,
    { (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize },
> = SocketStorage::new();

/// Flag: 1 if sock_ops programs may ask for a netns cookie (5.15). Set by the agent before loading.
///
/// Without it, only sockets that `bind` identified are known, and connections begin with their listener's storage.
#[unsafe(no_mangle)]
static HAVE_SOCK_OPS_COOKIE: u8 = 0;

/// Returns true if sock_ops programs may ask for a netns cookie. The verifier knows the answer, and drops branches.
#[inline(always)]
pub fn has_netns_cookie() -> bool {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    unsafe { ptr::read_volatile(&HAVE_SOCK_OPS_COOKIE) != 0 }
}

/// Socket storage (5.2; in connect and bind programs since 5.9).
///
/// The type of `aya-ebpf` lacks `BPF_F_CLONE`, and contexts other than `bpf_sock_addr`. The fields only put their types
/// into BTF, where the loader reads them.
#[repr(C)]
pub struct SocketStorage<T, const FLAGS: usize> {
    r#type: *const [i32; bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; FLAGS],
}

// SAFETY: the fields are never read; the kernel itself guards the map's content.
unsafe impl<T, const FLAGS: usize> Sync for SocketStorage<T, FLAGS> {}

impl<T, const FLAGS: usize> SocketStorage<T, FLAGS> {
    const fn new() -> Self {
        Self {
            r#type: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            max_entries: ptr::null(),
            map_flags: ptr::null(),
        }
    }

    /// Returns the storage of `socket`, if it has any. `socket` must come from the program's context.
    #[inline(always)]
    pub fn get(&self, socket: *mut c_void) -> Option<&'static mut T> {
        self.lookup(socket, 0)
    }

    /// Returns the storage of `socket`, all zero at first; `None` if the kernel has no memory for it.
    #[inline(always)]
    pub fn get_or_zero(&self, socket: *mut c_void) -> Option<&'static mut T> {
        self.lookup(socket, u64::from(BPF_SK_STORAGE_GET_F_CREATE))
    }

    /// Returns the storage of `socket` like [`get_or_zero`](Self::get_or_zero), while another CPU may create storage of
    /// the same socket. One of the two attempts then fails, and finds at its second call what the other one made.
    #[inline(always)]
    pub fn get_or_zero_shared(&self, socket: *mut c_void) -> Option<&'static mut T> {
        self.get_or_zero(socket).or_else(|| self.get_or_zero(socket))
    }

    /// Looks up the storage of a socket, with the helper's flags.
    #[inline(always)]
    fn lookup(&self, socket: *mut c_void, flags: u64) -> Option<&'static mut T> {
        if socket.is_null() {
            return None;
        }
        let map = ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the verifier accepts only a socket of the context here, and the returned value lives as long as the
        // program runs.
        unsafe { bpf_sk_storage_get(map, socket, ptr::null_mut(), flags).cast::<T>().as_mut() }
    }
}

/// Minus one, for [`atomic_add`], which wraps.
pub const MINUS_ONE: u64 = 1u64.wrapping_neg();

/// Adds to a shared word, wrapping: the only atomic operation of BPF before 5.12.
#[inline(always)]
pub fn atomic_add(word: *mut u64, by: u64) {
    // SAFETY: every caller passes a word of a map value, aligned and alive while the program runs.
    unsafe {
        core::intrinsics::atomic_xadd::<u64, u64, { core::intrinsics::AtomicOrdering::Relaxed }>(
            word, by,
        )
    };
}

/// Adds to a shared half word (`u32`), wrapping.
#[inline(always)]
pub fn atomic_add32(word: *mut u32, by: u32) {
    // SAFETY: every caller passes a half word of a map value, aligned and alive while the program runs.
    unsafe {
        core::intrinsics::atomic_xadd::<u32, u32, { core::intrinsics::AtomicOrdering::Relaxed }>(
            word, by,
        )
    };
}

/// Returns the flags of a pod's port, as an entry of `POD_PORTS` has them; `None` if the port does not count.
///
/// Most pods have one port only, and cost no look-up.
#[inline(always)]
pub fn pod_port_flags(pod: abi::PodValue, key: &abi::ListenKey) -> Option<u32> {
    if u32::from(pod.port) == key.port {
        return Some(if pod.flags & abi::POD_OPAQUE != 0 { abi::POD_PORT_OPAQUE } else { 0 });
    }
    if pod.flags & abi::POD_HAS_PORTS == 0 {
        return None;
    }
    // SAFETY: the field is read at once.
    unsafe { POD_PORTS.get(key) }.map(|port| port.flags)
}

/// Adds 1 to a word of `CONTROL`.
#[inline(always)]
pub fn increment_control(word: u32) {
    add_to_control(word, 1);
}

/// Adds a number to a word of `CONTROL`.
#[inline(always)]
pub fn add_to_control(word: u32, by: u64) {
    if let Some(word) = CONTROL.get_ptr_mut(word) {
        atomic_add(word, by);
    }
}

/// Returns the time of CLOCK_MONOTONIC, in ns.
#[inline(always)]
pub fn monotonic_ns() -> u64 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// Flag of `bpf_ringbuf_query` (5.8): number of bytes that the reader has not taken.
const UNREAD_BYTES: u64 = 0;

/// Sends an event of an idle connection, but never into the second half of the ring. Busy clients of a draining pod
/// must not push out events of listeners. The client's next pause sends another one.
#[inline(always)]
pub fn send_idle_event(event: &abi::IdleEvent) {
    if EVENTS.query(UNREAD_BYTES) < u64::from(abi::EVENTS_BYTES / 2) {
        let _the_next_pause_sends_another = EVENTS.output::<abi::IdleEvent>(event, 0);
    }
}

/// Sends an event. If the ring is full the event is lost and counted, and the agent reads the maps again.
#[inline(always)]
pub fn send_event(kind: u32, subject: u32, cookie: u64) {
    let event = abi::KernelEvent {
        kind,
        port_or_slot: subject,
        netns_cookie: cookie,
        at_ns: monotonic_ns(),
    };
    if EVENTS.output::<abi::KernelEvent>(&event, 0).is_err() {
        increment_control(abi::CONTROL_DROPPED);
    }
}
