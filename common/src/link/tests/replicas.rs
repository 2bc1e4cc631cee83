//! Several replicas on loopback that die, come back, and change places under a DNS name.

use std::{collections::HashMap, io, net::SocketAddr, time::Duration};

use proptest::{prelude::*, test_runner::TestCaseError};
use tokio::{
    net::TcpListener,
    sync::{broadcast, mpsc::Receiver, watch},
};
use tonic::Streaming;

use super::*;
use crate::{
    fixtures,
    replicas::EndpointSetting,
    tls::TlsCredentials,
    wire::{
        PodObservation, RoutingPhase, ServerReplica, ServerReplicas,
        raw::{
            pods_server::{Pods, PodsServer},
            scale_server::{Scale, ScaleServer},
        },
    },
};

/// Ready pods that one replica has received, by sender.
type ReceivedReports = BTreeMap<String, BTreeMap<String, bool>>;

/// Replica of the controller: serves a table and remembers the reports of its open streams.
#[derive(Clone)]
struct FakeController {
    name: &'static str,
    routes: Outbox<RouteKey, RouteChange>,
    received: Arc<Mutex<ReceivedReports>>,
    changed: broadcast::Sender<()>,
    watched: Arc<AtomicUsize>,
    stop: CancellationToken,
}

impl FakeController {
    fn named(name: &'static str) -> Self {
        Self {
            name,
            routes: Outbox::new(),
            received: Arc::default(),
            changed: broadcast::channel(64).0,
            watched: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    /// Serves at `at`, or at a free port, until it is stopped.
    async fn serve(&mut self, at: Option<SocketAddr>) -> SocketAddr {
        self.stop = CancellationToken::new();
        let at = at.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = loop {
            // A port that was just closed may be busy for a moment.
            match TcpListener::bind(at).await {
                Ok(listener) => break listener,
                Err(_busy) => tokio::task::yield_now().await,
            }
        };
        let at = listener.local_addr().expect("an address");
        let router = Server::builder()
            .add_service(RoutesServer::new(self.clone()))
            .add_service(PodsServer::new(self.clone()))
            .add_service(ScaleServer::new(self.clone()));
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let stop = self.stop.clone().cancelled_owned();
        // Handlers end with the token too, so that the port is free again.
        tokio::spawn(router.serve_with_incoming_shutdown(incoming, stop));
        at
    }

    fn received(&self) -> ReceivedReports {
        self.received.lock().expect("no panic").clone()
    }

    fn set_activator(&self, name: &str) {
        super::set_activator(&self.routes, name);
    }

    async fn wait_until(&self, want: impl Fn(&ReceivedReports) -> bool) {
        let mut changes = self.changed.subscribe();
        while !want(&self.received()) {
            let _lagged = changes.recv().await;
        }
    }

    async fn receive_reports<R, T>(
        &self,
        items: Streaming<R>,
        mut each: impl FnMut(&mut BTreeMap<String, bool>, &mut String, T),
    ) -> Result<Response<raw::Empty>, Status>
    where
        T: TryFrom<R, Error = crate::wire::WireError>,
    {
        let mut from = String::new();
        let done = receive_items(items, &self.stop, |item| {
            let mut heard = self.received.lock().expect("no panic");
            let key = from.clone();
            each(heard.entry(key).or_default(), &mut from, item);
            // Before the first item has named the sender, its entry has an empty name.
            if heard.get("").is_some_and(BTreeMap::is_empty) {
                heard.remove("");
            }
            heard.entry(from.clone()).or_default();
            drop(heard);
            let _nobody = self.changed.send(());
        })
        .await;
        self.received.lock().expect("no panic").remove(&from);
        let _nobody = self.changed.send(());
        done.map(|()| Response::new(raw::Empty {}))
    }
}

#[tonic::async_trait]
impl Routes for FakeController {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.watched.fetch_add(1, Ordering::Relaxed);
        let items = route_stream(self.routes.subscribe(), self.stop.clone(), Some);
        Ok(Response::new(Box::pin(items)))
    }
}

#[tonic::async_trait]
impl Pods for FakeController {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        self.receive_reports(request.into_inner(), |pods, from, item| match item {
            PodReportItem::Sender(sender) => *from = sender.name,
            PodReportItem::Observed(pod) => drop(pods.insert(pod.uid, pod.ready)),
            PodReportItem::Removed(uid) => drop(pods.remove(&uid)),
            PodReportItem::DrainAck(uid) => drop(pods.insert(format!("drain-ack/{uid}"), true)),
            PodReportItem::DrainAckRemoved(uid) => drop(pods.remove(&format!("drain-ack/{uid}"))),
            PodReportItem::Applied(_)
            | PodReportItem::RoutedServicesAnnounced
            | PodReportItem::AwaitedServicesAnnounced
            | PodReportItem::RoutedService(_)
            | PodReportItem::RoutedServiceRemoved(_)
            | PodReportItem::PassedOver(_)
            | PodReportItem::PassedOverRemoved(_)
            | PodReportItem::Synced => {}
        })
        .await
    }
}

