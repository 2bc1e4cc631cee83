//! Routes a connect to a service to a pod, or to an activator while no pod can accept it.
//!
//! It fails open: if anything is missing or in doubt, the address stays as the program gave it.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{bpf_get_prandom_u32, bpf_get_socket_cookie},
    maps::Array,
};
use datapath::{
    abi::{self, BackendValue, ConnectRecord, FrontendKey, ListenKey},
    flow::{self, BackendLoad, RoutingMode, ServiceReading, SvcInfo, SvcState},
};

use crate::{
    context::{ALLOW, BpfSockAddr, bytes, refuse, words},
    maps::{
        BACKENDS, CLAIMS, CLIENTS, CONTROL, FRONTENDS, LISTEN, OVERFLOW, POD_STATE, PODS, SLOTS,
        SVC_INFO, SVC_STATE, add, note, note_by, now,
    },
};

/// Picks of two backends before the activator gets the connect.
const PICKS: u32 = 4;
/// Minus one, for adds that wrap.
const LESS: u64 = 1u64.wrapping_neg();
/// Generation that no backend has: a socket with it counts in no gauge. Generations begin with 1.
const GAUGELESS: u64 = 0;
/// Number that no backend has.
const NONE: u32 = u32::MAX;

/// Reason that a connect is not rewritten.
enum NoRewriteReason {
    /// The address is no frontend, or there is doubt: the connect goes on unchanged.
    Pass,
    /// The frontend's mode refuses connects.
    Refuse,
    /// The maps have changed since they were read.
    Changed,
}

/// Backend for a connect, as a copy: the backend's row may be used for another one as soon as no list names it.
///
/// It is not a pointer, because the verifier would follow the pointer through all code in between.
struct ChosenBackend {
    backend: u32,
    port_be: u16,
    generation: u64,
    address: [u32; 4],
}

/// One backend picked from a list.
struct BackendPick {
    backend: u32,
    row: *const BackendValue,
}

/// Rewrites a connect to an IPv4 address.
#[inline(always)]
pub fn connect4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if !ctx.is_tcp() {
        return ALLOW;
    }
    let StackAligned(key) = &key(ctx.four(), ctx.port_be());
    match choose(key) {
        Ok(target) => {
            // An IPv4 socket cannot connect to an IPv6 pod; the agent plans no such lists, so this only guards.
            if flow::is_mapped(&target.address) {
                ctx.set_four(&target.address);
                ctx.set_port_be(target.port_be);
                remember(ctx, key, &target);
            }
            ALLOW
        }
        Err(NoRewriteReason::Pass | NoRewriteReason::Changed) => {
            elsewhere(ctx);
            ALLOW
        }
        Err(NoRewriteReason::Refuse) => refuse(),
    }
}

/// Rewrites a connect to an IPv6 address.
#[inline(always)]
pub fn connect6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if !ctx.is_tcp() {
        return ALLOW;
    }
    let StackAligned(key) = &key(ctx.six(), ctx.port_be());
    match choose(key) {
        Ok(target) => {
            ctx.set_six(&target.address);
            ctx.set_port_be(target.port_be);
            remember(ctx, key, &target);
            ALLOW
        }
        Err(NoRewriteReason::Pass | NoRewriteReason::Changed) => {
            elsewhere(ctx);
            ALLOW
        }
        Err(NoRewriteReason::Refuse) => refuse(),
    }
}

/// Returns the address that the program asked for (IPv4), while the socket is connected to a backend's.
#[inline(always)]
pub fn getpeername4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if let Some(client) = asked(ctx, ctx.four()) {
        ctx.set_four(&words(client.asked));
        ctx.set_port_be(client.asked_port_be);
    }
    ALLOW
}

/// Returns the address that the program asked for (IPv6), while the socket is connected to a backend's.
#[inline(always)]
pub fn getpeername6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if let Some(client) = asked(ctx, ctx.six()) {
        ctx.set_six(&words(client.asked));
        ctx.set_port_be(client.asked_port_be);
    }
    ALLOW
}

