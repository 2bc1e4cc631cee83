//! Chooses the backend for a connect or a datagram to a service.
//!
//! In doubt there is no choice: the call goes on unchanged.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    helpers::generated::{bpf_get_current_task, bpf_get_prandom_u32, bpf_probe_read_kernel},
    maps::Array,
};
use datapath::{
    abi::{self, AffinityKey, AffinityValue, BackendValue, FrontendKey, ListenKey, TaskFlag},
    load_balancing::{self, BackendLoad, RoutingMode, ServiceReading, SvcInfo, SvcState},
};

use crate::{
    maps::{
        AFFINITY, BACKENDS, CONTROL, FRONTENDS, LISTEN, MESHED_NETNS, POD_STATE, PODS, SLOTS,
        SVC_INFO, SVC_STATE, increment_control, monotonic_ns,
    },
    sock_addr::{BpfSockAddr, address_bytes},
};

/// Picks of two backends before the activator gets the connect.
const MAX_PICKS: u32 = 4;
/// Steps that find an entry in the longest list of a service, which has 20 bits for its length.
const MAX_SEARCH_STEPS: u32 = 20;
/// Flag of kernel threads. Set by the agent before loading; without it they are taken for other tasks.
#[unsafe(no_mangle)]
static KERNEL_THREAD: TaskFlag = TaskFlag { mask: 0, offset: 0, reserved: 0 };

/// Number that no backend has.
pub const NO_BACKEND: u32 = u32::MAX;

/// Reason that a connect or datagram is not rewritten.
pub enum NoRewriteReason {
    /// The address is no frontend, or there is doubt: the call goes on unchanged.
    Pass,
    /// The frontend's mode refuses calls.
    Refuse,
    /// The maps have changed since they were read.
    Changed,
}

/// Backend for a connect, as a copy. The backend's row may be another backend's once it has been out of all lists for
/// the quarantine.
///
/// It is not a pointer, because the verifier would follow the pointer through all code in between.
pub struct ChosenBackend {
    /// Number of the backend in `BACKENDS`.
    pub backend: u32,
    pub port_be: u16,
    pub generation: u64,
    pub address: [u32; 4],
    /// Cookie of the client's network namespace, if the backend is an endpoint of a Service of the cluster; else 0.
    pub netns_cookie: u64,
}

/// One backend picked from a list.
struct BackendPick {
    /// Number of the backend in `BACKENDS`.
    backend: u32,
    value: *const BackendValue,
}

/// Aligned to whole words of the stack, as the verifier requires for stores of whole words.
#[repr(align(8))]
pub struct StackAligned<T>(pub T);

/// Builds the frontend key of an address, port and protocol.
#[inline(always)]
pub fn frontend_key(address: [u32; 4], port_be: u16, protocol: u8) -> StackAligned<FrontendKey> {
    StackAligned(FrontendKey { address: address_bytes(address), port_be, protocol, reserved: 0 })
}

/// Evaluates an attempt of a choice up to three times, until the maps have not changed meanwhile.
///
/// A call may be preempted for longer than the quarantine of what was freed. Then a service id, its list and the
/// backends there may belong to another service. The attempts are written out: in a loop, the verifier would have to
/// prove what each iteration leaves to the next. It is a macro, because LLVM makes a function of an attempt that a
/// closure calls three times.
macro_rules! choose_unchanged {
    ($attempt:expr) => {{
        let first = $attempt;
        if !matches!(first, Err(NoRewriteReason::Changed)) {
            return first;
        }
        let second = $attempt;
        if !matches!(second, Err(NoRewriteReason::Changed)) {
            return second;
        }
        $attempt
    }};
}
pub(crate) use choose_unchanged;

/// Chooses a backend for a connect.
#[inline(always)]
pub fn choose_backend(
    ctx: BpfSockAddr,
    key: &FrontendKey,
) -> Result<ChosenBackend, NoRewriteReason> {
    if is_meshed(ctx) {
        return Err(NoRewriteReason::Pass);
    }
    choose_unchanged!(try_choose_backend(ctx, key))
}

