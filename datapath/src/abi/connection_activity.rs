//! Pure: use of a pod's connection, as the agent reads it from the eBPF programs' storage.

use super::{CONN_OPEN, PROTOCOL_HTTP1, PROTOCOL_HTTP2, PROTOCOL_TCP, ServerSocket};

/// Use of a connection, as far as the node of its pod knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionActivity {
    /// A request or a response is incomplete, or the connection itself is one request.
    MessageInFlight,
    /// No request and no response is incomplete.
    Idle,
    /// No request is in flight. With HTTP/2 a frame may be incomplete, perhaps the first part of a request's head.
    NoRequestInFlight,
}

impl ServerSocket {
    /// Returns the use of the connection: a [message under way](crate::h1::Http1Connection::is_in_use), or segments
    /// that wait for earlier ones, count as use. `None` if it is unknown, or the connection is not counted.
    pub fn activity(&self) -> Option<ConnectionActivity> {
        // An opaque estimate proves nothing about the end of a message, so such a connection has no known use.
        let known = match self.http.protocol {
            PROTOCOL_HTTP1 if self.http.h1.is_in_use()? => ConnectionActivity::MessageInFlight,
            PROTOCOL_HTTP1 => ConnectionActivity::Idle,
            PROTOCOL_HTTP2 if self.http.requests_in_flight > 0 => {
                ConnectionActivity::MessageInFlight
            }
            PROTOCOL_HTTP2 => ConnectionActivity::NoRequestInFlight,
            PROTOCOL_TCP => ConnectionActivity::MessageInFlight,
            _ => return None,
        };
        // Segments that wait belong to a message whose begin is missing, whatever the boundaries say.
        let waits = self.pending.iter().any(|segment| segment.len > 0);
        (self.pod_slot != 0).then_some(if waits {
            ConnectionActivity::MessageInFlight
        } else {
            known
        })
    }

    /// Returns true if the connection counts in the gauges of the pod with this row.
    pub fn is_counted(&self, slot: u32) -> bool {
        self.pod_slot == slot && self.flags & CONN_OPEN != 0
    }

    /// Returns true if the programs may see the next request of a counted connection only in its response, once
    /// boundaries were lost on any connection of the pod. A connection of HTTP/2 has its boundaries elsewhere.
    pub fn may_miss_requests(&self) -> bool {
        match self.http.protocol {
            PROTOCOL_HTTP1 => self.http.h1.is_in_use().is_none(),
            PROTOCOL_HTTP2 => true,
            _ => false,
        }
    }

    /// Returns true for a counted connection whose one request in flight lasts until it closes: the request has changed
    /// the protocol (WebSocket), or the port is opaque.
    pub fn is_upgraded(&self) -> bool {
        let is_upgraded = match self.http.protocol {
            PROTOCOL_HTTP1 => self.http.h1.is_upgraded(),
            PROTOCOL_TCP => self.http.requests_in_flight > 0,
            _ => false,
        };
        self.pod_slot != 0 && is_upgraded
    }

    /// Returns the begin of the request whose end the connection waits for, CLOCK_MONOTONIC in ns. Once its deadline
    /// has passed, the connection has no further use. For an upgraded connection (WebSocket, CONNECT) it is the request
    /// that opened it. For HTTP/2 it is the newest request, open or not: while any is open, all began no later.
    ///
    /// `None` while no request is in flight, if that is unknown, or if the connection is not counted. `None` also for a
    /// connection to an opaque port, which may last for as long as its ends want.
    pub fn pending_request_started_ns(&self) -> Option<u64> {
        let waits = match self.http.protocol {
            PROTOCOL_HTTP1 => self.http.h1.is_busy(),
            PROTOCOL_HTTP2 => self.http.requests_in_flight > 0,
            _ => false,
        };
        (waits && self.activity() == Some(ConnectionActivity::MessageInFlight))
            .then_some(self.http.request_started_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::PROTOCOL_OPAQUE;

    /// Window that holds every text of these tests.
    type Window = [u64; 30];

    /// Returns a counted connection that was opened at sequence numbers 0.
    fn open_connection() -> ServerSocket {
        let mut conn = ServerSocket { pod_slot: 1, ..ServerSocket::default() };
        conn.http.h1.open(0, 0);
        conn.http.request_started_ns = 7;
        conn
    }

    /// Reads all of `text` by `step`, which returns the number of bytes it consumed.
    fn read_in_windows(text: &str, mut step: impl FnMut(&mut Window, u32) -> u32) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let mut window = [0; 30];
            for (word, bytes) in window.iter_mut().zip(rest.chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_ne_bytes(eight);
            }
            rest = &rest[step(&mut window, rest.len() as u32) as usize..];
        }
    }

    fn feed_request(conn: &mut ServerSocket, text: &str) {
        read_in_windows(text, |window, len| conn.http.h1.read_request(window, len, true).consumed);
    }

