//! Gateway ports: raw TCP from outside to the service that has the port.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    sync::Arc,
    time::Duration,
};

use common::{
    fixtures,
    wire::{
        AllowedSources, AppProtocol, DomainProtocol, EdgeSettings, GatewayRules, MappedDomain,
        NamespacedName, PathRule, RouteTable, ServiceEntry,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    harness::{
        ActivatorFixture, LONG, PausedClock, hello_service, read_rest, read_until, revision,
        service, start_pod_with, unused_port, wait_until,
    },
    tcp::{assert_served, assert_served_again, ended, greet_and_echo},
};

/// Starts an activator with a gateway on loopback, whose service takes raw TCP and has the gateway port `port`.
pub(crate) async fn start_with_port(port: u16) -> ActivatorFixture {
    let mut fixture = ActivatorFixture::with(|config| {
        config.outside = Some((Ipv4Addr::LOCALHOST, 0).into());
    })
    .await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().protocol = AppProtocol::Tcp;
        set_gateway_port(table, &service(), Some(port));
    });
    fixture
}

fn set_gateway_port(table: &mut RouteTable, name: &NamespacedName, port: Option<u16>) {
    let entry = table.services.get_mut(name).unwrap();
    let rules = port.map(|port| GatewayRules {
        gateway_port: NonZeroU16::new(port),
        ..GatewayRules::default()
    });
    (entry.protocol, entry.gateway_rules) = (Some(AppProtocol::Tcp), rules.map(Box::new));
}

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap()
}

fn is_open(port: u16) -> bool {
    std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

async fn assert_reset(client: &mut TcpStream) {
    let read = tokio::time::timeout(LONG, client.read(&mut [0])).await.expect("ends in time");
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

async fn greeting_pod() -> SocketAddr {
    start_pod_with(|stream, _| greet_and_echo(stream)).await
}

#[tokio::test]
async fn a_connection_from_outside_waits_for_a_pod_and_closes_its_halves() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    let mut client = connect(port).await;
    fixture.wait_for_queued(1).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    assert_served(&mut client).await;
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, "");
    wait_until(|| ended(&fixture, "complete") == 1.0).await;
    assert_eq!(fixture.waiting_totals(), (1, 1));
    assert_eq!(fixture.metric("rouse_activator_gateway_ports"), 1.0);
}

#[tokio::test]
async fn a_port_is_open_while_a_service_has_it_and_its_connections_stay() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let mut client = connect(port).await;
    assert_served(&mut client).await;
    fixture.apply_change(|table| set_gateway_port(table, &service(), None));
    wait_until(|| !is_open(port)).await;
    assert_served_again(&mut client).await;
    assert_eq!(fixture.metric("rouse_activator_gateway_ports"), 0.0);
}

/// The task of the closed listener has its socket until it runs, and another one cannot be bound meanwhile.
#[tokio::test]
async fn a_port_that_closes_and_soon_opens_again_answers_each_connection() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    for round in 0..50 {
        fixture.apply_change(|table| set_gateway_port(table, &service(), None));
        // In some rounds the task does not run before the port opens again, in others it closes the listener first.
        for _ in 0..round % 5 {
            tokio::task::yield_now().await;
        }
        fixture.apply_change(|table| set_gateway_port(table, &service(), Some(port)));
        assert_eq!(fixture.metric("rouse_activator_gateway_ports_failed"), 0.0, "round {round}");
        assert_eq!(fixture.metric("rouse_activator_gateway_ports"), 1.0, "round {round}");
        assert_served(&mut connect(port).await).await;
    }
    fixture.apply_change(|table| set_gateway_port(table, &service(), None));
    wait_until(|| !is_open(port)).await;
}

/// As above, while the tasks of listeners run on other threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_closes_and_opens_again_beside_its_task_answers_each_connection() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    for round in 0..50 {
        fixture.apply_change(|table| set_gateway_port(table, &service(), None));
        fixture.apply_change(|table| set_gateway_port(table, &service(), Some(port)));
        assert_eq!(fixture.metric("rouse_activator_gateway_ports_failed"), 0.0, "round {round}");
        assert_served(&mut connect(port).await).await;
    }
}

/// Without an eBPF program for all ports, each service's own port has such a listener too.
#[tokio::test]
async fn a_services_own_port_that_goes_and_soon_comes_again_answers_each_connection() {
    let mut fixture = start_with_port(unused_port()).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let entry = fixture.table.services[&service()].clone();
    for round in 0..50 {
        fixture.apply_change(|table| drop(table.services.remove(&service())));
        for _ in 0..round % 5 {
            tokio::task::yield_now().await;
        }
        fixture.apply_change(|table| drop(table.services.insert(service(), entry.clone())));
        assert!(fixture.activator.ports.not_ready_reasons().is_empty(), "round {round}");
        assert_served(&mut fixture.connect().await).await;
    }
}

