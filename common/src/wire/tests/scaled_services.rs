//! Pure: ports of scaled Services in the RouteTable, and the same messages at receivers of earlier releases.

use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::fixtures::{self, pod_port, scaled_port};

/// Fields of a Service that a release without scaled Services reads.
#[derive(Clone, PartialEq, prost::Message)]
struct EarlierService {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "5")]
    targets: Vec<raw::Target>,
    #[prost(int32, tag = "6")]
    path: i32,
}

fn web() -> NamespacedName {
    name("default/web")
}

fn nonzero(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).expect("not zero")
}

/// Returns a change as a receiver of this release gets it.
fn send(change: RouteChange) -> Result<RouteChange, WireError> {
    let sent = raw::RouteItem::from(item(3, change)).encode_to_vec();
    let received = raw::RouteItem::decode(sent.as_slice()).expect("a message");
    RouteItem::try_from(received).map(|it| it.change)
}

fn send_service(service: raw::Service) -> Result<ServiceEntry, String> {
    ServiceEntry::try_from(service).map_err(|error| error.to_string())
}

fn send_pod(pod: raw::Pod) -> Result<PodEntry, String> {
    PodEntry::try_from(pod).map_err(|error| error.to_string())
}

/// Returns a starting pod with these ports as a sender encodes it.
fn raw_pod(ports: Vec<raw::PodPort>) -> raw::Pod {
    let pod = fixtures::pod("uid", &web(), RoutingPhase::Starting);
    raw::Pod { ports, ..raw::Pod::from(pod) }
}

#[test]
fn the_name_of_a_port_leads_back_to_its_service() {
    let port = web().with_port(nonzero(80));
    assert_eq!(port.to_string(), "default/web:80");
    assert_eq!(name("default/web:80"), port);
    assert_eq!(port.split_port(), Some((web(), nonzero(80))));
    assert_eq!(web().split_port(), None);
    assert_eq!(name("default/hello.v1").split_port(), None);
    let highest = name("default/web:65535").split_port();
    assert_eq!(highest, Some((web(), nonzero(65_535))));
}

#[test]
fn a_port_has_one_name_only() {
    for bad in [
        "default/web:",
        "default/:80",
        "default/web:0",
        "default/web:080",
        "default/web:+80",
        "default/web:-1",
        "default/web: 80",
        "default/web:65536",
        "default/web:http",
        "default/web:80:81",
        "default/web.v1:80",
        "default/Web:80",
        "default:80/web",
        "web:80",
    ] {
        assert!(bad.parse::<NamespacedName>().is_err(), "{bad:?} must be refused");
    }
}

#[test]
fn the_name_of_a_revision_has_no_port() {
    let (bad, port) = ("default/web:80", web().with_port(nonzero(80)));
    let refused = Err(WireError::new("revision", bad, "must be namespace/name"));
    let revision = fixtures::revision(&port, "web");
    assert_eq!(send(RouteChange::Revision(revision)), refused);
    let pod = fixtures::pod("uid", &port, RoutingPhase::Starting);
    assert_eq!(send(RouteChange::Pod(pod.into())), refused);
    assert_eq!(send(RouteChange::Service(fixtures::service(&web(), &port))), refused);
    let scaled = ServiceEntry { uses_pod_ports: true, ..fixtures::service(&port, &port) };
    assert_eq!(send(RouteChange::Service(scaled)), refused);
    assert_eq!(send(RouteChange::Removed(RouteKey::Revision(port.clone()))), refused);
    let usage = raw::UsageKey { revision: bad.into(), pod: "uid".into() };
    assert_eq!(UsageKey::try_from(usage).map(|_| RouteChange::Synced), refused);
}

/// Activators report the services that they route, and these reports have to name ports too.
#[test]
fn a_port_can_be_removed_and_reported_as_routed() {
    let port = web().with_port(nonzero(5432));
    let removed = RouteChange::Removed(RouteKey::Service(port.clone()));
    assert_eq!(send(removed.clone()), Ok(removed));
    for item in
        [PodReportItem::RoutedService(port.clone()), PodReportItem::RoutedServiceRemoved(port)]
    {
        assert_eq!(PodReportItem::try_from(raw::PodItem::from(item.clone())), Ok(item));
    }
}

#[test]
fn a_service_leads_to_its_own_port_of_a_pod() {
    let http = scaled_port(&web(), 80, AppProtocol::Http1);
    let metrics = scaled_port(&web(), 9090, AppProtocol::Tcp);
    let ports =
        vec![pod_port(80, 8080, AppProtocol::Http1), pod_port(5432, 5433, AppProtocol::Tcp)];
    let pod = PodEntry {
        port: nonzero(9000),
        ports,
        ..fixtures::pod("uid", &web(), RoutingPhase::Starting)
    };
    assert_eq!(pod.port_for(&http), Some(nonzero(8080)));
    assert_eq!(pod.port_for(&metrics), None, "no other port stands in for it");
    let route = ServiceEntry { port: nonzero(80), ..fixtures::service(&web(), &web()) };
    assert_eq!(pod.port_for(&route), Some(nonzero(9000)));
}

