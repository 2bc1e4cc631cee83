#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    fixtures,
    wire::{GatewayHostEntry, GatewayRules, MappedDomain, PodEntry, RoutingPhase, ServiceEntry},
};
use futures::FutureExt as _;
use proptest::prelude::*;

use super::*;
use crate::revisions::revision::tests::new_context;

/// Node of the pod and of its agent.
const NODE: &str = "n1";

/// Change of the table, or message of the pod's agent. Addresses are numbers.
#[derive(Clone, Debug)]
enum EarlyPodStep {
    List { phase: RoutingPhase, awaits_report: bool, address: u8 },
    Remove,
    BeginStream,
    Report { is_latest: bool, ready_at: Option<u8> },
    EndStream { is_latest: bool },
}

/// Listed state of the pod, and the reports of its agent by the latest stream.
#[derive(Debug, Default)]
struct EarlyPodModel {
    listed: Option<(RoutingPhase, bool, u8)>,
    streams: Vec<AgentStreamNumber>,
    is_stream_open: bool,
    reported: Option<u8>,
}

impl EarlyPodModel {
    /// Returns the address at which the pod takes requests.
    fn serving_address(&self) -> Option<u8> {
        let (phase, awaits_report, address) = self.listed?;
        let is_reported = self.is_stream_open && self.reported == Some(address);
        let takes_requests = match phase {
            RoutingPhase::Ready => true,
            RoutingPhase::Starting => awaits_report && is_reported,
            RoutingPhase::Draining => false,
        };
        takes_requests.then_some(address)
    }

    /// Takes the step, here and in the index.
    fn apply(&mut self, index: &RouteIndex, revision: &NamespacedName, step: &EarlyPodStep) {
        let key = RouteKey::Pod("p".to_owned());
        match *step {
            EarlyPodStep::List { phase, awaits_report, address } => {
                self.listed = Some((phase, awaits_report, address));
                let entry = fixtures::pod_at("p", revision, phase, socket_address(address));
                let entry = PodEntry { node: NODE.into(), awaits_report, ..entry };
                apply_change(index, key, RouteChange::Pod(entry.into()));
            }
            EarlyPodStep::Remove => {
                self.listed = None;
                apply_change(index, key.clone(), RouteChange::Removed(key));
            }
            EarlyPodStep::BeginStream => {
                self.streams.push(index.begin_agent_stream(NODE));
                (self.is_stream_open, self.reported) = (true, None);
            }
            EarlyPodStep::Report { is_latest, ready_at } => {
                let Some(stream) = self.stream(is_latest) else { return };
                let address = ready_at.map(socket_address);
                index.apply_agent_report(NODE, stream, "p".to_owned(), address);
                if is_latest && self.is_stream_open {
                    self.reported = ready_at;
                }
            }
            EarlyPodStep::EndStream { is_latest } => {
                let Some(stream) = self.stream(is_latest) else { return };
                index.end_agent_stream(NODE, stream);
                if is_latest {
                    (self.is_stream_open, self.reported) = (false, None);
                }
            }
        }
    }

    /// Returns the latest stream, or the one before it.
    fn stream(&self, is_latest: bool) -> Option<AgentStreamNumber> {
        self.streams.iter().rev().nth(usize::from(!is_latest)).copied()
    }
}

fn socket_address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number], 8080))
}

fn apply_change(index: &RouteIndex, key: RouteKey, change: RouteChange) {
    index.apply(RouteBatch { changes: [(key, change)].into(), ..RouteBatch::default() });
}

fn new_index() -> RouteIndex {
    RouteIndex::new(new_context(Peers::new("a", None, Vec::new())))
}

fn early_pod_step() -> impl Strategy<Value = EarlyPodStep> {
    let phase = prop_oneof![
        3 => Just(RoutingPhase::Starting),
        1 => Just(RoutingPhase::Ready),
        1 => Just(RoutingPhase::Draining),
    ];
    let listed = (phase, any::<bool>(), 0..2u8).prop_map(|(phase, awaits_report, address)| {
        EarlyPodStep::List { phase, awaits_report, address }
    });
    let reported = (any::<bool>(), proptest::option::of(0..2u8))
        .prop_map(|(is_latest, ready_at)| EarlyPodStep::Report { is_latest, ready_at });
    prop_oneof![
        4 => listed,
        1 => Just(EarlyPodStep::Remove),
        2 => Just(EarlyPodStep::BeginStream),
        4 => reported,
        1 => any::<bool>().prop_map(|is_latest| EarlyPodStep::EndStream { is_latest }),
    ]
}

