//! Pods that stop under load for any reason: every request gets a response, and none is served twice.
//!
//! `ROUSE_STOPPING_REQUESTS` is the least number of requests of each test, `ROUSE_LONG_REQUEST_S` the length of the
//! longest in seconds, which the timeout of the service (180 s) bounds.
#![allow(clippy::print_stdout, reason = "the output shows the progress of the load")]

use serde_json::Value;
use tests::flood::FloodProcess;
use tests::installed_cluster::RouseCluster;
use tests::test_cluster::TestCluster;

use crate::mixed_load::{FloodAppOptions, FloodFixture, LATEST_TRAFFIC, print_losses};

/// Additional clients that need more than two pods: a pod's target is
/// [`TARGET_CONCURRENCY`](crate::mixed_load::TARGET_CONCURRENCY).
const PULSE_CLIENTS: [&str; 2] = ["slow-get=200", "slow-post=200"];
/// Default number of requests of a test.
const REQUESTS: u64 = 20_000;
/// Client number of the first pulse, apart from the numbers of the other clients.
const FIRST_PULSE_CLIENT: u64 = 1_000;

fn run_scenario(test: &str, app: FloodAppOptions) {
    let rouse = RouseCluster::shared();
    let mut fixture = FloodFixture::new(&rouse, test, app);
    let requests = std::env::var("ROUSE_STOPPING_REQUESTS").ok().and_then(|it| it.parse().ok());
    let requests: u64 = requests.unwrap_or(REQUESTS);
    let floods = fixture.start_floods();
    let mut serving = "app-v1".to_owned();
    for round in 1.. {
        serving = end_pods_in_every_way(&mut fixture, &floods, round, &serving);
        let answered: u64 = floods.iter().map(FloodProcess::answered).sum();
        println!("round {round}: {answered} of {requests}");
        if answered >= requests {
            break;
        }
    }
    fixture.finish_and_check(floods);
}

/// Ends pods in every way, one after the other. Returns the Revision that serves afterwards.
fn end_pods_in_every_way(
    fixture: &mut FloodFixture<'_>,
    floods: &[FloodProcess],
    round: u64,
    serving: &str,
) -> String {
    scale_out_and_in(fixture, floods, round);
    print_losses("scale-in", floods);
    fixture.version += 1;
    let new = format!("app-v{}", fixture.version);
    shift_traffic(fixture, LATEST_TRAFFIC, &new);
    print_losses("rollout", floods);
    // Every other round rolls back to the previous revision.
    let rolls_back = round % 2 == 1;
    if rolls_back {
        shift_traffic(fixture, &format!("[{{revisionName: {serving}, percent: 100}}]"), serving);
        print_losses("rollback", floods);
    }
    end_one_pod(fixture, floods, delete);
    print_losses("delete", floods);
    end_one_pod(fixture, floods, evict);
    print_losses("evict", floods);
    end_one_pod(fixture, floods, drain);
    print_losses("drain", floods);
    if rolls_back { serving.to_owned() } else { new }
}

/// Moves all traffic to another revision, and waits until the previous one's pods have ended.
fn shift_traffic(fixture: &FloodFixture<'_>, traffic: &str, revision: &str) {
    fixture
        .rouse
        .apply(fixture.namespace_name(), &fixture.service_manifest(traffic))
        .expect("admission accepts it");
    fixture.rouse.cluster.wait(&format!("only pods of {revision}"), || {
        let pods = fixture.pods();
        let is_of_revision =
            |pod: &Value| pod["metadata"]["labels"]["serving.knative.dev/revision"] == revision;
        (!pods.is_empty() && pods.iter().all(is_of_revision)).then_some(())
    });
}

/// Scales 1 → 3 → 1 pods by additional load that comes and goes.
fn scale_out_and_in(fixture: &FloodFixture<'_>, floods: &[FloodProcess], round: u64) {
    let pulse = fixture.flood_from_node("node1", FIRST_PULSE_CLIENT + round, &PULSE_CLIENTS);
    let cluster = &fixture.rouse.cluster;
    cluster.wait("three pods", || (fixture.serving_pods().len() >= 3).then_some(()));
    fixture.wait_progress(floods, 500);
    fixture.check_outcome("pulse", &pulse.stop());
    cluster.wait("one pod again", || {
        (fixture.pods().len() == 1 && fixture.serving_pods().len() == 1).then_some(())
    });
}

/// Ends one pod from outside by the function `end_pod`, which gets the pod's name and its node.
fn end_one_pod(
    fixture: &FloodFixture<'_>,
    floods: &[FloodProcess],
    end_pod: fn(&FloodFixture<'_>, &str, &str),
) {
    let cluster = &fixture.rouse.cluster;
    let (pod, node) = cluster.wait("a serving pod", || fixture.serving_pods().first().cloned());
    end_pod(fixture, &pod, &node);
    fixture.rouse.cluster.wait("the pod to be gone, and another one", || {
        let is_present = fixture.pods().iter().any(|it| it["metadata"]["name"] == pod.as_str());
        (!is_present && !fixture.serving_pods().is_empty()).then_some(())
    });
    fixture.wait_progress(floods, 200);
}

fn delete(fixture: &FloodFixture<'_>, pod: &str, _: &str) {
    kubectl(
        fixture,
        &["delete", "pod", "--namespace", fixture.namespace_name(), pod, "--wait=false"],
    );
}

fn evict(fixture: &FloodFixture<'_>, pod: &str, _: &str) {
    evict_pod(&fixture.rouse.cluster, fixture.namespace_name(), pod);
}

/// Evicts a pod, as a drain of its node does.
pub(crate) fn evict_pod(cluster: &TestCluster, namespace: &str, pod: &str) {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/eviction");
    let body = serde_json::json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    });
    // Tests that run at the same time evict pods of different namespaces.
    let file = std::env::temp_dir().join(format!("rouse-evict-{namespace}"));
    std::fs::write(&file, body.to_string()).expect("a folder for temporary files");
    let evicted = cluster.kubectl(&["create", "--raw", &path, "-f", &file.to_string_lossy()]);
    let _gone = std::fs::remove_file(file);
    evicted.unwrap_or_else(|error| panic!("eviction of {pod}: {error}"));
}

/// Drains the node: all pods leave it, with activators, except for the test's clients.
fn drain(fixture: &FloodFixture<'_>, _: &str, node: &str) {
    let args = "--ignore-daemonsets --delete-emptydir-data --force --pod-selector app!=client";
    let args: Vec<&str> = args.split(' ').chain(["--timeout", "300s"]).collect();
    // `kubectl drain` leaves the node cordoned; this guard uncordons it.
    let _cordon = fixture.rouse.cordon(node);
    kubectl(fixture, &[&["drain", node][..], &args].concat());
}

fn kubectl(fixture: &FloodFixture<'_>, args: &[&str]) {
    let result = fixture.rouse.cluster.kubectl(args);
    result.unwrap_or_else(|error| panic!("{args:?}: {error}"));
}

#[test]
fn an_app_that_exits_at_once_on_sigterm_loses_no_request() {
    run_scenario("at-once", FloodAppOptions { exits_on_term: true, min_pods: 1 });
}

#[test]
#[ignore = "takes minutes: --long"]
fn an_app_that_shuts_down_gracefully_loses_no_request() {
    run_scenario("gracefully", FloodAppOptions { exits_on_term: false, min_pods: 1 });
}
