//! HTTP/2 without TLS, by prior knowledge: from clients, to pods, and between HTTP/2 and HTTP/1.1.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{sync::atomic::Ordering, time::Duration};

use bytes::Bytes;
use common::wire::{AppProtocol, ConnectionPath, RoutingPhase};
use futures::future::join_all;
use http::{Request, StatusCode, Version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    h2c::{self, FakeHttp2Pod, Http2TestClient, get},
    harness::{
        self, ActivatorFixture, GET, OK, PausedClock, pod, read_rest, revision, service, start_pod,
        wait_until,
    },
};

/// Creates a fixture whose pods speak HTTP/2.
async fn start_fixture() -> ActivatorFixture {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::H2c;
    });
    fixture
}

#[tokio::test]
async fn requests_wait_and_share_one_connection_to_the_pod() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    let client = Http2TestClient::connect(fixture.port).await;
    let asked = (0..50).map(|_| client.send_request(get("/"), &[]));
    let asked = tokio::spawn(join_all(asked.collect::<Vec<_>>()));
    fixture.wait_for_queued(50).await;
    fixture.add_ready_pod("p", pod.address);
    for response in asked.await.unwrap() {
        assert_eq!(response.unwrap().head.status(), StatusCode::OK);
    }
    assert_eq!((pod.requests(), pod.connections(), fixture.waiting_totals()), (50, 1, (50, 50)));
}

#[tokio::test]
async fn a_call_carries_messages_and_trailers_as_grpc_does() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let request = Request::post("http://hello.default.example.com:8080/pkg.Service/Method")
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let response = client.send_request(request, &["one", "two"]).await.unwrap();
    assert_eq!((response.body.as_str(), response.trailer("grpc-status")), ("onetwo", Some("0")));
    let seen = pod.request_heads();
    let field = |name: &str| seen[0].headers.get(name).map(|it| it.to_str().unwrap().to_owned());
    assert_eq!(field("te").as_deref(), Some("trailers"));
    assert_eq!(field("host"), None);
    assert_eq!(seen[0].uri.to_string(), "http://hello.default.example.com:8080/pkg.Service/Method");
    let forwarded = "for=127.0.0.1;host=\"hello.default.example.com:8080\";proto=http";
    assert_eq!(field("forwarded").as_deref(), Some(forwarded));
}

#[tokio::test]
async fn both_ends_may_talk_at_once() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut call = client.start_call(Request::post("http://a/")).await;
    let mut response = None;
    for number in 0..20 {
        let message = format!("message {number}");
        call.send_piece(&message).await;
        if response.is_none() {
            response = Some(call.response_head().await);
        }
        assert_eq!(response.as_mut().unwrap().next().await.as_deref(), Some(message.as_bytes()));
    }
    call.end_body();
    assert_eq!(response.as_mut().unwrap().next().await, None);
}

#[tokio::test]
async fn large_bodies_pass_whole_while_others_stand_still() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut stuck = Vec::new();
    for _ in 0..20 {
        // No client reads the response.
        let mut call = client.start_call(Request::post("http://a/")).await;
        call.send_piece(&"x".repeat(60_000)).await;
        stuck.push((call.response_head().await, call));
    }
    let large = "0123456789abcdef".repeat(256 << 10);
    let parts: Vec<&str> =
        large.as_bytes().chunks(65_536).map(|it| str::from_utf8(it).unwrap()).collect();
    let response = client.send_request(Request::post("http://a/"), &parts).await.unwrap();
    assert!(response.body == large, "{} of {}", response.body.len(), large.len());
}

#[tokio::test]
async fn requests_of_one_connection_are_balanced_one_by_one() {
    let mut fixture = start_fixture().await;
    let (one, two) = (FakeHttp2Pod::start(h2c::slow).await, FakeHttp2Pod::start(h2c::slow).await);
    fixture.add_ready_pod("one", one.address);
    fixture.add_ready_pod("two", two.address);
    let client = Http2TestClient::connect(fixture.port).await;
    for response in join_all((0..100).map(|_| client.send_request(get("/"), &[]))).await {
        assert_eq!(response.unwrap().head.status(), StatusCode::OK);
    }
    assert_eq!(one.requests() + two.requests(), 100);
    assert!((40..=60).contains(&one.requests()), "{}", one.requests());
}

