//! Clients that connect by TLS: handshakes, certificates, and requests of both versions of HTTP.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{io, num::NonZeroU16, sync::Arc, time::Duration};

use activator::{ActivatorConfig, ActivatorError};
use common::{
    fixtures::{
        self,
        certificates::{TestAuthority, TestCertificate},
    },
    wire::{EdgeSettings, GatewayRules, MappedDomain, NamespacedName},
};
use http::Request;
use rustls::{
    ALL_VERSIONS, AlertDescription, ClientConfig, HandshakeKind, ProtocolVersion,
    SupportedProtocolVersion,
    version::{TLS12, TLS13},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    h2c::{self, Http2TestClient},
    harness::{
        ActivatorFixture, FakeHttp1Pod, LONG, OK, PausedClock, read_head, read_rest, read_until,
        revision, start_pod, start_pod_with, wait_until,
    },
    messages::start_pod_once,
    running_activator::RunningActivatorFixture,
    tls_client::{
        HOST, TlsClient, client_config, handshake, leaf, open, presented, received_alert, send,
        set_default, versioned_config,
    },
};

const MIB: usize = 1 << 20;

/// Starts an activator whose default certificate is for the service's public host.
async fn start_asleep() -> (ActivatorFixture, TestAuthority) {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_default(&mut fixture, &authority.issue(&[HOST]));
    (fixture, authority)
}

async fn start_awake() -> (ActivatorFixture, TestAuthority, FakeHttp1Pod) {
    let (mut fixture, authority) = start_asleep().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    (fixture, authority, pod)
}

/// Request after which the connection ends.
fn get(fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n{fields}\r\n")
}

/// Request after which the connection stays.
fn kept_get() -> String {
    format!("GET / HTTP/1.1\r\nhost: {HOST}\r\n\r\n")
}

/// Request for an upgraded connection.
fn upgrade_get() -> String {
    let fields = "connection: upgrade\r\nupgrade: websocket\r\n";
    format!("GET / HTTP/1.1\r\nhost: {HOST}\r\n{fields}\r\n")
}

/// Sends a request over a new connection of TLS, and returns everything that comes back.
async fn exchange(fixture: &ActivatorFixture, request: &str) -> String {
    let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
    send(&mut client, request).await;
    read_rest(&mut client).await
}

fn handshakes(fixture: &ActivatorFixture, result: &str) -> f64 {
    fixture.metric(&format!("rouse_activator_tls_handshakes_total{{result=\"{result}\"}}"))
}

/// Serves requests without a body, and echoes the bytes of an upgraded connection.
async fn serve_or_echo(mut stream: TcpStream, _number: usize) {
    loop {
        let head = read_head(&mut stream).await;
        if !head.ends_with("\r\n\r\n") {
            return;
        }
        if head.contains("upgrade: websocket\r\n") {
            let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
            stream.write_all(head.as_bytes()).await.ok();
            let (mut from, mut to) = stream.split();
            tokio::io::copy(&mut from, &mut to).await.ok();
            return;
        }
        stream.write_all(OK.as_bytes()).await.ok();
    }
}

#[tokio::test]
async fn alpn_selects_the_version() {
    let (fixture, _, pod) = start_awake().await;
    let cases: [(&[&str], Option<&[u8]>); 6] = [
        (&["h2", "http/1.1"], Some(b"h2")),
        (&["http/1.1", "h2"], Some(b"h2")),
        (&["h2"], Some(b"h2")),
        (&["http/1.1"], Some(b"http/1.1")),
        (&["foo", "http/1.1"], Some(b"http/1.1")),
        (&[], None),
    ];
    for (offered, selected) in cases {
        let mut client = open(fixture.outside_tls, client_config(offered), HOST).await.unwrap();
        assert_eq!(client.get_ref().1.alpn_protocol(), selected, "{offered:?}");
        if selected.is_some_and(|it| it == b"h2") {
            let client = Http2TestClient::over(client).await;
            let response = client.send_request(h2c::get("/"), &[]).await.unwrap();
            assert_eq!(response.body, "hello", "{offered:?}");
        } else {
            send(&mut client, get("")).await;
            let response = read_rest(&mut client).await;
            assert!(response.starts_with("HTTP/1.1 200 "), "{offered:?}: {response}");
        }
    }
    assert_eq!(pod.requests(), 6);
    let refused = open(fixture.outside_tls, client_config(&["foo"]), HOST).await.unwrap_err();
    assert_eq!(received_alert(&refused), Some(AlertDescription::NoApplicationProtocol));
    wait_until(|| handshakes(&fixture, "refused") == 1.0).await;
    assert_eq!(handshakes(&fixture, "complete"), 6.0);
}

