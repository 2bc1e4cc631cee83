//! Leads datagrams to services to endpoints, and shows answers as those of the service.
//!
//! It fails open, like `connect`: an address is replaced only if that is recorded, so that answers can be shown as the
//! service's. A socket's own lock is held in each hook but the release, which is its last.

use core::ptr;

use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use datapath::{
    abi::{self, FrontendKey, UdpFlowKey, UdpReplySource, UdpSocket},
    load_balancing::{self, RoutingMode, ServiceReading, SvcState},
};

use crate::{
    backend_choice::{
        ChosenBackend, NO_BACKEND, NoRewriteReason, StackAligned, choose_random, choose_unchanged,
        copy_backend, frontend_key, is_exempt_from_refusal, is_left_kernel_thread, is_meshed,
        listed_backend, read_word, service_id_of, verify_unchanged,
    },
    maps::{
        CONTROL, MINUS_ONE, SVC_STATE, UDP_FLOWS, UDP_REPLIES, UDP_SOCKETS, add_to_control,
        increment_control,
    },
    refusal::deny_call,
    sock_addr::{ALLOW, BpfSockAddr, address_bytes, address_words},
};

/// Rewrites the destination of a datagram over IPv4. It may come from an IPv6 socket that names a mapped address.
#[inline(always)]
pub fn sendmsg4(ctx: *mut bpf_sock_addr) -> i32 {
    send(BpfSockAddr(ctx), false)
}

/// Rewrites the destination of a datagram over IPv6.
#[inline(always)]
pub fn sendmsg6(ctx: *mut bpf_sock_addr) -> i32 {
    send(BpfSockAddr(ctx), true)
}

/// Shows the source of a received datagram to an IPv4 socket.
#[inline(always)]
pub fn recvmsg4(ctx: *mut bpf_sock_addr) -> i32 {
    show_source(BpfSockAddr(ctx), false)
}

/// Shows the source of a received datagram to an IPv6 socket. Over IPv4 the source is a mapped address.
#[inline(always)]
pub fn recvmsg6(ctx: *mut bpf_sock_addr) -> i32 {
    show_source(BpfSockAddr(ctx), true)
}

/// Records the connect of a socket to a backend. Returns false if there is no memory for that.
#[inline(always)]
pub fn record_connect(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) -> bool {
    let StackAligned(socket) = &StackAligned(UdpSocket {
        original_address: key.address,
        backend_address: address_bytes(target.address),
        original_port_be: key.port_be,
        backend_port_be: target.port_be,
        reserved: 0,
        netns_cookie: target.netns_cookie,
    });
    store_socket(ctx.socket_cookie(), socket)
}

/// Forgets an earlier connect of a socket that connects to another address now.
#[inline(always)]
pub fn forget_connect(ctx: BpfSockAddr) {
    remove_socket(ctx.socket_cookie());
}

/// Forgets a socket that is released.
#[inline(always)]
pub fn release_socket(socket: *mut bpf_sock, cookie: u64) {
    // SAFETY: the context of a release; a single word of it.
    let protocol = unsafe { ptr::read_volatile(&raw const (*socket).protocol) };
    if protocol == u32::from(abi::IPPROTO_UDP) {
        remove_socket(cookie);
    }
}

