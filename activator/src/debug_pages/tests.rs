#![allow(clippy::unwrap_used, reason = "tests")]

use std::net::{IpAddr, SocketAddr};

use common::{
    fixtures::{self, certificates::TestAuthority},
    link::RouteBatch,
    wire::{
        AllowedSources, AppProtocol, ClientAuth, ConnectionPath, EdgeSettings, GatewayRules,
        GlobalSettings, MappedDomain, PathPrefix, PathRule, PodEntry, RevisionEntry, RouteTable,
        RouteTag, RouteTarget, RoutingPhase, ServiceEntry, TagRouting,
    },
};
use futures::FutureExt as _;
use prometheus_client::registry::Registry;
use proptest::{prelude::*, sample::select};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    ActivatorConfig, ActivatorInstance,
    route_facts::{HostRule, RequestOutcome},
};

/// Client that the NetworkPolicies of restricted Revisions let in.
const ALLOWED_CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 1));
/// First port of the services at the activator.
const FIRST_PORT: u16 = 20_001;

/// Returns the pages' source of an activator with this table.
fn source(table: &RouteTable) -> RoutesSource {
    let config = ActivatorConfig::defaults();
    let activator =
        ActivatorInstance::new(&config, &mut Registry::default(), &CancellationToken::new());
    let changes = RouteTable::default().changes_to(table).into_iter();
    let changes = changes.filter_map(|change| Some((change.key()?, change))).collect();
    activator.forwarder.apply(RouteBatch { changes, ..RouteBatch::default() });
    RoutesSource { forwarder: activator.forwarder, server: activator.server }
}

fn trace(source: &RoutesSource, request: &TracedRequest) -> RequestTraceFacts {
    source.trace(request, &request_head(request).unwrap())
}

fn service_name(number: u8) -> NamespacedName {
    NamespacedName::new("default", format!("s{number}"))
}

fn revision_name(number: u8) -> NamespacedName {
    NamespacedName::new("default", format!("r{number}"))
}

fn domain(host: String, redirects_to_https: bool) -> MappedDomain {
    MappedDomain { redirects_to_https, ..fixtures::mapped_domain(&host) }
}

/// Service `s0` with the host `s0.example`, and its Revision `r0`.
fn one_service() -> RouteTable {
    let (service, revision) = (service_name(0), revision_name(0));
    let mut table = RouteTable::default();
    let hosts = vec!["s0.example".to_owned()];
    let entry = ServiceEntry { hosts, ..fixtures::service(&service, &revision) };
    table.services.insert(service, entry);
    table.revisions.insert(revision.clone(), fixtures::revision(&revision, "s0"));
    table
}

fn add_pod(table: &mut RouteTable, last: u8, phase: RoutingPhase, change: fn(&mut PodEntry)) {
    let address = SocketAddr::from(([10, 0, 0, last], 8080));
    let mut pod = fixtures::pod_at(&format!("p{last}"), &revision_name(0), phase, address);
    (pod.node, pod.zone) = ("n1".into(), "a".into());
    change(&mut pod);
    table.pods.insert(pod.uid.clone(), pod);
}

