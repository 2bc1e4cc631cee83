//! Raw TCP within TLS that ends at the gateway.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use common::{
    fixtures::{
        self,
        certificates::{TestAuthority, TestCertificate},
    },
    wire::{
        AppProtocol, ClientAuth, ClientCaEntry, DomainProtocol, MappedDomain, NamespacedName,
        PathRule,
    },
};
use rustls::{
    ALL_VERSIONS,
    version::{TLS12, TLS13},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    harness::{
        ActivatorFixture, LONG, read_head, read_until, revision, service, start_pod_with,
        wait_until,
    },
    tcp::{ended, greet_and_echo},
    tls_client::{
        TlsClient, client_auth_config, client_config, leaf, open, presented, send, versioned_config,
    },
};

const HOST: &str = "db.example";

fn domain(host: &str, client_auth: Option<ClientAuth>) -> MappedDomain {
    MappedDomain {
        certificate: Some(certificate_name()),
        client_auth,
        // A host below a wildcard is found by its rule.
        path_rule: host.starts_with("*.").then(PathRule::default),
        protocol: DomainProtocol::TcpOverTls,
        ..fixtures::mapped_domain(host)
    }
}

fn certificate_name() -> NamespacedName {
    NamespacedName::new("default", "db")
}

fn ca_name() -> NamespacedName {
    NamespacedName::new("default", "clients")
}

/// Starts an activator whose service takes raw TCP within TLS at this host. Returns the certificate of the host, too.
async fn start(host: &str, client_auth: Option<ClientAuth>) -> (ActivatorFixture, TestCertificate) {
    let mut fixture = ActivatorFixture::new().await;
    let issued = TestAuthority::new().issue(&[host]);
    fixture.apply_change(|table| {
        let name = certificate_name();
        table.certificates.insert(name.clone(), issued.entry(&name));
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::Tcp;
        table.services.get_mut(&service()).unwrap().protocol = Some(AppProtocol::Tcp);
    });
    fixture.set_mapped_domains(vec![domain(host, client_auth)]);
    (fixture, issued)
}

/// Asserts that the pod greets, and returns what the client sends.
async fn assert_served(client: &mut TlsClient) {
    assert_eq!(read_until(client, "\n").await, "220 ready\n");
    send(client, b"line\n").await;
    assert_eq!(read_until(client, "\n").await, "line\n");
}

/// Reads up to the end that the server announces; an end without `close_notify` fails.
async fn read_to_end(client: &mut TlsClient) -> Vec<u8> {
    let mut rest = Vec::new();
    let read = client.read_to_end(&mut rest);
    tokio::time::timeout(LONG, read).await.expect("ends in time").unwrap();
    rest
}

