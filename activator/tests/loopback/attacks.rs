//! Clients that use as much as they can: memory stays within the bounds, and other clients are served.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use activator::budget::{CLIENT_CONNECTION_WINDOW, CLIENT_SEND_BUFFER, MAX_CLIENT_STREAMS};
use bytes::Bytes;
use common::wire::{AppProtocol, NamespacedName, RevisionEntry, RouteTarget, RoutingPhase};
use futures::future::{join_all, poll_fn};
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};

use crate::{
    h2c::{
        self, FakeHttp2Pod, Http2TestClient, client_preface, encode_greedy_gets,
        encode_indexed_requests, start_endless_pod,
    },
    harness::{
        self, ActivatorFixture, GET, LONG, OK, read_head, read_rest, revision, start_pod,
        start_pod_with, start_silent_pod, wait_until,
    },
};

const MIB: usize = 1 << 20;
/// Addresses of a test's clients, by which the activator distinguishes them.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

async fn connect_from(fixture: &ActivatorFixture, source: Ipv4Addr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((source, 0).into()).unwrap();
    socket.connect((Ipv4Addr::LOCALHOST, fixture.port).into()).await.unwrap()
}

fn refusal_metric(fixture: &ActivatorFixture, bound: &str) -> f64 {
    fixture.metric(&format!("rouse_activator_refused_total{{bound=\"{bound}\"}}"))
}

/// One connection of a client that sends bodies which no pod takes.
#[derive(Clone, Default)]
struct BodyFlood {
    /// Bytes sent of requests without a response.
    unread_bytes: Arc<AtomicUsize>,
    /// Requests that got a response or were reset.
    ended: Arc<AtomicUsize>,
}

/// Requests at once on each [`BodyFlood`].
const STREAMS: usize = 16;

impl BodyFlood {
    /// Starts to send as much as flow control allows.
    async fn start(stream: TcpStream) -> Self {
        let flood = Self::default();
        let (send, driver) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(driver);
        for _ in 0..STREAMS {
            tokio::spawn(flood.clone().post(send.clone()));
        }
        flood
    }

    async fn post(self, send: h2::client::SendRequest<Bytes>) {
        let mine = AtomicUsize::new(0);
        let post = async {
            let request = Request::post("http://hello.default.example.com/").body(()).unwrap();
            let (response, mut body) =
                send.ready().await.ok()?.send_request(request, false).ok()?;
            let flow = async {
                #[allow(unreachable_code, reason = "says what the loop ends with")]
                loop {
                    body.reserve_capacity(16 << 10);
                    let count = poll_fn(|cx| body.poll_capacity(cx)).await?.ok()?;
                    body.send_data(vec![b'x'; count].into(), false).ok()?;
                    mine.fetch_add(count, SeqCst);
                    self.unread_bytes.fetch_add(count, SeqCst);
                }
            };
            tokio::select! {
                _ = response => Some(()),
                stopped = flow => stopped,
            }
        };
        post.await;
        self.unread_bytes.fetch_sub(mine.load(SeqCst), SeqCst);
        self.ended.fetch_add(1, SeqCst);
    }

    /// Returns true if the connection can send nothing more.
    fn has_settled(&self) -> bool {
        let window = usize::try_from(CLIENT_CONNECTION_WINDOW).unwrap();
        self.ended.load(SeqCst) == STREAMS || self.unread_bytes.load(SeqCst) + (64 << 10) >= window
    }
}

/// Number of bytes that an activator holds of fifty connections whose bodies no pod takes.
async fn held_bytes_of_flood(fixture: &ActivatorFixture) -> usize {
    let floods = join_all(
        (0..50).map(async |_| BodyFlood::start(connect_from(fixture, ATTACKER).await).await),
    );
    let floods = floods.await;
    let held = || floods.iter().map(|it| it.unread_bytes.load(SeqCst)).sum::<usize>();
    // The clients' own count agrees with the activator's, except for heads.
    let counted = || fixture.activator.server.connections().request_bytes();
    let counts_agree = || counted().abs_diff(held()) < MIB + MIB / 2 + held() / 20;
    wait_until(|| floods.iter().all(BodyFlood::has_settled) && counts_agree()).await;
    held()
}

