//! Pure: what a fuzzer, and the test of its corpus, do with bytes.

use crate::{Outcome, dice::Dice, h1, h2, tap::Tap};

/// A target: its name, which is its folder's in `fuzz/corpus`, and what it does with bytes, cut by the dice.
pub type Target = (&'static str, fn(&[u8], &mut Dice) -> Result<Outcome, String>);

/// All targets.
pub const ALL: [Target; 4] = [
    ("h1", h1),
    ("h1_differential", h1_differential),
    ("h2", h2),
    ("h2_differential", h2_differential),
];

/// Targets of other crates, whose own tests play their corpus.
pub const ELSEWHERE: [&str; 2] = ["answers", "proxy_protocol"];

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
pub fn h1(bytes: &[u8], _: &mut Dice) -> Result<Outcome, String> {
    segments(Tap::new(), [0; 2], bytes);
    Ok(Outcome::default())
}

/// The same behind the preface of HTTP/2.
pub fn h2(bytes: &[u8], _: &mut Dice) -> Result<Outcome, String> {
    let mut tap = Tap::new();
    tap.request(0, h2::frames::PREFACE);
    segments(tap, [h2::frames::PREFACE.len(), 0], bytes);
    Ok(Outcome::default())
}

/// Plays segments that go on where requests and answers have come to.
fn segments(mut tap: Tap, mut ends: [usize; 2], mut bytes: &[u8]) {
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

/// Behind `<` a conversation frame by frame, behind `:` a script for the client and the server of crate h2, behind any other
/// byte a client's frames for the server of crate h2.
pub fn h2_differential(bytes: &[u8], dice: &mut Dice) -> Result<Outcome, String> {
    match bytes {
        [] => Ok(Outcome::default()),
        [b'<', conversation @ ..] => h2::made::play(conversation, dice),
        [b':', script @ ..] => h2::pair::play(script, dice),
        [_, stream @ ..] => h2::server::play(stream, dice),
    }
}
