//! Policies of TLS at the gateway: certificates of clients, Strict-Transport-Security, versions and ciphers.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{io, sync::Arc, time::Duration};

use common::{
    fixtures::{
        self,
        certificates::{TestAuthority, TestCertificate},
    },
    wire::{
        ClientAuth, ClientCaEntry, ClientCaMaterial, HstsPolicy, MappedDomain, NamespacedName,
        TlsCipher, TlsMinVersion, TlsSettings,
    },
};
use http::Request;
use rustls::{
    ALL_VERSIONS, AlertDescription, CipherSuite, ClientConfig, HandshakeKind,
    SupportedProtocolVersion,
    version::{TLS12, TLS13},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    h2c::Http2TestClient,
    harness::{ActivatorFixture, FakeHttp1Pod, OK, read_rest, read_until, start_pod, wait_until},
    tls_client::{
        HOST, client_auth_config, client_config, open, received_alert, send, set_default,
        versioned_config,
    },
};

/// Host that requires a certificate of its clients.
const REQUIRED: &str = "required.example";
/// Host that asks its clients for a certificate.
const OPTIONAL: &str = "optional.example";
/// Host with a mapping that asks for none.
const OPEN: &str = "open.example";

/// Activator with a ready pod and these hosts, whose default certificate serves all of them.
struct PolicyFixture {
    activator: ActivatorFixture,
    pod: FakeHttp1Pod,
    /// Authority of the clients.
    clients: TestAuthority,
}

fn ca_name() -> NamespacedName {
    NamespacedName::new("default", "clients")
}

fn mapped(host: &str, client_auth: Option<ClientAuth>) -> MappedDomain {
    MappedDomain { client_auth, ..fixtures::mapped_domain(host) }
}

fn client_auth(is_optional: bool) -> Option<ClientAuth> {
    Some(ClientAuth { ca: Some(ca_name()), is_optional })
}

impl PolicyFixture {
    async fn start() -> Self {
        Self::start_with(OK).await
    }

    /// Starts with a pod that gives this response.
    async fn start_with(response: &'static str) -> Self {
        let mut activator = ActivatorFixture::new().await;
        set_default(&mut activator, &TestAuthority::new().issue(&[HOST]));
        let pod = start_pod(response, Duration::ZERO).await;
        activator.add_ready_pod("p", pod.address);
        let mut fixture = Self { activator, pod, clients: TestAuthority::new() };
        fixture.activator.set_mapped_domains(vec![
            mapped(REQUIRED, client_auth(false)),
            mapped(OPTIONAL, client_auth(true)),
            mapped(OPEN, None),
        ]);
        fixture.set_ca(fixture.clients.client_ca());
        fixture
    }

    fn set_ca(&mut self, material: ClientCaMaterial) {
        let entry = ClientCaEntry { name: ca_name(), material: Some(Arc::new(material)) };
        self.activator.apply_change(|table| drop(table.client_cas.insert(ca_name(), entry)));
    }

    fn set_tls(&mut self, tls: TlsSettings) {
        self.activator.apply_change(|table| table.settings.edge.tls = tls);
    }

    /// Sends a request for `host` over a new connection for `name`, and returns the begin of the response. The error is
    /// that of the handshake: in TLS 1.3, a client may learn of it only behind its own part.
    async fn get(&self, config: ClientConfig, name: &str, host: &str) -> io::Result<String> {
        let mut client = open(self.activator.outside_tls, config, name).await?;
        client.write_all(get(host, "").as_bytes()).await?;
        client.flush().await?;
        let mut begin = vec![0; 4096];
        match client.read(&mut begin).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => Ok(String::from_utf8_lossy(&begin[..count]).into_owned()),
        }
    }

    fn handshakes(&self, result: &str) -> f64 {
        let name = format!("rouse_activator_tls_handshakes_total{{result=\"{result}\"}}");
        self.activator.metric(&name)
    }
}

fn get(host: &str, fields: &str) -> String {
    format!("GET / HTTP/1.1\r\nhost: {host}\r\n{fields}\r\n")
}

/// Value of a field of a response.
fn field<'a>(response: &'a str, name: &str) -> Vec<&'a str> {
    let prefix = format!("{name}: ");
    response.lines().filter_map(|line| line.strip_prefix(&prefix)).collect()
}

