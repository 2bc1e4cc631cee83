//! Pure: slow path through a head and through chunk sizes: byte by byte, so that segments may be split anywhere.

use core::hint::black_box;

use super::{
    REQUEST_BYTES, RESPONSE_BYTES, at, kind,
    side::{Http1Direction, flag},
};

/// Most bytes that one step consumes.
const STEP: usize = 8;
const _: () = assert!(STEP <= RESPONSE_BYTES && STEP <= REQUEST_BYTES);

/// Value of [`Http1Direction::matched`]: the token is the sought one, and has ended.
const SOUGHT: u8 = 100;
/// Value of [`Http1Direction::matched`]: the token is another one.
const OTHER: u8 = 200;

/// Values of [`Http1Direction::name`]: the text that is being compared.
pub(super) mod name {
    pub(super) const HEAD: u8 = 1;
    pub(super) const CONNECT: u8 = 2;
    pub(in crate::h1) const HTTP2: u8 = 3;
    pub(super) const VERSION: u8 = 4;
    pub(super) const LENGTH: u8 = 5;
    pub(super) const CODING: u8 = 6;
    pub(super) const CONNECTION: u8 = 7;
    pub(super) const CHUNKED: u8 = 8;
    pub(super) const CLOSE: u8 = 9;
    pub(in crate::h1) const SETTINGS: u8 = 10;
}

