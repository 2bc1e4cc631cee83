//! Random streams against a model, heads against `httparse`, and hostile bytes.

use std::{format, string::String, vec, vec::Vec};

use proptest::{collection::vec as many, prelude::*, sample::select};

use super::{super::*, Http1Fixture};

/// One request and its response, as bytes, with the expected events.
#[derive(Clone)]
struct ExchangeCase {
    request: Vec<u8>,
    request_head: usize,
    response: Vec<u8>,
    status: u16,
}

impl std::fmt::Debug for ExchangeCase {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [request, response] =
            [&self.request, &self.response].map(|it| String::from_utf8_lossy(it));
        write!(out, "{request:?} (head {}) -> {} {response:?}", self.request_head, self.status)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum BodyCase {
    None,
    Sized(usize),
    Chunked,
}

fn body() -> impl Strategy<Value = BodyCase> {
    prop_oneof![
        Just(BodyCase::None),
        (0..700_usize).prop_map(BodyCase::Sized),
        Just(BodyCase::Chunked)
    ]
}

/// Generates header lines without effect, some of which look significant.
fn noise() -> impl Strategy<Value = Vec<String>> {
    let names = select(vec![
        "Host",
        "Content-Type",
        "Content-Encoding",
        "content-lengths",
        "C",
        "T",
        "TE",
        "Transfer",
        "X-Content-Length",
        "Transfer-Encoding-X",
        "Connectio",
        "Cookie",
        "Trailer",
        "c",
        "Date",
        "Content-",
        "x-very-long-name-of-a-header",
    ]);
    let value = "[ -~]{0,60}";
    let fold =
        select(vec!["", "", "", "\r\n Content-Length: 7", "\r\n\tTransfer-Encoding: chunked"]);
    let line =
        (names, value, fold).prop_map(|(name, value, fold)| format!("{name}: {value}{fold}"));
    many(line, 0..6)
}

fn cased(name: &str, upper: u32) -> String {
    let flip = |(index, letter): (usize, char)| match upper >> (index % 32) & 1 {
        1 => letter.to_ascii_uppercase(),
        _ => letter.to_ascii_lowercase(),
    };
    name.chars().enumerate().map(flip).collect()
}

fn framing(body: BodyCase, upper: u32) -> Option<String> {
    let space = ["", " ", "  ", "\t"][upper as usize % 4];
    match body {
        BodyCase::None => None,
        BodyCase::Sized(len) => {
            Some(format!("{}:{space}{len}{space}", cased("content-length", upper)))
        }
        BodyCase::Chunked => Some(format!(
            "{}:{space}{}",
            cased("transfer-encoding", upper),
            cased("chunked", !upper)
        )),
    }
}

/// Generates body bytes that look like heads and chunk sizes.
fn content(len: usize) -> Vec<u8> {
    b"\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        .iter()
        .copied()
        .cycle()
        .take(len)
        .collect()
}

fn encoded(body: BodyCase, chunks: &[usize], trailers: &[String]) -> Vec<u8> {
    let mut out = Vec::new();
    match body {
        BodyCase::None => {}
        BodyCase::Sized(len) => out = content(len),
        BodyCase::Chunked => {
            for len in chunks.iter().filter(|len| **len > 0) {
                let extension = ["", ";a", ";name=\"value, value; value\"", "  "][len % 4];
                out.extend(format!("{len:X}{extension}\r\n").bytes());
                out.extend(content(*len));
                out.extend(b"\r\n");
            }
            out.extend(b"0\r\n");
            trailers.iter().for_each(|line| out.extend(format!("{line}\r\n").bytes()));
            out.extend(b"\r\n");
        }
    }
    out
}

/// Builds a head of these lines, with the framing header among them.
fn head(
    first: &str,
    noise: &[String],
    framing: Option<String>,
    place: usize,
    end: &str,
) -> Vec<u8> {
    let mut lines = noise.to_vec();
    if let Some(line) = framing {
        lines.insert(place % (lines.len() + 1), line);
    }
    let mut out = format!("{first}{end}");
    lines.iter().for_each(|line| out.push_str(&format!("{line}{end}")));
    out.push_str(end);
    out.into_bytes()
}

prop_compose! {
    fn exchange()(
        method in select(vec!["GET", "HEAD", "POST", "CONN", "HEA", "PATCH", "CONNECTS", "HEADS", "P"]),
        target in "/[a-z0-9/]{0,40}",
        status in select(vec![200_u16, 201, 204, 301, 304, 400, 404, 500, 503]),
        bodies in (body(), body()),
        chunks in (many(1..300_usize, 0..4), many(1..300_usize, 0..4)),
        noise in (noise(), noise(), noise()),
        place in any::<usize>(),
        upper in any::<u32>(),
        interim in 0..3_usize,
        stray in select(vec!["", "", "", "\r\n", "\n\r\n"]),
        ends in (select(vec!["\r\n", "\r\n", "\n"]), select(vec!["\r\n", "\r\n", "\n"])),
    ) -> ExchangeCase {
        let (begin_request_body, mut response_body) = bodies;
        let first = format!("{stray}{method} {target} HTTP/1.1");
        let mut request = head(&first, &noise.0, framing(begin_request_body, upper), place, ends.0);
        let request_head = request.len();
        request.extend(encoded(begin_request_body, &chunks.0, &noise.2));
        if response_body == BodyCase::None {
            response_body = BodyCase::Sized(0);
        }
        let mut response = Vec::new();
        for code in [100, 103].iter().take(interim) {
            response.extend(head(&format!("HTTP/1.1 {code} Wait"), &noise.2, None, 0, "\r\n"));
        }
        let line = format!("HTTP/1.{} {status} Text", place % 2);
        response.extend(head(&line, &noise.1, framing(response_body, !upper), place, ends.1));
        let bare = method == "HEAD" || status == 204 || status == 304;
        if !bare {
            response.extend(encoded(response_body, &chunks.1, &noise.2));
        }
        ExchangeCase { request, request_head, response, status }
    }
}

/// Model of the expected log, with the position of each direction.
struct ExpectedLogModel {
    heads: Vec<usize>,
    ends: Vec<(usize, u16)>,
    asked: usize,
    answered: usize,
    log: String,
}

impl ExpectedLogModel {
    fn new(exchanges: &[ExchangeCase]) -> Self {
        let (mut heads, mut ends, mut sent, mut received) = (Vec::new(), Vec::new(), 0, 0);
        for each in exchanges {
            heads.push(sent + each.request_head);
            sent += each.request.len();
            received += each.response.len();
            ends.push((received, each.status));
        }
        Self { heads, ends, asked: 0, answered: 0, log: String::new() }
    }