#[test]
fn a_trace_names_the_pod_and_the_policy_by_which_it_is_chosen() {
    let mut table = one_service();
    let reason = |table: &RouteTable| {
        let facts = trace(&source(table), &TracedRequest::new("s0.example", "/"));
        assert_eq!((facts.outcome, facts.status), (RequestOutcome::Revision, None));
        assert_eq!(facts.reason, "s0.example is a host of default/s0");
        facts.targets[0].reason.clone()
    };
    assert_eq!(reason(&table), "waits: the Revision has no pod, and the request asks for one");
    add_pod(&mut table, 1, RoutingPhase::Starting, |_| {});
    assert_eq!(reason(&table), "waits: none of 1 pods is ready");
    // The standby order counts only once the first pod takes requests.
    add_pod(&mut table, 2, RoutingPhase::Ready, |pod| {
        pod.standby = Some(fixtures::standby_order());
    });
    let only = "goes to pod p2 at 10.0.0.2:8080: the only one of the pods that take requests";
    assert_eq!(reason(&table), only, "a pod on standby takes requests while no other does");
    add_pod(&mut table, 1, RoutingPhase::Ready, |_| {});
    let only = "goes to pod p1 at 10.0.0.1:8080: the only one of the pods that take requests";
    assert_eq!(reason(&table), only, "the pod on standby stays frozen");
    add_pod(&mut table, 3, RoutingPhase::Ready, |_| {});
    let two = "the less busy one of two random ones of 2 pods that take requests";
    assert!(reason(&table).ends_with(two), "{}", reason(&table));
    table.revisions.get_mut(&revision_name(0)).unwrap().container_concurrency = 1;
    let first = "goes to pod p1 at 10.0.0.1:8080: the first by address of 2 pods that take \
                 requests and have a free slot";
    assert_eq!(reason(&table), first);
    table.revisions.get_mut(&revision_name(0)).unwrap().container_concurrency = 4;
    let next = "the next in turn of 2 pods that take requests and have a free slot";
    assert!(reason(&table).ends_with(next), "{}", reason(&table));
}

#[test]
fn a_trace_names_the_revision_that_a_trusted_ingress_has_chosen() {
    let mut table = one_service();
    table.settings.edge.trusted_ingresses = vec!["10.1.0.0/16".parse().unwrap()];
    let source = source(&table);
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut request = TracedRequest {
        headers: vec![
            header("knative-serving-namespace", "default"),
            header("knative-serving-revision", "r0"),
        ],
        entrypoint: Entrypoint::Internal,
        client: Some(ALLOWED_CLIENT),
        ..TracedRequest::new("fronted.example", "/")
    };
    let facts = trace(&source, &request);
    assert_eq!(facts.reason, "a trusted ingress has chosen Revision default/r0");
    let rules: Vec<(&str, bool)> =
        facts.rules.iter().map(|it| (it.rule.as_str(), it.is_match)).collect();
    assert_eq!(rules, [("Revision default/r0, by headers of a trusted ingress", true)]);
    assert_eq!(facts.targets[0].revision.name, "default/r0");
    request.client = None;
    let facts = trace(&source, &request);
    assert_eq!((facts.outcome, facts.status), (RequestOutcome::Refused, Some(404)));
}

#[test]
fn a_request_that_finds_all_slots_in_use_waits_or_is_refused() {
    let mut table = one_service();
    table.revisions.get_mut(&revision_name(0)).unwrap().container_concurrency = 1;
    add_pod(&mut table, 1, RoutingPhase::Ready, |_| {});
    let source = source(&table);
    let target = || {
        let facts = trace(&source, &TracedRequest::new("s0.example", "/"));
        facts.targets.into_iter().next().unwrap()
    };
    let revision = source.forwarder.routes.revision(&revision_name(0)).unwrap();
    // Traces take no slot, so that only this permit occupies the one there is.
    let mut first = revision.queue_entry(None, 0);
    let permit = first.acquire_permit().now_or_never().unwrap().unwrap();
    let waits = target();
    assert_eq!((waits.status, waits.pod), (None, None));
    assert!(waits.reason.starts_with("waits: this activator has no free slot at 1 ready pods"));
    assert_eq!((waits.revision.in_flight, waits.revision.pods[0].free_slots), (1, Some(0)));
    let bound = waits.revision.max_waiting;
    let mut others: Vec<_> = (0..bound).map(|_| revision.queue_entry(None, 0)).collect();
    let mut waiting: Vec<_> = others.iter_mut().map(|it| Box::pin(it.acquire_permit())).collect();
    assert!(waiting.iter_mut().all(|it| it.as_mut().now_or_never().is_none()));
    let refused = target();
    assert_eq!((refused.status, refused.revision.waiting), (Some(503), bound));
    assert_eq!(refused.reason, "is refused: pending request queue full");
    // The waiting requests leave first, or one of them would get the slot of the permit.
    drop(waiting);
    drop(others);
    drop(permit);
    assert!(target().pod.is_some());
}

