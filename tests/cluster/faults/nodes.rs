//! Faults of a whole node: it freezes, disappears, or boots again.

use tests::client_pod::ClientPod;
use tests::installed_cluster::RouseCluster;
use tests::load_process::{LoadRequest, assert_none_lost, counts_by_second};

use super::{InjectedFault, service_with_min_scale};

/// All processes of a node are suspended, but its kernel runs: connections to it are established, and never read. The
/// active autoscaler is on either of the two nodes. Kubernetes would place the pod on the frozen node until it
/// notices the fault, so the node is cordoned.
#[test]
fn a_node_that_freezes_holds_up_no_wake_of_the_other() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("frozen-node");
    let namespace = &namespace.name;
    let nodes = [("node1", "node2", "asleep"), ("node2", "node1", "asleep-too")];
    rouse.apply_until_ready(
        namespace,
        &nodes.map(|(.., name)| service_with_min_scale(name, 0)).join("---\n"),
    );
    for (frozen, other_node, name) in nodes {
        // With all replicas on the frozen node, none would be left to wake the service.
        rouse.spread_components();
        let (address, client) =
            (rouse.service_address(namespace, name), rouse.client_on(other_node));
        let cordon = rouse.cordon(frozen);
        // With another active autoscaler, a decision may still hold a pod that had just ended. That pod would then be
        // frozen with the next node, and Kubernetes replaces it only after minutes.
        rouse.wait_asleep(namespace, name);
        let fault = InjectedFault::inject(&rouse.cluster, "stop", frozen, "resume");
        let args =
            ["--stages", "1x1s", "--requests", "1", "--timeout-s", "5", "--fresh-pct", "100"];
        let mut tries = 0;
        let request = rouse.cluster.wait("a response while the node is suspended", || {
            tries += 1;
            let requests = client.start_load(&address, name, &args).finish();
            requests.into_iter().find(LoadRequest::is_answered)
        });
        drop((fault, cordon));
        println!(
            "{frozen} was suspended: try {tries} was answered after {} ms",
            request.took_us / 1000
        );
        assert_both_answer(&rouse, [rouse.client_on("node1"), rouse.client_on("node2")], &address);
    }
}

#[test]
fn a_node_that_disappears_takes_no_more_traffic_and_comes_back() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("lost-node");
    let namespace = &namespace.name;
    create_spread_service(&rouse, namespace);
    let address = rouse.service_address(namespace, "spread");
    let args =
        ["--stages", "2x75s", "--path", "/?sleep=50", "--timeout-s", "5", "--fresh-pct", "100"];
    let load = rouse.client_on("node1").start_load(&address, "spread", &args);
    let fault = InjectedFault::inject(&rouse.cluster, "cut", "node2", "join");
    let requests = load.finish();
    assert_only_first_lost(&requests);
    drop(fault);
    assert_both_answer(&rouse, [rouse.client_on("node1"), rouse.client_on("node2")], &address);
}

#[test]
#[ignore = "takes minutes: --long"]
fn a_node_that_boots_again_serves_as_before() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("boot");
    let namespace = &namespace.name;
    create_spread_service(&rouse, namespace);
    rouse.apply_until_ready(namespace, &service_with_min_scale("asleep", 0));
    rouse.wait_asleep(namespace, "asleep");
    let address = rouse.service_address(namespace, "spread");
    let args =
        ["--stages", "2x90s", "--path", "/?sleep=50", "--timeout-s", "5", "--fresh-pct", "100"];
    let load = rouse.client_on("node1").start_load(&address, "spread", &args);
    // The node's mounts end with it, and with them all pinned programs and maps.
    drop(InjectedFault::inject(&rouse.cluster, "kill", "node2", "start"));
    assert_only_first_lost(&load.finish());
    // The client pod on that node ended with the node.
    let client = ClientPod::new(&rouse.cluster, namespace, "node2");
    assert_both_answer(&rouse, [rouse.client_on("node1"), &client], &address);
    let asleep_address = rouse.service_address(namespace, "asleep");
    let wake_requests =
        client.start_load(&asleep_address, "asleep", &["--stages", "2x3s"]).finish();
    assert_none_lost(&wake_requests, 10);
    // All requests must be counted on the node again, or the service would never scale to zero, or too early.
    rouse.wait_asleep(namespace, "asleep");
}

/// Creates a service with a pod on each node.
fn create_spread_service(rouse: &RouseCluster, namespace: &str) {
    rouse.apply_until_ready(namespace, &service_with_min_scale("spread", 2));
    rouse.cluster.wait("a pod on each node", || {
        let pods = rouse.pods(namespace, "spread");
        let has_pod_on = |node: &str| pods.iter().any(|pod| pod["spec"]["nodeName"] == node);
        (pods.len() == 2 && has_pod_on("node1") && has_pod_on("node2")).then_some(())
    });
}

/// Asserts that requests are lost only until all nodes know of the fault: none of the last ten seconds.
fn assert_only_first_lost(requests: &[LoadRequest]) {
    let end = requests.iter().map(|request| request.at_us).max().expect("some were sent");
    let last: Vec<LoadRequest> =
        requests.iter().filter(|it| it.at_us + 10_000_000 > end).cloned().collect();
    let lost = requests.iter().filter(|it| !it.is_answered()).count();
    println!("{lost} of {} had only the lost node to go to", requests.len());
    println!("(answered, lost) of each second: {:?}", counts_by_second(requests));
    assert_none_lost(&last, 20);
}

fn assert_both_answer(rouse: &RouseCluster, from: [&ClientPod; 2], address: &str) {
    rouse.cluster.wait("both nodes to respond again", || {
        from.iter().all(|it| it.get(&format!("http://{address}")).status == 200).then_some(())
    });
}