/// Removes a socket that is released from the gauge of its backend, and frees its row.
#[inline(always)]
pub fn release(socket: *mut bpf_sock) -> i32 {
    // SAFETY: the helper takes the context as it is.
    let cookie = unsafe { bpf_get_socket_cookie(socket.cast()) };
    if let Some((row, claims)) = own(cookie) {
        leave(row);
        add(claims, LESS);
    } else if let Some(client) = overflowed(socket.cast()) {
        leave(client);
        note_by(abi::CONTROL_OVERFLOW, LESS);
    }
    ALLOW
}

/// Returns the record of a socket if `peer` and the port are the backend that it was given.
#[inline(always)]
fn asked(ctx: BpfSockAddr, peer: [u32; 4]) -> Option<&'static mut ConnectRecord> {
    let client = remembered(ctx.socket(), ctx.socket_cookie())?;
    (words(client.given) == peer && client.given_port_be == ctx.port_be()).then_some(client)
}

/// Aligned to whole words of the stack, as the verifier requires for stores of whole words.
#[repr(align(8))]
struct StackAligned<T>(T);

/// Builds the frontend key of an address and port, for TCP.
#[inline(always)]
fn key(address: [u32; 4], port_be: u16) -> StackAligned<FrontendKey> {
    StackAligned(FrontendKey { address: bytes(address), port_be, protocol: 6, reserved: 0 })
}

/// Chooses a backend, in up to three attempts if the maps change meanwhile.
///
/// A connect may be preempted for longer than the quarantine of what was freed. Then a service's number, its list and
/// the backends there may belong to another service. The attempts are written out: in a loop, the verifier would have
/// to prove what each iteration leaves to the next.
#[inline(always)]
fn choose(key: &FrontendKey) -> Result<ChosenBackend, NoRewriteReason> {
    let first = attempt(key);
    if !matches!(first, Err(NoRewriteReason::Changed)) {
        return first;
    }
    let second = attempt(key);
    if !matches!(second, Err(NoRewriteReason::Changed)) {
        return second;
    }
    attempt(key)
}

/// Chooses a backend once. The result was in force when all maps were read again, after the copy of the backend.
#[inline(always)]
fn attempt(key: &FrontendKey) -> Result<ChosenBackend, NoRewriteReason> {
    let service = service(key).ok_or(NoRewriteReason::Pass)?;
    let state = read(&SVC_STATE, service).ok_or(NoRewriteReason::Pass)?;
    let read = ServiceReading { service, state, info: 0, list: 0 };
    match SvcState::unpack(state).mode {
        RoutingMode::Serve => {
            let backend = pick_pod(state);
            if backend == NONE {
                note(abi::CONTROL_FALLBACK);
                return activator(key, read);
            }
            let target = copy(backend).ok_or(NoRewriteReason::Pass)?;
            still(key, read).map(|()| target)
        }
        RoutingMode::Activator => activator(key, read),
        RoutingMode::Pass => Err(NoRewriteReason::Pass),
        RoutingMode::Refuse => still(key, read).and(Err(NoRewriteReason::Refuse)),
        RoutingMode::Canary => {
            still(key, read)?;
            note(abi::CONTROL_CANARY);
            Err(NoRewriteReason::Refuse)
        }
    }
}

/// Chooses the less loaded of two activators, with the service's own port there.
///
/// An activator whose node is gone keeps the connections it was given in its gauge. So later connects avoid it until
/// the RouteTable drops it.
#[inline(always)]
fn activator(key: &FrontendKey, read: ServiceReading) -> Result<ChosenBackend, NoRewriteReason> {
    let info = self::read(&SVC_INFO, read.service).ok_or(NoRewriteReason::Pass)?;
    let SvcInfo { activators, port_be } = SvcInfo::unpack(info);
    let list = self::read(&SVC_STATE, activators).ok_or(NoRewriteReason::Pass)?;
    if port_be == 0 {
        return Err(NoRewriteReason::Pass);
    }
    let backend = pick_activator(list);
    if backend == NONE {
        return Err(NoRewriteReason::Pass);
    }
    let target = copy(backend).ok_or(NoRewriteReason::Pass)?;
    still(key, ServiceReading { info, list, ..read }).map(|()| ChosenBackend { port_be, ..target })
}

