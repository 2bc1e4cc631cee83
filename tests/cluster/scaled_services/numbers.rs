//! Number of pods of a scaled Service: users, manifests and autoscalers write it, and each of them is respected.

use std::thread;

use serde_json::Value;
use tests::installed_cluster::RouseCluster;
use tests::load_process::{LoadProcess, assert_none_lost};

use super::refusals::{find_refusal, wait_service_event};
use super::{HTTP_PORTS, ScaledApp};

/// Hook of a container that lets clients leave before its end. A pod that Rouse does not stop itself needs it, as in
/// plain Kubernetes.
const PRE_STOP: &str = ", lifecycle: {preStop: {sleep: {seconds: 5}}}";
/// Annotation by which `kubectl rollout restart` changes a template.
const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";

/// Time of the last restart in the annotations of a template or a pod.
fn restarted_at(object: &Value) -> &Value {
    &object["metadata"]["annotations"][RESTARTED_AT]
}

/// Restarts the Deployment, awake or asleep.
fn restart(app: &ScaledApp<'_>) {
    app.kubectl(&["rollout", "restart", "deployment", app.name]);
}

/// Waits until the workload has `count` ready pods, and all of them are of its present template.
fn wait_restarted_pods(app: &ScaledApp<'_>, count: usize) -> Vec<String> {
    let description = format!("{count} restarted pods of {}", app.name);
    app.rouse.cluster.wait(&description, || {
        let workload = app.workload();
        let expected = restarted_at(&workload["spec"]["template"]).as_str()?;
        let names = app.find_ready_pods(count)?;
        app.pods()?.iter().all(|pod| restarted_at(pod) == expected).then_some(names)
    })
}

/// Starts requests that keep the workload awake until the value is dropped: on a busy machine it would sleep before all of
/// its pods have started.
fn keep_awake(app: &ScaledApp<'_>, node: &str) -> LoadProcess {
    let args = ["--stages", "1x300s", "--path", "/?sleep=20"];
    app.rouse.client_on(node).start_load(&app.address(80), app.name, &args)
}

/// Asserts that kubectl shows the PodAutoscaler of the Service, whose Deployment sleeps.
fn check_autoscaler(app: &ScaledApp<'_>) {
    let expected = [app.name, "0", "0", "False", "NoTraffic"];
    app.rouse.cluster.wait("the status of a scaled Service asleep", || {
        let text = app.kubectl(&["get", "podautoscaler", app.name, "--no-headers"]);
        let cells: Vec<&str> = text.split_whitespace().collect();
        (cells == expected).then_some(())
    });
    let autoscaler = app.get("podautoscaler");
    let target = &autoscaler["spec"]["scaleTargetRef"];
    assert_eq!((&target["kind"], &target["name"]), (&"Deployment".into(), &app.name.into()));
    assert_eq!(autoscaler["metadata"]["labels"]["rouse.dev/scaled-service"], app.name);
}

#[test]
fn a_deployment_sleeps_by_its_service_and_wakes_with_the_number_of_its_user() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-web");
    let app = ScaledApp::deployment(&rouse, &namespace.name, "web");
    app.apply(&[app.workload_manifest(2, PRE_STOP), app.service_manifest(HTTP_PORTS)]);
    let service = app.get("service");
    app.wait_asleep();
    check_autoscaler(&app);

    let pod = app.request_from("node1");
    assert!(app.wait_pods(2).contains(&pod), "{pod} is one of its pods");
    let client = rouse.client_on("node1");
    let url = rouse.service_url(&namespace.name, app.name);
    rouse.cluster.wait("the direct path", || {
        let peer = client.get(&url).header("x-peer").to_owned();
        client.addresses().contains(&peer).then_some(())
    });
    // While it is awake, its user chooses another number, and restarts it under load.
    app.kubectl(&["scale", "deployment", "web", "--replicas=3"]);
    let args = ["--stages", "4x20s", "--path", "/?sleep=20"];
    let load = client.start_load(&app.address(80), app.name, &args);
    let awake = keep_awake(&app, "node1");
    app.wait_pods(3);
    restart(&app);
    wait_restarted_pods(&app, 3);
    assert_none_lost(&load.finish(), 100);
    drop(awake);
    app.wait_asleep();
    // A restart while it sleeps starts no pod. The next pods are of the new template.
    restart(&app);
    assert_eq!(app.replicas(), Some(0), "nothing has asked for a pod");
    let pod = app.request_from("node2");
    let awake = keep_awake(&app, "node2");
    assert!(wait_restarted_pods(&app, 3).contains(&pod), "{pod} is one of its pods");
    drop(awake);
    app.wait_asleep();
    // A number that its user writes while it sleeps wakes it, without a request.
    app.kubectl(&["scale", "deployment", "web", "--replicas=1"]);
    assert_eq!(app.wait_pods(1), [app.request_from("node1")]);
    assert_eq!(app.get("service")["spec"], service["spec"], "the Service stays its user's");
}

