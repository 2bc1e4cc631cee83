//! Connects of sockets whose programs have chosen their local port.
//!
//! Two such sockets with one local port may ask two services that lead to one backend. The kernel would refuse the
//! second connect (EADDRNOTAVAIL), as it could not tell the two connections apart, although their programs asked for
//! two addresses. So that connect goes on unchanged.

use core::ptr;

use datapath::{
    abi::{self, BoundConnect, BoundConnectKey, FrontendKey},
    load_balancing,
};

use crate::{
    backend_choice::{ChosenBackend, StackAligned},
    maps::{BOUND_CONNECTS, BOUND_SOCKETS, CONTROL, monotonic_ns},
    sock_addr::{BpfSockAddr, address_bytes, address_words},
};

/// Records the connect of a socket whose local port is chosen. Returns false if a connection from another frontend has
/// this port and backend: then the connect must go on unchanged.
#[inline(always)]
pub fn reserve(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) -> bool {
    let local_port = ctx.local_port();
    if local_port == 0 {
        return true;
    }
    let cookie = ctx.socket_cookie();
    // An earlier connect of the socket has failed.
    release_socket(cookie);
    let StackAligned(connect) = &StackAligned(BoundConnectKey {
        netns_cookie: ctx.netns_cookie(),
        backend_address: address_bytes(target.address),
        backend_port_be: target.port_be,
        local_port,
        reserved: 0,
    });
    if let Some(known) = BOUND_CONNECTS.get_ptr(connect) {
        // SAFETY: a live map value. If it is reused meanwhile, a connect goes on unchanged or is refused, at worst.
        let known = unsafe { &*known };
        if is_in_use(known, key) {
            return false;
        }
        // An open connection to the same frontend has the entry, which stays. The kernel refuses this connect.
        if known.closed_ns == 0 {
            return true;
        }
    }
    let StackAligned(value) =
        &StackAligned(BoundConnect { frontend: *key, reserved: 0, closed_ns: 0 });
    // Without memory for entries, the kernel decides about later connects.
    if BOUND_SOCKETS.insert(cookie, connect, 0).is_ok() {
        let _full = BOUND_CONNECTS.insert(connect, value, 0);
        set_has_any();
    }
    true
}

/// Marks the connection of a socket as closed, if its local port was chosen. No look-up takes place before the first
/// such socket.
#[inline(always)]
pub fn release_socket(cookie: u64) {
    if !has_any() {
        return;
    }
    let Some(connect) = BOUND_SOCKETS.get_ptr(cookie) else { return };
    // SAFETY: a live map value, which only this socket writes.
    if let Some(known) = BOUND_CONNECTS.get_ptr_mut(unsafe { &*connect }) {
        // SAFETY: a live map value; a single word.
        unsafe { ptr::write_volatile(&raw mut (*known).closed_ns, monotonic_ns()) };
    }
    let _gone_meanwhile = BOUND_SOCKETS.remove(cookie);
}

/// Returns true if a known connection is from another frontend, and is open or may still be in TIME_WAIT.
///
/// For the same frontend the kernel decides, as without these programs.
#[inline(always)]
fn is_in_use(known: &BoundConnect, key: &FrontendKey) -> bool {
    let is_same = known.frontend.port_be == key.port_be
        && address_words(known.frontend.address) == address_words(key.address);
    !is_same
        && (known.closed_ns == 0
            || load_balancing::elapsed_ns(monotonic_ns(), known.closed_ns) < abi::TIME_WAIT_NS)
}

/// Returns true if any local port has been chosen so far.
#[inline(always)]
fn has_any() -> bool {
    let Some(word) = CONTROL.get_ptr(abi::CONTROL_BOUND_CONNECTS) else { return false };
    // SAFETY: a word of a live map value. Volatile, as other CPUs change it.
    unsafe { ptr::read_volatile(word) != 0 }
}

#[inline(always)]
fn set_has_any() {
    if let Some(word) = CONTROL.get_ptr_mut(abi::CONTROL_BOUND_CONNECTS) {
        // SAFETY: a word of a live map value. Volatile, as other CPUs read it.
        unsafe { ptr::write_volatile(word, 1) };
    }
}