proptest! {
    /// Whatever the order of tables and reports is, and of messages of a stream that another one has replaced.
    #[test]
    fn a_pod_takes_requests_by_the_table_or_by_the_report_that_it_awaits(
        steps in proptest::collection::vec(early_pod_step(), 1..40),
    ) {
        let (index, name) = (new_index(), NamespacedName::new("default", "hello-1"));
        let entry = fixtures::revision(&name, "hello");
        apply_change(&index, RouteKey::Revision(name.clone()), RouteChange::Revision(entry));
        let revision = index.revision(&name).unwrap();
        let mut model = EarlyPodModel::default();
        for step in steps {
            model.apply(&index, &name, &step);
            let mut request = revision.queue_entry(None, 0);
            let permit = request.acquire_permit().now_or_never();
            let address = permit.map(|permit| permit.unwrap().pod.key.address);
            prop_assert_eq!(address, model.serving_address().map(socket_address), "{:?}", step);
        }
    }
}

/// Sets a ready pod whose uid is its number, with a change of its entry.
fn set_pod(index: &RouteIndex, revision: &NamespacedName, number: u8, change: fn(&mut PodEntry)) {
    let uid = number.to_string();
    let address = socket_address(number);
    let mut entry = fixtures::pod_at(&uid, revision, RoutingPhase::Ready, address);
    change(&mut entry);
    apply_change(index, RouteKey::Pod(uid), RouteChange::Pod(entry.into()));
}

/// A runtime is needed: each request to a pod with a standby order starts the check that the pod was thawed.
#[tokio::test]
async fn requests_go_to_standby_pods_only_while_no_other_pod_takes_them() {
    let (index, name) = (new_index(), NamespacedName::new("default", "hello-1"));
    let entry = fixtures::revision(&name, "hello");
    apply_change(&index, RouteKey::Revision(name.clone()), RouteChange::Revision(entry));
    let revision = index.revision(&name).unwrap();
    let chosen = || {
        let uids = (0..40).map(|_| {
            let mut request = revision.queue_entry(None, 0);
            let permit = request.acquire_permit().now_or_never().expect("a pod takes it");
            permit.unwrap().pod.uid.to_string()
        });
        uids.collect::<BTreeSet<String>>()
    };
    let orders: fn(&mut PodEntry) = |pod| pod.standby = Some(fixtures::standby_order());
    let uids = |all: &[&str]| all.iter().map(|uid| (*uid).to_owned()).collect::<BTreeSet<_>>();
    [1, 2].into_iter().for_each(|number| set_pod(&index, &name, number, orders));
    assert_eq!(chosen(), uids(&["1", "2"]), "the service sleeps");
    set_pod(&index, &name, 1, |_| {});
    assert_eq!(chosen(), uids(&["1"]), "one pod is woken");
    set_pod(&index, &name, 1, |pod| pod.phase = RoutingPhase::Draining);
    assert_eq!(chosen(), uids(&["2"]));
    set_pod(&index, &name, 1, |pod| pod.phase = RoutingPhase::Starting);
    assert_eq!(chosen(), uids(&["2"]));
    set_pod(&index, &name, 1, orders);
    assert_eq!(chosen(), uids(&["1", "2"]));
}

