//! containerConcurrency: no pod ever gets more requests, and no request is lost.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use activator::revisions::revision::RevisionQueueMetrics;
use common::wire::AppProtocol;
use futures::future::join_all;
use http::{Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
};

use crate::{
    h2c::{self, FakeHttp2Pod, Http2ResponseFuture, Http2TestClient},
    harness::{
        self, ActivatorFixture, GET, OK, read_head, read_rest, read_until, revision, wait_until,
    },
};

fn set_limit(fixture: &mut ActivatorFixture, limit: u32, protocol: AppProtocol) {
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        (entry.container_concurrency, entry.protocol) = (limit, protocol);
    });
}

/// Starts a pod that serves one request at a time, and responds with 500 when it has two.
async fn start_single_threaded_pod() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(respond(stream, Arc::clone(&busy), Arc::clone(&seen)));
        }
    });
    (address, most)
}

async fn respond(mut stream: TcpStream, busy: Arc<AtomicUsize>, most: Arc<AtomicUsize>) {
    while read_head(&mut stream).await.ends_with("\r\n\r\n") {
        let now = busy.fetch_add(1, Ordering::SeqCst) + 1;
        most.fetch_max(now, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let response = if now > 1 { OK.replace("200 OK", "500 Overlap") } else { OK.to_owned() };
        busy.fetch_sub(1, Ordering::SeqCst);
        stream.write_all(response.as_bytes()).await.ok();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn five_loops_never_overlap_at_a_pod_that_takes_one() {
    let mut fixture = ActivatorFixture::new().await;
    set_limit(&mut fixture, 1, AppProtocol::Http1);
    let (pod, most) = start_single_threaded_pod().await;
    fixture.add_ready_pod("p", pod);
    let fixture = Arc::new(fixture);
    let loops = (0..5).map(|_| {
        let fixture = Arc::clone(&fixture);
        tokio::spawn(async move {
            for _ in 0..100 {
                let response = fixture.exchange(GET).await;
                assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
            }
        })
    });
    for ended in join_all(loops).await {
        ended.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn http2_pods_have_no_more_than_their_limit_either() {
    let mut fixture = ActivatorFixture::new().await;
    set_limit(&mut fixture, 3, AppProtocol::H2c);
    let pods = [FakeHttp2Pod::start(h2c::never).await, FakeHttp2Pod::start(h2c::never).await];
    fixture.add_ready_pod("one", pods[0].address);
    fixture.add_ready_pod("two", pods[1].address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut calls = Vec::new();
    for _ in 0..20 {
        calls.push(client.start_call(h2c::get("/")).await);
    }
    fixture.wait_for_queued(14).await;
    wait_until(|| pods.iter().all(|pod| pod.requests() == 3)).await;
    // All clients go: each request ends, and frees its slot exactly once.
    drop(calls);
    wait_until(|| pods.iter().all(|pod| pod.requests() == pod.ended_requests())).await;
    fixture.wait_for_queued(0).await;
    let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    wait_until(|| served.queue_metrics().at_pods == 0).await;
}

/// Responds at once, and reads on for as long as bytes come.
fn respond_early(body: Incoming) -> Http2ResponseFuture {
    tokio::spawn(body.collect());
    Box::pin(async { Response::new(Empty::new().boxed_unsync()) })
}

#[tokio::test]
async fn a_slot_is_free_once_both_the_response_and_the_upload_are_over() {
    let mut fixture = ActivatorFixture::new().await;
    set_limit(&mut fixture, 1, AppProtocol::H2c);
    let pod = FakeHttp2Pod::start(respond_early).await;
    fixture.add_ready_pod("p", pod.address);
    let client = Http2TestClient::connect(fixture.port).await;
    let mut upload = client.start_call(h2c::get("/")).await;
    assert_eq!(upload.response_head().await.next().await, None, "the response is over");
    let second = tokio::spawn(client.send_request(h2c::get("/"), &[]));
    fixture.wait_for_queued(1).await;
    for _ in 0..10 {
        upload.send_piece("more").await;
        assert_eq!((pod.requests(), second.is_finished()), (1, false));
    }
    fixture.wait_for_queued(1).await;
    upload.end_body();
    assert_eq!(second.await.unwrap().unwrap().head.status(), StatusCode::OK);
    assert_eq!((pod.requests(), fixture.waiting_totals()), (2, (1, 1)));
}

/// Starts a pod that begins to respond to each request at once and reports when it has read the body. It ends the
/// response when it is released.
async fn start_early_responding_pod(read: mpsc::Sender<oneshot::Sender<()>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let read = read.clone();
            tokio::spawn(async move {
                read_head(&mut stream).await;
                stream.write_all(OK.strip_suffix("lo").unwrap().as_bytes()).await.unwrap();
                read_until(&mut stream, "body").await;
                let (end, is_end) = oneshot::channel();
                read.send(end).await.unwrap();
                is_end.await.unwrap();
                stream.write_all(b"lo").await.unwrap();
            });
        }
    });
    address
}

#[tokio::test]
async fn the_end_of_an_upload_alone_frees_no_slot() {
    let mut fixture = ActivatorFixture::new().await;
    set_limit(&mut fixture, 1, AppProtocol::Http1);
    let (read, mut uploads) = mpsc::channel(2);
    fixture.add_ready_pod("p", start_early_responding_pod(read).await);
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 4\r\n\r\n";
    let mut clients = [fixture.connect().await, fixture.connect().await];
    clients[0].write_all(head.as_bytes()).await.unwrap();
    read_until(&mut clients[0], "hel").await;
    clients[1].write_all(format!("{head}body").as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    clients[0].write_all(b"body").await.unwrap();
    let end = uploads.recv().await.unwrap();
    let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    let expected = RevisionQueueMetrics { has_ready_pod: true, waiting: 1, at_pods: 1 };
    assert_eq!(served.queue_metrics(), expected, "the response goes on");
    end.send(()).unwrap();
    assert_eq!(read_rest(&mut clients[0]).await, "lo");
    uploads.recv().await.unwrap().send(()).unwrap();
    assert!(read_rest(&mut clients[1]).await.ends_with("hello"));
}

#[tokio::test]
async fn each_request_of_a_burst_from_zero_gets_a_response() {
    let mut fixture = ActivatorFixture::new().await;
    set_limit(&mut fixture, 1, AppProtocol::Http1);
    let fixture_ref = &fixture;
    let asked = join_all((0..100).map(|_| async {
        let mut stream = fixture_ref.connect().await;
        stream.write_all(GET.as_bytes()).await.unwrap();
        stream
    }))
    .await;
    fixture.wait_for_queued(100).await;
    let mut most = Vec::new();
    for number in 0..10 {
        let (pod, seen) = start_single_threaded_pod().await;
        fixture.add_ready_pod(&format!("p{number}"), pod);
        most.push(seen);
    }
    for mut stream in asked {
        let response = harness::read_rest(&mut stream).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    }
    assert_eq!(most.iter().map(|it| it.load(Ordering::SeqCst)).collect::<Vec<_>>(), [1; 10]);
    assert_eq!(fixture.waiting_totals(), (100, 100));
}
