//! HTTP/1, and connections whose protocol is not known yet.

use core::{ffi::c_void, hint::black_box};

use aya_ebpf::{
    EbpfContext as _, bindings::__sk_buff, maps::ProgramArray, programs::SkBuffContext,
};
use datapath::{
    abi::{self, ServerSocket},
    h1::{self, UnlockedRead, UnlockedRequestRead},
};

use super::{
    AGAIN, DONE, ELSE, GAP, HTTP2, LATE, MORE, OTHER, PASS, READ, SegmentReadEnd, arrived, end,
    expected, forgotten, give_up, happened, http2, keep, lock, more,
    rows::PodCounterRows,
    socket,
    source::{self, SegmentBytes, SegmentSender},
    stored, turns, unlock,
};
use crate::{
    maps::{DRAFT, EGRESS, INGRESS, POD_STATE, add, now},
    packet::{self, PacketSegment},
};

/// Reads a segment with requests.
#[inline(always)]
pub(super) fn ingress(ctx: &SkBuffContext, conn: &mut ServerSocket, segment: &PacketSegment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(draft) = draft() else { return };
    let source = SegmentBytes::of(skb, segment);
    // The socket expects this very segment, so no earlier bytes are missing: a request may begin here.
    if conn.http.h1.rx.at == h1::at::LOST && expected(skb) == Some(segment.seq) {
        resume(conn, segment.seq);
    }
    match take_requests(conn, socket(skb), draft, source, false, read_by_function) {
        SegmentReadEnd::Done if source::is_awaited(conn) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, LATE) };
        }
        SegmentReadEnd::Done => {}
        // Another run goes on where this one has stopped.
        SegmentReadEnd::Budget => again(ctx, &INGRESS, conn, true),
        SegmentReadEnd::Gap => {
            keep(ctx);
            lose(conn, true);
        }
        SegmentReadEnd::Changed => changed(ctx, &INGRESS, conn),
    }
}

/// Reads a segment with responses, or their end (FIN).
#[inline(always)]
pub(super) fn egress(ctx: &SkBuffContext, conn: &mut ServerSocket, segment: &PacketSegment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    match take_responses(conn, skb, segment, false) {
        SegmentReadEnd::Done => {}
        SegmentReadEnd::Budget => again(ctx, &EGRESS, conn, false),
        SegmentReadEnd::Gap => lose(conn, false),
        SegmentReadEnd::Changed => return changed(ctx, &EGRESS, conn),
    }
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
}

/// Reads one window of a buffered segment. Returns true if there may be more to read.
#[inline(always)]
pub(super) fn take_late<const WORDS: usize>(
    conn: &mut ServerSocket,
    socket: *mut c_void,
    draft: &mut UnlockedRead<WORDS>,
    sender: SegmentSender,
    read: impl Fn(&mut UnlockedRead<WORDS>, u32, bool),
) -> bool {
    let next = conn.http.h1.rx.next;
    let Some(late) = source::due(conn, sender, next) else { return false };
    let Some(source) = source::kept(sender, late, next) else {
        // The buffer is an LRU map, and other connections have evicted this segment.
        lose(conn, true);
        return false;
    };
    match take_requests(conn, socket, draft, source, true, read) {
        SegmentReadEnd::Done | SegmentReadEnd::Changed => true,
        // No progress: the segment is longer than its buffered part.
        SegmentReadEnd::Budget if conn.http.h1.rx.next == next => {
            lose(conn, true);
            false
        }
        SegmentReadEnd::Budget => true,
        SegmentReadEnd::Gap => false,
    }
}

/// Continues after a desync: with nothing in flight, bytes that the socket accepts next can only begin a request.
#[inline(always)]
fn resume(conn: &mut ServerSocket, seq: u32) {
    lock(conn);
    conn.http.h1.resume_requests(seq);
    unlock(conn);
}

/// Reads one window of the requests in a segment: an unlocked read by `read`, then the commit under the lock.
///
/// The slow path, byte by byte, runs only if `slow`; other programs leave it to the programs for the rest of a segment.
#[inline(always)]
fn take_requests<const WORDS: usize>(
    conn: &mut ServerSocket,
    socket: *mut c_void,
    draft: &mut UnlockedRead<WORDS>,
    source: SegmentBytes,
    slow: bool,
    read: impl Fn(&mut UnlockedRead<WORDS>, u32, bool),
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::of(conn.slot) else { return SegmentReadEnd::Done };
    let have = fetch(draft, &conn.http.h1.rx, &source);
    if have > 0 {
        read(draft, have, slow);
    }
    // `read` may have written the draft through the map, which the compiler cannot see.
    let draft = black_box(draft);
    let at = arrived(conn, !slow);
    lock(conn);
    let h1 = &mut conn.http.h1;
    if have > 0 {
        conn.http.happened |= h1.take_request(draft);
    }
    let h1 = black_box(&mut conn.http.h1);
    let seek = forgotten(h1.rx.seek(source.seq, source.len));
    conn.http.happened |= h1.after_request_seek();
    let happened = happened(conn);
    let is_first = rows.count(conn, happened, 0, at);
    // The first byte shows if the connection is TLS, whose handshake records are no requests.
    if happened & h1::OPAQUE != 0 {
        turns::begin(conn, draft.window[0].to_le() as u8);
    }
    leave(conn, rows, socket, happened, is_first, seek)
}

