//! Connections whose messages cannot be read: requests follow from alternating directions (opaque estimate).
//! Connections to opaque ports, of which nothing is read: each is one request.

use core::ptr;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_sock_ops},
    helpers::generated::bpf_skb_load_bytes,
    programs::SkBuffContext,
};
use datapath::{
    abi::{self, PendingSegment, ServerSocket},
    h1::{self, SeekResult},
    h2,
};

use super::{
    PASS, connection_of, counters::PodCounterRows, early_segment, end_requests, lock,
    opened_connection, socket, unlock,
};
use crate::{
    maps::{CONTROL, monotonic_ns},
    packet::{self, PacketSegment},
};

/// Switches a connection to an opaque estimate. `first` is the client's first byte, or 0 if it is not known. Call with
/// the lock held, after the end of all requests in flight was counted.
#[inline(always)]
pub(super) fn begin_estimate(conn: &mut ServerSocket, first: u8) {
    if conn.http.protocol == abi::PROTOCOL_OPAQUE {
        return;
    }
    conn.http.protocol = abi::PROTOCOL_OPAQUE;
    conn.pending = [PendingSegment::default(); abi::PENDING_SEGMENTS_MAX];
    // Heads and frames are no longer read; both directions continue at the bytes that were counted last. The events of
    // the close are counted already.
    let _counted_by_the_caller = conn.http.h1.close(true);
    conn.http.h1.rx.next = conn.http.counted_rx_seq;
    conn.http.h1.tx.next = conn.http.counted_tx_seq;
    conn.http.opaque_estimate.open(first);
}

/// Begins the request of a connection to an opaque port, which was established now.
///
/// A client at an address of the node may be the kubelet, whose TCP probes only connect, unless its connections are
/// marked. So the request of such a client begins with its first byte. `suspects` has checked a byte that came before
/// the connection was established.
#[inline(always)]
pub fn opened(ops: *mut bpf_sock_ops) {
    let Some(conn) = opened_connection(ops) else { return };
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let is_known = is_kubelet_marked() || early_segment(ops).is_some();
    let now_ns = monotonic_ns();
    lock(conn);
    conn.http.h1.stop_reading();
    let may_be_probe = conn.http.flags & abi::HTTP_MAYBE_PROBE != 0 && !is_known;
    let exceeds_threshold = if !may_be_probe && awaits_request(conn) {
        begin_request(conn, &rows, now_ns)
    } else {
        false
    };
    unlock(conn);
    // After the unlock: the verifier permits no other helper while a lock is held.
    if exceeds_threshold {
        rows.send_growth_event();
    }
}

/// Ends the request of a connection to an opaque port, which has closed. Its response is whole however the connection
/// has ended: nothing shows what its ends have expected.
#[inline(always)]
pub(super) fn end_request(conn: &mut ServerSocket) {
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return };
    let now_ns = monotonic_ns();
    lock(conn);
    let change = h2::StreamChange {
        answered: conn.http.requests_in_flight,
        duration_ns: now_ns.saturating_sub(conn.http.request_started_ns),
        ..h2::StreamChange::default()
    };
    rows.count_http2(conn, &change, now_ns);
    rows.add_bytes(conn);
    unlock(conn);
}

/// Returns true if connections of the kubelet are marked, so that none is left that may be its probe.
#[inline(always)]
fn is_kubelet_marked() -> bool {
    let Some(word) = CONTROL.get_ptr(abi::CONTROL_KUBELET_MARKED) else { return false };
    // SAFETY: a live map value; a single word. Volatile, since the agent changes it.
    unsafe { ptr::read_volatile(word) != 0 }
}

/// Returns true if the request of a connection to an opaque port has not begun.
#[inline(always)]
fn awaits_request(conn: &ServerSocket) -> bool {
    conn.http.flags & abi::HTTP_AWAITS_FIRST_REQUEST != 0
}

/// Counts the begin of a request like that of a stream of HTTP/2. Returns true if the agent's threshold is exceeded.
/// Call with the lock held.
#[inline(always)]
fn begin_request(conn: &mut ServerSocket, rows: &PodCounterRows, now_ns: u64) -> bool {
    conn.http.flags &= !abi::HTTP_MAYBE_PROBE;
    let change = h2::StreamChange { started: 1, ..h2::StreamChange::default() };
    rows.count_http2(conn, &change, now_ns)
}

/// Handles a segment from the client: it may begin a request.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let Some(conn) = connection_of(skb) else { return PASS };
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return PASS };
    let first =
        if conn.http.opaque_estimate.needs_first_byte() { first_byte(skb, &segment) } else { 0 };
    let now_ns = monotonic_ns();
    lock(conn);
    let has_new_bytes = has_new_bytes(&mut conn.http.h1.rx, &segment);
    let begins = if conn.http.protocol == abi::PROTOCOL_TCP {
        awaits_request(conn)
    } else {
        has_new_bytes && conn.http.opaque_estimate.handle_client_bytes(first)
    };
    let exceeds_threshold = if begins { begin_request(conn, &rows, now_ns) } else { false };
    rows.add_bytes(conn);
    unlock(conn);
    // After the unlock, because the verifier permits no helper while a lock is held.
    if exceeds_threshold {
        rows.send_growth_event();
    }
    PASS
}

/// Handles a segment from the server: it may end a request, or prolong the one before.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::parse_segment(skb) else { return PASS };
    let Some(conn) = connection_of(skb) else { return PASS };
    let Some(rows) = PodCounterRows::for_slot(conn.pod_slot) else { return PASS };
    // Helpers and the packet's time come before the lock, since no helper may be called while it is held.
    let sent_ns = packet::sent_ns(skb);
    lock(conn);
    let is_estimated = conn.http.protocol == abi::PROTOCOL_OPAQUE;
    // A retransmission brings nothing new, and must not prolong a request. A connection of raw TCP is one request.
    if has_new_bytes(&mut conn.http.h1.tx, &segment) && is_estimated {
        let sent = conn.http.opaque_estimate.handle_server_bytes(sent_ns);
        if sent.ended {
            let took_ns = sent_ns.saturating_sub(conn.http.request_started_ns);
            let change = h2::StreamChange {
                answered: 1,
                duration_ns: took_ns,
                ..h2::StreamChange::default()
            };
            rows.count_http2(conn, &change, sent_ns);
        }
        if sent.extended_ns > 0 {
            rows.extend_last_request(sent.extended_ns, sent_ns);
        }
    }
    rows.add_bytes(conn);
    unlock(conn);
    // The client of an opaque port may go on sending after the server's end.
    if segment.fin && is_estimated && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len)
    {
        end_requests(conn, socket(skb), true);
    }
    PASS
}

/// Returns true if a segment brings bytes that have not been seen in this direction.
#[inline(always)]
fn has_new_bytes(direction: &mut h1::Http1Direction, segment: &PacketSegment) -> bool {
    let before = direction.next;
    let seek = direction.seek(segment.seq, segment.len);
    seek == SeekResult::Done && direction.next != before
}

/// Returns the first byte of a segment; 0 if there is none.
#[inline(always)]
fn first_byte(skb: *mut __sk_buff, segment: &PacketSegment) -> u8 {
    let mut byte = 0_u8;
    if segment.len == 0 {
        return 0;
    }
    let into = (&raw mut byte).cast();
    // SAFETY: the helper writes one byte, and there is room for one.
    let failed = unsafe { bpf_skb_load_bytes(skb.cast(), segment.offset, into, 1) };
    if failed == 0 { byte } else { 0 }
}
