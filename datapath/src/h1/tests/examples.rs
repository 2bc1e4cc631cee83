//! Examples of each rule, one conversation for one rule.

use std::string::String;

use super::{Http1Fixture, conversation_log};

pub(super) const GET: &str =
    "GET / HTTP/1.1\r\nHost: hello.default.example.com\r\nUser-Agent: curl/8\r\n\r\n";
pub(super) const OK5: &str = "HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 5\r\n\r\nhello";
const OK0: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

#[test]
fn a_request_is_in_flight_from_its_heads_end_to_its_responses_end() {
    assert_eq!(conversation_log(&[('>', GET), ('<', OK5)]), "S F200 |");
    assert_eq!(conversation_log(&[('>', &GET[..60])]), "|");
    assert_eq!(conversation_log(&[('>', GET), ('<', &OK5[..OK5.len() - 1])]), "S |X");
}

#[test]
fn a_connection_is_in_use_from_a_messages_first_byte_to_the_end_of_its_answer() {
    let open = |conversation: &[(char, &str)]| {
        let mut wire = Http1Fixture::new();
        for (who, bytes) in conversation {
            match who {
                '>' => wire.request(bytes.as_bytes()),
                _ => wire.response(bytes.as_bytes()),
            }
        }
        wire.conn.is_in_use()
    };
    let upgrade = "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n";
    let switch = "HTTP/1.1 101 Switching Protocols\r\n\r\n";
    let half = &OK5[..OK5.len() - 2];
    for still in [&[('>', &GET[..1])][..], &[('>', GET)], &[('>', GET), ('<', half)]] {
        assert_eq!(open(still), Some(true), "{still:?}");
    }
    assert_eq!(
        open(&[('>', GET), ('<', OK5), ('>', GET), ('<', half)]),
        Some(true),
        "the second one"
    );
    assert_eq!(open(&[('>', upgrade), ('<', switch)]), Some(true), "until it closes");
    assert_eq!(open(&[]), Some(false));
    assert_eq!(open(&[('>', GET), ('<', OK5)]), Some(false));
    let foreign = "\x16\x03\x01\x02\0\x01";
    assert_eq!(open(&[('>', foreign)]), None);
}

#[test]
fn a_connection_awaits_a_request_between_messages_and_not_before_an_announced_end() {
    let awaits = |conversation: &[(char, &str)]| {
        let mut wire = Http1Fixture::new();
        for (from, bytes) in conversation {
            let bytes = bytes.as_bytes();
            if *from == '>' { wire.request(bytes) } else { wire.response(bytes) }
        }
        wire.conn.awaits_request()
    };
    let interim = "HTTP/1.1 103 Early Hints\r\n\r\n";
    for idle in [&[('>', GET), ('<', OK5)][..], &[('>', GET), ('<', interim), ('<', OK0)]] {
        assert!(awaits(idle), "{idle:?}");
    }
    let asks_close = "GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
    let states_close = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    let long = "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nbody";
    for other in [
        &[('>', asks_close), ('<', OK5)][..],
        &[('>', GET), ('<', states_close)],
        &[('>', GET), ('<', interim)],
        &[('>', GET), ('<', OK5), ('>', &GET[..9])],
        &[('>', GET), ('>', GET), ('<', OK5)],
        &[('>', long), ('<', OK5)],
    ] {
        assert!(!awaits(other), "{other:?}");
    }
}

#[test]
fn a_keep_alive_connection_carries_one_request_after_another() {
    assert_eq!(
        conversation_log(&[('>', GET), ('<', OK5), ('>', GET), ('<', OK0)]),
        "S F200 S F200 |"
    );
}

#[test]
fn a_pipelined_request_begins_when_the_one_before_ends() {
    let three = String::new() + GET + GET + GET;
    assert_eq!(conversation_log(&[('>', &three), ('<', OK5), ('<', OK5)]), "S F200 S F200 S |X");
    let both = String::new() + OK5 + OK0 + OK5;
    assert_eq!(conversation_log(&[('>', &three), ('<', &both)]), "S F200 S F200 S F200 |");
}

