//! HTTP/1, and connections whose protocol is not known yet.

use core::{ffi::c_void, hint::black_box};

use aya_ebpf::{
    EbpfContext as _, bindings::__sk_buff, maps::ProgramArray, programs::SkBuffContext,
};
use datapath::{
    abi::{self, ServerSocket},
    h1::{self, UnlockedRead, UnlockedRequestRead, UnlockedResponseRead},
};

use super::{
    PASS, PROGRAM_HTTP2, PROGRAM_LATE, PROGRAM_MORE, PROGRAM_OTHER, SEEK_DONE, SEEK_GAP, STEP_DONE,
    STEP_MORE, STEP_RESTART, SegmentReadEnd, arrival_ns, connection_of,
    counters::PodCounterRows,
    encode_seek, end_requests, expected_seq, http2, idle, jump_to_buffering, lock, opaque,
    read_more,
    segment_bytes::{self, SegmentBytes, SegmentSender},
    socket, switch_to_opaque, take_events, unlock,
};
use crate::{
    maps::{DRAFT, EGRESS, INGRESS, POD_STATE, atomic_add, monotonic_ns},
    packet::{self, PacketSegment},
};

/// Reads a segment with requests.
#[inline(always)]
pub(super) fn ingress(ctx: &SkBuffContext, conn: &mut ServerSocket, segment: &PacketSegment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(draft) = request_read() else { return };
    let source = SegmentBytes::from_packet(skb, segment);
    // The socket expects this very segment, so no earlier bytes are missing: a request may begin here.
    if conn.http.h1.rx.state == h1::state::DESYNC && expected_seq(skb) == Some(segment.seq) {
        resync_requests(conn, segment.seq);
    }
    match read_requests_window(conn, socket(skb), draft, source, false, read_lines) {
        SegmentReadEnd::Done if segment_bytes::has_pending(conn) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_LATE) };
        }
        SegmentReadEnd::Done => {}
        // Another run goes on where this one has stopped.
        SegmentReadEnd::Budget => jump_to_more(ctx, &INGRESS, conn, true),
        SegmentReadEnd::Gap => {
            jump_to_buffering(ctx);
            desync(conn, true);
        }
        SegmentReadEnd::Changed => jump_to_protocol(ctx, &INGRESS, conn),
    }
}

/// Reads a segment with responses, or their end (FIN).
#[inline(always)]
pub(super) fn egress(ctx: &SkBuffContext, conn: &mut ServerSocket, segment: &PacketSegment) {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let read = |draft: &mut UnlockedResponseRead| _ = draft.read_lines(false);
    match read_responses_window(conn, skb, segment, read) {
        SegmentReadEnd::Done => {}
        SegmentReadEnd::Budget => jump_to_more(ctx, &EGRESS, conn, false),
        SegmentReadEnd::Gap => desync(conn, false),
        SegmentReadEnd::Changed => return jump_to_protocol(ctx, &EGRESS, conn),
    }
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
        end_requests(conn, socket(skb), true);
    }
}

/// Reads one window of a buffered segment. Returns true if there may be more to read.
#[inline(always)]
pub(super) fn read_pending<const WORDS: usize>(
    conn: &mut ServerSocket,
    socket: *mut c_void,
    draft: &mut UnlockedRead<WORDS>,
    sender: SegmentSender,
    read: impl Fn(&mut UnlockedRead<WORDS>),
) -> bool {
    let next = conn.http.h1.rx.next;
    let Some(pending) = segment_bytes::next_pending(conn, sender, next) else { return false };
    let Some(source) = segment_bytes::buffered_part(sender, pending, next) else {
        // The buffer is an LRU map, and other connections have evicted this segment.
        desync(conn, true);
        return false;
    };
    match read_requests_window(conn, socket, draft, source, true, read) {
        SegmentReadEnd::Done | SegmentReadEnd::Changed => true,
        // No progress: the segment is longer than its buffered part.
        SegmentReadEnd::Budget if conn.http.h1.rx.next == next => {
            desync(conn, true);
            false
        }
        SegmentReadEnd::Budget => true,
        SegmentReadEnd::Gap => false,
    }
}

/// Continues after a desync: with nothing in flight, bytes that the socket accepts next can only begin a request.
#[inline(always)]
fn resync_requests(conn: &mut ServerSocket, seq: u32) {
    lock(conn);
    conn.http.h1.resync_requests(seq);
    unlock(conn);
}

