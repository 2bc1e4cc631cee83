//! Clients that violate HTTP, never end or never begin a request, beside well-behaved ones.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use tests::http_client::get;
use tests::node_load::{LoadPlan, RunningLoad, lost_requests, with_load};
use tests::rouse_node::RouseNode;
use tests::scenarios;
use tests::wait::{WAIT_TIMEOUT, sleep, wait_for};

use crate::raw_tcp;

/// Requests that no HTTP/1.1 server should accept.
const MALFORMED: [&[u8]; 9] = [
    b"\r\n\r\n\r\n\r\n",
    b"HELLO\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00\xff\x00\xff\x00\xff\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n: y\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\nbody",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nbody!",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nbody\r\n0\r\n\r\n",
];
/// Size of a request head that every server must refuse.
const MAX_HEAD_BYTES: usize = 8 << 20;

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a socket");
    stream
}

/// Reads until the server closes the connection.
fn read_to_end(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end as well as a close.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

fn send_malformed(address: SocketAddr) {
    for bytes in MALFORMED {
        let mut stream = connect(address);
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let response = read_to_end(stream);
        let is_accepted = response.starts_with(b"HTTP/1.1 200");
        assert!(!is_accepted, "{:?} was taken for a request", String::from_utf8_lossy(bytes));
    }
}

fn send_endless_head(address: SocketAddr) {
    let mut stream = connect(address);
    stream.set_write_timeout(Some(Duration::from_secs(30))).expect("a socket");
    let line = [b"X-More: ".as_slice(), &[b'a'; 1000], b"\r\n"].concat();
    let mut sent =
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n").map_or(MAX_HEAD_BYTES, |()| 0);
    while sent < MAX_HEAD_BYTES && stream.write_all(&line).is_ok() {
        sent += line.len();
    }
    assert!(sent < MAX_HEAD_BYTES, "a head of {MAX_HEAD_BYTES} bytes was accepted");
}

/// Sends a valid request, one byte at a time.
fn send_slowly(address: SocketAddr) {
    let request: &[u8] =
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nslow";
    let mut stream = connect(address);
    stream.set_nodelay(true).expect("a socket");
    for (position, byte) in request.iter().enumerate() {
        stream.write_all(&[*byte]).expect("the server reads");
        // A busy machine lets a thread sleep much longer, and a head must come to its end within a minute.
        if position % 4 == 0 {
            sleep(Duration::from_millis(10));
        }
    }
    let response = read_to_end(stream);
    assert!(response.ends_with(b"slow"), "{}", String::from_utf8_lossy(&response));
}

/// Closes the sending direction of connections: before, within and after a request.
fn send_half_closed(address: SocketAddr) {
    for bytes in [
        b"".as_slice(),
        b"GET / HT",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nfewer than promised",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal",
        b"GET /?sleep=200 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ] {
        let mut stream = connect(address);
        stream.write_all(bytes).expect("a write");
        stream.shutdown(Shutdown::Write).expect("a socket");
        read_to_end(stream);
    }
}

/// Closes the connection in the middle of its request or of the response.
fn disconnect_midway(address: SocketAddr) {
    for bytes in [
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nfewer".as_slice(),
        b"GET /?sleep=100 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /?bytes=10000000 HTTP/1.1\r\nHost: x\r\n\r\n",
    ] {
        let mut stream = connect(address);
        stream.write_all(bytes).expect("a write");
        if bytes.starts_with(b"GET /?bytes") {
            // Closing a socket with unread bytes resets the connection.
            let _ = stream.read(&mut [0; 10]);
        }
    }
}

/// Runs all of these clients at once against one service, three times, beside silent connections.
fn run_bad_clients(node: &RouseNode, address: SocketAddr, running: &RunningLoad<'_>) {
    let silent: Vec<TcpStream> = node.in_client_netns(|| {
        let without_request = (0..20).map(|_| connect(address));
        let with_partial_request = (0..20).map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"GET / HTTP/1.1\r\nHo").expect("a write");
            stream
        });
        without_request.chain(with_partial_request).collect()
    });
    let kinds =
        [send_malformed, send_endless_head, send_slowly, send_half_closed, disconnect_midway];
    thread::scope(|scope| {
        let bad_clients = kinds.map(|kind| {
            scope.spawn(move || {
                node.enter_client_netns();
                (0..3).for_each(|_| kind(address));
            })
        });
        bad_clients.into_iter().for_each(|one| one.join().expect("no panic"));
    });
    let count_before = running.count();
    wait_for("responses to the other clients", || {
        (running.count() >= count_before + 50).then_some(())
    });
    drop(silent);
}

/// Runs these clients against a service under load on the annotated path, until it sleeps again.
fn check_bad_clients(node: &RouseNode, path: &str) {
    let manifest = include_str!("../../examples/hello.yaml");
    let window = "autoscaling.knative.dev/window: 6s";
    let manifest = manifest.replace(window, &format!("{window}\n        rouse.dev/path: {path}"));
    assert!(node.apply(&manifest.replace("name: hello", &format!("name: {path}"))).0);
    let target = node.wait_ready(path);
    let response = node.in_client_netns(|| get(target, path, "/")).expect("a response");
    assert_eq!(response.status, 200, "{response:?}");
    let plan = |keep_alive| LoadPlan {
        target,
        host: path.to_owned(),
        path: "/?sleep=10".into(),
        clients: 3,
        keep_alive,
    };
    let (results, (fresh, ())) = with_load(node, &plan(true), |_| {
        with_load(node, &plan(false), |running| run_bad_clients(node, target, running))
    });
    for requests in [results, fresh] {
        assert!(
            lost_requests(&requests).is_empty(),
            "{path}, of {}: {:?}",
            requests.len(),
            lost_requests(&requests)
        );
    }
    wait_for("nothing in flight", || {
        // Without a pod the service sleeps, and has no such figure.
        let is_over = match in_flight(node, path) {
            Some(count) => count == 0.0,
            None => node.stored_pods(path).is_empty(),
        };
        is_over.then_some(())
    });
    // A request that was counted and never ended would keep the service awake indefinitely.
    node.wait_asleep(path);
    assert_eq!(node.in_client_netns(|| get(target, path, "/")).expect("a response").status, 200);
}

/// Number of requests of a service that are in flight, by the autoscaler; `None` while the service sleeps.
fn in_flight(node: &RouseNode, service: &str) -> Option<f64> {
    let metrics = node.metrics(7102);
    let revision = format!("\"{service}-00001\"");
    let is_meant = |line: &&str| {
        line.starts_with("rouse_revision_in_flight_requests{") && line.contains(&revision)
    };
    metrics.lines().find(is_meant)?.rsplit(' ').next()?.parse().ok()
}

#[test]
fn clients_that_break_http_or_speak_another_protocol_disturb_no_other_client() {
    let node = RouseNode::start("clients");
    scenarios::run_at_once(
        &node,
        &scenarios![
            clients_that_break_http_disturb_no_other_client_on_the_direct_path,
            clients_that_break_http_disturb_no_other_client_at_the_activator,
            raw_tcp::connections_wait_for_a_pod_whose_server_speaks_first,
            raw_tcp::an_open_connection_keeps_its_pod_although_no_byte_is_sent,
            raw_tcp::a_connection_from_outside_wakes_the_service_of_its_port,
        ],
    );
}

fn clients_that_break_http_disturb_no_other_client_on_the_direct_path(node: &RouseNode) {
    check_bad_clients(node, "direct");
}

fn clients_that_break_http_disturb_no_other_client_at_the_activator(node: &RouseNode) {
    check_bad_clients(node, "activator");
}
