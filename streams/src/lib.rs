//! Generated streams of HTTP, and a comparison of the eBPF parsers with other implementations.
//!
//! Tests only; nothing that is shipped links this crate. Its tests play hundreds of thousands of streams, different
//! ones in each run. The targets of `fuzz/` play the inputs of a fuzzer. A stream that ever failed stays in
//! `fuzz/corpus`, from where the tests play it again.
//!
//! | module | what |
//! |---|---|
//! | [`dice`] | random numbers from a seed |
//! | [`segments`] | cuts a stream; pieces arrive late, twice, or in another order |
//! | [`tap`] | model of the eBPF programs: the one file that drives the parsers |
//! | [`memory`] | one end of a connection over memory |
//! | [`h1`] | HTTP/1.1: streams, hyper's server and client, a reference written from RFC 9112 |
//! | [`h2`] | HTTP/2: frames, crate h2's server and client, a reference written from RFC 9113 |
//! | [`targets`] | functions that `fuzz/` and the tests call |
//! | [`many`], [`shrink`] | a hundred thousand streams, and the shortest form of one that fails |
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

/// Totals of streams on which all implementations agreed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConformanceTotals {
    /// Number of requests that were answered.
    pub requests: u64,
    /// Number of streams that the other side broke off.
    pub refused: u64,
    /// Number of streams that were not compared, because implementations are known to read them differently.
    pub differing: u64,
    /// Number of HTTP/2 connections with more than [`CROWD`] requests in flight at once.
    pub crowded: u64,
}

/// Requests in flight at once from which a connection is crowded: nearly as many as `datapath::h2` has places for.
pub const CROWD: u32 = 200;

impl std::ops::AddAssign for ConformanceTotals {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.refused += other.refused;
        self.differing += other.differing;
        self.crowded += other.crowded;
    }
}
