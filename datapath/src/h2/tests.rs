//! Worked examples of each rule, and any split of them.

use std::{string::String, vec, vec::Vec};

use super::{frame_class, *};
use crate::h1::SeekResult;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

fn request_frame(stream: u32) -> Vec<u8> {
    frame(1, END_STREAM | END_HEADERS, stream, &[0x82, 0x86, 0x84])
}

fn reset_frame(stream: u32) -> Vec<u8> {
    frame(3, 0, stream, &8_u32.to_be_bytes())
}

fn data_frame(stream: u32, ends: bool, len: usize) -> Vec<u8> {
    frame(0, u8::from(ends), stream, &vec![b'x'; len])
}

fn headers_frame(stream: u32, flags: u8, block: &[u8]) -> Vec<u8> {
    frame(1, END_HEADERS | flags, stream, block)
}

/// Connection with its driver, as the eBPF programs have it.
struct Http2Fixture {
    conn: Http2Connection,
    sent: [u32; 2],
    log: String,
    now_ns: u64,
}

impl Http2Fixture {
    fn new() -> Self {
        let sent = [u32::MAX - 30, u32::MAX - 7];
        let mut conn = blank();
        conn.open(
            &Http2Handoff { rx_next: sent[0], tx_next: sent[1], ..Http2Handoff::default() },
            None,
        );
        Self { conn, sent, log: String::new(), now_ns: 1 << 40 }
    }

    fn send(&mut self, side: usize, bytes: &[u8]) {
        let seq = self.sent[side];
        self.sent[side] = seq.wrapping_add(bytes.len() as u32);
        assert!(self.receive(side, seq, bytes), "nothing is missing");
    }

    /// Passes bytes of one side. Returns true if nothing in front of them is missing.
    fn receive(&mut self, side: usize, seq: u32, bytes: &[u8]) -> bool {
        let all = self.read(side, seq, bytes);
        let cut = self.conn.abort_goaway_streams();
        self.note(StreamChange { aborted: cut, ..StreamChange::default() });
        all
    }

    fn read(&mut self, side: usize, seq: u32, bytes: &[u8]) -> bool {
        loop {
            let it = if side == 0 { &mut self.conn.rx } else { &mut self.conn.tx };
            let seek = it.seek(seq, bytes.len() as u32);
            let ended = it.take_ended_frame();
            self.conn.apply_frame(ended, side == 0, self.now_ns);
            self.note(self.conn.change);
            let offset = match seek {
                SeekResult::ReadAt(offset) => offset as usize,
                SeekResult::Done => return true,
                SeekResult::Gap => return false,
            };
            let mut window = [0x5a5a_5a5a_5a5a_5a5a; PEEK_WORDS];
            let len = (bytes.len() - offset).min(PEEK_BYTES);
            let mut flat = [0x5a; PEEK_BYTES];
            flat[..len].copy_from_slice(&bytes[offset..offset + len]);
            for (word, bytes) in window.iter_mut().zip(flat.chunks(8)) {
                *word = u64::from_ne_bytes(bytes.try_into().expect("eight"));
            }
            let it = if side == 0 { &mut self.conn.rx } else { &mut self.conn.tx };
            let before = it.next;
            it.read(&window, len as u32);
            assert!(
                (1..=len as u32).contains(&it.next.wrapping_sub(before))
                    || self.conn.is_not_http2()
            );
        }
    }

    fn note(&mut self, change: StreamChange) {
        for _ in 0..change.started {
            self.log.push_str("S ");
        }
        if change.answered > 0 {
            let outcome = ["", "", "", "", "", "", "", "", "ok", "", "", "", "", "", "", "", "bad"];
            let grpc = outcome[change.grpc_outcome as usize];
            self.log.push_str(&std::format!("F{}{grpc} ", change.status_class));
        }
        for _ in 0..change.aborted {
            self.log.push_str("X ");
        }
    }
}

fn blank() -> Http2Connection {
    let side = Http2Direction::default();
    let (streams, open, newest) = (stream_table::StreamTable::default(), 0, 0);
    let change = StreamChange::default();
    Http2Connection {
        rx: side,
        tx: side,
        highest_stream: newest,
        requests_in_flight: open,
        untracked: 0,
        hpack_seen: 0,
        goaway_first_excluded: 0,
        last_untracked_ended: 0,
        first_unprocessed: 0,
        desync_highest_stream: 0,
        change,
        streams,
    }
}