#[test]
fn a_deep_pipeline_of_one_kind_is_exact() {
    let requests = GET.repeat(100);
    let responses = OK5.repeat(100);
    let log = conversation_log(&[('>', &requests), ('<', &responses)]);
    assert_eq!((log.matches('S').count(), log.matches('F').count()), (100, 100));
}

#[test]
fn a_response_to_head_has_no_body() {
    let head = "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n";
    let mixed = String::new() + head + GET + head;
    let ok = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
    let answers =
        String::new() + ok + OK5 + "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(conversation_log(&[('>', &mixed), ('<', &answers)]), "S F200 S F200 S F200 |");
}

#[test]
fn neither_204_nor_304_has_a_body() {
    for status in ["204 No Content", "304 Not Modified"] {
        let answer = std::format!("HTTP/1.1 {status}\r\nContent-Length: 500\r\n\r\n");
        let log = conversation_log(&[('>', GET), ('<', &answer), ('>', GET), ('<', OK5)]);
        assert_eq!(log, std::format!("S F{} S F200 |", &status[..3]));
    }
}

#[test]
fn interim_responses_do_not_end_a_request() {
    let post = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
    let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    let log = conversation_log(&[('>', post), ('<', interim), ('>', "body"), ('<', OK5)]);
    assert_eq!(log, "S F200 |");
}

#[test]
fn an_upgraded_connection_is_busy_until_it_closes() {
    let upgrade = "GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\r\n";
    let log = conversation_log(&[
        ('>', upgrade),
        ('<', switch),
        ('>', GET),
        ('<', OK5),
        ('<', "\0\r\n\r\n"),
    ]);
    assert_eq!(log, "S |F101");
}

#[test]
fn a_refused_upgrade_leaves_an_ordinary_connection() {
    let upgrade = "GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', upgrade), ('<', OK5), ('>', GET), ('<', OK0)]),
        "S F200 S F200 |"
    );
}

#[test]
fn connect_opens_a_tunnel_only_when_granted() {
    let connect = "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n";
    let granted = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', connect), ('<', granted), ('>', GET), ('<', OK5)]),
        "S |F200"
    );
    let refused = "HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', connect), ('<', refused), ('>', GET), ('<', OK5)]),
        "S F403 S F200 |"
    );
}

#[test]
fn without_a_length_a_response_ends_at_close() {
    let open =
        "HTTP/1.0 200 OK\r\nServer: x\r\n\r\nall of this until the end HTTP/1.1 200 OK\r\n\r\n";
    assert_eq!(conversation_log(&[('>', GET), ('<', open)]), "S |F200");
    let coded = "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab";
    assert_eq!(conversation_log(&[('>', GET), ('<', coded)]), "S |F200");
}

