//! Pure: HPACK status: outcome of a response from the first bytes of its header block, without HPACK's state (RFC
//! 7541).
//!
//! A status is the first header of its block (RFC 9113 §8.3). Common ones are one byte; others come as text once, and
//! later as a reference to that. References cannot be resolved here, since that takes all headers of the connection.
//! But while all statuses that came as text were seen and of one class, a reference is of that class too. The same
//! holds for `grpc-status`, which is first in the trailers of every known gRPC server.

use core::hint::black_box;

use crate::h1::first_bytes_mask;

/// Bits of a stream's note for the class of its status.
pub(super) const CLASS_MASK: u8 = 7;
/// Bits of a stream's note for the outcome of a gRPC call; see [`grpc`].
pub(super) const GRPC_MASK: u8 = 24;
/// Bit of a stream's note: the final head of the response has come.
const HAS_FINAL_HEAD: u8 = 128;

/// Outcomes of a gRPC call, as far as they can be seen.
pub mod grpc {
    /// Outcome of a call that is no gRPC call, or whose status cannot be seen.
    pub const UNSEEN: u8 = 0;
    /// The call ended with status 0.
    pub const OK: u8 = 8;
    /// The call ended with another status.
    pub const FAILED: u8 = 16;
}

/// Number of words of a block that are read.
const WORDS: usize = 3;

/// First bytes of a header block, the first one lowest.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderBlockPrefix {
    words: [u64; WORDS],
    len: u32,
}

impl HeaderBlockPrefix {
    /// Returns the bytes of `peek` from `begin` (9 to 15) on, `len` of them, followed by zeros.
    #[inline(always)]
    pub(super) fn new(peek: [u64; 4], begin: u32, len: u32) -> Self {
        let shift = (begin & 7) * 8;
        let words = [
            unaligned_word(peek[1], peek[2], shift) & first_bytes_mask(len),
            unaligned_word(peek[2], peek[3], shift) & first_bytes_mask(bytes_after(len, 8)),
            unaligned_word(peek[3], 0, shift) & first_bytes_mask(bytes_after(len, 16)),
        ];
        Self { words, len }
    }

    /// Returns the byte at `at`; 0 behind the end.
    #[inline(always)]
    fn byte(&self, at: u32) -> u8 {
        (self.words[(at >> 3) as usize] >> ((at & 7) * 8)) as u8
    }

    /// Returns the block without its first two bytes.
    #[inline(always)]
    fn without_two_bytes(&self) -> Self {
        let [a, b, c] = self.words;
        let words = [unaligned_word(a, b, 16), unaligned_word(b, c, 16), c >> 16];
        Self { words, len: self.len.saturating_sub(2) }
    }
}

/// Returns the number of the `len` bytes behind the first `before`. It has no branches, like [`first_bytes_mask`].
#[inline(always)]
pub(super) fn bytes_after(len: u32, before: i64) -> u32 {
    let left = i64::from(len) - before;
    (left & !black_box(left >> 63)) as u32
}

/// Returns eight bytes that begin `shift` (8 to 56) bits into `low` and continue in `high`.
#[inline(always)]
fn unaligned_word(low: u64, high: u64, shift: u32) -> u64 {
    low >> (shift & 63) | high << ((64 - shift) & 63)
}

/// Lowest byte that refers to an earlier header of the sender (RFC 7541 §6.1, §2.3.3).
const DYNAMIC_TABLE: u8 = 0x80 + 62;

/// Returns a stream's note after this header block of its response, the last block if it `ends`. `seen` is the
/// connection's state.
#[inline(always)]
pub(super) fn update_note(
    mut note: u8,
    block: &HeaderBlockPrefix,
    ends: bool,
    seen: &mut u32,
) -> u8 {
    let is_head = note & HAS_FINAL_HEAD == 0;
    if is_head {
        let class = status_class(block, seen);
        // An interim response (RFC 9110 §15.2) is followed by another head.
        if class != 1 {
            note = HAS_FINAL_HEAD | class;
        }
    }
    // In memory the verifier merges the paths of all statuses.
    let mut note = note;
    let note = black_box(&mut note);
    if ends {
        let outcome = grpc_outcome(block, is_head, seen);
        // Behind an unseen head, perhaps of an interim response, a reference may be to a status.
        if *note & CLASS_MASK != 0 || block.byte(0) < DYNAMIC_TABLE {
            *note |= outcome;
        }
    }
    *note
}

