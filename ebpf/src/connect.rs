//! A connect to a service leads to a pod, or to an activator while no pod can take it.
//!
//! Fail open: whatever is missing or in doubt leaves the address as the program gave it.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{bpf_get_prandom_u32, bpf_get_socket_cookie},
    maps::Array,
};
use common::{
    abi::{self, Backend, Client, FrontendKey, ListenKey},
    flow::{self, Load, Mode, Read, SvcInfo, SvcState},
};

use crate::{
    context::{ALLOW, Address, bytes, refuse, words},
    maps::{
        BACKENDS, CLAIMS, CLIENTS, CONTROL, FRONTENDS, LISTEN, OVERFLOW, POD_STATE, PODS, SLOTS,
        SVC_INFO, SVC_STATE, add, note, note_by, now,
    },
};

/// Picks of two before the activator takes the connect.
const PICKS: u32 = 4;
/// Minus one, for blind adds.
const LESS: u64 = 1u64.wrapping_neg();
/// No backend's generation: the first one of each is 1.
const GAUGELESS: u64 = 0;
/// No backend's number.
const NONE: u32 = u32::MAX;

/// Why a connect is not rewritten.
enum Refusal {
    /// Not ours, or in doubt: leave it alone.
    Pass,
    /// Nothing may answer it.
    Refuse,
    /// The tables have changed since they were read.
    Changed,
}

/// Where a connect goes: a copy, as the backend's row may become another one's as soon as no list names it. No pointer:
/// the verifier would follow it through all that comes between.
struct Target {
    backend: u32,
    port_be: u16,
    generation: u64,
    address: [u32; 4],
}

/// One pick of a list.
struct Pick {
    backend: u32,
    row: *const Backend,
}

#[inline(always)]
pub fn connect4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = Address(ctx);
    if !ctx.is_tcp() {
        return ALLOW;
    }
    let OnStack(key) = &key(ctx.four(), ctx.port_be());
    match choose(key) {
        Ok(target) => {
            if flow::is_mapped(&target.address) {
                ctx.set_four(&target.address);
                ctx.set_port_be(target.port_be);
                remember(ctx, key, &target);
            }
            ALLOW
        }
        Err(Refusal::Pass | Refusal::Changed) => {
            elsewhere(ctx);
            ALLOW
        }
        Err(Refusal::Refuse) => refuse(),
    }
}

#[inline(always)]
pub fn connect6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = Address(ctx);
    if !ctx.is_tcp() {
        return ALLOW;
    }
    let OnStack(key) = &key(ctx.six(), ctx.port_be());
    match choose(key) {
        Ok(target) => {
            ctx.set_six(&target.address);
            ctx.set_port_be(target.port_be);
            remember(ctx, key, &target);
            ALLOW
        }
        Err(Refusal::Pass | Refusal::Changed) => {
            elsewhere(ctx);
            ALLOW
        }
        Err(Refusal::Refuse) => refuse(),
    }
}

/// Shows the address the program asked for, while the socket is connected to the one it was given instead.
#[inline(always)]
pub fn getpeername4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = Address(ctx);
    if let Some(client) = asked(ctx, ctx.four()) {
        ctx.set_four(&words(client.asked));
        ctx.set_port_be(client.asked_port_be);
    }
    ALLOW
}

/// As [`getpeername4`].
#[inline(always)]
pub fn getpeername6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = Address(ctx);
    if let Some(client) = asked(ctx, ctx.six()) {
        ctx.set_six(&words(client.asked));
        ctx.set_port_be(client.asked_port_be);
    }
    ALLOW
}

/// A socket closes for good: it leaves the gauge of its backend, and its row.
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

#[inline(always)]
fn asked(ctx: Address, peer: [u32; 4]) -> Option<&'static mut Client> {
    let client = remembered(ctx.socket(), ctx.socket_cookie())?;
    (words(client.given) == peer && client.given_port_be == ctx.port_be()).then_some(client)
}

/// Begins at a whole word of the stack, as the verifier wants of whoever writes whole words.
#[repr(align(8))]
struct OnStack<T>(T);

#[inline(always)]
fn key(address: [u32; 4], port_be: u16) -> OnStack<FrontendKey> {
    OnStack(FrontendKey { address: bytes(address), port_be, protocol: 6, reserved: 0 })
}