/// Reads one window of the requests in a segment: an unlocked read by `read`, then the commit under the lock.
///
/// The first program of a packet leaves the slow path, byte by byte, to the programs for the rest of a segment, which
/// pass `rest`.
#[inline(always)]
fn read_requests_window<const WORDS: usize>(
    conn: &mut ServerSocket,
    socket: *mut c_void,
    draft: &mut UnlockedRead<WORDS>,
    source: SegmentBytes,
    rest: bool,
    read: impl Fn(&mut UnlockedRead<WORDS>),
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return SegmentReadEnd::Done };
    // The parser runs on a draft without the lock. The commit below takes it only if the connection still stands there.
    begin_unlocked_read(draft, &conn.http.h1.rx, &source);
    if draft.filled_len() > 0 {
        read(draft);
    }
    // `read` may have written the draft through the map, which the compiler cannot see.
    let draft = black_box(draft);
    let now_ns = arrival_ns(conn, !rest);
    lock(conn);
    let h1 = &mut conn.http.h1;
    if draft.filled_len() > 0 {
        conn.http.events |= h1.commit_request_read(draft);
    }
    let h1 = black_box(&mut conn.http.h1);
    let seek = draft.untracked(encode_seek(h1.rx.seek(source.seq, source.len)));
    conn.http.events |= h1.after_request_seek();
    let events = take_events(conn);
    let exceeds_threshold = rows.count_http1(conn, events, 0, now_ns);
    // The first byte shows if the connection is TLS, whose handshake records are no requests.
    if events & h1::OPAQUE != 0 {
        opaque::begin_estimate(conn, draft.window[0].to_le() as u8);
    }
    finish_read(conn, rows, socket, events, exceeds_threshold, seek)
}

/// Reads one window of the responses in a segment, with the parameters of [`read_requests_window`].
#[inline(always)]
fn read_responses_window(
    conn: &mut ServerSocket,
    skb: *mut __sk_buff,
    segment: &PacketSegment,
    read: impl Fn(&mut UnlockedResponseRead),
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return SegmentReadEnd::Done };
    // The socket is locked while it sends, so there is one sender at a time.
    // SAFETY: a live map value, which only this program uses.
    let draft = unsafe { &mut *(&raw mut conn.response_read) };
    // Requests have a draft per CPU instead: several CPUs may receive segments of one connection.
    let source = SegmentBytes::from_packet(skb, segment);
    begin_unlocked_read(draft, &conn.http.h1.tx, &source);
    if draft.filled_len() > 0 {
        read(draft);
    }
    let sent_ns = packet::sent_ns(skb);
    // Asked before the lock: no helper may be called while it is held.
    let is_missed = has_unseen_request(conn, skb);
    lock(conn);
    let h1 = &mut conn.http.h1;
    if draft.filled_len() > 0 {
        conn.http.events |= h1.commit_response_read(draft);
    }
    let h1 = black_box(&mut conn.http.h1);
    let seek = draft.untracked(encode_seek(h1.tx.seek(source.seq, source.len)));
    conn.http.events |= h1.after_response_seek();
    let status = h1.tx.status;
    let mut events = take_events(conn);
    // A response without a request: if the socket has read bytes that we have not, its request was among them.
    if events & h1::STRAY != 0 && is_missed {
        events = events & !h1::STRAY | h1::MISSED;
        events |= conn.http.h1.desync_requests();
    }
    let exceeds_threshold = rows.count_http1(conn, events, status, sent_ns);
    // Bytes of the server tell nothing of the client's protocol, so no first byte is passed.
    if events & h1::OPAQUE != 0 {
        opaque::begin_estimate(conn, 0);
    }
    let end = finish_read(conn, rows, socket(skb), events, exceeds_threshold, seek);
    if events & h1::FINISHED != 0 && rows.sends_idle_events() {
        idle::report_if_idle(skb);
    }
    end
}

/// Starts an unlocked read, and copies the bytes of the segment that most likely are read next.
///
/// The lock is not taken yet, since no helper may be called while it is held. The number of bytes (0 means none) is
/// stored in the read: the verifier then follows one path, whether anything was copied or not.
#[inline(always)]
fn begin_unlocked_read<const WORDS: usize>(
    draft: &mut UnlockedRead<WORDS>,
    direction: &h1::Http1Direction,
    source: &SegmentBytes,
) {
    let loaded_len = match draft.begin(direction, source.seq, source.len) {
        Some(offset) => source.load(offset, &mut draft.window),
        None => 0,
    };
    draft.set_filled_len(loaded_len);
}