type ConversationCase<'a> = &'a [(char, Vec<u8>)];

/// Returns the log of a conversation behind the preface, in pieces of at most `piece` bytes.
fn play_conversation(conversation: ConversationCase<'_>, piece: usize) -> String {
    let mut wire = Http2Fixture::new();
    for part in PREFACE.chunks(piece) {
        wire.send(0, part);
    }
    for (who, bytes) in conversation {
        for part in bytes.chunks(piece) {
            wire.send(usize::from(*who == '<'), part);
        }
    }
    assert!(!wire.conn.is_not_http2());
    let open = wire.log.matches('S').count()
        - wire.log.matches('F').count()
        - wire.log.matches('X').count();
    assert_eq!(wire.conn.requests_in_flight as usize, open, "{}", wire.log);
    assert_eq!(wire.conn.close() as usize, open);
    wire.log.trim_end().into()
}

fn conversation_log(conversation: ConversationCase<'_>) -> String {
    let whole = play_conversation(conversation, usize::MAX);
    for piece in 1..40 {
        assert_eq!(play_conversation(conversation, piece), whole, "in pieces of {piece}");
    }
    whole
}

#[test]
fn a_stream_is_in_flight_from_its_header_block_to_the_servers_last_byte() {
    let (ok, body) = (headers_frame(1, 0, &[0x88]), data_frame(1, true, 5));
    assert_eq!(
        conversation_log(&[('>', request_frame(1)), ('<', ok.clone()), ('<', body.clone())]),
        "S F2"
    );
    assert_eq!(
        conversation_log(&[('>', request_frame(1)), ('<', ok.clone()), ('<', body[..13].to_vec())]),
        "S"
    );
    assert_eq!(conversation_log(&[('>', request_frame(1)[..11].to_vec())]), "");
    assert_eq!(
        conversation_log(&[('>', request_frame(1)), ('<', headers_frame(1, END_STREAM, &[0x8d]))]),
        "S F4"
    );
}

#[test]
fn an_empty_last_frame_ends_a_stream() {
    let parts =
        [headers_frame(1, 0, &[0x88]), data_frame(1, false, 700), data_frame(1, true, 0)].concat();
    assert_eq!(conversation_log(&[('>', request_frame(1)), ('<', parts)]), "S F2");
}

#[test]
fn streams_end_in_any_order_and_once() {
    let requests =
        [request_frame(1), request_frame(3), request_frame(5), request_frame(7)].concat();
    let answers = [7, 1, 5, 3, 7, 1].map(|id| headers_frame(id, END_STREAM, &[0x88])).concat();
    assert_eq!(conversation_log(&[('>', requests), ('<', answers)]), "S S S S F2 F2 F2 F2");
}

#[test]
fn either_side_may_reset_a_stream() {
    let requests = [request_frame(1), request_frame(3), reset_frame(1), reset_frame(1)].concat();
    assert_eq!(
        conversation_log(&[('>', requests), ('<', reset_frame(3)), ('<', reset_frame(1))]),
        "S S X X"
    );
    let late = [headers_frame(1, END_STREAM, &[0x88]), reset_frame(1)].concat();
    assert_eq!(
        conversation_log(&[('>', request_frame(1)), ('<', late), ('>', reset_frame(1))]),
        "S F2"
    );
}

#[test]
fn goaway_aborts_requests_that_the_server_excludes() {
    let requests = [request_frame(1), request_frame(3), request_frame(5)].concat();
    let goaway = frame(7, 0, 0, &[[0, 0, 0, 3], [0, 0, 0, 0]].concat());
    let answers = [1, 3, 5].map(|id| headers_frame(id, END_STREAM, &[0x88])).concat();
    assert_eq!(
        conversation_log(&[('>', requests), ('<', goaway), ('<', answers)]),
        "S S S X F2 F2"
    );
    let all = frame(7, 0, 0, &[[0x7f, 0xff, 0xff, 0xff], [0, 0, 0, 0]].concat());
    let (warned, last) = (('<', all), ('<', frame(7, 0, 0, &[0, 0, 0, 3, 0, 0, 0, 0])));
    assert_eq!(
        conversation_log(&[('>', request_frame(1)), warned.clone(), ('>', request_frame(3))]),
        "S S",
        "a warning first"
    );
    let underway =
        [('>', request_frame(1)), warned, ('>', request_frame(3)), last, ('>', request_frame(5))];
    assert_eq!(
        conversation_log(&underway),
        "S S",
        "what was underway to a server that has gone away"
    );
}