#[tokio::test]
async fn a_request_that_comes_while_a_crowd_is_released_waits_behind_it() {
    let mut table = one_service();
    add_pod(&mut table, 1, RoutingPhase::Starting, |_| {});
    add_pod(&mut table, 2, RoutingPhase::Starting, |_| {});
    let source = source(&table);
    let revision = source.forwarder.routes.revision(&revision_name(0)).unwrap();
    let mut crowd: Vec<_> = (0..100).map(|_| revision.queue_entry(None, 0)).collect();
    let mut waiting: Vec<_> = crowd.iter_mut().map(|it| Box::pin(it.acquire_permit())).collect();
    assert!(waiting.iter_mut().all(|it| it.as_mut().now_or_never().is_none()));
    let mut next = table.clone();
    add_pod(&mut next, 1, RoutingPhase::Ready, |_| {});
    let changes = table.changes_to(&next).into_iter();
    let changes = changes.filter_map(|change| Some((change.key()?, change))).collect();
    source.forwarder.apply(RouteBatch { changes, ..RouteBatch::default() });
    let facts = trace(&source, &TracedRequest::new("s0.example", "/"));
    let target = &facts.targets[0];
    assert_eq!((target.status, &target.pod, target.revision.waiting), (None, &None, 36));
    let reason =
        "waits: many requests wait, and are divided among 1 ready pods and those that start";
    assert_eq!(target.reason, reason);
}

#[test]
fn a_request_is_refused_while_few_others_hold_all_bytes_of_the_queue() {
    let source = source(&one_service());
    let status = || {
        let facts = trace(&source, &TracedRequest::new("s0.example", "/"));
        facts.targets[0].status
    };
    let revision = source.forwarder.routes.revision(&revision_name(0)).unwrap();
    let bytes = source.server.connections().budget.wait_queue.max_bytes;
    let mut large = revision.queue_entry(None, bytes);
    let mut waiting = Box::pin(large.acquire_permit());
    assert!(waiting.as_mut().now_or_never().is_none(), "it waits");
    assert_eq!(status(), Some(503));
    drop(waiting);
    drop(large);
    assert_eq!(status(), None);
}

#[test]
fn a_trace_names_the_rules_that_were_tried() {
    let table = one_service();
    let source = source(&table);
    let rules = |host: &str, entrypoint| {
        let facts = trace(&source, &TracedRequest { entrypoint, ..TracedRequest::new(host, "/") });
        let rules: Vec<(String, bool)> =
            facts.rules.into_iter().map(|it| (it.rule, it.is_match)).collect();
        (facts.status, facts.reason, rules)
    };
    let by_host = |host: &str| format!("host {host:?} of a Route, tag or DomainMapping");
    let (status, reason, tried) = rules("other.example", Entrypoint::External);
    assert_eq!((status, reason.as_str()), (Some(404), "no service for \"other.example\""));
    assert_eq!(tried, [(by_host("other.example"), false)]);
    let (status, reason, tried) = rules("r0.default", Entrypoint::Internal);
    assert_eq!(status, None);
    assert_eq!(reason, "the host is the name of Revision default/r0");
    let service = "name of service default/r0 within the cluster".to_owned();
    let revision = "name of Revision default/r0 within the cluster".to_owned();
    assert_eq!(tried, [(service, false), (revision, true)]);
    let (status, reason, tried) = rules("a b", Entrypoint::External);
    assert_eq!((status, reason.as_str()), (Some(400), "malformed Host header"));
    assert!(tried.is_empty(), "{tried:?}");
}

