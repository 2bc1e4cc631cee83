//! Errors become conditions with Knative's reasons, and processing resumes when the cause is gone.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::load_process::assert_none_lost;
use tests::test_cluster::find_condition;

/// Waits until a condition is False for the given reason, and returns its message.
fn wait_condition_false(
    rouse: &RouseCluster,
    namespace: &str,
    object: (&str, &str),
    condition_type: &str,
    reason: &str,
) -> String {
    let (kind, name) = object;
    let mut last = Value::Null;
    let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rouse.cluster.wait(
            &format!("{kind}/{name} to be {condition_type}=False for {reason}"),
            || {
                let object = rouse.cluster.get(&[kind, "--namespace", namespace, name]);
                last = find_condition(&object, condition_type);
                (last["status"] == "False" && last["reason"] == reason).then_some(())
            },
        );
    }));
    assert!(looked.is_ok(), "{kind}/{name}: {last}");
    last["message"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_name_that_a_foreign_service_has_is_not_taken_from_it() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("owned");
    let namespace = &namespace.name;
    let foreign = "apiVersion: v1
kind: Service
metadata: {name: taken, labels: {whose: foreign}}
spec: {ports: [{port: 9000}]}
";
    rouse.apply(namespace, foreign).expect("any Service may be made");
    let before = rouse.cluster.get(&["service", "--namespace", namespace, "taken"]);
    rouse
        .apply(namespace, &service_manifest("taken", "", HELLO_CONTAINER))
        .expect("admission accepts it");
    let condition =
        wait_condition_false(&rouse, namespace, ("route", "taken"), "IngressReady", "NotOwned");
    assert!(condition.contains("\"taken\"") && condition.contains("do not own"), "{condition}");
    // The Service's own condition follows, with another write.
    let condition =
        wait_condition_false(&rouse, namespace, ("ksvc", "taken"), "RoutesReady", "NotOwned");
    assert!(condition.contains("\"taken\""), "{condition}");
    let after = rouse.cluster.get(&["service", "--namespace", namespace, "taken"]);
    assert_eq!(after["spec"], before["spec"], "the foreign object stays unchanged");
    assert_eq!(after["metadata"]["labels"], before["metadata"]["labels"]);

    rouse.delete(namespace, foreign).expect("its owner may delete it");
    rouse.wait_ready(namespace, "ksvc", "taken");
    rouse.client_on("node1").get(&rouse.service_url(namespace, "taken")).pod();
}

#[test]
fn an_unavailable_image_is_reported_on_revision_and_service() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("image");
    let namespace = &namespace.name;
    // One image whose tag cannot be resolved, and one that no node can pull.
    let unknown = service_manifest("unknown", "", "image: \"registry.invalid/nobody/nothing:v1\"");
    let absent = service_manifest("absent", "", "image: \"dev.local/nothing:v1\"");
    let exits = format!("{HELLO_CONTAINER}, env: [{{name: HELLO_EXIT, value: \"3\"}}]");
    let crashes = service_manifest("crashes", "", &exits);
    rouse
        .apply(namespace, &[unknown, absent, crashes].join("---\n"))
        .expect("admission accepts it");
    let revision = |name| ("revision", name);
    let condition = wait_condition_false(
        &rouse,
        namespace,
        revision("crashes-00001"),
        "ContainerHealthy",
        "ExitCode3",
    );
    assert!(
        condition.contains("HELLO_EXIT asks for exit code 3"),
        "the container's last output: {condition}"
    );
    let condition = wait_condition_false(
        &rouse,
        namespace,
        revision("unknown-00001"),
        "ContainerHealthy",
        "ContainerMissing",
    );
    assert!(condition.contains("registry.invalid/nobody/nothing:v1"), "{condition}");
    let condition = wait_condition_false(
        &rouse,
        namespace,
        ("ksvc", "unknown"),
        "ConfigurationsReady",
        "RevisionFailed",
    );
    assert!(
        condition.contains("unknown-00001") && condition.contains("Unable to fetch image"),
        "{condition}"
    );
    rouse.cluster.wait("the image that is absent to be said", || {
        let object = rouse.cluster.get(&["revision", "--namespace", namespace, "absent-00001"]);
        let ready = find_condition(&object, "Ready");
        let reason = ready["reason"].as_str().unwrap_or_default();
        let is_known = ["ImagePullBackOff", "ErrImagePull"].contains(&reason);
        (ready["status"] == "False" && is_known).then_some(())
    });
}

