//! Pure: HTTP/1.1 message boundaries; the same code runs in the kernel and in unit tests.
//!
//! A [`Http1Connection`] follows one accepted connection: its [`Http1Direction`] `rx` reads the requests, `tx` the
//! responses. The driver passes segments in the order in which it gets them:
//!
//! 1. [`Http1Direction::seek`] returns the offset in the segment at which reading continues, if it does. Bodies are
//!    skipped by arithmetic on sequence numbers; they are never read, and gaps inside them do no harm.
//! 2. The driver copies some bytes from there into a window and calls [`Http1Connection::read_request`] or
//!    [`Http1Connection::read_response`], which consume at least one byte. Or it reads them in an [`UnlockedRead`]
//!    without a lock, and commits that with [`Http1Connection::commit_request_read`] or
//!    [`Http1Connection::commit_response_read`].
//! 3. Both steps repeat until `seek` finds nothing more to read.
//!
//! The result of each step is a set of [`Http1Events`] bits. At most one request of a connection is in flight. Servers
//! process the requests of a connection one after another, so a pipelined request begins when the previous one ends. A
//! request begins with the last byte of its head, and ends with the last byte of its response.
//!
//! All state is integers in a `repr(C)` struct, and all steps are of bounded length, so that the verifier accepts them.
//! Heads are read eight bytes at a time; only unusual lines and lines split between segments are read byte by byte.
//!
//! Rules: RFC 9112 §2.2 (stray line ends), §5.2 (folded lines), §6 (length of the body), §7.1 (chunks), §9.3.2
//! (pipelining); RFC 9110 §15.2 (interim responses), §7.8 (upgrade), §9.3.6 (CONNECT).

mod direction;
pub mod kubelet_probe;
mod pattern;
mod scan;
mod slow_path;
#[cfg(test)]
mod tests;
mod unlocked_read;

pub use direction::{Http1Direction, SeekResult, state};
pub(crate) use scan::first_bytes_mask;
pub use unlocked_read::UnlockedRead;

use core::mem::size_of;

/// Bytes of requests read at once: more than most heads have. The verifier checks each word of them.
pub const REQUEST_BYTES: usize = 768;
/// Bytes of responses read at once. Each connection has space for this many.
pub const RESPONSE_BYTES: usize = 512;
/// Unlocked read of a part of a segment with requests.
pub type UnlockedRequestRead = UnlockedRead<{ REQUEST_BYTES / 8 + scan::MARGIN_WORDS }>;
/// Unlocked read of a part of a segment with responses.
pub type UnlockedResponseRead = UnlockedRead<{ RESPONSE_BYTES / 8 + scan::MARGIN_WORDS }>;

/// Returns the number of bytes that may be filled into a window of `WORDS` words.
pub const fn window_capacity<const WORDS: usize>() -> u32 {
    (WORDS - scan::MARGIN_WORDS) as u32 * 8
}

/// Events of one step, as bits.
pub type Http1Events = u32;
/// Event: a request is in flight from now on.
pub const STARTED: Http1Events = 1;
/// Event: the request in flight has ended. Together with [`STARTED`], the next one begins at once.
pub const FINISHED: Http1Events = 2;
/// Event: a whole response came without a request (400 to garbage, 408 to silence). It is not counted.
pub const STRAY: Http1Events = 4;
/// Event: message boundaries of one direction are lost for the first time (desync).
pub const DESYNC: Http1Events = 8;
/// Event: the first bytes are neither HTTP/1 nor HTTP/2. The connection is opaque, and nothing more is read.
pub const OPAQUE: Http1Events = 16;
/// Event: a request, unseen until its response, began and ended in this one step. It is added to the totals only.
pub const MISSED: Http1Events = 32;
/// Event: the request in flight has ended without a whole response.
pub const ABORTED: Http1Events = 128;
/// Event: the connection speaks HTTP/2 from here on. [`crate::h2`] continues in both directions, and nothing more is
/// read here.
pub const HTTP2: Http1Events = 64;

/// Most unanswered requests whose kind is stored. Later ones of a deeper pipeline get the kind of an earlier request.
const STORED_KINDS_MAX: u32 = 32;

