//! Pure: unlocked read: reading of a head before the connection's lock is taken.

use core::hint::black_box;

use super::{
    direction::Http1Direction,
    scan::{IN_PLACE, LineClass},
    state, window_capacity,
};
use crate::words::{set_window_len, window_len};

/// Part of a segment, with one direction of a connection after reading it.
///
/// Reading takes most of the time and needs no lock. [`begin`](Self::begin) copies the direction, and the copy may be
/// inconsistent while other CPUs change it. [`read`](Self::read) works on the copy. With the lock held, the copy is
/// committed if all fields of the direction are still as they were copied. Otherwise the copy may have only a part of a
/// change on another CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnlockedRead<const WORDS: usize> {
    /// Bytes of the segment, as little-endian words. Words behind the filled ones are arbitrary.
    pub window: [u64; WORDS],
    direction: Http1Direction,
    /// [`fingerprint`] of the direction when the read began.
    before: u64,
}

/// Returns a number by which two states of a direction are told apart, whichever field differs.
///
/// One number, since each comparison of a field would be a branch for the verifier.
#[inline(always)]
fn fingerprint(direction: &Http1Direction) -> u64 {
    // Odd, so that no difference is lost by a product.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, word: u64| sum.wrapping_mul(FACTOR).rotate_left(29) ^ word;
    let Http1Direction { next, status, flags, state, kind, pattern, matched, .. } = *direction;
    let Http1Direction { desynced, close_requested, skip, length, value, .. } = *direction;
    let first = u64::from(next) | u64::from(status) << 32 | u64::from(flags) << 48;
    let small = u32::from_le_bytes([state, kind, pattern, matched]);
    let second = u64::from(small) | u64::from(desynced) << 32 | u64::from(close_requested) << 48;
    mix(mix(mix(mix(first, second), skip), length), value)
}

impl<const WORDS: usize> Default for UnlockedRead<WORDS> {
    fn default() -> Self {
        Self { window: [0; WORDS], direction: Http1Direction::default(), before: 0 }
    }
}

impl<const WORDS: usize> UnlockedRead<WORDS> {
    /// Begins with the present state of a direction. Returns the offset in a segment of `len` bytes at `seq` at which
    /// reading continues, if it does: a guess, since the lock is not held.
    ///
    /// All parts of the guess come from the copy. A second look at the original might read a direction in which nothing
    /// is read any more.
    #[inline(always)]
    pub fn begin(&mut self, direction: &Http1Direction, seq: u32, len: u32) -> Option<u32> {
        self.direction = *direction;
        // The compiler must not read the original again, which another CPU may have changed.
        let this = black_box(self);
        this.before = fingerprint(&this.direction);
        let offset = this.direction.next.wrapping_sub(seq);
        // The states from `TUNNEL` on read no message.
        (offset < len && this.direction.skip == 0 && this.direction.state < state::TUNNEL)
            .then_some(offset)
    }

    /// Reads `len` (at least 1) bytes of the window, of requests or of responses. With `slow` it reads byte by byte
    /// where necessary.
    #[inline(always)]
    pub fn read(&mut self, len: u32, request: bool, slow: bool) {
        self.direction.read(&mut self.window, len, request, slow);
    }

    /// Stores the number of bytes that were filled into the window.
    #[inline(always)]
    pub fn set_filled_len(&mut self, len: u32) {
        set_window_len(&mut self.window, len);
    }

    /// Returns the number of bytes that were filled into the window.
    #[inline(always)]
    pub fn filled_len(&self) -> u32 {
        window_len(&self.window)
    }

    /// Returns `number`, of which the verifier then knows nothing. It replaces the number of bytes.
    #[inline(always)]
    pub fn untracked(&mut self, number: u32) -> u32 {
        self.set_filled_len(number);
        self.filled_len()
    }

    /// Returns true if the window may begin with lines, and false where only the slow path reads, as in chunk sizes.
    #[inline(always)]
    pub fn may_begin_with_lines(&self) -> bool {
        matches!(self.direction.state, state::START | state::LINE | state::SCAN)
    }

