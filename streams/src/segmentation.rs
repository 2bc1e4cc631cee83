//! Pure: arrival of a stream over the network: cut anywhere, some segments late, some repeated.

use std::ops::Range;

use datapath::abi::PENDING_SEGMENTS_MAX;

use crate::rng::SeededRng;

/// Longest segment that is buffered whole if it arrives early: `datapath::abi::SEGMENT_PART_BYTES` holds one packet.
const PACKET_BYTES: usize = 1_448;

/// Cuts `from..to` into segments, in order.
pub fn split(from: usize, to: usize, rng: &mut SeededRng) -> Vec<Range<usize>> {
    let most = match rng.next_below(6) {
        0 => 1,
        1 => 3,
        2 => 40,
        3 => 300,
        4 => PACKET_BYTES,
        _ => 70_000,
    };
    let mut pieces = Vec::new();
    let mut at = from;
    while at < to {
        // Single bytes only in short streams: long ones would take too many steps.
        let piece = 1 + rng.next_below(most.max((to - from) / 400));
        let end = (at + piece).min(to);
        pieces.push(at..end);
        at = end;
    }
    pieces
}

/// Order in which the segments of a stream of `len` bytes arrive. Each byte arrives at least once.
///
/// Retransmissions end where a segment has ended, as in TCP. If no segment is out of order, they begin anywhere.
pub fn arrival_order(len: usize, rng: &mut SeededRng) -> Vec<Range<usize>> {
    let mut order = split(0, len, rng);
    let is_reordered = rng.next_bool(35) && order.iter().all(|it| it.len() <= PACKET_BYTES);
    if is_reordered {
        reorder(&mut order, rng);
    }
    if rng.next_bool(35) {
        retransmit(&mut order, is_reordered, rng);
    }
    order
}

/// Delays some segments behind later ones, so that at most [`PENDING_SEGMENTS_MAX`] segments wait at once.
fn reorder(order: &mut [Range<usize>], rng: &mut SeededRng) {
    let mut index = 0;
    while index + 1 < order.len() {
        if rng.next_bool(20) {
            let late = (index + 1 + rng.next_below(PENDING_SEGMENTS_MAX + 1)).min(order.len());
            order[index..late].rotate_left(1);
            index = late;
        }
        index += 1;
    }
}

/// Repeats some segments; unless `is_reordered`, some of them together with earlier bytes.
fn retransmit(order: &mut Vec<Range<usize>>, is_reordered: bool, rng: &mut SeededRng) {
    let mut index = 0;
    while index < order.len() && order.len() < 4_000 {
        if rng.next_bool(15) {
            let Range { start, end } = order[rng.next_below(index + 1)];
            let repeated = match is_reordered {
                // A later end could contain bytes that have not arrived by then.
                true if rng.next_bool(30) => start..start + 1 + rng.next_below(end - start),
                true => start..end,
                false => rng.next_below(start + 1)..end,
            };
            order.insert(index + 1, repeated);
            index += 1;
        }
        index += 1;
    }
}

/// Received part of a stream, up to the first gap.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRanges {
    contiguous: usize,
    out_of_order: Vec<Range<usize>>,
}

impl ReceivedRanges {
    /// Number of bytes before the first gap.
    pub fn contiguous_len(&self) -> usize {
        self.contiguous
    }

    /// Returns true if bytes have arrived behind missing ones.
    pub fn has_gap(&self) -> bool {
        !self.out_of_order.is_empty()
    }

    /// Records a segment; returns the range of bytes that became readable.
    pub fn add_segment(&mut self, segment: &Range<usize>) -> Range<usize> {
        let old_len = self.contiguous;
        self.out_of_order.push(segment.clone());
        while let Some(index) = self
            .out_of_order
            .iter()
            .position(|it| it.start <= self.contiguous && it.end > self.contiguous)
        {
            self.contiguous = self.out_of_order.swap_remove(index).end;
        }
        self.out_of_order.retain(|it| it.end > self.contiguous);
        old_len..self.contiguous
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_a_stream_is_cut_each_byte_arrives() {
        for seed in 0..2_000 {
            let mut rng = SeededRng::new(seed);
            let len = rng.next_length(9_000);
            let mut received = ReceivedRanges::default();
            let mut read = 0;
            for segment in arrival_order(len, &mut rng) {
                let now = received.add_segment(&segment);
                assert_eq!(now.start, read, "seed {seed}");
                read = now.end;
            }
            assert_eq!(read, len, "seed {seed}");
        }
    }
}
