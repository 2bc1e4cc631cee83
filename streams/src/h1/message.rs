//! Pure: generates messages: most of them usual, some in forms that implementations read differently, some broken.

use crate::rng::SeededRng;

// Elements that these lists repeat are picked more often.

/// Header lines without effect on framing; some look as if they had one.
const NOISE: [&str; 33] = [
    "Host: hello.default.example.com",
    "Host: a",
    "User-Agent: curl/8.14.1",
    "Accept: */*",
    "Cookie: a=b; c=d; e=fffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "Content-Type: application/json",
    "Content-Lengths: 5",
    "X-Content-Length: 5",
    "Content-Length-X: 7",
    "Content-: 1",
    "C: 1",
    "T: chunked",
    "TE: trailers",
    "Trailer: X-Sum",
    "Transfer-Encodings: chunked",
    "Transfer: chunked",
    "X-Transfer-Encoding: chunked",
    "Connection: keep-alive",
    "connection: Keep-Alive",
    "Connection: TE, keep-alive",
    "Connection:",
    "Connectio: close",
    "Connection-X: close",
    "Keep-Alive: timeout=5",
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Expect: 100-continue",
    "expect: 100-Continue",
    "X: ",
    "X:",
    "X-Tabs:\t\ta\tb\t",
    "X-Colons: a: b: c: Content-Length: 9",
    "x-very-long-name-of-a-header-that-has-more-than-thirty-two-bytes: and a value too",
];
/// Header lines that close the connection.
const CLOSE: [&str; 3] = ["Connection: close", "connection:\tx , CLOSE", "Connection: Close"];
/// Header lines that servers read differently or refuse.
const UNUSUAL_LINES: [&str; 21] = [
    " Content-Length: 7",
    "\tTransfer-Encoding: chunked",
    " folded",
    "X: a\r\n folded\r\n\t again",
    "X: a\r\n Content-Length: 3",
    "Host : a",
    "no colon at all",
    ": no name",
    "X\0: nul",
    "X: n\0l",
    "X: a\rb",
    "X: a\r",
    "X: \u{7f}",
    "X: \u{e9}",
    "\u{e9}: x",
    "X(): y",
    "Content-Length : 5",
    "Transfer-Encoding : chunked",
    "Connection: close\r\n , x",
    "Connection: x\r\n close",
    "Connection:\r\n close",
];
/// Forms of the name of Content-Length, all correct.
const LENGTH_NAMES: [&str; 6] = [
    "Content-Length",
    "Content-Length",
    "content-length",
    "CONTENT-LENGTH",
    "cOnTeNt-LeNgTh",
    "Content-length",
];
/// Space around the value of a field.
const SPACES: [&str; 8] = [" ", " ", " ", " ", "", "  ", "\t", " \t "];
/// Forms of the name of Transfer-Encoding, all correct.
const CODING_NAMES: [&str; 5] = [
    "Transfer-Encoding",
    "Transfer-Encoding",
    "transfer-encoding",
    "TRANSFER-ENCODING",
    "tRANSFER-eNCODING",
];
/// Values of Transfer-Encoding. The first six are the plain word.
const CODINGS: [&str; 30] = [
    "chunked",
    "chunked",
    "chunked",
    "chunked",
    "chunked",
    "chunked",
    "Chunked",
    "CHUNKED",
    "cHunKed",
    "gzip, chunked",
    "gzip,chunked",
    "gzip ,, chunked",
    ",chunked",
    "chunked,",
    "chunked ,",
    "chunked, gzip",
    "xchunked",
    "chunkedx",
    "chunke",
    "identity",
    "gzip",
    "",
    "chunked, chunked",
    "chunked;a=b",
    "\"chunked\"",
    "chunked\r\n ",
    "gzip,\r\n chunked",
    "\r\n chunked",
    "chunked\r\n , gzip",
    "chun\r\n ked",
];
/// Values of Content-Length for a body of five bytes, of which only `5` is correct in form.
const LENGTHS: [&str; 24] = [
    "5",
    "5, 5",
    "5,5",
    "5, 6",
    "+5",
    "-5",
    "0x5",
    "5.0",
    "",
    " ",
    "005",
    "00000000000000000000000005",
    "5 5",
    "5,",
    ",5",
    "5;",
    "5\0",
    "\"5\"",
    "18446744073709551615",
    "18446744073709551621",
    "9223372036854775808",
    "99999999999999999999999",
    "4294967301",
    "5\r\n ",
];
/// Size lines of a chunk of five bytes, in correct and in broken forms.
const SIZES: [&str; 24] = [
    "5",
    "05",
    "0000000000000005",
    "00000000000000000000005",
    "5;a",
    "5;a=b",
    "5 ;a=\"b;c\"",
    "5 ",
    "5\t",
    "5 \t ",
    " 5",
    "0x5",
    "+5",
    "-5",
    "5;a\n",
    "5\r;",
    "",
    ";",
    "5g",
    "fffffffffffffffff",
    "10000000000000005",
    "5, 5",
    "5;\0",
    "5;\u{e9}",
];
/// Ends of the bytes of a chunk, of which only the first is correct.
const CHUNK_ENDS: [&str; 7] = ["\r\n", "\n", "", "\r", "\r\r\n", " \r\n", "x\r\n"];
/// Size lines of the last chunk, in correct and in broken forms.
const LAST_CHUNKS: [&str; 8] = ["0", "0", "000", "0;last", "0 ", "00;a=b", "0x0", ""];

