//! Requests in flight, from the packets of pods' connections.
//!
//! [`common::h1`], [`common::h2`] and [`common::turns`] tell what segments mean, in any order they come; this file and
//! those below it bring them the segments and turn what they say into counts. A segment is judged by our own
//! next-sequence words, since the socket's own may stand still while its program holds it. Heads, chunk sizes and frame
//! headers are copied in windows; bodies are not read. Heads are read before the connection's lock is taken, and count only
//! if it stands with the lock held where it stood then.
//!
//! Data that comes before its connection is established, or behind a gap that matters, waits in `KEPT` under its
//! sender and sequence number, until `opened` or the segment before it calls for it.
//!
//! Each protocol has programs of its own, to which `ingress`, `egress` and `sockets` jump: the verifier walks through one
//! protocol at a time.

mod http1;
mod http2;
mod rows;
mod source;
mod turns;

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    helpers::generated::{bpf_skb_load_bytes, bpf_spin_lock, bpf_spin_unlock, bpf_tcp_sock},
    maps::ProgramArray,
    programs::{SkBuffContext, SockOpsContext},
};
use common::{
    abi::{self, Conn, KeptKey, Late, ProbeKey},
    flow,
    h1::{Happened, ResponseDraft, Seek, probe},
};

use self::rows::Rows;
pub use self::{
    http1::{egress_more, ingress_more},
    http2::{
        egress as egress_http2, egress_more as egress_more_http2, ingress as ingress_http2,
        ingress_late as ingress_late_http2, ingress_more as ingress_more_http2,
        opened_late as opened_late_http2,
    },
    turns::{egress as egress_other, ingress as ingress_other},
};
use crate::{
    maps::{
        EGRESS, HEAD, INGRESS, KEPT, NODE, POD_STATE, PODS, PROBES, SOCKETS, STREAMS, add, now,
    },
    packet::{self, Segment},
};

/// Verdict: let the packet pass.
const PASS: i32 = 1;
/// Index of program `suspects` in `INGRESS`.
const SUSPECTS: u32 = 1;
/// Index of the programs for HTTP/2 and for other protocols, in `INGRESS` and `EGRESS`.
const HTTP2: u32 = 2;
const OTHER: u32 = 3;
/// Index of the programs for segments that waited, in `INGRESS` and `SOCKETS`.
const LATE: u32 = 4;
const LATE_HTTP2: u32 = 5;
/// Index of the programs for more of a segment, in `INGRESS` and `EGRESS`.
const MORE: u32 = 6;
const MORE_HTTP2: u32 = 7;
/// Index of program `ingress_keep` in `INGRESS`.
const KEEP: u32 = 8;
/// How long a probe that came to a listener may take to be accepted, ns.
const PROBE_NS: u64 = 1_000_000_000;
/// Steps in one run of a program for more of a segment.
const MORE_ROUNDS: u32 = 256;
/// What such a step answers: that the segment is read, that there is more of it, or that the first program is to go on.
const READ: u32 = 0;
const AGAIN: u32 = 1;
const ELSE: u32 = 2;
/// Bytes that a client may be ahead, at most.
const WINDOW_MOST: i32 = 32 << 20;
/// Minus one, for blind adds.
const LESS: u64 = 1u64.wrapping_neg();
const AF_INET6: u32 = 10;

/// How the reading of a segment ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Everything is taken in.
    Done,
    /// Bytes before it are missing.
    Gap,
    /// More windows than one run may read.
    Budget,
    /// From here on another program reads.
    Changed,
}

/// A connection to the serving port of the pod with this slot is established.
#[inline(always)]
pub fn opened(ops: *mut bpf_sock_ops, conn: &mut Conn, slot: u32, is_suspect: bool) {
    // SAFETY: a live context; single words.
    let (rcv_nxt, snd_nxt) = unsafe {
        (
            ptr::read_volatile(&raw const (*ops).rcv_nxt),
            ptr::read_volatile(&raw const (*ops).snd_nxt),
        )
    };
    let at = now();
    lock(conn);
    conn.http.h1.open(rcv_nxt, snd_nxt);
    conn.http.flags = abi::HTTP_FRESH | if is_suspect { abi::HTTP_SUSPECT } else { 0 };
    conn.http.speaks = abi::SPEAKS_HTTP1;
    conn.http.came_ns = at;
    conn.http.open = 0;
    conn.late = [Late::default(); abi::LATE_MAX];
    conn.http.happened = 0;
    conn.http.received = rcv_nxt;
    conn.http.sent = snd_nxt;
    conn.http.sent_until = snd_nxt;
    unlock(conn);
    // Packets reach a connection a moment before it is established, on other processors, and look at the slot without the
    // lock: it is set last, and what they have kept until then is found by `first_requests`.
    lock(conn);
    conn.slot = slot;
    conn.flags = abi::CONN_OPEN;
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            add(&raw mut (*pod).connections, 1);
            add(&raw mut (*pod).fresh, 1);
            // The kubelet knocks every second: that keeps no pod from being quiet.
            if !is_suspect {
                (*pod).changed_ns = at;
            }
        }
    }
}