fn mapped(host: &str, certificate: Option<&NamespacedName>) -> MappedDomain {
    MappedDomain { certificate: certificate.cloned(), ..fixtures::mapped_domain(host) }
}

/// Puts a certificate in force that a mapping names.
fn set_certificate(
    fixture: &mut ActivatorFixture,
    name: &NamespacedName,
    issued: &TestCertificate,
) {
    fixture.apply_change(|table| drop(table.certificates.insert(name.clone(), issued.entry(name))));
}

#[tokio::test]
async fn each_name_gets_its_certificate() {
    let (mut fixture, authority) = start_asleep().await;
    // The default one has a name of the mapping as well, and the mapping's own certificate goes before it.
    let default = authority.issue(&[HOST, "shop.example"]);
    let wildcard = authority.issue(&["*.wild.example"]);
    let own = authority.issue(&["shop.example"]);
    set_default(&mut fixture, &default);
    let [wildcard_name, own_name] =
        ["wildcard", "own"].map(|it| NamespacedName::new("default", it));
    set_certificate(&mut fixture, &wildcard_name, &wildcard);
    set_certificate(&mut fixture, &own_name, &own);
    fixture.apply_change(|table| table.settings.edge.certificates.push(wildcard_name));
    let missing = NamespacedName::new("default", "missing");
    let domains = vec![
        mapped("shop.example", Some(&own_name)),
        mapped("other.example", Some(&own_name)),
        mapped("pending.wild.example", Some(&missing)),
        mapped("plain.wild.example", None),
    ];
    fixture.set_mapped_domains(domains);
    let (mut nameless, with_name) = (client_config(&[]), client_config(&[]));
    nameless.enable_sni = false;
    let (nameless, with_name) = (Arc::new(nameless), Arc::new(with_name));
    for (config, name, issued) in [
        (&with_name, "shop.example", &own),
        (&with_name, "SHOP.example", &own),
        // It is not for this host, but the mapping names it.
        (&with_name, "other.example", &own),
        (&with_name, "pending.wild.example", &wildcard),
        (&with_name, "plain.wild.example", &wildcard),
        (&with_name, HOST, &default),
        (&with_name, "a.b.wild.example", &default),
        (&with_name, "unknown.example", &default),
        (&with_name, "127.0.0.1", &default),
        (&nameless, "shop.example", &default),
    ] {
        let client = open(fixture.outside_tls, Arc::clone(config), name).await.unwrap();
        assert!(presented(&client) == leaf(issued), "{name}, SNI: {}", config.enable_sni);
    }
}

/// The path of a request is not known during the handshake.
#[tokio::test]
async fn hosts_with_wildcards_and_path_rules_get_their_certificate() {
    let (mut fixture, authority) = start_asleep().await;
    let (default, own) = (authority.issue(&[HOST]), authority.issue(&["*.wild.example"]));
    set_default(&mut fixture, &default);
    let own_name = NamespacedName::new("default", "own");
    set_certificate(&mut fixture, &own_name, &own);
    let ruled = |host: &str, prefix: &str| MappedDomain {
        certificate: Some(own_name.clone()),
        ..fixtures::ruled_domain(host, prefix)
    };
    let domains = vec![ruled("*.wild.example", "/"), ruled("paths.example", "/a")];
    fixture.set_mapped_domains(domains);
    let config = Arc::new(client_config(&[]));
    for (name, issued) in [
        ("a.wild.example", &own),
        ("paths.example", &own),
        ("wild.example", &default),
        ("a.b.wild.example", &default),
    ] {
        let client = open(fixture.outside_tls, Arc::clone(&config), name).await.unwrap();
        assert!(presented(&client) == leaf(issued), "{name}");
    }
}

