//! RouteTable and the state that is kept of it, without sockets.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeSet,
    future::poll_fn,
    net::SocketAddr,
    pin::pin,
    time::{Duration, Instant},
};

use activator::{
    request_error::ProxyRequestError,
    revisions::route_settings::{ActivatorTopology, PodTable, PodTableEntry},
};
use common::{
    fixtures::{self, certificates::TestAuthority},
    link::RouteBatch,
    service_routing::{NodeTopology, TopologyHints},
    wire::{
        ActivatorEntry, NamespacedName, PodEntry, RouteChange, RouteKey, RouteTarget, RoutingPhase,
    },
};
use futures::FutureExt as _;

use crate::harness::{ActivatorFixture, hello_revision, hello_service, pod, revision, service};

/// Batch with the whole table: what it does not contain is gone.
fn snapshot(changes: Vec<RouteChange>) -> RouteBatch {
    RouteBatch { is_snapshot: true, ..update(changes) }
}

/// Batch with changes of the table.
fn update(changes: Vec<RouteChange>) -> RouteBatch {
    let changes = changes.into_iter().filter_map(|change| Some((change.key()?, change)));
    RouteBatch { version: 1, changes: changes.collect(), ..RouteBatch::default() }
}

fn address() -> SocketAddr {
    "10.0.0.1:80".parse().unwrap()
}

/// Changes of a thousand services that sleep, and of their Revisions.
fn sleeping_services() -> impl Iterator<Item = RouteChange> {
    (0..1_000).flat_map(|number| {
        let (service, revision) = fixtures::sleeping_service(number);
        [RouteChange::Service(service), RouteChange::Revision(revision)]
    })
}

#[tokio::test]
async fn a_new_stream_replaces_everything() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.add_ready_pod("p", address());
    let routes = &fixture.activator.forwarder.routes;
    assert_eq!(routes.service_and_pod_counts(), (1, 1));
    let mut other = hello_service(4711);
    other.name = NamespacedName::new("default", "other");
    other.targets =
        vec![RouteTarget { revision: NamespacedName::new("default", "other-1"), percent: 100 }];
    assert!(routes.apply(snapshot(vec![RouteChange::Service(other)])));
    assert_eq!(routes.service_and_pod_counts(), (1, 0));
    assert!(routes.service_by_port(fixture.port).is_none());
    assert!(routes.revision(&revision()).is_none());
    assert_eq!(routes.service_by_port(4711).unwrap().name.name, "other");
}

/// They are those that serve requests, on an activator with one core.
#[tokio::test]
async fn other_tasks_run_while_a_large_batch_is_applied() {
    let fixture = ActivatorFixture::new().await;
    let forwarder = &fixture.activator.forwarder;
    let all = sleeping_services().collect();
    let mut applying = pin!(forwarder.apply_in_slices(update(all)));
    let mut turns = 0;
    let applied = poll_fn(|context| {
        let polled = applying.as_mut().poll(context);
        turns += usize::from(polled.is_pending());
        polled
    });
    assert!(applied.await, "there are other ports");
    assert!(turns >= 7, "{turns} turns");
    assert_eq!(forwarder.routes.service_and_pod_counts(), (1_001, 0));
}

/// A later slice gives hosts another certificate.
#[tokio::test]
async fn a_certificate_is_in_force_until_the_last_slice_of_the_batch_that_removes_it() {
    let fixture = ActivatorFixture::new().await;
    let forwarder = &fixture.activator.forwarder;
    let secret = NamespacedName::new("default", "tls");
    let entry = TestAuthority::new().issue(&["a.example"]).entry(&secret);
    forwarder.apply(update(vec![RouteChange::Certificate(entry)]));
    let removed = RouteChange::Removed(RouteKey::Certificate(secret.clone()));
    let all = sleeping_services().chain([removed]).collect();
    let mut applying = pin!(forwarder.apply_in_slices(update(all)));
    let is_in_force = || forwarder.certificates.find(&secret).is_some();
    let applied = applying.as_mut().now_or_never();
    assert_eq!((applied, is_in_force()), (None, true), "the first slice is applied");
    assert!(applying.await, "there are other ports");
    assert!(!is_in_force());
}

