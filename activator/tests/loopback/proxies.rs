//! Proxies and load balancers before the gateway: trust in their headers, and its consequences.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use common::wire::{EdgeSettings, GatewayRules};
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    h2c::Http2TestClient,
    harness::{self, ActivatorFixture, FakeHttp1Pod, OK, read_rest, start_pod},
};

const HOST: &str = "hello.default.example.com";
/// PROXY header of version 1, for a client that connected to port 443.
const BY_TLS: &str = "PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n";

fn trusting(networks: &[&str], proxy_protocol: bool) -> EdgeSettings {
    let trusted_proxies = networks.iter().map(|it| it.parse().unwrap()).collect();
    EdgeSettings {
        trusted_proxies,
        requires_proxy_protocol: proxy_protocol,
        ..EdgeSettings::default()
    }
}

async fn start_awake(edge: EdgeSettings) -> (ActivatorFixture, FakeHttp1Pod) {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.apply_change(|table| table.settings.edge = edge);
    (fixture, pod)
}

fn get(fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n{fields}\r\n")
}

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

#[tokio::test]
async fn a_host_that_redirects_to_https_is_served_behind_a_balancer_that_ended_tls() {
    let (mut fixture, pod) = start_awake(trusting(&["127.0.0.0/8"], false)).await;
    let rules = GatewayRules { redirects_to_https: true, ..GatewayRules::default() };
    fixture.set_gateway_rules(rules);
    for (fields, code) in [
        ("", "301"),
        ("x-forwarded-proto: http\r\n", "301"),
        ("x-forwarded-proto: https\r\n", "200"),
        ("forwarded: for=192.0.2.1;proto=https\r\n", "200"),
    ] {
        let response = fixture.exchange_at(fixture.outside, &get(fields)).await;
        assert_eq!(status(&response), code, "{fields}: {response}");
        let mut request = Request::get(format!("http://{HOST}/"));
        if let Some((name, value)) = fields.trim().split_once(": ") {
            request = request.header(name, value);
        }
        let response = Http2TestClient::connect_to(fixture.outside)
            .await
            .send_request(request, &[])
            .await
            .unwrap();
        assert_eq!(response.head.status().as_str(), code, "{fields}");
    }
    let secure = "x-forwarded-proto: https\r\n";
    fixture.apply_change(|table| table.settings.edge = trusting(&["192.0.2.0/24"], false));
    let response = fixture.exchange_at(fixture.outside, &get(secure)).await;
    assert_eq!(status(&response), "301", "that peer is not trusted any more: {response}");
    assert_eq!(pod.requests(), 4);
}

/// Starts a pod that redirects every request that is not https, as frameworks with forced TLS do.
async fn start_tls_forcing_pod() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let head = harness::read_head(&mut stream).await;
                let response = match head.contains("x-forwarded-proto: https\r\n") {
                    true => OK,
                    false => {
                        "HTTP/1.1 301 Moved Permanently\r\nlocation: https://a/\r\ncontent-length: 0\r\n\r\n"
                    }
                };
                stream.write_all(response.as_bytes()).await.ok();
            });
        }
    });
    address
}

#[tokio::test]
async fn an_app_with_forced_tls_responds_behind_a_balancer_that_ended_it() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", start_tls_forcing_pod().await);
    let secure = get("x-forwarded-proto: https\r\n");
    assert_eq!(status(&fixture.exchange_at(fixture.outside, &secure).await), "301", "forged");
    fixture.apply_change(|table| table.settings.edge = trusting(&["127.0.0.1/32"], false));
    assert_eq!(status(&fixture.exchange_at(fixture.outside, &secure).await), "200");
    fixture.apply_change(|table| table.settings.edge = trusting(&["127.0.0.1/32"], true));
    let by_tls = format!("{BY_TLS}{}", get(""));
    assert_eq!(status(&fixture.exchange_at(fixture.outside, &by_tls).await), "200");
}

#[tokio::test]
async fn a_proxy_header_of_either_version_names_the_client() {
    let (fixture, pod) = start_awake(trusting(&["127.0.0.1/32"], true)).await;
    let two: &[u8] =
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\xc6\x33\x64\x01\xdc\x04\0\x50";
    let own: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    for (header, client, proto) in [
        (BY_TLS.as_bytes(), "192.0.2.1", "https"),
        (two, "192.0.2.1", "http"),
        (own, "127.0.0.1", "http"),
    ] {
        let mut stream = TcpStream::connect(fixture.outside).await.unwrap();
        // The header is recognized however it is cut.
        for piece in header.chunks(7) {
            stream.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        let forged = get("x-forwarded-for: 6.6.6.6\r\nx-forwarded-proto: wss\r\n");
        stream.write_all(forged.as_bytes()).await.unwrap();
        assert_eq!(status(&read_rest(&mut stream).await), "200");
        let heads = pod.heads();
        assert!(heads.contains(&format!("x-forwarded-for: {client}\r\n")), "{heads}");
        assert!(heads.contains(&format!("x-forwarded-proto: {proto}\r\n")), "{heads}");
        pod.heads.lock().unwrap().clear();
    }
}

#[tokio::test]
async fn a_proxy_header_is_required_of_trusted_peers_and_read_of_no_others() {
    let (mut fixture, pod) = start_awake(trusting(&["127.0.0.1/32"], true)).await;
    for bad in [get(""), "PROXY TCP4 a b 1 2\r\n".to_owned() + &get("")] {
        assert_eq!(
            fixture.exchange_at(fixture.outside, &bad).await,
            "",
            "closed without a response"
        );
    }
    let mut cut = TcpStream::connect(fixture.outside).await.unwrap();
    cut.write_all(b"PROXY TC").await.unwrap();
    cut.shutdown().await.unwrap();
    assert_eq!(cut.read_to_end(&mut Vec::new()).await.unwrap(), 0);
    assert_eq!(
        status(&fixture.exchange_at(fixture.inside, &get("")).await),
        "200",
        "the gateway alone"
    );
    fixture.apply_change(|table| table.settings.edge = trusting(&["192.0.2.0/24"], true));
    let named = format!("{BY_TLS}{}", get(""));
    assert_eq!(status(&fixture.exchange_at(fixture.outside, &named).await), "400", "it is no HTTP");
    assert_eq!(status(&fixture.exchange_at(fixture.outside, &get("")).await), "200");
    assert_eq!(pod.requests(), 2);
}