    fn feed_response(conn: &mut ServerSocket, text: &str) {
        read_in_windows(text, |window, len| conn.http.h1.read_response(window, len, true).consumed);
    }

    const UPGRADE: &str = "GET / HTTP/1.1\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n";

    #[test]
    fn a_request_is_pending_from_its_head_to_the_end_of_its_response() {
        let mut conn = open_connection();
        assert_eq!(conn.pending_request_started_ns(), None, "nothing came");
        feed_request(&mut conn, "GET / HTTP/1.1\r\n");
        assert_eq!(conn.pending_request_started_ns(), None, "no whole head came");
        feed_request(&mut conn, "\r\n");
        assert_eq!(conn.pending_request_started_ns(), Some(7));
        feed_response(&mut conn, "HTTP/1.1 204 No\r\n");
        assert_eq!(conn.pending_request_started_ns(), Some(7), "the response has begun");
        feed_response(&mut conn, "\r\n");
        assert_eq!(conn.pending_request_started_ns(), None, "it has ended");
    }

    #[test]
    fn an_upgraded_connection_has_its_opening_request_pending() {
        let mut conn = open_connection();
        feed_request(&mut conn, UPGRADE);
        feed_response(&mut conn, "HTTP/1.1 101 Switching Protocols\r\n\r\n");
        assert_eq!(conn.pending_request_started_ns(), Some(7));
    }

    #[test]
    fn a_connection_is_upgraded_from_its_101_to_its_end() {
        let mut conn = open_connection();
        feed_request(&mut conn, UPGRADE);
        assert!(!conn.is_upgraded(), "the server may refuse");
        let mut refused = conn;
        feed_response(&mut refused, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n");
        assert!(!refused.is_upgraded());
        feed_response(&mut conn, "HTTP/1.1 101 Switching Protocols\r\n\r\n");
        assert!(conn.is_upgraded(), "before a byte of the new protocol");
        feed_request(&mut conn, "\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}\u{8}");
        feed_response(&mut conn, "\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}\u{8}");
        assert!(conn.is_upgraded());
        conn.http.h1.close(false);
        assert!(!conn.is_upgraded());
    }

    #[test]
    fn an_http2_connection_has_a_pending_request_while_any_is_in_flight() {
        let mut conn = open_connection();
        conn.http.protocol = PROTOCOL_HTTP2;
        assert_eq!(conn.activity(), Some(ConnectionActivity::NoRequestInFlight));
        assert_eq!(conn.pending_request_started_ns(), None, "none is open");
        conn.http.requests_in_flight = 2;
        assert_eq!(conn.activity(), Some(ConnectionActivity::MessageInFlight));
        assert_eq!(conn.pending_request_started_ns(), Some(7));
    }

    #[test]
    fn requests_are_missed_on_http2_and_where_boundaries_are_lost() {
        let mut conn = open_connection();
        assert!(!conn.may_miss_requests(), "nothing is lost");
        feed_request(&mut conn, "GET / HTTP/1.1\r\n\r\n");
        feed_response(&mut conn, "HTTP/1.1 204 No\r\n\r\n");
        assert!(!conn.may_miss_requests());
        assert_ne!(conn.http.h1.desync_requests(), 0);
        assert!(conn.may_miss_requests());
        for (protocol, expected) in
            [(PROTOCOL_HTTP2, true), (PROTOCOL_TCP, false), (PROTOCOL_OPAQUE, false)]
        {
            conn.http.protocol = protocol;
            assert_eq!(conn.may_miss_requests(), expected, "{protocol}");
        }
    }

    #[test]
    fn a_connection_to_an_opaque_port_is_in_use_and_has_no_deadline() {
        let mut conn = open_connection();
        (conn.http.protocol, conn.http.requests_in_flight) = (PROTOCOL_TCP, 1);
        let expected = (Some(ConnectionActivity::MessageInFlight), true, None);
        let facts = (conn.activity(), conn.is_upgraded(), conn.pending_request_started_ns());
        assert_eq!(facts, expected);
        // It may be a probe of the kubelet, or a client of the node that only receives.
        conn.http.requests_in_flight = 0;
        assert_eq!((conn.activity(), conn.is_upgraded()), (expected.0, false));
        conn.pod_slot = 0;
        assert_eq!((conn.activity(), conn.is_upgraded()), (None, false));
    }

    #[test]
    fn unreadable_and_uncounted_connections_have_no_pending_request() {
        let mut foreign = open_connection();
        (foreign.http.protocol, foreign.http.requests_in_flight) = (PROTOCOL_OPAQUE, 1);
        let mut lost = open_connection();
        feed_request(&mut lost, UPGRADE);
        lost.http.h1.desync_responses();
        let mut probe = open_connection();
        feed_request(&mut probe, UPGRADE);
        probe.pod_slot = 0;
        assert_eq!([foreign, lost, probe].map(|conn| conn.pending_request_started_ns()), [None; 3]);
    }
}
