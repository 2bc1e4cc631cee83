//! Counts requests in flight, from the packets of pods' connections.
//!
//! [`datapath::h1`], [`datapath::h2`] and [`datapath::opaque_estimate`] interpret segments, in whatever order they
//! arrive. This file and the files below it pass them the segments, and turn their results into counters. A segment is
//! judged by our own next-sequence words, since the socket's may stand still while its program holds it. Heads, chunk
//! sizes and frame headers are copied in windows; bodies are not read. Heads are read before the connection's lock is
//! taken (unlocked read). The result is committed only if, under the lock, the direction still is where the read began.
//!
//! Segments that arrive before their connection is established, or behind a gap that matters, are buffered in `KEPT`
//! under sender and sequence number. They are read when `open_connection` runs for the connection, or the gap before
//! them is filled.
//!
//! Each protocol has programs of its own, to which `ingress`, `egress` and `sockets` jump: the verifier checks one
//! protocol at a time.

mod counters;
mod http1;
mod http2;
mod idle;
mod opaque;
mod segment_bytes;

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_TCP_SYN_RECV, bpf_sock, bpf_sock_ops},
    helpers::generated::{
        bpf_get_netns_cookie, bpf_skb_load_bytes, bpf_spin_lock, bpf_spin_unlock, bpf_tcp_sock,
    },
    maps::ProgramArray,
    programs::{SkBuffContext, SockOpsContext},
};
use datapath::{
    abi::{self, BufferedSegmentKey, PendingSegment, ProbeKey, ServerSocket},
    h1::{Http1Events, SeekResult, UnlockedResponseRead, kubelet_probe},
    load_balancing,
};

use self::counters::PodCounterRows;
pub use self::{
    http1::{egress_more, ingress_more},
    http2::{
        egress as egress_http2, egress_more as egress_more_http2, ingress as ingress_http2,
        ingress_late as ingress_late_http2, ingress_more as ingress_more_http2,
        opened_late as opened_late_http2,
    },
    opaque::{egress as egress_other, ingress as ingress_other, opened as opened_other},
};
use crate::{
    maps::{
        CONNS, EGRESS, HEAD, INGRESS, KEPT, MINUS_ONE, NODE, POD_STATE, PODS, PROBES, SOCKETS,
        STREAMS, atomic_add, has_netns_cookie, monotonic_ns,
    },
    packet::{self, PacketSegment},
};

/// Flag: 1 if packet programs may ask for a netns cookie (6.15). Set by the agent before loading.
#[unsafe(no_mangle)]
static HAVE_SKB_COOKIE: u8 = 0;

/// Verdict: let the packet pass.
const PASS: i32 = 1;
/// Index of program `suspects` in `INGRESS`.
const PROGRAM_SUSPECTS: u32 = 1;
/// Index of the programs for HTTP/2, in `INGRESS` and `EGRESS`.
const PROGRAM_HTTP2: u32 = 2;
/// Index of the programs for opaque estimates and for connections to opaque ports, in `INGRESS`, `EGRESS` and
/// `SOCKETS`.
const PROGRAM_OTHER: u32 = 3;
/// Index of the programs for buffered segments of HTTP/1, in `INGRESS` and `SOCKETS`.
const PROGRAM_LATE: u32 = 4;
/// Index of the programs for buffered segments of HTTP/2, in `INGRESS` and `SOCKETS`.
const PROGRAM_LATE_HTTP2: u32 = 5;
/// Index of the programs for the rest of a long HTTP/1 segment, in `INGRESS` and `EGRESS`.
const PROGRAM_MORE: u32 = 6;
/// Index of the programs for the rest of a long HTTP/2 segment, in `INGRESS` and `EGRESS`.
const PROGRAM_MORE_HTTP2: u32 = 7;
/// Index of program `ingress_keep` in `INGRESS`.
const PROGRAM_KEEP: u32 = 8;
/// Time from a probe's first bytes at a listener to its connection being established, at most, in ns.
const PROBE_MARK_NS: u64 = 1_000_000_000;
/// Steps in one run of a program for the rest of a segment.
const MAX_STEPS: u32 = 256;
/// Result of such a step: the whole segment is read.
const STEP_DONE: u32 = 0;
/// Result of such a step: there is more of the segment to read.
const STEP_MORE: u32 = 1;
/// Result of such a step: the first program of the packet must continue.
const STEP_RESTART: u32 = 2;
/// Distance in bytes beyond which a segment lies outside every receive window.
const MAX_WINDOW_BYTES: i32 = 32 << 20;
const AF_INET6: u32 = 10;