#[test]
fn a_path_rule_is_listed_and_traced_with_its_prefix() {
    let mut table = one_service();
    let prefix = PathPrefix::parse("/a").unwrap();
    let path_rule = Some(PathRule { prefix, strips_prefix: true });
    let mapped = MappedDomain { path_rule, ..domain("*.shop.example".to_owned(), false) };
    let rules = GatewayRules { mapped_domains: vec![mapped], ..GatewayRules::default() };
    table.services.get_mut(&service_name(0)).unwrap().gateway_rules = Some(Box::new(rules));
    let source = source(&table);
    let listed: Vec<String> =
        source.routes("shop".to_owned()).hosts.into_iter().map(|it| it.host).collect();
    assert_eq!(listed, ["*.shop.example/a"]);
    let traced = |path: &str| trace(&source, &TracedRequest::new("eu.shop.example", path));
    let served = traced("/a/b");
    assert_eq!(
        served.reason,
        "/a is the longest path prefix of *.shop.example that the path has, and leads to default/s0"
    );
    assert_eq!(served.notes, ["the pods receive the path without /a"]);
    let unknown = traced("/b");
    assert_eq!(
        (unknown.status, unknown.reason.as_str()),
        (Some(404), "no service for \"eu.shop.example/b\"")
    );
    assert_eq!(traced("/a/../b").status, Some(400));
}

#[test]
fn redirects_tags_and_rewrites_have_their_reasons() {
    let mut table = one_service();
    let tag = RouteTag { name: "blue".into(), service: service_name(1) };
    let mut mapped = domain("shop.example".to_owned(), true);
    mapped.host_rewrite = Some("s0.default.svc".to_owned());
    let rules = GatewayRules {
        mapped_domains: vec![mapped],
        tag_routing: Some(TagRouting::ChooseTag(vec![tag])),
        ..GatewayRules::default()
    };
    table.services.get_mut(&service_name(0)).unwrap().gateway_rules = Some(Box::new(rules));
    let tagged = ServiceEntry {
        activator_port: FIRST_PORT.try_into().unwrap(),
        ..fixtures::service(&service_name(1), &revision_name(0))
    };
    table.services.insert(service_name(1), tagged);
    let source = source(&table);
    let mut request = TracedRequest::new("shop.example", "/a?b=c");
    let redirect = trace(&source, &request);
    assert_eq!((redirect.outcome, redirect.status), (RequestOutcome::Redirect, Some(301)));
    assert_eq!(redirect.location.as_deref(), Some("https://shop.example/a?b=c"));
    assert_eq!(
        redirect.reason,
        "DomainMapping shop.example leads to default/s0, which redirects http to https"
    );
    assert!(redirect.targets.is_empty());
    // From inside, where nothing is redirected to https.
    request.entrypoint = Entrypoint::Internal;
    request.headers = vec![("knative-serving-tag".to_owned(), "blue".to_owned())];
    let blue = trace(&source, &request);
    assert_eq!(blue.service.as_deref(), Some("default/s1"));
    assert_eq!(blue.tag.as_deref(), Some("tag blue, by the header Knative-Serving-Tag"));
    assert!(blue.notes[0].contains("the pods receive the host s0.default.svc"), "{blue:?}");
    assert!(blue.notes[1].contains("go directly to pods"), "{blue:?}");
    request.headers[0].1 = "green".to_owned();
    let tag = trace(&source, &request).tag;
    assert_eq!(
        tag.as_deref(),
        Some("default traffic: \"green\" is no tag in force, these are blue")
    );
}

#[test]
fn a_connection_of_tls_has_the_certificate_of_the_handshake() {
    let mut table = one_service();
    let mut request = TracedRequest::new("s0.example", "/");
    request.is_tls = true;
    let refused = trace(&source(&table), &request);
    assert_eq!((refused.outcome, refused.status), (RequestOutcome::Refused, None));
    assert!(refused.reason.contains("unrecognized_name"), "{}", refused.reason);
    let secret = NamespacedName::new("knative-serving", "wildcard");
    let certificate = TestAuthority::new().issue(&["*.example"]);
    table.certificates.insert(secret.clone(), certificate.entry(&secret));
    let edge = EdgeSettings { certificates: vec![secret], ..EdgeSettings::default() };
    table.settings = GlobalSettings { edge, ..GlobalSettings::default() };
    let source = source(&table);
    let chosen = trace(&source, &request).certificate.unwrap();
    assert_eq!(
        (chosen.name.as_str(), chosen.rule.name()),
        ("knative-serving/wildcard", "wildcard")
    );
    request.is_tls = false;
    assert_eq!(trace(&source, &request).certificate, None);
    let page = source.routes(String::new());
    assert_eq!(page.hosts[0].certificate.as_ref(), Some(&chosen));
    assert_eq!(page.certificates[0].hosts, ["*.example"]);
}