#[tokio::test]
async fn bodies_that_wait_hold_no_more_than_the_bound() {
    for (bytes, of_client, name) in
        [(8 * MIB, 100 * MIB, "bytes"), (100 * MIB, 8 * MIB, "client_bytes")]
    {
        let mut fixture = ActivatorFixture::with(|config| {
            (config.max_bytes, config.max_client_bytes) = (bytes, Some(of_client));
        })
        .await;
        let mut waits = connect_from(&fixture, OTHER).await;
        let post = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\
                    connection: close\r\n\r\nhello";
        waits.write_all(post.as_bytes()).await.unwrap();
        fixture.wait_for_queued(1).await;
        let held = held_bytes_of_flood(&fixture).await;
        assert!(held <= 9 * MIB, "{held} bytes are held");
        assert!(refusal_metric(&fixture, name) > 0.0, "{name}");
        // A well-behaved request that waited before still waits.
        fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
        assert!(read_rest(&mut waits).await.starts_with("HTTP/1.1 200 "));
    }
    let fixture = ActivatorFixture::with(|config| config.max_bytes = 1 << 40).await;
    let held = held_bytes_of_flood(&fixture).await;
    assert!(held > 40 * MIB, "without a bound the same clients take {held} bytes");
}

#[tokio::test]
async fn a_flooding_client_gets_503_and_later_clients_are_served() {
    let mut fixture = ActivatorFixture::with(|config| config.max_bytes = MIB).await;
    let floods = join_all(
        (0..4).map(async |_| BodyFlood::start(connect_from(&fixture, ATTACKER).await).await),
    );
    let floods = floods.await;
    wait_until(|| floods.iter().any(|it| it.ended.load(SeqCst) == STREAMS)).await;
    let mut h1 = connect_from(&fixture, OTHER).await;
    h1.write_all(GET.as_bytes()).await.unwrap();
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    assert!(read_rest(&mut h1).await.starts_with("HTTP/1.1 200 "));
    let text = "too many bytes of requests are held";
    // A head without a body counts as well.
    let fixture = ActivatorFixture::with(|config| {
        (config.max_bytes, config.max_client_bytes) = (MIB, Some(30_000));
    })
    .await;
    let long = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(40_000));
    let response = fixture.exchange(&long).await;
    assert!(response.starts_with("HTTP/1.1 503 ") && response.ends_with(text), "{response}");
    assert!(
        response.contains("connection: close") && response.contains("retry-after"),
        "{response}"
    );
}

#[tokio::test]
async fn heads_that_do_not_end_count_as_well() {
    let mut fixture =
        ActivatorFixture::with(|config| config.max_client_bytes = Some(MIB / 4)).await;
    let mut slow = Vec::new();
    for _ in 0..40 {
        let mut stream = connect_from(&fixture, ATTACKER).await;
        let part = format!("GET / HTTP/1.1\r\nx: {}\r\n", "x".repeat(45_000));
        stream.write_all(part.as_bytes()).await.ok();
        slow.push(stream);
    }
    wait_until(|| refusal_metric(&fixture, "client_bytes") > 0.0).await;
    let connections = fixture.activator.server.connections();
    wait_until(|| connections.request_bytes() <= connections.budget.client_request_bytes).await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    assert_eq!(status_for_others(&fixture).await, 200);
}