/// Takes in what came to the listener before its connection was established: with the packet that is worked on now.
#[inline(always)]
pub fn first_requests(ops: *mut bpf_sock_ops, conn: &mut Conn) {
    let Some(seq) = packet::first_seq(ops) else { return };
    let key = KeptKey { remote: remote(ops), remote_port: remote_port(ops), seq };
    let Some(kept) = KEPT.get_ptr(key) else { return };
    // SAFETY: a live map value and a live context; single words.
    let (len, syn, flags) = unsafe { ((*kept).len, (*kept).syn, (*ops).skb_tcp_flags) };
    // Without fast open a SYN's data are thrown away, and the packet at hand is another one.
    if (syn != 0) != (flags & packet::SYN_FLAG != 0) {
        return;
    }
    if !source::note(conn, Late { seq, len }) {
        return;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = SOCKETS.tail_call(&SockOpsContext::new(ops), LATE) };
}

/// Takes in segments that waited, in sock_ops.
#[inline(always)]
pub fn opened_late(ops: *mut bpf_sock_ops) {
    let mut round = 0;
    while round < MORE_ROUNDS && opened_late_step(ops) != 0 {
        round += 1;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = SOCKETS.tail_call(&SockOpsContext::new(ops), LATE_HTTP2) };
}

/// Takes in segments that waited until the gap before them was filled.
#[inline(always)]
pub fn ingress_late(ctx: &SkBuffContext) -> i32 {
    let mut round = 0;
    while round < MORE_ROUNDS && late_step(ctx.as_ptr().cast()) != 0 {
        round += 1;
    }
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = INGRESS.tail_call(ctx, LATE_HTTP2) };
    PASS
}

/// Reads one window of a segment that waited. Returns 1 while there is more. As `http1::requests_step`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn late_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb) else { return 0 };
    let Some(sender) = packet::sender(skb) else { return 0 };
    let Some(draft) = http1::draft() else { return 0 };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return 0;
    }
    u32::from(http1::take_late(conn, socket(skb), draft, sender, http1::read_by_function))
}

/// The same in sock_ops.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_late_step(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = crate::maps::CONNS.get(socket) else { return 0 };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return 0;
    }
    // SAFETY: a live map value, and the socket is locked.
    let draft = unsafe { &mut *(&raw mut conn.draft) };
    let sender = (remote(ops), remote_port(ops));
    let read = |draft: &mut ResponseDraft, len, slow| draft.read(len, true, slow);
    u32::from(http1::take_late(conn, socket, draft, sender, read))
}

/// Whether a request's head has the kubelet's name.
#[inline(always)]
fn names_probe(skb: *mut __sk_buff, segment: &Segment) -> bool {
    let Some(head) = HEAD.get_ptr_mut(0) else { return false };
    let Some(len) = packet::some(segment.len, probe::SEARCHED) else { return false };
    // SAFETY: `SEARCHED` bytes and more stand there, and `len` is at most that.
    if unsafe { bpf_skb_load_bytes(skb.cast(), segment.offset, head.cast(), len) } != 0 {
        return false;
    }
    let bytes = head.cast::<u8>();
    probe::is_probe(len, |at| {
        // SAFETY: the search ends 24 bytes before `HEAD` does.
        u64::from_le(unsafe { ptr::read_unaligned(bytes.add(at).cast::<u64>()) })
    })
}

/// A connection that was `opened` is closed, or nobody counts it from now on.
#[inline(always)]
pub fn closed(conn: &mut Conn, socket: *mut c_void) {
    end(conn, socket, false);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) {
        // SAFETY: a live map value; single words.
        unsafe {
            add(&raw mut (*pod).connections, LESS);
            if conn.http.flags & abi::HTTP_FRESH != 0 {
                add(&raw mut (*pod).fresh, LESS);
            }
            if conn.http.speaks == abi::SPEAKS_OTHER {
                add(&raw mut (*pod).opaque, LESS);
            }
        }
    }
    conn.http.flags = 0;
    // Packets that are still on their way up find nobody here.
    conn.slot = 0;
}

