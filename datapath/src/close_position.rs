//! Pure: comparison of a client's socket with the position at which its pod has seen the connection idle.
//!
//! The pod's programs report the sequence numbers of both sides at the end of a response after which no message is under
//! way. A report takes its time, and the client goes on meanwhile. The comparison is made while the client's socket is
//! locked, so the socket changes neither during it nor before the close that follows.

use crate::abi::{CLOSE_DONE, CLOSE_NOT_REACHED, CLOSE_SKIPPED};

/// Sequence numbers of a client's socket in state ESTABLISHED.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientSocketState {
    /// Number of the next byte that the application writes.
    pub written: u32,
    /// First number that the pod has not acknowledged.
    pub acknowledged: u32,
    /// Number of the next byte that is expected from the pod.
    pub expected: u32,
    /// First number of the pod that the application has not read.
    pub read: u32,
    /// Bytes of segments that came while the socket was locked.
    pub backlog: u32,
}

/// Returns `CLOSE_DONE` if the connection stands at the position: the client has written no byte since the report, and
/// has read all bytes that came before it. So no request is under way, however old the report is.
///
/// `CLOSE_NOT_REACHED` means that bytes before the position are still under way or unread. `CLOSE_SKIPPED` means that
/// one side has gone on, or that something between the two changes sequence numbers.
#[inline(always)]
pub fn judge_position(socket: &ClientSocketState, client_seq: u32, pod_seq: u32) -> u64 {
    let is_past =
        socket.written != client_seq || socket.expected.wrapping_sub(pod_seq).cast_signed() > 0;
    if is_past {
        return CLOSE_SKIPPED;
    }
    let is_reached = socket.expected == pod_seq
        && socket.acknowledged == socket.written
        && socket.read == socket.expected
        && socket.backlog == 0;
    if is_reached { CLOSE_DONE } else { CLOSE_NOT_REACHED }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, vec, vec::Vec};

    use super::*;

    /// First sequence numbers: both wrap during the test.
    const CLIENT_SEQ: u32 = u32::MAX - 3;
    const POD_SEQ: u32 = u32::MAX - 1;
    /// Number of requests of the client, with one byte each.
    const REQUESTS: u32 = 3;
    /// Segments of a response, with one byte each: it may pause after each of them.
    const RESPONSE_SEGMENTS: u32 = 2;

    /// Connection of a client and a pod, counted in bytes since its begin, and the position that was reported last.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    struct Connection {
        written: u32,
        arrived_at_pod: u32,
        acknowledged: u32,
        sent_by_pod: u32,
        arrived_at_client: u32,
        read: u32,
        /// Requests and bytes of the pod at the newest event.
        reported: Option<(u32, u32)>,
        /// Position of the newest attempt, which may have taken an older event.
        attempted: Option<(u32, u32)>,
    }

    impl Connection {
        /// True while a request has been written whose response has not been read as a whole.
        fn is_in_use(self) -> bool {
            self.read < self.written * RESPONSE_SEGMENTS
        }

        /// Returns all states that may follow. The client may write further requests before it has a response.
        fn next_states(self) -> Vec<Self> {
            let mut next = Vec::new();
            if self.written < REQUESTS {
                next.push(Self { written: self.written + 1, ..self });
            }
            if self.arrived_at_pod < self.written {
                next.push(Self { arrived_at_pod: self.arrived_at_pod + 1, ..self });
            }
            if self.acknowledged < self.arrived_at_pod {
                next.push(Self { acknowledged: self.arrived_at_pod, ..self });
            }
            if self.sent_by_pod < self.arrived_at_pod * RESPONSE_SEGMENTS {
                let sent = self.sent_by_pod + 1;
                // The programs see the request's end before the response, and report in the packet of the last byte.
                let is_idle = sent == self.arrived_at_pod * RESPONSE_SEGMENTS;
                let reported =
                    if is_idle { Some((self.arrived_at_pod, sent)) } else { self.reported };
                next.push(Self { sent_by_pod: sent, reported, ..self });
            }
            if self.arrived_at_client < self.sent_by_pod {
                next.push(Self { arrived_at_client: self.arrived_at_client + 1, ..self });
            }
            if self.read < self.arrived_at_client {
                next.push(Self { read: self.arrived_at_client, ..self });
            }
            if self.attempted != self.reported {
                next.push(Self { attempted: self.reported, ..self });
            }
            next
        }

        /// Judges the client's socket by the position of the attempt.
        fn judge(self) -> Option<u64> {
            let (requests, sent) = self.attempted?;
            let socket = ClientSocketState {
                written: CLIENT_SEQ.wrapping_add(self.written),
                acknowledged: CLIENT_SEQ.wrapping_add(self.acknowledged),
                expected: POD_SEQ.wrapping_add(self.arrived_at_client),
                read: POD_SEQ.wrapping_add(self.read),
                backlog: 0,
            };
            let position = (CLIENT_SEQ.wrapping_add(requests), POD_SEQ.wrapping_add(sent));
            Some(judge_position(&socket, position.0, position.1))
        }
    }

    /// Searches all orders of writes, packets, reads, reports and attempts.
    #[test]
    fn no_order_of_events_closes_a_connection_with_a_request_under_way() {
        let begin = Connection {
            written: 0,
            arrived_at_pod: 0,
            acknowledged: 0,
            sent_by_pod: 0,
            arrived_at_client: 0,
            read: 0,
            reported: None,
            attempted: None,
        };
        let (mut seen, mut open) = (BTreeSet::from([begin]), vec![begin]);
        let (mut closed, mut early) = (0, 0);
        while let Some(state) = open.pop() {
            match state.judge() {
                Some(CLOSE_DONE) => {
                    assert!(!state.is_in_use());
                    closed += 1;
                }
                Some(CLOSE_NOT_REACHED) => early += 1,
                _ => {}
            }
            open.extend(state.next_states().into_iter().filter(|next| seen.insert(*next)));
        }
        assert!(closed >= REQUESTS && early > 0, "each pause is found: {closed}, {early}");
    }

    #[test]
    fn a_connection_that_is_as_reported_is_closed_and_any_other_state_spares_it() {
        let idle = ClientSocketState {
            written: CLIENT_SEQ,
            acknowledged: CLIENT_SEQ,
            expected: POD_SEQ,
            read: POD_SEQ,
            backlog: 0,
        };
        let judge = |socket| judge_position(&socket, CLIENT_SEQ, POD_SEQ);
        assert_eq!(judge(idle), CLOSE_DONE);
        let behind = |by: u32| POD_SEQ.wrapping_sub(by);
        let early = [
            ClientSocketState { expected: behind(5), read: behind(5), ..idle },
            ClientSocketState { read: behind(1), ..idle },
            ClientSocketState { acknowledged: CLIENT_SEQ.wrapping_sub(1), ..idle },
            ClientSocketState { backlog: 1, ..idle },
        ];
        assert_eq!(early.map(judge), [CLOSE_NOT_REACHED; 4]);
        let past = [
            ClientSocketState { written: CLIENT_SEQ.wrapping_add(1), ..idle },
            ClientSocketState { written: CLIENT_SEQ.wrapping_sub(1), ..idle },
            ClientSocketState { expected: POD_SEQ.wrapping_add(1), ..idle },
        ];
        assert_eq!(past.map(judge), [CLOSE_SKIPPED; 3]);
    }
}
