//! Pure: totals of played streams.

/// Totals of played streams, none of which showed a difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConformanceTotals {
    /// Number of requests that got a response, or, with a simulated HTTP/2 server, that it was given.
    pub requests: u64,
    /// Number of streams that the other implementation refused or broke off.
    pub refused: u64,
    /// Number of streams that were not compared, because implementations are known to read them differently.
    pub not_compared: u64,
    /// Number of HTTP/2 connections with more than [`CROWD`] requests in flight at once.
    pub crowded: u64,
}

/// A connection with more requests in flight at once is crowded: nearly as many as `datapath::h2` has places for.
pub const CROWD: u32 = 200;

impl std::ops::AddAssign for ConformanceTotals {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.refused += other.refused;
        self.not_compared += other.not_compared;
        self.crowded += other.crowded;
    }
}
