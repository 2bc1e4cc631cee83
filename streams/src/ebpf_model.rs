//! Pure: model of the eBPF programs: processes segments as `ebpf/src/count.rs` does.
//!
//! Only this file drives the parsers. Unlike the eBPF programs, the model reads as many windows of a segment as it
//! has.

mod pending_segments;

use datapath::{
    h1::{self, Http1Events, SeekResult, UnlockedRead, state},
    h2::{self, PEEK_BYTES, PEEK_WORDS},
};

use self::pending_segments::{PendingSegments, SegmentPart};
use crate::segmentation::ReceivedRanges;

/// Words of an HTTP/1 window: fewer than in the eBPF programs, so that more heads span several windows.
const WORDS: usize = 29;
/// Number of windows of a segment that are read on the fast path; later ones are read byte by byte.
const FAST_ROUNDS: u32 = 2;

/// Event that the parsers report on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelEvent {
    /// A request is in flight from now on.
    Started,
    /// The request in flight has ended, with this status.
    Finished(u16),
    /// A request whose begin was not seen has ended, with this status.
    Missed(u16),
    /// The request in flight has ended with the connection, after a whole response, or as the connection itself.
    Closed,
    /// A request in flight has ended without a whole response.
    Aborted,
    /// A response without a request has passed.
    Stray,
    /// Message boundaries were lost.
    Desync,
    /// The connection speaks neither HTTP/1 nor HTTP/2.
    Opaque,
    /// The connection speaks HTTP/2 from here on.
    Http2,
    /// A request of HTTP/2 has ended with a response: its status class (0: not seen) and the outcome of a gRPC call.
    Responded(u16, u16),
}

/// Protocol that a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelProtocol {
    Http1,
    Http2,
    Other,
    /// An opaque port: the connection is one request, and nothing is read.
    Tcp,
}

/// State of a connection in the model of the eBPF programs.
#[derive(Clone, Debug)]
pub struct EbpfModel {
    protocol: ModelProtocol,
    h1: h1::Http1Connection,
    h2: Box<h2::Http2Connection>,
    /// Sequence numbers of the first request byte and of the first response byte.
    first: [u32; 2],
    unlocked_read: UnlockedRead<WORDS>,
    /// Request bytes that the socket has received.
    received: ReceivedRanges,
    pending: PendingSegments,
    now_ns: u64,
    events: Vec<ModelEvent>,
    has_untracked: bool,
    /// Number of events that were checked, and of requests in flight after them.
    checked: (usize, u32),
}

/// Result of reading a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModelReadEnd {
    Done,
    /// Bytes before the segment are missing.
    Gap,
    /// The segment's bytes were not stored up to the place where reading continues.
    Budget,
    /// Another protocol is spoken from here on.
    Changed,
}

impl Default for EbpfModel {
    fn default() -> Self {
        Self::new()
    }
}

impl EbpfModel {
    /// A connection that was just accepted.
    pub fn new() -> Self {
        // Close to the maximum, so that both sequence numbers wrap early.
        let first = [u32::MAX - 40, u32::MAX - 90];
        let mut h1 = h1::Http1Connection::default();
        h1.open(first[0], first[1]);
        // Stale bytes of an earlier window, which look like the end of a head: reading them would be an error.
        let mut unlocked_read = UnlockedRead::default();
        unlocked_read.window = [0x5a0a_0d0a_0d0a_0d0a; WORDS];
        Self {
            protocol: ModelProtocol::Http1,
            h1,
            h2: Box::default(),
            first,
            unlocked_read,
            received: ReceivedRanges::default(),
            pending: PendingSegments::default(),
            now_ns: 1 << 40,
            events: Vec::new(),
            has_untracked: false,
            checked: (0, 0),
        }
    }

    /// A connection to an opaque port that was just accepted.
    pub fn of_opaque_port() -> Self {
        let mut model =
            Self { protocol: ModelProtocol::Tcp, events: vec![ModelEvent::Started], ..Self::new() };
        model.h1.stop_reading();
        model.check_invariants();
        model
    }

