//! Pure: HTTP/2 frames and streams; the same code runs in the kernel and in unit tests.
//!
//! A [`Http2Connection`] continues where [`crate::h1`] has read the preface of HTTP/2 (RFC 9113 §3.4): its
//! [`Http2Direction`] `rx` reads the client's frames, `tx` the server's. The driver passes segments in the order in
//! which it gets them:
//!
//! 1. [`Http2Direction::seek`] returns the offset in the segment at which reading continues, if it does. Payloads are
//!    skipped by arithmetic on sequence numbers; gaps inside them do no harm. A frame takes effect with its last byte,
//!    and
//!    [`Http2Direction::ended`] returns that frame.
//! 2. The driver copies up to [`PEEK`] bytes from there and calls [`Http2Direction::read`], which consumes at least
//!    one.
//! 3. Both steps repeat until `seek` finds nothing more to read. Frames that have ended are passed to
//!    [`Http2Connection::take`].
//!
//! A request is a stream that the client opened. It begins with the last byte of its header block. It ends with the
//! last byte that the server sends on it, or with RST_STREAM from either side. It also ends when the server's GOAWAY
//! excludes it ([`Http2Connection::leave_out`]), and with the connection. None of that needs the headers themselves;
//! statuses are read from the first bytes of header blocks (`glimpse`).
//!
//! Rules: RFC 9113 §4.1 (frames), §5.1 (streams), §6 (frame types), §8.1 (messages), §8.4 (push); RFC 8441 (a CONNECT
//! is an ordinary stream).

mod frames;
mod glimpse;
mod streams;
#[cfg(test)]
mod tests;

use core::{hint::black_box, mem::size_of};

use crate::h1::Http2Handoff;

pub use frames::{EndedFrame, Http2Direction, ended, flag, kind};
pub use glimpse::grpc;

/// Most bytes of a frame that are read: its header and the begin of its payload.
pub const PEEK: usize = frames::WORDS * 8;
/// Number of words in [`PEEK`].
pub const PEEK_WORDS: usize = frames::WORDS;

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
    newest: u32,
    /// Requests in flight on the connection.
    pub open: u32,
    /// Requests among `open` for which the table had no room.
    spilled: u32,
    /// Literal statuses and gRPC outcomes of the server so far, as bits: see [`glimpse`].
    seen: u32,
    /// First stream that a GOAWAY excludes; 0: none has to be ended.
    leaves_out: u32,
    /// Latest ended stream among those without room in the table.
    spilled_last: u32,
    /// First stream that the server does not process since its GOAWAY; 0: it processes all.
    refused: u32,
    /// Highest stream when the client's boundaries were lost for the first time: higher ones may have been opened
    /// unseen.
    lost_from: u32,
    /// Effect of the last frame. It is in memory, where the verifier merges the paths that lead here.
    pub change: StreamChange,
    streams: streams::StreamTable,
}
const _: () = assert!(size_of::<Http2Connection>() <= 3_072);

/// Effect of a frame that has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamChange {
    /// Duration of the answered request, ns.
    pub took_ns: u64,
    /// Requests that began: 0 or 1.
    pub started: u32,
    /// Requests that were answered: 0 or 1.
    pub answered: u32,
    /// Requests that ended without a whole response.
    pub cut: u32,
    /// Class of the response's status, 1 to 5; 0: not seen.
    pub class: u16,
    /// Outcome of a gRPC call, as one of [`grpc`].
    pub grpc: u16,
}

impl Http2Connection {
    /// Initialises a connection whose state is all zero. It works in place, because the kernel's stack is small.
    ///
    /// With `upgraded` the request that asked for HTTP/2 is stream 1, in flight since then (RFC 7540 §3.2).
    #[inline(always)]
    pub fn open(&mut self, begun: &Http2Handoff, upgraded: Option<u64>) {
        self.rx.open_behind_preface(begun.rx_next, begun.preface);
        self.tx.open(begun.tx_next, begun.settings, begun.first);
        self.newest = u32::from(upgraded.is_some());
        self.open = 0;
        self.spilled = 0;
        self.spilled_last = 0;
        self.refused = 0;
        self.seen = 0;
        self.lost_from = u32::MAX;
        if let Some(began_ns) = upgraded {
            self.begin(1, began_ns);
        }
    }