#[test]
fn a_host_without_its_client_ca_accepts_no_connection_of_tls() {
    let (host, secret) = ("shop.example", NamespacedName::new("shop", "tls"));
    let (authority, ca) = (TestAuthority::new(), NamespacedName::new("shop", "partners"));
    let outcome = |named: Option<&NamespacedName>, is_optional: bool, is_in_force: bool| {
        let mut table = one_service();
        let mut mapped = domain(host.to_owned(), false);
        mapped.certificate = Some(secret.clone());
        mapped.client_auth = Some(ClientAuth { ca: named.cloned(), is_optional });
        let rules = GatewayRules { mapped_domains: vec![mapped], ..GatewayRules::default() };
        table.services.get_mut(&service_name(0)).unwrap().gateway_rules = Some(Box::new(rules));
        table.certificates.insert(secret.clone(), authority.issue(&[host]).entry(&secret));
        if is_in_force {
            table.client_cas.insert(ca.clone(), authority.client_ca_entry(&ca));
        }
        let facts = trace(
            &source(&table),
            &TracedRequest { is_tls: true, ..TracedRequest::new(host, "/") },
        );
        // Else the handshake would fail for want of a certificate, whatever the client CA is.
        assert!(facts.certificate.is_some(), "{facts:?}");
        (facts.outcome, facts.reason.contains("the client CA of \"shop.example\" is not in force"))
    };
    for is_optional in [false, true] {
        let refused = (RequestOutcome::Refused, true);
        assert_eq!(outcome(Some(&ca), is_optional, false), refused);
        assert_eq!(outcome(None, is_optional, true), refused, "its name is not valid");
        assert_eq!(outcome(Some(&ca), is_optional, true), (RequestOutcome::Revision, false));
    }
}

#[test]
fn a_connection_of_raw_tcp_has_no_host_and_no_tag() {
    let mut table = one_service();
    let tag = RouteTag { name: "next".into(), service: service_name(1) };
    let tag_routing = Some(TagRouting::ChooseTag(vec![tag]));
    let rules = GatewayRules { tag_routing, ..GatewayRules::default() };
    let service = table.services.get_mut(&service_name(0)).unwrap();
    service.activator_port = FIRST_PORT.try_into().unwrap();
    service.gateway_rules = Some(Box::new(rules));
    service.protocol = Some(AppProtocol::Tcp);
    let tagged = ServiceEntry {
        activator_port: (FIRST_PORT + 1).try_into().unwrap(),
        ..fixtures::service(&service_name(1), &revision_name(0))
    };
    table.services.insert(service_name(1), tagged);
    let outcome = |table: &RouteTable, host: &str, header: (&str, &str)| {
        let facts = trace(
            &source(table),
            &TracedRequest {
                entrypoint: Entrypoint::Service(FIRST_PORT),
                headers: vec![(header.0.to_owned(), header.1.to_owned())],
                ..TracedRequest::new(host, "/")
            },
        );
        let status = facts.targets.first().and_then(|it| it.status);
        (facts.outcome, facts.service, status)
    };
    let taken = (RequestOutcome::Revision, Some("default/s0".to_owned()), None);
    assert_eq!(outcome(&table, "a", ("knative-serving-tag", "next")), taken);
    assert_eq!(outcome(&table, "a", ("k-network-probe", "probe")), taken);
    assert_eq!(outcome(&table, "bad host", ("x", "y")), taken);
    // A request of HTTP whose tag leads to raw TCP is refused.
    table.services.get_mut(&service_name(0)).unwrap().protocol = None;
    table.services.get_mut(&service_name(1)).unwrap().protocol = Some(AppProtocol::Tcp);
    let (outcome, service, status) = outcome(&table, "a", ("knative-serving-tag", "next"));
    assert_eq!((outcome, service.as_deref()), (RequestOutcome::Revision, Some("default/s1")));
    assert!(status.is_some(), "raw TCP has no request of HTTP");
}