    fn requested(&mut self, sent: usize) {
        while self.heads.get(self.asked).is_some_and(|end| *end <= sent) {
            if self.asked == self.answered {
                self.log.push_str("S ");
            }
            self.asked += 1;
        }
    }

    fn answered(&mut self, received: usize) {
        while self.ends.get(self.answered).is_some_and(|(end, _)| *end <= received) {
            self.log.push_str(&format!("F{} ", self.ends[self.answered].1));
            self.answered += 1;
            if self.asked > self.answered {
                self.log.push_str("S ");
            }
        }
    }

    /// Returns the position up to which responses may have come: the end of those whose request's head is sent.
    fn allowed(&self) -> usize {
        if self.asked == 0 { 0 } else { self.ends[self.asked - 1].0 }
    }
}

/// Small random generator: split points are many and need no shrinking.
struct SplitRng(u64);

impl SplitRng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn piece(&mut self) -> usize {
        1 + match self.below(4) {
            0 => self.below(3),
            1 => self.below(40),
            2 => self.below(400),
            _ => self.below(4000),
        }
    }
}

/// Plays the exchanges once, cut and interleaved at random, some segments repeated.
fn play_exchanges(exchanges: &[ExchangeCase], mut dice: SplitRng) {
    let requests: Vec<u8> = exchanges.iter().flat_map(|each| each.request.clone()).collect();
    let responses: Vec<u8> = exchanges.iter().flat_map(|each| each.response.clone()).collect();
    let (mut wire, mut model) = (Http1Fixture::new(), ExpectedLogModel::new(exchanges));
    let first = wire.sent;
    let (mut sent, mut received) = (0, 0);
    while sent < requests.len() || received < responses.len() {
        let allowed = model.allowed();
        if received < allowed && (sent == requests.len() || dice.below(2) == 0) {
            let end = (received + dice.piece()).min(allowed);
            let from = received - dice.below(2) * dice.below(received + 1);
            wire.response_at(first[1].wrapping_add(from as u32), &responses[from..end]);
            received = end;
            model.answered(received);
        } else if sent < requests.len() {
            let end = (sent + dice.piece()).min(requests.len());
            let from = sent - dice.below(2) * dice.below(sent + 1);
            wire.request_at(first[0].wrapping_add(from as u32), &requests[from..end]);
            sent = end;
            model.requested(sent);
        }
        assert_eq!(wire.log, model.log, "sent {sent}, received {received}");
    }
    assert!(!wire.conn.is_busy());
    wire.close();
    assert_eq!(wire.log, model.log);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_split_of_any_stream_gives_what_the_model_says(
        exchanges in many(exchange(), 1..6),
        seed in any::<u64>(),
    ) {
        for round in 0..34 {
            play_exchanges(&exchanges, SplitRng(seed ^ (round << 40)));
        }
    }

    #[test]
    fn heads_end_where_httparse_says(each in exchange()) {
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let parsed = httparse::Request::new(&mut headers).parse(&each.request);
        // `httparse` refuses folded request lines.
        if let Ok(status) = parsed {
            prop_assert_eq!(status, httparse::Status::Complete(each.request_head));
        }
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut config = httparse::ParserConfig::default();
        config.allow_obsolete_multiline_headers_in_responses(true);
        let mut response = httparse::Response::new(&mut headers);
        let status = config.parse_response(&mut response, &each.response);
        if let Ok(httparse::Status::Complete(end)) = status {
            let mut wire = Http1Fixture::new();
            wire.conn.desync_requests();
            wire.response(&each.response[..end - 1]);
            prop_assert_eq!(wire.conn.tx.status, response.code.unwrap_or(0));
            let before = wire.conn.tx.state;
            prop_assert!((state::SCAN..=state::TOKENS).contains(&before));
            wire.response(&each.response[end - 1..end]);
            prop_assert!(!(state::FIRST..=state::TOKENS).contains(&wire.conn.tx.state));
        }
    }

    #[test]
    fn hostile_bytes_neither_stop_it_nor_break_the_gauge(
        words in many(prop_oneof![
            select(vec![
                "GET / HTTP/1.1\r\n", "HTTP/1.1 200 OK\r\n", "\r\n", "\n", "\r", "\r\n\r\n", "Content-Length: ",
                "99999999999999999999999", "5", "-1", "Transfer-Encoding: chunked\r\n", "chunked", "0\r\n\r\n", " ", ",",
                "ffffffffffffffffffffff\r\n", "Connection: close\r\n", "\r\n x", "HTTP/1.1 101 \r\n\r\n", "HEAD / HTTP/1.1\r\n\r\n",
                "CONNECT a HTTP/1.1\r\n\r\n", "HTTP/1.1 1", "\0", "4;x\r\nabcd\r\n", "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 204 \r\n\r\n",
            ]).prop_map(|text| text.as_bytes().to_vec()),
            many(any::<u8>(), 0..300),
        ], 0..24),
        seed in any::<u64>(),
    ) {
        let bytes: Vec<u8> = words.concat();
        for round in 0..8 {
            play_hostile_bytes(&bytes, SplitRng(seed ^ (round << 40)));
        }
    }
}

fn play_hostile_bytes(bytes: &[u8], mut dice: SplitRng) {
    let mut wire = Http1Fixture::new();
    for _ in 0..40 {
        let from = dice.below(bytes.len() + 1);
        let end = (from + dice.piece()).min(bytes.len());
        let side = dice.below(2);
        let jump = [0, 0, 0, 1, 50, 70_000, u32::MAX][dice.below(7)];
        let seq = wire.sent[side].wrapping_add(jump);
        wire.sent[side] = wire.sent[side].wrapping_add((end - from) as u32);
        let fits = match side {
            0 => wire.request_at(seq, &bytes[from..end]),
            _ => wire.response_at(seq, &bytes[from..end]),
        };
        if !fits && dice.below(2) == 0 {
            let lost =
                if side == 0 { wire.conn.desync_requests() } else { wire.conn.desync_responses() };
            super::log(&mut wire.log, lost, 0);
        }
        let open = wire.log.matches('S').count() - wire.log.matches(['F', 'X']).count();
        assert_eq!(open, usize::from(wire.conn.is_busy()), "{}", wire.log);
    }
    wire.close();
    assert_eq!(wire.log.matches('S').count(), wire.log.matches(['F', 'X']).count());
}
