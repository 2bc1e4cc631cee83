//! Responses that Knative's data plane gives in place of an app, in both versions of HTTP.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use common::wire::{AllowedSources, GatewayRules, RevisionEntry};
use futures::future::{BoxFuture, join_all};
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tonic::{Code, Status};

use crate::{
    h2c::{Http2TestClient, Http2TestResponse},
    harness::{
        self, ActivatorFixture, GET, LONG, OK, PausedClock, read_head, read_rest, read_until,
        revision, service, start_pod, start_pod_with,
    },
};

/// Preparation of the fixture before the request.
type FailureCaseSetup = fn(&mut ActivatorFixture) -> BoxFuture<'_, ()>;

struct FailureResponseCase {
    trigger: &'static str,
    setup: FailureCaseSetup,
    /// Header fields of the request.
    fields: &'static [(&'static str, &'static str)],
    status: u16,
    /// Body of the response; only its beginning if it ends with a space.
    body: &'static str,
}

const HOST: &str = "hello.default.example.com";

fn change_revision(fixture: &mut ActivatorFixture, change: impl FnOnce(&mut RevisionEntry)) {
    fixture.apply_change(|table| change(table.revisions.get_mut(&revision()).unwrap()));
}

fn no_setup(_fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(async {})
}

/// Adds a pod that accepts requests and never responds.
fn add_silent_pod(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let pod = start_pod(OK, LONG * 100).await;
        fixture.add_ready_pod("p", pod.address);
    })
}

fn add_ready_pod(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let pod = start_pod(OK, Duration::ZERO).await;
        fixture.add_ready_pod("p", pod.address);
    })
}

/// Puts one request at the pod and as many into the queue as it accepts. These are `max_waiting`, which is 3, and ten
/// for the pod's limit of 1.
fn fill_queue(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(async {
        change_revision(fixture, |it| it.container_concurrency = 1);
        add_silent_pod(fixture).await;
        for mut stream in join_all((0..14).map(|_| fixture.connect())).await {
            stream.write_all(GET.as_bytes()).await.unwrap();
            // The client stays until the end of the test.
            std::mem::forget(stream);
        }
        fixture.wait_for_queued(13).await;
    })
}

fn add_refusing_pod(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(async {
        let gone = SocketAddr::from(([127, 0, 0, 1], harness::unused_port()));
        fixture.add_ready_pod("gone", gone);
    })
}

/// Adds a pod that closes when it has read a request.
fn add_closing_pod(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(add_pod_that_sends(fixture, b""))
}

/// Adds a pod that switches protocols although no request asks for it.
fn add_switching_pod(fixture: &mut ActivatorFixture) -> BoxFuture<'_, ()> {
    Box::pin(add_pod_that_sends(fixture, b"HTTP/1.1 101 Switching Protocols\r\n\r\n"))
}

/// Adds a pod that sends `response` when it has read a request, and closes.
async fn add_pod_that_sends(fixture: &mut ActivatorFixture, response: &'static [u8]) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.add_ready_pod("p", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            harness::read_head(&mut stream).await;
            stream.write_all(response).await.unwrap();
        }
    });
}

const SOON: Duration = Duration::from_millis(50);

