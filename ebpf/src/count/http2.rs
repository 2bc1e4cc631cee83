//! HTTP/2: reads its frames, and counts the streams that they open and close.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    programs::SkBuffContext,
};
use datapath::{
    abi::{self, ServerSocket},
    h2,
};

use super::{
    AGAIN, DONE, ELSE, GAP, HTTP2, LATE_HTTP2, MORE_HTTP2, MORE_ROUNDS, OTHER, PASS, READ,
    SegmentReadEnd, arrived, end, expected, forgotten, keep, lock, more, remote, remote_port,
    rows::PodCounterRows,
    socket,
    source::{self, SegmentBytes, SegmentSender},
    stored, turns, unlock,
};
use crate::{
    maps::{EGRESS, INGRESS, POD_STATE, STREAMS, add, now},
    packet,
};

/// Frames read in a packet's first run, enough for most packets; [`client_step`] and [`server_step`] read the rest.
const ROUNDS: usize = 4;
/// Rounds of one step: find the place, then read one frame.
const STEP: usize = 2;

/// Switches a connection to HTTP/2. Returns `false` if the kernel has no memory for its streams.
#[inline(always)]
pub(super) fn begin(conn: &mut ServerSocket, socket: *mut c_void) -> bool {
    // If two CPUs create the storage at once, one call is refused, and finds the other's.
    let made = STREAMS.get_or_zero(socket);
    let Some(streams) = made.or_else(|| STREAMS.get(socket)) else { return false };
    lock(conn);
    if conn.http.speaks == abi::SPEAKS_HTTP1 {
        let h1 = &conn.http.h1;
        let upgraded = if h1.is_upgrading() { Some(conn.http.began_ns) } else { None };
        streams.open(&h1.begun(), upgraded);
        conn.http.speaks = abi::SPEAKS_HTTP2;
    }
    unlock(conn);
    true
}

/// Reads a segment from the client.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    let source = SegmentBytes::of(skb, &segment);
    // The socket expects this very segment, so no earlier bytes are missing: frames may be found again here.
    if streams.rx.is_lost() && expected(skb) == Some(segment.seq) {
        resume(conn, streams, source);
    }
    match take_frames(conn, streams, source, ROUNDS, true) {
        SegmentReadEnd::Done if is_awaited(conn, streams) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, LATE_HTTP2) };
        }
        SegmentReadEnd::Done => {}
        SegmentReadEnd::Budget => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { INGRESS.tail_call(ctx, MORE_HTTP2) };
            lose_requests(conn, streams);
        }
        SegmentReadEnd::Gap => {
            keep(ctx);
            lose_requests(conn, streams);
        }
        SegmentReadEnd::Changed => {
            lose(conn, streams);
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, OTHER) };
        }
    }
    PASS
}

/// Reads a segment from the server.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    if segment.len > 0 {
        match take_frames(conn, streams, SegmentBytes::of(skb, &segment), ROUNDS, false) {
            SegmentReadEnd::Done => leave_out(conn, streams),
            SegmentReadEnd::Budget => {
                // SAFETY: the program behind the array has this context's type.
                unsafe { EGRESS.tail_call(ctx, MORE_HTTP2) };
                lose(conn, streams);
            }
            SegmentReadEnd::Gap | SegmentReadEnd::Changed => lose(conn, streams),
        }
    }
    if segment.fin && streams.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
    PASS
}

/// Reads segments buffered until the gap before them was filled.
#[inline(always)]
pub fn ingress_late(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let mut round = 0;
    while round < MORE_ROUNDS && late_client_step(skb) != 0 {
        round += 1;
    }
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    let is_expected = expected(skb) == Some(segment.seq);
    // Read only now: `expected` was read before the socket got the bytes, perhaps by another CPU a moment ago.
    // SAFETY: a word of a live map value.
    let next = unsafe { ptr::read_volatile(&raw const streams.rx.next) };
    let is_behind = (segment.seq.wrapping_sub(next) as i32) > 0;
    if is_expected && is_behind && !streams.rx.is_lost() {
        // The socket has the missing bytes, although no program has seen them.
        lose_requests(conn, streams);
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, HTTP2) };
    }
    PASS
}

