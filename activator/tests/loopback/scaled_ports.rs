//! Ports of scaled Services: each leads to a port of its own in each pod, in a protocol of its own.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use activator::revisions::revision::ActivatorRevision;
use common::{
    fixtures,
    wire::{AppProtocol, PodEntry, RevisionEntry, RouteTable, RoutingPhase, ServiceEntry},
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
};

use crate::{
    h2c::{self, FakeHttp2Pod},
    harness::{
        ActivatorFixture, GET, LONG, OK, read_rest, service, start_pod, start_pod_with,
        unused_port, wait_until,
    },
    tcp::{assert_served, assert_served_again, ended, greet_and_echo},
};

/// Activator with a scaled Service `default/hello`, whose one Revision has the same name.
struct ScaledServiceFixture {
    activator: ActivatorFixture,
}

impl ScaledServiceFixture {
    /// Starts an activator for a Service with these ports.
    async fn new(ports: &[(u16, AppProtocol)]) -> Self {
        let mut activator = ActivatorFixture::new().await;
        activator.apply_change(|table| {
            *table = RouteTable::default();
            let revision = fixtures::revision(&service(), "hello");
            table.revisions.insert(service(), RevisionEntry { timeout: LONG, ..revision });
            for &(port, protocol) in ports {
                let activator_port = unused_port().try_into().unwrap();
                let entry = fixtures::scaled_port(&service(), port, protocol);
                let entry = ServiceEntry { activator_port, ..entry };
                table.services.insert(entry.name.clone(), entry);
            }
        });
        Self { activator }
    }

    /// Adds a ready pod whose serving port is that of its first one. `ports` are those of the Service, with the
    /// addresses at which the pod serves them.
    fn add_pod(&mut self, uid: &str, ports: &[(u16, SocketAddr, AppProtocol)]) {
        let entry = PodEntry {
            ports: ports
                .iter()
                .map(|(port, address, protocol)| {
                    fixtures::pod_port(*port, address.port(), *protocol)
                })
                .collect(),
            ..fixtures::pod_at(uid, &service(), RoutingPhase::Ready, ports[0].1)
        };
        self.activator.apply_change(|table| drop(table.pods.insert(uid.to_owned(), entry)));
    }

    async fn connect(&self, port: u16) -> TcpStream {
        TcpStream::connect(self.address(port)).await.unwrap()
    }

    /// Sends a request to a port, and returns the response.
    async fn exchange(&self, port: u16, request: &str) -> String {
        self.activator.exchange_at(self.address(port), request).await
    }

    /// Address at the activator of a port of the Service.
    fn address(&self, port: u16) -> SocketAddr {
        let name = service().with_port(port.try_into().unwrap());
        let activator_port = self.activator.table.services[&name].activator_port;
        (Ipv4Addr::LOCALHOST, activator_port.get()).into()
    }

    fn revision(&self) -> Arc<ActivatorRevision> {
        self.activator.activator.forwarder.routes.revision(&service()).unwrap()
    }

    async fn wait_for_queued(&self, count: usize) {
        let revision = self.revision();
        wait_until(|| revision.waiting_count() == count).await;
    }

    /// Totals of the requests that waited: begun, ended, and those that no pod got.
    fn totals(&self) -> (u64, u64, u64) {
        let (totals, _) = self.revision().totals();
        (totals.started, totals.finished, totals.abandoned)
    }
}

async fn start_tcp_pod() -> SocketAddr {
    start_pod_with(|stream, _| greet_and_echo(stream)).await
}

/// Socket at whose address connects are refused, because it does not listen.
fn bind_refusing_socket() -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    socket
}

