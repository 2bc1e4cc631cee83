//! Pure: HTTP/2 frames and streams; the same code runs in the kernel and in unit tests.
//!
//! A [`Http2Connection`] continues where [`crate::h1`] has read the preface of HTTP/2 (RFC 9113 §3.4): its
//! [`Http2Direction`] `rx` reads the client's frames, `tx` the server's. The driver passes segments in the order in
//! which it gets them:
//!
//! 1. [`Http2Direction::seek`] returns the offset in the segment at which reading continues, if it does. Payloads are
//!    skipped by arithmetic on sequence numbers; gaps inside them do no harm. A frame takes effect with its last byte,
//!    and [`Http2Direction::take_ended_frame`] returns that frame.
//! 2. The driver copies up to [`PEEK_BYTES`] bytes from there and calls [`Http2Direction::read`], which consumes at
//!    least one.
//! 3. Both steps repeat until `seek` finds nothing more to read. Frames that have ended are passed to
//!    [`Http2Connection::apply_frame`].
//!
//! A request is a stream that the client opened. It begins with the last byte of its header block. It ends with the
//! last byte that the server sends on it, or with RST_STREAM from either side. It also ends when the server's GOAWAY
//! excludes it ([`Http2Connection::abort_goaway_streams`]), and with the connection. None of that needs the headers
//! themselves; statuses are read from the first bytes of header blocks (`hpack_status`).
//!
//! Rules: RFC 9113 §4.1 (frames), §5.1 (streams), §6 (frame types), §8.1 (messages), §8.4 (push); RFC 8441 (a CONNECT
//! is an ordinary stream).

mod frames;
mod hpack_status;
mod stream_table;
#[cfg(test)]
mod tests;

use core::{hint::black_box, mem::size_of};

use crate::h1::Http2Handoff;

pub use frames::{EndedFrame, Http2Direction, frame_class, frame_flag, frame_kind};
pub use hpack_status::grpc;

/// Most bytes of a frame that are read: its header and the begin of its payload.
pub const PEEK_BYTES: usize = frames::STORED_WORDS * 8;
/// Number of words in [`PEEK_BYTES`].
pub const PEEK_WORDS: usize = frames::STORED_WORDS;

/// Bits of a time in ns that are dropped in a stream's stored begin: one tick is 16 µs, and ticks wrap after 19 hours.
const TICK_BITS: u32 = 14;

/// State of one HTTP/2 connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Http2Connection {
    /// Direction of the client's frames.
    pub rx: Http2Direction,
    /// Direction of the server's frames.
    pub tx: Http2Direction,
    /// Highest stream that the client has opened.
    highest_stream: u32,
    /// Requests in flight on the connection.
    pub requests_in_flight: u32,
    /// Requests among these that did not fit in the table.
    untracked: u32,
    /// Literal statuses and gRPC outcomes of the server so far, as bits: see [`hpack_status`].
    hpack_seen: u32,
    /// First stream that a GOAWAY excludes; 0: none has to be ended.
    goaway_first_excluded: u32,
    /// Latest ended stream among those that did not fit in the table.
    last_untracked_ended: u32,
    /// First stream that the server does not process since its GOAWAY; 0: it processes all.
    first_unprocessed: u32,
    /// Highest stream when the client's boundaries were lost for the first time: higher ones may have been opened
    /// unseen.
    desync_highest_stream: u32,
    /// Effect of the last frame. It is in memory, where the verifier merges the paths that lead here.
    pub change: StreamChange,
    streams: stream_table::StreamTable,
}
const _: () = assert!(size_of::<Http2Connection>() <= 3_072);

/// Effect of a frame that has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamChange {
    /// Duration of the answered request, ns.
    pub duration_ns: u64,
    /// Requests that began: 0 or 1.
    pub started: u32,
    /// Requests that were answered: 0 or 1.
    pub answered: u32,
    /// Requests that ended without a whole response.
    pub aborted: u32,
    /// Class of the response's status, 1 to 5; 0: not seen.
    pub status_class: u16,
    /// Outcome of a gRPC call, as one of [`grpc`].
    pub grpc_outcome: u16,
}

impl Http2Connection {
    /// Initialises a connection whose state is all zero. It works in place, because the kernel's stack is small.
    ///
    /// With `upgraded` the request that asked for HTTP/2 is stream 1, in flight since then (RFC 7540 §3.2).
    #[inline(always)]
    pub fn open(&mut self, begun: &Http2Handoff, upgraded: Option<u64>) {
        self.rx.open_after_preface(begun.rx_next, begun.preface_read);
        self.tx.open(begun.tx_next, begun.server_frame_read, begun.server_frame_bytes);
        self.highest_stream = u32::from(upgraded.is_some());
        self.requests_in_flight = 0;
        self.untracked = 0;
        self.last_untracked_ended = 0;
        self.first_unprocessed = 0;
        self.hpack_seen = 0;
        self.desync_highest_stream = u32::MAX;
        if let Some(began_ns) = upgraded {
            self.begin_request(1, began_ns);
        }
    }

