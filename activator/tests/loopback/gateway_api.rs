//! Requests from outside by rules of the Gateway API: hosts, backends, headers and redirects.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, num::NonZeroU32, time::Duration};

use common::{
    fixtures,
    wire::{
        AppProtocol, HeaderChanges, HttpRule, NamespacedName, PathMatch, PathModifier, PathPrefix,
        PlainBackend, RequestRedirect, RouteBackend, RuleTimeouts, UrlRewrite,
    },
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

use crate::{
    h2c::{self, FakeHttp2Pod, Http2TestClient},
    harness::{
        ActivatorFixture, FakeHttp1Pod, OK, PausedClock, read_head, read_rest, read_until, service,
        start_pod, start_pod_with,
    },
};

/// Response with a header that a rule removes.
const OTHER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-inner: 1\r\n\r\nother";

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

fn prefix(path: &str) -> PathMatch {
    PathMatch::Prefix(PathPrefix::parse(path).unwrap())
}

/// Returns a rule for a prefix with these backends, all of the same weight.
fn rule(path: &str, targets: Vec<RouteBackend>) -> HttpRule {
    let backends = targets.into_iter().map(fixtures::backend).collect();
    HttpRule { backends, ..fixtures::http_rule(prefix(path)) }
}

fn plain(name: &str, address: SocketAddr) -> RouteBackend {
    let name = NamespacedName::new("default", name);
    RouteBackend::Plain(PlainBackend { name, address, protocol: AppProtocol::Http1 })
}

fn set_host(fixture: &mut ActivatorFixture, key: &str, rules: Vec<HttpRule>) {
    let entry = fixtures::gateway_host(key, rules);
    fixture.apply_change(|table| drop(table.gateway_hosts.insert(entry.key.clone(), entry)));
}

fn get_request(host: &str, path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n")
}

async fn get(fixture: &ActivatorFixture, host: &str, path: &str, fields: &str) -> String {
    fixture.exchange_at(fixture.outside, &get_request(host, path, fields)).await
}

async fn start() -> (ActivatorFixture, FakeHttp1Pod, FakeHttp1Pod) {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    (fixture, pod, start_pod(OTHER, Duration::ZERO).await)
}

#[tokio::test]
async fn a_rule_leads_to_a_service_or_to_a_service_of_the_cluster() {
    let (mut fixture, pod, other) = start().await;
    let missing = RouteBackend::Service(NamespacedName::new("default", "missing"));
    let rules = vec![
        rule("/plain", vec![plain("other:80", other.address)]),
        rule("/missing", vec![missing]),
        rule("/unresolved", vec![RouteBackend::Unresolved]),
        rule("/none", Vec::new()),
        rule("/a", vec![RouteBackend::Service(service())]),
    ];
    set_host(&mut fixture, "http://*.example.test", rules);
    for (host, path, expected) in [
        ("a.b.example.test", "/plain/x", "200"),
        ("A.example.test:80", "/a?b", "200"),
        ("a.example.test", "/plain/../a", "400"),
        ("a.example.test", "/missing", "503"),
        ("a.example.test", "/unresolved", "500"),
        ("a.example.test", "/none", "500"),
        ("a.example.test", "/b", "404"),
        ("example.test", "/a", "404"),
    ] {
        let response = get(&fixture, host, path, "").await;
        assert_eq!(status(&response), expected, "{host}{path}: {response}");
    }
    assert_eq!((pod.requests(), other.requests()), (1, 1));
    let inside = fixture.exchange_at(
        fixture.inside,
        "GET /a HTTP/1.1\r\nhost: a.example.test\r\nconnection: close\r\n\r\n",
    );
    assert_eq!(status(&inside.await), "404", "rules are for requests from outside");
    fixture.apply_change(|table| table.gateway_hosts.clear());
    assert_eq!(status(&get(&fixture, "a.example.test", "/a", "").await), "404");
    // As the housekeeping does: the connections to the Service would stay open without it.
    fixture.activator.forwarder.routes.drop_unused_plain_services();
    assert!(fixture.activator.forwarder.routes.plain_revisions().is_empty());
}

#[tokio::test]
async fn a_service_of_the_cluster_keeps_its_connection_when_its_host_changes() {
    let (mut fixture, _pod, other) = start().await;
    for path in ["/a", "/b", "/c"] {
        let rules = vec![rule(path, vec![plain("other:80", other.address)])];
        set_host(&mut fixture, "http://*", rules);
        assert_eq!(status(&get(&fixture, "any.test", path, "").await), "200");
    }
    assert_eq!((other.requests(), other.connections()), (3, 1));
    assert_eq!(fixture.activator.forwarder.routes.plain_revisions().len(), 1);
}

#[tokio::test]
async fn weights_share_requests_between_backends() {
    let (mut fixture, pod, other) = start().await;
    let mut shared =
        rule("/", vec![RouteBackend::Service(service()), plain("other:80", other.address)]);
    shared.backends[1].weight = NonZeroU32::new(3).unwrap();
    set_host(&mut fixture, "http://*", vec![shared]);
    for _ in 0..400 {
        assert_eq!(status(&get(&fixture, "any.test", "/", "").await), "200");
    }
    assert_eq!(pod.requests() + other.requests(), 400);
    // Binomial with 100 ± 8.7: eight standard deviations.
    assert!((30..170).contains(&pod.requests()), "{}", pod.requests());
}

/// Gateways take over no host that another object has, whatever they listen to.
#[tokio::test]
async fn hosts_of_routes_and_domain_mappings_stay_with_them() {
    let (mut fixture, pod, other) = start().await;
    let to_other = || vec![rule("/", vec![plain("other:80", other.address)])];
    let mapped = [("a.test", "/a"), ("*.b.test", "/")];
    fixture.set_mapped_domains(mapped.map(|(host, it)| fixtures::ruled_domain(host, it)).into());
    for key in ["http://hello.default.example.com", "http://a.test", "http://x.b.test", "http://*"]
    {
        set_host(&mut fixture, key, to_other());
    }
    for (host, path, expected) in [
        ("hello.default.example.com", "/", "hello"),
        ("a.test", "/a", "hello"),
        // The wildcard of the mapping goes before that of the Gateway, and behind an exact host.
        ("y.b.test", "/", "hello"),
        ("x.b.test", "/", "other"),
        ("c.test", "/", "other"),
    ] {
        let response = get(&fixture, host, path, "").await;
        assert!(response.ends_with(expected), "{host}: {response}");
    }
    assert_eq!(status(&get(&fixture, "a.test", "/b", "").await), "404");
    assert_eq!((pod.requests(), other.requests()), (3, 2));
}

#[tokio::test]
async fn headers_are_changed_both_ways() {
    let (mut fixture, _pod, other) = start().await;
    let pair = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let request_headers = HeaderChanges {
        set: pair("x-set", "rule"),
        add: pair("x-add", "rule"),
        remove: vec!["x-gone".into()],
    };
    let response_headers =
        HeaderChanges { set: pair("x-outer", "2"), add: vec![], remove: vec!["x-inner".into()] };
    let targets = vec![plain("other:80", other.address)];
    let changed = HttpRule { request_headers, response_headers, ..rule("/", targets) };
    set_host(&mut fixture, "http://*", vec![changed]);
    let fields = "x-set: client\r\nx-add: client\r\nx-gone: client\r\n";
    let response = get(&fixture, "any.test", "/", fields).await;
    assert!(response.contains("x-outer: 2\r\n") && !response.contains("x-inner"), "{response}");
    let head = other.heads();
    for line in ["x-set: rule\r\n", "x-add: client\r\n", "x-add: rule\r\n"] {
        assert!(head.contains(line), "{line}: {head}");
    }
    assert!(!head.contains("x-set: client") && !head.contains("x-gone"), "{head}");
}

#[tokio::test]
async fn a_backend_has_changes_of_headers_of_its_own() {
    let (mut fixture, pod, other) = start().await;
    let pair = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let set = |value: &str| HeaderChanges { set: pair("x-backend", value), ..Default::default() };
    let targets = vec![RouteBackend::Service(service()), plain("other:80", other.address)];
    let mut shared = HttpRule {
        request_headers: set("rule"),
        response_headers: HeaderChanges { add: pair("x-inner", "2"), ..Default::default() },
        ..rule("/", targets)
    };
    shared.backends[1].request_headers = set("other");
    shared.backends[1].response_headers =
        HeaderChanges { remove: vec!["x-inner".into()], ..Default::default() };
    set_host(&mut fixture, "http://*", vec![shared]);
    // Each of them is missed with a probability of 2^-40.
    for _ in 0..40 {
        let response = get(&fixture, "any.test", "/", "").await;
        // What the backend removes is gone before the rule adds its own.
        assert!(response.contains("x-inner: 2\r\n"), "{response}");
        assert!(!response.contains("x-inner: 1\r\n"), "{response}");
    }
    assert!(pod.requests() > 0 && other.requests() > 0);
    for (heads, own) in [(pod.heads(), "rule"), (other.heads(), "other")] {
        let line = format!("x-backend: {own}\r\n");
        assert_eq!(heads.matches("x-backend: ").count(), heads.matches(&line).count(), "{heads}");
        assert!(heads.contains(&line), "{heads}");
    }
}

#[tokio::test]
async fn a_redirect_keeps_what_it_does_not_name() {
    let (mut fixture, pod, _other) = start().await;
    let redirected = |path: &str, redirect: RequestRedirect| HttpRule {
        redirect: Some(redirect),
        ..rule(path, Vec::new())
    };
    let plain = RequestRedirect { is_https: None, host: None, port: None, path: None, status: 302 };
    let host = Some("b.test".to_owned());
    let port = std::num::NonZeroU16::new;
    let mut rules = vec![
        redirected("/host", RequestRedirect { host: host.clone(), ..plain.clone() }),
        redirected(
            "/scheme",
            RequestRedirect { is_https: Some(true), status: 301, ..plain.clone() },
        ),
        redirected("/port", RequestRedirect { port: port(8080), ..plain.clone() }),
        redirected(
            "/usual",
            RequestRedirect { is_https: Some(true), port: port(443), host, ..plain.clone() },
        ),
        redirected(
            "/full",
            RequestRedirect { path: PathModifier::parse_full_path("/whole"), ..plain.clone() },
        ),
        redirected(
            "/old",
            RequestRedirect { path: PathModifier::parse_prefix("/new"), status: 308, ..plain },
        ),
    ];
    // Header filters of a rule change the redirect itself, since no backend responds.
    let cached = vec![("cache-control".to_owned(), "max-age=60".to_owned())];
    let response_headers = HeaderChanges { set: cached, ..HeaderChanges::default() };
    rules[1].response_headers = response_headers;
    set_host(&mut fixture, "http://*", rules);
    for (path, code, location) in [
        ("/host/x?y=%20", "302", "http://b.test/host/x?y=%20"),
        ("/scheme", "301", "https://a.test/scheme"),
        ("/port", "302", "http://a.test:8080/port"),
        ("/usual", "302", "https://b.test/usual"),
        ("/full/path?y=1", "302", "http://a.test/whole?y=1"),
        ("/old/lemon?y=1", "308", "http://a.test/new/lemon?y=1"),
        ("/old", "308", "http://a.test/new"),
    ] {
        let response = get(&fixture, "A.test:80", path, "").await;
        assert_eq!(status(&response), code, "{path}");
        assert!(response.contains(&format!("location: {location}\r\n")), "{path}: {response}");
        let is_cached = response.contains("cache-control: max-age=60\r\n");
        assert_eq!(is_cached, path == "/scheme", "{path}: {response}");
    }
    assert_eq!(pod.requests(), 0);
}

#[tokio::test]
async fn a_backend_receives_the_host_and_path_that_its_rule_states() {
    let (mut fixture, _pod, other) = start().await;
    let rewritten = |path: &str, host: Option<&str>, modifier: Option<PathModifier>| HttpRule {
        rewrite: Some(UrlRewrite { host: host.map(Into::into), path: modifier }),
        ..rule(path, vec![plain("other:80", other.address)])
    };
    let rules = vec![
        rewritten("/host", Some("one.test"), None),
        rewritten("/full", None, PathModifier::parse_full_path("/whole")),
        rewritten("/prefix/one", Some("one.test"), PathModifier::parse_prefix("/one")),
        rewritten("/strip", None, PathModifier::parse_prefix("/")),
    ];
    set_host(&mut fixture, "http://*", rules);
    for (path, host, target) in [
        ("/host/x?y", "one.test", "/host/x?y"),
        ("/full/a/b?y=%20", "any.test", "/whole?y=%20"),
        ("/prefix/one/two", "one.test", "/one/two"),
        ("/strip", "any.test", "/"),
        // The target of this one is no URI, and is kept beside the one that hyper has read.
        ("/strip/three/?q=\"x\"", "any.test", "/three/?q=\"x\""),
    ] {
        let response = get(&fixture, "any.test", path, "").await;
        assert_eq!(status(&response), "200", "{path}: {response}");
        let heads = other.heads();
        let last = heads.rsplit("GET ").next().unwrap();
        assert!(last.starts_with(&format!("{target} HTTP/1.1\r\n")), "{path}: {last}");
        assert!(last.contains(&format!("host: {host}\r\n")), "{path}: {last}");
        assert!(last.contains("x-forwarded-host: any.test\r\n"), "{path}: {last}");
        assert!(!last.contains("k-original-host"), "{path}: {last}");
    }
    let requests = other.requests();
    for path in ["/strip//evil.test/", "/prefix/one/../two"] {
        assert_eq!(status(&get(&fixture, "any.test", path, "").await), "400", "{path}");
    }
    assert_eq!(other.requests(), requests);
}

/// Returns a rule for a prefix with these timeouts in milliseconds, which leads to the pod at this address.
fn limited(
    path: &str,
    request: Option<u64>,
    backend_request: Option<u64>,
    address: SocketAddr,
) -> HttpRule {
    let timeouts = RuleTimeouts {
        request: request.map(Duration::from_millis),
        backend_request: backend_request.map(Duration::from_millis),
    };
    HttpRule { timeouts, ..rule(path, vec![plain("limited:80", address)]) }
}

#[tokio::test]
async fn a_rule_limits_the_time_of_a_request_and_of_each_exchange() {
    const HOUR: Option<u64> = Some(3_600_000);
    let (mut fixture, _pod, other) = start().await;
    let silent = start_pod(OK, Duration::from_secs(7200)).await;
    let rules = vec![
        limited("/request", Some(50), HOUR, silent.address),
        limited("/backend", HOUR, Some(50), silent.address),
        limited("/long", HOUR, HOUR, other.address),
    ];
    set_host(&mut fixture, "http://*", rules);
    for (path, expected) in [("/request", "504"), ("/backend", "504"), ("/long", "200")] {
        let response = get(&fixture, "any.test", path, "").await;
        assert_eq!(status(&response), expected, "{path}: {response}");
        let is_timeout = response.ends_with("activator request timeout");
        assert_eq!(is_timeout, expected == "504", "{path}: {response}");
    }
}

#[tokio::test]
async fn a_response_that_has_begun_is_cut_off_at_the_timeout_of_its_rule() {
    const LIMIT_MS: u64 = 1000;
    let (mut fixture, _pod, _other) = start().await;
    let stalling = start_pod_with(|mut stream, _| async move {
        read_head(&mut stream).await;
        let begun = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegun\r\n";
        stream.write_all(begun.as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    });
    let address = stalling.await;
    let rules = vec![
        limited("/request", Some(LIMIT_MS), None, address),
        limited("/backend", None, Some(LIMIT_MS), address),
    ];
    set_host(&mut fixture, "http://*", rules);
    for path in ["/request", "/backend"] {
        // A busy machine may need longer than the timeout before the response begins.
        let clock = PausedClock::start_paused();
        let mut client = TcpStream::connect(fixture.outside).await.unwrap();
        client.write_all(get_request("any.test", path, "").as_bytes()).await.unwrap();
        let mut response = read_until(&mut client, "5\r\nbegun\r\n").await;
        clock.advance(Duration::from_millis(LIMIT_MS + 1)).await;
        response += &read_rest(&mut client).await;
        assert_eq!(status(&response), "200", "{path}: {response}");
        // Without the last chunk, clients know that the response is not whole.
        assert!(response.ends_with("5\r\nbegun\r\n"), "{path}: {response}");
    }
}

/// Returns a rule of a GRPCRoute that leads to a Service with HTTP/2.
fn calls(path: PathMatch, name: &str, address: SocketAddr) -> HttpRule {
    let name = NamespacedName::new("default", name);
    let target = RouteBackend::Plain(PlainBackend { name, address, protocol: AppProtocol::H2c });
    HttpRule { is_grpc: true, path, ..rule("/", vec![target]) }
}

#[tokio::test]
async fn calls_of_grpc_go_by_service_and_method_over_http2() {
    let mut fixture = ActivatorFixture::new().await;
    let buy = FakeHttp2Pod::start(h2c::echo).await;
    let shop = FakeHttp2Pod::start(h2c::echo).await;
    let mut rules = vec![
        calls(PathMatch::parse_exact("/a.Shop/Buy").unwrap(), "buy:80", buy.address),
        calls(prefix("/a.Shop"), "shop:80", shop.address),
        HttpRule { is_grpc: true, ..rule("/b.Shop", vec![RouteBackend::Unresolved]) },
    ];
    let pair = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    rules[0].request_headers = HeaderChanges { set: pair("x-set", "1"), ..Default::default() };
    rules[0].response_headers = HeaderChanges { set: pair("x-outer", "2"), ..Default::default() };
    rules[1].headers = pair("version", "2");
    set_host(&mut fixture, "http://calls.test", rules);
    let client = Http2TestClient::connect_to(fixture.outside).await;
    for (method, version, code) in [
        ("/a.Shop/Buy", "1", "0"),
        ("/a.Shop/Sell", "2", "0"),
        // UNIMPLEMENTED, and UNAVAILABLE at the end.
        ("/a.Shop/Sell", "1", "12"),
        ("/c.Shop/Buy", "2", "12"),
        ("/b.Shop/Buy", "1", "14"),
    ] {
        let call = http::Request::post(format!("http://calls.test{method}"));
        let call = call.header("content-type", "application/grpc").header("te", "trailers");
        let message = "\0\0\0\0\u{5}hello";
        let response = client.send_request(call.header("version", version), &[message]);
        let response = response.await.unwrap();
        assert_eq!(response.head.status().as_u16(), 200, "{method} {version}");
        let headers = response.head.headers();
        let in_head = headers.get("grpc-status").map(|it| it.to_str().unwrap());
        let found = (&*response.body, in_head, response.trailer("grpc-status"));
        let expected =
            if code == "0" { (message, None, Some(code)) } else { ("", Some(code), None) };
        assert_eq!(found, expected, "{method} {version}");
        let is_changed = headers.contains_key("x-outer");
        assert_eq!(is_changed, method == "/a.Shop/Buy", "{method}");
    }
    assert_eq!((buy.requests(), shop.requests()), (1, 1));
    let heads = buy.request_heads();
    assert_eq!(heads[0].uri.to_string(), "http://calls.test/a.Shop/Buy");
    assert_eq!(heads[0].headers["x-set"], "1");
    assert_eq!(heads[0].headers["te"], "trailers");
}

/// With another protocol such a response is cut off, since its end would be taken for that of the whole response.
#[tokio::test]
async fn a_call_that_has_begun_ends_with_a_status_at_the_timeout_of_its_rule() {
    const LIMIT: Duration = Duration::from_secs(1);
    let mut fixture = ActivatorFixture::new().await;
    let pod = FakeHttp2Pod::start(h2c::start_then_stall).await;
    for timeouts in [
        RuleTimeouts { request: Some(LIMIT), backend_request: None },
        RuleTimeouts { request: None, backend_request: Some(LIMIT) },
    ] {
        let rule = HttpRule { timeouts, ..calls(prefix("/"), "stalling:80", pod.address) };
        set_host(&mut fixture, "http://calls.test", vec![rule]);
        // A busy machine may need longer than the timeout before the response begins.
        let clock = PausedClock::start_paused();
        let client = Http2TestClient::connect_to(fixture.outside).await;
        let call = http::Request::post("http://calls.test/a.Shop/Buy");
        let call = call.header("content-type", "application/grpc").header("te", "trailers");
        let mut response = client.start_call(call).await.response_head().await;
        assert_eq!(response.next().await.unwrap(), "begun", "{timeouts:?}");
        clock.advance(LIMIT + Duration::from_millis(1)).await;
        assert_eq!(response.trailers().await["grpc-status"], "4", "{timeouts:?}");
    }
}

/// A change of one route would else close the connections of the other one.
#[tokio::test]
async fn one_port_may_be_a_backend_in_two_protocols() {
    let (mut fixture, _pod, other) = start().await;
    for _ in 0..2 {
        let web = vec![rule("/", vec![plain("other:80", other.address)])];
        set_host(&mut fixture, "http://web.test", web);
        let calls = vec![calls(prefix("/"), "other:80", other.address)];
        set_host(&mut fixture, "http://calls.test", calls);
        assert_eq!(status(&get(&fixture, "web.test", "/", "").await), "200");
    }
    assert_eq!(fixture.activator.forwarder.routes.plain_revisions().len(), 2);
    assert_eq!((other.requests(), other.connections()), (2, 1));
}
