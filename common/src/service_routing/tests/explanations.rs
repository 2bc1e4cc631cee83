//! Pure: tests of the reasons that the selection gives for each endpoint.

use super::{
    super::{EndpointVerdict, HintState, explain_port},
    *,
};

/// Explains the port `web` for node `n1` in zone `a`. Returns the verdicts by the last numbers of the addresses, and
/// the states of the hints for nodes and zones.
fn explain(
    service: &ClusterIpService,
    endpoints: &[ServiceEndpoint],
) -> (Vec<(u8, EndpointVerdict)>, [HintState; 2]) {
    let node = NodeTopology { name: "n1".into(), zone: "a".into() };
    let (port, slices) = (&service.ports[0], [slice(endpoints)]);
    let explained = explain_port(service, port, service.cluster_ips[0], slices.iter(), &node);
    let last = |address: std::net::SocketAddr| match address.ip() {
        std::net::IpAddr::V4(address) => address.octets()[3],
        std::net::IpAddr::V6(_) => panic!("{address}"),
    };
    let verdicts = explained.endpoints.iter().map(|it| (last(it.address), it.verdict));
    (verdicts.collect(), [explained.node_hints, explained.zone_hints])
}

fn unready(last: u8) -> ServiceEndpoint {
    ServiceEndpoint { is_ready: false, is_serving: false, ..ready(last, "n1") }
}

#[test]
fn endpoints_that_are_not_used_have_the_reason() {
    use EndpointVerdict::{NotReady, Selected, Terminating};
    let absent = [HintState::Absent; 2];
    let endpoints = [ready(1, "n1"), unready(2), draining(3, "n2")];
    let verdicts = vec![(1, Selected), (2, NotReady), (3, Terminating)];
    assert_eq!(explain(&service(), &endpoints), (verdicts, absent));
    let verdicts = vec![(2, NotReady), (3, Selected)];
    assert_eq!(explain(&service(), &endpoints[1..]), (verdicts, absent));
    assert_eq!(explain(&service(), &[unready(2)]), (vec![(2, NotReady)], absent));
}

#[test]
fn a_local_policy_names_endpoints_of_other_nodes() {
    use EndpointVerdict::{OnOtherNode, Selected, Terminating};
    let endpoints = [ready(1, "n1"), ready(2, "n2"), draining(3, "n1")];
    let verdicts = vec![(1, Selected), (2, OnOtherNode), (3, Terminating)];
    assert_eq!(explain(&local_service(), &endpoints).0, verdicts);
    let verdicts = vec![(2, OnOtherNode), (4, OnOtherNode)];
    assert_eq!(explain(&local_service(), &[ready(2, "n2"), draining(4, "n2")]).0, verdicts);
}

#[test]
fn hints_that_count_exclude_endpoints_and_others_say_why_they_do_not_count() {
    use EndpointVerdict::{HintedForOtherNodes, HintedForOtherZones, Selected};
    let zones = [hinted(1, &["a"], &[]), hinted(2, &["b"], &[])];
    let verdicts = vec![(1, Selected), (2, HintedForOtherZones)];
    assert_eq!(explain(&service(), &zones), (verdicts, [HintState::Absent, HintState::Here]));
    let nodes = [hinted(1, &["a"], &["n1"]), hinted(2, &["a"], &["n2"])];
    let verdicts = vec![(1, Selected), (2, HintedForOtherNodes)];
    assert_eq!(explain(&service(), &nodes), (verdicts, [HintState::Here, HintState::Here]));
    let partial = [hinted(1, &["a"], &["n2"]), ready(2, "n2")];
    let verdicts = vec![(1, Selected), (2, Selected)];
    assert_eq!(explain(&service(), &partial), (verdicts.clone(), [HintState::Partial; 2]));
    let elsewhere = [hinted(1, &["b"], &["n2"]), hinted(2, &["c"], &["n3"])];
    assert_eq!(explain(&service(), &elsewhere), (verdicts, [HintState::Elsewhere; 2]));
}