/// Returns true if a kernel thread makes the call, as for a mount, and calls of such threads go on unchanged.
///
/// The kernel reports no close of its own sockets, so a redirected one would count as open forever.
#[inline(always)]
pub fn is_left_kernel_thread() -> bool {
    let flag = kernel_thread_flag();
    // Where the helpers below are missing, the mask is 0, and the verifier drops the calls.
    if flag.mask == 0 {
        return false;
    }
    let Some(is_left) = CONTROL.get_ptr(abi::CONTROL_KERNEL_THREADS_LEFT) else { return false };
    // SAFETY: a word of a live map value. Volatile, as user space writes it.
    if unsafe { ptr::read_volatile(is_left) } == 0 {
        return false;
    }
    task_flags(flag).is_some_and(|flags| flags & flag.mask != 0)
}

/// Returns 1 if a call that is refused otherwise goes on unchanged, as a [kernel thread](is_left_kernel_thread) makes it;
/// else 0. Separate, like [`pick_pod`]: it is rare, and takes no space on the stack of each connect.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_exempt_from_refusal() -> u32 {
    u32::from(is_left_kernel_thread())
}

/// Returns 0 if a program of user space makes the call; 1 if a kernel thread does, or if that is unknown. Separate, like
/// [`pick_pod`]: it is rare, and takes no space on the stack of each connect.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn may_be_kernel_thread() -> u32 {
    let flag = kernel_thread_flag();
    // Where the helpers below are missing, the mask is 0, and the verifier drops the calls.
    if flag.mask == 0 {
        return 1;
    }
    u32::from(task_flags(flag).is_none_or(|flags| flags & flag.mask != 0))
}

/// Returns the flag of kernel threads; its mask is 0 if they are not recognized.
#[inline(always)]
fn kernel_thread_flag() -> TaskFlag {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    unsafe { ptr::read_volatile(&KERNEL_THREAD) }
}

/// Returns the flags of the calling task, at the place that `flag` names; `None` if they cannot be read.
#[inline(always)]
fn task_flags(flag: TaskFlag) -> Option<u32> {
    let mut flags = 0u32;
    // SAFETY: the helper has no arguments. The other one writes the four bytes of `flags`, whatever it reads.
    let error = unsafe {
        let task = bpf_get_current_task() + u64::from(flag.offset);
        bpf_probe_read_kernel((&raw mut flags).cast(), 4, task as *const c_void)
    };
    if error == 0 { Some(flags) } else { None }
}

/// Returns true if a mesh's proxy redirects the connections of the caller's network namespace. The proxy must see the
/// address that was asked for. No look-up takes place while there is no such namespace.
#[inline(always)]
pub fn is_meshed(ctx: BpfSockAddr) -> bool {
    let Some(namespaces) = CONTROL.get_ptr(abi::CONTROL_MESHED_NETNS) else { return false };
    // SAFETY: a word of a live map value. Volatile, as user space writes it.
    let has_any = unsafe { ptr::read_volatile(namespaces) } != 0;
    has_any && MESHED_NETNS.get_ptr(ctx.netns_cookie()).is_some()
}