/// A listener of the Gateway API has a certificate of its own, and rules for TLS alone.
#[tokio::test]
async fn hosts_of_the_gateway_api_get_the_certificate_of_their_listener() {
    let (mut fixture, authority) = start_asleep().await;
    let (default, own) = (authority.issue(&[HOST]), authority.issue(&["*.gateway.example"]));
    set_default(&mut fixture, &default);
    let own_name = NamespacedName::new("default", "own");
    set_certificate(&mut fixture, &own_name, &own);
    let mut entry = fixtures::gateway_host("https://*.gateway.example", Vec::new());
    entry.certificates = vec![own_name];
    fixture.apply_change(|table| drop(table.gateway_hosts.insert(entry.key.clone(), entry)));
    let config = Arc::new(client_config(&[]));
    for (name, issued) in [
        ("a.gateway.example", &own),
        ("a.b.gateway.example", &own),
        ("gateway.example", &default),
        (HOST, &default),
    ] {
        let client = open(fixture.outside_tls, Arc::clone(&config), name).await.unwrap();
        assert!(presented(&client) == leaf(issued), "{name}");
    }
    let plain = "GET / HTTP/1.1\r\nhost: a.gateway.example\r\nconnection: close\r\n\r\n";
    let response = fixture.exchange_at(fixture.outside, plain).await;
    assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
}

#[tokio::test]
async fn without_a_default_an_unknown_name_gets_alert_112() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    let refusal = async |fixture: &ActivatorFixture, name: &str| {
        let refused = open(fixture.outside_tls, client_config(&[]), name).await.unwrap_err();
        received_alert(&refused)
    };
    let unrecognized = Some(AlertDescription::UnrecognisedName);
    assert_eq!(refusal(&fixture, HOST).await, unrecognized, "no certificate at all");
    let (name, own) = (NamespacedName::new("default", "own"), authority.issue(&["shop.example"]));
    set_certificate(&mut fixture, &name, &own);
    fixture.set_mapped_domains(vec![mapped("shop.example", Some(&name))]);
    let client = open(fixture.outside_tls, client_config(&[]), "shop.example").await.unwrap();
    assert!(presented(&client) == leaf(&own));
    assert_eq!(refusal(&fixture, HOST).await, unrecognized, "another name");
    assert_eq!(refusal(&fixture, "127.0.0.1").await, unrecognized, "no name");
    wait_until(|| handshakes(&fixture, "no_certificate") == 3.0).await;
    // A certificate of a mapping is for no other host, also if its names cover it.
    fixture.set_mapped_domains(vec![]);
    assert_eq!(refusal(&fixture, "shop.example").await, unrecognized, "no mapping names it");
}

#[tokio::test]
async fn a_new_certificate_serves_new_connections_and_old_ones_go_on() {
    let (mut fixture, authority) = start_asleep().await;
    let [h1, h2] = [&["http/1.1"], &["h2"]].map(|it| Arc::new(client_config(it)));
    let at = fixture.outside_tls;
    let connect = async |config: &Arc<ClientConfig>| open(at, Arc::clone(config), HOST).await;
    let mut kept = connect(&h1).await.unwrap();
    let first = presented(&kept);
    let streams = Http2TestClient::over(connect(&h2).await.unwrap()).await;
    let mut upgraded = connect(&h1).await.unwrap();
    // The requests wait while the certificate changes.
    send(&mut kept, kept_get()).await;
    send(&mut upgraded, upgrade_get()).await;
    let call = tokio::spawn(streams.send_request(h2c::get("/"), &[]));
    fixture.wait_for_queued(3).await;
    set_default(&mut fixture, &authority.issue(&[HOST]));
    fixture.add_ready_pod("p", start_pod_with(serve_or_echo).await);
    assert!(read_until(&mut kept, "hello").await.starts_with("HTTP/1.1 200 "));
    assert_eq!(call.await.unwrap().unwrap().body, "hello");
    assert!(read_head(&mut upgraded).await.starts_with("HTTP/1.1 101 "));
    for round in 0..5 {
        let issued = authority.issue(&[HOST]);
        set_default(&mut fixture, &issued);
        send(&mut kept, kept_get()).await;
        let response = read_until(&mut kept, "hello").await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{round}: {response}");
        let response = streams.send_request(h2c::get("/"), &[]).await.unwrap();
        assert_eq!(response.body, "hello", "{round}");
        send(&mut upgraded, "echo").await;
        assert_eq!(read_until(&mut upgraded, "echo").await, "echo", "{round}");
        let mut new = connect(&h1).await.unwrap();
        assert!(presented(&new) == leaf(&issued), "{round}");
        send(&mut new, get("")).await;
        assert!(read_rest(&mut new).await.ends_with("hello"), "{round}");
    }
    assert!(presented(&kept) == first && !streams.is_closed());
}

