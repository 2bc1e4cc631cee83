//! Clients that close their sending half or their whole connection while their request waits or runs.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};

use crate::{
    harness::{
        self, ActivatorFixture, DATED, GET, LONG, OK, PausedClock, read_head, read_rest,
        read_until, start_pod, wait_until,
    },
    messages::{KEEP_ALIVE_GET, start_pod_once, start_reading_pod},
};

const POST: &str =
    "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello";

#[tokio::test]
async fn a_half_closed_client_gets_its_whole_response_after_it_waited() {
    let whole = DATED;
    let two = format!("{KEEP_ALIVE_GET}{KEEP_ALIVE_GET}");
    for (request, count) in [(GET, 1), (KEEP_ALIVE_GET, 1), (POST, 1), (&two, 2)] {
        let mut fixture = ActivatorFixture::new().await;
        let at = start_reading_pod(DATED).await;
        let mut client = fixture.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        fixture.wait_for_queued(1).await;
        client.shutdown().await.unwrap();
        // The activator sends the first byte ahead, which a client that is gone answers by a reset
        // (`clients/socket.rs`). The rest follows when the pod has responded.
        assert_eq!(client.read_u8().await.unwrap(), b'H');
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", at);
        let response = format!("H{}", read_rest(&mut client).await);
        assert_eq!(response.replace("connection: close\r\n", ""), whole.repeat(count), "{request}");
        // A second request on the connection finds the pod, so it need not wait.
        let max_waited = u64::try_from(count).unwrap();
        let (started, finished) = fixture.waiting_totals();
        assert!(started <= max_waited && started == finished, "{started} {finished}");
    }
}

#[tokio::test]
async fn a_half_closed_client_gets_every_kind_of_response() {
    let old = "GET / HTTP/1.0\r\n\r\n";
    let large = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    for (request, pod_response, pause, end) in [
        (old, OK, 30, "\r\n\r\nhello"),
        (GET, large, 30, "5\r\nhello\r\n0\r\n\r\n"),
        (GET, "HTTP/1.1 204 No Content\r\n\r\n", 30, "\r\n\r\n"),
        (GET, OK, 0, "\r\n\r\nhello"),
        (GET, "HTTP/1.1 x\r\n\r\n", 30, "invalid HTTP status-code parsed"),
    ] {
        let mut fixture = ActivatorFixture::new().await;
        let pod = start_pod(pod_response, Duration::from_millis(pause)).await;
        fixture.add_ready_pod("p", pod.address);
        let mut client = fixture.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let response = read_rest(&mut client).await;
        assert!(response.starts_with("HTTP/1.") && response.ends_with(end), "{request} {response}");
    }
}

#[tokio::test]
async fn a_half_closed_client_gets_the_timeout_response() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&harness::revision()).unwrap().timeout = Duration::from_millis(50);
    });
    let mut client = fixture.connect().await;
    client.write_all(GET.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    let response = read_rest(&mut client).await;
    assert!(
        response.starts_with("HTTP/1.1 504 ") && response.ends_with("request timeout"),
        "{response}"
    );
    assert_eq!(fixture.waiting_totals(), (1, 1));
}

#[tokio::test]
async fn a_client_that_closes_while_it_waits_leaves_the_queue() {
    let body = "x".repeat(100_000);
    let unread = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n{body}");
    let broken_off = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhello";
    let two = format!("{KEEP_ALIVE_GET}{KEEP_ALIVE_GET}");
    for request in [GET, POST, &unread, broken_off, &two] {
        for (half_first, reset) in [(false, false), (true, false), (false, true)] {
            let fixture = ActivatorFixture::new().await;
            let mut client = fixture.connect().await;
            client.write_all(request.as_bytes()).await.unwrap();
            fixture.wait_for_queued(1).await;
            if half_first {
                client.shutdown().await.unwrap();
                assert_eq!(client.peek(&mut [0]).await.unwrap(), 1);
                fixture.wait_for_queued(1).await;
            }
            if reset {
                client.set_zero_linger().unwrap();
            }
            drop(client);
            fixture.wait_for_queued(0).await;
            wait_until(|| fixture.waiting_totals() == (1, 1)).await;
            wait_until(|| fixture.metric("rouse_activator_client_connections") == 0.0).await;
            let cancelled = "rouse_activator_requests_total{code=\"cancelled\"}";
            assert_eq!(fixture.metric(cancelled), 1.0);
        }
    }
}

