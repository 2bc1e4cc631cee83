//! Pure: the streams of a connection that are in flight.
//!
//! A stream stands at the place that its number names, or in one of the next: clients count up, so the streams of one
//! moment have places of their own, and only one that lasts far longer than the others is ever in another's way.

use core::hint::black_box;

/// Streams that have a place; servers allow 100 to 250 at once, unless they allow any number.
const PLACES: usize = 256;
/// Places looked at for one stream.
const TRIES: usize = 8;
/// Bit of a number: the stream is in flight. Without it the place is free, and tells which stream was here last.
const OPEN: u32 = 1 << 31;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stream {
    /// The stream's number, with [`OPEN`] or without; 0: there was none.
    id: u32,
    /// When it began, in ticks.
    began: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Table {
    streams: [Stream; PLACES],
    notes: [u8; PLACES],
    /// The place that was looked for; `PLACES`: none. In memory, where the verifier follows one way on from here instead of
    /// one for each place.
    found: u64,
}

impl Table {
    /// Takes a place. `false`: all of its places are taken.
    #[inline(always)]
    pub(super) fn insert(&mut self, id: u32, began: u32) -> bool {
        let place = self.place(id, OPEN, 0);
        if place >= PLACES {
            return false;
        }
        self.streams[place & (PLACES - 1)] = Stream { id: id | OPEN, began };
        self.notes[place & (PLACES - 1)] = 0;
        true
    }

    /// Where a stream stands, or stood until it ended. Number 0 is the connection's own and never found.
    #[inline(always)]
    pub(super) fn find(&mut self, id: u32) -> Option<usize> {
        let place = self.place(id, !OPEN, id);
        if id == 0 || place >= PLACES { None } else { Some(place) }
    }

    /// Whether the stream that was found is in flight.
    #[inline(always)]
    pub(super) fn is_open(&self, place: usize) -> bool {
        self.streams[place & (PLACES - 1)].id & OPEN != 0
    }

    #[inline(always)]
    pub(super) fn note(&self, place: usize) -> u8 {
        self.notes[place & (PLACES - 1)]
    }

    #[inline(always)]
    pub(super) fn set_note(&mut self, place: usize, note: u8) {
        self.notes[place & (PLACES - 1)] = note;
    }

    /// Frees a place. Returns when its stream began.
    #[inline(always)]
    pub(super) fn remove(&mut self, place: usize) -> u32 {
        let stream = &mut self.streams[place & (PLACES - 1)];
        stream.id &= !OPEN;
        stream.began
    }

    /// Frees the places of all streams above this one. Returns how many.
    ///
    /// Without branches: the verifier would follow each.
    #[inline(always)]
    pub(super) fn remove_above(&mut self, last: u32) -> u32 {
        let (mut place, mut kept) = (0, 0);
        let mut before = 0;
        while place < PLACES {
            let stream = &mut self.streams[place & (PLACES - 1)];
            let id = u64::from(stream.id);
            // 1 where it is in flight, and where its number is above the last.
            let taken = black_box(id) >> 31;
            let above = black_box(u64::from(last).wrapping_sub(id & u64::from(!OPEN))) >> 63;
            before += taken;
            kept += taken & (above ^ 1);
            stream.id = (id & !(above << 31)) as u32;
            place = black_box(place + 1);
        }
        before.wrapping_sub(kept) as u32
    }

    /// How many ticks ago the youngest began.
    pub(super) fn youngest(&self, now: u32) -> Option<u32> {
        let open = self.streams.iter().filter(|it| it.id & OPEN != 0);
        open.map(|it| now.wrapping_sub(it.began)).min()
    }

    /// The first of the places of stream `id` whose number is `sought` in the bits of `mask`; `PLACES`: none is.
    #[inline(always)]
    fn place(&mut self, id: u32, mask: u32, sought: u32) -> usize {
        let home = (id >> 1) as usize;
        let this = black_box(&mut *self);
        this.found = PLACES as u64;
        let mut step = 0;
        while step < TRIES {
            let place = (home + step) & (PLACES - 1);
            if this.streams[place].id & mask == sought {
                this.found = place as u64;
                break;
            }
            step += 1;
        }
        black_box(self).found as usize
    }
}

impl Default for Table {
    fn default() -> Self {
        Self { streams: [Stream::default(); PLACES], notes: [0; PLACES], found: 0 }
    }
}
