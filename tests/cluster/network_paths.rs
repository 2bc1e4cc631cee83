//! Network paths between pods, seen from inside them, to Services that Rouse does not serve.

use std::net::SocketAddr;

use tests::http_client;
use tests::test_cluster::{TestCluster, TestNamespace, in_netns, resolve};

use crate::baseline::{apply_sample, nodes, pod_of};

#[test]
fn a_service_answers_a_pod_on_the_other_node_in_both_families() {
    let cluster = TestCluster::from_environment();
    let namespace = TestNamespace::new(&cluster, "plain-path");
    let nodes = nodes(&cluster);
    apply_sample(&cluster, &namespace, "far", &nodes[0]);
    apply_sample(&cluster, &namespace, "near", &nodes[1]);
    let service = cluster.get(&["service", "--namespace", &namespace.name, "far"]);
    let addresses = service["spec"]["clusterIPs"].as_array().expect("it has addresses").clone();
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    let netns = cluster.netns_of(&namespace.name, &pod_of(&cluster, &namespace.name, "near"));
    let far = pod_of(&cluster, &namespace.name, "far");
    for address in addresses {
        let ip = address.as_str().unwrap_or_default().parse().expect("an address");
        let address = SocketAddr::new(ip, 80);
        let body = cluster.wait("a response through kube-proxy", || {
            in_netns(&netns, || http_client::get(address, "far", "/"))
                .ok()
                .map(|response| response.body)
        });
        assert!(body.contains(&far), "{body} does not come from {far}");
    }
}

#[test]
fn names_of_services_resolve_inside_pods() {
    let cluster = TestCluster::from_environment();
    let namespace = TestNamespace::new(&cluster, "plain-names");
    apply_sample(&cluster, &namespace, "named", &nodes(&cluster)[1]);
    let service = cluster.get(&["service", "--namespace", &namespace.name, "named"]);
    let netns = cluster.netns_of(&namespace.name, &pod_of(&cluster, &namespace.name, "named"));
    let dns = cluster.get(&["service", "--namespace", "kube-system", "kube-dns"]);
    let dns: SocketAddr =
        format!("{}:53", dns["spec"]["clusterIP"].as_str().unwrap()).parse().unwrap();
    let name = format!("named.{}.svc.cluster.local", namespace.name);
    for (kind, expected) in
        [(1, &service["spec"]["clusterIPs"][0]), (28, &service["spec"]["clusterIPs"][1])]
    {
        let addresses = cluster.wait("the name", || {
            in_netns(&netns, || resolve(dns, &name, kind)).ok().filter(|found| !found.is_empty())
        });
        assert_eq!(addresses, [expected.as_str().unwrap_or_default()]);
    }
}