#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    // First: most sockets of a node have none, and cost no more than this.
    let Some(conn) = stored(skb) else { return PASS };
    let Some(segment) = packet::segment(skb) else { return PASS };
    if segment.len == 0 {
        return PASS;
    }
    if conn.slot == 0 {
        if conn.flags & abi::CONN_LISTENS != 0 {
            early(ctx, conn);
            return PASS;
        }
        if counts_for(conn) == 0 {
            return PASS;
        }
    }
    if is_forged(conn, skb, &segment) {
        return PASS;
    }
    if conn.http.flags & abi::HTTP_SUSPECT != 0 && segment.seq == conn.http.h1.rx.next {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, SUSPECTS) };
        conn.http.flags &= !abi::HTTP_SUSPECT;
    }
    match conn.http.speaks {
        abi::SPEAKS_HTTP1 => http1::ingress(ctx, conn, &segment),
        // SAFETY: the programs behind the array have this context's type.
        abi::SPEAKS_HTTP2 => unsafe { _ = INGRESS.tail_call(ctx, HTTP2) },
        // SAFETY: as above.
        _ => unsafe { _ = INGRESS.tail_call(ctx, OTHER) },
    }
    PASS
}

/// Whether the socket will refuse a segment, although it may carry what comes next: it confirms what was never sent, or
/// nothing, or lies far beyond every window.
///
/// What was sent is known here first. A FIN takes one number of the sequence.
#[inline(always)]
fn is_forged(conn: &Conn, skb: *mut __sk_buff, segment: &Segment) -> bool {
    let Some(ack) = segment.ack else { return !segment.syn };
    let is_http2 = conn.http.speaks == abi::SPEAKS_HTTP2;
    if !is_http2 && ack.wrapping_sub(conn.http.sent_until) as i32 > 1 {
        return true;
    }
    let ahead = segment.seq.wrapping_sub(conn.http.h1.rx.next) as i32;
    // Rare: behind a gap, or not followed here.
    ahead > 0 && lies_beyond(skb, segment.seq)
}

/// Whether a sequence number lies farther ahead than any window reaches: `tcp_rmem` allows 6 MiB, operators 32.
#[inline(always)]
fn lies_beyond(skb: *mut __sk_buff, seq: u32) -> bool {
    match expected(skb) {
        Some(next) => seq.wrapping_sub(next) as i32 > WINDOW_MOST,
        None => false,
    }
}

/// What the packet's socket expects next; it stands still while its program holds the socket.
#[inline(always)]
fn expected(skb: *mut __sk_buff) -> Option<u32> {
    let socket = socket(skb);
    if socket.is_null() {
        return None;
    }
    // SAFETY: a socket of the context, not null.
    let tcp = unsafe { bpf_tcp_sock(socket.cast()) };
    // SAFETY: not null; a single word.
    if tcp.is_null() { None } else { Some(unsafe { (*tcp).rcv_nxt }) }
}

#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(conn) = stored(skb).filter(|conn| conn.slot != 0) else { return PASS };
    let Some(segment) = packet::segment(skb) else { return PASS };
    let end = segment.seq.wrapping_add(segment.len);
    if end.wrapping_sub(conn.http.sent_until) as i32 > 0 {
        conn.http.sent_until = end;
    }
    match conn.http.speaks {
        // Most packets of a long answer.
        abi::SPEAKS_HTTP1
            if !segment.fin && conn.http.h1.tx.is_inside(segment.seq, segment.len) => {}
        abi::SPEAKS_HTTP1 => http1::egress(ctx, conn, &segment),
        // SAFETY: the programs behind the array have this context's type.
        abi::SPEAKS_HTTP2 => unsafe { _ = EGRESS.tail_call(ctx, HTTP2) },
        // SAFETY: as above.
        _ => unsafe { _ = EGRESS.tail_call(ctx, OTHER) },
    }
    PASS
}

/// The slot of the pod that a connection counts for; 0: for none. Exact, where it may be established at this moment: what was
/// done before the call is seen by whoever sets the slot afterwards.
#[inline(always)]
fn counts_for(conn: &mut Conn) -> u32 {
    lock(conn);
    // SAFETY: a word of a live map value. Volatile, as it was read before.
    let slot = unsafe { ptr::read_volatile(&raw const conn.slot) };
    unlock(conn);
    slot
}

