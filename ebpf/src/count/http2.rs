//! HTTP/2: reads its frames, and counts the streams that they open and close.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    programs::SkBuffContext,
};
use datapath::{
    abi::{self, ServerSocket},
    h2, words,
};

use super::{
    MAX_STEPS, PASS, PROGRAM_HTTP2, PROGRAM_LATE_HTTP2, PROGRAM_MORE_HTTP2, PROGRAM_OTHER,
    SEEK_DONE, SEEK_GAP, STEP_DONE, STEP_MORE, STEP_RESTART, SegmentReadEnd, arrival_ns,
    connection_of,
    counters::PodCounterRows,
    encode_seek, end_requests, expected_seq, jump_to_buffering, lock, opaque, read_more,
    remote_address, remote_port,
    segment_bytes::{self, SegmentBytes, SegmentSender},
    socket, unlock,
};
use crate::{
    maps::{EGRESS, INGRESS, POD_STATE, STREAMS, atomic_add, monotonic_ns},
    packet,
};

/// Frames read in a packet's first run, enough for most packets; [`client_step`] and [`server_step`] read the rest.
const FIRST_RUN_FRAMES: usize = 4;
/// Rounds of one step: find the place, then read one frame.
const STEP_ROUNDS: usize = 2;

/// Switches a connection to HTTP/2. Returns `false` if the kernel has no memory for its streams.
#[inline(always)]
pub(super) fn switch_to_http2(conn: &mut ServerSocket, socket: *mut c_void) -> bool {
    // If two CPUs create the storage at once, one call is refused, and finds the other's.
    let created = STREAMS.get_or_zero(socket);
    let Some(streams) = created.or_else(|| STREAMS.get(socket)) else { return false };
    lock(conn);
    if conn.http.protocol == abi::PROTOCOL_HTTP1 {
        let h1 = &conn.http.h1;
        let upgraded = if h1.is_upgrading() { Some(conn.http.request_started_ns) } else { None };
        streams.open(&h1.http2_handoff(), upgraded);
        conn.http.protocol = abi::PROTOCOL_HTTP2;
    }
    unlock(conn);
    true
}

/// Reads a segment from the client.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let Some(conn) = connection_of(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    let source = SegmentBytes::from_packet(skb, &segment);
    // The socket expects this very segment, so no earlier bytes are missing: frames may be found again here.
    if streams.rx.is_desynced() && expected_seq(skb) == Some(segment.seq) {
        resync_requests(conn, streams, source);
    }
    match read_frames(conn, streams, source, FIRST_RUN_FRAMES, true) {
        SegmentReadEnd::Done if has_readable_pending(conn, streams) => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_LATE_HTTP2) };
        }
        SegmentReadEnd::Done => {}
        SegmentReadEnd::Budget => {
            // SAFETY: the program behind the array has this context's type.
            unsafe { INGRESS.tail_call(ctx, PROGRAM_MORE_HTTP2) };
            // Reached only if the jump failed: the rest stays unread, and the next frame is not known.
            desync_requests(conn, streams);
        }
        SegmentReadEnd::Gap => {
            jump_to_buffering(ctx);
            desync_requests(conn, streams);
        }
        SegmentReadEnd::Changed => {
            desync(conn, streams);
            // SAFETY: the program behind the array has this context's type.
            unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_OTHER) };
        }
    }
    PASS
}

/// Reads a segment from the server.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let Some(conn) = connection_of(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    if segment.len > 0 {
        match read_frames(
            conn,
            streams,
            SegmentBytes::from_packet(skb, &segment),
            FIRST_RUN_FRAMES,
            false,
        ) {
            SegmentReadEnd::Done => abort_goaway_streams(conn, streams),
            SegmentReadEnd::Budget => {
                // SAFETY: the program behind the array has this context's type.
                unsafe { EGRESS.tail_call(ctx, PROGRAM_MORE_HTTP2) };
                // Reached only if the jump failed: the rest stays unread, and the next frame is not known.
                desync(conn, streams);
            }
            SegmentReadEnd::Gap | SegmentReadEnd::Changed => desync(conn, streams),
        }
    }
    // A FIN counts once every byte before it was read: streams may end in these.
    if segment.fin && streams.tx.next == segment.seq.wrapping_add(segment.len) {
        end_requests(conn, socket(skb), true);
    }
    PASS
}

/// Reads segments buffered until the gap before them was filled.
#[inline(always)]
pub fn ingress_late(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let mut round = 0;
    while round < MAX_STEPS && pending_client_step(skb) != 0 {
        round += 1;
    }
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let Some(conn) = connection_of(skb) else { return PASS };
    let Some(streams) = STREAMS.get(socket(skb)) else { return PASS };
    let is_expected = expected_seq(skb) == Some(segment.seq);
    // Read only now: `expected_seq` was read before the socket got the bytes, perhaps by another CPU a moment ago.
    // SAFETY: a word of a live map value.
    let next = unsafe { ptr::read_volatile(&raw const streams.rx.next) };
    let is_behind = (segment.seq.wrapping_sub(next) as i32) > 0;
    if is_expected && is_behind && !streams.rx.is_desynced() {
        // The socket has the missing bytes, although no program has seen them.
        desync_requests(conn, streams);
        // SAFETY: the program behind the array has this context's type.
        unsafe { _ = INGRESS.tail_call(ctx, PROGRAM_HTTP2) };
    }
    PASS
}