const ROWS: &[FailureResponseCase] = &[
    FailureResponseCase {
        trigger: "ten times the limit wait for each pod",
        setup: fill_queue,
        fields: &[],
        status: 503,
        body: "pending request queue full",
    },
    FailureResponseCase {
        trigger: "timeoutSeconds while it waits",
        setup: |fixture| {
            change_revision(fixture, |it| it.timeout = SOON);
            no_setup(fixture)
        },
        fields: &[],
        status: 504,
        body: "activator request timeout",
    },
    FailureResponseCase {
        trigger: "timeoutSeconds at a pod",
        setup: |fixture| {
            change_revision(fixture, |it| it.timeout = SOON);
            add_silent_pod(fixture)
        },
        fields: &[],
        status: 504,
        body: "activator request timeout",
    },
    FailureResponseCase {
        trigger: "responseStartTimeoutSeconds",
        setup: |fixture| {
            change_revision(fixture, |it| it.response_start_timeout = Some(SOON));
            add_silent_pod(fixture)
        },
        fields: &[],
        status: 504,
        body: "activator request timeout",
    },
    FailureResponseCase {
        trigger: "idleTimeoutSeconds before the first byte",
        setup: |fixture| {
            change_revision(fixture, |it| it.idle_timeout = Some(SOON));
            add_silent_pod(fixture)
        },
        fields: &[],
        status: 504,
        body: "activator request timeout",
    },
    FailureResponseCase {
        trigger: "a Revision that is unknown",
        setup: |fixture| {
            fixture.apply_change(|table| table.revisions.clear());
            no_setup(fixture)
        },
        fields: &[],
        status: 404,
        body: "Error getting active endpoint: ",
    },
    FailureResponseCase {
        trigger: "no connection to a pod",
        setup: add_refusing_pod,
        fields: &[],
        status: 502,
        body: "cannot connect to pod at ",
    },
    FailureResponseCase {
        trigger: "an exchange that breaks",
        setup: add_closing_pod,
        fields: &[],
        status: 502,
        body: "pod at ",
    },
    FailureResponseCase {
        trigger: "a switch of protocols that was not asked for",
        setup: add_switching_pod,
        fields: &[],
        status: 502,
        body: "pod at ",
    },
    FailureResponseCase {
        trigger: "a kubelet's probe",
        setup: no_setup,
        fields: &[("user-agent", "kube-probe/1.35")],
        status: 200,
        body: "",
    },
    FailureResponseCase {
        trigger: "a kubelet's probe while draining",
        setup: |fixture| {
            fixture.activator.forwarder.reconnect_clients.set();
            no_setup(fixture)
        },
        fields: &[("user-agent", "kube-probe/1.35")],
        status: 503,
        body: "shutting down",
    },
    FailureResponseCase {
        trigger: "probe for queue, with a pod",
        setup: add_ready_pod,
        fields: &[("k-network-probe", "queue")],
        status: 200,
        body: "queue",
    },
    FailureResponseCase {
        trigger: "probe for queue, without",
        setup: no_setup,
        fields: &[("k-network-probe", "queue")],
        status: 503,
        body: "",
    },
    FailureResponseCase {
        trigger: "probe for activator",
        setup: no_setup,
        fields: &[("k-network-probe", "activator")],
        status: 200,
        body: "activator",
    },
    FailureResponseCase {
        trigger: "probe with a hash",
        setup: no_setup,
        fields: &[("k-network-probe", "probe"), ("k-network-hash", "abc")],
        status: 200,
        body: "",
    },
    FailureResponseCase {
        trigger: "probe without a hash",
        setup: no_setup,
        fields: &[("k-network-probe", "probe")],
        status: 400,
        body: "a probe request must contain a non-empty \"K-Network-Hash\" header",
    },
    FailureResponseCase {
        trigger: "a probe of no known kind",
        setup: no_setup,
        fields: &[("k-network-probe", "other")],
        status: 400,
        body: "unexpected probe header value: other",
    },
    FailureResponseCase {
        trigger: "no Revision to serve it",
        setup: |fixture| {
            fixture
                .apply_change(|table| table.services.get_mut(&service()).unwrap().targets.clear());
            no_setup(fixture)
        },
        fields: &[],
        status: 503,
        body: "service default/hello has no Revision to serve it yet",
    },
];

async fn http1(
    address: SocketAddr,
    fixture: &ActivatorFixture,
    fields: &[(&str, &str)],
) -> (u16, String) {
    let fields = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n"));
    let fields = fields.collect::<String>();
    let request = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n{fields}\r\n");
    let response = fixture.exchange_at(address, &request).await;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, "no response"));
    (head.get(9..12).and_then(|it| it.parse().ok()).unwrap_or(0), body.to_owned())
}

async fn http2(address: SocketAddr, fields: &[(&str, &str)]) -> (u16, String) {
    let request = Request::get(format!("http://{HOST}/"));
    let request = fields.iter().fold(request, |it, (name, value)| it.header(*name, *value));
    let response =
        Http2TestClient::connect_to(address).await.send_request(request, &[]).await.unwrap();
    (response.head.status().as_u16(), response.body)
}

async fn call_grpc(address: SocketAddr, fields: &[(&str, &str)]) -> Http2TestResponse {
    let request = Request::post(format!("http://{HOST}/pkg.Service/Method"));
    let request = request.header("content-type", "application/grpc");
    let request = fields.iter().fold(request, |it, (name, value)| it.header(*name, *value));
    Http2TestClient::connect_to(address).await.send_request(request, &[]).await.unwrap()
}

impl FailureResponseCase {
    fn check_body(&self, body: &str) {
        let is_expected = match self.body {
            begun if begun.ends_with(' ') => body.starts_with(begun) && body.len() > begun.len(),
            whole => body == whole,
        };
        assert!(is_expected, "{}: {body}", self.trigger);
    }

    fn check_call(&self, response: &Http2TestResponse) {
        let code = response.head.status().as_u16();
        // A probe of the platform is no call.
        if !self.fields.is_empty() {
            assert_eq!(code, self.status, "{}", self.trigger);
            return self.check_body(&response.body);
        }
        let status = Status::from_header_map(response.head.headers()).expect("a status of gRPC");
        let expected = match self.status {
            404 => Code::Unimplemented,
            502 | 503 => Code::Unavailable,
            504 => Code::DeadlineExceeded,
            other => panic!("{other} in {}", self.trigger),
        };
        let found = (code, response.body.as_str(), status.code());
        assert_eq!(found, (200, "", expected), "{}: {status:?}", self.trigger);
        self.check_body(status.message());
    }
}

#[tokio::test]
async fn a_request_without_an_apps_response_gets_knatives() {
    for row in ROWS {
        let mut fixture = ActivatorFixture::with(|config| config.max_waiting = 3).await;
        (row.setup)(&mut fixture).await;
        let address = SocketAddr::from(([127, 0, 0, 1], fixture.port));
        let (over_http1, over_http2, call) = tokio::join!(
            http1(address, &fixture, row.fields),
            http2(address, row.fields),
            call_grpc(address, row.fields)
        );
        for (status, body) in [over_http1, over_http2] {
            assert_eq!(status, row.status, "{}: {body}", row.trigger);
            row.check_body(&body);
        }
        row.check_call(&call);
    }
}

