//! HTTP/1, and what comes before it is known what a connection speaks.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _, bindings::__sk_buff, maps::ProgramArray, programs::SkBuffContext,
};
use common::{
    abi::{self, Conn},
    h1::{self, Window},
};

use super::{
    AGAIN, DONE, ELSE, End, GAP, HTTP2, LATE, MORE, OTHER, PASS, READ, arrived, end, expected,
    forgotten, give_up, happened, http2, keep, lock, more,
    rows::Rows,
    socket,
    source::{self, Sender, Source},
    stored, turns, unlock,
};
use crate::{
    maps::{EGRESS, INGRESS, POD_STATE, WINDOW, add, now},
    packet::{self, Segment},
};

/// Windows read of one packet where most have no more than that; [`requests_step`] and [`responses_step`] read the others.
const ROUNDS: u32 = 1;

/// A segment with requests.
#[inline(always)]
pub(super) fn ingress(ctx: &SkBuffContext, conn: &mut Conn, segment: &Segment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(window) = WINDOW.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's, and nothing interrupts a packet that comes in by another one.
    let window = unsafe { &mut *window };
    let source = Source::of(skb, segment);
    if conn.http.h1.rx.at == h1::at::LOST && expected(skb) == Some(segment.seq) {
        resume(conn, segment.seq);
    }
    match take_requests(conn, socket(skb), window, source, false) {
        End::Done if source::is_awaited(conn) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, LATE) };
        }
        End::Done => {}
        // Goes on in another run, where this one has stopped.
        End::Budget => again(ctx, &INGRESS, conn, true),
        End::Gap => {
            keep(ctx);
            lose(conn, true);
        }
        End::Changed => changed(ctx, &INGRESS, conn),
    }
}

/// A segment with responses, or the end of them.
#[inline(always)]
pub(super) fn egress(ctx: &SkBuffContext, conn: &mut Conn, segment: &Segment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    match take_responses(conn, skb, segment, false) {
        End::Done => {}
        End::Budget => again(ctx, &EGRESS, conn, false),
        End::Gap => lose(conn, false),
        End::Changed => return changed(ctx, &EGRESS, conn),
    }
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
}

/// Reads in one of the segments that waited. Returns whether there may be more to read.
#[inline(always)]
pub(super) fn take_late(
    conn: &mut Conn,
    socket: *mut c_void,
    window: &mut Window,
    sender: Sender,
) -> bool {
    let next = conn.http.h1.rx.next;
    let Some(late) = source::due(conn, sender, next) else { return false };
    let Some(source) = source::kept(sender, late, next) else {
        // Others have pushed it out.
        lose(conn, true);
        return false;
    };
    match take_requests(conn, socket, window, source, true) {
        End::Done | End::Changed => true,
        // More of it than is kept.
        End::Budget if conn.http.h1.rx.next == next => {
            lose(conn, true);
            false
        }
        End::Budget => true,
        End::Gap => false,
    }
}

/// With boundaries lost and nothing in flight, bytes that the socket takes next can only begin a request.
#[inline(always)]
fn resume(conn: &mut Conn, seq: u32) {
    lock(conn);
    conn.http.h1.resume_requests(seq);
    unlock(conn);
}