/// Reads, in sock_ops, segments that came to the listener before their connection was established.
#[inline(always)]
pub fn opened_late(ops: *mut bpf_sock_ops) {
    let mut round = 0;
    while round < MAX_STEPS && opened_pending_client_step(ops) != 0 {
        round += 1;
    }
}

/// Reads one frame of a buffered segment; returns 1 while there is more. Separate so that the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pending_client_step(skb: *mut __sk_buff) -> u32 {
    let Some(conn) = connection_of(skb) else { return 0 };
    let Some(streams) = STREAMS.get(socket(skb)) else { return 0 };
    let Some(sender) = packet::parse_sender(skb) else { return 0 };
    u32::from(read_pending(conn, streams, sender))
}

/// Reads one frame of a buffered segment in sock_ops; returns 1 while there is more.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn opened_pending_client_step(ops: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a live context; the field is a pointer in every kernel that has socket storage for sock_ops.
    let socket = unsafe { (*ops).__bindgen_anon_2.sk.cast() };
    let Some(conn) = crate::maps::CONNS.get(socket) else { return 0 };
    let Some(streams) = STREAMS.get(socket) else { return 0 };
    u32::from(read_pending(conn, streams, (remote_address(ops), remote_port(ops))))
}

/// Reads frames of one buffered segment. Returns true if there may be more to read.
#[inline(always)]
fn read_pending(
    conn: &mut ServerSocket,
    streams: &mut h2::Http2Connection,
    sender: SegmentSender,
) -> bool {
    let next = streams.rx.next;
    let Some(pending) = segment_bytes::next_pending(conn, sender, next) else { return false };
    let Some(source) = segment_bytes::buffered_part(sender, pending, next) else {
        // The buffer is an LRU map, and other connections have evicted this segment.
        desync_requests(conn, streams);
        return false;
    };
    match read_frames(conn, streams, source, STEP_ROUNDS, true) {
        SegmentReadEnd::Done => true,
        // No progress: the segment is longer than its buffered part.
        SegmentReadEnd::Budget if streams.rx.next == next => {
            desync_requests(conn, streams);
            false
        }
        SegmentReadEnd::Budget => true,
        SegmentReadEnd::Changed => {
            desync(conn, streams);
            false
        }
        SegmentReadEnd::Gap => false,
    }
}

