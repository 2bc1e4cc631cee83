//! Pure: conversations written frame by frame, with sequences that no library ever sends.
//!
//! A conversation is a text of turns: `>` or `<` for the sender, the number of bytes (in two bytes), and the bytes.

use super::{
    EventComparison,
    frames::{PREFACE, flag, frame, kind},
    reference::{Http2Reference, ReferenceEvent},
};
use crate::{
    ConformanceTotals,
    dice::SeededRng,
    segments::{self, ReceivedRanges},
    tap::{EbpfModel, ModelEvent},
};

/// GET and POST of `/` with a host, and a trailer, in HPACK (RFC 7541).
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x41, 1, b'a'];
const POST: &[u8] = &[0x83, 0x86, 0x84, 0x01, 1, b'a', 0x00, 1, b'x', 1, b'y'];
/// CONNECT to another protocol (RFC 8441 §4).
const CONNECT: &[u8] = b"\x02\x07CONNECT\x87\x84\x41\x01a\x00\x09:protocol\x09websocket";
const TRAILERS: &[u8] = &[0x00, 1, b'x', 1, b'y'];
/// Status headers in HPACK: an interim response, and final ones.
const INTERIM: &[u8] = &[0x08, 3, b'1', b'0', b'3'];
const ANSWERS: [&[u8]; 8] = [
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
    dice: &'a mut SeededRng,
    turns: Vec<(bool, Vec<u8>)>,
    streams: Vec<ScriptedStream>,
    next: u32,
    pushed: u32,
    /// Upper bound of streams that are open at once.
    most: usize,
    /// True if streams that have ended are reset later.
    has_late: bool,
}

/// Generates a conversation; in a third of them something is broken.
pub fn conversation(dice: &mut SeededRng) -> Vec<u8> {
    let mut out = whole_conversation(dice);
    if dice.chance(30) {
        let at = dice.below(out.len());
        out[at] ^= 1 << dice.below(8);
    }
    out
}

/// Generates a conversation in which nothing is broken.
pub fn whole_conversation(dice: &mut SeededRng) -> Vec<u8> {
    let mut out = Vec::new();
    for (is_server, bytes) in &turns(true, dice) {
        for piece in bytes.chunks(usize::from(u16::MAX)) {
            out.push(if *is_server { b'<' } else { b'>' });
            out.extend((piece.len() as u16).to_be_bytes());
            out.extend(piece);
        }
    }
    out
}

/// Generates the frames of a client that ignores the server's responses; in a third of them something is broken.
pub fn requests(dice: &mut SeededRng) -> Vec<u8> {
    let mut out: Vec<u8> = turns(false, dice).into_iter().flat_map(|(_, bytes)| bytes).collect();
    if dice.chance(30) {
        let at = dice.below(out.len());
        out[at] ^= 1 << dice.below(8);
    }
    out
}

fn turns(with_server: bool, dice: &mut SeededRng) -> Vec<(bool, Vec<u8>)> {
    let most = *dice.pick(&[&1, &4, &4, &4, &20, &20, &20, &20, &100, &100, &300, &600]);
    let has_late = most <= 100 || dice.chance(30);
    let turns = vec![(false, PREFACE.to_vec())];
    let mut writer =
        FrameScriptWriter { dice, turns, streams: Vec::new(), next: 1, pushed: 2, most, has_late };
    writer.client(kind::SETTINGS, 0, 0, &[]);
    if with_server {
        writer.server(kind::SETTINGS, 0, 0, &[0, 3, 0, 0, 4, 0]);
    }
    if writer.dice.chance(1) {
        writer.most = 600;
        writer.has_late = writer.dice.chance(20);
        // Nearly as many as the table of streams has places, or more.
        let more = if writer.dice.chance(60) { 30 } else { 300 };
        for _ in 0..210 + writer.dice.below(more) {
            writer.ask();
        }
    }
    let steps = 10 + writer.dice.length(if most > 100 { 2_500 } else { 150 });
    for _ in 0..steps {
        if with_server && writer.dice.chance(45) {
            writer.server_step();
        } else {
            writer.client_step();
        }
    }
    writer.turns
}