    /// Numbers of bytes that count as received and as sent. For connections to opaque ports only.
    pub fn counted_bytes(&self) -> [u32; 2] {
        [self.h1.rx.next.wrapping_sub(self.first[0]), self.h1.tx.next.wrapping_sub(self.first[1])]
    }

    /// All events so far, in order.
    pub fn events(&self) -> &[ModelEvent] {
        &self.events
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> u32 {
        match self.protocol {
            ModelProtocol::Http1 => u32::from(self.h1.is_busy()),
            ModelProtocol::Http2 => self.h2.requests_in_flight,
            // Opaque connections have an estimate, which this model does not compute.
            ModelProtocol::Other => 0,
            ModelProtocol::Tcp => 1,
        }
    }

    /// Returns true if a request is in flight.
    pub fn is_busy(&self) -> bool {
        self.in_flight() > 0
    }

    /// Returns true if an HTTP/2 request has ever found no free place in the table of streams.
    pub fn has_untracked(&self) -> bool {
        self.has_untracked
    }

    /// Receives a segment of the requests, `offset` bytes behind the first one.
    pub fn request_segment(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let part = SegmentPart::whole(self.first[0].wrapping_add(offset as u32), bytes);
        let is_expected = self.received.contiguous_len() == offset;
        if self.protocol == ModelProtocol::Http1 && self.h1.rx.state == state::DESYNC && is_expected
        {
            self.h1.resync_requests(part.seq);
        }
        if self.protocol == ModelProtocol::Http2 && self.h2.rx.is_desynced() && is_expected {
            self.resync_frames(&part);
        }
        let mut end = self.read_request(&part);
        if end == ModelReadEnd::Gap && self.protocol == ModelProtocol::Http2 && is_expected {
            // The missing bytes passed while boundaries were lost, so they will not come again.
            self.desync_requests();
            self.resync_frames(&part);
            end = self.read_request(&part);
        }
        match end {
            ModelReadEnd::Done => self.read_pending(),
            ModelReadEnd::Gap if self.pending.buffer(&part) => {}
            ModelReadEnd::Gap | ModelReadEnd::Budget => self.desync_requests(),
            ModelReadEnd::Changed => unreachable!("goes on in the other parser"),
        }
        self.received.add_segment(&(offset..offset + bytes.len()));
        self.check_invariants();
    }

    /// Returns true if the connection is known to speak HTTP/2.
    pub fn is_http2(&self) -> bool {
        self.protocol == ModelProtocol::Http2
    }

    /// Records `len` received request bytes at `offset` that the parsers never see.
    pub fn skip_request(&mut self, offset: usize, len: usize) {
        self.received.add_segment(&(offset..offset + len));
    }

    /// Sends a segment of the responses, `offset` bytes behind the first one.
    pub fn response_segment(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let part = SegmentPart::whole(self.first[1].wrapping_add(offset as u32), bytes);
        let mut end = ModelReadEnd::Done;
        if self.protocol == ModelProtocol::Tcp {
            count_bytes(&mut self.h1.tx, &part);
        }
        if self.protocol == ModelProtocol::Http1 {
            end = self.read_http1_response(&part);
        }
        if self.protocol == ModelProtocol::Http2 {
            end = self.read_http2(&part, false);
            if end == ModelReadEnd::Done && self.protocol == ModelProtocol::Http2 {
                let aborted = self.h2.abort_goaway_streams();
                self.record_aborted(aborted);
            }
        }
        if end == ModelReadEnd::Gap {
            self.desync_responses();
        }
        self.check_invariants();
    }

    /// Gives up reading request bytes until a known boundary.
    pub fn desync_requests(&mut self) {
        match self.protocol {
            ModelProtocol::Http1 => {
                let happened = self.h1.desync_requests();
                self.record_events(happened, 0);
            }
            ModelProtocol::Http2 => {
                if self.h2.desync_requests() {
                    self.events.push(ModelEvent::Desync);
                }
            }
            ModelProtocol::Other | ModelProtocol::Tcp => {}
        }
        self.check_invariants();
    }

    /// Gives up reading response bytes.
    pub fn desync_responses(&mut self) {
        match self.protocol {
            ModelProtocol::Http1 => {
                let happened = self.h1.desync_responses();
                self.record_events(happened, 0);
            }
            ModelProtocol::Http2 => self.desync_frames(),
            ModelProtocol::Other | ModelProtocol::Tcp => {}
        }
        self.check_invariants();
    }

    /// Closes the connection. `graceful`: the server sends nothing more; otherwise the connection is lost.
    pub fn close(&mut self, graceful: bool) {
        match self.protocol {
            ModelProtocol::Http1 => {
                let happened = self.h1.close(graceful);
                assert_eq!(happened & !(h1::FINISHED | h1::ABORTED), 0, "a close may only end");
                if happened & h1::FINISHED != 0 {
                    self.events.push(ModelEvent::Closed);
                }
                self.record_events(happened & h1::ABORTED, 0);
            }
            ModelProtocol::Http2 => {
                let aborted = self.h2.close();
                self.record_aborted(aborted);
            }
            ModelProtocol::Other => {}
            ModelProtocol::Tcp => {
                self.events.push(ModelEvent::Closed);
                // A closed connection counts nothing more.
                self.protocol = ModelProtocol::Other;
            }
        }
        self.check_invariants();
        assert!(!self.is_busy(), "in flight on a closed connection");
    }

    fn read_request(&mut self, part: &SegmentPart) -> ModelReadEnd {
        let mut end = ModelReadEnd::Done;
        if self.protocol == ModelProtocol::Tcp {
            count_bytes(&mut self.h1.rx, part);
        }
        if self.protocol == ModelProtocol::Http1 {
            end = self.read_http1_request(part);
        }
        if self.protocol == ModelProtocol::Http2 {
            end = self.read_http2(part, true);
        }
        if end == ModelReadEnd::Changed { ModelReadEnd::Done } else { end }
    }

    /// Reads buffered segments that waited for the last one.
    fn read_pending(&mut self) {
        loop {
            let next = match self.protocol {
                ModelProtocol::Http1 => self.h1.rx.next,
                ModelProtocol::Http2 => self.h2.rx.next,
                ModelProtocol::Other | ModelProtocol::Tcp => return,
            };
            let Some(part) = self.pending.next_due(next) else { return };
            match self.read_request(&part) {
                ModelReadEnd::Done | ModelReadEnd::Changed => {}
                ModelReadEnd::Budget => return self.desync_requests(),
                ModelReadEnd::Gap => return,
            }
        }
    }

    fn read_http1_request(&mut self, part: &SegmentPart) -> ModelReadEnd {
        let (mut happened, mut round) = (0, 0);
        loop {
            let seek = self.h1.rx.seek(part.seq, part.len);
            happened |= self.h1.after_request_seek();
            if self.record_events(happened, 0) {
                return ModelReadEnd::Changed;
            }
            match seek {
                SeekResult::ReadAt(_) => {}
                SeekResult::Done => return ModelReadEnd::Done,
                SeekResult::Gap => return ModelReadEnd::Gap,
            }
            happened = 0;
            // No offset: the message that has ended was the last one that is read.
            let begins = self.unlocked_read.begin(&self.h1.rx, part.seq, part.len);
            let Some(offset) = begins else { continue };
            let Some(len) = self.fill(part, offset) else { return ModelReadEnd::Budget };
            let is_slow = round >= FAST_ROUNDS;
            self.unlocked_read.read(len, true, is_slow);
            happened = self.h1.commit_request_read(&self.unlocked_read);
            round += 1;
            check_progress(part.seq.wrapping_add(offset), self.h1.rx.next, is_slow, len);
        }
    }

    fn read_http1_response(&mut self, part: &SegmentPart) -> ModelReadEnd {
        if self.h1.tx.is_inside_body(part.seq, part.len) {
            return ModelReadEnd::Done;
        }
        // The server has received bytes that the parser has not read, with a request among them. As in the eBPF
        // programs, one byte does not count: it may be the sequence number of a FIN.
        let received_to = self.first[0].wrapping_add(self.received.contiguous_len() as u32);
        let is_missed = !self.h1.is_busy() && received_to.wrapping_sub(self.h1.rx.next) as i32 > 1;
        let (mut happened, mut round) = (0, 0);
        loop {
            let seek = self.h1.tx.seek(part.seq, part.len);
            happened |= self.h1.after_response_seek();
            if happened & h1::STRAY != 0 && is_missed {
                happened = happened & !h1::STRAY | h1::MISSED;
                happened |= self.h1.desync_requests();
            }
            if self.record_events(happened, self.h1.tx.status) {
                return ModelReadEnd::Changed;
            }
            match seek {
                SeekResult::ReadAt(_) => {}
                SeekResult::Done => return ModelReadEnd::Done,
                SeekResult::Gap => return ModelReadEnd::Gap,
            }
            happened = 0;
            // No offset: the message that has ended was the last one that is read.
            let begins = self.unlocked_read.begin(&self.h1.tx, part.seq, part.len);
            let Some(offset) = begins else { continue };
            let Some(len) = self.fill(part, offset) else { return ModelReadEnd::Budget };
            let is_slow = round >= FAST_ROUNDS;
            self.unlocked_read.read(len, false, is_slow);
            happened = self.h1.commit_response_read(&self.unlocked_read);
            round += 1;
            check_progress(part.seq.wrapping_add(offset), self.h1.tx.next, is_slow, len);
        }
    }

    fn fill(&mut self, part: &SegmentPart, offset: u32) -> Option<u32> {
        fill_window(
            &mut self.unlocked_read.window,
            &part.bytes,
            offset,
            h1::window_capacity::<WORDS>() as usize,
        )
    }

    fn read_http2(&mut self, part: &SegmentPart, is_request: bool) -> ModelReadEnd {
        loop {
            self.now_ns += 100_000;
            let side = if is_request { &mut self.h2.rx } else { &mut self.h2.tx };
            let seek = side.seek(part.seq, part.len);
            let ended = side.take_ended_frame();
            self.h2.apply_frame(ended, is_request, self.now_ns);
            self.record_stream_change();
            if self.h2.is_not_http2() {
                self.desync_frames();
                return ModelReadEnd::Done;
            }
            let offset = match seek {
                SeekResult::ReadAt(offset) => offset,
                SeekResult::Done => return ModelReadEnd::Done,
                SeekResult::Gap => return ModelReadEnd::Gap,
            };
            let mut window = [0x5a5a_5a5a_5a5a_5a5a; PEEK_WORDS];
            let Some(len) = fill_window(&mut window, &part.bytes, offset, PEEK_BYTES) else {
                return ModelReadEnd::Budget;
            };
            let side = if is_request { &mut self.h2.rx } else { &mut self.h2.tx };
            side.read(&window, len);
            let used = side.next.wrapping_sub(part.seq.wrapping_add(offset));
            assert!((1..=len).contains(&used) || self.h2.is_not_http2(), "{used} of {len}");
        }
    }

    /// Resumes reading where the client's next segment certainly begins with a frame.
    fn resync_frames(&mut self, part: &SegmentPart) {
        let mut window = [0x5a5a_5a5a_5a5a_5a5a; PEEK_WORDS];
        let available = fill_window(&mut window, &part.bytes, 0, PEEK_BYTES).unwrap_or_default();
        self.h2.resync_requests(&window, available, part.seq, part.len);
    }

    /// Gives up reading frames: requests in flight end, and the connection is opaque from here on.
    fn desync_frames(&mut self) {
        let aborted = self.h2.close();
        self.record_aborted(aborted);
        self.events.extend([ModelEvent::Desync, ModelEvent::Opaque]);
        self.protocol = ModelProtocol::Other;
    }

    fn record_aborted(&mut self, count: u32) {
        self.events.extend((0..count).map(|_| ModelEvent::Aborted));
    }

    /// Records the events of HTTP/1. Returns true if another protocol is spoken from here on.
    fn record_events(&mut self, happened: Http1Events, status: u16) -> bool {
        let bits = [
            (h1::FINISHED, ModelEvent::Finished(status)),
            (h1::ABORTED, ModelEvent::Aborted),
            (h1::STARTED, ModelEvent::Started),
            (h1::MISSED, ModelEvent::Missed(status)),
            (h1::STRAY, ModelEvent::Stray),
            (h1::DESYNC, ModelEvent::Desync),
            (h1::OPAQUE, ModelEvent::Opaque),
            (h1::HTTP2, ModelEvent::Http2),
        ];
        let recorded = bits.into_iter().filter(|(bit, _)| happened & bit != 0);
        self.events.extend(recorded.map(|(_, event)| event));
        if happened & h1::OPAQUE != 0 {
            self.protocol = ModelProtocol::Other;
        }
        if happened & h1::HTTP2 != 0 {
            let upgraded = self.h1.is_upgrading().then_some(self.now_ns);
            self.h2.open(&self.h1.http2_handoff(), upgraded);
            self.protocol = ModelProtocol::Http2;
        }
        happened & (h1::OPAQUE | h1::HTTP2) != 0
    }

    fn record_stream_change(&mut self) {
        let change = self.h2.change;
        if change.started > 0 {
            self.events.push(ModelEvent::Started);
            self.has_untracked |= self.h2.youngest_request_age_ns(self.now_ns).is_none();
        }
        if change.answered > 0 {
            self.events.push(ModelEvent::Responded(change.status_class, change.grpc_outcome));
        }
        self.record_aborted(change.aborted);
    }

    /// Checks invariants: requests in flight have begun and not ended, and HTTP/1 has at most one of them.
    fn check_invariants(&mut self) {
        let (from, mut open) = self.checked;
        let mut most = 1;
        for event in &self.events[from..] {
            match event {
                ModelEvent::Started => open += 1,
                ModelEvent::Finished(_)
                | ModelEvent::Closed
                | ModelEvent::Aborted
                | ModelEvent::Responded(..) => {
                    assert!(open > 0, "ended without a begin: {:?}", self.events);
                    open -= 1;
                }
                ModelEvent::Http2 => most = u32::MAX,
                ModelEvent::Missed(_)
                | ModelEvent::Stray
                | ModelEvent::Desync
                | ModelEvent::Opaque => {}
            }
            if self.protocol == ModelProtocol::Http1 {
                assert!(open <= most, "two in flight: {:?}", self.events);
            }
        }
        assert_eq!(open, self.in_flight(), "{:?}", self.events);
        self.checked = (self.events.len(), open);
    }
}

/// Counts the bytes of a segment of which nothing is read.
fn count_bytes(direction: &mut h1::Http1Direction, part: &SegmentPart) {
    assert_eq!(direction.seek(part.seq, part.len), SeekResult::Done, "nothing is read");
}

/// Copies bytes as the eBPF programs do: the rest of the window stays unchanged. `None`: there are no bytes at
/// `offset`.
fn fill_window(window: &mut [u64], bytes: &[u8], offset: u32, max_count: usize) -> Option<u32> {
    let left = bytes.get(offset as usize..).filter(|left| !left.is_empty())?;
    let len = left.len().min(max_count);
    for (word, chunk) in window.iter_mut().zip(left[..len].chunks(8)) {
        let mut copy = word.to_ne_bytes();
        copy[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(copy);
    }
    Some(len as u32)
}

/// Checks that a step consumed no more bytes than it had, and at least one unless it deferred to a slow step.
fn check_progress(from: u32, next: u32, is_slow: bool, len: u32) {
    let used = next.wrapping_sub(from);
    assert!((u32::from(is_slow)..=len).contains(&used), "{used} of {len}");
}
