//! An activator on loopback, with pods and clients that send raw bytes.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part of the harness")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use activator::{ActivatorConfig, ActivatorInstance, entrypoint::Entrypoint};
pub use common::fixtures::ports::unused_port;
use common::{
    fixtures,
    link::RouteBatch,
    wire::{
        ConnectionPath, GatewayRules, MappedDomain, NamespacedName, PodEntry, RevisionEntry,
        RouteTable, RoutingPhase, ServiceEntry,
    },
};
use prometheus_client::registry::Registry;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};
use tokio_util::sync::CancellationToken;

/// Timeout of a test's waits. It is long enough for any of them, and only a failing test uses it up.
pub const LONG: Duration = Duration::from_secs(60);

/// Activator with one service `default/hello`, served by Revision `default/hello-1`.
pub struct ActivatorFixture {
    pub activator: ActivatorInstance,
    /// RouteTable in force.
    pub table: RouteTable,
    /// Port of the service's own entrypoint.
    pub port: u16,
    /// Address of the gateway for requests from outside.
    pub outside: SocketAddr,
    /// Address of the gateway for workloads of the cluster.
    pub inside: SocketAddr,
    /// Address of the TLS gateway for requests from outside.
    pub outside_tls: SocketAddr,
    pub shutdown: CancellationToken,
    pub registry: Registry,
}

pub fn revision() -> NamespacedName {
    NamespacedName::new("default", "hello-1")
}

pub fn service() -> NamespacedName {
    NamespacedName::new("default", "hello")
}

fn bind_gateway() -> (TcpListener, SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (TcpListener::from_std(listener).unwrap(), address)
}

impl ActivatorFixture {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// Starts an activator whose settings `change` has changed.
    pub async fn with(change: impl FnOnce(&mut ActivatorConfig)) -> Self {
        let mut config = ActivatorConfig::defaults();
        config.listen = vec![Ipv4Addr::LOCALHOST.into()];
        change(&mut config);
        let shutdown = CancellationToken::new();
        let mut registry = Registry::default();
        let activator = ActivatorInstance::new(&config, &mut registry, &shutdown);
        let [outside, inside] = [Entrypoint::External, Entrypoint::Internal].map(|entrypoint| {
            let (listener, address) = bind_gateway();
            let server = Arc::clone(&activator.server);
            tokio::spawn(server.run_listener(listener, Some(entrypoint), shutdown.clone()));
            address
        });
        let (listener, outside_tls) = bind_gateway();
        let server = Arc::clone(&activator.server);
        tokio::spawn(server.run_tls_listener(listener, Entrypoint::External, shutdown.clone()));
        let port = unused_port();
        let table = RouteTable::default();
        let mut fixture =
            Self { activator, table, port, outside, inside, outside_tls, shutdown, registry };
        fixture.apply_change(|table| {
            table.services.insert(service(), hello_service(port));
            table.revisions.insert(revision(), hello_revision());
        });
        fixture
    }

    /// Changes the table and puts it in force.
    pub fn apply_change(&mut self, change: impl FnOnce(&mut RouteTable)) {
        let mut next = self.table.clone();
        change(&mut next);
        let changes = self.table.changes_to(&next).into_iter();
        let changes = changes.filter_map(|change| Some((change.key()?, change))).collect();
        self.table = next;
        self.activator.forwarder.apply(RouteBatch { changes, ..RouteBatch::default() });
        self.activator.ports.apply_routes();
        self.activator.gateway_ports.apply_routes();
    }

    /// Replaces the gateway rules of the service.
    pub fn set_gateway_rules(&mut self, rules: GatewayRules) {
        self.apply_change(|table| {
            table.services.get_mut(&service()).unwrap().gateway_rules = Some(Box::new(rules));
        });
    }

    /// Replaces the gateway rules of the service by hosts of DomainMappings.
    pub fn set_mapped_domains(&mut self, mapped_domains: Vec<MappedDomain>) {
        self.set_gateway_rules(GatewayRules { mapped_domains, ..GatewayRules::default() });
    }

    pub fn set_pod(&mut self, uid: &str, address: SocketAddr, phase: RoutingPhase) {
        self.apply_change(|table| {
            drop(table.pods.insert(uid.to_owned(), pod(uid, address, phase)))
        });
    }

    pub fn add_ready_pod(&mut self, uid: &str, address: SocketAddr) {
        self.set_pod(uid, address, RoutingPhase::Ready);
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.unwrap()
    }

    /// Sends raw bytes on a new connection to the service's port, and returns everything that comes back.
    pub async fn exchange(&self, request: &str) -> String {
        self.exchange_at((Ipv4Addr::LOCALHOST, self.port).into(), request).await
    }

    /// Sends raw bytes on a new connection to this entrypoint, and returns everything that comes back.
    pub async fn exchange_at(&self, address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        read_rest(&mut stream).await
    }

    /// Waits until `count` requests wait for the Revision.
    pub async fn wait_for_queued(&self, count: usize) {
        let revision = self.activator.forwarder.routes.revision(&revision()).unwrap();
        wait_until(|| revision.waiting_count() == count).await;
    }

    /// Totals of the requests that waited: begun and ended.
    pub fn waiting_totals(&self) -> (u64, u64) {
        let revision = self.activator.forwarder.routes.revision(&revision()).unwrap();
        let (totals, _) = revision.totals();
        (totals.started, totals.finished)
    }

    /// Number of requests that waited and that no pod got.
    pub fn abandoned_requests(&self) -> u64 {
        let revision = self.activator.forwarder.routes.revision(&revision()).unwrap();
        revision.totals().0.abandoned
    }