#[tokio::test]
async fn bytes_within_tls_reach_the_pod_and_each_side_ends_its_own() {
    let (mut fixture, issued) = start(HOST, None).await;
    let mut has_pod = false;
    for version in [&TLS12, &TLS13] {
        let config = versioned_config(&[version], &[]);
        let mut client = open(fixture.outside_tls, config, HOST).await.unwrap();
        assert!(presented(&client) == leaf(&issued));
        if !has_pod {
            // The first connection waits for a pod.
            fixture.wait_for_queued(1).await;
            let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
            fixture.add_ready_pod("p", address);
            has_pod = true;
        }
        assert_served(&mut client).await;
        // Far more than one buffer and one record.
        let large = vec![b'x'; 300_000];
        let (mut from, mut to) = tokio::io::split(client);
        let sent = async {
            to.write_all(&large).await.unwrap();
            to.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let (_, read) = tokio::join!(sent, from.read_to_end(&mut received));
        read.unwrap();
        assert!(received == large, "{} bytes came back", received.len());
    }
    wait_until(|| ended(&fixture, "complete") == 2.0).await;
}

/// The gateway does not know the protocol of the pod, and chooses none for it.
#[tokio::test]
async fn no_protocol_is_selected() {
    let (mut fixture, _) = start(HOST, None).await;
    let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
    fixture.add_ready_pod("p", address);
    for offered in [&["h2", "http/1.1"][..], &["postgresql"], &["http/1.1", "redis"], &[]] {
        let mut client = open(fixture.outside_tls, client_config(offered), HOST).await.unwrap();
        assert_eq!(client.get_ref().1.alpn_protocol(), None, "{offered:?}");
        assert_served(&mut client).await;
    }
}

#[tokio::test]
async fn the_wildcard_of_a_host_leads_to_the_pod() {
    let (mut fixture, _) = start("*.db.example", None).await;
    let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
    fixture.add_ready_pod("p", address);
    let mut client = open(fixture.outside_tls, client_config(&[]), "a.db.example").await.unwrap();
    assert_served(&mut client).await;
    open(fixture.outside_tls, client_config(&[]), "db.example").await.unwrap_err();
}

/// Somewhere on the way, the rest of the bytes may have been cut off.
#[tokio::test]
async fn an_end_without_close_notify_resets_the_pod() {
    let (mut fixture, _) = start(HOST, None).await;
    let (tell, mut told) = tokio::sync::mpsc::channel(1);
    let address = start_pod_with(move |mut stream: TcpStream, _| {
        let tell = tell.clone();
        async move {
            let mut received = Vec::new();
            let end = stream.read_to_end(&mut received).await;
            tell.send((received, end.map_err(|error| error.kind()))).await.unwrap();
        }
    })
    .await;
    fixture.add_ready_pod("p", address);
    let mut client = open(fixture.outside_tls, client_config(&[]), HOST).await.unwrap();
    send(&mut client, b"part").await;
    let (mut tcp, _session) = client.into_inner();
    tcp.shutdown().await.unwrap();
    let (received, end) = tokio::time::timeout(LONG, told.recv()).await.unwrap().unwrap();
    assert_eq!((received, end), (b"part".to_vec(), Err(std::io::ErrorKind::ConnectionReset)));
    wait_until(|| ended(&fixture, "reset") == 1.0).await;
}

#[tokio::test]
async fn a_pod_that_closes_first_gets_the_rest() {
    let (mut fixture, _) = start(HOST, None).await;
    let (tell, mut told) = tokio::sync::mpsc::channel(1);
    let address = start_pod_with(move |mut stream: TcpStream, _| {
        let tell = tell.clone();
        async move {
            stream.write_all(b"bye").await.unwrap();
            stream.shutdown().await.unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).await.unwrap();
            tell.send(received).await.unwrap();
        }
    })
    .await;
    fixture.add_ready_pod("p", address);
    let config = versioned_config(&[&TLS13], &[]);
    let mut client = open(fixture.outside_tls, config, HOST).await.unwrap();
    assert_eq!(read_to_end(&mut client).await, b"bye");
    send(&mut client, b"rest").await;
    client.shutdown().await.unwrap();
    let received = tokio::time::timeout(LONG, told.recv()).await.unwrap().unwrap();
    assert_eq!(received, b"rest");
    wait_until(|| ended(&fixture, "complete") == 1.0).await;
}

#[tokio::test]
async fn a_client_needs_the_certificate_that_its_host_requires() {
    let clients = TestAuthority::new();
    let client_auth = ClientAuth { ca: Some(ca_name()), is_optional: false };
    let (mut fixture, _) = start(HOST, Some(client_auth)).await;
    let material = Some(Arc::new(clients.client_ca()));
    let entry = ClientCaEntry { name: ca_name(), material };
    fixture.apply_change(|table| drop(table.client_cas.insert(ca_name(), entry)));
    let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
    fixture.add_ready_pod("p", address);
    let shown = client_auth_config(ALL_VERSIONS, &[], &clients.issue_client("client.example"));
    let mut client = open(fixture.outside_tls, shown, HOST).await.unwrap();
    assert_served(&mut client).await;
    // In TLS 1.3, a client may learn of the refusal only behind its own part.
    if let Ok(mut refused) = open(fixture.outside_tls, client_config(&[]), HOST).await {
        refused.read(&mut [0]).await.unwrap_err();
    }
    assert_eq!(fixture.metric("rouse_activator_tls_handshakes_total{result=\"complete\"}"), 1.0);
}

/// Bytes of HTTP are for the pod here, and a request without TLS finds no service of HTTP.
#[tokio::test]
async fn requests_of_http_are_not_read() {
    let (mut fixture, _) = start(HOST, None).await;
    let address = start_pod_with(|stream, _| greet_and_echo(stream)).await;
    fixture.add_ready_pod("p", address);
    let head = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\n\r\n");
    let mut client = open(fixture.outside_tls, client_config(&["http/1.1"]), HOST).await.unwrap();
    assert_eq!(read_until(&mut client, "\n").await, "220 ready\n");
    send(&mut client, &head).await;
    assert_eq!(read_head(&mut client).await, head);
    let request = format!("GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n");
    let response = fixture.exchange_at(fixture.outside, &request).await;
    assert!(!response.starts_with("HTTP/1.1 2"), "{response}");
}
