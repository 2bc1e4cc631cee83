//! Pure: which requests are in flight, straight from RFC 9113 §5.1: slow, obvious, and written without a look at
//! `common::h2`.

use std::collections::BTreeSet;

use super::frames::{PREFACE, flag, kind};

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Its header block is complete.
    Started(u32),
    /// The server has sent all of its answer.
    Answered(u32),
    /// It ended without that.
    Cut(u32),
}

/// One direction.
#[derive(Clone, Debug, Default)]
struct Side {
    bytes: Vec<u8>,
    /// A header block that goes on in the next frame: its stream, whether that ends with it, and whether it is a promise.
    block: Option<(u32, bool, bool)>,
}

/// A connection.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    client: Side,
    server: Side,
    has_preface: bool,
    newest: u32,
    /// The last stream of a GOAWAY that has come with what is being read.
    goes_away: Option<u32>,
    /// The last stream that the server works on.
    pub last: Option<u32>,
    /// Frames that would have ended a request that had ended already.
    pub late: u64,
    /// Requests in flight.
    pub open: BTreeSet<u32>,
    /// All that happened.
    pub log: Vec<What>,
    /// Somebody has sent what ends the connection (§5.4.1). What is sent after that means nothing.
    pub is_broken: bool,
}

/// A frame: its type, flags, stream and payload.
type Frame = (u8, u8, u32, Vec<u8>);

impl Reference {
    /// Whether the client's preface has come.
    pub fn has_begun(&self) -> bool {
        self.has_preface
    }

    /// The client has sent these bytes, behind those before.
    pub fn client(&mut self, bytes: &[u8]) {
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
            self.is_broken = is_misplaced(&self.client.bytes);
            if self.is_broken {
                return;
            }
            let Some(frame) = next(&mut self.client.bytes) else { return };
            self.is_broken = self.client_frame(frame).is_none();
        }
    }

    /// The server has sent these bytes, behind those before.
    pub fn server(&mut self, bytes: &[u8]) {
        self.server.bytes.extend(bytes);
        while !self.is_broken {
            self.is_broken = is_misplaced(&self.server.bytes);
            if self.is_broken {
                return;
            }
            let Some(frame) = next(&mut self.server.bytes) else { break };
            self.is_broken = self.server_frame(frame).is_none();
        }
        // §6.8: what stands above the last stream was not and will not be acted on.
        if let Some(last) = self.goes_away.take() {
            self.last = Some(last);
            for stream in self.open.split_off(&(last + 1)) {
                self.log.push(What::Cut(stream));
            }
        }
    }

    /// `None`: an error of the connection.
    fn client_frame(&mut self, (kind, flags, stream, payload): Frame) -> Option<()> {
        let block = self.client.block.take();
        let (stream, ends) = match header_block(block, kind, flags, stream, &payload)? {
            Block::Whole(stream, ends, false) => (stream, ends),
            Block::Whole(_, _, true) => return None,
            Block::GoesOn(block) => {
                self.client.block = Some(block);
                return Some(());
            }
            Block::None => return self.other_client_frame(kind, stream, &payload),
        };
        let _the_server_answers_all_the_same = ends;
        if stream > self.newest {
            // §5.1.1: odd, and higher than any before.
            if stream.is_multiple_of(2) {
                return None;
            }
            self.newest = stream;
            // §6.8: ignored.
            if self.last.is_none_or(|last| stream <= last) {
                self.open.insert(stream);
                self.log.push(What::Started(stream));
            }
        }
        Some(())
    }

    fn other_client_frame(&mut self, kind: u8, stream: u32, payload: &[u8]) -> Option<()> {
        check(kind, stream, payload)?;
        let is_idle = stream > self.newest || stream.is_multiple_of(2);
        match kind {
            kind::RST_STREAM | kind::DATA if is_idle => return None,
            kind::RST_STREAM => self.cut(stream),
            kind::PUSH_PROMISE => return None,
            _ => {}
        }
        Some(())
    }

    fn server_frame(&mut self, (kind, flags, stream, payload): Frame) -> Option<()> {
        let block = self.server.block.take();
        match header_block(block, kind, flags, stream, &payload)? {
            Block::Whole(stream, true, false) => self.answered(stream),
            Block::Whole(..) => {}
            Block::GoesOn(block) => self.server.block = Some(block),
            Block::None => {
                check(kind, stream, &payload)?;
                match kind {
                    kind::DATA if flags & flag::END_STREAM != 0 => self.answered(stream),
                    kind::RST_STREAM => self.cut(stream),
                    kind::GOAWAY => {
                        let last = u32::from_be_bytes(payload[..4].try_into().ok()?);
                        self.goes_away = Some(last & 0x7fff_ffff);
                    }
                    _ => {}
                }
            }
        }
        Some(())
    }

    fn answered(&mut self, stream: u32) {
        if self.open.remove(&stream) {
            self.log.push(What::Answered(stream));
        } else {
            self.late += 1;
        }
    }

    fn cut(&mut self, stream: u32) {
        if self.open.remove(&stream) {
            self.log.push(What::Cut(stream));
        } else {
            self.late += 1;
        }
    }
}