#[test]
fn services_without_a_host_are_listed_by_their_names_within_the_cluster() {
    let mut table = one_service();
    let database = NamespacedName::new("shop", "postgres");
    let port = fixtures::scaled_port(&database, 5432, AppProtocol::Tcp);
    table.revisions.insert(database.clone(), fixtures::revision(&database, ""));
    table.services.insert(port.name.clone(), port);
    let private = ServiceEntry {
        activator_port: FIRST_PORT.try_into().unwrap(),
        ..fixtures::service(&service_name(1), &revision_name(0))
    };
    table.services.insert(service_name(1), private);
    let source = source(&table);
    let page = source.routes(String::new());
    let rows: Vec<_> = page.hosts.iter().map(|it| (it.host.as_str(), it.rule)).collect();
    let expected = [
        ("postgres.shop.svc:5432", HostRule::Port),
        ("s0.example", HostRule::Route),
        ("s1.default.svc", HostRule::ClusterName),
    ];
    assert_eq!((rows, page.all_hosts, page.is_cut), (expected.to_vec(), 3, false));
    let revisions: Vec<_> = page.revisions.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(revisions, ["default/r0", "shop/postgres"]);
    assert_eq!(source.routes("postgres".to_owned()).hosts.len(), 1);
}

#[tokio::test]
async fn a_client_that_leaves_does_not_give_up_the_turn_of_its_page() {
    let source = Arc::new(source(&RouteTable::default()));
    let pages = DebugPages { source, turn: Arc::new(Semaphore::new(1)) };
    let (begun, begins) = tokio::sync::oneshot::channel();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let build = move |_: &RoutesSource| {
        begun.send(()).unwrap();
        // An error is the end of a test that has failed.
        let _ = ends.recv();
        Ok(Vec::new())
    };
    let client = tokio::spawn(pages.clone().respond(JSON, build));
    begins.await.unwrap();
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    assert_eq!(pages.turn.available_permits(), 0, "the page is still being built");
    end.send(()).unwrap();
    drop(pages.turn.acquire().await.unwrap());
}

/// Service of a random table. Numbers are those of Revisions.
#[derive(Clone, Debug)]
struct RandomService {
    is_listed: bool,
    /// Revisions with their percents.
    targets: Vec<(u8, u8)>,
    is_redirected: bool,
    has_domain: bool,
    has_tags: bool,
    protocol: Option<AppProtocol>,
    path: ConnectionPath,
}

/// Revision of a random table.
#[derive(Clone, Debug)]
struct RandomRevision {
    is_listed: bool,
    protocol: AppProtocol,
    is_restricted: bool,
    limit: u32,
    phases: Vec<RoutingPhase>,
}

fn random_service() -> impl Strategy<Value = RandomService> {
    let targets = prop_oneof![
        1 => Just(Vec::new()),
        3 => (0..3u8).prop_map(|one| vec![(one, 100)]),
        3 => (0..3u8, 0..3u8, 1..100u8).prop_map(|(one, two, at)| vec![(one, at), (two, 100 - at)]),
    ];
    let protocol = select(vec![None, None, Some(AppProtocol::Http1), Some(AppProtocol::Tcp)]);
    let path = select(vec![ConnectionPath::Direct, ConnectionPath::Activator]);
    let flags = (prop::bool::weighted(0.8), any::<bool>(), any::<bool>(), any::<bool>());
    (flags, targets, protocol, path).prop_map(|(flags, targets, protocol, path)| {
        let (is_listed, is_redirected, has_domain, has_tags) = flags;
        RandomService { is_listed, targets, is_redirected, has_domain, has_tags, protocol, path }
    })
}