#[tokio::test]
async fn from_outside_a_probe_is_a_request() {
    for row in ROWS.iter().filter(|row| !row.fields.is_empty()) {
        let mut fixture = ActivatorFixture::new().await;
        add_ready_pod(&mut fixture).await;
        assert_eq!(
            http1(fixture.outside, &fixture, row.fields).await,
            (200, "hello".into()),
            "{}",
            row.trigger
        );
        assert_eq!(
            http2(fixture.outside, row.fields).await,
            (200, "hello".into()),
            "{}",
            row.trigger
        );
    }
}

#[tokio::test]
async fn a_redirected_host_responds_301() {
    let mut fixture = ActivatorFixture::new().await;
    let rules = GatewayRules { redirects_to_https: true, ..GatewayRules::default() };
    fixture.set_gateway_rules(rules);
    assert_eq!(http1(fixture.outside, &fixture, &[]).await.0, 301);
    assert_eq!(http2(fixture.outside, &[]).await.0, 301);
}

#[tokio::test]
async fn a_hash_comes_back() {
    let fixture = ActivatorFixture::new().await;
    let request = Request::get(format!("http://{HOST}/"))
        .header("k-network-probe", "probe")
        .header("k-network-hash", "abc");
    let response =
        Http2TestClient::connect(fixture.port).await.send_request(request, &[]).await.unwrap();
    assert_eq!(response.head.headers()["k-network-hash"], "abc");
}

/// A response that has begun keeps its code; its end depends on the length that it states.
#[tokio::test]
async fn a_timeout_after_the_head_is_appended_to_the_body() {
    const TEXT: &str = "activator request timeout";
    for (head, body, ends) in [
        // No length is stated: the response ends gracefully.
        ("transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "hello", true),
        // The stated length allows more than the text.
        ("content-length: 100\r\n\r\nhello", "hello", false),
        // The text does not fit into the stated length.
        ("content-length: 9\r\n\r\nhello", "hello", false),
    ] {
        for bound in ["whole", "idle"] {
            let mut fixture = ActivatorFixture::new().await;
            change_revision(&mut fixture, |it| match bound {
                "whole" => it.timeout = SOON,
                _ => it.idle_timeout = Some(SOON),
            });
            let pod = start_pod_with(move |mut stream, _| async move {
                read_head(&mut stream).await;
                let begun = format!("HTTP/1.1 200 OK\r\n{head}");
                stream.write_all(begun.as_bytes()).await.unwrap();
                stream.read_u8().await.ok();
            })
            .await;
            fixture.add_ready_pod("p", pod);
            // A busy machine may need longer than the timeout before the response begins.
            let clock = PausedClock::start_paused();
            let mut client = fixture.connect().await;
            client.write_all(GET.as_bytes()).await.unwrap();
            let mut response = read_until(&mut client, body).await;
            clock.advance(SOON + Duration::from_millis(1)).await;
            response += &read_rest(&mut client).await;
            let (head, response_body) = response.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK"), "{bound}: {response}");
            let wanted = match ends {
                true => format!("5\r\n{body}\r\n19\r\n{TEXT}\r\n0\r\n\r\n"),
                false if response.contains("content-length: 100") => format!("{body}{TEXT}"),
                false => body.to_owned(),
            };
            if ends {
                assert!(response_body.starts_with(&wanted), "{bound}: {response_body}");
            } else {
                assert_eq!(response_body, wanted, "{bound}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_a_policy_keeps_out_neither_waits_nor_wakes() {
    let mut fixture = ActivatorFixture::new().await;
    let only = |all: &[IpAddr]| {
        let addresses = all.iter().copied().collect();
        Some(Arc::new(AllowedSources { addresses, ip_blocks: vec![] }))
    };
    change_revision(&mut fixture, |it| it.allowed_sources = only(&[[10, 0, 0, 1].into()]));
    let outside = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n");
    let inside = outside.replace(HOST, "hello.default.svc.cluster.local");
    for (address, request) in [(None, GET), (Some(fixture.inside), inside.as_str())] {
        let address = address.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, fixture.port).into());
        let response = fixture.exchange_at(address, request).await;
        assert!(
            response.starts_with("HTTP/1.1 403 ") && response.contains("127.0.0.1"),
            "{response}"
        );
    }
    assert_eq!(fixture.waiting_totals(), (0, 0), "no request has waited, so nothing is woken");

    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    assert!(fixture.exchange(GET).await.starts_with("HTTP/1.1 403 "), "also while a pod is ready");
    let response = fixture.exchange_at(fixture.outside, &outside).await;
    assert!(
        response.starts_with("HTTP/1.1 200 "),
        "from outside the client's address is not known: {response}"
    );
    change_revision(&mut fixture, |it| it.allowed_sources = only(&[Ipv4Addr::LOCALHOST.into()]));
    assert!(fixture.exchange(GET).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(pod.requests(), 2);
}