/// Reads, in sock_ops, segments that came to the listener before their connection was established.
#[inline(always)]
pub fn opened_late(ops: *mut bpf_sock_ops) {
    let mut round = 0;
    while round < MORE_ROUNDS && opened_client_step(ops) != 0 {
        round += 1;
    }
}

/// Reads one frame of a buffered segment; returns 1 while there is more. Separate so that the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn late_client_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb) else { return 0 };
    let Some(streams) = STREAMS.get(socket(skb)) else { return 0 };
    let Some(sender) = packet::sender(skb) else { return 0 };
    u32::from(take_late(conn, streams, sender))
}

/// Reads one frame of a buffered segment in sock_ops; returns 1 while there is more.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_client_step(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = crate::maps::CONNS.get(socket) else { return 0 };
    let Some(streams) = STREAMS.get(socket) else { return 0 };
    u32::from(take_late(conn, streams, (remote(ops), remote_port(ops))))
}

/// Reads frames of one buffered segment. Returns true if there may be more to read.
#[inline(always)]
fn take_late(
    conn: &mut ServerSocket,
    streams: &mut h2::Http2Connection,
    sender: SegmentSender,
) -> bool {
    let next = streams.rx.next;
    let Some(late) = source::due(conn, sender, next) else { return false };
    let Some(source) = source::kept(sender, late, next) else {
        // The buffer is an LRU map, and other connections have evicted this segment.
        lose_requests(conn, streams);
        return false;
    };
    match take_frames(conn, streams, source, STEP, true) {
        SegmentReadEnd::Done => true,
        // No progress: the segment is longer than its buffered part.
        SegmentReadEnd::Budget if streams.rx.next == next => {
            lose_requests(conn, streams);
            false
        }
        SegmentReadEnd::Budget => true,
        SegmentReadEnd::Changed => {
            lose(conn, streams);
            false
        }
        SegmentReadEnd::Gap => false,
    }
}

/// Reads the frames of a segment, in up to `rounds` rounds; payload is skipped.
#[inline(always)]
fn take_frames(
    conn: &mut ServerSocket,
    streams: &mut h2::Http2Connection,
    source: SegmentBytes,
    rounds: usize,
    requests: bool,
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::of(conn.slot) else { return SegmentReadEnd::Done };
    let mut window = [0_u64; h2::PEEK_WORDS];
    let at = if requests { arrived(conn, rounds == ROUNDS) } else { packet::sent_at(source.skb) };
    let side = if requests { &streams.rx } else { &streams.tx };
    let (mut have, mut from) = match side.peek(source.seq, source.len) {
        Some(offset) => (source.load_peek(offset, &mut window), source.seq.wrapping_add(offset)),
        None => (0, 0),
    };
    // Half words in memory: whether anything was copied or not, the verifier follows one path.
    (have, from) = (black_box(have), black_box(from));
    let mut round = 0;
    while round < rounds {
        lock(conn);
        let streams = black_box(&mut *streams);
        let side = if requests { &mut streams.rx } else { &mut streams.tx };
        // The bytes were copied before the lock was taken; they count only if the direction still reads there.
        if have > 0 && side.reads_at(from) {
            side.read(&window, have);
        }
        let side = if requests { &mut streams.rx } else { &mut streams.tx };
        let seek = forgotten(side.seek(source.seq, source.len));
        let ended = side.ended();
        let next = side.next;
        let streams = black_box(&mut *streams);
        streams.take(ended, requests, at);
        let change = &black_box(&mut *streams).change;
        let is_first = rows.change(conn, change, at);
        let answered = change.answered;
        let is_foreign = streams.is_foreign();
        let (received, sent) = (streams.rx.next, streams.tx.next);
        // Bytes are added when a response ends; in between only before the difference could wrap.
        if answered > 0 {
            rows.bytes_until(conn, received, sent);
        } else {
            rows.bytes_in_time(conn, received, sent);
        }
        unlock(conn);
        if is_first {
            rows.announce();
        }
        if is_foreign {
            return SegmentReadEnd::Changed;
        }
        match seek {
            GAP => return SegmentReadEnd::Gap,
            DONE => return SegmentReadEnd::Done,
            offset => {
                from = next;
                have = source.load_peek(offset, &mut window);
                if have == 0 {
                    return SegmentReadEnd::Budget;
                }
            }
        }
        // A whole word: the verifier would forget the value of a half one, and the loop must end for it.
        round = black_box(round + 1);
    }
    SegmentReadEnd::Budget
}