#[test]
fn pods_that_are_refused_or_unschedulable_are_reported() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("quota");
    let namespace = &namespace.name;
    let quota = "apiVersion: v1
kind: ResourceQuota
metadata: {name: none}
spec: {hard: {requests.memory: 1Mi}}
";
    rouse
        .apply(
            namespace,
            &service_manifest(
                "huge",
                "",
                &format!("{HELLO_CONTAINER}, resources: {{requests: {{cpu: 999}}}}"),
            ),
        )
        .expect("admission accepts it");
    wait_condition_false(
        &rouse,
        namespace,
        ("revision", "huge-00001"),
        "ResourcesAvailable",
        "Unschedulable",
    );
    wait_condition_false(
        &rouse,
        namespace,
        ("ksvc", "huge"),
        "ConfigurationsReady",
        "RevisionFailed",
    );

    rouse.apply(namespace, quota).expect("a quota may be made");
    rouse.cluster.wait("the quota to be in force", || {
        let object = rouse.cluster.get(&["resourcequota", "--namespace", namespace, "none"]);
        object["status"]["hard"].is_object().then_some(())
    });
    let yaml = service_manifest(
        "poor",
        "",
        &format!("{HELLO_CONTAINER}, resources: {{requests: {{memory: 16Mi}}}}"),
    );
    rouse.apply(namespace, &yaml).expect("admission accepts it");
    let condition = wait_condition_false(
        &rouse,
        namespace,
        ("revision", "poor-00001"),
        "ResourcesAvailable",
        "FailedCreate",
    );
    assert!(condition.contains("exceeded quota"), "{condition}");
    // Creation of the pod resumes when the quota is gone.
    rouse.delete(namespace, quota).expect("a quota may be deleted");
    rouse.wait_ready(namespace, "ksvc", "poor");
    rouse.client_on("node1").get(&rouse.service_url(namespace, "poor")).pod();
}

#[test]
fn deleted_objects_are_recreated_and_no_request_is_lost() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("deleted");
    let namespace = &namespace.name;
    rouse.apply_until_ready(
        namespace,
        &service_manifest("kept", ", autoscaling.knative.dev/min-scale: \"1\"", HELLO_CONTAINER),
    );
    let address = rouse.service_address(namespace, "kept");
    let args = ["--stages", "4x20s", "--path", "/?sleep=20", "--fresh-pct", "100"];
    let load = rouse.client_on("node1").start_load(&address, "kept", &args);
    let slices = rouse.cluster.get(&["endpointslices", "--namespace", namespace]);
    let slices_of_rouse = slices["items"].as_array().into_iter().flatten().find(|slice| {
        slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "rouse.dev"
    });
    let slice = slices_of_rouse.expect("the service has a slice of ours")["metadata"]["name"]
        .as_str()
        .expect("it has a name")
        .to_owned();
    let objects = [
        ("podautoscaler", "kept-00001"),
        ("sks", "kept-00001"),
        ("service", "kept-00001-private"),
        ("endpointslice", slice.as_str()),
    ];
    for (kind, name) in objects {
        delete_and_wait_recreated(&rouse, namespace, kind, name);
    }
    assert_none_lost(&load.finish(), 100);
    // These objects own pods and addresses, which also come back.
    for kind in ["deployment", "configuration", "route"] {
        let name = if kind == "deployment" { "kept-00001-deployment" } else { "kept" };
        delete_and_wait_recreated(&rouse, namespace, kind, name);
        rouse.wait_ready(namespace, "ksvc", "kept");
        rouse.cluster.wait("a response", || {
            let url = rouse.service_url(namespace, "kept");
            (rouse.client_on("node2").get(&url).status == 200).then_some(())
        });
    }
}

/// Deletes an object and waits until another one has its name.
fn delete_and_wait_recreated(rouse: &RouseCluster, namespace: &str, kind: &str, name: &str) {
    let read_uid = || {
        let object = rouse.cluster.get(&[kind, "--namespace", namespace, name]);
        object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
    };
    let original = read_uid();
    assert_ne!(original, "", "{kind}/{name} is not there at first");
    let args = ["delete", kind, "--namespace", namespace, name, "--wait=false"];
    rouse.cluster.kubectl(&args).expect("it may be deleted");
    rouse.cluster.wait(&format!("{kind}/{name} to be made again"), || {
        let after = read_uid();
        (!after.is_empty() && after != original).then_some(())
    });
}