#[tokio::test]
async fn a_client_that_goes_while_its_request_runs_frees_its_permit() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&harness::revision()).unwrap().container_concurrency = 1;
    });
    let pod = start_pod(OK, LONG).await;
    fixture.add_ready_pod("p", pod.address);
    for count in 1..=3 {
        let mut client = fixture.connect().await;
        client.write_all(POST.as_bytes()).await.unwrap();
        wait_until(|| pod.requests() == count).await;
    }
}

#[tokio::test]
async fn a_silent_response_ends_once_its_client_is_gone() {
    // Bytes behind the request are not read while its response lasts, and hide the FIN behind them.
    for unread in ["", KEEP_ALIVE_GET] {
        let mut fixture = ActivatorFixture::new().await;
        fixture.apply_change(|table| {
            // No time by which the clock is advanced reaches the request's timeout.
            table.revisions.get_mut(&harness::revision()).unwrap().timeout = 1_000_000 * PAUSE;
        });
        let (ended, end) = tokio::sync::oneshot::channel();
        let at = start_pod_once(|mut stream, _| async move {
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
            stream.write_all(head.as_bytes()).await.unwrap();
            ended.send(stream.read_u8().await.is_err()).unwrap();
        })
        .await;
        fixture.add_ready_pod("p", at);
        let mut client = fixture.connect().await;
        client.write_all(GET.as_bytes()).await.unwrap();
        read_head(&mut client).await;
        client.write_all(unread.as_bytes()).await.unwrap();
        // The activator notices the bytes before the FIN comes.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let clock = PausedClock::start_paused();
        drop(client);
        assert!(advance_until(&clock, end).await.unwrap(), "unread: {unread:?}");
    }
}

/// Advances the time until `ended` resolves: the time of silence begins only when the activator finds the half closed.
async fn advance_until<T>(clock: &PausedClock, ended: impl Future<Output = T>) -> T {
    let mut ended = std::pin::pin!(ended);
    loop {
        tokio::select! {
            biased;
            value = &mut ended => return value,
            () = clock.advance(PAUSE / 2) => {}
        }
    }
}

/// Starts a pod that begins a response, reports when its client's half is closed, and sends the rest when it is
/// released.
async fn start_pausing_pod() -> (SocketAddr, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let ((closed, is_closed), (go, mut wait)) = (mpsc::channel(1), mpsc::channel(1));
    let at = start_pod_once(move |mut stream, _| async move {
        let begin = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nbegin";
        stream.write_all(begin.as_bytes()).await.unwrap();
        let (mut from, mut to) = stream.split();
        let hear = async {
            from.read_to_end(&mut Vec::new()).await.unwrap();
            closed.send(()).await.unwrap();
        };
        let say = async {
            wait.recv().await;
            to.write_all(b" and end").await.unwrap();
            to.shutdown().await.unwrap();
        };
        tokio::join!(hear, say);
    })
    .await;
    (at, is_closed, go)
}

/// Longer than a response may be silent while its client's half is closed (`FIN_FORWARD_DELAY`).
const PAUSE: Duration = Duration::from_secs(6);

#[tokio::test]
async fn a_half_closed_client_gets_the_rest_of_a_response_that_pauses() {
    for is_closed_first in [true, false] {
        let mut fixture = ActivatorFixture::new().await;
        fixture.apply_change(|table| {
            // No time by which the clock is advanced reaches the request's timeout.
            table.revisions.get_mut(&harness::revision()).unwrap().timeout = 1_000_000 * PAUSE;
        });
        let (at, mut closed, go) = start_pausing_pod().await;
        let mut client = fixture.connect().await;
        client.write_all(GET.as_bytes()).await.unwrap();
        if is_closed_first {
            client.shutdown().await.unwrap();
            client.peek(&mut [0]).await.unwrap();
        }
        fixture.add_ready_pod("p", at);
        read_until(&mut client, "begin").await;
        let clock = PausedClock::start_paused();
        if is_closed_first {
            clock.advance(PAUSE).await;
            assert!(closed.try_recv().is_err(), "the pod does not learn of the half-close");
        } else {
            client.shutdown().await.unwrap();
            advance_until(&clock, closed.recv()).await.unwrap();
        }
        go.send(()).await.unwrap();
        let response = read_rest(&mut client).await;
        assert!(response.contains(" and end"), "closed first: {is_closed_first}: {response}");
    }
}

#[tokio::test]
async fn a_client_that_goes_during_the_response_frees_its_permit() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&harness::revision()).unwrap().container_concurrency = 1;
    });
    let endless = "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nhello";
    let pod = start_pod(endless, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    for count in 1..=3 {
        let mut client = fixture.connect().await;
        client.write_all(GET.as_bytes()).await.unwrap();
        read_head(&mut client).await;
        assert_eq!(pod.requests(), count);
    }
}
