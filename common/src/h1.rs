//! Pure: HTTP/1.1 message boundaries, the same code in the kernel and in unit tests.
//!
//! A [`Conn`] follows one accepted connection: [`Side`] `rx` walks the requests, `tx` the responses. The driver
//! hands in segments in any order it gets them:
//!
//! 1. [`Side::seek`] says where in the segment reading goes on, if it does. Bodies are skipped here by
//!    arithmetic on sequence numbers; nothing of them is read, and gaps inside them do no harm.
//! 2. The driver copies some bytes from there into a window and calls [`Conn::read_request`] or
//!    [`Conn::read_response`], which consume at least one byte; or reads them in a [`Draft`] without a lock, and has
//!    [`Conn::take_request`] or [`Conn::take_response`] take that in.
//! 3. Both steps repeat until `seek` finds nothing more to read.
//!
//! The answer of each step is a set of [`Happened`] bits. At most one request of a connection is in flight:
//! servers work through a connection one request after another, so a pipelined request begins when the one
//! before it ends. A request begins with the last byte of its head, and ends with the last byte of its response.
//!
//! Everything is integers in a `repr(C)` struct and steps of bounded length, so that the verifier accepts it.
//! Heads are read eight bytes at a time; only unusual lines and lines split between segments go byte by byte.
//!
//! Rules: RFC 9112 §2.2 (stray line ends), §5.2 (folded lines), §6 (length of the body), §7.1 (chunks),
//! §9.3.2 (pipelining); RFC 9110 §15.2 (interim responses), §7.8 (upgrade), §9.3.6 (CONNECT).

mod crawl;
mod draft;
pub mod probe;
mod scan;
mod side;
#[cfg(test)]
mod tests;

pub use draft::Draft;
pub(crate) use scan::first_bytes;
pub use side::{Seek, Side, at};

use core::mem::size_of;

/// Bytes of requests that are read at once: more than most heads have. The verifier walks each word of them; on Linux 6.12 it
/// would not take 1,024.
pub const REQUEST_BYTES: usize = 768;
/// Bytes of responses that are read at once. Each connection has room for so many.
pub const RESPONSE_BYTES: usize = 512;
/// A part of a segment with requests.
pub type RequestDraft = Draft<{ REQUEST_BYTES / 8 + scan::MARGIN }>;
/// A part of a segment with responses.
pub type ResponseDraft = Draft<{ RESPONSE_BYTES / 8 + scan::MARGIN }>;

/// Bytes that may be filled into a window of so many words.
pub const fn most<const WORDS: usize>() -> u32 {
    (WORDS - scan::MARGIN) as u32 * 8
}

/// What a step brought about, as bits.
pub type Happened = u32;
/// A request is in flight from now on.
pub const STARTED: Happened = 1;
/// The request in flight has ended. With [`STARTED`], the next one begins at once.
pub const FINISHED: Happened = 2;
/// A whole response went by that no request had asked for (400 to garbage, 408 to silence). Not counted.
pub const STRAY: Happened = 4;
/// Message boundaries of one direction are lost, for the first time.
pub const DESYNC: Happened = 8;
/// The first bytes are neither HTTP/1 nor HTTP/2: nobody can follow this connection, and nothing more is read.
pub const OPAQUE: Happened = 16;
/// A request began and ended in this one step, unseen until its response. Added to the totals only.
pub const MISSED: Happened = 32;
/// The request in flight has ended without a whole response.
pub const CUT: Happened = 128;
/// From here on HTTP/2 is spoken: [`crate::h2`] goes on where both directions stand, and nothing more is read here.
pub const HTTP2: Happened = 64;

/// Requests whose kind is remembered; later ones of a deeper pipeline pass for ordinary ones.
const KINDS: u32 = 32;

/// What the answer to a request depends on.
pub mod kind {
    /// Any method without a rule of its own.
    pub const PLAIN: u8 = 0;
    /// The response has no body.
    pub const HEAD: u8 = 1;
    /// A 2xx response opens a tunnel.
    pub const CONNECT: u8 = 2;
}

