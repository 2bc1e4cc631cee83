//! Shell: pods whose network namespaces redirect connections, as those of a mesh, in the running kernel.

use super::*;

/// Beginning of the metrics line with the number of such namespaces.
const MESHED_METRIC: &str = "rouse_agent_meshed_namespaces";

impl AgentFixture {
    /// Runs `nft` in the pod's namespace.
    fn run_nft(&self, command: &str) {
        run_shell(&format!("ip netns exec {}-p nft {command}", self.name));
    }
}

#[test]
fn connects_and_datagrams_of_a_meshed_pod_go_on_unchanged_also_with_the_next_agent() {
    let (mut fixture, server) = start("meshed", "all");
    fixture.send_to_pod("datagrams");
    set_node(&server);
    let mut labelled = dns_service();
    labelled["metadata"]["labels"] = json!({"rouse.dev/clusterip": "true"});
    server.set(labelled);
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.wait_role_outcome("datagram", "connected");
    fixture.wait_outcome("connected");
    // The proxy of a mesh adds a chain of this type. This one has no rule, so that nothing is redirected here.
    fixture.run_nft("add table ip mesh");
    fixture.run_nft("add chain ip mesh output { type nat hook output priority 0 ; }");
    fixture.wait_outcome("unchanged");
    assert_eq!(fixture.role_outcome("datagram"), "unchanged");
    fixture.wait_metric(MESHED_METRIC, 1);
    // An agent with new maps finds it before connects follow them.
    let suffix = MapSizes::WHOLE_CLUSTER.pins_suffix();
    let earlier = fixture.folder.join(format!("bpf/v{}{suffix}", abi::ABI_VERSION));
    assert!(earlier.exists());
    fixture.kill_agent();
    fixture.start_agent_with_services("labelled");
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while earlier.exists() {
        assert_eq!(fixture.connect_outcome(), "unchanged");
        assert!(Instant::now() < deadline, "the agent does not take over");
    }
    assert_eq!(fixture.connect_outcome(), "unchanged");
}

#[test]
fn connects_of_a_meshed_pod_are_redirected_where_no_kube_proxy_could_serve_them() {
    let (mut fixture, server) = start("meshonly", "all");
    set_node(&server);
    server.set(service(None));
    server.set(endpoint_slice(&["10.77.0.2"]));
    fixture.run_nft("add table ip mesh");
    fixture.run_nft("add chain ip mesh output { type nat hook output priority 0 ; }");
    fixture.wait_metric(MESHED_METRIC, 1);
    fixture.kill_agent();
    let settings = [("ROUSE_CLUSTERIP", "all"), ("ROUSE_WITHOUT_KUBE_PROXY", "true")];
    fixture.start_agent_with_settings(&settings);
    fixture.wait_outcome("connected");
}