#[tonic::async_trait]
impl Scale for FakeController {
    async fn decide(
        &self,
        request: Request<Streaming<raw::ScaleItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        self.receive_reports(request.into_inner(), |_, from, item| {
            if let ScaleItem::Sender(sender) = item {
                *from = sender.name;
            }
        })
        .await
    }
}

/// DNS server whose answer can be changed or withheld.
#[derive(Clone, Debug)]
struct FakeDns {
    /// Addresses that a lookup returns; `None`: it fails.
    answer: Arc<watch::Sender<Option<Vec<SocketAddr>>>>,
    /// Number of lookups so far.
    lookups: Arc<watch::Sender<u64>>,
}

#[tonic::async_trait]
impl DnsResolver for FakeDns {
    async fn lookup(&self, _: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        self.lookups.send_modify(|lookups| *lookups += 1);
        self.answer.borrow().clone().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl FakeDns {
    fn with_addresses(all: impl Into<Vec<SocketAddr>>) -> Self {
        Self {
            answer: Arc::new(watch::Sender::new(Some(all.into()))),
            lookups: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Sets the answer, and returns once the resolver has applied it.
    async fn set_answer(&self, resolver: &ReplicaResolver, answer: Option<Vec<SocketAddr>>) {
        self.answer.send_replace(answer);
        let mut lookups = self.lookups.subscribe();
        // The second lookup after the change proves that the result of the first was applied.
        let enough = *lookups.borrow() + 2;
        while *lookups.borrow() < enough {
            resolver.request_lookup();
            let _short = tokio::time::timeout(Duration::from_millis(50), lookups.changed()).await;
        }
    }

    fn resolver(&self) -> Arc<ReplicaResolver> {
        let setting = EndpointSetting::Dns { name: "rouse-controller".into(), port: 7100 };
        ReplicaResolver::new(setting, Arc::new(self.clone()), None)
    }
}

fn agent(name: &str) -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: name.into(), node: name.into() }
}

fn fixed(all: &[SocketAddr]) -> String {
    let all: Vec<_> = all.iter().map(|at| format!("http://{at}")).collect();
    all.join(",")
}

fn pod_observation(uid: &str, ready: bool) -> (PodReportKey, PodReportItem) {
    let observation = PodObservation {
        uid: uid.into(),
        address: Some(SocketAddr::from(([10, 0, 0, 1], 80))),
        other_family_address: None,
        listening: true,
        ready,
        drained: false,
        in_flight: 0,
        listening_since_ns: 1,
        not_ready_reason: String::new(),
        counts_all_ports: true,
        standby: None,
        awaits_stop: false,
    };
    (PodReportKey::Pod(uid.into()), PodReportItem::Observed(observation))
}

fn pod(uid: &str, phase: RoutingPhase) -> (RouteKey, RouteChange) {
    let address = SocketAddr::from(([10, 0, 0, 1], 80));
    let pod = fixtures::pod_at(uid, &NamespacedName::new("a", "b"), phase, address);
    (RouteKey::Pod(uid.into()), RouteChange::Pod(pod.into()))
}

/// Follows routes and sends the names of activators after each batch.
fn follow_activators(link: Arc<ComponentLink>) -> Receiver<BTreeSet<String>> {
    let (send, receive) = mpsc::channel(64);
    tokio::spawn(async move {
        link.watch_routes(|view, _| {
            let _full = send.try_send(view.table.activators.keys().cloned().collect());
        })
        .await;
    });
    receive
}

fn names(all: &[&str]) -> Option<BTreeSet<String>> {
    Some(all.iter().map(|name| (*name).to_owned()).collect())
}

/// The RouteTable lists no scheme with an address, so the identity of this process decides.
#[test]
fn replicas_that_only_the_table_lists_use_tls_if_there_is_an_identity() {
    let address = SocketAddr::from(([10, 0, 0, 1], 7120));
    for credentials in [None, Some(TlsCredentials::new())] {
        let resolver = ReplicaResolver::of_listed(Component::Activator, credentials.as_ref());
        let known = resolver.subscribe_known();
        assert_eq!(known.borrow().all(), BTreeSet::new());
        resolver.set_listed([address]);
        let listed = ReplicaEndpoint::Tcp { address, tls: credentials.is_some() };
        assert_eq!(known.borrow().all(), [listed].into());
        resolver.set_listed([]);
        assert_eq!(known.borrow().all(), BTreeSet::new(), "a replica that has left is forgotten");
    }
}

#[tokio::test]
async fn routes_come_from_another_replica_when_one_dies() {
    let (mut one, mut two) = (FakeController::named("one"), FakeController::named("two"));
    one.set_activator("one");
    two.set_activator("two");
    let all = [one.serve(None).await, two.serve(None).await];
    let stop = CancellationToken::new();
    let mut tables =
        follow_activators(Arc::new(ComponentLink::new(fixed(&all), agent("n1"), stop.clone())));
    let first = tables.recv().await;
    let (serving, other) = if first == names(&["one"]) { (&one, &two) } else { (&two, &one) };
    assert_eq!((first, other.watched.load(Ordering::Relaxed)), (names(&[serving.name]), 0));
    serving.stop.cancel();
    // The other replica's whole table arrives, and no empty table before it.
    assert_eq!(tables.recv().await, names(&[other.name]));
    other.set_activator("later");
    assert_eq!(tables.recv().await, names(&[other.name, "later"]));
    stop.cancel();
}

#[tokio::test]
async fn the_table_in_force_stays_while_all_are_dead() {
    let mut one = FakeController::named("one");
    one.set_activator("a");
    let at = one.serve(None).await;
    let stop = CancellationToken::new();
    let mut tables =
        follow_activators(Arc::new(ComponentLink::new(fixed(&[at]), agent("n1"), stop.clone())));
    assert_eq!(tables.recv().await, names(&["a"]));
    one.stop.cancel();
    let mut again = FakeController::named("again");
    again.set_activator("b");
    again.serve(Some(at)).await;
    // No batch in between: the next one is the whole new table.
    assert_eq!(tables.recv().await, names(&["b"]));
    stop.cancel();
}

#[tokio::test]
async fn reports_reach_every_replica_and_again_after_it_was_away() {
    let (mut one, mut two) = (FakeController::named("one"), FakeController::named("two"));
    let all = [one.serve(None).await, two.serve(None).await];
    let stop = CancellationToken::new();
    let link = Arc::new(ComponentLink::new(fixed(&all), agent("n1"), stop.clone()));
    let outbox = Outbox::new();
    let (key, value) = pod_observation("p1", true);
    outbox.set(key, value);
    let (reporting, reported) = (Arc::clone(&link), outbox.clone());
    tokio::spawn(async move { reporting.report_pods(&reported).await });
    let has = |uid: &'static str| move |heard: &ReceivedReports| heard["n1"].contains_key(uid);
    let knows = |uid: &'static str| {
        let has = has(uid);
        move |heard: &ReceivedReports| heard.contains_key("n1") && has(heard)
    };
    one.wait_until(knows("p1")).await;
    two.wait_until(knows("p1")).await;
    assert_eq!(link.open_stream_count(), 2);

    // While the second replica is away, one report comes and another one is withdrawn.
    two.stop.cancel();
    two.wait_until(|heard| heard.is_empty()).await;
    let (key, value) = pod_observation("p2", false);
    outbox.set(key, value);
    outbox.remove(&PodReportKey::Pod("p1".into()));
    one.wait_until(knows("p2")).await;
    two.serve(Some(all[1])).await;
    two.wait_until(knows("p2")).await;
    assert_eq!(two.received(), one.received());
    assert_eq!(two.received()["n1"], BTreeMap::from([("p2".to_owned(), false)]));
    stop.cancel();
}

#[tokio::test]
async fn a_changed_answer_brings_streams_to_new_replicas() {
    let (mut one, mut two) = (FakeController::named("one"), FakeController::named("two"));
    let (at_one, at_two) = (one.serve(None).await, two.serve(None).await);
    let dns = FakeDns::with_addresses([at_one]);
    let stop = CancellationToken::new();
    let resolver = dns.resolver();
    let link =
        Arc::new(ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone()));
    let outbox = Outbox::new();
    let (reporting, said) = (Arc::clone(&link), outbox.clone());
    tokio::spawn(async move { reporting.report_pods(&said).await });
    one.wait_until(|heard| heard.contains_key("n1")).await;
    dns.set_answer(&resolver, Some(vec![at_one, at_two])).await;
    two.wait_until(|heard| heard.contains_key("n1")).await;
    // No answer, an empty answer, one without the first replica: open streams stay open.
    for answer in [None, Some(vec![]), Some(vec![at_two])] {
        dns.set_answer(&resolver, answer).await;
        assert_eq!(link.open_stream_count(), 2);
    }
    // A replica that is no longer known is not connected to again.
    one.stop.cancel();
    one.wait_until(|heard| heard.is_empty()).await;
    one.serve(Some(at_one)).await;
    dns.set_answer(&resolver, Some(vec![at_two])).await;
    assert_eq!((link.open_stream_count(), one.received().len()), (1, 0));
    stop.cancel();
}

