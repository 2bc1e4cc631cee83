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

use super::{PASS, end, lock, rows::PodCounterRows, socket, stored, unlock};
use crate::{
    maps::now,
    packet::{self, PacketSegment},
};

/// Switches a connection to an opaque estimate. `first` is the client's first byte. Call with the lock held.
#[inline(always)]
pub(super) fn begin(conn: &mut ServerSocket, first: u8) {
    if conn.http.speaks == abi::SPEAKS_OTHER {
        return;
    }
    conn.http.speaks = abi::SPEAKS_OTHER;
    conn.late = [PendingSegment::default(); abi::LATE_MAX];
    // Heads and frames are no longer read; both directions continue at the bytes that were counted last.
    conn.http.h1.close(true);
    conn.http.h1.rx.next = conn.http.received;
    conn.http.h1.tx.next = conn.http.sent;
    conn.http.turns.open(first);
}

/// Handles a segment from the client: it may begin a request.
#[inline(always)]
pub fn ingress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(rows) = PodCounterRows::of(conn.slot) else { return PASS };
    let first = if conn.http.turns.asks_for_byte() { first(skb, &segment) } else { 0 };
    let at = now();
    lock(conn);
    let is_first = if is_new(&mut conn.http.h1.rx, &segment) && conn.http.turns.came(first) {
        let change = h2::StreamChange { started: 1, ..h2::StreamChange::default() };
        rows.change(conn, &change, at)
    } else {
        false
    };
    rows.bytes(conn);
    unlock(conn);
    if is_first {
        rows.announce();
    }
    PASS
}

/// Handles a segment from the server: it may end a request, or prolong the one before.
#[inline(always)]
pub fn egress(ctx: &SkBuffContext) -> i32 {
    let skb = ctx.as_ptr().cast::<__sk_buff>();
    let Some(segment) = packet::segment(skb) else { return PASS };
    let Some(conn) = stored(skb) else { return PASS };
    let Some(rows) = PodCounterRows::of(conn.slot) else { return PASS };
    let at = packet::sent_at(skb);
    lock(conn);
    if is_new(&mut conn.http.h1.tx, &segment) {
        let sent = conn.http.turns.sent(at);
        if sent.ended {
            let took_ns = at.saturating_sub(conn.http.began_ns);
            let change = h2::StreamChange { answered: 1, took_ns, ..h2::StreamChange::default() };
            rows.change(conn, &change, at);
        }
        if sent.longer_ns > 0 {
            rows.longer(sent.longer_ns, at);
        }
    }
    rows.bytes(conn);
    unlock(conn);
    if segment.fin && conn.http.h1.tx.next == segment.seq.wrapping_add(segment.len) {
        end(conn, socket(skb), true);
    }
    PASS
}

/// Returns true if a segment brings bytes that have not been seen in this direction.
#[inline(always)]
fn is_new(side: &mut h1::Http1Direction, segment: &PacketSegment) -> bool {
    let before = side.next;
    let seek = side.seek(segment.seq, segment.len);
    seek == SeekResult::Done && side.next != before
}

/// Returns the first byte of a segment; 0 if there is none.
#[inline(always)]
fn first(skb: *mut __sk_buff, segment: &PacketSegment) -> u8 {
    let mut byte = 0_u8;
    if segment.len == 0 {
        return 0;
    }
    let into = (&raw mut byte).cast();
    // SAFETY: the helper writes one byte, and there is room for one.
    let failed = unsafe { bpf_skb_load_bytes(skb.cast(), segment.offset, into, 1) };
    if failed == 0 { byte } else { 0 }
}
