//! Pure: stands where the kernel half stands, and does with segments what `ebpf/src/count.rs` does with them.
//!
//! The one file of this crate, with [`late`], that knows how the parsers are driven. Unlike the kernel half it reads as
//! many windows of a segment as there are.

mod late;

use common::{
    h1::{self, Draft, Happened, Seek, at},
    h2::{self, PEEK, PEEK_WORDS},
};

use self::late::{Lates, Piece};
use crate::segments::Received;

/// Words of a window of HTTP/1: fewer than the kernel half's, so that more heads lie in several.
const WORDS: usize = 29;
/// Windows of a segment that are read without going byte by byte.
const FAST_ROUNDS: u32 = 2;

/// What was seen to happen on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request is in flight from now on.
    Started,
    /// The request in flight has ended with this status.
    Finished(u16),
    /// A request that nobody had seen begin has ended with this status.
    Missed(u16),
    /// The request in flight has ended because the connection did, with a whole answer.
    Closed,
    /// A request in flight has ended without a whole answer.
    Cut,
    /// A response that nobody had asked for went by.
    Stray,
    /// Boundaries were lost.
    Desync,
    /// The connection speaks neither HTTP/1 nor HTTP/2.
    Opaque,
    /// The connection speaks HTTP/2.
    Http2,
    /// A request of HTTP/2 has ended with a status of this class (0: not seen), and this outcome of a gRPC call.
    Answered(u16, u16),
}

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaks {
    Http1,
    Http2,
    Other,
}

/// A connection as the kernel half sees it.
#[derive(Clone, Debug)]
pub struct Tap {
    speaks: Speaks,
    h1: h1::Conn,
    h2: Box<h2::Conn>,
    /// Sequence numbers of the first byte of requests and of responses.
    first: [u32; 2],
    draft: Draft<WORDS>,
    /// What the socket has taken in.
    received: Received,
    lates: Lates,
    now_ns: u64,
    events: Vec<Event>,
    has_spilled: bool,
    /// How many of the events were checked, and what was in flight after them.
    checked: (usize, u32),
}

/// How the reading of a segment ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// Bytes before it are missing.
    Gap,
    /// Its bytes were not kept that far.
    Budget,
    /// From here on something else is spoken.
    Changed,
}

impl Default for Tap {
    fn default() -> Self {
        Self::new()
    }
}

impl Tap {
    /// A connection that was just accepted.
    pub fn new() -> Self {
        // Both wrap early.
        let first = [u32::MAX - 40, u32::MAX - 90];
        let mut h1 = h1::Conn::default();
        h1.open(first[0], first[1]);
        // What an older window left behind looks like the end of a head.
        let mut draft = Draft::default();
        draft.window = [0x5a0a_0d0a_0d0a_0d0a; WORDS];
        Self {
            speaks: Speaks::Http1,
            h1,
            h2: Box::default(),
            first,
            draft,
            received: Received::default(),
            lates: Lates::default(),
            now_ns: 1 << 40,
            events: Vec::new(),
            has_spilled: false,
            checked: (0, 0),
        }
    }

