//! Pure: one direction of an HTTP/2 connection: where it stands between frames.

use core::hint::black_box;

use super::glimpse::Block;
use crate::h1::Seek;

/// Words of a frame's begin that are looked at.
pub(super) const WORDS: usize = 4;
const BYTES: u32 = WORDS as u32 * 8;
/// Bytes of a frame's header (RFC 9113 §4.1).
const HEADER: u32 = 9;

/// What a client sends first (RFC 9113 §3.4).
const PREFACE: [u64; 3] = [
    u64::from_le_bytes(*b"PRI * HT"),
    u64::from_le_bytes(*b"TP/2.0\r\n"),
    u64::from_le_bytes(*b"\r\nSM\r\n\r\n"),
];
const PREFACE_BYTES: u32 = 24;

/// Where a [`Side`] stands.
mod at {
    /// In front of a frame, or in the part of it that is looked at.
    pub(super) const FRAME: u8 = 0;
    /// In its payload.
    pub(super) const PAYLOAD: u8 = 1;
    /// In the client's preface.
    pub(super) const PREFACE: u8 = 2;
    /// In front of a frame that begins with the next segment.
    pub(super) const ANCHOR: u8 = 3;
    /// What came was no preface, or no frame.
    pub(super) const FOREIGN: u8 = 4;
    /// Boundaries are lost.
    pub(super) const LOST: u8 = 5;
    /// Nothing more is read.
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

/// Values of [`Ended::what`].
pub mod ended {
    /// Nothing that matters, or nothing at all.
    pub const NOTHING: u8 = 0;
    /// A header block is complete.
    pub const HEADERS: u8 = 1;
    /// A DATA frame.
    pub const DATA: u8 = 2;
    /// RST_STREAM.
    pub const RESET: u8 = 3;
    /// GOAWAY; the stream is the last one that is worked on.
    pub const GOAWAY: u8 = 4;
}

/// A frame whose last byte has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// One of [`ended`].
    pub what: u8,
    /// Whether its sender sends nothing more on the stream.
    pub ends: bool,
    /// The stream it is about.
    pub stream: u32,
}

/// One direction of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Side {
    /// Sequence number of the next byte to come.
    pub next: u32,
    /// Bytes from `next` on that need not be read.
    pub skip: u32,
    /// The stream that the frame at hand, or the header block, is about.
    stream: u32,
    /// Bytes of the frame at hand that are in `peek`.
    have: u8,
    /// One of [`at`].
    at: u8,
    /// What the frame or header block will be when it has ended: one of [`ended`].
    what: u8,
    /// 1: its sender sends nothing more on the stream.
    ends: u8,
    /// 1: more of the header block follows in other frames.
    goes_on: u8,
    /// Where in `peek` the header block begins.
    block: u8,
    /// How many bytes of it are there.
    block_len: u8,
    reserved: u8,
    /// The begin of the frame at hand.
    peek: [u64; WORDS],
}

impl Side {
    #[inline(always)]
    pub(super) fn open_behind_preface(&mut self, next: u32, have: u32) {
        self.open(next, have, 0);
        // Bytes that come overwrite it, so that it differs as soon as they do.
        [self.peek[0], self.peek[1], self.peek[2]] = PREFACE.map(u64::to_le);
        self.at = at::PREFACE;
    }

    /// Stands in a frame of which `have` bytes have come: those of `first`, the first one lowest.
    #[inline(always)]
    pub(super) fn open(&mut self, next: u32, have: u32, first: u64) {
        *self = Self { next, have: have as u8, ..Self::default() };
        self.peek[0] = first.to_le();
    }

    #[inline(always)]
    pub(super) fn is_foreign(&self) -> bool {
        self.at == at::FOREIGN
    }

    /// Whether boundaries are lost.
    #[inline(always)]
    pub fn is_lost(&self) -> bool {
        self.at == at::LOST
    }

    /// Gives the boundaries up.
    #[inline(always)]
    pub(super) fn lose(&mut self) {
        self.at = at::LOST;
        self.skip = 0;
        self.what = ended::NOTHING;
    }

    /// Reads nothing more.
    #[inline(always)]
    pub(super) fn close(&mut self) {
        self.at = at::GONE;
        self.skip = 0;
    }

    /// Stands in front of a frame that begins at `seq`.
    #[inline(always)]
    pub(super) fn resume(&mut self, seq: u32) {
        self.open(seq, 0, 0);
    }

    /// Where in a segment of `len` bytes at `seq` reading most likely goes on: a guess, for whoever has yet to take the lock.
    #[inline(always)]
    pub fn peek(&self, seq: u32, len: u32) -> Option<u32> {
        let offset = self.next.wrapping_sub(seq);
        (offset < len && self.reads_at(self.next)).then_some(offset)
    }

    /// Whether reading goes on at this sequence number: to be asked again with the lock held, as others may have moved on, or
    /// given up, since.
    #[inline(always)]
    pub fn reads_at(&self, seq: u32) -> bool {
        self.next == seq && self.skip == 0 && self.at < at::FOREIGN
    }

