//! kube-proxy's own choice of endpoints: 1,500 random Services with its results (Kubernetes 1.36.3, package `pkg/proxy`).
//!
//! `data/kube_proxy/main.go` made them with `main 1500 36` (number of cases, seed). Its module requires
//! `k8s.io/kubernetes v1.36.3`, with each staged module replaced by the published one.
//!
//! One JSON object per line: the node's zone, the Service, its EndpointSlices, and for each port
//! `ADDRESS PORT PROTOCOL` the endpoints that clients on node `n1` use.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
};

use common::service_routing::{
    ClusterIpService, NoEndpointReason, NodeTopology, PortTarget, ServiceSlice, TransportProtocol,
    route_service,
};
use flate2::bufread::GzDecoder;
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use serde::Deserialize;

const CASES: &[u8] = include_bytes!("data/kube_proxy/cases.jsonl.gz");

/// One line of the data.
#[derive(Deserialize)]
struct KubeProxyCase {
    zone: String,
    service: Service,
    slices: Option<Vec<EndpointSlice>>,
    endpoints: BTreeMap<String, Vec<String>>,
    /// True for the ports that have a usable endpoint somewhere in the cluster.
    exists: BTreeMap<String, bool>,
}

fn protocol_name(protocol: TransportProtocol) -> &'static str {
    match protocol {
        TransportProtocol::Tcp => "TCP",
        TransportProtocol::Udp => "UDP",
        TransportProtocol::Sctp => "SCTP",
    }
}

#[test]
fn services_have_the_endpoints_that_kube_proxy_uses() {
    let (mut lines, mut with_endpoints, mut without_local) = (0, 0, 0);
    for line in BufReader::new(GzDecoder::new(CASES)).lines() {
        let line = line.expect("compressed text");
        let case: KubeProxyCase = serde_json::from_str(&line).expect("a case");
        let mut errors = Vec::new();
        let service =
            ClusterIpService::from_kubernetes(&case.service, &mut errors).expect("it is routed");
        let slices: Vec<_> = case
            .slices
            .iter()
            .flatten()
            .filter_map(|slice| ServiceSlice::from_kubernetes(slice, &mut errors))
            .collect();
        assert_eq!(errors, []);
        let node = NodeTopology { name: "n1".into(), zone: case.zone.into() };
        let (mut endpoints, mut exists) = (BTreeMap::new(), BTreeMap::new());
        for routing in route_service(&service, slices.iter(), &node) {
            let protocol = protocol_name(routing.protocol);
            let key = format!("{} {} {protocol}", routing.address, routing.port);
            let mut texts = match &routing.target {
                PortTarget::Endpoints { addresses, .. } => {
                    addresses.iter().map(ToString::to_string).collect()
                }
                PortTarget::None(_) => Vec::new(),
            };
            texts.sort_unstable();
            let has_none_in_cluster =
                routing.target == PortTarget::None(NoEndpointReason::NoneInCluster);
            with_endpoints += usize::from(!texts.is_empty());
            without_local += usize::from(texts.is_empty() && !has_none_in_cluster);
            exists.insert(key.clone(), !has_none_in_cluster);
            endpoints.insert(key, texts);
        }
        assert_eq!((endpoints, exists), (case.endpoints, case.exists), "{line}");
        lines += 1;
    }
    assert_eq!(lines, 1_500);
    assert!(with_endpoints > 400 && without_local > 100, "{with_endpoints} {without_local}");
}