/// Chooses, and once or twice more where the tables have changed meanwhile: a connect may be preempted for longer than
/// what is freed rests, and a service's number, its slots and their backends are another's then. Written out: in a loop, the
/// verifier would have to prove what each turn leaves to the next.
#[inline(always)]
fn choose(key: &FrontendKey) -> Result<Target, Refusal> {
    let first = attempt(key);
    if !matches!(first, Err(Refusal::Changed)) {
        return first;
    }
    let second = attempt(key);
    if !matches!(second, Err(Refusal::Changed)) {
        return second;
    }
    attempt(key)
}

/// Chooses once. What it answers was in force when all was read again, behind the copy of the backend.
#[inline(always)]
fn attempt(key: &FrontendKey) -> Result<Target, Refusal> {
    let service = service(key).ok_or(Refusal::Pass)?;
    let state = read(&SVC_STATE, service).ok_or(Refusal::Pass)?;
    let read = Read { service, state, info: 0, list: 0 };
    match SvcState::unpack(state).mode {
        Mode::Serve => {
            let backend = pick_pod(state);
            if backend == NONE {
                note(abi::CONTROL_FALLBACK);
                return activator(key, read);
            }
            let target = copy(backend).ok_or(Refusal::Pass)?;
            still(key, read).map(|()| target)
        }
        Mode::Activator => activator(key, read),
        Mode::Pass => Err(Refusal::Pass),
        Mode::Refuse => still(key, read).and(Err(Refusal::Refuse)),
        Mode::Canary => {
            still(key, read)?;
            note(abi::CONTROL_CANARY);
            Err(Refusal::Refuse)
        }
    }
}

/// The freer of two activators, at the service's own port there. One whose node is gone keeps what it was given, so
/// later connects go past it until the table knows.
#[inline(always)]
fn activator(key: &FrontendKey, read: Read) -> Result<Target, Refusal> {
    let info = self::read(&SVC_INFO, read.service).ok_or(Refusal::Pass)?;
    let SvcInfo { activators, port_be } = SvcInfo::unpack(info);
    let list = self::read(&SVC_STATE, activators).ok_or(Refusal::Pass)?;
    if port_be == 0 {
        return Err(Refusal::Pass);
    }
    let backend = pick_activator(list);
    if backend == NONE {
        return Err(Refusal::Pass);
    }
    let target = copy(backend).ok_or(Refusal::Pass)?;
    still(key, Read { info, list, ..read }).map(|()| Target { port_be, ..target })
}

/// Reads once more what led here.
#[inline(always)]
fn still(key: &FrontendKey, before: Read) -> Result<(), Refusal> {
    let service = service(key).ok_or(Refusal::Changed)?;
    let state = read(&SVC_STATE, before.service).ok_or(Refusal::Changed)?;
    let mut now = Read { service, state, info: 0, list: 0 };
    if before.info != 0 {
        now.info = read(&SVC_INFO, before.service).ok_or(Refusal::Changed)?;
        let activators = SvcInfo::unpack(before.info).activators;
        now.list = read(&SVC_STATE, activators).ok_or(Refusal::Changed)?;
    }
    if before.is_same(&now) { Ok(()) } else { Err(Refusal::Changed) }
}

/// The number of the service that an address leads to. A removed entry's memory is used again at once (since 6.1), so the
/// number may be another address's; reading it [again](still) tells.
#[inline(always)]
fn service(key: &FrontendKey) -> Option<u32> {
    // SAFETY: a word of a hash's memory, which is no other kind of memory before this program has ended.
    FRONTENDS.get_ptr(key).map(|found| unsafe { ptr::read_volatile(found) })
}

/// A service's word. Volatile: user space stores it whenever it likes, and it is read twice.
#[inline(always)]
fn read(words: &Array<u64>, service: u32) -> Option<u64> {
    // SAFETY: a live map value; a word, which is stored at once.
    words.get_ptr(service).map(|word| unsafe { ptr::read_volatile(word) })
}