/// Reads one window of the responses in a segment; `slow` allows the slow path, as in [`take_requests`].
#[inline(always)]
fn take_responses(
    conn: &mut ServerSocket,
    skb: *mut __sk_buff,
    segment: &PacketSegment,
    slow: bool,
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::of(conn.slot) else { return SegmentReadEnd::Done };
    // The socket is locked while it sends, so there is one sender at a time.
    // SAFETY: a live map value, which only this program uses.
    let draft = unsafe { &mut *(&raw mut conn.draft) };
    let source = SegmentBytes::of(skb, segment);
    let have = fetch(draft, &conn.http.h1.tx, &source);
    if have > 0 {
        draft.read(have, false, slow);
    }
    let at = packet::sent_at(skb);
    // Asked before the lock: no helper may be called while it is held.
    let is_missed = has_missed(conn, skb);
    lock(conn);
    let h1 = &mut conn.http.h1;
    if have > 0 {
        conn.http.happened |= h1.take_response(draft);
    }
    let h1 = black_box(&mut conn.http.h1);
    let seek = forgotten(h1.tx.seek(source.seq, source.len));
    conn.http.happened |= h1.after_response_seek();
    let status = h1.tx.status;
    let mut happened = happened(conn);
    // A response without a request: if the socket has read bytes that we have not, its request was among them.
    if happened & h1::STRAY != 0 && is_missed {
        happened = happened & !h1::STRAY | h1::MISSED;
        happened |= conn.http.h1.lose_requests();
    }
    let is_first = rows.count(conn, happened, status, at);
    if happened & h1::OPAQUE != 0 {
        turns::begin(conn, 0);
    }
    leave(conn, rows, socket(skb), happened, is_first, seek)
}

/// Starts an unlocked read, and copies the bytes of the segment that most likely are read next.
///
/// The lock is not taken yet, since no helper may be called while it is held. Returns the number of bytes (0 means
/// none) as a half word in memory: the verifier then follows one path, whether anything was copied or not.
#[inline(always)]
fn fetch<const WORDS: usize>(
    draft: &mut UnlockedRead<WORDS>,
    side: &h1::Http1Direction,
    source: &SegmentBytes,
) -> u32 {
    let have = match draft.begin(side, source.seq, source.len) {
        Some(offset) => source.load(offset, &mut draft.window),
        None => 0,
    };
    black_box(have)
}

/// Releases the lock, and returns how the reading ended, from the events and the place where it would continue.
#[inline(always)]
fn leave(
    conn: &mut ServerSocket,
    rows: PodCounterRows,
    socket: *mut c_void,
    happened: h1::Http1Events,
    is_first: bool,
    seek: u32,
) -> SegmentReadEnd {
    let (received, sent) = (conn.http.h1.rx.next, conn.http.h1.tx.next);
    rows.bytes_in_time(conn, received, sent);
    // Another program may have found HTTP/2, and not have switched the connection yet.
    let is_http2 = conn.http.h1.is_http2();
    unlock(conn);
    if is_first {
        rows.announce();
    }
    if happened & h1::OPAQUE != 0 || is_http2 {
        return change(conn, socket, is_http2);
    }
    match seek {
        GAP => SegmentReadEnd::Gap,
        DONE => SegmentReadEnd::Done,
        _ => SegmentReadEnd::Budget,
    }
}

/// Returns this CPU's space for an unlocked read of requests.
#[inline(always)]
pub(super) fn draft() -> Option<&'static mut UnlockedRequestRead> {
    // SAFETY: this CPU's value; no other incoming packet interrupts the handling of one.
    DRAFT.get_ptr_mut(0).map(|draft| unsafe { &mut *draft })
}

/// Reads in this CPU's draft, by a function of its own. The parameter is that same draft.
#[inline(always)]
pub(super) fn read_by_function(_draft: &mut UnlockedRequestRead, len: u32, slow: bool) {
    read_requests(len, u32::from(slow));
}