#[tokio::test]
async fn remembered_replicas_are_tried_while_dns_does_not_answer() {
    let (mut one, mut two) = (FakeController::named("one"), FakeController::named("two"));
    one.set_activator("one");
    two.set_activator("two");
    let (at_one, at_two) = (one.serve(None).await, two.serve(None).await);
    let (dns, stop) = (FakeDns::with_addresses([]), CancellationToken::new());
    let resolver = dns.resolver();
    dns.answer.send_replace(None);
    resolver.set_remembered([at_one]);
    let link =
        Arc::new(ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone()));
    let mut tables = follow_activators(Arc::clone(&link));
    assert_eq!(tables.recv().await, names(&["one"]));
    // The first answer of DNS replaces what was remembered.
    dns.set_answer(&resolver, Some(vec![at_two])).await;
    one.stop.cancel();
    assert_eq!(tables.recv().await, names(&["two"]));
    stop.cancel();
}

#[tokio::test]
async fn the_table_lists_replicas_that_no_name_resolves_to() {
    let (mut one, mut two) = (FakeController::named("one"), FakeController::named("two"));
    let (at_one, at_two) = (one.serve(None).await, two.serve(None).await);
    let member = |name: &str, address| ServerReplica { name: name.into(), address };
    let replicas = ServerReplicas {
        component: ServerComponent::Controller,
        members: vec![member("one", at_one), member("two", at_two)],
        active: None,
    };
    one.routes
        .set(RouteKey::Replicas(ServerComponent::Controller), RouteChange::Replicas(replicas));
    let (dns, stop) = (FakeDns::with_addresses([at_one]), CancellationToken::new());
    let resolver = dns.resolver();
    let link = ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone());
    let mut tables = follow_activators(Arc::new(
        link.with_listed_replicas(ServerComponent::Controller, Arc::clone(&resolver)),
    ));
    let reports = ComponentLink::with_resolver(resolver, agent("n1"), stop.clone());
    let outbox = Outbox::<PodReportKey, PodReportItem>::new();
    tokio::spawn(async move { reports.report_pods(&outbox).await });
    assert_eq!(tables.recv().await, names(&[]));
    two.wait_until(|heard| heard.contains_key("n1")).await;
    // The DNS server and the replica that it knew die together.
    dns.answer.send_replace(None);
    two.set_activator("two");
    one.stop.cancel();
    assert_eq!(tables.recv().await, names(&["two"]));
    stop.cancel();
}

