//! Opaque estimates, for connections whose messages cannot be read: requests follow from alternating directions.

use aya_ebpf::{
    EbpfContext as _, bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes,
    programs::SkBuffContext,
};
use datapath::{
    abi::{self, PendingSegment, ServerSocket},
    h1::{self, SeekResult},
    h2,
};

use super::{PASS, connection_of, counters::PodCounterRows, end_requests, lock, socket, unlock};
use crate::{
    maps::monotonic_ns,
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
    let exceeds_threshold = if has_new_bytes(&mut conn.http.h1.rx, &segment)
        && conn.http.opaque_estimate.handle_client_bytes(first)
    {
        // An estimated request counts like a stream of HTTP/2, without a status.
        let change = h2::StreamChange { started: 1, ..h2::StreamChange::default() };
        rows.count_http2(conn, &change, now_ns)
    } else {
        false
    };
    rows.add_bytes(conn);
    unlock(conn);
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
    let sent_ns = packet::sent_ns(skb);
    lock(conn);
    if has_new_bytes(&mut conn.http.h1.tx, &segment) {
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
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
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