#[test]
fn a_long_header_block_counts_when_its_last_frame_is_complete() {
    let first = frame(1, END_STREAM, 1, &[0x82; 40]);
    let more = frame(9, 0, 1, &[0x84; 30]);
    let last = frame(9, END_HEADERS, 1, &[0x86; 20]);
    assert_eq!(conversation_log(&[('>', [first.clone(), more.clone()].concat())]), "");
    assert_eq!(conversation_log(&[('>', [first, more, last].concat())]), "S");
    let head = frame(1, END_STREAM, 1, &[0x88; 40]);
    let rest = frame(9, END_HEADERS, 1, &[0xbe; 3]);
    assert_eq!(conversation_log(&[('>', request_frame(1)), ('<', head), ('<', rest)]), "S F0");
}

#[test]
fn trailers_even_streams_and_other_frames_are_no_requests() {
    let requests = [
        frame(4, 0, 0, &[0, 3, 0, 0, 0, 100]),
        headers_frame(1, 0, &[0x82]),
        data_frame(1, false, 30_000),
        frame(8, 0, 0, &[0, 0, 1, 0]),
        headers_frame(1, END_STREAM, &[0x00]),
        frame(6, 0, 0, &[0; 8]),
        frame(0xfa, 0xff, 0x7fff_ffff, &[1; 100]),
        frame(2, 0, 3, &[0; 5]),
    ];
    let push = frame(5, END_HEADERS, 1, &[0, 0, 0, 2, 0x82]);
    let pushed = [push, headers_frame(2, 0, &[0x88]), data_frame(2, true, 9)].concat();
    let answer =
        [headers_frame(1, 0, &[0x08, 3, b'1', b'0', b'3']), headers_frame(1, 0, &[0x89])].concat();
    let end = headers_frame(1, END_STREAM, &[0x40, 1, b'x', 1, b'y']);
    let log =
        conversation_log(&[('>', requests.concat()), ('<', pushed), ('<', answer), ('<', end)]);
    assert_eq!(log, "S F2");
}

#[test]
fn padding_and_priority_stand_in_front_of_a_status() {
    let padded = frame(1, END_HEADERS | PADDED, 1, &[3, 0x8e, 0, 0, 0]);
    let both = frame(1, END_HEADERS | PADDED | 32, 3, &[2, 0, 0, 0, 0, 16, 0x8b, 0, 0]);
    let ends = [data_frame(1, true, 1), data_frame(3, true, 1)].concat();
    let requests = [request_frame(1), request_frame(3)].concat();
    assert_eq!(
        conversation_log(&[('>', requests), ('<', [padded, both, ends].concat())]),
        "S S F5 F3"
    );
}

#[test]
fn statuses_as_text_are_read_and_references_to_them_guessed_only_when_sure() {
    let text = |id, block: &[u8]| headers_frame(id, END_STREAM, block);
    let requests = (0..6).flat_map(|it| request_frame(it * 2 + 1)).collect();
    let answers = [
        text(1, &[0x48, 3, b'5', b'0', b'3']),
        text(3, &[0xbe]),
        // 302 in Huffman code.
        text(5, &[0x48, 0x82, 0x64, 0x02]),
        text(7, &[0xbe]),
        text(9, &[0x08, 3, b'4', b'2', b'9']),
        text(11, &[0x88]),
    ];
    let log = conversation_log(&[('>', requests), ('<', answers.concat())]);
    assert_eq!(log, "S S S S S S F5 F5 F3 F0 F4 F2");
}

#[test]
fn a_reference_to_an_unseen_status_is_not_guessed() {
    let requests = [request_frame(1), request_frame(3), request_frame(5)].concat();
    let text = |id, block: &[u8]| headers_frame(id, END_STREAM, block);
    // 503, then 404 behind a size of the table, then references to both.
    let sized = [
        text(1, &[0x48, 3, b'5', b'0', b'3']),
        text(3, &[0x20, 0x48, 3, b'4', b'0', b'4']),
        text(5, &[0xbe]),
    ];
    assert_eq!(
        conversation_log(&[('>', requests.clone()), ('<', sized.concat())]),
        "S S S F5 F0 F0"
    );
    // 404 for a request that no client waits for any more.
    let cut = [
        text(1, &[0x48, 3, b'5', b'0', b'3']),
        text(3, &[0x48, 3, b'4', b'0', b'4']),
        text(5, &[0xbe]),
    ];
    let log = conversation_log(&[('>', requests), ('>', reset_frame(3)), ('<', cut.concat())]);
    assert_eq!(log, "S S S X F5 F0");
}