#[tokio::test]
async fn a_ticket_of_the_old_certificate_is_not_resumed() {
    let versions: [(&[&'static SupportedProtocolVersion], _); 2] =
        [(&[&TLS12], ProtocolVersion::TLSv1_2), (&[&TLS13], ProtocolVersion::TLSv1_3)];
    for (offered, version) in versions {
        let (mut fixture, authority, _pod) = start_awake().await;
        let config = Arc::new(versioned_config(offered, &[]));
        let at = fixture.outside_tls;
        let kind = async || {
            let mut client = open(at, Arc::clone(&config), HOST).await.unwrap();
            let session = client.get_ref().1;
            assert_eq!(session.protocol_version(), Some(version));
            let kind = session.handshake_kind();
            // Tickets of TLS 1.3 come behind the handshake.
            send(&mut client, get("")).await;
            assert!(read_rest(&mut client).await.ends_with("hello"));
            kind
        };
        assert_eq!(kind().await, Some(HandshakeKind::Full), "{version:?}");
        assert_eq!(kind().await, Some(HandshakeKind::Resumed), "{version:?}");
        set_default(&mut fixture, &authority.issue(&[HOST]));
        assert_eq!(kind().await, Some(HandshakeKind::Full), "{version:?}");
        assert_eq!(kind().await, Some(HandshakeKind::Resumed), "{version:?}");
    }
}

#[tokio::test]
async fn http_on_the_tls_port_gets_400() {
    let (fixture, _, pod) = start_awake().await;
    let body = "x".repeat(MIB);
    let post = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {MIB}\r\n\r\n{body}");
    for request in [get(""), post, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned()] {
        let response = fixture.exchange_at(fixture.outside_tls, &request).await;
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
        assert_eq!(body, "This port speaks TLS: use an https:// URL instead.\r\n");
    }
    wait_until(|| handshakes(&fixture, "plain_http") == 3.0).await;
    let mut noise = TcpStream::connect(fixture.outside_tls).await.unwrap();
    noise.write_all(b"nonsense\r\n\r\n").await.unwrap();
    let mut alert = Vec::new();
    noise.read_to_end(&mut alert).await.unwrap();
    assert_eq!(alert.first(), Some(&0x15), "an alert: {alert:?}");
    wait_until(|| handshakes(&fixture, "refused") == 1.0).await;
    assert_eq!(pod.requests(), 0);
}

/// First bytes of a ClientHello of 4 KiB.
const HELLO_BEGIN: [u8; 9] = [0x16, 3, 1, 0x10, 0, 1, 0, 0x0f, 0xfc];

#[tokio::test]
async fn a_silent_handshake_ends_and_counts() {
    let fixture = ActivatorFixture::with(|config| config.tls_handshake_timeout_ms = 100).await;
    let mut silent = TcpStream::connect(fixture.outside_tls).await.unwrap();
    let mut halfway = TcpStream::connect(fixture.outside_tls).await.unwrap();
    halfway.write_all(&HELLO_BEGIN).await.unwrap();
    let mut slow = TcpStream::connect(fixture.outside_tls).await.unwrap();
    slow.write_all(&HELLO_BEGIN).await.unwrap();
    let trickle = async {
        while slow.write_all(&[0]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, trickle).await.expect("a slow one is given up");
    assert_eq!(read_rest(&mut silent).await, "");
    assert_eq!(read_rest(&mut halfway).await, "");
    wait_until(|| handshakes(&fixture, "timeout") == 3.0).await;
    drop(TcpStream::connect(fixture.outside_tls).await.unwrap());
    wait_until(|| handshakes(&fixture, "closed") == 1.0).await;
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 0.0).await;
}

#[tokio::test]
async fn a_silent_client_does_not_delay_the_stop() {
    // Longer than the test waits.
    let fixture = ActivatorFixture::with(|config| config.tls_handshake_timeout_ms = 60_000).await;
    let mut silent = TcpStream::connect(fixture.outside_tls).await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 1.0).await;
    fixture.shutdown.cancel();
    assert_eq!(read_rest(&mut silent).await, "");
    wait_until(|| handshakes(&fixture, "closed") == 1.0).await;
}

#[tokio::test]
async fn a_client_hello_of_no_sensible_size_is_refused() {
    let fixture = ActivatorFixture::new().await;
    // It is said to have 60 KiB, and comes in records of 4 KiB. Most of it is sent.
    let record = [&[0x16, 3, 1, 0x10, 0][..], &[0; 4096]].concat();
    let mut hello = record.repeat(12);
    hello[5..9].copy_from_slice(&[1, 0, 0xf0, 0]);
    let mut client = TcpStream::connect(fixture.outside_tls).await.unwrap();
    // The end may come before all bytes are sent.
    client.write_all(&hello).await.ok();
    wait_until(|| handshakes(&fixture, "refused") == 1.0).await;
    assert_eq!(read_rest(&mut client).await, "");
}

#[tokio::test]
async fn a_silent_handshake_gives_way_to_a_request_at_the_bound() {
    let mut fixture = ActivatorFixture::with(|config| {
        (config.max_connections, config.max_client_connections) = (Some(1), Some(10));
    })
    .await;
    fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
    let mut silent = TcpStream::connect(fixture.outside_tls).await.unwrap();
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 1.0).await;
    let response = fixture.exchange_at(fixture.outside, &get("")).await;
    assert!(response.ends_with("hello"), "{response}");
    assert_eq!(read_rest(&mut silent).await, "");
    wait_until(|| handshakes(&fixture, "closed") == 1.0).await;
}

#[tokio::test]
async fn a_redirected_host_is_served_over_tls_and_redirected_without() {
    let (mut fixture, _, pod) = start_awake().await;
    let rules = GatewayRules { redirects_to_https: true, ..GatewayRules::default() };
    fixture.set_gateway_rules(rules);
    let response = exchange(&fixture, &get("")).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let client = open(fixture.outside_tls, client_config(&["h2"]), HOST).await.unwrap();
    let request = Request::get(format!("https://{HOST}/"));
    let response = Http2TestClient::over(client).await.send_request(request, &[]).await.unwrap();
    assert_eq!(response.head.status(), 200);
    for (port, location) in [(0, HOST.to_owned()), (8443, format!("{HOST}:8443"))] {
        fixture.apply_change(|table| table.settings.edge.https_port = NonZeroU16::new(port));
        let response = fixture.exchange_at(fixture.outside, &get("")).await;
        assert!(response.starts_with("HTTP/1.1 301 "), "{response}");
        let location = format!("location: https://{location}/a?b=c\r\n");
        assert!(response.contains(&location), "{response}");
    }
    assert_eq!(pod.requests(), 2);
}

#[tokio::test]
async fn pods_learn_that_the_client_used_tls() {
    let (mut fixture, _, pod) = start_awake().await;
    let forged = get("x-forwarded-proto: http\r\nforwarded: for=192.0.2.9;proto=http\r\n");
    assert!(exchange(&fixture, &forged).await.ends_with("hello"));
    let heads = pod.heads();
    assert!(heads.contains("x-forwarded-proto: https\r\n"), "{heads}");
    let forwarded = format!("forwarded: for=127.0.0.1;host={HOST};proto=https\r\n");
    assert!(heads.contains(&forwarded) && !heads.contains("192.0.2.9"), "{heads}");
    pod.heads.lock().unwrap().clear();
    // What a trusted proxy reports is about the connection before its own.
    fixture.apply_change(|table| {
        table.settings.edge.trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()];
    });
    let reported = get("x-forwarded-for: 192.0.2.9\r\nx-forwarded-proto: http\r\n");
    assert!(exchange(&fixture, &reported).await.ends_with("hello"));
    let heads = pod.heads();
    assert!(heads.contains("x-forwarded-proto: http\r\n"), "{heads}");
    assert!(heads.contains("x-forwarded-for: 192.0.2.9, 127.0.0.1\r\n"), "{heads}");
}

