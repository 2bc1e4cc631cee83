//! Bytes of segments, from the packet or from the buffer `KEPT`, and the buffer itself.

use core::{ffi::c_void, hint::black_box, ptr};

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};
use datapath::{
    abi::{self, BufferedSegment, BufferedSegmentKey, PendingSegment, ServerSocket},
    h1, h2,
};

use super::{lock, unlock};
use crate::{
    maps::{BLANK, KEPT},
    packet::{self, PacketSegment},
};

/// Bytes of one segment, wherever they are.
#[derive(Clone, Copy)]
pub(super) struct SegmentBytes {
    pub(super) skb: *mut __sk_buff,
    /// Offset of the payload in the packet.
    pub(super) offset: u32,
    /// Buffered part of the segment, read instead of the packet if not null.
    pub(super) kept: *const BufferedSegment,
    pub(super) seq: u32,
    pub(super) len: u32,
}

impl SegmentBytes {
    /// Returns the bytes of a packet's segment.
    #[inline(always)]
    pub(super) fn of(skb: *mut __sk_buff, segment: &PacketSegment) -> Self {
        let PacketSegment { seq, len, offset, .. } = *segment;
        Self { skb, offset, kept: ptr::null(), seq, len }
    }

    /// Copies a window of the segment, from `offset` in its payload. Returns the number of bytes; 0 means none.
    #[inline(always)]
    pub(super) fn load<const WORDS: usize>(&self, offset: u32, window: &mut [u64; WORDS]) -> u32 {
        self.copy(offset, window, h1::most::<WORDS>())
    }

    /// Copies the few bytes that HTTP/2 reads, from `offset` in the payload. Returns their number; 0 means none.
    #[inline(always)]
    pub(super) fn load_peek(&self, offset: u32, window: &mut [u64; h2::PEEK_WORDS]) -> u32 {
        self.copy(offset, window, h2::PEEK as u32)
    }

    /// Copies at most `most` bytes from `at` in the payload into a window.
    #[inline(always)]
    fn copy<const WORDS: usize>(&self, at: u32, window: &mut [u64; WORDS], most: u32) -> u32 {
        let left = self.len.wrapping_sub(at);
        if self.kept.is_null() {
            return packet::load(self.skb, self.offset.wrapping_add(at), left, window, most);
        }
        let mut index = 0;
        let (from, left) = self.kept_from(at, left);
        while index < most as usize / 8 {
            // SAFETY: `bytes` is one window longer than `KEPT_BYTES`, and `from` at most `KEPT_BYTES` behind its begin.
            window[index] = unsafe { ptr::read_unaligned(from.add(index)) };
            index += 1;
        }
        if left > most { most } else { left }
    }

    /// Returns the buffered bytes from `offset` on, and the number of the `left` ones that are there.
    #[inline(always)]
    fn kept_from(&self, offset: u32, left: u32) -> (*const u64, u32) {
        let offset = packet::bounded(offset, abi::KEPT_BYTES as u32) as usize;
        let left = if left > 0 { left.min((abi::KEPT_BYTES - offset) as u32) } else { 0 };
        // SAFETY: inside `bytes`, which is longer than `KEPT_BYTES`.
        let from = unsafe { (&raw const (*self.kept).bytes).cast::<u8>().add(offset).cast() };
        (from, left)
    }
}

/// Bytes of a segment in one entry of `KEPT`.
const PART: u32 = abi::KEPT_BYTES as u32;

/// Buffers a segment, in parts. Returns true if all of it is buffered.
#[inline(always)]
pub(super) fn keep(skb: *mut __sk_buff, segment: &PacketSegment) -> bool {
    let mut part = 0;
    while part < abi::KEPT_PARTS as u32 && part * PART < segment.len {
        if keep_part(skb, part * PART) == 0 {
            return false;
        }
        part += 1;
    }
    part * PART >= segment.len
}

/// Buffers the part at this offset of a packet's segment. Returns 1 if that worked.
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn keep_part(skb: *mut __sk_buff, at: u32) -> u32 {
    let Some(segment) = packet::segment(skb) else { return 0 };
    u32::from(keep_at(skb, &segment, at))
}