/// Chooses a backend once. The result was in force when all maps were read again, after the copy of the backend.
#[inline(always)]
fn try_choose_backend(
    ctx: BpfSockAddr,
    key: &FrontendKey,
) -> Result<ChosenBackend, NoRewriteReason> {
    let service_id = service_id_of(key).ok_or(NoRewriteReason::Pass)?;
    let state = read_word(&SVC_STATE, service_id).ok_or(NoRewriteReason::Pass)?;
    let read = ServiceReading { service_id, state, info: 0, activator_list: 0 };
    match SvcState::unpack(state).mode {
        RoutingMode::PickBackend => {
            let backend = pick_pod(state);
            // No picked pod can take a connection now. An activator holds the request until one can.
            if backend == NO_BACKEND {
                increment_control(abi::CONTROL_FALLBACK);
                return choose_activator(key, read);
            }
            let target = copy_backend(backend).ok_or(NoRewriteReason::Pass)?;
            verify_unchanged(key, read).map(|()| target)
        }
        RoutingMode::PickWithAffinity => choose_kept_pod(ctx, key, read),
        RoutingMode::PickRandom => choose_random(ctx, key, read),
        RoutingMode::Activator => choose_activator(key, read),
        RoutingMode::Pass => Err(NoRewriteReason::Pass),
        // A refusal shows at the client, so one by words that have changed since would be an error.
        RoutingMode::Refuse => verify_unchanged(key, read).and(Err(NoRewriteReason::Refuse)),
        RoutingMode::SelfTest => {
            verify_unchanged(key, read)?;
            increment_control(abi::CONTROL_SELF_TEST);
            Err(NoRewriteReason::Refuse)
        }
    }
}

/// Chooses the pod that the client keeps, or else one as in mode `PickBackend`, which the client then keeps. A client that
/// is led to an activator keeps none.
#[inline(always)]
fn choose_kept_pod(
    ctx: BpfSockAddr,
    key: &FrontendKey,
    read: ServiceReading,
) -> Result<ChosenBackend, NoRewriteReason> {
    let info = self::read_word(&SVC_INFO, read.service_id).ok_or(NoRewriteReason::Pass)?;
    let seconds = SvcInfo::unpack(info).affinity_seconds;
    let client = ctx.netns_cookie();
    let mut backend = kept_pod(read.state, seconds, read.service_id, client);
    // A kept pod may have left the list. Any pod is better than the way through an activator.
    if backend == NO_BACKEND {
        backend = pick_pod(read.state);
    }
    if backend == NO_BACKEND {
        increment_control(abi::CONTROL_FALLBACK);
        return choose_activator(key, read);
    }
    let target = copy_backend(backend).ok_or(NoRewriteReason::Pass)?;
    // The entry may have been reused while it was copied. The client keeps only a backend of which that is excluded.
    verify_unchanged(key, read)?;
    keep_backend(read.service_id, client, backend);
    Ok(target)
}

/// Chooses a random backend, or the one that the client keeps. Of a list without a usable entry, the connect goes on
/// unchanged.
#[inline(always)]
pub fn choose_random(
    ctx: BpfSockAddr,
    key: &FrontendKey,
    read: ServiceReading,
) -> Result<ChosenBackend, NoRewriteReason> {
    let info = self::read_word(&SVC_INFO, read.service_id).ok_or(NoRewriteReason::Pass)?;
    let seconds = SvcInfo::unpack(info).affinity_seconds;
    let client = ctx.netns_cookie();
    let mut backend = NO_BACKEND;
    if seconds != 0 {
        backend = kept_backend(read.state, seconds, read.service_id, client);
    }
    if backend == NO_BACKEND {
        backend = pick_random(read.state);
    }
    if backend == NO_BACKEND {
        return Err(NoRewriteReason::Pass);
    }
    let target = copy_backend(backend).ok_or(NoRewriteReason::Pass)?;
    // The entry may have been reused for another backend while it was copied.
    verify_unchanged(key, read)?;
    if seconds != 0 {
        keep_backend(read.service_id, client, backend);
    }
    Ok(ChosenBackend { netns_cookie: client, ..target })
}

