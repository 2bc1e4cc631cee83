//! Shell: overdue requests to a pod: their connections are closed, and no others.

use std::thread::JoinHandle;

use super::{
    http_server::{UPGRADE, send_and_measure, server_fixture, shared_server_fixture},
    *,
};

/// Timeout of requests in these tests. A request that gets its response at once takes seconds on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two requests on a connection that is in use until others have ended.
const REQUEST_PAUSE: Duration = Duration::from_millis(50);
const ENDED_METRIC: &str = "rouse_agent_deadlines_ended_total";

impl AgentFixture {
    /// Sends a request on a new connection and reads to its end. Returns the number of bytes and the kind of the end.
    fn send_and_read_to_end(&self, path: &str) -> JoinHandle<(usize, ErrorKind)> {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n{UPGRADE}\r\n")
            .expect("an open connection");
        read_to_end(stream)
    }
}

/// Reads to the end of the connection. Returns the number of bytes and the kind of the end.
fn read_to_end(mut stream: TcpStream) -> JoinHandle<(usize, ErrorKind)> {
    thread::spawn(move || {
        let (mut received, mut bytes) = (0, [0; 1024]);
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return (received, ErrorKind::UnexpectedEof),
                Ok(read) => received += read,
                Err(error) => return (received, error.kind()),
            }
        }
    })
}

#[test]
fn only_the_connections_of_requests_that_take_too_long_are_ended() {
    let fixture = shared_server_fixture(TIMEOUT);
    let ended = fixture.metric_count(ENDED_METRIC);
    let (mut busy_connection, mut unused_connection, mut opaque_connection) =
        (fixture.connect(), fixture.connect(), fixture.connect());
    opaque_connection.write_all(b"\x16").expect("the connection is open");
    opaque_connection.read_exact(&mut [0]).expect("the server responds");
    opaque_connection.write_all(b"\x17").expect("bytes without a response");
    send_and_measure(&mut busy_connection, "/quick");
    let long_requests =
        ["/hang", "/drip", "/upgrade"].map(|path| fixture.send_and_read_to_end(path));
    // Older than the long requests, always in use, and open at their end: the deadline is each request's own.
    while long_requests.iter().any(|it| !it.is_finished()) {
        send_and_measure(&mut busy_connection, "/quick");
        thread::sleep(REQUEST_PAUSE);
    }
    let [hang, drip, upgrade] = long_requests.map(|it| it.join().expect("no panic"));
    assert_eq!(hang, (0, ErrorKind::ConnectionReset));
    assert!(drip.0 > 0 && upgrade.0 > 0, "their responses had begun");
    assert_eq!([drip.1, upgrade.1], [ErrorKind::ConnectionReset; 2]);
    send_and_measure(&mut busy_connection, "/quick");
    send_and_measure(&mut unused_connection, "/quick");
    fixture.wait_metric(ENDED_METRIC, ended + 3);
    let page = fixture.metrics();
    assert!(page.contains(&format!("{ENDED_METRIC} {}\n", ended + 3)), "{page}");
    assert!(page.contains("rouse_agent_deadlines_kept 1\n"), "{page}");
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let state = KernelMaps::open(&pins).expect("pinned maps").pod_state(fixture.slot());
    assert_eq!((state.in_flight, state.connections), (1, 3), "the opaque connection: {state:?}");
    opaque_connection.write_all(b"!").expect("the connection is open");
    opaque_connection.read_exact(&mut [0]).expect("an opaque connection stays open");
}

#[test]
fn an_overdue_request_from_before_the_start_of_the_agent_is_ended_too() {
    let mut fixture = server_fixture("overdue-anew", TIMEOUT);
    fixture.kill_agent();
    let hang = fixture.send_and_read_to_end("/hang");
    fixture.start_agent();
    assert_eq!(hang.join().expect("no panic"), (0, ErrorKind::ConnectionReset));
}

/// First bytes of an HTTP/2 client: preface and an empty SETTINGS frame.
const CLIENT_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Frame of HTTP/2 (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A whole request, `GET http://a/`, with entries of HPACK's static table.
fn request_frame(stream: u32) -> Vec<u8> {
    frame(1, 5, stream, &[0x82, 0x84, 0x86, 0x41, 1, b'a'])
}

/// RST_STREAM frame by which the client cancels a request.
fn cancel_frame(stream: u32) -> Vec<u8> {
    frame(3, 0, stream, &8_u32.to_be_bytes())
}

#[test]
fn an_http2_connection_is_ended_once_all_its_open_requests_are_overdue() {
    let fixture = shared_server_fixture(TIMEOUT);
    let [mut one, mut many] = [fixture.connect(), fixture.connect()];
    for stream in [&mut many, &mut one] {
        let bytes = [CLIENT_PREFACE, &request_frame(1)].concat();
        stream.write_all(&bytes).expect("an open connection");
    }
    let response = read_to_end(one);
    let (mut connection, mut number) = (fixture.connect(), 1);
    // The first request is older than the other connection's, and the newest is always young.
    while !response.is_finished() {
        send_and_measure(&mut connection, "/quick");
        thread::sleep(REQUEST_PAUSE);
        let cancel = if number > 1 { cancel_frame(number) } else { Vec::new() };
        number += 2;
        many.write_all(&[request_frame(number), cancel].concat()).expect("an open connection");
    }
    assert_eq!(response.join().expect("no panic"), (0, ErrorKind::ConnectionReset));
    let pins = fixture.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let maps = KernelMaps::open(&pins).expect("pinned maps");
    assert_eq!(maps.pod_state(fixture.slot()).in_flight, 2, "its first and its newest");
    assert_eq!(read_to_end(many).join().expect("no panic"), (0, ErrorKind::ConnectionReset));
    send_and_measure(&mut connection, "/quick");
}
