//! Services that a host means at each entrypoint, and the headers that their pods get.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::{
    fixtures,
    wire::{
        GatewayRules, HttpChallenge, MappedDomain, NamespacedName, PathPrefix, PathRule, RouteTag,
        RouteTarget, TagRouting,
    },
};
use http::Request;

use crate::{
    h2c::Http2TestClient,
    harness::{self, ActivatorFixture, FakeHttp1Pod, OK, hello_revision, hello_service, start_pod},
};

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

fn get(host: &str, fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n")
}

fn domain(host: &str, rewrite: Option<&str>) -> MappedDomain {
    MappedDomain { host_rewrite: rewrite.map(Into::into), ..fixtures::mapped_domain(host) }
}

async fn start_awake() -> (ActivatorFixture, FakeHttp1Pod) {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    (fixture, pod)
}

#[tokio::test]
async fn each_entrypoint_routes_its_own_hosts() {
    let (mut fixture, pod) = start_awake().await;
    fixture.set_mapped_domains(vec![domain("shop.example", None)]);
    let port = SocketAddr::from(([127, 0, 0, 1], fixture.port));
    let local = ["hello.default", "hello.default.svc", "hello.default.svc.cluster.local"];
    // The Revision's own Service routes to the inner gateway.
    let own = ["hello-1.default", "hello-1.default.svc", "hello-1.default.svc.cluster.local"];
    let public = ["hello.default.example.com", "shop.example"];
    let mut expected = 0;
    for (address, known, unknown) in [
        (port, [&local[..], &public, &["foreign.example", "10.96.0.7"]].concat(), vec![]),
        (
            fixture.inside,
            [&local[..], &own, &public].concat(),
            vec!["foreign.example", "other.default.svc", "hello-2.default.svc", "hello-1.other"],
        ),
        (
            fixture.outside,
            public.to_vec(),
            [&local[..], &own, &["foreign.example", "hello"]].concat(),
        ),
    ] {
        for host in &known {
            for host in [(*host).to_owned(), format!("{}:8080", host.to_uppercase())] {
                let response = fixture.exchange_at(address, &get(&host, "")).await;
                assert_eq!(status(&response), "200", "{host} at {address}");
                let request = Request::get(format!("http://{host}/"));
                let response = Http2TestClient::connect_to(address)
                    .await
                    .send_request(request, &[])
                    .await
                    .unwrap();
                assert_eq!(response.head.status(), 200, "{host} at {address}");
                expected += 2;
            }
        }
        for host in unknown {
            let response = fixture.exchange_at(address, &get(host, "")).await;
            assert_eq!(status(&response), "404", "{host} at {address}");
        }
    }
    assert_eq!(pod.requests(), expected);
}

#[tokio::test]
async fn a_domain_reaches_its_service_and_goes_with_it() {
    let (mut fixture, pod) = start_awake().await;
    let mapped_domains =
        vec![domain("shop.example", None), domain("old.example", Some("hello.default.svc"))];
    fixture.set_mapped_domains(mapped_domains);
    assert_eq!(
        status(&fixture.exchange_at(fixture.outside, &get("Shop.example", "")).await),
        "200"
    );
    let heads = pod.heads();
    assert!(heads.contains("host: Shop.example\r\n"), "{heads}");
    assert!(heads.contains("x-forwarded-host: Shop.example\r\n"), "{heads}");
    assert!(!heads.contains("k-original-host"), "{heads}");
    pod.heads.lock().unwrap().clear();
    let evil = "k-original-host: evil\r\n";
    assert_eq!(
        status(&fixture.exchange_at(fixture.outside, &get("old.example", evil)).await),
        "200"
    );
    let heads = pod.heads();
    assert!(heads.contains("host: hello.default.svc\r\n"), "{heads}");
    assert!(
        heads.contains("k-original-host: old.example\r\n") && !heads.contains("evil"),
        "{heads}"
    );

    fixture.set_mapped_domains(vec![domain("shop.example", None)]);
    let known = async |host: &str| {
        status(&fixture.exchange_at(fixture.outside, &get(host, "")).await) == "200"
    };
    assert_eq!((known("shop.example").await, known("old.example").await), (true, false));
    fixture.apply_change(|table| table.services.clear());
    let response = fixture.exchange_at(fixture.outside, &get("shop.example", "")).await;
    assert_eq!(status(&response), "404");
}

#[tokio::test]
async fn a_challenge_is_responded_to_before_the_redirect() {
    let (mut fixture, pod) = start_awake().await;
    let redirected = MappedDomain { redirects_to_https: true, ..domain("shop.example", None) };
    let challenge = HttpChallenge {
        host: "shop.example".into(),
        token: "t0k-en_".into(),
        response: "t0k-en_.hash".into(),
    };
    fixture.set_gateway_rules(GatewayRules {
        mapped_domains: vec![redirected],
        challenges: vec![challenge],
        ..GatewayRules::default()
    });
    let ask = async |host: &str, token: &str| {
        let path = format!("/.well-known/acme-challenge/{token}");
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        fixture.exchange_at(fixture.outside, &request).await
    };
    let response = ask("Shop.example:80", "t0k-en_").await;
    assert_eq!(status(&response), "200");
    assert!(response.ends_with("\r\n\r\nt0k-en_.hash"), "{response}");
    // Other tokens and other hosts are no challenges.
    assert_eq!(status(&ask("shop.example", "other").await), "301");
    assert_eq!(status(&ask("hello.default.example.com", "t0k-en_").await), "200");
    assert_eq!(pod.requests(), 1);
    fixture.set_gateway_rules(GatewayRules::default());
    assert_eq!(
        status(&fixture.exchange_at(fixture.outside, &get("shop.example", "")).await),
        "404"
    );
}