#[test]
fn grpc_outcomes_are_seen_in_trailers() {
    let coded = [0x40, 0x88, 0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f, 1, b'0'];
    let plain = [b"\x00\x0bgrpc-status\x02".as_slice(), b"13"].concat();
    let requests = (0..6).flat_map(|it| request_frame(it * 2 + 1)).collect();
    let call = |id, block: &[u8]| {
        [
            headers_frame(id, 0, &[0x88]),
            data_frame(id, false, 5),
            headers_frame(id, END_STREAM, block),
        ]
        .concat()
    };
    let answers = [
        call(1, &coded),
        call(3, &[0xbe]),
        call(5, &[0x7e, 1, b'5']),
        call(7, &[0xbe]),
        call(9, &plain),
        headers_frame(11, END_STREAM, &[0x88, 0xc0, 0x7e, 1, b'0']),
    ];
    let log = conversation_log(&[('>', requests), ('<', answers.concat())]);
    assert_eq!(log, "S S S S S S F2ok F2ok F2bad F2 F2bad F2ok");
}

#[test]
fn a_reference_to_an_unseen_outcome_is_not_guessed() {
    let plain = |status: u8| [b"\x40\x0bgrpc-status\x01".as_slice(), &[status]].concat();
    let call = |id, block: &[u8]| {
        [headers_frame(id, 0, &[0x88]), headers_frame(id, END_STREAM, block)].concat()
    };
    let behind = [&[0x40, 1, b'x', 1, b'y'], &plain(b'5')[..]].concat();
    let alone = [&[0x88, 0x5f, 1, b't'], &plain(b'5')[..]].concat();
    for unseen in [call(3, &behind), headers_frame(3, END_STREAM, &alone)] {
        let answers = [call(1, &plain(b'0')), unseen, call(5, &[0xbe])].concat();
        let requests = [request_frame(1), request_frame(3), request_frame(5)].concat();
        assert_eq!(conversation_log(&[('>', requests), ('<', answers)]), "S S S F2ok F2 F2");
    }
    // An interim head that was not seen, and the status of the final response.
    let heads = [
        headers_frame(3, 0, &[0x20, 0x48, 3, b'1', b'0', b'3']),
        headers_frame(3, END_STREAM, &[0xbe]),
    ];
    let answers = [call(1, &plain(b'0')), heads.concat()].concat();
    let requests = [request_frame(1), request_frame(3)].concat();
    assert_eq!(conversation_log(&[('>', requests), ('<', answers)]), "S S F2ok F0");
}

#[test]
fn a_stream_that_lasts_does_not_get_in_the_way_of_thousands() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    wire.send(0, &request_frame(1));
    for id in (3..10_001).step_by(2) {
        wire.send(0, &request_frame(id));
        wire.send(1, &headers_frame(id, END_STREAM, &[0x88]));
    }
    assert_eq!(wire.conn.requests_in_flight, 1);
    wire.send(1, &headers_frame(1, END_STREAM, &[0x88]));
    assert_eq!(wire.conn.requests_in_flight, 0);
    assert_eq!(wire.log.matches('S').count(), wire.log.matches('F').count());
}

#[test]
fn more_streams_than_there_are_places_still_end_one_by_one() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    let ids: Vec<u32> = (0..2_000).map(|it| it * 2 + 1).collect();
    ids.iter().for_each(|id| wire.send(0, &request_frame(*id)));
    assert_eq!(wire.conn.requests_in_flight, 2_000);
    assert!(wire.conn.youngest_request_age_ns(wire.now_ns).is_none(), "not all are known");
    for (index, id) in ids.iter().rev().enumerate() {
        wire.send(1, &headers_frame(*id, END_STREAM, &[0x88]));
        assert_eq!(wire.conn.requests_in_flight as usize, 1_999 - index);
    }
    assert!(wire.conn.untracked == 0);
}