/// Result of reading a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SegmentReadEnd {
    /// The whole segment is read.
    Done,
    /// Bytes before the segment are missing.
    Gap,
    /// The segment has more windows than one run may read.
    Budget,
    /// The protocol has changed, and another program reads on.
    Changed,
}

/// Starts counting a connection to a port of the pod with this slot. It is established now, and begins with this
/// protocol.
#[inline(always)]
pub fn open_connection(
    ops: *mut bpf_sock_ops,
    conn: &mut ServerSocket,
    slot: u32,
    protocol: u32,
    is_suspect: bool,
) {
    // Volatile: the verifier rewrites accesses to the context, and refuses wider or merged ones.
    // SAFETY: a live context; single words.
    let (rcv_nxt, snd_nxt) = unsafe {
        (
            ptr::read_volatile(&raw const (*ops).rcv_nxt),
            ptr::read_volatile(&raw const (*ops).snd_nxt),
        )
    };
    // Helpers run before the lock, since none may be called while it is held.
    let now_ns = monotonic_ns();
    lock(conn);
    conn.http.h1.open(rcv_nxt, snd_nxt);
    conn.http.flags =
        abi::HTTP_AWAITS_FIRST_REQUEST | if is_suspect { abi::HTTP_MAYBE_PROBE } else { 0 };
    conn.http.protocol = protocol;
    conn.http.last_client_packet_ns = now_ns;
    conn.http.requests_in_flight = 0;
    conn.pending = [PendingSegment::default(); abi::PENDING_SEGMENTS_MAX];
    conn.http.events = 0;
    conn.http.counted_rx_seq = rcv_nxt;
    conn.http.counted_tx_seq = snd_nxt;
    conn.http.tx_end_seq = snd_nxt;
    unlock(conn);
    // Packets reach a connection a moment before it is established, on other CPUs, and look at the pod slot without the
    // lock. So it is set last; segments that they buffered until then are found by `read_first_requests`.
    lock(conn);
    conn.pod_slot = slot;
    conn.flags = abi::CONN_OPEN;
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            atomic_add(&raw mut (*pod).connections, 1);
            atomic_add(&raw mut (*pod).awaiting_first_request, 1);
            // The kubelet probes every second; its connections must not make an idle pod look active.
            if !is_suspect {
                (*pod).last_activity_ns = now_ns;
            }
        }
    }
}

/// Reads segments buffered at the listener that belong to the packet with which this connection was established.
#[inline(always)]
pub fn read_first_requests(ops: *mut bpf_sock_ops, conn: &mut ServerSocket) {
    let Some(segment) = early_segment(ops) else { return };
    if !segment_bytes::list_pending(conn, segment) {
        return;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = SOCKETS.tail_call(&SockOpsContext::new(ops), PROGRAM_LATE) };
}

/// Begins the request of a connection to an opaque port, in a program of its own for the verifier.
#[inline(always)]
pub fn begin_opaque_connection(ops: *mut bpf_sock_ops) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = SOCKETS.tail_call(&SockOpsContext::new(ops), PROGRAM_OTHER) };
}

