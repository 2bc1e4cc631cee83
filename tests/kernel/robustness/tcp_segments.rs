//! Shell: segments that overlap, arrive in another order, are forged, or precede the connection.

use std::time::Duration;

use datapath::abi::{ConnectionActivity, PENDING_SEGMENTS_MAX};

use crate::fixture::{in_netns, run_ip};

use super::{
    ANY_ADDRESS, CaseRng, RobustnessFixture, get_request,
    tun_client::{ACK, RST, ServerClose, TcpSegment, TunDevice, UserspaceTcpClient},
};

/// Wait for an event that must not happen: long enough for a kernel that handles a packet at once.
const ABSENCE_WAIT: Duration = Duration::from_millis(50);

struct TunFixture {
    fixture: RobustnessFixture,
    tun: TunDevice,
    _server: crate::scripted_process::ScriptedProcess,
}

impl TunFixture {
    fn new() -> Self {
        Self::with_sysctl(None, "")
    }

    /// Makes a device with a sysctl set in its namespace, and a server that listens with the options `options`.
    fn with_sysctl(sysctl: Option<&str>, options: &str) -> Self {
        let fixture = RobustnessFixture::new();
        if let Some(sysctl) = sysctl {
            run_ip(&["netns", "exec", &fixture.pod.netns, "sysctl", "-qw", sysctl]);
        }
        let (tun, mut server) = (TunDevice::new(&fixture.pod), fixture.start_server_process());
        server.expect_step(&format!("listen {ANY_ADDRESS} {options}"));
        server.expect_step("serve");
        Self { fixture, tun, _server: server }
    }

    /// State of each connection, in use or not, by the counts of the eBPF programs.
    fn in_use(&self) -> Vec<ConnectionActivity> {
        let fixture = &self.fixture;
        let activities = in_netns(&fixture.pod.netns, || {
            let diag = agent::net::sockdiag::SockDiag::open().unwrap();
            fixture.kernel.maps.conns().in_use(&diag).unwrap()
        });
        activities.into_values().collect()
    }
}

/// Closes a connection as a client does after its last response.
#[track_caller]
fn close_connection(client: &mut UserspaceTcpClient<'_>, sent: usize) {
    client.send_fin(sent, b"");
    assert_eq!(client.receive_until_closed(), ServerClose::Fin);
}

/// Body of the response to `/length/5`.
const SHORT: &str = "xxxxx";
/// Payload of a full Ethernet segment, with timestamps.
const SEGMENT_BYTES: usize = 1_448;

#[test]
fn a_segment_that_comes_again_is_no_second_request() {
    let tun_fixture = TunFixture::new();
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    let request = get_request("length/5");
    client.send_data(0, request.as_bytes());
    client.receive_until(1, SHORT);
    for _ in 0..3 {
        client.send_data(0, request.as_bytes());
        client.send_data(20, &request.as_bytes()[20..30]);
    }
    client.receive_until_quiet(ABSENCE_WAIT);
    assert_eq!(tun_fixture.fixture.totals(), (1, 1));
    client.send_data(request.len(), request.as_bytes());
    client.receive_until(2, SHORT);
    assert_eq!(tun_fixture.fixture.totals(), (2, 2));
    close_connection(&mut client, 2 * request.len());
    tun_fixture.fixture.wait_settled_in_sync();
}

/// Up to three requests, some with bodies that look like requests, and their number.
fn random_requests(rng: &mut CaseRng) -> (u64, String) {
    let inner = "GET /no HTTP/1.1\r\n\r\n";
    let post = "POST /length/5 HTTP/1.1\r\n";
    let requests = [
        get_request("length/5"),
        format!("{post}Content-Length: 40\r\n\r\n{inner}{inner}"),
        format!("{post}Transfer-Encoding: chunked\r\n\r\n14\r\n{inner}\r\n0\r\n\r\n"),
    ];
    let count = 1 + rng.next_below(3);
    (count as u64, (0..count).map(|_| requests[rng.next_below(3)].as_str()).collect())
}