#[tokio::test]
async fn a_proxy_header_comes_before_the_handshake() {
    let (mut fixture, _, pod) = start_awake().await;
    fixture.apply_change(|table| {
        let trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()];
        let before = std::mem::take(&mut table.settings.edge);
        table.settings.edge =
            EdgeSettings { trusted_proxies, requires_proxy_protocol: true, ..before };
    });
    let mut stream = TcpStream::connect(fixture.outside_tls).await.unwrap();
    stream.write_all(b"PROXY TCP4 192.0.2.1 198.51.100.1 56324 80\r\n").await.unwrap();
    let mut client = handshake(stream, client_config(&[]), HOST).await.unwrap();
    send(&mut client, get("")).await;
    assert!(read_rest(&mut client).await.ends_with("hello"));
    let heads = pod.heads();
    assert!(heads.contains("x-forwarded-for: 192.0.2.1\r\n"), "{heads}");
    assert!(heads.contains("x-forwarded-proto: https\r\n"), "{heads}");
    let without = open(fixture.outside_tls, client_config(&[]), HOST).await;
    assert!(without.is_err(), "closed before a handshake");
    wait_until(|| handshakes(&fixture, "complete") == 1.0).await;
    assert_eq!(pod.requests(), 1);
}

/// Way in which a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leave {
    Fin,
    CloseNotify,
    Reset,
}

