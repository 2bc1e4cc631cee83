//! A hard limit holds across activators, also while they are replaced and pods come and go.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test panics, and its output is where its reader looks"
)]

mod harness;
mod running_activator;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroU16,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use activator::ActivatorError;
use common::{
    fixtures,
    outbox::Outbox,
    wire::{RouteChange, RouteKey, RoutingPhase},
};
use futures::future::join_all;
use harness::{
    LONG, OK, hello_revision, hello_service, pod, read_head, revision, service, wait_until,
};
use running_activator::RunningActivatorFixture;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinSet,
};

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

fn free_port() -> NonZeroU16 {
    NonZeroU16::new(harness::unused_port()).unwrap()
}

fn random_below(below: usize) -> usize {
    usize::try_from(activator::clock::random_u64() >> 33).unwrap() % below
}

/// Pod that counts its concurrent requests.
#[derive(Clone)]
struct CountingFakePod {
    address: SocketAddr,
    /// Number of requests at present, and the maximum so far.
    in_flight: Arc<AtomicUsize>,
    max_in_flight: Arc<AtomicUsize>,
    served: Arc<AtomicUsize>,
}

impl CountingFakePod {
    async fn start(pause: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (busy, most, served) = (Arc::default(), Arc::default(), Arc::default());
        let pod = Self { address, in_flight: busy, max_in_flight: most, served };
        let each = pod.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(each.clone().serve_connection(stream, pause));
            }
        });
        pod
    }

    async fn serve_connection(self, mut stream: TcpStream, pause: Duration) {
        while has_head(&mut stream).await {
            let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            self.max_in_flight.fetch_max(now, Ordering::SeqCst);
            tokio::time::sleep(pause).await;
            self.served.fetch_add(1, Ordering::SeqCst);
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            stream.write_all(OK.as_bytes()).await.ok();
        }
    }
}

/// Returns true if another request comes, at whatever time.
async fn has_head(stream: &mut TcpStream) -> bool {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return false,
        }
    }
    true
}

/// Activators that come and go, with one service.
struct ActivatorFleetFixture {
    test: &'static str,
    limit: u32,
    port: NonZeroU16,
    peer_port: NonZeroU16,
    started: u8,
    running_activators: Vec<FleetActivator>,
    /// Tables of activators that are stopping, which still receive changes.
    stopping: BTreeMap<String, Outbox<RouteKey, RouteChange>>,
    /// Present state of the RouteTable.
    route_table: BTreeMap<RouteKey, RouteChange>,
    pods: Vec<(String, CountingFakePod)>,
    all_pods: Vec<CountingFakePod>,
    stopping_tasks: JoinSet<String>,
    /// Addresses that clients connect to.
    entrypoints: Arc<Mutex<Vec<SocketAddr>>>,
}

struct FleetActivator {
    name: String,
    ip: IpAddr,
    fixture: RunningActivatorFixture,
}

impl FleetActivator {
    /// Waits until the activator has ended. Returns its name.
    async fn wait_stopped(self) -> String {
        self.fixture.wait_stopped().await;
        self.name
    }
}

impl ActivatorFleetFixture {
    fn new(test: &'static str, limit: u32) -> Self {
        let (port, peer_port) = (free_port(), free_port());
        let mut limited_revision = hello_revision();
        limited_revision.container_concurrency = limit;
        let entries = [
            (RouteKey::Revision(revision()), RouteChange::Revision(limited_revision)),
            (RouteKey::Service(service()), RouteChange::Service(hello_service(port.get()))),
        ];
        Self {
            test,
            limit,
            port,
            peer_port,
            started: 0,
            running_activators: Vec::new(),
            stopping: BTreeMap::new(),
            route_table: entries.into(),
            pods: Vec::new(),
            all_pods: Vec::new(),
            stopping_tasks: JoinSet::new(),
            entrypoints: Arc::default(),
        }
    }