    /// Value of a metric; `name` includes the labels, if it has any.
    pub fn metric(&self, name: &str) -> f64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let line =
            text.lines().find(|line| line.strip_prefix(name).is_some_and(|l| l.starts_with(' ')));
        line.unwrap_or_else(|| panic!("{name} in {text}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    }
}

impl Drop for ActivatorFixture {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Clock that stands still until it is moved, while bytes still pass. In a test that hangs it runs again after a while,
/// and with it the timeouts of the test's waits; the test has failed then.
pub struct PausedClock(std::sync::mpsc::Sender<()>);

impl PausedClock {
    pub fn start_paused() -> Self {
        let (keep, kept) = std::sync::mpsc::channel();
        // While a blocking task runs, the runtime does not advance a paused time by itself.
        tokio::task::spawn_blocking(move || kept.recv_timeout(LONG));
        tokio::time::pause();
        Self(keep)
    }

    /// Advances the time, and lets all tasks run whose timers have expired.
    pub async fn advance(&self, by: Duration) {
        tokio::time::advance(by).await;
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until a condition holds, without a timer.
    pub async fn until(&self, mut holds: impl FnMut() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed() < LONG, "the condition holds in time");
            tokio::task::yield_now().await;
        }
    }
}

impl Drop for PausedClock {
    fn drop(&mut self) {
        tokio::time::resume();
        let is_still_paused = self.0.send(()).is_ok();
        assert!(
            is_still_paused || std::thread::panicking(),
            "no wait takes longer than the time that the test has advanced"
        );
    }
}

/// Waits until a condition holds.
pub async fn wait_until(mut holds: impl FnMut() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, poll).await.expect("the condition holds in time");
}

pub async fn read_rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut all = Vec::new();
    let read = tokio::time::timeout(LONG, stream.read_to_end(&mut all)).await;
    read.expect("ends in time").ok();
    String::from_utf8_lossy(&all).into_owned()
}

/// Reads one head, up to and with its empty line.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    read_until(stream, "\r\n\r\n").await
}

pub async fn read_until(stream: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut all = Vec::new();
    let read = async {
        while !all.ends_with(end.as_bytes()) {
            match stream.read_u8().await {
                Ok(byte) => all.push(byte),
                Err(_) => break,
            }
        }
    };
    tokio::time::timeout(LONG, read).await.expect("comes in time");
    String::from_utf8_lossy(&all).into_owned()
}

pub fn hello_service(port: u16) -> ServiceEntry {
    ServiceEntry {
        activator_port: NonZeroU16::new(port).unwrap(),
        connection_path: ConnectionPath::Activator,
        hosts: vec!["hello.default.example.com".to_owned()],
        ..fixtures::service(&service(), &revision())
    }
}

pub fn hello_revision() -> RevisionEntry {
    RevisionEntry { timeout: LONG, ..fixtures::revision(&revision(), "hello") }
}

pub fn pod(uid: &str, address: SocketAddr, phase: RoutingPhase) -> PodEntry {
    fixtures::pod_at(uid, &revision(), phase, address)
}

/// Pod that responds to each request with a fixed response, and counts connections and requests.
pub struct FakeHttp1Pod {
    pub address: SocketAddr,
    pub connections: Arc<AtomicUsize>,
    pub requests: Arc<AtomicUsize>,
    pub heads: Arc<std::sync::Mutex<Vec<String>>>,
}

impl FakeHttp1Pod {
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub fn heads(&self) -> String {
        self.heads.lock().unwrap().join("")
    }
}

pub const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";

/// Response with the `Date` field that an activator would add.
pub const DATED: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\
                         date: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\nhello";

/// Starts a pod that handles each connection by `each`, which gets the connection's number. Returns its address.
pub async fn start_pod_with<F: Future<Output = ()> + Send + 'static>(
    each: impl Fn(TcpStream, usize) -> F + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let Ok((stream, _)) = listener.accept().await else { return };
            tokio::spawn(each(stream, number));
        }
    });
    address
}

/// Starts a pod that responds to requests without a body with fixed bytes after `pause`, and keeps connections open.
pub async fn start_pod(response: &'static str, pause: Duration) -> FakeHttp1Pod {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = FakeHttp1Pod {
        address: listener.local_addr().unwrap(),
        connections: Arc::default(),
        requests: Arc::default(),
        heads: Arc::default(),
    };
    let (connections, requests) = (Arc::clone(&server.connections), Arc::clone(&server.requests));
    let heads = Arc::clone(&server.heads);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            connections.fetch_add(1, Ordering::SeqCst);
            let (requests, heads) = (Arc::clone(&requests), Arc::clone(&heads));
            tokio::spawn(async move {
                loop {
                    let head = next_head(&mut stream).await;
                    if !head.ends_with("\r\n\r\n") {
                        return;
                    }
                    requests.fetch_add(1, Ordering::SeqCst);
                    heads.lock().unwrap().push(head);
                    tokio::time::sleep(pause).await;
                    stream.write_all(response.as_bytes()).await.ok();
                }
            });
        }
    });
    server
}

/// Starts a listener that sends no SYN-ACK for as long as the connections in its accept queue are kept: a backlog of 1
/// holds two, and SYNs beyond it are dropped.
pub async fn start_silent_pod() -> (TcpListener, SocketAddr, [TcpStream; 2]) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let plugs =
        [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    (listener, address, plugs)
}

async fn next_head(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    while !all.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => all.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

pub const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