/// Reads `len` bytes in this CPU's [`draft`]; returns their number.
///
/// A function of its own: the verifier checks its many words once for each program.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_requests(len: u32, slow: u32) -> u32 {
    let Some(draft) = draft() else { return 0 };
    let Some(len) = packet::some(len, h1::REQUEST_BYTES as u32) else { return 0 };
    draft.read(len, true, slow != 0);
    len
}

/// Switches a connection to HTTP/2, or adds it to the gauge of opaque estimates.
#[inline(always)]
fn change(conn: &mut ServerSocket, socket: *mut c_void, is_http2: bool) -> SegmentReadEnd {
    if is_http2 {
        if !http2::begin(conn, socket) {
            give_up(conn);
        }
        return SegmentReadEnd::Changed;
    }
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.slot) {
        // SAFETY: a live map value; a single word.
        unsafe { add(&raw mut (*pod).opaque, 1) };
    }
    SegmentReadEnd::Changed
}

/// Jumps to the program for the connection's present protocol.
#[inline(always)]
fn changed(ctx: &SkBuffContext, programs: &ProgramArray, conn: &ServerSocket) {
    let index = if conn.http.speaks == abi::SPEAKS_HTTP2 { HTTP2 } else { OTHER };
    // SAFETY: the programs behind the array have this context's type.
    unsafe { _ = programs.tail_call(ctx, index) };
}

/// Returns true if a response that comes now answers a request that was not seen.
///
/// None is in flight, and the socket has received more bytes than were read here.
#[inline(always)]
fn has_missed(conn: &ServerSocket, skb: *mut __sk_buff) -> bool {
    if conn.http.h1.is_busy() {
        return false;
    }
    let Some(next) = expected(skb) else { return false };
    // A FIN takes one number of the sequence.
    next.wrapping_sub(conn.http.h1.rx.next) as i32 > 1
}

/// Reads one more window of a segment with requests. Returns [`READ`], [`AGAIN`] or [`ELSE`].
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn requests_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb).filter(|conn| conn.slot != 0) else { return READ };
    let Some(segment) = packet::segment(skb) else { return READ };
    let Some(draft) = draft() else { return READ };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return ELSE;
    }
    let source = SegmentBytes::of(skb, &segment);
    match take_requests(conn, socket(skb), draft, source, true, read_by_function) {
        SegmentReadEnd::Budget => AGAIN,
        SegmentReadEnd::Done if !source::is_awaited(conn) => READ,
        _ => ELSE,
    }
}

/// Reads one more window of a segment with responses. Returns [`READ`], [`AGAIN`] or [`ELSE`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn responses_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = stored(skb).filter(|conn| conn.slot != 0) else { return READ };
    let Some(segment) = packet::segment(skb) else { return READ };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return ELSE;
    }
    match take_responses(conn, skb, &segment, true) {
        SegmentReadEnd::Budget => AGAIN,
        SegmentReadEnd::Done if !segment.fin => READ,
        _ => ELSE,
    }
}

/// Reads the rest of a segment of requests, of which `ingress` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    if !more(ctx, &INGRESS, requests_step, [0, MORE]) {
        lost(ctx.as_ptr().cast(), 1);
    }
    PASS
}

/// Reads the rest of a segment of responses, of which `egress` has read as much as it may.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    if !more(ctx, &EGRESS, responses_step, [0, MORE]) {
        lost(ctx.as_ptr().cast(), 0);
    }
    PASS
}

/// Marks the boundaries of one direction as lost. A function of its own, since its callers have little stack left.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lost(skb: *mut __sk_buff, requests: u32) -> u32 {
    if let Some(conn) = stored(skb) {
        lose(conn, requests != 0);
    }
    0
}

/// Jumps to the program for the rest of a segment; if that fails, boundaries are lost.
#[inline(always)]
fn again(ctx: &SkBuffContext, programs: &ProgramArray, conn: &mut ServerSocket, requests: bool) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { programs.tail_call(ctx, MORE) };
    lose(conn, requests);
}

/// Marks the boundaries of one direction as lost (desync).
#[inline(always)]
pub(super) fn lose(conn: &mut ServerSocket, requests: bool) {
    let Some(rows) = PodCounterRows::of(conn.slot) else { return };
    let at = now();
    lock(conn);
    let h1 = &mut conn.http.h1;
    conn.http.happened |= if requests { h1.lose_requests() } else { h1.lose_responses() };
    let happened = happened(conn);
    rows.count(conn, happened, 0, at);
    unlock(conn);
}