#[tokio::test]
async fn a_client_and_a_pod_may_speak_differently() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    let chunked = "POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nte: trailers\r\n\
        connection: close, te\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    let response = fixture.exchange(chunked).await;
    assert!(
        response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains("hello"),
        "{response}"
    );
    assert_eq!(pod.request_heads()[0].version, Version::HTTP_2);

    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::Http1;
        table.pods.clear();
    });
    let old = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("old", old.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let request = get("/b").header("cookie", "a=1").header("cookie", "b=2");
    let response = client.send_request(request, &[]).await.unwrap();
    assert_eq!((response.head.status(), response.body.as_str()), (StatusCode::OK, "hello"));
    let heads = old.heads();
    assert!(heads.starts_with("GET /b HTTP/1.1\r\n"), "{heads}");
    assert!(heads.contains("host: hello.default.example.com\r\n"), "{heads}");
    assert!(heads.contains("cookie: a=1; b=2\r\n"), "{heads}");
}

/// A server speaks only HTTP/2, and its port's name does not declare that. The client gets the server's own response.
#[tokio::test]
async fn a_pods_response_to_the_wrong_protocol_reaches_the_client() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod("HTTP/1.1 426 Upgrade Required\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n", Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    assert!(fixture.exchange(GET).await.starts_with("HTTP/1.1 426 "));
    let response =
        Http2TestClient::connect(fixture.port).await.send_request(get("/"), &[]).await.unwrap();
    assert_eq!(response.head.status(), StatusCode::UPGRADE_REQUIRED);
}

#[tokio::test]
async fn a_connection_that_may_go_direct_closes_without_losing_requests() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::slow).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let asked = tokio::spawn(join_all(
        (0..20).map(|_| client.send_request(get("/"), &[])).collect::<Vec<_>>(),
    ));
    wait_until(|| pod.requests() == 20).await;
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().connection_path = ConnectionPath::Direct
    });
    for response in asked.await.unwrap() {
        let response = response.unwrap();
        assert_eq!(
            (response.head.status(), response.head.headers().get("connection")),
            (StatusCode::OK, None)
        );
    }
    let last = (0..5).map(|_| client.send_request(get("/"), &[])).collect::<Vec<_>>();
    for response in join_all(last).await {
        assert_eq!(response.unwrap().head.status(), StatusCode::OK);
    }
    wait_until(|| client.is_closed()).await;
    assert_eq!(pod.requests(), 25);
    // The gateway for requests from outside keeps its client connections open.
    let outside = Http2TestClient::connect_to(fixture.outside).await;
    for _ in 0..3 {
        assert_eq!(
            outside.send_request(get("/"), &[]).await.unwrap().head.status(),
            StatusCode::OK
        );
    }
    assert!(!outside.is_closed());
}

#[tokio::test]
async fn a_request_that_a_pod_has_not_processed_is_sent_again() {
    let mut fixture = start_fixture().await;
    let pod = h2c::start_refusing_pod(3).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let response = client.send_request(get("/"), &[]).await.unwrap();
    assert_eq!((response.head.status(), pod.requests()), (StatusCode::OK, 4));
    let pod = h2c::start_refusing_pod(1).await;
    fixture.apply_change(|table| table.pods.clear());
    fixture.add_ready_pod("q", pod.address);
    // The body was sent to the pod already.
    let response = client.send_request(Request::post("http://a/"), &["body"]).await.unwrap();
    assert_eq!((response.head.status(), pod.requests()), (StatusCode::BAD_GATEWAY, 1));
}

#[tokio::test]
async fn pods_that_end_their_connections_politely_lose_no_request() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    pod.goaway_every.store(5, Ordering::SeqCst);
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    for _ in 0..20 {
        for response in join_all((0..8).map(|_| client.send_request(get("/"), &[]))).await {
            assert_eq!(response.unwrap().head.status(), StatusCode::OK);
        }
    }
    assert_eq!(pod.requests(), 160);
    assert!(pod.connections() > 10, "{}", pod.connections());
}

#[tokio::test]
async fn a_request_that_its_client_resets_leaves_queue_and_pod() {
    let mut fixture = start_fixture().await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().container_concurrency = 1
    });
    let client = Http2TestClient::connect(fixture.port).await;
    let call = client.start_call(get("/")).await;
    fixture.wait_for_queued(1).await;
    drop(call);
    wait_until(|| fixture.waiting_totals() == (1, 1)).await;
    let pod = FakeHttp2Pod::start(h2c::never).await;
    fixture.add_ready_pod("p", pod.address);
    for count in 1..=5 {
        let call = client.start_call(get("/")).await;
        wait_until(|| pod.requests() == count).await;
        drop(call);
        wait_until(|| pod.ended_requests() == count).await;
    }
    let (began, ended) = fixture.waiting_totals();
    assert_eq!((pod.connections(), began), (1, ended), "none waits, and the connection stays");
}

