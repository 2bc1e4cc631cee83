//! Pure: table of a connection's streams in flight.
//!
//! A stream is stored at the place that its number selects, or in one of the next. Clients count up, so concurrent
//! streams have different places. Only a stream that lasts far longer than the others can block another one's place.

use core::hint::black_box;

/// Places of the table; servers allow 100 to 250 concurrent streams, unless they allow any number.
const SLOTS: usize = 256;
/// Places tried for one stream.
const PROBE_SLOTS: usize = 8;
/// Bit of a stored number: the stream is in flight. Without it the place is free, and the number is the last stream
/// there.
const OPEN: u32 = 1 << 31;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StreamSlot {
    /// Number of the stream, with [`OPEN`] or without; 0: there was none.
    id: u32,
    /// Begin of the stream, in ticks.
    started_ticks: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamTable {
    streams: [StreamSlot; SLOTS],
    /// Note of each stream: its status and gRPC outcome so far, as bits of `hpack_status`.
    notes: [u8; SLOTS],
    /// Place that was found; `SLOTS`: none. It is in memory, where the verifier merges the paths of all places.
    found_slot: u64,
}

impl StreamTable {
    /// Stores a stream. Returns false if all of its places are taken.
    #[inline(always)]
    pub(super) fn insert(&mut self, id: u32, began: u32) -> bool {
        // A place is free while its bit `OPEN` is 0, whatever stream was there last.
        let index = self.find_slot(id, OPEN, 0);
        if index >= SLOTS {
            return false;
        }
        self.streams[index & (SLOTS - 1)] = StreamSlot { id: id | OPEN, started_ticks: began };
        self.notes[index & (SLOTS - 1)] = 0;
        true
    }

    /// Returns the place of a stream, also after it has ended. Stream 0 is the connection itself and is never found.
    #[inline(always)]
    pub(super) fn find(&mut self, id: u32) -> Option<usize> {
        let index = self.find_slot(id, !OPEN, id);
        if id == 0 || index >= SLOTS { None } else { Some(index) }
    }

    /// Returns true if the stream at this place is in flight.
    #[inline(always)]
    pub(super) fn is_open(&self, index: usize) -> bool {
        self.streams[index & (SLOTS - 1)].id & OPEN != 0
    }

    #[inline(always)]
    pub(super) fn note(&self, index: usize) -> u8 {
        self.notes[index & (SLOTS - 1)]
    }

    #[inline(always)]
    pub(super) fn set_note(&mut self, index: usize, note: u8) {
        self.notes[index & (SLOTS - 1)] = note;
    }

    /// Frees a place. Returns the begin of its stream.
    #[inline(always)]
    pub(super) fn remove(&mut self, index: usize) -> u32 {
        let stream = &mut self.streams[index & (SLOTS - 1)];
        stream.id &= !OPEN;
        stream.started_ticks
    }

    /// Frees the places of all streams above `last`. Returns their number.
    ///
    /// It has no branches, because the verifier would follow each. The barriers keep the compiler from adding some.
    #[inline(always)]
    pub(super) fn remove_above(&mut self, last: u32) -> u32 {
        let (mut index, mut kept_count) = (0, 0);
        let mut open_count = 0;
        while index < SLOTS {
            let stream = &mut self.streams[index & (SLOTS - 1)];
            let id = u64::from(stream.id);
            // 1 if the stream is in flight, and 1 if its number is above `last`.
            let taken = black_box(id) >> 31;
            let above = black_box(u64::from(last).wrapping_sub(id & u64::from(!OPEN))) >> 63;
            open_count += taken;
            kept_count += taken & (above ^ 1);
            stream.id = (id & !(above << 31)) as u32;
            index = black_box(index + 1);
        }
        open_count.wrapping_sub(kept_count) as u32
    }

    /// Returns the age of the youngest stream in flight, in ticks.
    pub(super) fn youngest_age(&self, now: u32) -> Option<u32> {
        let open = self.streams.iter().filter(|it| it.id & OPEN != 0);
        open.map(|it| now.wrapping_sub(it.started_ticks)).min()
    }

    /// Returns the first place of stream `id` whose number equals `sought` in the bits of `mask`; `SLOTS`: there is
    /// none.
    #[inline(always)]
    fn find_slot(&mut self, id: u32, mask: u32, sought: u32) -> usize {
        // Streams of clients are odd: without the lowest bit, neighbours use neighbouring places.
        let home = (id >> 1) as usize;
        // The barriers make the compiler write `found_slot` to memory instead of keeping it in a register.
        let this = black_box(&mut *self);
        this.found_slot = SLOTS as u64;
        let mut step = 0;
        while step < PROBE_SLOTS {
            let index = (home + step) & (SLOTS - 1);
            if this.streams[index].id & mask == sought {
                this.found_slot = index as u64;
                break;
            }
            step += 1;
        }
        black_box(self).found_slot as usize
    }
}

impl Default for StreamTable {
    fn default() -> Self {
        Self { streams: [StreamSlot::default(); SLOTS], notes: [0; SLOTS], found_slot: 0 }
    }
}