#[tokio::test]
async fn a_port_that_moves_leads_new_connections_to_its_next_service() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    let other = NamespacedName::new("default", "zz-other");
    let own_port = unused_port();
    fixture.add_ready_pod("p", greeting_pod().await);
    for in_one_batch in [true, false] {
        fixture.apply_change(|table| set_gateway_port(table, &service(), Some(port)));
        assert_served(&mut connect(port).await).await;
        if !in_one_batch {
            fixture.apply_change(|table| set_gateway_port(table, &service(), None));
            wait_until(|| !is_open(port)).await;
        }
        fixture.apply_change(|table| {
            let entry = ServiceEntry {
                name: other.clone(),
                hosts: Vec::new(),
                targets: Vec::new(),
                ..hello_service(own_port)
            };
            table.services.insert(other.clone(), entry);
            set_gateway_port(table, &service(), None);
            set_gateway_port(table, &other, Some(port));
        });
        // That service has no Revision, so that its connections fail at once.
        wait_until(|| is_open(port)).await;
        assert_reset(&mut connect(port).await).await;
        fixture.apply_change(|table| drop(table.services.remove(&other)));
        wait_until(|| !is_open(port)).await;
    }
}

/// The controller lists each port once. Should a table list one twice, each activator chooses the same service.
#[tokio::test]
async fn a_port_that_is_listed_twice_has_one_owner_in_any_order() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let other = NamespacedName::new("default", "zz-other");
    let own_port = unused_port();
    fixture.apply_change(|table| {
        let entry = ServiceEntry {
            name: other.clone(),
            hosts: Vec::new(),
            targets: Vec::new(),
            ..hello_service(own_port)
        };
        table.services.insert(other.clone(), entry);
        set_gateway_port(table, &other, Some(port));
    });
    assert_served(&mut connect(port).await).await;
    let owner = |fixture: &ActivatorFixture| {
        let routes = &fixture.activator.forwarder.routes;
        routes.service_by_gateway_port(port).map(|it| it.name.name.to_string())
    };
    let first = Some(service().name.to_string());
    // Each one is listed again as the last.
    for name in [service(), other.clone()] {
        for listed in [None, Some(port)] {
            fixture.apply_change(|table| set_gateway_port(table, &name, listed));
        }
        assert_eq!(owner(&fixture), first);
    }
    fixture.apply_change(|table| set_gateway_port(table, &service(), None));
    assert_eq!(owner(&fixture).as_deref(), Some("zz-other"));
    fixture.apply_change(|table| set_gateway_port(table, &other, None));
    assert_eq!(owner(&fixture), None);
    wait_until(|| !is_open(port)).await;
}

/// A client that sends HTTP to a gateway port must not reach anything by its Host.
#[tokio::test]
async fn bytes_of_http_are_not_read() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let mut client = connect(port).await;
    let head = "GET / HTTP/1.1\r\nhost: hello.default.example.com\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut client, "\r\n\r\n").await, format!("220 ready\n{head}"));
}

#[tokio::test]
async fn a_port_that_is_taken_is_reported_and_opened_later() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut fixture = start_with_port(port).await;
    assert_eq!(fixture.metric("rouse_activator_gateway_ports_failed"), 1.0);
    assert!(fixture.activator.ports.not_ready_reasons().is_empty(), "all else is served");
    drop(taken);
    fixture.activator.gateway_ports.retry_failed();
    assert_eq!(fixture.metric("rouse_activator_gateway_ports_failed"), 0.0);
    fixture.add_ready_pod("p", greeting_pod().await);
    assert_served(&mut connect(port).await).await;
}

/// The address of a client from outside is not the one that policies name, as at the gateway of HTTP.
#[tokio::test]
async fn network_policies_of_pods_are_for_clients_inside() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    fixture.apply_change(|table| {
        let entry = table.revisions.get_mut(&revision()).unwrap();
        entry.allowed_sources = Some(Arc::new(AllowedSources::default()));
    });
    assert_reset(&mut fixture.connect().await).await;
    assert_served(&mut connect(port).await).await;
}

