//! Services that cannot sleep: a condition of their PodAutoscaler and an Event on the Service name the reason.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::test_cluster::{HELLO_IMAGE, find_condition};

use super::{HTTP_PORTS, ScaledApp, scaled_service};

/// Reasons that keep a Service from sleeping until it or its workload changes.
const REASONS: [&str; 13] = [
    "InvalidAnnotation",
    "Headless",
    "ExternalName",
    "NoSelector",
    "NoWorkload",
    "SeveralWorkloads",
    "WorkloadTaken",
    "HostNetwork",
    "VolumesDeleted",
    "InternalTrafficPolicyLocal",
    "NoTcpPort",
    "NameTaken",
    "ReplicasManaged",
];

/// Services that are refused for themselves or for their workload: name, spec and reason.
fn refused_services() -> [(&'static str, String, &'static str); 10] {
    let http = |settings: &str| format!("{settings}{HTTP_PORTS}");
    [
        ("headless", http("clusterIP: None, selector: {app: idle}, "), "Headless"),
        ("external", http("type: ExternalName, externalName: example.com, "), "ExternalName"),
        ("unselective", http(""), "NoSelector"),
        ("alone", http("selector: {app: absent}, "), "NoWorkload"),
        ("two-workloads", http("selector: {app: pair}, "), "SeveralWorkloads"),
        ("a-pod-beside", http("selector: {app: mixed}, "), "SeveralWorkloads"),
        ("on-the-host", http("selector: {app: host}, "), "HostNetwork"),
        (
            "for-its-node",
            http("internalTrafficPolicy: Local, selector: {app: idle}, "),
            "InternalTrafficPolicyLocal",
        ),
        ("of-knative", http("selector: {app: idle}, "), "NameTaken"),
        (
            "datagrams",
            "selector: {app: idle}, ports: [{port: 53, protocol: UDP}]".to_owned(),
            "NoTcpPort",
        ),
    ]
}

/// Manifest of a Deployment without pods, whose pods would have the label `app`. `pod` begins its template's spec.
fn idle_deployment(name: &str, app: &str, pod: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: 0
  selector: {{matchLabels: {{app: {app}, part: {name}}}}}
  template:
    metadata: {{labels: {{app: {app}, part: {name}}}}}
    spec: {{{pod}containers: [{{name: hello, image: \"{HELLO_IMAGE}\"}}]}}
"
    )
}

/// Manifest of a pod without an owner, which fits on no node.
fn bare_pod(name: &str, app: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {app}}}}}
spec: {{nodeSelector: {{fits: nowhere}}, containers: [{{name: hello, image: \"{HELLO_IMAGE}\"}}]}}
"
    )
}

/// Reason for which the Service does not sleep, by its PodAutoscaler; `None` if there is none.
pub(super) fn find_refusal(app: &ScaledApp<'_>) -> Option<String> {
    let condition = find_condition(&app.get("podautoscaler"), "Ready");
    let reason = condition["reason"].as_str()?;
    (condition["status"] == "False" && REASONS.contains(&reason)).then(|| reason.to_owned())
}

/// Waits for an Event on the Service, and returns its message.
pub(super) fn wait_service_event(app: &ScaledApp<'_>, reason: &str) -> String {
    let description = format!("an Event {reason} on {}", app.name);
    app.rouse.cluster.wait(&description, || {
        let list = app.rouse.cluster.get(&["events", "--namespace", app.namespace]);
        let is_expected = |event: &&Value| {
            let object = &event["involvedObject"];
            event["reason"] == reason
                && object["apiVersion"] == "v1"
                && object["kind"] == "Service"
                && object["name"] == app.name
        };
        let event = list["items"].as_array()?.iter().find(is_expected)?;
        Some(event["message"].as_str()?.to_owned())
    })
}

fn wait_refused(app: &ScaledApp<'_>, reason: &str) {
    let description = format!("{} to be refused: {reason}", app.name);
    app.rouse.cluster.wait(&description, || (find_refusal(app)? == reason).then_some(()));
    let message = wait_service_event(app, reason);
    assert!(!message.is_empty(), "{}: {reason} without an explanation", app.name);
}

/// Waits until the Service is no longer refused, or never was.
fn wait_accepted(app: &ScaledApp<'_>) {
    app.rouse.cluster.wait(&format!("{} to be accepted", app.name), || {
        let is_decided = app.get("podautoscaler")["status"]["conditions"].is_array();
        (is_decided && find_refusal(app).is_none()).then_some(())
    });
}

/// Creates a Service that is younger than another one by their creation times, which are in whole seconds.
fn apply_younger(younger: &ScaledApp<'_>, older: &ScaledApp<'_>, spec: &str) {
    let created = |app: &ScaledApp<'_>| app.get("service")["metadata"]["creationTimestamp"].clone();
    older.rouse.cluster.wait("another second", || {
        younger.apply(&[scaled_service(younger.name, spec)]);
        if created(younger) != created(older) {
            return Some(());
        }
        younger.kubectl(&["delete", "service", younger.name]);
        None
    });
}

#[test]
fn each_refusal_is_a_condition_of_the_autoscaler_and_an_event_on_the_service() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-refused");
    let namespace = &namespace.name;
    let app = |name: &'static str| ScaledApp::deployment(&rouse, namespace, name);
    let workloads = [
        idle_deployment("idle", "idle", ""),
        idle_deployment("pair-a", "pair", ""),
        idle_deployment("pair-b", "pair", ""),
        idle_deployment("mixed", "mixed", ""),
        idle_deployment("host", "host", "hostNetwork: true, "),
        idle_deployment("shared", "shared", ""),
        bare_pod("stray", "mixed"),
    ];
    let of_shared = format!("selector: {{app: shared}}, {HTTP_PORTS}");
    let of_idle = format!("selector: {{app: idle}}, {HTTP_PORTS}");
    let misspelt = scaled_service("misspelt", &of_idle);
    let misspelt = misspelt.replace("annotations: {", "annotations: {rouse.dev/protocol: udp, ");
    let refused = refused_services();
    let services = refused.iter().map(|(name, spec, _)| scaled_service(name, spec));
    let services = services.chain([misspelt, scaled_service("older", &of_shared)]);
    let services: Vec<String> = services.collect();
    rouse.apply(namespace, &[&workloads[..], &services].concat().join("---\n")).expect("valid");
    let (older, younger) = (app("older"), app("younger"));
    wait_accepted(&older);
    apply_younger(&younger, &older, &of_shared);
    let asleep = ", autoscaling.knative.dev/initial-scale: \"0\"";
    let knative = service_manifest("of-knative", asleep, HELLO_CONTAINER);
    rouse.apply(namespace, &knative).expect("admission accepts it");
    for &(name, _, reason) in &refused {
        wait_refused(&app(name), reason);
    }
    wait_refused(&app("misspelt"), "InvalidAnnotation");
    wait_refused(&younger, "WorkloadTaken");

    // A refusal ends with its reason.
    rouse.apply(namespace, &idle_deployment("late", "absent", "")).expect("it is valid");
    wait_accepted(&app("alone"));
    older.kubectl(&["delete", "service", older.name]);
    wait_accepted(&younger);
}