impl FrameScriptWriter<'_> {
    fn client(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.turns.push((false, frame(kind, flags, stream, payload)));
    }

    fn server(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.turns.push((true, frame(kind, flags, stream, payload)));
    }

    fn client_step(&mut self) {
        let open = self.streams.iter().filter(|it| !it.server_is_done).count();
        match self.dice.below(20) {
            0..9 if open < self.most => self.ask(),
            0..14 => self.client_data(),
            14 => {
                let Some(stream) = self.stream_to_reset() else { return };
                self.streams.retain(|it| it.id != stream.id);
                self.client(kind::RST_STREAM, 0, stream.id, &8_u32.to_be_bytes());
            }
            15 => self.client(kind::PRIORITY, 0, self.next + 2, &[0, 0, 0, 0, 9]),
            16 => self.client(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 9, 9]),
            17 => self.client(kind::PING, 0, 0, &[7; 8]),
            18 => self.client(kind::SETTINGS, flag::ACK, 0, &[]),
            _ => {
                let len = self.dice.length(300);
                let (flags, stream) = (self.dice.any() as u8, self.dice.below(40) as u32);
                self.client(0xfa, flags, stream, &vec![0xff; len]);
            }
        }
    }

    /// Opens a request; sometimes its stream is not the next one.
    fn ask(&mut self) {
        let id = self.next + if self.dice.chance(5) { 2 * self.dice.below(300) as u32 } else { 0 };
        self.next = id + 2;
        let client_is_done = self.dice.chance(60);
        let block = match client_is_done {
            true => GET,
            false if self.dice.chance(20) => CONNECT,
            false => POST,
        };
        self.head(false, id, block, client_is_done);
        let (has_head, server_is_done) = (false, false);
        self.streams.push(ScriptedStream { id, client_is_done, has_head, server_is_done });
    }

    fn client_data(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.client_is_done) else { return };
        let ends = self.dice.chance(40);
        if ends && self.dice.chance(30) {
            self.head(false, stream.id, TRAILERS, true);
        } else {
            let (flags, payload) = self.data(ends, 60);
            self.client(kind::DATA, flags, stream.id, &payload);
        }
        self.change(stream.id, |it| it.client_is_done |= ends);
    }

    fn server_step(&mut self) {
        match self.dice.below(20) {
            0..12 => self.answer(),
            12 | 13 => self.push(),
            14 => {
                let Some(stream) = self.stream_to_reset() else { return };
                self.streams.retain(|it| it.id != stream.id);
                self.server(kind::RST_STREAM, 0, stream.id, &[0; 4]);
            }
            15 => self.server(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 9, 9]),
            16 => self.server(kind::PING, flag::ACK, 0, &[7; 8]),
            17 if self.dice.chance(10) => {
                let all = self.dice.chance(30);
                let last =
                    if all { 0x7fff_ffff } else { self.dice.below(self.next as usize) as u32 };
                self.server(kind::GOAWAY, 0, 0, &[last.to_be_bytes(), [0; 4]].concat());
                self.streams.retain(|it| it.id <= last);
            }
            17 | 18 => self.server(kind::SETTINGS, flag::ACK, 0, &[]),
            _ => {
                let len = self.dice.length(300);
                let stream = self.dice.below(40) as u32;
                self.server(0x55, 0xff, stream, &vec![1; len]);
            }
        }
    }

    /// Chooses a stream to reset; with `has_late`, its response may have ended already.
    fn stream_to_reset(&mut self) -> Option<ScriptedStream> {
        if self.has_late {
            self.any_stream(|_| true)
        } else {
            self.any_stream(|it| !it.server_is_done)
        }
    }

    fn answer(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.server_is_done) else { return };
        let ends = self.dice.chance(40);
        if !stream.has_head {
            if self.dice.chance(10) {
                return self.head(true, stream.id, INTERIM, false);
            }
            let block = self.dice.pick(&ANSWERS);
            self.head(true, stream.id, block, ends);
        } else if ends && self.dice.chance(30) {
            self.head(true, stream.id, TRAILERS, true);
        } else {
            let (flags, payload) = self.data(ends, 40_000);
            self.server(kind::DATA, flags, stream.id, &payload);
        }
        self.change(stream.id, |it| {
            it.has_head = true;
            it.server_is_done |= ends;
        });
    }

    /// Sends a promise and the promised response.
    fn push(&mut self) {
        let Some(stream) = self.any_stream(|it| !it.server_is_done) else { return };
        let id = self.pushed;
        self.pushed += 2;
        let promise = [&id.to_be_bytes()[..], GET].concat();
        self.server(kind::PUSH_PROMISE, flag::END_HEADERS, stream.id, &promise);
        let ends = self.dice.chance(50);
        self.head(true, id, &[0x88], ends);
        if !ends {
            let (flags, payload) = self.data(true, 100);
            self.server(kind::DATA, flags, id, &payload);
        }
    }

    /// Sends a header block in one frame or several, with or without padding and priority.
    fn head(&mut self, is_server: bool, stream: u32, block: &[u8], ends: bool) {
        let mut flags = if ends { flag::END_STREAM } else { 0 };
        let mut payload = Vec::new();
        let first =
            if self.dice.chance(85) { block.len() } else { self.dice.below(block.len() + 1) };
        let padding = if self.dice.chance(10) { self.dice.below(40) } else { 0 };
        if padding > 0 || self.dice.chance(3) {
            flags |= flag::PADDED;
            payload.push(padding as u8);
        }
        if !is_server && self.dice.chance(10) {
            flags |= flag::PRIORITY;
            payload.extend([0x80, 0, 0, 0, 16]);
        }
        payload.extend(&block[..first]);
        payload.extend(std::iter::repeat_n(0, padding));
        let mut rest = &block[first..];
        let mut last = rest.is_empty() && self.dice.chance(95);
        let end = |last: bool| if last { flag::END_HEADERS } else { 0 };
        self.turns.push((is_server, frame(kind::HEADERS, flags | end(last), stream, &payload)));
        while !last {
            let (piece, more) = rest.split_at(self.dice.below(rest.len() + 1));
            last = more.is_empty() && self.dice.chance(70);
            self.turns.push((is_server, frame(kind::CONTINUATION, end(last), stream, piece)));
            rest = more;
        }
    }

    fn data(&mut self, ends: bool, most: usize) -> (u8, Vec<u8>) {
        let mut flags = if ends { flag::END_STREAM } else { 0 };
        let mut payload = Vec::new();
        let padding = if self.dice.chance(10) { self.dice.below(200) } else { 0 };
        if padding > 0 {
            flags |= flag::PADDED;
            payload.push(padding as u8);
        }
        // The body looks like frames, to catch a parser that has lost a boundary.
        let fake = frame(kind::HEADERS, flag::END_STREAM | flag::END_HEADERS, 1_000_001, GET);
        let len = self.dice.length(most.min(16_000));
        payload.extend(fake.iter().cycle().take(len));
        payload.extend(std::iter::repeat_n(0, padding));
        (flags, payload)
    }

    fn any_stream(&mut self, wanted: fn(&ScriptedStream) -> bool) -> Option<ScriptedStream> {
        let some: Vec<ScriptedStream> =
            self.streams.iter().filter(|it| wanted(it)).copied().collect();
        if some.is_empty() { None } else { Some(some[self.dice.below(some.len())]) }
    }

    fn change(&mut self, id: u32, change: impl Fn(&mut ScriptedStream)) {
        self.streams.iter_mut().filter(|it| it.id == id).for_each(change);
        // Some ended streams are kept, to be reset late.
        let keeps = self.dice.chance(30);
        self.streams.retain(|it| keeps || !it.client_is_done || !it.server_is_done);
    }
}