    /// All that has happened so far.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u32 {
        match self.speaks {
            Speaks::Http1 => u32::from(self.h1.is_busy()),
            Speaks::Http2 => self.h2.open,
            // An estimate, not made here.
            Speaks::Other => 0,
        }
    }

    /// Whether a request is in flight.
    pub fn is_busy(&self) -> bool {
        self.in_flight() > 0
    }

    /// Whether a request of HTTP/2 has ever found no place.
    pub fn has_spilled(&self) -> bool {
        self.has_spilled
    }

    /// A segment of the requests, that begins this many bytes behind their begin, has come in.
    pub fn request(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let piece = Piece::whole(self.first[0].wrapping_add(offset as u32), bytes);
        let is_expected = self.received.whole() == offset;
        if self.speaks == Speaks::Http1 && self.h1.rx.at == at::LOST && is_expected {
            self.h1.resume_requests(piece.seq);
        }
        if self.speaks == Speaks::Http2 && self.h2.rx.is_lost() && is_expected {
            self.resume_frames(&piece);
        }
        let mut end = self.take_request(&piece);
        if end == End::Gap && self.speaks == Speaks::Http2 && is_expected {
            // What is missing came while boundaries were lost.
            self.lose_requests();
            self.resume_frames(&piece);
            end = self.take_request(&piece);
        }
        match end {
            End::Done => self.take_lates(),
            End::Gap if self.lates.keep(&piece) => {}
            End::Gap | End::Budget => self.lose_requests(),
            End::Changed => unreachable!("goes on in the other parser"),
        }
        self.received.take(&(offset..offset + bytes.len()));
        self.check();
    }

    /// Whether it is known that HTTP/2 is spoken.
    pub fn speaks_http2(&self) -> bool {
        self.speaks == Speaks::Http2
    }

    /// So many bytes of the requests have come in, behind these many, which nobody has seen.
    pub fn skip_request(&mut self, offset: usize, len: usize) {
        self.received.take(&(offset..offset + len));
    }

    /// A segment of the responses, that begins this many bytes behind their begin, goes out.
    pub fn response(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let piece = Piece::whole(self.first[1].wrapping_add(offset as u32), bytes);
        let mut end = End::Done;
        if self.speaks == Speaks::Http1 {
            end = self.http1_response(&piece);
        }
        if self.speaks == Speaks::Http2 {
            end = self.http2(&piece, false);
            if end == End::Done && self.speaks == Speaks::Http2 {
                let cut = self.h2.leave_out();
                self.cut(cut);
            }
        }
        if end == End::Gap {
            self.lose_responses();
        }
        self.check();
    }

    /// Request bytes are given up.
    pub fn lose_requests(&mut self) {
        match self.speaks {
            Speaks::Http1 => {
                let happened = self.h1.lose_requests();
                self.note(happened, 0);
            }
            Speaks::Http2 => {
                if self.h2.lose_requests() {
                    self.events.push(Event::Desync);
                }
            }
            Speaks::Other => {}
        }
        self.check();
    }

    /// Response bytes are given up.
    pub fn lose_responses(&mut self) {
        match self.speaks {
            Speaks::Http1 => {
                let happened = self.h1.lose_responses();
                self.note(happened, 0);
            }
            Speaks::Http2 => self.lose_frames(),
            Speaks::Other => {}
        }
        self.check();
    }

    /// The server sends nothing more (`in_order`), or the connection is gone.
    pub fn close(&mut self, in_order: bool) {
        match self.speaks {
            Speaks::Http1 => {
                let happened = self.h1.close(in_order);
                assert_eq!(happened & !(h1::FINISHED | h1::CUT), 0, "a close may only end");
                if happened & h1::FINISHED != 0 {
                    self.events.push(Event::Closed);
                }
                self.note(happened & h1::CUT, 0);
            }
            Speaks::Http2 => {
                let cut = self.h2.close();
                self.cut(cut);
            }
            Speaks::Other => {}
        }
        self.check();
        assert!(!self.is_busy(), "in flight on a closed connection");
    }

    fn take_request(&mut self, piece: &Piece) -> End {
        let mut end = End::Done;
        if self.speaks == Speaks::Http1 {
            end = self.http1_request(piece);
        }
        if self.speaks == Speaks::Http2 {
            end = self.http2(piece, true);
        }
        if end == End::Changed { End::Done } else { end }
    }

    /// Takes in segments that waited for this one.
    fn take_lates(&mut self) {
        loop {
            let next = match self.speaks {
                Speaks::Http1 => self.h1.rx.next,
                Speaks::Http2 => self.h2.rx.next,
                Speaks::Other => return,
            };
            let Some(piece) = self.lates.due(next) else { return };
            match self.take_request(&piece) {
                End::Done | End::Changed => {}
                End::Budget => return self.lose_requests(),
                End::Gap => return,
            }
        }
    }

    fn http1_request(&mut self, piece: &Piece) -> End {
        let (mut happened, mut round) = (0, 0);
        loop {
            let seek = self.h1.rx.seek(piece.seq, piece.len);
            happened |= self.h1.after_request_seek();
            if self.note(happened, 0) {
                return End::Changed;
            }
            match seek {
                Seek::Read(_) => {}
                Seek::Done => return End::Done,
                Seek::Gap => return End::Gap,
            }
            happened = 0;
            // None: what has ended was the last that is read.
            let begins = self.draft.begin(&self.h1.rx, piece.seq, piece.len);
            let Some(offset) = begins else { continue };
            let Some(len) = self.fill(piece, offset) else { return End::Budget };
            let is_slow = round >= FAST_ROUNDS;
            self.draft.read(len, true, is_slow);
            happened = self.h1.take_request(&self.draft);
            round += 1;
            moved(piece.seq.wrapping_add(offset), self.h1.rx.next, is_slow, len);
        }
    }

    fn http1_response(&mut self, piece: &Piece) -> End {
        if self.h1.tx.is_inside(piece.seq, piece.len) {
            return End::Done;
        }
        let taken = self.first[0].wrapping_add(self.received.whole() as u32);
        let is_missed = !self.h1.is_busy() && taken.wrapping_sub(self.h1.rx.next) as i32 > 1;
        let (mut happened, mut round) = (0, 0);
        loop {
            let seek = self.h1.tx.seek(piece.seq, piece.len);
            happened |= self.h1.after_response_seek();
            if happened & h1::STRAY != 0 && is_missed {
                happened = happened & !h1::STRAY | h1::MISSED;
                happened |= self.h1.lose_requests();
            }
            if self.note(happened, self.h1.tx.status) {
                return End::Changed;
            }
            match seek {
                Seek::Read(_) => {}
                Seek::Done => return End::Done,
                Seek::Gap => return End::Gap,
            }
            happened = 0;
            // None: what has ended was the last that is read.
            let begins = self.draft.begin(&self.h1.tx, piece.seq, piece.len);
            let Some(offset) = begins else { continue };
            let Some(len) = self.fill(piece, offset) else { return End::Budget };
            let is_slow = round >= FAST_ROUNDS;
            self.draft.read(len, false, is_slow);
            happened = self.h1.take_response(&self.draft);
            round += 1;
            moved(piece.seq.wrapping_add(offset), self.h1.tx.next, is_slow, len);
        }
    }

    fn fill(&mut self, piece: &Piece, offset: u32) -> Option<u32> {
        fill(&mut self.draft.window, &piece.bytes, offset, h1::most::<WORDS>() as usize)
    }

    fn http2(&mut self, piece: &Piece, requests: bool) -> End {
        loop {
            self.now_ns += 100_000;
            let side = if requests { &mut self.h2.rx } else { &mut self.h2.tx };
            let seek = side.seek(piece.seq, piece.len);
            let ended = side.ended();
            self.h2.take(ended, requests, self.now_ns);
            self.note_change();
            if self.h2.is_foreign() {
                self.lose_frames();
                return End::Done;
            }
            let offset = match seek {
                Seek::Read(offset) => offset,
                Seek::Done => return End::Done,
                Seek::Gap => return End::Gap,
            };
            let mut window = [0x5a5a_5a5a_5a5a_5a5a; PEEK_WORDS];
            let Some(len) = fill(&mut window, &piece.bytes, offset, PEEK) else {
                return End::Budget;
            };
            let side = if requests { &mut self.h2.rx } else { &mut self.h2.tx };
            side.read(&window, len);
            let used = side.next.wrapping_sub(piece.seq.wrapping_add(offset));
            assert!((1..=len).contains(&used) || self.h2.is_foreign(), "{used} of {len}");
        }
    }

    /// Reads on where the client's next segment surely begins with a frame.
    fn resume_frames(&mut self, piece: &Piece) {
        let mut window = [0x5a5a_5a5a_5a5a_5a5a; PEEK_WORDS];
        let have = fill(&mut window, &piece.bytes, 0, PEEK).unwrap_or_default();
        self.h2.resume_requests(&window, have, piece.seq, piece.len);
    }

    /// Frames cannot be followed any more: what is in flight has ended for us.
    fn lose_frames(&mut self) {
        let cut = self.h2.close();
        self.cut(cut);
        self.events.extend([Event::Desync, Event::Opaque]);
        self.speaks = Speaks::Other;
    }

    fn cut(&mut self, cut: u32) {
        self.events.extend((0..cut).map(|_| Event::Cut));
    }

    /// Takes note of what HTTP/1 says. Returns whether something else is spoken from here on.
    fn note(&mut self, happened: Happened, status: u16) -> bool {
        let bits = [
            (h1::FINISHED, Event::Finished(status)),
            (h1::CUT, Event::Cut),
            (h1::STARTED, Event::Started),
            (h1::MISSED, Event::Missed(status)),
            (h1::STRAY, Event::Stray),
            (h1::DESYNC, Event::Desync),
            (h1::OPAQUE, Event::Opaque),
            (h1::HTTP2, Event::Http2),
        ];
        let seen = bits.into_iter().filter(|(bit, _)| happened & bit != 0);
        self.events.extend(seen.map(|(_, event)| event));
        if happened & h1::OPAQUE != 0 {
            self.speaks = Speaks::Other;
        }
        if happened & h1::HTTP2 != 0 {
            let upgraded = self.h1.is_upgrading().then_some(self.now_ns);
            self.h2.open(&self.h1.begun(), upgraded);
            self.speaks = Speaks::Http2;
        }
        happened & (h1::OPAQUE | h1::HTTP2) != 0
    }

    fn note_change(&mut self) {
        let change = self.h2.change;
        if change.started > 0 {
            self.events.push(Event::Started);
            self.has_spilled |= self.h2.youngest_ns(self.now_ns).is_none();
        }
        if change.answered > 0 {
            self.events.push(Event::Answered(change.class, change.grpc));
        }
        self.cut(change.cut);
    }

    /// What holds at any time: what is in flight has begun and not ended, and with HTTP/1 that is one request at most.
    fn check(&mut self) {
        let (from, mut open) = self.checked;
        let mut most = 1;
        for event in &self.events[from..] {
            match event {
                Event::Started => open += 1,
                Event::Finished(_) | Event::Closed | Event::Cut | Event::Answered(..) => {
                    assert!(open > 0, "ended without a begin: {:?}", self.events);
                    open -= 1;
                }
                Event::Http2 => most = u32::MAX,
                Event::Missed(_) | Event::Stray | Event::Desync | Event::Opaque => {}
            }
            if self.speaks == Speaks::Http1 {
                assert!(open <= most, "two in flight: {:?}", self.events);
            }
        }
        assert_eq!(open, self.in_flight(), "{:?}", self.events);
        self.checked = (self.events.len(), open);
    }
}

/// Copies as the kernel half does: what lies behind stays as it was. `None`: there are no bytes at `offset`.
fn fill(window: &mut [u64], bytes: &[u8], offset: u32, most: usize) -> Option<u32> {
    let left = bytes.get(offset as usize..).filter(|left| !left.is_empty())?;
    let len = left.len().min(most);
    for (word, chunk) in window.iter_mut().zip(left[..len].chunks(8)) {
        let mut copy = word.to_ne_bytes();
        copy[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(copy);
    }
    Some(len as u32)
}

/// A step consumes bytes, unless it leaves that to a slow one, and no more than there were.
fn moved(from: u32, next: u32, is_slow: bool, len: u32) {
    let used = next.wrapping_sub(from);
    assert!((u32::from(is_slow)..=len).contains(&used), "{used} of {len}");
}
