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
    pub(super) buffered: *const BufferedSegment,
    pub(super) seq: u32,
    pub(super) len: u32,
}

impl SegmentBytes {
    /// Returns the bytes of a packet's segment.
    #[inline(always)]
    pub(super) fn from_packet(skb: *mut __sk_buff, segment: &PacketSegment) -> Self {
        let PacketSegment { seq, len, offset, .. } = *segment;
        Self { skb, offset, buffered: ptr::null(), seq, len }
    }

    /// Copies a window of the segment, from `offset` in its payload. Returns the number of bytes; 0 means none.
    #[inline(always)]
    pub(super) fn load<const WORDS: usize>(&self, offset: u32, window: &mut [u64; WORDS]) -> u32 {
        self.copy_bytes(offset, window, h1::window_capacity::<WORDS>())
    }

    /// Copies the few bytes that HTTP/2 reads, from `offset` in the payload. Returns their number; 0 means none.
    #[inline(always)]
    pub(super) fn load_peek(&self, offset: u32, window: &mut [u64; h2::PEEK_WORDS]) -> u32 {
        self.copy_bytes(offset, window, h2::PEEK_BYTES as u32)
    }

    /// Copies at most `most` bytes from `at` in the payload into a window.
    #[inline(always)]
    fn copy_bytes<const WORDS: usize>(&self, at: u32, window: &mut [u64; WORDS], most: u32) -> u32 {
        let left = self.len.wrapping_sub(at);
        if self.buffered.is_null() {
            return packet::load_window(self.skb, self.offset.wrapping_add(at), left, window, most);
        }
        let mut index = 0;
        let (from, left) = self.buffered_from(at, left);
        while index < most as usize / 8 {
            // SAFETY: `bytes` is one window longer than `SEGMENT_PART_BYTES`, and `from` at most `SEGMENT_PART_BYTES`
            // behind its begin.
            window[index] = unsafe { ptr::read_unaligned(from.add(index)) };
            index += 1;
        }
        if left > most { most } else { left }
    }

    /// Returns the buffered bytes from `offset` on, and the number of the `left` ones that are there.
    #[inline(always)]
    fn buffered_from(&self, offset: u32, left: u32) -> (*const u64, u32) {
        let offset = packet::at_most(offset, abi::SEGMENT_PART_BYTES as u32) as usize;
        let left = if left > 0 { left.min((abi::SEGMENT_PART_BYTES - offset) as u32) } else { 0 };
        // SAFETY: inside `bytes`, which is longer than `SEGMENT_PART_BYTES`.
        let from = unsafe { (&raw const (*self.buffered).bytes).cast::<u8>().add(offset).cast() };
        (from, left)
    }
}

/// Bytes of a segment in one entry of `KEPT`.
const PART_BYTES: u32 = abi::SEGMENT_PART_BYTES as u32;

/// Buffers a segment, in parts. Returns true if all of it is buffered.
#[inline(always)]
pub(super) fn buffer_segment(skb: *mut __sk_buff, segment: &PacketSegment) -> bool {
    let mut part = 0;
    while part < abi::SEGMENT_PARTS_MAX as u32 && part * PART_BYTES < segment.len {
        if buffer_part(skb, part * PART_BYTES) == 0 {
            return false;
        }
        part += 1;
    }
    part * PART_BYTES >= segment.len
}

/// Buffers the part at this offset of a packet's segment. Returns 1 if that worked.
///
/// A function of its own: the verifier checks it once, however often it is called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn buffer_part(skb: *mut __sk_buff, offset: u32) -> u32 {
    let Some(segment) = packet::parse_segment(skb) else { return 0 };
    u32::from(buffer_part_at(skb, &segment, offset))
}

/// Buffers the part at this offset of a segment under its sender and sequence number.
#[inline(always)]
fn buffer_part_at(skb: *mut __sk_buff, segment: &PacketSegment, offset: u32) -> bool {
    // Keyed by sender and sequence number: until the connection is established it has no socket of its own.
    let Some((remote, remote_port)) = packet::parse_sender(skb) else { return false };
    let left = segment.len.wrapping_sub(offset);
    let key = BufferedSegmentKey { remote, remote_port, seq: segment.seq.wrapping_add(offset) };
    if let Some(existing) = KEPT.get_ptr(key) {
        // SAFETY: a live map value; single words.
        let (known, syn) = unsafe { ((*existing).len, (*existing).syn) };
        // A retransmission in smaller pieces must not shorten the known segment.
        if known >= left && syn == u32::from(segment.syn) {
            return true;
        }
    }
    // A value is larger than the stack of a program (512 bytes), so a blank one comes from a map.
    let Some(blank) = BLANK.get(0) else { return false };
    if KEPT.insert(key, blank, 0).is_err() {
        return false;
    }
    let Some(buffered) = KEPT.get_ptr_mut(key) else { return false };
    // Only now: before 6.8 the verifier soon loses the bounds that it has learnt.
    let Some(len) = packet::nonzero_at_most(left, PART_BYTES) else { return false };
    // SAFETY: a live map value with room for `SEGMENT_PART_BYTES`, which `len` does not exceed.
    unsafe {
        let bytes = (&raw mut (*buffered).bytes).cast::<c_void>();
        let packet_offset = segment.offset.wrapping_add(offset);
        if bpf_skb_load_bytes(skb.cast(), packet_offset, bytes, len) != 0 {
            return false;
        }
        // Last: a reader on another CPU sees a length of 0 until all bytes are there. The length is that of the segment
        // from here on, by which the reader finds out if there are more parts.
        (*buffered).len = left;
        (*buffered).syn = u32::from(segment.syn);
    }
    true
}