#[tokio::test]
async fn a_request_is_refused_while_its_pod_is_dialled() {
    let mut fixture = ActivatorFixture::with(|config| config.max_client_bytes = Some(50_000)).await;
    let (_silent, address, _plugs) = start_silent_pod().await;
    fixture.add_ready_pod("silent", address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut call = client.start_call(h2c::get("/").method("POST")).await;
    call.send_piece("hello").await;
    wait_until(|| fixture.metric("rouse_activator_dials_total") > 0.0).await;
    call.send_piece(&"x".repeat(100_000)).await;
    assert_eq!(call.status_code().await, 503);
    let ended = ["rouse_activator_dial_failures_total", "rouse_activator_retries_total"];
    assert_eq!(ended.map(|name| fixture.metric(name)), [0.0; 2], "the dial goes on");
}

#[tokio::test]
async fn what_pods_have_taken_is_held_no_more() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::H2c
    });
    let client = Http2TestClient::connect(fixture.port).await;
    // The body goes on, so that the connection is never idle.
    let mut goes_on = client.start_call(h2c::get("/").method("POST")).await;
    goes_on.send_piece("hello").await;
    let piece = "x".repeat(100_000);
    for _ in 0..20 {
        let response =
            client.send_request(h2c::get("/").method("POST"), &[&piece, &piece]).await.unwrap();
        assert_eq!(response.body.len(), 200_000);
    }
    // Some responses are given up half-way.
    for _ in 0..5 {
        let mut call = client.start_call(h2c::get("/").method("POST")).await;
        call.send_piece(&piece).await;
        call.response_head().await;
    }
    wait_until(|| fixture.activator.server.connections().request_bytes() == 0).await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 100000\r\n\r\n";
    let response = fixture.exchange(&format!("{head}{piece}")).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let chunked = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
                   transfer-encoding: chunked\r\n\r\n186a0\r\n";
    let response = fixture.exchange(&format!("{chunked}{piece}\r\n0\r\n\r\n")).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    wait_until(|| fixture.activator.server.connections().request_bytes() == 0).await;
}

#[tokio::test]
async fn what_its_client_gives_up_is_held_no_more() {
    let fixture = ActivatorFixture::new().await;
    let client = Http2TestClient::connect(fixture.port).await;
    let mut waits = client.start_call(h2c::get("/").method("POST")).await;
    waits.send_piece("hello").await;
    let connections = fixture.activator.server.connections();
    for _ in 0..5 {
        let mut given_up = client.start_call(h2c::get("/").method("POST")).await;
        given_up.send_piece(&"x".repeat(100_000)).await;
        wait_until(|| connections.request_bytes() > 100_000).await;
        drop(given_up);
        // A head counts some thousand bytes.
        wait_until(|| connections.request_bytes() < 5_000).await;
    }
    fixture.wait_for_queued(1).await;
}

#[tokio::test]
async fn responses_that_a_client_does_not_read_hold_no_more_than_their_bound() {
    let mut fixture = ActivatorFixture::new().await;
    let (pod, taken) = start_endless_pod().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::H2c
    });
    fixture.add_ready_pod("p", pod);
    let mut client = connect_from(&fixture, ATTACKER).await;
    client.write_all(&encode_greedy_gets(MAX_CLIENT_STREAMS)).await.unwrap();
    let mut before = 0;
    wait_until(|| taken.load(SeqCst) > 0).await;
    // The count stops once all buffers on the way are full.
    while before != taken.load(SeqCst) {
        before = taken.load(SeqCst);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    // Bytes that wait for the client, one piece, and the pod's own window; and those in sockets.
    let streams = usize::try_from(MAX_CLIENT_STREAMS).unwrap();
    let bound = streams * (CLIENT_SEND_BUFFER + (16 << 10) + (64 << 10)) + 8 * MIB;
    assert!(before <= bound, "{before} bytes were taken, the bound is {bound}");
    assert_eq!(status_for_others(&fixture).await, 200, "others are served");
}

#[tokio::test]
async fn of_responses_that_are_not_read_the_largest_are_cut_off() {
    let mut fixture = ActivatorFixture::with(|config| config.max_response_bytes = 4 * MIB).await;
    let (pod, _) = start_endless_pod().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::H2c
    });
    fixture.add_ready_pod("p", pod);
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = connect_from(&fixture, ATTACKER).await;
        client.write_all(&encode_greedy_gets(MAX_CLIENT_STREAMS)).await.unwrap();
        clients.push(client);
    }
    wait_until(|| refusal_metric(&fixture, "answer_bytes") > 0.0).await;
    let connections = fixture.activator.server.connections();
    wait_until(|| connections.response_bytes() <= 4 * MIB).await;
    assert_eq!(status_for_others(&fixture).await, 200, "others are served");
    drop(clients);
    wait_until(|| connections.response_bytes() == 0).await;
}

