//! The eBPF programs: maps and program entries. Each entry calls one function of a file named after its hook;
//! `udp` has sendmsg and recvmsg.
//!
//! Helpers and hooks used, and their kernels: socket storage in connect and bind (5.9), netns cookie in connect and
//! bind (5.7), ring buffer (5.8), getpeername (5.8), sock_release (5.9), sendmsg (4.18), recvmsg (5.2). Optional
//! helpers are used only behind a constant that the agent sets, or in a program that older kernels do without (`end`).
#![no_std]
#![no_main]
#![allow(
    internal_features,
    reason = "BPF has no compare-and-swap, so `AtomicU64` lacks `fetch_add`"
)]
#![feature(core_intrinsics)]

use aya_ebpf::{
    macros::{cgroup_skb, cgroup_sock, cgroup_sock_addr, sk_lookup, sock_ops},
    programs::{SkBuffContext, SkLookupContext, SockAddrContext, SockContext, SockOpsContext},
};
use datapath::abi;

mod backend_choice;
mod bind;
mod bound_connects;
mod close;
mod connect;
mod connect_records;
mod count;
mod maps;
mod packet;
mod refusal;
mod sk_lookup;
mod sock_addr;
mod sock_ops;
mod udp;

/// Mark in the object's read-only data, by which the agent learns the ABI version before it loads the object.
#[unsafe(no_mangle)]
#[used]
static ABI_MARK: [u8; 16] = abi::ABI_MARK;

#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 4] = *b"GPL\0";

#[cgroup_sock_addr(connect4)]
pub fn connect4(ctx: SockAddrContext) -> i32 {
    connect::connect4(ctx.sock_addr)
}

#[cgroup_sock_addr(connect6)]
pub fn connect6(ctx: SockAddrContext) -> i32 {
    connect::connect6(ctx.sock_addr)
}

#[cgroup_sock_addr(getpeername4)]
pub fn getpeername4(ctx: SockAddrContext) -> i32 {
    connect::getpeername4(ctx.sock_addr)
}

#[cgroup_sock_addr(getpeername6)]
pub fn getpeername6(ctx: SockAddrContext) -> i32 {
    connect::getpeername6(ctx.sock_addr)
}

#[cgroup_sock_addr(sendmsg4)]
pub fn sendmsg4(ctx: SockAddrContext) -> i32 {
    udp::sendmsg4(ctx.sock_addr)
}

#[cgroup_sock_addr(sendmsg6)]
pub fn sendmsg6(ctx: SockAddrContext) -> i32 {
    udp::sendmsg6(ctx.sock_addr)
}

#[cgroup_sock_addr(recvmsg4)]
pub fn recvmsg4(ctx: SockAddrContext) -> i32 {
    udp::recvmsg4(ctx.sock_addr)
}

#[cgroup_sock_addr(recvmsg6)]
pub fn recvmsg6(ctx: SockAddrContext) -> i32 {
    udp::recvmsg6(ctx.sock_addr)
}

#[cgroup_sock(sock_release)]
pub fn release(ctx: SockContext) -> i32 {
    connect::release_socket(ctx.sock)
}

#[cgroup_sock_addr(bind4)]
pub fn bind4(ctx: SockAddrContext) -> i32 {
    bind::bind4(ctx.sock_addr)
}

#[cgroup_sock_addr(bind6)]
pub fn bind6(ctx: SockAddrContext) -> i32 {
    bind::bind6(ctx.sock_addr)
}

#[sock_ops]
pub fn sockets(ctx: SockOpsContext) -> u32 {
    sock_ops::handle_sock_op(ctx.ops)
}

#[sock_ops]
pub fn kubelet(ctx: SockOpsContext) -> u32 {
    sock_ops::mark_kubelet_connection(ctx.ops)
}

#[cgroup_skb(ingress)]
pub fn ingress(ctx: SkBuffContext) -> i32 {
    count::ingress(&ctx)
}

#[cgroup_skb(ingress)]
pub fn suspects(ctx: SkBuffContext) -> i32 {
    count::suspects(&ctx)
}