/// Chooses the less loaded of two activators, with the service's own port there.
///
/// An activator whose node is gone keeps the connections it was given in its gauge. So later connects avoid it until
/// the RouteTable drops it.
#[inline(always)]
fn choose_activator(
    key: &FrontendKey,
    read: ServiceReading,
) -> Result<ChosenBackend, NoRewriteReason> {
    let info = self::read_word(&SVC_INFO, read.service_id).ok_or(NoRewriteReason::Pass)?;
    let SvcInfo { activators, port_be, .. } = SvcInfo::unpack(info);
    let list = self::read_word(&SVC_STATE, activators).ok_or(NoRewriteReason::Pass)?;
    // The service has no port of its own at the activators yet.
    if port_be == 0 {
        return Err(NoRewriteReason::Pass);
    }
    let backend = pick_activator(list);
    if backend == NO_BACKEND {
        return Err(NoRewriteReason::Pass);
    }
    let target = copy_backend(backend).ok_or(NoRewriteReason::Pass)?;
    verify_unchanged(key, ServiceReading { info, activator_list: list, ..read })
        .map(|()| ChosenBackend { port_be, ..target })
}

/// Reads again all words that the choice came from; an error if any has changed.
#[inline(always)]
pub fn verify_unchanged(key: &FrontendKey, before: ServiceReading) -> Result<(), NoRewriteReason> {
    let service_id = service_id_of(key).ok_or(NoRewriteReason::Changed)?;
    let state = read_word(&SVC_STATE, before.service_id).ok_or(NoRewriteReason::Changed)?;
    let mut current = ServiceReading { service_id, state, info: 0, activator_list: 0 };
    if before.info != 0 {
        current.info = read_word(&SVC_INFO, before.service_id).ok_or(NoRewriteReason::Changed)?;
        let activators = SvcInfo::unpack(before.info).activators;
        current.activator_list =
            read_word(&SVC_STATE, activators).ok_or(NoRewriteReason::Changed)?;
    }
    if before.is_unchanged(&current) { Ok(()) } else { Err(NoRewriteReason::Changed) }
}

/// Returns the service id of a frontend.
///
/// A removed entry's memory is used again at once (since 6.1), so the service id may be that of another address. The
/// check for [changes](verify_unchanged) finds that.
#[inline(always)]
pub fn service_id_of(key: &FrontendKey) -> Option<u32> {
    // SAFETY: a word of a hash's memory, which is not freed for other uses before this program has ended.
    FRONTENDS.get_ptr(key).map(|found| unsafe { ptr::read_volatile(found) })
}

/// Reads a word of a service id. Volatile: user space stores it at any time, and the value is read twice.
#[inline(always)]
pub fn read_word(words: &Array<u64>, service_id: u32) -> Option<u64> {
    // SAFETY: a live map value; a word, which user space stores at once.
    words.get_ptr(service_id).map(|word| unsafe { ptr::read_volatile(word) })
}

/// Copies the row of a backend.
#[inline(always)]
pub fn copy_backend(backend: u32) -> Option<ChosenBackend> {
    let row = BACKENDS.get_ptr(backend)?;
    // SAFETY: a live map value. It may be half-written or another backend's; reading all words again shows that.
    unsafe {
        let address = ptr::read_volatile((&raw const (*row).address).cast::<[u32; 4]>());
        let port_be = ptr::read_volatile(&raw const (*row).port_be);
        let generation = ptr::read_volatile(&raw const (*row).generation);
        Some(ChosenBackend { backend, port_be, generation, address, netns_cookie: 0 })
    }
}

/// Picks a pod of a list that can accept a connection, in up to [`MAX_PICKS`] picks of two; [`NO_BACKEND`] if there is
/// none.
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_pod(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    pick_listening_pod(&list).map_or(NO_BACKEND, |pick| pick.backend)
}

/// Picks the less loaded of two activators of a list; [`NO_BACKEND`] if there is none. Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_activator(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    if list.count == 0 {
        return NO_BACKEND;
    }
    pick_two(&list).map_or(NO_BACKEND, |(better, _)| better.backend)
}