#[tokio::test]
async fn a_drain_ack_survives_a_move_to_a_replica_that_lags() {
    let (mut ahead, mut behind) = (FakeController::named("ahead"), FakeController::named("behind"));
    let put = |to: &FakeController, (key, change)| to.routes.set(key, change);
    put(&ahead, pod("p1", RoutingPhase::Draining));
    put(&behind, pod("p1", RoutingPhase::Ready));
    let first = ahead.serve(None).await;
    let dns = FakeDns::with_addresses([first]);
    let stop = CancellationToken::new();
    let resolver = dns.resolver();
    let link = ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone());
    let (send, mut phases) = mpsc::channel(16);
    let (outbox, mut draining) = (Outbox::new(), DrainAckReporter::default());
    let reports = outbox.clone();
    tokio::spawn(async move {
        link.watch_batches(|batch| {
            draining.record_batch(&batch);
            draining.acknowledge(&reports);
            let begins_stream = batch.begins_stream;
            let phase = batch.changes.into_values().find_map(|change| match change {
                RouteChange::Pod(pod) => Some(pod.phase),
                _ => None,
            });
            let is_acknowledged = reports.get(&PodReportKey::DrainAck("p1".into())).is_some();
            send.try_send((begins_stream, phase, is_acknowledged)).expect("room");
        })
        .await;
    });
    assert_eq!(phases.recv().await, Some((true, Some(RoutingPhase::Draining), true)));
    let second = behind.serve(None).await;
    dns.set_answer(&resolver, Some(vec![second])).await;
    ahead.stop.cancel();
    assert_eq!(phases.recv().await, Some((true, Some(RoutingPhase::Draining), true)));
    // The pod really is ready again: after the lag it counts as ready.
    assert_eq!(phases.recv().await, Some((false, Some(RoutingPhase::Ready), false)));
    put(&behind, pod("p1", RoutingPhase::Draining));
    assert_eq!(phases.recv().await, Some((false, Some(RoutingPhase::Draining), true)));
    behind.routes.remove(&RouteKey::Pod("p1".into()));
    assert_eq!(phases.recv().await, Some((false, None, false)));
    stop.cancel();
}