/// Reads again all words that the choice came from; an error if any has changed.
#[inline(always)]
fn still(key: &FrontendKey, before: ServiceReading) -> Result<(), NoRewriteReason> {
    let service = service(key).ok_or(NoRewriteReason::Changed)?;
    let state = read(&SVC_STATE, before.service).ok_or(NoRewriteReason::Changed)?;
    let mut now = ServiceReading { service, state, info: 0, list: 0 };
    if before.info != 0 {
        now.info = read(&SVC_INFO, before.service).ok_or(NoRewriteReason::Changed)?;
        let activators = SvcInfo::unpack(before.info).activators;
        now.list = read(&SVC_STATE, activators).ok_or(NoRewriteReason::Changed)?;
    }
    if before.is_same(&now) { Ok(()) } else { Err(NoRewriteReason::Changed) }
}

/// Returns the service number of a frontend.
///
/// A removed entry's memory is used again at once (since 6.1), so the number may be that of another address; reading it
/// [again](still) shows that.
#[inline(always)]
fn service(key: &FrontendKey) -> Option<u32> {
    // SAFETY: a word of a hash's memory, which is not freed for other uses before this program has ended.
    FRONTENDS.get_ptr(key).map(|found| unsafe { ptr::read_volatile(found) })
}

/// Reads a word of a service. Volatile: user space stores it at any time, and the value is read twice.
#[inline(always)]
fn read(words: &Array<u64>, service: u32) -> Option<u64> {
    // SAFETY: a live map value; a word, which user space stores at once.
    words.get_ptr(service).map(|word| unsafe { ptr::read_volatile(word) })
}

/// Copies the row of a backend.
#[inline(always)]
fn copy(backend: u32) -> Option<ChosenBackend> {
    let row = BACKENDS.get_ptr(backend)?;
    // SAFETY: a live map value. It may be half-written or another backend's; reading all words again shows that.
    unsafe {
        let address = ptr::read_volatile((&raw const (*row).address).cast::<[u32; 4]>());
        let port_be = ptr::read_volatile(&raw const (*row).port_be);
        let generation = ptr::read_volatile(&raw const (*row).generation);
        Some(ChosenBackend { backend, port_be, generation, address })
    }
}

/// Picks a pod of a list that can accept a connection, in up to [`PICKS`] picks of two; [`NONE`] if there is none.
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_pod(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    pod(&list).map_or(NONE, |pick| pick.backend)
}

/// Picks the less loaded of two activators of a list; [`NONE`] if there is none. Separate, like [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_activator(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    if list.count == 0 {
        return NONE;
    }
    two(&list).map_or(NONE, |(better, _)| better.backend)
}

/// Picks a pod of a list that can accept a connection.
#[inline(always)]
fn pod(list: &SvcState) -> Option<BackendPick> {
    if list.count == 0 {
        return None;
    }
    if list.count == 1 {
        return backend(list.offset).filter(listens);
    }
    for turn in 1..=PICKS {
        let (better, other) = two(list)?;
        // `two` prefers a backend without doubt, so the other one is doubtful as well; the next two may not be.
        if turn < PICKS && is_doubtful(&better) {
            continue;
        }
        if listens(&better) {
            return Some(better);
        }
        // A pod that has just stopped listening looks the least loaded of all, so it would be picked again and again.
        if listens(&other) {
            return Some(other);
        }
    }
    None
}

/// Picks two backends of a list at random, the less loaded one first.
#[inline(always)]
fn two(list: &SvcState) -> Option<(BackendPick, BackendPick)> {
    let (first, second) = flow::two(random(), list.count);
    let first = backend(list.offset + first)?;
    let second = backend(list.offset + second)?;
    Some(if flow::prefers_first(load(&first), load(&second)) {
        (first, second)
    } else {
        (second, first)
    })
}

