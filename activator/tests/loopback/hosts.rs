//! Services that a host means at each entrypoint, and the headers that their pods get.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::wire::{GatewayRules, MappedDomain, NamespacedName, RouteTag, RouteTarget, TagRouting};
use http::Request;

use crate::{
    h2c::Http2TestClient,
    harness::{
        self, ActivatorFixture, FakeHttp1Pod, OK, hello_revision, hello_service, service, start_pod,
    },
};

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

fn get(host: &str, fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n")
}

fn set_gateway_rules(fixture: &mut ActivatorFixture, rules: GatewayRules) {
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().gateway_rules = Some(Box::new(rules));
    });
}

fn domain(host: &str, rewrite: Option<&str>) -> MappedDomain {
    MappedDomain {
        passes_tls: false,
        host: host.into(),
        host_rewrite: rewrite.map(Into::into),
        redirects_to_https: false,
        certificate: None,
        client_auth: None,
        hsts: None,
    }
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
    set_gateway_rules(
        &mut fixture,
        GatewayRules {
            mapped_domains: vec![domain("shop.example", None)],
            ..GatewayRules::default()
        },
    );
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
    set_gateway_rules(&mut fixture, GatewayRules { mapped_domains, ..GatewayRules::default() });
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

    set_gateway_rules(
        &mut fixture,
        GatewayRules {
            mapped_domains: vec![domain("shop.example", None)],
            ..GatewayRules::default()
        },
    );
    let known = async |host: &str| {
        status(&fixture.exchange_at(fixture.outside, &get(host, "")).await) == "200"
    };
    assert_eq!((known("shop.example").await, known("old.example").await), (true, false));
    fixture.apply_change(|table| table.services.clear());
    let response = fixture.exchange_at(fixture.outside, &get("shop.example", "")).await;
    assert_eq!(status(&response), "404");
}

#[tokio::test]
async fn a_redirected_host_leads_to_https_from_outside_only() {
    let (mut fixture, pod) = start_awake().await;
    let redirected = MappedDomain { redirects_to_https: true, ..domain("shop.example", None) };
    let mapped_domains = vec![redirected, domain("plain.example", None)];
    set_gateway_rules(
        &mut fixture,
        GatewayRules { redirects_to_https: true, mapped_domains, ..GatewayRules::default() },
    );
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
    set_gateway_rules(&mut fixture, GatewayRules { tag_routing, ..GatewayRules::default() });
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
