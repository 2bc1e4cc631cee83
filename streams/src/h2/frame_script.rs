//! Pure: generates conversations frame by frame, with sequences that no implementation of HTTP/2 sends.
//!
//! A conversation is a text of turns: `>` or `<` for the sender, the number of bytes (in two bytes), and the bytes.

use super::frames::{PREFACE, encode_frame, frame_flag, frame_kind};
use crate::rng::SeededRng;

/// GET and POST of `/` with a host, in HPACK (RFC 7541).
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x41, 1, b'a'];
const POST: &[u8] = &[0x83, 0x86, 0x84, 0x01, 1, b'a', 0x00, 1, b'x', 1, b'y'];
/// CONNECT to another protocol (RFC 8441 §4).
const CONNECT: &[u8] = b"\x02\x07CONNECT\x87\x84\x41\x01a\x00\x09:protocol\x09websocket";
/// Header block of trailers.
const TRAILERS: &[u8] = &[0x00, 1, b'x', 1, b'y'];
/// Status headers in HPACK: an interim response, and final ones.
const INTERIM: &[u8] = &[0x08, 3, b'1', b'0', b'3'];
const RESPONSE_HEADS: [&[u8]; 8] = [
    &[0x88],
    &[0x88],
    &[0x89],
    &[0x8b],
    &[0x8d],
    &[0x8e],
    &[0x08, 3, b'4', b'2', b'9'],
    &[
        0x88, 0x00, 12, b'c', b'o', b'n', b't', b'e', b'n', b't', b'-', b't', b'y', b'p', b'e', 1,
        b'x',
    ],
];

/// Side that sends a turn of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnSender {
    Client,
    Server,
}

/// State of a stream, as both sides know it.
#[derive(Clone, Copy, Debug)]
struct ScriptedStream {
    id: u32,
    client_is_done: bool,
    has_head: bool,
    server_is_done: bool,
}

/// Generates a conversation, turn by turn.
struct FrameScriptWriter<'a> {
    rng: &'a mut SeededRng,
    turns: Vec<(TurnSender, Vec<u8>)>,
    streams: Vec<ScriptedStream>,
    next_stream: u32,
    next_push: u32,
    /// Upper bound of streams that are open at once.
    max_open: usize,
    /// True if streams that have ended are reset later.
    resets_ended: bool,
}

/// Generates a conversation; in a third of them something is broken.
pub fn generate_conversation(rng: &mut SeededRng) -> Vec<u8> {
    let mut out = generate_whole_conversation(rng);
    if rng.next_bool(30) {
        let at = rng.next_below(out.len());
        out[at] ^= 1 << rng.next_below(8);
    }
    out
}

/// Generates a conversation in which nothing is broken.
pub fn generate_whole_conversation(rng: &mut SeededRng) -> Vec<u8> {
    let mut out = Vec::new();
    let with_server = true;
    for (sender, bytes) in &generate_turns(with_server, rng) {
        for piece in bytes.chunks(usize::from(u16::MAX)) {
            out.push(if *sender == TurnSender::Server { b'<' } else { b'>' });
            out.extend((piece.len() as u16).to_be_bytes());
            out.extend(piece);
        }
    }
    out
}

/// Generates the frames of a client that ignores the server's responses; in a third of them something is broken.
pub fn generate_requests(rng: &mut SeededRng) -> Vec<u8> {
    let with_server = false;
    let turns = generate_turns(with_server, rng);
    let mut out: Vec<u8> = turns.into_iter().flat_map(|(_, bytes)| bytes).collect();
    if rng.next_bool(30) {
        let at = rng.next_below(out.len());
        out[at] ^= 1 << rng.next_below(8);
    }
    out
}

fn generate_turns(with_server: bool, rng: &mut SeededRng) -> Vec<(TurnSender, Vec<u8>)> {
    let max_open = *rng.pick(&[&1, &4, &4, &4, &20, &20, &20, &20, &100, &100, &300, &600]);
    let resets_ended = max_open <= 100 || rng.next_bool(30);
    let turns = vec![(TurnSender::Client, PREFACE.to_vec())];
    let mut writer = FrameScriptWriter {
        rng,
        turns,
        streams: Vec::new(),
        next_stream: 1,
        next_push: 2,
        max_open,
        resets_ended,
    };
    writer.client(frame_kind::SETTINGS, 0, 0, &[]);
    if with_server {
        writer.server(frame_kind::SETTINGS, 0, 0, &[0, 3, 0, 0, 4, 0]);
    }
    if writer.rng.next_bool(1) {
        writer.max_open = 600;
        writer.resets_ended = writer.rng.next_bool(20);
        // Nearly as many as the table of streams has places, or more.
        let more = if writer.rng.next_bool(60) { 30 } else { 300 };
        for _ in 0..210 + writer.rng.next_below(more) {
            writer.open_request();
        }
    }
    let steps = 10 + writer.rng.next_length(if max_open > 100 { 2_500 } else { 150 });
    for _ in 0..steps {
        if with_server && writer.rng.next_bool(45) {
            writer.server_step();
        } else {
            writer.client_step();
        }
    }
    writer.turns
}