#[test]
fn a_stream_that_has_ended_does_not_end_another_that_found_no_place() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    let ids: Vec<u32> = (0..300).map(|it| it * 2 + 1).collect();
    ids.iter().for_each(|id| wire.send(0, &request_frame(*id)));
    let mut left = 300;
    // A stream of the table, one without room there, and so on.
    for id in ids[..40].iter().zip(&ids[256..]).flat_map(|(one, other)| [*one, *other]) {
        wire.send(1, &[headers_frame(id, END_STREAM, &[0x88]), reset_frame(id)].concat());
        wire.send(0, &reset_frame(id));
        left -= 1;
        assert_eq!(wire.conn.requests_in_flight, left, "{id}");
    }
    assert!(!wire.log.contains('X'));
}

#[test]
fn how_long_it_took_is_known_to_a_tick() {
    let mut wire = Http2Fixture::new();
    wire.send(0, &[PREFACE, &request_frame(1)].concat());
    wire.now_ns += 50_000_000;
    assert_eq!(
        wire.conn.youngest_request_age_ns(wire.now_ns).expect("one is open") >> 20,
        50_000_000 >> 20
    );
    let (ended, now) =
        (EndedFrame { class: frame_class::DATA, ends_stream: true, stream: 1 }, wire.now_ns);
    wire.conn.apply_frame(ended, false, now);
    let duration = wire.conn.change.duration_ns;
    assert!(duration.abs_diff(50_000_000) <= 1 << TICK_BITS, "{duration}");
}

#[test]
fn retransmissions_and_gaps_in_payload_do_no_harm() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    let first = wire.sent[0];
    let bytes =
        [headers_frame(1, 0, &[0x82]), data_frame(1, true, 4_000), request_frame(3)].concat();
    assert!(wire.receive(0, first, &bytes[..100]));
    assert!(wire.receive(0, first, &bytes[..60]), "again");
    let at = |offset: usize| first.wrapping_add(offset as u32);
    assert!(wire.receive(0, at(2_000), &bytes[2_000..3_000]), "inside the payload");
    assert!(!wire.receive(0, at(bytes.len() - 3), &bytes[bytes.len() - 3..]), "a frame is missing");
    assert!(wire.receive(0, at(3_000), &bytes[3_000..]));
    assert_eq!(wire.log, "S S ");
}

#[test]
fn a_closed_connection_is_not_read_further() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    let next = wire.conn.rx.next;
    assert!(wire.conn.rx.is_reading_at(next) && !wire.conn.rx.is_reading_at(next.wrapping_add(1)));
    let mut lost = wire.conn;
    assert!(lost.desync_requests() && !lost.rx.is_reading_at(next));
    wire.conn.close();
    assert!(!wire.conn.rx.is_reading_at(next) && !wire.conn.tx.is_reading_at(wire.conn.tx.next));
}

#[test]
fn something_else_than_a_preface_is_told_at_once() {
    for wrong in 0..24 {
        let mut bytes = PREFACE.to_vec();
        bytes[wrong] ^= 1;
        let mut wire = Http2Fixture::new();
        wire.send(0, &bytes[..wrong]);
        assert!(!wire.conn.is_not_http2());
        wire.send(0, &bytes[wrong..=wrong]);
        assert!(wire.conn.is_not_http2(), "byte {wrong}");
    }
}

#[test]
fn a_frame_on_a_stream_where_none_may_be_is_no_frame() {
    for bytes in [
        headers_frame(0, 0, &[0x82]),
        frame(4, 0, 1, &[]),
        frame(7, 0, 3, &[0; 8]),
        data_frame(0, true, 4),
    ] {
        let mut wire = Http2Fixture::new();
        wire.send(0, PREFACE);
        wire.send(0, &bytes);
        assert!(wire.conn.is_not_http2());
    }
}

#[test]
fn an_upgraded_request_is_stream_1() {
    let mut wire = Http2Fixture::new();
    let settings = frame(4, 0, 0, &[0, 3, 0, 0, 0, 100]);
    let (rx_next, tx_next) = (wire.sent[0], wire.sent[1]);
    // Length and type of the frame with settings.
    let begun = Http2Handoff {
        rx_next,
        preface_read: 8,
        tx_next,
        server_frame_read: 4,
        server_frame_bytes: 0x0406_0000,
    };
    wire.conn.open(&begun, Some(wire.now_ns));
    assert_eq!(wire.conn.requests_in_flight, 1);
    wire.send(0, &[&PREFACE[8..], &request_frame(3)].concat());
    wire.send(1, &[&settings[4..], &headers_frame(1, END_STREAM, &[0x88])].concat());
    assert_eq!((wire.conn.requests_in_flight, wire.log.as_str()), (1, "S F2 "));
}

