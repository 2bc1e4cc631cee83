//! Pure: tests of the endpoint selection, by named cases and against an oracle on random Services.

mod explanations;
mod objects;
mod oracle;

use std::num::NonZeroU16;

use super::{
    AddressFamily, ClusterIpPort, ClusterIpService, InternalTrafficPolicy, NoEndpointReason,
    NodeTopology, PortTarget, SelectionRule, ServiceEndpoint, ServiceSlice, ServiceSlicePort,
    TransportProtocol, route_service,
};

fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("not zero")
}

/// Returns a Service with ClusterIP 10.96.0.1 and the TCP port 80 named `web`.
fn service() -> ClusterIpService {
    ClusterIpService {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![ClusterIpPort {
            name: "web".into(),
            protocol: TransportProtocol::Tcp,
            port: port(80),
        }],
        ..ClusterIpService::default()
    }
}

/// Returns an IPv4 slice for the port `web`, at which all endpoints listen at 8080.
fn slice(endpoints: &[ServiceEndpoint]) -> ServiceSlice {
    ServiceSlice {
        family: AddressFamily::V4,
        ports: [ServiceSlicePort {
            name: "web".into(),
            protocol: TransportProtocol::Tcp,
            port: port(8080),
        }]
        .into(),
        endpoints: endpoints.into(),
    }
}

/// Returns a ready endpoint 10.0.0.`last` on `node`, without hints.
fn ready(last: u8, node: &str) -> ServiceEndpoint {
    ServiceEndpoint {
        address: [10, 0, 0, last].into(),
        is_ready: true,
        is_serving: true,
        is_terminating: false,
        node: node.into(),
        zone: "".into(),
        zone_hints: [].into(),
        node_hints: [].into(),
    }
}

/// Returns an endpoint that terminates and still serves.
fn draining(last: u8, node: &str) -> ServiceEndpoint {
    ServiceEndpoint { is_ready: false, is_terminating: true, ..ready(last, node) }
}

/// Returns a ready endpoint with hints.
fn hinted(last: u8, zones: &[&str], nodes: &[&str]) -> ServiceEndpoint {
    ServiceEndpoint {
        zone_hints: zones.iter().map(|&it| it.into()).collect(),
        node_hints: nodes.iter().map(|&it| it.into()).collect(),
        ..ready(last, "n2")
    }
}

/// Selects for node `n1` in zone `a`. Returns the last numbers of the addresses, and the rule.
fn select(
    service: &ClusterIpService,
    slices: &[ServiceSlice],
) -> Result<(Vec<u8>, SelectionRule), NoEndpointReason> {
    let node = NodeTopology { name: "n1".into(), zone: "a".into() };
    let routings = route_service(service, slices.iter(), &node);
    match routings.into_iter().next().expect("one port").target {
        PortTarget::Endpoints { addresses, rule } => {
            let last =
                addresses.iter().map(|it| it.to_string().split(['.', ':']).nth(3).unwrap().parse());
            Ok((last.collect::<Result<_, _>>().unwrap(), rule))
        }
        PortTarget::None(reason) => Err(reason),
    }
}

fn local_service() -> ClusterIpService {
    ClusterIpService { internal_traffic_policy: InternalTrafficPolicy::Local, ..service() }
}

#[test]
fn ready_endpoints_of_all_slices_are_used_and_no_others() {
    let unready = ServiceEndpoint { is_ready: false, is_serving: false, ..ready(9, "n1") };
    let slices = [slice(&[ready(2, "n2"), unready]), slice(&[ready(1, "n1"), draining(3, "n1")])];
    assert_eq!(select(&service(), &slices), Ok((vec![1, 2], SelectionRule::Ready)));
}

#[test]
fn endpoints_that_terminate_and_serve_are_used_while_none_is_ready() {
    let silent = ServiceEndpoint { is_serving: false, ..draining(2, "n1") };
    let slices = [slice(&[draining(1, "n2"), silent])];
    assert_eq!(select(&service(), &slices), Ok((vec![1], SelectionRule::Terminating)));
    assert_eq!(select(&service(), &[]), Err(NoEndpointReason::NoneInCluster));
}

#[test]
fn hints_are_ignored_among_endpoints_that_terminate() {
    let other_zone = ServiceEndpoint { zone_hints: ["b".into()].into(), ..draining(1, "n2") };
    assert_eq!(
        select(&service(), &[slice(&[other_zone])]),
        Ok((vec![1], SelectionRule::Terminating))
    );
}

#[test]
fn node_hints_win_over_zone_hints() {
    let slices = [slice(&[hinted(1, &["a"], &["n1"]), hinted(2, &["a"], &["n2"])])];
    assert_eq!(select(&service(), &slices), Ok((vec![1], SelectionRule::SameNode)));
}

#[test]
fn zone_hints_count_where_no_endpoint_is_hinted_for_the_node() {
    let slices = [slice(&[hinted(1, &["a"], &["n3"]), hinted(2, &["b", "a"], &["n2"])])];
    assert_eq!(select(&service(), &slices), Ok((vec![1, 2], SelectionRule::SameZone)));
    let slices = [slice(&[hinted(1, &["a"], &["n1"]), hinted(2, &["b"], &[])])];
    assert_eq!(select(&service(), &slices), Ok((vec![1], SelectionRule::SameZone)));
}