/// Kinds of requests, which decide the length of the response.
pub mod request_kind {
    /// Any method without a rule of its own.
    pub const PLAIN: u8 = 0;
    /// HEAD: the response has no body.
    pub const HEAD: u8 = 1;
    /// CONNECT: a 2xx response switches to an opaque tunnel.
    pub const CONNECT: u8 = 2;
}

/// State of one accepted connection that speaks HTTP/1.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http1Connection {
    /// Direction of requests, client to server.
    pub rx: Http1Direction,
    /// Direction of responses, server to client.
    pub tx: Http1Direction,
    /// Kinds of the unanswered requests, two bits each: see [`request_kind`].
    request_kinds: u64,
    /// Number of requests whose head has been read, wrapping.
    requests_read: u32,
    /// Number of requests whose response has been read, wrapping.
    responses_read: u32,
    /// 1 if the last response was a 101 and the new protocol has not been recognised yet.
    upgrading: u32,
    /// Padding that is always zero.
    reserved: u32,
}
const _: () = assert!(size_of::<Http1Connection>() == 104);

/// Result of one read of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowRead {
    /// Bytes consumed, at least 1.
    pub consumed: u32,
    /// Events that these bytes caused.
    pub events: Http1Events,
}

/// Progress in the first bytes of HTTP/2, which were read before the protocol was recognised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http2Handoff {
    /// Sequence number of the client's next byte.
    pub rx_next: u32,
    /// Bytes of the client's preface before `rx_next`.
    pub preface_read: u32,
    /// Sequence number of the server's next byte.
    pub tx_next: u32,
    /// Bytes of the server's first frame before `tx_next`, at most 4.
    pub server_frame_read: u32,
    /// The `server_frame_read` bytes themselves, the first one lowest.
    pub server_frame_bytes: u64,
}

impl Http1Connection {
    /// Returns a new connection whose directions begin at these sequence numbers.
    #[cfg(test)]
    fn new(rx_next: u32, tx_next: u32) -> Self {
        let mut conn = Self::default();
        conn.open(rx_next, tx_next);
        conn
    }

    /// Resets the state to a new connection whose directions begin at these sequence numbers.
    ///
    /// It works in place, because the kernel's stack is small.
    #[inline(always)]
    pub fn open(&mut self, rx_next: u32, tx_next: u32) {
        self.rx.open(rx_next);
        self.tx.open(tx_next);
        self.request_kinds = 0;
        self.requests_read = 0;
        self.responses_read = 0;
        self.upgrading = 0;
    }

    /// Stops reading a new connection, of which only the bytes are counted: each segment moves `next` behind its end.
    #[inline(always)]
    pub fn stop_reading(&mut self) {
        self.rx.begin_tunnel();
        self.tx.begin_tunnel();
    }

    /// Returns true if a request is in flight.
    #[inline(always)]
    pub fn is_busy(&self) -> bool {
        self.requests_read != self.responses_read
    }

    /// Returns the positions at which HTTP/2 continues after the event [`HTTP2`].
    #[inline(always)]
    pub fn http2_handoff(&self) -> Http2Handoff {
        Http2Handoff {
            rx_next: self.rx.next,
            preface_read: self.rx.http2_bytes_read(),
            tx_next: self.tx.next,
            server_frame_read: self.tx.http2_bytes_read(),
            server_frame_bytes: self.tx.value,
        }
    }

    /// Returns true if the connection speaks HTTP/2 from here on, which [`crate::h2`] reads.
    #[inline(always)]
    pub fn is_http2(&self) -> bool {
        self.rx.state == state::HTTP2
    }

    /// Returns true after a 101, until the first bytes of the new protocol have come.
    #[inline(always)]
    pub fn is_upgrading(&self) -> bool {
        self.upgrading != 0
    }

    /// Returns true if a 101 has changed the protocol: the one request in flight ends with the connection.
    pub fn is_upgraded(&self) -> bool {
        let is_tunnel = self.rx.state == state::TUNNEL && self.tx.state == state::TUNNEL;
        self.is_busy() && (self.is_upgrading() || (is_tunnel && self.tx.status == 101))
    }