/// Returns the segment buffered at the listener that came with the packet with which this connection was established.
#[inline(always)]
fn early_segment(ops: *mut bpf_sock_ops) -> Option<PendingSegment> {
    let seq = packet::first_payload_seq(ops)?;
    let key =
        BufferedSegmentKey { remote: remote_address(ops), remote_port: remote_port(ops), seq };
    let buffered = KEPT.get_ptr(key)?;
    // SAFETY: a live map value and a live context; single words.
    let (len, syn, flags) = unsafe { ((*buffered).len, (*buffered).syn, (*ops).skb_tcp_flags) };
    // Without fast open, data of a SYN is dropped, and the packet at hand is another one.
    if (syn != 0) != (flags & packet::SYN_FLAG != 0) {
        return None;
    }
    Some(PendingSegment { seq, len })
}

/// Reads segments buffered before the connection was established, in sock_ops.
#[inline(always)]
pub fn opened_late(ops: *mut bpf_sock_ops) {
    let mut round = 0;
    while round < MAX_STEPS && opened_pending_step(ops) != 0 {
        round += 1;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = SOCKETS.tail_call(&SockOpsContext::new(ops), PROGRAM_LATE_HTTP2) };
}

/// Reads segments buffered until the gap before them was filled.
#[inline(always)]
pub fn ingress_late(ctx: &SkBuffContext) -> i32 {
    let mut round = 0;
    while round < MAX_STEPS && pending_step(ctx.as_ptr().cast()) != 0 {
        round += 1;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_LATE_HTTP2) };
    PASS
}

/// Reads one window of a buffered segment; returns 1 while there is more. A function of its own for the verifier.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pending_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb) else { return 0 };
    let Some(sender) = packet::parse_sender(skb) else { return 0 };
    let Some(draft) = http1::request_read() else { return 0 };
    if conn.http.protocol != abi::PROTOCOL_HTTP1 {
        return 0;
    }
    u32::from(http1::read_pending(conn, socket(skb), draft, sender, http1::read_lines_or_bytes))
}

/// Reads one window of a buffered segment in sock_ops; returns 1 while there is more.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_pending_step(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = CONNS.get(socket) else { return 0 };
    if conn.http.protocol != abi::PROTOCOL_HTTP1 {
        return 0;
    }
    // SAFETY: a live map value, and the socket is locked.
    let draft = unsafe { &mut *(&raw mut conn.response_read) };
    let sender = (remote_address(ops), remote_port(ops));
    let read = |draft: &mut UnlockedResponseRead| {
        if !draft.may_begin_with_lines() || opened_lines(ops) == 0 {
            opened_bytes(ops);
        }
    };
    u32::from(http1::read_pending(conn, socket, draft, sender, read))
}

/// Reads whole lines in the storage of the socket that was established; returns the number of bytes.
///
/// A function of its own: the verifier checks its many words once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_lines(ops: *mut bpf_sock_ops) -> u32 {
    let Some(conn) = opened_connection(ops) else { return 0 };
    conn.response_read.read_lines_by(true, |at| classify_opened_line(ops, at))
}

/// Classifies the line at byte `at` there.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn classify_opened_line(ops: *mut bpf_sock_ops, at: u32) -> u32 {
    let Some(conn) = opened_connection(ops) else { return 0 };
    conn.response_read.classify_line(at)
}

/// Reads bytes there by the slow path. A function of its own for the verifier, as above.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_bytes(ops: *mut bpf_sock_ops) -> u32 {
    if let Some(conn) = opened_connection(ops) {
        conn.response_read.read_bytes(true);
    }
    0
}

/// Returns the storage of the socket that was established.
#[inline(always)]
fn opened_connection(ops: *mut bpf_sock_ops) -> Option<&'static mut ServerSocket> {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    CONNS.get(socket)
}

