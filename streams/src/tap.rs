//! Pure: stands where the kernel half stands, and does with segments what `ebpf/src/count.rs` does with them.
//!
//! The one file of this crate that knows how the parsers are driven. Unlike the kernel half it reads as many windows of
//! a segment as there are.

use std::collections::BTreeMap;

use common::{
    abi::KEPT_BYTES,
    h1::{self, Conn, Happened, Read, Seek, WINDOW, WINDOW_WORDS, Window, at},
};

/// What was seen to happen on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request is in flight from now on.
    Started,
    /// The request in flight has ended with this status.
    Finished(u16),
    /// A request that nobody had seen begin has ended with this status.
    Missed(u16),
    /// The request in flight has ended because the connection did.
    Closed,
    /// A response that nobody had asked for went by.
    Stray,
    /// Boundaries were lost.
    Desync,
    /// The connection is not HTTP/1.
    Opaque,
}

/// A connection as the kernel half sees it.
#[derive(Clone, Debug)]
pub struct Tap {
    conn: Conn,
    /// Sequence numbers of the first byte of requests and of responses.
    first: [u32; 2],
    window: Window,
    /// Segments that came too early, by their sequence number: their first bytes, and how long they are.
    kept: BTreeMap<u32, (Vec<u8>, u32)>,
    /// How many of them wait, by the connection's own count.
    waiting: usize,
    events: Vec<Event>,
    /// How many of the events were checked, and what was in flight after them.
    checked: (usize, usize),
}

/// How the reading of a segment ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// Bytes before it are missing.
    Gap,
    /// Its bytes were not kept that far.
    Budget,
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
        let mut conn = Conn::default();
        conn.open(first[0], first[1]);
        // What an older window left behind looks like the end of a head.
        let window = [0x5a0a_0d0a_0d0a_0d0a; WINDOW_WORDS];
        let (kept, events) = (BTreeMap::new(), Vec::new());
        Self { conn, first, window, kept, waiting: 0, events, checked: (0, 0) }
    }

    /// All that has happened so far.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Whether a request is in flight.
    pub fn is_busy(&self) -> bool {
        self.conn.is_busy()
    }

    /// A segment of the requests, that begins this many bytes behind their begin, has come in.
    pub fn request(&mut self, offset: usize, bytes: &[u8]) {
        let seq = self.first[0].wrapping_add(offset as u32);
        if bytes.is_empty() {
            return;
        }
        if self.conn.rx.at == at::LOST {
            self.conn.resume_requests(seq);
        }
        let mut end = self.take_request(seq, bytes, bytes.len() as u32);
        while end == End::Done && self.waiting > 0 {
            let next = self.conn.rx.next;
            let Some((kept, len)) = self.kept.get(&next).cloned() else { break };
            self.waiting -= 1;
            end = self.take_request(next, &kept, len);
        }
        match end {
            End::Done => {}
            End::Gap => {
                let kept = bytes[..bytes.len().min(KEPT_BYTES)].to_vec();
                self.kept.insert(seq, (kept, bytes.len() as u32));
                self.waiting += 1;
            }
            End::Budget => {
                let happened = self.conn.lose_requests();
                self.note(happened, 0);
            }
        }
        self.check();
    }

    /// A segment of the responses, that begins this many bytes behind their begin, goes out.
    pub fn response(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let seq = self.first[1].wrapping_add(offset as u32);
        if self.take_response(seq, bytes) == End::Gap {
            let happened = self.conn.lose_responses();
            self.note(happened, 0);
        }
        self.check();
    }

    /// Request bytes are given up.
    pub fn lose_requests(&mut self) {
        let happened = self.conn.lose_requests();
        self.note(happened, 0);
        self.check();
    }

    /// Response bytes are given up.
    pub fn lose_responses(&mut self) {
        let happened = self.conn.lose_responses();
        self.note(happened, 0);
        self.check();
    }

    /// The server sends nothing more, or the connection is gone.
    pub fn close(&mut self) {
        let happened = self.conn.close();
        assert_eq!(happened & !h1::FINISHED, 0, "a close may only end");
        if happened & h1::FINISHED != 0 {
            self.events.push(Event::Closed);
        }
        self.check();
        assert!(!self.is_busy(), "in flight on a closed connection");
    }

    /// Takes in a segment of `len` bytes, of which the first `bytes` are at hand.
    fn take_request(&mut self, seq: u32, bytes: &[u8], len: u32) -> End {
        loop {
            let seek = self.conn.rx.seek(seq, len);
            let happened = self.conn.after_request_seek();
            self.note(happened, 0);
            let offset = match seek {
                Seek::Read(offset) => offset,
                Seek::Done => return End::Done,
                Seek::Gap => return End::Gap,
            };
            let Some(left) = bytes.get(offset as usize..).filter(|left| !left.is_empty()) else {
                return End::Budget;
            };
            let len = self.fill(left);
            let read = self.conn.read_request(&self.window, len);
            moved(read, len, seq.wrapping_add(offset), self.conn.rx.next);
            self.note(read.happened, 0);
        }
    }

    fn take_response(&mut self, seq: u32, bytes: &[u8]) -> End {
        loop {
            let seek = self.conn.tx.seek(seq, bytes.len() as u32);
            let happened = self.conn.after_response_seek();
            self.note(happened, self.conn.tx.status);
            let offset = match seek {
                Seek::Read(offset) => offset,
                Seek::Done => return End::Done,
                Seek::Gap => return End::Gap,
            };
            let len = self.fill(&bytes[offset as usize..]);
            let read = self.conn.read_response(&self.window, len);
            moved(read, len, seq.wrapping_add(offset), self.conn.tx.next);
            self.note(read.happened, self.conn.tx.status);
        }
    }

    /// Copies as the kernel half does: what lies behind stays as it was.
    fn fill(&mut self, bytes: &[u8]) -> u32 {
        let len = bytes.len().min(WINDOW);
        for (word, chunk) in self.window.iter_mut().zip(bytes[..len].chunks(8)) {
            let mut copy = word.to_ne_bytes();
            copy[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(copy);
        }
        len as u32
    }

    fn note(&mut self, happened: Happened, status: u16) {
        let bits = [
            (h1::FINISHED, Event::Finished(status)),
            (h1::STARTED, Event::Started),
            (h1::MISSED, Event::Missed(status)),
            (h1::STRAY, Event::Stray),
            (h1::DESYNC, Event::Desync),
            (h1::OPAQUE, Event::Opaque),
        ];
        let seen = bits.into_iter().filter(|(bit, _)| happened & bit != 0);
        self.events.extend(seen.map(|(_, event)| event));
    }

    /// What holds at any time: at most one request is in flight, and it has begun and not ended.
    fn check(&mut self) {
        let (from, mut open) = self.checked;
        for event in &self.events[from..] {
            match event {
                Event::Started => open += 1,
                Event::Finished(_) | Event::Closed => {
                    assert!(open > 0, "ended without a begin: {:?}", self.events);
                    open -= 1;
                }
                Event::Missed(_) | Event::Stray | Event::Desync | Event::Opaque => {}
            }
            assert!(open <= 1, "two in flight: {:?}", self.events);
        }
        assert_eq!(open, usize::from(self.is_busy()), "{:?}", self.events);
        self.checked = (self.events.len(), open);
    }
}

/// A step consumes bytes, and no more than there were.
fn moved(read: Read, len: u32, from: u32, next: u32) {
    assert!((1..=len).contains(&read.used), "{read:?} of {len}");
    assert_eq!(from.wrapping_add(read.used), next);
}