/// Generator of messages, with the bytes written so far.
pub(super) struct MessageWriter<'a> {
    pub(super) out: Vec<u8>,
    pub(super) rng: &'a mut SeededRng,
    /// Probability of unusual parts, in thousandths.
    pub(super) unusual_per_mille: usize,
    /// Line end of the present message.
    line_end: &'static str,
    /// True if the message has a header that closes the connection.
    pub(super) closes: bool,
}

/// Framing of the body, as announced by the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageBody {
    None,
    Sized(usize),
    Chunked,
}

impl<'a> MessageWriter<'a> {
    pub(super) fn new(rng: &'a mut SeededRng, unusual_per_mille: usize) -> Self {
        Self { out: Vec::new(), rng, unusual_per_mille, line_end: "\r\n", closes: false }
    }

    /// Chooses the line end of the next message.
    pub(super) fn choose_line_end(&mut self) {
        self.line_end = if self.is_unusual() {
            self.rng.pick(&["\n", "\n", "\n", "\r", "\r\r\n", " \r\n", "\n\r"])
        } else {
            "\r\n"
        };
    }

    /// Writes the given header lines among others, and the empty line.
    pub(super) fn headers(&mut self, mut framing: Vec<String>) {
        if self.closes {
            framing.push(self.rng.pick(&CLOSE).to_owned());
        }
        let mut lines: Vec<String> =
            (0..self.rng.next_length(130)).map(|_| self.noise_line()).collect();
        for line in framing {
            let index = self.rng.next_below(lines.len() + 1);
            lines.insert(index, line);
        }
        lines.iter().for_each(|line| self.line(line));
        self.line("");
    }

    pub(super) fn body(&mut self, body: MessageBody) {
        match body {
            MessageBody::None => {}
            MessageBody::Sized(len) => self.content(len),
            MessageBody::Chunked => self.chunks(),
        }
    }

    pub(super) fn is_unusual(&mut self) -> bool {
        self.unusual_per_mille > 0 && self.rng.next_below(1_000) < self.unusual_per_mille
    }

    pub(super) fn line(&mut self, text: &str) {
        self.out.extend(text.bytes());
        // A quarter as often as other unusual parts, since a head has many lines.
        let end =
            if self.unusual_per_mille > 0 && self.rng.next_below(4_000) < self.unusual_per_mille {
                "\n"
            } else {
                self.line_end
            };
        self.out.extend(end.bytes());
    }

    fn noise_line(&mut self) -> String {
        match self.is_unusual() {
            true => self.rng.pick(&UNUSUAL_LINES).to_owned(),
            false => self.rng.pick(&NOISE).to_owned(),
        }
    }