/// Returns the backend at a place of `SLOTS`.
#[inline(always)]
fn backend(slot: u32) -> Option<BackendPick> {
    let backend = *SLOTS.get(slot)? as u32;
    Some(BackendPick { backend, row: BACKENDS.get_ptr(backend)? })
}

/// Returns the load of a backend: open connections of this node, and requests in flight of a local pod.
#[inline(always)]
fn load(pick: &BackendPick) -> BackendLoad {
    // SAFETY: a live map value. The gauge may change meanwhile; any value of it is good enough for a choice.
    let (slot, open) = unsafe { ((*pick.row).slot, (*pick.row).open) };
    let state = if slot == 0 { None } else { POD_STATE.get(slot) };
    let in_flight = state.map_or(flow::UNKNOWN, |state| state.in_flight);
    BackendLoad { open, in_flight, doubtful: is_doubtful(pick) }
}

/// Returns true if a connect to this backend was left unanswered a short time ago.
#[inline(always)]
fn is_doubtful(pick: &BackendPick) -> bool {
    // SAFETY: a live map value; a single word.
    let at = unsafe { (*pick.row).unanswered_ns };
    at != 0 && now().wrapping_sub(at) < abi::UNANSWERED_NS
}

/// Returns true if a pod of this node has a listener; for pods of other nodes the RouteTable is trusted.
#[inline(always)]
fn listens(pick: &BackendPick) -> bool {
    // SAFETY: a live map value; single words, any value of which is checked below.
    let (cookie, port_be) = unsafe { ((*pick.row).cookie, (*pick.row).port_be) };
    if cookie == 0 {
        return true;
    }
    let key = ListenKey { cookie, port: u32::from(u16::from_be(port_be)), reserved: 0 };
    // SAFETY: one word is read at once.
    if unsafe { LISTEN.get(key) }.is_some_and(|found| found.open != 0) {
        return true;
    }
    // SAFETY: one word is read at once.
    unsafe { PODS.get(cookie) }.is_some_and(|pod| pod.flags & abi::POD_LISTENS != 0)
}

/// Records the rewritten connect of a socket, and counts the socket in the backend's gauge.
#[inline(always)]
fn remember(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) {
    // The kernel reports no close of such sockets, so they would count forever.
    if ctx.is_flow() {
        return note(abi::CONTROL_UNTRACKED);
    }
    let (socket, cookie) = (ctx.socket(), ctx.socket_cookie());
    let client = match remembered(socket, cookie) {
        // A socket may connect again after a failed attempt.
        Some(client) => {
            leave(client);
            client
        }
        None => match claim(cookie).or_else(|| overflow(socket)) {
            Some(client) => client,
            None => return note(abi::CONTROL_UNTRACKED),
        },
    };
    client.cookie = cookie;
    client.asked = key.address;
    client.asked_port_be = key.port_be;
    client.given = bytes(target.address);
    client.given_port_be = target.port_be;
    client.backend = target.backend;
    client.generation = target.generation;
    // If the row is another backend's by now, no gauge counts this socket, and none will be lowered for it.
    if let Some(row) = given(client) {
        // SAFETY: a live map value.
        add(unsafe { &raw mut (*row).open }, 1);
    }
}

/// Handles a connect to an address that is no frontend. A recorded earlier connect has failed or was disconnected.
#[inline(always)]
fn elsewhere(ctx: BpfSockAddr) {
    disconnected(ctx.socket(), ctx.socket_cookie());
}

/// Returns true if a connect of the socket was rewritten.
#[inline(always)]
pub fn is_remembered(socket: *mut c_void, cookie: u64) -> bool {
    remembered(socket, cookie).is_some()
}

/// Handles a socket that is no longer connected: its connect failed, the peer reset it, or its program disconnected it.
///
/// The socket itself may stay open indefinitely, so its gauge cannot wait for the release.
#[inline(always)]
pub fn disconnected(socket: *mut c_void, cookie: u64) {
    if let Some(client) = remembered(socket, cookie) {
        leave(client);
    }
}