#[tokio::test]
async fn a_trusted_proxy_names_the_client_and_others_pass_their_bytes() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let set_trusted = |fixture: &mut ActivatorFixture, network: &str| {
        let edge = EdgeSettings {
            trusted_proxies: vec![network.parse().unwrap()],
            requires_proxy_protocol: true,
            ..EdgeSettings::default()
        };
        fixture.apply_change(|table| table.settings.edge = edge);
    };
    let header = "PROXY TCP4 192.0.2.1 198.51.100.1 56324 5432\r\n";
    set_trusted(&mut fixture, "127.0.0.1/32");
    let mut client = connect(port).await;
    client.write_all(header.as_bytes()).await.unwrap();
    assert_served(&mut client).await;
    let mut bad = connect(port).await;
    bad.write_all(b"PROXY TCP4 a b 1 2\r\n").await.unwrap();
    assert_reset(&mut bad).await;
    wait_until(|| ended(&fixture, "failed") == 1.0).await;
    set_trusted(&mut fixture, "192.0.2.0/24");
    let mut client = connect(port).await;
    client.write_all(header.as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut client, "\r\n").await, format!("220 ready\n{header}"));
}

#[tokio::test]
async fn a_silent_connection_ends_at_its_deadline_and_one_inside_never() {
    let port = unused_port();
    let mut fixture = start_with_port(port).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    let idle = Duration::from_secs(3600);
    fixture.apply_change(|table| table.settings.edge.tcp_idle_timeout = Some(idle));
    let (mut outside, mut inside) = (connect(port).await, fixture.connect().await);
    assert_served(&mut outside).await;
    assert_served(&mut inside).await;
    let clock = PausedClock::start_paused();
    clock.advance(idle / 2).await;
    // Bytes begin the time again.
    assert_served_again(&mut outside).await;
    clock.advance(idle * 3 / 4).await;
    assert_eq!(ended(&fixture, "idle"), 0.0);
    clock.advance(idle / 2).await;
    clock.until(|| ended(&fixture, "idle") == 1.0).await;
    drop(clock);
    assert_reset(&mut outside).await;
    assert_served_again(&mut inside).await;
}

#[test]
fn the_addresses_of_gateway_ports_are_those_of_the_gateway() {
    let mut config = activator::ActivatorConfig::defaults();
    assert!(config.gateway_ips().is_empty(), "without a gateway nothing is open to the outside");
    config.listen = vec![Ipv4Addr::LOCALHOST.into()];
    config.inside_port = NonZeroU16::new(8081);
    assert!(config.gateway_ips().is_empty());
    config.outside_tls_port = NonZeroU16::new(8443);
    config.outside = Some("192.0.2.7:80".parse().unwrap());
    let addresses: Vec<String> = config.gateway_ips().iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["127.0.0.1", "192.0.2.7"]);
}

/// ClientHello that names this host, with the extensions that servers require.
fn client_hello(host: &str) -> Vec<u8> {
    let with_length = |content: &[u8]| {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        [&length[..], content].concat()
    };
    let names = with_length(&[&[0][..], &with_length(host.as_bytes())].concat());
    let schemes = with_length(&[4, 3, 8, 4]);
    let server_name = [&[0, 0][..], &with_length(&names)].concat();
    let signature_algorithms = [&[0, 13][..], &with_length(&schemes)].concat();
    let extensions = with_length(&[server_name, signature_algorithms].concat());
    let fixed = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0]].concat();
    let body = [fixed, extensions].concat();
    let message = [&[1, 0][..], &with_length(&body)].concat();
    [&[22, 3, 1][..], &with_length(&message)].concat()
}

/// Passes TLS of a host through to the service, which has no other host.
fn pass_through(fixture: &mut ActivatorFixture, host: &str) {
    let domain = MappedDomain {
        // A host below a wildcard is found by its rule.
        path_rule: host.starts_with("*.").then(PathRule::default),
        protocol: DomainProtocol::TlsPassthrough,
        ..fixtures::mapped_domain(host)
    };
    fixture.set_mapped_domains(vec![domain]);
}

/// Starts an activator that passes TLS of a host through to its pod, which greets and echoes what it gets.
async fn start_passthrough(host: &str) -> ActivatorFixture {
    let mut fixture = start_with_port(unused_port()).await;
    fixture.add_ready_pod("p", greeting_pod().await);
    pass_through(&mut fixture, host);
    fixture
}

/// Starts an activator without a pod whose handshakes end after a minute, and sends the begin of a ClientHello.
async fn start_half_hello() -> (ActivatorFixture, TcpStream) {
    let mut fixture = ActivatorFixture::with(|config| {
        config.tls_handshake_timeout_ms = 60_000;
    })
    .await;
    pass_through(&mut fixture, "db.example");
    let mut client = TcpStream::connect(fixture.outside_tls).await.unwrap();
    client.write_all(&client_hello("db.example")[..20]).await.unwrap();
    (fixture, client)
}

/// Reads as many bytes as `expected` has, and compares them.
async fn assert_received(client: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    tokio::time::timeout(LONG, client.read_exact(&mut got)).await.expect("in time").unwrap();
    assert!(got == expected, "{got:?}");
}

