//! Requests wait, are sent to pods, and fail in known ways.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::wire::{ConnectionPath, NamespacedName, RouteTarget, RoutingPhase};
use futures::future::join_all;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::harness::{
    self, ActivatorFixture, GET, LONG, OK, PausedClock, hello_revision, read_head, read_rest,
    read_until, revision, service, start_pod, start_pod_with, start_silent_pod, unused_port,
    wait_until,
};

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

#[tokio::test]
async fn requests_wait_and_go_once_a_pod_is_ready() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    let streams = join_all((0..20).map(|_| fixture.connect())).await;
    let mut asked = Vec::new();
    for mut stream in streams {
        stream.write_all(GET.as_bytes()).await.unwrap();
        asked.push(stream);
    }
    fixture.wait_for_queued(20).await;
    assert_eq!(fixture.waiting_totals(), (20, 0));
    fixture.set_pod("p", pod.address, RoutingPhase::Starting);
    fixture.wait_for_queued(20).await;
    fixture.add_ready_pod("p", pod.address);
    for mut stream in asked {
        assert_eq!(status(&read_rest(&mut stream).await), "200");
    }
    assert_eq!(
        (pod.requests(), fixture.waiting_totals(), fixture.abandoned_requests()),
        (20, (20, 20), 0)
    );
}

#[tokio::test]
async fn a_warm_request_does_not_count_as_waiting_and_reuses_a_connection() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    for _ in 0..5 {
        assert_eq!(status(&fixture.exchange(GET).await), "200");
    }
    assert_eq!((pod.requests(), pod.connections(), fixture.waiting_totals()), (5, 1, (0, 0)));
}

#[tokio::test]
async fn a_request_counts_as_waiting_once_its_dial_is_late() {
    let mut fixture = ActivatorFixture::new().await;
    let (_silent, address, _plugs) = start_silent_pod().await;
    fixture.add_ready_pod("silent", address);
    let clock = PausedClock::start_paused();
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    clock.until(|| unanswered_dials(address.port()) > 0).await;
    assert_eq!(fixture.waiting_totals(), (0, 0));
    clock.advance(Duration::from_millis(1_001)).await;
    clock.until(|| fixture.waiting_totals() == (1, 0)).await;
    assert_eq!(fixture.metric("rouse_activator_waiting_requests"), 1.0);
    drop((clock, stream));
    wait_until(|| fixture.waiting_totals() == (1, 1)).await;
    assert_eq!(fixture.abandoned_requests(), 1);
}

#[tokio::test]
async fn a_client_that_goes_while_it_waits_leaves_the_queue() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    drop(stream);
    fixture.wait_for_queued(0).await;
    wait_until(|| fixture.waiting_totals() == (1, 1)).await;
    fixture.add_ready_pod("p", pod.address);
    assert_eq!(status(&fixture.exchange(GET).await), "200");
    assert_eq!(pod.requests(), 1);
    let cancelled = "rouse_activator_requests_total{code=\"cancelled\"}";
    assert_eq!(fixture.metric(cancelled), 1.0);
}

#[tokio::test]
async fn a_full_queue_responds_503_with_retry_after() {
    let fixture = ActivatorFixture::with(|config| config.max_waiting = 1).await;
    let mut first = fixture.connect().await;
    first.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    let response = fixture.exchange(GET).await;
    assert_eq!(status(&response), "503");
    assert!(response.contains("retry-after: 1\r\n"), "{response}");
    assert!(response.ends_with("pending request queue full"), "{response}");
}

#[tokio::test]
async fn the_deadline_counts_while_waiting() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().timeout = Duration::from_millis(30);
    });
    let response = fixture.exchange(GET).await;
    assert_eq!(status(&response), "504");
    assert!(response.ends_with("activator request timeout"), "{response}");
    assert_eq!(
        (fixture.waiting_totals(), fixture.abandoned_requests()),
        ((1, 1), 1),
        "it arrived, and no pod got it"
    );
}

#[tokio::test]
async fn a_response_must_begin_in_time() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        entry.response_start_timeout = Some(Duration::from_millis(30));
    });
    let pod = start_pod(OK, LONG).await;
    fixture.add_ready_pod("p", pod.address);
    assert_eq!(status(&fixture.exchange(GET).await), "504");
}

