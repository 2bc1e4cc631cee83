//! Pure: what a fuzzer, and the test of its corpus, do with bytes.

use crate::{Outcome, dice::Dice, h1, tap::Tap};

/// A target: its name, which is its folder's in `fuzz/corpus`, and what it does with bytes, cut by the dice.
pub type Target = (&'static str, fn(&[u8], &mut Dice) -> Result<Outcome, String>);

/// All targets.
pub const ALL: [Target; 2] = [("h1", h1), ("h1_differential", h1_differential)];

/// Plays `bytes` to a target in one way.
///
/// # Panics
///
/// With what is wrong.
pub fn check(name: &str, bytes: &[u8]) {
    let target = ALL.iter().find(|(it, _)| *it == name);
    let (_, play) = target.expect("a file of fuzz/targets names it");
    if let Err(what) = play(bytes, &mut Dice::of(bytes)) {
        panic!("{what}\n  bytes: {}", bytes.escape_ascii());
    }
}

/// Any bytes as segments, in any order: nothing but what always holds may be asked of them.
///
/// A segment begins with two bytes: what it is, and how long. Its bytes follow.
pub fn h1(mut bytes: &[u8], _: &mut Dice) -> Result<Outcome, String> {
    let mut tap = Tap::new();
    let mut ends = [0_usize; 2];
    while let [what, len, rest @ ..] = bytes {
        let len = usize::from(*len).min(rest.len());
        let (data, rest) = rest.split_at(len);
        bytes = rest;
        let is_response = usize::from(what & 1);
        let end = &mut ends[is_response];
        let far = usize::from(what >> 4);
        let offset = match what >> 1 & 7 {
            0..3 => *end,
            3 => end.saturating_sub(far),
            4 => end.saturating_sub(far * 100),
            5 => *end + far,
            6 => *end + far * 5_000,
            _ => {
                if is_response == 1 {
                    tap.lose_responses()
                } else {
                    tap.lose_requests()
                }
                *end
            }
        };
        *end = offset + len;
        if is_response == 1 { tap.response(offset, data) } else { tap.request(offset, data) }
    }
    tap.close(true);
    Ok(Outcome::default())
}

/// Behind `<` a conversation for hyper's client, behind any other byte requests for hyper's server and for a made-up one.
pub fn h1_differential(bytes: &[u8], dice: &mut Dice) -> Result<Outcome, String> {
    match bytes {
        [] => Ok(Outcome::default()),
        [b'<', conversation @ ..] => h1::client::play(conversation, dice),
        [_, stream @ ..] => {
            h1::simulated::play(stream, dice)?;
            h1::server::play(stream, dice)
        }
    }
}