#[tokio::test]
async fn a_redirected_host_leads_to_https_from_outside_only() {
    let (mut fixture, pod) = start_awake().await;
    let redirected = MappedDomain { redirects_to_https: true, ..domain("shop.example", None) };
    let mapped_domains = vec![redirected, domain("plain.example", None)];
    fixture.set_gateway_rules(GatewayRules {
        redirects_to_https: true,
        mapped_domains,
        ..GatewayRules::default()
    });
    for (host, to) in [
        ("hello.default.example.com:8080", Some("https://hello.default.example.com/a?b=c")),
        ("Shop.example", Some("https://shop.example/a?b=c")),
        ("plain.example", None),
    ] {
        let response = fixture.exchange_at(fixture.outside, &get(host, "")).await;
        let wanted = if to.is_some() { "301" } else { "200" };
        assert_eq!(status(&response), wanted, "{response}");
        let location = to.is_none_or(|to| response.contains(&format!("location: {to}\r\n")));
        assert!(location, "{response}");
    }
    assert_eq!(status(&fixture.exchange(&get("hello.default", "")).await), "200");
    assert_eq!(pod.requests(), 2);
}

fn ruled_domain(host: &str, prefix: &str, strips_prefix: bool) -> MappedDomain {
    let prefix = PathPrefix::parse(prefix).unwrap();
    let path_rule = Some(PathRule { prefix, strips_prefix });
    MappedDomain { path_rule, ..domain(host, None) }
}

/// Adds the service `api` with one pod. It shares the hosts of these DomainMappings with the service of the fixture.
fn share_hosts(fixture: &mut ActivatorFixture, api: SocketAddr) {
    let (other, second) =
        (NamespacedName::new("default", "api"), NamespacedName::new("default", "api-1"));
    let of_hello =
        vec![ruled_domain("shop.example", "/", false), ruled_domain("*.shop.example", "/", false)];
    let of_api = vec![
        ruled_domain("shop.example", "/api", true),
        ruled_domain("*.shop.example", "/v1", false),
    ];
    fixture.set_mapped_domains(of_hello);
    fixture.apply_change(|table| {
        let mut it = hello_revision();
        it.name = second.clone();
        table.revisions.insert(second.clone(), it);
        let mut pod = harness::pod("api", api, common::wire::RoutingPhase::Ready);
        pod.revision = second.clone();
        table.pods.insert("api".into(), pod);
        let mut it = hello_service(4711);
        it.name = other.clone();
        it.hosts = Vec::new();
        it.targets = vec![RouteTarget { revision: second.clone(), percent: 100 }];
        let rules = GatewayRules { mapped_domains: of_api, ..GatewayRules::default() };
        it.gateway_rules = Some(Box::new(rules));
        table.services.insert(other.clone(), it);
    });
}

/// Request lines in these heads, without the version.
fn request_lines(heads: &str) -> Vec<&str> {
    let lines = heads.lines().filter(|line| line.starts_with("GET "));
    lines.map(|line| line.trim_end_matches(" HTTP/1.1")).collect()
}

#[tokio::test]
async fn the_paths_of_a_host_reach_their_services() {
    let (mut fixture, pod) = start_awake().await;
    let api = start_pod("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\napi", Duration::ZERO).await;
    share_hosts(&mut fixture, api.address);
    let ask = async |fixture: &ActivatorFixture, host: &str, target: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        fixture.exchange_at(fixture.outside, &request).await
    };
    for (host, target, body) in [
        ("shop.example", "/", "hello"),
        ("shop.example", "/apis", "hello"),
        ("shop.example", "/API", "hello"),
        ("Shop.Example:80", "/api", "api"),
        ("shop.example", "/%61pi/x%2Fy?q=/", "api"),
        ("shop.example", "http://shop.example/api/", "api"),
        ("eu.shop.example", "/x", "hello"),
        ("eu.shop.example", "/v1/x", "api"),
    ] {
        let response = ask(&fixture, host, target).await;
        assert!(response.ends_with(body), "{host} {target}: {response}");
    }
    assert_eq!(request_lines(&api.heads()), ["GET /", "GET /x%2Fy?q=/", "GET /", "GET /v1/x"]);
    let before = (pod.requests(), api.requests());
    for (host, target, code) in [
        ("shop.example", "//api", "400"),
        ("shop.example", "/x/../api", "400"),
        ("shop.example", "/x%2F..%2Fapi", "400"),
        ("shop.example", "/api;v=1", "400"),
        ("shop.example", "/api//evil.example", "400"),
        ("shop.example", "/api/\\evil.example", "400"),
        // The quotation mark is encoded for the look-up, and the backslash with it.
        ("shop.example", "/api/\\evil.example?\"", "400"),
        ("a.b.shop.example", "/", "404"),
        ("shop.example.", "/api", "200"),
    ] {
        let response = ask(&fixture, host, target).await;
        assert_eq!(status(&response), code, "{host} {target}: {response}");
    }
    assert_eq!((pod.requests(), api.requests()), (before.0, before.1 + 1));
    // Without the rule of all paths, the host serves those of its prefix only.
    fixture.set_gateway_rules(GatewayRules::default());
    for (target, code) in [("/api/x", "200"), ("/", "404"), ("/apis", "404")] {
        let response = ask(&fixture, "shop.example", target).await;
        assert_eq!(status(&response), code, "{target}: {response}");
    }
}