/// Rewrites the destination of a datagram.
#[inline(always)]
fn send(ctx: BpfSockAddr, is_ipv6: bool) -> i32 {
    if !ctx.is_udp() {
        return ALLOW;
    }
    let StackAligned(key) = &frontend_key(address(ctx, is_ipv6), ctx.port_be(), abi::IPPROTO_UDP);
    if lead_to_peer(ctx, is_ipv6, key) {
        return ALLOW;
    }
    match choose_target(ctx, key) {
        Ok(target) => {
            // The kernel sends no datagram to an address of the other family.
            if load_balancing::is_ipv4_mapped(&target.address) != is_ipv6
                && !is_left_kernel_thread()
                && remember_flow(ctx, key, &target)
            {
                set_address(ctx, is_ipv6, &target.address, target.port_be);
            }
            ALLOW
        }
        Err(NoRewriteReason::Refuse) if is_exempt_from_refusal() == 0 => deny_call(),
        Err(NoRewriteReason::Pass | NoRewriteReason::Changed | NoRewriteReason::Refuse) => {
            // Without UDP sockets of services there is no reply source, and the map need not be asked.
            if !has_no_sockets() {
                let words = address_words(key.address);
                let low = u64::from(words[0]) | u64::from(words[1]) << 32;
                let high = u64::from(words[2]) | u64::from(words[3]) << 32;
                forget_reply(ctx.socket_cookie(), low, high, u32::from(key.port_be));
            }
            ALLOW
        }
    }
}

/// Lets answers from an address that a socket asks itself show that address, also if a service led the socket there
/// before. The address is in two halves, in memory order. Returns 0.
///
/// A function of its own: its key takes no space on the stack of the programs that choose backends.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn forget_reply(cookie: u64, low: u64, high: u64, port_be: u32) -> u32 {
    // The key is built for sockets that have asked a service only.
    if UDP_SOCKETS.get_ptr(cookie).is_none() {
        return 0;
    }
    let words = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
    let key = UdpFlowKey {
        socket_cookie: cookie,
        address: address_bytes(words),
        port_be: port_be as u16,
        reserved: 0,
        spare: 0,
    };
    // The look-up comes first, as a removal takes a lock of the map.
    if UDP_REPLIES.get_ptr(&key).is_some() {
        let _gone_meanwhile = UDP_REPLIES.remove(&key);
    }
    0
}

/// Leads a datagram of a connected socket to its peer. One that names the peer stays unchanged. One that names the
/// address that the socket asked for goes to the socket's backend. Returns false for another address, or if there is no
/// peer.
///
/// A connected socket receives from its peer only, whatever address its datagrams name. The peer may be a service that
/// this node did not serve at the connect. An IPv6 socket with an IPv4 peer names it in each of its datagrams.
#[inline(always)]
fn lead_to_peer(ctx: BpfSockAddr, is_ipv6: bool, key: &FrontendKey) -> bool {
    if !ctx.is_connected() {
        return false;
    }
    let named = address_words(key.address);
    let peer = if is_ipv6 { ctx.peer_ipv6() } else { ctx.peer_ipv4() };
    // The datagram names the peer itself, and needs no change.
    if peer == named && ctx.peer_port_be() == key.port_be {
        return true;
    }
    let Some(socket) = find_socket(ctx) else { return false };
    let is_asked =
        socket.original_port_be == key.port_be && address_words(socket.original_address) == named;
    if is_asked {
        let backend = address_words(socket.backend_address);
        set_address(ctx, is_ipv6, &backend, socket.backend_port_be);
    }
    is_asked
}

/// Chooses the backend of a datagram.
#[inline(always)]
fn choose_target(ctx: BpfSockAddr, key: &FrontendKey) -> Result<ChosenBackend, NoRewriteReason> {
    if is_meshed(ctx) {
        return Err(NoRewriteReason::Pass);
    }
    choose_unchanged!(try_choose_target(ctx, key))
}