/// Parses the turns of a conversation, as far as they are whole.
fn parsed(mut text: &[u8]) -> Vec<(bool, &[u8])> {
    let mut turns = Vec::new();
    while let [who, high, low, rest @ ..] = text {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (bytes, more) = rest.split_at(len);
        turns.push((*who == b'<', bytes));
        text = more;
    }
    turns
}

/// Plays a conversation, cut by `dice`. The error describes the difference between model and reference.
pub fn play(conversation: &[u8], dice: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let turns = parsed(conversation);
    let (mut tap, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let mut comparison = EventComparison::default();
    let (mut requests, mut answers) = (0, 0);
    for burst in turns.chunk_by(|one, other| one.0 == other.0) {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 {
            for segment in segments::cut(0, bytes.len(), dice) {
                tap.response(answers + segment.start, &bytes[segment.clone()]);
                reference.server(&bytes[segment]);
                judge(&mut comparison, &tap, &reference, false)?;
            }
            answers += bytes.len();
        } else {
            let mut received = ReceivedRanges::default();
            for segment in segments::arrivals(bytes.len(), dice) {
                tap.request(requests + segment.start, &bytes[segment.clone()]);
                reference.client(&bytes[received.take(&segment)]);
                judge(&mut comparison, &tap, &reference, received.has_gap())?;
            }
            requests += bytes.len();
        }
    }
    tap.close(true);
    Ok(comparison.outcome(comparison.answered(), reference.is_broken))
}

fn judge(
    comparison: &mut EventComparison,
    tap: &EbpfModel,
    reference: &Http2Reference,
    has_gap: bool,
) -> Result<(), String> {
    comparison.has_had_gap |= has_gap;
    // Bytes behind an error have no meaning, and before the preface the protocol is not known.
    if has_gap || reference.is_broken || !reference.has_begun() {
        return Ok(());
    }
    comparison.compare(tap, reference).map_err(|what| {
        format!("{what}\n  events {:?}\n  reference {:?}", tap.events(), reference.log)
    })
}

/// Plays a conversation in which whole bursts of the client's bytes are lost; the server's responses must still be
/// counted. The error describes the difference.
pub fn play_with_losses(
    conversation: &[u8],
    dice: &mut SeededRng,
) -> Result<ConformanceTotals, String> {
    let turns = parsed(conversation);
    let (mut tap, mut reference) = (EbpfModel::new(), Http2Reference::default());
    let (mut requests, mut answers) = (0, 0);
    for (index, burst) in turns.chunk_by(|one, other| one.0 == other.0).enumerate() {
        let bytes: Vec<u8> = burst.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
        if burst[0].0 {
            tap.response(answers, &bytes);
            reference.server(&bytes);
            answers += bytes.len();
            continue;
        }
        // Nothing is lost before the protocol is known.
        if index > 1 && tap.speaks_http2() && dice.chance(30) {
            tap.lose_requests();
            tap.skip_request(requests, bytes.len());
        } else {
            // One frame per segment, as clients write them.
            let mut at = requests;
            for (_, frame) in burst {
                tap.request(at, frame);
                at += frame.len();
            }
        }
        reference.client(&bytes);
        requests += bytes.len();
    }
    tap.close(true);
    let answered = |it: &&ModelEvent| matches!(it, ModelEvent::Answered(..));
    let (ours, wanted) = (
        tap.events().iter().filter(answered).count(),
        reference.log.iter().filter(|it| matches!(it, ReferenceEvent::Answered(_))).count(),
    );
    // The server may respond to streams that were reset unseen, left out by a GOAWAY or never opened; the reference
    // does not count these.
    let is_plain = !reference.log.iter().any(|it| matches!(it, ReferenceEvent::Cut(_)));
    let is_whole = !reference.is_broken && reference.last.is_none() && !tap.has_spilled();
    if is_plain && is_whole && ours < wanted {
        let log = &reference.log;
        return Err(format!("{ours} answered, not {wanted}\n  {:?}\n  {log:?}", tap.events()));
    }
    let is_compared = is_plain && is_whole;
    let has_lost = tap.events().contains(&ModelEvent::Desync);
    Ok(ConformanceTotals {
        requests: if is_compared && has_lost { wanted as u64 } else { 0 },
        refused: u64::from(reference.is_broken),
        differing: u64::from(!is_compared),
        crowded: 0,
    })
}
