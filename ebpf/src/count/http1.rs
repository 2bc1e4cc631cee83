//! HTTP/1, and what comes before it is known what a connection speaks.

use core::{ffi::c_void, hint::black_box};

use aya_ebpf::{
    EbpfContext as _, bindings::__sk_buff, maps::ProgramArray, programs::SkBuffContext,
};
use common::{
    abi::{self, Conn},
    h1::{self, Draft, RequestDraft},
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
    maps::{DRAFT, EGRESS, INGRESS, POD_STATE, add, now},
    packet::{self, Segment},
};

/// A segment with requests.
#[inline(always)]
pub(super) fn ingress(ctx: &SkBuffContext, conn: &mut Conn, segment: &Segment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(draft) = draft() else { return };
    let source = Source::of(skb, segment);
    if conn.http.h1.rx.at == h1::at::LOST && expected(skb) == Some(segment.seq) {
        resume(conn, segment.seq);
    }
    match take_requests(conn, socket(skb), draft, source, false, read_by_function) {
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
pub(super) fn take_late<const WORDS: usize>(
    conn: &mut Conn,
    socket: *mut c_void,
    draft: &mut Draft<WORDS>,
    sender: Sender,
    read: impl Fn(&mut Draft<WORDS>, u32, bool),
) -> bool {
    let next = conn.http.h1.rx.next;
    let Some(late) = source::due(conn, sender, next) else { return false };
    let Some(source) = source::kept(sender, late, next) else {
        // Others have pushed it out.
        lose(conn, true);
        return false;
    };
    match take_requests(conn, socket, draft, source, true, read) {
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

/// Reads a window of the requests in a segment, by `read`. Only `slow` it goes byte by byte where that is needed: the others
/// leave that to the programs for more of a segment.
#[inline(always)]
fn take_requests<const WORDS: usize>(
    conn: &mut Conn,
    socket: *mut c_void,
    draft: &mut Draft<WORDS>,
    source: Source,
    slow: bool,
    read: impl Fn(&mut Draft<WORDS>, u32, bool),
) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    let have = fetch(draft, &conn.http.h1.rx, &source);
    if have > 0 {
        read(draft, have, slow);
    }
    // Another one may have written there, which the compiler cannot know.
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
    if happened & h1::OPAQUE != 0 {
        turns::begin(conn, draft.window[0].to_le() as u8);
    }
    leave(conn, rows, socket, happened, is_first, seek)
}

/// Reads a window of the responses in a segment. `slow` as there.
#[inline(always)]
fn take_responses(conn: &mut Conn, skb: *mut __sk_buff, segment: &Segment, slow: bool) -> End {
    let Some(rows) = Rows::of(conn.slot) else { return End::Done };
    // The socket is locked while it sends: there is one sender at a time.
    // SAFETY: a live map value, which only this program uses.
    let draft = unsafe { &mut *(&raw mut conn.draft) };
    let source = Source::of(skb, segment);
    let have = fetch(draft, &conn.http.h1.tx, &source);
    if have > 0 {
        draft.read(have, false, slow);
    }
    let at = packet::sent_at(skb);
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

/// Begins a draft, and copies what most likely is read next of a segment: the lock is not taken yet, as helpers may not be
/// called with it held. Returns how many bytes (0: none), as a half word in memory: whether anything was copied or not, the
/// verifier follows one way on.
#[inline(always)]
fn fetch<const WORDS: usize>(draft: &mut Draft<WORDS>, side: &h1::Side, source: &Source) -> u32 {
    let have = match draft.begin(side, source.seq, source.len) {
        Some(offset) => source.load(offset, &mut draft.window),
        None => 0,
    };
    black_box(have)
}

/// Gives the lock back, and says how the reading of a segment ended by what happened and where it would go on.
#[inline(always)]
fn leave(
    conn: &mut Conn,
    rows: Rows,
    socket: *mut c_void,
    happened: h1::Happened,
    is_first: bool,
    seek: u32,
) -> End {
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
        GAP => End::Gap,
        DONE => End::Done,
        _ => End::Budget,
    }
}

/// Room for requests that are being read.
#[inline(always)]
pub(super) fn draft() -> Option<&'static mut RequestDraft> {
    // SAFETY: this CPU's, and nothing interrupts a packet that comes in by another one.
    DRAFT.get_ptr_mut(0).map(|draft| unsafe { &mut *draft })
}

/// Reads in this CPU's draft, by a function of its own.
#[inline(always)]
pub(super) fn read_by_function(_draft: &mut RequestDraft, len: u32, slow: bool) {
    read_requests(len, u32::from(slow));
}

/// Reads `len` bytes in this CPU's [`draft`]. A function of its own for the verifier, which walks through its many words once for
/// each program.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_requests(len: u32, slow: u32) -> u32 {
    let Some(draft) = draft() else { return 0 };
    let Some(len) = packet::some(len, h1::REQUEST_BYTES as u32) else { return 0 };
    draft.read(len, true, slow != 0);
    len
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
    let Some(draft) = draft() else { return READ };
    if conn.http.speaks != abi::SPEAKS_HTTP1 {
        return ELSE;
    }
    let source = Source::of(skb, &segment);
    match take_requests(conn, socket(skb), draft, source, true, read_by_function) {
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