#[tokio::test]
async fn a_service_routes_to_a_revision_that_arrives_later() {
    let fixture = ActivatorFixture::new().await;
    let routes = &fixture.activator.forwarder.routes;
    routes.apply(snapshot(vec![RouteChange::Service(hello_service(fixture.port))]));
    let service = routes.service_by_port(fixture.port).unwrap();
    assert_eq!(service.targets[0].revision.route_settings(), None);
    routes.apply(update(vec![RouteChange::Revision(hello_revision())]));
    assert!(service.targets[0].revision.route_settings().is_some());
}

#[tokio::test]
async fn a_host_that_moved_to_another_service_stays_there_when_the_first_goes() {
    let fixture = ActivatorFixture::new().await;
    let routes = &fixture.activator.forwarder.routes;
    let mut other = hello_service(4711);
    other.name = NamespacedName::new("default", "heir");
    let host = other.hosts[0].clone();
    routes.apply(update(vec![RouteChange::Service(other)]));
    routes.apply(update(vec![RouteChange::Removed(RouteKey::Service(service()))]));
    assert_eq!(routes.match_host(&host).unwrap().service.name.name, "heir");
}

/// Every activator routes a host to the same service, in whatever order it receives the services.
#[tokio::test]
async fn a_host_that_two_services_name_is_that_of_the_first_by_name() {
    for order in [["b", "a", "c"], ["a", "b", "c"], ["c", "b", "a"]] {
        let fixture = ActivatorFixture::new().await;
        let routes = &fixture.activator.forwarder.routes;
        routes.apply(update(vec![RouteChange::Removed(RouteKey::Service(service()))]));
        let named = |own: &str| NamespacedName::new("default", own);
        let host = hello_service(1).hosts[0].clone();
        let has = || routes.match_host(&host).map(|it| it.service.name.name.to_string());
        for (port, own) in order.into_iter().enumerate() {
            let mut entry = hello_service(4711 + u16::try_from(port).unwrap());
            entry.name = named(own);
            routes.apply(update(vec![RouteChange::Service(entry)]));
        }
        for (left, then) in [("b", Some("a")), ("a", Some("c")), ("c", None)] {
            routes.apply(update(vec![RouteChange::Removed(RouteKey::Service(named(left)))]));
            assert_eq!(has().as_deref(), then, "{order:?} without {left}");
        }
    }
}

#[tokio::test]
async fn pods_belong_to_the_revision_they_serve_now() {
    let fixture = ActivatorFixture::new().await;
    let routes = &fixture.activator.forwarder.routes;
    let served = routes.revision(&revision()).unwrap();
    let mut entry = pod("p", address(), RoutingPhase::Ready);
    routes.apply(update(vec![RouteChange::Pod(entry.clone().into())]));
    assert!(served.ready_since().is_some());
    assert_eq!(routes.revisions_with_pods().len(), 1);
    entry.revision = NamespacedName::new("default", "elsewhere");
    routes.apply(update(vec![RouteChange::Pod(entry.into())]));
    assert_eq!(served.ready_since(), None);
}

