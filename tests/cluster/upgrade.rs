//! Components of Rouse replaced and killed under load, and kubelet and containerd restarted: no request is lost, and
//! all counts return to zero, so that the service scales to zero.

use serde_json::Value;
use tests::flood::FloodProcess;
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};

use crate::mixed_load::{FloodAppOptions, FloodFixture, print_losses};

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
    let fixture =
        FloodFixture::new(&rouse, test, FloodAppOptions { exits_on_term: true, min_pods: 0 });
    let floods = fixture.start_floods();
    events(&fixture, &floods);
    fixture.finish_and_check(floods);
    rouse.wait_asleep(fixture.namespace_name(), "app");
}

fn kubectl(fixture: &FloodFixture<'_>, args: &[&str]) -> String {
    let result = fixture.rouse.cluster.kubectl(args);
    result.unwrap_or_else(|error| panic!("{args:?}: {error}"))
}

/// Waits until a component is fully rolled out.
fn wait_rolled_out(fixture: &FloodFixture<'_>, component: &str) {
    kubectl(
        fixture,
        &["rollout", "status", component, "--namespace", SYSTEM_NAMESPACE, "--timeout", "300s"],
    );
}

/// Containers of a component's pods without those that end: name of the node, and id.
fn container_ids(fixture: &FloodFixture<'_>, app: &str) -> Vec<(String, String)> {
    let mut pods = fixture.rouse.component_pods(app);
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name_and_id = |pod: &Value| {
        let id = text(&pod["status"]["containerStatuses"][0]["containerID"]);
        (text(&pod["spec"]["nodeName"]), id.trim_start_matches("containerd://").to_owned())
    };
    pods.iter().map(name_and_id).collect()
}

/// Sends SIGKILL to every replica of a component, one after the other.
fn kill_replicas(fixture: &FloodFixture<'_>, app: &str) {
    let socket = "/run/containerd/containerd.sock";
    let containers = container_ids(fixture, app);
    assert!(containers.len() >= 2, "{app}: {containers:?}");
    for (node, id) in containers {
        let args = ["ctr", "-a", socket, "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL"];
        let result = fixture.rouse.cluster.on_node(&node, &[&args[..], &[&id]].concat());
        result.unwrap_or_else(|error| panic!("{app} on {node}: {error}"));
        fixture.rouse.cluster.wait("another process of the component", || {
            let is_killed = |(_, it): &(String, String)| *it == id;
            (!container_ids(fixture, app).iter().any(is_killed)).then_some(())
        });
        let (kind, name) =
            COMPONENTS.iter().find(|(_, name)| *name == app).expect("a component of Rouse");
        wait_rolled_out(fixture, &format!("{kind}/{name}"));
    }
}

#[test]
fn every_component_is_rolled_under_load_and_nothing_is_lost() {
    under_load("rolled", |fixture, floods| {
        for (kind, name) in COMPONENTS {
            let component = format!("{kind}/{name}");
            kubectl(fixture, &["rollout", "restart", &component, "--namespace", SYSTEM_NAMESPACE]);
            wait_rolled_out(fixture, &component);
            fixture.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(name, floods);
        }
    });
}

/// The activator is excluded: the requests that it carries are lost with it, and no retry could be safe.
#[test]
fn agent_autoscaler_and_controller_are_killed_under_load_and_nothing_is_lost() {
    under_load("killed", |fixture, floods| {
        for app in ["rouse-agent", "autoscaler", "controller"] {
            kill_replicas(fixture, app);
            fixture.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(app, floods);
        }
    });
}

#[test]
fn kubelet_and_containerd_are_restarted_under_load_and_nothing_is_lost() {
    under_load("restarted", |fixture, floods| {
        for process in ["node1/kubelet", "node2/containerd"] {
            for action in ["kill", "start"] {
                let result = fixture.rouse.cluster.fault(action, process);
                result.unwrap_or_else(|error| panic!("{action} {process}: {error}"));
            }
            fixture.wait_progress(floods, RESPONSES_BETWEEN_EVENTS);
            print_losses(process, floods);
        }
    });
}