/// Status code that another client gets.
async fn status_for_others(fixture: &ActivatorFixture) -> u16 {
    let mut other = connect_from(fixture, OTHER).await;
    other.write_all(GET.as_bytes()).await.unwrap();
    let head = read_head(&mut other).await;
    head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn idle_connections_make_room_for_active_ones() {
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_connections, config.max_client_connections) = (Some(20), Some(20));
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let mut idle = Vec::new();
    for _ in 0..60 {
        idle.push(connect_from(&fixture, ATTACKER).await);
        if idle.len() % 10 == 0 {
            assert_eq!(status_for_others(&fixture).await, 200);
        }
    }
    // Of the 60 connections 20 may stay. Of the other 40, up to 20 may be closed later.
    assert!(refusal_metric(&fixture, "connections") >= 40.0 - 20.0);
    // The oldest connections are closed first.
    let closed = tokio::time::timeout(LONG, idle[0].read_u8()).await.unwrap();
    assert!(closed.is_err());
    wait_until(|| fixture.metric("rouse_activator_client_connections") <= 20.0).await;
}

#[tokio::test]
async fn busy_connections_make_room_for_none() {
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_connections, config.max_client_connections) = (Some(3), Some(100));
    })
    .await;
    let mut busy = Vec::new();
    for count in 1..=3 {
        let mut stream = connect_from(&fixture, OTHER).await;
        stream.write_all(GET.as_bytes()).await.unwrap();
        fixture.wait_for_queued(count).await;
        busy.push(stream);
    }
    let mut late = connect_from(&fixture, ATTACKER).await;
    assert_eq!(read_rest(&mut late).await, "", "closed at once");
    assert_eq!(refusal_metric(&fixture, "connections"), 1.0);
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    for mut stream in busy {
        assert!(read_rest(&mut stream).await.starts_with("HTTP/1.1 200 "));
    }
}

#[tokio::test]
async fn one_client_takes_no_more_than_its_share_of_connections() {
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_connections, config.max_client_connections) = (Some(100), Some(4));
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let mut kept = Vec::new();
    for _ in 0..4 {
        kept.push(connect_from(&fixture, ATTACKER).await);
    }
    let mut fifth = connect_from(&fixture, ATTACKER).await;
    assert_eq!(read_rest(&mut fifth).await, "");
    assert_eq!(refusal_metric(&fixture, "client_connections"), 1.0);
    assert_eq!(status_for_others(&fixture).await, 200);
    // A connection that ends allows a new one.
    drop(kept.pop());
    wait_until(|| fixture.metric("rouse_activator_client_connections") <= 3.0).await;
    let mut next = connect_from(&fixture, ATTACKER).await;
    next.write_all(GET.as_bytes()).await.unwrap();
    assert!(read_rest(&mut next).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_trusted_proxy_may_use_all_connections() {
    let mut fixture = ActivatorFixture::with(|config| {
        config.max_client_connections = Some(1);
        config.trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()];
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let _first = TcpStream::connect(fixture.outside).await.unwrap();
    let ask = GET.replace("host: a", "host: hello.default.example.com");
    assert!(fixture.exchange_at(fixture.outside, &ask).await.starts_with("HTTP/1.1 200 "));
}

/// Test in a process of its own, because the file table is shared by a whole process.
#[tokio::test]
#[ignore = "run by the test below"]
async fn with_a_small_file_table() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_connections, config.max_client_connections) = (Some(1000), Some(1000));
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    assert_eq!(status_for_others(&fixture).await, 200);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // Both ends of each connection are in this process: the client's and the activator's.
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(connect_from(&fixture, ATTACKER).await);
    }
    wait_until(|| fixture.metric("rouse_activator_client_connections") >= 50.0).await;
    let next = std::fs::File::open("/dev/null").unwrap();
    let full = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&next)).unwrap() + 1;
    setrlimit(Resource::RLIMIT_NOFILE, full, most).unwrap();
    // One descriptor is left: for the client's end, and none for the activator's.
    drop(next);
    let mut other = connect_from(&fixture, OTHER).await;
    other.write_all(GET.as_bytes()).await.unwrap();
    assert!(read_rest(&mut other).await.starts_with("HTTP/1.1 200 "));
    assert!(refusal_metric(&fixture, "connections") > 0.0);
}

