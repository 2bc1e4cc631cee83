//! Pure: an estimate of the requests on a connection whose protocol nobody can follow (TLS, other protocols over TCP).
//!
//! Client and server take turns: a request begins with the first bytes of the client's after some of the server's, and
//! ends with the server's answer. More of the answer moves that end, until the server has been quiet for [`QUIET_NS`]. So
//! the time in flight is right, but while an answer is being streamed the gauge shows nothing in flight.

/// How long a server is quiet in the middle of an answer, at most.
pub const QUIET_NS: u64 = 20_000_000;

/// First byte of a TLS record: change of cipher, alert, handshake; application data come behind (RFC 8446 §5.1).
const TLS: core::ops::RangeInclusive<u8> = 0x14..=0x16;
const HANDSHAKE: u8 = 0x16;

/// One connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// When the server last sent something that belongs to an answer, ns; 0: never.
    sent_ns: u64,
    /// 1: it is the server's turn.
    busy: u32,
    /// 1: it speaks TLS.
    tls: u32,
}

/// What bytes of the server's mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// They end the request in flight.
    pub ended: bool,
    /// They move the end of the last request by so much, ns.
    pub longer_ns: u64,
}

impl Turns {
    /// Becomes a fresh connection whose client begins with this byte; 0 where the server begins.
    #[inline(always)]
    pub fn open(&mut self, first: u8) {
        *self = Self { sent_ns: 0, busy: 0, tls: u32::from(first == HANDSHAKE) };
    }

    /// Whether a request is in flight.
    #[inline(always)]
    pub fn is_busy(&self) -> bool {
        self.busy != 0
    }

    /// Whether the first byte of a client's segment decides what [`came`](Self::came) answers.
    #[inline(always)]
    pub fn asks_for_byte(&self) -> bool {
        self.tls != 0 && self.busy == 0
    }

    /// Takes in bytes of the client's that begin with `first`. Returns whether a request begins.
    #[inline(always)]
    pub fn came(&mut self, first: u8) -> bool {
        let is_overhead = self.tls != 0 && TLS.contains(&first);
        if self.busy != 0 || is_overhead {
            return false;
        }
        self.busy = 1;
        true
    }

    /// Takes in bytes of the server's.
    #[inline(always)]
    pub fn sent(&mut self, now_ns: u64) -> Sent {
        if self.busy != 0 {
            self.busy = 0;
            self.sent_ns = now_ns;
            return Sent { ended: true, longer_ns: 0 };
        }
        let since = now_ns.wrapping_sub(self.sent_ns);
        if self.sent_ns == 0 || since > QUIET_NS {
            return Sent::default();
        }
        self.sent_ns = now_ns;
        Sent { ended: false, longer_ns: since }
    }

    /// The connection is gone. Returns whether a request was in flight.
    #[inline(always)]
    pub fn close(&mut self) -> bool {
        let busy = self.busy != 0;
        self.busy = 0;
        busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn fresh(first: u8) -> Turns {
        let mut turns = Turns::default();
        turns.open(first);
        turns
    }

    #[test]
    fn client_and_server_take_turns() {
        let mut turns = fresh(b'*');
        assert!(turns.came(b'*') && !turns.came(b'*') && turns.is_busy());
        assert_eq!(turns.sent(50 * MS), Sent { ended: true, longer_ns: 0 });
        assert!(!turns.is_busy() && turns.came(b'x'));
        assert!(turns.close() && !turns.close());
    }

    #[test]
    fn a_streamed_answer_moves_the_end_until_the_server_is_quiet() {
        let mut turns = fresh(b'*');
        turns.came(b'*');
        turns.sent(100 * MS);
        assert_eq!(turns.sent(115 * MS), Sent { ended: false, longer_ns: 15 * MS });
        assert_eq!(turns.sent(135 * MS), Sent { ended: false, longer_ns: 20 * MS });
        assert_eq!(turns.sent(156 * MS), Sent::default(), "nobody has asked for it");
        assert_eq!(turns.sent(157 * MS), Sent::default());
    }

    #[test]
    fn handshakes_and_alerts_are_no_requests() {
        let mut turns = fresh(0x16);
        assert!(turns.asks_for_byte());
        assert!(!turns.came(0x16));
        assert_eq!(turns.sent(MS), Sent::default(), "nothing has ended");
        assert!(!turns.came(0x14));
        assert!(turns.came(0x17) && !turns.asks_for_byte());
        assert!(turns.sent(30 * MS).ended);
        assert!(!turns.came(0x15));
    }
}
