//! Shell: plays hundreds of thousands of streams, different ones in each run.
//!
//! | variable | meaning |
//! |---|---|
//! | `ROUSE_STREAMS` | number of streams that a test plays |
//! | `ROUSE_SEED` | first seed, to repeat the same streams |

use std::{
    collections::hash_map::RandomState,
    env,
    hash::BuildHasher as _,
    io::Write as _,
    iter,
    panic::{self, AssertUnwindSafe},
};

use crate::{rng::SeededRng, shrink::shrink_failing, totals::ConformanceTotals};

/// Number of seeds by which a stream of the corpus is cut when it is played again.
pub const REPLAY_CUTS: u64 = 100;

/// Generates and plays streams, and prints totals under the title `title` to standard error, because the output of a
/// passing test is hidden.
///
/// # Panics
///
/// Panics with the first stream that fails, in its shortest form found.
pub fn run_streams(
    title: &str,
    streams: u64,
    make: impl Fn(&mut SeededRng) -> Vec<u8>,
    play: impl Fn(&[u8], &mut SeededRng) -> Result<ConformanceTotals, String>,
) -> ConformanceTotals {
    let streams = env_number("ROUSE_STREAMS").unwrap_or(streams);
    let first_seed =
        env_number("ROUSE_SEED").unwrap_or_else(|| RandomState::new().hash_one(title) >> 16);
    let mut all = ConformanceTotals::default();
    for seed in first_seed..first_seed + streams {
        let mut rng = SeededRng::new(seed);
        let stream = make(&mut rng);
        match run_caught(&stream, &rng, &play) {
            Ok(outcome) => all += outcome,
            Err(_) => panic_with_shortest(title, seed, &stream, &rng, &play),
        }
    }
    let ConformanceTotals { requests, refused, not_compared, crowded } = all;
    let line = format!(
        "{title}: {streams} streams from seed {first_seed}: {requests} responses, {refused} streams refused, \
         {not_compared} not compared, {crowded} crowded\n"
    );
    let _printed_or_closed = std::io::stderr().write_all(line.as_bytes());
    all
}

/// Plays one stream as the fuzz targets cut it, and then with [`REPLAY_CUTS`] other cuts.
pub fn replay(
    stream: &[u8],
    play: impl Fn(&[u8], &mut SeededRng) -> Result<ConformanceTotals, String>,
) -> Result<(), String> {
    let cuts_of_fuzzer = iter::once(SeededRng::from_hash_of(stream));
    let mut cuts = cuts_of_fuzzer.chain((0..REPLAY_CUTS).map(SeededRng::new));
    cuts.try_for_each(|rng| run_caught(stream, &rng, &play).map(drop))
}

/// Plays one stream; a panic becomes an error.
fn run_caught(
    stream: &[u8],
    rng: &SeededRng,
    play: impl Fn(&[u8], &mut SeededRng) -> Result<ConformanceTotals, String>,
) -> Result<ConformanceTotals, String> {
    let played = panic::catch_unwind(AssertUnwindSafe(|| play(stream, &mut rng.clone())));
    played.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

fn panic_with_shortest(
    title: &str,
    seed: u64,
    stream: &[u8],
    rng: &SeededRng,
    play: impl Fn(&[u8], &mut SeededRng) -> Result<ConformanceTotals, String>,
) -> ! {
    // Prefer cuts that a replay of the corpus makes, so that the shortened stream fails there too.
    let corpus = (0..REPLAY_CUTS).map(SeededRng::new);
    let mut failing_cuts: Vec<SeededRng> =
        corpus.filter(|rng| run_caught(stream, rng, &play).is_err()).take(6).collect();
    if failing_cuts.is_empty() {
        failing_cuts.push(rng.clone());
    }
    let error =
        |stream: &[u8]| failing_cuts.iter().find_map(|rng| run_caught(stream, rng, &play).err());
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let short = shrink_failing(stream, |shorter| error(shorter).is_some());
    let message = error(&short).unwrap_or_default();
    panic::set_hook(hook);
    panic!(
        "{title}: seed {seed}: {message}\n  stream: {}\n  once understood, it belongs into fuzz/corpus",
        short.escape_ascii()
    );
}

fn env_number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}