/// Fault or change while an agent reports to three replicas.
#[derive(Clone, Copy, Debug)]
enum LinkFaultCase {
    Set(u8, bool),
    Remove(u8),
    Kill(usize),
    Start(usize),
    Answer(u8),
    Wait,
}

fn fault() -> impl Strategy<Value = LinkFaultCase> {
    prop_oneof![
        (0u8..5, any::<bool>()).prop_map(|(pod, ready)| LinkFaultCase::Set(pod, ready)),
        (0u8..5).prop_map(LinkFaultCase::Remove),
        (0usize..3).prop_map(LinkFaultCase::Kill),
        (0usize..3).prop_map(LinkFaultCase::Start),
        (0u8..8).prop_map(LinkFaultCase::Answer),
        Just(LinkFaultCase::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// After any faults, every live replica ends with exactly the current state, and routes are followed from one of
    /// them.
    #[test]
    fn nothing_is_lost_whatever_fails(faults in proptest::collection::vec(fault(), 1..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(with_faults(faults))?;
    }
}

#[allow(clippy::too_many_lines, reason = "one story: begin, faults, peace, what everybody knows")]
async fn with_faults(faults: Vec<LinkFaultCase>) -> Result<(), TestCaseError> {
    let mut all =
        [FakeController::named("a"), FakeController::named("b"), FakeController::named("c")];
    let mut addresses = Vec::new();
    for it in &mut all {
        it.set_activator(it.name);
        addresses.push(it.serve(None).await);
    }
    let dns = FakeDns::with_addresses(addresses.clone());
    let (resolver, stop) = (dns.resolver(), CancellationToken::new());
    let (routes, reports) = (
        Arc::new(ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone())),
        Arc::new(ComponentLink::with_resolver(Arc::clone(&resolver), agent("n1"), stop.clone())),
    );
    let table = Arc::new(Mutex::new(BTreeSet::new()));
    let (view, following) = (Arc::clone(&table), Arc::clone(&routes));
    tokio::spawn(async move {
        let see = |names| *view.lock().expect("no panic") = names;
        following
            .watch_routes(|view, _| see(view.table.activators.keys().cloned().collect()))
            .await;
    });
    let (outbox, mut truth) = (Outbox::new(), HashMap::new());
    let (said, reporting) = (outbox.clone(), Arc::clone(&reports));
    tokio::spawn(async move { reporting.report_pods(&said).await });
    let mut alive = [true; 3];
    for fault in faults {
        match fault {
            LinkFaultCase::Set(pod, ready) => {
                let (key, value) = pod_observation(&format!("p{pod}"), ready);
                outbox.set(key, value);
                truth.insert(format!("p{pod}"), ready);
            }
            LinkFaultCase::Remove(pod) => {
                outbox.remove(&PodReportKey::Pod(format!("p{pod}")));
                truth.remove(&format!("p{pod}"));
            }
            LinkFaultCase::Kill(which) => {
                all[which].stop.cancel();
                alive[which] = false;
            }
            LinkFaultCase::Start(which) if !alive[which] => {
                all[which].serve(Some(addresses[which])).await;
                alive[which] = true;
            }
            LinkFaultCase::Start(_) => {}
            LinkFaultCase::Answer(0) => drop(dns.answer.send_replace(None)),
            LinkFaultCase::Answer(bits) => {
                let some = (0..3).filter(|at| bits & (1 << at) != 0).map(|at| addresses[at]);
                dns.answer.send_replace(Some(some.collect()));
            }
            LinkFaultCase::Wait => tokio::time::sleep(Duration::from_millis(3)).await,
        }
    }
    // No more faults: all replicas live and all are named.
    dns.set_answer(&resolver, Some(addresses.clone())).await;
    for which in 0..3 {
        if !alive[which] {
            all[which].serve(Some(addresses[which])).await;
        }
    }
    let truth: BTreeMap<String, bool> = truth.into_iter().collect();
    for it in &all {
        let settled = it.wait_until(|heard| heard.get("n1") == Some(&truth));
        let known = tokio::time::timeout(Duration::from_secs(30), settled).await;
        prop_assert!(known.is_ok(), "{} knows {:?}, not {truth:?}", it.name, it.received());
        // One stream for each replica, so one state.
        prop_assert_eq!(it.received().len(), 1);
    }
    prop_assert_eq!(reports.open_stream_count(), 3);
    // Routes use a stream of their own, which may come back after those of reports.
    let followed = async {
        while table.lock().expect("no panic").len() != 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let followed = tokio::time::timeout(Duration::from_secs(30), followed).await;
    prop_assert!(followed.is_ok(), "routes are of {:?}", table.lock().expect("no panic"));
    stop.cancel();
    all.iter().for_each(|it| it.stop.cancel());
    Ok(())
}
