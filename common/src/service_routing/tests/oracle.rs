//! Pure: random Services against an oracle, which decides for each address alone if a node uses it.
//!
//! The oracle follows the text of kube-proxy's rules, endpoint by endpoint. It shares no code with the selection.

use std::{collections::BTreeSet, net::SocketAddr};

use super::{super::*, port};

/// Random Services that the test compares.
const CASES: u64 = 100_000;

const ZONES: [&str; 3] = ["a", "b", "c"];
const NODES: [&str; 4] = ["n1", "n2", "n3", ""];
const NAMES: [&str; 3] = ["", "web", "admin"];
const PROTOCOLS: [TransportProtocol; 3] =
    [TransportProtocol::Tcp, TransportProtocol::Udp, TransportProtocol::Sctp];

/// Source of random choices (xorshift64*): the same seed gives the same case.
struct Choices(u64);

impl Choices {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Chooses hints: in most cases one name, sometimes several or none.
    fn hints(&mut self, all: &[&str], is_hinted: bool) -> Box<[SmolStr]> {
        if !is_hinted || self.one_in(30) {
            return [].into();
        }
        (0..=self.below(2)).map(|_| self.one_of(all).into()).collect()
    }

    fn service(&mut self) -> ClusterIpService {
        let four = "10.96.0.1".parse().expect("an address");
        let six = "fd00::1".parse().expect("an address");
        let cluster_ips = match self.below(4) {
            0 => vec![six],
            1 => vec![four, six],
            _ => vec![four],
        };
        let ports = (0..=self.below(3) as u16).map(|at| ClusterIpPort {
            name: self.one_of(&NAMES).into(),
            protocol: self.one_of(&PROTOCOLS),
            port: port(80 + at),
        });
        let ports = ports.collect();
        let policies = [InternalTrafficPolicy::Cluster, InternalTrafficPolicy::Local];
        let internal_traffic_policy = self.one_of(&policies);
        ClusterIpService { cluster_ips, ports, internal_traffic_policy, affinity_timeout: None }
    }

    fn slices(&mut self) -> Vec<ServiceSlice> {
        // All endpoints have hints or none, or else hints would nearly never count.
        let (are_zones_hinted, are_nodes_hinted) = (self.one_in(2), self.one_in(3));
        let are_all_unready = self.one_in(3);
        let slice = |choices: &mut Self| {
            let family = choices.one_of(&[AddressFamily::V4, AddressFamily::V4, AddressFamily::V6]);
            let ports = (0..=choices.below(3)).map(|_| ServiceSlicePort {
                name: choices.one_of(&NAMES).into(),
                protocol: choices.one_of(&PROTOCOLS),
                port: port(8080 + choices.below(2) as u16),
            });
            let ports = ports.collect();
            let endpoints = (0..choices.below(6)).map(|_| {
                // Few addresses, so that slices often contradict each other.
                let last = choices.below(6) as u8;
                ServiceEndpoint {
                    address: match family {
                        AddressFamily::V4 => [10, 0, 0, last].into(),
                        AddressFamily::V6 => [0xFD00, 0, 0, 0, 0, 0, 0, u16::from(last)].into(),
                    },
                    is_ready: !are_all_unready && choices.one_in(2),
                    is_serving: choices.one_in(2),
                    is_terminating: choices.one_in(2),
                    node: choices.one_of(&NODES).into(),
                    zone: "".into(),
                    zone_hints: choices.hints(&ZONES, are_zones_hinted),
                    node_hints: choices.hints(&NODES[..3], are_nodes_hinted),
                }
            });
            ServiceSlice { family, ports, endpoints: endpoints.collect() }
        };
        (0..self.below(4)).map(|_| slice(self)).collect()
    }
}

/// Finds the endpoint that counts for each address: a later one replaces an earlier one unless it terminates.
fn joined<'a>(
    service_port: &ClusterIpPort,
    address: IpAddr,
    slices: &'a [ServiceSlice],
) -> Vec<(SocketAddr, &'a ServiceEndpoint)> {
    let mut all: Vec<(SocketAddr, &ServiceEndpoint)> = Vec::new();
    for slice in slices.iter().filter(|it| (it.family == AddressFamily::V4) == address.is_ipv4()) {
        for slice_port in &slice.ports {
            if slice_port.name != service_port.name || slice_port.protocol != service_port.protocol
            {
                continue;
            }
            for endpoint in &slice.endpoints {
                let at = SocketAddr::new(endpoint.address, slice_port.port.get());
                match all.iter().position(|(known, _)| *known == at) {
                    None => all.push((at, endpoint)),
                    Some(known) if !endpoint.is_terminating => all[known] = (at, endpoint),
                    Some(_) => {}
                }
            }
        }
    }
    all
}

