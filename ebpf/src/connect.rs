//! A connect to a service leads to a pod, or to an activator while no pod can take it.
//!
//! Fail open: whatever is missing or in doubt leaves the address as the program gave it.

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::bpf_get_prandom_u32,
};
use common::{
    abi::{self, Backend, Client, FrontendKey, ListenKey},
    flow::{self, Load, Mode, SvcInfo, SvcState},
};

use crate::{
    context::{ALLOW, Address, bytes, refuse, words},
    maps::{
        BACKENDS, CLIENTS, FRONTENDS, LISTEN, POD_STATE, PODS, SLOTS, SVC_INFO, SVC_STATE, add,
        note,
    },
};

/// Picks of two before the activator takes the connect.
const PICKS: u32 = 4;

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
    let key = key(ctx.four(), ctx.port_be());
    match choose(&key) {
        Ok(target) => {
            let given = address(&target);
            if flow::is_mapped(&given) {
                ctx.set_four(&given);
                ctx.set_port_be(target.port_be);
                remember(ctx, &key, &target, given);
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
    let key = key(ctx.six(), ctx.port_be());
    match choose(&key) {
        Ok(target) => {
            let given = address(&target);
            ctx.set_six(&given);
            ctx.set_port_be(target.port_be);
            remember(ctx, &key, &target, given);
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

/// A socket closes for good: it leaves the gauge of its backend.
#[inline(always)]
pub fn release(socket: *mut bpf_sock) -> i32 {
    if let Some(client) = CLIENTS.get(socket.cast()) {
        leave(client);
    }
    ALLOW
}

#[inline(always)]
fn asked(ctx: Address, peer: [u32; 4]) -> Option<&'static Client> {
    let client = CLIENTS.get(ctx.socket())?;
    (words(client.given) == peer && client.given_port_be == ctx.port_be()).then_some(client)
}

#[inline(always)]
fn key(address: [u32; 4], port_be: u16) -> FrontendKey {
    FrontendKey { address: bytes(address), port_be, protocol: 6, reserved: 0 }
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
    for _ in 0..PICKS {
        let (first, second) = flow::two(random(), list.count);
        let first = backend(list.offset + first)?;
        if list.count == 1 {
            return listens(&first).then_some(first);
        }
        let second = backend(list.offset + second)?;
        let (better, other) = if flow::prefers_first(load(&first), load(&second)) {
            (first, second)
        } else {
            (second, first)
        };
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

/// Any activator, at the service's own port there.
#[inline(always)]
fn activator(service: u32) -> Result<Target, Refusal> {
    let info = SvcInfo::unpack(*SVC_INFO.get(service).ok_or(Refusal::Pass)?);
    let list = state(info.activators)?;
    if list.count == 0 || info.port_be == 0 {
        return Err(Refusal::Pass);
    }
    let target = backend(list.offset + flow::index(random(), list.count)).ok_or(Refusal::Pass)?;
    Ok(Target { port_be: info.port_be, ..target })
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
    Load { open, in_flight: state.map(|state| state.in_flight) }
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
    if unsafe { LISTEN.get(&key) }.is_some_and(|found| found.open != 0) {
        return true;
    }
    // SAFETY: as above.
    unsafe { PODS.get(&cookie) }.is_some_and(|pod| pod.flags & abi::POD_LISTENS != 0)
}

#[inline(always)]
fn remember(ctx: Address, key: &FrontendKey, target: &Target, given: [u32; 4]) {
    let Some(client) = CLIENTS.get_or_zero(ctx.socket()) else {
        return note(abi::CONTROL_UNTRACKED);
    };
    // A socket may connect again after a failed try.
    leave(client);
    client.asked = key.address;
    client.asked_port_be = key.port_be;
    client.given = bytes(given);
    client.given_port_be = target.port_be;
    client.backend = target.backend;
    // SAFETY: as in `backend`.
    client.generation = unsafe { (*target.row).generation };
    client.counted = 1;
    // SAFETY: a live map value.
    add(unsafe { &raw mut (*target.row).open }, 1);
}

/// Takes a socket out of its backend's gauge, unless the number has been given to another backend since.
#[inline(always)]
fn leave(client: &mut Client) {
    if client.counted == 0 {
        return;
    }
    client.counted = 0;
    if let Some(row) = BACKENDS.get_ptr_mut(client.backend) {
        // SAFETY: a live map value.
        if unsafe { (*row).generation } == client.generation {
            // SAFETY: as above.
            add(unsafe { &raw mut (*row).open }, 1u64.wrapping_neg());
        }
    }
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: takes nothing and always answers.
    unsafe { bpf_get_prandom_u32() }
}
