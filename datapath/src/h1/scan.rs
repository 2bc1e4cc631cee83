//! Pure: fast path through a head: eight bytes at a time, whole lines only.
//!
//! It searches for line ends and, behind each, for the few significant headers in their usual spelling. A line that the
//! bytes at hand do not decide is left, from its begin, to [`super::slow_path`].

use core::hint::black_box;

use super::{
    direction::{Http1Direction, flag},
    request_kind, state,
};
use crate::words::{window_len, word_at};

/// Words at the end of a window that are not searched for line ends, as space for the begin of the last line.
/// The last one holds the number of bytes in the window: see [`crate::words`].
pub(super) const MARGIN_WORDS: usize = 5;

const LOW_BITS: u64 = 0x0101_0101_0101_0101;
const HIGH_BITS: u64 = 0x8080_8080_8080_8080;
const LOWERCASE_BITS: u64 = 0x2020_2020_2020_2020;

pub(super) const fn le_word(text: &[u8; 8]) -> u64 {
    u64::from_le_bytes(*text)
}

const CONTENT: u64 = le_word(b"content-");
const LENGTH: u64 = le_word(b"length: ");
const TRANSFER: u64 = le_word(b"transfer");
const ENCODING: u64 = le_word(b"-encodin");
const G_CHUNKE: u64 = le_word(b"g: chunk");
const CONNECTI: u64 = le_word(b"connecti");
const ON_CLOSE: u64 = le_word(b"on: clos");
const ON_KEEP: u64 = le_word(b"on: keep");

/// Parameter of [`Http1Direction::scan_lines`] with which it classifies lines itself.
pub(super) const IN_PLACE: Option<fn(u32) -> u32> = None;

/// Class of a line by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineClass {
    /// Line without significance for message boundaries.
    Insignificant,
    /// Empty line of this many bytes.
    EmptyLine(u32),
    /// Incomplete or unusual line, left to the slow path.
    NeedsSlowPath,
}

impl LineClass {
    /// Returns the class as a number, for a function of its own in the eBPF programs.
    #[inline(always)]
    pub(super) fn to_code(self) -> u32 {
        match self {
            Self::Insignificant => 0,
            Self::EmptyLine(bytes) => bytes,
            Self::NeedsSlowPath => u32::MAX,
        }
    }

    /// Returns the class of a number that [`to_code`](Self::to_code) has returned.
    #[inline(always)]
    pub(super) fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Insignificant,
            u32::MAX => Self::NeedsSlowPath,
            bytes => Self::EmptyLine(bytes),
        }
    }
}

/// Marks (bit 7 of each byte) the bytes of `word` equal to `\n`; the lowest mark is exact.
#[inline(always)]
fn line_end_marks(word: u64) -> u64 {
    let zero = word ^ (LOW_BITS * b'\n' as u64);
    zero.wrapping_sub(LOW_BITS) & !zero & HIGH_BITS
}

/// Returns ones in the first `len` bytes of a word, or in all.
///
/// It has no branches, which the verifier would follow separately; the compiler must not see that a condition is meant.
#[inline(always)]
pub(crate) fn first_bytes_mask(len: u32) -> u64 {
    let missing = 8 - i64::from(len);
    let missing = (missing & !black_box(missing >> 63)) as u64;
    // Two shifts by half the distance: a shift by 64 is undefined.
    u64::MAX >> ((missing * 4) & 63) >> ((missing * 4) & 63)
}

/// Parses a number of 1 to 7 digits that ends with a carriage return, from eight bytes.
#[inline(always)]
fn parse_short_number(text: u64) -> Option<u64> {
    let end = text ^ (LOW_BITS * b'\r' as u64);
    let end = end.wrapping_sub(LOW_BITS) & !end & HIGH_BITS;
    if end == 0 {
        return None;
    }
    // Number of bits before the carriage return, in whole bytes.
    let below = ((end & end.wrapping_neg()) >> 7).wrapping_sub(1);
    let bits = (below & LOW_BITS).wrapping_mul(LOW_BITS) >> 56 << 3;
    if bits == 0 {
        return None;
    }
    // Digits move to the top, '0' fills up below: always eight digits, most significant first.
    let zeros = (LOW_BITS * b'0' as u64) & (u64::MAX >> bits);
    let digits = (text << (64 - bits)) | zeros;
    let value = digits ^ (LOW_BITS * b'0' as u64);
    if (value | value.wrapping_add(LOW_BITS * 0x76)) & HIGH_BITS != 0 {
        return None;
    }
    // Pairs, then fours, then all eight digits are combined (a SWAR parser).
    let tens = value.wrapping_mul(10).wrapping_add(value >> 8) & 0x00ff_00ff_00ff_00ff;
    let hundreds = tens.wrapping_mul(100).wrapping_add(tens >> 16) & 0x0000_ffff_0000_ffff;
    Some(hundreds.wrapping_mul(10_000).wrapping_add(hundreds >> 32) & 0xffff_ffff)
}