fn random_revision() -> impl Strategy<Value = RandomRevision> {
    let protocol = select(vec![AppProtocol::Http1, AppProtocol::Http1, AppProtocol::Tcp]);
    let phase = select(vec![RoutingPhase::Starting, RoutingPhase::Ready, RoutingPhase::Draining]);
    let phases = proptest::collection::vec(phase, 0..4);
    let parts = (prop::bool::weighted(0.8), protocol, any::<bool>(), 0..6u32, phases);
    parts.prop_map(|(is_listed, protocol, is_restricted, limit, phases)| RandomRevision {
        is_listed,
        protocol,
        is_restricted,
        limit,
        phases,
    })
}

fn random_request() -> impl Strategy<Value = TracedRequest> {
    let host = select(vec![
        "s0.example",
        "S1.Example.:80",
        "s2.example",
        "d0.example",
        "d2.example",
        "s0.default",
        "s1.default.svc.cluster.local",
        "r0.default.svc",
        "r2.default",
        "unknown.example",
        "",
        "bad host",
    ]);
    // Twice as often at the gateways, where the host decides, as at each port.
    let entrypoint = select(vec![
        Entrypoint::External,
        Entrypoint::External,
        Entrypoint::Internal,
        Entrypoint::Internal,
        Entrypoint::Service(FIRST_PORT),
        Entrypoint::Service(FIRST_PORT + 2),
        Entrypoint::Service(FIRST_PORT + 9),
    ]);
    let headers = select(vec![
        None,
        Some(("knative-serving-tag", "next")),
        Some(("knative-serving-tag", "other")),
        Some(("k-network-probe", "probe")),
        Some(("host", "second.example")),
    ]);
    let client = select(vec![None, Some(ALLOWED_CLIENT), Some(IpAddr::from([10, 1, 0, 2]))]);
    let parts = (host, entrypoint, headers, client);
    parts.prop_map(|(host, entrypoint, header, client)| TracedRequest {
        entrypoint,
        headers: header.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
        client,
        ..TracedRequest::new(host, "/a")
    })
}

fn random_table(services: &[RandomService], revisions: &[RandomRevision]) -> RouteTable {
    let mut table = RouteTable::default();
    for (number, it) in (0u8..).zip(services).filter(|(_, it)| it.is_listed) {
        // The service of a tag may be absent, as while its entry has not arrived yet.
        let tag = RouteTag { name: "next".into(), service: service_name((number + 1) % 3) };
        let mapped = domain(format!("d{number}.example"), !it.is_redirected);
        let rules = GatewayRules {
            redirects_to_https: it.is_redirected,
            mapped_domains: if it.has_domain { vec![mapped] } else { Vec::new() },
            tag_routing: it.has_tags.then(|| TagRouting::ChooseTag(vec![tag])),
            ..GatewayRules::default()
        };
        let name = service_name(number);
        let targets = it.targets.iter().map(|(revision, percent)| RouteTarget {
            revision: revision_name(*revision),
            percent: *percent,
        });
        let entry = ServiceEntry {
            activator_port: (FIRST_PORT + u16::from(number)).try_into().unwrap(),
            hosts: vec![format!("s{number}.example")],
            targets: targets.collect(),
            connection_path: it.path,
            gateway_rules: Some(Box::new(rules)),
            protocol: it.protocol,
            ..fixtures::service(&name, &revision_name(0))
        };
        table.services.insert(name, entry);
    }
    for (number, it) in (0u8..).zip(revisions).filter(|(_, it)| it.is_listed) {
        let name = revision_name(number);
        let allowed = AllowedSources { addresses: [ALLOWED_CLIENT].into(), ip_blocks: Vec::new() };
        let entry = RevisionEntry {
            protocol: it.protocol,
            container_concurrency: it.limit,
            allowed_sources: it.is_restricted.then(|| Arc::new(allowed)),
            ..fixtures::revision(&name, "s")
        };
        for (last, phase) in (1u8..).zip(&it.phases) {
            let address = SocketAddr::from(([10, 0, number, last], 8080));
            let pod = fixtures::pod_at(&format!("p{number}-{last}"), &name, *phase, address);
            table.pods.insert(pod.uid.clone(), pod);
        }
        table.revisions.insert(name, entry);
    }
    table
}