/// One accepted connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conn {
    /// Requests, client to server.
    pub rx: Side,
    /// Responses, server to client.
    pub tx: Side,
    /// Two bits for each request not yet answered: its [`kind`].
    kinds: u64,
    /// Requests whose head has been read, wrapping.
    asked: u32,
    /// Requests whose response has been read, wrapping.
    answered: u32,
    /// 1: the last answer was a 101, and nobody knows yet to which protocol.
    upgrading: u32,
    /// Always zero.
    reserved: u32,
}
const _: () = assert!(size_of::<Conn>() == 104);

/// Outcome of one read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Bytes consumed, at least 1.
    pub used: u32,
    /// What they brought about.
    pub happened: Happened,
}

/// What of HTTP/2 has been read before it was known to be that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// Sequence number of the client's next byte.
    pub rx_next: u32,
    /// Bytes of its preface in front of that.
    pub preface: u32,
    /// Sequence number of the server's next byte.
    pub tx_next: u32,
    /// Bytes of its first frame in front of that, at most 4.
    pub settings: u32,
    /// These bytes, the first one lowest.
    pub first: u64,
}

impl Conn {
    /// A fresh connection whose directions begin at these sequence numbers.
    #[cfg(test)]
    fn new(rx_next: u32, tx_next: u32) -> Self {
        let mut conn = Self::default();
        conn.open(rx_next, tx_next);
        conn
    }

    /// Becomes a fresh connection whose directions begin at these sequence numbers.
    ///
    /// In place: the kernel's stack is small.
    #[inline(always)]
    pub fn open(&mut self, rx_next: u32, tx_next: u32) {
        self.rx.open(rx_next);
        self.tx.open(tx_next);
        self.kinds = 0;
        self.asked = 0;
        self.answered = 0;
        self.upgrading = 0;
    }

    /// Whether a request is in flight.
    #[inline(always)]
    pub fn is_busy(&self) -> bool {
        self.asked != self.answered
    }

    /// Where HTTP/2 goes on when [`HTTP2`] happens.
    #[inline(always)]
    pub fn begun(&self) -> Begun {
        Begun {
            rx_next: self.rx.next,
            preface: self.rx.http2_read(),
            tx_next: self.tx.next,
            settings: self.tx.http2_read(),
            first: self.tx.value,
        }
    }

    /// Whether HTTP/2 is spoken from here on, which is for [`crate::h2`] to read.
    #[inline(always)]
    pub fn is_http2(&self) -> bool {
        self.rx.at == at::HTTP2
    }

    /// Whether the protocol that was changed to by a 101 is still to come.
    #[inline(always)]
    pub fn is_upgrading(&self) -> bool {
        self.upgrading != 0
    }

    /// Whether a 101 has changed the protocol: its one request in flight ends with the connection.
    pub fn is_upgraded(&self) -> bool {
        let is_tunnel = self.rx.at == at::TUNNEL && self.tx.at == at::TUNNEL;
        self.is_busy() && (self.is_upgrading() || (is_tunnel && self.tx.status == 101))
    }

    /// Whether a message is under way: a request that has begun to come, an answer that has not ended, or a tunnel.
    ///
    /// `None` where nobody knows: it never spoke HTTP/1, or message boundaries are lost.
    pub fn in_use(&self) -> Option<bool> {
        let is_foreign =
            self.rx.at == at::TUNNEL && self.tx.at == at::TUNNEL && self.tx.status == 0;
        let is_known = !is_foreign && self.rx.at != at::LOST && self.tx.at != at::LOST;
        let came_in_part = !matches!(self.rx.at, at::START | at::TUNNEL);
        is_known.then_some(came_in_part || self.is_busy())
    }