/// Returns true if a request's head has the kubelet's User-Agent.
#[inline(always)]
fn has_probe_user_agent(skb: *mut __sk_buff, segment: &PacketSegment) -> bool {
    let Some(head) = HEAD.get_ptr_mut(0) else { return false };
    let Some(len) = packet::nonzero_at_most(segment.len, kubelet_probe::SEARCHED_BYTES) else {
        return false;
    };
    // SAFETY: the map value has room for `SEARCHED_BYTES` bytes and more, and `len` is at most that.
    if unsafe { bpf_skb_load_bytes(skb.cast(), segment.offset, head.cast(), len) } != 0 {
        return false;
    }
    let bytes = head.cast::<u8>();
    kubelet_probe::is_kubelet_probe(len, |offset| {
        // SAFETY: the search ends 24 bytes before `HEAD` does.
        u64::from_le(unsafe { ptr::read_unaligned(bytes.add(offset).cast::<u64>()) })
    })
}

/// Ends the counting of a connection that `open_connection` has begun: it is closed, or turns out to be a probe's.
#[inline(always)]
pub fn close_connection(conn: &mut ServerSocket, socket: *mut c_void) {
    if conn.http.protocol == abi::PROTOCOL_TCP {
        opaque::end_request(conn);
    } else {
        end_requests(conn, socket, false);
    }
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.pod_slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            atomic_add(&raw mut (*pod).connections, MINUS_ONE);
            if conn.http.flags & abi::HTTP_AWAITS_FIRST_REQUEST != 0 {
                atomic_add(&raw mut (*pod).awaiting_first_request, MINUS_ONE);
            }
            if conn.http.protocol == abi::PROTOCOL_OPAQUE {
                atomic_add(&raw mut (*pod).opaque_connections, MINUS_ONE);
            }
        }
    }
    conn.http.flags = 0;
    // Packets that are still on their way up find no row here, so they count nothing.
    conn.pod_slot = 0;
}

/// Counts requests in a packet from the client.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    // Before the look-up: a connection that counts gets its storage before it leaves this state.
    let is_opening = is_being_established(skb);
    // The storage comes first: most sockets of a node have none, and cost no more than this look-up.
    let Some(conn) = connection_of(skb) else {
        if is_opening {
            handle_opening_data(ctx);
        }
        return PASS;
    };
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    // A bare acknowledgement moves no parser: only segments with bytes do.
    if segment.len == 0 {
        return PASS;
    }
    if conn.pod_slot == 0 {
        if conn.flags & abi::CONN_LISTENS != 0 {
            handle_early_data(ctx, conn);
            return PASS;
        }
        // The plain read above may be older than `open_connection`: under the lock the answer is exact.
        if counted_pod_slot(conn) == 0 {
            if is_opening && conn.flags & abi::CONN_UNCOUNTED == 0 {
                buffer_early_data(ctx);
            }
            return PASS;
        }
    }
    // Bytes that the socket drops must not move the parsers: they would lose the boundaries of messages.
    if is_forged(conn, skb, &segment) {
        return PASS;
    }
    // The connection's first bytes show if the client on the node is the kubelet, or another program.
    if conn.http.flags & abi::HTTP_MAYBE_PROBE != 0 && segment.seq == conn.http.h1.rx.next {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, PROGRAM_SUSPECTS) };
        // Reached only if the jump failed. Counted as a client's, a probe at worst keeps the pod awake.
        conn.http.flags &= !abi::HTTP_MAYBE_PROBE;
    }
    match conn.http.protocol {
        abi::PROTOCOL_HTTP1 => http1::ingress(ctx, conn, &segment),
        // SAFETY: the programs behind the array have this context's type.
        abi::PROTOCOL_HTTP2 => unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_HTTP2) },
        // SAFETY: the programs behind the array have this context's type.
        _ => unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_OTHER) },
    }
    PASS
}