/// Configuration and Route of a revision whose pods can never run, so that requests for it wait.
const UNSCHEDULABLE: &str = "
apiVersion: serving.knative.dev/v1
kind: Configuration
metadata: {name: pair}
spec:
  template:
    metadata:
      annotations: {autoscaling.knative.dev/initial-scale: \"0\"}
    spec:
      containers: [{image: \"dev.local/hello:v1\", resources: {requests: {cpu: 999}}}]
---
apiVersion: serving.knative.dev/v1
kind: Route
metadata: {name: pair}
spec: {traffic: [{configurationName: pair, percent: 100}]}
";

#[test]
fn requests_that_wait_for_a_deleted_object_get_an_error() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("unmade");
    let namespace = &namespace.name;
    for kinds in ["configuration", "configuration,route"] {
        rouse.apply(namespace, UNSCHEDULABLE).expect("admission accepts it");
        rouse.wait_ready(namespace, "route", "pair");
        let url = rouse.service_url(namespace, "pair");
        let response = std::thread::scope(|scope| {
            let request = scope.spawn(|| rouse.client_on("node1").get(&url));
            rouse.cluster.wait("a pod that fits nowhere", || {
                let pods = rouse.cluster.get(&["pods", "--namespace", namespace]);
                pods["items"].as_array().is_some_and(|all| !all.is_empty()).then_some(())
            });
            let args = ["delete", kinds, "--namespace", namespace, "pair"];
            rouse.cluster.kubectl(&args).expect("they may be deleted");
            request.join().expect("no panic")
        });
        assert!([404, 503].contains(&response.status), "{kinds}: {response}");
        // Later requests are refused at once; if the route is gone, by the gateway.
        let host = format!("pair.{namespace}.example.com");
        let later_response = rouse.get_through_gateway(&host, "/", &[]);
        assert!([404, 503].contains(&later_response.status), "{kinds}: {later_response}");
    }
}

#[test]
fn a_namespace_deleted_under_load_goes_and_harms_no_other() {
    let rouse = RouseCluster::shared();
    let (deleted_namespace, kept_namespace) = (rouse.namespace("goes"), rouse.namespace("stays"));
    let min_scale = ", autoscaling.knative.dev/min-scale: \"1\"";
    let mut addresses = Vec::new();
    for namespace in [&deleted_namespace, &kept_namespace] {
        let yaml = service_manifest("busy", min_scale, HELLO_CONTAINER);
        // Kubernetes retries the deletion of a namespace after half its pods' grace period, which is 300 s by
        // default.
        let yaml = yaml.replace("    spec:\n", "    spec:\n      timeoutSeconds: 20\n");
        rouse.apply_until_ready(&namespace.name, &yaml);
        addresses.push(rouse.service_address(&namespace.name, "busy"));
    }
    let args = ["--stages", "4x15s", "--path", "/?sleep=20"];
    let kept_load = rouse.client_on("node1").start_load(&addresses[1], "busy", &args);
    // Requests to the deleted namespace get no response.
    let args = [&args[..], &["--timeout-s", "5"]].concat();
    let deleted_load = rouse.client_on("node1").start_load(&addresses[0], "busy", &args);
    rouse
        .cluster
        .kubectl(&["delete", "namespace", &deleted_namespace.name, "--timeout=90s"])
        .expect("it goes");
    assert_none_lost(&kept_load.finish(), 100);
    let requests = deleted_load.finish();
    assert!(
        requests.iter().any(tests::load_process::LoadRequest::is_answered),
        "it was awake before"
    );
    // The controller still works: a new service becomes ready.
    rouse.apply_until_ready(&kept_namespace.name, &service_manifest("next", "", HELLO_CONTAINER));
}

/// Foreground deletion lets the garbage collector delete child objects first; none may be created again meanwhile.
#[test]
fn a_configuration_that_is_deleted_in_the_foreground_goes_for_good() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("foreground");
    let namespace = &namespace.name;
    let yaml = service_manifest("alone", "", HELLO_CONTAINER)
        .replace("kind: Service", "kind: Configuration");
    rouse.apply(namespace, &yaml).expect("admission accepts it");
    rouse.wait_ready(namespace, "configuration", "alone");
    let args = ["delete", "configuration", "--namespace", namespace, "alone"];
    let args = [&args[..], &["--cascade=foreground", "--wait=false"]].concat();
    rouse.cluster.kubectl(&args).expect("it may be deleted");
    rouse.cluster.wait("all of it to be gone", || {
        let kinds = "configurations,revisions,deployments,pods,podautoscalers,images.caching.internal.knative.dev";
        let list = rouse.cluster.get(&[kinds, "--namespace", namespace]);
        list["items"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
}