async fn leave(mut client: TlsClient, way: Leave) {
    match way {
        Leave::Fin => {}
        Leave::CloseNotify => client.shutdown().await.unwrap(),
        Leave::Reset => client.get_ref().0.set_zero_linger().unwrap(),
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_over_tls() {
    for way in [Leave::Fin, Leave::CloseNotify, Leave::Reset] {
        let (fixture, _) = start_asleep().await;
        // In TLS 1.3 the client would leave tickets unread, and its kernel would send a reset in each case.
        let config = versioned_config(&[&TLS12], &[]);
        let mut client = open(fixture.outside_tls, config, HOST).await.unwrap();
        send(&mut client, get("")).await;
        fixture.wait_for_queued(1).await;
        leave(client, way).await;
        fixture.wait_for_queued(0).await;
        wait_until(|| fixture.waiting_totals() == (1, 1)).await;
        wait_until(|| fixture.metric("rouse_activator_client_connections") == 0.0).await;
        let cancelled = fixture.metric("rouse_activator_requests_total{code=\"cancelled\"}");
        assert_eq!(cancelled, 1.0, "{way:?}");
    }
    for is_tcp_closed in [true, false] {
        let (mut fixture, _) = start_asleep().await;
        let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
        send(&mut client, get("")).await;
        fixture.wait_for_queued(1).await;
        let mut response = String::new();
        if is_tcp_closed {
            client.shutdown().await.unwrap();
            // The byte that is sent ahead finds out that the client is still there.
            response.push(char::from(client.read_u8().await.unwrap()));
        } else {
            client.get_mut().1.send_close_notify();
            client.flush().await.unwrap();
        }
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", start_pod(OK, Duration::ZERO).await.address);
        response += &read_rest(&mut client).await;
        assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("hello"), "{response}");
        assert_eq!(fixture.waiting_totals(), (1, 1));
    }
}

#[tokio::test]
async fn a_silent_response_over_tls_ends_once_its_client_is_gone() {
    let (mut fixture, _) = start_asleep().await;
    fixture.apply_change(|table| {
        // The request's timeout would end the response, too.
        table.revisions.get_mut(&revision()).unwrap().timeout = 100 * LONG;
    });
    let (ended, end) = tokio::sync::oneshot::channel();
    let at = start_pod_once(|mut stream, _| async move {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        ended.send(stream.read_u8().await.is_err()).unwrap();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
    send(&mut client, get("")).await;
    read_head(&mut client).await;
    client.get_mut().1.send_close_notify();
    client.flush().await.unwrap();
    // The activator notices the alert before the client's TCP ends.
    tokio::time::sleep(Duration::from_millis(100)).await;
    leave(client, Leave::Reset).await;
    let ended = tokio::time::timeout(LONG, end).await.expect("the pod learns of the end");
    assert!(ended.unwrap());
}

#[tokio::test]
async fn interim_responses_come_over_tls() {
    const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
                         HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
    let (mut fixture, _) = start_asleep().await;
    fixture.add_ready_pod("p", start_pod(HINTS, Duration::ZERO).await.address);
    let response = exchange(&fixture, &get("")).await;
    let (early, last) = response.split_at(response.find("HTTP/1.1 200 OK\r\n").unwrap());
    assert_eq!(early, &HINTS[..HINTS.find("HTTP/1.1 200").unwrap()]);
    assert!(last.ends_with("\r\n\r\nhello"), "{response}");
}

#[tokio::test]
async fn a_reset_flood_gets_goaway_over_tls() {
    let mut fixture = ActivatorFixture::with(|config| config.max_resets = 20).await;
    set_default(&mut fixture, &TestAuthority::new().issue(&[HOST]));
    let client = open(fixture.outside_tls, client_config(&["h2"]), HOST).await.unwrap();
    let (sender, driver) = h2::client::handshake(client).await.unwrap();
    let ended = tokio::spawn(driver);
    let revision = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    let mut sent = 0;
    while let Ok(mut ready) = sender.clone().ready().await {
        let request = Request::get(format!("https://{HOST}/")).body(()).unwrap();
        let Ok((response, mut body)) = ready.send_request(request, false) else { break };
        sent += 1;
        wait_until(|| revision.waiting_count() == 1 || ended.is_finished()).await;
        body.send_reset(h2::Reason::CANCEL);
        drop(response);
        wait_until(|| revision.waiting_count() == 0).await;
    }
    // A request that is under way while the connection ends may follow.
    assert!(sent == 20 || sent == 21, "{sent}");
    drop(sender);
    let error = ended.await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM), "{error}");
    assert_eq!(fixture.metric("rouse_activator_refused_total{bound=\"resets\"}"), 1.0);
}

#[tokio::test]
async fn large_bodies_go_both_ways() {
    let (mut fixture, _) = start_asleep().await;
    let (go, wait) = tokio::sync::oneshot::channel::<()>();
    let at = start_pod_once(move |mut stream, _| async move {
        wait.await.unwrap();
        let (mut got, mut buffer) = (0, vec![0; MIB]);
        while got < 64 * MIB {
            got += stream.read(&mut buffer).await.unwrap();
        }
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", 64 * MIB);
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&vec![b'y'; 64 * MIB]).await.unwrap();
        stream.read_u8().await.ok();
    })
    .await;
    fixture.add_ready_pod("p", at);
    let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
    let length = 64 * MIB;
    let fields = format!("connection: close\r\ncontent-length: {length}\r\n");
    send(&mut client, format!("POST / HTTP/1.1\r\nhost: {HOST}\r\n{fields}\r\n")).await;
    let (chunk, mut sent) = (vec![b'x'; MIB], 0);
    // The pod reads nothing yet, so only the sockets' buffers fill.
    let pause = Duration::from_millis(300);
    while let Ok(count) = tokio::time::timeout(pause, client.write(&chunk)).await {
        sent += count.unwrap();
    }
    assert!(sent < 32 * MIB, "{sent} bytes were taken in");
    go.send(()).unwrap();
    while sent < length {
        sent += client.write(&chunk[..MIB.min(length - sent)]).await.unwrap();
    }
    client.flush().await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 200 "));
    // The client reads nothing yet, and the activator holds no more than its buffers.
    tokio::time::sleep(pause).await;
    let held = fixture.activator.server.connections().response_bytes();
    assert!(held < 2 * MIB, "{held} bytes are held");
    let mut body = Vec::new();
    client.read_to_end(&mut body).await.unwrap();
    assert!(body == vec![b'y'; length], "{} bytes", body.len());
}