/// Registers a header block on a stream that is not counted: later references may be to its headers.
#[inline(always)]
pub(super) fn record_uncounted_block(block: &HeaderBlockPrefix, ends: bool, seen: &mut u32) {
    let first = block.byte(0);
    if first < 0x80 {
        *seen |= UNKNOWN_CLASS | UNKNOWN_OUTCOME;
    } else if ends && first < DYNAMIC_TABLE && block.len > 1 {
        // A status, and perhaps the whole outcome of a gRPC call.
        *seen |= UNKNOWN_OUTCOME;
    }
}

/// Bit of `seen`: the class of some status is unknown.
const UNKNOWN_CLASS: u32 = 1;
/// Bits of `seen` for the classes of the statuses that came as text: bit N for class N.
const KNOWN_CLASSES: u32 = 0b11_1110;

/// Returns the class of the status with which a block begins; 0: not seen. `seen` is the connection's state.
#[inline(always)]
fn status_class(block: &HeaderBlockPrefix, seen: &mut u32) -> u8 {
    let first = block.byte(0);
    match first {
        // Entries 8 to 14 of the static table (RFC 7541 appendix A).
        0x88..=0x8a => 2,
        0x8b => 3,
        0x8c | 0x8d => 4,
        0x8e => 5,
        // Text that is added to the dynamic table (§6.2.1). The next arm is text that is not (§6.2.2, §6.2.3).
        0x48..=0x4e => {
            let class = literal_status_class(block.byte(1), block.byte(2));
            // Class 0 sets `UNKNOWN_CLASS`.
            *seen |= 1 << class;
            class
        }
        0x08..=0x0e | 0x18..=0x1e => literal_status_class(block.byte(1), block.byte(2)),
        DYNAMIC_TABLE.. => match *seen & (UNKNOWN_CLASS | KNOWN_CLASSES) {
            0x02 => 1,
            0x04 => 2,
            0x08 => 3,
            0x10 => 4,
            0x20 => 5,
            _ => 0,
        },
        // The status is behind a size update of the table, or in another frame. Later references may be to it.
        _ => {
            *seen |= UNKNOWN_CLASS;
            0
        }
    }
}

/// Returns the class of a status from the length of its text and the first byte: three digits, or their Huffman code in
/// two or three bytes.
#[inline(always)]
fn literal_status_class(length: u8, first: u8) -> u8 {
    match (length, first) {
        (3, b'1'..=b'5') => first - b'0',
        // RFC 7541 appendix B: `1` and `2` have five bits, the digits above have six.
        (0x82 | 0x83, _) if first >> 3 == 0b00001 => 1,
        (0x82 | 0x83, _) if first >> 3 == 0b00010 => 2,
        (0x82 | 0x83, _) if first >> 2 >= 0b01_1001 && first >> 2 <= 0b01_1011 => {
            (first >> 2) - 0b01_1001 + 3
        }
        _ => 0,
    }
}

/// Bits of `seen` for gRPC outcomes that came as text.
const SEEN_GRPC_OK: u32 = 1 << 8;
const SEEN_GRPC_FAILED: u32 = 1 << 9;
/// Bit of `seen`: other outcomes may have come, to which a later reference may be.
const UNKNOWN_OUTCOME: u32 = 1 << 10;

/// The name `grpc-status` in Huffman code, with its length in front.
const GRPC_STATUS_HUFFMAN: [u8; 9] = [0x88, 0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f];
/// The name `grpc-status` as text, with its length in front.
const GRPC_STATUS_LITERAL: [u8; 12] = *b"\x0bgrpc-status";