/// Releases the lock, and returns how the reading ended, from the events and the place where it would continue.
#[inline(always)]
fn finish_read(
    conn: &mut ServerSocket,
    rows: PodCounterRows,
    socket: *mut c_void,
    events: h1::Http1Events,
    exceeds_threshold: bool,
    seek: u32,
) -> SegmentReadEnd {
    let (received, sent) = (conn.http.h1.rx.next, conn.http.h1.tx.next);
    rows.add_bytes_before_wrap(conn, received, sent);
    // Another program may have found HTTP/2, and not have switched the connection yet.
    let is_http2 = conn.http.h1.is_http2();
    unlock(conn);
    if exceeds_threshold {
        rows.send_growth_event();
    }
    if events & h1::OPAQUE != 0 || is_http2 {
        return switch_protocol(conn, socket, is_http2);
    }
    match seek {
        SEEK_GAP => SegmentReadEnd::Gap,
        SEEK_DONE => SegmentReadEnd::Done,
        _ => SegmentReadEnd::Budget,
    }
}

/// Returns this CPU's space for an unlocked read of requests.
#[inline(always)]
pub(super) fn request_read() -> Option<&'static mut UnlockedRequestRead> {
    // SAFETY: this CPU's value; no other incoming packet interrupts the handling of one.
    DRAFT.get_ptr_mut(0).map(|draft| unsafe { &mut *draft })
}

/// Reads whole lines in this CPU's draft, which is the parameter.
#[inline(always)]
fn read_lines(_draft: &mut UnlockedRequestRead) {
    read_request_lines();
}

/// Reads lines or, where necessary, single bytes in this CPU's draft, which is the parameter.
#[inline(always)]
pub(super) fn read_lines_or_bytes(draft: &mut UnlockedRequestRead) {
    if !draft.may_begin_with_lines() || read_more_request_lines() == 0 {
        read_request_bytes();
    }
}

/// Reads whole lines in this CPU's entry of `DRAFT`; returns the number of bytes.
///
/// A function of its own: the verifier checks its many words once for each program.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_request_lines() -> u32 {
    let Some(draft) = request_read() else { return 0 };
    draft.read_lines(true)
}

/// Reads whole lines there, with [`classify_request_line`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_more_request_lines() -> u32 {
    let Some(draft) = request_read() else { return 0 };
    draft.read_lines_by(true, |at| classify_request_line(at))
}

/// Classifies the line at byte `at` of this CPU's entry of `DRAFT`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn classify_request_line(at: u32) -> u32 {
    let Some(draft) = request_read() else { return 0 };
    draft.classify_line(at)
}

/// Reads bytes in this CPU's entry of `DRAFT` by the slow path. A function of its own for the verifier, as above.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_request_bytes() -> u32 {
    if let Some(draft) = request_read() {
        draft.read_bytes(true);
    }
    0
}

/// Reads lines or, where necessary, single bytes of responses in the storage of the packet's socket, which is `draft`.
#[inline(always)]
fn read_response(skb: *mut __sk_buff, draft: &mut UnlockedResponseRead) {
    if !draft.may_begin_with_lines() || read_response_lines(skb) == 0 {
        draft.read_bytes(false);
    }
}

/// Reads whole lines of responses; returns the number of bytes. A function of its own for the verifier.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_response_lines(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb) else { return 0 };
    conn.response_read.read_lines_by(false, |at| classify_response_line(skb, at))
}

/// Classifies the line at byte `at` of a response.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn classify_response_line(skb: *mut __sk_buff, at: u32) -> u32 {
    let Some(conn) = connection_of(skb) else { return 0 };
    conn.response_read.classify_line(at)
}

/// Switches a connection to HTTP/2, or adds it to the gauge of opaque estimates.
#[inline(always)]
fn switch_protocol(conn: &mut ServerSocket, socket: *mut c_void, is_http2: bool) -> SegmentReadEnd {
    if is_http2 {
        if !http2::switch_to_http2(conn, socket) {
            switch_to_opaque(conn);
        }
        return SegmentReadEnd::Changed;
    }
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.pod_slot) {
        // SAFETY: a live map value; a single word.
        unsafe { atomic_add(&raw mut (*pod).opaque_connections, 1) };
    }
    SegmentReadEnd::Changed
}