/// The drain acknowledgement goes out as soon as the table is in force, whatever reports come at the same time.
#[test]
fn a_draining_pod_gets_no_request_while_its_agent_goes_on_reporting() {
    let (index, name) = (new_index(), NamespacedName::new("default", "hello-1"));
    let entry = fixtures::revision(&name, "hello");
    apply_change(&index, RouteKey::Revision(name.clone()), RouteChange::Revision(entry));
    let (revision, stream) = (index.revision(&name).unwrap(), index.begin_agent_stream(NODE));
    let (is_over, mut served) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut ready_at = Some(socket_address(0));
            while !is_over.load(Ordering::Relaxed) {
                index.apply_agent_report(NODE, stream, "p".to_owned(), ready_at);
                ready_at = ready_at.is_none().then(|| socket_address(0));
                std::thread::yield_now();
            }
        });
        for _ in 0..500 {
            for phase in [RoutingPhase::Starting, RoutingPhase::Draining] {
                let step = EarlyPodStep::List { phase, awaits_report: true, address: 0 };
                EarlyPodModel::default().apply(&index, &name, &step);
            }
            // An older copy of the pods could replace the table's a moment later.
            for _ in 0..4 {
                let mut request = revision.queue_entry(None, 0);
                served += usize::from(request.acquire_permit().now_or_never().is_some());
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(served, 0);
}

fn set_gateway_host(index: &RouteIndex, key: &str, reserved_hosts: &[&str]) {
    let reserved_hosts = reserved_hosts.iter().map(|it| (*it).to_owned()).collect();
    set_gateway_entry(
        index,
        GatewayHostEntry { reserved_hosts, ..fixtures::gateway_host(key, Vec::new()) },
    );
}

fn set_gateway_entry(index: &RouteIndex, entry: GatewayHostEntry) {
    let key = RouteKey::GatewayHost(entry.key.clone());
    apply_change(index, key, RouteChange::GatewayHost(entry));
}

/// The DomainMappings are not in force: the table has no service with their hosts.
#[test]
fn a_reserved_host_of_the_table_gets_no_rules_of_a_listener() {
    let index = new_index();
    for key in ["http://a.test", "http://*", "http://*.c.test"] {
        set_gateway_host(&index, key, &[]);
    }
    let reserved = ["a.test", "*.b.test", "x.c.test", "*.y.c.test"].map(str::to_owned);
    for host in &reserved {
        let change = RouteChange::ReservedHost(host.clone());
        apply_change(&index, RouteKey::ReservedHost(host.clone()), change);
    }
    let has_rules = |host: &str| index.gateway_host(false, host).is_some();
    let hosts = ["a.test", "x.b.test", "x.c.test", "x.y.c.test"];
    assert_eq!(hosts.map(has_rules), [false; 4]);
    for host in ["b.test", "x.y.b.test", "z.c.test", "x.x.c.test", "d.test", ""] {
        assert!(has_rules(host), "{host:?}");
    }
    // A listener with exactly this host goes before a wildcard of a DomainMapping.
    set_gateway_host(&index, "http://x.b.test", &[]);
    assert!(has_rules("x.b.test"));
    for host in reserved {
        let key = RouteKey::ReservedHost(host);
        apply_change(&index, key.clone(), RouteChange::Removed(key));
    }
    assert_eq!(hosts.map(has_rules), [true; 4]);
}

/// A snapshot of another replica has no entries for what is gone.
#[test]
fn a_snapshot_without_a_reserved_host_ends_its_reservation() {
    let index = new_index();
    let state = |host: &str| {
        let change = RouteChange::ReservedHost(host.to_owned());
        (RouteKey::ReservedHost(host.to_owned()), change)
    };
    for hosts in [&["a.test", "*.b.test"][..], &["a.test"]] {
        let changes = hosts.iter().copied().map(state).collect();
        index.apply(RouteBatch { changes, is_snapshot: true, ..RouteBatch::default() });
    }
    set_gateway_host(&index, "http://*", &[]);
    let has_rules = |host: &str| index.gateway_host(false, host).is_some();
    assert!(!has_rules("a.test") && has_rules("x.b.test"));
}

/// A controller of an earlier release lists the hosts in each entry.
#[test]
fn a_reserved_host_gets_no_rules_of_a_listener() {
    let index = new_index();
    set_gateway_host(&index, "http://a.test", &["a.test"]);
    set_gateway_host(&index, "http://*", &["*.b.test", "a.test", "c.test"]);
    let has_rules = |host: &str| index.gateway_host(false, host).is_some();
    for host in ["a.test", "x.b.test", "c.test"] {
        assert!(!has_rules(host), "{host}");
    }
    for host in ["b.test", "x.y.b.test", "x.c.test", "d.test", ""] {
        assert!(has_rules(host), "{host:?}");
    }
    // A listener with exactly this host goes before a wildcard of a DomainMapping.
    set_gateway_host(&index, "http://x.b.test", &[]);
    assert!(has_rules("x.b.test"));
}

/// A controller sends lists to an activator of an earlier release, and items to the others.
#[test]
fn lists_and_items_of_reserved_hosts_give_the_same_answers() {
    let reserved = ["*.b.test", "a.test", "x.c.test"];
    let wildcard = NamespacedName::new("default", "wildcard");
    let new_indexes = [true, false].map(|is_listed| {
        let index = new_index();
        let list = |hosts: &'static [&'static str]| if is_listed { hosts } else { &[] };
        set_gateway_host(&index, "http://a.test", list(&["a.test"]));
        set_gateway_host(&index, "http://*.b.test", list(&["*.b.test"]));
        set_gateway_host(&index, "http://*", list(&["*.b.test", "a.test", "x.c.test"]));
        let rules = GatewayRules {
            mapped_domains: vec![fixtures::ruled_domain("*.c.test", "/")],
            reserved_hosts: list(&["x.c.test"]).iter().map(|it| (*it).to_owned()).collect(),
            ..GatewayRules::default()
        };
        let gateway_rules = Some(Box::new(rules));
        let entry = ServiceEntry { gateway_rules, ..fixtures::service(&wildcard, &wildcard) };
        apply_change(&index, RouteKey::Service(wildcard.clone()), RouteChange::Service(entry));
        for host in reserved.into_iter().filter(|_| !is_listed).map(str::to_owned) {
            let change = RouteChange::ReservedHost(host.clone());
            apply_change(&index, RouteKey::ReservedHost(host), change);
        }
        index
    });
    let answer = |index: &RouteIndex, host: &str| {
        let service = index.match_host_path(host, "/").expect("a clear path").is_some();
        (service, index.gateway_host(false, host).is_some())
    };
    let [service, listener, none] = [(true, false), (false, true), (false, false)];
    for (host, expected) in [
        ("a.test", none),
        ("x.b.test", none),
        ("x.c.test", none),
        ("y.c.test", service),
        ("x.y.c.test", listener),
        ("b.test", listener),
        ("x.y.b.test", listener),
        ("d.test", listener),
    ] {
        let answers = new_indexes.each_ref().map(|index| answer(index, host));
        assert_eq!(answers, [expected; 2], "{host}");
    }
}