/// What a backend's row says.
#[inline(always)]
fn copy(backend: u32) -> Option<Target> {
    let row = BACKENDS.get_ptr(backend)?;
    // SAFETY: a live map value. Another's, perhaps, half-written; reading all again tells.
    unsafe {
        let address = ptr::read_volatile((&raw const (*row).address).cast::<[u32; 4]>());
        let port_be = ptr::read_volatile(&raw const (*row).port_be);
        let generation = ptr::read_volatile(&raw const (*row).generation);
        Some(Target { backend, port_be, generation, address })
    }
}

/// The freer of two pods of a list that can take a connection, in up to [`PICKS`] tries, or [`NONE`]. A function of its own:
/// the verifier walks through it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_pod(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    pod(&list).map_or(NONE, |pick| pick.backend)
}

/// The freer of two activators of a list, or [`NONE`]. As [`pick_pod`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick_activator(state: u64) -> u32 {
    let list = SvcState::unpack(state);
    if list.count == 0 {
        return NONE;
    }
    two(&list).map_or(NONE, |(better, _)| better.backend)
}

#[inline(always)]
fn pod(list: &SvcState) -> Option<Pick> {
    if list.count == 0 {
        return None;
    }
    if list.count == 1 {
        return backend(list.offset).filter(listens);
    }
    for turn in 1..=PICKS {
        let (better, other) = two(list)?;
        // So is the other one; not so perhaps the next two.
        if turn < PICKS && is_doubtful(&better) {
            continue;
        }
        if listens(&better) {
            return Some(better);
        }
        // A pod that just stopped listening looks the freest of all, so it would be picked again and again.
        if listens(&other) {
            return Some(other);
        }
    }
    None
}

/// Two of a list at random, the freer one first.
#[inline(always)]
fn two(list: &SvcState) -> Option<(Pick, Pick)> {
    let (first, second) = flow::two(random(), list.count);
    let first = backend(list.offset + first)?;
    let second = backend(list.offset + second)?;
    Some(if flow::prefers_first(load(&first), load(&second)) {
        (first, second)
    } else {
        (second, first)
    })
}

#[inline(always)]
fn backend(slot: u32) -> Option<Pick> {
    let backend = *SLOTS.get(slot)? as u32;
    Some(Pick { backend, row: BACKENDS.get_ptr(backend)? })
}

#[inline(always)]
fn load(pick: &Pick) -> Load {
    // SAFETY: a live map value; the gauge may change meanwhile, any value of it will do.
    let (slot, open) = unsafe { ((*pick.row).slot, (*pick.row).open) };
    let state = if slot == 0 { None } else { POD_STATE.get(slot) };
    let in_flight = state.map_or(flow::UNKNOWN, |state| state.in_flight);
    Load { open, in_flight, doubtful: is_doubtful(pick) }
}

#[inline(always)]
fn is_doubtful(pick: &Pick) -> bool {
    // SAFETY: as in `load`.
    let at = unsafe { (*pick.row).unanswered_ns };
    at != 0 && now().wrapping_sub(at) < abi::UNANSWERED_NS
}

/// Whether a pod of this node has a listener; pods elsewhere are taken at the table's word.
#[inline(always)]
fn listens(pick: &Pick) -> bool {
    // SAFETY: as in `load`.
    let (cookie, port_be) = unsafe { ((*pick.row).cookie, (*pick.row).port_be) };
    if cookie == 0 {
        return true;
    }
    let key = ListenKey { cookie, port: u32::from(u16::from_be(port_be)), reserved: 0 };
    // SAFETY: one word is read at once.
    if unsafe { LISTEN.get(key) }.is_some_and(|found| found.open != 0) {
        return true;
    }
    // SAFETY: as above.
    unsafe { PODS.get(cookie) }.is_some_and(|pod| pod.flags & abi::POD_LISTENS != 0)
}