    /// First part of [`read`](Self::read), for a window whose number of bytes is stored. Returns the bytes consumed; 0
    /// leaves them to [`read_bytes`](Self::read_bytes).
    #[inline(always)]
    pub fn read_lines(&mut self, request: bool) -> u32 {
        self.direction.read_lines(&self.window, request, IN_PLACE)
    }

    /// Works as [`read_lines`](Self::read_lines), but each line is classified by `classify`, a function that calls
    /// [`classify_line`](Self::classify_line). It is slower, and the verifier checks that function once instead of for
    /// each word.
    #[inline(always)]
    pub fn read_lines_by(&mut self, request: bool, classify: impl Fn(u32) -> u32) -> u32 {
        self.direction.read_lines(&self.window, request, Some(classify))
    }

    /// Classifies the line that begins at byte `at` of the window, for [`read_lines_by`](Self::read_lines_by).
    #[inline(always)]
    pub fn classify_line(&mut self, at: u32) -> u32 {
        let len = self.filled_len();
        // A whole word, of which the verifier keeps the bound that the comparison gives it.
        let at = black_box(u64::from(at));
        if at >= u64::from(window_capacity::<WORDS>()) || at >= u64::from(len) {
            return LineClass::NeedsSlowPath.to_code();
        }
        self.direction.classify_line(&self.window, at as usize, len - at as u32).to_code()
    }

    /// Second part of [`read`](Self::read): the slow path.
    #[inline(always)]
    pub fn read_bytes(&mut self, request: bool) {
        self.direction.read_bytes(&self.window, request);
    }

    /// Commits the read, if the direction is still as it was copied. To be called with the lock held.
    #[inline(always)]
    pub(super) fn commit(&self, direction: &mut Http1Direction) -> bool {
        let is_unchanged = fingerprint(direction) == self.before;
        if is_unchanged {
            *direction = self.direction;
        }
        is_unchanged
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Heads with usual, unusual, folded and unfinished lines.
    const HEADS: [&str; 5] = [
        "GET / HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Type: a/b\r\nContent-Length: 17\r\nConnection: close\r\n\r\n",
        "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nCookie: a\r\n b\r\n\r\n",
        "PUT / HTTP/1.1\r\ncontent-length:  5\r\nTE: trailers\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 2\nContent-Length: 2\n\nok",
    ];

    /// Returns a read at the begin of a connection, filled with a head.
    fn filled_read(head: &str) -> UnlockedRead<29> {
        let mut read = UnlockedRead::default();
        for (word, bytes) in read.window.iter_mut().zip(head.as_bytes().chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        read.set_filled_len(head.len() as u32);
        read
    }

    #[test]
    fn lines_are_read_alike_in_place_and_by_a_function_of_their_own() {
        for head in HEADS.iter().flat_map(|head| (1..=head.len()).map(|len| &head[..len])) {
            let request = !head.starts_with('H');
            let [mut in_place, mut by_function] = [filled_read(head); 2];
            // The function stores the content of lines, as in the eBPF programs, but here not in the same read.
            let lines = RefCell::new(filled_read(head));
            let used = in_place.read_lines(request);
            let classify = |at| lines.borrow_mut().classify_line(at);
            assert_eq!(by_function.read_lines_by(request, classify), used, "{head:?}");
            let stored = lines.into_inner().direction;
            let mut joined = by_function.direction;
            (joined.flags, joined.length) = (stored.flags, stored.length);
            assert_eq!(joined, in_place.direction, "{head:?}");
        }
    }

    #[test]
    fn a_line_behind_the_filled_bytes_is_left_to_the_slow_path() {
        let mut read = filled_read(HEADS[0]);
        let len = HEADS[0].len() as u32;
        assert_eq!(LineClass::from_code(read.classify_line(len - 2)), LineClass::EmptyLine(2));
        for at in [len, 191, 192, 193, u32::MAX] {
            assert_eq!(LineClass::from_code(read.classify_line(at)), LineClass::NeedsSlowPath);
        }
    }

    #[test]
    fn only_states_of_the_slow_path_skip_the_lines() {
        for state in 0..=state::DONE {
            for head in HEADS {
                let mut read = filled_read(head);
                read.direction.state = state;
                let may_begin = read.may_begin_with_lines();
                assert!(may_begin || read.read_lines(true) == 0, "state {state}");
            }
        }
    }
}
