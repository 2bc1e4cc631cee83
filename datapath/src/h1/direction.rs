//! Pure: one direction of a connection: its state, and the length of the body.

use core::{hint::black_box, mem::size_of};

use super::{pattern, request_kind, scan::IN_PLACE};
use crate::words::set_window_len;

/// States of a [`Http1Direction`]. Numbers and no enum, because the kernel's memory may hold any value.
pub mod state {
    /// Between messages, or in stray line ends before one.
    pub const START: u8 = 0;
    /// In the significant part of the first line.
    pub const FIRST: u8 = 1;
    /// Inside a line whose rest is not significant.
    pub const SCAN: u8 = 2;
    /// At the first byte of a header or trailer line.
    pub const LINE: u8 = 3;
    /// After a carriage return at the begin of a line.
    pub const LINE_CR: u8 = 4;
    /// In the name of a header that may be significant.
    pub const NAME: u8 = 5;
    /// In front of the digits of Content-Length.
    pub const LENGTH: u8 = 6;
    /// In the digits of Content-Length.
    pub const DIGITS: u8 = 7;
    /// Behind the digits of Content-Length.
    pub const LENGTH_TAIL: u8 = 8;
    /// In a list of tokens: Transfer-Encoding or Connection.
    pub const TOKENS: u8 = 9;
    /// In front of the digits of a chunk's size.
    pub const SIZE: u8 = 10;
    /// In the digits of a chunk's size.
    pub const SIZE_DIGITS: u8 = 11;
    /// Behind the data of a chunk.
    pub const CHUNK_END: u8 = 12;
    /// Behind a chunk's size, in an extension or at the line's end.
    pub const SIZE_TAIL: u8 = 13;
    /// Inside a body of known length.
    pub const BODY: u8 = 14;
    /// Nothing more is read until the connection closes.
    pub const TUNNEL: u8 = 15;
    /// Message boundaries are lost (desync).
    pub const DESYNC: u8 = 16;
    /// HTTP/2 continues at `next`, which does not change any more.
    pub const HTTP2: u8 = 17;
    /// A head has just ended; never persists after a step.
    pub const HEAD_END: u8 = 18;
    /// A message has just ended; never persists after a step.
    pub const DONE: u8 = 19;
}

/// Bits of [`Http1Direction::flags`], about the message being read.
pub(super) mod flag {
    /// A Content-Length was read.
    pub(crate) const LENGTH: u16 = 1;
    /// A Transfer-Encoding was read.
    pub(crate) const CODED: u16 = 2;
    /// The last coding is `chunked`.
    pub(crate) const CHUNKED: u16 = 4;
    /// The connection closes after this message.
    pub(crate) const CLOSES: u16 = 8;
    /// The line before was a list that a folded line would continue.
    pub(crate) const FOLD: u16 = 16;
    /// The length of the body is contradictory.
    pub(crate) const BAD_LENGTH: u16 = 32;
    /// Reading is in the trailers after the last chunk.
    pub(crate) const TRAILER: u16 = 64;
    /// The next segment sets `next`.
    pub(crate) const ANCHOR: u16 = 256;
    /// The first byte of the message cannot begin HTTP/1.
    pub(crate) const NOT_HTTP1: u16 = 512;
    /// The first bytes of HTTP/2 were read.
    pub(crate) const HTTP2_PREFACE: u16 = 1024;
}

/// State of one direction of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http1Direction {
    /// Sequence number of the next byte to come.
    pub next: u32,
    /// Status of the response being read, or of the last one.
    pub status: u16,
    pub(super) flags: u16,
    /// State, as one of [`state`].
    pub state: u8,
    /// Kind of the request being read, as one of [`request_kind`].
    pub(super) kind: u8,
    /// Name that is being compared, or list that is being read.
    pub(super) pattern: u8,
    /// Number of its bytes that have matched.
    pub(super) matched: u8,
    /// 1 once the boundaries were lost.
    pub(super) desynced: u16,
    /// 1 once the client has asked to close after its request.
    pub(super) close_requested: u16,
    /// Bytes from `next` on that need not be read.
    pub skip: u64,
    /// Content-Length in a head, size of the chunk in a chunked body.
    pub(super) length: u64,
    /// Number being read; in a server's first frame of HTTP/2, the bytes read so far, the first one lowest.
    pub(super) value: u64,
}
const _: () = assert!(size_of::<Http1Direction>() == 40);

/// Most bytes by which [`Http1Direction::next`] may lag, so that distances are unambiguous and byte counts are recent.
const MAX_LAG_BYTES: u32 = 1 << 20;