/// Chooses the backend of a datagram once: the one of the socket's earlier datagrams while the list names it, else a
/// random one.
#[inline(always)]
fn try_choose_target(
    ctx: BpfSockAddr,
    key: &FrontendKey,
) -> Result<ChosenBackend, NoRewriteReason> {
    let service_id = service_id_of(key).ok_or(NoRewriteReason::Pass)?;
    let state = read_word(&SVC_STATE, service_id).ok_or(NoRewriteReason::Pass)?;
    let read = ServiceReading { service_id, state, info: 0, activator_list: 0 };
    match SvcState::unpack(state).mode {
        RoutingMode::PickRandom => {
            let backend = flow_backend(&flow_key(ctx, key.address, key.port_be));
            let backend = listed_backend(state, backend);
            if backend == NO_BACKEND {
                return choose_random(ctx, key, read);
            }
            let target = copy_backend(backend).ok_or(NoRewriteReason::Pass)?;
            verify_unchanged(key, read).map(|()| target)
        }
        RoutingMode::Refuse => verify_unchanged(key, read).and(Err(NoRewriteReason::Refuse)),
        RoutingMode::SelfTest => {
            verify_unchanged(key, read)?;
            increment_control(abi::CONTROL_SELF_TEST_DATAGRAMS);
            Err(NoRewriteReason::Refuse)
        }
        // No plan has other modes for UDP.
        _ => Err(NoRewriteReason::Pass),
    }
}

/// Returns the backend of a socket's earlier datagrams to a frontend, or [`NO_BACKEND`].
#[inline(always)]
fn flow_backend(key: &UdpFlowKey) -> u32 {
    // SAFETY: a word of a live map value. An entry that is reused meanwhile has another number, which is checked.
    UDP_FLOWS.get_ptr(key).map_or(NO_BACKEND, |backend| unsafe { ptr::read_volatile(backend) })
}

/// Remembers the backend of a datagram, and the frontend that its answers belong to. Returns false if the answers would
/// not be shown as the frontend's, for want of memory.
#[inline(always)]
fn remember_flow(ctx: BpfSockAddr, key: &FrontendKey, target: &ChosenBackend) -> bool {
    // Answers are looked up only for sockets that have an entry.
    let cookie = ctx.socket_cookie();
    if UDP_SOCKETS.get_ptr(cookie).is_none() {
        let StackAligned(socket) = &StackAligned(UdpSocket {
            original_address: [0; 16],
            backend_address: [0; 16],
            original_port_be: 0,
            backend_port_be: 0,
            reserved: 0,
            netns_cookie: 0,
        });
        if !store_socket(cookie, socket) {
            return false;
        }
    }
    let reply_key = flow_key(ctx, address_bytes(target.address), target.port_be);
    let is_known = UDP_REPLIES.get_ptr(&reply_key).is_some_and(|source| {
        // SAFETY: a live map value, which only datagrams of this socket write; its lock is held.
        let source = unsafe { &*source };
        source.port_be == key.port_be && address_words(source.address) == address_words(key.address)
    });
    if !is_known {
        let StackAligned(source) = &StackAligned(UdpReplySource {
            address: key.address,
            port_be: key.port_be,
            reserved: 0,
            spare: 0,
        });
        if UDP_REPLIES.insert(&reply_key, source, 0).is_err() {
            return false;
        }
    }
    let asked_key = flow_key(ctx, key.address, key.port_be);
    if flow_backend(&asked_key) != target.backend {
        // Without memory for an entry the next datagram goes to a random backend again.
        let _full = UDP_FLOWS.insert(&asked_key, &target.backend, 0);
    }
    true
}

/// Shows the source of a received datagram: the address that the socket asked for, if a backend answers.
#[inline(always)]
fn show_source(ctx: BpfSockAddr, is_ipv6: bool) -> i32 {
    let Some(socket) = find_socket(ctx) else { return ALLOW };
    if ctx.is_connected() {
        show_original(ctx, is_ipv6, socket);
        return ALLOW;
    }
    let key = flow_key(ctx, address_bytes(address(ctx, is_ipv6)), ctx.port_be());
    let Some((source, port_be)) = read_reply(&key) else { return ALLOW };
    // The entry may be reused for another socket while it is read. Under this key there is always the same value.
    if read_reply(&key).is_some_and(|again| again == (source, port_be)) {
        set_address(ctx, is_ipv6, &source, port_be);
    }
    ALLOW
}