/// Removes a socket from its backend's gauge, once.
#[inline(always)]
fn leave(client: &mut ConnectRecord) {
    if let Some(row) = given(client) {
        // SAFETY: a live map value.
        add(unsafe { &raw mut (*row).open }, LESS);
    }
    client.generation = GAUGELESS;
}

/// Returns the backend that a socket was given, unless the number has been used for another one since.
#[inline(always)]
fn given(client: &ConnectRecord) -> Option<*mut BackendValue> {
    let row = BACKENDS.get_ptr_mut(client.backend)?;
    // SAFETY: a live map value.
    (unsafe { (*row).generation } == client.generation).then_some(row)
}

/// Records that a socket's connect to this address is unanswered: later connects avoid the backend for a while.
///
/// The socket may have been given another address before, and then have connected to one that is no frontend.
#[inline(always)]
pub fn unanswered(socket: *mut c_void, cookie: u64, address: [u32; 4], port: u32) {
    let Some(client) = remembered(socket, cookie) else { return };
    let same = words(client.given) == address;
    if !same || u32::from(u16::from_be(client.given_port_be)) != port {
        return;
    }
    let Some(row) = given(client) else { return };
    // SAFETY: a live map value; one word is written at once.
    unsafe { ptr::write_volatile(&raw mut (*row).unanswered_ns, now()) };
    note(abi::CONTROL_UNANSWERED);
}

/// Returns the record of a socket's rewritten connect.
#[inline(always)]
fn remembered(socket: *mut c_void, cookie: u64) -> Option<&'static mut ConnectRecord> {
    match own(cookie) {
        Some((row, _)) => Some(row),
        None => overflowed(socket),
    }
}

/// Returns the row that a socket has claimed, and its claim count.
///
/// A row keeps the cookie of the socket that had it last, and cookies are never used twice.
#[inline(always)]
fn own(cookie: u64) -> Option<(&'static mut ConnectRecord, *mut u64)> {
    let claims = claims(cookie)?;
    // Most sockets that close never had a row; their rows are not in the cache and should not be read.
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } == 0 {
        return None;
    }
    let row = row(cookie)?;
    (row.cookie == cookie).then_some((row, claims))
}

/// Claims a socket's row, if it is free.
///
/// There is no compare-and-swap before 5.12. So a socket has the row if its own claim is the only one; of two that try
/// at once, both may fail.
#[inline(always)]
fn claim(cookie: u64) -> Option<&'static mut ConnectRecord> {
    let claims = claims(cookie)?;
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } != 0 {
        return None;
    }
    add(claims, 1);
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } == 1 {
        return row(cookie);
    }
    add(claims, LESS);
    None
}

/// Returns the claim count of a socket's row.
#[inline(always)]
fn claims(cookie: u64) -> Option<*mut u64> {
    CLAIMS.get_ptr_mut(cookie as u32 % abi::CLIENTS_MAX)
}

/// Returns a socket's row of `CLIENTS`.
#[inline(always)]
fn row(cookie: u64) -> Option<&'static mut ConnectRecord> {
    let row = CLIENTS.get_ptr_mut(cookie as u32 % abi::CLIENTS_MAX)?;
    // SAFETY: a live map value; only the socket that claimed it writes it.
    Some(unsafe { &mut *row })
}

/// Returns a socket's storage, creating it.
#[inline(always)]
fn overflow(socket: *mut c_void) -> Option<&'static mut ConnectRecord> {
    let client = OVERFLOW.get_or_zero(socket)?;
    note(abi::CONTROL_OVERFLOW);
    Some(client)
}

/// Returns a socket's storage, if it has any; no look-up takes place while no socket has storage.
#[inline(always)]
fn overflowed(socket: *mut c_void) -> Option<&'static mut ConnectRecord> {
    let sockets = *CONTROL.get(abi::CONTROL_OVERFLOW)?;
    if sockets == 0 { None } else { OVERFLOW.get(socket) }
}

/// Returns a random number.
#[inline(always)]
fn random() -> u32 {
    // SAFETY: the helper has no arguments and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}