/// Reads the frames of a segment, in up to `rounds` rounds; payload is skipped.
#[inline(always)]
fn read_frames(
    conn: &mut ServerSocket,
    streams: &mut h2::Http2Connection,
    source: SegmentBytes,
    rounds: usize,
    requests: bool,
) -> SegmentReadEnd {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return SegmentReadEnd::Done };
    let mut window = [0_u64; h2::PEEK_WORDS];
    let packet_ns = if requests {
        arrival_ns(conn, rounds == FIRST_RUN_FRAMES)
    } else {
        packet::sent_ns(source.skb)
    };
    let direction = if requests { &streams.rx } else { &streams.tx };
    let (mut loaded_len, mut loaded_seq) = match direction.peek_offset(source.seq, source.len) {
        Some(offset) => (source.load_peek(offset, &mut window), source.seq.wrapping_add(offset)),
        None => (0, source.seq),
    };
    // Whether anything was copied or not, the verifier follows one path.
    [loaded_len, loaded_seq] = words::untracked_pair([loaded_len, loaded_seq]);
    let mut round = 0;
    while round < rounds {
        lock(conn);
        let streams = black_box(&mut *streams);
        let direction = if requests { &mut streams.rx } else { &mut streams.tx };
        // The bytes were copied before the lock was taken; they count only if the direction still reads there.
        if loaded_len > 0 && direction.is_reading_at(loaded_seq) {
            direction.read(&window, loaded_len);
        }
        let direction = if requests { &mut streams.rx } else { &mut streams.tx };
        let seek = encode_seek(direction.seek(source.seq, source.len));
        let [seek, _] = words::untracked_pair([seek, seek]);
        let ended = direction.take_ended_frame();
        let next = direction.next;
        let streams = black_box(&mut *streams);
        streams.apply_frame(ended, requests, packet_ns);
        let change = &black_box(&mut *streams).change;
        let exceeds_threshold = rows.count_http2(conn, change, packet_ns);
        let answered = change.answered;
        let is_foreign = streams.is_not_http2();
        let (received, sent) = (streams.rx.next, streams.tx.next);
        // Bytes are added when a response ends; in between only before the difference could wrap.
        if answered > 0 {
            rows.add_bytes_until(conn, received, sent);
        } else {
            rows.add_bytes_before_wrap(conn, received, sent);
        }
        unlock(conn);
        if exceeds_threshold {
            rows.send_growth_event();
        }
        if is_foreign {
            return SegmentReadEnd::Changed;
        }
        match seek {
            SEEK_GAP => return SegmentReadEnd::Gap,
            SEEK_DONE => return SegmentReadEnd::Done,
            offset => {
                loaded_seq = next;
                loaded_len = source.load_peek(offset, &mut window);
                if loaded_len == 0 {
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
fn abort_goaway_streams(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    if !streams.has_pending_goaway() {
        return;
    }
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let now_ns = monotonic_ns();
    lock(conn);
    let aborted = streams.abort_goaway_streams();
    rows.count_aborted(conn, aborted, now_ns);
    unlock(conn);
}

/// Reads one more frame of a client's segment. A function of its own, which the verifier checks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn client_step(skb: *mut __sk_buff) -> u32 {
    read_frame_step(skb, true)
}

/// Reads one more frame of a server's segment. A function of its own, which the verifier checks once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn server_step(skb: *mut __sk_buff) -> u32 {
    read_frame_step(skb, false)
}

/// Reads one more frame of a segment. Returns [`STEP_DONE`], [`STEP_MORE`] or [`STEP_RESTART`].
#[inline(always)]
fn read_frame_step(skb: *mut __sk_buff, requests: bool) -> u32 {
    let Some(segment) = packet::parse_segment(skb) else { return STEP_DONE };
    let Some(conn) = connection_of(skb) else { return STEP_DONE };
    let Some(streams) = STREAMS.get(socket(skb)) else { return STEP_DONE };
    let end =
        read_frames(conn, streams, SegmentBytes::from_packet(skb, &segment), STEP_ROUNDS, requests);
    // Work that comes behind the whole segment: buffered segments of the client, or the end of the pod's direction.
    let follows = if requests {
        has_readable_pending(conn, streams)
    } else {
        segment.fin || streams.has_pending_goaway()
    };
    match end {
        SegmentReadEnd::Budget => STEP_MORE,
        SegmentReadEnd::Done if !follows => STEP_DONE,
        _ => STEP_RESTART,
    }
}

/// Reads the rest of a client's segment, of which `ingress_http2` has read as much as it may.
#[inline(always)]
pub fn ingress_more(ctx: &SkBuffContext) -> i32 {
    let is_complete = read_more(ctx, &INGRESS, client_step, [PROGRAM_HTTP2, PROGRAM_MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) =
        (is_complete, connection_of(skb), STREAMS.get(socket(skb)))
    {
        desync_requests(conn, streams);
    }
    PASS
}

/// Reads the rest of a server's segment, of which `egress_http2` has read as much as it may.
#[inline(always)]
pub fn egress_more(ctx: &SkBuffContext) -> i32 {
    let is_complete = read_more(ctx, &EGRESS, server_step, [PROGRAM_HTTP2, PROGRAM_MORE_HTTP2]);
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    if let (false, Some(conn), Some(streams)) =
        (is_complete, connection_of(skb), STREAMS.get(socket(skb)))
    {
        desync(conn, streams);
    }
    PASS
}

/// Returns true if segments are buffered that can be read once the gap before them is filled.
#[inline(always)]
fn has_readable_pending(conn: &ServerSocket, streams: &h2::Http2Connection) -> bool {
    segment_bytes::has_pending(conn) && !streams.rx.is_desynced()
}

/// Continues after a desync where the client's next segment surely begins with a frame.
#[inline(always)]
fn resync_requests(
    conn: &mut ServerSocket,
    streams: &mut h2::Http2Connection,
    source: SegmentBytes,
) {
    let mut window = [0_u64; h2::PEEK_WORDS];
    let loaded_len = source.load_peek(0, &mut window);
    lock(conn);
    streams.resync_requests(&window, loaded_len, source.seq, source.len);
    unlock(conn);
}

/// Marks the client's boundaries as lost: until they are found again, only the server's responses show requests.
#[inline(always)]
pub(super) fn desync_requests(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    lock(conn);
    let is_new = streams.desync_requests();
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.pod_slot).filter(|_| is_new) {
        // SAFETY: a live map value; a single word.
        unsafe { atomic_add(&raw mut (*pod).desynced_connections, 1) };
    }
}

/// Ends what is in flight when frames cannot be followed any more; the rest of the connection is an opaque estimate.
#[inline(always)]
fn desync(conn: &mut ServerSocket, streams: &mut h2::Http2Connection) {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let now_ns = monotonic_ns();
    lock(conn);
    let was_known = conn.http.protocol == abi::PROTOCOL_HTTP2;
    if was_known {
        let aborted = streams.close();
        rows.count_aborted(conn, aborted, now_ns);
        rows.add_bytes_until(conn, streams.rx.next, streams.tx.next);
        opaque::begin_estimate(conn, 0);
    }
    unlock(conn);
    if let Some(pod) = POD_STATE.get_ptr_mut(conn.pod_slot).filter(|_| was_known) {
        // SAFETY: a live map value; single words.
        unsafe {
            atomic_add(&raw mut (*pod).opaque_connections, 1);
            atomic_add(&raw mut (*pod).desynced_connections, 1);
        }
    }
}
