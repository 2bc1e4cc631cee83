//! Pure: slow path through a head and through chunk sizes: byte by byte, so that segments may be split anywhere.

use core::hint::black_box;

use super::{
    REQUEST_BYTES, RESPONSE_BYTES,
    direction::{Http1Direction, flag},
    pattern::{self, pattern_byte},
    request_kind, state,
};
use crate::words::window_len;

/// Most bytes that one step consumes.
const MAX_STEP_BYTES: usize = 8;
const _: () = assert!(MAX_STEP_BYTES <= RESPONSE_BYTES && MAX_STEP_BYTES <= REQUEST_BYTES);

/// Value of [`Http1Direction::matched`]: the token is the sought one, and has ended.
const PATTERN_TOKEN: u8 = 100;
/// Value of [`Http1Direction::matched`]: the token is another one.
const OTHER_TOKEN: u8 = 200;

impl Http1Direction {
    /// Reads byte by byte until a state is reached that the fast path handles. Returns the bytes consumed, at least 1.
    #[inline(always)]
    pub(super) fn read_slowly<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        request: bool,
    ) -> u32 {
        let mut index = 0;
        while index < MAX_STEP_BYTES {
            let len = window_len(window);
            // At least one byte is consumed, so that the driver always makes progress.
            if index > 0 && index as u32 >= len {
                break;
            }
            let word = window[index >> 3].to_le();
            black_box(&mut *self).read_byte((word >> ((index & 7) * 8)) as u8, request);
            // Opaque to the compiler, so that it keeps the state in memory. There the verifier does not follow each
            // value through each byte.
            index = black_box(index + 1);
            let this = black_box(&mut *self);
            // Bodies are skipped and whole lines are scanned faster by the other functions.
            if this.skip > 0 || this.state == state::SCAN || this.state >= state::BODY {
                break;
            }
        }
        index as u32
    }

    /// Reads one byte in the present state.
    #[inline(always)]
    fn read_byte(&mut self, byte: u8, request: bool) {
        match self.state {
            state::START => self.read_first_byte(byte, request),
            state::FIRST if request => self.read_method_byte(byte),
            state::FIRST if self.pattern == pattern::SETTINGS => self.read_settings_byte(byte),
            state::FIRST => self.read_status_line_byte(byte),
            state::LINE => self.read_line_start(byte),
            state::LINE_CR if byte == b'\n' => {
                self.end_head_or_trailers(1);
            }
            state::LINE_CR => self.state = state::SCAN,
            state::NAME => self.read_header_name_byte(byte),
            state::LENGTH => self.read_before_digits(byte),
            state::DIGITS | state::LENGTH_TAIL => self.read_digit(byte),
            state::TOKENS => self.read_token_byte(byte),
            state::SIZE | state::SIZE_DIGITS => self.read_chunk_size_byte(byte),
            state::SIZE_TAIL if byte == b'\n' => self.end_chunk_size(),
            // Extensions and invalid bytes have no effect until the line's end.
            state::SIZE_TAIL => {}
            state::CHUNK_END => self.read_chunk_end_byte(byte),
            // The request before was the last one, and more bytes follow it in the same segment.
            state::TUNNEL => {}
            // Not reached: `seek` and `scan_lines` leave all other states.
            _ => self.state = state::DESYNC,
        }
    }

    /// Reads the first byte of a message, which decides between HTTP/1, HTTP/2 and other protocols.
    #[inline(always)]
    fn read_first_byte(&mut self, byte: u8, request: bool) {
        if byte == b'\r' || byte == b'\n' {
            return;
        }
        self.begin_message();
        self.kind = request_kind::PLAIN;
        self.matched = 1;
        self.state = state::FIRST;
        if !request {
            self.value = 0;
            self.pattern = pattern::SETTINGS;
            // The status of a 101 stays stored until the new protocol is recognised.
            if byte != 0 {
                self.pattern = pattern::VERSION;
                self.status = 0;
            }
            if byte != 0 && byte != b'H' {
                self.state = state::DESYNC;
            }
            return;
        }
        match byte {
            b'H' => self.pattern = pattern::HEAD,
            b'C' => self.pattern = pattern::CONNECT,
            b'P' => self.pattern = pattern::HTTP2,
            // Methods are usually upper case, but servers accept any token (RFC 9110 §9.1).
            b'A'..=b'Z' | b'a'..=b'z' => self.state = state::SCAN,
            _ => {
                self.flags |= flag::NOT_HTTP1;
                self.state = state::DESYNC;
            }
        }
    }

    /// Reads a byte of a method that matters to the framing: HEAD, CONNECT, or the preface of HTTP/2.
    #[inline(always)]
    fn read_method_byte(&mut self, byte: u8) {
        if byte != pattern_byte(self.pattern, self.matched) {
            self.skip_rest_of_line(byte);
            return;
        }
        self.matched += 1;
        match (self.pattern, self.matched) {
            // The space behind the method is a part of the pattern, so a longer method that begins alike is another
            // one.
            (pattern::HEAD, 5) => {
                self.kind = request_kind::HEAD;
                self.state = state::SCAN;
            }
            (pattern::CONNECT, 8) => {
                self.kind = request_kind::CONNECT;
                self.state = state::SCAN;
            }
            (pattern::HTTP2, 8) => {
                self.flags |= flag::HTTP2_PREFACE;
                self.state = state::DESYNC;
            }
            _ => {}
        }
    }

    /// Reads the first bytes of an HTTP/2 server (RFC 9113 §3.4, §6.5): length and type of a SETTINGS frame. Settings
    /// have six bytes each, and are few.
    #[inline(always)]
    fn read_settings_byte(&mut self, byte: u8) {
        const TYPE: u8 = 4;
        let fits = match self.matched {
            1 => byte == 0,
            2 => byte.is_multiple_of(6),
            _ => byte == TYPE,
        };
        self.value |= u64::from(byte) << ((self.matched & 3) * 8);
        self.matched += 1;
        // Four bytes suffice: no response of HTTP/1 begins with them.
        if fits && self.matched < 4 {
            return;
        }
        self.state = state::DESYNC;
        if fits {
            self.flags |= flag::HTTP2_PREFACE;
        }
    }

    /// Reads `HTTP/1.1 200 OK`: seven letters, any minor version, a space, three digits.
    #[inline(always)]
    fn read_status_line_byte(&mut self, byte: u8) {
        let fits = match self.matched {
            0..=6 => byte == pattern_byte(pattern::VERSION, self.matched),
            8 => byte == b' ',
            _ => byte.is_ascii_digit(),
        };
        if !fits {
            self.state = state::DESYNC;
            return;
        }
        if self.matched > 8 {
            self.status = self.status.wrapping_mul(10).wrapping_add(u16::from(byte - b'0'));
        }
        self.matched += 1;
        if self.matched > 11 {
            self.state = state::SCAN;
        }
    }

    #[inline(always)]
    fn skip_rest_of_line(&mut self, byte: u8) {
        self.state = if byte == b'\n' { state::LINE } else { state::SCAN };
    }

    /// Reads the first byte of a line: of a field, of a folded value, or of the empty line that ends a head.
    #[inline(always)]
    fn read_line_start(&mut self, byte: u8) {
        let fold = self.flags & flag::FOLD != 0;
        let trailer = self.flags & flag::TRAILER != 0;
        match byte {
            b'\n' => {
                self.end_head_or_trailers(1);
                return;
            }
            b'\r' => {
                self.state = state::LINE_CR;
                return;
            }
            // A folded line (RFC 9112 §5.2) continues the value of the line before it.
            b' ' | b'\t' => {
                self.state = match self.pattern {
                    _ if !fold => state::SCAN,
                    pattern::LENGTH => state::LENGTH,
                    _ => state::TOKENS,
                };
                return;
            }
            _ => {}
        }
        self.flags &= !flag::FOLD;
        self.matched = 1;
        self.state = state::NAME;
        // Only a hint for the choice of the name; `read_header_name_byte` compares its other bytes.
        match byte | 0x20 {
            _ if trailer => self.state = state::SCAN,
            b'c' => self.pattern = pattern::LENGTH,
            b't' => self.pattern = pattern::CODING,
            _ => self.state = state::SCAN,
        }
    }

    /// Reads a byte of a field's name, as long as it can be one that frames the body.
    #[inline(always)]
    fn read_header_name_byte(&mut self, byte: u8) {
        let lower = byte.to_ascii_lowercase();
        // `content-length` and `connection` have three letters in common.
        if self.pattern == pattern::LENGTH && self.matched == 3 && lower == b'n' {
            self.pattern = pattern::CONNECTION;
        }
        if lower != pattern_byte(self.pattern, self.matched) {
            self.skip_rest_of_line(byte);
            return;
        }
        self.matched += 1;
        if byte != b':' {
            return;
        }
        self.matched = 0;
        self.state = state::TOKENS;
        match self.pattern {
            pattern::LENGTH => {
                self.value = 0;
                self.state = state::LENGTH;
            }
            pattern::CODING => self.pattern = pattern::CHUNKED,
            _ => self.pattern = pattern::CLOSE,
        }
    }

    #[inline(always)]
    fn read_before_digits(&mut self, byte: u8) {
        match byte {
            b' ' | b'\t' | b'\r' => {}
            b'0'..=b'9' => {
                self.value = u64::from(byte - b'0');
                self.state = state::DIGITS;
            }
            // The number may be in the next line; servers refuse a head without one.
            b'\n' => {
                self.flags |= flag::FOLD;
                self.state = state::LINE;
            }
            _ => self.reject_length(byte),
        }
    }

    #[inline(always)]
    fn read_digit(&mut self, byte: u8) {
        match byte {
            // Beyond this bound a further digit may overflow. The bound also refuses the six highest values below
            // 2^64, on purpose: no message has such a length.
            b'0'..=b'9' if self.state == state::DIGITS && self.value <= (u64::MAX - 9) / 10 => {
                self.value = self.value * 10 + u64::from(byte - b'0');
            }
            b' ' | b'\t' | b'\r' => self.state = state::LENGTH_TAIL,
            b',' => {
                self.set_content_length();
                self.state = state::LENGTH;
            }
            b'\n' => {
                self.set_content_length();
                self.state = state::LINE;
            }
            _ => self.reject_length(byte),
        }
    }

    #[inline(always)]
    fn reject_length(&mut self, byte: u8) {
        self.flags |= flag::BAD_LENGTH;
        self.skip_rest_of_line(byte);
    }

    /// Stores a length. It may be repeated if it is always the same (RFC 9112 §6.3).
    #[inline(always)]
    fn set_content_length(&mut self) {
        if self.flags & flag::LENGTH != 0 && self.length != self.value {
            self.flags |= flag::BAD_LENGTH;
        }
        self.flags |= flag::LENGTH;
        self.length = self.value;
    }

    /// Reads one byte of a comma-separated list in which one token is sought.
    #[inline(always)]
    fn read_token_byte(&mut self, byte: u8) {
        match byte {
            b',' | b'\n' => {
                self.end_token();
                if byte == b'\n' {
                    self.flags |= flag::FOLD;
                    self.state = state::LINE;
                } else {
                    self.matched = 0;
                }
            }
            b' ' | b'\t' | b'\r' => {
                // Blanks within a token end it: `chunked x` is not `chunked`.
                if self.matched != 0 {
                    self.matched =
                        if self.is_pattern_token() { PATTERN_TOKEN } else { OTHER_TOKEN };
                }
            }
            // A NUL never matches, although `pattern_byte` returns 0 behind each name's end.
            _ if byte != 0
                && byte.to_ascii_lowercase() == pattern_byte(self.pattern, self.matched) =>
            {
                self.matched += 1;
            }
            _ => self.matched = OTHER_TOKEN,
        }
    }

    #[inline(always)]
    fn is_pattern_token(&self) -> bool {
        let length = if self.pattern == pattern::CHUNKED { 7 } else { 5 };
        self.matched == length || self.matched == PATTERN_TOKEN
    }

    /// Handles the end of a token: `chunked` must be the last coding; `close` may be anywhere.
    #[inline(always)]
    fn end_token(&mut self) {
        if self.matched == 0 {
            return;
        }
        let sought = self.is_pattern_token();
        self.matched = if sought { PATTERN_TOKEN } else { OTHER_TOKEN };
        if self.pattern == pattern::CHUNKED {
            // Set here and not earlier: a header without a token has no effect.
            self.flags = (self.flags | flag::CODED) & !flag::CHUNKED;
            if sought {
                self.flags |= flag::CHUNKED;
            }
        } else if sought {
            self.flags |= flag::CLOSES;
        }
    }

    /// Reads a byte of a chunk's size. Its digits are hexadecimal, and extensions follow them.
    #[inline(always)]
    fn read_chunk_size_byte(&mut self, byte: u8) {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ if self.state == state::SIZE => {
                self.state = state::DESYNC;
                return;
            }
            b'\n' => return self.end_chunk_size(),
            b'\r' | b' ' | b'\t' | b';' => {
                self.state = state::SIZE_TAIL;
                return;
            }
            _ => {
                self.state = state::DESYNC;
                return;
            }
        };
        // One more digit would overflow.
        if self.length >> 60 != 0 {
            self.state = state::DESYNC;
            return;
        }
        self.state = state::SIZE_DIGITS;
        self.length = self.length << 4 | u64::from(digit);
    }

    /// Handles the end of the line with a chunk's size.
    #[inline(always)]
    fn end_chunk_size(&mut self) {
        self.skip = self.length;
        self.state = state::CHUNK_END;
        if self.length == 0 {
            self.flags |= flag::TRAILER;
            self.state = state::LINE;
        }
        self.length = 0;
    }

    #[inline(always)]
    fn read_chunk_end_byte(&mut self, byte: u8) {
        match byte {
            b'\r' => {}
            b'\n' => self.state = state::SIZE,
            _ => self.state = state::DESYNC,
        }
    }
}
