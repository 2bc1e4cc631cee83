//! Routes a connect to a service to a pod, or to an activator while no pod can accept it.
//!
//! It fails open: if anything is missing or in doubt, the address stays as the program gave it.

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::bpf_get_socket_cookie,
};
use datapath::{
    abi::{self, ConnectRecord, FrontendKey},
    load_balancing,
};

use crate::{
    backend_choice::{
        ChosenBackend, NoRewriteReason, StackAligned, choose_backend, frontend_key,
        is_exempt_from_refusal, is_left_kernel_thread,
    },
    bound_connects,
    connect_records::{self, find_record, handle_disconnect, is_in_force, record_tcp_connect},
    refusal::{deny_call, refusing_address},
    sock_addr::{ALLOW, BpfSockAddr, address_words},
    udp,
};

/// Rewrites a connect to an IPv4 address.
#[inline(always)]
pub fn connect4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    let Some(protocol) = ctx.frontend_protocol() else { return ALLOW };
    let StackAligned(key) = &frontend_key(ctx.ipv4(), ctx.port_be(), protocol);
    match choose_backend(ctx, key) {
        Ok(target) => {
            // An IPv4 socket cannot connect to an IPv6 pod; the agent plans no such lists, so this only guards.
            if load_balancing::is_ipv4_mapped(&target.address) && record_connect(ctx, key, &target)
            {
                ctx.set_ipv4(&target.address);
                ctx.set_port_be(target.port_be);
            }
            ALLOW
        }
        Err(NoRewriteReason::Refuse) if is_exempt_from_refusal() == 0 => {
            match refusing_address(ctx, key) {
                Some(address) => {
                    forget_earlier_connect(ctx);
                    ctx.set_ipv4(&address);
                    ctx.set_port_be(0);
                    ALLOW
                }
                None => deny_call(),
            }
        }
        Err(NoRewriteReason::Pass | NoRewriteReason::Changed | NoRewriteReason::Refuse) => {
            // A socket may connect more than once, and its record must not name the backend of the last time.
            forget_earlier_connect(ctx);
            ALLOW
        }
    }
}

/// Rewrites a connect to an IPv6 address.
#[inline(always)]
pub fn connect6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    let Some(protocol) = ctx.frontend_protocol() else { return ALLOW };
    let StackAligned(key) = &frontend_key(ctx.ipv6(), ctx.port_be(), protocol);
    match choose_backend(ctx, key) {
        Ok(target) => {
            if record_connect(ctx, key, &target) {
                ctx.set_ipv6(&target.address);
                ctx.set_port_be(target.port_be);
            }
            ALLOW
        }
        Err(NoRewriteReason::Refuse) if is_exempt_from_refusal() == 0 => {
            match refusing_address(ctx, key) {
                Some(address) => {
                    forget_earlier_connect(ctx);
                    ctx.set_ipv6(&address);
                    ctx.set_port_be(0);
                    ALLOW
                }
                None => deny_call(),
            }
        }
        Err(NoRewriteReason::Pass | NoRewriteReason::Changed | NoRewriteReason::Refuse) => {
            // As above, the record must not name the backend of the last time.
            forget_earlier_connect(ctx);
            ALLOW
        }
    }
}

/// Returns the address that the program asked for (IPv4), while the socket is connected to a backend's.
#[inline(always)]
pub fn getpeername4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if ctx.is_udp() {
        udp::show_asked_peer(ctx, false);
    } else if let Some(client) = record_for_peer(ctx, ctx.ipv4()) {
        ctx.set_ipv4(&address_words(client.original_address));
        ctx.set_port_be(client.original_port_be);
    }
    ALLOW
}

/// Returns the address that the program asked for (IPv6), while the socket is connected to a backend's.
#[inline(always)]
pub fn getpeername6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    if ctx.is_udp() {
        udp::show_asked_peer(ctx, true);
    } else if let Some(client) = record_for_peer(ctx, ctx.ipv6()) {
        ctx.set_ipv6(&address_words(client.original_address));
        ctx.set_port_be(client.original_port_be);
    }
    ALLOW
}

/// Removes a socket that is released from the gauge of its backend, and frees its record. A UDP socket has neither.
#[inline(always)]
pub fn release_socket(socket: *mut bpf_sock) -> i32 {
    // SAFETY: the helper takes the context as it is.
    let cookie = unsafe { bpf_get_socket_cookie(socket.cast()) };
    if connect_records::release_record(socket, cookie) {
        bound_connects::release_socket(cookie);
    } else {
        udp::release_socket(socket, cookie);
    }
    ALLOW
}

/// Returns the record of a socket if `peer` and the port are the backend that it was given.
#[inline(always)]
fn record_for_peer(ctx: BpfSockAddr, peer: [u32; 4]) -> Option<&'static mut ConnectRecord> {
    let client = find_record(ctx.socket(), ctx.socket_cookie())?;
    let is_backend =
        address_words(client.backend_address) == peer && client.backend_port_be == ctx.port_be();
    // After a disconnect the program may have asked for this very address.
    (is_backend && is_in_force(client)).then_some(client)
}

/// Records a connect that is to be rewritten. Returns false if it must go on unchanged. That is so for one of a kernel
/// thread, without memory for the record of a UDP socket, and if another connection has the local port and backend.
#[inline(always)]
fn record_connect(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) -> bool {
    if is_left_kernel_thread() {
        forget_earlier_connect(ctx);
        return false;
    }
    if key.protocol == abi::IPPROTO_UDP {
        return udp::record_connect(ctx, key, target);
    }
    // Two connections with one local port to one backend would be the same connection on the wire.
    if !bound_connects::reserve(ctx, key, target) {
        handle_disconnect(ctx.socket(), ctx.socket_cookie());
        return false;
    }
    record_tcp_connect(ctx, key, target);
    true
}

/// Forgets the earlier connect of a socket whose present one leads to no backend: it goes on unchanged, or is refused.
///
/// The earlier one has failed or was disconnected, or the socket is one of UDP.
#[inline(always)]
fn forget_earlier_connect(ctx: BpfSockAddr) {
    if ctx.is_udp() {
        return udp::forget_connect(ctx);
    }
    handle_disconnect(ctx.socket(), ctx.socket_cookie());
}