/// What a frame means for header blocks.
enum Block {
    /// Nothing.
    None,
    /// One goes on in the next frame.
    GoesOn((u32, bool, bool)),
    /// One is complete: its stream, whether that ends with it, and whether it is a promise.
    Whole(u32, bool, bool),
}

/// §4.3: a header block is one frame and any number of CONTINUATIONs, with nothing between. `None`: an error.
fn header_block(
    before: Option<(u32, bool, bool)>,
    kind: u8,
    flags: u8,
    stream: u32,
    payload: &[u8],
) -> Option<Block> {
    let block = match (before, kind) {
        (Some(block), kind::CONTINUATION) if block.0 == stream => block,
        (Some(_), _) | (None, kind::CONTINUATION) => return None,
        (None, kind::HEADERS | kind::PUSH_PROMISE) => {
            let is_promise = kind == kind::PUSH_PROMISE;
            let padded = usize::from(flags & flag::PADDED != 0);
            let padding = if padded > 0 { usize::from(*payload.first()?) } else { 0 };
            let fixed = match () {
                () if is_promise => 4,
                () if flags & flag::PRIORITY != 0 => 5,
                () => 0,
            };
            if stream == 0 || padded + padding + fixed > payload.len() {
                return None;
            }
            (stream, !is_promise && flags & flag::END_STREAM != 0, is_promise)
        }
        (None, _) => return Some(Block::None),
    };
    Some(match flags & flag::END_HEADERS {
        0 => Block::GoesOn(block),
        _ => Block::Whole(block.0, block.1, block.2),
    })
}

/// §6: sizes, and whose frame it is. `None`: an error.
fn check(kind: u8, stream: u32, payload: &[u8]) -> Option<()> {
    let has_size = match kind {
        kind::PRIORITY => payload.len() == 5,
        kind::RST_STREAM | kind::WINDOW_UPDATE => payload.len() == 4,
        kind::SETTINGS => payload.len().is_multiple_of(6),
        kind::PING => payload.len() == 8,
        kind::GOAWAY => payload.len() >= 8,
        _ => true,
    };
    (has_size && !is_astray(kind, stream)).then_some(())
}

/// Whether a frame of this type may not be on this stream.
fn is_astray(kind: u8, stream: u32) -> bool {
    match kind {
        kind::SETTINGS | kind::PING | kind::GOAWAY => stream != 0,
        kind::WINDOW_UPDATE | 10.. => false,
        _ => stream == 0,
    }
}

/// Whether the frame at the front is [astray](is_astray), which its receiver may tell before the frame is whole.
fn is_misplaced(bytes: &[u8]) -> bool {
    let [_, _, _, kind, _, s0, s1, s2, s3, ..] = bytes else { return false };
    is_astray(*kind, u32::from_be_bytes([*s0, *s1, *s2, *s3]) & 0x7fff_ffff)
}

/// Takes the next whole frame off the front.
fn next(bytes: &mut Vec<u8>) -> Option<Frame> {
    let [a, b, c, kind, flags, s0, s1, s2, s3, rest @ ..] = &bytes[..] else { return None };
    let len = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    let payload = rest.get(..len)?.to_vec();
    let frame = (*kind, *flags, u32::from_be_bytes([*s0, *s1, *s2, *s3]) & 0x7fff_ffff, payload);
    bytes.drain(..9 + len);
    Some(frame)
}