/// Returns the bytes of a name, first byte lowest; no more than 24 bytes are needed.
#[inline(always)]
const fn letters(name: u8) -> [u64; 3] {
    const fn pack(text: &[u8; 24]) -> [u64; 3] {
        let mut out = [0; 3];
        let mut index = 0;
        while index < 24 {
            out[index / 8] |= (text[index] as u64) << (index % 8 * 8);
            index += 1;
        }
        out
    }
    match name {
        name::HEAD => const { pack(b"HEAD \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::CONNECT => const { pack(b"CONNECT \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::HTTP2 => const { pack(b"PRI * HT\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::VERSION => const { pack(b"HTTP/1.\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::LENGTH => const { pack(b"content-length:\0\0\0\0\0\0\0\0\0") },
        name::CODING => const { pack(b"transfer-encoding:\0\0\0\0\0\0") },
        name::CONNECTION => const { pack(b"connection:\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::CHUNKED => const { pack(b"chunked\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        name::CLOSE => const { pack(b"close\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        _ => [0; 3],
    }
}

/// Returns byte `index` of a name; 0 behind its end.
#[inline(always)]
fn letter(name: u8, index: u8) -> u8 {
    let [first, second, third] = letters(name);
    let word = match index >> 3 {
        0 => first,
        1 => second,
        2 => third,
        _ => 0,
    };
    (word >> ((index & 7) * 8)) as u8
}

impl Http1Direction {
    /// Reads byte by byte until a state is reached that the fast path handles. Returns the bytes consumed, at least 1.
    #[inline(always)]
    pub(super) fn crawl<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        len: u32,
        request: bool,
    ) -> u32 {
        let mut index = 0;
        while index < STEP {
            // At least one byte is consumed, so that the driver always makes progress.
            if index > 0 && index as u32 >= len {
                break;
            }
            let word = window[index >> 3].to_le();
            black_box(&mut *self).byte((word >> ((index & 7) * 8)) as u8, request);
            // Opaque to the compiler, so that it keeps the state in memory. There the verifier does not follow each
            // value through each byte.
            index = black_box(index + 1);
            let this = black_box(&mut *self);
            // Bodies are skipped and whole lines are scanned faster by the other functions.
            if this.skip > 0 || this.at == at::SCAN || this.at >= at::BODY {
                break;
            }
        }
        index as u32
    }

    #[inline(always)]
    fn byte(&mut self, byte: u8, request: bool) {
        match self.at {
            at::START => self.start(byte, request),
            at::FIRST if request => self.method(byte),
            at::FIRST if self.name == name::SETTINGS => self.settings(byte),
            at::FIRST => self.status_line(byte),
            at::LINE => self.line_start(byte),
            at::LINE_CR if byte == b'\n' => {
                self.head_or_trailer_ends(1);
            }
            at::LINE_CR => self.at = at::SCAN,
            at::NAME => self.header_name(byte),
            at::LENGTH => self.before_digits(byte),
            at::DIGITS | at::LENGTH_TAIL => self.digits(byte),
            at::WORDS => self.word(byte),
            at::SIZE | at::SIZE_DIGITS => self.size(byte),
            at::SIZE_TAIL if byte == b'\n' => self.size_ends(),
            // Extensions and invalid bytes have no effect until the line's end.
            at::SIZE_TAIL => {}
            at::CHUNK_END => self.chunk_end(byte),
            // The request before was the last one, and more bytes follow it in the same segment.
            at::TUNNEL => {}
            // Not reached: `seek` and `scan` leave all other states.
            _ => self.at = at::LOST,
        }
    }

    #[inline(always)]
    fn start(&mut self, byte: u8, request: bool) {
        if byte == b'\r' || byte == b'\n' {
            return;
        }
        self.begin();
        self.kind = kind::PLAIN;
        self.matched = 1;
        self.at = at::FIRST;
        if !request {
            self.value = 0;
            self.name = name::SETTINGS;
            // The status of a 101 stays stored until the new protocol is recognised.
            if byte != 0 {
                self.name = name::VERSION;
                self.status = 0;
            }
            if byte != 0 && byte != b'H' {
                self.at = at::LOST;
            }
            return;
        }
        match byte {
            b'H' => self.name = name::HEAD,
            b'C' => self.name = name::CONNECT,
            b'P' => self.name = name::HTTP2,
            // Methods are usually upper case, but servers accept any token (RFC 9110 §9.1).
            b'A'..=b'Z' | b'a'..=b'z' => self.at = at::SCAN,
            _ => {
                self.flags |= flag::FOREIGN;
                self.at = at::LOST;
            }
        }
    }

    #[inline(always)]
    fn method(&mut self, byte: u8) {
        if byte != letter(self.name, self.matched) {
            self.rest_of_line(byte);
            return;
        }
        self.matched += 1;
        match (self.name, self.matched) {
            (name::HEAD, 5) => {
                self.kind = kind::HEAD;
                self.at = at::SCAN;
            }
            (name::CONNECT, 8) => {
                self.kind = kind::CONNECT;
                self.at = at::SCAN;
            }
            (name::HTTP2, 8) => {
                self.flags |= flag::HELLO;
                self.at = at::LOST;
            }
            _ => {}
        }
    }

    /// Reads the first bytes of an HTTP/2 server (RFC 9113 §3.4, §6.5): length and type of a SETTINGS frame. Settings
    /// have six bytes each, and are few.
    #[inline(always)]
    fn settings(&mut self, byte: u8) {
        const TYPE: u8 = 4;
        let fits = match self.matched {
            1 => byte == 0,
            2 => byte.is_multiple_of(6),
            _ => byte == TYPE,
        };
        self.value |= u64::from(byte) << ((self.matched & 3) * 8);
        self.matched += 1;
        if fits && self.matched < 4 {
            return;
        }
        self.at = at::LOST;
        if fits {
            self.flags |= flag::HELLO;
        }
    }

    /// Reads `HTTP/1.1 200 OK`: seven letters, any minor version, a space, three digits.
    #[inline(always)]
    fn status_line(&mut self, byte: u8) {
        let fits = match self.matched {
            0..=6 => byte == letter(name::VERSION, self.matched),
            8 => byte == b' ',
            _ => byte.is_ascii_digit(),
        };
        if !fits {
            self.at = at::LOST;
            return;
        }
        if self.matched > 8 {
            self.status = self.status.wrapping_mul(10).wrapping_add(u16::from(byte - b'0'));
        }
        self.matched += 1;
        if self.matched > 11 {
            self.at = at::SCAN;
        }
    }

    #[inline(always)]
    fn rest_of_line(&mut self, byte: u8) {
        self.at = if byte == b'\n' { at::LINE } else { at::SCAN };
    }

    #[inline(always)]
    fn line_start(&mut self, byte: u8) {
        let fold = self.flags & flag::FOLD != 0;
        let trailer = self.flags & flag::TRAILER != 0;
        match byte {
            b'\n' => {
                self.head_or_trailer_ends(1);
                return;
            }
            b'\r' => {
                self.at = at::LINE_CR;
                return;
            }
            // A folded line (RFC 9112 §5.2) continues the value of the line before it.
            b' ' | b'\t' => {
                self.at = match self.name {
                    _ if !fold => at::SCAN,
                    name::LENGTH => at::LENGTH,
                    _ => at::WORDS,
                };
                return;
            }
            _ => {}
        }
        self.flags &= !flag::FOLD;
        self.matched = 1;
        self.at = at::NAME;
        // Only a hint for the choice of the name; `header_name` compares its other bytes.
        match byte | 0x20 {
            _ if trailer => self.at = at::SCAN,
            b'c' => self.name = name::LENGTH,
            b't' => self.name = name::CODING,
            _ => self.at = at::SCAN,
        }
    }

    #[inline(always)]
    fn header_name(&mut self, byte: u8) {
        let lower = byte.to_ascii_lowercase();
        // `content-length` and `connection` have three letters in common.
        if self.name == name::LENGTH && self.matched == 3 && lower == b'n' {
            self.name = name::CONNECTION;
        }
        if lower != letter(self.name, self.matched) {
            self.rest_of_line(byte);
            return;
        }
        self.matched += 1;
        if byte != b':' {
            return;
        }
        self.matched = 0;
        self.at = at::WORDS;
        match self.name {
            name::LENGTH => {
                self.value = 0;
                self.at = at::LENGTH;
            }
            name::CODING => self.name = name::CHUNKED,
            _ => self.name = name::CLOSE,
        }
    }

    #[inline(always)]
    fn before_digits(&mut self, byte: u8) {
        match byte {
            b' ' | b'\t' | b'\r' => {}
            b'0'..=b'9' => {
                self.value = u64::from(byte - b'0');
                self.at = at::DIGITS;
            }
            // The number may be in the next line; servers refuse a head without one.
            b'\n' => {
                self.flags |= flag::FOLD;
                self.at = at::LINE;
            }
            _ => self.bad_length(byte),
        }
    }

    #[inline(always)]
    fn digits(&mut self, byte: u8) {
        match byte {
            // A further digit would overflow; no server accepts such a length.
            b'0'..=b'9' if self.at == at::DIGITS && self.value <= (u64::MAX - 9) / 10 => {
                self.value = self.value * 10 + u64::from(byte - b'0');
            }
            b' ' | b'\t' | b'\r' => self.at = at::LENGTH_TAIL,
            b',' => {
                self.take_length();
                self.at = at::LENGTH;
            }
            b'\n' => {
                self.take_length();
                self.at = at::LINE;
            }
            _ => self.bad_length(byte),
        }
    }

    #[inline(always)]
    fn bad_length(&mut self, byte: u8) {
        self.flags |= flag::BAD;
        self.rest_of_line(byte);
    }

    /// Stores a length. It may be repeated if it is always the same (RFC 9112 §6.3).
    #[inline(always)]
    fn take_length(&mut self) {
        if self.flags & flag::LENGTH != 0 && self.length != self.value {
            self.flags |= flag::BAD;
        }
        self.flags |= flag::LENGTH;
        self.length = self.value;
    }

    /// Reads one byte of a comma-separated list in which one token is sought.
    #[inline(always)]
    fn word(&mut self, byte: u8) {
        match byte {
            b',' | b'\n' => {
                self.word_ends();
                if byte == b'\n' {
                    self.flags |= flag::FOLD;
                    self.at = at::LINE;
                } else {
                    self.matched = 0;
                }
            }
            b' ' | b'\t' | b'\r' => {
                // Blanks within a token end it: `chunked x` is not `chunked`.
                if self.matched != 0 {
                    self.matched = if self.is_sought() { SOUGHT } else { OTHER };
                }
            }
            // A NUL never matches, although `letter` returns 0 behind each name's end.
            _ if byte != 0 && byte.to_ascii_lowercase() == letter(self.name, self.matched) => {
                self.matched += 1;
            }
            _ => self.matched = OTHER,
        }
    }

    #[inline(always)]
    fn is_sought(&self) -> bool {
        let length = if self.name == name::CHUNKED { 7 } else { 5 };
        self.matched == length || self.matched == SOUGHT
    }

    /// Handles the end of a token: `chunked` must be the last coding; `close` may be anywhere.
    #[inline(always)]
    fn word_ends(&mut self) {
        if self.matched == 0 {
            return;
        }
        let sought = self.is_sought();
        self.matched = if sought { SOUGHT } else { OTHER };
        if self.name == name::CHUNKED {
            // Set here and not earlier: a header without a token has no effect.
            self.flags = (self.flags | flag::CODED) & !flag::CHUNKED;
            if sought {
                self.flags |= flag::CHUNKED;
            }
        } else if sought {
            self.flags |= flag::CLOSES;
        }
    }

    #[inline(always)]
    fn size(&mut self, byte: u8) {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ if self.at == at::SIZE => {
                self.at = at::LOST;
                return;
            }
            b'\n' => return self.size_ends(),
            b'\r' | b' ' | b'\t' | b';' => {
                self.at = at::SIZE_TAIL;
                return;
            }
            _ => {
                self.at = at::LOST;
                return;
            }
        };
        // One more digit would overflow.
        if self.length >> 60 != 0 {
            self.at = at::LOST;
            return;
        }
        self.at = at::SIZE_DIGITS;
        self.length = self.length << 4 | u64::from(digit);
    }

    /// Handles the end of the line with a chunk's size.
    #[inline(always)]
    fn size_ends(&mut self) {
        self.skip = self.length;
        self.at = at::CHUNK_END;
        if self.length == 0 {
            self.flags |= flag::TRAILER;
            self.at = at::LINE;
        }
        self.length = 0;
    }

    #[inline(always)]
    fn chunk_end(&mut self, byte: u8) {
        match byte {
            b'\r' => {}
            b'\n' => self.at = at::SIZE,
            _ => self.at = at::LOST,
        }
    }
}