/// Picks a random backend of a list; [`NO_BACKEND`] if there is none. Picks again, in all up to [`MAX_PICKS`] times, if
/// the picked one left a connect unanswered lately. Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_random(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    if list.count == 0 {
        return NO_BACKEND;
    }
    let mut backend = NO_BACKEND;
    for _ in 0..MAX_PICKS {
        let index = load_balancing::random_index(random(), list.count);
        let Some(pick) = backend_at(list.offset + index) else { return NO_BACKEND };
        backend = pick.backend;
        if !is_recently_unanswered(&pick) {
            break;
        }
    }
    backend
}

/// Returns the backend that a client keeps, while its list names it; [`NO_BACKEND`] if it keeps none. Separate, like
/// [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn kept_backend(state: u64, seconds: u32, service_id: u32, client: u64) -> u32 {
    let key = AffinityKey { netns_cookie: client, service_id, reserved: 0 };
    let Some(kept) = AFFINITY.get_ptr(key) else { return NO_BACKEND };
    // SAFETY: a live map value; single words, any value of which is checked below.
    let (connected_ns, backend) = unsafe { ((*kept).connected_ns, (*kept).backend) };
    if !load_balancing::is_affinity_in_force(monotonic_ns(), connected_ns, seconds) {
        return NO_BACKEND;
    }
    if names_backend(&SvcState::unpack(state), backend) { backend } else { NO_BACKEND }
}

/// Returns the pod that a client keeps, while its list names it and it listens; [`NO_BACKEND`] if it keeps none.
/// Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn kept_pod(state: u64, seconds: u32, service_id: u32, client: u64) -> u32 {
    let backend = kept_backend(state, seconds, service_id, client);
    if backend == NO_BACKEND {
        return NO_BACKEND;
    }
    let Some(value) = BACKENDS.get_ptr(backend) else { return NO_BACKEND };
    if is_listening(&BackendPick { backend, value }) { backend } else { NO_BACKEND }
}

/// Returns this backend while its list names it, else [`NO_BACKEND`]. Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn listed_backend(state: u64, backend: u32) -> u32 {
    if names_backend(&SvcState::unpack(state), backend) { backend } else { NO_BACKEND }
}

