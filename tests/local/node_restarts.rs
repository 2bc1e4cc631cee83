//! Local nodes that end, are killed or are taken down, and the next run: pods are adopted or removed.

use std::path::Path;
use std::time::Duration;

use common::local_node::{LocalPodSpec, PodRunPhase};
use local::{NodeLayout, NodeManager};
use serde_json::json;
use tests::test_node::{TestNode, find_leftovers, pod_ip, pod_spec};

use crate::pods::{exec_probe, get_greeting};

#[test]
fn a_pod_is_as_ready_after_a_restart_of_the_node_as_before() {
    let mut node = TestNode::new("ready-kept");
    let extra = json!({ "container": { "readinessProbe": exec_probe(&["need=/ready"]), "startupProbe": exec_probe(&[]) } });
    let pod =
        LocalPodSpec { kubelet_probes: true, ..pod_spec("a", &["touch=/ready", "wait"], extra) };
    node.set_pods([pod.clone()]);
    node.wait_pod("a ready pod", "a", |pod| pod.ready);
    node.detach();
    let mut next = TestNode::attach(node.layout.clone(), None, Vec::new());
    next.set_pods([pod]);
    let status = next.wait_pod("its first status", "a", |_| true);
    next.detach();
    assert!(status.ready, "{status:?}");
}

#[test]
fn pods_outlive_the_node_s_process_and_are_adopted() {
    let mut node = TestNode::new("adopt");
    let keep = pod_spec("a", &["listen=80"], json!({}));
    let stop = pod_spec("b", &["wait"], json!({}));
    node.set_pods([keep.clone(), stop]);
    node.wait("both running", |pods| {
        pods.len() == 2 && pods.values().all(|pod| pod.phase == PodRunPhase::Running)
    });
    let before = node.statuses["a"].clone();
    node.detach();
    let mut next = TestNode::attach(node.layout.clone(), None, Vec::new());
    next.wait("both adopted", |pods| {
        pods.len() == 2 && pods.values().all(|pod| pod.phase == PodRunPhase::Running)
    });
    assert_eq!(next.statuses["a"].addresses, before.addresses);
    assert_eq!(get_greeting(&next, pod_ip(&before), 80), "hello\n");
    next.set_pods([keep]);
    next.wait_pod("the orphan gone", "b", |pod| pod.phase == PodRunPhase::Removed);
    assert_eq!(get_greeting(&next, pod_ip(&before), 80), "hello\n");
    next.set_pods([]);
    next.wait_pod("all gone", "a", |pod| pod.phase == PodRunPhase::Removed);
}

#[test]
fn down_leaves_nothing_and_a_second_run_starts_clean() {
    let mut node = TestNode::new("down");
    for _ in 0..2 {
        node.set_pods([pod_spec("a", &["stubborn", "wait"], json!({}))]);
        node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
        assert!(!find_leftovers(node.layout.name()).is_empty());
        node.detach();
        NodeManager::destroy(&node.layout).expect("a node that can be removed");
        assert_eq!(find_leftovers(node.layout.name()), [] as [String; 0]);
        NodeManager::destroy(&node.layout).expect("removing twice does no harm");
        let layout = node.layout.clone();
        drop(node);
        assert!(!Path::new("/var/lib/rouse").join(layout.name()).exists());
        node = TestNode::new("down");
    }
}

/// Main function of the process that `a_killed_node_is_adopted_or_removed` kills; not a test itself.
#[test]
#[ignore = "run by a_killed_node_is_adopted_or_removed"]
fn serve_until_killed() {
    let Ok(name) = std::env::var("ROUSE_TEST_NODE") else { return };
    let layout = NodeLayout::new(&name).expect("a short name");
    let mut node = TestNode::attach(layout.clone(), None, Vec::new());
    NodeManager::register_component(&layout, "up").expect("the only process of the node");
    node.set_pods([pod_spec("a", &["listen=80"], json!({}))]);
    node.wait("being killed", |_| false);
}

/// Runs the node in a process of its own until its pod has started, then kills that process.
fn run_and_kill(layout: &NodeLayout) {
    let mut command = std::process::Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", "node_restarts::serve_until_killed", "--ignored", "--nocapture"]);
    let output = std::fs::File::create("/dev/null").expect("/dev/null");
    command.env("ROUSE_TEST_NODE", layout.name()).stdout(output);
    let mut child = command.spawn().expect("a process");
    let pid_file = layout.bundle("a", "web").join("pid");
    let has_started = (0..600).any(|_| {
        let exists = pid_file.exists();
        if !exists {
            tests::wait::sleep(Duration::from_millis(100));
        }
        exists
    });
    let is_refused = NodeManager::register_component(layout, "up").is_err();
    child.kill().expect("a process that runs");
    child.wait().expect("a child");
    // Removes the images of the killed process, which could not remove them itself.
    tests::leftovers::remove_leftovers();
    // Only now: a node that still ran would disturb all later tests.
    assert!(
        has_started,
        "no pod started on node {}: {} is missing",
        layout.name(),
        pid_file.display()
    );
    assert!(is_refused, "two nodes of one name");
}

#[test]
fn a_killed_node_is_adopted_or_removed() {
    let mut node = TestNode::new("kill");
    node.detach();
    run_and_kill(&node.layout);
    let mut next = TestNode::attach(node.layout.clone(), None, Vec::new());
    let status = next.wait_pod("an adopted pod", "a", |pod| pod.phase == PodRunPhase::Running);
    assert_eq!(get_greeting(&next, pod_ip(&status), 80), "hello\n");
    next.set_pods([pod_spec("b", &["wait"], json!({}))]);
    next.wait_pod("the orphan gone", "a", |pod| pod.phase == PodRunPhase::Removed);
    next.wait_pod("the next pod", "b", |pod| pod.phase == PodRunPhase::Running);
    next.set_pods([]);
    next.wait_pod("the next pod gone", "b", |pod| pod.phase == PodRunPhase::Removed);
    next.detach();
    run_and_kill(&node.layout);
    NodeManager::destroy(&node.layout).expect("a node that can be removed");
    assert_eq!(find_leftovers(node.layout.name()), [] as [String; 0]);
}
