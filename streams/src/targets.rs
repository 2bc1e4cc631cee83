//! Pure: fuzz targets, shared by the fuzzer and the test of its corpus.

use crate::{ebpf_model::EbpfModel, h1, h2, rng::SeededRng, totals::ConformanceTotals};

/// Target: its name, which is also its folder in `fuzz/corpus`, and the function that plays bytes with a generator's
/// cuts.
pub type FuzzTarget =
    (&'static str, fn(&[u8], &mut SeededRng) -> Result<ConformanceTotals, String>);

/// All fuzz targets of this crate.
pub const ALL: [FuzzTarget; 4] = [
    ("h1", h1),
    ("h1_differential", h1_differential),
    ("h2", h2),
    ("h2_differential", h2_differential),
];

/// Targets of other crates, whose own tests play their corpus.
pub const TARGETS_OF_OTHER_CRATES: [&str; 5] =
    ["client_hello", "h1_fast_path", "http1_responses", "proxy_protocol", "request_targets"];

/// Plays `bytes` to a target with one series of cuts.
///
/// # Panics
///
/// Panics with the error of the target.
pub fn check(name: &str, bytes: &[u8]) {
    let target = ALL.iter().find(|(it, _)| *it == name);
    let (_, play) = target.expect("a file of fuzz/targets names it");
    if let Err(what) = play(bytes, &mut SeededRng::from_hash_of(bytes)) {
        panic!("{what}\n  bytes: {}", bytes.escape_ascii());
    }
}

/// Plays arbitrary bytes as segments in any order. Only the model's own invariants are checked.
///
/// A segment begins with two bytes: its kind and its length. Its bytes follow. Of the kind, bit 0 is set for a response,
/// bits 1 to 3 choose its place relative to the present end, and bits 4 to 7 are the distance.
pub fn h1(bytes: &[u8], _: &mut SeededRng) -> Result<ConformanceTotals, String> {
    play_segments(EbpfModel::new(), [0; 2], bytes);
    Ok(ConformanceTotals::default())
}

/// Plays arbitrary bytes as segments behind the preface of HTTP/2, with the same checks as [`h1()`].
pub fn h2(bytes: &[u8], _: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let mut model = EbpfModel::new();
    model.request_segment(0, h2::frames::PREFACE);
    play_segments(model, [h2::frames::PREFACE.len(), 0], bytes);
    Ok(ConformanceTotals::default())
}

/// Plays segments that continue at the present ends of requests and responses, or near them.
fn play_segments(mut model: EbpfModel, mut ends: [usize; 2], mut bytes: &[u8]) {
    while let [kind, len, rest @ ..] = bytes {
        let len = usize::from(*len).min(rest.len());
        let (data, rest) = rest.split_at(len);
        bytes = rest;
        let is_response = kind & 1 == 1;
        let end = &mut ends[usize::from(is_response)];
        let distance = usize::from(kind >> 4);
        let offset = match kind >> 1 & 7 {
            0..3 => *end,
            3 => end.saturating_sub(distance),
            4 => end.saturating_sub(distance * 100),
            5 => *end + distance,
            6 => *end + distance * 5_000,
            _ => {
                if is_response {
                    model.desync_responses()
                } else {
                    model.desync_requests()
                }
                *end
            }
        };
        *end = offset + len;
        if is_response {
            model.response_segment(offset, data)
        } else {
            model.request_segment(offset, data)
        }
    }
    model.close(true);
}

/// Plays a conversation to hyper's client (first byte `<`), or requests to hyper's server and to a simulated one.
pub fn h1_differential(bytes: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    match bytes {
        [] => Ok(ConformanceTotals::default()),
        [b'<', conversation @ ..] => h1::client::play(conversation, rng),
        [_, stream @ ..] => {
            h1::simulated_server::play(stream, rng)?;
            h1::server::play(stream, rng)
        }
    }
}

/// Plays bytes by their first byte: `<` a conversation frame by frame, `:` a script for client and server of crate
/// h2. Any other byte begins a client's frames to the server of crate h2.
pub fn h2_differential(bytes: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    match bytes {
        [] => Ok(ConformanceTotals::default()),
        [b'<', conversation @ ..] => h2::scripted::play(conversation, rng),
        [b':', script @ ..] => h2::client_server::play(script, rng),
        [_, stream @ ..] => h2::server::play(stream, rng),
    }
}