#[test]
fn a_full_file_table_stops_no_active_client() {
    let test = std::env::current_exe().unwrap();
    let arguments = ["--exact", "attacks::with_a_small_file_table", "--ignored", "--nocapture"];
    let ended = std::process::Command::new(test).args(arguments).output().unwrap();
    let stdout = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && stdout.contains("1 passed"), "{stdout}");
}

#[tokio::test]
async fn an_http2_connection_without_requests_ends() {
    let mut fixture = ActivatorFixture::with(|config| config.head_timeout_ms = 200).await;
    let busy = Http2TestClient::connect(fixture.port).await;
    let mut call = busy.start_call(h2c::get("/")).await;
    fixture.wait_for_queued(1).await;
    let idle = Http2TestClient::connect(fixture.port).await;
    wait_until(|| idle.is_closed()).await;
    assert_eq!(refusal_metric(&fixture, "idle"), 1.0);
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    call.end_body();
    call.response_head().await;
}

/// Request whose body the client begins and never ends.
const SLOW: &str = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nx";

#[tokio::test]
async fn a_client_that_sends_no_more_of_its_body_gives_its_slot_to_the_next() {
    for protocol in [AppProtocol::Http1, AppProtocol::H2c] {
        let mut fixture = ActivatorFixture::with(|config| config.body_idle_ms = 200).await;
        fixture.apply_change(|table| {
            let entry = table.revisions.get_mut(&revision()).unwrap();
            (entry.container_concurrency, entry.protocol) = (1, protocol);
        });
        let (h1, h2) = (start_reading_pod().await, FakeHttp2Pod::start(respond_after_body).await);
        fixture.add_ready_pod("p", if protocol == AppProtocol::H2c { h2.address } else { h1 });
        let mut slow = connect_from(&fixture, ATTACKER).await;
        slow.write_all(SLOW.as_bytes()).await.unwrap();
        let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
        wait_until(|| served.queue_metrics().at_pods == 1).await;
        let mut next = connect_from(&fixture, OTHER).await;
        let whole =
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
        next.write_all(whole.as_bytes()).await.unwrap();
        assert!(read_rest(&mut next).await.starts_with("HTTP/1.1 200 "));
        let response = read_rest(&mut slow).await;
        assert!(response.starts_with("HTTP/1.1 408 "), "{response}");
        assert!(
            response.contains("connection: close") && response.ends_with("request body timeout")
        );
        assert_eq!(refusal_metric(&fixture, "body_idle"), 1.0);
    }
}

/// Responds to a request once its whole body was read.
fn respond_after_body(
    body: hyper::body::Incoming,
) -> std::pin::Pin<Box<dyn Future<Output = http::Response<h2c::Http2TestBody>> + Send>> {
    use http_body_util::BodyExt as _;
    Box::pin(async {
        if body.collect().await.is_err() {
            std::future::pending::<()>().await;
        }
        http::Response::new(http_body_util::Empty::new().boxed_unsync())
    })
}

/// Starts a pod that responds once it has read as many bytes as a head stated, one connection at a time.
async fn start_reading_pod() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move { read_and_respond(&mut stream).await });
        }
    });
    address
}

async fn read_and_respond(stream: &mut TcpStream) {
    let head = read_head(stream).await;
    let length = head.split("content-length: ").nth(1).and_then(|it| it.split('\r').next());
    let mut body = vec![0; length.map_or(0, |it| it.parse().unwrap())];
    if stream.read_exact(&mut body).await.is_ok() {
        stream.write_all(OK.as_bytes()).await.ok();
    }
}

