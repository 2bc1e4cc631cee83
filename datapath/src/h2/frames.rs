//! Pure: one direction of an HTTP/2 connection: its position in frames.

use core::hint::black_box;

use super::glimpse::HeaderBlockPrefix;
use crate::h1::SeekResult;

/// Words of a frame's begin that are stored and read.
pub(super) const WORDS: usize = 4;
const BYTES: u32 = WORDS as u32 * 8;
/// Bytes of a frame's header (RFC 9113 §4.1).
const HEADER: u32 = 9;

/// First bytes of a client (RFC 9113 §3.4).
const PREFACE: [u64; 3] = [
    u64::from_le_bytes(*b"PRI * HT"),
    u64::from_le_bytes(*b"TP/2.0\r\n"),
    u64::from_le_bytes(*b"\r\nSM\r\n\r\n"),
];
const PREFACE_BYTES: u32 = 24;

/// States of a [`Http2Direction`].
mod at {
    /// In front of a frame, or in the part of it that is read.
    pub(super) const FRAME: u8 = 0;
    /// In the payload of a frame.
    pub(super) const PAYLOAD: u8 = 1;
    /// In the preface of the client.
    pub(super) const PREFACE: u8 = 2;
    /// In front of a frame that begins with the next segment.
    pub(super) const ANCHOR: u8 = 3;
    /// The bytes were no preface, or no frame.
    pub(super) const FOREIGN: u8 = 4;
    /// Message boundaries are lost (desync).
    pub(super) const LOST: u8 = 5;
    /// The connection is gone, and nothing more is read.
    pub(super) const GONE: u8 = 6;
}

/// Frame types (RFC 9113 §6).
#[allow(missing_docs, reason = "named as there")]
pub mod kind {
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
pub mod flag {
    pub const ACK: u8 = 1;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    pub const PADDED: u8 = 8;
    pub const PRIORITY: u8 = 32;
}

/// Values of [`EndedFrame::what`], which classify a frame.
pub mod ended {
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
    /// Class of the frame, as one of [`ended`].
    pub what: u8,
    /// True if the sender sends nothing more on the stream.
    pub ends: bool,
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
    have: u8,
    /// State, as one of [`at`].
    at: u8,
    /// Class of the present frame or header block when it ends, as one of [`ended`].
    what: u8,
    /// 1 if the sender sends nothing more on the stream.
    ends: u8,
    /// 1 if the header block continues in other frames.
    goes_on: u8,
    /// Offset of the header block in `peek`.
    block: u8,
    /// Bytes of the header block in `peek`.
    block_len: u8,
    reserved: u8,
    /// First bytes of the present frame.
    peek: [u64; WORDS],
}

impl Http2Direction {
    #[inline(always)]
    pub(super) fn open_behind_preface(&mut self, next: u32, have: u32) {
        self.open(next, have, 0);
        // New bytes overwrite the expected preface, so that a difference shows as soon as it comes.
        [self.peek[0], self.peek[1], self.peek[2]] = PREFACE.map(u64::to_le);
        self.at = at::PREFACE;
    }

    /// Sets the state inside a frame of which `have` bytes have come: those of `first`, the first one lowest.
    #[inline(always)]
    pub(super) fn open(&mut self, next: u32, have: u32, first: u64) {
        *self = Self { next, have: have as u8, ..Self::default() };
        self.peek[0] = first.to_le();
    }

    #[inline(always)]
    pub(super) fn is_foreign(&self) -> bool {
        self.at == at::FOREIGN
    }

    /// Returns true if boundaries are lost.
    #[inline(always)]
    pub fn is_lost(&self) -> bool {
        self.at == at::LOST
    }

    /// Gives up the boundaries after missing bytes.
    #[inline(always)]
    pub(super) fn lose(&mut self) {
        self.at = at::LOST;
        self.skip = 0;
        self.what = ended::NOTHING;
    }

    /// Stops reading, as the connection is gone.
    #[inline(always)]
    pub(super) fn close(&mut self) {
        self.at = at::GONE;
        self.skip = 0;
    }

    /// Sets the state in front of a frame that begins at `seq`.
    #[inline(always)]
    pub(super) fn resume(&mut self, seq: u32) {
        self.open(seq, 0, 0);
    }

    /// Returns the offset in a segment of `len` bytes at `seq` at which reading probably continues: a guess without the
    /// lock.
    #[inline(always)]
    pub fn peek(&self, seq: u32, len: u32) -> Option<u32> {
        let offset = self.next.wrapping_sub(seq);
        (offset < len && self.reads_at(self.next)).then_some(offset)
    }

