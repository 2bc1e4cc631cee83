//! Pure: unlocked read: reading of a head before the connection's lock is taken.

use core::hint::black_box;

use super::{direction::Http1Direction, state};

/// Part of a segment, with one direction of a connection after reading it.
///
/// Reading takes most of the time and needs no lock. [`begin`](Self::begin) copies the direction, and the copy may be
/// inconsistent while other CPUs change it. [`read`](Self::read) works on the copy. With the lock held, the copy is
/// committed if the direction is still in the state in which reading began. One position of the stream never has two
/// states that differ in other fields than the compared ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnlockedRead<const WORDS: usize> {
    /// Bytes of the segment, as little-endian words. Words behind the filled ones are arbitrary.
    pub window: [u64; WORDS],
    direction: Http1Direction,
    /// State of the direction when the read began.
    before: DirectionPosition,
}

/// Fields of a direction that identify its state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DirectionPosition {
    next: u32,
    flags: u16,
    /// State, as one of [`state`].
    state: u8,
    /// 1 if boundaries were lost before.
    desynced: u8,
}

impl DirectionPosition {
    #[inline(always)]
    fn of_direction(direction: &Http1Direction) -> Self {
        Self {
            next: direction.next,
            flags: direction.flags,
            state: direction.state,
            desynced: direction.desynced as u8,
        }
    }

    #[inline(always)]
    fn as_word(self) -> u64 {
        let [next, flags] = [u64::from(self.next), u64::from(self.flags)];
        next | flags << 32 | u64::from(self.state) << 48 | u64::from(self.desynced) << 56
    }
}

impl<const WORDS: usize> Default for UnlockedRead<WORDS> {
    fn default() -> Self {
        Self {
            window: [0; WORDS],
            direction: Http1Direction::default(),
            before: DirectionPosition::default(),
        }
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
        this.before = DirectionPosition::of_direction(&this.direction);
        let offset = this.before.next.wrapping_sub(seq);
        // The states from `TUNNEL` on read no message.
        (offset < len && this.direction.skip == 0 && this.before.state < state::TUNNEL)
            .then_some(offset)
    }

    /// Reads `len` (at least 1) bytes of the window, of requests or of responses. With `slow` it reads byte by byte
    /// where necessary.
    #[inline(always)]
    pub fn read(&mut self, len: u32, request: bool, slow: bool) {
        self.direction.read(&self.window, len, request, slow);
    }

    /// Commits the read, if the direction is still in the state in which it began. To be called with the lock held.
    #[inline(always)]
    pub(super) fn commit(&self, direction: &mut Http1Direction) -> bool {
        // Compared as one word: each comparison of a field would be a branch for the verifier.
        let is_unchanged =
            DirectionPosition::of_direction(direction).as_word() == self.before.as_word();
        if is_unchanged {
            *direction = self.direction;
        }
        is_unchanged
    }
}