    /// Returns true if a message is incomplete: a request that has begun to come, a response that has not ended, or an
    /// upgraded connection.
    ///
    /// `None` if that is unknown: the connection never spoke HTTP/1, or message boundaries are lost.
    pub fn is_in_use(&self) -> Option<bool> {
        // An opaque connection is in state `TUNNEL` too, but has had no status.
        let is_foreign =
            self.rx.state == state::TUNNEL && self.tx.state == state::TUNNEL && self.tx.status == 0;
        let is_known =
            !is_foreign && self.rx.state != state::DESYNC && self.tx.state != state::DESYNC;
        let came_in_part = !matches!(self.rx.state, state::START | state::TUNNEL);
        is_known.then_some(came_in_part || self.is_busy())
    }

    /// Returns true if only a next request can follow: no message is under way, and neither side has announced the end
    /// of the connection.
    ///
    /// An announced end comes by itself, and a client may read until it. Another end before it would be an error to
    /// such a client.
    #[inline(always)]
    pub fn awaits_request(&self) -> bool {
        let is_between_messages = self.rx.state == state::START && self.tx.state == state::START;
        is_between_messages && !self.is_busy()
    }

    /// Continues in the requests: `window` holds `len` (at least 1) bytes that begin at `rx.next`; its last word is
    /// overwritten. With `slow` it reads byte by byte where necessary; without, it may consume nothing.
    #[inline(always)]
    pub fn read_request<const WORDS: usize>(
        &mut self,
        window: &mut [u64; WORDS],
        len: u32,
        slow: bool,
    ) -> WindowRead {
        let from = self.rx.next;
        // The other direction may have recognised HTTP/2 since these bytes were copied.
        if !self.is_http2() {
            self.rx.read(window, len, true, slow);
        }
        WindowRead { consumed: self.rx.next.wrapping_sub(from), events: self.after_request_read() }
    }

    /// Commits an unlocked read of requests, if the direction has not moved on meanwhile.
    #[inline(always)]
    pub fn commit_request_read<const WORDS: usize>(
        &mut self,
        draft: &UnlockedRead<WORDS>,
    ) -> Http1Events {
        if draft.commit(&mut self.rx) { self.after_request_read() } else { 0 }
    }

    #[inline(always)]
    fn after_request_read(&mut self) -> Http1Events {
        match self.rx.state {
            state::HTTP2 => 0,
            state::DESYNC => self.handle_request_desync(),
            // The first bytes after a 101 that cannot be HTTP/2 belong to another new protocol.
            _ if self.is_upgrading() && !self.rx.may_be_http2() => self.begin_tunnel(),
            state::HEAD_END => self.handle_request_head(),
            state::DONE => self.after_request_seek(),
            _ => 0,
        }
    }

    /// Continues in the responses, with the parameters of [`read_request`](Self::read_request).
    #[inline(always)]
    pub fn read_response<const WORDS: usize>(
        &mut self,
        window: &mut [u64; WORDS],
        len: u32,
        slow: bool,
    ) -> WindowRead {
        let from = self.tx.next;
        if !self.is_http2() {
            self.tx.read(window, len, false, slow);
        }
        WindowRead { consumed: self.tx.next.wrapping_sub(from), events: self.after_response_read() }
    }

    /// Commits an unlocked read of responses, if the direction has not moved on meanwhile.
    #[inline(always)]
    pub fn commit_response_read<const WORDS: usize>(
        &mut self,
        draft: &UnlockedRead<WORDS>,
    ) -> Http1Events {
        if draft.commit(&mut self.tx) { self.after_response_read() } else { 0 }
    }

    #[inline(always)]
    fn after_response_read(&mut self) -> Http1Events {
        match self.tx.state {
            state::HTTP2 => 0,
            state::DESYNC => self.handle_response_desync(),
            _ if self.is_upgrading() && !self.tx.may_be_http2() => self.begin_tunnel(),
            state::HEAD_END => self.handle_response_head(),
            state::DONE => self.handle_response_end(),
            _ => 0,
        }
    }

