//! HTTP/2: its frames, and the streams that they open and close.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    programs::SkBuffContext,
};
use common::{
    abi::{self, Conn},
    h2,
};

use super::{
    AGAIN, DONE, ELSE, End, GAP, HTTP2, LATE_HTTP2, MORE_HTTP2, MORE_ROUNDS, OTHER, PASS, READ,
    arrived, end, expected, forgotten, keep, lock, more, remote, remote_port,
    rows::Rows,
    socket,
    source::{self, Sender, Source},
    stored, turns, unlock,
};
use crate::{
    maps::{EGRESS, INGRESS, POD_STATE, STREAMS, add, now},
    packet,
};

/// Frames read of one packet where most have no more than that; [`client_step`] and [`server_step`] read the others.
const ROUNDS: usize = 4;
/// Where to go on, and one frame.
const STEP: usize = 2;

/// The connection speaks HTTP/2 from here on. `false`: the kernel has no memory for that.
#[inline(always)]
pub(super) fn begin(conn: &mut Conn, socket: *mut c_void) -> bool {
    // Where two processors make it at once, one is refused, and finds the other's.
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

/// A segment of the client's.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    let source = Source::of(skb, &segment);
    if streams.rx.is_lost() && expected(skb) == Some(segment.seq) {
        resume(conn, streams, source);
    }
    match take_frames(conn, streams, source, ROUNDS, true) {
        End::Done if is_awaited(conn, streams) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, LATE_HTTP2) };
        }
        End::Done => {}
        End::Budget => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { INGRESS.tail_call(ctx, MORE_HTTP2) };
            lose_requests(conn, streams);
        }
        End::Gap => {
            keep(ctx);
            lose_requests(conn, streams);
        }
        End::Changed => {
            lose(conn, streams);
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, OTHER) };
        }
    }
    PASS
}

/// A segment of the server's.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    if segment.len > 0 {
        match take_frames(conn, streams, Source::of(skb, &segment), ROUNDS, false) {
            End::Done => leave_out(conn, streams),
            End::Budget => {
                // SAFETY: the program behind the array has this context's type.
                unsafe { EGRESS.tail_call(ctx, MORE_HTTP2) };
                lose(conn, streams);
            }
            End::Gap | End::Changed => lose(conn, streams),
        }
    }
    if segment.fin && streams.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
    PASS
}

/// Takes in segments that waited until the gap before them was filled.
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
    // Looked at only now: what the socket has was read before it got there, perhaps by another processor a moment ago.
    // SAFETY: a word of a live map value.
    let next = unsafe { ptr::read_volatile(&raw const streams.rx.next) };
    let is_behind = (segment.seq.wrapping_sub(next) as i32) > 0;
    if is_expected && is_behind && !streams.rx.is_lost() {
        // The socket has what is missing here, which nobody has seen.
        lose_requests(conn, streams);
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, HTTP2) };
    }
    PASS
}

/// The same in sock_ops: what came to the listener before its connection was established.
#[inline(always)]
pub fn opened_late(ops: *mut bpf_sock_ops) {
    let mut round = 0;
    while round < MORE_ROUNDS && opened_client_step(ops) != 0 {
        round += 1;
    }
}

/// Reads one frame of a segment that waited. Returns 1 while there is more. As [`client_step`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn late_client_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb) else { return 0 };
    let Some(streams) = STREAMS.get(socket(skb)) else { return 0 };
    let Some(sender) = packet::sender(skb) else { return 0 };
    u32::from(take_late(conn, streams, sender))
}

/// The same in sock_ops.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_client_step(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = crate::maps::CONNS.get(socket) else { return 0 };
    let Some(streams) = STREAMS.get(socket) else { return 0 };
    u32::from(take_late(conn, streams, (remote(ops), remote_port(ops))))
}

/// Reads in one of the segments that waited. Returns whether there may be more to read.
#[inline(always)]
fn take_late(conn: &mut Conn, streams: &mut h2::Conn, sender: Sender) -> bool {
    let next = streams.rx.next;
    let Some(late) = source::due(conn, sender, next) else { return false };
    let Some(source) = source::kept(sender, late, next) else {
        // Others have pushed it out.
        lose_requests(conn, streams);
        return false;
    };
    match take_frames(conn, streams, source, STEP, true) {
        End::Done => true,
        // More of it than is kept.
        End::Budget if streams.rx.next == next => {
            lose_requests(conn, streams);
            false
        }
        End::Budget => true,
        End::Changed => {
            lose(conn, streams);
            false
        }
        End::Gap => false,
    }
}

