//! Pure: connections to opaque ports: arbitrary bytes, with segments in any order.

use std::{ops::Range, vec};

use streams::{
    ebpf_model::{EbpfModel, ModelEvent},
    rng::SeededRng,
    segmentation::arrival_order,
};

/// Number of connections that the test plays.
const CONNECTIONS: u64 = 10_000;
/// First bytes, some of which the parsers would recognise.
const BEGINS: [&[u8]; 4] =
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"];
/// Most bytes behind them.
const MAX_BYTES: usize = 3_000;

/// Segments that have not arrived yet, of client and server.
type ArrivingSegments = [vec::IntoIter<Range<usize>>; 2];

fn generate_bytes(rng: &mut SeededRng) -> Vec<u8> {
    let mut bytes = BEGINS[rng.next_below(BEGINS.len())].to_vec();
    bytes.extend((0..rng.next_below(MAX_BYTES)).map(|_| rng.next_below(256) as u8));
    bytes
}

/// Returns the next segment, of either end: 0 is the client, 1 the server.
fn next_segment(
    arriving: &mut ArrivingSegments,
    rng: &mut SeededRng,
) -> Option<(usize, Range<usize>)> {
    let first = rng.next_below(2);
    [first, 1 - first].into_iter().find_map(|end| Some((end, arriving[end].next()?)))
}

#[test]
fn a_connection_is_one_request_and_each_of_its_bytes_counts_once() {
    for seed in 0..CONNECTIONS {
        let mut rng = SeededRng::new(seed);
        let mut model = EbpfModel::of_opaque_port();
        let streams = [(); 2].map(|()| generate_bytes(&mut rng));
        let mut arriving =
            streams.each_ref().map(|it| arrival_order(it.len(), &mut rng).into_iter());
        while let Some((end, range)) = next_segment(&mut arriving, &mut rng) {
            let bytes = &streams[end][range.clone()];
            if end == 0 {
                model.request_segment(range.start, bytes);
            } else {
                model.response_segment(range.start, bytes);
            }
        }
        assert_eq!(model.counted_bytes().map(|it| it as usize), streams.each_ref().map(Vec::len));
        assert_eq!(model.events(), [ModelEvent::Started], "seed {seed}");
        model.close(rng.next_bool(50));
        assert_eq!(model.events(), [ModelEvent::Started, ModelEvent::Closed], "seed {seed}");
    }
}
