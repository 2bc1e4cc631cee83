//! Pure: conversations written frame by frame, with sequences that no implementation of HTTP/2 sends.
//!
//! A conversation is a text of turns: `>` or `<` for the sender, the number of bytes (in two bytes), and the bytes.

use super::{
    EventComparison,
    frames::{PREFACE, encode_frame, frame_flag, frame_kind},
    reference::{Http2Reference, ReferenceEvent},
};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// GET and POST of `/` with a host, and a trailer, in HPACK (RFC 7541).
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x41, 1, b'a'];
const POST: &[u8] = &[0x83, 0x86, 0x84, 0x01, 1, b'a', 0x00, 1, b'x', 1, b'y'];
/// CONNECT to another protocol (RFC 8441 §4).
const CONNECT: &[u8] = b"\x02\x07CONNECT\x87\x84\x41\x01a\x00\x09:protocol\x09websocket";
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
    turns: Vec<(bool, Vec<u8>)>,
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
    for (is_server, bytes) in &generate_turns(true, rng) {
        for piece in bytes.chunks(usize::from(u16::MAX)) {
            out.push(if *is_server { b'<' } else { b'>' });
            out.extend((piece.len() as u16).to_be_bytes());
            out.extend(piece);
        }
    }
    out
}

/// Generates the frames of a client that ignores the server's responses; in a third of them something is broken.
pub fn generate_requests(rng: &mut SeededRng) -> Vec<u8> {
    let mut out: Vec<u8> =
        generate_turns(false, rng).into_iter().flat_map(|(_, bytes)| bytes).collect();
    if rng.next_bool(30) {
        let at = rng.next_below(out.len());
        out[at] ^= 1 << rng.next_below(8);
    }
    out
}