/// A GitOps tool applies its manifest again and again. Each time wakes the pods; the third time in a row, without any
/// request, shows that the manifest would have to change.
fn check_manifest(app: &ScaledApp<'_>) {
    let manifests = [app.workload_manifest(2, ""), app.service_manifest(HTTP_PORTS)];
    app.apply(&manifests);
    for _ in 0..2 {
        app.wait_asleep();
        app.apply(&manifests);
        app.wait_pods(2);
        assert_eq!(find_refusal(app), None, "it may have been a user");
    }
    app.wait_asleep();
    app.apply(&manifests);
    app.wait_pods(2);
    app.rouse.cluster.wait("a condition about the manifest", || {
        (find_refusal(app)? == "ReplicasManaged").then_some(())
    });
    let message = wait_service_event(app, "ReplicasManaged");
    assert!(message.contains("spec.replicas"), "{message}");
    app.wait_pods(2);
}

/// Manifest of a HorizontalPodAutoscaler. Without metrics, it only enforces its bounds.
fn autoscaler_manifest(name: &str, min_replicas: u32) -> String {
    format!(
        "apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{name: {name}}}
spec:
  scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: {name}}}
  minReplicas: {min_replicas}
  maxReplicas: 4
  metrics: [{{type: Resource, resource: {{name: memory, target: {{type: AverageValue, averageValue: 1Gi}}}}}}]
"
    )
}

/// Number that Rouse has written last.
fn scaled_to(app: &ScaledApp<'_>) -> Value {
    app.workload()["metadata"]["annotations"]["rouse.dev/scaled-to"].clone()
}

/// An HPA keeps the number from one on: Rouse writes only zero, and the HPA's minimum from there.
fn check_horizontal_autoscaler(app: &ScaledApp<'_>) {
    let service = app.service_manifest(HTTP_PORTS);
    app.apply(&[autoscaler_manifest(app.name, 2), app.workload_manifest(1, ""), service]);
    app.wait_asleep();
    app.request_from("node1");
    app.wait_pods(2);
    assert_eq!(scaled_to(app), "2", "Rouse starts with the minimum of the HPA");

    app.apply(&[autoscaler_manifest(app.name, 3)]);
    app.rouse.cluster.wait("the pods of the HPA", || {
        // Requests keep it awake until the HPA looks at it.
        app.request_from("node1");
        app.find_ready_pods(3)
    });
    assert_eq!(scaled_to(app), "2", "the third one is the HPA's");
    app.wait_asleep();
    app.request_from("node2");
    app.wait_pods(3);
}

#[test]
fn numbers_that_manifests_and_horizontal_autoscalers_write_are_respected() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-numbers");
    let managed = ScaledApp::deployment(&rouse, &namespace.name, "managed");
    let measured = ScaledApp::deployment(&rouse, &namespace.name, "measured");
    thread::scope(|scope| {
        scope.spawn(|| check_manifest(&managed));
        check_horizontal_autoscaler(&measured);
    });
}