/// Walks the requests in a segment. Only `slow` it goes byte by byte where that is needed: the others leave that to the
/// programs for more of a segment.
#[inline(always)]
fn take_requests(
    conn: &mut Conn,
    socket: *mut c_void,
    window: &mut Window,
    source: Source,
    slow: bool,
) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    let (mut have, mut from) = match peek(&conn.http.h1.rx, source.seq, source.len) {
        Some(offset) => (source.load(offset, window), source.seq.wrapping_add(offset)),
        None => (0, 0),
    };
    // Half words in memory: whether anything was copied or not, the verifier follows one way on.
    (have, from) = (black_box(have), black_box(from));
    let at = arrived(conn, !slow);
    let mut round = 0;
    while round < ROUNDS {
        lock(conn);
        let h1 = &mut conn.http.h1;
        if have > 0 && h1.rx.next == from {
            let read =
                if slow { h1.read_request(window, have) } else { h1.scan_request(window, have) };
            conn.http.happened |= read.happened;
        }
        let h1 = black_box(&mut conn.http.h1);
        let seek = forgotten(h1.rx.seek(source.seq, source.len));
        conn.http.happened |= h1.after_request_seek();
        let next = h1.rx.next;
        let happened = happened(conn);
        let is_first = rows.count(conn, happened, 0, at);
        if happened & h1::OPAQUE != 0 {
            turns::begin(conn, window[0].to_le() as u8);
        }
        let (received, sent) = (conn.http.h1.rx.next, conn.http.h1.tx.next);
        rows.bytes_in_time(conn, received, sent);
        // Whoever found that out may not have gone over yet.
        let is_http2 = conn.http.h1.is_http2();
        unlock(conn);
        if is_first {
            rows.announce();
        }
        if happened & h1::OPAQUE != 0 || is_http2 {
            return change(conn, socket, is_http2);
        }
        match seek {
            GAP => return End::Gap,
            DONE => return End::Done,
            offset => {
                from = next;
                have = source.load(offset, window);
                if have == 0 {
                    return End::Budget;
                }
            }
        }
        round += 1;
    }
    End::Budget
}

/// Walks the responses in a segment. `slow` as there.
#[inline(always)]
fn take_responses(conn: &mut Conn, skb: *mut __sk_buff, segment: &Segment, slow: bool) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    // The socket is locked while it sends: there is one sender at a time.
    // SAFETY: a live map value, which only this program uses.
    let window = unsafe { &mut *(&raw mut conn.window) };
    let Segment { seq, len, offset: begin, .. } = *segment;
    let (mut have, mut from) = match peek(&conn.http.h1.tx, seq, len) {
        Some(offset) => {
            let left = len.wrapping_sub(offset);
            (packet::load(skb, begin.wrapping_add(offset), left, window), seq.wrapping_add(offset))
        }
        None => (0, 0),
    };
    // As in `take_requests`.
    (have, from) = (black_box(have), black_box(from));
    let at = packet::sent_at(skb);
    let mut round = 0;
    while round < ROUNDS {
        let is_missed = round == 0 && has_missed(conn, skb);
        lock(conn);
        let h1 = &mut conn.http.h1;
        if have > 0 && h1.tx.next == from {
            let read =
                if slow { h1.read_response(window, have) } else { h1.scan_response(window, have) };
            conn.http.happened |= read.happened;
        }
        let h1 = black_box(&mut conn.http.h1);
        let seek = forgotten(h1.tx.seek(segment.seq, segment.len));
        conn.http.happened |= h1.after_response_seek();
        let (next, status) = (h1.tx.next, h1.tx.status);
        let mut happened = happened(conn);
        if happened & h1::STRAY != 0 && is_missed {
            happened = happened & !h1::STRAY | h1::MISSED;
            happened |= conn.http.h1.lose_requests();
        }
        let is_first = rows.count(conn, happened, status, at);
        if happened & h1::OPAQUE != 0 {
            turns::begin(conn, 0);
        }
        let (received, sent) = (conn.http.h1.rx.next, conn.http.h1.tx.next);
        rows.bytes_in_time(conn, received, sent);
        // Whoever found that out may not have gone over yet.
        let is_http2 = conn.http.h1.is_http2();
        unlock(conn);
        if is_first {
            rows.announce();
        }
        if happened & h1::OPAQUE != 0 || is_http2 {
            return change(conn, socket(skb), is_http2);
        }
        match seek {
            GAP => return End::Gap,
            DONE => return End::Done,
            offset => {
                from = next;
                let left = segment.len.wrapping_sub(offset);
                have = packet::load(skb, segment.offset.wrapping_add(offset), left, window);
                if have == 0 {
                    return End::Budget;
                }
            }
        }
        round += 1;
    }
    End::Budget
}

/// What is spoken from here on is not HTTP/1.
#[inline(always)]
fn change(conn: &mut Conn, socket: *mut c_void, is_http2: bool) -> End {
    if is_http2 {
        if !http2::begin(conn, socket) {
            give_up(conn);
        }
        return End::Changed;
    }
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) {
        // SAFETY: a live map value; a single word.
        unsafe { add(&raw mut (*pod).opaque, 1) };
    }
    End::Changed
}