/// Plays connections whose requests arrive in pieces. A piece begins up to `overlap` bytes before the end of the last
/// one, and some pieces are swapped.
fn send_in_pieces(overlap: usize, swaps: bool) -> TunFixture {
    let tun_fixture = TunFixture::new();
    let (mut rng, mut sent) = (CaseRng(7), 0);
    for round in 0..200 {
        let (count, requests) = random_requests(&mut rng);
        let bytes = requests.as_bytes();
        let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 2_000 + round);
        let (mut pieces, mut covered) = (Vec::new(), 0);
        while covered < bytes.len() {
            let from = covered - rng.next_below(covered.min(overlap) + 1);
            covered = (covered + 1 + rng.next_below(60)).min(bytes.len());
            pieces.push(from..covered);
        }
        for index in (1..pieces.len()).rev().filter(|_| swaps) {
            let other = index - rng.next_below(index.min(3) + 1);
            pieces.swap(index, other);
        }
        pieces.into_iter().for_each(|piece| client.send_data(piece.start, &bytes[piece]));
        client.receive_until(count, SHORT);
        sent += count;
        assert_eq!(tun_fixture.in_use(), [ConnectionActivity::Idle], "round {round}: {requests:?}");
        close_connection(&mut client, bytes.len());
        let (totals, state) = (tun_fixture.fixture.totals(), tun_fixture.fixture.pod_state());
        assert_eq!(totals, (sent, sent), "round {round}: {requests:?}, {state:?}");
        assert_eq!(
            (state.desynced_connections, state.opaque_connections),
            (0, 0),
            "round {round}: {requests:?}"
        );
    }
    tun_fixture
}

#[test]
fn segments_that_overlap_are_read_once() {
    send_in_pieces(30, false).fixture.wait_settled_in_sync();
}

#[test]
fn segments_in_another_order_are_read_in_theirs() {
    send_in_pieces(0, true).fixture.wait_settled_in_sync();
}

#[test]
fn segments_that_overlap_in_another_order_are_read_once() {
    send_in_pieces(30, true).fixture.wait_settled_in_sync();
}

/// The last bytes arrive as single-byte segments, last byte first; the bytes before them arrive at the end.
#[test]
fn beyond_the_bound_on_pending_segments_a_connection_is_estimated() {
    let tun_fixture = TunFixture::new();
    let request = get_request("length/5");
    let bytes = request.as_bytes();
    for (round, (waiting, lost)) in (0..).zip([
        (PENDING_SEGMENTS_MAX, 0),
        (PENDING_SEGMENTS_MAX + 1, 1),
        (PENDING_SEGMENTS_MAX, 1),
    ]) {
        let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 3_000 + round);
        let first = bytes.len() - waiting;
        for offset in (first..bytes.len()).rev() {
            client.send_data(offset, &bytes[offset..=offset]);
        }
        client.send_data(0, &bytes[..first]);
        client.receive_until(1, SHORT);
        assert_eq!(
            tun_fixture.fixture.pod_state().desynced_connections,
            lost,
            "{waiting} segments of connection {round}"
        );
        close_connection(&mut client, bytes.len());
        tun_fixture.fixture.wait_settled();
    }
}