/// A handshake and a request choose the same owner of a host.
#[test]
fn a_listener_with_exactly_this_host_goes_before_a_wildcard_that_passes_tls_through() {
    let index = new_index();
    let name = NamespacedName::new("default", "db");
    let protocol = DomainProtocol::TlsPassthrough;
    let domain = MappedDomain { protocol, ..fixtures::ruled_domain("*.b.test", "/") };
    let rules = GatewayRules { mapped_domains: vec![domain], ..GatewayRules::default() };
    let gateway_rules = Some(Box::new(rules));
    let entry = ServiceEntry { gateway_rules, ..fixtures::service(&name, &name) };
    apply_change(&index, RouteKey::Service(name), RouteChange::Service(entry));
    for key in ["https://x.b.test", "https://*"] {
        set_gateway_host(&index, key, &[]);
    }
    let passes = |host: &str| index.passthrough_service(host).is_some();
    assert!(!passes("x.b.test") && passes("y.b.test") && !passes("c.test"));
}

/// A fast route is valid as long as the number stays.
#[test]
fn only_changes_of_routes_raise_their_number() {
    let (index, name) = (new_index(), NamespacedName::new("default", "hello"));
    let mut before = index.generation();
    let mut is_raised = || {
        let now = index.generation();
        std::mem::replace(&mut before, now) != now
    };
    let service = RouteChange::Service(fixtures::service(&name, &name));
    apply_change(&index, RouteKey::Service(name.clone()), service);
    assert!(is_raised());
    apply_change(
        &index,
        RouteKey::Revision(name.clone()),
        RouteChange::Revision(fixtures::revision(&name, "hello")),
    );
    assert!(is_raised(), "its timeouts are a part of the route");
    index.apply(RouteBatch { version: 7, begins_stream: true, ..RouteBatch::default() });
    assert!(!is_raised(), "the table of another stream is the same");
    set_pod(&index, &name, 1, |_| {});
    assert!(!is_raised());
    let activator = RouteChange::Activator(fixtures::activator("a", Vec::new()));
    apply_change(&index, RouteKey::Activator("a".to_owned()), activator);
    assert!(!is_raised());
    set_gateway_host(&index, "http://a.test", &[]);
    assert!(is_raised());
    let key = RouteKey::Settings;
    apply_change(&index, key.clone(), RouteChange::Removed(key));
    assert!(is_raised());
    index.apply(RouteBatch { is_snapshot: true, ..RouteBatch::default() });
    assert!(is_raised());
}

