//! Pages about the routes in force, as clients of the admin port get them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::{
    fixtures::{self, certificates::TestAuthority},
    http_server::{self, HttpServerBounds},
    wire::{MappedDomain, RoutingPhase},
};
use serde_json::Value;
use tokio::{io::AsyncWriteExt as _, net::TcpListener};

use crate::{
    harness::{ActivatorFixture, OK, read_head, service, start_pod, wait_until},
    tls_client::{HOST, set_default},
};

/// Serves the pages of an activator, until it ends.
async fn start_pages(fixture: &ActivatorFixture) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (pages, bounds) = (fixture.activator.debug_pages(), HttpServerBounds::DEFAULT);
    tokio::spawn(http_server::serve(listener, pages, bounds, fixture.shutdown.clone()));
    address
}

/// Gets a page. Returns head and body.
async fn get_page(fixture: &ActivatorFixture, address: SocketAddr, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    let response = fixture.exchange_at(address, &request).await;
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

async fn get_facts(fixture: &ActivatorFixture, address: SocketAddr, path: &str) -> Value {
    let (head, body) = get_page(fixture, address, path).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}: {body}");
    assert!(head.contains("content-type: application/json"), "{head}");
    serde_json::from_str(&body).unwrap()
}

fn get(host: &str, fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n")
}

fn status(response: &str) -> Option<u64> {
    response.get(9..12)?.parse().ok()
}

#[tokio::test]
async fn a_trace_states_the_response_that_a_client_gets() {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let redirected =
        MappedDomain { redirects_to_https: true, ..fixtures::mapped_domain("shop.example") };
    fixture.set_mapped_domains(vec![redirected]);
    let pages = start_pages(&fixture).await;
    let own_port = fixture.port.to_string();
    let entrypoints = [
        ("outside", fixture.outside),
        ("inside", fixture.inside),
        (own_port.as_str(), SocketAddr::from(([127, 0, 0, 1], fixture.port))),
    ];
    let mut served = 0;
    for (entrypoint, address) in entrypoints {
        for host in
            [HOST, "shop.example", "hello.default", "hello-1.default.svc", "unknown.example"]
        {
            let query = format!("host={host}&path=/a%3Fb%3Dc&entrypoint={entrypoint}");
            let facts = get_facts(&fixture, pages, &format!("/debug/trace?{query}")).await;
            let response = fixture.exchange_at(address, &get(host, "")).await;
            let target = &facts["targets"][0];
            match facts["outcome"].as_str().unwrap() {
                "revision" => {
                    served += 1;
                    assert_eq!(target["pod"]["address"], pod.address.to_string(), "{facts}");
                    assert_eq!(status(&response), Some(200), "{host} at {entrypoint}: {facts}");
                }
                "redirect" => {
                    let location = format!("location: {}\r\n", facts["location"].as_str().unwrap());
                    assert!(response.contains(&location), "{response} {facts}");
                    assert_eq!(status(&response), facts["status"].as_u64());
                }
                _ => {
                    assert_eq!(status(&response), facts["status"].as_u64(), "{host}: {facts}");
                    assert!(response.ends_with(facts["reason"].as_str().unwrap()), "{response}");
                }
            }
        }
    }
    assert_eq!(pod.requests(), served, "a trace sends nothing");
    assert_eq!(served, 1 + 4 + 5);
}

