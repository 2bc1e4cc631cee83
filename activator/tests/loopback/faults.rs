//! Clients and pods that break off at any point leave no state behind.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use common::wire::AppProtocol;
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    h2c::{self, FakeHttp2Pod, Http2TestClient},
    harness::{self, ActivatorFixture, GET, LONG, OK, read_head, revision, wait_until},
};

/// Pseudo-random sequence that is the same each time (xorshift64, Marsaglia 2003).
pub(crate) struct FaultRng(pub(crate) u64);

impl FaultRng {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(bound).unwrap()).unwrap()
    }
}

/// Starts a pod that responds completely, or breaks off at some point with a reset or an end.
async fn start_faulty_pod(seed: u64, http2: bool) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let whole = FakeHttp2Pod::start(h2c::echo).await;
    tokio::spawn(async move {
        let mut rng = FaultRng(seed);
        while let Ok((stream, _)) = listener.accept().await {
            let (kind, at, reset) = (rng.below(3), rng.below(OK.len()), rng.below(2) == 0);
            if http2 {
                tokio::spawn(break_http2(stream, whole.address, kind, at * 20, reset));
            } else {
                tokio::spawn(break_http1(stream, kind, at, reset));
            }
        }
    });
    address
}

/// Serves one connection: `kind` 0 closes it at once, 1 breaks off after `at` bytes of a response, and 2 responds
/// completely.
async fn break_http1(mut stream: TcpStream, kind: usize, at: usize, reset: bool) {
    if reset {
        stream.set_zero_linger().unwrap();
    }
    match kind {
        0 => return,
        1 => {
            read_head(&mut stream).await;
            stream.write_all(&OK.as_bytes()[..at]).await.ok();
            return;
        }
        _ => {}
    }
    while read_head(&mut stream).await.ends_with("\r\n\r\n") {
        stream.write_all(OK.as_bytes()).await.ok();
    }
}

/// Serves one connection by a good pod: `kind` 0 closes it at once, 1 breaks off after `at` bytes of the good pod's
/// responses, and 2 copies all of them.
async fn break_http2(
    mut stream: TcpStream,
    whole: std::net::SocketAddr,
    kind: usize,
    at: usize,
    reset: bool,
) {
    if reset {
        stream.set_zero_linger().unwrap();
    }
    if kind == 0 {
        return;
    }
    let mut pod = TcpStream::connect(whole).await.unwrap();
    let (mut from, mut to) = stream.split();
    let (mut responses, mut asks) = pod.split();
    let up = tokio::io::copy(&mut from, &mut asks);
    let down = async {
        if kind == 1 {
            tokio::io::copy(&mut (&mut responses).take(at as u64), &mut to).await
        } else {
            tokio::io::copy(&mut responses, &mut to).await
        }
    };
    tokio::select! {
        _ = up => {}
        _ = down => {}
    }
}

/// Client that breaks off after `at` bytes of its request, or after `response` bytes of its response.
async fn abort_request(
    mut stream: TcpStream,
    request: &[u8],
    at: usize,
    reset: bool,
    response: usize,
) {
    if reset {
        stream.set_zero_linger().unwrap();
    }
    stream.write_all(&request[..at.min(request.len())]).await.ok();
    let mut some = vec![0; response];
    let read = tokio::time::timeout(Duration::from_millis(5), stream.read_exact(&mut some));
    read.await.ok();
}

pub(crate) async fn assert_no_state_left(fixture: &ActivatorFixture) {
    let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    wait_until(|| (served.queue_metrics().at_pods, served.waiting_count()) == (0, 0)).await;
    wait_until(|| fixture.waiting_totals().0 == fixture.waiting_totals().1).await;
    assert_eq!(fixture.metric("rouse_activator_waiting_requests"), 0.0);
}