#[tokio::test]
async fn neither_a_slow_pod_nor_a_stream_is_a_slow_client() {
    let mut fixture = ActivatorFixture::with(|config| config.body_idle_ms = 200).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.add_ready_pod("p", listener.local_addr().unwrap());
    // The pod does not read, so the client has to wait with the rest.
    let mut blocked = connect_from(&fixture, OTHER).await;
    let head = format!(
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        32 * MIB
    );
    blocked.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, writing) = blocked.into_split();
    let sends = tokio::spawn(async move {
        let mut writing = writing;
        writing.write_all(&vec![b'x'; 32 * MIB]).await.unwrap();
        writing
    });
    let (mut busy_pod, _) = listener.accept().await.unwrap();
    // The call is gRPC, whose client may be silent.
    let client = Http2TestClient::connect(fixture.port).await;
    let grpc = h2c::get("/").method("POST").header("content-type", "application/grpc+proto");
    let mut call = client.start_call(grpc).await;
    call.send_piece("hello").await;
    let (mut grpc_pod, _) = listener.accept().await.unwrap();
    read_head(&mut grpc_pod).await;
    // Both take longer than two later ones, which come one after the other and are slow.
    for _ in 0..2 {
        let mut slow = connect_from(&fixture, ATTACKER).await;
        slow.write_all(SLOW.as_bytes()).await.unwrap();
        let (_slow_pod, _) = listener.accept().await.unwrap();
        assert!(read_rest(&mut slow).await.starts_with("HTTP/1.1 408 "));
    }
    grpc_pod.write_all(OK.as_bytes()).await.unwrap();
    assert_eq!(call.status_code().await, 200);
    read_and_respond(&mut busy_pod).await;
    let mut response = String::new();
    reading.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    drop(sends.await);
    assert_eq!(refusal_metric(&fixture, "body_idle"), 2.0);
}

#[tokio::test]
async fn the_connection_with_most_buffers_closes_after_its_response() {
    let mut fixture = ActivatorFixture::with(|config| config.max_bytes = MIB).await;
    let (respond, received) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (may_respond, asked) = (Arc::clone(&respond), Arc::clone(&received));
    let pod = start_pod_with(move |mut stream, number| {
        let (may_respond, asked) = (Arc::clone(&may_respond), Arc::clone(&asked));
        async move {
            while !read_head(&mut stream).await.is_empty() {
                asked.fetch_add(1, SeqCst);
                if number == 0 {
                    may_respond.notified().await;
                }
                stream.write_all(OK.as_bytes()).await.ok();
            }
        }
    });
    fixture.add_ready_pod("p", pod.await);
    let long = |length| format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(length));
    let mut busy = connect_from(&fixture, ATTACKER).await;
    busy.write_all(long(60_000).as_bytes()).await.unwrap();
    wait_until(|| received.load(SeqCst) == 1).await;
    let connections = fixture.activator.server.connections();
    let mut idle = Vec::new();
    while refusal_metric(&fixture, "bytes") == 0.0 {
        assert!(connections.buffer_bytes() < MIB, "{}", connections.buffer_bytes());
        let mut next = connect_from(&fixture, OTHER).await;
        next.write_all(long(20_000).as_bytes()).await.unwrap();
        let head = read_head(&mut next).await;
        assert!(head.starts_with("HTTP/1.1 200 ") || head.starts_with("HTTP/1.1 503 "), "{head}");
        idle.push(next);
    }
    wait_until(|| connections.buffer_bytes() <= MIB).await;
    // The connection that kept most ends, but not before it has its response.
    assert!(connections.refused_buffer_bytes() > 0);
    respond.notify_one();
    let response = read_rest(&mut busy).await;
    assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("hello"), "{response}");
    wait_until(|| connections.refused_buffer_bytes() == 0).await;
    drop(idle);
    wait_until(|| connections.buffer_bytes() == 0).await;
}