/// Position in a segment at which reading continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekResult {
    /// The segment has no new bytes that must be read.
    Done,
    /// Bytes before the segment are missing and must be read.
    Gap,
    /// Reading continues at this offset.
    ReadAt(u32),
}

impl Http1Direction {
    /// Registers a segment of `len` bytes at `seq`. Returns the position at which to read in it.
    ///
    /// Retransmitted bytes are ignored; body bytes are skipped, whether they have come or not.
    #[inline(always)]
    pub fn seek(&mut self, seq: u32, len: u32) -> SeekResult {
        if self.flags & flag::ANCHOR != 0 {
            self.flags &= !flag::ANCHOR;
            self.next = seq;
        }
        // Signed, since sequence numbers wrap (RFC 9293 §3.4).
        let behind = self.next.wrapping_sub(seq) as i32;
        if behind >= 0 && behind as u32 >= len {
            return SeekResult::Done;
        }
        if self.state >= state::TUNNEL {
            if self.state != state::HTTP2 {
                // `next` follows the segments although none is read, so that later distances stay small.
                self.next = seq.wrapping_add(len);
            }
            return SeekResult::Done;
        }
        if behind < 0 {
            // A gap inside a skipped body does no harm: its bytes would not be read anyway.
            let gap = u64::from(behind.unsigned_abs());
            if gap > self.skip {
                return SeekResult::Gap;
            }
        }
        let end = seq.wrapping_add(len);
        let ahead = u64::from(end.wrapping_sub(self.next));
        if self.skip >= ahead {
            self.skip -= ahead;
            self.next = end;
            self.finish_skip();
            return SeekResult::Done;
        }
        self.next = self.next.wrapping_add(self.skip as u32);
        self.skip = 0;
        self.finish_skip();
        SeekResult::ReadAt(self.next.wrapping_sub(seq))
    }

    /// Returns true if a segment lies inside a body and may be ignored: [`seek`](Self::seek) catches up with any later
    /// one.
    ///
    /// A caller that is the only one to change this direction needs no lock for the call.
    #[inline(always)]
    pub fn is_inside_body(&self, seq: u32, len: u32) -> bool {
        let ahead = seq.wrapping_add(len).wrapping_sub(self.next);
        ahead < MAX_LAG_BYTES && u64::from(ahead) < self.skip
    }

    /// Returns true if the bytes read so far cannot begin HTTP/1.
    #[inline(always)]
    pub(super) fn is_not_http1(&self) -> bool {
        self.flags & flag::NOT_HTTP1 != 0
    }

    /// Returns true if the bytes read so far begin HTTP/2.
    #[inline(always)]
    pub(super) fn is_http2_preface(&self) -> bool {
        self.flags & flag::HTTP2_PREFACE != 0
    }

    /// Returns true if the bytes read so far of the next message may begin HTTP/2.
    #[inline(always)]
    pub(super) fn may_be_http2(&self) -> bool {
        let begins = matches!(self.pattern, pattern::HTTP2 | pattern::SETTINGS);
        self.state == state::START || (self.state == state::FIRST && begins)
    }

    /// Hands over to HTTP/2; the first bytes that were read stay stored.
    #[inline(always)]
    pub(super) fn switch_to_http2(&mut self) {
        if self.state == state::START {
            self.matched = 0;
            self.value = 0;
        }
        self.state = state::HTTP2;
    }

    /// Returns the number of HTTP/2 bytes that were read before the protocol was recognised.
    #[inline(always)]
    pub(super) fn http2_bytes_read(&self) -> u32 {
        u32::from(self.matched)
    }

    /// Returns true if the message states that the connection closes after it.
    #[inline(always)]
    pub(super) fn has_connection_close(&self) -> bool {
        self.flags & flag::CLOSES != 0
    }

    /// Returns true if the boundaries were lost before.
    #[inline(always)]
    pub(super) fn was_desynced(&self) -> bool {
        self.desynced != 0
    }

    /// Gives up the boundaries. Returns true for the first time on this connection.
    #[inline(always)]
    pub(super) fn desync(&mut self) -> bool {
        self.state = state::DESYNC;
        self.skip = 0;
        let first = self.desynced == 0;
        self.desynced = 1;
        first
    }

    /// Sets the state before a connection's first message.
    #[inline(always)]
    pub(super) fn open(&mut self, next: u32) {
        self.begin_message();
        self.next = next;
        self.status = 0;
        self.kind = 0;
        self.desynced = 0;
        self.close_requested = 0;
    }

    /// Sets the state before the next message.
    #[inline(always)]
    pub(super) fn begin_message(&mut self) {
        self.state = state::START;
        self.flags = 0;
        self.length = 0;
        self.skip = 0;
    }