fn generate_turns(with_server: bool, rng: &mut SeededRng) -> Vec<(bool, Vec<u8>)> {
    let most = *rng.pick(&[&1, &4, &4, &4, &20, &20, &20, &20, &100, &100, &300, &600]);
    let has_late = most <= 100 || rng.next_bool(30);
    let turns = vec![(false, PREFACE.to_vec())];
    let mut writer = FrameScriptWriter {
        rng,
        turns,
        streams: Vec::new(),
        next_stream: 1,
        next_push: 2,
        max_open: most,
        resets_ended: has_late,
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
    let steps = 10 + writer.rng.next_length(if most > 100 { 2_500 } else { 150 });
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
        self.turns.push((false, encode_frame(kind, flags, stream, payload)));
    }

    fn server(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.turns.push((true, encode_frame(kind, flags, stream, payload)));
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
        self.send_header_block(false, id, block, client_is_done);
        let (has_head, server_is_done) = (false, false);
        self.streams.push(ScriptedStream { id, client_is_done, has_head, server_is_done });
    }

    fn client_data(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.client_is_done) else { return };
        let is_end_stream = self.rng.next_bool(40);
        if is_end_stream && self.rng.next_bool(30) {
            self.send_header_block(false, stream.id, TRAILERS, true);
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

    /// Chooses a stream to reset; with `has_late`, its response may have ended already.
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
                return self.send_header_block(true, stream.id, INTERIM, false);
            }
            let block = self.rng.pick(&RESPONSE_HEADS);
            self.send_header_block(true, stream.id, block, is_end_stream);
        } else if is_end_stream && self.rng.next_bool(30) {
            self.send_header_block(true, stream.id, TRAILERS, true);
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
        self.send_header_block(true, id, &[0x88], is_end_stream);
        if !is_end_stream {
            let (flags, payload) = self.data(true, 100);
            self.server(frame_kind::DATA, flags, id, &payload);
        }
    }

    /// Sends a header block in one frame or several, with or without padding and priority.
    fn send_header_block(
        &mut self,
        is_server: bool,
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
        if !is_server && self.rng.next_bool(10) {
            flags |= frame_flag::PRIORITY;
            payload.extend([0x80, 0, 0, 0, 16]);
        }
        payload.extend(&block[..first]);
        payload.extend(std::iter::repeat_n(0, padding));
        let mut rest = &block[first..];
        let mut last = rest.is_empty() && self.rng.next_bool(95);
        let end = |last: bool| if last { frame_flag::END_HEADERS } else { 0 };
        self.turns.push((
            is_server,
            encode_frame(frame_kind::HEADERS, flags | end(last), stream, &payload),
        ));
        while !last {
            let (piece, more) = rest.split_at(self.rng.next_below(rest.len() + 1));
            last = more.is_empty() && self.rng.next_bool(70);
            self.turns.push((
                is_server,
                encode_frame(frame_kind::CONTINUATION, end(last), stream, piece),
            ));
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

/// Parses the turns of a conversation, as far as they are whole.
fn parse_turns(mut text: &[u8]) -> Vec<(bool, &[u8])> {
    let mut turns = Vec::new();
    while let [who, high, low, rest @ ..] = text {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (bytes, more) = rest.split_at(len);
        turns.push((*who == b'<', bytes));
        text = more;
    }
    turns
}

/// Plays a conversation, cut by `rng`. The error describes the difference between model and reference.
pub fn play(conversation: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let turns = parse_turns(conversation);
    let (mut model, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let mut comparison = EventComparison::default();
    let (mut requests, mut responses) = (0, 0);
    for burst in turns.chunk_by(|one, other| one.0 == other.0) {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 {
            for segment in segmentation::split(0, bytes.len(), rng) {
                model.response_segment(responses + segment.start, &bytes[segment.clone()]);
                reference.receive_server(&bytes[segment]);
                compare(&mut comparison, &model, &reference, false)?;
            }
            responses += bytes.len();
        } else {
            let mut received = ReceivedRanges::default();
            for segment in segmentation::arrival_order(bytes.len(), rng) {
                model.request_segment(requests + segment.start, &bytes[segment.clone()]);
                reference.receive_client(&bytes[received.add_segment(&segment)]);
                compare(&mut comparison, &model, &reference, received.has_gap())?;
            }
            requests += bytes.len();
        }
    }
    model.close(true);
    Ok(comparison.totals(comparison.responded(), reference.is_broken))
}

fn compare(
    comparison: &mut EventComparison,
    model: &EbpfModel,
    reference: &Http2Reference,
    has_gap: bool,
) -> Result<(), String> {
    comparison.has_had_gap |= has_gap;
    // Bytes behind an error have no meaning, and before the preface the protocol is not known.
    if has_gap || reference.is_broken || !reference.has_begun() {
        return Ok(());
    }
    comparison.compare(model, reference).map_err(|what| {
        format!("{what}\n  events {:?}\n  reference {:?}", model.events(), reference.events)
    })
}

/// Plays a conversation in which whole bursts of the client's bytes are lost; the server's responses must still be
/// counted. The error describes the difference.
pub fn play_with_losses(
    conversation: &[u8],
    rng: &mut SeededRng,
) -> Result<ConformanceTotals, String> {
    let turns = parse_turns(conversation);
    let (mut model, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let (mut requests, mut responses) = (0, 0);
    for (index, burst) in turns.chunk_by(|one, other| one.0 == other.0).enumerate() {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 {
            model.response_segment(responses, &bytes);
            reference.receive_server(&bytes);
            responses += bytes.len();
            continue;
        }
        // Nothing is lost before the protocol is known.
        if index > 1 && model.is_http2() && rng.next_bool(30) {
            model.desync_requests();
            model.skip_request(requests, bytes.len());
        } else {
            // One frame per segment, as clients write them.
            let mut at = requests;
            for (_, frame) in burst {
                model.request_segment(at, frame);
                at += frame.len();
            }
        }
        reference.receive_client(&bytes);
        requests += bytes.len();
    }
    model.close(true);
    let responded = |it: &&ModelEvent| matches!(it, ModelEvent::Responded(..));
    let (model_responses, reference_responses) = (
        model.events().iter().filter(responded).count(),
        reference.events.iter().filter(|it| matches!(it, ReferenceEvent::Responded(_))).count(),
    );
    // The server may respond to streams that were reset unseen, left out by a GOAWAY or never opened; the reference
    // does not count these.
    let is_plain = !reference.events.iter().any(|it| matches!(it, ReferenceEvent::Aborted(_)));
    let is_whole =
        !reference.is_broken && reference.last_processed.is_none() && !model.has_untracked();
    if is_plain && is_whole && model_responses < reference_responses {
        let log = &reference.events;
        return Err(format!(
            "{model_responses} responses, not {reference_responses}\n  {:?}\n  {log:?}",
            model.events()
        ));
    }
    let is_compared = is_plain && is_whole;
    let has_lost = model.events().contains(&ModelEvent::Desync);
    Ok(ConformanceTotals {
        requests: if is_compared && has_lost { reference_responses as u64 } else { 0 },
        refused: u64::from(reference.is_broken),
        not_compared: u64::from(!is_compared),
        crowded: 0,
    })
}
