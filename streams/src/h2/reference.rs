//! Pure: reference for requests in flight, from RFC 9113 §5.1: slow, obvious, and independent of `datapath::h2`.

use std::collections::BTreeSet;

use super::frames::{PREFACE, frame_flag, frame_kind};

/// Change of a request's state, with its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceEvent {
    /// The header block of the request is complete.
    Started(u32),
    /// The server has sent its whole response.
    Responded(u32),
    /// The request ended without a whole response.
    Aborted(u32),
}

/// One direction of a connection.
#[derive(Clone, Debug, Default)]
struct ReferenceDirection {
    bytes: Vec<u8>,
    /// Header block that continues in the next frame.
    open_block: Option<ReferenceHeaderBlock>,
}

/// Header block: a HEADERS or PUSH_PROMISE frame, and its CONTINUATION frames.
#[derive(Clone, Copy, Debug)]
struct ReferenceHeaderBlock {
    stream: u32,
    /// True if the block ends its side of the stream.
    is_end_stream: bool,
    /// True for PUSH_PROMISE.
    is_promise: bool,
}

/// State of a connection, computed from all bytes of both directions.
#[derive(Clone, Debug, Default)]
pub struct Http2Reference {
    client: ReferenceDirection,
    server: ReferenceDirection,
    has_preface: bool,
    highest_stream: u32,
    /// Last stream of a GOAWAY in the bytes that are being read.
    goaway_last: Option<u32>,
    /// Last stream that the server processes, by its GOAWAY.
    pub last_processed: Option<u32>,
    /// Number of frames that would have ended a request that had ended already.
    pub redundant_ends: u64,
    /// Streams of the requests in flight.
    pub in_flight: BTreeSet<u32>,
    /// All changes so far, in order.
    pub events: Vec<ReferenceEvent>,
    /// True after an error of the connection (§5.4.1). Later bytes have no meaning.
    pub is_broken: bool,
}

/// Frame: its type, flags, stream and payload.
type ReferenceFrame = (u8, u8, u32, Vec<u8>);

impl Http2Reference {
    /// Returns true if the client's preface has arrived.
    pub fn has_begun(&self) -> bool {
        self.has_preface
    }

    /// Adds the next bytes that the client has sent.
    pub fn receive_client(&mut self, bytes: &[u8]) {
        self.client.bytes.extend(bytes);
        if !self.has_preface {
            let begin = self.client.bytes.len().min(PREFACE.len());
            self.is_broken |= self.client.bytes[..begin] != PREFACE[..begin];
            if begin < PREFACE.len() || self.is_broken {
                return;
            }
            self.client.bytes.drain(..begin);
            self.has_preface = true;
        }
        while !self.is_broken {
            self.is_broken = begins_on_wrong_stream(&self.client.bytes);
            if self.is_broken {
                return;
            }
            let Some(frame) = take_frame(&mut self.client.bytes) else { return };
            self.is_broken = self.apply_client_frame(frame).is_none();
        }
    }

    /// Adds the next bytes that the server has sent.
    pub fn receive_server(&mut self, bytes: &[u8]) {
        self.server.bytes.extend(bytes);
        while !self.is_broken {
            self.is_broken = begins_on_wrong_stream(&self.server.bytes);
            if self.is_broken {
                return;
            }
            let Some(frame) = take_frame(&mut self.server.bytes) else { break };
            self.is_broken = self.apply_server_frame(frame).is_none();
        }
        // §6.8: requests above the last stream were not and will not be processed.
        if let Some(last) = self.goaway_last.take() {
            self.last_processed = Some(last);
            for stream in self.in_flight.split_off(&(last + 1)) {
                self.events.push(ReferenceEvent::Aborted(stream));
            }
        }
    }

    /// Applies a frame of the client. `None`: an error of the connection.
    fn apply_client_frame(&mut self, (kind, flags, stream, payload): ReferenceFrame) -> Option<()> {
        let open_block = self.client.open_block.take();
        let stream = match header_block(open_block, kind, flags, stream, &payload)? {
            // §8.4: a client cannot push.
            BlockProgress::Whole(block) if block.is_promise => return None,
            // A request stays in flight after the client's last byte, until its response ends.
            BlockProgress::Whole(block) => block.stream,
            BlockProgress::Continues(block) => {
                self.client.open_block = Some(block);
                return Some(());
            }
            BlockProgress::None => return self.apply_other_client_frame(kind, stream, &payload),
        };
        if stream > self.highest_stream {
            // §5.1.1: a new stream is odd, and higher than any before.
            if stream.is_multiple_of(2) {
                return None;
            }
            self.highest_stream = stream;
            // §6.8: frames above the last stream are ignored.
            if self.last_processed.is_none_or(|last| stream <= last) {
                self.in_flight.insert(stream);
                self.events.push(ReferenceEvent::Started(stream));
            }
        }
        Some(())
    }

    fn apply_other_client_frame(&mut self, kind: u8, stream: u32, payload: &[u8]) -> Option<()> {
        check_frame(kind, stream, payload)?;
        let is_idle = stream > self.highest_stream || stream.is_multiple_of(2);
        match kind {
            frame_kind::RST_STREAM | frame_kind::DATA if is_idle => return None,
            frame_kind::RST_STREAM => self.record_aborted(stream),
            _ => {}
        }
        Some(())
    }