/// Ends the requests that the server's GOAWAY leaves unprocessed.
#[inline(always)]
fn leave_out(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    if !streams.leaves_out() {
        return;
    }
    let Some(rows) = PodCounterRows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let cut = streams.leave_out();
    rows.cut(conn, cut, at);
    unlock(conn);
}

/// Reads one more frame of a client's segment. A function of its own, which the verifier checks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn client_step(skb: *mut __sk_buff) -> u32 {
    step(skb, true)
}

/// Reads one more frame of a server's segment. A function of its own, which the verifier checks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn server_step(skb: *mut __sk_buff) -> u32 {
    step(skb, false)
}

/// Reads one more frame of a segment. Returns [`READ`], [`AGAIN`] or [`ELSE`].
#[inline(always)]
fn step(skb: *mut __sk_buff, requests: bool) -> u32 {
    let Some(segment) = packet::segment(skb) else { return READ };
    let Some(conn) = stored(skb) else { return READ };
    let Some(streams) = STREAMS.get(socket(skb)) else { return READ };
    let end = take_frames(conn, streams, SegmentBytes::of(skb, &segment), STEP, requests);
    let follows =
        if requests { is_awaited(conn, streams) } else { segment.fin || streams.leaves_out() };
    match end {
        SegmentReadEnd::Budget => AGAIN,
        SegmentReadEnd::Done if !follows => READ,
        _ => ELSE,
    }
}

/// Reads the rest of a client's segment, of which `ingress_http2` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    let over = more(ctx, &INGRESS, client_step, [HTTP2, MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) = (over, stored(skb), STREAMS.get(socket(skb))) {
        lose_requests(conn, streams);
    }
    PASS
}

/// Reads the rest of a server's segment, of which `egress_http2` has read as much as it may.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    let over = more(ctx, &EGRESS, server_step, [HTTP2, MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) = (over, stored(skb), STREAMS.get(socket(skb))) {
        lose(conn, streams);
    }
    PASS
}

/// Returns true if segments are buffered that can be read once the gap before them is filled.
#[inline(always)]
fn is_awaited(conn: &ServerSocket, streams: &h2::Http2Connection) -> bool {
    source::is_awaited(conn) && !streams.rx.is_lost()
}

/// Continues after a desync where the client's next segment surely begins with a frame.
#[inline(always)]
fn resume(conn: &mut ServerSocket, streams: &mut h2::Http2Connection, source: SegmentBytes) {
    let mut window = [0_u64; h2::PEEK_WORDS];
    let have = source.load_peek(0, &mut window);
    lock(conn);
    streams.resume_requests(&window, have, source.seq, source.len);
    unlock(conn);
}

/// Marks the client's boundaries as lost: until they are found again, only the server's responses show requests.
#[inline(always)]
pub(super) fn lose_requests(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    lock(conn);
    let is_new = streams.lose_requests();
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot).filter(|_| is_new) {
        // SAFETY: a live map value; a single word.
        unsafe { add(&raw mut (*pod).desync, 1) };
    }
}

/// Ends what is in flight when frames cannot be followed any more; the rest of the connection is an opaque estimate.
#[inline(always)]
fn lose(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    let Some(rows) = PodCounterRows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let was_known = conn.http.speaks == abi::SPEAKS_HTTP2;
    if was_known {
        let cut = streams.close();
        rows.cut(conn, cut, at);
        rows.bytes_until(conn, streams.rx.next, streams.tx.next);
        turns::begin(conn, 0);
    }
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot).filter(|_| was_known) {
        // SAFETY: a live map value; single words.
        unsafe {
            add(&raw mut (*pod).opaque, 1);
            add(&raw mut (*pod).desync, 1);
        }
    }
}
