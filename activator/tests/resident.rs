//! Shell: memory that clients can make an activator hold: attackers, compared with the bound that docs/operations.md
//! states, and those with large bodies.
//!
//! The activator runs in a process of its own, so that only its memory is measured, and all of it.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::print_stdout, reason = "the output shows the growth of memory")]

mod h2c;
mod harness;
#[path = "resident/large_bodies.rs"]
mod large_bodies;
mod tls_client;

use std::{
    io::{BufRead as _, BufReader, Lines, Write as _},
    net::{Ipv4Addr, SocketAddr},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use activator::budget::{
    BASE_MEMORY_MIB, MAX_CLIENT_STREAMS, REQUEST_OVERHEAD_BYTES, TLS_CONNECTION_BYTES, memory_mib,
};
use common::{fixtures::certificates::TestAuthority, wire::AppProtocol};
use datapath::h2::{frame_flag, frame_kind};
use futures::StreamExt as _;
use h2c::{
    MAX_WINDOW, WHOLE_REQUEST, client_preface, encode_gets, encode_indexed_requests, frame,
    start_endless_pod,
};
use harness::{ActivatorFixture, GET, LONG, OK, read_head, revision, start_pod, start_pod_with};
use http_body_util::BodyExt as _;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use nix::sys::socket::sockopt;
use rustls::{ClientConfig, ClientConnection};
use tls_client::{HOST, TlsClient, client_config, handshake, set_default};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

/// Allocator of the product, which determines the resident memory.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const MIB: usize = 1 << 20;
/// Maximum number of bytes of requests, and of responses, that the activator may hold in these tests.
const BYTES: usize = 32 * MIB;
/// Maximum number of the activator's connections, if a test does not set another one.
const CONNECTIONS: usize = 420;
/// Number of clients in tests that measure one connection's memory: large enough for a few KiB of each to be seen.
const MANY: usize = 3000;
/// Permitted growth of the process itself in MiB: threads' stacks, pages of the program, arenas of the allocator, and
/// recently freed memory. The same load took 141 to 165 MiB on different machines.
const PROGRAM_MIB: usize = 64;
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Longest wait of another client beside an attack.
const PATIENCE: std::time::Duration = LONG.saturating_mul(3);
/// Beginning of the line in which the other process prints its ports.
const PORT_PREFIX: &str = "port ";
/// Environment variable with the maximum number of the other process's connections.
const CONNECTIONS_VARIABLE: &str = "RESIDENT_CONNECTIONS";
/// Line that the other process prints once a pod is in force.
const DONE: &str = "done";

/// Prints its port and that of TLS, and serves until its standard input ends. A line of the input has the address of a pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role, run by the other tests"]
async fn an_activator_of_its_own() {
    let connections = Some(std::env::var(CONNECTIONS_VARIABLE).unwrap().parse().unwrap());
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_bytes, config.max_response_bytes) = (BYTES, BYTES);
        (config.max_connections, config.max_client_connections) = (connections, connections);
        config.max_waiting = 100_000;
        // Longer than a measurement takes.
        config.tls_handshake_timeout_ms = 60_000;
    })
    .await;
    set_default(&mut fixture, &TestAuthority::new().issue(&[HOST]));
    println!("{PORT_PREFIX}{} {}", fixture.port, fixture.outside_tls.port());
    let (send, mut lines) = tokio::sync::mpsc::channel::<String>(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            send.blocking_send(line.unwrap()).unwrap();
        }
    });
    while let Some(line) = lines.recv().await {
        let (protocol, address) = line.split_once(' ').unwrap();
        let protocol = if protocol == "h2c" { AppProtocol::H2c } else { AppProtocol::Http1 };
        fixture.apply_change(|table| {
            let revision = table.revisions.get_mut(&revision()).unwrap();
            // The test gives up a client before the activator does, so that a response too late is seen as one. A long
            // body takes minutes.
            let timeout = if is_long() { PATIENCE * 20 } else { PATIENCE * 2 };
            (revision.protocol, revision.timeout) = (protocol, timeout);
        });
        fixture.add_ready_pod("p", address.parse().unwrap());
        println!("{DONE}");
    }
}