#[test]
fn request_bodies_are_skipped_by_their_length() {
    let post = std::format!("POST / HTTP/1.1\r\nCONTENT-LENGTH:\t {}  \r\n\r\n{GET}", GET.len());
    assert_eq!(
        conversation_log(&[('>', &post), ('<', OK5), ('>', GET), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn chunks_are_walked_with_extensions_and_trailers() {
    let body = "5;name=\"v\"\r\nhello\r\n00a \r\n0\r\n\r\n0\r\n\r\n\r\n0;last\r\nContent-Length: 9\r\nT: x\r\n\r\n";
    let request = std::format!("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
    let answer =
        std::format!("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip ,, Chunked\r\n\r\n{body}");
    let log = conversation_log(&[('>', &request), ('>', GET), ('<', &answer), ('<', OK5)]);
    assert_eq!(log, "S F200 S F200 |");
}

#[test]
fn chunked_beats_a_length() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', GET), ('<', answer), ('>', GET), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn codings_may_stand_in_folded_lines_and_several_headers() {
    for header in [
        "Transfer-Encoding: gzip,\r\n chunked",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding:\r\n\t chunked ",
        "TRANSFER-ENCODING:chunked",
        "Transfer-Encoding: chunked\r\nX: y\r\n gzip",
    ] {
        let answer = std::format!("HTTP/1.1 200 OK\r\n{header}\r\nX: y\r\n\r\n1\r\na\r\n0\r\n\r\n");
        let log = conversation_log(&[('>', GET), ('<', &answer), ('>', GET), ('<', OK5)]);
        assert_eq!(log, "S F200 S F200 |", "{header}");
    }
    let last =
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n , gzip and more bytes\r\n\r\n0\r\n\r\n";
    assert_eq!(conversation_log(&[('>', GET), ('<', last)]), "S |F200");
}

#[test]
fn a_folded_header_of_no_interest_hides_nothing() {
    let answer = "HTTP/1.1 200 OK\r\nX: a\r\n Content-Length: 99\r\nContent-Length: 1\r\n\r\na";
    assert_eq!(
        conversation_log(&[('>', GET), ('<', answer), ('>', GET), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn a_length_may_be_repeated_but_not_changed() {
    for header in [
        "Content-Length: 2\r\nContent-Length: 2",
        "Content-Length: 2, 2",
        "content-length: 0000000000002",
    ] {
        let answer = std::format!("HTTP/1.1 200 OK\r\n{header}\r\n\r\nab");
        assert_eq!(
            conversation_log(&[('>', GET), ('<', &answer), ('>', GET), ('<', OK5)]),
            "S F200 S F200 |"
        );
    }
    let changed = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(conversation_log(&[('>', GET), ('<', changed)]), "S |F200");
}

#[test]
fn names_that_only_begin_alike_are_passed_over() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Lengthy: 9\r\nContent-Type: text/plain; charset=utf-8\r\nC: 1\r\n\
        Transfer-Encodings: chunked\r\nContent-Encoding: identity-and-so-on\r\nTe: x\r\nConnection: keep-alive\r\n\
        Content-Length: 3\r\nT: 2\r\n\r\nabc";
    assert_eq!(
        conversation_log(&[('>', GET), ('<', answer), ('>', GET), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn stray_line_ends_and_bare_line_feeds_are_tolerated() {
    let get = "\r\n\n\r\nGET / HTTP/1.1\nHost: a\n\n";
    let answer = "HTTP/1.1 200 OK\nContent-Length: 2\nX:\n\nok";
    assert_eq!(
        conversation_log(&[('>', get), ('<', answer), ('>', get), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn an_early_response_ends_the_request_while_its_body_still_comes() {
    let head = "POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n";
    let log = conversation_log(&[
        ('>', head),
        ('>', "01234"),
        ('<', OK5),
        ('>', "56789"),
        ('>', GET),
        ('<', OK0),
    ]);
    assert_eq!(log, "S F200 S F200 |");
}

#[test]
fn a_closing_response_is_the_last() {
    for header in ["Connection: close", "connection:\tfoo, CLOSE ,bar", "Connection: Close"] {
        let answer =
            std::format!("HTTP/1.1 200 OK\r\n{header}\r\nContent-Length: 2\r\nX: y\r\n\r\nok");
        let two = String::new() + GET + GET;
        assert_eq!(
            conversation_log(&[('>', &two), ('<', &answer), ('>', GET)]),
            "S F200 |",
            "{header}"
        );
    }
}

/// A client like curl asks for close and sends more, since the response of a server like the JDK's does not state it.
#[test]
fn what_a_client_sends_after_its_own_close_is_no_request() {
    let close = "GET / HTTP/1.1\r\nConnection:close\r\n\r\n";
    assert_eq!(conversation_log(&[('>', close), ('<', OK5), ('>', GET)]), "S F200 |");
    assert_eq!(conversation_log(&[('>', close), ('>', GET), ('<', OK5)]), "S F200 |");
    let post = "POST / HTTP/1.1\r\nContent-Length: 60\r\nConnection: close\r\n\r\n";
    let body = "x".repeat(60);
    assert_eq!(conversation_log(&[('>', post), ('>', &body), ('>', GET), ('<', OK5)]), "S F200 |");
    let chunks = "PUT / HTTP/1.1\r\nconnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', GET), ('<', OK5), ('>', chunks), ('<', OK5), ('>', GET)]),
        "S F200 S F200 |"
    );
    let mut wire = Http1Fixture::new();
    wire.request(close.as_bytes());
    assert_eq!(wire.conn.is_in_use(), Some(true));
    wire.response(OK5.as_bytes());
    assert_eq!(wire.conn.is_in_use(), Some(false));
}

#[test]
fn a_response_without_a_request_is_not_counted() {
    let timeout = "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(conversation_log(&[('<', timeout)]), "~ |");
    let bad = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nno";
    assert_eq!(conversation_log(&[('>', &GET[..30]), ('<', bad)]), "~ |");
}

#[test]
fn of_other_protocols_nothing_is_read() {
    for hello in ["\x16\x03\x01", "\0\0\0\x08\x04"] {
        let log =
            conversation_log(&[('>', hello), ('<', "anything\r\n\r\n"), ('>', GET), ('<', OK5)]);
        assert_eq!(log, "O |", "{hello:?}");
    }
    assert_eq!(conversation_log(&[('<', "220 mail ESMTP\r\n"), ('>', GET), ('<', OK5)]), "O |");
}

/// Returns the log, and the position of HTTP/2: bytes read of the preface and of the server's first frame.
fn log_and_handoff(conversation: &[(char, &str)]) -> (String, u32, u32) {
    let whole = play_until_handoff(conversation, usize::MAX);
    for piece in 1..30 {
        let cut = play_until_handoff(conversation, piece);
        // The number of bytes read before the recognition depends on the bytes that have come by then.
        assert_eq!(cut.0, whole.0, "in pieces of {piece}");
    }
    whole
}

fn play_until_handoff(conversation: &[(char, &str)], piece: usize) -> (String, u32, u32) {
    let mut wire = Http1Fixture::new();
    for (from, text) in conversation {
        for part in text.as_bytes().chunks(piece) {
            if *from == '>' { wire.request(part) } else { wire.response(part) }
        }
    }
    let begun = wire.conn.http2_handoff();
    (wire.take_log(), begun.preface_read, begun.server_frame_read)
}

const PREFACE: &str = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &str = "\0\0\0\x04\0\0\0\0\0";

#[test]
fn http2_is_recognised_by_the_first_bytes_of_either_side() {
    assert_eq!(log_and_handoff(&[('>', PREFACE), ('<', SETTINGS)]), ("2".into(), 8, 0));
    assert_eq!(log_and_handoff(&[('<', SETTINGS), ('>', PREFACE)]), ("2".into(), 0, 4));
    assert_eq!(log_and_handoff(&[('>', "PRI"), ('<', SETTINGS)]), ("2".into(), 3, 4));
    assert_eq!(log_and_handoff(&[('<', &SETTINGS[..2]), ('>', PREFACE)]), ("2".into(), 8, 2));
    assert_eq!(log_and_handoff(&[('<', "\0\0\x12\x04")]), ("2".into(), 0, 4));
    let mut wire = Http1Fixture::new();
    wire.response(b"\0\0\x12\x04");
    assert_eq!(wire.conn.http2_handoff().server_frame_bytes, 0x0412_0000);
}

#[test]
fn what_only_begins_like_http2_is_something_else() {
    for hello in ["\0a", "\0\0\x07\x04", "\0\x01\0\x04", "\0\0\0\0"] {
        let log = conversation_log(&[('<', hello), ('>', GET), ('<', OK5)]);
        assert_eq!(log, "O |", "{hello:?}");
    }
}

#[test]
fn a_request_may_change_to_http2() {
    let upgrade = "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
    let switch = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n";
    let log = log_and_handoff(&[('>', upgrade), ('<', switch), ('>', PREFACE)]);
    assert_eq!(log, ("S 2".into(), 8, 0));
    let log = log_and_handoff(&[('>', upgrade), ('<', switch), ('<', SETTINGS)]);
    assert_eq!(log, ("S 2".into(), 0, 4));
    for hello in ["\x02\x02hi", "\0hi", "\0\0\0\x05", "\0\0\0\x03\x04"] {
        let chat = [('>', upgrade), ('<', switch), ('<', hello), ('>', PREFACE), ('<', OK5)];
        assert_eq!(conversation_log(&chat), "S |F101", "{hello:?}");
        let chat = [('>', upgrade), ('<', switch), ('>', "P\x01"), ('<', hello), ('<', OK5)];
        assert_eq!(conversation_log(&chat), "S |F101", "{hello:?}");
    }
    assert_eq!(conversation_log(&[('>', upgrade), ('<', switch), ('<', "\0\0")]), "S |F101");
}

#[test]
fn other_methods_than_the_prefaces_are_requests() {
    for method in ["P", "PR", "PRI", "PRIX", "POST", "PATCH"] {
        let request = std::format!("{method} / HTTP/1.1\r\n\r\n");
        assert_eq!(conversation_log(&[('>', &request), ('<', OK5)]), "S F200 |", "{method}");
    }
}

#[test]
fn a_head_with_an_impossible_body_leaves_the_responses_to_count() {
    let bad = "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx";
    let log =
        conversation_log(&[('>', GET), ('<', OK5), ('>', bad), ('<', OK5), ('>', GET), ('<', OK5)]);
    assert_eq!(log, "S F200 ! M S F200 |");
}

#[test]
fn methods_in_lower_case_are_methods() {
    let get = "get / HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(
        conversation_log(&[('>', get), ('<', OK5), ('>', get), ('<', OK0)]),
        "S F200 S F200 |"
    );
}

#[test]
fn a_body_after_an_unreadable_head_is_no_other_protocol() {
    let bad = "POST / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n{";
    let refusal = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(conversation_log(&[('>', bad), ('<', refusal)]), "! M |");
}

#[test]
fn a_length_may_stand_in_the_next_line() {
    let post = "POST / HTTP/1.1\r\nContent-Length:\r\n 2\r\nX: y\r\n\r\nok";
    assert_eq!(
        conversation_log(&[('>', post), ('<', OK5), ('>', GET), ('<', OK0)]),
        "S F200 S F200 |"
    );
}

#[test]
fn a_transfer_encoding_without_a_word_says_nothing() {
    let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: \r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(
        conversation_log(&[('>', GET), ('<', answer), ('>', GET), ('<', OK5)]),
        "S F200 S F200 |"
    );
}

#[test]
fn all_lengths_of_64_bits_but_the_six_highest_are_read() {
    for (length, log) in [("18446744073709551609", "S F200 |"), ("18446744073709551610", "! M |")] {
        let post = std::format!("POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
        assert_eq!(conversation_log(&[('>', &post), ('<', OK5)]), log, "{length}");
    }
}

#[test]
fn a_connection_that_is_not_read_moves_behind_its_segments_and_has_no_request() {
    let mut wire = Http1Fixture::new();
    wire.conn.stop_reading();
    wire.request(GET.as_bytes());
    wire.response(OK5.as_bytes());
    assert!(wire.request_at(wire.sent[0].wrapping_add(700), b"behind a gap"));
    assert!(wire.request_at(wire.sent[0], b"late"));
    let [rx, tx] = [wire.conn.rx.next, wire.conn.tx.next];
    assert_eq!([rx, tx], [wire.sent[0].wrapping_add(712), wire.sent[1]]);
    wire.close();
    assert_eq!((wire.steps, wire.take_log()), (0, String::new()));
}

#[test]
fn a_retransmission_changes_nothing() {
    let mut wire = Http1Fixture::new();
    let seq = wire.sent[0];
    wire.request(GET.as_bytes());
    wire.request_at(seq, GET.as_bytes());
    wire.request_at(seq.wrapping_add(3), &GET.as_bytes()[3..20]);
    let seq = wire.sent[1];
    wire.response(&OK5.as_bytes()[..30]);
    wire.response_at(seq, OK5.as_bytes());
    wire.response_at(seq.wrapping_sub(1), b"0");
    assert_eq!(wire.take_log(), "S F200");
}

#[test]
fn a_gap_inside_a_body_does_no_harm_but_one_across_its_end_is_told() {
    let mut wire = Http1Fixture::new();
    wire.request(b"PUT / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n");
    let body = wire.sent[0];
    assert!(wire.request_at(body.wrapping_add(500), &[b'x'; 500]));
    assert!(wire.request_at(body, &[b'x'; 500]));
    wire.sent[0] = body.wrapping_add(1000);
    let head = wire.sent[0];
    wire.response(OK5.as_bytes());
    assert!(!wire.request_at(head.wrapping_add(10), &GET.as_bytes()[10..]));
    assert!(wire.request_at(head, &GET.as_bytes()[..10]));
    assert!(wire.request_at(head.wrapping_add(10), &GET.as_bytes()[10..]));
    wire.response(OK5.as_bytes());
    assert_eq!(wire.take_log(), "S F200 S F200");
}

#[test]
fn bodies_longer_than_the_sequence_space_are_skipped() {
    let mut wire = Http1Fixture::new();
    wire.request(GET.as_bytes());
    wire.response(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n");
    let piece = std::vec![0_u8; 50_000_000];
    for _ in 0..100 {
        assert_eq!(wire.log, "S ");
        wire.response(&piece);
    }
    wire.request(GET.as_bytes());
    wire.response(OK5.as_bytes());
    assert_eq!(wire.take_log(), "S F200 S F200");
}

#[test]
fn packets_inside_a_body_may_be_passed_over() {
    let mut wire = Http1Fixture::new();
    wire.request(GET.as_bytes());
    wire.response(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n");
    let (mut passed, piece) = (0, [0_u8; 50_000]);
    for _ in 0..60 {
        assert_eq!(wire.log, "S ");
        let seq = wire.sent[1];
        if wire.conn.tx.is_inside_body(seq, 50_000) {
            wire.sent[1] = seq.wrapping_add(50_000);
            passed += 1;
        } else {
            wire.response(&piece);
        }
    }
    // All but the last segment, and one in each MiB.
    assert_eq!((passed, wire.take_log().as_str()), (57, "S F200"));
    assert!(!wire.conn.tx.is_inside_body(wire.sent[1], 1));
    wire.request(GET.as_bytes());
    wire.response(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n");
    let seq = wire.sent[1];
    let inside = [(0, 99), (0, 100), (99, 1), (50, 10), (20, 200), (200, 10)];
    let inside = inside.map(|(at, len)| wire.conn.tx.is_inside_body(seq.wrapping_add(at), len));
    assert_eq!(inside, [true, false, false, true, false, false]);
    // As at the close of a connection: an empty segment behind the last sent byte catches up with what was passed over.
    wire.conn.tx.seek(seq.wrapping_add(60), 0);
    assert_eq!((wire.conn.tx.next, wire.conn.tx.skip), (seq.wrapping_add(60), 40));
    assert!(!wire.conn.tx.is_inside_body(seq, 10), "seen again");
    wire.response_at(seq.wrapping_add(60), &[0; 40]);
    assert_eq!(wire.take_log(), "S F200");
}

#[test]
fn after_lost_requests_each_response_still_counts_once() {
    let mut wire = Http1Fixture::new();
    wire.request(GET.as_bytes());
    wire.response(OK5.as_bytes());
    wire.conn.desync_requests();
    wire.response(OK5.as_bytes());
    wire.request(GET.as_bytes());
    wire.response(OK5.as_bytes());
    assert_eq!(wire.take_log(), "S F200 M S F200");
}

#[test]
fn lost_requests_are_found_again_once() {
    let mut wire = Http1Fixture::new();
    wire.conn.desync_requests();
    let seq = wire.sent[0];
    wire.conn.resync_requests(seq);
    wire.request(&GET.as_bytes()[..10]);
    // Another CPU, which saw the boundaries lost a moment ago.
    wire.conn.resync_requests(seq.wrapping_add(10));
    wire.request(&GET.as_bytes()[10..]);
    wire.response(OK5.as_bytes());
    assert_eq!(wire.take_log(), "S F200");
}

#[test]
fn after_lost_responses_the_next_request_ends_the_last() {
    let mut wire = Http1Fixture::new();
    wire.request(GET.as_bytes());
    wire.conn.desync_responses();
    wire.response(b"whatever");
    wire.request(GET.as_bytes());
    wire.response(OK5.as_bytes());
    assert_eq!(wire.take_log(), "S F0 S F200");
}

#[test]
fn usual_heads_take_one_or_two_steps() {
    let mut wire = Http1Fixture::new();
    wire.request(GET.as_bytes());
    wire.response(
        b"HTTP/1.1 200 OK\r\nServer: nginx/1.22.1\r\nDate: Sat, 21 Nov 2026 10:00:00 GMT\r\n\
          Content-Type: text/plain; charset=utf-8\r\nContent-Length: 612\r\nConnection: keep-alive\r\n\
          ETag: \"6409\"\r\nAccept-Ranges: bytes\r\n\r\n0123456789012345678901234567890123456789",
    );
    assert_eq!(wire.steps, 3);
}