fn numbered_service(number: u16) -> (ServiceEntry, RouteKey) {
    let (service, _) = fixtures::sleeping_service(number);
    let key = RouteKey::Service(service.name.clone());
    (service, key)
}

/// Returns a batch of services, each with a change of its entry.
fn service_batch(numbers: std::ops::Range<u16>, change: fn(&mut ServiceEntry)) -> RouteBatch {
    let changed = numbers.map(|number| {
        let (mut service, key) = numbered_service(number);
        change(&mut service);
        (key, RouteChange::Service(service))
    });
    RouteBatch { changes: changed.collect(), ..RouteBatch::default() }
}

/// Returns the number of these services that are found by their hosts.
fn found_services(index: &RouteIndex, numbers: std::ops::Range<u16>) -> usize {
    let hosts = numbers.flat_map(|number| numbered_service(number).0.hosts);
    hosts.filter(|host| index.match_host(host).is_some()).count()
}

#[test]
fn a_large_batch_is_applied_in_slices_and_hosts_that_move_are_never_without_a_service() {
    let index = new_index();
    let first = index.divide_batch(service_batch(0..1_000, |_| {}));
    assert!(first.len() >= 7, "hosts of the first table are independent of each other");
    let sizes: Vec<usize> = first.iter().map(RouteChanges::len).collect();
    assert!(sizes.iter().all(|size| *size <= MAX_SLICE_CHANGES), "{sizes:?}");
    for slice in first {
        index.apply_slice(slice);
    }
    assert_eq!(found_services(&index, 0..1_000), 1_000);
    let number = index.generation();
    // Another path and another target change no name. The host of service 0 moves to service 999.
    let mut batch = service_batch(0..1_000, |it| it.connection_path = ConnectionPath::Activator);
    let ((mut from, from_key), (mut to, to_key)) = (numbered_service(0), numbered_service(999));
    to.hosts.append(&mut from.hosts);
    let moved = to.hosts.clone();
    batch.changes.insert(from_key, RouteChange::Service(from));
    batch.changes.insert(to_key, RouteChange::Service(to));
    let slices = index.divide_batch(batch);
    assert!(slices.len() >= 8, "{} slices", slices.len());
    for slice in slices {
        index.apply_slice(slice);
        assert_eq!(found_services(&index, 0..1_000), 1_000, "also the host that moves");
        assert!(index.generation() > number);
    }
    let owners = moved.iter().map(|host| index.match_host(host).unwrap().service.name.clone());
    let owner = numbered_service(999).0.name;
    assert_eq!(owners.collect::<Vec<_>>(), [owner.clone(), owner]);
}

/// Clients may connect before the first table is in force, for example after a restart of the container.
#[test]
fn a_wildcard_of_the_first_table_gets_no_requests_of_a_host_that_is_still_to_come() {
    let (index, mut batch) = (new_index(), service_batch(0..300, |_| {}));
    let host = numbered_service(199).0.hosts.remove(0);
    let (_, domain) = host.split_once('.').unwrap();
    // The first service by name.
    let wildcard = NamespacedName::new("default", "wildcard");
    let mapped_domains = vec![fixtures::ruled_domain(&format!("*.{domain}"), "/")];
    let rules = GatewayRules { mapped_domains, ..GatewayRules::default() };
    let gateway_rules = Some(Box::new(rules));
    let entry = ServiceEntry { gateway_rules, ..fixtures::service(&wildcard, &wildcard) };
    batch.changes.insert(RouteKey::Service(wildcard.clone()), RouteChange::Service(entry));
    let listener = fixtures::gateway_host("http://*", Vec::new());
    let key = RouteKey::GatewayHost(listener.key.clone());
    batch.changes.insert(key, RouteChange::GatewayHost(listener));
    let owner_of = |host: &str| {
        let found = index.match_host_path(host, "/").expect("a clear path");
        found.map(|it| it.service.name.clone())
    };
    let slices = index.divide_batch(batch);
    assert!(slices.len() > 2, "{} slices", slices.len());
    for slice in slices {
        index.apply_slice(slice);
        assert_ne!(owner_of(&host), Some(wildcard.clone()));
        assert!(index.gateway_host(false, &host).is_none());
    }
    assert_eq!(owner_of(&host), Some(numbered_service(199).0.name));
    assert_eq!(owner_of(&format!("other.{domain}")), Some(wildcard));
    assert!(index.gateway_host(false, "other.test").is_some());
}