    /// Returns true if reading continues at this sequence number. To be asked again with the lock held, since another
    /// CPU may have moved the position or given up the boundaries.
    #[inline(always)]
    pub fn reads_at(&self, seq: u32) -> bool {
        self.next == seq && self.skip == 0 && self.at < at::FOREIGN
    }

    /// Registers a segment of `len` bytes at `seq`. Returns the position at which to read in it.
    ///
    /// Retransmitted bytes are ignored; payload is skipped, whether it has come or not.
    #[inline(always)]
    pub fn seek(&mut self, seq: u32, len: u32) -> SeekResult {
        if self.at == at::ANCHOR {
            self.at = at::FRAME;
            self.next = seq;
        }
        // Signed, since sequence numbers wrap (RFC 9293 §3.4).
        let behind = self.next.wrapping_sub(seq) as i32;
        if (behind >= 0 && behind as u32 >= len) || self.at == at::FOREIGN {
            return SeekResult::Done;
        }
        if self.at >= at::LOST {
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
        SeekResult::Read(self.next.wrapping_sub(seq))
    }

    /// Returns the frame whose payload has just ended, if one has. To be called after every [`seek`](Self::seek).
    #[inline(always)]
    pub fn ended(&mut self) -> EndedFrame {
        let (mut what, mut ends) = (u32::from(ended::NOTHING), 0);
        if self.at == at::PAYLOAD && self.skip == 0 {
            self.at = at::FRAME;
            // A header block that continues takes effect with its last CONTINUATION frame.
            if self.goes_on == 0 {
                (what, ends) = (u32::from(self.what), u32::from(self.ends));
                self.what = ended::NOTHING;
            }
        }
        // 32-bit values that the compiler stores in memory: the verifier forgets them there, and merges the paths.
        EndedFrame { what: black_box(what) as u8, ends: black_box(ends) != 0, stream: self.stream }
    }

    /// Continues in a frame: `window` holds `len` (1 to [`super::PEEK`]) bytes that begin at `next`. Consumes at least
    /// one.
    #[inline(always)]
    pub fn read(&mut self, window: &[u64; WORDS], len: u32) {
        let have = u32::from(self.have);
        if have == 0 && self.at != at::PREFACE {
            self.peek = *window;
            self.have = len as u8;
        } else {
            self.append(window, have, len);
        }
        // Read from memory, because many paths lead here: the verifier merges them.
        let this = black_box(self);
        this.taken(have);
    }

    /// Handles the bytes that are stored now; `have` of them were stored before.
    #[inline(always)]
    fn taken(&mut self, have: u32) {
        let all = u32::from(self.have);
        let wanted = if self.at == at::PREFACE { PREFACE_BYTES } else { self.wanted(all) };
        // Bytes beyond the wanted ones belong to the skipped payload or to the next frame, and are read again from
        // there.
        let taken = if all < wanted { all } else { wanted };
        self.next = self.next.wrapping_add(taken.wrapping_sub(have));
        self.have = taken as u8;
        if self.at == at::PREFACE {
            return self.preface();
        }
        if taken == wanted && taken >= HEADER {
            self.have = 0;
            self.frame(taken);
        }
    }

    /// Returns the begin of the header block that has just ended.
    #[inline(always)]
    pub(super) fn payload(&self) -> HeaderBlockPrefix {
        let words = self.peek.map(u64::from_le);
        HeaderBlockPrefix::new(words, u32::from(self.block), u32::from(self.block_len))
    }

    /// Appends bytes to the stored ones, as far as they fit.
    #[inline(always)]
    fn append(&mut self, window: &[u64; WORDS], have: u32, len: u32) {
        // 64-bit values: of narrower ones the verifier forgets the value, and could not check the indexes.
        let mut index = 0_usize;
        while index < WORDS * 8 {
            let place = have as usize + index;
            if index as u32 >= len || place >= WORDS * 8 {
                break;
            }
            let word = window[(index >> 3) & (WORDS - 1)].to_le();
            let byte = (word >> ((index & 7) * 8)) & 0xff;
            let shift = (place & 7) * 8;
            let into = &mut self.peek[(place >> 3) & (WORDS - 1)];
            *into = ((into.to_le() & !(0xff << shift)) | byte << shift).to_le();
            index = black_box(index + 1);
        }
        self.have = (have as usize + index) as u8;
    }

    /// Returns the number of bytes of the frame to store, as far as the first `all` bytes determine it.
    #[inline(always)]
    fn wanted(&self, all: u32) -> u32 {
        if all < HEADER {
            return HEADER;
        }
        let size = HEADER + self.length();
        if size > BYTES { BYTES } else { size }
    }

    /// Returns the length of the frame's payload in bytes.
    #[inline(always)]
    fn length(&self) -> u32 {
        let first = self.peek[0].to_le() as u32;
        first.swap_bytes() >> 8
    }

    #[inline(always)]
    fn preface(&mut self) {
        let is_same = self.peek[0] == PREFACE[0].to_le()
            && self.peek[1] == PREFACE[1].to_le()
            && self.peek[2] == PREFACE[2].to_le();
        if !is_same {
            self.at = at::FOREIGN;
        } else if u32::from(self.have) == PREFACE_BYTES {
            self.have = 0;
            self.at = at::FRAME;
        }
    }

    /// Handles a frame's header in `peek` and the begin of its payload: `taken` bytes together.
    #[inline(always)]
    fn frame(&mut self, taken: u32) {
        let (first, second) = (self.peek[0].to_le(), self.peek[1].to_le());
        let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
        let stream = (((first >> 40) as u32 & 0xff_ffff) | (second as u32) << 24).swap_bytes();
        let stream = stream & 0x7fff_ffff;
        self.skip = HEADER.wrapping_add(self.length()).wrapping_sub(taken);
        self.at = at::PAYLOAD;
        // WINDOW_UPDATE belongs to either. Frames of unknown types are ignored (RFC 9113 §5.5).
        let is_connections = matches!(kind, kind::SETTINGS | kind::PING | kind::GOAWAY);
        let is_streams =
            kind <= kind::PUSH_PROMISE && !is_connections || kind == kind::CONTINUATION;
        if (is_connections && stream != 0) || (is_streams && stream == 0) {
            // An error of the whole connection, which the receiver closes (RFC 9113 §5.4.1).
            self.at = at::FOREIGN;
            return;
        }
        if kind == kind::CONTINUATION {
            self.goes_on = u8::from(flags & flag::END_HEADERS == 0);
            // `peek` held the begin of the block, which this frame's header has overwritten.
            self.block_len = 0;
            return;
        }
        self.goes_on = 0;
        self.stream = stream;
        self.ends = flags & flag::END_STREAM;
        self.what = match kind {
            kind::DATA => ended::DATA,
            kind::HEADERS => ended::HEADERS,
            kind::RST_STREAM => ended::RESET,
            kind::GOAWAY => ended::GOAWAY,
            kind::PRIORITY | kind::PUSH_PROMISE => ended::NOTHING,
            _ => ended::NOTHING,
        };
        match kind {
            kind::HEADERS => {
                self.goes_on = u8::from(flags & flag::END_HEADERS == 0);
                // Padding length and priority precede the block (RFC 9113 §6.2).
                let padding = u32::from(flags & flag::PADDED != 0);
                let priority = if flags & flag::PRIORITY != 0 { 5 } else { 0 };
                let block = HEADER + padding + priority;
                self.block = block as u8;
                self.block_len = taken.saturating_sub(block) as u8;
            }
            kind::PUSH_PROMISE => self.goes_on = u8::from(flags & flag::END_HEADERS == 0),
            // Last stream and error code (RFC 9113 §6.8).
            kind::GOAWAY if taken >= HEADER + 8 => {
                self.stream = ((second >> 8) as u32).swap_bytes() & 0x7fff_ffff;
            }
            kind::GOAWAY => self.what = ended::NOTHING,
            _ => {}
        }
    }
}

/// Returns true if a client's segment of `len` bytes certainly begins with a frame. Accepted are the small frames that
/// every client sends, and a request that fills the segment; no other data looks like them. `window` holds the first
/// `have` bytes.
///
/// `newest` is the highest stream that the client has opened, as far as that is known.
#[inline(always)]
pub(super) fn begins(window: &[u64; WORDS], have: u32, len: u32, newest: u32) -> bool {
    if have < HEADER {
        return false;
    }
    let (first, second) = (window[0].to_le(), window[1].to_le());
    let length = (first as u32).swap_bytes() >> 8;
    let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
    // Including the reserved bit, which must be 0.
    let stream = (((first >> 40) as u32 & 0xff_ffff) | (second as u32) << 24).swap_bytes();
    let is_new = stream & 1 != 0 && stream > newest && stream < 1 << 31;
    let size = HEADER + length;
    match (kind, length, flags) {
        (kind::WINDOW_UPDATE, 4, 0) => size <= len && stream < 1 << 31,
        (kind::PING, 8, 0 | 1) | (kind::SETTINGS, 0, 1) => size <= len && stream == 0,
        // The header block ends there, and maybe the stream; with priority or without.
        (kind::HEADERS, _, 0x04 | 0x05 | 0x24 | 0x25) => size == len && is_new,
        _ => false,
    }
}
