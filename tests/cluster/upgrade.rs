//! Components of Rouse replaced and killed under load, and kubelet and containerd restarted: no request is lost, and
//! all counts return to zero, so that the service scales to zero.

use serde_json::Value;
use tests::flood::FloodProcess;
use tests::installed::{RouseCluster, SYSTEM_NAMESPACE};

use crate::flooded::{FloodAppOptions, FloodFixture, print_losses};

/// Components: kind and name, which is also the value of the label `app`.
const COMPONENTS: [(&str, &str); 4] = [
    ("daemonset", "rouse-agent"),
    ("deployment", "activator"),
    ("deployment", "autoscaler"),
    ("deployment", "controller"),
];
/// Number of responses that each client gets between two events.
const RESPONSES_BETWEEN_EVENTS: u64 = 300;

/// Runs `events` under load, then checks all requests and waits until the service is asleep.
fn under_load(test: &str, events: impl FnOnce(&FloodFixture<'_>, &[FloodProcess])) {
    let rouse = RouseCluster::shared();
    let scene =
        FloodFixture::new(&rouse, test, FloodAppOptions { exits_on_term: true, min_pods: 0 });
    let floods = scene.start_floods();
    events(&scene, &floods);
    scene.finish_and_check(floods);
    rouse.wait_asleep(scene.namespace_name(), "app");
}

fn kubectl(scene: &FloodFixture<'_>, words: &[&str]) -> String {
    let said = scene.rouse.cluster.kubectl(words);
    said.unwrap_or_else(|said| panic!("{words:?}: {said}"))
}

/// Waits until a component is fully rolled out.
fn wait_rolled_out(scene: &FloodFixture<'_>, part: &str) {
    kubectl(
        scene,
        &["rollout", "status", part, "--namespace", SYSTEM_NAMESPACE, "--timeout", "300s"],
    );
}

fn container_ids(scene: &FloodFixture<'_>, app: &str) -> Vec<(String, String)> {
    let selector = format!("app={app}");
    let list = scene.rouse.cluster.get(&[
        "pods",
        "--namespace",
        SYSTEM_NAMESPACE,
        "--selector",
        &selector,
    ]);
    let all = list["items"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let one = |pod: &Value| {
        let id = text(&pod["status"]["containerStatuses"][0]["containerID"]);
        (text(&pod["spec"]["nodeName"]), id.trim_start_matches("containerd://").to_owned())
    };
    all.iter().map(one).collect()
}

/// Sends SIGKILL to every replica of a component, one after the other.
fn kill_replicas(scene: &FloodFixture<'_>, app: &str) {
    let socket = "/run/containerd/containerd.sock";
    for (node, id) in container_ids(scene, app) {
        let words = ["ctr", "-a", socket, "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL"];
        let said = scene.rouse.cluster.on_node(&node, &[&words[..], &[&id]].concat());
        said.unwrap_or_else(|said| panic!("{app} on {node}: {said}"));
        scene.rouse.cluster.wait("another process of the part", || {
            let old = |(_, it): &(String, String)| *it == id;
            (!container_ids(scene, app).iter().any(old)).then_some(())
        });
        let (kind, name) =
            COMPONENTS.iter().find(|(_, name)| *name == app).expect("a part of ours");
        wait_rolled_out(scene, &format!("{kind}/{name}"));
    }
}

#[test]
fn every_component_is_rolled_under_load_and_nothing_is_lost() {
    under_load("rolled", |scene, floods| {
        for (kind, name) in COMPONENTS {
            let part = format!("{kind}/{name}");
            kubectl(scene, &["rollout", "restart", &part, "--namespace", SYSTEM_NAMESPACE]);
            wait_rolled_out(scene, &part);
            scene.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(name, floods);
        }
    });
}

/// The activator is excluded: the requests that it carries are lost with it, and no retry could be safe.
#[test]
fn agent_autoscaler_and_controller_are_killed_under_load_and_nothing_is_lost() {
    under_load("killed", |scene, floods| {
        for app in ["rouse-agent", "autoscaler", "controller"] {
            kill_replicas(scene, app);
            scene.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(app, floods);
        }
    });
}

#[test]
fn kubelet_and_containerd_are_restarted_under_load_and_nothing_is_lost() {
    under_load("restarted", |scene, floods| {
        for process in ["node1/kubelet", "node2/containerd"] {
            for action in ["kill", "start"] {
                let said = scene.rouse.cluster.fault(action, process);
                said.unwrap_or_else(|said| panic!("{action} {process}: {said}"));
            }
            scene.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(process, floods);
        }
    });
}