/// Data on a listener: its connection exists only once this very packet has been worked on.
#[inline(always)]
fn early(ctx: &SkBuffContext, conn: &Conn) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    // SAFETY: only asks whether there is one.
    if unsafe { PODS.get(conn.cookie) }.is_none() {
        return;
    }
    let Some((remote, _)) = packet::sender(skb) else { return };
    // SAFETY: as above.
    if unsafe { NODE.get(remote) }.is_some() {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, SUSPECTS) };
    }
    keep(ctx);
}

/// Lets a segment be kept for later. Returns only where that is not to be.
#[inline(always)]
fn keep(ctx: &SkBuffContext) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { _ = INGRESS.tail_call(ctx, KEEP) };
}

/// Keeps a segment that cannot be read yet: it came to a listener, or bytes before it are missing. A program of its own, as
/// calls of functions want room on the stack.
#[inline(always)]
pub fn ingress_keep(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let is_kept = source::keep(skb, &segment);
    let Some(conn) = stored(skb) else { return PASS };
    if counts_for(conn) == 0 {
        return PASS;
    }
    if is_kept && source::note(conn, Late { seq: segment.seq, len: segment.len }) {
        // Another CPU may have filled the gap before this was noted: then nobody else reads it.
        let late = if conn.http.speaks == abi::SPEAKS_HTTP1 { LATE } else { LATE_HTTP2 };
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, late) };
        return PASS;
    }
    match conn.http.speaks {
        abi::SPEAKS_HTTP1 => http1::lose(conn, true),
        abi::SPEAKS_HTTP2 => {
            if let Some(streams) = STREAMS.get(socket(skb)) {
                http2::lose_requests(conn, streams);
            }
        }
        _ => {}
    }
    PASS
}

/// The first data of a connection from the node itself. A program of its own: the search is long for the verifier, which
/// would follow it anew from each way that leads to it.
#[inline(always)]
pub fn suspects(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let is_probe = segment.len > 0 && names_probe(skb, &segment);
    let Some(conn) = stored(skb) else { return PASS };
    if conn.slot == 0 {
        match packet::sender(skb) {
            // Its connection will be passed over like any other probe's.
            Some((remote, remote_port)) if is_probe => {
                let key = ProbeKey { remote, remote_port };
                let _counts_then = PROBES.insert(key, now() + PROBE_NS, 0);
            }
            _ => keep(ctx),
        }
        return PASS;
    }
    conn.http.flags &= !abi::HTTP_SUSPECT;
    if is_probe {
        // From now on nobody counts it.
        closed(conn, socket(skb));
        conn.flags = 0;
    } else {
        // SAFETY: the program behind the array has this context's type.
        unsafe { INGRESS.tail_call(ctx, 0) };
    }
    PASS
}

/// Ends what is in flight: the server sends nothing more (`in_order`), or the connection is gone.
#[inline(always)]
fn end(conn: &mut Conn, socket: *mut c_void, in_order: bool) {
    let Some(rows) = Rows::of(conn.slot) else { return };
    let streams = if conn.http.speaks == abi::SPEAKS_HTTP2 { STREAMS.get(socket) } else { None };
    let at = now();
    lock(conn);
    match conn.http.speaks {
        abi::SPEAKS_HTTP1 => {
            let h1 = &mut conn.http.h1;
            // Takes in what of a body was passed over.
            let _nothing_to_read = h1.tx.seek(conn.http.sent_until, 0);
            conn.http.happened |= h1.after_response_seek();
            let status = h1.tx.status;
            conn.http.happened |= h1.close(in_order);
            let happened = happened(conn);
            rows.count(conn, happened, status, at);
            rows.bytes(conn);
        }
        abi::SPEAKS_HTTP2 => {
            if let Some(streams) = streams {
                let cut = streams.close();
                rows.cut(conn, cut, at);
                rows.bytes_until(conn, streams.rx.next, streams.tx.next);
            }
        }
        _ => {
            let cut = u32::from(conn.http.turns.close());
            rows.cut(conn, cut, at);
            rows.bytes(conn);
        }
    }
    unlock(conn);
}