/// Buffers the part at this offset of a segment under its sender and sequence number.
#[inline(always)]
fn keep_at(skb: *mut __sk_buff, segment: &PacketSegment, at: u32) -> bool {
    let Some((remote, remote_port)) = packet::sender(skb) else { return false };
    let left = segment.len.wrapping_sub(at);
    let key = BufferedSegmentKey { remote, remote_port, seq: segment.seq.wrapping_add(at) };
    if let Some(there) = KEPT.get_ptr(key) {
        // SAFETY: a live map value; single words.
        let (known, syn) = unsafe { ((*there).len, (*there).syn) };
        // A retransmission in smaller pieces must not shorten the known segment.
        if known >= left && syn == u32::from(segment.syn) {
            return true;
        }
    }
    let Some(blank) = BLANK.get(0) else { return false };
    if KEPT.insert(key, blank, 0).is_err() {
        return false;
    }
    let Some(kept) = KEPT.get_ptr_mut(key) else { return false };
    // Only now: before 6.8 the verifier soon loses the bounds that it has learnt.
    let Some(len) = packet::some(left, PART) else { return false };
    // SAFETY: a live map value with room for `KEPT_BYTES`, which `len` does not exceed.
    unsafe {
        let bytes = (&raw mut (*kept).bytes).cast::<c_void>();
        let from = segment.offset.wrapping_add(at);
        if bpf_skb_load_bytes(skb.cast(), from, bytes, len) != 0 {
            return false;
        }
        (*kept).len = left;
        (*kept).syn = u32::from(segment.syn);
    }
    true
}

/// Lists a buffered segment in the connection's storage. Returns true if there was room.
#[inline(always)]
pub(super) fn note(conn: &mut ServerSocket, late: PendingSegment) -> bool {
    lock(conn);
    let mut place = abi::LATE_MAX;
    let mut index = 0;
    while index < abi::LATE_MAX {
        let there = conn.late[index];
        // The same segment again, or a free place.
        if there.len == 0 || there.seq == late.seq {
            place = index;
        }
        index += 1;
    }
    let found = place < abi::LATE_MAX;
    if found {
        let there = &mut conn.late[place & (abi::LATE_MAX - 1)];
        if there.len < late.len || there.seq != late.seq {
            *there = late;
        }
    }
    unlock(conn);
    found
}

/// Returns true if buffered segments are listed.
#[inline(always)]
pub(super) fn is_awaited(conn: &ServerSocket) -> bool {
    let (mut any, mut index) = (0, 0);
    while index < abi::LATE_MAX {
        any |= conn.late[index].len;
        index += 1;
    }
    any != 0
}

/// Address and port of a segment's sender.
pub(super) type SegmentSender = ([u32; 4], u32);

/// Returns a buffered segment that holds the byte at `next`, listed or not. Listed ones that are older are dropped.
#[inline(always)]
pub(super) fn due(
    conn: &mut ServerSocket,
    sender: SegmentSender,
    next: u32,
) -> Option<PendingSegment> {
    let mut due = PendingSegment { seq: 0, len: 0 };
    lock(conn);
    let mut index = 0;
    while index < abi::LATE_MAX {
        let late = &mut conn.late[index];
        let behind = next.wrapping_sub(late.seq) as i32;
        if behind >= 0 && late.len > 0 {
            if behind as u32 >= late.len {
                late.len = 0;
            } else {
                due = *late;
            }
        }
        index += 1;
    }
    unlock(conn);
    if due.len > 0 { Some(due) } else { recalled(sender, next) }
}

/// Returns a segment of this sender that begins at `next` and was buffered without being listed.
///
/// It came before its connection was established, but not with the packet that established it; or too many were listed.
#[inline(always)]
fn recalled((remote, remote_port): SegmentSender, next: u32) -> Option<PendingSegment> {
    let kept = KEPT.get_ptr(BufferedSegmentKey { remote, remote_port, seq: next })?;
    // SAFETY: a live map value; a single word.
    Some(PendingSegment { seq: next, len: unsafe { (*kept).len } })
}

/// Returns the part of a buffered segment that has the byte at `next`.
#[inline(always)]
pub(super) fn kept(
    (remote, remote_port): SegmentSender,
    late: PendingSegment,
    next: u32,
) -> Option<SegmentBytes> {
    let at = next.wrapping_sub(late.seq) / PART * PART;
    let seq = late.seq.wrapping_add(at);
    let kept = KEPT.get_ptr(BufferedSegmentKey { remote, remote_port, seq })?;
    let left = late.len.wrapping_sub(at);
    let len = if left > PART { PART } else { left };
    // In memory, where the verifier forgets the values: it then follows one path.
    let part = *black_box(&PendingSegment { seq, len });
    Some(SegmentBytes { skb: ptr::null_mut(), offset: 0, kept, seq: part.seq, len: part.len })
}