/// Returns address and port of an entry in `UDP_REPLIES`.
#[inline(always)]
fn read_reply(key: &UdpFlowKey) -> Option<([u32; 4], u16)> {
    let source = UDP_REPLIES.get_ptr(key)?;
    // SAFETY: a live map value. Volatile: it is read twice.
    unsafe {
        let address = ptr::read_volatile((&raw const (*source).address).cast::<[u32; 4]>());
        Some((address, ptr::read_volatile(&raw const (*source).port_be)))
    }
}

/// Shows the address that the program asked for to getpeername.
#[inline(always)]
pub fn show_asked_peer(ctx: BpfSockAddr, is_ipv6: bool) {
    if let Some(socket) = find_socket(ctx) {
        show_original(ctx, is_ipv6, socket);
    }
}

/// Replaces the address of the call by the one that the socket asked for, if it is that of its backend.
#[inline(always)]
fn show_original(ctx: BpfSockAddr, is_ipv6: bool, socket: &UdpSocket) {
    if socket.backend_port_be == ctx.port_be()
        && socket.original_port_be != 0
        && address_words(socket.backend_address) == address(ctx, is_ipv6)
    {
        let original = address_words(socket.original_address);
        set_address(ctx, is_ipv6, &original, socket.original_port_be);
    }
}

/// Returns a socket's entry, if it has any; no look-up takes place while no socket has one.
#[inline(always)]
fn find_socket(ctx: BpfSockAddr) -> Option<&'static UdpSocket> {
    if has_no_sockets() {
        return None;
    }
    // SAFETY: a live map value. It is replaced and removed only while this socket's lock is held.
    UDP_SOCKETS.get_ptr(ctx.socket_cookie()).map(|socket| unsafe { &*socket })
}

/// Stores a socket's entry. Returns false if there is no memory for it.
///
/// A present entry is replaced, so that user space reads no mixture of two.
#[inline(always)]
fn store_socket(cookie: u64, socket: &UdpSocket) -> bool {
    let is_new = UDP_SOCKETS.get_ptr(cookie).is_none();
    if UDP_SOCKETS.insert(cookie, socket, 0).is_err() {
        return false;
    }
    if is_new {
        increment_control(abi::CONTROL_UDP_SOCKETS);
    }
    true
}

/// Removes a socket's entry, if it has any.
#[inline(always)]
fn remove_socket(cookie: u64) {
    // The look-up comes first, as a removal takes a lock of the map.
    if !has_no_sockets()
        && UDP_SOCKETS.get_ptr(cookie).is_some()
        && UDP_SOCKETS.remove(cookie).is_ok()
    {
        add_to_control(abi::CONTROL_UDP_SOCKETS, MINUS_ONE);
    }
}

/// Returns true if no socket has an entry.
#[inline(always)]
fn has_no_sockets() -> bool {
    let Some(sockets) = CONTROL.get_ptr(abi::CONTROL_UDP_SOCKETS) else { return true };
    // SAFETY: a word of a live map value. Volatile, as other CPUs change it.
    unsafe { ptr::read_volatile(sockets) == 0 }
}

/// Builds the key of this socket and an address.
#[inline(always)]
fn flow_key(ctx: BpfSockAddr, address: [u8; 16], port_be: u16) -> UdpFlowKey {
    UdpFlowKey { socket_cookie: ctx.socket_cookie(), address, port_be, reserved: 0, spare: 0 }
}

/// Returns the address of the call; IPv4 as a mapped one.
#[inline(always)]
fn address(ctx: BpfSockAddr, is_ipv6: bool) -> [u32; 4] {
    if is_ipv6 { ctx.ipv6() } else { ctx.ipv4() }
}

/// Replaces address and port of the call.
#[inline(always)]
fn set_address(ctx: BpfSockAddr, is_ipv6: bool, words: &[u32; 4], port_be: u16) {
    if is_ipv6 {
        ctx.set_ipv6(words);
    } else {
        ctx.set_ipv4(words);
    }
    ctx.set_port_be(port_be);
}