#[tokio::test]
async fn a_response_that_stalls_is_cut_off() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        entry.idle_timeout = Some(Duration::from_millis(30));
    });
    let pod = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        let begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello";
        stream.write_all(begun).await.unwrap();
        stream.read_u8().await.ok();
    })
    .await;
    fixture.add_ready_pod("p", pod);
    // A busy machine may begin later.
    let clock = PausedClock::start_paused();
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    let begun = read_until(&mut stream, "hello").await;
    assert_eq!(status(&begun), "200");
    assert!(begun.ends_with("hello"), "{begun}");
    clock.advance(Duration::from_millis(31)).await;
    assert_eq!(read_rest(&mut stream).await, "", "it is cut off");
}

#[tokio::test]
async fn a_refused_connection_is_tried_elsewhere() {
    let mut fixture = ActivatorFixture::new().await;
    let gone = SocketAddr::from(([127, 0, 0, 1], unused_port()));
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().container_concurrency = 1
    });
    fixture.add_ready_pod("gone", gone);
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_retries_total") > 0.0).await;
    fixture.add_ready_pod("good", pod.address);
    assert_eq!(status(&read_rest(&mut stream).await), "200");
    assert_eq!(pod.requests(), 1);
}

#[tokio::test]
async fn a_pod_that_always_refuses_gives_502() {
    let mut fixture = ActivatorFixture::new().await;
    let gone = SocketAddr::from(([127, 0, 0, 1], unused_port()));
    fixture.add_ready_pod("gone", gone);
    let response = fixture.exchange(GET).await;
    assert_eq!(status(&response), "502");
    assert!(response.contains("cannot connect to pod at"), "{response}");
    assert_eq!(fixture.metric("rouse_activator_dials_total"), 10.0);
}

#[tokio::test]
async fn nothing_is_sent_again_once_a_byte_was_sent() {
    let mut fixture = ActivatorFixture::new().await;
    let rude = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().container_concurrency = 1
    });
    let at = rude.local_addr().unwrap();
    let asked = tokio::spawn(async move {
        let mut requests = 0;
        while let Ok((mut stream, _)) = rude.accept().await {
            if read_head(&mut stream).await.ends_with("\r\n\r\n") {
                requests += 1;
                break;
            }
        }
        requests
    });
    fixture.add_ready_pod("rude", at);
    let response = fixture.exchange(GET).await;
    assert_eq!(status(&response), "502");
    assert_eq!(asked.await.unwrap(), 1);
    fixture.add_ready_pod("good", pod.address);
    assert_eq!(pod.requests(), 0, "the request ended with the pod it was sent to");
}

#[tokio::test]
async fn a_connection_the_pod_has_closed_is_not_used() {
    let mut fixture = ActivatorFixture::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.add_ready_pod("p", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            read_head(&mut stream).await;
            stream.write_all(OK.as_bytes()).await.unwrap();
        }
    });
    for _ in 0..20 {
        assert_eq!(status(&fixture.exchange(GET).await), "200");
    }
}

#[tokio::test]
async fn a_hard_limit_lets_one_request_in_at_a_time() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::from_millis(2)).await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().container_concurrency = 1
    });
    fixture.add_ready_pod("p", pod.address);
    let responses = join_all((0..20).map(|_| fixture.exchange(GET))).await;
    assert!(responses.iter().all(|response| status(response) == "200"));
    assert_eq!((pod.requests(), pod.connections()), (20, 1));
    let (started, finished) = fixture.waiting_totals();
    assert_eq!(started, finished);
}

#[tokio::test]
async fn a_full_accept_queue_does_not_cost_a_second() {
    let mut fixture = ActivatorFixture::new().await;
    let (listener, at, plugs) = start_silent_pod().await;
    fixture.add_ready_pod("p", at);
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    // Several sockets wait for a SYN-ACK before the queue accepts one.
    wait_until(|| unanswered_dials(at.port()) >= 2).await;
    let mut repeats = 0;
    loop {
        let (mut pod, peer) = listener.accept().await.unwrap();
        let is_plug = plugs.iter().any(|plug| plug.local_addr().unwrap() == peer);
        // The first socket of the dial that is accepted gets the request, and the others may stay silent.
        let head = if is_plug {
            None
        } else {
            tokio::time::timeout(Duration::from_secs(5), read_head(&mut pod)).await.ok()
        };
        if head.is_some_and(|head| head.ends_with("\r\n\r\n")) {
            pod.write_all(OK.as_bytes()).await.unwrap();
            break;
        }
        repeats += 1;
    }
    assert!(repeats >= 2, "the plugs came first");
    assert_eq!(status(&read_rest(&mut stream).await), "200");
    assert!(fixture.metric("rouse_activator_dial_repeats_total") >= 2.0);
    drop(plugs);
}