/// Requests go to the pods of the activator's zone, which it learns from its own entry in the table.
#[tokio::test]
async fn an_activator_prefers_the_pods_that_are_hinted_at_its_zone() {
    let fixture = ActivatorFixture::new().await;
    let routes = &fixture.activator.forwarder.routes;
    let served = routes.revision(&revision()).unwrap();
    let hinted = |uid: &str, zone: &str, number: u8| {
        let hints = TopologyHints { zone: zone.into(), ..TopologyHints::default() };
        let address = SocketAddr::from(([10, 0, 0, number], 80));
        RouteChange::Pod(PodEntry { hints, ..pod(uid, address, RoutingPhase::Ready) }.into())
    };
    let own_name = routes.peers().view().own_name.to_string();
    let listed = |name: &str, zone: &str| {
        RouteChange::Activator(ActivatorEntry {
            name: name.to_owned(),
            node: "n1".into(),
            zone: zone.into(),
            addresses: Vec::new(),
            gets_all_reports: false,
        })
    };
    // Of two pods of one rank, 20 random choices miss one with a probability below 10⁻⁵.
    let chosen = async || {
        let mut uids = BTreeSet::new();
        for _ in 0..20 {
            let mut request = served.queue_entry(None, 0);
            let permit = request.acquire_permit().await.unwrap();
            uids.insert(permit.pod.uid.to_string());
        }
        uids
    };
    routes.apply(update(vec![listed(&own_name, "a"), listed("other", "b")]));
    routes.apply(update(vec![hinted("one", "a", 1), hinted("two", "b", 2)]));
    assert_eq!(chosen().await, ["one".to_owned()].into());
    routes.apply(update(vec![listed(&own_name, "b"), listed("other", "a")]));
    assert_eq!(chosen().await, ["two".to_owned()].into());
    routes.apply(update(vec![RouteChange::Removed(RouteKey::Activator("other".into()))]));
    assert_eq!(chosen().await.len(), 2, "no activator is left in the zone of the other pod");
    routes.apply(update(vec![listed("other", "a")]));
    assert_eq!(chosen().await, ["two".to_owned()].into());
    routes.apply(update(vec![hinted("one", "", 1)]));
    assert_eq!(chosen().await.len(), 2, "hints count only if each ready pod has one");
}

/// All pods go between the two waits of a request. The wait queue stays, because a new one would give the request's
/// arrival number to another request.
#[tokio::test]
async fn a_request_that_waits_again_displaces_no_other() {
    let fixture = ActivatorFixture::new().await;
    let served = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
    let entry = PodTableEntry {
        address: Some(address()),
        is_ready: true,
        is_starting: false,
        is_early_ready: false,
        standby: None,
        name: "p".into(),
        place: NodeTopology::default(),
        hints: TopologyHints::default(),
        ports: Box::default(),
    };
    let topology = ActivatorTopology::default();
    let pods = PodTable::from([("p".to_owned(), entry)]);
    served.set_pods(&pods, &topology);
    let (mut first, mut second) = (served.queue_entry(None, 0), served.queue_entry(None, 0));
    served.on_dial_failed(first.acquire_permit().await.unwrap());
    served.set_pods(&PodTable::new(), &topology);
    let waiting = async {
        let (one, two) = tokio::join!(second.acquire_permit(), first.acquire_permit());
        (one.is_ok(), two.is_ok())
    };
    // The pod comes only when both wait, or the order of their arrival would decide nothing.
    let comes = async {
        while served.waiting_count() < 2 {
            tokio::task::yield_now().await;
        }
        served.set_pods(&pods, &topology);
    };
    let (both, ()) = tokio::join!(waiting, comes);
    assert_eq!(both, (true, true));
}

/// Requests that wait for the first pod of a deleted Revision fail before their own timeout.
#[tokio::test]
async fn requests_at_a_removed_revision_fail() {
    let fixture = ActivatorFixture::new().await;
    let routes = &fixture.activator.forwarder.routes;
    let gone = || update(vec![RouteChange::Removed(RouteKey::Revision(revision()))]);
    let served = routes.revision(&revision()).unwrap();
    let mut entry = served.queue_entry(None, 0);
    let waits = entry.acquire_permit();
    let goes = async {
        while served.waiting_count() < 1 {
            tokio::task::yield_now().await;
        }
        let now = Instant::now();
        routes.apply(gone());
        routes.fail_missing_revisions(now);
        assert_eq!(served.waiting_count(), 1, "the Revision may come back");
        routes.apply(update(vec![RouteChange::Revision(hello_revision())]));
        routes.fail_missing_revisions(now + Duration::from_secs(60));
        assert_eq!(served.waiting_count(), 1, "the Revision has come back");
        routes.apply(gone());
        routes.fail_missing_revisions(now + Duration::from_secs(60));
    };
    let (result, ()) = tokio::join!(waits, goes);
    assert!(matches!(result, Err(ProxyRequestError::UnknownRevision(_))), "{result:?}");
    assert_eq!(served.waiting_count(), 0);
}