    /// Takes note of a segment of `len` bytes at `seq`, and says where in it to read.
    ///
    /// Retransmitted bytes are passed over; payload is skipped, arrived or not.
    #[inline(always)]
    pub fn seek(&mut self, seq: u32, len: u32) -> Seek {
        if self.at == at::ANCHOR {
            self.at = at::FRAME;
            self.next = seq;
        }
        let behind = self.next.wrapping_sub(seq) as i32;
        if (behind >= 0 && behind as u32 >= len) || self.at == at::FOREIGN {
            return Seek::Done;
        }
        if self.at >= at::LOST {
            self.next = seq.wrapping_add(len);
            return Seek::Done;
        }
        if behind < 0 && behind.unsigned_abs() > self.skip {
            return Seek::Gap;
        }
        let end = seq.wrapping_add(len);
        let ahead = end.wrapping_sub(self.next);
        if self.skip >= ahead {
            self.skip -= ahead;
            self.next = end;
            return Seek::Done;
        }
        self.next = self.next.wrapping_add(self.skip);
        self.skip = 0;
        Seek::Read(self.next.wrapping_sub(seq))
    }

    /// The frame whose payload has just ended, if one has. To be called after every [`seek`](Self::seek).
    #[inline(always)]
    pub fn ended(&mut self) -> Ended {
        let (mut what, mut ends) = (u32::from(ended::NOTHING), 0);
        if self.at == at::PAYLOAD && self.skip == 0 {
            self.at = at::FRAME;
            if self.goes_on == 0 {
                (what, ends) = (u32::from(self.what), u32::from(self.ends));
                self.what = ended::NOTHING;
            }
        }
        // Half words that the compiler puts into memory: there the verifier forgets the values, and follows one way on.
        Ended { what: black_box(what) as u8, ends: black_box(ends) != 0, stream: self.stream }
    }

    /// Reads on in a frame: `window` holds `len` (1 to [`super::PEEK`]) bytes that begin at `next`. Consumes at least one.
    #[inline(always)]
    pub fn read(&mut self, window: &[u64; WORDS], len: u32) {
        let have = u32::from(self.have);
        if have == 0 && self.at != at::PREFACE {
            self.peek = *window;
            self.have = len as u8;
        } else {
            self.append(window, have, len);
        }
        // From memory, as all that many ways lead to: the verifier follows one on.
        let this = black_box(self);
        this.taken(have);
    }

    /// Decides about the bytes that are there now; `have` of them were there before.
    #[inline(always)]
    fn taken(&mut self, have: u32) {
        let all = u32::from(self.have);
        let wanted = if self.at == at::PREFACE { PREFACE_BYTES } else { self.wanted(all) };
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

    /// The begin of the header block that has just ended.
    #[inline(always)]
    pub(super) fn payload(&self) -> Block {
        let words = self.peek.map(u64::from_le);
        Block::new(words, u32::from(self.block), u32::from(self.block_len))
    }

    /// Puts bytes behind those that were there, as far as they fit.
    #[inline(always)]
    fn append(&mut self, window: &[u64; WORDS], have: u32, len: u32) {
        // Whole words: of half ones the verifier forgets the value.
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

    /// Bytes of the frame that are looked at, as far as that is known from the first `all` of them.
    #[inline(always)]
    fn wanted(&self, all: u32) -> u32 {
        if all < HEADER {
            return HEADER;
        }
        let size = HEADER + self.length();
        if size > BYTES { BYTES } else { size }
    }

    /// Bytes of the frame's payload.
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

    /// The header of a frame is in `peek`, with the begin of its payload: `taken` bytes in all.
    #[inline(always)]
    fn frame(&mut self, taken: u32) {
        let (first, second) = (self.peek[0].to_le(), self.peek[1].to_le());
        let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
        let stream = (((first >> 40) as u32 & 0xff_ffff) | (second as u32) << 24).swap_bytes();
        let stream = stream & 0x7fff_ffff;
        self.skip = HEADER.wrapping_add(self.length()).wrapping_sub(taken);
        self.at = at::PAYLOAD;
        let is_connections = matches!(kind, kind::SETTINGS | kind::PING | kind::GOAWAY);
        let is_streams =
            kind <= kind::PUSH_PROMISE && !is_connections || kind == kind::CONTINUATION;
        if (is_connections && stream != 0) || (is_streams && stream == 0) {
            // An error for the whole connection: whoever gets it ends that (RFC 9113 §5.4.1).
            self.at = at::FOREIGN;
            return;
        }
        if kind == kind::CONTINUATION {
            self.goes_on = u8::from(flags & flag::END_HEADERS == 0);
            // The block's begin is gone.
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
                let padding = u32::from(flags & flag::PADDED != 0);
                let priority = if flags & flag::PRIORITY != 0 { 5 } else { 0 };
                let block = HEADER + padding + priority;
                self.block = block as u8;
                self.block_len = taken.saturating_sub(block) as u8;
            }
            kind::PUSH_PROMISE => self.goes_on = u8::from(flags & flag::END_HEADERS == 0),
            // Last stream, error code (RFC 9113 §6.8).
            kind::GOAWAY if taken >= HEADER + 8 => {
                self.stream = ((second >> 8) as u32).swap_bytes() & 0x7fff_ffff;
            }
            kind::GOAWAY => self.what = ended::NOTHING,
            _ => {}
        }
    }
}

/// Whether a client's segment of `len` bytes, of which `window` holds the first `have`, surely begins with a frame: nothing
/// else looks like the small ones that every client sends, or like a request that fills the segment.
///
/// `newest` is the highest stream that it has opened, as far as that is known.
#[inline(always)]
pub(super) fn begins(window: &[u64; WORDS], have: u32, len: u32, newest: u32) -> bool {
    if have < HEADER {
        return false;
    }
    let (first, second) = (window[0].to_le(), window[1].to_le());
    let length = (first as u32).swap_bytes() >> 8;
    let (kind, flags) = ((first >> 24) as u8, (first >> 32) as u8);
    // With its reserved bit, which is 0.
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