#[cgroup_skb(egress)]
pub fn egress(ctx: SkBuffContext) -> i32 {
    count::egress(&ctx)
}

/// Reads buffered segments of a new HTTP/1 connection; `sockets` jumps here.
#[sock_ops]
pub fn sockets_late(ctx: SockOpsContext) -> u32 {
    count::opened_late(ctx.ops);
    1
}

/// Reads buffered segments of a new HTTP/2 connection; `sockets_late` jumps here.
#[sock_ops]
pub fn sockets_late_http2(ctx: SockOpsContext) -> u32 {
    count::opened_late_http2(ctx.ops);
    1
}

/// Begins the request of a new connection to an opaque port; `sockets` jumps here.
#[sock_ops]
pub fn sockets_other(ctx: SockOpsContext) -> u32 {
    count::opened_other(ctx.ops);
    1
}

/// Reads the rest of a long HTTP/1 segment; `ingress` jumps here.
#[cgroup_skb(ingress)]
pub fn ingress_more(ctx: SkBuffContext) -> i32 {
    count::ingress_more(&ctx)
}

/// Reads the rest of a long HTTP/1 segment; `egress` jumps here.
#[cgroup_skb(egress)]
pub fn egress_more(ctx: SkBuffContext) -> i32 {
    count::egress_more(&ctx)
}

/// Reads the rest of a long HTTP/2 segment; `ingress_http2` jumps here.
#[cgroup_skb(ingress)]
pub fn ingress_more_http2(ctx: SkBuffContext) -> i32 {
    count::ingress_more_http2(&ctx)
}

/// Reads the rest of a long HTTP/2 segment; `egress_http2` jumps here.
#[cgroup_skb(egress)]
pub fn egress_more_http2(ctx: SkBuffContext) -> i32 {
    count::egress_more_http2(&ctx)
}

/// Buffers a segment that cannot be read yet; `ingress`, `ingress_http2` and `suspects` jump here.
#[cgroup_skb(ingress)]
pub fn ingress_keep(ctx: SkBuffContext) -> i32 {
    count::ingress_keep(&ctx)
}

/// Reads buffered HTTP/1 segments after a gap was filled; `ingress` and `ingress_keep` jump here.
#[cgroup_skb(ingress)]
pub fn ingress_late(ctx: SkBuffContext) -> i32 {
    count::ingress_late(&ctx)
}

/// Reads buffered HTTP/2 segments after a gap was filled; `ingress_http2`, `ingress_late` and `ingress_keep` jump here.
#[cgroup_skb(ingress)]
pub fn ingress_late_http2(ctx: SkBuffContext) -> i32 {
    count::ingress_late_http2(&ctx)
}

/// Counts requests of HTTP/2; `ingress` and the other HTTP/2 programs of its direction jump here.
#[cgroup_skb(ingress)]
pub fn ingress_http2(ctx: SkBuffContext) -> i32 {
    count::ingress_http2(&ctx)
}

/// Counts responses of HTTP/2; `egress` and `egress_more_http2` jump here.
#[cgroup_skb(egress)]
pub fn egress_http2(ctx: SkBuffContext) -> i32 {
    count::egress_http2(&ctx)
}

/// Estimates requests of other protocols, and counts bytes of opaque ports; `ingress`, `ingress_http2` and
/// `ingress_keep` jump here.
#[cgroup_skb(ingress)]
pub fn ingress_other(ctx: SkBuffContext) -> i32 {
    count::ingress_other(&ctx)
}

/// Estimates responses of other protocols, and counts bytes of opaque ports; `egress` jumps here.
#[cgroup_skb(egress)]
pub fn egress_other(ctx: SkBuffContext) -> i32 {
    count::egress_other(&ctx)
}

#[sk_lookup]
pub fn ports(ctx: SkLookupContext) -> u32 {
    sk_lookup::assign_activator_listener(&ctx)
}

/// Closes stale connections; written out, since `aya-ebpf` has no macro for iterator programs.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
pub extern "C" fn end(ctx: *mut close::TcpIterContext) -> i32 {
    close::close_if_unused(ctx)
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