    /// Starts another activator, which the table does not list yet.
    async fn start(&mut self) {
        self.started += 1;
        let ip = IpAddr::from(Ipv4Addr::new(127, 0, 77, self.started));
        let name = format!("{}-{}", self.test, self.started);
        let (peer_port, own) = (self.peer_port, name.clone());
        let mut running = RunningActivatorFixture::start(&name, |config| {
            config.name = own;
            config.listen = vec![ip];
            config.peer_port = Some(peer_port);
            (config.linger_ms, config.settle_ms) = (Some(20_000), 20);
            config.drain_ms = Some(20_000);
        })
        .await;
        self.route_table.iter().for_each(|(key, it)| running.routes.set(key.clone(), it.clone()));
        running.wait_in_force().await;
        self.running_activators.push(FleetActivator { name, ip, fixture: running });
    }

    /// Changes the table, for one activator after the other.
    async fn publish_change(&mut self, key: RouteKey, change: Option<RouteChange>) {
        match change.clone() {
            Some(change) => drop(self.route_table.insert(key.clone(), change)),
            None => drop(self.route_table.remove(&key)),
        }
        let live = self.running_activators.iter().map(|it| &it.fixture.routes);
        let mut routes: Vec<_> = live.chain(self.stopping.values()).collect();
        let first = random_below(routes.len());
        routes.rotate_left(first);
        for routes in routes {
            match change.clone() {
                Some(change) => routes.set(key.clone(), change),
                None => routes.remove(&key),
            }
            tokio::time::sleep(Duration::from_micros(u64::try_from(random_below(2_000)).unwrap()))
                .await;
        }
    }

    fn update_entrypoints(&self) {
        let listed = |it: &&FleetActivator| {
            self.route_table.contains_key(&RouteKey::Activator(it.name.clone()))
        };
        let entrypoints = self.running_activators.iter().filter(listed);
        let entrypoints = entrypoints.map(|it| SocketAddr::new(it.ip, self.port.get())).collect();
        *self.entrypoints.lock().unwrap() = entrypoints;
    }

    async fn list_newest(&mut self) {
        let FleetActivator { name, ip, .. } = self.running_activators.last().unwrap();
        let activator = fixtures::activator(name, vec![*ip]);
        let key = RouteKey::Activator(name.clone());
        self.publish_change(key, Some(RouteChange::Activator(activator))).await;
        self.update_entrypoints();
    }

    /// Stops the oldest activator, and removes it from the table.
    async fn stop_oldest(&mut self) {
        let name = self.running_activators[0].name.clone();
        self.running_activators[0].fixture.stop.cancel();
        self.entrypoints
            .lock()
            .unwrap()
            .retain(|entrypoint| entrypoint.ip() != self.running_activators[0].ip);
        self.publish_change(RouteKey::Activator(name), None).await;
        let ended = self.running_activators.remove(0);
        self.stopping.insert(ended.name.clone(), ended.fixture.routes.clone());
        self.stopping_tasks.spawn(ended.wait_stopped());
    }

    async fn add_pod(&mut self) {
        let pause = Duration::from_micros(300 + 100 * u64::try_from(random_below(20)).unwrap());
        let server = CountingFakePod::start(pause).await;
        let uid = format!("pod-{}", self.all_pods.len());
        let ready = pod(&uid, server.address, RoutingPhase::Ready);
        self.pods.push((uid.clone(), server.clone()));
        self.all_pods.push(server);
        self.publish_change(RouteKey::Pod(uid), Some(RouteChange::Pod(ready.into()))).await;
    }

    async fn remove_pod(&mut self) {
        let at = random_below(self.pods.len());
        let (uid, server) = self.pods.remove(at);
        let draining = pod(&uid, server.address, RoutingPhase::Draining);
        self.publish_change(RouteKey::Pod(uid.clone()), Some(RouteChange::Pod(draining.into())))
            .await;
        if random_below(3) == 0 {
            let ready = pod(&uid, server.address, RoutingPhase::Ready);
            self.publish_change(RouteKey::Pod(uid.clone()), Some(RouteChange::Pod(ready.into())))
                .await;
            self.pods.push((uid, server));
        } else {
            wait_until(|| server.in_flight.load(Ordering::SeqCst) == 0).await;
            self.publish_change(RouteKey::Pod(uid), None).await;
        }
    }