/// An agent of an earlier release leads no connection to a wrong port, and an activator of one answers 503.
#[test]
fn earlier_releases_find_no_target_for_a_port() {
    let direct = scaled_port(&web(), 5432, AppProtocol::Tcp);
    assert_eq!(direct.connection_path, ConnectionPath::Direct);
    assert_ne!(direct.targets, []);
    let sent = raw::Service::from(direct.clone()).encode_to_vec();
    let earlier = EarlierService::decode(sent.as_slice()).expect("a message");
    assert_eq!(earlier.targets, []);
    assert_eq!(earlier.path, i32::from(raw::Path::Activator));
    let (_, earlier_name) = earlier.name.split_once('/').expect("a namespace");
    assert!(!is_dns_subdomain(earlier_name), "they refuse this name, and so the whole entry");
    assert_eq!(send(RouteChange::Service(direct.clone())), Ok(RouteChange::Service(direct)));
}

/// A Route over raw TCP keeps its targets and its path on the wire. Earlier releases refuse its Revision, so that they
/// parse none of its bytes as HTTP.
#[test]
fn earlier_releases_do_not_know_the_protocol_of_a_tcp_revision() {
    let revision =
        RevisionEntry { protocol: AppProtocol::Tcp, ..fixtures::revision(&web(), "web") };
    assert_eq!(raw::Revision::from(revision.clone()).protocol, 3);
    let sent = RouteChange::Revision(revision);
    assert_eq!(send(sent.clone()), Ok(sent));
    let route = raw::Service::from(ServiceEntry {
        protocol: Some(AppProtocol::Tcp),
        ..fixtures::service(&web(), &web())
    });
    assert_eq!((route.targets.len(), route.path()), (1, raw::Path::Direct));
    assert_eq!(route.scaled, None);
}

#[test]
fn senders_of_earlier_releases_know_no_ports() {
    let service = raw::Service {
        name: "default/hello".into(),
        port: 80,
        activator_port: 20_000,
        path: raw::Path::Direct.into(),
        ..raw::Service::default()
    };
    let service = ServiceEntry::try_from(service).expect("valid");
    assert_eq!((service.protocol, service.uses_pod_ports, service.affinity), (None, false, None));
    let pod = PodEntry::try_from(raw_pod(Vec::new())).expect("valid");
    assert_eq!((pod.ports, pod.keeps_binds), (Vec::new(), false));
}

#[test]
fn unknown_protocols_are_refused() {
    let rule = "must be a known protocol";
    let sent = raw::Service::from(scaled_port(&web(), 80, AppProtocol::Http1));
    let service = raw::Service { protocol: 4, ..sent.clone() };
    assert_eq!(send_service(service), Err(format!("field service.protocol is \"4\": {rule}")));
    let unsaid = send_service(raw::Service { protocol: 0, ..sent });
    assert_eq!(unsaid.map(|it| it.protocol), Ok(None));
    // The protocol of a pod's port has no default: the kernel must know if it may parse the bytes.
    for number in [0, 4] {
        let port = raw::PodPort { service_port: 80, port: 8080, protocol: number };
        let refused = Err(format!("field pod_port.protocol is \"{number}\": {rule}"));
        assert_eq!(send_pod(raw_pod(vec![port])), refused);
    }
}

#[test]
fn a_service_with_targets_beside_its_scaled_port_is_refused() {
    let sent = raw::Service::from(scaled_port(&web(), 80, AppProtocol::Http1));
    let target = raw::Target { revision: "default/other".into(), percent: 100 };
    let both = raw::Service { targets: vec![target], ..sent.clone() };
    let rule = "must be empty for a port of a scaled Service";
    assert_eq!(send_service(both), Err(format!("field service.targets is \"1\": {rule}")));
    let scaled = raw::ScaledPort { path: 0, ..sent.scaled.clone().expect("a scaled port") };
    let error = send_service(raw::Service { scaled: Some(scaled), ..sent }).expect_err("no path");
    assert_eq!(error, "field scaled.path is \"unspecified\": must be a known path");
}

