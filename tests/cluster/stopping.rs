//! Pods that stop under load for any reason: every request is answered, and none is served twice.
//!
//! `ROUSE_STOPPING_REQUESTS` is the least number of requests of each test, `ROUSE_LONG_REQUEST_S` the length of the
//! longest in seconds, which the timeout of the service (60 s) bounds.
#![allow(clippy::print_stdout, reason = "how the load fares is for who reads the test's output")]

use serde_json::Value;
use tests::flood::FloodProcess;
use tests::installed::RouseCluster;

use crate::flooded::{FloodAppOptions, FloodFixture, LATEST_TRAFFIC, print_losses};

/// Additional clients that need more than two pods: a pod's target is
/// [`TARGET_CONCURRENCY`](crate::flooded::TARGET_CONCURRENCY).
const PULSE_CLIENTS: [&str; 2] = ["slow-get=115", "slow-post=115"];
/// Default number of requests of a test.
const REQUESTS: u64 = 20_000;
/// First id of the pulses, apart from the other clients' ids.
const PULSE_FIRST_ID: u64 = 1_000;

fn run_scenario(test: &str, at_once: bool) {
    let rouse = RouseCluster::shared();
    let mut scene =
        FloodFixture::new(&rouse, test, FloodAppOptions { exits_on_term: at_once, min_pods: 1 });
    let most = std::env::var("ROUSE_STOPPING_REQUESTS").ok().and_then(|it| it.parse().ok());
    let most: u64 = most.unwrap_or(REQUESTS);
    let floods = scene.start_floods();
    let mut serving = "app-v1".to_owned();
    for round in 1.. {
        serving = end_pods_in_every_way(&mut scene, &floods, round, &serving);
        let answered: u64 = floods.iter().map(FloodProcess::answered).sum();
        println!("round {round}: {answered} of {most}");
        if answered >= most {
            break;
        }
    }
    scene.finish_and_check(floods);
}

/// Ends pods in every way, one after the other. Returns the Revision that serves afterwards.
fn end_pods_in_every_way(
    scene: &mut FloodFixture<'_>,
    floods: &[FloodProcess],
    round: u64,
    serving: &str,
) -> String {
    scale_out_and_in(scene, floods, round);
    print_losses("scale-in", floods);
    scene.version += 1;
    let new = format!("app-v{}", scene.version);
    shift_traffic(scene, LATEST_TRAFFIC, &new);
    print_losses("rollout", floods);
    // Every other round rolls back to the previous revision.
    let back = round % 2 == 1;
    if back {
        shift_traffic(scene, &format!("[{{revisionName: {serving}, percent: 100}}]"), serving);
        print_losses("rollback", floods);
    }
    end_one_pod(scene, floods, delete);
    print_losses("delete", floods);
    end_one_pod(scene, floods, evict);
    print_losses("evict", floods);
    end_one_pod(scene, floods, drain);
    print_losses("drain", floods);
    if back { serving.to_owned() } else { new }
}

/// Moves all traffic to another revision, and waits until the previous one's pods have ended.
fn shift_traffic(scene: &FloodFixture<'_>, traffic: &str, to: &str) {
    scene
        .rouse
        .apply(scene.namespace_name(), &scene.service_manifest(traffic))
        .expect("admission takes it");
    scene.rouse.cluster.wait(&format!("only pods of {to}"), || {
        let all = scene.pods();
        let its = |pod: &Value| pod["metadata"]["labels"]["serving.knative.dev/revision"] == to;
        (!all.is_empty() && all.iter().all(its)).then_some(())
    });
}

/// Scales 1 → 3 → 1 pods by additional load that comes and goes.
fn scale_out_and_in(scene: &FloodFixture<'_>, floods: &[FloodProcess], round: u64) {
    let pulse = scene.flood_from_node("node1", PULSE_FIRST_ID + round, &PULSE_CLIENTS);
    let cluster = &scene.rouse.cluster;
    cluster.wait("three pods", || (scene.serving_pods().len() >= 3).then_some(()));
    scene.wait_progress(floods, 500);
    scene.check_outcome("pulse", &pulse.stop());
    cluster.wait("one pod again", || {
        (scene.pods().len() == 1 && scene.serving_pods().len() == 1).then_some(())
    });
}

/// Ends one pod from outside by the function `end`, which gets the pod's name and its node.
fn end_one_pod(
    scene: &FloodFixture<'_>,
    floods: &[FloodProcess],
    end: fn(&FloodFixture<'_>, &str, &str),
) {
    let (pod, node) = scene.serving_pods().first().expect("there is one").clone();
    end(scene, &pod, &node);
    scene.rouse.cluster.wait("the pod to be gone, and another one", || {
        let there = scene.pods().iter().any(|it| it["metadata"]["name"] == pod.as_str());
        (!there && !scene.serving_pods().is_empty()).then_some(())
    });
    scene.wait_progress(floods, 200);
}

fn delete(scene: &FloodFixture<'_>, pod: &str, _: &str) {
    kubectl(scene, &["delete", "pod", "--namespace", scene.namespace_name(), pod, "--wait=false"]);
}

fn evict(scene: &FloodFixture<'_>, pod: &str, _: &str) {
    let path = format!("/api/v1/namespaces/{}/pods/{pod}/eviction", scene.namespace_name());
    let body = serde_json::json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod, "namespace": scene.namespace_name()},
    });
    let file = std::env::temp_dir().join(format!("rouse-evict-{}", std::process::id()));
    std::fs::write(&file, body.to_string()).expect("a folder for temporary files");
    kubectl(scene, &["create", "--raw", &path, "-f", &file.to_string_lossy()]);
    let _gone = std::fs::remove_file(file);
}

/// Drains the node: all pods leave it, with activators, except for the test's clients.
fn drain(scene: &FloodFixture<'_>, _: &str, node: &str) {
    let words = "--ignore-daemonsets --delete-emptydir-data --force --pod-selector app!=client";
    let words: Vec<&str> = words.split(' ').chain(["--timeout", "300s"]).collect();
    let _cordon = scene.rouse.cordon(node);
    kubectl(scene, &[&["drain", node][..], &words].concat());
}

fn kubectl(scene: &FloodFixture<'_>, words: &[&str]) {
    let said = scene.rouse.cluster.kubectl(words);
    said.unwrap_or_else(|said| panic!("{words:?}: {said}"));
}

#[test]
fn an_app_that_leaves_at_once_loses_no_request() {
    run_scenario("at-once", true);
}

#[test]
#[ignore = "takes minutes: --long"]
fn an_app_that_leaves_in_its_own_time_loses_no_request() {
    run_scenario("gracefully", false);
}