/// Returns the gRPC outcome in the last header block of a response, as one of [`grpc`]. `is_head`: the block is also
/// the response's head, so that no trailers follow (gRPC's Trailers-Only).
#[inline(always)]
fn grpc_outcome(block: &HeaderBlockPrefix, is_head: bool, seen: &mut u32) -> u8 {
    if !is_head {
        return trailers_outcome(block, seen);
    }
    // Status and content type as references to the table, then the trailers.
    let is_short = block.byte(0) >= 0x80 && block.byte(1) >= DYNAMIC_TABLE && block.byte(1) != 0xff;
    let is_grpc = is_grpc(*seen);
    if is_short && is_grpc {
        return trailers_outcome(&block.without_two_bytes(), seen);
    }
    *seen |= UNKNOWN_OUTCOME;
    grpc::UNSEEN
}

/// Returns true if outcomes were seen, and no other header that a reference may mean.
#[inline(always)]
fn is_grpc(seen: u32) -> bool {
    seen & (SEEN_GRPC_OK | SEEN_GRPC_FAILED) != 0 && seen & UNKNOWN_OUTCOME == 0
}

/// Returns the outcome of a gRPC call by its trailers, of which only the first field is read.
#[inline(always)]
fn trailers_outcome(block: &HeaderBlockPrefix, seen: &mut u32) -> u8 {
    let is_grpc = is_grpc(*seen);
    let is_ok = match block.byte(0) {
        0x00 | 0x10 | 0x40 if is_huffman_grpc_status(block) => {
            is_zero(block.byte(10), block.byte(11))
        }
        0x00 | 0x10 | 0x40 if is_literal_grpc_status(block) => {
            is_zero(block.byte(13), block.byte(14))
        }
        // Names by reference: index 62, or 63 and more.
        0x7e if is_grpc => is_zero(block.byte(1), block.byte(2)),
        0x7f | 0x0f | 0x1f if is_grpc => is_zero(block.byte(2), block.byte(3)),
        DYNAMIC_TABLE.. => {
            return match *seen & (SEEN_GRPC_OK | SEEN_GRPC_FAILED | UNKNOWN_OUTCOME) {
                SEEN_GRPC_OK => grpc::OK,
                SEEN_GRPC_FAILED => grpc::FAILED,
                _ => grpc::UNSEEN,
            };
        }
        _ => {
            *seen |= UNKNOWN_OUTCOME;
            return grpc::UNSEEN;
        }
    };
    *seen |= if is_ok { SEEN_GRPC_OK } else { SEEN_GRPC_FAILED };
    if is_ok { grpc::OK } else { grpc::FAILED }
}

/// Returns true if a text is `0`, by its length and first byte: plain, or in Huffman code.
#[inline(always)]
fn is_zero(length: u8, first: u8) -> bool {
    matches!((length, first), (1, b'0') | (0x81, 0x07))
}

const fn word(bytes: &[u8], from: usize) -> u64 {
    let mut word = 0;
    let mut index = 0;
    while index < 8 && from + index < bytes.len() {
        word |= (bytes[from + index] as u64) << (index * 8);
        index += 1;
    }
    word
}

#[inline(always)]
fn is_huffman_grpc_status(block: &HeaderBlockPrefix) -> bool {
    let (low, high) = (word(&GRPC_STATUS_HUFFMAN, 0), word(&GRPC_STATUS_HUFFMAN, 7));
    let [a, b, _] = block.words;
    block.len > 11 && a >> 8 == low << 8 >> 8 && b as u16 == high as u16
}

#[inline(always)]
fn is_literal_grpc_status(block: &HeaderBlockPrefix) -> bool {
    let (low, high) = (word(&GRPC_STATUS_LITERAL, 0), word(&GRPC_STATUS_LITERAL, 7));
    let [a, b, _] = block.words;
    block.len > 14 && a >> 8 == low << 8 >> 8 && b << 24 == high << 24
}