    /// Reads on in the requests: `window` holds `len` (at least 1) bytes that begin at `rx.next`. Only `slow` it goes byte by
    /// byte where that is needed; else it may consume nothing.
    #[inline(always)]
    pub fn read_request<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        len: u32,
        slow: bool,
    ) -> Read {
        let from = self.rx.next;
        // The other direction may have found that out since these bytes were copied.
        if !self.is_http2() {
            self.rx.read(window, len, true, slow);
        }
        Read { used: self.rx.next.wrapping_sub(from), happened: self.after_request_read() }
    }

    /// Takes in what was read without a lock, if nobody has moved on meanwhile.
    #[inline(always)]
    pub fn take_request<const WORDS: usize>(&mut self, draft: &Draft<WORDS>) -> Happened {
        if draft.take(&mut self.rx) { self.after_request_read() } else { 0 }
    }

    #[inline(always)]
    fn after_request_read(&mut self) -> Happened {
        match self.rx.at {
            at::HTTP2 => 0,
            at::LOST => self.request_lost(),
            _ if self.is_upgrading() && !self.rx.may_be_http2() => self.tunnel(),
            at::HEAD_END => self.request_head(),
            at::DONE => self.after_request_seek(),
            _ => 0,
        }
    }

    /// Reads on in the responses, as [`read_request`](Self::read_request) in the requests.
    #[inline(always)]
    pub fn read_response<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        len: u32,
        slow: bool,
    ) -> Read {
        let from = self.tx.next;
        if !self.is_http2() {
            self.tx.read(window, len, false, slow);
        }
        Read { used: self.tx.next.wrapping_sub(from), happened: self.after_response_read() }
    }

    /// As [`take_request`](Self::take_request).
    #[inline(always)]
    pub fn take_response<const WORDS: usize>(&mut self, draft: &Draft<WORDS>) -> Happened {
        if draft.take(&mut self.tx) { self.after_response_read() } else { 0 }
    }

    #[inline(always)]
    fn after_response_read(&mut self) -> Happened {
        match self.tx.at {
            at::HTTP2 => 0,
            at::LOST => self.response_lost(),
            _ if self.is_upgrading() && !self.tx.may_be_http2() => self.tunnel(),
            at::HEAD_END => self.response_head(),
            at::DONE => self.response_end(),
            _ => 0,
        }
    }

    /// A skipped request body has ended, if it has. To be called after every `rx.seek`.
    #[inline(always)]
    pub fn after_request_seek(&mut self) -> Happened {
        if self.rx.at == at::DONE {
            self.rx.begin_request();
        }
        0
    }

    /// A skipped response body has ended, if it has. To be called after every `tx.seek`.
    #[inline(always)]
    pub fn after_response_seek(&mut self) -> Happened {
        if self.tx.at == at::DONE { self.response_end() } else { 0 }
    }

    /// Request bytes are gone for good: from now on responses alone tell of requests.
    #[inline(always)]
    pub fn lose_requests(&mut self) -> Happened {
        if self.rx.at == at::LOST || self.rx.at == at::TUNNEL {
            return 0;
        }
        if self.rx.lose() { DESYNC } else { 0 }
    }

    /// Response bytes are gone for good: the request in flight ends with the next request or at close.
    #[inline(always)]
    pub fn lose_responses(&mut self) -> Happened {
        if self.tx.at == at::LOST || self.tx.at == at::TUNNEL {
            return 0;
        }
        if self.tx.lose() { DESYNC } else { 0 }
    }

    /// A segment with request bytes came while their boundaries are lost.
    ///
    /// With nothing in flight it can only begin a request, so reading starts anew at `seq`. Does nothing where that was done
    /// already.
    #[inline(always)]
    pub fn resume_requests(&mut self, seq: u32) {
        if self.rx.at == at::LOST && !self.is_busy() && self.tx.at == at::START {
            self.rx.begin_request();
            self.rx.next = seq;
        }
    }

    /// The server sends nothing more (`in_order`), or the connection is gone. Ends what is in flight, once.
    ///
    /// Pipelined requests behind it never began. A response without a length is whole when the server ends it in order; a
    /// tunnel ends however it ends.
    #[inline(always)]
    pub fn close(&mut self, in_order: bool) -> Happened {
        let busy = self.is_busy();
        let is_whole = self.is_upgrading()
            || (self.tx.at == at::TUNNEL && (in_order || self.tx.status == 101));
        self.answered = self.asked;
        self.rx.tunnel();
        self.tx.tunnel();
        match (busy, is_whole) {
            (true, true) => FINISHED,
            (true, false) => CUT,
            (false, _) => 0,
        }
    }

    #[inline(always)]
    fn request_head(&mut self) -> Happened {
        let kind = self.rx.kind;
        if self.rx.request_body() == at::LOST {
            // The server refuses such a head (both lengths wrong, unknown coding) and closes.
            return self.request_lost();
        }
        if self.tx.at == at::LOST && self.is_busy() {
            // The client speaks again, so the answer we could not follow has ended.
            self.answered = self.asked;
            self.ask(kind);
            self.tx.resume();
            return FINISHED | STARTED;
        }
        self.ask(kind)
    }

    #[inline(always)]
    fn ask(&mut self, kind: u8) -> Happened {
        let waiting = self.asked.wrapping_sub(self.answered);
        if waiting < KINDS {
            let shift = (self.asked % KINDS) * 2;
            self.kinds = (self.kinds & !(3 << shift)) | (u64::from(kind & 3) << shift);
        }
        self.asked = self.asked.wrapping_add(1);
        if waiting == 0 { STARTED } else { 0 }
    }

    /// Whether another protocol than HTTP/1 may begin here.
    #[inline(always)]
    fn may_change(&self) -> bool {
        self.asked == 0 || self.is_upgrading()
    }

    #[inline(always)]
    fn http2(&mut self) -> Happened {
        self.rx.http2();
        self.tx.http2();
        HTTP2
    }

    #[inline(always)]
    fn opaque(&mut self) -> Happened {
        self.rx.tunnel();
        self.tx.tunnel();
        OPAQUE
    }

    #[inline(always)]
    fn request_lost(&mut self) -> Happened {
        if self.rx.is_hello() && self.may_change() && self.tx.may_be_http2() {
            return self.http2();
        }
        if self.is_upgrading() {
            return self.tunnel();
        }
        if self.asked == 0 && self.rx.is_foreign() && !self.rx.was_lost() {
            return self.opaque();
        }
        if self.rx.lose() { DESYNC } else { 0 }
    }

    #[inline(always)]
    fn response_lost(&mut self) -> Happened {
        if self.tx.is_hello() && self.may_change() && self.rx.may_be_http2() {
            return self.http2();
        }
        if self.is_upgrading() {
            return self.tunnel();
        }
        if self.asked == 0 && self.rx.at == at::START {
            // The server speaks first, and not as a server of HTTP/1 that gives up (408).
            return self.opaque();
        }
        if self.tx.lose() { DESYNC } else { 0 }
    }

    #[inline(always)]
    fn response_head(&mut self) -> Happened {
        let status = self.tx.status;
        if (100..200).contains(&status) && status != 101 {
            self.tx.begin();
            return 0;
        }
        let shift = (self.answered % KINDS) * 2;
        let kind = if self.is_busy() { (self.kinds >> shift) as u8 & 3 } else { kind::PLAIN };
        match self.tx.response_body(kind) {
            at::DONE => self.response_end(),
            at::TUNNEL if status == 101 && self.rx.at == at::START && self.is_busy() => {
                self.tx.begin();
                self.upgrading = 1;
                0
            }
            at::TUNNEL => self.tunnel(),
            _ => 0,
        }
    }

    /// Whether a response without a request may answer one that was not seen: boundaries are lost, or were, and what has
    /// come since looks like the begin of a request.
    #[inline(always)]
    fn may_have_missed(&self) -> bool {
        self.rx.at == at::LOST || (self.rx.was_lost() && self.rx.at != at::START)
    }

    /// The last response of this connection has begun; it ends at close.
    #[inline(always)]
    fn tunnel(&mut self) -> Happened {
        let missed = self.may_have_missed() && !self.is_upgrading();
        if self.is_upgrading() {
            self.upgrading = 0;
            self.tx.status = 101;
        }
        self.rx.tunnel();
        self.tx.tunnel();
        if self.is_busy() {
            self.asked = self.answered.wrapping_add(1);
            return 0;
        }
        if missed { self.ask(kind::PLAIN) } else { STRAY }
    }

    #[inline(always)]
    fn response_end(&mut self) -> Happened {
        let closes = self.tx.closes();
        let missed = self.may_have_missed();
        let busy = self.is_busy();
        self.tx.begin();
        if closes {
            // What the client has sent behind this request is never served.
            self.rx.tunnel();
            self.tx.tunnel();
            self.answered = self.asked;
        } else if busy {
            self.answered = self.answered.wrapping_add(1);
        }
        match (busy, missed) {
            (true, _) if self.is_busy() => FINISHED | STARTED,
            (true, _) => FINISHED,
            (false, true) => MISSED,
            (false, false) => STRAY,
        }
    }
}