#[inline(always)]
fn remember(ctx: Address, key: &FrontendKey, target: &Target) {
    // The kernel closes such sockets without a word, so they would count for ever.
    if ctx.is_flow() {
        return note(abi::CONTROL_UNTRACKED);
    }
    let (socket, cookie) = (ctx.socket(), ctx.socket_cookie());
    let client = match remembered(socket, cookie) {
        // A socket may connect again after a failed try.
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
    // Where the row is another backend's by now, no gauge counts this socket: it leaves none, either.
    if let Some(row) = given(client) {
        // SAFETY: a live map value.
        add(unsafe { &raw mut (*row).open }, 1);
    }
}

/// A socket connects to what is not ours. Where it was ours before, its connect had failed, or it was disconnected.
#[inline(always)]
fn elsewhere(ctx: Address) {
    disconnected(ctx.socket(), ctx.socket_cookie());
}

/// Whether a socket's connect was led anywhere.
#[inline(always)]
pub fn is_remembered(socket: *mut c_void, cookie: u64) -> bool {
    remembered(socket, cookie).is_some()
}

/// A socket is connected to nothing any more: its connect has failed, the other end has reset it, or its program has
/// disconnected it. It may stay open for as long as its program likes.
#[inline(always)]
pub fn disconnected(socket: *mut c_void, cookie: u64) {
    if let Some(client) = remembered(socket, cookie) {
        leave(client);
    }
}

/// Takes a socket out of its backend's gauge, once.
#[inline(always)]
fn leave(client: &mut Client) {
    if let Some(row) = given(client) {
        // SAFETY: a live map value.
        add(unsafe { &raw mut (*row).open }, LESS);
    }
    client.generation = GAUGELESS;
}

/// The backend that a socket was given, unless the number has been given to another one since.
#[inline(always)]
fn given(client: &Client) -> Option<*mut Backend> {
    let row = BACKENDS.get_ptr_mut(client.backend)?;
    // SAFETY: a live map value.
    (unsafe { (*row).generation } == client.generation).then_some(row)
}

/// Nobody answers a socket's connect to this address. Later ones rather go elsewhere for a while. The socket may have
/// been given another address before, and gone on to one that is not ours.
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

/// What a socket remembers of its rewritten connect.
#[inline(always)]
fn remembered(socket: *mut c_void, cookie: u64) -> Option<&'static mut Client> {
    match own(cookie) {
        Some((row, _)) => Some(row),
        None => overflowed(socket),
    }
}

/// The row that a socket has claimed, and its claims. A row keeps the cookie of the socket that had it last, and
/// cookies are never used twice.
#[inline(always)]
fn own(cookie: u64) -> Option<(&'static mut Client, *mut u64)> {
    let claims = claims(cookie)?;
    // Most sockets that close never had a row; their rows, which are cold, are not looked at.
    // SAFETY: a word of a live map value. Volatile, as another CPU may write it.
    if unsafe { ptr::read_volatile(claims) } == 0 {
        return None;
    }
    let row = row(cookie)?;
    (row.cookie == cookie).then_some((row, claims))
}

/// Claims a socket's row, if it is free. There is no compare-and-swap before 5.12: whoever finds its own claim to be
/// the only one has the row; of two that try at once, both may fail.
#[inline(always)]
fn claim(cookie: u64) -> Option<&'static mut Client> {
    let claims = claims(cookie)?;
    // SAFETY: as in `own`.
    if unsafe { ptr::read_volatile(claims) } != 0 {
        return None;
    }
    add(claims, 1);
    // SAFETY: as in `own`.
    if unsafe { ptr::read_volatile(claims) } == 1 {
        return row(cookie);
    }
    add(claims, LESS);
    None
}

#[inline(always)]
fn claims(cookie: u64) -> Option<*mut u64> {
    CLAIMS.get_ptr_mut(cookie as u32 % abi::CLIENTS_MAX)
}

#[inline(always)]
fn row(cookie: u64) -> Option<&'static mut Client> {
    let row = CLIENTS.get_ptr_mut(cookie as u32 % abi::CLIENTS_MAX)?;
    // SAFETY: a live map value; only the socket that claimed it writes it.
    Some(unsafe { &mut *row })
}

/// A socket's storage, made for it.
#[inline(always)]
fn overflow(socket: *mut c_void) -> Option<&'static mut Client> {
    let client = OVERFLOW.get_or_zero(socket)?;
    note(abi::CONTROL_OVERFLOW);
    Some(client)
}

/// A socket's storage, if it has any; not looked for while no socket has.
#[inline(always)]
fn overflowed(socket: *mut c_void) -> Option<&'static mut Client> {
    let sockets = *CONTROL.get(abi::CONTROL_OVERFLOW)?;
    if sockets == 0 { None } else { OVERFLOW.get(socket) }
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: takes nothing and always answers.
    unsafe { bpf_get_prandom_u32() }
}