#[tokio::test]
async fn waiting_requests_and_connections_are_shown_and_no_service_is_woken_by_that() {
    let mut fixture = ActivatorFixture::new().await;
    let pages = start_pages(&fixture).await;
    let before = get_facts(&fixture, pages, "/debug/routes").await;
    assert_eq!(before["revisions"][0]["waiting"], 0);
    get_facts(&fixture, pages, &format!("/debug/trace?host={HOST}")).await;
    assert_eq!(fixture.waiting_totals(), (0, 0), "a page is no request for the service");

    let mut client = fixture.connect().await;
    let kept = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\n\r\n");
    client.write_all(kept.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    let page = get_facts(&fixture, pages, "/debug/routes").await;
    assert_eq!(page["revisions"][0]["waiting"], 1);
    assert_eq!(page["revisions"][0]["maxWaiting"], 10_000);
    assert_eq!(page["connections"]["http1"], 1, "{page}");

    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.set_pod("p", pod.address, RoutingPhase::Ready);
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 200 "));
    let page = get_facts(&fixture, pages, "/debug/routes").await;
    let revision = &page["revisions"][0];
    assert_eq!(revision["waiting"], 0);
    assert_eq!(revision["readyPods"], 1);
    assert_eq!(revision["pods"][0]["state"], "ready");
    drop(client);
    let server = &fixture.activator.server;
    wait_until(|| server.connections().count_by_kind().http1 == 0).await;
}

#[tokio::test]
async fn pages_are_read_only_and_refuse_what_they_do_not_know() {
    let fixture = ActivatorFixture::new().await;
    let pages = start_pages(&fixture).await;
    for path in ["/debug/", "/debug/routes", "/debug/trace?host=a"] {
        for method in ["POST", "PUT", "DELETE", "PATCH"] {
            let request = format!(
                "{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            let response = fixture.exchange_at(pages, &request).await;
            assert_eq!(status(&response), Some(405), "{method} {path}: {response}");
        }
    }
    for path in [
        "/debug/?other=1",
        "/debug/routes?hosts=a",
        "/debug/trace",
        "/debug/trace?host=a&tls=yes",
        "/debug/trace?host=a%0d%0ab",
    ] {
        let (head, body) = get_page(&fixture, pages, path).await;
        assert!(
            head.starts_with("HTTP/1.1 400 ") && body.contains(" is "),
            "{path}: {head} {body}"
        );
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    }
}

#[tokio::test]
async fn a_long_list_of_hosts_is_cut_and_says_so() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        let hosts = (0..1001).map(|number| format!("h{number:04}.example"));
        table.services.get_mut(&service()).unwrap().hosts = hosts.collect();
    });
    let pages = start_pages(&fixture).await;
    let page = get_facts(&fixture, pages, "/debug/routes").await;
    assert_eq!(page["hosts"].as_array().unwrap().len(), 1000);
    assert_eq!(page["allHosts"], 1001);
    assert_eq!(page["isCut"], true);
    let (_, readable) = get_page(&fixture, pages, "/debug/").await;
    assert!(readable.contains("Only the first 1000 of 1001 hosts are listed"), "{readable}");
    let page = get_facts(&fixture, pages, "/debug/routes?host=H1000").await;
    assert_eq!(page["allHosts"], 1);
    assert_eq!(page["isCut"], false);
    assert_eq!(page["hosts"][0]["host"], "h1000.example");
}

#[tokio::test]
async fn names_of_users_are_no_markup_and_browsers_load_nothing() {
    let mut fixture = ActivatorFixture::new().await;
    let markup = "<script>alert('x')</script>";
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().hosts = vec![markup.to_owned()];
    });
    let pages = start_pages(&fixture).await;
    for path in ["/debug/", "/debug/?host=%3Cscript%3E"] {
        let (head, page) = get_page(&fixture, pages, path).await;
        assert!(head.contains("content-type: text/html"), "{head}");
        assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)"), "{page}");
        assert!(!page.contains("<script"), "{page}");
    }
}

#[tokio::test]
async fn no_page_has_a_byte_of_a_key() {
    let mut fixture = ActivatorFixture::new().await;
    let issued = TestAuthority::new().issue(&[HOST]);
    set_default(&mut fixture, &issued);
    let pages = start_pages(&fixture).await;
    let trace = format!("/debug/trace?host={HOST}&tls=true");
    let material = issued.material();
    let key = material.key.as_der();
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    for path in ["/debug/", "/debug/routes", trace.as_str()] {
        let (_, body) = get_page(&fixture, pages, path).await;
        // Sixteen bytes anywhere in the key are enough to recognise it, in each usual form.
        let raw = key.windows(16).any(|part| body.as_bytes().windows(16).any(|it| it == part));
        let mut lines = issued.key_pem.lines().filter(|line| line.len() > 16);
        let in_pem = lines.any(|line| body.contains(line));
        assert!(!raw && !in_pem && !body.contains(&hex[..32]), "{path}: {body}");
        assert!(body.contains(HOST), "{path}: {body}");
    }
    let page = get_facts(&fixture, pages, "/debug/routes").await;
    assert_eq!(page["certificates"][0]["hosts"][0], HOST);
    assert_eq!(page["certificates"][0]["notAfter"], "2100-01-01T00:00:00Z");
    assert_eq!(page["hosts"][0]["certificate"]["rule"], "exact-name");
    let facts = get_facts(&fixture, pages, &trace).await;
    assert_eq!(facts["certificate"]["name"], page["certificates"][0]["name"]);
}