#[test]
fn one_ready_endpoint_without_a_hint_disables_hints() {
    let slices = [slice(&[hinted(1, &["a"], &[]), ready(2, "n2")])];
    assert_eq!(select(&service(), &slices), Ok((vec![1, 2], SelectionRule::Ready)));
    let slices = [slice(&[hinted(1, &["a"], &[]), draining(2, "n2")])];
    assert_eq!(
        select(&service(), &slices),
        Ok((vec![1], SelectionRule::SameZone)),
        "the hints of endpoints that are not ready do not matter"
    );
}

#[test]
fn hints_that_name_only_other_zones_are_ignored() {
    let slices = [slice(&[hinted(1, &["b"], &[]), hinted(2, &["c"], &[])])];
    assert_eq!(select(&service(), &slices), Ok((vec![1, 2], SelectionRule::Ready)));
}

#[test]
fn a_node_without_a_zone_ignores_zone_hints() {
    let slices = [slice(&[hinted(1, &["a"], &[]), hinted(2, &["b"], &[])])];
    let node = NodeTopology { name: "n1".into(), zone: "".into() };
    let routings = route_service(&service(), slices.iter(), &node);
    let PortTarget::Endpoints { addresses, rule } = &routings[0].target else { panic!() };
    assert_eq!((addresses.len(), *rule), (2, SelectionRule::Ready));
}

#[test]
fn a_local_policy_uses_endpoints_of_the_node_only() {
    let slices = [slice(&[ready(1, "n1"), ready(2, "n2"), draining(3, "n1")])];
    assert_eq!(select(&local_service(), &slices), Ok((vec![1], SelectionRule::ReadyOnNode)));
    let slices = [slice(&[ready(2, "n2"), draining(3, "n1")])];
    assert_eq!(select(&local_service(), &slices), Ok((vec![3], SelectionRule::TerminatingOnNode)));
    let slices = [slice(&[ready(2, "n2"), ready(4, "")])];
    assert_eq!(select(&local_service(), &slices), Err(NoEndpointReason::NoneOnNode));
    assert_eq!(select(&local_service(), &[]), Err(NoEndpointReason::NoneInCluster));
}

#[test]
fn an_address_in_two_slices_is_used_once() {
    let twice = [slice(&[ready(1, "n1")]), slice(&[ready(1, "n1")])];
    assert_eq!(select(&service(), &twice), Ok((vec![1], SelectionRule::Ready)));
}

#[test]
fn a_pod_with_the_address_of_one_that_terminates_wins_in_any_order() {
    let (old, new) = (slice(&[draining(1, "n1")]), slice(&[ready(1, "n1")]));
    for slices in [[old.clone(), new.clone()], [new, old]] {
        assert_eq!(select(&service(), &slices), Ok((vec![1], SelectionRule::Ready)));
    }
}

#[test]
fn each_port_has_the_endpoints_of_its_name_and_protocol() {
    let dns = |protocol, name: &str| ClusterIpPort { name: name.into(), protocol, port: port(53) };
    let slice_port = |protocol, name: &str, number| ServiceSlicePort {
        name: name.into(),
        protocol,
        port: port(number),
    };
    let service = ClusterIpService {
        ports: vec![dns(TransportProtocol::Udp, "dns"), dns(TransportProtocol::Tcp, "dns-tcp")],
        ..service()
    };
    let slices = [
        ServiceSlice {
            ports: [
                slice_port(TransportProtocol::Udp, "dns", 5353),
                slice_port(TransportProtocol::Tcp, "dns-tcp", 5454),
                slice_port(TransportProtocol::Sctp, "dns", 1),
            ]
            .into(),
            ..slice(&[ready(1, "n1")])
        },
        // Pods whose named target port has another number are in a slice of their own.
        ServiceSlice {
            ports: [slice_port(TransportProtocol::Udp, "dns", 5555)].into(),
            ..slice(&[ready(2, "n1")])
        },
    ];
    let routings = route_service(&service, slices.iter(), &NodeTopology::default());
    let texts: Vec<_> = routings
        .iter()
        .map(|it| match &it.target {
            PortTarget::Endpoints { addresses, .. } => {
                addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
            }
            PortTarget::None(_) => "none".to_owned(),
        })
        .collect();
    assert_eq!(texts, ["10.0.0.1:5353 10.0.0.2:5555", "10.0.0.1:5454"]);
}

#[test]
fn each_address_has_the_endpoints_of_its_family() {
    let service = ClusterIpService {
        cluster_ips: vec!["fd00::1".parse().unwrap(), "10.96.0.1".parse().unwrap()],
        ..service()
    };
    let six = ServiceEndpoint { address: "fd00:1::7".parse().unwrap(), ..ready(7, "n1") };
    let slices =
        [slice(&[ready(1, "n1")]), ServiceSlice { family: AddressFamily::V6, ..slice(&[six]) }];
    let routings = route_service(&service, slices.iter(), &NodeTopology::default());
    let all: Vec<_> = routings
        .iter()
        .map(|it| match &it.target {
            PortTarget::Endpoints { addresses, .. } => (it.address, addresses[0].to_string()),
            PortTarget::None(_) => panic!("{it:?}"),
        })
        .collect();
    assert_eq!(
        all,
        [
            ("fd00::1".parse().unwrap(), "[fd00:1::7]:8080".to_owned()),
            ("10.96.0.1".parse().unwrap(), "10.0.0.1:8080".to_owned()),
        ]
    );
}