/// Walks the frames in a segment.
#[inline(always)]
fn take_frames(
    conn: &mut Conn,
    streams: &mut h2::Conn,
    source: Source,
    rounds: usize,
    requests: bool,
) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    let mut window = [0_u64; h2::PEEK_WORDS];
    let at = if requests { arrived(conn, rounds == ROUNDS) } else { packet::sent_at(source.skb) };
    let side = if requests { &streams.rx } else { &streams.tx };
    let (mut have, mut from) = match side.peek(source.seq, source.len) {
        Some(offset) => (source.load_peek(offset, &mut window), source.seq.wrapping_add(offset)),
        None => (0, 0),
    };
    // Half words in memory: whether anything was copied or not, the verifier follows one way on.
    (have, from) = (black_box(have), black_box(from));
    let mut round = 0;
    while round < rounds {
        lock(conn);
        let streams = black_box(&mut *streams);
        let side = if requests { &mut streams.rx } else { &mut streams.tx };
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
            return End::Changed;
        }
        match seek {
            GAP => return End::Gap,
            DONE => return End::Done,
            offset => {
                from = next;
                have = source.load_peek(offset, &mut window);
                if have == 0 {
                    return End::Budget;
                }
            }
        }
        // A whole word: of a half one the verifier forgets the value.
        round = black_box(round + 1);
    }
    End::Budget
}

/// Ends what the server has left out.
#[inline(always)]
fn leave_out(conn: &mut Conn, streams: &mut h2::Conn) {
    if !streams.leaves_out() {
        return;
    }
    let Some(rows) = Rows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let cut = streams.leave_out();
    rows.cut(conn, cut, at);
    unlock(conn);
}

/// Reads one frame more of a client's segment. As `requests_step`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn client_step(skb: *mut __sk_buff) -> u32 {
    step(skb, true)
}

/// The same of a server's.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn server_step(skb: *mut __sk_buff) -> u32 {
    step(skb, false)
}

#[inline(always)]
fn step(skb: *mut __sk_buff, requests: bool) -> u32 {
    let Some(segment) = packet::segment(skb) else { return READ };
    let Some(conn) = stored(skb) else { return READ };
    let Some(streams) = STREAMS.get(socket(skb)) else { return READ };
    let end = take_frames(conn, streams, Source::of(skb, &segment), STEP, requests);
    let follows =
        if requests { is_awaited(conn, streams) } else { segment.fin || streams.leaves_out() };
    match end {
        End::Budget => AGAIN,
        End::Done if !follows => READ,
        _ => ELSE,
    }
}

/// Goes on with a client's segment of which `ingress_http2` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    let over = more(ctx, &INGRESS, client_step, [HTTP2, MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) = (over, stored(skb), STREAMS.get(socket(skb))) {
        lose_requests(conn, streams);
    }
    PASS
}

/// The same of a server's and `egress_http2`.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    let over = more(ctx, &EGRESS, server_step, [HTTP2, MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) = (over, stored(skb), STREAMS.get(socket(skb))) {
        lose(conn, streams);
    }
    PASS
}

/// Whether segments wait that can be read once the gap before them is filled.
#[inline(always)]
fn is_awaited(conn: &Conn, streams: &h2::Conn) -> bool {
    source::is_awaited(conn) && !streams.rx.is_lost()
}

/// Reads on in a client's frames where the next segment surely begins with one.
#[inline(always)]
fn resume(conn: &mut Conn, streams: &mut h2::Conn, source: Source) {
    let mut window = [0_u64; h2::PEEK_WORDS];
    let have = source.load_peek(0, &mut window);
    lock(conn);
    streams.resume_requests(&window, have, source.seq, source.len);
    unlock(conn);
}

/// The client's frames cannot be followed for now: the server's answers alone tell of requests.
#[inline(always)]
pub(super) fn lose_requests(conn: &mut Conn, streams: &mut h2::Conn) {
    lock(conn);
    let is_new = streams.lose_requests();
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot).filter(|_| is_new) {
        // SAFETY: a live map value; a single word.
        unsafe { add(&raw mut (*pod).desync, 1) };
    }
}

/// Frames cannot be followed any more: what is in flight has ended for us, and the rest is an estimate.
#[inline(always)]
fn lose(conn: &mut Conn, streams: &mut h2::Conn) {
    let Some(rows) = Rows::of(conn.slot) else { return };
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