/// Returns true if the socket will refuse a segment, although its sequence number may be the next one.
///
/// Such a segment acknowledges bytes that were never sent, or nothing, or lies far beyond every window. `tx_end_seq`
/// counts bytes before they leave, so no true acknowledgement is ahead of it; a FIN takes one number of the sequence.
#[inline(always)]
fn is_forged(conn: &ServerSocket, skb: *mut __sk_buff, segment: &PacketSegment) -> bool {
    let Some(ack) = segment.ack else { return !segment.syn };
    let is_http2 = conn.http.protocol == abi::PROTOCOL_HTTP2;
    if !is_http2 && ack.wrapping_sub(conn.http.tx_end_seq) as i32 > 1 {
        return true;
    }
    let ahead = segment.seq.wrapping_sub(conn.http.h1.rx.next) as i32;
    // The rare case: the segment is behind a gap, or its direction is not followed here.
    ahead > 0 && is_beyond_window(skb, segment.seq)
}

/// Returns true if a sequence number is farther ahead than any window reaches: `tcp_rmem` allows 6 MiB, operators 32.
#[inline(always)]
fn is_beyond_window(skb: *mut __sk_buff, seq: u32) -> bool {
    match expected_seq(skb) {
        Some(next) => seq.wrapping_sub(next) as i32 > MAX_WINDOW_BYTES,
        None => false,
    }
}

/// Returns the sequence number that the packet's socket expects next; it stands still while a program holds the socket.
#[inline(always)]
fn expected_seq(skb: *mut __sk_buff) -> Option<u32> {
    let socket = socket(skb);
    if socket.is_null() {
        return None;
    }
    // SAFETY: a socket of the context, not null.
    let tcp = unsafe { bpf_tcp_sock(socket.cast()) };
    // SAFETY: not null; a single word.
    if tcp.is_null() { None } else { Some(unsafe { (*tcp).rcv_nxt }) }
}

/// Counts responses in a packet to the client.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(conn) = connection_of(skb).filter(|conn| conn.pod_slot != 0) else { return PASS };
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let end = segment.seq.wrapping_add(segment.len);
    // Before anything can return: `is_forged` compares acknowledgements with this word.
    if end.wrapping_sub(conn.http.tx_end_seq) as i32 > 0 {
        conn.http.tx_end_seq = end;
    }
    match conn.http.protocol {
        // Most packets of a long response lie inside its body, and need no lock.
        abi::PROTOCOL_HTTP1
            if !segment.fin && conn.http.h1.tx.is_inside_body(segment.seq, segment.len) => {}
        abi::PROTOCOL_HTTP1 => http1::egress(ctx, conn, &segment),
        // SAFETY: the programs behind the array have this context's type.
        abi::PROTOCOL_HTTP2 => unsafe { _ = EGRESS.tail_call(ctx, PROGRAM_HTTP2) },
        // SAFETY: the programs behind the array have this context's type.
        _ => unsafe { _ = EGRESS.tail_call(ctx, PROGRAM_OTHER) },
    }
    PASS
}

/// Returns the row of the pod that a connection counts for; 0 means none.
///
/// The lock makes the answer exact where the connection is being established. Either this call sees the row, or
/// `open_connection` runs later and sees what was buffered before.
#[inline(always)]
fn counted_pod_slot(conn: &mut ServerSocket) -> u32 {
    lock(conn);
    // SAFETY: a word of a live map value. Volatile, as it was read before.
    let slot = unsafe { ptr::read_volatile(&raw const conn.pod_slot) };
    unlock(conn);
    slot
}

/// Handles data at a listener: the connection exists only once this very packet has been processed.
#[inline(always)]
fn handle_early_data(ctx: &SkBuffContext, conn: &ServerSocket) {
    // SAFETY: only the presence of the entry is used.
    if unsafe { PODS.get(conn.netns_cookie) }.is_some() {
        buffer_early_data(ctx);
    }
}

/// Returns true if the packet's socket is a connection that is being established, on a kernel where those begin without
/// storage.
///
/// It can be found by packets on other CPUs a moment before `handle_established` runs for it.
#[inline(always)]
fn is_being_established(skb: *mut __sk_buff) -> bool {
    let socket = socket(skb).cast::<bpf_sock>();
    if !has_netns_cookie() || socket.is_null() {
        return false;
    }
    // SAFETY: a socket of the context, not null; a single word. Volatile, so that it is read before the look-up.
    unsafe { ptr::read_volatile(&raw const (*socket).state) == BPF_TCP_SYN_RECV }
}