    /// Generates the header lines that announce a body's length, and that length.
    pub(super) fn framing(&mut self) -> (Vec<String>, MessageBody) {
        let mut lines = Vec::new();
        let body = match self.rng.next_below(5) {
            0..2 => MessageBody::None,
            2..4 => {
                let len = self.rng.next_length(6_000);
                lines.push(self.field(&LENGTH_NAMES, &len.to_string()));
                MessageBody::Sized(len)
            }
            _ => {
                // The first six elements are the plain word.
                let coding = self.rng.pick(&CODINGS[..6]);
                lines.push(self.field(&CODING_NAMES, coding));
                MessageBody::Chunked
            }
        };
        if !self.is_unusual() {
            return (lines, body);
        }
        match self.rng.next_below(5) {
            0 => {
                let length = self.rng.pick(&LENGTHS);
                (vec![self.field(&LENGTH_NAMES, length)], MessageBody::Sized(5))
            }
            1 => {
                let coding = self.rng.pick(&CODINGS);
                (vec![self.field(&CODING_NAMES, coding)], MessageBody::Chunked)
            }
            // The same line twice, or an empty one that ends the head early.
            2 => {
                lines.push(lines.first().cloned().unwrap_or_default());
                (lines, body)
            }
            // A second line, which may contradict the first.
            3 => {
                let length = self.rng.pick(&LENGTHS);
                lines.push(self.field(&LENGTH_NAMES, length));
                (lines, body)
            }
            _ => {
                let coding = self.rng.pick(&CODINGS);
                lines.push(self.field(&CODING_NAMES, coding));
                (lines, if self.rng.next_bool(70) { MessageBody::Chunked } else { body })
            }
        }
    }

    pub(super) fn field(&mut self, names: &[&'static str], value: &str) -> String {
        let [before, after] = [(); 2].map(|()| self.rng.pick(&SPACES));
        format!("{}:{before}{value}{after}", self.rng.pick(names))
    }

    pub(super) fn content(&mut self, len: usize) {
        // An unusual body has a byte too many, or one too few.
        let len =
            if self.is_unusual() { len + 1 - self.rng.next_below(3).min(len + 1) } else { len };
        // The content looks like heads and chunks, to catch a parser that has lost a boundary.
        let bytes =
            b"\r\n\r\nGET / HTTP/1.1\r\nContent-Length: 3\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n";
        self.out.extend(bytes.iter().cycle().skip(self.rng.next_below(bytes.len())).take(len));
    }

    fn chunks(&mut self) {
        for _ in 0..self.rng.next_length(40) {
            if self.is_unusual() {
                let (size, end) = (self.rng.pick(&SIZES), self.rng.pick(&["\r\n", "\n", "\r"]));
                self.out.extend(size.bytes().chain(end.bytes()));
                self.content(5);
            } else {
                let len = 1 + self.rng.next_length(700);
                // The first eight forms are correct, apart from the size itself.
                let (zeros, rest) =
                    SIZES[self.rng.next_below(8)].split_once('5').unwrap_or_default();
                let size =
                    if self.rng.next_bool(50) { format!("{len:x}") } else { format!("{len:X}") };
                self.out.extend(format!("{zeros}{size}{rest}\r\n").bytes());
                self.content(len);
            }
            let end = if self.is_unusual() { self.rng.pick(&CHUNK_ENDS) } else { "\r\n" };
            self.out.extend(end.bytes());
        }
        let last = match self.is_unusual() {
            true => self.rng.pick(&LAST_CHUNKS),
            false => "0",
        };
        self.line(last);
        if self.rng.next_bool(20) {
            for _ in 0..self.rng.next_length(8) {
                let line = self.noise_line();
                self.line(&line);
            }
        }
        self.line("");
    }
}

/// Inserts, changes, removes or copies some bytes at a random place.
pub(super) fn mutate(bytes: &mut Vec<u8>, rng: &mut SeededRng) {
    let at = rng.next_below(bytes.len() + 1);
    match rng.next_below(6) {
        0 | 1 => {
            let piece =
                rng.pick(&["\r", "\n", "\r\n", "\0", " ", ":", "\r\n\r\n", "0\r\n\r\n", ","]);
            bytes.splice(at..at, piece.bytes());
        }
        2 if at < bytes.len() => bytes[at] ^= 1 << rng.next_below(8),
        3 => bytes.truncate(at),
        4 => {
            let end = (at + 1 + rng.next_below(6)).min(bytes.len());
            bytes.drain(at..end);
        }
        _ => {
            let end = (at + rng.next_length(200)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let target = rng.next_below(bytes.len() + 1);
            bytes.splice(target..target, piece);
        }
    }
}
