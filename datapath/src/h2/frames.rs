//! Pure: one direction of an HTTP/2 connection: its position in frames.

use core::hint::black_box;

use super::hpack_status::{HeaderBlockPrefix, bytes_after};
use crate::{
    h1::{SeekResult, first_bytes_mask},
    words::untracked_pair,
};

/// Words of a frame's begin that are stored and read.
pub(super) const STORED_WORDS: usize = 4;
const STORED_BYTES: u32 = STORED_WORDS as u32 * 8;
/// Bytes of a frame's header (RFC 9113 §4.1).
const HEADER_BYTES: u32 = 9;

/// First bytes of a client (RFC 9113 §3.4).
const PREFACE: [u64; 3] = [
    u64::from_le_bytes(*b"PRI * HT"),
    u64::from_le_bytes(*b"TP/2.0\r\n"),
    u64::from_le_bytes(*b"\r\nSM\r\n\r\n"),
];
const PREFACE_BYTES: u32 = 24;

/// States of a [`Http2Direction`]. Their order matters: from `NOT_HTTP2` on nothing is read, and from `DESYNC` on the
/// position follows the segments.
mod state {
    /// In front of a frame, or in the part of it that is read.
    pub(super) const FRAME: u8 = 0;
    /// In the payload of a frame.
    pub(super) const PAYLOAD: u8 = 1;
    /// In the preface of the client.
    pub(super) const PREFACE: u8 = 2;
    /// In front of a frame that begins with the next segment.
    pub(super) const NEXT_SEGMENT: u8 = 3;
    /// The bytes were no preface, or no frame.
    pub(super) const NOT_HTTP2: u8 = 4;
    /// Message boundaries are lost (desync).
    pub(super) const DESYNC: u8 = 5;
    /// The connection is gone, and nothing more is read.
    pub(super) const CLOSED: u8 = 6;
}

/// Frame types (RFC 9113 §6).
#[allow(missing_docs, reason = "named as there")]
pub mod frame_kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Frame flags (RFC 9113 §6).
#[allow(missing_docs, reason = "named as there")]
pub mod frame_flag {
    pub const ACK: u8 = 1;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const PADDED: u8 = 8;
    pub const PRIORITY: u8 = 32;
}

/// Values of [`EndedFrame::class`], which classify a frame.
pub mod frame_class {
    /// No frame has ended, or one without effect.
    pub const NOTHING: u8 = 0;
    /// A header block is complete.
    pub const HEADERS: u8 = 1;
    /// A DATA frame has ended.
    pub const DATA: u8 = 2;
    /// A RST_STREAM frame has ended.
    pub const RESET: u8 = 3;
    /// A GOAWAY frame has ended; the stream is the last one that its sender processes.
    pub const GOAWAY: u8 = 4;
}

/// Frame whose last byte has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedFrame {
    /// Class of the frame, as one of [`frame_class`].
    pub class: u8,
    /// True if the sender sends nothing more on the stream.
    pub ends_stream: bool,
    /// Stream that the frame belongs to.
    pub stream: u32,
}

/// State of one direction of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http2Direction {
    /// Sequence number of the next byte to come.
    pub next: u32,
    /// Bytes from `next` on that need not be read.
    pub skip: u32,
    /// Stream of the present frame or header block.
    stream: u32,
    /// Bytes of the present frame that are in `peek`.
    stored: u8,
    /// State, as one of [`state`].
    state: u8,
    /// Class of the present frame or header block when it ends, as one of [`frame_class`].
    class: u8,
    /// 1 if the sender sends nothing more on the stream.
    ends_stream: u8,
    /// 1 if the header block continues in other frames.
    block_continues: u8,
    /// Offset of the header block in `peek`.
    block_offset: u8,
    /// Bytes of the header block in `peek`.
    block_len: u8,
    reserved: u8,
    /// First bytes of the present frame.
    peek: [u64; STORED_WORDS],
}

impl Http2Direction {
    #[inline(always)]
    pub(super) fn open_after_preface(&mut self, next: u32, have: u32) {
        self.open(next, have, 0);
        // New bytes overwrite the expected preface, so that a difference shows as soon as it comes.
        [self.peek[0], self.peek[1], self.peek[2]] = PREFACE.map(u64::to_le);
        self.state = state::PREFACE;
    }

    /// Sets the state inside a frame of which `have` bytes have come: those of `first`, the first one lowest.
    #[inline(always)]
    pub(super) fn open(&mut self, next: u32, have: u32, first: u64) {
        *self = Self { next, stored: have as u8, ..Self::default() };
        self.peek[0] = first.to_le();
    }

    #[inline(always)]
    pub(super) fn is_not_http2(&self) -> bool {
        self.state == state::NOT_HTTP2
    }