/// Goes on with the packet in the program for what is spoken now.
#[inline(always)]
fn changed(ctx: &SkBuffContext, programs: &ProgramArray, conn: &Conn) {
    let index = if conn.http.speaks == abi::SPEAKS_HTTP2 { HTTP2 } else { OTHER };
    // SAFETY: the programs behind the array have this context's type.
    unsafe { _ = programs.tail_call(ctx, index) };
}

/// Where reading most likely goes on, before the lock is taken: helpers may not be called with it held.
///
/// What it finds is checked once the lock is held.
#[inline(always)]
fn peek(side: &h1::Side, seq: u32, len: u32) -> Option<u32> {
    // SAFETY: words of a live map value. Volatile, as another CPU may write them.
    let (next, skip, at) = unsafe {
        let next = ptr::read_volatile(&raw const side.next);
        (next, ptr::read_volatile(&raw const side.skip), ptr::read_volatile(&raw const side.at))
    };
    let offset = next.wrapping_sub(seq);
    (offset < len && skip == 0 && at < h1::at::TUNNEL).then_some(offset)
}

/// Whether a response that comes now answers a request that we did not see: none is in flight, and the socket has taken in
/// more than we have.
#[inline(always)]
fn has_missed(conn: &Conn, skb: *mut __sk_buff) -> bool {
    if conn.http.h1.is_busy() {
        return false;
    }
    let Some(next) = expected(skb) else { return false };
    // A FIN takes one number of the sequence.
    next.wrapping_sub(conn.http.h1.rx.next) as i32 > 1
}

/// Reads one window more of a segment with requests. Answers [`READ`], [`AGAIN`] or [`ELSE`].
///
/// A function of its own for the verifier too, which walks through it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn requests_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb).filter(|conn| conn.slot != 0) else { return READ };
    let Some(segment) = packet::segment(skb) else { return READ };
    let Some(window) = WINDOW.get_ptr_mut(0) else { return READ };
    // SAFETY: as in `ingress`.
    let window = unsafe { &mut *window };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return ELSE;
    }
    match take_requests(conn, socket(skb), window, Source::of(skb, &segment), true) {
        End::Budget => AGAIN,
        End::Done if !source::is_awaited(conn) => READ,
        _ => ELSE,
    }
}

/// The same of a segment with responses.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn responses_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb).filter(|conn| conn.slot != 0) else { return READ };
    let Some(segment) = packet::segment(skb) else { return READ };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return ELSE;
    }
    match take_responses(conn, skb, &segment, true) {
        End::Budget => AGAIN,
        End::Done if !segment.fin => READ,
        _ => ELSE,
    }
}

/// Goes on with a segment of requests of which `ingress` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    if !more(ctx, &INGRESS, requests_step, [0, MORE]) {
        lost(ctx.as_ptr().cast(), 1);
    }
    PASS
}

/// The same of responses and `egress`.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    if !more(ctx, &EGRESS, responses_step, [0, MORE]) {
        lost(ctx.as_ptr().cast(), 0);
    }
    PASS
}

/// Gives up the boundaries of one direction. A function of its own, for the sake of its callers' small stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lost(skb: *mut __sk_buff, requests: u32) -> u32 {
    if let Some(conn) = stored(skb) {
        lose(conn, requests != 0);
    }
    0
}

/// Lets the program for more of a segment go on.
#[inline(always)]
fn again(ctx: &SkBuffContext, programs: &ProgramArray, conn: &mut Conn, requests: bool) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { programs.tail_call(ctx, MORE) };
    lose(conn, requests);
}

/// Gives up the boundaries of one direction.
#[inline(always)]
pub(super) fn lose(conn: &mut Conn, requests: bool) {
    let Some(rows) = Rows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let h1 = &mut conn.http.h1;
    conn.http.happened |= if requests { h1.lose_requests() } else { h1.lose_responses() };
    let happened = happened(conn);
    rows.count(conn, happened, 0, at);
    unlock(conn);
}