#[test]
fn bad_ports_of_a_pod_are_refused() {
    let port = |service_port, port| raw::PodPort { service_port, port, protocol: 1 };
    let twice = send_pod(raw_pod(vec![port(80, 1), port(443, 2), port(80, 3)]));
    let rule = "a service port leads to one port of a pod";
    assert_eq!(twice, Err(format!("field pod.ports is \"80\": {rule}")));
    let rule = "must be a port, 1 to 65535";
    let zero = send_pod(raw_pod(vec![port(80, 0)]));
    assert_eq!(zero, Err(format!("field pod_port.port is \"0\": {rule}")));
    let large = send_pod(raw_pod(vec![port(65_536, 1)]));
    assert_eq!(large, Err(format!("field pod_port.service_port is \"65536\": {rule}")));
    // Two ports of a Service may lead to the same port of a pod.
    let shared = send_pod(raw_pod(vec![port(443, 1), port(80, 1)])).expect("valid");
    let expected = [80, 443].map(|it| pod_port(it, 1, AppProtocol::Http1));
    assert_eq!(shared.ports, expected);
}

fn port() -> impl Strategy<Value = NonZeroU16> {
    (1..=u16::MAX).prop_map(nonzero)
}

fn protocol() -> impl Strategy<Value = AppProtocol> {
    prop_oneof![Just(AppProtocol::Http1), Just(AppProtocol::H2c), Just(AppProtocol::Tcp)]
}

fn connection_path() -> impl Strategy<Value = ConnectionPath> {
    prop_oneof![Just(ConnectionPath::Direct), Just(ConnectionPath::Activator)]
}

/// Services of each kind: Routes with up to two targets, and ports of scaled Services with one target or none.
fn services() -> impl Strategy<Value = ServiceEntry> {
    let affinity = prop::option::of((1..=86_400_000u64).prop_map(Duration::from_millis));
    let port_and_protocol = (port(), prop::option::of(protocol()));
    (any::<bool>(), 0..3usize, port_and_protocol, connection_path(), affinity).prop_map(
        |(uses_pod_ports, targets, (port, protocol), connection_path, affinity)| {
            let target = |percent| RouteTarget { revision: web(), percent };
            let targets = match (targets, uses_pod_ports) {
                (0, _) => Vec::new(),
                (1, _) | (_, true) => vec![target(100)],
                (_, false) => vec![target(30), target(70)],
            };
            let name = if uses_pod_ports { web().with_port(port) } else { web() };
            ServiceEntry {
                port,
                targets,
                connection_path,
                protocol,
                uses_pod_ports,
                affinity,
                ..fixtures::service(&name, &web())
            }
        },
    )
}

/// Ports of a pod in the order of their service ports.
fn pod_ports() -> impl Strategy<Value = Vec<PodPort>> {
    prop::collection::btree_map(port(), (port(), protocol()), 0..6).prop_map(|all| {
        let entry = |(service_port, (port, protocol))| PodPort { service_port, port, protocol };
        all.into_iter().map(entry).collect()
    })
}

#[test]
fn only_an_agent_that_says_so_counts_all_ports() {
    let earlier = raw::PodSeen { uid: "p".into(), ..raw::PodSeen::default() };
    let seen = PodObservation::try_from(earlier).expect("valid");
    assert!(!seen.counts_all_ports);
    let counted = PodObservation { counts_all_ports: true, ..seen };
    assert_eq!(PodObservation::try_from(raw::PodSeen::from(counted.clone())), Ok(counted));
}

proptest! {
    #[test]
    fn each_service_arrives_as_it_was_sent(service in services()) {
        let sent = RouteChange::Service(service);
        prop_assert_eq!(send(sent.clone()), Ok(sent));
    }

    #[test]
    fn no_port_of_a_scaled_service_has_a_target_that_earlier_releases_read(service in services()) {
        let (uses_pod_ports, targets) = (service.uses_pod_ports, service.targets.len());
        let path = service.connection_path;
        let sent = raw::Service::from(service);
        let expected = if uses_pod_ports {
            (0, raw::Path::Activator)
        } else if path == ConnectionPath::Direct {
            (targets, raw::Path::Direct)
        } else {
            (targets, raw::Path::Activator)
        };
        prop_assert_eq!((sent.targets.len(), sent.path()), expected);
    }

    #[test]
    fn ports_of_a_pod_arrive_in_their_order(
        ports in pod_ports(), sent in pod_ports().prop_shuffle(), keeps_binds in any::<bool>(),
    ) {
        let pod = fixtures::pod("uid", &web(), RoutingPhase::Starting);
        let sorted = RouteChange::Pod(PodEntry { ports, keeps_binds, ..pod.clone() }.into());
        prop_assert_eq!(send(sorted.clone()), Ok(sorted));
        let mut expected = PodEntry { ports: sent, ..pod };
        let sent = RouteChange::Pod(expected.clone().into());
        expected.ports.sort_by_key(|it| it.service_port);
        prop_assert_eq!(send(sent), Ok(RouteChange::Pod(expected.into())));
    }

    #[test]
    fn each_name_of_a_port_is_read_back(port in port()) {
        let name = web().with_port(port);
        prop_assert_eq!(name.to_string().parse::<NamespacedName>(), Ok(name.clone()));
        prop_assert_eq!(name.split_port(), Some((web(), port)));
    }
}