/// Returns true if `cargo xtask test --long` runs the test, which sets this variable.
fn is_long() -> bool {
    std::env::var_os("ROUSE_LONG").is_some()
}

/// Activator in another process.
struct ActivatorProcessFixture {
    child: Child,
    stdout_lines: Lines<BufReader<ChildStdout>>,
    port: u16,
    /// Port of its TLS gateway.
    tls_port: u16,
    /// True if its clients use TLS: only then their memory for it is permitted.
    has_tls_clients: bool,
    /// Maximum number of its connections.
    max_connections: usize,
    /// Resident memory before the first request, in MiB.
    idle_memory_mib: usize,
}

impl ActivatorProcessFixture {
    fn start() -> Self {
        Self::for_connections(CONNECTIONS)
    }

    fn for_connections(connections: usize) -> Self {
        let test = std::env::current_exe().unwrap();
        let role = ["--exact", "an_activator_of_its_own", "--ignored", "--nocapture"];
        let mut child = Command::new(test)
            .args(role)
            .env(CONNECTIONS_VARIABLE, connections.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout_lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ports = stdout_lines.find_map(|line| {
            let line = line.unwrap();
            let (port, tls_port) = line.split_once(PORT_PREFIX)?.1.split_once(' ')?;
            Some((port.parse().ok()?, tls_port.parse().ok()?))
        });
        let (port, tls_port) = ports.expect("it prints its ports");
        let mut fixture = Self {
            child,
            stdout_lines,
            port,
            tls_port,
            has_tls_clients: false,
            max_connections: connections,
            idle_memory_mib: 0,
        };
        fixture.idle_memory_mib = fixture.memory_mib("VmRSS:");
        fixture
    }

    /// Value of the process's status in the kernel, in MiB.
    fn memory_mib(&self, name: &str) -> usize {
        let file = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(file).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<usize>().unwrap() >> 10
    }

    /// Maximum growth of the process so far, in MiB.
    fn peak_growth_mib(&self) -> usize {
        self.memory_mib("VmHWM:") - self.idle_memory_mib
    }

    /// Starts an activator whose clients use TLS.
    fn for_tls_connections(connections: usize) -> Self {
        let mut fixture = Self::for_connections(connections);
        fixture.has_tls_clients = true;
        fixture
    }

    async fn connect(&self, source: Ipv4Addr) -> TcpStream {
        connect_from(source, self.port).await
    }

    fn set_pod(&mut self, protocol: &str, address: SocketAddr) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{protocol} {address}").unwrap();
        assert!(self.stdout_lines.any(|line| line.unwrap() == DONE), "it ended");
    }