/// Handles data of a connection that is being established and has no storage.
///
/// With storage, either this packet or `handle_established` sees under the lock that the other was first. If the
/// connection does not count, its storage stays unused.
#[inline(always)]
fn handle_opening_data(ctx: &SkBuffContext) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if packet::parse_segment(skb).is_some_and(|segment| segment.len > 0)
        && may_be_of_pod(skb)
        && CONNS.get_or_zero_shared(socket(skb)).is_some()
    {
        buffer_early_data(ctx);
    }
}

/// Returns false if the packet's socket is known not to belong to a pod of Rouse.
#[inline(always)]
fn may_be_of_pod(skb: *mut __sk_buff) -> bool {
    // SAFETY: a live static; volatile because the agent overwrites it before loading.
    if unsafe { ptr::read_volatile(&HAVE_SKB_COOKIE) } == 0 {
        return true;
    }
    // SAFETY: the helper takes the context as it is. Where it is missing, the verifier drops this branch. Only the
    // presence of the entry is used.
    unsafe { PODS.get(bpf_get_netns_cookie(skb.cast())) }.is_some()
}

/// Buffers data of a connection that does not exist yet, or is being established.
#[inline(always)]
fn buffer_early_data(ctx: &SkBuffContext) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some((remote, _)) = packet::parse_sender(skb) else { return };
    // A client on the node itself may be the kubelet, whose probes are recognized by `suspects`.
    // SAFETY: only the presence of the entry is used.
    if unsafe { NODE.get(remote) }.is_some() {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, PROGRAM_SUSPECTS) };
    }
    jump_to_buffering(ctx);
}

/// Jumps to the program that buffers a segment. Returns only if the jump fails.
#[inline(always)]
fn jump_to_buffering(ctx: &SkBuffContext) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_KEEP) };
}

/// Buffers a segment that cannot be read yet: it came to a listener, or bytes before it are missing.
///
/// A program of its own, since calls of functions need room on the stack.
#[inline(always)]
pub fn ingress_keep(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    // Buffered before the look at the slot: a connection that opens sets it first, and then reads what is buffered.
    let is_kept = segment_bytes::buffer_segment(skb, &segment);
    let Some(conn) = connection_of(skb) else { return PASS };
    if counted_pod_slot(conn) == 0 {
        return PASS;
    }
    if conn.http.protocol == abi::PROTOCOL_TCP {
        // The connection was established meanwhile, and its bytes are not read.
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_OTHER) };
        return PASS;
    }
    if is_kept
        && segment_bytes::list_pending(conn, PendingSegment { seq: segment.seq, len: segment.len })
    {
        // Another CPU may have filled the gap before this segment was noted; then no later packet would read it.
        let program = if conn.http.protocol == abi::PROTOCOL_HTTP1 {
            PROGRAM_LATE
        } else {
            PROGRAM_LATE_HTTP2
        };
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, program) };
        return PASS;
    }
    // No room: the bytes are lost, and boundaries with them.
    match conn.http.protocol {
        abi::PROTOCOL_HTTP1 => http1::desync(conn, true),
        abi::PROTOCOL_HTTP2 => {
            if let Some(streams) = STREAMS.get(socket(skb)) {
                http2::desync_requests(conn, streams);
            }
        }
        _ => {}
    }
    PASS
}