    /// Returns true if bytes came that are no preface or no frame: the connection is opaque.
    #[inline(always)]
    pub fn is_foreign(&self) -> bool {
        self.rx.is_foreign() || self.tx.is_foreign()
    }

    /// Handles a frame of the client (`request`) or of the server that ended at this time. The effect is stored in
    /// [`change`](Self::change).
    #[inline(always)]
    pub fn take(&mut self, ended: EndedFrame, request: bool, now_ns: u64) {
        // A barrier: the verifier forgets the values here, and merges the paths of the frame reader.
        let this = black_box(&mut *self);
        this.change = StreamChange::default();
        match ended.what {
            ended::NOTHING => {}
            ended::HEADERS if request => this.asked(ended.stream, now_ns),
            ended::RESET => this.cut(ended.stream),
            ended::GOAWAY if !request => {
                // GOAWAY names the last stream that the server processes (RFC 9113 §6.8).
                this.leaves_out = ended.stream.wrapping_add(1);
                this.refused = this.leaves_out;
            }
            ended::HEADERS | ended::DATA if !request => this.answer(ended, now_ns),
            _ => {}
        }
        black_box(self);
    }

    /// Returns true if a GOAWAY has come after which [`leave_out`](Self::leave_out) is to be called.
    #[inline(always)]
    pub fn leaves_out(&self) -> bool {
        self.leaves_out != 0
    }

    /// Ends the requests that the server's GOAWAY excludes, if one has come. Returns their number. To be called after a
    /// segment is read: the client may send them again elsewhere (RFC 9113 §6.8).
    #[inline(always)]
    pub fn leave_out(&mut self) -> u32 {
        if self.leaves_out == 0 {
            return 0;
        }
        // Apart from `take`, which must stay small for the verifier: this loops over the whole table.
        let cut = self.streams.remove_above(self.leaves_out.wrapping_sub(1));
        self.leaves_out = 0;
        self.open = self.open.wrapping_sub(cut);
        cut
    }

