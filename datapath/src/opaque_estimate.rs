//! Pure: opaque estimate of the requests on a connection whose protocol cannot be read (TLS, other protocols over TCP).
//!
//! The estimate assumes that client and server alternate. A request begins with the client's first bytes after bytes of
//! the server, and ends with the server's next bytes. Further bytes of the response move that end, until the server has
//! been quiet for [`QUIET_NS`]. So the total time in flight is right, but the gauge shows nothing in flight while a
//! response is streamed.

/// Longest pause of the server within one response, in ns.
pub const QUIET_NS: u64 = 20_000_000;

/// First bytes of TLS records that carry no application data: change cipher spec, alert, handshake (RFC 8446 §5.1).
const TLS_OVERHEAD_TYPES: core::ops::RangeInclusive<u8> = 0x14..=0x16;
const TLS_HANDSHAKE: u8 = 0x16;

/// State of the estimate for one connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpaqueEstimate {
    /// CLOCK_MONOTONIC of the server's last bytes that belong to a response, ns; 0: never.
    last_response_ns: u64,
    /// 1 while a request is in flight: the server's response is expected next.
    in_flight: u32,
    /// 1 if the connection speaks TLS.
    tls: u32,
}

/// Effect of a segment from the server on the estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EstimateChange {
    /// True if the segment ends the request in flight.
    pub ended: bool,
    /// Time by which the segment moves the end of the last request, ns.
    pub extended_ns: u64,
}

impl OpaqueEstimate {
    /// Starts the estimate of a new connection whose client sends `first` as its first byte; 0 where the server sends
    /// first.
    #[inline(always)]
    pub fn open(&mut self, first: u8) {
        *self = Self { last_response_ns: 0, in_flight: 0, tls: u32::from(first == TLS_HANDSHAKE) };
    }

    /// Returns true if a request is in flight.
    #[inline(always)]
    pub fn is_busy(&self) -> bool {
        self.in_flight != 0
    }

    /// Returns true if the result of [`handle_client_bytes`](Self::handle_client_bytes) depends on the first byte of
    /// the client's segment.
    #[inline(always)]
    pub fn needs_first_byte(&self) -> bool {
        self.tls != 0 && self.in_flight == 0
    }

    /// Handles bytes of the client that begin with `first`. Returns true if a request begins.
    #[inline(always)]
    pub fn handle_client_bytes(&mut self, first: u8) -> bool {
        // Records of handshakes and alerts ask nothing of the application.
        let is_overhead = self.tls != 0 && TLS_OVERHEAD_TYPES.contains(&first);
        if self.in_flight != 0 || is_overhead {
            return false;
        }
        self.in_flight = 1;
        true
    }

    /// Handles bytes of the server at the time `now_ns`.
    #[inline(always)]
    pub fn handle_server_bytes(&mut self, now_ns: u64) -> EstimateChange {
        if self.in_flight != 0 {
            self.in_flight = 0;
            self.last_response_ns = now_ns;
            return EstimateChange { ended: true, extended_ns: 0 };
        }
        // A time read on another CPU may be behind `last_response_ns`: the difference wraps to a huge value and counts
        // as quiet.
        let since = now_ns.wrapping_sub(self.last_response_ns);
        if self.last_response_ns == 0 || since > QUIET_NS {
            return EstimateChange::default();
        }
        self.last_response_ns = now_ns;
        EstimateChange { ended: false, extended_ns: since }
    }

    /// Handles the end of the connection. Returns true if a request was in flight.
    #[inline(always)]
    pub fn close(&mut self) -> bool {
        let busy = self.in_flight != 0;
        self.in_flight = 0;
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn fresh(first: u8) -> OpaqueEstimate {
        let mut estimate = OpaqueEstimate::default();
        estimate.open(first);
        estimate
    }

    #[test]
    fn client_and_server_take_turns() {
        let mut estimate = fresh(b'*');
        assert!(
            estimate.handle_client_bytes(b'*')
                && !estimate.handle_client_bytes(b'*')
                && estimate.is_busy()
        );
        assert_eq!(
            estimate.handle_server_bytes(50 * MS),
            EstimateChange { ended: true, extended_ns: 0 }
        );
        assert!(!estimate.is_busy() && estimate.handle_client_bytes(b'x'));
        assert!(estimate.close() && !estimate.close());
    }

    #[test]
    fn a_streamed_response_moves_the_end_until_the_server_is_quiet() {
        let mut estimate = fresh(b'*');
        estimate.handle_client_bytes(b'*');
        estimate.handle_server_bytes(100 * MS);
        assert_eq!(
            estimate.handle_server_bytes(115 * MS),
            EstimateChange { ended: false, extended_ns: 15 * MS }
        );
        assert_eq!(
            estimate.handle_server_bytes(135 * MS),
            EstimateChange { ended: false, extended_ns: 20 * MS }
        );
        assert_eq!(
            estimate.handle_server_bytes(156 * MS),
            EstimateChange::default(),
            "the server was quiet for too long"
        );
        assert_eq!(estimate.handle_server_bytes(157 * MS), EstimateChange::default());
    }

    #[test]
    fn handshakes_and_alerts_are_no_requests() {
        let mut estimate = fresh(0x16);
        assert!(estimate.needs_first_byte());
        assert!(!estimate.handle_client_bytes(0x16));
        assert_eq!(
            estimate.handle_server_bytes(MS),
            EstimateChange::default(),
            "nothing has ended"
        );
        assert!(!estimate.handle_client_bytes(0x14));
        assert!(estimate.handle_client_bytes(0x17) && !estimate.needs_first_byte());
        assert!(estimate.handle_server_bytes(30 * MS).ended);
        assert!(!estimate.handle_client_bytes(0x15));
    }
}
