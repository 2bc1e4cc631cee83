//! Binds of pods: a bind runs in its process's context, so it shows the listener's pod. A bind to loopback may be
//! widened to any address, so that clients outside the pod reach the server.

use core::ptr;

use aya_ebpf::{bindings::bpf_sock_addr, helpers::generated::bpf_get_current_cgroup_id};
use datapath::{
    abi::{self, ListenKey, ListenValue},
    load_balancing,
};

use crate::{
    maps::{CONNS, LISTEN, LISTENERS, PODS, atomic_add32, has_netns_cookie, pod_port_flags},
    sock_addr::{ALLOW, BpfSockAddr},
};

/// First byte of 127.0.0.0/8.
const LOOPBACK_NET: u8 = 127;

/// Handles a bind to an IPv4 address.
#[inline(always)]
pub fn bind4(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    let is_loopback = ctx.ipv4()[3] == u32::from_ne_bytes([LOOPBACK_NET, 0, 0, 1]);
    if handle_bind(ctx, is_loopback, abi::WIDENED_V4) {
        ctx.set_ipv4(&[0; 4]);
    }
    ALLOW
}

/// Handles a bind to an IPv6 address.
#[inline(always)]
pub fn bind6(ctx: *mut bpf_sock_addr) -> i32 {
    let ctx = BpfSockAddr(ctx);
    let is_loopback = ctx.ipv6() == [0, 0, 0, 1u32.to_be()];
    if handle_bind(ctx, is_loopback, abi::WIDENED_V6) {
        ctx.set_ipv6(&[0; 4]);
    }
    ALLOW
}

/// Handles a bind. Returns true if it is to be widened to any address.
///
/// Storage costs 1 µs, and most sockets that are bound are clients' or belong to pods of others. It is needed for a
/// widened bind, and where only the bind shows the namespace of a socket.
#[inline(always)]
fn handle_bind(ctx: BpfSockAddr, is_loopback: bool, family: u32) -> bool {
    // The kernel refuses the bind of a socket with a port, but only after this program. The flags of an open listener
    // or connection must stay, as its close counts by them.
    if !ctx.is_tcp() || ctx.local_port() != 0 {
        return false;
    }
    let netns_cookie = ctx.netns_cookie();
    let port = u32::from(u16::from_be(ctx.port_be()));
    let key = ListenKey { netns_cookie, port, reserved: 0 };
    let may_widen = is_loopback && is_widened_port(&key);
    let is_needed = may_widen || !has_netns_cookie();
    let socket = ctx.socket();
    let found = if is_needed { CONNS.get_or_zero(socket) } else { CONNS.get(socket) };
    let Some(conn) = found else { return false };
    conn.netns_cookie = netns_cookie;
    // SAFETY: the helper has no arguments and cannot fail.
    conn.cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    // An earlier bind may have failed after it was widened.
    conn.flags = 0;
    let widened = may_widen && claim_widening(&key, family);
    if widened {
        conn.flags = abi::CONN_WIDENED;
    }
    widened
}

/// Returns true for the serving port of a registered pod whose loopback binds are widened.
#[inline(always)]
fn is_widened_port(key: &ListenKey) -> bool {
    const WANTED: u16 = abi::POD_WIDEN_BIND;
    // SAFETY: the fields are read at once.
    let Some(pod) = (unsafe { PODS.get(key.netns_cookie) }) else { return false };
    u32::from(pod.port) == key.port && pod.flags & (WANTED | abi::POD_LISTENER_FOUND) == WANTED
}

/// Claims a family for a loopback bind that becomes one to any address. Returns true if it may become one.
///
/// The programs must have seen no other reachable listener open on the port. `POD_LISTENER_FOUND` would report one that
/// they did not see, but no agent sets it. Listeners widened in the same family share the port on purpose
/// (SO_REUSEPORT), or meet the same EADDRINUSE as without widening. One family only: a program that binds 127.0.0.1 and
/// ::1 one after the other would collide with itself, since `::` accepts IPv4 too.
#[inline(always)]
fn claim_widening(key: &ListenKey, family: u32) -> bool {
    let Ok(found) = listen_entry(key) else { return false };
    // SAFETY: a live map value; single words.
    unsafe {
        // The family is claimed here, at the bind: until listen, no counter would show it to a second bind.
        let others = (*found).families & abi::WIDENED_FAMILIES & !family;
        let free = others == 0 && (*found).reachable == (*found).widened;
        if free {
            (*found).families |= family;
        }
        free
    }
}

/// Returns the entry of a namespace and port, created if missing; or the word of `CONTROL` that counts the refusal.
#[inline(always)]
pub fn listen_entry(key: &ListenKey) -> Result<*mut ListenValue, u32> {
    const NOEXIST: u64 = 1;
    if let Some(found) = LISTEN.get_ptr_mut(key) {
        return Ok(found);
    }
    let entries = LISTENERS.get_ptr_mut(key.netns_cookie);
    // SAFETY: a live map value; a single word.
    let count = entries.map_or(0, |entries| unsafe { ptr::read_volatile(entries) });
    // A namespace beyond its share gets no further entry, except for the ports that matter for routing.
    if count >= abi::LISTEN_PER_NAMESPACE && !is_pod_port(key) {
        return Err(abi::CONTROL_LISTEN_OVER_QUOTA);
    }
    let fresh =
        ListenValue { reachable: 0, widened: 0, loopback: 0, families: 0, listening_since_ns: 0 };
    if LISTEN.insert(key, fresh, NOEXIST).is_ok() {
        match entries {
            Some(entries) => atomic_add32(entries, 1),
            None => {
                // Of two inserts at once one is not counted, until the agent counts the entries again.
                let _lost_a_race_or_full = LISTENERS.insert(key.netns_cookie, 1, NOEXIST);
            }
        }
    }
    LISTEN.get_ptr_mut(key).ok_or(abi::CONTROL_LISTEN_FULL)
}

/// Returns true for a port of a registered pod that counts.
#[inline(always)]
fn is_pod_port(key: &ListenKey) -> bool {
    // SAFETY: the fields are read at once.
    let Some(&pod) = (unsafe { PODS.get(key.netns_cookie) }) else { return false };
    pod_port_flags(pod, key).is_some()
}

/// Returns true if a listener on this address is reachable from its own namespace only.
#[inline(always)]
pub fn is_loopback(words: &[u32; 4]) -> bool {
    let mapped = load_balancing::is_ipv4_mapped(words) && words[3].to_ne_bytes()[0] == LOOPBACK_NET;
    mapped || *words == [0, 0, 0, 1u32.to_be()]
}