    /// Returns true if boundaries are lost.
    #[inline(always)]
    pub fn is_desynced(&self) -> bool {
        self.state == state::DESYNC
    }

    /// Gives up the boundaries after missing bytes.
    #[inline(always)]
    pub(super) fn desync(&mut self) {
        self.state = state::DESYNC;
        self.skip = 0;
        self.class = frame_class::NOTHING;
    }

    /// Stops reading, as the connection is gone.
    #[inline(always)]
    pub(super) fn close(&mut self) {
        self.state = state::CLOSED;
        self.skip = 0;
    }

    /// Sets the state in front of a frame that begins at `seq`.
    #[inline(always)]
    pub(super) fn resync_at(&mut self, seq: u32) {
        self.open(seq, 0, 0);
    }

    /// Returns the offset in a segment of `len` bytes at `seq` at which reading probably continues: a guess without the
    /// lock.
    #[inline(always)]
    pub fn peek_offset(&self, seq: u32, len: u32) -> Option<u32> {
        let offset = self.next.wrapping_sub(seq);
        (offset < len && self.is_reading_at(self.next)).then_some(offset)
    }

    /// Returns true if reading continues at this sequence number. To be asked again with the lock held, since another
    /// CPU may have moved the position or given up the boundaries.
    #[inline(always)]
    pub fn is_reading_at(&self, seq: u32) -> bool {
        self.next == seq && self.skip == 0 && self.state < state::NOT_HTTP2
    }

    /// Registers a segment of `len` bytes at `seq`. Returns the position at which to read in it.
    ///
    /// Retransmitted bytes are ignored; payload is skipped, whether it has come or not.
    #[inline(always)]
    pub fn seek(&mut self, seq: u32, len: u32) -> SeekResult {
        if self.state == state::NEXT_SEGMENT {
            self.state = state::FRAME;
            self.next = seq;
        }
        // Signed, since sequence numbers wrap (RFC 9293 §3.4).
        let behind = self.next.wrapping_sub(seq) as i32;
        if (behind >= 0 && behind as u32 >= len) || self.state == state::NOT_HTTP2 {
            return SeekResult::Done;
        }
        if self.state >= state::DESYNC {
            // `next` follows the segments although none is read, so that later distances stay small.
            self.next = seq.wrapping_add(len);
            return SeekResult::Done;
        }
        // A gap inside a skipped payload does no harm: its bytes would not be read anyway.
        if behind < 0 && behind.unsigned_abs() > self.skip {
            return SeekResult::Gap;
        }
        let end = seq.wrapping_add(len);
        let ahead = end.wrapping_sub(self.next);
        if self.skip >= ahead {
            self.skip -= ahead;
            self.next = end;
            return SeekResult::Done;
        }
        self.next = self.next.wrapping_add(self.skip);
        self.skip = 0;
        SeekResult::ReadAt(self.next.wrapping_sub(seq))
    }

    /// Returns the frame whose payload has just ended, if one has. To be called after every [`seek`](Self::seek).
    #[inline(always)]
    pub fn take_ended_frame(&mut self) -> EndedFrame {
        let (mut class, mut ends) = (u32::from(frame_class::NOTHING), 0);
        if self.state == state::PAYLOAD && self.skip == 0 {
            self.state = state::FRAME;
            // A header block that continues takes effect with its last CONTINUATION frame.
            if self.block_continues == 0 {
                (class, ends) = (u32::from(self.class), u32::from(self.ends_stream));
                self.class = frame_class::NOTHING;
            }
        }
        // The verifier knows nothing of the values here, and merges the paths.
        let [class, ends] = untracked_pair([class, ends]);
        EndedFrame { class: class as u8, ends_stream: ends != 0, stream: self.stream }
    }

    /// Continues in a frame: `window` holds `len` (1 to [`super::PEEK_BYTES`]) bytes that begin at `next`. Consumes at
    /// least one.
    #[inline(always)]
    pub fn read(&mut self, window: &[u64; STORED_WORDS], len: u32) {
        let have = u32::from(self.stored);
        if have == 0 && self.state != state::PREFACE {
            self.peek = *window;
            self.stored = len as u8;
        } else {
            self.append_bytes(window, have, len);
        }
        // Read from memory, because many paths lead here: the verifier merges them.
        let this = black_box(self);
        this.handle_stored_bytes(have);
    }

