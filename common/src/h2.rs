//! Pure: HTTP/2 frames and streams, the same code in the kernel and in unit tests.
//!
//! A [`Conn`] takes over where [`crate::h1`] has met the preface of HTTP/2 (RFC 9113 §3.4): [`Side`] `rx` walks the
//! client's frames, `tx` the server's. The driver hands in segments in any order it gets them:
//!
//! 1. [`Side::seek`] says where in the segment reading goes on, if it does. Payloads are skipped by arithmetic on sequence
//!    numbers; gaps inside them do no harm. A frame takes effect with its last byte: [`Side::ended`] says which.
//! 2. The driver copies up to [`PEEK`] bytes from there and calls [`Side::read`], which consumes at least one.
//! 3. Both steps repeat until `seek` finds nothing more to read. What ended goes to [`Conn::take`].
//!
//! A request is a stream that the client opened. It begins with the last byte of its header block and ends with the last
//! byte that the server sends on it, with RST_STREAM either way, when the server's GOAWAY leaves it out ([`Conn::leave_out`]), or
//! with the connection. Nothing of that needs the headers themselves; a glimpse of them tells statuses ([`glimpse`]).
//!
//! Rules: RFC 9113 §4.1 (frames), §5.1 (streams), §6 (frame types), §8.1 (messages), §8.4 (push); RFC 8441 (a CONNECT is a
//! stream like any other).

mod frames;
mod glimpse;
mod streams;
#[cfg(test)]
mod tests;

use core::{hint::black_box, mem::size_of};

use crate::h1::Begun;

pub use frames::{Ended, Side, ended, flag, kind};
pub use glimpse::grpc;

/// Most bytes of a frame that are looked at: its header and the begin of its payload.
pub const PEEK: usize = frames::WORDS * 8;
/// Words of [`PEEK`].
pub const PEEK_WORDS: usize = frames::WORDS;

/// Bits of a time in ns that are dropped where a stream's begin is kept: 16 µs are one tick, and they wrap after 19 hours.
const TICK_BITS: u32 = 14;

/// One HTTP/2 connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conn {
    /// Frames, client to server.
    pub rx: Side,
    /// Frames, server to client.
    pub tx: Side,
    /// Highest stream that the client has opened.
    newest: u32,
    /// Requests in flight.
    pub open: u32,
    /// Those of them for which the table had no room.
    spilled: u32,
    /// What the server's literal statuses and gRPC outcomes were so far, as bits: see [`glimpse`].
    seen: u32,
    /// First stream that a GOAWAY has left out; 0: none to be ended.
    leaves_out: u32,
    /// Last of those for which there was no room that has ended.
    spilled_last: u32,
    /// First stream that the server does not work on any more, since its GOAWAY; 0: it works on all.
    refused: u32,
    /// Highest stream when the client's boundaries were lost for the first time: those above it may have been opened unseen.
    lost_from: u32,
    /// What the last frame brought about. In memory, where the verifier follows one way on from here instead of each that
    /// led here.
    pub change: Change,
    streams: streams::Table,
}
const _: () = assert!(size_of::<Conn>() <= 3_072);

/// What the end of a frame brought about.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// How long the answered request took, ns.
    pub took_ns: u64,
    /// Requests that began: 0 or 1.
    pub started: u32,
    /// Requests that were answered: 0 or 1.
    pub answered: u32,
    /// Requests that ended without a whole answer.
    pub cut: u32,
    /// Class of the answer's status, 1 to 5; 0: not seen.
    pub class: u16,
    /// One of [`grpc`].
    pub grpc: u16,
}