/// ClientHello of TLS 1.1, by RFC 4346 §7.4.1.2, with the extension `signature_algorithms`.
fn encode_tls_1_1_hello() -> Vec<u8> {
    let mut hello = vec![3, 2];
    hello.extend([7; 32]);
    // No session, two suites (ECDHE_ECDSA and ECDHE_RSA with AES_128_CBC_SHA), and no compression.
    hello.extend([0, 0, 4, 0xc0, 0x09, 0xc0, 0x13, 1, 0]);
    // Extensions of 10 bytes, with two algorithms: ECDSA and RSA with SHA-256.
    hello.extend([0, 10, 0, 13, 0, 6, 0, 4, 4, 3, 4, 1]);
    let length = u8::try_from(hello.len()).unwrap();
    let head = [0x16, 3, 1, 0, length + 4, 1, 0, 0, length];
    [&head[..], &hello].concat()
}

#[tokio::test]
async fn tls_1_1_is_refused_and_1_2_works() {
    let (fixture, _, pod) = start_awake().await;
    let mut old = TcpStream::connect(fixture.outside_tls).await.unwrap();
    old.write_all(&encode_tls_1_1_hello()).await.unwrap();
    let mut alert = Vec::new();
    old.read_to_end(&mut alert).await.unwrap();
    // A fatal alert: protocol_version (70).
    assert_eq!((alert.first(), alert.get(5..)), (Some(&0x15), Some(&[2, 70][..])), "{alert:?}");
    wait_until(|| handshakes(&fixture, "refused") == 1.0).await;
    let versions: [&[&'static SupportedProtocolVersion]; 2] = [&[&TLS12], ALL_VERSIONS];
    for (versions, version) in
        versions.into_iter().zip([ProtocolVersion::TLSv1_2, ProtocolVersion::TLSv1_3])
    {
        let config = versioned_config(versions, &[]);
        let mut client = open(fixture.outside_tls, config, HOST).await.unwrap();
        assert_eq!(client.get_ref().1.protocol_version(), Some(version));
        send(&mut client, get("")).await;
        assert!(read_rest(&mut client).await.ends_with("hello"));
    }
    assert_eq!(pod.requests(), 2);
}

#[tokio::test]
async fn a_request_behind_its_handshake_is_served_while_the_activator_stops() {
    for _ in 0..20 {
        let (mut fixture, _) = start_asleep().await;
        fixture.add_ready_pod("p", start_pod_with(serve_or_echo).await);
        let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
        // The time for the first bytes does not end.
        let _clock = PausedClock::start_paused();
        fixture.shutdown.cancel();
        send(&mut client, kept_get()).await;
        let response = read_rest(&mut client).await;
        assert!(response.ends_with("hello"), "{response}");
    }
}

#[tokio::test]
async fn certificate_files_serve_and_bad_ones_prevent_the_start() {
    let folder = std::env::temp_dir().join(format!("certificates-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [certificate, key] = ["tls.crt", "tls.key"].map(|it| folder.join(it));
    let issued = TestAuthority::new().issue(&[HOST]);
    std::fs::write(&certificate, &issued.chain_pem).unwrap();
    std::fs::write(&key, &issued.key_pem).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let pair = (Some(certificate), Some(key.clone()));
    let running = RunningActivatorFixture::start("tls", |config| {
        (config.tls_cert, config.tls_key) = pair.clone();
        config.outside_tls_listener = Some(listener);
    })
    .await;
    let client = open(address, client_config(&[]), HOST).await.unwrap();
    assert!(presented(&client) == leaf(&issued));
    drop(client);
    running.stop.cancel();
    running.wait_stopped().await;
    std::fs::write(&key, "no key").unwrap();
    let set_pair = |config: &mut ActivatorConfig| (config.tls_cert, config.tls_key) = pair;
    let failed = RunningActivatorFixture::start("bad-tls", set_pair).await.wait_failed().await;
    assert!(matches!(failed, ActivatorError::Certificates(_)), "{failed}");
    assert_eq!(failed.to_string(), "cannot use the certificate files");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn a_client_that_trusts_no_certificate_is_counted() {
    let (fixture, _) = start_asleep().await;
    let roots = rustls::RootCertStore::empty();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let distrusting = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(ALL_VERSIONS)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let refused = open(fixture.outside_tls, distrusting, HOST).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{refused}");
    wait_until(|| handshakes(&fixture, "refused") == 1.0).await;
}
