//! HTTP/2: its frames, and the streams that they open and close.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    maps::ProgramArray,
    programs::{SkBuffContext, SockOpsContext},
};
use common::{
    abi::{self, Conn, KeptKey},
    h1::Seek,
    h2,
};

use super::{
    End, HTTP2, OPENED_HTTP2, OTHER, PASS, end, lock, remote, remote_port,
    rows::Rows,
    socket,
    source::{self, Source},
    stored, turns, unlock,
};
use crate::{
    maps::{EGRESS, INGRESS, KEPT, POD_STATE, SOCKETS, STREAMS, add, now},
    packet,
};

/// Frames read of one packet in one run of a program.
const ROUNDS: usize = 6;

/// Where reading goes on, if not at an offset; see [`Seek`].
const DONE: u32 = u32::MAX;
const GAP: u32 = u32::MAX - 1;

/// The connection speaks HTTP/2 from here on. `false`: the kernel has no memory for that.
#[inline(always)]
pub(super) fn begin(conn: &mut Conn, socket: *mut c_void) -> bool {
    let Some(streams) = STREAMS.get_or_zero(socket) else { return false };
    lock(conn);
    if conn.http.speaks == abi::SPEAKS_HTTP1 {
        let h1 = &conn.http.h1;
        let (preface, settings) = h1.http2_read();
        let upgraded = if h1.is_upgrading() { Some(conn.http.began_ns) } else { None };
        streams.open(h1.rx.next, preface, h1.tx.next, settings, upgraded);
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
    match take_frames(conn, streams, source, Some(skb), true) {
        End::Done => {}
        End::Budget => again(ctx, &INGRESS, conn, streams),
        End::Gap if source::keep(skb, &segment) => conn.http.kept += 1,
        End::Gap => lose(conn, streams),
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
        match take_frames(conn, streams, Source::of(skb, &segment), None, false) {
            End::Done => leave_out(conn, streams),
            End::Budget => again(ctx, &EGRESS, conn, streams),
            End::Gap | End::Changed => lose(conn, streams),
        }
    }
    if segment.fin && streams.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
    PASS
}

/// What came to the listener before its connection was established, from where `sockets` has stopped.
#[inline(always)]
pub fn opened(ops: *mut bpf_sock_ops) {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = crate::maps::CONNS.get(socket) else { return };
    let Some(streams) = STREAMS.get(socket) else { return };
    // SAFETY: a live context; a single word.
    let seq = unsafe { ptr::read_volatile(&raw const (*ops).rcv_nxt) };
    let key = KeptKey { remote: remote(ops), remote_port: remote_port(ops), seq };
    let Some(kept) = KEPT.get_ptr(key) else { return };
    // SAFETY: a live map value; a single word.
    let len = unsafe { (*kept).len };
    let source = Source { skb: ptr::null_mut(), offset: 0, kept, seq, len };
    match take_frames(conn, streams, source, None, true) {
        End::Done | End::Gap => {}
        End::Budget => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { SOCKETS.tail_call(&SockOpsContext::new(ops), OPENED_HTTP2) };
            lose(conn, streams);
        }
        End::Changed => lose(conn, streams),
    }
    let _gone_already = KEPT.remove(key);
}

/// Walks the frames in a segment, and in kept ones that follow it.
#[inline(always)]
fn take_frames(
    conn: &mut Conn,
    streams: &mut h2::Conn,
    mut source: Source,
    skb: Option<*mut __sk_buff>,
    requests: bool,
) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    let mut window = [0_u64; h2::PEEK_WORDS];
    let at = now();
    let (mut have, mut from) = (0, 0);
    let mut round = 0;
    while round < ROUNDS {
        lock(conn);
        let streams = black_box(&mut *streams);
        let side = if requests { &mut streams.rx } else { &mut streams.tx };
        if have > 0 && side.next == from {
            side.read(&window, have);
        }
        let side = if requests { &mut streams.rx } else { &mut streams.tx };
        // A half word in memory, whose value the verifier forgets: one way on.
        let seek = black_box(match side.seek(source.seq, source.len) {
            Seek::Done => DONE,
            Seek::Gap => GAP,
            Seek::Read(offset) => offset,
        });
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
            DONE => {
                let Some(skb) = skb.filter(|_| conn.http.kept > 0) else { return End::Done };
                let Some(kept) = source::kept(skb, next) else { return End::Done };
                conn.http.kept -= 1;
                have = 0;
                // SAFETY: a live map value; a single word.
                source = Source { kept, seq: next, len: unsafe { (*kept).len }, ..source };
            }
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

/// Runs the program anew, as for HTTP/1.
#[inline(always)]
fn again(ctx: &SkBuffContext, programs: &ProgramArray, conn: &mut Conn, streams: &mut h2::Conn) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { programs.tail_call(ctx, HTTP2) };
    lose(conn, streams);
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