impl Conn {
    /// Becomes a fresh connection; all zero before. In place: the kernel's stack is small.
    ///
    /// With `upgraded` the request that asked for HTTP/2 is stream 1, in flight since then (RFC 7540 §3.2).
    #[inline(always)]
    pub fn open(&mut self, begun: &Begun, upgraded: Option<u64>) {
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

    /// Whether something came that is no preface, or no frame: nobody can follow this connection.
    #[inline(always)]
    pub fn is_foreign(&self) -> bool {
        self.rx.is_foreign() || self.tx.is_foreign()
    }

    /// What a frame of the client's (`request`) or the server's brings about with its last byte, at this time: leaves it in
    /// [`change`](Self::change).
    #[inline(always)]
    pub fn take(&mut self, ended: Ended, request: bool, now_ns: u64) {
        let this = black_box(&mut *self);
        this.change = Change::default();
        match ended.what {
            ended::NOTHING => {}
            ended::HEADERS if request => this.asked(ended.stream, now_ns),
            ended::RESET => this.cut(ended.stream),
            ended::GOAWAY if !request => {
                this.leaves_out = ended.stream.wrapping_add(1);
                this.refused = this.leaves_out;
            }
            ended::HEADERS | ended::DATA if !request => this.answer(ended, now_ns),
            _ => {}
        }
        black_box(self);
    }

    /// Whether a GOAWAY has come after which [`leave_out`](Self::leave_out) is to be called.
    #[inline(always)]
    pub fn leaves_out(&self) -> bool {
        self.leaves_out != 0
    }

    /// Ends what the server's GOAWAY has left out, if one has come. Returns how many requests that were. To be called when a
    /// segment is read: the client may ask for them again elsewhere (RFC 9113 §6.8).
    #[inline(always)]
    pub fn leave_out(&mut self) -> u32 {
        if self.leaves_out == 0 {
            return 0;
        }
        let cut = self.streams.remove_above(self.leaves_out.wrapping_sub(1));
        self.leaves_out = 0;
        self.open = self.open.wrapping_sub(cut);
        cut
    }

    /// Ends all that is in flight: the connection is gone, or boundaries are lost. Returns how many requests that were. To
    /// be called last.
    #[inline(always)]
    pub fn close(&mut self) -> u32 {
        let open = self.open;
        self.open = 0;
        self.spilled = 0;
        // Another CPU may still be at work on a packet that came before.
        self.rx.close();
        self.tx.close();
        open
    }

    /// The client's bytes are gone for good: until their boundaries are found again, the server's answers alone tell of
    /// requests. Returns whether they were not lost before.
    ///
    /// What the client resets meanwhile counts as in flight until the server ends it, or the connection is gone.
    #[inline(always)]
    pub fn lose_requests(&mut self) -> bool {
        if self.rx.is_lost() || self.rx.is_foreign() {
            return false;
        }
        self.rx.lose();
        self.lost_from = self.lost_from.min(self.newest);
        true
    }

    /// The client's next segment, `len` bytes at `seq`, has come, and its boundaries are lost: reading goes on where it
    /// surely begins with a frame. `window` holds its first `have` bytes.
    #[inline(always)]
    pub fn resume_requests(&mut self, window: &[u64; PEEK_WORDS], have: u32, seq: u32, len: u32) {
        if self.rx.is_lost() && frames::begins(window, have, len, self.newest) {
            self.rx.resume(seq);
        }
    }

    /// When the youngest request in flight began, in ns before `now_ns`; `None` without any, or where not all are known.
    pub fn youngest_ns(&self, now_ns: u64) -> Option<u64> {
        if self.spilled > 0 || self.open == 0 {
            return None;
        }
        self.streams.youngest(ticks(now_ns)).map(|age| u64::from(age) << TICK_BITS)
    }

    /// A client's HEADERS: a request if its stream is new, trailers otherwise.
    #[inline(always)]
    fn asked(&mut self, stream: u32, now_ns: u64) {
        // Even ones are the server's; lower ones were opened, or skipped and thereby closed (RFC 9113 §5.1.1). One that was
        // underway when the server sent GOAWAY is ignored by it (§6.8).
        if stream & 1 == 0 || stream <= self.newest {
            return;
        }
        self.newest = stream;
        // Where there was no GOAWAY, 0 less 1 is above them all.
        if stream.wrapping_sub(1) < self.refused.wrapping_sub(1) {
            self.begin(stream, now_ns);
            self.change.started = 1;
        }
    }

    #[inline(always)]
    fn begin(&mut self, stream: u32, now_ns: u64) {
        self.open = self.open.wrapping_add(1);
        if !self.streams.insert(stream, ticks(now_ns)) {
            self.spilled = self.spilled.wrapping_add(1);
        }
    }

    /// Whether a stream that is not known was opened while boundaries were lost, now that the server answers it.
    #[inline(always)]
    fn was_missed(&self, ended: Ended) -> bool {
        let may_be = ended.stream & 1 != 0 && ended.stream > self.lost_from;
        may_be && ended.what == ended::HEADERS && self.spilled == 0
    }

    /// A server's HEADERS or DATA.
    #[inline(always)]
    fn answer(&mut self, ended: Ended, now_ns: u64) {
        let mut place = self.streams.find(ended.stream);
        if place.is_none() && self.was_missed(ended) {
            self.begin(ended.stream, now_ns);
            self.change.started = 1;
            self.newest = self.newest.max(ended.stream);
            place = self.streams.find(ended.stream);
        }
        let Some(place) = place.filter(|place| self.streams.is_open(*place)) else {
            if ended.what == ended::HEADERS {
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
        let this = black_box(self);
        let note = this.streams.note(place);
        let began = this.streams.remove(place);
        this.open = this.open.wrapping_sub(1);
        this.change = Change {
            took_ns: u64::from(ticks(now_ns).wrapping_sub(began)) << TICK_BITS,
            started: this.change.started,
            answered: 1,
            class: u16::from(note & glimpse::CLASS),
            grpc: u16::from(note & glimpse::GRPC),
            ..Change::default()
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

    /// Whether a stream that ends and is not in the table is one that found no room there. Ends one of those.
    ///
    /// Servers often send RST_STREAM behind the end of an answer (RFC 9113 §8.1): the same stream does not end twice.
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