#[tokio::test]
async fn each_port_of_a_pod_is_served_in_its_own_protocol() {
    use AppProtocol::{H2c, Http1, Tcp};
    let mut fixture =
        ScaledServiceFixture::new(&[(80, Http1), (5432, Tcp), (9000, H2c), (8081, Http1)]).await;
    let http = start_pod(OK, Duration::ZERO).await;
    let (tcp, http2) = (start_tcp_pod().await, FakeHttp2Pod::start(h2c::echo).await);
    let mut waiting = fixture.connect(5432).await;
    let mut asking = fixture.connect(80).await;
    asking.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(2).await;
    // Two ports of the Service may lead to one of the pod.
    let ports = [
        (80, http.address, Http1),
        (5432, tcp, Tcp),
        (8081, http.address, Http1),
        (9000, http2.address, H2c),
    ];
    fixture.add_pod("p", &ports);
    assert!(read_rest(&mut asking).await.ends_with("hello"));
    assert_served(&mut waiting).await;
    assert_eq!(fixture.totals(), (2, 2, 0));
    for port in [80, 8081] {
        assert!(fixture.exchange(port, GET).await.ends_with("hello"), "{port}");
    }
    assert_eq!(http.requests(), 3);
    assert!(fixture.exchange(9000, GET).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(http2.requests(), 1);
    assert_served(&mut fixture.connect(5432).await).await;
    wait_until(|| fixture.revision().queue_metrics().at_pods == 1).await;
    assert_served_again(&mut waiting).await;
    drop(waiting);
    wait_until(|| fixture.revision().queue_metrics().at_pods == 0).await;
}

#[tokio::test]
async fn a_pod_without_the_port_is_no_backend() {
    use AppProtocol::{Http1, Tcp};
    let mut fixture = ScaledServiceFixture::new(&[(80, Http1), (5432, Tcp)]).await;
    let http = start_pod(OK, Duration::ZERO).await;
    fixture.add_pod("old", &[(80, http.address, Http1)]);
    let mut waiting = fixture.connect(5432).await;
    fixture.wait_for_queued(1).await;
    for _ in 0..10 {
        assert!(fixture.exchange(80, GET).await.ends_with("hello"), "no other port waits");
    }
    assert_eq!(fixture.totals(), (1, 0, 0));
    let new = [(80, http.address, Http1), (5432, start_tcp_pod().await, Tcp)];
    fixture.add_pod("new", &new);
    assert_served(&mut waiting).await;
    // The first pod has fewer connections, and yet none of these.
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = fixture.connect(5432).await;
        assert_served(&mut client).await;
        clients.push(client);
    }
    assert_eq!(fixture.totals(), (1, 1, 0));
    // Open connections outlive the port. New ones wait until the pod has it again.
    fixture.add_pod("new", &new[..1]);
    let mut waiting = fixture.connect(5432).await;
    fixture.wait_for_queued(1).await;
    assert_served_again(&mut clients[0]).await;
    fixture.add_pod("new", &new);
    assert_served(&mut waiting).await;
}

/// A container of a pod may listen later than the one that is probed, or never.
#[tokio::test]
async fn a_port_that_refuses_delays_no_other_port_of_the_pod() {
    use AppProtocol::{Http1, Tcp};
    let mut fixture = ScaledServiceFixture::new(&[(80, Http1), (5432, Tcp)]).await;
    let (http, refusing) = (start_pod(OK, Duration::ZERO).await, bind_refusing_socket());
    let ports = [(80, http.address, Http1), (5432, refusing.local_addr().unwrap(), Tcp)];
    fixture.add_pod("p", &ports);
    let waiting = fixture.connect(5432).await;
    fixture.wait_for_queued(1).await;
    for _ in 0..20 {
        assert!(fixture.exchange(80, GET).await.ends_with("hello"));
    }
    assert_eq!(fixture.totals(), (1, 0, 0), "only the connection waits");
    waiting.set_zero_linger().unwrap();
    drop(waiting);
    wait_until(|| fixture.totals() == (1, 1, 1)).await;
    wait_until(|| ended(&fixture.activator, "cancelled") == 1.0).await;
}

#[tokio::test]
async fn the_name_of_a_scaled_service_states_no_port_for_the_gateway() {
    let mut fixture = ScaledServiceFixture::new(&[(80, AppProtocol::Http1)]).await;
    let http = start_pod(OK, Duration::ZERO).await;
    fixture.add_pod("p", &[(80, http.address, AppProtocol::Http1)]);
    for host in ["hello.default.svc", "hello.default.svc.cluster.local:80", "hello.default:80"] {
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let response = fixture.activator.exchange_at(fixture.activator.inside, &request).await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{host}: {response}");
    }
    assert_eq!(http.requests(), 0);
    // At its own port it is known, and a request without a host gets the Service's name.
    let response = fixture.exchange(80, "GET / HTTP/1.0\r\n\r\n").await;
    assert!(response.ends_with("hello"), "{response}");
    assert!(http.heads().contains("host: hello.default.svc\r\n"), "{}", http.heads());
}

#[tokio::test]
async fn a_port_may_change_its_protocol() {
    use AppProtocol::{Http1, Tcp};
    let mut fixture = ScaledServiceFixture::new(&[(80, Http1)]).await;
    let http = start_pod(OK, Duration::ZERO).await;
    fixture.add_pod("p", &[(80, http.address, Http1)]);
    assert!(fixture.exchange(80, GET).await.ends_with("hello"));
    let entry = fixtures::scaled_port(&service(), 80, Tcp);
    fixture.activator.apply_change(|table| {
        table.services.get_mut(&entry.name).unwrap().protocol = entry.protocol;
    });
    fixture.add_pod("p", &[(80, http.address, Tcp)]);
    // The response is that of the pod alone, and the pod closes nothing by itself.
    let mut client = fixture.connect(80).await;
    client.write_all(GET.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read_rest(&mut client).await, OK);
    wait_until(|| ended(&fixture.activator, "complete") == 1.0).await;
}