    /// Sets the state before the next request, if there may be one.
    ///
    /// A server accepts none after a request with `Connection: close` (RFC 9112 §9.6), even if its response does not
    /// state that. Further bytes of such a client reach a socket that is being closed.
    #[inline(always)]
    pub(super) fn begin_request(&mut self) {
        self.begin_message();
        if self.close_requested != 0 {
            self.state = state::TUNNEL;
        }
    }

    /// Stops reading until the connection closes.
    #[inline(always)]
    pub(super) fn begin_tunnel(&mut self) {
        self.state = state::TUNNEL;
        self.flags = 0;
        self.skip = 0;
    }

    /// Sets the state before the next message, which begins with the next segment.
    #[inline(always)]
    pub(super) fn resync_at_next_segment(&mut self) {
        self.begin_message();
        self.flags = flag::ANCHOR;
    }

    #[inline(always)]
    fn finish_skip(&mut self) {
        if self.skip == 0 && self.state == state::BODY {
            self.state = state::DONE;
        }
    }

    /// Determines the length of a request's body when its head is complete (RFC 9112 §6.3).
    #[inline(always)]
    pub(super) fn begin_request_body(&mut self) -> u8 {
        if self.has_connection_close() {
            self.close_requested = 1;
        }
        // Transfer-Encoding overrides Content-Length. With another last coding than `chunked`, no end of the request
        // can be found.
        if self.flags & flag::CODED != 0 {
            let chunked = self.flags & flag::CHUNKED != 0;
            if chunked { self.begin_chunks() } else { self.state = state::DESYNC }
        } else if self.flags & flag::BAD_LENGTH != 0 {
            self.state = state::DESYNC;
        } else {
            self.begin_sized_body();
        }
        if self.state == state::DONE {
            self.begin_request();
        }
        self.state
    }

    /// Determines the length of a final response's body when its head is complete (RFC 9112 §6.3).
    #[inline(always)]
    pub(super) fn begin_response_body(&mut self, kind: u8) -> u8 {
        let ok = (200..300).contains(&self.status);
        let bare = self.status == 204 || self.status == 304;
        if self.status == 101 || (kind == request_kind::CONNECT && ok) {
            // Another protocol follows, whose bytes are no HTTP messages.
            self.state = state::TUNNEL;
        } else if bare || kind == request_kind::HEAD {
            self.state = state::DONE;
        } else if self.flags & flag::CHUNKED != 0 {
            self.begin_chunks();
        } else if self.flags & (flag::CODED | flag::BAD_LENGTH) == 0
            && self.flags & flag::LENGTH != 0
        {
            self.begin_sized_body();
        } else {
            // Without a usable length the response ends with the connection.
            self.state = state::TUNNEL;
        }
        self.state
    }

    #[inline(always)]
    fn begin_chunks(&mut self) {
        self.state = state::SIZE;
        self.length = 0;
    }

    #[inline(always)]
    fn begin_sized_body(&mut self) {
        self.skip = self.length;
        self.state = if self.length == 0 { state::DONE } else { state::BODY };
    }

    /// Consumes bytes of `window`, at least one, at most `len`. Without `slow` it leaves bytes for the slow path, and
    /// may consume none.
    #[inline(always)]
    pub(super) fn read<const WORDS: usize>(
        &mut self,
        window: &mut [u64; WORDS],
        len: u32,
        request: bool,
        slow: bool,
    ) {
        set_window_len(window, len);
        if self.read_lines(window, request, IN_PLACE) == 0 && slow {
            self.read_bytes(window, request);
        }
    }

    /// Consumes lines of a filled window by the fast path. Returns the number of bytes; 0 leaves them to
    /// [`read_bytes`](Self::read_bytes). `classify` is as in [`scan_lines`](Self::scan_lines).
    ///
    /// Its results are in memory only, behind a barrier. Otherwise the verifier would follow each path through here
    /// separately through all later code.
    #[inline(always)]
    pub(super) fn read_lines<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        request: bool,
        classify: Option<impl Fn(u32) -> u32>,
    ) -> u32 {
        if self.state == state::START {
            self.parse_first_line(window, request);
        }
        let this = black_box(&mut *self);
        let mut used = 0;
        if this.state == state::LINE || this.state == state::SCAN {
            used = this.scan_lines(window, classify);
        }
        self.next = self.next.wrapping_add(used);
        black_box(self);
        used
    }

    /// Consumes bytes of a filled window by the slow path, at least one.
    #[inline(always)]
    pub(super) fn read_bytes<const WORDS: usize>(&mut self, window: &[u64; WORDS], request: bool) {
        let used = black_box(&mut *self).read_slowly(window, request);
        self.next = self.next.wrapping_add(used);
        black_box(self);
    }
}