#[test]
fn an_early_segment_that_comes_again_with_more_data_leaves_the_connection_idle() {
    let tun_fixture = TunFixture::new();
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    let request = get_request("length/5");
    let bytes = request.as_bytes();
    client.send_data(0, &bytes[..10]);
    client.send_data(30, &bytes[30..]);
    client.send_data(10, &bytes[10..]);
    client.receive_until(1, SHORT);
    assert_eq!(tun_fixture.in_use(), [ConnectionActivity::Idle]);
    close_connection(&mut client, bytes.len());
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn a_segment_that_the_kernel_refuses_is_not_read() {
    let tun_fixture = TunFixture::new();
    let request = get_request("length/5");
    // As long as the request, and longer than the data that the kernel checks at once.
    let other = format!("POST / HTTP/1.1\r\nContent-Length: 99\r\nX: {}\r\n\r\n", "y".repeat(400));
    type Forge = fn(&mut TcpSegment<'_>);
    let forgeries: [(&str, Forge); 3] = [
        ("that acknowledges what was not sent", |it| it.ack = it.ack.wrapping_add(1_000)),
        ("that acknowledges nothing", |it| it.flags &= !ACK),
        ("of half the numbers before", |it| it.seq = it.seq.wrapping_sub(1 << 30)),
    ];
    for (port, (index, forge)) in forgeries.into_iter().enumerate() {
        let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 3_000 + port as u16);
        for round in 0..2 {
            let offset = round * request.len();
            let mut segment = client.segment(offset, other.as_bytes());
            forge(&mut segment);
            client.send(&segment);
            client.send_data(offset, request.as_bytes());
            client.receive_until(round as u64 + 1, SHORT);
        }
        close_connection(&mut client, 2 * request.len());
        assert_eq!(
            tun_fixture.fixture.totals(),
            (tun_fixture.fixture.served_requests(), tun_fixture.fixture.served_requests()),
            "{index}"
        );
        assert_eq!(tun_fixture.fixture.pod_state().stray_responses, 0, "{index}");
    }
    tun_fixture.fixture.wait_settled_in_sync();
}

/// Programs of this type cannot verify checksums, so they may read data that the kernel then drops. Network cards
/// verify all checksums, and packets of a veth pair never have a wrong one.
#[test]
fn a_segment_with_a_wrong_checksum_leaves_nothing_in_flight() {
    let tun_fixture = TunFixture::new();
    let request = get_request("length/5");
    let spoilt = format!("POST / HTTP/1.1\r\nContent-Length: 99\r\nX: {}\r\n\r\n", "y".repeat(400));
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    for round in 0..2 {
        let offset = round * request.len();
        client.send(&TcpSegment {
            has_bad_checksum: true,
            ..client.segment(offset, spoilt.as_bytes())
        });
        client.send_data(offset, request.as_bytes());
        client.receive_until(round as u64 + 1, SHORT);
    }
    close_connection(&mut client, 2 * request.len());
    let fixture = &tun_fixture.fixture;
    fixture.wait("closed", |it| it.pod_state().connections == 0);
    let (started, finished) = fixture.totals();
    assert_eq!((started, fixture.pod_state().in_flight), (finished, 0));
}

/// An attacker who knows only the addresses of a connection hits the length of a long body in every few attempts.
#[test]
fn a_forged_segment_far_beyond_the_window_ends_no_body() {
    const LENGTH: usize = 1 << 30;
    let tun_fixture = TunFixture::new();
    let head = format!("POST /early HTTP/1.1\r\nContent-Length: {LENGTH}\r\n\r\n");
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    client.send_data(0, head.as_bytes());
    client.receive_until(1, SHORT);
    let forged = [&b"x".repeat(100), get_request("never").as_bytes()].concat();
    client.send_data(head.len() + LENGTH - 100, &forged);
    client.send_data(head.len(), b"the body's first bytes");
    client.receive_until_quiet(ABSENCE_WAIT);
    assert_eq!(tun_fixture.fixture.pod_state().in_flight, 0);
    client.send(&TcpSegment { flags: RST, ..client.segment(head.len() + 22, b"") });
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn only_the_reset_that_the_kernel_takes_ends_a_request() {
    let tun_fixture = TunFixture::new();
    let request = get_request("hold");
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    client.send_data(0, request.as_bytes());
    tun_fixture.fixture.wait_served(1);
    // Outside the window, and inside it but not at its begin (RFC 5961).
    for offset in [request.len() + (1 << 20), request.len() + 1_000] {
        client.send(&TcpSegment { flags: RST, ..client.segment(offset, b"") });
        client.receive_until_quiet(ABSENCE_WAIT);
        let state = tun_fixture.fixture.pod_state();
        assert_eq!((state.in_flight, state.connections), (1, 1));
    }
    client.send(&TcpSegment { flags: RST, ..client.segment(request.len(), b"") });
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn a_request_may_come_with_the_clients_end() {
    let tun_fixture = TunFixture::new();
    let request = get_request("length/5");
    let bytes = request.as_bytes();
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    client.send_fin(bytes.len(), bytes);
    client.receive_until(1, SHORT);
    assert_eq!(client.receive_until_closed(), ServerClose::Fin);
    // First the segment with FIN, then the data before it.
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_002);
    client.send_fin(bytes.len(), &bytes[20..]);
    client.send_data(0, &bytes[..20]);
    client.receive_until(1, SHORT);
    assert_eq!(client.receive_until_closed(), ServerClose::Fin);
    tun_fixture.fixture.wait_settled_in_sync();
}

/// A sender that probes a closed window with a byte of data, like BSD's. The server reads on after some probes.
#[test]
fn a_closed_window_that_is_probed_loses_no_boundary() {
    const LENGTH: usize = 200_000;
    // A permanent limit of a few segments.
    let tun_fixture = TunFixture::with_sysctl(Some("net.ipv4.tcp_rmem=4096 16384 16384"), "");
    let head = format!("POST /hold HTTP/1.1\r\nContent-Length: {LENGTH}\r\n\r\n");
    let next = get_request("length/5");
    let requests = [head.as_bytes(), &b"x".repeat(LENGTH), next.as_bytes()].concat();
    let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, 1_001);
    let (mut offset, mut probes) = (0, 0);
    while (client.acked as usize) < requests.len() {
        let acked = client.acked as usize;
        let edge = requests.len().min(acked + client.server_window as usize);
        while offset < edge {
            let end = edge.min(offset + 1_400);
            client.send_data(offset, &requests[offset..end]);
            offset = end;
        }
        if edge == acked {
            client.send_data(acked, &requests[acked..=acked]);
            probes += 1;
        }
        if probes == 5 {
            tun_fixture.fixture.open_gate();
        }
        client.receive_until_quiet(ABSENCE_WAIT);
        // Without an acknowledgement the probe may be lost, so it is sent again.
        if client.acked as usize == acked {
            offset = acked;
        }
    }
    assert!(probes >= 5, "the window was open all the time");
    client.receive_until(2, SHORT);
    close_connection(&mut client, requests.len());
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn the_first_data_may_be_what_ends_the_handshake() {
    // As a whole; in two parts; the second part first.
    send_first_data(&TunFixture::new(), &[&[(0, 37)], &[(0, 20), (20, 37)], &[(20, 37), (0, 20)]]);
}

/// SYN cookies leave the listener without state, so only a segment with the first byte completes the handshake.
#[test]
fn the_first_data_may_bring_the_cookie_of_the_handshake() {
    send_first_data(
        &TunFixture::with_sysctl(Some("net.ipv4.tcp_syncookies=2"), ""),
        &[&[(0, 37)], &[(0, 20), (20, 37)]],
    );
}

fn send_first_data(tun_fixture: &TunFixture, orders: &[&[(usize, usize)]]) {
    let request = get_request("length/5");
    let bytes = request.as_bytes();
    for (port, order) in orders.iter().enumerate() {
        let mut client = UserspaceTcpClient::prepare(&tun_fixture.tun, 4_000 + port as u16);
        client.send_syn(b"");
        client.wait_syn_ack();
        order.iter().for_each(|&(from, to)| client.send_data(from, &bytes[from..to]));
        client.receive_until(1, SHORT);
        assert_eq!(tun_fixture.in_use(), [ConnectionActivity::Idle], "{order:?}");
        close_connection(&mut client, bytes.len());
        assert_eq!(tun_fixture.fixture.pod_state().desynced_connections, 0, "{order:?}");
    }
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn data_in_a_syn_count_where_the_server_takes_them() {
    // Without requiring a cookie (2 and 0x200).
    let tun_fixture = TunFixture::with_sysctl(Some("net.ipv4.tcp_fastopen=514"), "fastopen");
    let request = get_request("length/5");
    let bytes = request.as_bytes();
    for port in 5_000..5_010 {
        let mut client = UserspaceTcpClient::prepare(&tun_fixture.tun, port);
        // The whole request or a part of it.
        let first = if port % 2 == 0 { bytes.len() } else { 20 };
        client.send_syn(&bytes[..first]);
        client.wait_syn_ack();
        assert_eq!(client.acked as usize, first, "taken");
        client.send_data(first, &bytes[first..]);
        // The first packet is duplicated.
        client.send_syn(&bytes[..first]);
        client.receive_until(1, SHORT);
        close_connection(&mut client, bytes.len());
    }
    tun_fixture.fixture.wait_settled_in_sync();
}

#[test]
fn data_in_a_syn_do_not_count_where_the_server_leaves_them() {
    let tun_fixture = TunFixture::new();
    let request = get_request("length/5");
    // They are sent again, and count then; or they are never sent again.
    for (port, again) in [(5_000, true), (5_001, false)] {
        let mut client = UserspaceTcpClient::prepare(&tun_fixture.tun, port);
        client.send_syn(request.as_bytes());
        client.wait_syn_ack();
        assert_eq!(client.acked, 0, "not taken");
        client.send_data(0, b"");
        if again {
            client.send_data(0, request.as_bytes());
            client.receive_until(1, SHORT);
            close_connection(&mut client, request.len());
        } else {
            close_connection(&mut client, 0);
        }
        assert_eq!(tun_fixture.fixture.totals(), (1, 1), "again: {again}");
    }
    tun_fixture.fixture.wait_settled_in_sync();
}

/// Lines so short that the slow path reads them, and as many of them as a segment holds.
#[test]
fn full_segments_of_short_chunks_are_read_in_any_order() {
    let tun_fixture = TunFixture::new();
    let chunks = "12\r\nGET / HTTP/1.1\r\n\r\n\r\n".repeat(200);
    let head = "POST /length/5 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
    let request = format!("{head}{chunks}0\r\n\r\n");
    let pieces: Vec<&[u8]> = request.as_bytes().chunks(SEGMENT_BYTES).collect();
    assert_eq!(pieces.len(), 4);
    let orders = (0..256).map(|it| [it & 3, it >> 2 & 3, it >> 4 & 3, it >> 6]);
    let all = |it: &[usize; 4]| (0..4).all(|piece| it.contains(&piece));
    for (order, port) in orders.filter(all).zip(6_000..) {
        let mut client = UserspaceTcpClient::connect(&tun_fixture.tun, port);
        order.iter().for_each(|&offset| client.send_data(offset * SEGMENT_BYTES, pieces[offset]));
        client.receive_until(1, SHORT);
        assert_eq!(tun_fixture.in_use(), [ConnectionActivity::Idle], "{order:?}");
        close_connection(&mut client, request.len());
        assert_eq!(tun_fixture.fixture.pod_state().desynced_connections, 0, "{order:?}");
    }
    tun_fixture.fixture.wait_settled_in_sync();
    assert_eq!(tun_fixture.fixture.served_requests(), 24);
}