/// Number of sockets of this machine whose connect to an IPv4 port is unanswered so far.
fn unanswered_dials(port: u16) -> usize {
    let (remote, syn_sent) = (format!(":{port:04X}"), "02");
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[2].ends_with(&remote) && row[3] == syn_sent).count()
}

#[tokio::test]
async fn an_idle_connection_closes_once_the_service_is_direct() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let mut kept = fixture.connect().await;
    let get = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut body = [0; 5];
    kept.write_all(get.as_bytes()).await.unwrap();
    assert!(!read_head(&mut kept).await.contains("connection: close"));
    kept.read_exact(&mut body).await.unwrap();
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().connection_path = ConnectionPath::Direct
    });
    kept.write_all(get.as_bytes()).await.unwrap();
    let response = read_rest(&mut kept).await;
    assert!(
        response.contains("connection: close\r\n") && response.ends_with("hello"),
        "{response}"
    );
    assert_eq!(fixture.metric("rouse_activator_direct_closed_connections_total"), 1.0);

    let mut outside = tokio::net::TcpStream::connect(fixture.outside).await.unwrap();
    for _ in 0..2 {
        let get = "GET / HTTP/1.1\r\nhost: Hello.default.example.com:8080\r\n\r\n";
        outside.write_all(get.as_bytes()).await.unwrap();
        assert!(!read_head(&mut outside).await.contains("connection: close"));
        outside.read_exact(&mut body).await.unwrap();
    }
}

#[tokio::test]
async fn a_service_port_serves_whatever_host_and_the_gateway_only_known_ones() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let foreign = "GET / HTTP/1.1\r\nhost: foreign.example\r\nconnection: close\r\n\r\n";
    assert_eq!(status(&fixture.exchange(foreign).await), "200");
    let old = "GET / HTTP/1.0\r\n\r\n";
    assert_eq!(status(&fixture.exchange(old).await), "200");
    assert!(pod.heads().contains("host: hello.default.svc\r\n"));
    let mut outside = tokio::net::TcpStream::connect(fixture.outside).await.unwrap();
    outside.write_all(foreign.as_bytes()).await.unwrap();
    assert_eq!(status(&read_rest(&mut outside).await), "404");
}

#[tokio::test]
async fn a_split_follows_the_percents_and_a_missing_target_is_reported() {
    let mut fixture = ActivatorFixture::new().await;
    let (one, two) = (start_pod(OK, Duration::ZERO).await, start_pod(OK, Duration::ZERO).await);
    let second = NamespacedName::new("default", "hello-2");
    fixture.add_ready_pod("one", one.address);
    fixture.apply_change(|table| {
        let mut entry = hello_revision();
        entry.name = second.clone();
        table.revisions.insert(second.clone(), entry);
        let mut pod = harness::pod("two", two.address, RoutingPhase::Ready);
        pod.revision = second.clone();
        table.pods.insert("two".to_owned(), pod);
        let to = |revision, percent| RouteTarget { revision, percent };
        table.services.get_mut(&service()).unwrap().targets =
            vec![to(revision(), 50), to(second.clone(), 50)];
    });
    for _ in 0..200 {
        assert_eq!(status(&fixture.exchange(GET).await), "200");
    }
    assert_eq!(one.requests() + two.requests(), 200);
    assert!((50..=150).contains(&one.requests()), "{}", one.requests());
    fixture.apply_change(|table| drop(table.revisions.remove(&second)));
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().targets =
            vec![RouteTarget { revision: second.clone(), percent: 100 }];
    });
    assert_eq!(status(&fixture.exchange(GET).await), "404");
    fixture.apply_change(|table| table.services.get_mut(&service()).unwrap().targets.clear());
    assert_eq!(status(&fixture.exchange(GET).await), "503");
}