impl FrameScriptWriter<'_> {
    fn client(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.turns.push((TurnSender::Client, encode_frame(kind, flags, stream, payload)));
    }

    fn server(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.turns.push((TurnSender::Server, encode_frame(kind, flags, stream, payload)));
    }

    fn client_step(&mut self) {
        let open = self.streams.iter().filter(|it| !it.server_is_done).count();
        match self.rng.next_below(20) {
            0..9 if open < self.max_open => self.open_request(),
            0..14 => self.client_data(),
            14 => {
                let Some(stream) = self.stream_to_reset() else { return };
                self.streams.retain(|it| it.id != stream.id);
                self.client(frame_kind::RST_STREAM, 0, stream.id, &8_u32.to_be_bytes());
            }
            15 => self.client(frame_kind::PRIORITY, 0, self.next_stream + 2, &[0, 0, 0, 0, 9]),
            16 => self.client(frame_kind::WINDOW_UPDATE, 0, 0, &[0, 0, 9, 9]),
            17 => self.client(frame_kind::PING, 0, 0, &[7; 8]),
            18 => self.client(frame_kind::SETTINGS, frame_flag::ACK, 0, &[]),
            _ => {
                let len = self.rng.next_length(300);
                let (flags, stream) = (self.rng.next_u64() as u8, self.rng.next_below(40) as u32);
                self.client(0xfa, flags, stream, &vec![0xff; len]);
            }
        }
    }

    /// Opens a request; sometimes its stream is not the next one.
    fn open_request(&mut self) {
        let id = self.next_stream
            + if self.rng.next_bool(5) { 2 * self.rng.next_below(300) as u32 } else { 0 };
        self.next_stream = id + 2;
        let client_is_done = self.rng.next_bool(60);
        let block = match client_is_done {
            true => GET,
            false if self.rng.next_bool(20) => CONNECT,
            false => POST,
        };
        self.send_header_block(TurnSender::Client, id, block, client_is_done);
        let (has_head, server_is_done) = (false, false);
        self.streams.push(ScriptedStream { id, client_is_done, has_head, server_is_done });
    }

    fn client_data(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.client_is_done) else { return };
        let is_end_stream = self.rng.next_bool(40);
        if is_end_stream && self.rng.next_bool(30) {
            self.send_header_block(TurnSender::Client, stream.id, TRAILERS, true);
        } else {
            let (flags, payload) = self.data(is_end_stream, 60);
            self.client(frame_kind::DATA, flags, stream.id, &payload);
        }
        self.update_stream(stream.id, |it| it.client_is_done |= is_end_stream);
    }

    fn server_step(&mut self) {
        match self.rng.next_below(20) {
            0..12 => self.respond(),
            12 | 13 => self.push(),
            14 => {
                let Some(stream) = self.stream_to_reset() else { return };
                self.streams.retain(|it| it.id != stream.id);
                self.server(frame_kind::RST_STREAM, 0, stream.id, &[0; 4]);
            }
            15 => self.server(frame_kind::WINDOW_UPDATE, 0, 0, &[0, 0, 9, 9]),
            16 => self.server(frame_kind::PING, frame_flag::ACK, 0, &[7; 8]),
            17 if self.rng.next_bool(10) => {
                let all = self.rng.next_bool(30);
                let last = if all {
                    0x7fff_ffff
                } else {
                    self.rng.next_below(self.next_stream as usize) as u32
                };
                self.server(frame_kind::GOAWAY, 0, 0, &[last.to_be_bytes(), [0; 4]].concat());
                self.streams.retain(|it| it.id <= last);
            }
            17 | 18 => self.server(frame_kind::SETTINGS, frame_flag::ACK, 0, &[]),
            _ => {
                let len = self.rng.next_length(300);
                let stream = self.rng.next_below(40) as u32;
                self.server(0x55, 0xff, stream, &vec![1; len]);
            }
        }
    }

    /// Chooses a stream to reset; with `resets_ended`, its response may have ended already.
    fn stream_to_reset(&mut self) -> Option<ScriptedStream> {
        if self.resets_ended {
            self.any_stream(|_| true)
        } else {
            self.any_stream(|it| !it.server_is_done)
        }
    }

    fn respond(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.server_is_done) else { return };
        let is_end_stream = self.rng.next_bool(40);
        if !stream.has_head {
            if self.rng.next_bool(10) {
                return self.send_header_block(TurnSender::Server, stream.id, INTERIM, false);
            }
            let block = self.rng.pick(&RESPONSE_HEADS);
            self.send_header_block(TurnSender::Server, stream.id, block, is_end_stream);
        } else if is_end_stream && self.rng.next_bool(30) {
            self.send_header_block(TurnSender::Server, stream.id, TRAILERS, true);
        } else {
            let (flags, payload) = self.data(is_end_stream, 40_000);
            self.server(frame_kind::DATA, flags, stream.id, &payload);
        }
        self.update_stream(stream.id, |stream| {
            stream.has_head = true;
            stream.server_is_done |= is_end_stream;
        });
    }

    /// Sends a promise and the promised response.
    fn push(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.server_is_done) else { return };
        let id = self.next_push;
        self.next_push += 2;
        let promise = [&id.to_be_bytes()[..], GET].concat();
        self.server(frame_kind::PUSH_PROMISE, frame_flag::END_HEADERS, stream.id, &promise);
        let is_end_stream = self.rng.next_bool(50);
        self.send_header_block(TurnSender::Server, id, &[0x88], is_end_stream);
        if !is_end_stream {
            let (flags, payload) = self.data(true, 100);
            self.server(frame_kind::DATA, flags, id, &payload);
        }
    }

    /// Sends a header block in one frame or several, with or without padding and priority.
    fn send_header_block(
        &mut self,
        sender: TurnSender,
        stream: u32,
        block: &[u8],
        is_end_stream: bool,
    ) {
        let mut flags = if is_end_stream { frame_flag::END_STREAM } else { 0 };
        let mut payload = Vec::new();
        let first =
            if self.rng.next_bool(85) { block.len() } else { self.rng.next_below(block.len() + 1) };
        let padding = if self.rng.next_bool(10) { self.rng.next_below(40) } else { 0 };
        if padding > 0 || self.rng.next_bool(3) {
            flags |= frame_flag::PADDED;
            payload.push(padding as u8);
        }
        if sender == TurnSender::Client && self.rng.next_bool(10) {
            flags |= frame_flag::PRIORITY;
            payload.extend([0x80, 0, 0, 0, 16]);
        }
        payload.extend(&block[..first]);
        payload.extend(std::iter::repeat_n(0, padding));
        let mut rest = &block[first..];
        let mut last = rest.is_empty() && self.rng.next_bool(95);
        let end = |last: bool| if last { frame_flag::END_HEADERS } else { 0 };
        self.turns
            .push((sender, encode_frame(frame_kind::HEADERS, flags | end(last), stream, &payload)));
        while !last {
            let (piece, more) = rest.split_at(self.rng.next_below(rest.len() + 1));
            last = more.is_empty() && self.rng.next_bool(70);
            self.turns
                .push((sender, encode_frame(frame_kind::CONTINUATION, end(last), stream, piece)));
            rest = more;
        }
    }

    fn data(&mut self, is_end_stream: bool, max_count: usize) -> (u8, Vec<u8>) {
        let mut flags = if is_end_stream { frame_flag::END_STREAM } else { 0 };
        let mut payload = Vec::new();
        let padding = if self.rng.next_bool(10) { self.rng.next_below(200) } else { 0 };
        if padding > 0 {
            flags |= frame_flag::PADDED;
            payload.push(padding as u8);
        }
        // The body looks like frames, to catch a parser that has lost a boundary.
        let fake = encode_frame(
            frame_kind::HEADERS,
            frame_flag::END_STREAM | frame_flag::END_HEADERS,
            1_000_001,
            GET,
        );
        let len = self.rng.next_length(max_count.min(16_000));
        payload.extend(fake.iter().cycle().take(len));
        payload.extend(std::iter::repeat_n(0, padding));
        (flags, payload)
    }

    fn any_stream(&mut self, is_wanted: fn(&ScriptedStream) -> bool) -> Option<ScriptedStream> {
        let some: Vec<ScriptedStream> =
            self.streams.iter().filter(|it| is_wanted(it)).copied().collect();
        if some.is_empty() { None } else { Some(some[self.rng.next_below(some.len())]) }
    }

    fn update_stream(&mut self, id: u32, change: impl Fn(&mut ScriptedStream)) {
        self.streams.iter_mut().filter(|it| it.id == id).for_each(change);
        // Some ended streams are kept, to be reset late.
        let keeps = self.rng.next_bool(30);
        self.streams.retain(|it| keeps || !it.client_is_done || !it.server_is_done);
    }
}