    fn apply_server_frame(&mut self, (kind, flags, stream, payload): ReferenceFrame) -> Option<()> {
        let open_block = self.server.open_block.take();
        match header_block(open_block, kind, flags, stream, &payload)? {
            BlockProgress::Whole(block) if block.is_end_stream => {
                self.record_responded(block.stream)
            }
            BlockProgress::Whole(_) => {}
            BlockProgress::Continues(block) => self.server.open_block = Some(block),
            BlockProgress::None => {
                check_frame(kind, stream, &payload)?;
                match kind {
                    frame_kind::DATA if flags & frame_flag::END_STREAM != 0 => {
                        self.record_responded(stream)
                    }
                    frame_kind::RST_STREAM => self.record_aborted(stream),
                    frame_kind::GOAWAY => {
                        let last = u32::from_be_bytes(payload[..4].try_into().ok()?);
                        self.goaway_last = Some(last & 0x7fff_ffff);
                    }
                    _ => {}
                }
            }
        }
        Some(())
    }

    fn record_responded(&mut self, stream: u32) {
        if self.in_flight.remove(&stream) {
            self.events.push(ReferenceEvent::Responded(stream));
        } else {
            self.redundant_ends += 1;
        }
    }

    fn record_aborted(&mut self, stream: u32) {
        if self.in_flight.remove(&stream) {
            self.events.push(ReferenceEvent::Aborted(stream));
        } else {
            self.redundant_ends += 1;
        }
    }
}

/// State of a header block after a frame.
enum BlockProgress {
    /// The frame belongs to no header block.
    None,
    /// The block continues in the next frame.
    Continues(ReferenceHeaderBlock),
    /// The block is complete.
    Whole(ReferenceHeaderBlock),
}

/// Adds a frame to the open block, or begins a block with it (§4.3). No other frame may come inside a block. `None`: an
/// error.
fn header_block(
    open_block: Option<ReferenceHeaderBlock>,
    kind: u8,
    flags: u8,
    stream: u32,
    payload: &[u8],
) -> Option<BlockProgress> {
    let block = match (open_block, kind) {
        (Some(block), frame_kind::CONTINUATION) if block.stream == stream => block,
        (Some(_), _) | (None, frame_kind::CONTINUATION) => return None,
        (None, frame_kind::HEADERS | frame_kind::PUSH_PROMISE) => {
            let is_promise = kind == frame_kind::PUSH_PROMISE;
            let padded = usize::from(flags & frame_flag::PADDED != 0);
            let padding = if padded > 0 { usize::from(*payload.first()?) } else { 0 };
            let fixed = match () {
                () if is_promise => 4,
                () if flags & frame_flag::PRIORITY != 0 => 5,
                () => 0,
            };
            if stream == 0 || padded + padding + fixed > payload.len() {
                return None;
            }
            // PUSH_PROMISE has no END_STREAM: the flag's bit has no meaning there.
            let is_end_stream = !is_promise && flags & frame_flag::END_STREAM != 0;
            ReferenceHeaderBlock { stream, is_end_stream, is_promise }
        }
        (None, _) => return Some(BlockProgress::None),
    };
    Some(match flags & frame_flag::END_HEADERS {
        0 => BlockProgress::Continues(block),
        _ => BlockProgress::Whole(block),
    })
}

/// Checks the size and the stream of a frame (§6). `None`: an error.
fn check_frame(kind: u8, stream: u32, payload: &[u8]) -> Option<()> {
    let has_size = match kind {
        frame_kind::PRIORITY => payload.len() == 5,
        frame_kind::RST_STREAM | frame_kind::WINDOW_UPDATE => payload.len() == 4,
        frame_kind::SETTINGS => payload.len().is_multiple_of(6),
        frame_kind::PING => payload.len() == 8,
        frame_kind::GOAWAY => payload.len() >= 8,
        _ => true,
    };
    (has_size && !is_wrong_stream(kind, stream)).then_some(())
}

/// Returns true if a frame of this type is not permitted on this stream.
fn is_wrong_stream(kind: u8, stream: u32) -> bool {
    match kind {
        frame_kind::SETTINGS | frame_kind::PING | frame_kind::GOAWAY => stream != 0,
        frame_kind::WINDOW_UPDATE | 10.. => false,
        _ => stream == 0,
    }
}

/// Returns true if the first frame is on a [wrong stream](is_wrong_stream). A receiver may detect that before the frame
/// is whole.
fn begins_on_wrong_stream(bytes: &[u8]) -> bool {
    let [_, _, _, kind, _, s0, s1, s2, s3, ..] = bytes else { return false };
    is_wrong_stream(*kind, u32::from_be_bytes([*s0, *s1, *s2, *s3]) & 0x7fff_ffff)
}

/// Removes and returns the first frame, if it is whole.
fn take_frame(bytes: &mut Vec<u8>) -> Option<ReferenceFrame> {
    let [a, b, c, kind, flags, s0, s1, s2, s3, rest @ ..] = &bytes[..] else { return None };
    let len = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    let payload = rest.get(..len)?.to_vec();
    let frame = (*kind, *flags, u32::from_be_bytes([*s0, *s1, *s2, *s3]) & 0x7fff_ffff, payload);
    bytes.drain(..9 + len);
    Some(frame)
}
