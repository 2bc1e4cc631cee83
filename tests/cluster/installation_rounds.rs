//! Repeated installation, each time on a cluster without Rouse.
#![allow(clippy::print_stdout, reason = "a test's own output is where its reader looks")]

use tests::client_pod::ClientPod;
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};
use tests::test_cluster::TestCluster;

const HELLO: &str = include_str!("../../examples/hello.yaml");
/// Default number of rounds, without `ROUSE_INSTALL_ROUNDS`.
const ROUNDS: u32 = 2;

/// Asserts that no component, endpoint slice or pinned program of Rouse is left on the cluster and its nodes.
fn assert_nothing_runs(cluster: &TestCluster) {
    let managed_by_rouse = "endpointslice.kubernetes.io/managed-by=rouse.dev";
    let args = ["get", "endpointslices", "-A", "--selector", managed_by_rouse, "--output", "name"];
    assert_eq!(cluster.kubectl(&args).expect("slices are listed").trim(), "");
    let filters = ["--namespace", SYSTEM_NAMESPACE, "--output", "name"];
    let kinds = "deployments,daemonsets,services,secrets,leases";
    let remaining = cluster.kubectl(&[&["get", kinds][..], &filters].concat());
    assert_eq!(remaining.expect("the namespace stays").trim(), "");
    for node in ["node1", "node2"] {
        let pins = cluster.on_node(node, &["ls", "/sys/fs/bpf/rouse"]).unwrap_or_default();
        assert_eq!(pins.trim(), "", "programs are still pinned on {node}");
    }
}

/// One round from nothing to the first response: the commands of the README, and nothing between them.
fn install_round(rouse: &RouseCluster) {
    let result = rouse.install();
    println!("{}", result.lines().last().unwrap_or_default());
    let namespace = rouse.namespace("again");
    let client = ClientPod::new(&rouse.cluster, &namespace.name, "node1");
    // Before it is ready, a request may get 503, or a moment earlier no response.
    rouse.apply_until_ready(&namespace.name, &HELLO.replace("  namespace: default\n", ""));
    let started = std::time::Instant::now();
    let url = rouse.service_url(&namespace.name, "hello");
    // Like any Service's address, it has no effect until the nodes have learned of it.
    rouse.cluster.wait("its address to lead somewhere", || client.can_connect(&url).then_some(()));
    let response = client.get(&url);
    println!("first response after {} ms", started.elapsed().as_millis());
    assert!(response.pod().starts_with("hello-00001-deployment-"), "{response}");
}

#[test]
fn the_first_request_after_an_installation_is_answered_each_time() {
    let rouse = RouseCluster::shared();
    let rounds = std::env::var("ROUSE_INSTALL_ROUNDS").ok();
    let rounds =
        rounds.map_or(ROUNDS, |text| text.parse().expect("ROUSE_INSTALL_ROUNDS is a number"));
    for _ in 0..rounds {
        rouse.run_rouse(&["uninstall", "--crds"]);
        assert_nothing_runs(&rouse.cluster);
        let kinds = rouse.cluster.kubectl(&["get", "crds", "--output", "name"]);
        assert!(!kinds.expect("kinds are listed").contains("knative"), "some kinds are left");
        install_round(&rouse);
    }
}

/// An object of a kind that is being removed is deleted with it, and would not be created again.
#[test]
fn a_kind_that_is_still_being_removed_is_waited_for() {
    let rouse = RouseCluster::shared();
    let kind = ["crd", "metrics.autoscaling.internal.knative.dev"];
    let uid = || rouse.cluster.get(&kind)["metadata"]["uid"].clone();
    let before = uid();
    let patch = |meta: &str| {
        let patch = format!("{{\"metadata\": {{{meta}}}}}");
        let args = [&["patch"][..], &kind, &["--type", "merge", "--patch", &patch]].concat();
        rouse.cluster.kubectl(&args).expect("a kind may be changed");
    };
    patch("\"finalizers\": [\"rouse.dev/test\"], \"labels\": null");
    let args = [&["delete"][..], &kind, &["--wait=false"]].concat();
    rouse.cluster.kubectl(&args).expect("a kind may be deleted");
    std::thread::scope(|scope| {
        let installs = scope.spawn(|| rouse.install());
        rouse.cluster.wait("the kind to be applied while it goes", || {
            rouse.cluster.get(&kind)["metadata"]["labels"].is_object().then_some(())
        });
        patch("\"finalizers\": null");
        installs.join().expect("it installs")
    });
    let after = uid();
    assert!(after.is_string() && after != before, "{before} went, {after} came");
    assert!(rouse.cluster.get(&kind)["metadata"]["deletionTimestamp"].is_null());
}

#[test]
fn services_stay_when_rouse_is_uninstalled_and_answer_when_it_is_back() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("stays");
    rouse.apply_until_ready(&namespace.name, &HELLO.replace("  namespace: default\n", ""));
    let url = rouse.service_url(&namespace.name, "hello");
    rouse.run_rouse(&["uninstall"]);
    assert_nothing_runs(&rouse.cluster);
    let service = rouse.cluster.get(&["ksvc", "--namespace", &namespace.name, "hello"]);
    assert_eq!(service["metadata"]["name"], "hello", "users' objects stay");
    rouse.install();
    assert_eq!(rouse.service_url(&namespace.name, "hello"), url, "so do their addresses");
    rouse.client_on("node2").get(&url).pod();
}