#[tokio::test]
async fn a_service_that_goes_closes_its_port() {
    let mut fixture = ActivatorFixture::new().await;
    let mut kept = fixture.connect().await;
    fixture.apply_change(|table| table.services.clear());
    kept.write_all(GET.as_bytes()).await.unwrap();
    assert_eq!(status(&read_rest(&mut kept).await), "404");
    let again = tokio::net::TcpStream::connect(("127.0.0.1", fixture.port));
    assert!(tokio::time::timeout(LONG, again).await.unwrap().is_err());
}

#[tokio::test]
async fn knatives_probes_get_a_response() {
    let fixture = ActivatorFixture::new().await;
    let ask = async |fields: &str| {
        fixture
            .exchange(&format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{fields}\r\n"))
            .await
    };
    assert!(ask("K-Network-Probe: activator\r\n").await.ends_with("\r\n\r\nactivator"));
    let hash = ask("K-Network-Probe: probe\r\nK-Network-Hash: abc\r\n").await;
    assert!(hash.contains("k-network-hash: abc"), "{hash}");
    assert_eq!(status(&ask("K-Network-Probe: probe\r\n").await), "400");
    let other = ask("K-Network-Probe: other\r\n").await;
    assert!(other.ends_with("unexpected probe header value: other"), "{other}");
}

#[tokio::test]
async fn a_request_for_a_revision_that_comes_back_is_served() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    fixture.apply_change(|table| drop(table.revisions.remove(&revision())));
    assert_eq!(status(&fixture.exchange(GET).await), "404");
    fixture.apply_change(|table| drop(table.revisions.insert(revision(), hello_revision())));
    fixture.add_ready_pod("p", pod.address);
    assert_eq!(status(&read_rest(&mut stream).await), "200");
}

#[tokio::test]
async fn a_pod_that_leaves_while_it_is_dialled_does_not_keep_its_requests() {
    let mut fixture = ActivatorFixture::new().await;
    let (_full, at, _plugs) = start_silent_pod().await;
    fixture.add_ready_pod("full", at);
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_dials_total") > 0.0).await;
    fixture.apply_change(|table| table.pods.clear());
    fixture.wait_for_queued(1).await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    assert_eq!(status(&read_rest(&mut stream).await), "200");
    assert_eq!(fixture.waiting_totals(), (1, 1));
}

/// Creates a service of two pods, one of which leaves dials unanswered. The timeout of its requests is shorter than the
/// time until such a dial fails, and than the time for which requests avoid the pod.
async fn add_pods_beside_silent(fixture: &mut ActivatorFixture, silent: SocketAddr) {
    let timeout = Duration::from_secs(5);
    fixture.apply_change(|table| table.revisions.get_mut(&revision()).unwrap().timeout = timeout);
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("silent", silent);
    fixture.add_ready_pod("p", pod.address);
}

#[tokio::test]
async fn a_pod_that_leaves_dials_unanswered_is_passed_over_while_there_is_another() {
    let mut fixture = ActivatorFixture::new().await;
    let (_silent, at, _plugs) = start_silent_pod().await;
    add_pods_beside_silent(&mut fixture, at).await;
    for _ in 0..20 {
        assert_eq!(status(&fixture.exchange(GET).await), "200");
    }
    assert_eq!(fixture.metric("rouse_activator_retries_total"), 1.0, "one asked the silent one");
}

#[tokio::test]
async fn a_pod_that_left_a_dial_unanswered_is_dialled_again_once_there_is_no_other() {
    let mut fixture = ActivatorFixture::new().await;
    let (silent, at, plugs) = start_silent_pod().await;
    add_pods_beside_silent(&mut fixture, at).await;
    while fixture.metric("rouse_activator_retries_total") < 1.0 {
        assert_eq!(status(&fixture.exchange(GET).await), "200");
    }
    drop(plugs);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = silent.accept().await {
            tokio::spawn(async move {
                if read_head(&mut stream).await.ends_with("\r\n\r\n") {
                    stream.write_all(OK.as_bytes()).await.ok();
                }
            });
        }
    });
    fixture.apply_change(|table| drop(table.pods.remove("p")));
    assert_eq!(status(&fixture.exchange(GET).await), "200");
}