    /// Handles the bytes that are stored now; `have` of them were stored before.
    #[inline(always)]
    fn handle_stored_bytes(&mut self, have: u32) {
        let all = u32::from(self.stored);
        let wanted =
            if self.state == state::PREFACE { PREFACE_BYTES } else { self.wanted_bytes(all) };
        // Bytes beyond the wanted ones belong to the skipped payload or to the next frame, and are read again from
        // there.
        let copied = if all < wanted { all } else { wanted };
        self.next = self.next.wrapping_add(copied.wrapping_sub(have));
        self.stored = copied as u8;
        if self.state == state::PREFACE {
            return self.check_preface();
        }
        if copied == wanted && copied >= HEADER_BYTES {
            self.stored = 0;
            self.parse_frame_header(copied);
        }
    }

    /// Returns the begin of the header block that has just ended.
    #[inline(always)]
    pub(super) fn header_block(&self) -> HeaderBlockPrefix {
        let words = self.peek.map(u64::from_le);
        HeaderBlockPrefix::new(words, u32::from(self.block_offset), u32::from(self.block_len))
    }

    /// Appends bytes to the stored ones, as far as they fit. Bytes behind them stay as they were.
    ///
    /// It has no branch for each byte, word or shift: the verifier would follow them all. Nor has it a variable index,
    /// whose bounds a spill to the stack would lose before 5.16.
    #[inline(always)]
    fn append_bytes(&mut self, window: &[u64; STORED_WORDS], have: u32, len: u32) {
        let end = have.wrapping_add(len);
        let end = if end < STORED_BYTES { end } else { STORED_BYTES };
        let words = shift_up(window.map(u64::from_le), have);
        let mut index = 0;
        while index < STORED_WORDS {
            let before = index as i64 * 8;
            let old_bytes = first_bytes_mask(bytes_after(have, before));
            let new_bytes = first_bytes_mask(bytes_after(end, before)) & !old_bytes;
            let word = u64::from_le(self.peek[index]);
            self.peek[index] = ((word & !new_bytes) | (words[index] & new_bytes)).to_le();
            index += 1;
        }
        self.stored = end as u8;
    }

    /// Returns the number of bytes of the frame to store, as far as the first `all` bytes determine it.
    #[inline(always)]
    fn wanted_bytes(&self, all: u32) -> u32 {
        if all < HEADER_BYTES {
            return HEADER_BYTES;
        }
        let size = HEADER_BYTES + self.payload_length();
        if size > STORED_BYTES { STORED_BYTES } else { size }
    }

    /// Returns the length of the frame's payload in bytes.
    #[inline(always)]
    fn payload_length(&self) -> u32 {
        let first = self.peek[0].to_le() as u32;
        first.swap_bytes() >> 8
    }

    #[inline(always)]
    fn check_preface(&mut self) {
        let is_same = self.peek[0] == PREFACE[0].to_le()
            && self.peek[1] == PREFACE[1].to_le()
            && self.peek[2] == PREFACE[2].to_le();
        if !is_same {
            self.state = state::NOT_HTTP2;
        } else if u32::from(self.stored) == PREFACE_BYTES {
            self.stored = 0;
            self.state = state::FRAME;
        }
    }

    /// Handles a frame's header in `peek` and the begin of its payload: `taken` bytes together.
    #[inline(always)]
    fn parse_frame_header(&mut self, taken: u32) {
        let (first, second) = (self.peek[0].to_le(), self.peek[1].to_le());
        let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
        let stream = (((first >> 40) as u32 & 0xff_ffff) | (second as u32) << 24).swap_bytes();
        let stream = stream & 0x7fff_ffff;
        self.skip = HEADER_BYTES.wrapping_add(self.payload_length()).wrapping_sub(taken);
        self.state = state::PAYLOAD;
        // WINDOW_UPDATE is for either. Frames of unknown types are ignored (RFC 9113 §5.5).
        let is_for_connection =
            matches!(kind, frame_kind::SETTINGS | frame_kind::PING | frame_kind::GOAWAY);
        let is_for_stream = kind <= frame_kind::PUSH_PROMISE && !is_for_connection
            || kind == frame_kind::CONTINUATION;
        if (is_for_connection && stream != 0) || (is_for_stream && stream == 0) {
            // An error of the whole connection, which the receiver closes (RFC 9113 §5.4.1).
            self.state = state::NOT_HTTP2;
            return;
        }
        if kind == frame_kind::CONTINUATION {
            self.block_continues = u8::from(flags & frame_flag::END_HEADERS == 0);
            // `peek` held the begin of the block, which this frame's header has overwritten.
            self.block_len = 0;
            return;
        }
        self.block_continues = 0;
        self.stream = stream;
        self.ends_stream = flags & frame_flag::END_STREAM;
        self.class = match kind {
            frame_kind::DATA => frame_class::DATA,
            frame_kind::HEADERS => frame_class::HEADERS,
            frame_kind::RST_STREAM => frame_class::RESET,
            frame_kind::GOAWAY => frame_class::GOAWAY,
            frame_kind::PRIORITY | frame_kind::PUSH_PROMISE => frame_class::NOTHING,
            _ => frame_class::NOTHING,
        };
        match kind {
            frame_kind::HEADERS => {
                self.block_continues = u8::from(flags & frame_flag::END_HEADERS == 0);
                // Padding length and priority precede the block (RFC 9113 §6.2).
                let padding = u32::from(flags & frame_flag::PADDED != 0);
                let priority = if flags & frame_flag::PRIORITY != 0 { 5 } else { 0 };
                let block = HEADER_BYTES + padding + priority;
                self.block_offset = block as u8;
                self.block_len = taken.saturating_sub(block) as u8;
            }
            frame_kind::PUSH_PROMISE => {
                self.block_continues = u8::from(flags & frame_flag::END_HEADERS == 0)
            }
            // Last stream and error code (RFC 9113 §6.8).
            frame_kind::GOAWAY if taken >= HEADER_BYTES + 8 => {
                self.stream = ((second >> 8) as u32).swap_bytes() & 0x7fff_ffff;
            }
            frame_kind::GOAWAY => self.class = frame_class::NOTHING,
            _ => {}
        }
    }
}