    /// Handles the end of a skipped request body. To be called after every `rx.seek`.
    #[inline(always)]
    pub fn after_request_seek(&mut self) -> Http1Events {
        if self.rx.state == state::DONE {
            self.rx.begin_request();
        }
        0
    }

    /// Handles the end of a skipped response body. To be called after every `tx.seek`.
    #[inline(always)]
    pub fn after_response_seek(&mut self) -> Http1Events {
        if self.tx.state == state::DONE { self.handle_response_end() } else { 0 }
    }

    /// Gives up the requests' boundaries after missing bytes: from now on only responses reveal requests.
    #[inline(always)]
    pub fn desync_requests(&mut self) -> Http1Events {
        if self.rx.state == state::DESYNC || self.rx.state == state::TUNNEL {
            return 0;
        }
        if self.rx.desync() { DESYNC } else { 0 }
    }

    /// Gives up the responses' boundaries after missing bytes: the request in flight ends with the next request or at
    /// close.
    #[inline(always)]
    pub fn desync_responses(&mut self) -> Http1Events {
        if self.tx.state == state::DESYNC || self.tx.state == state::TUNNEL {
            return 0;
        }
        if self.tx.desync() { DESYNC } else { 0 }
    }

    /// Handles a segment with request bytes while their boundaries are lost.
    ///
    /// With nothing in flight the segment can only begin a request, so reading starts again at `seq`. A repeated call
    /// changes nothing.
    #[inline(always)]
    pub fn resync_requests(&mut self, seq: u32) {
        if self.rx.state == state::DESYNC && !self.is_busy() && self.tx.state == state::START {
            self.rx.begin_request();
            self.rx.next = seq;
        }
    }

    /// Handles the end of the server's data (`graceful`) or of the connection. Ends the request in flight, once.
    ///
    /// Pipelined requests behind it never began. A response without a length is complete if the server ends it
    /// gracefully; an upgraded connection ends in any case.
    #[inline(always)]
    pub fn close(&mut self, graceful: bool) -> Http1Events {
        let busy = self.is_busy();
        let is_whole = self.is_upgrading()
            || (self.tx.state == state::TUNNEL && (graceful || self.tx.status == 101));
        self.responses_read = self.requests_read;
        self.rx.begin_tunnel();
        self.tx.begin_tunnel();
        match (busy, is_whole) {
            (true, true) => FINISHED,
            (true, false) => ABORTED,
            (false, _) => 0,
        }
    }

    #[inline(always)]
    fn handle_request_head(&mut self) -> Http1Events {
        let kind = self.rx.kind;
        if self.rx.begin_request_body() == state::DESYNC {
            // The server refuses such a head (contradictory lengths, unknown coding) and closes.
            return self.handle_request_desync();
        }
        if self.tx.state == state::DESYNC && self.is_busy() {
            // The client sends the next request, so the response whose boundaries were lost has ended.
            self.responses_read = self.requests_read;
            self.push_request(kind);
            self.tx.resync_at_next_segment();
            return FINISHED | STARTED;
        }
        self.push_request(kind)
    }

    #[inline(always)]
    fn push_request(&mut self, kind: u8) -> Http1Events {
        let waiting = self.requests_read.wrapping_sub(self.responses_read);
        // Requests beyond `STORED_KINDS_MAX` store no kind: the bits still belong to unanswered ones.
        if waiting < STORED_KINDS_MAX {
            let shift = (self.requests_read % STORED_KINDS_MAX) * 2;
            self.request_kinds =
                (self.request_kinds & !(3 << shift)) | (u64::from(kind & 3) << shift);
        }
        self.requests_read = self.requests_read.wrapping_add(1);
        if waiting == 0 { STARTED } else { 0 }
    }

    /// Returns true where another protocol than HTTP/1 may begin.
    #[inline(always)]
    fn may_switch_protocol(&self) -> bool {
        self.requests_read == 0 || self.is_upgrading()
    }

    #[inline(always)]
    fn switch_to_http2(&mut self) -> Http1Events {
        self.rx.switch_to_http2();
        self.tx.switch_to_http2();
        HTTP2
    }

    #[inline(always)]
    fn switch_to_opaque(&mut self) -> Http1Events {
        self.rx.begin_tunnel();
        self.tx.begin_tunnel();
        OPAQUE
    }