/// Jumps to the program for the connection's present protocol.
#[inline(always)]
fn jump_to_protocol(ctx: &SkBuffContext, programs: &ProgramArray, conn: &ServerSocket) {
    let index =
        if conn.http.protocol == abi::PROTOCOL_HTTP2 { PROGRAM_HTTP2 } else { PROGRAM_OTHER };
    // SAFETY: the programs behind the array have this context's type.
    unsafe { _ = programs.tail_call(ctx, index) };
}

/// Returns true if a response that comes now answers a request that was not seen.
///
/// None is in flight, and the socket has received more bytes than were read here.
#[inline(always)]
fn has_unseen_request(conn: &ServerSocket, skb: *mut __sk_buff) -> bool {
    if conn.http.h1.is_busy() {
        return false;
    }
    let Some(next) = expected_seq(skb) else { return false };
    // A FIN takes one number of the sequence.
    next.wrapping_sub(conn.http.h1.rx.next) as i32 > 1
}

/// Reads one more window of a segment with requests. Returns [`STEP_DONE`], [`STEP_MORE`] or [`STEP_RESTART`].
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn requests_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb).filter(|conn| conn.pod_slot != 0) else { return STEP_DONE };
    let Some(segment) = packet::parse_segment(skb) else { return STEP_DONE };
    let Some(draft) = request_read() else { return STEP_DONE };
    if conn.http.protocol != abi::PROTOCOL_HTTP1 {
        return STEP_RESTART;
    }
    let source = SegmentBytes::from_packet(skb, &segment);
    match read_requests_window(conn, socket(skb), draft, source, true, read_lines_or_bytes) {
        SegmentReadEnd::Budget => STEP_MORE,
        SegmentReadEnd::Done if !segment_bytes::has_pending(conn) => STEP_DONE,
        _ => STEP_RESTART,
    }
}

/// Reads one more window of a segment with responses. Returns [`STEP_DONE`], [`STEP_MORE`] or [`STEP_RESTART`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn responses_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb).filter(|conn| conn.pod_slot != 0) else { return STEP_DONE };
    let Some(segment) = packet::parse_segment(skb) else { return STEP_DONE };
    if conn.http.protocol != abi::PROTOCOL_HTTP1 {
        return STEP_RESTART;
    }
    match read_responses_window(conn, skb, &segment, |draft| read_response(skb, draft)) {
        SegmentReadEnd::Budget => STEP_MORE,
        SegmentReadEnd::Done if !segment.fin => STEP_DONE,
        _ => STEP_RESTART,
    }
}

/// Reads the rest of a segment of requests, of which `ingress` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    if !read_more(ctx, &INGRESS, requests_step, [0, PROGRAM_MORE]) {
        desync_subprogram(ctx.as_ptr().cast(), 1);
    }
    PASS
}

/// Reads the rest of a segment of responses, of which `egress` has read as much as it may.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    if !read_more(ctx, &EGRESS, responses_step, [0, PROGRAM_MORE]) {
        desync_subprogram(ctx.as_ptr().cast(), 0);
    }
    PASS
}

/// Marks the boundaries of one direction as lost. A function of its own, since its callers have little stack left.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn desync_subprogram(skb: *mut __sk_buff, requests: u32) -> u32 {
    if let Some(conn) = connection_of(skb) {
        desync(conn, requests != 0);
    }
    0
}

/// Jumps to the program for the rest of a segment; if that fails, boundaries are lost.
#[inline(always)]
fn jump_to_more(
    ctx: &SkBuffContext,
    programs: &ProgramArray,
    conn: &mut ServerSocket,
    requests: bool,
) {
    // SAFETY: the program behind the array has this context's type.
    unsafe { programs.tail_call(ctx, PROGRAM_MORE) };
    desync(conn, requests);
}

/// Marks the boundaries of one direction as lost (desync).
#[inline(always)]
pub(super) fn desync(conn: &mut ServerSocket, requests: bool) {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let now_ns = monotonic_ns();
    lock(conn);
    let h1 = &mut conn.http.h1;
    conn.http.events |= if requests { h1.desync_requests() } else { h1.desync_responses() };
    let events = take_events(conn);
    rows.count_http1(conn, events, 0, now_ns);
    unlock(conn);
}