/// Nobody can follow the connection's protocol: from now on its requests are an estimate.
#[inline(always)]
fn give_up(conn: &mut Conn) {
    let Some(rows) = Rows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let was_known = conn.http.speaks != abi::SPEAKS_OTHER;
    if was_known {
        let open = conn.http.open;
        rows.cut(conn, open, at);
        turns::begin(conn, 0);
    }
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot).filter(|_| was_known) {
        // SAFETY: a live map value; a single word.
        unsafe { add(&raw mut (*pod).opaque, 1) };
    }
}

/// Reads on in a segment until nothing is left to read, and goes back to the first of these programs where something is to
/// be done then, or on to the second. The kernel allows 33 jumps a packet: `false` if they are used up.
#[inline(always)]
fn more(
    ctx: &SkBuffContext,
    programs: &ProgramArray,
    step: extern "C" fn(*mut __sk_buff) -> u32,
    [first, again]: [u32; 2],
) -> bool {
    let mut round = 0;
    while round < MORE_ROUNDS {
        match step(ctx.as_ptr().cast()) {
            READ => return true,
            AGAIN => {}
            _ => {
                // SAFETY: the program behind the array has this context's type.
                unsafe { _ = programs.tail_call(ctx, first) };
                return true;
            }
        }
        round += 1;
    }
    // SAFETY: as above.
    unsafe { _ = programs.tail_call(ctx, again) };
    false
}

/// Where reading goes on, if not at an offset; see [`Seek`].
const DONE: u32 = u32::MAX;
const GAP: u32 = u32::MAX - 1;

/// Where reading goes on, as a half word in memory, whose value the verifier forgets: it then follows one way on, instead of
/// one for each outcome.
#[inline(always)]
fn forgotten(seek: Seek) -> u32 {
    black_box(match seek {
        Seek::Done => DONE,
        Seek::Gap => GAP,
        Seek::Read(offset) => offset,
    })
}

/// When the packet at hand came, ns. The clock is read by the first program that works on it, and by no other.
#[inline(always)]
fn arrived(conn: &mut Conn, first: bool) -> u64 {
    if !first {
        // SAFETY: a word of a live map value.
        return unsafe { ptr::read_volatile(&raw const conn.http.came_ns) };
    }
    let at = now();
    conn.http.came_ns = at;
    at
}

/// What has happened since the last call. To be called with the lock held.
#[inline(always)]
fn happened(conn: &mut Conn) -> Happened {
    // SAFETY: a word of a live map value. Volatile: what is read from memory is one unknown to the verifier, which
    // then follows one way on, instead of each that led here.
    unsafe {
        let happened = ptr::read_volatile(&raw const conn.http.happened);
        ptr::write_volatile(&raw mut conn.http.happened, 0);
        happened
    }
}

#[inline(always)]
fn lock(conn: &mut Conn) {
    // SAFETY: a lock in a live map value, which the kernel knows by its type's name.
    unsafe { bpf_spin_lock((&raw mut conn.lock).cast()) };
}

#[inline(always)]
fn unlock(conn: &mut Conn) {
    // SAFETY: as in `lock`.
    unsafe { bpf_spin_unlock((&raw mut conn.lock).cast()) };
}

#[inline(always)]
fn socket(skb: *mut __sk_buff) -> *mut c_void {
    // SAFETY: a live context; the verifier turns the field into a socket pointer.
    unsafe { (*skb).__bindgen_anon_2.sk.cast() }
}

/// What the packet's socket remembers.
#[inline(always)]
fn stored(skb: *mut __sk_buff) -> Option<&'static mut Conn> {
    crate::maps::CONNS.get(socket(skb))
}

#[inline(always)]
pub fn remote_port(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context. The field holds the port in network byte order in its upper half.
    u32::from_be(unsafe { ptr::read_volatile(&raw const (*ops).remote_port) })
}

/// Remote address in memory order, IPv4 as mapped.
#[inline(always)]
pub fn remote(ops: *mut bpf_sock_ops) -> [u32; 4] {
    // SAFETY: a live context; each word is read by itself and always, as the verifier wants.
    let (six, four, words) = unsafe {
        let six = ptr::read_volatile(&raw const (*ops).family) == AF_INET6;
        let four = ptr::read_volatile(&raw const (*ops).remote_ip4);
        let words = [
            ptr::read_volatile(&raw const (*ops).remote_ip6[0]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[1]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[2]),
            ptr::read_volatile(&raw const (*ops).remote_ip6[3]),
        ];
        (six, four, words)
    };
    // An IPv6 socket with an IPv4 peer has it mapped already, as packets' senders are noted.
    if six { words } else { [0, 0, flow::MAPPED, four] }
}