#[tokio::test]
async fn a_header_chooses_a_tag_where_the_route_says_so() {
    let (mut fixture, pod) = start_awake().await;
    let blue = start_pod("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nblue", Duration::ZERO).await;
    let (tagged, second) =
        (NamespacedName::new("default", "blue-hello"), NamespacedName::new("default", "hello-2"));
    fixture.apply_change(|table| {
        let mut it = hello_revision();
        it.name = second.clone();
        table.revisions.insert(second.clone(), it);
        let mut pod = harness::pod("blue", blue.address, common::wire::RoutingPhase::Ready);
        pod.revision = second.clone();
        table.pods.insert("blue".into(), pod);
        let mut it = hello_service(4711);
        it.name = tagged.clone();
        it.hosts = vec!["blue-hello.default.example.com".into()];
        it.targets = vec![RouteTarget { revision: second.clone(), percent: 100 }];
        let tag_routing = Some(TagRouting::ServeTag("blue".into()));
        it.gateway_rules = Some(Box::new(GatewayRules { tag_routing, ..GatewayRules::default() }));
        table.services.insert(tagged.clone(), it);
    });
    let asked = "knative-serving-tag: blue\r\n";
    let host = "hello.default.example.com";
    let response = fixture.exchange_at(fixture.outside, &get(host, asked)).await;
    assert!(response.ends_with("hello"), "tag routing is off: {response}");
    assert!(!pod.heads().contains("knative-serving-tag"), "{}", pod.heads());

    let tags = vec![RouteTag { name: "blue".into(), service: tagged.clone() }];
    let tag_routing = Some(TagRouting::ChooseTag(tags));
    fixture.set_gateway_rules(GatewayRules { tag_routing, ..GatewayRules::default() });
    let port = SocketAddr::from(([127, 0, 0, 1], fixture.port));
    for address in [fixture.outside, port, fixture.inside] {
        let response = fixture.exchange_at(address, &get(host, asked)).await;
        assert!(response.ends_with("blue"), "{response}");
    }
    let heads = blue.heads();
    assert!(heads.contains(asked) && !heads.contains("knative-serving-default-route"), "{heads}");
    for other in ["knative-serving-tag: green\r\n", ""] {
        pod.heads.lock().unwrap().clear();
        let response = fixture.exchange_at(fixture.outside, &get(host, other)).await;
        assert!(response.ends_with("hello"), "{response}");
        let heads = pod.heads();
        assert!(
            heads.contains("knative-serving-default-route: true\r\n") && heads.contains(other),
            "{heads}"
        );
    }
    blue.heads.lock().unwrap().clear();
    let response =
        fixture.exchange_at(fixture.outside, &get("blue-hello.default.example.com", "")).await;
    assert!(response.ends_with("blue") && blue.heads().contains(asked), "{response}");
}

#[tokio::test]
async fn the_pods_headers_depend_on_the_entrypoint() {
    let (fixture, pod) = start_awake().await;
    let fields = "forwarded: for=evil\r\nx-forwarded-proto: https\r\nx-forwarded-for: 1.2.3.4\r\n\
        knative-serving-revision: other\r\nk-network-probe: queue\r\nk-anything: evil\r\n\
        traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n";
    let host = "hello.default.example.com";
    let response = fixture.exchange_at(fixture.outside, &get(host, fields)).await;
    assert_eq!(status(&response), "200", "no probe from outside: {response}");
    let heads = pod.heads();
    let forwarded = "forwarded: for=127.0.0.1;host=hello.default.example.com;proto=http\r\n";
    assert!(heads.contains(forwarded) && heads.contains("x-forwarded-proto: http\r\n"), "{heads}");
    for gone in ["evil", "1.2.3.4", "knative-serving-revision", "k-network-probe"] {
        assert!(!heads.contains(gone), "{heads}");
    }
    let trace = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n";
    assert!(heads.contains(trace), "{heads}");
    pod.heads.lock().unwrap().clear();
    fixture.exchange(&get("hello.default", "x-forwarded-proto: https\r\n")).await;
    let heads = pod.heads();
    assert!(
        heads.contains("forwarded: for=127.0.0.1;host=hello.default;proto=https\r\n"),
        "{heads}"
    );
    assert!(heads.contains("traceparent: 00-"), "{heads}");
}