/// End of a request: its Revision and the status code of a refusal, in the steps of the request path.
fn request_path_end(
    source: &RoutesSource,
    request: &TracedRequest,
    random: u64,
) -> (Option<String>, Option<u16>) {
    let status = |failure: ProxyRequestError| Some(failure.status().as_u16());
    let (entrypoint, client) = (request.entrypoint, request.client);
    // A connection of raw TCP has no head, so that no rule by host or header applies.
    if let Entrypoint::Service(port) = entrypoint
        && let PortProtocol::RawTcp(service) = source.forwarder.port_protocol(port)
    {
        return match pick_target(&service, random) {
            Err(failure) => (None, status(failure)),
            Ok(target) => {
                let checked = check_target(target, entrypoint, client);
                (Some(target.revision.name.to_string()), checked.err().and_then(status))
            }
        };
    }
    let head = request_head(request).unwrap();
    let chooser = source.forwarder.route_chooser();
    let (sender, handshake) = (request_sender(request), HandshakeRule::OfRequestedHost);
    let choice = match chooser.choose(&head, entrypoint, sender, handshake) {
        Err(failure) => return (None, status(failure)),
        Ok(RouteChoice::Probe(_)) => return (None, None),
        Ok(RouteChoice::Challenge(_)) => return (None, Some(200)),
        Ok(RouteChoice::Redirect(..)) => return (None, Some(301)),
        Ok(RouteChoice::RuleRedirect(it)) => return (None, Some(it.status.as_u16())),
        Ok(RouteChoice::Service(choice)) => choice,
    };
    let target = match pick_target(&choice.service, random) {
        Err(failure) => return (None, status(failure)),
        Ok(target) => target,
    };
    let checked = check_http_target(&choice.service, target, entrypoint, client);
    (Some(target.revision.name.to_string()), checked.err().and_then(status))
}

proptest! {
    /// A trace states each end of a request, with its percents, and the pod that the next request gets.
    #[test]
    fn a_trace_states_the_choice_of_the_request_path(
        services in proptest::collection::vec(random_service(), 3),
        revisions in proptest::collection::vec(random_revision(), 3),
        request in random_request(),
    ) {
        let source = source(&random_table(&services, &revisions));
        let mut expected = BTreeMap::new();
        for random in 0..100 {
            *expected.entry(request_path_end(&source, &request, random)).or_insert(0u32) += 1;
        }
        let facts = trace(&source, &request);
        let mut explained = BTreeMap::new();
        if facts.outcome == RequestOutcome::Revision {
            for target in &facts.targets {
                let end = (Some(target.revision.name.clone()), target.status);
                *explained.entry(end).or_insert(0u32) += u32::from(target.percent);
            }
        } else {
            explained.insert((None, facts.status), 100);
        }
        prop_assert_eq!(explained, expected, "{:?}", facts);
        for target in facts.targets.iter().filter(|it| it.status.is_none()) {
            let name: NamespacedName = target.revision.name.parse().unwrap();
            let revision = source.forwarder.routes.revision(&name).unwrap();
            let mut entry = revision.queue_entry(None, 0);
            let permit = entry.acquire_permit().now_or_never().map(Result::unwrap);
            prop_assert_eq!(permit.is_some(), target.pod.is_some(), "{:?}", target);
            // Other policies depend on random numbers, or on the requests before.
            if (1..=3).contains(&target.revision.concurrency_limit) {
                let uid = permit.as_ref().map(|it| it.pod.uid.as_str());
                prop_assert_eq!(uid, target.pod.as_ref().map(|it| it.uid.as_str()));
            }
        }
    }
}