#[tokio::test]
async fn a_websocket_reaches_a_pod_that_speaks_both() {
    let mut fixture = start_fixture().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.add_ready_pod("p", listener.local_addr().unwrap());
    let pod = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = harness::read_head(&mut stream).await;
        let switch =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(switch.as_bytes()).await.unwrap();
        let mut message = [0; 4];
        stream.read_exact(&mut message).await.unwrap();
        stream.write_all(&message).await.unwrap();
        head
    };
    let client = async {
        let mut stream = fixture.connect().await;
        let ask = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(ask.as_bytes()).await.unwrap();
        let head = harness::read_head(&mut stream).await;
        stream.write_all(b"ping").await.unwrap();
        let mut message = [0; 4];
        stream.read_exact(&mut message).await.unwrap();
        (head, message)
    };
    let (asked, (head, message)) = tokio::join!(pod, client);
    assert!(asked.contains("upgrade: websocket\r\n"), "{asked}");
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(&message, b"ping");
}

#[tokio::test]
async fn requests_at_pods_do_not_count_as_waiting() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::never).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut calls = Vec::new();
    for count in 1..=10 {
        calls.push(client.start_call(get("/")).await);
        wait_until(|| pod.requests() == count).await;
    }
    let (began, ended) = fixture.waiting_totals();
    assert_eq!(began, ended, "none waits, although all are at the pod");
}

#[tokio::test]
async fn the_request_timeout_ends_a_call_and_keeps_its_connection() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::never).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().timeout = Duration::from_millis(50);
    });
    // A busy machine may need longer than the timeout to pass the request to the pod.
    let clock = PausedClock::start_paused();
    let client = Http2TestClient::connect(fixture.port).await;
    let responding = client.send_request(get("/"), &[]);
    let times_out = async {
        clock.until(|| pod.requests() == 1).await;
        clock.advance(Duration::from_millis(51)).await;
    };
    let (response, ()) = tokio::join!(responding, times_out);
    drop(clock);
    let response = response.unwrap();
    let status_and_body = (response.head.status(), response.body.as_str());
    assert_eq!(status_and_body, (StatusCode::GATEWAY_TIMEOUT, "activator request timeout"));
    wait_until(|| pod.ended_requests() == 1).await;
    assert!(!client.is_closed(), "other requests of the connection go on");
}

#[tokio::test]
async fn a_response_that_had_begun_ends_with_the_text_of_the_timeout() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::start_then_stall).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().idle_timeout =
            Some(Duration::from_millis(50));
    });
    // A busy machine may need longer than the timeout before the response begins.
    let clock = PausedClock::start_paused();
    let client = Http2TestClient::connect(fixture.port).await;
    let mut response = client.start_call(get("/")).await.response_head().await;
    assert_eq!(response.next().await.unwrap(), "begun");
    clock.advance(Duration::from_millis(51)).await;
    assert_eq!(response.next().await.unwrap(), "activator request timeout");
    assert!(response.next().await.is_none(), "the response ends gracefully");
}

#[tokio::test]
async fn half_a_preface_is_refused_and_a_method_that_begins_like_one_is_served() {
    let mut fixture = start_fixture().await;
    let pod = FakeHttp2Pod::start(h2c::echo).await;
    fixture.add_ready_pod("p", pod.address);
    let mut early = fixture.connect().await;
    early.write_all(b"PRI * HTTP/2.0\r\n").await.unwrap();
    early.shutdown().await.unwrap();
    let response = read_rest(&mut early).await;
    assert!(response.is_empty() || response.starts_with("HTTP/1.1 400 "), "{response}");
    let mut slow = fixture.connect().await;
    // It begins like the preface, `PRI * HTTP/2.0`.
    let request = "PRINT / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    for part in request.as_bytes().chunks(1).take(5) {
        slow.write_all(part).await.unwrap();
        tokio::task::yield_now().await;
    }
    slow.write_all(&request.as_bytes()[5..]).await.unwrap();
    assert!(read_rest(&mut slow).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(pod.request_heads()[0].method, "PRINT");
}

#[tokio::test]
async fn a_pod_that_leaves_keeps_the_calls_it_has() {
    let mut fixture = start_fixture().await;
    let (one, two) = (FakeHttp2Pod::start(h2c::echo).await, FakeHttp2Pod::start(h2c::echo).await);
    fixture.add_ready_pod("one", one.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut call = client.start_call(Request::post("http://a/")).await;
    call.send_piece("before").await;
    let mut response = call.response_head().await;
    assert_eq!(response.next().await, Some(Bytes::from("before")));
    fixture.apply_change(|table| {
        drop(table.pods.insert("one".into(), pod("one", one.address, RoutingPhase::Draining)))
    });
    fixture.add_ready_pod("two", two.address);
    for _ in 0..5 {
        assert_eq!(client.send_request(get("/"), &[]).await.unwrap().head.status(), StatusCode::OK);
    }
    call.send_piece("after").await;
    assert_eq!(response.next().await, Some(Bytes::from("after")));
    call.end_body();
    assert_eq!(response.next().await, None);
    assert_eq!((one.requests(), two.requests()), (1, 5));
}