    /// Returns true if bytes came that are no preface or no frame: the connection is opaque.
    #[inline(always)]
    pub fn is_not_http2(&self) -> bool {
        self.rx.is_not_http2() || self.tx.is_not_http2()
    }

    /// Handles a frame of the client (`request`) or of the server that ended at this time. The effect is stored in
    /// [`change`](Self::change).
    #[inline(always)]
    pub fn apply_frame(&mut self, ended: EndedFrame, request: bool, now_ns: u64) {
        // A barrier: the verifier forgets the values here, and merges the paths of the frame reader.
        let this = black_box(&mut *self);
        this.change = StreamChange::default();
        match ended.class {
            frame_class::NOTHING => {}
            frame_class::HEADERS if request => this.handle_request_headers(ended.stream, now_ns),
            frame_class::RESET => this.abort_stream(ended.stream),
            frame_class::GOAWAY if !request => {
                // GOAWAY names the last stream that the server processes (RFC 9113 §6.8).
                this.goaway_first_excluded = ended.stream.wrapping_add(1);
                this.first_unprocessed = this.goaway_first_excluded;
            }
            frame_class::HEADERS | frame_class::DATA if !request => {
                this.handle_response_frame(ended, now_ns)
            }
            _ => {}
        }
        black_box(self);
    }

    /// Returns true if a GOAWAY has come after which [`abort_goaway_streams`](Self::abort_goaway_streams) is to be
    /// called.
    #[inline(always)]
    pub fn has_pending_goaway(&self) -> bool {
        self.goaway_first_excluded != 0
    }

    /// Ends the requests that the server's GOAWAY excludes, if one has come. Returns their number. To be called after a
    /// segment is read: the client may send them again elsewhere (RFC 9113 §6.8).
    #[inline(always)]
    pub fn abort_goaway_streams(&mut self) -> u32 {
        if self.goaway_first_excluded == 0 {
            return 0;
        }
        // Apart from `apply_frame`, which must stay small for the verifier: this loops over the whole table.
        let aborted = self.streams.remove_above(self.goaway_first_excluded.wrapping_sub(1));
        self.goaway_first_excluded = 0;
        self.requests_in_flight = self.requests_in_flight.wrapping_sub(aborted);
        aborted
    }

    /// Ends all requests in flight, because the connection is gone or boundaries are lost. Returns their number. To be
    /// called last.
    #[inline(always)]
    pub fn close(&mut self) -> u32 {
        let open = self.requests_in_flight;
        self.requests_in_flight = 0;
        self.untracked = 0;
        // Another CPU may still process an earlier packet.
        self.rx.close();
        self.tx.close();
        open
    }

    /// Gives up the client's boundaries after missing bytes: until they are found again, only the server's responses
    /// reveal requests. Returns true if they were not lost already.
    ///
    /// A request that the client resets meanwhile counts as in flight until the server ends it, or the connection is
    /// gone.
    #[inline(always)]
    pub fn desync_requests(&mut self) -> bool {
        if self.rx.is_desynced() || self.rx.is_not_http2() {
            return false;
        }
        self.rx.desync();
        self.desync_highest_stream = self.desync_highest_stream.min(self.highest_stream);
        true
    }

    /// Handles the client's next segment, `len` bytes at `seq`, while its boundaries are lost. Reading continues if the
    /// segment certainly begins with a frame. `window` holds its first `have` bytes.
    #[inline(always)]
    pub fn resync_requests(&mut self, window: &[u64; PEEK_WORDS], have: u32, seq: u32, len: u32) {
        if self.rx.is_desynced()
            && frames::begins_with_frame(window, have, len, self.highest_stream)
        {
            self.rx.resync_at(seq);
        }
    }

    /// Returns the age of the youngest request in flight, in ns before `now_ns`; `None` without any, or if not all are
    /// known.
    pub fn youngest_request_age_ns(&self, now_ns: u64) -> Option<u64> {
        if self.untracked > 0 || self.requests_in_flight == 0 {
            return None;
        }
        self.streams.youngest_age(to_ticks(now_ns)).map(|age| u64::from(age) << TICK_BITS)
    }

