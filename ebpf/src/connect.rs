//! A connect to a service leads to a pod, or to an activator while no pod can take it.
//!
//! Fail open: whatever is missing or in doubt leaves the address as the program gave it.

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{bpf_get_prandom_u32, bpf_get_socket_cookie},
};
use common::{
    abi::{self, Backend, Client, FrontendKey, ListenKey},
    flow::{self, Load, Mode, SvcInfo, SvcState},
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

/// Why a connect is not rewritten.
enum Refusal {
    /// Not ours, or in doubt: leave it alone.
    Pass,
    /// Nobody may answer it.
    Refuse,
}

/// Where a connect goes.
struct Target {
    backend: u32,
    row: *mut Backend,
    port_be: u16,
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
            let given = address(&target);
            if flow::is_mapped(&given) {
                ctx.set_four(&given);
                ctx.set_port_be(target.port_be);
                remember(ctx, key, &target, given);
            }
            ALLOW
        }
        Err(Refusal::Pass) => ALLOW,
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
            let given = address(&target);
            ctx.set_six(&given);
            ctx.set_port_be(target.port_be);
            remember(ctx, key, &target, given);
            ALLOW
        }
        Err(Refusal::Pass) => ALLOW,
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

#[inline(always)]
fn choose(key: &FrontendKey) -> Result<Target, Refusal> {
    // SAFETY: the number is copied at once; a concurrent removal frees the entry only after this program ended.
    let service = *unsafe { FRONTENDS.get(key) }.ok_or(Refusal::Pass)?;
    let state = state(service)?;
    match state.mode {
        Mode::Pass => Err(Refusal::Pass),
        Mode::Refuse => Err(Refusal::Refuse),
        Mode::Canary => {
            note(abi::CONTROL_CANARY);
            Err(Refusal::Refuse)
        }
        Mode::Activator => activator(service),
        Mode::Serve => match pod(&state) {
            Some(target) => Ok(target),
            None => {
                note(abi::CONTROL_FALLBACK);
                activator(service)
            }
        },
    }
}

#[inline(always)]
fn state(service: u32) -> Result<SvcState, Refusal> {
    Ok(SvcState::unpack(*SVC_STATE.get(service).ok_or(Refusal::Pass)?))
}

/// The freer of two pods that can take a connection, in up to [`PICKS`] tries.
#[inline(always)]
fn pod(list: &SvcState) -> Option<Target> {
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

/// The freer of two activators, at the service's own port there. One whose node is gone keeps what it was given, so
/// later connects go past it until the table knows.
#[inline(always)]
fn activator(service: u32) -> Result<Target, Refusal> {
    let info = SvcInfo::unpack(*SVC_INFO.get(service).ok_or(Refusal::Pass)?);
    let list = state(info.activators)?;
    if list.count == 0 || info.port_be == 0 {
        return Err(Refusal::Pass);
    }
    let (better, _) = two(&list).ok_or(Refusal::Pass)?;
    Ok(Target { port_be: info.port_be, ..better })
}

/// Two of a list at random, the freer one first.
#[inline(always)]
fn two(list: &SvcState) -> Option<(Target, Target)> {
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
fn backend(slot: u32) -> Option<Target> {
    let backend = *SLOTS.get(slot)? as u32;
    let row = BACKENDS.get_ptr_mut(backend)?;
    // SAFETY: a live map value; nobody writes this field while a list names the backend.
    Some(Target { backend, row, port_be: unsafe { (*row).port_be } })
}

#[inline(always)]
fn address(target: &Target) -> [u32; 4] {
    // SAFETY: as in `backend`.
    words(unsafe { (*target.row).address })
}

#[inline(always)]
fn load(target: &Target) -> Load {
    // SAFETY: as in `backend`; the gauge may change meanwhile, any value of it will do.
    let (slot, open) = unsafe { ((*target.row).slot, (*target.row).open) };
    let state = if slot == 0 { None } else { POD_STATE.get(slot) };
    let in_flight = state.map_or(flow::UNKNOWN, |state| state.in_flight);
    Load { open, in_flight, doubtful: is_doubtful(target) }
}

#[inline(always)]
fn is_doubtful(target: &Target) -> bool {
    // SAFETY: as in `load`.
    let at = unsafe { (*target.row).unanswered_ns };
    at != 0 && now().wrapping_sub(at) < abi::UNANSWERED_NS
}

/// Whether a pod of this node has a listener; pods elsewhere are taken at the table's word.
#[inline(always)]
fn listens(target: &Target) -> bool {
    // SAFETY: as in `backend`.
    let cookie = unsafe { (*target.row).cookie };
    if cookie == 0 {
        return true;
    }
    let key = ListenKey { cookie, port: u32::from(u16::from_be(target.port_be)), reserved: 0 };
    // SAFETY: one word is read at once.
    if unsafe { LISTEN.get(key) }.is_some_and(|found| found.open != 0) {
        return true;
    }
    // SAFETY: as above.
    unsafe { PODS.get(cookie) }.is_some_and(|pod| pod.flags & abi::POD_LISTENS != 0)
}

#[inline(always)]
fn remember(ctx: Address, key: &FrontendKey, target: &Target, given: [u32; 4]) {
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
    client.given = bytes(given);
    client.given_port_be = target.port_be;
    client.backend = target.backend;
    // SAFETY: as in `backend`.
    client.generation = unsafe { (*target.row).generation };
    // SAFETY: a live map value.
    add(unsafe { &raw mut (*target.row).open }, 1);
}

/// Takes a socket out of its backend's gauge.
#[inline(always)]
fn leave(client: &Client) {
    if let Some(row) = given(client) {
        // SAFETY: a live map value.
        add(unsafe { &raw mut (*row).open }, LESS);
    }
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
