//! Pure: arrival of a stream over the network: cut anywhere, some segments late, some repeated.

use std::ops::Range;

use datapath::abi::LATE_MAX;

use crate::dice::SeededRng;

/// Longest segment that is buffered whole if it arrives early: `datapath::abi::KEPT_BYTES` holds one packet.
const PACKET: usize = 1_448;

/// Cuts `from..to` into segments, in order.
pub fn cut(from: usize, to: usize, dice: &mut SeededRng) -> Vec<Range<usize>> {
    let most = match dice.below(6) {
        0 => 1,
        1 => 3,
        2 => 40,
        3 => 300,
        4 => PACKET,
        _ => 70_000,
    };
    let mut pieces = Vec::new();
    let mut at = from;
    while at < to {
        // Single bytes only in short streams: long ones would take too many steps.
        let piece = 1 + dice.below(most.max((to - from) / 400));
        let end = (at + piece).min(to);
        pieces.push(at..end);
        at = end;
    }
    pieces
}

/// Order in which the segments of a stream of `len` bytes arrive. Each byte arrives at least once.
///
/// Retransmissions end where a segment has ended, as in TCP. If no segment is out of order, they begin anywhere.
pub fn arrivals(len: usize, dice: &mut SeededRng) -> Vec<Range<usize>> {
    let mut order = cut(0, len, dice);
    let is_disturbed = dice.chance(35) && order.iter().all(|it| it.len() <= PACKET);
    if is_disturbed {
        disturb(&mut order, dice);
    }
    if dice.chance(35) {
        repeat(&mut order, is_disturbed, dice);
    }
    order
}

/// Delays some segments behind later ones, so that at most [`LATE_MAX`] segments wait at once.
fn disturb(order: &mut [Range<usize>], dice: &mut SeededRng) {
    let mut index = 0;
    while index + 1 < order.len() {
        if dice.chance(20) {
            let late = (index + 1 + dice.below(LATE_MAX + 1)).min(order.len());
            order[index..late].rotate_left(1);
            index = late;
        }
        index += 1;
    }
}

/// Repeats some segments; unless `is_disturbed`, some of them together with earlier bytes.
fn repeat(order: &mut Vec<Range<usize>>, is_disturbed: bool, dice: &mut SeededRng) {
    let mut index = 0;
    while index < order.len() && order.len() < 4_000 {
        if dice.chance(15) {
            let Range { start, end } = order[dice.below(index + 1)];
            let again = match is_disturbed {
                // A later end could contain bytes that have not arrived by then.
                true if dice.chance(30) => start..start + 1 + dice.below(end - start),
                true => start..end,
                false => dice.below(start + 1)..end,
            };
            order.insert(index + 1, again);
            index += 1;
        }
        index += 1;
    }
}

/// Received part of a stream, up to the first gap.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRanges {
    whole: usize,
    ahead: Vec<Range<usize>>,
}

impl ReceivedRanges {
    /// Number of bytes before the first gap.
    pub fn whole(&self) -> usize {
        self.whole
    }

    /// Returns true if bytes have arrived behind missing ones.
    pub fn has_gap(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Records a segment; returns the range of bytes that became readable.
    pub fn take(&mut self, segment: &Range<usize>) -> Range<usize> {
        let before = self.whole;
        self.ahead.push(segment.clone());
        while let Some(index) =
            self.ahead.iter().position(|it| it.start <= self.whole && it.end > self.whole)
        {
            self.whole = self.ahead.swap_remove(index).end;
        }
        self.ahead.retain(|it| it.end > self.whole);
        before..self.whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_a_stream_is_cut_each_byte_arrives() {
        for seed in 0..2_000 {
            let mut dice = SeededRng::new(seed);
            let len = dice.length(9_000);
            let mut received = ReceivedRanges::default();
            let mut read = 0;
            for segment in arrivals(len, &mut dice) {
                let now = received.take(&segment);
                assert_eq!(now.start, read, "seed {seed}");
                read = now.end;
            }
            assert_eq!(read, len, "seed {seed}");
        }
    }
}