    /// Ends all requests in flight, because the connection is gone or boundaries are lost. Returns their number. To be
    /// called last.
    #[inline(always)]
    pub fn close(&mut self) -> u32 {
        let open = self.open;
        self.open = 0;
        self.spilled = 0;
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
    pub fn lose_requests(&mut self) -> bool {
        if self.rx.is_lost() || self.rx.is_foreign() {
            return false;
        }
        self.rx.lose();
        self.lost_from = self.lost_from.min(self.newest);
        true
    }

    /// Handles the client's next segment, `len` bytes at `seq`, while its boundaries are lost. Reading continues if the
    /// segment certainly begins with a frame. `window` holds its first `have` bytes.
    #[inline(always)]
    pub fn resume_requests(&mut self, window: &[u64; PEEK_WORDS], have: u32, seq: u32, len: u32) {
        if self.rx.is_lost() && frames::begins(window, have, len, self.newest) {
            self.rx.resume(seq);
        }
    }

    /// Returns the age of the youngest request in flight, in ns before `now_ns`; `None` without any, or if not all are
    /// known.
    pub fn youngest_ns(&self, now_ns: u64) -> Option<u64> {
        if self.spilled > 0 || self.open == 0 {
            return None;
        }
        self.streams.youngest(ticks(now_ns)).map(|age| u64::from(age) << TICK_BITS)
    }

    /// Handles HEADERS of a client: a request if its stream is new, trailers otherwise.
    #[inline(always)]
    fn asked(&mut self, stream: u32, now_ns: u64) {
        // Even streams are the server's; lower ones were opened, or skipped and thereby closed (RFC 9113 §5.1.1). The
        // server ignores streams that were under way when it sent GOAWAY (§6.8).
        if stream & 1 == 0 || stream <= self.newest {
            return;
        }
        self.newest = stream;
        // Without a GOAWAY, `refused` is 0, and 0 − 1 is above every stream.
        if stream.wrapping_sub(1) < self.refused.wrapping_sub(1) {
            self.begin(stream, now_ns);
            self.change.started = 1;
        }
    }

    #[inline(always)]
    fn begin(&mut self, stream: u32, now_ns: u64) {
        self.open = self.open.wrapping_add(1);
        // The request counts although the table is full; only its duration and status are not known.
        if !self.streams.insert(stream, ticks(now_ns)) {
            self.spilled = self.spilled.wrapping_add(1);
        }
    }

    /// Returns true if an unknown stream that the server answers was opened while boundaries were lost.
    #[inline(always)]
    fn was_missed(&self, ended: EndedFrame) -> bool {
        let may_be = ended.stream & 1 != 0 && ended.stream > self.lost_from;
        may_be && ended.what == ended::HEADERS && self.spilled == 0
    }

    /// Handles HEADERS or DATA of a server.
    #[inline(always)]
    fn answer(&mut self, ended: EndedFrame, now_ns: u64) {
        let mut place = self.streams.find(ended.stream);
        // A response proves a request that was in lost bytes: its begin is taken to be now.
        if place.is_none() && self.was_missed(ended) {
            self.begin(ended.stream, now_ns);
            self.change.started = 1;
            self.newest = self.newest.max(ended.stream);
            place = self.streams.find(ended.stream);
        }
        // The table still finds a stream that was reset: the server may have sent these frames before it knew.
        let Some(place) = place.filter(|place| self.streams.is_open(*place)) else {
            if ended.what == ended::HEADERS {
                // The block may define entries of HPACK's table that later blocks of counted streams refer to.
                glimpse::missed(&self.tx.payload(), ended.ends, &mut self.seen);
            }
            if ended.ends && place.is_none() && self.is_spilled(ended.stream) {
                self.change.answered = 1;
            }
            return;
        };
        if ended.what == ended::HEADERS {
            let note = self.streams.note(place);
            let note = glimpse::noted(note, &self.tx.payload(), ended.ends, &mut self.seen);
            self.streams.set_note(place, note);
        }
        if !ended.ends {
            return;
        }
        // Behind the barrier the verifier no longer distinguishes the places of the table.
        let this = black_box(self);
        let note = this.streams.note(place);
        let began = this.streams.remove(place);
        this.open = this.open.wrapping_sub(1);
        this.change = StreamChange {
            took_ns: u64::from(ticks(now_ns).wrapping_sub(began)) << TICK_BITS,
            started: this.change.started,
            answered: 1,
            class: u16::from(note & glimpse::CLASS),
            grpc: u16::from(note & glimpse::GRPC),
            ..StreamChange::default()
        };
    }

    #[inline(always)]
    fn cut(&mut self, stream: u32) {
        if let Some(place) = self.streams.find(stream) {
            if self.streams.is_open(place) {
                self.streams.remove(place);
                self.open = self.open.wrapping_sub(1);
                self.change.cut = 1;
            }
        } else if self.is_spilled(stream) {
            self.change.cut = 1;
        }
    }

    /// Returns true if a stream that ends and is not in the table is one without room there. Ends one of those.
    ///
    /// Servers often send RST_STREAM after the end of a response (RFC 9113 §8.1): the same stream does not end twice.
    #[inline(always)]
    fn is_spilled(&mut self, stream: u32) -> bool {
        let is_again = stream == self.spilled_last;
        if self.spilled == 0 || stream & 1 == 0 || stream > self.newest || is_again {
            return false;
        }
        self.spilled_last = stream;
        self.spilled = self.spilled.wrapping_sub(1);
        self.open = self.open.wrapping_sub(1);
        true
    }
}

#[inline(always)]
fn ticks(ns: u64) -> u32 {
    (ns >> TICK_BITS) as u32
}
