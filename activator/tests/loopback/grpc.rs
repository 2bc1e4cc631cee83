//! Calls of gRPC that get no response from a pod get a status of gRPC; other requests get a code of HTTP.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use common::wire::{AppProtocol, RevisionEntry};
use http::{Request, request};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, trace_service_client::TraceServiceClient,
};
use tonic::{Code, Status, transport::Endpoint};

use crate::{
    h2c::{self, FakeHttp2Pod, Http2TestClient},
    harness::{ActivatorFixture, PausedClock, revision},
};

/// Host of the service.
const HOST: &str = "hello.default.example.com";
/// Host that no service has.
const NOBODY: &str = "nobody.test";
/// Text of the failure of a request for that host.
const NO_SERVICE: &str = "no service for \"nobody.test\"";

fn change_revision(fixture: &mut ActivatorFixture, change: impl FnOnce(&mut RevisionEntry)) {
    fixture.apply_change(|table| change(table.revisions.get_mut(&revision()).unwrap()));
}

/// Builder of a call by a protocol of gRPC.
fn call(host: &str, content_type: &str) -> request::Builder {
    Request::post(format!("http://{host}/pkg.Service/Method")).header("content-type", content_type)
}

/// Calls a method of a host by a client that tonic has generated.
async fn call_by_tonic(fixture: &ActivatorFixture, host: &str) -> Status {
    let endpoint = Endpoint::from_shared(format!("http://{}", fixture.outside)).unwrap();
    let origin = format!("http://{host}").parse().unwrap();
    let channel = endpoint.origin(origin).connect().await.unwrap();
    let message = ExportTraceServiceRequest::default();
    TraceServiceClient::new(channel).export(message).await.unwrap_err()
}

#[tokio::test]
async fn a_client_of_grpc_reads_code_and_text() {
    let mut fixture = ActivatorFixture::new().await;
    let status = call_by_tonic(&fixture, NOBODY).await;
    assert_eq!((status.code(), status.message()), (Code::Unimplemented, NO_SERVICE));
    change_revision(&mut fixture, |it| it.timeout = Duration::from_millis(50));
    let status = call_by_tonic(&fixture, HOST).await;
    let expected = (Code::DeadlineExceeded, "activator request timeout");
    assert_eq!((status.code(), status.message()), expected);
}

#[tokio::test]
async fn calls_of_grpc_web_get_their_status_in_the_head_over_both_versions() {
    let fixture = ActivatorFixture::new().await;
    let message = "no%20service%20for%20%22nobody.test%22";
    for (asked, answered) in [
        ("application/grpc-web", "application/grpc-web"),
        ("application/grpc-web+proto", "application/grpc-web"),
        ("application/grpc-web-text", "application/grpc-web-text"),
    ] {
        let client = Http2TestClient::connect_to(fixture.outside).await;
        let response = client.send_request(call(NOBODY, asked), &[]).await.unwrap();
        let headers = response.head.headers();
        let field = |name: &str| headers[name].to_str().unwrap();
        let found = ["content-type", "grpc-status", "grpc-message"].map(field);
        assert_eq!(found, [answered, "12", message], "{asked}");
        assert_eq!((response.head.status().as_u16(), &*response.body), (200, ""), "{asked}");

        let request = format!(
            "POST /pkg.Service/Method HTTP/1.1\r\nhost: {NOBODY}\r\ncontent-type: {asked}\r\n\
             content-length: 0\r\nconnection: close\r\n\r\n"
        );
        let response = fixture.exchange_at(fixture.outside, &request).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        for line in [
            format!("content-type: {answered}\r\n"),
            "grpc-status: 12\r\n".to_owned(),
            format!("grpc-message: {message}\r\n"),
        ] {
            assert!(response.contains(&line), "{line} in {response}");
        }
        assert!(response.ends_with("\r\n\r\n"), "{response}");
    }
}

#[tokio::test]
async fn other_requests_get_code_and_text_of_http() {
    let fixture = ActivatorFixture::new().await;
    let client = Http2TestClient::connect_to(fixture.outside).await;
    for (method, content_type) in [
        ("GET", "application/grpc"),
        ("POST", "application/grpcs"),
        ("POST", "application/json"),
        ("POST", "text/plain"),
    ] {
        let request = call(NOBODY, content_type).method(method);
        let response = client.send_request(request, &[]).await.unwrap();
        let found = (response.head.status().as_u16(), &*response.body);
        assert_eq!(found, (404, NO_SERVICE), "{method} {content_type}");
        let headers = response.head.headers();
        assert_eq!(headers["content-type"], "text/plain; charset=utf-8");
        assert!(!headers.contains_key("grpc-status"), "{method} {content_type}");
    }
    // gRPC needs HTTP/2: over HTTP/1.1 it is another proxy, which has to translate a code of HTTP.
    let request = format!(
        "POST / HTTP/1.1\r\nhost: {NOBODY}\r\ncontent-type: application/grpc\r\n\
         content-length: 0\r\nconnection: close\r\n\r\n"
    );
    let response = fixture.exchange_at(fixture.outside, &request).await;
    assert!(response.starts_with("HTTP/1.1 404 ") && response.ends_with(NO_SERVICE), "{response}");
    assert!(!response.contains("grpc-status"), "{response}");
}

#[tokio::test]
async fn a_call_whose_head_is_refused_gets_a_status() {
    let fixture = ActivatorFixture::with(|config| config.max_client_bytes = Some(30_000)).await;
    let client = Http2TestClient::connect(fixture.port).await;
    let long = call(HOST, "application/grpc").header("x", "x".repeat(40_000));
    let response = client.send_request(long, &[]).await.unwrap();
    let headers = response.head.headers();
    assert_eq!((response.head.status().as_u16(), &*response.body), (200, ""));
    assert_eq!(headers["grpc-status"], "14");
    assert_eq!(headers["grpc-message"], "too%20many%20bytes%20of%20requests%20are%20held");
}

#[tokio::test]
async fn a_call_whose_response_had_begun_ends_with_a_status() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = FakeHttp2Pod::start(h2c::start_then_stall).await;
    fixture.add_ready_pod("p", pod.address);
    change_revision(&mut fixture, |it| {
        it.protocol = AppProtocol::H2c;
        it.idle_timeout = Some(Duration::from_millis(50));
    });
    // A busy machine may need longer than the timeout before the response begins.
    let clock = PausedClock::start_paused();
    let client = Http2TestClient::connect(fixture.port).await;
    let started = client.start_call(call(HOST, "application/grpc"));
    let mut response = started.await.response_head().await;
    assert_eq!(response.next().await.unwrap(), "begun");
    clock.advance(Duration::from_millis(51)).await;
    let trailers = response.trailers().await;
    assert_eq!(trailers["grpc-status"], "4");
    assert_eq!(trailers["grpc-message"], "activator%20request%20timeout");
}