fn with_certificate(issued: &TestCertificate) -> ClientConfig {
    client_auth_config(ALL_VERSIONS, &[], issued)
}

#[tokio::test]
async fn only_clients_with_a_certificate_of_the_ca_reach_the_pod() {
    let fixture = PolicyFixture::start().await;
    let versions: [&[&'static SupportedProtocolVersion]; 2] = [&[&TLS12], &[&TLS13]];
    let foreign = TestAuthority::new().issue_client("mallory");
    let expired = fixture.clients.issue_client_until("old", 1);
    let of_server = fixture.clients.issue(&["a.example"]);
    for (round, version) in versions.into_iter().enumerate() {
        let refused = [
            versioned_config(version, &[]),
            client_auth_config(version, &[], &foreign),
            client_auth_config(version, &[], &expired),
            client_auth_config(version, &[], &of_server),
        ];
        for (at, config) in refused.into_iter().enumerate() {
            let result = fixture.get(config, REQUIRED, REQUIRED).await;
            assert!(result.is_err(), "{version:?} {at}: {result:?}");
        }
        wait_until(|| fixture.handshakes("refused") == 4.0 * (round + 1) as f64).await;
        assert_eq!(fixture.pod.requests(), round);
        let good = client_auth_config(version, &[], &fixture.clients.issue_client("alice"));
        let response = fixture.get(good, REQUIRED, REQUIRED).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 200 "), "{version:?}: {response}");
    }
    assert_eq!(fixture.pod.requests(), 2);
}

#[tokio::test]
async fn an_optional_certificate_may_be_missing_but_not_invalid() {
    let fixture = PolicyFixture::start().await;
    let response = fixture.get(client_config(&[]), OPTIONAL, OPTIONAL).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert!(!fixture.pod.heads().contains("x-forwarded-client-cert"));
    let foreign = TestAuthority::new().issue_client("mallory");
    assert!(fixture.get(with_certificate(&foreign), OPTIONAL, OPTIONAL).await.is_err());
    let alice = fixture.clients.issue_client("alice");
    let response = fixture.get(with_certificate(&alice), OPTIONAL, OPTIONAL).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let heads = fixture.pod.heads();
    assert!(heads.contains(";Subject=\"CN=alice,O=Clients\"\r\n"), "{heads}");
}

#[tokio::test]
async fn the_pod_learns_the_certificate_and_no_claim_of_the_client() {
    let mut fixture = PolicyFixture::start().await;
    let config = Arc::new(with_certificate(&fixture.clients.issue_client("alice")));
    let forged = "x-forwarded-client-cert: Hash=forged\r\nx_forwarded_client_cert: Hash=forged\r\n";
    let at = fixture.activator.outside_tls;
    // Also from a trusted proxy, which may not know the header.
    for trusted in [vec![], vec!["127.0.0.1/32".parse().unwrap()]] {
        fixture.activator.apply_change(|table| table.settings.edge.trusted_proxies = trusted);
        fixture.pod.heads.lock().unwrap().clear();
        let mut client = open(at, Arc::clone(&config), REQUIRED).await.unwrap();
        send(&mut client, get(REQUIRED, forged)).await;
        read_until(&mut client, "hello").await;
        let heads = fixture.pod.heads();
        let shown = field(&heads, "x-forwarded-client-cert");
        assert!(shown.len() == 1 && shown[0].starts_with("Hash="), "{heads}");
        assert!(shown[0].ends_with(";Subject=\"CN=alice,O=Clients\""), "{heads}");
        assert!(!heads.contains("forged"), "{heads}");
        let mut client = open(at, client_config(&[]), HOST).await.unwrap();
        send(&mut client, get(HOST, forged)).await;
        read_until(&mut client, "hello").await;
        assert!(!fixture.pod.heads().contains("forged"), "also where no certificate is asked for");
    }
}

/// Clients reuse a connection for all names of a certificate.
#[tokio::test]
async fn a_host_with_another_client_policy_gets_421_over_both_versions() {
    let fixture = PolicyFixture::start().await;
    let alice = fixture.clients.issue_client("alice");
    for (name, host, expected) in [
        (REQUIRED, REQUIRED, 200),
        (OPTIONAL, OPTIONAL, 200),
        (HOST, OPEN, 200),
        (HOST, REQUIRED, 421),
        (OPEN, OPTIONAL, 421),
        (OPTIONAL, REQUIRED, 421),
        (REQUIRED, OPTIONAL, 421),
        (REQUIRED, HOST, 421),
        // Addresses are no names, so the client is asked for no certificate.
        ("127.0.0.1", REQUIRED, 421),
    ] {
        let before = fixture.pod.requests();
        let response = fixture.get(with_certificate(&alice), name, host).await.unwrap();
        assert!(
            response.starts_with(&format!("HTTP/1.1 {expected} ")),
            "{name} {host}: {response}"
        );
        let config = client_auth_config(ALL_VERSIONS, &["h2"], &alice);
        let stream = open(fixture.activator.outside_tls, config, name).await.unwrap();
        let client = Http2TestClient::over(stream).await;
        let request = Request::get(format!("http://{host}/"));
        let response = client.send_request(request, &[]).await.unwrap();
        assert_eq!(response.head.status().as_u16(), expected, "{name} {host}");
        let forwarded = if expected == 200 { 2 } else { 0 };
        assert_eq!(fixture.pod.requests() - before, forwarded, "{name} {host}");
    }
}

#[tokio::test]
async fn a_rule_that_changes_holds_for_open_connections() {
    let mut fixture = PolicyFixture::start().await;
    let mut client = open(fixture.activator.outside_tls, client_config(&[]), OPEN).await.unwrap();
    send(&mut client, get(OPEN, "")).await;
    assert!(read_until(&mut client, "hello").await.starts_with("HTTP/1.1 200 "));
    let config = client_config(&["h2"]);
    let stream = open(fixture.activator.outside_tls, config, OPEN).await.unwrap();
    let http2_client = Http2TestClient::over(stream).await;
    fixture.activator.set_mapped_domains(vec![mapped(OPEN, client_auth(false))]);
    send(&mut client, get(OPEN, "")).await;
    // Without an end of the connection, the client would send its next request over it too.
    let response = read_rest(&mut client).await;
    assert!(response.starts_with("HTTP/1.1 421 "), "{response}");
    assert_eq!(field(&response, "connection"), ["close"]);
    assert_eq!(fixture.pod.requests(), 1);
    // A connection of HTTP/2 still serves the hosts that have its rule.
    for (host, expected) in [(OPEN, 421), (HOST, 200)] {
        let request = Request::get(format!("http://{host}/"));
        let response = http2_client.send_request(request, &[]).await.unwrap();
        assert_eq!(response.head.status().as_u16(), expected, "{host}");
    }
    assert_eq!(fixture.pod.requests(), 2);
}

/// Clients that do not know 421 would use such a connection as long as they have requests.
#[tokio::test]
async fn a_connection_of_http2_ends_with_the_rule_of_its_own_host() {
    let mut fixture = PolicyFixture::start().await;
    let alice = fixture.clients.issue_client("alice");
    let config = client_auth_config(ALL_VERSIONS, &["h2"], &alice);
    let stream = open(fixture.activator.outside_tls, config, OPTIONAL).await.unwrap();
    let client = Http2TestClient::over(stream).await;
    let status = async |host: &str| {
        let request = Request::get(format!("http://{host}/"));
        client.send_request(request, &[]).await.unwrap().head.status().as_u16()
    };
    assert_eq!(status(REQUIRED).await, 421);
    assert_eq!(status(OPTIONAL).await, 200, "another host's 421 does not end it");
    fixture.activator.set_mapped_domains(vec![mapped(OPTIONAL, client_auth(false))]);
    assert_eq!(status(OPTIONAL).await, 421);
    wait_until(|| client.is_closed()).await;
    assert_eq!(fixture.pod.requests(), 1);
}

#[tokio::test]
async fn without_tls_no_client_reaches_a_host_that_requires_certificates() {
    let mut fixture = PolicyFixture::start().await;
    let outside = fixture.activator.outside;
    let plain = async |fixture: &PolicyFixture, host: &str, fields: &str| {
        let fields = format!("connection: close\r\n{fields}");
        fixture.activator.exchange_at(outside, &get(host, &fields)).await
    };
    let response = plain(&fixture, REQUIRED, "x-forwarded-proto: https\r\n").await;
    assert!(response.starts_with("HTTP/1.1 301 "), "{response}");
    assert_eq!(field(&response, "location"), [format!("https://{REQUIRED}/").as_str()]);
    assert_eq!(fixture.pod.requests(), 0);
    let optional = plain(&fixture, OPTIONAL, "").await;
    assert!(optional.starts_with("HTTP/1.1 200 "), "{optional}");
    // A proxy has ended TLS, so the client's certificate is not known. A redirect would come back.
    fixture.activator.apply_change(|table| {
        table.settings.edge.trusted_proxies = vec!["127.0.0.1/32".parse().unwrap()];
    });
    let fields = "x-forwarded-proto: https\r\nx-forwarded-client-cert: Hash=1\r\n";
    let response = plain(&fixture, REQUIRED, fields).await;
    assert!(response.starts_with("HTTP/1.1 403 "), "{response}");
    assert_eq!(fixture.pod.requests(), 1);
}

#[tokio::test]
async fn without_authorities_a_host_accepts_no_client() {
    let mut fixture = PolicyFixture::start().await;
    let alice = fixture.clients.issue_client("alice");
    fixture.activator.apply_change(|table| table.client_cas.clear());
    let unnamed = "unnamed.example";
    fixture.activator.set_mapped_domains(vec![
        mapped(REQUIRED, client_auth(false)),
        mapped(OPTIONAL, client_auth(true)),
        mapped(unnamed, Some(ClientAuth { ca: None, is_optional: true })),
    ]);
    for host in [REQUIRED, OPTIONAL, unnamed] {
        let config = with_certificate(&alice);
        let refused = open(fixture.activator.outside_tls, config, host).await.unwrap_err();
        assert_eq!(received_alert(&refused), Some(AlertDescription::InternalError), "{host}");
    }
    wait_until(|| fixture.handshakes("no_client_ca") == 3.0).await;
    // Authorities that cannot be used open nothing, and replace none.
    fixture.set_ca(ClientCaMaterial(vec![b"no certificate".to_vec()]));
    assert!(fixture.get(with_certificate(&alice), REQUIRED, REQUIRED).await.is_err());
    fixture.set_ca(fixture.clients.client_ca());
    for broken in [false, true] {
        if broken {
            fixture.set_ca(ClientCaMaterial(vec![b"no certificate".to_vec()]));
        }
        let response = fixture.get(with_certificate(&alice), REQUIRED, REQUIRED).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 200 "), "{broken}: {response}");
        assert!(fixture.get(client_config(&[]), REQUIRED, REQUIRED).await.is_err(), "{broken}");
    }
    assert_eq!(fixture.pod.requests(), 2);
}

#[tokio::test]
async fn other_authorities_hold_for_new_connections() {
    let mut fixture = PolicyFixture::start().await;
    let [old, next] = [fixture.clients.issue_client("old"), {
        let authority = TestAuthority::new();
        let issued = authority.issue_client("next");
        fixture.set_ca(authority.client_ca());
        issued
    }];
    assert!(fixture.get(with_certificate(&old), REQUIRED, REQUIRED).await.is_err());
    let response = fixture.get(with_certificate(&next), REQUIRED, REQUIRED).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
}

#[tokio::test]
async fn each_connection_shows_the_certificate_again() {
    let fixture = PolicyFixture::start().await;
    let alice = fixture.clients.issue_client("alice");
    let versions: [&[&'static SupportedProtocolVersion]; 2] = [&[&TLS12], &[&TLS13]];
    for version in versions {
        let config = Arc::new(client_auth_config(version, &[], &alice));
        for round in 0..2 {
            let at = fixture.activator.outside_tls;
            let mut client = open(at, Arc::clone(&config), REQUIRED).await.unwrap();
            send(&mut client, get(REQUIRED, "connection: close\r\n")).await;
            assert!(read_rest(&mut client).await.ends_with("hello"));
            let kind = client.get_ref().1.handshake_kind();
            assert_ne!(kind, Some(HandshakeKind::Resumed), "{version:?} {round}");
        }
    }
}

#[tokio::test]
async fn strict_transport_security_is_sent_over_tls_alone() {
    let mut fixture = PolicyFixture::start().await;
    let hsts = |text| HstsPolicy::parse(text).ok();
    let sent = async |fixture: &PolicyFixture, host: &str| {
        let response = fixture.get(client_config(&[]), host, host).await.unwrap();
        field(&response, "strict-transport-security").join("|")
    };
    assert_eq!(sent(&fixture, OPEN).await, "", "there is no policy");
    let of_domain = MappedDomain { hsts: hsts("max-age=2"), ..mapped(OPEN, None) };
    fixture.activator.set_mapped_domains(vec![of_domain, mapped("other.example", None)]);
    assert_eq!(sent(&fixture, OPEN).await, "max-age=2");
    assert_eq!(sent(&fixture, HOST).await, "");
    fixture.activator.apply_change(|table| table.settings.edge.hsts = hsts("max-age=1; preload"));
    assert_eq!(sent(&fixture, OPEN).await, "max-age=2", "that of the domain goes first");
    assert_eq!(sent(&fixture, HOST).await, "max-age=1; preload");
    assert_eq!(sent(&fixture, "other.example").await, "max-age=1; preload");
    let request = get(OPEN, "connection: close\r\nx-forwarded-proto: https\r\n");
    let plain = fixture.activator.exchange_at(fixture.activator.outside, &request).await;
    assert!(plain.starts_with("HTTP/1.1 200 "), "{plain}");
    assert_eq!(field(&plain, "strict-transport-security").len(), 0, "{plain}");
}

#[tokio::test]
async fn the_strict_transport_security_of_the_pod_stays() {
    let response =
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nstrict-transport-security: max-age=7\r\n\r\nhello";
    let mut fixture = PolicyFixture::start_with(response).await;
    let hsts = HstsPolicy::parse("max-age=1").ok();
    fixture.activator.apply_change(|table| table.settings.edge.hsts = hsts);
    let response = fixture.get(client_config(&[]), HOST, HOST).await.unwrap();
    assert_eq!(field(&response, "strict-transport-security"), ["max-age=7"]);
}

#[tokio::test]
async fn versions_and_ciphers_change_for_new_connections() {
    let mut fixture = PolicyFixture::start().await;
    let at = fixture.activator.outside_tls;
    let old = || versioned_config(&[&TLS12], &[]);
    let mut kept = open(at, old(), HOST).await.unwrap();
    let ciphers = vec![TlsCipher::Chacha20Poly1305Sha256, TlsCipher::EcdheEcdsaAes128GcmSha256];
    fixture.set_tls(TlsSettings { min_version: TlsMinVersion::Tls12, ciphers: ciphers.clone() });
    let suite = async |config: ClientConfig| {
        let client = open(at, config, HOST).await.unwrap();
        client.get_ref().1.negotiated_cipher_suite().map(|it| it.suite())
    };
    let [new_suite, old_suite] = [
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    ];
    assert_eq!(suite(client_config(&[])).await, Some(new_suite));
    assert_eq!(suite(old()).await, Some(old_suite));
    fixture.set_tls(TlsSettings { min_version: TlsMinVersion::Tls13, ciphers });
    let refused = open(at, old(), HOST).await.unwrap_err();
    assert_eq!(received_alert(&refused), Some(AlertDescription::ProtocolVersion));
    assert_eq!(suite(client_config(&[])).await, Some(new_suite));
    // A host with certificates of clients follows the same settings.
    let alice = fixture.clients.issue_client("alice");
    let config = client_auth_config(&[&TLS12], &[], &alice);
    assert!(fixture.get(config, REQUIRED, REQUIRED).await.is_err());
    let config = client_auth_config(&[&TLS13], &[], &alice);
    assert!(fixture.get(config, REQUIRED, REQUIRED).await.is_ok());
    send(&mut kept, get(HOST, "")).await;
    let response = read_until(&mut kept, "hello").await;
    assert!(response.starts_with("HTTP/1.1 200 "), "the open connection goes on: {response}");
    fixture.set_tls(TlsSettings::default());
    assert!(open(at, old(), HOST).await.is_ok());
}