/// Returns the addresses that the node uses, and if any address of the cluster is usable.
fn expected(
    policy: InternalTrafficPolicy,
    endpoints: &[(SocketAddr, &ServiceEndpoint)],
    node: &NodeTopology,
) -> (BTreeSet<SocketAddr>, bool) {
    let mut ready: Vec<_> = endpoints.iter().filter(|(_, it)| it.is_ready).collect();
    let mut ending: Vec<_> =
        endpoints.iter().filter(|(_, it)| it.is_serving && it.is_terminating).collect();
    let exists = ready.len() + ending.len() > 0;
    if policy == InternalTrafficPolicy::Local {
        ready.retain(|(_, it)| it.node == node.name);
        ending.retain(|(_, it)| it.node == node.name);
    } else {
        let unhinted_nodes = ready.iter().filter(|(_, it)| it.node_hints.is_empty()).count();
        let unhinted_zones = ready.iter().filter(|(_, it)| it.zone_hints.is_empty()).count();
        let for_node = |it: &ServiceEndpoint| it.node_hints.iter().any(|hint| hint == &node.name);
        let for_zone = |it: &ServiceEndpoint| it.zone_hints.iter().any(|hint| hint == &node.zone);
        if unhinted_nodes == 0 && ready.iter().any(|(_, it)| for_node(it)) {
            ready.retain(|(_, it)| for_node(it));
        } else if unhinted_zones == 0 && ready.iter().any(|(_, it)| for_zone(it)) {
            ready.retain(|(_, it)| for_zone(it));
        }
    }
    let used = if ready.is_empty() { ending } else { ready };
    (used.into_iter().map(|(address, _)| *address).collect(), exists)
}

/// Checks the verdict about each endpoint: the used ones are selected, and the reason of each other one is true.
fn check_verdicts(
    policy: InternalTrafficPolicy,
    endpoints: &[(SocketAddr, &ServiceEndpoint)],
    used: &BTreeSet<SocketAddr>,
    explained: &PortExplanation,
    node: &NodeTopology,
) {
    assert_eq!(explained.endpoints.len(), endpoints.len());
    let has_ready = endpoints.iter().any(|(_, it)| it.is_ready);
    for ExplainedEndpoint { address, endpoint, verdict } in &explained.endpoints {
        assert!(endpoints.iter().any(|(at, it)| at == address && *it == endpoint), "{address}");
        let drains = endpoint.is_serving && endpoint.is_terminating;
        let is_local = policy == InternalTrafficPolicy::Local;
        let is_true = match verdict {
            EndpointVerdict::Selected => used.contains(address),
            EndpointVerdict::NotReady => !endpoint.is_ready && !drains,
            EndpointVerdict::Terminating => !endpoint.is_ready && drains && has_ready,
            EndpointVerdict::OnOtherNode => is_local && endpoint.node != node.name,
            EndpointVerdict::HintedForOtherNodes => {
                endpoint.is_ready && !is_local && !endpoint.node_hints.contains(&node.name)
            }
            EndpointVerdict::HintedForOtherZones => {
                endpoint.is_ready && !is_local && !endpoint.zone_hints.contains(&node.zone)
            }
        };
        assert!(is_true, "{verdict:?} of {address}: {endpoint:?} on {node:?}");
        assert_eq!(verdict.is_selected(), used.contains(address), "{address}: {endpoint:?}");
    }
}

#[test]
fn random_services_are_routed_as_the_oracle_routes_them() {
    let mut kinds = BTreeSet::new();
    for seed in 1..=CASES {
        let mut choices = Choices(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (service, slices) = (choices.service(), choices.slices());
        let zone = if choices.one_in(8) { "" } else { ZONES[0] };
        let node = NodeTopology { name: "n1".into(), zone: zone.into() };
        let routings = route_service(&service, slices.iter(), &node);
        let ports = service.cluster_ips.iter().flat_map(|&address| {
            service.ports.iter().map(move |service_port| (address, service_port))
        });
        let ports: Vec<_> = ports.collect();
        assert_eq!(routings.len(), ports.len());
        for (routing, (address, service_port)) in routings.iter().zip(ports) {
            assert_eq!(
                (routing.address, routing.port, routing.protocol),
                (address, service_port.port, service_port.protocol)
            );
            let endpoints = joined(service_port, address, &slices);
            let (used, exists) = expected(service.internal_traffic_policy, &endpoints, &node);
            let (actual, kind) = match &routing.target {
                PortTarget::Endpoints { addresses, rule } => {
                    assert!(addresses.is_sorted_by(|a, b| a < b) && !addresses.is_empty());
                    (addresses.iter().copied().collect(), format!("{rule:?}"))
                }
                PortTarget::None(reason) => {
                    assert_eq!(exists, *reason == NoEndpointReason::NoneOnNode, "seed {seed}");
                    (BTreeSet::new(), format!("{reason:?}"))
                }
            };
            assert_eq!(actual, used, "seed {seed}: {service:?} {slices:?} {node:?}");
            kinds.insert(kind);
            let explained = explain_port(&service, service_port, address, slices.iter(), &node);
            assert_eq!(explained.target, routing.target, "seed {seed}");
            check_verdicts(service.internal_traffic_policy, &endpoints, &used, &explained, &node);
            let known = count_endpoints(service_port, address, slices.iter());
            assert_eq!(known, endpoints.len(), "seed {seed}");
        }
    }
    assert_eq!(kinds.len(), 8, "every rule and every reason occurs: {kinds:?}");
}