/// Returns the words of a segment's begin, as the driver loads them.
fn begin_of(bytes: &[u8]) -> ([u64; PEEK_WORDS], u32) {
    let mut flat = [0x5a; PEEK_BYTES];
    let have = bytes.len().min(PEEK_BYTES);
    flat[..have].copy_from_slice(&bytes[..have]);
    let mut words = [0; PEEK_WORDS];
    for (word, bytes) in words.iter_mut().zip(flat.chunks(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight"));
    }
    (words, have as u32)
}

impl Http2Fixture {
    /// Loses this number of the client's bytes.
    fn lose(&mut self, bytes: u32) {
        assert!(self.conn.desync_requests());
        assert!(!self.conn.desync_requests(), "once is enough");
        self.sent[0] = self.sent[0].wrapping_add(bytes);
    }

    /// Passes the client's next segment, which may begin with a recognisable frame.
    fn resume(&mut self, bytes: &[u8]) {
        let (window, have) = begin_of(bytes);
        self.conn.resync_requests(&window, have, self.sent[0], bytes.len() as u32);
        self.send(0, bytes);
    }
}

#[test]
fn responses_reveal_requests_that_were_not_seen() {
    let mut wire = Http2Fixture::new();
    wire.send(0, PREFACE);
    wire.send(0, &request_frame(1));
    wire.lose(1_000);
    for answer in [
        headers_frame(3, 0, &[0x88]),
        headers_frame(1, END_STREAM, &[0x88]),
        data_frame(3, true, 5),
    ] {
        wire.send(1, &answer);
    }
    wire.send(1, &headers_frame(5, END_STREAM, &[0x88]));
    // A stream that ended before does not begin again.
    wire.send(1, &reset_frame(5));
    assert_eq!((wire.log.as_str(), wire.conn.requests_in_flight), ("S S F2 F2 S F2 ", 0));
}

#[test]
fn reading_goes_on_where_a_segment_surely_begins_with_a_frame() {
    let whole = |begin: &[Vec<u8>]| begin.concat();
    let update = frame(8, 0, 1, &[0, 0, 1, 0]);
    let sure = [
        whole(&[update.clone(), request_frame(7)]),
        whole(&[frame(6, 0, 0, b"12345678"), request_frame(7)]),
        whole(&[frame(4, 1, 0, b""), request_frame(7)]),
        request_frame(7),
    ];
    for bytes in sure {
        let mut wire = Http2Fixture::new();
        wire.send(0, PREFACE);
        wire.send(0, &request_frame(1));
        wire.lose(77);
        wire.resume(&bytes);
        assert_eq!((wire.log.as_str(), wire.conn.requests_in_flight), ("S S ", 2), "{bytes:?}");
        // Opened and not answered while nothing was seen, and one from before.
        wire.send(1, &headers_frame(5, END_STREAM, &[0x88]));
        wire.send(1, &headers_frame(1, END_STREAM, &[0x88]));
        assert_eq!(
            (wire.log.as_str(), wire.conn.requests_in_flight),
            ("S S S F2 F2 ", 1),
            "{bytes:?}"
        );
    }
}

#[test]
fn nothing_begins_where_a_frame_only_may() {
    let long = [request_frame(7), data_frame(7, true, 5)].concat();
    let unsure = [
        b"some of a body".to_vec(),
        vec![0; 64],
        data_frame(1, true, 5),
        long,
        // Already known, or the server's.
        request_frame(1),
        request_frame(4),
        frame(6, 2, 0, b"12345678"),
        frame(6, 0, 1, b"12345678"),
        frame(8, 0, 1 << 31, &[0, 0, 1, 0]),
        request_frame(7)[..8].to_vec(),
    ];
    for bytes in unsure {
        let mut wire = Http2Fixture::new();
        wire.send(0, PREFACE);
        wire.send(0, &request_frame(1));
        wire.lose(77);
        wire.resume(&bytes);
        assert!(wire.conn.rx.is_desynced(), "{bytes:?}");
        wire.send(0, &request_frame(9));
        assert_eq!((wire.log.as_str(), wire.conn.requests_in_flight), ("S ", 1), "{bytes:?}");
    }
}