#[tokio::test]
async fn a_client_that_keeps_buffers_and_stays_is_cut_off_and_others_are_served() {
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_bytes, config.max_client_bytes) = (2 * MIB, Some(100 * MIB));
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let host = other_service(&mut fixture).await;
    let responded = Arc::new(AtomicUsize::new(0));
    let asking = tokio::spawn(request_repeatedly(fixture.outside, host, Arc::clone(&responded)));
    let words = [client_preface(), encode_indexed_requests(0..10)].concat();
    let mut attackers = Vec::new();
    for _ in 0..40 {
        let mut attacker = connect_from(&fixture, ATTACKER).await;
        // The client acknowledges no PING, so that the last GOAWAY with the final stream never comes (RFC 9113 §6.8).
        attacker.write_all(&words).await.ok();
        attackers.push(attacker);
        let before = responded.load(SeqCst);
        wait_until(|| responded.load(SeqCst) > before || asking.is_finished()).await;
    }
    let connections = fixture.activator.server.connections();
    wait_until(|| refusal_metric(&fixture, "bytes") > 0.0).await;
    wait_until(|| {
        connections.buffer_bytes() <= 2 * MIB && connections.refused_buffer_bytes() <= 2 * MIB / 8
    })
    .await;
    assert!(!asking.is_finished(), "each of its requests gets a response");
    drop(attackers);
    wait_until(|| connections.buffer_bytes() == 0 && connections.refused_buffer_bytes() == 0).await;
}

/// Host of another service, whose pod responds.
async fn other_service(fixture: &mut ActivatorFixture) -> &'static str {
    const HOST: &str = "other.default.example.com";
    let name = NamespacedName::new("default", "other-1");
    let mut pod =
        harness::pod("q", start_pod(OK, Duration::ZERO).await.address, RoutingPhase::Ready);
    pod.revision = name.clone();
    fixture.apply_change(|table| {
        let mut service = harness::hello_service(harness::unused_port());
        service.name = NamespacedName::new("default", "other");
        service.hosts = vec![HOST.to_owned()];
        service.targets = vec![RouteTarget { revision: name.clone(), percent: 100 }];
        table.services.insert(service.name.clone(), service);
        table.revisions.insert(name.clone(), RevisionEntry { name, ..harness::hello_revision() });
        table.pods.insert("q".to_owned(), pod);
    });
    HOST
}

/// Sends one request after the other over one connection, and expects a response to each.
async fn request_repeatedly(address: SocketAddr, host: &'static str, responded: Arc<AtomicUsize>) {
    let client = Http2TestClient::connect_to(address).await;
    loop {
        let request = Request::get(format!("http://{host}/"));
        let response = client.send_request(request, &[]).await.expect("the connection stands");
        assert_eq!((response.head.status().as_u16(), response.body.as_str()), (200, "hello"));
        responded.fetch_add(1, SeqCst);
    }
}

#[tokio::test]
async fn a_client_that_resets_most_of_its_requests_is_disconnected_and_others_are_served() {
    let mut fixture = ActivatorFixture::with(|config| config.max_resets = 20).await;
    let host = other_service(&mut fixture).await;
    let responded = Arc::new(AtomicUsize::new(0));
    let asking = tokio::spawn(request_repeatedly(fixture.outside, host, Arc::clone(&responded)));
    let stream = connect_from(&fixture, ATTACKER).await;
    let (send, driver) = h2::client::handshake(stream).await.unwrap();
    let ended = tokio::spawn(driver);
    let mut sent = 0;
    let next_response = async || {
        let before = responded.load(SeqCst);
        wait_until(|| responded.load(SeqCst) > before || asking.is_finished()).await;
    };
    // The last request but one may still find the connection open.
    while let Ok(mut ready) = send.clone().ready().await {
        let request = Request::get("http://hello.default.example.com/").body(()).unwrap();
        let Ok((response, mut body)) = ready.send_request(request, false) else { break };
        sent += 1;
        let revision = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
        wait_until(|| revision.waiting_count() == 1 || ended.is_finished()).await;
        body.send_reset(h2::Reason::CANCEL);
        drop(response);
        wait_until(|| revision.waiting_count() == 0).await;
        next_response().await;
    }
    assert_eq!(sent, 20, "the connection ends at the bound");
    drop(send);
    let error = ended.await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM), "{error}");
    assert_eq!(refusal_metric(&fixture, "resets"), 1.0);
    next_response().await;
    assert!(!asking.is_finished(), "each of its requests gets a response");
}
