use proptest::prelude::*;

use super::*;

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("small").to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
    [&head[..], payload].concat()
}

/// One field of a block, or a new size of the table.
#[derive(Clone, Debug)]
enum HpackFieldCase {
    Indexed(usize),
    /// Field with a name from the table (`Ok`) or a literal one (`Err`); `adds`: it is added to the table.
    Literal {
        name: Result<usize, usize>,
        value: usize,
        adds: bool,
    },
    TableSize(usize),
}

/// Encodes an integer behind the high bits of `first`, in which `bits` bits are left for it (RFC 7541 §5.1).
fn encode_integer(first: u8, bits: u32, value: usize) -> Vec<u8> {
    let most = (1usize << bits) - 1;
    let low = |it: usize| u8::try_from(it).expect("few bits");
    if value < most {
        return vec![first | low(value)];
    }
    let (mut all, mut rest) = (vec![first | low(most)], value - most);
    while rest >= 128 {
        all.push(low(rest % 128) | 128);
        rest /= 128;
    }
    all.push(low(rest));
    all
}

fn encode_string(length: usize) -> Vec<u8> {
    // All bits are set: a byte that is read as a field would give a wrong count at once.
    [encode_integer(0, 7, length), vec![0xff; length]].concat()
}

impl HpackFieldCase {
    fn encode(&self) -> Vec<u8> {
        match *self {
            Self::Indexed(at) => encode_integer(0x80, 7, at),
            Self::TableSize(size) => encode_integer(0x20, 5, size),
            Self::Literal { name, value, adds } => {
                let (first, bits) = if adds { (0x40, 6) } else { (0, 4) };
                let name = match name {
                    Ok(at) => encode_integer(first, bits, at),
                    Err(length) => [encode_integer(first, bits, 0), encode_string(length)].concat(),
                };
                [name, encode_string(value)].concat()
            }
        }
    }
}

fn hpack_fields() -> impl Strategy<Value = HpackFieldCase> {
    let name = prop_oneof![(1usize..200).prop_map(Ok), (0usize..300).prop_map(Err)];
    prop_oneof![
        (1usize..300).prop_map(HpackFieldCase::Indexed),
        (name, 0usize..300, any::<bool>())
            .prop_map(|(name, value, adds)| HpackFieldCase::Literal { name, value, adds }),
        prop_oneof![Just(0usize), 0usize..5000].prop_map(HpackFieldCase::TableSize),
    ]
}

/// Frames of a block, cut into pieces of `cut` bytes. The first may have padding and a priority.
fn encode_block(
    fields: &[HpackFieldCase],
    cut: usize,
    padding: Option<u8>,
    priority: bool,
) -> Vec<u8> {
    // Cut without regard to the fields, as frames may end within a field (RFC 9113 §4.3).
    let bytes: Vec<u8> = fields.iter().flat_map(HpackFieldCase::encode).collect();
    let mut pieces: Vec<&[u8]> = bytes.chunks(cut).collect();
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let last = pieces.len() - 1;
    let frames = pieces.iter().enumerate().map(|(at, piece)| {
        let end = if at == last { frame_flag::END_HEADERS } else { 0 };
        if at > 0 {
            return frame(frame_kind::CONTINUATION, end, piece);
        }
        let mut payload = padding.map(|it| vec![it]).unwrap_or_default();
        payload.extend(if priority { &[0xff; HEADERS_PRIORITY_BYTES][..] } else { &[] });
        payload.extend_from_slice(piece);
        payload.extend(vec![0xff; padding.map_or(0, usize::from)]);
        let flags = [padding.map(|_| frame_flag::PADDED), priority.then_some(frame_flag::PRIORITY)];
        frame(
            frame_kind::HEADERS,
            flags.into_iter().flatten().fold(end, |all, it| all | it),
            &payload,
        )
    });
    frames.collect::<Vec<_>>().concat()
}

