//! Pure: model of buffered segments, which arrived before the gap in front of them was filled, as in
//! `ebpf/src/count/segment_bytes.rs`.

use std::collections::BTreeMap;

use datapath::abi::{PENDING_SEGMENTS_MAX, PendingSegment, SEGMENT_PART_BYTES, SEGMENT_PARTS_MAX};

/// Part of a segment: its first bytes, and its whole length.
#[derive(Clone, Debug)]
pub(super) struct SegmentPart {
    pub(super) seq: u32,
    pub(super) len: u32,
    pub(super) bytes: Vec<u8>,
}

impl SegmentPart {
    pub(super) fn whole(seq: u32, bytes: &[u8]) -> Self {
        Self { seq, len: bytes.len() as u32, bytes: bytes.to_vec() }
    }
}

/// Buffered segments of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingSegments {
    /// Model of the map `KEPT`: parts of segments by sequence number, and the number of bytes from there on.
    buffered: BTreeMap<u32, (Vec<u8>, u32)>,
    /// Model of the field `ServerSocket::pending`.
    listed: [PendingSegment; PENDING_SEGMENTS_MAX],
}

impl PendingSegments {
    /// Buffers a segment. Returns false if all entries are taken.
    pub(super) fn buffer(&mut self, part: &SegmentPart) -> bool {
        if part.len as usize > SEGMENT_PART_BYTES * SEGMENT_PARTS_MAX {
            return false;
        }
        for at in (0..part.len).step_by(SEGMENT_PART_BYTES) {
            let (seq, left) = (part.seq.wrapping_add(at), part.len - at);
            let has_longer = self.buffered.get(&seq).is_some_and(|(_, len)| *len >= left);
            if !has_longer {
                let rest = &part.bytes[at as usize..];
                let bytes = rest[..rest.len().min(SEGMENT_PART_BYTES)].to_vec();
                self.buffered.insert(seq, (bytes, left));
            }
        }
        let fits = |segment: &&mut PendingSegment| segment.len == 0 || segment.seq == part.seq;
        // The last fitting place, because the eBPF programs check all of them in order.
        let Some(slot) = self.listed.iter_mut().rfind(fits) else { return false };
        if slot.len < part.len || slot.seq != part.seq {
            *slot = PendingSegment { seq: part.seq, len: part.len };
        }
        true
    }

    /// Returns a buffered segment that contains the byte at `next`. Segments with only older bytes are dropped.
    pub(super) fn next_due(&mut self, next: u32) -> Option<SegmentPart> {
        let mut due = None;
        for segment in &mut self.listed {
            let behind = next.wrapping_sub(segment.seq) as i32;
            if behind < 0 || segment.len == 0 {
                continue;
            }
            if behind as u32 >= segment.len {
                segment.len = 0;
            } else {
                due = Some(*segment);
            }
        }
        let PendingSegment { seq, len } = due?;
        let at = next.wrapping_sub(seq) / SEGMENT_PART_BYTES as u32 * SEGMENT_PART_BYTES as u32;
        let (seq, len) = (seq.wrapping_add(at), (len - at).min(SEGMENT_PART_BYTES as u32));
        let (bytes, _) = self.buffered.get(&seq).cloned().unwrap_or_default();
        let bytes = bytes[..bytes.len().min(len as usize)].to_vec();
        Some(SegmentPart { seq, len, bytes })
    }
}