    #[inline(always)]
    fn handle_request_desync(&mut self) -> Http1Events {
        // Each direction alone may look like HTTP/2 by accident, so the other one must not contradict it.
        if self.rx.is_http2_preface() && self.may_switch_protocol() && self.tx.may_be_http2() {
            return self.switch_to_http2();
        }
        if self.is_upgrading() {
            return self.begin_tunnel();
        }
        // Only the first bytes of a connection prove a foreign protocol: later ones may follow lost bytes.
        if self.requests_read == 0 && self.rx.is_not_http1() && !self.rx.was_desynced() {
            return self.switch_to_opaque();
        }
        if self.rx.desync() { DESYNC } else { 0 }
    }

    #[inline(always)]
    fn handle_response_desync(&mut self) -> Http1Events {
        if self.tx.is_http2_preface() && self.may_switch_protocol() && self.rx.may_be_http2() {
            return self.switch_to_http2();
        }
        if self.is_upgrading() {
            return self.begin_tunnel();
        }
        if self.requests_read == 0 && self.rx.state == state::START {
            // The server sends first, and not like an HTTP/1 server that times out (408).
            return self.switch_to_opaque();
        }
        if self.tx.desync() { DESYNC } else { 0 }
    }

    /// Handles the end of a response's head. An interim response ends no request.
    #[inline(always)]
    fn handle_response_head(&mut self) -> Http1Events {
        let status = self.tx.status;
        // An interim response (RFC 9110 §15.2): the final one follows.
        if (100..200).contains(&status) && status != 101 {
            self.tx.begin_message();
            return 0;
        }
        let shift = (self.responses_read % STORED_KINDS_MAX) * 2;
        let kind = if self.is_busy() {
            (self.request_kinds >> shift) as u8 & 3
        } else {
            request_kind::PLAIN
        };
        match self.tx.begin_response_body(kind) {
            state::DONE => self.handle_response_end(),
            // The new protocol may be h2c, so both directions wait for its first bytes before they stop reading.
            state::TUNNEL if status == 101 && self.rx.state == state::START && self.is_busy() => {
                self.tx.begin_message();
                self.upgrading = 1;
                0
            }
            state::TUNNEL => self.begin_tunnel(),
            _ => 0,
        }
    }

    /// Returns true if a response without a request may answer an unseen one. Boundaries are lost, or were, and the
    /// bytes since look like the begin of a request.
    #[inline(always)]
    fn may_have_missed_request(&self) -> bool {
        self.rx.state == state::DESYNC || (self.rx.was_desynced() && self.rx.state != state::START)
    }

    /// Handles the begin of the connection's last response, which ends at close.
    #[inline(always)]
    fn begin_tunnel(&mut self) -> Http1Events {
        let missed = self.may_have_missed_request() && !self.is_upgrading();
        if self.is_upgrading() {
            self.upgrading = 0;
            self.tx.status = 101;
        }
        self.rx.begin_tunnel();
        self.tx.begin_tunnel();
        if self.is_busy() {
            // Pipelined requests behind it are never answered, so they do not count as asked.
            self.requests_read = self.responses_read.wrapping_add(1);
            return 0;
        }
        // Without a request in flight its head was either in lost bytes, or the server sends unasked.
        if missed { self.push_request(request_kind::PLAIN) } else { STRAY }
    }

    #[inline(always)]
    fn handle_response_end(&mut self) -> Http1Events {
        let closes = self.tx.has_connection_close();
        let missed = self.may_have_missed_request();
        let busy = self.is_busy();
        self.tx.begin_message();
        if closes {
            // The server never serves bytes that the client has sent behind this request.
            self.rx.begin_tunnel();
            self.tx.begin_tunnel();
            self.responses_read = self.requests_read;
        } else if busy {
            self.responses_read = self.responses_read.wrapping_add(1);
        }
        match (busy, missed) {
            // A pipelined request begins when the response before it ends.
            (true, _) if self.is_busy() => FINISHED | STARTED,
            (true, _) => FINISHED,
            (false, true) => MISSED,
            (false, false) => STRAY,
        }
    }
}