/// Returns true if a list in the order of backend numbers names this one.
#[inline(always)]
fn names_backend(list: &SvcState, backend: u32) -> bool {
    let (mut low, mut high) = (0, list.count);
    // A constant bound, which the verifier needs; it suffices for the longest list.
    for _ in 0..MAX_SEARCH_STEPS {
        if low >= high {
            return false;
        }
        let middle = low + (high - low) / 2;
        let Some(entry) = SLOTS.get(list.offset + middle) else { return false };
        let found = *entry as u32;
        if found == backend {
            return true;
        }
        if found < backend {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    false
}

/// Stores the backend that a client keeps from now on.
#[inline(always)]
fn keep_backend(service_id: u32, client: u64, backend: u32) {
    let key = AffinityKey { netns_cookie: client, service_id, reserved: 0 };
    let value = AffinityValue { connected_ns: monotonic_ns(), backend, reserved: 0 };
    // Without memory for an entry the client gets a random backend the next time.
    let _full = AFFINITY.insert(key, value, 0);
}

/// Picks a pod of a list that can accept a connection.
#[inline(always)]
fn pick_listening_pod(list: &SvcState) -> Option<BackendPick> {
    if list.count == 0 {
        return None;
    }
    if list.count == 1 {
        return backend_at(list.offset).filter(is_listening);
    }
    for attempt in 1..=MAX_PICKS {
        let (better, other) = pick_two(list)?;
        // `pick_two` prefers a backend without doubt, so the other one is doubtful as well; the next two may not be.
        if attempt < MAX_PICKS && is_recently_unanswered(&better) {
            continue;
        }
        if is_listening(&better) {
            return Some(better);
        }
        // A pod that has just stopped listening looks the least loaded of all, so it would be picked again and again.
        if is_listening(&other) {
            return Some(other);
        }
    }
    None
}

/// Picks two backends of a list at random, the less loaded one first.
#[inline(always)]
fn pick_two(list: &SvcState) -> Option<(BackendPick, BackendPick)> {
    let (first, second) = load_balancing::random_index_pair(random(), list.count);
    let first = backend_at(list.offset + first)?;
    let second = backend_at(list.offset + second)?;
    Some(if load_balancing::prefers_first(backend_load(&first), backend_load(&second)) {
        (first, second)
    } else {
        (second, first)
    })
}

/// Returns the backend in an entry of `SLOTS`.
#[inline(always)]
fn backend_at(index: u32) -> Option<BackendPick> {
    let backend = *SLOTS.get(index)? as u32;
    Some(BackendPick { backend, value: BACKENDS.get_ptr(backend)? })
}

/// Returns the load of a backend: open connections of this node, and requests in flight of a local pod.
#[inline(always)]
fn backend_load(pick: &BackendPick) -> BackendLoad {
    // SAFETY: a live map value. The gauge may change meanwhile; any value of it is good enough for a choice.
    let (slot, open) = unsafe { ((*pick.value).pod_slot, (*pick.value).open_connections) };
    let state = if slot == 0 { None } else { POD_STATE.get(slot) };
    let in_flight = state.map_or(load_balancing::UNKNOWN_IN_FLIGHT, |state| state.in_flight);
    BackendLoad {
        open_connections: open,
        in_flight,
        recently_unanswered: is_recently_unanswered(pick),
    }
}

/// Returns true if a connect to this backend was left unanswered a short time ago.
#[inline(always)]
fn is_recently_unanswered(pick: &BackendPick) -> bool {
    // SAFETY: a live map value; a single word.
    let unanswered_ns = unsafe { (*pick.value).unanswered_ns };
    unanswered_ns != 0
        && load_balancing::elapsed_ns(monotonic_ns(), unanswered_ns) < abi::AVOID_UNANSWERED_NS
}

/// Returns true if a pod of this node has a listener, and is not left frozen. For a backend without a netns cookie (see
/// `BackendValue`) the RouteTable is trusted.
#[inline(always)]
fn is_listening(pick: &BackendPick) -> bool {
    // SAFETY: a live map value; single words, any value of which is checked below.
    let (cookie, port_be) = unsafe { ((*pick.value).netns_cookie, (*pick.value).port_be) };
    if cookie == 0 {
        return true;
    }
    let key =
        ListenKey { netns_cookie: cookie, port: u32::from(u16::from_be(port_be)), reserved: 0 };
    // SAFETY: one word is read at once.
    if unsafe { LISTEN.get(key) }.is_some_and(|found| found.reachable != 0) {
        return is_left_frozen(cookie) == 0;
    }
    // SAFETY: one word is read at once. (No agent sets the flag: it writes cookie 0 instead.)
    unsafe { PODS.get(cookie) }.is_some_and(|pod| pod.flags & abi::POD_LISTENER_FOUND != 0)
}

/// Returns 1 if a pod of this node is left frozen, else 0. Such a pod is frozen or about to be, and no agent promises
/// to thaw it any more. Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn is_left_frozen(cookie: u64) -> u32 {
    let Some(until) = CONTROL.get_ptr(abi::CONTROL_THAWS_UNTIL) else { return 0 };
    // SAFETY: a word of a live map value. Volatile, as user space writes it.
    let until_ns = unsafe { ptr::read_volatile(until) };
    // While no pod of the node is frozen, the word is 0, and nothing else is looked up.
    if until_ns == 0 || monotonic_ns() < until_ns {
        return 0;
    }
    // SAFETY: the flags are read at once.
    let is_standby =
        unsafe { PODS.get(cookie) }.is_some_and(|pod| pod.flags & abi::POD_STANDBY != 0);
    u32::from(is_standby)
}

/// Returns a random number.
#[inline(always)]
fn random() -> u32 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}