    fn assert_limit_holds(&mut self) {
        while let Some(ended) = self.stopping_tasks.try_join_next() {
            self.stopping.remove(&ended.unwrap());
        }
        for pod in &self.all_pods {
            let most = pod.max_in_flight.load(Ordering::SeqCst);
            assert!(most <= usize::try_from(self.limit).unwrap(), "{most} at once");
        }
    }

    async fn stop_all(mut self) {
        for one in std::mem::take(&mut self.running_activators) {
            one.fixture.routes.remove(&RouteKey::Activator(one.name.clone()));
            one.fixture.stop.cancel();
            self.stopping_tasks.spawn(one.wait_stopped());
        }
        while let Some(ended) = self.stopping_tasks.join_next().await {
            ended.unwrap();
        }
        self.assert_limit_holds();
    }
}

/// Load of all clients: the number of requests still to be sent, and of those that got a response.
#[derive(Default)]
struct FleetClientLoad {
    remaining: AtomicUsize,
    responded: AtomicUsize,
    /// Maximum number of requests that got a response while another one waited.
    max_overtaken: AtomicUsize,
}

impl FleetClientLoad {
    fn with_requests(count: usize) -> Arc<Self> {
        Arc::new(Self { remaining: count.into(), ..Self::default() })
    }

    fn take_request(&self) -> bool {
        let left =
            self.remaining.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |it| it.checked_sub(1));
        left.is_ok()
    }

    /// Runs a client that sends one request after the other, to activators chosen at random.
    async fn run_client(self: Arc<Self>, entrypoints: Arc<Mutex<Vec<SocketAddr>>>) {
        let mut kept: Option<TcpStream> = None;
        while self.take_request() {
            let before = self.responded.load(Ordering::SeqCst);
            let (mut is_kept, mut tries) = (kept.is_some(), 0);
            let head = loop {
                let mut stream = match kept.take() {
                    Some(stream) => stream,
                    None => connect(&entrypoints).await,
                };
                stream.write_all(GET.as_bytes()).await.ok();
                let head = read_head(&mut stream).await;
                if !head.is_empty() {
                    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
                    assert_eq!(stream.read_exact(&mut [0; 5]).await.unwrap(), 5);
                    let goes_on = !head.contains("connection: close") && random_below(20) > 0;
                    kept = goes_on.then_some(stream);
                    break head;
                }
                // Idle connections close when their activator ends.
                tries += 1;
                assert!(is_kept || tries < 3, "no response on a new connection");
                is_kept = false;
            };
            drop(head);
            let responded = self.responded.fetch_add(1, Ordering::SeqCst);
            self.max_overtaken.fetch_max(responded - before, Ordering::SeqCst);
        }
    }
}