async fn run_faults(protocol: AppProtocol) {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        (entry.container_concurrency, entry.protocol) = (2, protocol);
    });
    let mut rng = FaultRng(0x5eed);
    let mut tasks = Vec::new();
    for round in 0..300 {
        match round % 50 {
            0 => {
                let pod = start_faulty_pod(round + 1, protocol == AppProtocol::H2c).await;
                fixture.add_ready_pod("p", pod);
            }
            40 => fixture.apply_change(|table| table.pods.clear()),
            _ => {}
        }
        let stream = fixture.connect().await;
        let (at, reset, response) = (rng.below(2 * GET.len()), rng.below(2) == 0, rng.below(60));
        if rng.below(2) == 0 {
            tasks.push(tokio::spawn(async move {
                abort_request(stream, GET.as_bytes(), at, reset, response).await
            }));
            continue;
        }
        let client = Http2TestClient::connect(fixture.port).await;
        tasks.push(tokio::spawn(async move {
            let mut call = client.start_call(Request::post("http://a/")).await;
            if response % 3 > 0 {
                call.send_piece("something").await;
            }
            if response % 3 > 1 {
                let head = tokio::time::timeout(Duration::from_millis(5), call.try_head());
                head.await.ok();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_no_state_left(&fixture).await;
    let good = FakeHttp2Pod::start(h2c::echo).await;
    fixture.apply_change(|table| table.pods.clear());
    if protocol == AppProtocol::H2c {
        fixture.add_ready_pod("good", good.address);
    } else {
        fixture.add_ready_pod("good", harness::start_pod(OK, Duration::ZERO).await.address);
    }
    for _ in 0..10 {
        assert!(fixture.exchange(GET).await.starts_with("HTTP/1.1 200 "));
    }
    assert_no_state_left(&fixture).await;
    assert!(fixture.waiting_totals().0 > 0, "some waited");
}

#[tokio::test]
async fn http1_pods_and_clients_that_break_off_leave_nothing() {
    run_faults(AppProtocol::Http1).await;
}

#[tokio::test]
async fn http2_pods_and_clients_that_break_off_leave_nothing() {
    run_faults(AppProtocol::H2c).await;
}

/// Time until the kernel's next keep-alive probe of a connection, in hundredths of a second; `None`: there is none
/// (`Documentation/networking/proc_net_tcp.rst`). `is_row` gets the own port and the peer's.
fn keepalive_timer(is_row: impl Fn(u16, u16) -> bool) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    table.lines().skip(1).find_map(|line| {
        let row: Vec<&str> = line.split_ascii_whitespace().collect();
        let port = |end: &str| u16::from_str_radix(end.rsplit(':').next().unwrap(), 16).unwrap();
        let (timer, after) = row[5].split_once(':').unwrap();
        let after = u64::from_str_radix(after, 16).unwrap();
        // 2: the keep-alive timer.
        (is_row(port(row[1]), port(row[2])) && timer == "02").then_some(after)
    })
}

#[tokio::test]
async fn silent_clients_and_pods_get_keepalive_probes() {
    for protocol in [AppProtocol::Http1, AppProtocol::H2c] {
        let mut fixture = ActivatorFixture::new().await;
        fixture.apply_change(|table| {
            table.revisions.get_mut(&revision()).unwrap().protocol = protocol
        });
        let (plain, http2) =
            (harness::start_pod(OK, LONG).await, FakeHttp2Pod::start(h2c::never).await);
        let at = if protocol == AppProtocol::H2c { http2.address } else { plain.address };
        fixture.add_ready_pod("p", at);
        let mut client = fixture.connect().await;
        client.write_all(GET.as_bytes()).await.unwrap();
        wait_until(|| plain.requests() + http2.requests() == 1).await;
        let near = client.local_addr().unwrap().port();
        wait_until(|| {
            keepalive_timer(|own, peer| (own, peer) == (fixture.port, near)).is_some_and(is_soon)
        })
        .await;
        wait_until(|| keepalive_timer(|_own, peer| peer == at.port()).is_some_and(is_soon)).await;
    }
}

/// Returns true for a time within 15 s. The kernel's own default is two hours.
fn is_soon(hundredths: u64) -> bool {
    hundredths <= 1_500
}