    /// Handles HEADERS of a client: a request if its stream is new, trailers otherwise.
    #[inline(always)]
    fn handle_request_headers(&mut self, stream: u32, now_ns: u64) {
        // Even streams are the server's; lower ones were opened, or skipped and thereby closed (RFC 9113 §5.1.1). The
        // server ignores streams that were under way when it sent GOAWAY (§6.8).
        if stream & 1 == 0 || stream <= self.highest_stream {
            return;
        }
        self.highest_stream = stream;
        // Without a GOAWAY, `first_unprocessed` is 0, and 0 − 1 is above every stream.
        if stream.wrapping_sub(1) < self.first_unprocessed.wrapping_sub(1) {
            self.begin_request(stream, now_ns);
            self.change.started = 1;
        }
    }

    #[inline(always)]
    fn begin_request(&mut self, stream: u32, now_ns: u64) {
        self.requests_in_flight = self.requests_in_flight.wrapping_add(1);
        // The request counts although the table is full; only its duration and status are not known.
        if !self.streams.insert(stream, to_ticks(now_ns)) {
            self.untracked = self.untracked.wrapping_add(1);
        }
    }

    /// Returns true if an unknown stream that the server answers was opened while boundaries were lost.
    #[inline(always)]
    fn is_missed_request(&self, ended: EndedFrame) -> bool {
        let may_be = ended.stream & 1 != 0 && ended.stream > self.desync_highest_stream;
        may_be && ended.class == frame_class::HEADERS && self.untracked == 0
    }

    /// Handles HEADERS or DATA of a server.
    #[inline(always)]
    fn handle_response_frame(&mut self, ended: EndedFrame, now_ns: u64) {
        let mut index = self.streams.find(ended.stream);
        // A response proves a request that was in lost bytes: its begin is taken to be now.
        if index.is_none() && self.is_missed_request(ended) {
            self.begin_request(ended.stream, now_ns);
            self.change.started = 1;
            self.highest_stream = self.highest_stream.max(ended.stream);
            index = self.streams.find(ended.stream);
        }
        // The table still finds a stream that was reset: the server may have sent these frames before it knew.
        let Some(index) = index.filter(|index| self.streams.is_open(*index)) else {
            if ended.class == frame_class::HEADERS {
                // The block may define entries of HPACK's table that later blocks of counted streams refer to.
                hpack_status::record_uncounted_block(
                    &self.tx.header_block(),
                    ended.ends_stream,
                    &mut self.hpack_seen,
                );
            }
            if ended.ends_stream && index.is_none() && self.end_untracked(ended.stream) {
                self.change.answered = 1;
            }
            return;
        };
        if ended.class == frame_class::HEADERS {
            let note = self.streams.note(index);
            let note = hpack_status::update_note(
                note,
                &self.tx.header_block(),
                ended.ends_stream,
                &mut self.hpack_seen,
            );
            self.streams.set_note(index, note);
        }
        if !ended.ends_stream {
            return;
        }
        // Behind the barrier the verifier no longer distinguishes the places of the table.
        let this = black_box(self);
        let note = this.streams.note(index);
        let began = this.streams.remove(index);
        this.requests_in_flight = this.requests_in_flight.wrapping_sub(1);
        this.change = StreamChange {
            duration_ns: u64::from(to_ticks(now_ns).wrapping_sub(began)) << TICK_BITS,
            started: this.change.started,
            answered: 1,
            status_class: u16::from(note & hpack_status::CLASS_MASK),
            grpc_outcome: u16::from(note & hpack_status::GRPC_MASK),
            ..StreamChange::default()
        };
    }

    #[inline(always)]
    fn abort_stream(&mut self, stream: u32) {
        if let Some(index) = self.streams.find(stream) {
            if self.streams.is_open(index) {
                self.streams.remove(index);
                self.requests_in_flight = self.requests_in_flight.wrapping_sub(1);
                self.change.aborted = 1;
            }
        } else if self.end_untracked(stream) {
            self.change.aborted = 1;
        }
    }

    /// Returns true if a stream that ends and is not in the table did not fit there. Ends one of those.
    ///
    /// Servers often send RST_STREAM after the end of a response (RFC 9113 §8.1): the same stream does not end twice.
    #[inline(always)]
    fn end_untracked(&mut self, stream: u32) -> bool {
        let is_again = stream == self.last_untracked_ended;
        if self.untracked == 0 || stream & 1 == 0 || stream > self.highest_stream || is_again {
            return false;
        }
        self.last_untracked_ended = stream;
        self.untracked = self.untracked.wrapping_sub(1);
        self.requests_in_flight = self.requests_in_flight.wrapping_sub(1);
        true
    }
}

#[inline(always)]
fn to_ticks(ns: u64) -> u32 {
    (ns >> TICK_BITS) as u32
}