async fn connect(entrypoints: &Mutex<Vec<SocketAddr>>) -> TcpStream {
    loop {
        let entrypoint = {
            let entrypoints = entrypoints.lock().unwrap();
            entrypoints[random_below(entrypoints.len())]
        };
        if let Ok(stream) = TcpStream::connect(entrypoint).await {
            return stream;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_limit_holds_while_activators_and_pods_come_and_go() {
    // `cargo xtask test --long` sets this variable.
    let is_long = std::env::var_os("ROUSE_LONG").is_some();
    let count = if is_long { 1_000_000 } else { 20_000 };
    let mut fleet = ActivatorFleetFixture::new("rolled", 2);
    fleet.add_first_pods().await;
    for _ in 0..3 {
        fleet.start().await;
        fleet.list_newest().await;
    }
    let load = FleetClientLoad::with_requests(count);
    let clients = 24;
    let client_tasks: JoinSet<()> = (0..clients)
        .map(|_| Arc::clone(&load).run_client(Arc::clone(&fleet.entrypoints)))
        .collect();
    let all_clients = client_tasks.join_all();
    let (clients_done, mut is_done) = oneshot::channel();
    let all_clients = tokio::spawn(async move {
        all_clients.await;
        clients_done.send(()).ok();
    });
    let mut stopped_count = 0;
    while is_done.try_recv().is_err() {
        match random_below(6) {
            0 | 1 if fleet.running_activators.len() < 5 && fleet.started < 250 => {
                fleet.start().await;
                fleet.list_newest().await;
            }
            0..=2 if fleet.running_activators.len() > 1 => {
                fleet.stop_oldest().await;
                stopped_count += 1;
            }
            3 | 4 if fleet.pods.len() < 4 => fleet.add_pod().await,
            _ if fleet.pods.len() > 1 => fleet.remove_pod().await,
            _ => {}
        }
        // The next change waits for further responses, so that requests have to make progress without it.
        let enough = (load.responded.load(Ordering::SeqCst) + random_below(150)).min(count);
        wait_until(|| load.responded.load(Ordering::SeqCst) >= enough || all_clients.is_finished())
            .await;
        fleet.assert_limit_holds();
        assert!(!all_clients.is_finished() || load.responded.load(Ordering::SeqCst) == count);
    }
    all_clients.await.unwrap();
    let (responded, overtaken) =
        (load.responded.load(Ordering::SeqCst), load.max_overtaken.load(Ordering::SeqCst));
    let served: usize = fleet.all_pods.iter().map(|it| it.served.load(Ordering::SeqCst)).sum();
    let pods = fleet.all_pods.len();
    println!("{stopped_count} activators stopped, {pods} pods, {overtaken} overtook a request");
    assert_eq!((responded, served), (count, count), "one response, at one pod");
    assert!(stopped_count > 3, "{stopped_count}");
    assert!(overtaken < count / 4, "{overtaken} got a response while one waited");
    fleet.stop_all().await;
}

impl ActivatorFleetFixture {
    /// Adds two pods before there is any activator.
    async fn add_first_pods(&mut self) {
        for _ in 0..2 {
            let server = CountingFakePod::start(Duration::from_millis(1)).await;
            let uid = format!("pod-{}", self.all_pods.len());
            let ready = pod(&uid, server.address, RoutingPhase::Ready);
            self.route_table.insert(RouteKey::Pod(uid.clone()), RouteChange::Pod(ready.into()));
            self.pods.push((uid, server.clone()));
            self.all_pods.push(server);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_activator_uses_every_pod_while_the_other_has_no_requests() {
    let mut fleet = ActivatorFleetFixture::new("one-sided", 1);
    fleet.add_first_pods().await;
    for _ in 0..2 {
        fleet.start().await;
        fleet.list_newest().await;
    }
    for at in 0..2 {
        let entrypoint = SocketAddr::new(fleet.running_activators[at].ip, fleet.port.get());
        let before: Vec<_> =
            fleet.all_pods.iter().map(|it| it.served.load(Ordering::SeqCst)).collect();
        let load = FleetClientLoad::with_requests(200);
        let entrypoints = Arc::new(Mutex::new(vec![entrypoint]));
        join_all((0..8).map(|_| Arc::clone(&load).run_client(Arc::clone(&entrypoints)))).await;
        for (pod, before) in fleet.all_pods.iter().zip(before) {
            assert!(pod.served.load(Ordering::SeqCst) > before, "by either, every pod");
        }
    }
    fleet.stop_all().await;
}

/// Sends a request. The pod keeps it for as long as it pauses.
async fn send_request(entrypoint: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(entrypoint).await.unwrap();
    stream.write_all(harness::GET.as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_an_activator_that_ends_keeps_its_slot() {
    let mut fleet = ActivatorFleetFixture::new("keeps", 1);
    let server = CountingFakePod::start(Duration::from_secs(1)).await;
    let ready = pod("p", server.address, RoutingPhase::Ready);
    fleet.route_table.insert(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    fleet.all_pods.push(server.clone());
    fleet.start().await;
    fleet.list_newest().await;
    let entrypoints = |fleet: &ActivatorFleetFixture| fleet.entrypoints.lock().unwrap().clone();
    let mut first = send_request(entrypoints(&fleet)[0]).await;
    wait_until(|| server.in_flight.load(Ordering::SeqCst) == 1).await;
    fleet.start().await;
    fleet.list_newest().await;
    fleet.stop_oldest().await;
    let mut second = send_request(entrypoints(&fleet)[0]).await;
    let responses = tokio::join!(harness::read_rest(&mut first), harness::read_rest(&mut second));
    assert!(responses.0.ends_with("hello") && responses.1.ends_with("hello"), "{responses:?}");
    assert_eq!(server.served.load(Ordering::SeqCst), 2);
    fleet.stop_all().await;
}

/// Activators of a version that serves no slots, or whose process has just died: connections to them are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn activators_that_listen_nowhere_are_not_waited_for() {
    let mut fleet = ActivatorFleetFixture::new("deaf", 1);
    fleet.add_first_pods().await;
    fleet.start().await;
    fleet.list_newest().await;
    // Of so many, at least one precedes the real activator in the Revision's order, whatever the order is.
    for at in 200..216 {
        let (name, ip) = (format!("deaf-of-old-{at}"), Ipv4Addr::new(127, 0, 77, at));
        let activator = fixtures::activator(&name, vec![ip.into()]);
        let change = RouteChange::Activator(activator);
        fleet.publish_change(RouteKey::Activator(name), Some(change)).await;
    }
    let load = FleetClientLoad::with_requests(20);
    let asked = Arc::clone(&load).run_client(Arc::clone(&fleet.entrypoints));
    assert!(tokio::time::timeout(LONG, asked).await.is_ok(), "responses without them");
    // A further activator that does serve slots counts all the same.
    fleet.start().await;
    fleet.list_newest().await;
    let load = FleetClientLoad::with_requests(200);
    let asking = (0..4).map(|_| Arc::clone(&load).run_client(Arc::clone(&fleet.entrypoints)));
    // The activators take turns at the pods, which takes many times longer beside other tests.
    let responded = tokio::time::timeout(5 * LONG, join_all(asking)).await;
    assert!(responded.is_ok(), "responses by both");
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_two_activators_take_turns_at_a_pod_that_takes_one() {
    let mut fleet = ActivatorFleetFixture::new("turns", 1);
    let server = CountingFakePod::start(Duration::from_millis(1)).await;
    let ready = pod("p", server.address, RoutingPhase::Ready);
    fleet.route_table.insert(RouteKey::Pod("p".to_owned()), RouteChange::Pod(ready.into()));
    fleet.all_pods.push(server.clone());
    for _ in 0..2 {
        fleet.start().await;
        fleet.list_newest().await;
    }
    let entrypoints = fleet.entrypoints.lock().unwrap().clone();
    let loads = [FleetClientLoad::with_requests(300), FleetClientLoad::with_requests(300)];
    let asking = entrypoints.iter().zip(&loads).flat_map(|(entrypoint, load)| {
        let entrypoints = Arc::new(Mutex::new(vec![*entrypoint]));
        (0..4).map(move |_| Arc::clone(load).run_client(Arc::clone(&entrypoints)))
    });
    // Some 600 handovers take seconds on a machine of its own, and many times that beside other tests.
    let done = tokio::time::timeout(5 * LONG, join_all(asking));
    assert!(done.await.is_ok(), "neither starves");
    assert_eq!(server.served.load(Ordering::SeqCst), 600);
    fleet.stop_all().await;
}

#[tokio::test]
async fn an_activator_fails_if_one_of_its_addresses_cannot_serve_other_activators() {
    let taken = std::net::TcpListener::bind("127.0.78.2:0").unwrap();
    let peer_port = NonZeroU16::new(taken.local_addr().unwrap().port());
    let running = RunningActivatorFixture::start("taken-peer-port", |config| {
        config.listen = vec!["127.0.78.1".parse().unwrap(), "127.0.78.2".parse().unwrap()];
        config.peer_port = peer_port;
    })
    .await;
    let error = running.wait_failed().await;
    assert!(matches!(error, ActivatorError::Peers(_)), "{error}");
}