/// Looks for the kubelet's User-Agent in the first data of a connection from the node itself.
///
/// A program of its own: the search is long, and the verifier would follow it again from each path to it.
#[inline(always)]
pub fn suspects(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let is_probe = segment.len > 0 && has_probe_user_agent(skb, &segment);
    let Some(conn) = connection_of(skb) else { return PASS };
    if conn.pod_slot == 0 {
        match packet::parse_sender(skb) {
            // When it is established, its connection is skipped like that of any other probe.
            Some((remote, remote_port)) if is_probe => {
                let key = ProbeKey { remote, remote_port };
                let _counts_then = PROBES.insert(key, monotonic_ns() + PROBE_MARK_NS, 0);
            }
            _ => jump_to_buffering(ctx),
        }
        return PASS;
    }
    // Cleared before the jump back, or the first program would come here again.
    conn.http.flags &= !abi::HTTP_MAYBE_PROBE;
    if is_probe {
        // From now on no program counts it.
        close_connection(conn, socket(skb));
        conn.flags = 0;
    } else {
        // Index 0 is `ingress`, which now reads the packet as any client's.
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, 0) };
    }
    PASS
}

/// Ends requests in flight: the server sends nothing more (`graceful`), or the connection is gone.
#[inline(always)]
fn end_requests(conn: &mut ServerSocket, socket: *mut c_void, graceful: bool) {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    // Looked up before the lock, since the look-up is a helper.
    let streams =
        if conn.http.protocol == abi::PROTOCOL_HTTP2 { STREAMS.get(socket) } else { None };
    let now_ns = monotonic_ns();
    lock(conn);
    match conn.http.protocol {
        abi::PROTOCOL_HTTP1 => {
            let h1 = &mut conn.http.h1;
            // Body bytes that the fast path of `egress` passed over are accounted for first.
            let _nothing_to_read = h1.tx.seek(conn.http.tx_end_seq, 0);
            conn.http.events |= h1.after_response_seek();
            let status = h1.tx.status;
            conn.http.events |= h1.close(graceful);
            let events = take_events(conn);
            rows.count_http1(conn, events, status, now_ns);
            rows.add_bytes(conn);
        }
        abi::PROTOCOL_HTTP2 => {
            if let Some(streams) = streams {
                let aborted = streams.close();
                rows.count_aborted(conn, aborted, now_ns);
                rows.add_bytes_until(conn, streams.rx.next, streams.tx.next);
            }
        }
        _ => {
            let aborted = u32::from(conn.http.opaque_estimate.close());
            rows.count_aborted(conn, aborted, now_ns);
            rows.add_bytes(conn);
        }
    }
    unlock(conn);
}

/// Switches a connection whose protocol cannot be followed to an opaque estimate.
#[inline(always)]
fn switch_to_opaque(conn: &mut ServerSocket) {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let now_ns = monotonic_ns();
    lock(conn);
    let was_known = conn.http.protocol != abi::PROTOCOL_OPAQUE;
    if was_known {
        let in_flight = conn.http.requests_in_flight;
        rows.count_aborted(conn, in_flight, now_ns);
        opaque::begin_estimate(conn, 0);
    }
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.pod_slot).filter(|_| was_known) {
        // SAFETY: a live map value; a single word.
        unsafe { atomic_add(&raw mut (*pod).opaque_connections, 1) };
    }
}

/// Continues reading a segment, in up to [`MAX_STEPS`] steps.
///
/// Where the first program must continue, it jumps to `first`; where steps are used up, to `again`. The kernel allows
/// 33 jumps for a packet: returns `false` if they are used up.
#[inline(always)]
fn read_more(
    ctx: &SkBuffContext,
    programs: &ProgramArray,
    step: extern "C" fn(*mut __sk_buff) -> u32,
    [first, again]: [u32; 2],
) -> bool {
    let mut round = 0;
    while round < MAX_STEPS {
        match step(ctx.as_ptr().cast()) {
            STEP_DONE => return true,
            STEP_MORE => {}
            _ => {
                // SAFETY: the program behind the array has this context's type.
                unsafe { _ = programs.tail_call(ctx, first) };
                return true;
            }
        }
        round += 1;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = programs.tail_call(ctx, again) };
    false
}