/// Lists a buffered segment in the connection's storage. Returns true if there was room.
#[inline(always)]
pub(super) fn list_pending(conn: &mut ServerSocket, segment: PendingSegment) -> bool {
    lock(conn);
    let mut place = abi::PENDING_SEGMENTS_MAX;
    let mut index = 0;
    while index < abi::PENDING_SEGMENTS_MAX {
        let listed = conn.pending[index];
        // The same segment again, or a free place.
        if listed.len == 0 || listed.seq == segment.seq {
            place = index;
        }
        index += 1;
    }
    let found = place < abi::PENDING_SEGMENTS_MAX;
    if found {
        // The mask changes nothing here, but gives the verifier a bound.
        let listed = &mut conn.pending[place & (abi::PENDING_SEGMENTS_MAX - 1)];
        if listed.len < segment.len || listed.seq != segment.seq {
            *listed = segment;
        }
    }
    unlock(conn);
    found
}

/// Returns true if buffered segments are listed.
#[inline(always)]
pub(super) fn has_pending(conn: &ServerSocket) -> bool {
    let (mut any, mut index) = (0, 0);
    // No branch for each place: the verifier would follow all their combinations.
    while index < abi::PENDING_SEGMENTS_MAX {
        any |= conn.pending[index].len;
        index += 1;
    }
    any != 0
}

/// Address and port of a segment's sender.
pub(super) type SegmentSender = ([u32; 4], u32);

/// Returns a buffered segment that holds the byte at `next`, listed or not. Listed ones that are older are dropped.
#[inline(always)]
pub(super) fn next_pending(
    conn: &mut ServerSocket,
    sender: SegmentSender,
    next: u32,
) -> Option<PendingSegment> {
    let mut due = PendingSegment { seq: 0, len: 0 };
    lock(conn);
    let mut index = 0;
    while index < abi::PENDING_SEGMENTS_MAX {
        let listed = &mut conn.pending[index];
        // Sequence numbers wrap, so only the sign of their difference tells which comes first.
        let behind = next.wrapping_sub(listed.seq) as i32;
        if behind >= 0 && listed.len > 0 {
            if behind as u32 >= listed.len {
                listed.len = 0;
            } else {
                due = *listed;
            }
        }
        index += 1;
    }
    unlock(conn);
    if due.len > 0 { Some(due) } else { find_unlisted(sender, next) }
}

/// Returns a segment of this sender that begins at `next` and was buffered without being listed.
///
/// It came before its connection was established, but not with the packet that established it; or too many were listed.
#[inline(always)]
fn find_unlisted((remote, remote_port): SegmentSender, next: u32) -> Option<PendingSegment> {
    let buffered = KEPT.get_ptr(BufferedSegmentKey { remote, remote_port, seq: next })?;
    // SAFETY: a live map value; a single word.
    Some(PendingSegment { seq: next, len: unsafe { (*buffered).len } })
}

/// Returns the part of a buffered segment that has the byte at `next`.
#[inline(always)]
pub(super) fn buffered_part(
    (remote, remote_port): SegmentSender,
    pending: PendingSegment,
    next: u32,
) -> Option<SegmentBytes> {
    let part_offset = next.wrapping_sub(pending.seq) / PART_BYTES * PART_BYTES;
    let seq = pending.seq.wrapping_add(part_offset);
    let kept = KEPT.get_ptr(BufferedSegmentKey { remote, remote_port, seq })?;
    let left = pending.len.wrapping_sub(part_offset);
    let len = if left > PART_BYTES { PART_BYTES } else { left };
    // In memory, where the verifier forgets the values: it then follows one path.
    let part = *black_box(&PendingSegment { seq, len });
    Some(SegmentBytes {
        skb: ptr::null_mut(),
        offset: 0,
        buffered: kept,
        seq: part.seq,
        len: part.len,
    })
}
