//! Pure: reading ahead of what a connection's lock protects.

use core::hint::black_box;

use super::{at, side::Side};

/// A part of a segment, and one direction of a connection after it was read.
///
/// Reading takes most of the time, and needs no lock: [`begin`](Self::begin) copies the direction as it stands, which may be
/// torn while others move it on, [`read`](Self::read) works on the copy, and with the lock held it is taken in where the
/// direction still stands there. At one place of the stream it is never in two states but for those that are compared.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft<const WORDS: usize> {
    /// The bytes, as little-endian words. What lies behind those filled in does not matter.
    pub window: [u64; WORDS],
    side: Side,
    /// Where it stood.
    before: Place,
}

/// Where a direction stands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    next: u32,
    flags: u16,
    at: u8,
    /// Whether boundaries were lost before.
    lost: u8,
}

impl Place {
    #[inline(always)]
    fn of(side: &Side) -> Self {
        Self { next: side.next, flags: side.flags, at: side.at, lost: side.lost as u8 }
    }

    #[inline(always)]
    fn word(self) -> u64 {
        let [next, flags] = [u64::from(self.next), u64::from(self.flags)];
        next | flags << 32 | u64::from(self.at) << 48 | u64::from(self.lost) << 56
    }
}

impl<const WORDS: usize> Default for Draft<WORDS> {
    fn default() -> Self {
        Self { window: [0; WORDS], side: Side::default(), before: Place::default() }
    }
}

impl<const WORDS: usize> Draft<WORDS> {
    /// Begins with a direction as it stands. Returns where in a segment of `len` bytes at `seq` it reads on, if it does: a
    /// guess, as the lock is yet to be taken.
    ///
    /// What is guessed is guessed from the copy: one of a direction that was looked at before may read where nothing is read
    /// any more.
    #[inline(always)]
    pub fn begin(&mut self, side: &Side, seq: u32, len: u32) -> Option<u32> {
        self.side = *side;
        // The compiler must not look at the original again, which others may have moved on.
        let this = black_box(self);
        this.before = Place::of(&this.side);
        let offset = this.before.next.wrapping_sub(seq);
        (offset < len && this.side.skip == 0 && this.before.at < at::TUNNEL).then_some(offset)
    }

    /// Reads `len` (at least 1) bytes of the window, of requests or of responses. Only `slow` it goes byte by byte where that
    /// is needed.
    #[inline(always)]
    pub fn read(&mut self, len: u32, request: bool, slow: bool) {
        self.side.read(&self.window, len, request, slow);
    }

    /// Moves a direction on, if it stands where this began. To be called with the lock held.
    #[inline(always)]
    pub(super) fn take(&self, side: &mut Side) -> bool {
        let stands = Place::of(side).word() == self.before.word();
        if stands {
            *side = self.side;
        }
        stands
    }
}