impl Http1Direction {
    /// Decides about a first line from its first 16 bytes, if all of them are here.
    #[inline(always)]
    pub(super) fn parse_first_line<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        request: bool,
    ) {
        let len = window_len(window);
        let first = window[0].to_le();
        let begin = first as u8;
        // Stray line ends and split first lines are left to the slow path.
        if begin == b'\r' || begin == b'\n' || len < 16 {
            return;
        }
        self.flags = 0;
        self.length = 0;
        if !request {
            let second = window[1].to_le();
            // Bytes 9 to 11 as digits: adding 0x76 sets bit 7 of those above 9.
            let code = (second >> 8) ^ 0x30_3030;
            let digits = code & 0xff_ffff;
            let plain = (digits + 0x76_7676) & 0x80_8080 == 0 && digits & 0xf0_f0f0 == 0;
            // The shift drops byte 7, the minor version, which may be any.
            if first << 8 == le_word(b"HTTP/1.\0") << 8 && second as u8 == b' ' && plain {
                let [hundreds, tens, ones, ..] = digits.to_le_bytes();
                self.status = u16::from(hundreds) * 100 + u16::from(tens) * 10 + u16::from(ones);
                self.state = state::SCAN;
            }
            return;
        }
        if begin.is_ascii_alphabetic() && first != le_word(b"PRI * HT") {
            let head = first << 24 == le_word(b"HEAD \0\0\0") << 24;
            let connect = first == le_word(b"CONNECT ");
            self.kind = if head { request_kind::HEAD } else { request_kind::PLAIN };
            if connect {
                self.kind = request_kind::CONNECT;
            }
            self.state = state::SCAN;
        }
    }

    /// Reads header or trailer lines, from the begin of one or from inside one. `classify` takes the place of
    /// [`classify_line`](Self::classify_line): see [`super::UnlockedRead::read_lines_by`].
    ///
    /// Returns the bytes consumed; 0 if the line at the begin of the window must be read byte by byte.
    #[inline(always)]
    pub(super) fn scan_lines<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        classify: Option<impl Fn(u32) -> u32>,
    ) -> u32 {
        if self.state == state::LINE {
            let class = match &classify {
                Some(classify) => LineClass::from_code(classify(0)),
                None => self.classify_line(window, 0, window_len(window)),
            };
            match class {
                LineClass::Insignificant => black_box(&mut *self).state = state::SCAN,
                LineClass::EmptyLine(bytes) => return self.end_head_or_trailers(bytes),
                LineClass::NeedsSlowPath => return 0,
            }
        }
        let mut index = 0;
        while index < WORDS - MARGIN_WORDS {
            let len = window_len(window);
            let base = index as u32 * 8;
            if base >= len {
                break;
            }
            let low = window[index].to_le();
            let mut ends = line_end_marks(low);
            // Bytes behind `len` may be left from an earlier use of the window.
            if len - base < 8 {
                ends &= (1 << ((len - base) * 8)) - 1;
            }
            if ends != 0 {
                let first = ends & ends.wrapping_neg();
                let before = ((first >> 7).wrapping_sub(1) & LOW_BITS).wrapping_mul(LOW_BITS) >> 56;
                let begin = base + (before as u32 & 7) + 1;
                // The next line begins with the next segment.
                if begin >= len {
                    self.state = state::LINE;
                    return len;
                }
                let class = match &classify {
                    Some(classify) => LineClass::from_code(classify(begin)),
                    None => self.classify_line(window, begin as usize, len - begin),
                };
                match class {
                    LineClass::EmptyLine(bytes) => return begin + self.end_head_or_trailers(bytes),
                    // A second line end in this word is rare: reading continues from this line's begin.
                    LineClass::Insignificant if ends & ends.wrapping_sub(1) != 0 => {
                        self.state = state::LINE;
                        return begin;
                    }
                    // A barrier for the verifier: see `Http1Direction::read`.
                    LineClass::Insignificant => drop(black_box(&mut *self)),
                    LineClass::NeedsSlowPath => {
                        self.state = state::LINE;
                        return begin;
                    }
                }
            }
            // Opaque to the compiler, which otherwise unrolls the loop and exhausts the kernel's small stack.
            index = black_box(index + 1);
        }
        window_len(window).min(super::window_capacity::<WORDS>())
    }

    /// Handles the empty line: end of the head, or of the trailers and with them of the message.
    #[inline(always)]
    pub(super) fn end_head_or_trailers(&mut self, bytes: u32) -> u32 {
        let trailer = self.flags & flag::TRAILER != 0;
        self.state = if trailer { state::DONE } else { state::HEAD_END };
        bytes
    }

    /// Classifies the line that begins at byte `at`, of which `here` (at least 1) bytes are at hand, and stores its
    /// content.
    #[inline(always)]
    pub(super) fn classify_line<const WORDS: usize>(
        &mut self,
        window: &[u64; WORDS],
        at: usize,
        here: u32,
    ) -> LineClass {
        let a = word_at(window, at);
        let begin = a as u8;
        if begin == b'\n' {
            return LineClass::EmptyLine(1);
        }
        if begin == b'\r' {
            return match (here > 1, (a >> 8) as u8 == b'\n') {
                (true, true) => LineClass::EmptyLine(2),
                (true, false) => LineClass::Insignificant,
                (false, _) => LineClass::NeedsSlowPath,
            };
        }
        // A folded line continues a list whose tokens only the slow path can read.
        let fold = begin == b' ' || begin == b'\t';
        if fold && self.flags & flag::FOLD != 0 {
            return LineClass::NeedsSlowPath;
        }
        let lower = begin | 0x20;
        // Significant names begin with `c` or `t`. Trailers never change the framing (RFC 9110 §6.5.1).
        if (lower != b'c' && lower != b't') || self.flags & flag::TRAILER != 0 {
            if !fold {
                self.flags &= !flag::FOLD;
            }
            return LineClass::Insignificant;
        }
        let [b, c, d] = [8, 16, 24].map(|behind| word_at(window, at + behind));
        self.classify_significant_line([a, b, c, d], here)
    }

    /// Classifies a line that begins with a letter of a significant name, from the bytes at hand.
    #[inline(always)]
    fn classify_significant_line(&mut self, [a, b, c, d]: [u64; 4], here: u32) -> LineClass {
        let (name, next) = (a | LOWERCASE_BITS, b | LOWERCASE_BITS);
        let matters = name == CONTENT || name == TRANSFER || name == CONNECTI;
        let class = match name {
            _ if here < 8 => LineClass::NeedsSlowPath,
            _ if matters && here < 20 => LineClass::NeedsSlowPath,
            CONTENT if next == LENGTH => self.parse_content_length(c & first_bytes_mask(here - 16)),
            // The header `content-length` without the usual ": ".
            CONTENT if next << 16 == LENGTH << 16 => LineClass::NeedsSlowPath,
            TRANSFER if here < 32 => LineClass::NeedsSlowPath,
            TRANSFER if next == ENCODING => self.parse_transfer_encoding(c | LOWERCASE_BITS, d),
            CONNECTI => self.parse_connection(next, c as u32),
            _ => LineClass::Insignificant,
        };
        if class == LineClass::Insignificant {
            self.flags &= !flag::FOLD;
        }
        class
    }

    #[inline(always)]
    fn parse_content_length(&mut self, digits: u64) -> LineClass {
        match parse_short_number(digits) {
            // A second Content-Length must equal the first, which the slow path checks.
            Some(length) if self.flags & flag::LENGTH == 0 => {
                self.length = length;
                self.flags |= flag::LENGTH;
                LineClass::Insignificant
            }
            _ => LineClass::NeedsSlowPath,
        }
    }

    /// Parses a Transfer-Encoding behind its 16th letter.
    #[inline(always)]
    fn parse_transfer_encoding(&mut self, third: u64, fourth: u64) -> LineClass {
        // "ed\r\n", letters in either case; a blank behind it would begin a folded line.
        let usual = fourth as u32 & 0xffff_dfdf == u32::from_le_bytes(*b"ED\r\n");
        let fold = matches!((fourth >> 32) as u8, b' ' | b'\t');
        if third != G_CHUNKE || !usual || fold {
            return LineClass::NeedsSlowPath;
        }
        self.flags |= flag::CODED | flag::CHUNKED;
        LineClass::Insignificant
    }

    /// Parses a Connection header behind its 8th letter.
    #[inline(always)]
    fn parse_connection(&mut self, next: u64, third: u32) -> LineClass {
        if next == ON_KEEP {
            return LineClass::Insignificant;
        }
        if next == ON_CLOSE && third & 0xff_ffdf == u32::from_le_bytes(*b"E\r\n\0") {
            self.flags |= flag::CLOSES;
            return LineClass::Insignificant;
        }
        LineClass::NeedsSlowPath
    }
}