/// Value of [`encode_seek`] for [`SeekResult::Done`].
const SEEK_DONE: u32 = u32::MAX;
/// Value of [`encode_seek`] for [`SeekResult::Gap`].
const SEEK_GAP: u32 = u32::MAX - 1;

/// Converts the place where reading continues into a number.
///
/// The caller stores it where the verifier knows nothing of it. The verifier then follows one path, instead of one for
/// each outcome.
#[inline(always)]
fn encode_seek(seek: SeekResult) -> u32 {
    match seek {
        SeekResult::Done => SEEK_DONE,
        SeekResult::Gap => SEEK_GAP,
        SeekResult::ReadAt(offset) => offset,
    }
}

/// Returns the arrival time of the packet, ns. Only the first program that handles it reads the clock.
#[inline(always)]
fn arrival_ns(conn: &mut ServerSocket, first: bool) -> u64 {
    if !first {
        // SAFETY: a word of a live map value.
        return unsafe { ptr::read_volatile(&raw const conn.http.last_client_packet_ns) };
    }
    let now_ns = monotonic_ns();
    conn.http.last_client_packet_ns = now_ns;
    now_ns
}

/// Returns and clears the events since the last call. Call with the lock held.
#[inline(always)]
fn take_events(conn: &mut ServerSocket) -> Http1Events {
    // SAFETY: a word of a live map value. Volatile: a value read from memory is unknown to the verifier. It then
    // follows one path from here, instead of one for each path that came here.
    unsafe {
        let events = ptr::read_volatile(&raw const conn.http.events);
        ptr::write_volatile(&raw mut conn.http.events, 0);
        events
    }
}

/// Takes the connection's lock. No helper may be called while it is held.
#[inline(always)]
fn lock(conn: &mut ServerSocket) {
    // SAFETY: a lock in a live map value, which the kernel knows by its type's name.
    unsafe { bpf_spin_lock((&raw mut conn.lock).cast()) };
}

/// Releases the connection's lock.
#[inline(always)]
fn unlock(conn: &mut ServerSocket) {
    // SAFETY: a lock in a live map value, which the kernel knows by its type's name.
    unsafe { bpf_spin_unlock((&raw mut conn.lock).cast()) };
}

/// Returns the packet's socket.
#[inline(always)]
fn socket(skb: *mut __sk_buff) -> *mut c_void {
    // SAFETY: a live context; the verifier turns the field into a socket pointer.
    unsafe { (*skb).__bindgen_anon_2.sk.cast() }
}

/// Returns the storage of the packet's socket.
#[inline(always)]
fn connection_of(skb: *mut __sk_buff) -> Option<&'static mut ServerSocket> {
    CONNS.get(socket(skb))
}

/// Returns the remote port, in host byte order.
#[inline(always)]
pub fn remote_port(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context. The field holds the port in network byte order in its upper half.
    u32::from_be(unsafe { ptr::read_volatile(&raw const (*ops).remote_port) })
}

/// Returns the remote address in memory order; IPv4 as an IPv4-mapped one.
#[inline(always)]
pub fn remote_address(ops: *mut bpf_sock_ops) -> [u32; 4] {
    // SAFETY: a live context; each word is read by itself and always, as the verifier requires.
    let (is_ipv6, ipv4, words) = unsafe {
        let is_ipv6 = ptr::read_volatile(&raw const (*ops).family) == AF_INET6;
        let ipv4 = ptr::read_volatile(&raw const (*ops).remote_ip4);
        let words = [
            ptr::read_volatile(&raw const (*ops).remote_ip6[0]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[1]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[2]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[3]),
        ];
        (is_ipv6, ipv4, words)
    };
    // An IPv6 socket with an IPv4 peer has a mapped address already, in the form that `packet::parse_sender` gives.
    if is_ipv6 { words } else { [0, 0, load_balancing::IPV4_MAPPED_WORD, ipv4] }
}