/// Moves little-endian words up by up to 31 bytes; zeros move in.
#[inline(always)]
fn shift_up([a, b, c, d]: [u64; STORED_WORDS], bytes: u32) -> [u64; STORED_WORDS] {
    let shift = (bytes & 7) * 8;
    // Two shifts: one by 64 is undefined.
    let carry = |word: u64| word >> 1 >> (63 - shift);
    let [a, b, c, d] =
        [a << shift, b << shift | carry(a), c << shift | carry(b), d << shift | carry(c)];
    // All ones where words move by one, and by two. The compiler must not make branches of them.
    let [one, two] = [3, 4].map(|bit| black_box(u64::from(bytes >> bit & 1).wrapping_neg()));
    let [a, b, c, d] = [a & !one, b & !one | a & one, c & !one | b & one, d & !one | c & one];
    [a & !two, b & !two, c & !two | a & two, d & !two | b & two]
}

/// Returns true if a client's segment of `len` bytes certainly begins with a frame. Accepted are the small frames that
/// every client sends, and a request that fills the segment; no other data looks like them. `window` holds the first
/// `have` bytes.
///
/// `newest` is the highest stream that the client has opened, as far as that is known.
#[inline(always)]
pub(super) fn begins_with_frame(
    window: &[u64; STORED_WORDS],
    have: u32,
    len: u32,
    newest: u32,
) -> bool {
    if have < HEADER_BYTES {
        return false;
    }
    let (first, second) = (window[0].to_le(), window[1].to_le());
    let length = (first as u32).swap_bytes() >> 8;
    let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
    // Including the reserved bit, which must be 0.
    let stream = (((first >> 40) as u32 & 0xff_ffff) | (second as u32) << 24).swap_bytes();
    let is_new = stream & 1 != 0 && stream > newest && stream < 1 << 31;
    let size = HEADER_BYTES + length;
    match (kind, length, flags) {
        (frame_kind::WINDOW_UPDATE, 4, 0) => size <= len && stream < 1 << 31,
        (frame_kind::PING, 8, 0 | 1) | (frame_kind::SETTINGS, 0, 1) => size <= len && stream == 0,
        // The header block ends there, and maybe the stream; with priority or without.
        (frame_kind::HEADERS, _, 0x04 | 0x05 | 0x24 | 0x25) => size == len && is_new,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of some words, in the order in which a connection has them.
    fn bytes_of(words: [u64; STORED_WORDS]) -> [u8; STORED_BYTES as usize] {
        let mut bytes = [0; STORED_BYTES as usize];
        for (eight, word) in bytes.chunks_exact_mut(8).zip(words) {
            eight.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn appended_bytes_change_no_byte_around_them() {
        let window = [0x1716_1514_1312_1110, 0x1f1e_1d1c_1b1a_1918, u64::MAX, 0].map(u64::to_le);
        let peek = [0xf7f6_f5f4_f3f2_f1f0, 0, u64::MAX, 0xa5a5_5a5a_a5a5_5a5a].map(u64::to_le);
        for have in 0..STORED_BYTES {
            for len in 1..=STORED_BYTES {
                let mut direction = Http2Direction { peek, ..Http2Direction::default() };
                direction.append_bytes(&window, have, len);
                let count = len.min(STORED_BYTES - have) as usize;
                let mut wanted = bytes_of(peek);
                wanted[have as usize..][..count].copy_from_slice(&bytes_of(window)[..count]);
                assert_eq!(bytes_of(direction.peek), wanted, "{len} bytes behind {have}");
                assert_eq!(u32::from(direction.stored), have + count as u32);
            }
        }
    }
}