    /// Waits until the process grows no more.
    async fn wait_idle(&self) {
        let mut before = usize::MAX;
        while before != self.peak_growth_mib() {
            before = self.peak_growth_mib();
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }

    /// Checks that a well-behaved client is served, even while thousands of waiting requests are sent to their pods.
    ///
    /// It reads the head and the first bytes of the body: [`start_endless_pod`] bodies have no end to wait for.
    async fn assert_serves_others(&self) {
        let mut client = self.connect(Ipv4Addr::new(127, 0, 0, 3)).await;
        client.write_all(GET.as_bytes()).await.unwrap();
        let mut received = String::new();
        let responded = tokio::time::timeout(PATIENCE, async {
            while received.split_once("\r\n\r\n").is_none_or(|(_, body)| body.is_empty()) {
                let mut piece = [0; 64];
                let Ok(count @ 1..) = client.read(&mut piece).await else { return };
                received.push_str(&String::from_utf8_lossy(&piece[..count]));
            }
        });
        assert!(responded.await.is_ok() && received.starts_with("HTTP/1.1 200 "), "{received}");
    }
}

async fn connect_from(source: Ipv4Addr, port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    // The port is chosen for the whole four-tuple: connections of tests before this one wait for their end on many others.
    nix::sys::socket::setsockopt(&socket, sockopt::IpBindAddressNoPort, &true).unwrap();
    socket.bind((source, 0).into()).unwrap();
    socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.unwrap()
}

impl Drop for ActivatorProcessFixture {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs clients that all send `messages` and read their responses, until the activator grows no more.
async fn run_attack(process: &ActivatorProcessFixture, clients: usize, messages: [Vec<u8>; 2]) {
    let messages = Arc::new(messages);
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let (stream, messages) = (process.connect(ATTACKER).await, Arc::clone(&messages));
        all.spawn(async move {
            let (mut from, mut to) = stream.into_split();
            let mut sink = vec![0; 64 << 10];
            let reads = async { while let Ok(1..) = from.read(&mut sink).await {} };
            let sends = async {
                to.write_all(&messages[0]).await?;
                // Over HTTP/2 the server's windows come first.
                tokio::time::sleep(Duration::from_millis(300)).await;
                to.write_all(&messages[1]).await
            };
            let (_sent, ()) = tokio::join!(sends, reads);
        });
    }
    process.wait_idle().await;
}

/// Header block of :method POST, :scheme http, :path /, :authority a.
const POST: [u8; 6] = [0x83, 0x86, 0x84, 0x01, 1, b'a'];

/// Encodes POSTs over HTTP/2 whose bodies come in `pieces` of `piece` bytes, one for each stream at a time.
fn encode_posts(streams: u32, piece: usize, pieces: usize) -> [Vec<u8>; 2] {
    let mut all = Vec::new();
    (0..streams).for_each(|it| {
        all.extend(frame(frame_kind::HEADERS, frame_flag::END_HEADERS, 2 * it + 1, &POST));
    });
    let body = vec![b'x'; piece];
    for _ in 0..pieces {
        (0..streams).for_each(|it| all.extend(frame(frame_kind::DATA, 0, 2 * it + 1, &body)));
    }
    [client_preface(), all]
}

/// Encodes requests over HTTP/2 with as many fields as fit, of four bytes each: a literal without a value.
fn encode_many_fields(streams: u32) -> [Vec<u8>; 2] {
    let mut head = POST.to_vec();
    (0..1900).for_each(|_| head.extend([0, 1, b'a', 0]));
    let all = (0..streams)
        .flat_map(|it| frame(frame_kind::HEADERS, WHOLE_REQUEST, 2 * it + 1, &head))
        .collect();
    [client_preface(), all]
}

/// Head with as many lines as fit.
fn encode_lines(line: impl Fn(usize) -> String) -> [Vec<u8>; 2] {
    let mut head = String::from("GET / HTTP/1.1\r\nhost: a\r\n");
    for at in 0..4000 {
        let next = line(at);
        if head.len() + next.len() > 60_000 {
            break;
        }
        head += &next;
    }
    [head.into_bytes(), b"\r\n".to_vec()]
}

/// Checks that the process has grown by no more than these bounds allow, in addition to the requests `at_pods`.
fn assert_within(
    process: &ActivatorProcessFixture,
    [requests, responses]: [usize; 2],
    at_pods: usize,
    what: &str,
) {
    let at_pods = (at_pods * 2 * REQUEST_OVERHEAD_BYTES) >> 20;
    // Memory for TLS hides no growth of connections without it.
    let plain = if process.has_tls_clients { 0 } else { process.max_connections };
    let bound = memory_mib(requests, responses, process.max_connections) - BASE_MEMORY_MIB
        + PROGRAM_MIB
        + at_pods
        - ((plain * TLS_CONNECTION_BYTES) >> 20);
    let grown = process.peak_growth_mib();
    println!("{what}: {grown} MiB of {bound}");
    assert!(grown <= bound, "{what}: it grew by {grown} MiB, the bound is {bound}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_take_no_more_memory_than_is_stated() {
    type Messages = fn() -> [Vec<u8>; 2];
    let attacks: [(&str, Messages); 10] = [
        ("small heads", || [GET.as_bytes().to_vec(), vec![]]),
        ("heads of many short lines", || encode_lines(|_| "a:\r\n".into())),
        ("heads of many names", || encode_lines(|at| format!("{at:x}:\r\n"))),
        ("heads of long values", || encode_lines(|at| format!("x{at}: {}\r\n", "y".repeat(900)))),
        ("bodies in large frames", || encode_posts(16, 15 << 10, 4)),
        ("bodies in small frames", || encode_posts(16, 1, 4000)),
        ("empty frames", || encode_posts(16, 0, 4000)),
        ("small heads over HTTP/2", || [encode_gets(MAX_CLIENT_STREAMS, 0), vec![]]),
        ("heads of many fields over HTTP/2", || encode_many_fields(4)),
        ("heads without an end", || {
            let [head, _] = encode_lines(|at| format!("x{at}: {}\r\n", "y".repeat(900)));
            [head, vec![]]
        }),
    ];
    for (what, messages) in attacks {
        let mut process = ActivatorProcessFixture::start();
        run_attack(&process, 400, messages()).await;
        // Refusals are responses, and may be left unread, too.
        assert_within(&process, [BYTES, BYTES], 0, what);
        process.set_pod("http1", start_pod(OK, Duration::ZERO).await.address);
        process.assert_serves_others().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_that_are_not_read_take_no_more_memory_than_is_stated() {
    // A client with a window of 0 reads no byte of a response, and the pod sends ahead all the same.
    for (what, window) in [("responses not read", MAX_WINDOW), ("responses without a window", 0)] {
        let mut process = ActivatorProcessFixture::start();
        let (pod, _taken) = start_endless_pod().await;
        process.set_pod("h2c", pod);
        process.assert_serves_others().await;
        let mut clients = Vec::new();
        for _ in 0..40 {
            let mut client = process.connect(ATTACKER).await;
            client.write_all(&encode_gets(MAX_CLIENT_STREAMS, window)).await.unwrap();
            clients.push(client);
        }
        process.wait_idle().await;
        // Pods send on until connections that are cut off are closed.
        let passing = BYTES;
        assert_within(&process, [0, BYTES + passing], 40 * MAX_CLIENT_STREAMS as usize, what);
        process.assert_serves_others().await;
    }
}

/// Number of these connections that the activator has not closed.
fn count_open(all: &[TcpStream]) -> usize {
    let is_open = |it: &&TcpStream| {
        let mut rest = vec![0; 64 << 10];
        loop {
            match it.try_read(&mut rest) {
                Ok(1..) => {}
                Ok(0) => return false,
                Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
            }
        }
    };
    all.iter().filter(is_open).count()
}

/// Opens `count` clients, each of which has done what `each` does. Their connections stay open.
async fn open_clients(
    process: &ActivatorProcessFixture,
    count: usize,
    each: impl AsyncFn(&mut TcpStream),
) -> Vec<TcpStream> {
    let begun = futures::stream::iter(0..count).map(|_| async {
        let mut stream = process.connect(ATTACKER).await;
        each(&mut stream).await;
        stream
    });
    // Few of them send at the same time, so that each gets a response in time on a busy machine.
    begun.buffer_unordered(16).collect().await
}

/// Reads each request completely, however large, and responds with hello.
async fn respond_hello(stream: TcpStream, _: usize) {
    let service = service_fn(|request: http::Request<hyper::body::Incoming>| async {
        request.into_body().collect().await?;
        Ok::<_, hyper::Error>(http::Response::new("hello".to_owned()))
    });
    let io = TokioIo::new(stream);
    http1::Builder::new().max_headers(5000).serve_connection(io, service).await.ok();
}

/// Ends of the responses of [`respond_hello`], or of a refusal because too many bytes are held.
const RESPONSE_ENDS: &[&[u8]] = &[b"hello", b"are held"];
/// First bytes of the response to a PING (RFC 9113 §6.7).
const PONGS: &[&[u8]] = &[&[0, 0, 8, 6, 1]];

/// Sends `messages` and waits until `count` of these `responses` have come, or until the connection is closed.
async fn exchange_bytes(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    messages: &[u8],
    count: usize,
    responses: &[&[u8]],
) {
    stream.write_all(messages).await.ok();
    // Bytes of TLS may still be held.
    stream.flush().await.ok();
    let mut received = Vec::new();
    let has_enough = |received: &[u8]| {
        let of = |it: &&[u8]| received.windows(it.len()).filter(|some| some == it).count();
        responses.iter().map(of).sum::<usize>() >= count
    };
    let reads = async {
        while !has_enough(&received) {
            let Ok(1..) = stream.read_buf(&mut received).await else { return };
        }
    };
    tokio::time::timeout(LONG, reads).await.expect("responses in time");
}

const KEPT: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// Encodes POSTs over HTTP/2 whose bodies end.
fn encode_ended_posts(streams: u32) -> Vec<u8> {
    // As many bytes as an HTTP/2 client may send before it gets the server's windows.
    let mut all = encode_posts(streams, 15 << 10, 1).concat();
    (0..streams).for_each(|it| {
        all.extend(frame(frame_kind::DATA, frame_flag::END_STREAM, 2 * it + 1, b""));
    });
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_take_no_more_memory_than_is_stated() {
    let long = || encode_lines(|at| format!("x{at}: {}\r\n", "y".repeat(900))).concat();
    let body = "x".repeat(256 << 10);
    let post = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    // Memory that a connection keeps of what it once needed counts as bytes of requests. A kind has its bytes, the
    // number of connections, and for each what it sends and the number of responses to wait for.
    type Kind = (&'static str, usize, usize, Vec<(Vec<u8>, usize)>);
    let tables = (0..12).map(|it| (encode_indexed_requests(10 * it..10 * (it + 1)), 10));
    let tables = [(client_preface(), 0)].into_iter().chain(tables).collect();
    let kinds: [Kind; 10] = [
        ("connections that say nothing", 0, MANY, vec![]),
        ("heads half-way", 0, MANY, vec![(b"GET / HTTP/1.1\r\nhost: ".to_vec(), 0)]),
        ("prefaces half-way", 0, MANY, vec![(b"PRI * HT".to_vec(), 0)]),
        ("HTTP/2 without a request", 0, MANY, vec![(client_preface(), 0)]),
        ("kept connections", 0, MANY, vec![(KEPT.into(), 1)]),
        ("kept connections after a long head", BYTES, MANY, vec![(long(), 1)]),
        ("kept connections after a long body", BYTES, MANY / 2, vec![((post + &body).into(), 1)]),
        (
            "HTTP/2 after requests",
            BYTES,
            MANY / 4,
            vec![(encode_gets(MAX_CLIENT_STREAMS, MAX_WINDOW), 100)],
        ),
        ("HTTP/2 after bodies", BYTES, MANY / 4, vec![(encode_ended_posts(4), 4)]),
        ("HTTP/2 after entries of the table", BYTES, 100, tables),
    ];
    for (what, bytes, count, messages) in kinds {
        let mut process = ActivatorProcessFixture::for_connections(count + 20);
        process.set_pod("http1", start_pod_with(respond_hello).await);
        let all = open_clients(&process, count, async |stream| {
            for (messages, responses) in &messages {
                exchange_bytes(stream, messages, *responses, RESPONSE_ENDS).await;
            }
        })
        .await;
        process.wait_idle().await;
        println!("{what}: {} of {count} are still there", count_open(&all));
        assert_within(&process, [bytes, 0], 0, what);
        process.assert_serves_others().await;
    }
}

/// Encodes rounds of requests over HTTP/2 that are reset at once, with a PING behind each round.
fn encode_resets(rounds: u32, each: u32) -> Vec<Vec<u8>> {
    let get = [0x82, 0x86, 0x84, 0x01, 1, b'a'];
    let round = |round: u32| {
        let mut all = Vec::new();
        for stream in (round * each..(round + 1) * each).map(|it| 2 * it + 1) {
            all.extend(frame(frame_kind::HEADERS, WHOLE_REQUEST, stream, &get));
            // CANCEL (RFC 9113 §7).
            all.extend(frame(frame_kind::RST_STREAM, 0, stream, &8u32.to_be_bytes()));
        }
        all.extend(frame(frame_kind::PING, 0, 0, &[0; 8]));
        all
    };
    (0..rounds).map(round).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resets_leave_no_more_memory_than_is_stated() {
    let kinds = [
        ("resets within the bound", encode_resets(40, 10)),
        ("resets beyond the bound", encode_resets(80, 10)),
    ];
    for (what, rounds) in kinds {
        let mut process = ActivatorProcessFixture::start();
        process.set_pod("http1", start_pod_with(respond_hello).await);
        let all = open_clients(&process, 200, async |stream| {
            exchange_bytes(stream, &client_preface(), 0, PONGS).await;
            for messages in &rounds {
                exchange_bytes(stream, messages, 1, PONGS).await;
            }
        })
        .await;
        process.wait_idle().await;
        println!("{what}: {} of 200 are still there", count_open(&all));
        assert_within(&process, [0, 0], 0, what);
        process.assert_serves_others().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_bodies_that_wait_take_no_more_memory_than_is_stated() {
    let h1 = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n".to_vec();
    let h2 = encode_posts(MAX_CLIENT_STREAMS, 0, 0).concat();
    // One byte for each stream.
    let bytes: Vec<u8> = (0..MAX_CLIENT_STREAMS)
        .flat_map(|it| frame(frame_kind::DATA, 0, 2 * it + 1, b"x"))
        .collect();
    let kinds = [
        // Number of bytes that the requests are charged with.
        ("slow bodies", [400 * 2 * REQUEST_OVERHEAD_BYTES, 0], &h1, &b"x"[..]),
        ("slow bodies over HTTP/2", [BYTES, BYTES], &h2, &bytes),
    ];
    for (what, held, head, bytes) in kinds {
        let mut process = ActivatorProcessFixture::start();
        let all = open_clients(&process, 400, async |stream| {
            stream.write_all(head).await.ok();
            for _ in 0..20 {
                stream.write_all(bytes).await.ok();
                // Only pauses between the bytes make the client slow.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        process.wait_idle().await;
        assert_within(&process, held, 0, what);
        process.set_pod("http1", start_pod_with(respond_hello).await);
        process.assert_serves_others().await;
        drop(all);
    }
}

/// Request that asks for an upgrade.
const SWITCH: &str =
    "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
const SWITCHED: &str =
    "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";

/// Sends as much as it can if it `floods`, and never reads.
async fn never_read(mut stream: TcpStream, floods: bool) {
    let piece = vec![b'x'; 64 << 10];
    while floods && stream.write_all(&piece).await.is_ok() {}
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgraded_connections_take_no_more_memory_than_is_stated() {
    let kinds = [("silent", MANY / 2, false), ("not read, by either end", 100, true)];
    for (what, count, floods) in kinds {
        let mut process = ActivatorProcessFixture::for_connections(count + 20);
        let switches = move |mut stream: TcpStream, _| async move {
            read_head(&mut stream).await;
            stream.write_all(SWITCHED.as_bytes()).await.ok();
            never_read(stream, floods).await;
        };
        process.set_pod("http1", start_pod_with(switches).await);
        let all = open_clients(&process, count, async |stream| {
            stream.write_all(SWITCH.as_bytes()).await.unwrap();
            let head = read_head(stream).await;
            assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        })
        .await;
        let mut stuck_clients = tokio::task::JoinSet::new();
        all.into_iter().for_each(|it| drop(stuck_clients.spawn(never_read(it, floods))));
        process.wait_idle().await;
        assert_within(&process, [0, 0], count, what);
        process.set_pod("http1", start_pod_with(respond_hello).await);
        stuck_clients.shutdown().await;
        process.assert_serves_others().await;
    }
}

/// Opens `count` clients of TLS that offer `alpn`, each of which has done what `each` does. Their connections stay open.
async fn open_tls_clients(
    process: &ActivatorProcessFixture,
    count: usize,
    alpn: &[&str],
    each: impl AsyncFn(&mut TlsClient),
) -> Vec<TlsClient> {
    let config = Arc::new(client_config(alpn));
    let begun = futures::stream::iter(0..count).map(|_| async {
        let stream = connect_from(ATTACKER, process.tls_port).await;
        let mut client = handshake(stream, Arc::clone(&config), HOST).await.unwrap();
        each(&mut client).await;
        client
    });
    begun.buffer_unordered(16).collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_tls_connections_stay_within_their_bytes() {
    let kept = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\n\r\n").into_bytes();
    // A kind has the protocol, and what each client sends with the number of responses to wait for.
    type Kind = (&'static str, &'static str, Vec<u8>, usize);
    let kinds: [Kind; 3] = [
        ("clients of TLS that say nothing", "http/1.1", vec![], 0),
        ("kept connections of TLS", "http/1.1", kept, 1),
        ("HTTP/2 over TLS without a request", "h2", client_preface(), 0),
    ];
    for (what, alpn, messages, responses) in kinds {
        let mut process = ActivatorProcessFixture::for_tls_connections(MANY + 20);
        process.set_pod("http1", start_pod_with(respond_hello).await);
        let all = open_tls_clients(&process, MANY, &[alpn], async |client| {
            exchange_bytes(client, &messages, responses, RESPONSE_ENDS).await;
        })
        .await;
        process.wait_idle().await;
        let open: Vec<_> = all.into_iter().map(|client| client.into_inner().0).collect();
        println!("{what}: {} of {MANY} are still there", count_open(&open));
        assert_within(&process, [0, 0], 0, what);
        process.assert_serves_others().await;
    }
}

/// Encodes the ClientHello of a client that never sends anything behind it.
fn encode_client_hello(config: ClientConfig) -> Vec<u8> {
    let mut session = ClientConnection::new(Arc::new(config), HOST.try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    session.write_tls(&mut hello).unwrap();
    hello
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_stop_halfway_stay_within_their_bytes() {
    let hello = encode_client_hello(client_config(&["h2"]));
    // A ClientHello that is said to have 12 KiB, and lacks the last one.
    let mut large = vec![0x16, 3, 1, 0x30, 0, 1, 0, 0x2f, 0xfc];
    large.resize(11 << 10, 0);
    let kinds = [
        ("handshakes without a byte", vec![]),
        ("a part of a ClientHello", hello[..hello.len() / 2].to_vec()),
        ("a part of a large ClientHello", large),
        ("a ClientHello alone", hello),
    ];
    for (what, messages) in kinds {
        let mut process = ActivatorProcessFixture::for_tls_connections(MANY + 20);
        process.set_pod("http1", start_pod_with(respond_hello).await);
        let begun = futures::stream::iter(0..MANY).map(|_| async {
            let mut stream = connect_from(ATTACKER, process.tls_port).await;
            stream.write_all(&messages).await.unwrap();
            stream
        });
        let all: Vec<TcpStream> = begun.buffer_unordered(16).collect().await;
        process.wait_idle().await;
        println!("{what}: {} of {MANY} are still there", count_open(&all));
        assert_within(&process, [0, 0], 0, what);
        process.assert_serves_others().await;
    }
}