/// Inspector after it received `all` in pieces of these lengths, and the number of bytes of bodies it counted.
fn inspect_in_pieces(all: &[u8], cuts: &[usize]) -> (Http2FrameInspector, usize) {
    let (mut inspector, mut rest, mut counted) = (Http2FrameInspector::after_preface(7), all, 0);
    for cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, after) = rest.split_at((*cut).min(rest.len()));
        counted += inspector.inspect(piece);
        rest = after;
    }
    (inspector, counted)
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1usize..64, 1..10)
}

proptest! {
    /// Bytes of bodies are counted once, into whatever pieces the frames are cut.
    #[test]
    fn bytes_of_bodies_are_counted_once(
        frames in prop::collection::vec((0u8..10, 0usize..300), 0..20),
        cuts in cuts(),
    ) {
        let mut all = b"preface".to_vec();
        frames.iter().for_each(|(kind, payload)| all.extend(frame(*kind, 0, &vec![0; *payload])));
        let wanted: usize = frames.iter().filter(|it| it.0 == 0).map(|it| it.1).sum();
        prop_assert_eq!(inspect_in_pieces(&all, &cuts).1, wanted);
    }

    /// The table's changes are found whatever else a block contains, and however it is cut, padded and mixed with
    /// bodies.
    #[test]
    fn table_updates_of_a_block_are_detected(
        fields in prop::collection::vec(hpack_fields(), 0..12),
        cut in 1usize..400,
        padding in prop::option::of(any::<u8>()),
        priority in any::<bool>(),
        is_acked in any::<bool>(),
        cuts in cuts(),
    ) {
        let settings = if is_acked { frame(frame_kind::SETTINGS, frame_flag::ACK, &[]) } else { frame(frame_kind::SETTINGS, 0, &[]) };
        let body = frame(frame_kind::DATA, 0, &[0xff; 99]);
        let block = encode_block(&fields, cut, padding, priority);
        let all = [&b"preface"[..], &settings, &body, &block, &body].concat();
        let (inspector, counted) = inspect_in_pieces(&all, &cuts);
        prop_assert_eq!(counted, 198);
        let adds = fields.iter().any(|it| matches!(it, HpackFieldCase::Literal { adds: true, .. }));
        let empties = fields.iter().any(|it| matches!(it, HpackFieldCase::TableSize(0)));
        prop_assert_eq!(inspector.is_table_disabled, is_acked && empties);
        let came = all.len() - body.len();
        let wanted = if adds && !inspector.is_table_disabled { came.min(MAX_BYTES_PER_ENTRY) } else { 0 };
        prop_assert_eq!(inspector.entry_bytes, wanted);
    }
}

/// Field `:path` with the value `/`, added to the table as a new entry.
const ENTRY: HpackFieldCase = HpackFieldCase::Literal { name: Ok(4), value: 1, adds: true };

#[test]
fn entries_hold_the_buffers_that_came_with_them_until_the_client_has_no_table() {
    let mut frames = Http2FrameInspector::after_preface(0);
    let adds =
        [encode_block(&[ENTRY], 100, None, false), frame(frame_kind::DATA, 0, &vec![0; 15_000])]
            .concat();
    frames.inspect(&encode_block(&[ENTRY], 100, None, false));
    assert_eq!(frames.entry_bytes, 9 + ENTRY.encode().len());
    for _ in 0..10 {
        frames.inspect(&adds);
    }
    assert!(frames.entry_bytes > 9 * 15_000, "{}", frames.entry_bytes);
    for _ in 0..10_000 {
        frames.inspect(&adds);
    }
    let most = MAX_TABLE_ENTRIES * MAX_BYTES_PER_ENTRY;
    assert_eq!(frames.entry_bytes, most, "an entry that is pushed out holds nothing");
    let empties = encode_block(&[HpackFieldCase::TableSize(0), ENTRY], 100, None, false);
    frames.inspect(&empties);
    assert_eq!(frames.entry_bytes, most, "its settings may still allow a table");
    frames.inspect(&[frame(frame_kind::SETTINGS, frame_flag::ACK, &[]), empties].concat());
    assert_eq!(frames.entry_bytes, 0);
    frames.inspect(&adds);
    assert_eq!(frames.entry_bytes, 0, "a table of size 0 holds nothing");
}
