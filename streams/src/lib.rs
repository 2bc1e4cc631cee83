//! Made-up streams of HTTP, and what the kernel's parsers and others make of them.
//!
//! Tests only; nothing that is shipped links it. The tests of this crate play streams by the hundred thousand, other ones
//! in each run, and the targets of `fuzz/` play what a fuzzer chose. A stream that ever failed stays in `fuzz/corpus`,
//! from where the tests play it again.
//!
//! | module | what |
//! |---|---|
//! | [`dice`] | chance from a seed |
//! | [`segments`] | cuts a stream, and has the pieces arrive late, twice, in another order |
//! | [`tap`] | the kernel half's place: the one file that knows how the parsers are driven |
//! | [`memory`] | one end of a connection over memory |
//! | [`h1`] | HTTP/1.1: streams, hyper's server and client, a reference straight from RFC 9112 |
//! | [`h2`] | HTTP/2: frames, crate h2's server and client, a reference straight from RFC 9113 |
//! | [`targets`] | what `fuzz/` calls, and the tests with it |
//! | [`many`], [`shrink`] | a hundred thousand streams, and the one of them that fails, as short as can be |
#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod dice;
pub mod h1;
pub mod h2;
pub mod many;
pub mod memory;
pub mod segments;
pub mod shrink;
pub mod tap;
pub mod targets;

/// What came of streams on which all agreed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests answered.
    pub requests: u64,
    /// Streams that the other side broke off.
    pub refused: u64,
    /// Streams of which others are known to read something in another way than this one; not compared.
    pub differing: u64,
    /// Connections of HTTP/2 with more than [`CROWD`] requests in flight at once.
    pub crowded: u64,
}

/// Requests in flight at once that make a crowd: nearly as many as `common::h2` has places for.
pub const CROWD: u32 = 200;

impl std::ops::AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.refused += other.refused;
        self.differing += other.differing;
        self.crowded += other.crowded;
    }
}
