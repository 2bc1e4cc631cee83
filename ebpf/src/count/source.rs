//! Where the bytes of a segment are: in the packet, or kept for later.

use core::{ffi::c_void, ptr};

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};
use common::{
    abi::{self, Kept, KeptKey},
    h1::{self, Window},
    h2,
};

use crate::{
    maps::{BLANK, KEPT},
    packet::{self, Segment},
};

/// A segment's bytes.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) skb: *mut __sk_buff,
    /// Where the payload begins in the packet.
    pub(super) offset: u32,
    /// Instead of the packet, if not null.
    pub(super) kept: *const Kept,
    pub(super) seq: u32,
    pub(super) len: u32,
}

impl Source {
    /// The segment of a packet.
    #[inline(always)]
    pub(super) fn of(skb: *mut __sk_buff, segment: &Segment) -> Self {
        let Segment { seq, len, offset, .. } = *segment;
        Self { skb, offset, kept: ptr::null(), seq, len }
    }

    /// Copies a window of a segment from `offset` in its payload. Returns how many bytes; 0: none.
    #[inline(always)]
    pub(super) fn load(&self, offset: u32, window: &mut Window) -> u32 {
        let left = self.len.wrapping_sub(offset);
        if self.kept.is_null() {
            return packet::load(self.skb, self.offset.wrapping_add(offset), left, window);
        }
        let mut index = 0;
        let (from, left) = self.kept_from(offset, left);
        while index < h1::WINDOW / 8 {
            // SAFETY: `bytes` is a window longer than `KEPT_BYTES`, and `from` at most that behind its begin.
            window[index] = unsafe { ptr::read_unaligned(from.add(index)) };
            index += 1;
        }
        if left > h1::WINDOW as u32 { h1::WINDOW as u32 } else { left }
    }

    /// The same of the few bytes that HTTP/2 looks at.
    #[inline(always)]
    pub(super) fn load_peek(&self, offset: u32, window: &mut [u64; h2::PEEK_WORDS]) -> u32 {
        let left = self.len.wrapping_sub(offset);
        if self.kept.is_null() {
            return packet::load(self.skb, self.offset.wrapping_add(offset), left, window);
        }
        let mut index = 0;
        let (from, left) = self.kept_from(offset, left);
        while index < h2::PEEK_WORDS {
            // SAFETY: as in `load`.
            window[index] = unsafe { ptr::read_unaligned(from.add(index)) };
            index += 1;
        }
        if left > h2::PEEK as u32 { h2::PEEK as u32 } else { left }
    }

    /// Kept bytes from `offset` on, and how many of the `left` ones there are.
    #[inline(always)]
    fn kept_from(&self, offset: u32, left: u32) -> (*const u64, u32) {
        let offset = packet::bounded(offset, abi::KEPT_BYTES as u32) as usize;
        let left = if left > 0 { left.min((abi::KEPT_BYTES - offset) as u32) } else { 0 };
        // SAFETY: inside `bytes`, which are longer than `KEPT_BYTES`.
        let from = unsafe { (&raw const (*self.kept).bytes).cast::<u8>().add(offset).cast() };
        (from, left)
    }
}

/// Keeps a segment for later. Returns whether that worked.
#[inline(always)]
pub(super) fn keep(skb: *mut __sk_buff, segment: &Segment) -> bool {
    let Some((remote, remote_port)) = packet::sender(skb) else { return false };
    let key = KeptKey { remote, remote_port, seq: segment.seq };
    let Some(blank) = BLANK.get(0) else { return false };
    if KEPT.insert(key, blank, 0).is_err() {
        return false;
    }
    let Some(kept) = KEPT.get_ptr_mut(key) else { return false };
    let len = packet::bounded(segment.len, abi::KEPT_BYTES as u32);
    if len == 0 {
        return false;
    }
    // SAFETY: a live map value with room for `KEPT_BYTES`, which `len` does not exceed.
    unsafe {
        let bytes = (&raw mut (*kept).bytes).cast::<c_void>();
        if bpf_skb_load_bytes(skb.cast(), segment.offset, bytes, len) != 0 {
            return false;
        }
        (*kept).len = segment.len;
    }
    true
}

/// The kept segment of the packet's sender that begins at `seq`.
#[inline(always)]
pub(super) fn kept(skb: *mut __sk_buff, seq: u32) -> Option<*const Kept> {
    let (remote, remote_port) = packet::sender(skb)?;
    KEPT.get_ptr(KeptKey { remote, remote_port, seq })
}