#[tokio::test]
async fn tls_of_a_passthrough_host_reaches_the_pod_as_it_is() {
    let fixture = start_passthrough("db.example").await;
    let hello = client_hello("DB.example");
    let passed = [&b"220 ready\n"[..], &hello].concat();
    // At once, and in three parts.
    for part in [hello.len(), 40] {
        let mut client = TcpStream::connect(fixture.outside_tls).await.unwrap();
        client.set_nodelay(true).unwrap();
        for bytes in hello.chunks(part) {
            client.write_all(bytes).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_received(&mut client, &passed).await;
    }
    // Other hosts have their handshake, here without a certificate.
    let mut other = TcpStream::connect(fixture.outside_tls).await.unwrap();
    other.write_all(&client_hello("other.example")).await.unwrap();
    assert_received(&mut other, &[0x15, 3, 3, 0, 2, 2, 112]).await;
    // Without TLS the host leads to no service of HTTP.
    let request = "GET / HTTP/1.1\r\nhost: db.example\r\nconnection: close\r\n\r\n";
    let response = fixture.exchange_at(fixture.outside, request).await;
    assert!(!response.starts_with("HTTP/1.1 2"), "{response}");
}

#[tokio::test]
async fn a_passthrough_host_that_goes_has_no_certificate_and_then_a_handshake() {
    let mut fixture = start_passthrough("db.example").await;
    for is_passed in [true, false] {
        if !is_passed {
            fixture.set_mapped_domains(Vec::new());
        }
        let mut client = TcpStream::connect(fixture.outside_tls).await.unwrap();
        client.write_all(&client_hello("db.example")).await.unwrap();
        let expected: &[u8] = if is_passed { b"220 ready\n" } else { &[0x15, 3, 3, 0, 2, 2, 112] };
        assert_received(&mut client, expected).await;
    }
}

#[tokio::test]
async fn a_wildcard_passes_tls_of_the_names_below_it_through() {
    let fixture = start_passthrough("*.db.example").await;
    let refused: &[u8] = &[0x15, 3, 3, 0, 2, 2, 112];
    for (host, expected) in [
        ("a.db.example", &b"220 ready\n"[..]),
        ("db.example", refused),
        ("a.b.db.example", refused),
    ] {
        let mut client = TcpStream::connect(fixture.outside_tls).await.unwrap();
        client.write_all(&client_hello(host)).await.unwrap();
        assert_received(&mut client, expected).await;
    }
}

/// The kernel has accepted its connection, so that no other activator can serve it.
#[tokio::test]
async fn a_passthrough_client_that_comes_just_before_the_stop_reaches_the_pod() {
    let fixture = start_passthrough("db.example").await;
    let hello = client_hello("db.example");
    // Without an await, so that the activator sees the connection and the stop at the same time.
    let mut client = std::net::TcpStream::connect(fixture.outside_tls).unwrap();
    client.write_all(&hello).unwrap();
    fixture.shutdown.cancel();
    client.set_nonblocking(true).unwrap();
    let mut client = TcpStream::from_std(client).unwrap();
    assert_received(&mut client, &[&b"220 ready\n"[..], &hello].concat()).await;
}

/// The look at the ClientHello takes time of the handshake.
#[tokio::test]
async fn half_a_client_hello_ends_at_the_deadline_of_handshakes() {
    let most = Duration::from_secs(60);
    let (fixture, _client) = start_half_hello().await;
    wait_until(|| fixture.metric("rouse_activator_client_connections") == 1.0).await;
    let clock = PausedClock::start_paused();
    clock.advance(most + Duration::from_secs(1)).await;
    let late = "rouse_activator_tls_handshakes_total{result=\"timeout\"}";
    clock.until(|| fixture.metric(late) == 1.0).await;
}

/// The bytes of the client stay in the kernel, where they hide its FIN from a look.
#[tokio::test]
async fn half_a_client_hello_with_an_end_behind_it_ends_before_the_deadline() {
    let (fixture, mut client) = start_half_hello().await;
    client.shutdown().await.unwrap();
    let closed = "rouse_activator_tls_handshakes_total{result=\"closed\"}";
    let is_open =
        |fixture: &ActivatorFixture| fixture.metric("rouse_activator_client_connections") == 1.0;
    wait_until(|| is_open(&fixture) || fixture.metric(closed) == 1.0).await;
    let clock = PausedClock::start_paused();
    // A quarter of the time until the deadline, in steps of the longest time between two looks.
    for _ in 0..60 {
        clock.advance(Duration::from_millis(250)).await;
    }
    clock.until(|| fixture.metric(closed) == 1.0).await;
}
