//! Pure: layout of the totals of responses.

use core::mem::size_of;

/// Number of counted response classes: 1xx to 5xx.
pub const STATUS_CLASSES: usize = 5;
/// Upper bounds of the latency buckets in µs; one more bucket holds everything above.
///
/// They are the bounds of `kn.serving.invocation.duration` (knative/serving `pkg/queue/request_metric.go` at 98e5ef9),
/// with three finer ones below and two coarser ones above.
pub const LATENCY_BOUNDS_US: [u64; 19] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    75_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    60_000_000,
    300_000_000,
];
/// Number of latency buckets, including the unbounded one.
pub const LATENCY_BUCKETS: usize = LATENCY_BOUNDS_US.len() + 1;

/// Response totals of one pod on one CPU: value of `RESPONSES`. Each word is a plain total by itself.
///
/// Every request that has ended is either aborted or in one bucket of `latency`. One in a bucket is also in one of
/// `status` or in `unknown_status`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseCounters {
    /// Responses by status class, 1xx first (101 of upgraded connections).
    pub status: [u64; STATUS_CLASSES],
    /// Responses whose status cannot be seen: HTTP/2 references to an earlier status, opaque estimates, and connections
    /// of opaque ports, which end with their request.
    pub unknown_status: u64,
    /// Visible gRPC calls that ended with status OK.
    pub grpc_ok: u64,
    /// Visible gRPC calls that ended with another status.
    pub grpc_failed: u64,
    /// Requests that ended without a whole response: the connection closed, or the stream was reset.
    pub aborted: u64,
    /// Payload bytes received from clients.
    pub received: u64,
    /// Payload bytes sent to clients.
    pub sent: u64,
    /// Sum of the times in `latency`, ns.
    pub latency_sum_ns: u64,
    /// Responses by time from the request to the end of the response, each bucket by itself.
    pub latency: [u64; LATENCY_BUCKETS],
}
const _: () = assert!(size_of::<ResponseCounters>() == 8 * RESPONSE_WORDS);

/// Number of words in [`ResponseCounters`].
pub const RESPONSE_WORDS: usize = 12 + LATENCY_BUCKETS;
