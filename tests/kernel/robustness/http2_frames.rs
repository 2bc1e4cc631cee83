//! Shell: HTTP/2 frames that the eBPF programs lose and find again, and connections on which both ends begin HTTP/2 at
//! once.

use std::{
    hint,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixListener,
    process::{Child, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    ANY_ADDRESS, RobustnessFixture,
    server_process::receive_descriptor,
    tun_client::{TunDevice, UserspaceTcpClient},
};
use crate::fixture::{SERVING_PORT, command_in, in_netns};

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// HPACK header blocks (RFC 7541) with a host: GET of `/`, and POST of `/echo`, whose response waits for the body.
const GET: &[u8] = b"\x82\x86\x84\x41\x01a";
const POST: &[u8] = b"\x83\x86\x04\x05/echo\x41\x01a";

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

/// A hyper server in the pod, killed on drop.
struct HyperServer(Child);

impl HyperServer {
    fn start(fixture: &RobustnessFixture) -> Self {
        let mut command = command_in(&fixture.pod.cgroup, &fixture.pod.netns);
        command.args([env!("CARGO_BIN_EXE_servers"), "http"]);
        command.env("ADDRESS", ANY_ADDRESS).env("BOOK", &fixture.log_path).stdin(Stdio::null());
        let server = Self(command.spawn().expect("it was built beside the tests"));
        let address = SocketAddr::new([127, 0, 0, 1].into(), SERVING_PORT);
        fixture.wait("listening", |fixture| {
            in_netns(&fixture.pod.netns, || TcpStream::connect(address).is_ok())
        });
        server
    }
}

impl Drop for HyperServer {
    fn drop(&mut self) {
        let _dead_already = self.0.kill();
        let _waited_already = self.0.wait();
    }
}

/// Receives packets until `count` requests have ended, or until a timeout.
fn receive_until_ended(
    fixture: &RobustnessFixture,
    client: &mut UserspaceTcpClient<'_>,
    count: u64,
) {
    let until = Instant::now() + Duration::from_secs(60);
    while fixture.totals().1 < count && Instant::now() < until {
        client.receive_until_quiet(Duration::from_millis(20));
    }
}

/// More segments arrive early than the eBPF programs can buffer, so they lose the client's frames. The server's
/// responses reveal the requests in them, and the next frame is read again.
#[test]
fn lost_http2_frames_are_found_again_by_responses_and_later_frames() {
    const EARLY: u32 = 12;
    let fixture = RobustnessFixture::new();
    let _server = HyperServer::start(&fixture);
    fixture.wait("closed", |it| it.pod_state().connections == 0);
    let tun = TunDevice::new(&fixture.pod);
    let mut client = UserspaceTcpClient::connect(&tun, 1_001);
    let mut sent = 0;
    let begin = [PREFACE.to_vec(), frame(SETTINGS, 0, 0, b"")].concat();
    let request_frame = |stream| frame(HEADERS, END_STREAM | END_HEADERS, stream, GET);
    for piece in [begin, request_frame(1)] {
        client.send_data(sent, &piece);
        sent += piece.len();
    }
    receive_until_ended(&fixture, &mut client, 1);
    assert_eq!((fixture.totals(), fixture.pod_state().desynced_connections), ((1, 1), 0));

    // One segment is late, and more follow it than can be buffered.
    let late_offset = sent;
    let frames: Vec<Vec<u8>> = (0..=EARLY).map(|index| request_frame(3 + 2 * index)).collect();
    for piece in &frames {
        if sent != late_offset {
            client.send_data(sent, piece);
        }
        sent += piece.len();
    }
    client.send_data(late_offset, &frames[0]);
    let count = u64::from(EARLY) + 2;
    receive_until_ended(&fixture, &mut client, count);
    let state = fixture.pod_state();
    assert_eq!((fixture.totals(), state.in_flight), ((count, count), 0));
    assert!(state.desynced_connections > 0, "nothing was lost: {state:?}");

    // Only a program that reads frames again knows of a request without a response, and of its end.
    let open = frame(HEADERS, END_HEADERS, 101, POST);
    client.send_data(sent, &open);
    sent += open.len();
    fixture.wait("in flight", |it| it.pod_state().in_flight == 1);
    let reset = frame(RST_STREAM, 0, 101, &8_u32.to_be_bytes());
    client.send_data(sent, &reset);
    sent += reset.len();
    fixture.wait("reset", |it| it.pod_state().in_flight == 0);
    client.receive_until_quiet(Duration::from_millis(20));
    client.send_fin(sent, b"");
    let _ended = client.receive_until_closed();
    fixture.wait("closed", |it| it.pod_state().connections == 0);
    assert_eq!(fixture.totals(), (count + 1, count + 1));
}

/// A server need not wait for the client's preface (RFC 9113 §3.4), and grpc-go's does not. Either side may reveal
/// HTTP/2 first, and two processors may find it at the same moment.
#[test]
fn both_ends_may_begin_http2_at_once() {
    const TIMES: u64 = 3_000;
    let fixture = RobustnessFixture::new();
    let path = fixture.log_path.with_extension("meeting");
    let meeting = UnixListener::bind(&path).unwrap();
    let mut server = fixture.start_server_process();
    server.expect_step(&format!("listen {ANY_ADDRESS}"));
    server.expect_step(&format!("hand-accepted {}", path.display()));
    let (accepted, _) = meeting.accept().unwrap();
    std::fs::remove_file(&path).unwrap();
    let (settings, request_frames) =
        (frame(SETTINGS, 0, 0, b""), frame(HEADERS, END_STREAM | END_HEADERS, 1, GET));
    let begin = [PREFACE, &settings].concat();
    let response = frame(HEADERS, END_STREAM | END_HEADERS, 1, b"\x88");
    for round in 0..TIMES {
        let mut client = fixture.connect();
        let mut server = TcpStream::from(receive_descriptor(&accepted).unwrap());
        let ready = AtomicU32::new(0);
        // Both threads spin, one of them a little longer; with sleeps they would rarely coincide.
        let start = |late: u64| {
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < 2 {}
            (0..late).for_each(|_| hint::spin_loop());
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                start(round % 64);
                server.write_all(&settings).unwrap();
            });
            start(0);
            client.write_all(&begin).unwrap();
        });
        client.write_all(&request_frames).unwrap();
        server.read_exact(&mut vec![0; begin.len() + request_frames.len()]).unwrap();
        server.write_all(&response).unwrap();
        client.read_exact(&mut vec![0; settings.len() + response.len()]).unwrap();
    }
    fixture.wait("closed", |it| it.pod_state().connections == 0);
    let state = fixture.pod_state();
    assert_eq!(fixture.totals(), (TIMES, TIMES), "{state:?}");
    assert_eq!(
        (state.in_flight, state.desynced_connections, state.opaque_connections),
        (0, 0, 0),
        "{state:?}"
    );
}
